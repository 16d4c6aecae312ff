//! Datasets that are made of others: selections, filters, splits, repetitions, concatenations and
//! mixes, as functions on row numbers.
//!
//! A [`Composition`] maps each of its rows to a row of one of its bases. It holds no array of rows
//! unless somebody gave one ([`RowsOf::Picks`]); everything else is arithmetic, or a
//! [`RowSet`]. Its [`shape`](Composition::shape) says how many of its rows, one after the other,
//! are in one block of a base, so that a shuffle of blocks reads whole blocks of the bases.
//!
//! Invariant: a composition is a function of its document, its pieces and the shapes of its bases,
//! the same on every platform and, for one [`ALGORITHM`](crate::ALGORITHM), in every release.

use crate::{
    Permutation, RowRef, RowSet, RowSetBuilder, Shape, Stage,
    key::{Purpose, below, derive},
    mix::Mix,
    row_set::select_in_word,
    spec::{check_stages, too_many_sources},
};
use forebay_core::{Error, ErrorKind, Result, limits};
use serde::{Deserialize, Serialize};
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

/// Rows of which a split draws its exact share together.
const STRETCH: u64 = 256;
const WORDS: usize = (STRETCH / 64) as usize;
/// The most runs of blocks that the shape of a composition may have, and the most blocks that are
/// looked at to find them.
const RUNS_MAX: usize = 1 << 24;
/// Looking at one block takes as long as looking at so many rows that were picked one by one.
const PICKS_PER_BLOCK: u64 = 16;
/// Rows that were picked one by one are taken for unordered if the runs within one block are, on
/// average, shorter than this part of a block.
const ORDERED_PART: u64 = 8;

/// Places of one row of a base that are compared to find the first of them.
const PLACES_MAX: usize = 4096;

/// Rows, by where they come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RowsOf {
    /// All rows of a base.
    Base(u32),
    /// `count` rows: `start`, `start + step`, …
    Range {
        /// What is selected from.
        of: Box<RowsOf>,
        /// The first row.
        start: u64,
        /// The distance from each row to the next; not 0, and below 0 for a descending range.
        step: i64,
        /// How many.
        count: u64,
    },
    /// Rows in any order, each any number of times: the numbers are in a piece.
    Picks {
        /// What is selected from.
        of: Box<RowsOf>,
        /// The number of the piece.
        piece: usize,
    },
    /// The rows of a set, which is in a piece.
    Set {
        /// What is selected from.
        of: Box<RowsOf>,
        /// The number of the piece.
        piece: usize,
    },
    /// A random part of the rows, in their order, or the rest of them.
    Split {
        /// What is split.
        of: Box<RowsOf>,
        /// The rows of the part.
        chosen: u64,
        /// Which rows: the same seed chooses the same ones.
        seed: u64,
        /// The rest instead of the part.
        rest: bool,
    },
    /// One after the other.
    Concat(Vec<RowsOf>),
    /// The same rows several times.
    Repeat {
        /// What is repeated.
        of: Box<RowsOf>,
        /// How many times in all.
        times: u64,
    },
    /// By weight, as the first epoch of a plan with seed 0 takes them if nothing is shuffled. A part
    /// that ends begins again.
    Mix {
        /// What is mixed.
        parts: Vec<RowsOf>,
        /// The weights, from which row on.
        stages: Vec<Stage>,
        /// How many rows in all.
        rows: u64,
    },
}

/// What a document refers to.
#[derive(Clone, Debug)]
pub enum Chosen {
    /// For [`RowsOf::Picks`].
    Picks(Arc<Picks>),
    /// For [`RowsOf::Set`].
    Set(Arc<RowSet>),
}

impl Chosen {
    /// Rows in any order, each any number of times.
    pub fn picks(rows: impl Into<Box<[u64]>>) -> Self {
        Chosen::Picks(Arc::new(Picks::new(rows.into())))
    }
}

/// Row numbers in any order, and the way from each back to its places.
#[derive(Debug)]
pub struct Picks {
    rows: Box<[u64]>,
    /// The rows that there must be to choose from.
    universe: u64,
    /// The places, by ascending rows; made when they are first wanted.
    by_row: OnceLock<Box<[u64]>>,
}

impl Picks {
    fn new(rows: Box<[u64]>) -> Self {
        Self {
            universe: rows.iter().max().map_or(0, |most| most.saturating_add(1)),
            rows,
            by_row: OnceLock::new(),
        }
    }

    /// The row numbers.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Makes the way back, which sorts all of them.
    pub fn by_row(&self) -> &[u64] {
        self.by_row.get_or_init(|| {
            let mut places: Box<[u64]> = (0..self.rows.len() as u64).collect();
            places.sort_unstable_by_key(|&place| (self.rows[place as usize], place));
            places
        })
    }
}

/// Rows that are made of the rows of other datasets.
#[derive(Debug)]
pub struct Composition {
    bases: Vec<Arc<Shape>>,
    root: Node,
    splits: usize,
    mixes: u64,
}

#[derive(Debug)]
struct Node {
    rows: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Base(u32),
    Range {
        of: Box<Node>,
        start: u64,
        step: i64,
    },
    Picks {
        of: Box<Node>,
        picks: Arc<Picks>,
    },
    Set {
        of: Box<Node>,
        set: Arc<RowSet>,
    },
    Split {
        of: Box<Node>,
        split: Split,
        rest: bool,
        number: usize,
    },
    Concat {
        parts: Vec<Node>,
        starts: Vec<u64>,
    },
    Repeat {
        of: Box<Node>,
    },
    Mix {
        parts: Vec<Node>,
        mix: Mix,
    },
}

/// Memory for the cycles of all mixes of a composition: they are made again for each row where rows
/// of a larger mix are asked for in no order.
const CYCLES_MAX_BYTES: u64 = 8 << 20;

/// The members of a stretch that a split looked at last.
type Seen = Option<(u64, [u64; WORDS])>;

impl Composition {
    /// A composition over bases of these shapes.
    ///
    /// # Errors
    /// `Invalid` if the document names a base, piece or row that does not exist.
    pub fn new(document: &RowsOf, bases: Vec<Arc<Shape>>, pieces: &[Chosen]) -> Result<Self> {
        let mut splits = 0;
        let mut root = Node::new(document, &bases, pieces, &mut splits)?;
        let mixes = root.mixes();
        if let Some(bytes) = CYCLES_MAX_BYTES.checked_div(mixes) {
            root.keep_cycles(bytes);
        }
        Ok(Self {
            bases,
            root,
            splits,
            mixes,
        })
    }

    /// How many rows it has.
    pub fn rows(&self) -> u64 {
        self.root.rows
    }

    /// The row of a base that a row is. Panics if it does not exist.
    pub fn row_at(&self, row: u64) -> RowRef {
        self.root.at(row, &mut vec![None; self.splits])
    }

    /// The same for many rows: appends them.
    ///
    /// # Errors
    /// `RangeNotSatisfiable` for a row that does not exist.
    pub fn fill(&self, rows: &[u64], out: &mut Vec<RowRef>) -> Result<()> {
        if let Some(row) = rows.iter().find(|&&row| row >= self.rows()) {
            return Err(Error::range_not_satisfiable(format!(
                "row {row} does not exist: the dataset has {} rows",
                self.rows()
            )));
        }
        let mut seen = vec![None; self.splits];
        if self.mixes == 0 {
            out.extend(rows.iter().map(|&row| self.root.at(row, &mut seen)));
            return Ok(());
        }
        let begin = out.len();
        let nothing = RowRef { source: 0, row: 0 };
        out.resize(begin + rows.len(), nothing);
        let wanted = rows.iter().copied().zip(0..).collect();
        self.root.at_all(wanted, &mut seen, &mut out[begin..]);
        Ok(())
    }

