//! Credentials that expire, and their renewal.
//!
//! A [`Source`] issues keys with an expiry. [`Renewed`] holds the last keys and asks for new ones
//! ahead of time: in the background while the old ones are still valid, so that no request waits
//! for it, and with the request waiting once they are not. Its guarantees:
//! - one fetch at a time, however many ask; a request that goes away does not end the fetch;
//! - every fetch is bounded by the source's timeout;
//! - keys are never handed out after their expiry, nor after the service has refused them;
//! - a failure is remembered for a moment, so that requests do not queue up just to fail.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use forebay_core::{Error, Result, sync::Mutex};
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use object_store::aws::AwsCredential;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The longest wait for a network source.
pub(crate) const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a failure is remembered while there are no valid keys.
const FAILURE_TTL: Duration = Duration::from_secs(3);
/// How long while there are: nobody waits, and the source may be in trouble.
const QUIET_FAILURE_TTL: Duration = Duration::from_secs(15);
/// Keys are renewed this long before their expiry, or in the last quarter of their lifetime if that
/// is shorter.
const MARGIN_MAX: chrono::Duration = chrono::Duration::seconds(300);
/// Keys younger than this are not fetched again because the service refuses them.
const REFUSED_MIN_AGE: Duration = Duration::from_secs(3);

/// Where keys come from.
#[async_trait]
pub(crate) trait Source: Send + Sync + 'static {
    /// For messages, with its address and without secrets.
    fn describe(&self) -> String;

    fn timeout(&self) -> Duration {
        FETCH_TIMEOUT
    }

    /// # Errors
    /// A transient kind if asking again may help.
    async fn fetch(&self) -> Result<Fetched>;
}

/// What a source issued.
pub(crate) struct Fetched {
    pub credential: AwsCredential,
    pub ends: Option<DateTime<Utc>>,
}

impl Fetched {
    /// # Errors
    /// Keys that cannot be sent in a header. The text does not quote them.
    pub(crate) fn new(
        who: &str,
        key_id: String,
        secret_key: String,
        token: Option<String>,
        ends: Option<DateTime<Utc>>,
    ) -> Result<Self> {
        Ok(Self {
            credential: checked(who, key_id, secret_key, token)?,
            ends,
        })
    }

    /// The JSON of the metadata services and of `credential_process`, which differ only in the
    /// token's name.
    pub(crate) fn from_json(who: &str, text: &str) -> Result<Self> {
        // A parser's message might quote a secret.
        let json: serde_json::Value = serde_json::from_str(text).map_err(|_| {
            Error::permission_denied(format!("{who}: the answer is not JSON"))
                .hint("check that this is the right address")
        })?;
        let field = |name: &str| json[name].as_str().map(str::to_owned);
        if let Some(code) = field("Code").filter(|c| c != "Success") {
            let message: String = field("Message")
                .unwrap_or_default()
                .chars()
                .filter(|c| !c.is_control())
                .take(200)
                .collect();
            return Err(Error::permission_denied(format!("{who}: {code} {message}"))
                .hint("check the role that is attached"));
        }
        let (Some(id), Some(secret)) = (field("AccessKeyId"), field("SecretAccessKey")) else {
            return Err(Error::permission_denied(format!(
                "{who}: the answer has no AccessKeyId and SecretAccessKey"
            ))
            .hint("check that this is the right address"));
        };
        let ends = match field("Expiration") {
            None => None,
            Some(text) => Some(instant(who, &text)?),
        };
        Self::new(
            who,
            id,
            secret,
            field("Token").or_else(|| field("SessionToken")),
            ends,
        )
    }
}

/// A time as the services write it.
pub(crate) fn instant(who: &str, text: &str) -> Result<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(text)
        .map(|t| t.to_utc())
        .map_err(|_| {
            Error::permission_denied(format!(
                "{who}: the Expiration of the keys is not a valid time"
            ))
        })
}

