//! Generations: what keeps a fill that began before a write from publishing after it.
//!
//! Each name belongs to one of a fixed number of stripes, each a counter under a lock. A fill notes the counter when it begins and may publish a
//! head only while the counter is unchanged; a write steps the counter and removes the name from the store, under the same lock, before it
//! returns. Two names in one stripe cost each other at most a fill that is not kept.
//!
//! Invariant: after a write of a name has returned, no version that was current before the write is published under that name.

use parking_lot::Mutex;

const STRIPES: usize = 1024;

pub(crate) struct Generations {
    stripes: Vec<Mutex<u64>>,
}

impl Default for Generations {
    fn default() -> Self {
        Self { stripes: (0..STRIPES).map(|_| Mutex::new(0)).collect() }
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
    pub(crate) fn publish<T>(&self, hash: u128, generation: u64, publish: impl FnOnce() -> T) -> Option<T> {
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

    #[test]
    fn nothing_from_before_a_write_is_published_after_it() {
        let g = Generations::default();
        let before = g.current(7);
        assert_eq!(g.publish(7, before, || 1), Some(1));
        g.step(7, || ());
        assert_eq!(g.publish(7, before, || 1), None);
        assert_eq!(g.publish(7, g.current(7), || 1), Some(1));
        assert_eq!(g.publish(8, 0, || 1), Some(1), "another stripe is untouched");
    }
}
