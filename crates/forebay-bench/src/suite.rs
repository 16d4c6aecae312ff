//! The matrix for the project's targets, with each target next to its figure.
//!
//! For each size there is one site: objects and shards with the same contents, one node with both
//! warm. Then GetBatch over both sockets from both sources, and plain GETs next to nginx, unsigned
//! and signed.

use crate::{
    ceiling, interrupt,
    measure::{self, Ceilings, Timing, Workload},
    report::{Goal, Row, Stat},
    request::Kind,
    sign::{self, Signer},
    site::{self, Asked, Plan, Site, Source, Transport},
    wire,
};
use forebay_core::{Error, Result, units::format_bytes};

/// Object sizes, and how many objects: in total less than the page cache of a small machine holds.
pub const SIZES: [(u64, u64); 3] = [(10 << 10, 20_000), (100 << 10, 3_000), (1 << 20, 400)];
/// No plain GETs at this size: the sizes around it show overhead and bandwidth.
const NO_GETS_OF: u64 = 100 << 10;
const BATCH: usize = 128;
const CLIENTS: usize = 8;

/// What GetBatch of whole objects should reach, by size and transport.
fn batch_goals(size: u64, transport: Transport) -> Vec<Goal> {
    let copy = |share| Goal::at_least("of_copy", share);
    match (size, transport) {
        (10_240, Transport::Tcp) => vec![Goal::at_least("objects_per_s", 100_000.0), copy(0.5)],
        (10_240, Transport::Unix) => vec![Goal::at_least("objects_per_s", 200_000.0)],
        (102_400, Transport::Tcp) => vec![copy(0.75)],
        (1_048_576, Transport::Tcp) => vec![copy(0.85)],
        _ => vec![],
    }
}

fn get_goals(size: u64) -> Vec<Goal> {
    match size {
        10_240 => vec![Goal::at_least("of_nginx", 0.6)],
        1_048_576 => vec![Goal::at_least("of_nginx", 0.8)],
        _ => vec![],
    }
}

/// Runs the suite. `say` is told what comes next; `plan` is used with the sizes of the matrix.
pub fn run(
    plan: &Plan,
    timing: &Timing,
    sizes: &[(u64, u64)],
    nginx: bool,
    mut say: impl FnMut(&str),
) -> Result<Vec<Row>> {
    let memcpy_bytes_per_s = ceiling::memcpy();
    let mut rows = Vec::new();
    for &(size, count) in sizes {
        say(&format!(
            "{}: writing {count} objects, and as many members of shards",
            format_bytes(size)
        ));
        let per_shard = crate::data::members_per_shard(size);
        let mut site = Site::new(
            &Plan {
                size,
                count,
                per_shard,
                ..plan.clone()
            },
            &[Source::Objects, Source::Members],
        )?;
        let asked = site.start(true, None, &[])?;
        say(&format!(
            "{}: warming up, every byte compared",
            format_bytes(size)
        ));
        for source in [Source::Objects, Source::Members] {
            asked.warm(site.data(source)?, timing.seed)?;
            interrupt::check()?;
        }
        let mut bench = Bench {
            site: &mut site,
            timing,
            memcpy_bytes_per_s,
            nginx,
            say: &mut say,
        };
        for transport in [Transport::Tcp, Transport::Unix] {
            let batch = |source| Workload {
                kind: Kind::Batch,
                size,
                batch: BATCH,
                clients: CLIENTS,
                transport,
                source,
                signed: false,
                cold: false,
            };
            let objects =
                bench.row(&asked, batch(Source::Objects), batch_goals(size, transport))?;
            let mut members = bench.row(
                &asked,
                batch(Source::Members),
                vec![Goal::at_least("of_objects", 0.8)],
            )?;
            share_of(&mut members, &objects, "of_objects");
            rows.extend([objects, members]);
        }
        if size == NO_GETS_OF {
            continue;
        }
        let get = Workload {
            kind: Kind::Get,
            size,
            batch: 1,
            clients: CLIENTS,
            transport: Transport::Tcp,
            source: Source::Objects,
            signed: false,
            cold: false,
        };
        let unsigned = bench.row(&asked, get, get_goals(size))?;
        // The same cache, behind a node that requires signatures.
        let keys = format!(
            "auth.keys=[{{access_key = \"{}\", secret_key = \"{}\"}}]",
            sign::ACCESS_KEY,
            sign::SECRET_KEY
        );
        let asked = bench.site.start(false, None, &[keys])?;
        // A signature that nobody checks would cost nothing.
        let path = format!(
            "/{}/{}",
            crate::data::BUCKET,
            bench.site.data(Source::Objects)?.entries[0].object
        );
        let (status, _) = wire::ask(asked.at(Transport::Tcp)?, &path)?;
        if status != 403 {
            return Err(Error::internal(format!(
                "a node that asks for signatures answered a request without one with {status}"
            )));
        }
        let mut signed = bench.row(
            &asked,
            Workload {
                signed: true,
                ..get
            },
            vec![],
        )?;
        share_of(&mut signed, &unsigned, "of_unsigned");
        rows.extend([unsigned, signed]);
    }
    Ok(rows)
}

struct Bench<'a> {
    site: &'a mut Site,
    timing: &'a Timing,
    memcpy_bytes_per_s: f64,
    nginx: bool,
    say: &'a mut dyn FnMut(&str),
}

impl Bench<'_> {
    fn row(&mut self, asked: &Asked, workload: Workload, goals: Vec<Goal>) -> Result<Row> {
        (self.say)(&workload.name());
        let data = self.site.data(workload.source)?.clone();
        let signer = Signer::new(&asked.host(), sign::SECRET_KEY, chrono::Utc::now());
        let sign = |path: &str| signer.headers(path);
        let sign: Option<&dyn Fn(&str) -> String> =
            if workload.signed { Some(&sign) } else { None };
        let requests = site::requests(
            asked,
            &data,
            workload.kind,
            workload.batch,
            false,
            self.timing.seed,
            sign,
        );
        let mut ceilings = Ceilings {
            site: self.site,
            memcpy_bytes_per_s: self.memcpy_bytes_per_s,
            nginx: self.nginx && !workload.signed,
        };
        measure::row(
            &workload,
            asked,
            &data,
            &requests,
            &mut ceilings,
            self.timing,
            goals,
        )
    }
}

/// Adds to a row its throughput as a share of another row's.
fn share_of(row: &mut Row, base: &Row, figure: &str) {
    if let (Some(mine), Some(theirs)) = (
        row.figures.get("objects_per_s").copied(),
        base.figures.get("objects_per_s"),
    ) {
        let of = |v: f64| v / theirs.median;
        row.figures.insert(
            figure.to_owned(),
            Stat {
                median: of(mine.median),
                min: of(mine.min),
                max: of(mine.max),
            },
        );
    }
}
