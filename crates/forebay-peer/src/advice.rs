//! What the store of a node keeps: what it owns before what others own.

use crate::Cluster;
use forebay_cluster::{Standing, Unit};
use forebay_core::limits::CHUNK_BYTES;
use forebay_store::{Advisor, Cached, NextUse, Part};
use std::sync::Arc;

/// Plans first; then the cluster.
pub struct ClusterAdvice {
    cluster: Arc<Cluster>,
    plans: Option<Arc<dyn Advisor>>,
}

impl ClusterAdvice {
    /// For the store of a node of this cluster. What `plans` know is as they say.
    pub fn new(cluster: Arc<Cluster>, plans: Option<Arc<dyn Advisor>>) -> Self {
        ClusterAdvice { cluster, plans }
    }

    fn plans(&self) -> Option<&Arc<dyn Advisor>> {
        self.plans.as_ref().filter(|plans| plans.is_active())
    }
}

impl Advisor for ClusterAdvice {
    fn is_active(&self) -> bool {
        self.cluster.has_others() || self.plans().is_some()
    }

    fn generation(&self) -> u64 {
        let plans = self.plans.as_ref().map_or(0, |plans| plans.generation());
        // Both only grow.
        plans.wrapping_add(self.cluster.changes())
    }

    fn next_use(&self, entry: &Cached) -> NextUse {
        let at = match entry.part {
            None => Some(0),
            Some(Part::Chunk(index)) => Some(u64::from(index) * CHUNK_BYTES),
            // Made here, of what whoever owns it has: no other node has it.
            Some(Part::Aux(..) | Part::Rows { .. }) => None,
        };
        let at = at.filter(|_| self.cluster.has_others());
        let standing = at.map(|at| {
            let copies = self.cluster.copies_in(entry.bucket);
            self.cluster.standing(&Unit::at(entry.name, at), copies)
        });
        let planned = self.plans().map(|plans| match standing {
            // Ranks that read at other nodes ask this one.
            Some(Standing::Owner | Standing::Keeper | Standing::Former) => {
                plans.next_use_by_all(entry)
            }
            Some(Standing::Other) | None => plans.next_use(entry),
        });
        if let Some(planned) = planned.filter(|planned| *planned != NextUse::Unknown) {
            return planned;
        }
        match standing {
            Some(Standing::Owner | Standing::Keeper | Standing::Former) => NextUse::Owned,
            Some(Standing::Other) => NextUse::Never,
            None => NextUse::Unknown,
        }
    }
}
