//! One bound on the bytes that buffers may hold, for the whole process.
//!
//! Work reserves before it allocates and gives back by dropping its [`Reservation`]. Accepting new work uses [`MemoryBudget::try_reserve`], which
//! fails at once (429); work that was accepted waits with [`MemoryBudget::reserve`], in the order of arrival.

use crate::{Error, Result, limits};
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The grain of accounting: a permit is one KiB, so that 4 TiB fit a semaphore's count on every platform.
const UNIT_BYTES: u64 = 1024;

/// A shared pool of bytes.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    units: Arc<Semaphore>,
    total_units: u32,
}

/// Bytes held from a [`MemoryBudget`] until dropped.
#[derive(Debug)]
pub struct Reservation {
    _permit: OwnedSemaphorePermit,
    bytes: u64,
}

impl Reservation {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl MemoryBudget {
    pub fn new(total_bytes: u64) -> Self {
        let total_units = (total_bytes / UNIT_BYTES).clamp(1, u32::MAX as u64) as u32;
        Self { units: Arc::new(Semaphore::new(total_units as usize)), total_units }
    }

    pub fn total_bytes(&self) -> u64 {
        self.total_units as u64 * UNIT_BYTES
    }

    pub fn used_bytes(&self) -> u64 {
        (self.total_units as u64).saturating_sub(self.units.available_permits() as u64) * UNIT_BYTES
    }

    fn units_for(&self, bytes: u64) -> Result<u32> {
        let units = bytes.div_ceil(UNIT_BYTES).max(1);
        if units > self.total_units as u64 {
            return Err(Error::new(
                crate::ErrorKind::TooLarge,
                format!("{bytes} bytes of buffer are more than the whole memory budget of {} bytes", self.total_bytes()),
            )
            .hint("raise memory.budget"));
        }
        Ok(units as u32)
    }

    /// Takes `bytes` now, or fails with [`ErrorKind::Busy`](crate::ErrorKind::Busy) and a Retry-After of one second.
    pub fn try_reserve(&self, bytes: u64) -> Result<Reservation> {
        let units = self.units_for(bytes)?;
        match self.units.clone().try_acquire_many_owned(units) {
            Ok(permit) => Ok(Reservation { _permit: permit, bytes }),
            Err(_) => Err(Error::busy(format!(
                "memory budget: {} of {} bytes are in use and {bytes} more were asked for",
                self.used_bytes(),
                self.total_bytes()
            ))
            .retry_after(Duration::from_secs(1))),
        }
    }

    /// Takes `bytes` if at least half of the pool stays free after it. For what is held until others come to it: work that waits always
    /// has the other half to go on with, so what is held can never make it wait for itself.
    pub fn try_reserve_spare(&self, bytes: u64) -> Option<Reservation> {
        let units = self.units_for(bytes).ok()?;
        let permit = self.units.clone().try_acquire_many_owned(units).ok()?;
        // Checked after taking, so that two at once cannot both pass.
        (self.units.available_permits() as u64 >= u64::from(self.total_units) / 2).then_some(Reservation { _permit: permit, bytes })
    }

    /// Takes `bytes`, waiting for others to give back; first come, first served.
    ///
    /// # Errors
    /// `Busy` after [`limits::MEMORY_WAIT_MAX_SECS`].
    pub async fn reserve(&self, bytes: u64) -> Result<Reservation> {
        let units = self.units_for(bytes)?;
        let wait = Duration::from_secs(limits::MEMORY_WAIT_MAX_SECS);
        match tokio::time::timeout(wait, self.units.clone().acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(Reservation { _permit: permit, bytes }),
            Ok(Err(_)) => Err(Error::internal("memory budget closed")),
            Err(_) => Err(Error::busy(format!("no {bytes} bytes of the memory budget came free in {} s", wait.as_secs()))
                .hint("readers that take nothing hold it; raise memory.budget if there are many")
                .retry_after(Duration::from_secs(1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_reservation_comes_back_when_dropped() {
        let b = MemoryBudget::new(10 * 1024);
        let r = b.try_reserve(8 * 1024).unwrap();
        assert_eq!(b.used_bytes(), 8 * 1024);
        assert_eq!(b.try_reserve(4 * 1024).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(b.try_reserve(11 * 1024).unwrap_err().kind(), ErrorKind::TooLarge);
        drop(r);
        assert_eq!(b.used_bytes(), 0);
        assert!(b.try_reserve(10 * 1024).is_ok());
    }

    #[test]
    fn what_is_spare_is_the_first_half() {
        let b = MemoryBudget::new(10 * 1024);
        let first = b.try_reserve_spare(3 * 1024).unwrap();
        let second = b.try_reserve_spare(2 * 1024).unwrap();
        assert!(b.try_reserve_spare(1).is_none());
        assert_eq!(b.used_bytes(), 5 * 1024, "what was refused holds nothing");
        drop((first, second));
        let work = b.try_reserve(6 * 1024).unwrap();
        assert!(b.try_reserve_spare(1).is_none());
        drop(work);
        assert!(b.try_reserve_spare(11 * 1024).is_none());
    }
}
