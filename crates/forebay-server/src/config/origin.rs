//! `[[origins]]`: a bucket's name here, and the origin behind it.

use super::section::Described;
use forebay_core::{Error, Result, name::validate_bucket};
use forebay_origin::{OriginConfig, OriginUrl, WILDCARD, identity_of_bucket};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, IntoDeserializer, value::MapAccessDeserializer},
    ser,
};
use std::fmt;

/// One origin under the bucket name that it has here.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedOrigin {
    /// The bucket's name here. `None`: taken from the URL; see [`NamedOrigin::bucket`].
    pub name: Option<String>,
    /// Its URL, with what is needed to reach it and limits on requests to it.
    pub config: OriginConfig,
}

impl NamedOrigin {
    /// What `--origin` takes: `URL` or `NAME=URL`.
    pub fn parse(text: &str) -> Result<Self> {
        // A `=` may belong to the URL's query; what stands before it there is never a valid name.
        let (name, url) = match text.split_once('=') {
            Some((name, url)) if !name.contains(['/', ':', '?']) => (Some(name.to_owned()), url),
            _ => (None, text),
        };
        let origin = NamedOrigin {
            name,
            config: OriginConfig::for_url(url)?,
        };
        origin.bucket()?;
        Ok(origin)
    }

    /// The bucket name here; `None` for an origin that stands for many buckets.
    pub fn bucket(&self) -> Result<Option<String>> {
        let url = self.config.check()?;
        if url.is_wildcard() {
            return match &self.name {
                None => Ok(None),
                Some(name) => Err(Error::invalid(format!(
                    "origin {}: it stands for many buckets, so it cannot be named {name:?}",
                    self.config.url
                ))
                .hint("leave the name out, or name one bucket in the URL")),
            };
        }
        let name = match (&self.name, url) {
            (Some(name), _) => name.clone(),
            (
                None,
                OriginUrl::S3 {
                    bucket: Some(bucket),
                    ..
                }
                | OriginUrl::Gcs { bucket, .. }
                | OriginUrl::Azure {
                    container: bucket, ..
                },
            ) => bucket,
            (None, OriginUrl::Hub { repository, .. }) => {
                let name = repository.name.rsplit('/').next();
                name.unwrap_or_default().to_owned()
            }
            (None, OriginUrl::Web { base }) => base.host_str().unwrap_or_default().to_owned(),
            (None, OriginUrl::Directory { path, .. }) => {
                let path = path.canonicalize().unwrap_or(path);
                path.file_name()
                    .map(|n| n.to_string_lossy().into_owned())
                    .unwrap_or_default()
            }
            (None, _) => String::new(),
        };
        validate_bucket(&name).map_err(|e| {
            let e = e.context(format!("origin {}", self.config.url));
            match &self.name {
                // The name itself is wrong, and the error says what may be one.
                Some(_) => e,
                None => e.hint("give the bucket a name: name = \"…\", or --origin NAME=URL"),
            }
        })?;
        Ok(Some(name))
    }

    /// Whether a node with the origins `served` reads the bucket of this origin, or all its buckets,
    /// from the same place as this origin. Credentials and limits may differ.
    pub fn is_served_by(&self, served: &[NamedOrigin]) -> Result<bool> {
        if served.contains(self) {
            return Ok(true);
        }
        let bucket = self.bucket()?;
        let name = bucket.as_deref().unwrap_or(WILDCARD);
        let place = |origin: &NamedOrigin| identity_of_bucket(&origin.config, name);
        let wanted = place(self)?;
        let mut many = Vec::new();
        for origin in served {
            match origin.bucket()? {
                None => many.push(origin),
                // An origin that names the bucket goes before those that stand for many.
                found if found == bucket => return Ok(place(origin)? == wanted),
                Some(_) => {}
            }
        }
        for origin in many {
            if place(origin)? == wanted {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl<'de> Deserialize<'de> for NamedOrigin {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Table;
        impl<'de> de::Visitor<'de> for Table {
            type Value = NamedOrigin;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table with the url of an origin")
            }
            fn visit_map<A: de::MapAccess<'de>>(self, table: A) -> Result<NamedOrigin, A::Error> {
                let mut name = None;
                let settings = Settings {
                    table,
                    name: &mut name,
                };
                let config = OriginConfig::deserialize(MapAccessDeserializer::new(settings))?;
                Ok(NamedOrigin { name, config })
            }
        }
        d.deserialize_map(Table)
    }
}

/// The table of an origin as [`OriginConfig`] sees it: without the name, which is put aside. Both
/// are read from the table itself, so that an error has the place of its setting.
struct Settings<'a, A> {
    table: A,
    name: &'a mut Option<String>,
}

