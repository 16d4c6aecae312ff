//! TLS for both ends: a listener's certificate, which can be replaced while connections are open,
//! and whom a client trusts; and between nodes of a cluster, where each end shows its own, of the
//! cluster's CA.
//!
//! TLS 1.2 and 1.3 by `rustls` with *ring*, HTTP/1.1 by ALPN. Each configuration names the
//! provider, so nothing depends on which one the process has installed. Files are PEM.
//!
//! Invariant: checking certificates cannot be switched off. Whoever has their own certificate names
//! its CA.

#![warn(missing_docs)]

mod authority;
mod client;
mod peer;
mod server;
mod x509;

pub use authority::{Authority, DAYS_MAX, Issued, NAME_MAX_CHARS};
pub use client::{ClientStream, ClientTls};
pub use peer::{AcceptedPeer, DialledPeer, NODE, PeerFiles, PeerTls};
pub use server::{Accept, Identity, ServerStream, ServerTls};

use forebay_core::{Error, Result};
use rustls::crypto::CryptoProvider;
use std::{path::Path, sync::Arc};

const ALPN: &[u8] = b"http/1.1";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn read(what: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| {
        Error::invalid(format!("{what}: {} cannot be read: {e}", path.display()))
            .hint("check the path and its permissions")
    })
}
