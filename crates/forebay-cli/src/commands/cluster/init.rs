//! `forebay cluster init` makes a cluster's CA and a certificate for each node; `forebay cluster
//! certify` makes new certificates later. What they write:
//!
//! ```text
//! DIR/ca.pem, ca.key, map.json
//! DIR/NODE/ca.pem, node.pem, node.key
//! ```
//!
//! Invariant: a directory appears whole or not at all, and is on the disk by then. It is written
//! under another name, and renamed.

use super::map;
use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::{Out, pairs, utc},
};
use clap::builder::RangedI64ValueParser;
use forebay_cluster::Member;
use forebay_core::{Error, ErrorKind, Result};
use forebay_tls::{Authority, DAYS_MAX, Issued, NAME_MAX_CHARS};
use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};
use serde_json::{Value, json};
use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};
use tempfile::TempDir;

const CA: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
const MAP: &str = "map.json";
const CERTIFICATE: &str = "node.pem";
const KEY: &str = "node.key";
/// Where the printed settings expect the files.
const INSTALLED: &str = "/etc/forebay/cluster";
/// The port of the printed settings, where no address says another.
const PORT: u16 = 8300;
const PRIVATE: u32 = 0o600;
const PUBLIC: u32 = 0o644;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay cluster init training --node a --node b --node c
  forebay cluster init training --node a=10.0.0.1:8300,2TiB --node b=10.0.0.2:8300,2TiB

Writes DIR/ca.pem and DIR/ca.key, and for each node DIR/NODE/ca.pem, node.pem and node.key; with the \
    sizes of all caches also DIR/map.json. `forebay cluster certify` renews certificates.

JSON: {\"cluster\", \"ca\": {\"cert\", \"key\", \"not_after\"}, \"map\", \
    \"nodes\": [{\"name\", \"address\", \"ca\", \"cert\", \"key\", \"not_after\", \"shortened\"}]}")]
pub struct InitArgs {
    /// The cluster's name
    name: String,
    /// A node: its name; where other nodes reach it; and for a map in a file the size of its cache,
    /// and its zone if there are several
    #[arg(
        // The id of the option of all commands, which this one replaces.
        id = "node",
        long = "node",
        value_name = "NAME[=ADDRESS[,SIZE[,ZONE]]]",
        required = true
    )]
    nodes: Vec<String>,
    /// The directory to make [default: the cluster's name]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// How many days the nodes' certificates are valid
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = days())]
    days: u32,
    /// How many days the CA is valid
    #[arg(long, value_name = "N", default_value_t = 3650, value_parser = days())]
    ca_days: u32,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay cluster certify --ca training a b c     # before their certificates expire
  forebay cluster certify --ca training d         # a new node

Writes DIR/NODE/ca.pem, node.pem and node.key, with a new key. Running nodes read them again when \
    they change.

JSON: {\"ca\": {\"cert\", \"key\", \"not_after\"}, \
    \"nodes\": [{\"name\", \"ca\", \"cert\", \"key\", \"not_after\", \"shortened\", \"new\"}]}")]
pub struct CertifyArgs {
    /// The directory that `forebay cluster init` made, with ca.pem and ca.key
    #[arg(long, value_name = "DIR")]
    ca: PathBuf,
    /// The nodes' names
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<String>,
    /// How many days the certificates are valid; they end with the CA at the latest
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = days())]
    days: u32,
}

fn days() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(DAYS_MAX))
}

/// What `--node` says.
struct Node {
    name: String,
    address: Option<String>,
    member: Option<Member>,
}

/// `NAME`, `NAME=ADDRESS`, `NAME=ADDRESS,SIZE` or `NAME=ADDRESS,SIZE,ZONE`.
fn node(text: &str) -> Result<Node> {
    let (name, address, member) = match text.split_once('=') {
        None => (text, None, None),
        Some((name, rest)) if rest.contains(',') => {
            let (_, member) =
                map::member(text).map_err(|e| Error::invalid(format!("--node {text}: {e}")))?;
            (name, Some(member.address.clone()), Some(member))
        }
        Some((name, address)) => {
            if map::port(address).is_none() {
                return Err(Error::invalid(format!(
                    "--node {text}: {address:?} is not HOST:PORT"
                )));
            }
            (name, Some(address.to_owned()), None)
        }
    };
    Ok(Node {
        name: name.to_owned(),
        address,
        member,
    })
}

