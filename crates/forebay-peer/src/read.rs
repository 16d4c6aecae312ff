//! A read through the cluster, source after source.
//!
//! A range is read unit by unit. For each the route says whom to ask; what one source does not have
//! or does not send is asked of the next one, from the byte where it stood. The last is the bucket.
//!
//! Invariant: the bytes are those of one version, without a gap, or there is an error.

use crate::{
    buckets::ClusterOrigin,
    cluster::Cluster,
    hedge::{Heard, race},
    link::Failure,
    message::{Version, What},
};
use forebay_cluster::{Ask, Source, Unit};
use forebay_core::{Error, ErrorKind, ObjectMeta, ObjectName, Result, request};
use forebay_engine::{ByteStream, Origin};
use forebay_origin::{GetRequest, GetResponse};
use futures::{StreamExt, TryStreamExt, stream};
use std::{collections::VecDeque, ops::Range, sync::Arc};

pub(crate) async fn get(
    origin: &ClusterOrigin,
    key: &str,
    request: GetRequest,
) -> Result<GetResponse> {
    match (&request.version, &request.range) {
        (Some(meta), Some(range)) => {
            let (meta, range) = (meta.clone(), range.clone());
            let mut rest = Rest::new(origin, key, meta, range)?;
            rest.of.continues = request.continues;
            // Its first bytes, or why there are none, are known before there is an answer.
            let first = rest.next().await?;
            let range = rest.range.clone();
            let is_current = rest.from_bucket && rest.left.is_empty();
            Ok(GetResponse {
                meta: (*rest.of.meta).clone(),
                age_secs: is_current.then_some(0),
                range,
                body: stream::iter(first.map(Ok))
                    .chain(rest.into_stream())
                    .boxed(),
            })
        }
        (None, Some(range)) if request.if_match.is_none() && request.if_none_match.is_none() => {
            bytes_of_current(origin, key, range.clone(), &request).await
        }
        _ => origin.inner.get(key, request).await,
    }
}

/// What is told of the current version of an object, and the first of the bytes that are wanted of
/// it, which end at this byte.
struct Told {
    meta: ObjectMeta,
    age_secs: u32,
    body: ByteStream,
    range: Range<u64>,
}

/// The current version, and those of these bytes that it has.
async fn bytes_of_current(
    origin: &ClusterOrigin,
    key: &str,
    range: Range<u64>,
    request: &GetRequest,
) -> Result<GetResponse> {
    let name = ObjectName::new(origin.bucket.as_str(), key)?;
    let unit = Unit::at(name.hash128(), 0);
    let of_unit = match range.start < unit.end() {
        true => range.start..range.end.min(unit.end()),
        false => 0..0,
    };
    let at_bucket = is_for_the_bucket(origin, &name, range.start).then_some(request);
    let told = ask_home(origin, &name, of_unit, at_bucket).await?;
    let Told { meta, age_secs, .. } = told;
    let asked = range.start.min(meta.size)..range.end.min(meta.size);
    if asked.is_empty() && meta.size > 0 {
        return Err(Error::range_not_satisfiable(format!(
            "{name}: bytes {range:?} were requested, but it has {} bytes",
            meta.size
        )));
    }
    let mut rest = Rest::new(origin, key, Arc::new(meta), asked)?;
    if !told.range.is_empty() && told.range.start == rest.left.start {
        rest.take(told.body, told.range.end);
    }
    let meta = (*rest.of.meta).clone();
    let range = rest.range.clone();
    Ok(GetResponse {
        meta,
        age_secs: Some(age_secs),
        range,
        body: rest.into_stream(),
    })
}

/// Which version is current, and how many seconds ago that was known.
pub(crate) async fn current(origin: &ClusterOrigin, key: &str) -> Result<(ObjectMeta, u32)> {
    let name = ObjectName::new(origin.bucket.as_str(), key)?;
    let told = ask_home(origin, &name, 0..0, None).await?;
    Ok((told.meta, told.age_secs))
}

/// Whether bytes from here on, whose version nobody knows, come with it from the bucket at once:
/// those of the head's own unit, and those that nobody else is asked for.
fn is_for_the_bucket(origin: &ClusterOrigin, name: &ObjectName, at: u64) -> bool {
    at < Unit::at(name.hash128(), 0).end() || {
        let route = origin.cluster.route_of_bytes(name, at, origin.as_owner);
        matches!(route.sources.first(), None | Some(Source::Origin))
    }
}

/// What came of asking one source for the current version.
enum Tells {
    Told(Box<Told>),
    /// The next one is to be asked.
    Next,
    /// Only the bucket is to be asked.
    Bucket,
    Fails(Error),
}

