//! ls, get, put, stat.

use super::support::{BUCKET, Node, bytes, forebay, names};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};

#[test]
fn buckets_and_objects_are_listed() {
    let node = Node::start();
    for i in 0..5 {
        node.seed(&format!("train/{i}.jpg"), &bytes(100 + i));
    }
    node.seed("readme.txt", b"hello");
    assert_eq!(node.run(&["ls"]).ok().out, "data/\n");
    assert_eq!(node.run(&["ls", "--json"]).ok().json()["bucket"], BUCKET);
    assert_eq!(
        node.run(&["ls", "data"]).ok().out,
        "       5 B * data/readme.txt\n             data/train/\n"
    );
    let levels = node.run(&["ls", "data", "--json"]).ok().json_lines();
    assert_eq!(
        levels[1],
        serde_json::json!({"bucket": "data", "prefix": "train/"})
    );
    let all = node.run(&["ls", "data", "-r"]).ok().out;
    assert_eq!(all.lines().count(), 6, "{all}");
    assert!(all.contains("5 B * data/readme.txt\n"), "{all}");
    let train = node
        .run(&["ls", "s3://data/train/", "--json", "--limit", "3"])
        .ok()
        .json_lines();
    assert_eq!(train.len(), 3);
    assert_eq!(
        train[1],
        serde_json::json!({"bucket": "data", "key": "train/1.jpg", "size": 101, "cached": true})
    );
    let nothing = node.run(&["ls", "data/nothing/"]).fails(1);
    assert_eq!(nothing.out, "");
    assert!(
        nothing
            .err
            .starts_with("error: nothing there: data/nothing/\nhint: "),
        "{}",
        nothing.err
    );
}

#[test]
fn a_long_listing_comes_in_pages() {
    let node = Node::start();
    for i in 0..2345 {
        node.seed(&format!("n/{i:05}"), b"");
    }
    let all = node.run(&["ls", "data/n/", "--json"]).ok().json_lines();
    assert_eq!(all.len(), 2345);
    assert_eq!(all[2344]["key"], "n/02344");
    assert_eq!(
        node.run(&["ls", "data", "-r", "--limit", "1001"])
            .ok()
            .out
            .lines()
            .count(),
        1001
    );
}

#[test]
fn an_object_arrives_whole() {
    let node = Node::start();
    let content = bytes(3 << 20);
    node.seed("a/big file+ü.bin", &content);
    let shown = node.run(&["get", "data/a/big file+ü.bin"]).ok().out;
    assert!(
        shown.starts_with("big file+ü.bin  3,145,728 bytes  MISS  "),
        "{shown}"
    );
    assert_eq!(std::fs::read(node.path("big file+ü.bin")).unwrap(), content);
    let told = node
        .run(&["get", "data/a/big file+ü.bin", "copy", "--json"])
        .ok()
        .json();
    assert_eq!(
        (
            told["bytes"].as_u64(),
            told["cache"].as_str(),
            told["file"].as_str()
        ),
        (Some(3 << 20), Some("HIT"), Some("copy"))
    );
    assert_eq!(std::fs::read(node.path("copy")).unwrap(), content);
    // To stdout, and by name over the socket.
    let socket = format!("unix:{}", node.ready["unix_socket"].as_str().unwrap());
    let output = node
        .command(&["get", "data/a/big file+ü.bin", "-", "--node", &socket])
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout == content);
    // Into a directory.
    std::fs::create_dir(node.path("sub")).unwrap();
    node.run(&["get", "data/a/big file+ü.bin", "sub"]).ok();
    assert_eq!(names(&node.path("sub")), ["big file+ü.bin"]);
}

