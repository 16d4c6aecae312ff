//! How the nodes of a cluster are doing, and in what they differ though they should not: keys and
//! policies, buckets and origins, release.
//!
//! Nodes compare hashes, keyed with the name of the cluster, and tell them nobody but each other:
//! operators see who differs in what. A node that does not answer counts as it did before.

use crate::{app::App, listener::Stop, operate, operate::Order, pins::Extent, v1::cache_dir};
use forebay_core::{Error, Result, sync::Mutex};
use forebay_protocol::cluster::{ClusterStatus, NodeFigures};
use futures::{StreamExt, stream};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

/// A node that takes longer is shown as one that does not answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Nodes that are asked at the same time.
const NODES_AT_ONCE: usize = 64;
/// How often differences are looked for.
const COMPARE_EVERY: Duration = Duration::from_secs(10);

const KEYS: &str = "keys";
const BUCKETS: &str = "buckets";
const RELEASE: &str = "release";

/// What must be the same on all nodes, as hashes, and the release.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Prints {
    keys: String,
    buckets: String,
    release: String,
}

impl Prints {
    fn of(app: &App) -> Result<Self> {
        let cluster = &operate::cluster(app)?.me().cluster;
        let config = app.config();
        let mut origins = Vec::new();
        for origin in &config.origins {
            origins.push(text(origin)?);
        }
        origins.sort_unstable();
        origins.push(text(&config.buckets)?);
        origins.push(text(&config.cache.mirror)?);
        Ok(Prints {
            keys: print(cluster, KEYS, &app.access.revealed())?,
            buckets: print(cluster, BUCKETS, &origins)?,
            release: crate::VERSION.to_owned(),
        })
    }

    /// In what they differ.
    fn differences(&self, other: &Prints) -> Vec<&'static str> {
        let all = [
            (KEYS, self.keys != other.keys),
            (BUCKETS, self.buckets != other.buckets),
            (RELEASE, self.release != other.release),
        ];
        let differing = all.into_iter().filter(|(_, differs)| *differs);
        differing.map(|(what, _)| what).collect()
    }
}

fn text<T: Serialize>(setting: &T) -> Result<String> {
    serde_json::to_string(setting)
        .map_err(|e| Error::internal("a setting that cannot be written").caused_by(e))
}

/// A hash of lines, which says nothing to whoever does not have both them and the cluster's name.
fn print(cluster: &str, what: &str, lines: &[String]) -> Result<String> {
    let mut mac = Hmac::<Sha256>::new_from_slice(cluster.as_bytes())
        .map_err(|e| Error::internal(format!("the name of the cluster is no key: {e}")))?;
    for line in std::iter::once(what).chain(lines.iter().map(String::as_str)) {
        mac.update(&(line.len() as u64).to_le_bytes());
        mac.update(line.as_bytes());
    }
    let bytes = mac.finalize().into_bytes();
    Ok(bytes[..16].iter().map(|b| format!("{b:02x}")).collect())
}

/// What a node tells another one of itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Told {
    figures: NodeFigures,
    prints: Prints,
    /// New at each start of the node; earlier releases do not say it.
    boot: u64,
    /// Of what it was told to pin; earlier releases do not say it.
    pins: Extent,
}

impl Told {
    pub fn of(app: &App) -> Result<Self> {
        Ok(Told {
            figures: figures(app),
            prints: Prints::of(app)?,
            boot: operate::cluster(app)?.me().boot,
            pins: app
                .pins
                .as_ref()
                .map(|pins| pins.extent())
                .unwrap_or_default(),
        })
    }
}

