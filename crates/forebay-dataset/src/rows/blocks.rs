//! Rows of formats that have blocks: grouped by block, fetched and decoded many blocks at a time.
//!
//! What a decoder needs is fed to it on a thread that may block, as long as it is on the local
//! disk; what is not there is fetched on the async side, all ranges of a block at once, while other
//! blocks are decoded.
//!
//! If several requests want rows of one block while it waits for its turn, it is decoded once for
//! all of them (`together.rs`).
//!
//! Memory: fetched bytes are reserved from the budget while a block is decoded, and so is the
//! decoded data, as it grows. A block that is to stay whole takes that memory if it is available,
//! after the cache has given way; if not, or if it is too large for any memory, only the wanted
//! rows are decoded, which may wait for memory. Before anything of a block is held, what is fetched
//! and what is expected of it is taken at once. Who needs more then waits a moment only, because
//! others may be waiting for what it holds: after that the request gives up all that it has read,
//! and is made again alone (`Keys::alone`), one block after the other.

use super::{
    How, RowBatch, RowMemory, Rows,
    cache::{Block, BlockKey},
    files::{Fed, OpenFile},
    gather::{Pick, any_has, bytes_of_rows, conform, copy, is_compound, is_view, slice, width},
    grown::Grown,
    jittered, joined,
    laid::FromLaid,
    of_block,
    pieces::Pieces,
    soon::Wanted,
    stats::add,
    together::{Closed, Decoded, Outcome, outcome},
};
use crate::Dataset;
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{
    CacheStatus, Error, ErrorKind, MemoryBudget, ObjectMeta, ObjectName, Reservation, Result,
    request,
};
use forebay_engine::{Engine, Joined, Wait};
use forebay_format::tabular::{BlockRead, Need, Projection, Rows as BlockRows};
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use std::{
    collections::VecDeque,
    hash::{Hash, Hasher},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::Xxh3;

/// Ranges of one block that are fetched at the same time.
const RANGES_AT_ONCE: usize = 16;

/// So many blocks are in flight, however large they are.
const LARGE_BLOCKS_IN_FLIGHT: u64 = 8;
/// How much of a part of a block may be decoded without memory of its own.
const PART_FREE_BYTES: u64 = 64 << 10;
/// Who holds memory and needs more waits so long before it gives up what it holds.
const CROWDED_WAIT: Duration = Duration::from_secs(1);
/// The same for who holds nothing but other blocks of its request.
const BLOCK_WAIT: Duration = Duration::from_secs(10);
/// Before the rows of a block, the directories of its pages may be read: about so much, or so small
/// a part of the block.
const DIRECTORY_BYTES: u64 = 64 << 10;
const DIRECTORY_SHARE: u64 = 32;
/// Up to this much is copied on the runtime's threads; more goes to other threads.
pub(super) const COPIED_HERE_BYTES: u64 = 256 << 10;
const COPIED_HERE_ROWS: usize = 1024;
const COPIED_HERE_ARRAYS: usize = 1024;
/// Of so many blocks at most, those in memory are looked up one after the other.
const KEPT_AT_ONCE: usize = 256;
/// Fewer rows than this are grouped by block, and their sizes added up, on the runtime's threads:
/// about a millisecond.
const GROUPED_HERE_ROWS: usize = 8192;

/// How rows are read: the basis of cache keys.
#[derive(Clone)]
pub(super) struct Keys {
    pub schema: SchemaRef,
    /// A hash of the dataset's options and format.
    pub options: u64,
    /// A hash of those, and of the columns with their types.
    pub wanted: u64,
    /// Whether blocks will be wanted as a whole.
    pub whole: bool,
    /// The request is made alone: other requests give back what they hold before they wait for long.
    pub alone: bool,
    /// The block is to be laid out, of which few are at a time: it does not queue with all others.
    pub laying: bool,
    /// It reads one block at a time, and waits for memory as long as it takes.
    pub patient: bool,
    /// What the request holds of the budget meanwhile: its answer, and other blocks.
    pub own_bytes: u64,
    /// See `How`.
    pub crowded: Arc<AtomicBool>,
}

impl Keys {
    pub(super) fn new(dataset: &Dataset, columns: &Projection) -> Result<Self> {
        let schema = dataset.projected(columns)?;
        let mut hash = Xxh3::new();
        hash.update(dataset.options().as_bytes());
        hash.update(dataset.format().name().as_bytes());
        if dataset.beside() != 0 {
            hash.update(&dataset.beside().to_le_bytes());
        }
        let options = hash.digest();
        schema.fields().hash(&mut hash);
        Ok(Self {
            schema,
            options,
            wanted: hash.finish(),
            whole: false,
            alone: false,
            laying: false,
            patient: false,
            own_bytes: 0,
            crowded: Arc::default(),
        })
    }
}

/// Rows of one block that a request wants.
pub(super) struct Part {
    pub file: u32,
    pub block: u32,
    /// Each once, ascending.
    pub rows: Vec<u32>,
    /// How often each is wanted.
    pub times: Vec<u32>,
    /// One of them, by the dataset's numbering.
    example: u64,
}

/// A part that was read.
pub(super) struct PartRead {
    pieces: Pieces,
    /// If set, the pieces are the whole block's; otherwise they hold the part's rows.
    whole: Option<Arc<Block>>,
    /// If set, the pieces are these.
    decoded: Option<Arc<Decoded>>,
}

impl PartRead {
    /// These are the part's rows.
    pub fn rows(batch: RecordBatch) -> Self {
        Self {
            pieces: batch.into(),
            whole: None,
            decoded: None,
        }
    }

    /// They are among the block's.
    fn whole(block: Arc<Block>) -> Self {
        Self {
            pieces: block.pieces.clone(),
            whole: Some(block),
            decoded: None,
        }
    }

    /// The size of the part's rows when copied: all of them, as often as they are wanted, and each
    /// once.
    fn bytes_of(&self, part: &Part) -> (u64, u64) {
        let row = |(at, &row): (usize, &u32)| if self.whole.is_some() { row } else { at as u32 };
        let rows = || part.rows.iter().enumerate().map(row);
        let all = self.pieces.bytes_of(rows().zip(part.times.iter().copied()));
        if part.times.iter().all(|&times| times == 1) {
            return (all, all);
        }
        (all, self.pieces.bytes_of(rows().map(|row| (row, 1))))
    }

    /// Memory that it holds of the budget.
    fn held_bytes(&self) -> u64 {
        let whole = self.whole.as_ref().map_or(0, |block| block.bytes);
        whole + self.decoded.as_ref().map_or(0, |d| d.memory.bytes())
    }

    /// Releases a whole block after copying rows out of it.
    async fn copy_rows(&mut self, rows: &[u32], bytes: u64) -> Result<()> {
        if self.whole.is_none() {
            return Ok(());
        }
        let taken = if bytes < COPIED_HERE_BYTES {
            self.pieces.take(rows)?
        } else {
            let (pieces, rows) = (self.pieces.clone(), rows.to_vec());
            joined(tokio::task::spawn_blocking(move || pieces.take(&rows)).await)??
        };
        self.pieces = taken.into();
        self.whole = None;
        Ok(())
    }
}

/// Rows of blocks that are in memory as a whole.
#[derive(Default)]
struct Kept {
    blocks: Vec<Arc<Block>>,
    /// The number of the first batch of each.
    firsts: Vec<usize>,
    next: usize,
    /// For each row its batch, of those of all blocks, and its row there.
    picks: Vec<Pick>,
}

impl Kept {
    fn add(&mut self, block: Arc<Block>) {
        self.firsts.push(self.next);
        self.next += block.pieces.batches().len();
        self.blocks.push(block);
    }

    /// The next row is this one of the block that was added as the `at`th.
    fn pick(&mut self, at: usize, row: usize) {
        let (piece, row) = self.blocks[at].pieces.place(row);
        self.picks.push((self.firsts[at] + piece, row));
    }

    fn batches(&self) -> impl Iterator<Item = &RecordBatch> {
        self.blocks.iter().flat_map(|block| block.pieces.batches())
    }

    /// The size of the rows when copied. Only values that differ in size are looked at one by one.
    fn bytes(&self) -> u64 {
        let batches: Vec<&RecordBatch> = self.batches().collect();
        let columns = batches.first().map_or(0, |batch| batch.num_columns());
        let of_column = |c: usize| match width(batches[0].column(c).data_type()) {
            Some(width) => width.saturating_mul(self.picks.len() as u64),
            None => {
                let picks = self.picks.iter();
                let each = picks.map(|&(batch, row)| {
                    bytes_of_rows(batches[batch].column(c), &[(row as u32, 1)])
                });
                each.fold(0, u64::saturating_add)
            }
        };
        (0..columns).map(of_column).fold(0, u64::saturating_add)
    }
}

impl Rows {
    pub(super) async fn read_blocks(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
        schema: SchemaRef,
        how: &How,
        memory: &mut RowMemory,
    ) -> Result<RowBatch> {
        let (whole, alone) = (how.whole, how.alone);
        let mut keys = Keys {
            whole,
            alone,
            crowded: how.crowded.clone(),
            ..Keys::new(dataset, columns)?
        };
        if let Some(kept) = self.all_kept(dataset, rows, &keys)? {
            return self.read_kept(kept, schema, how, memory).await;
        }
        let (parts, picks) = if rows.len() < GROUPED_HERE_ROWS {
            group(dataset, rows)?
        } else {
            let (dataset, rows) = (dataset.clone(), rows.to_vec());
            joined(tokio::task::spawn_blocking(move || group(&dataset, &rows)).await)??
        };
        let one_block = parts.len() == 1;
        let laid = self
            .read_laid(dataset, parts, picks, &keys, memory, how)
            .await?;
        let (laid, rest, mut picks) = match laid {
            FromLaid::All(batch) => {
                let memory = std::mem::take(memory);
                return Ok(RowBatch { batch, memory });
            }
            FromLaid::Some { read, rest, picks } => (read, rest, picks),
        };
        let (mut waiting, mut pending) = (VecDeque::from(rest), FuturesUnordered::new());
        let mut read = Vec::with_capacity(laid.len() + waiting.len());
        let mut held = memory.held.first().map_or(0, Reservation::bytes);
        let (mut answer, mut copied) = (0u64, 0u64);
        for (number, part, done) in laid {
            let (part, done, (all, once)) = sized(part, done).await?;
            answer = answer.saturating_add(all);
            self.check_answer(answer)?;
            if done.whole.is_none() {
                copied += once;
            }
            read.push((number, part, done));
            // There may be very many.
            tokio::task::consume_budget().await;
        }
        if how.lean && copied > held {
            // They lie in memory until the others are there.
            self.settle(memory, copied, how).await?;
            held = memory.held.first().map_or(0, Reservation::bytes);
        }
        let mut at_once = self.inner.config.blocks_in_flight.max(1);
        let mut arrived = VecDeque::new();
        loop {
            while arrived.is_empty()
                && pending.len() < at_once
                && let Some((number, part)) = waiting.pop_front()
            {
                if let Some(kept) = self.kept(dataset, &part, &keys) {
                    arrived.push_back((number, part, false, Ok(kept)));
                    // Those that were begun go on meanwhile.
                    arrived.extend(pending.next().now_or_never().flatten());
                    // There may be very many.
                    tokio::task::consume_budget().await;
                } else {
                    keys.patient = alone && at_once == 1;
                    if keys.patient {
                        let others = read
                            .iter()
                            .map(|(.., done): &(_, _, PartRead)| done.held_bytes());
                        keys.own_bytes = held + others.sum::<u64>();
                    }
                    pending.push(self.numbered_part(dataset, number, part, keys.clone()));
                }
            }
            let next = match arrived.pop_front() {
                None => pending.next().await,
                arrived => arrived,
            };
            match next {
                // Its own other blocks may hold what this one needs.
                Some((number, part, patient, Err(e)))
                    if alone && !patient && e.kind() == ErrorKind::Busy =>
                {
                    waiting.push_front((number, part));
                    at_once = 1;
                }
                Some((number, part, _, done)) => {
                    let done =
                        done.map_err(|e| of_block(e, part.example, &dataset.file(part.file)))?;
                    let (part, mut done, (all, once)) = sized(part, done).await?;
                    answer = answer.saturating_add(all);
                    self.check_answer(answer)?;
                    // A row-wise order has a few rows in each of many blocks, which must not stay
                    // in memory until the last of them arrives.
                    let beside = if how.lean { 0 } else { answer };
                    if !whole && !one_block && beside.saturating_add(copied + once) <= held {
                        done.copy_rows(&part.rows, once).await?;
                        copied += once;
                    }
                    read.push((number, part, done));
                }
                None => break,
            }
        }
        drop(pending);
        read.sort_unstable_by_key(|(number, ..)| *number);
        // Reserved before copying: what is copied out of blocks, and the answer.
        let most = self.inner.answers.holdable_bytes();
        let beside = match how.lean && answer.max(copied) <= self.inner.copies.holdable_bytes() {
            true => {
                self.settle(memory, answer.max(copied), how).await?;
                self.copy_memory(answer.min(copied).max(1), how).await?
            }
            false => {
                self.settle(memory, (answer + copied).min(most), how)
                    .await?;
                Vec::new()
            }
        };
        let mut memory = std::mem::take(memory);
        let batches: usize = read.iter().map(|(.., p)| p.pieces.batches().len()).sum();
        let arrays = batches.saturating_mul(schema.fields().len());
        let is_little = is_little(&schema, answer, picks.len(), arrays);
        let put_together = move || {
            let batches = place(&read, &mut picks);
            let (batch, keeps) = picked(&schema, &batches, &picks)?;
            // Blocks whose rows were copied need not wait for the answer to be sent.
            if keeps {
                for (.., part) in read {
                    memory.blocks.extend(part.whole);
                    memory.decoded.extend(part.decoded);
                }
            } else {
                drop(read);
            }
            drop(beside);
            Ok(RowBatch { batch, memory })
        };
        self.put_together(is_little, put_together).await
    }

    /// The answer to a request that found all its blocks in memory.
    async fn read_kept(
        &self,
        kept: Kept,
        schema: SchemaRef,
        how: &How,
        memory: &mut RowMemory,
    ) -> Result<RowBatch> {
        let answer = kept.bytes();
        self.check_answer(answer)?;
        let most = self.inner.answers.holdable_bytes();
        self.settle(memory, answer.min(most), how).await?;
        let mut memory = std::mem::take(memory);
        let arrays = kept.batches().count().saturating_mul(schema.fields().len());
        let is_little = is_little(&schema, answer, kept.picks.len(), arrays);
        let put_together = move || {
            let batches: Vec<&RecordBatch> = kept.batches().collect();
            let (batch, keeps) = picked(&schema, &batches, &kept.picks)?;
            if keeps {
                memory.blocks.extend(kept.blocks);
            }
            Ok(RowBatch { batch, memory })
        };
        self.put_together(is_little, put_together).await
    }

    /// Puts rows in order: a few on this thread.
    async fn put_together(
        &self,
        is_little: bool,
        put_together: impl FnOnce() -> Result<RowBatch> + Send + 'static,
    ) -> Result<RowBatch> {
        let began = Instant::now();
        let answer = match is_little {
            true => catch_unwind(AssertUnwindSafe(put_together))
                .map_err(|_| Error::internal("rows could not be put together"))??,
            false => joined(tokio::task::spawn_blocking(put_together).await)??,
        };
        add(
            &self.inner.stats.gather_ns,
            began.elapsed().as_nanos() as u64,
        );
        Ok(answer)
    }

    async fn numbered_part(
        &self,
        dataset: &Arc<Dataset>,
        number: usize,
        part: Part,
        keys: Keys,
    ) -> (usize, Part, bool, Result<PartRead>) {
        let read = self.part(dataset, &part, &keys).await;
        (number, part, keys.patient, read)
    }

    /// The rows of a request that reads whole blocks, if all of these are in memory: most requests of
    /// an order by blocks. It takes no more than it must, since little else is left to do for them.
    fn all_kept(&self, dataset: &Dataset, rows: &[u64], keys: &Keys) -> Result<Option<Kept>> {
        if !keys.whole || rows.len() >= GROUPED_HERE_ROWS {
            return Ok(None);
        }
        // The blocks so far: their numbers, and how many of the rows they have.
        let mut known: Vec<(u64, u64)> = Vec::new();
        let mut kept = Kept {
            picks: Vec::with_capacity(rows.len()),
            ..Kept::default()
        };
        for &row in rows {
            let place = dataset.locate(row)?;
            let number = place.global_block;
            let at = match known.iter().rposition(|(block, _)| *block == number) {
                Some(at) => at,
                None => {
                    let key = self.block_key(dataset, place.file, place.block, keys);
                    let block = match known.len() < KEPT_AT_ONCE {
                        true => self.inner.cache.get(&key),
                        false => None,
                    };
                    let Some(block) = block else {
                        return Ok(None);
                    };
                    known.push((number, 0));
                    kept.add(block);
                    known.len() - 1
                }
            };
            known[at].1 += 1;
            kept.pick(at, place.row_in_block as usize);
        }
        for (_, rows) in known {
            self.was_kept(dataset, rows);
        }
        Ok(Some(kept))
    }

    /// A part of a block that is in memory as a whole.
    fn kept(&self, dataset: &Dataset, part: &Part, keys: &Keys) -> Option<PartRead> {
        let key = self.block_key(dataset, part.file, part.block, keys);
        let block = self.inner.cache.get(&key)?;
        self.was_kept(dataset, part.rows.len() as u64);
        Some(PartRead::whole(block))
    }

    /// Counts rows whose block was in memory.
    pub(super) fn was_kept(&self, dataset: &Dataset, rows: u64) {
        add(&self.inner.stats.blocks_reused, 1);
        let bytes = rows * dataset.row_bytes();
        request::count(request::Cost::MemoryBytes, bytes);
    }

    async fn part(&self, dataset: &Arc<Dataset>, part: &Part, keys: &Keys) -> Result<PartRead> {
        // It may have come meanwhile.
        if let Some(kept) = self.kept(dataset, part, keys) {
            return Ok(kept);
        }
        let inner = &self.inner;
        let key = self.block_key(dataset, part.file, part.block, keys);
        if !keys.whole
            && let Some(batch) = self.take_soon(&key, &part.rows, keys)
        {
            self.was_kept(dataset, part.rows.len() as u64);
            return Ok(PartRead::rows(batch));
        }
        let range = dataset
            .index(part.file as usize)
            .map_or(0, |i| u64::from(i.blocks().block_rows(part.block as usize)));
        let much = keys.whole || part.rows.len() as u64 * 2 >= range;
        let laying = match much {
            true => None,
            false => self.begin_laying(dataset, part, keys, key),
        };
        let wanted = much
            || (inner.cache.is_worth(&key) && !self.keeps_soon(dataset, keys))
            || inner.decoding_whole.contains(&key)
            || laying.is_some();
        if wanted && !keys.alone && inner.cache.may_be_whole(&key) {
            let keys = &Keys {
                laying: laying.is_some(),
                ..keys.clone()
            };
            match self.block(dataset, part.file, part.block, keys).await {
                Ok((block, _)) => {
                    if let Some(laying) = laying {
                        laying.lay(self, dataset, keys, &block);
                    }
                    return Ok(PartRead::whole(block));
                }
                // No memory to keep it, too large for any memory, or damage in rows that may not be
                // wanted: the wanted rows are still read.
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::Busy | ErrorKind::TooLarge | ErrorKind::Corrupt
                    ) => {}
                Err(e) => return Err(e),
            }
        }
        let own = || {
            let close = |_: &[u32]| Closed::of(part.rows.clone());
            self.decode_rows(dataset, part, keys, key, None, close, Vec::new)
        };
        let outcome = match keys.alone {
            true => own().await,
            false => match self.part_together(dataset, part, keys, key).await? {
                // An error in other requests' rows does not affect these.
                Outcome {
                    result: Err(_),
                    alone: false,
                    crowded: false,
                } => own().await,
                outcome => outcome,
            },
        };
        if outcome.crowded {
            keys.crowded.store(true, Relaxed);
        }
        let decoded = outcome.result?;
        Ok(match decoded.take(&part.rows)? {
            Some(taken) => PartRead {
                pieces: taken.into(),
                whole: None,
                decoded: None,
            },
            None => PartRead {
                pieces: decoded.pieces.clone(),
                whole: None,
                decoded: Some(decoded),
            },
        })
    }

    /// Reads rows of a block together with what other requests want from it.
    async fn part_together(
        &self,
        dataset: &Arc<Dataset>,
        part: &Part,
        keys: &Keys,
        key: BlockKey,
    ) -> Result<Outcome> {
        let (told, group) = self.inner.together.join(key, &part.rows);
        match group {
            None => add(&self.inner.stats.parts_joined, 1),
            Some(group) => {
                let (rows, dataset, keys) = (self.clone(), dataset.clone(), keys.clone());
                let part = Part {
                    rows: Vec::new(),
                    times: Vec::new(),
                    ..*part
                };
                request::spawn(async move {
                    let together = &rows.inner.together;
                    let decoded = async {
                        let of = (part.file, part.block);
                        let soon = rows.soon_of(&dataset, of, &keys, &key).await;
                        let close = |more: &[u32]| together.close(&group, more);
                        let joined = || together.joined(&group);
                        let soon = Some(soon).filter(|soon| !soon.new.is_empty());
                        rows.decode_rows(&dataset, &part, &keys, key, soon, close, joined)
                            .await
                    };
                    together.run(&group, decoded).await;
                });
            }
        }
        outcome(told).await
    }

    /// Decodes rows of a part's block, and `soon`, which are kept. `close` is asked which rows, those
    /// included, when it is the block's turn, and `joined` which of those others wait for by now.
    #[allow(clippy::too_many_arguments)]
    async fn decode_rows(
        &self,
        dataset: &Arc<Dataset>,
        part: &Part,
        keys: &Keys,
        key: BlockKey,
        soon: Option<Wanted>,
        close: impl FnOnce(&[u32]) -> Closed,
        joined_since: impl Fn() -> Vec<u32>,
    ) -> Outcome {
        let (mut close, mut closed) = (Some(close), None);
        let more: &[u32] = soon.as_ref().map_or(&[], |soon| &soon.new);
        // Others may wait for this, too.
        let keys = &Keys {
            crowded: Arc::default(),
            ..keys.clone()
        };
        let decoded = async {
            let file = self.open_file(dataset, part.file, keys.options).await?;
            let rows = || {
                let Closed { rows, .. } = closed.insert(
                    close
                        .take()
                        .map_or_else(|| Closed::of(Vec::new()), |close| close(more)),
                );
                let all = rows.len() as u64
                    == u64::from(file.reader.index().blocks().block_rows(part.block as usize));
                if all {
                    Ok(BlockRows::All)
                } else {
                    BlockRows::sorted(rows.as_slice())
                }
            };
            let mut room = Room::part(keys);
            if !more.is_empty() {
                room.places = self.places_of(bytes_of(&file, part.block));
            }
            let (pieces, memory, ns) = self.decode(&file, part.block, rows, keys, room).await?;
            add(&self.inner.stats.blocks_read_in_part, 1);
            self.inner.cache.spent(key, bytes_of(&file, part.block), ns);
            self.inner.laid.spent(key, ns);
            Ok((pieces, memory))
        };
        let decoded: Result<(Pieces, Grown)> = decoded.await;
        // A failure before the block's turn has to close the group as well.
        let Closed {
            mut asked,
            rows,
            alone,
        } = closed
            .or_else(|| close.take().map(|close| close(&[])))
            .unwrap_or_else(|| Closed::of(Vec::new()));
        let (had_more, rows) = (rows.len() > asked.len(), Arc::new(rows));
        match (&decoded, soon) {
            (Ok((pieces, _)), Some(soon)) => {
                let (of, pieces, rows) = (self.clone(), pieces.clone(), rows.clone());
                asked.extend(joined_since());
                asked.sort_unstable();
                let count = asked.len();
                let keep = move || of.keep_soon(key, (&pieces, &rows), &soon, &asked);
                let keep = tokio::task::spawn_blocking(request::carried(keep));
                let kept = joined(keep.await).unwrap_or_else(|e| {
                    tracing::warn!(error = %e, "rows that are read soon could not be kept");
                    0
                });
                self.inner.soon.were_given(&key, &joined_since());
                let stats = &self.inner.stats;
                let is_for_more = kept >= count;
                add(
                    if is_for_more {
                        &stats.soon_blocks
                    } else {
                        &stats.asked_blocks
                    },
                    1,
                );
            }
            (Ok(_), None) => add(&self.inner.stats.asked_blocks, 1),
            (Err(e), Some(_))
                if had_more && matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::TooLarge) =>
            {
                self.inner.soon.failed(key);
            }
            (Err(_), _) => {}
        }
        Outcome {
            result: decoded.map(|(pieces, memory)| {
                Arc::new(Decoded {
                    pieces,
                    rows: rows.to_vec(),
                    memory,
                })
            }),
            alone,
            // The group waited for memory for more rows than were asked for: fewer may fit at once.
            crowded: keys.crowded.load(Relaxed) && !had_more,
        }
    }

    /// What a block is known by, decoded for a request.
    pub(super) fn block_key(
        &self,
        dataset: &Dataset,
        file: u32,
        block: u32,
        keys: &Keys,
    ) -> BlockKey {
        let (file, version) = dataset.identity(file);
        BlockKey {
            file,
            version,
            columns: keys.wanted,
            block,
        }
    }

    /// A whole block, decoded once for all who want it; and whether that had to be done now.
    ///
    /// # Errors
    /// `Busy` if there is no memory for it to stay now, `TooLarge` if there never will be.
    pub(super) async fn block(
        &self,
        dataset: &Arc<Dataset>,
        file: u32,
        block: u32,
        keys: &Keys,
    ) -> Result<(Arc<Block>, bool)> {
        let key = self.block_key(dataset, file, block, keys);
        if let Some(block) = self.inner.cache.get(&key) {
            add(&self.inner.stats.blocks_reused, 1);
            return Ok((block, false));
        }
        if !self.inner.cache.may_be_whole(&key) {
            return Err(too_large());
        }
        match self.inner.decoding_whole.join(key) {
            Joined::Follower(follower) => Ok((follower.wait().await?, true)),
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (rows, dataset, keys) = (self.clone(), dataset.clone(), keys.clone());
                request::spawn(async move {
                    // A decoder that finished between the look into the cache and the join has left
                    // it there.
                    let decoded = match rows.inner.cache.get(&key) {
                        Some(block) => Ok(block),
                        None => rows.decode_whole(&dataset, file, block, &keys, key).await,
                    };
                    match &decoded {
                        Ok(block) => rows.inner.cache.insert(key, block),
                        Err(e) if e.kind() == ErrorKind::TooLarge => {
                            rows.inner.cache.needs(key, u64::MAX);
                        }
                        Err(_) => {}
                    }
                    leader.publish(decoded);
                });
                Ok((follower.wait().await?, true))
            }
        }
    }

    async fn decode_whole(
        &self,
        dataset: &Arc<Dataset>,
        file: u32,
        block: u32,
        keys: &Keys,
        key: BlockKey,
    ) -> Result<Arc<Block>> {
        let file = self.open_file(dataset, file, keys.options).await?;
        let coded = bytes_of(&file, block);
        // Refused before the work is done, because it would then be done again in part.
        let cache = &self.inner.cache;
        let expected = cache
            .expected_decoded(keys.wanted, coded)
            .max(cache.need_of(&key));
        let mut room = Room::whole(key);
        // A guess based on other blocks proves nothing permanently.
        room.grow_now(self, expected)
            .map_err(|e| e.with_kind(ErrorKind::Busy))?;
        room.grown = false;
        let (pieces, mut memory, ns) = self
            .decode(&file, block, || Ok(BlockRows::All), keys, room)
            .await?;
        let bytes = pieces.memory_bytes();
        self.inner
            .cache
            .decoded_whole(keys.wanted, coded, bytes, ns);
        if !keys.whole {
            self.inner.laid.spent(key, ns);
        }
        memory.shrink(bytes);
        add(&self.inner.stats.blocks_decoded, 1);
        Ok(Arc::new(Block {
            pieces,
            bytes,
            _memory: memory,
        }))
    }

    /// Memory that is available at once, after releasing cached blocks if necessary.
    fn spare(&self, bytes: u64) -> Option<Reservation> {
        self.spare_of(self.inner.engine.budget(), bytes)
    }

    /// The same for a caller that does not wait for memory.
    fn spare_now(&self, budget: &MemoryBudget, bytes: u64) -> Option<Reservation> {
        budget.try_hold(bytes).ok().or_else(|| {
            let most = budget.holdable_bytes();
            if bytes > most {
                return None;
            }
            let free = most.saturating_sub(budget.used_bytes());
            self.inner.cache.give_way_now(bytes, free);
            budget.try_hold(bytes).ok().or_else(|| {
                let missing = bytes.saturating_sub(most.saturating_sub(budget.used_bytes()));
                if self.inner.soon.bytes() < missing {
                    return None;
                }
                self.inner.soon.give_way(missing);
                budget.try_hold(bytes).ok()
            })
        })
    }

    fn spare_of(&self, budget: &MemoryBudget, bytes: u64) -> Option<Reservation> {
        budget.try_hold(bytes).ok().or_else(|| {
            if bytes > budget.holdable_bytes() {
                return None;
            }
            self.inner.cache.give_way(bytes);
            budget.try_hold(bytes).ok()
        })
    }

    /// Memory for a decoded block that is to stay whole.
    fn spare_block(&self, bytes: u64) -> Option<Vec<Reservation>> {
        Some(vec![
            self.spare_now(&self.inner.whole_blocks, bytes)?,
            self.spare_now(self.inner.engine.budget(), bytes)?,
        ])
    }

    /// How many places of those in flight a block of so many bytes takes that is decoded for rows to come:
    /// what all of them fetch may take an eighth of what may be held.
    fn places_of(&self, bytes: u64) -> u32 {
        let places = self.inner.config.blocks_in_flight.max(1) as u64;
        let of_each = self.inner.engine.budget().holdable_bytes() / 8 / places;
        let most = (places / LARGE_BLOCKS_IN_FLIGHT).max(1);
        bytes.div_ceil(of_each.max(1)).clamp(1, most) as u32
    }

    /// Rows of one block, memory for them, and the nanoseconds that decoding them took. `rows` is
    /// asked which ones when it is the block's turn.
    async fn decode(
        &self,
        file: &Arc<OpenFile>,
        block: u32,
        rows: impl FnOnce() -> Result<BlockRows>,
        keys: &Keys,
        mut room: Room,
    ) -> Result<(Pieces, Grown, u64)> {
        let inner = &self.inner;
        let closed = |e| Error::internal("the reading of blocks has ended").caused_by(e);
        // Blocks of others wait for memory in there.
        let _in_flight = match keys.alone || keys.laying {
            true => None,
            false => Some(
                inner
                    .blocks
                    .acquire_many(room.places)
                    .await
                    .map_err(closed)?,
            ),
        };
        let mut fetched = Fetched::default();
        let mut spent_ns = 0;
        let beginning = match keys.laying {
            true => None,
            false => Some(inner.beginning.acquire().await.map_err(closed)?),
        };
        let mut thread = inner.decoding.acquire().await.map_err(closed)?;
        drop(beginning);
        let wanted = rows()?;
        room.expect(self, file, block, &wanted, keys);
        let mut read = file
            .reader
            .read_for(block as usize, wanted.clone(), &keys.schema)?;
        if room.whole.is_some() && is_as_held(file.reader.index().schema(), &keys.schema) {
            read.let_views();
        }
        loop {
            let (rows, of, schema) = (self.clone(), file.clone(), keys.schema.clone());
            let asked = wanted.clone();
            let (done, ns);
            (done, fetched, room, ns) = joined(
                tokio::task::spawn_blocking(request::carried(move || {
                    let began = Instant::now();
                    let mut disk = Duration::ZERO;
                    let step = step(&rows, &of, &mut read, &mut fetched, &mut room, &mut disk);
                    let done = match step {
                        Ok(Stopped::Done) => {
                            let blocks = of.reader.index().blocks();
                            let first = blocks.row_range(block as usize).start;
                            finish(read, &schema, |n| first + asked.nth(n))
                        }
                        Ok(Stopped::Missing(ranges)) => Ok(Step::Missing(read, ranges)),
                        Ok(Stopped::Full(bytes)) => Ok(Step::Full(read, bytes)),
                        Err(e) => Err(e),
                    };
                    add(&rows.inner.stats.fetch_ns, disk.as_nanos() as u64);
                    let ns = began.elapsed().saturating_sub(disk).as_nanos() as u64;
                    (done, fetched, room, ns)
                }))
                .await,
            )?;
            drop(thread);
            spent_ns += ns;
            add(&inner.stats.decode_ns, ns);
            let began = Instant::now();
            match done? {
                Step::Done(pieces) => {
                    // What was expected may have been too little, or more. Of what was fetched,
                    // `pieces` has all that is still there.
                    let bytes = pieces.memory_bytes();
                    room.take_over(std::mem::take(&mut fetched));
                    room.grow(self, bytes, 0).await?;
                    room.memory.shrink(bytes.saturating_sub(room.free));
                    return Ok((pieces, room.memory, spent_ns));
                }
                Step::Full(unfinished, bytes)
                    if room.whole.is_none() && unfinished.begins_anew() =>
                {
                    drop(unfinished);
                    fetched = room.begin_anew(self, bytes, fetched).await?;
                    read = file
                        .reader
                        .read_for(block as usize, wanted.clone(), &keys.schema)?;
                }
                Step::Full(unfinished, bytes) => {
                    read = unfinished;
                    room.grow(self, bytes, fetched.bytes()).await?;
                }
                Step::Missing(unfinished, ranges) => {
                    read = unfinished;
                    let bytes = ranges.iter().map(|r| r.end - r.start).sum();
                    if !fetched.take_now(self, bytes, &mut room) {
                        fetched.take(self, bytes, &mut room).await?;
                    }
                    for (range, bytes) in
                        fetch_all(inner, &file.name, &file.meta, file.unpacked, ranges).await?
                    {
                        read.feed(range.start, bytes)?;
                    }
                }
            }
            add(&inner.stats.fetch_ns, began.elapsed().as_nanos() as u64);
            thread = inner.decoding.acquire().await.map_err(closed)?;
        }
    }
}

