//! The connections to one peer, and whether it is worth asking now.
//!
//! A peer that does not answer is not asked again until it has said hello: [`Peer::probe`] tries
//! that now and then, so that no read waits for a node that is known to be silent.

use crate::hedge::{Heard, Quickness, Timed};
use crate::message::{
    Found, Hello, Kind, Message, Question, TAG_BYTES, What, buffered, hear, said, say, slowest,
};
use crate::resolve::connect;
use async_trait::async_trait;
use bytes::{Buf, Bytes};
use forebay_core::{
    Error, Histogram, HistogramSnapshot, Result,
    request::{self, Cost},
    sync::Mutex,
};
use forebay_engine::ByteStream;
use forebay_tls::PeerTls;
use futures::{FutureExt, StreamExt, stream};
use serde::Serialize;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// Connections that wait for the next question.
const IDLE_MAX: usize = 16;
/// Questions to one peer at a time.
const QUESTIONS_MAX: usize = 512;

/// A connection of any kind.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// How peers are connected to.
#[async_trait]
pub trait Dial: Send + Sync + 'static {
    /// Connects to the node that the map has at `address`.
    async fn dial(&self, node: u64, address: &str) -> io::Result<Box<dyn Io>>;
}

/// Plain TCP.
pub struct TcpDial;

#[async_trait]
impl Dial for TcpDial {
    async fn dial(&self, _node: u64, address: &str) -> io::Result<Box<dyn Io>> {
        let stream = connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

/// TCP, encrypted, between nodes that show certificates of the cluster's CA.
pub struct TlsDial(pub PeerTls);

#[async_trait]
impl Dial for TlsDial {
    async fn dial(&self, _node: u64, address: &str) -> io::Result<Box<dyn Io>> {
        let stream = connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(self.0.connect(stream).await?))
    }
}

/// How long peers are waited for.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// For a connection, and the hello on it.
    pub connect: Duration,
    /// For the next sign of life of a node that was asked.
    pub silence: Duration,
    /// For the first word of an answer, or the next bytes, though there are signs of life. All of
    /// it may take this and its bytes at 128 KiB a second.
    pub answer: Duration,
    /// How often peers that do not answer are tried again.
    pub probe: Duration,
    /// No answer is late, so that another source is asked as well, before this.
    pub late: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            connect: Duration::from_millis(500),
            silence: Duration::from_millis(400),
            answer: Duration::from_secs(60),
            probe: Duration::from_millis(500),
            late: Duration::from_millis(10),
        }
    }
}

/// What a peer has, and its bytes; `None` for a miss.
pub(crate) type Answer = Option<(Found, ByteStream)>;

/// How asking failed.
pub(crate) enum Failure {
    /// The peer answered with this error.
    Refused(Error),
    /// It did not answer, or not sensibly.
    Silent(Error),
}

/// A question whose answer has begun.
pub(crate) struct Asking {
    pub io: Box<dyn Io>,
    pub first: Message,
    /// The checksum of the question's message.
    pub of: u32,
    /// The answer says that it is for this one.
    pub tags: bool,
    pub seat: OwnedSemaphorePermit,
    /// How long it takes to its first bytes is measured.
    pub timed: Option<Timed>,
    pub heard: Heard,
}

/// One peer.
pub(crate) struct Peer {
    pub id: u64,
    /// The only start of it that is meant; `None`: any.
    boot: Option<u64>,
    pub address: String,
    me: Hello,
    dial: Arc<dyn Dial>,
    timing: Timing,
    idle: Mutex<Vec<Box<dyn Io>>>,
    silent: AtomicBool,
    /// It said that it takes many questions at once.
    gathers: AtomicBool,
    /// It said that its answers say which question they are for.
    tags: AtomicBool,
    /// It said that it says at once if it has to fetch something.
    fetches: AtomicBool,
    seats: Arc<Semaphore>,
    counts: Counts,
    quickness: Quickness,
}

