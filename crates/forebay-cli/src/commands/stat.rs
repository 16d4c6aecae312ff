//! `forebay stat`: an object's metadata, and how much of it is on the local disk.

use crate::{
    cli::Common,
    client,
    fail::{Outcome, one_line},
    out::{Out, grouped, pairs, utc},
    target,
};
use http::{HeaderMap, Method};
use serde_json::Value;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  forebay stat data/train/0001.jpg

JSON: {\"bucket\", \"key\", \"size\", \"etag\", \"last_modified\", \"last_modified_ms\", \"version\", \"attributes\", \"cache\", \"cached_bytes\",
\"pinned\", \"validated_at\" (seconds since 1970, or null), \"fresh_until\" (the same, or \
    \"forever\", or null)}")]
pub struct Args {
    /// The object, as bucket/key
    #[arg(value_name = "BUCKET/KEY")]
    pub object: String,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let object = target::object(&args.object)?;
    let mut client = super::client(common)?;
    let path = format!(
        "/v1/forebay/stat/{}/{}",
        object.bucket(),
        client::encode_key(object.key())
    );
    let answer = client
        .ask(
            Method::GET,
            &path,
            HeaderMap::new(),
            client::no_body(),
            &object.to_string(),
        )
        .await?;
    let stat: Value = client::parse(answer.into_body(), "stat").await?;
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(&stat);
    }
    for line in pairs(&rows(&stat)) {
        out.line(line)?;
    }
    out.flush()
}

fn rows(stat: &Value) -> Vec<(&'static str, String)> {
    let text = |v: &Value| v.as_str().map(one_line).unwrap_or_default();
    let size = stat["size"].as_u64().unwrap_or(0);
    let mut rows = vec![
        (
            "object",
            format!("{}/{}", text(&stat["bucket"]), text(&stat["key"])),
        ),
        ("size", format!("{} bytes", grouped(size))),
        (
            "modified",
            stat["last_modified_ms"]
                .as_i64()
                .map(utc)
                .unwrap_or_default(),
        ),
        (
            "etag",
            stat["etag"].as_str().map_or("-".to_owned(), one_line),
        ),
    ];
    if let Some(kind) = stat["attributes"]["content_type"].as_str() {
        rows.push(("type", one_line(kind)));
    }
    for (name, value) in user_metadata(&stat["attributes"]["user"]) {
        rows.push(("metadata", format!("{name}={value}")));
    }
    let cached = stat["cached_bytes"].as_u64().unwrap_or(0);
    rows.push((
        "on disk",
        match (cached, size) {
            (0, 1..) => "nothing".to_owned(),
            (cached, size) if cached >= size => "all of it".to_owned(),
            (cached, size) => format!(
                "{} bytes, {:.1} %",
                grouped(cached),
                cached as f64 / size as f64 * 100.0
            ),
        },
    ));
    rows.push((
        "pinned",
        if stat["pinned"].as_bool() == Some(true) {
            "yes"
        } else {
            "no"
        }
        .to_owned(),
    ));
    let fresh = match &stat["fresh_until"] {
        Value::String(forever) => one_line(forever),
        Value::Number(at) => format!(
            "until {}",
            utc(at.as_i64().unwrap_or(0).saturating_mul(1000))
        ),
        _ => "the origin is asked at the next read".to_owned(),
    };
    rows.push(("fresh", fresh));
    rows
}

fn user_metadata(user: &Value) -> Vec<(String, String)> {
    let pair = |v: &Value| Some((one_line(v[0].as_str()?), one_line(v[1].as_str()?)));
    user.as_array()
        .map(|all| all.iter().filter_map(pair).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_disk_is_told_in_words() {
        let on_disk = |size: u64, cached: u64| {
            let stat = serde_json::json!({"bucket": "b", "key": "k", "size": size, "cached_bytes": cached, "last_modified_ms": 0, "fresh_until": 60});
            let rows = rows(&stat);
            assert_eq!(rows.last().unwrap().1, "until 1970-01-01 00:01:00Z");
            rows.iter().find(|r| r.0 == "on disk").unwrap().1.clone()
        };
        assert_eq!(on_disk(10, 0), "nothing");
        assert_eq!(on_disk(0, 0), "all of it");
        assert_eq!(on_disk(2000, 1000), "1,000 bytes, 50.0 %");
        assert_eq!(on_disk(10, 10), "all of it");
    }
}
