//! Gzip (RFC 1952): member headers byte by byte, raw inflate between, CRC32 and length checked
//! after.

use super::{PIECE_BYTES, Step};
use bytes::BufMut;
use flate2::{Decompress, FlushDecompress, Status};
use forebay_core::{Error, Result};

/// Longest name or comment in a header; real ones are shorter.
const HEADER_TEXT_MAX_BYTES: u32 = 64 << 10;

const FLAG_HEADER_CRC: u8 = 2;
const FLAG_EXTRA: u8 = 4;
const FLAG_NAME: u8 = 8;
const FLAG_COMMENT: u8 = 16;
const FLAGS_RESERVED: u8 = 0xe0;

#[derive(Debug)]
pub(super) struct Gunzip {
    part: Part,
    /// Bytes of the current fixed-size part.
    held: [u8; 10],
    held_len: usize,
    flags: u8,
    header_crc: crc32fast::Hasher,
    inflate: Decompress,
    /// The last inflate call filled its output, so there may be more without further input.
    full: bool,
    crc: crc32fast::Hasher,
    member_len: u32,
    scratch: Box<[u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The ten bytes that begin a member, or the end of the stream. `first`: nothing came before,
    /// so it must not be the end.
    Header {
        first: bool,
    },
    ExtraLen,
    Extra(u16),
    Name(u32),
    Comment(u32),
    HeaderCrc,
    Body,
    Trailer,
    /// After the last member.
    Zeros,
}

impl Gunzip {
    pub fn new() -> Self {
        Self {
            part: Part::Header { first: true },
            held: [0; 10],
            held_len: 0,
            flags: 0,
            header_crc: crc32fast::Hasher::new(),
            inflate: Decompress::new(false),
            full: false,
            crc: crc32fast::Hasher::new(),
            member_len: 0,
            scratch: vec![0; PIECE_BYTES].into_boxed_slice(),
        }
    }

    pub fn is_between_members(&self) -> bool {
        matches!(self.part, Part::Header { first: false } | Part::Zeros) && self.held_len == 0
    }

    pub fn may_have_output(&self) -> bool {
        self.part == Part::Body && self.full
    }

    /// Takes some input; `at` is its offset in the stream. Makes progress unless it cannot.
    pub fn step(
        &mut self,
        input: &[u8],
        out: &mut impl BufMut,
        max_out: usize,
        at: u64,
    ) -> Result<Step> {
        if self.part == Part::Body {
            let step = self.inflate(input, out, max_out, at)?;
            // This only noticed that the body has ended: go on with what follows it.
            let only_ended = step.consumed == 0 && step.produced == 0 && self.part != Part::Body;
            if !only_ended {
                return Ok(step);
            }
        }
        let mut consumed = 0;
        while consumed < input.len() && self.part != Part::Body {
            self.byte(input[consumed], at + consumed as u64)?;
            consumed += 1;
        }
        Ok(Step {
            consumed,
            produced: 0,
        })
    }

    fn inflate(
        &mut self,
        input: &[u8],
        out: &mut impl BufMut,
        max_out: usize,
        at: u64,
    ) -> Result<Step> {
        let (in_before, out_before) = (self.inflate.total_in(), self.inflate.total_out());
        let room = max_out.min(self.scratch.len());
        let status =
            self.inflate
                .decompress(input, &mut self.scratch[..room], FlushDecompress::None);
        let consumed = (self.inflate.total_in() - in_before) as usize;
        let produced = (self.inflate.total_out() - out_before) as usize;
        let damaged = |why: &str| {
            Error::corrupt(format!(
                "the gzip stream is damaged near offset {}: {why}",
                at + consumed as u64
            ))
        };
        let status = status.map_err(|e| damaged(&e.to_string()))?;
        let piece = &self.scratch[..produced];
        self.crc.update(piece);
        self.member_len = self.member_len.wrapping_add(produced as u32);
        out.put_slice(piece);
        self.full = produced == room;
        if status == Status::StreamEnd {
            self.full = false;
            self.part = Part::Trailer;
        }
        Ok(Step { consumed, produced })
    }

