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
        let planned = self.plans().map(|plans| plans.next_use(entry));
        if let Some(planned) = planned.filter(|planned| *planned != NextUse::Unknown) {
            return planned;
        }
        let at = match entry.part {
            None => 0,
            Some(Part::Chunk(index)) => u64::from(index) * CHUNK_BYTES,
            // Made here, of what whoever owns it has: no other node has it.
            Some(Part::Aux(..)) => return NextUse::Unknown,
        };
        if !self.cluster.has_others() {
            return NextUse::Unknown;
        }
        let copies = self.cluster.copies_in(entry.bucket);
        match self.cluster.standing(&Unit::at(entry.name, at), copies) {
            Standing::Owner | Standing::Keeper | Standing::Former => NextUse::Owned,
            Standing::Other => NextUse::Never,
        }
    }
}
