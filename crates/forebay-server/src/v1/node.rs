//! `/v1/forebay/`: what the node says about itself, and what operators do with its cache.

use super::{
    Call, cluster_members as members, error::json_response, is_local, not_offered, selection, warm,
};
use crate::{
    auth,
    body::AnswerBody,
    config::Action,
    object,
    operate::{self, Everywhere},
    process,
};
use forebay_core::{Error, ObjectName, Result};
use forebay_engine::Freshness;
use forebay_origin::{OperationStats, OriginStats};
use forebay_protocol::{
    cache::{CacheAction, ChangeReport, FailedObject, FreshUntil, Pinned, PinnedObject, Stat},
    energy::{AFTER_PARAMETER, SECONDS_PARAMETER, Samples, Sensor},
    node::{
        Batches, CacheDir, CacheStatus, EngineStatus, Listen, Memory, NodeInfo, NodeState,
        Operation, OriginConfigured, OriginStatus, Reads, Status,
    },
};
use forebay_store::{DirStats, StoreStats};
use http::{Method, Response, StatusCode};
use std::sync::atomic::Ordering::Relaxed;

/// How many seconds back samples of sensors go if the caller does not say, and at the most; and how
/// many figures come at once.
const SECONDS_DEFAULT: u64 = 10;
const SECONDS_MAX: u64 = 600;
const FIGURES_MAX: usize = 10_000;
/// How many failed names one pin, unpin or evict report lists.
const REPORT_ERRORS_MAX: usize = 100;

pub async fn node(call: &Call, what: &str, rest: &str) -> Result<Response<AnswerBody>> {
    match (&call.note.method, what) {
        (&Method::GET, "info") => Ok(json_response(StatusCode::OK, &info(call))),
        (&Method::GET, "status") if !call.policy.allows_everywhere(Action::Admin) => {
            Err(auth::refusal(
                "only keys that have admin on every bucket may read the node's status".into(),
            ))
        }
        (&Method::GET, "status") => Ok(json_response(StatusCode::OK, &status(call))),
        (&Method::GET, "cluster") if rest == "map" => members::map(call),
        (&Method::GET | &Method::POST, "cluster") => members::members(call).await,
        (&Method::GET, "jobs") => jobs(call, rest),
        (&Method::GET, "energy") => energy(call),
        (&Method::GET, "stat") => stat(call, rest).await,
        (&Method::GET, "pinned") => pinned(call).await,
        (&Method::POST, "warm") => warm::warm(call).await,
        (&Method::POST, what) => match CacheAction::parse(what) {
            Some(action) => change(call, action).await,
            None => Err(not_offered(call)),
        },
        _ => Err(not_offered(call)),
    }
}

/// The jobs of the caller's key; of all, and what was read of each dataset, for those who may
/// administer the node.
fn jobs(call: &Call, name: &str) -> Result<Response<AnswerBody>> {
    let app = &call.app;
    let caller = call.note.learned().caller.clone();
    let everyone = call.policy.allows_everywhere(Action::Admin);
    let mut told = app
        .jobs
        .told((!everyone).then_some(&caller), app.energy.as_ref());
    if name.is_empty() {
        if everyone {
            told.datasets = app.rows.costs();
        }
        return Ok(json_response(StatusCode::OK, &told));
    }
    // The caller's own, if several have one of this name.
    let mut named: Vec<_> = told.jobs.into_iter().filter(|j| j.name == name).collect();
    let own = crate::jobs::account(&caller);
    named.sort_by_key(|job| job.caller != *own);
    let job = named.first().ok_or_else(|| {
        Error::not_found(format!(
            "the job {:?} is not known here",
            forebay_core::name::shorten(name)
        ))
        .hint("it read nothing here since the node started; GET /v1/forebay/jobs lists those that did")
    })?;
    Ok(json_response(StatusCode::OK, job))
}

