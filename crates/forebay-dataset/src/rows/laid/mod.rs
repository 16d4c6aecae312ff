//! Blocks that are kept decoded on the disk, for orders that read them row by row.
//!
//! To read one row of a block, the pages that it is in have to be unpacked. A block that is read row
//! by row again and again is therefore decoded whole once, and *laid out*: its rows, one after the
//! other, each with all its columns (`codec.rs`), are put into the store beside the file, under its
//! version and the columns. From then on a row costs one read of its bytes. All such rows of a
//! request are read in one go, sorted by their place, and decoded into one batch in the order of the
//! request. If the other rows of the request are in blocks that are in memory, they are encoded as
//! laid rows are, and decoded between those: each would be a batch of its own otherwise. What the
//! kernel has in memory of a small request is read on the thread that asks.
//!
//! - *Which blocks.* As between renting and buying: a block is laid out when reading its rows has cost
//!   as much as laying it out would ([`Rows::begin_laying`]). Only for formats in which a row costs
//!   more than its bytes; only if the decoded dataset is larger than the memory for decoded blocks,
//!   so that it would not lie there anyway; and only if the cache has room for the dataset as it is
//!   and decoded: nothing that is still wanted has to go for it.
//! - *What is in the store* ([`Part::Rows`]): pieces of [`CHUNK_BYTES`] of the concatenated rows, each
//!   followed by a checksum ([`Seal`]), and a table of the rows' lengths, in pieces from the other end
//!   of the numbers. The table is written last, so where it is, the rest was. Tables that are in use
//!   are kept in memory.
//! - *What is gone, damaged or not understood* is a miss: the rows are decoded as always, and the
//!   table is forgotten, so that the block may be laid out again; pieces that are still there are not
//!   written again.
//!
//! Invariant: rows from here are those that decoding the file would give: the key has the version,
//! the columns with their types, the options of the dataset, and the release that made it. Every
//! row is verified by its checksum, which says where it belongs, too, and must end where it should.
//! The store verifies tables.

mod codec;

use super::{
    How, RowMemory, Rows,
    blocks::{COPIED_HERE_BYTES, Keys, Part as Wanted, PartRead},
    cache::{Block, BlockKey},
    gather::{Pick, bytes_of_rows},
    joined,
    lru::Lru,
    pieces::Pieces,
    stats::add,
};
use crate::Dataset;
use arrow_array::RecordBatch;
use arrow_data::ArrayData;
use arrow_schema::SchemaRef;
use codec::Decoder;
use forebay_core::{
    Error, ObjectName, Reservation, Result, VersionId, crc32c,
    limits::{self, CHUNK_BYTES},
    request,
    sync::Mutex,
};
use forebay_engine::{Engine, Flights, Leader};
use forebay_format::tabular::{Format, Projection};
use forebay_store::{Part, Store, Wait, WouldWait};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Requests whose rows are read at the same time: enough for the queue of a fast disk.
const READS_AT_ONCE: usize = 64;
/// Blocks that are decoded to be laid out, or wait for it, with their memory; others wait until they
/// are read the next time.
const WAITING_MAX: usize = 8;
/// What encoding and writing a decoded byte is taken to cost.
const LAY_NS_PER_BYTE: f64 = 1.0;
/// Blocks that are larger than this when decoded are not laid out: offsets in them have 32 bits.
const BLOCK_MAX_BYTES: u64 = 1 << 31;
/// Nor are blocks with more rows: their table would be too large.
const BLOCK_ROWS_MAX: u64 = 4 << 20;
/// Of the cache's capacity, what a dataset may take as it is and decoded: three of four parts.
const CAPACITY_SHARE: (u64, u64) = (3, 4);
/// Rows of a piece that are so close are read together.
const GAP_BYTES: u64 = 4 << 10;
/// What reading a range of a table may take beside it: the checked blocks of bytes around it.
const AROUND_BYTES: usize = 16 << 10;
/// Of the checksum after each row.
const SEAL_BYTES: usize = 4;
/// Fewer rows than this are looked up on the runtime's threads.
const LOOKED_UP_HERE_ROWS: usize = 8192;
/// Up to so many rows are read on the runtime's threads: about a millisecond.
const READ_HERE_ROWS: usize = 128;
/// Memory for laying a block out, beside a number for each row: a piece, and rows of this size; of
/// larger rows, more.
const LAYING_BYTES: u64 = 2 * CHUNK_BYTES;

const MAGIC: u32 = u32::from_le_bytes(*b"FBL1");
const TABLE_HEADER_BYTES: u64 = 20;

/// The checksums of a block's rows. By its own, a row is read without what the store verifies: the
/// beginning of the record, and the blocks of bytes that the row lies in.
#[derive(Debug)]
struct Seal {
    block: u64,
}

impl Seal {
    /// The name by itself, and not by the hash that the store's keys are made of: it looks at no name
    /// here.
    fn new(name: &ObjectName, key: &BlockKey) -> Self {
        let mut of = [name.bucket().as_bytes(), &[0], name.key().as_bytes()].concat();
        of.extend_from_slice(&key.version.0.to_le_bytes());
        of.extend_from_slice(&stored_columns(key.columns).to_le_bytes());
        of.extend_from_slice(&key.block.to_le_bytes());
        Self {
            block: xxh3_64(&of),
        }
    }

    /// Of the bytes, and of where they belong: another row's bytes do not pass.
    fn of(&self, row: u32, bytes: &[u8]) -> u32 {
        crc32c(bytes) ^ xxh3_64_with_seed(&row.to_le_bytes(), self.block) as u32
    }

    /// How long a row is, if it is followed by its checksum.
    fn opened(&self, row: u32, sealed: &[u8]) -> Option<usize> {
        let (bytes, seal) = sealed.split_last_chunk::<SEAL_BYTES>()?;
        (self.of(row, bytes).to_le_bytes() == *seal).then_some(bytes.len())
    }
}

