//! Rows that are made of the rows of open datasets, as clients tell nodes of them: `POST
//! /v1/datasets/compositions`.
//!
//! The body is the length of a header (`u32`, little-endian), the header (JSON, [`Header`]), and
//! the pieces that it lists, one after the other: sets of rows as [`RowSet::encode`] writes them,
//! and row numbers as little-endian `u64`.
//!
//! Lengths of rows, which batches that are bounded by length are made from, are told in the same way:
//! `POST /v1/datasets/<id>/lengths`, one little-endian `u32` for each row of the dataset or composition
//! with this id.
//!
//! A composition's [`identity`] is a function of all that, so whoever has the id has the rows: a
//! digest that nobody can make another composition for.

use bytes::{BufMut, Bytes};
use forebay_core::{Error, ErrorKind, Result, limits};
use forebay_plan::{Chosen, RowSet, RowsOf};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fmt::Write;

const LENGTH_BYTES: usize = size_of::<u32>();
const ROW_BYTES: usize = size_of::<u64>();

/// How the rows are made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The datasets, by their ids.
    pub bases: Vec<String>,
    /// Which of their rows, in which order.
    pub rows_of: RowsOf,
    /// What follows the header.
    #[serde(default)]
    pub pieces: Vec<PieceHeader>,
}

/// What a piece is, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceHeader {
    /// A set, or a list.
    pub kind: PieceKind,
    /// Its length.
    pub bytes: u64,
}

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PieceKind {
    /// An encoded [`RowSet`].
    Set,
    /// Row numbers, in any order.
    Rows,
}

impl PieceKind {
    fn name(self) -> &'static str {
        match self {
            PieceKind::Set => "set",
            PieceKind::Rows => "rows",
        }
    }
}

/// What a node answers, also about lengths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Composed {
    /// The id by which plans and streams name it.
    pub id: String,
    /// How many rows it has.
    pub rows: u64,
    /// How many blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
}

/// A composition as it was sent.
#[derive(Clone, Debug)]
pub struct Parts {
    /// How the rows are made.
    pub header: Header,
    /// What the header lists, in its order.
    pub pieces: Vec<Bytes>,
}

impl Parts {
    /// The body of a request.
    ///
    /// # Errors
    /// `TooLarge` if no node takes that much.
    pub fn body(&self) -> Result<Bytes> {
        // Lists, strings and numbers can always be written as JSON.
        let header = serde_json::to_vec(&self.header).unwrap_or_default();
        let pieces = self.pieces.iter().map(Bytes::len).sum::<usize>();
        let most = limits::COMPOSITION_MAX_BYTES;
        let short = header.len() <= limits::COMPOSITION_HEADER_MAX_BYTES;
        let Some(length) = u32::try_from(header.len()).ok().filter(|_| short) else {
            return Err(too_long(header.len()));
        };
        if LENGTH_BYTES + header.len() + pieces > most {
            return Err(too_large());
        };
        let mut body = Vec::with_capacity(LENGTH_BYTES + header.len() + pieces);
        body.put_u32_le(length);
        body.extend_from_slice(&header);
        self.pieces
            .iter()
            .for_each(|piece| body.extend_from_slice(piece));
        Ok(body.into())
    }

    /// Reads the body of a request. Pieces are not looked into.
    ///
    /// # Errors
    /// `Invalid`, saying what is wrong.
    pub fn read(body: &Bytes) -> Result<Self> {
        let wrong = |what: String| {
            Error::invalid(format!("this does not describe a composition: {what}")).hint(
                "the length of a header (u32, little-endian), the header (JSON: bases, rows_of, \
                 pieces), and the pieces",
            )
        };
        let (length, rest) = body
            .split_first_chunk::<LENGTH_BYTES>()
            .ok_or_else(|| wrong(format!("it has {} bytes", body.len())))?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > rest.len() {
            let there = rest.len();
            return Err(wrong(format!(
                "a header of {length} bytes, of which {there} are there"
            )));
        }
        if length > limits::COMPOSITION_HEADER_MAX_BYTES {
            let most = limits::COMPOSITION_HEADER_MAX_BYTES;
            return Err(wrong(format!(
                "a header of {length} bytes; the limit is {most}"
            )));
        }
        let header: Header =
            serde_json::from_slice(&rest[..length]).map_err(|e| wrong(e.to_string()))?;
        if header.bases.is_empty() || header.bases.len() > limits::COMPOSITION_BASES_MAX {
            let (n, most) = (header.bases.len(), limits::COMPOSITION_BASES_MAX);
            return Err(wrong(format!(
                "{n} datasets, where there can be 1 to {most}"
            )));
        }
        let mut pieces = Vec::with_capacity(header.pieces.len().min(1024));
        let mut at = LENGTH_BYTES + length;
        for (number, piece) in header.pieces.iter().enumerate() {
            let end = usize::try_from(piece.bytes).ok();
            let end = end.and_then(|bytes| at.checked_add(bytes));
            let end = end.filter(|end| *end <= body.len());
            let end = end.ok_or_else(|| {
                let (wanted, there) = (piece.bytes, body.len() - at);
                wrong(format!(
                    "piece {number} of {wanted} bytes, of which {there} are there"
                ))
            })?;
            pieces.push(body.slice(at..end));
            at = end;
        }
        if at < body.len() {
            return Err(wrong(format!(
                "{} bytes after the last piece",
                body.len() - at
            )));
        }
        Ok(Parts { header, pieces })
    }

