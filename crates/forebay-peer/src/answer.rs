//! Answering the questions of other nodes.
//!
//! Nothing is read ahead of the asker: bytes are asked of the engine when those before them were
//! sent. So an asker that does not read costs one piece of memory for a while, and reads nothing
//! from a disk.
//!
//! Each answer is one line in the log (`forebay::peer`), with the id of the request that the other
//! node asks for: debug if it was given, info or above if not. It is written however the answer
//! ends.
//!
//! Invariant: answers hold at most a quarter of the memory budget, and what waits for the bytes of
//! other nodes at most half (`forebay_engine`): so some is always left for what waits for nobody,
//! and nodes do not wait for each other's memory.

use crate::{
    cluster::{Cluster, Identity},
    give::STEPS_MAX,
    message::{
        DATA_MAX_BYTES, Found, Hello, Kind, Message, PROTOCOL, Pulled, Question, What, buffered,
        hear, hear_later, say, say_data, say_failed, say_nothing,
    },
    read::is_an_answer,
    together::{self, Together},
};
use async_trait::async_trait;
use bytes::Bytes;
use forebay_cluster::Run;
use forebay_core::{
    Error, ErrorKind, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES, request,
    units::milliseconds,
};
use forebay_engine::{ByteStream, Engine, PeerRead, Wanted, WantedBytes};
use futures::{FutureExt, StreamExt};
use std::{future::Future, io, ops::Range, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::Semaphore,
    time::{Instant, interval_at, timeout},
};

/// What answers are logged as.
const TARGET: &str = "forebay::peer";
/// How often a node says that it is still working on an answer.
const SIGN_OF_LIFE: Duration = Duration::from_millis(100);
/// A connection on which nobody asks for so long is closed.
const IDLE: Duration = Duration::from_secs(600);
/// Whoever connects says hello within this time, and has said what he began to say.
const GREETING: Duration = Duration::from_secs(5);
/// An asker that takes nothing of its answer for so long is given up.
const STALLED: Duration = Duration::from_secs(30);

/// Orders of operators that are worked on at a time; others wait.
const ORDERS_MAX: usize = 32;

/// Does what operators want of this node, asked by way of another one, which has authorized them.
#[async_trait]
pub trait Operator: Send + Sync + 'static {
    /// Does what the order says; returns what is to be answered, of at most
    /// [`OPERATED_MAX_BYTES`](crate::OPERATED_MAX_BYTES). If the other node leaves, the work is
    /// dropped. The order may ask other nodes for bytes, but must not give them orders.
    async fn operate(&self, order: serde_json::Value) -> Result<Bytes>;
}

/// What connections of other nodes share.
pub struct Answers {
    me: Identity,
    /// Takes what other nodes say of themselves and of their writes.
    cluster: Arc<Cluster>,
    engine: Engine,
    /// One for each piece that is being sent.
    places: Semaphore,
    operator: Option<Arc<dyn Operator>>,
    /// Orders wait for other nodes, so they take no places from those who wait for nobody.
    orders: Semaphore,
    pub(crate) gives: Semaphore,
}

impl Answers {
    /// Answers for this node of a cluster, from its engine.
    pub fn new(cluster: Arc<Cluster>, engine: Engine) -> Self {
        let pieces = engine.budget().total_bytes() / 4 / CHUNK_BYTES;
        Answers {
            me: cluster.me().clone(),
            cluster,
            engine,
            places: Semaphore::new((pieces as usize).clamp(1, Semaphore::MAX_PERMITS)),
            gives: Semaphore::new(STEPS_MAX),
            operator: None,
            orders: Semaphore::new(ORDERS_MAX),
        }
    }

