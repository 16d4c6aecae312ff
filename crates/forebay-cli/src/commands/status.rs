//! `forebay status`: what a node serves, how full it is, and how it has done since it began.

use crate::{
    cli::Common,
    fail::{Outcome, one_line},
    out::{Out, count, grouped, pairs},
    style::Style,
};
use forebay_core::units::format_bytes;
use http::Method;
use serde_json::Value;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit code 0 if the node answers, 1 if it does not.
JSON: as the node tells: {\"version\", \"node_id\", \"state\", \"uptime_seconds\", \"listen\", \"origins\", \"origin_stats\", \"cache\", \"reads\",
\"engine\", \"batches\", \"memory\", \"requests_in_flight\"}")]
pub struct Args {}

pub async fn run(_: Args, common: &Common) -> Outcome {
    let mut client = super::client(common)?;
    let status: Value = client.json(Method::GET, "/v1/forebay/status", None).await?;
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(&status);
    }
    for line in lines(&status, out.style) {
        out.line(line)?;
    }
    out.flush()
}

fn lines(s: &Value, style: Style) -> Vec<String> {
    let n = |v: &Value| grouped(v.as_u64().unwrap_or(0));
    let b = |v: &Value| format_bytes(v.as_u64().unwrap_or(0));
    let text = |v: &Value| v.as_str().map(one_line).unwrap_or_default();
    let state = text(&s["state"]);
    let state = if state == "ready" {
        style.green(&state)
    } else {
        style.yellow(&state)
    };
    let listen: Vec<String> = ["s3", "unix", "admin"]
        .iter()
        .filter(|k| s["listen"][**k].is_string())
        .map(|k| format!("{k} {}", text(&s["listen"][*k])))
        .collect();
    let mut rows = vec![
        (
            "node",
            format!(
                "{state}, version {}, up {}",
                text(&s["version"]),
                duration(s["uptime_seconds"].as_u64().unwrap_or(0))
            ),
        ),
        ("listens", listen.join("   ")),
    ];
    for origin in s["origins"].as_array().into_iter().flatten() {
        let endpoint = origin["endpoint"]
            .as_str()
            .map(|e| format!("   at {}", one_line(e)))
            .unwrap_or_default();
        rows.push((
            "bucket",
            format!(
                "{}   {}{endpoint}",
                style.bold(&text(&origin["bucket"])),
                text(&origin["url"])
            ),
        ));
    }
    let dirs = s["cache"]["dirs"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    for dir in dirs {
        let (used, capacity) = (
            dir["used_bytes"].as_u64().unwrap_or(0),
            dir["capacity_bytes"].as_u64().unwrap_or(0),
        );
        let state = text(&dir["state"]);
        let state = if state == "ok" {
            String::new()
        } else {
            format!("   {}", style.red(&state))
        };
        rows.push((
            "cache",
            format!(
                "{}   {} of {} ({:.0} %)   {}{state}",
                text(&dir["path"]),
                format_bytes(used),
                format_bytes(capacity),
                percent(used, capacity),
                count(dir["records"].as_u64().unwrap_or(0), "record")
            ),
        ));
    }
    if dirs.is_empty() {
        rows.push(("cache", "none: every read goes to the origin".to_owned()));
    }
    if s["cache"]["pins"].as_u64().unwrap_or(0) > 0 {
        let lost = s["cache"]["pins_not_held"]
            .as_u64()
            .filter(|n| *n > 0)
            .map(|n| style.yellow(&format!("   {} not held", grouped(n))))
            .unwrap_or_default();
        rows.push((
            "pinned",
            format!(
                "{}, {}{lost}",
                count(s["cache"]["pins"].as_u64().unwrap_or(0), "object"),
                b(&s["cache"]["pinned_bytes"])
            ),
        ));
    }
    let r = &s["reads"];
    let reads = ["hit", "miss", "revalidated"].map(|k| r[k].as_u64().unwrap_or(0));
    let asked: u64 = reads.iter().sum();
    let ratio = if asked == 0 {
        "-".to_owned()
    } else {
        format!("{:.1} %", percent(reads[0] + reads[2], asked))
    };
    rows.push((
        "reads",
        format!(
            "{} hit, {} revalidated, {} miss, {} bypass, {} failed",
            n(&r["hit"]),
            n(&r["revalidated"]),
            n(&r["miss"]),
            n(&r["bypass"]),
            n(&r["failed"])
        ),
    ));
    rows.push((
        "hit ratio",
        format!(
            "{ratio}   {} from disk, {} from origins",
            b(&r["bytes_from_cache"]),
            b(&r["bytes_from_origin"])
        ),
    ));
    let batches = &s["batches"];
    rows.push((
        "batches",
        format!(
            "{} done, {} in flight, {} objects, {} members, {} soft errors, {} refused",
            n(&batches["completed"]),
            n(&batches["in_flight"]),
            n(&batches["objects"]),
            n(&batches["members"]),
            n(&batches["errors_soft"]),
            n(&batches["refused"])
        ),
    ));
    rows.push((
        "memory",
        format!(
            "{} of {} for buffers   {} resident",
            b(&s["memory"]["used_bytes"]),
            b(&s["memory"]["budget_bytes"]),
            b(&s["memory"]["resident_bytes"])
        ),
    ));
    for origin in s["origin_stats"].as_array().into_iter().flatten() {
        let sum = |field: &str| {
            origin["operations"]
                .as_object()
                .into_iter()
                .flatten()
                .filter_map(|(_, o)| o[field].as_u64())
                .sum::<u64>()
        };
        rows.push((
            "origin",
            format!(
                "{}   {}, {}, {} retries, {} read, {} written",
                text(&origin["name"]),
                count(sum("requests"), "request"),
                count(sum("errors"), "error"),
                n(&origin["retries"]),
                b(&origin["bytes_in"]),
                b(&origin["bytes_out"])
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

fn duration(seconds: u64) -> String {
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, m) => format!("{m} min"),
        (0, h, m) => format!("{h} h {m} min"),
        (d, h, _) => format!("{d} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_whatever_it_lacks() {
        let text = lines(
            &serde_json::json!({"state": "stopping", "reads": {"hit": 3, "miss": 1}}),
            Style::PLAIN,
        )
        .join("\n");
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
