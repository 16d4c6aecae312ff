//! Frames: how rows travel from a node to a client, in one answer or in an endless stream.
//!
//! A frame is a header of 64 bytes and a payload that is padded to a multiple of 64. Both are
//! little endian and carry a CRC32C.
//!
//! ```text
//!  0  magic "FBF1"     4  kind u16        6  flags u16 (0)
//!  8  epoch u64       16  step u64       24  rows u32       28  padding u32
//! 32  payload u64     40  next u64       48  payload CRC    52  zero u64      60  CRC of bytes 0..60
//! ```
//!
//! The payload of [`FrameKind::Rows`] is an Arrow IPC stream of one record batch whose buffers are
//! aligned to 64 bytes from the payload's start. A sender puts the batch's own buffers on the wire
//! ([`Frame::into_pieces`]). A receiver that reads the payload into memory aligned to 64 bytes gets
//! the batch without another copy ([`decode_rows`]).
//!
//! Invariant: whatever the bytes are, decoding returns either a batch whose buffers all lie inside
//! the payload, or an error of kind `Corrupt`. No length that is read is trusted before it is
//! compared with what is there.

use crate::ErrorDocument;
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::{
    MessageHeader,
    reader::StreamDecoder,
    writer::{IpcWriteOptions, StreamEncoder},
};
use arrow_schema::ArrowError;
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, Result, crc32c, crc32c_append, limits::FRAME_PAYLOAD_MAX_BYTES,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The length of a header on the wire.
pub const FRAME_HEADER_BYTES: usize = 64;
/// Payloads are padded to a multiple of this, and their buffers are aligned to it.
pub const FRAME_ALIGNMENT: usize = 64;

const MAGIC: &[u8; 4] = b"FBF1";
/// Buffers smaller than this go on the wire in one piece with their neighbours.
const OWN_PIECE_FROM_BYTES: usize = 16 << 10;
/// The continuation marker and the length before each message of Arrow IPC.
const MESSAGE_PREFIX_BYTES: usize = 8;

/// What a frame's payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// An Arrow IPC stream of one batch.
    Rows,
    /// An [`ErrorDocument`]. This is the last frame.
    Error,
    /// Nothing follows, and nothing is missing. The payload may be JSON with statistics.
    End,
    /// There is nothing to send yet. The payload may be JSON with statistics so far.
    KeepAlive,
}

impl FrameKind {
    fn code(self) -> u16 {
        match self {
            FrameKind::Rows => 1,
            FrameKind::Error => 2,
            FrameKind::End => 3,
            FrameKind::KeepAlive => 4,
        }
    }

    fn from_code(code: u16) -> Option<Self> {
        [
            FrameKind::Rows,
            FrameKind::Error,
            FrameKind::End,
            FrameKind::KeepAlive,
        ]
        .into_iter()
        .find(|k| k.code() == code)
    }
}

/// Where in an order a frame's rows belong. All zero for rows that were requested by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FrameTag {
    /// The epoch of the rows, from 0.
    pub epoch: u64,
    /// The step, counted from where the job began; the rows are one rank's batch of it.
    pub step: u64,
    /// The position within the epoch of the first row after those of all ranks; 0: the next epoch
    /// begins. Of batches bounded by length, the position where the next batch's look-ahead window
    /// begins, which is not all of a place, and 0 in the first window.
    pub next: u64,
    /// How many rows at the end only fill up the step and do not count.
    pub padding: u32,
}

/// The 64 bytes before a payload, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the payload is.
    pub kind: FrameKind,
    /// No flags are defined.
    pub flags: u16,
    /// Where the rows belong.
    pub tag: FrameTag,
    /// Rows of the batch, including those that only fill up the step; 0 for other kinds.
    pub rows: u32,
    /// The length without the padding.
    pub payload_bytes: u64,
    /// CRC32C of the payload, without the padding.
    pub payload_crc: u32,
}

fn corrupt(message: impl Into<String>) -> Error {
    Error::corrupt(message)
        .hint("is the node of the same release, and is there a proxy that changes bodies?")
}

