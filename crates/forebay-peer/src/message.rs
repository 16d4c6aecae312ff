//! What travels between two nodes.
//!
//! A message is a header of 12 bytes and a payload, little endian:
//!
//! ```text
//!  0  kind u8     1  zero [u8; 3]     4  payload bytes u32     8  CRC32C u32
//! ```
//!
//! The checksum is of the eight bytes before it, and of the payload. Both sides say [`Hello`]
//! first. Then one asks and the other answers, one question at a time: [`Kind::Found`], the bytes
//! in messages of [`Kind::Data`], and [`Kind::End`]; or [`Kind::Miss`]; or [`Kind::Failed`], which
//! may also cut the bytes short. [`Kind::Working`] may stand before any of these. Many small entries
//! are asked for in one message ([`Kind::Together`]), and come many in a message.
//!
//! An answer with bytes names the checksum of the message that asked for them. If that wants tags,
//! each message of bytes begins with one (u32): that checksum, plus the number of bytes up to its
//! end. So what nodes mix up or lose, or a connection brings late, is never taken for something else.
//!
//! Invariant: no length that is read is trusted before it is compared with its limit, and memory
//! grows with what has come.

use bytes::{Buf, Bytes};
use forebay_cluster::Member;
use forebay_core::{Error, ObjectMeta, ObjectName, Result, crc32c, crc32c_append};
use forebay_protocol::ErrorDocument;
use forebay_store::Walk;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{io, ops::Range, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufStream},
    time::{Instant, timeout_at},
};

/// Raised when a message changes its meaning.
pub(crate) const PROTOCOL: u32 = 1;
/// The most bytes of an object in one message.
pub(crate) const DATA_MAX_BYTES: usize = 256 << 10;
/// What may precede them.
pub(crate) const TAG_BYTES: usize = 4;
/// The longest message of any other kind. Attributes and names are shorter.
const WORDS_MAX_BYTES: usize = 64 << 10;
/// The longest list of questions.
pub(crate) const TOGETHER_MAX_BYTES: usize = 512 << 10;
/// The longest message with answers to them.
pub(crate) const ENTRIES_MAX_BYTES: usize = 1 << 20;
/// The longest text of an error that is sent whole.
const MESSAGE_MAX_BYTES: usize = 16 << 10;
const HEADER_BYTES: usize = 12;
/// Whoever has begun a message has all of it: one that comes slower than this is as bad as silence.
const SLOWEST_BYTES_PER_SEC: u64 = 128 << 10;

/// How long so many bytes may take.
pub(crate) fn slowest(bytes: u64) -> Duration {
    Duration::from_millis(bytes.saturating_mul(1000) / SLOWEST_BYTES_PER_SEC)
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// [`Hello`].
    Hello,
    /// [`Question`].
    Question,
    /// [`Found`]; the bytes follow.
    Found,
    /// It is not there. Nothing follows.
    Miss,
    /// Bytes.
    Data,
    /// Nothing follows, and nothing is missing.
    End,
    /// An [`ErrorDocument`]. Nothing follows.
    Failed,
    /// The answer is not there yet.
    Working,
    /// [`crate::together::Together`]: many questions at once.
    Together,
    /// Answers to some of these, in their order; [`Kind::End`] follows the last.
    Entries,
}

impl Kind {
    const ALL: [Kind; 10] = [
        Kind::Hello,
        Kind::Question,
        Kind::Found,
        Kind::Miss,
        Kind::Data,
        Kind::End,
        Kind::Failed,
        Kind::Working,
        Kind::Together,
        Kind::Entries,
    ];