    /// How many rows each of its blocks has. The rows of a block are in one block of a base, unless
    /// they were picked in an order that has nothing to do with blocks: then a block is as many
    /// rows as those of the bases have on average.
    ///
    /// # Errors
    /// `Invalid` if there are too many rows or blocks.
    pub fn shape(&self) -> Result<Shape> {
        Ok(self.blocks(RUNS_MAX)?.0)
    }

    /// The same, of at most so many runs of blocks of equal size; and whether the rows of each block
    /// are in one block of a base.
    ///
    /// # Errors
    /// As [`shape`](Composition::shape).
    pub fn blocks(&self, most_runs: usize) -> Result<(Shape, bool)> {
        let mut look = Look {
            bases: &self.bases,
            most_runs,
            left: (RUNS_MAX as u64).min(most_runs as u64 * LOOKS_PER_RUN),
            is_scattered: false,
        };
        let runs = self.root.blocks(&mut look)?.runs;
        Ok((Shape::from_runs(runs)?, !look.is_scattered))
    }

    /// Its rows that are these rows of a base: the opposite of [`row_at`](Composition::row_at).
    pub fn runs_of(&self, source: u32, rows: Range<u64>, most: usize) -> Runs {
        let mut runs = Runs::new(most);
        let mut seen = vec![None; self.splits];
        self.root.runs_of(source, &rows, &mut seen, &mut runs);
        runs
    }

    /// For each row of a base its first row that is this one; `None` if there is none.
    ///
    /// # Errors
    /// `TooLarge` if one of them is there so often, in so many places, that they cannot be compared.
    pub fn first_of(&self, source: u32, rows: &[u64]) -> Result<Vec<Option<u64>>> {
        let mut seen = vec![None; self.splits];
        let first = |&row: &u64| self.root.next_of(source, row, 0, &mut seen);
        rows.iter().map(first).collect()
    }

    /// Approximate memory that it takes, once it was asked for [runs](Composition::runs_of).
    pub fn memory_bytes(&self) -> u64 {
        self.root.memory_bytes()
    }

    /// Those rows whose row of a base is in that base's set.
    ///
    /// # Errors
    /// `Invalid` if there is not one set for each base, of as many rows.
    pub fn filtered(&self, sets: &[Arc<RowSet>]) -> Result<RowSet> {
        let fit = sets
            .iter()
            .map(|s| s.universe())
            .eq(self.bases.iter().map(|b| b.rows()));
        if !fit {
            return Err(Error::invalid("a filter has other rows than its dataset"));
        }
        if matches!(self.root.kind, Kind::Base(_)) {
            return Ok((*sets[0]).clone());
        }
        let mut seen = vec![None; self.splits];
        let mut found = RowSetBuilder::new(self.rows());
        for row in 0..self.rows() {
            let of = self.root.at(row, &mut seen);
            if sets[of.source as usize].contains(of.row) {
                found.push(row)?;
            }
        }
        Ok(found.finish())
    }
}

/// Some rows of a composition, as runs.
#[derive(Debug)]
pub struct Runs {
    /// Where one begins at the end of the one before, they are one.
    pub runs: Vec<Range<u64>>,
    /// There are, or may be, more of them than were asked for.
    pub is_cut: bool,
    most: usize,
}

impl Runs {
    fn new(most: usize) -> Self {
        Self {
            runs: Vec::new(),
            is_cut: false,
            most,
        }
    }

    fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let is_full = self.runs.len() >= self.most;
        match self.runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ if is_full => self.is_cut = true,
            _ => self.runs.push(start..end),
        }
    }
}

fn too_many_places(row: u64) -> Error {
    let message = format!("row {row} is there in more than {PLACES_MAX} places");
    Error::new(ErrorKind::TooLarge, message)
}

/// Places in a mix that are looked at to find one run, at most, on average.
const PLACES_PER_RUN: usize = 64;
/// Blocks that are looked at to find one run, at most, on average.
const LOOKS_PER_RUN: u64 = 4;

/// What the blocks of a composition are found with, and what shows meanwhile.
struct Look<'a> {
    bases: &'a [Arc<Shape>],
    most_runs: usize,
    /// Blocks that may still be looked at.
    left: u64,
    is_scattered: bool,
}

impl Look<'_> {
    fn blocks(&self) -> Blocks {
        Blocks {
            runs: Vec::new(),
            most: self.most_runs,
        }
    }

    /// Refuses to look at more blocks than a composition may take in all: it would take for ever.
    fn at(&mut self, blocks: u64) -> Result<()> {
        let left = self.left.checked_sub(blocks);
        self.left = left.ok_or_else(|| too_many_runs(self.most_runs))?;
        Ok(())
    }
}

/// Runs of blocks of equal size, as a [`Shape`] is made from.
struct Blocks {
    runs: Vec<(u64, u64)>,
    most: usize,
}

impl Blocks {
    fn push(&mut self, blocks: u64, rows: u64) -> Result<()> {
        if blocks == 0 || rows == 0 {
            return Ok(());
        }
        let is_full = self.runs.len() >= self.most;
        match self.runs.last_mut() {
            Some(last) if last.1 == rows => last.0 = last.0.saturating_add(blocks),
            _ if is_full => return Err(too_many_runs(self.most)),
            _ => self.runs.push((blocks, rows)),
        }
        Ok(())
    }

    /// The rows of each block.
    fn each(&self) -> impl DoubleEndedIterator<Item = u64> + '_ {
        let runs = self.runs.iter();
        runs.flat_map(|&(blocks, rows)| (0..blocks).map(move |_| rows))
    }

    fn count(&self) -> u64 {
        let blocks = self.runs.iter().map(|(blocks, _)| *blocks);
        blocks.fold(0, u64::saturating_add)
    }
}

fn too_many_runs(most: usize) -> Error {
    Error::invalid(format!(
        "the dataset has more than {most} runs of blocks of equal size, or many more blocks"
    ))
    .hint(
        "instead of repeating a dataset many times, give a loader epochs=; where a node is told of \
         it, leave stream=True out",
    )
}

