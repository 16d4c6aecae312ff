//! What AIStore's clients ask of a cluster. Each node is gateway and target in one; one that is alone
//! is the whole cluster.
//!
//! The views (`what=`) have AIStore's field names and types, as far as its clients and its command
//! line read them. What a node does not have is empty: it has no jobs, no other clusters, no
//! mirrors.

use super::{Call, buckets::properties, error::json_response, not_offered, provider::Provider};
use crate::{body::AnswerBody, config::Action, process};
use forebay_core::{Error, ErrorKind, Result, name::shorten};
use http::{HeaderValue, Method, Response, StatusCode};
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering::Relaxed;

/// AIStore's word for "in no namespace".
const NO_NAMESPACE: &str = "@#";
/// The version of everything that has one in AIStore: none of it changes while a node runs.
const VERSION: &str = "1";
/// "The cluster has started" and "the node has started".
const STARTED: u32 = 1 << 1 | 1 << 2;

/// `GET /v1/daemon?what=…`, and the same for a node by its id under `/v1/reverse/daemon`.
pub async fn daemon(call: &Call) -> Result<Response<AnswerBody>> {
    if call.note.method != Method::GET {
        return Err(not_offered(call));
    }
    let asked = call.headers.get("ais-node-id").map(HeaderValue::as_bytes);
    if asked.is_some_and(|id| id != own_id(call).as_bytes()) {
        return Err(Error::new(
            ErrorKind::NotFound,
            "this node does not have this id, and asks no others about themselves",
        )
        .hint("ask that node at its own address, which what=smap has"));
    }
    let view = match call.query("what").unwrap_or_default() {
        "smap" => cluster_map(call),
        "bmd" => bucket_map(call).await?,
        "config" => {
            json!({"cluster": configuration(call), "daemon": {"daemon_id": own_id(call)}})
        }
        "cluster_config" => configuration(call),
        "snode" => node(call, "target"),
        "node_stats" => statistics(call),
        "node_status" => status(call),
        "sysinfo" => system(),
        "disk" => capacity(call),
        "mountpaths" => json!({"available": [], "waiting_dd": [], "disabled": []}),
        "remote" => no_remote(),
        other => return Err(not_a_view(other)),
    };
    Ok(json_response(StatusCode::OK, &view))
}

/// `GET /v1/cluster?what=…`.
pub async fn cluster(call: &Call) -> Result<Response<AnswerBody>> {
    if call.note.method != Method::GET {
        return Err(not_offered(call));
    }
    let id = &own_id(call);
    let view = match call.query("what").unwrap_or_default() {
        "smap" => cluster_map(call),
        "bmd" => bucket_map(call).await?,
        "cluster_config" | "config" => configuration(call),
        // There are no jobs here, so none is running.
        "status_all" | "running_all" => json!([]),
        "qryxstats" => json!({}),
        "node_stats" => json!({"proxy": statistics(call), "target": {id: statistics(call)}}),
        "sysinfo" => json!({"proxy": {id: system()}, "target": {id: system()}}),
        "mountpaths" => json!({"targets": {}}),
        "backends" => json!(providers(call).await?),
        "remote" => no_remote(),
        other => return Err(not_a_view(other)),
    };
    Ok(json_response(StatusCode::OK, &view))
}

fn not_a_view(what: &str) -> Error {
    Error::unsupported(format!(
        "the view what={:?} is not offered here",
        shorten(what)
    ))
    .hint("use smap, bmd, config, cluster_config, node_status or sysinfo; see also /v1/forebay/status")
}

/// The lists of AIStore's own services (downloads, transforms, sorting), which are empty here.
pub fn no_jobs(call: &Call) -> Result<Response<AnswerBody>> {
    match call.note.method {
        Method::GET => Ok(json_response(StatusCode::OK, &json!([]))),
        _ => Err(not_offered(call)),
    }
}

