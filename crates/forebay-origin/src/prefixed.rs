//! Part of a bucket as a bucket: `s3://bucket/prefix`. Keys gain the prefix on the way out and lose
//! it on the way back.

use crate::{
    ByteStream, ForwardRequest, ForwardResponse, GetRequest, GetResponse, ListPage, ListRequest,
    Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place, UploadedPart,
};
use async_trait::async_trait;
use forebay_core::{Error, ObjectMeta, Result};
use std::sync::Arc;

/// The keys of an origin that begin with a prefix, without it.
pub struct Prefixed {
    inner: Arc<dyn Origin>,
    /// Ends in `/`.
    prefix: String,
}

impl Prefixed {
    /// `prefix` has no `/` at its ends; if it is empty, returns the origin itself.
    pub fn wrap(inner: Arc<dyn Origin>, prefix: &str) -> Arc<dyn Origin> {
        if prefix.is_empty() {
            return inner;
        }
        Arc::new(Self {
            inner,
            prefix: format!("{prefix}/"),
        })
    }

    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn cut(&self, name: String) -> Result<String> {
        match name.strip_prefix(&self.prefix) {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(Error::corrupt(format!(
                "{} lists {name:?}, which does not begin with {:?}",
                self.inner.describe(),
                self.prefix
            ))),
        }
    }
}

#[async_trait]
impl Origin for Prefixed {
    fn describe(&self) -> String {
        format!("{} under {}", self.inner.describe(), self.prefix)
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.inner.head(&self.full(key)).await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        self.inner.get(&self.full(key), request).await
    }

    async fn list(&self, mut request: ListRequest) -> Result<ListPage> {
        request.prefix = self.full(&request.prefix);
        request.start_after = Some(self.full(request.start_after.as_deref().unwrap_or_default()));
        let mut page = self.inner.list(request).await?;
        for entry in &mut page.entries {
            entry.key = self.cut(std::mem::take(&mut entry.key))?;
        }
        // The folder's own marker has no name here.
        page.entries.retain(|e| !e.key.is_empty());
        page.prefixes = page
            .prefixes
            .into_iter()
            .map(|p| self.cut(p))
            .collect::<Result<_>>()?;
        Ok(page)
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        self.inner.put(&self.full(key), request, size, body).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(&self.full(key)).await
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        self.inner
            .copy(&self.full(from), if_match, &self.full(to), request)
            .await
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        let place = self.inner.s3()?;
        Some(S3Place {
            prefix: format!("{}{}", place.prefix, self.prefix),
            ..place
        })
    }

    /// Only requests about one object: requests about the bucket would reach beyond its prefix.
    async fn forward(&self, mut request: ForwardRequest) -> Result<ForwardResponse> {
        if request.key.is_empty() {
            return Err(Error::unsupported(format!(
                "{} cannot pass on a request about its bucket",
                self.describe()
            ))
            .hint("map the bucket without a prefix, or send the request to the origin"));
        }
        request.key = self.full(&request.key);
        self.inner.forward(request).await
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        self.inner.create_upload(&self.full(key), request).await
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
            .upload_part(&self.full(key), upload, number, size, body)
            .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let key = self.full(key);
        self.inner.list_parts(&key, upload, after, max).await
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        self.inner
            .complete_upload(&self.full(key), upload, parts, condition)
            .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.inner.abort_upload(&self.full(key), upload).await
    }
}
