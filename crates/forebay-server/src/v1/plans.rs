//! `/v1/datasets/plans`: plans that the cache follows.
//!
//! - `POST /v1/datasets/plans` registers a plan, as JSON ([`Registration`]), and answers with a
//!   lease;
//! - `PUT /v1/datasets/plans/<lease>` `{"epoch": 0, "position": 4096}` says where the job is, and
//!   renews the lease;
//! - `DELETE /v1/datasets/plans/<lease>` ends it; `GET /v1/datasets/plans` lists the caller's leases.
//!
//! A lease belongs to the key that registered it: no other key moves, ends or sees it. Callers that
//! need no key, on the Unix socket or at a node without keys, see and end all leases.

use super::{
    Call,
    datasets::{allowed, tally},
    error::json_response,
    not_offered,
};
use crate::body::AnswerBody;
use forebay_core::{Error, Result, request};
use forebay_protocol::plan::{Leases, Progress, Registration, Released};
use http::{Method, Response, StatusCode};
use serde_json::Value;

pub async fn plans(call: &Call, rest: &str) -> Result<Response<AnswerBody>> {
    let plans = &call.app.plans;
    let lease = rest.trim_end_matches('/');
    match (&call.note.method, lease) {
        (&Method::POST, "") => {
            let registration: Registration = body(
                call.json().await?,
                r#"{"plan": {"sources": [{"dataset": "<id>"}], "seed": 1}}"#,
            )?;
            let access = allowed(call);
            let registering = plans.register(&registration, &access);
            let lease = request::tallied(tally(call)?, registering).await?;
            Ok(json_response(StatusCode::CREATED, &lease))
        }
        (&Method::GET, "") => {
            let leases = plans.list(&allowed(call));
            Ok(json_response(StatusCode::OK, &Leases { leases }))
        }
        (&Method::PUT, lease) if !lease.is_empty() => {
            let at: Progress = body(call.json().await?, r#"{"epoch": 0, "position": 4096}"#)?;
            Ok(json_response(
                StatusCode::OK,
                &plans.progress(lease, at.epoch, at.position, &allowed(call))?,
            ))
        }
        (&Method::DELETE, lease) if !lease.is_empty() => {
            plans.release(lease, &allowed(call))?;
            let released = lease.to_owned();
            Ok(json_response(StatusCode::OK, &Released { released }))
        }
        _ => Err(not_offered(call)),
    }
}

fn body<T: serde::de::DeserializeOwned>(value: Value, like: &str) -> Result<T> {
    serde_json::from_value(value).map_err(|e| {
        Error::invalid(format!("the body of the request: {e}")).hint(format!("as in {like}"))
    })
}
