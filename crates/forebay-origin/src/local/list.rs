//! Listing a directory as S3 lists a bucket: keys in the order of their bytes, a prefix of
//! characters, roll-up at a delimiter.
//!
//! Directories are walked in the order of their keys: a directory `a` sorts as `a/`, after `a.txt`
//! and before `a0`. Subtrees that cannot hold a key of the page are not entered. Memory: one
//! directory's names for each level.
//!
//! The names of a large directory are kept for its next page ([`Listings`]), so that a listing
//! reads and sorts the directory once and not once for each thousand names. They are used only
//! while the directory's times show that nothing in it was added or removed. The target of a
//! symbolic link may change all the same, so links are looked at when a page comes to them; if one
//! has become a directory, or was one, the names are read and sorted again.

use super::{Opened, RESERVED, Root, Seen, meta_of};
use crate::{
    ListEntry, ListPage, ListRequest,
    failure::{self, Site},
    walked,
};
use forebay_core::{Error, Result, limits, sync::Mutex};
use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// What the visitor wants next.
enum Next {
    Continue,
    /// No more keys that begin with this.
    SkipPrefix(String),
    Stop,
}

/// So often a page begins again because a link turned out to lead to something else. Beyond that,
/// links are taken as they were when their directory was read.
const LINKS_CHANGED_MAX: usize = 2 * KEPT_MAX;

pub(super) fn page(root: &Root, request: &ListRequest) -> Result<ListPage> {
    for _ in 0..LINKS_CHANGED_MAX {
        if let Some(page) = page_by_names(root, request, true)? {
            return Ok(page);
        }
    }
    page_by_names(root, request, false)?
        .ok_or_else(|| Error::internal("a listing began again once too often"))
}

/// `None`: the kept names of a directory no longer held, and were dropped.
fn page_by_names(
    root: &Root,
    request: &ListRequest,
    may_begin_again: bool,
) -> Result<Option<ListPage>> {
    let max = request.max_keys.clamp(1, limits::LIST_PAGE_MAX_KEYS);
    let mut page = ListPage::default();
    let (after, skip) = walked::begin(request)?;
    let delimiter = request.delimiter.as_deref().filter(|d| !d.is_empty());
    let mut last = String::new();
    let mut visit = |key: &str, root: &Root| -> Result<Next> {
        let rolled = delimiter.and_then(|d| {
            Some(&key[..request.prefix.len() + key[request.prefix.len()..].find(d)? + d.len()])
        });
        // A rolled-up prefix that is not greater than start-after was on an earlier page.
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
            // A file that cannot be read still exists, and its readers are told so.
            Err(e) => match fs::metadata(root.path.join(key)) {
                Ok(m) => {
                    tracing::debug!(key, error = %e, "listed without its ETag");
                    let meta = meta_of(&m, Default::default());
                    last = format!("k:{key}");
                    page.entries.push(ListEntry {
                        key: key.to_owned(),
                        size: meta.size,
                        etag: None,
                        last_modified_ms: meta.last_modified_ms,
                    });
                }
                Err(gone) if gone.kind() == io::ErrorKind::NotFound => {}
                Err(_) => return Err(e),
            },
        }
        Ok(Next::Continue)
    };
    let mut walk = Walk {
        root,
        prefix: &request.prefix,
        after,
        skip,
        ancestors: Vec::new(),
        may_begin_again,
        begins_again: false,
    };
    walk.directory(&root.path, "", &mut visit)?;
    let begins_again = walk.begins_again;
    Ok((!begins_again).then_some(page))
}

struct Walk<'a> {
    root: &'a Root,
    prefix: &'a str,
    /// Keys up to this one are not visited.
    after: String,
    /// Nor keys that begin with this.
    skip: Option<String>,
    /// Device and inode of the directories above: following a symbolic link to one of them would
    /// never end.
    ancestors: Vec<(u64, u64)>,
    may_begin_again: bool,
    /// The names of a directory were dropped because a link in it leads elsewhere now.
    begins_again: bool,
}

type Visit<'v> = dyn FnMut(&str, &Root) -> Result<Next> + 'v;

