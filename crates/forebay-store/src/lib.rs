//! The local cache on disks: self-validating records in append-only segments, an in-memory index, eviction, pins.
