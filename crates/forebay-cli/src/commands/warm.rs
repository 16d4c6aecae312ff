//! `forebay warm`: brings objects into the cache ahead of need, and reports exactly what came and
//! what did not.
//!
//! The node does the work and says how it goes in JSON lines; this end draws the bar. If this end
//! leaves, the node stops.

use crate::{
    cli::Common,
    client::{self, Client, Lines},
    fail::{Failure, Outcome, file_error, one_line},
    out::{Out, count, grouped},
    progress::Progress,
    target::Prefix,
};
use forebay_core::{Error, ErrorKind, units::format_bytes};
use http::{HeaderMap, HeaderValue, Method, header};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// What a node takes in one request.
const MANIFEST_MAX_BYTES: u64 = 48 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay warm data/train/
  forebay warm data/train/ --dry-run
  forebay warm --manifest epoch0.txt

A manifest names one object on each line, as bucket/key; empty lines and lines that begin with # are passed over.
What is there already, in its current version, is not fetched again. Ctrl-C stops the work; what came stays.
Exit code 1 if any object was missing, denied or failed.
JSON lines: {\"event\": \"object\", \"bucket\", \"key\", \"outcome\": \"missing\" | \"denied\" | \"failed\", \"message\"} for each object that did not come, then one
{\"event\": \"report\", \"dry_run\", \"objects\", \"warmed\", \"warmed_bytes\", \"already_there\", \"already_there_bytes\", \"missing\", \"denied\", \"failed\",
\"seconds\", \"error\"}; with --dry-run \"warmed\" is what would be fetched.")]
pub struct Args {
    /// Every object whose name begins so
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
    /// Objects fetched at the same time; the node's own limit is the most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency: Option<u32>,
}

/// The node's last line, and what `--json` prints at the end.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    event: String,
    dry_run: bool,
    objects: u64,
    warmed: u64,
    warmed_bytes: u64,
    already_there: u64,
    already_there_bytes: u64,
    missing: u64,
    denied: u64,
    failed: u64,
    seconds: f64,
    /// The listing broke off: the report is of the objects that were listed before.
    #[serde(default)]
    error: Option<String>,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let mut client = super::client(common)?;
    let (path, content_type, body, what) = request(&args).await?;
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    let mut out = Out::new(common.json);
    let report = follow(&mut client, &path, headers, body, &what, &mut out).await?;
    if out.json {
        out.json_line(&report)?;
        out.flush()?;
    } else {
        out.line(report.sentence())?;
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

async fn request(args: &Args) -> Outcome<(String, &'static str, client::RequestBody, String)> {
    let mut query = format!("/v1/forebay/warm?dry_run={}", args.dry_run);
    if let Some(n) = args.concurrency {
        query.push_str(&format!("&concurrency={n}"));
    }
    if let Some(target) = &args.target {
        let p = Prefix::parse(target)?;
        let body = client::json_body(&json!({"bucket": p.bucket, "prefix": p.prefix}));
        return Ok((query, "application/json", body, p.to_string()));
    }
    let file = args.manifest.as_deref().unwrap_or(Path::new("-"));
    let manifest = read_manifest(file).await?;
    let what = if file == Path::new("-") {
        "the manifest".to_owned()
    } else {
        file.display().to_string()
    };
    Ok((query, "text/plain", client::bytes_body(manifest), what))
}

async fn read_manifest(file: &Path) -> Outcome<Vec<u8>> {
    use tokio::io::AsyncReadExt;
    let failed = |e| Failure::Failed(file_error("cannot read", file, e));
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
            format!("a manifest of more than {max}: {}", file.display()),
        )
        .hint("cut it into parts")
        .into());
    }
    if text.iter().all(u8::is_ascii_whitespace) {
        return Err(
            Error::invalid(format!("the manifest is empty: {}", file.display()))
                .hint("one object on each line, as bucket/key")
                .into(),
        );
    }
    Ok(text)
}

/// Reads the node's lines until its report. An answer that ends without one is an error.
async fn follow(
    client: &mut Client,
    path: &str,
    headers: HeaderMap,
    body: client::RequestBody,
    what: &str,
    out: &mut Out,
) -> Outcome<Report> {
    let answer = client.ask(Method::POST, path, headers, body, what).await?;
    let mut lines = Lines::of(answer.into_body());
    let mut progress = Progress::objects("warm");
    while let Some(line) = lines.next().await? {
        let event: Value = serde_json::from_slice(&line)
            .map_err(|e| Error::corrupt(format!("a line that is not understood: {e}")).source(e))?;
        match event["event"].as_str() {
            Some("report") => {
                return serde_json::from_value(event).map_err(|e| {
                    Error::corrupt(format!("a report that is not understood: {e}"))
                        .source(e)
                        .into()
                });
            }
            Some("progress") => {
                let n = |name: &str| event[name].as_u64().unwrap_or(0);
                let total = (event["listing_done"] == true).then(|| n("listed"));
                progress.set(n("objects"), total, format_bytes(n("warmed_bytes")));
            }
            Some("object") if out.json => {
                out.json_line(&event)?;
                out.flush()?;
            }
            Some("object") => {
                let part = |name: &str| event[name].as_str().map(one_line).unwrap_or_default();
                progress.above(&format!(
                    "{} {}/{}: {}",
                    out.style.red(&format!("{}:", part("outcome"))),
                    part("bucket"),
                    part("key"),
                    part("message")
                ));
            }
            _ => {}
        }
    }
    Err(
        Error::corrupt(format!("the answer ended without a report: {what}"))
            .hint("the node's log says why; try again")
            .into(),
    )
}

impl Report {
    fn sentence(&self) -> String {
        let warmed = if self.dry_run {
            "to be fetched"
        } else {
            "warmed"
        };
        format!(
            "{} in {:.1} s: {} {warmed} ({}), {} already there ({}), {} missing, {} denied, {} \
             failed",
            count(self.objects, "object"),
            self.seconds,
            grouped(self.warmed),
            format_bytes(self.warmed_bytes),
            grouped(self.already_there),
            format_bytes(self.already_there_bytes),
            grouped(self.missing),
            grouped(self.denied),
            grouped(self.failed)
        )
    }
}
