//! Where the answer to a batch comes from: one node, or, in a cluster, the nodes that own its
//! entries.

use crate::{failure::Result, request::BatchRequest, session::Session};
use bytes::Bytes;
use forebay_client::{Answer, Merged};
use forebay_core::ObjectName;
use std::collections::HashMap;

/// Several owners are asked if they have this many entries of the batch each, on average: with fewer,
/// a request costs more than a node that asks the others for them. (Bytes cross the network twice
/// then, so who says `direct=True` is taken at their word.)
const ENTRIES_EACH: usize = 4;
/// The most owners that one batch is asked of.
const PARTS_MAX: usize = 64;

/// An archive that arrives.
pub enum Source {
    /// One node sends it.
    Node(Box<Answer>),
    /// Several do.
    Owners(Merged),
}

impl Source {
    /// Asks one node for the entries from the `first` on, or `owners`. Returns with the id under
    /// which a node logs the request, once it is accepted.
    pub async fn ask(
        session: &Session,
        request: &BatchRequest,
        first: usize,
        owners: Option<Merged>,
    ) -> Result<(Source, Option<String>)> {
        if let Some(mut merged) = owners {
            let id = merged.accepted().await?;
            return Ok((Source::Owners(merged), id));
        }
        let call = request.to_call(first..request.len());
        let answer = session.node.call(&call).await?;
        let id = answer.header("x-request-id").map(str::to_owned);
        Ok((Source::Node(Box::new(answer)), id))
    }

    /// The next piece; `None` at the proper end.
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        Ok(match self {
            Source::Node(answer) => answer.piece().await?,
            Source::Owners(merged) => merged.piece().await?,
        })
    }
}

/// Asks the owners of the entries, if that is to be done. A member of an archive is asked of the
/// owner of the archive's beginning, who has its index.
pub fn ask_owners(session: &Session, request: &BatchRequest) -> Option<Merged> {
    let owners = session.node.owners()?;
    let mut parts: HashMap<Option<usize>, u16> = HashMap::new();
    let mut order = Vec::with_capacity(request.len());
    let most = match session.node.direct() {
        Some(true) => PARTS_MAX,
        _ => (request.len() / ENTRIES_EACH).clamp(1, PARTS_MAX),
    };
    for index in 0..request.len() {
        let entry = request.get(index);
        let (bucket, key) = (request.text(entry.bucket)?, request.text(entry.object)?);
        let start = match (request.text(entry.member), request.rest(entry)) {
            (None, Some(rest)) => rest.start.unwrap_or(0),
            _ => 0,
        };
        let name = ObjectName::new(bucket, key).ok()?;
        let new = parts.len() as u16;
        order.push(*parts.entry(owners.owner(&name, start)).or_insert(new));
        if parts.len() > most {
            return None;
        }
    }
    // Nobody is known to answer, or one node has all.
    if parts.keys().all(Option::is_none) {
        return None;
    }
    let mut calls = vec![None; parts.len()];
    for (owner, part) in parts {
        let of_it = (0..order.len()).filter(|&index| order[index] == part);
        calls[usize::from(part)] = Some((owner, request.to_call(of_it)));
    }
    let calls = calls.into_iter().flatten().collect();
    Some(Merged::ask(&session.node, &owners, calls, order))
}
