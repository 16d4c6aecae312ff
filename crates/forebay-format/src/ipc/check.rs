//! Checks that the header of a batch fits its body.

use arrow_ipc::{CompressionType, RecordBatch};
use arrow_schema::{DataType, Field};
use forebay_core::{Error, ErrorKind, Result, limits};

/// A codec cannot make much more than this many bytes from one byte: a higher claim is false.
fn most_per_byte(codec: CompressionType) -> Option<u64> {
    match codec {
        CompressionType::LZ4_FRAME => Some(256),
        CompressionType::ZSTD => Some(1 << 16),
        _ => None,
    }
}

/// The width of the offsets that each buffer of a column holds, 0 for buffers of anything else.
/// `None` is for columns whose number of buffers does not follow from the type and the batch's
/// numbers of variadic ones.
fn offset_widths(
    ty: &DataType,
    variadic: &mut impl Iterator<Item = i64>,
    out: &mut Vec<Option<u8>>,
) {
    use DataType::*;
    let validity = Some(0);
    match ty {
        Null => {}
        Utf8 | Binary => out.extend([validity, Some(4), Some(0)]),
        LargeUtf8 | LargeBinary => out.extend([validity, Some(8), Some(0)]),
        Utf8View | BinaryView => match variadic.next() {
            Some(data @ 0..) => {
                out.extend([validity, Some(0)]);
                out.extend((0..data).map(|_| Some(0)));
            }
            _ => out.push(None),
        },
        Union(..) => out.push(None),
        List(f) | Map(f, _) => {
            out.extend([validity, Some(4)]);
            offset_widths(f.data_type(), variadic, out);
        }
        LargeList(f) => {
            out.extend([validity, Some(8)]);
            offset_widths(f.data_type(), variadic, out);
        }
        ListView(f) => {
            out.extend([validity, Some(4), Some(4)]);
            offset_widths(f.data_type(), variadic, out);
        }
        LargeListView(f) => {
            out.extend([validity, Some(8), Some(8)]);
            offset_widths(f.data_type(), variadic, out);
        }
        FixedSizeList(f, _) => {
            out.push(validity);
            offset_widths(f.data_type(), variadic, out);
        }
        Struct(fields) => {
            out.push(validity);
            fields
                .iter()
                .for_each(|f| offset_widths(f.data_type(), variadic, out));
        }
        RunEndEncoded(ends, values) => {
            offset_widths(ends.data_type(), variadic, out);
            offset_widths(values.data_type(), variadic, out);
        }
        _ => out.extend([validity, Some(0)]),
    }
}

/// How much the wanted columns of a batch hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Decompressed.
    pub wanted_bytes: u64,
    pub compressed: bool,
}

impl Sizes {
    /// What decompressing takes.
    pub fn decompressed_bytes(&self) -> u64 {
        match self.compressed {
            true => self.wanted_bytes,
            false => 0,
        }
    }
}

/// Checks every buffer and every length before use. `fields` are those of the batch, and
/// `wanted` says which of them will be read.
///
/// # Errors
/// `Corrupt` with the offset of the message, `Unsupported` for an unknown codec, `TooLarge`.
pub(super) fn check<'f>(
    batch: &RecordBatch<'_>,
    fields: impl IntoIterator<Item = &'f Field>,
    wanted: impl Fn(usize) -> bool,
    body: &[u8],
    at: u64,
) -> Result<Sizes> {
    let corrupt =
        |what: String| Error::corrupt(format!("the Arrow batch at offset {at} is damaged: {what}"));
    if batch.length() < 0 {
        return Err(corrupt(format!("it has {} rows", batch.length())));
    }
    for node in batch.nodes().into_iter().flatten() {
        if node.length() < 0 || node.null_count() < 0 || node.null_count() > node.length() {
            return Err(corrupt(format!(
                "a column has {} values, of which {} are null",
                node.length(),
                node.null_count()
            )));
        }
    }
    if batch
        .variadicBufferCounts()
        .into_iter()
        .flatten()
        .any(|n| n < 0)
    {
        return Err(corrupt(
            "a column has a negative number of buffers".to_owned(),
        ));
    }
    let most = match batch.compression() {
        None => None,
        Some(c) => Some(most_per_byte(c.codec()).ok_or_else(|| {
            Error::unsupported(format!(
                "the Arrow batch at offset {at} is compressed with codec {}, which Forebay does \
                 not read",
                c.codec().0
            ))
        })?),
    };
    let (mut widths, mut is_wanted) = (Vec::new(), Vec::new());
    // All together there cannot be more than the batch has.
    let mut left = batch.buffers().map_or(0, |all| all.len() as i64);
    let variadic = batch.variadicBufferCounts().into_iter().flatten();
    let mut variadic = variadic.map_while(|n| {
        left = left.saturating_sub(n);
        (left >= 0).then_some(n)
    });
    for (number, field) in fields.into_iter().enumerate() {
        offset_widths(field.data_type(), &mut variadic, &mut widths);
        is_wanted.resize(widths.len(), wanted(number));
    }
    // Which column a buffer belongs to is unknown from there on.
    let known = widths.iter().position(Option::is_none);
    let known = known.unwrap_or(widths.len());
    let mut buffers = widths.into_iter().flatten().zip(is_wanted).take(known);
    let mut decoded = 0u64;
    let mut sizes = Sizes {
        wanted_bytes: 0,
        compressed: most.is_some(),
    };
    for buffer in batch.buffers().into_iter().flatten() {
        let place = usize::try_from(buffer.offset())
            .ok()
            .zip(usize::try_from(buffer.length()).ok());
        let bytes = place
            .and_then(|(offset, len)| body.get(offset..offset.checked_add(len)?))
            .ok_or_else(|| {
                corrupt(format!(
                    "it says that a buffer has {} bytes at offset {} of a body of {}",
                    buffer.length(),
                    buffer.offset(),
                    body.len()
                ))
            })?;
        let stored = bytes.len() as u64;
        let claimed = match (most, bytes.split_first_chunk::<8>()) {
            (None, _) => stored,
            (Some(_), None) if bytes.is_empty() => 0,
            (Some(_), None) => {
                return Err(corrupt(
                    "a compressed buffer is shorter than its length".to_owned(),
                ));
            }
            (Some(most), Some((len, data))) => match i64::from_le_bytes(*len) {
                -1 => stored - 8,
                len if len < 0 || len as u64 > most.saturating_mul(data.len() as u64 + 64) => {
                    return Err(corrupt(format!(
                        "it says that {} bytes decompress to {len}",
                        data.len()
                    )));
                }
                len => len as u64,
            },
        };
        let (width, is_wanted) = buffers.next().unwrap_or((0, true));
        let width = u64::from(width);
        if is_wanted {
            sizes.wanted_bytes = sizes.wanted_bytes.saturating_add(claimed);
        }
        if width > 0 && !claimed.is_multiple_of(width) {
            return Err(corrupt(format!(
                "{claimed} bytes cannot be offsets of {width} bytes each"
            )));
        }
        decoded = decoded.saturating_add(claimed);
        if decoded > limits::BLOCK_DECODED_MAX_BYTES {
            let max = limits::BLOCK_DECODED_MAX_BYTES;
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("the Arrow batch at offset {at} holds more than {max} bytes"),
            )
            .hint("write the file with smaller batches"));
        }
    }
    Ok(sizes)
}
