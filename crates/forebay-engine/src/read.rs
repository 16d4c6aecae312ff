//! Reading an object: heads, ranges, conditions, and the body as a stream.
//!
//! Invariant: a body yields exactly the bytes of its announced range, all of one version, or ends
//! with an error.

use crate::{
    Engine,
    fill::Source,
    resolve::{Currency, Resolved},
    sequential::Sequential,
    stats::add,
};
use forebay_core::{
    ByteRange, CacheStatus, Error, ErrorKind, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES,
};
use forebay_origin::{ByteStream, GetRequest};
use futures::{StreamExt, TryStreamExt, stream};
use std::{fmt, ops::Range, sync::Arc};

/// How often a read begins anew when the object changes before its first byte is sent.
const FRESH_STARTS: u32 = 3;
/// What [`Engine::begin`] brings: while it arrives, the request for more is on its way.
const BEGIN_BYTES: u64 = 2 * CHUNK_BYTES;

/// Conditions of a read, as the header values that clients send. RFC 9110, section 13.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// `If-Match`: a list of ETags, one of which the object must have, or `*`; weak ones never
    /// match.
    pub if_match: Option<String>,
    /// `If-None-Match`: a list of ETags that the client has, or `*`; a match is `NotModified`.
    pub if_none_match: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub if_modified_since_ms: Option<i64>,
    /// Milliseconds since the Unix epoch.
    pub if_unmodified_since_ms: Option<i64>,
}

impl Conditions {
    /// Checks in the order of RFC 9110, section 13.2.2.
    pub fn check(&self, meta: &ObjectMeta) -> Result<()> {
        // HTTP dates have whole seconds.
        let modified = meta.last_modified_ms.div_euclid(1000);
        let failed = |what: &str| {
            Err(Error::new(
                ErrorKind::PreconditionFailed,
                format!("{what} does not hold"),
            ))
        };
        if let Some(wanted) = &self.if_match {
            if !matches_etag(wanted, meta, false) {
                return failed("If-Match");
            }
        } else if self
            .if_unmodified_since_ms
            .is_some_and(|t| modified > t.div_euclid(1000))
        {
            return failed("If-Unmodified-Since");
        }
        let not_modified = Error::new(ErrorKind::NotModified, "not modified");
        if let Some(known) = &self.if_none_match {
            if matches_etag(known, meta, true) {
                return Err(not_modified);
            }
        } else if self
            .if_modified_since_ms
            .is_some_and(|t| modified <= t.div_euclid(1000))
        {
            return Err(not_modified);
        }
        Ok(())
    }

    /// As [`check`](Self::check), and an error of kind [`ErrorKind::NotModified`] is caused by
    /// [`Unmodified`].
    pub(crate) fn check_read(&self, meta: &Arc<ObjectMeta>, cache: CacheStatus) -> Result<()> {
        self.check(meta).map_err(|e| match e.kind() {
            ErrorKind::NotModified => e.caused_by(Unmodified {
                meta: meta.clone(),
                cache,
            }),
            _ => e,
        })
    }
}

/// The version that a client has already: the cause of an error of kind
/// [`ErrorKind::NotModified`], for answers that name it.
#[derive(Debug)]
pub struct Unmodified {
    /// The object that was compared.
    pub meta: Arc<ObjectMeta>,
    /// Where it came from.
    pub cache: CacheStatus,
}

impl Unmodified {
    /// What an error of the engine says that the client has.
    pub fn of(error: &Error) -> Option<&Unmodified> {
        std::error::Error::source(error)?.downcast_ref()
    }
}

impl fmt::Display for Unmodified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the client has this version")
    }
}

impl std::error::Error for Unmodified {}

/// Whether a header's list of ETags holds this one. Quotes may be missing: some clients omit them.
fn matches_etag(header: &str, meta: &ObjectMeta, weak: bool) -> bool {
    if header.trim() == "*" {
        return true;
    }
    let bare = |tag: &str| -> Option<String> {
        let tag = tag.trim();
        let tag = match tag.strip_prefix("W/") {
            Some(_) if !weak => return None,
            Some(tag) => tag,
            None => tag,
        };
        Some(tag.trim_matches('"').to_owned())
    };
    let etag = meta.etag.as_deref().and_then(bare);
    header
        .split(',')
        .filter_map(bare)
        .any(|tag| etag.as_ref() == Some(&tag) || meta.matches_made_etag(&tag))
}

