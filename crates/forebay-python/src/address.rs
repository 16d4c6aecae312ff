//! Where the node is: what a URL says, and whether the node turns out to be on this machine.

use crate::failure::Result;
use forebay_protocol::node::NodeInfo;
use std::path::{Path, PathBuf};

/// A parsed client URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// `host:port`, if the node is reached over TCP.
    pub tcp: Option<String>,
    /// Whether TLS is spoken there.
    pub tls: bool,
    /// The node's Unix socket, if the URL names it.
    pub unix: Option<PathBuf>,
}

impl Address {
    /// See [`forebay_protocol::Address::parse`].
    pub fn parse(url: &str) -> Result<Address> {
        let address = forebay_protocol::Address::parse(url)?;
        let tcp = Some(address.authority());
        Ok(match address {
            forebay_protocol::Address::Tcp { tls, .. } => Address {
                tcp,
                tls,
                unix: None,
            },
            forebay_protocol::Address::Unix(path) => Address {
                tcp: None,
                tls: false,
                unix: Some(path),
            },
        })
    }

    /// What URLs of it begin with.
    pub fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// The host without its port, which the certificate must name.
    pub fn host(&self) -> &str {
        self.tcp
            .as_deref()
            .and_then(|t| t.rsplit_once(':'))
            .map_or("localhost", |(host, _)| host)
    }

    /// For the `Host` header.
    pub fn authority(&self) -> &str {
        self.tcp.as_deref().unwrap_or("localhost")
    }
}

/// The node's socket, if the node says that it runs on this machine. (Whether the socket leads to
/// the same node is asked there: containers may share a kernel and not a file system.)
pub fn local_socket(info: &NodeInfo) -> Option<&Path> {
    let socket = info.unix_socket.as_deref().filter(|s| !s.is_empty())?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    (forebay_protocol::node::host_id(&boot) == info.host_id).then(|| Path::new(socket))
}
