//! Keys: which rows have them, as a client asks and a node answers.
//!
//! The body of a request is a JSON list. Texts and whole numbers stand as they are, bytes as an object:
//!
//! ```json
//! ["000017", 17, {"bytes": "AAH/"}]
//! ```

use crate::ErrorDocument;
use arrow_array::{RecordBatch, UInt64Array, cast::AsArray, types::UInt64Type};
use arrow_schema::{DataType, Field, Schema};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use forebay_core::{Error, ErrorKind, Result, limits};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, SeqAccess, Visitor},
};
use std::{fmt, sync::Arc};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The last column of rows that were asked for by their keys: their numbers.
pub const NUMBERS_COLUMN: &str = "__row__";

/// The same rows, with such a column.
///
/// # Errors
/// `Internal` if there are not as many numbers as rows.
pub fn with_numbers(batch: &RecordBatch, numbers: Vec<u64>) -> Result<RecordBatch> {
    let mut fields = batch.schema().fields().to_vec();
    fields.push(Arc::new(Field::new(
        NUMBERS_COLUMN,
        DataType::UInt64,
        false,
    )));
    let mut columns = batch.columns().to_vec();
    columns.push(Arc::new(UInt64Array::from(numbers)));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
        .map_err(|e| Error::internal("rows could not be numbered").caused_by(e))
}

/// The rows without that column, and their numbers.
///
/// # Errors
/// `Internal` if there is no such column.
pub fn split_numbers(batch: &RecordBatch) -> Result<(RecordBatch, Vec<u64>)> {
    let none = || Error::internal("the rows came without their numbers");
    let last = batch.num_columns().checked_sub(1).ok_or_else(none)?;
    let numbers = batch.column(last).as_primitive_opt::<UInt64Type>();
    let numbers = numbers
        .filter(|_| batch.schema().field(last).name() == NUMBERS_COLUMN)
        .ok_or_else(none)?;
    let columns: Vec<usize> = (0..last).collect();
    let rows = batch.project(&columns);
    let rows = rows.map_err(|e| Error::internal("rows cannot be told apart").caused_by(e))?;
    Ok((rows, numbers.values().to_vec()))
}

/// 128 bits of a hash of a key and its type.
pub type KeyHash = u128;

/// Of a text.
pub fn hash_text(key: &str) -> KeyHash {
    xxh3_128_with_seed(key.as_bytes(), 1)
}

/// Of bytes.
pub fn hash_bytes(key: &[u8]) -> KeyHash {
    xxh3_128_with_seed(key, 2)
}

/// Of a whole number, whatever the width of its column.
pub fn hash_int(key: i128) -> KeyHash {
    xxh3_128_with_seed(&key.to_le_bytes(), 3)
}

/// The keys of a request, as hashes.
///
/// # Errors
/// `Invalid` with the key that is none; `TooLarge` for more than [`limits::KEYS_MAX`].
pub fn read(json: &[u8]) -> Result<Vec<KeyHash>> {
    serde_json::from_slice::<List>(json)
        .map(|list| list.0)
        .map_err(|e| {
            if e.to_string().starts_with(TOO_MANY) {
                return Error::new(
                    ErrorKind::TooLarge,
                    format!("more than {} keys in one request", limits::KEYS_MAX),
                )
                .hint("ask for them in several requests");
            }
            Error::invalid(format!("the body is no list of keys: {e}"))
                .hint(r#"["a text", 17, {"bytes": "base64"}]"#)
        })
}

const TOO_MANY: &str = "too many keys";

struct List(Vec<KeyHash>);

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = List;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of keys")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> std::result::Result<List, A::Error> {
                let mut keys = Vec::new();
                while let Some(Key(hash)) = list.next_element()? {
                    if keys.len() == limits::KEYS_MAX {
                        return Err(A::Error::custom(TOO_MANY));
                    }
                    keys.push(hash);
                }
                Ok(List(keys))
            }
        }
        from.deserialize_seq(Keys)
    }
}