    /// The same, which takes orders too.
    pub fn with_operator(self, operator: Arc<dyn Operator>) -> Self {
        Answers {
            operator: Some(operator),
            ..self
        }
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Answers the questions on one connection until it ends, or `stop` does: an answer that was
    /// begun then is given to its end.
    ///
    /// # Errors
    /// If it breaks, or what comes is not a question of a node of this cluster.
    pub async fn serve<S>(&self, io: S, stop: impl Future<Output = ()>) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut io = buffered(io);
        let mut stop = std::pin::pin!(stop);
        let Some(first) = hear(&mut io, GREETING).await? else {
            return Ok(());
        };
        let mine = self.me.hello();
        let theirs = match welcome(&first, &mine) {
            Ok(theirs) => theirs,
            Err(e) => {
                sent(say_failed(&mut io, &e)).await?;
                sent(io.flush()).await?;
                return Err(io::Error::other(e.to_string()));
            }
        };
        sent(say(&mut io, Kind::Hello, &mine)).await?;
        sent(io.flush()).await?;
        loop {
            let next = tokio::select! {
                next = hear_later(&mut io, IDLE, GREETING) => next?,
                () = stop.as_mut() => None,
            };
            let Some(message) = next else {
                return Ok(());
            };
            let question = match message.kind {
                Kind::Question => message.words::<Question>().map(Asked::One),
                Kind::Together => message.words::<Together>().map(Asked::Many),
                kind => Err(Error::invalid(format!("a {kind:?} is not a question"))),
            };
            let of = message.crc;
            match question {
                Ok(question) => {
                    let id = question.request().filter(|id| request::is_sane_id(id));
                    let mut line = Line::of(theirs.node, &question, id.clone());
                    // What it asks others is asked for the same request.
                    let answer = async {
                        match question {
                            Asked::One(question) => {
                                self.answer(&mut io, &theirs, (question, of), &mut line)
                                    .await
                            }
                            Asked::Many(all) => {
                                self.answer_all(&mut io, (all, of), &mut line).await
                            }
                        }
                    };
                    request::scope(id, answer).await?;
                    sent(io.flush()).await?;
                }
                Err(e) => {
                    sent(say_failed(&mut io, &e)).await?;
                    sent(io.flush()).await?;
                    return Err(io::Error::other(e.to_string()));
                }
            }
        }
    }

    async fn answer_all(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        questions: (Together, u32),
        line: &mut Line,
    ) -> io::Result<()> {
        let Ok(_place) = working(io, self.places.acquire()).await? else {
            return Ok(());
        };
        match together::answer(&self.cluster, &self.engine, io, questions, &mut line.bytes).await? {
            Ok(()) => {
                line.outcome = Outcome::Given;
                Ok(())
            }
            Err(e) => line.failed(io, e).await,
        }
    }

    /// Answers what is asked of no object.
    async fn answer_of_slots(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        cluster: &Arc<Cluster>,
        (asker, epoch): (u64, u64),
        what: What,
        line: &mut Line,
    ) -> io::Result<()> {
        let answered = match what {
            What::Pull { table, after } => {
                let by = (table, epoch);
                self.give(io, cluster, asker, by, after).await?
            }
            What::Copies {
                table,
                rules,
                after,
            } => {
                let names = self.copies(cluster, asker, (table, rules), after);
                self.give_step(io, names, |_| {}).await?
            }
            What::Copy { entries } => {
                let copies = self.copy(entries);
                let given = |pulled: &Pulled| cluster.copied().given(pulled.bytes);
                self.give_step(io, copies, given).await?
            }
            What::Released { table } => {
                let released = cluster.release(asker, table, epoch);
                match working(io, released).await? {
                    Ok(()) => Ok(sent(say(io, Kind::Found, &Pulled::default())).await?),
                    Err(e) => Err(e),
                }
            }
            _ => match working(io, cluster.moving()).await? {
                Ok(moving) => Ok(sent(say(io, Kind::Found, &moving)).await?),
                Err(e) => Err(e),
            },
        };
        match answered {
            Ok(()) => {
                line.outcome = Outcome::Given;
                Ok(())
            }
            Err(e) => line.failed(io, e).await,
        }
    }

