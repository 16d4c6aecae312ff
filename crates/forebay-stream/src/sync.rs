//! Locks that survive a fork.
//!
//! The standard library's locks are words of memory that the kernel waits on. `parking_lot` keeps its waiting threads in one table for the whole process; a fork
//! copies that table with threads in it that the child does not have, whose memory the child's new threads then reuse. So what lives in the client's process locks with
//! the standard library, through these thin wrappers: a panic while a lock is held does not poison it (what it guards is consistent between statements).

use std::{
    sync::{self, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

#[derive(Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits until `ready`, or `until`; says whether it is ready.
    pub fn wait_until<T>(&self, guard: MutexGuard<'_, T>, until: Instant, ready: impl Fn(&T) -> bool) -> bool {
        let patience = until.saturating_duration_since(Instant::now());
        let (guard, _) = self.0.wait_timeout_while(guard, patience, |value| !ready(value)).unwrap_or_else(PoisonError::into_inner);
        ready(&guard)
    }
}
