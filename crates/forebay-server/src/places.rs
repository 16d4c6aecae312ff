//! Places that requests and connections take. Their number is limited, and the limit may change
//! while some are taken.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Nobody waits for a place: the caller gets one at once or is refused.
#[derive(Debug)]
pub struct Places {
    most: AtomicUsize,
    taken: AtomicUsize,
}

/// A place that is taken; dropping it gives it back.
#[derive(Debug)]
pub struct Place(Arc<Places>);

impl Places {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Places {
            most: AtomicUsize::new(most),
            taken: AtomicUsize::new(0),
        })
    }

    /// How many places may be taken.
    pub fn most(&self) -> usize {
        self.most.load(Relaxed)
    }

    /// Sets the limit from now on. Places already taken beyond it stay taken until they are given
    /// back.
    pub fn set_most(&self, most: usize) {
        self.most.store(most, Relaxed);
    }

    pub fn try_take(self: &Arc<Self>) -> Option<Place> {
        let most = self.most();
        self.taken
            .fetch_update(Relaxed, Relaxed, |taken| {
                (taken < most).then_some(taken + 1)
            })
            .ok()
            .map(|_| Place(self.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_limit_lets_those_inside_finish() {
        let places = Places::new(2);
        let (a, b) = (places.try_take(), places.try_take());
        assert!(a.is_some() && b.is_some() && places.try_take().is_none());
        places.set_most(1);
        drop(a);
        assert!(places.try_take().is_none(), "one is taken, and one may be");
        drop(b);
        let c = places.try_take();
        assert!(c.is_some() && places.try_take().is_none());
        places.set_most(2);
        assert!(places.try_take().is_some());
    }
}
