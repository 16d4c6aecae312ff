//! Locks that survive a fork, which a library inside somebody's Python process must.
//!
//! The standard library's locks are words of memory that the kernel waits on. `parking_lot` keeps
//! its waiting threads in one table for the whole process; a fork copies that table, including
//! threads that the child does not have and whose memory the child's new threads then reuse: an
//! engine that a forked DataLoader worker started crashed now and then with a segmentation fault.
//! So our own code locks with the standard library, through these thin wrappers: a panic while a
//! lock is held does not poison it (what it guards is consistent between statements).

pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::{
    sync::{self, LockResult, PoisonError, TryLockError, TryLockResult},
    time::Instant,
};

fn held<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}

fn held_now<G>(result: TryLockResult<G>) -> Option<G> {
    match result {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// One holder at a time.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock around a value.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        held(self.0.lock())
    }

    /// The lock if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        held_now(self.0.try_lock())
    }

    /// The guarded value, for an exclusive owner of the lock: never waits.
    pub fn get_mut(&mut self) -> &mut T {
        held(self.0.get_mut())
    }
}

/// Many readers or one writer. A thread that reads and asks to read again may wait for a writer
/// that waits for it: see [`RwLock::try_read`].
#[derive(Debug, Default)]
pub struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock around a value.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// Waits until no writer has the lock.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        held(self.0.read())
    }

    /// What it guards, unless a writer has it or waits for it.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        held_now(self.0.try_read())
    }

    /// Waits until nobody else has the lock.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        held(self.0.write())
    }
}

/// Lets threads wait for a change of what a [`Mutex`] guards.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// A condition variable that nobody waits on yet.
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Wakes all who wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits until `ready`, or `until`; says whether it is ready.
    pub fn wait_until<T>(
        &self,
        guard: MutexGuard<'_, T>,
        until: Instant,
        ready: impl Fn(&T) -> bool,
    ) -> bool {
        let patience = until.saturating_duration_since(Instant::now());
        let (guard, _) = held(
            self.0
                .wait_timeout_while(guard, patience, |value| !ready(value)),
        );
        ready(&guard)
    }
}