impl FrameHeader {
    /// The header as it is sent, with its own checksum.
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut out = [0; FRAME_HEADER_BYTES];
        out[0..4].copy_from_slice(MAGIC);
        out[4..6].copy_from_slice(&self.kind.code().to_le_bytes());
        out[6..8].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.tag.epoch.to_le_bytes());
        out[16..24].copy_from_slice(&self.tag.step.to_le_bytes());
        out[24..28].copy_from_slice(&self.rows.to_le_bytes());
        out[28..32].copy_from_slice(&self.tag.padding.to_le_bytes());
        out[32..40].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[40..48].copy_from_slice(&self.tag.next.to_le_bytes());
        out[48..52].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32c(&out[..60]);
        out[60..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// # Errors
    /// `Corrupt` if these are not the 64 bytes of a header, or if it announces more than a frame
    /// may hold.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let Ok(bytes): Result<&[u8; FRAME_HEADER_BYTES], _> = bytes.try_into() else {
            return Err(corrupt(format!(
                "a frame's header has {FRAME_HEADER_BYTES} bytes, not {}",
                bytes.len()
            )));
        };
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if &bytes[..4] != MAGIC {
            return Err(corrupt(format!(
                "this is not a frame: it begins with {:02x?}",
                &bytes[..4]
            )));
        }
        if u32_at(60) != crc32c(&bytes[..60]) {
            return Err(corrupt("a frame's header does not match its checksum"));
        }
        let Some(kind) = FrameKind::from_code(u16_at(4)) else {
            return Err(corrupt(format!(
                "this release does not know frames of kind {}",
                u16_at(4)
            )));
        };
        if u16_at(6) != 0 || u64_at(52) != 0 {
            return Err(corrupt(
                "a frame's header uses fields that this release does not know",
            ));
        }
        let payload_bytes = u64_at(32);
        if payload_bytes > FRAME_PAYLOAD_MAX_BYTES {
            return Err(corrupt(format!(
                "a frame announces {payload_bytes} bytes; the limit is {FRAME_PAYLOAD_MAX_BYTES}"
            )));
        }
        let tag = FrameTag {
            epoch: u64_at(8),
            step: u64_at(16),
            next: u64_at(40),
            padding: u32_at(28),
        };
        Ok(FrameHeader {
            kind,
            flags: 0,
            tag,
            rows: u32_at(24),
            payload_bytes,
            payload_crc: u32_at(48),
        })
    }

    /// The number of bytes that follow the header: the payload with its padding.
    pub fn wire_payload_bytes(&self) -> u64 {
        self.payload_bytes.next_multiple_of(FRAME_ALIGNMENT as u64)
    }

    /// # Errors
    /// `Corrupt` if the payload (without padding) is not the one that was sent.
    pub fn check_payload(&self, payload: &[u8]) -> Result<()> {
        if payload.len() as u64 != self.payload_bytes {
            return Err(corrupt(format!(
                "a frame has {} bytes of payload, and announced {}",
                payload.len(),
                self.payload_bytes
            )));
        }
        if crc32c(payload) != self.payload_crc {
            return Err(corrupt(format!(
                "the {} bytes of a frame's payload do not match their checksum",
                payload.len()
            )));
        }
        Ok(())
    }
}

/// A frame that is ready to be sent. It shares the memory of the batch that it was made from.
#[derive(Debug)]
pub struct Frame {
    /// The header that goes before the payload.
    pub header: FrameHeader,
    payload: Vec<Buffer>,
}

impl Frame {
    /// # Errors
    /// `TooLarge` if the batch does not fit into a frame, `Unsupported` if it holds a type that
    /// Arrow IPC does not know.
    pub fn rows(tag: FrameTag, batch: &RecordBatch) -> Result<Frame> {
        let encoded = || -> Result<Vec<Buffer>, ArrowError> {
            let mut encoder =
                StreamEncoder::try_new_with_options(&batch.schema(), write_options()?)?;
            let mut buffers = encoder.encode(batch)?;
            buffers.extend(encoder.finish()?);
            Ok(buffers)
        };
        let payload = encoded().map_err(|e| {
            Error::unsupported("these rows cannot be put into a frame").caused_by(e)
        })?;
        let rows = u32::try_from(batch.num_rows())
            .map_err(|_| too_large(format!("{} rows", batch.num_rows())))?;
        Self::of(FrameKind::Rows, tag, rows, payload)
    }

    /// A frame that reports an error; nothing follows it.
    pub fn error(tag: FrameTag, error: &Error) -> Frame {
        // A document of text and numbers can always be written.
        let json = serde_json::to_vec(&ErrorDocument::of(error)).unwrap_or_default();
        Self::short(FrameKind::Error, tag, json)
    }

