//! What the origin has of a checkpoint's name is looked for while the checkpoint is staged: its
//! writer need not wait for the origin.

use crate::{manifest::Manifest, types::Place};
use forebay_core::{ErrorKind, Result, request};
use forebay_engine::Engine;
use std::time::Duration;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// How long after its beginning a checkpoint waits for the answer: to stage it, the origin need not
/// answer.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// The id of the checkpoint that the origin has, or why there is none.
type Seen = Result<Option<String>>;

pub(crate) struct Look {
    answer: watch::Receiver<Option<Seen>>,
    until: Instant,
}

impl Look {
    /// Asks the origin. Dropping this ends the question.
    pub fn begin(engine: Engine, place: Place) -> Self {
        let (told, answer) = watch::channel(None);
        request::spawn(async move {
            let look = Manifest::at_origin(&engine, &place.bucket, &place.prefix);
            tokio::select! {
                seen = look => {
                    let _ = told.send(Some(seen.map(|m| m.map(|m| m.id))));
                }
                () = told.closed() => {}
            }
        });
        Look {
            answer,
            until: Instant::now() + LOOK_MAX,
        }
    }

    /// The checkpoint that is replaced, if the origin has one and says so in time.
    ///
    /// # Errors
    /// `Corrupt` and `Unsupported`: what has the name can never be replaced.
    pub async fn end(&self) -> Seen {
        let mut answer = self.answer.clone();
        match timeout_at(self.until, answer.wait_for(Option::is_some)).await {
            Ok(Ok(seen)) => verdict(&seen),
            _ => Ok(None),
        }
    }

    /// [`Look::end`]'s errors, as far as they are known by now.
    pub fn check(&self) -> Result<()> {
        verdict(&self.answer.borrow()).map(drop)
    }
}

fn verdict(seen: &Option<Seen>) -> Seen {
    match seen {
        Some(Err(e)) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
            Err(e.clone())
        }
        Some(Ok(id)) => Ok(id.clone()),
        Some(Err(_)) | None => Ok(None),
    }
}
