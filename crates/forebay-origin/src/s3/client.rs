//! Signed requests to an S3 service: addresses, signatures, and the region of a bucket, which is
//! followed if the service names another.

use crate::{
    aws::{self, AwsSettings, Environment},
    config::OriginConfig,
    credentials,
    failure::{self, ErrorDocument, Site},
    s3::{
        headers::{Dialect, encode_path, encode_query},
        trailed,
    },
    transport::{Payload, Redirects, Transport},
};
use forebay_core::{Error, Result, sync::Mutex};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use object_store::{
    aws::{AwsAuthorizer, AwsCredential},
    client::{HttpRequest, HttpRequestBody},
    gcp::GcpCredentialProvider,
};
use std::{borrow::Cow, sync::Arc};
use url::Url;

/// One S3 service, shared by its buckets.
#[derive(Clone)]
pub(crate) struct S3Endpoint(Arc<Service>);

struct Service {
    transport: Transport,
    /// Without a path. `None`: Amazon's, by region.
    endpoint: Option<Url>,
    path_style: bool,
    authorization: Authorization,
    dialect: Dialect,
    region: String,
}

/// How requests prove who sends them.
enum Authorization {
    None,
    Signature(aws::Credentials),
    Bearer(GcpCredentialProvider),
}

/// What an address names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Service,
    Bucket(String),
}

/// A service or a bucket of it.
pub(crate) struct Client {
    service: S3Endpoint,
    address: Address,
    /// The region, once the service has named one other than the configured.
    moved_to: Mutex<Option<String>>,
}

/// A request before it is signed.
pub(crate) struct Call<'a> {
    site: Site<'a>,
    method: Method,
    /// In place of the path of the bucket and the key.
    path: Option<String>,
    query: Vec<(Cow<'static, str>, String)>,
    headers: HeaderMap,
    payload: Payload,
}

/// What a signature says about a body.
enum Hashed {
    Whole(HttpRequestBody),
    /// It streams: `UNSIGNED-PAYLOAD`.
    Not,
    /// It streams, and its checksum follows it.
    Behind,
}

/// A service's reaction to a request.
pub(crate) enum Answer {
    Success(reqwest::Response),
    /// Its error document, cut at a limit.
    Refusal(StatusCode, HeaderMap, String),
}

impl<'a> Call<'a> {
    pub(crate) fn new(method: Method, site: Site<'a>) -> Self {
        Self {
            site,
            method,
            path: None,
            query: Vec::new(),
            headers: HeaderMap::new(),
            payload: Payload::Empty,
        }
    }

    /// An encoded path of the service, in place of that of the bucket and the key.
    pub(crate) fn path(mut self, path: String) -> Self {
        self.path = Some(path);
        self
    }

    pub(crate) fn query(
        mut self,
        name: impl Into<Cow<'static, str>>,
        value: impl Into<String>,
    ) -> Self {
        self.query.push((name.into(), value.into()));
        self
    }

    pub(crate) fn headers(mut self, headers: HeaderMap) -> Self {
        self.headers = headers;
        self
    }

    pub(crate) fn payload(mut self, payload: Payload) -> Self {
        self.payload = payload;
        self
    }
}

