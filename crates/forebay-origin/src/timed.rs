//! An end to silence: a request without an answer, and a body without bytes, fail after the idle
//! timeout. What arrived, and what did not, is reported to the origin's [`Circuit`].
//!
//! Directly around the service, so that the clock runs only while the service works: a request's
//! wait for a place in the limiter, or its bytes' wait for their turn, is not the origin's silence.

use crate::{
    ByteStream, Circuit, ForwardRequest, ForwardResponse, GetRequest, GetResponse, ListPage,
    ListRequest, Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place, UploadedPart,
};
use async_trait::async_trait;
use forebay_core::{Error, ObjectMeta, Result};
use futures::{StreamExt, stream};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// An origin whose silence is limited.
pub struct Timed {
    inner: Arc<dyn Origin>,
    idle_timeout: Duration,
    circuit: Arc<Circuit>,
}

impl Timed {
    /// Ends whatever is silent for `idle_timeout`; tells `circuit` how each request went.
    pub fn new(inner: Arc<dyn Origin>, idle_timeout: Duration, circuit: Arc<Circuit>) -> Self {
        Self {
            inner,
            idle_timeout,
            circuit,
        }
    }

    /// A request every outcome of which says something about the service.
    async fn noted<T>(&self, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let begun = Instant::now();
        let result = request.await;
        match &result {
            Ok(_) => self.circuit.answered(),
            Err(e) => self.circuit.ended(begun, e, || self.describe()),
        }
        result
    }

    async fn timed<T>(
        &self,
        what: &str,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let bounded = async {
            match tokio::time::timeout(self.idle_timeout, request).await {
                Ok(result) => result,
                Err(_) => Err(Error::timeout(format!(
                    "{what}: {} did not answer within {:?}",
                    self.inner.describe(),
                    self.idle_timeout
                ))
                .hint("check the origin, or raise idle_timeout")),
            }
        };
        self.noted(bounded).await
    }

    /// A request with a client's body: its failures may be the client's.
    async fn written<T>(&self, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let result = request.await;
        if result.is_ok() {
            self.circuit.answered();
        }
        result
    }
}

/// A body in progress.
struct Body {
    inner: ByteStream,
    circuit: Arc<Circuit>,
    idle_timeout: Duration,
    origin: String,
    key: String,
}

impl Body {
    async fn next(&mut self) -> Option<Result<bytes::Bytes>> {
        let begun = Instant::now();
        let item = match tokio::time::timeout(self.idle_timeout, self.inner.next()).await {
            Ok(item) => item?,
            Err(_) => {
                self.inner = stream::empty().boxed();
                let what = format!(
                    "get {:?} at {}: nothing came for {:?}",
                    forebay_core::name::shorten(&self.key),
                    self.origin,
                    self.idle_timeout
                );
                Err(Error::timeout(what).hint("check the network, or raise idle_timeout"))
            }
        };
        match &item {
            Ok(_) => self.circuit.answered(),
            Err(e) => self.circuit.ended(begun, e, || self.origin.clone()),
        }
        Some(item)
    }
}

#[async_trait]
impl Origin for Timed {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.timed("head", self.inner.head(key)).await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let mut answer = self.timed("get", self.inner.get(key, request)).await?;
        let body = Body {
            inner: answer.body,
            circuit: self.circuit.clone(),
            idle_timeout: self.idle_timeout,
            origin: self.describe(),
            key: key.to_owned(),
        };
        answer.body = stream::unfold(
            body,
            |mut b| async move { b.next().await.map(|item| (item, b)) },
        )
        .fuse()
        .boxed();
        Ok(answer)
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        self.timed("list", self.inner.list(request)).await
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        self.written(self.inner.put(key, request, size, body)).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.timed("delete", self.inner.delete(key)).await
    }

    /// The origin may work for a long time on a large object before it answers.
    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        self.noted(self.inner.copy(from, if_match, to, request))
            .await
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.inner.s3()
    }

    /// The transport limits its silence; the body is the client's.
    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        let answer = self.inner.forward(request).await?;
        if !answer.status.is_server_error() {
            self.circuit.answered();
        }
        Ok(answer)
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        self.timed("create an upload", self.inner.create_upload(key, request))
            .await
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        self.written(self.inner.upload_part(key, upload, number, size, body))
            .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let listed = self.inner.list_parts(key, upload, after, max);
        self.timed("list the parts", listed).await
    }

    /// As for [`Timed::copy`](Origin::copy).
    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        self.noted(self.inner.complete_upload(key, upload, parts, condition))
            .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.timed("abort the upload", self.inner.abort_upload(key, upload))
            .await
    }
}
