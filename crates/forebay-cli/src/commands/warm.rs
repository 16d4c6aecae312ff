//! `forebay warm`: brings objects into the cache ahead of need, and reports exactly what was
//! fetched and what was not.
//!
//! The node does the work and reports progress in JSON lines; this end draws the bar. If this end
//! leaves, the node stops.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, grouped},
    progress::Progress,
    style::Style,
    target::Prefix,
};
use forebay_client::{Call, Client, Lines};
use forebay_core::{Error, ErrorKind, units::format_bytes};
use forebay_protocol::{
    WARM_PATH,
    cache::{NodeWork, Selection, WarmEvent, WarmReport},
};
use http::Method;
use std::path::{Path, PathBuf};

/// The most that a node takes in one request.
const MANIFEST_MAX_BYTES: u64 = 48 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay warm data/train/
  forebay warm data/train/ --dry-run
  forebay warm --manifest epoch0.txt

A manifest names one object on each line, as bucket/key; empty lines and lines that begin with # are passed over.
In a cluster, each node brings what it owns.
What is there already, in its current version, is not fetched again. Ctrl-C stops the work; what came stays.
Exit code 1 if any object was missing, denied or failed.
JSON lines: {\"event\": \"object\", \"bucket\", \"key\", \"outcome\": \"missing\" | \"denied\" | \"failed\", \"message\"} for each object that did not come, then one \
    {\"event\": \"report\", \"dry_run\", \"objects\", \"listed\", \"listing_done\", \"warmed\", \"warmed_bytes\", \"already_there\", \"already_there_bytes\", \
    \"missing\", \"denied\", \"failed\", \"bytes\", \"seconds\", \"error\", \"nodes\"}; with --dry-run \"warmed\" is what would be fetched.")]
pub struct Args {
    /// Every object whose name begins with it
    #[arg(
        value_name = "BUCKET[/PREFIX]",
        required_unless_present = "manifest",
        conflicts_with = "manifest"
    )]
    pub target: Option<String>,
    /// A file with the names of objects, or - for stdin
    #[arg(long, value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// Say what would be fetched, and fetch nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Objects fetched at the same time, up to the node's own limit
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency: Option<u32>,
    /// In a cluster, bring everything to the disk of the node that is asked
    #[arg(long)]
    pub this_node: bool,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let client = super::client(common)?;
    let (call, what) = request(&args).await?;
    let mut out = Out::new(common.json);
    let report = follow(&client, &call, &what, &mut out).await?;
    if out.json {
        out.json_line(&WarmEvent::Report(report.clone()))?;
        out.flush()?;
    } else {
        out.line(sentence(&report))?;
        for node in &report.nodes {
            out.line(of_node(node, out.style))?;
        }
        out.flush()?;
        if let Some(error) = &report.error {
            return Err(Error::new(ErrorKind::OriginUnavailable, one_line(error))
                .hint("what was listed before is in the report; run it again")
                .into());
        }
    }
    if report.objects == 0 && report.error.is_none() {
        return Err(Error::not_found(format!("nothing there: {what}"))
            .hint("`forebay ls` lists what is there")
            .into());
    }
    if report.missing + report.denied + report.failed > 0 || report.error.is_some() {
        Err(Failure::Reported)
    } else {
        Ok(())
    }
}

async fn request(args: &Args) -> Outcome<(Call, String)> {
    let mut query = format!("{WARM_PATH}?dry_run={}", args.dry_run);
    if args.this_node {
        query.push_str("&this_node=true");
    }
    if let Some(n) = args.concurrency {
        query.push_str(&format!("&concurrency={n}"));
    }
    if let Some(target) = &args.target {
        let p = Prefix::parse(target)?;
        let what = p.to_string();
        let selection = Selection {
            bucket: p.bucket,
            prefix: Some(p.prefix),
            ..Selection::default()
        };
        let call = Call::new(Method::POST, query)
            .repeatable()
            .json(super::to_json(&selection)?);
        return Ok((call, what));
    }
    let file = args.manifest.as_deref().unwrap_or(Path::new("-"));
    let manifest = read_manifest(file).await?;
    let what = if file == Path::new("-") {
        "the manifest".to_owned()
    } else {
        file.display().to_string()
    };
    let call = Call::new(Method::POST, query)
        .repeatable()
        .body("text/plain", manifest);
    Ok((call, what))
}