    fn code(self) -> u8 {
        self as u8 + 1
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    fn longest(self) -> usize {
        match self {
            Kind::Data => TAG_BYTES + DATA_MAX_BYTES,
            Kind::Together => TOGETHER_MAX_BYTES,
            Kind::Entries => ENTRIES_MAX_BYTES,
            Kind::Hello | Kind::Question | Kind::Found | Kind::Failed => WORDS_MAX_BYTES,
            Kind::Miss | Kind::End | Kind::Working => 0,
        }
    }
}

/// Who speaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    pub cluster: String,
    /// The node's id.
    pub node: u64,
    /// New at each start of the node.
    pub boot: u64,
    /// How it wants to be in the map; earlier releases do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<Member>,
    /// It takes [`Kind::Together`]; earlier releases do not.
    #[serde(default)]
    pub gathers: bool,
    /// It answers [`What::Copies`]; earlier releases do not.
    #[serde(default)]
    pub copies: bool,
    /// Its answers say which question they are for; those of earlier releases do not.
    #[serde(default)]
    pub tags: bool,
    /// It says [`Kind::Working`] at once if it has to fetch what it is asked for; earlier releases
    /// do not.
    #[serde(default)]
    pub fetches: bool,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Question {
    /// Of the map that the asker goes by.
    pub epoch: u64,
    pub bucket: String,
    pub key: String,
    pub what: What,
    /// The id of the request that it is asked for; earlier releases neither say nor know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Arc<str>>,
    /// Bytes are to have tags; earlier releases do not know them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tags: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// These bytes of this version, if they are there.
    Here { version: Version, range: Range<u64> },
    /// These bytes of this version; fetch them if they are not there.
    Fetch { version: Version, range: Range<u64> },
    /// Which version is current, by the bucket's freshness rule, and which of these bytes it has.
    Current { range: Range<u64> },
    /// The same, without asking anybody: a miss if the version that is known here is not fresh by the
    /// bucket's rule.
    CurrentHere { range: Range<u64> },
    /// The object was written: forget which version is current.
    Written,
    /// What an operator wants of the node; bucket and key are empty. What the order is, the two
    /// servers know ([`crate::Operator`]).
    Operate { order: serde_json::Value },
    /// The asker is in this term of its own: it wants to be told of writes. The question names no
    /// object.
    Announce { term: u64, lease: i64 },
    /// These names were written, by these writes; the asker's writes before `over_below` were told
    /// to everybody. The question names no object.
    Told {
        over_below: u64,
        names: Vec<(u64, String, String)>,
    },
    /// The asker stops, and answers from no head any more. The question names no object.
    Left,
    /// Of no object: what the asker owns by the table with this checksum, and who is asked had
    /// before; from here on. The answer is [`Pulled`].
    Pull { table: u64, after: Option<Walk> },
    /// Of no object: the asker has all that [`What::Pull`] gives by this table. The question's epoch is
    /// that of the map with this table by which the asker took it over.
    Released { table: u64 },
    /// Of no object: how far the hand-over of slots is. The answer is [`Moving`].
    Moving,
    /// Of no object: which entries of those that the asker and who is asked are both to keep are
    /// here, by the table with this checksum and the numbers of copies with this one; from here on.
    /// The answer is [`Pulled`], with [`Entry`]s as JSON.
    Copies {
        table: u64,
        rules: u64,
        after: Option<Walk>,
    },
    /// Of no object: the first of these entries. The answer is [`Pulled`], whose `looked` says how
    /// many were looked for.
    Copy { entries: Vec<Entry> },
}

/// An entry of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    #[serde(rename = "b")]
    pub bucket: String,
    #[serde(rename = "k")]
    pub key: String,
    #[serde(rename = "v")]
    pub version: u64,
    /// Which chunk; `None`: the head.
    #[serde(rename = "c", default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<u32>,
}

/// What tells one version from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Version {
    pub size: u64,
    pub etag: Option<String>,
    pub last_modified_ms: i64,
}

impl Version {
    pub fn of(meta: &ObjectMeta) -> Self {
        Version {
            size: meta.size,
            etag: meta.etag.clone(),
            last_modified_ms: meta.last_modified_ms,
        }
    }

    pub fn meta(self) -> Arc<ObjectMeta> {
        Arc::new(ObjectMeta {
            size: self.size,
            etag: self.etag,
            last_modified_ms: self.last_modified_ms,
            attributes: forebay_core::Attributes::default(),
        })
    }
}

/// What is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// For [`What::Current`]: the version, and how many seconds ago it was known to be current.
    pub current: Option<(ObjectMeta, u32)>,
    /// Which bytes follow.
    pub range: Range<u64>,
    /// Many ask for this unit (`hot.rs`); earlier releases neither say nor know it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hot: bool,
    /// The checksum of the question's message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<u32>,
}

impl What {
    /// As it is called in logs.
    pub fn word(&self) -> &'static str {
        match self {
            What::Here { .. } => "here",
            What::Fetch { .. } => "fetch",
            What::Current { .. } => "current",
            What::CurrentHere { .. } => "current_here",
            What::Written => "written",
            What::Operate { .. } => "operate",
            What::Announce { .. } => "announce",
            What::Told { .. } => "told",
            What::Left => "left",
            What::Pull { .. } => "pull",
            What::Released { .. } => "released",
            What::Moving => "moving",
            What::Copies { .. } => "copies",
            What::Copy { .. } => "copy",
        }
    }
}

