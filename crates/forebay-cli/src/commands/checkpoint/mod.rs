//! `forebay checkpoint`: what is staged on a node's disk, what is durable in the bucket, and why
//! one is stuck.
//!
//! The node says what is on its disk; manifests, which it reads from the bucket, say what everybody
//! sees there.

mod change;
mod list;
mod show;

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::{count, duration, tell, utc},
    target::Prefix,
};
use forebay_client::{Call, Client, Failure as Failed};
use forebay_core::{Error, ErrorKind, units::format_bytes};
use forebay_protocol::{
    BUCKETS_PATH, CHECKPOINTS_PATH,
    listing::{IS_DIR, ListMessage, ONE_LEVEL, Page, Request},
    path::{encode, encode_key},
};
use forebay_stage::{Manifest, Place, Status};
use futures::{StreamExt, TryStreamExt, stream};
use http::Method;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Manifests that are read at the same time.
const AT_ONCE: usize = 8;
const PAGE_KEYS: i64 = 1000;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List what is staged on the node's disk, and what is durable below a prefix
    List(list::ListArgs),
    /// Show all that is known of a checkpoint, and why it is stuck
    Show(show::ShowArgs),
    /// Wait until a checkpoint is durable
    Wait(change::WaitArgs),
    /// Remove durable checkpoints from their bucket, or give up what is on its way
    Remove(change::RemoveArgs),
    /// Keep the newest durable checkpoints below a prefix, and remove the others
    Keep(change::KeepArgs),
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    match args.command {
        Command::List(args) => list::run(args, common).await,
        Command::Show(args) => show::run(args, common).await,
        Command::Wait(args) => change::wait(args, common).await,
        Command::Remove(args) => change::remove(args, common).await,
        Command::Keep(args) => change::keep(args, common).await,
    }
}

/// A checkpoint's name.
fn place(text: &str) -> Outcome<Place> {
    let Prefix { bucket, prefix } = Prefix::parse(text)?;
    Place::new(&bucket, prefix.trim_matches('/')).map_err(Failure::Usage)
}

/// The same, as it is shown.
fn called(bucket: &str, prefix: &str) -> String {
    one_line(&format!("s3://{bucket}/{prefix}"))
}

/// The path of a request about a checkpoint.
fn path_of(place: &Place, query: &[(&str, &str)]) -> String {
    let (bucket, prefix) = (encode(&place.bucket), encode_key(&place.prefix));
    let mut path = format!("{CHECKPOINTS_PATH}/{bucket}/{prefix}");
    for (at, (name, value)) in query.iter().enumerate() {
        let mark = if at == 0 { '?' } else { '&' };
        path.push_str(&format!("{mark}{name}={}", encode(value)));
    }
    path
}

/// Makes a call about a checkpoint that returns JSON.
async fn ask<T: DeserializeOwned>(client: &Client, place: &Place, call: Call) -> Outcome<T> {
    let answer = client.call(&call).await;
    let mut answer = answer.map_err(|f| Failure::of_call(f, &place.to_string()))?;
    Ok(answer.json().await?)
}

/// What is on the node's disk, as far as the caller may read it.
async fn on_disk(client: &Client) -> Outcome<Vec<Status>> {
    #[derive(Deserialize)]
    struct Listed {
        checkpoints: Vec<Status>,
    }
    let call = Call::new(Method::GET, CHECKPOINTS_PATH);
    let listed: Listed = super::json(client, call).await?;
    Ok(listed.checkpoints)
}

/// The manifest that the bucket has of a name; `None`: none.
async fn manifest(client: &Client, place: &Place) -> Outcome<Option<Manifest>> {
    let path = path_of(place, &[("manifest", "true"), ("durable", "true")]);
    let call = Call::new(Method::GET, path);
    match client.call(&call).await {
        Ok(mut answer) => Ok(Some(answer.json().await?)),
        Err(Failed::Refused(said)) if said.kind() == ErrorKind::NotFound => Ok(None),
        Err(failure) => Err(Failure::of_call(failure, &place.to_string())),
    }
}

