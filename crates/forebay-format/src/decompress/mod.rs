//! Push decompression of gzip, lz4 and zstd frames, with a bound on the output of one call and of
//! the whole stream.
//!
//! Invariant: a [`Decompressor`] holds at most one lz4 block (4 MiB, twice), inflate's window, or
//! zstd's window as far as it is allowed, whatever it is fed, and never outputs more than it was
//! allowed to. A stream is complete only if [`Decompressor::finish`] says so.

mod gzip;
mod lz4;
mod zstd;

use bytes::BufMut;
use forebay_core::{Error, Result};

/// How a stream is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// RFC 1952: several members one after another; zeros may follow the last one, as on tapes.
    Gzip,
    /// The lz4 frame format: several frames one after another, possibly with skippable frames
    /// between them.
    Lz4,
    /// The Zstandard frame format: several frames one after another, possibly with skippable frames
    /// between them.
    Zstd,
}

impl Codec {
    /// The largest window of zstd that is decompressed.
    pub const ZSTD_WINDOW_MAX_BYTES: u64 = zstd::WINDOW_MAX_BYTES;

    /// By the last extension of a name, in any case: `.gz`, `.zst`, `.zstd`, `.lz4`.
    pub fn from_name(name: &str) -> Option<Self> {
        let base = name.rsplit('/').next().unwrap_or(name);
        let (stem, extension) = base.rsplit_once('.')?;
        match extension.to_ascii_lowercase().as_str() {
            _ if stem.is_empty() => None,
            "gz" => Some(Codec::Gzip),
            "zst" | "zstd" => Some(Codec::Zstd),
            "lz4" => Some(Codec::Lz4),
            _ => None,
        }
    }

    /// What decompressing a stream with these first bytes holds, besides a few hundred KiB: zstd's
    /// window, as its first frame has it. Frames after the first may have other ones.
    pub fn window_bytes(self, head: &[u8]) -> u64 {
        match self {
            Codec::Gzip => 0,
            Codec::Lz4 => 8 << 20,
            Codec::Zstd => zstd::window_bytes(head).unwrap_or(0),
        }
    }
}

/// What one push did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of input that were used; pass the others in again. All of them are used only when
    /// everything they decompress to was output, so a caller that continues until its input is used
    /// up has everything.
    pub consumed: usize,
    /// Bytes that were output.
    pub produced: usize,
    /// More output is ready that `max_out` had no room for.
    pub more: bool,
}

/// Keeps the promise of [`Progress::consumed`]: if a codec has taken all input but has not output
/// everything, the last byte is reported as unused, and skipped when it is passed in again.
#[derive(Debug, Default)]
pub(crate) struct LastByte {
    comes_again: bool,
}

