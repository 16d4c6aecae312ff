//! `forebay checkpoint list`.

use super::{Told, at_bucket, durable, now_ms, on_disk, sent};
use crate::{
    cli::Common,
    commands,
    fail::{Outcome, one_line},
    out::{Out, duration, tell},
    style::Style,
    target::Prefix,
};
use forebay_core::{Error, units::format_bytes};
use forebay_stage::Status;
use std::collections::HashMap;

pub(super) const JSON_SHAPE: &str = "\
\"name\", \"bucket\", \"prefix\", \"id\", \"part\", \"state\": \"staging\" | \"staged\" | \
\"flushing\" | \"failed\" | \"durable\" | \"removing\", \"staged\", \"durable\", \"files\", \"bytes\", \
\"bytes_at_origin\", \"local\": whether the node's disk has it, \"visible\": whether readers of the \
bucket see it, \"begun_ms\", \"staged_ms\", \"durable_ms\", \"seconds\", \"deadline_ms\", \"late\", \
\"failures\", \"error\", \"retry_ms\", \"waits_for\", \"expires_ms\", \"meta\", \"age_seconds\", \"why\"";

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Examples:
  forebay checkpoint list                     what is on the node's disk
  forebay checkpoint list s3://bucket/run     and what is durable as s3://bucket/run/NAME
  forebay checkpoint list --pending           what is not durable, and why

States: staging (its files arrive), staged (on disk, and waits), flushing (on its way), failed (and tried \
    again), durable (in the bucket), removing. A * marks what is on the node's disk. Nodes do not \
    know what others have staged: ask the one that the job writes to.
JSON lines: {{{JSON_SHAPE}}}"))]
pub struct ListArgs {
    /// Only checkpoints of this bucket, or below this prefix; those directly below it are looked
    /// for in the bucket too
    #[arg(value_name = "BUCKET[/PREFIX]")]
    target: Option<String>,
    /// Only those that are not durable
    #[arg(long)]
    pending: bool,
}

pub async fn run(args: ListArgs, common: &Common) -> Outcome {
    let of = args.target.as_deref().map(Prefix::parse).transpose()?;
    let client = commands::client(common)?;
    let here = on_disk(&client).await?;
    let seen = match &of {
        Some(of) if !args.pending => Some(durable(&client, of).await?),
        _ => None,
    };
    let (now, newest) = (now_ms(), newest_durable(&here));
    let mut all: Vec<Told> = Vec::new();
    for status in here.into_iter().filter(|s| is_below(s, of.as_ref())) {
        if args.pending && status.durable {
            continue;
        }
        // The bucket was asked for those directly below the prefix.
        let direct = of.as_ref().is_some_and(|of| is_directly_below(&status, of));
        let visible = seen.as_ref().filter(|_| direct).map(|seen| {
            seen.iter()
                .any(|(place, m)| place.prefix == status.prefix && m.id == status.id)
        });
        let visible = visible.or_else(|| is_replaced(&status, &newest).then_some(false));
        all.push(Told::of(status, visible, now));
    }
    for (place, manifest) in seen.iter().flatten() {
        let known = |t: &Told| t.status.prefix == place.prefix && t.status.id == manifest.id;
        // A part of it may be here too: that is not the whole.
        if !all.iter().any(|t| known(t) && t.status.part.is_none()) {
            all.push(Told::of(at_bucket(place, manifest), Some(true), now));
        }
    }
    all.sort_by(|a, b| b.age_seconds.total_cmp(&a.age_seconds));
    let mut out = Out::new(common.json);
    if out.json {
        for one in &all {
            out.json_line(one)?;
        }
        return out.flush();
    }
    for line in lines(&all, out.style) {
        out.line(line)?;
    }
    out.flush()?;
    match (&of, all.is_empty()) {
        (_, false) => Ok(()),
        (Some(of), true) if !args.pending => {
            let what = format!("no checkpoints there: {of}");
            Err(Error::not_found(what)
                .hint("`forebay checkpoint list` shows what is on the node's disk")
                .into())
        }
        _ => {
            let which = if args.pending {
                " that is not durable"
            } else {
                ""
            };
            tell(format!("there is no checkpoint on this node's disk{which}"));
            Ok(())
        }
    }
}

fn name_of(s: &Status) -> (String, String) {
    (s.bucket.clone(), s.prefix.clone())
}

