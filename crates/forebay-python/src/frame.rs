//! `RecordBatch`: rows as they were received, for Arrow, NumPy and plain Python, without another
//! copy.
//!
//! A frame's payload is received into memory that is aligned as Arrow needs it ([`Receiver`]), a large
//! one into a region that batches before it were in; the batch's columns are slices of it. They are exported through the Arrow PyCapsule interface, as
//! buffers, or as Python values, among which bytes are views. Each of these holds the memory.
//!
//! Invariant: nothing is handed out before the frame is complete and its checksum and structure
//! have been checked.

use crate::{
    batch::fill_view,
    failure::{Class, Failure, Result},
    region::{Region, RegionPool},
    rows::Node,
};
use arrow_array::{Array, ArrayRef, StructArray, ffi::to_ffi};
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_data::ArrayData;
use arrow_schema::DataType;
use forebay_client::Answer;
use forebay_core::{Error, units::count};
use forebay_protocol::frame::{
    FRAME_ALIGNMENT, FRAME_HEADER_BYTES, FrameHeader, FrameKind, decode_error, decode_rows,
};
use pyo3::{
    exceptions::{PyKeyError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyCapsule, PyDict, PyList, PyTuple},
};
use std::{os::raw::c_int, panic::AssertUnwindSafe, ptr::NonNull, sync::Arc};

/// From this size on, the C library returns memory to the system each time that it is freed, and
/// filling new memory takes longer than the copy itself.
const REGION_FROM_BYTES: usize = 16 << 20;

/// Takes the bytes of one frame as they arrive.
pub struct Receiver<'s> {
    regions: &'s Arc<RegionPool>,
    header: Vec<u8>,
    payload: Option<(FrameHeader, Payload)>,
}

enum Payload {
    Small(MutableBuffer),
    Large(Region),
}

impl Payload {
    fn of(bytes: usize, regions: &Arc<RegionPool>) -> Result<Payload> {
        if bytes >= REGION_FROM_BYTES {
            return Ok(Payload::Large(Region::sized(bytes, regions)?));
        }
        let buffer = MutableBuffer::try_with_capacity(bytes).map_err(|_| {
            Failure::new(
                Class::Error,
                format!("memory for rows of {bytes} bytes could not be allocated"),
            )
            .hint("ask for fewer rows or columns at a time")
        })?;
        assert_eq!(buffer.as_ptr().align_offset(FRAME_ALIGNMENT), 0);
        Ok(Payload::Small(buffer))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Payload::Small(buffer) => {
                buffer.extend_from_slice(bytes);
                Ok(())
            }
            Payload::Large(region) => region.append(bytes),
        }
    }

    fn len(&self) -> usize {
        match self {
            Payload::Small(buffer) => buffer.len(),
            Payload::Large(region) => region.len(),
        }
    }

    fn into_buffer(self) -> Buffer {
        match self {
            Payload::Small(buffer) => buffer.into(),
            Payload::Large(region) => {
                let (at, len) = (region.pointer(0), region.len());
                // A mapping begins with a page. (A null pointer would be no mapping.)
                let at = NonNull::new(at).expect("a mapping");
                assert_eq!(at.as_ptr().align_offset(FRAME_ALIGNMENT), 0);
                let owner = Arc::new(AssertUnwindSafe(region));
                // SAFETY: the owner keeps these bytes in place, all of them were received, and nothing
                // writes to them any more.
                unsafe { Buffer::from_custom_allocation(at, len, owner) }
            }
        }
    }
}

impl<'s> Receiver<'s> {
    pub fn new(regions: &'s Arc<RegionPool>) -> Self {
        Receiver {
            regions,
            header: Vec::new(),
            payload: None,
        }
    }

