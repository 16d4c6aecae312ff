//! The clients that a stream may be read through, and which of them seem to be down.
//!
//! Every node computes the same plan, so any of them can send any step: a lane whose node fails
//! switches to another one, of the same client if that has several, or of the next.

use crate::Client;
use forebay_core::{Error, Result, sync::Mutex};
use std::time::{Duration, Instant};

const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

pub struct Nodes {
    nodes: Vec<Client>,
    health: Mutex<Vec<Health>>,
}

#[derive(Clone, Copy, Default)]
struct Health {
    failures: u32,
    down_until: Option<Instant>,
}

impl Nodes {
    pub fn new(nodes: Vec<Client>) -> Result<Self> {
        if nodes.is_empty() {
            return Err(Error::invalid("a stream needs at least one node"));
        }
        let health = Mutex::new(vec![Health::default(); nodes.len()]);
        Ok(Nodes { nodes, health })
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// How many nodes there are behind the clients.
    pub fn count(&self) -> usize {
        self.nodes.iter().map(Client::count).sum()
    }

    pub fn get(&self, i: usize) -> &Client {
        &self.nodes[i % self.nodes.len()]
    }

    pub fn works(&self, i: usize) {
        let i = i % self.nodes.len();
        self.health.lock()[i] = Health::default();
    }

    /// Node `i` failed. Returns which node to use, and when: the next one that is not known to be
    /// down, or the one that is worth a try first.
    pub fn fails(&self, i: usize, not_before: Option<Duration>) -> (usize, Duration) {
        let (i, now) = (i % self.nodes.len(), Instant::now());
        let mut health = self.health.lock();
        // Many lanes see the same node fail: that counts once for as long as it is considered down.
        if health[i].down_until.is_none_or(|until| until <= now) {
            let pause = (BACKOFF_FIRST * 2u32.saturating_pow(health[i].failures.min(10)))
                .min(BACKOFF_MAX)
                .max(not_before.unwrap_or_default());
            health[i] = Health {
                failures: health[i].failures + 1,
                down_until: Some(now + pause),
            };
        }
        let wait = |node: usize| {
            health[node]
                .down_until
                .map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
        };
        let n = self.nodes.len();
        // Of several that may be asked now, one that did not fail.
        let best = (1..=n)
            .map(|d| (i + d) % n)
            .min_by_key(|&node| (wait(node), health[node].failures))
            .unwrap_or(i);
        (best, wait(best))
    }
}
