//! `forebay report`: what a job, or everything since its start, took of a node and of its origins.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, utc},
};
use clap::builder::{OsStringValueParser, TypedValueParser};
use forebay_client::Call;
use forebay_core::{Error, ErrorKind, units::format_bytes};
use forebay_protocol::{
    STATUS_PATH,
    job::{JOBS_PATH, Job, Jobs, OfDataset, Taken},
    node::Status,
};
use forebay_report::{
    Egress, End, Energy, Figures, Money, MoneyShare, OriginUse, Report, SHIPPED, Sources, Stored,
    Table, advise, page, text,
};
use http::Method;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

/// Operations that cost what a read costs; all others what a write or listing does.
const READS: [&str; 3] = ["get", "head", "forward_read"];
/// What providers take nothing for.
const FREE: [&str; 3] = ["delete", "abort_upload", "forward_delete"];

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay report                         the jobs that the node knows, and what it did
  forebay report c4-pretrain-7           one job, by its name or the beginning of it
  forebay report c4-pretrain-7 --html report.html --prices prices.toml --place aws/us-east-1
  forebay report --print-prices > prices.toml

A job is what a loader calls itself: loader(job=\"c4-pretrain-7\"), or FOREBAY_JOB. How well its loop was fed \
    is known to the loader alone: loader.report() has that, and this too.
JSON: the report, as loader.report().json() has it; of a whole node also its jobs and datasets.")]
pub struct Args {
    /// The job's name, or the beginning of it; without it, the whole node
    job: Option<String>,
    /// Write the report as one HTML page that needs no network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// A table of prices; without it, the one that ships
    #[arg(
        long,
        value_name = "FILE",
        env = "FOREBAY_PRICES",
        hide_env_values = true,
        value_parser = OsStringValueParser::new().map(PathBuf::from)
    )]
    prices: Option<PathBuf>,
    /// Whose prices: provider/region, as in aws/us-east-1. Without it no money is told
    #[arg(
        long,
        value_name = "PLACE",
        env = "FOREBAY_PLACE",
        hide_env_values = true
    )]
    place: Option<String>,
    /// Where the node is, seen from the bucket: internet, region (another one of the provider), or
    /// none (the same one)
    #[arg(long, value_name = "WAY", default_value = "internet")]
    egress: String,
    /// Print the table of prices that ships, to edit it
    #[arg(long)]
    print_prices: bool,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let mut out = Out::new(common.json);
    if args.print_prices {
        out.line(SHIPPED.trim_end())?;
        return out.flush();
    }
    // Before anything is asked of the node.
    let egress: Egress = args.egress.parse().map_err(Failure::Usage)?;
    // A variable that is empty is as one that is not set.
    let prices = args.prices.filter(|file| !file.as_os_str().is_empty());
    let place = args.place.filter(|place| !place.is_empty());
    let table = match &prices {
        None => Table::shipped()?,
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|e| Error::file("the table of prices", path, e))?;
            Table::parse(&text, &path.display().to_string()).map_err(Failure::Usage)?
        }
    };
    let prices = place.as_deref().map(|place| table.of(place));
    let prices = prices.transpose().map_err(Failure::Usage)?;

    let client = super::client(common)?;
    let jobs: Jobs = super::json(&client, Call::new(Method::GET, JOBS_PATH)).await?;
    let mut report = match &args.job {
        Some(name) => {
            let job = find(&jobs, name)?;
            let mut report = of_job(job);
            // Each key has its own account of a job.
            let others: Vec<&str> = jobs
                .jobs
                .iter()
                .filter(|other| other.name == job.name && other.caller != job.caller)
                .map(|other| other.caller.as_str())
                .collect();
            if !others.is_empty() {
                report.absent.push(format!(
                    "what the jobs of this name took that are of {}: this is the one of {}",
                    others.join(", "),
                    job.caller
                ));
            }
            report
        }
        None => {
            let status = super::json(&client, Call::new(Method::GET, STATUS_PATH)).await;
            let status: Option<Status> = match status {
                // A key sees its own jobs, also where it does not administer the node.
                Err(Failure::Failed(e)) if e.kind() == ErrorKind::PermissionDenied => None,
                status => Some(status?),
            };
            let mut report = match &status {
                Some(status) => of_node(status),
                None => of_own_jobs(&jobs),
            };
            report.stored = stored(&jobs);
            if let (Some(prices), Some(origin)) = (prices, &report.origin) {
                let mut money = prices.money(origin, egress);
                if let Some(status) = &status {
                    money.shares = shares_of_buckets(status, prices, egress);
                }
                money.shares.extend(shares_of_jobs(&jobs, prices, egress));
                money.storage = prices.storage(&report.stored);
                report.money = Some(money);
            }
            report
        }
    };
    if let (Some(prices), Some(origin), None) = (prices, &report.origin, &report.money) {
        let mut money = prices.money(origin, egress);
        if let Some(job) = &report.job {
            money.shares.push(MoneyShare {
                by: "job".into(),
                name: job.clone(),
                spent: Some(money.spent_total),
                saved: Some(money.saved_total),
            });
        }
        report.money = Some(money);
    }
    if prices.is_none() {
        report.absent.push(
            "money: whose prices apply is not known (--place aws/us-east-1, or FOREBAY_PLACE)"
                .into(),
        );
    }
    report.warnings = advise(&report);
    if let Some(path) = &args.html {
        std::fs::write(path, page(&report)).map_err(|e| Error::file("the report", path, e))?;
    }
    if out.json {
        return match args.job {
            Some(_) => out.object(&report),
            None => out.object(&WithJobs {
                report: &report,
                jobs: &jobs,
            }),
        };
    }
    for line in text(&report).lines() {
        out.line(one_line(line))?;
    }
    if args.job.is_none() {
        for job in &jobs.jobs {
            out.line(format!(
                "job          {} of {}   {}, {}, last seen {}",
                one_line(&job.name),
                one_line(&job.caller),
                count(job.taken.rows, "row"),
                format_bytes(job.taken.row_bytes),
                utc(job.last_seen as i64 * 1000)
            ))?;
        }
        for dataset in &jobs.datasets {
            out.line(format!(
                "dataset      {}   {}, {}",
                one_line(&called(dataset)),
                count(dataset.taken.rows, "row"),
                format_bytes(dataset.taken.row_bytes),
            ))?;
        }
        if jobs.forgotten > 0 {
            out.line(format!(
                "jobs         {} forgotten, because there were too many",
                count(jobs.forgotten, "older job")
            ))?;
        }
    }
    out.flush()
}

