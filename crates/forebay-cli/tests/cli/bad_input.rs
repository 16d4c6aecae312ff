//! An error says in one line what is wrong, with what to try, and the exit code tells usage (2)
//! from failure (1).

use super::support::{Node, Run, command, forebay};
use std::process::Stdio;

/// Arguments, the exit code, a part of the error line, a part of the hint.
type Case = (&'static [&'static str], i32, &'static str, &'static str);

/// Cases that need no node.
const USAGE: &[Case] = &[
    (
        &["ls", "--node", "https://host/path"],
        2,
        "not the address of a node",
        "http://",
    ),
    (
        &[
            "ls",
            "--node",
            "https://127.0.0.1:1",
            "--ca",
            "/no/such/ca.pem",
        ],
        1,
        "the CA file",
        "path",
    ),
    (
        &["ls", "--node", "http://host/path"],
        2,
        "not the address of a node",
        "unix:",
    ),
    (&["ls", "--node", "unix:"], 2, "no path", "unix:/run"),
    (
        &["get", "data/x.tar", "--member", ""],
        2,
        "--member is empty",
        "leave it out",
    ),
    (
        &["cluster", "plan", "--nodes", "2", "--remove", "2"],
        2,
        "leaves none",
        "remove fewer",
    ),
    (
        &["cluster", "map", "c", "--member", "a=host,1TiB"],
        2,
        "NAME=ADDRESS,SIZE",
        "",
    ),
    (
        &[
            "cluster",
            "map",
            "c",
            "--member",
            "a=h:1,1TiB",
            "--member",
            "a=h:2,1TiB",
        ],
        2,
        "is named twice",
        "",
    ),
    (&["pin"], 2, "required arguments", ""),
    (&["unpin"], 2, "required arguments", ""),
    (&["evict", "--dry-run"], 2, "required arguments", ""),
    (&["ls", "a"], 2, "is not a bucket name", "bucket/prefix"),
    (
        &["ls", "a"],
        2,
        "is not a bucket name",
        "2 to 63 characters",
    ),
    (
        &["get", "a/b"],
        2,
        "is not a bucket name",
        "2 to 63 characters",
    ),
    (&["ls", "data", "--limit", "0"], 2, "--limit 0", "1 or more"),
    (&["get", "data"], 2, "no key", "bucket/key"),
    (&["get", "data/../etc/passwd"], 2, "'..'", "bucket/key"),
    (
        &["get", "data/x", "--range", "9-1"],
        2,
        "bad range",
        "0-1023",
    ),
    (
        &["put", "no-such-file", "data/x"],
        1,
        "no-such-file: no such file or directory",
        "",
    ),
    (&["put", "/", "data/x"], 1, "it is a directory", "one file"),
    (&["put", "Cargo.toml", "data"], 2, "no key", "bucket/key"),
    (
        &["warm", "--manifest", "no-such-file"],
        1,
        "no-such-file: no such file",
        "",
    ),
    (
        &["status", "--node", "unix:/no/such.sock"],
        1,
        "cannot connect to unix:/no/such.sock: no such socket",
        "forebay serve",
    ),
    (
        &["serve"],
        2,
        "origins: no bucket is served",
        "--origin s3://",
    ),
    (&["serve", "--origin", "ftp://x"], 2, "ftp", ""),
    (
        &["serve", "--origin", "s3://bucket", "--cache", "/tmp"],
        2,
        "--cache",
        "DIR:SIZE",
    ),
    (
        &["serve", "--origin", "s3://bucket", "--cache", "/tmp:10X"],
        2,
        "/tmp:10X",
        "DIR:SIZE",
    ),
    (
        &[
            "serve",
            "--origin",
            "s3://bucket",
            "--freshness",
            "sometimes",
        ],
        2,
        "sometimes",
        "",
    ),
    (
        &["serve", "--origin", "s3://bucket", "--memory", "lots"],
        2,
        "lots",
        "",
    ),
    (
        &[
            "serve",
            "--origin",
            "s3://bucket",
            "--set",
            "limits.conections=3",
        ],
        2,
        "conections",
        "connections",
    ),
    (
        &["serve", "--origin", "s3://bucket", "--set", "limits"],
        2,
        "no '='",
        "KEY=VALUE",
    ),
    (
        &["serve", "--origin", "s3://bucket", "--listen", "nowhere"],
        2,
        "nowhere",
        "127.0.0.1:8080",
    ),
    (
        &["serve", "--config", "/no/such.toml"],
        2,
        "/no/such.toml",
        "",
    ),
];