/// Where the rows of a block lie in its concatenated rows, each with its checksum.
#[derive(Debug)]
struct Table {
    lengths: Lengths,
    seal: Seal,
    /// Of all rows.
    bytes: u64,
    _memory: Reservation,
}

#[derive(Debug)]
enum Lengths {
    Same(u32),
    /// The byte after each row.
    Ends(Box<[u32]>),
}

impl Table {
    fn range(&self, row: u32) -> Range<u64> {
        match &self.lengths {
            Lengths::Same(length) => {
                let length = u64::from(*length);
                u64::from(row) * length..(u64::from(row) + 1) * length
            }
            Lengths::Ends(ends) => {
                let row = row as usize;
                let start = row.checked_sub(1).map_or(0, |before| ends[before]);
                u64::from(start)..u64::from(ends[row])
            }
        }
    }

    /// Calls `each` with rows that lie next to each other, or nearly, and their bytes. Ends when it
    /// says `false`, and says so.
    fn each_run(&self, rows: &[u32], mut each: impl FnMut(&[u32], Range<u64>) -> bool) -> bool {
        let mut first = 0;
        while first < rows.len() {
            let mut bytes = self.range(rows[first]);
            let mut end = first + 1;
            while let Some(&row) = rows.get(end) {
                let next = self.range(row);
                if next.start > bytes.end + GAP_BYTES {
                    break;
                }
                bytes.end = next.end;
                end += 1;
            }
            if !each(&rows[first..end], bytes) {
                return false;
            }
            first = end;
        }
        true
    }
}

/// What reading blocks in part has cost, to find out which are worth laying out.
#[derive(Default)]
struct Spent {
    ns: HashMap<BlockKey, u64>,
    /// Their keys, the oldest first; also of some that have been taken out.
    order: VecDeque<BlockKey>,
}

impl Spent {
    fn add(&mut self, key: BlockKey, ns: u64) {
        if let Some(so_far) = self.ns.get_mut(&key) {
            *so_far += ns;
            return;
        }
        self.ns.insert(key, ns);
        self.order.push_back(key);
        while self.order.len() > limits::ROWS_BLOCKS_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ns.remove(&oldest);
        }
    }
}

/// The state of it, one for all datasets.
pub(super) struct Laid {
    tables: Mutex<Lru<BlockKey, Arc<Table>>>,
    tables_max_bytes: u64,
    spent: Mutex<Spent>,
    laying: Flights<BlockKey, ()>,
    waiting: Arc<Semaphore>,
    turns: Semaphore,
    reads: Semaphore,
    /// Of the cache, what a dataset may take as it is and decoded; 0: nothing is laid out, and
    /// nothing is read from here.
    room_bytes: u64,
}

impl Laid {
    pub(super) fn new(engine: &Engine, keeps: bool, threads: usize) -> Self {
        let room = match keeps {
            true => engine.cache_capacity_bytes() / CAPACITY_SHARE.1 * CAPACITY_SHARE.0,
            false => 0,
        };
        let tables = limits::ROWS_LAID_TABLES_MEMORY_BYTES;
        Self {
            tables: Mutex::default(),
            tables_max_bytes: tables.min(engine.budget().holdable_bytes() / 16),
            spent: Mutex::default(),
            laying: Flights::default(),
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
            turns: Semaphore::new(threads.div_ceil(2)),
            reads: Semaphore::new(READS_AT_ONCE),
            room_bytes: room,
        }
    }

    /// Notes that reading some rows of a block took this long.
    pub(super) fn spent(&self, key: BlockKey, ns: u64) {
        if self.room_bytes > 0 {
            self.spent.lock().add(key, ns);
        }
    }
}

/// Under which number the store has rows of these columns. Not those of another release, which may
/// decode otherwise.
pub(super) fn stored_columns(wanted: u64) -> u64 {
    let made_by = concat!("rows of forebay ", env!("CARGO_PKG_VERSION"));
    xxh3_64_with_seed(made_by.as_bytes(), wanted ^ u64::from(codec::FORM))
}

/// A piece of a block's rows; see the module.
fn rows_piece(key: &BlockKey, piece: u32) -> Part {
    Part::Rows {
        columns: stored_columns(key.columns),
        block: key.block,
        piece,
    }
}

fn table_piece(key: &BlockKey, piece: u32) -> Part {
    rows_piece(key, u32::MAX - piece)
}

/// Whether reading one row of a file costs more than its bytes.
fn is_packed(format: Format) -> bool {
    match format {
        Format::Parquet | Format::ArrowFile | Format::ArrowStream => true,
        Format::Jsonl | Format::Csv | Format::Tsv => true,
        Format::Objects | Format::Tar | Format::Zip => false,
        Format::TfRecord | Format::Mds | Format::Megatron | Format::LitData => false,
    }
}

/// What the cache's plans need to know: which parts hold rows of these columns, and whether a block
/// is kept decoded.
pub(crate) struct KeptDecoded {
    columns: u64,
}

impl KeptDecoded {
    /// `None`: there are no such columns.
    pub(crate) fn of(dataset: &Dataset, columns: &Projection) -> Option<Self> {
        let keys = Keys::new(dataset, columns).ok()?;
        Some(Self {
            columns: stored_columns(keys.wanted),
        })
    }

    /// Whether a part of this number holds them.
    pub(crate) fn is(&self, columns: u64) -> bool {
        self.columns == columns
    }

    /// Whether this block is kept. RAM only.
    pub(crate) fn has(
        &self,
        store: &Store,
        name: &ObjectName,
        version: VersionId,
        block: u32,
    ) -> bool {
        let table = Part::Rows {
            columns: self.columns,
            block,
            piece: u32::MAX,
        };
        store.has_part(name, version, table)
    }
}

/// A part of a request, of a block that is laid out, or in memory.
struct Found {
    number: usize,
    part: Wanted,
    key: BlockKey,
    name: ObjectName,
    of: Of,
}

