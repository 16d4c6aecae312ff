//! A disk that fails on demand: [`FaultyDisk`] wraps any other [`Disk`] and does to its operations
//! what the [`Rule`]s of its [`Faults`] say.
//!
//! It is part of the library so that tests of other crates, and tools that rehearse failures, can
//! use it; the store itself does not know of it.
//!
//! ```
//! use forebay_store::{disk::RealDisk, faults::{Fault, FaultyDisk, Op, Rule}};
//! let (disk, faults) = FaultyDisk::new(RealDisk);
//! faults.add(Rule::new(Op::Write, Fault::Error(libc::ENOSPC)).on("seg-").after(3).times(1)); // the fourth write to a segment
//! # let _ = disk;
//! ```

use crate::disk::{Disk, DiskFile, OpenMode, Space};
use forebay_core::sync::Mutex;
use std::{io, ops::Range, path::Path, sync::Arc, time::Duration};

/// The operations on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A file is created.
    Create,
    /// An existing file is opened for reading only.
    Open,
    /// An existing file is opened for writing, too.
    OpenWrite,
    /// Bytes of a file are read.
    Read,
    /// Bytes of a file are written; [preparing](DiskFile::prepare) does not count.
    Write,
    /// A file is cut or made longer.
    Resize,
    /// A file or a directory is made durable.
    Sync,
    /// A file is removed.
    Delete,
    /// A file is renamed; the rule's path is that of its new name.
    Rename,
    /// The files of a directory are listed.
    List,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done, and the operation returns this error number.
    Error(i32),
    /// Only the first bytes are read or written; then the operation returns this error number. An
    /// operation that carries no bytes just fails.
    Short(usize, i32),
    /// Only the first bytes are written, and success is reported: what a power cut leaves of data
    /// in the page cache. Affects only writes.
    Torn(usize),
    /// One bit of what is read or written changes: in the byte at this position, counted from the
    /// beginning of the transfer (modulo its length).
    FlipBit(usize),
    /// The operation takes longer.
    Delay(Duration),
    /// The operation waits until the rules are [cleared](Faults::clear), and is done then.
    Hang,
    /// Nothing is done, and success is reported. (A sync that is skipped makes tests quick.) No
    /// effect on operations that must return something: files are still created, opened and read,
    /// and directories listed.
    Skip,
}

/// One kind of failure, and when it happens.
#[derive(Clone, Debug)]
pub struct Rule {
    op: Op,
    fault: Fault,
    file: String,
    after: u64,
    times: u64,
}

impl Rule {
    /// Affects every operation of this kind.
    pub fn new(op: Op, fault: Fault) -> Self {
        Self {
            op,
            fault,
            file: String::new(),
            after: 0,
            times: u64::MAX,
        }
    }

    /// Only files whose path contains `part`.
    pub fn on(mut self, part: impl Into<String>) -> Self {
        self.file = part.into();
        self
    }

    /// Lets the first `n` pass.
    pub fn after(mut self, n: u64) -> Self {
        self.after = n;
        self
    }

    /// At most `n` times.
    pub fn times(mut self, n: u64) -> Self {
        self.times = n;
        self
    }
}

#[derive(Default)]
struct Rules {
    in_force: Vec<Rule>,
    /// How many faults have happened.
    happened: u64,
    /// How often the rules were cleared.
    cleared: u64,
}

/// The rules in force, shared by a disk and the test that controls it.
#[derive(Clone, Default)]
pub struct Faults(Arc<Mutex<Rules>>, Arc<Mutex<Option<u64>>>);

impl Faults {
    /// Puts a rule in force. If several match an operation, the one added first applies.
    pub fn add(&self, rule: Rule) {
        self.0.lock().in_force.push(rule);
    }

    /// The file system becomes read-only, as after an error of its journal.
    pub fn read_only(&self, path: &str) {
        for op in [
            Op::Create,
            Op::OpenWrite,
            Op::Write,
            Op::Resize,
            Op::Delete,
            Op::Rename,
        ] {
            self.add(Rule::new(op, Fault::Error(libc::EROFS)).on(path));
        }
    }

    /// The file system has no space for new bytes; deleting still works.
    pub fn full(&self, path: &str) {
        self.add(Rule::new(Op::Write, Fault::Error(libc::ENOSPC)).on(path));
    }

    /// From now on, the file system says that so much may still be written; `None`: what it has.
    pub fn say_available(&self, bytes: Option<u64>) {
        *self.1.lock() = bytes;
    }

    /// The disk is well again.
    pub fn clear(&self) {
        let mut rules = self.0.lock();
        rules.in_force.clear();
        rules.cleared += 1;
    }

    /// How many faults have happened.
    pub fn happened(&self) -> u64 {
        self.0.lock().happened
    }

