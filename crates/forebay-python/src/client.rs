//! `Client`: what Python calls. Each method reads its arguments under the GIL, then waits without it.

use crate::{
    batch::{Batch, patience},
    batches::Batches,
    buffer::{self, Buffer},
    entries,
    failure::{Class, Failure, Result},
    listing::{Listing, ObjectInfo},
    names::{Name, split_prefix},
    objects, process,
    receive::Receiving,
    session::{Config, Session, Sessions},
    transport::Call,
};
use forebay_core::ByteRange;
use http::Method;
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyTuple, PyType},
};
use std::sync::Arc;

const TIMEOUT_DEFAULT_SECS: f64 = 60.0;
const MAX_INFLIGHT_DEFAULT_BYTES: u64 = 1 << 30;
/// Pieces in which files are sent.
const UPLOAD_PIECE_BYTES: usize = 1 << 20;
const LIST_PAGE_KEYS: usize = forebay_core::limits::LIST_PAGE_MAX_KEYS;

#[pyclass(frozen, subclass, module = "forebay", weakref)]
pub struct Client {
    sessions: Sessions,
}

impl Client {
    fn session(&self) -> Result<Arc<Session>> {
        self.sessions.get()
    }

    /// Starts a batch and returns without waiting for the node.
    pub fn start_batch(&self, entries: &Bound<'_, PyAny>, options: &BatchOptions) -> PyResult<Batch> {
        let mut request = entries::read(entries, options.bucket.as_deref())?;
        request.continue_on_error = options.continue_on_error;
        request.only_names = options.only_names;
        let (receiving, task) = Receiving::start(self.session()?, request)?;
        Ok(Batch::new(receiving, task))
    }
}

/// What a batch is asked for with, beside its entries.
#[derive(Clone, Default)]
pub struct BatchOptions {
    pub bucket: Option<String>,
    pub continue_on_error: bool,
    pub only_names: bool,
}

