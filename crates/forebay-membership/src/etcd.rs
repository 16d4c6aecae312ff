//! What lies in etcd about one cluster, over etcd's own HTTP gateway
//! (<https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/>).
//!
//! ```text
//! /forebay/NAME/map           the map, changed by compare-and-swap on its revision
//! /forebay/NAME/before/EPOCH  the maps before it: new nodes learn who owned what, and nodes that
//!                             drain what they had
//! /forebay/NAME/nodes/ID      a node that is there, under its lease
//! /forebay/NAME/ended/ID-BOOT a node whose lease another one has ended, for a while
//! ```
//!
//! A watch only wakes: whoever was woken reads everything again. So nothing is missed if a watch
//! breaks, or etcd has compacted what it would have told.

use async_trait::async_trait;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use forebay_cluster::{HAND_OVER_MAX, Map, Member, MemberState, Run, Term};
use forebay_core::{Error, Result, name::shorten, sync::Mutex, threads};
use forebay_peer::Leases;
use futures::StreamExt;
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::timeout;

/// How long one member of etcd may take for an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// So many maps before the newest are kept.
const BEFORE_MAX: usize = 3;
/// So many older ones are kept besides, for nodes that drain.
const DRAINING_MAX: usize = 3;
/// The longest answer: 4096 members, in the maps and as nodes.
const ANSWER_MAX_BYTES: usize = 32 << 20;
/// etcd's code for a token that it does not know (any more): gRPC's UNAUTHENTICATED.
const UNAUTHENTICATED: i64 = 16;
/// What etcd says where its codes tell too little.
const NO_TOKEN: &str = "user name is empty";
const WRONG_TOKEN: &str = "invalid auth token";
const WRONG_PASSWORD: &str = "authentication failed";
const OLD_TOKEN: &str = "revision of auth store is old";
const NO_USERS: &str = "authentication is not enabled";
const NO_LEASE: &str = "lease not found";

/// How etcd is spoken to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdAccess {
    /// A user of etcd's, and the file with the password.
    pub user: Option<(String, PathBuf)>,
    /// Its CA, in PEM; `None`: those that this machine trusts.
    pub ca: Option<PathBuf>,
}

/// A cluster's place in etcd.
pub struct Etcd {
    http: reqwest::Client,
    endpoints: Vec<String>,
    /// The endpoint that answered last.
    at: AtomicUsize,
    prefix: String,
    user: Option<(String, PathBuf)>,
    token: Mutex<Option<String>>,
}

/// A node that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// New at each start.
    pub boot: u64,
    /// The release that it runs.
    pub version: String,
    /// When it started, in seconds since the Unix epoch.
    pub started_secs: u64,
    /// Counts its leases, from 1; releases that are told of no writes do not say it.
    #[serde(default)]
    pub term: u64,
    /// As it wants to be in the map.
    pub member: Member,
}

/// A map that was the newest, and is not any more.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Before {
    /// When the next one came, in seconds since the Unix epoch.
    pub until_secs: u64,
    /// The map.
    pub map: Map,
}

/// Everything that lies there about the cluster, at one revision.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// etcd's revision.
    pub revision: i64,
    /// Which etcd it is: another one has another id.
    pub etcd: u64,
    /// The map as JSON, and the revision at which it was written.
    pub map: Option<(Vec<u8>, i64)>,
    /// The maps before it, in the order of their epochs; what cannot be parsed is left out.
    pub before: Vec<Before>,
    /// The ids of the nodes that are there.
    pub present: HashSet<u64>,
    /// What they say of themselves; what cannot be parsed is left out.
    pub nodes: Vec<Registration>,
    /// The leases of those that are there, by their ids.
    pub leases: HashMap<u64, i64>,
    /// The terms that nodes have ended, of others.
    pub ended: Vec<Term>,
    /// The revisions at which the marks of these were written.
    pub marks: HashMap<Run, i64>,
}

/// What is left of a term that another node has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Ended {
    node: u64,
    boot: u64,
    term: u64,
    lease: i64,
}

