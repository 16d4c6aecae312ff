//! Where a stream spends its time.

use super::shelf::Level;
use forebay_core::sync::Mutex;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// What the lanes of a stream count.
pub struct Counters {
    pub began: Instant,
    pub steps: AtomicU64,
    pub rows: AtomicU64,
    /// Bytes of payloads.
    pub bytes: AtomicU64,
    /// Steps that were received, yielded or not.
    pub received_steps: AtomicU64,
    pub received_bytes: AtomicU64,
    /// Bytes of all frames that arrived, complete or not.
    pub wire_bytes: AtomicU64,
    /// Bytes of frames that were useless: cut, or past the part of a lane that others took over.
    pub wasted_bytes: AtomicU64,
    pub connects: AtomicU64,
    pub reopened: AtomicU64,
    /// Time that lanes waited for bytes.
    pub network_us: AtomicU64,
    /// Time that lanes waited for the reader.
    pub paused_us: AtomicU64,
    /// The shortest time that connecting took.
    pub rtt_us: AtomicU64,
    pub connections: AtomicU32,
    nodes: Mutex<Nodes>,
}

/// What nodes report about themselves. Each connection reports from its own beginning.
#[derive(Default)]
struct Nodes {
    ended: BTreeMap<String, f64>,
    open: BTreeMap<u64, BTreeMap<String, f64>>,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            began: Instant::now(),
            steps: AtomicU64::new(0),
            rows: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            received_steps: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            wire_bytes: AtomicU64::new(0),
            wasted_bytes: AtomicU64::new(0),
            connects: AtomicU64::new(0),
            reopened: AtomicU64::new(0),
            network_us: AtomicU64::new(0),
            paused_us: AtomicU64::new(0),
            rtt_us: AtomicU64::new(u64::MAX),
            connections: AtomicU32::new(0),
            nodes: Mutex::default(),
        }
    }
}

/// The statistics of a stream so far.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Stats {
    /// Time since it was opened.
    pub seconds: f64,
    /// Steps yielded.
    pub steps: u64,
    /// Rows of the yielded steps.
    pub rows: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Bytes of all frames that arrived, complete or not.
    pub wire_bytes: u64,
    /// Bytes of frames that were useless.
    pub wasted_bytes: u64,
    /// Connections that are open now.
    pub connections: u32,
    /// Connections opened so far, or tried.
    pub connects: u64,
    /// Connections opened in place of one that failed.
    pub reopened: u64,
    /// The shortest time that connecting took.
    pub rtt_seconds: Option<f64>,
    /// How long the reader waited for steps.
    pub waited_seconds: f64,
    /// Bytes received but not yet yielded.
    pub ahead_bytes: u64,
    /// The same in steps.
    pub ahead_steps: u64,
    /// The maximum of `ahead_bytes`.
    pub ahead_bytes_max: u64,
    /// Time spent waiting for bytes, summed over connections.
    pub network_seconds: f64,
    /// Time spent not reading because the reader is behind, summed over connections.
    pub paused_seconds: f64,
    /// Time that the nodes spent, by their own account, summed over connections.
    pub node: BTreeMap<String, f64>,
}

pub fn add_duration(to: &AtomicU64, duration: Duration) {
    to.fetch_add(duration.as_micros() as u64, Relaxed);
}

impl Counters {
    /// Takes what a node reports about connection number `connect`, so far or (`ended`) finally.
    pub fn node_says(&self, connect: u64, json: &[u8], ended: bool) {
        let Ok(said) = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(json) else {
            return;
        };
        let said = said
            .into_iter()
            .filter_map(|(k, v)| Some((k, v.as_f64()?)))
            .collect();
        let mut nodes = self.nodes.lock();
        nodes.open.insert(connect, said);
        drop(nodes);
        if ended {
            self.connection_ended(connect);
        }
    }

    pub fn connection_ended(&self, connect: u64) {
        let mut nodes = self.nodes.lock();
        for (key, value) in nodes.open.remove(&connect).unwrap_or_default() {
            *nodes.ended.entry(key).or_default() += value;
        }
    }

    pub fn stats(&self, level: Level) -> Stats {
        let micros = |of: &AtomicU64| of.load(Relaxed) as f64 / 1e6;
        let nodes = self.nodes.lock();
        let mut node = nodes.ended.clone();
        for (key, value) in nodes.open.values().flatten() {
            *node.entry(key.clone()).or_default() += value;
        }
        drop(nodes);
        Stats {
            seconds: self.began.elapsed().as_secs_f64(),
            steps: self.steps.load(Relaxed),
            rows: self.rows.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            wire_bytes: self.wire_bytes.load(Relaxed),
            wasted_bytes: self.wasted_bytes.load(Relaxed),
            connections: self.connections.load(Relaxed),
            connects: self.connects.load(Relaxed),
            reopened: self.reopened.load(Relaxed),
            rtt_seconds: Some(self.rtt_us.load(Relaxed))
                .filter(|&us| us != u64::MAX)
                .map(|us| us as f64 / 1e6),
            waited_seconds: level.waited.as_secs_f64(),
            ahead_bytes: level.bytes,
            ahead_steps: level.steps,
            ahead_bytes_max: level.most_bytes,
            network_seconds: micros(&self.network_us),
            paused_seconds: micros(&self.paused_us),
            node,
        }
    }
}
