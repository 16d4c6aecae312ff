//! Which rows of a file have to be looked at: by the statistics of its row groups, then by the
//! indexes of their pages, then by their bloom filters.
//!
//! Each is read only of row groups that those before it left open, and only of the columns that the
//! expression needs. Whatever cannot be read or understood decides nothing.

use super::{
    ready::Ready,
    verdict::{Known, Verdict, by_value, verdict},
};
use crate::{Dataset, Rows, computed::stretches, rows::FileFacts};
use forebay_core::{ErrorKind, Result, limits};
use forebay_format::tabular::{Bloom, Bound, ColumnFacts, Facts, Nulls};
use std::{ops::Range, sync::Arc};

/// Blocks of a file that are decided together.
pub(super) const BLOCKS_TOGETHER: usize = 4096;
/// Runs of rows that pages of one block decide; with more, the block is looked at.
const SPANS_MAX: usize = 4096;

/// By what rows were decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Statistics,
    Pages,
    Bloom,
}

/// Rows that follow each other.
#[derive(Debug, PartialEq)]
pub(super) enum Piece {
    /// All of them are left, or none.
    Decided {
        rows: Range<u64>,
        left: bool,
        by: By,
    },
    /// They have to be looked at.
    Look {
        rows: Range<u64>,
        /// The file and the block in it that these are all rows of.
        whole: Option<(u32, u32)>,
    },
}

/// Collects the pieces of a file, in order.
#[derive(Default)]
struct Pieces(Vec<Piece>);

impl Pieces {
    fn decided(&mut self, more: Range<u64>, left: bool, by: By) {
        if let Some(Piece::Decided {
            rows,
            left: same,
            by: also,
        }) = self.0.last_mut()
            && rows.end == more.start
            && (*same, *also) == (left, by)
        {
            rows.end = more.end;
            return;
        }
        self.0.push(Piece::Decided {
            rows: more,
            left,
            by,
        });
    }

    fn look(&mut self, rows: Range<u64>, whole: Option<(u32, u32)>) {
        let look = |(rows, whole)| Piece::Look { rows, whole };
        self.0.extend(stretches(rows, whole).map(look));
    }
}

/// The pieces of some blocks of a file, which together are their rows.
pub(super) async fn pieces(
    rows: &Rows,
    dataset: &Arc<Dataset>,
    (file, blocks): (u32, Range<usize>),
    ready: &Ready,
) -> Vec<Piece> {
    let mut pieces = Pieces::default();
    let Some(index) = dataset.index(file as usize).cloned() else {
        return pieces.0;
    };
    let facts = match rows.facts(dataset, file, &ready.columns).await {
        Ok(facts) => facts,
        Err(e) => {
            let name = dataset.file(file).name;
            let error = e.describe();
            match e.kind() {
                ErrorKind::Internal => {
                    tracing::warn!(file = %name, error, "a filter looks at all rows of a file");
                }
                _ => tracing::debug!(file = %name, error, "a filter looks at all rows of a file"),
            }
            None
        }
    };
    let first = dataset.file_blocks(file as usize).start + blocks.start as u64;
    let mut row = match blocks.is_empty() {
        true => 0,
        false => dataset.shape().block_range(first).start,
    };
    for block in blocks {
        let count = u64::from(index.blocks().block_rows(block));
        let range = row..row + count;
        row = range.end;
        if count == 0 {
            continue;
        }
        // Where statistics decide, nothing else lets other work have its turn.
        tokio::task::yield_now().await;
        let whole = Some((file, block as u32));
        let Some(of) = &facts else {
            pieces.look(range, whole);
            continue;
        };
        let group = Group {
            rows,
            of,
            ready,
            block,
            count,
        };
        match group.verdict(|column| of.facts.group(block, column), &[]) {
            Verdict::Maybe => {}
            decided => {
                pieces.decided(range, decided == Verdict::Always, By::Statistics);
                continue;
            }
        }
        let spans = match group.spans().await {
            Ok(spans) => spans,
            Err(e) => group.note("page index", &e),
        };
        let open = |spans: &[(Range<u64>, Verdict)]| -> u64 {
            let open = spans.iter().filter(|(_, v)| *v == Verdict::Maybe);
            open.map(|(r, _)| r.end - r.start).sum()
        };
        let spans = spans.filter(|spans| spans.len() <= SPANS_MAX);
        let spans = spans.unwrap_or_else(|| vec![(0..count, Verdict::Maybe)]);
        let left_open = open(&spans);
        if left_open > 0 {
            let blooms = match group.blooms().await {
                Ok(blooms) => blooms,
                Err(e) => group.note("bloom filter", &e),
            };
            let facts = |column| of.facts.group(block, column);
            if let Some(blooms) = blooms
                && group.verdict(facts, &blooms) == Verdict::Never
            {
                pieces.decided(range, false, By::Bloom);
                continue;
            }
        }
        // Decoding half of a block costs about as much as decoding all of it.
        if 2 * left_open >= count {
            pieces.look(range, whole);
            continue;
        }
        for (span, verdict) in spans {
            let rows = range.start + span.start..range.start + span.end;
            match verdict {
                Verdict::Maybe => pieces.look(rows, None),
                decided => pieces.decided(rows, decided == Verdict::Always, By::Pages),
            }
        }
    }
    pieces.0
}

