//! `forebay top` where the node is in a cluster: a row for each node, and their sum.

use super::{
    Args, terminal,
    view::{per_s, rate, share},
};
use crate::{
    fail::{Outcome, one_line},
    out::Out,
    style::Style,
};
use forebay_client::{Call, Client};
use forebay_core::units::format_bytes;
use forebay_protocol::{
    CLUSTER_FIGURES_PATH,
    cluster::{ClusterStatus, NodeFigures},
};
use http::Method;
use serde::Serialize;
use std::time::{Duration, Instant};

/// What happened between two looks at the cluster; rates are per second.
#[derive(Debug, Default, Serialize)]
struct Reading {
    time_ms: i64,
    seconds: f64,
    cluster: String,
    nodes: Vec<NodeReading>,
    /// Of those nodes that tell.
    total: Rates,
}

#[derive(Debug, Default, Serialize)]
struct NodeReading {
    id: String,
    name: String,
    state: String,
    answers: bool,
    /// `None` if it does not tell, or did not at the look before.
    #[serde(flatten)]
    rates: Option<Rates>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Rates {
    used_bytes: u64,
    capacity_bytes: u64,
    objects_per_s: f64,
    requests_per_s: f64,
    errors_per_s: f64,
    sent_bytes_per_s: f64,
    from_nodes_bytes_per_s: f64,
    from_buckets_bytes_per_s: f64,
    hits_per_s: f64,
    misses_per_s: f64,
    hit_ratio: Option<f64>,
}

impl Rates {
    fn between(then: &NodeFigures, now: &NodeFigures, seconds: f64) -> Self {
        let rate = |of: fn(&NodeFigures) -> u64| {
            // A node that restarted in between counts from zero.
            let then = Some(of(then)).filter(|then| *then <= of(now)).unwrap_or(0);
            (of(now) - then) as f64 / seconds.max(1e-9)
        };
        Rates {
            used_bytes: now.used_bytes,
            capacity_bytes: now.capacity_bytes,
            objects_per_s: rate(|f| f.reads),
            requests_per_s: rate(|f| f.requests),
            errors_per_s: rate(|f| f.requests_failed),
            sent_bytes_per_s: rate(|f| f.sent_bytes),
            from_nodes_bytes_per_s: rate(|f| f.from_nodes_bytes),
            from_buckets_bytes_per_s: rate(|f| f.from_buckets_bytes),
            hits_per_s: rate(|f| f.reads_hit),
            misses_per_s: rate(|f| f.reads_miss),
            hit_ratio: None,
        }
        .with_ratio()
    }

    fn with_ratio(self) -> Self {
        let asked = self.hits_per_s + self.misses_per_s;
        let hit_ratio = (asked > 0.0).then(|| self.hits_per_s / asked);
        Rates { hit_ratio, ..self }
    }

    fn plus(self, other: &Rates) -> Self {
        Rates {
            used_bytes: self.used_bytes + other.used_bytes,
            capacity_bytes: self.capacity_bytes + other.capacity_bytes,
            objects_per_s: self.objects_per_s + other.objects_per_s,
            requests_per_s: self.requests_per_s + other.requests_per_s,
            errors_per_s: self.errors_per_s + other.errors_per_s,
            sent_bytes_per_s: self.sent_bytes_per_s + other.sent_bytes_per_s,
            from_nodes_bytes_per_s: self.from_nodes_bytes_per_s + other.from_nodes_bytes_per_s,
            from_buckets_bytes_per_s: self.from_buckets_bytes_per_s
                + other.from_buckets_bytes_per_s,
            hits_per_s: self.hits_per_s + other.hits_per_s,
            misses_per_s: self.misses_per_s + other.misses_per_s,
            hit_ratio: None,
        }
        .with_ratio()
    }

    fn cells(&self) -> [String; 8] {
        [
            format!(
                "{} of {}",
                format_bytes(self.used_bytes),
                format_bytes(self.capacity_bytes)
            ),
            per_s(self.objects_per_s),
            rate(self.sent_bytes_per_s),
            share(self.hit_ratio),
            rate(self.from_nodes_bytes_per_s),
            rate(self.from_buckets_bytes_per_s),
            per_s(self.requests_per_s),
            per_s(self.errors_per_s),
        ]
    }
}

impl Reading {
    fn between(then: &ClusterStatus, now: &ClusterStatus, seconds: f64) -> Self {
        let nodes: Vec<NodeReading> = now
            .members
            .iter()
            .map(|m| {
                let before = then.members.iter().find(|before| before.id == m.id);
                let before = before.and_then(|before| before.figures.as_ref());
                let both = before.zip(m.figures.as_ref());
                NodeReading {
                    id: m.id.clone(),
                    name: m.name.clone(),
                    state: m.state.clone(),
                    answers: m.answers && m.untold.is_none(),
                    rates: both.map(|(then, now)| Rates::between(then, now, seconds)),
                }
            })
            .collect();
        let told = nodes.iter().filter_map(|node| node.rates.as_ref());
        Reading {
            time_ms: chrono::Utc::now().timestamp_millis(),
            seconds,
            cluster: now.cluster.clone(),
            total: told.fold(Rates::default(), Rates::plus),
            nodes,
        }
    }

