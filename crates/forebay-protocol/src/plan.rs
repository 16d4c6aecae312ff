//! Plans that a node's cache follows: what a job says, and the lease that it gets.

use forebay_core::limits;
use forebay_plan::PlanDocument;
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
        let typo = json.replace("\"plan\"", "\"epcoh\": 1, \"plan\"");
        assert!(serde_json::from_str::<Registration>(&typo).is_err());
    }
}
