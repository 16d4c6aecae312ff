//! An in-memory origin with counted requests and chosen faults, and an engine over it.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, ManualClock, MemoryBudget, ObjectMeta, ObjectName, Result, sync::Mutex,
};
use forebay_engine::{
    BucketRule, BucketRules, Engine, EngineConfig, FixedBuckets, Freshness, ReadOptions,
};
use forebay_origin::*;
use forebay_store::{DirConfig, Store, StoreConfig};
use futures::{StreamExt, TryStreamExt, stream};
use http::{HeaderMap, StatusCode};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::sync::{Notify, watch};

/// An origin with one bucket in memory. Public fields can be inspected and changed at any time.
#[derive(Default)]
pub struct MemoryOrigin {
    /// By key: the bytes and the metadata.
    pub objects: Mutex<BTreeMap<String, (Bytes, ObjectMeta)>>,
    /// The gets so far: key and range.
    pub gets: Mutex<Vec<(String, Option<Range<u64>>)>>,
    /// The ranges of the gets that continue a read.
    pub continued: Mutex<Vec<Range<u64>>>,
    /// The number of heads so far.
    pub heads: AtomicU64,
    /// Bytes of the bodies that were started so far, whether or not they were completed.
    pub bytes_out: AtomicU64,
    versions: AtomicU64,
    /// If set, each body breaks off after this many bytes. Bodies come in pieces of 100,000 bytes,
    /// and the piece that crosses the limit still comes whole.
    pub cut_bodies_after: Mutex<Option<usize>>,
    /// If set, each body that does not reach the end of the object stops after this many bytes
    /// until another request arrives.
    pub stall_bodies_after: Mutex<Option<usize>>,
    asked: watch::Sender<usize>,
    /// How long each get, head and put takes to be answered.
    pub latency: Mutex<Duration>,
    /// A write takes effect this long before the writer hears of it.
    pub acknowledges_after: Mutex<Duration>,
    /// While this says so, gets, heads and puts are not answered.
    pub holds_answers: watch::Sender<bool>,
    /// While this says so, writes take effect and their writers do not hear of it.
    pub holds_acknowledgements: watch::Sender<bool>,
    /// Of this key, no writer hears that its put or copy took effect.
    pub holds_acknowledgements_of: watch::Sender<Option<String>>,
    /// While this says so, puts that were sent whole, and parts, do not take effect.
    pub holds_effects: watch::Sender<bool>,
    /// Puts that were sent whole so far.
    pub sent_puts: AtomicU64,
    /// While set, gets, heads and puts fail as `OriginUnavailable`.
    pub down: AtomicBool,
    /// While set, written objects have a modification time but no ETag.
    pub without_etags: AtomicBool,
    /// Multipart uploads under way: by id (the key and a number), the parts by number.
    pub uploads: Mutex<BTreeMap<String, BTreeMap<u32, Bytes>>>,
    /// How many there were so far.
    pub uploads_begun: AtomicU64,
    /// Whether who asks may not abort them.
    pub refuses_aborts: AtomicBool,
    /// So many completions of uploads fail and change nothing.
    pub complete_fails: AtomicU64,
    /// Parts that were sent so far.
    pub parts: AtomicU64,
    /// Of each part that was begun, the upload, in this order.
    pub begun_parts: Mutex<Vec<String>>,
    /// After so many more parts, each part fails, until this is set again; `None`: none does.
    pub parts_left: Mutex<Option<u64>>,
    /// Whether whoever writes here may delete nothing.
    pub refuses_deletes: AtomicBool,
    /// After so many more deletes, each delete fails, until this is set again; `None`: none does.
    pub deletes_left: Mutex<Option<u64>>,
    /// Neither ETags nor modification times.
    pub without_versions: AtomicBool,
    /// The answer to a forwarded request begins at once, and ends when this says so.
    pub ends_answer: Arc<Notify>,
    /// Whether it says of itself that it is only read.
    pub read_only: AtomicBool,
}

impl MemoryOrigin {
    /// Puts a new version of an object in place at once, with its own ETag and time.
    pub fn set(&self, key: &str, data: impl Into<Bytes>) {
        let data = data.into();
        let version = self.versions.fetch_add(1, SeqCst) + 1;
        let nameless = self.without_versions.load(SeqCst);
        let etag =
            (!nameless && !self.without_etags.load(SeqCst)).then(|| format!("\"v{version}\""));
        let meta = ObjectMeta {
            size: data.len() as u64,
            etag,
            last_modified_ms: if nameless { 0 } else { version as i64 * 1000 },
            attributes: Default::default(),
        };
        self.objects.lock().insert(key.into(), (data, meta));
    }