    async fn answer(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        theirs: &Hello,
        (question, of): (Question, u32),
        line: &mut Line,
    ) -> io::Result<()> {
        if let What::Operate { order } = question.what {
            return self.operate(io, (order, of), line).await;
        }
        if question.is_of_slots() {
            let (cluster, asker) = (&self.cluster, (theirs.node, question.epoch));
            return self
                .answer_of_slots(io, cluster, asker, question.what, line)
                .await;
        }
        if let What::Announce { .. } | What::Told { .. } | What::Left = question.what {
            // They need no memory, and do not wait for those who do.
            return match working(io, self.hear_of(theirs, question.what)).await? {
                Ok(()) => {
                    sent(say_nothing(io, Kind::Miss)).await?;
                    line.outcome = Outcome::Miss;
                    Ok(())
                }
                Err(e) => line.failed(io, e).await,
            };
        }
        let mut tag = question.tags.then_some(of);
        if theirs.fetches && lacks(&self.engine, &question) {
            // It is not this node that is slow: nobody else is to fetch it too.
            sent(say_nothing(io, Kind::Working)).await?;
            sent(io.flush()).await?;
        }
        // Before there are bytes to hold.
        let Ok(_place) = working(io, self.places.acquire()).await? else {
            return Ok(());
        };
        let (mut found, mut body) =
            match working(io, find(&self.cluster, &self.engine, question)).await? {
                Ok(Some(answer)) => answer,
                Ok(None) => {
                    sent(say_nothing(io, Kind::Miss)).await?;
                    line.outcome = Outcome::Miss;
                    return Ok(());
                }
                Err(e) => return line.failed(io, e).await,
            };
        found.of = Some(of);
        match sent(say(io, Kind::Found, &found)).await {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                let e = Error::new(ErrorKind::TooLarge, e.to_string());
                return line.failed(io, e).await;
            }
            said => said?,
        }
        loop {
            let next = match body.next().now_or_never() {
                Some(next) => next,
                None => {
                    // Encrypted, some of it may still wait for the next piece.
                    sent(io.flush()).await?;
                    working(io, body.next()).await?
                }
            };
            match next {
                Some(Ok(piece)) => {
                    for data in piece.chunks(DATA_MAX_BYTES) {
                        tag = tag.map(|tag| tag.wrapping_add(data.len() as u32));
                        sent(say_data(io, tag, data)).await?;
                        line.bytes += data.len() as u64;
                    }
                }
                Some(Err(e)) => return line.failed(io, e).await,
                None => {
                    sent(say_nothing(io, Kind::End)).await?;
                    line.outcome = Outcome::Given;
                    return Ok(());
                }
            }
        }
    }
}

/// What another node asks.
enum Asked {
    One(Question),
    Many(Together),
}

impl Asked {
    fn request(&self) -> Option<Arc<str>> {
        match self {
            Asked::One(question) => question.request.clone(),
            Asked::Many(all) => all.request.clone(),
        }
    }
}

impl Answers {
    async fn operate(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        (order, of): (serde_json::Value, u32),
        line: &mut Line,
    ) -> io::Result<()> {
        let work = async {
            let operator = self
                .operator
                .as_ref()
                .ok_or_else(|| Error::unsupported("this node takes no orders from other nodes"))?;
            let ended = |e| Error::internal("this node takes no orders any more").caused_by(e);
            let _place = self.orders.acquire().await.map_err(ended)?;
            operator.operate(order).await
        };
        let done = match working(io, work).await? {
            Ok(done) => done,
            Err(e) => return line.failed(io, e).await,
        };
        let found = Found {
            range: 0..done.len() as u64,
            of: Some(of),
            ..Found::default()
        };
        sent(say(io, Kind::Found, &found)).await?;
        for data in done.chunks(DATA_MAX_BYTES) {
            sent(say_data(io, None, data)).await?;
            line.bytes += data.len() as u64;
        }
        sent(say_nothing(io, Kind::End)).await?;
        line.outcome = Outcome::Given;
        Ok(())
    }
}

/// How an answer ended.
enum Outcome {
    /// The other node left, or this one stops.
    BrokenOff,
    Given,
    Miss,
    Failed(Error),
}

/// What the log says of an answer, once it has ended.
struct Line {
    asker: u64,
    id: Option<Arc<str>>,
    bucket: String,
    key: String,
    what: &'static str,
    began: Instant,
    bytes: u64,
    outcome: Outcome,
}

