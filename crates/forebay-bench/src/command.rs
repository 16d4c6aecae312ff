//! The command line of `forebay bench`: what to measure, with which settings.

use crate::{
    ceiling, child, cold, compare, data, existing, follow, index, interrupt,
    measure::{self, Ceilings, Timing, Workload},
    report::{Line, Report, Row},
    request::Kind,
    site::{self, Plan, Site, Source, Transport},
    suite, table,
};
use forebay_core::{Error, ErrorKind, Result, units};
use forebay_protocol::Address as NodeAddr;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// What `forebay bench` should do.
#[derive(Debug, clap::Args)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  forebay bench batch                               128 × 10 KiB, 8 clients, TCP, on its own node
  forebay bench batch --size 1MiB --transport unix --members --repeats 3 --save a.json
  forebay bench get --size 1MiB --url http://127.0.0.1:8080 --bucket data --prefix train/
  forebay bench cmp a.json b.json

Without --url, objects are written into a temporary directory, a node is started over it (a process of its own), warmed and \
    stopped. Clients are threads of this process. docs/BENCHMARKS.md tells how to read the figures."
)]
pub struct Args {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Debug, clap::Subcommand)]
enum Sub {
    /// Plain GETs
    Get(RunArgs),
    /// GetBatch: many objects or archive members in one request
    Batch(BatchArgs),
    /// The matrix for the project's targets, each target next to its figure: about five minutes
    Suite(SuiteArgs),
    /// Batches of 32, 64 and 128 against one GET at a time and 32 GETs in flight: throughput and
    /// latency
    Table(TableArgs),
    /// Cold batches from an origin at a distance: round trips beyond the transfer
    Cold(ColdArgs),
    /// Caches of ten thousand to ten million small objects: memory of the index, restart time,
    /// speed
    Index(IndexArgs),
    /// Epochs over a cache that is smaller than the dataset: what is found, with and without plans
    /// that the cache follows
    Follow(FollowArgs),
    /// Compare two reports that --save has written
    Cmp(CmpArgs),
    /// Fill sockets with one buffer, again and again: the plain copy that others are compared with
    #[command(hide = true)]
    CopyServer(CopyArgs),
}

#[derive(Debug, clap::Args)]
struct BatchArgs {
    /// Entries of one batch
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: u32,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Bytes of one object
    #[arg(long, value_name = "SIZE", default_value = "10KiB", value_parser = units::parse_bytes)]
    size: u64,
    /// How many objects or members [default: about 200 MiB of them, at most 20,000]
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Whole objects (the default)
    #[arg(long, conflicts_with = "members")]
    objects: bool,
    /// Members of tar shards
    #[arg(long)]
    members: bool,
    /// Members of one shard [default: about 32 MiB of them]
    #[arg(long, value_name = "N", requires = "members")]
    per_shard: Option<u64>,
    /// Clients, each with one connection
    #[arg(long, short = 'c', value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    transport: Transport,
    /// Everything is in the cache before the clock runs (the default)
    #[arg(long, conflicts_with = "cold")]
    warm: bool,
    /// Nothing is in the cache: each entry is requested once
    #[arg(long, conflicts_with = "url")]
    cold: bool,
    /// Compare every byte with what was written, while the clock runs
    #[arg(long, conflicts_with = "url")]
    verify: bool,
    /// A node that is already running: http://HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDR", requires = "bucket")]
    url: Option<String>,
    /// Its bucket
    #[arg(long, requires = "url")]
    bucket: Option<String>,
    /// Only what is below this prefix
    #[arg(long, requires = "url", default_value = "")]
    prefix: String,
    /// The node's process, to see its CPU time and memory
    #[arg(long, value_name = "PID", requires = "url")]
    pid: Option<u32>,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, clap::Args)]