    /// `json` has statistics of the whole stream; it may be empty.
    pub fn end(tag: FrameTag, json: Vec<u8>) -> Frame {
        Self::short(FrameKind::End, tag, json)
    }

    /// `json` has statistics so far; it may be empty.
    pub fn keep_alive(tag: FrameTag, json: Vec<u8>) -> Frame {
        Self::short(FrameKind::KeepAlive, tag, json)
    }

    fn short(kind: FrameKind, tag: FrameTag, payload: Vec<u8>) -> Frame {
        let (payload_bytes, payload_crc) = (payload.len() as u64, crc32c(&payload));
        Frame {
            header: FrameHeader {
                kind,
                flags: 0,
                tag,
                rows: 0,
                payload_bytes,
                payload_crc,
            },
            payload: vec![Buffer::from_vec(payload)],
        }
    }

    fn of(kind: FrameKind, tag: FrameTag, rows: u32, payload: Vec<Buffer>) -> Result<Frame> {
        let payload_bytes = payload.iter().map(|b| b.len() as u64).sum::<u64>();
        if payload_bytes > FRAME_PAYLOAD_MAX_BYTES {
            return Err(too_large(format!("{payload_bytes} bytes")));
        }
        let payload_crc = payload.iter().fold(0, |crc, b| crc32c_append(crc, b));
        Ok(Frame {
            header: FrameHeader {
                kind,
                flags: 0,
                tag,
                rows,
                payload_bytes,
                payload_crc,
            },
            payload,
        })
    }

    /// The number of bytes on the wire.
    pub fn wire_bytes(&self) -> u64 {
        FRAME_HEADER_BYTES as u64 + self.header.wire_payload_bytes()
    }

    /// The frame as buffers to send one after the other. Large ones are the batch's own; `memory`
    /// is dropped with the last of them.
    pub fn into_pieces(self, memory: impl Send + Sync + 'static) -> Vec<Bytes> {
        struct Piece(Buffer, #[allow(dead_code)] std::sync::Arc<dyn Send + Sync>);
        impl AsRef<[u8]> for Piece {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let memory: std::sync::Arc<dyn Send + Sync> = std::sync::Arc::new(memory);
        let piece = |buffer: Buffer| Bytes::from_owner(Piece(buffer, memory.clone()));
        let padding = (self.header.wire_payload_bytes() - self.header.payload_bytes) as usize;
        let (mut pieces, mut small) = (Vec::new(), self.header.encode().to_vec());
        for buffer in self.payload {
            if buffer.len() < OWN_PIECE_FROM_BYTES {
                small.extend_from_slice(&buffer);
            } else {
                pieces.push(piece(Buffer::from_vec(std::mem::take(&mut small))));
                pieces.push(piece(buffer));
            }
        }
        small.resize(small.len() + padding, 0);
        pieces.push(piece(Buffer::from_vec(small)));
        pieces.retain(|p| !p.is_empty());
        pieces
    }
}

fn write_options() -> Result<IpcWriteOptions, ArrowError> {
    IpcWriteOptions::try_new(FRAME_ALIGNMENT, false, arrow_ipc::MetadataVersion::V5)
}

fn too_large(what: String) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        format!("{what} do not fit into a frame of at most {FRAME_PAYLOAD_MAX_BYTES} bytes"),
    )
    .hint("ask for fewer rows or fewer columns at a time")
}

/// The batch in a frame of rows. Its buffers are slices of `payload` (without the padding) if that
/// is aligned to 64 bytes.
///
/// # Errors
/// `Corrupt`, whatever the bytes are.
pub fn decode_rows(header: &FrameHeader, payload: &Buffer) -> Result<RecordBatch> {
    if header.kind != FrameKind::Rows {
        return Err(corrupt(format!(
            "a frame of kind {:?} where rows were expected",
            header.kind
        )));
    }
    header.check_payload(payload)?;
    decode_checked(header, payload)
}

