//! `forebay index`: opens a dataset at the node, so that its rows have numbers, and describes it.
//!
//! The node does the work and reports progress in JSON lines; this end draws the bar. The node
//! keeps the index: a job that opens the same sources later finds it.

use crate::{
    cli::Common,
    fail::{self, Failure, Outcome, one_line},
    out::{Out, count, grouped, pairs},
    progress::Progress,
    target,
};
use forebay_client::{Call, Client, Lines};
use forebay_core::{Error, Format, units::format_bytes};
use forebay_protocol::{
    DATASETS_PATH,
    dataset::{DatasetSpec, Example, LabelSource, OnDamaged, OpenEvent, OpenedDataset},
    path::encode,
};
use http::Method;
use serde::Serialize;

/// How many columns are listed one by one.
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
    /// objects, tar, zip, tfrecord, parquet, arrow-file, arrow-stream, jsonl, csv, tsv, mds,
    /// megatron or litdata [default: from the names]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Labels of whole objects: path or path:LEVEL to use a directory of their names, or BUCKET/KEY
    /// of a CSV or JSONL with columns file and label
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
    let spec = spec(&args)?;
    let client = super::client(common)?;
    let mut out = Out::new(common.json);
    let what = args.sources.join(" ");
    let mut opened = Opened {
        opened: open(&client, &spec, &what).await?,
        manifest: None,
    };
    if let Some(name) = manifest {
        let path = format!(
            "{DATASETS_PATH}/{}/manifest?to={}",
            encode(&opened.opened.dataset.id),
            encode(&name.to_string())
        );
        client
            .call(&Call::new(Method::POST, path))
            .await
            .map_err(|f| Failure::of_call(f, &name.to_string()))?;
        opened.manifest = Some(name.to_string());
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

/// What the command prints with `--json`.
#[derive(Debug, Default, Serialize)]
struct Opened {
    #[serde(flatten)]
    opened: OpenedDataset,
    #[serde(skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
}

fn spec(args: &Args) -> Outcome<DatasetSpec> {
    let format = args.format.as_deref().map(Format::parse_loosely);
    Ok(DatasetSpec {
        sources: args.sources.clone(),
        format: format.transpose().map_err(Failure::Usage)?,
        labels: args.labels.as_deref().map(LabelSource::parse),
        example: Example::Flag(args.example),
        block_rows: args.block_rows,
        on_damaged: if args.skip_damaged {
            OnDamaged::Skip
        } else {
            OnDamaged::Error
        },
        ..DatasetSpec::default()
    })
}

/// Follows the node's lines to the last one.
async fn open(client: &Client, spec: &DatasetSpec, what: &str) -> Outcome<OpenedDataset> {
    let call = Call::new(Method::POST, format!("{DATASETS_PATH}?progress=true")).repeatable();
    let answer = client
        .call(&call.json(spec.json()))
        .await
        .map_err(|f| Failure::of_call(f, what))?;
    let mut lines = Lines::of(answer);
    let mut progress = Progress::objects("index");
    while let Some(line) = lines.next().await? {
        let event: OpenEvent = serde_json::from_slice(&line).map_err(|e| {
            let what = format!("the node sent a line that cannot be parsed: {e}");
            forebay_client::Failure::Malformed(Error::corrupt(what).caused_by(e))
        })?;
        match event {
            OpenEvent::Opened(opened) => return Ok(*opened),
            OpenEvent::Error(said) => return Err(fail::refused(&said, what).into()),
            OpenEvent::Progress(p) if p.to_index > 0 => {
                progress.set(p.indexed, Some(p.to_index), format_bytes(p.bytes));
            }
            OpenEvent::Progress(p) => progress.set(p.listed, None, "listed".into()),
            OpenEvent::Other => {}
        }
    }
    Err(
        Error::corrupt(format!("the answer ended before it was complete: {what}"))
            .hint("the node's log says why; try again")
            .into(),
    )
}

fn describe(opened: &Opened) -> Vec<String> {
    let (o, d) = (&opened.opened, &opened.opened.dataset);
    let mut rows = vec![
        ("dataset", d.id.clone()),
        ("format", d.format.clone()),
        ("rows", grouped(d.rows)),
        ("blocks", grouped(d.blocks)),
        (
            "files",
            format!("{} ({})", grouped(d.files), format_bytes(d.bytes)),
        ),
        (
            "index",
            format!(
                "{} read ({}), {} known; {:.2} s; {} in memory",
                count(o.indexed_files, "file"),
                format_bytes(o.indexed_bytes),
                grouped(o.reused_files),
                o.opened_ms / 1000.0,
                format_bytes(d.memory_bytes)
            ),
        ),
    ];
    if let Some(previous) = &o.previous {
        rows.push((
            "changed",
            format!("the files changed since the last opening, which was dataset {previous}"),
        ));
    }
    if o.skipped_files > 0 {
        rows.push((
            "left out",
            format!("{} (damaged)", count(o.skipped_files, "file")),
        ));
    }
    if o.unreadable_names > 0 {
        rows.push((
            "left out",
            format!(
                "{} that cannot be read through this node, as {:?}",
                count(o.unreadable_names, "name"),
                o.unreadable_name.as_deref().unwrap_or_default()
            ),
        ));
    }
    if let Some(name) = &opened.manifest {
        rows.push(("manifest", name.clone()));
    }
    let mut lines = pairs(&rows);
    for skipped in &o.skipped {
        lines.push(format!(
            "  left out: {}: {}",
            one_line(&skipped.name),
            one_line(&skipped.message)
        ));
    }
    lines.push(format!("columns ({})", d.schema.len()));
    for c in d.schema.iter().take(COLUMNS_TOLD) {
        let null = if c.nullable { "" } else { " not null" };
        lines.push(format!(
            "  {}: {}{null}",
            one_line(&c.name),
            one_line(&c.data_type)
        ));
    }
    if d.schema.len() > COLUMNS_TOLD {
        lines.push(format!("  and {} more", d.schema.len() - COLUMNS_TOLD));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args {
            sources: vec!["bk/x/".into(), "bk/y".into()],
            format: None,
            labels: None,
            example: false,
            block_rows: None,
            skip_damaged: false,
            write_manifest: None,
        }
    }

    #[test]
    fn options_become_a_description() {
        assert_eq!(
            spec(&args()).unwrap().json(),
            r#"{"sources":["bk/x/","bk/y"]}"#
        );
        let all = Args {
            format: Some("TFRecord".into()),
            labels: Some("path:2".into()),
            example: true,
            block_rows: Some(7),
            skip_damaged: true,
            ..args()
        };
        assert_eq!(
            spec(&all).unwrap().json(),
            r#"{"sources":["bk/x/","bk/y"],"format":"tfrecord","labels":{"from":"path","level":2},"on_damaged":"skip","example":true,"block_rows":7}"#
        );
        let unknown = Args {
            format: Some("rar".into()),
            ..args()
        };
        assert!(matches!(spec(&unknown), Err(Failure::Usage(e)) if e.message().contains("rar")));
    }
}