impl Walk<'_> {
    /// Whether any key that begins with `dir` (which ends in `/`) is wanted.
    fn wants(&self, dir: &str) -> bool {
        let in_prefix = dir.starts_with(self.prefix) || self.prefix.starts_with(dir);
        let later = dir > self.after.as_str() || self.after.starts_with(dir);
        let skipped = self.skip.as_deref().is_some_and(|s| dir.starts_with(s));
        in_prefix && later && !skipped && dir.len() < limits::OBJECT_KEY_MAX_BYTES
    }

    fn wants_file(&self, key: &str) -> bool {
        key.starts_with(self.prefix)
            && key > self.after.as_str()
            && key.len() <= limits::OBJECT_KEY_MAX_BYTES
            && self.skip.as_deref().is_none_or(|s| !key.starts_with(s))
    }

    /// Whether a link is wanted, as a file or as a directory.
    fn may_want(&self, key: &str) -> bool {
        let name = key.trim_end_matches('/');
        self.wants_file(name) || self.wants(&format!("{name}/"))
    }

    /// Visits the files under `path`, whose keys begin with `dir`. False: stop.
    fn directory(&mut self, path: &Path, dir: &str, visit: &mut Visit<'_>) -> Result<bool> {
        let site = Site {
            origin: &self.root.description,
            operation: "list",
            key: dir,
        };
        let seen = match fs::metadata(path) {
            Ok(m) => m,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !dir.is_empty() => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(self.root.is_gone());
            }
            Err(e) => return Err(failure::from_io(site, e)),
        };
        let here = (seen.dev(), seen.ino());
        if self.ancestors.contains(&here) {
            tracing::warn!(
                directory = dir,
                origin = self.root.description,
                "a symbolic link that leads back to a directory above it is left out of the listing"
            );
            return Ok(true);
        }
        let listings = &self.root.listings;
        let names = match listings.get(path, &seen) {
            Some(names) => Ok(names),
            None => sorted_names(path, dir).map(|names| listings.keep(path, &seen, names)),
        };
        let names = match names {
            Ok(names) => names,
            // Removed since its parent was read.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(e) => return Err(failure::from_io(site, e)),
        };
        self.ancestors.push(here);
        for (number, name) in names.names.iter().enumerate() {
            // Kept names may be those of a directory in another bucket, too.
            if dir.is_empty() && name.trim_end_matches('/') == RESERVED {
                continue;
            }
            let key = format!("{dir}{name}");
            if names.is_link(number) && self.may_want(&key) {
                let kept_as_dir = key.ends_with('/');
                let target = fs::metadata(path.join(name.trim_end_matches('/')));
                let (is_dir, is_file) =
                    target.map_or((false, false), |m| (m.is_dir(), m.is_file()));
                let elsewhere = is_dir != kept_as_dir && (is_dir || is_file);
                if elsewhere && self.may_begin_again {
                    self.root.listings.forget(path);
                    self.begins_again = true;
                    return Ok(false);
                }
                // A dangling link is not an object.
                if is_dir != kept_as_dir || !(is_dir || is_file) {
                    continue;
                }
            }
            if let Some(sub) = key.strip_suffix('/') {
                if self.wants(&key)
                    && !self.directory(&path.join(&sub[dir.len()..]), &key, visit)?
                {
                    return Ok(false);
                }
                continue;
            }
            if !self.wants_file(&key) {
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

/// Directories with fewer names than this are read again for each page.
const KEPT_FROM_NAMES: usize = 2 * limits::LIST_PAGE_MAX_KEYS;
/// How much memory kept names may take, of one bucket or of all buckets of a directory together: about
/// two million names of twenty bytes.
const KEPT_MAX_BYTES: usize = 64 << 20;
const KEPT_MAX: usize = 32;
/// A directory that was changed this shortly before it was read may change again within one tick of
/// its clock.
const SETTLED_AFTER: Duration = Duration::from_millis(100);
/// Names that no page has asked for in this time are dropped by the next listing.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// The sorted names of large directories, newest use last.
#[derive(Clone, Default)]
pub(crate) struct Listings(Arc<Mutex<Vec<Kept>>>);

struct Kept {
    path: PathBuf,
    here: (u64, u64),
    seen: Seen,
    changed: (i64, i64),
    names: Arc<Names>,
    bytes: usize,
    used: Instant,
}

impl Listings {
    fn get(&self, path: &Path, now: &Metadata) -> Option<Arc<Names>> {
        let mut kept = self.0.lock();
        kept.retain(|k| k.used.elapsed() < KEPT_FOR);
        let at = kept.iter().position(|k| k.path == path)?;
        let mut found = kept.remove(at);
        if found.here != (now.dev(), now.ino())
            || found.seen != Seen::of(now)
            || found.changed != (now.ctime(), now.ctime_nsec())
        {
            return None;
        }
        found.used = Instant::now();
        let names = found.names.clone();
        kept.push(found);
        Some(names)
    }

    fn forget(&self, path: &Path) {
        self.0.lock().retain(|k| k.path != path);
    }

    /// `seen` is from before the names were read.
    fn keep(&self, path: &Path, seen: &Metadata, names: Names) -> Arc<Names> {
        let names = Arc::new(names);
        let settled = seen
            .modified()
            .is_ok_and(|t| t.elapsed().is_ok_and(|age| age > SETTLED_AFTER));
        if names.names.len() < KEPT_FROM_NAMES || !settled {
            return names;
        }
        let bytes = names.memory_bytes();
        if bytes > KEPT_MAX_BYTES {
            return names;
        }
        let mut kept = self.0.lock();
        while kept.len() >= KEPT_MAX
            || kept.iter().map(|k| k.bytes).sum::<usize>() + bytes > KEPT_MAX_BYTES
        {
            kept.remove(0);
        }
        kept.push(Kept {
            path: path.to_owned(),
            here: (seen.dev(), seen.ino()),
            seen: Seen::of(seen),
            changed: (seen.ctime(), seen.ctime_nsec()),
            names: names.clone(),
            bytes,
            used: Instant::now(),
        });
        names
    }
}

/// The names in a directory.
struct Names {
    /// Directories with a trailing `/`, in the order of keys.
    names: Vec<String>,
    /// Which of them are symbolic links, ascending.
    links: Vec<u32>,
}

impl Names {
    fn is_link(&self, number: usize) -> bool {
        u32::try_from(number).is_ok_and(|n| self.links.binary_search(&n).is_ok())
    }

    fn memory_bytes(&self) -> usize {
        let names = self
            .names
            .iter()
            .map(|n| n.capacity() + size_of::<String>());
        names.sum::<usize>() + self.links.capacity() * size_of::<u32>()
    }
}

/// The names in a directory. Those that are not keys are left out.
fn sorted_names(path: &Path, dir: &str) -> io::Result<Names> {
    let mut found: Vec<(String, bool)> = Vec::new();
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
        let kind = match entry.file_type() {
            Ok(kind) => kind,
            // Some file systems do not tell the type with the name, so it is looked up. This file was
            // removed meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        let is_link = kind.is_symlink();
        let is_dir = match is_link {
            true => fs::metadata(entry.path()).is_ok_and(|m| m.is_dir()),
            false => kind.is_dir(),
        };
        if is_dir {
            name.push('/');
        } else if !is_link && !kind.is_file() {
            continue;
        }
        found.push((name, is_link));
    }
    found.sort_unstable();
    let links = found
        .iter()
        .enumerate()
        .filter(|(_, (_, is_link))| *is_link);
    let links = links.filter_map(|(number, _)| u32::try_from(number).ok());
    Ok(Names {
        links: links.collect(),
        names: found.into_iter().map(|(name, _)| name).collect(),
    })
}

/// Removes directories without files, from the leaves up; keeps every directory that holds a file.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LocalOrigin, Origin};

    fn request(token: Option<String>) -> ListRequest {
        ListRequest {
            max_keys: 1000,
            token,
            ..Default::default()
        }
    }

    /// Lists everything and says how many pages came from kept names.
    async fn listed(origin: &LocalOrigin) -> (Vec<String>, usize) {
        let (mut keys, mut token, mut from_kept) = (Vec::new(), None, 0);
        loop {
            from_kept += usize::from(!origin.0.listings.0.lock().is_empty());
            let page = origin.list(request(token)).await.unwrap();
            keys.extend(page.entries.into_iter().map(|e| e.key));
            token = page.next_token;
            if token.is_none() {
                return (keys, from_kept);
            }
        }
    }

    #[tokio::test]
    async fn a_large_directory_is_read_once_for_all_its_pages_and_again_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..5500 {
            fs::write(dir.path().join(format!("{i:05}")), "").unwrap();
        }
        let origin = LocalOrigin::open(dir.path()).unwrap();
        tokio::time::sleep(2 * SETTLED_AFTER).await;
        let (keys, from_kept) = listed(&origin).await;
        assert_eq!(
            (keys.len(), from_kept),
            (5500, 5),
            "the first of six pages reads"
        );
        assert!(keys.is_sorted());

        fs::remove_file(dir.path().join("00007")).unwrap();
        fs::write(dir.path().join("00007b"), "").unwrap();
        let (keys, _) = listed(&origin).await;
        assert!(keys[7] == "00007b" && keys.len() == 5500);
    }

    #[tokio::test]
    async fn the_buckets_of_a_directory_keep_names_in_one_place() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for dir in &dirs {
            for i in 0..2500 {
                fs::write(dir.path().join(format!("{i:05}")), "").unwrap();
            }
        }
        tokio::time::sleep(2 * SETTLED_AFTER).await;
        let kept = Listings::default();
        for (dir, so_far) in dirs.iter().zip(1..) {
            let (threads, listings) = (super::super::Threads::default(), kept.clone());
            let origin = LocalOrigin::open_with(dir.path(), threads, listings).unwrap();
            assert_eq!(listed(&origin).await.0.len(), 2500);
            assert_eq!(kept.0.lock().len(), so_far);
        }
    }

    #[tokio::test]
    async fn a_bucket_within_another_one_does_not_list_what_is_reserved_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("in");
        let reserved = inner.join(RESERVED);
        fs::create_dir_all(&reserved).unwrap();
        fs::write(reserved.join("x"), "").unwrap();
        for i in 0..2500 {
            fs::write(inner.join(format!("{i:05}")), "").unwrap();
        }
        tokio::time::sleep(2 * SETTLED_AFTER).await;
        let kept = Listings::default();
        for (path, keys) in [(dir.path(), 2501), (inner.as_path(), 2500)] {
            let (threads, listings) = (super::super::Threads::default(), kept.clone());
            let origin = LocalOrigin::open_with(path, threads, listings).unwrap();
            assert_eq!(listed(&origin).await.0.len(), keys);
            assert_eq!(kept.0.lock().len(), 1);
        }
    }

    #[tokio::test]
    async fn a_large_directory_with_links_is_read_once_and_they_lead_where_they_lead_now() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for i in 0..2500 {
            fs::write(dir.path().join(format!("{i:05}")), "").unwrap();
        }
        let target = |name: &str| outside.path().join(name);
        for (link, to) in [("01000x", "a"), ("01000y", "b"), ("01000z", "c")] {
            std::os::unix::fs::symlink(target(to), dir.path().join(link)).unwrap();
        }
        fs::write(target("a"), "").unwrap();
        fs::write(target("b"), "").unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        tokio::time::sleep(2 * SETTLED_AFTER).await;
        let links = |keys: Vec<String>| {
            assert!(keys.is_sorted());
            let links = keys.into_iter().filter(|k| k.len() > 5);
            links.collect::<Vec<_>>()
        };
        let (keys, from_kept) = listed(&origin).await;
        assert_eq!(
            (keys.len(), from_kept),
            (2502, 2),
            "the first of three pages reads"
        );
        assert_eq!(links(keys), ["01000x", "01000y"], "the third one dangles");

        fs::remove_file(target("a")).unwrap();
        fs::create_dir(target("a")).unwrap();
        fs::write(target("a").join("in"), "").unwrap();
        fs::remove_file(target("b")).unwrap();
        fs::write(target("c"), "").unwrap();
        assert_eq!(links(listed(&origin).await.0), ["01000x/in", "01000z"]);
    }

    #[test]
    fn a_file_that_cannot_be_read_does_not_fail_the_listing() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        for (name, mode) in [("a", 0o644), ("b", 0o000), ("c", 0o644)] {
            let path = dir.path().join(name);
            fs::write(&path, name).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        // A thread that is not root, because root may read everything.
        let listed = std::thread::spawn(move || {
            // SAFETY: changes only what this thread may do with files.
            unsafe { libc::setfsuid(65_534) };
            (
                origin.0.open("read", "b").map(drop),
                page(&origin.0, &request(None)),
            )
        });
        let (unreadable, page) = listed.join().unwrap();
        assert!(unreadable.is_err());
        let entries = page.unwrap().entries;
        let found: Vec<_> = entries
            .iter()
            .map(|e| (e.key.as_str(), e.size, e.etag.is_some()))
            .collect();
        assert_eq!(found, [("a", 1, true), ("b", 1, false), ("c", 1, true)]);
    }
}