/// # Errors
/// Keys that cannot be sent in a header, and would otherwise break where requests are signed.
pub(crate) fn checked(
    who: &str,
    key_id: String,
    secret_key: String,
    token: Option<String>,
) -> Result<AwsCredential> {
    let visible = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    // A secret key is not in any header, but a line break in it is a mistake all the same.
    let printable = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
    for (name, ok) in [
        ("access key id", visible(&key_id)),
        ("secret access key", printable(&secret_key)),
        ("session token", token.as_deref().is_none_or(visible)),
    ] {
        if !ok {
            return Err(Error::invalid(format!(
                "{who}: the {name} is empty, or contains line ends or other characters that do not \
                 belong in it"
            ))
            .hint("write the keys exactly as they were issued"));
        }
    }
    Ok(AwsCredential {
        key_id,
        secret_key,
        token,
    })
}

/// How an S3 origin gets its keys.
#[derive(Clone)]
pub(crate) enum Credentials {
    Fixed(Arc<AwsCredential>),
    Renewed(Renewed),
    /// There are none, for this reason.
    Missing(Error),
}

impl Credentials {
    /// # Errors
    /// No keys; says where it looked.
    pub(crate) async fn get(&self) -> Result<Arc<AwsCredential>> {
        match self {
            Self::Fixed(credential) => Ok(credential.clone()),
            Self::Renewed(renewed) => renewed.get().await,
            Self::Missing(why) => Err(why.clone()),
        }
    }

    /// The service does not accept these keys (any more). Returns true if there are, or may be,
    /// others.
    pub(crate) fn refused(&self, used: &Arc<AwsCredential>) -> bool {
        match self {
            Self::Renewed(renewed) => renewed.refused(used),
            _ => false,
        }
    }

    /// How long [`Credentials::get`] may take.
    pub(crate) fn timeout(&self) -> Duration {
        match self {
            Self::Renewed(renewed) => renewed.0.source.timeout(),
            _ => Duration::ZERO,
        }
    }
}

type Outcome = Result<Arc<AwsCredential>>;

#[derive(Clone)]
pub(crate) struct Renewed(Arc<Inner>);

struct Inner {
    source: Box<dyn Source>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    held: Option<Held>,
    failed: Option<(Instant, Error)>,
    running: Option<Shared<BoxFuture<'static, Outcome>>>,
}

struct Held {
    credential: Arc<AwsCredential>,
    fetched: Instant,
    renew_at: Option<DateTime<Utc>>,
    ends: Option<DateTime<Utc>>,
}

impl Renewed {
    pub(crate) fn new(source: impl Source) -> Self {
        Self(Arc::new(Inner {
            source: Box::new(source),
            state: Mutex::default(),
        }))
    }

    async fn get(&self) -> Outcome {
        let running = {
            let mut state = self.0.state.lock();
            let now = Utc::now();
            let held = state
                .held
                .as_ref()
                .filter(|h| h.ends.is_none_or(|ends| now < ends));
            let usable = held.map(|h| h.credential.clone());
            if let Some(h) = held.filter(|h| h.renew_at.is_none_or(|at| now < at)) {
                return Ok(h.credential.clone());
            }
            let ttl = if usable.is_some() {
                QUIET_FAILURE_TTL
            } else {
                FAILURE_TTL
            };
            if let Some((_, error)) = state.failed.as_ref().filter(|(at, _)| at.elapsed() < ttl) {
                return usable.ok_or_else(|| error.clone());
            }
            let running = state
                .running
                .get_or_insert_with(|| begin(self.0.clone()))
                .clone();
            if let Some(credential) = usable {
                return Ok(credential);
            }
            running
        };
        running.await
    }

    fn refused(&self, used: &Arc<AwsCredential>) -> bool {
        let mut state = self.0.state.lock();
        match &state.held {
            Some(h) if Arc::ptr_eq(&h.credential, used) => {
                if h.fetched.elapsed() < REFUSED_MIN_AGE {
                    return false;
                }
                tracing::info!(
                    source = self.0.source.describe(),
                    "the service refuses these credentials before they expire: asking for new ones"
                );
                state.held = None;
                true
            }
            // New keys have arrived, or are about to.
            _ => true,
        }
    }
}

