//! Fetches what is missing ahead of a plan's readers, within a budget of bytes for each.
//!
//! The part of the order that a reader reads is walked from its place on, and each object or block
//! in it that is not on the disk is requested once, a few at a time, through the engine: like any
//! other fill it is shared with others that want the same bytes. Of a block, only what the reader
//! needs is requested, where the format tells: the pieces that its rows are in, and its columns.
//! Under a full shuffle of rows with many rows to a block, nothing is fetched ahead: a block for
//! each row would be more than what is read.

use super::{
    Inner,
    layout::{Layout, UnitOfRow},
    readers::Reader,
    table::{Followed, OBJECT_COLUMN},
};
use crate::{Format, Rows};
use forebay_core::{Error, Result, limits};
use forebay_engine::Engine;
use forebay_plan::Shuffle;
use futures::{StreamExt, stream::FuturesUnordered};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::sync::Notify;

/// Rows of a reader that are inspected together.
const STRIDE_ROWS: u64 = 1024;
/// Epochs that are walked ahead of a reader, at most.
const EPOCHS_AHEAD_MAX: u64 = 2;
/// How often the place is checked if nothing is reported.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause after a failure: the job that reads this gets the error; here it is enough to wait.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs until it is aborted, or the plans are gone.
pub(super) async fn run(
    engine: Engine,
    rows: Rows,
    plans: Weak<Inner>,
    followed: Arc<Followed>,
    wake: Arc<Notify>,
) {
    // A plan says what is wanted on this disk.
    let engine = engine.for_disk();
    let mut generation = None;
    // How far each reader's part has been walked.
    let mut walked: Vec<u64> = Vec::new();
    loop {
        let readers = followed.readers();
        if generation.replace(readers.generation) != Some(readers.generation) {
            walked = readers.list.iter().map(|r| r.at).collect();
        }
        let (mut idle, mut failures) = (true, 0);
        for (reader, next) in readers.list.iter().zip(&mut walked) {
            let Some((epoch, positions, end)) = stretch(&followed, reader, *next) else {
                continue;
            };
            let (fetched, failed) =
                fetch(&engine, &rows, &followed, reader, epoch, positions).await;
            if let Some(inner) = plans.upgrade() {
                inner.stats.ahead_bytes.fetch_add(fetched, Relaxed);
                inner.stats.ahead_failed.fetch_add(failed, Relaxed);
            }
            *next = end;
            (idle, failures) = (false, failures + failed);
            // Where nothing is missing, nothing else lets others have this thread.
            tokio::task::yield_now().await;
        }
        if idle {
            let _ = tokio::time::timeout(LOOK_EVERY, wake.notified()).await;
            if plans.strong_count() == 0 {
                return;
            }
        }
        if failures > 0 {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// What to walk next: positions of an epoch, and where they end, over all epochs. `None`: enough was
/// walked for where the reader is.
fn stretch(followed: &Followed, reader: &Reader, mut next: u64) -> Option<(u64, Range<u64>, u64)> {
    if reader.ahead_bytes == 0 {
        return None;
    }
    let rows = followed.plan.rows_per_epoch();
    // What is further away is fetched already: all rows come before it.
    let sources = followed.plan.spec().sources.iter();
    let all = sources.map(|source| source.shape.rows()).sum::<u64>();
    let most = rows.max(all).saturating_mul(EPOCHS_AHEAD_MAX);
    let window = followed.positions_of(reader, reader.ahead_bytes).min(most);
    let until = reader.at.saturating_add(window);
    let (own, of) = reader.part();
    let stride = STRIDE_ROWS.saturating_mul((of / own).max(1));
    // The job may have started again, or have passed what was walked.
    if next < reader.at || next > until.saturating_add(stride) {
        next = reader.at;
    }
    let (epoch, position) = (next / rows, next % rows);
    // Part of the window at a time, and within one epoch.
    let count = stride.min((window / 2).max(1)).min(rows - position);
    let ends = reader.until_epoch.min(limits::PLAN_EPOCHS_MAX);
    (next + count <= until && epoch < ends)
        .then(|| (epoch, position..position + count, next + count))
}

/// An object or a block, and the rows of it that are read, as the block counts them.
struct Unit {
    base: u32,
    place: UnitOfRow,
    rows: Vec<u32>,
}

/// Fetches what a run of positions needs. Returns the bytes that were missing, and the number of
/// pieces that failed.
async fn fetch(
    engine: &Engine,
    reads: &Rows,
    followed: &Followed,
    reader: &Reader,
    epoch: u64,
    positions: Range<u64>,
) -> (u64, u64) {
    let mut rows = Vec::new();
    reader.runs(epoch, positions, |run| {
        followed.plan.fill(epoch, run, &mut rows);
    });
    let rows = match followed.views.resolve(&rows) {
        Ok(rows) => rows,
        Err(e) => {
            tracing::warn!(error = %e.describe(), "not fetched ahead");
            return (0, 1);
        }
    };
    let full = followed.plan.spec().shuffle == Shuffle::Full;
    let (mut units, mut known): (Vec<Unit>, _) = (Vec::new(), HashMap::new());
    for row in rows.iter() {
        let Some(layout) = followed.layouts.get(row.source as usize) else {
            continue;
        };
        if full && layout.dataset().format() != Format::Objects {
            continue;
        }
        let Some(place) = layout.unit_of_row(row.row) else {
            continue;
        };
        let at = *known.entry((row.source, place.unit)).or_insert_with(|| {
            units.push(Unit {
                base: row.source,
                place,
                rows: Vec::new(),
            });
            units.len() - 1
        });
        units[at].rows.push(place.row);
    }
    let (mut work, mut fetched, mut failed) = (FuturesUnordered::new(), 0, 0);
    for unit in units {
        let Some(layout) = followed.layouts.get(unit.base as usize) else {
            continue;
        };
        while work.len() >= limits::PLAN_AHEAD_FETCHES {
            count(work.next().await, &mut fetched, &mut failed);
        }
        let brought = bring(engine, reads, reader, layout, unit);
        work.push(reads.on_account(layout.dataset(), brought));
    }
    while let Some(done) = work.next().await {
        count(Some(done), &mut fetched, &mut failed);
    }
    (fetched, failed)
}

/// Fetches what is missing of a unit; returns how much that was.
async fn bring(
    engine: &Engine,
    reads: &Rows,
    reader: &Reader,
    layout: &Layout,
    unit: Unit,
) -> Result<u64> {
    let file = layout.dataset().file(unit.place.file);
    if !engine.keeps_own(&file.name) {
        return Ok(0);
    }
    let meta = Arc::new(file.meta());
    let work = async {
        let mut fetched = 0;
        for bytes in wanted(reads, reader, layout, unit).await? {
            if !engine.may_have_version(&file.name, &meta, &bytes) {
                let length = bytes.end - bytes.start;
                engine.bring_version(&file.name, &meta, bytes).await?;
                fetched += length;
            }
        }
        Ok(fetched)
    };
    work.await.inspect_err(|e: &Error| {
        tracing::debug!(object = %file.name, error = %e.describe(), "not fetched ahead");
    })
}

/// The bytes of its file that a unit is read by.
async fn wanted(
    reads: &Rows,
    reader: &Reader,
    layout: &Layout,
    unit: Unit,
) -> Result<Vec<Range<u64>>> {
    let (dataset, place) = (layout.dataset(), unit.place);
    let columns = reader.columns.as_deref();
    let file = place.file as usize;
    if dataset.format() == Format::Objects {
        let read = columns.is_none_or(|c| c.reads(unit.base, OBJECT_COLUMN));
        return Ok(read
            .then(|| 0..dataset.files().size(file))
            .into_iter()
            .collect());
    }
    let index = dataset.index(file);
    if index.is_some_and(|index| index.unpacked_bytes().is_some()) {
        // Its rows are in what it unpacks to, which is in the store since the dataset was opened.
        return Ok(Vec::new());
    }
    let mut rows = unit.rows;
    rows.sort_unstable();
    rows.dedup();
    if let Some((columns, own)) = columns.and_then(|c| Some((c, c.of(unit.base)?))) {
        if let Some(known) = columns.places(unit.base, place.unit) {
            return Ok(known.to_vec());
        }
        let read = rows.len() as u64;
        let found = reads.places(dataset, place.file, place.block, rows.into(), own);
        let found = found.await?;
        let bytes = found.iter().map(|r| r.end - r.start).sum();
        if dataset.format() == Format::Parquet {
            let all = dataset.shape().block_range(place.unit);
            columns.weigh(all.end - all.start, bytes);
            columns.learn(unit.base, place.unit, found.clone().into());
        } else if bytes > 0 {
            columns.weigh(read, bytes);
        }
        return Ok(found);
    }
    Ok(match index {
        Some(index) if reader.is_part() => index
            .blocks()
            .bytes_of_rows(place.block as usize, Some(&rows)),
        _ => vec![layout.block_bytes(file, place.unit)],
    })
}

fn count(done: Option<Result<u64>>, fetched: &mut u64, failed: &mut u64) {
    match done {
        Some(Ok(bytes)) => *fetched += bytes,
        Some(Err(_)) => *failed += 1,
        None => {}
    }
}