impl Node {
    fn new(
        document: &RowsOf,
        bases: &[Arc<Shape>],
        pieces: &[Chosen],
        splits: &mut usize,
    ) -> Result<Self> {
        let mut inner = |of: &RowsOf| Self::new(of, bases, pieces, splits).map(Box::new);
        let no_piece =
            |n: usize| Error::invalid(format!("the composition has no piece {n} of this kind"));
        let node = match document {
            RowsOf::Base(number) => {
                let base = bases.get(*number as usize).ok_or_else(|| {
                    Error::invalid(format!("the composition has no base {number}"))
                })?;
                Node {
                    rows: base.rows(),
                    kind: Kind::Base(*number),
                }
            }
            RowsOf::Range {
                of,
                start,
                step,
                count,
            } => {
                let of = inner(of)?;
                let last = i128::from(*start) + i128::from(*step) * (i128::from(*count) - 1);
                let within = |row: i128| (0..i128::from(of.rows)).contains(&row);
                if *step == 0 || (*count > 0 && !(within(i128::from(*start)) && within(last))) {
                    return Err(Error::invalid(format!(
                        "{count} rows from {start} in steps of {step} are not within {} rows",
                        of.rows
                    )));
                }
                Node {
                    rows: *count,
                    kind: Kind::Range {
                        of,
                        start: *start,
                        step: *step,
                    },
                }
            }
            RowsOf::Picks { of, piece } => {
                let of = inner(of)?;
                let Some(Chosen::Picks(picks)) = pieces.get(*piece) else {
                    return Err(no_piece(*piece));
                };
                if picks.universe > of.rows {
                    return Err(Error::invalid(format!(
                        "row {} does not exist: the dataset has {} rows",
                        picks.universe - 1,
                        of.rows
                    )));
                }
                Node {
                    rows: picks.rows.len() as u64,
                    kind: Kind::Picks {
                        of,
                        picks: picks.clone(),
                    },
                }
            }
            RowsOf::Set { of, piece } => {
                let of = inner(of)?;
                let Some(Chosen::Set(set)) = pieces.get(*piece) else {
                    return Err(no_piece(*piece));
                };
                if set.universe() != of.rows {
                    return Err(Error::invalid(format!(
                        "a filter of {} rows is not for a dataset of {}",
                        set.universe(),
                        of.rows
                    )));
                }
                Node {
                    rows: set.len(),
                    kind: Kind::Set {
                        of,
                        set: set.clone(),
                    },
                }
            }
            RowsOf::Split {
                of,
                chosen,
                seed,
                rest,
            } => {
                let of = inner(of)?;
                if *chosen > of.rows {
                    return Err(Error::invalid(format!(
                        "{chosen} rows cannot be split from {}",
                        of.rows
                    )));
                }
                let split = Split::new(of.rows, *chosen, *seed);
                let rows = if *rest { of.rows - chosen } else { *chosen };
                let number = *splits;
                *splits += 1;
                Node {
                    rows,
                    kind: Kind::Split {
                        of,
                        split,
                        rest: *rest,
                        number,
                    },
                }
            }
            RowsOf::Concat(parts) => {
                let parts = parts
                    .iter()
                    .map(|part| Self::new(part, bases, pieces, splits))
                    .collect::<Result<Vec<_>>>()?;
                let mut rows = 0u64;
                let mut starts = Vec::with_capacity(parts.len());
                for part in &parts {
                    starts.push(rows);
                    rows = rows.saturating_add(part.rows);
                }
                Node {
                    rows,
                    kind: Kind::Concat { parts, starts },
                }
            }
            RowsOf::Repeat { of, times } => {
                let of = inner(of)?;
                Node {
                    rows: of.rows.saturating_mul(*times),
                    kind: Kind::Repeat { of },
                }
            }
            RowsOf::Mix {
                parts,
                stages,
                rows,
            } => {
                if parts.is_empty() {
                    return Err(Error::invalid("a mix has no parts"));
                }
                if parts.len() > limits::PLAN_SOURCES_MAX {
                    return Err(too_many_sources(parts.len()));
                }
                check_stages(stages, parts.len())?;
                let parts = parts
                    .iter()
                    .map(|part| Self::new(part, bases, pieces, splits))
                    .collect::<Result<Vec<_>>>()?;
                if let Some(empty) = parts.iter().position(|part| part.rows == 0) {
                    return Err(Error::invalid(format!("part {empty} of a mix has no rows"))
                        .hint("leave it out of the mix"));
                }
                let names: Vec<String> = (0..parts.len()).map(|n| format!("part {n}")).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                Node {
                    rows: *rows,
                    kind: Kind::Mix {
                        mix: Mix::of_stages(&names, stages, 0)?,
                        parts,
                    },
                }
            }
        };
        if node.rows > limits::PLAN_ROWS_MAX {
            return Err(Error::invalid(format!(
                "the dataset would have {} rows; the limit is {}",
                node.rows,
                limits::PLAN_ROWS_MAX
            )));
        }
        Ok(node)
    }

    fn at(&self, row: u64, seen: &mut [Seen]) -> RowRef {
        let (mut node, mut row) = (self, row);
        loop {
            if let Kind::Base(source) = node.kind {
                return RowRef { source, row };
            }
            let (part, row_of_it) = node.part_at(row, seen);
            (node, row) = (&node.parts()[part], row_of_it);
        }
    }

    /// [`at`](Node::at) for many rows, each with its place in `out`. Rows of a mix are asked for in
    /// ascending order, whatever order they have, so that each of its cycles is made once.
    fn at_all(&self, mut rows: Vec<(u64, usize)>, seen: &mut [Seen], out: &mut [RowRef]) {
        if let Kind::Base(source) = self.kind {
            for (row, at) in rows {
                out[at] = RowRef { source, row };
            }
            return;
        }
        if let Kind::Mix { .. } = self.kind {
            rows.sort_unstable();
        }
        let parts = self.parts();
        let mut of_parts = vec![Vec::new(); parts.len()];
        for (row, at) in rows {
            let (part, row_of_it) = self.part_at(row, seen);
            of_parts[part].push((row_of_it, at));
        }
        for (part, rows) in parts.iter().zip(of_parts) {
            if !rows.is_empty() {
                part.at_all(rows, seen, out);
            }
        }
    }

    /// What it is made of; nothing, for a base.
    fn parts(&self) -> &[Node] {
        match &self.kind {
            Kind::Base(_) => &[],
            Kind::Range { of, .. }
            | Kind::Picks { of, .. }
            | Kind::Set { of, .. }
            | Kind::Split { of, .. }
            | Kind::Repeat { of } => std::slice::from_ref(of),
            Kind::Concat { parts, .. } | Kind::Mix { parts, .. } => parts,
        }
    }

    /// Which of its [parts](Node::parts) has a row of it, and as which of its own. Panics for a base.
    fn part_at(&self, row: u64, seen: &mut [Seen]) -> (usize, u64) {
        match &self.kind {
            Kind::Base(_) => unreachable!("the rows of a base are its own"),
            // Within 2^42 in either direction: checked when this was made.
            Kind::Range { start, step, .. } => (0, (*start as i64 + row as i64 * step) as u64),
            Kind::Picks { picks, .. } => (0, picks.rows[row as usize]),
            Kind::Set { set, .. } => (0, set.select(row)),
            Kind::Split {
                split,
                rest,
                number,
                ..
            } => (0, split.select(row, *rest, &mut seen[*number])),
            Kind::Repeat { of } => (0, row % of.rows),
            Kind::Concat { starts, .. } => {
                // Of parts that begin at the same row, all but the last are empty.
                let part = starts.partition_point(|&start| start <= row) - 1;
                (part, row - starts[part])
            }
            Kind::Mix { parts, mix } => {
                let (part, ordinal) = mix.source_at(row);
                (part, ordinal % parts[part].rows)
            }
        }
    }

    /// The first of its rows, from `from` on, that is this row of a base.
    ///
    /// # Errors
    /// `TooLarge` if that cannot be said without looking at very many places.
    fn next_of(
        &self,
        source: u32,
        row: u64,
        from: u64,
        seen: &mut Vec<Seen>,
    ) -> Result<Option<u64>> {
        let within = |place: u64| Some(place).filter(|&place| place < self.rows);
        match &self.kind {
            Kind::Base(own) => Ok(within(row).filter(|_| *own == source && row >= from)),
            Kind::Concat { parts, starts } => {
                for (part, &start) in parts.iter().zip(starts) {
                    if start + part.rows > from {
                        let from = from.saturating_sub(start);
                        if let Some(place) = part.next_of(source, row, from, seen)? {
                            return Ok(Some(start + place));
                        }
                    }
                }
                Ok(None)
            }
            Kind::Repeat { of } => Ok(of.next_again(source, row, from, seen)?.and_then(within)),
            Kind::Mix { parts, mix } => {
                let mut first = None;
                for (number, part) in parts.iter().enumerate() {
                    let from = mix.ordinal_at(from, number);
                    let ordinal = part.next_again(source, row, from, seen)?;
                    let place = ordinal.and_then(|ordinal| mix.position_of(number, ordinal));
                    first = first.into_iter().chain(place).min();
                }
                Ok(first.and_then(within))
            }
            Kind::Range { of, start, step } if *step > 0 => {
                let step = step.unsigned_abs();
                of.next_that(source, row, start + from * step, seen, |place, _| {
                    let after = place.saturating_sub(*start);
                    Some(after / step).filter(|_| after.is_multiple_of(step))
                })
                .map(|place| place.and_then(within))
            }
            Kind::Set { of, set } => {
                if from >= self.rows {
                    return Ok(None);
                }
                of.next_that(source, row, set.select(from), seen, |place, _| {
                    Some(set.rank(place)).filter(|_| set.contains(place))
                })
            }
            Kind::Split {
                of,
                split,
                rest,
                number,
            } => {
                if from >= self.rows {
                    return Ok(None);
                }
                let begin = split.select(from, *rest, &mut seen[*number]);
                of.next_that(source, row, begin, seen, |place, seen| {
                    let mut rank = |row| split.rank(row, *rest, &mut seen[*number]);
                    let (before, after) = (rank(place), rank(place + 1));
                    Some(before).filter(|_| after > before)
                })
            }
            Kind::Range { .. } | Kind::Picks { .. } => {
                let mut runs = Runs::new(PLACES_MAX);
                self.runs_of(source, &(row..row.saturating_add(1)), seen, &mut runs);
                if runs.is_cut {
                    return Err(too_many_places(row));
                }
                let places = runs.runs.into_iter().flatten();
                Ok(places.filter(|&place| place >= from).min())
            }
        }
    }

