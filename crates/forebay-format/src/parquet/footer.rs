//! Walks a footer: finds the rows and bytes of each row group, and checks that its claims can be
//! true.
//!
//! Memory is one small record per column chunk of the current row group. It refuses chunks outside
//! the data, negative sizes and counts, row groups whose chunks take more bytes than the file has
//! (they overlap), schemas that are nested too deeply or whose paths would take too much memory,
//! encrypted columns, columns in other files, and unsupported codecs.

use super::{
    TAIL_BYTES, fields,
    thrift::{Bad, Compact, Type},
};
use forebay_core::{Error, Result, limits};
use std::ops::Range;

/// A row group as the footer describes it.
#[derive(Debug, Default)]
pub(super) struct RowGroup {
    pub rows: u64,
    /// From the first chunk to the last.
    pub bytes: Range<u64>,
}

/// The parts of a footer that make the schema.
#[derive(Debug, Default)]
pub(super) struct Schema {
    /// Where in the footer the list of schema elements is.
    pub elements: Range<usize>,
    /// Where the value of `ARROW:schema` is.
    pub arrow: Range<usize>,
    pub columns: u64,
}

struct Scan<'f, F> {
    data_end: u64,
    row_group: &'f mut F,
    schema: Schema,
    chunks: u64,
    rows: u64,
    said_rows: Option<i64>,
    seen_row_groups: bool,
    /// An error that is more than a contradiction in the bytes.
    refused: Option<Error>,
}

/// Walks the footer (without its last eight bytes) of a file of `size` bytes and calls `row_group`
/// with each row group.
///
/// # Errors
/// `Corrupt` with the offset in the file, `Unsupported`.
pub(super) fn scan(
    footer: &[u8],
    size: u64,
    mut row_group: impl FnMut(RowGroup) -> Result<()>,
) -> Result<Schema> {
    let start = size - TAIL_BYTES - footer.len() as u64;
    let mut scan = Scan {
        data_end: start,
        row_group: &mut row_group,
        schema: Schema::default(),
        chunks: 0,
        rows: 0,
        said_rows: None,
        seen_row_groups: false,
        refused: None,
    };
    let walked = scan.file(&mut Compact::new(footer));
    if let Some(e) = scan.refused {
        return Err(e);
    }
    walked.map_err(|bad| {
        Error::corrupt(format!(
            "the Parquet footer is damaged at offset {}: {}",
            start + bad.at as u64,
            bad.what
        ))
    })?;
    if scan.schema.columns == 0 {
        return Err(Error::corrupt(format!(
            "the schema in the Parquet footer at offset {start} does not have columns"
        )));
    }
    if !scan.seen_row_groups || scan.said_rows != i64::try_from(scan.rows).ok() {
        let (said, rows) = (scan.said_rows.unwrap_or(0), scan.rows);
        return Err(Error::corrupt(format!(
            "the Parquet footer at offset {start} contradicts itself: the file has {said} rows, \
             its row groups have {rows}"
        )));
    }
    Ok(scan.schema)
}

