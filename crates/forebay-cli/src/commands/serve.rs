//! `forebay serve`: runs a node until a signal stops it.
//!
//! Options are the last layer of the configuration, over the environment and the file, so whatever
//! they set is shown and checked as if it stood in the file. The first SIGINT or SIGTERM stops
//! gracefully: nothing new is accepted, answers in flight finish. A second one ends the node at
//! once.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, pairs, tell},
    signals::{self, Signals},
    style::Style,
};
use forebay_core::{Error, ErrorKind, Result, threads::blocking, units::format_bytes};
use forebay_engine::ListRequest;
use forebay_server::{
    Node,
    config::{Config, Log, LogFormat, Override, Severity},
    init_logging, raise_open_files,
};
use futures::StreamExt;
use std::{io::IsTerminal, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::signal::unix::Signal;

/// How long an origin may take to answer at the start before a warning says so.
const LOOK_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay serve --origin s3://my-bucket --cache /nvme/forebay:500GiB
  forebay serve --origin 's3://data?endpoint=https://minio:9000' \\
    --origin web=https://host/files/ --cache ~/cache:50GiB
  forebay serve --origin pics=/srv/pictures --cache /nvme/a:900GiB \\
    --cache /nvme/b:900GiB --freshness immutable
  forebay serve --config /etc/forebay/forebay.toml

Origins: s3://bucket, gs://bucket, az://container, hf://datasets/org/name, https://host/path/, file:///dir or a path, each with an optional prefix.
`forebay config reference` documents every setting, and the environment variables.

Stopping: SIGINT (Ctrl-C) or SIGTERM finishes the answers in flight and takes nothing new; a second one stops at once.
Exit codes: 0 stopped gracefully; 1 could not start, or stopped before every answer was finished; 2 wrong options or configuration.
--json: logs as JSON lines on stderr, and one JSON line on stdout when the node is ready: \
    {\"event\": \"ready\", \"node_id\", \"url\", \"s3\": HOST:PORT, \"unix_socket\", \"admin\": \
    HOST:PORT, \"buckets\", \"cache\", \"pid\"}")]
pub struct Args {
    #[command(flatten)]
    pub settings: Settings,
}

/// The options for settings; `serve` and `config` share them.
#[derive(Debug, Default, clap::Args)]
pub struct Settings {
    /// A bucket to serve; may be given again. NAME is the bucket's name here
    #[arg(long, value_name = "[NAME=]URL")]
    pub origin: Vec<String>,
    /// A directory for the cache and how much of it to use; one for each disk
    #[arg(long, value_name = "DIR:SIZE")]
    pub cache: Vec<String>,
    /// A TOML file with settings
    #[arg(
        long,
        value_name = "FILE",
        env = "FOREBAY_CONFIG",
        hide_env_values = true
    )]
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
    /// The cluster that this node is one of: etcd://HOST:PORT/NAME, dns:HOST:PORT, or a map's file
    #[arg(long, value_name = "SOURCE")]
    pub cluster: Option<String>,
    /// Where this node listens for the others of its cluster, as in 10.0.0.1:8300
    #[arg(long, value_name = "ADDR")]
    pub peer: Option<String>,
    /// Memory for the buffers of fills, batches and uploads [default: a sixteenth of the machine's,
    /// between 1GiB and 16GiB]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// error, warn, info, debug, trace, or a filter [default: info; on a terminal, requests that
    /// succeed are left out]
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// Set any setting: KEY=VALUE, as in limits.connections=1000; may be given again
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

impl Settings {
    /// Loads file, environment and options, in that order.
    pub fn load(&self, json_logs: bool) -> Result<Config> {
        self.load_all(json_logs)
            .map_err(|mut all| all.swap_remove(0))
    }

    /// The same, but the error has everything that is wrong with file and environment.
    pub fn load_all(&self, json_logs: bool) -> Result<Config, Vec<Error>> {
        let overrides = self.overrides(json_logs).map_err(|e| vec![e])?;
        // A variable that is not UTF-8 is not one of ours.
        let env = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        Config::load_all(self.config.as_deref(), env, &overrides)
    }