pub fn health(call: &Call) -> Result<Response<AnswerBody>> {
    if !call.app.ready.load(Relaxed) {
        return Err(Error::new(ErrorKind::ShuttingDown, "the node is stopping"));
    }
    let mut response = json_response(StatusCode::OK, &json!({"status": "ok"}));
    // In nanoseconds.
    let uptime = call.app.began.elapsed().as_nanos().to_string();
    if let Ok(value) = HeaderValue::from_str(&uptime) {
        response
            .headers_mut()
            .insert("ais-cluster-uptime", value.clone());
        response.headers_mut().insert("ais-node-uptime", value);
    }
    Ok(response)
}

/// What this node is called: in a cluster, what the others call it.
fn own_id(call: &Call) -> String {
    match &call.app.joined {
        Some(joined) => format!("{:016x}", joined.cluster.me().node),
        None => call.app.node_id.clone(),
    }
}

/// What the cluster is called.
fn uuid(call: &Call) -> String {
    match &call.app.joined {
        Some(joined) => joined.cluster.me().cluster.clone(),
        None => call.app.node_id.clone(),
    }
}

fn node(call: &Call, kind: &str) -> Value {
    node_at(&own_id(call), &call.base_url(), kind)
}

fn node_at(id: &str, url: &str, kind: &str) -> Value {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let default_port = if url.starts_with("https") {
        "443"
    } else {
        "80"
    };
    let (host, port) = authority
        .rsplit_once(':')
        .unwrap_or((authority, default_port));
    let net = json!({"node_hostname": host, "daemon_port": port, "direct_url": url});
    let digest = (forebay_core::name::hash_name("node", id) >> 64) as u64;
    json!({
        "daemon_id": id,
        "daemon_type": kind,
        "public_net": net,
        "intra_control_net": net,
        "intra_data_net": net,
        "flags": 0,
        "id_digest": digest,
    })
}

/// The nodes whose address clients know; of each, that it is gateway and target.
fn cluster_map(call: &Call) -> Value {
    let own = own_id(call);
    let map = call.app.joined.as_ref().map(|joined| joined.cluster.map());
    let (mut proxies, mut targets) = (Map::new(), Map::new());
    let others = map.iter().flat_map(|map| &map.members);
    let others = others.map(|m| (format!("{:016x}", m.id), m.url.clone()));
    // This node is where the client has reached it.
    let all = others
        .filter(|(id, url)| *id != own && !url.is_empty())
        .chain([(own.clone(), call.base_url())]);
    for (id, url) in all {
        proxies.insert(id.clone(), node_at(&id, &url, "proxy"));
        targets.insert(id.clone(), node_at(&id, &url, "target"));
    }
    json!({
        "pmap": proxies,
        "tmap": targets,
        "proxy_si": node(call, "proxy"),
        "version": map.as_ref().map_or(VERSION.to_owned(), |map| map.epoch.to_string()),
        "uuid": uuid(call),
        "creation_time": call.app.started_secs.to_string(),
    })
}

/// The buckets in which the sender may do something, by provider.
async fn bucket_map(call: &Call) -> Result<Value> {
    let buckets = call.app.engine.buckets().as_ref();
    let mut by_provider: Map<String, Value> = Map::new();
    for bucket in buckets.list().await? {
        let name = bucket.name;
        if !call.policy.knows(&name) {
            continue;
        }
        let provider = Provider::of(buckets, &name).word();
        let namespaces = by_provider
            .entry(provider)
            .or_insert_with(|| json!({NO_NAMESPACE: {}}));
        namespaces[NO_NAMESPACE][&name] = properties(call, &name, Some(provider));
    }
    let providers = Value::Object(by_provider);
    Ok(json!({"providers": providers, "uuid": uuid(call), "version": VERSION}))
}

/// The providers of the buckets that exist here.
async fn providers(call: &Call) -> Result<Vec<&'static str>> {
    let buckets = call.app.engine.buckets().as_ref();
    let mut words: Vec<&str> = buckets
        .list()
        .await?
        .iter()
        .filter(|bucket| call.policy.knows(&bucket.name))
        .map(|bucket| Provider::of(buckets, &bucket.name).word())
        .collect();
    words.sort_unstable();
    words.dedup();
    Ok(words)
}

