//! `forebay cluster plan`: how evenly a cluster spreads, and what a change of it would move; and
//! whether simulated clusters keep what is promised.

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::{Out, grouped},
};
use forebay_cluster::{
    Map, Member, MemberState, Table, forecast,
    simulate::{Broken, Life, Lived},
};
use forebay_core::{Error, units};
use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};

/// What a simulated cluster has at most, if it is not said.
const SIMULATED_NODES: u16 = 1000;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay cluster plan --nodes 64 --add 8
  forebay cluster plan --nodes 16 --remove 1 --capacity 8TiB --zones 3 --rate 500MiB
  forebay cluster plan --simulate 100         # lives of 100 clusters of 500 to 1,000 nodes
  forebay cluster plan --simulate 1 --seed 17 # one of them again

A simulated cluster has nodes with random weights and zones, which join, drain, die, come back and are \
    forgotten; after each change it is checked that placement and routes keep what is promised. Exit code 1 \
    if something did not hold. JSON then: {\"clusters\", \"broken\": [{\"seed\", \"change\", \"happened\", \
    \"what\"}], \"nodes_least\", \"nodes_most\", \"maps\", \"checks\", \"moved\", \"least\", \"weights_off\", \
    \"seconds\"}.

JSON: {\"nodes\", \"units\", \"max_over_mean\", \"min_over_mean\", \"table_seconds\"}; with a change also \"moved\" and \
    \"least\" (shares of all that is cached), \"between_others\" (0), \"bytes\", \"seconds\".")]
pub struct Args {
    /// Nodes of the cluster
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "simulate",
        value_parser = clap::value_parser!(u16).range(1..=2000)
    )]
    nodes: Option<u16>,
    /// This many join
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=2000))]
    add: u16,
    /// This many leave
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        conflicts_with = "add",
        value_parser = clap::value_parser!(u16).range(0..=2000)
    )]
    remove: u16,
    /// The cache of each node, all of it in use
    #[arg(long, value_name = "SIZE", default_value = "4TiB", value_parser = units::parse_bytes)]
    capacity: u64,
    /// Zones that the nodes lie in, in turn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=2000))]
    zones: u16,
    /// What each node may send and receive for the change, in bytes per second
    #[arg(long, value_name = "SIZE", default_value = "100MiB", value_parser = units::parse_bytes)]
    rate: u64,
    /// Units (extents of 8 MiB, or smaller objects) of each node
    #[arg(long, value_name = "N", default_value_t = 2500, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    units: u64,
    /// Nodes have other identities with each number
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Simulate so many clusters, with this seed and the following ones; they have at most --nodes
    /// nodes [default: 1000], and at least half of them
    #[arg(
        long,
        value_name = "CLUSTERS",
        conflicts_with_all = ["add", "remove", "capacity", "zones", "rate", "units"],
        value_parser = clap::value_parser!(u64).range(1..=10_000)
    )]
    simulate: Option<u64>,
    /// How often something happens to each simulated cluster
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        requires = "simulate",
        value_parser = clap::value_parser!(u32).range(0..=1000)
    )]
    changes: u32,
}

