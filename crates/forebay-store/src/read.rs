//! The read path: one lookup, one `pread`, checks, and the bytes go straight to their destination.
//!
//! Small records are read whole into a buffer of the thread and copied from there while they are
//! hot. Of a large record, first the beginning is read (header, name, meta, block table), then the
//! blocks that the range touches, directly into the caller's buffer.
//!
//! Invariant: no byte leaves before its checksum is verified, and only under the name and key that
//! it was written for. On any failure the caller's buffer is as before. (One function leaves the
//! verifying to its caller, whose data have checksums of their own; its name says so.)

use crate::{
    index::Entry,
    inner::{Damage, Inner},
    record::{FLAG_INLINE, Header, Kind, name_is},
    segment::Segment,
};
use forebay_core::ObjectName;
use std::{cell::Cell, ops::Range, sync::Arc};

/// Records up to this size are read with one call, whatever the range.
const SINGLE_READ_BYTES: usize = 64 << 10;
/// How much of the beginning of larger records is read: nearly always enough for header, name, meta
/// and block table.
const PREFIX_READ_BYTES: usize = 4 << 10;
/// Blocks of large records are read and verified in steps of this size: their checksums are
/// computed while the bytes are in the core's cache.
const STEP_BYTES: usize = 128 << 10;

thread_local!(static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) });

/// Why a read returned nothing.
pub enum Miss {
    /// It is another object's record: the 128-bit hashes collide.
    Collision,
    Damaged(Damage),
    /// This record does not hold what was asked for.
    NotHere,
    /// The read would have to wait for the disk.
    Waits,
}

/// Whether a read may wait for the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// For threads that may block.
    May,
    /// For threads that must not block: reads what is in the page cache, or nothing.
    MustNot,
}

/// A read that must not wait for the disk would have had to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WouldWait;

/// Reads as `wait` says.
fn read_append(
    segment: &Segment,
    wait: Wait,
    out: &mut Vec<u8>,
    len: usize,
    offset: u64,
) -> Result<(), Miss> {
    match wait {
        Wait::May => segment.file.read_append(out, len, offset)?,
        Wait::MustNot if segment.file.read_append_now(out, len, offset)? => {}
        Wait::MustNot => return Err(Miss::Waits),
    }
    Ok(())
}

impl From<std::io::Error> for Miss {
    fn from(e: std::io::Error) -> Self {
        // A file shorter than the index says has lost its end.
        Miss::Damaged(if e.kind() == std::io::ErrorKind::UnexpectedEof {
            Damage::Checksum
        } else {
            Damage::Io
        })
    }
}

/// A record that was found, and as much of its beginning as was read.
pub struct Record<'a> {
    pub header: Header,
    bytes: &'a [u8],
    segment: &'a Segment,
    offset: u64,
    wait: Wait,
}

impl<'a> Record<'a> {
    pub fn meta(&self) -> &'a [u8] {
        &self.bytes[self.header.meta_range()]
    }

    pub fn is_inline(&self) -> bool {
        self.header.kind == Kind::Head && self.header.flags & FLAG_INLINE != 0
    }

    /// Appends `range` of the data.
    pub fn append(&self, range: Range<u64>, out: &mut Vec<u8>) -> Result<(), Miss> {
        if range.start > range.end || range.end > self.header.data_len as u64 {
            return Err(Miss::NotHere);
        }
        if range.is_empty() {
            return Ok(());
        }
        let blocks = self.header.blocks_of(&range);
        let span = self.header.bytes_of(&blocks);
        let data_start = self.header.prefix_len();
        let within = range.start as usize - span.start..range.end as usize - span.start;
        if let Some(data) = self
            .bytes
            .get(data_start + span.start..data_start + span.end)
        {
            if !self.header.blocks_are_whole(self.bytes, &blocks, data) {
                return Err(Miss::Damaged(Damage::Checksum));
            }
            out.extend_from_slice(&data[within]);
            return Ok(());
        }
        let begin = out.len();
        out.reserve(span.len());
        let step_blocks = STEP_BYTES / self.header.block_bytes();
        for first in blocks.clone().step_by(step_blocks) {
            let step = first..(first + step_blocks).min(blocks.end);
            let bytes = self.header.bytes_of(&step);
            let at = out.len();
            let read = read_append(
                self.segment,
                self.wait,
                out,
                bytes.len(),
                self.offset + (data_start + bytes.start) as u64,
            );
            if read.is_err() || !self.header.blocks_are_whole(self.bytes, &step, &out[at..]) {
                out.truncate(begin);
                read?;
                return Err(Miss::Damaged(Damage::Checksum));
            }
        }
        out.truncate(begin + within.end);
        if within.start > 0 {
            out.drain(begin..begin + within.start);
        }
        Ok(())
    }
}