/// Entries that follow, packed (`packed.rs`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pulled {
    /// Bytes that follow.
    pub bytes: u64,
    /// Entries in them.
    pub entries: u64,
    /// Where the next ones begin; `None`: there are none.
    pub next: Option<Walk>,
    /// Bytes of the log that are left to be looked at.
    pub left: u64,
    /// For [`What::Copies`], at the end: where to go on later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<Walk>,
    /// For [`What::Copy`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub looked: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// How far the hand-over of slots is at a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Moving {
    /// Of the map that it goes by.
    pub epoch: u64,
    pub gaining_slots: u64,
    pub losing_slots: u64,
    pub pulled_bytes: u64,
    pub left_secs: Option<u64>,
    pub is_full: bool,
}

impl Question {
    /// The object that is asked for.
    ///
    /// # Errors
    /// `Invalid` for a name that no object has.
    pub fn name(&self) -> Result<ObjectName> {
        ObjectName::new(self.bucket.as_str(), self.key.as_str())
    }

    /// Whether it is asked of no object.
    pub fn is_of_slots(&self) -> bool {
        matches!(
            self.what,
            What::Pull { .. }
                | What::Released { .. }
                | What::Moving
                | What::Copies { .. }
                | What::Copy { .. }
        )
    }
}

/// A message as it came.
#[derive(Debug)]
pub(crate) struct Message {
    pub kind: Kind,
    pub payload: Bytes,
    /// Its checksum, by which an answer says which question it is for.
    pub crc: u32,
}

impl Message {
    /// # Errors
    /// `Corrupt` if the payload is not that.
    pub fn words<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.payload).map_err(|e| {
            Error::corrupt(format!("a node sent a {:?} that is none: {e}", self.kind))
                .hint("do all nodes of the cluster run releases that understand each other?")
        })
    }

    /// The error that a [`Kind::Failed`] holds.
    pub fn error(&self) -> Error {
        match self.words::<ErrorDocument>() {
            Ok(document) => document.to_error(),
            Err(e) => e,
        }
    }
}

/// Bytes that a connection holds back, so that a small answer is one write, and one read.
const WRITE_BUFFER_BYTES: usize = 16 << 10;
const READ_BUFFER_BYTES: usize = 8 << 10;

/// The same connection with buffers: what is said goes out with the next `flush`.
pub(crate) fn buffered<S: AsyncRead + AsyncWrite>(io: S) -> BufStream<S> {
    BufStream::with_capacity(READ_BUFFER_BYTES, WRITE_BUFFER_BYTES, io)
}

/// Says a message whose payload is text.
pub(crate) async fn say<T: Serialize>(
    io: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    words: &T,
) -> io::Result<()> {
    io.write_all(&said(kind, words)?.0).await
}

/// A message whose payload is text, as it goes over the wire, and its checksum.
pub(crate) fn said<T: Serialize>(kind: Kind, words: &T) -> io::Result<(Vec<u8>, u32)> {
    let payload = serde_json::to_vec(words)?;
    if payload.len() > kind.longest() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a {kind:?} of {} bytes is too long", payload.len()),
        ));
    }
    let header = header(kind, &[&payload]);
    let crc = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    Ok(([&header[..], &payload].concat(), crc))
}

/// Says an error, without its causes if it is too long.
pub(crate) async fn say_failed(io: &mut (impl AsyncWrite + Unpin), e: &Error) -> io::Result<()> {
    let mut document = ErrorDocument::of(e);
    if document.message.len() > MESSAGE_MAX_BYTES {
        document.message = document
            .message
            .chars()
            .take(MESSAGE_MAX_BYTES / 4)
            .collect();
    }
    say(io, Kind::Failed, &document).await
}

/// Says a message without a payload.
pub(crate) async fn say_nothing(io: &mut (impl AsyncWrite + Unpin), kind: Kind) -> io::Result<()> {
    io.write_all(&header(kind, &[])).await
}

/// Says bytes, at most [`DATA_MAX_BYTES`] of them, after their tag.
pub(crate) async fn say_data(
    io: &mut (impl AsyncWrite + Unpin),
    tag: Option<u32>,
    data: &[u8],
) -> io::Result<()> {
    let tag = tag.map(u32::to_le_bytes);
    let tag = tag.as_ref().map_or(&[][..], |tag| tag);
    let header = header(Kind::Data, &[tag, data]);
    let mut all = Buf::chain(&header[..], Buf::chain(tag, data));
    io.write_all_buf(&mut all).await
}

