//! A tar stream, parsed in place as it arrives.
//!
//! The parser looks only at headers: it is told how many bytes the region holds, and returns the
//! entries that are now complete. Nothing is copied; an entry is a pair of offsets.
//! [`forebay_client::archive`] parses the headers.
//!
//! Invariant: an entry is reported once all its bytes are there, in the order of the stream, and
//! [`TarParser::ended`] is true only after the end-of-archive mark: a stream that stops anywhere
//! else was cut.

use crate::{
    failure::{Failure, Result},
    region::Region,
};
use forebay_client::archive::{
    BLOCK_BYTES, Extended, Header, header_name, read_extended, read_header, why_absent,
};

/// One entry of the stream: the place of its bytes in the region.
#[derive(Debug)]
pub struct Slot {
    pub at: usize,
    pub size: usize,
    /// The place of its header, for its name.
    header_at: usize,
    extended: Option<Box<Extended>>,
    pub placeholder: bool,
}

impl Slot {
    /// The entry's name in the archive.
    pub fn name(&self, region: &Region) -> String {
        match self.extended.as_ref().and_then(|e| e.name.as_ref()) {
            Some(name) => name.clone(),
            None => header_name(region.bytes(self.header_at, BLOCK_BYTES)).into_owned(),
        }
    }

    /// Why the entry is missing; `None` for one that is there.
    pub fn error(&self) -> Option<&str> {
        let error = self.extended.as_ref().and_then(|e| e.error.as_deref());
        why_absent(error, self.placeholder)
    }
}

#[derive(Default)]
pub struct TarParser {
    /// The position of the next header.
    position: usize,
    pending: Extended,
    /// A header whose bytes have not all arrived.
    open: Option<Slot>,
    zero_blocks: u32,
    /// Where the last complete entry ends.
    complete: usize,
    /// The last reason that the node sent, and where.
    reason: Option<(usize, String)>,
}

/// What a node said of an entry, which it knows by its number in what it was asked for: `number` says
/// which one of the batch that is. The node names the entry as AIStore's clients read it; names in
/// Python have no `ais://`.
pub fn of_batch(said: &str, number: impl Fn(usize) -> usize) -> String {
    let parts = said.strip_prefix("in[").and_then(|s| s.split_once(']'));
    match parts.and_then(|(index, rest)| Some((index.parse().ok()?, rest))) {
        Some((index, rest)) => match rest.strip_prefix(" ais://") {
            Some(name) => format!("in[{}] {name}", number(index)),
            None => format!("in[{}]{rest}", number(index)),
        },
        None => said.to_owned(),
    }
}

impl TarParser {
    /// Why an answer breaks off, if the node said so in its last entry.
    pub fn why_cut(&self) -> Option<&str> {
        let (at, said) = self.reason.as_ref()?;
        (*at >= self.complete).then_some(said)
    }

    /// Why the last entry that is there in the place of another is missing.
    pub fn why_missing(&self) -> Option<&str> {
        let (at, said) = self.reason.as_ref()?;
        (*at < self.complete).then_some(said)
    }

    /// Whether the end-of-archive mark was seen.
    pub fn ended(&self) -> bool {
        self.zero_blocks >= 2
    }

    /// Forgets what has arrived after the last complete entry, here and in the region: another
    /// archive follows there, with the entries after that one.
    pub fn begin_again(&mut self, region: &Region) -> Result<()> {
        let complete = self.complete;
        // Its padding may be missing.
        let missing = complete.saturating_sub(region.len());
        region.append(&[0; BLOCK_BYTES][..missing])?;
        region.cut_to(complete);
        *self = TarParser {
            position: complete,
            complete,
            ..TarParser::default()
        };
        Ok(())
    }

    /// Looks at what has arrived and passes each complete entry to `entry`.
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
                self.position = (open.at + open.size).next_multiple_of(BLOCK_BYTES);
                self.complete = self.position;
                entry(open)?;
            }
            if have < self.position + BLOCK_BYTES {
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
            region.bytes(at, BLOCK_BYTES),
            at,
            &mut self.pending,
            self.zero_blocks > 0,
        )
        .map_err(damaged)?
        {
            Header::Zeros => {
                self.zero_blocks += 1;
                self.position += BLOCK_BYTES;
            }
            Header::Entry {
                size,
                extended,
                placeholder,
            } => {
                if let Some(message) = &extended.error {
                    self.reason = Some((at, message.clone()));
                }
                let some = extended.name.is_some() || extended.error.is_some();
                self.open = Some(Slot {
                    at: at + BLOCK_BYTES,
                    size,
                    header_at: at,
                    extended: some.then(|| Box::new(extended)),
                    placeholder,
                });
            }
            Header::Extended { kind, size } => {
                let end = at + BLOCK_BYTES + size.next_multiple_of(BLOCK_BYTES);
                if have < end {
                    return Ok(false);
                }
                read_extended(
                    kind,
                    region.bytes(at + BLOCK_BYTES, size),
                    at,
                    &mut self.pending,
                )
                .map_err(damaged)?;
                if let Some(message) = &self.pending.error {
                    self.reason = Some((at, message.clone()));
                }
                self.position = end;
            }
        }
        Ok(true)
    }
}

/// A damaged archive is an answer that did not arrive completely.
pub fn damaged(e: forebay_core::Error) -> Failure {
    Failure::truncated(e.message())
}
