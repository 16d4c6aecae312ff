//! How the C library's allocator is set up for a node.
//!
//! A node's large buffers are made on one thread and dropped on another, all day. Left alone, glibc
//! maps each of them anew (and the kernel clears every page of it), or keeps an arena for each
//! thread that ever had one. Allocators that give each thread its own heap keep what other threads
//! have freed: mimalloc held eight times the memory of this under a mixed load and was not faster
//! ([ADR 7]).
//!
//! [ADR 7]: ../../../docs/adr/0007-the-c-librarys-allocator.md

/// Buffers of up to this size come from the heap and not from a mapping of their own; the largest
/// that glibc takes.
#[cfg(target_env = "gnu")]
const MMAP_FROM_BYTES: libc::c_int = 32 << 20;
/// What an arena may keep at its end before it is given back to the kernel.
#[cfg(target_env = "gnu")]
const KEEP_BYTES: libc::c_int = 32 << 20;
#[cfg(target_env = "gnu")]
const ARENAS_MAX: usize = 8;

/// To be called before the node's threads are there. What the environment says (`MALLOC_ARENA_MAX`,
/// …) goes first.
pub(crate) fn tune() {
    #[cfg(target_env = "gnu")]
    {
        let cores = std::thread::available_parallelism().map_or(2, |n| n.get());
        let settings = [
            (
                "MALLOC_ARENA_MAX",
                libc::M_ARENA_MAX,
                cores.clamp(2, ARENAS_MAX) as libc::c_int,
            ),
            (
                "MALLOC_MMAP_THRESHOLD_",
                libc::M_MMAP_THRESHOLD,
                MMAP_FROM_BYTES,
            ),
            ("MALLOC_TRIM_THRESHOLD_", libc::M_TRIM_THRESHOLD, KEEP_BYTES),
        ];
        for (variable, parameter, value) in settings {
            if std::env::var_os(variable).is_none() {
                // SAFETY: mallopt takes two integers and changes nothing but the allocator's own
                // settings.
                unsafe { libc::mallopt(parameter, value) };
            }
        }
    }
}