/// Says bytes, at most as many as the kind allows.
pub(crate) async fn say_bytes(
    io: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    data: &[u8],
) -> io::Result<()> {
    let header = header(kind, &[data]);
    let mut both = Buf::chain(&header[..], data);
    io.write_all_buf(&mut both).await
}

fn header(kind: Kind, payload: &[&[u8]]) -> [u8; HEADER_BYTES] {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    let mut header = [0; HEADER_BYTES];
    header[0] = kind.code();
    // What is longer than its kind's limit was refused, or cut.
    header[4..8].copy_from_slice(&(length as u32).to_le_bytes());
    let before = crc32c(&header[..8]);
    let crc = payload
        .iter()
        .fold(before, |crc, part| crc32c_append(crc, part));
    header[8..].copy_from_slice(&crc.to_le_bytes());
    header
}

/// The next message; `None` if the connection ended before it. Waits for the first byte no longer
/// than `patience`. From then on, what has come must never be further behind
/// [`SLOWEST_BYTES_PER_SEC`] than by that time: so one that trickles is given up at once, however long
/// it is.
pub(crate) async fn hear(
    io: &mut (impl AsyncRead + Unpin),
    patience: Duration,
) -> io::Result<Option<Message>> {
    hear_later(io, patience, patience).await
}

