//! Shared memory that DataLoader's workers fill and the training process reads, reused again and
//! again.
//!
//! A ring is a file without a name (`memfd`): workers inherit it or receive its descriptor, it
//! needs no space in `/dev/shm`, and the kernel frees it with the last process that has it, however
//! that process ends. It is divided into slots of equal size. A slot's pages are allocated when
//! they are first written, and stay.
//!
//! Each slot has one word in the first page: a number that grows with each use, the process that
//! has the slot, and its phase:
//!
//! ```text
//! FREE ──take──► FILLING (a worker) ──send──► SENT (on its way) ──receive──► HELD (the training process) ──last view dropped──► FREE
//! ```
//!
//! Invariant: every change is one compare-and-swap of the whole word, so a slot has one owner, and
//! a message about an earlier use of a slot can never be mistaken for the present one. A slot whose
//! process died (while filling it, or after sending it and before it was received) is taken back
//! when no other slot is free.
//!
//! Both sides are trusted: they are the same program.

use crate::{
    batch::fill_view,
    failure::{Class, Failure, Result},
    process,
};
use pyo3::{ffi, prelude::*, types::PyDict};
use std::{
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        raw::c_int,
    },
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

const MAGIC: u64 = u64::from_le_bytes(*b"FBRING01");
const HEADER_BYTES: usize = 4096;
pub const SLOTS_MAX: usize = 256;
const PAGE_BYTES: usize = 4096;
/// The largest total size of all slots.
const RING_MAX_BYTES: usize = 1 << 40;

const FREE: u64 = 0;
const FILLING: u64 = 1;
const SENT: u64 = 2;
const HELD: u64 = 3;
/// The kernel's process ids have at most 22 bits.
const PID_BITS: u32 = 22;

fn word(uses: u64, pid: u32, phase: u64) -> u64 {
    uses << (PID_BITS + 2) | (pid as u64) << 2 | phase
}

fn uses(word: u64) -> u64 {
    word >> (PID_BITS + 2)
}

fn owner(word: u64) -> u32 {
    (word >> 2) as u32 & ((1 << PID_BITS) - 1)
}

fn phase(word: u64) -> u64 {
    word & 3
}

/// The first page of the file.
#[repr(C)]
struct Head {
    magic: u64,
    slots: u64,
    slot_bytes: u64,
    /// Batches that went through a slot, and those that did not because none was free or it was too
    /// small.
    sent: AtomicU64,
    none_free: AtomicU64,
    too_large: AtomicU64,
    reclaimed: AtomicU64,
    words: [AtomicU64; SLOTS_MAX],
}

const _: () = assert!(size_of::<Head>() <= HEADER_BYTES);

struct Shared {
    file: OwnedFd,
    base: NonNull<u8>,
    slots: usize,
    slot_bytes: usize,
}

// SAFETY: the mapping is plain shared memory; the slots' words say who may touch which slot.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

fn os_error(what: &str) -> Failure {
    Failure::new(
        Class::Error,
        format!(
            "shared memory for batches: {what}: {}",
            std::io::Error::last_os_error()
        ),
    )
    .hint("make the ring smaller, or raise the limit of memory or descriptors")
}

