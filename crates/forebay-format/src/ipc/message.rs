//! Messages of Arrow IPC: their lengths and contents.

use crate::{parquet::guarded, tabular::arrow_error};
use arrow_ipc::{Message, MessageHeader, convert::try_fb_to_schema, root_as_message};
use arrow_schema::{Schema, SchemaRef};
use forebay_core::{Error, Result, limits};
use std::sync::Arc;

const CONTINUATION: [u8; 4] = [0xff; 4];
/// Enough bytes to tell how long a message's header is.
pub(super) const PREFIX_BYTES: usize = 8;

/// How a message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    /// A header of this many bytes, including this prefix (of 4 bytes in files before 2019, of 8
    /// since).
    Head { len: usize, prefix: usize },
    /// The stream ends.
    End,
}

/// # Errors
/// `Corrupt`, `Unsupported` past the limit.
pub(super) fn prefix(bytes: &[u8], at: u64) -> Result<Prefix> {
    let cut = || Error::corrupt(format!("the Arrow message at offset {at} is cut off"));
    let word = |i: usize| {
        bytes
            .get(i..i + 4)
            .and_then(|b| <[u8; 4]>::try_from(b).ok())
    };
    let first = word(0).ok_or_else(cut)?;
    let (len, prefix) = if first == CONTINUATION {
        (word(4).ok_or_else(cut)?, 8)
    } else {
        (first, 4)
    };
    match i32::from_le_bytes(len) {
        0 => Ok(Prefix::End),
        len if len < 0 => Err(Error::corrupt(format!(
            "the Arrow message at offset {at} claims a header of {len} bytes"
        ))),
        len if len as u64 > limits::FOOTER_MAX_BYTES => {
            // No writer makes a header this long: these are other bytes.
            let max = limits::FOOTER_MAX_BYTES;
            Err(Error::corrupt(format!(
                "the Arrow message at offset {at} claims a header of {len} bytes; the limit is \
                 {max}"
            )))
        }
        len => Ok(Prefix::Head {
            len: len as usize + prefix,
            prefix,
        }),
    }
}

/// The header of a message, verified, from its bytes and its prefix.
pub(super) fn header(bytes: &[u8], at: u64) -> Result<Message<'_>> {
    let Prefix::Head { len, prefix } = prefix(bytes, at)? else {
        return Err(Error::corrupt(format!(
            "no Arrow message begins at offset {at}"
        )));
    };
    let header = bytes
        .get(prefix..len)
        .ok_or_else(|| Error::corrupt(format!("the Arrow message at offset {at} is cut off")))?;
    let message = guarded("an Arrow message", || {
        root_as_message(header).map_err(|e| Error::corrupt(e.to_string()))
    })
    .map_err(|e| e.context(format!("the Arrow message at offset {at} is damaged")))?;
    if message.bodyLength() < 0 {
        return Err(Error::corrupt(format!(
            "the Arrow message at offset {at} claims a body of {} bytes",
            message.bodyLength()
        )));
    }
    Ok(message)
}

/// The schema in a message.
pub(super) fn schema(message: &Message<'_>, at: u64) -> Result<Schema> {
    let Some(schema) = message.header_as_schema() else {
        return Err(Error::corrupt(format!(
            "the Arrow message at offset {at} is not a schema"
        )));
    };
    decode_schema(schema, at)
}

pub(super) fn decode_schema(schema: arrow_ipc::Schema<'_>, at: u64) -> Result<Schema> {
    if schema.endianness() != arrow_ipc::Endianness::Little {
        return Err(Error::unsupported("the Arrow file is big-endian")
            .hint("write it on a little-endian machine"));
    }
    let schema = guarded("an Arrow schema", || {
        try_fb_to_schema(schema).map_err(arrow_error)
    })
    .map_err(|e| e.context(format!("the Arrow schema at offset {at}")))?;
    let mut names = 0;
    schema
        .fields()
        .iter()
        .try_for_each(|f| paths(f.data_type(), 1, &mut names))?;
    Ok(schema)
}

/// Counts the names on the paths to the columns.
fn paths(ty: &arrow_schema::DataType, depth: usize, names: &mut u64) -> Result<()> {
    use arrow_schema::DataType::*;
    *names += depth as u64;
    if depth > limits::SCHEMA_DEPTH_MAX || *names > limits::SCHEMA_PATH_NAMES_MAX {
        return Err(Error::unsupported(format!(
            "the Arrow schema is nested {depth} deep, or has more than {} names on the paths to \
             its columns; the limit is {}",
            limits::SCHEMA_PATH_NAMES_MAX,
            limits::SCHEMA_DEPTH_MAX
        ))
        .hint("write the file with fewer or flatter columns"));
    }
    match ty {
        List(f)
        | LargeList(f)
        | ListView(f)
        | LargeListView(f)
        | FixedSizeList(f, _)
        | Map(f, _) => paths(f.data_type(), depth + 1, names),
        Struct(fields) => fields
            .iter()
            .try_for_each(|f| paths(f.data_type(), depth + 1, names)),
        Union(fields, _) => fields
            .iter()
            .try_for_each(|(_, f)| paths(f.data_type(), depth + 1, names)),
        RunEndEncoded(_, f) => paths(f.data_type(), depth + 1, names),
        Dictionary(_, value) => paths(value, depth + 1, names),
        _ => Ok(()),
    }
}

/// The schema at the beginning of a stream in memory.
pub(crate) fn schema_of_stream(bytes: &[u8]) -> Result<SchemaRef> {
    Ok(Arc::new(schema(&header(bytes, 0)?, 0)?))
}

/// Whether a file begins as a stream does: with a schema.
pub(crate) fn looks_like_stream(head: &[u8]) -> bool {
    match head.split_first_chunk::<PREFIX_BYTES>() {
        Some((p, rest)) if p.starts_with(&CONTINUATION) => match prefix(p, 0) {
            // A schema's header is seldom longer than the bytes at hand, but it may be.
            Ok(Prefix::Head { len, .. }) if len <= head.len() => {
                header(head, 0).is_ok_and(|m| m.header_type() == MessageHeader::Schema)
            }
            Ok(Prefix::Head { len, .. }) => len.is_multiple_of(8) && rest.len() > 16,
            _ => false,
        },
        _ => false,
    }
}