impl Peer {
    pub fn new(id: u64, address: &str, me: Hello, dial: Arc<dyn Dial>, timing: Timing) -> Self {
        Peer {
            id,
            boot: None,
            address: address.to_owned(),
            me,
            dial,
            timing,
            idle: Mutex::default(),
            silent: AtomicBool::new(false),
            gathers: AtomicBool::new(false),
            tags: AtomicBool::new(false),
            fetches: AtomicBool::new(false),
            seats: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            counts: Counts::default(),
            quickness: Quickness::default(),
        }
    }

    /// The same, if only this start of it is meant.
    pub fn of_boot(self, boot: u64) -> Self {
        Peer {
            boot: Some(boot),
            ..self
        }
    }

    /// Whether it is worth asking now.
    pub fn answers(&self) -> bool {
        !self.silent.load(Relaxed)
    }

    /// Whether it is asked for what it has: it answers, and not much more slowly than others.
    pub fn is_quick(&self) -> bool {
        self.answers() && !self.quickness.is_alone()
    }

    pub fn quickness(&self) -> &Quickness {
        &self.quickness
    }

    /// Whether it says at once if it has to fetch something, as far as it has said so.
    pub fn says_that_it_fetches(&self) -> bool {
        self.fetches.load(Relaxed)
    }

    /// As if it had said hello.
    #[cfg(test)]
    pub fn said_that_it_fetches(&self) {
        self.fetches.store(true, Relaxed);
    }

    /// Whether it takes many questions at once, as far as it has said so.
    pub fn gathers(&self) -> bool {
        self.gathers.load(Relaxed)
    }

    /// How long an answer with so many bytes may take.
    pub fn patience(&self, bytes: u64) -> Duration {
        self.timing.answer + slowest(bytes)
    }

    /// So many entries came together, with so many bytes.
    pub fn gathered(&self, entries: usize, bytes: u64) {
        self.counts.gathered.fetch_add(entries as u64, Relaxed);
        self.counts.received_bytes.fetch_add(bytes, Relaxed);
        request::count(Cost::PeerBytes, bytes);
    }

    /// Says hello to a peer that did not answer.
    pub async fn probe(&self) {
        if let Ok(io) = self.connect().await {
            self.silent.store(false, Relaxed);
            self.keep(io);
            tracing::info!(node = format_args!("{:016x}", self.id), address = %self.address,
                "a node of the cluster answers again");
        }
    }

    fn failed(&self, what: &Error) {
        if !self.silent.swap(true, Relaxed) {
            self.counts.silences.fetch_add(1, Relaxed);
            tracing::warn!(node = format_args!("{:016x}", self.id), address = %self.address,
                error = %what, "a node of the cluster does not answer: others are asked");
        }
        // The peer may be gone from the other end of these too.
        self.idle.lock().clear();
    }

    pub(crate) fn gives_up(&self, what: impl std::fmt::Display) -> Failure {
        let error =
            Error::origin_unavailable(format!("node {:016x} at {}: {what}", self.id, self.address));
        self.failed(&error);
        Failure::Silent(error)
    }

    /// Asks, and returns when there is an answer; its bytes come later.
    pub async fn ask(self: &Arc<Self>, question: &Question) -> Result<Answer, Failure> {
        self.ask_and_hear(question, Heard::default()).await
    }