impl S3Endpoint {
    pub(crate) fn new(config: &OriginConfig, env: &Environment) -> Result<Self> {
        let settings = AwsSettings::find(config, env)?;
        let endpoint = match &settings.endpoint {
            None => None,
            Some(text) => {
                let mut url = Url::parse(text).map_err(|e| {
                    Error::invalid(format!("the S3 endpoint {text:?} is not an address: {e}")).hint(
                        "as in http://127.0.0.1:9000; check AWS_ENDPOINT_URL and endpoint_url too",
                    )
                })?;
                if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
                    return Err(Error::invalid(format!(
                        "the S3 endpoint {text:?} is not an address"
                    ))
                    .hint("as in http://127.0.0.1:9000"));
                }
                if url.scheme() == "http" && config.allow_http == Some(false) {
                    return Err(
                        Error::invalid(format!("the S3 endpoint {text} is plain HTTP"))
                            .hint("use https://, or set allow_http = true"),
                    );
                }
                let path = url.path().trim_end_matches('/').to_owned();
                url.set_path(&path);
                url.set_query(None);
                Some(url)
            }
        };
        let for_transport = endpoint
            .clone()
            .unwrap_or_else(|| Url::parse("https://s3.amazonaws.com").expect("a constant address"));
        let transport = Transport::new(config, &for_transport, Redirects::Refuse)?;
        let authorization = if config.anonymous {
            Authorization::None
        } else {
            Authorization::Signature(aws::credentials(config, &settings, env)?)
        };
        let path_style = config.path_style.unwrap_or(endpoint.is_some());
        let region = settings.region;
        Ok(Self(Arc::new(Service {
            transport,
            endpoint,
            path_style,
            authorization,
            dialect: Dialect::Amazon,
            region,
        })))
    }

    /// Google Cloud Storage.
    pub(crate) fn google(config: &OriginConfig, bucket: &str) -> Result<Self> {
        let address = config
            .endpoint
            .as_deref()
            .unwrap_or("https://storage.googleapis.com");
        let mut endpoint = Url::parse(address).map_err(|e| {
            Error::invalid(format!("the endpoint {address:?} is not an address: {e}"))
        })?;
        endpoint.set_path("");
        let transport = Transport::new(config, &endpoint, Redirects::Refuse)?;
        let authorization = if config.anonymous {
            Authorization::None
        } else {
            Authorization::Bearer(credentials::google(config, bucket)?)
        };
        let service = Service {
            transport,
            endpoint: Some(endpoint),
            path_style: true,
            authorization,
            dialect: Dialect::Google,
            region: String::new(),
        };
        Ok(Self(Arc::new(service)))
    }

    pub(crate) fn describe(&self) -> String {
        match &self.0.endpoint {
            Some(url) => format!("S3 at {}", url.as_str().trim_end_matches('/')),
            None => format!("S3 in {}", self.0.region),
        }
    }

    /// Whether buckets have regional addresses.
    pub(crate) fn is_by_region(&self) -> bool {
        self.0.endpoint.is_none()
    }

    pub(crate) fn client(&self, address: Address) -> Result<Client> {
        let client = Client {
            service: self.clone(),
            address,
            moved_to: Mutex::new(None),
        };
        client.url(None, "", &[], &self.0.region)?;
        Ok(client)
    }
}

impl Client {
    pub(crate) fn transport(&self) -> &Transport {
        &self.service.0.transport
    }

    pub(crate) fn bucket(&self) -> &str {
        match &self.address {
            Address::Bucket(b) => b,
            Address::Service => "",
        }
    }

    /// The configured region; empty if the service has none.
    pub(crate) fn region(&self) -> &str {
        &self.service.0.region
    }

    pub(crate) fn dialect(&self) -> Dialect {
        self.service.0.dialect
    }

    pub(crate) fn describe(&self) -> String {
        let scheme = match self.dialect() {
            Dialect::Amazon => "s3",
            _ => "gs",
        };
        match (&self.address, &self.service.0.endpoint) {
            (Address::Service, _) => self.service.describe(),
            (Address::Bucket(b), Some(url)) => {
                format!("{scheme}://{b} at {}", url.as_str().trim_end_matches('/'))
            }
            (Address::Bucket(b), None) => format!("{scheme}://{b}"),
        }
    }

    /// The value of `x-amz-copy-source`.
    pub(crate) fn copy_source(&self, key: &str) -> String {
        let bucket = self.bucket();
        format!("/{bucket}/{}", encode_path(key))
    }

    /// The same for the buckets of one service under one set of credentials.
    pub(crate) fn service_id(&self) -> usize {
        Arc::as_ptr(&self.service.0) as usize
    }