    /// Takes what belongs to this frame and returns how much that was.
    pub fn push(&mut self, piece: &[u8]) -> Result<usize> {
        let mut taken = 0;
        if self.payload.is_none() {
            taken = piece.len().min(FRAME_HEADER_BYTES - self.header.len());
            self.header.extend_from_slice(&piece[..taken]);
            if self.header.len() < FRAME_HEADER_BYTES {
                return Ok(taken);
            }
            let header = FrameHeader::decode(&self.header).map_err(broken)?;
            let room = header.wire_payload_bytes() as usize;
            let buffer = Payload::of(room, self.regions)?;
            self.payload = Some((header, buffer));
        }
        if let Some((header, buffer)) = &mut self.payload {
            let rest = &piece[taken..];
            let now = rest
                .len()
                .min(header.wire_payload_bytes() as usize - buffer.len());
            buffer.append(&rest[..now])?;
            taken += now;
        }
        Ok(taken)
    }

    pub fn is_whole(&self) -> bool {
        self.payload
            .as_ref()
            .is_some_and(|(header, buffer)| buffer.len() as u64 == header.wire_payload_bytes())
    }

    /// The frame's header and payload, without padding.
    pub fn finish(self) -> Result<(FrameHeader, Buffer)> {
        let whole = self.is_whole();
        match self.payload {
            Some((header, buffer)) if whole => Ok((
                header,
                buffer
                    .into_buffer()
                    .slice_with_length(0, header.payload_bytes as usize),
            )),
            _ => Err(Failure::truncated(
                "the answer ended in the middle of a frame",
            )),
        }
    }
}

fn broken(e: Error) -> Failure {
    Failure::new(Class::ServerError, e.message().to_owned())
        .hint(e.hint_text().unwrap_or("send the request again"))
}

/// The rows in an answer that is a single frame.
pub async fn receive_rows(
    answer: &mut Answer,
    regions: &Arc<RegionPool>,
) -> Result<arrow_array::RecordBatch> {
    let mut receiver = Receiver::new(regions);
    while let Some(piece) = answer.piece().await? {
        if receiver.push(&piece)? < piece.len() {
            return Err(Failure::truncated("the answer goes on after its end"));
        }
    }
    let (header, payload) = receiver.finish()?;
    match header.kind {
        FrameKind::Rows => decode_rows(&header, &payload).map_err(broken),
        FrameKind::Error => Err(broken(decode_error(&header, &payload))),
        other => Err(Failure::new(
            Class::ServerError,
            format!("the node answered with a frame of kind {other:?} in place of rows"),
        )),
    }
}

/// Rows that a node sent: one Arrow record batch, in the memory that it was received into.
///
/// ``pyarrow.record_batch(batch)``, ``polars.from_arrow(batch)`` and everything else that knows the
/// Arrow PyCapsule interface take it without a copy. Its memory is private to this process and
/// writable.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct RecordBatch(arrow_array::RecordBatch, Node);

impl RecordBatch {
    /// With what the node reports about its work.
    pub fn new(batch: arrow_array::RecordBatch, node: Node) -> Self {
        RecordBatch(batch, node)
    }

    fn index_of(&self, column: &Bound<'_, PyAny>) -> PyResult<usize> {
        let columns = self.0.num_columns();
        if let Ok(name) = column.extract::<String>() {
            let names = || {
                self.0
                    .schema()
                    .fields()
                    .iter()
                    .map(|f| f.name().clone())
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            return self.0.schema().index_of(&name).map_err(|_| {
                PyKeyError::new_err(format!("no column {name:?}: there are {}", names()))
            });
        }
        let at: isize = column
            .extract()
            .map_err(|_| PyTypeError::new_err("name a column by a str or an int"))?;
        let from_start = if at < 0 { at + columns as isize } else { at };
        if from_start < 0 || from_start as usize >= columns {
            return Err(PyKeyError::new_err(format!(
                "column {at} does not exist: there are {columns}"
            )));
        }
        Ok(from_start as usize)
    }
}

#[pymethods]
impl RecordBatch {
    /// Seconds that the node spent on these rows, by activity: ``origin``, ``disk``, ``prepare``.
    /// Empty if the node does not say.
    #[getter]
    fn node_seconds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let seconds = &self.1.seconds;
        seconds
            .iter()
            .try_for_each(|(name, seconds)| dict.set_item(name, seconds))?;
        Ok(dict)
    }

