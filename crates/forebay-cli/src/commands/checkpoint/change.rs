//! `forebay checkpoint wait`, `remove` and `keep`.

use super::{ask, called, durable, now_ms, on_disk, path_of, place, sent, why};
use crate::{
    cli::Common,
    commands,
    fail::{Failure, Outcome, one_line},
    out::{Out, count, duration, tell},
    target::Prefix,
};
use forebay_client::{Call, Client};
use forebay_core::{
    Error, ErrorKind,
    units::{format_bytes, parse_duration},
};
use forebay_stage::{Place, Status};
use http::Method;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// The longest that one request waits.
const ONE_WAIT: Duration = Duration::from_secs(20);
/// How much longer than `--timeout` an answer may take: a node answers when that is over.
const ANSWER_GRACE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Until {
    /// On the node's disk, synced
    Staged,
    /// In the bucket
    Durable,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  forebay checkpoint wait s3://bucket/run/step-100 --timeout 10m && sudo poweroff

Without --id it waits for the newest of the name that was committed. It goes on while the node is started \
    again. Exit code 1 if the time is over, or if it is given up meanwhile.
JSON: its status, as `forebay checkpoint list --json` has it")]
pub struct WaitArgs {
    /// The checkpoint
    #[arg(value_name = "BUCKET/NAME")]
    name: String,
    /// One of several of the name
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// What to wait for
    #[arg(long, value_enum, default_value = "durable")]
    until: Until,
    /// Wait no longer than this, and some seconds for a node that does not answer; as in 90s or 10m
    /// [default: as long as it takes]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    timeout: Option<Duration>,
}

pub async fn wait(args: WaitArgs, common: &Common) -> Outcome {
    let place = place(&args.name)?;
    let client = commands::client(common)?;
    let (began, mut id) = (Instant::now(), args.id);
    let (mut answered, mut has_it) = (None, None::<String>);
    let until = match args.until {
        Until::Staged => "staged",
        Until::Durable => "durable",
    };
    loop {
        let left = args.timeout.map(|t| t.saturating_sub(began.elapsed()));
        // First it is asked whether there is such a node, and what there is to wait for.
        let longest = answered.map_or(Duration::ZERO, |_| ONE_WAIT);
        let patience = left.unwrap_or(longest).min(longest);
        let patience = format!("{:.3}", patience.as_secs_f64());
        let mut query = vec![("until", until), ("wait_s", patience.as_str())];
        if let Some(id) = &id {
            query.push(("id", id.as_str()));
        }
        let call = Call::new(Method::GET, path_of(&place, &query));
        let moves = client.moves();
        let asked = ask::<Status>(&client, &place, call);
        let asked = match left {
            None => asked.await,
            Some(left) => match timeout(left.saturating_add(ANSWER_GRACE), asked).await {
                Ok(asked) => asked,
                Err(_) => {
                    return Err(Error::timeout(format!(
                        "{place}: the node does not answer; after {} it is not known whether it is \
                         {until}",
                        duration(began.elapsed().as_secs())
                    ))
                    .hint("see the node's log; if it has it, it goes on with it")
                    .into());
                }
            },
        };
        // Which node answered, if that is known.
        let by = (client.moves() == moves).then(|| client.route());
        let status = match asked {
            Ok(status) => status,
            Err(e) => {
                let is_over = left.is_some_and(|left| left.is_zero());
                // Another node, which answers meanwhile, does not know of it.
                let is_elsewhere = matches!(&e, Failure::Failed(e) if e.kind() == ErrorKind::NotFound)
                    && has_it.is_some()
                    && by != has_it;
                let may_come = |at: Instant| {
                    commands::may_be_back(&e, at)
                        || (is_elsewhere && at.elapsed() < commands::AWAY_MAX)
                };
                if is_over || !answered.is_some_and(may_come) {
                    return Err(e);
                }
                let pause = commands::LOOK_EVERY;
                tokio::time::sleep(left.unwrap_or(pause).min(pause)).await;
                continue;
            }
        };
        answered = Some(Instant::now());
        if status.local && by.is_some() {
            has_it = by;
        }
        let there = match args.until {
            Until::Staged => status.staged,
            Until::Durable => status.durable,
        };
        if there {
            return arrived(&place, &status, common);
        }
        if left.is_some_and(|left| left.is_zero()) {
            let why = why(&status, None, now_ms());
            return Err(Error::timeout(format!(
                "{place} is not {until} after {}: it is {}, and {} are in the bucket",
                duration(began.elapsed().as_secs()),
                status.state,
                sent(&status)
            ))
            .hint(why.unwrap_or_else(|| "wait longer: the node goes on with it".into()))
            .into());
        }
        // Another of the name may come meanwhile.
        id = Some(status.id);
    }
}

fn arrived(place: &Place, status: &Status, common: &Common) -> Outcome {
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(status);
    }
    let took = match status.durable_ms > 0 {
        true => format!(", {} after its commit", duration(status.seconds as u64)),
        false => String::new(),
    };
    out.line(format!(
        "{}  {}  {}{took}",
        called(&place.bucket, &place.prefix),
        status.state,
        format_bytes(status.bytes)
    ))?;
    out.flush()
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay checkpoint remove s3://bucket/run/step-100
  forebay checkpoint remove s3://bucket/run/step-200 --give-up    # is not durable, and will not be

One that is removed is gone whole: nobody sees half of it. To keep the newest of many, see \
    `forebay checkpoint keep`.
JSON lines: {\"name\", \"id\", \"part\", \"from\": \"bucket\" | \"disk\"}")]
pub struct RemoveArgs {
    /// The checkpoints
    #[arg(value_name = "BUCKET/NAME", required = true)]
    names: Vec<String>,
    /// One of several of the name
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Give up those of the name that are not durable, at the node that is asked: they will not
    /// become visible
    #[arg(long)]
    give_up: bool,
}

