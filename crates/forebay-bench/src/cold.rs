//! Cold batches from an origin at a distance: how many round trips they cost beyond the transfer of
//! their bytes.
//!
//! The origin is another node over the same objects, warm, behind a proxy that adds a round trip
//! and caps the bandwidth. Each repetition starts a node with an empty cache and requests one batch
//! (its connections to the origin are new, and each costs an extra round trip), then another batch
//! of entries that were not seen yet (the connections exist). The transfer time is the number of
//! bytes that the proxy let through to the node, divided by the bandwidth that it allows. The
//! figure is the rest of the time divided by the round trip. Next to it the report shows how many
//! bytes were let through, and a figure that counts what the client did not ask for as waiting
//! (`strictly`): what is fetched in vain takes time too.

use crate::{
    child::{Distance, Node, NodeOptions},
    data::{self, BUCKET, Dataset},
    interrupt,
    load::{self, Load, Outcome},
    measure::Timing,
    report::{Figures, Goal, Row},
    request::{Kind, Maker},
    site::{Asked, Plan, Site, Source, Transport},
    wire::Address,
};
use forebay_core::{Error, Result, units::format_bytes};
use std::time::Duration;

const BATCH: usize = 128;
/// Batches of one repetition: the first on a new node, and the next.
const BATCHES: usize = 2;
/// Shards are about this large, and hold at most this many members.
const SHARD_BYTES: u64 = 2 << 20;
const SHARD_MEMBERS_MAX: u64 = 64;
pub const SIZES: [u64; 2] = [10 << 10, 100 << 10];
const BATCH_TIMEOUT: Duration = Duration::from_secs(60);

/// How far away the origin is.
#[derive(Clone, Copy, Debug)]
pub struct Far {
    pub rtt: Duration,
    pub bytes_per_s: u64,
}

/// The requested shards: how many, and of what size.
#[derive(Clone, Copy, Debug)]
pub struct Shards {
    pub count: usize,
    /// Default: about two chunks of the cache.
    pub bytes: Option<u64>,
    /// The members at the beginning of each, instead of somewhere in it.
    pub front: bool,
}

impl Shards {
    pub const USUAL: Self = Self {
        count: 64,
        bytes: None,
        front: false,
    };

    /// `64 shards`, `1 shard of 64.0 MiB`.
    fn words(&self) -> String {
        let of = self
            .bytes
            .map(|b| format!(" of {}", format_bytes(b)))
            .unwrap_or_default();
        format!(
            "{}{} shard{}{of}",
            if self.front { "the front of " } else { "" },
            self.count,
            if self.count == 1 { "" } else { "s" }
        )
    }

    fn members(&self, size: u64) -> u64 {
        match self.bytes {
            Some(bytes) => (bytes / size.max(1)).max(1),
            None => (SHARD_BYTES / size.max(1)).clamp(4, SHARD_MEMBERS_MAX),
        }
    }
}

pub fn run(
    plan: &Plan,
    timing: &Timing,
    far: &Far,
    sizes: &[u64],
    shards: Shards,
    mut say: impl FnMut(&str),
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &size in sizes {
        for source in [Source::Objects, Source::Members] {
            let per_shard = shards.members(size);
            let count = if source == Source::Objects {
                BATCH as u64 * BATCHES as u64
            } else {
                shards.count as u64 * BATCHES as u64 * per_shard
            };
            let mut site = Site::new(
                &Plan {
                    size,
                    count,
                    per_shard,
                    ..plan.clone()
                },
                &[source],
            )?;
            let origin = site.start(true, None, &[])?;
            let all = site.data(source)?.clone();
            origin.warm(&all, timing.seed)?;
            let what = if source == Source::Objects {
                format!("{BATCH} × {} objects", format_bytes(size))
            } else {
                format!(
                    "{BATCH} × {} members of {}",
                    format_bytes(size),
                    shards.words()
                )
            };
            let what = what.replace(".0 ", " ");
            say(&format!("cold: {what}"));
            let goal = Goal::at_most(
                "round_trips",
                if source == Source::Objects { 3.0 } else { 6.0 },
            );
            let cold = Cold {
                plan,
                timing,
                far,
                all: &all,
                source,
                shards,
                per_shard,
            };
            let mut runs: [Vec<Figures>; BATCHES] = Default::default();
            for _ in 0..timing.repeats {
                let figures = repetition(&cold, origin.at(Transport::Tcp)?)?;
                for (all, one) in runs.iter_mut().zip(figures) {
                    all.push(one);
                }
                interrupt::check()?;
            }
            for (runs, when) in runs.iter().zip(["first batch of a new node", "next batch"]) {
                rows.push(Row::of(
                    format!("cold {what}, {when}"),
                    runs,
                    vec![goal.clone()],
                ));
            }
        }
    }
    Ok(rows)
}

