//! Datasets that one node of a cluster opens for the others (`forebay_dataset::Homes`): orders over the
//! link of the nodes.

use crate::operate::Order;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_dataset::{AtHome, DatasetSpec, Homes};
use forebay_peer::Cluster;
use forebay_protocol::dataset::OpenProgress;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// An answer comes after this at the latest, and says how far the opening is.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes of an index in one answer.
pub(crate) const PIECE_BYTES: u64 = 2 << 20;
/// A node whose opening does not get on for so long is not waited for.
const STANDSTILL: Duration = Duration::from_secs(60);
/// Longer descriptions are opened by each node. A question is at most 64 KiB.
const SPEC_MAX_BYTES: usize = 40 << 10;

/// The answer to [`Order::OpenDataset`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Opening {
    UnderWay(OpenProgress),
    Opened(AtHome),
}

/// Asks the members of a cluster.
pub struct AtOtherNodes(pub Arc<Cluster>);

impl AtOtherNodes {
    async fn order(&self, node: u64, order: Order) -> Result<Bytes> {
        let order = serde_json::to_value(&order)
            .map_err(|e| Error::internal("an order that cannot be written").caused_by(e))?;
        self.0.operate(node, order).await
    }
}

impl Homes for AtOtherNodes {
    fn home(&self, hash: u128) -> Option<u64> {
        let owner = self.0.owner_of_hash(hash)?;
        (owner != self.0.me().node && self.0.answers(owner)).then_some(owner)
    }

    fn open<'a>(
        &'a self,
        node: u64,
        spec: &'a DatasetSpec,
        progress: &'a (dyn Fn(OpenProgress) + Send + Sync),
    ) -> BoxFuture<'a, Result<AtHome>> {
        Box::pin(async move {
            let length = serde_json::to_vec(spec).map_or(usize::MAX, |text| text.len());
            if length > SPEC_MAX_BYTES {
                return Err(Error::unsupported("the description is too long to be sent"));
            }
            let (mut last, mut moved) = (OpenProgress::default(), Instant::now());
            loop {
                let order = Order::OpenDataset {
                    spec: Box::new(spec.clone()),
                };
                let answer = self.order(node, order).await?;
                let answer = serde_json::from_slice(&answer)
                    .map_err(|e| Error::corrupt(format!("an answer that cannot be read: {e}")))?;
                match answer {
                    Opening::UnderWay(now) => {
                        if now != last {
                            (last, moved) = (now, Instant::now());
                        } else if moved.elapsed() > STANDSTILL {
                            return Err(Error::new(
                                ErrorKind::Timeout,
                                format!("the opening did not get on for {STANDSTILL:?}"),
                            ));
                        }
                        progress(now);
                    }
                    Opening::Opened(found) => return Ok(found),
                }
            }
        })
    }

    fn piece<'a>(&'a self, node: u64, id: &'a str, from: u64) -> BoxFuture<'a, Result<Bytes>> {
        let id = id.to_owned();
        Box::pin(self.order(node, Order::DatasetPiece { id, from }))
    }
}