/// The durable checkpoints directly below a prefix, the oldest first. Folders with something else
/// called `manifest.json` are passed over, and named on stderr.
async fn durable(client: &Client, of: &Prefix) -> Outcome<Vec<(Place, Manifest)>> {
    let mut places = Vec::new();
    for folder in folders(client, of).await? {
        // What cannot be a checkpoint's name is none.
        places.extend(Place::new(&of.bucket, &folder).ok());
    }
    let read = stream::iter(places).map(|place| async move {
        match manifest(client, &place).await {
            Ok(found) => Ok(found.map(|m| (place, m))),
            Err(Failure::Failed(e))
                if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) =>
            {
                tell(format!("passed over: {}", one_line(e.message())));
                Ok(None)
            }
            Err(e) => Err(e),
        }
    });
    let found: Vec<Option<(Place, Manifest)>> = read.buffered(AT_ONCE).try_collect().await?;
    let mut found: Vec<(Place, Manifest)> = found.into_iter().flatten().collect();
    found.sort_by_key(|(_, manifest)| manifest.saved_ms);
    Ok(found)
}

/// The names one level below a prefix that stand for deeper levels, without the slash at their end.
async fn folders(client: &Client, of: &Prefix) -> Outcome<Vec<String>> {
    let under = match of.prefix.trim_matches('/') {
        "" => String::new(),
        prefix => format!("{prefix}/"),
    };
    let (mut token, mut found) = (String::new(), Vec::new());
    loop {
        let request = Request::page(ListMessage {
            prefix: under.clone(),
            pagesize: PAGE_KEYS,
            continuation_token: token.clone(),
            flags: ONE_LEVEL.into(),
            ..ListMessage::default()
        });
        let call = Call::new(Method::GET, format!("{BUCKETS_PATH}/{}", of.bucket));
        let page: Page = super::json(client, call.json(request.json())).await?;
        let dirs = page.entries.iter().filter(|entry| entry.is(IS_DIR));
        found.extend(dirs.map(|entry| entry.name.trim_end_matches('/').to_owned()));
        if page.continuation_token.is_empty() {
            return Ok(found);
        }
        if page.continuation_token == token {
            return Err(Error::corrupt(format!("the listing does not advance: {of}")).into());
        }
        token = page.continuation_token;
    }
}

fn now_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

/// How long ago something was, or how long it takes until then.
fn apart(a_ms: i64, b_ms: i64) -> String {
    duration(a_ms.abs_diff(b_ms) / 1000)
}

/// A checkpoint, as `list` and `show` tell of it.
#[derive(Debug, Serialize)]
struct Told {
    /// `s3://bucket/prefix`.
    name: String,
    #[serde(flatten)]
    status: Status,
    /// Whether it is what readers of the bucket see; `None`: nobody looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    visible: Option<bool>,
    /// Since it was saved, or begun.
    age_seconds: f64,
    /// Why it is not durable, or what keeps it on the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl Told {
    fn of(status: Status, visible: Option<bool>, now_ms: i64) -> Told {
        let since = match status.staged_ms {
            0 => status.begun_ms,
            ms => ms,
        };
        Told {
            name: called(&status.bucket, &status.prefix),
            visible,
            age_seconds: (now_ms - since).max(0) as f64 / 1e3,
            why: why(&status, visible, now_ms),
            status,
        }
    }
}

/// What the bucket has, as a status.
fn at_bucket(place: &Place, manifest: &Manifest) -> Status {
    Status {
        bucket: place.bucket.clone(),
        prefix: place.prefix.clone(),
        id: manifest.id.clone(),
        state: "durable".into(),
        staged: true,
        durable: true,
        files: manifest.files.len(),
        bytes: manifest.bytes,
        bytes_at_origin: manifest.bytes,
        staged_ms: manifest.saved_ms,
        meta: manifest.meta.clone(),
        ..Status::default()
    }
}

