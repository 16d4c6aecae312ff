//! [`ObjectMeta`] as compact bytes: it is parsed for each object of a batch, where JSON would cost
//! more than the disk read.
//!
//! Layout: format (1), size (u64), last modified (i64), a bit for each optional text that is
//! present, then the texts (LEB128 length, UTF-8) in the order of the bits, then the number of user
//! pairs and the pairs.

use bytes::{Buf, BufMut};
use forebay_core::{Attributes, ObjectMeta};

const FORMAT: u8 = 1;

/// A version of an object as bytes.
pub fn encode(meta: &ObjectMeta) -> Vec<u8> {
    let a = &meta.attributes;
    let texts = [
        &meta.etag,
        &a.content_type,
        &a.content_encoding,
        &a.content_language,
        &a.content_disposition,
        &a.cache_control,
        &a.storage_class,
    ];
    let mut out = Vec::with_capacity(64);
    out.put_u8(FORMAT);
    out.put_u64_le(meta.size);
    out.put_i64_le(meta.last_modified_ms);
    out.put_u8(
        texts
            .iter()
            .enumerate()
            .fold(0, |bits, (i, t)| bits | ((t.is_some() as u8) << i)),
    );
    for text in texts.into_iter().flatten() {
        put_text(&mut out, text);
    }
    put_number(&mut out, a.user.len());
    for (name, value) in &a.user {
        put_text(&mut out, name);
        put_text(&mut out, value);
    }
    out
}

/// `None` for a format that this release does not know: a miss, not an error.
pub fn decode(mut b: &[u8]) -> Option<ObjectMeta> {
    if b.try_get_u8().ok()? != FORMAT {
        return None;
    }
    let size = b.try_get_u64_le().ok()?;
    let last_modified_ms = b.try_get_i64_le().ok()?;
    let bits = b.try_get_u8().ok()?;
    let mut text = |i: u8| -> Option<Option<String>> {
        if bits & (1 << i) == 0 {
            Some(None)
        } else {
            get_text(&mut b).map(Some)
        }
    };
    let etag = text(0)?;
    let mut attributes = Attributes {
        content_type: text(1)?,
        content_encoding: text(2)?,
        content_language: text(3)?,
        content_disposition: text(4)?,
        cache_control: text(5)?,
        storage_class: text(6)?,
        user: Vec::new(),
    };
    for _ in 0..get_number(&mut b)? {
        attributes.user.push((get_text(&mut b)?, get_text(&mut b)?));
    }
    Some(ObjectMeta {
        size,
        etag,
        last_modified_ms,
        attributes,
    })
}

fn put_number(out: &mut Vec<u8>, mut n: usize) {
    while n >= 0x80 {
        out.put_u8(n as u8 | 0x80);
        n >>= 7;
    }
    out.put_u8(n as u8);
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_number(out, text.len());
    out.put_slice(text.as_bytes());
}

fn get_number(b: &mut &[u8]) -> Option<usize> {
    let mut n = 0usize;
    for shift in (0..35).step_by(7) {
        let byte = b.try_get_u8().ok()?;
        n |= ((byte & 0x7f) as usize) << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

fn get_text(b: &mut &[u8]) -> Option<String> {
    let len = get_number(b)?;
    let (text, rest) = b.split_at_checked(len)?;
    *b = rest;
    std::str::from_utf8(text).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(size: u64, lm: i64, etag: Option<String>, ct: Option<String>, cc: Option<String>,
                                   user in prop::collection::vec((".{0,200}", ".{0,20}"), 0..4), cut in 0usize..400) {
            let meta = ObjectMeta { size, etag, last_modified_ms: lm,
                attributes: Attributes { content_type: ct, cache_control: cc, user, ..Default::default() } };
            let bytes = encode(&meta);
            prop_assert_eq!(decode(&bytes), Some(meta));
            if cut < bytes.len() {
                prop_assert_eq!(decode(&bytes[..cut]), None);
            }
        }
    }
}
