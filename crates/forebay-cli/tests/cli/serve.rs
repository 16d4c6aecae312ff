//! serve and config: starting, stopping, and what goes wrong at the start.

use super::support::{BUCKET, Node, binary, bytes, command, forebay, names, until, wait};
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
fn who_listens_on_all_addresses_is_told_one_to_connect_to() {
    let everywhere = ["--listen", "0.0.0.0:0", "--set", "auth.anonymous=true"];
    let (dir, file) = configured("");
    let mut serve = command(&["serve", "--json", "--config", file.to_str().unwrap()]);
    serve.args(everywhere);
    let node = Node::start_as(dir, serve);
    assert!(node.url.starts_with("http://127.0.0.1:"), "{}", node.url);
    let listens = node.ready["s3"].as_str().unwrap();
    assert!(listens.starts_with("0.0.0.0:"), "{listens}");
    node.run(&["ls"]).ok();

    let (_dir, file) = configured("");
    let mut child = command(&["serve", "--config", file.to_str().unwrap()])
        .args(everywhere)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
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
    child.kill().unwrap();
    child.wait().unwrap();
    let line = |name: &str| {
        let mut lines = shown.lines();
        lines.find(|l| l.trim_start().starts_with(name)).unwrap()
    };
    let endpoint = line("endpoint");
    assert!(
        endpoint.contains("http://127.0.0.1:") && endpoint.contains("all addresses"),
        "{shown}"
    );
    assert!(!line("admin").contains("all addresses"), "{shown}");
    assert!(!shown.contains("0.0.0.0"), "{shown}");
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
    // A slow reader gets everything.
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
    // After a second signal, the node does not wait for a reader that never reads.
    let mut node = Node::start();
    node.seed("big", &content);
    let _stuck = ask(&node);
    node.signal("TERM");
    // Two signals that come before it has seen the first are one.
    let at = node.url.trim_start_matches("http://").to_owned();
    until("it takes nothing new", || TcpStream::connect(&at).is_err());
    let began = Instant::now();
    node.signal("TERM");
    assert_eq!(node.wait(), 1);
    assert!(began.elapsed() < Duration::from_secs(20));
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
    assert_eq!(run.err.matches("of its own").count(), 1, "{}", run.err);
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
        run.err.contains(&node.path("file").display().to_string()) && run.err.contains("os error"),
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
    // File permissions guard the socket.
    let socket = format!("unix:{}", node.ready["unix_socket"].as_str().unwrap());
    node.run(&["ls", "data", "--node", &socket]).ok();
}

#[test]
fn a_bucket_that_cannot_be_reached_is_a_warning() {
    // Nothing listens there: the node still starts, and reports it when it is used.
    let mut node = Node::start_with(&[
        "--origin",
        "far=s3://far?endpoint=http://127.0.0.1:1&anonymous=true",
        "--set",
        "limits.drain_timeout=1s",
    ]);
    // The last --origin adds to the one that the node has already.
    node.seed("x", b"near");
    assert_eq!(node.run(&["get", "data/x", "-"]).ok().out, "near");
    node.signal("TERM");
    assert_eq!(node.wait(), 0);
}

#[test]
fn where_the_settings_want_json_every_line_of_the_log_is_json() {
    let dir = tempfile::tempdir().unwrap();
    // Without a cache and with a bucket that nobody serves, there is something to warn of.
    let mut child = command(&[
        "serve",
        "--origin",
        "far=s3://far?endpoint=http://127.0.0.1:1&anonymous=true",
        "--set",
        "log.format=json",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "off",
        "--unix",
        "off",
    ])
    .current_dir(dir.path())
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
    let stopped = std::process::Command::new("sh")
        .args(["-c", &format!("kill -TERM {}", child.id())])
        .status()
        .unwrap();
    assert!(stopped.success());
    let mut log = String::new();
    let mut err = child.stderr.take().unwrap();
    err.read_to_string(&mut log).unwrap();
    assert_eq!(wait(&mut child), 0);
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e} in:\n{l}")))
        .collect();
    assert!(lines.iter().any(|l| l["level"] == "WARN"), "{log}");
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
    // An unknown key, with the nearest known one.
    write("[[origins]]\nurl = \"s3://photos\"\n\n[cache]\nfreshnes = \"60s\"\nsize = 3\n");
    let run = forebay(&["config", "check", "--config", path]).fails(1);
    assert!(
        run.out.contains("line 5")
            && run.out.contains("line 6")
            && run.out.contains("freshnes")
            && run.out.contains("hint: did you mean \"freshness\""),
        "{}",
        run.out
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

/// A directory with a bucket and a configuration file that serves it, with `more` appended.
fn configured(more: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("origin/data")).unwrap();
    std::fs::create_dir_all(dir.path().join("origin/more")).unwrap();
    let file = dir.path().join("forebay.toml");
    configure(dir.path(), &["data"], more);
    (dir, file)
}

