//! Node addresses, as people write them.

use crate::{DEFAULT_PORT, DEFAULT_TLS_PORT};
use forebay_core::{Error, Result};
use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
};

const HINT: &str = "as in http://127.0.0.1:8080 or unix:/run/forebay/forebay.sock";

/// The most nodes that one list names, and that one name leads to.
pub const ADDRESSES_MAX: usize = 256;
/// How many nodes of a list a message names.
const SHOWN_MAX: usize = 8;

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

/// Where the nodes are that a client may ask: one address, or a list. A name may lead to several
/// nodes, too; only the client finds that out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses(Vec<Address>);

impl Addresses {
    /// Addresses separated by commas. Duplicates count once.
    ///
    /// # Errors
    /// `Invalid` for an empty list, an empty item, an item that is no address, and more than
    /// [`ADDRESSES_MAX`] items.
    pub fn parse(text: &str) -> Result<Addresses> {
        if !text.contains(',') {
            return Ok(Address::parse(text.trim())?.into());
        }
        Addresses::of(text.split(','))
    }

    /// A list whose items are known; none of them is divided at its commas.
    ///
    /// # Errors
    /// As [`Addresses::parse`].
    pub fn of(items: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Addresses> {
        let mut all: Vec<Address> = Vec::new();
        for (i, item) in items.into_iter().enumerate() {
            if i == ADDRESSES_MAX {
                return Err(Error::invalid(format!(
                    "the list of nodes has more than {ADDRESSES_MAX} addresses"
                ))
                .hint("name some of them, or one DNS name that leads to all"));
            }
            let item = item.as_ref().trim();
            if item.is_empty() {
                return Err(Error::invalid(format!(
                    "address {} in the list of nodes is empty",
                    i + 1
                ))
                .hint("one comma between two addresses, as in http://a:8080,http://b:8080"));
            }
            let address = Address::parse(item)
                .map_err(|e| e.context(format!("address {} in the list of nodes", i + 1)))?;
            if !all.contains(&address) {
                all.push(address);
            }
        }
        if all.is_empty() {
            return Err(Error::invalid("the list of nodes is empty").hint(HINT));
        }
        Ok(Addresses(all))
    }

    /// The addresses, each once; at least one.
    pub fn all(&self) -> &[Address] {
        &self.0
    }

    /// The first of them.
    pub fn first(&self) -> &Address {
        &self.0[0]
    }
}

impl From<Address> for Addresses {
    fn from(one: Address) -> Self {
        Addresses(vec![one])
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, address) in self.0.iter().take(SHOWN_MAX).enumerate() {
            write!(f, "{}{address}", if i == 0 { "" } else { "," })?;
        }
        match self.0.len().saturating_sub(SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_each_node_once() {
        let shown = |text: &str| Addresses::parse(text).unwrap().to_string();
        assert_eq!(shown("a"), "http://a:8080");
        assert_eq!(shown("a:81, https://b"), "http://a:81,https://b:443");
        assert_eq!(
            shown("a,http://a:8080/,unix:/s,a:8080"),
            "http://a:8080,unix:/s"
        );
        let many = |n: usize| {
            (0..n)
                .map(|i| format!("n{i}"))
                .collect::<Vec<_>>()
                .join(",")
        };
        assert!(shown(&many(ADDRESSES_MAX)).ends_with("http://n7:8080 and 248 more"));
        // Only where the list is one text.
        let path = Addresses::of(["unix:/run/a,b.sock"]).unwrap();
        assert_eq!(path.first(), &Address::Unix("/run/a,b.sock".into()));
        for (bad, what) in [
            ("a,,b", "address 2 in the list of nodes is empty"),
            ("a,", "address 2 in the list of nodes is empty"),
            (",", "address 1 in the list of nodes is empty"),
            (
                "a,b:x",
                "address 2 in the list of nodes: \"b:x\" is not the address",
            ),
            (&many(ADDRESSES_MAX + 1), "more than 256 addresses"),
        ] {
            let e = Addresses::parse(bad).unwrap_err();
            assert!(e.message().contains(what), "{e:?}");
            assert!(e.hint_text().is_some(), "{bad}");
        }
        assert!(
            Addresses::of([""; 0])
                .unwrap_err()
                .message()
                .contains("empty")
        );
        assert!(Addresses::of(["a", " "]).is_err());
    }

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
