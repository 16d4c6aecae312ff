//! `forebay ls`: lists buckets, or what is under a prefix, page by page as it arrives.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, tell},
    target::Prefix,
};
use forebay_client::{Call, Client};
use forebay_core::{Error, units::format_bytes};
use forebay_protocol::{
    BUCKETS_PATH,
    listing::{
        Bucket, Entry, IS_CACHED, IS_DIR, IS_MEMBER, ListMessage, MEMBERS, ONE_LEVEL, Page, Request,
    },
};
use http::Method;
use serde_json::{Value, json};

const PAGE_KEYS: i64 = 1000;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay ls                                  the buckets
  forebay ls data/train/                      one level, as in a directory
  forebay ls data/train/ -r --limit 20        every object below
  forebay ls data/shards/000000.tar -m        an archive and its members

A * marks objects of which something is in the cache (a known version, if not every byte).
JSON lines: {\"bucket\"} for each bucket; {\"bucket\", \"key\", \"size\", \"cached\"} for an object, {\"bucket\", \"key\", \"size\", \"member\": true} \
    for a member (its key is ARCHIVE/MEMBER), {\"bucket\", \"prefix\"} for a level below.")]
pub struct Args {
    /// A bucket, or bucket/prefix; without it, list the buckets
    #[arg(value_name = "BUCKET[/PREFIX]")]
    pub target: Option<String>,
    /// Every object below, not just one level
    #[arg(short, long)]
    pub recursive: bool,
    /// Include the members of archives
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

async fn buckets(client: &Client, out: &mut Out) -> Outcome {
    let call = Call::new(Method::GET, BUCKETS_PATH).json(Request::buckets().json());
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
        tell("no buckets: `forebay status` shows the origins of this node");
    }
    Ok(())
}

fn as_json(entry: &Entry, bucket: &str) -> Value {
    let size = entry.size.unwrap_or(0);
    if entry.is(IS_DIR) {
        json!({"bucket": bucket, "prefix": entry.name})
    } else if entry.is(IS_MEMBER) {
        json!({"bucket": bucket, "key": entry.name, "size": size, "member": true})
    } else {
        json!({"bucket": bucket, "key": entry.name, "size": size, "cached": entry.is(IS_CACHED)})
    }
}

fn as_line(entry: &Entry, bucket: &str) -> String {
    let size = if entry.is(IS_DIR) {
        String::new()
    } else {
        format_bytes(entry.size.unwrap_or(0))
    };
    let mark = if entry.is(IS_CACHED) { '*' } else { ' ' };
    format!("{size:>10} {mark} {bucket}/{}", one_line(&entry.name))
}

async fn objects(client: &Client, of: &Prefix, args: &Args, out: &mut Out) -> Outcome {
    let limit = args.limit.unwrap_or(u64::MAX);
    let flags = match (args.members, args.recursive) {
        (true, _) => MEMBERS,
        (false, true) => 0,
        (false, false) => ONE_LEVEL,
    };
    let (mut token, mut seen) = (String::new(), 0);
    loop {
        let request = Request::page(ListMessage {
            prefix: of.prefix.clone(),
            pagesize: i64::try_from(limit - seen).map_or(PAGE_KEYS, |left| left.min(PAGE_KEYS)),
            continuation_token: token.clone(),
            flags: flags.into(),
            ..ListMessage::default()
        });
        let call = Call::new(Method::GET, format!("{BUCKETS_PATH}/{}", of.bucket));
        let page: Page = super::json(client, call.json(request.json())).await?;
        for entry in page
            .entries
            .iter()
            .take((limit - seen).try_into().unwrap_or(usize::MAX))
        {
            seen += 1;
            if out.json {
                out.json_line(&as_json(entry, &of.bucket))?
            } else {
                out.line(as_line(entry, &of.bucket))?
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
