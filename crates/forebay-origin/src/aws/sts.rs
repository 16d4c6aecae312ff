//! Roles assumed at AWS STS: with one's own keys (`AssumeRole`, signed), or with a token that
//! somebody else issued (`AssumeRoleWithWebIdentity`, not signed: the proof is the token, read
//! again from its file for each fetch).

use super::{
    Environment, Profile,
    ask::{self, Service},
    renewed::{Credentials, FETCH_TIMEOUT, Fetched, Source},
};
use crate::{OriginConfig, failure::ErrorDocument};
use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, Result};
use http::{HeaderMap, HeaderValue, Method, header};
use object_store::{
    aws::AwsAuthorizer,
    client::{HttpRequest, HttpRequestBody},
};
use serde::Deserialize;
use std::{path::PathBuf, time::Duration};

const VERSION: &str = "2011-06-15";
pub(crate) const SESSION_NAME: &str = "forebay";

/// What a role is assumed with.
pub(crate) enum Proof {
    Keys(Credentials),
    WebIdentity {
        file: PathBuf,
        /// The setting that named the file, for messages.
        setting: &'static str,
    },
}

/// A role, as a profile or the environment describes it.
#[derive(Clone)]
pub(crate) struct Role {
    pub arn: String,
    pub session_name: String,
    pub external_id: Option<String>,
    pub duration_seconds: Option<u32>,
}

pub(crate) struct AssumedRole {
    service: Service,
    region: String,
    role: Role,
    proof: Proof,
}

/// The endpoint, as the AWS SDKs choose it.
fn address(env: &Environment, profile: &Profile, region: &str) -> String {
    env.get("AWS_ENDPOINT_URL_STS")
        .or_else(|| env.get("AWS_ENDPOINT_URL"))
        .or_else(|| profile.setting("endpoint_url").map(str::to_owned))
        .unwrap_or_else(|| {
            let domain = if region.starts_with("cn-") {
                "amazonaws.com.cn"
            } else {
                "amazonaws.com"
            };
            format!("https://sts.{region}.{domain}")
        })
}

impl AssumedRole {
    pub(crate) fn new(
        config: &OriginConfig,
        env: &Environment,
        profile: &Profile,
        region: &str,
        role: Role,
        proof: Proof,
    ) -> Result<Self> {
        let service = Service::new(
            config,
            "AWS STS",
            &address(env, profile, region),
            "AWS_ENDPOINT_URL_STS",
        )?;
        Ok(Self {
            service,
            region: region.to_owned(),
            role,
            proof,
        })
    }

    fn signed(
        &self,
        credential: &object_store::aws::AwsCredential,
        body: &str,
    ) -> Result<HeaderMap> {
        let mut request = HttpRequest::new(HttpRequestBody::from(body.to_owned()));
        *request.method_mut() = Method::POST;
        let bad = |_| Error::internal(format!("{}: the request cannot be built", self.describe()));
        *request.uri_mut() = self.service.base().as_str().parse().map_err(bad)?;
        request.headers_mut().insert(header::CONTENT_TYPE, form());
        AwsAuthorizer::new(credential, "sts", &self.region)
            .try_authorize(&mut request, None)
            .map_err(|e| {
                Error::internal(format!(
                    "{}: the request cannot be signed: {e}",
                    self.describe()
                ))
            })?;
        Ok(std::mem::take(request.headers_mut()))
    }
}

fn encoded(fields: &[(&str, String)]) -> String {
    url::form_urlencoded::Serializer::new(String::new())
        .extend_pairs(fields)
        .finish()
}

