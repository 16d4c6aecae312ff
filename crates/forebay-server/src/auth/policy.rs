//! What a key may do: grants of actions on the names of a bucket that begin with a prefix.
//!
//! One question covers everything: may this key do `action` to `name` in `bucket`? For an object
//! the name is its key; for a listing, and for an operation on a whole prefix, it is that prefix,
//! and the answer holds for everything under it. The bucket itself has the empty name.
//!
//! Invariants:
//! - what no grant allows is denied, and the answer is known before anything is looked up: it
//!   depends on the policy and the name alone, never on whether the object exists or is in the
//!   cache;
//! - grants only add up. None takes anything away, so their order means nothing.

use crate::config::{Action, Grant};
use forebay_core::{Error, Result};
use std::sync::{Arc, LazyLock};
use xxhash_rust::xxh3::xxh3_128;

/// The grants of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// `None`: everything is allowed.
    rules: Option<Vec<Rule>>,
    /// A hash that identifies the rules.
    rights: u128,
    /// A hash that identifies the key; `None` where none is needed.
    key: Option<u128>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    bucket: BucketName,
    prefix: String,
    actions: Vec<Action>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum BucketName {
    Exactly(String),
    /// `train-*`, or `*`.
    BeginsWith(String),
}

impl BucketName {
    fn matches(&self, bucket: &str) -> bool {
        match self {
            BucketName::Exactly(name) => name == bucket,
            BucketName::BeginsWith(start) => bucket.starts_with(start.as_str()),
        }
    }
}

impl Policy {
    /// Everything is allowed.
    pub fn full() -> Arc<Policy> {
        static FULL: LazyLock<Arc<Policy>> = LazyLock::new(|| Arc::new(Policy::with(None)));
        FULL.clone()
    }

    fn with(rules: Option<Vec<Rule>>) -> Policy {
        let rights = xxh3_128(format!("{rules:?}").as_bytes());
        let key = None;
        Policy { rules, rights, key }
    }

    /// `None`: everything is allowed. An empty list: nothing is.
    ///
    /// # Errors
    /// `Invalid` for a grant that cannot mean anything.
    pub fn of(grants: Option<&[Grant]>) -> Result<Arc<Policy>> {
        let Some(grants) = grants else {
            return Ok(Self::full());
        };
        let rules = grants
            .iter()
            .enumerate()
            .map(|(i, g)| rule(g).map_err(|e| e.context(format!("allow[{i}]"))));
        Ok(Arc::new(Self::with(Some(rules.collect::<Result<_>>()?))))
    }

    /// The same policy for one key. `key` identifies it: its public name or, where it has none, its
    /// token.
    pub fn of_key(&self, key: &str) -> Arc<Policy> {
        Arc::new(Policy {
            key: Some(xxh3_128(key.as_bytes())),
            ..self.clone()
        })
    }

    pub fn is_full(&self) -> bool {
        self.rules.is_none()
    }

    /// A number that identifies everything that is allowed.
    pub fn rights(&self) -> u128 {
        self.rights
    }

    /// A number that identifies the key; `None` where none was needed.
    pub fn key(&self) -> Option<u128> {
        self.key
    }

    /// Whether `action` is allowed on `name`: an object's key, or a prefix with everything under
    /// it.
    pub fn allows(&self, action: Action, bucket: &str, name: &str) -> bool {
        self.some(|r| {
            r.actions.contains(&action)
                && r.bucket.matches(bucket)
                && name.starts_with(r.prefix.as_str())
        })
    }

    /// The same as an error, which reveals no more than the request itself did.
    ///
    /// # Errors
    /// `PermissionDenied`.
    pub fn check(&self, action: Action, bucket: &str, name: &str) -> Result<()> {
        if self.allows(action, bucket, name) {
            Ok(())
        } else {
            Err(denied(action, bucket, name))
        }
    }

    /// Whether the caller may know that the bucket exists: something in it is allowed.
    pub fn knows(&self, bucket: &str) -> bool {
        self.some(|r| r.bucket.matches(bucket))
    }

