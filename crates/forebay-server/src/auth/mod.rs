//! Who may come in, and what they may do: keys, tokens and their policies.
//!
//! S3 requests are signed with a key ([`Access::secret`] and [`Access::of_key`], asked by `s3/`);
//! requests under `/v1/` bring a token ([`Access::of_request`]). Either leads to a [`Policy`],
//! which is asked before anything is looked up. Keys come from the configuration and from
//! `auth.keys_file`; that file is read again when it changes or when the node is told to
//! (`watch.rs`).
//!
//! Invariants:
//! - the table of keys is replaced as a whole or not at all: a file that cannot be read leaves the
//!   one in force where it is;
//! - a node that was started with keys asks for them as long as it runs, even if a new file holds
//!   none.

mod policy;
pub mod watch;

pub use policy::{Policy, refusal};

use crate::{
    config::{Auth, KeyPair, KeysFile, Secret},
    note::Peer,
};
use forebay_core::{
    Error, ErrorKind, Result,
    sync::{Mutex, RwLock},
};
use http::{HeaderMap, header::AUTHORIZATION};
use std::{collections::HashMap, sync::Arc};
use watch::{Reload, ReloadStats};

/// The keys of one moment.
#[derive(Default)]
struct Table {
    keys: HashMap<String, (Secret, Arc<Policy>)>,
    tokens: Vec<(Secret, Arc<Policy>)>,
}

/// The keys in force.
pub struct Access {
    auth: Auth,
    table: RwLock<Arc<Table>>,
    /// The text that was taken over, or refused, last; `None` while the file cannot be read.
    seen: Mutex<Option<String>>,
    pub stats: ReloadStats,
}

impl Access {
    /// # Errors
    /// `Invalid` for keys that cannot work, or a keys file that cannot be read.
    pub fn new(auth: &Auth) -> Result<Self> {
        let text = read(auth)?;
        let table = Table::of(auth, &text)?;
        Ok(Access {
            auth: auth.clone(),
            table: RwLock::new(Arc::new(table)),
            seen: Mutex::new(Some(text)),
            stats: ReloadStats::default(),
        })
    }

    /// Whether requests of this peer need no key: they may do everything.
    pub fn is_open(&self, peer: Peer) -> bool {
        !self.auth.needs_credentials() || (peer == Peer::Unix && self.auth.unix_trusted)
    }

    pub fn has_keys(&self) -> bool {
        !self.table.read().keys.is_empty()
    }

    /// How many keys and tokens there are.
    pub fn len(&self) -> usize {
        let table = self.table.read();
        table.keys.len() + table.tokens.len()
    }

    /// What requests of this key are signed with.
    pub fn secret(&self, access_key: &str) -> Option<Secret> {
        self.table
            .read()
            .keys
            .get(access_key)
            .map(|(secret, _)| secret.clone())
    }

    /// The policy of a key whose signature was found right. `None`: the key was taken away in
    /// between.
    pub fn of_key(&self, access_key: &str) -> Option<Arc<Policy>> {
        self.table
            .read()
            .keys
            .get(access_key)
            .map(|(_, policy)| policy.clone())
    }

    /// The policy of the sender of a request under `/v1/`.
    ///
    /// # Errors
    /// `Unauthenticated`, with what to do.
    pub fn of_request(&self, peer: Peer, headers: &HeaderMap) -> Result<Arc<Policy>> {
        if self.is_open(peer) {
            return Ok(Policy::full());
        }
        let denied = |message: &str, hint: &str| {
            Err(Error::new(ErrorKind::Unauthenticated, message).hint(hint))
        };
        let table = self.table.read().clone();
        if table.tokens.is_empty() {
            return denied(
                "this node has keys for S3, but no tokens for /v1/",
                "ask the operator to give the key a token (auth.keys), or use the Unix socket",
            );
        }
        let given = headers
            .get(AUTHORIZATION)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| {
                v.strip_prefix("Bearer ")
                    .or_else(|| v.strip_prefix("bearer "))
            });
        let Some(given) = given else {
            return denied(
                "a token is needed",
                "send it as Authorization: Bearer TOKEN",
            );
        };
        // Every token is looked at, and each byte of it, so that the time tells nothing.
        let found = table.tokens.iter().fold(None, |found, (token, policy)| {
            if same(token.reveal(), given.trim()) {
                Some(policy)
            } else {
                found
            }
        });
        match found {
            Some(policy) => Ok(policy.clone()),
            None => denied(
                "the token is not one of this node's",
                "check AIS_AUTHN_TOKEN or FOREBAY_TOKEN",
            ),
        }
    }
}

