//! `forebay cluster plan`: how evenly a cluster spreads, and what a change of it would move.

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::{Out, grouped},
};
use forebay_cluster::{Map, Member, MemberState, Table, forecast};
use forebay_core::{Error, units};
use std::time::Instant;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay cluster plan --nodes 64 --add 8
  forebay cluster plan --nodes 16 --remove 1 --capacity 8TiB --zones 3 --rate 500MiB

JSON: {\"nodes\", \"units\", \"max_over_mean\", \"min_over_mean\", \"table_seconds\"}; with a change also \"moved\" and
\"least\" (shares of all that is cached), \"between_others\" (0), \"bytes\", \"seconds\".")]
pub struct Args {
    /// Nodes of the cluster
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=2000))]
    nodes: u16,
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
    let after = (args.nodes + args.add).checked_sub(args.remove);
    let Some(after) = after.filter(|&n| n > 0) else {
        return Err(Failure::Usage(
            Error::invalid(format!(
                "--remove {} of --nodes {} leaves none",
                args.remove, args.nodes
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
    let before = Map::new("plan", args.seed, members(args, args.nodes))?;
    let next = before.with(members(args, after))?;
    let began = Instant::now();
    let (before, next) = (placed(before), placed(next));
    let table_seconds = began.elapsed().as_secs_f64() / 2.0;
    let units = args.units * u64::from(after);
    let spread = forecast::spread(&next.0, &next.1, units)
        .ok_or_else(|| Error::internal("a cluster with nodes places nothing"))?;
    let cached = args.capacity as f64 * f64::from(args.nodes);
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
