//! One row of the table: a workload, run several times, each time next to its ceilings, so that a
//! ratio compares measurements taken seconds apart.

use crate::{
    ceiling,
    load::{self, Load, Outcome},
    report::{Figures, Goal, Row},
    request::{Kind, Request},
    site::{Asked, Site, Source, Transport},
};
use forebay_core::{Error, Result, units::format_bytes};
use std::time::{Duration, Instant};

/// Clients run for this share of the window before it begins.
const RAMP_SHARE: f64 = 0.15;
const RAMP_MAX: Duration = Duration::from_millis(500);

/// What is requested, and how.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub kind: Kind,
    pub size: u64,
    /// Entries of one batch; 1 for GETs.
    pub batch: usize,
    pub clients: usize,
    pub transport: Transport,
    pub source: Source,
    pub signed: bool,
    pub cold: bool,
}

impl Workload {
    /// The row's name: everything that makes two rows comparable.
    pub fn name(&self) -> String {
        let size = format_bytes(self.size).replace(".0 ", " ");
        let what = match self.kind {
            Kind::Get => "get".to_owned(),
            Kind::Batch => format!("batch {} ×", self.batch),
        };
        let source = if self.source == Source::Objects {
            "objects"
        } else {
            "members"
        };
        let transport = if self.transport == Transport::Tcp {
            "tcp"
        } else {
            "unix"
        };
        let clients = if self.clients == 1 {
            "1 client".to_owned()
        } else {
            format!("{} clients", self.clients)
        };
        let more = [(self.signed, ", signed"), (self.cold, ", cold")]
            .iter()
            .filter(|(on, _)| *on)
            .map(|(_, t)| *t)
            .collect::<String>();
        format!("{what} {size} {source}, {transport}, {clients}{more}")
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub window: Duration,
    pub repeats: usize,
    pub buffer_bytes: usize,
    pub verify: bool,
    pub seed: u64,
}

impl Timing {
    pub fn ramp(&self) -> Duration {
        self.window.mul_f64(RAMP_SHARE).min(RAMP_MAX)
    }

    /// Ceilings are steady: they need less time.
    fn ceiling_window(&self) -> Duration {
        self.window.mul_f64(0.4)
    }
}

/// What is measured besides the workload. A site of our own has all of it; for a node elsewhere
/// there is only the plain copy.
pub struct Ceilings<'a> {
    pub site: &'a mut Site,
    pub memcpy_bytes_per_s: f64,
    pub nginx: bool,
}

fn load_of<'a>(
    workload: &Workload,
    asked: &'a Asked,
    data: &'a crate::data::Dataset,
    requests: &'a [Request],
    timing: &Timing,
) -> Result<Load<'a>> {
    Ok(Load {
        at: asked.at(workload.transport)?,
        kind: workload.kind,
        data,
        requests,
        clients: workload.clients,
        buffer_bytes: timing.buffer_bytes,
        ramp: timing.ramp(),
        window: timing.window,
        verify: timing.verify,
        once: workload.cold,
        seed: timing.seed,
        server: asked.process,
        by_gets: None,
    })
}

/// Runs a workload and its ceilings.
pub fn row(
    workload: &Workload,
    asked: &Asked,
    data: &crate::data::Dataset,
    requests: &[Request],
    ceilings: &mut Ceilings,
    timing: &Timing,
    goals: Vec<Goal>,
) -> Result<Row> {
    let load = load_of(workload, asked, data, requests, timing)?;
    let mut runs = Vec::with_capacity(timing.repeats);
    for _ in 0..timing.repeats {
        runs.push(once(workload, asked, &load, ceilings, timing)?);
    }
    Ok(Row::of(workload.name(), &runs, goals))
}

/// Runs a load. For batches, also asks the node how long it has paused them.
pub fn observed(load: &Load, batch: usize, asked: &Asked) -> Result<Figures> {
    let (began, before) = (Instant::now(), asked.paused()?);
    let mut figures = figures(&load::run(load)?, batch)?;
    let elapsed = began.elapsed();
    if let (Some(before), Some(after), Kind::Batch, None) =
        (before, asked.paused()?, load.kind, load.by_gets)
    {
        let share = (after.saturating_sub(before)).as_secs_f64()
            / elapsed.as_secs_f64()
            / load.clients as f64;
        figures.insert("paused_share".into(), share);
    }
    Ok(figures)
}