/// Why a checkpoint is not durable, in words.
fn why(s: &Status, visible: Option<bool>, now_ms: i64) -> Option<String> {
    let error = s.error.as_deref().map(one_line);
    let mut said = Vec::new();
    match &*s.state {
        "staging" if s.expires_ms > 0 => said.push(format!(
            "its writer has not committed it; it is given up in {} if nothing more is heard of it",
            apart(s.expires_ms.max(now_ms), now_ms)
        )),
        "staging" => said.push("its writer is about to commit it".into()),
        "staged" => said.push(match &s.waits_for {
            Some(id) => format!("it waits for another of its name, {id}"),
            None => "it waits for its turn".into(),
        }),
        "flushing" => match (error, s.failures) {
            (Some(error), 0) => said.push(error),
            (Some(error), n) => said.push(format!(
                "{} failed and another is going on: {error}",
                count(n.into(), "attempt")
            )),
            (None, _) => {}
        },
        "failed" => said.push(format!(
            "{} failed; the next one begins in {}: {}",
            count(s.failures.into(), "attempt"),
            apart(s.retry_ms.max(now_ms), now_ms),
            error.unwrap_or_default()
        )),
        "removing" => said.push(match error {
            Some(error) => format!(
                "what the bucket has of it could not be removed, and that is tried again: {error}"
            ),
            None => "what the bucket has of it is being removed".into(),
        }),
        "durable" if visible == Some(false) => said.push(
            "the bucket does not have it any more: it was replaced or removed; the copy on the disk \
             goes when its room is needed"
                .into(),
        ),
        _ => {}
    }
    if s.late {
        said.push(format!(
            "it was to be durable {} ago",
            apart(now_ms, s.deadline_ms)
        ));
    }
    (!said.is_empty()).then(|| said.join("; "))
}

/// `12.0 MiB of 96.0 MiB, 13 %`.
fn sent(s: &Status) -> String {
    let share = match s.bytes {
        0 => 0.0,
        bytes => s.bytes_at_origin as f64 / bytes as f64 * 100.0,
    };
    format!(
        "{} of {}, {share:.0} %",
        format_bytes(s.bytes_at_origin),
        format_bytes(s.bytes)
    )
}

/// `2026-08-01 12:00:00Z, 3 min ago`.
fn when(ms: i64, now_ms: i64) -> String {
    match ms > now_ms {
        true => format!("{}, in {}", utc(ms), apart(ms, now_ms)),
        false => format!("{}, {} ago", utc(ms), apart(now_ms, ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: &'static str) -> Status {
        Status {
            bucket: "bk".into(),
            prefix: "run/1".into(),
            state: state.into(),
            ..Status::default()
        }
    }

    #[test]
    fn it_is_told_why_one_is_not_durable() {
        let now = 10_000_000;
        let why = |s: Status| why(&s, None, now).unwrap_or_default();
        assert_eq!(why(status("durable")), "");
        assert_eq!(why(status("flushing")), "");
        let staging = Status {
            expires_ms: now + 90_000,
            ..status("staging")
        };
        assert!(why(staging).contains("given up in 1 min"));
        let staged = Status {
            waits_for: Some("00ff".into()),
            ..status("staged")
        };
        assert!(why(staged).contains("another of its name, 00ff"));
        let failed = Status {
            failures: 3,
            error: Some("403\nno".into()),
            retry_ms: now + 8000,
            late: true,
            deadline_ms: now - 61_000,
            ..status("failed")
        };
        assert_eq!(
            why(failed),
            "3 attempts failed; the next one begins in 8 s: 403 no; it was to be durable 1 min ago"
        );
        let elsewhere = Status {
            error: Some("another node has not sent it yet".into()),
            ..status("flushing")
        };
        assert_eq!(why(elsewhere), "another node has not sent it yet");
        let gone = super::why(&status("durable"), Some(false), now);
        assert!(gone.unwrap().contains("replaced or removed"));
    }

    #[test]
    fn names_and_paths() {
        let of = place("s3://bk/run/a b/").unwrap();
        assert_eq!((&*of.bucket, &*of.prefix), ("bk", "run/a b"));
        assert_eq!(
            path_of(&of, &[("id", "00ff"), ("until", "durable")]),
            "/v1/checkpoints/bk/run/a%20b?id=00ff&until=durable"
        );
        for bad in ["bk", "bk/", "", "/x", "http://bk/x"] {
            assert!(place(bad).is_err(), "{bad}");
        }
    }
}
