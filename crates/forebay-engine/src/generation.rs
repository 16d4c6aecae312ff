//! Generations: what keeps a fill that began before a write from publishing after it.
//!
//! Each name belongs to one of a fixed number of stripes, each a counter under a lock. A fill notes
//! the counter when it begins and may publish a head only while the counter is unchanged; a write
//! steps the counter and removes the name from the store, under the same lock, before it returns.
//! Two names in one stripe cost each other at most a fill that is not kept.
//!
//! Invariant: after a write of a name has returned, no version that was current before the write is
//! published under that name.

use crate::sync::Mutex;

const STRIPES: usize = 1024;

pub(crate) struct Generations {
    stripes: Vec<Mutex<u64>>,
}

impl Default for Generations {
    fn default() -> Self {
        Self {
            stripes: (0..STRIPES).map(|_| Mutex::new(0)).collect(),
        }
    }
}

impl Generations {
    fn stripe(&self, hash: u128) -> &Mutex<u64> {
        &self.stripes[(hash as usize) % STRIPES]
    }

    pub(crate) fn current(&self, hash: u128) -> u64 {
        *self.stripe(hash).lock()
    }

    /// Runs `publish` if nothing was written since `generation` was noted.
    pub(crate) fn publish<T>(
        &self,
        hash: u128,
        generation: u64,
        publish: impl FnOnce() -> T,
    ) -> Option<T> {
        let current = self.stripe(hash).lock();
        (*current == generation).then(publish)
    }

    /// Steps the counter and runs `forget` before any fill may publish again.
    pub(crate) fn step<T>(&self, hash: u128, forget: impl FnOnce() -> T) -> T {
        let mut current = self.stripe(hash).lock();
        *current += 1;
        forget()
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

    /// An origin, a store, and heads in RAM that are read from it, as the engine has them.
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
            self.generations.publish(7, generation, || {
                if from_origin {
                    *self.store.lock() = Some(found);
                }
                *self.heads.lock() = Some(found);
            });
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
    fn who_wrote_reads_that_write_or_a_later_one_in_every_schedule() {
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
