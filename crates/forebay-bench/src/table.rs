//! The tables of the GetBatch paper on one node: 10 KiB, 100 KiB and 1 MiB in batches of 32, 64 and
//! 128, against one GET at a time and 32 GETs in flight.
//!
//! Every method fetches the same random batches from the same warm node, and a batch takes from its
//! first request to its last byte. The time of an object is defined as in the paper: its effective
//! share of the batch's.

use crate::{
    interrupt,
    load::{ByGets, Load},
    measure::{self, Timing},
    report::{Figures, Row, Stat},
    request::{Kind, Maker},
    site::{Asked, Plan, Site, Source, Transport},
};
use forebay_core::{Result, units::format_bytes};

pub const SIZES: [(u64, u64); 3] = [(10 << 10, 10_000), (100 << 10, 2_000), (1 << 20, 300)];
const BATCHES: [usize; 3] = [32, 64, 128];
const IN_FLIGHT: usize = 32;

#[derive(Clone, Copy, PartialEq)]
enum Method {
    OneGet,
    ManyGets,
    Batch,
}

pub fn run(
    plan: &Plan,
    timing: &Timing,
    transport: Transport,
    clients: usize,
    sizes: &[(u64, u64)],
    mut say: impl FnMut(&str),
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &(size, count) in sizes {
        say(&format!(
            "{}: writing and warming up {count} objects",
            format_bytes(size)
        ));
        let mut site = Site::new(
            &Plan {
                size,
                count,
                ..plan.clone()
            },
            &[Source::Objects],
        )?;
        let asked = site.start(true, None, &[])?;
        asked.warm(site.data(Source::Objects)?, timing.seed)?;
        for batch in BATCHES {
            let cell = Cell {
                asked: &asked,
                site: &site,
                timing,
                transport,
                clients,
                size,
                batch,
            };
            let one = cell.row(Method::OneGet, &mut say)?;
            let many = cell.row(Method::ManyGets, &mut say)?;
            let mut ours = cell.row(Method::Batch, &mut say)?;
            for (figure, base) in [("times_one_get", &one), ("times_32_gets", &many)] {
                if let (Some(a), Some(b)) = (
                    ours.figures.get("objects_per_s").copied(),
                    base.figures.get("objects_per_s"),
                ) {
                    let times = |v: f64| v / b.median;
                    ours.figures.insert(
                        figure.into(),
                        Stat {
                            median: times(a.median),
                            min: times(a.min),
                            max: times(a.max),
                        },
                    );
                }
            }
            rows.extend([one, many, ours]);
        }
    }
    Ok(rows)
}

struct Cell<'a> {
    asked: &'a Asked,
    site: &'a Site,
    timing: &'a Timing,
    transport: Transport,
    clients: usize,
    size: u64,
    batch: usize,
}

impl Cell<'_> {
    fn row(&self, method: Method, say: &mut impl FnMut(&str)) -> Result<Row> {
        let how = match method {
            Method::OneGet => "one GET at a time",
            Method::ManyGets => "32 GETs in flight",
            Method::Batch => "GetBatch",
        };
        let name = format!(
            "{} × {}, {how}",
            self.batch,
            format_bytes(self.size).replace(".0 ", " ")
        );
        say(&name);
        let data = self.site.data(Source::Objects)?;
        let maker = Maker {
            data,
            host: self.asked.host(),
            token: None,
            sign: None,
        };
        let requests = maker.pool(Kind::Batch, self.batch, self.timing.seed);
        let gets: Vec<_> = if method == Method::Batch {
            vec![]
        } else {
            (0..data.entries.len() as u32)
                .map(|i| maker.get(i))
                .collect()
        };
        let in_flight = if method == Method::OneGet {
            1
        } else {
            IN_FLIGHT
        };
        let load = Load {
            at: self.asked.at(self.transport)?,
            kind: Kind::Batch,
            data,
            requests: &requests,
            clients: self.clients,
            buffer_bytes: self.timing.buffer_bytes,
            ramp: self.timing.ramp(),
            window: self.timing.window,
            verify: self.timing.verify,
            once: false,
            seed: self.timing.seed,
            server: self.asked.process,
            by_gets: (method != Method::Batch).then_some(ByGets {
                gets: &gets,
                in_flight,
            }),
        };
        let runs: Vec<Figures> = (0..self.timing.repeats)
            .map(|_| measure::observed(&load, self.batch, self.asked))
            .collect::<Result<_>>()?;
        interrupt::check()?;
        Ok(Row::of(name, &runs, vec![]))
    }
}
