//! A batch that several nodes send parts of, put together in the order of its entries.
//!
//! Each part is an ordinary batch of its own. What arrives is passed on as it came, cut between
//! entries: one archive, as if one node had sent all. The part that the next entry is in is read;
//! the others wait in their connections, whose windows bound what is on its way. So nothing is held
//! here but the rest of a piece for each part.

use crate::{
    answer::Answer,
    archive::{ARCHIVE_END_BYTES, Cutter},
    client::{Call, Client},
    failure::{Failure, Result},
    owners::Owners,
};
use bytes::Bytes;
use forebay_core::Error;
use forebay_protocol::REQUEST_ID_HEADER;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Programs fill the end of an archive up with zeros; no more than that.
const ENDING_MAX_BYTES: usize = 1 << 20;

/// Where a part comes from.
enum From {
    Asked(JoinHandle<Result<Answer>>),
    Answer(Box<Answer>),
}

impl Drop for From {
    fn drop(&mut self) {
        if let From::Asked(task) = self {
            task.abort();
        }
    }
}

/// The entries that one node is asked for.
struct Part {
    /// `None`: whichever node answers.
    owner: Option<usize>,
    from: From,
    /// What arrived and was not passed on.
    rest: Bytes,
    cutter: Cutter,
}

/// See the module.
pub struct Merged {
    owners: Arc<Owners>,
    parts: Vec<Part>,
    /// The part that each entry is in.
    order: Vec<u16>,
    /// The entry that comes next.
    next: usize,
    /// Its end has been passed on.
    ended: bool,
}

impl Merged {
    /// Asks for all parts at once; entry `i` of the batch is the next one of part `order[i]`.
    ///
    /// # Panics
    /// If there is no such part, or outside of a runtime.
    pub fn ask(
        client: &Client,
        owners: &Arc<Owners>,
        parts: Vec<(Option<usize>, Call)>,
        order: Vec<u16>,
    ) -> Merged {
        assert!(order.iter().all(|&part| usize::from(part) < parts.len()));
        let parts = parts.into_iter().map(|(owner, call)| {
            let (client, owners) = (client.clone(), owners.clone());
            let asked = tokio::spawn(async move {
                match owner {
                    Some(owner) => owners.call(owner, &call).await,
                    None => client.call(&call).await,
                }
            });
            Part {
                owner,
                from: From::Asked(asked),
                rest: Bytes::new(),
                cutter: Cutter::default(),
            }
        });
        Merged {
            owners: owners.clone(),
            parts: parts.collect(),
            order,
            next: 0,
            ended: false,
        }
    }

    /// Waits until the node that has the first entry has accepted its part. Returns the id under
    /// which it logs the request.
    ///
    /// # Errors
    /// Why it did not.
    pub async fn accepted(&mut self) -> Result<Option<String>> {
        let first = self.order.first().map_or(0, |&part| usize::from(part));
        let answer = self.parts[first].answer().await?;
        Ok(answer.header(REQUEST_ID_HEADER).map(str::to_owned))
    }

    /// The next piece of the archive; `None` at its proper end.
    ///
    /// # Errors
    /// As [`Answer::piece`], of the part that failed: what has not arrived may be asked of any node.
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        if let Some(&part) = self.order.get(self.next) {
            let part = &mut self.parts[usize::from(part)];
            let (piece, is_whole) = match part.piece().await {
                Ok(found) => found,
                Err(failure) => {
                    if let (Some(owner), false) = (part.owner, failure.is_said()) {
                        self.owners.fails(owner);
                    }
                    return Err(failure);
                }
            };
            self.next += usize::from(is_whole);
            return Ok(Some(piece));
        }
        if self.ended {
            return Ok(None);
        }
        for part in &mut self.parts {
            part.ends().await?;
        }
        self.ended = true;
        Ok(Some(Bytes::from_static(&[0; ARCHIVE_END_BYTES])))
    }
}

impl Part {
    async fn answer(&mut self) -> Result<&mut Answer> {
        if let From::Asked(task) = &mut self.from {
            let answer = task.await.map_err(|e| {
                Failure::NotSent(Error::internal("asking for a part failed").caused_by(e))
            })??;
            self.from = From::Answer(Box::new(answer));
        }
        match &mut self.from {
            From::Answer(answer) => Ok(answer),
            From::Asked(_) => unreachable!("it was answered"),
        }
    }

    /// Bytes of its next entry, and whether they are the last of it.
    async fn piece(&mut self) -> Result<(Bytes, bool)> {
        if self.rest.is_empty() {
            self.rest = match self.answer().await?.piece().await? {
                Some(piece) => piece,
                None => return Err(cut("a part of the answer ended early")),
            };
        }
        let taken = self.cutter.take(&self.rest);
        let (bytes, is_whole) = taken.map_err(|e| cut(e.message()))?;
        Ok((self.rest.split_to(bytes), is_whole))
    }

    /// Reads its end: so its connection can be used again.
    async fn ends(&mut self) -> Result<()> {
        let mut rest = std::mem::take(&mut self.rest);
        let mut zeros = 0;
        loop {
            if rest.iter().any(|b| *b != 0) {
                return Err(cut("a part of the answer goes on after its last entry"));
            }
            zeros += rest.len();
            if zeros > ENDING_MAX_BYTES {
                return Err(cut("a part of the answer does not end"));
            }
            match self.answer().await?.piece().await? {
                Some(piece) => rest = piece,
                None if zeros < ARCHIVE_END_BYTES => {
                    return Err(cut("a part of the answer ended early"));
                }
                None => return Ok(()),
            }
        }
    }
}

fn cut(message: &str) -> Failure {
    Failure::Truncated {
        error: Error::corrupt(message),
        request_id: None,
    }
}
