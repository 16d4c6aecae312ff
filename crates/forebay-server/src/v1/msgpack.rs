//! Listings in MessagePack, as the Python client asks for them: one-letter keys, and entries no
//! larger than necessary.

use forebay_protocol::listing::{Entry, Page};
use serde::{Serialize, Serializer};

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Packed<'a> {
    #[serde(rename = "UUID")]
    uuid: &'a str,
    continuation_token: &'a str,
    flags: u64,
    #[serde(serialize_with = "entries")]
    entries: &'a [Entry],
}

#[derive(Serialize)]
struct PackedEntry<'a> {
    #[serde(rename = "n")]
    name: &'a str,
    #[serde(rename = "s", skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(rename = "f")]
    flags: u64,
    #[serde(rename = "v", skip_serializing_if = "Option::is_none")]
    version: Option<&'a str>,
    #[serde(rename = "cs", skip_serializing_if = "Option::is_none")]
    checksum: Option<&'a str>,
}

fn entries<S: Serializer>(entries: &[Entry], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(entries.iter().map(|entry| PackedEntry {
        name: &entry.name,
        size: entry.size,
        flags: entry.flags,
        version: entry.version.as_deref(),
        checksum: entry.checksum.as_deref(),
    }))
}

/// The bytes of one page.
pub fn listing(page: &Page) -> Vec<u8> {
    let packed = Packed {
        uuid: &page.uuid,
        continuation_token: &page.continuation_token,
        flags: page.flags,
        entries: &page.entries,
    };
    rmp_serde::to_vec_named(&packed).expect("strings and numbers are written to memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_the_map_that_clients_expect() {
        let page = Page {
            uuid: "u".into(),
            continuation_token: "t".into(),
            entries: vec![Entry {
                name: "a/b".into(),
                size: Some(300),
                flags: 64,
                version: None,
                checksum: None,
            }],
            flags: 0,
        };
        let expected = [
            &[0x84, 0xa4][..],
            b"UUID",
            &[0xa1],
            b"u",
            &[0xb1],
            b"ContinuationToken",
            &[0xa1],
            b"t",
            &[0xa5],
            b"Flags",
            &[0],
            &[0xa7],
            b"Entries",
            &[0x91, 0x83, 0xa1],
            b"n",
            &[0xa3],
            b"a/b",
            &[0xa1],
            b"s",
            &[0xcd, 1, 44],
            &[0xa1],
            b"f",
            &[64],
        ]
        .concat();
        assert_eq!(listing(&page), expected);
    }
}
