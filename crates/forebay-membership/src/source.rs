//! Where the map comes from, as operators write it.

use forebay_core::{Error, Result, name::shorten};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, str::FromStr};

const HINT: &str = "a file, as in /etc/forebay/map.json; dns:HOST:PORT, as in dns:forebay:8300; or \
    etcd://HOST:PORT[,HOST:PORT]/NAME, as in etcd://10.0.0.9:2379/training (etcds:// for TLS)";
/// Members of one etcd.
const ENDPOINTS_MAX: usize = 16;
/// The longest name of a cluster.
const NAME_MAX_BYTES: usize = 100;

/// Where a node finds the map of its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    /// A file, which an operator gives to all nodes.
    File(PathBuf),
    /// A name that has the addresses of all nodes, as a headless service has.
    Dns {
        /// The name.
        host: String,
        /// The port at which nodes listen for each other.
        port: u16,
    },
    /// etcd.
    Etcd {
        /// Its members, each `HOST:PORT`.
        endpoints: Vec<String>,
        /// Whether it speaks TLS.
        tls: bool,
        /// The cluster's name, under which its map lies there.
        name: String,
    },
}

impl Source {
    /// The cluster's name, where the source says it; the map in a file has its own.
    pub fn cluster(&self) -> Option<&str> {
        match self {
            Source::File(_) => None,
            Source::Dns { host, .. } => Some(host),
            Source::Etcd { name, .. } => Some(name),
        }
    }
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(format!("{:?} is no source of a map: {why}", shorten(text))).hint(HINT)
        };
        if let Some(service) = text.strip_prefix("dns:") {
            let (host, port) = service
                .rsplit_once(':')
                .ok_or_else(|| bad("it has no port"))?;
            let is_host = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if host.is_empty() || host.len() > 253 || !host.chars().all(is_host) {
                return Err(bad("what stands before the port is not the name of a host"));
            }
            let port = port.parse().ok().filter(|&port| port > 0);
            return Ok(Source::Dns {
                host: host.to_owned(),
                port: port.ok_or_else(|| bad("the port is no number from 1 to 65535"))?,
            });
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => Err(bad("it is empty")),
                path => Ok(Source::File(path.into())),
            };
        };
        let tls = match scheme {
            "etcd" => false,
            "etcds" => true,
            "file" => return Ok(Source::File(rest.into())),
            other => {
                return Err(bad(&format!(
                    "{other:?} is none of etcd, etcds, dns and file"
                )));
            }
        };
        let (hosts, name) = rest
            .split_once('/')
            .ok_or_else(|| bad("it does not name the cluster"))?;
        let name = name.trim_end_matches('/');
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if name.is_empty() || name.len() > NAME_MAX_BYTES || !name.chars().all(is_name) {
            return Err(bad(
                "the cluster's name must be 1 to 100 letters, digits, '-', '.' and '_'",
            ));
        }
        if hosts.contains('@') {
            return Err(bad("it has a user or a password")
                .hint("set cluster.etcd_user and cluster.etcd_password_file"));
        }
        let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        for endpoint in &endpoints {
            let url = url::Url::parse(&format!("http://{endpoint}"));
            let is_whole =
                url.is_ok_and(|u| u.has_host() && u.path() == "/" && u.query().is_none());
            let has_port = endpoint
                .rsplit_once(':')
                .is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|p| p > 0));
            if !is_whole || !has_port {
                return Err(bad(&format!("{:?} is not HOST:PORT", shorten(endpoint))));
            }
        }
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(bad(&format!("it has more than {ENDPOINTS_MAX} endpoints")));
        }
        Ok(Source::Etcd {
            endpoints,
            tls,
            name: name.to_owned(),
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::File(path) => write!(f, "{}", path.display()),
            Source::Dns { host, port } => write!(f, "dns:{host}:{port}"),
            Source::Etcd {
                endpoints,
                tls,
                name,
            } => {
                let scheme = if *tls { "etcds" } else { "etcd" };
                write!(f, "{scheme}://{}/{name}", endpoints.join(","))
            }
        }
    }
}

impl TryFrom<String> for Source {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Source> for String {
    fn from(source: Source) -> String {
        source.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_as_they_are_written() {
        for text in [
            "/etc/forebay/map.json",
            "map.json",
            "dns:forebay.training.svc.cluster.local:8300",
            "etcd://127.0.0.1:2379/training",
            "etcds://etcd-0:2379,etcd-1:2379,[fd00::1]:2379/a.b_c-1",
        ] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        let file: Source = "file:///etc/map.json".parse().unwrap();
        assert_eq!(file, Source::File("/etc/map.json".into()));
    }

    #[test]
    fn nonsense_is_refused_with_what_it_lacks() {
        let long = format!("etcd://a:1/{}", "n".repeat(101));
        let many = format!("etcd://{}a:1/n", "a:1,".repeat(20));
        for (text, why) in [
            ("", "empty"),
            ("dns:forebay", "no port"),
            ("dns::8300", "name of a host"),
            ("dns:a b:8300", "name of a host"),
            ("dns:forebay:0", "no number"),
            ("dns:forebay:99999", "no number"),
            ("etcd://127.0.0.1:2379", "name the cluster"),
            ("etcd://127.0.0.1:2379/", "cluster's name"),
            ("etcd://127.0.0.1:2379/a/b", "cluster's name"),
            (&long, "cluster's name"),
            ("etcd://user:pw@127.0.0.1:2379/a", "a password"),
            ("etcd:///a", "not HOST:PORT"),
            ("etcd://a:1,,b:1/a", "not HOST:PORT"),
            ("etcd://host/a", "not HOST:PORT"),
            (&many, "more than 16"),
            ("consul://a:1/b", "none of"),
        ] {
            let e = text.parse::<Source>().unwrap_err();
            assert!(e.to_string().contains(why), "{text}: {e}");
            assert!(e.hint_text().is_some(), "{text}");
        }
    }
}
