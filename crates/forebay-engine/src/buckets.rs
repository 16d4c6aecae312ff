//! From a bucket's name to its origin: the seam that lets tests run the engine without real
//! origins.

use crate::gather::{Answers, Wanted};
use async_trait::async_trait;
use forebay_core::{Error, ObjectName, Result};
use forebay_origin::{ListedBucket, Origin};
use futures::{StreamExt, stream};
use hashbrown::HashMap;
use std::sync::Arc;

/// Whether the versions that a node knows to be current may be answered from what it knows, in
/// buckets whose objects change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// By the bucket's freshness rule.
    ByRule,
    /// By that rule, if it was learned since this moment: others tell of their writes since then.
    /// Later moments have higher numbers.
    Since(u32),
    /// Not now: the bucket is asked.
    Hints,
}

/// A write of which other nodes were told, until this is dropped.
#[derive(Default)]
pub struct Announced(Option<Box<dyn Send>>);

impl Announced {
    /// Until this is dropped, the write is not over.
    pub fn until(dropped: impl Send + 'static) -> Self {
        Self(Some(Box::new(dropped)))
    }

    /// The write is over: every node has forgotten what was there before.
    pub fn over(self) {
        drop(self.0);
    }
}

/// The buckets that this node serves.
#[async_trait]
pub trait Buckets: Send + Sync + 'static {
    /// The origin behind a bucket.
    ///
    /// # Errors
    /// `BucketNotFound`, with the existing names as a hint.
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>>;

    /// The same for a bucket that may not exist (yet): no origin is asked.
    ///
    /// # Errors
    /// `BucketNotFound` for a name that no origin would have.
    async fn origin_to_be(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.origin(bucket).await
    }

    /// In a cluster: whether [`Buckets::origin`] asks another node to fetch this byte of an object,
    /// instead of fetching it here.
    fn is_elsewhere(&self, name: &ObjectName, at: u64) -> bool {
        let _ = (name, at);
        false
    }

    /// In a cluster: whether this node is to keep a copy of this byte of an object, though another
    /// node is asked to fetch it.
    fn keeps_copy(&self, name: &ObjectName, at: u64) -> bool {
        let _ = (name, at);
        false
    }

    /// Whether there may be other nodes.
    fn has_others(&self) -> bool {
        false
    }

    /// In a cluster: the node that is asked to fetch this byte of an object, if it takes many
    /// questions at once.
    fn gathers_at(&self, name: &ObjectName, at: u64) -> Option<u64> {
        let _ = (name, at);
        None
    }

    /// In a cluster: asks a node for these, in this order, until their bytes are `most_bytes`. The
    /// answer may end before the last one; those without an answer are to be asked again.
    fn gather(&self, node: u64, wanted: Vec<Wanted>, most_bytes: u64) -> Answers {
        let _ = (wanted, most_bytes);
        let e = Error::internal(format!("node {node:016x} is in no cluster of this one"));
        stream::once(async { Err(e) }).boxed()
    }

    /// In a cluster: the origin behind a bucket for a node that was asked by another one to fetch.
    /// It asks other nodes for what they have, but never to fetch: else nodes could wait for each
    /// other.
    ///
    /// # Errors
    /// As [`Buckets::origin`].
    async fn origin_as_owner(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.origin(bucket).await
    }

    /// In a cluster: the origin behind a bucket, of which no other node is asked anything: for what
    /// only the bucket knows.
    ///
    /// # Errors
    /// As [`Buckets::origin`].
    async fn origin_itself(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.origin(bucket).await
    }

    /// In a cluster: another node says that an object was written. What nodes that owned the name
    /// before may know of it is old.
    fn was_written(&self, name: &ObjectName) {
        let _ = name;
    }

    /// In a cluster: what this node's heads say of buckets that change.
    fn heads(&self) -> Heads {
        Heads::ByRule
    }

    /// In a cluster: whether a write may begin.
    ///
    /// # Errors
    /// If it would be refused after it was carried out.
    fn may_write(&self) -> Result<()> {
        Ok(())
    }

    /// In a cluster: an object was written through this node, or may have been; `acknowledges`: a
    /// client is told so. Returns when other nodes have forgotten the old version as far as is
    /// promised; an error if that cannot be made sure, and the write is not to be acknowledged.
    ///
    /// What comes with it is held until this node has forgotten the old version too: as long as it is,
    /// others ask only the bucket. One that did not, and asked this node, would get the old version
    /// and keep it.
    async fn written(&self, name: &ObjectName, acknowledges: bool) -> (Result<()>, Announced) {
        let _ = (name, acknowledges);
        (Ok(()), Announced::default())
    }

    /// In a cluster: an object was found to be another than was known. Returns when the nodes that
    /// tell others which version is current have forgotten the old one, or are known not to answer.
    async fn found_changed(&self, name: &ObjectName) {
        let _ = name;
    }

    /// Whether the configuration names exactly this bucket.
    fn is_mapped(&self, bucket: &str) -> bool {
        let _ = bucket;
        false
    }

    /// The kind of the origin behind a bucket, in the word that AIStore's clients use for it:
    /// `aws`, `gcp`, `azure`, `ht`, or `ais` for a directory.
    fn provider(&self, bucket: &str) -> &'static str {
        let _ = bucket;
        "ais"
    }

    /// A bucket was created or removed at its origin: what is known about it may be wrong.
    fn changed(&self, bucket: &str) {
        let _ = bucket;
    }

    /// The known buckets, by name. (An origin that serves any bucket of an endpoint knows those that
    /// were used.)
    async fn list(&self) -> Result<Vec<ListedBucket>>;

    /// Creates an empty bucket if the origin can.
    async fn create(&self, bucket: &str) -> Result<()>;

    /// Removes an empty bucket if the origin can.
    async fn remove(&self, bucket: &str) -> Result<()>;
}

/// A fixed set of buckets.
#[derive(Default, Clone)]
pub struct FixedBuckets(pub HashMap<String, Arc<dyn Origin>>);

#[async_trait]
impl Buckets for FixedBuckets {
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.0
            .get(bucket)
            .cloned()
            .ok_or_else(|| Error::bucket_not_found(format!("bucket {bucket:?} is not served here")))
    }

    async fn list(&self) -> Result<Vec<ListedBucket>> {
        let names = self.0.keys();
        let mut buckets: Vec<ListedBucket> = names
            .map(|name| ListedBucket {
                name: name.clone(),
                created_ms: 0,
            })
            .collect();
        buckets.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(buckets)
    }

    async fn create(&self, bucket: &str) -> Result<()> {
        Err(Error::unsupported(format!(
            "bucket {bucket:?} cannot be created: the set of buckets is fixed"
        )))
    }

    async fn remove(&self, bucket: &str) -> Result<()> {
        Err(Error::unsupported(format!(
            "bucket {bucket:?} cannot be removed: the set of buckets is fixed"
        )))
    }
}