/// Memory for what is decoded from one block.
struct Room {
    memory: Grown,
    /// This much needs no memory of its own: the answer has some.
    free: u64,
    /// The block is to stay whole: it does not wait for memory.
    whole: Option<BlockKey>,
    /// See `Keys`.
    patient: bool,
    own_bytes: u64,
    crowded: Arc<AtomicBool>,
    /// Of those in flight.
    places: u32,
    /// Of a block of which no more was fetched, nothing was decoded yet.
    directory: u64,
    /// About what will be decoded; taken with the first bytes that are fetched.
    expected: u64,
    /// `memory` is more than what was expected.
    grown: bool,
}

impl Room {
    fn part(keys: &Keys) -> Self {
        Room {
            memory: Grown::default(),
            free: PART_FREE_BYTES,
            whole: None,
            patient: keys.patient,
            own_bytes: keys.own_bytes,
            crowded: keys.crowded.clone(),
            places: 1,
            directory: DIRECTORY_BYTES,
            expected: 0,
            grown: false,
        }
    }

    fn whole(key: BlockKey) -> Self {
        Room {
            memory: Grown::default(),
            free: 0,
            whole: Some(key),
            patient: false,
            own_bytes: 0,
            crowded: Arc::default(),
            places: 1,
            directory: DIRECTORY_BYTES,
            expected: 0,
            grown: false,
        }
    }

