//! `forebay cluster plan`: the design's bounds on spread and moves, as the command prints them;
//! `forebay cluster map`; and the files of `forebay cluster init` and `certify`.

use crate::support::{Run, command, forebay, names};
use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, TcpListener},
    os::unix::fs::PermissionsExt,
    path::Path,
};
use tempfile::TempDir;

#[test]
fn a_plan_moves_hardly_more_than_it_has_to() {
    for (change, least) in [
        (["--add", "8"], 8.0 / 72.0),
        (["--remove", "4"], 4.0 / 64.0),
    ] {
        let mut args = vec!["--json", "cluster", "plan", "--nodes", "64"];
        args.extend(["--zones", "3", "--capacity", "1TiB", "--rate", "1GiB"]);
        args.extend(change);
        let plan = forebay(&args).ok().json();
        let number = |name: &str| plan[name].as_f64().unwrap_or_else(|| panic!("{plan:#}"));
        assert!(number("max_over_mean") <= 1.10, "{plan:#}");
        assert!((number("least") - least).abs() < 1e-9, "{plan:#}");
        assert!(number("moved") <= 1.05 * number("least"), "{plan:#}");
        assert_eq!(number("between_others"), 0.0);
        assert!(number("seconds") > 0.0);
    }
    let still = forebay(&["--json", "cluster", "plan", "--nodes", "3"]).ok();
    assert!(still.json().get("moved").is_none());
}

#[test]
fn a_plan_says_what_it_takes() {
    let run = forebay(&["cluster", "plan", "--nodes", "64", "--add", "8"]).ok();
    for part in ["of the mean", "must; between other nodes 0.00 %", "minutes"] {
        assert!(run.out.contains(part), "{}", run.out);
    }
}

#[test]
fn simulated_clusters_keep_what_is_promised_and_are_their_seeds() {
    let args = [
        "cluster",
        "plan",
        "--nodes",
        "6",
        "--changes",
        "2",
        "--seed",
        "7",
        "--simulate",
    ];
    let with = |more: &[&'static str]| [more, &args, &["2"]].concat();
    let said = forebay(&with(&[])).ok().out;
    assert!(
        said.contains("lived    2 clusters of 5 to 6 nodes"),
        "{said}"
    );
    assert!(said.contains("broken   0"), "{said}");
    let found = forebay(&with(&["--json"])).ok().json();
    assert_eq!(
        (&found["clusters"], &found["broken"]),
        (&2.into(), &serde_json::json!([]))
    );
    let checks = found["checks"].as_u64().unwrap();
    assert!(checks > 1_000_000, "{found:#}");
    // The same seeds, the same lives.
    let told = said.split(" maps, ").nth(1).unwrap().replace(',', "");
    assert!(
        told.starts_with(&format!("{checks} checks")),
        "{checks} in {said}"
    );
}

#[test]
fn a_map_is_followed_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("map.json");
    let (a, b) = ("a=10.0.0.1:8300,2TiB", "b=host:8300,1TiB,rack-2");
    let first = forebay(&["cluster", "map", "training", "--member", a, "--member", b]).ok();
    let map = first.json();
    assert_eq!(
        (&map["cluster"], &map["epoch"]),
        (&"training".into(), &1.into())
    );
    assert_eq!(map["members"].as_array().unwrap().len(), 2);
    std::fs::write(&file, &first.out).unwrap();
    let after = file.to_str().unwrap();
    let next = forebay(&[
        "cluster", "map", "training", "--after", after, "--member", b,
    ])
    .ok();
    let next = next.json();
    assert_eq!((&next["epoch"], &next["seed"]), (&2.into(), &map["seed"]));
    assert_eq!(next["members"][0]["address"], "host:8300");
    assert_eq!(next["members"][0]["zone"], "rack-2");
}