/// Of each name on the node's disk, when the last one became durable.
fn newest_durable(here: &[Status]) -> HashMap<(String, String), i64> {
    let mut newest = HashMap::new();
    for s in here.iter().filter(|s| s.durable && s.part.is_none()) {
        let last = newest.entry(name_of(s)).or_insert(s.durable_ms);
        *last = s.durable_ms.max(*last);
    }
    newest
}

/// Whether another of the name became durable after this one, in its place.
fn is_replaced(s: &Status, newest: &HashMap<(String, String), i64>) -> bool {
    let last = newest.get(&name_of(s));
    s.durable && s.part.is_none() && last.is_some_and(|last| *last > s.durable_ms)
}

fn is_below(s: &Status, of: Option<&Prefix>) -> bool {
    let Some(of) = of else { return true };
    let rest = s.prefix.strip_prefix(of.prefix.trim_matches('/'));
    s.bucket == of.bucket
        && rest.is_some_and(|rest| of.prefix.is_empty() || rest.is_empty() || rest.starts_with('/'))
}

fn is_directly_below(s: &Status, of: &Prefix) -> bool {
    let parent = s.prefix.rsplit_once('/').map_or("", |(parent, _)| parent);
    s.bucket == of.bucket && parent == of.prefix.trim_matches('/')
}

fn lines(all: &[Told], style: Style) -> Vec<String> {
    let row = |t: &Told| {
        let s = &t.status;
        let size = match s.durable || s.bytes_at_origin == 0 {
            true => format_bytes(s.bytes),
            false => sent(s),
        };
        (size, duration(t.age_seconds as u64))
    };
    let rows: Vec<(String, String)> = all.iter().map(row).collect();
    let widest = |of: &dyn Fn(&(String, String)) -> usize| rows.iter().map(of).max().unwrap_or(0);
    let (sizes, ages) = (widest(&|r| r.0.len()), widest(&|r| r.1.len()));
    let mut lines = Vec::new();
    for (t, (size, age)) in all.iter().zip(&rows) {
        let state = format!("{:<8}", t.status.state);
        let state = match &*t.status.state {
            "durable" => style.green(&state),
            "failed" => style.red(&state),
            _ if t.status.late => style.red(&state),
            _ => style.yellow(&state),
        };
        let mark = if t.status.local { '*' } else { ' ' };
        let part = t.status.part.as_deref();
        let part = part.map_or(String::new(), |p| format!("  part {}", one_line(p)));
        lines.push(format!(
            "{state}  {size:>sizes$}  {age:>ages$} {mark} {}{part}",
            t.name
        ));
        if let Some(why) = &t.why {
            lines.push(format!("          {}", style.dim(why)));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_one_name_only_the_last_is_what_readers_see() {
        let status = |prefix: &str, durable_ms: i64, part: Option<&str>| Status {
            prefix: prefix.into(),
            durable: durable_ms > 0,
            durable_ms,
            part: part.map(str::to_owned),
            ..Status::default()
        };
        let here = [
            status("last", 1, None),
            status("last", 3, None),
            status("last", 2, None),
            status("last", 0, None),
            status("last", 1, Some("r1")),
            status("other", 1, None),
        ];
        let newest = newest_durable(&here);
        let replaced = here.each_ref().map(|s| is_replaced(s, &newest));
        assert_eq!(replaced, [true, false, true, false, false, false]);
    }

    #[test]
    fn what_is_below_a_prefix() {
        let status = |prefix: &str| Status {
            bucket: "bk".into(),
            prefix: prefix.into(),
            ..Status::default()
        };
        let of = |text: &str| Prefix::parse(text).unwrap();
        for (prefix, target, below, directly) in [
            ("run/1", "bk/run", true, true),
            ("run/1", "bk/run/", true, true),
            ("run/a/1", "bk/run", true, false),
            ("running/1", "bk/run", false, false),
            ("run", "bk/run", true, false),
            ("run/1", "bk", true, false),
            ("one", "bk", true, true),
            ("run/1", "other/run", false, false),
        ] {
            let (s, of) = (status(prefix), of(target));
            assert_eq!(is_below(&s, Some(&of)), below, "{prefix} {target}");
            assert_eq!(is_directly_below(&s, &of), directly, "{prefix} {target}");
        }
    }
}
