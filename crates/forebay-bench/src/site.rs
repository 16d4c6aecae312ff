//! Where a benchmark runs: its own node over a directory of objects that it has written, or a node
//! that is already running.

use crate::{
    child::{Nginx, Node, NodeOptions, Writer},
    data::{self, Dataset},
    load::{self, Load},
    request::{Kind, Maker, Request},
    usage::Process,
    wire::Address,
};
use forebay_core::{Error, Result};
use std::{path::PathBuf, time::Duration};
use tempfile::TempDir;

/// Clients and entries of the requests that warm a node up.
const WARM_CLIENTS: usize = 4;
const WARM_BATCH: usize = 64;
const WARM_TIMEOUT: Duration = Duration::from_secs(600);
/// The buffer for reading the warm-up's answers.
const WARM_BUFFER_BYTES: usize = 256 << 10;
/// What the plain writer writes at a time: as much as one of the node's own frames.
const WRITE_BYTES: usize = 512 << 10;
/// More than the CPU's caches hold.
const UNCACHED_BYTES: usize = 256 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Transport {
    Tcp,
    Unix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Objects,
    Members,
}

/// The node under test.
pub struct Asked {
    pub tcp: Option<Address>,
    pub unix: Option<Address>,
    /// Its process, if it is on this machine and known.
    pub process: Option<Process>,
    pub token: Option<String>,
    /// Its admin listener, if it is known.
    pub admin: Option<Address>,
}

impl Asked {
    /// A node of our own.
    pub fn of(node: &Node) -> Self {
        Asked {
            tcp: Some(node.tcp.clone()),
            unix: Some(node.unix.clone()),
            process: Some(node.running.process()),
            token: None,
            admin: node.admin.clone(),
        }
    }

    pub fn at(&self, transport: Transport) -> Result<&Address> {
        match transport {
            Transport::Tcp => self.tcp.as_ref().ok_or_else(|| {
                Error::invalid("no TCP address of the node is known").hint("--url http://HOST:PORT")
            }),
            Transport::Unix => self.unix.as_ref().ok_or_else(|| {
                Error::invalid("no Unix socket of the node is known").hint("--url unix:PATH")
            }),
        }
    }

    /// The Unix socket, if known; else the TCP address.
    pub fn any(&self) -> Result<&Address> {
        let known = self.unix.as_ref().or(self.tcp.as_ref());
        known.ok_or_else(|| Error::invalid("no address of the node is known"))
    }

    pub fn host(&self) -> String {
        match &self.tcp {
            Some(Address::Tcp(at)) => at.to_string(),
            _ => "localhost".to_owned(),
        }
    }

    /// How long its batches have been paused in total because the machine was busy
    /// (`batch.throttle_ready_per_core`).
    pub fn paused(&self) -> Result<Option<Duration>> {
        let Some(admin) = &self.admin else {
            return Ok(None);
        };
        let page = crate::wire::fetch(admin, "/metrics")?;
        let page = forebay_protocol::metrics::Page::parse(&String::from_utf8_lossy(&page));
        Ok(page
            .sum("forebay_getbatch_throttle_seconds_total", &[])
            .map(Duration::from_secs_f64))
    }

    /// Reads everything once and compares every byte with what was written, so that nothing is cold
    /// afterwards.
    pub fn warm(&self, data: &Dataset, seed: u64) -> Result<()> {
        let maker = Maker {
            data,
            host: self.host(),
            token: self.token.clone(),
            sign: None,
        };
        let requests = maker.each_once(Kind::Batch, WARM_BATCH, seed);
        let at = self.any()?;
        let outcome = load::run(&Load {
            at,
            kind: Kind::Batch,
            data,
            requests: &requests,
            clients: WARM_CLIENTS,
            buffer_bytes: WARM_BUFFER_BYTES,
            ramp: Duration::ZERO,
            window: WARM_TIMEOUT,
            verify: true,
            once: true,
            seed,
            server: None,
            by_gets: None,
        })?;
        if outcome.objects != data.entries.len() as u64 {
            return Err(Error::internal(format!(
                "warming up: {} of {} entries after {WARM_TIMEOUT:?}",
                outcome.objects,
                data.entries.len()
            )));
        }
        Ok(())
    }
}

/// How to make a site of our own.
#[derive(Clone, Debug)]
pub struct Plan {
    pub program: PathBuf,
    /// The directory for it; by default the system's for temporary files.
    pub within: Option<PathBuf>,
    pub sets: Vec<String>,
    pub size: u64,
    pub count: u64,
    pub per_shard: u64,
    pub seed: u64,
}

/// Objects, shards, and the node over them, in a directory that is removed with this value.
pub struct Site {
    // In the order in which they must be dropped: processes first, then their directory.
    pub node: Option<Node>,
    nginx: Option<Nginx>,
    writers: Vec<((Transport, bool), Writer)>,
    pub objects: Option<Dataset>,
    pub members: Option<Dataset>,
    caches: u32,
    plan: Plan,
    dir: TempDir,
}