pub async fn remove(args: RemoveArgs, common: &Common) -> Outcome {
    let places = args.names.iter().map(|name| place(name));
    let places = places.collect::<Outcome<Vec<_>>>()?;
    if args.id.is_some() && places.len() > 1 {
        return Err(Failure::Usage(
            Error::invalid("--id is of one checkpoint").hint("give one name"),
        ));
    }
    let client = commands::client(common)?;
    let mut out = Out::new(common.json);
    for place in &places {
        let id = args.id.as_deref();
        if args.give_up {
            give_up(&client, place, id, &mut out).await?;
        } else {
            from_bucket(&client, place, id).await?;
            removed(&mut out, place, id, None, "bucket")?;
        }
    }
    out.flush()
}

async fn from_bucket(client: &Client, place: &Place, id: Option<&str>) -> Outcome {
    let mut query = vec![("durable", "true")];
    if let Some(id) = id {
        query.push(("id", id));
    }
    call(client, place, &query).await
}

async fn call(client: &Client, place: &Place, query: &[(&str, &str)]) -> Outcome {
    let call = Call::new(Method::DELETE, path_of(place, query));
    let answer = client.call(&call).await;
    answer.map_err(|f| Failure::of_call(f, &place.to_string()))?;
    Ok(())
}

async fn give_up(client: &Client, place: &Place, id: Option<&str>, out: &mut Out) -> Outcome {
    let here = on_disk(client).await?;
    let mine = here.into_iter().filter(|s| {
        s.bucket == place.bucket
            && s.prefix == place.prefix
            && !s.durable
            && s.state != "removing"
            && id.is_none_or(|id| s.id == id)
    });
    let mine: Vec<Status> = mine.collect();
    if mine.is_empty() {
        let what = format!("nothing of this name is on its way at this node: {place}");
        return Err(Error::not_found(what)
            .hint("`forebay checkpoint list --pending` shows what is; ask the node that has it")
            .into());
    }
    for status in &mine {
        let mut query = vec![("id", status.id.as_str())];
        if let Some(part) = &status.part {
            query.push(("part", part.as_str()));
        }
        call(client, place, &query).await?;
        removed(out, place, Some(&status.id), status.part.as_deref(), "disk")?;
    }
    Ok(())
}