fn byte_range(start: Option<i64>, length: Option<i64>) -> Result<Option<ByteRange>> {
    Ok(match (start, length) {
        (None, None) => None,
        (Some(n @ ..0), None) => Some(ByteRange::Suffix(n.unsigned_abs())),
        (Some(..0), Some(_)) => return Err(Failure::invalid("a negative start counts from the end and takes no length")),
        (start, length) => Some(ByteRange::from_start_length(start.unwrap_or(0) as u64, length.unwrap_or(-1))?),
    })
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url=None, *, token=None, timeout=TIMEOUT_DEFAULT_SECS, max_inflight_bytes=MAX_INFLIGHT_DEFAULT_BYTES, origin=None, cache=None))]
    fn new(
        url: Option<String>,
        token: Option<String>,
        timeout: f64,
        max_inflight_bytes: u64,
        origin: Option<String>,
        cache: Option<String>,
    ) -> PyResult<Self> {
        if url.is_some() && (origin.is_some() || cache.is_some()) {
            return Err(Failure::invalid("url= and origin=/cache= exclude each other")
                .hint("a URL names a node that runs already; origin and cache start one inside this process")
                .into());
        }
        let url = url.or_else(|| if origin.is_none() { environment("FOREBAY_NODE") } else { None });
        if let Some(url) = &url {
            crate::address::Address::parse(url)?;
        } else {
            crate::embedded::check(origin.as_deref(), cache.as_deref())?;
        }
        let token = token.or_else(|| environment("FOREBAY_TOKEN")).map(Arc::from);
        let config = Config { url, origin, cache, token, timeout: patience(timeout)?, max_inflight_bytes };
        Ok(Client { sessions: Sessions::new(config) })
    }

    /// The bytes of an object, of a member of an archive, or of a range of either.
    #[pyo3(signature = (name, *, bucket=None, archpath=None, start=None, length=None))]
    fn get(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        bucket: Option<&str>,
        archpath: Option<String>,
        start: Option<i64>,
        length: Option<i64>,
    ) -> PyResult<Buffer> {
        let name = Name::from_py(name, bucket)?;
        let range = byte_range(start, length)?;
        let session = self.session()?;
        let (bytes, etag) = process::wait(py, objects::get(&session.transport, &name, archpath.as_deref(), range))?;
        Ok(Buffer::new(bytes, etag))
    }

    #[pyo3(signature = (name, *, bucket=None))]
    fn head(&self, py: Python<'_>, name: &Bound<'_, PyAny>, bucket: Option<&str>) -> PyResult<ObjectInfo> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        Ok(ObjectInfo(process::wait(py, objects::head(&session.transport, &name))?))
    }

    #[pyo3(signature = (name, *, bucket=None))]
    fn exists(&self, py: Python<'_>, name: &Bound<'_, PyAny>, bucket: Option<&str>) -> PyResult<bool> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        process::wait(py, async {
            match objects::head(&session.transport, &name).await {
                Ok(_) => Ok(true),
                Err(f) if f.class == Class::NotFound => Ok(false),
                Err(f) => Err(f),
            }
        })
    }

    /// Writes an object from bytes-like data, a path, or a file opened for reading.
    #[pyo3(signature = (name, data, *, bucket=None))]
    fn put(&self, py: Python<'_>, name: &Bound<'_, PyAny>, data: &Bound<'_, PyAny>, bucket: Option<&str>) -> PyResult<Option<String>> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        if let Some(body) = buffer::copy_of(data)? {
            return process::wait(py, objects::put(&session.transport, &name, body));
        }
        if data.hasattr("__fspath__")? {
            let file = py.import("io")?.call_method1("open", (data, "rb"))?;
            let length = py.import("os")?.call_method1("fstat", (file.call_method0("fileno")?,))?.getattr("st_size")?.extract()?;
            let done = self.put_pieces(py, &session, &name, &file, Some(length));
            file.call_method0("close")?;
            return done;
        }
        if data.hasattr("read")? {
            return self.put_pieces(py, &session, &name, data, None);
        }
        Err(PyTypeError::new_err(format!("data is bytes-like, a path or a file opened for reading, not {}", crate::names::type_name(data))))
    }

    #[pyo3(signature = (name, *, bucket=None))]
    fn delete(&self, py: Python<'_>, name: &Bound<'_, PyAny>, bucket: Option<&str>) -> PyResult<()> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        process::wait(py, objects::delete(&session.transport, &name))
    }

    #[pyo3(signature = (prefix, *, page_size=LIST_PAGE_KEYS))]
    fn list(&self, prefix: &str, page_size: usize) -> PyResult<Listing> {
        if page_size == 0 || page_size > LIST_PAGE_KEYS {
            return Err(Failure::invalid(format!("page_size is 1 to {LIST_PAGE_KEYS}, not {page_size}")).into());
        }
        let (bucket, prefix) = split_prefix(prefix)?;
        Ok(Listing::new(self.session()?, bucket, prefix, page_size))
    }

    fn buckets(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let session = self.session()?;
        process::wait(py, objects::buckets(&session.transport))
    }

    /// Many entries in one request; returns when the node has accepted it.
    #[pyo3(signature = (entries, *, bucket=None, continue_on_error=false, only_names=false))]
    fn batch(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        bucket: Option<String>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Batch> {
        let batch = self.start_batch(entries, &BatchOptions { bucket, continue_on_error, only_names })?;
        batch.wait_accepted(py)?;
        Ok(batch)
    }

    /// As `batch`, and returns at once.
    #[pyo3(signature = (entries, *, bucket=None, continue_on_error=false, only_names=false))]
    fn batch_async(
        &self,
        entries: &Bound<'_, PyAny>,
        bucket: Option<String>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Batch> {
        self.start_batch(entries, &BatchOptions { bucket, continue_on_error, only_names })
    }

    #[pyo3(signature = (lists, *, prefetch=2, bucket=None, continue_on_error=false, only_names=false))]
    fn batches(
        slf: Bound<'_, Self>,
        lists: &Bound<'_, PyAny>,
        prefetch: usize,
        bucket: Option<String>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Batches> {
        let options = BatchOptions { bucket, continue_on_error, only_names };
        Ok(Batches::new(slf.unbind(), lists.try_iter()?.unbind(), prefetch, options))
    }

    /// The batch as one archive file: `tar`, `tgz`, `tar.lz4` or `zip`.
    #[pyo3(signature = (entries, format="tar", *, bucket=None, continue_on_error=false, only_names=false))]
    fn archive(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        format: &str,
        bucket: Option<&str>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Buffer> {
        let mime = match format.trim_start_matches('.') {
            "tar" => ".tar",
            "tgz" | "tar.gz" => ".tgz",
            "tar.lz4" => ".tar.lz4",
            "zip" => ".zip",
            other => return Err(Failure::invalid(format!("{other:?} is not an archive format")).hint("tar, tgz, tar.lz4 or zip").into()),
        };
        let mut request = entries::read(entries, bucket)?;
        request.continue_on_error = continue_on_error;
        request.only_names = only_names;
        let session = self.session()?;
        let bytes = process::wait(py, async {
            let (path, json) = request.to_http(mime);
            let mut answer = session.transport.call(&Call::new(Method::POST, path).json(json)).await?;
            let mut bytes = buffer::room(answer.length().unwrap_or(0))?;
            while let Some(piece) = answer.piece().await? {
                bytes.extend_from_slice(&piece);
            }
            Ok(bytes)
        })?;
        Ok(Buffer::new(bytes, None))
    }

    /// Bytes of batches on their way that nobody has asked for yet.
    #[getter]
    fn inflight_bytes(&self) -> PyResult<u64> {
        Ok(self.session()?.inflight.used_bytes())
    }

    #[getter]
    fn url(&self) -> Option<&str> {
        self.sessions.config.url.as_deref()
    }

    /// How the node is reached: `unix:/path` or `http://host:port`. Connects if nothing has yet.
    #[getter]
    fn route(&self, py: Python<'_>) -> PyResult<String> {
        let session = self.session()?;
        process::wait(py, session.transport.find_local_socket())?;
        Ok(session.transport.route())
    }

    fn __reduce__<'py>(slf: Bound<'py, Self>, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let c = &slf.get().sessions.config;
        let arguments =
            (c.token.is_some(), &c.url, c.timeout.as_secs_f64(), c.max_inflight_bytes, &c.origin, &c.cache).into_pyobject(py)?;
        Ok((slf.get_type().getattr("_reopen")?, arguments))
    }

    /// Rebuilds a pickled client. The token does not travel in pickles.
    #[classmethod]
    fn _reopen<'py>(
        cls: &Bound<'py, PyType>,
        had_token: bool,
        url: Option<String>,
        timeout: f64,
        max_inflight_bytes: u64,
        origin: Option<String>,
        cache: Option<String>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if had_token && environment("FOREBAY_TOKEN").is_none() {
            return Err(Failure::new(Class::Unauthenticated, "a client with a token was unpickled, and tokens do not travel in pickles")
                .hint("set FOREBAY_TOKEN in the environment instead of passing token=")
                .into());
        }
        let kwargs = pyo3::types::PyDict::new(cls.py());
        kwargs.set_item("timeout", timeout)?;
        kwargs.set_item("max_inflight_bytes", max_inflight_bytes)?;
        kwargs.set_item("origin", origin)?;
        kwargs.set_item("cache", cache)?;
        cls.call((url,), Some(&kwargs))
    }

    fn __repr__(&self) -> String {
        let c = &self.sessions.config;
        match &c.url {
            Some(url) => format!("forebay.Client({url:?})"),
            None => format!("forebay.Client(origin={:?}, cache={:?})", c.origin.as_deref().unwrap_or(""), c.cache.as_deref().unwrap_or("")),
        }
    }
}

impl Client {
    /// Sends what `file.read` gives, piece by piece: memory stays at a few pieces however large the file is.
    fn put_pieces(
        &self,
        py: Python<'_>,
        session: &Arc<Session>,
        name: &Name,
        file: &Bound<'_, PyAny>,
        length: Option<u64>,
    ) -> PyResult<Option<String>> {
        let (sender, receiver) = tokio::sync::mpsc::channel::<std::io::Result<bytes::Bytes>>(2);
        let pieces = futures::stream::unfold(receiver, |mut r| async move { r.recv().await.map(|piece| (piece, r)) });
        let (session, name) = (session.clone(), name.clone());
        let upload = async move { objects::upload(&session.transport, &name, length, Box::pin(pieces)).await };
        let task = Upload(process::runtime()?.spawn(upload));
        loop {
            let piece = file.call_method1("read", (UPLOAD_PIECE_BYTES,))?;
            let piece = piece.cast::<PyBytes>().map_err(|_| PyTypeError::new_err("the file is not opened in binary mode"))?;
            if piece.as_bytes().is_empty() {
                break;
            }
            let bytes = bytes::Bytes::copy_from_slice(piece.as_bytes());
            // A closed channel means that the upload has failed; its own error says why.
            if !process::wait(py, async { Ok(sender.send(Ok(bytes)).await.is_ok()) })? {
                break;
            }
        }
        drop(sender);
        let mut task = task;
        process::wait(py, async { (&mut task.0).await.map_err(|e| Failure::new(Class::Error, format!("the upload stopped: {e}")))? })
    }
}

/// An upload that is stopped if its caller leaves: half an object must not be written as a whole one.
struct Upload(tokio::task::JoinHandle<Result<Option<String>>>);

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.abort();
    }
}
