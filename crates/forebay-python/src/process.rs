//! One small runtime per process, and waiting on it from Python.
//!
//! Training scripts fork (PyTorch's DataLoader does by default). Threads do not survive a fork, and
//! an epoll instance that does is shared with the parent. So everything that depends on the runtime
//! is tied to the process id that made it. A child finds another id, makes its own runtime and
//! sockets, and *leaks* what it inherited, because dropping that would reach into the parent's
//! epoll or wait for threads that do not exist. The runtime's pointer is swapped atomically, so no
//! lock can be left held by a thread that the fork lost.
//!
//! Waits release the GIL and check for signals every [`SIGNAL_TICK`], so that Ctrl-C interrupts
//! every call.

use crate::failure::{Class, Failure, Result};
use pyo3::prelude::*;
use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::atomic::{AtomicPtr, Ordering},
    time::Duration,
};
use tokio::runtime::Runtime;

/// How long a wait may go on without checking for signals.
pub const SIGNAL_TICK: Duration = Duration::from_millis(50);
/// The number of receiving threads in each process.
const WORKER_THREADS: usize = 2;

struct PerProcess {
    pid: u32,
    runtime: Runtime,
}

static CURRENT: AtomicPtr<PerProcess> = AtomicPtr::new(std::ptr::null_mut());

/// The id of the process that is running.
pub fn pid() -> u32 {
    std::process::id()
}

/// This process's runtime, made on first use and kept until the process ends.
pub fn runtime() -> Result<&'static Runtime> {
    let pid = pid();
    let found = CURRENT.load(Ordering::Acquire);
    // SAFETY: the pointer is null or came from `Box::into_raw` below and is never freed.
    if let Some(current) = unsafe { found.as_ref() }
        && current.pid == pid
    {
        return Ok(&current.runtime);
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder
        .worker_threads(WORKER_THREADS)
        .thread_name("forebay-client")
        .enable_io()
        .enable_time();
    let runtime = started(&mut builder).map_err(|why| {
        Failure::new(
            Class::Error,
            format!("cannot start the client's threads: {why}"),
        )
        .hint("raise the limit of processes and threads: `ulimit -u`, or that of the container")
    })?;
    let made = Box::into_raw(Box::new(PerProcess { pid, runtime }));
    match CURRENT.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, and from now on never freed.
        Ok(_) => Ok(unsafe { &(*made).runtime }),
        Err(winner) => {
            // SAFETY: `made` was not published; `winner` was, by another thread of this process.
            unsafe { Box::from_raw(made) }.runtime.shutdown_background();
            // SAFETY: what was published is never freed.
            Ok(unsafe { &(*winner).runtime })
        }
    }
}

/// The runtime, or why there is none. Where the system gives no thread, the library panics; to Python
/// that would be no `Exception`.
pub fn started(builder: &mut tokio::runtime::Builder) -> std::result::Result<Runtime, String> {
    match catch_unwind(AssertUnwindSafe(|| builder.build())) {
        Ok(built) => built.map_err(|e| e.to_string()),
        Err(_) => Err("the system gives no more threads".into()),
    }
}

/// Runs `future` to its end with the GIL released; a signal handler that raises
/// (`KeyboardInterrupt`) drops it.
pub fn wait<T: Send>(
    py: Python<'_>,
    future: impl Future<Output = Result<T>> + Send,
) -> PyResult<T> {
    let runtime = runtime()?;
    let mut future = pin!(future);
    loop {
        let polled = py.detach(|| {
            runtime.block_on(async { tokio::time::timeout(SIGNAL_TICK, future.as_mut()).await })
        });
        match polled {
            Ok(done) => return Ok(done?),
            Err(_) => py.check_signals()?,
        }
    }
}
