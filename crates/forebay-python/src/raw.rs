//! Requests whose meaning Python knows: one answer as bytes, a body that is written piece by piece
//! without a copy, and a range that is read straight into the caller's memory, over the connection
//! or from a file that the node lends.

use crate::{
    buffer::Buffer,
    failure::{Class, Failure, Result},
    objects::{self, SHORT_ANSWER_MAX_BYTES},
    process,
    session::Session,
};
use forebay_client::Call;
use forebay_core::sync::Mutex;
use http::{Method, StatusCode, header};
use pyo3::{
    buffer::PyBuffer,
    exceptions::{PyBufferError, PyValueError},
    prelude::*,
};
use std::{io, sync::Arc};
use tokio::sync::{mpsc, oneshot};

/// The pieces in which large views are handed to the connection.
const PIECE_BYTES: usize = 1 << 20;
/// Smaller views are gathered before they are sent.
const GATHERED_BYTES: usize = 256 << 10;

fn method(name: &str) -> Result<Method> {
    Method::from_bytes(name.as_bytes())
        .map_err(|_| Failure::invalid(format!("{name:?} is not a method of HTTP")))
}

/// One request with a short body; its answer. What only reads may be sent again.
pub fn call(
    py: Python<'_>,
    session: &Arc<Session>,
    name: &str,
    path: &str,
    body: Option<Vec<u8>>,
) -> PyResult<Buffer> {
    let mut call = Call::new(method(name)?, path);
    if let Some(body) = body {
        call = call.json(body);
    }
    let bytes = process::wait(py, objects::whole(&session.node, &call))?;
    Ok(Buffer::new(bytes, None))
}

/// A view of memory that Python keeps while anything of it is on its way.
struct Held {
    at: usize,
    len: usize,
    _view: PyBuffer<u8>,
    /// Dropped after the view: whoever waits for that may resize the memory.
    _gone: oneshot::Sender<()>,
}

/// A part of it.
struct Slice {
    held: Arc<Held>,
    begin: usize,
    len: usize,
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        debug_assert!(self.begin + self.len <= self.held.len);
        // SAFETY: the view keeps the memory in place as long as it exists, and `Held` has it. The
        // caller of `write` waits until all slices are gone, so nobody writes there meanwhile, unless
        // it was interrupted; plain bytes may then be sent in any state, and the request is broken
        // off.
        unsafe { std::slice::from_raw_parts((self.held.at + self.begin) as *const u8, self.len) }
    }
}

type Pieces = mpsc::Sender<Option<bytes::Bytes>>;

/// A request whose body is written piece by piece. Private to ``forebay.checkpoint``.
#[pyclass(frozen, module = "forebay._forebay", name = "_Upload")]
pub struct Upload {
    inner: Mutex<Option<Open>>,
}

struct Open {
    pieces: Pieces,
    task: tokio::task::JoinHandle<Result<Vec<u8>>>,
    gathered: Vec<u8>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Begins a request with a body of `length` bytes, if that is known.
pub fn upload(
    session: Arc<Session>,
    name: &str,
    path: &str,
    length: Option<u64>,
) -> Result<Upload> {
    let (pieces, receiver) = mpsc::channel::<Option<bytes::Bytes>>(4);
    // `None` is the proper end: without it, the request breaks off.
    let body = futures::stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Some(piece)) => Some((Ok(piece), Some(receiver))),
            Some(None) => None,
            None => Some((Err(io::Error::other("the upload was given up")), None)),
        }
    });
    let call = Call::new(method(name)?, path);
    let task = process::runtime()?.spawn(async move {
        let mut answer = session.node.upload(&call, length, Box::pin(body)).await?;
        Ok(answer.collect(SHORT_ANSWER_MAX_BYTES).await?.to_vec())
    });
    Ok(Upload {
        inner: Mutex::new(Some(Open {
            pieces,
            task,
            gathered: Vec::new(),
        })),
    })
}

fn ended() -> Failure {
    Failure::new(Class::Error, "the upload has ended")
}

