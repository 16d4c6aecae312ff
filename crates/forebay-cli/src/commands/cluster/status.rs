//! `forebay cluster status`, `drain` and `forget`: a cluster as one of its nodes sees it, and orders
//! to it.

use crate::{
    cli::Common,
    commands,
    fail::{Outcome, one_line},
    out::{Out, count, grouped, pairs},
    style::Style,
};
use forebay_client::Call;
use forebay_core::{Error, units::format_bytes};
use forebay_protocol::{
    CLUSTER_PATH,
    cluster::{ClusterAction, ClusterMember, ClusterOrder, ClusterStatus},
};
use http::Method;
use serde_json::Value;

const JSON_SHAPE: &str = "JSON: as the node tells: {\"cluster\", \"epoch\", \"node\", \"source\", \
    \"looked_seconds\", \"error\", \"lease_seconds\", \"trusted\", \"not_trusted\", \
    \"handing_over_slots\", \"members\": [{\"id\", \"name\", \"address\", \"url\", \"zone\", \"weight\", \"state\", \"share\", \"here\", \
    \"answers\", \"away_seconds\", \"version\", \"link\"}]}";

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
  forebay cluster drain node-3            # its share goes to the others; it still serves what it has
  forebay cluster drain node-3 --undo     # it takes a share again
  forebay cluster status                  # what is still at former owners

{JSON_SHAPE}"))]
pub struct DrainArgs {
    /// The member: its name, or its id if several have that name
    #[arg(value_name = "MEMBER")]
    member: String,
    /// Let it take a share again
    #[arg(long)]
    undo: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Example:
  forebay cluster forget node-3

Members that are away for cluster.forget_after are forgotten without this. One that comes back joins
again by itself. {JSON_SHAPE}"))]
pub struct ForgetArgs {
    /// The member, which must be stopped: its name, or its id if several have that name
    #[arg(value_name = "MEMBER")]
    member: String,
}

pub async fn status(_: StatusArgs, common: &Common) -> Outcome {
    let client = commands::client(common)?;
    let said: Value = commands::json(&client, Call::new(Method::GET, CLUSTER_PATH)).await?;
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
    order(action, args.member, common).await
}

pub async fn forget(args: ForgetArgs, common: &Common) -> Outcome {
    order(ClusterAction::Forget, args.member, common).await
}

async fn order(action: ClusterAction, member: String, common: &Common) -> Outcome {
    let client = commands::client(common)?;
    let order = ClusterOrder { action, member };
    let body = serde_json::to_vec(&order).map_err(|e| Error::internal(e.to_string()))?;
    let call = Call::new(Method::POST, CLUSTER_PATH).json(body);
    let said: Value = commands::json(&client, call).await?;
    show(&said, &parsed(&said)?, common)
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
    for line in lines(status, out.style) {
        out.line(line)?;
    }
    out.flush()
}

fn called(m: &ClusterMember) -> &str {
    if m.name.is_empty() { &m.id } else { &m.name }
}

fn lines(s: &ClusterStatus, style: Style) -> Vec<String> {
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
    if s.handing_over_slots > 0 {
        rows.push((
            "moving",
            format!(
                "{:.1} % of all data is asked of former owners first, if this node lacks it",
                s.handing_over_slots as f64 / 262_144.0 * 100.0
            ),
        ));
    }
    let mut lines = pairs(&rows);
    lines.push(String::new());
    let mut table = vec![
        [
            "member",
            "state",
            "share",
            "cache",
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

fn cells(m: &ClusterMember) -> [String; 10] {
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
    [
        one_line(called(m)),
        one_line(&state),
        format!("{:.1} %", m.share * 100.0),
        format_bytes(m.weight),
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
    use forebay_protocol::cluster::ClusterLink;

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
        let mut silent = member("", 0.5);
        silent.answers = false;
        silent.away_seconds = Some(12.4);
        silent.link = Some(ClusterLink {
            questions: 1200,
            received_bytes: 3 << 20,
            first_byte_ms: 1.25,
            ..ClusterLink::default()
        });
        let status = ClusterStatus {
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
        let lines = lines(&status, Style::PLAIN);
        assert_eq!(lines[0], "cluster       c, map 7, 2 members");
        assert_eq!(lines[1], "map at        etcd://e:1/c, looked at 2 s ago");
        assert_eq!(
            lines[2],
            "after writes  this node asks the bucket: node b does not answer"
        );
        assert!(lines[3].starts_with("moving        10.0 % of all data"));
        assert!(
            lines[6].starts_with("a                 active, answers this"),
            "{}",
            lines[6]
        );
        assert!(lines[7].contains("active, away 12 s"), "{}", lines[7]);
        assert!(
            lines[7].ends_with("1,200  3.0 MiB    1.2 ms"),
            "{}",
            lines[7]
        );
    }
}