    /// The table, line by line.
    fn lines(&self, style: Style) -> Vec<String> {
        let head = [
            "node",
            "state",
            "used",
            "objects",
            "to clients",
            "hits",
            "from nodes",
            "from buckets",
            "requests",
            "errors",
        ];
        let mut table = vec![head.map(str::to_owned).to_vec()];
        let row = |name: &str, state: String, cells: [String; 8]| {
            let mut row = vec![one_line(name), state];
            row.extend(cells);
            row
        };
        for node in &self.nodes {
            let called = if node.name.is_empty() {
                &node.id
            } else {
                &node.name
            };
            let state = match node.answers {
                true => one_line(&node.state),
                false => format!("{}, silent", one_line(&node.state)),
            };
            let cells = node.rates.as_ref().map(Rates::cells);
            let cells = cells.unwrap_or_else(|| std::array::from_fn(|_| "-".to_owned()));
            table.push(row(called, state, cells));
        }
        table.push(row("all", String::new(), self.total.cells()));
        let width = |column: usize| {
            let cells = table.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let lines = table.iter().enumerate().map(|(number, row)| {
            let cells = row.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            let line = cells.join("  ").trim_end().to_owned();
            match number.checked_sub(1).map(|at| self.nodes.get(at)) {
                None => style.dim(&line),
                Some(None) => style.bold(&line),
                Some(Some(node)) if !node.answers => style.red(&line),
                Some(Some(_)) => line,
            }
        });
        lines.collect()
    }
}

/// The cluster as the node sees it.
pub async fn look(client: &Client) -> Outcome<ClusterStatus> {
    crate::commands::json(client, Call::new(Method::GET, CLUSTER_FIGURES_PATH)).await
}

struct Looks<'a> {
    client: &'a Client,
    last: ClusterStatus,
    at: Instant,
}

impl Looks<'_> {
    /// Waits for the interval to pass and reads what happened in it.
    async fn next(&mut self, interval: Duration) -> Outcome<Reading> {
        tokio::time::sleep(interval.saturating_sub(self.at.elapsed())).await;
        let status = look(self.client).await?;
        let now = Instant::now();
        let reading = Reading::between(&self.last, &status, (now - self.at).as_secs_f64());
        (self.last, self.at) = (status, now);
        Ok(reading)
    }
}

/// Shows the cluster until it is stopped; `first` is how it looks now.
pub async fn run(client: &Client, first: ClusterStatus, args: &Args, json: bool) -> Outcome {
    let mut looks = Looks {
        client,
        last: first,
        at: Instant::now(),
    };
    let count = if args.once { Some(1) } else { args.count };
    if count.is_none() && !json && terminal::Screen::possible() {
        return live(&mut looks, args.interval).await;
    }
    let mut out = Out::new(json);
    for _ in 0..count.unwrap_or(u64::MAX) {
        let reading = looks.next(args.interval).await?;
        if json {
            out.json_line(&reading)?;
        } else {
            for line in reading.lines(out.style) {
                out.line(line)?;
            }
        }
        out.flush()?;
    }
    Ok(())
}

async fn live(looks: &mut Looks<'_>, interval: Duration) -> Outcome {
    let style = Style::stdout();
    let node = looks.client.address().to_string();
    let mut screen = terminal::Screen::enter()?;
    let mut keys = terminal::keys();
    let page = |reading: &Reading| {
        let title = format!("cluster {} by {node}   q quits", one_line(&reading.cluster));
        let mut lines = vec![
            format!("{} {}", style.bold("forebay"), style.dim(&title)),
            String::new(),
        ];
        lines.extend(reading.lines(style));
        lines
    };
    screen.draw(&page(&Reading::between(&looks.last, &looks.last, 1.0)))?;
    loop {
        tokio::select! {
            reading = looks.next(interval) => screen.draw(&page(&reading?))?,
            Some(key) = keys.recv() => if matches!(key, b'q' | b'Q' | 0x1b) {
                return Ok(());
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_protocol::cluster::ClusterMember;

    #[test]
    fn a_cluster_is_a_row_for_each_node_and_their_sum() {
        let member = |name: &str, figures: Option<NodeFigures>| ClusterMember {
            id: name.to_owned(),
            name: name.to_owned(),
            state: "active".into(),
            answers: figures.is_some(),
            figures,
            ..ClusterMember::default()
        };
        let figures = |reads, hit| NodeFigures {
            used_bytes: 1 << 30,
            capacity_bytes: 4 << 30,
            reads,
            reads_hit: hit,
            reads_miss: reads - hit,
            sent_bytes: reads << 20,
            ..NodeFigures::default()
        };
        let status = |members| ClusterStatus {
            cluster: "c".into(),
            members,
            ..ClusterStatus::default()
        };
        let then = status(vec![
            member("a", Some(figures(100, 50))),
            // It restarts in between.
            member("b", Some(figures(1000, 1000))),
            member("c", Some(figures(1, 1))),
        ]);
        let now = status(vec![
            member("a", Some(figures(140, 80))),
            member("b", Some(figures(20, 0))),
            member("c", None),
        ]);
        let reading = Reading::between(&then, &now, 2.0);
        assert_eq!(reading.total.objects_per_s, 30.0);
        assert_eq!(reading.total.hit_ratio, Some(0.5));
        let lines = reading.lines(Style::PLAIN);
        assert_eq!(lines.len(), 5);
        assert!(
            lines[1].starts_with("a     active          1.0 GiB of 4.0 GiB"),
            "{}",
            lines[1]
        );
        assert!(
            lines[1].contains("20.0/s   20.0 MiB/s  75.0 %"),
            "{}",
            lines[1]
        );
        assert!(
            lines[2].contains("10.0/s   10.0 MiB/s  0.0 %"),
            "{}",
            lines[2]
        );
        assert!(
            lines[3].starts_with("c     active, silent  - "),
            "{}",
            lines[3]
        );
        assert!(
            lines[4].starts_with("all                   2.0 GiB of 8.0 GiB"),
            "{}",
            lines[4]
        );
        let json = serde_json::to_value(&reading).unwrap();
        assert_eq!(json["nodes"][0]["objects_per_s"], 20.0);
        assert!(json["nodes"][2].get("objects_per_s").is_none());
    }
}