    /// Notes what some rows of a block will take, judging by blocks that were decoded.
    fn expect(
        &mut self,
        rows: &Rows,
        file: &OpenFile,
        block: u32,
        wanted: &BlockRows,
        keys: &Keys,
    ) {
        if self.whole.is_some() {
            return;
        }
        let of_block = file.reader.index().blocks().block_rows(block as usize);
        let all = bytes_of(file, block);
        self.directory = self.directory.max(all / DIRECTORY_SHARE);
        let coded = wanted.share_of(all, of_block);
        let decoded = rows.inner.cache.expected_decoded(keys.wanted, coded);
        let each = rows.inner.soon.row_bytes(keys.wanted).unwrap_or_default();
        let decoded = decoded.max(each * wanted.share_of(u64::from(of_block), of_block));
        self.expected = decoded.saturating_sub(self.free);
    }

    /// Whether nothing was decoded yet, and nothing fetched but directories of pages: what is
    /// expected is then taken together with what is fetched next.
    fn is_new(&self, fetched: &Fetched) -> bool {
        !self.grown && fetched.bytes() <= self.directory
    }

    /// What is expected, if it fits beside so many bytes that are fetched, and beside the answer that
    /// it is for: whoever waited for that memory would wait for itself.
    fn beside(&self, rows: &Rows, more: u64) -> u64 {
        let all = rows.inner.engine.budget().holdable_bytes();
        let own = rows.inner.answers.holdable_bytes().max(self.own_bytes);
        let most = all.saturating_sub(own);
        match self.whole.is_none() && more.saturating_add(self.expected) <= most {
            true => self.expected,
            false => 0,
        }
    }

