//! Who a cache directory is, and how far what it says may be trusted after a restart.
//!
//! `identity.json` is replaced as a whole (write, sync, rename), or, where there is no space for a second one, overwritten: its size
//! never changes. It holds the key of the header checks, the boot in which the directory was last open, whether it was closed cleanly,
//! and the *distrust mark*: entries with a lower sequence number must be revalidated at the origin before use, because a tombstone or a
//! newer record of theirs may have been lost (see the crate's documentation).

use crate::disk::{Disk, OpenMode};
use forebay_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, OpenOptions, TryLockError},
    io,
    path::Path,
};

const FORMAT: u32 = 1;
const FILE: &str = "identity.json";
const TMP: &str = "identity.tmp";
const LOCK: &str = "lock";
/// The file is padded with spaces to this size, so that it can be overwritten on a full disk. 255 peers fit.
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
    /// The same in all directories of one run, and in no other: one that differs from that of the highest run was away.
    pub session: u64,
    pub distrust_below: u64,
    /// A tombstone was missed in this run: the next one distrusts everything.
    #[serde(default)]
    pub missed_tombstone: bool,
    /// Directories of the store that missed a tombstone while this one could be written.
    #[serde(default)]
    pub distrusted_peers: Vec<u64>,
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
        })
    }

    /// `Ok(None)`: there is none, or none that can be used.
    pub fn load(disk: &dyn Disk, dir: &Path) -> io::Result<Option<Self>> {
        let file = match disk.open(&dir.join(FILE), OpenMode::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let size = file.size()?.min(FILE_BYTES as u64);
        let mut bytes = Vec::new();
        file.read_append(&mut bytes, size as usize, 0)?;
        Ok(serde_json::from_slice::<Identity>(&bytes).ok().filter(|i| i.format == FORMAT))
    }

    pub fn save(&self, disk: &dyn Disk, dir: &Path) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.resize(FILE_BYTES.max(bytes.len()), b' ');
        let (tmp, path) = (dir.join(TMP), dir.join(FILE));
        let replaced = disk.open(&tmp, OpenMode::Create).and_then(|file| {
            file.write_all_at(&[&bytes], 0)?;
            file.sync()?;
            disk.rename(&tmp, &path)
        });
        match replaced {
            Ok(()) => disk.sync_dir(dir),
            Err(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                let file = disk.open(&path, OpenMode::ReadWrite).map_err(|_| e)?;
                file.write_all_at(&[&bytes], 0)?;
                file.sync()
            }
            Err(e) => Err(e),
        }
    }
}

/// Changes with each start of the machine. Empty where the system does not tell: then no unclean restart is trusted.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|s| s.trim().to_owned()).unwrap_or_default()
}

pub fn random() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the kernel writes at most the eight bytes that the pointer and length name.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if n != 8 {
        return Err(Error::internal("the system gave no random numbers").source(io::Error::last_os_error()));
    }
    Ok(u64::from_le_bytes(bytes))
}

/// Takes the directory for this process; it is given back when the file is dropped, or the process ends.
pub fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .or_else(|e| if e.kind() == io::ErrorKind::ReadOnlyFilesystem { File::open(&path) } else { Err(e) })
        .map_err(|e| {
            Error::internal(format!("cache directory {} cannot be used", dir.display()))
                .hint("check that the directory is writable by this user")
                .source(e)
        })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Error::new(ErrorKind::Conflict, format!("cache directory {} is in use by another process", dir.display()))
                .hint("give each forebay process a cache directory of its own"))
        }
        Err(TryLockError::Error(e)) => Err(Error::internal(format!("cache directory {} cannot be locked", dir.display())).source(e)),
    }
}