    /// Removes an object at once.
    pub fn remove(&self, key: &str) {
        self.objects.lock().remove(key);
    }

    /// Gets and heads so far.
    pub fn requests(&self) -> usize {
        self.gets.lock().len() + self.heads.load(SeqCst) as usize
    }

    async fn answer(&self) -> Result<()> {
        let latency = *self.latency.lock();
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        until_released(&self.holds_answers).await;
        match self.down.load(SeqCst) {
            true => Err(Error::origin_unavailable("the origin is down")),
            false => Ok(()),
        }
    }

    async fn acknowledge(&self) {
        let late = *self.acknowledges_after.lock();
        if !late.is_zero() {
            tokio::time::sleep(late).await;
        }
        until_released(&self.holds_acknowledgements).await;
    }

    fn find(&self, key: &str) -> Result<(Bytes, ObjectMeta)> {
        self.objects
            .lock()
            .get(key)
            .cloned()
            .ok_or_else(|| Error::not_found(key.to_owned()))
    }
}

async fn until_released(holds: &watch::Sender<bool>) {
    let mut holds = holds.subscribe();
    let released = holds.wait_for(|holds| !holds).await;
    drop(released.expect("the origin is there"));
}

async fn until_another(holds: &watch::Sender<Option<String>>, key: &str) {
    let mut holds = holds.subscribe();
    let released = holds.wait_for(|held| held.as_deref() != Some(key)).await;
    drop(released.expect("the origin is there"));
}

#[async_trait]
impl Origin for MemoryOrigin {
    fn describe(&self) -> String {
        "memory".into()
    }

    async fn forward(&self, _: ForwardRequest) -> Result<ForwardResponse> {
        let ends = self.ends_answer.clone();
        let begun = stream::once(async { Ok(Bytes::from_static(b"  ")) });
        let ended = stream::once(async move {
            ends.notified().await;
            Ok(Bytes::from_static(b"<Done/>"))
        });
        Ok(ForwardResponse {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            body: begun.chain(ended).boxed(),
        })
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.heads.fetch_add(1, SeqCst);
        self.answer().await?;
        Ok(self.find(key)?.1)
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        self.gets.lock().push((key.into(), request.range.clone()));
        if request.continues {
            self.continued.lock().extend(request.range.clone());
        }
        self.asked.send_modify(|n| *n += 1);
        let mut asked = self.asked.subscribe();
        let so_far = *asked.borrow_and_update();
        self.answer().await?;
        let (data, meta) = self.find(key)?;
        if request.if_match.is_some() && request.if_match != meta.etag {
            return Err(Error::new(ErrorKind::PreconditionFailed, "changed"));
        }
        if request.if_none_match.is_some() && request.if_none_match == meta.etag {
            return Err(Error::new(ErrorKind::NotModified, "same"));
        }
        let range = request
            .range
            .map_or(0..meta.size, |r| r.start..r.end.min(meta.size));
        if range.start > range.end || (range.start == range.end && meta.size > 0) {
            return Err(Error::range_not_satisfiable(format!("{range:?}")));
        }
        let body = data.slice(range.start as usize..range.end as usize);
        self.bytes_out.fetch_add(body.len() as u64, SeqCst);
        let cut = *self.cut_bodies_after.lock();
        let mut pieces: Vec<Result<Bytes>> = body
            .chunks(100_000)
            .map(|c| Ok(Bytes::copy_from_slice(c)))
            .collect();
        if let Some(cut) = cut {
            let mut left = cut;
            pieces = pieces
                .into_iter()
                .map_while(|p| {
                    let n = p.as_ref().map_or(0, Bytes::len);
                    (left > 0).then(|| {
                        left = left.saturating_sub(n);
                        p
                    })
                })
                .collect();
            pieces.push(Err(Error::origin_unavailable("the connection was cut")));
        }
        let stall = self
            .stall_bodies_after
            .lock()
            .filter(|_| range.end < meta.size);
        if let Some(after) = stall {
            let free = after / 100_000;
            let rest = pieces.split_off(free.min(pieces.len()));
            let rest = stream::once(async move {
                if !rest.is_empty() {
                    asked
                        .wait_for(|n| *n > so_far)
                        .await
                        .expect("the origin is there");
                }
                stream::iter(rest)
            })
            .flatten();
            return Ok(GetResponse {
                meta,
                age_secs: Some(0),
                range,
                body: stream::iter(pieces).chain(rest).boxed(),
            });
        }
        Ok(GetResponse {
            meta,
            age_secs: Some(0),
            range,
            body: stream::iter(pieces).boxed(),
        })
    }

