//! What an operator says about an origin: one struct for the configuration file, the command line
//! and code.
//!
//! Every field has a default; an unknown field is refused, because a typing error in a limit must
//! not go unnoticed. Secrets are [`Secret`]s, which print as `***` everywhere.

use forebay_core::{Error, Result, limits, name::nearest, units};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, path::PathBuf, time::Duration};

/// A secret text: never shown, neither by `Debug` nor by `Display` or `Serialize`.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

/// What is shown in place of a secret.
const HIDDEN: &str = "***";

impl Secret {
    /// Wraps a text that was read unencrypted.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that signs with it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Refuses what stands for secrets where settings are shown: `forebay config show` may have been
    /// saved as a configuration.
    ///
    /// # Errors
    /// `Invalid`, with what to do.
    pub fn check(&self) -> Result<()> {
        if self.0 == HIDDEN {
            let e = Error::invalid(format!(
                "{HIDDEN:?} stands for a secret where settings are shown"
            ));
            return Err(e.hint("write the secret itself"));
        }
        Ok(())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(HIDDEN)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d).map(Secret)
    }
}

/// One origin. See [`OriginUrl`] for what `url` may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OriginConfig {
    /// `s3://bucket[/prefix]`, `gs://bucket[/prefix]`, `az://container[/prefix]`,
    /// `hf://datasets/organisation/name[@revision][/prefix]`, `https://host/path/`, `file:///dir` or
    /// a path. `s3://` alone serves every bucket of the endpoint, `file:///dir/*` every directory in
    /// `dir` as a bucket.
    pub url: String,

    /// Where the service is, if not at its public address: `http://127.0.0.1:9000`. S3, GCS, Azure,
    /// Hugging Face. Default for S3: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, the profile's
    /// `endpoint_url`; for Hugging Face: `HF_ENDPOINT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// S3 region. Default: `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile's, `us-east-1`; if a
    /// bucket says it lives elsewhere, it is followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// S3: the bucket in the path (`http://host/bucket/key`) or in the host name. Default: in the
    /// path if `endpoint` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_style: Option<bool>,
    /// Whether plain HTTP is acceptable. Default: yes, if the endpoint says `http://`; `false`
    /// refuses such an endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_http: Option<bool>,
    /// Do not sign requests or look for credentials. S3, GCS, Azure, Hugging Face. Default: false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub anonymous: bool,
    /// The profile in `~/.aws/credentials` and `~/.aws/config`. Default: `AWS_PROFILE`, `default`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// S3 keys, instead of the usual places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_key_id: Option<String>,
    /// The secret of `access_key_id`; given with it or not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_access_key: Option<Secret>,
    /// The session token of temporary keys; sent with `access_key_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_token: Option<Secret>,

    /// GCS: a service account's JSON key. Default: `GOOGLE_APPLICATION_CREDENTIALS` and the other
    /// usual places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_file: Option<PathBuf>,

    /// Azure: the storage account. Default: `AZURE_STORAGE_ACCOUNT_NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Azure: the account's key. Default: `AZURE_STORAGE_ACCOUNT_KEY` and the other usual places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account_key: Option<Secret>,

    /// HTTP(S) and Hugging Face: sent as `Authorization: Bearer …`. Default for Hugging Face:
    /// `HF_TOKEN`, or what `hf auth login` kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bearer_token: Option<Secret>,

    /// A PEM file of additional trusted certificate authorities.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,

    /// Requests in flight at the same time, bodies included. Default: 256.
    pub requests_in_flight: usize,
    /// Bytes per second, read and written together: a number or `"100MB"`. Default: no limit.
    #[serde(with = "bytes_option", skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// A GET whose first byte is later than that of 95 of 100 before it is sent a second time, and
    /// the first answer is taken: at most this many second requests per 100 requests. Default: 0,
    /// none.
    pub hedge_percent: u32,
    /// Attempts for one request, the first included. Default: 5.
    pub attempts: u32,
    /// Default: 5s.
    #[serde(with = "duration")]
    pub connect_timeout: Duration,
    /// An answer or a body that is silent for this long counts as broken. Default: 30s.
    #[serde(with = "duration")]
    pub idle_timeout: Duration,
    /// No attempt begins later than this after the first failure. Default: 60s.
    #[serde(with = "duration")]
    pub retry_deadline: Duration,
}

