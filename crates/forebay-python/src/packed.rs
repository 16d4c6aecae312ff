//! A batch received straight into shared memory, its entries one after the other.
//!
//! A batch that Python looks at entry by entry is kept as it arrived, tar headers included (see
//! [`region`](crate::region)). In a tensor of a whole batch the headers would be in the way, so
//! they are left out of the one copy that is made anyway, from the connection's buffer to the
//! destination. Entries of equal size are then rows of a matrix as soon as the last one arrives,
//! and nothing is collated.
//!
//! Invariant: sizes are returned only for an answer that held exactly the requested entries, in
//! order, and ended properly.

use crate::{
    failure::{Class, Failure, Result},
    request::BatchRequest,
    ring::Room,
    session::Session,
    source::{Source, ask_owners},
    tar::{damaged, of_batch},
};
use forebay_client::{
    Merged,
    archive::{Entry, Visit, Walker},
};
use forebay_protocol::batch::CUT_NAME;

/// Receives the batch; `None` if its entries do not fit into the room.
pub async fn receive(
    session: &Session,
    request: &BatchRequest,
    room: Room,
) -> Result<Option<Vec<usize>>> {
    if request.len() == 0 {
        return Err(Failure::invalid("the batch is empty").hint("give at least one entry"));
    }
    let mut unpacker = Unpacker {
        request,
        room,
        written: 0,
        whole: 0,
        sizes: Vec::with_capacity(request.len()),
    };
    let mut cuts = 0;
    let mut owners = ask_owners(session, request);
    loop {
        let before = unpacker.whole;
        let of_owners = owners.is_some();
        let cut = match unpack(session, request, owners.take(), &mut unpacker).await {
            Ok(true) => return Ok(Some(unpacker.sizes)),
            Ok(false) => return Ok(None),
            Err(failure) if failure.class == Class::Truncated || of_owners => failure,
            Err(failure) => return Err(failure),
        };
        // Another node sends the rest.
        if !of_owners {
            cuts = if unpacker.whole > before { 1 } else { cuts + 1 };
            if cuts >= session.node.count() {
                return Err(cut);
            }
        }
        unpacker.sizes.truncate(unpacker.whole);
        unpacker.written = unpacker.sizes.iter().sum();
        if unpacker.whole == request.len() {
            return Ok(Some(unpacker.sizes));
        }
    }
}

/// Requests the entries that are missing, and receives them; false if they do not fit.
async fn unpack(
    session: &Session,
    request: &BatchRequest,
    owners: Option<Merged>,
    unpacker: &mut Unpacker<'_>,
) -> Result<bool> {
    let first = unpacker.whole;
    let asked = Source::ask(session, request, first, owners).await;
    let (mut answer, request_id) = asked.map_err(|mut failure| {
        failure.message = of_batch(&failure.message, |index| first + index);
        failure
    })?;
    let mut walker = Walker::default();
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
        match walker.feed(&piece, unpacker) {
            Ok(()) => {}
            Err(Stop::Full) => return Ok(false),
            Err(Stop::Failed(failure)) => return Err(told(failure, unpacker.sizes.len())),
        }
    }
    if unpacker.sizes.len() != request.len() || !walker.is_whole() {
        return Err(told(
            Failure::truncated("the answer ended early"),
            unpacker.sizes.len(),
        ));
    }
    Ok(true)
}

/// Aborts the task when nobody waits for it any more, so that nothing writes to a slot that was
/// given back.
pub struct AbortOnDrop<T>(pub tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Why the unpacking stopped.
enum Stop {
    /// An entry does not fit.
    Full,
    Failed(Failure),
}

impl From<forebay_core::Error> for Stop {
    fn from(e: forebay_core::Error) -> Self {
        Stop::Failed(damaged(e))
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

struct Unpacker<'a> {
    request: &'a BatchRequest,
    room: Room,
    /// Bytes of entries written so far.
    written: usize,
    /// Entries all of whose bytes have arrived.
    whole: usize,
    sizes: Vec<usize>,
}

impl Visit for Unpacker<'_> {
    type Error = Stop;

    fn entry(&mut self, entry: Entry<'_>) -> Result<(), Stop> {
        let (index, name) = (self.sizes.len(), entry.name);
        if index >= self.request.len() {
            return Err(
                Failure::truncated("the answer holds more entries than were requested").into(),
            );
        }
        if name == CUT_NAME {
            let why = entry.absent.unwrap_or("the answer broke off");
            return Err(Failure::truncated(of_batch(why, |_| index)).into());
        }
        if let Some(why) = entry.absent {
            let message = format!("entry {index} ({name}): {}", of_batch(why, |_| index));
            return Err(Failure::new(Class::EntryFailed, message).into());
        }
        if !self.request.answers(index, name) {
            return Err(Failure::truncated(format!(
                "entry {index} is {name:?}, which is not what was requested"
            ))
            .into());
        }
        let end = self.written.checked_add(entry.size);
        if end.is_none_or(|end| end > self.room.len()) {
            return Err(Stop::Full);
        }
        self.sizes.push(entry.size);
        Ok(())
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        self.room.write(self.written, bytes)?;
        self.written += bytes.len();
        Ok(())
    }

    fn done(&mut self) -> Result<(), Stop> {
        self.whole += 1;
        Ok(())
    }
}
