//! `forebay cluster status`, `drain` and `forget`: a cluster as one of its nodes sees it, and orders
//! to it.

use crate::{
    cli::Common,
    commands,
    fail::{Outcome, one_line},
    out::{Out, count, grouped, pairs, utc},
    style::Style,
};
use forebay_client::Call;
use forebay_core::{Error, units::format_bytes};
use forebay_protocol::{
    CLUSTER_FIGURES_PATH, CLUSTER_PATH,
    cluster::{ClusterAction, ClusterMember, ClusterOrder, ClusterStatus, NodeFigures},
};
use http::Method;
use serde_json::Value;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const JSON_SHAPE: &str = "JSON: as the node tells: {\"cluster\", \"epoch\", \"node\", \"source\", \
    \"looked_seconds\", \"error\", \"lease_seconds\", \"trusted\", \"not_trusted\", \
    \"handing_over_slots\", \"members\": [{\"id\", \"name\", \"address\", \"url\", \"zone\", \
    \"weight\", \"state\", \"share\", \"here\", \"answers\", \"away_seconds\", \"version\", \"link\", \"moving\", \"drained\", \"figures\", \"untold\", \"differs\"}], \
    \"spread\"}; a node's \"figures\": {\"version\", \"uptime_seconds\", \"capacity_bytes\", \
    \"used_bytes\", \"entries\", \"dirs\": [{\"path\", \"state\", \"capacity_bytes\", \
    \"used_bytes\", ...}], \"requests\", \"requests_failed\", \"sent_bytes\", \"reads\", \
    \"reads_hit\", \"reads_miss\", \"from_nodes_bytes\", \"from_buckets_bytes\", \
    \"copied_bytes\", \"copies_behind\"}";

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Example:
  forebay cluster status --node http://node-1:8080

Any node answers; each tells what it sees, so after a failure ask two of them.
Exit code 0 if all members answer that node, 1 if one does not.
{JSON_SHAPE}"))]
pub struct StatusArgs {}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Examples:
  forebay cluster drain node-3            # its share goes to the others
  forebay cluster drain node-3 --wait     # and returns when the others have all of it
  forebay cluster drain node-3 --undo     # it takes a share again
  forebay cluster status                  # how far that is

Orders the same again if it was ordered before. When the status says that the node is drained, it may \
    be stopped, and then forgotten.

{JSON_SHAPE}"))]
pub struct DrainArgs {
    /// The member: its name, or its id if several have that name
    #[arg(value_name = "MEMBER")]
    member: String,
    /// Let it take a share again
    #[arg(long)]
    undo: bool,
    /// Wait until the others have everything that it had
    #[arg(long, conflicts_with = "undo")]
    wait: bool,
    /// Wait no longer than so many seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3600,
        requires = "wait"
    )]
    timeout: u64,
}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Example:
  forebay cluster forget node-3

Members that are away for cluster.forget_after are forgotten without this. One that comes back joins \
    again by itself.
{JSON_SHAPE}"))]
pub struct ForgetArgs {
    /// The member, which must be stopped: its name, or its id if several have that name
    #[arg(value_name = "MEMBER")]
    member: String,
}

pub async fn status(_: StatusArgs, common: &Common) -> Outcome {
    let client = commands::client(common)?;
    let call = Call::new(Method::GET, CLUSTER_FIGURES_PATH);
    let said: Value = commands::json(&client, call).await?;
    let status = parsed(&said)?;
    show(&said, &status, common)?;
    let silent: Vec<String> = status
        .members
        .iter()
        .filter(|m| !m.answers)
        .map(|m| one_line(called(m)))
        .collect();
    match silent.is_empty() {
        true => Ok(()),
        false => Err(Error::origin_unavailable(format!(
            "{} of {} do not answer that node: {}",
            silent.len(),
            count(status.members.len() as u64, "member"),
            silent.join(", ")
        ))
        .into()),
    }
}

