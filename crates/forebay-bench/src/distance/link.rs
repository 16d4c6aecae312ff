//! One direction of one connection: read, pass the shared bandwidth, wait out the delay, write.
//!
//! The reading half and the writing half run side by side with a bounded queue of
//! `(when due, bytes)` between them: what is in the queue is "on the wire". The reading half is
//! paced by the shared [`Bucket`]. Due times never decrease within a direction, so order is kept;
//! when the queue is full the reading half stops reading, and TCP passes that on to whoever sends.

use super::timer::Timer;
use bytes::{Bytes, BytesMut};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::tcp::{ReadHalf, WriteHalf},
    sync::mpsc,
    time::{Instant, sleep_until},
};

/// The most that is read, paced and sent in one piece.
const PIECE_MAX_BYTES: u64 = 64 << 10;
/// A piece takes at most this long at the given bandwidth, so that connections take turns.
const PIECE_MAX_TIME: Duration = Duration::from_millis(2);
/// How far the bucket may catch up after a late wake-up: a generous timer granularity.
const CATCH_UP: Duration = Duration::from_millis(10);

/// Bandwidth shared by many connections: each piece gets a place in line, in order of arrival.
///
/// It stores the time at which the line is free again instead of a count of tokens. Late wake-ups
/// then cost nothing, because the next piece starts where the last one ended and not when its
/// sender woke up.
pub struct Bucket {
    bytes_per_s: Option<u64>,
    free_at: Mutex<Instant>,
}

impl Bucket {
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self {
            bytes_per_s,
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// When `bytes` more will have passed, including everything before them.
    pub fn pass(&self, bytes: usize) -> Instant {
        let now = Instant::now();
        let Some(rate) = self.bytes_per_s else {
            return now;
        };
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(CATCH_UP).unwrap_or(now);
        *free_at = (*free_at).max(earliest) + Duration::from_secs_f64(bytes as f64 / rate as f64);
        // Catching up may lend bandwidth from the past; it never makes bytes arrive before they
        // were sent.
        (*free_at).max(now)
    }

    fn piece_bytes(&self) -> usize {
        let by_time = self
            .bytes_per_s
            .map_or(f64::MAX, |rate| rate as f64 * PIECE_MAX_TIME.as_secs_f64());
        (by_time as u64).clamp(512, PIECE_MAX_BYTES) as usize
    }
}

/// Who spoke last, which shows where a request begins in HTTP/1.1 without pipelining.
#[derive(Debug, Default)]
pub struct Turn {
    client_spoke_last: AtomicBool,
}

impl Turn {
    /// True if these bytes begin a request.
    pub fn client_speaks(&self) -> bool {
        !self.client_spoke_last.swap(true, SeqCst)
    }

    /// `100 Continue` asks for the rest of a request; it is not its answer.
    pub fn server_speaks(&self, bytes: &[u8]) {
        if !bytes.starts_with(b"HTTP/1.1 100 ") {
            self.client_spoke_last.store(false, SeqCst);
        }
    }
}

/// Why a direction did not end in an orderly way.
#[derive(Debug)]
pub enum Ended {
    /// A side reset the connection, or is gone.
    Reset,
}

enum Piece {
    Bytes(Bytes),
    End,
    Reset,
}

/// What one direction of a connection adds.
#[derive(Clone, Copy)]
pub struct Link<'a> {
    pub delay: Duration,
    /// Nothing arrives before this time: the end of the handshake.
    pub not_before: Instant,
    pub window_bytes: u64,
    pub bucket: &'a Bucket,
}

impl Link<'_> {
    /// Carries bytes until an orderly end, which it passes on as a half-close. `extra` sees each
    /// piece and returns how much longer it takes.
    ///
    /// # Errors
    /// [`Ended::Reset`]: the caller then resets both sides.
    pub async fn carry(
        self,
        from: ReadHalf<'_>,
        to: WriteHalf<'_>,
        extra: impl FnMut(&[u8]) -> Duration,
    ) -> Result<(), Ended> {
        let piece_bytes = self.bucket.piece_bytes();
        let (send, arrive) =
            mpsc::channel((self.window_bytes / piece_bytes as u64).max(2) as usize);
        let (_, written) =
            tokio::join!(self.read(from, piece_bytes, send, extra), write(to, arrive));
        written
    }

    async fn read(
        self,
        mut from: ReadHalf<'_>,
        piece_bytes: usize,
        send: mpsc::Sender<(Instant, Piece)>,
        mut extra: impl FnMut(&[u8]) -> Duration,
    ) {
        let mut due = self.not_before + self.delay;
        let mut buffer = BytesMut::new();
        loop {
            // Room for a whole piece each time: connections take turns piece by piece, so one that
            // read smaller pieces would have less of the line.
            buffer.reserve(piece_bytes);
            // Wait for room on the wire first: bytes that were read and cannot be sent would be one
            // more buffer.
            let Ok(room) = send.reserve().await else {
                return;
            };
            let piece = tokio::select! {
                read = from.read_buf(&mut buffer) => match read {
                    Ok(0) => Piece::End,
                    Ok(_) => Piece::Bytes(buffer.split().freeze()),
                    Err(_) => Piece::Reset,
                },
                // The other side is gone: nobody will take what arrives.
                () = send.closed() => return,
            };
            let (passed, last) = match &piece {
                Piece::Bytes(bytes) => {
                    let passed = self.bucket.pass(bytes.len());
                    due = due.max(passed.max(self.not_before) + self.delay + extra(bytes));
                    (passed, false)
                }
                Piece::End | Piece::Reset => {
                    due = due.max(Instant::now() + self.delay);
                    (due, true)
                }
            };
            room.send((due, piece));
            if last {
                return;
            }
            if passed > Instant::now() {
                sleep_until(passed).await;
            }
        }
    }
}

async fn write(
    mut to: WriteHalf<'_>,
    mut arrive: mpsc::Receiver<(Instant, Piece)>,
) -> Result<(), Ended> {
    let mut timer = Timer::default();
    while let Some((due, piece)) = arrive.recv().await {
        timer.until(due).await;
        let written = match piece {
            Piece::Bytes(bytes) => to.write_all(&bytes).await,
            Piece::End => return to.shutdown().await.map_err(|_| Ended::Reset),
            Piece::Reset => return Err(Ended::Reset),
        };
        if written.is_err() {
            return Err(Ended::Reset);
        }
    }
    // The reading half stopped without an end.
    Err(Ended::Reset)
}
