//! An entry as a stream, and look-ahead on a node whose disk does not keep what is fetched (there
//! is none, or it is full or failing): entries are then held in memory until the cursor reaches
//! them.
//!
//! Invariant: held bytes come from the half of the memory budget that may be held
//! (`MemoryBudget::try_hold`), so they never block the work that would free them. An entry that
//! does not fit is not held; the cursor streams it when it is its turn.

use crate::produce::Work;
use bytes::Bytes;
use forebay_core::{CacheStatus, Error, Reservation, Result, limits};
use forebay_engine::{ByteStream, EntryHeader, ReadOptions};
use futures::{StreamExt, TryStreamExt, stream};

/// An entry that is being read.
pub(crate) struct Opened {
    pub header: EntryHeader,
    /// What the read counts as when it is delivered.
    pub cache: CacheStatus,
    pub body: ByteStream,
}

/// Opens entry `index`, uncounted.
pub(crate) async fn open(work: &Work, index: usize) -> Result<Opened> {
    let entry = work.entry(index);
    let engine = &work.batcher.engine;
    let options = ReadOptions {
        brought: Some(entry.brought),
        uncounted: true,
        ..Default::default()
    };
    Ok(match entry.member {
        Some(member) => {
            let read = engine
                .read_member(entry.name, member, entry.range, &options)
                .await?;
            let header = EntryHeader {
                size: read.range.end - read.range.start,
                mtime_secs: 0,
            };
            Opened {
                header,
                cache: options.counts_as(read.cache),
                body: read.body,
            }
        }
        None => {
            let read = engine.read(entry.name, entry.range, &options).await?;
            let header = EntryHeader::of_object(&read.meta, &read.range, entry.range.is_some());
            Opened {
                header,
                cache: options.counts_as(read.cache),
                body: read.body,
            }
        }
    })
}

/// Bytes in memory, and the right to hold them.
struct Held {
    bytes: Vec<u8>,
    _memory: Reservation,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Fetches entry `index` into memory. `None` if it is too long to be held or there is no memory to
/// spare.
pub(crate) async fn hold(work: &Work, index: usize) -> Result<Option<Opened>> {
    let budget = work.batcher.engine.budget();
    // If memory is used up, the request would be in vain. The size is known only after it.
    if budget.try_hold(1).is_err() {
        return Ok(None);
    }
    let Opened {
        header,
        cache,
        mut body,
    } = open(work, index).await?;
    if header.size > limits::BATCH_HELD_ENTRY_MAX_BYTES {
        return Ok(None);
    }
    let Ok(memory) = budget.try_hold(header.size) else {
        return Ok(None);
    };
    let mut bytes = Vec::with_capacity(header.size as usize);
    while let Some(piece) = body.try_next().await? {
        if bytes.len() as u64 + piece.len() as u64 > header.size {
            return Err(Error::origin_unavailable(format!(
                "the entry is longer than the {} bytes that were announced",
                header.size
            )));
        }
        bytes.extend_from_slice(&piece);
    }
    if bytes.len() as u64 != header.size {
        return Err(Error::origin_unavailable(format!(
            "the entry has {} bytes, and {} were announced",
            bytes.len(),
            header.size
        )));
    }
    let piece = Bytes::from_owner(Held {
        bytes,
        _memory: memory,
    });
    let body = stream::iter((!piece.is_empty()).then_some(Ok(piece))).boxed();
    Ok(Some(Opened {
        header,
        cache,
        body,
    }))
}