/// A larger share of second requests would amount to the load of another origin.
const HEDGE_MAX_PERCENT: u32 = 50;

impl Default for OriginConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            endpoint: None,
            region: None,
            path_style: None,
            allow_http: None,
            anonymous: false,
            profile: None,
            access_key_id: None,
            secret_access_key: None,
            session_token: None,
            service_account_file: None,
            account: None,
            account_key: None,
            bearer_token: None,
            ca_file: None,
            requests_in_flight: limits::ORIGIN_REQUESTS_IN_FLIGHT_DEFAULT,
            bytes_per_second: None,
            hedge_percent: 0,
            attempts: limits::ORIGIN_ATTEMPTS_DEFAULT,
            connect_timeout: Duration::from_secs(limits::ORIGIN_CONNECT_TIMEOUT_DEFAULT_SECS),
            idle_timeout: Duration::from_secs(limits::ORIGIN_IDLE_TIMEOUT_DEFAULT_SECS),
            retry_deadline: Duration::from_secs(limits::ORIGIN_RETRY_DEADLINE_DEFAULT_SECS),
        }
    }
}

/// The settings that may be in the query of a URL on the command line.
const IN_QUERY: [&str; 7] = [
    "endpoint",
    "region",
    "profile",
    "account",
    "anonymous",
    "path_style",
    "hedge_percent",
];

/// A URL and its query, if its kind has settings there: a `?` may be part of the name of a
/// directory, and web origins refuse it.
fn split_query(url: &str) -> Option<(&str, &str)> {
    let (base, query) = url.split_once('?')?;
    let scheme = base.split_once("://")?.0.trim_start().to_ascii_lowercase();
    let has_settings = scheme != "file" && !scheme.starts_with("http");
    has_settings.then_some((base, query))
}

