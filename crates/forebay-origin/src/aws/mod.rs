//! Credentials of S3 origins. Each source is a small module; they are tried in this order:
//!
//! 1. keys in the origin's configuration;
//! 2. the profile that the origin's configuration names: then no other source counts;
//! 3. `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`;
//! 4. the profile of `AWS_PROFILE`, or `default`: a role, keys, single sign-on, or
//!    `credential_process`;
//! 5. a web identity: `AWS_WEB_IDENTITY_TOKEN_FILE` and `AWS_ROLE_ARN` (IRSA);
//! 6. the container's service: `AWS_CONTAINER_CREDENTIALS_*` (ECS, EKS Pod Identity);
//! 7. the metadata service of the machine.
//!
//! The first that is *configured* is used: if a configured source fails, that is an error, never a
//! reason to continue with another identity. Secrets are in no error, no log line and no `Debug`
//! text.

mod ask;
mod container;
mod environment;
mod instance;
mod process;
mod profile;
mod renewed;
mod role;
mod sso;
mod sts;

pub use environment::Environment;
pub(crate) use profile::Profile;
pub(crate) use renewed::Credentials;

use crate::{config::OriginConfig, failure::Site};
use forebay_core::{Error, Result};
use renewed::{Renewed, checked};
use std::{path::Path, sync::Arc};
use sts::{AssumedRole, Proof, Role};

pub(crate) const NOTHING_FOUND: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a \
    profile in ~/.aws/credentials, or anonymous = true for a public bucket";

/// A session token has some kilobytes at most.
const TOKEN_MAX_BYTES: u64 = 64 << 10;

/// What environment and profile say about the service, besides credentials.
pub(crate) struct AwsSettings {
    pub endpoint: Option<String>,
    pub region: String,
    profile: Profile,
}

impl AwsSettings {
    pub(crate) fn find(config: &OriginConfig, env: &Environment) -> Result<Self> {
        let profile = match Profile::load(config.profile.as_deref(), env) {
            // A caller that needs no profile must not fail because of one.
            Err(e)
                if config.profile.is_none()
                    && (config.anonymous || config.access_key_id.is_some()) =>
            {
                tracing::debug!(error = %e, "the AWS profile is ignored");
                Profile::empty()
            }
            other => other?,
        };
        let endpoint = config
            .endpoint
            .clone()
            .or_else(|| env.get("AWS_ENDPOINT_URL_S3"))
            .or_else(|| env.get("AWS_ENDPOINT_URL"))
            .or_else(|| profile.setting("endpoint_url").map(str::to_owned));
        let region = config
            .region
            .clone()
            .or_else(|| env.get("AWS_REGION"))
            .or_else(|| env.get("AWS_DEFAULT_REGION"))
            .or_else(|| profile.setting("region").map(str::to_owned))
            .unwrap_or_else(|| "us-east-1".to_owned());
        Ok(Self {
            endpoint,
            region,
            profile,
        })
    }
}

fn fixed(who: &str, id: String, secret: String, token: Option<String>) -> Result<Credentials> {
    Ok(Credentials::Fixed(Arc::new(checked(
        who, id, secret, token,
    )?)))
}

/// The keys of the environment, if there are any.
fn of_environment(env: &Environment) -> Result<Option<Credentials>> {
    match (
        env.get("AWS_ACCESS_KEY_ID"),
        env.get("AWS_SECRET_ACCESS_KEY"),
    ) {
        (Some(id), Some(secret)) => Ok(Some(fixed(
            "the AWS_* keys of the environment",
            id,
            secret,
            env.get("AWS_SESSION_TOKEN"),
        )?)),
        (None, None) => Ok(None),
        _ => Err(
            Error::invalid("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set")
                .hint("set both or neither"),
        ),
    }
}

/// The first source that is configured.
///
/// # Errors
/// A source that is configured wrongly, or of an unsupported kind. If no source is found, the first
/// request fails.
pub(crate) fn credentials(
    config: &OriginConfig,
    settings: &AwsSettings,
    env: &Environment,
) -> Result<Credentials> {
    if let (Some(id), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        let token = config.session_token.as_ref().map(|t| t.reveal().to_owned());
        return fixed(
            "the keys of the origin",
            id.clone(),
            secret.reveal().to_owned(),
            token,
        );
    }
    let from_profile = || role::of_profile(config, env, &settings.profile, &settings.region);
    // A profile that the configuration names takes precedence over the environment, as with the AWS
    // command line's --profile.
    if config.profile.is_some() {
        return from_profile()?.ok_or_else(|| {
            Error::invalid(format!(
                "the profile {:?} has no credentials",
                settings.profile.name()
            ))
            .hint(
                "give it aws_access_key_id and aws_secret_access_key, role_arn with its \
                    source, single sign-on, or credential_process",
            )
        });
    }
    if let Some(keys) = of_environment(env)? {
        return Ok(keys);
    }
    if let Some(found) = from_profile()? {
        return Ok(found);
    }
    if let Some(file) = env.get("AWS_WEB_IDENTITY_TOKEN_FILE") {
        let arn = env.get("AWS_ROLE_ARN").ok_or_else(|| {
            Error::invalid("AWS_WEB_IDENTITY_TOKEN_FILE is set, but AWS_ROLE_ARN is not")
                .hint("set both or neither")
        })?;
        let session_name = env
            .get("AWS_ROLE_SESSION_NAME")
            .unwrap_or_else(|| sts::SESSION_NAME.to_owned());
        let role = Role {
            arn,
            session_name,
            external_id: None,
            duration_seconds: None,
        };
        let proof = Proof::WebIdentity {
            file: file.into(),
            setting: "AWS_WEB_IDENTITY_TOKEN_FILE",
        };
        let assumed = AssumedRole::new(
            config,
            env,
            &settings.profile,
            &settings.region,
            role,
            proof,
        )?;
        return Ok(Credentials::Renewed(Renewed::new(assumed)));
    }
    if container::is_configured(env) {
        return Ok(Credentials::Renewed(Renewed::new(
            container::Container::new(config, env)?,
        )));
    }
    let looked_at = format!(
        "AWS_ACCESS_KEY_ID (not set), {}, AWS_WEB_IDENTITY_TOKEN_FILE (not set), \
         AWS_CONTAINER_CREDENTIALS_* (not set)",
        settings.profile.looked_at()
    );
    if instance::is_disabled(env) {
        let text = format!(
            "looked at {looked_at}; the instance metadata service is not asked, because \
             AWS_EC2_METADATA_DISABLED is set"
        );
        return Ok(Credentials::Missing(
            Error::permission_denied(text).hint(NOTHING_FOUND),
        ));
    }
    Ok(Credentials::Renewed(Renewed::new(instance::Instance::new(
        config,
        env,
        &settings.profile,
        looked_at,
    )?)))
}