impl Reload for Access {
    fn name(&self) -> &'static str {
        "keys"
    }

    fn reload(&self, asked: bool) {
        let Some(path) = &self.auth.keys_file else {
            return;
        };
        let text = match read(&self.auth) {
            Ok(text) if !asked && self.seen.lock().as_ref() == Some(&text) => return,
            Ok(text) => text,
            Err(e) => {
                // It may be on its way to its place. What is in force stays; the log is told once.
                if self.seen.lock().take().is_some() || asked {
                    self.stats.failed();
                    tracing::error!(error = %e.describe(), "the keys file cannot be read; the \
                        keys that were read before stay in force");
                }
                return;
            }
        };
        let table = Table::of(&self.auth, &text);
        *self.seen.lock() = Some(text);
        match table {
            Ok(table) => {
                let (keys, tokens) = (table.keys.len(), table.tokens.len());
                *self.table.write() = Arc::new(table);
                self.stats.succeeded();
                tracing::info!(file = %path.display(), keys, tokens, "the keys were read again");
            }
            Err(e) => {
                self.stats.failed();
                tracing::error!(error = %e.describe(), "the keys file was changed and cannot be \
                    used; the keys that were read before stay in force");
            }
        }
    }

    fn stats(&self) -> &ReloadStats {
        &self.stats
    }
}

/// The text of the keys file; empty where there is none.
fn read(auth: &Auth) -> Result<String> {
    let Some(path) = &auth.keys_file else {
        return Ok(String::new());
    };
    std::fs::read_to_string(path).map_err(|e| {
        Error::invalid(format!(
            "auth.keys_file: {} cannot be read: {e}",
            path.display()
        ))
        .hint("a TOML file with [[keys]], readable by the user that the node runs as")
    })
}

impl Table {
    /// Of the configuration's keys and those of the file's text.
    fn of(auth: &Auth, text: &str) -> Result<Table> {
        let mut table = Table::default();
        table.add("auth", &auth.keys, &auth.tokens)?;
        if let Some(path) = &auth.keys_file {
            let place = path.display().to_string();
            let file = KeysFile::parse(text, &place)?;
            table.add(&place, &file.keys, &file.tokens)?;
        }
        Ok(table)
    }

    fn add(&mut self, place: &str, keys: &[KeyPair], tokens: &[Secret]) -> Result<()> {
        for (i, key) in keys.iter().enumerate() {
            self.add_key(key)
                .map_err(|e| e.context(format!("{place}: keys[{i}]")))?;
        }
        for (i, token) in tokens.iter().enumerate() {
            self.add_token(token, Policy::full())
                .map_err(|e| e.context(format!("{place}: tokens[{i}]")))?;
        }
        Ok(())
    }

    fn add_key(&mut self, key: &KeyPair) -> Result<()> {
        key.check()?;
        let policy = Policy::of(key.allow.as_deref())?;
        if !key.access_key.is_empty() {
            let secret = key.secret()?;
            if self
                .keys
                .insert(key.access_key.clone(), (secret, policy.clone()))
                .is_some()
            {
                return Err(Error::invalid(format!(
                    "the access key {:?} is there twice",
                    key.access_key
                )));
            }
        }
        match &key.token {
            Some(token) => self.add_token(token, policy),
            None => Ok(()),
        }
    }

    fn add_token(&mut self, token: &Secret, policy: Arc<Policy>) -> Result<()> {
        if token.reveal().is_empty() {
            return Err(Error::invalid("the token is empty"));
        }
        if self
            .tokens
            .iter()
            .any(|(t, _)| t.reveal() == token.reveal())
        {
            return Err(Error::invalid("the token is that of another key too")
                .hint("each key needs a token of its own"));
        }
        self.tokens.push((token.clone(), policy));
        Ok(())
    }
}

