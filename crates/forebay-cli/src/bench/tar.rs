//! The tar of a batch, walked while it is received: header by header, without holding any of it.
//!
//! [`Walker::feed`] takes the bytes in whatever pieces they come, and tells a [`Visit`] of each
//! entry, its data and its end. It knows what the node writes: ustar headers, names and sizes in
//! PAX records where a header has no room. Invariant: [`Walker::finish`] succeeds only after the
//! two empty blocks that end an archive, so one that was cut is an error wherever it was cut.

use forebay_core::{Error, ErrorKind, Result};

const BLOCK: usize = 512;
/// PAX records are names and numbers; more than this is no header of ours.
const EXTENSION_MAX_BYTES: u64 = 64 << 10;

/// Who is told of the entries.
pub trait Visit {
    fn entry(&mut self, name: &[u8], size: u64) -> Result<()>;
    fn data(&mut self, bytes: &[u8]);
    /// The entry's last byte has come.
    fn done(&mut self) -> Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    /// In a header block.
    Header,
    /// In the data of an entry.
    Data,
    /// In the records of a PAX header.
    Extension,
    /// In the zeros after either.
    Padding,
    /// After one empty block.
    FirstEmpty,
    End,
}

pub struct Walker {
    at: At,
    block: [u8; BLOCK],
    /// Bytes of `block` that are filled, if a header came in pieces.
    have: usize,
    /// Bytes of data or padding still to come.
    left: u64,
    padding: u64,
    extension: Vec<u8>,
    long_name: Option<Vec<u8>>,
    long_size: Option<u64>,
}

impl Default for Walker {
    fn default() -> Self {
        Self {
            at: At::Header,
            block: [0; BLOCK],
            have: 0,
            left: 0,
            padding: 0,
            extension: Vec::new(),
            long_name: None,
            long_size: None,
        }
    }
}

impl Walker {
    pub fn feed(&mut self, mut bytes: &[u8], to: &mut impl Visit) -> Result<()> {
        while !bytes.is_empty() {
            match self.at {
                At::Header | At::FirstEmpty => {
                    if self.have == 0 && bytes.len() >= BLOCK {
                        let (block, rest) = bytes.split_at(BLOCK);
                        bytes = rest;
                        self.header(block, to)?;
                        continue;
                    }
                    let n = bytes.len().min(BLOCK - self.have);
                    self.block[self.have..self.have + n].copy_from_slice(&bytes[..n]);
                    self.have += n;
                    bytes = &bytes[n..];
                    if self.have == BLOCK {
                        self.have = 0;
                        let block = self.block;
                        self.header(&block, to)?;
                    }
                }
                At::Data => {
                    let (piece, rest) =
                        bytes.split_at((bytes.len() as u64).min(self.left) as usize);
                    bytes = rest;
                    self.left -= piece.len() as u64;
                    to.data(piece);
                    if self.left == 0 {
                        to.done()?;
                        self.pad();
                    }
                }
                At::Extension => {
                    let (piece, rest) =
                        bytes.split_at((bytes.len() as u64).min(self.left) as usize);
                    bytes = rest;
                    self.left -= piece.len() as u64;
                    self.extension.extend_from_slice(piece);
                    if self.left == 0 {
                        self.records()?;
                        self.pad();
                    }
                }
                At::Padding => {
                    let n = (bytes.len() as u64).min(self.left);
                    bytes = &bytes[n as usize..];
                    self.left -= n;
                    if self.left == 0 {
                        self.at = At::Header;
                    }
                }
                At::End => return Err(bad("bytes after its end")),
            }
        }
        Ok(())
    }

    /// The archive's bytes are over: were they all there?
    pub fn finish(&self) -> Result<()> {
        match self.at {
            At::End => Ok(()),
            at => Err(bad(&format!("no end: it was cut ({at:?})"))),
        }
    }

    fn pad(&mut self) {
        self.left = self.padding;
        self.at = if self.left == 0 {
            At::Header
        } else {
            At::Padding
        };
    }

    fn header(&mut self, block: &[u8], to: &mut impl Visit) -> Result<()> {
        if block[0] == 0 {
            if block.iter().any(|b| *b != 0) {
                return Err(bad("a header without a name"));
            }
            self.at = if self.at == At::FirstEmpty {
                At::End
            } else {
                At::FirstEmpty
            };
            return Ok(());
        }
        if self.at == At::FirstEmpty {
            return Err(bad("an entry after an empty block"));
        }
        // The sum counts its own eight bytes as spaces.
        let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
        let own: u32 = block[148..156].iter().map(|b| u32::from(*b)).sum();
        if u64::from(sum - own + 8 * u32::from(b' ')) != octal(&block[148..156])? {
            return Err(bad("a header whose checksum is wrong"));
        }
        let size = octal(&block[124..136])?;
        match block[156] {
            b'x' => {
                if size == 0 || size > EXTENSION_MAX_BYTES {
                    return Err(bad("a PAX header of an odd size"));
                }
                self.extension.clear();
                self.begin(At::Extension, size);
            }
            b'0' | 0 => {
                let size = self.long_size.take().unwrap_or(size);
                match self.long_name.take() {
                    Some(name) => to.entry(&name, size)?,
                    None if block[345] == 0 => to.entry(text(&block[..100]), size)?,
                    None => to.entry(
                        &[text(&block[345..500]), b"/", text(&block[..100])].concat(),
                        size,
                    )?,
                }
                self.begin(At::Data, size);
                if size == 0 {
                    to.done()?;
                    self.at = At::Header;
                }
            }
            other => return Err(bad(&format!("an entry of type {:?}", char::from(other)))),
        }
        Ok(())
    }