    /// Where the node took the bytes of these rows from: ``memory``, ``disk``, ``peer``,
    /// ``origin``. Empty if the node does not say.
    #[getter]
    fn node_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let bytes = &self.1.bytes;
        bytes
            .iter()
            .try_for_each(|(name, bytes)| dict.set_item(name, bytes))?;
        Ok(dict)
    }

    fn __len__(&self) -> usize {
        self.0.num_rows()
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    #[getter]
    fn num_columns(&self) -> usize {
        self.0.num_columns()
    }

    #[getter]
    fn column_names(&self) -> Vec<String> {
        self.0
            .schema()
            .fields()
            .iter()
            .map(|f| f.name().clone())
            .collect()
    }

    /// Bytes of memory that hold the columns. (All are parts of what was received, which counts once.)
    #[getter]
    fn nbytes(&self) -> usize {
        let columns = self.0.columns().iter();
        columns.map(|c| bytes_of(&c.to_data())).sum()
    }

    /// A column, by name or number.
    fn column(&self, column: &Bound<'_, PyAny>) -> PyResult<Column> {
        let at = self.index_of(column)?;
        Ok(Column {
            name: self.0.schema().field(at).name().clone(),
            array: self.0.column(at).clone(),
        })
    }

    /// Each row as a dict from column to value: numbers, bool, ``str``, ``memoryview`` for bytes (a
    /// view of this memory), lists, dicts, None.
    ///
    /// Raises:
    ///     TypeError: A column has a type for which plain Python has no values (times, decimals):
    ///         use ``pyarrow.record_batch(batch).to_pylist()``.
    fn to_dicts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let schema = self.0.schema();
        let mut columns = Vec::with_capacity(schema.fields().len());
        for (field, array) in schema.fields().iter().zip(self.0.columns()) {
            columns.push((
                pyo3::types::PyString::intern(py, field.name()),
                values(py, field.name(), array)?,
            ));
        }
        let rows = PyList::empty(py);
        for row in 0..self.0.num_rows() {
            let dict = PyDict::new(py);
            for (name, values) in &columns {
                dict.set_item(name, &values[row])?;
            }
            rows.append(dict)?;
        }
        Ok(rows)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = arrow_schema::ffi::FFI_ArrowSchema::try_from(self.0.schema().as_ref())
            .map_err(not_arrow)?;
        PyCapsule::new_with_value(py, schema, c"arrow_schema")
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        // The protocol makes a requested schema best effort: the batch is what it is.
        let _ = requested_schema;
        let (array, _) =
            to_ffi(&StructArray::from(self.0.clone()).into_data()).map_err(not_arrow)?;
        // With the schema's own metadata, which a struct's type does not have.
        let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
        PyTuple::new(py, [self.__arrow_c_schema__(py)?, array])
    }

    fn __repr__(&self) -> String {
        format!(
            "<forebay.RecordBatch of {}, columns {}>",
            count(self.0.num_rows() as u64, "row"),
            self.column_names().join(", ")
        )
    }
}

/// The bytes of all buffers, each as long as it is seen, and not as what it is a part of.
fn bytes_of(data: &ArrayData) -> usize {
    let nulls = data.nulls().map_or(0, |nulls| nulls.buffer().len());
    let own: usize = data.buffers().iter().map(Buffer::len).sum();
    nulls + own + data.child_data().iter().map(bytes_of).sum::<usize>()
}

fn not_arrow(e: arrow_schema::ArrowError) -> PyErr {
    PyTypeError::new_err(format!(
        "these rows cannot be passed through Arrow's C interface: {e}"
    ))
}

/// One column of a :class:`RecordBatch`.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Column {
    name: String,
    array: ArrayRef,
}

#[pymethods]
impl Column {
    fn __len__(&self) -> usize {
        self.array.len()
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Its type, as Arrow calls it.
    #[getter]
    fn r#type(&self) -> String {
        self.array.data_type().to_string()
    }