impl LastByte {
    /// The part of `input` that is new.
    pub fn fresh<'a>(&mut self, input: &'a [u8]) -> &'a [u8] {
        if self.comes_again && !input.is_empty() {
            self.comes_again = false;
            return &input[1..];
        }
        input
    }

    /// What to report after `fresh` bytes of `input` were offered.
    pub fn report(&mut self, input: &[u8], fresh: &[u8], mut done: Progress) -> Progress {
        done.consumed += input.len() - fresh.len();
        if done.more && !input.is_empty() && done.consumed == input.len() {
            done.consumed -= 1;
            self.comes_again = true;
        }
        done
    }

    /// Bytes that the codec has taken and that were reported as unused.
    pub fn owed(&self) -> u64 {
        u64::from(self.comes_again)
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Decompressor {
    stream: Stream,
    total_in: u64,
    total_out: u64,
    total_max: u64,
    last_byte: LastByte,
    failed: Option<Error>,
}

#[derive(Debug)]
enum Stream {
    Gzip(gzip::Gunzip),
    Lz4(lz4::Unlz4),
    Zstd(zstd::Unzstd),
}

/// What one step of a codec did.
struct Step {
    consumed: usize,
    produced: usize,
}

impl Decompressor {
    /// `total_max`: more output than this is an error.
    pub fn new(codec: Codec, total_max: u64) -> Self {
        Self::with_window(codec, total_max, Codec::ZSTD_WINDOW_MAX_BYTES)
    }

    /// The same. A window of zstd that is larger than `window_max`, rounded up to a power of two,
    /// is an error.
    pub fn with_window(codec: Codec, total_max: u64, window_max: u64) -> Self {
        let stream = match codec {
            Codec::Gzip => Stream::Gzip(gzip::Gunzip::new()),
            Codec::Lz4 => Stream::Lz4(lz4::Unlz4::new()),
            Codec::Zstd => Stream::Zstd(zstd::Unzstd::new(window_max)),
        };
        Self {
            stream,
            total_in: 0,
            total_out: 0,
            total_max,
            last_byte: LastByte::default(),
            failed: None,
        }
    }

    /// Takes input and appends at most `max_out` bytes (1 or more) to `out`, which must grow as it
    /// is appended to (`Vec<u8>`, `BytesMut`).
    ///
    /// # Errors
    /// `Corrupt` with the offset in the input if the stream is damaged; `Unsupported` past
    /// `total_max`, for windows that are too large, and for dictionaries. The same error again on
    /// each later call.
    pub fn push(
        &mut self,
        input: &[u8],
        out: &mut impl BufMut,
        max_out: usize,
    ) -> Result<Progress> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        let fresh = self.last_byte.fresh(input);
        let pushed = self
            .run(fresh, out, max_out)
            .map(|done| self.last_byte.report(input, fresh, done));
        if let Err(e) = &pushed {
            self.failed = Some(e.clone());
        }
        pushed
    }

    fn run(&mut self, input: &[u8], out: &mut impl BufMut, max_out: usize) -> Result<Progress> {
        let mut done = Progress {
            consumed: 0,
            produced: 0,
            more: false,
        };
        loop {
            let room = (max_out - done.produced) as u64;
            // One byte more than the limit distinguishes an exact fit from an excess.
            let room = room.min((self.total_max - self.total_out).saturating_add(1)) as usize;
            if room == 0 {
                done.more = self.stream.has_output();
                return Ok(done);
            }
            let step = match &mut self.stream {
                Stream::Gzip(s) => s.step(&input[done.consumed..], out, room, self.total_in)?,
                Stream::Lz4(s) => s.step(&input[done.consumed..], out, room, self.total_in)?,
                Stream::Zstd(s) => s.step(&input[done.consumed..], out, room, self.total_in)?,
            };
            done.consumed += step.consumed;
            done.produced += step.produced;
            self.total_in += step.consumed as u64;
            self.total_out += step.produced as u64;
            if self.total_out > self.total_max {
                return Err(Error::unsupported(format!(
                    "the stream decompresses to more than {} bytes",
                    self.total_max
                )));
            }
            if step.consumed == 0 && step.produced == 0 {
                done.more = self.stream.has_output();
                return Ok(done);
            }
        }
    }

    /// Decompresses all of `input` and passes the output on in pieces of at most 64 KiB.
    ///
    /// # Errors
    /// As [`Decompressor::push`], and what `each` returns.
    pub fn push_each(
        &mut self,
        mut input: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        loop {
            piece.clear();
            let done = self.push(input, &mut piece, PIECE_BYTES)?;
            if !piece.is_empty() {
                each(&piece)?;
            }
            input = &input[done.consumed..];
            if input.is_empty() {
                return Ok(());
            }
        }
    }

    /// The end of the input.
    ///
    /// # Errors
    /// `Corrupt` if the stream is cut off, or unread output is left.
    pub fn finish(&self) -> Result<()> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        let (between_frames, what) = match &self.stream {
            Stream::Gzip(s) => (s.is_between_members(), "gzip"),
            Stream::Lz4(s) => (s.is_between_frames(), "lz4"),
            Stream::Zstd(s) => (s.is_between_frames(), "zstd"),
        };
        if !between_frames {
            return Err(Error::corrupt(format!(
                "the {what} stream is cut off: it ends at offset {}",
                self.total_in()
            )));
        }
        Ok(())
    }

    /// Bytes of input used so far: where the next push continues in the stream.
    pub fn total_in(&self) -> u64 {
        self.total_in - self.last_byte.owed()
    }

    /// Bytes output so far.
    pub fn total_out(&self) -> u64 {
        self.total_out
    }
}

impl Stream {
    fn has_output(&self) -> bool {
        match self {
            Stream::Gzip(s) => s.may_have_output(),
            Stream::Lz4(s) => s.has_output(),
            Stream::Zstd(s) => s.has_output(),
        }
    }
}

pub(crate) use lz4::{MAGIC as LZ4_MAGIC, xxh32};

pub(crate) const PIECE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
