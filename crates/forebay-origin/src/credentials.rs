//! Credentials of Google and Azure, as `object_store` finds them. (Those of AWS are in
//! [`aws`](crate::aws).)
//!
//! Finding nothing must be quick, and say where it looked: every source is bounded by a timeout,
//! and a failure is remembered for a moment, so that requests do not queue up just to fail. A
//! source that gave something before and fails now is in trouble that may pass: what it gave serves
//! for a while yet, and after that requests fail as with an origin that does not answer.

use crate::{config::OriginConfig, failure::Site};
use async_trait::async_trait;
use forebay_core::{Error, Result, sync::Mutex};
use object_store::{
    BackoffConfig, ClientOptions, CredentialProvider, RetryConfig,
    azure::{AzureCredentialProvider, MicrosoftAzureBuilder},
    gcp::{GcpCredentialProvider, GoogleCloudStorageBuilder},
};
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

/// The longest wait for a network source of credentials.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a failure is remembered.
const FAILURE_TTL: Duration = Duration::from_secs(3);
/// For so long after its source last gave it out, a credential holds: `object_store` asks for
/// another one at least four minutes before it ends.
const HOLDS_FOR: Duration = Duration::from_secs(180);
/// A source that has given nothing for so long is not in trouble that passes by itself.
const TROUBLE_MAX: Duration = Duration::from_secs(3600);

/// Google's credentials: the configured file, `GOOGLE_APPLICATION_CREDENTIALS`, gcloud's login, the
/// instance's metadata.
pub(crate) fn google(config: &OriginConfig, bucket: &str) -> Result<GcpCredentialProvider> {
    crate::transport::install_tls_provider();
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(bucket)
        .with_retry(retry())
        .with_client_options(client_options());
    if let Some(file) = &config.service_account_file {
        builder = builder.with_service_account_path(file.display().to_string());
    }
    let built = builder.build().map_err(|e| {
        Error::invalid(format!("Google credentials: {e}"))
            .hint("check service_account_file or GOOGLE_APPLICATION_CREDENTIALS")
    })?;
    let looked_at = "service_account_file, GOOGLE_APPLICATION_CREDENTIALS, gcloud's application \
        default credentials, the instance metadata";
    Ok(Arc::new(Checked {
        inner: built.credentials().clone(),
        looked_at: looked_at.to_owned(),
        timeout: FETCH_TIMEOUT,
        given: Mutex::default(),
        failed: Mutex::default(),
    }))
}

/// The error of a request that found no Google credentials.
pub(crate) fn google_unavailable(site: Site<'_>, error: &object_store::Error) -> Error {
    let hint = "set GOOGLE_APPLICATION_CREDENTIALS to a service account's key, or anonymous = true \
        for a public bucket";
    unavailable(site, "Google", error, hint)
}

/// `hint`: how to give some, if there never were any.
fn unavailable(site: Site<'_>, whose: &str, error: &object_store::Error, hint: &str) -> Error {
    let text = format!(
        "{} at {}: no {whose} credentials: {}",
        site.operation,
        site.origin,
        inner_text(error)
    );
    match may_pass(error) {
        true => Error::origin_unavailable(text)
            .hint("their source does not answer any more: try again later"),
        false => Error::permission_denied(text).hint(hint),
    }
}

/// Azure's credentials: the configured key, `AZURE_*` in the environment (keys, tokens, service
/// principals, workload identity), the machine's managed identity.
pub(crate) fn azure(
    config: &OriginConfig,
    account: &str,
    container: &str,
) -> Result<AzureCredentialProvider> {
    crate::transport::install_tls_provider();
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_account(account)
        .with_container_name(container)
        .with_retry(retry())
        .with_client_options(client_options().with_allow_http(true));
    if let Some(key) = &config.account_key {
        builder = builder.with_access_key(key.reveal());
    }
    if let Some(endpoint) = &config.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    // The error's text might quote a key that cannot be decoded.
    let built = builder.build().map_err(|_| {
        Error::invalid(format!(
            "the Azure credentials for the account {account:?} are not valid"
        ))
        .hint("check account_key and the AZURE_* variables")
    })?;
    let looked_at = "account_key, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, \
        AZURE_CLIENT_ID and related variables, the machine's managed identity";
    Ok(Arc::new(Checked {
        inner: built.credentials().clone(),
        looked_at: looked_at.to_owned(),
        timeout: FETCH_TIMEOUT,
        given: Mutex::default(),
        failed: Mutex::default(),
    }))
}

/// The error of a request that found no Azure credentials.
pub(crate) fn azure_unavailable(site: Site<'_>, error: &object_store::Error) -> Error {
    let hint = "set account_key or AZURE_STORAGE_ACCOUNT_KEY, or anonymous = true for a public \
        container";
    unavailable(site, "Azure", error, hint)
}

fn retry() -> RetryConfig {
    RetryConfig {
        max_retries: 1,
        retry_timeout: FETCH_TIMEOUT,
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_millis(200),
            base: 2.0,
        },
    }
}

fn client_options() -> ClientOptions {
    ClientOptions::new()
        .with_connect_timeout(Duration::from_secs(2))
        .with_timeout(FETCH_TIMEOUT)
}

