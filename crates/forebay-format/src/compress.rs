//! Gzip and lz4 output whose bytes do not depend on how the input was split into calls.
//!
//! Input is gathered into blocks of a fixed size, and each block is compressed by itself; a block
//! that does not shrink is stored. Images and audio are compressed already, and storing them is
//! twenty times faster than trying deflate on them.
//!
//! Gzip: one member, no name, time 0; each block is a run of deflate blocks that ends at a byte
//! boundary and refers to nothing before it. Lz4: one frame of independent blocks with a checksum
//! of the content.

use crate::decompress::{LZ4_MAGIC, xxh32};
use bytes::BufMut;
use flate2::{Compress, Compression, FlushCompress, Status};
use forebay_core::{Error, Result};
use std::hash::Hasher;
use twox_hash::XxHash32;

/// How much input is gathered before it is compressed. Also lz4's block size (code 5).
const BLOCK_BYTES: usize = 256 << 10;

/// At level 1, incompressible bytes grow; above 2, time grows faster than the ratio.
const GZIP_LEVEL: u32 = 2;
/// The largest stored block of deflate.
const STORED_MAX_BYTES: usize = 0xffff;
/// A final deflate block without data: the end of the stream.
const DEFLATE_END: [u8; 2] = [3, 0];
/// No flags, time 0, "fastest", system unknown.
const GZIP_HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255];

const LZ4_FLAGS: u8 = 0b0110_0100;
const LZ4_BLOCK_CODE: u8 = 5 << 4;
const LZ4_STORED: u32 = 1 << 31;

pub(crate) struct Compressor {
    gathered: Vec<u8>,
    scratch: Box<[u8]>,
    started: bool,
    format: Format,
}

enum Format {
    Gzip {
        deflate: Compress,
        crc: crc32fast::Hasher,
        len: u32,
    },
    Lz4 {
        hash: XxHash32,
    },
}

impl Compressor {
    pub fn gzip() -> Self {
        let deflate = Compress::new(Compression::new(GZIP_LEVEL), false);
        Self::new(Format::Gzip {
            deflate,
            crc: crc32fast::Hasher::new(),
            len: 0,
        })
    }

    pub fn lz4() -> Self {
        Self::new(Format::Lz4 {
            hash: XxHash32::with_seed(0),
        })
    }

    fn new(format: Format) -> Self {
        let scratch =
            vec![0; lz4_flex::block::get_maximum_output_size(BLOCK_BYTES)].into_boxed_slice();
        Self {
            gathered: Vec::with_capacity(BLOCK_BYTES),
            scratch,
            started: false,
            format,
        }
    }

    pub fn push(&mut self, mut input: &[u8], out: &mut impl BufMut) -> Result<()> {
        while !input.is_empty() {
            let room = BLOCK_BYTES - self.gathered.len();
            if self.gathered.is_empty() && input.len() >= BLOCK_BYTES {
                self.block(&input[..BLOCK_BYTES], out)?;
                input = &input[BLOCK_BYTES..];
                continue;
            }
            let (now, later) = input.split_at(room.min(input.len()));
            self.gathered.extend_from_slice(now);
            input = later;
            if self.gathered.len() == BLOCK_BYTES {
                self.flush_gathered(out)?;
            }
        }
        Ok(())
    }

    pub fn finish(&mut self, out: &mut impl BufMut) -> Result<()> {
        self.flush_gathered(out)?;
        self.start(out);
        match &mut self.format {
            Format::Gzip { crc, len, .. } => {
                out.put_slice(&DEFLATE_END);
                out.put_u32_le(std::mem::take(crc).finalize());
                out.put_u32_le(*len);
            }
            Format::Lz4 { hash } => {
                out.put_u32_le(0);
                out.put_u32_le(hash.finish() as u32);
            }
        }
        Ok(())
    }

