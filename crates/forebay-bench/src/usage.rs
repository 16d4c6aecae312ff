//! CPU time and peak memory of this process and of the servers, from the kernel's own counts.

use forebay_core::{Error, Result};
use std::{fs, time::Duration};

/// A server, by its process id, and the processes that it started (nginx's workers).
#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

/// The fields of `/proc/PID/stat` after the command's name, which may itself hold spaces and
/// parentheses.
fn stat(pid: u32) -> Option<Vec<u64>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after) = text.rsplit_once(')')?;
    Some(
        after
            .split_whitespace()
            .skip(1)
            .map(|f| f.parse().unwrap_or(0))
            .collect(),
    )
}

/// Positions in [`stat`]'s answer.
const PARENT: usize = 0;
const USER: usize = 10;
const SYSTEM: usize = 11;

impl Process {
    fn family(self) -> Vec<u32> {
        let mut family = vec![self.0];
        let Ok(processes) = fs::read_dir("/proc") else {
            return family;
        };
        for pid in processes
            .flatten()
            .filter_map(|p| p.file_name().to_str()?.parse::<u32>().ok())
        {
            if stat(pid).is_some_and(|s| s.get(PARENT) == Some(&u64::from(self.0))) {
                family.push(pid);
            }
        }
        family
    }

    /// User and system CPU time since the process began.
    pub fn cpu(self) -> Result<Duration> {
        // SAFETY: sysconf takes no pointers.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
        let gone = || {
            Error::internal(format!("the server, process {}, has ended", self.0))
                .hint("its log is above, if it was started here")
        };
        let mut ticks = 0;
        for (i, pid) in self.family().into_iter().enumerate() {
            match stat(pid) {
                Some(s) => ticks += s.get(USER).unwrap_or(&0) + s.get(SYSTEM).unwrap_or(&0),
                None if i == 0 => return Err(gone()),
                None => {}
            }
        }
        Ok(Duration::from_micros(ticks * 1_000_000 / per_second))
    }

    /// The most memory that it has held since [`Process::forget_peak`]: resident, including mapped
    /// files.
    pub fn peak_bytes(self) -> Option<u64> {
        peak(&self.0.to_string())
    }

    /// Resets the peak; if the kernel does not allow it, the peak is that of the process's whole
    /// life.
    pub fn forget_peak(self) {
        let _ = fs::write(format!("/proc/{}/clear_refs", self.0), "5");
    }
}

fn peak(process: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim()
        .strip_suffix(" kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kib| kib << 10)
}

/// Resets this process's own peak.
pub fn forget_own_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

pub fn own_peak_bytes() -> Option<u64> {
    peak("self")
}

/// CPU time of this process, all threads.
pub fn own_cpu() -> Duration {
    // SAFETY: an all-zero rusage is a valid value, and getrusage only writes into it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs())
            + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_counts_of_one_process_agree() {
        let mut n = 0u64;
        while own_cpu() < Duration::from_millis(100) {
            n = std::hint::black_box(n + 1);
        }
        // Other threads may go on in between.
        let before = own_cpu();
        let seen = Process(std::process::id()).cpu().unwrap();
        let after = own_cpu();
        let slack = before / 2 + Duration::from_millis(50);
        assert!(
            seen + slack >= before && seen <= after + slack,
            "{before:?} to {after:?} by getrusage, {seen:?} by /proc"
        );
        let peak = Process(std::process::id()).peak_bytes().unwrap();
        assert!(peak > 1 << 20 && peak < 1 << 40);
        assert!(Process(u32::MAX).cpu().is_err());
    }
}
