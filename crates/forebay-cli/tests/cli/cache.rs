//! stat, warm, pin, unpin, evict, status, top, metrics.

use super::support::{Node, bytes};
use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
};

#[path = "../../src/commands/top/names.rs"]
mod names;

fn seeded() -> Node {
    let node = Node::start_with(&["--freshness", "immutable"]);
    for i in 0..20 {
        node.seed(&format!("train/{i:02}"), &bytes(1000 + i));
    }
    node.seed("val/0", &bytes(5000));
    node
}

#[test]
fn stat_tells_what_is_on_disk() {
    let node = Node::start_with(&["--freshness", "immutable"]);
    node.seed("big", &bytes(3 << 20));
    let before = node.run(&["stat", "data/big"]).ok().out;
    for part in [
        "object    data/big\n",
        "size      3,145,728 bytes\n",
        "on disk   nothing\n",
        "pinned    no\n",
    ] {
        assert!(before.contains(part), "{part} in\n{before}");
    }
    // One byte brings one chunk.
    node.run(&["get", "data/big", "part", "--range", "0-0"])
        .ok();
    let stat = node.run(&["stat", "data/big", "--json"]).ok().json();
    assert_eq!(
        (
            stat["size"].as_u64(),
            stat["cached_bytes"].as_u64(),
            stat["fresh_until"].as_str()
        ),
        (Some(3 << 20), Some(1 << 20), Some("forever"))
    );
    assert!(
        node.run(&["stat", "data/big"])
            .ok()
            .out
            .contains("on disk   1,048,576 bytes, 33.3 %\n")
    );
    node.run(&["get", "data/big", "whole"]).ok();
    assert!(
        node.run(&["stat", "data/big"])
            .ok()
            .out
            .contains("on disk   all of it\n")
    );
}

#[test]
fn warm_reports_exactly() {
    let node = seeded();
    let dry = node.run(&["warm", "data/train/", "--dry-run"]).ok().out;
    assert!(
        dry.starts_with("20 objects in ") && dry.contains(": 20 to be fetched ("),
        "{dry}"
    );
    assert!(
        node.run(&["stat", "data/train/00"])
            .ok()
            .out
            .contains("on disk   nothing")
    );
    node.run(&["get", "data/train/07", "seven"]).ok();
    let report = node.run(&["warm", "data/train/", "--json"]).ok().json();
    assert_eq!(report["event"], "report");
    let n = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(
        (
            n("objects"),
            n("warmed"),
            n("already_there"),
            n("missing"),
            n("denied"),
            n("failed")
        ),
        (20, 19, 1, 0, 0, 0)
    );
    assert_eq!(
        (n("warmed_bytes"), n("already_there_bytes")),
        ((0..20).map(|i| 1000 + i).sum::<u64>() - 1007, 1007)
    );
    let again = node.run(&["warm", "data/train/"]).ok().out;
    assert!(
        again.contains(" 0 warmed (0 B), 20 already there (")
            && again.ends_with("0 missing, 0 denied, 0 failed\n"),
        "{again}"
    );
    assert!(
        node.run(&["get", "data/train/03", "three"])
            .ok()
            .out
            .contains("  HIT  ")
    );
    let nothing = node.run(&["warm", "data/nothing/"]).fails(1);
    assert!(
        nothing.err.contains("error: nothing there: data/nothing/"),
        "{}",
        nothing.err
    );
    let no_bucket = node.run(&["warm", "nowhere/x"]).fails(1);
    assert!(
        no_bucket.err.contains("nowhere") && no_bucket.out.is_empty(),
        "{}",
        no_bucket.err
    );
}

