//! serve and config: starting, stopping, and what goes wrong at the start.

use super::support::{BUCKET, Node, bytes, command, forebay, names, wait};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Stdio,
    time::{Duration, Instant},
};

#[test]
fn a_person_is_told_where_the_node_is_and_how_to_stop_it() {
    let dir = tempfile::tempdir().unwrap();
    let origin = format!("pics={}", dir.path().display());
    let cache = format!("{}:8MiB", dir.path().join("cache").display());
    let mut child = command(&[
        "serve",
        "--origin",
        &origin,
        "--cache",
        &cache,
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut shown = String::new();
    while !shown.contains("Ctrl-C") {
        assert!(
            out.read_line(&mut shown).unwrap() > 0,
            "ended after\n{shown}"
        );
    }
    for part in [
        "http://127.0.0.1:",
        "forebay.sock",
        "pics",
        "8.0 MiB",
        "boto3",
        "/metrics",
    ] {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
    assert!(!shown.contains('\x1b'));
    let stopped = std::process::Command::new("sh")
        .args(["-c", &format!("kill -TERM {}", child.id())])
        .status()
        .unwrap();
    assert!(stopped.success());
    assert_eq!(wait(&mut child), 0);
}

#[test]
fn sigint_and_sigterm_stop_gracefully_and_the_cache_is_there_again() {
    let mut node = Node::start();
    node.seed("x", &bytes(100_000));
    node.run(&["get", "data/x", "one"]).ok();
    node.signal("TERM");
    assert_eq!(node.wait(), 0);
    let socket = node.ready["unix_socket"].as_str().unwrap().to_owned();
    assert!(
        !std::path::Path::new(&socket).exists(),
        "the socket is taken away"
    );
    let dir = std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap());
    let mut node = Node::start_in(dir, &[]);
    let told = node.run(&["get", "data/x", "two", "--json"]).ok().json();
    assert!(
        matches!(told["cache"].as_str(), Some("HIT" | "REVALIDATED")),
        "{told}"
    );
    node.signal("INT");
    assert_eq!(node.wait(), 0);
}

#[test]
fn an_answer_in_flight_finishes_and_a_second_signal_does_not_wait_for_it() {
    let mut node = Node::start();
    let content = bytes(32 << 20);
    node.seed("big", &content);
    let ask = |node: &Node| {
        let mut stream = TcpStream::connect(node.url.trim_start_matches("http://")).unwrap();
        stream
            .write_all(b"GET /v1/objects/data/big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut first = [0u8; 1];
        stream.read_exact(&mut first).unwrap();
        stream
    };
    // A reader that takes its time gets everything.
    let mut slow = ask(&node);
    node.signal("TERM");
    std::thread::sleep(Duration::from_millis(300));
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).unwrap();
    assert!(
        rest.ends_with(&content[content.len() - 1000..]),
        "{} bytes",
        rest.len()
    );
    assert_eq!(node.wait(), 0);
    // A reader that never reads is not waited for after a second signal.
    let mut node = Node::start();
    node.seed("big", &content);
    let _stuck = ask(&node);
    node.signal("TERM");
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    node.signal("TERM");
    assert_eq!(node.wait(), 1);
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_port_or_a_directory_that_is_taken_is_told() {
    let node = Node::start();
    let origin = format!("data={}", node.path("origin").join(BUCKET).display());
    let taken = node.url.trim_start_matches("http://").to_owned();
    let run = forebay(&[
        "serve", "--origin", &origin, "--listen", &taken, "--admin", "off", "--unix", "off",
    ])
    .fails(1);
    assert!(
        run.err.contains("error: ") && run.err.contains(&taken) && run.err.contains("in use"),
        "{}",
        run.err
    );
    assert!(
        run.err.contains("hint: ") && run.err.contains("--listen"),
        "{}",
        run.err
    );
    let cache = format!("{}:64MiB", node.path("cache").display());
    let args = [
        "serve",
        "--origin",
        &origin,
        "--cache",
        &cache,
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "off",
    ];
    let run = forebay(&args).fails(1);
    assert!(
        run.err.contains(&node.path("cache").display().to_string()) && run.err.contains("hint: "),
        "{}",
        run.err
    );
    // Not a directory at all.
    std::fs::write(node.path("file"), b"").unwrap();
    let cache = format!("{}:64MiB", node.path("file").display());
    let args = [
        "serve",
        "--origin",
        &origin,
        "--cache",
        &cache,
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "off",
    ];
    let run = forebay(&args).fails(1);
    assert!(
        run.err.contains(&node.path("file").display().to_string()),
        "{}",
        run.err
    );
}

#[test]
fn a_node_that_wants_a_token_says_so() {
    let node = Node::start_with(&["--set", "auth.tokens=[\"hush\"]"]);
    node.seed("x", b"secret");
    let refused = node.run(&["ls", "data"]).fails(1);
    assert!(
        refused.err.contains("hint: ") && refused.err.contains("FOREBAY_TOKEN"),
        "{}",
        refused.err
    );
    let output = node
        .command(&["get", "data/x", "-"])
        .env("FOREBAY_TOKEN", "hush")
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout == b"secret");
    // The socket is guarded by its file permissions.
    let socket = format!("unix:{}", node.ready["unix_socket"].as_str().unwrap());
    node.run(&["ls", "data", "--node", &socket]).ok();
}

#[test]
fn a_bucket_that_cannot_be_reached_is_a_warning() {
    // Nothing listens there: the node starts all the same, and says so when it is asked.
    let mut node = Node::start_with(&[
        "--origin",
        "far=s3://far?endpoint=http://127.0.0.1:1&anonymous=true",
        "--set",
        "limits.drain_timeout=1s",
    ]);
    // The last --origin adds to the one that the node has by itself.
    node.seed("x", b"near");
    assert_eq!(node.run(&["get", "data/x", "-"]).ok().out, "near");
    node.signal("TERM");
    assert_eq!(node.wait(), 0);
}

#[test]
fn a_configuration_is_checked_and_shown() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("forebay.toml");
    let path = file.to_str().unwrap();
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    write(
        "[[origins]]\nurl = \"s3://photos\"\n[cache]\ndirs = [\"/x:1GiB\"]\n[auth]\ntokens = \
         [\"hush\"]\n",
    );
    let checked = forebay(&["config", "check", "--config", path]).ok().out;
    assert!(
        checked.starts_with("warning: auth.tokens") || checked.starts_with("warning: auth.keys"),
        "{checked}"
    );
    assert!(checked.ends_with("ok, with warnings\n"), "{checked}");
    assert_eq!(
        forebay(&["config", "check", "--config", path, "--json"])
            .ok()
            .json()["ok"],
        true
    );
    let shown = forebay(&[
        "config",
        "show",
        "--config",
        path,
        "--listen",
        "127.0.0.1:9",
    ])
    .ok()
    .out;
    assert!(
        shown.contains("s3 = \"127.0.0.1:9\"  # --listen")
            && shown.contains("s3://photos")
            && !shown.contains("hush"),
        "{shown}"
    );
    let shown = forebay(&["config", "show", "--config", path, "--json"]).ok();
    assert_eq!(shown.json()["cache"]["dirs"][0], "/x:1GiB");
    assert!(!shown.out.contains("hush"));
    let from_env = command(&["config", "show"])
        .env("FOREBAY_CONFIG", path)
        .env("FOREBAY__LISTEN__ADMIN", "off")
        .output()
        .unwrap();
    let text = String::from_utf8(from_env.stdout).unwrap();
    assert!(
        text.contains("admin = \"off\"  # FOREBAY__LISTEN__ADMIN") && text.contains("s3://photos"),
        "{text}"
    );
    // An unknown key, with the nearest one.
    write("[[origins]]\nurl = \"s3://photos\"\n\n[cache]\nfreshnes = \"60s\"\n");
    let run = forebay(&["config", "check", "--config", path]).fails(1);
    assert!(
        run.err.contains("line 5")
            && run.err.contains("freshnes")
            && run.err.contains("hint: did you mean \"freshness\""),
        "{}",
        run.err
    );
    let told = forebay(&["config", "check", "--config", path, "--json"])
        .fails(1)
        .json();
    assert_eq!(told["ok"], false);
    assert!(
        told["problems"][0]["hint"]
            .as_str()
            .unwrap()
            .contains("freshness")
    );
    // Every value is readable, but they make no sense together.
    write("[listen]\ns3 = \"0.0.0.0:8080\"\n[[origins]]\nurl = \"s3://photos\"\n");
    let run = forebay(&["config", "check", "--config", path]).fails(1);
    assert!(
        run.out.contains("error: ") && run.out.contains("hint: "),
        "{}",
        run.out
    );
    assert!(
        forebay(&["config", "reference"])
            .ok()
            .out
            .starts_with("# Configuration")
    );
    assert!(
        names(dir.path()) == ["forebay.toml"],
        "checking creates nothing"
    );
}