struct HowArgs {
    /// Time measured in each repetition [default: 3, in a suite 2]
    #[arg(long, value_name = "S", value_parser = seconds)]
    seconds: Option<f64>,
    /// Repetitions; the figures are their medians [default: 1, in a suite 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// Order of requests and contents of objects
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Each client's receive buffer
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = units::parse_bytes)]
    buffer: u64,
    /// Keep the report in this file, as JSON
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Where to put objects and caches during the run
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Another forebay program to run the node
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// A setting of the node: KEY=VALUE
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct SuiteArgs {
    /// Only objects of this size [default: 10KiB, 100KiB and 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    size: Option<u64>,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, clap::Args)]
struct TableArgs {
    /// Only objects of this size [default: 10KiB, 100KiB and 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    size: Option<u64>,
    /// Clients, each with one batch in flight
    #[arg(long, short = 'c', value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=128))]
    concurrency: u32,
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    transport: Transport,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, clap::Args)]
struct ColdArgs {
    /// Only objects of this size [default: 10KiB, then 100KiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    size: Option<u64>,
    /// Shards that the members of one batch are in
    #[arg(long, value_name = "N", default_value_t = cold::Shards::USUAL.count as u32, value_parser = clap::value_parser!(u32).range(1..=128))]
    shards: u32,
    /// Size of one shard [default: about 2 MiB, at most 64 members]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    shard_size: Option<u64>,
    /// Request the members at the beginning of each shard [default: somewhere in it]
    #[arg(long)]
    front: bool,
    /// Round-trip time to the origin
    #[arg(long, value_name = "TIME", default_value = "30ms", value_parser = units::parse_duration)]
    rtt: Duration,
    /// Bytes per second from the origin
    #[arg(long, value_name = "SIZE", default_value = "100MiB", value_parser = units::parse_bytes)]
    rate: u64,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, clap::Args)]
struct IndexArgs {
    /// Bytes of one object
    #[arg(long, value_name = "SIZE", default_value = "100", value_parser = units::parse_bytes)]
    size: u64,
    /// Objects in the largest cache
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    count: u64,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, clap::Args)]
struct FollowArgs {
    /// Bytes of one object
    #[arg(long, value_name = "SIZE", default_value = "100KiB", value_parser = units::parse_bytes)]
    size: u64,
    /// Objects in the dataset
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(64..=10_000_000))]
    count: u64,
    /// Epochs that are read
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=100))]
    epochs: u64,
    /// Size of the cache, in percent of the dataset
    #[arg(long, value_name = "PERCENT", default_value_t = 50.0)]
    cache: f64,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, clap::Args)]
struct CmpArgs {
    before: PathBuf,
    after: PathBuf,
}

#[derive(Debug, clap::Args)]
struct CopyArgs {
    #[arg(long)]
    unix: Option<PathBuf>,
    #[arg(long)]
    write: usize,
    #[arg(long)]
    span: usize,
}

/// How long a command measures by default.
#[derive(Clone, Copy)]
struct Usual {
    seconds: f64,
    repeats: u16,
}

const NO_NGINX: &str = "nginx not found: no ceiling of it (tests/servers/install.sh nginx)";
const ONE: Usual = Usual {
    seconds: 3.0,
    repeats: 1,
};
const SUITE: Usual = Usual {
    seconds: 2.0,
    repeats: 3,
};
const TABLE: Usual = Usual {
    seconds: 2.0,
    repeats: 1,
};
const INDEX: Usual = Usual {
    seconds: 1.0,
    repeats: 5,
};
const COLD: Usual = Usual {
    seconds: 1.0,
    repeats: 5,
};

fn seconds(text: &str) -> Result<f64> {
    text.parse()
        .ok()
        .filter(|s| (0.05..=86400.0).contains(s))
        .ok_or_else(|| Error::invalid(format!("{text:?} is not between 0.05 and 86400 seconds")))
}

impl HowArgs {
    fn timing(&self, verify: bool, usual: Usual) -> Timing {
        let buffer_bytes = self.buffer.clamp(1 << 12, 1 << 28) as usize;
        let window = Duration::from_secs_f64(self.seconds.unwrap_or(usual.seconds));
        Timing {
            window,
            repeats: self.repeats.unwrap_or(usual.repeats).into(),
            buffer_bytes,
            verify,
            seed: self.seed,
        }
    }

    fn plan(&self, size: u64, count: u64, per_shard: u64) -> Result<Plan> {
        let program = self.program.clone().map_or_else(child::own_program, Ok)?;
        Ok(Plan {
            program,
            within: self.dir.clone(),
            sets: self.sets.clone(),
            size,
            count,
            per_shard,
            seed: self.seed,
        })
    }

    fn report(&self, made: Made, usual: Usual) -> Report {
        let Made { rows, notes } = made;
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let time = chrono::Utc::now().format("%Y-%m-%d %H:%M:%SZ").to_string();
        Report {
            program: concat!("forebay ", env!("CARGO_PKG_VERSION")).to_owned(),
            time,
            cpus,
            seed: self.seed,
            seconds: self.seconds.unwrap_or(usual.seconds),
            notes,
            rows,
        }
    }
}

/// The result of a command.
pub enum Answer {
    /// Figures: [`report::table`](crate::report::table) shows them.
    Report {
        /// What was measured.
        report: Report,
        /// The file that [`Report::save`] is to write.
        save: Option<PathBuf>,
    },
    /// Two reports side by side.
    Comparison(Vec<Line>),
    /// A server ran, and ended.
    Served,
}