/// How to answer a read or a head request. The default: by the bucket's rule, unconditionally.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// What the object's version must satisfy for the read to go ahead.
    pub conditions: Conditions,
    /// Ask the origin and keep nothing. A member of an archive is found through an index that is
    /// kept: for members this is the same as `latest`.
    pub bypass: bool,
    /// Ask the origin whether the cached version is current, whatever the bucket's freshness rule
    /// says, and keep its answer. The answer is never stale.
    pub latest: bool,
    /// What [`Engine::bring`] returned, if it was called for this read: the read then counts as
    /// that, not as a hit.
    pub brought: Option<CacheStatus>,
    /// For a read whose bytes may never be delivered: whoever delivers them counts it, with
    /// [`crate::EngineStats::count_read`].
    pub uncounted: bool,
}

impl ReadOptions {
    /// How current a cached version must be.
    pub(crate) fn currency(&self) -> Currency {
        match self.latest {
            true => Currency::Latest,
            false => Currency::ByRule,
        }
    }

    /// What a read with this answer counts as.
    pub fn counts_as(&self, read: CacheStatus) -> CacheStatus {
        self.brought
            .filter(|_| read == CacheStatus::Hit)
            .unwrap_or(read)
    }
}

/// What is known about an object.
#[derive(Clone, Debug)]
pub struct Head {
    /// Size, version and attributes of the current version.
    pub meta: Arc<ObjectMeta>,
    /// Whether the cache or the origin answered.
    pub cache: CacheStatus,
}

/// An object, or a range of it, being read.
pub struct Read {
    /// Size, version and attributes of the version that is read.
    pub meta: Arc<ObjectMeta>,
    /// The range of the object that `body` yields.
    pub range: Range<u64>,
    /// How the answer came to be: the value of `X-Cache`.
    pub cache: CacheStatus,
    /// The bytes of `range`, in order, all of one version.
    pub body: ByteStream,
}

impl Engine {
    /// The current version's head.
    ///
    /// # Errors
    /// `NotFound`, `PreconditionFailed`, `NotModified`, or what kept the origin from answering.
    pub async fn head(&self, name: &ObjectName, options: &ReadOptions) -> Result<Head> {
        let head = self.head_unconditional(name, options).await?;
        options.conditions.check_read(&head.meta, head.cache)?;
        Ok(head)
    }

    /// The latest version's metadata, from a request that also brings the first chunks: for callers
    /// that read on from there. What is cached stays, if it is current. Where nothing is kept, or
    /// another node fetches the bytes, only the metadata is asked for.
    ///
    /// # Errors
    /// `NotFound`, or what kept the origin from answering.
    pub async fn begin(&self, name: &ObjectName) -> Result<Arc<ObjectMeta>> {
        if !self.keeps_own(name) || self.asks_elsewhere(name, 0) {
            let bypass = ReadOptions {
                bypass: true,
                ..ReadOptions::default()
            };
            return Ok(self.head_unconditional(name, &bypass).await?.meta);
        }
        let first = 0..BEGIN_BYTES;
        Ok(self.resolve(name, first, Currency::Latest).await?.meta)
    }

