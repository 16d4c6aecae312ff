//! Answers about datasets. (What a caller asks for is `forebay_dataset::DatasetSpec`: it is checked
//! as it is read.)

use crate::ErrorDocument;
use serde::{Deserialize, Serialize};

/// What is known of an open dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Description {
    /// The identity of this version of it, by which requests name it.
    pub id: String,
    /// The format of its files, as `parquet` or `jsonl`.
    pub format: String,
    /// Rows of all files.
    pub rows: u64,
    /// Blocks of all files: what is fetched and decoded at a time.
    pub blocks: u64,
    /// How many files it has.
    pub files: u64,
    /// Of all files.
    pub bytes: u64,
    /// The columns that are read where none are named.
    pub schema: Vec<Column>,
    /// Columns that are read only where they are asked for by name: the lines of JSONL.
    pub besides: Vec<Column>,
    /// What its index takes at the node.
    pub memory_bytes: u64,
}

/// A column of a dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Column {
    /// As rows are asked for by.
    pub name: String,
    /// Arrow's name of it; `Json`: text that is the JSON of values without a type in common.
    #[serde(rename = "type")]
    pub data_type: String,
    /// Whether rows may lack a value.
    pub nullable: bool,
}

/// `GET /v1/datasets`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Datasets {
    /// Those that are open and that the caller may read.
    pub datasets: Vec<Description>,
}

/// `POST /v1/datasets`: the dataset, and how it was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenedDataset {
    /// What was opened.
    #[serde(flatten)]
    pub dataset: Description,
    /// Milliseconds.
    pub opened_ms: f64,
    /// Files whose index was read now.
    pub indexed_files: u64,
    /// Bytes that were read for it.
    pub indexed_bytes: u64,
    /// Files whose index was known.
    pub reused_files: u64,
    /// The dataset that the same description meant at the last opening, if its files were others.
    pub previous: Option<String>,
    /// Damaged files that were left out.
    pub skipped_files: u64,
    /// The first of them, and what is wrong with each.
    pub skipped: Vec<SkippedFile>,
    /// Names that cannot be read through this node.
    pub unreadable_names: u64,
    /// One of them; `None` if there are none.
    pub unreadable_name: Option<String>,
}

/// A damaged file that was left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SkippedFile {
    /// The object, `bucket/key`.
    pub name: String,
    /// What is wrong with it.
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
    /// Files whose index was read so far.
    pub indexed: u64,
    /// Bytes that were read for it.
    pub bytes: u64,
}

/// One line of `POST /v1/datasets?progress=true`. The last one is `Opened` or `Error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum OpenEvent {
    /// How far it is; comes now and then.
    Progress(OpenProgress),
    /// The dataset is open.
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