/// The error of a request that found no credentials.
pub(crate) fn unavailable(site: Site<'_>, error: Error) -> Error {
    error.context(format!(
        "{} at {}: no AWS credentials",
        site.operation, site.origin
    ))
}

/// A token that another program keeps current in a file.
async fn token_file(path: &Path, setting: &str) -> Result<String> {
    use tokio::io::AsyncReadExt;
    let bad = |why: String| {
        Error::permission_denied(format!("{setting}: {}: {why}", path.display()))
            .hint("check that the file is mounted and readable")
    };
    let file = tokio::fs::File::open(path)
        .await
        .map_err(|e| bad(e.to_string()))?;
    let mut text = String::new();
    file.take(TOKEN_MAX_BYTES)
        .read_to_string(&mut text)
        .await
        .map_err(|e| bad(e.to_string()))?;
    match text.trim() {
        "" => Err(bad("the file is empty".to_owned())),
        token => Ok(token.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(config: &OriginConfig, env: &Environment) -> Result<Credentials> {
        credentials(config, &AwsSettings::find(config, env)?, env)
    }

    fn key_id(credentials: Result<Credentials>) -> String {
        futures::executor::block_on(credentials.unwrap().get())
            .unwrap()
            .key_id
            .clone()
    }

    #[test]
    fn credentials_are_looked_for_in_the_order_that_is_documented() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("credentials");
        let text = "[default]\naws_access_key_id = default\naws_secret_access_key = \
            s\n[named]\naws_access_key_id = named\naws_secret_access_key = s\n[bare]\nregion = x\n";
        std::fs::write(&file, text).unwrap();
        let path = file.to_str().unwrap();
        let files = [
            ("AWS_SHARED_CREDENTIALS_FILE", path),
            ("AWS_CONFIG_FILE", "/nonexistent/config"),
        ];
        let env = |more: &[(&'static str, &'static str)]| {
            Environment::of(
                files
                    .iter()
                    .map(|(n, v)| (n.to_string(), v.to_string()))
                    .chain(more.iter().map(|(n, v)| (n.to_string(), v.to_string()))),
            )
        };
        let keys = [
            ("AWS_ACCESS_KEY_ID", "environment"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
        ];
        let plain = OriginConfig {
            url: "s3://b".into(),
            ..Default::default()
        };
        let explicit = OriginConfig {
            access_key_id: Some("explicit".into()),
            secret_access_key: Some(crate::Secret::new("s")),
            ..plain.clone()
        };
        let named = OriginConfig {
            profile: Some("named".into()),
            ..plain.clone()
        };
        assert_eq!(key_id(find(&explicit, &env(&keys))), "explicit");
        assert_eq!(key_id(find(&named, &env(&keys))), "named");
        assert_eq!(key_id(find(&plain, &env(&keys))), "environment");
        assert_eq!(key_id(find(&plain, &env(&[]))), "default");
        assert_eq!(
            key_id(find(
                &plain,
                &env(&[
                    ("AWS_PROFILE", "named"),
                    ("AWS_WEB_IDENTITY_TOKEN_FILE", "/x")
                ])
            )),
            "named"
        );
        assert!(
            find(
                &OriginConfig {
                    profile: Some("bare".into()),
                    ..plain.clone()
                },
                &env(&keys)
            )
            .is_err()
        );
        assert!(
            find(&plain, &env(&keys[..1])).is_err(),
            "half a pair of keys"
        );
        let bare = |more: &[(&'static str, &'static str)]| {
            find(&plain, &env(&[&[("AWS_PROFILE", "bare")], more].concat()))
        };
        assert!(
            bare(&[("AWS_WEB_IDENTITY_TOKEN_FILE", "/x")]).is_err(),
            "a token without a role"
        );
        let Ok(Credentials::Missing(e)) = bare(&[("AWS_EC2_METADATA_DISABLED", "TRUE")]) else {
            panic!("found something")
        };
        let shown = unavailable(
            Site {
                origin: "s3://b",
                operation: "get",
                key: "k",
            },
            e,
        )
        .to_string();
        assert!(
            shown.contains(path)
                && shown.contains("AWS_EC2_METADATA_DISABLED")
                && shown.contains("AWS_ACCESS_KEY_ID"),
            "{shown}"
        );
    }
}