    fn url(
        &self,
        path: Option<&str>,
        key: &str,
        query: &[(Cow<'static, str>, String)],
        region: &str,
    ) -> Result<Url> {
        let s = &self.service.0;
        let mut text = match &s.endpoint {
            Some(url) => url.as_str().trim_end_matches('/').to_owned(),
            None => format!("https://s3.{region}.amazonaws.com"),
        };
        if let (Address::Bucket(bucket), None) = (&self.address, path) {
            // A name with dots does not match a wildcard certificate.
            if s.path_style || (s.endpoint.is_none() && bucket.contains('.')) {
                text = format!("{text}/{bucket}");
            } else if let Some((scheme, rest)) = text.split_once("://") {
                text = format!("{scheme}://{bucket}.{rest}");
            }
        }
        text.push('/');
        match path {
            Some(path) => text.push_str(path),
            None => text.extend(encode_path(key)),
        }
        for (i, (name, value)) in query.iter().enumerate() {
            text.push(if i == 0 { '?' } else { '&' });
            text.extend(encode_query(name));
            text.push('=');
            text.extend(encode_query(value));
        }
        let url = Url::parse(&text).map_err(|e| {
            Error::invalid(format!("{text:?} is not an address: {e}"))
                .hint("check the bucket's name and the endpoint")
        })?;
        // Any client would remove `.` and `..` from the path, and that would name another object.
        if key.split('/').any(|part| part == "." || part == "..") {
            return Err(Error::invalid(format!(
                "{key:?} cannot be requested: a part of it is '.' or '..'"
            )));
        }
        Ok(url)
    }

    /// Sends a request; an answer that is not a success becomes an error. If its body can be sent
    /// again, the request is repeated, once each: to another region if the service says that the
    /// bucket is there, and with other keys if the service no longer accepts these.
    pub(crate) async fn send(&self, call: Call<'_>) -> Result<reqwest::Response> {
        let site = call.site;
        match self.exchange(call).await? {
            Answer::Success(answer) => Ok(answer),
            Answer::Refusal(status, headers, text) => {
                Err(failure::from_status(site, status, &headers, &text))
            }
        }
    }

    /// The same, but returns unsuccessful answers as they came. If something is wrong with the
    /// keys, the clock or the settings of this node, that is an error all the same: the sender of
    /// the request has its own.
    pub(crate) async fn send_as_is(&self, call: Call<'_>) -> Result<Answer> {
        let site = call.site;
        match self.exchange(call).await? {
            Answer::Refusal(status, headers, text)
                if failure::is_about_the_node(status, &ErrorDocument::parse(&text).code) =>
            {
                Err(failure::from_status(site, status, &headers, &text))
            }
            answer => Ok(answer),
        }
    }

    async fn exchange(&self, call: Call<'_>) -> Result<Answer> {
        let Call {
            site,
            method,
            path,
            query,
            headers,
            mut payload,
        } = call;
        let (mut may_move, mut may_renew) = (true, true);
        loop {
            let region = self
                .moved_to
                .lock()
                .clone()
                .unwrap_or_else(|| self.service.0.region.clone());
            let url = self.url(path.as_deref(), site.key, &query, &region)?;
            let again = match &payload {
                Payload::Empty => Some(Payload::Empty),
                Payload::Bytes(b) => Some(Payload::Bytes(b.clone())),
                Payload::Stream(..) | Payload::Framed(..) => None,
            };
            let hashed = match &payload {
                Payload::Empty => Hashed::Whole(HttpRequestBody::empty()),
                Payload::Bytes(bytes) => Hashed::Whole(HttpRequestBody::from(bytes.clone())),
                Payload::Stream(..) => Hashed::Not,
                Payload::Framed(..) => Hashed::Behind,
            };
            let (signed, used) = self
                .sign(site, &method, &url, headers.clone(), hashed, &region)
                .await?;
            let answer = self
                .transport()
                .send(site, method.clone(), url, signed, payload)
                .await?;
            let status = answer.status();
            if status.is_success() {
                return Ok(Answer::Success(answer));
            }
            let named = answer
                .headers()
                .get("x-amz-bucket-region")
                .and_then(|v| v.to_str().ok())
                .filter(|r| *r != region)
                .map(str::to_owned);
            payload = match (named, again) {
                (Some(named), Some(again))
                    if may_move && matches!(status.as_u16(), 301 | 302 | 307 | 308 | 400 | 403) =>
                {
                    tracing::info!(
                        origin = site.origin,
                        region = named,
                        "the bucket lives in another region: following"
                    );
                    *self.moved_to.lock() = Some(named);
                    may_move = false;
                    again
                }
                (_, again) => {
                    let headers = answer.headers().clone();
                    let text = self.transport().error_text(answer).await;
                    // An answer to HEAD has no document; of the faults of keys, 400 is the one that
                    // arises over time.
                    let unsaid = method == Method::HEAD && status == StatusCode::BAD_REQUEST;
                    let about_keys =
                        unsaid || failure::is_about_keys(&ErrorDocument::parse(&text).code);
                    match again {
                        Some(again) if may_renew && about_keys && self.refused(used.as_ref()) => {
                            may_renew = false;
                            again
                        }
                        _ => return Ok(Answer::Refusal(status, headers, text)),
                    }
                }
            };
        }
    }

    /// The service did not accept these keys. Returns true if there may be others.
    fn refused(&self, used: Option<&Arc<AwsCredential>>) -> bool {
        match (&self.service.0.authorization, used) {
            (Authorization::Signature(credentials), Some(used)) => credentials.refused(used),
            _ => false,
        }
    }

    /// Sends to an address that the service gave; 308 counts as a success.
    pub(crate) async fn send_to(
        &self,
        site: Site<'_>,
        method: Method,
        url: &Url,
        headers: HeaderMap,
        payload: Payload,
    ) -> Result<reqwest::Response> {
        let (signed, _) = self
            .sign(
                site,
                &method,
                url,
                headers,
                Hashed::Not,
                &self.service.0.region,
            )
            .await?;
        let answer = self
            .transport()
            .send(site, method, url.clone(), signed, payload)
            .await?;
        let status = answer.status();
        if status.is_success() || status == StatusCode::PERMANENT_REDIRECT {
            return Ok(answer);
        }
        let headers = answer.headers().clone();
        let text = self.transport().error_text(answer).await;
        Err(failure::from_status(site, status, &headers, &text))
    }

    /// The headers with a signature, and the keys that made it.
    async fn sign(
        &self,
        site: Site<'_>,
        method: &Method,
        url: &Url,
        headers: HeaderMap,
        hashed: Hashed,
        region: &str,
    ) -> Result<(HeaderMap, Option<Arc<AwsCredential>>)> {
        let provider = match &self.service.0.authorization {
            Authorization::None => return Ok((headers, None)),
            Authorization::Signature(provider) => provider,
            Authorization::Bearer(provider) => {
                let token = provider
                    .get_credential()
                    .await
                    .map_err(|e| credentials::google_unavailable(site, &e))?;
                let mut value = HeaderValue::from_str(&format!("Bearer {}", token.bearer))
                    .map_err(|_| {
                        Error::permission_denied(format!(
                            "{} at {}: the token cannot be sent",
                            site.operation, site.origin
                        ))
                    })?;
                value.set_sensitive(true);
                let mut headers = headers;
                headers.insert(http::header::AUTHORIZATION, value);
                return Ok((headers, None));
            }
        };
        let credential = provider
            .get()
            .await
            .map_err(|e| aws::unavailable(site, e))?;
        let (body, streamed) = match hashed {
            Hashed::Whole(body) => (body, false),
            Hashed::Not => (HttpRequestBody::empty(), true),
            Hashed::Behind => {
                let now = chrono::Utc::now();
                let signed = trailed::sign(&credential, region, method, url, headers, now)?;
                return Ok((signed, Some(credential)));
            }
        };
        let mut request = HttpRequest::new(body);
        *request.method_mut() = method.clone();
        *request.uri_mut() = url
            .as_str()
            .parse()
            .map_err(|e| Error::invalid(format!("{} {:?}: {e}", site.operation, site.key)))?;
        *request.headers_mut() = headers;
        AwsAuthorizer::new(&credential, "s3", region)
            .with_sign_payload(!streamed)
            .try_authorize(&mut request, None)
            .map_err(|e| {
                Error::internal(format!(
                    "{} at {}: the request cannot be signed: {e}",
                    site.operation, site.origin
                ))
            })?;
        Ok((std::mem::take(request.headers_mut()), Some(credential)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoint: Option<&str>, path_style: Option<bool>, bucket: &str) -> Client {
        let config = OriginConfig {
            url: format!("s3://{bucket}"),
            endpoint: endpoint.map(str::to_owned),
            region: Some("eu-west-1".into()),
            path_style,
            anonymous: true,
            ..Default::default()
        };
        S3Endpoint::new(&config, &Environment::of([("", "")]))
            .unwrap()
            .client(Address::Bucket(bucket.into()))
            .unwrap()
    }

    #[test]
    fn addresses_are_of_the_asked_style_and_encoded_as_signatures_want() {
        let url = |c: &Client, key| {
            c.url(None, key, &[("a".into(), "x y/+".into())], "eu-west-1")
                .unwrap()
                .to_string()
        };
        let c = client(Some("http://127.0.0.1:9000/"), None, "buc");
        assert_eq!(
            url(&c, "a b/+%41ü&?#"),
            "http://127.0.0.1:9000/buc/a%20b/%2B%2541%C3%BC%26%3F%23?a=x%20y%2F%2B"
        );
        let c = client(Some("https://s3.example.com"), Some(false), "buc");
        assert_eq!(url(&c, "k"), "https://buc.s3.example.com/k?a=x%20y%2F%2B");
        assert_eq!(c.describe(), "s3://buc at https://s3.example.com");
        assert!(c.url(None, "a/../b", &[], "r").is_err());
        assert_eq!(c.copy_source("a b/ü"), "/buc/a%20b/%C3%BC");
        assert!(
            url(&client(None, None, "buc"), "k")
                .starts_with("https://buc.s3.eu-west-1.amazonaws.com/k?")
        );
        assert!(
            url(&client(None, None, "b.c"), "k")
                .starts_with("https://s3.eu-west-1.amazonaws.com/b.c/k?")
        );
    }
}
