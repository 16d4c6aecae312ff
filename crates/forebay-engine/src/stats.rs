//! Counters of the read and write path. They only grow; gauges are read from their owners.

use forebay_core::{
    CacheStatus, counters,
    request::{self, Cost},
};

pub(crate) use forebay_core::counters::add;

counters! {
    EngineStats => EngineSnapshot {
        /// Reads answered with `HIT`. One read is one object GET, or one entry of a batch.
        reads_hit,
        /// Reads answered with `MISS`.
        reads_miss,
        /// Reads answered with `REVALIDATED`.
        reads_revalidated,
        /// Reads answered with `STALE`.
        reads_stale,
        /// Reads answered with `BYPASS`.
        reads_bypass,
        /// Reads that failed before their first byte.
        reads_failed,
        /// Bytes of reads that came from the local disk.
        bytes_from_cache,
        /// Bytes that fills and passed-through reads took from origins.
        bytes_from_origin,
        /// Origin requests of fills.
        fills,
        /// Fills that ended in an error.
        fills_failed,
        /// Readers that waited for another reader's fill instead of asking the origin.
        fills_joined,
        /// Origin requests that asked whether a version is still current.
        revalidations,
        /// Of those, the ones answered with a new version.
        revalidations_changed,
        /// Objects that changed at the origin while they were being read.
        version_changes,
        /// Results that could not be kept because the disk refused them; they were passed through.
        store_writes_failed,
        /// Member indexes built by reading an archive for that purpose.
        indexes_built,
        /// Member indexes built while the archive flowed through for another reason.
        indexes_built_in_passing,
        /// Member indexes read back from the store.
        indexes_loaded,
        /// Archives among all these in which several members have the same name.
        indexes_with_repeated_names,
        /// Compressed archives unpacked into the store.
        archives_unpacked,
        /// Objects written to origins.
        writes,
        /// Bytes written to origins.
        bytes_written,
        /// Objects removed at origins.
        deletes,
    }
}

impl EngineStats {
    /// Counts bytes of a read that came from the local disk.
    pub fn from_cache(&self, bytes: u64) {
        add(&self.bytes_from_cache, bytes);
        request::count(Cost::DiskBytes, bytes);
    }

    /// Counts bytes that came from an origin, or from another node in its place.
    pub fn from_origin(&self, bytes: u64) {
        add(&self.bytes_from_origin, bytes);
        request::count(Cost::FetchedBytes, bytes);
    }

    /// Counts one read with this answer.
    pub fn count_read(&self, status: CacheStatus) {
        let reads = match status {
            CacheStatus::Hit => &self.reads_hit,
            CacheStatus::Miss => &self.reads_miss,
            CacheStatus::Revalidated => &self.reads_revalidated,
            CacheStatus::Stale => &self.reads_stale,
            CacheStatus::Bypass => &self.reads_bypass,
        };
        add(reads, 1);
    }
}
