//! `/v1/forebay/`: what the node says of itself, and what operators do with its cache.

use super::{Call, error::json_response, is_local, not_offered, warm};
use crate::{auth, body::AnswerBody, config::Action, object, process};
use forebay_core::{Error, ObjectName, Result, limits};
use forebay_engine::{CacheChange, ListRequest};
use forebay_origin::{OperationStats, OriginStats};
use forebay_protocol::node::{
    Batches, CacheDir, CacheStatus, EngineStatus, Listen, Memory, NodeInfo, NodeState, Operation,
    OriginConfigured, OriginStatus, Reads, Status,
};
use forebay_store::{DirStats, StoreStats};
use http::{Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;

/// Names in one pin, unpin or evict report that are told one by one.
const REPORT_ERRORS_MAX: usize = 100;

pub async fn node(call: &Call, what: &str, rest: &str) -> Result<Response<AnswerBody>> {
    match (&call.note.method, what) {
        (&Method::GET, "info") => Ok(json_response(StatusCode::OK, &info(call))),
        (&Method::GET, "status") if !call.policy.allows_everywhere(Action::Admin) => {
            Err(auth::refusal(
                "the status of the node is for keys that have admin on every bucket".into(),
            ))
        }
        (&Method::GET, "status") => Ok(json_response(StatusCode::OK, &status(call))),
        (&Method::GET, "stat") => stat(call, rest).await,
        (&Method::GET, "pinned") => pinned(call),
        (&Method::POST, "warm") => warm::warm(call).await,
        (&Method::POST, "pin" | "unpin" | "evict") => change(call, what).await,
        _ => Err(not_offered(call)),
    }
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

fn cache(store: StoreStats) -> CacheStatus {
    let dir = |d: DirStats| CacheDir {
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
    };
    CacheStatus {
        entries: store.entries,
        index_bytes: store.index_bytes,
        pins: store.pins,
        pinned_bytes: store.pinned_bytes,
        pins_not_held: store.pins_not_held,
        dirs: store.dirs.into_iter().map(dir).collect(),
    }
}

fn origin((name, s): (String, OriginStats)) -> OriginStatus {
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
        (0, _) | (_, forebay_engine::Freshness::Always) => Value::Null,
        (_, forebay_engine::Freshness::Immutable) => json!("forever"),
        (at, forebay_engine::Freshness::RevalidateAfter(time)) => {
            json!(u64::from(at) + time.as_secs())
        }
    };
    Ok(json_response(
        StatusCode::OK,
        &json!({
            "bucket": bucket, "key": key, "size": meta.size, "etag": meta.etag, "last_modified": object::http_date(meta.last_modified_ms),
            "last_modified_ms": meta.last_modified_ms, "version": format!("{:016x}", meta.version().0), "attributes": meta.attributes,
            "cache": head.cache.as_str(), "cached_bytes": here.bytes, "pinned": here.pinned,
            "validated_at": (validated > 0).then_some(validated), "fresh_until": fresh_until,
        }),
    ))
}

fn pinned(call: &Call) -> Result<Response<AnswerBody>> {
    if !call.policy.allows_somewhere(Action::Admin) {
        return Err(auth::refusal(
            "the pins are for keys that have admin on something".into(),
        ));
    }
    let mut names = call.app.engine.pinned()?;
    names.retain(|n| call.policy.allows(Action::Admin, n.bucket(), n.key()));
    let names: Vec<Value> = names
        .iter()
        .map(|n| json!({"bucket": n.bucket(), "key": n.key()}))
        .collect();
    Ok(json_response(StatusCode::OK, &json!({"pinned": names})))
}

/// Which objects a request means: a prefix of a bucket, or a list of keys.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Selection {
    pub bucket: String,
    pub prefix: Option<String>,
    pub keys: Option<Vec<String>>,
    /// `BUCKET/KEY`, or `KEY` where `bucket` is given; one on each line.
    pub manifest: Option<String>,
    pub dry_run: bool,
    /// Objects at the same time; the node's own limit is the most.
    pub concurrency: Option<usize>,
}

impl Selection {
    /// From a JSON body. A body of another type is a manifest; the rest then comes from the query.
    pub async fn of(call: &Call) -> Result<Self> {
        let body = call.read_body(super::CONTROL_BODY_MAX_BYTES).await?;
        let is_json = call
            .headers
            .get(http::header::CONTENT_TYPE)
            .is_none_or(|v| v.as_bytes().starts_with(b"application/json"));
        let mut selection = if is_json && !body.is_empty() {
            serde_json::from_slice(&body).map_err(|e| {
                Error::invalid(format!("the body of the request: {e}"))
                    .hint("{\"bucket\", \"prefix\" or \"keys\" or \"manifest\"}")
            })?
        } else {
            let manifest = std::str::from_utf8(&body)
                .map_err(|_| Error::invalid("the manifest is not UTF-8"))?;
            Selection {
                manifest: (!manifest.is_empty()).then(|| manifest.to_owned()),
                ..Selection::default()
            }
        };
        let text = |name: &str| {
            call.query(name)
                .filter(|v| !v.is_empty())
                .map(str::to_owned)
        };
        selection.bucket = text("bucket").unwrap_or(selection.bucket);
        // `prefix=` alone is the whole bucket.
        selection.prefix = call.query("prefix").map(str::to_owned).or(selection.prefix);
        selection.dry_run |= call
            .query("dry_run")
            .is_some_and(|v| matches!(v, "" | "1" | "true"));
        if let Some(text) = text("concurrency") {
            selection.concurrency = Some(
                text.parse()
                    .map_err(|_| Error::invalid("concurrency is not a number"))?,
            );
        }
        let named = selection.keys.is_some() || selection.manifest.is_some();
        if named && selection.prefix.is_some() {
            return Err(
                Error::invalid("both a prefix and a list of names").hint("give one of them")
            );
        }
        if !named && selection.prefix.is_none() {
            return Err(Error::invalid("neither a prefix nor names")
                .hint("\"prefix\": \"\" is the whole bucket"));
        }
        if selection.prefix.is_some() || selection.keys.is_some() {
            forebay_core::name::validate_bucket(&selection.bucket)?;
        }
        call.note.set_name(
            &selection.bucket,
            selection.prefix.as_deref().unwrap_or_default(),
        );
        selection.permit(call)?;
        Ok(selection)
    }

