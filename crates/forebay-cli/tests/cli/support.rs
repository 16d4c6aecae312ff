//! A node in a temporary directory, and the binary run against it.

use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The bucket that every test node serves.
pub const BUCKET: &str = "data";

/// The path of the binary. It is asked for when the tests run, not when they are compiled, because a
/// target directory that has been moved is not compiled again.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("CARGO_BIN_EXE_forebay");
    let path = PathBuf::from(path.expect("`cargo test` says where the binary is"));
    assert!(path.exists(), "{} is not there", path.display());
    path
}

/// A command of the binary, without our variables in its environment.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FOREBAY") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// The output of a run of the binary.
pub struct Run {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Run {
    pub fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Run {
            code: output.status.code().expect("not killed by a signal"),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    /// It must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }

    /// It must have ended with this code.
    #[track_caller]
    pub fn fails(self, code: i32) -> Self {
        assert_eq!(
            self.code, code,
            "stdout:\n{}\nstderr:\n{}",
            self.out, self.err
        );
        self
    }

    /// Its stdout is one JSON object.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e} in:\n{}", self.out))
    }

    /// Its stdout is JSON lines.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        self.out
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e} in:\n{l}")))
            .collect()
    }
}

/// Runs the binary to its end.
pub fn forebay(args: &[&str]) -> Run {
    Run::of(command(args).output().expect("the binary runs"))
}

/// A running node over `origin/data`, with its cache in `cache`.
pub struct Node {
    pub dir: TempDir,
    pub child: Child,
    /// The line that `serve --json` prints when it is ready.
    pub ready: Value,
    pub url: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Node {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("origin").join(BUCKET)).unwrap();
        Self::start_in(dir, more)
    }

    pub fn start_in(dir: TempDir, more: &[&str]) -> Self {
        let origin = format!(
            "{BUCKET}={}",
            dir.path().join("origin").join(BUCKET).display()
        );
        let cache = format!("{}:64MiB", dir.path().join("cache").display());
        let mut args = vec![
            "serve",
            "--json",
            "--origin",
            &origin,
            "--cache",
            &cache,
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ];
        args.extend_from_slice(more);
        Self::start_as(dir, command(&args))
    }

    /// Starts a node from a command that serves.
    pub fn start_as(dir: TempDir, mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let Ok(ready) = serde_json::from_str::<Value>(&line) else {
            let mut err = String::new();
            child
                .stderr
                .take()
                .unwrap()
                .read_to_string(&mut err)
                .unwrap();
            panic!("the node did not start: {line}\n{err}");
        };
        // Logs must not fill the pipe.
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = log.clone();
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .for_each(|l| kept.lock().unwrap().push(l))
        });
        let url = ready["url"].as_str().unwrap().to_owned();
        Node {
            dir,
            child,
            ready,
            url,
            log,
        }
    }

    /// The JSON lines of the log.
    pub fn log(&self) -> Vec<Value> {
        let lines = self.log.lock().unwrap();
        lines
            .iter()
            .filter_map(|l| serde_json::from_str(l).ok())
            .collect()
    }

    /// The value of a line of `/metrics`; 0 if there is none.
    pub fn metric(&self, line: &str) -> f64 {
        let admin = self.ready["admin"].as_str().unwrap();
        let page = self.run(&["metrics", "--admin", admin]).ok().out;
        let found = page.lines().find_map(|l| l.strip_prefix(line));
        found.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    /// Puts a file into the bucket, behind the node's back.
    pub fn seed(&self, key: &str, bytes: &[u8]) {
        let path = self.origin_path(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn origin_path(&self, key: &str) -> PathBuf {
        self.dir.path().join("origin").join(BUCKET).join(key)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command against this node, in its directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = command(args);
        command
            .env("FOREBAY_NODE", &self.url)
            .current_dir(self.dir.path());
        command
    }

    pub fn run(&self, args: &[&str]) -> Run {
        Run::of(self.command(args).output().expect("the binary runs"))
    }

    pub fn signal(&self, name: &str) {
        // The shell's own `kill`: the separate program is in a package that small systems lack.
        let status = Command::new("sh")
            .args(["-c", &format!("kill -{name} {}", self.child.id())])
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// Waits for the end and returns the exit code.
    pub fn wait(&mut self) -> i32 {
        wait(&mut self.child)
    }
}

/// Waits for the end of a process, for at most a minute.
pub fn wait(child: &mut Child) -> i32 {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().expect("ended by itself");
        }
        assert!(began.elapsed() < Duration::from_secs(60), "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something holds, for at most a minute.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "not yet: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Bytes that differ from place to place.
pub fn bytes(n: usize) -> Vec<u8> {
    (0..n as u64)
        .map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8)
        .collect()
}

/// The names in a directory.
pub fn names(dir: &Path) -> Vec<String> {
    let mut all: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    all.sort();
    all
}