/// Asks the home of a name which version is current, and for bytes of its first unit. The home itself
/// asks the one who was it before, and those who keep copies: what they know to be fresh is fresh.
/// (Those before it may not have been told what was written since.) The last is the bucket, which gets
/// this request, or is asked for the version alone.
async fn ask_home(
    origin: &ClusterOrigin,
    name: &ObjectName,
    wanted: Range<u64>,
    at_bucket: Option<&GetRequest>,
) -> Result<Told> {
    let route = origin.cluster.route(name, 0, origin.as_owner);
    let keepers = origin.cluster.keepers(name, 0);
    let (mut sources, mut asks_former) = (VecDeque::new(), true);
    for source in route.sources {
        if let Source::Peer(node, Ask::LocalOnly) = source {
            let is_keeper = keepers.contains(&node);
            if !asks_former && !is_keeper {
                continue;
            }
            let may_be_old = match is_keeper {
                true => origin.cluster.may_be_old_at_keepers(name),
                false => origin.cluster.is_overtaken(name),
            };
            if may_be_old {
                break;
            }
            asks_former &= is_keeper;
        }
        sources.push_back(source);
    }
    sources.retain(|source| *source != Source::Origin);
    sources.push_back(Source::Origin);
    while let Some(source) = sources.pop_front() {
        let heard = Heard::default();
        let first = ask_one(
            origin,
            name,
            source,
            wanted.clone(),
            (at_bucket, heard.clone()),
        );
        let peer = match source {
            Source::Peer(node, _) => origin.cluster.peer(node),
            Source::Origin => None,
        };
        let tells = match (peer, sources.front().copied()) {
            (Some((peer, _)), Some(next)) => {
                let second = || {
                    let not_heard = Heard::default();
                    ask_one(origin, name, next, wanted.clone(), (at_bucket, not_heard))
                };
                let hedges = (origin.cluster.hedges(), &peer, &heard);
                let is_good = |tells: &Tells| matches!(tells, Tells::Told(_));
                race(hedges, first, second, is_good).await.0
            }
            _ => first.await,
        };
        match tells {
            Tells::Told(told) => return Ok(*told),
            Tells::Next => {}
            Tells::Bucket => sources.retain(|source| *source == Source::Origin),
            Tells::Fails(e) => return Err(e),
        }
    }
    Err(Error::internal(format!("{name}: the bucket was not asked")))
}

async fn ask_one(
    origin: &ClusterOrigin,
    name: &ObjectName,
    source: Source,
    range: Range<u64>,
    (at_bucket, heard): (Option<&GetRequest>, Heard),
) -> Tells {
    let (node, what) = match source {
        Source::Peer(node, Ask::OwnerFill) => (node, What::Current { range }),
        Source::Peer(node, Ask::LocalOnly) => (node, What::CurrentHere { range }),
        Source::Origin => {
            let told = async {
                Ok(match at_bucket {
                    Some(request) => {
                        let response = origin.inner.get(name.key(), request.clone()).await?;
                        Told {
                            meta: response.meta,
                            age_secs: response.age_secs.unwrap_or_default(),
                            body: response.body,
                            range: response.range,
                        }
                    }
                    None => Told {
                        meta: origin.inner.head(name.key()).await?,
                        age_secs: 0,
                        body: stream::empty().boxed(),
                        range: 0..0,
                    },
                })
            };
            return told
                .await
                .map_or_else(Tells::Fails, |told| Tells::Told(Box::new(told)));
        }
    };
    let answer = origin.cluster.ask_and_hear(node, name, what, heard).await;
    let (found, body) = match answer {
        Ok(Some(answer)) => answer,
        Ok(None) => return Tells::Next,
        Err(Failure::Refused(e)) if is_an_answer(&e) => return Tells::Fails(e),
        Err(Failure::Refused(e)) if is_of_the_bucket(&e) => return Tells::Bucket,
        Err(Failure::Refused(e) | Failure::Silent(e)) => {
            tracing::debug!(id = request::current().as_deref(), object = %name, error = %e,
                "a node did not answer: the next is asked");
            return Tells::Next;
        }
    };
    let Some((meta, age_secs)) = found.current else {
        return Tells::Next;
    };
    if found.hot {
        origin.cluster.learns_hot(Unit::at(name.hash128(), 0));
    }
    match begun(body).await {
        Ok(body) => Tells::Told(Box::new(Told {
            meta,
            age_secs,
            body,
            range: found.range,
        })),
        Err(e) if is_an_answer(&e) => Tells::Fails(e),
        Err(_) => Tells::Next,
    }
}

/// The same bytes, of which the first are here.
async fn begun(mut body: ByteStream) -> Result<ByteStream> {
    let first = body.try_next().await?;
    Ok(stream::iter(first.map(Ok)).chain(body).boxed())
}

