//! A timer that is accurate to some ten microseconds.
//!
//! The runtime's own timer counts in milliseconds and rounds up, which is more than a whole short
//! distance. The kernel's timer (`timerfd`) is awaited like a socket. If none is available, the
//! runtime's is used.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};
use tokio::{
    io::unix::AsyncFd,
    time::{Instant, sleep_until},
};

/// The timer of one direction of one connection; it uses a file descriptor from its first wait on.
#[derive(Default)]
pub struct Timer {
    fd: Option<AsyncFd<OwnedFd>>,
    /// None could be made: do not try again.
    is_coarse: bool,
}

impl Timer {
    /// Returns at `due`, or at once if that has passed.
    pub async fn until(&mut self, due: Instant) {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if self.fd.is_none() && !self.is_coarse {
            self.fd = make().ok();
            self.is_coarse = self.fd.is_none();
        }
        let Some(fd) = &self.fd else {
            return sleep_until(due).await;
        };
        if set(fd.get_ref(), left).is_err() || expired(fd).await.is_err() {
            sleep_until(due).await;
        }
    }
}

fn make() -> io::Result<AsyncFd<OwnedFd>> {
    let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: what is registered owns the descriptor, so it stays open and the same.
    unsafe { AsyncFd::register(fd) }.map_err(|e| io::Error::other(e.to_string()))
}

fn set(fd: &OwnedFd, after: Duration) -> io::Result<()> {
    let timer = libc::itimerspec {
        it_interval: libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
        it_value: libc::timespec {
            tv_sec: after.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(after.subsec_nanos() as i32),
        },
    };
    // SAFETY: `timer` is valid, and the old value is not requested.
    let set =
        unsafe { libc::timerfd_settime(fd.as_raw_fd(), 0, &raw const timer, std::ptr::null_mut()) };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

async fn expired(fd: &AsyncFd<OwnedFd>) -> io::Result<()> {
    loop {
        let mut ready = fd.readable().await?;
        let read = ready.try_io(|fd| {
            let mut times = 0_u64;
            // SAFETY: eight bytes are written into a place for eight.
            let n = unsafe { libc::read(fd.as_raw_fd(), (&raw mut times).cast(), 8) };
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
        match read {
            Ok(result) => return result,
            Err(_would_block) => {}
        }
    }
}
