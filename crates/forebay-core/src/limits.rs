//! What users, operators and their data can run into: the largest request, file, name or answer,
//! and the defaults of what can be configured. Each has its unit in its name.
//!
//! The rule: a bound that somebody outside of the program can meet, or that several crates must
//! agree on, is here; a bound that only one module needs (the size of a buffer, a pause before
//! another attempt) is a constant beside that code, with its unit in its name too. No bound is
//! defined twice.

/// Longest object key. S3's limit.
pub const OBJECT_KEY_MAX_BYTES: usize = 1024;
/// Shortest bucket name. S3 wants three characters; two are what AIStore, GCS and Azure allow.
pub const BUCKET_NAME_MIN_BYTES: usize = 2;
/// Longest bucket name. S3's limit.
pub const BUCKET_NAME_MAX_BYTES: usize = 63;
/// Longest name of an archive member.
pub const MEMBER_NAME_MAX_BYTES: usize = 4096;

/// The size of a chunk: objects up to this size are one record on disk, larger ones are kept in
/// chunks of this size.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Longest run of missing chunks that one origin request fetches.
pub const FILL_RUN_MAX_BYTES: u64 = 8 << 20;

/// The least default memory budget for buffers of fills, batches and uploads, if the machine has at
/// least four times as much.
pub const MEMORY_BUDGET_DEFAULT_MIN_BYTES: u64 = 1 << 30;
/// The most, on machines with much memory.
pub const MEMORY_BUDGET_DEFAULT_MAX_BYTES: u64 = 16 << 30;
/// How long work that was accepted waits for its share of the memory budget.
pub const MEMORY_WAIT_MAX_SECS: u64 = 60;
/// How long a new request for rows waits for memory: others are usually about to give some back, and
/// who is refused comes back no sooner than in a second.
pub const ROWS_MEMORY_WAIT_MAX_MS: u64 = 2000;
/// Default memory for parsed member indexes.
pub const MEMBER_INDEX_MEMORY_DEFAULT_BYTES: u64 = 256 << 20;

/// Most entries in one batch.
pub const BATCH_ENTRIES_MAX: usize = 1_000_000;
/// Largest body of a batch request.
pub const BATCH_BODY_MAX_BYTES: usize = 256 << 20;
/// The size of the buffers that a batch is sent in.
pub const BATCH_FRAME_BYTES: usize = 512 << 10;
/// Entries of one batch that are fetched at the same time, ahead of the cursor.
pub const BATCH_READ_AHEAD_ENTRIES: usize = 128;
/// Most memory that one write uses at a time. For a body that goes to the origin in parts: the
/// parts in flight and the one that is being read.
pub const WRITE_BUFFER_MAX_BYTES: u64 = 32 << 20;
/// Largest entry that look-ahead holds in memory if the local disk does not keep it; longer ones
/// are streamed when it is their turn.
pub const BATCH_HELD_ENTRY_MAX_BYTES: u64 = 4 << 20;
/// How long a batch that must be cut stays silent first, if its client might otherwise react by
/// asking for each entry by itself: longer than AIStore's client waits for a byte (20 s).
pub const BATCH_CUT_PAUSE_SECS: u64 = 25;
/// Soft errors that a batch tolerates under continue-on-error before its first byte is sent.
pub const BATCH_SOFT_ERRORS_DEFAULT: u32 = 8;

/// Largest payload of one frame of rows: offsets of Arrow's binary columns have 31 bits.
pub const FRAME_PAYLOAD_MAX_BYTES: u64 = 2 << 30;
/// Most rows in one request.
pub const ROWS_PER_REQUEST_MAX: usize = 1 << 20;
/// Largest answer to one request for rows; a node with a smaller memory budget gives smaller ones.
pub const ROWS_ANSWER_MAX_BYTES: u64 = 1 << 30;
/// Default memory for decoded blocks of rows; never more than an eighth of the memory budget.
pub const ROWS_BLOCK_CACHE_DEFAULT_BYTES: u64 = 1 << 30;
/// Memory for what is known of files whose blocks are being read: Parquet footers, Arrow
/// dictionaries.
pub const ROWS_OPEN_FILES_MEMORY_BYTES: u64 = 64 << 20;
/// Memory for where the rows lie in blocks that are kept decoded; never more than a sixteenth of
/// what may be held.
pub const ROWS_LAID_TABLES_MEMORY_BYTES: u64 = 64 << 20;
/// Blocks of rows that all requests together fetch and decode at the same time.
pub const ROWS_BLOCKS_IN_FLIGHT: usize = 128;
/// Blocks that are remembered because some of their rows were read lately: a block that is wanted
/// again is decoded whole.
pub const ROWS_BLOCKS_REMEMBERED: usize = 65_536;

