//! Listings as S3 has them, of services that list one directory at a time.

use crate::{ListEntry, ListPage, ListRequest};
use async_trait::async_trait;
use forebay_core::{Error, ErrorKind, Result, limits};
use std::sync::Arc;

/// A name in a directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// Ends in `/` if it is a directory.
    pub name: String,
    pub size: u64,
    pub etag: Option<String>,
    pub last_modified_ms: i64,
}

/// What lists one directory at a time.
#[async_trait]
pub(crate) trait Directories: Sync {
    /// The names in a directory, which is empty or ends in `/`: those of directories with a `/` at
    /// their ends, in the order of keys. Names of files may have directories in them.
    async fn directory(&self, dir: &str) -> Result<Arc<Vec<Named>>>;

    /// Whether every directory has a file somewhere in it, so that it need not be read to be a
    /// prefix of keys.
    fn has_none_empty(&self) -> bool {
        false
    }
}

/// The key after which a page begins, and what every key that it skips begins with.
///
/// # Errors
/// `Invalid` for a token from elsewhere.
pub(crate) fn begin(request: &ListRequest) -> Result<(String, Option<String>)> {
    let Some(token) = &request.token else {
        return Ok((request.start_after.clone().unwrap_or_default(), None));
    };
    match token.split_at_checked(2) {
        Some(("k:", key)) => Ok((key.to_owned(), None)),
        Some(("p:", prefix)) => Ok((prefix.to_owned(), Some(prefix.to_owned()))),
        _ => Err(not_ours()),
    }
}

/// A continuation token from elsewhere.
pub(crate) fn not_ours() -> Error {
    Error::invalid("this continuation token does not come from this origin")
}

/// One page.
///
/// # Errors
/// `Invalid` for a token from elsewhere; those of the directories.
pub(crate) async fn list(of: &impl Directories, request: ListRequest) -> Result<ListPage> {
    let max = request.max_keys.clamp(1, limits::LIST_PAGE_MAX_KEYS);
    let (after, mut skip) = begin(&request)?;
    let delimiter = request.delimiter.as_deref().filter(|d| !d.is_empty());
    let mut page = ListPage::default();
    let mut last = String::new();
    let start = request
        .prefix
        .rfind('/')
        .map_or(String::new(), |at| request.prefix[..=at].to_owned());
    let first = match of.directory(&start).await {
        Err(e) if e.kind() == ErrorKind::NotFound && !start.is_empty() => return Ok(page),
        other => other?,
    };
    // Directories on the way, each with the number of the name that comes next.
    let mut stack = vec![(start, first, 0)];
    while let Some((dir, names, next)) = stack.last_mut() {
        let Some(entry) = names.get(*next) else {
            stack.pop();
            continue;
        };
        *next += 1;
        let key = format!("{dir}{}", entry.name);
        let skipped = skip.as_deref().is_some_and(|s| key.starts_with(s));
        let is_directory = entry.name.ends_with('/');
        let rolled = key.strip_prefix(&request.prefix).and_then(|tail| {
            let d = delimiter?;
            Some(&key[..request.prefix.len() + tail.find(d)? + d.len()])
        });
        let rolled = rolled.filter(|_| !is_directory || of.has_none_empty());
        if is_directory && rolled.is_none() {
            let in_prefix = key.starts_with(&request.prefix) || request.prefix.starts_with(&key);
            let later = key > after || after.starts_with(&key);
            if in_prefix && later && !skipped && key.len() < limits::OBJECT_KEY_MAX_BYTES {
                let inside = of.directory(&key).await;
                // It may have been removed since its parent was read.
                let gone = matches!(&inside, Err(e) if e.kind() == ErrorKind::NotFound);
                if !gone {
                    stack.push((key, inside?, 0));
                }
            }
            continue;
        }
        if skipped || !key.starts_with(&request.prefix) || key <= after {
            continue;
        }
        if let Some(prefix) = rolled
            && request.token.is_none()
            && prefix <= after.as_str()
        {
            skip = Some(prefix.to_owned());
            continue;
        }
        if page.entries.len() + page.prefixes.len() == max {
            page.next_token = Some(last);
            return Ok(page);
        }
        if let Some(prefix) = rolled {
            last = format!("p:{prefix}");
            page.prefixes.push(prefix.to_owned());
            skip = Some(prefix.to_owned());
        } else {
            last = format!("k:{key}");
            page.entries.push(ListEntry {
                size: entry.size,
                etag: entry.etag.clone(),
                last_modified_ms: entry.last_modified_ms,
                key,
            });
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Directories with the names in them.
    struct Tree(&'static [(&'static str, &'static [&'static str])]);

    #[async_trait]
    impl Directories for Tree {
        async fn directory(&self, dir: &str) -> Result<Arc<Vec<Named>>> {
            let found = self.0.iter().find(|(name, _)| *name == dir);
            let (_, names) = found.ok_or_else(|| Error::not_found(dir.to_owned()))?;
            let named = |name: &&str| Named {
                name: (*name).to_owned(),
                size: 1,
                etag: None,
                last_modified_ms: 0,
            };
            Ok(Arc::new(names.iter().map(named).collect()))
        }
    }

    #[tokio::test]
    async fn a_directory_that_was_removed_meanwhile_is_left_out() {
        let tree = Tree(&[("", &["a/", "b/", "c"]), ("b/", &["d", "gone/"])]);
        let request = |prefix: &str| ListRequest {
            prefix: prefix.to_owned(),
            max_keys: 1000,
            ..ListRequest::default()
        };
        for (prefix, keys) in [("", &["b/d", "c"][..]), ("b/", &["b/d"]), ("a/", &[])] {
            let page = list(&tree, request(prefix)).await.unwrap();
            let found: Vec<&str> = page.entries.iter().map(|e| e.key.as_str()).collect();
            assert_eq!(found, keys, "{prefix}");
        }
    }
}
