//! The archive that a batch comes in: a tar, read while it arrives.
//!
//! This reads what a node writes: ustar headers, and PAX records for names, sizes and reasons that
//! do not fit in them. A missing entry is a placeholder of size 0 whose name begins with
//! `__404__/`; the PAX record `FOREBAY.error` before it says why it is missing. (The parser of
//! `forebay-format` finds members of any tar that people make, but brings the parsers of other
//! formats along.)
//!
//! - [`read_header`] and [`read_extended`] work on bytes wherever they are, for callers that keep
//!   the archive as it came.
//! - [`Cutter`] finds where entries end in pieces that are passed on.
//! - [`Walker`] takes the pieces as they arrive and keeps none of them: it calls a [`Visit`] for
//!   each entry, its bytes and its end.
//!
//! Invariant: an archive is complete only after the two empty blocks that end it; one that stops
//! anywhere else was cut.

use forebay_core::{Error, Result, limits};
use forebay_protocol::batch::{ERROR_KEYWORD, PLACEHOLDER_PREFIX};
use std::borrow::Cow;

/// The size of headers, to which data is padded.
pub const BLOCK_BYTES: usize = 512;
/// The zeros that end an archive.
pub const ARCHIVE_END_BYTES: usize = 2 * BLOCK_BYTES;
/// Largest extended header.
const EXTENDED_MAX_BYTES: usize = limits::TAR_EXTENDED_HEADER_MAX_BYTES as usize;

/// What PAX and GNU headers said about the next entry.
#[derive(Clone, Debug, Default)]
pub struct Extended {
    /// Its name, if it does not fit in the header.
    pub name: Option<String>,
    /// Its size in bytes, likewise.
    pub size: Option<u64>,
    /// Why the entry is missing.
    pub error: Option<String>,
}

/// The meaning of one block.
#[derive(Debug)]
pub enum Header {
    /// Zeros: two such blocks end the archive.
    Zeros,
    /// An entry of `size` bytes follows.
    Entry {
        /// Its length in bytes.
        size: usize,
        /// What the headers before it said.
        extended: Extended,
        /// Whether it is a placeholder for a missing entry.
        placeholder: bool,
    },
    /// `size` bytes about the next entry follow, for [`read_extended`].
    Extended {
        /// The header's type flag.
        kind: u8,
        /// Length in bytes, without padding.
        size: usize,
    },
}

/// Reads the header at byte `at` of the archive. An entry takes what extended headers before it
/// said out of `pending`; `ended`: a block of zeros came before.
///
/// # Errors
/// `Corrupt` for anything that no node writes.
///
/// # Panics
/// If the block is not [`BLOCK_BYTES`] long.
pub fn read_header(block: &[u8], at: usize, pending: &mut Extended, ended: bool) -> Result<Header> {
    assert_eq!(block.len(), BLOCK_BYTES);
    if block.iter().all(|b| *b == 0) {
        return Ok(Header::Zeros);
    }
    if ended {
        return Err(bad(at, "it goes on after its end"));
    }
    // The checksum counts its own eight bytes as spaces.
    let sum = |bytes: &[u8]| bytes.iter().map(|b| u64::from(*b)).sum::<u64>();
    let own = 8 * u64::from(b' ');
    if octal(&block[148..156]) != Some(sum(&block[..148]) + own + sum(&block[156..])) {
        return Err(bad(at, "the header's checksum is wrong"));
    }
    let size = number(&block[124..136]).ok_or_else(|| bad(at, "the size is not a number"))?;
    let is_entry = matches!(block[156], b'0' | 0);
    let size = pending.size.filter(|_| is_entry).unwrap_or(size);
    let size = usize::try_from(size)
        .ok()
        .filter(|size| size.checked_next_multiple_of(BLOCK_BYTES).is_some())
        .ok_or_else(|| bad(at, "the size is impossible"))?;
    match block[156] {
        b'0' | 0 => {
            let extended = std::mem::take(pending);
            let is_named = |name: &str| name.starts_with(PLACEHOLDER_PREFIX);
            let placeholder = size == 0
                && match &extended.name {
                    Some(name) => is_named(name),
                    None => is_named(&header_name(block)),
                };
            Ok(Header::Entry {
                size,
                extended,
                placeholder,
            })
        }
        kind @ (b'x' | b'g' | b'L') => {
            if size > EXTENDED_MAX_BYTES {
                return Err(bad(at, "an extended header is too large"));
            }
            Ok(Header::Extended { kind, size })
        }
        other => Err(bad(
            at,
            &format!("it has an entry of kind {:?}", char::from(other)),
        )),
    }
}