impl OriginConfig {
    /// The defaults for `url`. Settings other than secrets may be in its query, which is convenient
    /// on a command line: `s3://bucket?endpoint=http://127.0.0.1:9000&region=eu-central-1`. They
    /// are `endpoint`, `region`, `profile`, `account`, `anonymous`, `path_style`, `hedge_percent`.
    ///
    /// # Errors
    /// `Invalid` for an unknown setting, with the nearest known one.
    pub fn for_url(url: &str) -> Result<Self> {
        let (base, query) = split_query(url).unwrap_or((url, ""));
        let mut config = Self {
            url: base.to_owned(),
            ..Self::default()
        };
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            let flag = || match value.as_ref() {
                "" | "true" | "1" | "yes" => Ok(true),
                "false" | "0" | "no" => Ok(false),
                _ => Err(Error::invalid(format!(
                    "{name}={value} in {base}?…: not true or false"
                ))),
            };
            match name.as_ref() {
                "endpoint" => config.endpoint = Some(value.into_owned()),
                "region" => config.region = Some(value.into_owned()),
                "profile" => config.profile = Some(value.into_owned()),
                "account" => config.account = Some(value.into_owned()),
                "anonymous" => config.anonymous = flag()?,
                "hedge_percent" => {
                    config.hedge_percent = value.parse().map_err(|_| {
                        Error::invalid(format!("hedge_percent={value} in {base}?…: not a number"))
                    })?;
                }
                "path_style" => config.path_style = Some(flag()?),
                _ => {
                    let error = Error::invalid(format!("{base} has the unknown setting {name:?}"));
                    return Err(match nearest(&name, &IN_QUERY) {
                        Some(near) => error.hint(format!("did you mean {near:?}?")),
                        None => error.hint(format!(
                            "the URL can have {}; keys belong in the environment or a file",
                            IN_QUERY.join(", ")
                        )),
                    });
                }
            }
        }
        config.check()?;
        Ok(config)
    }

    /// Whether the values make sense together; does not check what only a connection can tell.
    pub fn check(&self) -> Result<OriginUrl> {
        // The query may have been meant for anything, secrets included: it is not shown.
        if let Some((base, _)) = split_query(&self.url) {
            return Err(Error::invalid(format!(
                "origin {}: its url must not have settings after a '?'",
                redact_user(base)
            ))
            .hint("write them beside url, as in region = \"eu-central-1\""));
        }
        let url = OriginUrl::parse(&self.url)?;
        self.check_kind(&url)?;
        let positive = |ok: bool, field: &str| {
            if ok {
                Ok(())
            } else {
                Err(Error::invalid(format!(
                    "origin {}: {field} must be more than 0",
                    self.url
                )))
            }
        };
        let secrets = [
            &self.secret_access_key,
            &self.session_token,
            &self.account_key,
            &self.bearer_token,
        ];
        for secret in secrets.into_iter().flatten() {
            secret
                .check()
                .map_err(|e| e.context(format!("origin {}", self.url)))?;
        }
        positive(self.requests_in_flight > 0, "requests_in_flight")?;
        if self.hedge_percent > HEDGE_MAX_PERCENT {
            return Err(Error::invalid(format!(
                "origin {}: hedge_percent must be at most {HEDGE_MAX_PERCENT}",
                self.url
            ))
            .hint("it is the share of GETs that are sent twice; 5 is a good value"));
        }
        positive(self.attempts > 0, "attempts")?;
        positive(self.bytes_per_second != Some(0), "bytes_per_second")?;
        positive(!self.connect_timeout.is_zero(), "connect_timeout")?;
        positive(!self.idle_timeout.is_zero(), "idle_timeout")?;
        if self.access_key_id.is_some() != self.secret_access_key.is_some() {
            return Err(Error::invalid(format!(
                "origin {}: one of access_key_id and secret_access_key is missing",
                self.url
            ))
            .hint("give both, or neither to use the usual places"));
        }
        if self.anonymous && (self.access_key_id.is_some() || self.account_key.is_some()) {
            return Err(Error::invalid(format!(
                "origin {}: it has keys, and anonymous says to use none",
                self.url
            ))
            .hint("leave one of them out"));
        }
        if self.region.as_ref().is_some_and(String::is_empty) {
            return Err(
                Error::invalid(format!("origin {}: region is empty", self.url))
                    .hint("leave it out, or name the region"),
            );
        }
        for address in self
            .endpoint
            .iter()
            .chain(matches!(url, OriginUrl::Web { .. }).then_some(&self.url))
        {
            let parsed = url::Url::parse(address)
                .ok()
                .filter(|u| matches!(u.scheme(), "http" | "https") && u.has_host());
            let Some(parsed) = parsed else {
                return Err(Error::invalid(format!(
                    "origin {}: the endpoint {address:?} is not an address",
                    self.url
                ))
                .hint("as in https://s3.example.com or http://127.0.0.1:9000"));
            };
            if !parsed.username().is_empty() || parsed.password().is_some() {
                return Err(Error::invalid(format!(
                    "origin {}: an address must not contain a user name or password",
                    redact(address)
                ))
                .hint("use access_key_id and secret_access_key, or bearer_token"));
            }
            if parsed.scheme() == "http" && self.allow_http == Some(false) {
                return Err(Error::invalid(format!(
                    "origin {}: {address} is plain HTTP",
                    self.url
                ))
                .hint("use https://, or set allow_http = true"));
            }
        }
        Ok(url)
    }

    /// Refuses settings that origins of this kind do not have: they would have no effect. (Without a
    /// signature is how each may be asked.)
    fn check_kind(&self, url: &OriginUrl) -> Result<()> {
        use OriginUrl::{Azure, Directory, Gcs, Hub, S3, Web};
        let is_s3 = matches!(url, S3 { .. });
        let is_remote = !matches!(url, Directory { .. });
        let is_service = is_remote && !matches!(url, Web { .. });
        let is_azure = matches!(url, Azure { .. });
        let settings = [
            ("endpoint", self.endpoint.is_some(), is_service),
            ("region", self.region.is_some(), is_s3),
            ("path_style", self.path_style.is_some(), is_s3),
            ("allow_http", self.allow_http.is_some(), is_remote),
            ("profile", self.profile.is_some(), is_s3),
            ("access_key_id", self.access_key_id.is_some(), is_s3),
            ("secret_access_key", self.secret_access_key.is_some(), is_s3),
            ("session_token", self.session_token.is_some(), is_s3),
            (
                "service_account_file",
                self.service_account_file.is_some(),
                matches!(url, Gcs { .. }),
            ),
            ("account", self.account.is_some(), is_azure),
            ("account_key", self.account_key.is_some(), is_azure),
            (
                "bearer_token",
                self.bearer_token.is_some(),
                matches!(url, Web { .. } | Hub { .. }),
            ),
            ("ca_file", self.ca_file.is_some(), is_remote),
        ];
        let wrong = settings.iter().find(|(_, given, has)| *given && !has);
        let Some((name, ..)) = wrong else {
            return Ok(());
        };
        let known = settings.iter().filter(|(.., has)| *has);
        let known: Vec<&str> = known.map(|(name, ..)| *name).collect();
        let error = Error::invalid(format!(
            "origin {}: {name} is not a setting of {}",
            redact_user(&self.url),
            url.kind()
        ));
        Err(match known.is_empty() {
            true => error.hint("leave it out"),
            false => error.hint(format!("leave it out; there are {}", known.join(", "))),
        })
    }
}