#[test]
fn ranges_and_members() {
    let node = Node::start();
    let content = bytes(10_000);
    node.seed("x.bin", &content);
    for (range, expected) in [
        ("0-99", &content[..100]),
        ("9990-", &content[9990..]),
        ("-7", &content[9993..]),
    ] {
        node.run(&["get", "data/x.bin", "part", "--range", range])
            .ok();
        assert_eq!(
            std::fs::read(node.path("part")).unwrap(),
            expected,
            "{range}"
        );
    }
    node.run(&["get", "data/x.bin", "part", "--range", "20000-"])
        .fails(1);
    // An archive made by the system's tar.
    std::fs::create_dir(node.path("in")).unwrap();
    std::fs::write(node.path("in/one.txt"), b"first").unwrap();
    std::fs::write(node.path("in/two.txt"), &content).unwrap();
    let made = Command::new("tar")
        .args(["cf"])
        .arg(node.origin_path("s.tar"))
        .args(["-C"])
        .arg(node.path("in"))
        .args(["one.txt", "two.txt"])
        .status();
    assert!(made.unwrap().success());
    node.run(&["get", "data/s.tar", "--member", "two.txt"]).ok();
    assert_eq!(std::fs::read(node.path("two.txt")).unwrap(), content);
    let part = node
        .run(&[
            "get",
            "data/s.tar",
            "--member",
            "one.txt",
            "--range",
            "1-3",
            "-",
        ])
        .ok();
    assert_eq!(part.out, "irs");
    let missing = node
        .run(&["get", "data/s.tar", "--member", "three.txt"])
        .fails(1);
    let members = node
        .run(&["ls", "data/s.tar", "--members", "--json"])
        .ok()
        .json_lines();
    assert_eq!(
        members[2],
        serde_json::json!({"bucket": "data", "key": "s.tar/two.txt", "size": 10_000, "member": true})
    );
    assert!(
        missing.err.starts_with("error: ")
            && missing.err.contains("three.txt")
            && missing.err.contains("ls data/s.tar -m"),
        "{}",
        missing.err
    );
    assert!(!node.path("three.txt").exists());
}

#[test]
fn a_transfer_that_breaks_off_leaves_no_file() {
    let node = Node::start();
    std::fs::create_dir(node.path("to")).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        // The first request asks for the node's info, the second for the object; each is answered
        // on its own connection. Without an ETag, nothing shows what would continue the answer.
        for answer in [
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            "HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-length: 1000\r\n\r\nonly this",
        ] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = [0u8; 4096];
            let _ = std::io::Read::read(&mut stream, &mut head).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let cut = node.run(&["get", "data/x", "to/x", "--node", &at]).fails(1);
    server.join().unwrap();
    assert!(
        cut.err.starts_with("error: the answer broke off"),
        "{}",
        cut.err
    );
    assert!(
        names(&node.path("to")).is_empty(),
        "{:?}",
        names(&node.path("to"))
    );
}

/// Stands before a node, and keeps the heads of the requests for objects. Of the answer to the nth
/// of them it passes on only `cuts[n]` bytes; those of further ones pass whole. `before` is called
/// with the number of each.
fn cutting(
    node: &Node,
    cuts: &'static [u64],
    before: impl Fn(usize) + Send + 'static,
) -> (String, Arc<Mutex<Vec<String>>>) {
    let to = node.url.strip_prefix("http://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let heads = Arc::new(Mutex::new(Vec::new()));
    let asked = heads.clone();
    std::thread::spawn(move || {
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).unwrap();
            // Or the command would find the node's socket, and go there.
            if head.contains("/v1/forebay/info") {
                let none =
                    "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(none.as_bytes()).unwrap();
                continue;
            }
            let number = asked.lock().unwrap().len();
            before(number);
            let once = head.replacen("\r\n", "\r\nconnection: close\r\n", 1);
            asked.lock().unwrap().push(head);
            let mut node = TcpStream::connect(&to).unwrap();
            node.write_all(once.as_bytes()).unwrap();
            let most = cuts.get(number).copied().unwrap_or(u64::MAX);
            let _ = std::io::copy(&mut node.take(most), &mut stream);
        }
    });
    (at, heads)
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_stopped() {
    let node = Node::start();
    let content = bytes(3 << 20);
    node.seed("x", &content);
    // The second time before there is an answer.
    let (at, heads) = cutting(&node, &[1 << 20, 0, 1 << 20], |_| {});
    let told = node.run(&["get", "data/x", "--node", &at, "--json"]).ok();
    let told = told.json();
    assert_eq!(told["bytes"], 3 << 20);
    assert!(std::fs::read(node.path("x")).unwrap() == content);
    let heads = heads.lock().unwrap();
    let field = |head: &str, name: &str| {
        let value = head.lines().find_map(|line| line.strip_prefix(name));
        value.map(|value| value.trim().to_owned())
    };
    let ranges: Vec<_> = heads.iter().map(|head| field(head, "range:")).collect();
    let firsts: Vec<u64> = ranges
        .iter()
        .flatten()
        .map(|range| {
            let first = range.strip_prefix("bytes=").unwrap();
            let first = first.strip_suffix("-3145727").unwrap();
            first.parse().unwrap()
        })
        .collect();
    assert!(ranges.len() == 4 && ranges[0].is_none(), "{ranges:?}");
    assert!(
        firsts[0] > 0 && firsts[0] == firsts[1] && firsts[1] < firsts[2],
        "{firsts:?}"
    );
    for head in &heads[1..] {
        assert_eq!(field(head, "if-match:").as_deref(), told["etag"].as_str());
    }
    // A part of it, and to stdout.
    let (at, _) = cutting(&node, &[1 << 20], |_| {});
    node.run(&[
        "get", "data/x", "part", "--range", "-2000000", "--node", &at,
    ])
    .ok();
    let last = &content[content.len() - 2_000_000..];
    assert!(std::fs::read(node.path("part")).unwrap() == last);
    let (at, _) = cutting(&node, &[1 << 20, 1 << 20], |_| {});
    let output = node
        .command(&["get", "data/x", "-", "--node", &at])
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout == content);
}