impl Line {
    fn of(asker: u64, asked: &Asked, id: Option<Arc<str>>) -> Self {
        let (bucket, key, what) = match asked {
            Asked::One(one) => (&*one.bucket, &*one.key, one.what.word()),
            // The first of many.
            Asked::Many(all) => {
                let (bucket, key) = all.first();
                (bucket, key, "together")
            }
        };
        Line {
            asker,
            id,
            bucket: printable(bucket),
            key: printable(key),
            what,
            began: Instant::now(),
            bytes: 0,
            outcome: Outcome::BrokenOff,
        }
    }

    /// Says an error, which ends the answer.
    async fn failed(&mut self, io: &mut (impl AsyncWrite + Unpin), e: Error) -> io::Result<()> {
        sent(say_failed(io, &e)).await?;
        self.outcome = Outcome::Failed(e);
        Ok(())
    }
}

impl Answers {
    /// What another node says of itself, or of writes.
    async fn hear_of(&self, theirs: &Hello, what: What) -> Result<()> {
        let by = Run {
            node: theirs.node,
            boot: theirs.boot,
        };
        let telling = self.cluster.telling().ok_or_else(|| {
            Error::unsupported("this node's cluster has no leases: its map is not in etcd")
        })?;
        match what {
            What::Announce { term, lease } => {
                telling.announced(by, theirs.member.as_ref(), term, lease);
            }
            What::Left => telling.left(by),
            What::Told { over_below, names } => {
                let names = names.into_iter().map(|(write, bucket, key)| {
                    Ok((write, ObjectName::new(bucket.as_str(), key.as_str())?))
                });
                let names = names.collect::<Result<Vec<_>>>()?;
                // In doubt before they are forgotten: what is asked from now on is asked of the
                // bucket.
                telling.told_by(by, over_below, &names);
                let forget = names
                    .iter()
                    .map(|(_, name)| self.engine.written_by_peer(name));
                futures::future::join_all(forget).await;
            }
            _ => {}
        }
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        macro_rules! line { ($level:ident, $outcome:literal, $error:expr) => {
            tracing::$level!(
                target: TARGET,
                id = self.id.as_deref(),
                from = format_args!("{:016x}", self.asker),
                what = self.what,
                bucket = self.bucket,
                key = self.key,
                bytes = self.bytes,
                ms = milliseconds(self.began.elapsed()),
                outcome = $outcome,
                error = $error,
            )
        } }
        let none = None::<String>;
        match &self.outcome {
            Outcome::Given => line!(debug, "given", none),
            Outcome::Miss => line!(debug, "miss", none),
            Outcome::BrokenOff => line!(info, "broken off", none),
            // It says something of the object, and not of this node.
            Outcome::Failed(e) if is_an_answer(e) => line!(info, "refused", Some(e.describe())),
            Outcome::Failed(e) => line!(warn, "failed", Some(e.describe())),
        }
    }
}

/// Without control characters: text from elsewhere must not begin a line in the log.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

fn welcome(first: &Message, mine: &Hello) -> Result<Hello> {
    if first.kind != Kind::Hello {
        return Err(Error::invalid("a node says hello first"));
    }
    let theirs = first.words::<Hello>()?;
    theirs.agrees_with(mine)?;
    Ok(theirs)
}

impl Hello {
    /// # Errors
    /// `Invalid` if the two do not belong to one cluster, or speak differently.
    pub fn agrees_with(&self, other: &Hello) -> Result<()> {
        if self.protocol != PROTOCOL {
            return Err(Error::invalid(format!(
                "node {:016x} speaks version {} of the protocol, this one {PROTOCOL}",
                self.node, self.protocol
            ))
            .hint("nodes of one cluster may be one release apart"));
        }
        if self.cluster != other.cluster {
            return Err(Error::invalid(format!(
                "node {:016x} belongs to cluster {:?}, and node {:016x} to {:?}",
                self.node, self.cluster, other.node, other.cluster
            ))
            .hint("check the addresses in the map"));
        }
        Ok(())
    }
}

