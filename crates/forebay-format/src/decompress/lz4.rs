//! The lz4 frame format: frames of blocks, linked or independent, with the checksums that the frame
//! announces.
//!
//! Each fixed-size part is gathered in `held`, then each block; a block is decompressed whole into
//! `block` and output from there.

use super::Step;
use bytes::BufMut;
use forebay_core::{Error, Result};
use std::hash::Hasher;
use twox_hash::XxHash32;

pub(crate) const MAGIC: u32 = 0x184d_2204;
const LEGACY_MAGIC: u32 = 0x184c_2102;
const SKIPPABLE: std::ops::RangeInclusive<u32> = 0x184d_2a50..=0x184d_2a5f;
/// How far back a linked block may refer.
const WINDOW_BYTES: usize = 64 << 10;
const STORED_BIT: u32 = 1 << 31;

const FLAG_DICTIONARY: u8 = 1;
const FLAG_CONTENT_CHECKSUM: u8 = 4;
const FLAG_CONTENT_SIZE: u8 = 8;
const FLAG_BLOCK_CHECKSUM: u8 = 16;
const FLAG_INDEPENDENT: u8 = 32;

#[derive(Debug)]
pub(super) struct Unlz4 {
    part: Part,
    any_frame: bool,
    held: Vec<u8>,
    flags: u8,
    block_max: usize,
    content_size: Option<u64>,
    content_len: u64,
    content_hash: XxHash32,
    /// The last block is `block[..block_len]`, of which `block[given..block_len]` has not been
    /// output yet. The buffer only grows, so that a small block does not cost clearing a large one.
    block: Vec<u8>,
    block_len: usize,
    given: usize,
    /// Ends with the last [`WINDOW_BYTES`] of output, for linked blocks.
    window: Vec<u8>,
}

/// What is gathered next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Magic,
    SkipLen,
    Skip(u32),
    /// Flags and block size; then the whole descriptor.
    Descriptor,
    DescriptorRest(usize),
    BlockLen,
    Block {
        len: usize,
        stored: bool,
    },
    ContentChecksum,
}

impl Unlz4 {
    pub fn new() -> Self {
        Self {
            part: Part::Magic,
            any_frame: false,
            held: Vec::new(),
            flags: 0,
            block_max: 0,
            content_size: None,
            content_len: 0,
            content_hash: XxHash32::with_seed(0),
            block: Vec::new(),
            block_len: 0,
            given: 0,
            window: Vec::new(),
        }
    }

    pub fn is_between_frames(&self) -> bool {
        self.part == Part::Magic && self.held.is_empty() && !self.has_output() && self.any_frame
    }

    pub fn has_output(&self) -> bool {
        self.given < self.block_len
    }

    /// Takes some input; `at` is its offset in the stream. Makes progress unless it cannot.
    pub fn step(
        &mut self,
        input: &[u8],
        out: &mut impl BufMut,
        max_out: usize,
        at: u64,
    ) -> Result<Step> {
        if self.has_output() {
            let n = (self.block_len - self.given).min(max_out);
            out.put_slice(&self.block[self.given..self.given + n]);
            self.given += n;
            return Ok(Step {
                consumed: 0,
                produced: n,
            });
        }
        if let Part::Skip(left) = self.part {
            let n = (left as usize).min(input.len());
            self.part = if n == left as usize {
                Part::Magic
            } else {
                Part::Skip(left - n as u32)
            };
            return Ok(Step {
                consumed: n,
                produced: 0,
            });
        }
        let whole = match self.part {
            Part::Magic | Part::SkipLen | Part::BlockLen | Part::ContentChecksum => 4,
            Part::Descriptor => 2,
            Part::DescriptorRest(len) => len,
            Part::Block { len, .. } => {
                len + if self.flags & FLAG_BLOCK_CHECKSUM != 0 {
                    4
                } else {
                    0
                }
            }
            Part::Skip(_) => 0,
        };
        let n = (whole - self.held.len()).min(input.len());
        self.held.extend_from_slice(&input[..n]);
        if self.held.len() == whole {
            let held = std::mem::take(&mut self.held);
            self.gathered(&held, at + n as u64)?;
            self.held = held;
            self.held.clear();
        }
        Ok(Step {
            consumed: n,
            produced: 0,
        })
    }

