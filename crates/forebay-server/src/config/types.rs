//! The types of configuration values: sizes and times as people write them, freshness rules, cache
//! directories, secrets.

use forebay_core::{Error, Result, units};
use forebay_engine::{Freshness, Repeated};
use forebay_peer::Writes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

pub use forebay_origin::Secret;

/// Gives a type that is written as text `Serialize`, `Deserialize` (of text, or of a bare number)
/// and `Debug` by its `Display` and `FromStr`.
macro_rules! text_shown {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
    };
}

macro_rules! text_value {
    ($name:ident) => {
        text_shown!($name);
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                struct Text;
                impl de::Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("text or a whole number")
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(|e: Error| E::custom(e))
                    }
                    fn visit_i64<E: de::Error>(self, n: i64) -> Result<$name, E> {
                        n.to_string().parse().map_err(|e: Error| E::custom(e))
                    }
                    fn visit_u64<E: de::Error>(self, n: u64) -> Result<$name, E> {
                        n.to_string().parse().map_err(|e: Error| E::custom(e))
                    }
                }
                d.deserialize_any(Text)
            }
        }
    };
}

/// A number of bytes: `64MiB`, `10GB`, `4096`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        units::parse_bytes(text).map(Bytes)
    }
}

impl fmt::Display for Bytes {
    /// Exact: prints with the largest unit that divides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
            if self.0 >= 1 << shift && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}
text_value!(Bytes);

/// A length of time: `500ms`, `60s`, `2h`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        units::parse_duration(text).map(Span)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms.is_multiple_of(1000) {
            write!(f, "{}s", ms / 1000)
        } else {
            write!(f, "{ms}ms")
        }
    }
}
text_value!(Span);

/// When a cached version may be served without asking the origin: `immutable`, `always`, or a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FreshnessRule(pub Freshness);

impl FromStr for FreshnessRule {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Ok(FreshnessRule(match text.trim() {
            "immutable" => Freshness::Immutable,
            "always" => Freshness::Always,
            time => Freshness::RevalidateAfter(units::parse_duration(time).map_err(|_| {
                Error::invalid(format!("{text:?} is not a freshness rule"))
                    .hint("\"immutable\", \"always\", or a time such as \"60s\"")
            })?),
        }))
    }
}

impl fmt::Display for FreshnessRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Freshness::Immutable => f.write_str("immutable"),
            Freshness::Always => f.write_str("always"),
            Freshness::RevalidateAfter(time) => Span(time).fmt(f),
        }
    }
}
text_value!(FreshnessRule);

/// Which member of an archive counts if several have the same name: `last` or `first`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RepeatedRule(pub Repeated);

impl FromStr for RepeatedRule {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "last" => Ok(RepeatedRule(Repeated::Last)),
            "first" => Ok(RepeatedRule(Repeated::First)),
            _ => Err(
                Error::invalid(format!("{text:?} does not say which member counts"))
                    .hint("\"last\" or \"first\""),
            ),
        }
    }
}

impl fmt::Display for RepeatedRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Repeated::Last => "last",
            Repeated::First => "first",
        })
    }
}
text_value!(RepeatedRule);

/// A cache directory and how much of it may be used: `/mnt/nvme0/forebay:900GiB`.
#[derive(Clone, PartialEq, Eq)]
pub struct CacheDir {
    /// Where it is, with the home directory in place of a leading `~/`.
    pub path: PathBuf,
    /// The most that the cache uses of it.
    pub size: Bytes,
}

impl FromStr for CacheDir {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid(format!("{text:?} is not a cache directory with a size"))
                .hint("write DIR:SIZE, as in /mnt/nvme0/forebay:900GiB")
        };
        let (path, size) = text.rsplit_once(':').ok_or_else(bad)?;
        let size: Bytes = size.parse().map_err(|_| bad())?;
        if path.is_empty() || size.0 == 0 {
            return Err(bad());
        }
        let path = match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
            (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
            _ => PathBuf::from(path),
        };
        Ok(CacheDir { path, size })
    }
}

impl fmt::Display for CacheDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.size)
    }
}
text_value!(CacheDir);

/// Unix permissions in octal: `0600`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mode(pub u32);

impl FromStr for Mode {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        u32::from_str_radix(text.trim().trim_start_matches("0o"), 8)
            .ok()
            .filter(|m| *m <= 0o777)
            .map(Mode)
            .ok_or_else(|| {
                Error::invalid(format!("{text:?} is not a file mode"))
                    .hint("write it in octal and in quotes, as in \"0600\" or \"0660\"")
            })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}
text_shown!(Mode);

impl<'de> Deserialize<'de> for Mode {
    /// Text alone: a number that TOML has read no longer says whether it was written in octal.
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Mode;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a file mode in octal and in quotes, as in \"0660\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Mode, E> {
                text.parse().map_err(|e: Error| E::custom(e))
            }
        }
        d.deserialize_any(Text)
    }
}

/// What becomes of writes while other nodes may not see them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClusterWrites {
    /// They go through.
    Bounded,
    /// They are refused.
    Coherent,
}

impl From<ClusterWrites> for Writes {
    fn from(writes: ClusterWrites) -> Self {
        match writes {
            ClusterWrites::Bounded => Writes::Bounded,
            ClusterWrites::Coherent => Writes::Coherent,
        }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// A line for people, with colours where standard error is a terminal.
    Text,
    /// An object of JSON for each line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_read_back_as_they_are_shown() {
        for text in ["64MiB", "1000", "3TiB", "1500KiB"] {
            assert_eq!(text.parse::<Bytes>().unwrap().to_string(), text);
        }
        for text in ["immutable", "always", "60s", "1500ms"] {
            assert_eq!(text.parse::<FreshnessRule>().unwrap().to_string(), text);
        }
        for text in ["last", "first"] {
            assert_eq!(text.parse::<RepeatedRule>().unwrap().to_string(), text);
        }
        let dir: CacheDir = "/a:b/c:10GB".parse().unwrap();
        assert_eq!(
            (dir.path.to_str().unwrap(), dir.size.0),
            ("/a:b/c", 10_000_000_000)
        );
        assert_eq!(dir.to_string().parse::<CacheDir>().unwrap(), dir);
        assert_eq!("0660".parse::<Mode>().unwrap().to_string(), "0660");
        for bad in ["/a", ":1GiB", "/a:0", "/a:many"] {
            assert!(bad.parse::<CacheDir>().is_err(), "{bad}");
        }
        assert!("any".parse::<RepeatedRule>().is_err());
        assert!("0999".parse::<Mode>().is_err() && "sometimes".parse::<FreshnessRule>().is_err());
    }
}
