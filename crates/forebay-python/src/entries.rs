//! Turns the entries that Python callers pass into a [`BatchRequest`]: one pass under the GIL, one
//! copy of each string.

use crate::{
    failure::{self, Failure},
    names::type_name,
    request::{BatchRequest, Rest, Span},
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE};
use forebay_protocol::batch::field;
use pyo3::{
    exceptions::{PyBaseException, PyTypeError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict, PyList, PyString, PyTuple},
};

/// One requested object, archive member or range.
///
/// Args:
///     objname: The object: ``"key"`` with a bucket, ``"bucket/key"`` without.
///     bucket: Its bucket. Default: that of the batch.
///     archpath: A member of it, if it is an archive.
///     start, length: Bytes of the object, or of the member; ``length`` None or -1 reads to the
///         end.
///     opaque: Bytes or str that come back with the item.
#[pyclass(frozen, eq, module = "forebay", get_all)]
#[derive(Clone, PartialEq, Eq)]
pub struct Entry {
    objname: String,
    bucket: Option<String>,
    archpath: Option<String>,
    start: Option<u64>,
    length: Option<i64>,
    opaque: Option<Vec<u8>>,
}

#[pymethods]
impl Entry {
    #[new]
    #[pyo3(signature = (objname, *, bucket=None, archpath=None, start=None, length=None, opaque=None))]
    fn new(
        objname: String,
        bucket: Option<String>,
        archpath: Option<String>,
        start: Option<i64>,
        length: Option<i64>,
        opaque: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Entry {
            objname,
            bucket,
            archpath,
            start: start.map(first_byte).transpose()?,
            length,
            opaque: opaque.map(opaque_bytes).transpose()?,
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        // As Python writes them.
        let quoted = |name: &str| PyString::new(py, name).repr().map(|text| text.to_string());
        let mut text = format!("Entry({}", quoted(&self.objname)?);
        for (name, value) in [("bucket", &self.bucket), ("archpath", &self.archpath)] {
            if let Some(value) = value {
                text.push_str(&format!(", {name}={}", quoted(value)?));
            }
        }
        if let Some(start) = self.start {
            text.push_str(&format!(", start={start}"));
        }
        if let Some(length) = self.length {
            text.push_str(&format!(", length={length}"));
        }
        if let Some(opaque) = &self.opaque {
            text.push_str(&format!(", opaque={}", PyBytes::new(py, opaque).repr()?));
        }
        Ok(text + ")")
    }

    #[allow(clippy::type_complexity)]
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((String,), Bound<'py, PyDict>)> {
        let kwargs = PyDict::new(py);
        kwargs.set_item("bucket", &self.bucket)?;
        kwargs.set_item("archpath", &self.archpath)?;
        kwargs.set_item("start", self.start)?;
        kwargs.set_item("length", self.length)?;
        kwargs.set_item("opaque", self.opaque.as_ref().map(|o| PyBytes::new(py, o)))?;
        Ok(((self.objname.clone(),), kwargs))
    }
}

/// Where the bytes of an entry begin.
fn first_byte(start: i64) -> failure::Result<u64> {
    u64::try_from(start).map_err(|_| {
        Failure::invalid(format!("start {start} is negative"))
            .hint("0 is the first byte of an entry; only client.get() counts from the end")
    })
}

fn opaque_bytes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes().to_vec());
    }
    value
        .extract()
        .map_err(|_| PyTypeError::new_err("opaque is bytes or str"))
}

/// Reads entries: a list or any iterable of names, `(bucket, key)` or `(bucket, key, member)`
/// tuples, dicts and [`Entry`]s, or a NumPy array of strings.
pub fn read(entries: &Bound<'_, PyAny>, bucket: Option<&str>) -> PyResult<BatchRequest> {
    if entries.is_instance_of::<PyString>()
        || entries.is_instance_of::<PyBytes>()
        || entries.is_instance_of::<PyDict>()
    {
        return Err(PyTypeError::new_err(format!(
            "entries must be a list of names, not a single {}",
            type_name(entries)
        )));
    }
    let mut request = BatchRequest::default();
    let bucket = match bucket {
        Some(bucket) => {
            forebay_core::name::validate_bucket(bucket).map_err(Failure::from)?;
            request.keep(bucket)?
        }
        None => Span::NONE,
    };
    // Arrays (NumPy, pandas, Arrow) make a list of str in one call, faster than we could item by
    // item.
    let listed;
    let entries = match entries.getattr_opt("tolist")? {
        Some(tolist) => {
            listed = tolist.call0()?;
            &listed
        }
        None => entries,
    };
    if let Ok(list) = entries.cast::<PyList>() {
        for (i, entry) in list.iter().enumerate() {
            push(&mut request, &entry, bucket).map_err(|e| at(e, entries.py(), i))?;
        }
    } else {
        for (i, entry) in entries.try_iter()?.enumerate() {
            push(&mut request, &entry?, bucket).map_err(|e| at(e, entries.py(), i))?;
        }
    }
    Ok(request)
}