impl Etcd {
    /// The place of the cluster `name` in the etcd with these endpoints.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn new(endpoints: &[String], tls: bool, name: &str, access: &EtcdAccess) -> Result<Self> {
        // The library has no provider of its own; whoever is first wins, and all are the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let scheme = if tls { "https" } else { "http" };
        let mut http = reqwest::Client::builder()
            .no_proxy()
            .http1_only()
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none());
        let bad = |what: String| Error::invalid(format!("etcd: {what}"));
        if let Some(ca) = &access.ca {
            let failed = |e: &dyn std::fmt::Display| {
                bad(format!(
                    "cluster.etcd_ca: {} cannot be used: {e}",
                    ca.display()
                ))
                .hint("it must be a file of PEM certificates")
            };
            let pem = std::fs::read(ca).map_err(|e| failed(&e))?;
            let roots = reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| failed(&e))?;
            http = http.tls_certs_only(roots);
        } else if !tls {
            // A machine without a certificate store can speak plain HTTP.
            http = http.tls_certs_only([]);
        }
        if let Some((_, password)) = &access.user {
            read_password(password)?;
        }
        Ok(Etcd {
            http: http.build().map_err(|e| bad(e.to_string()))?,
            endpoints: endpoints
                .iter()
                .map(|e| format!("{scheme}://{e}"))
                .collect(),
            at: AtomicUsize::new(0),
            prefix: format!("/forebay/{name}/"),
            user: access.user.clone(),
            token: Mutex::default(),
        })
    }

    fn map_key(&self) -> String {
        format!("{}map", self.prefix)
    }

    fn before_key(&self, epoch: u64) -> String {
        // Sorted as numbers are.
        format!("{}before/{epoch:020}", self.prefix)
    }

    fn node_key(&self, node: u64) -> String {
        format!("{}nodes/{node:016x}", self.prefix)
    }

    /// Reads everything, as of one moment.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn read(&self) -> Result<Found> {
        let answer: Range = self.call("/v3/kv/range", self.everything()).await?;
        let mut found = Found {
            revision: answer.header.revision,
            etcd: answer.header.cluster_id,
            ..Found::default()
        };
        let (nodes, before, ended) = (
            format!("{}nodes/", self.prefix),
            format!("{}before/", self.prefix),
            format!("{}ended/", self.prefix),
        );
        for kv in answer.kvs {
            let (key, value) = (decoded(&kv.key)?, decoded(&kv.value)?);
            let parsed = if key == self.map_key().as_bytes() {
                found.map = Some((value, kv.mod_revision));
                Ok(())
            } else if let Some(id) = key.strip_prefix(nodes.as_bytes()) {
                let id = std::str::from_utf8(id).ok();
                let id = id.and_then(|id| u64::from_str_radix(id, 16).ok());
                found.present.extend(id);
                found.leases.extend(id.map(|id| (id, kv.lease)));
                serde_json::from_slice(&value).map(|node| found.nodes.push(node))
            } else if key.starts_with(before.as_bytes()) {
                serde_json::from_slice(&value).map(|map| found.before.push(map))
            } else if key.starts_with(ended.as_bytes()) {
                serde_json::from_slice(&value).map(|e: Ended| {
                    let term = e.term();
                    found.marks.insert(term.run, kv.mod_revision);
                    found.ended.push(term);
                })
            } else {
                Ok(())
            };
            if let Err(e) = parsed {
                tracing::warn!(key = %String::from_utf8_lossy(&key), error = %e,
                    "what lies in etcd cannot be read, and is left alone");
            }
        }
        found.before.sort_by_key(|b| b.map.epoch);
        Ok(found)
    }

    fn ended_key(&self, run: Run) -> String {
        format!("{}ended/{:016x}-{:016x}", self.prefix, run.node, run.boot)
    }

    /// Removes the mark of a term that was ended so long ago that nobody believes in it, if it is
    /// still the one of this revision: a later term of the same run may have been ended since.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn forget_ended(&self, run: Run, revision: i64) -> Result<()> {
        let key = encoded(self.ended_key(run));
        let body = json!({
            "compare": [{"key": key, "target": "MOD", "result": "EQUAL",
                "mod_revision": revision.to_string()}],
            "success": [{"request_delete_range": {"key": key}}],
        });
        let _: Txn = self.call("/v3/kv/txn", body).await?;
        Ok(())
    }

    fn everything(&self) -> Value {
        json!({"key": encoded(&self.prefix), "range_end": encoded(after(&self.prefix))})
    }

    /// Writes the map, if the one that lies there is still that of this revision (0: none), and
    /// keeps the one that it replaces, if that placed otherwise, for nodes that come later. Whether
    /// it was written.
    ///
    /// # Errors
    /// If etcd does not answer: then it may have been written.
    pub async fn put_map(&self, map: &Map, found: &Found, is: Option<&Map>) -> Result<bool> {
        let revision = found.map.as_ref().map_or(0, |(_, revision)| *revision);
        let key = encoded(self.map_key());
        let compare = json!({"key": key, "target": "MOD", "result": "EQUAL",
            "mod_revision": revision.to_string()});
        let mut done = vec![json!({"request_put": {"key": key, "value": encoded(map.json())}})];
        if let Some(is) = is.filter(|is| is.table != map.table) {
            let before = Before {
                until_secs: now_secs(),
                map: is.clone(),
            };
            let value = serde_json::to_vec(&before)
                .map_err(|e| Error::internal(format!("a map as JSON: {e}")))?;
            let key = encoded(self.before_key(is.epoch));
            done.push(json!({"request_put": {"key": key, "value": encoded(value)}}));
            for epochs in forgotten(&found.before, is, map, now_secs()) {
                let end = encoded(self.before_key(epochs.end));
                let key = encoded(self.before_key(epochs.start));
                done.push(json!({"request_delete_range": {"key": key, "range_end": end}}));
            }
        }
        let body = json!({"compare": [compare], "success": done});
        let answer: Txn = self.call("/v3/kv/txn", body).await?;
        Ok(answer.succeeded)
    }

    /// Says that a node is there for as long as its lease lasts.
    ///
    /// # Errors
    /// If etcd does not answer, or does not know the lease.
    pub async fn register(&self, registration: &Registration, lease: i64) -> Result<()> {
        let value = serde_json::to_vec(registration)
            .map_err(|e| Error::internal(format!("a registration as JSON: {e}")))?;
        let _: Value = self
            .call(
                "/v3/kv/put",
                json!({"key": encoded(self.node_key(registration.member.id)),
                    "value": encoded(value), "lease": lease.to_string()}),
            )
            .await?;
        Ok(())
    }

    /// A new lease. It lasts so long after it was last renewed.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn grant(&self, time: Duration) -> Result<i64> {
        let body = json!({"TTL": time.as_secs().to_string()});
        let lease: Lease = self.call("/v3/lease/grant", body).await?;
        Ok(lease.id)
    }

    /// Renews a lease; `false` if it has ended.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn renew(&self, lease: i64) -> Result<bool> {
        let body = json!({"ID": lease.to_string()});
        let answer: Streamed<Lease> = self.call("/v3/lease/keepalive", body).await?;
        Ok(answer.result.ttl > 0)
    }

    /// Ends a lease, and with it the registration.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn revoke(&self, lease: i64) -> Result<()> {
        let body = json!({"ID": lease.to_string()});
        let _: Value = self.call("/v3/lease/revoke", body).await?;
        Ok(())
    }

    /// Returns when something has changed after this revision, or it cannot be known any more
    /// whether it has.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn changed(&self, revision: i64) -> Result<()> {
        let mut create = self.everything();
        create["start_revision"] = (revision + 1).to_string().into();
        let body = json!({"create_request": create});
        let at = self.at.load(Relaxed);
        let token = self.token.lock().clone();
        let sent = self.send(at, "/v3/watch", &body, token.as_deref());
        let answer = match timeout(CALL_TIMEOUT, sent).await {
            Ok(answer) => answer?,
            Err(_) => return Err(self.no_answer(at)),
        };
        if !answer.status().is_success() {
            return Err(Error::origin_unavailable(format!(
                "etcd at {}: a watch was answered with {}",
                self.endpoints[at],
                answer.status()
            )));
        }
        let mut lines = answer.bytes_stream();
        let mut line = Vec::new();
        while let Some(piece) = lines.next().await {
            let piece = piece.map_err(|e| self.failed(at, &e))?;
            line.extend_from_slice(&piece);
            while let Some(end) = line.iter().position(|b| *b == b'\n') {
                let rest = line.split_off(end + 1);
                let said: Value = serde_json::from_slice(&line).unwrap_or_default();
                line = rest;
                // The first line says that the watch was made. All others are reasons to look.
                let is_first = said["result"]["created"] == true
                    && said["result"]["events"].is_null()
                    && said["result"]["canceled"].is_null();
                if !is_first {
                    return Ok(());
                }
            }
            if line.len() > ANSWER_MAX_BYTES {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Asks one endpoint after the other, the one that answered last first.
    async fn call<T: DeserializeOwned>(&self, path: &str, body: Value) -> Result<T> {
        let first = self.at.load(Relaxed);
        let mut last = None;
        for n in 0..self.endpoints.len() {
            let at = (first + n) % self.endpoints.len();
            match self.call_at(at, path, &body).await {
                Ok(answer) => {
                    self.at.store(at, Relaxed);
                    return Ok(answer);
                }
                Err(e) if !e.kind().is_transient() => return Err(e),
                Err(e) => last = Some(e),
            }
        }
        Err(last.unwrap_or_else(|| Error::internal("etcd has no endpoints")))
    }

    async fn call_at<T: DeserializeOwned>(&self, at: usize, path: &str, body: &Value) -> Result<T> {
        let mut token = self.token.lock().clone();
        if token.is_none() && self.user.is_some() {
            token = self.authenticate(at).await?;
        }
        match self.ask(at, path, body, token.as_deref()).await {
            Err(Refused::Unauthenticated) if self.user.is_some() => {
                let token = self.authenticate(at).await?;
                let again = self.ask(at, path, body, token.as_deref()).await;
                again.map_err(|refused| refused.error(&self.endpoints[at]))
            }
            answer => answer.map_err(|refused| refused.error(&self.endpoints[at])),
        }
    }

    async fn authenticate(&self, at: usize) -> Result<Option<String>> {
        let Some((name, password)) = &self.user else {
            return Ok(None);
        };
        // Read again each time: it may have been changed.
        let file = password.clone();
        let text = threads::blocking(move || read_password(&file)).await??;
        let body = json!({"name": name, "password": text});
        let token: Token = self
            .ask(at, "/v3/auth/authenticate", &body, None)
            .await
            .map_err(|refused| {
                let e = refused
                    .error(&self.endpoints[at])
                    .context(format!("etcd's user {name:?}"));
                match e.to_string() {
                    what if what.contains(NO_USERS) => {
                        e.hint("remove cluster.etcd_user, or turn on etcd's users")
                    }
                    what if what.contains(WRONG_PASSWORD) => e.hint(format!(
                        "the password is read from cluster.etcd_password_file, {}: has it that of \
                         this user?",
                        password.display()
                    )),
                    _ => e,
                }
            })?;
        *self.token.lock() = Some(token.token.clone());
        Ok(Some(token.token))
    }

    async fn send(
        &self,
        at: usize,
        path: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<reqwest::Response> {
        let url = format!("{}{path}", self.endpoints[at]);
        let mut request = self.http.post(url).body(body.to_string());
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        request.send().await.map_err(|e| self.failed(at, &e))
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        at: usize,
        path: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<T, Refused> {
        let whole = async {
            let answer = self.send(at, path, body, token).await?;
            let is_well = answer.status().is_success();
            let status = answer.status();
            let mut pieces = answer.bytes_stream();
            let mut text = Vec::new();
            while let Some(piece) = pieces.next().await {
                text.extend_from_slice(&piece.map_err(|e| self.failed(at, &e))?);
                if text.len() > ANSWER_MAX_BYTES {
                    return Err(Error::corrupt(format!(
                        "etcd's answer is longer than {ANSWER_MAX_BYTES} bytes"
                    )));
                }
            }
            Ok((is_well, status, text))
        };
        let (is_well, status, text) = match timeout(CALL_TIMEOUT, whole).await {
            Ok(whole) => whole.map_err(Refused::Other)?,
            Err(_) => return Err(Refused::Other(self.no_answer(at))),
        };
        if is_well {
            return serde_json::from_slice(&text).map_err(|e| {
                Refused::Other(Error::origin_unavailable(format!(
                    "etcd at {} answered what cannot be parsed: {e}",
                    self.endpoints[at]
                )))
            });
        }
        let said: Failed = serde_json::from_slice(&text).unwrap_or_default();
        let says = |what: &str| said.message.contains(what);
        if said.code == UNAUTHENTICATED || says(WRONG_TOKEN) || says(OLD_TOKEN) || says(NO_TOKEN) {
            return Err(Refused::Unauthenticated);
        }
        let what = match said.message.as_str() {
            "" => format!("status {status}"),
            message => shorten(message),
        };
        let e = format!("etcd at {}: {what}", self.endpoints[at]);
        Err(Refused::Other(match status.as_u16() {
            404 => Error::invalid(e).hint("is it etcd 3.4 or newer, with its HTTP gateway on?"),
            401 | 403 => Error::permission_denied(e)
                .hint("give cluster.etcd_user read and write rights to /forebay/"),
            400 => Error::invalid(e),
            _ => Error::origin_unavailable(e),
        }))
    }

    fn failed(&self, at: usize, e: &reqwest::Error) -> Error {
        // The innermost cause says what happened.
        let mut cause: &dyn std::error::Error = e;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Error::origin_unavailable(format!(
            "etcd at {} does not answer: {cause}",
            self.endpoints[at]
        ))
    }

    fn no_answer(&self, at: usize) -> Error {
        Error::timeout(format!(
            "etcd at {} did not answer within {CALL_TIMEOUT:?}",
            self.endpoints[at]
        ))
    }
}

enum Refused {
    Unauthenticated,
    Other(Error),
}

impl Refused {
    fn error(self, endpoint: &str) -> Error {
        match self {
            Refused::Other(e) => e,
            Refused::Unauthenticated => Error::permission_denied(format!(
                "etcd at {endpoint} wants a user and a password, or others"
            ))
            .hint("set cluster.etcd_user and cluster.etcd_password_file"),
        }
    }
}

impl Ended {
    fn term(self) -> Term {
        Term {
            run: Run {
                node: self.node,
                boot: self.boot,
            },
            number: self.term,
            lease: self.lease,
            address: String::new(),
        }
    }
}

#[async_trait]
impl Leases for Etcd {
    async fn end(&self, term: &Term) -> Result<()> {
        let node = encoded(self.node_key(term.run.node));
        let mark = encoded(self.ended_key(term.run));
        let ended = serde_json::to_vec(&Ended {
            node: term.run.node,
            boot: term.run.boot,
            term: term.number,
            lease: term.lease,
        });
        let ended = ended.map_err(|e| Error::internal(format!("a term as JSON: {e}")))?;
        // The mark is there before the key goes: who finds neither finds no belief either.
        let body = json!({
            "compare": [{"key": node, "target": "LEASE", "result": "EQUAL",
                "lease": term.lease.to_string()}],
            "success": [{"request_put": {"key": mark, "value": encoded(ended)}}],
        });
        let answer: Txn = self.call("/v3/kv/txn", body).await?;
        if !answer.succeeded {
            // It is gone already.
            return Ok(());
        }
        match self.revoke(term.lease).await {
            Err(e) if e.to_string().contains(NO_LEASE) => Ok(()),
            revoked => revoked,
        }
    }
}

/// The epochs of maps that are not kept any more when `next` takes the place of `is`. Of each node
/// that drains, the last map in which it did not is kept for as long as it may owe what it had then:
/// it may start again.
fn forgotten(before: &[Before], is: &Map, next: &Map, now_secs: u64) -> Vec<std::ops::Range<u64>> {
    // The oldest of those that stay beside `is`.
    let oldest = before.iter().rev().nth(BEFORE_MAX - 2);
    let Some(oldest) = oldest.filter(|b| b.map.epoch < is.epoch) else {
        return Vec::new();
    };
    let active = |map: &Map, id: u64| {
        let mut members = map.members.iter();
        members.any(|m| m.id == id && m.state == MemberState::Active)
    };
    let drains = next
        .members
        .iter()
        .filter(|m| m.state == MemberState::Draining && !active(is, m.id));
    let owing = drains.filter_map(|m| before.iter().rev().find(|b| active(&b.map, m.id)));
    let owing = owing.filter(|b| now_secs.saturating_sub(b.until_secs) < HAND_OVER_MAX.as_secs());
    let kept: BTreeSet<u64> = owing
        .map(|b| b.map.epoch)
        .filter(|epoch| *epoch < oldest.map.epoch)
        .collect();
    let mut from = 0;
    let mut forgotten = Vec::new();
    for epoch in kept
        .into_iter()
        .take(DRAINING_MAX)
        .chain([oldest.map.epoch])
    {
        if from < epoch {
            forgotten.push(from..epoch);
        }
        from = epoch + 1;
    }
    forgotten
}

/// Seconds since the Unix epoch.
pub fn now_secs() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

fn read_password(file: &PathBuf) -> Result<String> {
    let text = std::fs::read_to_string(file).map_err(|e| {
        Error::invalid(format!(
            "cluster.etcd_password_file: {} cannot be read: {e}",
            file.display()
        ))
    })?;
    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
}

fn decoded(text: &str) -> Result<Vec<u8>> {
    BASE64
        .decode(text)
        .map_err(|e| Error::corrupt(format!("etcd sent what is no base64: {e}")))
}

/// The first key that does not begin with this prefix, whose last byte is '/'.
fn after(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// 64-bit numbers are strings in the gateway's JSON, and zero is left out.
fn number<'d, D: Deserializer<'d>, T: std::str::FromStr>(from: D) -> Result<T, D::Error> {
    let text = <std::borrow::Cow<'d, str>>::deserialize(from)?;
    let wrong = || serde::de::Error::custom(format!("{text:?} is no number"));
    text.parse().map_err(|_| wrong())
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Header {
    #[serde(deserialize_with = "number")]
    cluster_id: u64,
    #[serde(deserialize_with = "number")]
    revision: i64,
}

#[derive(Deserialize)]
struct Range {
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default, deserialize_with = "number")]
    mod_revision: i64,
    #[serde(default, deserialize_with = "number")]
    lease: i64,
}

#[derive(Deserialize)]
struct Txn {
    #[serde(default)]
    succeeded: bool,
}

#[derive(Deserialize)]
struct Lease {
    #[serde(rename = "ID", default, deserialize_with = "number")]
    id: i64,
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    ttl: i64,
}

#[derive(Deserialize)]
struct Streamed<T> {
    result: T,
}

#[derive(Deserialize)]
struct Token {
    token: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Failed {
    message: String,
    code: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_000_000;

    fn map(epoch: u64, draining: &[u64]) -> Map {
        let member = |id: u64| Member {
            id,
            name: String::new(),
            address: String::new(),
            url: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: match draining.contains(&id) {
                true => MemberState::Draining,
                false => MemberState::Active,
            },
        };
        let map = Map::new("test", 7, (1..=4).map(member).collect()).unwrap();
        Map { epoch, ..map }
    }

    fn forgotten_of(before: &[Before], is: &Map, next: &Map) -> Vec<(u64, u64)> {
        let ranges = forgotten(before, is, next, NOW).into_iter();
        ranges.map(|epochs| (epochs.start, epochs.end)).collect()
    }

    #[test]
    fn the_map_in_which_a_node_that_drains_had_its_share_outlasts_three_more() {
        let before = |maps: &[(u64, &[u64])]| -> Vec<Before> {
            let maps = maps.iter().map(|(epoch, draining)| Before {
                until_secs: NOW - 60,
                map: map(*epoch, draining),
            });
            maps.collect()
        };
        let none: &[u64] = &[];
        let all = |draining: &[u64]| {
            forgotten_of(
                &before(&[(3, none), (5, &[1]), (6, &[1])]),
                &map(7, draining),
                &map(8, draining),
            )
        };
        // Three stay: 5, 6 and 7. Of the node 1, also the one before it drained.
        assert_eq!(all(none), [(0, 5)]);
        assert_eq!(all(&[1]), [(0, 3), (4, 5)]);
        // The node 2 has just begun to drain: the map that is replaced tells of it.
        let now = forgotten_of(
            &before(&[(5, none), (6, none)]),
            &map(7, none),
            &map(8, &[2]),
        );
        assert_eq!(now, [(0, 5)]);
        let few = before(&[(6, none)]);
        assert!(forgotten_of(&few, &map(7, none), &map(8, none)).is_empty());
        // After a day nothing is owed.
        let mut late = before(&[(3, none), (5, &[1]), (6, &[1])]);
        late[0].until_secs = NOW - HAND_OVER_MAX.as_secs();
        assert_eq!(forgotten_of(&late, &map(7, &[1]), &map(8, &[1])), [(0, 5)]);
        // Nodes that drain one after the other.
        let one_by_one = before(&[
            (1, none),
            (2, &[1]),
            (3, &[1, 2]),
            (4, &[1, 2]),
            (5, &[1, 2]),
        ]);
        let left = forgotten_of(&one_by_one, &map(6, &[1, 2]), &map(7, &[1, 2]));
        assert_eq!(left, [(0, 1), (3, 4)]);
    }
}