    #[getter]
    fn null_count(&self) -> usize {
        self.array.null_count()
    }

    /// The offset of the first value in the buffers, in values. 0 in what a node sent.
    #[getter]
    fn offset(&self) -> usize {
        self.array.offset()
    }

    /// The buffers as Arrow lays them out: validity (a bit for each row; None if no value is
    /// missing), then offsets and data, or the values.
    fn buffers(&self) -> Vec<Option<ArrowBuffer>> {
        let data = self.array.to_data();
        let validity = data.nulls().map(|n| ArrowBuffer(n.buffer().clone()));
        std::iter::once(validity)
            .chain(data.buffers().iter().map(|b| Some(ArrowBuffer(b.clone()))))
            .collect()
    }

    /// The values as Python objects; see :meth:`RecordBatch.to_dicts`.
    fn to_list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, values(py, &self.name, &self.array)?)
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let _ = requested_schema;
        let (array, schema) = to_ffi(&self.array.to_data()).map_err(not_arrow)?;
        let schema = PyCapsule::new_with_value(py, schema, c"arrow_schema")?;
        PyTuple::new(
            py,
            [
                schema,
                PyCapsule::new_with_value(py, array, c"arrow_array")?,
            ],
        )
    }

    fn __repr__(&self) -> String {
        format!(
            "<forebay.Column {:?} of {}, {}>",
            self.name,
            count(self.array.len() as u64, "value"),
            self.array.data_type()
        )
    }
}

/// A buffer of a column: bytes-like, writable.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct ArrowBuffer(Buffer);

#[pymethods]
impl ArrowBuffer {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let buffer = &slf.get().0;
        // SAFETY: the memory lives as long as this object, which the view holds. It belongs to this
        // process alone, and Rust no longer looks at it.
        unsafe {
            fill_view(
                slf.as_any(),
                view,
                flags,
                buffer.as_ptr().cast_mut(),
                buffer.len(),
            )
        }
    }
}

/// The values of a column as Python objects.
fn values<'py>(py: Python<'py>, name: &str, array: &ArrayRef) -> PyResult<Vec<Bound<'py, PyAny>>> {
    values::of(py, name, array)
}

mod values {
    use super::*;
    use arrow_array::{cast::AsArray, types::*};
    use pyo3::{IntoPyObjectExt, types::PyMemoryView, types::PySlice};

