//! `forebay cluster map`: the map of a cluster, and the next one after a change.

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::Out,
};
use forebay_cluster::{Map, Member, MemberState, member_named};
use forebay_core::{Error, units};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay cluster map training --member a=10.0.0.1:8300,2TiB \\
    --member b=10.0.0.2:8300,2TiB > map.json
  forebay cluster map training --after map.json --member a=10.0.0.1:8300,2TiB,rack-1 \\
    --member c=10.0.0.3:8300,4TiB,rack-2 > next.json

Give all nodes the same file (cluster.map), and each its name (cluster.node). Replace the file as a \
    whole (mv): nodes read it again by themselves.")]
pub struct Args {
    /// The cluster's name
    name: String,
    /// A node: its name, where other nodes reach it, the size of its cache, and its zone if there
    /// are several
    #[arg(long = "member", value_name = "NAME=ADDRESS,SIZE[,ZONE]", required = true, value_parser = member)]
    members: Vec<(String, Member)>,
    /// The map that this one replaces: its epoch and placement go on
    #[arg(long, value_name = "FILE")]
    after: Option<PathBuf>,
}

/// `NAME=ADDRESS,SIZE[,ZONE]`
pub fn member(text: &str) -> Result<(String, Member), String> {
    let wrong = || "a member is NAME=ADDRESS,SIZE or NAME=ADDRESS,SIZE,ZONE".to_owned();
    let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
    let parts: Vec<&str> = rest.split(',').collect();
    let (address, size, zone) = match parts[..] {
        [address, size] => (address, size, ""),
        [address, size, zone] => (address, size, zone),
        _ => return Err(wrong()),
    };
    if name.is_empty() || port(address).is_none() {
        return Err(wrong());
    }
    let member = Member {
        id: member_named(name),
        name: name.to_owned(),
        address: address.to_owned(),
        url: String::new(),
        zone: zone.to_owned(),
        weight: units::parse_bytes(size).map_err(|e| e.describe())?,
        state: MemberState::Active,
    };
    Ok((name.to_owned(), member))
}

/// The port of `HOST:PORT`.
pub fn port(address: &str) -> Option<u16> {
    let (host, port) = address.rsplit_once(':')?;
    port.parse().ok().filter(|_| !host.is_empty())
}

/// The first map of a cluster.
pub fn first(cluster: &str, members: Vec<Member>) -> forebay_core::Result<Map> {
    Map::new(cluster, member_named(cluster), members)
}

pub fn run(args: Args, common: &Common) -> Outcome {
    let (names, members): (Vec<String>, Vec<Member>) = args.members.into_iter().unzip();
    for (i, name) in names.iter().enumerate() {
        if names[..i].contains(name) {
            return Err(Failure::Usage(Error::invalid(format!(
                "--member {name} is named twice"
            ))));
        }
    }
    let map = match &args.after {
        None => first(&args.name, members)?,
        Some(path) => {
            let text = std::fs::read(path)
                .map_err(|e| Error::invalid(format!("{} cannot be read: {e}", path.display())))?;
            let (before, _) = Map::parse(&text).map_err(|e| e.context(path.display()))?;
            if before.cluster != args.name {
                return Err(Failure::Usage(Error::invalid(format!(
                    "{} is the map of cluster {:?}",
                    path.display(),
                    before.cluster
                ))));
            }
            before.with(members)?
        }
    };
    let mut out = Out::new(common.json);
    out.line(String::from_utf8_lossy(&map.json()))?;
    out.flush()
}