/// Where its rows are.
enum Of {
    Laid(Arc<Table>),
    Memory(Arc<Block>),
    /// Kept by themselves (`soon.rs`): their lengths.
    Soon(Vec<u32>),
}

/// Parts of a request, divided.
#[derive(Default)]
struct Divided {
    found: Vec<Found>,
    rest: Vec<(usize, Wanted)>,
    /// Some of the rest may be laid out: their tables are on the disk.
    unloaded: bool,
    /// Bytes that are to be read for those that were found, and what their rows take decoded.
    bytes: usize,
    decoded: u64,
}

/// What came from laid blocks.
pub(super) enum FromLaid {
    /// The whole answer, in its order.
    All(RecordBatch),
    /// Some parts, and those that were not there.
    Some {
        read: Vec<(usize, Wanted, PartRead)>,
        rest: Vec<(usize, Wanted)>,
        picks: Vec<Pick>,
    },
}

impl Rows {
    /// Reads what it can of a request from blocks that are laid out. `memory` is the answer's, and
    /// grows if it has to.
    pub(super) async fn read_laid(
        &self,
        dataset: &Arc<Dataset>,
        parts: Vec<Wanted>,
        picks: Vec<Pick>,
        keys: &Keys,
        memory: &mut RowMemory,
        how: &How,
    ) -> Result<FromLaid> {
        let all: Vec<(usize, Wanted)> = parts.into_iter().enumerate().collect();
        let any = self.inner.laid.room_bytes > 0 || self.inner.soon.any();
        if !any || !self.may_be_encoded(dataset, keys) {
            return Ok(FromLaid::Some {
                read: Vec::new(),
                rest: all,
                picks,
            });
        }
        let many = picks.len() >= LOOKED_UP_HERE_ROWS;
        let mut divided = Divided {
            rest: all,
            ..Divided::default()
        };
        if !many {
            self.divide(&mut divided, dataset, keys, false);
        }
        if many || divided.unloaded {
            let (rows, dataset, keys) = (self.clone(), dataset.clone(), keys.clone());
            let loaded = move || {
                rows.divide(&mut divided, &dataset, &keys, true);
                divided
            };
            divided = joined(tokio::task::spawn_blocking(request::carried(loaded)).await)?;
        }
        let Divided {
            found,
            mut rest,
            bytes,
            decoded,
            ..
        } = divided;
        let needed = (bytes as u64).saturating_add(decoded);
        if found.is_empty() || needed > self.inner.answers.holdable_bytes() {
            rest.extend(found.into_iter().map(|found| (found.number, found.part)));
            rest.sort_unstable_by_key(|(number, _)| *number);
            return Ok(FromLaid::Some {
                read: Vec::new(),
                rest,
                picks,
            });
        }
        let held = memory.held.first().map_or(0, Reservation::bytes);
        let beside = match how.lean && needed > held {
            true => self.copy_memory_now(needed - held),
            false => None,
        };
        if needed > held && beside.is_none() {
            self.settle(memory, needed, how).await?;
        }
        let whole = rest.is_empty();
        // What is read may be wanted many times. (What it takes decoded is up to twice as much.)
        let is_soon = |found: &Found| matches!(found.of, Of::Soon(_));
        let is_laid = |found: &Found| matches!(found.of, Of::Laid(_));
        // What was taken from memory would be lost if the disk had to be waited for.
        let is_mixed = found.iter().any(is_soon) && found.iter().any(is_laid);
        let is_little = !is_mixed
            && picks.len() <= READ_HERE_ROWS
            && bytes as u64 <= COPIED_HERE_BYTES
            && decoded <= 2 * COPIED_HERE_BYTES;
        if whole
            && is_little
            && let Some(batch) = self.read_here(dataset, &found, &picks, keys, bytes)?
        {
            return Ok(FromLaid::All(batch));
        }
        let _turn = self.inner.laid.reads.acquire().await;
        let (rows, keys) = (self.clone(), keys.clone());
        let work = move || {
            let read = rows.read_found(&found, &picks, &keys, bytes, whole);
            drop(beside);
            (found, picks, read)
        };
        let (found, picks, read) =
            joined(tokio::task::spawn_blocking(request::carried(work)).await)?;
        let batches = match read {
            Read::All(batch) => {
                self.count_in_memory(dataset, &found);
                return Ok(FromLaid::All(batch));
            }
            Read::Each(batches) => batches,
        };
        let mut read = Vec::with_capacity(found.len());
        for (found, batch) in found.into_iter().zip(batches) {
            match batch {
                Some(batch) => {
                    if found.is_in_memory() {
                        self.was_kept(dataset, found.part.rows.len() as u64);
                    }
                    read.push((found.number, found.part, PartRead::rows(batch)));
                }
                None => rest.push((found.number, found.part)),
            }
        }
        rest.sort_unstable_by_key(|(number, _)| *number);
        Ok(FromLaid::Some { read, rest, picks })
    }

    /// Whether rows of a dataset could be laid out at all.
    fn may_be_laid(&self, dataset: &Dataset, keys: &Keys) -> bool {
        self.inner.laid.room_bytes > 0 && self.may_be_encoded(dataset, keys)
    }

    /// Whether a row costs more than its bytes, and could be kept encoded by itself.
    pub(super) fn may_be_encoded(&self, dataset: &Dataset, keys: &Keys) -> bool {
        !keys.whole && is_packed(dataset.format()) && codec::supports(&keys.schema)
    }