    async fn list(&self, _: ListRequest) -> Result<ListPage> {
        Err(Error::unsupported("list"))
    }

    fn check_writable(&self) -> Result<()> {
        match self.read_only.load(SeqCst) {
            true => Err(Error::unsupported("memory: it is read-only")),
            false => Ok(()),
        }
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        _: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let data: Vec<Bytes> = body.try_collect().await?;
        self.sent_puts.fetch_add(1, SeqCst);
        until_released(&self.holds_effects).await;
        self.answer().await?;
        if request.condition == PutCondition::IfAbsent && self.find(key).is_ok() {
            return Err(Error::new(ErrorKind::PreconditionFailed, key.to_owned()));
        }
        self.set(key, data.concat());
        self.acknowledge().await;
        until_another(&self.holds_acknowledgements_of, key).await;
        Ok(PutResponse {
            etag: self.find(key)?.1.etag,
        })
    }

    async fn delete(&self, key: &str) -> Result<()> {
        if self.refuses_deletes.load(SeqCst) {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                "nothing may be deleted here",
            ));
        }
        if let Some(left) = &mut *self.deletes_left.lock() {
            *left = left
                .checked_sub(1)
                .ok_or_else(|| Error::origin_unavailable("the origin deletes nothing"))?;
        }
        self.objects.lock().remove(key);
        self.acknowledge().await;
        Ok(())
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        _: PutRequest,
    ) -> Result<PutResponse> {
        let (data, meta) = self.find(from)?;
        if if_match.is_some() && if_match != meta.etag.as_deref() {
            return Err(Error::new(ErrorKind::PreconditionFailed, from.to_owned()));
        }
        self.set(to, data);
        self.acknowledge().await;
        until_another(&self.holds_acknowledgements_of, to).await;
        Ok(PutResponse {
            etag: self.find(to)?.1.etag,
        })
    }

    async fn create_upload(&self, key: &str, _: PutRequest) -> Result<String> {
        let id = format!("{key}#{}", self.uploads_begun.fetch_add(1, SeqCst));
        self.uploads.lock().insert(id.clone(), BTreeMap::new());
        self.acknowledge().await;
        Ok(id)
    }

    async fn upload_part(
        &self,
        _: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        self.begun_parts.lock().push(upload.to_owned());
        let data: Vec<Bytes> = body.try_collect().await?;
        until_released(&self.holds_effects).await;
        if let Some(left) = &mut *self.parts_left.lock() {
            *left = left
                .checked_sub(1)
                .ok_or_else(|| Error::origin_unavailable("the origin takes no more parts"))?;
        }
        self.parts.fetch_add(1, SeqCst);
        let mut uploads = self.uploads.lock();
        let parts = uploads
            .get_mut(upload)
            .ok_or_else(|| Error::not_found("upload"))?;
        parts.insert(number, data.concat().into());
        Ok(UploadedPart {
            number,
            etag: format!("p{number}"),
            size: Some(size),
        })
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        if condition == PutCondition::IfAbsent && self.find(key).is_ok() {
            return Err(Error::new(ErrorKind::PreconditionFailed, key.to_owned()));
        }
        let fails = &self.complete_fails;
        if fails.load(SeqCst) > 0 {
            fails.fetch_sub(1, SeqCst);
            return Err(Error::invalid("not now"));
        }
        let stored = self
            .uploads
            .lock()
            .remove(upload)
            .ok_or_else(|| Error::not_found("upload"))?;
        let data: Vec<Bytes> = parts.iter().map(|p| stored[&p.number].clone()).collect();
        self.set(key, data.concat());
        self.acknowledge().await;
        Ok(PutResponse {
            etag: self.find(key)?.1.etag,
        })
    }

    async fn abort_upload(&self, _: &str, upload: &str) -> Result<()> {
        if self.refuses_aborts.load(SeqCst) {
            return Err(Error::new(ErrorKind::PermissionDenied, "no aborts"));
        }
        self.uploads.lock().remove(upload);
        Ok(())
    }
}

