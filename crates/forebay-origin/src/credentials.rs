//! AWS credentials by the usual chain: explicit keys, environment, profile files, web identity, container, instance metadata.
//!
//! The profile files are read here; the network sources are `object_store`'s. Finding nothing must be quick and say where was looked:
//! every source is bounded by a timeout, and a failure is remembered for a moment, so that requests do not queue up to fail.

use crate::{
    config::OriginConfig,
    failure::Site,
    profile::{Profile, ProfileCredentials},
};
use async_trait::async_trait;
use forebay_core::{Error, Result};
use object_store::{
    BackoffConfig, ClientOptions, CredentialProvider, RetryConfig, StaticCredentialProvider,
    aws::{AmazonS3Builder, AwsCredential, AwsCredentialProvider},
};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The longest wait for a network source of credentials.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a failure is remembered.
const FAILURE_TTL: Duration = Duration::from_secs(3);

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// What environment and profile say about the service, beside credentials.
pub(crate) struct AwsSettings {
    pub endpoint: Option<String>,
    pub region: String,
    profile: Profile,
}

impl AwsSettings {
    pub(crate) fn find(config: &OriginConfig) -> Result<Self> {
        let profile = match Profile::load(config.profile.as_deref()) {
            // Whoever needs no profile must not fail over one.
            Err(e) if config.profile.is_none() && (config.anonymous || config.access_key_id.is_some()) => {
                tracing::debug!(error = %e, "the AWS profile is left out");
                Profile::empty()
            }
            other => other?,
        };
        let endpoint = config
            .endpoint
            .clone()
            .or_else(|| env("AWS_ENDPOINT_URL_S3"))
            .or_else(|| env("AWS_ENDPOINT_URL"))
            .or_else(|| profile.setting("endpoint_url").map(str::to_owned));
        let region = config
            .region
            .clone()
            .or_else(|| env("AWS_REGION"))
            .or_else(|| env("AWS_DEFAULT_REGION"))
            .or_else(|| profile.setting("region").map(str::to_owned))
            .unwrap_or_else(|| "us-east-1".to_owned());
        Ok(Self { endpoint, region, profile })
    }
}

fn fixed(key_id: String, secret_key: String, token: Option<String>) -> AwsCredentialProvider {
    Arc::new(StaticCredentialProvider::new(AwsCredential { key_id, secret_key, token }))
}

/// The first source that is configured.
///
/// # Errors
/// A source that is configured wrongly, or of a kind that is not offered. That nothing is found shows at the first request.
pub(crate) fn aws(config: &OriginConfig, settings: &AwsSettings) -> Result<AwsCredentialProvider> {
    if let (Some(id), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        let token = config.session_token.as_ref().map(|t| t.reveal().to_owned());
        return Ok(fixed(id.clone(), secret.reveal().to_owned(), token));
    }
    // A profile that the configuration names goes before the environment, as with the AWS command line's --profile.
    if config.profile.is_none() {
        match (env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY")) {
            (Some(id), Some(secret)) => return Ok(fixed(id, secret, env("AWS_SESSION_TOKEN"))),
            (None, None) => {}
            _ => {
                return Err(Error::invalid("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set").hint("set both, or none"));
            }
        }
    }
    match settings.profile.credentials()? {
        Some(ProfileCredentials::Keys { id, secret, token }) => return Ok(fixed(id, secret, token)),
        Some(ProfileCredentials::Process(command)) => {
            return Ok(Arc::new(Checked::new(Arc::new(crate::profile::Process::new(command)), settings, crate::profile::PROCESS_TIMEOUT)));
        }
        None if config.profile.is_some() => {
            return Err(Error::invalid(format!("the profile {:?} has no credentials", settings.profile.name()))
                .hint("give it aws_access_key_id and aws_secret_access_key, or credential_process"));
        }
        None => {}
    }
    crate::transport::install_tls_provider();
    let retry = RetryConfig {
        max_retries: 1,
        retry_timeout: FETCH_TIMEOUT,
        backoff: BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: Duration::from_millis(200), base: 2.0 },
    };
    let network = AmazonS3Builder::from_env()
        // Only the credentials are wanted of it; building asks for a bucket.
        .with_bucket_name("credentials-only")
        .with_region(&settings.region)
        .with_retry(retry)
        .with_client_options(ClientOptions::new().with_connect_timeout(Duration::from_secs(2)).with_timeout(FETCH_TIMEOUT))
        .build()
        .map_err(|e| Error::invalid(format!("AWS credentials: {e}")).hint("check the AWS_* variables of the environment"))?;
    Ok(Arc::new(Checked::new(network.credentials().clone(), settings, FETCH_TIMEOUT)))
}

/// The error of a request that found no credentials.
pub(crate) fn unavailable(site: Site<'_>, error: &object_store::Error) -> Error {
    let text = match error {
        object_store::Error::Generic { source, .. } => source.to_string(),
        other => other.to_string(),
    };
    Error::permission_denied(format!("{} at {}: no AWS credentials: {text}", site.operation, site.origin)).hint(
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws/credentials, or anonymous = true for a public bucket",
    )
}

/// A source with a bound on its time and a memory of its last failure.
#[derive(Debug)]
struct Checked {
    inner: AwsCredentialProvider,
    looked_at: String,
    timeout: Duration,
    failed: Mutex<Option<(Instant, String)>>,
}

impl Checked {
    fn new(inner: AwsCredentialProvider, settings: &AwsSettings, timeout: Duration) -> Self {
        let mut places = vec!["AWS_ACCESS_KEY_ID in the environment".to_owned(), settings.profile.looked_at()];
        places.push(match (env("AWS_WEB_IDENTITY_TOKEN_FILE"), env("AWS_ROLE_ARN")) {
            (Some(_), Some(_)) => "the web identity of AWS_WEB_IDENTITY_TOKEN_FILE".to_owned(),
            _ => "AWS_WEB_IDENTITY_TOKEN_FILE (not set)".to_owned(),
        });
        places.push(if env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").or(env("AWS_CONTAINER_CREDENTIALS_FULL_URI")).is_some() {
            "the container's credentials".to_owned()
        } else {
            "the instance metadata at 169.254.169.254".to_owned()
        });
        Self { inner, looked_at: places.join(", "), timeout, failed: Mutex::new(None) }
    }

    fn error(&self, text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }
}

#[async_trait]
impl CredentialProvider for Checked {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let recent = self.failed.lock().as_ref().filter(|(at, _)| at.elapsed() < FAILURE_TTL).map(|(_, text)| text.clone());
        if let Some(text) = recent {
            return Err(self.error(&text));
        }
        let cause = match tokio::time::timeout(self.timeout, self.inner.get_credential()).await {
            Ok(Ok(credential)) => return Ok(credential),
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("no answer within {:?}", self.timeout),
        };
        let text = format!("looked at {}; {cause}", self.looked_at);
        *self.failed.lock() = Some((Instant::now(), text.clone()));
        Err(self.error(&text))
    }
}
