//! `forebay pin`, `unpin`, `evict`: what the cache keeps and what it drops.

use super::warm::of_node;
use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, grouped, tell},
    target::Prefix,
};
use forebay_client::Call;
use forebay_core::{Error, ErrorKind, units::format_bytes};
use forebay_protocol::{
    PINNED_PATH,
    cache::{CacheAction, ChangeReport, Pinned, Selection},
};
use http::Method;

const JSON_SHAPE: &str = "JSON: {\"action\", \"dry_run\", \"objects\", \"changed\", \
    \"unchanged\", \"failed\", \"bytes\", \"mirror\", \
    \"errors\": [{\"bucket\", \"key\", \"message\"}], \
    \"nodes\": [{\"id\", \"name\", \"objects\", \"bytes\", \"already_there_bytes\", \
    \"failed\", \"error\"}]}";

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Examples:
  forebay pin data/val/
  forebay pin data/val/ --mirror 2
  forebay pin --list

Pinning fetches nothing (`forebay warm` does), except with --mirror.
Pinned objects may take up to half of the cache.
{JSON_SHAPE}
In a cluster, pins stay in force as nodes come and go.
With --list, JSON lines: {{\"bucket\", \"key\", \"mirror\", \"nodes\"}}"))]
#[command(mut_arg("targets", |targets| targets.required(false).required_unless_present("list")))]
pub struct PinArgs {
    #[command(flatten)]
    what: Targets,
    /// In a cluster, keep each object on so many nodes (2 or 3), in other zones first, and bring it
    /// there now
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    #[arg(conflicts_with = "this_node")]
    mirror: Option<u8>,
    /// List what is pinned; in a cluster, on any node
    #[arg(long, conflicts_with_all = ["targets", "dry_run", "mirror"])]
    list: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  forebay unpin data/val/\n\n{JSON_SHAPE}"))]
pub struct UnpinArgs {
    #[command(flatten)]
    what: Targets,
}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  forebay evict data/old/ --dry-run\n\nWhat is pinned \
    stays.\n{JSON_SHAPE}"))]
pub struct EvictArgs {
    #[command(flatten)]
    what: Targets,
}

#[derive(Debug, clap::Args)]
struct Targets {
    /// Objects by prefix: every object whose name begins with it
    #[arg(value_name = "BUCKET[/PREFIX]", required = true)]
    targets: Vec<String>,
    /// Say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// In a cluster, only the cache of the node that is asked
    #[arg(long)]
    this_node: bool,
}

pub async fn pin(args: PinArgs, common: &Common) -> Outcome {
    if args.list {
        list(args.what.this_node, common).await
    } else {
        change(CacheAction::Pin, args.what, args.mirror, common).await
    }
}

pub async fn unpin(args: UnpinArgs, common: &Common) -> Outcome {
    change(CacheAction::Unpin, args.what, None, common).await
}

pub async fn evict(args: EvictArgs, common: &Common) -> Outcome {
    change(CacheAction::Evict, args.what, None, common).await
}

fn add(total: &mut ChangeReport, other: ChangeReport) {
    total.objects += other.objects;
    total.changed += other.changed;
    total.unchanged += other.unchanged;
    total.failed += other.failed;
    total.bytes += other.bytes;
    total.mirror = total.mirror.or(other.mirror);
    total.errors.extend(other.errors);
    for node in other.nodes {
        match total.nodes.iter_mut().find(|n| n.id == node.id) {
            Some(sum) => {
                sum.objects += node.objects;
                sum.bytes += node.bytes;
                sum.failed += node.failed;
                sum.error = sum.error.take().or(node.error);
            }
            None => total.nodes.push(node),
        }
    }
}

fn sentence(report: &ChangeReport) -> String {
    let (verb, rest) = match report.action {
        CacheAction::Pin => ("pinned", "pinned already"),
        CacheAction::Unpin => ("unpinned", "were not pinned"),
        CacheAction::Evict => ("evicted", "not in the cache, or pinned"),
    };
    let would = if report.dry_run { "would be " } else { "" };
    let bytes = if report.bytes > 0 {
        format!(" ({})", format_bytes(report.bytes))
    } else {
        String::new()
    };
    let mut text = format!(
        "{}: {} {would}{verb}{bytes}",
        count(report.objects, "object"),
        grouped(report.changed)
    );
    if let Some(mirror) = report.mirror {
        let on = count(u64::from(mirror), "node");
        text.push_str(&format!(" on {on}"));
    }
    if report.unchanged > 0 {
        text.push_str(&format!(", {} {rest}", grouped(report.unchanged)));
    }
    if report.failed > 0 {
        text.push_str(&format!(", {} failed", grouped(report.failed)));
    }
    text
}

async fn change(
    action: CacheAction,
    what: Targets,
    mirror: Option<u8>,
    common: &Common,
) -> Outcome {
    let prefixes = what
        .targets
        .iter()
        .map(|t| Prefix::parse(t))
        .collect::<Outcome<Vec<_>>>()?;
    let client = super::client(common)?;
    let mut total = ChangeReport {
        action,
        dry_run: what.dry_run,
        ..ChangeReport::default()
    };
    let mut ended = Ok(());
    for p in &prefixes {
        let selection = Selection {
            bucket: p.bucket.clone(),
            prefix: Some(p.prefix.clone()),
            dry_run: what.dry_run,
            mirror,
            ..Selection::default()
        };
        let path = format!("{}{}", action.path(), scope(what.this_node));
        let call = Call::new(Method::POST, path).json(super::to_json(&selection)?);
        match super::json(&client, call).await {
            Ok(report) => add(&mut total, report),
            Err(e) if total.objects == 0 => return Err(e),
            Err(e) => {
                ended = Err(e);
                break;
            }
        }
    }
    // What was done is told, also if the rest failed.
    let mut out = Out::new(common.json);
    if out.json {
        out.object(&total)?;
    } else {
        for error in &total.errors {
            tell(format!(
                "{} {}: {}/{}",
                out.style.red("failed:"),
                one_line(&error.message),
                one_line(&error.bucket),
                one_line(&error.key)
            ));
        }
        out.line(sentence(&total))?;
        for node in &total.nodes {
            out.line(of_node(node, out.style))?;
        }
        out.flush()?;
    }
    ended?;
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

fn scope(this_node: bool) -> &'static str {
    match this_node {
        true => "?this_node=true",
        false => "",
    }
}

async fn list(this_node: bool, common: &Common) -> Outcome {
    let client = super::client(common)?;
    let path = format!("{PINNED_PATH}{}", scope(this_node));
    let all: Pinned = super::json(&client, Call::new(Method::GET, path)).await?;
    let mut out = Out::new(common.json);
    for name in &all.pinned {
        if out.json {
            out.json_line(name)?;
        } else {
            let on = name
                .mirror
                .map(|n| format!(" on {n} nodes"))
                .unwrap_or_default();
            out.line(format!("{}/{}{on}", name.bucket, one_line(&name.key)))?;
        }
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_sentence() {
        let mut report = ChangeReport {
            action: CacheAction::Evict,
            dry_run: true,
            objects: 1200,
            changed: 1000,
            unchanged: 200,
            bytes: 2048,
            ..ChangeReport::default()
        };
        assert_eq!(
            sentence(&report),
            "1,200 objects: 1,000 would be evicted (2.0 KiB), 200 not in the cache, or pinned"
        );
        let other = ChangeReport {
            objects: 1,
            failed: 1,
            ..ChangeReport::default()
        };
        add(&mut report, other);
        assert!(sentence(&report).ends_with(", 1 failed"));
        assert!(sentence(&report).starts_with("1,201 objects"));
    }
}