fn removed(
    out: &mut Out,
    place: &Place,
    id: Option<&str>,
    part: Option<&str>,
    from: &str,
) -> Outcome {
    let name = called(&place.bucket, &place.prefix);
    if out.json {
        return out.json_line(&json!({"name": name, "id": id, "part": part, "from": from}));
    }
    let what = match from {
        "disk" => "given up",
        _ => "removed",
    };
    let id = id.map_or(String::new(), |id| format!("  {id}"));
    let part = part.map_or(String::new(), |part| format!("  part {}", one_line(part)));
    out.line(format!("{what}  {name}{id}{part}"))
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay checkpoint keep s3://bucket/run --last 3
  forebay checkpoint keep s3://bucket/run --pattern 'step-*' --max-age 7d --dry-run

Only durable checkpoints directly below the prefix count, and the newest of them always stays. One that \
    somebody else removes or replaces meanwhile is passed over.
JSON: {\"dry_run\", \"kept\": [NAME], \"removed\": [{\"name\", \"id\", \"bytes\", \"saved_ms\"}]}")]
#[command(group(clap::ArgGroup::new("rule").required(true).multiple(true).args(["last", "max_age"])))]
pub struct KeepArgs {
    /// What comes before their last name
    #[arg(value_name = "BUCKET[/PREFIX]")]
    target: String,
    /// So many of the newest stay
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    last: Option<u64>,
    /// Those that were saved longer ago than this go, as in 36h or 7d
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    max_age: Option<Duration>,
    /// Only those whose last name is like this; * is any text, ? any character
    #[arg(long, value_name = "PATTERN", default_value = "*")]
    pattern: String,
    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

pub async fn keep(args: KeepArgs, common: &Common) -> Outcome {
    let of = Prefix::parse(&args.target)?;
    if args.pattern.contains(['[', ']', '{', '}', '/']) {
        return Err(Failure::Usage(
            Error::invalid(format!("--pattern {:?}", args.pattern))
                .hint("the last part of their names, where * and ? stand for others"),
        ));
    }
    let client = commands::client(common)?;
    let found = durable(&client, &of).await?;
    let last_name = |place: &Place| match place.prefix.rsplit_once('/') {
        Some((_, last)) => last.to_owned(),
        None => place.prefix.clone(),
    };
    let is_meant = |place: &Place| is_like(&last_name(place), &args.pattern);
    let mine: Vec<_> = found.iter().filter(|(place, _)| is_meant(place)).collect();
    let now = now_ms();
    let (mut kept, mut gone) = (Vec::new(), Vec::new());
    for (rank, (place, manifest)) in mine.iter().rev().enumerate() {
        let age = Duration::from_millis(now.saturating_sub(manifest.saved_ms).max(0) as u64);
        let goes = args.last.is_some_and(|last| rank as u64 >= last)
            || args.max_age.is_some_and(|most| age > most);
        // The newest always stays.
        if rank > 0 && goes {
            gone.push((place, manifest));
        } else {
            kept.push(place);
        }
    }
    // The oldest first.
    gone.reverse();
    let mut out = Out::new(common.json);
    let (mut removed, mut ended) = (Vec::new(), Ok(()));
    for (place, manifest) in gone {
        if !args.dry_run {
            match from_bucket(&client, place, Some(&manifest.id)).await {
                // Somebody else has removed it, or is replacing it.
                Err(Failure::Failed(e))
                    if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Conflict) =>
                {
                    tell(format!("passed over: {}", one_line(e.message())));
                    continue;
                }
                Err(e) if removed.is_empty() => return Err(e),
                Err(e) => {
                    ended = Err(e);
                    break;
                }
                Ok(()) => {}
            }
        }
        if !out.json {
            let name = called(&place.bucket, &place.prefix);
            out.line(format!("{name}  {}", format_bytes(manifest.bytes)))?;
            out.flush()?;
        }
        removed.push((place, manifest));
    }
    let name = |place: &Place| called(&place.bucket, &place.prefix);
    if out.json {
        let removed: Vec<_> = removed
            .iter()
            .map(|(place, m)| {
                json!({"name": name(place), "id": m.id, "bytes": m.bytes, "saved_ms": m.saved_ms})
            })
            .collect();
        let kept: Vec<_> = kept.iter().map(|place| name(place)).collect();
        out.object(&json!({"dry_run": args.dry_run, "kept": kept, "removed": removed}))?;
        return ended;
    }
    let would = if args.dry_run { " would be" } else { "" };
    let bytes: u64 = removed.iter().map(|(_, m)| m.bytes).sum();
    out.line(format!(
        "{}{would} removed ({}), {} kept",
        count(removed.len() as u64, "checkpoint"),
        format_bytes(bytes),
        kept.len()
    ))?;
    out.flush()?;
    ended
}

/// Whether a name is like a pattern of `*` and `?`.
fn is_like(name: &str, pattern: &str) -> bool {
    let (name, pattern): (Vec<char>, Vec<char>) =
        (name.chars().collect(), pattern.chars().collect());
    // Where a later star matched last, and what it took.
    let (mut n, mut p, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => {
                n += 1;
                p += 1;
            }
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    (p, n) = (at + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (name, pattern, is) in [
            ("step-1", "*", true),
            ("step-1", "step-*", true),
            ("step-", "step-*", true),
            ("best", "step-*", false),
            ("step-12", "step-?", false),
            ("step-12", "*-??", true),
            ("a-b-c", "a*b*c", true),
            ("a-b-cd", "a*b*c", false),
            ("", "*", true),
            ("", "?", false),
            ("aab", "*ab", true),
        ] {
            assert_eq!(is_like(name, pattern), is, "{name} {pattern}");
        }
    }
}
