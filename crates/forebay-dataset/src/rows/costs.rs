//! What reads of each dataset took: rows, bytes by source, requests to origins.
//!
//! Bounded: [`DATASETS_MAX`] datasets are known; for one more, the one that was read longest ago goes.

use crate::{Dataset, catalog::dataset::Account};
use forebay_core::{
    request::{Cost, Tally},
    sync::Mutex,
};
use forebay_protocol::job::{OfDataset, Taken};
use std::{collections::HashMap, sync::Arc};

const DATASETS_MAX: usize = 256;

#[derive(Default)]
pub(super) struct Costs(Mutex<State>);

#[derive(Default)]
struct State {
    by_id: HashMap<String, Known>,
    uses: u64,
}

struct Known {
    tally: Arc<Tally>,
    account: Account,
    used: u64,
}

impl Costs {
    /// The tally of a dataset; of a part, that of its dataset.
    pub fn of(&self, dataset: &Dataset) -> Arc<Tally> {
        let mut state = self.0.lock();
        state.uses += 1;
        let now = state.uses;
        if let Some(known) = state.by_id.get_mut(dataset.account_id()) {
            known.used = now;
            return known.tally.clone();
        }
        if state.by_id.len() >= DATASETS_MAX {
            let oldest = state.by_id.iter().min_by_key(|(_, known)| known.used);
            if let Some(oldest) = oldest.map(|(id, _)| id.clone()) {
                state.by_id.remove(&oldest);
            }
        }
        let known = Known {
            tally: Arc::default(),
            account: dataset.account(),
            used: now,
        };
        let tally = known.tally.clone();
        state.by_id.insert(known.account.id.clone(), known);
        tally
    }

    /// What each took, the one that was read last first.
    pub fn told(&self) -> Vec<OfDataset> {
        let state = self.0.lock();
        let mut known: Vec<_> = state.by_id.values().collect();
        known.sort_by_key(|known| std::cmp::Reverse(known.used));
        let of = known.into_iter().map(|known| OfDataset {
            id: known.account.id.clone(),
            name: known.account.place.clone(),
            names: format!("{:016x}", known.account.names),
            stored_bytes: known.account.bytes,
            taken: taken(&known.tally),
        });
        of.collect()
    }
}

/// The sums of a tally, as they are told.
pub fn taken(tally: &Tally) -> Taken {
    Taken {
        requests: tally.get(Cost::Requests),
        rows: tally.get(Cost::Rows),
        row_bytes: tally.get(Cost::RowBytes),
        memory_bytes: tally.get(Cost::MemoryBytes),
        disk_bytes: tally.get(Cost::DiskBytes),
        peer_bytes: tally.get(Cost::PeerBytes),
        origin_bytes: tally.origin_bytes(),
        origin_requests: tally.get(Cost::OriginRequests),
    }
}
