//! Multipart uploads in progress: what the node remembers of them.
//!
//! The origin holds the parts. The node remembers their sizes and checksums, so that it can list
//! them and complete an upload from part numbers and ETags alone. A restart forgets them, which
//! loses nothing at the origin: an upload can still be completed, but its parts are no longer
//! listed.
//!
//! Invariant: at most `max_uploads` uploads and [`PARTS_MAX`] parts are remembered; the oldest is
//! forgotten first.

use forebay_core::{ObjectName, sync::Mutex};
use forebay_engine::UploadedPart;
use s3s::dto::Checksum;
use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Parts remembered over all uploads.
const PARTS_MAX: usize = 1_000_000;

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
}

#[derive(Default)]
struct Inner {
    uploads: HashMap<(ObjectName, String), Upload>,
    by_order: BTreeMap<u64, (ObjectName, String)>,
    next: u64,
    parts: usize,
}

impl Uploads {
    pub fn new(max_uploads: usize) -> Self {
        Uploads {
            max_uploads: AtomicUsize::new(max_uploads.max(1)),
            inner: Mutex::default(),
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
    pub fn stored(&self, name: &ObjectName, id: &str, part: Part) {
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

    pub fn end(&self, name: &ObjectName, id: &str) {
        self.inner.lock().forget(&(name.clone(), id.to_owned()));
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

    #[test]
    fn an_id_that_is_used_again_is_a_new_upload() {
        let name = |k: &str| ObjectName::new("bucket", k).unwrap();
        let uploads = Uploads::new(2);
        let part = Part {
            part: UploadedPart {
                number: 1,
                etag: "e".into(),
                size: 5,
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
    fn the_oldest_is_forgotten_first() {
        let name = |k: &str| ObjectName::new("bucket", k).unwrap();
        let uploads = Uploads::new(2);
        for k in ["a", "b", "c"] {
            uploads.begin(&name(k), "id", 0);
            let part = UploadedPart {
                number: 1,
                etag: "e".into(),
                size: 5,
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
            5
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