/// The initial time of a [`Bench`]'s clock, since the Unix epoch.
pub const NOW: Duration = Duration::from_secs(1_000_000);

/// An engine over one bucket, `data`.
pub struct Bench {
    /// The origin of the bucket.
    pub origin: Arc<MemoryOrigin>,
    /// The engine under test.
    pub engine: Engine,
    /// The engine's and the store's clock: it moves only when a test moves it.
    pub clock: ManualClock,
    /// Where the store is; `None` without one, or if the test keeps the directory itself.
    pub dir: Option<tempfile::TempDir>,
}

impl Bench {
    /// With a cache of 256 MiB and a memory budget of 64 MiB.
    pub fn new(freshness: Freshness) -> Self {
        Self::with(freshness, Some(256 << 20), 64 << 20)
    }

    /// With a cache of this many bytes in a new directory; `None`: without a cache.
    pub fn with(freshness: Freshness, cache_bytes: Option<u64>, budget_bytes: u64) -> Self {
        let dir = cache_bytes.map(|_| tempfile::tempdir().unwrap());
        let clock = ManualClock::at(NOW);
        let store = cache_bytes.map(|capacity_bytes| {
            let path = dir.as_ref().unwrap().path().to_owned();
            Arc::new(
                Store::open(
                    StoreConfig {
                        dirs: vec![DirConfig {
                            path,
                            capacity_bytes,
                        }],
                        ..Default::default()
                    },
                    Arc::new(clock.clone()),
                )
                .unwrap(),
            )
        });
        Self::over(
            Arc::new(MemoryOrigin::default()),
            freshness,
            store,
            dir,
            clock,
            budget_bytes,
        )
    }

    /// Over components that a test made itself.
    pub fn over(
        origin: Arc<MemoryOrigin>,
        freshness: Freshness,
        store: Option<Arc<Store>>,
        dir: Option<tempfile::TempDir>,
        clock: ManualClock,
        budget_bytes: u64,
    ) -> Self {
        let mut buckets = FixedBuckets::default();
        buckets.0.insert("data".into(), origin.clone());
        let rules = BucketRules {
            default: BucketRule {
                freshness,
                cache: true,
                ..BucketRule::default()
            },
            ..Default::default()
        };
        let config = EngineConfig {
            rules,
            ..Default::default()
        };
        let engine = Engine::new(
            config,
            Arc::new(buckets),
            store,
            Arc::new(clock.clone()),
            MemoryBudget::new(budget_bytes),
        );
        Self {
            origin,
            engine,
            clock,
            dir,
        }
    }

    /// Reads an object to its end: its bytes, and `X-Cache`.
    pub async fn get(&self, key: &str) -> Result<(Vec<u8>, &'static str)> {
        self.get_range(key, None).await
    }

    /// The same for a range of it. Panics if the body yields more or less than it announced.
    pub async fn get_range(
        &self,
        key: &str,
        range: Option<forebay_core::ByteRange>,
    ) -> Result<(Vec<u8>, &'static str)> {
        let read = self
            .engine
            .read(&name(key), range, &ReadOptions::default())
            .await?;
        let (expected, cache) = (read.range.end - read.range.start, read.cache.as_str());
        let bytes = collect(read.body).await?;
        assert_eq!(
            bytes.len() as u64,
            expected,
            "a body yields what it announced"
        );
        Ok((bytes, cache))
    }

    /// Reads a member of an archive: its bytes, and `X-Cache`.
    pub async fn member(&self, key: &str, member: &str) -> Result<(Vec<u8>, &'static str)> {
        let read = self
            .engine
            .read_member(&name(key), member, None, &ReadOptions::default())
            .await?;
        let cache = read.cache.as_str();
        Ok((collect(read.body).await?, cache))
    }
}

/// Waits until nothing holds memory any more: fills that ran ahead of their reader end shortly
/// after it.
pub async fn settled(engine: &Engine) {
    let began = std::time::Instant::now();
    while engine.budget().used_bytes() > 0 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{} bytes are held after the work",
            engine.budget().used_bytes()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Copies piece by piece, as a client does: a kept piece would keep its share of the memory budget.
pub async fn collect(mut body: ByteStream) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    while let Some(piece) = body.try_next().await? {
        out.extend_from_slice(&piece);
    }
    Ok(out)
}

/// The name of a key in the bucket `data`.
pub fn name(key: &str) -> ObjectName {
    ObjectName::new("data", key).unwrap()
}

/// Bytes that are different everywhere.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}
