//! What was learned before this node began to trust what it knows (`Heads::Since`).
//!
//! Heads carry the second at which they were asked for, and the clock may have been ahead of what it is
//! now. So when trust begins, the floor becomes the highest second that any head may carry so far: the
//! clock's, and that of any request before. (Heads in the store that are from a later second when the
//! node starts count as never validated: `Store::distrust_after`.) Heads up to it are
//! revalidated; a clock that went back only makes that last longer.
//!
//! The floor is taken by the first who looks after trust began: a later one only makes more heads
//! hints.
//!
//! Invariant: what was asked for before trust began is not above its floor.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

pub(crate) struct Trust {
    /// The highest second at which anything was asked for.
    highest: AtomicU32,
    /// Which trust it is, in the upper half, and its floor.
    floor: AtomicU64,
}

impl Trust {
    /// Heads are of this second at most.
    pub(crate) fn new(highest_secs: u32) -> Self {
        Self {
            highest: AtomicU32::new(highest_secs),
            floor: AtomicU64::new(0),
        }
    }

    /// Something is about to be asked for. Before the request.
    pub(crate) fn asked(&self, at_secs: u32) {
        if self.highest.load(SeqCst) < at_secs {
            self.highest.fetch_max(at_secs, SeqCst);
        }
    }

    /// What is not above this second was known before that trust began.
    pub(crate) fn floor(&self, count: u32, now_secs: u32) -> u32 {
        loop {
            let known = self.floor.load(SeqCst);
            let (of, secs) = ((known >> 32) as u32, known as u32);
            if of == count {
                return secs;
            }
            if of > count {
                // Whoever asks was late: that trust has ended.
                return u32::MAX;
            }
            let secs = now_secs.max(self.highest.load(SeqCst));
            let new = (u64::from(count) << 32) | u64::from(secs);
            let taken = self.floor.compare_exchange(known, new, SeqCst, SeqCst);
            if taken.is_ok() {
                return secs;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::explore;
    use shuttle::{sync::Arc, thread};

    #[test]
    fn what_was_asked_for_before_trust_began_is_below_its_floor() {
        explore(50, || {
            let trust = Arc::new(Trust::new(7));
            assert_eq!(trust.floor(1, 3), 7, "the clock was set back");
            trust.asked(10);
            let other = trust.clone();
            let asks = thread::spawn(move || {
                // Trust 2 may begin meanwhile, by a clock that was set back.
                other.asked(12);
                (12, other.floor(2, 5))
            });
            let floor = trust.floor(2, 5);
            let (at, seen) = asks.join().unwrap();
            assert!(floor >= 10);
            assert_eq!(floor, seen, "one floor for all");
            assert_eq!(trust.floor(1, 5), u32::MAX);
            let _ = at;
        });
    }
}