fn once(
    workload: &Workload,
    asked: &Asked,
    load: &Load,
    ceilings: &mut Ceilings,
    timing: &Timing,
) -> Result<Figures> {
    let mut figures = observed(load, workload.batch, asked)?;
    let bytes = figures["bytes_per_s"];
    for (name, uncached) in [("copy", false), ("uncached_copy", true)] {
        let writer = ceilings.site.writer(workload.transport, uncached)?;
        let copy = ceiling::copy(
            writer,
            workload.clients,
            timing.buffer_bytes,
            timing.ramp(),
            timing.ceiling_window(),
        )?;
        figures.insert(format!("{name}_bytes_per_s"), copy);
        figures.insert(format!("of_{name}"), bytes / copy);
    }
    figures.insert("memcpy_bytes_per_s".into(), ceilings.memcpy_bytes_per_s);
    figures.insert("of_memcpy".into(), bytes / ceilings.memcpy_bytes_per_s);
    // nginx has no Unix socket here, no members and no batches.
    if ceilings.nginx
        && workload.kind == Kind::Get
        && workload.source == Source::Objects
        && workload.transport == Transport::Tcp
    {
        let Some((at, process)) = ceilings.site.nginx()? else {
            return Ok(figures);
        };
        let web = crate::site::web_requests(load.data, at, timing.seed);
        let web = Load {
            at,
            requests: &web,
            server: Some(process),
            ..*load
        };
        // A first pass opens the files.
        load::run(&Load {
            once: true,
            ramp: Duration::ZERO,
            ..web
        })?;
        let theirs = self::figures(&load::run(&web)?, 1)?;
        figures.insert(
            "of_nginx".into(),
            figures["objects_per_s"] / theirs["objects_per_s"],
        );
        figures.insert("nginx_objects_per_s".into(), theirs["objects_per_s"]);
        if let Some(cpu) = theirs.get("server_cpu_us_per_object") {
            figures.insert("nginx_cpu_us_per_object".into(), *cpu);
        }
    }
    Ok(figures)
}

/// An outcome as figures.
pub fn figures(outcome: &Outcome, batch: usize) -> Result<Figures> {
    let seconds = outcome.elapsed.as_secs_f64();
    if outcome.objects == 0 || seconds <= 0.0 {
        return Err(
            Error::invalid("no object was received in the time that was measured")
                .hint("more --seconds, or fewer or smaller objects"),
        );
    }
    let objects = outcome.objects as f64;
    let per_object = |t: Duration| t.as_secs_f64() * 1e6 / objects;
    let mut figures = Figures::from([
        ("objects_per_s".into(), objects / seconds),
        ("bytes_per_s".into(), outcome.bytes as f64 / seconds),
        (
            "client_cpu_us_per_object".into(),
            per_object(outcome.client_cpu),
        ),
    ]);
    for (name, share) in [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)] {
        if let Some(ns) = outcome.requests.quantile(share) {
            let us = ns as f64 / 1000.0;
            if batch > 1 {
                figures.insert(format!("batch_{name}_us"), us);
            }
            // For a batch: the effective time of one object, its share of the batch's.
            figures.insert(format!("object_{name}_us"), us / batch as f64);
        }
    }
    if let Some(cpu) = outcome.server_cpu {
        figures.insert("server_cpu_us_per_object".into(), per_object(cpu));
    }
    for (name, bytes) in [
        ("server_peak_bytes", outcome.server_peak_bytes),
        ("client_peak_bytes", outcome.client_peak_bytes),
    ] {
        if let Some(bytes) = bytes {
            figures.insert(name.into(), bytes as f64);
        }
    }
    Ok(figures)
}

/// Runs a workload on an empty cache, each entry once: with a new cache for each repetition, and no
/// ceiling except the origin's disk.
pub fn cold_row(
    workload: &Workload,
    mut asked: Asked,
    data: &crate::data::Dataset,
    requests: &[Request],
    site: &mut Site,
    timing: &Timing,
    goals: Vec<Goal>,
) -> Result<Row> {
    let mut runs = Vec::with_capacity(timing.repeats);
    for repetition in 0..timing.repeats {
        if repetition > 0 {
            asked = site.start(true, None, &[])?;
        }
        let load = Load {
            ramp: Duration::ZERO,
            once: true,
            ..load_of(workload, &asked, data, requests, timing)?
        };
        runs.push(figures(&load::run(&load)?, workload.batch)?);
    }
    Ok(Row::of(workload.name(), &runs, goals))
}
