//! Segment files and the table that readers find them in.
//!
//! A segment is a file that records are appended to until it is full. Nothing in it is changed
//! afterwards; it is deleted as a whole. Readers hold an [`Arc`] of it, so a read that has begun
//! succeeds even if the file is deleted meanwhile.

use crate::{
    advice::Sampled,
    disk::DiskFile,
    index::{Entry, SLOTS_MAX},
    inner::Inner,
    record::{ALIGN_BYTES, HEADER_BYTES, Header, Kind, Place, padded},
    sync::{
        Mutex, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};
use std::{
    io,
    ops::{ControlFlow, Range},
    path::PathBuf,
    sync::Arc,
};

/// A scan calls this with the offset, the header, the name and the meta of each record.
pub type Visit<'a> = dyn FnMut(u64, &Header, &[u8], &[u8]) -> ControlFlow<()> + 'a;

pub struct Segment {
    /// Index of its directory in the store.
    pub dir: usize,
    /// Its place in [`Segments`].
    pub slot: u32,
    /// Order of creation over all directories; part of the file's name.
    pub ordinal: u64,
    pub secret: u64,
    pub path: PathBuf,
    pub file: Box<dyn DiskFile>,
    /// Bytes given to records so far. Only the active segment's file is longer, by the prepared
    /// part.
    pub end: AtomicU64,
    /// The file is prepared for records up to here; none is placed beyond.
    pub prepared: AtomicU64,
    /// Records that have a place but are not written and published yet.
    pub pending: AtomicU32,
    pub live_bytes: AtomicU64,
    pub live_records: AtomicU64,
    /// Pinned bytes that the evictor moved here.
    pub held_bytes: AtomicU64,
    pub tombstone_bytes: AtomicU64,
    /// Tombstones before this offset were already copied to the end of the log, by an attempt to
    /// empty the segment that later broke off.
    pub tombstones_moved_to: AtomicU64,
    /// The evictor has begun to empty it, so it may hold records that are not in the index.
    pub emptying: AtomicBool,
    /// Records of names (heads, pins) that a restart may find here although they are outdated:
    /// replaced, removed, or unclear since the last start.
    pub outdated: AtomicU64,
    /// Its name in the directory is known to be on the disk.
    pub name_synced: AtomicBool,
    /// A sync failed, so what was written here may be lost, though the next sync may succeed: the kernel
    /// tells of a failure only once.
    pub sync_failed: AtomicBool,
    pub samples: Sampled,
}

impl Segment {
    pub fn new(
        dir: usize,
        slot: u32,
        ordinal: u64,
        secret: u64,
        path: PathBuf,
        file: Box<dyn DiskFile>,
        end: u64,
    ) -> Self {
        Self {
            dir,
            slot,
            ordinal,
            secret,
            path,
            file,
            end: AtomicU64::new(end),
            prepared: AtomicU64::new(end),
            pending: AtomicU32::new(0),
            live_bytes: AtomicU64::new(0),
            live_records: AtomicU64::new(0),
            held_bytes: AtomicU64::new(0),
            tombstone_bytes: AtomicU64::new(0),
            tombstones_moved_to: AtomicU64::new(0),
            emptying: AtomicBool::new(false),
            outdated: AtomicU64::new(0),
            name_synced: AtomicBool::new(false),
            sync_failed: AtomicBool::new(false),
            samples: Sampled::default(),
        }
    }

    pub fn place(&self, offset: u64) -> Place {
        Place {
            secret: self.secret,
            ordinal: self.ordinal,
            offset,
        }
    }

    pub fn file_name(ordinal: u64) -> String {
        format!("seg-{ordinal:016x}")
    }

    pub fn parse_file_name(name: &str) -> Option<u64> {
        u64::from_str_radix(name.strip_prefix("seg-").filter(|hex| hex.len() == 16)?, 16).ok()
    }

    pub fn add_live(&self, bytes: u64) {
        self.live_bytes.fetch_add(bytes, Relaxed);
        self.live_records.fetch_add(1, Relaxed);
    }

    pub fn sub_live(&self, bytes: u64) {
        self.live_bytes.fetch_sub(bytes, Relaxed);
        self.live_records.fetch_sub(1, Relaxed);
    }

    /// The entry's record stays in the file, but is outdated.
    pub fn note_outdated(&self, entry: &Entry) {
        if Inner::is_named(entry) {
            self.outdated.fetch_add(1, Relaxed);
        }
    }

    pub fn dead_bytes(&self) -> u64 {
        self.end
            .load(Relaxed)
            .saturating_sub(self.live_bytes.load(Relaxed) + self.tombstone_bytes.load(Relaxed))
    }

    /// Calls `visit` with each record that begins from byte `from` of the file on, in order: if `names`
    /// is set, with its name and, if it is a part, its meta. Bytes that are not a record are
    /// skipped on the 64-byte grid. Returns how many grid points that are not zeros were skipped.
    pub fn scan(&self, from: u64, names: bool, visit: &mut Visit<'_>) -> io::Result<u64> {
        let size = self.file.size()?;
        self.scan_within(from..size, size, names, visit)
    }

    /// The same, with names, of the records that begin in `range`.
    pub fn scan_to(&self, range: Range<u64>, visit: &mut Visit<'_>) -> io::Result<u64> {
        self.scan_within(range, self.file.size()?, true, visit)
    }

    fn scan_within(
        &self,
        range: Range<u64>,
        size: u64,
        names: bool,
        visit: &mut Visit<'_>,
    ) -> io::Result<u64> {
        let mut window = Window {
            file: &*self.file,
            size,
            bytes: Vec::new(),
            at: 0,
        };
        let (mut pos, mut skipped, mut last_len) = (range.start, 0u64, 0u64);
        while pos < range.end && pos + HEADER_BYTES as u64 <= size {
            // After large records only the next header is needed; small ones are read many at a
            // time.
            let ahead = if last_len > 128 << 10 {
                2 << 10
            } else {
                256 << 10
            };
            let header = Header::decode(window.get(pos, HEADER_BYTES, ahead)?, self.place(pos))
                .filter(|h| pos + h.len() <= size);
            let Some(header) = header else {
                // Zeros were prepared and not used.
                let zeros = window
                    .get(pos, HEADER_BYTES, ahead)?
                    .iter()
                    .all(|b| *b == 0);
                (pos, skipped) = (pos + ALIGN_BYTES, skipped + u64::from(!zeros));
                last_len = 0;
                continue;
            };
            let mut name_and_meta: (&[u8], &[u8]) = (&[], &[]);
            if names {
                let name_end = header.name_range().end;
                let end = if header.kind == Kind::Part {
                    header.meta_range().end
                } else {
                    name_end
                };
                name_and_meta =
                    window.get(pos, end, ahead)?[HEADER_BYTES..].split_at(name_end - HEADER_BYTES);
            }
            if visit(pos, &header, name_and_meta.0, name_and_meta.1).is_break() {
                break;
            }
            last_len = padded(header.len());
            pos += last_len;
        }
        Ok(skipped)
    }
}

/// A buffered view of a file.
struct Window<'a> {
    file: &'a dyn DiskFile,
    size: u64,
    bytes: Vec<u8>,
    at: u64,
}

