//! In a cluster: one node opens a dataset for all of them.
//!
//! The node that owns the hash of a spec is its *home*. A node that is asked to open the spec asks the
//! home, which lists and reads footers as it does for its own callers, and takes the finished index:
//! the file that the home keeps on its disk (`disk.rs`), in pieces. Callers' rights are checked by the
//! node that they ask: their patterns before, and each file after. Specs with manifests are opened by
//! each node, because who may read each line must be known before; parts of tars, and archives that
//! are read at once, because their bytes are wanted where they are opened.
//!
//! Invariants: the home asks no other node to open anything, and its openings for others are not
//! those that ask a home: so no two nodes wait for each other, even if their maps differ. An index is
//! taken only whole, and if it is what it says. If anything fails, a node opens the dataset itself.

use super::{
    disk::{self, Disk},
    progress::{Progress, Watched},
    registry::{Opened, Sources},
    spec,
};
use crate::{DatasetSpec, Datasets, blocking::blocking};
use bytes::{Bytes, BytesMut};
use forebay_core::{Error, Result};
use forebay_protocol::{ErrorDocument, dataset::OpenProgress};
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Instant};

/// An index may take this share of the memory budget while it arrives.
const MEMORY_SHARE: u64 = 4;

/// Asks other nodes to open datasets.
pub trait Homes: Send + Sync + 'static {
    /// The node that opens what has this hash, if that is another one, and it is thought to answer.
    fn home(&self, hash: u128) -> Option<u64>;

    /// What a node has opened; as long as it has not, `progress` says how far it is.
    fn open<'a>(
        &'a self,
        node: u64,
        spec: &'a DatasetSpec,
        progress: &'a (dyn Fn(OpenProgress) + Send + Sync),
    ) -> BoxFuture<'a, Result<AtHome>>;

    /// The bytes of an index from here on, as many as fit an answer.
    fn piece<'a>(&'a self, node: u64, id: &'a str, from: u64) -> BoxFuture<'a, Result<Bytes>>;
}

/// A dataset that another node has opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AtHome {
    /// Its id.
    pub id: String,
    /// How long its index is.
    pub bytes: u64,
    /// As in [`Opened`].
    pub indexed_files: u64,
    /// As in [`Opened`].
    pub reused_files: u64,
    /// As in [`Opened`].
    pub indexed_bytes: u64,
    /// As in [`Opened`].
    pub skipped: Vec<(String, ErrorDocument)>,
    /// As in [`Opened`].
    pub unreadable: (u64, Option<String>),
}

