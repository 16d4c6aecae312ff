//! Plans that a node's cache follows: what a job says, and the lease that it gets.

use forebay_core::limits;
use forebay_plan::{Batching, Partition, PlanDocument, Uneven};
use serde::{Deserialize, Serialize};

/// What a job says when it registers its plan: `POST /v1/datasets/plans`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registration {
    /// The datasets, by their ids, and the order.
    pub plan: PlanDocument,
    /// What the job calls itself: registering the same plan under the same name again renews that
    /// lease instead of creating a second one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Where the job begins.
    #[serde(default)]
    pub epoch: u64,
    /// Positions count the rows of all ranks together, from 0 in each epoch.
    #[serde(default)]
    pub position: u64,
    /// The epoch before which the job ends; `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_epoch: Option<u64>,
    /// How long the lease lasts without being renewed.
    #[serde(default = "lease_seconds")]
    pub lease_seconds: u64,
    /// Bytes to fetch ahead of the position; 0: none. Never more than 1/64 of the cache.
    #[serde(default = "ahead_bytes")]
    pub ahead_bytes: u64,
    /// The ranks that read at this node by this lease. Without it, all rows of the order are
    /// expected to be read here. Nodes of earlier releases refuse it, and `columns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Readers>,
    /// The columns that are read; without it, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Vec<String>>,
}

/// Some ranks of a job, and how its order is dealt out to all of them. Steps are counted from
/// where the registration says that the job is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Readers {
    /// How many ranks the job has.
    pub world: u32,
    /// Those that read here.
    pub ranks: Vec<u32>,
    /// How the rows of one rank make a batch. Which rows a rank reads is not known of batches that
    /// are bounded by length.
    pub batch: Batching,
    /// What happens to the last rows of an epoch.
    #[serde(default)]
    pub uneven: Uneven,
}

impl Readers {
    /// How the order is dealt out, as the first of the ranks sees it.
    pub fn partition(&self) -> Partition {
        Partition {
            world: self.world,
            rank: self.ranks.first().copied().unwrap_or_default(),
            batch: self.batch,
            uneven: self.uneven,
        }
    }
}

fn lease_seconds() -> u64 {
    limits::PLAN_LEASE_DEFAULT_SECS
}

fn ahead_bytes() -> u64 {
    limits::PLAN_AHEAD_DEFAULT_BYTES
}

/// A lease as its holder sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id, which cannot be guessed.
    pub lease: String,
    /// The identity of the plan's order.
    pub plan: String,
    /// Rows of all ranks together in one epoch.
    pub rows_per_epoch: u64,
    /// Where the cache thinks the job is.
    pub epoch: u64,
    /// The position within that epoch.
    pub position: u64,
    /// `None`: the lease lasts as long as the stream that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
    /// Leases on this plan, including this one.
    pub leases: usize,
    /// How many of how many ranks read by it, if the node tells them apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<(u64, u64)>,
}

/// `GET /v1/datasets/plans`: the caller's leases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    /// Empty if the caller has none.
    pub leases: Vec<Lease>,
}

/// Where a job is: `PUT /v1/datasets/plans/<lease>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The epoch that the job is in, from 0.
    pub epoch: u64,
    /// Rows of that epoch, of all ranks together, that are finished.
    pub position: u64,
}

/// `DELETE /v1/datasets/plans/<lease>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// The lease that ended.
    pub released: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_says_what_it_leaves_out() {
        let json = r#"{"plan": {"sources": [{"dataset": "d"}], "seed": 1}}"#;
        let read: Registration = serde_json::from_str(json).unwrap();
        assert_eq!(
            (read.epoch, read.lease_seconds, read.ahead_bytes),
            (
                0,
                limits::PLAN_LEASE_DEFAULT_SECS,
                limits::PLAN_AHEAD_DEFAULT_BYTES
            )
        );
        let again = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<Registration>(&again).unwrap(), read);
        assert!(
            !again.contains("partition") && !again.contains("columns"),
            "{again}"
        );
        let dealt = json.replace(
            "\"plan\"",
            r#""columns": ["a"], "partition": {"world": 4, "ranks": [1], "batch": {"rows": 8}}, "plan""#,
        );
        let read: Registration = serde_json::from_str(&dealt).unwrap();
        let of = read.partition.unwrap();
        assert_eq!((of.ranks.as_slice(), of.uneven), (&[1][..], Uneven::Drop));
        assert_eq!(read.columns.as_deref(), Some(&["a".to_owned()][..]));
        let typo = json.replace("\"plan\"", "\"epcoh\": 1, \"plan\"");
        assert!(serde_json::from_str::<Registration>(&typo).is_err());
    }
}
