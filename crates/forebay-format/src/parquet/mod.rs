//! Parquet: footers scanned cheaply, rows decoded by page.
//!
//! **Index.** One read of the file's last 64 KiB finds the footer (a longer one takes a second
//! read). [`footer`] walks it without building anything: rows and bytes of each row group, and
//! which bytes are the schema, which is turned into an Arrow schema once for all files that have
//! the same. What a lying footer could do harm with later is refused here, before any library sees
//! it.
//!
//! **Read.** The `parquet` crate's push decoder says which pages hold the wanted rows. Page indexes
//! are read when some rows of a row group are wanted for the first time ([`open::Pages`]). Before
//! pages get to the decoder [`pages`] checks what their headers claim.
//!
//! The library is not expected to panic then; should it, [`guarded`] makes an error of it.

mod fields;
mod footer;
mod index;
mod open;
mod pages;
mod read;
mod thrift;

pub(crate) use index::Indexer;
pub(crate) use open::{Opened, Opener};
pub(crate) use read::Read;

use ::parquet::errors::ParquetError;
use forebay_core::{Error, ErrorKind, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};

const MAGIC: &[u8; 4] = b"PAR1";
/// The length of the footer, and the magic bytes.
const TAIL_BYTES: u64 = 8;

/// Runs code of a library over bytes of a file: a panic there is an error here.
pub(crate) fn guarded<T>(what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let why = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or(panic.downcast_ref::<&str>().copied())
            .unwrap_or("no reason given");
        Err(Error::corrupt(format!("{what} cannot be decoded: {why}")))
    })
}

fn parquet_error(e: ParquetError) -> Error {
    let kind = match &e {
        ParquetError::NYI(_) => ErrorKind::Unsupported,
        ParquetError::ArrowError(m) if m.contains("overflow") => ErrorKind::TooLarge,
        _ => ErrorKind::Corrupt,
    };
    Error::new(kind, e.to_string())
}