    /// # Errors
    /// `PermissionDenied`.
    pub fn check_known(&self, bucket: &str) -> Result<()> {
        if self.knows(bucket) {
            Ok(())
        } else {
            Err(refusal(format!(
                "this key has no rights in the bucket {bucket:?}"
            )))
        }
    }

    /// Whether `action` is allowed on everything in every bucket.
    pub fn allows_everywhere(&self, action: Action) -> bool {
        self.some(|r| {
            r.actions.contains(&action)
                && r.prefix.is_empty()
                && r.bucket == BucketName::BeginsWith(String::new())
        })
    }

    /// Whether `action` is allowed anywhere.
    pub fn allows_somewhere(&self, action: Action) -> bool {
        self.some(|r| r.actions.contains(&action))
    }

    fn some(&self, holds: impl Fn(&Rule) -> bool) -> bool {
        self.rules
            .as_ref()
            .is_none_or(|rules| rules.iter().any(holds))
    }
}

fn rule(grant: &Grant) -> Result<Rule> {
    let bucket = match grant.bucket.strip_suffix('*') {
        Some(start) => BucketName::BeginsWith(start.to_owned()),
        None => BucketName::Exactly(grant.bucket.clone()),
    };
    if grant.bucket.is_empty() {
        return Err(Error::invalid("no bucket is named")
            .hint("bucket = \"NAME\", or \"NAME*\" for all that begin so, or \"*\" for all"));
    }
    if grant.bucket.trim_end_matches('*').contains('*') || grant.bucket.ends_with("**") {
        return Err(Error::invalid(format!("bucket = {:?}", grant.bucket))
            .hint("a * can only be at the end of a name, and only once"));
    }
    if grant.prefix.contains('*') {
        return Err(Error::invalid(format!("prefix = {:?}", grant.prefix))
            .hint("leave out the *: a prefix covers every name that begins with it"));
    }
    if grant.actions.is_empty() {
        return Err(Error::invalid("no actions are named")
            .hint("actions = [\"read\", \"list\"]; there are read, write, list and admin"));
    }
    Ok(Rule {
        bucket,
        prefix: grant.prefix.clone(),
        actions: grant.actions.clone(),
    })
}

fn denied(action: Action, bucket: &str, name: &str) -> Error {
    let what = forebay_core::name::shorten(name);
    let separator = if what.is_empty() { "" } else { "/" };
    refusal(format!(
        "{action} is not allowed on {bucket}{separator}{what} to this key"
    ))
}

