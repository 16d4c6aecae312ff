//! Both ends between nodes of a cluster: each shows a certificate of the cluster's own CA, and
//! speaks with nobody who has none.
//!
//! A node is known by what it says of itself once it is let in, and not by its name or address,
//! which may change: every node's certificate is for the same name, [`NODE`].

use crate::{Identity, client::roots, provider, read};
use arc_swap::ArcSwap;
use forebay_core::{Error, Result};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier, verify_server_name},
    pki_types::{ServerName, UnixTime},
    server::{ParsedCertificate, WebPkiClientVerifier},
    sign::SingleCertAndKey,
    version,
};
use std::{io, path::Path, sync::Arc};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The name that the certificates of nodes are for.
pub const NODE: &str = "forebay-node";

/// A connection that this node has accepted.
pub type AcceptedPeer = tokio_rustls::server::TlsStream<TcpStream>;
/// A connection that this node has made.
pub type DialledPeer = tokio_rustls::client::TlsStream<TcpStream>;

/// The contents of the three files that a node needs, in PEM, under the names that errors use.
#[derive(Clone, PartialEq, Eq)]
pub struct PeerFiles {
    ca: (String, Vec<u8>),
    certificate: (String, Vec<u8>),
    key: (String, Vec<u8>),
}

impl PeerFiles {
    /// The cluster's CA, and this node's certificate and key.
    ///
    /// # Errors
    /// `Invalid` with the file that cannot be read.
    pub fn read(ca: &Path, certificate: &Path, key: &Path) -> Result<Self> {
        let named = |setting: &str, path: &Path| -> Result<_> {
            let name = format!("{setting} {}", path.display());
            Ok((name, read(setting, path)?))
        };
        Ok(PeerFiles {
            ca: named("cluster.ca", ca)?,
            certificate: named("cluster.cert", certificate)?,
            key: named("cluster.key", key)?,
        })
    }
}

/// What a node needs to speak with others. Cheap to clone: all clones share it, and what replaces
/// it.
#[derive(Clone)]
pub struct PeerTls(Arc<ArcSwap<Ends>>);

/// Both ends, with the same certificates. New ones remember no sessions: whoever was let in by
/// earlier certificates has to show one again.
struct Ends {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
    not_after_secs: Option<i64>,
}

impl PeerTls {
    /// # Errors
    /// `Invalid` for files that cannot be used, a key that is not the certificate's, or a
    /// certificate that other nodes would refuse.
    pub fn new(files: &PeerFiles) -> Result<Self> {
        Ok(PeerTls(Arc::new(ArcSwap::from_pointee(Ends::new(files)?))))
    }

    /// Uses these for connections that begin from now on; the others go on.
    ///
    /// # Errors
    /// As [`PeerTls::new`]: then nothing changes.
    pub fn replace(&self, files: &PeerFiles) -> Result<()> {
        self.0.store(Arc::new(Ends::new(files)?));
        Ok(())
    }

    /// When this node's certificate expires, in seconds since the Unix epoch.
    pub fn not_after_secs(&self) -> Option<i64> {
        self.0.load().not_after_secs
    }

    /// The handshake with whoever has connected.
    ///
    /// # Errors
    /// If the other end does not show a node's certificate.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<AcceptedPeer> {
        let stream = self.0.load_full().acceptor.accept(stream).await?;
        // The library checks names of servers only.
        let shown = stream.get_ref().1.peer_certificates();
        let is_node = shown
            .and_then(|chain| ParsedCertificate::try_from(chain.first()?).ok())
            .is_some_and(|own| verify_server_name(&own, &node()).is_ok());
        match is_node {
            true => Ok(stream),
            false => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("the certificate that was shown is not for the name {NODE}"),
            )),
        }
    }

    /// The handshake with the node that was connected to.
    ///
    /// # Errors
    /// If the other end does not show a node's certificate. If it refuses ours, the first read
    /// fails.
    pub async fn connect(&self, stream: TcpStream) -> io::Result<DialledPeer> {
        self.0.load_full().connector.connect(node(), stream).await
    }
}

impl Ends {
    fn new(files: &PeerFiles) -> Result<Self> {
        let failed = |e: rustls::Error| Error::internal(format!("TLS between nodes: {e}"));
        let [ca, certificate, key] = [&files.ca, &files.certificate, &files.key]
            .map(|(name, pem)| (name.as_str(), pem.as_slice()));
        let roots = Arc::new(roots(ca.0, ca.1)?);
        let own = Identity::parse_of(certificate, key)?;
        check(&own, roots.clone()).map_err(|e| {
            Error::invalid(format!(
                "{}: other nodes would refuse it: {e}",
                certificate.0
            ))
            .hint(format!(
                "a certificate of cluster.ca, valid now, for the host name {NODE}"
            ))
        })?;
        let shown = Arc::new(SingleCertAndKey::from(own.certified));
        let versions = &[&version::TLS13];

        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider());
        let verifier = verifier
            .build()
            .map_err(|e| Error::invalid(format!("{}: {e}", ca.0)))?;
        let server = ServerConfig::builder_with_provider(provider());
        let server = server.with_protocol_versions(versions).map_err(failed)?;
        let server = server
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(shown.clone());

        let client = ClientConfig::builder_with_provider(provider());
        let client = client.with_protocol_versions(versions).map_err(failed)?;
        let client = client
            .with_root_certificates(roots)
            .with_client_cert_resolver(shown);
        Ok(Ends {
            acceptor: TlsAcceptor::from(Arc::new(server)),
            connector: TlsConnector::from(Arc::new(client)),
            not_after_secs: own.not_after_secs,
        })
    }
}

fn node() -> ServerName<'static> {
    ServerName::try_from(NODE).expect("a name")
}

/// Whether other nodes will take the certificate, now; why not.
pub(crate) fn check(own: &Identity, roots: Arc<RootCertStore>) -> Result<(), String> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
        .build()
        .map_err(|e| e.to_string())?;
    let chain = &own.certified.cert;
    verifier
        .verify_server_cert(&chain[0], &chain[1..], &node(), &[], UnixTime::now())
        .map(|_| ())
        .map_err(|e| e.to_string())
}
