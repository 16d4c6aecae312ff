//! Many entries of a cache in one answer, one after the other, little endian:
//!
//! ```text
//!  0  kind u8            4  meta bytes u32     12  age, seconds u32     20  version u64
//!  1  zero u8            8  data bytes u32     16  chunk u32
//!  2  name bytes u16    28  name (bucket NUL key), meta (JSON), data
//! ```
//!
//! Nothing is looked at before its length is known to be there.

use bytes::{Buf, BufMut, Bytes};
use forebay_core::{Error, ObjectMeta, ObjectName, Result, VersionId, limits::CHUNK_BYTES};
use forebay_store::{Held, HeldAs};
use std::sync::Arc;

const HEADER_BYTES: usize = 28;
const HEAD: u8 = 1;
/// A head with the bytes of the object.
const SMALL: u8 = 2;
const CHUNK: u8 = 3;
/// The version must be validated before it is used.
const AGE_UNKNOWN: u32 = u32::MAX;

pub(crate) fn pack(entries: &[Held], now_secs: u32) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    for entry in entries {
        let (bucket, key) = (entry.name.bucket(), entry.name.key());
        let (kind, meta, data, age, index) = match &entry.what {
            HeldAs::Head {
                meta,
                validated_at_secs,
                data,
            } => {
                let json = serde_json::to_vec(&**meta).map_err(|e| {
                    Error::internal(format!("{}: attributes that are no JSON: {e}", entry.name))
                })?;
                let age = match validated_at_secs {
                    0 => AGE_UNKNOWN,
                    at => now_secs.saturating_sub(*at).min(AGE_UNKNOWN - 1),
                };
                let kind = if data.is_some() { SMALL } else { HEAD };
                (kind, json, data.clone().unwrap_or_default(), age, 0)
            }
            HeldAs::Chunk { index, data } => (CHUNK, Vec::new(), data.clone(), 0, *index),
        };
        out.put_u8(kind);
        out.put_u8(0);
        // Names, attributes and chunks have limits far below these numbers'.
        out.put_u16_le((bucket.len() + 1 + key.len()) as u16);
        out.put_u32_le(meta.len() as u32);
        out.put_u32_le(data.len() as u32);
        out.put_u32_le(age);
        out.put_u32_le(index);
        out.put_u64_le(entry.version.0);
        out.put_slice(bucket.as_bytes());
        out.put_u8(0);
        out.put_slice(key.as_bytes());
        out.put_slice(&meta);
        out.put_slice(&data);
    }
    Ok(out)
}

/// The entries of an answer. Their ages count from `now_secs`.
///
/// # Errors
/// `Corrupt` if they are not what was announced.
pub(crate) fn unpack(mut packed: Bytes, now_secs: u32) -> Result<Vec<Held>> {
    let mut entries = Vec::new();
    while !packed.is_empty() {
        let entry = take(&mut packed, now_secs);
        entries.push(entry.ok_or_else(|| {
            Error::corrupt(format!(
                "entry {} of those that a node handed over is none",
                entries.len()
            ))
            .hint("do all nodes of the cluster run releases that understand each other?")
        })?);
    }
    Ok(entries)
}

fn take(packed: &mut Bytes, now_secs: u32) -> Option<Held> {
    if packed.len() < HEADER_BYTES {
        return None;
    }
    let kind = packed.get_u8();
    let is_zero = packed.get_u8() == 0;
    let name_bytes = usize::from(packed.get_u16_le());
    let (meta_bytes, data_bytes) = (packed.get_u32_le() as usize, packed.get_u32_le() as usize);
    let (age, index) = (packed.get_u32_le(), packed.get_u32_le());
    let version = VersionId(packed.get_u64_le());
    let all = name_bytes
        .checked_add(meta_bytes)?
        .checked_add(data_bytes)?;
    if !is_zero || all > packed.len() || data_bytes as u64 > CHUNK_BYTES {
        return None;
    }
    let name = packed.split_to(name_bytes);
    let at = name.iter().position(|byte| *byte == 0)?;
    let (bucket, key) = (&name[..at], &name[at + 1..]);
    let name = ObjectName::new(str::from_utf8(bucket).ok()?, str::from_utf8(key).ok()?).ok()?;
    let (meta, data) = (packed.split_to(meta_bytes), packed.split_to(data_bytes));
    let what = match kind {
        HEAD | SMALL => {
            let meta: ObjectMeta = serde_json::from_slice(&meta).ok()?;
            let is_whole = match kind {
                SMALL => data.len() as u64 == meta.size,
                _ => data.is_empty(),
            };
            if meta.version() != version || !is_whole {
                return None;
            }
            HeldAs::Head {
                meta: Arc::new(meta),
                validated_at_secs: match age {
                    AGE_UNKNOWN => 0,
                    age => now_secs.saturating_sub(age),
                },
                data: (kind == SMALL).then_some(data),
            }
        }
        CHUNK if meta.is_empty() && !data.is_empty() => HeldAs::Chunk { index, data },
        _ => return None,
    };
    Some(Held {
        name,
        version,
        what,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::Attributes;

    fn entries() -> Vec<Held> {
        let meta = |size| ObjectMeta {
            size,
            etag: Some("\"e\"".into()),
            last_modified_ms: -5,
            attributes: Attributes::default(),
        };
        let head = |key: &str, at, data: Option<&'static [u8]>| {
            let meta = meta(data.map_or(1 << 30, <[u8]>::len) as u64);
            Held {
                name: ObjectName::new("bucket", key).unwrap(),
                version: meta.version(),
                what: HeldAs::Head {
                    meta: Arc::new(meta),
                    validated_at_secs: at,
                    data: data.map(Bytes::from_static),
                },
            }
        };
        let large = head("large", 50, None);
        let chunk = Held {
            what: HeldAs::Chunk {
                index: 70_000,
                data: Bytes::from_static(b"chunk"),
            },
            ..large.clone()
        };
        vec![
            head("small ключ", 0, Some(b"bytes")),
            head("empty", 99, Some(b"")),
            large,
            chunk,
        ]
    }

    #[test]
    fn entries_arrive_as_they_were_and_no_younger() {
        let packed = Bytes::from(pack(&entries(), 100).unwrap());
        assert_eq!(unpack(packed.clone(), 100).unwrap(), entries());
        // The other clock is five seconds ahead.
        let later = unpack(packed, 105).unwrap();
        let at = |entry: &Held| match &entry.what {
            HeldAs::Head {
                validated_at_secs, ..
            } => *validated_at_secs,
            HeldAs::Chunk { .. } => 0,
        };
        assert_eq!(later.iter().map(at).collect::<Vec<_>>(), [0, 104, 55, 0]);
        assert!(unpack(Bytes::new(), 0).unwrap().is_empty());
    }

    #[test]
    fn what_is_cut_or_too_long_is_refused_and_nothing_panics() {
        let packed = pack(&entries(), 100).unwrap();
        let mut whole = 0;
        for cut in 1..packed.len() {
            let cut = Bytes::copy_from_slice(&packed[..cut]);
            whole += usize::from(unpack(cut, 100).is_ok());
        }
        assert_eq!(whole, entries().len() - 1, "between two entries");
        for at in 0..packed.len() {
            for wrong in [0, 1, 0x7f, 0xff] {
                let mut packed = packed.clone();
                packed[at] = wrong;
                let _ = unpack(packed.into(), 100);
            }
        }
    }
}