fn form() -> HeaderValue {
    HeaderValue::from_static("application/x-www-form-urlencoded; charset=utf-8")
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Response {
    #[serde(alias = "AssumeRoleResult", alias = "AssumeRoleWithWebIdentityResult")]
    result: Assumed,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Assumed {
    credentials: Keys,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Keys {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: String,
}

#[async_trait]
impl Source for AssumedRole {
    fn describe(&self) -> String {
        format!("{} for the role {}", self.service.describe(), self.role.arn)
    }

    fn timeout(&self) -> Duration {
        match &self.proof {
            Proof::Keys(keys) => FETCH_TIMEOUT + keys.timeout(),
            Proof::WebIdentity { .. } => FETCH_TIMEOUT,
        }
    }

    async fn fetch(&self) -> Result<Fetched> {
        let who = self.describe();
        let action = match self.proof {
            Proof::Keys(_) => "AssumeRole",
            Proof::WebIdentity { .. } => "AssumeRoleWithWebIdentity",
        };
        let mut fields = vec![
            ("Action", action.to_owned()),
            ("Version", VERSION.to_owned()),
            ("RoleArn", self.role.arn.clone()),
            ("RoleSessionName", self.role.session_name.clone()),
        ];
        fields.extend(
            self.role
                .duration_seconds
                .map(|seconds| ("DurationSeconds", seconds.to_string())),
        );
        let (headers, body, secrets, used) = match &self.proof {
            Proof::Keys(keys) => {
                fields.extend(self.role.external_id.clone().map(|id| ("ExternalId", id)));
                let body = encoded(&fields);
                let credential = keys
                    .get()
                    .await
                    .map_err(|e| e.context(format!("keys to assume the role {}", self.role.arn)))?;
                let headers = self.signed(&credential, &body)?;
                let mut secrets = vec![credential.secret_key.clone()];
                secrets.extend(credential.token.clone());
                secrets.extend(self.role.external_id.clone());
                (headers, body, secrets, Some((keys, credential)))
            }
            Proof::WebIdentity { file, setting } => {
                let token = super::token_file(file, setting).await?;
                fields.push(("WebIdentityToken", token.clone()));
                let mut headers = HeaderMap::new();
                headers.insert(header::CONTENT_TYPE, form());
                (headers, encoded(&fields), vec![token], None)
            }
        };
        let secrets: Vec<&str> = secrets.iter().map(String::as_str).collect();
        let answer = self
            .service
            .ask(
                Method::POST,
                self.service.base(),
                &headers,
                &Bytes::from(body),
                &secrets,
            )
            .await?;
        if !answer.status.is_success() {
            let document = ErrorDocument::parse(&answer.text);
            let said: String = format!("{} {}", document.code, document.message)
                .trim()
                .chars()
                .filter(|c| !c.is_control())
                .take(300)
                .collect();
            let text = format!(
                "{who}: {action} was answered with status {}{}{said}",
                answer.status.as_u16(),
                if said.is_empty() { "" } else { ": " }
            );
            // The next fetch need not try keys that STS refuses.
            if let (Some((keys, credential)), true) =
                (&used, crate::failure::is_about_keys(&document.code))
            {
                keys.refused(credential);
            }
            return Err(
                Error::new(ask::kind_of(answer.status), text).hint(match self.proof {
                    Proof::Keys(_) => {
                        "check role_arn, external_id, the role's trust policy, and the \
                    keys that it is assumed with"
                    }
                    Proof::WebIdentity { .. } => {
                        "check the role's trust policy, and that the token in its file is current \
                     and for sts.amazonaws.com"
                    }
                }),
            );
        }
        // A parser's message might quote a secret.
        let keys = quick_xml::de::from_str::<Response>(&answer.text)
            .map(|r| r.result.credentials)
            .map_err(|_| {
                Error::permission_denied(format!(
                    "{who}: the answer to {action} has no credentials"
                ))
                .hint("check AWS_ENDPOINT_URL_STS: the address may not be that of an STS")
            })?;
        let ends = super::renewed::instant(&who, &keys.expiration)?;
        Fetched::new(
            &who,
            keys.access_key_id,
            keys.secret_access_key,
            keys.session_token,
            Some(ends),
        )
    }
}
