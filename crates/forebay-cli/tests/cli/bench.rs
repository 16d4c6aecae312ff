//! `forebay bench` from end to end, with windows too short to say anything about speed: it runs,
//! checks what it receives, and reports.

use crate::support::{BUCKET, Node, bytes, forebay};
use serde_json::Value;

fn figure(row: &Value, name: &str) -> f64 {
    row["figures"][name]["median"]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} is missing in {row:#}"))
}

/// What every row from its own node must say, whatever the machine.
fn sound(row: &Value) {
    let (objects, payload) = (figure(row, "objects_per_s"), figure(row, "bytes_per_s"));
    assert!(objects > 0.0);
    // All objects have the same size; the window's edges may cut one for each client.
    assert!(
        (payload / objects - 2048.0).abs() < 100.0,
        "{payload} bytes/s of {objects} objects/s"
    );
    assert!(
        figure(row, "client_cpu_us_per_object") > 0.0 && figure(row, "server_peak_bytes") > 1e6
    );
    assert!(figure(row, "object_p50_us") <= figure(row, "object_p99_us"));
    assert!((figure(row, "of_copy") - payload / figure(row, "copy_bytes_per_s")).abs() < 1e-9);
}

#[test]
fn gets_and_batches_run_over_both_sockets() {
    for (command, more) in [
        ("get", &["--objects"][..]),
        ("batch", &["--batch", "16"]),
        (
            "batch",
            &["--batch", "16", "--members", "--per-shard", "30"],
        ),
    ] {
        for transport in ["tcp", "unix"] {
            let mut args = vec![
                "--json",
                "bench",
                command,
                "--size",
                "2KiB",
                "--count",
                "100",
                "--seconds",
                "0.3",
                "-c",
                "2",
                "--transport",
                transport,
            ];
            args.extend_from_slice(more);
            args.push("--verify");
            let run = forebay(&args).ok();
            let report = run.json();
            assert_eq!(report["rows"].as_array().unwrap().len(), 1);
            let row = &report["rows"][0];
            sound(row);
            let name = row["name"].as_str().unwrap();
            assert!(
                name.starts_with(command) && name.contains(transport),
                "{name}"
            );
        }
    }
}

#[test]
fn cold_entries_are_asked_for_once_and_reports_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let save = dir.path().join("a.json");
    let save = save.to_str().unwrap();
    let args = [
        "bench",
        "batch",
        "--cold",
        "--size",
        "1KiB",
        "--count",
        "200",
        "--batch",
        "20",
        "--repeats",
        "2",
        "--save",
        save,
    ];
    let run = forebay(&args).ok();
    assert!(
        run.out
            .contains("batch 20 × 1 KiB objects, tcp, 8 clients, cold"),
        "{}",
        run.out
    );
    let compared = forebay(&["bench", "cmp", save, save]).ok();
    assert!(
        compared.out.contains("+0.0 %") && compared.out.contains("0 better, 0 worse"),
        "{}",
        compared.out
    );
    std::fs::write(dir.path().join("b.json"), "{}").unwrap();
    let refused = forebay(&[
        "bench",
        "cmp",
        save,
        dir.path().join("b.json").to_str().unwrap(),
    ])
    .fails(2);
    assert!(
        refused.err.contains("b.json is not a report"),
        "{}",
        refused.err
    );
}

#[test]
fn a_node_that_is_there_is_measured_by_what_its_bucket_holds() {
    let node = Node::start();
    for i in 0..20 {
        node.seed(&format!("some/{i:02}"), &bytes(2048));
    }
    node.seed("other", &bytes(5));
    let pid = node.child.id().to_string();
    let args = [
        "--json",
        "bench",
        "batch",
        "--url",
        &node.url,
        "--bucket",
        BUCKET,
        "--prefix",
        "some/",
        "--pid",
        &pid,
        "--batch",
        "8",
        "--seconds",
        "0.3",
    ];
    sound(&node.run(&args).ok().json()["rows"][0]);
    let nothing = node
        .run(&[
            "bench", "get", "--url", &node.url, "--bucket", BUCKET, "--prefix", "none/",
        ])
        .fails(1);
    assert!(nothing.err.contains("nothing to read"), "{}", nothing.err);
}

