//! How often a request is tried, and how long the pauses are. The only place where transport
//! failures are retried: layers above an [`Origin`](crate::Origin) start again only if the version
//! of an object has changed.

use forebay_core::{Error, ErrorKind, Result, limits};
use std::time::Duration;
use tokio::time::Instant;

/// When a failed request is sent again.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// Including the first.
    pub attempts: u32,
    /// The first delay is a random part of this; it doubles from attempt to attempt.
    pub first_delay: Duration,
    /// Delays double up to this and no further.
    pub longest_delay: Duration,
    /// No attempt begins later than this after the first failure.
    pub deadline: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: limits::ORIGIN_ATTEMPTS_DEFAULT,
            first_delay: Duration::from_millis(100),
            longest_delay: Duration::from_secs(10),
            deadline: Duration::from_secs(limits::ORIGIN_RETRY_DEADLINE_DEFAULT_SECS),
        }
    }
}

/// Whether another attempt may not meet this failure. On `Busy` and `VersionChanged` the caller
/// decides.
pub(crate) fn is_of_transport(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Timeout | ErrorKind::OriginUnavailable)
}

/// The attempts of one request.
pub(crate) struct Attempts<'a> {
    policy: &'a RetryPolicy,
    made: u32,
    /// Set by the first failure: time spent waiting for a turn does not count.
    until: Option<Instant>,
}

impl<'a> Attempts<'a> {
    pub(crate) fn begin(policy: &'a RetryPolicy) -> Self {
        Self::after(policy, 1)
    }

    /// As if `made` attempts had already been made.
    pub(crate) fn after(policy: &'a RetryPolicy, made: u32) -> Self {
        Self {
            policy,
            made,
            until: None,
        }
    }

    /// Waits for the next attempt, or returns the error if there is none.
    pub(crate) async fn again(&mut self, e: Error) -> Result<()> {
        if !is_of_transport(e.kind()) {
            return Err(e);
        }
        if self.made >= self.policy.attempts {
            return Err(if self.made > 1 {
                e.context(format_args!("after {} attempts", self.made))
            } else {
                e
            });
        }
        let most = self
            .policy
            .first_delay
            .saturating_mul(1 << (self.made - 1).min(16))
            .min(self.policy.longest_delay);
        let delay = most
            .mul_f64(rand::random::<f64>())
            .max(e.retry_after_hint().unwrap_or_default());
        let now = Instant::now();
        let until = *self.until.get_or_insert(now + self.policy.deadline);
        if now + delay > until {
            return Err(e.context(format_args!(
                "after {} attempts in {:?}",
                self.made, self.policy.deadline
            )));
        }
        tracing::debug!(error = %e, attempt = self.made, ?delay, "trying again");
        tokio::time::sleep(delay).await;
        self.made += 1;
        Ok(())
    }
}
