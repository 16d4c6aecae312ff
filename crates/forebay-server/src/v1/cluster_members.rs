//! `/v1/forebay/cluster`: the cluster as this node sees it, its map, and what operators order.

use super::{Call, error::json_response};
use crate::{auth, body::AnswerBody, config::Action, figures, peers::Joined};
use forebay_cluster::{Map, MemberState, Order};
use forebay_core::{Error, Result, name::shorten};
use forebay_peer::{HandOverStatus, LinkStatus};
use forebay_protocol::cluster::{
    ClusterAction, ClusterLink, ClusterMember, ClusterMoving, ClusterOrder, ClusterStatus,
};
use http::{Method, Response, StatusCode};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// Members that do not say within this time how far they are, do not say it.
const MEMBERS_SAY: Duration = Duration::from_secs(1);

pub async fn members(call: &Call) -> Result<Response<AnswerBody>> {
    if !call.policy.allows_everywhere(Action::Admin) {
        return Err(auth::refusal(
            "only keys that have admin on every bucket may see and change the cluster".into(),
        ));
    }
    let joined = call.app.joined.as_ref().ok_or_else(alone)?;
    if call.note.method == Method::POST {
        let body = call.json().await?;
        let order: ClusterOrder = serde_json::from_value(body).map_err(|e| {
            Error::invalid(format!("the order cannot be read: {e}"))
                .hint(r#"as in {"action": "drain", "member": "node-3"}"#)
        })?;
        let id = member(&joined.cluster.map(), &order.member)?;
        let map = joined
            .order(match order.action {
                ClusterAction::Drain => Order::Drain(id),
                ClusterAction::Resume => Order::Resume(id),
                ClusterAction::Forget => Order::Forget(id),
            })
            .await?;
        joined.wait_for(map.epoch).await;
    }
    let (joined, me) = (joined.clone(), joined.cluster.me().node);
    let members = joined.cluster.map().members;
    let others = members.iter().map(|m| m.id).filter(|id| *id != me);
    let others: Vec<u64> = others.filter(|id| joined.cluster.answers(*id)).collect();
    let moving = joined.cluster.others_moving(&others, MEMBERS_SAY).await;
    let status = tokio::task::spawn_blocking(move || status(&joined, moving)).await;
    let mut status = status.map_err(|e| Error::internal(format!("looking at the cluster: {e}")))?;
    let says = |v: &str| matches!(v, "" | "1" | "true");
    if call.query("figures").is_some_and(says) {
        figures::show(&call.app, &mut status).await?;
    }
    Ok(json_response(StatusCode::OK, &status))
}

/// The map: whom to ask for what. Every key may see it, as it may see AIStore's.
pub fn map(call: &Call) -> Result<Response<AnswerBody>> {
    let joined = call.app.joined.as_ref().ok_or_else(alone)?;
    Ok(json_response(StatusCode::OK, &joined.cluster.map()))
}

fn alone() -> Error {
    Error::not_found("this node is alone: it is part of no cluster")
        .hint("start it with --cluster to make it part of one")
}

/// The member with this name or id.
fn member(map: &Map, text: &str) -> Result<u64> {
    let named: Vec<u64> = map
        .members
        .iter()
        .filter(|m| m.name == text || format!("{:016x}", m.id) == text)
        .map(|m| m.id)
        .collect();
    match named[..] {
        [id] => Ok(id),
        [] => Err(Error::not_found(format!(
            "cluster {:?} has no member {:?}",
            map.cluster,
            shorten(text)
        ))
        .hint("`forebay cluster status` lists them")),
        _ => Err(Error::invalid(format!(
            "{} members are called {:?}",
            named.len(),
            shorten(text)
        ))
        .hint("name the one that is meant by its id: `forebay cluster status --json`")),
    }
}

fn status(joined: &Arc<Joined>, mut moving: BTreeMap<u64, HandOverStatus>) -> ClusterStatus {
    let cluster = &joined.cluster;
    let (placed, handing_over) = cluster.placement();
    moving.insert(cluster.me().node, cluster.hand_over_status());
    let (links, report) = (cluster.links(), joined.report());
    let seconds = |time: Duration| (time.as_secs_f64() * 10.0).round() / 10.0;
    let coherence = cluster.coherence();
    let map = placed.map();
    let members = map.members.iter().zip(placed.shares());
    let members = members.map(|(member, share)| {
        let here = member.id == cluster.me().node;
        let link = links.iter().find(|link| link.node == member.id);
        let away = report.as_ref().and_then(|r| r.away.get(&member.id));
        let mut nodes = report.iter().flat_map(|r| &r.nodes);
        let node = nodes.find(|n| n.member.id == member.id);
        let moving = moving.get(&member.id);
        let is_draining = member.state == MemberState::Draining;
        ClusterMember {
            id: format!("{:016x}", member.id),
            name: member.name.clone(),
            address: member.address.clone(),
            url: member.url.clone(),
            zone: member.zone.clone(),
            weight: member.weight,
            state: match member.state {
                MemberState::Active => "active",
                MemberState::Draining => "draining",
            }
            .to_owned(),
            share,
            here,
            // A peer that nobody asked since it went is not known to be silent.
            answers: here || (away.is_none() && link.is_some_and(|link| link.answers)),
            away_seconds: away.map(|away| seconds(*away)),
            version: match (here, node) {
                (true, _) => crate::VERSION.to_owned(),
                (false, Some(node)) => node.version.clone(),
                (false, None) => String::new(),
            },
            link: link.map(described),
            figures: None,
            untold: None,
            differs: Vec::new(),
            // By an older map it has lost nothing yet.
            drained: is_draining
                && moving.is_some_and(|m| m.epoch >= map.epoch && m.losing_slots == 0),
            moving: moving.map(|m| ClusterMoving {
                gaining_slots: m.gaining_slots,
                losing_slots: m.losing_slots,
                taken_bytes: m.pulled_bytes,
                left_seconds: m.left.map(seconds),
                full: m.is_full,
            }),
        }
    });
    ClusterStatus {
        cluster: map.cluster.clone(),
        epoch: map.epoch,
        node: format!("{:016x}", cluster.me().node),
        source: joined.source(),
        looked_seconds: report.as_ref().and_then(|r| r.looked).map(seconds),
        error: report.as_ref().and_then(|r| r.error.clone()),
        lease_seconds: report.as_ref().and_then(|r| r.lease).map(seconds),
        trusted: coherence.as_ref().map(|c| c.trusted),
        not_trusted: coherence.and_then(|c| c.why),
        handing_over_slots: handing_over as u64,
        spread: None,
        members: members.collect(),
    }
}

fn described(link: &LinkStatus) -> ClusterLink {
    let answered = link.first_byte.count().max(1);
    ClusterLink {
        questions: link.questions,
        misses: link.misses,
        failures: link.failures,
        silences: link.silences,
        received_bytes: link.received_bytes,
        first_byte_ms: link.first_byte.sum_seconds * 1e3 / answered as f64,
        under_way: link.under_way as u64,
    }
}