fn configure(dir: &std::path::Path, buckets: &[&str], more: &str) {
    let mut text = format!(
        "listen = {{ s3 = \"127.0.0.1:0\", admin = \"127.0.0.1:0\" }}\ncache.dirs = [\"{}:64MiB\"]\n",
        dir.join("cache").display()
    );
    for bucket in buckets {
        let path = dir.join("origin").join(bucket);
        text += &format!("[[origins]]\nurl = \"{}\"\n", path.display());
    }
    std::fs::write(dir.join("forebay.toml"), text + more).unwrap();
}

#[test]
fn sighup_takes_over_what_a_running_node_can_and_names_the_rest() {
    let (dir, file) = configured("[log]\nlevel = \"warn\"\n");
    let serve = command(&["serve", "--json", "--config", file.to_str().unwrap()]);
    let mut node = Node::start_as(dir, serve);
    node.seed("x", b"here");
    let more = node.path("origin/more/y");
    std::fs::write(more, b"there").unwrap();
    assert_eq!(node.run(&["get", "data/x", "-"]).ok().out, "here");
    node.run(&["get", "more/y", "-"]).fails(1);
    let reloaded = |times: f64| {
        until("it is read again", || {
            node.metric("forebay_reloads_total{what=\"configuration\"}") >= times
        });
    };

    // Keys, a bucket, limits and the log level are taken over; everything else is named.
    let tokens = "[auth]\ntokens = [\"hush\"]\n";
    configure(
        node.dir.path(),
        &["data", "more"],
        &format!(
            "{tokens}[limits]\nrequests_in_flight = 77\n[log]\nlevel = \"info\"\n[batch]\nattempts \
             = 9\n"
        ),
    );
    node.signal("HUP");
    reloaded(1.0);
    node.run(&["ls", "data"]).fails(1);
    let with_token = |args: &[&str]| {
        let mut command = node.command(args);
        let output = command.env("FOREBAY_TOKEN", "hush").output().unwrap();
        (output.status.success(), output.stdout)
    };
    assert_eq!(
        with_token(&["get", "more/y", "-"]),
        (true, b"there".to_vec())
    );
    assert_eq!(
        with_token(&["get", "data/x", "-"]),
        (true, b"here".to_vec())
    );
    let waiting = || -> Vec<String> {
        let log = node.log();
        let named = log.iter().filter_map(|l| l["setting"].as_str());
        named.map(str::to_owned).collect()
    };
    until("the log says so", || !waiting().is_empty());
    assert_eq!(waiting(), ["batch.attempts"]);
    assert_eq!(node.metric("forebay_settings_waiting_for_restart"), 1.0);
    // Before, there were no lines of this level.
    until("lines at info", || {
        node.log().iter().any(|l| l["level"] == "INFO")
    });

    // A configuration that cannot be used changes nothing.
    let stale = || node.metric("forebay_reload_stale{what=\"configuration\"}");
    for (i, (buckets, broken, why)) in [
        (&["data", "more"][..], "[[[", "forebay.toml, line"),
        (&["data", "more"], "[auth]\ntokenz = 1\n", "tokenz"),
        (&["data"], "", "the new configuration has no keys"),
        (
            &["data"],
            "[auth]\nkeys_file = \"/no/such/file\"\n",
            "/no/such/file",
        ),
        (&["nowhere"], tokens, "nowhere"),
    ]
    .into_iter()
    .enumerate()
    {
        configure(node.dir.path(), buckets, broken);
        node.signal("HUP");
        until(why, || {
            node.metric("forebay_reloads_failed_total{what=\"configuration\"}") >= (i + 1) as f64
        });
        assert_eq!(stale(), 1.0, "{why}");
        assert!(with_token(&["get", "more/y", "-"]).0, "{why}");
        until(why, || {
            let is_it = |l: &serde_json::Value| {
                l["level"] == "ERROR" && l["error"].as_str().is_some_and(|e| e.contains(why))
            };
            node.log().iter().any(is_it)
        });
    }

    // A bucket is removed, and the settings that waited no longer wait.
    configure(node.dir.path(), &["data"], tokens);
    node.signal("HUP");
    reloaded(2.0);
    assert_eq!(
        (stale(), node.metric("forebay_settings_waiting_for_restart")),
        (0.0, 0.0)
    );
    assert!(!with_token(&["get", "more/y", "-"]).0 && with_token(&["get", "data/x", "-"]).0);
    node.signal("TERM");
    assert_eq!(node.wait(), 0);
}

