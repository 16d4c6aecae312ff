//! Locks, atomics and sleep: the standard ones; in the unit tests of this crate those of shuttle,
//! which runs the threads of `schedules.rs` in one order after another.

#[cfg(not(test))]
pub use forebay_core::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
#[cfg(not(test))]
pub use std::{
    sync::atomic,
    thread::{scope, sleep},
};

#[cfg(test)]
pub use explored::*;

#[cfg(test)]
mod explored {
    pub use shuttle::{
        sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard, atomic},
        thread::{scope, sleep},
    };

    #[derive(Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread failed with the lock")
        }
    }

    #[derive(Default)]
    pub struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub fn new(value: T) -> Self {
            Self(shuttle::sync::RwLock::new(value))
        }

        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().expect("no thread failed with the lock")
        }

        pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
            self.0.try_read().ok()
        }

        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().expect("no thread failed with the lock")
        }
    }
}
