//! What a web page must not do through the browser of somebody who views it.
//!
//! A node without keys trusts whoever reaches it, and that includes a browser on its machine: a
//! page from anywhere can make the browser POST to 127.0.0.1 and, if the page's own name resolves
//! there too (DNS rebinding), read the answers. Browsers say where such requests come from and by
//! which name they know the node. Other clients do not say where they come from, and use one of the
//! node's own names.
//!
//! This applies only to requests over TCP that need no key. A page has no key and cannot open a
//! Unix socket.

use forebay_core::{Error, Result};
use http::{HeaderMap, HeaderName, Method, header};
use std::net::IpAddr;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// How the node is reached.
pub struct Reached<'a> {
    /// On a loopback address, without TLS. Otherwise others assign the names (Kubernetes, DNS), and
    /// with TLS a page under another name has no certificate.
    pub by_loopback: bool,
    /// Its configured names.
    pub hostnames: &'a [String],
}

/// # Errors
/// `PermissionDenied`, with what to do.
pub fn check(reached: &Reached<'_>, method: &Method, headers: &HeaderMap) -> Result<()> {
    let text = |name: HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
    let host = text(header::HOST).unwrap_or_default();
    if reached.by_loopback && !is_own_name(host, reached.hostnames) {
        return Err(Error::permission_denied(format!(
            "this node does not answer to the name {:?}",
            forebay_core::name::shorten(host)
        ))
        .hint("add the name to listen.hostnames, or use 127.0.0.1 or localhost"));
    }
    let denied = || {
        Err(
            Error::permission_denied("web pages of other sites may not send requests to this node")
                .hint("give the node keys (auth.keys) to serve web pages"),
        )
    };
    // Opening an object's address in a browser is not an attack: the page with the link does not
    // see the object.
    let is_opened =
        matches!(*method, Method::GET | Method::HEAD) && text(SEC_FETCH_MODE) == Some("navigate");
    if matches!(text(SEC_FETCH_SITE), Some("cross-site" | "same-site")) && !is_opened {
        return denied();
    }
    match headers.get(header::ORIGIN) {
        None => Ok(()),
        Some(origin) => {
            let own = origin
                .to_str()
                .ok()
                .and_then(|o| o.split_once("://"))
                .is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host));
            if own { Ok(()) } else { denied() }
        }
    }
}

/// Whether a request's `Host` is a name that no other site can have.
fn is_own_name(host: &str, hostnames: &[String]) -> bool {
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()))
        .map_or(host, |(name, _)| name);
    let name = name.strip_suffix('.').unwrap_or(name);
    let address = name
        .strip_prefix('[')
        .and_then(|n| n.strip_suffix(']'))
        .unwrap_or(name);
    // HTTP/1.0 has no `Host`. A name without a dot belongs to this machine or its network, never to
    // a site.
    if !name.contains('.') || address.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = name.to_ascii_lowercase();
    let is_or_is_under = |of: &str| {
        name.strip_suffix(of)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    is_or_is_under("localhost")
        || hostnames
            .iter()
            .any(|h| is_or_is_under(&h.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(method: Method, by_loopback: bool, pairs: &[(&'static str, &str)]) -> bool {
        let headers = pairs
            .iter()
            .map(|(n, v)| (n.parse::<HeaderName>().unwrap(), v.parse().unwrap()))
            .collect();
        let reached = Reached {
            by_loopback,
            hostnames: &["s3.example.com".to_owned()],
        };
        check(&reached, &method, &headers).is_ok()
    }

    #[test]
    fn names_that_only_this_node_has_are_its_own() {
        for host in [
            "",
            "127.0.0.1",
            "127.0.0.1:8080",
            "10.1.2.3:80",
            "[::1]:8080",
            "localhost:8080",
            "LOCALHOST",
            "bucket.localhost:8080",
            "s3.example.com",
            "my.bucket.S3.example.com:8080",
            "forebay:8080",
            "localhost.",
        ] {
            assert!(ask(Method::GET, true, &[("host", host)]), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "notlocalhost.example",
            "evils3.example.com",
            "s3.example.com.evil.example",
        ] {
            assert!(!ask(Method::GET, true, &[("host", host)]), "{host}");
            assert!(
                ask(Method::GET, false, &[("host", host)]),
                "{host}: names in a network are given by others"
            );
        }
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let host = ("host", "127.0.0.1:8080");
        let post = |pair| ask(Method::POST, true, &[host, pair]);
        assert!(ask(Method::POST, true, &[host]), "no browser");
        for pair in [
            ("origin", "http://evil.example"),
            ("origin", "http://127.0.0.1:3000"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert!(!post(pair), "{pair:?}");
        }
        for pair in [
            ("origin", "http://127.0.0.1:8080"),
            ("sec-fetch-site", "same-origin"),
            ("sec-fetch-site", "none"),
        ] {
            assert!(post(pair), "{pair:?}");
        }
        let link = [
            host,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
        ];
        assert!(ask(Method::GET, true, &link) && !ask(Method::POST, true, &link));
    }
}
