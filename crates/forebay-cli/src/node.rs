//! Where the node is: `http://host:port`, `https://host:port` or `unix:PATH`.

use forebay_core::{Error, Result};
use std::{fmt, path::PathBuf};
use url::Url;

/// The address of a node's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeAddr {
    Tcp { host: String, port: u16, tls: bool },
    Unix(PathBuf),
}

/// The address when neither `--node` nor `FOREBAY_NODE` says another: where `forebay serve` listens
/// by itself.
pub const DEFAULT_NODE: &str = "http://127.0.0.1:8080";

impl NodeAddr {
    /// Parses a URL, `unix:PATH`, or `host:port`.
    pub fn parse(text: &str) -> Result<Self> {
        const HINT: &str = "as in http://127.0.0.1:8080 or unix:/run/forebay/forebay.sock";
        let bad =
            |why: &str| Error::invalid(format!("bad node address: {text:?}: {why}")).hint(HINT);
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() {
                Err(bad("no path"))
            } else {
                Ok(NodeAddr::Unix(PathBuf::from(path)))
            };
        }
        let with_scheme = if text.contains("://") {
            text.to_owned()
        } else {
            format!("http://{text}")
        };
        let url = Url::parse(&with_scheme).map_err(|e| bad(&e.to_string()))?;
        let tls = match url.scheme() {
            "http" => false,
            "https" => true,
            other => return Err(bad(&format!("{other:?} is not a way to reach a node"))),
        };
        if url.path() != "/" || url.query().is_some() || !url.username().is_empty() {
            return Err(bad("only a host and a port belong here"));
        }
        let host = url
            .host_str()
            .ok_or_else(|| bad("no host"))?
            .trim_matches(['[', ']'])
            .to_owned();
        Ok(NodeAddr::Tcp {
            host,
            port: url.port().unwrap_or(if tls { 443 } else { 80 }),
            tls,
        })
    }

    /// Whether only this machine can be meant.
    pub fn is_local(&self) -> bool {
        match self {
            NodeAddr::Unix(_) => true,
            NodeAddr::Tcp { host, .. } => {
                host == "localhost"
                    || host
                        .parse::<std::net::IpAddr>()
                        .is_ok_and(|ip| ip.is_loopback())
            }
        }
    }

    /// The `Host` header.
    pub fn authority(&self) -> String {
        match self {
            NodeAddr::Unix(_) => "localhost".to_owned(),
            NodeAddr::Tcp { host, port, .. } if host.contains(':') => format!("[{host}]:{port}"),
            NodeAddr::Tcp { host, port, .. } => format!("{host}:{port}"),
        }
    }
}

impl fmt::Display for NodeAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeAddr::Unix(path) => write!(f, "unix:{}", path.display()),
            NodeAddr::Tcp { tls, .. } => write!(
                f,
                "{}://{}",
                if *tls { "https" } else { "http" },
                self.authority()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, shown) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://node-3:8080/", "http://node-3:8080"),
            ("localhost:81", "http://localhost:81"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("http://node", "http://node:80"),
            ("https://node", "https://node:443"),
            ("https://[::1]:8443", "https://[::1]:8443"),
            ("unix:/run/f.sock", "unix:/run/f.sock"),
            ("unix:///run/f.sock", "unix:/run/f.sock"),
        ] {
            assert_eq!(NodeAddr::parse(text).unwrap().to_string(), shown, "{text}");
        }
        for bad in [
            "",
            "unix:",
            "ftp://a",
            "http://a/b",
            "http://a:99999",
            "http://u:p@a",
        ] {
            assert!(
                NodeAddr::parse(bad).unwrap_err().hint_text().is_some(),
                "{bad}"
            );
        }
        assert!(NodeAddr::parse("http://[::1]:1").unwrap().is_local());
        assert!(!NodeAddr::parse("http://10.0.0.1:1").unwrap().is_local());
    }
}
