//! Fetches what is missing ahead of a plan's position, within a budget of bytes.
//!
//! The order is walked from the position on, and each object or block in it that is not on the disk
//! is requested once, a few at a time, through the engine: like any other fill it is shared with
//! others that want the same bytes. Under a full shuffle of rows with many rows to a block, nothing
//! is fetched ahead: a block for each row would be more than what is read.

use super::{Inner, table::Followed};
use crate::Format;
use forebay_core::limits;
use forebay_engine::Engine;
use forebay_plan::Shuffle;
use futures::{StreamExt, stream::FuturesUnordered};
use std::{
    collections::HashSet,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::sync::Notify;

/// Rows of the order that are inspected together.
const STRIDE_ROWS: u64 = 1024;
/// How often the position is checked if nothing is reported.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause after a failure: the job that reads this gets the error; here it is enough to wait.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs until it is aborted, or the plans are gone.
pub(super) async fn run(
    engine: Engine,
    plans: Weak<Inner>,
    followed: Arc<Followed>,
    wake: Arc<Notify>,
) {
    // A plan says what is wanted on this disk.
    let engine = engine.for_disk();
    let plan = &followed.plan;
    let rows = plan.rows_per_epoch();
    let mut next = followed.at.load(Relaxed);
    loop {
        let at = followed.at.load(Relaxed);
        let window = (followed.ahead_bytes.load(Relaxed) / followed.row_bytes).max(1);
        // The job may have started again, or have passed what was walked.
        if next < at || next > at.saturating_add(window).saturating_add(STRIDE_ROWS) {
            next = at;
        }
        let (epoch, position) = (next / rows, next % rows);
        // Part of the window at a time, and within one epoch.
        let end = next + STRIDE_ROWS.min(window.div_ceil(2)).min(rows - position);
        let until = followed.until_epoch.load(Relaxed);
        if end > at.saturating_add(window) || epoch >= until.min(limits::PLAN_EPOCHS_MAX) {
            let _ = tokio::time::timeout(LOOK_EVERY, wake.notified()).await;
            if plans.strong_count() == 0 {
                return;
            }
            continue;
        }
        let (fetched, failed) =
            fetch(&engine, &followed, epoch, position..position + (end - next)).await;
        if let Some(inner) = plans.upgrade() {
            inner.stats.ahead_bytes.fetch_add(fetched, Relaxed);
            inner.stats.ahead_failed.fetch_add(failed, Relaxed);
        }
        next = end;
        if failed > 0 {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Fetches what a run of positions needs. Returns the bytes that were missing, and the number of
/// pieces that failed.
async fn fetch(
    engine: &Engine,
    followed: &Followed,
    epoch: u64,
    positions: std::ops::Range<u64>,
) -> (u64, u64) {
    let mut rows = Vec::new();
    followed.plan.fill(epoch, positions, &mut rows);
    let full = followed.plan.spec().shuffle == Shuffle::Full;
    let (mut seen, mut work, mut fetched, mut failed) =
        (HashSet::new(), FuturesUnordered::new(), 0, 0);
    for row in rows {
        let Some(layout) = followed.layouts.get(row.source as usize) else {
            continue;
        };
        if full && layout.dataset().format() != Format::Objects {
            continue;
        }
        let Some((file, unit, bytes)) = layout.bytes_of_row(row.row) else {
            continue;
        };
        if !seen.insert((row.source, unit)) {
            continue;
        }
        let file = layout.dataset().file(file as u32);
        let meta = Arc::new(file.meta());
        if !engine.keeps_own(&file.name) || engine.may_have_version(&file.name, &meta, &bytes) {
            continue;
        }
        while work.len() >= limits::PLAN_AHEAD_FETCHES {
            count(work.next().await, &mut fetched, &mut failed);
        }
        work.push(async move {
            let length = bytes.end - bytes.start;
            engine.bring_version(&file.name, &meta, bytes).await.map(|_| length).inspect_err(|e| {
                tracing::debug!(object = %file.name, error = %e.describe(), "not fetched ahead");
            })
        });
    }
    while let Some(done) = work.next().await {
        count(Some(done), &mut fetched, &mut failed);
    }
    (fetched, failed)
}

fn count(done: Option<forebay_core::Result<u64>>, fetched: &mut u64, failed: &mut u64) {
    match done {
        Some(Ok(bytes)) => *fetched += bytes,
        Some(Err(_)) => *failed += 1,
        None => {}
    }
}