    async fn head_unconditional(&self, name: &ObjectName, options: &ReadOptions) -> Result<Head> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        if options.bypass || self.store_for(name).is_none() {
            return Ok(Head {
                meta: Arc::new(origin.head(name.key()).await?),
                cache: CacheStatus::Bypass,
            });
        }
        let cached = self.cached(name).await?;
        if let Some(c) = &cached
            && !options.latest
            && self.is_fresh(name, c.validated_at_secs)
        {
            return Ok(Head {
                meta: c.meta.clone(),
                cache: CacheStatus::Hit,
            });
        }
        let asked = self.asks(name);
        if cached.is_some() {
            add(&self.stats().revalidations, 1);
        }
        let meta = match origin.head(name.key()).await {
            Ok(meta) => Arc::new(meta),
            Err(e) => {
                if e.kind() == ErrorKind::NotFound {
                    self.forget(name, Some(asked.generation)).await;
                }
                if options.latest {
                    return Err(e);
                }
                let stale = self.or_stale(name, e).await?;
                return Ok(Head {
                    meta: stale.meta,
                    cache: stale.status,
                });
            }
        };
        match cached {
            Some(c) if meta.names_version() && c.meta.version() == meta.version() => {
                self.revalidated(name, asked, &c.meta).await;
                Ok(Head {
                    meta: c.meta,
                    cache: CacheStatus::Revalidated,
                })
            }
            old => {
                if old.is_some() {
                    add(&self.stats().revalidations_changed, 1);
                }
                if meta.size > CHUNK_BYTES {
                    let elsewhere = self.asks_elsewhere(name, 0);
                    self.keep_head(name, asked, &meta, elsewhere).await?;
                } else if old.is_some() {
                    self.forget(name, Some(asked.generation)).await;
                }
                Ok(Head {
                    meta,
                    cache: CacheStatus::Miss,
                })
            }
        }
    }

    /// Reads an object or a range of it. Returns when the first bytes have arrived, so that a
    /// failure before them is an error here and not a cut body.
    ///
    /// # Errors
    /// `NotFound`, `RangeNotSatisfiable`, `PreconditionFailed`, `NotModified`, `PermissionDenied`,
    /// or what kept the origin from answering.
    pub async fn read(
        &self,
        name: &ObjectName,
        range: Option<ByteRange>,
        options: &ReadOptions,
    ) -> Result<Read> {
        let read = self.read_uncounted(name, range, options).await;
        match &read {
            _ if options.uncounted => {}
            Ok(read) => self.stats().count_read(options.counts_as(read.cache)),
            Err(e) if e.kind() == ErrorKind::NotModified => {}
            Err(_) => add(&self.stats().reads_failed, 1),
        }
        read
    }

    async fn read_uncounted(
        &self,
        name: &ObjectName,
        range: Option<ByteRange>,
        options: &ReadOptions,
    ) -> Result<Read> {
        if options.bypass || self.store_for(name).is_none() {
            return self.read_through(name, range, options).await;
        }
        let mut starts = 0;
        loop {
            let resolved = self.resolve_for(name, range, options.currency()).await?;
            options
                .conditions
                .check_read(&resolved.meta, resolved.status)?;
            let bytes = resolve_range(range, resolved.meta.size).map_err(|e| e.context(name))?;
            match self.open(name, resolved, bytes).await {
                Err(e) if e.kind() == ErrorKind::VersionChanged && starts < FRESH_STARTS => {
                    starts += 1
                }
                opened => return opened,
            }
        }
    }

    /// Resolves with a hint of what the range will need.
    pub(crate) async fn resolve_for(
        &self,
        name: &ObjectName,
        range: Option<ByteRange>,
        currency: Currency,
    ) -> Result<Resolved> {
        let want = match range {
            None => 0..u64::MAX,
            Some(ByteRange::From(a)) => a..u64::MAX,
            Some(ByteRange::Inclusive(a, b)) => a..b.saturating_add(1),
            // The end is known only with the size: fetch a head first and then the bytes, instead
            // of a first chunk that nobody wants.
            Some(ByteRange::Suffix(_)) => {
                let options = ReadOptions {
                    latest: currency == Currency::Latest,
                    ..ReadOptions::default()
                };
                let head = self.head_unconditional(name, &options).await?;
                if head.meta.size > CHUNK_BYTES {
                    return Ok(Resolved {
                        meta: head.meta,
                        at_secs: 0,
                        status: head.cache,
                        data: None,
                        passing: None,
                    });
                }
                0..head.meta.size
            }
        };
        self.resolve(name, want, currency).await
    }

    /// Opens `range` of a resolved version.
    pub(crate) async fn open(
        &self,
        name: &ObjectName,
        resolved: Resolved,
        range: Range<u64>,
    ) -> Result<Read> {
        let Resolved {
            meta,
            status,
            data,
            passing,
            ..
        } = resolved;
        let length = range.end - range.start;
        if let Some(data) = data {
            if status != CacheStatus::Miss {
                self.stats().from_cache(length);
            }
            let piece = data.slice(range.start as usize..range.end as usize);
            let body = stream::iter((!piece.is_empty()).then_some(Ok(piece))).boxed();
            return Ok(Read {
                meta,
                range,
                cache: status,
                body,
            });
        }
        if range.is_empty() {
            return Ok(Read {
                meta,
                range,
                cache: status,
                body: stream::empty().boxed(),
            });
        }
        // What the answer says about itself must hold for all its bytes, including those read
        // later.
        let here = status != CacheStatus::Miss && self.has_chunks(name, &meta, &range);
        if status == CacheStatus::Stale && !here {
            return Err(Error::origin_unavailable(format!(
                "{name}: the origin cannot be reached, and the cache does not have all of bytes \
                 {range:?}"
            ))
            .hint("try again when the origin answers"));
        }
        let mut pieces = Sequential::new(self.clone(), name.clone(), meta.clone(), range.clone());
        pieces.first = passing;
        let (first, source) = match pieces.next().await? {
            Some(piece) => piece,
            None => {
                return Err(Error::internal(format!(
                    "{name}: the origin sent none of the bytes {range:?}"
                )));
            }
        };
        let cache = if here && source == Source::Cache {
            status
        } else {
            CacheStatus::Miss
        };
        let body = stream::iter([Ok(first)])
            .chain(pieces.into_stream())
            .boxed();
        let body = if range == (0..meta.size) {
            self.index_in_passing(name, &meta, body)
        } else {
            body
        };
        Ok(Read {
            meta,
            range,
            cache,
            body,
        })
    }

    /// Bypasses the cache: one request, nothing kept.
    async fn read_through(
        &self,
        name: &ObjectName,
        range: Option<ByteRange>,
        options: &ReadOptions,
    ) -> Result<Read> {
        let origin = self.inner.buckets.origin_itself(name.bucket()).await?;
        let mut request = GetRequest::default();
        if let Some(range) = range {
            request.range = Some(match range {
                ByteRange::From(a) => a..u64::MAX,
                ByteRange::Inclusive(a, b) => a..b.saturating_add(1),
                ByteRange::Suffix(_) => {
                    let meta = origin.head(name.key()).await?;
                    request.if_match = meta.etag.clone();
                    range.resolve(meta.size).map_err(|e| e.context(name))?
                }
            });
        }
        let response = match origin.get(name.key(), request).await {
            // Conditions come before ranges (RFC 9110, section 13.2.1), but the origin was not told
            // about them.
            Err(e)
                if e.kind() == ErrorKind::RangeNotSatisfiable
                    && options.conditions != Conditions::default() =>
            {
                let meta = Arc::new(origin.head(name.key()).await?);
                options.conditions.check_read(&meta, CacheStatus::Bypass)?;
                return Err(e);
            }
            response => response?,
        };
        let meta = Arc::new(response.meta);
        options.conditions.check_read(&meta, CacheStatus::Bypass)?;
        let bytes = resolve_range(range, meta.size).map_err(|e| e.context(name))?;
        if bytes != response.range {
            return Err(Error::origin_unavailable(format!(
                "{name}: the origin sent bytes {:?}, but {bytes:?} were requested",
                response.range
            )));
        }
        let engine = self.clone();
        let body = response
            .body
            .inspect_ok(move |b| engine.stats().from_origin(b.len() as u64))
            .boxed();
        Ok(Read {
            meta,
            range: bytes,
            cache: CacheStatus::Bypass,
            body,
        })
    }
}

