//! Zstandard frames (RFC 8878): one after another, possibly with skippable frames between them.
//!
//! The library checks the blocks of a frame, and the checksum of its content where there is one. It
//! holds one window, whose size the frame names; larger ones than the caller allows are refused
//! before they are allocated. Whether the content is as long as the frame says is checked here: the
//! library does not see it where the last block is empty, unless the whole frame is there at once.

use super::{PIECE_BYTES, Step};
use bytes::BufMut;
use forebay_core::{Error, Result};
use zstd::zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer, get_error_name};

const MAGIC: u32 = 0xfd2f_b528;
/// The first of sixteen.
const SKIPPABLE: u32 = 0x184d_2a50;

/// The largest window that the library decompresses.
pub(super) const WINDOW_MAX_BYTES: u64 = 1 << 27;

/// `ZSTD_error_frameParameter_windowTooLarge` and `ZSTD_error_dictionary_wrong`, as the library
/// returns them.
const WINDOW_TOO_LARGE: usize = 0usize.wrapping_sub(16);
const DICTIONARY_WRONG: usize = 0usize.wrapping_sub(32);

pub(super) struct Unzstd {
    context: DCtx<'static>,
    window_max: u64,
    between_frames: bool,
    /// The beginning of the current frame, and what came out of it.
    head: Vec<u8>,
    content: u64,
    /// The last call filled its output, so there may be more without further input.
    full: bool,
    scratch: Box<[u8]>,
}

impl std::fmt::Debug for Unzstd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unzstd")
            .field("between_frames", &self.between_frames)
            .finish_non_exhaustive()
    }
}

impl Unzstd {
    /// `window_max`: windows larger than this, rounded up to a power of two, are refused.
    pub fn new(window_max: u64) -> Self {
        let window_max = window_max
            .clamp(1 << 10, WINDOW_MAX_BYTES)
            .next_power_of_two();
        let mut context = DCtx::create();
        let set = context.set_parameter(DParameter::WindowLogMax(window_max.ilog2()));
        debug_assert!(set.is_ok(), "the limit is one that the library takes");
        Self {
            context,
            window_max,
            between_frames: false,
            head: Vec::with_capacity(HEADER_MAX_BYTES),
            content: 0,
            full: false,
            scratch: vec![0; PIECE_BYTES].into_boxed_slice(),
        }
    }

    /// After at least one frame, and not within one.
    pub fn is_between_frames(&self) -> bool {
        self.between_frames
    }

    pub fn has_output(&self) -> bool {
        self.full
    }

    /// Takes some input; `at` is its offset in the stream. Makes progress unless it cannot.
    pub fn step(
        &mut self,
        input: &[u8],
        out: &mut impl BufMut,
        max_out: usize,
        at: u64,
    ) -> Result<Step> {
        // Without input, the library would take a call as the beginning of another frame.
        if input.is_empty() && !self.full {
            return Ok(Step {
                consumed: 0,
                produced: 0,
            });
        }
        if self.between_frames {
            self.head.clear();
            self.content = 0;
        }
        let room = max_out.min(self.scratch.len());
        let mut from = InBuffer::around(input);
        let mut to = OutBuffer::around(&mut self.scratch[..room]);
        let left = self.context.decompress_stream(&mut to, &mut from);
        let (consumed, produced) = (from.pos(), to.pos());
        let left = left.map_err(|code| failed(code, at + consumed as u64, self.window_max))?;
        out.put_slice(&self.scratch[..produced]);
        let more = consumed.min(HEADER_MAX_BYTES - self.head.len());
        self.head.extend_from_slice(&input[..more]);
        self.content += produced as u64;
        self.between_frames = left == 0;
        if self.between_frames
            && let Some(said) = self
                .head
                .strip_prefix(&MAGIC.to_le_bytes())
                .and_then(header)
            && said.content.is_some_and(|bytes| bytes != self.content)
        {
            return Err(Error::corrupt(format!(
                "the zstd stream is damaged before offset {}: a frame is not as long as it says",
                at + consumed as u64
            )));
        }
        self.full = produced == room && left > 0;
        Ok(Step { consumed, produced })
    }
}

fn failed(code: usize, at: u64, window_max: u64) -> Error {
    match code {
        WINDOW_TOO_LARGE => Error::unsupported(format!(
            "the zstd frame before offset {at} has a window of more than {window_max} bytes, the \
             largest that it may have here"
        ))
        .hint("compress it without --long and --ultra"),
        DICTIONARY_WRONG => {
            Error::unsupported("the zstd stream needs a dictionary").hint("compress it without one")
        }
        code => Error::corrupt(format!(
            "the zstd stream is damaged near offset {at}: {}",
            get_error_name(code)
        )),
    }
}

/// The window of the first frame, in bytes; `None` if these first bytes do not have its header.
pub(super) fn window_bytes(mut head: &[u8]) -> Option<u64> {
    loop {
        let (magic, rest) = head.split_first_chunk::<4>()?;
        match u32::from_le_bytes(*magic) {
            MAGIC => return header(rest).map(|header| header.window),
            magic if magic & !15 == SKIPPABLE => {
                let (length, rest) = rest.split_first_chunk::<4>()?;
                head = rest.get(u32::from_le_bytes(*length) as usize..)?;
            }
            _ => return None,
        }
    }
}

/// The longest header of a frame, with its magic.
const HEADER_MAX_BYTES: usize = 18;

/// What a frame says about itself.
struct Header {
    window: u64,
    content: Option<u64>,
}

/// Of the bytes after a frame's magic; `None` if these are too few.
fn header(bytes: &[u8]) -> Option<Header> {
    let (&descriptor, mut rest) = bytes.split_first()?;
    let is_single_segment = descriptor & 0x20 != 0;
    let mut window = 0;
    if !is_single_segment {
        let (&of_window, after) = rest.split_first()?;
        let base = 1u64 << (10 + (of_window >> 3));
        (window, rest) = (base + base / 8 * u64::from(of_window & 7), after);
    }
    let size = rest.get([0, 1, 2, 4][usize::from(descriptor & 3)]..)?;
    let content = match descriptor >> 6 {
        0 if !is_single_segment => None,
        0 => Some(u64::from(*size.first()?)),
        1 => Some(u64::from(u16::from_le_bytes(*size.first_chunk()?)) + 256),
        2 => Some(u64::from(u32::from_le_bytes(*size.first_chunk()?))),
        _ => Some(u64::from_le_bytes(*size.first_chunk()?)),
    };
    Some(Header {
        window: if is_single_segment { content? } else { window },
        content,
    })
}
