//! Sets up the C library's allocator for a node.
//!
//! A node allocates large buffers on one thread and drops them on another, all day. Left alone,
//! glibc maps each of them anew (and the kernel clears every page), or keeps an arena for each
//! thread that ever had one. Allocators with a heap for each thread keep what other threads have
//! freed: under a mixed load, mimalloc held eight times as much memory and was not faster ([ADR
//! 7]).
//!
//! [ADR 7]: ../../../docs/adr/0007-the-c-librarys-allocator.md

/// Buffers of up to this size come from the heap instead of a mapping of their own. This is the
/// largest value that glibc takes.
#[cfg(target_env = "gnu")]
const MMAP_FROM_BYTES: libc::c_int = 32 << 20;
/// How much free memory an arena may keep at its end before giving it back to the kernel.
#[cfg(target_env = "gnu")]
const KEEP_BYTES: libc::c_int = 32 << 20;
#[cfg(target_env = "gnu")]
const ARENAS_MAX: usize = 8;

/// Must be called before the node's threads exist. Settings from the environment
/// (`MALLOC_ARENA_MAX`, …) take precedence.
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
                // SAFETY: mallopt takes two integers and changes only the allocator's own settings.
                unsafe { libc::mallopt(parameter, value) };
            }
        }
    }
}
