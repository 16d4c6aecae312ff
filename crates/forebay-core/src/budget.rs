//! One bound on the bytes that buffers may hold, for the whole process.
//!
//! Work reserves before it allocates and gives back by dropping its [`Reservation`]. There are two
//! kinds, so that nothing waits in a circle:
//!
//! - bytes *passing through* ([`MemoryBudget::reserve`]): a chunk between the wire and its
//!   reader. Its holder can finish without more memory.
//! - bytes *held* ([`MemoryBudget::try_hold`], [`MemoryBudget::hold`]): the window of a batch, what
//!   look-ahead keeps, the parts of a write. Its holder may have to wait for memory of the first
//!   kind. Held bytes are at most half of the pool, so the other half always comes back.
//!
//! Accepting new work uses `try_hold`, which fails at once (429), perhaps a few times; work that was
//! accepted waits, in order of arrival.

use crate::{Error, Result, limits};
use std::{future::Future, sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The grain of accounting: a permit is one KiB, so that 4 TiB fit a semaphore's count on every
/// platform.
const UNIT_BYTES: u64 = 1024;

/// A shared pool of bytes.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    units: Arc<Semaphore>,
    /// The part of them that may be held.
    holdable: Arc<Semaphore>,
    total_units: u32,
}

/// Bytes held from a [`MemoryBudget`] until dropped.
#[derive(Debug)]
pub struct Reservation {
    _permit: OwnedSemaphorePermit,
    _held: Option<OwnedSemaphorePermit>,
    bytes: u64,
}

impl Reservation {
    /// How many bytes it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `bytes` out of it, at most all.
    pub fn split(&mut self, bytes: u64) -> Reservation {
        let bytes = bytes.min(self.bytes);
        let units = bytes.div_ceil(UNIT_BYTES) as usize;
        let part = |permit: &mut OwnedSemaphorePermit| {
            let units = units.min(permit.num_permits());
            permit.split(units)
        };
        let (permit, held) = (part(&mut self._permit), self._held.as_mut().map(part));
        self.bytes -= bytes;
        Reservation {
            _permit: permit.expect("a permit has as many as it has"),
            _held: held.map(|held| held.expect("a permit has as many as it has")),
            bytes,
        }
    }

    /// Keeps `bytes` and gives back the rest.
    pub fn shrink(&mut self, bytes: u64) {
        let units = |bytes: u64| bytes.div_ceil(UNIT_BYTES).max(1);
        let more = units(self.bytes).saturating_sub(units(bytes)) as usize;
        if more > 0 {
            drop(self._permit.split(more));
            if let Some(held) = &mut self._held {
                drop(held.split(more));
            }
            self.bytes = bytes;
        }
    }
}

impl MemoryBudget {
    /// A pool of this many bytes, half of which may be held.
    pub fn new(total_bytes: u64) -> Self {
        let total_units = (total_bytes / UNIT_BYTES).clamp(1, u32::MAX as u64) as u32;
        let holdable = total_units.div_ceil(2) as usize;
        Self {
            units: Arc::new(Semaphore::new(total_units as usize)),
            holdable: Arc::new(Semaphore::new(holdable)),
            total_units,
        }
    }

    /// A pool of which `bytes` may be held, and as much may pass through beside that.
    pub fn with_holdable(bytes: u64) -> Self {
        Self::new(bytes.saturating_mul(2))
    }

    /// The size of the pool.
    pub fn total_bytes(&self) -> u64 {
        self.total_units as u64 * UNIT_BYTES
    }

    /// The most that may be held at once.
    pub fn holdable_bytes(&self) -> u64 {
        u64::from(self.total_units.div_ceil(2)) * UNIT_BYTES
    }

    /// What is reserved now, of either kind.
    pub fn used_bytes(&self) -> u64 {
        (self.total_units as u64).saturating_sub(self.units.available_permits() as u64) * UNIT_BYTES
    }

    fn units_for(&self, bytes: u64, of_bytes: u64) -> Result<u32> {
        let units = bytes.div_ceil(UNIT_BYTES).max(1);
        if units > of_bytes / UNIT_BYTES {
            return Err(Error::new(
                crate::ErrorKind::TooLarge,
                format!(
                    "a buffer of {bytes} bytes exceeds the {of_bytes} that a memory budget of {} \
                     allows for it",
                    self.total_bytes()
                ),
            )
            .hint("raise memory.budget"));
        }
        Ok(units as u32)
    }

    fn busy(&self, bytes: u64) -> Error {
        Error::busy(format!(
            "the memory budget is used up: {} of {} bytes are in use, and {bytes} more are needed",
            self.used_bytes(),
            self.total_bytes()
        ))
        .retry_after(Duration::from_secs(1))
    }

    /// Holds `bytes` now, or fails with [`ErrorKind::Busy`](crate::ErrorKind::Busy) and a
    /// Retry-After of one second.
    pub fn try_hold(&self, bytes: u64) -> Result<Reservation> {
        let units = self.units_for(bytes, self.holdable_bytes())?;
        let held = self
            .holdable
            .clone()
            .try_acquire_many_owned(units)
            .map_err(|_| self.busy(bytes))?;
        let permit = self
            .units
            .clone()
            .try_acquire_many_owned(units)
            .map_err(|_| self.busy(bytes))?;
        Ok(Reservation {
            _permit: permit,
            _held: Some(held),
            bytes,
        })
    }

