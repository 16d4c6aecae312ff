//! Multipart uploads in progress: what the node remembers of them.
//!
//! The origin holds the parts, and lists them. The node remembers their sizes and checksums, so that it
//! can list those too, and complete an upload from part numbers and ETags alone. A restart forgets them,
//! which loses nothing at the origin: an upload can still be completed.
//!
//! A client that missed the answer to a completion asks for it again, and some do while the first is
//! under way: it waits for that, and the last [`COMPLETED_MAX`] answers are remembered for it.
//!
//! Invariant: at most `max_uploads` uploads and [`PARTS_MAX`] parts are remembered; the oldest is
//! forgotten first. What the origin acknowledged is remembered even if the client has left: each
//! change goes to its end in its own task.

use forebay_core::{Error, ErrorKind, ObjectName, Result, limits, request, sync::Mutex};
use forebay_engine::{ByteStream, Engine, PutCondition, PutResponse, UploadedPart};
use s3s::dto::Checksum;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};
use tokio::sync::{Semaphore, watch};
use xxhash_rust::xxh3::xxh3_128;

/// Parts remembered over all uploads.
const PARTS_MAX: usize = 1_000_000;
/// Completions remembered.
const COMPLETED_MAX: usize = 1024;

#[derive(Clone, Debug)]
pub struct Part {
    pub part: UploadedPart,
    pub checksum: Checksum,
    pub stored_ms: i64,
}

#[derive(Clone, Debug)]
pub struct Upload {
    pub name: ObjectName,
    pub id: String,
    pub begun_ms: i64,
    pub parts: BTreeMap<u32, Part>,
    /// Uploads are numbered in the order they began, so that the oldest is known.
    order: u64,
}

pub struct Uploads {
    max_uploads: AtomicUsize,
    inner: Mutex<Inner>,
    /// Permits for changes under way: slow parts do not hold up completions. The engine's own are
    /// taken after these, never before.
    parts: Arc<Semaphore>,
    endings: Arc<Semaphore>,
}

/// A part on its way to the origin.
pub struct NewPart {
    pub number: u32,
    /// Bytes.
    pub size: u64,
    pub body: ByteStream,
}

#[derive(Default)]
struct Inner {
    uploads: HashMap<(ObjectName, String), Upload>,
    by_order: BTreeMap<u64, (ObjectName, String)>,
    next: u64,
    parts: usize,
    /// What closes when a completion that is under way has ended.
    completing: HashMap<(ObjectName, String), watch::Receiver<()>>,
    /// The oldest first.
    completed: VecDeque<Completed>,
}

/// A completion that succeeded.
struct Completed {
    key: (ObjectName, String),
    parts: Sums,
    done: PutResponse,
}

/// What tells one list of parts from another.
#[derive(Clone, Copy)]
struct Sums {
    /// By numbers and ETags.
    whole: u128,
    /// By numbers alone: some clients name no ETags.
    numbers: u128,
}

/// The only completion of an upload that is under way here.
struct Turn<'a> {
    uploads: &'a Uploads,
    key: &'a (ObjectName, String),
    _ends: watch::Sender<()>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.uploads.inner.lock().completing.remove(self.key);
    }
}

impl Sums {
    fn of(parts: &[UploadedPart]) -> Self {
        let lines = parts.iter();
        let lines = lines.map(|p| format!("{} {}\n", p.number, p.etag.trim_matches('"')));
        Sums {
            whole: xxh3_128(lines.collect::<String>().as_bytes()),
            numbers: sum_of(parts.iter().map(|p| p.number)),
        }
    }
}

fn sum_of(numbers: impl Iterator<Item = u32>) -> u128 {
    let lines: String = numbers.map(|number| format!("{number}\n")).collect();
    xxh3_128(lines.as_bytes())
}

impl Uploads {
    pub fn new(max_uploads: usize) -> Self {
        Uploads {
            max_uploads: AtomicUsize::new(max_uploads.max(1)),
            inner: Mutex::default(),
            parts: Arc::new(Semaphore::new(limits::WRITES_IN_FLIGHT_MAX)),
            endings: Arc::new(Semaphore::new(limits::WRITES_IN_FLIGHT_MAX)),
        }
    }

