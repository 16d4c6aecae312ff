//! Which origin an object comes from, as far as the cache must tell origins apart.
//!
//! After a restart, a bucket's name may lead to another origin; what the former one said is then
//! not a valid answer. So the key of a record is the hash of the object's name, changed by the
//! *salt* of its bucket, which is made from what identifies the origin (its kind, address, bucket
//! and prefix; not credentials or limits). Records of an origin that is no longer configured are
//! not found under any name, and go when they are the oldest; if the origin comes back before that,
//! they are found again.
//!
//! Caches from before this change have plain keys. The origins configured when such a cache is
//! first opened keep them: nothing is lost. The identity of each directory names these origins.

use arc_swap::ArcSwap;
use hashbrown::HashMap;
use std::{collections::BTreeSet, sync::Arc};
use xxhash_rust::xxh3::xxh3_64;

/// Origins with plain keys that a directory's identity has room for.
const PLAIN_ORIGINS_MAX: usize = 128;

/// What identifies the origin of each bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    named: HashMap<String, u64>,
    others: Option<u64>,
}

impl Sources {
    /// `named`: buckets, and a text for the origin of each; `others`: a text for everything that
    /// other names lead to. Equal texts are the same origin.
    pub fn new(named: impl IntoIterator<Item = (String, String)>, others: &str) -> Self {
        let hash = |bucket: &str, origin: &str| xxh3_64(format!("{bucket}\0{origin}").as_bytes());
        Self {
            named: named
                .into_iter()
                .map(|(bucket, origin)| {
                    let id = hash(&bucket, &origin);
                    (bucket, id)
                })
                .collect(),
            others: Some(hash("*", others)),
        }
    }

    fn ids(&self) -> impl Iterator<Item = u64> {
        self.named.values().copied().chain(self.others)
    }

    /// The origins that a cache with plain keys is taken to belong to.
    pub(crate) fn adopted(&self) -> BTreeSet<u32> {
        let ids: BTreeSet<u32> = self.ids().map(short).collect();
        if ids.len() > PLAIN_ORIGINS_MAX {
            tracing::warn!(
                origins = ids.len(),
                "of the objects that an earlier version cached only those of {PLAIN_ORIGINS_MAX} \
                 origins are found again"
            );
        }
        ids.into_iter().take(PLAIN_ORIGINS_MAX).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ids().next().is_none()
    }
}

fn short(id: u64) -> u32 {
    id as u32
}

/// What changes the keys of each bucket's objects.
#[derive(Default)]
pub struct Salts {
    /// Origins whose objects have plain keys.
    plain: BTreeSet<u32>,
    /// Looked up for each object of a batch, by all threads at once.
    table: ArcSwap<Table>,
}

#[derive(Default)]
struct Table {
    /// Ordered by name.
    named: Box<[(String, u128)]>,
    others: u128,
}

impl Table {
    fn salt(&self, bucket: &str) -> u128 {
        // Most nodes serve a few buckets: comparing their names takes less than hashing one.
        let at = match self.named.len() {
            ..=4 => self.named.iter().position(|(name, _)| name == bucket),
            _ => self
                .named
                .binary_search_by(|(name, _)| name.as_str().cmp(bucket))
                .ok(),
        };
        at.map_or(self.others, |at| self.named[at].1)
    }
}

impl Salts {
    pub fn new(sources: &Sources, plain: &BTreeSet<u32>) -> Self {
        let salts = Salts {
            plain: plain.clone(),
            table: ArcSwap::default(),
        };
        salts.set(sources);
        salts
    }

    /// From now on, names lead to these origins.
    pub fn set(&self, sources: &Sources) {
        let salt = |id: u64| match self.plain.contains(&short(id)) {
            true => 0,
            false => u128::from(id) << 64 | u128::from(id.rotate_left(32)),
        };
        let named = sources.named.iter();
        let mut named: Box<[_]> = named.map(|(name, id)| (name.clone(), salt(*id))).collect();
        named.sort_unstable();
        let table = Table {
            named,
            others: sources.others.map_or(0, salt),
        };
        self.table.store(Arc::new(table));
    }

    /// The key of a head; `name` is the hash of its name.
    pub fn head_key(&self, bucket: &str, name: u128) -> u128 {
        name ^ self.table.load().salt(bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bucket_has_the_salt_of_its_origin_however_many_there_are() {
        let plain = BTreeSet::new();
        for buckets in [0, 1, 4, 5, 300] {
            let origin = |n: usize| (format!("b{n}"), format!("s3://{n}"));
            let alone = |n| Salts::new(&Sources::new([origin(n)], "wild"), &plain);
            let salts = Salts::new(&Sources::new((0..buckets).map(origin), "wild"), &plain);
            for n in 0..buckets {
                let bucket = format!("b{n}");
                assert_eq!(salts.head_key(&bucket, 7), alone(n).head_key(&bucket, 7));
            }
            let wild = alone(1000).head_key("other", 7);
            for other in ["", "a", "b", "b1000", "c"] {
                assert_eq!(salts.head_key(other, 7), wild, "{other:?} of {buckets}");
            }
        }
    }
}
