//! Single objects: get, put, head, delete, and pages of listings, over the object API. There is no
//! Python in here.

use crate::{
    buffer,
    failure::{Class, Failure, Result},
    names::Name,
};
use forebay_client::{Answer, Call, Client};
use forebay_core::ByteRange;
use forebay_protocol::{
    BUCKETS_PATH,
    listing::{self, Bucket, ListMessage, ONE_LEVEL, Request},
    path::encode,
};
use http::{Method, StatusCode, header};

/// The longest answer that is read as one document.
pub const SHORT_ANSWER_MAX_BYTES: usize = 16 << 20;

/// Whether an answer broke off in the middle: another node may give all of it.
pub fn is_cut(failure: &Failure) -> bool {
    failure.class == Class::Truncated
}

/// The body of the answer to a question. If there are several nodes and it breaks off, another one
/// is asked.
pub async fn whole(node: &Client, call: &Call) -> Result<Vec<u8>> {
    let ask = || async {
        let mut answer = node.call(call).await?;
        let mut bytes = buffer::room(answer.length().unwrap_or(0))?;
        while let Some(piece) = answer.piece().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    };
    node.whole(ask, is_cut).await
}

/// A short answer to a question, as JSON; as [`whole`].
async fn json<T: serde::de::DeserializeOwned>(node: &Client, call: &Call) -> Result<T> {
    let ask = || async { Ok(node.call(call).await?.json().await?) };
    node.whole(ask, is_cut).await
}

/// What is known about an object.
#[derive(Clone, Debug, Default)]
pub struct Info {
    pub bucket: String,
    pub key: String,
    pub size: u64,
    pub etag: Option<String>,
    pub last_modified: Option<String>,
    /// `HIT`, `MISS`, `REVALIDATED`, `STALE` or `BYPASS`, as the node said.
    pub cache: Option<String>,
}

fn with_member(path: String, member: Option<&str>) -> String {
    match member {
        Some(member) => format!("{path}?archpath={}", encode(member)),
        None => path,
    }
}

/// The bytes of an object, a member of it, or a range of either; and its ETag.
pub async fn get(
    node: &Client,
    name: &Name,
    member: Option<&str>,
    range: Option<ByteRange>,
) -> Result<(Vec<u8>, Option<String>)> {
    let mut call = Call::new(Method::GET, with_member(name.path(), member));
    if let Some(range) = range {
        call = call.header(header::RANGE, format!("bytes={range}"));
    }
    let mut answer = node
        .call(&call)
        .await
        .map_err(|f| Failure::from(f).context(name))?;
    if range.is_some() && answer.status != StatusCode::PARTIAL_CONTENT {
        return Err(Failure::new(
            Class::ServerError,
            format!(
                "{name}: the node ignored the range and answered {}",
                answer.status
            ),
        ));
    }
    let length = answer.length();
    let mut bytes = buffer::room(length.unwrap_or(0))?;
    while let Some(piece) = answer
        .piece()
        .await
        .map_err(|f| Failure::from(f).context(name))?
    {
        bytes.extend_from_slice(&piece);
    }
    if length.is_some_and(|n| n != bytes.len() as u64) {
        return Err(Failure::truncated(format!(
            "{name}: only {} of {} bytes arrived",
            bytes.len(),
            length.unwrap_or(0)
        )));
    }
    Ok((bytes, etag(&answer)))
}

fn etag(answer: &Answer) -> Option<String> {
    answer.header("etag").map(str::to_owned)
}

pub async fn head(node: &Client, name: &Name) -> Result<Info> {
    let answer = node
        .call(&Call::new(Method::HEAD, name.path()))
        .await
        .map_err(|f| {
            let mut f = Failure::from(f);
            // The answer to HEAD has no body, and so no message.
            if f.class == Class::NotFound && f.request_id.is_some() {
                f.message = "no such object".into();
            }
            f.context(name)
        })?;
    Ok(Info {
        bucket: name.bucket.clone(),
        key: name.key.clone(),
        size: answer.length().ok_or_else(|| {
            Failure::new(
                Class::ServerError,
                format!("{name}: the node did not say its size"),
            )
        })?,
        etag: etag(&answer),
        last_modified: answer.header("last-modified").map(str::to_owned),
        cache: answer.header("x-cache").map(str::to_owned),
    })
}