/// Whether a name can be that of a directory, and of a certificate.
fn check_name(what: &str, name: &str, most: usize) -> Result<()> {
    let safe = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !begins || !name.chars().all(safe) {
        return Err(
            Error::invalid(format!("{what} {name:?}: not a name for files")).hint(
                "letters, digits, '.', '_' and '-', of which the first is a letter or a digit",
            ),
        );
    }
    if name.len() > most {
        return Err(Error::invalid(format!(
            "{what} {name}: {} characters; certificates have room for {most}",
            name.len()
        )));
    }
    Ok(())
}

/// Whether the nodes' directories can lie beside each other and `others`, on any file system.
fn check_nodes(names: &[&str], others: &[String]) -> Result<()> {
    for (i, name) in names.iter().enumerate() {
        check_name("the node", name, NAME_MAX_CHARS)?;
        if names[..i].contains(name) {
            return Err(Error::invalid(format!("the node {name} is named twice")));
        }
        let alike = |other: &str| other != *name && other.eq_ignore_ascii_case(name);
        let files = [CA, CA_KEY, MAP];
        if files.iter().any(|file| file.eq_ignore_ascii_case(name)) {
            return Err(
                Error::invalid(format!("the node {name}: a file beside it has this name"))
                    .hint("choose another name"),
            );
        }
        let before = names[..i].iter().copied();
        if let Some(other) = before
            .chain(others.iter().map(String::as_str))
            .find(|other| alike(other))
        {
            return Err(Error::invalid(format!(
                "the node {name}: its name differs from {other} only in case"
            ))
            .hint("choose another name: on some file systems they are the same"));
        }
    }
    Ok(())
}

pub fn init(args: InitArgs, common: &Common) -> Outcome {
    let nodes: Vec<Node> = args
        .nodes
        .iter()
        .map(|text| node(text))
        .collect::<Result<_>>()
        .map_err(Failure::Usage)?;
    // The CA's name is a little longer.
    check_name("the cluster", &args.name, NAME_MAX_CHARS - 3).map_err(Failure::Usage)?;
    let names: Vec<&str> = nodes.iter().map(|n| n.name.as_str()).collect();
    check_nodes(&names, &[]).map_err(Failure::Usage)?;
    let members: Vec<Member> = nodes.iter().filter_map(|n| n.member.clone()).collect();
    if !members.is_empty() && members.len() < nodes.len() {
        let without: Vec<&str> = nodes
            .iter()
            .filter(|n| n.member.is_none())
            .map(|n| n.name.as_str())
            .collect();
        return Err(Failure::Usage(
            Error::invalid(format!(
                "--node {}: no size of its cache",
                without.join(", ")
            ))
            .hint(
                "a map needs the sizes of all caches, as in a=10.0.0.1:8300,2TiB; without any, \
                 no map is written",
            ),
        ));
    }
    let dir = args.out.unwrap_or_else(|| PathBuf::from(&args.name));
    if dir.symlink_metadata().is_ok() {
        return Err(Failure::Failed(
            Error::new(
                ErrorKind::AlreadyExists,
                format!("{} exists already", dir.display()),
            )
            .hint("name another with --out; `forebay cluster certify` renews certificates"),
        ));
    }

    let map = match members.is_empty() {
        true => None,
        false => Some(map::first(&args.name, members)?),
    };
    let authority = Authority::new(&args.name, args.ca_days)?;
    let above = above(&dir);
    let new = beside(&above.join(&args.name))?;
    write(&new.path().join(CA), PUBLIC, authority.certificate())?;
    write(
        &new.path().join(CA_KEY),
        PRIVATE,
        authority.key().as_bytes(),
    )?;
    if let Some(map) = &map {
        write(&new.path().join(MAP), PUBLIC, &map.json())?;
    }
    let mut made = Vec::new();
    for node in &nodes {
        let issued = authority.issue(&node.name, args.days)?;
        let at = new.path().join(&node.name);
        let fail = |e| Error::file("the node's files", &at, e);
        DirBuilder::new().mode(0o700).create(&at).map_err(fail)?;
        write_node(&at, &authority, &issued)?;
        made.push(issued);
    }
    sync(new.path())?;
    let fail = |e| Error::file("the cluster's files", &dir, e);
    fs::rename(new.path(), &dir).map_err(fail)?;
    let _renamed = new.keep();
    sync(&above)?;

    let mut out = Out::new(common.json);
    if out.json {
        let nodes: Vec<Value> = nodes
            .iter()
            .zip(&made)
            .map(|(node, issued)| {
                let mut json = node_json(&dir, &node.name, issued);
                json["address"] = json!(node.address);
                json
            })
            .collect();
        return out.object(&json!({
            "cluster": args.name,
            "ca": authority_json(&dir, &authority),
            "map": map.as_ref().map(|_| dir.join(MAP)),
            "nodes": nodes,
        }));
    }
    let file = |name: &str| dir.join(name).display().to_string();
    let key = "the CA's key: for no node, and nobody else's eyes";
    let mut rows = vec![
        (
            file(CA),
            format!("the CA, valid until {}", date(authority.not_after_secs())),
        ),
        (file(CA_KEY), key.to_owned()),
    ];
    if map.is_some() {
        rows.push((file(MAP), "the cluster's map".to_owned()));
    }
    for (node, issued) in nodes.iter().zip(&made) {
        rows.push((
            file(&node.name),
            format!("node {}, {}", node.name, valid(issued)),
        ));
    }
    print(&mut out, rows)?;
    for line in next_steps(&args.name, &nodes, map.is_some()) {
        out.line(line)?;
    }
    out.flush()
}