    /// Finds the parts whose tables are in memory, or with `load` on the disk. Parts of blocks that
    /// are in memory as a whole stay in the rest, unless there is nothing else in it.
    fn divide(&self, divided: &mut Divided, dataset: &Dataset, keys: &Keys, load: bool) {
        let inner = &self.inner;
        let is_laid = self.may_be_laid(dataset, keys);
        let (mut rest, mut in_memory) = (Vec::new(), Vec::new());
        divided.unloaded = false;
        // Parts of a file follow each other.
        let mut file: Option<(u32, BlockKey, ObjectName)> = None;
        for (number, part) in std::mem::take(&mut divided.rest) {
            let (_, of, name) = match file.take().filter(|(file, ..)| *file == part.file) {
                Some(same) => &*file.insert(same),
                None => {
                    let key = self.block_key(dataset, part.file, part.block, keys);
                    &*file.insert((part.file, key, dataset.files().name(part.file as usize)))
                }
            };
            let key = BlockKey {
                block: part.block,
                ..*of
            };
            let found = |part, of| Found {
                number,
                part,
                key,
                name: name.clone(),
                of,
            };
            if let Some(block) = inner.cache.get(&key) {
                in_memory.push(found(part, Of::Memory(block)));
                continue;
            }
            if let Some(lengths) = inner.soon.lengths(&key, &part.rows) {
                divided.found.push(found(part, Of::Soon(lengths)));
                continue;
            }
            let known = inner.laid.tables.lock().get(&key).cloned();
            let table = known.filter(|_| is_laid).or_else(|| {
                if !is_laid
                    || !inner
                        .engine
                        .has_rows(name, key.version, table_piece(&key, 0))
                {
                    return None;
                }
                divided.unloaded = true;
                if !load {
                    return None;
                }
                let index = dataset.index(part.file as usize)?;
                let rows = index.blocks().block_rows(part.block as usize);
                self.load_table(name, key, rows)
            });
            match table {
                Some(table) => divided.found.push(found(part, Of::Laid(table))),
                None => rest.push((number, part)),
            }
        }
        (divided.bytes, divided.decoded) = needs(&divided.found, keys);
        // If both make the whole answer, it is put together row by row, if there can be memory for
        // that. Otherwise the rows of each laid block would be a batch of their own, to be copied
        // once more.
        let fit = |found: &Found| match &found.of {
            Of::Memory(block) => block.bytes <= BLOCK_MAX_BYTES,
            Of::Laid(_) | Of::Soon(_) => true,
        };
        if rest.is_empty() && !divided.found.is_empty() && in_memory.iter().all(fit) {
            let (bytes, decoded) = needs(&in_memory, keys);
            let bytes = bytes.saturating_add(divided.bytes);
            let decoded = decoded.saturating_add(divided.decoded);
            if (bytes as u64).saturating_add(decoded) <= inner.answers.holdable_bytes() {
                divided.found.append(&mut in_memory);
                (divided.bytes, divided.decoded) = (bytes, decoded);
            }
        }
        rest.extend(
            in_memory
                .into_iter()
                .map(|found| (found.number, found.part)),
        );
        divided.rest = rest;
        divided.found.sort_unstable_by_key(|found| found.number);
    }

    /// Reads a block's table from the disk, if there is memory for it.
    fn load_table(&self, name: &ObjectName, key: BlockKey, rows: u32) -> Option<Arc<Table>> {
        let engine = &self.inner.engine;
        let most = u64::from(rows) * 8 + TABLE_HEADER_BYTES + AROUND_BYTES as u64;
        let mut memory = engine.budget().try_hold(most).ok()?;
        let read = |range: Range<u64>, out: &mut Vec<u8>| {
            ranges_of_pieces(&range).all(|(piece, range)| {
                let piece = table_piece(&key, piece);
                engine.append_rows(name, key.version, piece, range, Wait::May, out) == Ok(true)
            })
        };
        let mut bytes = Vec::new();
        let table = read(0..TABLE_HEADER_BYTES, &mut bytes)
            .then(|| decode_header(&bytes, rows))
            .flatten()
            .and_then(|(total, length)| {
                if let Some(length) = length {
                    return Some((Lengths::Same(length), total));
                }
                bytes.clear();
                bytes.reserve_exact(rows as usize * 4 + AROUND_BYTES);
                let end = TABLE_HEADER_BYTES + u64::from(rows) * 4;
                read(TABLE_HEADER_BYTES..end, &mut bytes).then_some(())?;
                let mut at = 0u32;
                let ends = bytes.chunks_exact(4).map(|length| {
                    at = at.checked_add(u32::from_le_bytes(length.try_into().ok()?))?;
                    Some(at)
                });
                let ends = ends.collect::<Option<Box<[u32]>>>()?;
                (u64::from(at) == total).then_some((Lengths::Ends(ends), total))
            });
        let Some((lengths, bytes_of_rows)) = table else {
            self.forget_laid(name, &key);
            return None;
        };
        engine.gave_rows(bytes.len() as u64);
        drop(bytes);
        // The least that the budget counts.
        let takes = 1024
            + match &lengths {
                Lengths::Same(_) => 0,
                Lengths::Ends(ends) => ends.len() as u64 * 4,
            };
        memory.shrink(takes);
        let table = Arc::new(Table {
            lengths,
            seal: Seal::new(name, &key),
            bytes: bytes_of_rows,
            _memory: memory,
        });
        let laid = &self.inner.laid;
        let mut tables = laid.tables.lock();
        tables.insert(key, table.clone(), takes);
        tables.shrink_to(laid.tables_max_bytes);
        Some(table)
    }

    /// From now on the block counts as not laid out.
    fn forget_laid(&self, name: &ObjectName, key: &BlockKey) {
        self.inner.laid.tables.lock().remove(key);
        let engine = &self.inner.engine;
        engine.forget_rows(name, key.version, table_piece(key, 0));
        add(&self.inner.stats.laid_lost, 1);
    }

