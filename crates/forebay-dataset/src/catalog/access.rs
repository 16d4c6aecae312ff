//! Who may open what: checked before anything is looked up.
//!
//! Names from a manifest are checked like those of the request, for each caller, before an opening
//! is started or joined (`registry.rs`): so an opening looks up, and its errors mention, only names
//! that all who wait for it may read.

use super::{labels, pattern::Wanted};
use crate::{Dataset, DatasetSpec, FileTable, blocking::blocking};
use forebay_core::{Result, sync::Mutex};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Sets of rights whose answers a dataset remembers.
const ANSWERS_KEPT: usize = 64;

/// What a caller may do. Names are keys or prefixes: what is allowed on a prefix is allowed on
/// everything below it.
pub trait Access: Send + Sync + 'static {
    /// Whether an object, or everything under a prefix, may be read.
    ///
    /// # Errors
    /// `PermissionDenied`.
    fn read(&self, bucket: &str, name: &str) -> Result<()>;

    /// Whether the names under a prefix may be listed.
    ///
    /// # Errors
    /// `PermissionDenied`.
    fn list(&self, bucket: &str, prefix: &str) -> Result<()>;

    /// Identifies the set of everything that is allowed: callers with equal rights get equal
    /// answers.
    fn rights(&self) -> u128;

    /// Who the caller is; leases on plans belong to it.
    fn caller(&self) -> Caller;

    /// The same, for use on another thread.
    fn shared(&self) -> Arc<dyn Access>;
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    /// Whoever runs the node, or uses a node without keys: every lease is theirs.
    Operator,
    /// The holder of a key, by a number that identifies the key.
    Key(u128),
}

/// Everything is allowed.
#[derive(Clone, Copy)]
pub struct Everything;

impl Access for Everything {
    fn read(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    fn list(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    fn rights(&self) -> u128 {
        0
    }

    fn caller(&self) -> Caller {
        Caller::Operator
    }

    fn shared(&self) -> Arc<dyn Access> {
        Arc::new(*self)
    }
}

/// Checks what is known before anything is looked up: for a pattern, its whole prefix must be
/// readable and listable, so that the answer does not depend on what exists.
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
    if let Some(name) = labels::listed_in(spec)? {
        access.read(name.bucket(), name.key())?;
    }
    Ok(())
}

/// Answers of [`Dataset::check_access`], by the rights of the callers, the latest first. Neither
/// files nor rights change, so an answer is valid forever.
#[derive(Default)]
pub(crate) struct Answers(Mutex<VecDeque<(u128, Result<()>)>>);

impl Dataset {
    /// Whether all its files may be read, and the object that lists its labels, if there is one:
    /// labels are contents of that object. If no grant covers the common prefix of a bucket's names,
    /// each name is checked, once for each set of rights; that takes time.
    ///
    /// # Errors
    /// `PermissionDenied`, for the first of them that may not be read.
    pub fn check_access(&self, access: &dyn Access) -> Result<()> {
        let rights = access.rights();
        if let Some(answer) = self.checked(rights) {
            return answer;
        }
        let labels = self.labels_listed_in();
        let answer = labels
            .map_or(Ok(()), |name| access.read(name.bucket(), name.key()))
            .and_then(|()| may_read(access, self.files(), self.in_common()));
        let mut answers = self.answers().0.lock();
        answers.truncate(ANSWERS_KEPT - 1);
        answers.push_front((rights, answer.clone()));
        answer
    }

    fn checked(&self, rights: u128) -> Option<Result<()>> {
        let answers = self.answers().0.lock();
        answers
            .iter()
            .find(|(of, _)| *of == rights)
            .map(|(_, answer)| answer.clone())
    }

    /// The same as [`Dataset::check_access`], on a thread that may take its time.
    pub(crate) async fn allow(self: &Arc<Self>, access: &dyn Access) -> Result<()> {
        match self.checked(access.rights()) {
            Some(answer) => answer,
            None => {
                let (this, access) = (self.clone(), access.shared());
                blocking(move || this.check_access(&*access)).await?
            }
        }
    }
}

/// Whether all files of a table may be read. The files of a bucket are checked at once if the
/// common prefix of their names is allowed.
///
/// # Errors
/// `PermissionDenied`, for the first file that may not be read.
pub(crate) fn may_read(
    access: &dyn Access,
    files: &FileTable,
    in_common: &[(Range<usize>, usize)],
) -> Result<()> {
    for (range, common) in in_common {
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

/// Consecutive files in one bucket, with the length of their keys' common prefix: computed once,
/// because each request needs it.
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