    /// The same among all rows of itself repeated for ever.
    fn next_again(
        &self,
        source: u32,
        row: u64,
        from: u64,
        seen: &mut Vec<Seen>,
    ) -> Result<Option<u64>> {
        let (Some(times), true) = (from.checked_div(self.rows), self.rows > 0) else {
            return Ok(None);
        };
        if let Some(place) = self.next_of(source, row, from % self.rows, seen)? {
            return Ok(Some(times * self.rows + place));
        }
        let place = self.next_of(source, row, 0, seen)?;
        Ok(place.map(|place| (times + 1).saturating_mul(self.rows).saturating_add(place)))
    }

    /// What `chosen` makes of the first place, from `from` on, that it makes anything of.
    fn next_that(
        &self,
        source: u32,
        row: u64,
        mut from: u64,
        seen: &mut Vec<Seen>,
        chosen: impl Fn(u64, &mut Vec<Seen>) -> Option<u64>,
    ) -> Result<Option<u64>> {
        for _ in 0..PLACES_MAX {
            let Some(place) = self.next_of(source, row, from, seen)? else {
                return Ok(None);
            };
            if let Some(found) = chosen(place, seen) {
                return Ok(Some(found));
            }
            from = place + 1;
        }
        Err(too_many_places(row))
    }

    /// How many mixes it is made of.
    fn mixes(&self) -> u64 {
        let own = u64::from(matches!(self.kind, Kind::Mix { .. }));
        own + self.parts().iter().map(Self::mixes).sum::<u64>()
    }

    /// Each of its mixes may take this memory for cycles.
    fn keep_cycles(&mut self, bytes: u64) {
        let parts = match &mut self.kind {
            Kind::Base(_) => &mut [],
            Kind::Range { of, .. }
            | Kind::Picks { of, .. }
            | Kind::Set { of, .. }
            | Kind::Split { of, .. }
            | Kind::Repeat { of } => std::slice::from_mut(&mut **of),
            Kind::Concat { parts, .. } => &mut parts[..],
            Kind::Mix { parts, mix } => {
                mix.keep(bytes);
                &mut parts[..]
            }
        };
        for part in parts {
            part.keep_cycles(bytes);
        }
    }

    fn blocks(&self, look: &mut Look<'_>) -> Result<Blocks> {
        let mut out = look.blocks();
        match &self.kind {
            Kind::Base(source) => {
                for (blocks, rows) in look.bases[*source as usize].runs() {
                    out.push(blocks, rows)?;
                }
            }
            Kind::Range { of, start, step: 1 } => {
                let (begin, end) = (*start, start + self.rows);
                let mut at = 0;
                let of = of.blocks(look)?.runs;
                look.at(of.len() as u64)?;
                for (blocks, rows) in of {
                    let stop = at + blocks * rows;
                    let (low, high) = (begin.max(at), end.min(stop));
                    if low < high {
                        // A cut block, whole ones, and another cut block.
                        let whole_from = (low - at).div_ceil(rows);
                        let whole_to = (high - at) / rows;
                        if whole_from > whole_to {
                            out.push(1, high - low)?;
                        } else {
                            out.push(1, at + whole_from * rows - low)?;
                            out.push(whole_to - whole_from, rows)?;
                            out.push(1, high - (at + whole_to * rows))?;
                        }
                    }
                    at = stop;
                }
            }
            Kind::Range { of, start, step } => {
                let of = of.blocks(look)?;
                // How many rows of the range are below a row of what it is taken from.
                let below = |row: u64| {
                    let from = if *step > 0 {
                        *start
                    } else {
                        start - (self.rows.saturating_sub(1)) * step.unsigned_abs()
                    };
                    row.saturating_sub(from)
                        .div_ceil(step.unsigned_abs())
                        .min(self.rows)
                };
                look.at(of.count())?;
                let mut sizes = Vec::new();
                let mut row = 0;
                for rows in of.each() {
                    let here = below(row + rows) - below(row);
                    if here > 0 {
                        sizes.push(here);
                    }
                    row += rows;
                }
                if *step < 0 {
                    sizes.reverse();
                }
                for rows in sizes {
                    out.push(1, rows)?;
                }
            }
            Kind::Set { of, set } => {
                let mut row = 0;
                let mut before = 0;
                let of = of.blocks(look)?;
                look.at(of.count())?;
                for rows in of.each() {
                    row += rows;
                    let rank = set.rank(row);
                    out.push(1, rank - before)?;
                    before = rank;
                }
            }
            Kind::Split {
                of, split, rest, ..
            } => {
                let mut row = 0;
                let mut before = 0;
                let mut seen = None;
                let of = of.blocks(look)?;
                look.at(of.count())?;
                for rows in of.each() {
                    row += rows;
                    let rank = split.rank(row, *rest, &mut seen);
                    out.push(1, rank - before)?;
                    before = rank;
                }
            }
            Kind::Picks { of, picks } => {
                let of_rows = of.rows;
                let of = of.blocks(look)?;
                look.at(self.rows / PICKS_PER_BLOCK)?;
                let count = of.count();
                let shape = Shape::from_runs(of.runs)?;
                let mut run = (u64::MAX, 0u64);
                for &row in picks.rows.iter() {
                    let block = shape.block_of(row);
                    if block != run.0 {
                        out.push(1, run.1)?;
                        run = (block, 0);
                    }
                    run.1 += 1;
                }
                out.push(1, run.1)?;
                let average = (of_rows / count.max(1)).max(1);
                if self.rows / out.count().max(1) < average / ORDERED_PART {
                    return self.even_blocks(average, look);
                }
            }
            Kind::Mix { parts, .. } => {
                let (mut rows, mut blocks) = (0u64, 0u64);
                for part in parts {
                    rows = rows.saturating_add(part.rows);
                    blocks = blocks.saturating_add(part.blocks(look)?.count());
                }
                return self.even_blocks((rows / blocks.max(1)).max(1), look);
            }
            Kind::Concat { parts, .. } => {
                for part in parts {
                    let part = part.blocks(look)?.runs;
                    look.at(part.len() as u64)?;
                    for (blocks, rows) in part {
                        out.push(blocks, rows)?;
                    }
                }
            }
            Kind::Repeat { of } => {
                let once = of.blocks(look)?.runs;
                let times = self.rows.checked_div(of.rows).unwrap_or(0);
                match once[..] {
                    [] => {}
                    // However often.
                    [(blocks, rows)] => out.push(blocks.saturating_mul(times), rows)?,
                    // The last run of a time may go on in the first one of the next.
                    [first, .., last] => {
                        let each = once.len() - usize::from(first.1 == last.1);
                        if (each as u64).saturating_mul(times) > look.most_runs as u64 {
                            return Err(too_many_runs(look.most_runs));
                        }
                        look.at((once.len() as u64).saturating_mul(times))?;
                        for _ in 0..times {
                            for &(blocks, rows) in &once {
                                out.push(blocks, rows)?;
                            }
                        }
                    }
                }
            }
        }
        Ok(out)
    }

    /// Its rows in blocks of one size, which have nothing to do with those of the bases.
    fn even_blocks(&self, rows: u64, look: &mut Look<'_>) -> Result<Blocks> {
        look.is_scattered = true;
        let mut even = look.blocks();
        even.push(self.rows / rows, rows)?;
        even.push(1, self.rows % rows)?;
        Ok(even)
    }