impl Site {
    pub fn new(plan: &Plan, sources: &[Source]) -> Result<Self> {
        let dir = data::scratch(plan.within.as_deref())?;
        let origin = dir.path().join("origin");
        let of = |source| sources.contains(&source);
        let objects = of(Source::Objects)
            .then(|| data::write_objects(&origin, plan.count, plan.size, plan.seed))
            .transpose()?;
        if of(Source::Members) && !of(Source::Objects) {
            std::fs::create_dir_all(&origin).map_err(|e| Error::file("cannot make", &origin, e))?;
        }
        let members = of(Source::Members)
            .then(|| data::write_shards(&origin, plan.count, plan.size, plan.per_shard, plan.seed))
            .transpose()?;
        Ok(Self {
            node: None,
            nginx: None,
            writers: Vec::new(),
            objects,
            members,
            caches: 0,
            plan: plan.clone(),
            dir,
        })
    }

    pub fn origin_dir(&self) -> PathBuf {
        self.dir.path().join("origin")
    }

    pub fn data(&self, source: Source) -> Result<&Dataset> {
        let data = if source == Source::Objects {
            &self.objects
        } else {
            &self.members
        };
        data.as_ref()
            .ok_or_else(|| Error::internal("these entries were not written"))
    }

    /// Restarts the node: over the cache that it had, or an empty one; with its own directory or
    /// another origin; with additional settings.
    pub fn start(
        &mut self,
        empty_cache: bool,
        origin: Option<&str>,
        sets: &[String],
    ) -> Result<Asked> {
        // The previous one must have let go of the cache.
        self.node = None;
        if empty_cache || self.caches == 0 {
            let old = self.cache_dir();
            self.caches += 1;
            let _ = std::fs::remove_dir_all(old);
        }
        let all: u64 = [&self.objects, &self.members]
            .into_iter()
            .flatten()
            .map(|d| d.bytes() + d.entries.len() as u64 * 4096)
            .sum();
        let origin = origin.map_or_else(
            || format!("{}=file://{}", data::BUCKET, self.origin_dir().display()),
            str::to_owned,
        );
        let node = Node::start(&NodeOptions {
            program: self.plan.program.clone(),
            origin: origin.into(),
            cache: self.cache_dir(),
            cache_bytes: 2 * all + (1 << 30),
            sets: self.plan.sets.iter().chain(sets).cloned().collect(),
        })?;
        let asked = Asked::of(&node);
        self.node = Some(node);
        Ok(asked)
    }

    fn cache_dir(&self) -> PathBuf {
        self.dir.path().join(format!("cache-{}", self.caches))
    }

    /// The plain writer for this kind of socket: with one buffer, or with more than the CPU's
    /// caches hold.
    pub fn writer(&mut self, transport: Transport, uncached: bool) -> Result<&Address> {
        let which = (transport, uncached);
        if !self.writers.iter().any(|(w, _)| *w == which) {
            let name = format!("copy-{transport:?}-{uncached}");
            let socket = self.dir.path().join(format!("{name}.sock"));
            let unix = (transport == Transport::Unix).then_some(socket.as_path());
            let span = if uncached {
                UNCACHED_BYTES
            } else {
                WRITE_BYTES
            };
            let log = self.dir.path().join(format!("{name}.log"));
            self.writers.push((
                which,
                Writer::start(&self.plan.program, unix, WRITE_BYTES, span, log)?,
            ));
        }
        let found = self
            .writers
            .iter()
            .find(|(w, _)| *w == which)
            .map(|(_, w)| &w.at);
        found.ok_or_else(|| Error::internal("the plain writer is gone"))
    }

    /// nginx over the same files; `None` if this machine has none.
    pub fn nginx(&mut self) -> Result<Option<(&Address, Process)>> {
        if self.nginx.is_none() {
            let Some(program) = Nginx::program() else {
                return Ok(None);
            };
            self.nginx = Some(Nginx::start(
                &program,
                &self.origin_dir(),
                &self.dir.path().join("nginx"),
            )?);
        }
        Ok(self.nginx.as_ref().map(|n| (&n.at, n.running.process())))
    }
}

/// Requests for a data set, in the form that an [`Asked`] needs.
pub fn requests(
    asked: &Asked,
    data: &Dataset,
    kind: Kind,
    batch: usize,
    once: bool,
    seed: u64,
    sign: Option<&dyn Fn(&str) -> String>,
) -> Vec<Request> {
    let maker = Maker {
        data,
        host: asked.host(),
        token: asked.token.clone(),
        sign,
    };
    if once {
        maker.each_once(kind, batch, seed)
    } else {
        maker.pool(kind, batch, seed)
    }
}

/// GETs of the same objects from a web server over their directory.
pub fn web_requests(data: &Dataset, at: &Address, seed: u64) -> Vec<Request> {
    let requests = Maker {
        data,
        host: at.to_string(),
        token: None,
        sign: None,
    }
    .pool(Kind::Get, 1, seed);
    let below = format!("GET /{}/", data.bucket);
    requests
        .into_iter()
        .map(|r| Request {
            wire: [
                b"GET /",
                r.wire.strip_prefix(below.as_bytes()).unwrap_or(&r.wire),
            ]
            .concat(),
            ..r
        })
        .collect()
}
