//! One lane: every `of`-th step, over one connection at a time.
//!
//! A lane requests its steps from the first one that it has not received, reads frames, and puts
//! them on the shelf. When its connection breaks, its node goes away or a frame is damaged, it
//! requests what it has not received again, there or from another node: a step is received
//! completely or not at all, so nothing is lost and nothing comes twice. If not a single frame
//! arrives for [`Options::retry_for`](super::Options), the lane gives up with the last error that
//! it saw.

use super::{
    body::{Body, Patience, Request},
    memory::Pool,
    nodes::Nodes,
    open::Openings,
    shelf::{Received, Shelf},
    stats::{Counters, add_duration},
};
use crate::{node::Node, nodes::CONNECT_MAX};
use arrow_buffer::Buffer;
use forebay_core::{Error, ErrorKind, Result, crc32c_append};
use forebay_protocol::{
    frame::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, decode_error},
    job::JOB_PARAMETER,
    path::encode,
};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{sync::watch, time::timeout};

/// The largest payload of a frame that holds no rows.
const SHORT_PAYLOAD_MAX_BYTES: u64 = 1 << 20;

/// What all lanes of a stream share.
pub struct Shared {
    pub nodes: Nodes,
    pub shelf: Shelf,
    pub counters: Counters,
    pub pool: Arc<Pool>,
    /// The request's path, without its query.
    pub path: String,
    pub body: Vec<u8>,
    /// What the job is called.
    pub job: Option<String>,
    /// What a node is told that does not know the datasets.
    pub openings: Openings,
    /// Held while a node is told of them.
    pub telling: tokio::sync::Mutex<()>,
    pub silence: Duration,
    pub retry_for: Duration,
}

pub struct Lane {
    /// This lane's steps leave this remainder when divided by `of`.
    pub number: u32,
    pub of: u32,
    /// The first step that has not been received.
    pub next: u64,
    /// The first step that other lanes take over.
    pub until: watch::Receiver<u64>,
    pub node: usize,
}

/// Why a connection ended.
enum Trouble {
    /// It broke, or its data is damaged.
    Broken(Error),
    /// The node does not send this stream; another one might.
    Refused(Error),
    /// No node can send the step.
    Final(Error),
}

impl Lane {
    /// The first step at or after `from` that belongs to this lane.
    pub fn first(number: u32, of: u32, from: u64) -> u64 {
        let (number, of) = (u64::from(number), u64::from(of));
        from + (number + of - from % of) % of
    }

    pub async fn run(mut self, shared: Arc<Shared>) {
        let (mut failing_since, mut refusals) = (None::<Instant>, 0);
        loop {
            let had = self.next;
            let (mut heard, mut opening) = (false, Duration::ZERO);
            let ended = self.connection(&shared, &mut heard, &mut opening).await;
            let Err(trouble) = ended else {
                return;
            };
            // A node that opens a dataset says that it is at it, however long that takes.
            failing_since = failing_since.map(|since| since + opening);
            if heard || self.next != had {
                (failing_since, refusals) = (None, 0);
            }
            let error = match trouble {
                Trouble::Final(error) => return shared.shelf.fail_at(self.next, error),
                Trouble::Refused(error) if refusals + 1 >= shared.nodes.count() => {
                    return shared.shelf.fail_at(self.next, error);
                }
                Trouble::Refused(error) => {
                    refusals += 1;
                    error
                }
                Trouble::Broken(error) => error,
            };
            let since = *failing_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= shared.retry_for {
                let error = error.context(format!(
                    "step {} did not arrive within {} s",
                    self.next,
                    since.elapsed().as_secs()
                ));
                return shared.shelf.fail_at(self.next, error);
            }
            // Where another node will do, nobody waits for one that wants to be left alone.
            let nodes = shared.nodes.get(self.node).nodes().known();
            let others = nodes.len() > 1 && nodes.iter().any(|node| node.failed().is_none());
            let not_before = error.retry_after_hint().filter(|_| !others);
            let (node, pause) = shared.nodes.fails(self.node, not_before);
            self.node = node;
            shared.counters.reopened.fetch_add(1, Relaxed);
            // However long the node asked to be left alone.
            tokio::time::sleep(pause.min(shared.retry_for)).await;
        }
    }

    fn is_over(&self) -> bool {
        self.next >= *self.until.borrow()
    }