/// Reads and checks the beginning of a record into `buffer`.
fn open<'a>(
    entry: &Entry,
    segment: &'a Segment,
    name: &ObjectName,
    wait: Wait,
    buffer: &'a mut Vec<u8>,
) -> Result<Record<'a>, Miss> {
    let len = entry.len as usize;
    let first = if len <= SINGLE_READ_BYTES {
        len
    } else {
        PREFIX_READ_BYTES
    };
    buffer.clear();
    read_append(segment, wait, buffer, first, entry.offset())?;
    let header = Header::decode(buffer, segment.place(entry.offset()))
        .ok_or(Miss::Damaged(Damage::Checksum))?;
    if header.key != entry.key() || header.len() != entry.len as u64 {
        return Err(Miss::Damaged(Damage::Checksum));
    }
    if header.prefix_len() > buffer.len() {
        let have = buffer.len();
        read_append(
            segment,
            wait,
            buffer,
            header.prefix_len() - have,
            entry.offset() + have as u64,
        )?;
    }
    if !header.body_is_whole(buffer) {
        return Err(Miss::Damaged(Damage::Checksum));
    }
    if !name_is(&buffer[header.name_range()], name.bucket(), name.key()) {
        return Err(Miss::Collision);
    }
    Ok(Record {
        header,
        bytes: buffer,
        segment,
        offset: entry.offset(),
        wait,
    })
}

fn read_record<T>(
    entry: &Entry,
    segment: &Arc<Segment>,
    name: &ObjectName,
    wait: Wait,
    use_it: impl FnOnce(&Entry, &Record<'_>) -> Result<T, Miss>,
) -> Result<T, Miss> {
    // Taken out, so that what `use_it` calls may read, too.
    let mut buffer = BUFFER.take();
    let result =
        open(entry, segment, name, wait, &mut buffer).and_then(|record| use_it(entry, &record));
    if buffer.capacity() <= 4 * SINGLE_READ_BYTES {
        BUFFER.set(buffer);
    }
    result
}

impl Inner {
    /// Finds the record of `key`, reads its beginning and hands it to `use_it`. A read that may
    /// wait counts damage and drops the entry.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`].
    pub fn with_record<T>(
        &self,
        key: u128,
        name: &ObjectName,
        wait: Wait,
        use_it: impl FnOnce(&Entry, &Record<'_>) -> Result<T, Miss>,
    ) -> Result<Option<T>, WouldWait> {
        let Some((entry, segment)): Option<(Entry, Arc<Segment>)> =
            self.index.locate(key, &self.segments)
        else {
            return Ok(None);
        };
        match read_record(&entry, &segment, name, wait, use_it) {
            Ok(value) => Ok(Some(value)),
            // Repairing it would need a write.
            Err(Miss::Damaged(_)) if wait == Wait::MustNot => Err(WouldWait),
            Err(Miss::Damaged(what)) => {
                self.drop_damaged(&entry, name.bucket(), name.key(), what);
                Ok(None)
            }
            Err(Miss::Collision | Miss::NotHere) => Ok(None),
            Err(Miss::Waits) => Err(WouldWait),
        }
    }

    /// The same for those who only look: a read that may wait, and changes nothing. What is damaged
    /// stays where it is, and the entry does not count as used.
    pub fn look_at_record<T>(
        &self,
        key: u128,
        name: &ObjectName,
        use_it: impl FnOnce(&Entry, &Record<'_>) -> Result<T, Miss>,
    ) -> Option<T> {
        let entry = self.index.peek(key)?;
        let segment = self.segments.get(entry.slot())?;
        read_record(&entry, &segment, name, Wait::May, use_it).ok()
    }

    /// Appends a range of the data of the record of `key`, which has `data_len` bytes of them, as
    /// they lie there: nobody looks at the record's header or its name. `false`, with `out`
    /// unchanged: the store has no record of this key that is as long, or cannot read it.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; `out` is unchanged.
    pub fn append_unverified(
        &self,
        key: u128,
        data_len: u64,
        range: Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        let Some((entry, segment)) = self.index.locate(key, &self.segments) else {
            return Ok(false);
        };
        // The data are what a record ends with.
        let Some(before_data) = u64::from(entry.len).checked_sub(data_len) else {
            return Ok(false);
        };
        if range.start > range.end || range.end > data_len {
            return Ok(false);
        }
        let begin = out.len();
        let (len, at) = (
            (range.end - range.start) as usize,
            entry.offset() + before_data + range.start,
        );
        match read_append(&segment, wait, out, len, at) {
            Ok(()) => Ok(true),
            Err(miss) => {
                out.truncate(begin);
                match miss {
                    Miss::Waits => Err(WouldWait),
                    _ => Ok(false),
                }
            }
        }
    }
}
