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
use forebay_core::{Error, ErrorKind, Result, limits, name::shorten};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer,
    },
};
use std::{fmt, sync::Arc};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

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
/// `Internal` if the last column does not hold row numbers.
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

/// 128 bits of a hash of a key and its type, by the seed of an index.
pub type KeyHash = u128;

/// Hashes keys for one index. Its seed is random, so that nobody can choose keys that collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hasher {
    seed: u64,
    /// Those of the types. They have nothing to do with each other: seeds that are close differ in a
    /// few bits of a short key.
    text: u64,
    bytes: u64,
    int: u64,
}

impl Hasher {
    /// With this seed.
    pub fn new(seed: u64) -> Self {
        let of = |kind: &str| xxh3_64_with_seed(kind.as_bytes(), seed);
        Self {
            seed,
            text: of("text"),
            bytes: of("bytes"),
            int: of("int"),
        }
    }

    /// The seed.
    pub fn seed(self) -> u64 {
        self.seed
    }

    /// Of a text.
    pub fn text(self, key: &str) -> KeyHash {
        xxh3_128_with_seed(key.as_bytes(), self.text)
    }

    /// Of bytes.
    pub fn bytes(self, key: &[u8]) -> KeyHash {
        xxh3_128_with_seed(key, self.bytes)
    }

    /// Of a whole number, whatever the width of its column.
    pub fn int(self, key: i128) -> KeyHash {
        xxh3_128_with_seed(&key.to_le_bytes(), self.int)
    }
}

/// The keys of a request, as hashes.
///
/// # Errors
/// `Invalid` with what the parser could not read as a key; `TooLarge` for more than [`limits::KEYS_MAX`].
pub fn read(json: &[u8], hasher: Hasher) -> Result<Vec<KeyHash>> {
    let mut from = serde_json::Deserializer::from_slice(json);
    List(hasher)
        .deserialize(&mut from)
        .and_then(|keys| from.end().map(|()| keys))
        .map_err(|e| {
            let e = e.to_string();
            if e.starts_with(TOO_MANY) {
                return Error::new(
                    ErrorKind::TooLarge,
                    format!("more than {} keys in one request", limits::KEYS_MAX),
                )
                .hint("ask for them in several requests");
            }
            Error::invalid(format!("the body is not a list of keys: {}", shorten(&e)))
                .hint(r#"["a text", 17, {"bytes": "base64"}]"#)
        })
}

const TOO_MANY: &str = "too many keys";

/// Reads a list of keys.
struct List(Hasher);

impl<'de> DeserializeSeed<'de> for List {
    type Value = Vec<KeyHash>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        from: D,
    ) -> std::result::Result<Vec<KeyHash>, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List {
    type Value = Vec<KeyHash>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of keys")
    }

    fn visit_seq<A: SeqAccess<'de>>(
        self,
        mut list: A,
    ) -> std::result::Result<Vec<KeyHash>, A::Error> {
        let mut keys = Vec::new();
        while let Some(key) = list.next_element_seed(Key(self.0))? {
            if keys.len() == limits::KEYS_MAX {
                return Err(A::Error::custom(TOO_MANY));
            }
            keys.push(key);
        }
        Ok(keys)
    }
}

/// Reads a key.
struct Key(Hasher);

impl<'de> DeserializeSeed<'de> for Key {
    type Value = KeyHash;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<KeyHash, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = KeyHash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key: a text, a whole number, or {\"bytes\": \"base64\"}")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> std::result::Result<KeyHash, E> {
        Ok(self.0.text(key))
    }

    fn visit_i64<E: serde::de::Error>(self, key: i64) -> std::result::Result<KeyHash, E> {
        Ok(self.0.int(key.into()))
    }

    fn visit_u64<E: serde::de::Error>(self, key: u64) -> std::result::Result<KeyHash, E> {
        Ok(self.0.int(key.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<KeyHash, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Bytes {
            bytes: String,
        }
        let Bytes { bytes } = Bytes::deserialize(MapAccessDeserializer::new(map))?;
        let bytes = BASE64.decode(bytes).map_err(A::Error::custom)?;
        Ok(self.0.bytes(&bytes))
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
        let hasher = Hasher::new(7);
        let json = r#"["17", 17, {"bytes": "MTc="}, -1, 18446744073709551615, "17"]"#;
        let expected = [
            hasher.text("17"),
            hasher.int(17),
            hasher.bytes(b"17"),
            hasher.int(-1),
            hasher.int(u64::MAX.into()),
            hasher.text("17"),
        ];
        assert_eq!(read(json.as_bytes(), hasher).unwrap(), expected);
        let each: std::collections::HashSet<KeyHash> = expected.into();
        assert_eq!(each.len(), 5);
        assert_eq!(read(b"[]", hasher).unwrap(), []);
        let other = read(json.as_bytes(), Hasher::new(8)).unwrap();
        assert!(other.iter().zip(expected).all(|(a, b)| *a != b));
    }

    #[test]
    fn no_bytes_are_taken_for_a_text_that_is_close_to_them() {
        for seed in 0..500u64 {
            let hasher = Hasher::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            for key in ["0017", "000017", "00000017", "0000000000000017"] {
                let text = hasher.text(key);
                for first in [0, 1, 3, 7] {
                    for last in [0, 1, 3, 7, 15] {
                        let mut near = key.as_bytes().to_vec();
                        near[0] ^= first;
                        *near.last_mut().unwrap() ^= last;
                        assert_ne!(hasher.bytes(&near), text, "{seed} {key} {near:?}");
                    }
                }
            }
        }
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
    fn a_malformed_key_is_named() {
        for (text, says) in [
            ("{}", "a list of keys"),
            ("[1.5]", "floating point"),
            ("[null]", "a key: a text"),
            ("[[1]]", "a key: a text"),
            (r#"[{"text": "a"}]"#, "unknown field"),
            (r#"[{"bytes": "?"}]"#, "line 1"),
            ("[1", "EOF"),
            ("[1] 2", "trailing"),
        ] {
            let e = read(text.as_bytes(), Hasher::new(0)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{text}");
            assert!(e.describe().contains(says), "{text}: {}", e.describe());
        }
        let many = format!("[{}1]", "1,".repeat(limits::KEYS_MAX));
        let e = read(many.as_bytes(), Hasher::new(0)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::TooLarge);
        let long = format!(r#"[{{"{}": 1}}]"#, "a".repeat(100_000));
        let e = read(long.as_bytes(), Hasher::new(0)).unwrap_err();
        assert!(e.describe().len() < 2000, "{}", e.describe().len());
    }
}