    /// Makes a connection to one of the nodes and reads it to its end. Unless there is trouble, that
    /// is the lane's end too. Adds the time that the node took to open the datasets to `opening`.
    async fn connection(
        &mut self,
        shared: &Shared,
        heard: &mut bool,
        opening: &mut Duration,
    ) -> Result<(), Trouble> {
        if self.is_over() {
            return Ok(());
        }
        let connect = shared.counters.connects.fetch_add(1, Relaxed);
        let open = Open::of(shared, connect);
        let nodes = shared.nodes.get(self.node).nodes();
        let to_ask = nodes.to_ask().await;
        let (node, limit) = (&to_ask[0], nodes.connect_limit(&to_ask));
        let mut body = match self.body(shared, node, limit.min(shared.silence)).await {
            // It was started anew, or never heard of them.
            Err(Trouble::Refused(e))
                if e.kind() == ErrorKind::NotFound && !shared.openings.is_empty() =>
            {
                let began = Instant::now();
                // One lane at a time: what the others would tell may be much, and the same.
                let telling = shared.telling.lock().await;
                let silence = limit.min(shared.silence);
                let again = match self.body(shared, node, silence).await {
                    Err(Trouble::Refused(e)) if e.kind() == ErrorKind::NotFound => {
                        match self.tell(shared, node, limit).await {
                            Ok(()) => self.body(shared, node, silence).await,
                            Err(trouble) => Err(trouble),
                        }
                    }
                    done => done,
                };
                drop(telling);
                *opening += began.elapsed();
                match again {
                    // It forgot again, because others told it much at the same time.
                    Err(Trouble::Refused(e)) if e.kind() == ErrorKind::NotFound => {
                        Err(Trouble::Broken(e))
                    }
                    done => done,
                }
            }
            done => done,
        };
        let outcome = match &mut body {
            Ok(body) => self.frames(shared, body, heard, &open).await,
            Err(_) => body.map(|_| ()),
        };
        if let Err(Trouble::Broken(_) | Trouble::Refused(_)) = &outcome {
            nodes.fails(node);
        } else {
            nodes.works(node);
        }
        outcome.map_err(|trouble| match trouble {
            Trouble::Broken(e) => Trouble::Broken(e.context(node)),
            other => other,
        })
    }

    /// Tells a node of the datasets.
    async fn tell(
        &self,
        shared: &Shared,
        node: &Arc<Node>,
        limit: Duration,
    ) -> Result<(), Trouble> {
        let told = shared.openings.tell(node, limit, shared.nodes.count() > 1);
        told.await.map_err(|e| match e.kind() {
            ErrorKind::PreconditionFailed => Trouble::Final(e),
            kind if is_passing(kind) => Trouble::Broken(e),
            _ => Trouble::Refused(e),
        })
    }

    /// A connection on which frames follow.
    async fn body(
        &self,
        shared: &Shared,
        node: &Arc<Node>,
        limit: Duration,
    ) -> Result<Body, Trouble> {
        let of = |e: Error| match is_passing(e.kind()) {
            true => Trouble::Broken(e),
            false => Trouble::Refused(e),
        };
        let began = Instant::now();
        let reached = async {
            node.find_socket(limit).await?;
            node.dial(limit).await
        };
        let io = match timeout(limit, reached).await {
            Ok(reached) => reached.map_err(|missed| of(missed.failure.into()))?,
            Err(_) => {
                let e = Error::timeout(format!("{node} cannot be reached"));
                return Err(Trouble::Broken(e));
            }
        };
        shared
            .counters
            .rtt_us
            .fetch_min(began.elapsed().as_micros() as u64, Relaxed);
        let lane = forebay_protocol::stream::Lane {
            connection: self.number,
            of: self.of,
            from_step: self.next,
        };
        let mut path = format!("{}?{}", shared.path, lane.query());
        if let Some(job) = &shared.job {
            path.push_str(&format!("&{JOB_PARAMETER}={}", encode(job)));
        }
        let request = Request {
            path: &path,
            headers: &node.request_headers(),
            body: &shared.body,
        };
        let has_others = shared.nodes.count() > 1;
        let patience = Patience {
            silence: shared.silence,
            replaceable: has_others.then(|| (node.clone(), limit.min(CONNECT_MAX))),
        };
        Body::open(io, request, patience).await.map_err(of)
    }

