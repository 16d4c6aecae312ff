//! The command line as clap sees it: the commands, the options that they share, and the text of
//! `forebay --help`.

use crate::{commands, fail::one_line, node::DEFAULT_NODE};
use clap::{
    Arg, CommandFactory, Parser, Subcommand,
    builder::Resettable,
    error::{ContextKind, ContextValue, ErrorKind},
};
use forebay_bench::distance;
use forebay_core::Error;
use std::ffi::OsString;

/// Serve any bucket from the local disk, beside the training job.
#[derive(Debug, Parser)]
#[command(name = "forebay", bin_name = "forebay", version, help_template = TEMPLATE, before_help = COMMANDS, after_help = MORE, disable_help_subcommand = true)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 110
)]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, clap::Args)]
pub struct Common {
    /// The node to talk to: a URL (without a port: 8080, or 443 for https://), or unix:PATH; or
    /// several, separated by commas: one that answers is asked
    #[arg(long, global = true, display_order = 900, value_name = "ADDR", env = "FOREBAY_NODE", default_value = DEFAULT_NODE, hide_env_values = true)]
    pub node: String,
    /// Authorities to trust for the certificate of an https:// node: a PEM file [default: the
    /// system's]
    #[arg(
        long,
        global = true,
        display_order = 900,
        value_name = "FILE",
        env = "FOREBAY_CA_FILE",
        hide_env_values = true
    )]
    pub ca: Option<std::path::PathBuf>,
    /// Answer with JSON, for programs
    #[arg(long, global = true, display_order = 901)]
    pub json: bool,
    /// Show the causes below an error
    #[arg(long, short, global = true, display_order = 902)]
    pub verbose: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node
    Serve(commands::serve::Args),
    /// Check, show or document the configuration
    Config(commands::config::Args),
    /// List buckets, or objects under a prefix
    Ls(commands::ls::Args),
    /// Fetch an object, a range of it, or a member of an archive
    Get(commands::get::Args),
    /// Write an object through to its origin
    Put(commands::put::Args),
    /// Show an object's metadata, and how much of it is on the local disk
    Stat(commands::stat::Args),
    /// Open a dataset: which rows there are, and where
    Index(commands::index::Args),
    /// Show a dataset: its files, what its columns have in them, and its first rows
    Show(commands::package::Args),
    /// Fetch objects into the cache ahead of need
    Warm(commands::warm::Args),
    /// Keep objects in the cache: they are not evicted to make room
    Pin(commands::keep::PinArgs),
    /// Let pinned objects be evicted again
    Unpin(commands::keep::UnpinArgs),
    /// Drop objects from the cache; the origin keeps them
    Evict(commands::keep::EvictArgs),
    /// List, show, wait for and remove checkpoints: what is staged, what is durable
    Checkpoint(commands::checkpoint::Args),
    /// Show the state of a node
    Status(commands::status::Args),
    /// Watch a node live
    Top(commands::top::Args),
    /// Show a node's metrics, or document them
    Metrics(commands::metrics::Args),
    /// Write the rows of a dataset, in any order, into new shards
    Reshard(commands::package::Args),
    /// Show what a job, or the whole node, took: bytes by source, CPU time, joules, money
    Report(commands::report::Args),
    /// Measure how good an order of rows is, beside a uniform one
    ShuffleReport(commands::shuffle_report::Args),
    /// Make a cluster of nodes, show how it is doing, and change it
    Cluster(commands::cluster::Args),
    /// Show the version
    Version(commands::version::Args),
    /// Put a server at a distance: a TCP proxy with latency and a bandwidth cap
    Distance(distance::DistanceArgs),
    /// Measure GET and GetBatch, beside what the machine gives at most
    Bench(commands::bench::Args),
}

const TEMPLATE: &str =
    "{about}\n\n{usage-heading} {usage}\n\n{before-help}Options:\n{options}{after-help}";

const COMMANDS: &str = "\
Run a node:
  serve     stand between buckets and a training job
  config    check, show or document the configuration

Objects:
  ls        list buckets, or objects under a prefix
  get       fetch an object, a range of it, or a member of an archive
  put       write an object through to its origin
  stat      an object's metadata, and how much of it is on the local disk

Datasets:
  index     number the rows of tables, archives or objects, by their footers and directories
  show      what is in a dataset: its columns, and its first rows
  reshard   write the rows of a dataset, in any order, into new shards
  shuffle-report  how good an order of rows is, beside a uniform one

Cache:
  warm      fetch objects ahead of need, by prefix or manifest
  pin       keep objects in the cache
  unpin     let pinned objects be evicted again
  evict     drop objects from the cache

Checkpoints:
  checkpoint  what is staged on the node's disk, what is durable, and why one is stuck

Watch:
  status    the state of a node
  top       live throughput, hit ratio, latency, origin traffic
  report    what a job, or the whole node, took: bytes, requests, CPU time, joules, money
  metrics   the metrics as Prometheus reads them, and what each means
  version   the version of this program

Clusters:
  cluster   make one, show how it is doing, drain and forget members, plan changes