    /// Memory that is needed besides what is held already; see the module.
    async fn wait(&self, rows: &Rows, bytes: u64, holds: bool) -> Result<Reservation> {
        let budget = rows.inner.engine.budget();
        let most = match (self.patient, holds) {
            (true, _) => {
                // Others may have kept rows since the request was made alone.
                rows.forget_soon();
                return budget.hold(bytes).await;
            }
            (false, true) => CROWDED_WAIT,
            (false, false) => BLOCK_WAIT,
        };
        let held = budget.hold_within(bytes, jittered(most)).await;
        held.inspect_err(|e| {
            if e.kind() == ErrorKind::Busy {
                self.crowded.store(true, Relaxed);
            }
        })
    }

    /// That so much may come free: who waits patiently would wait for what its own request holds.
    fn check_fits(&self, rows: &Rows, bytes: u64) -> Result<()> {
        if bytes.saturating_add(self.own_bytes) > rows.inner.engine.budget().holdable_bytes() {
            return Err(too_large().context(format_args!("{bytes} bytes")));
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes() + self.free
    }

    /// Room for this many bytes in total, if available now.
    ///
    /// # Errors
    /// `Busy` if it is not available; `TooLarge` if it never will be.
    fn grow_now(&mut self, rows: &Rows, bytes: u64) -> Result<()> {
        let Some(more) = bytes.checked_sub(self.bytes()).filter(|&more| more > 0) else {
            return Ok(());
        };
        let inner = &rows.inner;
        let mut most = inner.engine.budget().holdable_bytes();
        if self.whole.is_some() {
            most = most.min(inner.whole_blocks.holdable_bytes());
        }
        if bytes > most {
            return Err(too_large().context(format_args!("{bytes} bytes")));
        }
        let held = match self.whole {
            Some(_) => rows.spare_block(more),
            None => rows.spare(more).map(|held| vec![held]),
        };
        let held = held.ok_or_else(|| {
            Error::busy(format!(
                "the memory budget has no room for a block of {bytes} bytes"
            ))
        })?;
        self.memory.add(more, held);
        self.grown = true;
        Ok(())
    }

    /// Counts memory for what was fetched as memory for what is decoded.
    fn take_over(&mut self, fetched: Fetched) {
        // A block that is to stay whole is counted twice, and does not wait for memory.
        if self.whole.is_none() {
            for held in fetched.held {
                self.memory.add(held.bytes(), vec![held]);
            }
        }
    }

    /// Waits for room for this many bytes in total, and for as much as was fetched: that will be
    /// read again, because nothing is held meanwhile. Blocks that held something while they wait
    /// for more would wait for each other.
    async fn begin_anew(&mut self, rows: &Rows, bytes: u64, fetched: Fetched) -> Result<Fetched> {
        let (again, decoded) = (fetched.bytes(), bytes.saturating_sub(self.free));
        self.memory = Grown::default();
        drop(fetched);
        let all = again.saturating_add(decoded);
        self.check_fits(rows, all)?;
        let mut held = match rows.spare(all) {
            Some(held) => held,
            None => self.wait(rows, all, false).await?,
        };
        let again = held.split(again);
        self.memory.add(decoded, vec![held]);
        self.grown = true;
        Ok(Fetched {
            unused: again.bytes(),
            held: vec![again],
        })
    }

    /// The same; for some rows of a block it waits, unless it would wait for the `beside` bytes that
    /// it holds itself.
    async fn grow(&mut self, rows: &Rows, bytes: u64, beside: u64) -> Result<()> {
        match self.grow_now(rows, bytes) {
            Err(e) if e.kind() == ErrorKind::Busy => {
                if let Some(key) = self.whole {
                    // So that the next attempt need not find out by decoding.
                    rows.inner.cache.needs(key, bytes);
                    return Err(e);
                }
                let more = bytes.saturating_sub(self.bytes());
                self.check_fits(rows, bytes.saturating_add(beside))?;
                let held = self.wait(rows, more, true).await?;
                self.memory.add(more, vec![held]);
                self.grown = true;
                Ok(())
            }
            grown => grown,
        }
    }
}

/// Memory for what is fetched of one block.
#[derive(Default)]
struct Fetched {
    held: Vec<Reservation>,
    /// So much of it is for what is still to be fetched.
    unused: u64,
}

impl Fetched {
    fn bytes(&self) -> u64 {
        self.held.iter().map(Reservation::bytes).sum()
    }

