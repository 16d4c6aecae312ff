//! The buffered form of an answer: a metadata part that describes each entry, then the archive.
//!
//! The metadata come first and need every entry's size and error, so these are determined before
//! the first byte: entries are looked up (and brought to the local disk) many at a time. The
//! archive is then streamed as usual; nothing piles up in memory. If an entry changes in between,
//! the answer is cut.
//!
//! `uuid` and the boundary are a hash of the request, so that the same request gets the same bytes.

use crate::{ahead::with_attempts, produce::Work, request::Entry};
use bytes::Bytes;
use forebay_core::{Error, Reservation, Result, name::hash_name};
use forebay_engine::EntryHeader;
use forebay_format::{ArchiveKind, tar_exact_size, tar_header_bytes};
use forebay_protocol::batch::{ERROR_KEYWORD, PLACEHOLDER_PREFIX};
use futures::{StreamExt, stream};
use serde::Serialize;
use std::{io, sync::Arc};

/// So many entries are described on the runtime's threads; more of them on others, and in memory
/// that is held for that.
const DESCRIBED_HERE: usize = 1000;

/// What is known about the entries before the first byte.
pub(crate) struct Planned {
    pub entries: Vec<Result<EntryHeader>>,
    /// Exact size of the archive, if it can be determined.
    pub archive_bytes: Option<u64>,
}

/// The parts before and after the archive.
pub(crate) struct Parts {
    pub content_type: String,
    pub before: Bytes,
    pub after: Bytes,
}

#[derive(Serialize)]
struct Metadata<'a> {
    out: Vec<EntryMetadata<'a>>,
    uuid: &'a str,
}

#[derive(Serialize)]
struct EntryMetadata<'a> {
    objname: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    archpath: Option<&'a str>,
    bucket: &'a str,
    provider: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    opaque: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    err_msg: Option<String>,
    size: u64,
}

/// Looks up all entries.
///
/// # Errors
/// Those that end the batch: without continue-on-error the first entry's, in order; past the limit
/// of soft errors, their count. `Busy` if the budget has no room for the description of many entries
/// now, and `TooLarge` if it never will.
pub(crate) async fn plan(work: &Arc<Work>, body: &Bytes) -> Result<(Parts, Planned)> {
    let count = work.request.entries.len();
    let mut looked_up = stream::iter(0..count)
        .map(|i| async move {
            match work.denied.get(&i) {
                Some(denied) => Err(denied.clone()),
                None => with_attempts(work, || work.batcher.engine.stat_entry(work.entry(i)))
                    .await
                    .and_then(|(header, status)| {
                        work.request.entries[i].check_size(header.size)?;
                        Ok((header, status))
                    }),
            }
        })
        .buffered(work.batcher.config.read_ahead_entries.max(1));
    let mut entries = Vec::with_capacity(count);
    let mut soft_errors = 0;
    while let Some(found) = looked_up.next().await {
        let index = entries.len();
        entries.push(match found {
            Ok((header, status)) => {
                work.note_brought(index, status);
                Ok(header)
            }
            Err(e) => Err(work.tolerate(index, e, &mut soft_errors, false)?),
        });
    }
    drop(looked_up);
    let (work, body) = (work.clone(), body.clone());
    let describe = move || -> Result<(Parts, Planned)> {
        let archive_bytes = exact_size(&work, &entries)?;
        let planned = Planned {
            entries,
            archive_bytes,
        };
        Ok((parts(&work, &planned, &body)?, planned))
    };
    if count <= DESCRIBED_HERE {
        return describe();
    }
    tokio::task::spawn_blocking(describe)
        .await
        .map_err(|e| Error::internal("the entries could not be described").caused_by(e))?
}

fn exact_size(work: &Work, entries: &[Result<EntryHeader>]) -> Result<Option<u64>> {
    if work.request.format != ArchiveKind::Tar {
        return Ok(None);
    }
    let mut total = tar_exact_size(std::iter::empty())?;
    let mut name = String::new();
    for (entry, planned) in work.request.entries.iter().zip(entries) {
        entry.output_name(work.request.only_object_name, &mut name);
        total += match planned {
            Ok(h) => {
                tar_header_bytes(&name, h.size, h.mtime_secs, &[])?
                    + h.size
                    + forebay_format::tar_padding(h.size) as u64
            }
            Err(e) => {
                let name = format!("{}{name}", PLACEHOLDER_PREFIX);
                let text = e.describe();
                let pax = [(ERROR_KEYWORD, text.as_str())];
                tar_header_bytes(
                    &name,
                    0,
                    0,
                    if work.options.pax_errors { &pax } else { &[] },
                )?
            }
        };
    }
    Ok(Some(total))
}

fn parts(work: &Work, planned: &Planned, body: &[u8]) -> Result<Parts> {
    // Lossless text in, one hash out: the request as it was sent.
    let id = format!(
        "{:032x}",
        hash_name("batch", &String::from_utf8_lossy(body))
    );
    let metadata = Metadata {
        out: work
            .request
            .entries
            .iter()
            .zip(&planned.entries)
            .map(|(e, p)| entry_metadata(e, p))
            .collect(),
        uuid: &id,
    };
    let boundary = format!("forebay-{id}");
    let extension = work.request.format.extension();
    let head = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"metadata\"\r\nContent-Type: application/json\r\n\r\n"
    );
    let tail = format!(
        "\r\n--{boundary}\r\nContent-Disposition: form-data; name=\"archive\"; filename=\"batch{extension}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    );
    let failed =
        |e: serde_json::Error| Error::internal("the metadata could not be written").caused_by(e);
    let (mut before, memory) = match planned.entries.len() > DESCRIBED_HERE {
        true => {
            let mut json = Length::default();
            serde_json::to_writer(&mut json, &metadata).map_err(failed)?;
            let bytes = head.len() + json.0 + tail.len();
            let memory = work.batcher.engine.budget().try_hold(bytes as u64);
            let memory =
                memory.map_err(|e| e.context("the batch was refused before its answer"))?;
            (Vec::with_capacity(bytes), Some(memory))
        }
        false => (Vec::new(), None),
    };
    before.extend_from_slice(head.as_bytes());
    serde_json::to_writer(&mut before, &metadata).map_err(failed)?;
    before.extend_from_slice(tail.as_bytes());
    Ok(Parts {
        content_type: format!("multipart/mixed; boundary={boundary}"),
        before: match memory {
            Some(memory) => Bytes::from_owner(Held(before, memory)),
            None => before.into(),
        },
        after: format!("\r\n--{boundary}--\r\n").into(),
    })
}

/// Counts what is written.
#[derive(Default)]
struct Length(usize);

impl io::Write for Length {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0 += data.len();
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes with the memory that they take, until they are sent.
struct Held(
    Vec<u8>,
    #[allow(dead_code, reason = "it is given back when it is dropped")] Reservation,
);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn entry_metadata<'a>(entry: &'a Entry, planned: &Result<EntryHeader>) -> EntryMetadata<'a> {
    EntryMetadata {
        objname: entry.name.key(),
        archpath: entry.member.as_deref(),
        bucket: entry.name.bucket(),
        provider: match &*entry.provider {
            "" => "ais",
            named => named,
        },
        opaque: entry.opaque.as_deref(),
        err_msg: planned.as_ref().err().map(Error::describe),
        size: planned.as_ref().map_or(0, |h| h.size),
    }
}
