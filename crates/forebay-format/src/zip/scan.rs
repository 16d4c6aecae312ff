//! Finds the members of a zip: the end record in the tail, the zip64 record if there is one, then
//! the directory piece by piece.
//!
//! [`ZipScanner::step`] names the needed range, [`ZipScanner::feed`] takes it (or any part of it,
//! in order). Memory besides the index is one piece of the directory (1 MiB, at most 192 KiB of it
//! carried over) and 16 bytes per member, to check that no two overlap.

use super::{record::record_len, *};
use crate::{
    ArchiveKind, ScanStep,
    index::{Extent, MemberIndex, MemberIndexBuilder},
};
use forebay_core::{Error, Result, limits};
use std::ops::Range;

/// The end record with its longest comment, and the two zip64 records before it.
const TAIL_BYTES: u64 = (END_BYTES + 0xffff + LOCATOR64_BYTES + END64_BYTES) as u64;
const PIECE_BYTES: u64 = 1 << 20;

/// Finds the members of a zip: fed by range.
#[derive(Debug)]
pub struct ZipScanner {
    builder: MemberIndexBuilder,
    size: u64,
    want: Want,
    /// The needed range, and its bytes so far.
    range: Range<u64>,
    held: Vec<u8>,
    directory: Directory,
    spans: Vec<Range<u64>>,
    failed: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Want {
    Tail,
    /// The zip64 end record; the end record is at this offset.
    End64 {
        end_at: u64,
    },
    /// The rest of the directory, in pieces.
    Entries,
    Nothing,
}

#[derive(Clone, Debug, Default)]
struct Directory {
    start: u64,
    end: u64,
    entries: u64,
    /// The count has 16 bits, which some programs let overflow.
    count_of_16_bits: bool,
    /// Bytes in front of the archive: all offsets are relative to their end.
    before: u64,
}

impl ZipScanner {
    /// For an archive of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self {
            builder: MemberIndexBuilder::new(ArchiveKind::Zip, size),
            size,
            want: Want::Tail,
            range: size.saturating_sub(TAIL_BYTES)..size,
            held: Vec::new(),
            directory: Directory::default(),
            spans: Vec::new(),
            failed: None,
        }
    }

    /// What is needed next.
    ///
    /// # Errors
    /// The error that the scan failed with, again; `Corrupt` for an empty archive.
    pub fn step(&self) -> Result<ScanStep> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        match self.want {
            Want::Nothing => Ok(ScanStep::Done),
            _ if self.size < END_BYTES as u64 => Err(Error::corrupt(format!(
                "{} bytes are too short for a zip",
                self.size
            ))),
            _ => Ok(ScanStep::Need(
                self.range.start + self.held.len() as u64..self.range.end,
            )),
        }
    }

    /// Takes bytes that begin at `offset` of the archive and says what is needed next. Bytes before
    /// the needed ones are skipped; bytes beyond a gap are not used.
    ///
    /// # Errors
    /// `Corrupt` with the offset, `Unsupported` past a limit and for multi-part archives.
    pub fn feed(&mut self, offset: u64, bytes: &[u8]) -> Result<ScanStep> {
        loop {
            let wanted = match self.step()? {
                ScanStep::Need(range) => range,
                done => return Ok(done),
            };
            let Some(skip) = wanted
                .start
                .checked_sub(offset)
                .and_then(|s| usize::try_from(s).ok())
                .filter(|&s| s < bytes.len())
            else {
                return Ok(ScanStep::Need(wanted));
            };
            let fresh = &bytes[skip..];
            let n = fresh.len().min((wanted.end - wanted.start) as usize);
            self.held.extend_from_slice(&fresh[..n]);
            if self.range.start + self.held.len() as u64 == self.range.end {
                let held = std::mem::take(&mut self.held);
                let taken = match self.want {
                    Want::Tail => self.tail(&held),
                    Want::End64 { end_at } => self.end64(&held, end_at),
                    Want::Entries => self.entries(held),
                    Want::Nothing => Ok(()),
                };
                if let Err(e) = taken {
                    self.failed = Some(e.clone());
                    return Err(e);
                }
            }
        }
    }

    /// # Errors
    /// `Corrupt` if the directory was not fed to its end.
    pub fn finish(self) -> Result<MemberIndex> {
        match self.step()? {
            ScanStep::Done => Ok(self.builder.finish()),
            ScanStep::Need(range) => Err(Error::corrupt(format!(
                "the zip is cut off: bytes {}-{} are missing",
                range.start,
                range.end - 1
            ))),
        }
    }

    /// The members found so far.
    pub fn found(&self) -> &MemberIndexBuilder {
        &self.builder
    }

    /// Memory that the scan holds.
    pub fn memory_bytes(&self) -> usize {
        self.builder.memory_bytes()
            + self.held.capacity()
            + self.spans.capacity() * size_of::<Range<u64>>()
    }

    fn tail(&mut self, tail: &[u8]) -> Result<()> {
        let ends_with_comment =
            |at: usize| tail.len() - at - END_BYTES >= usize::from(u16_at(tail, at + 20));
        let ends_exactly =
            |at: usize| tail.len() - at - END_BYTES == usize::from(u16_at(tail, at + 20));
        let candidates = || {
            (0..=tail.len() - END_BYTES)
                .rev()
                .filter(|&at| u32_at(tail, at) == END_SIGNATURE)
        };
        // A comment may hold the signature: the record whose comment ends at the end of the archive
        // is the more likely one.
        let Some(at) = candidates()
            .find(|&at| ends_exactly(at))
            .or_else(|| candidates().find(|&at| ends_with_comment(at)))
        else {
            return Err(
                Error::corrupt("it is not a zip: it does not have an end record")
                    .hint("the archive may be cut off"),
            );
        };
        let end = &tail[at..at + END_BYTES];
        let end_at = self.range.start + at as u64;
        let locator = at
            .checked_sub(LOCATOR64_BYTES)
            .map(|l| &tail[l..at])
            .filter(|l| u32_at(l, 0) == LOCATOR64_SIGNATURE);
        if let Some(locator) = locator {
            // Directly before the locator, unless the record is longer than usual; then where the
            // locator says.
            let usual = at
                .checked_sub(LOCATOR64_BYTES + END64_BYTES)
                .filter(|&r| u32_at(tail, r) == END64_SIGNATURE);
            let start = usual.map_or(u64_at(locator, 8), |r| self.range.start + r as u64);
            let room = start
                .checked_add((END64_BYTES + LOCATOR64_BYTES) as u64)
                .is_some_and(|e| e <= end_at);
            if !room {
                return Err(Error::corrupt(format!(
                    "the zip64 locator before offset {end_at} points outside of the archive"
                )));
            }
            self.want = Want::End64 { end_at };
            self.range = start..start + END64_BYTES as u64;
            return Ok(());
        }
        if u16_at(end, 4) != 0 || u16_at(end, 6) != 0 {
            return Err(Error::unsupported("the zip is split into several parts")
                .hint("join the parts into one archive"));
        }
        self.directory.count_of_16_bits = true;
        let (entries, len, offset) = (
            u64::from(u16_at(end, 10)),
            u64::from(u32_at(end, 12)),
            u64::from(u32_at(end, 16)),
        );
        self.begin_directory(entries, len, offset, end_at)
    }

    fn end64(&mut self, record: &[u8], end_at: u64) -> Result<()> {
        let at = self.range.start;
        if u32_at(record, 0) != END64_SIGNATURE {
            return Err(Error::corrupt(format!(
                "a zip64 end record was expected at offset {at}"
            )));
        }
        let rest = u64_at(record, 4).checked_add(12 + LOCATOR64_BYTES as u64);
        if rest.and_then(|r| r.checked_add(at)) != Some(end_at) {
            return Err(Error::corrupt(format!(
                "the length of the zip64 end record at offset {at} is impossible"
            )));
        }
        if u32_at(record, 16) != 0 || u32_at(record, 20) != 0 {
            return Err(Error::unsupported("the zip is split into several parts")
                .hint("join the parts into one archive"));
        }
        self.begin_directory(
            u64_at(record, 32),
            u64_at(record, 40),
            u64_at(record, 48),
            at,
        )
    }

    /// The directory of `len` bytes ends at `end`; its claimed offset shows how many bytes precede
    /// the archive.
    fn begin_directory(&mut self, entries: u64, len: u64, offset: u64, end: u64) -> Result<()> {
        let start = end.checked_sub(len);
        let Some((start, before)) = start.and_then(|s| Some((s, s.checked_sub(offset)?))) else {
            return Err(Error::corrupt(format!(
                "the zip's directory of {len} bytes at offset {offset} does not fit before its \
                 end record at offset {end}"
            )));
        };
        if len > limits::ZIP_DIRECTORY_MAX_BYTES {
            let max = limits::ZIP_DIRECTORY_MAX_BYTES;
            return Err(Error::unsupported(format!(
                "the zip's directory is {len} bytes long; the limit is {max}"
            )));
        }
        self.directory = Directory {
            start,
            end,
            entries,
            before,
            count_of_16_bits: self.directory.count_of_16_bits,
        };
        self.builder.set_bound(start);
        self.want = Want::Entries;
        self.range = start..start;
        self.entries(Vec::new())
    }

    /// Parses the whole records in `held` and asks for the next piece.
    fn entries(&mut self, mut held: Vec<u8>) -> Result<()> {
        let mut used = 0;
        loop {
            let rest = &held[used..];
            let at = self.range.start + used as u64;
            if rest.len() >= 4 && u32_at(rest, 0) != ENTRY_SIGNATURE {
                // A digital signature may follow the entries.
                if self.count_is_right() {
                    return self.complete();
                }
                return Err(Error::corrupt(format!(
                    "a zip directory entry was expected at offset {at}"
                )));
            }
            match record_len(rest) {
                Some(len) if len <= rest.len() => {
                    let entry = record::parse(&rest[..len], at)?;
                    used += len;
                    self.entry(&entry, at)?;
                }
                _ => break,
            }
        }
        held.drain(..used);
        let start = self.range.start + used as u64;
        let here = start + held.len() as u64;
        if here == self.directory.end {
            if !held.is_empty() || !self.count_is_right() {
                let (found, told) = (self.builder.len(), self.directory.entries);
                return Err(Error::corrupt(format!(
                    "the zip's directory has {found} entries, and its end record says {told}"
                )));
            }
            return self.complete();
        }
        self.range = start..here.saturating_add(PIECE_BYTES).min(self.directory.end);
        self.held = held;
        Ok(())
    }

    fn entry(&mut self, entry: &record::Entry<'_>, at: u64) -> Result<()> {
        let Directory {
            before,
            start: bound,
            ..
        } = self.directory;
        let end_of = |offset: u64| {
            offset
                .checked_add(LOCAL_HEADER_BYTES + entry.raw_name_len)?
                .checked_add(entry.stored_size)
        };
        let offset = entry.offset.checked_add(before);
        let Some((offset, end)) = offset
            .and_then(|o| Some((o, end_of(o)?)))
            .filter(|&(_, end)| end <= bound)
        else {
            return Err(Error::corrupt(format!(
                "the zip's directory entry at offset {at}: {} bytes at offset {} are outside of \
                 the archive",
                entry.stored_size, entry.offset
            )));
        };
        self.spans.push(offset..end);
        let extent = Extent {
            kind: ArchiveKind::Zip,
            storage: entry.storage,
            offset,
            size: entry.size,
            stored_size: entry.stored_size,
            crc32: Some(entry.crc32),
            bound,
        };
        self.builder.push(&entry.name, entry.mtime_secs, &extent)
    }

    fn count_is_right(&self) -> bool {
        let found = self.builder.len() as u64;
        found == self.directory.entries
            || self.directory.count_of_16_bits && found & 0xffff == self.directory.entries
    }

    fn complete(&mut self) -> Result<()> {
        let mut spans = std::mem::take(&mut self.spans);
        spans.sort_unstable_by_key(|s| s.start);
        if let Some(pair) = spans.windows(2).find(|pair| pair[0].end > pair[1].start) {
            return Err(Error::corrupt(format!(
                "the zip's members at offsets {} and {} overlap",
                pair[0].start, pair[1].start
            )));
        }
        self.want = Want::Nothing;
        Ok(())
    }
}
