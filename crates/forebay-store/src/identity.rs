//! Who a cache directory is, and how far its contents may be trusted after a restart.
//!
//! `identity.json` is replaced as a whole (write, sync, rename), or overwritten if there is no
//! space for a second one: its size never changes. It holds the key of the header checks, the boot
//! in which the directory was last open, whether it was closed cleanly, and the *distrust mark*:
//! entries with a lower sequence number must be revalidated at the origin before use, because a
//! tombstone or newer record of the same key may have been lost (see the crate's documentation).
//!
//! Without the key nothing in the cache can be read, so the numbers that never change are also in a
//! second file, `identity.copy`. If only that file can be read, everything is distrusted.

use crate::disk::{Disk, OpenMode};
use forebay_core::{Error, ErrorKind, Result};
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, OpenOptions, TryLockError},
    io,
    path::Path,
};

/// The format of the directory and of its records. Raise it when a program that knows only earlier
/// formats could not read what is written, or would misread it.
pub const FORMAT: u32 = 1;
pub const FILE: &str = "identity.json";
pub const TMP: &str = "identity.tmp";
/// The part of the identity that never changes.
pub const COPY: &str = "identity.copy";
const LOCK: &str = "lock";
/// The file is padded with spaces to this size, so that it can be overwritten on a full disk. It
/// has room for 255 peers.
const FILE_BYTES: usize = 8 << 10;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Identity {
    format: u32,
    pub id: u64,
    /// The key of the header checks.
    pub secret: u64,
    pub boot_id: String,
    pub clean: bool,
    /// Counts the openings of the store.
    pub run: u64,
    /// The same in all directories of one run, and in no other run. A directory whose number
    /// differs from that of the highest run was away.
    pub session: u64,
    pub distrust_below: u64,
    /// A tombstone was missed, or may have been lost, in this run: the next run distrusts everything.
    #[serde(default)]
    pub missed_tombstone: bool,
    /// Directories of the store that missed a tombstone while this one could be written.
    #[serde(default)]
    pub distrusted_peers: Vec<u64>,
    /// The origins whose objects are stored here under plain keys, in short form
    /// ([`crate::sources`]). `None`: written by a version that did not tell origins apart.
    #[serde(default)]
    pub plain_origins: Option<Vec<u32>>,
    /// Who the node is that has this directory, in a cluster: equal in all its directories. `None`:
    /// it was in none so far.
    #[serde(default)]
    pub node: Option<u64>,
}

/// The contents of [`COPY`].
#[derive(Serialize, Deserialize)]
struct Lasting {
    format: u32,
    id: u64,
    secret: u64,
    check: u64,
    /// As in [`Identity`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<u64>,
}

impl Lasting {
    fn check(id: u64, secret: u64, node: Option<u64>) -> u64 {
        let mut bytes = id.to_le_bytes().to_vec();
        bytes.extend(node.map(u64::to_le_bytes).into_iter().flatten());
        xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, secret)
    }

    fn is_whole(&self) -> bool {
        self.format == FORMAT && self.check == Self::check(self.id, self.secret, self.node)
    }
}

/// What a directory says about itself.
pub enum Known {
    Nothing,
    Identity(Box<Identity>),
    /// The identity is missing or damaged, but its copy is intact.
    Recovered(Box<Identity>),
    /// Neither can be read.
    Damaged,
    /// Another version of the program wrote it, in this format.
    Foreign(u64),
}

impl Identity {
    pub fn new() -> Result<Self> {
        Ok(Self {
            format: FORMAT,
            id: random()?,
            secret: random()?,
            boot_id: boot_id(),
            clean: true,
            run: 0,
            session: 0,
            distrust_below: 0,
            missed_tombstone: false,
            distrusted_peers: Vec::new(),
            plain_origins: Some(Vec::new()),
            node: None,
        })
    }

    pub fn load(disk: &dyn Disk, dir: &Path) -> io::Result<Known> {
        let bytes = read(disk, &dir.join(FILE))?;
        let value = bytes
            .as_deref()
            .and_then(|b| serde_json::from_slice::<serde_json::Value>(b).ok());
        let format = value.as_ref().and_then(|v| v.get("format")?.as_u64());
        if let Some(format) = format.filter(|f| *f != u64::from(FORMAT)) {
            return Ok(Known::Foreign(format));
        }
        if let Some(identity) = value.and_then(|v| serde_json::from_value(v).ok()) {
            return Ok(Known::Identity(Box::new(identity)));
        }
        let copy = read(disk, &dir.join(COPY))?;
        let copy = copy.and_then(|b| serde_json::from_slice::<Lasting>(&b).ok());
        Ok(match (copy.filter(Lasting::is_whole), bytes) {
            (Some(copy), _) => Known::Recovered(Box::new(Self {
                id: copy.id,
                secret: copy.secret,
                boot_id: String::new(),
                clean: false,
                missed_tombstone: true,
                plain_origins: None,
                node: copy.node,
                ..Self::new().map_err(io::Error::other)?
            })),
            (None, Some(_)) => Known::Damaged,
            (None, None) => Known::Nothing,
        })
    }