/// Sends, as long as the asker takes some of it.
pub(crate) async fn sent(saying: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    match timeout(STALLED, saying).await {
        Ok(said) => said,
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the node that asked took nothing of its answer for {STALLED:?}"),
        )),
    }
}

/// Waits for `work`, and says meanwhile that it goes on.
pub(crate) async fn working<T>(
    io: &mut (impl AsyncWrite + Unpin),
    work: impl Future<Output = T>,
) -> io::Result<T> {
    let mut work = std::pin::pin!(work);
    let mut ticks = interval_at(Instant::now() + SIGN_OF_LIFE, SIGN_OF_LIFE);
    loop {
        tokio::select! {
            biased;
            done = work.as_mut() => return Ok(done),
            _ = ticks.tick() => {
                sent(say_nothing(io, Kind::Working)).await?;
                sent(io.flush()).await?;
            }
        }
    }
}

/// Whether what is asked for is to be fetched first, as far as is known without a look at a disk.
fn lacks(engine: &Engine, question: &Question) -> bool {
    let Ok(name) = question.name() else {
        return false;
    };
    match &question.what {
        What::Fetch { version, range } => !engine.is_here_for_peer(&Wanted {
            name,
            bytes: WantedBytes::Version(version.clone().meta(), range.clone()),
        }),
        What::Current { range } => !engine.has_current(&name, range),
        _ => false,
    }
}

/// What is there, and its bytes; `None` for a miss.
async fn find(
    cluster: &Cluster,
    engine: &Engine,
    question: Question,
) -> Result<Option<(Found, ByteStream)>> {
    let name = question.name()?;
    let range = match &question.what {
        What::Here { range, .. }
        | What::Fetch { range, .. }
        | What::Current { range }
        | What::CurrentHere { range } => range.clone(),
        What::Written
        | What::Operate { .. }
        | What::Announce { .. }
        | What::Told { .. }
        | What::Left
        | What::Pull { .. }
        | What::Released { .. }
        | What::Moving
        | What::Copies { .. }
        | What::Copy { .. } => 0..0,
    };
    if range.start > range.end {
        return Err(Error::invalid(format!(
            "bytes {range:?} of {name} were asked for"
        )));
    }
    let sends = |meta: &Arc<ObjectMeta>, range: &Range<u64>| {
        let bytes = range.end.saturating_sub(range.start);
        cluster.sends(engine, &name, meta, range.start, bytes)
    };
    let of_version = |meta: &Arc<ObjectMeta>, body: ByteStream| {
        let found = Found {
            hot: sends(meta, &range),
            range: range.clone(),
            ..Found::default()
        };
        (found, body)
    };
    let current = |read: PeerRead| {
        let found = Found {
            current: Some(((*read.meta).clone(), read.age_secs)),
            hot: sends(&read.meta, &read.range),
            range: read.range,
            of: None,
        };
        (found, read.body)
    };
    match question.what {
        What::Here { version, .. } => {
            let meta = version.meta();
            let body = engine.version_here(&name, &meta, range.clone()).await?;
            Ok(body.map(|body| of_version(&meta, body)))
        }
        What::Fetch { version, .. } => {
            let meta = version.meta();
            let body = engine.version_for_peer(&name, &meta, range.clone());
            Ok(Some(of_version(&meta, body.await?)))
        }
        What::Current { .. } => {
            let read = engine.read_for_peer(&name, range.clone()).await?;
            Ok(Some(current(read)))
        }
        What::CurrentHere { .. } => {
            let here = engine.current_here(&name, range.clone()).await?;
            Ok(here.map(current))
        }
        What::Written => {
            engine.written_by_peer(&name).await;
            Ok(None)
        }
        // Heard before.
        What::Operate { .. }
        | What::Announce { .. }
        | What::Told { .. }
        | What::Left
        | What::Pull { .. }
        | What::Released { .. }
        | What::Moving
        | What::Copies { .. }
        | What::Copy { .. } => Ok(None),
    }
}