fn figures(app: &App) -> NodeFigures {
    let store = app.engine.cache_stats();
    let entries = store.as_ref().map_or(0, |s| s.entries);
    let dirs = store.map(|s| s.dirs).unwrap_or_default();
    let engine = app.engine.stats().snapshot();
    let [requests, requests_failed, sent_bytes] = app.metrics.totals();
    let links = app.joined.iter().flat_map(|joined| joined.cluster.links());
    let origins = app.origins.stats();
    let copies = app
        .joined
        .as_ref()
        .map(|joined| joined.cluster.copies_status());
    let copies = copies.unwrap_or_default();
    let (hit, miss) = (
        engine.reads_hit + engine.reads_revalidated + engine.reads_stale,
        engine.reads_miss,
    );
    NodeFigures {
        version: crate::VERSION.to_owned(),
        uptime_seconds: app.began.elapsed().as_secs(),
        capacity_bytes: dirs.iter().map(|d| d.capacity_bytes).sum(),
        used_bytes: dirs.iter().map(|d| d.used_bytes).sum(),
        entries,
        dirs: dirs.into_iter().map(cache_dir).collect(),
        requests,
        requests_failed,
        sent_bytes,
        reads: hit + miss + engine.reads_bypass,
        reads_hit: hit,
        reads_miss: miss,
        from_nodes_bytes: links.map(|link| link.received_bytes).sum(),
        from_buckets_bytes: origins.iter().map(|(_, stats)| stats.bytes_in).sum(),
        copied_bytes: copies.bytes,
        copies_behind: copies.behind,
    }
}

/// What the other members tell, by their ids.
async fn others(app: &App) -> Result<BTreeMap<u64, Result<Told>>> {
    let cluster = operate::cluster(app)?;
    let order = serde_json::to_value(Order::Figures)
        .map_err(|e| Error::internal("an order that cannot be written").caused_by(e))?;
    let me = cluster.me().node;
    let members = cluster.map().members.into_iter().map(|m| m.id);
    let told = stream::iter(members.filter(|&id| id != me))
        .map(|id| {
            let asked = timeout(PATIENCE, cluster.operate(id, order.clone()));
            async move {
                let answer = match asked.await {
                    Ok(answer) => answer,
                    Err(_) => Err(Error::origin_unavailable(format!(
                        "no answer within {PATIENCE:?}"
                    ))),
                };
                let told = answer.and_then(|words| {
                    serde_json::from_slice(&words)
                        .map_err(|e| Error::corrupt(format!("an answer that cannot be read: {e}")))
                });
                (id, told)
            }
        })
        .buffer_unordered(NODES_AT_ONCE);
    Ok(told.collect().await)
}

/// Adds to the status of a cluster what each node says of itself.
pub async fn show(app: &App, status: &mut ClusterStatus) -> Result<()> {
    let mine = Told::of(app)?;
    let mut told = others(app).await?;
    for member in &mut status.members {
        if member.here {
            member.figures = Some(mine.figures.clone());
            continue;
        }
        let id = u64::from_str_radix(&member.id, 16).unwrap_or_default();
        match told.remove(&id) {
            Some(Ok(told)) => {
                let differs = mine.prints.differences(&told.prints);
                member.differs = differs.into_iter().map(str::to_owned).collect();
                member.version.clone_from(&told.figures.version);
                member.figures = Some(told.figures);
            }
            Some(Err(e)) => member.untold = Some(e.describe()),
            None => member.untold = Some("it has just joined".to_owned()),
        }
    }
    let used = status.members.iter().filter_map(|m| m.figures.as_ref());
    status.spread = spread(used.map(|f| f.used_bytes));
    Ok(())
}

/// The most of any, divided by the mean.
fn spread(bytes: impl Iterator<Item = u64>) -> Option<f64> {
    let (n, sum, most) = bytes.fold((0_u64, 0_u64, 0), |(n, sum, most), bytes| {
        (n + 1, sum + bytes, bytes.max(most))
    });
    (sum > 0).then(|| most as f64 * n as f64 / sum as f64)
}

/// In what other nodes differ from this one, as was last seen.
#[derive(Default)]
pub struct Differences {
    /// What each tells; one for each member.
    prints: Mutex<BTreeMap<u64, Vec<&'static str>>>,
    /// Which start of each node told it.
    boots: Mutex<BTreeMap<u64, u64>>,
    /// How far what each was told to pin was then, by that start.
    pins: Mutex<BTreeMap<u64, (u64, Extent)>>,
}

