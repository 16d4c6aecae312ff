//! The certificate of the TCP listeners, reloaded while the node runs. (`wire.rs` speaks TLS with
//! it.)

use crate::{
    auth::watch::{Reload, ReloadStats},
    config,
};
use forebay_core::{Result, sync::Mutex};
use forebay_tls::{Accept, Identity, ServerTls};
use std::path::PathBuf;
use tokio::net::TcpStream;

/// Where the certificate comes from.
struct Source {
    certificate: PathBuf,
    key: PathBuf,
    /// The contents that were last accepted or refused; `None` while the files cannot be read.
    seen: Option<Files>,
}

/// A certificate that was read and found to work, for [`Tls::install`].
pub struct Prepared {
    source: Source,
    identity: Identity,
}

/// The contents of the certificate file and the key file.
type Files = (Vec<u8>, Vec<u8>);

pub struct Tls {
    server: ServerTls,
    /// Held while the certificate is replaced, so that changes happen one after the other.
    source: Mutex<Source>,
    stats: ReloadStats,
}

impl Tls {
    /// `None` where no certificate is configured.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn open(config: &config::Tls) -> Result<Option<Self>> {
        let Some(Prepared { source, identity }) = prepare(config)? else {
            return Ok(None);
        };
        Ok(Some(Tls {
            server: ServerTls::new(identity)?,
            source: Mutex::new(source),
            stats: ReloadStats::default(),
        }))
    }

    /// Reads the files that the settings name; `None` where they name none. May block.
    ///
    /// # Errors
    /// As [`Tls::open`].
    pub fn prepare(&self, config: &config::Tls) -> Result<Option<Prepared>> {
        prepare(config)
    }

    /// Uses this certificate for new connections from now on.
    pub fn install(&self, prepared: Prepared) {
        let mut source = self.source.lock();
        self.server.replace(prepared.identity);
        *source = prepared.source;
    }

    /// When the certificate in force expires, in seconds since the Unix epoch.
    pub fn not_after_secs(&self) -> Option<i64> {
        self.server.not_after_secs()
    }

    /// The handshake with a client that has connected.
    pub fn accept(&self, stream: TcpStream) -> Accept {
        self.server.accept(stream)
    }
}

fn prepare(config: &config::Tls) -> Result<Option<Prepared>> {
    // The configuration's check has refused one without the other.
    let (Some(certificate), Some(key)) = (&config.cert, &config.key) else {
        return Ok(None);
    };
    let files = Identity::read(certificate, key)?;
    let identity = Identity::of_files((certificate, &files.0), (key, &files.1))?;
    let source = Source {
        certificate: certificate.clone(),
        key: key.clone(),
        seen: Some(files),
    };
    Ok(Some(Prepared { source, identity }))
}

impl Reload for Tls {
    fn name(&self) -> &'static str {
        "certificate"
    }

    fn reload(&self, asked: bool) {
        let mut source = self.source.lock();
        let files = match Identity::read(&source.certificate, &source.key) {
            Ok(files) if !asked && source.seen.as_ref() == Some(&files) => return,
            Ok(files) => files,
            Err(e) => {
                if source.seen.take().is_some() || asked {
                    self.stats.failed();
                    tracing::error!(error = %e.describe(), "the certificate cannot be read; the \
                        one that was read before stays in force");
                }
                return;
            }
        };
        let identity = Identity::of_files((&source.certificate, &files.0), (&source.key, &files.1));
        source.seen = Some(files);
        match identity {
            Ok(identity) => {
                let not_after_secs = identity.not_after_secs;
                self.server.replace(identity);
                self.stats.succeeded();
                tracing::info!(file = %source.certificate.display(), not_after_secs, "the certificate was read again");
            }
            Err(e) => {
                // Often one file was replaced and the other is about to be.
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
