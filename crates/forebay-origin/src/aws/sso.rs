//! Single sign-on (IAM Identity Center): exchanges the token that `aws sso login` left in its cache
//! for the keys of a role.
//!
//! The cache is that of the AWS command line and SDKs: `~/.aws/sso/cache/<SHA-1>.json`, with the
//! SHA-1 of the session's name, or of the start URL in profiles without a session. A session's
//! token is renewed before its expiry with its refresh token, and written back, because the service
//! may issue another refresh token that the other tools then need. A token that can no longer be
//! renewed needs a person at a browser: the error says what to run.
//!
//! Source: AWS SDKs and Tools Reference Guide, "IAM Identity Center credential provider"; the APIs
//! `GetRoleCredentials` (portal) and `CreateToken` (OIDC).

use super::{
    Environment, Profile,
    ask::{self, Answer, Service},
    renewed::{Fetched, Source},
};
use crate::OriginConfig;
use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use forebay_core::{Error, Result, sync::Mutex};
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use serde::Deserialize;
use std::{
    io::{ErrorKind, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

const TOKEN_HEADER: HeaderName = HeaderName::from_static("x-amz-sso_bearer_token");
/// A cache file has some kilobytes at most.
const FILE_MAX_BYTES: u64 = 64 << 10;
/// A token is renewed this long before its expiry.
const RENEW_BEFORE: chrono::Duration = chrono::Duration::seconds(300);
/// How long a renewal is waited for: its requester has left by then, but the service may have carried
/// it out.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the cache is looked into before a refusal to renew a token is believed.
const REREAD_TIMES: u32 = 4;
const REREAD_PAUSE: Duration = Duration::from_millis(200);

/// What a profile says about single sign-on.
struct Settings {
    profile: String,
    /// The name that the cache file is derived from: the session's name, or the start URL.
    cached_as: String,
    region: String,
    account: String,
    role: String,
}

impl Settings {
    /// # Errors
    /// A missing setting, or a session that does not exist.
    fn of(profile: &Profile) -> Result<Option<Self>> {
        let name = profile.name();
        let missing = |what: &str, place: &str| {
            Error::invalid(format!(
                "the AWS profile {name:?} uses single sign-on, but {place} has no {what}"
            ))
            .hint(format!(
                "`aws configure sso --profile {name}` writes all of them"
            ))
        };
        let here = format!("profile {name:?}");
        let required = |setting: &str| {
            profile
                .setting(setting)
                .map(str::to_owned)
                .ok_or_else(|| missing(setting, &here))
        };
        let (cached_as, region) = match profile.setting("sso_session") {
            Some(session) => {
                let place = format!("[sso-session {session}]");
                let region = profile
                    .sso_session(session)
                    .ok_or_else(|| {
                        Error::invalid(format!(
                            "the AWS profile {name:?}: the section {place} does not exist"
                        ))
                        .hint("`aws configure sso-session` writes it")
                    })?
                    .get("sso_region")
                    .filter(|region| !region.is_empty())
                    .ok_or_else(|| missing("sso_region", &place))?
                    .clone();
                (session.to_owned(), region)
            }
            None => match profile.setting("sso_start_url") {
                Some(url) => (url.to_owned(), required("sso_region")?),
                None => return Ok(None),
            },
        };
        Ok(Some(Self {
            profile: name.to_owned(),
            cached_as,
            region,
            account: required("sso_account_id")?,
            role: required("sso_role_name")?,
        }))
    }
}

/// The keys of a role for whoever signed on.
pub(crate) struct SignedOn(Arc<Session>);

type Renewing = Shared<BoxFuture<'static, Result<String>>>;

struct Session {
    settings: Settings,
    file: PathBuf,
    portal: Service,
    oidc: Service,
    /// The renewal that is under way: whoever needs one meanwhile gets what it brings.
    renewing: Mutex<Option<Renewing>>,
}

/// The fields of a cache file that are needed here. The others are preserved when it is written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Token {
    access_token: String,
    expires_at: String,
    refresh_token: Option<String>,
    client_id: Option<String>,
    client_secret: Option<String>,
    registration_expires_at: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Renewal {
    access_token: String,
    /// Seconds.
    expires_in: u32,
    refresh_token: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RoleCredentials {
    role_credentials: Keys,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    /// Milliseconds since 1970.
    expiration: i64,
}

impl SignedOn {
    /// `None`: the profile does not use single sign-on.
    ///
    /// # Errors
    /// A missing or wrong setting.
    pub(crate) fn of_profile(
        config: &OriginConfig,
        env: &Environment,
        profile: &Profile,
    ) -> Result<Option<Self>> {
        let Some(settings) = Settings::of(profile)? else {
            return Ok(None);
        };
        let home = env.get("HOME").ok_or_else(|| {
            Error::invalid(format!(
                "the AWS profile {:?} uses single sign-on, but HOME is not set",
                settings.profile
            ))
            .hint("`aws sso login` keeps its tokens in $HOME/.aws/sso/cache")
        })?;
        let name = digest(&SHA1_FOR_LEGACY_USE_ONLY, settings.cached_as.as_bytes());
        let name: String = name.as_ref().iter().map(|b| format!("{b:02x}")).collect();
        let region = &settings.region;
        let service = |name, setting: &str, host: String| {
            let address = env.get(setting).unwrap_or_else(|| {
                let domain = if region.starts_with("cn-") {
                    "amazonaws.com.cn"
                } else {
                    "amazonaws.com"
                };
                format!("https://{host}.{region}.{domain}")
            });
            Service::new(config, name, &address, setting)
        };
        Ok(Some(Self(Arc::new(Session {
            file: Path::new(&home)
                .join(".aws/sso/cache")
                .join(format!("{name}.json")),
            portal: service("AWS SSO", "AWS_ENDPOINT_URL_SSO", "portal.sso".into())?,
            oidc: service("AWS SSO OIDC", "AWS_ENDPOINT_URL_SSO_OIDC", "oidc".into())?,
            settings,
            renewing: Mutex::default(),
        }))))
    }
}

impl Session {
    fn sign_on_again(&self, why: &str) -> Error {
        Error::permission_denied(format!("{}: {why}", self.portal.describe())).hint(format!(
            "run `aws sso login --profile {}` as the node's user",
            self.settings.profile
        ))
    }

    async fn cached(&self) -> Result<(Token, serde_json::Value)> {
        let file = self.file.clone();
        let text = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            std::fs::File::open(file)?
                .take(FILE_MAX_BYTES)
                .read_to_string(&mut text)?;
            std::io::Result::Ok(text)
        })
        .await
        .map_err(|e| Error::internal(format!("reading {}: {e}", self.file.display())))?;
        let text = text.map_err(|e| match e.kind() {
            ErrorKind::NotFound => self.sign_on_again(&format!(
                "nobody has signed in: {}: {e}",
                self.file.display()
            )),
            _ => Error::permission_denied(format!("{}: {e}", self.file.display()))
                .hint("the node's user must be able to read it"),
        })?;
        // A parser's message might quote a secret.
        let damaged = || self.sign_on_again(&format!("{} is damaged", self.file.display()));
        let all: serde_json::Value = serde_json::from_str(&text).map_err(|_| damaged())?;
        let token = Token::deserialize(&all).map_err(|_| damaged())?;
        Ok((token, all))
    }

    /// An access token that holds: the cached one, or one that it was renewed to. A renewal goes to
    /// its end even if nobody waits for it any more: the service may have taken back the old refresh
    /// token by then, and the new one would be lost.
    async fn access_token(self: &Arc<Self>) -> Result<String> {
        let (token, _) = self.cached().await?;
        if holds(&token, RENEW_BEFORE) {
            return Ok(token.access_token);
        }
        let renewing = self
            .renewing
            .lock()
            .get_or_insert_with(|| begin(self.clone()))
            .clone();
        renewing.await
    }

    async fn renewed(&self) -> Result<String> {
        let (token, all) = self.cached().await?;
        if holds(&token, RENEW_BEFORE) {
            return Ok(token.access_token);
        }
        let still_holds = holds(&token, chrono::Duration::zero());
        match self.renew(&token, all).await {
            Ok(Some(renewed)) => Ok(renewed),
            Ok(None) if still_holds => Ok(token.access_token),
            Ok(None) => Err(self.sign_on_again("the token has expired")),
            Err(e) if still_holds => {
                tracing::warn!(error = %e, "the single sign-on token could not be renewed; the old \
                    one is used until it expires");
                Ok(token.access_token)
            }
            Err(e) => self.renewed_by_another(&token.access_token).await.ok_or(e),
        }
    }

    /// The token, if another origin of this node or the AWS command line has meanwhile renewed it
    /// with the same refresh token. It may be about to be written.
    async fn renewed_by_another(&self, old: &str) -> Option<String> {
        for _ in 0..REREAD_TIMES {
            let (now, _) = self.cached().await.ok()?;
            if now.access_token != old
                && instant(&now.expires_at).is_some_and(|ends| Utc::now() < ends)
            {
                return Some(now.access_token);
            }
            tokio::time::sleep(REREAD_PAUSE).await;
        }
        None
    }

    /// `None`: this token cannot be renewed.
    async fn renew(&self, token: &Token, mut all: serde_json::Value) -> Result<Option<String>> {
        let (Some(refresh), Some(id), Some(secret)) =
            (&token.refresh_token, &token.client_id, &token.client_secret)
        else {
            return Ok(None);
        };
        let registered = token.registration_expires_at.as_deref().map(instant);
        if registered.is_some_and(|ends| ends.is_none_or(|ends| ends <= Utc::now())) {
            return Ok(None);
        }
        let body = serde_json::json!({
            "clientId": id,
            "clientSecret": secret,
            "grantType": "refresh_token",
            "refreshToken": refresh,
        });
        let mut url = self.oidc.base().clone();
        url.set_path("/token");
        let mut headers = HeaderMap::new();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        let body = Bytes::from(body.to_string());
        let secrets = [refresh.as_str(), secret.as_str()];
        let asking = self.oidc.ask(Method::POST, &url, &headers, &body, &secrets);
        let answer = tokio::time::timeout(RENEWAL_TIMEOUT, asking)
            .await
            .map_err(|_| {
                Error::timeout(format!(
                    "{}: no answer within {RENEWAL_TIMEOUT:?}",
                    self.oidc.describe()
                ))
            })??;
        if !answer.status.is_success() {
            return Err(self.refused(&self.oidc, &Method::POST, &url, &answer));
        }
        let renewed: Renewal = serde_json::from_str(&answer.text).map_err(|_| {
            Error::permission_denied(format!("{}: the answer has no token", self.oidc.describe()))
                .hint("check AWS_ENDPOINT_URL_SSO_OIDC: the address may not be that of the service")
        })?;
        let ends = Utc::now() + chrono::Duration::seconds(renewed.expires_in.into());
        all["accessToken"] = renewed.access_token.clone().into();
        all["expiresAt"] = ends
            .to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
            .into();
        if let Some(refresh) = renewed.refresh_token {
            all["refreshToken"] = refresh.into();
        }
        let (file, text) = (self.file.clone(), all.to_string());
        let written = tokio::task::spawn_blocking(move || replace(&file, text.as_bytes()))
            .await
            .map_err(|e| Error::internal(format!("writing {}: {e}", self.file.display())))?;
        // The new token works all the same; the next renewal may need a person.
        if let Err(e) = written {
            tracing::warn!(file = %self.file.display(), error = %e, "the renewed single sign-on \
                token could not be written back");
        }
        Ok(Some(renewed.access_token))
    }

    /// The error for an answer other than a success: transient, or for a person to fix.
    fn refused(
        &self,
        service: &Service,
        method: &Method,
        url: &url::Url,
        answer: &Answer,
    ) -> Error {
        match (ask::kind_of(answer.status), answer.status.as_u16()) {
            (kind, 400 | 401) if !kind.is_transient() => self.sign_on_again(&format!(
                "{} does not accept the token (status {})",
                service.describe(),
                answer.status.as_u16()
            )),
            (_, 403 | 404) => service
                .status_error(method, url, answer.status)
                .hint(format!(
                    "check sso_account_id and sso_role_name of the AWS profile {:?}: the account \
                     and role must be assigned to the user who signed in",
                    self.settings.profile
                )),
            _ => service.status_error(method, url, answer.status),
        }
    }
}

fn begin(session: Arc<Session>) -> Renewing {
    let task = tokio::spawn(async move {
        /// Whatever happens, the next one may begin.
        struct Done(Arc<Session>);
        impl Drop for Done {
            fn drop(&mut self) {
                *self.0.renewing.lock() = None;
            }
        }
        let done = Done(session);
        done.0.renewed().await
    });
    let outcome = async move {
        match task.await {
            Ok(outcome) => outcome,
            Err(e) => Err(Error::internal(format!(
                "renewing a single sign-on token: {e}"
            ))),
        }
    };
    outcome.boxed().shared()
}

/// Whether a token holds for as long as `left` from now on.
fn holds(token: &Token, left: chrono::Duration) -> bool {
    instant(&token.expires_at).is_some_and(|ends| Utc::now() < ends - left)
}

/// A time in a cache file. Old command lines wrote `UTC` instead of `Z`.
fn instant(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(&text.replace("UTC", "Z"))
        .ok()
        .map(|t| t.to_utc())
}

/// Readers see the old file or the new one; no other user may read it.
fn replace(file: &Path, text: &[u8]) -> std::io::Result<()> {
    let new = file.with_extension(format!("json.{:016x}", rand::random::<u64>()));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .and_then(|mut f| f.write_all(text).and_then(|()| f.sync_all()))
        .and_then(|()| std::fs::rename(&new, file));
    if written.is_err() {
        // A half-written file is only in its own way.
        let _ = std::fs::remove_file(&new);
    }
    written
}

#[async_trait]
impl Source for SignedOn {
    fn describe(&self) -> String {
        self.0.portal.describe()
    }

    async fn fetch(&self) -> Result<Fetched> {
        let token = self.0.access_token().await?;
        let who = self.describe();
        let mut value = HeaderValue::from_str(&token).map_err(|_| {
            self.0
                .sign_on_again(&format!("{} is damaged", self.0.file.display()))
        })?;
        value.set_sensitive(true);
        let headers = HeaderMap::from_iter([(TOKEN_HEADER, value)]);
        let mut url = self.0.portal.base().clone();
        url.set_path("/federation/credentials");
        url.query_pairs_mut()
            .append_pair("role_name", &self.0.settings.role)
            .append_pair("account_id", &self.0.settings.account);
        let answer = self
            .0
            .portal
            .ask(Method::GET, &url, &headers, &Bytes::new(), &[&token])
            .await?;
        if !answer.status.is_success() {
            return Err(self.0.refused(&self.0.portal, &Method::GET, &url, &answer));
        }
        let bad = |what: &str| {
            Error::permission_denied(format!("{who}: {what}"))
                .hint("check AWS_ENDPOINT_URL_SSO: the address may not be that of the service")
        };
        let keys = serde_json::from_str::<RoleCredentials>(&answer.text)
            .map_err(|_| bad("the answer has no credentials"))?
            .role_credentials;
        let ends = DateTime::from_timestamp_millis(keys.expiration)
            .ok_or_else(|| bad("the expiration of the keys is not a valid time"))?;
        Fetched::new(
            &who,
            keys.access_key_id,
            keys.secret_access_key,
            keys.session_token,
            Some(ends),
        )
    }
}
