//! Giving the new owner of slots what this node has of them ([`crate::HandOver`] asks for it).
//!
//! Each answer is a step of a pass over the store, and says where the next one begins: so nothing is
//! kept here between two of them, and a pass goes on after any interruption. Only units are given
//! that this node owned, and that the asker owns by the table that it names, which this node must
//! know too.
//!
//! Invariant: a few steps at a time, no faster than [`RECORDS_PER_SECOND`] and
//! [`READ_BYTES_PER_SECOND`] together, so that reads have the disks.

use crate::{
    answer::{Answers, sent, working},
    cluster::Cluster,
    message::{DATA_MAX_BYTES, Kind, Pulled, say, say_data, say_nothing},
    packed,
};
use forebay_cluster::Unit;
use forebay_core::{Error, Reservation, Result};
use forebay_store::{Held, HeldAs, Walk};
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{
    io::AsyncWrite,
    time::{Instant, sleep_until},
};

/// Steps that are taken at a time.
pub(crate) const STEPS_MAX: usize = 2;
/// So much of the log goes into one answer, and one record more.
pub(crate) const STEP_BYTES: u64 = 1 << 20;
/// The longest answer: what is written shortly in the log takes more room here.
pub(crate) const ANSWER_MAX_BYTES: u64 = 8 << 20;
pub(crate) const RECORDS_PER_SECOND: f64 = 200_000.0;
pub(crate) const READ_BYTES_PER_SECOND: f64 = (256 << 20) as f64;

impl Answers {
    /// Answers [`crate::message::What::Pull`] with one step; `by` are a table and the epoch of a map
    /// with it. The inner error is to be said.
    pub(crate) async fn give(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        cluster: &Arc<Cluster>,
        asker: u64,
        by: (u64, u64),
        after: Option<Walk>,
    ) -> io::Result<Result<()>> {
        let step = self.step(cluster, asker, by, after);
        let given = |pulled: &Pulled| cluster.moved().given(pulled.entries, pulled.bytes);
        self.give_step(io, step, given).await
    }

    /// Answers with what a step gives, and notes that it was sent. The inner error is to be said.
    pub(crate) async fn give_step<M>(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        step: impl Future<Output = Result<(Pulled, Vec<u8>, M)>>,
        given: impl FnOnce(&Pulled),
    ) -> io::Result<Result<()>> {
        let (pulled, packed, _memory) = match working(io, step).await? {
            Ok(step) => step,
            Err(e) => return Ok(Err(e)),
        };
        sent(say(io, Kind::Found, &pulled)).await?;
        for data in packed.chunks(DATA_MAX_BYTES) {
            sent(say_data(io, None, data)).await?;
        }
        sent(say_nothing(io, Kind::End)).await?;
        given(&pulled);
        Ok(Ok(()))
    }

    async fn step(
        &self,
        cluster: &Arc<Cluster>,
        asker: u64,
        (table, epoch): (u64, u64),
        after: Option<Walk>,
    ) -> Result<(Pulled, Vec<u8>, Option<(Reservation, Reservation)>)> {
        let step = self.gives.acquire().await;
        let _step = step.map_err(|_| Error::internal("nothing is handed over any more"))?;
        let began = Instant::now();
        let (owed, seed) = cluster.owed(asker, table, epoch).await?;
        if owed.is_empty() {
            return Ok((Pulled::default(), Vec::new(), None));
        }
        let wanted =
            move |name: u128, at: u64| owed.binary_search(&Unit::at(name, at).slot(seed)).is_ok();
        let engine = self.engine();
        let held = engine.held_for_other(after, STEP_BYTES, wanted).await?;
        let Some((mut step, memory)) = held else {
            return Ok((Pulled::default(), Vec::new(), None));
        };
        let now = engine.now_secs();
        let bytes = step.found.iter().map(|held| held.bytes()).sum::<u64>();
        // What is sent is a copy.
        let copy = engine.budget().reserve(bytes).await?;
        self.distrust(&mut step.found);
        let packed = packed::pack(&step.found, now)?;
        let seconds = (step.records as f64 / RECORDS_PER_SECOND)
            .max((step.read_bytes + bytes) as f64 / READ_BYTES_PER_SECOND);
        sleep_until(began + Duration::from_secs_f64(seconds)).await;
        let pulled = Pulled {
            bytes: packed.len() as u64,
            entries: step.found.len() as u64,
            next: step.next,
            left: step.left_bytes,
            ..Pulled::default()
        };
        Ok((pulled, packed, Some((memory, copy))))
    }

    /// What this node would ask the bucket about, the node that gets it has to as well.
    pub(crate) fn distrust(&self, held: &mut [Held]) {
        for Held { name, what, .. } in held {
            if let HeldAs::Head {
                validated_at_secs, ..
            } = what
            {
                *validated_at_secs = self.engine().trusted_since(name, *validated_at_secs);
            }
        }
    }
}
