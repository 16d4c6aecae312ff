//! `forebay index`: opens a dataset at the node, so that its rows have numbers, and says what it
//! is.
//!
//! The node does the work and says how it goes in JSON lines; this end draws the bar. What was
//! indexed is kept by the node: a job that opens the same sources later finds it.

use crate::{
    cli::Common,
    client::{self, Client, Lines},
    fail::{Failure, Outcome, one_line},
    out::{Out, count, grouped, pairs},
    progress::Progress,
    target,
};
use forebay_core::{Error, units::format_bytes};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};

/// Columns that are told one by one.
const COLUMNS_TOLD: usize = 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay index 's3://data/c4/**.parquet'
  forebay index 'data/shards/train-{000000..001281}.tar'
  forebay index data/imagenet/train/ --format objects --labels path
  forebay index 'data/c4/**.parquet' --write-manifest data/c4.manifest
  forebay index manifest:data/c4.manifest

In a pattern * and ? stop at a slash, ** does not; {a,b} and {000..127} are expanded; a name that ends in / stands for everything below it.
Footers, headers and directories are read, never the data. Files that have not changed since the last time are not read again.")]
pub struct Args {
    /// Names or patterns, in the order in which their rows are numbered
    #[arg(value_name = "BUCKET/PATTERN", required = true)]
    pub sources: Vec<String>,
    /// objects, tar, zip, tfrecord, parquet, arrow-file, arrow-stream or jsonl [default: by the
    /// names]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Labels of whole objects: path or path:LEVEL for a directory of their names, or BUCKET/KEY of
    /// a CSV or JSONL with columns file and label
    #[arg(long, value_name = "WHERE")]
    pub labels: Option<String>,
    /// Decode TFRecords as tf.train.Example
    #[arg(long)]
    pub example: bool,
    /// Rows in a block, for formats without blocks of their own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub block_rows: Option<u32>,
    /// Leave damaged files out instead of failing
    #[arg(long)]
    pub skip_damaged: bool,
    /// Write the names, sizes and versions of the files into an object, which later openings read
    /// instead of listing
    #[arg(long, value_name = "BUCKET/KEY")]
    pub write_manifest: Option<String>,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let manifest = args
        .write_manifest
        .as_deref()
        .map(target::object)
        .transpose()?;
    let mut client = super::client(common)?;
    let mut out = Out::new(common.json);
    let what = args.sources.join(" ");
    let mut opened = open(&mut client, spec(&args), &what).await?;
    if let Some(name) = manifest {
        let id = opened["id"].as_str().unwrap_or_default();
        let path = format!(
            "/v1/datasets/{id}/manifest?to={}",
            client::encode(&name.to_string())
        );
        client
            .ask(
                Method::POST,
                &path,
                HeaderMap::new(),
                client::bytes_body(Vec::new()),
                &name.to_string(),
            )
            .await?;
        opened["manifest"] = name.to_string().into();
    }
    if out.json {
        out.object(&opened)?;
    } else {
        for line in describe(&opened) {
            out.line(line)?;
        }
    }
    out.flush()?;
    Ok(())
}

fn spec(args: &Args) -> Value {
    let mut spec = json!({"sources": args.sources});
    if let Some(format) = &args.format {
        spec["format"] = format.as_str().into();
    }
    spec["labels"] = match args.labels.as_deref() {
        None => Value::Null,
        Some("path") => json!({"from": "path"}),
        Some(text) => match text.strip_prefix("path:").map(str::parse::<u32>) {
            Some(Ok(level)) => json!({"from": "path", "level": level}),
            _ => json!({"from": "file", "name": text}),
        },
    };
    if args.example {
        spec["example"] = true.into();
    }
    if let Some(rows) = args.block_rows {
        spec["block_rows"] = rows.into();
    }
    if args.skip_damaged {
        spec["on_damaged"] = "skip".into();
    }
    spec
}