impl Shared {
    fn create(slots: usize, slot_bytes: usize) -> Result<Shared> {
        // SAFETY: plain system calls on a descriptor that is ours.
        let file = unsafe {
            let fd = libc::memfd_create(
                c"forebay-batches".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            );
            if fd < 0 {
                return Err(os_error("memfd_create"));
            }
            OwnedFd::from_raw_fd(fd)
        };
        let bytes = HEADER_BYTES + slots * slot_bytes;
        // Sealed, so that no process can remove pages that another one uses.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: as above.
        unsafe {
            if libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) != 0 {
                return Err(os_error("its size"));
            }
            if libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) != 0 {
                return Err(os_error("seals"));
            }
        }
        let shared = Shared {
            base: map(&file, bytes)?,
            file,
            slots,
            slot_bytes,
        };
        // SAFETY: nobody else uses the first page until they are told of the file; the words are
        // zero, which means free.
        unsafe {
            let head = shared.base.cast::<Head>().as_ptr();
            (*head).magic = MAGIC;
            (*head).slots = slots as u64;
            (*head).slot_bytes = slot_bytes as u64;
        }
        Ok(shared)
    }

    fn open(file: OwnedFd) -> Result<Shared> {
        let foreign =
            || Failure::invalid("the descriptor does not belong to a ring of this release");
        // SAFETY: `stat` is plain data, filled by the call.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(file.as_raw_fd(), &mut stat) != 0 {
                return Err(os_error("fstat"));
            }
            stat.st_size as usize
        };
        if size < HEADER_BYTES {
            return Err(foreign());
        }
        let mut shared = Shared {
            base: map(&file, size)?,
            file,
            slots: 0,
            slot_bytes: size - HEADER_BYTES,
        };
        let head = shared.head();
        let (slots, slot_bytes) = (head.slots as usize, head.slot_bytes as usize);
        let whole = slots
            .checked_mul(slot_bytes)
            .and_then(|n| n.checked_add(HEADER_BYTES));
        if head.magic != MAGIC || !(1..=SLOTS_MAX).contains(&slots) || whole != Some(size) {
            // Unmapped with the size that was mapped.
            shared.slots = 1;
            return Err(foreign());
        }
        (shared.slots, shared.slot_bytes) = (slots, slot_bytes);
        Ok(shared)
    }

    fn head(&self) -> &Head {
        // SAFETY: mapped, and large enough; except for the atomics, it was written before the file
        // was shared.
        unsafe { self.base.cast::<Head>().as_ref() }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.head().words[index]
    }

    fn change(&self, index: usize, from: u64, to: u64) -> bool {
        self.word(index)
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// A slot to fill: the first free one, so that no more pages are allocated than needed; else
    /// one whose owner is dead.
    fn take(&self) -> Option<(usize, u64)> {
        let pid = process::pid();
        for reclaim in [false, true] {
            for index in 0..self.slots {
                let now = self.word(index).load(Ordering::Acquire);
                let takeable = if reclaim {
                    phase(now) != FREE && dead(owner(now))
                } else {
                    phase(now) == FREE
                };
                let mine = word(uses(now) + 1, pid, FILLING);
                if takeable && self.change(index, now, mine) {
                    if reclaim {
                        self.head().reclaimed.fetch_add(1, Ordering::Relaxed);
                    }
                    return Some((index, mine));
                }
            }
        }
        None
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no slot is left (slots hold this).
        unsafe {
            libc::munmap(
                self.base.as_ptr().cast(),
                HEADER_BYTES + self.slots * self.slot_bytes,
            )
        };
    }
}

fn map(file: &OwnedFd, bytes: usize) -> Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    match NonNull::new(at.cast::<u8>()) {
        Some(base) if at != libc::MAP_FAILED => Ok(base),
        _ => Err(os_error("mmap")),
    }
}

/// Whether the process no longer exists. One that has ended but was not waited for has released
/// nothing yet, and is given time.
fn dead(pid: u32) -> bool {
    // SAFETY: signal 0 is only a question.
    unsafe { libc::kill(pid as libc::pid_t, 0) != 0 && *libc::__errno_location() == libc::ESRCH }
}

/// Shared memory for batches, in slots of equal size; see :class:`forebay.torch.BatchRing`, which
/// drives it.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Ring(Arc<Shared>);

#[pymethods]
impl Ring {
    #[new]
    fn new(slots: usize, slot_bytes: usize) -> PyResult<Ring> {
        if !(1..=SLOTS_MAX).contains(&slots) {
            return Err(Failure::invalid(format!(
                "a ring has 1 to {SLOTS_MAX} slots, not {slots}"
            ))
            .into());
        }
        if slot_bytes == 0 || slot_bytes > RING_MAX_BYTES / slots {
            return Err(Failure::invalid(format!("slot_bytes is {slot_bytes}"))
                .hint("a slot has at least 1 byte, and all slots together at most 1 TiB")
                .into());
        }
        Ok(Ring(Arc::new(Shared::create(
            slots,
            slot_bytes.next_multiple_of(PAGE_BYTES),
        )?)))
    }

    /// Opens the ring behind a descriptor from another process, and takes over the descriptor.
    #[staticmethod]
    fn open(descriptor: i32) -> PyResult<Ring> {
        // SAFETY: the caller gives the descriptor away.
        Ok(Ring(Arc::new(Shared::open(unsafe {
            OwnedFd::from_raw_fd(descriptor)
        })?)))
    }

    fn fileno(&self) -> i32 {
        self.0.file.as_raw_fd()
    }

    /// A slot to fill, or None if none is free.
    fn take(&self) -> Option<Slot> {
        self.0
            .take()
            .map(|(index, word)| Slot::new(&self.0, index, word))
    }

    /// The slot that another process sent.
    fn receive(&self, index: usize, number: u64) -> PyResult<Slot> {
        let pid = process::pid();
        let now = if index < self.0.slots {
            self.0.word(index).load(Ordering::Acquire)
        } else {
            0
        };
        let held = word(number, pid, HELD);
        if phase(now) != SENT || uses(now) != number || !self.0.change(index, now, held) {
            return Err(Failure::truncated(
                "a batch in shared memory was lost: the worker that \
                made it ended before it was received",
            )
            .hint("begin the epoch again with a new iterator")
            .into());
        }
        Ok(Slot::new(&self.0, index, held))
    }

