//! An origin that remembers every version of its objects, and when each was current. The model asks
//! it: what may a read return?
//!
//! Time is a count of events; alongside it runs the node's clock, which tests move by hand. It goes on as
//! time passes, also where the wall clock is set back, and is the wall clock's when the node starts. A
//! version may be returned if it was current during the read, or at a moment whose clock the
//! bucket's rule still accepts, and no later write through the node had returned before the read
//! began.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Clock, Error, ErrorKind, ManualClock, ObjectMeta, Result, sync::Mutex};
use forebay_engine::Freshness;
use forebay_origin::*;
use futures::{StreamExt, TryStreamExt, stream};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// A version of an object, or its absence.
#[derive(Clone)]
pub struct Version {
    pub number: u64,
    pub data: Option<Bytes>,
    from: u64,
    until: u64,
}

#[derive(Default)]
struct Object {
    versions: Vec<Version>,
    /// Writes through the node: when each returned, and when what it wrote became current.
    writes: Vec<(u64, u64)>,
}

struct State {
    event: u64,
    /// Changes of the clock: the event, and the time from then on.
    clocks: Vec<(u64, u32)>,
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, BTreeMap<u32, Bytes>>,
}

/// One bucket.
#[derive(Clone)]
pub struct History {
    state: Arc<Mutex<State>>,
    clock: ManualClock,
    with_etags: bool,
}

impl State {
    fn tick(&mut self) -> u64 {
        self.event += 1;
        self.event
    }

    fn change(&mut self, key: &str, data: Option<Bytes>) -> u64 {
        let now = self.tick();
        let object = self
            .objects
            .entry(key.to_owned())
            .or_insert_with(|| Object {
                versions: vec![Version {
                    number: 0,
                    data: None,
                    from: 0,
                    until: u64::MAX,
                }],
                writes: Vec::new(),
            });
        if let Some(last) = object.versions.last_mut() {
            last.until = now;
        }
        object.versions.push(Version {
            number: now,
            data,
            from: now,
            until: u64::MAX,
        });
        now
    }

    fn current(&self, key: &str) -> Option<&Version> {
        self.objects
            .get(key)?
            .versions
            .last()
            .filter(|v| v.data.is_some())
    }
}

impl History {
    pub fn new(clock: ManualClock, with_etags: bool) -> Self {
        let state = State {
            event: 1,
            clocks: vec![(0, clock.now_secs())],
            objects: BTreeMap::new(),
            uploads: BTreeMap::new(),
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            clock,
            with_etags,
        }
    }

    /// Counts an event and returns its number.
    pub fn event(&self) -> u64 {
        self.state.lock().tick()
    }

    /// Changes an object behind the node's back.
    pub fn change(&self, key: &str, data: Option<Bytes>) -> u64 {
        self.state.lock().change(key, data)
    }

    /// Time passes for all buckets at the same moment.
    pub fn pass(buckets: &[History], by: Duration) {
        let mut states: Vec<_> = buckets.iter().map(|h| h.state.lock()).collect();
        for state in &mut states {
            let event = state.tick();
            let now = state.clocks.last().map_or(0, |c| c.1);
            state.clocks.push((event, now + by.as_secs() as u32));
        }
        // They have one clock.
        buckets[0].clock.advance(by);
    }

    /// The node starts.
    pub fn started(&self) {
        let mut s = self.state.lock();
        let event = s.tick();
        s.clocks.push((event, self.clock.now_secs()));
    }

    /// A write through the node returned; `number` is the version that it made, if known.
    pub fn written(&self, key: &str, number: Option<u64>, began: u64) {
        let mut s = self.state.lock();
        let returned = s.tick();
        if let Some(object) = s.objects.get_mut(key) {
            object.writes.push((returned, number.unwrap_or(began)));
        }
    }

    /// The machine went down: everything must be asked about again.
    pub fn machine_down(&self) {
        let mut s = self.state.lock();
        let now = s.tick();
        s.objects
            .values_mut()
            .for_each(|o| o.writes.push((now, now)));
    }

    pub fn meta_of(&self, v: &Version) -> ObjectMeta {
        ObjectMeta {
            size: v.data.as_ref().map_or(0, |d| d.len() as u64),
            etag: self.with_etags.then(|| format!("\"v{}\"", v.number)),
            last_modified_ms: v.number as i64 * 1000,
            attributes: Default::default(),
        }
    }

    pub fn keys(&self) -> Vec<String> {
        self.state.lock().objects.keys().cloned().collect()
    }

