//! `/v1/datasets/compositions`: rows that are made of those of open datasets; and how long rows are.
//!
//! - `POST /v1/datasets/compositions` takes a description ([`forebay_protocol::composition`]) and
//!   answers with its id, by which plans and streams name it like a dataset;
//! - `POST /v1/datasets/<id>/lengths` takes the lengths of all rows of a dataset or composition, for
//!   streams of batches that are bounded by them, and answers with their id.
//!
//! Invariant: nobody tells anything of a dataset that it may not read, or uses what others told of it.

use super::{Call, datasets::allowed, error::json_response, not_offered};
use crate::body::AnswerBody;
use forebay_core::{Result, limits};
use forebay_dataset::View;
use forebay_protocol::composition::Composed;
use http::{Method, Response, StatusCode};

pub async fn compositions(call: &Call, rest: &str) -> Result<Response<AnswerBody>> {
    let datasets = &call.app.datasets;
    match (&call.note.method, rest.trim_end_matches('/')) {
        (&Method::POST, "") => {
            let body = call.read_body(limits::COMPOSITION_MAX_BYTES).await?;
            let view = datasets.compose(body, &allowed(call)).await?;
            Ok(json_response(StatusCode::OK, &composed(&view)))
        }
        _ => Err(not_offered(call)),
    }
}

pub async fn lengths(call: &Call, of: &str) -> Result<Response<AnswerBody>> {
    let (datasets, access) = (&call.app.datasets, allowed(call));
    // Permission is checked before the body is read.
    datasets.view(of, &access).await?;
    let body = call.read_body(limits::COMPOSITION_MAX_BYTES).await?;
    let (id, rows) = datasets.measure(of, body, &access).await?;
    let blocks = None;
    Ok(json_response(
        StatusCode::OK,
        &Composed { id, rows, blocks },
    ))
}

fn composed(view: &View) -> Composed {
    Composed {
        id: view.id().to_owned(),
        rows: view.shape().rows(),
        blocks: Some(view.shape().blocks()),
    }
}
