//! A tar stream, parsed in place while it arrives.
//!
//! The parser looks only at headers: it is told how many bytes the region holds, and answers with
//! the entries that have become whole. Nothing is copied; an entry is a pair of offsets. A message
//! that the node sends for an entry that it could not give comes as the PAX record `FOREBAY.error`
//! in front of a placeholder of size 0 whose name begins with `__404__/`.
//!
//! (The parser of `forebay-format` finds members of any tar that people make, keeps an index of them,
//! and brings the other formats' parsers along; this one knows what a node writes, and runs once for
//! each received piece.)
//!
//! Invariant: an entry is reported once all its bytes are there, in the order of the stream, and
//! [`TarParser::ended`] is true only after the end-of-archive mark: a stream that stops anywhere
//! else is cut.

use crate::{
    failure::{Failure, Result},
    region::Region,
};
use forebay_protocol::batch::{ERROR_KEYWORD, PLACEHOLDER_PREFIX};

pub const BLOCK: usize = 512;
/// Largest extended header.
const EXTENDED_MAX_BYTES: usize = forebay_core::limits::TAR_EXTENDED_HEADER_MAX_BYTES as usize;

/// One entry of the stream: where its bytes lie in the region.
#[derive(Debug)]
pub struct Slot {
    pub at: usize,
    pub size: usize,
    /// Where its header lies, for its name.
    header_at: usize,
    extended: Option<Box<Extended>>,
    pub placeholder: bool,
}

/// What PAX and GNU headers said about the entry after them.
#[derive(Debug, Default)]
pub struct Extended {
    pub name: Option<String>,
    pub size: Option<u64>,
    pub error: Option<String>,
}

impl Slot {
    /// The entry's name in the archive.
    pub fn name(&self, region: &Region) -> String {
        match self.extended.as_ref().and_then(|e| e.name.as_ref()) {
            Some(name) => name.clone(),
            None => header_name(region.bytes(self.header_at, BLOCK)),
        }
    }

    /// Why the entry is not there; `None` for an entry that is.
    pub fn error(&self) -> Option<&str> {
        why_absent(self.extended.as_deref(), self.placeholder)
    }
}

/// Why an entry is not there; `None` for one that is.
pub fn why_absent(extended: Option<&Extended>, placeholder: bool) -> Option<&str> {
    extended
        .and_then(|e| e.error.as_deref())
        .or(placeholder.then_some("not found"))
}

#[derive(Default)]
pub struct TarParser {
    /// The next header.
    position: usize,
    pending: Extended,
    /// A header whose bytes have not all arrived.
    open: Option<Slot>,
    zero_blocks: u32,
    /// The last message that the node sent in the stream, to explain a cut.
    pub last_error: Option<String>,
}

impl TarParser {
    /// Whether the end-of-archive mark was seen.
    pub fn ended(&self) -> bool {
        self.zero_blocks >= 2
    }

    /// Looks at what has arrived and hands each whole entry to `entry`.
    pub fn advance(
        &mut self,
        region: &Region,
        mut entry: impl FnMut(Slot) -> Result<()>,
    ) -> Result<()> {
        let have = region.len();
        loop {
            if let Some(open) = self.open.take() {
                if have < open.at + open.size {
                    self.open = Some(open);
                    return Ok(());
                }
                self.position = (open.at + open.size).next_multiple_of(BLOCK);
                entry(open)?;
            }
            if have < self.position + BLOCK {
                return Ok(());
            }
            if !self.header(region, have)? {
                return Ok(());
            }
        }
    }

    /// Reads the header at `position`; false if more bytes are needed first.
    fn header(&mut self, region: &Region, have: usize) -> Result<bool> {
        let at = self.position;
        match read_header(
            region.bytes(at, BLOCK),
            at,
            &mut self.pending,
            self.zero_blocks > 0,
        )? {
            Header::Zeros => {
                self.zero_blocks += 1;
                self.position += BLOCK;
            }
            Header::Entry {
                size,
                extended,
                placeholder,
            } => {
                if let Some(message) = extended.as_ref().and_then(|e| e.error.as_ref()) {
                    self.last_error = Some(message.clone());
                }
                self.open = Some(Slot {
                    at: at + BLOCK,
                    size,
                    header_at: at,
                    extended,
                    placeholder,
                });
            }
            Header::Extended { kind, size } => {
                let end = at + BLOCK + size.next_multiple_of(BLOCK);
                if have < end {
                    return Ok(false);
                }
                read_extended(kind, region.bytes(at + BLOCK, size), at, &mut self.pending)?;
                if let Some(message) = &self.pending.error {
                    self.last_error = Some(message.clone());
                }
                self.position = end;
            }
        }
        Ok(true)
    }
}