/// What the request itself says, once it does not take any more of its body.
async fn why(open: &mut Open) -> Failure {
    match (&mut open.task).await {
        Ok(Err(failure)) => failure,
        Ok(Ok(_)) => Failure::new(
            Class::ServerError,
            "the node answered before the upload ended",
        ),
        Err(e) => Failure::new(Class::Error, format!("the upload stopped: {e}")),
    }
}

async fn flush(open: &mut Open) -> Result<()> {
    if open.gathered.is_empty() {
        return Ok(());
    }
    let gathered = std::mem::take(&mut open.gathered);
    match open.pieces.send(Some(gathered.into())).await {
        Ok(()) => Ok(()),
        Err(_) => Err(why(open).await),
    }
}

#[pymethods]
impl Upload {
    /// Appends a bytes-like object. A large one is not copied: this returns when the connection has
    /// taken all of it.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let view = bytes_of(data, false)?;
        let len = view.len_bytes();
        let mut open = self.inner.lock().take().ok_or_else(ended)?;
        if len < GATHERED_BYTES {
            // SAFETY: the view is of `len` bytes in one piece, and the GIL is held.
            let bytes = unsafe { std::slice::from_raw_parts(view.buf_ptr().cast::<u8>(), len) };
            open.gathered.extend_from_slice(bytes);
            if open.gathered.len() >= GATHERED_BYTES {
                process::wait(py, flush(&mut open))?;
            }
        } else {
            let (gone, mut all_gone) = oneshot::channel();
            let held = Arc::new(Held {
                at: view.buf_ptr() as usize,
                len,
                _view: view,
                _gone: gone,
            });
            process::wait(py, async {
                flush(&mut open).await?;
                for begin in (0..len).step_by(PIECE_BYTES) {
                    let slice = Slice {
                        held: held.clone(),
                        begin,
                        len: PIECE_BYTES.min(len - begin),
                    };
                    let piece = bytes::Bytes::from_owner(slice);
                    if open.pieces.send(Some(piece)).await.is_err() {
                        return Err(why(&mut open).await);
                    }
                }
                drop(held);
                // It ends when the other end is dropped.
                let _ = (&mut all_gone).await;
                Ok(())
            })?;
        }
        *self.inner.lock() = Some(open);
        Ok(len)
    }

    /// Ends the body; the node's answer.
    fn finish(&self, py: Python<'_>) -> PyResult<Buffer> {
        let mut open = self.inner.lock().take().ok_or_else(ended)?;
        let answer = process::wait(py, async {
            flush(&mut open).await?;
            // If the request has failed already, its own error says why.
            let _ = open.pieces.send(None).await;
            (&mut open.task)
                .await
                .map_err(|e| Failure::new(Class::Error, format!("the upload stopped: {e}")))?
        })?;
        Ok(Buffer::new(answer, None))
    }

    /// Breaks the request off.
    fn abort(&self) {
        drop(self.inner.lock().take());
    }
}

/// A view of bytes in one piece.
pub fn bytes_of(data: &Bound<'_, PyAny>, writable: bool) -> PyResult<PyBuffer<u8>> {
    let view = match PyBuffer::<u8>::get(data) {
        Ok(view) => view,
        Err(_) => {
            let view = pyo3::types::PyMemoryView::from(data)?.call_method1("cast", ("B",))?;
            PyBuffer::<u8>::get(&view)?
        }
    };
    if !view.is_c_contiguous() || (writable && view.readonly()) {
        return Err(PyBufferError::new_err(
            "the memory is not in one piece, or may not be written to",
        ));
    }
    Ok(view)
}

/// Where bytes are read into.
struct Target(*mut u8, usize);

// SAFETY: plain memory of a view that the caller keeps; one task writes to it.
unsafe impl Send for Target {}

impl Target {
    fn put(&mut self, piece: &[u8]) -> bool {
        if piece.len() > self.1 {
            return false;
        }
        // SAFETY: `self.1` bytes are left there, and the piece is no longer than that.
        unsafe {
            std::ptr::copy_nonoverlapping(piece.as_ptr(), self.0, piece.len());
            self.0 = self.0.add(piece.len());
        }
        self.1 -= piece.len();
        true
    }
}

