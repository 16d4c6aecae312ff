//! Who may come in, and what they may do: keys, tokens and their policies.
//!
//! S3 requests are signed with a key ([`Access::secret`] and [`Access::of_key`], used by `s3/`);
//! requests under `/v1/` carry a token ([`Access::of_request`]). Either leads to a [`Policy`],
//! which is checked before anything is looked up. Keys come from the configuration and from
//! `auth.keys_file`; that file is read again when it changes or when the node is told to do so
//! (`watch.rs`).
//!
//! Invariants:
//! - the table of keys is replaced as a whole or not at all: a file that cannot be read leaves the
//!   current table in force;
//! - a node that was started with keys requires them as long as it runs, even if a new file holds
//!   none.

mod policy;
pub mod watch;

pub use policy::{Policy, refusal};

use crate::{
    config::{Auth, Grant, KeyPair, KeysFile, Secret},
    note::Peer,
};
use arc_swap::{ArcSwap, Guard};
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use http::{HeaderMap, header::AUTHORIZATION};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use subtle::ConstantTimeEq;
use watch::{Reload, ReloadStats};

/// The name of a caller that needs no key, because the node has none.
pub const ANONYMOUS: &str = "anonymous";
/// The name of a caller on the Unix socket that needs no key.
pub const UNIX: &str = "unix";

/// Who sends a request, and what they may do.
#[derive(Clone)]
pub struct Caller {
    /// For the log and metrics, never a secret: the name of the key or token, `unix` or
    /// `anonymous`.
    pub name: Arc<str>,
    pub policy: Arc<Policy>,
}

impl Caller {
    /// The same caller, with a policy that identifies the token itself: a token without a name is
    /// called by its number in the list, which may belong to another token after the next reload.
    fn known_by(self, token: &Secret) -> Self {
        Caller {
            policy: self.policy.of_key(&format!("token {}", token.reveal())),
            ..self
        }
    }
}

/// The keys at one moment.
#[derive(Default)]
struct Table {
    keys: HashMap<String, (Secret, Caller)>,
    tokens: Vec<(Secret, Caller)>,
    names: HashSet<Arc<str>>,
}

/// The settings and the keys built from them.
struct State {
    auth: Auth,
    table: Table,
}

/// Keys that were read and found to work, for [`Access::install`].
pub struct Prepared {
    state: Arc<State>,
    text: String,
}

/// The keys in force.
pub struct Access {
    state: ArcSwap<State>,
    /// The text that was last accepted or refused; `None` while the file cannot be read. The lock
    /// is held while the keys are replaced, so that changes happen one after the other.
    seen: Mutex<Option<String>>,
    pub stats: ReloadStats,
}

impl Access {
    /// # Errors
    /// `Invalid` for keys that cannot work, or a keys file that cannot be read.
    pub fn new(auth: &Auth) -> Result<Self> {
        let Prepared { state, text } = Self::prepare(auth)?;
        Ok(Access {
            state: ArcSwap::new(state),
            seen: Mutex::new(Some(text)),
            stats: ReloadStats::default(),
        })
    }

    /// Reads the files that the settings name. May block.
    ///
    /// # Errors
    /// As [`Access::new`].
    pub fn prepare(auth: &Auth) -> Result<Prepared> {
        let text = read(auth)?;
        let table = Table::of(auth, &text)?;
        let state = State {
            auth: auth.clone(),
            table,
        };
        Ok(Prepared {
            state: Arc::new(state),
            text,
        })
    }

    /// Puts other settings in force, with their keys.
    pub fn install(&self, prepared: Prepared) {
        let mut seen = self.seen.lock();
        self.state.store(prepared.state);
        *seen = Some(prepared.text);
    }

    fn state(&self) -> Guard<Arc<State>> {
        self.state.load()
    }