impl<'de, A: de::MapAccess<'de>> de::MapAccess<'de> for Settings<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: de::DeserializeSeed<'de>>(
        &mut self,
        mut seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        loop {
            match self.table.next_key_seed(SettingName(seed))? {
                None => return Ok(None),
                Some(Setting::Of(key)) => return Ok(Some(key)),
                Some(Setting::Name(unused)) => {
                    *self.name = Some(self.table.next_value()?);
                    seed = unused;
                }
            }
        }
    }

    fn next_value_seed<V: de::DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, A::Error> {
        self.table.next_value_seed(seed)
    }
}

struct SettingName<K>(K);

enum Setting<K, V> {
    /// `name`; the seed is left for another key.
    Name(K),
    /// One that [`OriginConfig`] has.
    Of(V),
}

impl<'de, K: de::DeserializeSeed<'de>> de::DeserializeSeed<'de> for SettingName<K> {
    type Value = Setting<K, K::Value>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        let key = String::deserialize(d)?;
        if key == "name" {
            return Ok(Setting::Name(self.0));
        }
        if !NAMES.contains(&key.as_str()) {
            return Err(de::Error::unknown_field(&key, &NAMES));
        }
        self.0.deserialize(key.into_deserializer()).map(Setting::Of)
    }
}

/// The names of an origin's settings.
const NAMES: [&str; OriginSection::FIELDS.len()] = {
    let mut names = [""; OriginSection::FIELDS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = OriginSection::FIELDS[i].0;
        i += 1;
    }
    names
};

impl Serialize for NamedOrigin {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut table = toml::Table::new();
        if let Some(name) = &self.name {
            table.insert("name".into(), name.clone().into());
        }
        table.extend(toml::Table::try_from(&self.config).map_err(ser::Error::custom)?);
        table.serialize(s)
    }
}

/// Documentation of the settings. The fields themselves are `forebay_origin`'s, and a test checks
/// that the two agree.
pub(super) struct OriginSection;