/// Like [`decode_rows`], for a payload that [`FrameHeader::check_payload`] has already accepted.
///
/// # Errors
/// `Corrupt`, whatever the bytes are.
pub fn decode_checked(header: &FrameHeader, payload: &Buffer) -> Result<RecordBatch> {
    check_messages(payload)?;
    // Everything known to make the decoder panic is refused above. A payload that finds another way
    // must not take the process down.
    let decoded = catch_unwind(AssertUnwindSafe(|| {
        let mut decoder = StreamDecoder::new();
        let mut rest = payload.clone();
        let batch = decoder.decode(&mut rest)?;
        if decoder.decode(&mut rest)?.is_some() {
            return Err(ArrowError::IpcError("more than one batch".into()));
        }
        decoder.finish()?;
        Ok(batch)
    }));
    let batch = match decoded {
        Ok(Ok(Some(batch))) => batch,
        Ok(Ok(None)) => return Err(corrupt("a frame of rows without a batch")),
        Ok(Err(e)) => return Err(corrupt("a frame's rows cannot be decoded").caused_by(e)),
        Err(_) => return Err(corrupt("a frame's rows cannot be decoded")),
    };
    if batch.num_rows() as u64 != u64::from(header.rows) {
        return Err(corrupt(format!(
            "a frame holds {} rows, and announced {}",
            batch.num_rows(),
            header.rows
        )));
    }
    Ok(batch)
}

/// The error in a frame of kind [`FrameKind::Error`].
pub fn decode_error(header: &FrameHeader, payload: &[u8]) -> Error {
    if let Err(e) = header.check_payload(payload) {
        return e;
    }
    match serde_json::from_slice::<ErrorDocument>(payload) {
        Ok(document) => document.to_error(),
        Err(_) => corrupt("an error frame does not hold an error document"),
    }
}

/// Goes through the payload's messages and refuses what the decoder would trust: buffers outside of
/// a message, compressed bodies (they may unpack to any size), negative lengths.
fn check_messages(payload: &[u8]) -> Result<()> {
    let bad = |what: &str| Err(corrupt(format!("a frame's rows: {what}")));
    let mut at = 0;
    loop {
        let Some(prefix) = payload.get(at..at + MESSAGE_PREFIX_BYTES) else {
            return bad("they end without an end mark");
        };
        if prefix[..4] != [0xff; 4] {
            return bad("a message without its mark");
        }
        let length = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
        at += MESSAGE_PREFIX_BYTES;
        if length == 0 {
            return if at == payload.len() {
                Ok(())
            } else {
                bad("bytes after the end mark")
            };
        }
        let Some(metadata) = at.checked_add(length).and_then(|end| payload.get(at..end)) else {
            return bad("a message past the end");
        };
        let message = match arrow_ipc::root_as_message(metadata) {
            Ok(message) => message,
            Err(e) => {
                return Err(corrupt("a frame's rows: a message is not a flatbuffer")
                    .caused_by(e.to_string()));
            }
        };
        at += length;
        let body = usize::try_from(message.bodyLength())
            .ok()
            .filter(|body| *body <= payload.len() - at);
        let Some(body) = body else {
            return bad("a body past the end");
        };
        let batch = match message.header_type() {
            MessageHeader::Schema if body == 0 => None,
            MessageHeader::RecordBatch => message.header_as_record_batch(),
            MessageHeader::DictionaryBatch => {
                message.header_as_dictionary_batch().and_then(|d| d.data())
            }
            other => return bad(&format!("a message of type {other:?}")),
        };
        match batch {
            Some(batch) => check_batch(&batch, body)?,
            None if message.header_type() == MessageHeader::Schema => {}
            None => return bad("a batch without a header"),
        }
        at += body;
    }
}

fn check_batch(batch: &arrow_ipc::RecordBatch<'_>, body: usize) -> Result<()> {
    let bad = |what: &str| Err(corrupt(format!("a frame's rows: {what}")));
    if batch.compression().is_some() {
        return bad("compressed bodies are not accepted");
    }
    let most = i64::from(u32::MAX);
    if !(0..=most).contains(&batch.length()) {
        return bad("a length out of range");
    }
    for node in batch.nodes().iter().flatten() {
        // Lists may have more items than the batch has rows; items take up space in the body,
        // unless they are empty.
        if !(0..=most).contains(&node.length()) || !(0..=node.length()).contains(&node.null_count())
        {
            return bad("a length out of range");
        }
    }
    for buffer in batch.buffers().iter().flatten() {
        let end = buffer.offset().checked_add(buffer.length());
        if buffer.offset() < 0 || buffer.length() < 0 || end.is_none_or(|end| end > body as i64) {
            return bad("a buffer outside of its message");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
