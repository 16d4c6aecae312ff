//! The read and write path: hit, miss, single-flight ranged fill, freshness. The only place where store meets origin.