/// What one block of 512 bytes says.
pub enum Header {
    /// A block of zeros: two of them end the archive.
    Zeros,
    /// An entry of `size` bytes follows.
    Entry {
        size: usize,
        extended: Option<Box<Extended>>,
        placeholder: bool,
    },
    /// `size` bytes about the next entry follow.
    Extended { kind: u8, size: usize },
}

/// Reads the header that lies at byte `at` of the stream; an entry takes what extended headers
/// before it said.
pub fn read_header(block: &[u8], at: usize, pending: &mut Extended, ended: bool) -> Result<Header> {
    if block.iter().all(|b| *b == 0) {
        return Ok(Header::Zeros);
    }
    if ended {
        return Err(bad(at, "an entry after the end of the archive"));
    }
    let sum: u64 = block
        .iter()
        .enumerate()
        .map(|(i, b)| {
            if (148..156).contains(&i) {
                b' ' as u64
            } else {
                *b as u64
            }
        })
        .sum();
    if octal(&block[148..156]) != Some(sum) {
        return Err(bad(at, "the header's checksum is wrong"));
    }
    let size = number(&block[124..136]).ok_or_else(|| bad(at, "the size is not a number"))?;
    let size = pending
        .size
        .filter(|_| matches!(block[156], b'0' | 0))
        .unwrap_or(size);
    let size = usize::try_from(size).map_err(|_| bad(at, "the size is absurd"))?;
    match block[156] {
        b'0' | 0 => {
            let extended = std::mem::take(pending);
            let placeholder = match &extended.name {
                Some(name) => name.starts_with(PLACEHOLDER_PREFIX),
                None => {
                    block.starts_with(PLACEHOLDER_PREFIX.as_bytes())
                        || block[345..500]
                            .starts_with(PLACEHOLDER_PREFIX.trim_end_matches('/').as_bytes())
                }
            };
            let some = extended.name.is_some() || extended.error.is_some();
            Ok(Header::Entry {
                size,
                extended: some.then(|| Box::new(extended)),
                placeholder,
            })
        }
        kind @ (b'x' | b'g' | b'L') => {
            if size > EXTENDED_MAX_BYTES {
                return Err(bad(at, "an extended header is too large"));
            }
            Ok(Header::Extended { kind, size })
        }
        other => Err(bad(at, &format!("an entry of kind {:?}", other as char))),
    }
}

/// Reads what an extended header of this kind says.
pub fn read_extended(kind: u8, data: &[u8], at: usize, pending: &mut Extended) -> Result<()> {
    match kind {
        b'x' => read_pax(data, pending).ok_or_else(|| bad(at, "a PAX record is malformed")),
        b'L' => {
            pending.name = Some(text(data));
            Ok(())
        }
        _ => Ok(()),
    }
}

pub fn bad(at: usize, what: &str) -> Failure {
    Failure::truncated(format!(
        "the archive in the answer is damaged at byte {at}: {what}"
    ))
}

/// Text up to the first NUL.
fn text(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

pub fn header_name(block: &[u8]) -> String {
    let name = text(&block[..100]);
    let prefix = if &block[257..262] == b"ustar" {
        text(&block[345..500])
    } else {
        String::new()
    };
    if prefix.is_empty() {
        name
    } else {
        format!("{prefix}/{name}")
    }
}

fn octal(field: &[u8]) -> Option<u64> {
    let digits = field
        .iter()
        .skip_while(|b| **b == b' ')
        .take_while(|b| !matches!(b, 0 | b' '));
    digits.into_iter().try_fold(0u64, |n, b| match b {
        b'0'..=b'7' => n.checked_mul(8)?.checked_add((b - b'0') as u64),
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
        .try_fold((field[0] & 0x7f) as u64, |n, b| {
            n.checked_mul(256)?.checked_add(*b as u64)
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