#[test]
fn wrong_arguments_are_told_with_what_to_try() {
    for (args, code, error, hint) in USAGE {
        let run = forebay(args);
        assert_eq!(
            (run.code, run.out.as_str()),
            (*code, ""),
            "{args:?}\n{}",
            run.err
        );
        check_words(args, &run.err, error, hint);
    }
}

#[test]
fn what_the_node_refuses_is_told_with_what_to_try() {
    let node = Node::start();
    node.seed("x", b"x");
    let cases: &[Case] = &[
        (
            &["ls", "nothing-here"],
            1,
            "nothing-here",
            "buckets here: data",
        ),
        (
            &["get", "nothing-here/x"],
            1,
            "nothing-here",
            "buckets here: data",
        ),
        (&["get", "data/y"], 1, "data/y", "forebay ls"),
        (&["get", "data/x", "--member", "m"], 1, "data/x", ""),
        (
            &["get", "data/x", "no/such/dir/x"],
            1,
            "no/such/dir/x: no such file or directory",
            "",
        ),
        (&["stat", "data/y"], 1, "data/y", "forebay ls"),
    ];
    for (args, code, error, hint) in cases {
        let run = node.run(args);
        assert_eq!(
            (run.code, run.out.as_str()),
            (*code, ""),
            "{args:?}\n{}",
            run.err
        );
        check_words(args, &run.err, error, hint);
    }
    assert!(!node.path("y").exists());
}

#[track_caller]
fn check_words(args: &[&str], err: &str, error: &str, hint: &str) {
    let mut lines = err.lines();
    let first = lines.next().unwrap_or_default();
    assert!(
        first.starts_with("error: ") && first.contains(error),
        "{args:?}: no {error:?} in\n{err}"
    );
    let rest: String = lines.collect();
    assert!(
        hint.is_empty() || (rest.starts_with("hint: ") && rest.contains(hint)),
        "{args:?}: no hint {hint:?} in\n{err}"
    );
    assert!(!err.contains('\x1b'), "colours without a terminal");
}

#[test]
fn with_json_an_error_is_json_too() {
    // Also of a command line that cannot be read.
    for (args, named) in [
        (&["--json", "statu"][..], "statu"),
        (&["ls", "--json", "--limit", "many"][..], "--limit"),
        (&["get", "--json"][..], "BUCKET/KEY"),
    ] {
        let run = forebay(args).fails(2);
        let error: serde_json::Value = serde_json::from_str(&run.err).unwrap();
        assert_eq!(error["error"]["code"], "invalid", "{}", run.err);
        let said = error["error"]["message"].as_str().unwrap();
        assert!(said.contains(named), "{}", run.err);
        assert!(run.out.is_empty());
    }
    assert!(
        forebay(&["--json", "ls", "--help"])
            .ok()
            .out
            .contains("Usage:")
    );
    assert!(
        forebay(&["get", "--", "--json"])
            .fails(2)
            .err
            .contains("no key")
    );
    let run = forebay(&["get", "data/x", "-", "--json"]).fails(2);
    assert!(run.err.contains("stdout cannot carry both"), "{}", run.err);
    let run = forebay(&["get", "data", "--json"]).fails(2);
    let error: serde_json::Value = serde_json::from_str(&run.err).unwrap();
    assert_eq!(
        (error["error"]["code"].as_str(), run.out.as_str()),
        (Some("invalid"), "")
    );
    assert!(
        error["error"]["hint"]
            .as_str()
            .unwrap()
            .contains("bucket/key")
    );
}