/// Follows the node's lines to the last one.
async fn open(client: &mut Client, spec: Value, what: &str) -> Outcome<Value> {
    let mut headers = HeaderMap::new();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    let answer = client
        .ask(
            Method::POST,
            "/v1/datasets?progress=true",
            headers,
            client::json_body(&spec),
            what,
        )
        .await?;
    let mut lines = Lines::of(answer.into_body());
    let mut progress = Progress::objects("index");
    while let Some(line) = lines.next().await? {
        let event: Value = serde_json::from_slice(&line)
            .map_err(|e| Error::corrupt(format!("a line that is not understood: {e}")).source(e))?;
        let n = |name: &str| event[name].as_u64().unwrap_or(0);
        match event["event"].as_str() {
            Some("opened") => return Ok(event),
            Some("error") => {
                let status = u16::try_from(n("status"))
                    .ok()
                    .and_then(|s| StatusCode::from_u16(s).ok());
                let kind =
                    client::kind_of(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), None);
                let error = Error::new(
                    kind,
                    one_line(event["message"].as_str().unwrap_or("the opening failed")),
                );
                return Err(Failure::Failed(match event["hint"].as_str() {
                    Some(hint) => error.hint(hint),
                    None => error,
                }));
            }
            Some("progress") if n("to_index") > 0 => {
                progress.set(n("indexed"), Some(n("to_index")), format_bytes(n("bytes")));
            }
            Some("progress") => progress.set(n("listed"), None, "listed".into()),
            _ => {}
        }
    }
    Err(
        Error::corrupt(format!("the answer ended without an end: {what}"))
            .hint("the node's log says why; try again")
            .into(),
    )
}

fn describe(opened: &Value) -> Vec<String> {
    let n = |name: &str| opened[name].as_u64().unwrap_or(0);
    let text = |name: &str| opened[name].as_str().unwrap_or_default().to_owned();
    let mut rows = vec![
        ("dataset", text("id")),
        ("format", text("format")),
        ("rows", grouped(n("rows"))),
        ("blocks", grouped(n("blocks"))),
        (
            "files",
            format!("{} ({})", grouped(n("files")), format_bytes(n("bytes"))),
        ),
        (
            "index",
            format!(
                "{} read ({}), {} known; {:.2} s; {} in memory",
                count(n("indexed_files"), "file"),
                format_bytes(n("indexed_bytes")),
                grouped(n("reused_files")),
                opened["opened_ms"].as_f64().unwrap_or(0.0) / 1000.0,
                format_bytes(n("memory_bytes"))
            ),
        ),
    ];
    if let Some(previous) = opened["previous"].as_str() {
        rows.push((
            "changed",
            format!("the files are others than at the last opening, which was dataset {previous}"),
        ));
    }
    if n("skipped_files") > 0 {
        rows.push((
            "left out",
            format!("{} (damaged)", count(n("skipped_files"), "file")),
        ));
    }
    if n("unreadable_names") > 0 {
        rows.push((
            "left out",
            format!(
                "{} that cannot be read through this node, as {:?}",
                count(n("unreadable_names"), "name"),
                text("unreadable_name")
            ),
        ));
    }
    if let Some(name) = opened["manifest"].as_str() {
        rows.push(("manifest", name.to_owned()));
    }
    let mut lines = pairs(&rows);
    for skipped in opened["skipped"].as_array().into_iter().flatten() {
        lines.push(format!(
            "  left out: {}: {}",
            skipped["name"].as_str().unwrap_or_default(),
            one_line(skipped["message"].as_str().unwrap_or_default())
        ));
    }
    let columns = opened["schema"].as_array().cloned().unwrap_or_default();
    lines.push(format!("columns ({})", columns.len()));
    for c in columns.iter().take(COLUMNS_TOLD) {
        let null = if c["nullable"] == true {
            ""
        } else {
            " not null"
        };
        lines.push(format!(
            "  {}: {}{null}",
            c["name"].as_str().unwrap_or_default(),
            one_line(c["type"].as_str().unwrap_or_default())
        ));
    }
    if columns.len() > COLUMNS_TOLD {
        lines.push(format!("  and {} more", columns.len() - COLUMNS_TOLD));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_each_kind() {
        let of = |labels: &str| {
            let args = Args {
                sources: vec!["bk/x/".into()],
                format: None,
                labels: Some(labels.into()),
                example: false,
                block_rows: None,
                skip_damaged: false,
                write_manifest: None,
            };
            spec(&args)["labels"].clone()
        };
        assert_eq!(of("path"), json!({"from": "path"}));
        assert_eq!(of("path:2"), json!({"from": "path", "level": 2}));
        assert_eq!(of("bk/l.csv"), json!({"from": "file", "name": "bk/l.csv"}));
    }
}
