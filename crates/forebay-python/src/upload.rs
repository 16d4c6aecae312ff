//! Writing an object from a Python file: read under the GIL, sent without it, a few pieces in
//! memory at a time.

use crate::{
    failure::{Class, Failure, Result},
    names::Name,
    objects::{self, Condition},
    process,
    session::Session,
};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyBytes};
use std::sync::Arc;

/// The size of the pieces in which files are sent.
const UPLOAD_PIECE_BYTES: usize = 1 << 20;

/// Sends what `file.read` returns, piece by piece: memory use stays at a few pieces however large
/// the file is.
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
    let (sender, receiver) = tokio::sync::mpsc::channel::<Option<bytes::Bytes>>(2);
    let pieces = futures::stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Some(piece)) => Some((Ok(piece), Some(receiver))),
            Some(None) => None,
            None => Some((Err(std::io::Error::other("the upload was cancelled")), None)),
        }
    });
    let (session, name) = (session.clone(), name.clone());
    let upload = async move {
        objects::upload(&session.node, &name, condition, length, Box::pin(pieces)).await
    };
    let task = Upload(process::runtime()?.spawn(upload));
    loop {
        let piece = file.call_method1("read", (UPLOAD_PIECE_BYTES,))?;
        let piece = piece
            .cast::<PyBytes>()
            .map_err(|_| PyTypeError::new_err("the file is not opened in binary mode"))?;
        if piece.as_bytes().is_empty() {
            break;
        }
        let bytes = bytes::Bytes::copy_from_slice(piece.as_bytes());
        // A closed channel means that the upload has failed; its own error says why.
        if !process::wait(py, async { Ok(sender.send(Some(bytes)).await.is_ok()) })? {
            break;
        }
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