/// Reads what an extended header of this kind, at byte `at`, says about the entry after it.
///
/// # Errors
/// `Corrupt` for bytes that are not PAX records.
pub fn read_extended(kind: u8, data: &[u8], at: usize, pending: &mut Extended) -> Result<()> {
    match kind {
        b'x' => read_pax(data, pending).ok_or_else(|| bad(at, "a PAX record is malformed")),
        b'L' => {
            pending.name = Some(text(data).into_owned());
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The name in an entry's own header.
pub fn header_name(block: &[u8]) -> Cow<'_, str> {
    let name = text(&block[..100]);
    if &block[257..262] != b"ustar" || block[345] == 0 {
        return name;
    }
    Cow::Owned(format!("{}/{name}", text(&block[345..500])))
}

/// Why an entry is missing; `None` if it is there.
pub fn why_absent(error: Option<&str>, placeholder: bool) -> Option<&str> {
    error.or(placeholder.then_some("not found"))
}

/// An error that says where the archive is damaged.
fn bad(at: usize, what: &str) -> Error {
    Error::corrupt(format!(
        "the archive in the answer is damaged at byte {at}: {what}"
    ))
}

/// Text up to the first NUL.
fn text(field: &[u8]) -> Cow<'_, str> {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end])
}

fn octal(field: &[u8]) -> Option<u64> {
    let digits = field
        .iter()
        .skip_while(|b| **b == b' ')
        .take_while(|b| !matches!(b, 0 | b' '));
    digits.into_iter().try_fold(0u64, |n, b| match b {
        b'0'..=b'7' => n.checked_mul(8)?.checked_add(u64::from(b - b'0')),
        _ => None,
    })
}

/// Octal, or GNU's base-256 for what octal cannot hold.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 == 0 {
        return octal(field);
    }
    field[1..]
        .iter()
        .try_fold(u64::from(field[0] & 0x7f), |n, b| {
            n.checked_mul(256)?.checked_add(u64::from(*b))
        })
}

/// Records of the form `<length> <key>=<value>\n`.
fn read_pax(mut data: &[u8], into: &mut Extended) -> Option<()> {
    while !data.is_empty() {
        let space = data.iter().position(|b| *b == b' ')?;
        let length: usize = std::str::from_utf8(&data[..space]).ok()?.parse().ok()?;
        let record = data.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|b| *b == b'=')?;
        let value = String::from_utf8_lossy(&record[equals + 1..]);
        match &record[..equals] {
            b"path" => into.name = Some(value.into_owned()),
            b"size" => into.size = Some(value.parse().ok()?),
            key if key == ERROR_KEYWORD.as_bytes() => into.error = Some(value.into_owned()),
            _ => {}
        }
        data = &data[length..];
    }
    Some(())
}

/// Finds where each entry ends, padding included, in an archive that arrives in pieces.
#[derive(Debug, Default)]
pub struct Cutter {
    /// The start of a header that was cut between pieces.
    header: Vec<u8>,
    /// The extended header that its data is for: its kind, size, and what has come.
    extended: Option<(u8, usize, Vec<u8>)>,
    pending: Extended,
    /// Bytes of data and padding that are left.
    left: usize,
    /// Bytes seen so far.
    position: usize,
}

impl Cutter {
    /// How many of these bytes belong to the next entry, and whether it ends with them. Those that
    /// are not taken are to be passed again.
    ///
    /// # Errors
    /// `Corrupt` for anything that no node writes, and for the archive's end.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(usize, bool)> {
        let mut taken = 0;
        loop {
            let rest = &bytes[taken..];
            if self.left > 0 {
                let now = rest.len().min(self.left);
                if let Some((_, _, data)) = &mut self.extended {
                    data.extend_from_slice(&rest[..now]);
                }
                (taken, self.left) = (taken + now, self.left - now);
                self.position += now;
                if self.left > 0 {
                    return Ok((taken, false));
                }
                let Some((kind, size, data)) = self.extended.take() else {
                    return Ok((taken, true));
                };
                let at = self.position - data.len() - BLOCK_BYTES;
                read_extended(kind, &data[..size], at, &mut self.pending)?;
                continue;
            }
            let now = rest.len().min(BLOCK_BYTES - self.header.len());
            self.header.extend_from_slice(&rest[..now]);
            taken += now;
            self.position += now;
            if self.header.len() < BLOCK_BYTES {
                return Ok((taken, false));
            }
            let at = self.position - BLOCK_BYTES;
            let header = read_header(&self.header, at, &mut self.pending, false)?;
            self.header.clear();
            match header {
                Header::Zeros => return Err(bad(at, "it ends early")),
                Header::Entry { size, .. } => {
                    self.left = size.next_multiple_of(BLOCK_BYTES);
                    if self.left == 0 {
                        return Ok((taken, true));
                    }
                }
                Header::Extended { size: 0, .. } => {}
                Header::Extended { kind, size } => {
                    self.left = size.next_multiple_of(BLOCK_BYTES);
                    self.extended = Some((kind, size, Vec::new()));
                }
            }
        }
    }
}