/// A row group that may have rows which are left.
struct Group<'a> {
    rows: &'a Rows,
    of: &'a FileFacts,
    ready: &'a Ready,
    block: usize,
    count: u64,
}

impl Group<'_> {
    fn note<T>(&self, what: &str, e: &forebay_core::Error) -> Option<T> {
        tracing::debug!(
            block = self.block,
            error = %e.describe(),
            "a filter does not use a {what}"
        );
        None
    }

    fn verdict<'f>(
        &self,
        facts: impl Fn(usize) -> &'f ColumnFacts,
        blooms: &'f [(usize, Bloom)],
    ) -> Verdict {
        let of = |column| Known {
            facts: facts(column),
            bloom: blooms
                .iter()
                .find(|(of, _)| *of == column)
                .map(|(_, bloom)| bloom),
        };
        verdict(&self.ready.node, &of)
    }

    /// Verdicts on runs of rows, by the pages of all columns that have an index; `None` if none has.
    async fn spans(&self) -> Result<Option<Vec<(Range<u64>, Verdict)>>> {
        let facts = &self.of.facts;
        let columns = self.ready.columns.fields().len();
        let mut pages: Vec<Option<Vec<(u32, ColumnFacts)>>> = Vec::with_capacity(columns);
        let mut held = Vec::new();
        for column in 0..columns {
            let mut found = None;
            if let Some([index, places]) = facts.pages_at(self.block, column) {
                let (index, places) = (
                    self.rows.more_facts(self.of, index).await?,
                    self.rows.more_facts(self.of, places).await?,
                );
                if let (Some((index, a)), Some((places, b))) = (index, places) {
                    found = Some(facts.pages(self.block, column, [&index, &places])?);
                    held.push((a, b));
                }
            }
            pages.push(found);
        }
        if pages.iter().all(Option::is_none) {
            return Ok(None);
        }
        for (column, pages) in pages.iter_mut().enumerate() {
            let group = facts.group(self.block, column);
            pages.iter_mut().flatten().for_each(|(_, page)| {
                // What holds for all rows holds for these.
                if page.nulls == Nulls::Unknown {
                    page.nulls = group.nulls;
                }
                // But a text may be long, and pages many.
                let short = |bound: &Option<Bound>| {
                    let bound = bound.as_ref();
                    bound.filter(|b| !matches!(b, Bound::Bytes(_))).cloned()
                };
                if page.nulls != Nulls::Always {
                    page.low = page.low.take().or_else(|| short(&group.low));
                    page.high = page.high.take().or_else(|| short(&group.high));
                }
            });
        }
        let mut cuts: Vec<u64> = pages
            .iter()
            .flatten()
            .flat_map(|pages| pages.iter().map(|(first, _)| u64::from(*first)))
            .filter(|&first| first < self.count)
            .collect();
        cuts.push(0);
        cuts.sort_unstable();
        cuts.dedup();
        if cuts.len() * self.ready.parts > limits::FILTER_VERDICTS_MAX {
            return Ok(None);
        }
        let mut spans: Vec<(Range<u64>, Verdict)> = Vec::new();
        for (i, &from) in cuts.iter().enumerate() {
            let until = cuts.get(i + 1).copied().unwrap_or(self.count);
            let known = |column: usize| match &pages[column] {
                None => facts.group(self.block, column),
                Some(pages) => {
                    let at = pages.partition_point(|(first, _)| u64::from(*first) <= from);
                    match at.checked_sub(1) {
                        Some(at) => &pages[at].1,
                        None => facts.group(self.block, column),
                    }
                }
            };
            let verdict = self.verdict(known, &[]);
            match spans.last_mut() {
                Some((rows, same)) if *same == verdict => rows.end = until,
                _ => spans.push((from..until, verdict)),
            }
        }
        Ok(Some(spans))
    }

    /// The bloom filters of the columns that are compared with single values; `None` if there are
    /// none.
    async fn blooms(&self) -> Result<Option<Vec<(usize, Bloom)>>> {
        let (facts, mut columns) = (&self.of.facts, Vec::new());
        by_value(&self.ready.node, &mut columns);
        let mut found = Vec::new();
        for column in columns {
            let Some((mut range, complete)) = facts.bloom_at(self.block, column) else {
                continue;
            };
            if !complete {
                let Some((head, _)) = self.rows.more_facts(self.of, range.clone()).await? else {
                    continue;
                };
                range.end = range.start.saturating_add(Facts::bloom_length(&head)?);
            }
            if let Some((bytes, _memory)) = self.rows.more_facts(self.of, range).await? {
                found.push((column, facts.bloom(column, &bytes)?));
            }
        }
        Ok((!found.is_empty()).then_some(found))
    }
}
