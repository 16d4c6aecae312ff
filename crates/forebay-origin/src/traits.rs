//! The seam between the engine and remote buckets.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Attributes, Error, ObjectMeta, Result, limits};
use futures::stream::BoxStream;
use http::{HeaderMap, Method, StatusCode};
use std::{ops::Range, sync::Arc};

/// Bytes as they arrive, ended by `None` or by the first error.
pub type ByteStream = BoxStream<'static, Result<Bytes>>;

/// What a `get` asks for.
#[derive(Clone, Debug, Default)]
pub struct GetRequest {
    /// `None`: the whole object. The end may be past the object's end; the answer says what was
    /// sent.
    pub range: Option<Range<u64>>,
    /// Only if the object has this ETag; otherwise `PreconditionFailed`.
    pub if_match: Option<String>,
    /// Only if the object has another ETag; otherwise `NotModified`.
    pub if_none_match: Option<String>,
    /// What is known of the version that is read. Nodes of a cluster know bytes by it; buckets do
    /// without.
    pub version: Option<Arc<ObjectMeta>>,
    /// Whether the reader has had the bytes before these. If so, and the origin does not answer other
    /// requests, this one waits for its turn to ask, as the rest of a body that broke off does.
    pub continues: bool,
}

/// An object, or a part of it, being read.
pub struct GetResponse {
    /// Of the whole object: `meta.size` is its full size.
    pub meta: ObjectMeta,
    /// How long ago, in seconds, `meta` was known to be current. `None`: it is the version that was
    /// asked for, current or not. A bucket knows what is current: 0.
    pub age_secs: Option<u32>,
    /// The bytes that `body` yields, within the object.
    pub range: Range<u64>,
    /// Exactly the bytes of `range`, or an error before its end.
    pub body: ByteStream,
}

/// Conditions on a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PutCondition {
    /// Replaces whatever is there.
    #[default]
    Always,
    /// `If-None-Match: *`: only if no object exists; otherwise `PreconditionFailed`.
    IfAbsent,
    /// `If-Match`: only if the object has this ETag; otherwise `PreconditionFailed`.
    IfMatch(String),
}

/// What a write says besides its bytes.
#[derive(Clone, Debug, Default)]
pub struct PutRequest {
    /// What is kept with the object; a copy without any keeps those of its source.
    pub attributes: Attributes,
    /// What must hold for the write to happen.
    pub condition: PutCondition,
}

/// What a finished write made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutResponse {
    /// The ETag of the object that was made, with its quotes; `None` if the origin does not say.
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
    /// From the previous page.
    pub token: Option<String>,
    /// 1 to 1,000.
    pub max_keys: usize,
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The whole key, including the prefix of the request.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// With its quotes; `None` if the listing has none.
    pub etag: Option<String>,
    /// Milliseconds since the Unix epoch; 0 if the listing does not say.
    pub last_modified_ms: i64,
}

/// One bucket of a listing of buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedBucket {
    /// As clients see it.
    pub name: String,
    /// When it was made, in milliseconds since the Unix epoch; 0 if that is not known.
    pub created_ms: i64,
}

/// Entries and prefixes in the order of their UTF-8 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// Objects that are not rolled up.
    pub entries: Vec<ListEntry>,
    /// What keys were rolled up to; each ends in the delimiter.
    pub prefixes: Vec<String>,
    /// For the next page; `None` at the end.
    pub next_token: Option<String>,
}

/// A part of a multipart upload, as the origin acknowledged it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadedPart {
    /// From 1.
    pub number: u32,
    /// As the origin gave it; needed when the upload is completed.
    pub etag: String,
    /// Bytes. `None`: nobody here knows how many; the part came through another node, or before a
    /// restart.
    pub size: Option<u64>,
}

/// One part in a listing of those of an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPart {
    /// As it was acknowledged when it was uploaded.
    pub part: UploadedPart,
    /// Milliseconds since the Unix epoch; 0 if the origin does not say.
    pub last_modified_ms: i64,
}

/// One page of the parts of an upload, in ascending order of their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartsPage {
    /// Each number once.
    pub parts: Vec<ListedPart>,
    /// Whether there are more after these.
    pub is_truncated: bool,
}

impl PartsPage {
    /// The page of at most `max` parts that follows part `after`, of all `parts`.
    pub fn of(mut parts: Vec<ListedPart>, after: u32, max: usize) -> Self {
        parts.retain(|p| p.part.number > after);
        parts.sort_unstable_by_key(|p| p.part.number);
        let is_truncated = parts.len() > max;
        parts.truncate(max);
        PartsPage {
            parts,
            is_truncated,
        }
    }
}

/// Where a bucket is in an S3 service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Place {
    /// The same for buckets that share an endpoint and its credentials, and for no others.
    pub service: usize,
    /// The service's name for the bucket.
    pub bucket: String,
    /// What the keys of this origin begin with there; ends in `/` unless empty.
    pub prefix: String,
    /// The service's region: a request to create a bucket names it, unless it is `us-east-1`.
    pub region: String,
}

