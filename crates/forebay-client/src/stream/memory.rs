//! The memory that payloads are received into: aligned to 64 bytes, and reused.
//!
//! Allocating a payload of some MiB anew costs a page fault for each 4 KiB before a byte is in it.
//! So memory goes back to a small pool when the last array in it is dropped.
//!
//! Invariant: a block is written by one receiver, up to the length that becomes its [`Buffer`],
//! before anybody can read it; bytes that were never written are never read. In a forked child, a
//! thread that does not exist there may hold the pool's lock: memory is then freed and not given
//! back.

use arrow_buffer::Buffer;
use forebay_core::{Error, Result, sync::Mutex};
use forebay_protocol::frame::FRAME_ALIGNMENT;
use std::{
    alloc::{self, Layout},
    mem::{ManuallyDrop, MaybeUninit},
    ptr::NonNull,
    sync::Arc,
};

/// How many blocks, and bytes in them, wait for the next payload.
const POOL_BLOCKS_MAX: usize = 64;
const POOL_BYTES_MAX: usize = 128 << 20;
const BLOCK_MIN_BYTES: usize = 4 << 10;

/// One allocation.
struct Block {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, owned by one value at a time.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn new(bytes: usize) -> Result<Block> {
        let no_memory = || {
            Error::internal(format!(
                "memory for a frame of {bytes} bytes could not be allocated"
            ))
            .hint("take smaller batches, or raise the process's memory limit")
        };
        let layout = Layout::from_size_align(bytes, FRAME_ALIGNMENT).map_err(|_| no_memory())?;
        // SAFETY: the size is not zero.
        let at = NonNull::new(unsafe { alloc::alloc(layout) }).ok_or_else(no_memory)?;
        Ok(Block { at, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { alloc::dealloc(self.at.as_ptr(), self.layout) };
    }
}

/// Memory that waits for the next payload.
pub struct Pool {
    pid: u32,
    free: Mutex<Vec<Block>>,
}

impl Pool {
    pub fn new() -> Arc<Self> {
        Arc::new(Pool {
            pid: std::process::id(),
            free: Mutex::default(),
        })
    }

    /// Memory for `bytes`.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Payload> {
        // Sizes are steps of a quarter of a power of two, so that payloads of about the same size
        // can reuse each other's memory.
        let step = (bytes.max(BLOCK_MIN_BYTES).next_power_of_two() / 8).max(FRAME_ALIGNMENT);
        let size = bytes.max(BLOCK_MIN_BYTES).next_multiple_of(step);
        let found = {
            let mut free = self.free.lock();
            free.iter()
                .rposition(|b| b.layout.size() == size)
                .map(|i| free.swap_remove(i))
        };
        let block = match found {
            Some(block) => block,
            None => Block::new(size)?,
        };
        Ok(Payload {
            memory: Owned {
                block: ManuallyDrop::new(block),
                pool: self.clone(),
            },
            written: 0,
            want: bytes,
        })
    }

    fn give(&self, block: Block) {
        let size = block.layout.size();
        if size > POOL_BYTES_MAX {
            return;
        }
        // Dropped after the lock is released.
        let mut too_many = Vec::new();
        let mut free = self.free.lock();
        let mut held: usize = free.iter().map(|b| b.layout.size()).sum();
        // Drops the oldest first, so that unused sizes do not stay.
        while held + size > POOL_BYTES_MAX || free.len() >= POOL_BLOCKS_MAX {
            let oldest = free.remove(0);
            held -= oldest.layout.size();
            too_many.push(oldest);
        }
        free.push(block);
    }
}

/// A block that goes back to its pool.
struct Owned {
    block: ManuallyDrop<Block>,
    pool: Arc<Pool>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: taken out only once, here.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        if self.pool.pid == std::process::id() {
            self.pool.give(block);
        }
    }
}

/// A payload while it is received.
pub struct Payload {
    memory: Owned,
    written: usize,
    want: usize,
}

impl Payload {
    /// The part that is still to be written.
    pub fn spare(&mut self) -> &mut [MaybeUninit<u8>] {
        let left = self.want - self.written;
        // SAFETY: inside the block, and borrowed from its one owner.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.block.at.as_ptr().add(self.written).cast(),
                left,
            )
        }
    }

    /// # Safety
    /// The first `bytes` of [`Payload::spare`] have been written.
    pub unsafe fn advance(&mut self, bytes: usize) {
        assert!(
            bytes <= self.want - self.written,
            "more was written than there is room for"
        );
        self.written += bytes;
    }

    pub fn written(&self) -> &[u8] {
        // SAFETY: these bytes have been written.
        unsafe { std::slice::from_raw_parts(self.memory.block.at.as_ptr(), self.written) }
    }

    /// The first `bytes` of what was written.
    pub fn into_buffer(self, bytes: usize) -> Buffer {
        assert!(bytes <= self.written, "a buffer past what was written");
        let at = self.memory.block.at;
        // SAFETY: these bytes have been written, and `memory` keeps them as long as the buffer or a
        // slice of it lives.
        unsafe { Buffer::from_custom_allocation(at, bytes, Arc::new(self.memory)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(payload: &mut Payload, with: u8) {
        let spare = payload.spare();
        let n = spare.len();
        spare.iter_mut().for_each(|b| {
            b.write(with);
        });
        // SAFETY: just written.
        unsafe { payload.advance(n) };
    }

    #[test]
    fn memory_is_aligned_and_used_again_when_the_last_view_is_gone() {
        let pool = Pool::new();
        let mut payload = pool.take(100_000).unwrap();
        fill(&mut payload, 7);
        let buffer = payload.into_buffer(99_999);
        let at = buffer.as_ptr();
        assert_eq!(at as usize % FRAME_ALIGNMENT, 0);
        let view = buffer.slice(50_000);
        drop(buffer);
        assert!(pool.free.lock().is_empty(), "a view holds it");
        assert!(view.iter().all(|&b| b == 7));
        drop(view);
        let again = pool.take(99_000).unwrap();
        assert_eq!(again.memory.block.at.as_ptr().cast_const(), at);
        assert!(again.written().is_empty());
    }

    #[test]
    fn the_pool_is_bounded() {
        let pool = Pool::new();
        let many: Vec<_> = (0..200).map(|_| pool.take(3 << 20).unwrap()).collect();
        drop(many);
        let free = pool.free.lock();
        assert!(
            free.len() <= POOL_BLOCKS_MAX
                && free.iter().map(|b| b.layout.size()).sum::<usize>() <= POOL_BYTES_MAX,
            "{}",
            free.len()
        );
        assert!(!free.is_empty());
    }

    #[test]
    fn the_pool_is_bounded_under_payloads_of_two_sizes() {
        let pool = Pool::new();
        let held = || {
            let free = pool.free.lock();
            free.iter().map(|b| b.layout.size()).sum::<usize>()
        };
        for _ in 0..3 {
            // A large block takes the room of several small ones, not of one.
            for bytes in [2 << 20, 20 << 20] {
                let many: Vec<_> = (0..POOL_BLOCKS_MAX)
                    .map(|_| pool.take(bytes).unwrap())
                    .collect();
                for payload in many {
                    drop(payload);
                    assert!(held() <= POOL_BYTES_MAX, "{} of {bytes}", held());
                }
                assert!(held() > POOL_BYTES_MAX / 2, "the last size is kept");
            }
        }
        // What is larger than the pool never goes into it, and drives nothing out of it.
        let before = held();
        drop(pool.take(POOL_BYTES_MAX + 1).unwrap());
        assert_eq!(held(), before);
    }
}
