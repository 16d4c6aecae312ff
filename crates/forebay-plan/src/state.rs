//! Where a job is in its plan: a few numbers that say what was *yielded*, not what was read ahead.
//!
//! A state belongs to the order of rows, not to its readers: it can be loaded into any number of
//! ranks and workers and any batch size. It carries the plan's identity in parts, so that a state
//! of another dataset, seed or release is refused with the reason.

use crate::{ALGORITHM, Batching, Plan};
use forebay_core::{Error, Result, limits};
use serde::{Deserialize, Serialize};

/// The version of a state's format.
const VERSION: u32 = 1;

/// A place between two steps of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The version of this format; a release reads only its own.
    pub version: u32,
    /// [`ALGORITHM`] of the release that made it.
    pub algorithm: u32,
    /// [`Plan::identity`].
    pub plan: String,
    /// A digest of the datasets.
    pub data: String,
    /// [`PlanSpec::seed`](crate::PlanSpec::seed), for the message if a state is refused.
    pub seed: u64,
    /// The epoch that the next row belongs to, from 0.
    pub epoch: u64,
    /// Rows of this epoch that all ranks together have yielded: the next is at this position. With
    /// bounded batches, where the current look-ahead window begins.
    pub position: u64,
    /// With bounded batches, in the middle of a window: which of its batches were yielded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Within>,
}

/// A place between two batches of one look-ahead window. It is meaningful only for the same bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Within {
    /// How many batches of the window all ranks together have yielded; more than 0.
    pub batches: u64,
    /// The bounds that made the window's batches.
    pub batching: Batching,
}

impl State {
    /// The beginning of a plan.
    pub fn start(plan: &Plan) -> Self {
        State::at(plan, 0, 0)
    }

    /// The place before a position of an epoch.
    pub fn at(plan: &Plan, epoch: u64, position: u64) -> Self {
        State {
            version: VERSION,
            algorithm: ALGORITHM,
            plan: plan.identity().into(),
            data: format!("{:016x}", plan.data_digest()),
            seed: plan.spec().seed,
            epoch,
            position,
            within: None,
        }
    }

    /// Whether this is a place in this plan; if not, why.
    pub fn check(&self, plan: &Plan) -> Result<()> {
        let own = State::start(plan);
        let wrong = |what: String, hint: &str| {
            Err(Error::invalid(format!("the state cannot be resumed: {what}")).hint(hint))
        };
        if self.version != own.version {
            return wrong(
                format!(
                    "it has format version {}, and this release reads version {VERSION}",
                    self.version
                ),
                "resume with the release that saved it",
            );
        }
        if self.algorithm != own.algorithm {
            return wrong(
                format!(
                    "it is a place in an order of version {}, and this release makes version \
                     {ALGORITHM}",
                    self.algorithm
                ),
                "resume with the release that saved it, or begin an epoch anew",
            );
        }
        if self.data != own.data {
            return wrong(
                "it is of another dataset, or of another version of this one".into(),
                "open the dataset that it was saved with; if files changed, the dataset has \
                 another version",
            );
        }
        if self.seed != own.seed {
            return wrong(
                format!(
                    "it was saved with seed {}, and this plan has seed {}",
                    self.seed, own.seed
                ),
                "give the plan the same seed",
            );
        }
        if self.plan != own.plan {
            return wrong(
                format!("it is of plan {}, and this is plan {}", self.plan, own.plan),
                "give the same shuffle, weights and epoch_rows as before",
            );
        }
        if self.epoch >= limits::PLAN_EPOCHS_MAX || self.position > plan.rows_per_epoch() {
            return wrong(
                format!(
                    "it is at row {} of epoch {}, and an epoch has {} rows",
                    self.position,
                    self.epoch,
                    plan.rows_per_epoch()
                ),
                "it was changed after it was saved: load the state as it was saved",
            );
        }
        Ok(())
    }
}