/// The bytes that a request names. A request without a range names no bytes of an empty object,
/// which is not an error.
pub(crate) fn resolve_range(range: Option<ByteRange>, size: u64) -> Result<Range<u64>> {
    match range {
        None => Ok(0..size),
        Some(range) => range.resolve(size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_follow_rfc_9110() {
        let meta = ObjectMeta {
            size: 1,
            etag: Some("\"a\"".into()),
            last_modified_ms: 10_500,
            attributes: Default::default(),
        };
        let kind = |c: Conditions| c.check(&meta).err().map(|e| e.kind());
        let c = Conditions::default;
        assert_eq!(
            kind(Conditions {
                if_match: Some("\"b\", \"a\"".into()),
                ..c()
            }),
            None
        );
        assert_eq!(
            kind(Conditions {
                if_match: Some("a".into()),
                ..c()
            }),
            None
        );
        assert_eq!(
            kind(Conditions {
                if_match: Some("W/\"a\"".into()),
                ..c()
            }),
            Some(ErrorKind::PreconditionFailed)
        );
        assert_eq!(
            kind(Conditions {
                if_none_match: Some("W/\"a\"".into()),
                ..c()
            }),
            Some(ErrorKind::NotModified)
        );
        assert_eq!(
            kind(Conditions {
                if_none_match: Some("*".into()),
                ..c()
            }),
            Some(ErrorKind::NotModified)
        );
        assert_eq!(
            kind(Conditions {
                if_modified_since_ms: Some(10_000),
                ..c()
            }),
            Some(ErrorKind::NotModified)
        );
        assert_eq!(
            kind(Conditions {
                if_unmodified_since_ms: Some(9_000),
                ..c()
            }),
            Some(ErrorKind::PreconditionFailed)
        );
        let both = Conditions {
            if_match: Some("*".into()),
            if_unmodified_since_ms: Some(0),
            ..c()
        };
        assert_eq!(kind(both), None, "If-Match outranks If-Unmodified-Since");
    }
}