    /// The same; meanwhile it is heard whether the peer says that it works on the answer.
    pub async fn ask_and_hear(
        self: &Arc<Self>,
        question: &Question,
        heard: Heard,
    ) -> Result<Answer, Failure> {
        // Orders are few, take seconds and bring no objects: they would hide how reads do.
        let is_read = !matches!(question.what, What::Operate { .. });
        let timed = matches!(
            question.what,
            What::Here { .. }
                | What::Fetch { .. }
                | What::Current { .. }
                | What::CurrentHere { .. }
        );
        let timed = timed.then(|| Timed::of_one(self.clone(), heard.clone()));
        let begun = self
            .begin(Kind::Question, question, is_read, (timed, heard))
            .await?;
        let Asking {
            io,
            first,
            of,
            tags,
            seat,
            timed,
            heard,
        } = begun;
        match first.kind {
            Kind::Miss => {
                Timed::begins(timed);
                self.counts.misses.fetch_add(1, Relaxed);
                self.keep(io);
                Ok(None)
            }
            Kind::Found => {
                let found: Found = first.words().map_err(|e| self.gives_up(e))?;
                if tags && found.of != Some(of) {
                    return Err(self.gives_up("it answered another question"));
                }
                if let What::Here { range, .. } | What::Fetch { range, .. } = &question.what
                    && found.range != *range
                {
                    return Err(self.gives_up(format_args!(
                        "it answered with bytes {:?}, but {range:?} were asked for",
                        found.range
                    )));
                }
                let left = found.range.end.saturating_sub(found.range.start);
                let mut answer = Arriving {
                    peer: self.clone(),
                    io,
                    left,
                    patience: self.patience(left),
                    tag: (tags && question.tags).then_some(of),
                    is_read,
                    timed,
                    heard,
                    _seat: seat,
                };
                if answer.left == 0 {
                    // Nobody reads a body without bytes.
                    Timed::begins(answer.timed.take());
                    answer.end().await;
                    return Ok(Some((found, stream::empty().boxed())));
                }
                Ok(Some((found, answer.into_stream())))
            }
            kind => Err(self.gives_up(format_args!("it answered with a {kind:?}"))),
        }
    }

    /// Asks, and returns the first message of the answer; a refusal is an error. `is_read`: it
    /// counts as a question.
    pub(crate) async fn begin(
        &self,
        kind: Kind,
        question: &impl Serialize,
        is_read: bool,
        (timed, heard): (Option<Timed>, Heard),
    ) -> Result<Asking, Failure> {
        let Ok(seat) = self.seats.clone().try_acquire_owned() else {
            return Err(Failure::Silent(Error::busy(format!(
                "{QUESTIONS_MAX} questions to node {:016x} are under way",
                self.id
            ))));
        };
        let (question, of) = said(kind, question).map_err(|e| Failure::Refused(unsaid(&e)))?;
        let mut kept = self.kept();
        let (began, counts) = (Instant::now(), &self.counts);
        counts.questions.fetch_add(u64::from(is_read), Relaxed);
        loop {
            let was_kept = kept.is_some();
            let mut io = match kept.take() {
                Some(io) => io,
                None => self.connect().await?,
            };
            let first = async {
                io.write_all(&question).await?;
                io.flush().await?;
                self.next(&mut io, &mut self.timing.answer.clone(), &heard)
                    .await
            };
            let first = match first.await {
                // It was closed since. Questions change nothing, or the same twice.
                Err(e) if was_kept && e.kind() != io::ErrorKind::TimedOut => continue,
                Err(e) => return Err(self.gives_up(e)),
                Ok(first) => first,
            };
            if is_read {
                counts.first_byte.observe(began.elapsed());
            }
            if first.kind == Kind::Failed {
                counts.failures.fetch_add(1, Relaxed);
                Timed::begins(timed);
                self.keep(io);
                return Err(Failure::Refused(first.error()));
            }
            return Ok(Asking {
                io,
                first,
                of,
                tags: self.tags.load(Relaxed),
                seat,
                timed,
                heard,
            });
        }
    }