    fn overrides(&self, json_logs: bool) -> Result<Vec<Override>> {
        let mut overrides = Vec::new();
        for set in &self.sets {
            let (key, value) = set.split_once('=').ok_or_else(|| {
                Error::invalid(format!("--set: {set:?} has no '='"))
                    .hint("KEY=VALUE, as in limits.connections=1000")
            })?;
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
            ("--cluster", "cluster.map", &self.cluster),
            ("--peer", "listen.peer", &self.peer),
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
        Ok(overrides)
    }
}

/// Loads the configuration, at the start and on SIGHUP.
fn load(settings: &Settings, json: bool) -> Result<Config> {
    let mut config = settings.load(json)?;
    // A line for each request belongs in a log, not on the terminal of a person who started the
    // node by hand.
    let quiet = !json
        && settings.log.is_none()
        && config.log == Log::default()
        && std::io::stderr().is_terminal();
    if quiet {
        config.log.level.push_str(",forebay::request=warn");
    }
    Ok(config)
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let config = load(&args.settings, common.json).map_err(Failure::Usage)?;
    config.checked().map_err(Failure::Usage)?;
    init_logging(&config.log).map_err(Failure::Usage)?;
    // Also where the configuration says so, and not --json.
    let json_logs = config.log.format == LogFormat::Json;
    for problem in [config.check(), config.check_files()]
        .concat()
        .iter()
        .filter(|p| p.severity == Severity::Warning)
    {
        warn(
            json_logs,
            &format!("{}: {}", problem.key, problem.message),
            &problem.hint,
        );
    }
    let files = raise_open_files();
    let (wanted, connections) = (config.limits.connections, config.connections_most());
    if connections < wanted {
        let text = format!(
            "{files} files may be open, too few for limits.connections = {wanted}: {connections} \
             connections are accepted"
        );
        warn(
            json_logs,
            &text,
            "raise the limit (ulimit -Hn, LimitNOFILE), or lower limits.connections",
        );
    }
    // Before anything is opened, so that a signal during the start is not lost.
    let mut signals = Signals::listen()?;
    let hangups = signals::hangups()?;
    let node = tokio::select! {
        node = Node::start(config) => Arc::new(node.map_err(start_failure)?),
        number = signals.next() => return Err(Failure::Signal(number)),
    };
    announce(&node, common.json)?;
    let looking = tokio::spawn(look_at_origins(node.clone(), json_logs));
    let reloading = tokio::spawn(reload_on_hangup(
        node.clone(),
        hangups,
        args.settings,
        common.json,
    ));
    signals.next().await;
    looking.abort();
    reloading.abort();
    let drain = node.config().limits.drain_timeout.0;
    if !json_logs {
        tell(format!(
            "stopping: answers in flight have {} s to finish; signal again to stop at once",
            drain.as_secs()
        ));
    }
    tokio::select! {
        finished = node.shutdown(drain) => finished.map_err(Failure::Failed),
        // The store is consistent however the process ends: it is made for kill -9.
        _ = signals.next() => Err(Failure::Reported),
    }
}

/// On SIGHUP, reads the configuration again from where it came from at the start, including the key
/// and certificate files. It never ends a node.
async fn reload_on_hangup(node: Arc<Node>, mut hangups: Signal, settings: Settings, json: bool) {
    let settings = Arc::new(settings);
    while hangups.recv().await.is_some() {
        tracing::info!("SIGHUP: reading the configuration, keys and certificates again");
        let settings = settings.clone();
        let loaded = blocking(move || load(&settings, json)).await;
        node.reload(loaded.flatten()).await;
    }
}

/// Adds what to try to errors at the start that do not say so themselves.
fn start_failure(e: Error) -> Failure {
    let hint = match e.kind() {
        ErrorKind::PermissionDenied => "check who owns it, and its mode",
        ErrorKind::AlreadyExists => {
            "`--listen 127.0.0.1:0` takes any free port, `--admin off` does without the admin port"
        }
        ErrorKind::Conflict => "`forebay status` shows the node that runs",
        _ => return Failure::Failed(e),
    };
    Failure::Failed(match e.hint_text() {
        Some(theirs) => {
            let both = format!("{theirs}; {hint}");
            e.hint(both)
        }
        None => e.hint(hint),
    })
}

/// Prints a warning: words for a person, or a log line if logs are JSON.
fn warn(json: bool, text: &str, hint: &str) {
    if json {
        tracing::warn!(hint, "{text}");
        return;
    }
    let style = Style::stderr();
    tell(format!("{} {}", style.yellow("warning:"), one_line(text)));
    if !hint.is_empty() {
        tell(format!("{} {hint}", style.bold("hint:")));
    }
}

/// Asks each bucket for one name, so that wrong credentials show up now and not with the first
/// read. The node serves what it has in any case.
async fn look_at_origins(node: Arc<Node>, json: bool) {
    let buckets: Vec<String> = node
        .config()
        .origins
        .iter()
        .filter_map(|o| o.bucket().ok().flatten())
        .collect();
    let looks = buckets.into_iter().map(|bucket| {
        let request = ListRequest {
            max_keys: 1,
            ..ListRequest::default()
        };
        let node = node.clone();
        async move {
            let found =
                tokio::time::timeout(LOOK_TIMEOUT, node.engine().list(&bucket, request)).await;
            (bucket, found)
        }
    });
    let mut looks = futures::stream::iter(looks).buffer_unordered(8);
    while let Some((bucket, found)) = looks.next().await {
        let problem = match found {
            Ok(Ok(_)) => continue,
            Ok(Err(e)) => e,
            Err(_) => Error::timeout(format!("no answer after {} s", LOOK_TIMEOUT.as_secs())),
        };
        let hint = problem
            .hint_text()
            .unwrap_or("the node serves what it has, and asks again with each read")
            .to_owned();
        warn(
            json,
            &format!(
                "the bucket {bucket} cannot be listed: {}",
                problem.message()
            ),
            &hint,
        );
    }
}

/// What to say of a listener besides its URL on this machine.
fn everywhere(listens: Option<SocketAddr>) -> &'static str {
    match listens.is_some_and(|address| address.ip().is_unspecified()) {
        true => "   (on all addresses: other machines take this one's name)",
        false => "",
    }
}

