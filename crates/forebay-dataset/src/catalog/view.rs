//! What plans take rows from: a dataset as it was opened, or rows of some, in an order of their own
//! (`forebay_plan::Composition`).
//!
//! A plan numbers its sources, and the rows of each. [`Views`] knows, for all sources of a plan
//! together, which datasets there are below them (its *bases*, numbered through) and which row of
//! which base each row is. Above it, orders, ranks and steps see sources only; below it, reading,
//! caches and layouts see bases only.
//!
//! Invariant: a view never changes, and its id stands for all of it. A view is handed out to those
//! who may read each of its datasets.

use super::dataset::Dataset;
use forebay_core::{Error, Result, limits};
use forebay_plan::{Composition, RowRef, Shape};
use forebay_protocol::composition::Parts;
use std::{ops::Range, sync::Arc};

/// Rows that a plan may take; see the [module](self).
pub struct View {
    id: String,
    bases: Vec<Arc<Dataset>>,
    /// `None`: the rows of the only base, as they are.
    made: Option<Made>,
    shape: Arc<Shape>,
}

struct Made {
    of: Composition,
    /// Whether the rows of each block are in one block of a base.
    in_blocks: bool,
    memory_bytes: u64,
}

impl View {
    /// All rows of a dataset.
    pub fn whole(dataset: Arc<Dataset>) -> Self {
        Self {
            id: dataset.id().to_owned(),
            shape: dataset.shape().clone(),
            bases: vec![dataset],
            made: None,
        }
    }

    /// The rows that a client describes, of the datasets that it names. Takes time for millions of
    /// blocks.
    ///
    /// # Errors
    /// `Invalid` for a base, piece or row that does not exist, and for too many blocks.
    pub(crate) fn composed(parts: &Parts, bases: Vec<Arc<Dataset>>) -> Result<Self> {
        let shapes = bases.iter().map(|base| base.shape().clone()).collect();
        let of = Composition::new(&parts.header.rows_of, shapes, &parts.chosen()?)?;
        let (shape, in_blocks) = of.blocks(limits::COMPOSITION_RUNS_MAX)?;
        let memory_bytes = of.memory_bytes() + shape.runs().count() as u64 * 24 + 1024;
        Ok(Self {
            id: parts.identity(),
            bases,
            made: Some(Made {
                of,
                in_blocks,
                memory_bytes,
            }),
            shape: Arc::new(shape),
        })
    }

    /// That of the dataset, or of the composition.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The datasets that its rows are rows of.
    pub fn bases(&self) -> &[Arc<Dataset>] {
        &self.bases
    }

    /// Rows per block.
    pub fn shape(&self) -> &Arc<Shape> {
        &self.shape
    }

    /// Bytes for each row, on average.
    pub fn row_bytes(&self) -> u64 {
        let of = |(bytes, rows): (u64, u64), base: &Arc<Dataset>| {
            (bytes.saturating_add(base.bytes()), rows + base.rows())
        };
        let (bytes, rows) = self.bases.iter().fold((0, 0), of);
        bytes / rows.max(1)
    }

    /// Approximate memory that it takes, without its datasets.
    pub fn memory_bytes(&self) -> u64 {
        self.made.as_ref().map_or(0, |made| made.memory_bytes)
    }

    /// The block of a base that the rows of a block are in: the number of the base here, and that of
    /// the block there. `None` if they are in several.
    fn block(&self, block: u64) -> Option<(u32, u64)> {
        let Some(made) = &self.made else {
            return Some((0, block));
        };
        let rows = self.shape.block_range(block);
        if !made.in_blocks || rows.is_empty() {
            return None;
        }
        let first = made.of.row_at(rows.start);
        let base = self.bases.get(first.source as usize)?;
        Some((first.source, base.shape().block_of(first.row)))
    }

    /// Its rows that are these rows of a base; of many, the first ones.
    fn runs_of(&self, base: u32, rows: Range<u64>) -> Vec<Range<u64>> {
        match &self.made {
            None => vec![rows],
            Some(made) => made
                .of
                .runs_of(base, rows, limits::COMPOSITION_PLACES_LOOKED_AT),
        }
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, bases) = (self.shape.rows(), &self.bases);
        write!(f, "View({}: {rows} rows of {bases:?})", self.id)
    }
}

