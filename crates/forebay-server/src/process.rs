//! What the operating system says about this process and machine, from Linux's `/proc`. Elsewhere
//! the answers are zero.

use std::{fs, path::Path, time::Duration};

/// User and system time that this process has used.
pub fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is a valid place for one `rusage`, and all-zero bytes are a valid value of
    // it.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0 {
            return Duration::ZERO;
        }
        usage.assume_init()
    };
    let time =
        |t: libc::timeval| Duration::new(t.tv_sec.max(0) as u64, (t.tv_usec.max(0) as u32) * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Resident memory of this process.
pub fn resident_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|s| s.split(' ').nth(1)?.parse::<u64>().ok())
        .unwrap_or(0);
    // SAFETY: `sysconf` reads a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages * u64::try_from(page).unwrap_or(4096)
}

/// Open file descriptors of this process.
pub fn open_fds() -> u64 {
    fs::read_dir("/proc/self/fd")
        .map(|d| d.count() as u64)
        .unwrap_or(0)
}

/// How many files this process may have open.
pub fn open_files_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid place for one `rlimit`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return u64::MAX;
    }
    limit.rlim_cur
}

/// Raises this process's limit of open files as far as it may, and returns it. Systems default to
/// as few as 1,024, for the sake of old programs.
pub fn raise_open_files() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid place for one `rlimit`, and a valid value of it to read.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return 0;
        }
        let now = limit.rlim_cur;
        limit.rlim_cur = limit.rlim_max;
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) != 0 {
            return now;
        }
    }
    limit.rlim_cur
}

/// The machine's memory, or the limit of a control group that this process is in where that is less.
pub fn memory_total_bytes() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            text.lines().find_map(|l| {
                l.strip_prefix("MemTotal:")?
                    .trim()
                    .strip_suffix(" kB")?
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
        })
        .map_or(u64::MAX, |kib| kib * 1024);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    machine.min(group_limit_bytes(Path::new("/sys/fs/cgroup"), &groups))
}

/// The least limit of memory among the control groups that a process is in, and those above them.
/// `groups` is its `/proc/self/cgroup`. In a container, that may name groups that are not to be seen
/// there, while the container's own is at the root: so the root counts too.
fn group_limit_bytes(root: &Path, groups: &str) -> u64 {
    let mut least = u64::MAX;
    for line in groups.lines() {
        // `0::/a/b`, or where each controller has a tree of its own: `4:memory:/a/b`.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (top, file) = if controllers.is_empty() {
            (root.to_owned(), "memory.max")
        } else if controllers.split(',').any(|c| c == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let own = Path::new(group.trim_start_matches('/'));
        for group in own.ancestors() {
            // (Without a limit, one file says `max`, and the other a number that is larger than any
            // machine.)
            let limit = fs::read_to_string(top.join(group).join(file))
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok());
            least = least.min(limit.unwrap_or(u64::MAX));
        }
    }
    least
}

/// Identifies this boot of this machine: two processes with the same value share a file system and
/// its sockets.
pub fn host_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    forebay_protocol::node::host_id(&boot)
}

#[cfg(test)]
mod tests {
    use super::group_limit_bytes;
    use std::fs;

    #[test]
    fn the_limit_is_that_of_the_group_of_this_process_or_of_one_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let limit = |group: &str, file: &str, text: &str| {
            fs::create_dir_all(root.join(group)).unwrap();
            fs::write(root.join(group).join(file), text).unwrap();
        };
        let one_tree = "0::/system.slice/forebay.service\n";
        assert_eq!(group_limit_bytes(root, one_tree), u64::MAX);
        limit("system.slice/forebay.service", "memory.max", "max\n");
        limit("system.slice/other.service", "memory.max", "1024\n");
        assert_eq!(group_limit_bytes(root, one_tree), u64::MAX);
        limit("system.slice", "memory.max", "8589934592\n");
        assert_eq!(group_limit_bytes(root, one_tree), 8 << 30);
        limit("system.slice/forebay.service", "memory.max", "4294967296\n");
        assert_eq!(group_limit_bytes(root, one_tree), 4 << 30);
        // In a container, whose own group is at the root.
        limit("", "memory.max", "2147483648\n");
        assert_eq!(group_limit_bytes(root, "0::/\n"), 2 << 30);
        assert_eq!(group_limit_bytes(root, "0::/not/to/be/seen\n"), 2 << 30);

        let trees = "9:pids:/job\n4:cpu,memory:/slurm/job\n0::/elsewhere\n";
        limit("", "memory.max", "max\n");
        limit("memory", "memory.limit_in_bytes", "9223372036854771712\n");
        limit("memory/slurm/job", "memory.limit_in_bytes", "1073741824\n");
        assert_eq!(group_limit_bytes(root, trees), 1 << 30);
        assert_eq!(group_limit_bytes(root, "9:pids:/slurm/job\n"), u64::MAX);
        assert_eq!(group_limit_bytes(root, "no group\n"), u64::MAX);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_process_is_measured() {
        assert!(super::resident_bytes() > 0 && super::open_fds() > 0);
        assert!(super::memory_total_bytes() > 64 << 20 && super::memory_total_bytes() < u64::MAX);
        assert_eq!(super::host_id(), super::host_id());
        let files = super::raise_open_files();
        assert!(files > 0 && files == super::raise_open_files());
        let before = super::cpu_time();
        while super::cpu_time() == before {
            std::hint::black_box(super::host_id());
        }
    }
}