    /// The next message that says more than that the peer is working. What it is waited for goes
    /// from `patience`.
    pub(crate) async fn next(
        &self,
        io: &mut Box<dyn Io>,
        patience: &mut Duration,
        heard: &Heard,
    ) -> io::Result<Message> {
        let next = async {
            loop {
                match hear(io, self.timing.silence).await? {
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Some(message) if message.kind == Kind::Working => heard.working(),
                    Some(message) => return Ok(message),
                }
            }
        };
        let began = Instant::now();
        let next = timeout(self.timing.answer.min(*patience), next).await;
        *patience = patience.saturating_sub(began.elapsed());
        match next {
            Ok(next) => next,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("it was still working after {:?}", began.elapsed()),
            )),
        }
    }

    /// A connection that waits for a question. One on which something came since is none: it was
    /// closed, or the peer said what nobody asked for.
    fn kept(&self) -> Option<Box<dyn Io>> {
        loop {
            let mut io = self.idle.lock().pop()?;
            if io.read_u8().now_or_never().is_none() {
                return Some(io);
            }
        }
    }

    pub(crate) fn keep(&self, io: Box<dyn Io>) {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(io);
        }
    }

    async fn connect(&self) -> Result<Box<dyn Io>, Failure> {
        let connect = self.timing.connect;
        let greeted = greet(&*self.dial, self.id, &self.address, &self.me, connect).await;
        let (io, theirs) = greeted.map_err(|what| self.gives_up(what))?;
        if theirs.node != self.id {
            return Err(self.gives_up(format_args!("node {:016x} is there instead", theirs.node)));
        }
        if self.boot.is_some_and(|boot| boot != theirs.boot) {
            return Err(self.gives_up("it has started again since"));
        }
        self.gathers.store(theirs.gathers, Relaxed);
        self.tags.store(theirs.tags, Relaxed);
        self.fetches.store(theirs.fetches, Relaxed);
        self.counts.connections.fetch_add(1, Relaxed);
        Ok(io)
    }

    pub fn status(&self) -> LinkStatus {
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        let c = &self.counts;
        LinkStatus {
            node: self.id,
            address: self.address.clone(),
            answers: self.answers(),
            questions: count(&c.questions),
            misses: count(&c.misses),
            failures: count(&c.failures),
            silences: count(&c.silences),
            connections: count(&c.connections),
            received_bytes: count(&c.received_bytes),
            gathered: count(&c.gathered),
            first_byte: c.first_byte.snapshot(),
            under_way: QUESTIONS_MAX - self.seats.available_permits(),
            hedged: count(&self.quickness.hedged),
            overtaken: count(&self.quickness.overtaken),
            left_alone: count(&self.quickness.left_alone),
        }
    }
}

/// What the link to a peer has done since this node started, or since the peer has its address.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkStatus {
    /// The peer's id.
    pub node: u64,
    /// Where it is asked.
    pub address: String,
    /// Whether it is thought to answer.
    pub answers: bool,
    /// Questions that it was asked, without orders of operators.
    pub questions: u64,
    /// Those of which it answered that it does not have the bytes.
    pub misses: u64,
    /// Those that it answered with an error.
    pub failures: u64,
    /// How often it did not answer, and was given up until it says hello again.
    pub silences: u64,
    /// Connections made to it.
    pub connections: u64,
    /// Bytes of objects that it sent.
    pub received_bytes: u64,
    /// Entries of batches that it sent together with others.
    pub gathered: u64,
    /// The time until answers began.
    pub first_byte: HistogramSnapshot,
    /// Questions that are under way now.
    pub under_way: usize,
    /// Those whose answers were late, so that another source was asked as well.
    pub hedged: u64,
    /// Those of which the other source was the first to answer.
    pub overtaken: u64,
    /// How often it was so late that it was left alone for a while.
    pub left_alone: u64,
}

#[derive(Default)]
struct Counts {
    questions: AtomicU64,
    misses: AtomicU64,
    failures: AtomicU64,
    silences: AtomicU64,
    connections: AtomicU64,
    received_bytes: AtomicU64,
    gathered: AtomicU64,
    first_byte: Histogram,
}

/// Why a question cannot be asked.
fn unsaid(e: &io::Error) -> Error {
    Error::invalid(format!("a question to another node: {e}"))
}