fn redact(address: &str) -> String {
    match url::Url::parse(address) {
        Ok(mut u) => {
            let _ = u.set_username("");
            let _ = u.set_password(None);
            u.to_string()
        }
        Err(_) => "…".to_owned(),
    }
}

/// What kind of origin a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OriginUrl {
    /// `bucket` is `None` for a whole endpoint. A prefix has no `/` at its ends, and is empty if
    /// there is none.
    S3 {
        /// The service's name of the bucket.
        bucket: Option<String>,
        /// What its keys begin with, followed by a `/`.
        prefix: String,
    },
    /// Google Cloud Storage. The prefix is written as for `S3`.
    Gcs {
        /// The service's name of the bucket.
        bucket: String,
        /// What its keys begin with, followed by a `/`.
        prefix: String,
    },
    /// Azure Blob Storage. The prefix is written as for `S3`.
    Azure {
        /// The container, which serves as the bucket.
        container: String,
        /// What its keys begin with, followed by a `/`.
        prefix: String,
    },
    /// A repository of the Hugging Face Hub. The prefix is written as for `S3`.
    Hub {
        /// Which one, and which of its revisions.
        repository: HubRepository,
        /// What its keys begin with, followed by a `/`.
        prefix: String,
    },
    /// A plain web server; the URL ends in `/`.
    Web {
        /// What keys are appended to.
        base: url::Url,
    },
    /// A directory, or with `each` a directory whose sub-directories are the buckets.
    Directory {
        /// As written; it may be relative.
        path: PathBuf,
        /// Whether the URL ends in `/*`.
        each: bool,
    },
}

/// A repository of the Hugging Face Hub, in one of its revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubRepository {
    /// What it holds.
    pub kind: HubKind,
    /// `organisation/name`.
    pub name: String,
    /// A branch, a tag, or a commit.
    pub revision: String,
}

/// What a repository of the Hub holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubKind {
    /// `hf://organisation/name`.
    Model,
    /// `hf://datasets/organisation/name`.
    Dataset,
    /// `hf://spaces/organisation/name`.
    Space,
}

impl fmt::Display for HubRepository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            HubKind::Model => "",
            HubKind::Dataset => "datasets/",
            HubKind::Space => "spaces/",
        };
        write!(f, "hf://{kind}{}@{}", self.name, self.revision)
    }
}