    /// What the document refers to.
    ///
    /// # Errors
    /// `Invalid` for a piece that is not what the header says.
    pub fn chosen(&self) -> Result<Vec<Chosen>> {
        let pieces = self.header.pieces.iter().zip(&self.pieces).enumerate();
        let chosen = pieces.map(|(number, (header, bytes))| match header.kind {
            PieceKind::Set => RowSet::decode(bytes)
                .map(|set| Chosen::Set(set.into()))
                .map_err(|e| e.with_kind(ErrorKind::Invalid))
                .map_err(|e| e.context(format!("piece {number} of the composition"))),
            PieceKind::Rows => match bytes.as_chunks::<ROW_BYTES>() {
                (rows, []) => {
                    let rows = rows.iter().map(|row| u64::from_le_bytes(*row));
                    Ok(Chosen::picks(rows.collect::<Box<[u64]>>()))
                }
                _ => Err(Error::invalid(format!(
                    "piece {number} of the composition has {} bytes, which are not numbers of \
                     {ROW_BYTES} bytes each",
                    bytes.len()
                ))),
            },
        });
        chosen.collect()
    }

    /// The id of the composition; 32 hexadecimal digits.
    pub fn identity(&self) -> String {
        let header = &self.header;
        let digests = header.pieces.iter().zip(&self.pieces);
        let digests: Vec<_> = digests
            .map(|(piece, bytes)| digest(piece.kind, bytes))
            .collect();
        identity(&header.bases, &header.rows_of, &digests)
    }
}

/// A composition that no node takes.
pub fn too_large() -> Error {
    Error::new(
        ErrorKind::TooLarge,
        format!(
            "a composition of more than {} MiB of sets and row numbers",
            limits::COMPOSITION_MAX_BYTES >> 20
        ),
    )
    .hint(
        "choose rows by a filter, a range or a split instead of one by one, or read them without \
         a stream",
    )
}

/// A composition whose description no node takes.
fn too_long(bytes: usize) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        format!(
            "a composition of too many parts, or stages of a mix: {} KiB of them, the limit is {}",
            bytes.div_ceil(1024),
            limits::COMPOSITION_HEADER_MAX_BYTES >> 10
        ),
    )
    .hint("open many files as one dataset, give a schedule fewer stages, or read without a stream")
}

/// What tells one piece from another; 32 hexadecimal digits.
pub fn digest(kind: PieceKind, bytes: &[u8]) -> String {
    digest_of(kind.name(), bytes)
}

fn digest_of(kind: &str, bytes: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(kind);
    hash.update([0]);
    hash.update(bytes);
    hex(&hash.finalize()[..16])
}

/// The body that tells a node the lengths of all rows of a source, and the id by which streams name
/// them.
///
/// # Errors
/// `TooLarge` if no node takes that many.
pub fn lengths_body(lengths: &[u32]) -> Result<(Bytes, String)> {
    if size_of_val(lengths) > limits::COMPOSITION_MAX_BYTES {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!(
                "a stream of batches bounded by length takes the lengths of at most {} rows",
                limits::COMPOSITION_MAX_BYTES / size_of::<u32>()
            ),
        )
        .hint("leave stream=True out, or give batches a number of rows"));
    }
    let bytes: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
    let id = lengths_identity(&bytes);
    Ok((bytes.into(), id))
}

/// Reads such a body.
///
/// # Errors
/// `Invalid` if it is not made of numbers of four bytes.
pub fn read_lengths(body: &[u8]) -> Result<Vec<u32>> {
    match body.as_chunks::<{ size_of::<u32>() }>() {
        (lengths, []) => Ok(lengths.iter().map(|n| u32::from_le_bytes(*n)).collect()),
        _ => Err(Error::invalid(format!(
            "a body of {} bytes is not a list of lengths",
            body.len()
        ))
        .hint("send lengths as little-endian 32-bit integers, 4 bytes each")),
    }
}

/// The id of the lengths in such a body.
pub fn lengths_identity(body: &[u8]) -> String {
    digest_of("lengths", body)
}

