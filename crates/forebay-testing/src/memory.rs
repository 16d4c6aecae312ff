//! How much memory this process took at most: for tests that have a process of their own.

use std::fs;

/// Forgets how much it was, and has what is freed from now on given back to the kernel at once: the
/// allocator keeps some of it otherwise, in one run more than in another.
///
/// # Panics
/// The kernel does not allow it.
pub fn forget_peak() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, 128 << 10)] {
        // SAFETY: mallopt takes two integers and changes only the allocator's own settings.
        unsafe { libc::mallopt(parameter, value) };
    }
    fs::write("/proc/self/clear_refs", "5").expect("Linux' /proc");
}

/// The most memory that was resident since, in bytes.
///
/// # Panics
/// The kernel does not tell.
pub fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux' /proc");
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok())
        .expect("a line of VmHWM")
        << 10
}