struct Key(KeyHash);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key: a text, a whole number, or {\"bytes\": \"base64\"}")
            }

            fn visit_str<E: serde::de::Error>(self, key: &str) -> std::result::Result<Key, E> {
                Ok(Key(hash_text(key)))
            }

            fn visit_i64<E: serde::de::Error>(self, key: i64) -> std::result::Result<Key, E> {
                Ok(Key(hash_int(key.into())))
            }

            fn visit_u64<E: serde::de::Error>(self, key: u64) -> std::result::Result<Key, E> {
                Ok(Key(hash_int(key.into())))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                map: A,
            ) -> std::result::Result<Key, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Bytes {
                    bytes: String,
                }
                let of = serde::de::value::MapAccessDeserializer::new(map);
                let Bytes { bytes } = Bytes::deserialize(of)?;
                let bytes = BASE64.decode(bytes).map_err(A::Error::custom)?;
                Ok(Key(hash_bytes(&bytes)))
            }
        }
        from.deserialize_any(One)
    }
}

/// An index of a column of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Indexed {
    /// Rows that have a key.
    pub rows: u64,
    /// Of how many.
    pub of: u64,
    /// What the index takes in memory.
    pub bytes: u64,
    /// Whether it was there before.
    pub kept: bool,
}

/// How far an index is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeysProgress {
    /// Rows whose keys were read.
    pub done: u64,
    /// Of how many.
    pub of: u64,
}

/// One line of `POST /v1/datasets/<id>/keys?column=…&progress=true`. The last one is `Indexed` or
/// `Error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum KeysEvent {
    /// The progress; sent now and then.
    Progress(KeysProgress),
    /// It is there.
    Indexed(Indexed),
    /// It failed. The head of the answer was already sent, so the status is in the line.
    Error(Box<ErrorDocument>),
    /// An event of a later release.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_apart_by_type() {
        let found =
            read(r#"["17", 17, {"bytes": "MTc="}, -1, 18446744073709551615, "17"]"#.as_bytes());
        let expected = [
            hash_text("17"),
            hash_int(17),
            hash_bytes(b"17"),
            hash_int(-1),
            hash_int(u64::MAX.into()),
            hash_text("17"),
        ];
        assert_eq!(found.unwrap(), expected);
        let each: std::collections::HashSet<KeyHash> = expected.into();
        assert_eq!(each.len(), 5);
        assert_eq!(read(b"[]").unwrap(), []);
    }

    #[test]
    fn rows_and_their_numbers_travel_together() {
        let rows = UInt64Array::from(vec![7, 8]);
        let rows = RecordBatch::try_from_iter([("a", Arc::new(rows) as _)]).unwrap();
        let both = with_numbers(&rows, vec![3, u64::MAX]).unwrap();
        assert_eq!(
            split_numbers(&both).unwrap(),
            (rows.clone(), vec![3, u64::MAX])
        );
        assert!(with_numbers(&rows, vec![3]).is_err() && split_numbers(&rows).is_err());
    }

    #[test]
    fn what_is_no_key_is_named() {
        for (text, says) in [
            ("{}", "a list of keys"),
            ("[1.5]", "floating point"),
            ("[null]", "a key: a text"),
            ("[[1]]", "a key: a text"),
            (r#"[{"text": "a"}]"#, "unknown field"),
            (r#"[{"bytes": "?"}]"#, "line 1"),
            ("[1", "EOF"),
        ] {
            let e = read(text.as_bytes()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{text}");
            assert!(e.describe().contains(says), "{text}: {}", e.describe());
        }
        let many = format!("[{}1]", "1,".repeat(limits::KEYS_MAX));
        assert_eq!(
            read(many.as_bytes()).unwrap_err().kind(),
            ErrorKind::TooLarge
        );
    }
}