    /// A small answer, if the kernel has all that is laid out of it in memory: to wake up another
    /// thread would take as long as to read it. `None`: it has to be read on one that may block.
    fn read_here(
        &self,
        dataset: &Dataset,
        all: &[Found],
        picks: &[Pick],
        keys: &Keys,
        bytes: usize,
    ) -> Result<Option<RecordBatch>> {
        let stats = &self.inner.stats;
        let read = || {
            let began = Instant::now();
            let mut raw = Vec::with_capacity(bytes);
            let (mut spans, mut read) = (Vec::new(), Vec::with_capacity(all.len()));
            let mut laid_bytes = 0;
            for found in all {
                read.push(Some(spans.len()));
                let before = raw.len();
                let there = found.read(self, Wait::MustNot, &mut raw, &mut spans);
                (there == Ok(true)).then_some(())?;
                if !found.is_in_memory() {
                    laid_bytes += raw.len() - before;
                }
            }
            self.inner.engine.gave_rows(laid_bytes as u64);
            add(&stats.fetch_ns, began.elapsed().as_nanos() as u64);
            let began = Instant::now();
            let batch = decode_in_order(all, picks, keys, (&raw, &spans, &read))?;
            add(&stats.decode_ns, began.elapsed().as_nanos() as u64);
            Some(batch)
        };
        let batch = catch_unwind(AssertUnwindSafe(read))
            .map_err(|_| Error::internal("rows could not be read from where they are kept"))?;
        if batch.is_some() {
            let laid = all.iter().filter(|found| !found.is_in_memory());
            let rows = laid.map(|found| found.part.rows.len() as u64).sum();
            add(&stats.rows_laid, rows);
            self.count_in_memory(dataset, all);
        }
        Ok(batch)
    }

    fn count_in_memory(&self, dataset: &Dataset, all: &[Found]) {
        for found in all.iter().filter(|found| found.is_in_memory()) {
            self.was_kept(dataset, found.part.rows.len() as u64);
        }
    }

    /// Reads the rows of all parts, in the order of their places. Blocking.
    fn read_found(
        &self,
        all: &[Found],
        picks: &[Pick],
        keys: &Keys,
        bytes: usize,
        whole: bool,
    ) -> Read {
        let stats = &self.inner.stats;
        let began = Instant::now();
        let mut raw = Vec::with_capacity(bytes);
        let (mut spans, mut read) = (Vec::new(), Vec::with_capacity(all.len()));
        for found in all {
            let (first, before) = (spans.len(), raw.len());
            let there = found.read(self, Wait::May, &mut raw, &mut spans);
            if !found.is_in_memory() {
                self.inner.engine.gave_rows((raw.len() - before) as u64);
            }
            read.push((there == Ok(true)).then_some(first));
        }
        add(&stats.fetch_ns, began.elapsed().as_nanos() as u64);
        let began = Instant::now();
        let decoded = self.decode_found(all, picks, keys, (&raw, &spans, &read), whole);
        add(&stats.decode_ns, began.elapsed().as_nanos() as u64);
        let there = |i: usize| match &decoded {
            Read::All(_) => true,
            Read::Each(batches) => batches[i].is_some(),
        };
        for (i, found) in all.iter().enumerate() {
            let Of::Laid(table) = &found.of else {
                continue;
            };
            if there(i) {
                add(&stats.rows_laid, found.part.rows.len() as u64);
                continue;
            }
            if read[i].is_some() {
                // Bytes that are not rows of these columns are not to be found again.
                for (piece, _) in ranges_of_pieces(&(0..table.bytes)) {
                    let piece = rows_piece(&found.key, piece);
                    let engine = &self.inner.engine;
                    engine.forget_rows(&found.name, found.key.version, piece);
                }
            }
            self.forget_laid(&found.name, &found.key);
        }
        decoded
    }

    fn decode_found(
        &self,
        all: &[Found],
        picks: &[Pick],
        keys: &Keys,
        (raw, spans, read): (&[u8], &[Range<usize>], &[Option<usize>]),
        whole: bool,
    ) -> Read {
        if whole
            && read.iter().all(Option::is_some)
            && let Some(batch) = decode_in_order(all, picks, keys, (raw, spans, read))
        {
            return Read::All(batch);
        }
        let of = |(found, first): (&Found, &Option<usize>)| {
            let first = (*first)?;
            Some(&spans[first..first + found.part.rows.len()])
        };
        let parts: Vec<Option<&[Range<usize>]>> = all.iter().zip(read).map(of).collect();
        let decoded = |parts: &[Option<&[Range<usize>]>]| {
            let spans = || parts.iter().flatten().copied().flatten();
            let mut decoder = Decoder::new(&keys.schema, spans().map(|span| span.len()).sum())?;
            for span in spans() {
                decoder.row(&raw[span.clone()])?;
            }
            decoder.finish().ok()
        };
        // A batch for each part, with memory of its own, would cost more than the few rows in it.
        if let Some(batch) = decoded(&parts) {
            let mut at = 0;
            let slices = parts.iter().map(|part| {
                let rows = (*part)?.len();
                at += rows;
                Some(batch.slice(at - rows, rows))
            });
            return Read::Each(slices.collect());
        }
        let each = parts.iter().map(|part| {
            part.is_some().then_some(())?;
            decoded(std::slice::from_ref(part))
        });
        Read::Each(each.collect())
    }

    /// Whether blocks of a dataset are laid out when it pays.
    pub(super) fn lays(&self, dataset: &Dataset, keys: &Keys) -> bool {
        if !self.may_be_laid(dataset, keys) {
            return false;
        }
        let (cache, bytes) = (&self.inner.cache, dataset.bytes());
        // As long as nothing is known, both are guessed in favour of decoding a block, which tells.
        let decoded = cache.expected_decoded(keys.wanted, bytes);
        cache.likely_decoded(keys.wanted, bytes) > cache.max_bytes()
            && bytes.saturating_add(decoded) <= self.inner.laid.room_bytes
    }