    /// Sends a part to the origin and remembers it. `checksum` is asked after its last byte.
    pub async fn send_part(
        self: &Arc<Self>,
        engine: &Engine,
        name: &ObjectName,
        id: &str,
        new: NewPart,
        checksum: impl FnOnce() -> Checksum + Send + 'static,
    ) -> Result<Part> {
        let (uploads, engine) = (self.clone(), engine.clone());
        let (name, id) = (name.clone(), id.to_owned());
        Self::to_its_end(&self.parts, async move {
            let NewPart { number, size, body } = new;
            let part = engine.upload_part(&name, &id, number, size, body).await?;
            let part = Part {
                part,
                checksum: checksum(),
                stored_ms: engine.clock().now_ms(),
            };
            uploads.stored(&name, &id, part.clone());
            Ok(part)
        })
        .await
    }

    /// Completes an upload at the origin, if `condition` holds, and forgets it here. One that was
    /// completed here before, with the same parts, is answered as it was then.
    pub async fn complete(
        self: &Arc<Self>,
        engine: &Engine,
        name: &ObjectName,
        id: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let (uploads, engine) = (self.clone(), engine.clone());
        let (key, sums) = ((name.clone(), id.to_owned()), Sums::of(&parts));
        Self::to_its_end(&self.endings, async move {
            let _turn = uploads.turn(&key).await;
            let (name, id) = &key;
            // The origin is not asked: some would make the object again, over what was written since.
            let is_same = |c: &Completed| c.parts.whole == sums.whole;
            if let Some(done) = uploads.completed(&key, is_same) {
                return Ok(done);
            }
            let done = engine.complete_upload(name, id, parts, condition).await;
            // Before it is forgotten: whoever asks again finds one or the other.
            if let Ok(put) = &done {
                uploads.remember(&key, sums, put);
            }
            uploads.ended(name, id, &done);
            done
        })
        .await
    }

    /// Waits until no other completion of the upload is under way here.
    async fn turn<'a>(&'a self, key: &'a (ObjectName, String)) -> Turn<'a> {
        loop {
            let mut other = {
                let mut inner = self.inner.lock();
                match inner.completing.get(key) {
                    Some(other) => other.clone(),
                    None => {
                        let (ends, ended) = watch::channel(());
                        inner.completing.insert(key.clone(), ended);
                        return Turn {
                            uploads: self,
                            key,
                            _ends: ends,
                        };
                    }
                }
            };
            // An error: it has ended.
            let _ = other.changed().await;
        }
    }

    /// The answer to the completion of an upload with these parts, if it succeeded here.
    fn completed(
        &self,
        key: &(ObjectName, String),
        is_same: impl Fn(&Completed) -> bool,
    ) -> Option<PutResponse> {
        let inner = self.inner.lock();
        let mut completed = inner.completed.iter();
        let found = completed.find(|c| c.key == *key && is_same(c));
        found.map(|c| c.done.clone())
    }

    /// The same for a client that names the parts by their numbers, in ascending order.
    pub fn completed_before(
        &self,
        name: &ObjectName,
        id: &str,
        numbers: &[u32],
    ) -> Option<PutResponse> {
        let sum = sum_of(numbers.iter().copied());
        self.completed(&(name.clone(), id.to_owned()), |c| c.parts.numbers == sum)
    }

    /// [`Uploads::completed_before`], once no completion of the upload is under way here.
    pub async fn completed_by_now(
        &self,
        name: &ObjectName,
        id: &str,
        numbers: &[u32],
    ) -> Option<PutResponse> {
        let key = (name.clone(), id.to_owned());
        let _turn = self.turn(&key).await;
        self.completed_before(name, id, numbers)
    }

    fn remember(&self, key: &(ObjectName, String), parts: Sums, done: &PutResponse) {
        let mut inner = self.inner.lock();
        inner.completed.retain(|c| c.key != *key);
        if inner.completed.len() >= COMPLETED_MAX {
            inner.completed.pop_front();
        }
        inner.completed.push_back(Completed {
            key: key.clone(),
            parts,
            done: done.clone(),
        });
    }

