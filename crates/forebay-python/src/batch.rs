//! `Batch` and `Item`: received entries as Python sees them.
//!
//! An item is a view: offsets into the batch's region, exported through the buffer protocol. It
//! holds the batch's memory, so the memory lives as long as any view of it and then returns to the
//! pool. The memory is private to this process and writable, so NumPy and PyTorch take it without a
//! copy or a warning.

use crate::{
    buffer::same_bytes,
    failure::{Class, Failure, Result},
    receive::Receiving,
    request::Span,
};
use forebay_core::units::{count, grouped};
use pyo3::{
    exceptions::{PyIndexError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyBytes, PyList, PyMemoryView, PySlice, PyString},
};
use std::{
    os::raw::c_int,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// The entries of one request, in order, received into one piece of memory.
///
/// Iterate over it (items come as they arrive), index it (waits until that entry has arrived), or
/// take its ``len``. A stream that broke off, ended early or holds something other than what was
/// requested raises :class:`Truncated`: a batch is never shorter than its request. The batch itself
/// is bytes-like: the whole answer, a tar archive.
///
/// The memory is private to this process and writable. It is reused for another batch once the
/// batch and all views of it are gone.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Batch {
    receiving: Arc<Receiving>,
    task: tokio::task::AbortHandle,
}

impl Batch {
    pub fn new(receiving: Arc<Receiving>, task: tokio::task::AbortHandle) -> Self {
        Batch { receiving, task }
    }

    /// Waits for the node's decision: accepted, or an error.
    pub fn wait_accepted(&self, py: Python<'_>) -> PyResult<()> {
        self.receiving.wait(py, None, |state| state.accepted)?;
        self.receiving.look(|state| {
            if state.accepted {
                Ok(())
            } else {
                failure_of(state)
            }
        })??;
        Ok(())
    }

    /// Hands the batch to its consumer: no limit holds it back from now on.
    pub fn ask(&self) {
        self.receiving.ask();
    }

    fn item(&self, py: Python<'_>, index: usize) -> PyResult<Item> {
        self.receiving
            .wait(py, None, |state| state.slots.len() > index)?;
        let view = self.receiving.look(|state| match state.slots.get(index) {
            Some(slot) => Ok((slot.at, slot.size, slot.error().is_some())),
            None => Err(failure_of(state)
                .err()
                .unwrap_or_else(|| Failure::truncated("the batch ended early"))),
        })??;
        Ok(Item {
            receiving: self.receiving.clone(),
            index,
            at: view.0,
            size: view.1,
            failed: view.2,
        })
    }

    fn wait_all(&self, py: Python<'_>) -> PyResult<()> {
        self.receiving.wait(py, None, |_| false)?;
        Ok(self.receiving.look(failure_of)??)
    }
}

fn failure_of(state: &crate::receive::State) -> Result<()> {
    state.finished.clone().unwrap_or(Ok(()))
}

