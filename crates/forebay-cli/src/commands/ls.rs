//! `forebay ls`: buckets, or the objects under a prefix, page by page as they come.

use crate::{
    cli::Common,
    client::Client,
    fail::{Failure, Outcome},
    out::Out,
    target::Prefix,
};
use forebay_core::{Error, units::format_bytes};
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};

const PAGE_KEYS: u64 = 1000;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay ls                     the buckets
  forebay ls data/train/         every object under a prefix
  forebay ls data --limit 20

JSON lines: {\"bucket\"} for each bucket; {\"bucket\", \"key\", \"size\"} for each object.")]
pub struct Args {
    /// A bucket, or bucket/prefix; nothing lists the buckets
    #[arg(value_name = "BUCKET[/PREFIX]")]
    pub target: Option<String>,
    /// Stop after this many objects
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let prefix = args.target.as_deref().map(Prefix::parse).transpose()?;
    if args.limit == Some(0) {
        return Err(Failure::Usage(Error::invalid("--limit 0 lists nothing").hint("1 or more")));
    }
    let mut client = super::client(common)?;
    let mut out = Out::new(common.json);
    match prefix {
        None => buckets(&mut client, &mut out).await,
        Some(prefix) => objects(&mut client, &prefix, args.limit.unwrap_or(u64::MAX), &mut out).await,
    }
}

#[derive(Deserialize)]
struct Bucket {
    name: String,
}

async fn buckets(client: &mut Client, out: &mut Out) -> Outcome {
    let request = json!({"action": "list", "name": "", "value": null});
    let buckets: Vec<Bucket> = client.json(Method::GET, "/v1/buckets", Some(&request)).await?;
    for bucket in &buckets {
        if out.json { out.json_line(&json!({"bucket": bucket.name}))? } else { out.line(format!("{}/", bucket.name))? }
    }
    out.flush()?;
    if buckets.is_empty() && !out.json {
        eprintln!("no buckets: `forebay status` shows the origins of this node");
    }
    Ok(())
}

#[derive(Deserialize)]
pub struct Page {
    #[serde(default)]
    pub continuation_token: String,
    #[serde(default)]
    entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
pub struct Entry {
    pub name: String,
    #[serde(default)]
    size: Value,
}

impl Entry {
    /// Sizes come as strings, and are left out when they are 0.
    pub fn bytes(&self) -> u64 {
        self.size.as_u64().or_else(|| self.size.as_str().and_then(|s| s.parse().ok())).unwrap_or(0)
    }
}

/// One page of a listing, beginning after `token`.
pub async fn page(client: &mut Client, of: &Prefix, token: &str, keys: u64) -> Outcome<(Vec<Entry>, String)> {
    let value = json!({"prefix": of.prefix, "pagesize": keys, "continuation_token": token, "props": "name,size", "uuid": "", "flags": 0, "target": ""});
    let request = json!({"action": "list", "name": "", "value": value});
    let page: Page = client.json(Method::GET, &format!("/v1/buckets/{}", of.bucket), Some(&request)).await?;
    if !page.continuation_token.is_empty() && page.continuation_token == token {
        return Err(Error::corrupt(format!("the listing does not advance: {of}")).into());
    }
    Ok((page.entries.unwrap_or_default(), page.continuation_token))
}

async fn objects(client: &mut Client, of: &Prefix, limit: u64, out: &mut Out) -> Outcome {
    let (mut token, mut seen) = (String::new(), 0);
    loop {
        let (entries, next) = page(client, of, &token, PAGE_KEYS.min(limit - seen)).await?;
        for entry in entries.iter().take((limit - seen) as usize) {
            seen += 1;
            if out.json {
                out.json_line(&json!({"bucket": of.bucket, "key": entry.name, "size": entry.bytes()}))?;
            } else {
                out.line(format!("{:>10}  {}/{}", format_bytes(entry.bytes()), of.bucket, crate::fail::one_line(&entry.name)))?;
            }
        }
        out.flush()?;
        token = next;
        if token.is_empty() || seen >= limit {
            break;
        }
    }
    if seen == 0 && !of.prefix.is_empty() {
        return Err(Error::not_found(format!("nothing there: {of}"))
            .hint(format!("`forebay ls {}` lists the whole bucket", of.bucket))
            .into());
    }
    Ok(())
}
