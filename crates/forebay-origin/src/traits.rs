//! The seam between the engine and remote buckets.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Attributes, ObjectMeta, Result};
use futures::stream::BoxStream;
use std::ops::Range;

/// Bytes as they arrive, ended by `None` or by the first error.
pub type ByteStream = BoxStream<'static, Result<Bytes>>;

/// What a `get` asks for.
#[derive(Clone, Debug, Default)]
pub struct GetRequest {
    /// `None`: the whole object. The end may lie past the object's end; the answer says what was
    /// sent.
    pub range: Option<Range<u64>>,
    /// Only if the object has this ETag; otherwise `PreconditionFailed`.
    pub if_match: Option<String>,
    /// Only if the object has another ETag; otherwise `NotModified`.
    pub if_none_match: Option<String>,
}

/// An object, or a part of it, on its way.
pub struct GetResponse {
    /// Of the whole object: `meta.size` is its full size.
    pub meta: ObjectMeta,
    /// The bytes that `body` yields, within the object.
    pub range: Range<u64>,
    pub body: ByteStream,
}

/// Conditions on a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PutCondition {
    #[default]
    Always,
    /// `If-None-Match: *`: only if no object is there; otherwise `PreconditionFailed`.
    IfAbsent,
    /// `If-Match`: only if the object has this ETag; otherwise `PreconditionFailed`.
    IfMatch(String),
}

#[derive(Clone, Debug, Default)]
pub struct PutRequest {
    pub attributes: Attributes,
    pub condition: PutCondition,
}

/// What a finished write made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutResponse {
    pub etag: Option<String>,
}

/// One page of a listing.
#[derive(Clone, Debug, Default)]
pub struct ListRequest {
    /// A string prefix of keys, not a folder: `a/b` matches `a/bc`.
    pub prefix: String,
    /// Usually `/`; keys that hold it after the prefix are rolled up into `prefixes`.
    pub delimiter: Option<String>,
    /// Only keys greater than this one (ignored when `token` is given).
    pub start_after: Option<String>,
    /// From the page before.
    pub token: Option<String>,
    /// 1 to 1,000.
    pub max_keys: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    pub key: String,
    pub size: u64,
    pub etag: Option<String>,
    pub last_modified_ms: i64,
}

/// Entries and prefixes in the order of their UTF-8 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    pub entries: Vec<ListEntry>,
    pub prefixes: Vec<String>,
    /// For the next page; `None` at the end.
    pub next_token: Option<String>,
}

/// A part of a multipart upload, as the origin acknowledged it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadedPart {
    /// From 1.
    pub number: u32,
    pub etag: String,
    pub size: u64,
}

/// One remote bucket.
#[async_trait]
pub trait Origin: Send + Sync + 'static {
    /// For people and logs: `s3://bucket at http://host:port`. Never holds a secret.
    fn describe(&self) -> String;

    async fn head(&self, key: &str) -> Result<ObjectMeta>;

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse>;

    async fn list(&self, request: ListRequest) -> Result<ListPage>;

    /// Writes one object. `size` is the length of the body where the client said it; a body that
    /// ends early or fails writes nothing.
    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse>;

    /// Removing an object that is not there succeeds, as in S3.
    async fn delete(&self, key: &str) -> Result<()>;

    /// Within this bucket, on the origin's side. `Unsupported` where the origin cannot: the engine
    /// then reads and writes.
    async fn copy(&self, from: &str, to: &str, request: PutRequest) -> Result<PutResponse>;

    /// Begins a multipart upload; the id is the origin's own and means something to it alone.
    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String>;

    /// Stores part `number` (from 1); parts may come in any order, at the same time, and again.
    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart>;

    /// Makes the object of `parts`, in their order.
    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
    ) -> Result<PutResponse>;

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()>;
}