    /// What happens to this operation. If it is to hang, it has done so when this returns.
    fn next(&self, op: Op, path: &Path) -> Option<Fault> {
        let (fault, cleared) = self.take(op, path)?;
        if fault != Fault::Hang {
            return Some(fault);
        }
        while self.0.lock().cleared == cleared {
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// The next fault, and how often the rules had been cleared before it.
    fn take(&self, op: Op, path: &Path) -> Option<(Fault, u64)> {
        let mut rules = self.0.lock();
        let Rules {
            in_force,
            happened,
            cleared,
        } = &mut *rules;
        let path = path.to_string_lossy();
        for rule in in_force
            .iter_mut()
            .filter(|r| r.op == op && path.contains(&r.file) && r.times > 0)
        {
            if rule.after > 0 {
                rule.after -= 1;
            } else {
                rule.times -= 1;
                *happened += 1;
                return Some((rule.fault, *cleared));
            }
        }
        None
    }

    /// What [`Faults::next`] would return, without consuming it.
    fn peek(&self, op: Op, path: &Path) -> Option<Fault> {
        let rules = self.0.lock();
        let path = path.to_string_lossy();
        let next = rules
            .in_force
            .iter()
            .find(|r| r.op == op && path.contains(&r.file) && r.times > 0 && r.after == 0);
        next.map(|r| r.fault)
    }

    /// For operations that carry no bytes. `false`: skip it.
    fn check(&self, op: Op, path: &Path) -> io::Result<bool> {
        match self.next(op, path) {
            Some(Fault::Error(errno) | Fault::Short(_, errno)) => {
                Err(io::Error::from_raw_os_error(errno))
            }
            Some(Fault::Delay(time)) => {
                std::thread::sleep(time);
                Ok(true)
            }
            Some(Fault::Skip) => Ok(false),
            Some(Fault::Torn(_) | Fault::FlipBit(_) | Fault::Hang) | None => Ok(true),
        }
    }
}

/// A disk that fails as its [`Faults`] say, and otherwise does what the one it wraps does.
pub struct FaultyDisk {
    disk: Arc<dyn Disk>,
    faults: Faults,
}

impl FaultyDisk {
    /// Wraps `disk`. Also returns the rules, none so far, that control it.
    pub fn new(disk: impl Disk) -> (Self, Faults) {
        let faults = Faults::default();
        (
            Self {
                disk: Arc::new(disk),
                faults: faults.clone(),
            },
            faults,
        )
    }
}

struct FaultyFile {
    file: Box<dyn DiskFile>,
    path: std::path::PathBuf,
    faults: Faults,
}

impl Disk for FaultyDisk {
    fn space(&self, dir: &Path) -> io::Result<Space> {
        let space = self.disk.space(dir)?;
        let said = *self.faults.1.lock();
        Ok(Space {
            available_bytes: said.unwrap_or(space.available_bytes),
            ..space
        })
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.faults.check(Op::Create, path)?;
        self.disk.create_dir_all(path)
    }

    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn DiskFile>> {
        let op = match mode {
            OpenMode::Read => Op::Open,
            OpenMode::ReadWrite => Op::OpenWrite,
            OpenMode::Create => Op::Create,
        };
        self.faults.check(op, path)?;
        Ok(Box::new(FaultyFile {
            file: self.disk.open(path, mode)?,
            path: path.to_owned(),
            faults: self.faults.clone(),
        }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>> {
        self.faults.check(Op::List, dir)?;
        self.disk.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.faults.check(Op::Rename, to)? {
            self.disk.rename(from, to)
        } else {
            Ok(())
        }
    }

    fn delete(&self, path: &Path) -> io::Result<()> {
        if self.faults.check(Op::Delete, path)? {
            self.disk.delete(path)
        } else {
            Ok(())
        }
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        if self.faults.check(Op::Sync, dir)? {
            self.disk.sync_dir(dir)
        } else {
            Ok(())
        }
    }
}

impl DiskFile for FaultyFile {
    fn read_append(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<()> {
        let fault = self.faults.next(Op::Read, &self.path);
        match fault {
            Some(Fault::Error(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Delay(time)) => std::thread::sleep(time),
            _ => {}
        }
        let begin = out.len();
        match fault {
            Some(Fault::Short(n, errno)) => {
                self.file.read_append(out, n.min(len), offset)?;
                Err(io::Error::from_raw_os_error(errno))
            }
            Some(Fault::FlipBit(at)) if len > 0 => {
                self.file.read_append(out, len, offset)?;
                out[begin + at % len] ^= 1 << (at % 8);
                Ok(())
            }
            _ => self.file.read_append(out, len, offset),
        }
    }

    /// A slow disk is waited for; every other fault happens at once.
    fn read_append_now(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<bool> {
        if self
            .faults
            .peek(Op::Read, &self.path)
            .is_some_and(|f| matches!(f, Fault::Delay(_) | Fault::Hang))
        {
            return Ok(false);
        }
        let begin = out.len();
        let read = self.read_append(out, len, offset);
        if read.is_err() {
            out.truncate(begin);
        }
        read.map(|()| true)
    }

    fn write_all_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        let fault = self.faults.next(Op::Write, &self.path);
        let mut bytes = if fault.is_some() {
            parts.concat()
        } else {
            Vec::new()
        };
        match fault {
            None | Some(Fault::Hang) => self.file.write_all_at(parts, offset),
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Short(n, errno)) => {
                self.file
                    .write_all_at(&[&bytes[..n.min(bytes.len())]], offset)?;
                Err(io::Error::from_raw_os_error(errno))
            }
            Some(Fault::Torn(n)) => self
                .file
                .write_all_at(&[&bytes[..n.min(bytes.len())]], offset),
            Some(Fault::Skip) => Ok(()),
            Some(Fault::FlipBit(at)) => {
                if !bytes.is_empty() {
                    let at_byte = at % bytes.len();
                    bytes[at_byte] ^= 1 << (at % 8);
                }
                self.file.write_all_at(&[&bytes], offset)
            }
            Some(Fault::Delay(time)) => {
                std::thread::sleep(time);
                self.file.write_all_at(parts, offset)
            }
        }
    }

    /// Not an operation of its own, because it changes nothing: rules count what the store reads
    /// and writes.
    fn prepare(&self, range: Range<u64>) {
        self.file.prepare(range);
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        if self.faults.check(Op::Resize, &self.path)? {
            self.file.set_size(size)
        } else {
            Ok(())
        }
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn sync(&self) -> io::Result<()> {
        if self.faults.check(Op::Sync, &self.path)? {
            self.file.sync()
        } else {
            Ok(())
        }
    }
}
