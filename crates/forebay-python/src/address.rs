//! Where the node is: what a URL says, and whether the node turns out to be on this machine.

use crate::failure::{Failure, Result};
use forebay_protocol::{DEFAULT_PORT, DEFAULT_TLS_PORT, node::NodeInfo};
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
    /// `http://host[:port]`, `https://host[:port]`, `host:port`, `unix:/path`, `unix:///path`.
    pub fn parse(url: &str) -> Result<Address> {
        if let Some(path) = url.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') {
                return Err(Failure::invalid("a unix: URL needs an absolute path")
                    .hint("unix:/run/forebay/forebay.sock"));
            }
            return Ok(Address {
                tcp: None,
                tls: false,
                unix: Some(PathBuf::from(path)),
            });
        }
        let (tls, rest) = match url.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((scheme, _)) => {
                return Err(
                    Failure::invalid(format!("{scheme}:// is not a node's URL")).hint(
                        "http://host:port or unix:/path; a bucket goes into origin=, as in \
                        Client(origin=\"s3://bucket\", cache=\"/nvme/forebay:100GiB\")",
                    ),
                );
            }
            None => (false, url),
        };
        let authority = rest.trim_end_matches('/');
        if authority.contains('@') {
            return Err(
                Failure::invalid("the URL holds a user or password").hint("pass token= instead")
            );
        }
        if authority.is_empty() || authority.contains(['/', '?', '#', ' ']) {
            return Err(Failure::invalid("the URL is not http://host:port")
                .hint("for example http://127.0.0.1:8080"));
        }
        let port_follows = authority
            .rsplit_once(':')
            .is_some_and(|(host, _)| !host.contains(':') || host.ends_with(']'));
        let tcp = if port_follows {
            authority.to_owned()
        } else {
            format!(
                "{authority}:{}",
                if tls { DEFAULT_TLS_PORT } else { DEFAULT_PORT }
            )
        };
        Ok(Address {
            tcp: Some(tcp),
            tls,
            unix: None,
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
