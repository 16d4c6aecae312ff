//! Buffers that were fed, kept until they are used.

use bytes::Bytes;
use std::ops::Range;

/// Bytes of a file by their offsets. Invariant: no part ends past `u64::MAX`.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Sorted by offset.
    parts: Vec<(u64, Bytes)>,
}

impl Held {
    pub fn put(&mut self, offset: u64, bytes: Bytes) {
        if bytes.is_empty() || offset.checked_add(bytes.len() as u64).is_none() {
            return;
        }
        let at = self.parts.partition_point(|(start, _)| *start <= offset);
        self.parts.insert(at, (offset, bytes));
    }

    /// The bytes of a range, if one part holds them all.
    pub fn get(&self, range: &Range<u64>) -> Option<Bytes> {
        if range.start >= range.end {
            return Some(Bytes::new());
        }
        let before = self
            .parts
            .partition_point(|(start, _)| *start <= range.start);
        // Parts may overlap; a few steps back suffice for callers that feed what was asked for.
        let (start, bytes) = self.parts[..before]
            .iter()
            .rev()
            .take(8)
            .find(|(start, b)| start + b.len() as u64 >= range.end)?;
        Some(bytes.slice((range.start - start) as usize..(range.end - start) as usize))
    }

    /// The ranges that are not held.
    pub fn missing(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        ranges
            .iter()
            .filter(|r| self.get(r).is_none())
            .cloned()
            .collect()
    }

    pub fn clear(&mut self) {
        self.parts.clear();
    }
}