impl Window<'_> {
    /// `len` bytes at `pos`; if they must be read, up to `ahead` bytes are.
    fn get(&mut self, pos: u64, len: usize, ahead: usize) -> io::Result<&[u8]> {
        if pos < self.at || pos + len as u64 > self.at + self.bytes.len() as u64 {
            self.bytes.clear();
            self.at = pos;
            let n = (len.max(ahead) as u64).min(self.size - pos) as usize;
            self.file.read_append(&mut self.bytes, n, pos)?;
        }
        let begin = (pos - self.at) as usize;
        self.bytes
            .get(begin..begin + len)
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

const STRIPES: usize = 16;

/// Slot number to segment. Several copies, so that readers on many cores do not contend for one
/// lock.
pub struct Segments {
    stripes: [RwLock<Vec<Option<Arc<Segment>>>>; STRIPES],
    free: Mutex<Vec<u32>>,
    next: AtomicU32,
}

impl Segments {
    pub fn new() -> Self {
        Self {
            stripes: std::array::from_fn(|_| RwLock::new(Vec::new())),
            free: Mutex::new(Vec::new()),
            next: AtomicU32::new(0),
        }
    }

    /// A number that no other segment has. `None`: too many segments.
    pub fn take_slot(&self) -> Option<u32> {
        if let Some(slot) = self.free.lock().pop() {
            return Some(slot);
        }
        let slot = self.next.fetch_add(1, Relaxed);
        ((slot as usize) < SLOTS_MAX).then_some(slot)
    }

    pub fn publish(&self, segment: &Arc<Segment>) {
        for stripe in &self.stripes {
            let mut table = stripe.write();
            if table.len() <= segment.slot as usize {
                table.resize(segment.slot as usize + 1, None);
            }
            table[segment.slot as usize] = Some(segment.clone());
        }
    }

    pub fn free(&self, slot: u32) {
        for stripe in &self.stripes {
            if let Some(place) = stripe.write().get_mut(slot as usize) {
                *place = None;
            }
        }
        self.free.lock().push(slot);
    }

    pub fn get(&self, slot: u32) -> Option<Arc<Segment>> {
        thread_local!(static STRIPE: usize = {
            static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) as usize % STRIPES
        });
        self.stripes[STRIPE.with(|s| *s)]
            .read()
            .get(slot as usize)?
            .clone()
    }
}
