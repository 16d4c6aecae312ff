//! Who may open what: asked before anything is looked up.

use crate::{Dataset, DatasetSpec, LabelSource, pattern::Wanted};
use forebay_core::{Error, Result, name::shorten};

/// What a caller may do. Names are keys or prefixes: what is allowed on a prefix is allowed on all below it.
pub trait Access: Send + Sync {
    /// # Errors
    /// `PermissionDenied`.
    fn read(&self, bucket: &str, name: &str) -> Result<()>;

    /// # Errors
    /// `PermissionDenied`.
    fn list(&self, bucket: &str, prefix: &str) -> Result<()>;
}

/// Everything is allowed.
pub struct Everything;

impl Access for Everything {
    fn read(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    fn list(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }
}

/// Checks what can be known before anything is looked up: a pattern needs its whole prefix to be readable and listable, so that the answer does not
/// depend on what is there.
pub(crate) fn check_wanted(access: &dyn Access, spec: &DatasetSpec, wanted: &[Wanted]) -> Result<()> {
    for one in wanted {
        match one {
            Wanted::Exact(bucket, key) | Wanted::Manifest(bucket, key) => access.read(bucket, key)?,
            Wanted::Pattern { bucket, prefix, .. } => {
                access.list(bucket, prefix)?;
                access.read(bucket, prefix)?;
            }
        }
    }
    if let Some(LabelSource::File { name, .. }) = &spec.labels {
        let text = name.strip_prefix("s3://").unwrap_or(name);
        let (bucket, key) = text
            .split_once('/')
            .ok_or_else(|| Error::invalid(format!("labels.name {:?} names no object", shorten(name))).hint("bucket/key"))?;
        access.read(bucket, key)?;
    }
    Ok(())
}

impl Dataset {
    /// Whether all its files may be read: those of a bucket at once where what their names have in common is allowed.
    ///
    /// # Errors
    /// `PermissionDenied`, for the first that may not.
    pub fn check_access(&self, access: &dyn Access) -> Result<()> {
        let files = self.files();
        for (bucket, range) in files.by_bucket() {
            let mut common = files.key(range.start);
            for i in range.clone() {
                let key = files.key(i);
                let same = common.bytes().zip(key.bytes()).take_while(|(a, b)| a == b).count();
                common = &common[..common.floor_char_boundary(same)];
                if common.is_empty() {
                    break;
                }
            }
            if access.read(bucket, common).is_ok() {
                continue;
            }
            for i in range {
                access.read(bucket, files.key(i))?;
            }
        }
        Ok(())
    }
}
