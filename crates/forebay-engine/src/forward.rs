//! Passing requests of the S3 service model on to the bucket's origin, as they are.
//!
//! The node forgets what a forwarded request may have changed before it gives the answer, whatever
//! the answer is: a write that failed may have happened all the same.
//!
//! Invariant: a request that may change something runs in its own task to the end of its answer, so
//! if a client leaves, its effect is still forgotten here.

use crate::{Engine, stats::add};
use forebay_core::{Error, ErrorKind, ObjectName, Reservation, Result, limits, request};
use forebay_origin::{ForwardBody, ForwardRequest, ForwardResponse, Origin, body};
use std::sync::Arc;

/// What a forwarded request may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changes {
    /// A request that only reads: it needs no task of its own, and nothing is forgotten.
    Nothing,
    /// The parts of an upload, or whether there is one. Nothing is forgotten: the object changes when
    /// the upload is completed.
    Upload,
    /// The object of this name, or what is known about it.
    Object(ObjectName),
    /// The bucket itself: whether it exists.
    Bucket(String),
}

impl Engine {
    /// Sends `request` to `origin`, and forgets what it may have changed. `held` is released when
    /// the request has been sent.
    ///
    /// # Errors
    /// As [`Origin::forward`]: an answer of the service is not an error, whatever its status.
    pub async fn forward(
        &self,
        origin: Arc<dyn Origin>,
        request: ForwardRequest,
        changes: Changes,
        held: Vec<Reservation>,
    ) -> Result<ForwardResponse> {
        let engine = self.clone();
        let removes = request.method.as_str() == "DELETE";
        let bytes = match &request.body {
            ForwardBody::Empty => 0,
            ForwardBody::Bytes(bytes) => bytes.len() as u64,
            ForwardBody::Stream(length, ..) => *length,
        };
        let send = async move {
            let answer = origin.forward(request).await;
            drop(held);
            answer
        };
        match changes {
            Changes::Nothing => send.await,
            Changes::Upload => {
                let sending = request::spawn(async move {
                    let answer = whole(send.await?).await?;
                    if answer.status.is_success() {
                        add(&engine.stats().bytes_written, bytes);
                    }
                    Ok::<_, Error>(answer)
                });
                sending
                    .await
                    .map_err(|e| Error::internal(format!("a forwarded request ended: {e}")))?
            }
            Changes::Object(name) => {
                self.to_its_end(&name, async move {
                    let answer = whole(send.await?).await;
                    if answer.as_ref().is_ok_and(|a| a.status.is_success()) {
                        let stats = engine.stats();
                        add(
                            if removes {
                                &stats.deletes
                            } else {
                                &stats.writes
                            },
                            1,
                        );
                        add(&stats.bytes_written, bytes);
                    }
                    answer
                })
                .await
            }
            Changes::Bucket(bucket) => {
                let sending = request::spawn(async move {
                    let answer = match send.await {
                        Ok(answer) => whole(answer).await,
                        Err(e) => Err(e),
                    };
                    engine.inner.buckets.changed(&bucket);
                    answer
                });
                sending
                    .await
                    .map_err(|e| Error::internal(format!("a forwarded request ended: {e}")))?
            }
        }
    }
}

/// An answer with all of its document. S3 begins some answers (that of a completed upload, that of
/// a copy) before it has done what was asked, and ends them when it has.
async fn whole(answer: ForwardResponse) -> Result<ForwardResponse> {
    let ForwardResponse {
        status,
        headers,
        body: document,
    } = answer;
    let document = body::collect(document, limits::S3_ANSWER_MAX_BYTES).await;
    let document = document.map_err(|e| match e.kind() {
        ErrorKind::TooLarge => Error::corrupt("the origin's answer is longer than any of S3's"),
        _ => e,
    })?;
    Ok(ForwardResponse {
        status,
        headers,
        body: body::from_bytes(document),
    })
}