/// What the sensors measured of late. Each caller may see it: a job's report has it too, in sums.
fn energy(call: &Call) -> Result<Response<AnswerBody>> {
    let number = |name: &'static str, most: u64| match call.query(name).map(str::parse::<u64>) {
        None => Ok(None),
        Some(Ok(n)) if n <= most => Ok(Some(n)),
        Some(_) => Err(
            Error::invalid(format!("{name} is not a whole number from 0 to {most}"))
                .hint("give after_ns= the moment of the last sample that you have, or seconds="),
        ),
    };
    let seconds = number(SECONDS_PARAMETER, SECONDS_MAX)?.unwrap_or(SECONDS_DEFAULT);
    let after_ns = number(AFTER_PARAMETER, u64::MAX)?
        .unwrap_or_else(|| forebay_energy::now().saturating_sub(seconds * 1_000_000_000));
    let app = &call.app;
    let (joined, node) = (app.joined.as_ref(), app.node_id.clone());
    let nodes = joined.map_or(1, |j| j.cluster.map().members.len() as u64);
    let told = match &app.energy {
        None => Samples {
            node,
            nodes,
            absent: vec!["energy.sample is false".to_owned()],
            ..Samples::default()
        },
        Some(monitor) => {
            let recent = monitor.recent(after_ns, FIGURES_MAX);
            let sensors = recent.sensors.into_iter().map(|s| Sensor {
                source: s.source,
                domain: s.domain,
                estimate: s.estimate,
            });
            let samples = recent.samples.into_iter().map(|s| (s.at_ns, s.joules));
            Samples {
                node,
                nodes,
                now_ns: forebay_energy::now(),
                sensors: sensors.collect(),
                samples: samples.collect(),
                more: recent.more,
                absent: recent.notes,
            }
        }
    };
    Ok(json_response(StatusCode::OK, &told))
}

fn info(call: &Call) -> NodeInfo {
    let app = &call.app;
    NodeInfo {
        version: crate::VERSION.to_owned(),
        node_id: app.node_id.clone(),
        unix_socket: app.unix_path.as_ref().map(|p| p.display().to_string()),
        host_id: process::host_id(),
        admin: app
            .admin_addr
            .map(|a| format!("{}://{a}", app.admin_scheme())),
        s3: app.s3_addr.map(|a| format!("{}://{a}", app.scheme())),
        local: is_local(call),
    }
}

fn status(call: &Call) -> Status {
    let app = &call.app;
    let s = app.engine.stats().snapshot();
    let b = app.batcher.stats().snapshot();
    let budget = app.engine.budget();
    let config = app.config();
    let configured = config.origins.iter().map(|o| OriginConfigured {
        bucket: o.bucket().ok().flatten().unwrap_or_else(|| "*".into()),
        url: o.config.url.clone(),
        endpoint: o.config.endpoint.clone(),
    });
    Status {
        version: crate::VERSION.to_owned(),
        node_id: app.node_id.clone(),
        state: if app.ready.load(Relaxed) {
            NodeState::Ready
        } else {
            NodeState::Stopping
        },
        uptime_seconds: app.began.elapsed().as_secs(),
        listen: Listen {
            s3: app.s3_addr.map(|a| a.to_string()),
            admin: app.admin_addr.map(|a| a.to_string()),
            unix: app.unix_path.as_ref().map(|p| p.display().to_string()),
        },
        origins: configured.collect(),
        origin_stats: app.origins.stats().into_iter().map(origin).collect(),
        cache: app.engine.cache_stats().map(cache).unwrap_or_default(),
        reads: Reads {
            total: s.reads_hit
                + s.reads_miss
                + s.reads_revalidated
                + s.reads_stale
                + s.reads_bypass,
            hit: s.reads_hit,
            miss: s.reads_miss,
            revalidated: s.reads_revalidated,
            stale: s.reads_stale,
            bypass: s.reads_bypass,
            failed: s.reads_failed,
            bytes_from_cache: s.bytes_from_cache,
            bytes_from_origin: s.bytes_from_origin,
        },
        engine: EngineStatus {
            fills: s.fills,
            fills_failed: s.fills_failed,
            fills_joined: s.fills_joined,
            fills_in_flight: app.engine.fills_in_flight() as u64,
            revalidations: s.revalidations,
            revalidations_changed: s.revalidations_changed,
            version_changes: s.version_changes,
            store_writes_failed: s.store_writes_failed,
            indexes_built: s.indexes_built,
            indexes_built_in_passing: s.indexes_built_in_passing,
            indexes_loaded: s.indexes_loaded,
            archives_unpacked: s.archives_unpacked,
            writes: s.writes,
            bytes_written: s.bytes_written,
            deletes: s.deletes,
        },
        batches: Batches {
            completed: b.batches,
            in_flight: b.in_flight,
            objects: b.objects,
            members: b.members,
            errors_soft: b.errors_soft,
            errors_hard: b.errors_hard,
            refused: b.refused,
            cut: b.cut,
            bytes_sent: b.bytes_sent,
        },
        memory: Memory {
            budget_bytes: budget.total_bytes(),
            used_bytes: budget.used_bytes(),
            resident_bytes: process::resident_bytes(),
        },
        requests_in_flight: app.metrics.in_flight.load(Relaxed).max(0) as u64,
    }
}