    pub(super) fn of<'py>(
        py: Python<'py>,
        name: &str,
        array: &ArrayRef,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        macro_rules! numbers {
            ($t:ty) => {
                array
                    .as_primitive::<$t>()
                    .iter()
                    .map(|v| v.into_bound_py_any(py))
                    .collect()
            };
        }
        match array.data_type() {
            DataType::Null => Ok(vec![py.None().into_bound(py); array.len()]),
            DataType::Boolean => array
                .as_boolean()
                .iter()
                .map(|v| v.into_bound_py_any(py))
                .collect(),
            DataType::Int8 => numbers!(Int8Type),
            DataType::Int16 => numbers!(Int16Type),
            DataType::Int32 => numbers!(Int32Type),
            DataType::Int64 => numbers!(Int64Type),
            DataType::UInt8 => numbers!(UInt8Type),
            DataType::UInt16 => numbers!(UInt16Type),
            DataType::UInt32 => numbers!(UInt32Type),
            DataType::UInt64 => numbers!(UInt64Type),
            DataType::Float16 => array
                .as_primitive::<Float16Type>()
                .iter()
                .map(|v| v.map(f32::from).into_bound_py_any(py))
                .collect(),
            DataType::Float32 => numbers!(Float32Type),
            DataType::Float64 => numbers!(Float64Type),
            DataType::Utf8 => array
                .as_string::<i32>()
                .iter()
                .map(|v| v.into_bound_py_any(py))
                .collect(),
            DataType::LargeUtf8 => array
                .as_string::<i64>()
                .iter()
                .map(|v| v.into_bound_py_any(py))
                .collect(),
            DataType::Utf8View => array
                .as_string_view()
                .iter()
                .map(|v| v.into_bound_py_any(py))
                .collect(),
            DataType::Binary => {
                let a = array.as_binary::<i32>();
                let ends: Vec<usize> = a.value_offsets().iter().map(|&o| o as usize).collect();
                views(py, array, a.values(), |row| (ends[row], ends[row + 1]))
            }
            DataType::LargeBinary => {
                let a = array.as_binary::<i64>();
                let ends: Vec<usize> = a.value_offsets().iter().map(|&o| o as usize).collect();
                views(py, array, a.values(), |row| (ends[row], ends[row + 1]))
            }
            DataType::FixedSizeBinary(size) => {
                let (a, size) = (array.as_fixed_size_binary(), *size as usize);
                let first = array.offset() * size;
                let data = a.to_data().buffers()[0].slice(first);
                views(py, array, &data, |row| (row * size, (row + 1) * size))
            }
            DataType::List(_) => {
                let a = array.as_list::<i32>();
                let inner = of(py, name, a.values())?;
                lists(py, array, &inner, |row| {
                    (
                        a.value_offsets()[row] as usize,
                        a.value_offsets()[row + 1] as usize,
                    )
                })
            }
            DataType::LargeList(_) => {
                let a = array.as_list::<i64>();
                let inner = of(py, name, a.values())?;
                lists(py, array, &inner, |row| {
                    (
                        a.value_offsets()[row] as usize,
                        a.value_offsets()[row + 1] as usize,
                    )
                })
            }
            DataType::FixedSizeList(_, size) => {
                let (a, size) = (array.as_fixed_size_list(), *size as usize);
                let inner = of(py, name, a.values())?;
                lists(py, array, &inner, |row| (row * size, (row + 1) * size))
            }
            DataType::Struct(fields) => {
                let a = array.as_struct();
                let columns = a
                    .columns()
                    .iter()
                    .map(|c| of(py, name, c))
                    .collect::<PyResult<Vec<_>>>()?;
                let value = |row: usize| -> PyResult<Bound<'py, PyAny>> {
                    let dict = PyDict::new(py);
                    for (field, column) in fields.iter().zip(&columns) {
                        dict.set_item(field.name(), &column[row])?;
                    }
                    Ok(dict.into_any())
                };
                each(py, array, value)
            }
            DataType::Dictionary(..) => {
                let a = array.as_any_dictionary();
                let words = of(py, name, a.values())?;
                let keys = if words.is_empty() {
                    vec![0; array.len()]
                } else {
                    a.normalized_keys()
                };
                each(py, array, |row| Ok(words[keys[row]].clone()))
            }
            other => Err(PyTypeError::new_err(format!(
                "column {name:?} has the type {other}, which has no plain Python value: use \
                 pyarrow.record_batch(batch).to_pylist(), or leave the column out with columns="
            ))),
        }
    }

    fn each<'py>(
        py: Python<'py>,
        array: &ArrayRef,
        value: impl Fn(usize) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        (0..array.len())
            .map(|row| {
                if array.is_valid(row) {
                    value(row)
                } else {
                    Ok(py.None().into_bound(py))
                }
            })
            .collect()
    }

    fn views<'py>(
        py: Python<'py>,
        array: &ArrayRef,
        data: &Buffer,
        at: impl Fn(usize) -> (usize, usize),
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let whole = PyMemoryView::from(Bound::new(py, ArrowBuffer(data.clone()))?.as_any())?;
        each(py, array, |row| {
            let (from, to) = at(row);
            whole.get_item(PySlice::new(py, from as isize, to as isize, 1))
        })
    }

    fn lists<'py>(
        py: Python<'py>,
        array: &ArrayRef,
        inner: &[Bound<'py, PyAny>],
        at: impl Fn(usize) -> (usize, usize),
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        each(py, array, |row| {
            let (from, to) = at(row);
            Ok(PyList::new(py, &inner[from..to])?.into_any())
        })
    }
}
