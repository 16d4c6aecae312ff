//! Turns the stored bytes of a member into the member: inflates them if deflated, counts them, and
//! checks them against the CRC32 if the archive has one.
//!
//! Invariant: the output never exceeds the declared size, so a deflate bomb is refused where it
//! exceeds its own claim.

use crate::{
    decompress::{LastByte, PIECE_BYTES, Progress},
    index::{Extent, Storage},
};
use bytes::BufMut;
use flate2::{Decompress, FlushDecompress, Status};
use forebay_core::{Error, Result};

/// Reads one stored or deflated member from its first byte to its last. A range of a stored member
/// needs no decoder; a range of a deflated member is cut from the output.
#[derive(Debug)]
pub struct MemberDecoder {
    extent: Extent,
    taken: u64,
    given: u64,
    crc: crc32fast::Hasher,
    inflate: Option<Inflate>,
    last_byte: LastByte,
    failed: Option<Error>,
}

#[derive(Debug)]
struct Inflate {
    state: Decompress,
    scratch: Box<[u8]>,
    ended: bool,
    full: bool,
}

impl MemberDecoder {
    /// # Errors
    /// `Unsupported` with the reason if the member cannot be read.
    pub fn new(extent: &Extent) -> Result<Self> {
        extent.place()?;
        // Some programs write no compressed data at all for an empty file.
        let inflate =
            (extent.storage == Storage::Deflated && extent.stored_size > 0).then(|| Inflate {
                state: Decompress::new(false),
                scratch: vec![0; PIECE_BYTES].into_boxed_slice(),
                ended: false,
                full: false,
            });
        Ok(Self {
            extent: *extent,
            taken: 0,
            given: 0,
            crc: crc32fast::Hasher::new(),
            inflate,
            last_byte: LastByte::default(),
            failed: None,
        })
    }

    /// Takes the next of the member's stored bytes and appends at most `max_out` (1 or more) bytes
    /// of the member to `out`, which must grow as it is appended to.
    ///
    /// # Errors
    /// `Corrupt` for damaged bytes, more than the declared size, a wrong checksum. The same error
    /// again on each later call.
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
        let pushed = match self.inflate {
            None => self.copy(fresh, out, max_out),
            Some(_) => self.inflate(fresh, out, max_out),
        };
        let pushed = pushed.map(|done| self.last_byte.report(input, fresh, done));
        let pushed = pushed.and_then(|p| {
            if self.is_complete() {
                self.check().map(|()| p)
            } else {
                Ok(p)
            }
        });
        if let Err(e) = &pushed {
            self.failed = Some(e.clone());
        }
        pushed
    }

    /// The whole member at once, if all of its stored bytes are at hand.
    ///
    /// # Errors
    /// As [`MemberDecoder::push`] and [`MemberDecoder::finish`].
    pub fn decode_all(mut self, stored: &[u8], out: &mut impl BufMut) -> Result<()> {
        let mut input = stored;
        loop {
            let done = self.push(input, out, PIECE_BYTES)?;
            input = &input[done.consumed..];
            if input.is_empty() {
                return self.finish();
            }
        }
    }

    /// Checks that the member is whole and correct.
    ///
    /// # Errors
    /// `Corrupt` if bytes are missing or wrong.
    pub fn finish(self) -> Result<()> {
        match &self.failed {
            Some(e) => Err(e.clone()),
            None if self.is_complete() => self.check(),
            None => Err(self.corrupt(&format!(
                "it is cut off after {} of {} bytes",
                self.given, self.extent.size
            ))),
        }
    }

    /// Bytes of the member output so far.
    pub fn total_out(&self) -> u64 {
        self.given
    }

    fn is_complete(&self) -> bool {
        self.taken == self.extent.stored_size && self.inflate.as_ref().is_none_or(|i| i.ended)
    }

    fn check(&self) -> Result<()> {
        if self.given != self.extent.size {
            return Err(self.corrupt(&format!(
                "it has {} bytes, and should have {}",
                self.given, self.extent.size
            )));
        }
        if self
            .extent
            .crc32
            .is_some_and(|crc| crc != self.crc.clone().finalize())
        {
            return Err(self.corrupt("its checksum does not match"));
        }
        Ok(())
    }

    fn corrupt(&self, what: &str) -> Error {
        Error::corrupt(format!(
            "the archive's member at offset {} is damaged: {what}",
            self.extent.offset
        ))
    }

    fn copy(&mut self, input: &[u8], out: &mut impl BufMut, max_out: usize) -> Result<Progress> {
        if input.len() as u64 > self.extent.stored_size - self.taken {
            return Err(self.corrupt("more bytes were handed in than it has"));
        }
        let piece = &input[..input.len().min(max_out)];
        self.taken += piece.len() as u64;
        self.given += piece.len() as u64;
        if self.extent.crc32.is_some() {
            self.crc.update(piece);
        }
        out.put_slice(piece);
        Ok(Progress {
            consumed: piece.len(),
            produced: piece.len(),
            more: false,
        })
    }

    fn inflate(&mut self, input: &[u8], out: &mut impl BufMut, max_out: usize) -> Result<Progress> {
        if input.len() as u64 > self.extent.stored_size - self.taken {
            return Err(self.corrupt("more bytes were handed in than it has"));
        }
        let mut done = Progress {
            consumed: 0,
            produced: 0,
            more: false,
        };
        while let Some(i) = self.inflate.as_mut() {
            let fresh = &input[done.consumed..];
            if i.ended {
                if !fresh.is_empty() {
                    return Err(self.corrupt("bytes follow its compressed data"));
                }
                break;
            }
            // One byte more than declared distinguishes an exact fit from an excess.
            let left = (self.extent.size - self.given).saturating_add(1);
            let room = (max_out - done.produced)
                .min(i.scratch.len())
                .min(usize::try_from(left).unwrap_or(usize::MAX));
            if room == 0 {
                done.more = i.full;
                break;
            }
            let (in_before, out_before) = (i.state.total_in(), i.state.total_out());
            let status = i
                .state
                .decompress(fresh, &mut i.scratch[..room], FlushDecompress::None);
            let (consumed, produced) = (
                (i.state.total_in() - in_before) as usize,
                (i.state.total_out() - out_before) as usize,
            );
            i.full = produced == room;
            let status = match status {
                Ok(status) => status,
                Err(e) => return Err(self.corrupt(&e.to_string())),
            };
            i.ended = status == Status::StreamEnd;
            self.crc.update(&i.scratch[..produced]);
            out.put_slice(&i.scratch[..produced]);
            done.consumed += consumed;
            done.produced += produced;
            self.taken += consumed as u64;
            self.given += produced as u64;
            if self.given > self.extent.size {
                return Err(self.corrupt(&format!(
                    "it inflates to more than its {} bytes",
                    self.extent.size
                )));
            }
            if consumed == 0 && produced == 0 && !self.inflate.as_ref().is_some_and(|i| i.ended) {
                break;
            }
        }
        Ok(done)
    }
}