/// Why a command gave no result: wrong usage, a failure, or a signal.
#[derive(Debug)]
pub enum Failure {
    /// The command line names something that cannot be used; nothing was measured.
    Usage(Error),
    /// The attempt failed.
    Failed(Error),
    /// SIGINT or SIGTERM arrived.
    Signal(i32),
}

/// Runs one command. It has its own threads and clock, and from here on it handles the signals.
pub fn run(args: Args) -> Result<Answer, Failure> {
    match args.command {
        Sub::CopyServer(args) => {
            ceiling::serve_copies(args.unix.as_deref(), args.write, args.span)
                .map_err(Failure::Failed)?;
            return Ok(Answer::Served);
        }
        Sub::Cmp(args) => {
            let read = |path: &Path| {
                Report::read(path).map_err(|e| match e.kind() {
                    ErrorKind::Invalid => Failure::Usage(e),
                    _ => Failure::Failed(e),
                })
            };
            let (before, after) = (read(&args.before)?, read(&args.after)?);
            return Ok(Answer::Comparison(compare::compare(&before, &after)));
        }
        _ => interrupt::listen(),
    }
    let (how, usual, made) = match &args.command {
        Sub::Get(run) => (&run.how, ONE, one(Kind::Get, 1, run)),
        Sub::Batch(batch) => (
            &batch.run.how,
            ONE,
            one(Kind::Batch, batch.batch as usize, &batch.run),
        ),
        Sub::Suite(args) => (&args.how, SUITE, whole_suite(args)),
        Sub::Table(args) => (&args.how, TABLE, papers_table(args)),
        Sub::Cold(args) => (&args.how, COLD, cold_batches(args)),
        Sub::Index(args) => (&args.how, INDEX, many_entries(args)),
        Sub::Follow(args) => (&args.how, ONE, epochs(args)),
        Sub::Cmp(_) | Sub::CopyServer(_) => unreachable!("answered above"),
    };
    // If the run was interrupted, any error is reported as the interruption.
    let made = made.map_err(|e| interrupt::signal().map_or(Failure::Failed(e), Failure::Signal))?;
    Ok(Answer::Report {
        report: how.report(made, usual),
        save: how.save.clone(),
    })
}

/// Enough objects that no CPU cache holds them, few enough that the page cache does.
fn usual_count(size: u64) -> u64 {
    ((200u64 << 20) / size.max(1)).clamp(400, 20_000)
}

/// What a command has measured.
struct Made {
    rows: Vec<Row>,
    notes: Vec<String>,
}

fn whole_suite(args: &SuiteArgs) -> Result<Made> {
    let nginx = child::Nginx::program().is_some();
    let notes = if nginx {
        vec![]
    } else {
        vec![NO_NGINX.to_owned()]
    };
    let plan = args.how.plan(0, 0, 0)?;
    let sizes = args.size.map_or(suite::SIZES.to_vec(), |size| {
        vec![(size, usual_count(size))]
    });
    let rows = suite::run(&plan, &args.how.timing(false, SUITE), &sizes, nginx, say)?;
    Ok(Made { rows, notes })
}

fn papers_table(args: &TableArgs) -> Result<Made> {
    let sizes = args.size.map_or(table::SIZES.to_vec(), |size| {
        vec![(size, usual_count(size) / 2)]
    });
    let rows = table::run(
        &args.how.plan(0, 0, 1)?,
        &args.how.timing(false, TABLE),
        args.transport,
        args.concurrency as usize,
        &sizes,
        say,
    )?;
    let note = format!(
        "{} clients; the time of an object is its share of the batch's",
        args.concurrency
    );
    Ok(Made {
        rows,
        notes: vec![note],
    })
}

fn cold_batches(args: &ColdArgs) -> Result<Made> {
    if args.rtt < Duration::from_millis(1) || args.rate == 0 {
        return Err(Error::invalid(
            "the round trip must take 1 ms or more, and the rate must not be 0",
        )
        .hint("as in --rtt 30ms --rate 100MiB"));
    }
    let far = cold::Far {
        rtt: args.rtt,
        bytes_per_s: args.rate,
    };
    let sizes = args.size.map_or(cold::SIZES.to_vec(), |s| vec![s]);
    let shards = cold::Shards {
        count: args.shards as usize,
        bytes: args.shard_size,
        front: args.front,
    };
    let rows = cold::run(
        &args.how.plan(0, 0, 1)?,
        &args.how.timing(true, COLD),
        &far,
        &sizes,
        shards,
        say,
    )?;
    let note = format!(
        "round trip {:?}, {}/s; a new connection costs a round trip of its own",
        args.rtt,
        units::format_bytes(args.rate)
    );
    Ok(Made {
        rows,
        notes: vec![note],
    })
}

