//! How many resources reading rows may use.

use forebay_core::limits;

/// How much memory and how many threads and fetches reading rows may use.
#[derive(Clone, Debug)]
pub struct RowsConfig {
    /// Memory for decoded blocks that may be wanted again; at most an eighth of the memory budget
    /// is used.
    pub block_cache_bytes: u64,
    /// Memory for the metadata of open files: Parquet footers, Arrow dictionaries.
    pub open_files_memory_bytes: u64,
    /// Blocks of all requests whose bytes are being fetched or decoded.
    pub blocks_in_flight: usize,
    /// Objects that one request fetches ahead of its cursor.
    pub objects_ahead: usize,
    /// Blocks that are decoded at the same time.
    pub decode_threads: usize,
    /// Whether blocks that are read row by row are kept decoded in the cache.
    pub keep_decoded: bool,
}

impl Default for RowsConfig {
    fn default() -> Self {
        Self {
            block_cache_bytes: limits::ROWS_BLOCK_CACHE_DEFAULT_BYTES,
            open_files_memory_bytes: limits::ROWS_OPEN_FILES_MEMORY_BYTES,
            blocks_in_flight: limits::ROWS_BLOCKS_IN_FLIGHT,
            objects_ahead: limits::BATCH_READ_AHEAD_ENTRIES,
            decode_threads: std::thread::available_parallelism().map_or(2, usize::from),
            keep_decoded: true,
        }
    }
}
