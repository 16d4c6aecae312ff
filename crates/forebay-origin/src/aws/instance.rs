//! The role of a machine, from its instance metadata service: always version 2, where every request
//! carries a session token.

use super::{
    Environment, Profile,
    ask::Service,
    renewed::{Fetched, Source},
};
use crate::OriginConfig;
use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use std::time::Duration;
use url::Url;

const IPV4_ADDRESS: &str = "http://169.254.169.254";
const IPV6_ADDRESS: &str = "http://[fd00:ec2::254]";
const ROLES_PATH: &str = "latest/meta-data/iam/security-credentials/";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const TOKEN_TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";
const TOKEN: &str = "x-aws-ec2-metadata-token";

pub(crate) struct Instance {
    service: Service,
    /// Which sources were tried before; empty if the configuration names the instance.
    looked_at: String,
}

/// Whether the metadata service may be asked at all.
pub(crate) fn is_disabled(env: &Environment) -> bool {
    env.is_true("AWS_EC2_METADATA_DISABLED")
}

impl Instance {
    pub(crate) fn new(
        config: &OriginConfig,
        env: &Environment,
        profile: &Profile,
        looked_at: String,
    ) -> Result<Self> {
        let setting = |variable: &str, name: &str| {
            env.get(variable)
                .or_else(|| profile.setting(name).map(str::to_owned))
        };
        let mode = setting(
            "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
            "ec2_metadata_service_endpoint_mode",
        );
        let usual = if mode.is_some_and(|m| m.eq_ignore_ascii_case("ipv6")) {
            IPV6_ADDRESS
        } else {
            IPV4_ADDRESS
        };
        let address = setting(
            "AWS_EC2_METADATA_SERVICE_ENDPOINT",
            "ec2_metadata_service_endpoint",
        )
        .unwrap_or_else(|| usual.to_owned());
        // The service is close by, or absent.
        let config = OriginConfig {
            connect_timeout: CONNECT_TIMEOUT,
            ..config.clone()
        };
        let service = Service::new(
            &config,
            "the instance metadata service",
            &address,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        )?;
        Ok(Self { service, looked_at })
    }

    fn url(&self, path: &str) -> Result<Url> {
        let base = self.service.base().as_str().trim_end_matches('/');
        Url::parse(&format!("{base}/{path}")).map_err(|_| {
            Error::permission_denied(format!(
                "{}: the address is not valid",
                self.service.describe()
            ))
        })
    }

    async fn get(&self, path: &str, token: &HeaderValue) -> Result<Option<String>> {
        let url = self.url(path)?;
        let mut headers = HeaderMap::new();
        headers.insert(TOKEN, token.clone());
        let answer = self
            .service
            .ask(Method::GET, &url, &headers, &Bytes::new(), &[])
            .await?;
        match answer.status {
            s if s.is_success() => Ok(Some(answer.text)),
            StatusCode::NOT_FOUND => Ok(None),
            s => Err(self.service.status_error(&Method::GET, &url, s)),
        }
    }

    async fn role_credentials(&self) -> Result<Fetched> {
        let who = self.service.describe();
        let no_role = || {
            Error::permission_denied(format!("{who}: no role is attached to this machine"))
                .hint("attach an instance profile, or configure keys in another way")
        };
        let url = self.url("latest/api/token")?;
        let mut headers = HeaderMap::new();
        headers.insert(TOKEN_TTL, HeaderValue::from_static("300"));
        let answer = self
            .service
            .ask(Method::PUT, &url, &headers, &Bytes::new(), &[])
            .await
            .map_err(|e| {
                // Most machines that get here have no such service: no answer means that nothing is
                // configured.
                if self.looked_at.is_empty() {
                    e
                } else {
                    e.with_kind(ErrorKind::PermissionDenied)
                        .hint(super::NOTHING_FOUND)
                }
            })?;
        if !answer.status.is_success() {
            let e = self.service.status_error(&Method::PUT, &url, answer.status);
            return Err(e.hint(
                "allow IMDSv2 on this machine; from inside a container its hop \
                limit must be 2 or more",
            ));
        }
        let token = HeaderValue::from_str(answer.text.trim())
            .ok()
            .filter(|t| !t.is_empty());
        let token = token.ok_or_else(|| {
            Error::permission_denied(format!("{who}: the session token cannot be read"))
                .hint("check that this is the right address")
        })?;
        let roles = self.get(ROLES_PATH, &token).await?.ok_or_else(no_role)?;
        let role = roles
            .lines()
            .map(str::trim)
            .find(|r| !r.is_empty())
            .ok_or_else(no_role)?;
        if !role
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"+=,.@_-".contains(&b))
        {
            return Err(Error::permission_denied(format!(
                "{who}: the answer is not the name of a role"
            ))
            .hint("check that this is the right address"));
        }
        let text = self
            .get(&format!("{ROLES_PATH}{role}"), &token)
            .await?
            .ok_or_else(no_role)?;
        Fetched::from_json(&who, &text)
    }
}

#[async_trait]
impl Source for Instance {
    fn describe(&self) -> String {
        if self.looked_at.is_empty() {
            self.service.describe()
        } else {
            format!("{}, then {}", self.looked_at, self.service.describe())
        }
    }

    async fn fetch(&self) -> Result<Fetched> {
        let fetched = self.role_credentials().await;
        if self.looked_at.is_empty() {
            return fetched;
        }
        fetched.map_err(|e| e.context(format!("looked at {}", self.looked_at)))
    }
}