#[test]
fn cold_batches_are_counted_in_round_trips_and_batches_compared_with_gets() {
    let report = forebay(&[
        "--json",
        "bench",
        "cold",
        "--size",
        "1KiB",
        "--rtt",
        "20ms",
        "--repeats",
        "1",
    ])
    .ok()
    .json();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        // Nothing far away arrives before one round trip is over. With the transfer subtracted, it
        // may look as if it did: part of it happens while others wait for their first byte.
        let (trips, strict) = (
            figure(row, "round_trips"),
            figure(row, "strict_round_trips"),
        );
        assert!(strict >= 0.9 && trips < 1000.0, "{row:#}");
        assert!(
            figure(row, "origin_bytes") > 128.0 * 1024.0 && figure(row, "origin_requests") >= 1.0
        );
        assert!(strict >= trips);
    }
    let report = forebay(&[
        "--json",
        "bench",
        "table",
        "--size",
        "1KiB",
        "--seconds",
        "0.5",
        "-c",
        "2",
    ])
    .ok()
    .json();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 9);
    for three in rows.chunks(3) {
        let [one, many, ours] = three else {
            panic!("three methods")
        };
        let rate = |row| figure(row, "objects_per_s");
        assert!((figure(ours, "times_one_get") - rate(ours) / rate(one)).abs() < 1e-6);
        assert!((figure(ours, "times_32_gets") - rate(ours) / rate(many)).abs() < 1e-6);
    }
}

#[test]
fn caches_of_many_entries_are_filled_read_and_started_again() {
    let args = [
        "--json",
        "bench",
        "index",
        "--count",
        "20000",
        "--size",
        "100",
        "--seconds",
        "0.5",
        "--repeats",
        "1",
    ];
    let report = forebay(&args).ok().json();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert!(
            figure(row, "objects_per_s") > 0.0
                && figure(row, "puts_per_s") > 0.0
                && figure(row, "ready_us") > 0.0
        );
        // 40 bytes per entry on disk; in RAM the same plus a byte and the free room that tables
        // keep.
        assert!(
            (41.0..100.0).contains(&figure(row, "table_bytes_per_entry")),
            "{row:#}"
        );
    }
    let last = &rows[2];
    assert!(
        (800_000.0..810_000.0).contains(&figure(last, "checkpoint_bytes")),
        "{last:#}"
    );
    assert!(figure(last, "ready_killed_us") > 0.0 && figure(last, "ready_no_checkpoint_us") > 0.0);
    assert_eq!(last["goals"].as_array().unwrap().len(), 6);
}

#[test]
fn the_suite_has_each_way_to_read_and_its_signatures_are_checked() {
    let report = forebay(&[
        "--json",
        "bench",
        "suite",
        "--size",
        "2KiB",
        "--seconds",
        // So long that each of them reads something on a machine that is busy.
        "0.3",
        "--repeats",
        "1",
    ])
    .ok()
    .json();
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 6, "{names:?}");
    for row in rows {
        sound(row);
    }
    assert!(figure(&rows[1], "of_objects") > 0.0 && figure(&rows[5], "of_unsigned") > 0.0);
    assert!(names[5].ends_with("signed"));
    let without_nginx = report["notes"].to_string().contains("nginx not found");
    assert_eq!(
        rows[4]["figures"]["nginx_objects_per_s"].is_null(),
        without_nginx
    );
}

#[test]
fn a_wrong_command_line_is_refused_before_anything_is_written() {
    for args in [
        &["bench"][..],
        &["bench", "get", "--seconds", "0"],
        &["bench", "get", "--seconds", "soon"],
        &["bench", "batch", "--batch", "0"],
        &["bench", "get", "--url", "http://127.0.0.1:1"],
        &["bench", "get", "--cold", "--warm"],
        &["bench", "cmp", "only-one.json"],
        &["bench", "table", "--transport", "pigeon"],
    ] {
        forebay(args).fails(2);
    }
    for option in ["--json", "--verbose"] {
        let told = forebay(&["bench", option]).fails(2).err;
        assert!(
            told.contains("batch") && !told.contains("copy-server"),
            "{told}"
        );
    }
}

#[test]
fn a_report_that_is_not_there_is_a_failure_and_one_that_is_none_a_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("before.json");
    let file = path.to_str().unwrap();
    forebay(&["bench", "cmp", file, file]).fails(1);
    std::fs::write(&path, "no report").unwrap();
    forebay(&["bench", "cmp", file, file]).fails(2);
}