/// An entry whose bytes follow.
#[derive(Debug)]
pub struct Entry<'a> {
    /// Its name in the archive: `bucket/key`, or what the request asked for.
    pub name: &'a str,
    /// Length in bytes.
    pub size: usize,
    /// Why it is missing; `None` if it is there.
    pub absent: Option<&'a str>,
}

/// Receives the entries of a walk. An error that it returns ends the walk.
pub trait Visit {
    /// The error that ends the walk: its own, or one made from the walk's.
    type Error: From<Error>;

    /// An entry begins.
    fn entry(&mut self, entry: Entry<'_>) -> Result<(), Self::Error>;
    /// Some bytes of the entry.
    fn data(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
    /// The entry's last byte has arrived.
    fn done(&mut self) -> Result<(), Self::Error>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    /// In a header.
    Header,
    /// In the records of an extended header, padding included.
    Extended { kind: u8, size: usize },
    /// In the data of an entry; this many bytes are left.
    Data(usize),
    /// In the zeros after the data.
    Padding(usize),
}

/// Walks an archive that arrives in pieces; see the module.
pub struct Walker {
    at: At,
    /// The start of a header that was cut between pieces.
    partial: Vec<u8>,
    pending: Extended,
    zero_blocks: u32,
    /// Bytes seen so far.
    position: usize,
    padding: usize,
}

impl Default for Walker {
    fn default() -> Self {
        Walker {
            at: At::Header,
            partial: Vec::new(),
            pending: Extended::default(),
            zero_blocks: 0,
            position: 0,
            padding: 0,
        }
    }
}

impl Walker {
    /// Takes the next piece.
    ///
    /// # Errors
    /// `Corrupt` for anything that no node writes, and whatever `to` returns.
    pub fn feed<V: Visit>(&mut self, mut bytes: &[u8], to: &mut V) -> Result<(), V::Error> {
        while !bytes.is_empty() {
            match self.at {
                At::Header => {
                    if self.partial.is_empty() && bytes.len() >= BLOCK_BYTES {
                        let block = self.take(&mut bytes, BLOCK_BYTES);
                        self.header(block, to)?;
                    } else if let Some(block) = self.whole(&mut bytes, BLOCK_BYTES) {
                        self.header(&block, to)?;
                    }
                }
                At::Extended { kind, size } => {
                    let Some(data) = self.whole(&mut bytes, size.next_multiple_of(BLOCK_BYTES))
                    else {
                        continue;
                    };
                    let began = self.position - data.len() - BLOCK_BYTES;
                    read_extended(kind, &data[..size], began, &mut self.pending)?;
                    self.at = At::Header;
                }
                At::Data(left) => {
                    let piece = self.take(&mut bytes, left);
                    to.data(piece)?;
                    self.at = At::Data(left - piece.len());
                    if piece.len() == left {
                        self.entry_ends(to)?;
                    }
                }
                At::Padding(left) => {
                    let zeros = self.take(&mut bytes, left).len();
                    self.at = match left - zeros {
                        0 => At::Header,
                        left => At::Padding(left),
                    };
                }
            }
        }
        Ok(())
    }

    /// Whether the archive has ended, with nothing of another entry after it.
    pub fn is_whole(&self) -> bool {
        self.zero_blocks >= 2 && self.at == At::Header && self.partial.is_empty()
    }

    fn take<'a>(&mut self, bytes: &mut &'a [u8], most: usize) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(most.min(bytes.len()));
        *bytes = rest;
        self.position += taken.len();
        taken
    }

    /// The next `size` bytes, once all of them are there.
    fn whole(&mut self, bytes: &mut &[u8], size: usize) -> Option<Vec<u8>> {
        let taken = self.take(bytes, size - self.partial.len());
        self.partial.extend_from_slice(taken);
        (self.partial.len() == size).then(|| std::mem::take(&mut self.partial))
    }

    fn header<V: Visit>(&mut self, block: &[u8], to: &mut V) -> Result<(), V::Error> {
        let at = self.position - BLOCK_BYTES;
        match read_header(block, at, &mut self.pending, self.zero_blocks > 0)? {
            Header::Zeros => self.zero_blocks += 1,
            Header::Extended { size: 0, .. } => {}
            Header::Extended { kind, size } => self.at = At::Extended { kind, size },
            Header::Entry {
                size,
                extended,
                placeholder,
            } => {
                let name = match &extended.name {
                    Some(name) => Cow::Borrowed(name.as_str()),
                    None => header_name(block),
                };
                to.entry(Entry {
                    name: &name,
                    size,
                    absent: why_absent(extended.error.as_deref(), placeholder),
                })?;
                self.padding = size.next_multiple_of(BLOCK_BYTES) - size;
                self.at = At::Data(size);
                if size == 0 {
                    self.entry_ends(to)?;
                }
            }
        }
        Ok(())
    }

    fn entry_ends<V: Visit>(&mut self, to: &mut V) -> Result<(), V::Error> {
        self.at = match self.padding {
            0 => At::Header,
            padding => At::Padding(padding),
        };
        to.done()
    }
}