pub async fn drain(args: DrainArgs, common: &Common) -> Outcome {
    let action = match args.undo {
        true => ClusterAction::Resume,
        false => ClusterAction::Drain,
    };
    let said = order(action, &args.member, common).await?;
    if !args.wait {
        return show(&said, &parsed(&said)?, common);
    }
    let client = commands::client(common)?;
    let began = Instant::now();
    let (mut said, mut answered) = (said, began);
    loop {
        let status = parsed(&said)?;
        let is_meant = |m: &&ClusterMember| m.name == args.member || m.id == args.member;
        let Some(member) = status.members.iter().find(is_meant) else {
            return Err(Error::not_found(format!("{} has left the cluster", args.member)).into());
        };
        if member.drained {
            return show(&said, &status, common);
        }
        if began.elapsed() >= Duration::from_secs(args.timeout) {
            let left = member.moving.as_ref().map(|m| m.losing_slots);
            let left = left.map_or("its state is not known".to_owned(), |slots| {
                format!("{} slots are not with their new owners", grouped(slots))
            });
            return Err(Error::timeout(format!(
                "{} is not drained after {} s: {left}",
                args.member, args.timeout
            ))
            .hint("it goes on: `forebay cluster status` says how far it is")
            .into());
        }
        tokio::time::sleep(commands::LOOK_EVERY).await;
        let look = Call::new(Method::GET, CLUSTER_PATH);
        match commands::json::<Value>(&client, look).await {
            Ok(now) => (said, answered) = (now, Instant::now()),
            // Until it answers again, what it said last counts.
            Err(e) if commands::may_be_back(&e, answered) => {}
            Err(e) => return Err(e),
        }
    }
}

pub async fn forget(args: ForgetArgs, common: &Common) -> Outcome {
    let said = order(ClusterAction::Forget, &args.member, common).await?;
    show(&said, &parsed(&said)?, common)
}

/// What the node says of its cluster after an order.
async fn order(action: ClusterAction, member: &str, common: &Common) -> Outcome<Value> {
    let client = commands::client(common)?;
    let member = member.to_owned();
    let order = ClusterOrder { action, member };
    let body = serde_json::to_vec(&order).map_err(|e| Error::internal(e.to_string()))?;
    let call = Call::new(Method::POST, CLUSTER_PATH).json(body);
    commands::json(&client, call).await
}

fn parsed(said: &Value) -> Outcome<ClusterStatus> {
    serde_json::from_value(said.clone()).map_err(|e| {
        Error::corrupt(format!(
            "what the node says of its cluster cannot be parsed: {e}"
        ))
        .caused_by(e)
        .into()
    })
}

fn show(said: &Value, status: &ClusterStatus, common: &Common) -> Outcome {
    let mut out = Out::new(common.json);
    if out.json {
        // All of it, including fields that a later release adds.
        return out.object(said);
    }
    for line in lines(status, out.style, now_ms()) {
        out.line(line)?;
    }
    out.flush()
}

fn called(m: &ClusterMember) -> &str {
    if m.name.is_empty() { &m.id } else { &m.name }
}

fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_millis() as i64)
}

/// What moves to a member, or from it; `None` if nothing does.
fn moves(m: &ClusterMember, now_ms: i64) -> Option<String> {
    if m.drained {
        return Some("drained: it may be stopped".to_owned());
    }
    let moving = m.moving.as_ref()?;
    let until = moving.left_seconds.map(|seconds| {
        let at = utc(now_ms.saturating_add((seconds * 1e3) as i64));
        format!(", until about {} UTC", at.get(11..16).unwrap_or_default())
    });
    let until = until.unwrap_or_default();
    if moving.gaining_slots > 0 {
        let why = if moving.full {
            ", the cache is full"
        } else {
            ""
        };
        return Some(format!(
            "takes over {} slots, {} so far{until}{why}",
            grouped(moving.gaining_slots),
            format_bytes(moving.taken_bytes)
        ));
    }
    (moving.losing_slots > 0).then(|| {
        format!(
            "{} slots are not with their new owners yet",
            grouped(moving.losing_slots)
        )
    })
}

