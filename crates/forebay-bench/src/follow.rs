//! How much of each later epoch comes from a cache that is smaller than the dataset: with plans
//! that the cache follows, compared with the default rule.
//!
//! The benchmark writes objects and starts a node over them (in its own process) with a cache for a
//! part of them. A job reads epoch after epoch in the order of a plan, in batches, and compares
//! each byte with what was written. One node knows the plan, as a job would tell it: the plan is
//! registered over HTTP, and each batch is followed by a message that says where the job is.
//! Another node is told nothing.
//!
//! *Found* is what was read in an epoch and not fetched from the origin in that epoch, including by
//! fetching ahead: so data that was only fetched early does not count as found. *From cache* is
//! what the job read from the cache's disk, including what had been fetched ahead: it is what the
//! job feels. As each object is read once in an epoch, no more can be found than the cache holds
//! when the epoch begins: its share of the dataset is the most that any rule can reach. The report
//! also shows how much was written (and moved) on the cache's disk for each byte that was fetched.
//!
//! With two jobs, each reads the whole dataset in each epoch in its own order, taking turns batch
//! by batch; found is what both read and nobody fetched.

use crate::{
    child::{Node, NodeOptions},
    data::{self, Dataset, Random},
    interrupt,
    load::{self, Load},
    report::{Figures, Goal, Row},
    request::{Kind, Maker},
    site,
    wire::{self, Address, Connection, Stream},
};
use forebay_core::{Error, ErrorKind, Format, Result};
use forebay_plan::{Plan, PlanSpec, Shape, Shuffle};
use forebay_protocol::{DATASETS_PATH, PLANS_PATH, dataset::DatasetSpec, metrics::Page};
use serde_json::{Value, json};
use std::{ops::Range, path::Path, sync::Arc, time::Duration};

/// Objects of one request.
const BATCH: u64 = 32;
const BLOCK_ROWS: u32 = 32;
const BLOCKS: u64 = 16;
/// The part of the cache that is used for fetching ahead, if anything is.
const AHEAD_SHARE: u64 = 64;
const READ_TIMEOUT: Duration = Duration::from_secs(120);

pub struct Setup {
    pub epochs: u64,
    /// The cache's size, as a share of the dataset's bytes.
    pub share: f64,
}

struct Case {
    name: String,
    shuffle: Shuffle,
    jobs: u64,
    follows: bool,
    /// Whether the cache also fetches ahead.
    ahead: bool,
}

pub fn run(plan: &site::Plan, setup: &Setup, mut say: impl FnMut(&str)) -> Result<Vec<Row>> {
    let dir = data::scratch(plan.within.as_deref())?;
    let origin = dir.path().join("origin");
    std::fs::create_dir_all(&origin).map_err(|e| Error::file("cannot make", &origin, e))?;
    say(&format!(
        "follow: writing {} objects",
        forebay_core::units::grouped(plan.count)
    ));
    let data = data::write_objects(&origin, plan.count, plan.size, plan.seed)?;
    let mut rows = Vec::new();
    let block = Shuffle::Block { blocks: BLOCKS };
    for (what, shuffle, jobs) in [
        ("full", Shuffle::Full, 1),
        ("block", block, 1),
        ("full, two jobs", Shuffle::Full, 2),
    ] {
        for (how, follows, ahead) in [
            ("default", false, false),
            ("by plan", true, false),
            ("and ahead", true, true),
        ] {
            if jobs > 1 && ahead {
                continue;
            }
            let case = Case {
                name: format!("{what}: {how}"),
                shuffle,
                jobs,
                follows,
                ahead,
            };
            say(&format!("follow: {}", case.name));
            rows.push(measure(plan, setup, dir.path(), &data, &case)?);
        }
    }
    Ok(rows)
}

/// A job: its order and its lease.
struct Job {
    plan: Arc<Plan>,
    lease: Option<String>,
}