async fn read_manifest(file: &Path) -> Outcome<Vec<u8>> {
    use tokio::io::AsyncReadExt;
    let failed = |e| Failure::Failed(Error::file("cannot read", file, e));
    let source = if file == Path::new("-") {
        crate::out::std_stream(std::io::stdin()).map_err(failed)?
    } else {
        tokio::fs::File::open(file).await.map_err(failed)?
    };
    let mut text = Vec::new();
    source
        .take(MANIFEST_MAX_BYTES + 1)
        .read_to_end(&mut text)
        .await
        .map_err(failed)?;
    if text.len() as u64 > MANIFEST_MAX_BYTES {
        let max = format_bytes(MANIFEST_MAX_BYTES);
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("the manifest is larger than {max}: {}", file.display()),
        )
        .hint("split it into parts")
        .into());
    }
    if text.iter().all(u8::is_ascii_whitespace) {
        return Err(
            Error::invalid(format!("the manifest is empty: {}", file.display()))
                .hint("write one object on each line, as bucket/key")
                .into(),
        );
    }
    Ok(text)
}

/// Reads the node's lines until its report. An answer that ends without a report is an error.
async fn follow(client: &Client, call: &Call, what: &str, out: &mut Out) -> Outcome<WarmReport> {
    let answer = client.call(call).await;
    let mut lines = Lines::of(answer.map_err(|f| Failure::of_call(f, what))?);
    let mut progress = Progress::objects("warm");
    while let Some(line) = lines.next().await? {
        let event = serde_json::from_slice(&line).map_err(|e| {
            let what = format!("the node sent a line that cannot be parsed: {e}");
            forebay_client::Failure::Malformed(Error::corrupt(what).caused_by(e))
        })?;
        match event {
            WarmEvent::Report(report) => return Ok(report),
            WarmEvent::Progress(so_far) => {
                let total = so_far.listing_done.then_some(so_far.listed);
                progress.set(so_far.objects, total, format_bytes(so_far.warmed_bytes));
            }
            WarmEvent::Object(_) if out.json => {
                out.json_line(&event)?;
                out.flush()?;
            }
            WarmEvent::Object(object) => progress.above(&format!(
                "{} {}/{}: {}",
                out.style.red(&format!("{}:", object.outcome.as_str())),
                one_line(&object.bucket),
                one_line(&object.key),
                one_line(&object.message)
            )),
            WarmEvent::Other => {}
        }
    }
    Err(
        Error::corrupt(format!("the answer ended without a report: {what}"))
            .hint("the node's log says why; try again")
            .into(),
    )
}

/// What one node of a cluster did.
pub fn of_node(node: &NodeWork, style: Style) -> String {
    let called = if node.name.is_empty() {
        &node.id
    } else {
        &node.name
    };
    let mut text = format!("  {}: {}", one_line(called), count(node.objects, "object"));
    if node.bytes > 0 {
        text.push_str(&format!(", {}", format_bytes(node.bytes)));
    }
    if node.already_there_bytes > 0 {
        let there = format_bytes(node.already_there_bytes);
        text.push_str(&format!(", {there} already there"));
    }
    if node.failed > 0 {
        let why = node.error.as_deref().map(one_line).unwrap_or_default();
        let failed = format!(", {} not done: {why}", grouped(node.failed));
        text.push_str(&style.red(&failed));
    }
    text
}

fn sentence(report: &WarmReport) -> String {
    let warmed = if report.dry_run {
        "to be fetched"
    } else {
        "warmed"
    };
    format!(
        "{} in {:.1} s: {} {warmed} ({}), {} already there ({}), {} missing, {} denied, {} \
         failed",
        count(report.objects, "object"),
        report.seconds,
        grouped(report.warmed),
        format_bytes(report.warmed_bytes),
        grouped(report.already_there),
        format_bytes(report.already_there_bytes),
        grouped(report.missing),
        grouped(report.denied),
        grouped(report.failed)
    )
}