/// Whether an error says something of the object, and not of the node that tells it.
pub(crate) fn is_an_answer(e: &Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::NotFound
            | ErrorKind::VersionChanged
            | ErrorKind::PreconditionFailed
            | ErrorKind::RangeNotSatisfiable
    )
}

/// Whether the bucket failed, as it probably would for other nodes too.
fn is_of_the_bucket(e: &Error) -> bool {
    matches!(e.kind(), ErrorKind::OriginUnavailable | ErrorKind::Timeout)
}

/// What came of asking one source for bytes.
enum Opened {
    /// They come, from the bucket or not.
    Body(ByteStream, bool),
    /// It does not have them, or does not send them.
    Nothing,
    /// The bucket failed there, as it probably would for others who ask it.
    BucketFails,
    /// Nobody else is to be asked.
    Fails(Error),
}

/// One version of an object, and where it may be read.
struct OneVersion {
    inner: Arc<dyn Origin>,
    cluster: Arc<Cluster>,
    name: ObjectName,
    meta: Arc<ObjectMeta>,
    /// As the reader's request says, and once bytes have come ([`GetRequest::continues`]).
    continues: bool,
}

/// What remains to be read of one version.
struct Rest {
    of: OneVersion,
    as_owner: bool,
    range: Range<u64>,
    left: Range<u64>,
    /// Who is still to be asked for what is left of the part; `None`: the route is to be asked for.
    sources: Option<VecDeque<Source>>,
    /// The bytes that are asked for together end here.
    part_end: u64,
    body: Option<ByteStream>,
    /// All bytes so far came from the bucket, which knows that the version is current.
    from_bucket: bool,
}