#[test]
fn an_object_that_is_replaced_while_it_is_fetched_replaces_no_file() {
    let node = Node::start_with(&["--freshness", "always"]);
    node.seed("x", &bytes(3 << 20));
    std::fs::create_dir(node.path("to")).unwrap();
    std::fs::write(node.path("to/x"), b"as it was").unwrap();
    let (object, other) = (node.origin_path("x"), bytes(4 << 20));
    let (at, _) = cutting(&node, &[1 << 20], move |number| {
        if number == 1 {
            std::fs::write(&object, &other).unwrap();
        }
    });
    let told = node
        .run(&["get", "data/x", "to/x", "--node", &at, "--json"])
        .fails(1);
    let error: serde_json::Value = serde_json::from_str(&told.err).unwrap();
    assert_eq!(error["error"]["code"], "version_changed", "{error}");
    assert_eq!(names(&node.path("to")), ["x"]);
    assert_eq!(std::fs::read(node.path("to/x")).unwrap(), b"as it was");
    // Nor does one that is removed.
    let object = node.origin_path("x");
    let (at, _) = cutting(&node, &[1 << 20], move |number| {
        if number == 1 {
            std::fs::remove_file(&object).unwrap();
        }
    });
    node.run(&["get", "data/x", "to/x", "--node", &at]).fails(1);
    assert_eq!(names(&node.path("to")), ["x"]);
    assert_eq!(std::fs::read(node.path("to/x")).unwrap(), b"as it was");
}

#[test]
fn a_wait_with_a_timeout_ends_though_the_node_is_silent() {
    // It takes connections, and answers nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let began = std::time::Instant::now();
    let of_node = ["--timeout", "0.2s", "--node", at.as_str()];
    forebay(&[&["checkpoint", "wait", "data/run/1"][..], &of_node[..]].concat()).fails(1);
    assert!(began.elapsed() < std::time::Duration::from_secs(60));
}

#[test]
fn what_is_put_can_be_read_at_once() {
    let node = Node::start();
    let content = bytes(2 << 20);
    std::fs::write(node.path("model.pt"), &content).unwrap();
    let told = node
        .run(&["put", "model.pt", "data/models/", "--json"])
        .ok()
        .json();
    assert_eq!(
        (told["object"].as_str(), told["bytes"].as_u64()),
        (Some("data/models/model.pt"), Some(2 << 20))
    );
    assert_eq!(
        std::fs::read(node.origin_path("models/model.pt")).unwrap(),
        content
    );
    let read = node
        .command(&["get", "data/models/model.pt", "-"])
        .output()
        .unwrap();
    assert!(read.stdout == content);
    // From stdin, with a size that nobody announced.
    let mut child = node
        .command(&["put", "-", "data/in.txt"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"from a pipe")
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("data/in.txt  11 bytes  "));
    assert_eq!(
        std::fs::read(node.origin_path("in.txt")).unwrap(),
        b"from a pipe"
    );
    // An empty object.
    std::fs::write(node.path("empty"), b"").unwrap();
    node.run(&["put", "empty", "data/empty"]).ok();
    assert_eq!(std::fs::read(node.origin_path("empty")).unwrap(), b"");
}