Try out:
  distance  put a server at a distance: a TCP proxy with latency and a bandwidth cap
  bench     throughput, latency and CPU of GET and GetBatch, beside the machine's own";

const MORE: &str = "\
Examples:
  forebay serve --origin s3://my-bucket --cache /nvme/forebay:500GiB
  forebay ls my-bucket/train/
  forebay get my-bucket/train/shard-000000.tar --member 000123.jpg
  forebay warm my-bucket/train/
  forebay top

Environment: FOREBAY_NODE is --node; FOREBAY_TOKEN is the token of a node that wants one; FOREBAY_CA_FILE is --ca; NO_COLOR turns colours off.
Exit codes: 0 done; 1 failed; 2 the command line or the configuration is wrong; 130 and 143 interrupted.
`forebay COMMAND --help`, or `forebay help COMMAND`, tells the rest of each command.";

/// The command line. As for other programs, an empty variable is one that is not set.
pub fn command() -> clap::Command {
    without_empty_variables(Cli::command())
}

/// Options before the command without what the environment says of them.
pub fn without_variables(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| arg.env(Resettable::Reset))
}

/// All options without that.
pub fn without_any_variables(command: clap::Command) -> clap::Command {
    without_variables(command).mut_subcommands(without_any_variables)
}

/// Takes those that are hidden from the commands that an error names.
pub fn without_hidden(mut e: clap::Error) -> clap::Error {
    if let Some(ContextValue::Strings(names)) = e.get(ContextKind::ValidSubcommand) {
        let hidden = hidden(&Cli::command());
        let shown = names.iter().filter(|name| !hidden.contains(*name));
        let shown = ContextValue::Strings(shown.cloned().collect());
        e.insert(ContextKind::ValidSubcommand, shown);
    }
    e
}

fn hidden(command: &clap::Command) -> Vec<String> {
    let each = command.get_subcommands().flat_map(|sub| {
        let own = sub.is_hide_set().then(|| sub.get_name().to_owned());
        own.into_iter().chain(hidden(sub))
    });
    each.collect()
}

/// `help COMMAND` as `COMMAND --help`, of a whole command line.
pub fn without_help(mut args: Vec<OsString>) -> Vec<OsString> {
    while let Some(at) = place(&args).filter(|at| args[*at] == "help") {
        args.remove(at);
        args.push("--help".into());
    }
    args
}

/// Where the command is.
fn place(args: &[OsString]) -> Option<usize> {
    let mut at = 1;
    while at < args.len() {
        if !args[at].as_encoded_bytes().starts_with(b"-") {
            return Some(at);
        }
        at += match args[at] == "--node" || args[at] == "--ca" {
            true => 2,
            false => 1,
        };
    }
    None
}

/// Whether a command line that cannot be read asks for JSON.
pub fn wants_json(args: &[OsString]) -> bool {
    let mut options = args.iter().take_while(|arg| *arg != "--");
    options.any(|arg| arg == "--json")
}

/// Whether clap stopped because of a mistake, and not to show the help or the version.
pub fn is_wrong(e: &clap::Error) -> bool {
    e.use_stderr() && e.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// The mistake in the command line, as this program tells errors.
pub fn unreadable(e: &clap::Error) -> Error {
    let text = e.render().to_string();
    let mut parts = text.split("\n\n");
    let what = parts.next().unwrap_or_default();
    let what = what.strip_prefix("error: ").unwrap_or(what);
    let tip = parts.find_map(|part| part.trim_start().strip_prefix("tip: "));
    let tip = tip.unwrap_or("`forebay COMMAND --help` tells what it takes");
    Error::invalid(one_line(what)).hint(one_line(tip))
}

fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |arg: &Arg| {
        let value = arg.get_env().and_then(std::env::var_os);
        value.is_some_and(|value| value.is_empty())
    };
    command
        .mut_args(|arg| match is_empty(&arg) {
            true => arg.env(Resettable::Reset),
            false => arg,
        })
        .mut_subcommands(without_empty_variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound_and_the_help_names_every_command() {
        let mut root = Cli::command();
        root.clone().debug_assert();
        let help = root.render_long_help().to_string();
        for sub in root.get_subcommands() {
            assert!(
                help.contains(&format!("\n  {} ", sub.get_name())),
                "{} is missing in:\n{help}",
                sub.get_name()
            );
        }
    }

    /// The width of the terminal breaks lines. A break of our own within a sentence, or an example
    /// that is too wide, would leave ragged lines, and commands that cannot be copied.
    #[test]
    fn sentences_and_examples_of_the_help_are_lines() {
        fn look(command: &clap::Command) {
            let help = command.get_after_help().map(ToString::to_string);
            for line in help.unwrap_or_default().lines() {
                let is_whole = match line.chars().next() {
                    Some(' ') => line.chars().count() <= 100,
                    Some(first) => first.is_uppercase() || "`-".contains(first),
                    None => true,
                };
                assert!(is_whole, "forebay {}: {line}", command.get_name());
            }
            command.get_subcommands().for_each(look);
        }
        look(&Cli::command());
    }
}
