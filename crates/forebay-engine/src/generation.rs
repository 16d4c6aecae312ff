//! Generations prevent a fill that began before a write from publishing after it.
//!
//! Each name belongs to one of a fixed number of stripes, each a counter and a lock. A fill notes
//! the counter when it begins and may publish a head, under the lock, only while the counter is
//! unchanged; a write removes the name from the store and increments the counter, under the same
//! lock, before it returns. Two names in one stripe cost each other at most a fill that is not
//! kept.
//!
//! The lock is held while the disk is written, so only threads that may block wait for it. Every
//! thread can read the counter; what is published only in RAM is published if the lock is free
//! ([`Generations::publish_now`]).
//!
//! Invariant: after a write of a name has returned, no version that was current before the write is
//! published under that name.

use crate::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::SeqCst},
};

const STRIPES: usize = 1024;

pub(crate) struct Generations {
    stripes: Vec<Stripe>,
}

#[derive(Default)]
struct Stripe {
    /// Changed only under `publishing`.
    generation: AtomicU64,
    publishing: Mutex<()>,
}

impl Default for Generations {
    fn default() -> Self {
        Self {
            stripes: (0..STRIPES).map(|_| Stripe::default()).collect(),
        }
    }
}

impl Generations {
    fn stripe(&self, hash: u128) -> &Stripe {
        &self.stripes[(hash as usize) % STRIPES]
    }

    /// Never waits.
    pub(crate) fn current(&self, hash: u128) -> u64 {
        self.stripe(hash).generation.load(SeqCst)
    }

    /// Runs `publish` if nothing was written since `generation` was noted. May wait for a disk.
    pub(crate) fn publish<T>(
        &self,
        hash: u128,
        generation: u64,
        publish: impl FnOnce() -> T,
    ) -> Option<T> {
        let stripe = self.stripe(hash);
        let _publishing = stripe.publishing.lock();
        (stripe.generation.load(SeqCst) == generation).then(publish)
    }

    /// The same if the lock is free, for publications that are optional: `publish` must not wait
    /// either.
    pub(crate) fn publish_now<T>(
        &self,
        hash: u128,
        generation: u64,
        publish: impl FnOnce() -> T,
    ) -> Option<T> {
        let stripe = self.stripe(hash);
        let _publishing = stripe.publishing.try_lock()?;
        (stripe.generation.load(SeqCst) == generation).then(publish)
    }

    /// Runs `forget`, and increments the counter before any fill may publish again. May wait for a
    /// disk.
    pub(crate) fn step<T>(&self, hash: u128, forget: impl FnOnce() -> T) -> T {
        let stripe = self.stripe(hash);
        let _publishing = stripe.publishing.lock();
        // Only afterwards: a reader that reads what is being forgotten, and noted the counter
        // before, must not publish it.
        let forgotten = forget();
        stripe.generation.fetch_add(1, SeqCst);
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::explore;
    use shuttle::{sync::Arc, thread};

    #[test]
    fn nothing_from_before_a_write_is_published_after_it() {
        explore(20, || {
            let g = Generations::default();
            let before = g.current(7);
            assert_eq!(g.publish(7, before, || 1), Some(1));
            g.step(7, || ());
            assert_eq!(g.publish(7, before, || 1), None);
            assert_eq!(g.publish(7, g.current(7), || 1), Some(1));
            assert_eq!(
                g.publish(8, 0, || 1),
                Some(1),
                "another stripe is untouched"
            );
        });
    }

    /// An origin, a store, and heads in RAM that are read from the store, as in the engine.
    #[derive(Default)]
    struct Node {
        generations: Generations,
        origin: Mutex<u32>,
        store: Mutex<Option<u32>>,
        heads: Mutex<Option<u32>>,
    }

    impl Node {
        fn read(&self) -> u32 {
            let held = *self.heads.lock();
            if let Some(held) = held {
                return held;
            }
            let generation = self.generations.current(7);
            let kept = *self.store.lock();
            let (found, from_origin) = match kept {
                Some(kept) => (kept, false),
                None => (*self.origin.lock(), true),
            };
            let keep = || {
                if from_origin {
                    *self.store.lock() = Some(found);
                }
                *self.heads.lock() = Some(found);
            };
            // Like the engine: what came from the store is only remembered in RAM.
            if from_origin {
                self.generations.publish(7, generation, keep);
            } else {
                self.generations.publish_now(7, generation, keep);
            }
            found
        }

        fn write(&self, version: u32) {
            *self.origin.lock() = version;
            self.generations.step(7, || {
                *self.heads.lock() = None;
                *self.store.lock() = None;
            });
        }
    }

    #[test]
    fn a_writer_reads_its_write_or_a_later_one_in_every_schedule() {
        explore(1000, || {
            let node = Arc::new(Node::default());
            let readers = (0..2).map(|_| {
                let node = node.clone();
                thread::spawn(move || {
                    let first = node.read();
                    assert!(first <= 2 && node.read() <= 2);
                })
            });
            let writer = {
                let node = node.clone();
                thread::spawn(move || {
                    for version in 1..3 {
                        node.write(version);
                        assert_eq!(node.read(), version, "what was written is read");
                    }
                })
            };
            let all: Vec<_> = readers.chain([writer]).collect();
            all.into_iter().for_each(|t| t.join().unwrap());
            assert_eq!(node.read(), 2);
        });
    }
}