    /// Counts a batch for which no slot was free.
    fn note_none_free(&self) {
        self.0.head().none_free.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a batch that was larger than a slot.
    fn note_too_large(&self) {
        self.0.head().too_large.fetch_add(1, Ordering::Relaxed);
    }

    #[getter]
    fn slots(&self) -> usize {
        self.0.slots
    }

    #[getter]
    fn slot_bytes(&self) -> usize {
        self.0.slot_bytes
    }

    /// What all processes have done with the ring since it was made, and the current state of its
    /// slots.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let head = self.0.head();
        let out = PyDict::new(py);
        for (name, count) in [
            ("sent", &head.sent),
            ("none_free", &head.none_free),
            ("too_large", &head.too_large),
            ("reclaimed", &head.reclaimed),
        ] {
            out.set_item(name, count.load(Ordering::Relaxed))?;
        }
        // What an ended process has left behind is free for whoever needs it.
        let now = |index: usize| {
            let word = self.0.word(index).load(Ordering::Relaxed);
            if phase(word) != FREE && dead(owner(word)) {
                FREE
            } else {
                phase(word)
            }
        };
        let phases: Vec<_> = (0..self.0.slots).map(now).collect();
        for (name, wanted) in [
            ("free", FREE),
            ("filling", FILLING),
            ("on_the_way", SENT),
            ("held", HELD),
        ] {
            out.set_item(
                name,
                phases.iter().filter(|phase| **phase == wanted).count(),
            )?;
        }
        Ok(out)
    }
}

/// A process's hold on a slot: the slot becomes free when the last part of this is dropped, unless
/// it was sent.
struct Claim {
    shared: Arc<Shared>,
    index: usize,
    /// The slot's word while this process has the slot.
    word: u64,
    pid: u32,
}

impl Claim {
    fn at(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe {
            self.shared
                .base
                .as_ptr()
                .add(HEADER_BYTES + self.index * self.shared.slot_bytes)
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a forked child the slot belongs to the parent. A slot that was sent is no longer ours:
        // its word has changed.
        if self.pid == process::pid() {
            self.shared
                .change(self.index, self.word, word(uses(self.word), 0, FREE));
        }
    }
}

/// One slot of a ring. It belongs to this process until it is sent or dropped; bytes-like and
/// writable.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Slot(Arc<Claim>);

impl Slot {
    fn new(shared: &Arc<Shared>, index: usize, word: u64) -> Self {
        Slot(Arc::new(Claim {
            shared: shared.clone(),
            index,
            word,
            pid: process::pid(),
        }))
    }

    /// The memory of a slot that is being filled. The slot is not reused before the room is
    /// dropped, even if Python lets go of it earlier.
    pub fn filling(&self) -> Result<Room> {
        let claim = &self.0;
        let now = claim.shared.word(claim.index).load(Ordering::Acquire);
        if claim.pid != process::pid() || now != claim.word || phase(now) != FILLING {
            return Err(Failure::invalid("this process may no longer fill the slot"));
        }
        Ok(Room(claim.clone()))
    }
}

#[pymethods]
impl Slot {
    /// Gives the slot to whoever receives ``(index, number)``.
    fn send(&self) -> PyResult<(usize, u64)> {
        let Claim {
            shared,
            index,
            word: now,
            pid,
        } = &*self.0;
        if *pid != process::pid()
            || phase(*now) != FILLING
            || !shared.change(*index, *now, word(uses(*now), *pid, SENT))
        {
            return Err(Failure::invalid("the slot was already sent")
                .hint("send a batch of the ring to one process, once")
                .into());
        }
        shared.head().sent.fetch_add(1, Ordering::Relaxed);
        Ok((*index, uses(*now)))
    }

    /// The address of the slot's memory in this process.
    #[getter]
    fn address(&self) -> usize {
        self.0.at() as usize
    }

    fn __len__(&self) -> usize {
        self.0.shared.slot_bytes
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let claim = &slf.get().0;
        // SAFETY: the mapping lives as long as this object, which the view holds.
        unsafe {
            fill_view(
                slf.as_any(),
                view,
                flags,
                claim.at(),
                claim.shared.slot_bytes,
            )
        }
    }
}

/// Where a batch is received: the bytes of a slot, which has one writer.
pub struct Room(Arc<Claim>);

impl Room {
    pub fn len(&self) -> usize {
        self.0.shared.slot_bytes
    }

    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        if at
            .checked_add(bytes.len())
            .is_none_or(|end| end > self.len())
        {
            return Err(Failure::truncated(
                "an entry is larger than its header says",
            ));
        }
        // SAFETY: inside the slot, which no other process touches while it is filled, and this
        // process does not read before the end.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.at().add(at), bytes.len()) };
        Ok(())
    }
}
