//! Writing an object from a Python file: read under the GIL, sent without it, a few pieces in
//! memory at a time.

use crate::{
    failure::{Class, Failure, Result},
    names::Name,
    objects::{self, Condition},
    process,
    session::Session,
};
use bytes::Bytes;
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyBytes};
use std::sync::Arc;

/// The size of the pieces in which files are sent.
const UPLOAD_PIECE_BYTES: usize = 1 << 20;

/// Sends what `file.read` returns, piece by piece: memory use stays at a few pieces however large
/// the file is. `length`: how long it is, if that is known.
pub fn from_file(
    py: Python<'_>,
    session: &Arc<Session>,
    name: &Name,
    condition: Condition,
    file: &Bound<'_, PyAny>,
    length: Option<u64>,
) -> PyResult<Option<String>> {
    // `None` is the proper end. If the channel closes without it, the request breaks off: a caller
    // that was interrupted, or a file that could not be read to its end, must not leave half an
    // object that looks complete.
    let (sender, receiver) = tokio::sync::mpsc::channel::<Option<Bytes>>(2);
    let pieces = futures::stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Some(piece)) => Some((Ok(piece), Some(receiver))),
            Some(None) => None,
            None => Some((Err(std::io::Error::other("the upload was cancelled")), None)),
        }
    });
    let (session, of) = (session.clone(), name.clone());
    let upload = async move {
        objects::upload(&session.node, &of, condition, length, Box::pin(pieces)).await
    };
    let task = Upload(process::runtime()?.spawn(upload));
    let mut before = 0;
    let mut next = || -> PyResult<Bytes> {
        let piece = file.call_method1("read", (UPLOAD_PIECE_BYTES,))?;
        let piece = piece
            .cast::<PyBytes>()
            .map_err(|_| PyTypeError::new_err("the file is not opened in binary mode"))?
            .as_bytes();
        if let Some(length) = length
            && (before > length || piece.is_empty() != (before == length))
        {
            let message = format!("{name}: the file has changed, it had {length} bytes at first");
            let hint = "nothing was written; put it again when nobody writes to the file";
            return Err(Failure::new(Class::Conflict, message).hint(hint).into());
        }
        before += piece.len() as u64;
        Ok(Bytes::copy_from_slice(piece))
    };
    let mut piece = next()?;
    while !piece.is_empty() {
        // The last piece is held back until the file turns out to end with it.
        let after = next()?;
        // A closed channel means that the upload has failed; its own error says why.
        if !process::wait(py, async { Ok(sender.send(Some(piece)).await.is_ok()) })? {
            break;
        }
        piece = after;
    }
    let mut task = task;
    process::wait(py, async {
        // If the upload has already failed, its own error says why.
        let _ = sender.send(None).await;
        (&mut task.0)
            .await
            .map_err(|e| Failure::new(Class::Error, format!("the upload stopped: {e}")))?
    })
}

/// An upload that stops if its caller leaves.
struct Upload(tokio::task::JoinHandle<Result<Option<String>>>);

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.abort();
    }
}