fn many_entries(args: &IndexArgs) -> Result<Made> {
    let plan = args.how.plan(args.size, args.count, 1)?;
    if args.size > forebay_core::limits::CHUNK_BYTES {
        return Err(
            Error::invalid("an object of more than 1 MiB is not one entry").hint("--size 100"),
        );
    }
    Ok(Made {
        rows: index::run(&plan, &args.how.timing(false, INDEX), say)?,
        notes: vec![],
    })
}

fn epochs(args: &FollowArgs) -> Result<Made> {
    if !(1.0..=1000.0).contains(&args.cache) {
        return Err(
            Error::invalid(format!("a cache of {} % of the dataset", args.cache))
                .hint("as in --cache 50"),
        );
    }
    let setup = follow::Setup {
        epochs: args.epochs,
        share: args.cache / 100.0,
    };
    let rows = follow::run(&args.how.plan(args.size, args.count, 1)?, &setup, say)?;
    let note = "found: read and not fetched in that epoch; held: what the cache held after the \
        first, records' heads included"
        .to_owned();
    Ok(Made {
        rows,
        notes: vec![note],
    })
}

/// Prints progress for whoever waits.
fn say(what: &str) {
    eprintln!("bench: {what}");
}

fn one(kind: Kind, batch: usize, args: &RunArgs) -> Result<Made> {
    let source = if args.members {
        Source::Members
    } else {
        Source::Objects
    };
    let mut workload = Workload {
        kind,
        size: args.size,
        batch,
        clients: args.concurrency as usize,
        transport: args.transport,
        source,
        signed: false,
        cold: args.cold,
    };
    let timing = args.how.timing(args.verify, ONE);
    let memcpy_bytes_per_s = ceiling::memcpy();
    let count = args.count.unwrap_or_else(|| usual_count(args.size));
    let plan = args.how.plan(
        args.size,
        count,
        args.per_shard
            .unwrap_or_else(|| data::members_per_shard(args.size)),
    )?;
    if let Some(url) = &args.url {
        let node = NodeAddr::parse(url)?;
        if matches!(node, NodeAddr::Unix(_)) {
            workload.transport = Transport::Unix;
        }
        let token = std::env::var("FOREBAY_TOKEN")
            .ok()
            .filter(|t| !t.is_empty());
        let asked = existing::asked(&node, token, args.pid)?;
        let bucket = args.bucket.as_deref().unwrap_or_default();
        let limit = args.count.map(|n| n as usize);
        let data = existing::list(&asked, bucket, &args.prefix, source, limit)?;
        workload.size = data.bytes() / data.entries.len() as u64;
        asked.warm(&data, timing.seed)?;
        let requests = site::requests(&asked, &data, kind, batch, false, timing.seed, None);
        let mut site = Site::new(&plan, &[])?;
        let mut ceilings = Ceilings {
            site: &mut site,
            memcpy_bytes_per_s,
            nginx: false,
        };
        let row = measure::row(
            &workload,
            &asked,
            &data,
            &requests,
            &mut ceilings,
            &timing,
            vec![],
        )?;
        return Ok(Made {
            rows: vec![row],
            notes: vec![],
        });
    }
    let mut site = Site::new(&plan, &[source])?;
    let data = site.data(source)?.clone();
    let mut notes = Vec::new();
    let nginx = child::Nginx::program().is_some();
    if !nginx && kind == Kind::Get && source == Source::Objects {
        notes.push(NO_NGINX.to_owned());
    }
    let mut rows = Vec::new();
    let asked = site.start(true, None, &[])?;
    if !args.cold {
        asked.warm(&data, timing.seed)?;
    }
    let requests = site::requests(&asked, &data, kind, batch, args.cold, timing.seed, None);
    if !args.cold {
        let mut ceilings = Ceilings {
            site: &mut site,
            memcpy_bytes_per_s,
            nginx,
        };
        rows.push(measure::row(
            &workload,
            &asked,
            &data,
            &requests,
            &mut ceilings,
            &timing,
            vec![],
        )?);
    } else {
        rows.push(measure::cold_row(
            &workload,
            asked,
            &data,
            &requests,
            &mut site,
            &timing,
            vec![],
        )?);
    }
    Ok(Made { rows, notes })
}
