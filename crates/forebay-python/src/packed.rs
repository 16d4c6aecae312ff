//! A batch received straight into shared memory, its entries one after the other.
//!
//! A batch that Python looks at entry by entry is kept as it came, tar headers included (see
//! [`region`](crate::region)). For a tensor of a whole batch the headers would be in the way, so
//! here they are left out in the one copy that is made anyway, from the connection's buffer to
//! where the bytes are to lie: entries of equal size are rows of a matrix when the last one
//! arrives, and nothing is collated.
//!
//! Invariant: sizes are given back only for an answer that held exactly the entries that were asked
//! for, in order, and came to its proper end.

use crate::{
    failure::{Class, Failure, Result},
    request::BatchRequest,
    ring::Room,
    session::Session,
    tar::{BLOCK, Extended, Header, bad, header_name, read_extended, read_header, why_absent},
    transport::Call,
};
use forebay_protocol::batch::{ENTRY_ERRORS_HEADER, ENTRY_ERRORS_PAX};
use http::{HeaderName, Method};

/// Receives the batch; `None` if its entries are larger than the room for them.
pub async fn receive(
    session: &Session,
    request: &BatchRequest,
    room: Room,
) -> Result<Option<Vec<usize>>> {
    if request.len() == 0 {
        return Err(Failure::invalid("the batch is empty").hint("give at least one entry"));
    }
    let (path, json) = request.to_http(".tar");
    let call = Call::new(Method::POST, path).json(json).header(
        HeaderName::from_static(ENTRY_ERRORS_HEADER),
        ENTRY_ERRORS_PAX,
    );
    let mut answer = session.transport.call(&call).await?;
    let request_id = answer.header("x-request-id").map(str::to_owned);
    let mut unpacker = Unpacker::new(request, room);
    let told = |mut failure: Failure, seen: usize| {
        failure.request_id = request_id.clone();
        failure.message = format!(
            "{} ({seen} of {} entries had arrived)",
            failure.message,
            request.len()
        );
        failure
    };
    while let Some(piece) = answer
        .piece()
        .await
        .map_err(|f| told(f, unpacker.sizes.len()))?
    {
        if !unpacker
            .add(&piece)
            .map_err(|f| told(f, unpacker.sizes.len()))?
        {
            return Ok(None);
        }
    }
    if unpacker.sizes.len() != request.len() || unpacker.zero_blocks < 2 || unpacker.open {
        return Err(told(
            Failure::truncated("the answer ended early"),
            unpacker.sizes.len(),
        ));
    }
    Ok(Some(unpacker.sizes))
}

/// Ends the task when nobody waits for it any more, so that nothing writes to a slot that was given
/// back.
pub struct AbortOnDrop<T>(pub tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

enum Expecting {
    /// A header, of which `have` bytes are in `block`.
    Header,
    /// The bytes of an extended header, padding included, of which those in `extended` are there.
    Extended {
        kind: u8,
        size: usize,
    },
    Data {
        left: usize,
    },
    Padding {
        left: usize,
    },
}

struct Unpacker<'a> {
    request: &'a BatchRequest,
    room: Room,
    /// Bytes of entries written so far.
    written: usize,
    /// Bytes of the stream seen so far, for messages.
    position: usize,
    expecting: Expecting,
    /// What has arrived of a header or an extended header that pieces cut.
    partial: Vec<u8>,
    pending: Extended,
    open: bool,
    zero_blocks: u32,
    sizes: Vec<usize>,
}

impl<'a> Unpacker<'a> {
    fn new(request: &'a BatchRequest, room: Room) -> Self {
        Unpacker {
            request,
            room,
            written: 0,
            position: 0,
            expecting: Expecting::Header,
            partial: Vec::new(),
            pending: Extended::default(),
            open: false,
            zero_blocks: 0,
            sizes: Vec::with_capacity(request.len()),
        }
    }

    /// Takes the next piece of the stream; false if an entry does not fit.
    fn add(&mut self, mut piece: &[u8]) -> Result<bool> {
        while !piece.is_empty() {
            match self.expecting {
                Expecting::Header => {
                    let Some(block) = self.whole(&mut piece, BLOCK) else {
                        break;
                    };
                    if !self.header(&block)? {
                        return Ok(false);
                    }
                }
                Expecting::Extended { kind, size } => {
                    let Some(data) = self.whole(&mut piece, size.next_multiple_of(BLOCK)) else {
                        break;
                    };
                    read_extended(kind, &data[..size], self.position, &mut self.pending)?;
                    self.expecting = Expecting::Header;
                }
                Expecting::Data { left } => {
                    let n = left.min(piece.len());
                    self.room.write(self.written, &piece[..n])?;
                    self.written += n;
                    self.skip(&mut piece, n);
                    self.expecting = Expecting::Data { left: left - n };
                    if left == n {
                        self.entry_ends();
                    }
                }
                Expecting::Padding { left } => {
                    let n = left.min(piece.len());
                    self.skip(&mut piece, n);
                    self.expecting = if left == n {
                        Expecting::Header
                    } else {
                        Expecting::Padding { left: left - n }
                    };
                }
            }
        }
        Ok(true)
    }

    fn skip(&mut self, piece: &mut &[u8], n: usize) {
        *piece = &piece[n..];
        self.position += n;
    }

    /// The next `size` bytes once they are all there.
    fn whole(&mut self, piece: &mut &[u8], size: usize) -> Option<Vec<u8>> {
        let n = (size - self.partial.len()).min(piece.len());
        self.partial.extend_from_slice(&piece[..n]);
        self.skip(piece, n);
        (self.partial.len() == size).then(|| std::mem::take(&mut self.partial))
    }

    fn header(&mut self, block: &[u8]) -> Result<bool> {
        let at = self.position - BLOCK;
        match read_header(block, at, &mut self.pending, self.zero_blocks > 0)? {
            Header::Zeros => self.zero_blocks += 1,
            Header::Extended { size: 0, .. } => {}
            Header::Extended { kind, size } => self.expecting = Expecting::Extended { kind, size },
            Header::Entry {
                size,
                extended,
                placeholder,
            } => {
                let index = self.sizes.len();
                if index >= self.request.len() {
                    return Err(Failure::truncated(
                        "the answer holds more entries than were asked for",
                    ));
                }
                let name = extended
                    .as_ref()
                    .and_then(|e| e.name.clone())
                    .unwrap_or_else(|| header_name(block));
                if let Some(why) = why_absent(extended.as_deref(), placeholder) {
                    return Err(Failure::new(
                        Class::EntryFailed,
                        format!("entry {index} ({name}): {why}"),
                    ));
                }
                if !self.request.answers(index, &name) {
                    return Err(Failure::truncated(format!(
                        "entry {index} is {name:?}, which is not what was asked for"
                    )));
                }
                let end = self
                    .written
                    .checked_add(size)
                    .ok_or_else(|| bad(at, "the size is absurd"))?;
                if end > self.room.len() {
                    return Ok(false);
                }
                self.open = true;
                self.sizes.push(size);
                self.expecting = Expecting::Data { left: size };
                if size == 0 {
                    self.entry_ends();
                }
            }
        }
        Ok(true)
    }

    fn entry_ends(&mut self) {
        self.open = false;
        let left = self
            .sizes
            .last()
            .map_or(0, |size| size.next_multiple_of(BLOCK) - size);
        self.expecting = if left == 0 {
            Expecting::Header
        } else {
            Expecting::Padding { left }
        };
    }
}
