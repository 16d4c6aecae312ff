//! Rows of files of rows, decoded, beside the version of the file that they come from: whoever
//! decodes them puts them here, in pieces, and reads ranges of a piece.
//!
//! Invariant: as for all derived data, a piece belongs to the version in its key; one that is gone,
//! or damaged, is a miss.

use crate::Engine;
use forebay_core::{ObjectName, VersionId};
use forebay_store::{Part, Wait, WouldWait};
use std::ops::Range;

impl Engine {
    /// Appends a range of a piece, every block of it verified. `false`, with `out` unchanged: it is
    /// not here, shorter, or damaged. Whoever uses the bytes [counts them](Engine::gave_rows).
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; `out` is unchanged.
    pub fn append_rows(
        &self,
        name: &ObjectName,
        version: VersionId,
        piece: Part,
        range: Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        let Some(store) = self.store_for(name) else {
            return Ok(false);
        };
        store.append_part(name, version, piece, range, wait, out)
    }

    /// Appends a range of a piece, which has so many bytes, as it lies on the disk: the caller
    /// verifies it.
    /// `false`, with `out` unchanged: it is not here, or could not be read.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; `out` is unchanged.
    pub fn append_rows_unverified(
        &self,
        name: &ObjectName,
        version: VersionId,
        piece: (Part, u64),
        range: Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        let Some(store) = self.store_for(name) else {
            return Ok(false);
        };
        store.append_part_unverified(name, version, piece, range, wait, out)
    }

    /// Counts bytes of rows that came from here.
    pub fn gave_rows(&self, bytes: u64) {
        if bytes > 0 {
            self.stats().from_cache(bytes);
        }
    }

    /// Whether a piece is here. RAM only.
    pub fn has_rows(&self, name: &ObjectName, version: VersionId, piece: Part) -> bool {
        self.store_for(name)
            .is_some_and(|store| store.has_part(name, version, piece))
    }

    /// Keeps a piece, unless the cache does not take it. Writes to the disk.
    pub fn keep_rows(
        &self,
        name: &ObjectName,
        version: VersionId,
        piece: Part,
        data: &[u8],
    ) -> bool {
        let Some(store) = self.store_for(name) else {
            return false;
        };
        let kept = store.put_part(name, version, piece, data);
        let is_kept = kept.is_ok();
        self.note_write(name, Some(kept));
        is_kept
    }

    /// A piece is of no use any more.
    pub fn forget_rows(&self, name: &ObjectName, version: VersionId, piece: Part) {
        if let Some(store) = self.store_for(name) {
            store.forget_part(name, version, piece);
        }
    }

    /// What the cache may hold, as configured; 0 without one.
    pub fn cache_capacity_bytes(&self) -> u64 {
        let Some(store) = self.store() else {
            return 0;
        };
        (0..store.directories().len())
            .map(|dir| store.capacity_bytes(dir))
            .fold(0, u64::saturating_add)
    }
}
