//! The cluster between the engine and its origins.

use crate::{cluster::Cluster, read, together};
use async_trait::async_trait;
use forebay_core::{ObjectMeta, ObjectName, Result};
use forebay_engine::{
    Announced, Answers, Buckets, ByteStream, ForwardRequest, ForwardResponse, Heads, ListPage,
    ListRequest, ListedBucket, Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place,
    UploadedPart, Wanted,
};
use forebay_origin::{GetRequest, GetResponse};
use std::sync::Arc;

/// The buckets of a node in a cluster: what other nodes have, or are to fetch, is asked of them.
pub struct ClusterBuckets {
    inner: Arc<dyn Buckets>,
    cluster: Arc<Cluster>,
}

impl ClusterBuckets {
    /// The same buckets, for a node of this cluster.
    pub fn new(inner: Arc<dyn Buckets>, cluster: Arc<Cluster>) -> Self {
        ClusterBuckets { inner, cluster }
    }

    fn around(&self, bucket: &str, inner: Arc<dyn Origin>, as_owner: bool) -> Arc<dyn Origin> {
        Arc::new(ClusterOrigin {
            bucket: bucket.to_owned(),
            inner,
            cluster: self.cluster.clone(),
            as_owner,
        })
    }
}

#[async_trait]
impl Buckets for ClusterBuckets {
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        let inner = self.inner.origin(bucket).await?;
        Ok(self.around(bucket, inner, false))
    }

    async fn origin_as_owner(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        let inner = self.inner.origin(bucket).await?;
        Ok(self.around(bucket, inner, true))
    }

    async fn origin_itself(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.inner.origin(bucket).await
    }

    async fn origin_to_be(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.inner.origin_to_be(bucket).await
    }

    fn is_elsewhere(&self, name: &ObjectName, at: u64) -> bool {
        self.cluster.is_elsewhere(name, at)
    }

    fn keeps_copy(&self, name: &ObjectName, at: u64) -> bool {
        self.cluster.keeps_copy(name, at)
    }

    fn gathers_at(&self, name: &ObjectName, at: u64) -> Option<u64> {
        self.cluster.gathers_at(name, at)
    }

    fn gather(&self, node: u64, wanted: Vec<Wanted>, most_bytes: u64) -> Answers {
        together::ask(&self.cluster, node, wanted, most_bytes)
    }

    fn was_written(&self, name: &ObjectName) {
        self.cluster.overtakes(name);
    }

    fn has_others(&self) -> bool {
        self.cluster.has_others()
    }

    fn heads(&self) -> Heads {
        match self.cluster.telling() {
            None => Heads::ByRule,
            Some(telling) => telling.trust().map_or(Heads::Hints, Heads::Since),
        }
    }

    fn may_write(&self) -> Result<()> {
        self.cluster.telling().map_or(Ok(()), |t| t.may_write())
    }

    async fn written(&self, name: &ObjectName, acknowledges: bool) -> (Result<()>, Announced) {
        let mut announced = Announced::default();
        if let Some(telling) = self.cluster.telling() {
            self.cluster.overtakes(name);
            let write = telling.begin();
            let told = telling.written(&write, name, acknowledges).await;
            announced = Announced::until(write);
            match told {
                Ok(false) => {}
                Ok(true) => return (Ok(()), announced),
                Err(e) => return (Err(e), announced),
            }
        }
        self.cluster.written(name).await;
        (Ok(()), announced)
    }

    async fn found_changed(&self, name: &ObjectName) {
        self.cluster.written(name).await;
    }

    fn is_mapped(&self, bucket: &str) -> bool {
        self.inner.is_mapped(bucket)
    }

    fn provider(&self, bucket: &str) -> &'static str {
        self.inner.provider(bucket)
    }

    fn changed(&self, bucket: &str) {
        self.inner.changed(bucket);
    }

    async fn list(&self) -> Result<Vec<ListedBucket>> {
        self.inner.list().await
    }

    async fn create(&self, bucket: &str) -> Result<()> {
        self.inner.create(bucket).await
    }

    async fn remove(&self, bucket: &str) -> Result<()> {
        self.inner.remove(bucket).await
    }
}

/// A bucket of which other nodes have some. Only reads of bytes ask them.
pub(crate) struct ClusterOrigin {
    pub bucket: String,
    pub inner: Arc<dyn Origin>,
    pub cluster: Arc<Cluster>,
    /// Whether other nodes are asked only for what they have.
    pub as_owner: bool,
}

#[async_trait]
impl Origin for ClusterOrigin {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        read::get(self, key, request).await
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.inner.head(key).await
    }

    async fn current(&self, key: &str) -> Result<(ObjectMeta, u32)> {
        read::current(self, key).await
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        self.inner.list(request).await
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        self.inner.put(key, request, size, body).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(key).await
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        self.inner.copy(from, if_match, to, request).await
    }

    fn put_memory_bytes(&self, size: Option<u64>) -> u64 {
        self.inner.put_memory_bytes(size)
    }

    fn part_memory_bytes(&self, size: u64) -> u64 {
        self.inner.part_memory_bytes(size)
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.inner.s3()
    }

    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        self.inner.forward(request).await
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        self.inner.create_upload(key, request).await
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        self.inner
            .upload_part(key, upload, number, size, body)
            .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        self.inner.list_parts(key, upload, after, max).await
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        self.inner
            .complete_upload(key, upload, parts, condition)
            .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.inner.abort_upload(key, upload).await
    }
}