    /// One byte of anything except the compressed data.
    fn byte(&mut self, b: u8, at: u64) -> Result<()> {
        let corrupt = |what: &str| {
            Err(Error::corrupt(format!(
                "the gzip stream is damaged at offset {at}: {what}"
            )))
        };
        match self.part {
            Part::Header { first: false } if self.held_len == 0 && b == 0 => {
                self.part = Part::Zeros;
                return Ok(());
            }
            Part::Header { first } => {
                let expected = match self.held_len {
                    0 => b == 0x1f,
                    1 => b == 0x8b,
                    2 => b == 8,
                    3 => b & FLAGS_RESERVED == 0,
                    _ => true,
                };
                if !expected {
                    return corrupt(if first {
                        "it does not begin with a gzip header"
                    } else {
                        "what follows the last member is not a gzip header"
                    });
                }
                if self.hold(b, 10) {
                    self.flags = self.held[3];
                    self.header_crc = crc32fast::Hasher::new();
                    self.header_crc.update(&self.held);
                    self.next_part(Part::Header { first });
                }
                return Ok(());
            }
            Part::Zeros if b != 0 => return corrupt("bytes follow the last member"),
            Part::Zeros => return Ok(()),
            Part::Trailer => {
                if self.hold(b, 8) {
                    let word = |i: usize| {
                        u32::from_le_bytes([
                            self.held[i],
                            self.held[i + 1],
                            self.held[i + 2],
                            self.held[i + 3],
                        ])
                    };
                    let crc = std::mem::take(&mut self.crc).finalize();
                    if word(0) != crc {
                        return corrupt("the checksum of what it decompresses to does not match");
                    }
                    if word(4) != self.member_len {
                        return corrupt("the length of what it decompresses to does not match");
                    }
                    self.part = Part::Header { first: false };
                }
                return Ok(());
            }
            Part::HeaderCrc => {
                if self.hold(b, 2) {
                    let stored = u16::from_le_bytes([self.held[0], self.held[1]]);
                    if stored != self.header_crc.clone().finalize() as u16 {
                        return corrupt("the checksum of the header does not match");
                    }
                    self.next_part(Part::HeaderCrc);
                }
                return Ok(());
            }
            Part::ExtraLen => {
                self.header_crc.update(&[b]);
                if self.hold(b, 2) {
                    match u16::from_le_bytes([self.held[0], self.held[1]]) {
                        0 => self.next_part(Part::ExtraLen),
                        len => self.part = Part::Extra(len),
                    }
                }
                return Ok(());
            }
            Part::Extra(_) | Part::Name(_) | Part::Comment(_) => self.header_crc.update(&[b]),
            Part::Body => return Ok(()),
        }
        match self.part {
            Part::Extra(1) => self.next_part(Part::ExtraLen),
            Part::Extra(left) => self.part = Part::Extra(left - 1),
            Part::Name(_) if b == 0 => self.next_part(Part::Name(0)),
            Part::Comment(_) if b == 0 => self.next_part(Part::Comment(0)),
            Part::Name(HEADER_TEXT_MAX_BYTES) | Part::Comment(HEADER_TEXT_MAX_BYTES) => {
                return corrupt("the text in the header does not end");
            }
            Part::Name(n) => self.part = Part::Name(n + 1),
            Part::Comment(n) => self.part = Part::Comment(n + 1),
            _ => {}
        }
        Ok(())
    }

    /// Whether `n` bytes of a fixed-size part have arrived.
    fn hold(&mut self, b: u8, n: usize) -> bool {
        self.held[self.held_len] = b;
        self.held_len += 1;
        if self.held_len == n {
            self.held_len = 0;
            return true;
        }
        false
    }

    /// Moves on to the next part of the header that the flags announce.
    fn next_part(&mut self, after: Part) {
        let order = [
            (FLAG_EXTRA, Part::ExtraLen),
            (FLAG_NAME, Part::Name(0)),
            (FLAG_COMMENT, Part::Comment(0)),
            (FLAG_HEADER_CRC, Part::HeaderCrc),
        ];
        let from = order
            .iter()
            .position(|&(_, p)| p == after)
            .map_or(0, |i| i + 1);
        match order[from..]
            .iter()
            .find(|&&(flag, _)| self.flags & flag != 0)
        {
            Some(&(_, part)) => self.part = part,
            None => {
                self.part = Part::Body;
                self.inflate.reset(false);
                self.full = false;
                self.member_len = 0;
            }
        }
    }
}