#[test]
fn sighup_never_ends_a_node() {
    let mut node = Node::start();
    for _ in 0..3 {
        node.signal("HUP");
    }
    until("it is read again", || {
        node.metric("forebay_reloads_total{what=\"configuration\"}") >= 1.0
    });
    node.run(&["ls"]).ok();
    node.signal("TERM");
    assert_eq!(node.wait(), 0);
}

#[test]
fn the_log_and_the_metrics_say_who_asked() {
    let keys = "[[auth.keys]]\nname = \"nightly\"\ntoken = \"hush-1\"\n[[auth.keys]]\naccess_key = \
                \"AK\"\nsecret_key = \"s3cr3t\"\ntoken = \"hush-2\"\n";
    let (dir, file) = configured(keys);
    let serve = command(&["serve", "--json", "--config", file.to_str().unwrap()]);
    let node = Node::start_as(dir, serve);
    node.seed("x", b"12345");
    for (token, code) in [("hush-1", 0), ("hush-2", 0), ("wrong", 1)] {
        let mut command = node.command(&["stat", "data/x"]);
        let status = command.env("FOREBAY_TOKEN", token).output().unwrap().status;
        assert_eq!(status.code(), Some(code));
    }
    let admin = node.ready["admin"].as_str().unwrap();
    let page = node.run(&["metrics", "--admin", admin]).ok().out;
    for caller in ["nightly", "AK"] {
        let who = |l: &serde_json::Value| {
            l["caller"] == caller
                && l["bucket"] == "data"
                && l["user_agent"].as_str().unwrap().starts_with("forebay/")
        };
        until(caller, || node.log().iter().any(who));
        let labels = format!("bucket=\"data\",caller=\"{caller}\"}}");
        assert!(page.contains(&labels), "{labels} in\n{page}");
    }
    let log = node
        .log()
        .iter()
        .map(ToString::to_string)
        .collect::<String>();
    assert!(!log.contains("hush") && !log.contains("s3cr3t"));
    // A client of AIStore finds it in the error.
    let mut stream = TcpStream::connect(node.url.trim_start_matches("http://")).unwrap();
    stream
        .write_all(
            b"GET /v1/objects/data/none HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \
              hush-1\r\nconnection: close\r\n\r\n",
        )
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\"caller\":\"nightly\""), "{answer}");
}

/// `forebay serve`, started by a shell that has set this limit.
fn limited(limit: &str, config: &std::path::Path) -> std::process::Command {
    let mut serve = std::process::Command::new("sh");
    let line = format!(
        "ulimit {limit}; exec {} serve --json --config {}",
        binary().display(),
        config.display()
    );
    serve.args(["-c", &line]);
    serve
}

#[test]
fn a_limit_on_the_size_of_files_is_a_disk_that_refuses_writes() {
    let (dir, file) = configured("");
    // In blocks of 512 bytes, or of 1,024.
    let mut node = Node::start_as(dir, limited("-f 64", &file));
    let body = vec![7u8; 3 << 20];
    node.seed("x", &body);
    for _ in 0..2 {
        let got = node.command(&["get", "data/x", "-"]).output().unwrap();
        assert!(got.status.success() && got.stdout == body);
    }
    node.signal("TERM");
    node.wait();
}

#[test]
fn with_few_files_the_node_takes_fewer_connections_and_goes_on_working() {
    let (dir, file) = configured("");
    let node = Node::start_as(dir, limited("-n 256", &file));
    node.seed("x", b"12345");
    let ask = |stream: &mut TcpStream| {
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let _ = stream.write_all(b"GET /v1/objects/data/x HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut head = [0; 12];
        stream
            .read_exact(&mut head)
            .map(|()| String::from_utf8_lossy(&head).into_owned())
    };
    let address = node.url.trim_start_matches("http://");
    let mut open: Vec<TcpStream> = (0..370)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let answers: Vec<_> = open.iter_mut().map(ask).collect();
    let of = |status: &str| {
        let is_it = |a: &&std::io::Result<String>| a.as_ref().is_ok_and(|a| a.ends_with(status));
        answers.iter().filter(is_it).count()
    };
    assert_eq!((of("200"), of("503")), (92, 278), "{answers:?}");
    // Clients inside and the monitoring are served while the others try.
    open.truncate(92);
    assert_eq!(
        node.metric("forebay_connections_open{listener=\"tcp\"}"),
        92.0
    );
    assert!(node.metric("process_max_fds") <= 256.0);
    let accept_errors = |l: &&serde_json::Value| {
        let told = l["message"].as_str().unwrap_or_default();
        told.contains("could not be accepted")
    };
    assert!(node.log().iter().filter(accept_errors).count() <= 1);
}