/// A fetch in its own task: whoever started it may leave.
fn begin(inner: Arc<Inner>) -> Shared<BoxFuture<'static, Outcome>> {
    let task = tokio::spawn(async move {
        /// Whatever happens, the next fetch may start.
        struct Done(Arc<Inner>);
        impl Drop for Done {
            fn drop(&mut self) {
                self.0.state.lock().running = None;
            }
        }
        let done = Done(inner);
        done.0.renew().await
    });
    let outcome = async move {
        match task.await {
            Ok(outcome) => outcome,
            Err(e) => Err(Error::internal(format!("fetching credentials: {e}"))),
        }
    };
    outcome.boxed().shared()
}

impl Inner {
    async fn renew(&self) -> Outcome {
        let timeout = self.source.timeout();
        let fetched = match tokio::time::timeout(timeout, self.source.fetch()).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Error::timeout(format!(
                "{}: no answer within {timeout:?}",
                self.source.describe()
            ))
            .hint(
                "check that the source of the credentials is up and reachable from this machine",
            )),
        };
        let fetched = fetched.and_then(|f| match f.ends {
            Some(ends) if ends <= Utc::now() => Err(Error::permission_denied(format!(
                "{}: it gave out credentials that expired at {}",
                self.source.describe(),
                ends.format("%Y-%m-%dT%H:%M:%SZ")
            ))
            .hint("check this machine's clock and the source of the credentials")),
            _ => Ok(f),
        });
        let mut state = self.state.lock();
        match fetched {
            Ok(Fetched { credential, ends }) => {
                let now = Utc::now();
                let credential = Arc::new(credential);
                let renew_at = ends.map(|ends| ends - ((ends - now) / 4).min(MARGIN_MAX));
                tracing::debug!(
                    source = self.source.describe(),
                    ends = ends.map(|e| e.to_rfc3339()),
                    "credentials fetched"
                );
                state.held = Some(Held {
                    credential: credential.clone(),
                    fetched: Instant::now(),
                    renew_at,
                    ends,
                });
                state.failed = None;
                Ok(credential)
            }
            Err(error) => {
                if let Some(ends) = state
                    .held
                    .as_ref()
                    .and_then(|h| h.ends)
                    .filter(|ends| Utc::now() < *ends)
                {
                    tracing::warn!(%error, ends = ends.to_rfc3339(), "credentials could not be \
                        renewed; the old ones are used until they expire");
                }
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[derive(Default, Clone)]
    struct Counting {
        fetches: Arc<AtomicUsize>,
        lifetime_ms: i64,
        takes_ms: u64,
        fails_from: usize,
        hangs: bool,
    }

    #[async_trait]
    impl Source for Counting {
        fn describe(&self) -> String {
            "the counter".into()
        }

        fn timeout(&self) -> Duration {
            Duration::from_millis(if self.hangs { 50 } else { 5000 })
        }

        async fn fetch(&self) -> Result<Fetched> {
            let n = self.fetches.fetch_add(1, Ordering::SeqCst);
            if self.hangs {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(Duration::from_millis(self.takes_ms)).await;
            if n >= self.fails_from {
                return Err(Error::origin_unavailable("the counter: broken"));
            }
            let ends = Utc::now() + chrono::Duration::milliseconds(self.lifetime_ms);
            Fetched::new(
                "the counter",
                format!("key{n}"),
                "secret".into(),
                None,
                Some(ends),
            )
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn credentials_are_fetched_once_whoever_asks_and_whoever_leaves() {
        let source = Counting {
            lifetime_ms: 60_000,
            takes_ms: 100,
            fails_from: 9,
            ..Default::default()
        };
        let renewed = Renewed::new(source.clone());
        // The request that started it leaves at once.
        assert!(renewed.get().now_or_never().is_none());
        let all = futures::future::join_all((0..50).map(|_| renewed.get())).await;
        assert!(all.iter().all(|c| c.as_ref().unwrap().key_id == "key0"));
        assert_eq!(source.fetches.load(Ordering::SeqCst), 1);
    }

    /// Whether `test` is in time once: a machine may be busy with something else.
    async fn in_time(test: impl AsyncFn() -> bool) {
        for _ in 0..5 {
            if test().await {
                return;
            }
        }
        panic!("this machine is too slow");
    }

    #[tokio::test]
    async fn renewal_is_ahead_of_the_end_and_nobody_waits_for_it() {
        in_time(renewal_is_ahead).await;
    }

    async fn renewal_is_ahead() -> bool {
        let source = Counting {
            lifetime_ms: 8000,
            takes_ms: 30,
            fails_from: 9,
            ..Default::default()
        };
        let (renewed, began) = (Renewed::new(source.clone()), Instant::now());
        assert_eq!(renewed.get().await.unwrap().key_id, "key0");
        // In the last quarter of its life.
        tokio::time::sleep(Duration::from_millis(6100)).await;
        let got = renewed.get().now_or_never();
        if began.elapsed() >= Duration::from_secs(8) {
            return false;
        }
        assert_eq!(got.expect("no wait").unwrap().key_id, "key0");
        while renewed.get().await.unwrap().key_id == "key0" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(renewed.get().await.unwrap().key_id, "key1");
        assert_eq!(source.fetches.load(Ordering::SeqCst), 2);
        true
    }

    #[tokio::test]
    async fn old_credentials_serve_to_their_end_and_not_a_moment_longer() {
        in_time(old_credentials_serve).await;
    }

    async fn old_credentials_serve() -> bool {
        let source = Counting {
            lifetime_ms: 4000,
            fails_from: 1,
            ..Default::default()
        };
        let (renewed, began) = (Renewed::new(source.clone()), Instant::now());
        renewed.get().await.unwrap();
        tokio::time::sleep(Duration::from_millis(3100)).await;
        let old = renewed.get().await;
        if began.elapsed() >= Duration::from_secs(4) {
            return false;
        }
        assert_eq!(old.unwrap().key_id, "key0");
        tokio::time::sleep(Duration::from_millis(950)).await;
        let ended = renewed.get().await.unwrap_err();
        assert!(ended.to_string().contains("the counter: broken"));
        // The failure is remembered for three seconds.
        if began.elapsed() >= Duration::from_secs(6) {
            return false;
        }
        assert_eq!(
            source.fetches.load(Ordering::SeqCst),
            2,
            "the failure is not remembered"
        );
        true
    }

    #[tokio::test]
    async fn a_source_that_hangs_is_given_up_and_remembered() {
        let source = Counting {
            hangs: true,
            ..Default::default()
        };
        let renewed = Renewed::new(source.clone());
        let e = renewed.get().await.unwrap_err();
        assert!(
            e.to_string().contains("the counter: no answer within 50ms"),
            "{e}"
        );
        assert!(
            renewed
                .get()
                .now_or_never()
                .expect("the failure is not remembered")
                .is_err()
        );
        assert_eq!(source.fetches.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn credentials_that_the_service_refuses_are_fetched_again_but_not_in_a_loop() {
        let source = Counting {
            lifetime_ms: 60_000,
            fails_from: 9,
            ..Default::default()
        };
        let renewed = Renewed::new(source);
        let first = renewed.get().await.unwrap();
        assert!(!renewed.refused(&first), "they are new");
        if let Some(h) = renewed.0.state.lock().held.as_mut() {
            h.fetched -= REFUSED_MIN_AGE;
        }
        assert!(renewed.refused(&first) && renewed.refused(&first));
        assert_eq!(renewed.get().await.unwrap().key_id, "key1");
    }

    #[test]
    fn keys_that_no_header_can_carry_are_refused_without_being_shown() {
        for (id, secret, token) in [
            ("a b", "s", None),
            ("a", "hunter2\n", None),
            ("a", "s", Some("hunter2\r\nx: y")),
        ] {
            let e = checked("x", id.into(), secret.into(), token.map(str::to_owned))
                .expect_err("refused");
            assert!(!e.to_string().contains("hunter2"), "{e}");
        }
        let e = Fetched::from_json(
            "x",
            r#"{"Code":"AssumeRoleUnauthorizedAccess","Message":"no"}"#,
        )
        .err()
        .expect("refused");
        assert!(
            e.to_string().contains("AssumeRoleUnauthorizedAccess no"),
            "{e}"
        );
        assert!(
            Fetched::from_json("x", "hunter2")
                .err()
                .is_some_and(|e| !e.to_string().contains("hunter2"))
        );
    }
}