    fn runs_of(&self, source: u32, rows: &Range<u64>, seen: &mut Vec<Seen>, out: &mut Runs) {
        let of = match &self.kind {
            Kind::Base(own) => {
                if *own == source {
                    out.add(rows.start, rows.end.min(self.rows));
                }
                return;
            }
            Kind::Concat { parts, starts } => {
                for (part, &first) in parts.iter().zip(starts) {
                    if out.is_cut {
                        return;
                    }
                    let mut of_part = Runs::new(out.most);
                    part.runs_of(source, rows, seen, &mut of_part);
                    out.is_cut |= of_part.is_cut;
                    for run in of_part.runs {
                        out.add(first + run.start, first + run.end);
                    }
                }
                return;
            }
            Kind::Mix { parts, mix } => {
                // Rows that follow each other in the mix are one run, however many: what is looked
                // at has an end, too.
                let mut left = out.most.saturating_mul(PLACES_PER_RUN);
                for (number, part) in parts.iter().enumerate() {
                    let taken = mix.ordinal_at(self.rows, number);
                    let mut inner = Runs::new(out.most);
                    part.runs_of(source, rows, seen, &mut inner);
                    out.is_cut |= inner.is_cut;
                    // Time after time, so that rows of one cycle are looked for together.
                    let mut before = 0;
                    while before < taken && !inner.runs.is_empty() {
                        for ordinal in inner.runs.iter().cloned().flatten() {
                            let ordinal = before + ordinal;
                            if ordinal >= taken {
                                continue;
                            }
                            left = left.saturating_sub(1);
                            out.is_cut |= left == 0;
                            if out.is_cut {
                                return;
                            }
                            if let Some(at) = mix.position_of(number, ordinal) {
                                out.add(at, at + 1);
                            }
                        }
                        before += part.rows;
                    }
                }
                return;
            }
            Kind::Range { of, .. }
            | Kind::Picks { of, .. }
            | Kind::Set { of, .. }
            | Kind::Split { of, .. }
            | Kind::Repeat { of } => of,
        };
        let mut inner = Runs::new(out.most);
        of.runs_of(source, rows, seen, &mut inner);
        out.is_cut |= inner.is_cut;
        let inner = inner.runs;
        match &self.kind {
            Kind::Base(_) | Kind::Concat { .. } | Kind::Mix { .. } => {}
            Kind::Range { start, step, .. } => {
                let by = step.unsigned_abs();
                // How many rows of the range come before it reaches a row of what it is taken from.
                let before = |row: u64| match *step > 0 {
                    true => row.saturating_sub(*start).div_ceil(by),
                    false if *start < row => 0,
                    false => (start - row) / by + 1,
                };
                for run in inner {
                    let (a, b) = (before(run.start), before(run.end));
                    let (first, end) = (a.min(b), a.max(b));
                    out.add(first.min(self.rows), end.min(self.rows));
                }
            }
            Kind::Picks { picks, .. } => {
                for run in inner {
                    let by_row = picks.by_row();
                    let below =
                        |row: u64| by_row.partition_point(|&at| picks.rows[at as usize] < row);
                    for &at in &by_row[below(run.start)..below(run.end)] {
                        out.add(at, at + 1);
                        if out.is_cut {
                            return;
                        }
                    }
                }
            }
            Kind::Set { set, .. } => {
                for run in inner {
                    out.add(set.rank(run.start), set.rank(run.end));
                }
            }
            Kind::Split {
                split,
                rest,
                number,
                ..
            } => {
                for run in inner {
                    let mut rank = |row| split.rank(row, *rest, &mut seen[*number]);
                    let (start, end) = (rank(run.start), rank(run.end));
                    out.add(start, end);
                }
            }
            Kind::Repeat { of } => {
                let times = match inner.is_empty() {
                    true => 0,
                    false => self.rows.checked_div(of.rows).unwrap_or(0),
                };
                for time in 0..times {
                    for run in &inner {
                        out.add(time * of.rows + run.start, time * of.rows + run.end);
                    }
                    // All rows of what is repeated are one run, however often.
                    if out.is_cut || time as usize > out.most {
                        out.is_cut = true;
                        return;
                    }
                }
            }
        }
    }

    fn memory_bytes(&self) -> u64 {
        let own = match &self.kind {
            // Of a piece that is there several times, each time.
            Kind::Picks { picks, .. } => picks.rows.len() as u64 * 16,
            Kind::Set { set, .. } => set.memory_bytes() as u64,
            Kind::Mix { mix, .. } => mix.memory_bytes(self.rows),
            Kind::Base(_)
            | Kind::Range { .. }
            | Kind::Split { .. }
            | Kind::Repeat { .. }
            | Kind::Concat { .. } => 0,
        };
        let parts: u64 = self.parts().iter().map(Self::memory_bytes).sum();
        size_of::<Self>() as u64 + own + parts
    }
}

/// A random part of the rows, drawn without an array of them.
///
/// Rows are cut into stretches of [`STRETCH`]. Each gives its share, exactly: after any number of
/// stretches as many rows were drawn as their share is, rounded down or up. Within a stretch a
/// keyed permutation says which rows. So a part is spread evenly over the stored order, and its
/// `k`-th row is found by a search in closed form and one look at a stretch.
#[derive(Clone, Copy, Debug)]
struct Split {
    rows: u64,
    chosen: u64,
    seed: u64,
    /// Where the rounding begins: else the first stretches would never be rounded up.
    phase: u64,
}

impl Split {
    fn new(rows: u64, chosen: u64, seed: u64) -> Self {
        let random = derive(seed, Purpose::Split, 1, rows, chosen);
        Self {
            rows,
            chosen,
            seed,
            phase: below(random, rows.max(1)),
        }
    }

    /// How many of the rows before a stretch are in the part, or in the rest.
    fn before(&self, stretch: u64, rest: bool) -> u64 {
        let row = (stretch * STRETCH).min(self.rows);
        if self.rows == 0 {
            return 0;
        }
        let share = u128::from(row) * u128::from(self.chosen) + u128::from(self.phase);
        let chosen = (share / u128::from(self.rows)) as u64;
        if rest { row - chosen } else { chosen }
    }

    /// One bit for each row of a stretch: whether it is in the part.
    fn members(&self, stretch: u64, seen: &mut Seen) -> [u64; WORDS] {
        if let Some((known, words)) = seen
            && *known == stretch
        {
            return *words;
        }
        let rows = (self.rows - stretch * STRETCH).min(STRETCH);
        let chosen = self.before(stretch + 1, false) - self.before(stretch, false);
        let order = Permutation::new(rows, derive(self.seed, Purpose::Split, 0, 0, stretch));
        let mut words = [0; WORDS];
        let mut set = |row: u64| words[row as usize / 64] |= 1 << (row % 64);
        if chosen <= rows / 2 {
            (0..chosen).for_each(|i| set(order.at(i)));
        } else {
            (chosen..rows).for_each(|i| set(order.at(i)));
            for (at, word) in words.iter_mut().enumerate() {
                let here = rows.saturating_sub(at as u64 * 64).min(64);
                *word = !*word
                    & if here == 64 {
                        u64::MAX
                    } else {
                        (1 << here) - 1
                    };
            }
        }
        *seen = Some((stretch, words));
        words
    }

    /// The same for the rest.
    fn bits(&self, stretch: u64, rest: bool, seen: &mut Seen) -> [u64; WORDS] {
        let words = self.members(stretch, seen);
        if rest { words.map(|w| !w) } else { words }
    }

    /// The `k`-th row of the part, or of the rest; it exists.
    fn select(&self, k: u64, rest: bool, seen: &mut Seen) -> u64 {
        // The last stretch before which there are at most `k`.
        let (mut low, mut high) = (0, self.rows.div_ceil(STRETCH));
        while high - low > 1 {
            let middle = (low + high) / 2;
            if self.before(middle, rest) <= k {
                low = middle;
            } else {
                high = middle;
            }
        }
        let mut left = (k - self.before(low, rest)) as u32;
        for (at, word) in self.bits(low, rest, seen).into_iter().enumerate() {
            let here = word.count_ones();
            if left < here {
                return low * STRETCH + at as u64 * 64 + u64::from(select_in_word(word, left));
            }
            left -= here;
        }
        unreachable!("a stretch has fewer rows than its share")
    }

