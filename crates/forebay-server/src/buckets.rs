//! The configured origins, as the engine asks for them.

use crate::config::NamedOrigin;
use async_trait::async_trait;
use forebay_core::{Error, Result, sync::RwLock};
use forebay_engine::Buckets;
use forebay_origin::{Origin, OriginStats, Origins, WILDCARD};
use forebay_store::Sources;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::time::timeout;

/// Buckets of wildcards that are known to exist, at most.
const KNOWN_MAX: usize = 4096;
/// How long the question may take, once for each bucket: a read of what is cached must not wait for
/// an origin that is away.
const EXISTS_TIMEOUT: Duration = Duration::from_secs(2);

/// [`Origins`] behind the engine's trait, replaced as a whole when the configuration is.
pub struct OriginBuckets {
    origins: RwLock<Arc<Origins>>,
    /// Buckets that are not asked for again. One that is not known is asked for once, so that a
    /// misspelt bucket is "no such bucket" before any work.
    known: RwLock<HashSet<String>>,
}

impl OriginBuckets {
    /// Makes an origin of each configuration; none of them is asked anything yet.
    ///
    /// # Errors
    /// The first origin that makes no sense, with its URL.
    pub fn open(origins: &[NamedOrigin]) -> Result<Self> {
        Ok(OriginBuckets {
            origins: RwLock::new(Arc::new(opened(&Origins::new(), origins)?)),
            known: RwLock::default(),
        })
    }

    /// Other origins, for [`OriginBuckets::install`]. What is configured as before stays open, with
    /// its limits and counters.
    ///
    /// # Errors
    /// As [`OriginBuckets::open`].
    pub fn prepare(&self, origins: &[NamedOrigin]) -> Result<Origins> {
        opened(&self.origins(), origins)
    }

    /// Puts other origins in force, for every request that begins after this.
    pub fn install(&self, origins: Origins) {
        *self.origins.write() = Arc::new(origins);
        self.known.write().clear();
    }

    /// Counters and gauges of each origin, by the bucket's name; `*` for a wildcard.
    pub fn stats(&self) -> Vec<(String, OriginStats)> {
        self.origins().stats()
    }

    /// What the cache keeps apart: where each name leads.
    pub fn sources(&self) -> Sources {
        sources_of(&self.origins())
    }

    fn origins(&self) -> Arc<Origins> {
        self.origins.read().clone()
    }
}

#[async_trait]
impl Buckets for OriginBuckets {
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        let origins = self.origins();
        let origin = origins.get(bucket)?;
        if self.known.read().contains(bucket) {
            return Ok(origin);
        }
        // An origin that does not say, or not soon, is tried; what is cached is served without it.
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

    async fn list(&self) -> Result<Vec<String>> {
        self.origins().list_buckets().await
    }

    async fn create(&self, bucket: &str) -> Result<()> {
        self.origins().create_bucket(bucket).await
    }

    async fn remove(&self, bucket: &str) -> Result<()> {
        self.known.write().remove(bucket);
        self.origins().remove_bucket(bucket).await
    }
}

/// What is configured as it was in `before` is taken from there.
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
