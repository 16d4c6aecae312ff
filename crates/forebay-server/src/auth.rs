//! Bearer tokens for `/v1/`. (S3 signatures are `s3::guard`'s and the S3 library's matter.)

use crate::{config::Config, note::Peer};
use forebay_core::{Error, ErrorKind, Result};
use http::{HeaderMap, header::AUTHORIZATION};

/// Whether the sender of a request under `/v1/` may come in.
///
/// # Errors
/// `Unauthenticated`, with what to do.
pub fn check_token(config: &Config, peer: Peer, headers: &HeaderMap) -> Result<()> {
    if peer == Peer::Unix || !config.needs_credentials() {
        return Ok(());
    }
    let denied = |message: &str, hint: &str| Err(Error::new(ErrorKind::Unauthenticated, message).hint(hint));
    if config.auth.tokens.is_empty() {
        return denied("this node has keys for S3, but no tokens for /v1/", "ask the operator to set auth.tokens, or use the Unix socket");
    }
    let given = headers
        .get(AUTHORIZATION)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.strip_prefix("Bearer ").or_else(|| v.strip_prefix("bearer ")));
    match given {
        None => denied("a token is needed", "send it as Authorization: Bearer TOKEN"),
        // Every token is looked at, and each byte of it, so that the time tells nothing.
        Some(given) if config.auth.tokens.iter().fold(false, |found, t| same(t.reveal(), given.trim()) | found) => Ok(()),
        Some(_) => denied("the token is not one of this node's", "check AIS_AUTHN_TOKEN or FOREBAY_TOKEN"),
    }
}

fn same(a: &str, b: &str) -> bool {
    let difference = a.bytes().zip(b.bytes().chain(std::iter::repeat(0))).fold(a.len() ^ b.len(), |d, (x, y)| d | usize::from(x ^ y));
    difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{KeyPair, Secret};

    #[test]
    fn tokens_are_asked_for_over_tcp_only() {
        let tcp = Peer::Tcp("127.0.0.1:1".parse().unwrap());
        let with = |token: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(t) = token {
                headers.insert(AUTHORIZATION, format!("Bearer {t}").parse().unwrap());
            }
            headers
        };
        let mut config = Config::default();
        assert!(check_token(&config, tcp, &with(None)).is_ok());
        config.auth.keys.push(KeyPair { access_key: "a".into(), secret_key: Secret::new("s") });
        assert!(check_token(&config, tcp, &with(Some("x"))).is_err(), "keys without tokens close /v1/");
        config.auth.tokens = vec![Secret::new("t1"), Secret::new("t2")];
        assert!(check_token(&config, tcp, &with(Some("t2"))).is_ok());
        for bad in [None, Some("t3"), Some("t"), Some("t22"), Some("")] {
            assert!(check_token(&config, tcp, &with(bad)).is_err(), "{bad:?}");
        }
        assert!(check_token(&config, Peer::Unix, &with(None)).is_ok());
    }
}
