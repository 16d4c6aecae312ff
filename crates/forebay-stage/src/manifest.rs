//! `manifest.json`: what makes the objects under a prefix a checkpoint.

use crate::{journal::Journal, stages::ended};
use forebay_core::{Error, ErrorKind, ObjectName, Result};
use forebay_engine::{Engine, ReadOptions};
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

/// The name of the object that is written last.
pub const MANIFEST: &str = "manifest.json";
/// Its largest size.
pub(crate) const MANIFEST_MAX_BYTES: u64 = 64 << 20;
/// Longer ETags are not noted.
pub(crate) const ETAG_MAX_BYTES: usize = 128;
/// Larger ones, of hundreds of files, are parsed away from the runtime's threads.
const SMALL_BYTES: usize = 64 << 10;
const VERSION: u32 = 1;

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// As its writer called it. Its key is `<prefix>/<id>/<name>`.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// As the origin said when it was written, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
}

/// A checkpoint, as its readers need it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of this document.
    pub forebay_checkpoint: u32,
    /// Of this checkpoint, among all that had its name.
    pub id: String,
    /// When all of it was staged, in milliseconds since the Unix epoch.
    pub saved_ms: i64,
    /// All files.
    pub files: Vec<ManifestFile>,
    /// Files that are at `<prefix>/<name>` too.
    #[serde(default)]
    pub last: Vec<String>,
    /// Bytes of all files.
    pub bytes: u64,
    /// What its writer wants to be told again.
    #[serde(default)]
    pub meta: serde_json::Value,
}

impl Manifest {
    /// What the manifest of a committed checkpoint says, as far as it is known.
    pub(crate) fn of(journal: &Journal) -> Manifest {
        let own = journal.files.iter().map(|f| ManifestFile {
            name: f.name.clone(),
            size: f.size,
            etag: f.etag.clone().filter(|etag| etag.len() <= ETAG_MAX_BYTES),
        });
        let others = journal.elsewhere.iter().map(|f| ManifestFile {
            name: f.name.clone(),
            size: f.size,
            etag: None,
        });
        let files: Vec<ManifestFile> = own.chain(others).collect();
        let last = journal.files.iter().filter(|f| f.last);
        Manifest {
            forebay_checkpoint: VERSION,
            id: journal.id.clone(),
            saved_ms: journal.staged_ms,
            bytes: files.iter().fold(0, |sum, f| sum.saturating_add(f.size)),
            last: last.map(|f| f.name.clone()).collect(),
            files,
            meta: journal.meta.clone(),
        }
    }

    /// The keys of its files alone, which no other checkpoint has.
    pub(crate) fn files_keys(&self, prefix: &str) -> impl Iterator<Item = String> {
        self.files
            .iter()
            .map(move |f| format!("{prefix}/{}/{}", self.id, f.name))
    }

    /// The manifest that the origin has of this name at this moment; `None`: none.
    pub(crate) async fn at_origin(
        engine: &Engine,
        bucket: &str,
        prefix: &str,
    ) -> Result<Option<Manifest>> {
        let name = ObjectName::new(bucket, format!("{prefix}/{MANIFEST}"))?;
        let now = ReadOptions {
            bypass: true,
            ..ReadOptions::default()
        };
        let read = match engine.read(&name, None, &now).await {
            Ok(read) => read,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        if read.meta.size > MANIFEST_MAX_BYTES {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{name} is too large to be the manifest of a checkpoint"),
            ));
        }
        let budget = engine.budget();
        let _memory = match read.meta.size > SMALL_BYTES as u64 {
            true => Some(
                budget
                    .hold(read.meta.size.min(budget.holdable_bytes()))
                    .await?,
            ),
            false => None,
        };
        let mut text = Vec::with_capacity(read.meta.size as usize);
        let mut body = read.body;
        while let Some(piece) = body.try_next().await? {
            text.extend_from_slice(&piece);
        }
        let is_small = text.len() <= SMALL_BYTES;
        let parse = move || serde_json::from_slice::<Manifest>(&text);
        let parsed = match is_small {
            true => parse(),
            false => spawn_blocking(parse).await.map_err(ended)?,
        };
        let manifest = parsed.map_err(|e| {
            Error::new(
                ErrorKind::Corrupt,
                format!("{name} is not the manifest of a checkpoint: {e}"),
            )
            .hint("choose another prefix")
        })?;
        if manifest.forebay_checkpoint > VERSION {
            return Err(Error::unsupported(format!(
                "{name} has the version {}, which this node does not know",
                manifest.forebay_checkpoint
            ))
            .hint("upgrade the node"));
        }
        Ok(Some(manifest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_engine::Freshness;
    use forebay_testing::engine::Bench;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_large_manifest_waits_for_memory() {
        let b = Bench::new(Freshness::Always);
        let file = |n: u32| ManifestFile {
            name: format!("file-{n:060}"),
            size: 1,
            etag: None,
        };
        let manifest = Manifest {
            forebay_checkpoint: VERSION,
            id: "id".to_owned(),
            saved_ms: 1,
            files: (0..2000).map(file).collect(),
            last: Vec::new(),
            bytes: 2000,
            meta: serde_json::Value::Null,
        };
        let text = serde_json::to_vec(&manifest).unwrap();
        assert!(text.len() > SMALL_BYTES);
        b.origin.set("ck/manifest.json", text);
        let read = || Manifest::at_origin(&b.engine, "data", "ck");
        let budget = b.engine.budget();
        let all = budget.try_hold(budget.holdable_bytes()).unwrap();
        assert!(timeout(Duration::from_millis(100), read()).await.is_err());
        drop(all);
        assert_eq!(read().await.unwrap(), Some(manifest));
        // What is cached of it is written in the background.
        let free = async {
            while budget.used_bytes() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        assert!(timeout(Duration::from_secs(20), free).await.is_ok());
    }
}