/// What a compressed archive may unpack to.
pub const ARCHIVE_UNPACKED_MAX_BYTES: u64 = 1 << 40;
/// Members in one archive.
pub const ARCHIVE_MEMBERS_MAX: usize = 50_000_000;
/// Largest PAX header or GNU long name.
pub const TAR_EXTENDED_HEADER_MAX_BYTES: u64 = 1 << 20;
/// Largest zip central directory.
pub const ZIP_DIRECTORY_MAX_BYTES: u64 = 1 << 30;

/// Sources in the description of one dataset, and names that its braces stand for.
pub const DATASET_SOURCES_MAX: usize = 1_000_000;
/// Files of one dataset.
pub const DATASET_FILES_MAX: usize = 50_000_000;
/// Largest description of a dataset, in JSON.
pub const DATASET_SPEC_MAX_BYTES: usize = 64 << 20;
/// Largest manifest or file of labels.
pub const DATASET_MANIFEST_MAX_BYTES: u64 = 4 << 30;
/// Files whose footers are read at the same time while a dataset is opened.
pub const DATASET_OPEN_FILES: usize = 256;
/// Datasets that are being opened; the next one is refused.
pub const DATASETS_OPENING_MAX: usize = 256;
/// Archives whose members are found at the same time: each is read ahead of its scan.
pub const DATASET_OPEN_ARCHIVES: usize = 16;
/// In one description of a dataset: files of which it takes only a part.
pub const DATASET_PART_FILES_MAX: usize = 1024;
/// Passes over archives at the same time. Whoever asked for a part of one may be gone long before
/// the pass ends.
pub const ARCHIVE_PASSES_MAX: usize = 64;
/// Pages of listings that are asked for at the same time.
pub const DATASET_LIST_PAGES: usize = 32;
/// Objects or members in one block of a dataset of whole objects or members; the block also ends at
/// [`BLOCK_TARGET_BYTES`]. Fewer than [`BLOCK_TARGET_ROWS`]: each is read by itself.
pub const BLOCK_OBJECTS_MAX: u32 = 4096;
/// Memory for datasets that nobody uses at the moment.
pub const DATASETS_MEMORY_DEFAULT_BYTES: u64 = 256 << 20;
/// Disk for the indexes of datasets.
pub const DATASETS_DISK_DEFAULT_BYTES: u64 = 1 << 30;
/// What a node takes of a composition in one request: its sets of rows and row numbers; and of the
/// lengths of rows.
pub const COMPOSITION_MAX_BYTES: usize = 64 << 20;
/// The most bytes of a composition's header, which says how its rows are made.
pub const COMPOSITION_HEADER_MAX_BYTES: usize = 256 << 10;
/// How many datasets a composition, and all sources of a plan together, may be made of.
pub const COMPOSITION_BASES_MAX: usize = 1024;
/// How many runs of blocks of equal size a node takes of one.
pub const COMPOSITION_RUNS_MAX: usize = 1 << 20;
/// The part of the memory for datasets that a node keeps compositions in.
pub const COMPOSITIONS_MEMORY_SHARE: u64 = 4;
/// Runs of a composition's rows that are looked up to see when those of an entry of the cache are read
/// next.
pub const COMPOSITION_PLACES_LOOKED_AT: usize = 256;
/// Indexes of datasets that are kept on disk.
pub const DATASETS_KEPT_MAX: usize = 1000;