/// The sources of a plan, in its order, and their bases, numbered through.
#[derive(Clone, Debug)]
pub struct Views {
    views: Arc<[Arc<View>]>,
    bases: Arc<[Arc<Dataset>]>,
    /// The number of the first base of each source.
    first: Arc<[u32]>,
}

impl Views {
    /// Those of these sources.
    pub fn new(views: Vec<Arc<View>>) -> Self {
        let bases = views.iter().flat_map(|view| view.bases.iter().cloned());
        let mut next = 0;
        let first = views.iter().map(|view| {
            let first = next;
            next += view.bases.len() as u32;
            first
        });
        Self {
            first: first.collect(),
            bases: bases.collect(),
            views: views.into(),
        }
    }

    /// The sources.
    pub fn views(&self) -> &[Arc<View>] {
        &self.views
    }

    /// The datasets below all of them. One that several sources are made of is there several times.
    pub fn bases(&self) -> &[Arc<Dataset>] {
        &self.bases
    }

    /// The shape of the source with this id.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn shape_of(&self, id: &str) -> Result<Arc<Shape>> {
        let view = self.views.iter().find(|view| view.id == id);
        view.map(|view| view.shape.clone())
            .ok_or_else(|| Error::not_found(format!("dataset {id:?} is not open here")))
    }

    /// Whether rows of sources are rows of bases with the same numbers.
    pub fn are_whole(&self) -> bool {
        self.views.iter().all(|view| view.made.is_none())
    }

    /// Whether the rows of a source are those of its only base.
    pub fn is_whole(&self, source: u32) -> bool {
        let view = self.views.get(source as usize);
        view.is_some_and(|view| view.made.is_none())
    }

    /// Makes rows of sources rows of bases.
    ///
    /// # Errors
    /// `RangeNotSatisfiable` for a row that does not exist, `Internal` for a source.
    pub fn resolve(&self, rows: &mut [RowRef]) -> Result<()> {
        if self.are_whole() {
            return Ok(());
        }
        let (mut numbers, mut found) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < rows.len() {
            // Those that follow each other of one source are looked up together.
            let source = rows[at].source;
            let count = rows[at..]
                .iter()
                .take_while(|row| row.source == source)
                .count();
            let run = &mut rows[at..at + count];
            at += count;
            let number = source as usize;
            let (view, first) = (self.views.get(number))
                .zip(self.first.get(number))
                .ok_or_else(|| Error::internal(format!("the plan has no source {source}")))?;
            let Some(made) = &view.made else {
                run.iter_mut().for_each(|row| row.source = *first);
                continue;
            };
            numbers.clear();
            numbers.extend(run.iter().map(|row| row.row));
            found.clear();
            made.of.fill(&numbers, &mut found)?;
            for (row, of) in run.iter_mut().zip(&found) {
                *row = RowRef {
                    source: first + of.source,
                    row: of.row,
                };
            }
        }
        Ok(())
    }

    /// The base, and the block of it, that the rows of a source's block are in; `None` if they are
    /// in several.
    pub fn block(&self, source: u32, block: u64) -> Option<(u32, u64)> {
        let view = self.views.get(source as usize)?;
        let (base, block) = view.block(block)?;
        Some((self.first.get(source as usize)? + base, block))
    }

    /// The source that a base is of.
    pub fn source_of(&self, base: u32) -> u32 {
        (self.first.partition_point(|first| *first <= base) - 1) as u32
    }

    /// The source whose rows include some of a base, and those of its rows that are these; of many,
    /// the first ones.
    pub fn runs_of(&self, base: u32, rows: Range<u64>) -> (u32, Vec<Range<u64>>) {
        let source = self.source_of(base);
        let own = base - self.first[source as usize];
        (source, self.views[source as usize].runs_of(own, rows))
    }

    /// Whether the rows of a source's blocks are in one block of a base each.
    pub fn are_in_blocks(&self, source: u32) -> bool {
        let view = self.views.get(source as usize);
        view.is_some_and(|view| view.made.as_ref().is_none_or(|made| made.in_blocks))
    }
}