    /// Aborts an upload at the origin and forgets it here.
    pub async fn abort(
        self: &Arc<Self>,
        engine: &Engine,
        name: &ObjectName,
        id: &str,
    ) -> Result<()> {
        let (uploads, engine) = (self.clone(), engine.clone());
        let (name, id) = (name.clone(), id.to_owned());
        Self::to_its_end(&self.endings, async move {
            let done = engine.abort_upload(&name, &id).await;
            uploads.ended(&name, &id, &done);
            done
        })
        .await
    }

    async fn to_its_end<T: Send + 'static>(
        places: &Arc<Semaphore>,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let ends = |e| Error::internal("the change of an upload was broken off").caused_by(e);
        let place = places.clone().acquire_owned().await;
        let place = place.map_err(|_| Error::internal("uploads are closed"))?;
        let task = request::spawn(async move {
            let _place = place;
            change.await
        });
        task.await.unwrap_or_else(|e| Err(ends(e)))
    }

    /// An upload that the origin does not know has ended too.
    fn ended<T>(&self, name: &ObjectName, id: &str, done: &Result<T>) {
        match done {
            Ok(_) => self.end(name, id),
            Err(e) if e.kind() == ErrorKind::NotFound => self.end(name, id),
            Err(_) => {}
        }
    }

    /// Sets the limit from now on; uploads beyond it are forgotten when another begins.
    pub fn set_most(&self, max_uploads: usize) {
        self.max_uploads.store(max_uploads.max(1), Relaxed);
    }

    pub fn begin(&self, name: &ObjectName, id: &str, now_ms: i64) {
        let mut inner = self.inner.lock();
        let key = (name.clone(), id.to_owned());
        // An origin may use an id again.
        inner.forget(&key);
        inner.completed.retain(|c| c.key != key);
        while inner.uploads.len() >= self.max_uploads.load(Relaxed) {
            inner.forget_oldest();
        }
        let order = inner.next;
        inner.next += 1;
        inner.by_order.insert(order, key.clone());
        inner.uploads.insert(
            key,
            Upload {
                name: name.clone(),
                id: id.to_owned(),
                begun_ms: now_ms,
                parts: BTreeMap::new(),
                order,
            },
        );
    }

    /// Remembers a part that the origin has acknowledged. Parts of an unknown upload are ignored.
    fn stored(&self, name: &ObjectName, id: &str, part: Part) {
        let mut inner = self.inner.lock();
        let Some(upload) = inner.uploads.get_mut(&(name.clone(), id.to_owned())) else {
            return;
        };
        if upload.parts.insert(part.part.number, part).is_none() {
            inner.parts += 1;
        }
        while inner.parts > PARTS_MAX && inner.uploads.len() > 1 {
            inner.forget_oldest();
        }
    }

    pub fn get(&self, name: &ObjectName, id: &str) -> Option<Upload> {
        self.inner
            .lock()
            .uploads
            .get(&(name.clone(), id.to_owned()))
            .cloned()
    }

    fn end(&self, name: &ObjectName, id: &str) {
        self.inner.lock().forget(&(name.clone(), id.to_owned()));
    }

    /// Forgets the uploads of a bucket that was removed: one that is made anew has none.
    pub fn forget_bucket(&self, bucket: &str) {
        let mut inner = self.inner.lock();
        let keys = inner.uploads.keys();
        let gone: Vec<(ObjectName, String)> = keys
            .filter(|(name, _)| name.bucket() == bucket)
            .cloned()
            .collect();
        for key in gone {
            inner.forget(&key);
        }
        inner.completed.retain(|c| c.key.0.bucket() != bucket);
    }

    /// Uploads of a bucket under a prefix, by key and id, without their parts.
    pub fn list(&self, bucket: &str, prefix: &str) -> Vec<Upload> {
        let inner = self.inner.lock();
        let mut found: Vec<Upload> = inner
            .uploads
            .values()
            .filter(|u| u.name.bucket() == bucket && u.name.key().starts_with(prefix))
            .map(|u| Upload {
                name: u.name.clone(),
                id: u.id.clone(),
                begun_ms: u.begun_ms,
                parts: BTreeMap::new(),
                order: u.order,
            })
            .collect();
        found.sort_by(|a, b| (a.name.key(), &a.id).cmp(&(b.name.key(), &b.id)));
        found
    }

    pub fn len(&self) -> usize {
        self.inner.lock().uploads.len()
    }
}

