//! The configured origins, as the engine asks for them.

use async_trait::async_trait;
use forebay_core::{Error, Result, sync::RwLock};
use forebay_engine::Buckets;
use forebay_origin::{Origin, Origins};
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::time::timeout;

/// Buckets of wildcards that are known to exist, at most.
const KNOWN_MAX: usize = 4096;
/// How long the question may take, once for each bucket: a read of what is cached must not wait for
/// an origin that is away.
const EXISTS_TIMEOUT: Duration = Duration::from_secs(2);

/// [`Origins`] behind the engine's trait.
pub struct OriginBuckets {
    origins: Arc<Origins>,
    /// Buckets that are not asked for again. One that is not known is asked for once, so that a
    /// misspelt bucket is "no such bucket" before any work.
    known: RwLock<HashSet<String>>,
}

impl OriginBuckets {
    pub fn new(origins: Arc<Origins>) -> Self {
        OriginBuckets {
            origins,
            known: RwLock::default(),
        }
    }
}

#[async_trait]
impl Buckets for OriginBuckets {
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        let origin = self.origins.get(bucket)?;
        if self.known.read().contains(bucket) {
            return Ok(origin);
        }
        // An origin that does not say, or not soon, is tried; what is cached is served without it.
        if let Ok(Ok(false)) = timeout(EXISTS_TIMEOUT, self.origins.exists(bucket)).await {
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
        self.origins.get(bucket)
    }

    fn changed(&self, bucket: &str) {
        self.known.write().remove(bucket);
        self.origins.forget_bucket(bucket);
    }

    async fn list(&self) -> Result<Vec<String>> {
        self.origins.list_buckets().await
    }

    async fn create(&self, bucket: &str) -> Result<()> {
        self.origins.create_bucket(bucket).await
    }

    async fn remove(&self, bucket: &str) -> Result<()> {
        self.known.write().remove(bucket);
        self.origins.remove_bucket(bucket).await
    }
}