#[test]
fn warm_takes_a_manifest_and_tells_what_is_missing() {
    let node = seeded();
    let manifest = "# a comment\ndata/train/00\n\ns3://data/val/0\ndata/gone\n";
    std::fs::write(node.path("list"), manifest).unwrap();
    let run = node.run(&["warm", "--manifest", "list"]).fails(1);
    assert!(run.err.contains("missing: data/gone: "), "{}", run.err);
    assert!(
        run.out.contains("3 objects in ")
            && run.out.contains(": 2 warmed (")
            && run.out.contains("1 missing"),
        "{}",
        run.out
    );
    // From stdin, as JSON lines.
    let mut child = node
        .command(&["warm", "--manifest", "-", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(manifest.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let lines: Vec<serde_json::Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(
        (lines[0]["outcome"].as_str(), lines[0]["key"].as_str()),
        (Some("missing"), Some("gone"))
    );
    assert_eq!(
        (
            lines[1]["event"].as_str(),
            lines[1]["already_there"].as_u64(),
            lines.len()
        ),
        (Some("report"), Some(2), 2)
    );
    std::fs::write(node.path("bad"), "no-bucket\n").unwrap();
    let bad = node.run(&["warm", "--manifest", "bad"]).fails(1);
    assert!(
        bad.err.contains("line 1 of the manifest") && bad.err.contains("BUCKET/KEY on each line"),
        "{}",
        bad.err
    );
    std::fs::write(node.path("empty"), "\n").unwrap();
    assert!(
        node.run(&["warm", "--manifest", "empty"])
            .fails(1)
            .err
            .contains("the manifest is empty: empty")
    );
}

#[test]
fn pins_are_kept_listed_and_released() {
    let node = seeded();
    node.run(&["warm", "data/"]).ok();
    assert_eq!(
        node.run(&["pin", "data/val/", "--dry-run"]).ok().out,
        "1 object: 1 would be pinned\n"
    );
    assert_eq!(node.run(&["pin", "--list"]).ok().out, "");
    let told = node
        .run(&["pin", "data/val/", "data/train/0", "--json"])
        .ok()
        .json();
    assert_eq!(
        (
            told["action"].as_str(),
            told["objects"].as_u64(),
            told["changed"].as_u64()
        ),
        (Some("pin"), Some(11), Some(11))
    );
    assert!(
        node.run(&["pin", "--list"])
            .ok()
            .out
            .lines()
            .any(|l| l == "data/val/0")
    );
    assert_eq!(
        node.run(&["pin", "--list", "--json"])
            .ok()
            .json_lines()
            .len(),
        11
    );
    assert_eq!(
        node.run(&["pin", "data/val/"]).ok().out,
        "1 object: 0 pinned, 1 pinned already\n"
    );
    assert!(
        node.run(&["stat", "data/val/0"])
            .ok()
            .out
            .contains("pinned    yes")
    );
    // Pinned objects are not evicted.
    let evicted = node.run(&["evict", "data"]).ok().out;
    assert!(
        evicted.starts_with("21 objects: 10 evicted (")
            && evicted.ends_with("11 not in the cache, or pinned\n"),
        "{evicted}"
    );
    assert_eq!(
        node.run(&["unpin", "data/val/", "--json"]).ok().json()["changed"],
        1
    );
    assert!(
        node.run(&["evict", "data/val/"])
            .ok()
            .out
            .starts_with("1 object: 1 evicted")
    );
    assert!(
        node.run(&["stat", "data/val/0"])
            .ok()
            .out
            .contains("on disk   nothing")
    );
    // What was done before a failure is told.
    node.run(&["warm", "data/val/"]).ok();
    let cut = node
        .run(&["evict", "data/val/", "nowhere/x", "data/", "--json"])
        .fails(1);
    assert_eq!(cut.json()["changed"], 1);
    assert!(cut.err.contains("nowhere"), "{}", cut.err);
    let nothing = node.run(&["evict", "data/nothing"]).fails(1);
    assert!(
        nothing.err.contains("nothing there: data/nothing"),
        "{}",
        nothing.err
    );
}

#[test]
fn status_is_for_people_and_for_programs() {
    let node = seeded();
    for _ in 0..3 {
        node.run(&["get", "data/val/0", "v"]).ok();
    }
    let shown = node.run(&["status"]).ok().out;
    for part in [
        "ready",
        "data",
        "of 64.0 MiB",
        "2 hit, 0 revalidated, 1 miss",
        "66.7 %",
        "memory",
    ] {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
    let told = node.run(&["status", "--json"]).ok().json();
    assert_eq!(
        (
            told["state"].as_str(),
            told["reads"]["hit"].as_u64(),
            told["cache"]["dirs"][0]["state"].as_str()
        ),
        (Some("ready"), Some(2), Some("ok"))
    );
    // Only by the socket.
    let socket = format!("unix:{}", node.ready["unix_socket"].as_str().unwrap());
    assert!(
        node.run(&["status", "--node", &socket])
            .ok()
            .out
            .contains("ready")
    );
    assert_eq!(node.run(&["ls", "--node", &socket]).ok().out, "data/\n");
}

#[test]
fn top_shows_what_happens() {
    let node = seeded();
    let mut child = node
        .command(&["top", "-n", "2", "--interval", "1s", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    for i in 0..5 {
        node.run(&["get", "data/val/0", &format!("v{i}")]).ok();
    }
    let reading: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(
        reading["served_bytes_per_s"].as_f64().unwrap() > 0.0
            && reading["requests_per_s"].as_f64().unwrap() > 0.0,
        "{reading}"
    );
    assert!(
        reading["latency"]["p99"].as_f64().is_some() && reading["hit_ratio"].as_f64().is_some(),
        "{reading}"
    );
    assert_eq!(reading["disk"]["total"].as_f64(), Some((64 << 20) as f64));
    assert!(reading["memory"]["total"].as_f64().unwrap() > 0.0);
    let line = node.run(&["top", "--once", "--interval", "100ms"]).ok().out;
    assert!(
        line.lines().count() == 1 && line.contains("hit ratio") && line.contains("of 64.0 MiB"),
        "{line}"
    );
    // By its own address too.
    let admin = node.ready["admin"].as_str().unwrap();
    assert!(
        node.run(&[
            "top",
            "--once",
            "--interval",
            "100ms",
            "--admin",
            admin,
            "--node",
            "http://127.0.0.1:1"
        ])
        .ok()
        .out
        .contains("served")
    );
    assert!(
        node.run(&["top", "--interval", "1ms"])
            .fails(2)
            .err
            .contains("50ms")
    );
}

#[test]
fn every_metric_that_top_reads_is_on_the_page() {
    let node = seeded();
    node.run(&["get", "data/val/0", "v"]).ok();
    let page = node.run(&["metrics"]).ok().out;
    assert!(page.ends_with("# EOF\n"), "{page}");
    for name in names::ALL {
        let of_family = name.trim_end_matches("_total");
        assert!(
            page.contains(&format!("# TYPE {of_family} ")),
            "{name} is not in\n{page}"
        );
    }
    assert!(
        node.run(&["metrics", "reference"])
            .ok()
            .out
            .contains("forebay_reads_total")
    );
}

#[test]
fn an_address_without_metrics_is_told_to_be_no_admin_listener() {
    let node = seeded();
    for (admin, code) in [
        (node.url.as_str(), "not_found"),
        ("http://127.0.0.1:1", "origin_unavailable"),
    ] {
        for command in ["metrics", "top"] {
            let run = node.run(&[command, "--admin", admin, "--json"]).fails(1);
            let told: serde_json::Value = serde_json::from_str(&run.err).unwrap();
            assert_eq!(told["error"]["code"], code, "{told}");
            let hint = told["error"]["hint"].as_str().unwrap();
            assert!(hint.contains("--admin"), "{told}");
        }
    }
}
