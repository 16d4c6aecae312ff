//! A listener's end: its certificate, which can be replaced, and the handshake.
//!
//! Connections keep the certificate that they began with; the next handshake uses the current one.

use crate::{ALPN, provider, read, x509};
use forebay_core::{Error, Result, sync::RwLock};
use rustls::{
    ServerConfig,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use std::{fmt, path::Path, sync::Arc};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// A client's connection, encrypted.
pub type ServerStream = tokio_rustls::server::TlsStream<TcpStream>;
/// A future that becomes such a connection, or an error for the log.
pub type Accept = tokio_rustls::Accept<TcpStream>;

/// A certificate with its chain and its key, which were found to belong together.
#[derive(Clone)]
pub struct Identity {
    pub(crate) certified: Arc<CertifiedKey>,
    /// When it expires, in seconds since the Unix epoch.
    pub not_after_secs: Option<i64>,
}

impl Identity {
    /// The contents of the two files, for [`Identity::of_files`].
    ///
    /// # Errors
    /// `Invalid` with the file that cannot be read.
    pub fn read(certificate: &Path, key: &Path) -> Result<(Vec<u8>, Vec<u8>)> {
        Ok((read("tls.cert", certificate)?, read("tls.key", key)?))
    }

    /// # Errors
    /// `Invalid` if either is not PEM of its kind, or the key is not the certificate's.
    pub fn parse(certificate: &[u8], key: &[u8]) -> Result<Identity> {
        Self::parse_of(("tls.cert", certificate), ("tls.key", key))
    }

    /// The same of the contents of these files, which the errors name.
    ///
    /// # Errors
    /// As [`Identity::parse`].
    pub fn of_files(certificate: (&Path, &[u8]), key: (&Path, &[u8])) -> Result<Identity> {
        let of_certificate = format!("tls.cert: {}", certificate.0.display());
        let of_key = format!("tls.key: {}", key.0.display());
        Self::parse_of((&of_certificate, certificate.1), (&of_key, key.1))
    }

    /// The same of the settings of these names.
    pub(crate) fn parse_of(
        (of_certificate, certificate): (&str, &[u8]),
        (of_key, key): (&str, &[u8]),
    ) -> Result<Identity> {
        let bad = |what: &str, why: String| Error::invalid(format!("{what}: {why}"));
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificate)
            .collect::<std::result::Result<_, _>>()
            .map_err(|e| bad(of_certificate, e.to_string()))?;
        let Some(own) = chain.first() else {
            return Err(bad(
                of_certificate,
                "it does not contain a PEM certificate".into(),
            )
            .hint("the node's own certificate first, then those between it and the CA"));
        };
        let not_after_secs = x509::not_after(own);
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| {
            let why = match e {
                pem::Error::NoItemsFound => "it does not contain a PEM private key".to_owned(),
                e => e.to_string(),
            };
            bad(of_key, why).hint("an unencrypted private key in PEM: PKCS#8, PKCS#1 or SEC1")
        })?;
        let certified = CertifiedKey::from_der(chain, key, &provider()).map_err(|e| {
            bad(&format!("{of_certificate} and {of_key}"), e.to_string())
                .hint("the key must be that of the first certificate in the file")
        })?;
        Ok(Identity {
            certified: Arc::new(certified),
            not_after_secs,
        })
    }
}

/// What a listener needs to speak TLS.
pub struct ServerTls {
    acceptor: TlsAcceptor,
    current: Arc<Current>,
}

struct Current(RwLock<Identity>);

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Current")
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().certified.clone())
    }
}

impl ServerTls {
    /// # Errors
    /// `Internal` if the cryptography cannot do what TLS needs.
    pub fn new(identity: Identity) -> Result<Self> {
        let current = Arc::new(Current(RwLock::new(identity)));
        let config =
            ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let config = config.map_err(|e| Error::internal(format!("TLS: {e}")))?;
        let mut config = config
            .with_no_client_auth()
            .with_cert_resolver(current.clone());
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(ServerTls {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            current,
        })
    }

    /// Uses this identity for new connections from now on.
    pub fn replace(&self, identity: Identity) {
        *self.current.0.write() = identity;
    }

    /// When the certificate in force expires, in seconds since the Unix epoch.
    pub fn not_after_secs(&self) -> Option<i64> {
        self.current.0.read().not_after_secs
    }

    /// The handshake with a client that has connected.
    pub fn accept(&self, stream: TcpStream) -> Accept {
        self.acceptor.accept(stream)
    }
}
