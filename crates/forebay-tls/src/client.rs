//! A client's end: whom it trusts, and the handshake.

use crate::{ALPN, provider, read};
use forebay_core::{Error, ErrorKind, Result};
use rustls::{
    CertificateError, ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use std::{io, path::Path, sync::Arc};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A connection to a server, encrypted.
pub type ClientStream = tokio_rustls::client::TlsStream<TcpStream>;

/// What a client needs to speak TLS. Cheap to clone: all clones share it.
#[derive(Clone)]
pub struct ClientTls(TlsConnector);

impl ClientTls {
    /// Trusts the certificates in the file `ca` and nothing else; without a file, those of the
    /// system (`SSL_CERT_FILE` names others).
    ///
    /// # Errors
    /// `Invalid` for a file without certificates, or a system without any.
    pub fn new(ca: Option<&Path>) -> Result<Self> {
        let roots = match ca {
            Some(path) => {
                let name = format!("the CA file {}", path.display());
                roots(&name, &read("the CA file", path)?)?
            }
            None => {
                // Some systems have certificates that rustls cannot read; the others count.
                let mut roots = RootCertStore::empty();
                let (added, _) =
                    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if added == 0 {
                    return Err(
                        Error::invalid("this system does not have CA certificates").hint(
                            "install the package ca-certificates, or name a CA file: --ca, ca=, \
                             FOREBAY_CA_FILE",
                        ),
                    );
                }
                roots
            }
        };
        let config =
            ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let config = config.map_err(|e| Error::internal(format!("TLS: {e}")))?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(ClientTls(TlsConnector::from(Arc::new(config))))
    }

    /// Makes the handshake with `host`, a name or an address without its port.
    ///
    /// # Errors
    /// `Unauthenticated` if the other end is not who it should be; `OriginUnavailable` if the
    /// connection fails.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> Result<ClientStream> {
        let name =
            ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(|_| {
                Error::invalid(format!("{host:?} is neither a host name nor an address"))
            })?;
        self.0
            .connect(name, stream)
            .await
            .map_err(|e| explain(host, e))
    }
}

/// The certificates in the file of this name: whoever has one of these CAs is trusted.
pub(crate) fn roots(name: &str, pem: &[u8]) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let bad =
        |why: String| Error::invalid(format!("{name}: {why}")).hint("a file of PEM certificates");
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let added = certificate
            .map_err(|e| bad(e.to_string()))
            .and_then(|c| roots.add(c).map_err(|e| bad(e.to_string())));
        added?;
    }
    if roots.is_empty() {
        return Err(bad("it does not contain a certificate".into()));
    }
    Ok(roots)
}

fn explain(host: &str, e: io::Error) -> Error {
    let tls = e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(why)) => Error::new(
            ErrorKind::Unauthenticated,
            format!(
                "the certificate of {host} is not \
                trusted: {}",
                reason(why)
            ),
        )
        .hint(advice(why))
        .caused_by(e),
        Some(rustls::Error::InvalidMessage(_)) => {
            Error::origin_unavailable(format!("{host} does not speak TLS there"))
                .hint("did you mean http://?")
                .caused_by(e)
        }
        _ => Error::origin_unavailable(format!(
            "the TLS handshake with {host} failed: \
            {e}"
        ))
        .caused_by(e),
    }
}

/// What is wrong with a certificate.
fn reason(why: &CertificateError) -> String {
    match why {
        // The library has a name for it, and no words.
        CertificateError::UnknownIssuer => {
            "no CA that is trusted here has signed it (UnknownIssuer)".to_owned()
        }
        // Its own name; around it are only the names of types.
        CertificateError::Other(other) => other.to_string(),
        other => other.to_string(),
    }
}

/// What to do about it.
fn advice(why: &CertificateError) -> &'static str {
    match why {
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => {
            "the node needs a certificate that is valid now, and takes it over while it runs; or \
             the clock of this machine is wrong"
        }
        CertificateError::Other(_) => {
            "the node needs a certificate of its own, for this host (subjectAltName) and signed by \
             a CA; one that `openssl req -x509` makes is a CA's"
        }
        _ => {
            "name a CA of your own with --ca, ca= or FOREBAY_CA_FILE; the certificate must be for \
             this host"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::OtherError;

    #[test]
    fn what_to_do_depends_on_what_is_wrong_with_the_certificate() {
        let explained = |why: CertificateError| {
            let e = explain(
                "node",
                io::Error::other(rustls::Error::InvalidCertificate(why)),
            );
            assert_eq!(e.kind(), ErrorKind::Unauthenticated);
            e
        };
        let hint = |why| explained(why).hint_text().unwrap().to_owned();
        let stranger = hint(CertificateError::UnknownIssuer);
        assert_eq!(hint(CertificateError::NotValidForName), stranger);
        let ended = hint(CertificateError::Expired);
        assert_ne!(ended, stranger);
        assert_eq!(hint(CertificateError::NotValidYet), ended);
        let other = || CertificateError::Other(OtherError(Arc::new(io::Error::other("a CA's"))));
        assert!(![stranger, ended].contains(&hint(other())));
        assert!(explained(other()).message().ends_with(": a CA's"));
    }
}
