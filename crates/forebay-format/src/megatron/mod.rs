//! Megatron-LM's indexed datasets: `x.bin` has tokens, `x.idx` says where each sequence is. (Also
//! sequences of tokens in other formats whose files do not say how long each is.)
//!
//! The `.idx`, little endian: `"MMIDIDX\0\0" | version u64 | type of the tokens u8 | sequences u64 |
//! documents u64`, then of each sequence how many tokens it has (i32) and where it begins in the
//! `.bin` (i64), then with which sequence each document begins, and where the last one ends (i64),
//! then possibly the mode of each sequence (i8).
//!
//! The `.bin` says nothing of its own, so lengths are kept: about two bytes for a sequence, and
//! nothing for documents of one sequence each. What is indexed is the `.bin`; the parser is fed with
//! the `.idx`, of which it holds a part at a time.

mod columns;
mod index;

pub(crate) use columns::Builder;
pub(crate) use index::Indexer;

use crate::{
    index::codec::{Reader, put},
    tabular::BlockIndex,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use forebay_core::{Error, Result};
use std::sync::Arc;

/// What an `.idx` begins with.
const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// The most that is kept of the places of one file's rows: about two bytes for each.
const PACKED_MAX_BYTES: usize = 256 << 20;
const HEAD_BYTES: usize = MAGIC.len() + 8 + 1 + 8 + 8;

/// The column of tokens.
pub(crate) const TOKENS: &str = "tokens";
/// The column with the number of the document within its file.
const DOCUMENT: &str = "document";
/// The column of modes, if the file has them.
const MODE: &str = "mode";

/// The name of the `.idx` of a `.bin`; `None` for other names.
pub fn index_name(bin: &str) -> Option<String> {
    let stem = bin.strip_suffix(".bin")?;
    (!stem.is_empty() && !stem.ends_with('/')).then(|| format!("{stem}.idx"))
}

/// What a token is, by its code in the `.idx`.
fn type_of(code: u8) -> Option<DataType> {
    Some(match code {
        1 => DataType::UInt8,
        2 => DataType::Int8,
        3 => DataType::Int16,
        4 => DataType::Int32,
        5 => DataType::Int64,
        6 => DataType::Float64,
        7 => DataType::Float32,
        8 => DataType::UInt16,
        _ => return None,
    })
}

/// The code of a type of tokens.
pub(crate) fn code_of(ty: &DataType) -> Option<u8> {
    (1..=8).find(|&code| type_of(code).as_ref() == Some(ty))
}

fn schema_of(ty: DataType, modes: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new(TOKENS, DataType::new_list(ty, true), false),
        Field::new(DOCUMENT, DataType::Int64, false),
    ];
    if modes {
        fields.push(Field::new(MODE, DataType::Int8, false));
    }
    Arc::new(Schema::new(fields))
}

/// What the `.idx` says of each sequence besides where it is.
///
/// For each sequence: twice the number of its tokens, plus one unless it is the first of the
/// document after that of the sequence before; then, in that case, how many documents further it
/// is; then its mode, if there are modes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sequences {
    /// The code of the type of the tokens.
    code: u8,
    width: u8,
    modes: bool,
    /// Which version of the `.idx` this is.
    beside: u64,
    /// What a file that is compressed as a whole unpacks to.
    unpacked: Option<u64>,
    packed: Vec<u8>,
    /// Of each piece, where its first sequence is in `packed`, and the document before it, where
    /// documents count from 1.
    pieces: Vec<(u64, u64)>,
}

/// A sequence of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    /// Of its tokens.
    pub bytes: u64,
    pub document: i64,
    pub mode: i8,
}

impl Sequences {
    pub fn new(code: u8, modes: bool, beside: u64) -> Option<Self> {
        let width = type_of(code)?.primitive_width()?;
        Some(Self {
            code,
            width: u8::try_from(width).ok()?,
            modes,
            beside,
            unpacked: None,
            packed: Vec::new(),
            pieces: Vec::new(),
        })
    }

    fn schema(&self) -> Option<SchemaRef> {
        Some(schema_of(type_of(self.code)?, self.modes))
    }

    pub fn beside(&self) -> u64 {
        self.beside
    }

    /// The bytes of a token.
    pub fn width(&self) -> u64 {
        u64::from(self.width)
    }

    pub fn unpacked(&self) -> Option<u64> {
        self.unpacked
    }