impl<F: FnMut(RowGroup) -> Result<()>> Scan<'_, F> {
    fn refuse(&mut self, at: &Compact<'_>, e: Error) -> Bad {
        self.refused = Some(e);
        at.bad("the reader refused it")
    }

    fn file(&mut self, c: &mut Compact<'_>) -> Result<(), Bad> {
        c.fields(fields::FILE_META_DATA, |c, id, ty| {
            match (id, ty) {
                (2, Type::List) => {
                    let start = c.at();
                    self.schema(c)?;
                    self.schema.elements = start..c.at();
                    if self.schema.columns == 0 {
                        let e = Error::unsupported("the Parquet file has no columns")
                            .hint("write it with its columns, or leave it out");
                        return Err(self.refuse(c, e));
                    }
                }
                (3, Type::I64) => self.said_rows = Some(c.int()?),
                (4, Type::List) => {
                    if self.schema.columns == 0 {
                        return Err(c.bad("row groups come before the schema"));
                    }
                    let (ty, n) = c.list()?;
                    expect(c, ty, Type::Struct)?;
                    for _ in 0..n {
                        self.row_group(c)?;
                    }
                    self.seen_row_groups = true;
                }
                (5, Type::List) => self.key_values(c)?,
                (8, Type::Struct) => {
                    let e = Error::unsupported("the Parquet file is encrypted")
                        .hint("store it without encryption");
                    return Err(self.refuse(c, e));
                }
                _ => return Ok(false),
            }
            Ok(true)
        })
    }

    /// Counts leaves, how deep they are, and how many names lead to them.
    fn schema(&mut self, c: &mut Compact<'_>) -> Result<(), Bad> {
        let (ty, n) = c.list()?;
        expect(c, ty, Type::Struct)?;
        // For each open group, the children still to come.
        let mut open: Vec<u32> = Vec::new();
        let mut names = 0u64;
        self.schema.columns = 0;
        for element in 0..n {
            let mut children = 0;
            c.fields(fields::SCHEMA_ELEMENT, |c, id, ty| match (id, ty) {
                (5, Type::I32) => {
                    children = u32::try_from(c.i32()?)
                        .map_err(|_| c.bad("a schema element has a negative number of children"))?;
                    Ok(true)
                }
                _ => Ok(false),
            })?;
            if element > 0 {
                while open.last() == Some(&0) {
                    open.pop();
                }
                *open
                    .last_mut()
                    .ok_or(c.bad("the schema has elements outside of its root"))? -= 1;
            }
            if children > 0 || element == 0 {
                open.push(children);
            } else {
                self.schema.columns += 1;
                names += open.len() as u64;
            }
            if open.len() > limits::SCHEMA_DEPTH_MAX || names > limits::SCHEMA_PATH_NAMES_MAX {
                let e = Error::unsupported(format!(
                    "the Parquet schema is nested {} deep, or has more than {} names on the \
                     paths to its columns; the limit is {}",
                    open.len(),
                    limits::SCHEMA_PATH_NAMES_MAX,
                    limits::SCHEMA_DEPTH_MAX
                ));
                return Err(self.refuse(c, e.hint("write the file with fewer or flatter columns")));
            }
        }
        if open.iter().any(|&left| left > 0) {
            return Err(c.bad("the schema has fewer elements than it says"));
        }
        Ok(())
    }

    fn row_group(&mut self, c: &mut Compact<'_>) -> Result<(), Bad> {
        let (mut rows, mut group, mut columns) = (
            None,
            Chunks {
                start: u64::MAX,
                ..Chunks::default()
            },
            0,
        );
        c.fields(fields::ROW_GROUP, |c, id, ty| {
            match (id, ty) {
                (1, Type::List) => {
                    let (ty, n) = c.list()?;
                    expect(c, ty, Type::Struct)?;
                    columns = n as u64;
                    for column in 0..n {
                        self.chunk(c, column, &mut group)?;
                    }
                }
                (3, Type::I64) => rows = u64::try_from(c.int()?).ok(),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if columns != self.schema.columns {
            return Err(c.bad("a row group does not have as many columns as the schema"));
        }
        let rows = rows.ok_or(c.bad("a row group does not say how many rows it has"))?;
        self.chunks += columns;
        self.rows = self.rows.saturating_add(rows);
        if group.stored > self.data_end {
            return Err(c.bad("the columns of a row group take more bytes than the file has"));
        }
        if group.decoded > limits::BLOCK_DECODED_MAX_BYTES {
            let e = Error::unsupported(format!(
                "a Parquet row group of {rows} rows holds {} bytes; the limit is {}",
                group.decoded,
                limits::BLOCK_DECODED_MAX_BYTES
            ));
            return Err(self.refuse(c, e.hint("write the file with smaller row groups")));
        }
        (self.row_group)(RowGroup {
            rows,
            bytes: group.start..group.end,
        })
        .map_err(|e| self.refuse(c, e))
    }

    fn chunk(&mut self, c: &mut Compact<'_>, column: usize, group: &mut Chunks) -> Result<(), Bad> {
        let mut meta = None;
        let (mut foreign, mut encrypted) = (false, false);
        c.fields(fields::COLUMN_CHUNK, |c, id, ty| {
            match (id, ty) {
                (1, Type::Binary) => foreign = !c.binary()?.is_empty(),
                (3, Type::Struct) => meta = Some(Chunk::read(c)?),
                (8 | 9, _) => {
                    encrypted = true;
                    return Ok(false);
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if foreign || encrypted {
            let what = if foreign {
                "lies in another file"
            } else {
                "is encrypted"
            };
            return Err(self.refuse(
                c,
                Error::unsupported(format!("column {column} of the Parquet file {what}")),
            ));
        }
        let Some(meta) = meta else {
            return Err(c.bad("a column does not say where it begins"));
        };
        if let Err(name) = codec_offered(meta.codec) {
            let e = Error::unsupported(format!(
                "column {column} of the Parquet file is compressed with {name}, which Forebay \
                 does not read"
            ));
            return Err(self.refuse(
                c,
                e.hint("write it with zstd, snappy, lz4 or gzip, or without compression"),
            ));
        }
        let start = meta.dictionary.unwrap_or(meta.data);
        let (Ok(start), Ok(stored), Ok(decoded)) = (
            u64::try_from(start),
            u64::try_from(meta.stored),
            u64::try_from(meta.decoded),
        ) else {
            return Err(c.bad("a column has an offset or a size below zero"));
        };
        let end = start
            .checked_add(stored)
            .filter(|&end| end <= self.data_end);
        let (Some(end), true) = (end, meta.data >= 0 && meta.values >= 0) else {
            return Err(c.bad("a column lies outside the data of the file"));
        };
        group.start = group.start.min(start);
        group.end = group.end.max(end);
        group.stored = group.stored.saturating_add(stored);
        group.decoded = group.decoded.saturating_add(decoded);
        Ok(())
    }

    fn key_values(&mut self, c: &mut Compact<'_>) -> Result<(), Bad> {
        let (ty, n) = c.list()?;
        expect(c, ty, Type::Struct)?;
        for _ in 0..n {
            let (mut is_arrow, mut value) = (false, 0..0);
            c.fields(fields::KEY_VALUE, |c, id, ty| {
                match (id, ty) {
                    (1, Type::Binary) => is_arrow = c.binary()? == b"ARROW:schema",
                    (2, Type::Binary) => {
                        let len = c.binary()?.len();
                        value = c.at() - len..c.at();
                    }
                    _ => return Ok(false),
                }
                Ok(true)
            })?;
            if is_arrow {
                self.schema.arrow = value;
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Chunks {
    start: u64,
    end: u64,
    stored: u64,
    decoded: u64,
}

#[derive(Default)]
struct Chunk {
    codec: i32,
    values: i64,
    decoded: i64,
    stored: i64,
    data: i64,
    dictionary: Option<i64>,
}

impl Chunk {
    fn read(c: &mut Compact<'_>) -> Result<Self, Bad> {
        let mut this = Self {
            codec: -1,
            values: -1,
            decoded: -1,
            stored: -1,
            data: -1,
            dictionary: None,
        };
        c.fields(fields::COLUMN_META_DATA, |c, id, ty| {
            match (id, ty) {
                (4, Type::I32) => this.codec = c.i32()?,
                (5, Type::I64) => this.values = c.int()?,
                (6, Type::I64) => this.decoded = c.int()?,
                (7, Type::I64) => this.stored = c.int()?,
                (9, Type::I64) => this.data = c.int()?,
                // To say that there is no dictionary, some writers give the offset 0, where the
                // file's magic bytes are.
                (11, Type::I64) => this.dictionary = Some(c.int()?).filter(|&at| at != 0),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(this)
    }
}

fn expect(c: &Compact<'_>, ty: Type, wanted: Type) -> Result<(), Bad> {
    if ty == wanted {
        Ok(())
    } else {
        Err(c.bad("a list does not have the type that it should have"))
    }
}

/// Uncompressed, snappy, gzip, lz4, zstd, lz4 raw.
fn codec_offered(codec: i32) -> Result<(), &'static str> {
    match codec {
        0 | 1 | 2 | 5 | 6 | 7 => Ok(()),
        3 => Err("LZO"),
        4 => Err("brotli"),
        _ => Err("a codec is not known"),
    }
}
