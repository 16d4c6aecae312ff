//! Archives from bytes to member indexes, archives written as streams, and files of rows as Arrow
//! record batches. Parsers do no I/O.
//!
//! # Rows
//! Parquet, Arrow IPC, TFRecord, JSONL, CSV, MDS, Megatron-LM's indexed datasets, litData, and the
//! samples of tars: see [`tabular`].
//!
//! # Reading archives
//! An [`Indexer`] turns an archive of any [`ArchiveKind`] into a [`MemberIndex`]: it says which
//! bytes it needs next and is fed them, or all bytes flow through it on their way elsewhere.
//!
//! ```
//! # use forebay_format::*;
//! # fn read(bytes: &[u8], r: std::ops::Range<u64>) -> &[u8] { &bytes[r.start as usize..r.end as usize] }
//! # fn main() -> forebay_core::Result<()> {
//! # let mut archive = Vec::new();
//! # tar_header_into(&mut archive, "a.txt", 5, 0)?;
//! # archive.extend_from_slice(b"hello"); tar_padding_into(&mut archive, 5); tar_trailer_into(&mut archive);
//! let mut indexer = Indexer::new(ArchiveKind::Tar, archive.len() as u64);
//! while let ScanStep::Need(range) = indexer.step()? {
//!     indexer.feed(range.start, read(&archive, range))?; // from a disk, from an origin
//! }
//! let index = indexer.finish()?;
//! let member = index.readable("./a.txt")?;
//! if let Place::Archive(range) = member.extent.place()? {
//!     assert_eq!(read(&archive, range), b"hello");
//! }
//! # Ok(()) }
//! ```
//!
//! [`Extent::place`] says where a member's bytes are. Members of zips go through a
//! [`MemberDecoder`], which inflates and checks them; members of compressed tars are in the output
//! of a [`Decompressor`].
//!
//! # Writing
//! An [`ArchiveWriter`] makes an archive of entries with known sizes, and appends it to the
//! caller's buffer. For plain tar the pieces are also available separately ([`tar_header_into`],
//! [`tar_padding_into`], [`tar_trailer_into`]), so that file bytes are read straight into the
//! outgoing buffer.
//!
//! # What holds everywhere
//! Input is hostile: sizes lie, streams stop, bytes flip. Every parser answers with an
//! [`Error`](forebay_core::Error) of kind `Corrupt` (the bytes violate the format; the message has
//! the offset) or `Unsupported` (they exceed a limit, or use an unsupported feature), never with a
//! panic, and keeps no more memory than it says.

#![warn(missing_docs)]

mod compress;
pub mod csv;
pub mod decompress;
pub mod example;
pub mod index;
mod indexer;
mod ipc;
pub mod jsonl;
mod kind;
pub mod labels;
mod lines;
pub mod litdata;
mod mds;
pub mod megatron;
mod member_decoder;
mod parquet;
mod records;
pub mod samples;
pub mod tabular;
pub mod tar;
pub mod tfrecord;
mod writer;
pub mod zip;

pub use decompress::{Codec, Decompressor, Progress};
pub use index::{
    Extent, Member, MemberIndex, MemberIndexBuilder, Place, Repeated, Storage, lookup_key,
};
pub use indexer::Indexer;
pub use kind::ArchiveKind;
pub use member_decoder::MemberDecoder;
pub use tar::{
    ScanStep, TAR_TRAILER_BYTES, TarScanner, tar_entry_bytes, tar_exact_size, tar_header_bytes,
    tar_header_into, tar_header_with_pax, tar_padding, tar_padding_into, tar_trailer_into,
};
pub use writer::ArchiveWriter;
pub use zip::{ZipScanner, ZipWriter};
