//! What a plan is made from, and the identity that follows from it.

use crate::{ALGORITHM, Shape};
use forebay_core::{Error, Result, limits};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// How the rows of a source are ordered within an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Shuffle {
    /// As they are stored.
    #[default]
    None,
    /// No row is `rows` or more positions away from its place.
    Window {
        /// At least 1.
        rows: u64,
    },
    /// Blocks in a random order; rows shuffled within each group of `blocks` blocks that follow
    /// each other in it.
    Block {
        /// At least 1.
        blocks: u64,
    },
    /// All rows.
    Full,
}

impl Shuffle {
    fn checked(self) -> Result<Self> {
        match self {
            Shuffle::Window { rows: 0 } => {
                Err(Error::invalid("the shuffle has a window of 0 rows")
                    .hint("the shuffle \"none\" leaves rows as they are"))
            }
            Shuffle::Block { blocks: 0 } => {
                Err(Error::invalid("the shuffle mixes 0 blocks at a time")
                    .hint("mix at least 1 block at a time"))
            }
            shuffle => Ok(shuffle),
        }
    }
}

impl std::fmt::Display for Shuffle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shuffle::None => f.write_str("none"),
            Shuffle::Window { rows } => write!(f, "window:{rows}"),
            Shuffle::Block { blocks } => write!(f, "block:{blocks}"),
            Shuffle::Full => f.write_str("full"),
        }
    }
}

impl std::str::FromStr for Shuffle {
    type Err = Error;

    /// `none`, `window:10000`, `block:16`, `full`.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::invalid(format!("the shuffle {text:?} is not known"))
                .hint("give none, window:ROWS, block:BLOCKS or full")
        };
        let number = |n: &str| n.replace('_', "").parse::<u64>().map_err(|_| wrong());
        match text.split_once(':') {
            None if text == "none" => Ok(Shuffle::None),
            None if text == "full" => Ok(Shuffle::Full),
            Some(("window", n)) => Shuffle::Window { rows: number(n)? }.checked(),
            Some(("block", n)) => Shuffle::Block { blocks: number(n)? }.checked(),
            _ => Err(wrong()),
        }
    }
}

/// A dataset that a plan takes rows from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The identity of a version of the dataset.
    pub dataset: String,
    /// The rows of its blocks.
    pub shape: Arc<Shape>,
    /// Its part of a mix, relative to the weights of the others.
    pub weight: f64,
}

/// Weights of a mix from a position on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// The first row that they apply to, counted over all epochs and ranks from 0.
    pub from: u64,
    /// One for each source: numbers of at least 0, not all of them 0.
    pub weights: Vec<f64>,
}

/// What a plan is made from. Anything else (ranks, workers, batches) does not change the order of
/// the rows.
#[derive(Clone, Debug)]
pub struct PlanSpec {
    /// The datasets; more than one makes a mix.
    pub sources: Vec<Source>,
    /// Selects one of many orders: the same seed gives the same order.
    pub seed: u64,
    /// How rows are ordered within each source.
    pub shuffle: Shuffle,
    /// Rows of an epoch of a mix. If absent, the rows of all sources together. A single source
    /// needs no value: its epoch is each row once.
    pub epoch_rows: Option<u64>,
    /// Weights that change along the order, in ascending order from row 0 on; they take the place
    /// of the sources' weights. Empty: those weights, from beginning to end.
    pub schedule: Vec<Stage>,
}

/// A plan as written in a request: datasets by their identities, to be looked up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanDocument {
    /// The datasets; more than one makes a mix.
    pub sources: Vec<SourceDocument>,
    /// [`PlanSpec::seed`]; 0 if omitted.
    #[serde(default)]
    pub seed: u64,
    /// [`PlanSpec::shuffle`]; [`Shuffle::None`] if omitted.
    #[serde(default)]
    pub shuffle: Shuffle,
    /// [`PlanSpec::epoch_rows`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch_rows: Option<u64>,
    /// [`PlanSpec::schedule`]; none if omitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedule: Vec<Stage>,
}

/// A source of a [`PlanDocument`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceDocument {
    /// [`Source::dataset`], by which the shape is looked up.
    pub dataset: String,
    /// [`Source::weight`]; 1 if omitted.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

impl PlanDocument {
    /// The plan's specification, with the shapes that `shape_of` finds for the datasets.
    pub fn resolve(
        &self,
        mut shape_of: impl FnMut(&str) -> Result<Arc<Shape>>,
    ) -> Result<PlanSpec> {
        if self.sources.len() > limits::PLAN_SOURCES_MAX {
            return Err(too_many_sources(self.sources.len()));
        }
        let sources = self.sources.iter().map(|s| {
            Ok(Source {
                dataset: s.dataset.clone(),
                shape: shape_of(&s.dataset)?,
                weight: s.weight,
            })
        });
        Ok(PlanSpec {
            sources: sources.collect::<Result<_>>()?,
            seed: self.seed,
            shuffle: self.shuffle,
            epoch_rows: self.epoch_rows,
            schedule: self.schedule.clone(),
        })
    }
}