    pub fn unpacking_to(self, unpacked: Option<u64>) -> Self {
        Self { unpacked, ..self }
    }

    pub fn memory_bytes(&self) -> usize {
        self.packed.capacity() + self.pieces.capacity() * 16
    }

    /// What is added next is in the next piece, after as many documents.
    pub fn begin_piece(&mut self, before: u64) {
        self.pieces.push((self.packed.len() as u64, before));
    }

    /// Adds a sequence that is this many documents after the one before it.
    ///
    /// # Errors
    /// `Unsupported` if what is kept of all takes more than [`PACKED_MAX_BYTES`].
    pub fn push(&mut self, tokens: u32, documents: u64, mode: u8) -> Result<()> {
        if self.packed.len() >= PACKED_MAX_BYTES {
            return Err(Error::unsupported(format!(
                "what is kept of the places of rows takes more than {} MiB",
                PACKED_MAX_BYTES >> 20
            ))
            .hint("write several smaller files, or longer rows"));
        }
        let odd = documents != 1;
        put(&mut self.packed, u64::from(tokens) << 1 | u64::from(odd));
        if odd {
            put(&mut self.packed, documents);
        }
        if self.modes {
            self.packed.push(mode);
        }
        Ok(())
    }

    /// Keeps no more memory than it needs.
    pub fn shrink(&mut self) {
        self.packed.shrink_to_fit();
        self.pieces.shrink_to_fit();
    }

    /// The sequence that is described here; `document` is that of the one before, and becomes its
    /// own.
    fn next(&self, r: &mut Reader<'_>, document: &mut u64) -> Option<Sequence> {
        let first = r.number()?;
        let documents = match first & 1 {
            0 => 1,
            _ => r.number()?,
        };
        *document = document.checked_add(documents)?;
        Some(Sequence {
            bytes: (first >> 1).checked_mul(u64::from(self.width))?,
            document: i64::try_from(document.checked_sub(1)?).ok()?,
            mode: match self.modes {
                true => r.byte()? as i8,
                false => 0,
            },
        })
    }

    /// The sequences of a piece, in order.
    pub fn of_piece(&self, number: usize) -> impl Iterator<Item = Sequence> + '_ {
        let (at, mut document) = self.pieces.get(number).copied().unwrap_or_default();
        let mut r = Reader {
            bytes: self.packed.get(at as usize..).unwrap_or_default(),
        };
        std::iter::from_fn(move || self.next(&mut r, &mut document))
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.code, u8::from(self.modes)]);
        put(out, self.beside);
        put(out, self.unpacked.map_or(0, |bytes| bytes + 1));
        put(out, self.packed.len() as u64);
        out.extend_from_slice(&self.packed);
    }

    /// `blocks` are those of the `.bin`: the sequences must be theirs.
    pub fn decode(r: &mut Reader<'_>, blocks: &BlockIndex) -> Option<Self> {
        let (code, modes) = (r.byte()?, r.byte()? == 1);
        let mut this = Self::new(code, modes, r.number()?)?;
        this.unpacked = r.number()?.checked_sub(1);
        let len = usize::try_from(r.number()?).ok()?;
        this.packed = r.take(len)?.to_vec();
        let mut rest = Reader {
            bytes: &this.packed,
        };
        let (mut document, mut pieces) = (0, Vec::with_capacity(blocks.piece_count()));
        for block in 0..blocks.blocks() {
            for piece in blocks.pieces(block) {
                pieces.push(((len - rest.bytes.len()) as u64, document));
                let mut bytes = 0u64;
                for _ in piece.rows {
                    bytes = bytes.checked_add(this.next(&mut rest, &mut document)?.bytes)?;
                }
                (bytes == piece.bytes.end - piece.bytes.start).then_some(())?;
            }
        }
        rest.bytes.is_empty().then_some(())?;
        this.pieces = pieces;
        Some(this)
    }
}

fn corrupt(what: &str) -> Error {
    Error::corrupt(format!("the .idx file is damaged: {what}"))
        .hint("check that .bin and .idx are those that Megatron-LM wrote together, and whole")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beside() {
        assert_eq!(index_name("a/b.bin").as_deref(), Some("a/b.idx"));
        for other in ["a/b.idx", "a/.bin", ".bin", "bin", "a.bin/b"] {
            assert_eq!(index_name(other), None, "{other}");
        }
    }
}
