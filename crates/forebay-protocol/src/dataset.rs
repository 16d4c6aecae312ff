//! Answers about datasets. (What a caller asks for is `forebay_dataset::DatasetSpec`: it is checked
//! as it is read.)

use crate::ErrorDocument;
use serde::{Deserialize, Serialize};

/// What is known of an open dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Description {
    pub id: String,
    pub format: String,
    pub rows: u64,
    pub blocks: u64,
    pub files: u64,
    /// Of all files.
    pub bytes: u64,
    pub schema: Vec<Column>,
    /// Columns that are read only where they are asked for by name: the lines of JSONL.
    pub besides: Vec<Column>,
    /// What its index takes at the node.
    pub memory_bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Column {
    pub name: String,
    /// Arrow's name of it; `Json`: text that is the JSON of values without a type in common.
    #[serde(rename = "type")]
    pub data_type: String,
    pub nullable: bool,
}

/// `GET /v1/datasets`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Datasets {
    pub datasets: Vec<Description>,
}

/// `POST /v1/datasets`: the dataset, and how it was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenedDataset {
    #[serde(flatten)]
    pub dataset: Description,
    /// Milliseconds.
    pub opened_ms: f64,
    /// Files whose index was read now, and what was read for it.
    pub indexed_files: u64,
    pub indexed_bytes: u64,
    /// Files whose index was known.
    pub reused_files: u64,
    /// The dataset that the same description meant at the last opening, if its files were others.
    pub previous: Option<String>,
    /// Damaged files that were left out, and why; `skipped` holds the first of them.
    pub skipped_files: u64,
    pub skipped: Vec<SkippedFile>,
    /// Names that cannot be read through this node, and one of them.
    pub unreadable_names: u64,
    pub unreadable_name: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SkippedFile {
    pub name: String,
    pub message: String,
}

/// How far an opening is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenProgress {
    /// Files found so far.
    pub listed: u64,
    /// Pages of listings that came.
    pub pages: u64,
    /// Files whose index has to be read; 0 while the listing goes on.
    pub to_index: u64,
    pub indexed: u64,
    /// Bytes that were read for it.
    pub bytes: u64,
}

/// One line of `POST /v1/datasets?progress=true`. The last one is `Opened` or `Error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum OpenEvent {
    Progress(OpenProgress),
    Opened(Box<OpenedDataset>),
    /// The head of the answer is out: the status is in the line.
    Error(Box<ErrorDocument>),
    /// Of a later release.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::{Error, ErrorKind};

    #[test]
    fn events_say_which_they_are() {
        let events = [
            OpenEvent::Progress(OpenProgress {
                listed: 3,
                ..OpenProgress::default()
            }),
            OpenEvent::Opened(Box::default()),
            OpenEvent::Error(Box::new(ErrorDocument::of(
                &Error::corrupt("bk/a: no footer").hint("look at it"),
            ))),
        ];
        for (event, name) in events.into_iter().zip(["progress", "opened", "error"]) {
            let json = serde_json::to_value(&event).unwrap();
            assert_eq!(json["event"], name);
            assert_eq!(serde_json::from_value::<OpenEvent>(json).unwrap(), event);
        }
        let later = serde_json::from_str(r#"{"event": "dream"}"#).unwrap();
        assert_eq!(OpenEvent::Other, later);
        let line = r#"{"event": "error", "status": 502, "code": "corrupt", "message": "m"}"#;
        let OpenEvent::Error(e) = serde_json::from_str(line).unwrap() else {
            panic!("no error")
        };
        assert_eq!(e.kind(), ErrorKind::Corrupt);
    }
}
