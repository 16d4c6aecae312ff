//! `forebay stat`: an object's metadata, and how much of it is on the local disk.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, grouped, pairs, utc},
    target,
};
use forebay_client::Call;
use forebay_core::Error;
use forebay_protocol::{
    STAT_PATH,
    cache::{FreshUntil, Stat},
    path::encode_key,
};
use http::Method;
use serde_json::Value;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  forebay stat data/train/0001.jpg

JSON: {\"bucket\", \"key\", \"size\", \"etag\", \"last_modified\", \"last_modified_ms\", \"version\", \"attributes\", \"cache\", \"cached_bytes\", \
    \"pinned\", \"validated_at\" (seconds since 1970, or null), \"fresh_until\" (the same, or \
    \"forever\", or null)}")]
pub struct Args {
    /// The object, as bucket/key
    #[arg(value_name = "BUCKET/KEY")]
    pub object: String,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let object = target::object(&args.object)?;
    let client = super::client(common)?;
    let path = format!(
        "{STAT_PATH}/{}/{}",
        object.bucket(),
        encode_key(object.key())
    );
    let mut answer = client
        .call(&Call::new(Method::GET, path))
        .await
        .map_err(|f| Failure::of_call(f, &object.to_string()))?;
    let said: Value = answer.json().await?;
    let mut out = Out::new(common.json);
    if out.json {
        // All of it, including fields that a later release adds.
        return out.object(&said);
    }
    let stat: Stat = serde_json::from_value(said).map_err(|e| {
        Error::corrupt(format!("the answer of the node cannot be parsed: {e}")).caused_by(e)
    })?;
    for line in pairs(&rows(&stat)) {
        out.line(line)?;
    }
    out.flush()
}

fn rows(stat: &Stat) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        (
            "object",
            format!("{}/{}", one_line(&stat.bucket), one_line(&stat.key)),
        ),
        ("size", count(stat.size, "byte")),
        ("modified", utc(stat.last_modified_ms)),
        (
            "etag",
            stat.etag.as_deref().map_or("-".to_owned(), one_line),
        ),
    ];
    if let Some(kind) = &stat.attributes.content_type {
        rows.push(("type", one_line(kind)));
    }
    for (name, value) in &stat.attributes.user {
        rows.push((
            "metadata",
            format!("{}={}", one_line(name), one_line(value)),
        ));
    }
    rows.push((
        "on disk",
        match (stat.cached_bytes, stat.size) {
            (0, 1..) => "nothing".to_owned(),
            (cached, size) if cached >= size => "all of it".to_owned(),
            (cached, size) => format!(
                "{} bytes, {:.1} %",
                grouped(cached),
                cached as f64 / size as f64 * 100.0
            ),
        },
    ));
    rows.push(("pinned", if stat.pinned { "yes" } else { "no" }.to_owned()));
    let fresh = match &stat.fresh_until {
        Some(FreshUntil::Word(forever)) => one_line(forever),
        Some(FreshUntil::At(seconds)) => {
            let ms = i64::try_from(*seconds).unwrap_or(0).saturating_mul(1000);
            format!("until {}", utc(ms))
        }
        None => "the next read asks the origin".to_owned(),
    };
    rows.push(("fresh", fresh));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_disk_is_told_in_words() {
        let on_disk = |size: u64, cached: u64| {
            let stat = Stat {
                size,
                cached_bytes: cached,
                fresh_until: Some(FreshUntil::At(60)),
                ..Stat::default()
            };
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