pub fn cache_dir(d: DirStats) -> CacheDir {
    CacheDir {
        path: d.path.display().to_string(),
        state: d.state.as_str().to_owned(),
        capacity_bytes: d.capacity_bytes,
        used_bytes: d.used_bytes,
        live_bytes: d.live_bytes,
        records: d.records,
        evicted_records: d.evicted_records,
        evicted_bytes: d.evicted_bytes,
        checksum_failures: d.checksum_failures,
        read_failures: d.read_failures,
        write_failures: d.write_failures,
    }
}

fn cache(store: StoreStats) -> CacheStatus {
    CacheStatus {
        entries: store.entries,
        index_bytes: store.index_bytes,
        pins: store.pins,
        pinned_bytes: store.pinned_bytes,
        pins_not_held: store.pins_not_held,
        dirs: store.dirs.into_iter().map(cache_dir).collect(),
    }
}

fn origin((name, s): (String, OriginStats)) -> OriginStatus {
    let failures = s.failures();
    let asked = s.operations.iter().filter(|o| o.requests > 0);
    let operation = |o: &OperationStats| Operation {
        requests: o.requests,
        errors: o.errors,
        latency_seconds: o.latency.sum_seconds,
    };
    OriginStatus {
        name,
        operations: asked
            .map(|o| (o.operation.as_str().to_owned(), operation(o)))
            .collect(),
        errors: s
            .errors
            .iter()
            .map(|(kind, n)| (kind.code().to_owned(), *n))
            .collect(),
        failures,
        bytes_in: s.bytes_in,
        bytes_out: s.bytes_out,
        in_flight: s.in_flight,
        waiting: s.waiting,
        retries: s.retries,
        continuations: s.continuations,
    }
}

async fn stat(call: &Call, rest: &str) -> Result<Response<AnswerBody>> {
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    call.note.set_name(bucket, key);
    call.permit(Action::Read, bucket, key)?;
    let name = object::name(bucket, key)?;
    let engine = &call.app.engine;
    let (head, here) = engine.stat(&name).await?;
    let (meta, validated) = (head.meta, here.validated_at_secs);
    let rule = engine.rule(bucket);
    let fresh_until = match (validated, rule.freshness) {
        (0, _) | (_, Freshness::Always) => None,
        (_, Freshness::Immutable) => Some(FreshUntil::forever()),
        (1, _) => None,
        (at, Freshness::RevalidateAfter(time)) => {
            Some(FreshUntil::At(u64::from(at) + time.as_secs()))
        }
    };
    let stat = Stat {
        bucket: bucket.to_owned(),
        key: key.to_owned(),
        size: meta.size,
        etag: meta.etag.clone(),
        last_modified: Some(object::http_date(meta.last_modified_ms)),
        last_modified_ms: meta.last_modified_ms,
        version: format!("{:016x}", meta.version().0),
        attributes: meta.attributes.clone(),
        cache: head.cache.as_str().to_owned(),
        cached_bytes: here.bytes,
        pinned: here.pinned,
        validated_at: (validated > 1).then_some(u64::from(validated)),
        fresh_until,
    };
    Ok(json_response(StatusCode::OK, &stat))
}

