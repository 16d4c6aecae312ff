//! The configured origins, as the engine asks for them.

use crate::config::NamedOrigin;
use arc_swap::{ArcSwap, Guard};
use async_trait::async_trait;
use forebay_core::{Error, Result, sync::RwLock};
use forebay_engine::{Buckets, ListedBucket};
use forebay_origin::{Origin, OriginStats, Origins, WILDCARD};
use forebay_store::Sources;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::time::timeout;

/// The most buckets of wildcards that are remembered as existing.
const KNOWN_MAX: usize = 4096;
/// How long an origin may take to say whether a bucket exists. Each bucket is asked for once. A
/// read of cached data must not wait for an origin that is down.
const EXISTS_TIMEOUT: Duration = Duration::from_secs(2);

/// [`Origins`] behind the engine's trait, replaced as a whole when the configuration changes.
pub struct OriginBuckets {
    origins: ArcSwap<Origins>,
    /// Buckets that are known to exist, so that their origins are not asked again. An unknown
    /// bucket is looked up once, so that a misspelt name is reported as "no such bucket" before any
    /// work.
    known: RwLock<HashSet<String>>,
}

impl OriginBuckets {
    /// Makes an origin from each configuration, without connecting to any.
    ///
    /// # Errors
    /// The first origin that makes no sense, with its URL.
    pub fn open(origins: &[NamedOrigin]) -> Result<Self> {
        Ok(OriginBuckets {
            origins: ArcSwap::from_pointee(opened(&Origins::new(), origins)?),
            known: RwLock::default(),
        })
    }

    /// Other origins, for [`OriginBuckets::install`]. An origin whose configuration did not change
    /// stays open, with its limits and counters.
    ///
    /// # Errors
    /// As [`OriginBuckets::open`].
    pub fn prepare(&self, origins: &[NamedOrigin]) -> Result<Origins> {
        opened(&self.origins(), origins)
    }

    /// Puts other origins in force for every request that begins after this.
    pub fn install(&self, origins: Origins) {
        self.origins.store(Arc::new(origins));
        self.known.write().clear();
    }

    /// Counters and gauges of each origin, by the bucket's name; `*` for a wildcard.
    pub fn stats(&self) -> Vec<(String, OriginStats)> {
        self.origins().stats()
    }

    /// Where each name leads, which is what the cache keeps apart.
    pub fn sources(&self) -> Sources {
        sources_of(&self.origins())
    }

    /// Not to be held while something is waited for.
    fn origins(&self) -> Guard<Arc<Origins>> {
        self.origins.load()
    }
}

#[async_trait]
impl Buckets for OriginBuckets {
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        let origins = self.origins.load_full();
        let origin = origins.find(bucket).await?;
        if self.known.read().contains(bucket) {
            return Ok(origin);
        }
        // If the origin gives no answer, or not soon, try it anyway: what is cached is served
        // without it.
        if let Ok(Ok(false)) = timeout(EXISTS_TIMEOUT, origins.exists(bucket)).await {
            return Err(Error::bucket_not_found(format!(
                "there is no bucket {bucket:?} at its origin"
            )));
        }
        let mut known = self.known.write();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(bucket.to_owned());
        Ok(origin)
    }

    async fn origin_to_be(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.origins().get_to_be(bucket)
    }

    fn is_mapped(&self, bucket: &str) -> bool {
        self.origins().is_mapped(bucket)
    }

    fn provider(&self, bucket: &str) -> &'static str {
        self.origins().provider(bucket)
    }

    fn changed(&self, bucket: &str) {
        self.known.write().remove(bucket);
        self.origins().forget_bucket(bucket);
    }

    async fn list(&self) -> Result<Vec<ListedBucket>> {
        self.origins.load_full().list_buckets().await
    }

    async fn create(&self, bucket: &str) -> Result<()> {
        self.origins.load_full().create_bucket(bucket).await
    }

    async fn remove(&self, bucket: &str) -> Result<()> {
        self.known.write().remove(bucket);
        self.origins.load_full().remove_bucket(bucket).await
    }
}

/// Takes each origin whose configuration did not change from `before`.
fn opened(before: &Origins, configured: &[NamedOrigin]) -> Result<Origins> {
    let mut origins = Origins::new();
    for origin in configured {
        let name = origin.bucket()?.unwrap_or_else(|| WILDCARD.to_owned());
        origins
            .add_config_as_in(before, &name, &origin.config)
            .map_err(|e| e.context(format!("origin {}", origin.config.url)))?;
    }
    Ok(origins)
}

/// What identifies the origins.
pub fn sources_of(origins: &Origins) -> Sources {
    let (named, others) = origins.identities();
    Sources::new(named.clone(), &others)
}
