//! The processes that a benchmark starts: a node, a plain writer, nginx. They end with the
//! benchmark, however it ends.
//!
//! They are processes, not threads, so that the kernel counts the CPU time of server and client
//! separately.

use crate::{usage::Process, wire::Address};
use forebay_core::{Error, Result};
use serde_json::Value;
use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead, BufReader},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const START_TIMEOUT: Duration = Duration::from_secs(20);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A process that is stopped when this is dropped.
pub struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts `command`; its stderr (and stdout, if `listen` is false) goes to `log`. With
    /// `listen`, also returns its first line.
    fn start(mut command: Command, log: PathBuf, listen: bool) -> Result<(Self, String)> {
        let name = command.get_program().to_string_lossy().into_owned();
        let file = File::create(&log).map_err(|e| Error::file("cannot write", &log, e))?;
        let out = if listen {
            Stdio::piped()
        } else {
            Stdio::from(
                file.try_clone()
                    .map_err(|e| Error::file("cannot write", &log, e))?,
            )
        };
        command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(file)
            .process_group(0);
        // SAFETY: prctl is safe to call between fork and exec; it touches no memory of the parent.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = command
            .spawn()
            .map_err(|e| Error::internal(format!("cannot start {name}: {e}")).caused_by(e))?;
        let mut running = Self { child, log };
        let mut line = String::new();
        if let Some(out) = running.child.stdout.take() {
            let mut out = BufReader::new(out);
            let read = out
                .read_line(&mut line)
                .map_err(|e| Error::internal(format!("{name}: {e}")).caused_by(e))?;
            if read == 0 {
                let _ = running.child.wait();
                return Err(Error::internal(format!(
                    "{name} did not start: {}",
                    running.said()
                )));
            }
            // The pipe stays open and is read to its end, so that the child never blocks on it.
            std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        }
        Ok((running, line))
    }

    pub fn process(&self) -> Process {
        Process(self.child.id())
    }

    /// The end of its log.
    pub fn said(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..])
            .trim()
            .to_owned()
    }

    fn signal(&self, number: i32) {
        // SAFETY: a signal to a child that was not waited for yet, so the id is still its own.
        unsafe { libc::kill(self.child.id() as i32, number) };
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(libc::SIGTERM);
        let began = Instant::now();
        while began.elapsed() < STOP_TIMEOUT {
            if let Ok(Some(_)) = self.child.try_wait() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This program, to start it again: the binary, or the Python wheel's console script.
pub fn own_program() -> Result<PathBuf> {
    let is_ours = |path: &Path| {
        path.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("forebay"))
    };
    let exe = std::env::current_exe()
        .map_err(|e| Error::internal(format!("cannot find this program: {e}")).caused_by(e))?;
    // A binary that was replaced while it runs is still available through /proc.
    if exe.to_string_lossy().ends_with(" (deleted)") {
        return Ok("/proc/self/exe".into());
    }
    if is_ours(&exe) {
        return Ok(exe);
    }
    let script = std::env::args_os()
        .take(2)
        .map(PathBuf::from)
        .find(|p| is_ours(p) && p.is_file());
    script.ok_or_else(|| {
        Error::invalid("cannot tell how to start a node")
            .hint("--program names the forebay program")
    })
}

/// A command of this program, without the user's settings in its environment.
pub fn own_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("FOREBAY"))
    {
        command.env_remove(name);
    }
    command
}

/// How to start a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    pub program: PathBuf,
    pub origin: OsString,
    pub cache: PathBuf,
    pub cache_bytes: u64,
    /// Further settings, as `KEY=VALUE`.
    pub sets: Vec<String>,
}

/// A node in a process of its own.
pub struct Node {
    pub running: Running,
    pub tcp: Address,
    pub unix: Address,
    /// Where its metrics are.
    pub admin: Option<Address>,
}

impl Node {
    pub fn start(options: &NodeOptions) -> Result<Self> {
        let unix = options.cache.with_extension("sock");
        let mut cache = options.cache.clone().into_os_string();
        cache.push(format!(":{}", options.cache_bytes));
        let mut command = own_command(&options.program);
        command.args([
            "serve",
            "--json",
            "--log",
            "warn",
            "--freshness",
            "immutable",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ]);
        command
            .arg("--unix")
            .arg(&unix)
            .arg("--cache")
            .arg(cache)
            .arg("--origin")
            .arg(&options.origin);
        for set in &options.sets {
            command.args(["--set", set]);
        }
        let (running, line) = Running::start(command, options.cache.with_extension("log"), true)?;
        let ready: Value = serde_json::from_str(&line).unwrap_or_default();
        let tcp: Option<SocketAddr> = ready["s3"].as_str().and_then(|a| a.parse().ok());
        let tcp = tcp.ok_or_else(|| {
            Error::internal(format!(
                "the node did not say where it listens: {line}{}",
                running.said()
            ))
        })?;
        let admin = ready["admin"]
            .as_str()
            .and_then(|a| a.parse().ok())
            .map(Address::Tcp);
        Ok(Self {
            running,
            tcp: Address::Tcp(tcp),
            unix: Address::Unix(unix),
            admin,
        })
    }
}

/// A process that fills sockets as fast as they are emptied: `forebay bench copy-server`.
pub struct Writer {
    _running: Running,
    pub at: Address,
}