fn inner_text(error: &object_store::Error) -> String {
    match error {
        object_store::Error::Generic { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}

/// A source with a bound on its time and a memory of its last success and failure.
pub(crate) struct Checked<C> {
    inner: Arc<dyn CredentialProvider<Credential = C>>,
    looked_at: String,
    timeout: Duration,
    /// What it last gave out, and when.
    given: Mutex<Option<(Instant, Arc<C>)>>,
    failed: Mutex<Option<(Instant, String)>>,
}

/// Without what it gave out.
impl<C> fmt::Debug for Checked<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Checked");
        shown.field("looked_at", &self.looked_at);
        shown.finish_non_exhaustive()
    }
}

/// The error for requests to an origin whose source gave no credentials.
#[derive(Debug)]
struct Missing {
    text: String,
    /// There were some a while ago.
    may_pass: bool,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Missing {}

fn may_pass(error: &object_store::Error) -> bool {
    match error {
        object_store::Error::Generic { source, .. } => source
            .downcast_ref::<Missing>()
            .is_some_and(|missing| missing.may_pass),
        _ => false,
    }
}

impl<C> Checked<C> {
    /// What it gave out before, if that holds yet; otherwise the error.
    fn given_before(&self, text: String) -> object_store::Result<Arc<C>> {
        let given = self.given.lock().clone();
        let age = given.as_ref().map(|(at, _)| at.elapsed());
        let missing = Missing {
            text,
            may_pass: age.is_some_and(|age| age < TROUBLE_MAX),
        };
        let holds = given.filter(|_| age.is_some_and(|age| age < HOLDS_FOR));
        holds
            .map(|(_, credential)| credential)
            .ok_or_else(|| object_store::Error::Generic {
                store: "credentials",
                source: Box::new(missing),
            })
    }
}

#[async_trait]
impl<C: std::fmt::Debug + Send + Sync + 'static> CredentialProvider for Checked<C> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        let recent = self
            .failed
            .lock()
            .as_ref()
            .filter(|(at, _)| at.elapsed() < FAILURE_TTL)
            .map(|(_, text)| text.clone());
        if let Some(text) = recent {
            return self.given_before(text);
        }
        let cause = match tokio::time::timeout(self.timeout, self.inner.get_credential()).await {
            Ok(Ok(credential)) => {
                *self.given.lock() = Some((Instant::now(), credential.clone()));
                return Ok(credential);
            }
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("no answer within {:?}", self.timeout),
        };
        let text = format!("looked at {}; {cause}", self.looked_at);
        *self.failed.lock() = Some((Instant::now(), text.clone()));
        self.given_before(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::ErrorKind;
    use object_store::gcp::GcpCredential;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    const SITE: Site<'static> = Site {
        origin: "gs://b",
        operation: "get",
        key: "k",
    };

    #[derive(Debug)]
    struct Never;

    #[async_trait]
    impl CredentialProvider for Never {
        type Credential = GcpCredential;

        async fn get_credential(&self) -> object_store::Result<Arc<GcpCredential>> {
            std::future::pending().await
        }
    }

    #[tokio::test]
    async fn a_source_of_google_or_azure_that_hangs_is_given_up_and_remembered() {
        let timeout = Duration::from_secs(3);
        let checked = Checked {
            inner: Arc::new(Never),
            looked_at: "here and there".to_owned(),
            timeout,
            given: Mutex::default(),
            failed: Mutex::default(),
        };
        let e = checked.get_credential().await.unwrap_err();
        let e = google_unavailable(SITE, &e);
        assert_eq!(e.kind(), ErrorKind::PermissionDenied);
        let shown = e.to_string();
        assert!(
            shown.contains("here and there") && shown.contains("GOOGLE_APPLICATION_CREDENTIALS"),
            "{shown}"
        );
        let begun = Instant::now();
        assert!(checked.get_credential().await.is_err());
        assert!(begun.elapsed() < timeout, "the failure is not remembered");
    }

    /// Gives a token, and then none any more.
    #[derive(Debug, Default)]
    struct Once(AtomicBool);

    #[async_trait]
    impl CredentialProvider for Once {
        type Credential = GcpCredential;

        async fn get_credential(&self) -> object_store::Result<Arc<GcpCredential>> {
            match self.0.swap(true, Relaxed) {
                false => Ok(Arc::new(GcpCredential {
                    bearer: "canary".to_owned(),
                })),
                true => Err(object_store::Error::Generic {
                    store: "GCS",
                    source: "the metadata server is away".into(),
                }),
            }
        }
    }

    #[tokio::test]
    async fn a_token_that_cannot_be_renewed_serves_for_a_while_and_then_that_may_pass() {
        let checked = Checked {
            inner: Arc::new(Once::default()),
            looked_at: "here and there".to_owned(),
            timeout: Duration::from_secs(1),
            given: Mutex::default(),
            failed: Mutex::default(),
        };
        // Given out; asked for in vain; and not asked for, because that was a moment ago.
        for _ in 0..3 {
            assert_eq!(checked.get_credential().await.unwrap().bearer, "canary");
        }
        assert!(!format!("{checked:?}").contains("canary"));
        if let Some((at, _)) = checked.given.lock().as_mut() {
            *at -= HOLDS_FOR;
        }
        let e = checked.get_credential().await.unwrap_err();
        let e = google_unavailable(SITE, &e);
        assert_eq!(e.kind(), ErrorKind::OriginUnavailable);
        assert!(e.to_string().contains("the metadata server is away"), "{e}");
    }
}