/// Adds which entry it was.
fn at(error: PyErr, py: Python<'_>, index: usize) -> PyErr {
    match of_entry(error.value(py), index) {
        Ok(told) => PyErr::from_value(told),
        Err(_) => error,
    }
}

/// The same exception about an entry. What those of `forebay.errors` say besides their message
/// stays apart from it.
fn of_entry<'py>(value: &Bound<'py, PyBaseException>, index: usize) -> PyResult<Bound<'py, PyAny>> {
    let class = value.get_type();
    let Some(message) = value.getattr_opt("message")? else {
        return class.call1((format!("entries[{index}]: {value}"),));
    };
    let about = PyDict::new(value.py());
    for name in ["hint", "status", "request_id", "code"] {
        about.set_item(name, value.getattr(name)?)?;
    }
    class.call((format!("entries[{index}]: {message}"),), Some(&about))
}

fn push(request: &mut BatchRequest, entry: &Bound<'_, PyAny>, bucket: Span) -> PyResult<()> {
    if let Ok(name) = entry.cast::<PyString>() {
        return Ok(request.push_name(name.to_str()?, bucket)?);
    }
    if let Ok(entry) = entry.cast::<Entry>() {
        let e = entry.get();
        let rest = Rest {
            start: e.start,
            length: e.length,
            opaque: e.opaque.clone(),
            provider: None,
        };
        return Ok(request.push_parts(
            &e.objname,
            e.bucket.as_deref(),
            e.archpath.as_deref(),
            rest,
            bucket,
        )?);
    }
    if let Ok(tuple) = entry.cast::<PyTuple>() {
        let (bucket_name, key, member): (String, String, Option<String>) = match tuple.len() {
            2 => tuple.extract().map(|(b, k)| (b, k, None)),
            3 => tuple.extract(),
            _ => Err(PyTypeError::new_err("")),
        }
        .map_err(|_| {
            PyTypeError::new_err(
                "an entry as a tuple is (bucket, key) or (bucket, key, archpath), all str",
            )
        })?;
        return Ok(request.push_parts(
            &key,
            Some(&bucket_name),
            member.as_deref(),
            Rest::default(),
            bucket,
        )?);
    }
    if let Ok(dict) = entry.cast::<PyDict>() {
        return push_dict(request, dict, bucket);
    }
    Err(PyTypeError::new_err(format!(
        "an entry is a str, a (bucket, key) tuple, a dict or an Entry, not {}",
        type_name(entry)
    )))
}

/// A dict with the names of the wire format; there `opaque` as a str is URL-safe base64.
fn push_dict(
    request: &mut BatchRequest,
    dict: &Bound<'_, PyDict>,
    default_bucket: Span,
) -> PyResult<()> {
    let (mut object, mut bucket, mut member, mut rest) = (
        None::<String>,
        None::<String>,
        None::<String>,
        Rest::default(),
    );
    for (key, value) in dict.iter() {
        let key = key
            .cast::<PyString>()
            .map_err(|_| PyTypeError::new_err("an entry's keys are str"))?;
        if value.is_none() {
            continue;
        }
        match key.to_str()? {
            field::OBJNAME | "obj_name" => object = Some(value.extract()?),
            field::BUCKET | "bck" => bucket = Some(value.extract()?),
            field::ARCHPATH => member = Some(value.extract()?),
            field::START => rest.start = Some(first_byte(value.extract()?)?),
            field::LENGTH => rest.length = Some(value.extract()?),
            field::PROVIDER => rest.provider = Some(value.extract()?),
            field::OPAQUE => {
                rest.opaque = Some(match value.cast::<PyString>() {
                    // As in a request: base64 of either alphabet.
                    Ok(text) => URL_SAFE
                        .decode(text.to_str()?.replace('+', "-").replace('/', "_"))
                        .map_err(|e| PyValueError::new_err(format!("opaque is not base64: {e}")))?,
                    Err(_) => opaque_bytes(&value)?,
                })
            }
            other => {
                return Err(PyValueError::new_err(format!(
                    "{other:?} is not a key of an entry (objname, bucket, archpath, start, \
                     length, opaque, provider)"
                )));
            }
        }
    }
    let object = object.ok_or_else(|| PyValueError::new_err("the entry has no objname"))?;
    Ok(request.push_parts(
        &object,
        bucket.as_deref(),
        member.as_deref(),
        rest,
        default_bucket,
    )?)
}