/// What `--json` says of a node: its report, and its jobs and datasets as it tells them itself.
#[derive(serde::Serialize)]
struct WithJobs<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(flatten)]
    jobs: &'a Jobs,
}

fn find<'a>(jobs: &'a Jobs, name: &str) -> Outcome<&'a Job> {
    if let Some(job) = jobs.jobs.iter().find(|job| job.name == name) {
        return Ok(job);
    }
    let begin: Vec<&Job> = jobs
        .jobs
        .iter()
        .filter(|j| j.name.starts_with(name))
        .collect();
    match begin[..] {
        [job] => Ok(job),
        [] => Err(Error::not_found(format!("the node knows no job {name:?}"))
            .hint("it read no dataset there since the node started; `forebay report` lists those that did")
            .into()),
        _ => Err(Failure::Usage(
            Error::invalid(format!("{} jobs begin with {name:?}", begin.len())).hint(format!(
                "give more of the name: {}",
                begin.iter().take(5).map(|j| j.name.as_str()).collect::<Vec<_>>().join(", ")
            )),
        )),
    }
}

/// What a node knows of a job. How its loop waited is not known here.
fn of_job(job: &Job) -> Report {
    let sources = Sources {
        memory: job.taken.memory_bytes,
        disk: job.taken.disk_bytes,
        peer: job.taken.peer_bytes,
        origin: job.taken.origin_bytes,
    };
    let run = Figures {
        samples: job.taken.rows,
        batches: job.taken.requests,
        bytes: job.taken.row_bytes,
        seconds: job.seconds,
        samples_per_s: match job.seconds > 0.0 {
            true => job.taken.rows as f64 / job.seconds,
            false => 0.0,
        },
        hit_ratio: sources.hit_ratio(),
        sources: Some(sources),
        ..Figures::default()
    };
    let of = match job.node_rows > job.taken.rows {
        true => "the whole node: other jobs were served too",
        false => "the whole node",
    };
    let energy = job.energy.iter().map(|e| Energy {
        source: e.source.clone(),
        domain: e.domain.clone(),
        joules: e.joules,
        estimate: e.estimate,
    });
    let mut absent =
        vec!["utilization and waits: the training loop knows them (loader.report())".to_owned()];
    absent.extend(
        job.absent
            .iter()
            .map(|why| format!("joules of the node: {why}")),
    );
    Report {
        title: format!("job {} of {}", job.name, job.caller),
        job: Some(job.name.clone()),
        made_at: utc(job.last_seen as i64 * 1000),
        unit: "rows".into(),
        run: Some(run),
        ends: vec![End {
            name: "node".into(),
            of: of.into(),
            seconds: job.seconds,
            samples: job.node_rows.max(job.taken.rows),
            unit: "rows".into(),
            cpu_seconds: Some(job.node_cpu_seconds),
            energy: energy.collect(),
        }],
        origin: Some(origin_use(&job.taken)),
        absent,
        ..Report::default()
    }
}