fn lines(s: &ClusterStatus, style: Style, now_ms: i64) -> Vec<String> {
    let mut source = one_line(&s.source);
    if let Some(seconds) = s.looked_seconds {
        source += &format!(", looked at {seconds:.0} s ago");
    }
    let mut rows = vec![
        (
            "cluster",
            format!(
                "{}, map {}, {}",
                style.bold(&one_line(&s.cluster)),
                grouped(s.epoch),
                count(s.members.len() as u64, "member")
            ),
        ),
        ("map at", source),
        ("after writes", after_writes(s)),
    ];
    if let Some(e) = &s.error {
        rows.push(("trouble", style.red(&one_line(e))));
    }
    for member in &s.members {
        if let Some(what) = moves(member, now_ms) {
            rows.push(("moving", format!("{}: {what}", one_line(called(member)))));
        }
    }
    for member in &s.members {
        let behind = member.figures.as_ref().filter(|f| f.copies_behind > 0);
        if let Some(f) = behind {
            rows.push((
                "copies",
                format!(
                    "{}: {} to be looked through for what it is to keep, {} copied so far",
                    one_line(called(member)),
                    count(f.copies_behind, "other node"),
                    format_bytes(f.copied_bytes)
                ),
            ));
        }
    }
    let used = s.members.iter().filter_map(|m| m.figures.as_ref());
    let (used, capacity) = used.fold((0, 0), |(used, capacity), f| {
        (used + f.used_bytes, capacity + f.capacity_bytes)
    });
    if let Some(spread) = s.spread {
        rows.push((
            "used",
            format!(
                "{} of {}; the fullest node has {spread:.2} times the mean",
                format_bytes(used),
                format_bytes(capacity)
            ),
        ));
    }
    let warnings: Vec<String> = s.members.iter().filter_map(warning).collect();
    for warning in &warnings {
        rows.push(("differs", style.yellow(warning)));
    }
    let mut lines = pairs(&rows);
    lines.push(String::new());
    let mut table = vec![
        [
            "member",
            "state",
            "share",
            "cache",
            "used",
            "entries",
            "zone",
            "nodes at",
            "clients at",
            "asked",
            "sent here",
            "begins in",
        ]
        .map(str::to_owned),
    ];
    table.extend(s.members.iter().map(cells));
    let width = |column: usize| {
        let cells = table.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..table[0].len()).map(width).collect();
    for (number, row) in table.iter().enumerate() {
        let cells = row.iter().zip(&widths);
        let line: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        let line = line.join("  ").trim_end().to_owned();
        let member = number.checked_sub(1).map(|at| &s.members[at]);
        lines.push(match member {
            None => style.dim(&line),
            Some(m) if !m.answers => style.red(&line),
            Some(m) if m.state != "active" => style.yellow(&line),
            Some(_) => line,
        });
    }
    let disks = disks(s);
    if !disks.is_empty() {
        lines.push(String::new());
        lines.extend(disks);
    }
    lines
}

/// In what a member differs from the node that answers.
fn warning(m: &ClusterMember) -> Option<String> {
    let what = m.differs.iter().map(|what| match &**what {
        "keys" => "keys and policies",
        "buckets" => "buckets and origins",
        other => other,
    });
    let what: Vec<String> = what.map(one_line).collect();
    (!what.is_empty()).then(|| {
        format!(
            "{} has other {} than the node that answers",
            one_line(called(m)),
            what.join(", other ")
        )
    })
}

/// The directories of the nodes' caches, where there is more to say than the table of nodes does.
fn disks(s: &ClusterStatus) -> Vec<String> {
    let figures = |m: &ClusterMember| m.figures.clone().unwrap_or_default();
    let worth = |m: &ClusterMember| {
        let dirs = figures(m).dirs;
        dirs.len() > 1 || dirs.iter().any(|d| d.state != "ok")
    };
    let mut lines = Vec::new();
    for m in s.members.iter().filter(|m| worth(m)) {
        for dir in figures(m).dirs {
            lines.push(format!(
                "{} {}: {} of {}, {}",
                one_line(called(m)),
                one_line(&dir.path),
                format_bytes(dir.used_bytes),
                format_bytes(dir.capacity_bytes),
                one_line(&dir.state)
            ));
        }
    }
    lines
}

/// What reads that follow a write get, at this node.
fn after_writes(s: &ClusterStatus) -> String {
    match (s.trusted, &s.not_trusted) {
        (None, _) => "by the freshness rule of the bucket".to_owned(),
        (Some(true), _) => "every node has the write".to_owned(),
        (Some(false), why) => format!(
            "this node asks the bucket: {}",
            one_line(why.as_deref().unwrap_or("it has just joined"))
        ),
    }
}

