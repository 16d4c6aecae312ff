//! Node addresses, as people write them.

use crate::{DEFAULT_PORT, DEFAULT_TLS_PORT};
use forebay_core::{Error, Result};
use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
};

const HINT: &str = "as in http://127.0.0.1:8080 or unix:/run/forebay/forebay.sock";

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host and a port.
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// 1 to 65535.
        port: u16,
        /// Whether it speaks TLS: `https://`.
        tls: bool,
    },
    /// The path of its Unix socket.
    Unix(PathBuf),
}

impl Address {
    /// `http://host[:port]`, `https://host[:port]`, `host[:port]`, `unix:/path`, `unix:///path`.
    /// The default port is [`DEFAULT_PORT`], or [`DEFAULT_TLS_PORT`] for `https://`.
    ///
    /// # Errors
    /// `Invalid` for anything else.
    pub fn parse(text: &str) -> Result<Address> {
        let bad = |why: &str| {
            Error::invalid(format!("{text:?} is not the address of a node: {why}")).hint(HINT)
        };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path {
                "" => Err(bad("no path")),
                path if path.starts_with('/') => Ok(Address::Unix(PathBuf::from(path))),
                _ => Err(bad("the path must be absolute")),
            };
        }
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((other, _)) => {
                return Err(
                    bad(&format!("{other:?} is not a way to reach a node")).hint(
                        "http://host:port or unix:/path; a bucket goes into origin=, as in \
                     Client(origin=\"s3://bucket\", cache=\"/nvme/forebay:100GiB\"), or --origin",
                    ),
                );
            }
            None => (false, text),
        };
        if rest.contains('@') {
            return Err(bad("it has a user or a password").hint("give a token instead"));
        }
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#']) {
            return Err(bad("it has more than a host and a port"));
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest
                    .split_once(']')
                    .ok_or_else(|| bad("no ] after the ["))?;
                if host.parse::<Ipv6Addr>().is_err() {
                    return Err(bad("no IPv6 address between the brackets"));
                }
                match after.strip_prefix(':') {
                    Some(port) => (host, Some(port)),
                    None if after.is_empty() => (host, None),
                    None => return Err(bad("only a port can follow the ]")),
                }
            }
            None if authority.parse::<Ipv6Addr>().is_ok() => (authority, None),
            None => match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if host.is_empty() {
            return Err(bad("no host"));
        }
        if !host.chars().all(plain) && host.parse::<Ipv6Addr>().is_err() {
            return Err(bad("the host is neither a name nor an address"));
        }
        let port = match port {
            None if tls => DEFAULT_TLS_PORT,
            None => DEFAULT_PORT,
            Some(port) => match port.parse() {
                Ok(port) if port > 0 => port,
                _ => return Err(bad("the port is not a number from 1 to 65535")),
            },
        };
        Ok(Address::Tcp {
            host: host.to_owned(),
            port,
            tls,
        })
    }

    /// Whether the address can only mean this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Unix(_) => true,
            Address::Tcp { host, .. } => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }

    /// For the `Host` header: `host:port`.
    pub fn authority(&self) -> String {
        match self {
            Address::Unix(_) => "localhost".to_owned(),
            Address::Tcp { host, port, .. } if host.contains(':') => format!("[{host}]:{port}"),
            Address::Tcp { host, port, .. } => format!("{host}:{port}"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp { tls, .. } => {
                let scheme = if *tls { "https" } else { "http" };
                write!(f, "{scheme}://{}", self.authority())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_mean_one_thing_each() {
        for (text, shown) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://node-3:8080/", "http://node-3:8080"),
            ("localhost:81", "http://localhost:81"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("http://[::1]", "http://[::1]:8080"),
            ("::1", "http://[::1]:8080"),
            ("node", "http://node:8080"),
            ("http://node", "http://node:8080"),
            ("http://node/", "http://node:8080"),
            ("http://node:80", "http://node:80"),
            ("https://node", "https://node:443"),
            ("https://[::1]:8443", "https://[::1]:8443"),
            ("unix:/run/f.sock", "unix:/run/f.sock"),
            ("unix:///run/f.sock", "unix:/run/f.sock"),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.to_string(), shown, "{text}");
            assert_eq!(Address::parse(shown).unwrap(), address);
        }
        for bad in [
            "",
            "unix:",
            "unix:run/f.sock",
            "ftp://a",
            "s3://bucket",
            "http://",
            "http://a/b",
            "http://a?b",
            "http://a b",
            "http://a:99999",
            "http://a:0",
            "http://a:",
            "http://a:b",
            "http://a:1:2",
            "http://[::1",
            "http://[a]",
            "http://[::1]8080",
            "http://u:p@a",
            "http://a\r\nb",
        ] {
            let e = Address::parse(bad).unwrap_err();
            assert!(e.hint_text().is_some(), "{bad}");
            assert!(!e.message().contains('\r'), "{bad}");
        }
        assert!(Address::parse("http://[::1]:1").unwrap().is_local());
        assert!(!Address::parse("http://10.0.0.1:1").unwrap().is_local());
    }
}
