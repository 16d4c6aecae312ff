//! `Buffer`: the bytes of one object, allocated once at their size, exported through the buffer
//! protocol.

use crate::{batch::fill_view, failure::Failure, failure::Result};
use forebay_core::units::count;
use pyo3::{
    buffer::PyBuffer,
    exceptions::PyTypeError,
    ffi,
    prelude::*,
    types::{PyBytes, PyMemoryView, PyString},
};
use std::os::raw::c_int;

/// The bytes of one object: bytes-like and writable. ``bytes(buffer)`` copies them,
/// ``memoryview(buffer)`` does not.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Buffer {
    at: *mut u8,
    len: usize,
    capacity: usize,
    #[pyo3(get)]
    etag: Option<String>,
}

// SAFETY: the memory is owned and consists of plain bytes; Python controls access to it, as with a
// bytearray.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub fn new(bytes: Vec<u8>, etag: Option<String>) -> Self {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        Buffer {
            at: bytes.as_mut_ptr(),
            len: bytes.len(),
            capacity: bytes.capacity(),
            etag,
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: owned; whoever may write holds the GIL.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the parts of the `Vec` that `new` took apart.
        drop(unsafe { Vec::from_raw_parts(self.at, self.len, self.capacity) });
    }
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.len
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.bytes())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        same_bytes(self.bytes(), other)
    }

    #[pyo3(signature = (encoding="utf-8", errors="strict"))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        encoding: &str,
        errors: &str,
    ) -> PyResult<Bound<'py, PyString>> {
        Ok(self
            .__bytes__(py)
            .call_method1("decode", (encoding, errors))?
            .cast_into::<PyString>()?)
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let buffer = slf.get();
        // SAFETY: the memory lives as long as this object, which the view holds.
        unsafe { fill_view(slf.as_any(), view, flags, buffer.at, buffer.len) }
    }

    fn __reduce__<'py>(
        slf: Bound<'py, Self>,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        // As plain bytes: a copy in another process is no longer a view of anything.
        Ok((
            py.get_type::<PyBytes>().into_any(),
            (slf.get().__bytes__(py),),
        ))
    }

    fn __repr__(&self) -> String {
        format!("<forebay.Buffer of {}>", count(self.len as u64, "byte"))
    }
}

/// Whether `other` is bytes-like and has these bytes.
pub fn same_bytes(bytes: &[u8], other: &Bound<'_, PyAny>) -> PyResult<bool> {
    match PyBuffer::<u8>::get(other) {
        Ok(other_bytes) if other_bytes.item_count() == bytes.len() => {
            let mut copy = vec![0; bytes.len()];
            other_bytes.copy_to_slice(other.py(), &mut copy)?;
            Ok(copy == bytes)
        }
        _ => Ok(false),
    }
}

/// The data that a caller passes to `put`: bytes-like, copied under the GIL so that the caller may
/// change it afterwards.
pub fn copy_of(data: &Bound<'_, PyAny>) -> PyResult<Option<bytes::Bytes>> {
    if let Ok(plain) = data.cast::<PyBytes>() {
        return Ok(Some(bytes::Bytes::copy_from_slice(plain.as_bytes())));
    }
    // Views with other item types (an array of float32) are read as their bytes.
    let Ok(view) = PyMemoryView::from(data) else {
        return Ok(None);
    };
    // In a format, names of fields stand between colons. The bytes of Python's objects would be their
    // addresses.
    let format: String = view.getattr("format")?.extract()?;
    if format
        .split(':')
        .step_by(2)
        .any(|types| types.contains('O'))
    {
        return Err(PyTypeError::new_err(
            "an array of Python objects has no bytes of its own: convert it to another type, or pickle it",
        ));
    }
    // Python casts only those that have items, in one piece.
    let view = match view.call_method1("cast", ("B",)) {
        Ok(view) => view,
        Err(_) => view.call_method0("tobytes")?,
    };
    Ok(Some(PyBuffer::<u8>::get(&view)?.to_vec(data.py())?.into()))
}

/// Memory for an answer of `length` bytes, or an error instead of an abort.
pub fn room(length: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let wanted = usize::try_from(length).unwrap_or(usize::MAX);
    bytes.try_reserve_exact(wanted).map_err(|_| {
        Failure::new(
            crate::failure::Class::Error,
            format!("memory for an object of {length} bytes could not be allocated"),
        )
        .hint("read it by ranges: start= and length=")
    })?;
    Ok(bytes)
}