#[pymethods]
impl Batch {
    fn __len__(&self) -> usize {
        self.receiving.len()
    }

    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let len = self.receiving.len();
        if let Ok(slice) = index.cast::<PySlice>() {
            let bounds = slice.indices(len as isize)?;
            let mut items = Vec::with_capacity(bounds.slicelength);
            for n in 0..bounds.slicelength as isize {
                items.push(self.item(py, (bounds.start + n * bounds.step) as usize)?);
            }
            return Ok(PyList::new(
                py,
                items
                    .into_iter()
                    .map(|i| Py::new(py, i))
                    .collect::<PyResult<Vec<_>>>()?,
            )?
            .into_any());
        }
        let wanted: isize = index
            .extract()
            .map_err(|_| PyTypeError::new_err("a batch is indexed by int or slice"))?;
        let at = if wanted < 0 {
            wanted + len as isize
        } else {
            wanted
        };
        if at < 0 || at as usize >= len {
            return Err(PyIndexError::new_err(format!(
                "entry {wanted} does not exist: the batch has {len}"
            )));
        }
        Ok(Bound::new(py, self.item(py, at as usize)?)?.into_any())
    }

    fn __iter__(slf: Bound<'_, Self>) -> BatchIterator {
        slf.get().ask();
        BatchIterator {
            batch: slf.unbind(),
            next: AtomicUsize::new(0),
        }
    }

    /// Waits until everything has arrived and returns the batch.
    ///
    /// Args:
    ///     timeout: Seconds, or None to wait as long as bytes keep arriving.
    ///
    /// Raises:
    ///     Timeout: Not complete in that time; the batch continues.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(
        slf: Bound<'py, Self>,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, Self>> {
        let limit = timeout.map(|s| patience("timeout", s)).transpose()?;
        let batch = slf.get();
        if !batch.receiving.wait(py, limit, |_| false)? {
            let (have, of) = (
                batch.receiving.look(|s| s.slots.len())?,
                batch.receiving.len(),
            );
            return Err(Failure::timeout(format!(
                "{have} of {of} entries arrived in {} s",
                timeout.unwrap_or_default()
            ))
            .into());
        }
        batch.receiving.look(failure_of)??;
        Ok(slf)
    }

    /// Stops receiving; what has arrived stays usable. (Dropping the batch does the same.)
    fn cancel(&self) {
        if self.receiving.is_ours() {
            self.task.abort();
        }
    }

    /// Whether nothing more will arrive.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.receiving.look(|state| state.finished.is_some())?)
    }

    /// Entries that have arrived so far.
    #[getter]
    fn arrived(&self) -> PyResult<usize> {
        Ok(self.receiving.look(|state| state.slots.len())?)
    }

    /// Bytes received so far, archive headers included.
    #[getter]
    fn nbytes(&self) -> usize {
        self.receiving.received()
    }

    /// The id of the request in the node's log.
    #[getter]
    fn request_id(&self) -> PyResult<Option<String>> {
        Ok(self.receiving.look(|state| state.request_id.clone())?)
    }

    /// The names of all entries in the archive: ``bucket/objname[/archpath]``. Waits for all
    /// entries.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.wait_all(py)?;
        let region = self
            .receiving
            .region()
            .ok_or_else(|| Failure::truncated("the batch is empty"))?;
        let names = self.receiving.look(|state| {
            state
                .slots
                .iter()
                .map(|s| s.name(region))
                .collect::<Vec<_>>()
        })?;
        PyList::new(py, names)
    }

    /// The sizes of all entries in bytes. Waits for all entries.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.wait_all(py)?;
        PyList::new(
            py,
            self.receiving
                .look(|state| state.slots.iter().map(|s| s.size).collect::<Vec<_>>())?,
        )
    }

    /// ``(index, message)`` of each entry that could not be had. Waits for all entries.
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.wait_all(py)?;
        let found = self.receiving.look(|state| {
            let failed = state
                .slots
                .iter()
                .enumerate()
                .filter_map(|(i, s)| s.error().map(|e| (i, e.to_owned())));
            failed.collect::<Vec<_>>()
        })?;
        PyList::new(py, found)
    }

    /// The whole answer, a tar archive.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        slf.get().wait_all(slf.py())?;
        let region = slf
            .get()
            .receiving
            .region()
            .ok_or_else(|| Failure::truncated("the batch is empty"))?;
        // SAFETY: all bytes are published, and the view holds this object, which holds the region.
        unsafe { fill_view(slf.as_any(), view, flags, region.pointer(0), region.len()) }
    }

    fn __repr__(&self) -> String {
        let state = self.receiving.look(|state| {
            let status = match &state.finished {
                None => "arriving".to_owned(),
                Some(Ok(())) => "complete".to_owned(),
                Some(Err(failure)) => format!("failed: {}", failure.message),
            };
            (state.slots.len(), status)
        });
        let (arrived, status) = state.unwrap_or((0, "of another process".to_owned()));
        let entries = match self.receiving.len() {
            1 => "1 entry".to_owned(),
            n => format!("{} entries", grouped(n as u64)),
        };
        format!(
            "<forebay.Batch of {entries}, {} arrived, {}, {status}>",
            grouped(arrived as u64),
            count(self.receiving.received() as u64, "byte")
        )
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.receiving.is_ours() {
            self.task.abort();
        } else {
            // The task belongs to the parent of this fork.
            std::mem::forget(self.task.clone());
        }
    }
}

#[pyclass(frozen, module = "forebay")]
pub struct BatchIterator {
    batch: Py<Batch>,
    next: AtomicUsize,
}

#[pymethods]
impl BatchIterator {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Item>> {
        let batch = self.batch.get();
        let index = self.next.load(Ordering::Relaxed);
        if index >= batch.receiving.len() {
            // An answer that does not end properly is not complete, even if each entry arrived.
            batch.wait_all(py)?;
            return Ok(None);
        }
        let item = batch.item(py, index)?;
        self.next.store(index + 1, Ordering::Relaxed);
        Ok(Some(item))
    }

    fn __length_hint__(&self) -> usize {
        self.batch
            .get()
            .receiving
            .len()
            .saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

/// One entry of a batch: a view of its bytes.
///
/// It is bytes-like: ``numpy.frombuffer(item, numpy.uint8)``, ``torch.frombuffer(item,
/// dtype=torch.uint8)``, ``bytes(item)`` and ``item.data`` (a ``memoryview``) work; all but
/// ``bytes`` without a copy, and ``==`` compares bytes. True unless it has an ``error``; its bytes
/// then raise :class:`EntryFailed`. Pickled or copied, as by a ``DataLoader`` worker, it becomes ``bytes``.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Item {
    receiving: Arc<Receiving>,
    index: usize,
    at: usize,
    size: usize,
    failed: bool,
}

impl Item {
    fn wanted(&self, part: impl Fn(&crate::request::Wanted) -> Span) -> Option<&str> {
        self.receiving
            .request
            .text(part(self.receiving.request.get(self.index)))
    }

    fn name_text(&self) -> PyResult<String> {
        let region = self
            .receiving
            .region()
            .ok_or_else(|| Failure::truncated("the batch is empty"))?;
        let name = self
            .receiving
            .look(|state| state.slots.get(self.index).map(|s| s.name(region)))?;
        Ok(name.unwrap_or_default())
    }

