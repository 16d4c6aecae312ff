//! `forebay serve`: a node, until a signal stops it.
//!
//! Options are the last layer of the configuration, over the environment and the file, so whatever is set here is shown and checked as if it stood in
//! the file. The first SIGINT or SIGTERM stops gracefully: nothing new is taken, answers in flight finish; a second one ends at once.

use crate::{
    cli::Common,
    fail::{EXIT_FAILED, Failure, Outcome},
    out::{Out, pairs},
    signals::Signals,
    style::Style,
};
use forebay_core::{Error, ErrorKind, Result, units::format_bytes};
use forebay_server::{
    Node,
    config::{Config, Override, Severity},
};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay serve --origin s3://my-bucket --cache /nvme/forebay:500GiB
  forebay serve --origin 's3://data?endpoint=https://minio:9000' --origin web=https://host/files/ --cache ~/cache:50GiB
  forebay serve --origin pics=/srv/pictures --cache /nvme/a:900GiB --cache /nvme/b:900GiB --freshness immutable
  forebay serve --config /etc/forebay/forebay.toml

Origins: s3://bucket, gs://bucket, az://container, https://host/path/, file:///dir or a path, each with an optional prefix.
`forebay config reference` documents every setting, and the environment variables.

Stopping: SIGINT (Ctrl-C) or SIGTERM finishes the answers in flight and takes nothing new; a second one stops at once.
Exit codes: 0 stopped gracefully; 1 could not start, or stopped before every answer was finished; 2 wrong options or configuration.
--json: logs as JSON lines on stderr, and one JSON line on stdout when the node is ready:
{\"event\", \"node_id\", \"s3\", \"unix_socket\", \"admin\", \"buckets\", \"cache\", \"pid\"}")]
pub struct Args {
    #[command(flatten)]
    pub settings: Settings,
}

/// The options that set something; `serve` and `config` share them.
#[derive(Debug, Default, clap::Args)]
pub struct Settings {
    /// A bucket to serve; may be given again. NAME is the bucket's name here
    #[arg(long, value_name = "[NAME=]URL")]
    pub origin: Vec<String>,
    /// A directory for the cache and how much of it to use; one for each disk
    #[arg(long, value_name = "DIR:SIZE")]
    pub cache: Vec<String>,
    /// A TOML file with settings
    #[arg(long, value_name = "FILE", env = "FOREBAY_CONFIG", hide_env_values = true)]
    pub config: Option<PathBuf>,
    /// Where S3 and the batch API listen [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// Where /metrics, /healthz and /readyz listen; off for none [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<String>,
    /// Path of the Unix socket; off for none [default: in the first cache directory]
    #[arg(long, value_name = "PATH")]
    pub unix: Option<String>,
    /// When a cached object is served without asking: immutable, always, or a time [default: 60s]
    #[arg(long, value_name = "RULE")]
    pub freshness: Option<String>,
    /// Memory for the buffers of fills, batches and uploads [default: 1GiB, or a quarter of the machine's]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// error, warn, info, debug, trace, or a filter [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// Set any setting: KEY=VALUE, as in limits.connections=1000; may be given again
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

impl Settings {
    /// File, environment and options, in that order.
    pub fn load(&self, json_logs: bool) -> Result<Config> {
        let mut overrides = Vec::new();
        for set in &self.sets {
            let (key, value) = set
                .split_once('=')
                .ok_or_else(|| Error::invalid(format!("--set: {set:?} has no '='")).hint("KEY=VALUE, as in limits.connections=1000"))?;
            overrides.push(Override::text(key.trim(), value.trim(), "--set")?);
        }
        if !self.origin.is_empty() {
            overrides.push(Override::origins(&self.origin, "--origin")?);
        }
        if !self.cache.is_empty() {
            overrides.push(Override::cache(&self.cache, "--cache")?);
        }
        for (option, key, value) in [
            ("--listen", "listen.s3", &self.listen),
            ("--admin", "listen.admin", &self.admin),
            ("--unix", "listen.unix", &self.unix),
            ("--freshness", "cache.freshness", &self.freshness),
            ("--memory", "memory.budget", &self.memory),
            ("--log", "log.level", &self.log),
        ] {
            if let Some(value) = value {
                overrides.push(Override::text(key, value, option)?);
            }
        }
        if json_logs {
            overrides.push(Override::text("log.format", "json", "--json")?);
        }
        // A variable that is not UTF-8 is none of ours.
        let env = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        Config::load(self.config.as_deref(), env, &overrides)
    }
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let config = args.settings.load(common.json).map_err(Failure::Usage)?;
    config.checked().map_err(Failure::Usage)?;
    let style = Style::stderr();
    for problem in config.check().iter().filter(|p| p.severity == Severity::Warning && !common.json) {
        eprintln!("{} {}: {}", style.yellow("warning:"), problem.key, problem.message);
        if !problem.hint.is_empty() {
            eprintln!("{} {}", style.bold("hint:"), problem.hint);
        }
    }
    // Before anything is opened, so that a signal during the start is not lost.
    let mut signals = Signals::listen()?;
    let drain = config.limits.drain_timeout.0;
    let shown = config.clone();
    let node = tokio::select! {
        node = Node::start(config) => node.map_err(start_failure)?,
        number = signals.next() => return Err(Failure::Signal(number)),
    };
    announce(&node, &shown, common.json)?;
    signals.next().await;
    if !common.json {
        eprintln!("stopping: answers in flight have {} s to finish; once more to stop at once", drain.as_secs());
    }
    let finished = tokio::select! {
        finished = node.shutdown(drain) => finished,
        _ = signals.next() => std::process::exit(EXIT_FAILED),
    };
    finished.map_err(Failure::Failed)
}

/// What to try, for what goes wrong at the start.
fn start_failure(e: Error) -> Failure {
    if e.hint_text().is_some() {
        return Failure::Failed(e);
    }
    let hint = match e.kind() {
        ErrorKind::PermissionDenied => "check who owns it, and its mode",
        ErrorKind::AlreadyExists | ErrorKind::Conflict => "is another node running? `forebay status` tells",
        _ => return Failure::Failed(e),
    };
    Failure::Failed(e.hint(hint))
}

/// Says where the node is, for a person, or as one JSON line.
fn announce(node: &Node, config: &Config, json: bool) -> Outcome {
    let mut out = Out::new(json);
    let _ = (node, &pairs, format_bytes, config);
    out.flush()
}
