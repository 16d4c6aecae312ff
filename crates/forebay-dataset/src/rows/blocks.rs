//! Rows of formats that have blocks: grouped by block, fetched and decoded many blocks at a time.
//!
//! What a decoder asks for is fed to it on a thread that may block as long as it is on the local
//! disk; what is not is fetched on the async side, all ranges of a block at once, while other
//! blocks are decoded.
//!
//! What several requests want of one block while it waits for its turn is decoded once
//! (`together.rs`).
//!
//! Memory: fetched bytes are held from the budget while a block is decoded, and nothing else is
//! waited for meanwhile. A decoded block that is to stay takes its memory if that is there, after
//! the cache has given way; if not, only the wanted rows are decoded, which the answer has memory
//! for.

use super::{
    RowBatch, RowMemory, Rows,
    attempts::attempts,
    cache::{Block, BlockKey},
    files::{Fed, OpenFile},
    gather::{Pick, conform, gather, take_rows},
    joined, of_file,
    stats::add,
    together::{Decoded, Outcome, outcome},
};
use crate::Dataset;
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{
    CacheStatus, Error, ErrorKind, MemoryBudget, ObjectMeta, ObjectName, Reservation, Result,
};
use forebay_engine::{Engine, Joined};
use forebay_format::tabular::{BlockRead, Need, Projection, Rows as BlockRows};
use futures::{StreamExt, stream::FuturesUnordered};
use std::{
    hash::{Hash, Hasher},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::Xxh3;

/// Ranges of one block that are fetched at the same time.
const RANGES_AT_ONCE: usize = 16;

/// What rows are read as: for keys of caches.
#[derive(Clone)]
pub(super) struct Keys {
    pub schema: SchemaRef,
    /// Of the dataset's options and format.
    pub options: u64,
    /// Of those, and the columns with their types.
    pub wanted: u64,
    /// Blocks will be wanted as a whole.
    pub whole: bool,
}

impl Keys {
    pub(super) fn new(dataset: &Dataset, columns: &Projection) -> Result<Self> {
        let schema = dataset.projected(columns)?;
        let mut hash = Xxh3::new();
        hash.update(dataset.options().as_bytes());
        hash.update(dataset.format().name().as_bytes());
        let options = hash.digest();
        schema.fields().hash(&mut hash);
        Ok(Self {
            schema,
            options,
            wanted: hash.finish(),
            whole: false,
        })
    }
}

/// Rows of one block that a request wants.
struct Part {
    file: u32,
    block: u32,
    /// Each once, ascending.
    rows: Vec<u32>,
    /// One of them, as the dataset numbers it.
    example: u64,
}

/// A part that was read.
struct PartRead {
    batch: RecordBatch,
    /// The batch is the whole block; else it has the part's rows.
    whole: Option<Arc<Block>>,
}

impl PartRead {
    /// Lets go of a block that is there whole.
    fn copy_rows(&mut self, rows: &[u32]) -> Result<()> {
        if self.whole.is_some() {
            self.batch = take_rows(&self.batch, rows)?;
            self.whole = None;
        }
        Ok(())
    }
}

impl Rows {
    pub(super) async fn read_blocks(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
        schema: SchemaRef,
        whole: bool,
        mut memory: RowMemory,
    ) -> Result<RowBatch> {
        let keys = Keys {
            whole,
            ..Keys::new(dataset, columns)?
        };
        let (parts, mut picks) = group(dataset, rows)?;
        let one_block = parts.len() == 1;
        let (mut waiting, mut pending) = (parts.into_iter().enumerate(), FuturesUnordered::new());
        let mut read = Vec::new();
        loop {
            while pending.len() < self.inner.config.blocks_in_flight.max(1)
                && let Some((number, part)) = waiting.next()
            {
                pending.push(self.numbered_part(dataset, number, part, &keys));
            }
            match pending.next().await {
                Some(part) => {
                    let (number, part, mut done) = part?;
                    // A row-wise order has a few rows in each of many blocks, which are not to stay
                    // in memory until the last of them is there.
                    if !whole && !one_block {
                        done.copy_rows(&part.rows)?;
                    }
                    read.push((number, part, done));
                }
                None => break,
            }
        }
        drop(pending);
        read.sort_unstable_by_key(|(number, ..)| *number);
        // In a whole block a row is where it is; in a part of one it is as far as its place among
        // the part's rows.
        for pick in &mut picks {
            let (_, part, read) = &read[pick.0];
            if read.whole.is_none() {
                pick.1 = part.rows.partition_point(|&r| (r as usize) < pick.1);
            }
        }
        let mut batches = Vec::with_capacity(read.len());
        for (.., part) in read {
            batches.push(part.batch);
            memory.blocks.extend(part.whole);
        }
        let began = Instant::now();
        let (batch, memory) = joined(
            tokio::task::spawn_blocking(move || -> Result<_> {
                let batch = gather(&schema, &batches, &picks)?;
                // Blocks of which rows were copied need not wait for the answer to be sent.
                if batches.len() > 1 {
                    memory.blocks.clear();
                }
                Ok((batch, memory))
            })
            .await,
        )??;
        add(
            &self.inner.stats.gather_ns,
            began.elapsed().as_nanos() as u64,
        );
        Ok(RowBatch { batch, memory })
    }

    async fn numbered_part(
        &self,
        dataset: &Arc<Dataset>,
        number: usize,
        part: Part,
        keys: &Keys,
    ) -> Result<(usize, Part, PartRead)> {
        match self.part(dataset, &part, keys).await {
            Ok(read) => Ok((number, part, read)),
            Err(e) => Err(of_file(e, part.example, &dataset.file(part.file))),
        }
    }

    async fn part(&self, dataset: &Arc<Dataset>, part: &Part, keys: &Keys) -> Result<PartRead> {
        let inner = &self.inner;
        let key = self.block_key(dataset, part.file, part.block, keys);
        let whole = |block: Arc<Block>| PartRead {
            batch: block.batch.clone(),
            whole: Some(block),
        };
        if let Some(block) = inner.cache.get(&key) {
            add(&inner.stats.blocks_reused, 1);
            return Ok(whole(block));
        }
        let range = dataset
            .index(part.file as usize)
            .map_or(0, |i| u64::from(i.blocks().block_rows(part.block as usize)));
        let much = keys.whole || part.rows.len() as u64 * 2 >= range;
        if much || inner.cache.is_worth(&key) || inner.decoding_whole.contains(&key) {
            match self.block(dataset, part.file, part.block, keys).await {
                Ok((block, _)) => return Ok(whole(block)),
                // No memory to keep it, or damage where it may not be wanted: the wanted rows are
                // read all the same.
                Err(e) if matches!(e.kind(), ErrorKind::Busy | ErrorKind::Corrupt) => {}
                Err(e) => return Err(e),
            }
        }
        let together = self.part_together(dataset, part, keys, key).await?;
        let outcome = match together {
            // Whatever is wrong with rows of others is not wrong with these.
            Outcome {
                result: Err(_),
                alone: false,
            } => {
                self.decode_rows(dataset, part, keys, key, || (part.rows.clone(), true))
                    .await
            }
            outcome => outcome,
        };
        Ok(PartRead {
            batch: outcome.result?.take(&part.rows)?,
            whole: None,
        })
    }

    /// Reads rows of a block together with what others want of it.
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
                    ..*part
                };
                tokio::spawn(async move {
                    let together = &rows.inner.together;
                    together
                        .run(
                            &group,
                            rows.decode_rows(&dataset, &part, &keys, key, || {
                                together.close(&group)
                            }),
                        )
                        .await;
                });
            }
        }
        outcome(told).await
    }

    /// Decodes rows of a part's block. Which ones is asked for when it is the block's turn.
    async fn decode_rows(
        &self,
        dataset: &Arc<Dataset>,
        part: &Part,
        keys: &Keys,
        key: BlockKey,
        close: impl FnOnce() -> (Vec<u32>, bool),
    ) -> Outcome {
        let (mut close, mut closed) = (Some(close), None);
        let decoded = async {
            let file = self.open_file(dataset, part.file, keys.options).await?;
            let rows = || {
                let (rows, _) =
                    closed.insert(close.take().map_or((Vec::new(), true), |close| close()));
                let all = rows.len() as u64
                    == u64::from(file.reader.index().blocks().block_rows(part.block as usize));
                if all {
                    Ok(BlockRows::All)
                } else {
                    BlockRows::sorted(rows.as_slice())
                }
            };
            let (batch, ns) = self.decode(&file, part.block, rows, keys).await?;
            add(&self.inner.stats.blocks_read_in_part, 1);
            self.inner.cache.spent(key, bytes_of(&file, part.block), ns);
            Ok(batch)
        };
        let decoded: Result<RecordBatch> = decoded.await;
        // What fails before its turn has to be closed as well.
        let (rows, alone) = closed
            .or_else(|| close.take().map(|close| close()))
            .unwrap_or_default();
        Outcome {
            result: decoded.map(|batch| Arc::new(Decoded { batch, rows })),
            alone,
        }
    }

    fn block_key(&self, dataset: &Dataset, file: u32, block: u32, keys: &Keys) -> BlockKey {
        let file = dataset.file(file);
        BlockKey {
            file: file.name.hash128(),
            version: file.version(),
            columns: keys.wanted,
            block,
        }
    }

    /// A block whole, decoded once for all who want it; and whether that had to be done now.
    ///
    /// # Errors
    /// `Busy` if there is no memory for it to stay.
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
        match self.inner.decoding_whole.join(key) {
            Joined::Follower(follower) => Ok((follower.wait().await?, true)),
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (rows, dataset, keys) = (self.clone(), dataset.clone(), keys.clone());
                tokio::spawn(async move {
                    // Who finished between the look into the cache and the join has left it there.
                    let decoded = match rows.inner.cache.get(&key) {
                        Some(block) => Ok(block),
                        None => rows.decode_whole(&dataset, file, block, &keys).await,
                    };
                    if let Ok(block) = &decoded {
                        rows.inner.cache.insert(key, block);
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
    ) -> Result<Arc<Block>> {
        let file = self.open_file(dataset, file, keys.options).await?;
        let coded = bytes_of(&file, block);
        let spare = |bytes| {
            self.spare_block(bytes).ok_or_else(|| {
                Error::busy(format!(
                    "there is no memory to keep a block of {bytes} bytes"
                ))
            })
        };
        // Told before the work is done, for it would be done again in part.
        let expected = spare(self.inner.cache.expected_decoded(keys.wanted, coded))?;
        let (batch, ns) = self
            .decode(&file, block, || Ok(BlockRows::All), keys)
            .await?;
        let bytes = batch.get_array_memory_size() as u64;
        self.inner
            .cache
            .decoded_whole(keys.wanted, coded, bytes, ns);
        drop(expected);
        let memory = spare(bytes)?;
        add(&self.inner.stats.blocks_decoded, 1);
        Ok(Arc::new(Block {
            batch,
            bytes,
            _memory: memory,
        }))
    }

    /// Memory that is to be had at once, by letting go of cached blocks if need be.
    fn spare(&self, bytes: u64) -> Option<Reservation> {
        self.spare_of(self.inner.engine.budget(), bytes)
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

    /// The same, for a decoded block.
    fn spare_block(&self, bytes: u64) -> Option<Vec<Reservation>> {
        Some(vec![
            self.spare_of(&self.inner.whole_blocks, bytes)?,
            self.spare(bytes)?,
        ])
    }

    /// Rows of one block, and the nanoseconds that decoding them took. Which rows is asked for when
    /// it is the block's turn.
    async fn decode(
        &self,
        file: &Arc<OpenFile>,
        block: u32,
        rows: impl FnOnce() -> Result<BlockRows>,
        keys: &Keys,
    ) -> Result<(RecordBatch, u64)> {
        let inner = &self.inner;
        let closed = |e| Error::internal("the reading of blocks has ended").source(e);
        let _in_flight = inner.blocks.acquire().await.map_err(closed)?;
        let mut held: Vec<Reservation> = Vec::new();
        let mut spent_ns = 0;
        let mut thread = inner.decoding.acquire().await.map_err(closed)?;
        let wanted = rows()?;
        let mut read = file
            .reader
            .read_for(block as usize, wanted.clone(), &keys.schema)?;
        loop {
            let (rows, of) = (self.clone(), file.clone());
            let decoded = joined(
                tokio::task::spawn_blocking(move || {
                    let began = Instant::now();
                    let mut disk = Duration::ZERO;
                    let step = step(&rows, &of, &mut read, &mut held, &mut disk);
                    let done = match step {
                        Ok(None) => read.finish().map(Step::Done),
                        Ok(Some(ranges)) => Ok(Step::Missing(read, ranges)),
                        Err(e) => Err(e),
                    };
                    add(&rows.inner.stats.fetch_ns, disk.as_nanos() as u64);
                    (
                        done,
                        held,
                        began.elapsed().saturating_sub(disk).as_nanos() as u64,
                    )
                })
                .await,
            )?;
            drop(thread);
            let ranges;
            let (done, kept, ns) = decoded;
            held = kept;
            spent_ns += ns;
            add(&inner.stats.decode_ns, ns);
            match done? {
                Step::Done(batch) => {
                    let first = file.reader.index().blocks().row_range(block as usize).start;
                    let row_of = |n| first + wanted.nth(n);
                    return Ok((conform(batch, &keys.schema, row_of)?, spent_ns));
                }
                Step::Missing(unfinished, missing) => (read, ranges) = (unfinished, missing),
            }
            let began = Instant::now();
            let bytes: u64 = ranges.iter().map(|r| r.end - r.start).sum();
            let memory = match self.spare(bytes) {
                Some(memory) => memory,
                None => inner.engine.budget().hold(bytes).await?,
            };
            held.push(memory);
            for (range, bytes) in
                fetch_all(inner, &file.name, &file.meta, file.unpacked, ranges).await?
            {
                read.feed(range.start, bytes)?;
            }
            add(&inner.stats.fetch_ns, began.elapsed().as_nanos() as u64);
            thread = inner.decoding.acquire().await.map_err(closed)?;
        }
    }
}

/// What a block takes in its file, or in what that unpacks to.
fn bytes_of(file: &OpenFile, block: u32) -> u64 {
    let bytes = file.reader.index().blocks().bytes(block as usize);
    bytes.end - bytes.start
}

enum Step {
    Done(RecordBatch),
    Missing(BlockRead, Vec<Range<u64>>),
}

/// Goes on with a block as far as what it needs is on the local disk, and adds up the time that
/// reading that took. `None`: it is done.
fn step(
    rows: &Rows,
    file: &OpenFile,
    read: &mut BlockRead,
    held: &mut Vec<Reservation>,
    disk: &mut Duration,
) -> Result<Option<Vec<Range<u64>>>> {
    loop {
        let Need::Ranges(ranges) = read.step()? else {
            return Ok(None);
        };
        let ranges = merged(ranges);
        let bytes: u64 = ranges.iter().map(|r| r.end - r.start).sum();
        let engine: &Engine = &rows.inner.engine;
        if file.unpacked
            || !ranges
                .iter()
                .all(|r| engine.may_have_version(&file.name, &file.meta, r))
        {
            return Ok(Some(ranges));
        }
        let Some(memory) = rows.spare(bytes) else {
            return Ok(Some(ranges));
        };
        held.push(memory);
        for range in &ranges {
            let mut out = Vec::with_capacity((range.end - range.start) as usize);
            let began = Instant::now();
            let there = engine.append_version(&file.name, &file.meta, range.clone(), &mut out);
            *disk += began.elapsed();
            if !there {
                // What was fed is not asked for again.
                let Need::Ranges(left) = read.step()? else {
                    return Ok(None);
                };
                return Ok(Some(merged(left)));
            }
            read.feed(range.start, Bytes::from(out))?;
        }
    }
}

/// Ranges that touch or nearly do are one.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
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

/// A gap that costs less to read than another read of the disk. (Requests to an origin are for
/// chunks, which ranges share anyway.)
const GAP_BYTES: u64 = 4 << 10;

/// Fetches ranges of one version, some at a time.
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
    let (engine, tries) = (&inner.engine, inner.config.attempts);
    let mut out = Vec::with_capacity((range.end - range.start) as usize);
    let status = match unpacked {
        true => attempts!(
            tries,
            engine
                .read_unpacked_version(name, meta, range.clone(), &mut out)
                .await
        ),
        false => attempts!(
            tries,
            engine
                .read_version(name, meta, range.clone(), &mut out)
                .await
        ),
    };
    if status? == CacheStatus::Miss {
        add(&inner.stats.ranges_fetched, 1);
    }
    Ok((range, Bytes::from(out)))
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
            Some(part) if part.rows.last() == Some(&row) => {}
            Some(part) => part.rows.push(row),
            None => parts.push(Part {
                file,
                block,
                rows: vec![row],
                example: rows[at],
            }),
        }
        picks[at] = (parts.len() - 1, row as usize);
    }
    Ok((parts, picks))
}

#[cfg(test)]
mod tests {
    use super::*;

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
