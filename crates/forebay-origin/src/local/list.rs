//! Listing a directory as S3 lists a bucket: keys in the order of their bytes, a prefix of
//! characters, roll-up at a delimiter.
//!
//! Directories are walked in the order of their keys: a directory `a` sorts as `a/`, after `a.txt`
//! and before `a0`. Sub-trees that cannot hold a key of the page are not entered. Memory is one
//! directory's names for each level.

use super::{Opened, RESERVED, Root};
use crate::{
    ListEntry, ListPage, ListRequest,
    failure::{self, Site},
};
use forebay_core::{Error, Result, limits};
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// What the visitor wants next.
enum Next {
    Continue,
    /// No more keys that begin with this.
    SkipPrefix(String),
    Stop,
}

pub(super) fn page(root: &Root, request: &ListRequest) -> Result<ListPage> {
    let max = request.max_keys.clamp(1, limits::LIST_PAGE_MAX_KEYS);
    let mut page = ListPage::default();
    let (after, skip) = match &request.token {
        None => (request.start_after.clone().unwrap_or_default(), None),
        Some(token) => match token.split_at_checked(2) {
            Some(("k:", key)) => (key.to_owned(), None),
            Some(("p:", prefix)) => (prefix.to_owned(), Some(prefix.to_owned())),
            _ => {
                return Err(Error::invalid(
                    "this is not a continuation token of this origin",
                ));
            }
        },
    };
    let delimiter = request.delimiter.as_deref().filter(|d| !d.is_empty());
    let mut last = String::new();
    let mut visit = |key: &str, root: &Root| -> Result<Next> {
        let rolled = delimiter.and_then(|d| {
            Some(&key[..request.prefix.len() + key[request.prefix.len()..].find(d)? + d.len()])
        });
        // A rolled-up prefix that is not greater than start-after was before it.
        if let Some(prefix) = rolled
            && request.token.is_none()
            && request.start_after.as_deref().is_some_and(|a| prefix <= a)
        {
            return Ok(Next::SkipPrefix(prefix.to_owned()));
        }
        if page.entries.len() + page.prefixes.len() == max {
            page.next_token = Some(std::mem::take(&mut last));
            return Ok(Next::Stop);
        }
        if let Some(prefix) = rolled {
            last = format!("p:{prefix}");
            page.prefixes.push(prefix.to_owned());
            return Ok(Next::SkipPrefix(prefix.to_owned()));
        }
        match root.open("list", key) {
            Ok(Opened { meta, .. }) => {
                last = format!("k:{key}");
                page.entries.push(ListEntry {
                    key: key.to_owned(),
                    size: meta.size,
                    etag: meta.etag,
                    last_modified_ms: meta.last_modified_ms,
                });
            }
            // Deleted since its directory was read.
            Err(e) if e.kind() == forebay_core::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        Ok(Next::Continue)
    };
    let mut walk = Walk {
        root,
        prefix: &request.prefix,
        after,
        skip,
        ancestors: Vec::new(),
    };
    walk.directory(&root.path, "", &mut visit)?;
    Ok(page)
}

struct Walk<'a> {
    root: &'a Root,
    prefix: &'a str,
    /// Keys up to this one are not visited.
    after: String,
    /// Nor keys that begin with this.
    skip: Option<String>,
    /// Device and inode of the directories above: a symbolic link to one of them would never end.
    ancestors: Vec<(u64, u64)>,
}

type Visit<'v> = dyn FnMut(&str, &Root) -> Result<Next> + 'v;

impl Walk<'_> {
    /// Whether some key that begins with `dir` (which ends in `/`) is wanted.
    fn wants(&self, dir: &str) -> bool {
        let in_prefix = dir.starts_with(self.prefix) || self.prefix.starts_with(dir);
        let later = dir > self.after.as_str() || self.after.starts_with(dir);
        let skipped = self.skip.as_deref().is_some_and(|s| dir.starts_with(s));
        in_prefix && later && !skipped && dir.len() < limits::OBJECT_KEY_MAX_BYTES
    }

    /// Visits the files under `path`, whose keys begin with `dir`. False: stop.
    fn directory(&mut self, path: &Path, dir: &str, visit: &mut Visit<'_>) -> Result<bool> {
        let site = Site {
            origin: &self.root.description,
            operation: "list",
            key: dir,
        };
        let here = match fs::metadata(path) {
            Ok(m) => (m.dev(), m.ino()),
            Err(e) if e.kind() == io::ErrorKind::NotFound && !dir.is_empty() => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(
                    Error::bucket_not_found(format!("{} is gone", self.root.description))
                        .hint("is the disk mounted?"),
                );
            }
            Err(e) => return Err(failure::from_io(site, e)),
        };
        if self.ancestors.contains(&here) {
            tracing::warn!(
                directory = dir,
                origin = self.root.description,
                "a symbolic link leads back to a directory above it: left out"
            );
            return Ok(true);
        }
        let names = match sorted_names(path, dir) {
            Ok(names) => names,
            // Removed since its parent was read.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(e) => return Err(failure::from_io(site, e)),
        };
        self.ancestors.push(here);
        for name in names {
            let key = format!("{dir}{name}");
            if let Some(sub) = key.strip_suffix('/') {
                if self.wants(&key)
                    && !self.directory(&path.join(&sub[dir.len()..]), &key, visit)?
                {
                    return Ok(false);
                }
                continue;
            }
            let wanted = key.starts_with(self.prefix)
                && key.as_str() > self.after.as_str()
                && key.len() <= limits::OBJECT_KEY_MAX_BYTES
                && self.skip.as_deref().is_none_or(|s| !key.starts_with(s));
            if !wanted {
                continue;
            }
            match visit(&key, self.root)? {
                Next::Continue => {}
                Next::SkipPrefix(prefix) => self.skip = Some(prefix),
                Next::Stop => return Ok(false),
            }
        }
        self.ancestors.pop();
        Ok(true)
    }
}

/// The names in a directory, `/` after those of directories, in the order of keys. Names that are
/// no keys are left out.
fn sorted_names(path: &Path, dir: &str) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let mut name = match entry.file_name().into_string() {
            Ok(name) if !name.chars().any(char::is_control) => name,
            Ok(name) => {
                tracing::warn!(directory = dir, name = ?name, "a file name with control \
                    characters is left out of the listing");
                continue;
            }
            Err(name) => {
                tracing::warn!(directory = dir, name = ?name, "a file name that is not UTF-8 is \
                    left out of the listing");
                continue;
            }
        };
        if dir.is_empty() && name == RESERVED {
            continue;
        }
        let kind = entry.file_type()?;
        let (is_dir, is_file) = if kind.is_symlink() {
            // A link that leads nowhere is no object.
            fs::metadata(entry.path())
                .map(|m| (m.is_dir(), m.is_file()))
                .unwrap_or((false, false))
        } else {
            (kind.is_dir(), kind.is_file())
        };
        match (is_dir, is_file) {
            (true, _) => name.push('/'),
            (false, true) => {}
            (false, false) => continue,
        }
        names.push(name);
    }
    names.sort_unstable();
    Ok(names)
}

/// Removes directories without files, from the leaves up; stops at nothing that holds a file.
pub(super) fn remove_empty_directories(root: &Path) {
    fn inner(path: PathBuf, is_root: bool) {
        for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir())
                && !(is_root && entry.file_name() == RESERVED)
            {
                inner(entry.path(), false);
            }
        }
        if !is_root {
            let _ = fs::remove_dir(path);
        }
    }
    inner(root.to_owned(), true);
}