/// Largest expression of a filter, in JSON.
pub const FILTER_BODY_MAX_BYTES: usize = 1 << 20;
/// What such an expression takes in memory, for each of its bytes, at most, until it is answered: a
/// number of one digit becomes values of 64 and 32 bytes, and a text.
pub const FILTER_BODY_MEMORY_FACTOR: u64 = 64;
/// Parts of an expression within each other.
pub const FILTER_DEPTH_MAX: usize = 100;
/// Comparisons, and what connects them, in one expression.
pub const FILTER_PARTS_MAX: usize = 10_000;
/// Parts of an expression that are judged by the pages of one row group, at most: beyond that, its rows
/// are looked at.
pub const FILTER_VERDICTS_MAX: usize = 1 << 20;
/// Values that one `isin` compares with.
pub const FILTER_MEMBERS_MAX: usize = 100_000;
/// Digits of a decimal that a column is compared with.
pub const FILTER_DECIMAL_DIGITS_MAX: usize = 76;
/// Filters that a node computes at the same time; others wait.
pub const FILTERS_AT_ONCE: usize = 2;
/// Filters that are computed or wait for that; the next one is refused.
pub const FILTERS_WAITING_MAX: usize = 32;
/// Blocks that one filter looks at at the same time.
pub const FILTER_BLOCKS_AT_ONCE: usize = 4;
/// Files of which one filter reads statistics at the same time.
pub const FILTER_FILES_AT_ONCE: usize = 8;
/// Rows of a block that are requested at a time where it is not looked at as a whole.
pub const FILTER_REQUEST_ROWS: usize = 1 << 15;
/// Largest column index, offset index or bloom filter of a column chunk that a filter reads: of a
/// larger one, the rows are looked at.
pub const FILTER_INDEX_MAX_BYTES: u64 = 16 << 20;
/// Memory for sets of rows that filters have left.
pub const FILTERS_MEMORY_MAX_BYTES: u64 = 64 << 20;
/// Disk for such sets; the least recently used ones beyond it are removed.
pub const FILTERS_DISK_MAX_BYTES: u64 = 1 << 30;
/// Such sets on disk.
pub const FILTERS_KEPT_MAX: usize = 1000;

/// Keys that are looked up in one request, and the most bytes of their list.
pub const KEYS_MAX: usize = 1 << 20;
/// See [`KEYS_MAX`].
pub const KEYS_BODY_MAX_BYTES: usize = 64 << 20;
/// Rows that one answer to keys names where it names all of them.
pub const KEYS_ROWS_MAX: usize = 1 << 22;
/// Columns of keys that a node indexes at the same time; others wait.
pub const KEYS_AT_ONCE: usize = 2;
/// Columns that are indexed or wait for that; the next one is refused.
pub const KEYS_WAITING_MAX: usize = 32;
/// Memory for indexes of keys.
pub const KEYS_MEMORY_MAX_BYTES: u64 = 1 << 30;
/// Disk for them; the least recently used ones beyond it are removed.
pub const KEYS_DISK_MAX_BYTES: u64 = 4 << 30;
/// Such indexes on disk.
pub const KEYS_KEPT_MAX: usize = 100;

/// Keys in one page of a listing.
pub const LIST_PAGE_MAX_KEYS: usize = 1000;
/// Keys in one DeleteObjects request. S3's limit.
pub const DELETE_OBJECTS_MAX_KEYS: usize = 1000;
/// The longest document of an answer of an S3 service to a request that changes something, or that
/// failed: longer than any of S3's.
pub const S3_ANSWER_MAX_BYTES: u64 = 1 << 20;
/// The largest body that one S3 PUT may have. A PUT under `/v1/` may be larger: S3 and Azure origins
/// receive it in parts.
pub const PUT_OBJECT_MAX_BYTES: u64 = 5 << 30;
/// Objects that are appended to at the same time. Their appended bytes that lie in memory are at
/// most a quarter of what may be held for long.
pub const APPENDS_MAX: usize = 1024;
/// An append handle that was not used for this long is given up.
pub const APPEND_IDLE_SECS: u64 = 3600;
/// Parts in a multipart upload. S3's limit.
pub const UPLOAD_PARTS_MAX: usize = 10_000;

/// Default freshness: how long a cached version is served before the origin is asked whether it is
/// current.
pub const REVALIDATE_AFTER_DEFAULT_SECS: u64 = 60;

/// Requests in flight to one origin.
pub const ORIGIN_REQUESTS_IN_FLIGHT_DEFAULT: usize = 256;
/// An origin that sends nothing for this long is given up on.
pub const ORIGIN_IDLE_TIMEOUT_DEFAULT_SECS: u64 = 30;
/// An origin to which no connection is made in this time has failed.
pub const ORIGIN_CONNECT_TIMEOUT_DEFAULT_SECS: u64 = 5;
/// Attempts for one origin request, the first one included.
pub const ORIGIN_ATTEMPTS_DEFAULT: u32 = 5;
/// No attempt of an origin request begins later than this after the first has failed.
pub const ORIGIN_RETRY_DEADLINE_DEFAULT_SECS: u64 = 60;
/// How long a request waits for a place under `requests_in_flight`.
pub const ORIGIN_PLACE_WAIT_MAX_SECS: u64 = 60;