#[test]
fn verbose_shows_the_causes() {
    let run = forebay(&["ls", "--verbose", "--node", "http://127.0.0.1:1"]).fails(1);
    assert!(
        run.err.contains("\ncaused by: Connection refused"),
        "{}",
        run.err
    );
    assert!(
        !forebay(&["ls", "--node", "http://127.0.0.1:1"])
            .err
            .contains("caused by")
    );
}

#[test]
fn an_empty_variable_is_one_that_is_not_set() {
    let told = forebay(&["status", "--ca", ""]).fails(2);
    assert!(told.err.contains("--ca"), "{}", told.err);
    let mut status = command(&["status"]);
    status.env("FOREBAY_NODE", "").env("FOREBAY_CA_FILE", "");
    // What is there by default, which may run here.
    let told = Run::of(status.output().unwrap());
    assert!(
        told.code == 0 || told.err.contains("http://127.0.0.1:8080"),
        "{}",
        told.err
    );
    let mut check = command(&["config", "check", "--origin", "/tmp"]);
    let told = Run::of(check.env("FOREBAY_CONFIG", "").output().unwrap());
    assert_eq!(told.code, 0, "{}", told.err);
    let mut metrics = command(&["metrics"]);
    metrics.env("FOREBAY_NODE", "").env("FOREBAY_ADMIN", "");
    let told = Run::of(metrics.output().unwrap());
    assert!(
        told.code == 0 || told.err.contains("http://127.0.0.1:8080"),
        "{}",
        told.err
    );
}

#[test]
fn distance_is_told_where_the_server_is() {
    for to in ["localhost", "http://127.0.0.1:9000", ":9000", "127.0.0.1:x"] {
        let told = forebay(&["distance", "--to", to]).fails(2);
        assert!(told.err.contains("HOST:PORT"), "{}", told.err);
    }
}

#[test]
fn usage_help_and_version() {
    assert!(forebay(&[]).fails(2).err.contains("Run a node:"));
    let mut with_a_node = command(&[]);
    with_a_node.env("FOREBAY_NODE", "http://127.0.0.1:1");
    let told = Run::of(with_a_node.output().unwrap()).fails(2);
    assert!(told.err.contains("Run a node:"), "{}", told.err);
    let mut without_a_name = command(&["get"]);
    without_a_name.env("FOREBAY_NODE", "http://127.0.0.1:1");
    let told = Run::of(without_a_name.output().unwrap()).fails(2);
    assert!(told.err.contains("Usage: forebay get"), "{}", told.err);
    assert!(!told.err.contains("--node"), "{}", told.err);
    assert!(forebay(&["statu"]).fails(2).err.contains("'status'"));
    let help = forebay(&["--help"]).ok().out;
    for part in [
        "Run a node:",
        "Cache:",
        "Examples:",
        "Exit codes:",
        "--node",
    ] {
        assert!(help.contains(part), "{part} in\n{help}");
    }
    for name in [
        "serve", "ls", "get", "put", "stat", "warm", "pin", "unpin", "evict", "status", "top",
        "config", "version", "distance",
    ] {
        let help = forebay(&[name, "--help"]).ok().out;
        assert!(help.contains(&format!("Usage: forebay {name}")), "{help}");
    }
    assert_eq!(forebay(&["help"]).ok().out, forebay(&["--help"]).ok().out);
    for asked in [
        &["help", "cluster", "init"][..],
        &["--node", "help", "help", "cluster", "init"][..],
        &["help", "help", "cluster", "init"][..],
    ] {
        let help = forebay(asked).ok().out;
        assert!(help.contains("Usage: forebay cluster init"), "{help}");
    }
    assert!(
        forebay(&["help", "statu"])
            .fails(2)
            .err
            .contains("'status'")
    );
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        forebay(&["version"])
            .ok()
            .out
            .starts_with(&format!("forebay {version} ("))
    );
    assert_eq!(
        forebay(&["version", "--json"]).ok().json()["version"],
        version
    );
}

#[test]
fn a_closed_stdout_is_silent_and_a_full_one_is_told() {
    let mut child = command(&["config", "reference"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), output.stderr.as_slice()),
        (Some(0), &b""[..])
    );
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = command(&["config", "reference"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write to stdout"));
}