async fn pinned(call: &Call) -> Result<Response<AnswerBody>> {
    if !call.policy.allows_somewhere(Action::Admin) {
        return Err(auth::refusal(
            "only keys that have admin on a bucket, or on a part of one, may list the pins".into(),
        ));
    }
    let names = match Everywhere::of_change(call) {
        Some(everywhere) => everywhere.pinned().await?.into_iter().collect(),
        None => {
            let names = operate::pinned_here(&call.app).await?.into_iter();
            names.map(|(n, copies)| (n, (copies, Vec::new()))).collect()
        }
    };
    let names: Vec<(ObjectName, (u8, Vec<String>))> = names;
    let policy = call.policy.clone();
    // There may be millions.
    let write = move || {
        let allowed = names
            .into_iter()
            .filter(|(n, _)| policy.allows(Action::Admin, n.bucket(), n.key()));
        let pinned = allowed.map(|(n, (copies, nodes))| PinnedObject {
            bucket: n.bucket().to_owned(),
            key: n.key().to_owned(),
            mirror: (copies > 1).then_some(copies),
            nodes,
        });
        let pinned = pinned.collect();
        json_response(StatusCode::OK, &Pinned { pinned })
    };
    let written = tokio::task::spawn_blocking(write).await;
    written.map_err(|e| Error::internal("the list of pins could not be written").caused_by(e))
}

async fn change(call: &Call, action: CacheAction) -> Result<Response<AnswerBody>> {
    let selection::Selected { selection, names } = selection::of(call).await?;
    let everywhere = match selection.mirror {
        None | Some(1) if action == CacheAction::Evict => Everywhere::of(call),
        None | Some(1) => Everywhere::of_change(call),
        Some(_) if action != CacheAction::Pin => {
            return Err(
                Error::invalid("only pins say on how many nodes objects are kept")
                    .hint("leave mirror out"),
            );
        }
        Some(copies) => Some(Everywhere::on(call, copies)?),
    };
    let mirror = selection.mirror.filter(|copies| *copies > 1);
    let mut report = ChangeReport {
        action,
        dry_run: selection.dry_run,
        mirror: mirror.and(everywhere.as_ref()).map(|e| e.copies()),
        ..ChangeReport::default()
    };
    if selection.prefix.is_some() {
        let mut token = None;
        loop {
            let (names, next) = selection::page(&selection, &call.app.engine, token).await?;
            let names = names.into_iter().map(|(name, size)| (name, Some(size)));
            apply(call, everywhere.as_deref(), &mut report, names.collect()).await?;
            token = next;
            if token.is_none() {
                break;
            }
        }
    } else {
        let names = names.into_iter().map(|name| (name, None)).collect();
        apply(call, everywhere.as_deref(), &mut report, names).await?;
    }
    let others = everywhere.filter(|everywhere| everywhere.has_others());
    report.nodes = others.map(|e| e.work()).unwrap_or_default();
    Ok(json_response(StatusCode::OK, &report))
}

/// Applies the report's action to these objects and counts the results.
async fn apply(
    call: &Call,
    everywhere: Option<&Everywhere>,
    report: &mut ChangeReport,
    names: Vec<(ObjectName, Option<u64>)>,
) -> Result<()> {
    let done = match everywhere {
        Some(everywhere) => {
            everywhere
                .change(report.action, names, report.dry_run, true)
                .await
        }
        None => {
            let names = names.into_iter().map(|(name, _)| name).collect();
            operate::change_here(&call.app, report.action, names, report.dry_run).await?
        }
    };
    for (name, outcome) in done {
        report.objects += 1;
        match outcome {
            Ok(0) => report.unchanged += 1,
            Ok(n) => {
                report.changed += 1;
                if report.action == CacheAction::Evict {
                    report.bytes += n;
                }
            }
            Err(e) => {
                report.failed += 1;
                if report.errors.len() < REPORT_ERRORS_MAX {
                    report.errors.push(FailedObject {
                        bucket: name.bucket().to_owned(),
                        key: name.key().to_owned(),
                        message: match everywhere {
                            Some(everywhere) => everywhere.reason(&name, &e),
                            None => e.describe(),
                        },
                    });
                }
            }
        }
    }
    Ok(())
}