/// `forebay cluster …` in a directory, where variables name a node and a CA for other commands.
fn cluster(dir: &TempDir, args: &str) -> Run {
    let args: Vec<&str> = ["cluster"].into_iter().chain(args.split(' ')).collect();
    let mut command = command(&args);
    command
        .current_dir(dir.path())
        .env("FOREBAY_NODE", "http://elsewhere:1")
        .env("FOREBAY_CA_FILE", "/none/ca.pem");
    Run::of(command.output().expect("the binary runs"))
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_cluster_is_made_with_a_certificate_for_each_node() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    let run = cluster(&dir, "init training --node a --node b.example --node c");
    let said = run.ok().out;
    assert_eq!(names(dir.path()), ["training"], "and nothing beside it");
    let made = ["a", "b.example", "c", "ca.key", "ca.pem"];
    assert_eq!(names(&at("training")), made);
    assert_eq!(mode(&at("training")), 0o700);
    assert_eq!(mode(&at("training/ca.pem")), 0o644);
    assert_eq!(mode(&at("training/ca.key")), 0o600);
    let ca = fs::read(at("training/ca.pem")).unwrap();
    for node in ["a", "b.example", "c"] {
        let own = at("training").join(node);
        assert_eq!(names(&own), ["ca.pem", "node.key", "node.pem"]);
        assert_eq!((mode(&own), mode(&own.join("node.key"))), (0o700, 0o600));
        assert_eq!(fs::read(own.join("ca.pem")).unwrap(), ca);
    }
    for part in [
        "training/ca.key  ",
        "  [cluster]\n  node = \"a\"\n  ca = \"/etc/forebay/cluster/ca.pem\"",
        "  [listen]\n  peer = \"0.0.0.0:8300\"",
        "map = \"etcd://HOST:2379/training\"",
    ] {
        assert!(said.contains(part), "{part} is missing in:\n{said}");
    }
}

#[test]
fn a_cluster_whose_sizes_are_known_has_a_map_too() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = "--node a=10.0.0.1:9300,2TiB --node b=host:9300,1TiB,rack-2";
    let init = format!("--json init training {nodes} --out files --days 30 --ca-days 20");
    let made = cluster(&dir, &init).ok().json();
    assert_eq!(made["cluster"], "training");
    assert_eq!(made["map"], "files/map.json");
    let b = &made["nodes"][1];
    assert_eq!(
        (&b["name"], &b["address"]),
        (&"b".into(), &"host:9300".into())
    );
    assert_eq!(b["cert"], "files/b/node.pem");
    // No certificate outlives its CA.
    assert_eq!(b["shortened"], true);
    assert_eq!(b["not_after"], made["ca"]["not_after"]);

    // It is the map that `forebay cluster map` makes.
    let map = "map training --member a=10.0.0.1:9300,2TiB --member b=host:9300,1TiB,rack-2";
    let map = cluster(&dir, map).ok().out;
    let written = fs::read_to_string(dir.path().join("files/map.json")).unwrap();
    assert_eq!(written, map.trim_end());

    let said = cluster(
        &dir,
        "init other --node a=10.0.0.1:9300 --days 9 --ca-days 8",
    );
    let said = said.ok().out;
    assert!(said.contains("peer = \"0.0.0.0:9300\""), "{said}");
    assert!(said.contains("only: the CA expires then"), "{said}");
}

#[test]
fn what_init_cannot_make_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("taken"), "").unwrap();
    let long = "n".repeat(65);
    for (code, args, said) in [
        (2, "init c --node ../a", "\"../a\""),
        (2, "init c --node .a", "\".a\""),
        (2, "init c --node -a", "-a"),
        (2, "init c --node a --node ä", "ä"),
        (2, "init ../c --node a", "\"../c\""),
        (2, "init c --node a --node b --node a", "a is named twice"),
        (
            2,
            "init c --node a --node A",
            "the node A: its name differs from a only in case",
        ),
        (2, "init c --node Ca.Key", "Ca.Key"),
        (2, "init c --node map.json", "map.json"),
        (2, &format!("init c --node {long}"), "65 characters"),
        (
            2,
            &format!("init {} --node a", &long[..62]),
            "62 characters",
        ),
        (2, "init c --node a=host", "\"host\" is not HOST:PORT"),
        (2, "init c --node a=h:1,much", "a=h:1,much"),
        (
            2,
            "init c --node a=h:1,1TiB --node b=h:2",
            "--node b: no size",
        ),
        (2, "init c --node a --days 0", "--days"),
        (2, "init c", "--node"),
        (1, "init taken --node a", "taken exists already"),
        (
            1,
            "init c --node a --out none/c",
            "none: no such file or directory",
        ),
    ] {
        let run = cluster(&dir, args).fails(code);
        assert!(run.err.contains(said), "{args}: {}", run.err);
        assert!(!run.err.contains("cluster.c"), "{args}: {}", run.err);
        assert_eq!(names(dir.path()), ["taken"], "{args}");
    }
    // The longest that fit.
    let (cluster_name, node) = (&long[..61], &long[..64]);
    cluster(&dir, &format!("init {cluster_name} --node {node}")).ok();
}