/// Sections of AIStore's configuration that its command line relies on and that mean nothing here.
const EMPTY_SECTIONS: &[&str] = &[
    "arch",
    "chunks",
    "client",
    "disk",
    "downloader",
    "ec",
    "fshc",
    "get_batch",
    "keepalivetracker",
    "log",
    "lru",
    "lso",
    "periodic",
    "rate_limit",
    "rebalance",
    "space",
    "tcb",
    "tco",
    "transport",
    "write_policy",
];

/// The parts of AIStore's configuration that have a meaning here. This is not the node's own
/// configuration.
fn configuration(call: &Call) -> Value {
    let mut view = json!({
        "uuid": uuid(call),
        "config_version": VERSION,
        "lastupdate_time": "",
        "backend": {},
        "checksum": {"type": "none"},
        "versioning": {"enabled": false},
        "mirror": {"enabled": false, "copies": 1},
        "auth": {"enabled": call.app.access.has_keys()},
        "features": "0",
        "forebay": {"version": crate::VERSION},
        "proxy": {"primary_url": call.base_url(), "original_url": call.base_url(), "discovery_url": ""},
    });
    for section in EMPTY_SECTIONS {
        view[section] = json!({});
    }
    view
}

/// Counters and disk space, for those who may see the status of the node.
fn statistics(call: &Call) -> Value {
    if !call.policy.allows_everywhere(Action::Admin) {
        return json!({"snode": node(call, "target"), "tracker": {}, "capacity": {}});
    }
    let s = call.app.engine.stats().snapshot();
    let b = call.app.batcher.stats().snapshot();
    json!({
        "snode": node(call, "target"),
        "tracker": {
            "getbatch.n": b.batches,
            "getbatch.obj.n": b.objects,
            "getbatch.file.n": b.members,
            "err.soft.getbatch.n": b.errors_soft,
            "err.getbatch.n": b.errors_hard,
            "put.n": s.writes,
            "put.size": s.bytes_written,
            "del.n": s.deletes,
        },
        "capacity": capacity(call),
    })
}

/// The cache's capacity, for those who may see the status of the node.
fn capacity(call: &Call) -> Value {
    if !call.policy.allows_everywhere(Action::Admin) {
        return json!({});
    }
    let dirs = call.app.engine.cache_stats().map(|c| c.dirs);
    let dirs = dirs.unwrap_or_default();
    let used: u64 = dirs.iter().map(|d| d.used_bytes).sum();
    let total: u64 = dirs.iter().map(|d| d.capacity_bytes).sum();
    let percent = (used * 100).checked_div(total).unwrap_or(0);
    json!({
        "mountpaths": {},
        "cs_err": "",
        "total_used": used.to_string(),
        "total_avail": total.saturating_sub(used).to_string(),
        "pct_max": percent,
        "pct_avg": percent,
        "pct_min": percent,
    })
}

fn system() -> Value {
    let (used, total) = (process::resident_bytes(), process::memory_total_bytes());
    json!({
        "mem_used": used,
        "mem_avail": total.saturating_sub(used),
        "pct_mem_used": (used * 100).checked_div(total).unwrap_or(0),
        "pct_cpu_used": 0,
        "load_avg": {},
        "cpu_util": 0,
        "fs_used": "0",
        "fs_capacity": "0",
        "pct_fs_used": 0,
    })
}

fn status(call: &Call) -> Value {
    let mut view = statistics(call);
    let url = call.base_url();
    let versions = json!({"uuid": uuid(call), "version": VERSION});
    view["status"] = "online".into();
    view["deployment"] = "forebay".into();
    view["ais_version"] = crate::VERSION.into();
    view["build_time"] = "".into();
    view["k8s_pod_name"] = "".into();
    view["sys_info"] = system();
    view["smap_version"] = VERSION.into();
    view["cluster"] = json!({
        "smap": {
            "primary": {"pub_url": url, "control_url": url, "id": own_id(call)},
            "uuid": uuid(call),
            "version": VERSION,
        },
        "bmd": versions,
        "rmd": {"version": VERSION},
        "config": {"version": VERSION},
        "etlmd": {"version": VERSION},
        "flags": STARTED,
    });
    view
}

fn no_remote() -> Value {
    json!({"a": [], "ver": 1})
}