/// The entries of batch number `n`: no two batches share an object or a shard.
fn entries(source: Source, shards: Shards, per_shard: u64, n: usize) -> Vec<u32> {
    let Shards { count, front, .. } = shards;
    match source {
        Source::Objects => (0..BATCH).map(|i| (n * BATCH + i) as u32).collect(),
        // Each shard as often as the others.
        Source::Members => (0..BATCH)
            .map(|i| {
                let member = match front {
                    true => (i / count) as u64,
                    false => i as u64 * 29 + 7,
                };
                ((n * count + i % count) as u64 * per_shard + member % per_shard) as u32
            })
            .collect(),
    }
}

/// One kind of cold batch.
#[derive(Clone, Copy)]
struct Cold<'a> {
    plan: &'a Plan,
    timing: &'a Timing,
    far: &'a Far,
    all: &'a Dataset,
    source: Source,
    shards: Shards,
    per_shard: u64,
}

fn repetition(cold: &Cold, origin: &Address) -> Result<Vec<Figures>> {
    let Cold {
        plan,
        timing,
        far,
        all,
        source,
        shards,
        per_shard,
    } = *cold;
    let Address::Tcp(origin) = origin else {
        return Err(Error::internal("the origin has a TCP address"));
    };
    let dir = data::scratch(plan.within.as_deref())?;
    let distance = Distance::start(
        &plan.program,
        *origin,
        far.rtt,
        far.bytes_per_s,
        dir.path().join("distance.log"),
    )?;
    let node = Node::start(&NodeOptions {
        program: plan.program.clone(),
        origin: format!(
            "{BUCKET}=s3://{BUCKET}?endpoint=http://{}&anonymous=true&path_style=true",
            distance.at
        )
        .into(),
        cache: dir.path().join("cache"),
        cache_bytes: 2 * all.bytes() + (1 << 30),
        sets: plan.sets.clone(),
    })?;
    let asked = Asked {
        tcp: Some(node.tcp.clone()),
        unix: Some(node.unix.clone()),
        process: None,
        token: None,
        admin: None,
    };
    // When it starts, a node lists the bucket, to report wrong credentials at once: let that
    // finish.
    std::thread::sleep(far.rtt * 4 + Duration::from_millis(100));
    let maker = Maker {
        data: all,
        host: asked.host(),
        token: None,
        sign: None,
    };
    let mut figures = Vec::new();
    for n in 0..BATCHES {
        let requests = [maker.batch(&entries(source, shards, per_shard, n))];
        let before = distance.counters()?;
        let outcome = load::run(&Load {
            at: &node.tcp,
            kind: Kind::Batch,
            data: all,
            requests: &requests,
            clients: 1,
            buffer_bytes: timing.buffer_bytes,
            ramp: Duration::ZERO,
            window: BATCH_TIMEOUT,
            verify: true,
            once: true,
            seed: timing.seed,
            server: None,
            by_gets: None,
        })?;
        let after = distance.counters()?;
        figures.push(figures_of(&outcome, far, &before, &after)?);
        // What was fetched ahead must not count towards the next batch.
        settle(&distance, far)?;
    }
    drop(node);
    Ok(figures)
}

/// Waits until nothing has passed the proxy for two round trips.
fn settle(distance: &Distance, far: &Far) -> Result<()> {
    let mut last = distance.counters()?;
    loop {
        std::thread::sleep(far.rtt * 2 + Duration::from_millis(20));
        let now = distance.counters()?;
        if now == last {
            return Ok(());
        }
        last = now;
        interrupt::check()?;
    }
}

fn figures_of(
    outcome: &Outcome,
    far: &Far,
    before: &crate::child::Counters,
    after: &crate::child::Counters,
) -> Result<Figures> {
    let time = outcome.elapsed.as_secs_f64();
    let bytes = (after.bytes_to_client - before.bytes_to_client) as f64;
    let transfer = bytes / far.bytes_per_s as f64;
    if outcome.objects == 0 || bytes < outcome.bytes as f64 {
        return Err(Error::internal(format!(
            "{} entries came from {bytes} bytes of the origin: the batch was not cold",
            outcome.objects
        )));
    }
    Ok(Figures::from([
        ("batch_us".to_owned(), time * 1e6),
        ("transfer_us".to_owned(), transfer * 1e6),
        (
            "round_trips".to_owned(),
            (time - transfer) / far.rtt.as_secs_f64(),
        ),
        (
            "strict_round_trips".to_owned(),
            (time - outcome.bytes as f64 / far.bytes_per_s as f64) / far.rtt.as_secs_f64(),
        ),
        (
            "origin_requests".to_owned(),
            (after.requests - before.requests) as f64,
        ),
        (
            "origin_connections".to_owned(),
            (after.connections - before.connections) as f64,
        ),
        ("origin_bytes".to_owned(), bytes),
    ]))
}