    /// The name of a peer that needs no key. Such a peer may do everything.
    pub fn open_to(&self, peer: Peer) -> Option<&'static str> {
        let state = self.state();
        if peer == Peer::Unix && state.auth.unix_trusted {
            Some(UNIX)
        } else {
            (!state.auth.needs_credentials()).then_some(ANONYMOUS)
        }
    }

    pub fn has_keys(&self) -> bool {
        !self.state().table.keys.is_empty()
    }

    /// How many keys and tokens there are.
    pub fn len(&self) -> usize {
        let table = &self.state().table;
        table.keys.len() + table.tokens.len()
    }

    /// What the keys in force are, secrets included, in an order that does not depend on the files.
    /// Only for a keyed hash.
    pub fn revealed(&self) -> Vec<String> {
        let state = self.state();
        let line = |kind: &str, key: &str, secret: &Secret, caller: &Caller| {
            let (name, policy) = (&caller.name, &caller.policy);
            format!("{:?}", (kind, key, secret.reveal(), name, policy))
        };
        let keys = state.table.keys.iter();
        let keys = keys.map(|(key, (secret, caller))| line("key", key, secret, caller));
        let tokens = state.table.tokens.iter();
        let tokens = tokens.map(|(secret, caller)| line("token", "", secret, caller));
        let mut lines: Vec<String> = keys.chain(tokens).collect();
        lines.sort_unstable();
        lines
    }

    /// The secret that signs the requests of this key.
    pub fn secret(&self, access_key: &str) -> Option<Secret> {
        let state = self.state();
        state.table.keys.get(access_key).map(|(s, _)| s.clone())
    }

    /// The sender of a request whose signature is right. `None`: the key was removed in the
    /// meantime.
    pub fn of_key(&self, access_key: &str) -> Option<Caller> {
        let state = self.state();
        state.table.keys.get(access_key).map(|(_, c)| c.clone())
    }

    /// Who sends a request under `/v1/`.
    ///
    /// # Errors
    /// `Unauthenticated`, with what to do.
    pub fn of_request(&self, peer: Peer, headers: &HeaderMap) -> Result<Caller> {
        if let Some(name) = self.open_to(peer) {
            return Ok(Caller {
                name: name.into(),
                policy: Policy::full(),
            });
        }
        let denied = |message: &str, hint: &str| {
            Err(Error::new(ErrorKind::Unauthenticated, message).hint(hint))
        };
        let state = self.state();
        let table = &state.table;
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
                "set FOREBAY_TOKEN (for AIStore's clients: AIS_AUTHN_TOKEN); by HTTP it is \
                 Authorization: Bearer TOKEN",
            );
        };
        // Compares every token, and every byte of it, so that the time taken reveals nothing.
        let given = given.trim().as_bytes();
        let found = table.tokens.iter().fold(None, |found, (token, caller)| {
            if token.reveal().as_bytes().ct_eq(given).into() {
                Some(caller)
            } else {
                found
            }
        });
        match found {
            Some(caller) => Ok(caller.clone()),
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
        let mut seen = self.seen.lock();
        let state = self.state();
        let Some(path) = &state.auth.keys_file else {
            return;
        };
        let text = match read(&state.auth) {
            Ok(text) if !asked && seen.as_ref() == Some(&text) => return,
            Ok(text) => text,
            Err(e) => {
                // The file may be in the middle of a replacement. The keys in force stay; this is
                // logged once.
                if seen.take().is_some() || asked {
                    self.stats.failed();
                    tracing::error!(error = %e.describe(), "the keys file cannot be read; the \
                        keys that were read before stay in force");
                }
                return;
            }
        };
        let table = Table::of(&state.auth, &text);
        *seen = Some(text);
        match table {
            Ok(table) => {
                let (keys, tokens) = (table.keys.len(), table.tokens.len());
                self.state.store(Arc::new(State {
                    auth: state.auth.clone(),
                    table,
                }));
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
    /// The table of the configuration's keys and those in the file's text.
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
            let name = format!("token-{}", self.tokens.len() + 1);
            let add =
                |table: &mut Table, caller: Caller| table.add_token(token, caller.known_by(token));
            self.add_named(name, add, None)
                .map_err(|e| e.context(format!("{place}: tokens[{i}]")))?;
        }
        Ok(())
    }

    fn add_key(&mut self, key: &KeyPair) -> Result<()> {
        key.check()?;
        let name = match (&key.name, key.access_key.as_str()) {
            (Some(name), _) => name.clone(),
            (None, "") => format!("token-{}", self.tokens.len() + 1),
            (None, access_key) => access_key.to_owned(),
        };
        let add = |table: &mut Table, caller: Caller| {
            if !key.access_key.is_empty() {
                let secret = key.secret()?;
                let known = (secret, caller.clone());
                if table.keys.insert(key.access_key.clone(), known).is_some() {
                    return Err(Error::invalid(format!(
                        "the access key {:?} is configured twice",
                        key.access_key
                    )));
                }
            }
            match &key.token {
                Some(token) if key.name.is_none() && key.access_key.is_empty() => {
                    table.add_token(token, caller.known_by(token))
                }
                Some(token) => table.add_token(token, caller),
                None => Ok(()),
            }
        };
        self.add_named(name, add, key.allow.as_deref())
    }

    /// Adds a key or token under this name, which must not be taken.
    fn add_named(
        &mut self,
        name: String,
        add: impl FnOnce(&mut Table, Caller) -> Result<()>,
        allow: Option<&[Grant]>,
    ) -> Result<()> {
        let name: Arc<str> = name.into();
        let policy = Policy::of(allow)?.of_key(&format!("key {name}"));
        let caller = Caller {
            name: name.clone(),
            policy,
        };
        add(self, caller)?;
        if self.names.insert(name.clone()) {
            return Ok(());
        }
        Err(
            Error::invalid(format!("another key also has the name {name:?}"))
                .hint("give each key its own name: `name`, or without it its access_key"),
        )
    }

    fn add_token(&mut self, token: &Secret, caller: Caller) -> Result<()> {
        if token.reveal().is_empty() {
            return Err(Error::invalid("the token is empty"));
        }
        if self
            .tokens
            .iter()
            .any(|(t, _)| t.reveal() == token.reveal())
        {
            return Err(Error::invalid("another key also has this token")
                .hint("give each key its own token"));
        }
        self.tokens.push((token.clone(), caller));
        Ok(())
    }
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
    fn each_caller_has_a_name_of_its_own_that_is_no_secret() {
        let named = |name: &str, token: &str| KeyPair {
            name: Some(name.into()),
            token: Some(Secret::new(token)),
            ..KeyPair::default()
        };
        let auth = Auth {
            keys: vec![
                key("AK", "s", Some("t-ak")),
                named("nightly", "t-nightly"),
                KeyPair {
                    name: None,
                    ..named("", "t-bare")
                },
            ],
            tokens: vec![Secret::new("t-last")],
            ..Auth::default()
        };
        let access = Access::new(&auth).unwrap();
        let name = |token: &str| {
            let caller = access.of_request(TCP(), &bearer(Some(token))).unwrap();
            caller.name.to_string()
        };
        assert_eq!(name("t-ak"), "AK");
        assert_eq!(name("t-nightly"), "nightly");
        assert_eq!(
            (name("t-bare"), name("t-last")),
            ("token-3".into(), "token-4".into())
        );
        assert_eq!(&*access.of_key("AK").unwrap().name, "AK");
        let of = |access: &Access, peer| access.of_request(peer, &bearer(None)).unwrap().name;
        assert_eq!(&*of(&access, Peer::Unix), "unix");
        assert_eq!(
            &*of(&Access::new(&Auth::default()).unwrap(), TCP()),
            "anonymous"
        );
        let twice = Auth {
            keys: vec![named("x", "1"), named("x", "2")],
            ..Auth::default()
        };
        let e = Access::new(&twice).err().unwrap().describe();
        assert!(e.contains("another key also has the name \"x\""), "{e}");
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
                .is_ok_and(|c| c.policy.allows(Action::Read, "b", key))
        };
        assert!(reads("t", "k") && access.open_to(TCP()).is_none());

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
            access.open_to(TCP()).is_none()
                && access.of_request(TCP(), &bearer(Some("t"))).is_err(),
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