    /// All of it or nothing: what is done to the cache needs `admin`.
    fn permit(&self, call: &Call) -> Result<()> {
        match &self.prefix {
            Some(prefix) => call.permit(Action::Admin, &self.bucket, prefix),
            None if call.policy.is_full() => Ok(()),
            None => self
                .names()?
                .iter()
                .try_for_each(|n| call.permit(Action::Admin, n.bucket(), n.key())),
        }
    }

    /// The names of a list or manifest.
    pub fn names(&self) -> Result<Vec<ObjectName>> {
        let mut names = Vec::new();
        for (i, key) in self.keys.iter().flatten().enumerate() {
            names.push(
                object::name(&self.bucket, key).map_err(|e| e.context(format!("keys[{i}]")))?,
            );
        }
        for (i, line) in self.manifest.iter().flat_map(|m| m.lines()).enumerate() {
            let line = line.trim_end_matches('\r');
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let line = line.strip_prefix("s3://").unwrap_or(line);
            let name = if self.bucket.is_empty() {
                let (bucket, key) = line.split_once('/').ok_or_else(|| {
                    Error::invalid(format!(
                        "line {} of the manifest: {:?} names no bucket",
                        i + 1,
                        forebay_core::name::shorten(line)
                    ))
                    .hint("BUCKET/KEY, or give the bucket in the request")
                })?;
                object::name(bucket, key)
            } else {
                object::name(&self.bucket, line)
            };
            names.push(name.map_err(|e| e.context(format!("line {} of the manifest", i + 1)))?);
        }
        Ok(names)
    }

    /// One page of a prefix, and the token of the next.
    pub async fn page(
        &self,
        call_engine: &forebay_engine::Engine,
        token: Option<String>,
    ) -> Result<(Vec<(ObjectName, u64)>, Option<String>)> {
        let request = ListRequest {
            prefix: self.prefix.clone().unwrap_or_default(),
            token,
            max_keys: limits::LIST_PAGE_MAX_KEYS,
            ..ListRequest::default()
        };
        let page = call_engine.list(&self.bucket, request).await?;
        // Keys that are no names here (`a//b`) cannot be read through this node either.
        let names = page
            .entries
            .iter()
            .filter_map(|e| {
                Some((
                    ObjectName::new(self.bucket.as_str(), e.key.as_str()).ok()?,
                    e.size,
                ))
            })
            .collect();
        Ok((names, page.next_token))
    }
}

async fn change(call: &Call, what: &str) -> Result<Response<AnswerBody>> {
    let change = match what {
        "pin" => CacheChange::Pin,
        "unpin" => CacheChange::Unpin,
        _ => CacheChange::Evict,
    };
    let selection = Selection::of(call).await?;
    let mut report = Report::default();
    if selection.prefix.is_some() {
        let mut token = None;
        loop {
            let (names, next) = selection.page(&call.app.engine, token).await?;
            let names = names.into_iter().map(|n| n.0).collect();
            report.add(call, change, names, selection.dry_run).await?;
            token = next;
            if token.is_none() {
                break;
            }
        }
    } else {
        let names = selection.names()?;
        report.add(call, change, names, selection.dry_run).await?;
    }
    Ok(json_response(
        StatusCode::OK,
        &json!({
            "action": what, "dry_run": selection.dry_run, "objects": report.objects, "changed": report.changed, "unchanged": report.unchanged,
            "failed": report.failed, "bytes": report.bytes, "errors": report.errors,
        }),
    ))
}

#[derive(Default)]
struct Report {
    objects: u64,
    changed: u64,
    unchanged: u64,
    failed: u64,
    bytes: u64,
    errors: Vec<Value>,
}

impl Report {
    async fn add(
        &mut self,
        call: &Call,
        change: CacheChange,
        names: Vec<ObjectName>,
        dry_run: bool,
    ) -> Result<()> {
        let engine = &call.app.engine;
        for (name, outcome) in engine.change_cache(change, names, dry_run).await? {
            self.objects += 1;
            match outcome {
                Ok(0) => self.unchanged += 1,
                Ok(n) => {
                    self.changed += 1;
                    if change == CacheChange::Evict {
                        self.bytes += n;
                    }
                }
                Err(e) => {
                    self.failed += 1;
                    if self.errors.len() < REPORT_ERRORS_MAX {
                        let (bucket, key) = (name.bucket(), name.key());
                        let message = e.describe();
                        let error = json!({"bucket": bucket, "key": key, "message": message});
                        self.errors.push(error);
                    }
                }
            }
        }
        Ok(())
    }
}
