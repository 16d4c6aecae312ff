//! Keys, tokens and what they may do: `[auth]`, and the separate file that may hold them.

use super::{
    Secret,
    load::{explain, plain_type},
    section::section,
};
use forebay_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// The longest name of a key: it appears in each line of the log and as a metrics label.
const NAME_MAX_BYTES: usize = 128;

section! {
    /// Who may come in, and what they may do. By default the Unix socket is guarded by its file
    /// permissions, and TCP by what is here.
    Auth {
        /// Keys and their policies: see `[[auth.keys]]`.
        keys: Vec<KeyPair> = Vec::new(),
        /// Tokens for requests under `/v1/` (`Authorization: Bearer TOKEN`) that may do everything.
        /// A key's own `token` has the key's policy.
        tokens: Vec<Secret> = Vec::new(),
        /// A TOML file with more `[[keys]]` and `tokens`, apart from this one so that its mode can
        /// be 0600. It is read again within a second when it changes, and on SIGHUP: keys and
        /// policies change without a restart. A file that cannot be used leaves the current keys in
        /// force, and the log and `forebay_reload_stale` say so. Write a new file beside it and
        /// rename that into place, so that it is never half read.
        keys_file: Option<PathBuf> = None,
        /// Whether requests over the Unix socket need no key and may do everything. `false`: they
        /// need one, like those over TCP.
        unix_trusted: bool = true,
        /// Serve without any keys or tokens on an address that other machines can reach. Without
        /// keys, a node listens on loopback only.
        anonymous: bool = false,
    }
}

section! {
    /// A key:
    /// `{ access_key = "…", secret_key = "…", token = "…", allow = [{ bucket = "train", prefix = "public/", actions = ["read", "list"] }] }`.
    /// It signs S3 requests with its secret, sends its token with requests under `/v1/`, or both.
    KeyPair {
        /// What the log and the metrics call whoever uses it. Without it: the access key, or
        /// `token-N` for the N-th token of the node.
        name: Option<String> = None,
        /// The name of the key, sent with each S3 request.
        access_key: String = String::new(),
        /// The secret that S3 requests are signed with (Signature Version 4).
        secret_key: Secret = Secret::default(),
        /// A file that holds the secret, instead of `secret_key`.
        secret_key_file: Option<PathBuf> = None,
        /// The token that requests under `/v1/` carry (`Authorization: Bearer TOKEN`): batches,
        /// objects, and the commands of `forebay`.
        token: Option<Secret> = None,
        /// What the key may do, as a list of grants that add up: see `[[auth.keys.allow]]`. Without
        /// it: everything. An empty list: nothing.
        allow: Option<Vec<Grant>> = None,
    }
}

section! {
    /// A grant. What none of a key's grants allows is answered with 403, whether or not it exists
    /// and wherever it is.
    Grant {
        /// The bucket; `NAME*` for all that begin with NAME, `*` for all.
        bucket: String = String::new(),
        /// The beginning of the names that the grant covers; without it, all names. `public/` means
        /// what is in that directory; `public` would also cover `public-2/x`.
        prefix: String = String::new(),
        /// Any of `read` (objects, archive members, sources of copies, `stat`), `write` (put,
        /// delete, uploads by parts, targets of copies), `list` (listings whose prefix begins with
        /// this prefix) and `admin` (warm, pin, unpin, evict; ACLs, retention and legal holds of
        /// objects; of a whole bucket: making and removing it, and its settings; of everything:
        /// `status`).
        actions: Vec<Action> = Vec::new(),
    }
}

/// What a grant is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Objects, archive members, sources of copies, `stat`.
    Read,
    /// Put, delete, uploads by parts, targets of copies.
    Write,
    /// Listings whose prefix begins with that of the grant.
    List,
    /// Warm, pin, unpin, evict; settings of objects and buckets; of everything, `status`.
    Admin,
}

impl Action {
    /// All of them.
    #[cfg(test)]
    pub const ALL: [Action; 4] = [Action::Read, Action::Write, Action::List, Action::Admin];
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Read => "read",
            Action::Write => "write",
            Action::List => "list",
            Action::Admin => "admin",
        })
    }
}

/// What `auth.keys_file` holds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct KeysFile {
    pub keys: Vec<KeyPair>,
    pub tokens: Vec<Secret>,
}

impl KeysFile {
    /// Parses the text of a file; `name` is for messages.
    ///
    /// # Errors
    /// `Invalid` with the line number, but not with the line's text, which may be a secret.
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        toml::from_str(text).map_err(|e| {
            let line = e
                .span()
                .map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
            let place = line.map_or_else(|| name.to_owned(), |n| format!("{name}, line {n}"));
            let message = e.message();
            match message.split_once(", expected ") {
                Some((_, expected)) if message.starts_with("invalid ") => {
                    Error::invalid(format!("{place}: expected {}", plain_type(expected)))
                }
                _ => explain(&place, message),
            }
        })
    }
}

impl KeyPair {
    /// Whether the parts of the key go together.
    ///
    /// # Errors
    /// `Invalid`, with what to do.
    pub fn check(&self) -> Result<()> {
        self.secret_key.check()?;
        self.token.as_ref().map_or(Ok(()), Secret::check)?;
        let has_secret = !self.secret_key.reveal().is_empty();
        if has_secret && self.secret_key_file.is_some() {
            return Err(
                Error::invalid("both secret_key and secret_key_file are set")
                    .hint("set only one of them"),
            );
        }
        if self.access_key.is_empty() == (has_secret || self.secret_key_file.is_some()) {
            return Err(
                Error::invalid("one of access_key and its secret is missing")
                    .hint("access_key and secret_key belong together"),
            );
        }
        if let Some(name) = &self.name
            && (name.is_empty()
                || name.len() > NAME_MAX_BYTES
                || name.chars().any(|c| c.is_control() || c == '"'))
        {
            return Err(Error::invalid("the name cannot be used").hint(format!(
                "use 1 to {NAME_MAX_BYTES} bytes, without quotes and control characters"
            )));
        }
        if self.access_key.is_empty() && self.token.is_none() {
            return Err(Error::invalid("neither an access_key nor a token is set")
                .hint("set access_key and secret_key, or token, or all three"));
        }
        Ok(())
    }

    /// The secret, wherever it is configured.
    ///
    /// # Errors
    /// `Invalid` if its file cannot be read or is empty.
    pub fn secret(&self) -> Result<Secret> {
        let Some(path) = &self.secret_key_file else {
            return Ok(self.secret_key.clone());
        };
        let bad =
            |why: String| Error::invalid(format!("secret_key_file: {}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        match text.trim() {
            "" => Err(bad("it is empty".into())),
            secret => Ok(Secret::new(secret)),
        }
    }
}

impl Auth {
    /// Whether requests over TCP must bring a key or a token.
    pub fn needs_credentials(&self) -> bool {
        !self.keys.is_empty() || !self.tokens.is_empty() || self.keys_file.is_some()
    }
}