#[test]
fn certificates_are_renewed_and_nodes_join() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    let all = |node: &str| {
        let files = ["ca.pem", "node.pem", "node.key"];
        files.map(|file| fs::read(at("c").join(node).join(file)).unwrap())
    };
    cluster(&dir, "init c --node a --node b --ca-days 100").ok();
    let (a, b) = (all("a"), all("b"));
    let made = cluster(&dir, "--json certify --ca c a d --days 90")
        .ok()
        .json();
    let of = |i: usize, what: &str| made["nodes"][i][what].clone();
    assert_eq!((of(0, "name"), of(0, "new")), ("a".into(), false.into()));
    assert_eq!((of(1, "name"), of(1, "new")), ("d".into(), true.into()));
    assert_eq!(
        (of(0, "shortened"), of(1, "cert")),
        (false.into(), "c/d/node.pem".into())
    );
    assert_eq!(names(&at("c")), ["a", "b", "ca.key", "ca.pem", "d"]);
    assert_eq!(
        (mode(&at("c/d")), mode(&at("c/a/node.key"))),
        (0o700, 0o600)
    );
    let new = all("a");
    assert!(new[0] == a[0] && new[1] != a[1] && new[2] != a[2]);
    assert_eq!(all("b"), b, "it was not named");
    let said = cluster(&dir, "certify --ca c b --days 101").ok().out;
    assert!(said.contains("only: the CA expires then"), "{said}");

    // All or none: the second one cannot be made.
    let before = all("a");
    fs::write(at("c/b/notes"), "").unwrap();
    for (code, args, said) in [
        (
            1,
            "--ca c a b",
            "c/b/notes: it is not one of a node's files",
        ),
        (2, "--ca c a ca.key", "ca.key"),
        (
            2,
            "--ca c a D",
            "the node D: its name differs from d only in case",
        ),
        (2, "--ca c a ../b", "\"../b\""),
        (2, "--ca c", "NODE"),
        (2, "a", "--ca"),
        (1, "--ca none a", "none/ca.pem cannot be read"),
        (1, "--ca c/a a", "c/a/ca.key cannot be read"),
    ] {
        let run = cluster(&dir, &format!("certify {args}")).fails(code);
        assert!(run.err.contains(said), "{args}: {}", run.err);
    }
    fs::copy(at("c/a/node.key"), at("c/ca.key")).unwrap();
    let run = cluster(&dir, "certify --ca c a").fails(1);
    assert!(run.err.contains("c/ca.pem and c/ca.key: "), "{}", run.err);
    assert!(all("a") == before && names(&at("c")) == ["a", "b", "ca.key", "ca.pem", "d"]);
}

/// A node that answers one connection after the other with these, or with nothing.
fn scripted(answers: Vec<Option<String>>) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let serve = move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            if let Some(answer) = answer {
                let _ = stream.read(&mut [0; 4096]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                // What was sent and not read would break the connection.
                let _ = stream.read_to_end(&mut Vec::new());
            }
        }
    };
    (at, std::thread::spawn(serve))
}

#[test]
fn who_waits_for_a_drain_goes_on_while_the_node_is_started_again() {
    let answer = |status: &str, body: &str| {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nx-request-id: r");
        Some(format!("{head}\r\nconnection: close\r\n\r\n{body}"))
    };
    let told = |drained: bool| {
        let member = serde_json::json!({"name": "c", "state": "draining", "drained": drained});
        let body = serde_json::json!({"cluster": "test", "members": [member]});
        answer("200 OK", &body.to_string())
    };
    let stops = answer("503 Service Unavailable", "");
    let (at, node) = scripted(vec![told(false), stops, None, told(true)]);
    let drain = ["cluster", "drain", "c", "--wait", "--json", "--node", &at];
    let drained = forebay(&drain).ok().json();
    assert_eq!(drained["members"][0]["drained"], true);
    node.join().unwrap();
    // One that was never there is not waited for.
    assert!(forebay(&drain).fails(1).err.contains("cannot connect"));
}