impl Writer {
    pub fn start(
        program: &Path,
        unix: Option<&Path>,
        write_bytes: usize,
        span_bytes: usize,
        log: PathBuf,
    ) -> Result<Self> {
        let mut command = own_command(program);
        command.args([
            "bench",
            "copy-server",
            "--write",
            &write_bytes.to_string(),
            "--span",
            &span_bytes.to_string(),
        ]);
        if let Some(path) = unix {
            command.arg("--unix").arg(path);
        }
        let (running, line) = Running::start(command, log, true)?;
        let at = match unix {
            Some(path) => Address::Unix(path.to_owned()),
            None => Address::Tcp(
                line.trim()
                    .parse()
                    .map_err(|_| Error::internal(format!("the plain writer said {line:?}")))?,
            ),
        };
        Ok(Self {
            _running: running,
            at,
        })
    }
}

/// Files that nginx may hold open.
const FILES_MAX: u64 = 65_536;

/// How many files a process may have open if it asks for as many as it can.
fn open_files_max() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 1024,
        rlim_max: 1024,
    };
    // SAFETY: it only writes into the struct.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    limit.rlim_max
}

/// nginx over a directory, with sendfile and keep-alive.
pub struct Nginx {
    pub running: Running,
    pub at: Address,
}

impl Nginx {
    /// The program, where the tests' servers are installed from the system's packages.
    pub fn program() -> Option<PathBuf> {
        let usual = [
            "/usr/sbin/nginx",
            "/usr/local/sbin/nginx",
            "/usr/bin/nginx",
            "/usr/local/bin/nginx",
            "/opt/homebrew/bin/nginx",
        ];
        let on_path = std::env::var_os("PATH").map(|p| {
            std::env::split_paths(&p)
                .map(|d| d.join("nginx"))
                .collect::<Vec<_>>()
        });
        usual
            .iter()
            .map(PathBuf::from)
            .chain(on_path.into_iter().flatten())
            .find(|p| p.is_file())
    }

    /// Serves `root`; `dir` holds its configuration, logs and temporary files.
    pub fn start(program: &Path, root: &Path, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::file("cannot make", dir, e))?;
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|l| l.local_addr())
            .map(|a| a.port());
        let port = port.map_err(|e| Error::internal(format!("no free port: {e}")).caused_by(e))?;
        let (d, root) = (dir.display(), root.display());
        // As root, the workers would run as another user, who cannot read a private directory.
        // SAFETY: geteuid has no arguments and cannot fail.
        let user = if unsafe { libc::geteuid() } == 0 {
            "user root;"
        } else {
            ""
        };
        let files = open_files_max().min(FILES_MAX);
        let cached = files * 3 / 4;
        let config = format!(
            "{user} daemon off; worker_processes auto; worker_rlimit_nofile {files}; pid {d}/pid; error_log {d}/error.log;\n\
             events {{ worker_connections 1024; }}\n\
             http {{ access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_timeout 75s; keepalive_requests 100000000;\n\
             open_file_cache max={cached} inactive=600s; open_file_cache_valid 600s; default_type application/octet-stream; etag on;\n\
             client_body_temp_path {d}/t1; proxy_temp_path {d}/t2; fastcgi_temp_path {d}/t3; uwsgi_temp_path {d}/t4; scgi_temp_path {d}/t5;\n\
             server {{ listen 127.0.0.1:{port}; root \"{root}\"; }} }}\n"
        );
        let file = dir.join("nginx.conf");
        std::fs::write(&file, config).map_err(|e| Error::file("cannot write", &file, e))?;
        let mut command = Command::new(program);
        command
            .arg("-c")
            .arg(&file)
            .arg("-p")
            .arg(dir)
            .arg("-e")
            .arg(dir.join("error.log"));
        let (mut running, _) = Running::start(command, dir.join("log"), false)?;
        let at = SocketAddr::from(([127, 0, 0, 1], port));
        let began = Instant::now();
        while TcpStream::connect(at).is_err() {
            if !matches!(running.child.try_wait(), Ok(None)) || began.elapsed() > START_TIMEOUT {
                return Err(Error::internal(format!(
                    "nginx did not start: {}",
                    running.said()
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self {
            running,
            at: Address::Tcp(at),
        })
    }
}

/// What has passed through a [`Distance`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Counters {
    pub connections: u64,
    pub requests: u64,
    pub bytes_to_client: u64,
}

/// A `forebay distance` in front of a server.
pub struct Distance {
    _running: Running,
    pub at: SocketAddr,
    counters_at: Address,
}

impl Distance {
    pub fn start(
        program: &Path,
        to: SocketAddr,
        rtt: Duration,
        bytes_per_s: u64,
        log: PathBuf,
    ) -> Result<Self> {
        let mut command = own_command(program);
        command.args([
            "distance",
            "--listen",
            "127.0.0.1:0",
            "--stats-listen",
            "127.0.0.1:0",
            "--to",
            &to.to_string(),
        ]);
        command.args([
            "--rtt",
            &format!("{}us", rtt.as_micros()),
            "--rate",
            &bytes_per_s.to_string(),
        ]);
        let (running, line) = Running::start(command, log, true)?;
        let after = |mark: &str| {
            line.split_once(mark)
                .map(|(_, rest)| rest.split([' ', '/']).next().unwrap_or_default().trim())
        };
        let at = after("distance: ").and_then(|a| a.parse().ok());
        let counters_at = after("http://").and_then(|a| a.parse().ok());
        let (Some(at), Some(counters_at)) = (at, counters_at) else {
            return Err(Error::internal(format!("forebay distance said {line:?}")));
        };
        Ok(Self {
            _running: running,
            at,
            counters_at: Address::Tcp(counters_at),
        })
    }

    pub fn counters(&self) -> Result<Counters> {
        let text = crate::wire::fetch(&self.counters_at, "/")?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::internal(format!("the counters of forebay distance: {e}")))
    }
}
