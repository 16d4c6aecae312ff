//! An HTTP server whose every answer a test writes: for what no real service can be made to do.

use crate::aws_services::{Recorded, read};
use forebay_core::sync::Mutex;
use std::sync::Arc;
use tokio::{io::AsyncWriteExt, net::TcpListener, task::JoinHandle};

/// One answer.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// 0: no answer, ever.
    pub status: u16,
    /// In addition to `Content-Length` and `Connection`, which are always sent.
    pub headers: Vec<(&'static str, String)>,
    /// Omitted in the answer to a HEAD.
    pub body: Vec<u8>,
    /// The Content-Length, if it differs from the body's: the connection breaks off.
    pub promised: Option<usize>,
}

impl Reply {
    /// An answer without further headers.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            body: body.into(),
            ..Self::default()
        }
    }

    /// The connection stays open, and nothing comes.
    pub fn never() -> Self {
        Self::default()
    }

    /// The same with one more header.
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The same, but `Content-Length` says `length`.
    pub fn promise(self, length: usize) -> Self {
        Self {
            promised: Some(length),
            ..self
        }
    }
}

/// The running server. Dropping this stops it.
pub struct Scripted {
    address: String,
    requests: Arc<Mutex<Vec<Recorded>>>,
    task: JoinHandle<()>,
}

impl Scripted {
    /// `answer` gets each request, and the number of requests before it.
    pub async fn start(answer: impl Fn(&Recorded, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a free port on 127.0.0.1");
        let address = format!("http://{}", listener.local_addr().expect("its address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (seen, answer) = (requests.clone(), Arc::new(answer));
        let task = tokio::spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let (seen, answer) = (seen.clone(), answer.clone());
                open.spawn(async move {
                    let Ok(request) = read(&mut stream).await else {
                        return;
                    };
                    let number = {
                        let mut seen = seen.lock();
                        seen.push(request.clone());
                        seen.len() - 1
                    };
                    let reply = answer(&request, number);
                    if reply.status == 0 {
                        std::future::pending::<()>().await;
                    }
                    let length = reply.promised.unwrap_or(reply.body.len());
                    let mut bytes = format!(
                        "HTTP/1.1 {} -\r\nContent-Length: {length}\r\nConnection: close\r\n",
                        reply.status
                    );
                    for (name, value) in &reply.headers {
                        bytes.push_str(&format!("{name}: {value}\r\n"));
                    }
                    bytes.push_str("\r\n");
                    let mut bytes = bytes.into_bytes();
                    if request.method != "HEAD" {
                        bytes.extend_from_slice(&reply.body);
                    }
                    // If a client has gone, that does not concern this server.
                    let _ = stream.write_all(&bytes).await;
                    let _ = stream.shutdown().await;
                });
                while open.try_join_next().is_some() {}
            }
        });
        Self {
            address,
            requests,
            task,
        }
    }

    /// `http://127.0.0.1:port`.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// All requests so far, in order of arrival.
    pub fn requests(&self) -> Vec<Recorded> {
        self.requests.lock().clone()
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}