#[test]
fn what_does_not_tell_its_length_is_put_whole() {
    let node = Node::start();
    let content = bytes(700_000);
    std::fs::write(node.path("in"), &content).unwrap();
    // A named pipe, as `<(cmd)` makes one, and /dev/stdin: both report 0 bytes.
    let made = Command::new("mkfifo").arg(node.path("pipe")).status();
    assert!(made.unwrap().success());
    let pipe = node.path("pipe");
    let to_pipe = content.clone();
    let writer = std::thread::spawn(move || std::fs::write(pipe, to_pipe).unwrap());
    let told = node.run(&["put", "pipe", "data/pipe", "--json"]).ok();
    writer.join().unwrap();
    assert_eq!(told.json()["bytes"], 700_000);
    let stdin = std::fs::File::open(node.path("in")).unwrap();
    let mut cat = Command::new("cat")
        .stdin(stdin)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let status = node
        .command(&["put", "/dev/stdin", "data/stdin"])
        .stdin(cat.stdout.take().unwrap())
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success() && cat.wait().unwrap().success());
    for key in ["pipe", "stdin"] {
        assert!(std::fs::read(node.origin_path(key)).unwrap() == content);
    }
    // A regular file that reports 0 bytes and is not empty.
    node.run(&["put", "/proc/version", "data/version"]).ok();
    assert_eq!(
        std::fs::read(node.origin_path("version")).unwrap(),
        std::fs::read("/proc/version").unwrap()
    );
}

#[test]
fn a_file_that_changes_while_it_is_put_replaces_nothing() {
    let node = Node::start();
    node.seed("kept", b"as it was");
    // Sysfs reports 4096 for each file, whatever is in it.
    let told = node
        .run(&[
            "put",
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "data/kept",
        ])
        .fails(1);
    assert!(
        told.err.contains("of the 4096 bytes that it had at first"),
        "{}",
        told.err
    );
    assert_eq!(
        std::fs::read(node.origin_path("kept")).unwrap(),
        b"as it was"
    );
    // A file that grows: its writer continues while it is read.
    let path = node.path("growing");
    std::fs::write(&path, bytes(64 << 20)).unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writing = stop.clone();
    let writer = std::thread::spawn(move || {
        let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
        while !writing.load(std::sync::atomic::Ordering::Relaxed) {
            file.write_all(b"more").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    });
    // The writer may stand still for as long as one takes, and not each time.
    let mut told = node.run(&["put", "growing", "data/kept"]);
    for _ in 0..5 {
        if told.code == 0 {
            node.seed("kept", b"as it was");
            told = node.run(&["put", "growing", "data/kept"]);
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    writer.join().unwrap();
    let told = told.fails(1);
    assert!(told.err.contains("it grew past the"), "{}", told.err);
    assert_eq!(
        std::fs::read(node.origin_path("kept")).unwrap(),
        b"as it was"
    );
}

#[test]
fn a_file_that_is_replaced_keeps_its_mode() {
    use std::os::unix::fs::PermissionsExt;
    let node = Node::start();
    node.seed("x", b"new");
    for mode in [0o600, 0o666, 0o755] {
        std::fs::write(node.path("x"), b"old").unwrap();
        let wanted = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(node.path("x"), wanted).unwrap();
        node.run(&["get", "data/x"]).ok();
        let got = std::fs::metadata(node.path("x")).unwrap().permissions();
        assert_eq!(got.mode() & 0o777, mode, "{mode:o}");
        assert_eq!(std::fs::read(node.path("x")).unwrap(), b"new");
    }
}

#[test]
fn a_reader_that_leaves_is_not_an_error() {
    let node = Node::start();
    node.seed("big", &bytes(8 << 20));
    for i in 0..1500 {
        node.seed(&format!("n/{i}"), b"");
    }
    for args in [
        &["get", "data/big", "-"][..],
        &["ls", "data/n/"][..],
        &["ls", "data/n/", "--json"][..],
    ] {
        let mut child = node
            .command(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0u8; 1];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            (
                output.status.code(),
                String::from_utf8_lossy(&output.stderr).as_ref()
            ),
            (Some(0), ""),
            "{args:?}"
        );
    }
}
