//! `forebay ls`: buckets, or what is under a prefix, page by page as it comes.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::Out,
    target::Prefix,
};
use forebay_client::{Call, Client};
use forebay_core::{Error, units::format_bytes};
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};

const PAGE_KEYS: u64 = 1000;
/// Flags of a listing, and of its entries.
const LIST_MEMBERS: u64 = 1 << 3;
const LIST_ONE_LEVEL: u64 = 1 << 11;
const ENTRY_CACHED: u64 = 1 << 6;
const ENTRY_MEMBER: u64 = 1 << 5;
const ENTRY_DIR: u64 = 1 << 10;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay ls                                  the buckets
  forebay ls data/train/                      one level, as in a directory
  forebay ls data/train/ -r --limit 20        every object below
  forebay ls data/shards/000000.tar -m        an archive and its members

A * marks objects of which something is in the cache (a known version, if not every byte).
JSON lines: {\"bucket\"} for each bucket; {\"bucket\", \"key\", \"size\", \"cached\"} for an object, {\"bucket\", \"key\", \"size\", \"member\": true}
for a member (its key is ARCHIVE/MEMBER), {\"bucket\", \"prefix\"} for a level below.")]
pub struct Args {
    /// A bucket, or bucket/prefix; nothing lists the buckets
    #[arg(value_name = "BUCKET[/PREFIX]")]
    pub target: Option<String>,
    /// Every object below, not one level
    #[arg(short, long)]
    pub recursive: bool,
    /// The members of archives too
    #[arg(short, long)]
    pub members: bool,
    /// Stop after this many lines
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let prefix = args.target.as_deref().map(Prefix::parse).transpose()?;
    if args.limit == Some(0) {
        return Err(Failure::Usage(
            Error::invalid("--limit 0 lists nothing").hint("give 1 or more"),
        ));
    }
    let client = super::client(common)?;
    let mut out = Out::new(common.json);
    match prefix {
        None => buckets(&client, &mut out).await,
        Some(prefix) => objects(&client, &prefix, &args, &mut out).await,
    }
}

#[derive(Deserialize)]
struct Bucket {
    name: String,
}

async fn buckets(client: &Client, out: &mut Out) -> Outcome {
    let request = json!({"action": "list", "name": "", "value": null});
    let call = Call::new(Method::GET, "/v1/buckets").json(request.to_string());
    let buckets: Vec<Bucket> = super::json(client, call).await?;
    for bucket in &buckets {
        if out.json {
            out.json_line(&json!({"bucket": bucket.name}))?
        } else {
            out.line(format!("{}/", bucket.name))?
        }
    }
    out.flush()?;
    if buckets.is_empty() && !out.json {
        eprintln!("no buckets: `forebay status` shows the origins of this node");
    }
    Ok(())
}

#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    continuation_token: String,
    #[serde(default)]
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    /// Sizes come as text.
    #[serde(default)]
    size: Value,
    #[serde(default)]
    flags: u64,
}

impl Entry {
    fn is(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    fn bytes(&self) -> u64 {
        self.size
            .as_str()
            .map_or_else(|| self.size.as_u64(), |text| text.parse().ok())
            .unwrap_or(0)
    }

    fn as_json(&self, bucket: &str) -> Value {
        if self.is(ENTRY_DIR) {
            json!({"bucket": bucket, "prefix": self.name})
        } else if self.is(ENTRY_MEMBER) {
            json!({"bucket": bucket, "key": self.name, "size": self.bytes(), "member": true})
        } else {
            json!({"bucket": bucket, "key": self.name, "size": self.bytes(), "cached": self.is(ENTRY_CACHED)})
        }
    }

    fn as_line(&self, bucket: &str) -> String {
        let size = if self.is(ENTRY_DIR) {
            String::new()
        } else {
            format_bytes(self.bytes())
        };
        let mark = if self.is(ENTRY_CACHED) { '*' } else { ' ' };
        format!("{size:>10} {mark} {bucket}/{}", one_line(&self.name))
    }
}

async fn objects(client: &Client, of: &Prefix, args: &Args, out: &mut Out) -> Outcome {
    let limit = args.limit.unwrap_or(u64::MAX);
    let flags = match (args.members, args.recursive) {
        (true, _) => LIST_MEMBERS,
        (false, true) => 0,
        (false, false) => LIST_ONE_LEVEL,
    };
    let (mut token, mut seen) = (String::new(), 0);
    loop {
        let value = json!({"prefix": of.prefix, "pagesize": PAGE_KEYS.min(limit - seen), "continuation_token": token, "flags": flags});
        let request = json!({"action": "list", "name": "", "value": value});
        let call = Call::new(Method::GET, format!("/v1/buckets/{}", of.bucket));
        let page: Page = super::json(client, call.json(request.to_string())).await?;
        for entry in page
            .entries
            .iter()
            .take((limit - seen).try_into().unwrap_or(usize::MAX))
        {
            seen += 1;
            if out.json {
                out.json_line(&entry.as_json(&of.bucket))?
            } else {
                out.line(entry.as_line(&of.bucket))?
            }
        }
        out.flush()?;
        if page.continuation_token.is_empty() || seen >= limit {
            break;
        }
        if page.continuation_token == token {
            return Err(Error::corrupt(format!("the listing does not advance: {of}")).into());
        }
        token = page.continuation_token;
    }
    if seen == 0 && !of.prefix.is_empty() {
        return Err(Error::not_found(format!("nothing there: {of}"))
            .hint(format!("`forebay ls {}` lists the bucket", of.bucket))
            .into());
    }
    Ok(())
}
