//! `forebay status`: what a node serves, how full it is, and how it has done since it started.

use crate::{
    cli::Common,
    fail::{Outcome, one_line},
    out::{Out, count, duration, grouped, pairs},
    style::Style,
};
use forebay_client::Call;
use forebay_core::{Error, units::format_bytes};
use forebay_protocol::{
    STATUS_PATH,
    node::{NodeState, Status},
};
use http::Method;
use serde_json::Value;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit code 0 if the node answers, 1 if it does not.
JSON: as the node tells: {\"version\", \"node_id\", \"state\", \"uptime_seconds\", \"listen\", \"origins\", \"origin_stats\", \"cache\", \"reads\", \
    \"engine\", \"batches\", \"memory\", \"requests_in_flight\"}")]
pub struct Args {}

pub async fn run(_: Args, common: &Common) -> Outcome {
    let client = super::client(common)?;
    let said: Value = super::json(&client, Call::new(Method::GET, STATUS_PATH)).await?;
    let mut out = Out::new(common.json);
    if out.json {
        // All of it, including fields that a later release adds.
        return out.object(&said);
    }
    let status: Status = serde_json::from_value(said).map_err(|e| {
        Error::corrupt(format!("the status of the node cannot be parsed: {e}")).caused_by(e)
    })?;
    for line in lines(&status, out.style) {
        out.line(line)?;
    }
    out.flush()
}

fn lines(s: &Status, style: Style) -> Vec<String> {
    let state = match s.state {
        NodeState::Ready => style.green(s.state.as_str()),
        _ => style.yellow(s.state.as_str()),
    };
    let listen = [
        ("s3", &s.listen.s3),
        ("unix", &s.listen.unix),
        ("admin", &s.listen.admin),
    ];
    let listen: Vec<String> = listen
        .into_iter()
        .filter_map(|(name, at)| Some(format!("{name} {}", one_line(at.as_deref()?))))
        .collect();
    let mut rows = vec![
        (
            "node",
            format!(
                "{state}, version {}, up {}",
                one_line(&s.version),
                duration(s.uptime_seconds)
            ),
        ),
        ("listens", listen.join("   ")),
    ];
    for origin in &s.origins {
        let endpoint = origin
            .endpoint
            .as_ref()
            .map(|e| format!("   at {}", one_line(e)))
            .unwrap_or_default();
        rows.push((
            "bucket",
            format!(
                "{}   {}{endpoint}",
                style.bold(&one_line(&origin.bucket)),
                one_line(&origin.url)
            ),
        ));
    }
    for dir in &s.cache.dirs {
        let state = match dir.state.as_str() {
            "ok" => String::new(),
            state => format!("   {}", style.red(&one_line(state))),
        };
        rows.push((
            "cache",
            format!(
                "{}   {} of {} ({:.0} %)   {}{state}",
                one_line(&dir.path),
                format_bytes(dir.used_bytes),
                format_bytes(dir.capacity_bytes),
                percent(dir.used_bytes, dir.capacity_bytes),
                count(dir.records, "record")
            ),
        ));
    }
    if s.cache.dirs.is_empty() {
        rows.push(("cache", "none: every read goes to the origin".to_owned()));
    }
    if s.cache.pins > 0 {
        let lost = match s.cache.pins_not_held {
            0 => String::new(),
            n => style.yellow(&format!("   {} not held", grouped(n))),
        };
        rows.push((
            "pinned",
            format!(
                "{}, {}{lost}",
                count(s.cache.pins, "object"),
                format_bytes(s.cache.pinned_bytes)
            ),
        ));
    }
    let r = &s.reads;
    let asked = r.hit + r.miss + r.revalidated;
    let ratio = if asked == 0 {
        "-".to_owned()
    } else {
        format!("{:.1} %", percent(r.hit + r.revalidated, asked))
    };
    rows.push((
        "reads",
        format!(
            "{} hit, {} revalidated, {} miss, {} bypass, {} failed",
            grouped(r.hit),
            grouped(r.revalidated),
            grouped(r.miss),
            grouped(r.bypass),
            grouped(r.failed)
        ),
    ));
    rows.push((
        "hit ratio",
        format!(
            "{ratio}   {} from disk, {} from elsewhere",
            format_bytes(r.bytes_from_cache),
            format_bytes(r.bytes_from_origin)
        ),
    ));
    let b = &s.batches;
    rows.push((
        "batches",
        format!(
            "{} done, {} in flight, {} objects, {} members, {} soft errors, {} refused",
            grouped(b.completed),
            grouped(b.in_flight),
            grouped(b.objects),
            grouped(b.members),
            grouped(b.errors_soft),
            grouped(b.refused)
        ),
    ));
    rows.push((
        "memory",
        format!(
            "{} of {} for buffers   {} resident",
            format_bytes(s.memory.used_bytes),
            format_bytes(s.memory.budget_bytes),
            format_bytes(s.memory.resident_bytes)
        ),
    ));
    for origin in &s.origin_stats {
        let requests: u64 = origin.operations.values().map(|o| o.requests).sum();
        rows.push((
            "origin",
            format!(
                "{}   {}, {}, {} retries, {} read, {} written",
                one_line(&origin.name),
                count(requests, "request"),
                count(origin.failures, "failure"),
                grouped(origin.retries),
                format_bytes(origin.bytes_in),
                format_bytes(origin.bytes_out)
            ),
        ));
    }
    pairs(&rows)
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64 * 100.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_whatever_it_lacks() {
        let said = r#"{"state": "stopping", "reads": {"hit": 3, "miss": 1}}"#;
        let status = serde_json::from_str(said).unwrap();
        let text = lines(&status, Style::PLAIN).join("\n");
        for part in [
            "stopping",
            "none: every read goes to the origin",
            "hit ratio  75.0 %",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(
            (duration(59), duration(3700), duration(90_000)),
            ("59 s".into(), "1 h 1 min".into(), "1 d 1 h".into())
        );
    }
}
