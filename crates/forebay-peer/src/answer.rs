//! Answering the questions of other nodes.
//!
//! Nothing is read ahead of the asker: bytes are asked of the engine when those before them were
//! sent. So an asker that does not read costs one piece of memory for a while, and reads nothing
//! from a disk.
//!
//! Invariant: answers hold at most a quarter of the memory budget, and what waits for the bytes of
//! other nodes at most half (`forebay_engine`): so some is always left for what waits for nobody,
//! and nodes do not wait for each other's memory.

use crate::{
    cluster::{Cluster, Identity},
    give::STEPS_MAX,
    message::{
        DATA_MAX_BYTES, Found, Hello, Kind, Message, PROTOCOL, Pulled, Question, What, buffered,
        hear, say, say_data, say_failed, say_nothing,
    },
};
use forebay_core::{Error, ErrorKind, Result, limits::CHUNK_BYTES};
use forebay_engine::{ByteStream, Engine, PeerRead};
use futures::{FutureExt, StreamExt};
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::Semaphore,
    time::{Instant, interval_at, timeout},
};

/// How often a node says that it is still working on an answer.
const SIGN_OF_LIFE: Duration = Duration::from_millis(100);
/// A connection on which nobody asks for so long is closed.
const IDLE: Duration = Duration::from_secs(600);
/// Whoever connects says hello within this time.
const GREETING: Duration = Duration::from_secs(5);
/// An asker that takes nothing of its answer for so long is given up.
const STALLED: Duration = Duration::from_secs(30);

/// What connections of other nodes share.
pub struct Answers {
    me: Identity,
    engine: Engine,
    /// One for each piece that is being sent.
    places: Semaphore,
    /// Whose slots are handed over (`give.rs`).
    cluster: Option<Arc<Cluster>>,
    pub(crate) gives: Semaphore,
}

impl Answers {
    /// Answers for the node `me`, from its engine.
    pub fn new(me: Identity, engine: Engine) -> Self {
        let pieces = engine.budget().total_bytes() / 4 / CHUNK_BYTES;
        Answers {
            me,
            engine,
            places: Semaphore::new((pieces as usize).clamp(1, Semaphore::MAX_PERMITS)),
            cluster: None,
            gives: Semaphore::new(STEPS_MAX),
        }
    }

    /// Also hands over slots that this node of the cluster had.
    pub fn hands_over(self, cluster: Arc<Cluster>) -> Self {
        Answers {
            cluster: Some(cluster),
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
        let asker = match welcome(&first, &mine) {
            Ok(asker) => asker,
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
                next = hear(&mut io, IDLE) => next?,
                () = stop.as_mut() => None,
            };
            let Some(message) = next else {
                return Ok(());
            };
            let question = match message.kind {
                Kind::Question => message.words::<Question>(),
                kind => Err(Error::invalid(format!("a {kind:?} is not a question"))),
            };
            match question {
                Ok(question) => {
                    match self.cluster.as_ref().filter(|_| question.is_of_slots()) {
                        Some(cluster) => {
                            self.answer_of_slots(&mut io, cluster, asker, question.what)
                                .await?;
                        }
                        None => self.answer(&mut io, question).await?,
                    }
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

    /// Answers what is asked of no object.
    async fn answer_of_slots(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        cluster: &Arc<Cluster>,
        asker: u64,
        what: What,
    ) -> io::Result<()> {
        match what {
            What::Pull { table, after } => self.give(io, cluster, asker, table, after).await,
            What::Released { table } => match working(io, cluster.release(asker, table)).await? {
                Ok(()) => sent(say(io, Kind::Found, &Pulled::default())).await,
                Err(e) => sent(say_failed(io, &e)).await,
            },
            _ => match working(io, cluster.moving()).await? {
                Ok(moving) => sent(say(io, Kind::Found, &moving)).await,
                Err(e) => sent(say_failed(io, &e)).await,
            },
        }
    }

    async fn answer(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        question: Question,
    ) -> io::Result<()> {
        // Before there are bytes to hold.
        let Ok(_place) = working(io, self.places.acquire()).await? else {
            return Ok(());
        };
        let (found, mut body) = match working(io, find(&self.engine, question)).await? {
            Ok(Some(answer)) => answer,
            Ok(None) => return sent(say_nothing(io, Kind::Miss)).await,
            Err(e) => return sent(say_failed(io, &e)).await,
        };
        match sent(say(io, Kind::Found, &found)).await {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                let e = Error::new(ErrorKind::TooLarge, e.to_string());
                return sent(say_failed(io, &e)).await;
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
                        sent(say_data(io, data)).await?;
                    }
                }
                Some(Err(e)) => return sent(say_failed(io, &e)).await,
                None => return sent(say_nothing(io, Kind::End)).await,
            }
        }
    }
}

/// Who speaks, if it is a node of this cluster.
fn welcome(first: &Message, mine: &Hello) -> Result<u64> {
    if first.kind != Kind::Hello {
        return Err(Error::invalid("a node says hello first"));
    }
    let theirs = first.words::<Hello>()?;
    theirs.agrees_with(mine).map(|()| theirs.node)
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

/// What is there, and its bytes; `None` for a miss.
async fn find(engine: &Engine, question: Question) -> Result<Option<(Found, ByteStream)>> {
    if question.is_of_slots() {
        return Err(Error::unsupported("this node hands over no slots"));
    }
    let name = question.name()?;
    let range = match &question.what {
        What::Here { range, .. }
        | What::Fetch { range, .. }
        | What::Current { range }
        | What::CurrentHere { range } => range.clone(),
        What::Written => 0..0,
        What::Pull { .. } | What::Released { .. } | What::Moving => 0..0,
    };
    if range.start > range.end {
        return Err(Error::invalid(format!(
            "bytes {range:?} of {name} were asked for"
        )));
    }
    let found = Found {
        current: None,
        range: range.clone(),
    };
    match question.what {
        What::Here { version, .. } => {
            let body = engine.version_here(&name, &version.meta(), range).await?;
            Ok(body.map(|body| (found, body)))
        }
        What::Fetch { version, .. } => {
            let body = engine
                .version_for_peer(&name, &version.meta(), range)
                .await?;
            Ok(Some((found, body)))
        }
        What::Current { .. } => Ok(Some(current(engine.read_for_peer(&name, range).await?))),
        What::CurrentHere { .. } => Ok(engine.current_here(&name, range).await?.map(current)),
        What::Written => {
            engine.written_by_peer(&name).await;
            Ok(None)
        }
        What::Pull { .. } | What::Released { .. } | What::Moving => Ok(None),
    }
}

fn current(read: PeerRead) -> (Found, ByteStream) {
    let found = Found {
        current: Some(((*read.meta).clone(), read.age_secs)),
        range: read.range,
    };
    (found, read.body)
}
