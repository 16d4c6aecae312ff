//! A directory whose sub-directories are buckets: `file:///dir/*`.

use super::{LocalOrigin, RESERVED, list};
use crate::{
    ListRequest, ListedBucket,
    failure::{self, Site},
};
use forebay_core::{Error, ErrorKind, Result, name};
use std::{fs, io, path::Path, time::UNIX_EPOCH};

/// When a directory was made, in milliseconds since the Unix epoch. Where its file system does not say,
/// when it last changed; 0 if that cannot be told either.
pub(crate) fn created_ms(directory: &Path) -> i64 {
    let made = fs::metadata(directory).and_then(|m| m.created().or_else(|_| m.modified()));
    let since = made.ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |t| t.as_millis() as i64)
}

/// The directories under `root` that are buckets.
pub(crate) fn buckets(root: &Path) -> Result<Vec<ListedBucket>> {
    let site = Site {
        origin: &root.display().to_string(),
        operation: "list the buckets",
        key: "",
    };
    let mut buckets = Vec::new();
    for entry in fs::read_dir(root).map_err(|e| failure::from_io(site, e))? {
        let entry = entry.map_err(|e| failure::from_io(site, e))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if name::validate_bucket(&name).is_ok() && entry.path().is_dir() {
            let created_ms = created_ms(&entry.path());
            buckets.push(ListedBucket { name, created_ms });
        }
    }
    buckets.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(buckets)
}

/// Makes a bucket.
pub(crate) fn create_bucket(root: &Path, bucket: &str) -> Result<()> {
    name::validate_bucket(bucket)?;
    // What is written into it is on disk only if its name is.
    let made = fs::create_dir(root.join(bucket)).and_then(|()| fs::File::open(root)?.sync_all());
    match made {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("the bucket {bucket:?} already exists"),
        )),
        Err(e) => Err(failure::from_io(
            Site {
                origin: &root.display().to_string(),
                operation: "create the bucket",
                key: bucket,
            },
            e,
        )),
    }
}

/// Removes a bucket that holds no object.
pub(crate) fn remove_bucket(root: &Path, bucket: &str) -> Result<()> {
    name::validate_bucket(bucket)?;
    let path = root.join(bucket);
    let site = Site {
        origin: &root.display().to_string(),
        operation: "remove the bucket",
        key: bucket,
    };
    if !path.is_dir() {
        return Err(Error::bucket_not_found(format!(
            "the bucket {bucket:?} does not exist in {}",
            root.display()
        )));
    }
    // It could not be removed, and nothing in it is to go before that is known.
    if path.is_symlink() {
        return Err(Error::unsupported(format!(
            "the bucket {bucket:?} is a link to a directory elsewhere"
        ))
        .hint("remove the link on the machine that has it"));
    }
    let origin = LocalOrigin::open(&path)?;
    let first = list::page(
        &origin.0,
        &ListRequest {
            max_keys: 1,
            ..Default::default()
        },
    )?;
    if !first.entries.is_empty() {
        return Err(Error::new(
            ErrorKind::Conflict,
            format!("the bucket {bucket:?} is not empty"),
        )
        .hint("delete its objects first"));
    }
    // An object that is being written either fails or keeps the bucket: only empty directories are
    // removed.
    list::remove_empty_directories(&path);
    let _ = fs::remove_dir_all(path.join(RESERVED));
    fs::remove_dir(&path).map_err(|e| match e.kind() {
        io::ErrorKind::DirectoryNotEmpty => Error::new(
            ErrorKind::Conflict,
            format!("the bucket {bucket:?} is not empty"),
        ),
        _ => failure::from_io(site, e),
    })?;
    // Or the bucket is there again after a loss of power.
    fs::File::open(root)
        .and_then(|root| root.sync_all())
        .map_err(|e| failure::from_io(site, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_buckets_knows_when_they_were_made() {
        let began = std::time::SystemTime::now();
        let root = tempfile::tempdir().unwrap();
        for bucket in ["two", "one"] {
            create_bucket(root.path(), bucket).unwrap();
        }
        let listed = buckets(root.path()).unwrap();
        let names: Vec<&str> = listed.iter().map(|b| &*b.name).collect();
        assert_eq!(names, ["one", "two"]);
        let began = began.duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
        for bucket in listed {
            // Clocks of file systems go by ticks.
            let after = bucket.created_ms - began;
            assert!((-1_000..60_000).contains(&after), "{bucket:?}: {after}");
        }
        assert_eq!(created_ms(&root.path().join("three")), 0);
    }

    #[test]
    fn a_bucket_that_is_a_link_stays_with_all_that_is_in_it() {
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let unfinished = elsewhere.path().join(RESERVED).join("uploads");
        fs::create_dir_all(&unfinished).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), root.path().join("linked")).unwrap();
        let refused = remove_bucket(root.path(), "linked").err();
        assert_eq!(refused.map(|e| e.kind()), Some(ErrorKind::Unsupported));
        assert!(unfinished.exists());
        create_bucket(root.path(), "made").unwrap();
        remove_bucket(root.path(), "made").unwrap();
        assert!(!root.path().join("made").exists());
    }
}