    fn flush_gathered(&mut self, out: &mut impl BufMut) -> Result<()> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let gathered = std::mem::take(&mut self.gathered);
        let done = self.block(&gathered, out);
        self.gathered = gathered;
        self.gathered.clear();
        done
    }

    fn start(&mut self, out: &mut impl BufMut) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        match self.format {
            Format::Gzip { .. } => out.put_slice(&GZIP_HEADER),
            Format::Lz4 { .. } => {
                out.put_u32_le(LZ4_MAGIC);
                let descriptor = [LZ4_FLAGS, LZ4_BLOCK_CODE];
                out.put_slice(&descriptor);
                out.put_u8((xxh32(&descriptor) >> 8) as u8);
            }
        }
    }

    fn block(&mut self, block: &[u8], out: &mut impl BufMut) -> Result<()> {
        self.start(out);
        match &mut self.format {
            Format::Gzip { deflate, crc, len } => {
                crc.update(block);
                *len = len.wrapping_add(block.len() as u32);
                if is_noise(block) && lz4_into(block, &mut self.scratch)? >= block.len() {
                    stored_into(block, out);
                    return Ok(());
                }
                deflate_into(deflate, &mut self.scratch, block, out)
            }
            Format::Lz4 { hash } => {
                hash.write(block);
                let len = lz4_into(block, &mut self.scratch)?;
                let (data, mark) = if len < block.len() {
                    (&self.scratch[..len], 0)
                } else {
                    (block, LZ4_STORED)
                };
                out.put_u32_le(data.len() as u32 | mark);
                out.put_slice(data);
                Ok(())
            }
        }
    }
}

fn lz4_into(block: &[u8], scratch: &mut [u8]) -> Result<usize> {
    lz4_flex::block::compress_into(block, scratch)
        .map_err(|e| Error::internal("an lz4 block could not be compressed").caused_by(e))
}

/// Whether all bytes are about equally frequent, so that no code can be shorter than the bytes: the
/// chance that two of them are equal is within a quarter of 1 in 256. (Whether sequences repeat is
/// another question.) Computed in whole numbers, so that every machine agrees.
fn is_noise(block: &[u8]) -> bool {
    let mut counts = [0u64; 256];
    for &b in block {
        counts[usize::from(b)] += 1;
    }
    let equal_pairs: u64 = counts.iter().map(|&c| c * c).sum();
    let pairs = (block.len() as u64).pow(2);
    equal_pairs * 256 * 4 < pairs * 5
}

/// The block as stored deflate blocks.
fn stored_into(block: &[u8], out: &mut impl BufMut) {
    for piece in block.chunks(STORED_MAX_BYTES) {
        let len = piece.len() as u16;
        out.put_u8(0);
        out.put_u16_le(len);
        out.put_u16_le(!len);
        out.put_slice(piece);
    }
}

/// The block as deflate blocks that refer to nothing before it and end at a byte boundary.
fn deflate_into(
    deflate: &mut Compress,
    scratch: &mut [u8],
    mut input: &[u8],
    out: &mut impl BufMut,
) -> Result<()> {
    deflate.reset();
    loop {
        let (in_before, out_before) = (deflate.total_in(), deflate.total_out());
        let status = deflate
            .compress(input, scratch, FlushCompress::Sync)
            .map_err(|e| Error::internal("deflate failed").caused_by(e))?;
        input = &input[(deflate.total_in() - in_before) as usize..];
        let produced = (deflate.total_out() - out_before) as usize;
        out.put_slice(&scratch[..produced]);
        // The flush is complete if there was room to spare.
        if produced < scratch.len() {
            let complete = input.is_empty() && status != Status::StreamEnd;
            return if complete {
                Ok(())
            } else {
                Err(Error::internal("deflate stopped in the middle of a block"))
            };
        }
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.format {
            Format::Gzip { .. } => "Compressor(gzip)",
            Format::Lz4 { .. } => "Compressor(lz4)",
        })
    }
}