    fn begin(&mut self, at: At, size: u64) {
        (self.at, self.left, self.padding) = (at, size, size.wrapping_neg() % BLOCK as u64);
    }

    /// `LENGTH KEYWORD=VALUE\n`, again and again.
    fn records(&mut self) -> Result<()> {
        let mut rest = &self.extension[..];
        while !rest.is_empty() {
            let record = || -> Option<(&[u8], &[u8], &[u8])> {
                let space = rest.iter().position(|b| *b == b' ')?;
                let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
                let (record, after) = rest.split_at_checked(length)?;
                let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
                let equals = record.iter().position(|b| *b == b'=')?;
                Some((&record[..equals], &record[equals + 1..], after))
            };
            let (keyword, value, after) =
                record().ok_or_else(|| bad("a PAX record that cannot be read"))?;
            match keyword {
                b"path" => self.long_name = Some(value.to_vec()),
                b"size" => {
                    self.long_size = Some(
                        std::str::from_utf8(value)
                            .ok()
                            .and_then(|v| v.parse().ok())
                            .ok_or_else(|| bad("a PAX size that is no number"))?,
                    )
                }
                _ => {}
            }
            rest = after;
        }
        Ok(())
    }
}

fn text(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|b| *b == 0).unwrap_or(field.len())]
}

fn octal(field: &[u8]) -> Result<u64> {
    let digits = field
        .iter()
        .skip_while(|b| **b == b' ')
        .take_while(|b| !matches!(**b, 0 | b' '));
    digits.copied().try_fold(0, |n: u64, b| match b {
        b'0'..=b'7' => Ok(n * 8 + u64::from(b - b'0')),
        _ => Err(bad("a number that is not octal")),
    })
}

fn bad(what: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("the tar that was received has {what}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_format::{tar_header_into, tar_padding_into, tar_trailer_into};

    #[derive(Default, PartialEq, Debug)]
    struct Seen(Vec<(String, u64, Vec<u8>)>, usize);

    impl Visit for Seen {
        fn entry(&mut self, name: &[u8], size: u64) -> Result<()> {
            self.0
                .push((String::from_utf8(name.to_vec()).unwrap(), size, Vec::new()));
            Ok(())
        }
        fn data(&mut self, bytes: &[u8]) {
            self.0.last_mut().unwrap().2.extend_from_slice(bytes);
        }
        fn done(&mut self) -> Result<()> {
            self.1 += 1;
            Ok(())
        }
    }

    fn archive() -> (Vec<(String, u64, Vec<u8>)>, Vec<u8>) {
        let mut tar = Vec::new();
        let mut entries = Vec::new();
        let long = format!("b/{}/x.jpg", "deep/".repeat(40));
        let endless = format!("b/{}", "x".repeat(300));
        for (name, size) in [
            ("b/a", 0usize),
            ("b/one", 1),
            (&long, 512),
            ("b/two.bin", 1000),
            (&endless, 5),
            ("b/last", 513),
        ] {
            let data: Vec<u8> = (0..size).map(|i| i as u8).collect();
            tar_header_into(&mut tar, name, size as u64, 0).unwrap();
            tar.extend_from_slice(&data);
            tar_padding_into(&mut tar, size as u64);
            entries.push((name.to_owned(), size as u64, data));
        }
        tar_trailer_into(&mut tar);
        (entries, tar)
    }

    #[test]
    fn entries_come_as_they_were_written_however_the_bytes_are_cut_up() {
        let (entries, tar) = archive();
        for step in [1, 7, 511, 512, 513, 100_000] {
            let (mut walker, mut seen) = (Walker::default(), Seen::default());
            for piece in tar.chunks(step) {
                walker.feed(piece, &mut seen).unwrap();
            }
            walker.finish().unwrap();
            assert_eq!(seen.1, entries.len());
            assert_eq!(seen.0, entries, "pieces of {step}");
        }
    }

    #[test]
    fn an_archive_that_is_cut_anywhere_is_an_error() {
        let (_, tar) = archive();
        for end in 0..tar.len() {
            let mut walker = Walker::default();
            walker.feed(&tar[..end], &mut Seen::default()).unwrap();
            assert!(walker.finish().is_err(), "cut after {end} bytes");
        }
    }

    #[test]
    fn a_damaged_header_is_an_error() {
        let (_, tar) = archive();
        for at in [0, 100, 130, 150, 156, 300] {
            let mut damaged = tar.clone();
            damaged[at] ^= 0x41;
            assert!(
                Walker::default()
                    .feed(&damaged, &mut Seen::default())
                    .is_err(),
                "byte {at}"
            );
        }
        let mut more = tar;
        more.push(0);
        assert!(Walker::default().feed(&more, &mut Seen::default()).is_err());
    }
}