/// A request of the S3 service model, without its bucket and its signature.
pub struct ForwardRequest {
    /// `GET`, `PUT` and so on.
    pub method: Method,
    /// Empty for a request about the bucket.
    pub key: String,
    /// Decoded. None of them is part of a signature.
    pub query: Vec<(String, String)>,
    /// What goes to the service, without headers for signatures or the connection.
    pub headers: HeaderMap,
    /// What follows the headers.
    pub body: ForwardBody,
}

/// What a forwarded request carries.
pub enum ForwardBody {
    /// No body.
    Empty,
    /// Sent with its hash in the signature.
    Bytes(Bytes),
    /// A stream of a known length, in bytes, and the trailer that follows it.
    Stream(u64, ByteStream, Option<Trailer>),
}

/// A checksum that is known at the end of the body.
pub struct Trailer {
    /// `x-amz-checksum-crc32`.
    pub name: String,
    /// The length of its value.
    pub value_bytes: usize,
    /// The value, asked for after the last byte of the body.
    pub value: Box<dyn FnOnce() -> Result<String> + Send>,
}

impl PutCondition {
    /// The condition of a completion, which was given this one, of an upload that was `created`
    /// under another.
    pub(crate) fn or(self, created: PutCondition) -> PutCondition {
        match self {
            PutCondition::Always => created,
            given => given,
        }
    }
}

impl ForwardBody {
    /// The same, with its stream passed through `f`.
    pub(crate) fn map_stream(self, f: impl FnOnce(ByteStream) -> ByteStream) -> Self {
        match self {
            ForwardBody::Stream(length, body, trailer) => {
                ForwardBody::Stream(length, f(body), trailer)
            }
            other => other,
        }
    }
}

/// The service's answer.
pub struct ForwardResponse {
    /// Whatever it is: here an error of the service is an answer.
    pub status: StatusCode,
    /// As they came, including those of the connection.
    pub headers: HeaderMap,
    /// As it comes from the service.
    pub body: ByteStream,
}

/// One remote bucket.
#[async_trait]
pub trait Origin: Send + Sync + 'static {
    /// For people and logs: `s3://bucket at http://host:port`. Never holds a secret.
    fn describe(&self) -> String;

    /// Size, ETag, date and attributes of an object, without its bytes.
    async fn head(&self, key: &str) -> Result<ObjectMeta>;

    /// Which version of an object is current, and how many seconds ago that was known: in a cluster,
    /// other nodes may know it.
    ///
    /// # Errors
    /// As [`Origin::head`].
    async fn current(&self, key: &str) -> Result<(ObjectMeta, u32)> {
        Ok((self.head(key).await?, 0))
    }

    /// An object, or a part of it, under the conditions of the request.
    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse>;

    /// One page of keys; there are more as long as it has a `next_token`.
    async fn list(&self, request: ListRequest) -> Result<ListPage>;

    /// Whether anything can be written there at all; no request is made.
    ///
    /// # Errors
    /// `Unsupported`, for an origin that is only read.
    fn check_writable(&self) -> Result<()> {
        Ok(())
    }

    /// Writes one object. `size` is the length of the body if the client said it; a body that ends
    /// early or fails writes nothing.
    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse>;

    /// Removing an object that does not exist succeeds, as in S3.
    async fn delete(&self, key: &str) -> Result<()>;

    /// Copies within this bucket, at the origin. If `if_match` is given, copies that version of the
    /// source: `PreconditionFailed` if it has another by then. `Unsupported` if the origin cannot:
    /// the engine then reads and writes.
    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse>;

    /// Most memory that a [`put`](Origin::put) of so many bytes uses at a time.
    fn put_memory_bytes(&self, size: Option<u64>) -> u64 {
        size.unwrap_or(u64::MAX).min(limits::WRITE_BUFFER_MAX_BYTES)
    }

    /// The same for an [`upload_part`](Origin::upload_part).
    fn part_memory_bytes(&self, size: u64) -> u64 {
        size.min(limits::WRITE_BUFFER_MAX_BYTES)
    }

    /// Where this bucket is in an S3 service, if it is in one: then [`forward`](Origin::forward)
    /// sends requests there.
    fn s3(&self) -> Option<S3Place> {
        None
    }

    /// Sends a request of the S3 service model to the service under this node's credentials, and
    /// returns its answer, whatever it is.
    ///
    /// # Errors
    /// `Unsupported` if [`s3`](Origin::s3) is `None`; the service cannot be reached, or does not
    /// accept this node's credentials.
    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        let _ = request;
        Err(Error::unsupported(format!(
            "{} is not a bucket of an S3 service",
            self.describe()
        )))
    }

    /// Begins a multipart upload; the id is the origin's own and meaningful only to it.
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

    /// The parts that were uploaded so far, through whichever node: at most `max` (from 1), those after
    /// number `after`.
    ///
    /// # Errors
    /// `NotFound` if the origin does not know the upload, or has ended it; `Unsupported` if it cannot
    /// list parts.
    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let _ = (upload, after, max);
        Err(Error::unsupported(format!(
            "list the parts of an upload of {key:?} at {}: not offered there",
            self.describe()
        )))
    }

    /// Makes the object from `parts`, in their order. `condition` is what must hold then, unless it is
    /// `Always`: then what [`create_upload`](Origin::create_upload) was given does.
    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse>;

    /// Drops the parts of an upload that will not be completed.
    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()>;
}
