//! The memory that one batch is received into.
//!
//! A region reserves address space once and commits pages as bytes arrive, so it grows without
//! moving: views handed out while the batch is still arriving stay valid. It is private, writable
//! memory. When the last view is gone, the region returns to a small pool with its pages still
//! mapped, so the next batch does not pay for page faults.
//!
//! Invariant: one writer appends; readers get only ranges below what the writer has published
//! (under the batch's lock), so a reader and the writer never touch the same byte.

use crate::failure::{Class, Failure, Result};
use crate::process;
use crate::sync::Mutex;
use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Address space, not memory: the largest batch that one region can take.
pub const REGION_RESERVE_BYTES: usize = 64 << 30;
/// Of so many regions at the same time, each reserves that much, and of more, each reserves less: a
/// process has 128 TiB of address space, and somebody may keep thousands of batches.
const REGIONS_LARGE_MAX: usize = 512;
const REGION_RESERVE_LATER_BYTES: usize = 2 << 30;
/// If address space is scarce (`ulimit -v`), reservations shrink down to this before giving up.
const REGION_RESERVE_MIN_BYTES: usize = 64 << 20;
/// The smallest step in which pages are committed.
const COMMIT_STEP_BYTES: usize = 4 << 20;
/// The most regions, and bytes in them, that wait for the next batch.
const POOL_REGIONS_MAX: usize = 8;
const POOL_BYTES_MAX: usize = 512 << 20;
/// Of these, those whose size was known; and what their sizes are multiples of.
const POOL_SIZED_BYTES_MAX: usize = 256 << 20;
const SIZED_STEP_BYTES: usize = 2 << 20;

/// Regions of this process that reserve more address space than they commit.
static RESERVING: AtomicUsize = AtomicUsize::new(0);

/// Address space with its first `committed` bytes readable and writable.
struct Mapping {
    base: NonNull<u8>,
    reserved: usize,
    committed: usize,
    /// It is for answers whose size is known, and all of it is committed.
    sized: bool,
    /// It has less address space than others because there were many of them.
    is_small: bool,
}

// SAFETY: a mapping is plain memory, owned by one value at a time.
unsafe impl Send for Mapping {}

impl Mapping {
    fn reserve() -> Result<Mapping> {
        let is_small = RESERVING.load(Ordering::Relaxed) >= REGIONS_LARGE_MAX;
        let mut size = match is_small {
            true => REGION_RESERVE_LATER_BYTES,
            false => REGION_RESERVE_BYTES,
        };
        loop {
            // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing
            // that exists.
            let at = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    size,
                    libc::PROT_NONE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            match NonNull::new(at.cast::<u8>()) {
                Some(base) if at != libc::MAP_FAILED => {
                    RESERVING.fetch_add(1, Ordering::Relaxed);
                    return Ok(Mapping {
                        base,
                        reserved: size,
                        committed: 0,
                        sized: false,
                        is_small,
                    });
                }
                _ if size > REGION_RESERVE_MIN_BYTES => size /= 2,
                _ => return Err(out_of_memory("address space for a batch")),
            }
        }
    }

    /// As much as an answer of `bytes` needs.
    fn sized(bytes: usize) -> Result<Mapping> {
        let size = bytes
            .checked_next_multiple_of(SIZED_STEP_BYTES)
            .filter(|size| *size > 0)
            .ok_or_else(|| out_of_memory("memory for rows"))?;
        // SAFETY: as in `reserve`.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        match NonNull::new(at.cast::<u8>()) {
            Some(base) if at != libc::MAP_FAILED => Ok(Mapping {
                base,
                reserved: size,
                committed: size,
                sized: true,
                is_small: false,
            }),
            _ => Err(out_of_memory("memory for rows")),
        }
    }

    fn commit(&mut self, upto: usize) -> Result<()> {
        if upto <= self.committed {
            return Ok(());
        }
        if upto > self.reserved {
            return Err(Failure::new(
                Class::TooLarge,
                format!("the batch is larger than {} bytes", self.reserved),
            )
            .hint("ask for fewer entries in one batch, and keep fewer batches"));
        }
        // Grow by a quarter, not to double the size: the pool counts what is committed, and would
        // reject regions that are half empty.
        let target = upto
            .max(self.committed + self.committed / 4)
            .next_multiple_of(COMMIT_STEP_BYTES)
            .min(self.reserved);
        // SAFETY: the range lies inside our own mapping.
        let rc = unsafe {
            libc::mprotect(
                self.base.as_ptr().add(self.committed).cast(),
                target - self.committed,
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        if rc != 0 {
            return Err(out_of_memory("memory for a batch"));
        }
        self.committed = target;
        Ok(())
    }
}

fn out_of_memory(what: &str) -> Failure {
    Failure::new(
        Class::Error,
        format!(
            "{what} could not be allocated: {}",
            std::io::Error::last_os_error()
        ),
    )
    .hint(
        "ask for smaller batches, prefetch fewer, keep copies (bytes) in place of whole batches, or \
         raise the process's memory limit",
    )
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.sized {
            RESERVING.fetch_sub(1, Ordering::Relaxed);
        }
        // SAFETY: our own mapping, and no view is left (views hold the region).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.reserved) };
    }
}