/// What reads of rows took of the origin.
fn origin_use(taken: &Taken) -> OriginUse {
    OriginUse {
        reads: taken.origin_requests,
        read_bytes: taken.origin_bytes,
        // Without a cache, the bytes would have come from the origin; in how many requests is not
        // known. What was fetched for this is on the disk, and in memory, when it is read; what other
        // nodes sent they may just have read there for it.
        bytes_saved: (taken.memory_bytes + taken.disk_bytes).saturating_sub(taken.origin_bytes),
        ..OriginUse::default()
    }
}

/// What the jobs of a key took together, where it may not ask what the node did.
fn of_own_jobs(jobs: &Jobs) -> Report {
    let mut origin = OriginUse {
        of: "the jobs of this key since the node started".into(),
        ..OriginUse::default()
    };
    for used in jobs.jobs.iter().map(|job| origin_use(&job.taken)) {
        origin.reads += used.reads;
        origin.read_bytes += used.read_bytes;
        origin.bytes_saved += used.bytes_saved;
    }
    Report {
        title: "the jobs of this key".into(),
        made_at: now(),
        origin: Some(origin),
        absent: vec!["what the node did: keys with admin on every bucket may ask for it".into()],
        ..Report::default()
    }
}

fn now() -> String {
    utc(chrono::Utc::now().timestamp_millis())
}

/// What a node did since it started.
fn of_node(status: &Status) -> Report {
    let mut origin = OriginUse {
        reads_saved: Some(status.reads.hit),
        bytes_saved: status.reads.bytes_from_cache,
        of: "all that the node did since it started".into(),
        ..OriginUse::default()
    };
    for bucket in &status.origin_stats {
        let used = used(bucket);
        origin.reads += used.reads;
        origin.writes += used.writes;
        origin.read_bytes += used.read_bytes;
        origin.written_bytes += used.written_bytes;
    }
    Report {
        title: format!(
            "node, version {}, up {} s",
            status.version, status.uptime_seconds
        ),
        made_at: now(),
        origin: Some(origin),
        ..Report::default()
    }
}

fn used(bucket: &forebay_protocol::node::OriginStatus) -> OriginUse {
    let sum = |of: &dyn Fn(&str) -> bool| {
        let operations = bucket.operations.iter().filter(|(name, _)| of(name));
        operations.map(|(_, operation)| operation.requests).sum()
    };
    OriginUse {
        reads: sum(&|name| READS.contains(&name)),
        writes: sum(&|name| !READS.contains(&name) && !FREE.contains(&name)),
        read_bytes: bucket.bytes_in,
        written_bytes: bucket.bytes_out,
        ..OriginUse::default()
    }
}

/// What each bucket of a node spent.
fn shares_of_buckets(
    status: &Status,
    prices: &forebay_report::Prices,
    egress: Egress,
) -> Vec<MoneyShare> {
    let buckets = status.origin_stats.iter();
    let share = buckets.map(|bucket| MoneyShare {
        by: "bucket".into(),
        name: bucket.name.clone(),
        spent: Some(prices.money(&used(bucket), egress).spent_total),
        saved: None,
    });
    share.collect()
}

/// What jobs spent and saved, the keys that they used, and the datasets: of reads of datasets alone.
fn shares_of_jobs(jobs: &Jobs, prices: &forebay_report::Prices, egress: Egress) -> Vec<MoneyShare> {
    let share = |by: &str, name: &str, money: &Money| MoneyShare {
        by: by.into(),
        name: name.into(),
        spent: Some(money.spent_total),
        saved: Some(money.saved_total),
    };
    let mut keys: BTreeMap<&str, OriginUse> = BTreeMap::new();
    let mut shares = Vec::new();
    for job in &jobs.jobs {
        let used = origin_use(&job.taken);
        shares.push(share("job", &job.name, &prices.money(&used, egress)));
        let key = keys.entry(&job.caller).or_default();
        key.reads += used.reads;
        key.read_bytes += used.read_bytes;
        key.bytes_saved += used.bytes_saved;
    }
    for (name, used) in &keys {
        let name = if name.is_empty() { "none" } else { name };
        shares.push(share("key", name, &prices.money(used, egress)));
    }
    for dataset in &jobs.datasets {
        let used = origin_use(&dataset.taken);
        shares.push(share(
            "dataset",
            &called(dataset),
            &prices.money(&used, egress),
        ));
    }
    shares
}