/// The same, if the first byte may come as late as `first`.
pub(crate) async fn hear_later(
    io: &mut (impl AsyncRead + Unpin),
    first: Duration,
    patience: Duration,
) -> io::Result<Option<Message>> {
    let corrupt = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut header = Vec::with_capacity(HEADER_BYTES);
    let mut pace = Pace {
        patience: first,
        began: Instant::now(),
        read: 0,
    };
    pace.read_to(io, &mut header, 1).await?;
    if header.is_empty() {
        return Ok(None);
    }
    (pace.began, pace.patience) = (Instant::now(), patience);
    pace.read_to(io, &mut header, HEADER_BYTES).await?;
    if header.len() < HEADER_BYTES {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let kind = Kind::from_code(header[0])
        .filter(|_| header[1..4] == [0; 3])
        .ok_or_else(|| corrupt(format!("a message begins with {:02x?}", &header[..4])))?;
    let length = word(4) as usize;
    if length > kind.longest() {
        return Err(corrupt(format!("a {kind:?} announces {length} bytes")));
    }
    let mut payload = Vec::with_capacity(length);
    pace.read_to(io, &mut payload, length).await?;
    if payload.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let crc = word(8);
    if crc32c_append(crc32c(&header[..8]), &payload) != crc {
        return Err(corrupt(format!("a {kind:?} does not match its checksum")));
    }
    Ok(Some(Message {
        kind,
        payload: payload.into(),
        crc,
    }))
}

/// How a message comes.
struct Pace {
    patience: Duration,
    /// When its first byte had come, or was first waited for.
    began: Instant,
    /// Bytes that have come.
    read: u64,
}

impl Pace {
    /// Reads until there are so many bytes, or no more.
    async fn read_to(
        &mut self,
        io: &mut (impl AsyncRead + Unpin),
        out: &mut Vec<u8>,
        length: usize,
    ) -> io::Result<()> {
        while out.len() < length {
            let mut rest = (&mut *io).take((length - out.len()) as u64);
            let until = self.began + self.patience + slowest(self.read);
            // A pause is none the better for what came before it.
            let until = until.min(Instant::now() + self.patience);
            let read = timeout_at(until, rest.read_buf(out)).await;
            let read = read.map_err(|_| {
                let what = match self.read {
                    0 => format!("no sign of life for {:?}", self.patience),
                    n => format!(
                        "{n} bytes of a message came within {:?}, and then no more in time",
                        self.began.elapsed()
                    ),
                };
                io::Error::new(io::ErrorKind::TimedOut, what)
            })??;
            if read == 0 {
                break;
            }
            self.read += read as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    async fn heard(bytes: &[u8]) -> io::Result<Option<Message>> {
        hear(&mut &bytes[..], PATIENCE).await
    }

    #[tokio::test]
    async fn messages_arrive_as_they_were_sent() {
        let question = Question {
            epoch: 7,
            bucket: "b".into(),
            key: "ключ\u{1}".into(),
            what: What::Fetch {
                version: Version {
                    size: 9,
                    etag: Some("\"e\"".into()),
                    last_modified_ms: -1,
                },
                range: 3..8,
            },
            request: Some("r-1".into()),
            tags: true,
        };
        let mut wire = Vec::new();
        say(&mut wire, Kind::Question, &question).await.unwrap();
        say_nothing(&mut wire, Kind::Working).await.unwrap();
        say_data(&mut wire, None, b"bytes").await.unwrap();
        let mut rest = &wire[..];
        let first = hear(&mut rest, PATIENCE).await.unwrap().unwrap();
        assert_eq!(first.words::<Question>().unwrap(), question);
        let second = hear(&mut rest, PATIENCE).await.unwrap().unwrap();
        assert_eq!((second.kind, second.payload.len()), (Kind::Working, 0));
        let third = hear(&mut rest, PATIENCE).await.unwrap().unwrap();
        assert_eq!(
            (third.kind, &third.payload[..]),
            (Kind::Data, &b"bytes"[..])
        );
        assert!(hear(&mut rest, PATIENCE).await.unwrap().is_none());
    }

    #[test]
    fn a_question_of_an_earlier_release_has_no_request() {
        let earlier = r#"{"epoch":1,"bucket":"b","key":"k","what":"written"}"#;
        let question: Question = serde_json::from_str(earlier).unwrap();
        assert_eq!(
            (question.request.clone(), question.what.word()),
            (None, "written")
        );
        assert_eq!(serde_json::to_string(&question).unwrap(), earlier);
    }

    #[tokio::test]
    async fn a_message_that_is_cut_or_changed_anywhere_is_an_error() {
        let mut wire = Vec::new();
        say_data(&mut wire, None, b"some bytes").await.unwrap();
        for cut in 1..wire.len() {
            assert!(heard(&wire[..cut]).await.is_err(), "cut at {cut}");
        }
        for at in 0..wire.len() {
            for bit in 0..8 {
                let mut changed = wire.clone();
                changed[at] ^= 1 << bit;
                let heard = heard(&changed).await;
                assert!(heard.is_err(), "bit {bit} of byte {at}: {heard:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_message_that_trickles_is_given_up_and_a_slow_one_is_not() {
        for (every, patience, comes) in [(300, 1, false), (10, 20, true)] {
            let (mut ours, mut theirs) = tokio::io::duplex(1);
            let mut wire = Vec::new();
            say_data(&mut wire, None, b"sixteen bytes...")
                .await
                .unwrap();
            tokio::spawn(async move {
                for byte in wire {
                    tokio::time::sleep(Duration::from_millis(every)).await;
                    let _ = theirs.write_all(&[byte]).await;
                }
            });
            let heard = hear(&mut ours, Duration::from_secs(patience)).await;
            match comes {
                true => assert_eq!(heard.unwrap().unwrap().payload.len(), 16),
                false => assert_eq!(heard.unwrap_err().kind(), io::ErrorKind::TimedOut),
            }
        }
    }

    #[tokio::test]
    async fn a_long_message_that_trickles_is_given_up_as_soon_as_a_short_one() {
        for every in [20, 100, 350] {
            let (mut ours, mut theirs) = tokio::io::duplex(64);
            let mut wire = Vec::new();
            let long = vec![7; DATA_MAX_BYTES];
            say_data(&mut wire, None, &long).await.unwrap();
            tokio::spawn(async move {
                let (first, rest) = wire.split_at(HEADER_BYTES);
                let _ = theirs.write_all(first).await;
                for byte in rest {
                    tokio::time::sleep(Duration::from_millis(every)).await;
                    let _ = theirs.write_all(&[*byte]).await;
                }
            });
            let (began, patience) = (Instant::now(), Duration::from_millis(400));
            let e = hear(&mut ours, patience).await.unwrap_err();
            let took = began.elapsed();
            assert_eq!(e.kind(), io::ErrorKind::TimedOut);
            // By the pauses between its bytes alone, it would go on for more than an hour.
            assert!(took < Duration::from_secs(20), "{took:?}: {e}");
        }
    }

    #[tokio::test]
    async fn no_message_takes_more_memory_than_its_kind_may() {
        for kind in Kind::ALL {
            let mut wire = header(kind, &[]);
            wire[4..8].copy_from_slice(&(kind.longest() as u32 + 1).to_le_bytes());
            assert!(heard(&wire).await.is_err());
        }
        let long = "x".repeat(WORDS_MAX_BYTES);
        assert!(say(&mut Vec::new(), Kind::Question, &long).await.is_err());
    }
}