    /// How many rows of the part, or of the rest, are below a row.
    fn rank(&self, row: u64, rest: bool, seen: &mut Seen) -> u64 {
        let stretch = row / STRETCH;
        let within = row % STRETCH;
        let before = self.before(stretch, rest);
        if row >= self.rows {
            return if rest {
                self.rows - self.chosen
            } else {
                self.chosen
            };
        }
        if within == 0 {
            return before;
        }
        let words = self.bits(stretch, rest, seen);
        let (at, bit) = (within as usize / 64, within % 64);
        let whole: u32 = words[..at].iter().map(|w| w.count_ones()).sum();
        before + u64::from(whole + (words[at] & ((1u64 << bit) - 1)).count_ones())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::mix;

    fn boxed(of: RowsOf) -> Box<RowsOf> {
        Box::new(of)
    }

    /// Every row of a composition, one by one, and its blocks as the rows of each.
    fn all(document: &RowsOf, bases: &[Arc<Shape>], pieces: &[Chosen]) -> (Vec<(u32, u64)>, Shape) {
        let made = Composition::new(document, bases.to_vec(), pieces).unwrap();
        let rows: Vec<u64> = (0..made.rows()).collect();
        let mut out = Vec::new();
        made.fill(&rows, &mut out).unwrap();
        for i in (0..rows.len()).step_by(rows.len() / 50 + 1) {
            assert_eq!(made.row_at(i as u64), out[i], "one row is as in many");
        }
        (
            out.iter().map(|r| (r.source, r.row)).collect(),
            made.shape().unwrap(),
        )
    }

    /// Each block of a composition is within one block of a base.
    fn check_blocks(rows: &[(u32, u64)], shape: &Shape, bases: &[Arc<Shape>]) {
        assert_eq!(shape.rows(), rows.len() as u64);
        for block in 0..shape.blocks() {
            let range = shape.block_range(block);
            let of: Vec<_> = rows[range.start as usize..range.end as usize]
                .iter()
                .map(|&(source, row)| (source, bases[source as usize].block_of(row)))
                .collect();
            assert!(
                of.windows(2).all(|w| w[0] == w[1]),
                "block {block} is within a block"
            );
        }
    }

    fn bases() -> Vec<Arc<Shape>> {
        vec![
            Arc::new(Shape::uniform(1000, 64).unwrap()),
            Arc::new(Shape::from_blocks([3, 0, 500, 7, 7, 7, 90]).unwrap()),
        ]
    }

    fn next(seed: &mut u64, bound: u64) -> u64 {
        *seed = mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
        *seed % bound
    }

    /// A random document, and the rows that it should have.
    fn random(seed: &mut u64, depth: u32, pieces: &mut Vec<Chosen>) -> (RowsOf, Vec<(u32, u64)>) {
        let kind = if depth == 0 { 0 } else { 1 + next(seed, 7) };
        if kind == 0 {
            let base = next(seed, 2) as u32;
            let rows = bases()[base as usize].rows();
            return (
                RowsOf::Base(base),
                (0..rows).map(|row| (base, row)).collect(),
            );
        }
        if kind == 5 {
            let mut parts = Vec::new();
            let mut rows = Vec::new();
            for _ in 0..1 + next(seed, 3) {
                let (part, of) = random(seed, depth - 1, pieces);
                parts.push(part);
                rows.extend(of);
            }
            return (RowsOf::Concat(parts), rows);
        }
        if kind == 7 {
            return mixed(seed, depth, pieces);
        }
        let numbers: Vec<u64> = (0..8).map(|_| next(seed, 1 << 40)).collect();
        let (of, rows) = random(seed, depth - 1, pieces);
        let (n, of) = (rows.len() as u64, boxed(of));
        match kind {
            1 => {
                let step: i64 = [1, 1, 2, 7, -1, -3][numbers[0] as usize % 6];
                let start = if n == 0 { 0 } else { numbers[1] % n };
                let most = if n == 0 {
                    0
                } else if step > 0 {
                    (n - start).div_ceil(step as u64)
                } else {
                    start / step.unsigned_abs() + 1
                };
                let count = numbers[2] % (most + 1);
                let picked = (0..count).map(|i| rows[(start as i64 + i as i64 * step) as usize]);
                let picked = picked.collect();
                (
                    RowsOf::Range {
                        of,
                        start,
                        step,
                        count,
                    },
                    picked,
                )
            }
            2 => {
                let chosen: Vec<u64> = (0..n)
                    .filter(|&r| mix(r ^ numbers[0]) % 10 < numbers[1] % 11)
                    .collect();
                pieces.push(Chosen::Set(Arc::new(
                    RowSet::of(n, chosen.iter().copied()).unwrap(),
                )));
                let picked = chosen.iter().map(|&r| rows[r as usize]).collect();
                (
                    RowsOf::Set {
                        of,
                        piece: pieces.len() - 1,
                    },
                    picked,
                )
            }
            3 => {
                let chosen = numbers[0] % (n + 1);
                let rest = numbers[1].is_multiple_of(2);
                let split = Split::new(n, chosen, numbers[2]);
                let mut seen = None;
                let picked = (0..n).filter(|&r| {
                    let bits = split.bits(r / STRETCH, rest, &mut seen);
                    bits[(r % STRETCH) as usize / 64] >> (r % 64) & 1 == 1
                });
                let picked = picked.map(|r| rows[r as usize]).collect();
                (
                    RowsOf::Split {
                        of,
                        chosen,
                        seed: numbers[2],
                        rest,
                    },
                    picked,
                )
            }
            4 => {
                let times = numbers[0] % 4;
                (
                    RowsOf::Repeat { of, times },
                    (0..times).flat_map(|_| rows.clone()).collect(),
                )
            }
            _ => {
                let count = if n == 0 { 0 } else { numbers[0] % 300 };
                let mut picks: Vec<u64> = (0..count).map(|i| mix(i ^ numbers[1]) % n).collect();
                // In order, so that each block is within a block.
                picks.sort_unstable();
                let picked = picks.iter().map(|&r| rows[r as usize]).collect();
                pieces.push(Chosen::picks(picks));
                (
                    RowsOf::Picks {
                        of,
                        piece: pieces.len() - 1,
                    },
                    picked,
                )
            }
        }
    }

    /// A random mix, and its rows as a plan without a shuffle gives them.
    fn mixed(seed: &mut u64, depth: u32, pieces: &mut Vec<Chosen>) -> (RowsOf, Vec<(u32, u64)>) {
        let (mut parts, mut of, mut sources) = (Vec::new(), Vec::new(), Vec::new());
        while parts.len() < 2 {
            let (part, rows) = random(seed, depth - 1, pieces);
            if rows.is_empty() {
                continue;
            }
            sources.push(crate::Source {
                dataset: format!("{}", parts.len()),
                shape: Arc::new(Shape::uniform(rows.len() as u64, 64).unwrap()),
                weight: 1.0,
            });
            parts.push(part);
            of.push(rows);
        }
        let mut weights = || vec![1.0 + next(seed, 9) as f64, 1.0 + next(seed, 3) as f64];
        let mut stages = vec![Stage {
            from: 0,
            weights: weights(),
        }];
        let later = weights();
        if next(seed, 2) == 0 {
            stages.push(Stage {
                from: 1 + next(seed, 300),
                weights: later,
            });
        }
        let rows = 1 + next(seed, 2000);
        let plan = crate::Plan::new(crate::PlanSpec {
            sources,
            seed: 0,
            shuffle: crate::Shuffle::None,
            epoch_rows: Some(rows),
            schedule: stages.clone(),
        })
        .unwrap();
        let mut order = Vec::new();
        plan.fill(0, 0..rows, &mut order);
        let rows_of = order.iter().map(|r| of[r.source as usize][r.row as usize]);
        let expected = rows_of.collect();
        let document = RowsOf::Mix {
            parts,
            stages,
            rows,
        };
        (document, expected)
    }

    #[test]
    fn what_is_walked_to_find_blocks_is_bounded() {
        // Each part is a short range of very many runs, which is found by walking them.
        let bases = vec![Arc::new(Shape::from_runs([(1, 3), (1, 5)]).unwrap())];
        let repeat = || RowsOf::Repeat {
            of: boxed(RowsOf::Base(0)),
            times: 500_000,
        };
        let part = || RowsOf::Range {
            of: boxed(repeat()),
            start: 0,
            count: 1,
            step: 1,
        };
        let parts = |count| RowsOf::Concat((0..count).map(|_| part()).collect());
        let made = |document| Composition::new(&document, bases.clone(), &[]).unwrap();
        assert!(made(parts(1)).blocks(1 << 20).is_ok());
        let refused = made(parts(3000)).blocks(1 << 20).unwrap_err();
        assert!(refused.to_string().contains("runs of blocks"), "{refused}");
    }

    #[test]
    fn compositions_are_what_arrays_say() {
        for case in 0..400u64 {
            let (mut seed, mut pieces) = (mix(case), Vec::new());
            let depth = 1 + (case % 5) as u32;
            let (document, expected) = random(&mut seed, depth, &mut pieces);
            if expected.len() > 200_000 {
                continue;
            }
            let bases = bases();
            let (rows, shape) = all(&document, &bases, &pieces);
            assert_eq!(rows, expected, "case {case}: {document:?}");
            let made = Composition::new(&document, bases.clone(), &pieces).unwrap();
            let (_, in_blocks) = made.blocks(RUNS_MAX).unwrap();
            if in_blocks {
                check_blocks(&rows, &shape, &bases);
            } else {
                let text = format!("{document:?}");
                assert!(text.contains("Picks") || text.contains("Mix"));
                assert_eq!(shape.rows(), rows.len() as u64);
            }
            for _ in 0..20 {
                let source = next(&mut seed, 2) as u32;
                let all = bases[source as usize].rows();
                let start = next(&mut seed, all);
                let of = start..(start + 1 + next(&mut seed, 90)).min(all);
                let runs = made.runs_of(source, of.clone(), usize::MAX);
                assert!(!runs.is_cut);
                let mut found: Vec<u64> = runs.runs.into_iter().flatten().collect();
                found.sort_unstable();
                let few = made.runs_of(source, of.clone(), 3);
                assert!(few.runs.len() <= 3);
                let some: Vec<u64> = few.runs.into_iter().flatten().collect();
                assert!(some.iter().all(|row| found.binary_search(row).is_ok()));
                assert!(few.is_cut || some.len() == found.len());
                let is_of = |&at: &u64| {
                    let (its, row) = rows[at as usize];
                    its == source && of.contains(&row)
                };
                let there: Vec<u64> = (0..rows.len() as u64).filter(is_of).collect();
                assert_eq!(found, there, "case {case}: {source} {of:?} of {document:?}");
            }
            for source in 0..2u32 {
                let of: Vec<u64> = (0..bases[source as usize].rows()).step_by(7).collect();
                let mut first = vec![None; of.len()];
                for (at, &(its, row)) in (0u64..).zip(&rows) {
                    if its == source && row % 7 == 0 {
                        first[row as usize / 7].get_or_insert(at);
                    }
                }
                let found = made.first_of(source, &of).unwrap();
                assert_eq!(found, first, "case {case}: {source} of {document:?}");
            }
            assert_eq!(made.first_of(2, &[0]).unwrap(), [None]);
            let json = serde_json::to_string(&document).unwrap();
            assert_eq!(serde_json::from_str::<RowsOf>(&json).unwrap(), document);
        }
    }

    #[test]
    fn rows_of_a_large_mix_in_any_order_are_those_in_order() {
        // Cycles of 4096, more of them than are kept, in parts that are repeated and turned round.
        let base = vec![Arc::new(Shape::uniform(1000, 10).unwrap())];
        let part = |start, step: i64| RowsOf::Range {
            of: boxed(RowsOf::Base(0)),
            start,
            step,
            count: 500,
        };
        let weights = vec![0.123_456, 0.654_321, 0.222_223];
        let document = RowsOf::Mix {
            parts: vec![part(0, 1), part(999, -1), part(1, 2)],
            stages: vec![Stage { from: 0, weights }],
            rows: 3_000_000,
        };
        let made = Composition::new(&document, base.clone(), &[]).unwrap();
        assert!(
            made.memory_bytes() < 2 * CYCLES_MAX_BYTES,
            "{}",
            made.memory_bytes()
        );
        let mut seed = 5;
        let mut wanted: Vec<u64> = (0..3000).map(|_| next(&mut seed, 3_000_000)).collect();
        wanted.extend([2_999_999, 0, 7, 7, 0]);
        let mut found = vec![RowRef { source: 9, row: 9 }];
        made.fill(&wanted, &mut found).unwrap();
        let one: Vec<RowRef> = wanted.iter().map(|&row| made.row_at(row)).collect();
        assert_eq!(found[1..], one, "behind what was there");
        for (&row, place) in wanted.iter().zip(&one).take(20) {
            let first = made.first_of(0, &[place.row]).unwrap()[0].unwrap();
            assert!(first <= row && made.row_at(first) == *place);
        }
    }

    #[test]
    fn a_row_that_is_there_very_often_has_a_first_place_or_is_told() {
        let base = vec![Arc::new(Shape::uniform(10, 5).unwrap())];
        let often = || RowsOf::Repeat {
            of: boxed(RowsOf::Base(0)),
            times: 5000,
        };
        let range = |start, step| RowsOf::Range {
            of: boxed(often()),
            start,
            step,
            count: 10,
        };
        let first = |document: &RowsOf| {
            let made = Composition::new(document, base.clone(), &[]).unwrap();
            made.first_of(0, &[0, 3, 9])
        };
        let all = [Some(0), Some(3), Some(9)];
        assert_eq!(first(&often()).unwrap(), all);
        let twice = RowsOf::Repeat {
            of: boxed(often()),
            times: 2,
        };
        let some = RowsOf::Range {
            of: boxed(RowsOf::Base(0)),
            start: 3,
            step: 1,
            count: 2,
        };
        let parts = RowsOf::Concat(vec![some, often(), RowsOf::Base(0)]);
        for document in [twice, range(45_000, 1)] {
            assert_eq!(first(&document).unwrap(), all, "{document:?}");
        }
        assert_eq!(
            first(&range(44_999, 1)).unwrap(),
            [Some(1), Some(4), Some(0)]
        );
        assert_eq!(first(&parts).unwrap(), [Some(2), Some(0), Some(11)]);
        assert_eq!(first(&range(3, 7)).unwrap(), [Some(1), Some(0), Some(8)]);
        // It is not found out that no row of the range is one, nor where a range backwards begins.
        for document in [range(0, 20), range(49_999, -1)] {
            let e = first(&document).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::TooLarge, "{document:?}");
        }
    }