fn measure(
    plan: &site::Plan,
    setup: &Setup,
    dir: &Path,
    data: &Dataset,
    case: &Case,
) -> Result<Row> {
    let cache =
        tempfile::tempdir_in(dir).map_err(|e| Error::file("cannot make a directory in", dir, e))?;
    let cache_bytes = (data.bytes() as f64 * setup.share) as u64;
    let node = Node::start(&NodeOptions {
        program: plan.program.clone(),
        origin: format!("{}=file://{}", data::BUCKET, dir.join("origin").display()).into(),
        cache: cache.path().join("cache"),
        cache_bytes,
        sets: plan.sets.clone(),
    })?;
    let at = &node.tcp;
    let opened = call(
        at,
        "POST",
        DATASETS_PATH,
        &json!(DatasetSpec {
            format: Some(Format::Objects),
            block_rows: Some(BLOCK_ROWS),
            ..DatasetSpec::of(format!("{}/o/**", data::BUCKET))
        }),
    )?;
    let id = opened["id"].as_str().unwrap_or_default().to_owned();
    let shape = Arc::new(Shape::decode(&wire::fetch(
        at,
        &format!("{DATASETS_PATH}/{id}/shape"),
    )?)?);
    let mut jobs = Vec::new();
    for job in 0..case.jobs {
        let order = Plan::new(PlanSpec::single(
            id.as_str(),
            shape.clone(),
            plan.seed + job,
            case.shuffle,
        ))?;
        let registration = json!({
            "plan": order.spec().document(), "until_epoch": setup.epochs, "ahead_bytes": if case.ahead { cache_bytes / AHEAD_SHARE } else { 0 },
        });
        let lease = case
            .follows
            .then(|| call(at, "POST", PLANS_PATH, &registration))
            .transpose()?;
        let lease = lease.and_then(|l| l["lease"].as_str().map(str::to_owned));
        if case.follows && lease.is_none() {
            return Err(Error::internal("the node gave no lease on the plan"));
        }
        jobs.push(Job {
            plan: Arc::new(order),
            lease,
        });
    }
    let admin = node
        .admin
        .as_ref()
        .ok_or_else(|| Error::internal("the node did not say where its metrics are"))?;
    let mut figures = Figures::from([
        ("cache_bytes".to_owned(), cache_bytes as f64),
        ("of_dataset".to_owned(), setup.share),
    ]);
    let (mut found, mut from_cache, mut first) = (Vec::new(), Vec::new(), None);
    for epoch in 0..setup.epochs {
        let before = look(admin)?;
        read(at, data, &jobs, epoch)?;
        let after = look(admin)?;
        let share = 1.0 - (after.fetched - before.fetched) / (data.bytes() * case.jobs) as f64;
        figures.insert(format!("found_in_{}", epoch + 1), share);
        if epoch > 0 {
            found.push(share);
            from_cache
                .push((after.from_cache - before.from_cache) / (data.bytes() * case.jobs) as f64);
        } else {
            figures.insert("held_share".into(), after.live / data.bytes() as f64);
            first = Some(after);
        }
    }
    let (first, last) = (first.unwrap_or_default(), look(admin)?);
    let least = |shares: &[f64]| shares.iter().copied().fold(f64::INFINITY, f64::min);
    figures.insert(
        "found_later".into(),
        found.iter().sum::<f64>() / found.len().max(1) as f64,
    );
    figures.insert("found_least".into(), least(&found));
    figures.insert(
        "found_of_cache".into(),
        least(&found) / setup.share.min(1.0),
    );
    figures.insert("from_cache_least".into(), least(&from_cache));
    figures.insert(
        "written_per_fetched".into(),
        (last.written - first.written) / (last.fetched - first.fetched).max(1.0),
    );
    for lease in jobs.iter().filter_map(|j| j.lease.as_ref()) {
        call(at, "DELETE", &format!("{PLANS_PATH}/{lease}"), &Value::Null)?;
    }
    let goals = match (case.follows, case.ahead) {
        (true, true) => vec![Goal::at_least("from_cache_least", 0.5)],
        // No more can be found than the cache holds, and it holds less than it takes on disk.
        (true, false) => vec![Goal::at_least("found_of_cache", 0.95)],
        _ => vec![],
    };
    Ok(Row::of(case.name.clone(), &[figures], goals))
}