    async fn frames(
        &mut self,
        shared: &Shared,
        body: &mut Body,
        heard: &mut bool,
        open: &Open<'_>,
    ) -> Result<(), Trouble> {
        let counters = &shared.counters;
        let mut until = self.until.clone();
        loop {
            let began = Instant::now();
            let mut head = [0; FRAME_HEADER_BYTES];
            let next = self.next;
            let whole = tokio::select! {
                whole = body.read_exact(&mut head) => whole.map_err(Trouble::Broken)?,
                // The sender of `until` lives as long as the lanes; without it, nothing more is
                // taken over.
                Ok(_) = until.wait_for(|until| next >= *until) => return Ok(()),
            };
            if !whole {
                return Err(Trouble::Broken(Error::origin_unavailable(
                    "the stream ended without saying so",
                )));
            }
            counters
                .wire_bytes
                .fetch_add(FRAME_HEADER_BYTES as u64, Relaxed);
            let header = FrameHeader::decode(&head).map_err(Trouble::Broken)?;
            add_duration(&counters.network_us, began.elapsed());
            if header.kind != FrameKind::Rows {
                if self.short_frame(shared, body, &header, open).await? {
                    return Ok(());
                }
                *heard = true;
                continue;
            }
            if header.tag.step != self.next {
                let e = Error::internal(format!(
                    "the node sent step {} where step {} was expected",
                    header.tag.step, self.next
                ));
                return Err(Trouble::Final(e.hint("run the same release on all nodes")));
            }
            let (room, paused) = shared.shelf.room(self.next, header.payload_bytes).await;
            add_duration(&counters.paused_us, paused);
            let began = Instant::now();
            let payload = receive(shared, body, &header).await?;
            add_duration(&counters.network_us, began.elapsed());
            counters.received_steps.fetch_add(1, Relaxed);
            counters
                .received_bytes
                .fetch_add(header.payload_bytes, Relaxed);
            shared
                .shelf
                .put(room, self.next, Received { header, payload });
            shared.nodes.works(self.node);
            *heard = true;
            self.next += u64::from(self.of);
            if self.is_over() {
                return Ok(());
            }
        }
    }

    /// Reads a frame without rows; returns true if it is the last one.
    async fn short_frame(
        &self,
        shared: &Shared,
        body: &mut Body,
        header: &FrameHeader,
        open: &Open<'_>,
    ) -> Result<bool, Trouble> {
        if header.payload_bytes > SHORT_PAYLOAD_MAX_BYTES {
            return Err(Trouble::Broken(Error::corrupt(format!(
                "the node sent a message of {} bytes, which is too long",
                header.payload_bytes
            ))));
        }
        let payload = receive(shared, body, header).await?;
        match header.kind {
            FrameKind::KeepAlive => {
                shared.counters.node_says(open.connect, &payload, false);
                Ok(false)
            }
            FrameKind::End => {
                shared.counters.node_says(open.connect, &payload, true);
                shared.shelf.end_at(header.tag.step);
                Ok(true)
            }
            _ => {
                let error = decode_error(header, &payload);
                Err(if error.kind().is_transient() {
                    Trouble::Broken(error)
                } else {
                    Trouble::Final(error)
                })
            }
        }
    }
}

/// Whether a retry may help: the trouble is with a connection or a moment, not with the request.
fn is_passing(kind: ErrorKind) -> bool {
    kind.is_transient() || kind == ErrorKind::Internal
}

/// Reads a payload into place, and reads its padding away.
async fn receive(
    shared: &Shared,
    body: &mut Body,
    header: &FrameHeader,
) -> Result<Buffer, Trouble> {
    let length = header.payload_bytes as usize;
    let mut payload = shared
        .pool
        .take(header.wire_payload_bytes() as usize)
        .map_err(Trouble::Final)?;
    let mut wasted = Wasted(&shared.counters, 0);
    // The checksum is computed as the data arrives, while it is in the processor's cache.
    let (mut crc, mut summed) = (0, 0);
    while !payload.spare().is_empty() {
        let n = body.read(payload.spare()).await.map_err(Trouble::Broken)?;
        if n == 0 {
            return Err(Trouble::Broken(Error::origin_unavailable(
                "the stream ended in the middle of a frame",
            )));
        }
        // SAFETY: `read` has written that many bytes.
        unsafe { payload.advance(n) };
        wasted.1 += n as u64;
        shared.counters.wire_bytes.fetch_add(n as u64, Relaxed);
        let upto = payload.written().len().min(length);
        crc = crc32c_append(crc, &payload.written()[summed..upto]);
        summed = upto;
    }
    if crc != header.payload_crc {
        let what = format!(
            "step {}: its {length} bytes do not match their checksum",
            header.tag.step
        );
        return Err(Trouble::Broken(
            Error::corrupt(what).hint("check for a proxy that changes bodies"),
        ));
    }
    wasted.1 = 0;
    Ok(payload.into_buffer(length))
}

/// Counts what arrived of a frame that was not completed.
struct Wasted<'a>(&'a Counters, u64);

impl Drop for Wasted<'_> {
    fn drop(&mut self) {
        self.0.wasted_bytes.fetch_add(self.1, Relaxed);
    }
}

/// Counts a connection while it is open.
struct Open<'a> {
    counters: &'a Counters,
    connect: u64,
}

impl<'a> Open<'a> {
    fn of(shared: &'a Shared, connect: u64) -> Self {
        shared.counters.connections.fetch_add(1, Relaxed);
        Open {
            counters: &shared.counters,
            connect,
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.counters.connections.fetch_sub(1, Relaxed);
        self.counters.connection_ended(self.connect);
    }
}