/// Requests that the node works on at the same time; the next one is answered 503.
pub const REQUESTS_IN_FLIGHT_DEFAULT: usize = 4096;
/// Writes under way at origins, including those whose client has left; further ones wait.
pub const WRITES_IN_FLIGHT_MAX: usize = 4096;
/// Open client connections.
pub const CONNECTIONS_DEFAULT: usize = 16_384;
/// How long a stopping node waits for answers in flight.
pub const DRAIN_TIMEOUT_DEFAULT_SECS: u64 = 30;

/// Rows of one dataset, and of one epoch of a plan.
pub const PLAN_ROWS_MAX: u64 = 1 << 42;
/// Blocks of one dataset.
pub const PLAN_BLOCKS_MAX: u64 = 1 << 40;
/// Epochs of a plan: with the rows of an epoch, every position of every epoch fits in 62 bits.
pub const PLAN_EPOCHS_MAX: u64 = 1 << 20;
/// Datasets that one plan mixes.
pub const PLAN_SOURCES_MAX: usize = 256;
/// The longest cycle of a mix, within which each source has its exact quota: shares are exact to
/// about one part in this many.
pub const PLAN_MIX_CYCLE_ROWS_MAX: u64 = 4096;
/// Stages of a schedule of weights.
pub const PLAN_SCHEDULE_STAGES_MAX: usize = 4096;
/// Blocks that a block shuffle mixes at a time; for more, use the full shuffle.
pub const PLAN_GROUP_BLOCKS_MAX: u64 = 1 << 20;
/// Groups of blocks of unequal size: a plan keeps 8 bytes for each, for each epoch in use.
pub const PLAN_GROUPS_MAX: u64 = 1 << 26;
/// Of these, what the plans have that a node is sent: it makes their sums at each turn of an epoch.
pub const PLAN_GROUPS_AT_NODE_MAX: u64 = 1 << 22;
/// Ranks of a job.
pub const PLAN_WORLD_MAX: u32 = 1 << 20;
/// Workers of one rank's loader, or connections of one stream.
pub const PLAN_WORKERS_MAX: u32 = 1 << 16;
/// Rows of one rank in one step.
pub const PLAN_BATCH_ROWS_MAX: u32 = 1 << 20;
/// Rows that bounded batches are made from at a time.
pub const PLAN_LOOKAHEAD_ROWS_MAX: u32 = 1 << 22;
/// Stretches of a dataset that stand for labels where none are given.
pub const PLAN_STRETCHES_MAX: u32 = 1 << 16;
/// Rows that the quality of an order is measured by.
pub const PLAN_MEASURED_ROWS_MAX: u64 = 1 << 20;
/// Rows of the shuffled array that an order is compared with: 16 bytes each.
pub const PLAN_BASELINE_ROWS_MAX: u64 = 1 << 22;

/// How much of the end of a Parquet or Arrow file is read first; more is read only if its footer is
/// longer.
pub const FOOTER_FIRST_READ_BYTES: u64 = 64 << 10;
/// Largest footer of a Parquet or Arrow file.
pub const FOOTER_MAX_BYTES: u64 = 64 << 20;
/// Deepest nesting of a schema.
pub const SCHEMA_DEPTH_MAX: usize = 64;
/// Names on the paths to all columns of a schema together: a flat schema may have so many columns,
/// a nested one fewer.
pub const SCHEMA_PATH_NAMES_MAX: u64 = 1_000_000;
/// Column chunks of one Parquet file that is opened for reading.
pub const PARQUET_CHUNKS_MAX: u64 = 1_000_000;
/// Blocks, and pieces of blocks, in one file.
pub const FILE_PIECES_MAX: usize = 16_000_000;
/// What one block may hold once it is decoded.
pub const BLOCK_DECODED_MAX_BYTES: u64 = 4 << 30;
/// For formats without blocks of their own (objects, TFRecord, JSONL, CSV, tar): a block ends at the row
/// that reaches this size.
pub const BLOCK_TARGET_BYTES: u64 = 4 << 20;
/// Rows of one file in such a block.
pub const BLOCK_TARGET_ROWS: u32 = 16_384;
/// Blocks are indexed by pieces of at least this, so that a single row costs about one of them.
pub const PIECE_TARGET_BYTES: u64 = 64 << 10;
/// Longest TFRecord and longest line of a JSONL file.
pub const RECORD_MAX_BYTES: u64 = 1 << 30;
/// Different columns that the lines of a JSONL file may have.
pub const JSONL_COLUMNS_MAX: usize = 4096;
/// Longest row of a CSV or TSV file: after a quotation mark that has no second one, all of the file
/// looks like one row.
pub const CSV_ROW_MAX_BYTES: u64 = 64 << 20;
/// Columns of a CSV or TSV file.
pub const CSV_COLUMNS_MAX: usize = 16_384;
/// Different columns that the samples of one tar may have.
pub const SAMPLE_FIELDS_MAX: usize = 1000;
/// Features of a `tf.train.Example`.
pub const EXAMPLE_FEATURES_MAX: usize = 10_000;
/// Largest file of labels, and of record offsets beside a TFRecord.
pub const SIDE_FILE_MAX_BYTES: u64 = 1 << 30;