impl Described for OriginSection {
    const DOC: &'static [&'static str] = &[
        " The buckets served here and where they are: one `[[origins]]` for each. At least one \
         is needed.",
    ];
    const FIELDS: &'static [(&'static str, &'static [&'static str])] = &[
        (
            "name",
            &[" The bucket's name here. Default: as in the URL."],
        ),
        (
            "url",
            &[
                " `s3://bucket[/prefix]`, `gs://bucket[/prefix]`, `az://container[/prefix]`, \
                 `hf://datasets/organisation/name[@revision][/prefix]`, `https://host/path/`, \
                 `file:///dir` or a path.",
                " `s3://` alone serves every bucket of the endpoint, `file:///dir/*` every \
                 directory in `dir` as a bucket.",
            ],
        ),
        (
            "endpoint",
            &[
                " S3, GCS, Azure, Hugging Face: where the service is, if not at its public \
                 address: `http://127.0.0.1:9000`. Default for S3: `AWS_ENDPOINT_URL_S3`, \
                 `AWS_ENDPOINT_URL`, the profile's; for Hugging Face: `HF_ENDPOINT`.",
            ],
        ),
        (
            "region",
            &[
                " S3: the region. Default: `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile's, \
                 `us-east-1`.",
            ],
        ),
        (
            "path_style",
            &[
                " S3: the bucket in the path (`true`) or in the host name. Default: in the path \
                 where `endpoint` is given.",
            ],
        ),
        (
            "allow_http",
            &[
                " `false` refuses an endpoint that is plain HTTP. Default: accepted where the \
                 endpoint says `http://`.",
            ],
        ),
        (
            "anonymous",
            &[
                " S3, GCS, Azure, Hugging Face: requests are not signed, no credentials are \
                 looked for. Default: `false`.",
            ],
        ),
        (
            "profile",
            &[
                " S3: the profile in `~/.aws/credentials` and `~/.aws/config`: keys, a role, \
                 single sign-on, or `credential_process`. Default: `AWS_PROFILE`, `default`.",
            ],
        ),
        (
            "access_key_id",
            &[
                " S3: keys, instead of the usual places (environment, profile, web identity, \
                 container and instance metadata).",
            ],
        ),
        ("secret_access_key", &[" S3: see `access_key_id`."]),
        ("session_token", &[" S3: see `access_key_id`."]),
        (
            "service_account_file",
            &[
                " GCS: a service account's JSON key. Default: `GOOGLE_APPLICATION_CREDENTIALS` \
                 and the other usual places.",
            ],
        ),
        (
            "account",
            &[" Azure: the storage account. Default: `AZURE_STORAGE_ACCOUNT_NAME`."],
        ),
        (
            "account_key",
            &[
                " Azure: the account's key. Default: `AZURE_STORAGE_ACCOUNT_KEY` and the other \
                 usual places.",
            ],
        ),
        (
            "bearer_token",
            &[
                " HTTP(S), Hugging Face: sent as `Authorization: Bearer …`. Default for Hugging \
                 Face: `HF_TOKEN`, or what `hf auth login` kept.",
            ],
        ),
        (
            "ca_file",
            &[" A PEM file of further certificate authorities that are trusted."],
        ),
        (
            "requests_in_flight",
            &[" Requests in flight at the same time, bodies included. Default: 256."],
        ),
        (
            "bytes_per_second",
            &[
                " Bytes per second, read and written together: a number or `\"100MB\"`. Default: \
                 no limit.",
            ],
        ),
        (
            "hedge_percent",
            &[
                " A GET whose first byte is later than that of 95 of 100 before it is sent a \
                 second time, and the first answer is taken: at most so many second",
                " requests for 100 requests. 5 suits an origin with a long tail. Default: `0`, \
                 none.",
            ],
        ),
        (
            "attempts",
            &[" Attempts for one request, the first included. Default: 5."],
        ),
        ("connect_timeout", &[" Default: `5s`."]),
        (
            "idle_timeout",
            &[
                " An answer or a body that is silent for this long counts as broken. Default: \
                 `30s`.",
            ],
        ),
        (
            "retry_deadline",
            &[
                " No attempt begins later than this after the first has failed. Default: \
                 `60s`.",
            ],
        ),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_an_origin_is_documented() {
        let error = toml::from_str::<OriginConfig>("no_such_setting = 1").unwrap_err();
        let known: Vec<&str> = error.message().split('`').skip(3).step_by(2).collect();
        let documented: Vec<&str> = OriginSection::FIELDS
            .iter()
            .map(|f| f.0)
            .filter(|f| *f != "name")
            .collect();
        assert!(known.len() > 10, "{error}");
        let mut known_sorted = known.clone();
        let mut documented_sorted = documented.clone();
        known_sorted.sort();
        documented_sorted.sort();
        assert_eq!(known_sorted, documented_sorted);
    }

    #[test]
    fn a_name_that_cannot_be_one_is_told_from_a_missing_one() {
        let told = |text: &str| NamedOrigin::parse(text).unwrap_err().describe();
        let wrong = told("x=s3://photos");
        assert!(wrong.contains("2 to 63 characters"), "{wrong}");
        assert!(told("s3://x").contains("--origin NAME=URL"));
    }

    #[test]
    fn settings_are_in_the_url_on_the_command_line_only() {
        let typo = NamedOrigin::parse("s3://photos?regoin=eu").unwrap_err();
        assert!(
            typo.describe().contains("did you mean \"region\"?"),
            "{typo}"
        );
        for url in [
            "s3://photos?region=eu",
            "s3://photos/x?regoin=eu",
            "hf://me:SECRET@datasets/x?region=eu",
        ] {
            let table = format!("name = \"photos\"\nurl = {url:?}");
            let origin: NamedOrigin = toml::from_str(&table).unwrap();
            let told = origin.bucket().unwrap_err().describe();
            assert!(told.contains("beside url"), "{told}");
            assert!(!told.contains("SECRET"), "{told}");
        }
    }

    #[test]
    fn an_origin_is_served_by_what_leads_to_the_same_place() {
        let origin = |text: &str| NamedOrigin::parse(text).unwrap();
        let served = [
            origin("s3://photos?region=eu"),
            origin("texts=s3://photos/texts"),
            origin("s3://"),
        ];
        let is_served = |text: &str| origin(text).is_served_by(&served).unwrap();
        for same in [
            "s3://photos",
            "photos=s3://photos/",
            "texts=s3://photos/texts/?anonymous",
            "s3://others",
            "s3://*",
        ] {
            assert!(is_served(same), "{same}");
        }
        for other in [
            "photos=s3://others",
            "texts=s3://texts",
            "more=s3://others",
            "gs://others",
            "s3://photos?endpoint=http://127.0.0.1:9000",
            "s3://?endpoint=http://127.0.0.1:9000",
        ] {
            assert!(!is_served(other), "{other}");
        }
        assert!(!origin("s3://").is_served_by(&served[..2]).unwrap());
        assert!(!origin("s3://others").is_served_by(&served[..2]).unwrap());
    }

    #[test]
    fn a_bucket_is_named_by_its_url_or_by_the_operator() {
        let name = |t: &str| NamedOrigin::parse(t).and_then(|o| o.bucket());
        assert_eq!(
            name("s3://photos/2024?endpoint=http://127.0.0.1:9000")
                .unwrap()
                .as_deref(),
            Some("photos")
        );
        assert_eq!(
            name("pics=s3://photos?region=x").unwrap().as_deref(),
            Some("pics")
        );
        assert_eq!(name("data=/").unwrap().as_deref(), Some("data"));
        assert_eq!(name("s3://").unwrap(), None);
        assert!(
            name("x=s3://").is_err()
                && name("file:///").is_err()
                && name("v1=s3://photos").is_err()
        );
    }
}