    /// Memory for this many bytes, if available now.
    fn take_now(&mut self, rows: &Rows, bytes: u64, room: &mut Room) -> bool {
        let more = bytes.saturating_sub(self.unused);
        let first = match room.is_new(self) {
            true => room.beside(rows, more).saturating_sub(room.memory.bytes()),
            false => 0,
        };
        if more + first > 0 {
            let Some(held) = rows.spare(more + first) else {
                return false;
            };
            self.took(held, first, room);
        }
        self.unused -= bytes - more;
        true
    }

    /// The same, waiting for it.
    async fn take(&mut self, rows: &Rows, bytes: u64, room: &mut Room) -> Result<()> {
        let more = bytes.saturating_sub(self.unused);
        if more > 0 && room.is_new(self) {
            // Nothing is kept of what was expected while this waits.
            let of_whole = room.whole.map_or(0, |_| room.memory.bytes());
            room.memory = Grown::default();
            let first = room.beside(rows, more);
            room.check_fits(rows, self.bytes().saturating_add(more))?;
            let held = room.wait(rows, more + first, false).await?;
            self.took(held, first, room);
            room.grow_now(rows, of_whole)?;
            room.grown = false;
        } else if more > 0 {
            let held = room.wait(rows, more, true).await?;
            self.took(held, 0, room);
        }
        self.unused -= bytes - more;
        Ok(())
    }

