//! Listings in MessagePack, as the Python client asks for them: one-letter keys, and no entry
//! larger than it must be.

use super::buckets::{Entry, Listing};
use rmp::encode;

/// The bytes of one page.
pub fn listing(page: &Listing) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + page.entries.len() * 48);
    // Writing into a Vec cannot fail.
    let result: Result<(), encode::ValueWriteError<std::convert::Infallible>> =
        write(&mut out, page);
    result.expect("memory takes what is written");
    out
}

/// `rmp`'s writers are generic over the error of what they write to; a `Vec` has none.
fn write(
    out: &mut Vec<u8>,
    page: &Listing,
) -> Result<(), encode::ValueWriteError<std::convert::Infallible>> {
    let mut buffer = encode::ByteBuf::from_vec(std::mem::take(out));
    let b = &mut buffer;
    encode::write_map_len(b, 4)?;
    encode::write_str(b, "UUID")?;
    encode::write_str(b, &page.uuid)?;
    encode::write_str(b, "ContinuationToken")?;
    encode::write_str(b, &page.token)?;
    encode::write_str(b, "Flags")?;
    encode::write_uint(b, 0)?;
    encode::write_str(b, "Entries")?;
    encode::write_array_len(b, page.entries.len() as u32)?;
    for entry in &page.entries {
        write_entry(b, entry)?;
    }
    *out = buffer.into_vec();
    Ok(())
}

fn write_entry(
    b: &mut encode::ByteBuf,
    entry: &Entry,
) -> Result<(), encode::ValueWriteError<std::convert::Infallible>> {
    let texts = [("v", &entry.version), ("cs", &entry.checksum)];
    let present = texts.iter().filter(|(_, text)| text.is_some()).count() as u32;
    encode::write_map_len(b, 2 + u32::from(entry.size.is_some()) + present)?;
    encode::write_str(b, "n")?;
    encode::write_str(b, &entry.name)?;
    if let Some(size) = entry.size {
        encode::write_str(b, "s")?;
        encode::write_uint(b, size)?;
    }
    encode::write_str(b, "f")?;
    encode::write_uint(b, u64::from(entry.flags))?;
    for (key, text) in texts {
        if let Some(text) = text {
            encode::write_str(b, key)?;
            encode::write_str(b, text)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_the_map_that_clients_expect() {
        let page = Listing {
            uuid: "u".into(),
            token: "t".into(),
            entries: vec![Entry {
                name: "a/b".into(),
                size: Some(300),
                flags: 64,
                version: None,
                checksum: None,
            }],
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
