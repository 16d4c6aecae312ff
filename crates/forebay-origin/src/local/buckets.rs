//! A directory whose sub-directories are buckets: `file:///dir/*`.

use super::{LocalOrigin, RESERVED, list};
use crate::{
    ListRequest,
    failure::{self, Site},
};
use forebay_core::{Error, ErrorKind, Result, name};
use std::{fs, io, path::Path};

/// The directories under `root` that are buckets.
pub(crate) fn buckets(root: &Path) -> Result<Vec<String>> {
    let site = Site {
        origin: &root.display().to_string(),
        operation: "list the buckets",
        key: "",
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(root).map_err(|e| failure::from_io(site, e))? {
        let entry = entry.map_err(|e| failure::from_io(site, e))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if name::validate_bucket(&name).is_ok() && entry.path().is_dir() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Makes a bucket.
pub(crate) fn create_bucket(root: &Path, bucket: &str) -> Result<()> {
    name::validate_bucket(bucket)?;
    match fs::create_dir(root.join(bucket)) {
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
    })
}
