//! Requests to the services that issue credentials: small, bounded in size and time. Their errors
//! name the service and its address and never a secret: not what was sent, nor what an answer
//! quotes of it, nor the body of an unreadable answer.

use crate::{
    OriginConfig,
    failure::{self, Site},
    transport::{self, Redirects},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use futures::TryStreamExt;
use http::{HeaderMap, Method, StatusCode};
use std::time::Duration;
use url::Url;

/// No genuine answer is this long.
const ANSWER_MAX_BYTES: usize = 64 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A client for one service.
pub(crate) struct Service {
    client: reqwest::Client,
    name: &'static str,
    base: Url,
}

/// An answer of any status.
pub(crate) struct Answer {
    pub status: StatusCode,
    pub text: String,
}

impl Service {
    /// # Errors
    /// If `address` is not an HTTP address.
    pub(crate) fn new(
        config: &OriginConfig,
        name: &'static str,
        address: &str,
        setting: &str,
    ) -> Result<Self> {
        let base = Url::parse(address)
            .ok()
            .filter(|u| matches!(u.scheme(), "http" | "https") && u.has_host());
        let base = base.ok_or_else(|| {
            Error::invalid(format!("{setting} is not an address"))
                .hint("as in http://127.0.0.1:1338 or https://sts.eu-central-1.amazonaws.com")
        })?;
        // Because the HTTP client writes the host into its log together with them.
        if !base.username().is_empty() || base.password().is_some() {
            return Err(Error::invalid(format!(
                "{setting}: an address must not contain a user name or password"
            ))
            .hint("if a token is needed, set AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"));
        }
        let config = OriginConfig {
            connect_timeout: config.connect_timeout.min(CONNECT_TIMEOUT),
            requests_in_flight: 1,
            ..config.clone()
        };
        Ok(Self {
            client: transport::client(&config, &base, Redirects::Refuse)?,
            name,
            base,
        })
    }

    pub(crate) fn base(&self) -> &Url {
        &self.base
    }

    /// The service and its address, without any secrets in it.
    pub(crate) fn describe(&self) -> String {
        let mut url = self.base.clone();
        url.set_query(None);
        url.set_fragment(None);
        format!("{} at {}", self.name, url.as_str().trim_end_matches('/'))
    }

    /// Sends a request, and again after a failure that may pass. Removes `secrets` from what an
    /// answer says unless it is a success.
    ///
    /// # Errors
    /// No answer (a transient kind), or one that is too long. The caller judges the status.
    pub(crate) async fn ask(
        &self,
        method: Method,
        url: &Url,
        headers: &HeaderMap,
        body: &Bytes,
        secrets: &[&str],
    ) -> Result<Answer> {
        let once = || {
            self.once(
                method.clone(),
                url.clone(),
                headers.clone(),
                body.clone(),
                secrets,
            )
        };
        let may_pass = match once().await {
            Err(e) if e.kind().is_transient() => e.to_string(),
            Ok(answer) if kind_of(answer.status).is_transient() => {
                format!("{}: {}", self.describe(), answer.status)
            }
            other => return other,
        };
        tracing::debug!(error = may_pass, "asking once more for credentials");
        tokio::time::sleep(RETRY_PAUSE).await;
        once().await
    }

    async fn once(
        &self,
        method: Method,
        url: Url,
        mut headers: HeaderMap,
        body: Bytes,
        secrets: &[&str],
    ) -> Result<Answer> {
        for value in headers.values_mut() {
            value.set_sensitive(true);
        }
        let described = self.describe();
        let site = Site {
            origin: &described,
            operation: method.as_str(),
            key: url.path(),
        };
        let mut request = reqwest::Request::new(method.clone(), url.clone());
        *request.headers_mut() = headers;
        if !body.is_empty() {
            *request.body_mut() = Some(body.into());
        }
        let answer = self
            .client
            .execute(request)
            .await
            .map_err(|e| failure::from_transport(site, &e.without_url()))?;
        let status = answer.status();
        let mut bytes = Vec::new();
        let mut stream = answer.bytes_stream();
        while let Some(chunk) = stream
            .try_next()
            .await
            .map_err(|e| failure::from_transport(site, &e.without_url()))?
        {
            if bytes.len() + chunk.len() > ANSWER_MAX_BYTES {
                return Err(Error::permission_denied(format!(
                    "{described}: the answer is longer than {ANSWER_MAX_BYTES} bytes"
                ))
                .hint("check that this is the right address"));
            }
            bytes.extend_from_slice(&chunk);
        }
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        if status.is_success() {
            return Ok(Answer { status, text });
        }
        // Some error messages quote what was sent.
        for secret in secrets.iter().filter(|s| s.len() >= 4) {
            text = text.replace(secret, "***");
        }
        Ok(Answer { status, text })
    }

    /// The error for a status.
    pub(crate) fn status_error(&self, method: &Method, url: &Url, status: StatusCode) -> Error {
        let text = format!(
            "{}: {method} {} was answered with status {}",
            self.describe(),
            url.path(),
            status.as_u16()
        );
        Error::new(kind_of(status), text)
            .hint(format!("check {} and what it may give out", self.name))
    }
}

/// Whether a status may pass or is final.
pub(crate) fn kind_of(status: StatusCode) -> ErrorKind {
    match status.as_u16() {
        408 | 429 | 500..=599 => ErrorKind::OriginUnavailable,
        _ => ErrorKind::PermissionDenied,
    }
}