    /// Writes the copy of what never changes, if there is none.
    pub fn save_copy(&self, disk: &dyn Disk, dir: &Path) -> io::Result<()> {
        let (id, secret) = (self.id, self.secret);
        let copy = serde_json::to_vec(&Lasting {
            format: FORMAT,
            id,
            secret,
            check: Lasting::check(id, secret, self.node),
            node: self.node,
        })?;
        let there = read(disk, &dir.join(COPY))?;
        if there.is_some_and(|there| there == copy) {
            return Ok(());
        }
        replace(disk, dir, COPY, &copy)
    }

    pub fn save(&self, disk: &dyn Disk, dir: &Path) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.resize(FILE_BYTES.max(bytes.len()), b' ');
        replace(disk, dir, FILE, &bytes)
    }
}

/// Puts a file in the place of another; onto a full disk, writes over it.
fn replace(disk: &dyn Disk, dir: &Path, file: &str, bytes: &[u8]) -> io::Result<()> {
    let (tmp, path) = (dir.join(TMP), dir.join(file));
    let replaced = disk.open(&tmp, OpenMode::Create).and_then(|file| {
        file.write_all_at(&[bytes], 0)?;
        file.sync()?;
        disk.rename(&tmp, &path)
    });
    match replaced {
        Ok(()) => disk.sync_dir(dir),
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) =>
        {
            let file = disk.open(&path, OpenMode::ReadWrite).map_err(|_| e)?;
            file.write_all_at(&[bytes], 0)?;
            file.sync()
        }
        Err(e) => Err(e),
    }
}

/// Reads a file of at most [`FILE_BYTES`]; `None`: it does not exist.
fn read(disk: &dyn Disk, path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match disk.open(path, OpenMode::Read) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let size = file.size()?.min(FILE_BYTES as u64);
    let mut bytes = Vec::new();
    file.read_append(&mut bytes, size as usize, 0)?;
    Ok(Some(bytes))
}

/// Changes with each start of the machine. Empty if the system does not say: then no unclean
/// restart is trusted.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|s| s.trim().to_owned())
        .unwrap_or_default()
}

pub fn random() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // So few bytes arrive all at once.
    match rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        Ok(n) => Err(Error::internal(format!(
            "the system gave {n} of 8 random bytes"
        ))),
        Err(e) => Err(Error::internal("the system gave no random numbers").caused_by(e)),
    }
}

/// A directory that belongs to this process, until this is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    file: File,
    pid: u32,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file would not be enough: a process that was forked meanwhile may have it
        // open for a moment, or as long as it lives. In that process the lock is not the child's to
        // give back.
        if self.pid == std::process::id() {
            let _ = self.file.unlock();
        }
    }
}

/// Takes the directory for this process.
///
/// # Errors
/// `Conflict` if it belongs to another.
pub fn lock(dir: &Path) -> Result<Lock> {
    let path = dir.join(LOCK);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .or_else(|e| {
            if e.kind() == io::ErrorKind::ReadOnlyFilesystem {
                File::open(&path)
            } else {
                Err(e)
            }
        })
        .map_err(|e| {
            Error::internal(format!(
                "cache directory {} cannot be used: {e}",
                dir.display()
            ))
            .hint("check that the directory is writable by this user")
            .caused_by(e)
        })?;
    match file.try_lock() {
        Ok(()) => Ok(Lock {
            file,
            pid: std::process::id(),
        }),
        Err(TryLockError::WouldBlock) => Err(Error::new(
            ErrorKind::Conflict,
            format!(
                "cache directory {} is in use by another process",
                dir.display()
            ),
        )
        .hint("give each forebay process a cache directory of its own")),
        Err(TryLockError::Error(e)) => Err(Error::internal(format!(
            "cache directory {} cannot be locked",
            dir.display()
        ))
        .caused_by(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forked process that shares all of this process's open files, until it is killed.
    struct Forked(libc::pid_t);

    impl Forked {
        fn new(run: impl FnOnce()) -> Self {
            // SAFETY: the child calls nothing that depends on another thread's state: `run` is as
            // careful, and it never returns.
            match unsafe { libc::fork() } {
                0 => {
                    run();
                    loop {
                        // SAFETY: waits for a signal, and touches nothing.
                        unsafe { libc::pause() };
                    }
                }
                pid => Self(pid),
            }
        }
    }

    impl Drop for Forked {
        fn drop(&mut self) {
            // SAFETY: a child of this process, not waited for yet.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn a_directory_is_given_back_though_a_forked_process_has_its_lock_open() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        let forked = Forked::new(|| ());
        assert_eq!(lock(dir.path()).unwrap_err().kind(), ErrorKind::Conflict);
        drop(held);
        drop(lock(dir.path()).unwrap());
        drop(forked);
    }

    #[test]
    fn a_forked_process_does_not_give_back_what_is_not_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        let done = dir.path().join("done");
        let (mut inside, path) = (
            Some(held),
            std::ffi::CString::new(done.as_os_str().as_encoded_bytes()).unwrap(),
        );
        let forked = Forked::new(|| {
            drop(inside.take());
            // SAFETY: a path that ends with a zero.
            unsafe { libc::mkdir(path.as_ptr(), 0o700) };
        });
        while !done.exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(lock(dir.path()).unwrap_err().kind(), ErrorKind::Conflict);
        drop((forked, inside));
        drop(lock(dir.path()).unwrap());
    }
}