impl Datasets {
    /// Opens a dataset for other nodes of a cluster, which check what their callers may read.
    ///
    /// # Errors
    /// As [`Datasets::open`]; `Unsupported` for what each node opens itself.
    pub fn open_for_others<'a>(
        &'a self,
        spec: &'a DatasetSpec,
        watched: &'a Watched,
    ) -> BoxFuture<'a, Result<AtHome>> {
        Box::pin(async move {
            // Before there is any work: who asks would do it again.
            let Some(disk) = self.disk() else {
                return Err(Error::unsupported(
                    "this node has no disk for indexes of datasets, from which it would send one",
                ));
            };
            let (spec, wanted, key) =
                Self::parsed(spec.clone(), Arc::new(crate::Everything)).await?;
            if !spec::is_for_home(&spec, &wanted) {
                return Err(Error::unsupported("each node opens such datasets itself"));
            }
            let sources = Sources::of(spec, key, wanted);
            let opened = self.join(key, sources, watched)?.wait().await?;
            let id = opened.dataset.id().to_owned();
            let bytes = blocking(move || disk.bytes_of(&id)).await?;
            let bytes = bytes.ok_or_else(|| {
                Error::unsupported("the index of the dataset is not on this node's disk")
            })?;
            let skipped = opened.skipped.iter();
            Ok(AtHome {
                id: opened.dataset.id().to_owned(),
                bytes,
                indexed_files: opened.indexed_files,
                reused_files: opened.reused_files,
                indexed_bytes: opened.indexed_bytes,
                skipped: skipped
                    .map(|(name, e)| (name.clone(), ErrorDocument::of(e)))
                    .collect(),
                unreadable: opened.unreadable,
            })
        })
    }

    /// At most so many bytes of an index on this node's disk, from here on.
    ///
    /// # Errors
    /// `NotFound` if it is not there (any more).
    pub async fn piece_for_others(&self, id: &str, from: u64, most: u64) -> Result<Bytes> {
        let (disk, owned) = (self.disk(), id.to_owned());
        let piece = blocking(move || disk.and_then(|disk| disk.piece(&owned, from, most))).await?;
        piece.map(Bytes::from).ok_or_else(|| {
            Error::not_found(format!(
                "this node does not have the index of the dataset {:?}",
                forebay_core::name::shorten(id)
            ))
        })
    }

    /// What the spec's home has opened.
    pub(super) async fn open_at(
        &self,
        (homes, node): (&dyn Homes, u64),
        (spec, key): (&DatasetSpec, u128),
        progress: &Progress,
        began: Instant,
    ) -> Result<Opened> {
        let found = homes.open(node, spec, &|now| progress.is(&now)).await?;
        let known = self.known(key).await?;
        let previous = known.as_ref().map(|known| known.id().to_owned());
        let dataset = match known.filter(|known| known.id() == found.id) {
            Some(known) => known,
            None => match self.kept_by_id(&found.id) {
                Some(kept) => kept,
                None => self.take_index((homes, node), spec, &found).await?,
            },
        };
        self.keep(key, &dataset).await;
        self.stats().opened_at_home.add(1);
        let skipped = found.skipped.into_iter();
        Ok(Opened {
            previous: previous.filter(|id| id != dataset.id()),
            dataset,
            indexed_files: found.indexed_files,
            reused_files: found.reused_files,
            indexed_bytes: found.indexed_bytes,
            skipped: skipped.map(|(name, e)| (name, e.to_error())).collect(),
            unreadable: found.unreadable,
            took: began.elapsed(),
        })
    }

    async fn take_index(
        &self,
        (homes, node): (&dyn Homes, u64),
        spec: &DatasetSpec,
        found: &AtHome,
    ) -> Result<Arc<crate::Dataset>> {
        let budget = self.engine().budget();
        if found.bytes > budget.total_bytes() / MEMORY_SHARE {
            return Err(Error::unsupported(format!(
                "the index has {} bytes, too many to be sent",
                found.bytes
            )));
        }
        let _memory = budget.reserve(found.bytes).await?;
        let mut all = BytesMut::with_capacity(found.bytes as usize);
        while (all.len() as u64) < found.bytes {
            let piece = homes.piece(node, &found.id, all.len() as u64).await?;
            let left = found.bytes - all.len() as u64;
            if piece.is_empty() || piece.len() as u64 > left {
                return Err(Error::corrupt(format!(
                    "an index of {} bytes came as one of other length",
                    found.bytes
                )));
            }
            all.extend_from_slice(&piece);
        }
        let (id, options) = (found.id.clone(), spec::options(spec));
        let dataset = blocking(move || {
            let dataset = disk::decode(&all)?;
            match dataset.id() == id && dataset.options() == options {
                true => Ok(Arc::new(dataset)),
                false => Err(Error::corrupt("the index is that of another dataset")),
            }
        });
        dataset.await?
    }
}

impl Disk {
    /// How long the index with this id is.
    fn bytes_of(&self, id: &str) -> Option<u64> {
        self.file_of(id)?.metadata().ok().map(|meta| meta.len())
    }

    fn piece(&self, id: &str, from: u64, most: u64) -> Option<Vec<u8>> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.file_of(id)?;
        file.seek(SeekFrom::Start(from)).ok()?;
        let mut piece = Vec::new();
        file.take(most).read_to_end(&mut piece).ok()?;
        Some(piece)
    }
}