impl Rest {
    fn new(
        origin: &ClusterOrigin,
        key: &str,
        meta: Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Self> {
        Ok(Rest {
            of: OneVersion {
                inner: origin.inner.clone(),
                cluster: origin.cluster.clone(),
                name: ObjectName::new(origin.bucket.as_str(), key)?,
                meta,
                continues: false,
            },
            as_owner: origin.as_owner,
            part_end: range.start,
            left: range.clone(),
            range,
            sources: None,
            body: None,
            from_bucket: true,
        })
    }

    /// Bytes up to `end` that come already.
    fn take(&mut self, body: ByteStream, end: u64) {
        self.part_end = end.min(self.left.end);
        // If they break off, the route is asked for.
        (self.body, self.from_bucket) = (Some(body), false);
    }

    fn into_stream(self) -> ByteStream {
        stream::try_unfold(self, |mut rest| async move {
            Ok(rest.next().await?.map(|piece| (piece, rest)))
        })
        .boxed()
    }

    async fn next(&mut self) -> Result<Option<bytes::Bytes>> {
        loop {
            if self.left.is_empty() {
                return Ok(None);
            }
            if self.left.start >= self.part_end {
                (self.body, self.sources) = (None, None);
            }
            let Some(body) = &mut self.body else {
                self.ask_next().await?;
                continue;
            };
            match body.try_next().await {
                Ok(Some(piece)) => {
                    let most = self.part_end - self.left.start;
                    let piece = match piece.len() as u64 > most {
                        true => piece.slice(..most as usize),
                        false => piece,
                    };
                    self.left.start += piece.len() as u64;
                    self.of.continues = true;
                    return Ok(Some(piece));
                }
                Ok(None) => self.body = None,
                Err(e) if self.is_last() || is_an_answer(&e) => return Err(e),
                Err(e) => {
                    tracing::debug!(id = request::current().as_deref(), object = %self.of.name,
                        error = %e.describe(), "bytes broke off: the next source is asked for the \
                        rest");
                    self.body = None;
                }
            }
        }
    }

    /// Whether nobody else can be asked.
    fn is_last(&self) -> bool {
        self.sources.as_ref().is_some_and(VecDeque::is_empty)
    }

    /// Whom to ask for the bytes from here on.
    fn plan(&mut self) -> VecDeque<Source> {
        let unit = Unit::at(self.of.name.hash128(), self.left.start);
        let sources = self.sources_at(self.left.start);
        self.part_end = unit.end().min(self.left.end);
        // What only the bucket has is asked of it at once.
        while sources.len() == 1 && self.part_end < self.left.end {
            let next = Unit::at(self.of.name.hash128(), self.part_end);
            if self.sources_at(self.part_end) != sources {
                break;
            }
            self.part_end = next.end().min(self.left.end);
        }
        sources
    }

    fn sources_at(&self, at: u64) -> VecDeque<Source> {
        let route = self
            .of
            .cluster
            .route_of_bytes(&self.of.name, at, self.as_owner);
        route.sources.into()
    }

    /// Asks the next source for what is left of the part; if it is late, the one after it as well.
    async fn ask_next(&mut self) -> Result<()> {
        let mut sources = match self.sources.take() {
            Some(sources) => sources,
            None => self.plan(),
        };
        let range = self.left.start..self.part_end;
        let Some(source) = sources.pop_front() else {
            self.sources = Some(sources);
            return Err(Error::origin_unavailable(format!(
                "{}: nobody sent the bytes {range:?}",
                self.of.name
            )));
        };
        let heard = Heard::default();
        let first = self.of.open(source, range.clone(), heard.clone());
        let peer = match source {
            Source::Peer(node, _) => self.of.cluster.peer(node),
            Source::Origin => None,
        };
        let opened = match (peer, sources.front().copied()) {
            (Some((peer, _)), Some(next)) => {
                let second = || self.of.open(next, range.clone(), Heard::default());
                let is_good = |opened: &Opened| matches!(opened, Opened::Body(..));
                let hedges = (self.of.cluster.hedges(), &peer, &heard);
                let (opened, is_second) = race(hedges, first, second, is_good).await;
                if is_second {
                    // If that breaks off, the late one may have the rest.
                    sources.pop_front();
                    sources.push_back(source);
                }
                opened
            }
            _ => first.await,
        };
        match opened {
            Opened::Body(body, of_bucket) => {
                self.body = Some(body);
                self.from_bucket &= of_bucket;
            }
            Opened::Nothing => {}
            Opened::BucketFails => {
                sources.retain(|s| !matches!(s, Source::Peer(_, Ask::OwnerFill)));
            }
            Opened::Fails(e) => {
                self.sources = Some(sources);
                return Err(e);
            }
        }
        self.sources = Some(sources);
        Ok(())
    }
}

impl OneVersion {
    /// Asks one source. Its first bytes are here when this returns.
    async fn open(&self, source: Source, range: Range<u64>, heard: Heard) -> Opened {
        let version = || Version::of(&self.meta);
        let wanted = range.clone();
        let (node, what) = match source {
            Source::Peer(node, Ask::LocalOnly) => {
                let version = version();
                (node, What::Here { version, range })
            }
            Source::Peer(node, Ask::OwnerFill) => {
                let version = version();
                (node, What::Fetch { version, range })
            }
            Source::Origin => {
                let body = self.open_at_bucket(range).await;
                return body.map_or_else(Opened::Fails, |body| Opened::Body(body, true));
            }
        };
        let answer = self.cluster.ask_and_hear(node, &self.name, what, heard);
        match answer.await {
            Ok(Some((found, body))) if found.range == wanted => {
                if found.hot {
                    let unit = Unit::at(self.name.hash128(), wanted.start);
                    self.cluster.learns_hot(unit);
                }
                match begun(body).await {
                    Ok(body) => Opened::Body(body, false),
                    Err(e) if is_an_answer(&e) => Opened::Fails(e),
                    Err(e) => {
                        tracing::debug!(id = request::current().as_deref(), object = %self.name,
                            error = %e.describe(), "a node did not send: the next is asked");
                        Opened::Nothing
                    }
                }
            }
            Ok(_) => Opened::Nothing,
            Err(Failure::Refused(e)) if is_an_answer(&e) => Opened::Fails(e),
            Err(Failure::Refused(e)) => {
                tracing::debug!(id = request::current().as_deref(), object = %self.name, error = %e,
                    "a node did not send: the next is asked");
                match is_of_the_bucket(&e) {
                    true => Opened::BucketFails,
                    false => Opened::Nothing,
                }
            }
            Err(Failure::Silent(_)) => Opened::Nothing,
        }
    }

    async fn open_at_bucket(&self, range: Range<u64>) -> Result<ByteStream> {
        let request = GetRequest {
            range: Some(range.clone()),
            if_match: self.meta.etag.clone(),
            continues: self.continues,
            ..GetRequest::default()
        };
        let response = self.inner.get(self.name.key(), request).await;
        let response = response.map_err(|e| self.changed(e))?;
        if response.meta.version() != self.meta.version() {
            return Err(Error::version_changed(format!(
                "{} changed at the origin while it was being read",
                self.name
            ))
            .hint("read it again to get the new version"));
        }
        if response.range != range {
            return Err(Error::origin_unavailable(format!(
                "{}: the origin sent bytes {:?}, but {range:?} were requested",
                self.name, response.range
            )));
        }
        Ok(response.body)
    }

    /// What an error of the bucket means for a version that was there.
    fn changed(&self, e: Error) -> Error {
        match e.kind() {
            ErrorKind::PreconditionFailed
            | ErrorKind::NotFound
            | ErrorKind::RangeNotSatisfiable => Error::version_changed(format!(
                "{} changed at the origin while it was being read",
                self.name
            ))
            .hint("read it again to get the new version")
            .caused_by(e),
            _ => e,
        }
    }
}
