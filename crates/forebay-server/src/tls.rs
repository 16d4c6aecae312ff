//! The certificate of the TCP listeners, read again while the node runs. (`wire.rs` speaks TLS with
//! it.)

use crate::{
    auth::watch::{Reload, ReloadStats},
    config,
};
use forebay_core::{Result, sync::Mutex};
use forebay_tls::{Accept, Identity, ServerTls};
use std::path::PathBuf;
use tokio::net::TcpStream;

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
        let (Some(certificate), Some(key)) = (&config.cert, &config.key) else {
            return Ok(None);
        };
        let files = Identity::read(certificate, key)?;
        let server = ServerTls::new(Identity::parse(&files.0, &files.1)?)?;
        let (certificate, key) = (certificate.clone(), key.clone());
        Ok(Some(Tls {
            certificate,
            key,
            server,
            seen: Mutex::new(Some(files)),
            stats: ReloadStats::default(),
        }))
    }

    /// When the certificate in force ends, in seconds since the Unix epoch.
    pub fn not_after_secs(&self) -> Option<i64> {
        self.server.not_after_secs()
    }

    /// The handshake with a client that has connected.
    pub fn accept(&self, stream: TcpStream) -> Accept {
        self.server.accept(stream)
    }
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
                    tracing::error!(error = %e.describe(), "the certificate cannot be read; the \
                        one that was read before stays in force");
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
                tracing::error!(error = %e.describe(), "the certificate was changed and cannot \
                    be used; the one that was read before stays in force");
            }
        }
    }

    fn stats(&self) -> &ReloadStats {
        &self.stats
    }
}