/// The identity of the composition of these datasets with these pieces, by their [`digest`]s.
pub fn identity(bases: &[String], rows_of: &RowsOf, pieces: &[String]) -> String {
    // Keys of objects are sorted, because `serde_json` keeps them so.
    let what = json!(["forebay composition 2", bases, rows_of, pieces]);
    hex(&Sha256::digest(what.to_string())[..16])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Parts {
        let set = Bytes::from(RowSet::of(100, [3, 5, 99]).unwrap().encode());
        let rows: Vec<u8> = [7u64, 2].iter().flat_map(|n| n.to_le_bytes()).collect();
        let rows_of = r#"{"concat": [{"picks": {"of": {"base": 1}, "piece": 1}},
            {"range": {"start": 2, "step": -1, "count": 3, "of":
                {"set": {"of": {"base": 0}, "piece": 0}}}}]}"#;
        let header = Header {
            bases: vec!["a".repeat(32), "b".repeat(32)],
            rows_of: serde_json::from_str(rows_of).unwrap(),
            pieces: vec![
                PieceHeader {
                    kind: PieceKind::Set,
                    bytes: set.len() as u64,
                },
                PieceHeader {
                    kind: PieceKind::Rows,
                    bytes: 16,
                },
            ],
        };
        let pieces = vec![set, rows.into()];
        Parts { header, pieces }
    }

    #[test]
    fn a_composition_is_read_as_it_was_written() {
        let parts = parts();
        let body = parts.body().unwrap();
        let read = Parts::read(&body).unwrap();
        assert_eq!(read.header, parts.header);
        assert_eq!(read.pieces, parts.pieces);
        assert_eq!(read.identity(), parts.identity());
        let chosen = read.chosen().unwrap();
        assert!(matches!(&chosen[0], Chosen::Set(set) if set.iter().eq([3, 5, 99])));
        assert!(matches!(&chosen[1], Chosen::Picks(picks) if picks.rows() == [7, 2]));
    }

    #[test]
    fn identities_stay_as_they_are() {
        let of = |json: &str| serde_json::from_str::<RowsOf>(json).unwrap();
        let rows: Vec<u8> = [7u64, 2].iter().flat_map(|n| n.to_le_bytes()).collect();
        let piece = digest(PieceKind::Rows, &rows);
        let picks = of(r#"{"range": {"start": 1, "step": -1, "count": 2, "of":
            {"picks": {"of": {"base": 0}, "piece": 0}}}}"#);
        let one = identity(&["a".repeat(32)], &picks, std::slice::from_ref(&piece));
        assert_eq!(
            (piece.as_str(), one.as_str()),
            (PIECE, PICKED),
            "a state that was saved does not load any more"
        );
    }
    const PIECE: &str = "33ac75af4168934353a97300eb6d701e";
    const PICKED: &str = "befddc2ddebeb753b99d3f44acf610cd";

    #[test]
    fn lengths_are_read_as_they_were_written() {
        let (body, id) = lengths_body(&[5, 0, u32::MAX]).unwrap();
        assert_eq!(read_lengths(&body).unwrap(), [5, 0, u32::MAX]);
        assert_eq!(id, lengths_identity(&body));
        assert_ne!(id, digest(PieceKind::Rows, &body));
        assert!(read_lengths(&body[1..]).is_err());
        let many = vec![0; limits::COMPOSITION_MAX_BYTES / 4 + 1];
        assert_eq!(lengths_body(&many).unwrap_err().kind(), ErrorKind::TooLarge);
    }

    #[test]
    fn every_part_of_it_changes_the_identity() {
        let identity = parts().identity();
        let changed = |change: &dyn Fn(&mut Parts)| {
            let mut other = parts();
            change(&mut other);
            other.identity()
        };
        let others = [
            changed(&|p| p.header.bases.swap(0, 1)),
            changed(&|p| p.header.rows_of = RowsOf::Base(0)),
            changed(&|p| p.pieces.swap(0, 1)),
            changed(&|p| p.header.pieces[0].kind = PieceKind::Rows),
        ];
        assert!(others.iter().all(|other| *other != identity));
    }

    #[test]
    fn what_is_no_composition_is_refused_by_what_is_wrong() {
        let good = parts().body().unwrap();
        for length in (0..good.len()).step_by(7) {
            let e = Parts::read(&good.slice(..length)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{length}: {e}");
        }
        let more = [&good[..], &[1]].concat();
        let e = Parts::read(&more.into()).unwrap_err();
        assert!(e.message().contains("1 bytes after the last piece"), "{e}");

        let mut odd = parts();
        odd.pieces[1] = odd.pieces[1].slice(..15);
        let e = odd.chosen().unwrap_err();
        assert!(e.message().contains("piece 1") && e.kind() == ErrorKind::Invalid);
        let mut torn = parts();
        torn.pieces[0] = torn.pieces[0].slice(..5);
        let e = torn.chosen().unwrap_err();
        assert!(e.to_string().contains("piece 0") && e.kind() == ErrorKind::Invalid);

        let mut empty = parts();
        empty.header.bases.clear();
        let e = Parts::read(&empty.body().unwrap()).unwrap_err();
        assert!(e.message().contains("0 datasets"), "{e}");

        let mut huge = parts();
        huge.pieces[1] = vec![0; limits::COMPOSITION_MAX_BYTES].into();
        assert_eq!(huge.body().unwrap_err().kind(), ErrorKind::TooLarge);
    }
}