fn same(a: &str, b: &str) -> bool {
    let difference = a
        .bytes()
        .zip(b.bytes().chain(std::iter::repeat(0)))
        .fold(a.len() ^ b.len(), |d, (x, y)| d | usize::from(x ^ y));
    difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Action;

    const TCP: fn() -> Peer = || Peer::Tcp(([127, 0, 0, 1], 1).into());

    fn bearer(token: Option<&str>) -> HeaderMap {
        token
            .map(|t| (AUTHORIZATION, format!("Bearer {t}").parse().unwrap()))
            .into_iter()
            .collect()
    }

    fn key(access_key: &str, secret: &str, token: Option<&str>) -> KeyPair {
        KeyPair {
            access_key: access_key.into(),
            secret_key: Secret::new(secret),
            token: token.map(Secret::new),
            ..KeyPair::default()
        }
    }

    #[test]
    fn tokens_are_asked_for_over_tcp_only() {
        let asked = |auth: &Auth, peer, token| {
            Access::new(auth)
                .unwrap()
                .of_request(peer, &bearer(token))
                .is_ok()
        };
        let mut auth = Auth::default();
        assert!(asked(&auth, TCP(), None));
        auth.keys.push(key("a", "s", None));
        assert!(
            !asked(&auth, TCP(), Some("x")),
            "keys without tokens close /v1/"
        );
        auth.tokens = vec![Secret::new("t1"), Secret::new("t2")];
        assert!(asked(&auth, TCP(), Some("t2")));
        for bad in [None, Some("t3"), Some("t"), Some("t22"), Some("")] {
            assert!(!asked(&auth, TCP(), bad), "{bad:?}");
        }
        assert!(asked(&auth, Peer::Unix, None));
        auth.unix_trusted = false;
        assert!(!asked(&auth, Peer::Unix, None) && asked(&auth, Peer::Unix, Some("t1")));
    }

    #[test]
    fn a_file_that_cannot_be_used_leaves_the_keys_in_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write(
            "[[keys]]\naccess_key = \"A\"\nsecret_key = \"s\"\ntoken = \"t\"\nallow = [{ bucket \
             = \"b\", actions = [\"read\"] }]\n",
        );
        let access = Access::new(&Auth {
            keys_file: Some(path.clone()),
            ..Auth::default()
        })
        .unwrap();
        let reads = |token: &str, key: &str| {
            access
                .of_request(TCP(), &bearer(Some(token)))
                .is_ok_and(|p| p.allows(Action::Read, "b", key))
        };
        assert!(reads("t", "k") && !access.is_open(TCP()));

        for bad in [
            "[[keys]\n",
            "[[keys]]\naccess_key = \"A\"\n",
            "[[keys]]\naccess_key = \"A\"\nsecret_key = \"s\"\nallow = [{ bucket = \"b\", \
             actions = [\"fly\"] }]\n",
            "[[keys]]\ntoken = \"t\"\n[[keys]]\ntoken = \"t\"\n",
            "tokens = \"hunter2\"\n",
        ] {
            write(bad);
            let before = access.stats.failures();
            access.reload(false);
            access.reload(false);
            assert_eq!(access.stats.failures(), before + 1, "{bad:?} is told once");
            assert!(access.stats.is_stale() && reads("t", "k"), "{bad:?}");
        }
        std::fs::remove_file(&path).unwrap();
        let before = access.stats.failures();
        access.reload(false);
        access.reload(false);
        assert!(reads("t", "k") && access.stats.failures() == before + 1);

        write(
            "[[keys]]\ntoken = \"t\"\nallow = [{ bucket = \"b\", prefix = \"p/\", actions = \
             [\"read\"] }]\n",
        );
        access.reload(false);
        assert!(!access.stats.is_stale() && reads("t", "p/k") && !reads("t", "k"));
        assert!(access.secret("A").is_none() && access.of_key("A").is_none());

        write("");
        access.reload(false);
        assert!(
            !access.is_open(TCP()) && access.of_request(TCP(), &bearer(Some("t"))).is_err(),
            "no keys is not the same as no lock"
        );
    }

    #[test]
    fn secrets_come_from_files_too_and_errors_do_not_show_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        std::fs::write(&file, "s3cr3t\n").unwrap();
        let pair = KeyPair {
            access_key: "A".into(),
            secret_key_file: Some(file),
            ..KeyPair::default()
        };
        let access = Access::new(&Auth {
            keys: vec![pair.clone()],
            ..Auth::default()
        })
        .unwrap();
        assert_eq!(access.secret("A").unwrap().reveal(), "s3cr3t");
        let both = KeyPair {
            secret_key: Secret::new("x"),
            ..pair
        };
        assert!(
            Access::new(&Auth {
                keys: vec![both],
                ..Auth::default()
            })
            .is_err()
        );
        let e = KeysFile::parse("tokens = \"hunter2\"\n", "f").unwrap_err();
        assert!(
            !e.describe().contains("hunter2") && e.describe().contains("line 1"),
            "{e}"
        );
    }
}
