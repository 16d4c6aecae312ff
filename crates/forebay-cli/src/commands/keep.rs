//! `forebay pin`, `unpin`, `evict`: what the cache keeps and what it drops.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, grouped},
    target::Prefix,
};
use forebay_core::{Error, ErrorKind, units::format_bytes};
use http::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const JSON_SHAPE: &str = "JSON: {\"action\", \"dry_run\", \"objects\", \"changed\", \
    \"unchanged\", \"failed\", \"bytes\", \"errors\": [{\"bucket\", \"key\", \"message\"}]}";

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Examples:
  forebay pin data/val/
  forebay pin --list

Pinning fetches nothing: `forebay warm` does. Pinned objects may take up to half of the cache.
{JSON_SHAPE}
With --list, JSON lines: {{\"bucket\", \"key\"}}"))]
pub struct PinArgs {
    #[command(flatten)]
    what: Selection,
    /// List what is pinned
    #[arg(long, conflicts_with_all = ["targets", "dry_run"])]
    list: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  forebay unpin data/val/\n\n{JSON_SHAPE}"))]
pub struct UnpinArgs {
    #[command(flatten)]
    what: Selection,
}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  forebay evict data/old/ --dry-run\n\nWhat is pinned \
    stays.\n{JSON_SHAPE}"))]
pub struct EvictArgs {
    #[command(flatten)]
    what: Selection,
}

#[derive(Debug, clap::Args)]
struct Selection {
    /// Objects by prefix: every object whose name begins so
    #[arg(value_name = "BUCKET[/PREFIX]", required_unless_present = "list")]
    targets: Vec<String>,
    /// Say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
}

pub async fn pin(args: PinArgs, common: &Common) -> Outcome {
    if args.list {
        list(common).await
    } else {
        change("pin", args.what, common).await
    }
}

pub async fn unpin(args: UnpinArgs, common: &Common) -> Outcome {
    change("unpin", args.what, common).await
}

pub async fn evict(args: EvictArgs, common: &Common) -> Outcome {
    change("evict", args.what, common).await
}

/// What the node answers, and what the command does with `--json`.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    action: String,
    dry_run: bool,
    objects: u64,
    changed: u64,
    unchanged: u64,
    failed: u64,
    bytes: u64,
    errors: Vec<Value>,
}

impl Report {
    fn add(&mut self, other: Report) {
        self.objects += other.objects;
        self.changed += other.changed;
        self.unchanged += other.unchanged;
        self.failed += other.failed;
        self.bytes += other.bytes;
        self.errors.extend(other.errors);
    }

    fn sentence(&self) -> String {
        let (verb, rest) = match self.action.as_str() {
            "pin" => ("pinned", "pinned already"),
            "unpin" => ("unpinned", "were not pinned"),
            _ => ("evicted", "not in the cache, or pinned"),
        };
        let would = if self.dry_run { "would be " } else { "" };
        let bytes = if self.bytes > 0 {
            format!(" ({})", format_bytes(self.bytes))
        } else {
            String::new()
        };
        let mut text = format!(
            "{}: {} {would}{verb}{bytes}",
            count(self.objects, "object"),
            grouped(self.changed)
        );
        if self.unchanged > 0 {
            text.push_str(&format!(", {} {rest}", grouped(self.unchanged)));
        }
        if self.failed > 0 {
            text.push_str(&format!(", {} failed", grouped(self.failed)));
        }
        text
    }
}

async fn change(action: &str, what: Selection, common: &Common) -> Outcome {
    let prefixes = what
        .targets
        .iter()
        .map(|t| Prefix::parse(t))
        .collect::<Outcome<Vec<_>>>()?;
    let mut client = super::client(common)?;
    let mut total = Report {
        action: action.to_owned(),
        dry_run: what.dry_run,
        ..Report::default()
    };
    for p in &prefixes {
        let request = json!({"bucket": p.bucket, "prefix": p.prefix, "dry_run": what.dry_run});
        total.add(
            client
                .json(
                    Method::POST,
                    &format!("/v1/forebay/{action}"),
                    Some(&request),
                )
                .await?,
        );
    }
    let mut out = Out::new(common.json);
    if out.json {
        out.object(&total)?;
    } else {
        for error in &total.errors {
            let part = |name: &str| error[name].as_str().map(one_line).unwrap_or_default();
            eprintln!(
                "{} {}: {}/{}",
                out.style.red("failed:"),
                part("message"),
                part("bucket"),
                part("key")
            );
        }
        out.line(total.sentence())?;
        out.flush()?;
    }
    if total.failed > 0 {
        return Err(Failure::Reported);
    }
    if total.objects == 0 {
        let names: Vec<String> = prefixes.iter().map(Prefix::to_string).collect();
        return Err(Error::new(
            ErrorKind::NotFound,
            format!("nothing there: {}", names.join(", ")),
        )
        .hint("`forebay ls` lists what is there")
        .into());
    }
    Ok(())
}

#[derive(Deserialize)]
struct Pinned {
    pinned: Vec<Value>,
}

async fn list(common: &Common) -> Outcome {
    let mut client = super::client(common)?;
    let all: Pinned = client.json(Method::GET, "/v1/forebay/pinned", None).await?;
    let mut out = Out::new(common.json);
    for name in &all.pinned {
        if out.json {
            out.json_line(name)?;
        } else {
            out.line(format!(
                "{}/{}",
                name["bucket"].as_str().unwrap_or("?"),
                name["key"].as_str().map(one_line).unwrap_or_default()
            ))?;
        }
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_sentence() {
        let mut report = Report {
            action: "evict".into(),
            dry_run: true,
            objects: 1200,
            changed: 1000,
            unchanged: 200,
            bytes: 2048,
            ..Report::default()
        };
        assert_eq!(
            report.sentence(),
            "1,200 objects: 1,000 would be evicted (2.0 KiB), 200 not in the cache, or pinned"
        );
        report.add(Report {
            objects: 1,
            failed: 1,
            ..Report::default()
        });
        assert!(report.sentence().ends_with(", 1 failed"));
        assert!(report.sentence().starts_with("1,201 objects"));
    }
}
