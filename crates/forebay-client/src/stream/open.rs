//! Telling a node of the datasets of a stream, and of what is made of them: one that was started
//! anew, or that the stream was not begun at, may not know them.
//!
//! Invariant: a node goes on with a stream only if it finds the same versions.

use crate::{Call, Failure, Lines, node::Node};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_protocol::{
    COMPOSITIONS_PATH, DATASETS_PATH,
    dataset::{DatasetSpec, OpenEvent},
    path::encode,
};
use http::Method;
use std::{sync::Arc, time::Duration};

/// An answer that says what a composition is.
const COMPOSED_MAX_BYTES: usize = 64 << 10;

/// How a node is told of a dataset.
#[derive(Clone, Debug)]
pub struct Opening {
    /// What people call it.
    pub name: String,
    /// The version that is read.
    pub id: String,
    /// Its description.
    pub spec: DatasetSpec,
    /// The dataset that it is a part of, which a node must know first.
    pub of: Option<Box<Opening>>,
}

/// What a node is told that does not know the sources of a stream.
#[derive(Clone, Debug, Default)]
pub struct Openings {
    /// The sources that are datasets.
    pub datasets: Vec<Opening>,
    /// The others: the bodies of `POST /v1/datasets/compositions`.
    pub compositions: Vec<Bytes>,
    /// The datasets that those are made of.
    pub bases: Vec<Opening>,
    /// The lengths of all rows of sources: their ids, and the bodies of `POST
    /// /v1/datasets/<id>/lengths`.
    pub lengths: Vec<(String, Bytes)>,
}

impl Openings {
    /// Whether there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.datasets.is_empty() && self.compositions.is_empty() && self.lengths.is_empty()
    }

    /// Tells a node of all of it.
    pub(super) async fn tell(
        &self,
        node: &Arc<Node>,
        limit: Duration,
        has_others: bool,
    ) -> Result<()> {
        for dataset in &self.datasets {
            tell(node, dataset, limit, has_others).await?;
        }
        match self.compose(node, limit, has_others).await {
            Err(e) if e.kind() == ErrorKind::NotFound && !self.bases.is_empty() => {
                for base in &self.bases {
                    tell(node, base, limit, has_others).await?;
                }
                self.compose(node, limit, has_others).await?;
            }
            composed => composed?,
        }
        for (of, lengths) in &self.lengths {
            let path = format!("{DATASETS_PATH}/{}/lengths", encode(of));
            post(node, &path, lengths, limit, has_others).await?;
        }
        Ok(())
    }

    async fn compose(&self, node: &Arc<Node>, limit: Duration, has_others: bool) -> Result<()> {
        for body in &self.compositions {
            post(node, COMPOSITIONS_PATH, body, limit, has_others).await?;
        }
        Ok(())
    }
}

/// Tells a node of what its body says. Its id follows from that: the request for the stream names
/// nothing else.
async fn post(
    node: &Arc<Node>,
    path: &str,
    body: &Bytes,
    limit: Duration,
    has_others: bool,
) -> Result<()> {
    let call = Call::new(Method::POST, path)
        .repeatable()
        .body("application/octet-stream", body.clone());
    let answer = node.call(&call, limit, has_others).await;
    let mut answer = answer.map_err(|missed| missed.failure)?;
    answer.collect(COMPOSED_MAX_BYTES).await?;
    Ok(())
}

/// Opens a dataset at a node.
async fn tell(
    node: &Arc<Node>,
    opening: &Opening,
    limit: Duration,
    has_others: bool,
) -> Result<()> {
    let open = |opening| open(node, opening, limit, has_others);
    let found = match (open(opening).await, &opening.of) {
        (Err(e), Some(of)) if e.kind() == ErrorKind::NotFound => {
            check(node, of, &open(of).await?)?;
            open(opening).await
        }
        (opened, _) => opened,
    };
    check(node, opening, &found?)
}

fn check(node: &Node, opening: &Opening, found: &str) -> Result<()> {
    if found == opening.id {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::PreconditionFailed,
        format!(
            "{} has changed: the stream is of version {}, and {node} finds version {found}",
            opening.name, opening.id
        ),
    )
    .hint(
        "nodes that serve one plan must see the same files; open the dataset again if they changed",
    ))
}

/// The id of what a node finds under a description. It says now and then that it is at it.
async fn open(
    node: &Arc<Node>,
    opening: &Opening,
    limit: Duration,
    has_others: bool,
) -> Result<String> {
    let call = Call::new(Method::POST, format!("{DATASETS_PATH}?progress=true"))
        .repeatable()
        .json(opening.spec.json());
    let answer = node.call(&call, limit, has_others).await;
    let mut lines = Lines::of(answer.map_err(|missed| missed.failure)?);
    while let Some(line) = lines.next().await? {
        let event = serde_json::from_slice(&line).map_err(|e| {
            let message = format!("{node} sent an unreadable event while it opened the dataset");
            Failure::Malformed(Error::corrupt(message).caused_by(e))
        })?;
        match event {
            OpenEvent::Opened(opened) => return Ok(opened.dataset.id),
            OpenEvent::Error(said) => return Err(said.to_error()),
            OpenEvent::Progress(_) | OpenEvent::Other => {}
        }
    }
    let message = format!("{node} stopped in the middle of opening the dataset");
    Err(Error::origin_unavailable(message))
}
