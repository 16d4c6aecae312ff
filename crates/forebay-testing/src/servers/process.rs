//! Child processes that end with the test.

use std::{
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, OnceLock, mpsc},
    time::{Duration, Instant},
};
use tempfile::TempDir;

const START_TIMEOUT: Duration = Duration::from_secs(90);

/// A running server and its directory.
pub struct Server {
    child: Child,
    directory: TempDir,
    name: String,
    port: u16,
}

/// Where `tests/servers/install.sh` puts things: `$FOREBAY_CACHE`, or `~/.cache/forebay`.
pub(super) fn cache() -> PathBuf {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    set("FOREBAY_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("forebay")))
        .or_else(|| Some(set("HOME")?.join(".cache/forebay")))
        .expect("HOME is set")
}

/// An installed file, or a panic that says how to get it.
pub(super) fn installed(path: PathBuf) -> PathBuf {
    assert!(
        path.exists(),
        "the test server {} is not installed: run tests/servers/install.sh",
        path.display()
    );
    path
}

/// A port that was free a moment ago.
pub(super) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .expect("a free port on 127.0.0.1")
        .port()
}

type Job = Box<dyn FnOnce() + Send>;

/// With PR_SET_PDEATHSIG the kernel kills a child when the *thread* that made it ends; test threads
/// come and go, this one stays.
fn on_spawner<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (send, receive) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("test-servers".into())
            .spawn(move || receive.into_iter().for_each(|job| job()))
            .expect("a thread");
        Mutex::new(send)
    });
    let (send, receive) = mpsc::channel();
    let job: Job = Box::new(move || drop(send.send(f())));
    spawner
        .lock()
        .expect("not poisoned")
        .send(job)
        .expect("the thread lives as long as the process");
    receive.recv().expect("the job answers")
}

impl Server {
    /// Starts `command(port, directory)` and waits until the port answers; uses another port if
    /// that one was taken meanwhile.
    pub(super) async fn start(name: &str, command: impl Fn(u16, &Path) -> Command) -> Self {
        let mut last = String::new();
        for _ in 0..3 {
            let directory = tempfile::Builder::new()
                .prefix("forebay-test-")
                .tempdir()
                .expect("a temporary directory");
            let port = free_port();
            let log = std::fs::File::create(directory.path().join("log")).expect("a log file");
            let mut command = command(port, directory.path());
            command
                .stdin(Stdio::null())
                .stdout(log.try_clone().expect("a second handle"))
                .stderr(log);
            // SAFETY: prctl is safe to call between fork and exec; it touches no memory of the
            // parent.
            unsafe {
                command.pre_exec(|| {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    Ok(())
                });
            }
            let child = on_spawner(move || command.spawn());
            let child = child.unwrap_or_else(|e| {
                panic!("{name} does not start: {e}; run tests/servers/install.sh")
            });
            let mut server = Server {
                child,
                directory,
                name: name.to_owned(),
                port,
            };
            match server.ready().await {
                Ok(()) => return server,
                Err(e) => last = e,
            }
        }
        panic!("{name} does not start: {last}");
    }

    async fn ready(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        while begun.elapsed() < START_TIMEOUT {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("it ended with {status}: {}", self.log()));
            }
            if tokio::net::TcpStream::connect(("127.0.0.1", self.port))
                .await
                .is_ok()
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err(format!(
            "it does not listen after {START_TIMEOUT:?}: {}",
            self.log()
        ))
    }

    /// The end of the server's output.
    pub fn log(&self) -> String {
        let text = std::fs::read(self.directory.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    }

    /// The name that it was started with, as used in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port of 127.0.0.1 that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id, for sending signals.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it keeps its data.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