/// Tells the holder of a key what it may not do.
pub fn refusal(message: String) -> Error {
    Error::permission_denied(message)
        .hint("ask the operator for a key whose policy allows it (auth.keys, allow)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(bucket: &str, prefix: &str, actions: &[Action]) -> Grant {
        Grant {
            bucket: bucket.into(),
            prefix: prefix.into(),
            actions: actions.to_vec(),
        }
    }

    #[test]
    fn what_no_grant_allows_is_denied() {
        use Action::*;
        let policy = Policy::of(Some(&[
            grant("train", "public/", &[Read, List]),
            grant("logs-*", "", &[Write]),
        ]))
        .unwrap();
        for (action, bucket, name, allowed) in [
            (Read, "train", "public/a", true),
            (Read, "train", "public/", true),
            (Read, "train", "public", false),
            (Read, "train", "publicity/a", false),
            (Read, "train", "", false),
            (Read, "train2", "public/a", false),
            (Write, "train", "public/a", false),
            (List, "train", "public/sub", true),
            (List, "train", "pub", false),
            (Write, "logs-1", "any", true),
            (Write, "logs-", "", true),
            (Write, "logs", "any", false),
            (Read, "logs-1", "any", false),
            (Admin, "train", "public/a", false),
        ] {
            assert_eq!(
                policy.allows(action, bucket, name),
                allowed,
                "{action} {bucket} {name:?}"
            );
        }
        assert!(policy.knows("train") && policy.knows("logs-x") && !policy.knows("other"));
        assert!(
            !policy.allows_everywhere(Write)
                && policy.allows_somewhere(Write)
                && !policy.allows_somewhere(Admin)
        );
        let everywhere = Policy::of(Some(&[grant("*", "", &[Admin])])).unwrap();
        assert!(everywhere.allows_everywhere(Admin) && !everywhere.allows_everywhere(Read));
        let nothing = Policy::of(Some(&[])).unwrap();
        assert!(!nothing.allows(Read, "b", "k") && !nothing.knows("b") && !nothing.is_full());
        assert!(Policy::full().allows(Admin, "b", "") && Policy::full().allows_everywhere(Write));
    }

    #[test]
    fn grants_without_a_meaning_are_refused() {
        for bad in [
            grant("", "", &[Action::Read]),
            grant("b", "", &[]),
            grant("a*b", "", &[Action::Read]),
            grant("b", "a*", &[Action::Read]),
        ] {
            let e = Policy::of(Some(std::slice::from_ref(&bad))).unwrap_err();
            assert!(
                e.message().contains("allow[0]") && e.hint_text().is_some(),
                "{bad:?}: {e}"
            );
        }
        assert!(Policy::of(Some(&[grant("a**", "", &[Action::Read])])).is_err());
    }

    /// The same decision made in the slowest and plainest way: over every pair of (grant, action),
    /// with names as lists of characters.
    fn model(grants: &[Grant], action: Action, bucket: &str, name: &str) -> bool {
        let begins = |text: &str, start: &str| {
            let (text, start): (Vec<char>, Vec<char>) =
                (text.chars().collect(), start.chars().collect());
            (0..start.len()).all(|i| i < text.len() && text[i] == start[i])
        };
        let mut allowed = false;
        for g in grants {
            for a in &g.actions {
                let star = g.bucket.ends_with('*');
                let names_bucket = if star {
                    begins(bucket, &g.bucket[..g.bucket.len() - 1])
                } else {
                    bucket == g.bucket
                };
                allowed |= *a == action && names_bucket && begins(name, &g.prefix);
            }
        }
        allowed
    }

    #[test]
    fn the_matcher_agrees_with_a_naive_model() {
        let seed = std::env::var("FOREBAY_TEST_SEED")
            .ok()
            .and_then(|s| s.parse().ok())
            .unwrap_or_else(|| {
                std::time::SystemTime::now()
                    .duration_since(std::time::UNIX_EPOCH)
                    .map_or(1, |t| t.as_nanos() as u64)
            });
        println!("FOREBAY_TEST_SEED={seed}");
        let mut state = seed | 1;
        let mut below = move |n: usize| {
            // xorshift64*: enough to choose test cases, and replayable.
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
        };
        let buckets = ["a", "ab", "abc", "b", "a*", "ab*", "*"];
        let names = ["", "x", "x/", "x/y", "x/y/", "xy", "ü", "ü/x", "y", "x/ü"];
        let (mut yes, mut no) = (0, 0);
        for _ in 0..20_000 {
            let grants: Vec<Grant> = (0..below(4))
                .map(|_| {
                    let actions: Vec<Action> =
                        (0..1 + below(3)).map(|_| Action::ALL[below(4)]).collect();
                    grant(buckets[below(7)], names[below(10)], &actions)
                })
                .collect();
            let policy = Policy::of(Some(&grants)).unwrap();
            for _ in 0..8 {
                let (action, bucket, name) =
                    (Action::ALL[below(4)], buckets[below(4)], names[below(10)]);
                let expected = model(&grants, action, bucket, name);
                assert_eq!(
                    policy.allows(action, bucket, name),
                    expected,
                    "{grants:?} {action} {bucket} {name:?}"
                );
                assert!(!expected || policy.knows(bucket) && policy.allows_somewhere(action));
                *(if expected { &mut yes } else { &mut no }) += 1;
            }
        }
        assert!(yes > 1000 && no > 1000, "both answers occur: {yes}, {no}");
    }
}