    #[test]
    fn a_split_has_exactly_its_rows_and_the_rest_has_the_others() {
        let base = [Arc::new(Shape::uniform(10_000, 100).unwrap())];
        for (chosen, seed) in [(0, 1), (1, 2), (77, 3), (5000, 4), (9_999, 5), (10_000, 6)] {
            let part = |rest| {
                let of = boxed(RowsOf::Base(0));
                all(
                    &RowsOf::Split {
                        of,
                        chosen,
                        seed,
                        rest,
                    },
                    &base,
                    &[],
                )
            };
            let (one, shape) = part(false);
            let (other, _) = part(true);
            assert_eq!(one.len() as u64, chosen);
            assert!(one.is_sorted() && other.is_sorted(), "in stored order");
            let mut both = [one.clone(), other].concat();
            both.sort_unstable();
            assert_eq!(both, (0..10_000).map(|r| (0, r)).collect::<Vec<_>>());
            check_blocks(&one, &shape, &base);
        }
    }

    #[test]
    fn every_row_is_as_often_in_a_split_as_any_other() {
        // 2,000 seeds of a tenth of 1,000 rows: each row 200 times, give or take 13.4.
        let mut counts = [0f64; 1000];
        for seed in 0..2000 {
            let split = Split::new(1000, 100, seed);
            let mut seen = None;
            for k in 0..100 {
                counts[split.select(k, false, &mut seen) as usize] += 1.0;
            }
        }
        let chi: f64 = counts.iter().map(|c| (c - 200.0).powi(2) / 180.0).sum();
        // About 999 with a deviation of 45.
        assert!((800.0..1200.0).contains(&chi), "{chi}");
    }