    /// Begins to lay a block out if it pays by now: reading it in part, and decoding it whole, has
    /// cost as much as two times decoding it whole, and laying it out. (Once in an epoch it is not
    /// worth it.) Goes on with [`Laying::lay`] when the block is decoded. `None` also if that is
    /// under way or done, or if too many others wait.
    pub(super) fn begin_laying(
        &self,
        dataset: &Dataset,
        part: &Wanted,
        keys: &Keys,
        key: BlockKey,
    ) -> Option<Laying> {
        let inner = &self.inner;
        if !self.lays(dataset, keys) {
            return None;
        }
        let spent = inner.laid.spent.lock().ns.get(&key).copied()?;
        let index = dataset.index(part.file as usize)?;
        if index.unpacked_bytes().is_some() {
            // It is in the cache in two forms already.
            return None;
        }
        let bytes = index.blocks().bytes(part.block as usize);
        let bytes = bytes.end - bytes.start;
        let decoded = inner.cache.expected_decoded(key.columns, bytes) as f64;
        let whole = inner.cache.whole_cost_ns(key.columns, bytes);
        if (spent as f64) < 2.0 * whole + decoded * LAY_NS_PER_BYTE {
            return None;
        }
        let name = dataset.file(part.file).name;
        let table = table_piece(&key, 0);
        if !inner.engine.keeps_own(&name) || inner.engine.has_rows(&name, key.version, table) {
            return None;
        }
        Some(Laying {
            name,
            key,
            place: inner.laid.waiting.clone().try_acquire_owned().ok()?,
            leader: inner.laid.laying.try_lead(key)?,
        })
    }
}

/// A block that is about to be laid out.
pub(super) struct Laying {
    name: ObjectName,
    key: BlockKey,
    place: OwnedSemaphorePermit,
    leader: Leader<BlockKey, ()>,
}

impl Laying {
    /// Lays the decoded block out in the background.
    pub(super) fn lay(self, rows: &Rows, dataset: &Dataset, keys: &Keys, block: &Arc<Block>) {
        let (laid, key) = (&rows.inner.laid, self.key);
        // Whatever comes of it: the next attempt has to be worth it, too.
        laid.spent.lock().ns.remove(&key);
        // By now it is known what blocks take.
        if !rows.lays(dataset, keys)
            || block.bytes > BLOCK_MAX_BYTES
            || block.pieces.rows() as u64 > BLOCK_ROWS_MAX
        {
            return;
        }
        let (rows, block) = (rows.clone(), block.clone());
        request::spawn(async move {
            let Laying {
                name,
                place,
                leader,
                ..
            } = self;
            let Ok(_turn) = rows.inner.laid.turns.acquire().await else {
                return;
            };
            let written = {
                let rows = rows.clone();
                tokio::task::spawn_blocking(move || lay(&rows, &name, &key, &block.pieces)).await
            };
            if let Ok(Some(bytes)) = written {
                add(&rows.inner.stats.blocks_laid, 1);
                add(&rows.inner.stats.laid_bytes, bytes);
            }
            leader.publish(Ok(()));
            drop(place);
        });
    }
}

/// What [`Rows::read_found`] read.
enum Read {
    All(RecordBatch),
    /// Of each part, its rows, or nothing.
    Each(Vec<Option<RecordBatch>>),
}

impl Found {
    fn is_in_memory(&self) -> bool {
        matches!(self.of, Of::Memory(_) | Of::Soon(_))
    }

    /// Appends the rows to `raw`, and where they are in it to `spans`. `false`, with both as before:
    /// some are gone.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; both are as before.
    fn read(
        &self,
        of: &Rows,
        wait: Wait,
        raw: &mut Vec<u8>,
        spans: &mut Vec<Range<usize>>,
    ) -> Result<bool, WouldWait> {
        let before = (raw.len(), spans.len());
        let table = match &self.of {
            Of::Laid(table) => table,
            Of::Memory(block) => {
                encode(&block.pieces, &self.part.rows, raw, spans);
                return Ok(true);
            }
            Of::Soon(_) => {
                let Some(rows) = of.inner.soon.take(&self.key, &self.part.rows) else {
                    return Ok(false);
                };
                add(&of.inner.stats.soon_read, rows.len() as u64);
                for row in rows {
                    spans.push(raw.len()..raw.len() + row.len());
                    raw.extend_from_slice(&row);
                }
                return Ok(true);
            }
        };
        let mut waits = None;
        let engine = &of.inner.engine;
        let there = table.each_run(&self.part.rows, |rows, bytes| {
            let read = self.read_run(engine, table, (rows, bytes), wait, raw, spans);
            waits = read.err();
            read == Ok(true)
        });
        if !there {
            raw.truncate(before.0);
            spans.truncate(before.1);
        }
        waits.map_or(Ok(there), Err)
    }

    /// Appends rows that lie in these bytes of a block that is laid out. `false`: some are gone, or
    /// are not what was written.
    fn read_run(
        &self,
        engine: &Engine,
        table: &Table,
        (rows, bytes): (&[u32], Range<u64>),
        wait: Wait,
        raw: &mut Vec<u8>,
        spans: &mut Vec<Range<usize>>,
    ) -> Result<bool, WouldWait> {
        let (base, version) = (raw.len(), self.key.version);
        let mut there = true;
        for (piece, range) in ranges_of_pieces(&bytes) {
            let of = (table.bytes - u64::from(piece) * CHUNK_BYTES).min(CHUNK_BYTES);
            let piece = (rows_piece(&self.key, piece), of);
            there = engine.append_rows_unverified(&self.name, version, piece, range, wait, raw)?;
            if !there {
                break;
            }
        }
        let is_whole = there
            && rows.iter().all(|&row| {
                let range = table.range(row);
                let start = base + (range.start - bytes.start) as usize;
                let end = start + (range.end - range.start) as usize;
                let len = table.seal.opened(row, &raw[start..end]);
                spans.extend(len.map(|len| start..start + len));
                len.is_some()
            });
        if is_whole {
            return Ok(true);
        }
        if wait == Wait::MustNot {
            return Err(WouldWait);
        }
        // The store finds out what is the matter with it. What it takes for whole is not what these
        // rows are, and what has another size neither; nobody is to find it again.
        raw.truncate(base);
        for (piece, range) in ranges_of_pieces(&bytes) {
            let piece = rows_piece(&self.key, piece);
            let mut read = Vec::new();
            let found = engine.append_rows(&self.name, version, piece, range, wait, &mut read);
            let is_other = match found {
                Ok(true) => there,
                _ => engine.has_rows(&self.name, version, piece),
            };
            if is_other {
                engine.forget_rows(&self.name, version, piece);
            }
        }
        Ok(false)
    }
}