/// What to do with the files.
fn next_steps(cluster: &str, nodes: &[Node], has_map: bool) -> Vec<String> {
    let map = if has_map { " and map.json" } else { "" };
    let first = &nodes[0];
    let port = first.address.as_deref().and_then(map::port);
    let mut lines = vec![
        String::new(),
        format!("Copy the files of each node{map} to {INSTALLED} on its machine, readable"),
        "only by the user that Forebay runs as, and configure the node, here for".to_owned(),
        format!("node {}:", first.name),
        String::new(),
        "  [listen]".to_owned(),
        format!("  peer = \"0.0.0.0:{}\"", port.unwrap_or(PORT)),
        String::new(),
        "  [cluster]".to_owned(),
        format!("  node = {:?}", first.name),
        format!("  ca = \"{INSTALLED}/{CA}\""),
        format!("  cert = \"{INSTALLED}/{CERTIFICATE}\""),
        format!("  key = \"{INSTALLED}/{KEY}\""),
    ];
    lines.push(match has_map {
        true => format!("  map = \"{INSTALLED}/{MAP}\""),
        false => {
            format!("  map = \"etcd://HOST:2379/{cluster}\"  # or dns:HOST:{PORT}, or a file")
        }
    });
    lines
}

pub fn certify(args: CertifyArgs, common: &Common) -> Outcome {
    let dir = args.ca;
    let names: Vec<&str> = args.nodes.iter().map(String::as_str).collect();
    let authority = Authority::read(&dir.join(CA), &dir.join(CA_KEY))?;
    check_nodes(&names, &entries(&dir)?).map_err(Failure::Usage)?;
    let mut prepared = Vec::new();
    for name in &names {
        let at = dir.join(name);
        let is_new = !holds_a_nodes_files(&at)?;
        let issued = authority.issue(name, args.days)?;
        let new = beside(&at)?;
        write_node(new.path(), &authority, &issued)?;
        prepared.push((at, new, issued, is_new));
    }
    let mut made = Vec::new();
    for ((at, new, issued, is_new), name) in prepared.into_iter().zip(&names) {
        install(new, &at, is_new).map_err(|e| {
            let error = Error::file("the node's files", &at, e);
            match made.is_empty() {
                true => error,
                false => error.hint(format!(
                    "these are new already: {}",
                    names[..made.len()].join(", ")
                )),
            }
        })?;
        made.push((name, issued, is_new));
    }
    sync(&dir)?;

    let mut out = Out::new(common.json);
    if out.json {
        let nodes: Vec<Value> = made
            .iter()
            .map(|(name, issued, is_new)| {
                let mut json = node_json(&dir, name, issued);
                json["new"] = json!(is_new);
                json
            })
            .collect();
        return out.object(&json!({"ca": authority_json(&dir, &authority), "nodes": nodes}));
    }
    let rows = made
        .iter()
        .map(|(name, issued, is_new)| {
            let kind = if *is_new { "new node" } else { "node" };
            let at = dir.join(name).display().to_string();
            (at, format!("{kind} {name}, {}", valid(issued)))
        })
        .collect();
    print(&mut out, rows)?;
    out.line("")?;
    out.line("Copy the files in each directory to its node, which reads them again by itself.")?;
    out.flush()
}

fn print(out: &mut Out, rows: Vec<(String, String)>) -> Outcome {
    let rows: Vec<(&str, String)> = rows
        .iter()
        .map(|(file, what)| (file.as_str(), what.clone()))
        .collect();
    for line in pairs(&rows) {
        out.line(line)?;
    }
    Ok(())
}

fn date(secs: u64) -> String {
    utc(secs as i64 * 1000)
}

fn valid(issued: &Issued) -> String {
    let until = date(issued.not_after_secs);
    match issued.shortened {
        true => format!("valid until {until} only: the CA expires then"),
        false => format!("valid until {until}"),
    }
}