/// What must hold for a write to happen.
#[derive(Clone, Debug, Default)]
pub enum Condition {
    #[default]
    Always,
    /// No object of this name exists.
    Absent,
    /// The object has this ETag.
    Is(String),
}

impl Condition {
    fn call(self, name: &Name) -> Call {
        let call = Call::new(Method::PUT, name.path());
        match self {
            Condition::Always => call,
            Condition::Absent => call.header(header::IF_NONE_MATCH, "*"),
            Condition::Is(etag) => call.header(header::IF_MATCH, etag),
        }
    }
}

/// Writes an object; returns its ETag if the node reports it.
pub async fn put(
    node: &Client,
    name: &Name,
    condition: Condition,
    body: bytes::Bytes,
) -> Result<Option<String>> {
    let call = Call {
        body,
        ..condition.call(name)
    };
    let mut answer = node
        .call(&call)
        .await
        .map_err(|f| Failure::from(f).context(name))?;
    answer.collect(SHORT_ANSWER_MAX_BYTES).await?;
    Ok(etag(&answer))
}

/// Writes an object whose bytes arrive piece by piece.
pub async fn upload(
    node: &Client,
    name: &Name,
    condition: Condition,
    length: Option<u64>,
    pieces: futures::stream::BoxStream<'static, std::io::Result<bytes::Bytes>>,
) -> Result<Option<String>> {
    let mut answer = node
        .upload(&condition.call(name), length, pieces)
        .await
        .map_err(|f| Failure::from(f).context(name))?;
    answer.collect(SHORT_ANSWER_MAX_BYTES).await?;
    Ok(etag(&answer))
}

pub async fn delete(node: &Client, name: &Name) -> Result<()> {
    let mut answer = node
        .call(&Call::new(Method::DELETE, name.path()))
        .await
        .map_err(|f| Failure::from(f).context(name))?;
    answer.collect(SHORT_ANSWER_MAX_BYTES).await?;
    Ok(())
}

/// One page of a listing.
#[derive(Default)]
pub struct Page {
    pub objects: Vec<Info>,
    /// Empty after the last page.
    pub token: String,
}

pub async fn list(
    node: &Client,
    bucket: &str,
    prefix: &str,
    token: &str,
    page_size: usize,
    recursive: bool,
) -> Result<Page> {
    let request = Request::page(ListMessage {
        prefix: prefix.to_owned(),
        pagesize: i64::try_from(page_size).unwrap_or(i64::MAX),
        continuation_token: token.to_owned(),
        props: "name,size".to_owned(),
        flags: if recursive { 0 } else { ONE_LEVEL }.into(),
        ..ListMessage::default()
    });
    let call = Call::new(Method::GET, format!("{BUCKETS_PATH}/{}", encode(bucket)))
        .json(request.json())
        .header(header::ACCEPT, "application/json");
    let page = json(node, &call).await;
    let page: listing::Page = page.map_err(|f| f.context(bucket))?;
    let objects = page.entries.into_iter().map(|e| Info {
        bucket: bucket.to_owned(),
        // AIStore leaves out a size of 0.
        size: e.size.unwrap_or(0),
        key: e.name,
        ..Info::default()
    });
    Ok(Page {
        objects: objects.collect(),
        token: page.continuation_token,
    })
}

pub async fn buckets(node: &Client) -> Result<Vec<String>> {
    let call = Call::new(Method::GET, BUCKETS_PATH)
        .json(Request::buckets().json())
        .header(header::ACCEPT, "application/json");
    let buckets: Vec<Bucket> = json(node, &call).await?;
    Ok(buckets.into_iter().map(|b| b.name).collect())
}