    /// `first` bytes of it are for what is decoded.
    fn took(&mut self, mut held: Reservation, first: u64, room: &mut Room) {
        if first > 0 {
            room.memory.add(first, vec![held.split(first)]);
        }
        self.held.push(held);
    }
}

fn too_large() -> Error {
    Error::new(
        ErrorKind::TooLarge,
        "the decoded block is larger than the memory for blocks",
    )
    .hint("write files with smaller row groups, ask for fewer rows or columns at a time, or raise memory.budget")
}

/// The rows in the dataset's form. `row_of` gives the file's row number of the nth row.
fn finish(read: BlockRead, schema: &SchemaRef, row_of: impl Fn(usize) -> u64) -> Result<Step> {
    let mut pieces = Vec::new();
    let mut before = 0;
    for batch in read.finish_pieces()? {
        let rows = batch.num_rows();
        pieces.push(conform(batch, schema, |n| row_of(before + n))?);
        before += rows;
    }
    Ok(Step::Done(Pieces::new(pieces, schema.clone())?))
}

/// Whether a file has all columns, in the types of the dataset.
fn is_as_held(of_file: &SchemaRef, schema: &SchemaRef) -> bool {
    schema.fields().iter().all(|field| {
        let held = of_file.field_with_name(field.name());
        held.is_ok_and(|held| held.data_type() == field.data_type())
    })
}

/// The size of a block in its file, or in the file's unpacked form.
fn bytes_of(file: &OpenFile, block: u32) -> u64 {
    let bytes = file.reader.index().blocks().bytes(block as usize);
    bytes.end - bytes.start
}

enum Step {
    Done(Pieces),
    Missing(BlockRead, Vec<Range<u64>>),
    /// Memory for this many decoded bytes is missing.
    Full(BlockRead, u64),
}

/// Why a block did not proceed.
enum Stopped {
    Done,
    Missing(Vec<Range<u64>>),
    Full(u64),
}

/// Proceeds with a block as long as what it needs is on the local disk and memory is available, and
/// adds up the time that reading the disk took.
fn step(
    rows: &Rows,
    file: &OpenFile,
    read: &mut BlockRead,
    fetched: &mut Fetched,
    room: &mut Room,
    disk: &mut Duration,
) -> Result<Stopped> {
    // Whether everything requested last was there: if not, it is requested again.
    let mut there = true;
    loop {
        read.allow(room.bytes());
        let ranges = match read.step()? {
            Need::Done => return Ok(Stopped::Done),
            Need::Memory(bytes) => match room.grow_now(rows, bytes) {
                Ok(()) => continue,
                // What other rows took proves nothing.
                Err(_) if read.forget_guess() => continue,
                Err(e) if e.kind() == ErrorKind::Busy => return Ok(Stopped::Full(bytes)),
                Err(e) => return Err(e),
            },
            Need::Ranges(ranges) => merged(ranges),
        };
        let bytes: u64 = ranges.iter().map(|r| r.end - r.start).sum();
        let engine: &Engine = &rows.inner.engine;
        if !there
            || file.unpacked
            || !ranges
                .iter()
                .all(|r| engine.may_have_version(&file.name, &file.meta, r))
        {
            return Ok(Stopped::Missing(ranges));
        }
        if !fetched.take_now(rows, bytes, room) {
            return Ok(Stopped::Missing(ranges));
        }
        for range in &ranges {
            let mut out = Vec::with_capacity((range.end - range.start) as usize);
            let began = Instant::now();
            there =
                engine.append_version(&file.name, &file.meta, range.clone(), Wait::May, &mut out)
                    == Ok(true);
            *disk += began.elapsed();
            if !there {
                // What was fed is not requested again.
                break;
            }
            read.feed(range.start, Bytes::from(out))?;
        }
    }
}

/// Merges ranges that touch or nearly do.
pub(super) fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|r| r.start);
    let mut out: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end + GAP_BYTES => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// A gap this small costs less to read than another disk read. (Requests to an origin are for
