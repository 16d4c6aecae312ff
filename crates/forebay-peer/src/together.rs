//! Many small entries of a batch, asked for and answered together.
//!
//! One message names the entries; the answers come in its order, many in a message
//! ([`Kind::Entries`]), one after the other without gaps, little endian:
//!
//! ```text
//!  0  what u8    1  hot u8     2  version bytes u16    4  data bytes u32    8  age seconds u32
//! 12  tag u32, version, data
//! ```
//!
//! The tag is the checksum of the question's message, plus the entry's place in the question, so
//! that no entry is taken for another one. It is there if the question asks for it: nodes of earlier
//! releases do not know it.
//!
//! `what` is 0 for an entry that is to be asked for by itself, 1 for bytes of the version that was
//! named, 2 for an object in its current version, whose description precedes its bytes as the store
//! writes it. `hot` is 1 if many ask for the entry's unit (`hot.rs`), and the asker wants to know; else
//! 0. The answer ends when the bytes would be more than the asker has room for.
//!
//! Whoever is asked brings what is cold to its disk, some entries ahead of the one whose turn it is,
//! and holds one message at a time.
//!
//! Invariants: as in `message.rs`, no length that is read is trusted: an answer never has more
//! entries, nor more bytes, than were asked for. Each message has an entry, and all of them come
//! within a time that goes by their bytes: so an answer ends, whatever a node sends.

use crate::{
    answer::{sent, working},
    cluster::Cluster,
    hedge::{Heard, Timed, unless_slow},
    link::{Asking, Failure, Io, Peer},
    message::{
        ENTRIES_MAX_BYTES, Kind, Message, TAG_BYTES, TOGETHER_MAX_BYTES, Version, say_bytes,
        say_nothing,
    },
};
use bytes::{Buf, BufMut, Bytes};
use forebay_cluster::Unit;
use forebay_core::{Error, ObjectMeta, ObjectName, Result, request};
use forebay_engine::{
    Answers, Appended, Engine, GATHERED_ENTRY_MAX_BYTES, Gathered, Wait, Wanted, WantedBytes,
};
use forebay_store::{decode_meta, encode_meta};
use futures::{FutureExt, StreamExt, stream};
use serde::{Deserialize, Serialize};
use std::{collections::VecDeque, io, ops::Range, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::OwnedSemaphorePermit,
};

/// A message with answers goes out when it has so many bytes.
const MESSAGE_BYTES: usize = 256 << 10;
/// So many entries that are not here are brought ahead of the one whose turn it is.
const AHEAD: usize = 128;
/// What one entry has besides its name, at most, in a question.
const QUESTION_REST_BYTES: usize = 512;

const ENTRY_HEADER_BYTES: usize = 12;
const ALONE: u8 = 0;
const OF_VERSION: u8 = 1;
const CURRENT: u8 = 2;
/// Where a header says that many ask for the unit, and how.
const HOT_AT: usize = 1;
const HOT: u8 = 1;

/// Many questions at once.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Together {
    /// Of the map that the asker goes by.
    epoch: u64,
    /// The asker has room for so many bytes of objects.
    most_bytes: u64,
    /// The id of the request that they are asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Arc<str>>,
    /// The asker wants to know which entries are hot; earlier releases do not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    hints: bool,
    /// Entries are to have tags.
    #[serde(default)]
    tags: bool,
    wanted: Vec<One>,
}

impl Together {
    /// Bucket and key of the first entry.
    pub fn first(&self) -> (&str, &str) {
        let first = self.wanted.first();
        first.map_or(("", ""), |one| (&one.bucket, &one.key))
    }