/// Regions that wait for the next batch. One per client and process.
#[derive(Default)]
pub struct RegionPool {
    free: Mutex<Vec<Mapping>>,
}

impl RegionPool {
    fn take(&self) -> Option<Mapping> {
        let mut free = self.free.lock();
        let last = free.iter().rposition(|m| !m.sized)?;
        Some(free.remove(last))
    }

    /// The smallest that has room for `bytes`; none that is much larger, which would be held with it.
    fn take_sized(&self, bytes: usize) -> Option<Mapping> {
        let mut free = self.free.lock();
        let fits = |m: &Mapping| m.sized && m.reserved >= bytes && m.reserved / 2 <= bytes;
        let all = free.iter().enumerate().filter(|(_, m)| fits(m));
        let (best, _) = all.min_by_key(|(_, m)| m.reserved)?;
        Some(free.remove(best))
    }

    fn give(&self, mapping: Mapping) {
        if mapping.is_small {
            // The next batch may need more.
            return;
        }
        let mut free = self.free.lock();
        let held = |only_sized: bool| -> usize {
            let those = free.iter().filter(|m| m.sized || !only_sized);
            those.map(|m| m.committed).sum()
        };
        let fits = held(false) + mapping.committed <= POOL_BYTES_MAX
            && (!mapping.sized || held(true) + mapping.committed <= POOL_SIZED_BYTES_MAX);
        if free.len() < POOL_REGIONS_MAX && fits {
            free.push(mapping);
        }
    }
}

/// The memory of one batch; see the module.
pub struct Region {
    pid: u32,
    pool: Arc<RegionPool>,
    base: NonNull<u8>,
    /// Only the writer locks it; `None` only inside `drop`.
    mapping: Mutex<Option<Mapping>>,
    published: AtomicUsize,
}

// SAFETY: `base` points into `mapping`, which lives as long as the region; the module's invariant
// says who may read and write which bytes.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub fn new(pool: &Arc<RegionPool>) -> Result<Region> {
        let mapping = match pool.take() {
            Some(mapping) => mapping,
            None => Mapping::reserve()?,
        };
        Ok(Region::over(mapping, pool))
    }

    /// A region with room for `bytes`, and no more than that takes.
    pub fn sized(bytes: usize, pool: &Arc<RegionPool>) -> Result<Region> {
        let mapping = match pool.take_sized(bytes) {
            Some(mapping) => mapping,
            None => Mapping::sized(bytes)?,
        };
        Ok(Region::over(mapping, pool))
    }

    fn over(mapping: Mapping, pool: &Arc<RegionPool>) -> Region {
        Region {
            pid: process::pid(),
            pool: pool.clone(),
            base: mapping.base,
            mapping: Mutex::new(Some(mapping)),
            published: AtomicUsize::new(0),
        }
    }

    /// Appends bytes. Only the one task that receives the batch calls this.
    pub fn append(&self, bytes: &[u8]) -> Result<()> {
        let at = self.published.load(Ordering::Relaxed);
        let end = at + bytes.len();
        if let Some(mapping) = self.mapping.lock().as_mut() {
            mapping.commit(end)?;
        }
        // SAFETY: `at..end` is committed and above everything that readers were given, and there is
        // one writer.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(at), bytes.len())
        };
        self.published.store(end, Ordering::Release);
        Ok(())
    }

    /// Forgets the bytes from `len` on, of which no reader may have a view.
    pub fn cut_to(&self, len: usize) {
        self.published.fetch_min(len, Ordering::AcqRel);
    }

    /// Bytes received so far.
    pub fn len(&self) -> usize {
        self.published.load(Ordering::Acquire)
    }

    pub fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.len()),
            "a view past what has arrived"
        );
        // SAFETY: published, so committed and no longer written by us.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// The address of byte `at`, for Python's buffer protocol.
    pub fn pointer(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len(), "an address past what has arrived");
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(at) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.get_mut().take() {
            // In a forked child, a thread that does not exist there may hold the pool's lock: unmap
            // instead.
            if self.pid == process::pid() {
                self.pool.give(mapping);
            }
        }
    }
}
