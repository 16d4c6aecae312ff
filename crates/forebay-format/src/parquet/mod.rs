//! Parquet: footers scanned cheaply, rows decoded by page.
//!
//! **Index.** One read of the file's last 64 KiB finds the footer (a longer one takes a second
//! read). [`footer`] walks it without building anything: rows and bytes of each row group, and the
//! bytes of the schema, which is turned into an Arrow schema once for all files with the same
//! bytes. Claims of a lying footer that could do harm later are refused here, before any library
//! sees them.
//!
//! **Read.** The `parquet` crate's push decoder says which pages hold the wanted rows. Page indexes
//! are read when some rows of a row group are wanted for the first time ([`open::Pages`]). Before
//! pages reach the decoder, [`pages`] checks the claims of their headers.
//!
//! **Facts.** What statistics, column indexes and bloom filters say of columns is in [`facts`]: only
//! who leaves out rows by it reads them.
//!
//! After that, the library is not expected to panic; if it does, [`guarded`] turns that into an
//! error.

pub(crate) mod facts;
mod fields;
mod footer;
mod index;
mod open;
mod pages;
mod read;
mod thrift;

pub(crate) use index::Indexer;
pub(crate) use open::{Opened, Opener, footer_of};
pub(crate) use read::Read;

use ::parquet::errors::ParquetError;
use arrow_schema::ArrowError;
use forebay_core::{Error, ErrorKind, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};

const MAGIC: &[u8; 4] = b"PAR1";
/// The length of the footer, and the magic bytes.
const TAIL_BYTES: u64 = 8;

/// Runs library code on bytes of a file: a panic in it becomes an error here.
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
        // Of the Arrow schema in the file: it has a type that is not known, as Int128.
        ParquetError::External(e)
            if matches!(
                e.downcast_ref(),
                Some(ArrowError::ParseError(_) | ArrowError::NotYetImplemented(_))
            ) =>
        {
            ErrorKind::Unsupported
        }
        ParquetError::ArrowError(m) if m.contains("overflow") => ErrorKind::TooLarge,
        _ => ErrorKind::Corrupt,
    };
    Error::new(kind, e.to_string())
}