fn cells(m: &ClusterMember) -> [String; 12] {
    let state = match (m.here, m.answers, m.away_seconds) {
        (true, ..) => format!("{}, answers this", m.state),
        (_, false, Some(away)) => format!("{}, away {away:.0} s", m.state),
        (_, false, None) => format!("{}, silent", m.state),
        (_, true, _) => m.state.clone(),
    };
    let dash = || "-".to_owned();
    let shown = |text: &str| match text {
        "" => dash(),
        text => one_line(text),
    };
    let link = |text: &dyn Fn(&forebay_protocol::cluster::ClusterLink) -> String| {
        m.link.as_ref().map_or_else(dash, text)
    };
    let figure = |text: &dyn Fn(&NodeFigures) -> String| match (&m.figures, &m.untold) {
        (Some(figures), _) => text(figures),
        (None, Some(_)) => "not told".to_owned(),
        (None, None) => dash(),
    };
    [
        one_line(called(m)),
        one_line(&state),
        format!("{:.1} %", m.share * 100.0),
        format_bytes(m.weight),
        figure(&|f| format_bytes(f.used_bytes)),
        figure(&|f| grouped(f.entries)),
        shown(&m.zone),
        shown(&m.address),
        shown(&m.url),
        link(&|l| grouped(l.questions)),
        link(&|l| format_bytes(l.received_bytes)),
        link(&|l| format!("{:.1} ms", l.first_byte_ms)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_protocol::cluster::{ClusterLink, ClusterMoving};

    #[test]
    fn a_cluster_is_shown_as_a_table() {
        let member = |name: &str, share| ClusterMember {
            id: "00000000000000aa".into(),
            name: name.into(),
            address: "10.0.0.1:8300".into(),
            weight: 1 << 40,
            state: "active".into(),
            share,
            answers: true,
            ..ClusterMember::default()
        };
        let mut here = member("a", 0.5);
        here.here = true;
        here.moving = Some(ClusterMoving {
            gaining_slots: 26_214,
            taken_bytes: 5 << 20,
            left_seconds: Some(120.0),
            ..ClusterMoving::default()
        });
        let mut silent = member("", 0.5);
        silent.answers = false;
        silent.away_seconds = Some(12.4);
        silent.link = Some(ClusterLink {
            questions: 1200,
            received_bytes: 3 << 20,
            first_byte_ms: 1.25,
            ..ClusterLink::default()
        });
        here.figures = Some(NodeFigures {
            used_bytes: 3 << 30,
            capacity_bytes: 1 << 40,
            entries: 1500,
            ..NodeFigures::default()
        });
        silent.untold = Some("no answer within 2s".into());
        silent.differs = vec!["keys".into(), "release".into()];
        let status = ClusterStatus {
            spread: Some(1.25),
            cluster: "c".into(),
            epoch: 7,
            source: "etcd://e:1/c".into(),
            looked_seconds: Some(2.0),
            trusted: Some(false),
            not_trusted: Some("node b does not answer".into()),
            handing_over_slots: 26_214,
            members: vec![here, silent],
            ..ClusterStatus::default()
        };
        let noon = 12 * 3_600_000;
        let lines = lines(&status, Style::PLAIN, noon);
        assert_eq!(lines[0], "cluster       c, map 7, 2 members");
        assert_eq!(lines[1], "map at        etcd://e:1/c, looked at 2 s ago");
        assert_eq!(
            lines[2],
            "after writes  this node asks the bucket: node b does not answer"
        );
        assert_eq!(
            lines[3],
            "moving        a: takes over 26,214 slots, 5.0 MiB so far, until about 12:02 UTC"
        );
        assert!(
            lines[4].ends_with("3.0 GiB of 1.0 TiB; the fullest node has 1.25 times the mean"),
            "{}",
            lines[4]
        );
        let differs = "has other keys and policies, other release than the node that answers";
        assert!(lines[5].ends_with(differs), "{}", lines[5]);
        let (a, b) = (&lines[8], &lines[9]);
        assert!(
            a.starts_with("a                 active, answers this"),
            "{a}"
        );
        assert!(a.contains("3.0 GiB   1,500"), "{a}");
        assert!(b.contains("active, away 12 s"), "{b}");
        assert!(b.contains("not told"), "{b}");
        assert!(b.ends_with("1,200  3.0 MiB    1.2 ms"), "{b}");
    }

    #[test]
    fn a_drained_member_may_be_stopped() {
        let mut member = ClusterMember {
            state: "draining".into(),
            moving: Some(ClusterMoving {
                losing_slots: 1000,
                ..ClusterMoving::default()
            }),
            ..ClusterMember::default()
        };
        let says = |m: &ClusterMember| moves(m, 0);
        let expected = "1,000 slots are not with their new owners yet";
        assert_eq!(says(&member).as_deref(), Some(expected));
        member.moving = Some(ClusterMoving::default());
        assert_eq!(says(&member), None);
        member.drained = true;
        assert_eq!(says(&member).as_deref(), Some("drained: it may be stopped"));
    }
}
