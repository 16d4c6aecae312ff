//! Credentials. For AWS by the usual chain: explicit keys, environment, profile files, web identity, container, instance metadata. For Google and
//! Azure as `object_store` finds them.
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
    azure::{AzureCredentialProvider, MicrosoftAzureBuilder},
    gcp::{GcpCredentialProvider, GoogleCloudStorageBuilder},
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
    let network = AmazonS3Builder::from_env()
        // Only the credentials are wanted of it; building asks for a bucket.
        .with_bucket_name("credentials-only")
        .with_region(&settings.region)
        .with_retry(retry())
        .with_client_options(client_options())
        .build()
        .map_err(|e| Error::invalid(format!("AWS credentials: {e}")).hint("check the AWS_* variables of the environment"))?;
    Ok(Arc::new(Checked::new(network.credentials().clone(), settings, FETCH_TIMEOUT)))
}

/// The error of a request that found no credentials.
pub(crate) fn unavailable(site: Site<'_>, error: &object_store::Error) -> Error {
    let text = inner_text(error);
    Error::permission_denied(format!("{} at {}: no AWS credentials: {text}", site.operation, site.origin)).hint(
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws/credentials, or anonymous = true for a public bucket",
    )
}

/// Google's credentials: the configured file, `GOOGLE_APPLICATION_CREDENTIALS`, the login of gcloud, the instance's metadata.
pub(crate) fn google(config: &OriginConfig, bucket: &str) -> Result<GcpCredentialProvider> {
    crate::transport::install_tls_provider();
    let mut builder =
        GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry()).with_client_options(client_options());
    if let Some(file) = &config.service_account_file {
        builder = builder.with_service_account_path(file.display().to_string());
    }
    let built = builder.build().map_err(|e| {
        Error::invalid(format!("Google credentials: {e}")).hint("check service_account_file or GOOGLE_APPLICATION_CREDENTIALS")
    })?;
    let looked_at = "service_account_file, GOOGLE_APPLICATION_CREDENTIALS, gcloud's application default credentials, the instance metadata";
    Ok(Arc::new(Checked {
        inner: built.credentials().clone(),
        looked_at: looked_at.to_owned(),
        timeout: FETCH_TIMEOUT,
        failed: Mutex::default(),
    }))
}

/// The error of a request that found no Google credentials.
pub(crate) fn google_unavailable(site: Site<'_>, error: &object_store::Error) -> Error {
    Error::permission_denied(format!("{} at {}: no Google credentials: {}", site.operation, site.origin, inner_text(error)))
        .hint("set GOOGLE_APPLICATION_CREDENTIALS to a service account's key, or anonymous = true for a public bucket")
}

/// Azure's credentials: the configured key, `AZURE_*` in the environment (keys, tokens, service principals, workload identity), the
/// machine's managed identity.
pub(crate) fn azure(config: &OriginConfig, account: &str, container: &str) -> Result<AzureCredentialProvider> {
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
        Error::invalid(format!("the Azure credentials for the account {account:?} are not valid"))
            .hint("check account_key and the AZURE_* variables")
    })?;
    let looked_at =
        "account_key, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_CLIENT_ID and its kin, the managed identity of the machine";
    Ok(Arc::new(Checked {
        inner: built.credentials().clone(),
        looked_at: looked_at.to_owned(),
        timeout: FETCH_TIMEOUT,
        failed: Mutex::default(),
    }))
}

/// The error of a request that found no Azure credentials.
pub(crate) fn azure_unavailable(site: Site<'_>, error: &object_store::Error) -> Error {
    Error::permission_denied(format!("{} at {}: no Azure credentials: {}", site.operation, site.origin, inner_text(error)))
        .hint("set account_key or AZURE_STORAGE_ACCOUNT_KEY, or anonymous = true for a public container")
}

fn retry() -> RetryConfig {
    RetryConfig {
        max_retries: 1,
        retry_timeout: FETCH_TIMEOUT,
        backoff: BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: Duration::from_millis(200), base: 2.0 },
    }
}

fn client_options() -> ClientOptions {
    ClientOptions::new().with_connect_timeout(Duration::from_secs(2)).with_timeout(FETCH_TIMEOUT)
}

fn inner_text(error: &object_store::Error) -> String {
    match error {
        object_store::Error::Generic { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}

/// A source with a bound on its time and a memory of its last failure.
#[derive(Debug)]
pub(crate) struct Checked<C> {
    inner: Arc<dyn CredentialProvider<Credential = C>>,
    looked_at: String,
    timeout: Duration,
    failed: Mutex<Option<(Instant, String)>>,
}

impl Checked<AwsCredential> {
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
}

fn failed(text: String) -> object_store::Error {
    object_store::Error::Generic { store: "credentials", source: text.into() }
}

#[async_trait]
impl<C: std::fmt::Debug + Send + Sync + 'static> CredentialProvider for Checked<C> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        let recent = self.failed.lock().as_ref().filter(|(at, _)| at.elapsed() < FAILURE_TTL).map(|(_, text)| text.clone());
        if let Some(text) = recent {
            return Err(failed(text));
        }
        let cause = match tokio::time::timeout(self.timeout, self.inner.get_credential()).await {
            Ok(Ok(credential)) => return Ok(credential),
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("no answer within {:?}", self.timeout),
        };
        let text = format!("looked at {}; {cause}", self.looked_at);
        *self.failed.lock() = Some((Instant::now(), text.clone()));
        Err(failed(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Never;

    #[async_trait]
    impl CredentialProvider for Never {
        type Credential = AwsCredential;

        async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
            std::future::pending().await
        }
    }

    #[tokio::test]
    async fn a_source_that_hangs_is_given_up_and_remembered() {
        let timeout = Duration::from_millis(50);
        let checked = Checked { inner: Arc::new(Never), looked_at: "here and there".to_owned(), timeout, failed: Mutex::default() };
        let e = checked.get_credential().await.unwrap_err();
        let site = Site { origin: "s3://b", operation: "get", key: "k" };
        let shown = unavailable(site, &e).to_string();
        assert!(shown.contains("here and there") && shown.contains("AWS_ACCESS_KEY_ID"), "{shown}");
        let begun = Instant::now();
        assert!(checked.get_credential().await.is_err());
        assert!(begun.elapsed() < timeout, "the failure is not remembered");
    }

    #[test]
    fn keys_of_the_configuration_go_first() {
        let config = OriginConfig {
            url: "s3://b".into(),
            access_key_id: Some("A".into()),
            secret_access_key: Some(crate::Secret::new("hunter2")),
            ..Default::default()
        };
        let provider = aws(&config, &AwsSettings::find(&config).unwrap()).unwrap();
        let credential = futures::executor::block_on(provider.get_credential()).unwrap();
        assert_eq!((credential.key_id.as_str(), credential.secret_key.as_str()), ("A", "hunter2"));
        assert!(!format!("{provider:?} {config:?}").contains("hunter2"));
    }
}