/// Connections of one stream that its receiver opens by itself.
pub const STREAM_CONNECTIONS_AUTO_MAX: u32 = 16;
/// Connections of one stream that its receiver may ask for.
pub const STREAM_CONNECTIONS_MAX: u32 = 256;
/// What a node prepares and holds for one connection of a stream, unless the receiver says
/// otherwise.
pub const STREAM_WINDOW_DEFAULT_BYTES: u64 = 8 << 20;
/// How far all connections of a stream in a row-wise order over blocks of rows may reach together, if
/// windows are lent so much; if that is less than their windows, these.
pub const STREAM_WINDOWS_ROW_WISE_BYTES: u64 = 256 << 20;
/// Smallest window of one connection.
pub const STREAM_WINDOW_MIN_BYTES: u64 = 64 << 10;
/// Largest window of one connection.
pub const STREAM_WINDOW_MAX_BYTES: u64 = 256 << 20;
/// Rows of a look-ahead window of a stream's batches that are bounded by length.
pub const STREAM_LOOKAHEAD_ROWS_MAX: u32 = 1 << 18;
/// Steps of one connection that are read at the same time, within its window.
pub const STREAM_STEPS_AHEAD: usize = 32;
/// The same for all connections of a stream in a row-wise order over blocks of rows.
pub const STREAM_STEPS_AHEAD_ROW_WISE: usize = 1024;
/// How often a stream reports that it is alive, and its progress.
pub const STREAM_KEEP_ALIVE_SECS: u64 = 5;
/// Largest body of a request for a stream.
pub const STREAM_BODY_MAX_BYTES: usize = 4 << 20;
/// Bytes that a receiver holds, received but not yet yielded, unless it is told otherwise.
pub const STREAM_RECEIVE_DEFAULT_BYTES: u64 = 256 << 20;
/// Leases on plans that the cache of a node follows.
pub const PLAN_LEASES_MAX: usize = 1024;
/// Ranks that read by one lease.
pub const PLAN_LEASE_RANKS_MAX: usize = 4096;
/// Jobs on one plan that are told apart, by how they deal it out and the columns that they read. If
/// there are more, all are taken to read all of it, and nothing is fetched ahead.
pub const PLAN_READERS_MAX: usize = 16;
/// Names of columns in one lease.
pub const PLAN_LEASE_COLUMNS_MAX: usize = 4096;
/// Blocks of one plan for which it is remembered where the columns that are read lie in them.
pub const PLAN_COLUMN_BLOCKS_MAX: usize = 1 << 16;
/// Rows of a chunk or a block that are looked at to find who reads it: of more, all ranks are taken
/// to read some.
pub const PLAN_BLOCK_ROWS_LOOKED_AT: u64 = 512;
/// Longest name that a job gives itself.
pub const PLAN_JOB_NAME_MAX_BYTES: usize = 128;
/// How long a lease lasts without a word from its job.
pub const PLAN_LEASE_DEFAULT_SECS: u64 = 60;
/// The longest lease that a job may ask for.
pub const PLAN_LEASE_MAX_SECS: u64 = 24 * 3600;
/// What is fetched ahead of a followed plan.
pub const PLAN_AHEAD_DEFAULT_BYTES: u64 = 256 << 20;
/// At most one part in this many of the cache is fetched ahead of one plan.
pub const PLAN_AHEAD_SHARE: u64 = 64;
/// Pieces that are fetched ahead of one plan at the same time.
pub const PLAN_AHEAD_FETCHES: usize = 8;