/// Fills `target` with the bytes of what `path` names from `start` on.
pub fn read_into(
    py: Python<'_>,
    session: &Arc<Session>,
    path: &str,
    start: u64,
    target: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let view = bytes_of(target, true)?;
    let len = view.len_bytes();
    if len == 0 {
        return Ok(());
    }
    let target = Target(view.buf_ptr().cast::<u8>(), len);
    let range = format!("bytes={start}-{}", start + len as u64 - 1);
    let call = Call::new(Method::GET, path).header(header::RANGE, range);
    process::wait(py, async {
        let mut target = target;
        let mut answer = session.node.call(&call).await.map_err(Failure::from)?;
        if answer.status != StatusCode::PARTIAL_CONTENT {
            return Err(Failure::new(
                Class::ServerError,
                format!(
                    "{path}: the node ignored the range and answered {}",
                    answer.status
                ),
            ));
        }
        while let Some(piece) = answer.piece().await? {
            if !target.put(&piece) {
                return Err(Failure::truncated(format!(
                    "{path}: more arrived than was asked for"
                )));
            }
        }
        match target.1 {
            0 => Ok(()),
            left => Err(Failure::truncated(format!(
                "{path}: {left} of {len} bytes did not arrive"
            ))),
        }
    })?;
    drop(view);
    Ok(())
}

/// A file that the node lends, read without the node. Private to ``forebay.checkpoint``.
#[pyclass(frozen, module = "forebay._forebay", name = "_Borrowed")]
pub struct Borrowed(Mutex<Option<Arc<forebay_client::Borrowed>>>);

/// Asks for what a path names as a file; `None`: the node does not lend it.
pub fn borrow(py: Python<'_>, session: &Arc<Session>, path: &str) -> PyResult<Option<Borrowed>> {
    let call = Call::new(Method::GET, path);
    let borrowed = process::wait(py, async { Ok(session.node.borrow(&call).await) })?;
    Ok(borrowed.map(|file| Borrowed(Mutex::new(Some(Arc::new(file))))))
}

#[pymethods]
impl Borrowed {
    /// Fills writable bytes-like objects with the bytes from where each starts on, verified; in the
    /// order of the file. Raises ``OSError`` if they are not there, or not what the node wrote;
    /// ``ValueError`` once closed.
    fn read_into(&self, py: Python<'_>, parts: Vec<(u64, Bound<'_, PyAny>)>) -> PyResult<()> {
        let file = self.0.lock().clone();
        let file = file.ok_or_else(|| PyValueError::new_err("the file was given back"))?;
        let views = parts
            .iter()
            .map(|(start, target)| Ok((*start, bytes_of(target, true)?)))
            .collect::<PyResult<Vec<_>>>()?;
        let targets: Vec<(u64, Target)> = views
            .iter()
            .filter(|(_, view)| view.len_bytes() > 0)
            .map(|(start, view)| {
                let target = Target(view.buf_ptr().cast::<u8>(), view.len_bytes());
                (*start, target)
            })
            .collect();
        // Two parts may be the same memory, as with layers that share weights. Such parts are read one
        // after the other: what is read last stays, and no part is verified while another is written
        // over it.
        let mut places: Vec<(usize, usize)> = targets
            .iter()
            .map(|(_, Target(at, len))| (*at as usize, *len))
            .collect();
        places.sort_unstable();
        let is_apart = places.windows(2).all(|two| two[1].0 - two[0].0 >= two[0].1);
        py.detach(move || {
            let mut together = Vec::with_capacity(targets.len());
            for (start, target) in targets {
                let Target(at, len) = target;
                // SAFETY: the view keeps `len` bytes in place until this returns, and those that are
                // in use at one time do not overlap. Nobody else is to use memory that is being
                // filled; these are plain bytes, whatever is there.
                let target = unsafe { std::slice::from_raw_parts_mut(at, len) };
                if is_apart {
                    together.push((start, target));
                } else {
                    file.read_into(vec![(start, target)])?;
                }
            }
            file.read_into(together)
        })?;
        drop(views);
        Ok(())
    }

    /// Gives the file back. Reads that have begun go to their end.
    fn close(&self) {
        drop(self.0.lock().take());
    }
}