impl HubRepository {
    /// `[datasets/|spaces/]organisation/name[@revision][/prefix]`, as the Hub's own library has it.
    fn parse(text: &str) -> Option<(Self, String)> {
        let (kind, rest) = match text.split_once('/') {
            Some(("datasets", rest)) => (HubKind::Dataset, rest),
            Some(("spaces", rest)) => (HubKind::Space, rest),
            _ => (HubKind::Model, text),
        };
        let (organisation, rest) = rest.split_once('/')?;
        let end = rest.find(['/', '@']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let (revision, prefix) = match rest.strip_prefix('@') {
            None => ("main", rest),
            Some(rest) => {
                // The names of these hold slashes themselves: `refs/convert/parquet`, `refs/pr/3`.
                let special = ["refs/convert/", "refs/pr/"];
                let from = special.iter().find(|s| rest.starts_with(**s));
                let from = from.map_or(0, |s| s.len());
                let end = rest[from..].find('/').map_or(rest.len(), |at| from + at);
                rest.split_at(end)
            }
        };
        let revision = percent_encoding::percent_decode_str(revision)
            .decode_utf8()
            .ok()?;
        let is_name = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && part.chars().all(known) && !part.starts_with('.')
        };
        let is_part = |part: &str| !matches!(part, "" | "." | "..");
        let is_revision = revision.split('/').all(is_part);
        let is_right = is_name(organisation) && is_name(name) && is_revision;
        let repository = Self {
            kind,
            name: format!("{organisation}/{name}"),
            revision: revision.into_owned(),
        };
        is_right.then(|| (repository, prefix.trim_matches('/').to_owned()))
    }
}

impl OriginUrl {
    /// # Errors
    /// `Invalid`, with what is accepted.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(format!("{:?} is not an origin: {why}", redact_user(text))).hint(
                "as in s3://bucket/prefix, gs://bucket, az://container, \
                    hf://datasets/organisation/name, https://host/path/, file:///dir or /dir",
            )
        };
        let text = text.trim();
        if text.is_empty() {
            return Err(bad("it is empty"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Self::directory(text).ok_or_else(|| bad("a path must name a directory"));
        };
        let bucket_and_prefix = || {
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            (bucket.to_owned(), prefix.trim_matches('/').to_owned())
        };
        match scheme {
            "s3" | "s3a" | "aws" => match bucket_and_prefix() {
                (bucket, prefix) if bucket.is_empty() || bucket == "*" => {
                    if !prefix.is_empty() {
                        return Err(bad("a prefix needs a bucket"));
                    }
                    Ok(OriginUrl::S3 {
                        bucket: None,
                        prefix,
                    })
                }
                (bucket, prefix) => Ok(OriginUrl::S3 {
                    bucket: Some(bucket),
                    prefix,
                }),
            },
            "gs" | "gcs" | "gcp" => match bucket_and_prefix() {
                (bucket, _) if bucket.is_empty() => Err(bad("it names no bucket")),
                (bucket, prefix) => Ok(OriginUrl::Gcs { bucket, prefix }),
            },
            "az" | "azure" => match bucket_and_prefix() {
                (container, _) if container.is_empty() => Err(bad("it names no container")),
                (container, prefix) => Ok(OriginUrl::Azure { container, prefix }),
            },
            "hf" => match HubRepository::parse(rest) {
                Some((repository, prefix)) => Ok(OriginUrl::Hub { repository, prefix }),
                None => Err(bad(
                    "it names no repository, as in hf://datasets/organisation/name@revision/prefix",
                )),
            },
            "http" | "https" => {
                let mut base = url::Url::parse(text).map_err(|e| bad(&e.to_string()))?;
                if base.query().is_some() || base.fragment().is_some() {
                    return Err(bad(
                        "the address of a web origin cannot have a query or a fragment",
                    ));
                }
                if !base.path().ends_with('/') {
                    base.set_path(&format!("{}/", base.path()));
                }
                Ok(OriginUrl::Web { base })
            }
            "file" => {
                let path = percent_encoding::percent_decode_str(rest)
                    .decode_utf8()
                    .map_err(|_| bad("its path is not UTF-8"))?;
                if !path.starts_with('/') {
                    return Err(bad("file: needs an absolute path, as in file:///dir"));
                }
                Self::directory(&path).ok_or_else(|| bad("a path must name a directory"))
            }
            _ => Err(bad("its scheme is not known")),
        }
    }

    fn directory(path: &str) -> Option<Self> {
        let (path, each) = match path.strip_suffix("/*") {
            Some(root) => (if root.is_empty() { "/" } else { root }, true),
            None => (path, false),
        };
        (!path.contains('*') && !path.contains('\0')).then(|| OriginUrl::Directory {
            path: PathBuf::from(path),
            each,
        })
    }

    /// The kind of store, in the word that AIStore's clients use for it.
    pub fn provider(&self) -> &'static str {
        match self {
            OriginUrl::S3 { .. } => "aws",
            OriginUrl::Gcs { .. } => "gcp",
            OriginUrl::Azure { .. } => "azure",
            OriginUrl::Web { .. } | OriginUrl::Hub { .. } => "ht",
            OriginUrl::Directory { .. } => "ais",
        }
    }

    /// What it is, for people.
    fn kind(&self) -> &'static str {
        match self {
            OriginUrl::S3 { .. } => "a bucket of S3",
            OriginUrl::Gcs { .. } => "a bucket of Google Cloud Storage",
            OriginUrl::Azure { .. } => "a container of Azure",
            OriginUrl::Web { .. } => "a web server",
            OriginUrl::Hub { .. } => "a repository of the Hugging Face Hub",
            OriginUrl::Directory { .. } => "a directory",
        }
    }

    /// Whether it stands for many buckets.
    pub fn is_wildcard(&self) -> bool {
        matches!(
            self,
            OriginUrl::S3 { bucket: None, .. } | OriginUrl::Directory { each: true, .. }
        )
    }
}

