//! Who may open what: asked before anything is looked up.

use crate::{Dataset, DatasetSpec, FileTable, LabelSource, pattern::Wanted};
use forebay_core::{Error, Result, name::shorten};
use std::ops::Range;

/// What a caller may do. Names are keys or prefixes: what is allowed on a prefix is allowed on all
/// below it.
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

/// Checks what can be known before anything is looked up: a pattern needs its whole prefix to be
/// readable and listable, so that the answer does not depend on what is there.
pub(crate) fn check_wanted(
    access: &dyn Access,
    spec: &DatasetSpec,
    wanted: &[Wanted],
) -> Result<()> {
    for one in wanted {
        match one {
            Wanted::Exact(bucket, key) | Wanted::Manifest(bucket, key) => {
                access.read(bucket, key)?
            }
            Wanted::Pattern { bucket, prefix, .. } => {
                access.list(bucket, prefix)?;
                access.read(bucket, prefix)?;
            }
        }
    }
    if let Some(LabelSource::File { name, .. }) = &spec.labels {
        let text = name.strip_prefix("s3://").unwrap_or(name);
        let (bucket, key) = text.split_once('/').ok_or_else(|| {
            Error::invalid(format!("labels.name {:?} names no object", shorten(name)))
                .hint("bucket/key")
        })?;
        access.read(bucket, key)?;
    }
    Ok(())
}

impl Dataset {
    /// Whether all its files may be read: those of a bucket at once where what their names have in
    /// common is allowed.
    ///
    /// # Errors
    /// `PermissionDenied`, for the first that may not.
    pub fn check_access(&self, access: &dyn Access) -> Result<()> {
        let files = self.files();
        for (range, common) in self.in_common() {
            if access
                .read(
                    files.bucket(range.start),
                    &files.key(range.start)[..*common],
                )
                .is_ok()
            {
                continue;
            }
            for i in range.clone() {
                access.read(files.bucket(i), files.key(i))?;
            }
        }
        Ok(())
    }
}

/// Files that follow one another in one bucket, with the length of what their keys have in common:
/// worked out once, since it is asked for with each request.
pub(crate) fn in_common(files: &FileTable) -> Vec<(Range<usize>, usize)> {
    let mut out = Vec::new();
    for (_, range) in files.by_bucket() {
        let mut common = files.key(range.start);
        for i in range.clone() {
            let same = common
                .bytes()
                .zip(files.key(i).bytes())
                .take_while(|(a, b)| a == b)
                .count();
            common = &common[..common.floor_char_boundary(same)];
            if common.is_empty() {
                break;
            }
        }
        out.push((range, common.len()));
    }
    out
}