/// All rows of a request, in its order. `None`: some bytes are not rows of these columns.
fn decode_in_order(
    all: &[Found],
    picks: &[Pick],
    keys: &Keys,
    (raw, spans, read): (&[u8], &[Range<usize>], &[Option<usize>]),
) -> Option<RecordBatch> {
    let mut decoder = Decoder::new(&keys.schema, raw.len())?;
    for &(part, row) in picks {
        let rows = &all[part].part.rows;
        let at = rows.partition_point(|&r| (r as usize) < row);
        decoder.row(&raw[spans[read[part]? + at].clone()])?;
    }
    decoder.finish().ok()
}

/// Encoded rows as a batch. `None`: they are not rows of these columns.
pub(super) fn decode_rows(schema: &SchemaRef, rows: &[Box<[u8]>]) -> Option<RecordBatch> {
    let mut decoder = Decoder::new(schema, rows.iter().map(|row| row.len()).sum())?;
    for row in rows {
        decoder.row(row)?;
    }
    decoder.finish().ok()
}

/// About what rows of so many bytes take encoded, rather more: each has a run of values for each
/// field, nested ones included, and a run has a byte that says whether any value is null, bits that
/// say which, and maybe a byte of bits that is not full.
pub(super) fn encoded_bytes(bytes: u64, rows: u64, fields: u64) -> u64 {
    let runs = rows.saturating_mul(fields);
    bytes
        .saturating_add(bytes / 4)
        .saturating_add(runs.saturating_mul(4))
}

/// Appends rows of a block that is in memory as they would be laid out, and where each is.
fn encode(pieces: &Pieces, rows: &[u32], raw: &mut Vec<u8>, spans: &mut Vec<Range<usize>>) {
    let mut columns = (usize::MAX, Vec::new());
    for &row in rows {
        let start = raw.len();
        encode_at(pieces, row, &mut columns, raw);
        spans.push(start..raw.len());
    }
}

/// Appends a row as it would be laid out. `columns` has those of the piece that the row before was in.
pub(super) fn encode_at(
    pieces: &Pieces,
    row: u32,
    columns: &mut (usize, Vec<ArrayData>),
    out: &mut Vec<u8>,
) {
    let (piece, row) = pieces.place(row as usize);
    if columns.0 != piece {
        let of = pieces.batches()[piece].columns();
        *columns = (piece, of.iter().map(|c| c.to_data()).collect());
    }
    codec::encode_row(&columns.1, row, out);
}

/// Bytes that are read for these parts, and what they take decoded, each as often as it is wanted.
fn needs(all: &[Found], keys: &Keys) -> (usize, u64) {
    let (mut bytes, mut rows, mut wanted) = (0u64, 0u64, 0u64);
    let fields = keys.schema.flattened_fields().len() as u64;
    for found in all {
        let part = &found.part;
        let each = || part.rows.iter().copied().zip(part.times.iter().copied());
        let times: u64 = each().map(|(_, times)| u64::from(times)).sum();
        rows += times;
        match &found.of {
            Of::Laid(table) => {
                table.each_run(&part.rows, |_, range| {
                    bytes += range.end - range.start;
                    true
                });
                for (row, times) in each() {
                    let range = table.range(row);
                    wanted = wanted.saturating_add((range.end - range.start) * u64::from(times));
                }
            }
            Of::Soon(lengths) => {
                for (length, (_, times)) in lengths.iter().zip(each()) {
                    bytes += u64::from(*length);
                    wanted = wanted.saturating_add(u64::from(*length) * u64::from(times));
                }
            }
            Of::Memory(block) => {
                // All at once: to find the piece of each row by itself takes longer.
                let once = block.pieces.bytes_of(each().map(|(row, _)| (row, 1)));
                let once = encoded_bytes(once, part.rows.len() as u64, fields);
                bytes = bytes.saturating_add(once);
                let all = encoded_bytes(block.pieces.bytes_of(each()), times, fields);
                wanted = wanted.saturating_add(all);
            }
        }
    }
    let decoded = codec::most_decoded(&keys.schema, rows, wanted);
    (usize::try_from(bytes).unwrap_or(usize::MAX), decoded)
}

/// The pieces that a range of bytes lies in, and the range in each.
fn ranges_of_pieces(range: &Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> + use<> {
    let range = range.clone();
    (range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES)).map(move |piece| {
        let first = piece * CHUNK_BYTES;
        let within = range.start.max(first) - first..range.end.min(first + CHUNK_BYTES) - first;
        (piece as u32, within)
    })
}

/// All bytes, and the length of each row if all have the same.
fn decode_header(bytes: &[u8], rows: u32) -> Option<(u64, Option<u32>)> {
    let number = |at: usize| {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes))
    };
    let total = u64::from(number(8)?);
    let (is_same, length) = (number(12)?, number(16)?);
    let fits = number(0)? == MAGIC
        && number(4)? == rows
        && is_same <= 1
        && (is_same == 0 || u64::from(length) * u64::from(rows) == total);
    fits.then(|| (total, (is_same == 1).then_some(length)))
}