fn authority_json(dir: &Path, authority: &Authority) -> Value {
    json!({
        "cert": dir.join(CA), "key": dir.join(CA_KEY),
        "not_after": date(authority.not_after_secs()),
    })
}

fn node_json(dir: &Path, name: &str, issued: &Issued) -> Value {
    let at = dir.join(name);
    json!({
        "name": name, "ca": at.join(CA), "cert": at.join(CERTIFICATE), "key": at.join(KEY),
        "not_after": date(issued.not_after_secs), "shortened": issued.shortened,
    })
}

fn write_node(at: &Path, authority: &Authority, issued: &Issued) -> Result<()> {
    write(&at.join(CA), PUBLIC, authority.certificate())?;
    write(&at.join(CERTIFICATE), PUBLIC, issued.certificate.as_bytes())?;
    write(&at.join(KEY), PRIVATE, issued.key.as_bytes())?;
    sync(at)
}

/// Writes a new file to the disk. Its mode does not depend on the umask.
fn write(path: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(path)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()
    };
    written().map_err(|e| Error::file("cannot write", path, e))
}

/// Makes the names in a directory durable.
fn sync(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| Error::file("cannot write to the disk", dir, e))
}

/// The directory that a path is in.
fn above(path: &Path) -> PathBuf {
    match path.parent() {
        Some(above) if above != Path::new("") => above.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// A directory beside `path`, which is removed unless it is put in its place.
fn beside(path: &Path) -> Result<TempDir> {
    let (above, name) = (above(path), path.file_name().unwrap_or_default());
    tempfile::Builder::new()
        .prefix(&format!(".{}.", name.display()))
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(&above)
        .map_err(|e| Error::file("cannot write", &above, e))
}

/// The names in a directory.
fn entries(dir: &Path) -> Result<Vec<String>> {
    let names = || -> io::Result<Vec<String>> {
        let all = fs::read_dir(dir)?;
        all.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    };
    names().map_err(|e| Error::file("cannot read", dir, e))
}

/// `false` if nothing is there. Other files would be lost, since the directory is replaced.
fn holds_a_nodes_files(dir: &Path) -> Result<bool> {
    let Ok(found) = dir.symlink_metadata() else {
        return Ok(false);
    };
    let elsewhere = "move it away: the node's directory is replaced as a whole";
    if !found.is_dir() {
        let what = format!("{}: it is not a directory", dir.display());
        return Err(Error::invalid(what).hint(elsewhere));
    }
    let known = [CA, CERTIFICATE, KEY];
    let other = entries(dir)?
        .into_iter()
        .find(|n| !known.contains(&n.as_str()));
    match other {
        None => Ok(true),
        Some(other) => Err(Error::invalid(format!(
            "{}: it is not one of a node's files",
            dir.join(other).display()
        ))
        .hint(elsewhere)),
    }
}

/// Puts a directory in its place; what was there is removed.
fn install(new: TempDir, at: &Path, is_new: bool) -> io::Result<()> {
    if is_new {
        fs::rename(new.path(), at)?;
        let _renamed = new.keep();
        return Ok(());
    }
    match renameat_with(CWD, new.path(), CWD, at, RenameFlags::EXCHANGE) {
        // `new` has the files that were there, and is dropped.
        Ok(()) => Ok(()),
        // Not every file system can do that.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => install_in_two_steps(new, at),
        Err(e) => Err(e.into()),
    }
}

/// In between, nothing is there.
fn install_in_two_steps(new: TempDir, at: &Path) -> io::Result<()> {
    let mut old = new.path().as_os_str().to_owned();
    old.push(".old");
    fs::rename(at, &old)?;
    if let Err(e) = fs::rename(new.path(), at) {
        fs::rename(&old, at)?;
        return Err(e);
    }
    let _renamed = new.keep();
    fs::remove_dir_all(&old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_replaced_on_every_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("a");
        let new = |text: &str| {
            let new = beside(&at).unwrap();
            write(&new.path().join(text), PUBLIC, text.as_bytes()).unwrap();
            new
        };
        install(new("first"), &at, true).unwrap();
        assert_eq!(entries(&at).unwrap(), ["first"]);
        install(new("second"), &at, false).unwrap();
        assert_eq!(entries(&at).unwrap(), ["second"]);
        install_in_two_steps(new("third"), &at).unwrap();
        assert_eq!(entries(&at).unwrap(), ["third"]);
        assert_eq!(entries(dir.path()).unwrap(), ["a"]);
    }
}
