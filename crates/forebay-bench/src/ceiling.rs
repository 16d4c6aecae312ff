//! The most that the machine can do: a plain copy through the same kind of socket, a copy in
//! memory, and nginx on the same files.
//!
//! The plain copy is received by the code that receives answers (the same buffer, the same calls),
//! from a process that only writes one buffer again and again, which the CPU's caches hold. The
//! *uncached* copy is the same from more memory than they hold, as with the data of a node: no
//! server that sends what is in the page cache is faster.

use crate::wire::{Address, Connection, Stream};
use forebay_core::{Error, Result};
use std::{
    hint::black_box,
    io::Write,
    net::TcpListener,
    os::unix::net::UnixListener,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A memcpy is timed over buffers too large for any cache.
const MEMCPY_BYTES: usize = 128 << 20;

/// The process of the plain writer: prints where it listens, then fills every connection until it
/// is stopped.
///
/// `span_bytes` is how much memory it writes from, `write_bytes` at a time.
pub fn serve_copies(unix: Option<&Path>, write_bytes: usize, span_bytes: usize) -> Result<()> {
    let source: Vec<u8> = vec![0x5a; span_bytes.max(write_bytes).max(1)];
    let failed = |e: std::io::Error| {
        Error::internal(format!("the plain writer cannot listen: {e}")).caused_by(e)
    };
    let say = |text: String| {
        println!("{text}");
        std::io::stdout().flush().map_err(failed)
    };
    let serve = |mut stream: Stream, number: usize| {
        let own = source[..write_bytes.max(1)].to_vec();
        let pieces = if span_bytes > write_bytes {
            source.chunks_exact(write_bytes.max(1))
        } else {
            own.chunks_exact(write_bytes.max(1))
        };
        // Each connection begins elsewhere. An error means that the client left.
        let begin = number * 7919 % pieces.len().max(1);
        for piece in pieces.clone().skip(begin).chain(pieces.cycle()) {
            if stream.write_all(piece).is_err() {
                break;
            }
        }
    };
    let accept: Box<dyn Fn() -> std::io::Result<Stream>> = match unix {
        Some(path) => {
            let listener = UnixListener::bind(path).map_err(failed)?;
            say(path.display().to_string())?;
            Box::new(move || Ok(Stream::Unix(listener.accept()?.0)))
        }
        None => {
            let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
            say(listener.local_addr().map_err(failed)?.to_string())?;
            Box::new(move || {
                let stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            })
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        let serve = &serve;
        for number in 0.. {
            let stream = accept().map_err(failed)?;
            scope.spawn(move || serve(stream, number));
        }
        Ok(())
    })
}

/// Bytes per second that this many connections to a plain writer receive together.
pub fn copy(
    from: &Address,
    clients: usize,
    buffer_bytes: usize,
    ramp: Duration,
    window: Duration,
) -> Result<f64> {
    let stop = AtomicBool::new(false);
    let received: Vec<AtomicU64> = (0..clients).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let clients: Vec<_> = received
            .iter()
            .map(|received| {
                let stop = &stop;
                scope.spawn(move || -> Result<()> {
                    let mut connection = Connection::new(Stream::connect(from)?, buffer_bytes);
                    while !stop.load(Relaxed) {
                        received.store(received.load(Relaxed) + connection.raw()? as u64, Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        let sum = || received.iter().map(|r| r.load(Relaxed)).sum::<u64>();
        std::thread::sleep(ramp);
        let (began, first) = (Instant::now(), sum());
        std::thread::sleep(window);
        let (elapsed, last) = (began.elapsed(), sum());
        stop.store(true, Relaxed);
        for client in clients {
            client
                .join()
                .map_err(|_| Error::internal("a client panicked"))??;
        }
        crate::interrupt::check()?;
        Ok((last - first) as f64 / elapsed.as_secs_f64())
    })
}

/// Bytes per second that one core copies in memory.
pub fn memcpy() -> f64 {
    let from = vec![1u8; MEMCPY_BYTES];
    let mut to = vec![2u8; MEMCPY_BYTES];
    let mut best = 0f64;
    for _ in 0..3 {
        let began = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        best = best.max(MEMCPY_BYTES as f64 / began.elapsed().as_secs_f64());
    }
    best
}