/// What lies at the origin for the datasets that were read. Those whose files have the same names are
/// versions of one dataset: files are there once, so the last that was read counts, which comes
/// first.
fn stored(jobs: &Jobs) -> Vec<Stored> {
    let mut seen = BTreeSet::new();
    let newest = jobs
        .datasets
        .iter()
        .filter(|d| seen.insert((&d.name, &d.names)));
    newest
        .map(|dataset| Stored {
            by: "dataset".into(),
            name: called(dataset),
            bytes: dataset.stored_bytes,
        })
        .collect()
}

/// A dataset as people tell it from others: where it is, and the beginning of its id.
fn called(dataset: &OfDataset) -> String {
    let id: String = dataset.id.chars().take(12).collect();
    format!("{} version {id}", dataset.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str) -> Job {
        Job {
            name: name.into(),
            taken: Taken {
                rows: 10,
                ..Taken::default()
            },
            node_rows: 10,
            ..Job::default()
        }
    }

    #[test]
    fn a_job_is_found_by_the_beginning_of_its_name() {
        let jobs = Jobs {
            jobs: vec![job("alpha-1"), job("alpha-2"), job("beta"), job("alpha")],
            ..Jobs::default()
        };
        let name = |given: &str| find(&jobs, given).ok().map(|j| j.name.clone());
        assert_eq!(name("be").as_deref(), Some("beta"));
        assert_eq!(name("alpha").as_deref(), Some("alpha"));
        assert_eq!(name("alpha-"), None);
        assert_eq!(name("gamma"), None);
    }

    #[test]
    fn what_is_passed_on_costs_as_what_is_not() {
        let operations = [
            ("get", 1),
            ("head", 10),
            ("forward_read", 100),
            ("put", 2),
            ("list", 20),
            ("forward", 200),
            ("delete", 4),
            ("forward_delete", 40),
        ];
        let operation = |requests| forebay_protocol::node::Operation {
            requests,
            ..Default::default()
        };
        let bucket = forebay_protocol::node::OriginStatus {
            operations: operations
                .map(|(name, requests)| (name.to_owned(), operation(requests)))
                .into(),
            ..Default::default()
        };
        let used = used(&bucket);
        assert_eq!((used.reads, used.writes), (111, 222));
    }

    #[test]
    fn a_key_pays_for_its_jobs() {
        let taken = |gb: u64| Taken {
            origin_bytes: gb * 1_000_000_000,
            ..Taken::default()
        };
        let of = |name: &str, caller: &str, gb: u64| Job {
            caller: caller.into(),
            taken: taken(gb),
            ..job(name)
        };
        let dataset = OfDataset {
            id: "0123456789abcdef".into(),
            name: "b/c4/*".into(),
            names: "0000000000000000".into(),
            stored_bytes: 1_000_000_000_000,
            taken: taken(2),
        };
        let before = OfDataset {
            id: "fedcba9876543210".into(),
            stored_bytes: 900_000_000_000,
            ..dataset.clone()
        };
        // Other files of the same folder.
        let beside = OfDataset {
            id: "00112233445566".into(),
            names: "0000000000000001".into(),
            ..dataset.clone()
        };
        let jobs = Jobs {
            jobs: vec![of("a", "x", 1), of("b", "x", 2), of("c", "y", 4)],
            datasets: vec![dataset, before, beside],
            forgotten: 0,
        };
        let table = Table::shipped().expect("it ships");
        let prices = table.of("aws/us-east-1").expect("it has this");
        let shares = shares_of_jobs(&jobs, prices, Egress::Internet);
        let spent = |by: &str, name: &str| {
            let found = shares.iter().find(|s| s.by == by && s.name == name);
            found.and_then(|s| s.spent).expect("it is there")
        };
        assert!((spent("key", "x") - 0.27).abs() < 1e-9);
        assert!((spent("key", "y") - spent("job", "c")).abs() < 1e-9);
        assert!((spent("job", "b") - 0.18).abs() < 1e-9);
        assert!((spent("dataset", "b/c4/* version 0123456789ab") - 0.18).abs() < 1e-9);
        // Of versions of one dataset, the files are there once.
        let kept = prices.storage(&stored(&jobs));
        let [kept, other] = &kept[..] else {
            panic!("two of {kept:?}");
        };
        assert_eq!(other.name, "b/c4/* version 001122334455");
        assert_eq!(kept.name, "b/c4/* version 0123456789ab");
        assert!((kept.per_month - 23.0).abs() < 1e-9);
    }

    #[test]
    fn what_a_node_does_not_measure_is_absent_from_its_report() {
        let mut measured = job("a");
        measured.absent = vec!["no zones".into()];
        let text = text(&of_job(&measured));
        assert!(
            text.contains("joules not measured") && text.contains("no zones"),
            "{text}"
        );
        assert!(text.contains("loader.report()"), "{text}");
        assert!(text.contains("10 in 0 reads") && text.contains("per 1,000 rows"));
        assert!(!text.contains("samples"), "{text}");
    }
}