/// chunks, which ranges share anyway.)
const GAP_BYTES: u64 = 4 << 10;

/// Fetches ranges of one version, several at a time.
pub(super) async fn fetch_all(
    inner: &super::Inner,
    name: &ObjectName,
    meta: &Arc<ObjectMeta>,
    unpacked: bool,
    ranges: Vec<Range<u64>>,
) -> Result<Vec<Fed>> {
    let (mut waiting, mut pending, mut fed) =
        (ranges.into_iter(), FuturesUnordered::new(), Vec::new());
    loop {
        while pending.len() < RANGES_AT_ONCE
            && let Some(range) = waiting.next()
        {
            pending.push(fetch(inner, name, meta, unpacked, range));
        }
        match pending.next().await {
            Some(bytes) => fed.push(bytes?),
            None => return Ok(fed),
        }
    }
}

async fn fetch(
    inner: &super::Inner,
    name: &ObjectName,
    meta: &Arc<ObjectMeta>,
    unpacked: bool,
    range: Range<u64>,
) -> Result<Fed> {
    let engine = &inner.engine;
    let mut out = Vec::with_capacity((range.end - range.start) as usize);
    let status = if unpacked {
        engine
            .read_unpacked_version(name, meta, range.clone(), &mut out)
            .await?
    } else {
        engine
            .read_version(name, meta, range.clone(), &mut out)
            .await?
    };
    if status == CacheStatus::Miss {
        add(&inner.stats.ranges_fetched, 1);
    }
    Ok((range, Bytes::from(out)))
}

/// A part that was read, and the size of its rows ([`PartRead::bytes_of`]).
async fn sized(part: Part, read: PartRead) -> Result<(Part, PartRead, (u64, u64))> {
    let is_small = part.rows.len() < GROUPED_HERE_ROWS;
    let sized = move || {
        let sizes = read.bytes_of(&part);
        (part, read, sizes)
    };
    if is_small {
        return Ok(sized());
    }
    joined(tokio::task::spawn_blocking(sized).await)
}

/// The rows by block, and for each row of the request its part and its row in the block.
fn group(dataset: &Dataset, rows: &[u64]) -> Result<(Vec<Part>, Vec<Pick>)> {
    let mut wanted = Vec::with_capacity(rows.len());
    for (at, &row) in rows.iter().enumerate() {
        let place = dataset.locate(row)?;
        wanted.push((place.file, place.block, place.row_in_block, at));
    }
    wanted.sort_unstable();
    let (mut parts, mut picks): (Vec<Part>, _) = (Vec::new(), vec![(0, 0); rows.len()]);
    for (file, block, row, at) in wanted {
        let same = parts
            .last_mut()
            .filter(|p| (p.file, p.block) == (file, block));
        match same {
            Some(part) if part.rows.last() == Some(&row) => {
                part.times.last_mut().into_iter().for_each(|n| *n += 1);
            }
            Some(part) => {
                part.rows.push(row);
                part.times.push(1);
            }
            None => parts.push(Part {
                file,
                block,
                rows: vec![row],
                times: vec![1],
                example: rows[at],
            }),
        }
        picks[at] = (parts.len() - 1, row as usize);
    }
    Ok((parts, picks))
}