fn encode_table(lengths: &[u32], total: u32) -> Vec<u8> {
    let first = lengths.first().copied().unwrap_or(0);
    let same = lengths.iter().all(|length| *length == first);
    let each: &[u32] = if same { &[] } else { lengths };
    let mut out = Vec::with_capacity(TABLE_HEADER_BYTES as usize + each.len() * 4);
    let header = [MAGIC, lengths.len() as u32, total, u32::from(same), first];
    for number in header.iter().chain(each) {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out
}

/// Writes the rows of a block and then its table; returns their bytes. `None`: the cache did not
/// take all of it, or there is no memory for it now.
fn lay(of: &Rows, name: &ObjectName, key: &BlockKey, pieces: &Pieces) -> Option<u64> {
    let engine = &of.inner.engine;
    let rows = pieces.rows();
    // The lengths, and the table that is made of them.
    let mut memory = vec![
        engine
            .budget()
            .try_hold(LAYING_BYTES + rows as u64 * 8)
            .ok()?,
    ];
    let mut room = LAYING_BYTES;
    let mut lengths: Vec<u32> = Vec::with_capacity(rows);
    let (mut total, mut piece) = (0u64, 0u32);
    let seal = Seal::new(name, key);
    let mut out: Vec<u8> = Vec::with_capacity(LAYING_BYTES as usize);
    let keep = |piece: Part, bytes: &[u8]| {
        // What a former table was made of is the same.
        engine.has_rows(name, key.version, piece)
            || engine.keep_rows(name, key.version, piece, bytes)
    };
    for batch in pieces.batches() {
        let columns: Vec<ArrayData> = batch.columns().iter().map(|c| c.to_data()).collect();
        for row in 0..batch.num_rows() {
            let sizes = batch.columns().iter();
            let size: u64 = sizes.map(|c| bytes_of_rows(c, &[(row as u32, 1)])).sum();
            // Bits say what is null, and a byte for each column whether anything is.
            let most = out.len() as u64 + size + size / 4 + 4096;
            if most > room {
                memory.push(engine.budget().try_hold(most - room).ok()?);
                room = most;
                out.reserve_exact(most as usize - out.len());
            }
            let before = out.len();
            codec::encode_row(&columns, row, &mut out);
            let check = seal.of(lengths.len() as u32, &out[before..]);
            out.extend_from_slice(&check.to_le_bytes());
            let length = u32::try_from(out.len() - before).ok()?;
            lengths.push(length);
            total += u64::from(length);
            let whole = out.len() / CHUNK_BYTES as usize * CHUNK_BYTES as usize;
            for bytes in out[..whole].chunks_exact(CHUNK_BYTES as usize) {
                keep(rows_piece(key, piece), bytes).then_some(())?;
                piece += 1;
            }
            out.drain(..whole);
        }
    }
    if !out.is_empty() {
        keep(rows_piece(key, piece), &out).then_some(())?;
    }
    let table = encode_table(&lengths, u32::try_from(total).ok()?);
    let pieces = table.chunks(CHUNK_BYTES as usize);
    // The first piece says that all of it is there.
    for (number, bytes) in pieces.enumerate().rev() {
        keep(table_piece(key, number as u32), bytes).then_some(())?;
    }
    Some(total + table.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{ArrayRef, BooleanArray, StructArray};
    use arrow_schema::{DataType, Field, Fields, Schema};

    #[test]
    fn rows_in_memory_take_no_more_encoded_than_was_expected() {
        // Sixty bits in each row, and whether they are there.
        let fields: Fields = (0..60)
            .map(|i| Field::new(format!("f{i}"), DataType::Boolean, true))
            .collect();
        let bits: ArrayRef = Arc::new(BooleanArray::from(vec![None, Some(true), None]));
        let structs = StructArray::new(fields.clone(), vec![bits; 60], None);
        let field = Field::new("s", DataType::Struct(fields), true);
        let schema = Arc::new(Schema::new(vec![field]));
        let batch = RecordBatch::try_new(schema.clone(), vec![Arc::new(structs)]).unwrap();
        let pieces = Pieces::from(batch);
        let (mut raw, mut spans) = (Vec::new(), Vec::new());
        encode(&pieces, &[0, 1, 2], &mut raw, &mut spans);
        let fields = schema.flattened_fields().len() as u64;
        let most = encoded_bytes(pieces.bytes_of((0..3).map(|row| (row, 1))), 3, fields);
        assert_eq!(spans.last().unwrap().end, raw.len());
        assert!(raw.len() as u64 <= most, "{} of {most}", raw.len());
    }

    #[test]
    fn a_checksum_tells_what_the_bytes_are_and_where_they_belong() {
        let name = |key| ObjectName::new("bk", key).unwrap();
        let key = |version, columns, block| BlockKey {
            file: 1,
            version: VersionId(version),
            columns,
            block,
        };
        let sealed = |seal: &Seal, row: u32, bytes: &[u8]| {
            let mut out = bytes.to_vec();
            out.extend_from_slice(&seal.of(row, bytes).to_le_bytes());
            out
        };
        let seal = Seal::new(&name("a"), &key(2, 3, 4));
        for bytes in [&b""[..], b"a", &[7; 6000]] {
            let whole = sealed(&seal, 5, bytes);
            assert_eq!(seal.opened(5, &whole), Some(bytes.len()));
            for at in [0, whole.len() / 2, whole.len() - 1] {
                let mut other = whole.clone();
                other[at] ^= 16;
                assert_eq!(seal.opened(5, &other), None, "byte {at}");
            }
            assert_eq!(seal.opened(5, &whole[..whole.len() - 1]), None);
            assert_eq!(seal.opened(4, &whole), None, "another row");
            let others = [
                ("b", key(2, 3, 4)),
                ("a", key(9, 3, 4)),
                ("a", key(2, 9, 4)),
                ("a", key(2, 3, 9)),
            ];
            for (file, other) in others {
                let seal = Seal::new(&name(file), &other);
                assert_eq!(seal.opened(5, &whole), None, "{file} {other:?}");
            }
        }
        assert_eq!(seal.opened(0, b"abc"), None);
    }
}