/// Connects and says hello; returns what the other end says of itself, which belongs to the same
/// cluster.
pub(crate) async fn greet(
    dial: &dyn Dial,
    node: u64,
    address: &str,
    mine: &Hello,
    patience: Duration,
) -> Result<(Box<dyn Io>, Hello), String> {
    let connected = timeout(patience, async {
        let mut io: Box<dyn Io> = Box::new(buffered(dial.dial(node, address).await?));
        say(&mut io, Kind::Hello, mine).await?;
        io.flush().await?;
        let Some(answer) = hear(&mut io, patience).await? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        Ok::<_, io::Error>((io, answer))
    });
    let (io, answer) = match connected.await {
        Err(_) => return Err(format!("no connection within {patience:?}")),
        Ok(connected) => connected.map_err(|e| e.to_string())?,
    };
    let theirs: Hello = match answer.kind {
        Kind::Hello => answer.words().map_err(|e| e.describe())?,
        Kind::Failed => return Err(answer.error().describe()),
        kind => return Err(format!("it said {kind:?} instead of hello")),
    };
    theirs.agrees_with(mine).map_err(|e| e.describe())?;
    Ok((io, theirs))
}

/// An answer whose bytes are on their way.
struct Arriving {
    peer: Arc<Peer>,
    io: Box<dyn Io>,
    /// Bytes that are still to come.
    left: u64,
    /// How long they are waited for.
    patience: Duration,
    /// Of those that came, if they have any.
    tag: Option<u32>,
    /// Whether its bytes are those of an object.
    is_read: bool,
    /// Until the first of them are here.
    timed: Option<Timed>,
    heard: Heard,
    _seat: OwnedSemaphorePermit,
}

impl Arriving {
    /// Exactly the bytes that were announced, or an error before their end.
    fn into_stream(self) -> ByteStream {
        stream::try_unfold(Some(self), |arriving| async move {
            let Some(mut arriving) = arriving else {
                return Ok(None);
            };
            if arriving.left == 0 {
                arriving.end().await;
                return Ok(None);
            }
            let piece = arriving.piece().await?;
            arriving.left -= piece.len() as u64;
            if arriving.left == 0 {
                // Nobody asks for more than was announced: the connection is free from now on.
                arriving.end().await;
                return Ok(Some((piece, None)));
            }
            Ok(Some((piece, Some(arriving))))
        })
        .boxed()
    }

    async fn piece(&mut self) -> Result<Bytes> {
        let peer = &self.peer;
        let broken = |what: String| {
            Error::origin_unavailable(format!("node {:016x} at {}: {what}", peer.id, peer.address))
        };
        let gives_up = |what: String| match peer.gives_up(what) {
            Failure::Silent(e) | Failure::Refused(e) => e,
        };
        let next = peer.next(&mut self.io, &mut self.patience, &self.heard);
        let mut message = match next.await {
            Ok(message) => {
                Timed::begins(self.timed.take());
                message
            }
            Err(e) => {
                return Err(match e.kind() {
                    io::ErrorKind::TimedOut | io::ErrorKind::InvalidData => gives_up(e.to_string()),
                    // The peer closes connections that we did not read from for long; it still
                    // answers.
                    _ => broken(e.to_string()),
                });
            }
        };
        if let (Kind::Data, Some(tag)) = (message.kind, self.tag) {
            let bytes = message.payload.len().saturating_sub(TAG_BYTES);
            let tag = tag.wrapping_add(bytes as u32);
            if message.payload.try_get_u32_le() != Ok(tag) {
                return Err(gives_up("it sent bytes of another place".into()));
            }
            self.tag = Some(tag);
        }
        match message.kind {
            Kind::Data if (1..=self.left).contains(&(message.payload.len() as u64)) => {
                if self.is_read {
                    let received = &peer.counts.received_bytes;
                    let bytes = message.payload.len() as u64;
                    received.fetch_add(bytes, Relaxed);
                    request::count(Cost::PeerBytes, bytes);
                }
                Ok(message.payload)
            }
            Kind::Failed => Err(message.error()),
            kind => Err(gives_up(format!(
                "it sent a {kind:?} of {} bytes where {} were to come",
                message.payload.len(),
                self.left
            ))),
        }
    }

    /// Keeps the connection, if it is at the end of the answer, and the end comes at once: all bytes
    /// are there.
    async fn end(mut self) {
        let mut patience = self.peer.timing.silence;
        if let Ok(message) = self
            .peer
            .next(&mut self.io, &mut patience, &self.heard)
            .await
            && message.kind == Kind::End
        {
            self.peer.keep(self.io);
        }
    }
}