/// Reads an epoch of each job, taking turns batch by batch.
fn read(at: &Address, data: &Dataset, jobs: &[Job], epoch: u64) -> Result<()> {
    let maker = Maker {
        data,
        host: at.to_string(),
        token: None,
        sign: None,
    };
    let rows = data.entries.len() as u64;
    let mut position = 0;
    while position < rows {
        let end = (position + BATCH).min(rows);
        for job in jobs {
            interrupt::check()?;
            let entries = entries_of(&job.plan, epoch, position..end);
            let count = entries.len() as u64;
            let outcome = load::run(&Load {
                at,
                kind: Kind::Batch,
                data,
                requests: &[maker.batch(&entries)],
                clients: 1,
                buffer_bytes: 256 << 10,
                ramp: Duration::ZERO,
                window: READ_TIMEOUT,
                verify: true,
                once: true,
                seed: Random::new(epoch, position).next(),
                server: None,
                by_gets: None,
            })?;
            if outcome.objects != count {
                return Err(Error::timeout(format!(
                    "{} of {count} objects came within {READ_TIMEOUT:?}",
                    outcome.objects
                )));
            }
            if let Some(lease) = &job.lease {
                call(
                    at,
                    "PUT",
                    &format!("{PLANS_PATH}/{lease}"),
                    &json!({"epoch": epoch, "position": end}),
                )?;
            }
        }
        position = end;
    }
    Ok(())
}

fn entries_of(plan: &Plan, epoch: u64, positions: Range<u64>) -> Vec<u32> {
    let mut rows = Vec::new();
    plan.fill(epoch, positions, &mut rows);
    rows.iter().map(|r| r.row as u32).collect()
}

#[derive(Clone, Copy, Default)]
struct Look {
    /// Bytes from the origin.
    fetched: f64,
    /// Bytes that reads took from the cache's disk.
    from_cache: f64,
    /// Bytes written to the cache's disk, including moves.
    written: f64,
    live: f64,
}

fn look(admin: &Address) -> Result<Look> {
    let page = wire::fetch(admin, "/metrics")?;
    let page = Page::parse(&String::from_utf8_lossy(&page));
    let sum = |name: &str, labels: &[(&str, &str)]| {
        page.sum(name, labels)
            .ok_or_else(|| Error::internal(format!("the node does not tell {name}")))
    };
    Ok(Look {
        fetched: sum("forebay_read_bytes_total", &[("source", "origin")])?,
        from_cache: sum("forebay_read_bytes_total", &[("source", "cache")])?,
        written: sum("forebay_store_written_bytes_total", &[])?
            + sum("forebay_store_relocated_bytes_total", &[])?,
        live: sum("forebay_store_live_bytes", &[])?,
    })
}

/// One request with a JSON body, and its JSON answer.
fn call(at: &Address, method: &str, path: &str, body: &Value) -> Result<Value> {
    let text = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let mut connection = Connection::new(Stream::connect(at)?, 0);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {at}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    connection.send((head + &text).as_bytes())?;
    let head = connection.head()?;
    let mut answer = Vec::new();
    connection.body(&head, |piece| {
        answer.extend_from_slice(piece);
        Ok(())
    })?;
    match head.status {
        200..300 => serde_json::from_slice(&answer)
            .map_err(|e| Error::internal(format!("{method} {path}: {e}"))),
        status => Err(Error::new(
            ErrorKind::OriginUnavailable,
            format!(
                "{method} {path}: status {status}: {}",
                String::from_utf8_lossy(&answer)
            ),
        )),
    }
}