impl Inner {
    fn forget(&mut self, key: &(ObjectName, String)) {
        if let Some(upload) = self.uploads.remove(key) {
            self.by_order.remove(&upload.order);
            self.parts -= upload.parts.len();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, key)) = self.by_order.pop_first() {
            tracing::warn!(object = %key.0, "too many multipart uploads: the parts of the oldest \
                are no longer listed");
            self.forget(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use forebay_engine::{Freshness, PutRequest};
    use forebay_testing::engine::Bench;
    use futures::{StreamExt, stream};
    use std::time::Duration;

    #[tokio::test]
    async fn what_the_origin_acknowledged_is_known_though_the_client_left() {
        let b = Bench::new(Freshness::Always);
        let name = forebay_testing::engine::name("k");
        let uploads = Arc::new(Uploads::new(10));
        let begin = async || {
            let id = b.engine.create_upload(&name, PutRequest::default()).await;
            let id = id.unwrap();
            uploads.begin(&name, &id, 0);
            id
        };
        let (gate, opened) = tokio::sync::watch::channel(true);
        let part = |data: &'static str| {
            let mut opened = opened.clone();
            NewPart {
                number: 1,
                size: data.len() as u64,
                body: stream::once(async move {
                    drop(opened.wait_for(|opened| *opened).await.unwrap());
                    Ok(Bytes::from_static(data.as_bytes()))
                })
                .boxed(),
            }
        };
        let leaves = Duration::from_millis(10);
        let eventually = async |holds: &(dyn Fn() -> bool + Sync)| {
            for _ in 0..6000 {
                if holds() {
                    return true;
                }
                tokio::time::sleep(leaves).await;
            }
            false
        };
        let id = begin().await;
        let known = || uploads.get(&name, &id);
        let send = |data| uploads.send_part(&b.engine, &name, &id, part(data), Checksum::default);
        send("one").await.unwrap();
        assert_eq!(known().unwrap().parts[&1].part.size, Some(3));
        gate.send_replace(false);
        let again = send("three");
        assert!(tokio::time::timeout(leaves, again).await.is_err());
        gate.send_replace(true);
        assert!(eventually(&|| known().unwrap().parts[&1].part.size == Some(5)).await);

        b.origin.holds_acknowledgements.send_replace(true);
        let parts = vec![known().unwrap().parts[&1].part.clone()];
        let always = PutCondition::Always;
        let complete = uploads.complete(&b.engine, &name, &id, parts.clone(), always.clone());
        assert!(tokio::time::timeout(leaves, complete).await.is_err());
        b.origin.holds_acknowledgements.send_replace(false);
        assert!(eventually(&|| known().is_none()).await);
        assert_eq!(b.get("k").await.unwrap().0, b"three");

        // Ended at the origin, by somebody else.
        let id = begin().await;
        let known = || uploads.get(&name, &id);
        assert!(known().is_some());
        b.engine.abort_upload(&name, &id).await.unwrap();
        let gone = uploads.complete(&b.engine, &name, &id, parts, always).await;
        assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
        assert!(known().is_none());
    }

    #[tokio::test]
    async fn a_completion_that_is_asked_for_again_is_answered_again() {
        let b = Bench::new(Freshness::Always);
        let name = forebay_testing::engine::name("k");
        let uploads = Arc::new(Uploads::new(10));
        let id = b.engine.create_upload(&name, PutRequest::default()).await;
        let id = id.unwrap();
        uploads.begin(&name, &id, 0);
        let part = NewPart {
            number: 1,
            size: 3,
            body: stream::once(async { Ok(Bytes::from_static(b"one")) }).boxed(),
        };
        let sent = uploads.send_part(&b.engine, &name, &id, part, Checksum::default);
        let part = sent.await.unwrap().part;
        let complete = async |etag: &str| {
            let parts = vec![UploadedPart {
                etag: etag.into(),
                ..part.clone()
            }];
            let done = uploads.complete(&b.engine, &name, &id, parts, PutCondition::Always);
            done.await.map_err(|e| e.kind())
        };
        // The second comes while the first is under way.
        *b.origin.acknowledges_after.lock() = Duration::from_millis(100);
        let by_number = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            uploads.completed_by_now(&name, &id, &[1]).await
        };
        let (first, second, third) =
            futures::join!(complete(&part.etag), complete(&part.etag), by_number);
        let first = first.unwrap();
        assert_eq!(second, Ok(first.clone()));
        assert_eq!(third, Some(first.clone()));
        assert_eq!(uploads.completed_by_now(&name, &id, &[2]).await, None);
        assert_eq!(complete(&part.etag).await, Ok(first));
        assert_eq!(complete("other").await, Err(ErrorKind::NotFound));
        // At some origins an upload can be completed again: what was written since stays.
        let stored = BTreeMap::from([(1, Bytes::from_static(b"one"))]);
        b.origin.uploads.lock().insert(id.clone(), stored);
        b.origin.set("k", "later");
        assert!(complete(&part.etag).await.is_ok());
        assert_eq!(b.get("k").await.unwrap().0, b"later");
        b.origin.uploads.lock().clear();
        assert!(uploads.inner.lock().completing.is_empty());
        uploads.begin(&name, &id, 1);
        assert_eq!(complete(&part.etag).await, Err(ErrorKind::NotFound));
    }