/// Says where the node listens: for a person, or as one JSON line.
fn announce(node: &Node, json: bool) -> Outcome {
    let config = node.config();
    let mut out = Out::new(json);
    let buckets: Vec<(String, &str)> = config
        .origins
        .iter()
        .map(|o| {
            (
                o.bucket().ok().flatten().unwrap_or_else(|| "*".into()),
                o.config.url.as_str(),
            )
        })
        .collect();
    if json {
        out.json_line(&serde_json::json!({
            "event": "ready", "node_id": node.node_id(), "url": node.url(), "s3": node.addr(),
            "unix_socket": node.unix_path(), "admin": node.admin_addr(), "buckets": buckets.iter().map(|b| &b.0).collect::<Vec<_>>(),
            "cache": config.cache.dirs.iter().map(ToString::to_string).collect::<Vec<_>>(), "pid": std::process::id(),
        }))?;
        return out.flush();
    }
    let style = out.style;
    let mut rows: Vec<(&str, String)> = Vec::new();
    if let Some(url) = node.url() {
        let more = everywhere(node.addr());
        rows.push(("endpoint", format!("{}{more}", style.bold(&url))));
    }
    if let Some(path) = node.unix_path() {
        rows.push((
            "socket",
            format!(
                "unix:{}   (clients on this machine find it by themselves)",
                path.display()
            ),
        ));
    }
    if let Some(url) = node.admin_url() {
        let more = everywhere(node.admin_addr());
        rows.push(("admin", format!("{url}/metrics   /healthz   /readyz{more}")));
    }
    for (bucket, url) in &buckets {
        let bucket = if bucket == "*" {
            "every bucket"
        } else {
            bucket
        };
        rows.push(("bucket", format!("{}   from {url}", style.bold(bucket))));
    }
    for dir in &config.cache.dirs {
        rows.push((
            "cache",
            format!(
                "{}   up to {}",
                dir.path.display(),
                format_bytes(dir.size.0)
            ),
        ));
    }
    if config.cache.dirs.is_empty() {
        rows.push(("cache", "none: every read goes to the origin".to_owned()));
    }
    let name = buckets
        .first()
        .map(|b| b.0.as_str())
        .filter(|b| *b != "*")
        .unwrap_or("BUCKET");
    if let Some(url) = node.url() {
        rows.push((
            "boto3",
            format!("boto3.client(\"s3\", endpoint_url=\"{url}\")"),
        ));
        rows.push((
            "torch",
            format!("forebay.torch.MapDataset.from_prefix(forebay.Client(\"{url}\"), \"{name}/\")"),
        ));
    }
    rows.push(("stop", "Ctrl-C".to_owned()));
    out.line(format!(
        "{} {} is ready",
        style.bold("forebay"),
        forebay_server::VERSION
    ))?;
    for line in pairs(&rows) {
        out.line(format!("  {line}"))?;
    }
    out.flush()
}