    /// What a read between the events `began` and `ended` may return.
    pub fn admissible(&self, key: &str, rule: Freshness, began: u64, ended: u64) -> Vec<Version> {
        let s = self.state.lock();
        // The clock may move on during the read.
        let now = s
            .clocks
            .iter()
            .rev()
            .find(|c| c.0 <= began)
            .map_or(0, |c| c.1);
        let Some(object) = s.objects.get(key) else {
            return vec![Version {
                number: 0,
                data: None,
                from: 0,
                until: u64::MAX,
            }];
        };
        let since = object
            .writes
            .iter()
            .filter(|(returned, _)| *returned <= began)
            .map(|w| w.1)
            .max()
            .unwrap_or(0);
        let seen_at = |v: &Version| {
            let (from, until) = (v.from.max(since), v.until.min(began));
            let epochs = s.clocks.iter().enumerate().map(|(i, (at, clock))| {
                (
                    *at,
                    s.clocks.get(i + 1).map_or(u64::MAX, |next| next.0),
                    *clock,
                )
            });
            epochs
                .filter(|(at, end, _)| from.max(*at) < until.min(*end))
                .map(|e| e.2)
                .collect::<Vec<u32>>()
        };
        let may = |v: &&Version| {
            v.from <= ended && v.until > began
                || match rule {
                    Freshness::Always => false,
                    Freshness::Immutable => !seen_at(v).is_empty(),
                    Freshness::RevalidateAfter(ttl) => seen_at(v)
                        .iter()
                        .any(|c| *c <= now && u64::from(now - c) < ttl.as_secs()),
                }
        };
        object.versions.iter().filter(may).cloned().collect()
    }
}

#[async_trait]
impl Origin for History {
    fn describe(&self) -> String {
        "history".into()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let s = self.state.lock();
        Ok(self.meta_of(
            s.current(key)
                .ok_or_else(|| Error::not_found(key.to_owned()))?,
        ))
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let (meta, data) = {
            let s = self.state.lock();
            let v = s
                .current(key)
                .ok_or_else(|| Error::not_found(key.to_owned()))?;
            (self.meta_of(v), v.data.clone().unwrap_or_default())
        };
        if request.if_match.is_some() && request.if_match != meta.etag {
            return Err(Error::new(ErrorKind::PreconditionFailed, "changed"));
        }
        if request.if_none_match.is_some() && request.if_none_match == meta.etag {
            return Err(Error::new(ErrorKind::NotModified, "same"));
        }
        let range = request
            .range
            .map_or(0..meta.size, |r| r.start..r.end.min(meta.size));
        if range.start > range.end || (range.is_empty() && meta.size > 0) {
            return Err(Error::range_not_satisfiable(format!("{range:?}")));
        }
        let pieces: Vec<Bytes> = {
            let body = data.slice(range.start as usize..range.end as usize);
            (0..body.len())
                .step_by(150_000)
                .map(|at| body.slice(at..(at + 150_000).min(body.len())))
                .collect()
        };
        let body = stream::iter(pieces).then(|piece| async move {
            tokio::task::yield_now().await;
            Ok(piece)
        });
        Ok(GetResponse {
            meta,
            age_secs: Some(0),
            range,
            body: body.boxed(),
        })
    }

    async fn list(&self, _: ListRequest) -> Result<ListPage> {
        Err(Error::unsupported("list"))
    }

    async fn put(
        &self,
        key: &str,
        _: PutRequest,
        _: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let data: Vec<Bytes> = body.try_collect().await?;
        let number = self.change(key, Some(data.concat().into()));
        Ok(PutResponse {
            etag: Some(format!("\"v{number}\"")),
        })
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.change(key, None);
        Ok(())
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        _: PutRequest,
    ) -> Result<PutResponse> {
        let mut s = self.state.lock();
        let current = s
            .current(from)
            .ok_or_else(|| Error::not_found(from.to_owned()))?;
        if if_match.is_some_and(|wanted| wanted != format!("\"v{}\"", current.number)) {
            return Err(Error::new(ErrorKind::PreconditionFailed, from.to_owned()));
        }
        let data = current.data.clone();
        let number = s.change(to, data);
        Ok(PutResponse {
            etag: Some(format!("\"v{number}\"")),
        })
    }

    async fn create_upload(&self, _: &str, _: PutRequest) -> Result<String> {
        let mut s = self.state.lock();
        let id = s.tick().to_string();
        s.uploads.insert(id.clone(), BTreeMap::new());
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
        let data: Vec<Bytes> = body.try_collect().await?;
        let mut s = self.state.lock();
        let parts = s
            .uploads
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
        _: PutCondition,
    ) -> Result<PutResponse> {
        let mut s = self.state.lock();
        let stored = s
            .uploads
            .remove(upload)
            .ok_or_else(|| Error::not_found("upload"))?;
        let data: Vec<Bytes> = parts.iter().map(|p| stored[&p.number].clone()).collect();
        let number = s.change(key, Some(data.concat().into()));
        Ok(PutResponse {
            etag: Some(format!("\"v{number}\"")),
        })
    }

    async fn abort_upload(&self, _: &str, upload: &str) -> Result<()> {
        self.state.lock().uploads.remove(upload);
        Ok(())
    }
}