impl Differences {
    /// How many nodes differ in each of what must be the same.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let all = self.prints.lock();
        [KEYS, BUCKETS, RELEASE].map(|what| {
            let differing = all.values().filter(|differs| differs.contains(&what));
            (what, differing.count() as u64)
        })
    }

    /// Which start of each other node was seen last.
    pub fn boots(&self) -> BTreeMap<u64, u64> {
        self.boots.lock().clone()
    }

    /// How far each other node was with what it was told to pin, and since which start of it.
    pub fn pins(&self) -> BTreeMap<u64, (u64, Extent)> {
        self.pins.lock().clone()
    }

    /// Notes what a node differs in; returns whether that is new.
    fn note(&self, node: u64, differs: Vec<&'static str>) -> bool {
        let mut all = self.prints.lock();
        let before = all.insert(node, differs.clone()).unwrap_or_default();
        before != differs
    }

    fn keep(&self, is_member: impl Fn(u64) -> bool) {
        self.prints.lock().retain(|&node, _| is_member(node));
        self.boots.lock().retain(|&node, _| is_member(node));
        self.pins.lock().retain(|&node, _| is_member(node));
    }
}

/// Looks for differences until the node stops; the log tells of each change once.
pub async fn watch(app: Arc<App>, stop: Stop) {
    // Nodes that start together are not there yet, and would count as silent.
    let mut ticks = interval_at(Instant::now() + COMPARE_EVERY, COMPARE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.stop.cancelled() => return,
        }
        let looked = tokio::select! {
            looked = compare(&app) => looked,
            () = stop.stop.cancelled() => return,
        };
        if let Err(e) = looked {
            tracing::warn!(error = %e.describe(), "other nodes cannot be compared with this one");
        }
    }
}

/// Asks the other nodes once.
///
/// # Errors
/// If this node cannot say what it is itself.
pub async fn compare(app: &App) -> Result<()> {
    let members = operate::cluster(app)?.map().members;
    let told = others(app).await?;
    let mine = Prints::of(app)?;
    app.differences
        .keep(|node| members.iter().any(|m| m.id == node));
    for (node, told) in told {
        let Ok(told) = told else {
            continue;
        };
        app.differences.boots.lock().insert(node, told.boot);
        let pins = (told.boot, told.pins);
        app.differences.pins.lock().insert(node, pins);
        let differs = mine.differences(&told.prints);
        if !app.differences.note(node, differs.clone()) {
            continue;
        }
        let label = members.iter().find(|m| m.id == node).map(|m| m.label());
        let label = label.unwrap_or_else(|| format!("{node:016x}"));
        match differs.is_empty() {
            true => tracing::info!(
                node = label,
                "another node has the same settings as this one \
                again"
            ),
            false => tracing::warn!(
                node = label,
                differs = differs.join(", "),
                "another node has \
                other settings than this one: what clients may do and see depends on the node that \
                they ask"
            ),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_and_what_it_is_is_not() {
        let lines = |secret: &str| vec![format!("key {secret}"), "b".to_owned()];
        let of = |cluster, secret| print(cluster, KEYS, &lines(secret)).unwrap();
        assert_eq!(of("c", "s"), of("c", "s"));
        assert_ne!(of("c", "s"), of("c", "t"));
        assert_ne!(of("c", "s"), of("d", "s"));
        // Where one line ends counts.
        let split = ["ke".to_owned(), "y sb".to_owned()];
        assert_ne!(print("c", KEYS, &split).unwrap(), of("c", "s"));
        let prints = |keys: &str, release: &str| Prints {
            keys: keys.into(),
            release: release.into(),
            ..Prints::default()
        };
        let mine = prints("1", "a");
        assert_eq!(mine.differences(&prints("1", "a")), Vec::<&str>::new());
        assert_eq!(mine.differences(&prints("2", "b")), [KEYS, RELEASE]);
    }

    #[test]
    fn a_difference_is_new_once() {
        let differences = Differences::default();
        assert!(!differences.note(1, vec![]), "as it should be");
        assert!(differences.note(1, vec![KEYS]));
        assert!(!differences.note(1, vec![KEYS]));
        assert!(differences.note(2, vec![KEYS, RELEASE]));
        assert_eq!(
            differences.counts(),
            [(KEYS, 2), (BUCKETS, 0), (RELEASE, 1)]
        );
        differences.keep(|node| node == 1);
        assert!(differences.note(1, vec![]));
        assert_eq!(
            differences.counts(),
            [(KEYS, 0), (BUCKETS, 0), (RELEASE, 0)]
        );
    }

    #[test]
    fn the_spread_is_the_most_by_the_mean() {
        assert_eq!(spread([1, 2, 3].into_iter()), Some(1.5));
        assert_eq!(spread([0, 0].into_iter()), None);
    }
}
