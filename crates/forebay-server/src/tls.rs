//! The certificate of the TCP listeners, read again while the node runs, and the handshakes of their clients.
//!
//! A client that speaks plain HTTP to a port that speaks TLS is told so in plain HTTP. A handshake has a time limit and holds a place among the
//! connections, like everything else that a client may begin and not finish.

use crate::{
    auth::watch::{Reload, ReloadStats},
    config,
};
use forebay_core::Result;
use forebay_tls::{Identity, ServerStream, ServerTls};
use parking_lot::Mutex;
use std::{io, path::PathBuf, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The first byte of TLS: a record of the handshake.
const HANDSHAKE_RECORD: u8 = 22;
/// How much of a plain request is read away, and for how long, so that the answer to it is not lost in a reset.
const PLAIN_MAX_BYTES: usize = 64 << 10;
const PLAIN_TIMEOUT: Duration = Duration::from_millis(500);
const PLAIN_ANSWER: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 41\r\nConnection: close\r\n\r\nthis port speaks TLS: use https:// there\n";

/// The contents of the certificate's and the key's files.
type Files = (Vec<u8>, Vec<u8>);

pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    server: ServerTls,
    /// What was taken over, or refused, last; `None` while the files cannot be read.
    seen: Mutex<Option<Files>>,
    stats: ReloadStats,
}

impl Tls {
    /// `None` where no certificate is configured.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn open(config: &config::Tls) -> Result<Option<Self>> {
        // That neither is there alone is the configuration's check.
        let (Some(certificate), Some(key)) = (&config.cert, &config.key) else { return Ok(None) };
        let files = Identity::read(certificate, key)?;
        let server = ServerTls::new(Identity::parse(&files.0, &files.1)?)?;
        let (certificate, key) = (certificate.clone(), key.clone());
        Ok(Some(Tls { certificate, key, server, seen: Mutex::new(Some(files)), stats: ReloadStats::default() }))
    }

    /// When the certificate in force ends, in seconds since the Unix epoch.
    pub fn not_after_secs(&self) -> Option<i64> {
        self.server.not_after_secs()
    }

    /// The handshake, with its time limit.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<ServerStream> {
        timeout(HANDSHAKE_TIMEOUT, self.handshake(stream)).await.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)))
    }

    async fn handshake(&self, mut stream: TcpStream) -> io::Result<ServerStream> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0] != HANDSHAKE_RECORD {
            if first[0].is_ascii_uppercase() {
                refuse_plain(&mut stream).await?;
            }
            return Err(io::Error::other("the client does not speak TLS"));
        }
        self.server.accept(stream).await
    }
}

async fn refuse_plain(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(PLAIN_ANSWER).await?;
    stream.shutdown().await?;
    let mut rest = stream.take(PLAIN_MAX_BYTES as u64);
    let _ = timeout(PLAIN_TIMEOUT, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    Ok(())
}

impl Reload for Tls {
    fn name(&self) -> &'static str {
        "certificate"
    }

    fn reload(&self, asked: bool) {
        let files = match Identity::read(&self.certificate, &self.key) {
            Ok(files) if !asked && self.seen.lock().as_ref() == Some(&files) => return,
            Ok(files) => files,
            Err(e) => {
                if self.seen.lock().take().is_some() || asked {
                    self.stats.failed();
                    tracing::error!(error = %e.describe(), "the certificate cannot be read; the one that was read before stays in force");
                }
                return;
            }
        };
        let identity = Identity::parse(&files.0, &files.1);
        *self.seen.lock() = Some(files);
        match identity {
            Ok(identity) => {
                let not_after_secs = identity.not_after_secs;
                self.server.replace(identity);
                self.stats.succeeded();
                tracing::info!(file = %self.certificate.display(), not_after_secs, "the certificate was read again");
            }
            Err(e) => {
                // Often the one file was replaced, and the other is about to be.
                self.stats.failed();
                tracing::error!(error = %e.describe(), "the certificate was changed and cannot be used; the one that was read before stays in force");
            }
        }
    }

    fn stats(&self) -> &ReloadStats {
        &self.stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_plain_http_is_whole() {
        let text = std::str::from_utf8(PLAIN_ANSWER).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{}", body.len());
    }
}