    /// What is asked for.
    ///
    /// # Errors
    /// `Invalid` if one of the questions makes no sense.
    pub fn into_wanted(self) -> Result<Vec<Wanted>> {
        self.wanted.into_iter().map(One::wanted).collect()
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct One {
    bucket: String,
    key: String,
    /// These bytes of this version; otherwise all, in the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes: Option<(Version, Range<u64>)>,
}

impl One {
    fn of(wanted: &Wanted) -> One {
        One {
            bucket: wanted.name.bucket().to_owned(),
            key: wanted.name.key().to_owned(),
            bytes: match &wanted.bytes {
                WantedBytes::Current => None,
                WantedBytes::Version(meta, range) => Some((Version::of(meta), range.clone())),
            },
        }
    }

    /// How long it may be in a question; texts may be escaped.
    fn longest(wanted: &Wanted) -> usize {
        let etag = match &wanted.bytes {
            WantedBytes::Current => 0,
            WantedBytes::Version(meta, _) => meta.etag.as_ref().map_or(0, String::len),
        };
        QUESTION_REST_BYTES + 6 * (wanted.name.bucket().len() + wanted.name.key().len() + etag)
    }

    fn wanted(self) -> Result<Wanted> {
        let name = ObjectName::new(self.bucket, self.key)?;
        let bytes = match self.bytes {
            None => WantedBytes::Current,
            Some((version, range)) if range.start <= range.end && range.end <= version.size => {
                WantedBytes::Version(version.meta(), range)
            }
            Some((_, range)) => {
                return Err(Error::invalid(format!(
                    "bytes {range:?} of {name} were asked for"
                )));
            }
        };
        Ok(Wanted { name, bytes })
    }
}

/// Asks a node.
pub(crate) fn ask(
    cluster: &Arc<Cluster>,
    node: u64,
    mut wanted: Vec<Wanted>,
    most_bytes: u64,
) -> Answers {
    let Some((peer, epoch)) = cluster.peer(node) else {
        let e = Error::origin_unavailable(format!("node {node:016x} has left the cluster"));
        return stream::once(async { Err(e) }).boxed();
    };
    // The rest is asked for again.
    let mut length = QUESTION_REST_BYTES;
    let fitting = wanted.iter().take_while(|one| {
        length += One::longest(one);
        length <= TOGETHER_MAX_BYTES
    });
    wanted.truncate(fitting.count());
    let question = Together {
        epoch,
        most_bytes,
        request: request::current(),
        hints: true,
        tags: true,
        wanted: wanted.iter().map(One::of).collect(),
    };
    let cluster = cluster.clone();
    let arriving = async move {
        let heard = Heard::default();
        let timed = Timed::of_many(peer.clone(), heard.clone());
        let measured = (Some(timed), heard.clone());
        let asking = peer.begin(Kind::Together, &question, true, measured);
        let late = || {
            let what = format!("node {:016x} is slow: others are asked", peer.id);
            Err(Failure::Silent(Error::busy(what)))
        };
        let begun = unless_slow(&peer, &heard, asking).await;
        match begun.unwrap_or_else(late) {
            Ok(Asking {
                io,
                first,
                of,
                tags,
                seat,
                timed,
                heard,
            }) => Ok(Arriving {
                heard: {
                    Timed::begins(timed);
                    heard
                },
                patience: peer.patience(most_bytes),
                peer,
                io,
                cluster,
                next: Some(first),
                tag: tags.then_some(of),
                left: wanted.iter().map(unit_of).collect(),
                left_bytes: most_bytes,
                _seat: seat,
            }),
            Err(Failure::Refused(e) | Failure::Silent(e)) => Err(e),
        }
    };
    stream::once(arriving)
        .flat_map(|arriving| match arriving {
            Ok(arriving) => arriving.into_answers(),
            Err(e) => stream::once(async { Err(e) }).boxed(),
        })
        .boxed()
}

/// Answers on their way.
struct Arriving {
    peer: Arc<Peer>,
    cluster: Arc<Cluster>,
    io: Box<dyn Io>,
    /// A message that came already.
    next: Option<Message>,
    /// How long it is waited for.
    patience: Duration,
    /// Of the next entry, if they have any.
    tag: Option<u32>,
    /// The units of the entries that are not answered, which may have so many bytes.
    left: VecDeque<Unit>,
    left_bytes: u64,
    heard: Heard,
    _seat: OwnedSemaphorePermit,
}

impl Arriving {
    fn into_answers(self) -> Answers {
        stream::try_unfold(Some(self), |arriving| async move {
            let Some(mut arriving) = arriving else {
                return Ok(None);
            };
            let message = match arriving.next.take() {
                Some(message) => message,
                None => {
                    let Arriving {
                        peer,
                        io,
                        patience,
                        heard,
                        ..
                    } = &mut arriving;
                    let next = peer.next(io, patience, heard).await;
                    next.map_err(|e| arriving.broken(e))?
                }
            };
            match message.kind {
                Kind::Entries => {
                    let entries = arriving.entries(message.payload);
                    let entries = entries.map_err(|e| arriving.broken(e))?;
                    Ok(Some((entries, Some(arriving))))
                }
                Kind::End => {
                    arriving.peer.keep(arriving.io);
                    Ok(None)
                }
                Kind::Failed => Err(message.error()),
                kind => Err(arriving.broken(format_args!("it answered with a {kind:?}"))),
            }
        })
        .boxed()
    }

    fn broken(&self, what: impl std::fmt::Display) -> Error {
        match self.peer.gives_up(what) {
            Failure::Silent(e) | Failure::Refused(e) => e,
        }
    }

    fn entries(&mut self, mut payload: Bytes) -> Result<Vec<Gathered>> {
        if payload.is_empty() {
            // It would be a sign of life, again and again.
            return Err(Error::corrupt("it sent a message without an entry"));
        }
        let before = self.left_bytes;
        let mut entries = Vec::new();
        while !payload.is_empty() {
            let Came { entry, bytes, hot } = entry_of(&mut payload, self.tag)?;
            self.tag = self.tag.map(|tag| tag.wrapping_add(1));
            let unit = self.left.pop_front();
            let left_bytes = self.left_bytes.checked_sub(bytes);
            let (Some(unit), Some(left_bytes)) = (unit, left_bytes) else {
                return Err(Error::corrupt("it sent more than it was asked for"));
            };
            self.left_bytes = left_bytes;
            if hot {
                self.cluster.learns_hot(unit);
            }
            entries.push(entry);
        }
        self.peer.gathered(entries.len(), before - self.left_bytes);
        Ok(entries)
    }
}

/// The unit that an entry lies in; of one that crosses into the next, where it begins.
fn unit_of(wanted: &Wanted) -> Unit {
    let at = match &wanted.bytes {
        WantedBytes::Current => 0,
        WantedBytes::Version(_, range) => range.start,
    };
    Unit::at(wanted.name.hash128(), at)
}

/// An entry as it came.
pub(crate) struct Came {
    pub entry: Gathered,
    pub bytes: u64,
    /// Many ask for its unit.
    pub hot: bool,
}

/// The next entry of a message, which is to have this tag.
pub(crate) fn entry_of(payload: &mut Bytes, tag: Option<u32>) -> Result<Came> {
    let corrupt = |what: &str| Error::corrupt(format!("an entry that it sent {what}"));
    if payload.len() < ENTRY_HEADER_BYTES + tag.map_or(0, |_| TAG_BYTES) {
        return Err(corrupt("is cut"));
    }
    let (what, hot) = (payload.get_u8(), payload.get_u8());
    let (version_bytes, data_bytes) =
        (payload.get_u16_le() as usize, payload.get_u32_le() as usize);
    let age = payload.get_u32_le();
    if tag.is_some_and(|tag| payload.get_u32_le() != tag) {
        return Err(corrupt("is not the one whose turn it is"));
    }
    if hot > HOT || payload.len() < version_bytes || payload.len() - version_bytes < data_bytes {
        return Err(corrupt("is cut"));
    }
    let version = payload.split_to(version_bytes);
    let data = payload.split_to(data_bytes);
    let entry = match what {
        ALONE if version_bytes == 0 && data_bytes == 0 => Gathered::Alone,
        OF_VERSION if version_bytes == 0 => Gathered::Bytes {
            current: None,
            data,
        },
        CURRENT => {
            let meta = decode_meta(&version).filter(|meta| meta.size == data_bytes as u64);
            let meta = meta.ok_or_else(|| corrupt("has another description"))?;
            Gathered::Bytes {
                current: Some((Arc::new(meta), age)),
                data,
            }
        }
        _ => return Err(corrupt(&format!("is a {what}"))),
    };
    Ok(Came {
        entry,
        bytes: data_bytes as u64,
        hot: hot == HOT,
    })
}

fn put_header(
    out: &mut Vec<u8>,
    tag: Option<u32>,
    what: u8,
    current: Option<(&ObjectMeta, u32)>,
    data_bytes: u64,
) -> bool {
    let version = current
        .map(|(meta, _)| encode_meta(meta))
        .unwrap_or_default();
    let (Ok(version_bytes), Ok(data_bytes)) =
        (u16::try_from(version.len()), u32::try_from(data_bytes))
    else {
        return false;
    };
    out.put_u8(what);
    out.put_u8(0);
    out.put_u16_le(version_bytes);
    out.put_u32_le(data_bytes);
    out.put_u32_le(current.map_or(0, |(_, age)| age));
    if let Some(tag) = tag {
        out.put_u32_le(tag);
    }
    out.extend_from_slice(&version);
    true
}

/// Answers many questions, and counts the bytes.
///
/// # Errors
/// If the connection breaks. The inner error is for questions that make no sense.
pub(crate) async fn answer(
    cluster: &Cluster,
    engine: &Engine,
    io: &mut (impl AsyncWrite + Unpin),
    (questions, of): (Together, u32),
    bytes: &mut u64,
) -> io::Result<Result<()>> {
    let mut tag = questions.tags.then_some(of);
    let (most_bytes, hints) = (questions.most_bytes, questions.hints);
    let wanted = match questions.into_wanted() {
        Ok(wanted) => wanted,
        Err(e) => return Ok(Err(e)),
    };
    let first = wanted.first();
    let is_first_cold = first.is_some_and(|one| !engine.is_here_for_peer(one));
    // What fails here is asked for by itself, and fails in words.
    let mut ahead = stream::iter(wanted)
        .map(|one| async move {
            if !engine.is_here_for_peer(&one)
                && let Err(e) = engine.bring_for_peer(&one).await
            {
                tracing::debug!(object = %one.name, error = %e.describe(), "not brought for \
                    another node");
            }
            one
        })
        .buffered(AHEAD);
    let mut message = Vec::new();
    let mut left = most_bytes;
    if is_first_cold {
        // It is not this node that is slow.
        sent(say_nothing(io, Kind::Working)).await?;
        sent(io.flush()).await?;
    }
    loop {
        let next = match ahead.next().now_or_never() {
            Some(next) => next,
            None => {
                flush(io, &mut message).await?;
                sent(io.flush()).await?;
                working(io, ahead.next()).await?
            }
        };
        let Some(mut one) = next else {
            break;
        };
        if message.capacity() == 0 {
            message.reserve(MESSAGE_BYTES + (64 << 10));
        }
        let at = message.len();
        let size = match append(engine, &one, tag, Wait::MustNot, &mut message) {
            Appended::Waits => {
                let (engine, mut some) = (engine.clone(), std::mem::take(&mut message));
                let appending = tokio::task::spawn_blocking(move || {
                    let appended = append(&engine, &one, tag, Wait::May, &mut some);
                    (appended, some, one)
                });
                let done = working(io, appending).await?.map_err(io::Error::other)?;
                let appended;
                (appended, message, one) = done;
                appended
            }
            appended => appended,
        };
        match size {
            Appended::Done(header) if header.size <= left => {
                left -= header.size;
                *bytes += header.size;
                let is_hot = sends(cluster, engine, &one, header.size);
                if is_hot && hints {
                    message[at + HOT_AT] = HOT;
                }
            }
            Appended::Done(_) if left < most_bytes => {
                // The next question has room for it.
                message.truncate(at);
                break;
            }
            _ => {
                message.truncate(at);
                put_header(&mut message, tag, ALONE, None, 0);
            }
        }
        tag = tag.map(|tag| tag.wrapping_add(1));
        if message.len() >= MESSAGE_BYTES {
            flush(io, &mut message).await?;
        }
    }
    flush(io, &mut message).await?;
    sent(say_nothing(io, Kind::End)).await?;
    Ok(Ok(()))
}

/// So many bytes of an entry are sent; whether its unit is hot ([`Cluster::sends`]).
fn sends(cluster: &Cluster, engine: &Engine, asked: &Wanted, bytes: u64) -> bool {
    match &asked.bytes {
        // It was here a moment ago, whole.
        WantedBytes::Current => cluster.sends_object(&asked.name, bytes),
        WantedBytes::Version(meta, range) => {
            cluster.sends(engine, &asked.name, meta, range.start, bytes)
        }
    }
}

/// Appends the answer for one entry, if it is here and small enough.
fn append(
    engine: &Engine,
    wanted: &Wanted,
    tag: Option<u32>,
    wait: Wait,
    message: &mut Vec<u8>,
) -> Appended {
    let mut fits = true;
    let mut before = |current: Option<(&ObjectMeta, u32)>, size, out: &mut Vec<u8>| {
        let what = if current.is_some() {
            CURRENT
        } else {
            OF_VERSION
        };
        fits = put_header(out, tag, what, current, size);
    };
    let appended =
        engine.append_for_peer(wanted, GATHERED_ENTRY_MAX_BYTES, wait, message, &mut before);
    if fits { appended } else { Appended::Cold }
}

async fn flush(io: &mut (impl AsyncWrite + Unpin), message: &mut Vec<u8>) -> io::Result<()> {
    if !message.is_empty() {
        debug_assert!(message.len() <= ENTRIES_MAX_BYTES);
        sent(say_bytes(io, Kind::Entries, message)).await?;
        message.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::Attributes;
    use forebay_testing::engine::noise;

    fn meta(size: u64) -> ObjectMeta {
        ObjectMeta {
            size,
            etag: Some("\"e\"".into()),
            last_modified_ms: 7,
            attributes: Attributes::default(),
        }
    }

    /// A message with one entry of each kind.
    fn message(tag: Option<u32>) -> Vec<u8> {
        let mut out = Vec::new();
        let after = |n| tag.map(|tag| tag.wrapping_add(n));
        put_header(&mut out, after(0), CURRENT, Some((&meta(3), 9)), 3);
        out.extend_from_slice(b"abc");
        put_header(&mut out, after(1), ALONE, None, 0);
        put_header(&mut out, after(2), OF_VERSION, None, 2);
        out.extend_from_slice(b"xy");
        out
    }

    fn all(payload: &[u8], mut tag: Option<u32>) -> Result<Vec<Gathered>> {
        let mut payload = Bytes::copy_from_slice(payload);
        let mut entries = Vec::new();
        while !payload.is_empty() {
            entries.push(entry_of(&mut payload, tag)?.entry);
            tag = tag.map(|tag| tag.wrapping_add(1));
        }
        Ok(entries)
    }

    #[test]
    fn entries_arrive_as_they_were_sent() {
        // Those of an earlier release have no tags.
        let untagged = all(&message(None), None).unwrap();
        let entries = all(&message(Some(u32::MAX)), Some(u32::MAX)).unwrap();
        assert_eq!(format!("{untagged:?}"), format!("{entries:?}"));
        let Gathered::Bytes { current, data } = &entries[0] else {
            panic!("{entries:?}");
        };
        assert_eq!(
            (current, &data[..]),
            (&Some((Arc::new(meta(3)), 9)), &b"abc"[..])
        );
        assert!(matches!(entries[1], Gathered::Alone));
        assert!(
            matches!(&entries[2], Gathered::Bytes { current: None, data } if &data[..] == b"xy")
        );
        assert_eq!(entries.len(), 3);
    }

    #[test]
    fn a_message_that_is_cut_or_of_anything_else_is_an_error_and_never_a_panic() {
        let whole = message(Some(7));
        let all = |payload: &[u8]| all(payload, Some(7));
        assert!(super::tests::all(&whole, Some(8)).is_err());
        // Between two entries it ends well.
        let ends: Vec<usize> = (1..whole.len())
            .filter(|&n| all(&whole[..n]).is_ok())
            .collect();
        assert_eq!(ends.len(), 2, "{ends:?}");
        for seed in 0..2000 {
            let mut changed = whole.clone();
            for (at, byte) in noise(4, seed).into_iter().zip(noise(4, !seed)) {
                let n = changed.len();
                changed[usize::from(at) % n] = byte;
            }
            let _ = all(&changed);
            let _ = all(&noise(seed as usize % 90, seed));
        }
        for (what, of) in [(3, None), (ALONE, Some(meta(2))), (CURRENT, Some(meta(3)))] {
            let mut lie = Vec::new();
            put_header(
                &mut lie,
                Some(7),
                what,
                of.as_ref().map(|meta| (meta, 0)),
                2,
            );
            lie.extend_from_slice(b"xy");
            assert!(all(&lie).is_err(), "{what}");
        }
    }

    #[test]
    fn questions_fit_their_message_and_name_what_is_wanted() {
        let wanted = Wanted {
            name: ObjectName::new("bucket", "k\"\\".repeat(300)).unwrap(),
            bytes: WantedBytes::Version(Arc::new(meta(10)), 3..8),
        };
        let json = serde_json::to_string(&One::of(&wanted)).unwrap();
        assert!(json.len() <= One::longest(&wanted), "{}", json.len());
        let one: One = serde_json::from_str(&json).unwrap();
        assert_eq!(one.wanted().unwrap(), wanted);
        let outside = json.replace("\"end\":8", "\"end\":11");
        let one: One = serde_json::from_str(&outside).unwrap();
        assert!(one.wanted().is_err());
    }
}