fn members(args: &Args, count: u16) -> Vec<Member> {
    (0..count)
        .map(|n| Member {
            id: (args.seed << 16 | u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            name: String::new(),
            address: format!("node-{n}"),
            url: String::new(),
            zone: format!("zone-{}", n % args.zones),
            weight: args.capacity,
            state: MemberState::Active,
        })
        .collect()
}

pub fn run(args: &Args, common: &Common) -> Outcome {
    if let Some(clusters) = args.simulate {
        return simulate(clusters, args, common);
    }
    let nodes = args.nodes.unwrap_or(1);
    let after = (nodes + args.add).checked_sub(args.remove);
    let Some(after) = after.filter(|&n| n > 0) else {
        return Err(Failure::Usage(
            Error::invalid(format!(
                "--remove {} of --nodes {nodes} leaves none",
                args.remove
            ))
            .hint("remove fewer"),
        ));
    };
    if args.capacity == 0 || args.rate == 0 {
        return Err(Failure::Usage(Error::invalid(
            "--capacity and --rate must not be 0",
        )));
    }
    let placed = |map: Map| {
        let table = Table::new(&map);
        (map, table)
    };
    let before = Map::new("plan", args.seed, members(args, nodes))?;
    let next = before.with(members(args, after))?;
    let began = Instant::now();
    let (before, next) = (placed(before), placed(next));
    let table_seconds = began.elapsed().as_secs_f64() / 2.0;
    let units = args.units * u64::from(after);
    let spread = forecast::spread(&next.0, &next.1, units)
        .ok_or_else(|| Error::internal("a cluster with nodes places nothing"))?;
    let cached = args.capacity as f64 * f64::from(nodes);
    let moves = forecast::moves((&before.0, &before.1), (&next.0, &next.1));
    // Whoever sends or receives most decides how long it takes.
    let most = moves.received.iter().copied().fold(0.0, f64::max);
    let leaving = f64::from(args.remove.max(1));
    let seconds = (most * cached).max(if args.remove > 0 {
        moves.moved * cached / leaving
    } else {
        0.0
    }) / args.rate as f64;
    let changes = args.add > 0 || args.remove > 0;

    let mut out = Out::new(common.json);
    if out.json {
        let mut json = serde_json::json!({
            "nodes": after, "units": units, "max_over_mean": spread.max_over_mean,
            "min_over_mean": spread.min_over_mean, "table_seconds": table_seconds,
        });
        if changes {
            for (name, value) in [
                ("moved", moves.moved),
                ("least", moves.least),
                ("between_others", moves.between_others),
                ("bytes", (moves.moved * cached).round()),
                ("seconds", seconds),
            ] {
                json[name] = value.into();
            }
        }
        return out.object(&json);
    }
    out.line(format!(
        "spread   {} units over {after} nodes: {:.3} to {:.3} of the mean",
        grouped(units),
        spread.min_over_mean,
        spread.max_over_mean
    ))?;
    if changes {
        out.line(format!(
            "moves    {:.2} % of what is cached ({}); at least {:.2} % must; between other nodes {:.2} %",
            moves.moved * 100.0,
            units::format_bytes((moves.moved * cached) as u64),
            moves.least * 100.0,
            moves.between_others * 100.0
        ))?;
        out.line(format!(
            "takes    {:.0} minutes, if each node sends and receives {} a second for it",
            (seconds / 60.0).ceil(),
            units::format_bytes(args.rate)
        ))?;
    }
    out.line(format!(
        "table    {:.0} ms to compute, once for each change of the map",
        table_seconds * 1e3
    ))?;
    out.flush()
}

/// Lives of clusters, on all cores.
fn simulate(clusters: u64, args: &Args, common: &Common) -> Outcome {
    let nodes = args.nodes.unwrap_or(SIMULATED_NODES);
    let lives = (0..clusters).map(|n| Life {
        seed: args.seed.wrapping_add(n),
        nodes,
        changes: args.changes,
    });
    let lives: Vec<Life> = lives.collect();
    let (next, done) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let began = Instant::now();
    let live = || {
        while let Some(life) = lives.get(next.fetch_add(1, Relaxed) as usize) {
            let lived = life.live();
            done.lock().unwrap_or_else(|e| e.into_inner()).push(lived);
        }
    };
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    thread::scope(|scope| {
        for _ in 0..threads.min(lives.len()) {
            scope.spawn(live);
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    let (all, broken) = summed(&done);

    let mut out = Out::new(common.json);
    if out.json {
        let broken: Vec<_> = (broken.iter())
            .map(|b| {
                serde_json::json!({
                    "seed": b.life.seed, "change": b.after, "happened": b.happened, "what": b.what,
                })
            })
            .collect();
        let is_whole = broken.is_empty() && done.len() == lives.len();
        out.object(&serde_json::json!({
            "clusters": done.len(), "broken": broken, "nodes_least": all.nodes_least,
            "nodes_most": all.nodes_most, "maps": all.maps, "checks": all.checks,
            "moved": all.moved, "least": all.least, "weights_off": all.weights_off,
            "seconds": seconds,
        }))?;
        return if is_whole {
            Ok(())
        } else {
            Err(Failure::Reported)
        };
    }
    out.line(format!(
        "lived    {} clusters of {} to {} nodes in {seconds:.0} s: {} maps, {} checks",
        done.len(),
        all.nodes_least,
        all.nodes_most,
        grouped(u64::from(all.maps)),
        grouped(all.checks)
    ))?;
    out.line(format!(
        "moves    {:.3} times what has to; members of one weight are off by {:.2} % at most",
        all.moved / all.least.max(f64::MIN_POSITIVE),
        all.weights_off * 100.0
    ))?;
    out.line(format!("broken   {}", broken.len()))?;
    for one in &broken {
        out.line(format!("  {one}"))?;
    }
    out.flush()?;
    match broken.first() {
        None => Ok(()),
        Some(one) => Err(Error::internal(format!(
            "{} of {clusters} simulated clusters do not keep what is promised",
            broken.len()
        ))
        .hint(format!(
            "`forebay cluster plan --simulate 1 --seed {} --nodes {nodes} --changes {}` lives the \
             first of them again",
            one.life.seed, one.life.changes
        ))
        .into()),
    }
}

fn summed(done: &[Result<Lived, Broken>]) -> (Lived, Vec<&Broken>) {
    let lived = || done.iter().filter_map(|d| d.as_ref().ok());
    let all = Lived {
        nodes_least: lived().map(|l| l.nodes_least).min().unwrap_or(0),
        nodes_most: lived().map(|l| l.nodes_most).max().unwrap_or(0),
        maps: lived().map(|l| l.maps).sum(),
        checks: lived().map(|l| l.checks).sum(),
        moved: lived().map(|l| l.moved).sum(),
        least: lived().map(|l| l.least).sum(),
        weights_off: lived().map(|l| l.weights_off).fold(0.0, f64::max),
    };
    let mut broken: Vec<_> = done.iter().filter_map(|d| d.as_ref().err()).collect();
    broken.sort_by_key(|b| b.life.seed);
    (all, broken)
}