    #[test]
    fn an_id_that_is_used_again_is_a_new_upload() {
        let name = |k: &str| ObjectName::new("bucket", k).unwrap();
        let uploads = Uploads::new(2);
        let part = Part {
            part: UploadedPart {
                number: 1,
                etag: "e".into(),
                size: Some(5),
            },
            checksum: Checksum::default(),
            stored_ms: 0,
        };
        uploads.begin(&name("a"), "id", 0);
        uploads.stored(&name("a"), "id", part);
        uploads.begin(&name("b"), "id", 1);
        uploads.begin(&name("a"), "id", 2);
        {
            let inner = uploads.inner.lock();
            assert_eq!(
                (inner.uploads.len(), inner.parts, inner.by_order.len()),
                (2, 0, 2)
            );
        }
        uploads.begin(&name("c"), "id", 3);
        assert!(uploads.get(&name("b"), "id").is_none(), "the oldest");
        assert_eq!(uploads.get(&name("a"), "id").unwrap().begun_ms, 2);
    }

    #[test]
    fn a_bucket_that_was_removed_has_no_uploads() {
        let uploads = Uploads::new(3);
        for (bucket, id) in [("gone", "1"), ("kept", "2"), ("gone", "3")] {
            uploads.begin(&ObjectName::new(bucket, "k").unwrap(), id, 0);
        }
        uploads.forget_bucket("gone");
        assert!(uploads.list("gone", "").is_empty());
        assert_eq!(uploads.list("kept", "").len(), 1);
        assert_eq!(uploads.inner.lock().by_order.len(), 1);
    }

    #[test]
    fn the_oldest_is_forgotten_first() {
        let name = |k: &str| ObjectName::new("bucket", k).unwrap();
        let uploads = Uploads::new(2);
        for k in ["a", "b", "c"] {
            uploads.begin(&name(k), "id", 0);
            let part = UploadedPart {
                number: 1,
                etag: "e".into(),
                size: Some(5),
            };
            uploads.stored(
                &name(k),
                "id",
                Part {
                    part,
                    checksum: Checksum::default(),
                    stored_ms: 0,
                },
            );
        }
        assert!(uploads.get(&name("a"), "id").is_none());
        assert_eq!(
            uploads.get(&name("c"), "id").unwrap().parts[&1].part.size,
            Some(5)
        );
        assert_eq!(uploads.list("bucket", "").len(), 2);
        uploads.end(&name("b"), "id");
        let inner = uploads.inner.lock();
        assert_eq!(
            (inner.uploads.len(), inner.parts, inner.by_order.len()),
            (1, 1, 1)
        );
    }
}
