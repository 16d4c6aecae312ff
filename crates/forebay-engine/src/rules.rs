//! The rules of each bucket: how fresh an answer must be, how much older it may be while the origin
//! fails, whether the bucket is cached at all, and what a repeated name in an archive means.

use forebay_core::limits::REVALIDATE_AFTER_DEFAULT_SECS;
use forebay_format::Repeated;
use hashbrown::HashMap;
use std::time::Duration;

/// When a cached version may be served without asking the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Objects never change once written: never ask.
    Immutable,
    /// Ask when the last answer is older than this, in whole seconds: within less than one, each
    /// time.
    RevalidateAfter(Duration),
    /// Ask every time.
    Always,
}

impl Default for Freshness {
    fn default() -> Self {
        Freshness::RevalidateAfter(Duration::from_secs(REVALIDATE_AFTER_DEFAULT_SECS))
    }
}

impl Freshness {
    /// Whether what was validated at `validated_at_secs` may be served at `now_secs` as it is. A
    /// validation from the future does not count.
    /// Zero means: never validated since the machine came up.
    pub fn is_fresh(self, validated_at_secs: u32, now_secs: u32) -> bool {
        if validated_at_secs == 0 {
            return false;
        }
        match self {
            Freshness::Immutable => true,
            Freshness::Always => false,
            Freshness::RevalidateAfter(ttl) => {
                validated_at_secs <= now_secs
                    && u64::from(now_secs - validated_at_secs) < ttl.as_secs()
            }
        }
    }
}

/// The rule of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketRule {
    /// When kept data may be served without asking the origin.
    pub freshness: Freshness,
    /// `false`: every read goes to the origin and nothing is kept (`X-Cache: BYPASS`).
    pub cache: bool,
    /// For this long after it ceased to be fresh, a cached version is served if the origin fails
    /// (`X-Cache: STALE`). Zero: never.
    pub stale_if_error: Duration,
    /// Which member of an archive counts if several have the same name. By `First`, a member of an
    /// uncompressed tar is read as soon as it is found, while the rest of the tar is still coming;
    /// by `Last`, when the whole tar is known.
    pub repeated_members: Repeated,
    /// In a cluster: so many nodes keep what is cached of it, as far as there are nodes.
    pub copies: u8,
}

impl BucketRule {
    /// Whether what was validated at `validated_at_secs` may be served at `now_secs` because the
    /// origin could not be asked. As for [`Freshness::is_fresh`], a validation from the future, or
    /// at time zero, does not count.
    pub fn may_be_stale(self, validated_at_secs: u32, now_secs: u32) -> bool {
        if self.stale_if_error.is_zero() || validated_at_secs == 0 || validated_at_secs > now_secs {
            return false;
        }
        let fresh = match self.freshness {
            Freshness::Immutable => return true,
            Freshness::Always => Duration::ZERO,
            Freshness::RevalidateAfter(ttl) => ttl,
        };
        let age = Duration::from_secs((now_secs - validated_at_secs).into());
        age < fresh.saturating_add(self.stale_if_error)
    }
}

impl Default for BucketRule {
    fn default() -> Self {
        Self {
            freshness: Freshness::default(),
            cache: true,
            stale_if_error: Duration::ZERO,
            repeated_members: Repeated::First,
            copies: 1,
        }
    }
}

/// The rules of all buckets.
#[derive(Clone, Debug, Default)]
pub struct BucketRules {
    /// For every bucket that `buckets` does not name.
    pub default: BucketRule,
    /// By name of the bucket. A rule here stands alone: it takes nothing from `default`.
    pub buckets: HashMap<String, BucketRule>,
}

impl BucketRules {
    /// The rule in force for `bucket`.
    pub fn of(&self, bucket: &str) -> BucketRule {
        self.buckets.get(bucket).copied().unwrap_or(self.default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staleness_is_bounded_and_off_by_default() {
        let rule = |freshness, bound| BucketRule {
            freshness,
            stale_if_error: Duration::from_secs(bound),
            ..BucketRule::default()
        };
        let minute = Freshness::RevalidateAfter(Duration::from_secs(60));
        let hour = rule(minute, 3600);
        assert!(hour.may_be_stale(1000, 1000 + 3659) && !hour.may_be_stale(1000, 1000 + 3660));
        assert!(!hour.may_be_stale(0, 60) && !hour.may_be_stale(1001, 1000));
        let always = rule(Freshness::Always, 10);
        assert!(always.may_be_stale(1000, 1009) && !always.may_be_stale(1000, 1010));
        assert!(!rule(minute, 0).may_be_stale(1000, 1000));
        assert!(!BucketRule::default().may_be_stale(1000, 1000));
    }

    #[test]
    fn freshness_is_a_matter_of_rule_and_clock() {
        let minute = Freshness::RevalidateAfter(Duration::from_secs(60));
        assert!(
            minute.is_fresh(1000, 1000)
                && minute.is_fresh(1000, 1059)
                && !minute.is_fresh(1000, 1060)
        );
        assert!(
            !minute.is_fresh(1000, 999),
            "validated in the future: the clock went back"
        );
        assert!(Freshness::Immutable.is_fresh(1, u32::MAX) && !Freshness::Immutable.is_fresh(0, 5));
        assert!(!Freshness::Always.is_fresh(1000, 1000));
        assert!(!Freshness::RevalidateAfter(Duration::ZERO).is_fresh(1000, 1000));
        // Times are known by the second: what is fresh for less may be older already.
        let millis = |ms| Freshness::RevalidateAfter(Duration::from_millis(ms));
        assert!(!millis(999).is_fresh(1000, 1000));
        assert!(millis(1999).is_fresh(1000, 1000) && !millis(1999).is_fresh(1000, 1001));
    }
}
