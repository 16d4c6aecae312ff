//! Gzip and lz4 output whose bytes do not depend on how the input was cut into calls.
//!
//! Input is gathered into blocks of a fixed size, and the compressor only ever sees whole blocks and one last part. Gzip: one member, no
//! name, time 0. Lz4: one frame of independent blocks with a checksum of the content.

use crate::decompress::{LZ4_MAGIC, xxh32};
use bytes::BufMut;
use flate2::{Compress, Compression, FlushCompress, Status};
use forebay_core::{Error, Result};
use std::hash::Hasher;
use twox_hash::XxHash32;

/// How much input is gathered before it is compressed. Also lz4's block size (code 5).
const BLOCK_BYTES: usize = 256 << 10;
const OUT_BYTES: usize = 64 << 10;

/// Images and audio are compressed already: a higher level costs time and gains nothing.
const GZIP_LEVEL: u32 = 1;
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
    Gzip { deflate: Compress, crc: crc32fast::Hasher, len: u32 },
    Lz4 { hash: XxHash32 },
}

impl Compressor {
    pub fn gzip() -> Self {
        let deflate = Compress::new(Compression::new(GZIP_LEVEL), false);
        Self::new(Format::Gzip { deflate, crc: crc32fast::Hasher::new(), len: 0 }, OUT_BYTES)
    }

    pub fn lz4() -> Self {
        Self::new(Format::Lz4 { hash: XxHash32::with_seed(0) }, lz4_flex::block::get_maximum_output_size(BLOCK_BYTES))
    }

    fn new(format: Format, scratch: usize) -> Self {
        Self { gathered: Vec::with_capacity(BLOCK_BYTES), scratch: vec![0; scratch].into_boxed_slice(), started: false, format }
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
            Format::Gzip { deflate, crc, len } => {
                deflate_into(deflate, &mut self.scratch, &[], FlushCompress::Finish, out)?;
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
                deflate_into(deflate, &mut self.scratch, block, FlushCompress::None, out)
            }
            Format::Lz4 { hash } => {
                hash.write(block);
                let len = lz4_flex::block::compress_into(block, &mut self.scratch)
                    .map_err(|e| Error::internal("an lz4 block could not be compressed").source(e))?;
                // A block that did not shrink is kept as it is.
                let (data, mark) = if len < block.len() { (&self.scratch[..len], 0) } else { (block, LZ4_STORED) };
                out.put_u32_le(data.len() as u32 | mark);
                out.put_slice(data);
                Ok(())
            }
        }
    }
}

fn deflate_into(deflate: &mut Compress, scratch: &mut [u8], mut input: &[u8], flush: FlushCompress, out: &mut impl BufMut) -> Result<()> {
    loop {
        let (in_before, out_before) = (deflate.total_in(), deflate.total_out());
        let status = deflate.compress(input, scratch, flush).map_err(|e| Error::internal("deflate failed").source(e))?;
        let consumed = (deflate.total_in() - in_before) as usize;
        let produced = (deflate.total_out() - out_before) as usize;
        out.put_slice(&scratch[..produced]);
        input = &input[consumed..];
        match status {
            Status::StreamEnd => return Ok(()),
            _ if flush == FlushCompress::None && input.is_empty() && produced < scratch.len() => return Ok(()),
            _ if consumed == 0 && produced == 0 => return Err(Error::internal("deflate makes no progress")),
            _ => {}
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