    fn present(&self) -> PyResult<()> {
        match self.error()? {
            None => Ok(()),
            Some(error) => Err(Failure::new(
                Class::EntryFailed,
                format!("entry {} ({}): {error}", self.index, self.name_text()?),
            )
            .hint("look at item.error before item.data when continue_on_error is set")
            .into()),
        }
    }
}

#[pymethods]
impl Item {
    /// Its position in the request.
    #[getter]
    fn index(&self) -> usize {
        self.index
    }

    /// Its name in the archive; begins with ``__404__/`` if it could not be had.
    #[getter]
    fn name(&self) -> PyResult<String> {
        self.name_text()
    }

    /// The requested bucket.
    #[getter]
    fn bucket(&self) -> Option<&str> {
        self.wanted(|w| w.bucket)
    }

    /// The requested object.
    #[getter]
    fn objname(&self) -> Option<&str> {
        self.wanted(|w| w.object)
    }

    /// The requested member, or None for a whole object.
    #[getter]
    fn archpath(&self) -> Option<&str> {
        self.wanted(|w| w.member)
    }

    /// What the request carried as ``opaque``.
    #[getter]
    fn opaque<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let request = &self.receiving.request;
        request
            .rest(request.get(self.index))
            .and_then(|r| r.opaque.as_ref())
            .map(|o| PyBytes::new(py, o))
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// Why it could not be had, or None.
    #[getter]
    fn error(&self) -> PyResult<Option<String>> {
        if !self.failed {
            return Ok(None);
        }
        Ok(self.receiving.look(|state| {
            state
                .slots
                .get(self.index)
                .and_then(|s| s.error().map(str::to_owned))
        })?)
    }

    /// Its bytes, without a copy: a ``memoryview`` of shape ``(size,)``, format ``B``, writable.
    #[getter]
    fn data<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        slf.get().present()?;
        PyMemoryView::from(slf.as_any())
    }

    fn __len__(&self) -> usize {
        self.size
    }

    fn __bool__(&self) -> bool {
        !self.failed
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.present()?;
        let region = self
            .receiving
            .region()
            .ok_or_else(|| Failure::truncated("the batch is empty"))?;
        Ok(PyBytes::new(py, region.bytes(self.at, self.size)))
    }

    /// As of a `Buffer`, whose bytes may change too: neither has a hash. What could not be had is
    /// equal to itself alone.
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        if self.failed {
            let item = other.cast::<Item>();
            return Ok(item.is_ok_and(|item| std::ptr::eq(item.get(), self)));
        }
        let region = self
            .receiving
            .region()
            .ok_or_else(|| Failure::truncated("the batch is empty"))?;
        same_bytes(region.bytes(self.at, self.size), other)
    }

    fn __reduce__<'py>(
        slf: Bound<'py, Self>,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        // As plain bytes, like a `Buffer`: the batch and its request do not go along.
        Ok((
            py.get_type::<PyBytes>().into_any(),
            (slf.get().__bytes__(py)?,),
        ))
    }

    #[pyo3(signature = (encoding="utf-8", errors="strict"))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        encoding: &str,
        errors: &str,
    ) -> PyResult<Bound<'py, PyString>> {
        Ok(self
            .__bytes__(py)?
            .call_method1("decode", (encoding, errors))?
            .cast_into::<PyString>()?)
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let item = slf.get();
        item.present()?;
        let region = item
            .receiving
            .region()
            .ok_or_else(|| Failure::truncated("the batch is empty"))?;
        // SAFETY: an item exists only for published bytes, and the view holds the item, which holds
        // the region.
        unsafe {
            fill_view(
                slf.as_any(),
                view,
                flags,
                region.pointer(item.at),
                item.size,
            )
        }
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(match self.error()? {
            None => format!(
                "<forebay.Item {} {:?}, {}>",
                self.index,
                self.name_text()?,
                count(self.size as u64, "byte")
            ),
            Some(error) => format!(
                "<forebay.Item {} {:?}, error: {error}>",
                self.index,
                self.name_text()?
            ),
        })
    }
}

/// Fills in a writable view of `len` bytes at `at`, owned by `owner`.
///
/// # Safety
/// The bytes must stay valid for as long as `owner` lives; `view` comes from the interpreter.
pub unsafe fn fill_view(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    at: *mut u8,
    len: usize,
) -> PyResult<()> {
    // SAFETY: the caller passes the interpreter's view, and bytes that live as long as the owner.
    // The call takes a reference to the owner.
    let rc = unsafe {
        ffi::PyBuffer_FillInfo(
            view,
            owner.as_ptr(),
            at.cast(),
            len as ffi::Py_ssize_t,
            0,
            flags,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(owner.py()))
    }
}

/// A duration from Python, as the argument of this name: positive, finite seconds.
pub fn patience(name: &str, seconds: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(d) if !d.is_zero() => Ok(d),
        _ => Err(Failure::invalid(format!(
            "{name}={seconds} is not a number of seconds above 0"
        ))),
    }
}