    #[test]
    fn rows_in_a_random_order_are_in_blocks_of_the_usual_size() {
        let base = [Arc::new(Shape::uniform(10_000, 100).unwrap())];
        let picks: Vec<u64> = (0..1234).map(|i| mix(i) % 10_000).collect();
        let of = boxed(RowsOf::Base(0));
        let document = RowsOf::Picks { of, piece: 0 };
        let (rows, shape) = all(&document, &base, &[Chosen::picks(picks.clone())]);
        assert!(rows.iter().map(|r| r.1).eq(picks));
        assert_eq!(shape, Shape::uniform(1234, 100).unwrap());
    }

    #[test]
    fn rows_are_repeated_at_once_however_often() {
        let shape = |rows: u64, times: u64| {
            let bases = vec![Arc::new(Shape::uniform(rows, 64).unwrap())];
            let document = RowsOf::Repeat {
                of: boxed(RowsOf::Base(0)),
                times,
            };
            Composition::new(&document, bases, &[]).unwrap().shape()
        };
        // One time after the other, this would take minutes.
        let even = shape(64, 10_000_000_000).unwrap();
        assert_eq!(
            (even.blocks(), even.rows()),
            (10_000_000_000, 640_000_000_000)
        );
        // Blocks of 64 and then one of 8, and so on.
        assert_eq!(shape(136, 1000).unwrap().blocks(), 3000);
        let refused = shape(136, 10_000_000_000).unwrap_err();
        assert!(refused.to_string().contains("runs of blocks"), "{refused}");
    }

    #[test]
    fn what_is_looked_up_of_many_repetitions_has_an_end() {
        let bases = bases();
        let document = RowsOf::Repeat {
            of: boxed(RowsOf::Base(0)),
            times: 1_000_000_000,
        };
        let made = Composition::new(&document, bases, &[]).unwrap();
        let found = made.runs_of(0, 5..7, 3);
        assert_eq!(found.runs, [5..7, 1005..1007, 2005..2007]);
        assert!(found.is_cut, "there are more");
        let all = made.runs_of(0, 0..1000, 3);
        assert!(all.runs.len() == 1 && all.is_cut, "they are one run");
        let none = made.runs_of(1, 5..7, 3);
        assert!(none.runs.is_empty() && !none.is_cut);
        // A shape that looks at every block of them is refused, and not begun.
        let every_second = RowsOf::Range {
            of: boxed(document),
            start: 0,
            step: 2,
            count: 500_000_000_000,
        };
        let even = vec![Arc::new(Shape::uniform(1000, 100).unwrap())];
        let made = Composition::new(&every_second, even, &[]).unwrap();
        let refused = made.shape().unwrap_err();
        assert!(refused.to_string().contains("runs of blocks"), "{refused}");
    }

    #[test]
    fn looking_at_the_blocks_of_many_parts_has_an_end() {
        // Each part has one row, and a million blocks to be looked at for it.
        let part = || RowsOf::Range {
            of: boxed(RowsOf::Split {
                of: boxed(RowsOf::Repeat {
                    of: boxed(RowsOf::Base(0)),
                    times: 1 << 20,
                }),
                chosen: 1 << 20,
                seed: 1,
                rest: false,
            }),
            start: 0,
            step: 1,
            count: 1,
        };
        let even = vec![Arc::new(Shape::uniform(300, 300).unwrap())];
        let many = RowsOf::Concat((0..2000).map(|_| part()).collect());
        let made = Composition::new(&many, even.clone(), &[]).unwrap();
        let refused = made.blocks(1 << 20).unwrap_err();
        assert!(refused.to_string().contains("runs of blocks"), "{refused}");
        // And each reference to the same million rows.
        let pick = || RowsOf::Picks {
            of: boxed(RowsOf::Base(0)),
            piece: 0,
        };
        let many = RowsOf::Concat((0..2000).map(|_| pick()).collect());
        let pieces = [Chosen::picks(vec![0; 1 << 20])];
        let made = Composition::new(&many, even, &pieces).unwrap();
        assert!(made.blocks(1 << 20).is_err());
    }

    #[test]
    fn a_filter_of_a_composition_keeps_what_its_bases_keep() {
        let bases = bases();
        let sets: Vec<Arc<RowSet>> = bases
            .iter()
            .map(|b| {
                Arc::new(
                    RowSet::of(b.rows(), (0..b.rows()).filter(|r| r.is_multiple_of(3))).unwrap(),
                )
            })
            .collect();
        let document = RowsOf::Concat(vec![
            RowsOf::Range {
                of: boxed(RowsOf::Base(1)),
                start: 600,
                step: -2,
                count: 200,
            },
            RowsOf::Base(0),
        ]);
        let made = Composition::new(&document, bases.clone(), &[]).unwrap();
        let kept = made.filtered(&sets).unwrap();
        let expected = (0..made.rows()).filter(|&r| made.row_at(r).row.is_multiple_of(3));
        assert!(kept.iter().eq(expected));
        assert!(made.filtered(&sets[..1]).is_err(), "one set for each base");
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        let bases = bases();
        let of = || boxed(RowsOf::Base(0));
        let mix = |parts, weights| RowsOf::Mix {
            parts,
            stages: vec![Stage { from: 0, weights }],
            rows: 10,
        };
        let wrong = [
            RowsOf::Base(2),
            RowsOf::Range {
                of: of(),
                start: 990,
                step: 1,
                count: 11,
            },
            RowsOf::Range {
                of: of(),
                start: 5,
                step: -1,
                count: 7,
            },
            RowsOf::Range {
                of: of(),
                start: 5,
                step: 0,
                count: 1,
            },
            RowsOf::Picks { of: of(), piece: 0 },
            RowsOf::Picks { of: of(), piece: 1 },
            RowsOf::Set { of: of(), piece: 1 },
            RowsOf::Set { of: of(), piece: 0 },
            RowsOf::Split {
                of: of(),
                chosen: 1001,
                seed: 0,
                rest: false,
            },
            RowsOf::Repeat {
                of: of(),
                times: u64::MAX,
            },
            mix(vec![], vec![0.5]),
            mix(vec![RowsOf::Base(0)], vec![]),
            mix(vec![RowsOf::Base(0), RowsOf::Base(1)], vec![1.0, f64::NAN]),
            mix(
                vec![RowsOf::Base(0), RowsOf::Concat(vec![])],
                vec![1.0, 1.0],
            ),
            mix(vec![RowsOf::Base(0); 257], vec![1.0; 257]),
        ];
        let pieces = [
            Chosen::Set(Arc::new(RowSet::of(999, [3]).unwrap())),
            Chosen::picks(vec![1000]),
        ];
        for document in wrong {
            let made = Composition::new(&document, bases.clone(), &pieces);
            assert!(made.is_err(), "{document:?}");
        }
        let of = RowsOf::Range {
            of: of(),
            start: 10,
            step: 1,
            count: 10,
        };
        let made = Composition::new(&of, bases, &pieces).unwrap();
        assert!(made.fill(&[9, 10], &mut Vec::new()).is_err());
    }
}