    /// Holds `bytes`, waiting for others to give back; first come, first served.
    ///
    /// # Errors
    /// `Busy` after [`limits::MEMORY_WAIT_MAX_SECS`].
    pub async fn hold(&self, bytes: u64) -> Result<Reservation> {
        let most = Duration::from_secs(limits::MEMORY_WAIT_MAX_SECS);
        self.hold_within(bytes, most).await
    }

    /// The same, waiting no longer than this.
    ///
    /// # Errors
    /// `Busy` after that time.
    pub async fn hold_within(&self, bytes: u64, most: Duration) -> Result<Reservation> {
        let units = self.units_for(bytes, self.holdable_bytes())?;
        let taking = async {
            let held = acquire(&self.holdable, units).await?;
            let permit = acquire(&self.units, units).await?;
            Ok(Reservation {
                _permit: permit,
                _held: Some(held),
                bytes,
            })
        };
        self.in_time(bytes, most, taking).await
    }

    /// Takes `bytes` for something that passes through, waiting for others to give back; first
    /// come, first served.
    ///
    /// # Errors
    /// `Busy` after [`limits::MEMORY_WAIT_MAX_SECS`].
    pub async fn reserve(&self, bytes: u64) -> Result<Reservation> {
        let units = self.units_for(bytes, self.total_bytes())?;
        let most = Duration::from_secs(limits::MEMORY_WAIT_MAX_SECS);
        let taking = async {
            Ok(Reservation {
                _permit: acquire(&self.units, units).await?,
                _held: None,
                bytes,
            })
        };
        self.in_time(bytes, most, taking).await
    }

    async fn in_time(
        &self,
        bytes: u64,
        most: Duration,
        taking: impl Future<Output = Result<Reservation>>,
    ) -> Result<Reservation> {
        tokio::time::timeout(most, taking)
            .await
            .unwrap_or_else(|_| {
                Err(Error::busy(format!(
                    "{bytes} bytes of the memory budget did not come free within {} s",
                    most.as_secs_f64()
                ))
                .hint(
                    "clients that read slowly hold it; raise memory.budget if you have many of \
                     them",
                )
                .retry_after(Duration::from_secs(1)))
            })
    }
}

async fn acquire(of: &Arc<Semaphore>, units: u32) -> Result<OwnedSemaphorePermit> {
    of.clone()
        .acquire_many_owned(units)
        .await
        .map_err(|_| Error::internal("the memory budget is closed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[tokio::test]
    async fn a_reservation_comes_back_when_dropped() {
        let b = MemoryBudget::new(10 * 1024);
        let r = b.reserve(8 * 1024).await.unwrap();
        assert_eq!(b.used_bytes(), 8 * 1024);
        assert_eq!(b.try_hold(4 * 1024).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(b.used_bytes(), 8 * 1024, "what was refused holds nothing");
        assert_eq!(
            b.reserve(11 * 1024).await.unwrap_err().kind(),
            ErrorKind::TooLarge
        );
        drop(r);
        assert_eq!(b.used_bytes(), 0);
        assert!(b.reserve(10 * 1024).await.is_ok());
    }

    #[tokio::test]
    async fn what_is_too_much_is_given_back() {
        let b = MemoryBudget::new(10 * 1024);
        let mut held = b.try_hold(5 * 1024).unwrap();
        held.shrink(6 * 1024);
        assert_eq!((held.bytes(), b.used_bytes()), (5 * 1024, 5 * 1024));
        held.shrink(1500);
        assert_eq!((held.bytes(), b.used_bytes()), (1500, 2 * 1024));
        let other = b.try_hold(3 * 1024).unwrap();
        drop((held, other));
        assert_eq!(b.used_bytes(), 0);
    }

    #[tokio::test]
    async fn at_most_half_is_held() {
        let b = MemoryBudget::new(10 * 1024);
        assert_eq!(
            b.try_hold(6 * 1024).unwrap_err().kind(),
            ErrorKind::TooLarge
        );
        let first = b.try_hold(3 * 1024).unwrap();
        let second = b.hold(2 * 1024).await.unwrap();
        assert_eq!(b.try_hold(1).unwrap_err().kind(), ErrorKind::Busy);
        let passing = b.reserve(5 * 1024).await.unwrap();
        drop((first, second));
        assert_eq!(b.try_hold(5 * 1024).unwrap().bytes(), 5 * 1024);
        drop(passing);
        assert_eq!(b.used_bytes(), 0);
    }

    #[tokio::test]
    async fn what_waits_to_be_held_does_not_stop_what_passes_through() {
        let b = MemoryBudget::new(10 * 1024);
        let held = b.try_hold(5 * 1024).unwrap();
        let waiting = tokio::spawn({
            let b = b.clone();
            async move { b.hold(4 * 1024).await.unwrap().bytes() }
        });
        tokio::task::yield_now().await;
        drop(b.reserve(5 * 1024).await.unwrap());
        assert!(!waiting.is_finished());
        drop(held);
        assert_eq!(waiting.await.unwrap(), 4 * 1024);
    }
}
