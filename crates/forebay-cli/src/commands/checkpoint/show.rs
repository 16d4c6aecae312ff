//! `forebay checkpoint show`.

use super::{Told, called, list::JSON_SHAPE, manifest, now_ms, on_disk, place, sent, when};
use crate::{
    cli::Common,
    commands,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, grouped, pairs},
};
use forebay_core::{Error, units::format_bytes};
use forebay_stage::{Manifest, Status};
use serde::Serialize;
use std::time::Duration;
use tokio::time::timeout;

/// How long the bucket may take to say what readers see, if there is something to tell without it.
const BUCKET_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Examples:
  forebay checkpoint show s3://bucket/run/step-100
  forebay checkpoint show bucket/run/step-100 --files --json

Exit code 1 if neither the node's disk nor the bucket has a checkpoint of this name.
JSON: {{\"name\", \"here\": [one for each on the node's disk: {{{JSON_SHAPE}}}], \"bucket\": the manifest that \
readers see, or null: {{\"id\", \"saved_ms\", \"files\": [{{\"name\", \"size\", \"etag\"}}], \"last\", \
\"bytes\", \"meta\"}}, \"bucket_error\": why the bucket did not say, if it did not}}"))]
pub struct ShowArgs {
    /// The checkpoint
    #[arg(value_name = "BUCKET/NAME")]
    name: String,
    /// List the files that readers see
    #[arg(long)]
    files: bool,
}

#[derive(Serialize)]
struct Shown {
    name: String,
    here: Vec<Told>,
    bucket: Option<Manifest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket_error: Option<String>,
}

pub async fn run(args: ShowArgs, common: &Common) -> Outcome {
    let place = place(&args.name)?;
    let client = commands::client(common)?;
    let mut here = on_disk(&client).await?;
    here.retain(|s| s.bucket == place.bucket && s.prefix == place.prefix);
    let (bucket, bucket_error) = match here.is_empty() {
        true => (manifest(&client, &place).await?, None),
        // What is here is told also where the bucket does not answer: that may be why it is stuck.
        false => match timeout(BUCKET_WAIT, manifest(&client, &place)).await {
            Ok(Ok(bucket)) => (bucket, None),
            Ok(Err(Failure::Failed(e))) => (None, Some(one_line(e.message()))),
            Ok(Err(e)) => return Err(e),
            Err(_) => (
                None,
                Some(format!("no answer within {} s", BUCKET_WAIT.as_secs())),
            ),
        },
    };
    let now = now_ms();
    let told = |s: Status| {
        let visible = bucket.as_ref().is_some_and(|m| m.id == s.id);
        Told::of(s, bucket_error.is_none().then_some(visible), now)
    };
    let here: Vec<Told> = here.into_iter().map(told).collect();
    if here.is_empty() && bucket.is_none() {
        let what = format!("there is no checkpoint of this name: {place}");
        return Err(Error::not_found(what)
            .hint("`forebay checkpoint list BUCKET/PREFIX` shows which there are")
            .into());
    }
    let mut out = Out::new(common.json);
    let shown = Shown {
        name: called(&place.bucket, &place.prefix),
        here,
        bucket,
        bucket_error,
    };
    if out.json {
        return out.object(&shown);
    }
    out.line(format!("checkpoint  {}", shown.name))?;
    match &shown.bucket_error {
        Some(error) => out.line(format!("in bucket   not known: {error}"))?,
        None => {
            for line in of_bucket(shown.bucket.as_ref(), now) {
                out.line(line)?;
            }
        }
    }
    for one in &shown.here {
        out.line("")?;
        for line in of_disk(one, now) {
            out.line(line)?;
        }
    }
    if let (true, Some(manifest)) = (args.files, &shown.bucket) {
        out.line("")?;
        for file in &manifest.files {
            out.line(format!(
                "{:>20}  {}",
                grouped(file.size),
                one_line(&file.name)
            ))?;
        }
    }
    out.flush()
}

fn of_bucket(manifest: Option<&Manifest>, now_ms: i64) -> Vec<String> {
    let Some(m) = manifest else {
        return vec!["in bucket   none: readers see no checkpoint of this name".into()];
    };
    let mut rows = vec![
        ("in bucket ", m.id.clone()),
        ("saved", when(m.saved_ms, now_ms)),
        (
            "size",
            format!(
                "{} in {}",
                format_bytes(m.bytes),
                count(m.files.len() as u64, "file")
            ),
        ),
    ];
    if !m.meta.is_null() {
        rows.push(("meta", one_line(&m.meta.to_string())));
    }
    pairs(&rows)
}

fn of_disk(t: &Told, now_ms: i64) -> Vec<String> {
    let s = &t.status;
    let mut rows = vec![
        ("on disk   ", s.id.clone()),
        ("state", s.state.to_string()),
        (
            "size",
            format!(
                "{} in {}",
                format_bytes(s.bytes),
                count(s.files as u64, "file")
            ),
        ),
    ];
    if let Some(part) = &s.part {
        rows.insert(1, ("part", one_line(part)));
    }
    if s.staged && !s.durable {
        rows.push(("sent", sent(s)));
    }
    let times = [
        ("begun", s.begun_ms),
        ("staged", s.staged_ms),
        ("durable", s.durable_ms),
        ("deadline", s.deadline_ms),
    ];
    for (name, ms) in times {
        if ms > 0 {
            rows.push((name, when(ms, now_ms)));
        }
    }
    let kept = match (s.durable, s.staged) {
        (true, _) => "until its room is needed",
        (false, true) => "at least until it is durable",
        _ => "",
    };
    if !kept.is_empty() {
        rows.push(("kept", kept.into()));
    }
    if let Some(why) = &t.why {
        rows.push(("why", why.clone()));
    }
    pairs(&rows)
}