    /// A part is complete; `at` is where it ends.
    fn gathered(&mut self, bytes: &[u8], at: u64) -> Result<()> {
        let corrupt = |what: &str| {
            Error::corrupt(format!(
                "the lz4 stream is damaged before offset {at}: {what}"
            ))
        };
        self.part = match self.part {
            Part::Magic => match word(bytes) {
                MAGIC => Part::Descriptor,
                m if SKIPPABLE.contains(&m) => Part::SkipLen,
                LEGACY_MAGIC => {
                    return Err(Error::unsupported("the stream is in the legacy lz4 format")
                        .hint("compress it again with a current lz4, which writes frames"));
                }
                _ if self.any_frame => {
                    return Err(corrupt("what follows the last frame is not an lz4 frame"));
                }
                _ => return Err(corrupt("it does not begin with an lz4 frame")),
            },
            Part::SkipLen => {
                self.any_frame = true;
                match word(bytes) {
                    0 => Part::Magic,
                    len => Part::Skip(len),
                }
            }
            Part::Skip(_) => Part::Magic,
            Part::Descriptor => {
                self.flags = bytes[0];
                if bytes[0] >> 6 != 1 || bytes[0] & 2 != 0 || bytes[1] & 0x8f != 0 {
                    return Err(corrupt("the frame's descriptor has another version"));
                }
                self.block_max = match bytes[1] >> 4 {
                    size @ 4..=7 => 1 << (8 + 2 * size),
                    _ => return Err(corrupt("the frame's block size is unknown")),
                };
                self.content_hash = XxHash32::with_seed(0);
                self.content_hash.write(bytes);
                let has = |flag: u8, len: usize| if bytes[0] & flag != 0 { len } else { 0 };
                Part::DescriptorRest(has(FLAG_CONTENT_SIZE, 8) + has(FLAG_DICTIONARY, 4) + 1)
            }
            Part::DescriptorRest(len) => {
                let (fields, check) = bytes.split_at(len - 1);
                self.content_hash.write(fields);
                if (self.content_hash.finish() >> 8) as u8 != check[0] {
                    return Err(corrupt(
                        "the checksum of the frame's descriptor does not match",
                    ));
                }
                if self.flags & FLAG_DICTIONARY != 0 {
                    return Err(Error::unsupported("the lz4 stream needs a dictionary"));
                }
                self.content_size = fields.first_chunk::<8>().map(|b| u64::from_le_bytes(*b));
                self.content_len = 0;
                self.content_hash = XxHash32::with_seed(0);
                self.window.clear();
                Part::BlockLen
            }
            Part::BlockLen => match word(bytes) {
                0 => {
                    if self
                        .content_size
                        .is_some_and(|size| size != self.content_len)
                    {
                        return Err(corrupt("the frame's content is not as large as it says"));
                    }
                    if self.flags & FLAG_CONTENT_CHECKSUM != 0 {
                        Part::ContentChecksum
                    } else {
                        self.end_of_frame()
                    }
                }
                len => {
                    let (stored, len) = (len & STORED_BIT != 0, (len & !STORED_BIT) as usize);
                    if len > self.block_max {
                        return Err(corrupt("a block is larger than the frame allows"));
                    }
                    // A stored block without bytes has nothing to wait for.
                    let nothing = len == 0 && self.flags & FLAG_BLOCK_CHECKSUM == 0;
                    if nothing {
                        Part::BlockLen
                    } else {
                        Part::Block { len, stored }
                    }
                }
            },
            Part::Block { len, stored } => {
                let (data, check) = bytes.split_at(len);
                if self.flags & FLAG_BLOCK_CHECKSUM != 0 && word(check) != xxh32(data) {
                    return Err(corrupt("the checksum of a block does not match"));
                }
                self.decompress(data, stored)
                    .ok_or_else(|| corrupt("a block cannot be decompressed"))?;
                Part::BlockLen
            }
            Part::ContentChecksum => {
                if word(bytes) != self.content_hash.finish() as u32 {
                    return Err(corrupt(
                        "the checksum of the frame's content does not match",
                    ));
                }
                self.end_of_frame()
            }
        };
        Ok(())
    }

    fn end_of_frame(&mut self) -> Part {
        self.any_frame = true;
        Part::Magic
    }

    fn decompress(&mut self, data: &[u8], stored: bool) -> Option<()> {
        (self.given, self.block_len) = (0, 0);
        if stored {
            if self.block.len() < data.len() {
                self.block.resize(data.len(), 0);
            }
            self.block[..data.len()].copy_from_slice(data);
            self.block_len = data.len();
        } else {
            if self.block.len() < self.block_max {
                self.block.resize(self.block_max, 0);
            }
            let target = &mut self.block[..self.block_max];
            let window = &self.window[self.window.len().saturating_sub(WINDOW_BYTES)..];
            self.block_len =
                lz4_flex::block::decompress_into_with_dict(data, target, window).ok()?;
        }
        let block = &self.block[..self.block_len];
        self.content_len += block.len() as u64;
        if self.flags & FLAG_CONTENT_CHECKSUM != 0 {
            self.content_hash.write(block);
        }
        if self.flags & FLAG_INDEPENDENT == 0 {
            self.window
                .extend_from_slice(&block[block.len().saturating_sub(WINDOW_BYTES)..]);
            // Moved only now and then, so that many small blocks do not cost a move of the window
            // each.
            if self.window.len() > 2 * WINDOW_BYTES {
                self.window.drain(..self.window.len() - WINDOW_BYTES);
            }
        }
        Some(())
    }
}

fn word(bytes: &[u8]) -> u32 {
    bytes
        .first_chunk::<4>()
        .map_or(0, |b| u32::from_le_bytes(*b))
}

pub(crate) fn xxh32(bytes: &[u8]) -> u32 {
    let mut h = XxHash32::with_seed(0);
    h.write(bytes);
    h.finish() as u32
}