fn redact_user(text: &str) -> String {
    if text.contains('@') {
        redact(text)
    } else {
        forebay_core::name::shorten(text)
    }
}

/// A value that is written as text with a unit, or as a bare number.
struct Quantity<T>(fn(&str) -> Result<T>);

impl<T> de::Visitor<'_> for Quantity<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text or a whole number")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, n: i64) -> Result<T, E> {
        self.visit_str(&n.to_string())
    }

    fn visit_u64<E: de::Error>(self, n: u64) -> Result<T, E> {
        self.visit_str(&n.to_string())
    }
}

mod duration {
    use super::*;

    pub fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
        let ms = d.as_millis();
        s.serialize_str(&if ms.is_multiple_of(1000) {
            format!("{}s", ms / 1000)
        } else {
            format!("{ms}ms")
        })
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        d.deserialize_any(Quantity(units::parse_duration))
    }
}

mod bytes_option {
    use super::*;

    pub fn serialize<S: Serializer>(b: &Option<u64>, s: S) -> Result<S::Ok, S::Error> {
        b.serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
        d.deserialize_any(Quantity(|text| units::parse_bytes(text).map(Some)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_origins() {
        let ok = |t: &str| OriginUrl::parse(t).unwrap();
        assert_eq!(
            ok("s3://b"),
            OriginUrl::S3 {
                bucket: Some("b".into()),
                prefix: String::new()
            }
        );
        assert_eq!(
            ok("s3://b/x/y/"),
            OriginUrl::S3 {
                bucket: Some("b".into()),
                prefix: "x/y".into()
            }
        );
        assert!(
            ok("s3://").is_wildcard()
                && ok("file:///data/*").is_wildcard()
                && !ok("file:///data").is_wildcard()
        );
        assert_eq!(
            ok("file:///a%20b"),
            OriginUrl::Directory {
                path: "/a b".into(),
                each: false
            }
        );
        assert_eq!(
            ok("./data"),
            OriginUrl::Directory {
                path: "./data".into(),
                each: false
            }
        );
        assert!(
            matches!(ok("https://h/x"), OriginUrl::Web { base } if base.as_str() == "https://h/x/")
        );
        for bad in [
            "",
            "gs://",
            "az://",
            "ftp://x",
            "file://x/y",
            "s3:///prefix",
            "https://h/?q=1",
            "/a/*/b",
        ] {
            assert!(OriginUrl::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn urls_name_repositories_of_the_hub() {
        let parsed = |text: &str| match OriginUrl::parse(text) {
            Ok(OriginUrl::Hub { repository, prefix }) => Some((repository.to_string(), prefix)),
            Ok(other) => panic!("{other:?}"),
            Err(_) => None,
        };
        for (text, repository, prefix) in [
            ("hf://datasets/a/b", "hf://datasets/a/b@main", ""),
            ("hf://datasets/a/b/", "hf://datasets/a/b@main", ""),
            (
                "hf://datasets/a/b.c/x/y/",
                "hf://datasets/a/b.c@main",
                "x/y",
            ),
            ("hf://datasets/a/b@v1.0/x", "hf://datasets/a/b@v1.0", "x"),
            ("hf://datasets/a/b@a%2Fb/x", "hf://datasets/a/b@a/b", "x"),
            (
                "hf://datasets/a/b@refs/convert/parquet/default/train",
                "hf://datasets/a/b@refs/convert/parquet",
                "default/train",
            ),
            ("hf://spaces/a/b@refs/pr/3", "hf://spaces/a/b@refs/pr/3", ""),
            ("hf://a/b/x", "hf://a/b@main", "x"),
        ] {
            let expected = (repository.to_owned(), prefix.to_owned());
            assert_eq!(parsed(text), Some(expected), "{text}");
        }
        for bad in [
            "hf://",
            "hf://datasets/a",
            "hf://datasets//b",
            "hf://datasets/a/b@",
            "hf://datasets/a/b@../x",
            "hf://datasets/a/b@a%2F..%2Fb",
            "hf://datasets/a/..",
            "hf://datasets/a/b?c",
        ] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }

    #[test]
    fn settings_in_a_url() {
        let c = OriginConfig::for_url("s3://b?endpoint=http://127.0.0.1:9000&region=x&anonymous")
            .unwrap();
        assert_eq!(
            (
                c.url.as_str(),
                c.endpoint.as_deref(),
                c.region.as_deref(),
                c.anonymous
            ),
            ("s3://b", Some("http://127.0.0.1:9000"), Some("x"), true)
        );
        let told = |url: &str| OriginConfig::for_url(url).unwrap_err().describe();
        let secret = told("s3://b?secret_access_key=hush");
        assert!(
            secret.contains("environment") && !secret.contains("hush"),
            "{secret}"
        );
        let typo = told("s3://b?regoin=eu");
        assert!(
            typo.contains("\"regoin\"") && typo.contains("did you mean \"region\"?"),
            "{typo}"
        );
        for name in IN_QUERY {
            let known = OriginConfig::for_url(&format!("s3://b?{name}=no"));
            assert!(
                !known.is_err_and(|e| e.message().contains("unknown")),
                "{name}"
            );
        }
        // Where settings have places of their own, a query would be taken for a part of the name.
        for url in [
            "s3://b?region=hush",
            "gs://b/x?region=hush",
            "hf://datasets/a/b?x=hush",
        ] {
            let config = OriginConfig {
                url: url.into(),
                ..Default::default()
            };
            let told = config.check().unwrap_err().describe();
            assert!(
                told.contains("beside url") && !told.contains("hush"),
                "{told}"
            );
        }
        let directory = OriginConfig {
            url: "/srv/what?".into(),
            ..Default::default()
        };
        assert!(directory.check().is_ok());
        assert!(OriginConfig::for_url("s3://b?endpoint=nonsense").is_err());
        assert_eq!(
            OriginConfig::for_url("s3://b?hedge_percent=5")
                .unwrap()
                .hedge_percent,
            5
        );
        assert!(OriginConfig::for_url("s3://b?hedge_percent=51").is_err());
        assert!(OriginConfig::for_url("s3://b?hedge_percent=some").is_err());
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let keys = "access_key_id = \"a\"\nsecret_access_key = \"b\"";
        for (settings, why) in [
            (
                "access_key_id = \"a\"".to_owned(),
                "secret_access_key is missing",
            ),
            (
                format!("{keys}\nanonymous = true"),
                "anonymous says to use none",
            ),
            ("region = \"\"".to_owned(), "region is empty"),
        ] {
            let c: OriginConfig = toml::from_str(&format!("url = \"s3://b\"\n{settings}")).unwrap();
            let told = c.check().unwrap_err().to_string();
            assert!(told.contains(why), "{told}");
        }
    }

    #[test]
    fn settings_of_another_kind_of_origin_are_refused() {
        for (url, setting, hint) in [
            ("s3://b", "account", "there are endpoint, region"),
            ("s3://b", "bearer_token", "region"),
            ("gs://b", "region", "service_account_file"),
            ("gs://b", "profile", "endpoint"),
            ("az://b", "access_key_id", "account_key"),
            ("hf://datasets/a/b", "account_key", "bearer_token"),
            ("https://h/x/", "endpoint", "bearer_token"),
            ("/srv/data", "region", "leave it out"),
            ("/srv/data", "ca_file", "leave it out"),
        ] {
            let text = format!("url = \"{url}\"\n{setting} = \"x1\"");
            let config: OriginConfig = toml::from_str(&text).unwrap();
            let told = config.check().unwrap_err().describe();
            assert!(
                told.contains(&format!("{setting} is not a setting of")) && told.contains(hint),
                "{told}"
            );
        }
        assert!(OriginConfig::for_url("s3://b?account=x").is_err());
        assert!(OriginConfig::for_url("az://b?account=x").is_ok());
    }

    #[test]
    fn a_file_is_read_strictly_and_secrets_stay_secret() {
        let text = r#"
            url = "s3://b"
            access_key_id = "AK"
            secret_access_key = "hunter2"
            bytes_per_second = "10MB"
            idle_timeout = "250ms"
        "#;
        let c: OriginConfig = toml::from_str(text).unwrap();
        assert_eq!(
            (c.bytes_per_second, c.idle_timeout, c.attempts),
            (Some(10_000_000), Duration::from_millis(250), 5)
        );
        let shown = format!("{c:?} {}", toml::to_string(&c).unwrap());
        assert!(
            !shown.contains("hunter2") && shown.contains("***"),
            "{shown}"
        );
        assert!(toml::from_str::<OriginConfig>("url = \"s3://b\"\nidle_timeot = 3").is_err());
        for (setting, why) in [
            ("idle_timeout = -5", "\"-5\" is negative"),
            ("connect_timeout = true", "expected text or a whole number"),
            ("bytes_per_second = -5", "\"-5\" is negative"),
            ("bytes_per_second = \"5 parsecs\"", "not a size"),
        ] {
            let told = toml::from_str::<OriginConfig>(setting)
                .unwrap_err()
                .to_string();
            assert!(told.contains(why), "{told}");
        }
        let numbers = "bytes_per_second = 5\nidle_timeout = 3";
        let c: OriginConfig = toml::from_str(numbers).unwrap();
        assert_eq!(
            (c.bytes_per_second, c.idle_timeout),
            (Some(5), Duration::from_secs(3))
        );
        let half = OriginConfig {
            url: "s3://b".into(),
            access_key_id: Some("x".into()),
            ..Default::default()
        };
        assert!(half.check().is_err());
        let plain = OriginConfig {
            url: "s3://b".into(),
            endpoint: Some("http://h".into()),
            allow_http: Some(false),
            ..Default::default()
        };
        assert!(plain.check().is_err());
        let e = OriginConfig {
            url: "https://me:hunter2@h/".into(),
            ..Default::default()
        }
        .check()
        .unwrap_err();
        assert!(!e.to_string().contains("hunter2"), "{e}");
    }
}
