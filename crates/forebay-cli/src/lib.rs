//! The command line: serve, ls, get, put, stat, warm, pin, evict, status, top, config.

pub mod distance;
