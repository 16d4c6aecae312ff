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
use forebay_core::{Error, MemoryBudget, Reservation, Result, limits};
use forebay_plan::{Chosen, Composition, RowRef, Runs, Shape};
use forebay_protocol::composition::Parts;
use std::{borrow::Cow, ops::Range, sync::Arc};

/// Rows that a plan may take; see the [module](self).
pub struct View {
    bases: Vec<Arc<Dataset>>,
    /// `None`: the rows of the only base, as they are.
    made: Option<Arc<Made>>,
}

/// How the rows of a composition are made of those of datasets. It does not hold these: they may be
/// forgotten, and opened again.
pub(crate) struct Made {
    id: String,
    /// The ids of its bases.
    pub bases: Vec<String>,
    of: Composition,
    shape: Arc<Shape>,
    /// Whether the rows of each block are in one block of a base.
    in_blocks: bool,
    pub memory_bytes: u64,
    /// Counts that memory for as long as anybody holds it.
    _held: Reservation,
}

impl Made {
    /// What a client describes, of the datasets that it names. Takes time for millions of blocks.
    ///
    /// # Errors
    /// `Invalid` for a base, piece or row that does not exist, and for too many blocks; `Busy` if
    /// the memory budget has no room for it.
    pub fn new(parts: &Parts, bases: &[Arc<Dataset>], budget: &MemoryBudget) -> Result<Self> {
        let shapes = bases.iter().map(|base| base.shape().clone()).collect();
        let pieces = parts.chosen()?;
        for piece in &pieces {
            if let Chosen::Picks(picks) = piece {
                // Now, and not where somebody waits for the way back.
                picks.by_row();
            }
        }
        let of = Composition::new(&parts.header.rows_of, shapes, &pieces)?;
        let (shape, in_blocks) = of.blocks(limits::COMPOSITION_RUNS_MAX)?;
        // The ids of the bases, and what the composition knows each by.
        let named = bases.len() * (size_of::<String>() + size_of::<Arc<Shape>>());
        let named = named + parts.header.bases.iter().map(String::len).sum::<usize>();
        let memory_bytes =
            of.memory_bytes() + shape.runs().count() as u64 * 24 + named as u64 + 1024;
        Ok(Self {
            id: parts.identity(),
            bases: parts.header.bases.clone(),
            of,
            shape: Arc::new(shape),
            in_blocks,
            memory_bytes,
            _held: budget.try_hold(memory_bytes)?,
        })
    }

    /// The id by which plans name it.
    pub fn id(&self) -> &str {
        &self.id
    }
}

impl View {
    /// All rows of a dataset.
    pub fn whole(dataset: Arc<Dataset>) -> Self {
        Self {
            bases: vec![dataset],
            made: None,
        }
    }

    /// Rows of these datasets, which are those that it is made of.
    pub(crate) fn composed(made: Arc<Made>, bases: Vec<Arc<Dataset>>) -> Self {
        Self {
            bases,
            made: Some(made),
        }
    }

    /// That of the dataset, or of the composition.
    pub fn id(&self) -> &str {
        match &self.made {
            None => self.bases[0].id(),
            Some(made) => &made.id,
        }
    }

    /// The datasets that its rows are rows of.
    pub fn bases(&self) -> &[Arc<Dataset>] {
        &self.bases
    }

    /// Rows per block.
    pub fn shape(&self) -> &Arc<Shape> {
        match &self.made {
            None => self.bases[0].shape(),
            Some(made) => &made.shape,
        }
    }

    /// Bytes for each row, on average.
    pub fn row_bytes(&self) -> u64 {
        let of = |(bytes, rows): (u64, u64), base: &Arc<Dataset>| {
            (bytes.saturating_add(base.bytes()), rows + base.rows())
        };
        let (bytes, rows) = self.bases.iter().fold((0, 0), of);
        bytes / rows.max(1)
    }

    /// The block of a base that the rows of a block are in: the number of the base here, and that of
    /// the block there. `None` if they are in several.
    fn block(&self, block: u64) -> Option<(u32, u64)> {
        let Some(made) = &self.made else {
            return Some((0, block));
        };
        let rows = made.shape.block_range(block);
        if !made.in_blocks || rows.is_empty() {
            return None;
        }
        let first = made.of.row_at(rows.start);
        let base = self.bases.get(first.source as usize)?;
        Some((first.source, base.shape().block_of(first.row)))
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, bases) = (self.shape().rows(), &self.bases);
        write!(f, "View({}: {rows} rows of {bases:?})", self.id())
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
    ///
    /// # Errors
    /// `Invalid` if all of them together are made of too many datasets.
    pub fn new(views: Vec<Arc<View>>) -> Result<Self> {
        let count: usize = views.iter().map(|view| view.bases.len()).sum();
        if count > limits::COMPOSITION_BASES_MAX {
            let most = limits::COMPOSITION_BASES_MAX;
            return Err(Error::invalid(format!(
                "the sources of the plan are made of {count} datasets; the limit is {most}"
            ))
            .hint("open many files as one dataset"));
        }
        let bases = views.iter().flat_map(|view| view.bases.iter().cloned());
        let mut next = 0;
        let first = views.iter().map(|view| {
            let first = next;
            next += view.bases.len() as u32;
            first
        });
        Ok(Self {
            first: first.collect(),
            bases: bases.collect(),
            views: views.into(),
        })
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
        let view = self.views.iter().find(|view| view.id() == id);
        view.map(|view| view.shape().clone())
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

    /// The rows of bases that these rows of sources are, in the same order.
    ///
    /// # Errors
    /// `RangeNotSatisfiable` for a row that does not exist, `Internal` for a source.
    pub fn resolve<'a>(&self, rows: &'a [RowRef]) -> Result<Cow<'a, [RowRef]>> {
        if self.are_whole() {
            return Ok(Cow::Borrowed(rows));
        }
        // Those of one source together: splits remember what they looked at last.
        let mut places = vec![Vec::new(); self.views.len()];
        for (at, row) in rows.iter().enumerate() {
            let of_source = places.get_mut(row.source as usize);
            let no_source = || Error::internal(format!("the plan has no source {}", row.source));
            of_source.ok_or_else(no_source)?.push(at);
        }
        let mut out = rows.to_vec();
        let (mut numbers, mut found) = (Vec::new(), Vec::new());
        for ((view, first), places) in self.views.iter().zip(&*self.first).zip(places) {
            let Some(made) = &view.made else {
                places.iter().for_each(|at| out[*at].source = *first);
                continue;
            };
            numbers.clear();
            numbers.extend(places.iter().map(|at| rows[*at].row));
            found.clear();
            made.of.fill(&numbers, &mut found)?;
            for (at, of) in places.iter().zip(&found) {
                out[*at] = RowRef {
                    source: first + of.source,
                    row: of.row,
                };
            }
        }
        Ok(Cow::Owned(out))
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

    /// The rows of its source that these rows of a base are; of many runs, the first ones. `None`:
    /// they have the same numbers.
    pub fn runs_of(&self, base: u32, rows: Range<u64>) -> Option<Runs> {
        let source = self.source_of(base) as usize;
        let made = self.views[source].made.as_ref()?;
        let own = base - self.first[source];
        let most = limits::COMPOSITION_PLACES_LOOKED_AT;
        Some(made.of.runs_of(own, rows, most))
    }

    /// Whether the rows of a source's blocks are in one block of a base each.
    pub fn are_in_blocks(&self, source: u32) -> bool {
        let view = self.views.get(source as usize);
        view.is_some_and(|view| view.made.as_ref().is_none_or(|made| made.in_blocks))
    }
}
