//! `forebay top`: the node's metrics, every second, as rates and percentiles of that second; of a
//! node in a cluster, what all nodes do (`cluster.rs`).
//!
//! On a terminal, a page that is redrawn; elsewhere, or with `--once` and `-n`, a line for each
//! interval, or JSON lines.

mod cluster;
mod names;
mod reading;
mod terminal;
mod view;

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::Out,
};
use forebay_client::Client;
use forebay_core::{Error, ErrorKind, units};
use forebay_protocol::metrics::Page;
use reading::Reading;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay top
  forebay top --once
  forebay top -n 60 --json > minute.jsonl

Rates and percentiles are of the interval before. In a cluster, each node is a row, and each interval a table; \
    --this-node, and --admin, show one node. Where stdout is not a terminal, each interval is one line.
JSON lines: {\"time_ms\", \"seconds\", \"served_bytes_per_s\", \"requests_per_s\", \"hit_ratio\", \
    \"cache\": {\"hit\", \"miss\", \"revalidated\", \"stale\", \"bypass\"} per second, \"latency\": {\"p50\", \"p90\", \"p99\"} in seconds, \
    \"origin\": {\"requests_per_s\", \"errors_per_s\", \"bytes_per_s\"}, \
    \"batch\": {\"batches_per_s\", \"entries_per_s\", \"bytes_per_s\", \"soft_errors_per_s\"}, \
    \"memory\", \"disk\": {\"used\", \"total\"} in bytes}; null where nothing happened or there is \
    none.
Of a cluster: {\"time_ms\", \"seconds\", \"cluster\", \"nodes\": [{\"id\", \"name\", \"state\", \"answers\", and the rates below, \
    if it tells them}], \
    \"total\": {\"used_bytes\", \"capacity_bytes\", \"objects_per_s\", \"requests_per_s\", \"errors_per_s\", \"sent_bytes_per_s\", \
    \"from_nodes_bytes_per_s\", \"from_buckets_bytes_per_s\", \"hits_per_s\", \"misses_per_s\", \"hit_ratio\"}}.")]
pub struct Args {
    /// One interval, then stop
    #[arg(long, conflicts_with = "count")]
    pub once: bool,
    /// Stop after N intervals
    #[arg(short = 'n', long = "count", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// The time between two readings
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub interval: Duration,
    /// The node's admin address [default: as the node says]
    #[arg(
        long,
        value_name = "ADDR",
        env = "FOREBAY_ADMIN",
        hide_env_values = true
    )]
    pub admin: Option<String>,
    /// In a cluster, show only the node that is asked
    #[arg(long)]
    pub this_node: bool,
}

fn interval(text: &str) -> forebay_core::Result<Duration> {
    let time = units::parse_duration(text)?;
    if (Duration::from_millis(50)..=Duration::from_secs(3600)).contains(&time) {
        return Ok(time);
    }
    Err(Error::invalid(format!(
        "{text:?} is not between 50ms and 1h"
    )))
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    if !args.this_node && args.admin.is_none() {
        let client = super::client(common)?;
        match cluster::look(&client).await {
            Ok(status) => return cluster::run(&client, status, &args, common.json).await,
            // It is alone, or of a release without clusters; or the key is only for data.
            Err(Failure::Failed(e))
                if matches!(
                    e.kind(),
                    ErrorKind::NotFound | ErrorKind::Unsupported | ErrorKind::PermissionDenied
                ) => {}
            Err(e) => return Err(e),
        }
    }
    let admin = super::metrics::admin(args.admin.as_deref(), common).await?;
    let mut looks = Looks {
        last: scrape(&admin).await?,
        at: Instant::now(),
    };
    let count = if args.once { Some(1) } else { args.count };
    if count.is_none() && !common.json && terminal::Screen::possible() {
        live(&admin, &mut looks, args.interval).await
    } else {
        lines(
            &admin,
            &mut looks,
            args.interval,
            count.unwrap_or(u64::MAX),
            common.json,
        )
        .await
    }
}

async fn scrape(admin: &Client) -> Outcome<Page> {
    let text = super::metrics::fetch(admin).await?;
    Ok(Page::parse(&String::from_utf8_lossy(&text)))
}

struct Looks {
    last: Page,
    at: Instant,
}

impl Looks {
    /// Waits for the interval to pass and reads what happened in it.
    async fn next(&mut self, admin: &Client, interval: Duration) -> Outcome<Reading> {
        tokio::time::sleep(interval.saturating_sub(self.at.elapsed())).await;
        let page = scrape(admin).await?;
        let now = Instant::now();
        let reading = Reading::between(&self.last, &page, (now - self.at).as_secs_f64());
        (self.last, self.at) = (page, now);
        Ok(reading)
    }
}

async fn lines(
    admin: &Client,
    looks: &mut Looks,
    interval: Duration,
    count: u64,
    json: bool,
) -> Outcome {
    let mut out = Out::new(json);
    for _ in 0..count {
        let reading = looks.next(admin, interval).await?;
        if json {
            out.json_line(&reading)?
        } else {
            out.line(view::line(&reading))?
        }
        out.flush()?;
    }
    Ok(())
}

async fn live(admin: &Client, looks: &mut Looks, interval: Duration) -> Outcome {
    let style = crate::style::Style::stdout();
    let node = admin.address().to_string();
    let mut history = view::History::default();
    let mut screen = terminal::Screen::enter()?;
    let mut keys = terminal::keys();
    let columns = || terminal::size().map_or(80, |(_, columns)| columns);
    // Nothing has happened yet, but memory and disk are known.
    let first = Reading::between(&looks.last, &looks.last, 1.0);
    screen.draw(&view::page(&first, &history, &node, columns(), style))?;
    loop {
        tokio::select! {
            reading = looks.next(admin, interval) => {
                let reading = reading?;
                history.push(reading.served_bytes_per_s);
                screen.draw(&view::page(&reading, &history, &node, columns(), style))?;
            }
            Some(key) = keys.recv() => if matches!(key, b'q' | b'Q' | 0x1b) {
                return Ok(());
            },
        }
    }
}