/// Whether the runtime's threads may put an answer together themselves.
fn is_little(schema: &SchemaRef, bytes: u64, rows: usize, arrays: usize) -> bool {
    bytes < COPIED_HERE_BYTES
        && rows <= COPIED_HERE_ROWS
        && arrays <= COPIED_HERE_ARRAYS
        && !any_has(schema, &is_compound)
}

/// The rows of `picks`, and whether they need the memory of the batches that they were in.
fn picked(
    schema: &SchemaRef,
    batches: &[&RecordBatch],
    picks: &[Pick],
) -> Result<(RecordBatch, bool)> {
    Ok(match slice(schema, batches, picks)? {
        Some(slice) => slice,
        None => (copy(schema, batches, picks)?, any_has(schema, &is_view)),
    })
}

/// The batches of all parts. Each pick, a part and a row of its block, becomes one of these batches
/// and a row of it.
fn place<'a>(parts: &'a [(usize, Part, PartRead)], picks: &mut [Pick]) -> Vec<&'a RecordBatch> {
    let (mut batches, mut firsts) = (Vec::new(), Vec::with_capacity(parts.len()));
    for (.., read) in parts {
        firsts.push(batches.len());
        batches.extend(read.pieces.batches());
    }
    // In a whole block a row is at its own position; in a part it is at its position among the
    // part's rows.
    for pick in picks {
        let (_, part, read) = &parts[pick.0];
        let row = match read.whole {
            Some(_) => pick.1,
            None => part.rows.partition_point(|&r| (r as usize) < pick.1),
        };
        let (piece, row) = read.pieces.place(row);
        *pick = (firsts[pick.0] + piece, row);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RowsConfig, rows::batch_bytes};
    use arrow_array::cast::AsArray;
    use forebay_engine::Freshness;
    use forebay_testing::engine::Bench;

    #[tokio::test]
    async fn what_a_block_is_expected_to_take_fits_beside_its_answer() {
        let b = Bench::new(Freshness::Immutable);
        let rows = Rows::new(b.engine.clone(), RowsConfig::default());
        let (budget, answers) = (rows.inner.engine.budget(), &rows.inner.answers);
        let _answer = answers.try_hold(answers.holdable_bytes()).unwrap();
        let (all, fetched) = (budget.holdable_bytes(), 1 << 20);
        let mut guesses = 0;
        for percent in 0..=120 {
            let expected = all / 100 * percent;
            let room = Room {
                memory: Grown::default(),
                free: 0,
                whole: None,
                patient: false,
                own_bytes: 0,
                crowded: Arc::default(),
                places: 1,
                directory: 0,
                expected,
                grown: false,
            };
            let guess = room.beside(&rows, fetched);
            assert!(guess == 0 || guess == expected);
            assert!(budget.try_hold(fetched + guess).is_ok(), "{percent} %");
            guesses += usize::from(guess > 0);
        }
        assert!((40..80).contains(&guesses), "{guesses}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_answer_that_waits_for_its_blocks_holds_memory_for_its_rows_once() {
        let b = Bench::with(Freshness::Immutable, None, 256 << 20);
        // A block each.
        const FILES: u64 = 16;
        let text = "x".repeat(8 << 10);
        for i in 0..FILES {
            let line = format!("{{\"n\": {i}, \"text\": \"{text}\"}}\n");
            b.origin.set(&format!("l/{i:02}.jsonl"), line.repeat(6));
        }
        let datasets = crate::Datasets::new(b.engine.clone(), crate::DatasetsConfig::default());
        let spec = crate::DatasetSpec {
            sources: (0..FILES).map(|i| format!("data/l/{i:02}.jsonl")).collect(),
            ..crate::DatasetSpec::default()
        };
        let opened = datasets.open(&spec, &crate::Everything).await.unwrap();
        let dataset = opened.dataset;
        let rows = Rows::new(b.engine.clone(), RowsConfig::default());
        let inner = &rows.inner;
        let threads = inner.config.decode_threads as u32;
        let none_decodes = inner.decoding.acquire_many(threads).await.unwrap();
        let wanted: Vec<u64> = (0..FILES).map(|i| i * 6).collect();
        let reader = {
            let (rows, dataset, wanted) = (rows.clone(), dataset.clone(), wanted.clone());
            tokio::spawn(async move { rows.read(&dataset, &wanted, &Projection::All).await })
        };
        let until = Instant::now() + Duration::from_secs(20);
        while inner.together.waiting() < wanted.len() {
            assert!(Instant::now() < until, "not all blocks wait for a thread");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let once = FILES * text.len() as u64;
        let held = inner.answers.used_bytes();
        assert!((once..once / 4 * 5).contains(&held), "{held} for {once}");
        assert_eq!(inner.copies.used_bytes(), 0);
        drop(none_decodes);
        let read = reader.await.unwrap().unwrap();
        let numbers = read
            .batch
            .column(0)
            .as_primitive::<arrow_array::types::Int64Type>();
        assert!((0..FILES).all(|i| numbers.value(i as usize) == i as i64));
        let (held, bytes) = (inner.answers.used_bytes(), batch_bytes(&read.batch));
        assert!((bytes..bytes + 1024).contains(&held), "{held} for {bytes}");
        assert_eq!(inner.copies.used_bytes(), 0, "given back with the copies");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_answer_that_waits_to_be_read_alone_holds_no_memory() {
        let b = Bench::with(Freshness::Immutable, None, 256 << 20);
        for i in 0..2 {
            let line = format!("{{\"n\": {i}}}\n");
            b.origin.set(&format!("l/{i}.jsonl"), line.repeat(3));
        }
        let datasets = crate::Datasets::new(b.engine.clone(), crate::DatasetsConfig::default());
        let spec = crate::DatasetSpec {
            sources: vec!["data/l/0.jsonl".into(), "data/l/1.jsonl".into()],
            ..crate::DatasetSpec::default()
        };
        let opened = datasets.open(&spec, &crate::Everything).await.unwrap();
        let dataset = opened.dataset;
        let rows = Rows::new(b.engine.clone(), RowsConfig::default());
        let inner = &rows.inner;
        let turn = inner.alone.lock().await;
        // Nothing is left to put rows in order with.
        let all = inner.copies.holdable_bytes();
        let copies = inner.copies.try_hold(all).unwrap();
        let reader = {
            let rows = rows.clone();
            tokio::spawn(async move { rows.read(&dataset, &[0, 3], &Projection::All).await })
        };
        let changes = async |holds: bool| {
            let until = Instant::now() + Duration::from_secs(20);
            while (inner.answers.used_bytes() > 0) != holds {
                assert!(Instant::now() < until, "holds nothing: {holds}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        changes(true).await;
        changes(false).await;
        assert!(!reader.is_finished());
        drop(turn);
        let read = reader.await.unwrap().unwrap();
        assert_eq!(read.batch.num_rows(), 2);
        drop(copies);
    }

    #[test]
    fn ranges_that_nearly_touch_are_one() {
        assert_eq!(merged(vec![10..20, 0..5]), vec![0..20]);
        assert_eq!(
            merged(vec![0..5, 0..3, GAP_BYTES + 6..GAP_BYTES + 7]),
            [0..5, GAP_BYTES + 6..GAP_BYTES + 7]
        );
        assert_eq!(merged(Vec::new()), [] as [Range<u64>; 0]);
    }
}