pub(crate) fn too_many_sources(n: usize) -> Error {
    Error::invalid(format!(
        "the plan has {n} sources; the limit is {}",
        limits::PLAN_SOURCES_MAX
    ))
    .hint("open many files as one dataset")
}

/// The stages of a schedule of weights begin at row 0 and ascend, each with a weight for each source.
pub(crate) fn check_stages(stages: &[Stage], sources: usize) -> Result<()> {
    if stages.len() > limits::PLAN_SCHEDULE_STAGES_MAX {
        return Err(Error::invalid(format!(
            "the schedule of weights has {} stages; the limit is {}",
            stages.len(),
            limits::PLAN_SCHEDULE_STAGES_MAX
        )));
    }
    let ascends = stages.windows(2).all(|two| two[0].from < two[1].from);
    let begins = stages.first().is_some_and(|first| first.from == 0);
    let last = stages.last().map_or(0, |last| last.from);
    if !ascends || !begins || last >= limits::PLAN_ROWS_MAX * limits::PLAN_EPOCHS_MAX {
        return Err(
            Error::invalid("the rows of the schedule of weights do not ascend from 0")
                .hint("each stage begins at a row, in ascending order, the first at row 0"),
        );
    }
    match stages.iter().find(|stage| stage.weights.len() != sources) {
        None => Ok(()),
        Some(stage) => Err(Error::invalid(format!(
            "the schedule has {} weights from row {} on, and there are {sources} sources",
            stage.weights.len(),
            stage.from
        ))
        .hint("give one weight for each source")),
    }
}

impl PlanSpec {
    /// A plan over one dataset.
    pub fn single(
        dataset: impl Into<String>,
        shape: Arc<Shape>,
        seed: u64,
        shuffle: Shuffle,
    ) -> Self {
        PlanSpec {
            sources: vec![Source {
                dataset: dataset.into(),
                shape,
                weight: 1.0,
            }],
            seed,
            shuffle,
            epoch_rows: None,
            schedule: Vec::new(),
        }
    }

    /// The equivalent document, without shapes.
    pub fn document(&self) -> PlanDocument {
        let sources = self
            .sources
            .iter()
            .map(|s| SourceDocument {
                dataset: s.dataset.clone(),
                weight: s.weight,
            })
            .collect();
        PlanDocument {
            sources,
            seed: self.seed,
            shuffle: self.shuffle,
            epoch_rows: self.epoch_rows,
            schedule: self.schedule.clone(),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.sources.is_empty() {
            return Err(Error::invalid("the plan has no source").hint("name at least one dataset"));
        }
        if self.sources.len() > limits::PLAN_SOURCES_MAX {
            return Err(too_many_sources(self.sources.len()));
        }
        if let Some(empty) = self.sources.iter().find(|s| s.shape.rows() == 0) {
            return Err(
                Error::invalid(format!("dataset {:?} has no rows", empty.dataset))
                    .hint("check the names that it was opened from, and what is selected of it"),
            );
        }
        if let Some(rows) = self
            .epoch_rows
            .filter(|rows| !(1..=limits::PLAN_ROWS_MAX).contains(rows))
        {
            return Err(Error::invalid(format!("epoch_rows is {rows}"))
                .hint(format!("give 1 to {}", limits::PLAN_ROWS_MAX)));
        }
        if !self.schedule.is_empty() {
            check_stages(&self.schedule, self.sources.len())?;
        }
        self.shuffle.checked().map(|_| ())
    }

    /// A number that differs if datasets differ: their identities and shapes, in their order.
    pub(crate) fn data_digest(&self) -> u64 {
        let mut text = Vec::new();
        for source in &self.sources {
            text.extend_from_slice(&(source.dataset.len() as u64).to_le_bytes());
            text.extend_from_slice(source.dataset.as_bytes());
            text.extend_from_slice(&source.shape.digest().to_le_bytes());
        }
        xxh3_64(&text)
    }

    /// The identity of the resulting orders: equal if all of them are equal. It covers the
    /// algorithm's version, the data, the seed, the shuffle and what a mix takes from each source
    /// (`quotas`, derived from the weights and their schedule).
    pub(crate) fn identity(&self, data: u64, quotas: &[u64], epoch_rows: Option<u64>) -> String {
        let (kind, size) = match self.shuffle {
            Shuffle::None => (0, 0),
            Shuffle::Window { rows } => (1, rows),
            Shuffle::Block { blocks } => (2, blocks),
            Shuffle::Full => (3, 0),
        };
        let parts = [
            u64::from(ALGORITHM),
            data,
            self.seed,
            kind,
            size,
            u64::from(epoch_rows.is_some()),
            epoch_rows.unwrap_or(0),
        ];
        let text: Vec<u8> = parts
            .iter()
            .chain(quotas)
            .flat_map(|n| n.to_le_bytes())
            .collect();
        format!("{:016x}", (xxh3_128(&text) >> 64) as u64)
    }
}
