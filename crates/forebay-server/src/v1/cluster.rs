//! What AIStore's clients ask of a cluster. This node is all of it: gateway and target in one.

use super::{Call, error::json_response, not_offered};
use crate::body::AnswerBody;
use forebay_core::{Error, ErrorKind, Result};
use http::{Response, StatusCode};
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;

pub fn daemon(call: &Call) -> Result<Response<AnswerBody>> {
    match call.query("what") {
        Some("smap") => Ok(json_response(StatusCode::OK, &cluster_map(call))),
        _ => Err(not_offered(call)),
    }
}

fn cluster_map(call: &Call) -> Value {
    let url = call.base_url();
    let authority = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
    let (host, port) = authority.rsplit_once(':').unwrap_or((
        authority,
        if url.starts_with("https") {
            "443"
        } else {
            "80"
        },
    ));
    let net = json!({"node_hostname": host, "daemon_port": port, "direct_url": url});
    let id = &call.app.node_id;
    let digest = (forebay_core::name::hash_name("node", id) >> 64) as u64;
    let node = |kind: &str| {
        json!({
            "daemon_id": id, "daemon_type": kind, "public_net": net, "intra_control_net": net, "intra_data_net": net,
            "flags": 0, "id_digest": digest,
        })
    };
    json!({
        "pmap": {id: node("proxy")},
        "tmap": {id: node("target")},
        "proxy_si": node("proxy"),
        "version": 1,
        "uuid": id,
        "creation_time": call.app.started_secs.to_string(),
    })
}

pub fn cluster(call: &Call) -> Result<Response<AnswerBody>> {
    match call.query("what") {
        Some("smap") => Ok(json_response(StatusCode::OK, &cluster_map(call))),
        // There are no jobs here, so none runs.
        Some("status_all" | "running_all") => Ok(json_response(StatusCode::OK, &json!([]))),
        _ => Err(not_offered(call)),
    }
}

pub fn health(call: &Call) -> Result<Response<AnswerBody>> {
    if call.app.ready.load(Relaxed) {
        Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
    } else {
        Err(Error::new(ErrorKind::ShuttingDown, "the node is stopping"))
    }
}
