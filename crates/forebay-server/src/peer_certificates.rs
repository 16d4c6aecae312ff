//! The certificates that this node shows other nodes of its cluster, reloaded while it runs.

use crate::{
    auth::watch::{Reload, ReloadStats},
    config,
};
use forebay_core::{Result, sync::Mutex};
use forebay_tls::{PeerFiles, PeerTls};
use std::{path::PathBuf, sync::Arc};

pub struct PeerCertificates {
    tls: PeerTls,
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    /// What was last read; `None` while the files cannot be read. Held while certificates are
    /// replaced, so that changes happen one after the other.
    seen: Mutex<Option<PeerFiles>>,
    stats: ReloadStats,
}

impl PeerCertificates {
    /// `None` where none are configured: nodes trust the network.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn open(config: &config::Cluster) -> Result<Option<Arc<Self>>> {
        // The configuration's check has refused some without the others.
        let (Some(ca), Some(certificate), Some(key)) = (&config.ca, &config.cert, &config.key)
        else {
            return Ok(None);
        };
        let files = PeerFiles::read(ca, certificate, key)?;
        Ok(Some(Arc::new(PeerCertificates {
            tls: PeerTls::new(&files)?,
            ca: ca.clone(),
            certificate: certificate.clone(),
            key: key.clone(),
            seen: Mutex::new(Some(files)),
            stats: ReloadStats::default(),
        })))
    }

    /// Both ends of TLS between nodes; it has what is in force at the time of each handshake.
    pub fn tls(&self) -> &PeerTls {
        &self.tls
    }
}

impl Reload for PeerCertificates {
    fn name(&self) -> &'static str {
        "cluster_certificate"
    }

    fn reload(&self, asked: bool) {
        let mut seen = self.seen.lock();
        let files = match PeerFiles::read(&self.ca, &self.certificate, &self.key) {
            Ok(files) => files,
            Err(e) => {
                if seen.take().is_some() || asked {
                    self.stats.failed();
                    tracing::error!(error = %e.describe(), "the certificates of the cluster \
                        cannot be read; those that were read before stay in force");
                }
                return;
            }
        };
        let changed = seen.as_ref() != Some(&files);
        // Refused ones may become valid by themselves: their time has not begun yet.
        if !changed && !asked && !self.stats.is_stale() {
            return;
        }
        let replaced = self.tls.replace(&files);
        *seen = Some(files);
        match replaced {
            Ok(()) => {
                self.stats.succeeded();
                tracing::info!(file = %self.certificate.display(),
                    not_after_secs = self.tls.not_after_secs(),
                    "the certificates of the cluster were read again");
            }
            Err(e) if changed || asked => {
                // Often one file was replaced and the others are about to be.
                self.stats.failed();
                tracing::error!(error = %e.describe(), "the certificates of the cluster were \
                    changed and cannot be used; those that were read before stay in force");
            }
            Err(_) => {}
        }
    }

    fn stats(&self) -> &ReloadStats {
        &self.stats
    }
}
