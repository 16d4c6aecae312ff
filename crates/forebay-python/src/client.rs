//! `Client`: what Python calls. Each method reads its arguments under the GIL, then waits without
//! it.

use crate::{
    batch::{Batch, patience},
    batches::Batches,
    buffer::{self, Buffer},
    entries,
    failure::{Class, Failure, Result},
    frame::RecordBatch,
    listing::{Listing, ObjectInfo},
    names::{Name, split_prefix},
    objects::{self, Condition},
    packed, process, raw,
    receive::Receiving,
    ring::Slot,
    rows,
    session::{Config, Session, Sessions},
    upload,
};
use bytes::Bytes;
use forebay_client::Call;
use forebay_core::ByteRange;
use forebay_protocol::{dataset::DatasetSpec, keys::split_numbers};
use futures::future::Either;
use http::Method;
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    pybacked::PyBackedBytes,
    types::{PyDict, PyTuple, PyType},
};
use std::sync::Arc;

const TIMEOUT_DEFAULT_SECS: f64 = 60.0;
const MAX_INFLIGHT_DEFAULT_BYTES: u64 = 1 << 30;
const LIST_PAGE_KEYS: usize = forebay_core::limits::LIST_PAGE_MAX_KEYS;

/// A connection to a Forebay node, or to the engine inside this process.
///
/// Args:
///     url: The node: ``"http://host:port"``, ``"https://host:port"`` or ``"unix:/path"``. On the
///         node's own machine, a TCP URL leads to its Unix socket automatically. The default port
///         is 8080, or 443 for ``https://``. Or up to 256 nodes that serve the same buckets: a list
///         of these, or one text with commas between them; each address that a name leads to is a
///         node too. Calls go to one of them, on this machine if one is; if it fails, to the next.
///         Default: the environment variable ``FOREBAY_NODE``.
///     token: The token, if the node requires one. Default: the environment variable
///         ``FOREBAY_TOKEN``. It is never shown and not included in pickles.
///     ca: A PEM file with the authorities to trust for the certificate of an ``https://`` node.
///         Default: the environment variable ``FOREBAY_CA_FILE``, then the system's.
///     timeout: Seconds without any progress (connecting, waiting for an answer, between bytes)
///         after which a call fails; also how long requests to a busy node (429, 503) are
///         repeated.
///     max_inflight_bytes: The limit, in bytes, on what batches hold that were requested ahead
///         (``batch_async``, ``batches``) and that nobody has asked for yet.
///     direct: In a cluster, whether the entries of batches are asked of the nodes that own them, so
///         that their bytes cross the network once. Default: if no node is on this machine, whose
///         cache may have them.
///     origin, cache: Instead of ``url``: run the engine inside this process, as in
///         ``origin="s3://bucket"`` (or a list of several), ``cache="/nvme/forebay:100GiB"``. The
///         first process that opens a cache directory serves it to the others.
///
/// A name is ``"bucket/key"``, ``"s3://bucket/key"``, ``("bucket", "key")``, or ``"key"`` with
/// ``bucket=``.
///
/// If there are several nodes, a call fails only if none of them answers; what changes something
/// is sent to another node only if nothing of it was sent to the first.
///
/// Clients may be used from many threads, pickled, and carried into forked processes; each process
/// connects anew. Every wait releases the GIL and ends with ``KeyboardInterrupt`` on Ctrl-C. All
/// errors are :class:`forebay.Error`.
#[pyclass(frozen, subclass, module = "forebay", weakref)]
pub struct Client {
    sessions: Sessions,
}

impl Client {
    pub fn session(&self) -> Result<Arc<Session>> {
        self.sessions.get()
    }

    /// Starts a batch and returns without waiting for the node.
    pub fn start_batch(
        &self,
        entries: &Bound<'_, PyAny>,
        options: &BatchOptions,
    ) -> PyResult<Batch> {
        let mut request = entries::read(entries, options.bucket.as_deref())?;
        request.continue_on_error = options.continue_on_error;
        request.only_names = options.only_names;
        let (receiving, task) = Receiving::start(self.session()?, request)?;
        Ok(Batch::new(receiving, task))
    }
}

/// The options of a batch, besides its entries.
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
        (Some(..0), Some(_)) => {
            return Err(Failure::invalid(
                "a negative start counts from the end and takes no length",
            ));
        }
        (start, length) => Some(ByteRange::from_start_length(
            start.unwrap_or(0) as u64,
            length.unwrap_or(-1),
        )?),
    })
}

/// A single URL, or several.
fn texts(given: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<String>> {
    if let Ok(one) = given.extract::<String>() {
        return Ok(vec![one]);
    }
    given
        .extract()
        .map_err(|_| PyTypeError::new_err(format!("{name} is a URL or a list of URLs")))
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url=None, *, token=None, ca=None, timeout=TIMEOUT_DEFAULT_SECS, max_inflight_bytes=MAX_INFLIGHT_DEFAULT_BYTES, direct=None, origin=None, cache=None))]
    fn new(
        url: Option<&Bound<'_, PyAny>>,
        token: Option<String>,
        ca: Option<std::path::PathBuf>,
        timeout: f64,
        max_inflight_bytes: u64,
        direct: Option<bool>,
        origin: Option<&Bound<'_, PyAny>>,
        cache: Option<String>,
    ) -> PyResult<Self> {
        let of = |given: Option<&Bound<'_, PyAny>>, name| match given {
            Some(given) => texts(given, name),
            None => Ok(Vec::new()),
        };
        let (mut urls, origins) = (of(url, "url")?, of(origin, "origin")?);
        if url.is_some() && (origin.is_some() || cache.is_some()) {
            return Err(
                Failure::invalid("url= cannot be given together with origin= or cache=")
                    .hint(
                        "a URL names a node that runs already; origin and cache start one inside \
                    this process",
                    )
                    .into(),
            );
        }
        if url.is_none() && origin.is_none() && cache.is_none() {
            urls.extend(environment("FOREBAY_NODE"));
        }
        if urls.is_empty() && url.is_none() {
            crate::embedded::check(&origins, cache.as_deref())?;
        } else {
            crate::session::addresses(&urls)?;
        }
        let token = token
            .or_else(|| environment("FOREBAY_TOKEN"))
            .map(Arc::from);
        let ca = ca
            .map(|path| path.to_string_lossy().into_owned())
            .or_else(|| environment("FOREBAY_CA_FILE"));
        let config = Config {
            urls,
            origins,
            cache,
            token,
            ca,
            timeout: patience("timeout", timeout)?,
            max_inflight_bytes,
            direct,
        };
        Ok(Client {
            sessions: Sessions::new(config),
        })
    }

    /// A client of other nodes with the settings of this one: its token, what it trusts, how long it
    /// waits.
    fn _at(&self, url: &Bound<'_, PyAny>) -> PyResult<Self> {
        let urls = texts(url, "nodes")?;
        crate::session::addresses(&urls)?;
        let config = Config {
            urls,
            origins: Vec::new(),
            cache: None,
            ..self.sessions.config.clone()
        };
        Ok(Client {
            sessions: Sessions::new(config),
        })
    }

    /// The bytes of an object, of a member of an archive, or of a range of either.
    ///
    /// Args:
    ///     name: The object.
    ///     archpath: A member of it, if it is a tar, tgz, tar.lz4 or zip.
    ///     start, length: Bytes; a negative ``start`` without ``length`` counts from the end,
    ///         ``length`` None or -1 reads to the end.
    ///
    /// Returns:
    ///     A :class:`Buffer`: bytes-like, writable, allocated once at its size.
    ///
    /// Raises:
    ///     NotFound: The bucket, the object or the member does not exist.
    ///     RangeNotSatisfiable: The range names no byte.
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
        let (bytes, etag) = process::wait(
            py,
            objects::get(&session.node, &name, archpath.as_deref(), range),
        )?;
        Ok(Buffer::new(bytes, etag))
    }

    /// Size, ETag and time of an object, without its bytes. Raises ``NotFound``.
    #[pyo3(signature = (name, *, bucket=None))]
    fn head(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        bucket: Option<&str>,
    ) -> PyResult<ObjectInfo> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        Ok(ObjectInfo(process::wait(
            py,
            objects::head(&session.node, &name),
        )?))
    }

    /// Whether the object exists.
    #[pyo3(signature = (name, *, bucket=None))]
    fn exists(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        bucket: Option<&str>,
    ) -> PyResult<bool> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        process::wait(py, async {
            match objects::head(&session.node, &name).await {
                Ok(_) => Ok(true),
                Err(f) if f.class == Class::NotFound => Ok(false),
                Err(f) => Err(f),
            }
        })
    }

    /// Writes an object through to its origin. When this returns, it is readable here and there.
    ///
    /// Args:
    ///     data: Bytes-like (an array is written as its bytes), a path, or a file opened in binary
    ///         mode for reading: anything whose ``read(size)`` returns ``bytes``, none at the end.
    ///         Of a file a few pieces are in memory at a time; the origin gets it in parts.
    ///     if_absent: Only if no object of this name exists (``If-None-Match: *``).
    ///     if_match: Only if the object has this ETag.
    ///
    /// Returns:
    ///     The new object's ETag, if the node reports it.
    ///
    /// Raises:
    ///     PreconditionFailed: The condition does not hold; nothing was written.
    ///     Conflict: The file of a path changed meanwhile; nothing was written.
    #[pyo3(signature = (name, data, *, bucket=None, if_absent=false, if_match=None))]
    fn put(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        bucket: Option<&str>,
        if_absent: bool,
        if_match: Option<String>,
    ) -> PyResult<Option<String>> {
        let name = Name::from_py(name, bucket)?;
        let condition = match (if_absent, if_match) {
            (false, None) => Condition::Always,
            (true, None) => Condition::Absent,
            (false, Some(etag)) => Condition::Is(etag),
            (true, Some(_)) => {
                return Err(Failure::invalid("give if_absent= or if_match=, not both").into());
            }
        };
        let session = self.session()?;
        if let Some(body) = buffer::copy_of(data)? {
            return process::wait(py, objects::put(&session.node, &name, condition, body));
        }
        if data.hasattr("__fspath__")? {
            let file = py.import("io")?.call_method1("open", (data, "rb"))?;
            let length: u64 = py
                .import("os")?
                .call_method1("fstat", (file.call_method0("fileno")?,))?
                .getattr("st_size")?
                .extract()?;
            // Pipes, devices and files under `/proc` say 0, whatever they have.
            let length = Some(length).filter(|&length| length > 0);
            let done = upload::from_file(py, &session, &name, condition, &file, length);
            file.call_method0("close")?;
            return done;
        }
        if data.hasattr("read")? {
            return upload::from_file(py, &session, &name, condition, data, None);
        }
        Err(PyTypeError::new_err(format!(
            "data is bytes-like, a path or a file opened for reading, not {}",
            crate::names::type_name(data)
        )))
    }

    /// Removes an object from its origin and from the cache.
    #[pyo3(signature = (name, *, bucket=None))]
    fn delete(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        bucket: Option<&str>,
    ) -> PyResult<()> {
        let name = Name::from_py(name, bucket)?;
        let session = self.session()?;
        process::wait(py, objects::delete(&session.node, &name))
    }

    /// Iterates over the objects whose names begin with a prefix, in the order of their names.
    ///
    /// Args:
    ///     prefix: ``"bucket"`` or ``"bucket/prefix"``.
    ///     page_size: Objects per request, 1 to 1000.
    ///     recursive: False: deeper levels are folded into names that end in ``/``, of size 0.
    ///
    /// Returns:
    ///     An iterator of :class:`ObjectInfo`; it fetches a page when it needs one.
    #[pyo3(signature = (prefix, *, page_size=LIST_PAGE_KEYS, recursive=true))]
    fn list(&self, prefix: &str, page_size: usize, recursive: bool) -> PyResult<Listing> {
        if page_size == 0 || page_size > LIST_PAGE_KEYS {
            return Err(Failure::invalid(format!(
                "page_size is {page_size}; give 1 to {LIST_PAGE_KEYS}"
            ))
            .into());
        }
        let (bucket, prefix) = split_prefix(prefix)?;
        let session = self.session()?;
        Ok(Listing::new(session, bucket, prefix, page_size, recursive))
    }

    /// The names of the buckets that the node serves.
    fn buckets(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let session = self.session()?;
        process::wait(py, objects::buckets(&session.node))
    }

    /// Fetches many objects, archive members or byte ranges in one request, in exactly this order.
    ///
    /// Args:
    ///     entries: Names, ``(bucket, key)`` or ``(bucket, key, archpath)`` tuples, :class:`Entry`
    ///         objects, dicts with the names of the wire format; a list of them, any iterable, or a
    ///         one-dimensional array of strings. Duplicates are allowed.
    ///     bucket: The bucket of names that have none.
    ///     continue_on_error: An entry that cannot be had does not fail the batch: its item, in its
    ///         place, says why (``item.error``).
    ///     only_names: Names in the archive without the bucket.
    ///
    /// Returns:
    ///     A :class:`Batch`, when the node has accepted the request; its entries arrive while it is
    ///     iterated over.
    ///
    /// Raises:
    ///     Busy: The node refused for lack of memory for the whole ``timeout``.
    ///     NotFound, InvalidRequest: Known before the first byte. The batch raises later failures.
    #[pyo3(signature = (entries, *, bucket=None, continue_on_error=false, only_names=false))]
    fn batch(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        bucket: Option<String>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Batch> {
        let batch = self.start_batch(
            entries,
            &BatchOptions {
                bucket,
                continue_on_error,
                only_names,
            },
        )?;
        batch.wait_accepted(py)?;
        Ok(batch)
    }

    /// Receives a batch into shared memory, entry after entry without anything in between.
    ///
    /// Args:
    ///     entries, bucket: As for :meth:`batch`.
    ///     slot: A slot of a :class:`Ring` that was not sent yet.
    ///
    /// Returns:
    ///     The sizes of the entries, in order; None if together they are larger than the slot. Its
    ///     contents are then useless.
    ///
    /// Raises:
    ///     EntryFailed: An entry could not be had.
    #[pyo3(signature = (entries, slot, *, bucket=None))]
    fn batch_into(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        slot: &Bound<'_, Slot>,
        bucket: Option<&str>,
    ) -> PyResult<Option<Vec<usize>>> {
        let request = entries::read(entries, bucket)?;
        let session = self.session()?;
        let room = slot.get().filling()?;
        let sizes = process::runtime()?
            .spawn(async move { packed::receive(&session, &request, room).await });
        let mut sizes = packed::AbortOnDrop(sizes);
        process::wait(py, async {
            (&mut sizes.0)
                .await
                .map_err(|e| Failure::new(Class::Error, format!("the batch was cancelled: {e}")))?
        })
    }

    /// Like :meth:`batch`, but returns at once; the batch raises all errors.
    #[pyo3(signature = (entries, *, bucket=None, continue_on_error=false, only_names=false))]
    fn batch_async(
        &self,
        entries: &Bound<'_, PyAny>,
        bucket: Option<String>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Batch> {
        self.start_batch(
            entries,
            &BatchOptions {
                bucket,
                continue_on_error,
                only_names,
            },
        )
    }

    /// Iterates over batches, keeping requests in flight ahead of the loop.
    ///
    /// Args:
    ///     lists: An iterable of what :meth:`batch` takes as ``entries``, read as far as needed.
    ///     prefetch: Batches in flight beyond the one handed out. Their total size stays within
    ///         ``max_inflight_bytes``.
    ///     bucket, continue_on_error, only_names: As for :meth:`batch`.
    ///
    /// Returns:
    ///     An iterator of :class:`Batch`, in the order of ``lists``. A failure is raised in its
    ///     batch's place.
    #[pyo3(signature = (lists, *, prefetch=2, bucket=None, continue_on_error=false, only_names=false))]
    fn batches(
        slf: Bound<'_, Self>,
        lists: &Bound<'_, PyAny>,
        prefetch: usize,
        bucket: Option<String>,
        continue_on_error: bool,
        only_names: bool,
    ) -> PyResult<Batches> {
        let options = BatchOptions {
            bucket,
            continue_on_error,
            only_names,
        };
        Ok(Batches::new(
            slf.unbind(),
            lists.try_iter()?.unbind(),
            prefetch,
            options,
        ))
    }

    /// The entries as one archive file.
    ///
    /// Args:
    ///     entries, bucket, continue_on_error, only_names: As for :meth:`batch`.
    ///     format: ``tar``, ``tgz``, ``tar.lz4`` or ``zip`` (stored).
    ///
    /// Returns:
    ///     A :class:`Buffer` with the bytes of the archive.
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
            other => {
                return Err(
                    Failure::invalid(format!("{other:?} is not an archive format"))
                        .hint("tar, tgz, tar.lz4 or zip")
                        .into(),
                );
            }
        };
        let mut request = entries::read(entries, bucket)?;
        request.continue_on_error = continue_on_error;
        request.only_names = only_names;
        let session = self.session()?;
        let (path, json) = request.to_http(mime, 0..request.len());
        let call = Call::new(Method::POST, path).repeatable().json(json);
        let bytes = process::wait(py, objects::whole(&session.node, &call))?;
        Ok(Buffer::new(bytes, None))
    }

    /// Opens a dataset at the node; ``spec`` is the JSON of ``POST /v1/datasets``. Returns the JSON
    /// of its answer. If ``spec`` does not describe a dataset, raises ``InvalidRequest`` without
    /// asking the node.
    ///
    /// Args:
    ///     progress: Called now and then, in this thread, with JSON (``bytes``) that says how far
    ///         it is: ``listed``, ``to_index`` and ``indexed`` files. What it raises is raised
    ///         here.
    ///     job: For whose account the node asks the origin for what it does not know yet.
    #[pyo3(signature = (spec, progress=None, job=None))]
    fn open_dataset(
        &self,
        py: Python<'_>,
        spec: &str,
        progress: Option<Py<PyAny>>,
        job: Option<&str>,
    ) -> PyResult<Buffer> {
        let spec = DatasetSpec::read(spec.as_bytes()).map_err(Failure::from)?;
        let session = self.session()?;
        // Only the last line is kept: a caller that draws slowly misses some.
        let (lines, said) = tokio::sync::watch::channel(Vec::new());
        let opening = rows::open(&session.node, &spec, job, move |line| {
            lines.send_replace(line.to_vec());
        });
        let opened = told(py, opening, said, progress.as_ref())?;
        Ok(Buffer::new(opened.into(), None))
    }

    /// The rows of a dataset that an expression leaves; ``expression`` is the JSON of
    /// ``POST /v1/datasets/<id>/filters``. The node computes it once for all who ask.
    ///
    /// Args:
    ///     progress: Called now and then, in this thread, with JSON (``bytes``) that says how far
    ///         it is: ``done`` rows ``of`` all. What it raises is raised here.
    ///
    /// Returns:
    ///     What the node says of it, as JSON, and the rows, as :class:`RowSet` reads them.
    ///
    /// Raises:
    ///     InvalidRequest: A column does not exist, or does not compare with a value.
    ///     Unsupported: The node is of a release that does not compute filters.
    #[pyo3(signature = (dataset, expression, progress=None))]
    fn filter(
        &self,
        py: Python<'_>,
        dataset: &str,
        expression: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(Buffer, Buffer)> {
        let session = self.session()?;
        let (lines, said) = tokio::sync::watch::channel(Vec::new());
        let filtering = rows::filter(&session.node, dataset, expression, move |line| {
            lines.send_replace(line.to_vec());
        });
        let (answer, rows) = told(py, filtering, said, progress.as_ref())?;
        Ok((Buffer::new(answer.into(), None), Buffer::new(rows, None)))
    }

    /// What the node knows about a dataset, as JSON. Raises ``NotFound``.
    fn dataset(&self, py: Python<'_>, dataset: &str) -> PyResult<Buffer> {
        let session = self.session()?;
        Ok(Buffer::new(
            process::wait(py, rows::part(&session.node, dataset, ""))?,
            None,
        ))
    }

    /// The rows per block of a dataset, in the form that plans read.
    fn dataset_shape(&self, py: Python<'_>, dataset: &str) -> PyResult<Buffer> {
        let session = self.session()?;
        Ok(Buffer::new(
            process::wait(py, rows::part(&session.node, dataset, "shape"))?,
            None,
        ))
    }

    /// The files of a dataset as JSON lines, in the order of their rows.
    fn dataset_manifest(&self, py: Python<'_>, dataset: &str) -> PyResult<Buffer> {
        let session = self.session()?;
        Ok(Buffer::new(
            process::wait(py, rows::part(&session.node, dataset, "manifest"))?,
            None,
        ))
    }

    /// Tells the node of a composition, as ``composition_body`` describes it; returns the JSON of its
    /// answer. Raises ``NotFound`` if the node does not know one of its datasets.
    fn compose(&self, py: Python<'_>, body: PyBackedBytes) -> PyResult<Buffer> {
        let session = self.session()?;
        let composed = process::wait(py, rows::compose(&session.node, Bytes::from_owner(body)))?;
        Ok(Buffer::new(composed.into(), None))
    }

    /// Registers a job's plan (JSON, as ``POST /v1/datasets/plans`` takes it) with the node, whose
    /// cache follows it. Returns a lease, as JSON. What is fetched for it is on the account of
    /// ``job``.
    #[pyo3(signature = (registration, job=None))]
    fn follow(&self, py: Python<'_>, registration: String, job: Option<&str>) -> PyResult<Buffer> {
        let session = self.session()?;
        Ok(Buffer::new(
            process::wait(py, rows::follow(&session.node, registration, job))?.into(),
            None,
        ))
    }

    /// Ends a lease that :meth:`follow` gave. Waits for that at most this many seconds; it
    /// continues without us. For finalizers: signals wait until this returns.
    fn unfollow(&self, py: Python<'_>, lease: String, wait: f64) -> PyResult<()> {
        let session = self.session()?;
        let runtime = process::runtime()?;
        let task = runtime.spawn(async move { rows::unfollow(&session.node, &lease).await });
        let patience = patience("wait", wait)?;
        match py.detach(|| runtime.block_on(async { tokio::time::timeout(patience, task).await })) {
            Ok(Ok(done)) => Ok(done.map(|_| ())?),
            Ok(Err(e)) => Err(Failure::new(Class::Error, format!("it was given up: {e}")).into()),
            Err(_) => Ok(()),
        }
    }

    /// Rows of a dataset by their numbers, in this order; duplicates are allowed.
    ///
    /// Args:
    ///     dataset: The id that :meth:`open_dataset` returned.
    ///     rows: A one-dimensional array of ``int64`` or ``uint64``, or any iterable of int.
    ///     columns: Read only these, in this order; None for all.
    ///
    /// Returns:
    ///     A :class:`RecordBatch`.
    ///
    /// Raises:
    ///     RangeNotSatisfiable: A row does not exist.
    ///     InvalidRequest: A column does not exist.
    ///     NotFound: The node does not know the dataset, or a file of it is gone.
    ///     PreconditionFailed: A file has changed since the dataset was opened.
    #[pyo3(signature = (dataset, rows, columns=None, job=None))]
    fn take(
        &self,
        py: Python<'_>,
        dataset: &str,
        rows: &Bound<'_, PyAny>,
        columns: Option<Vec<String>>,
        job: Option<&str>,
    ) -> PyResult<RecordBatch> {
        let rows = rows::row_numbers(rows)?;
        let session = self.session()?;
        let (batch, node) = process::wait(py, {
            let wanted = rows::Wanted::Numbers(rows);
            rows::take(&session, dataset, wanted, columns.as_deref(), job)
        })?;
        Ok(RecordBatch::new(batch, node))
    }

    /// The rows of a dataset that have these keys (a JSON list, as for
    /// ``POST /v1/datasets/<id>/keys``) in a column, as one record batch: the first row of each, and
    /// their numbers (``uint64``, little-endian).
    ///
    /// Raises:
    ///     NotFound: No row has one of the keys, or the column is not indexed; or as for :meth:`take`.
    #[pyo3(signature = (dataset, column, keys, columns=None, job=None))]
    fn take_by_key(
        &self,
        py: Python<'_>,
        dataset: &str,
        column: &str,
        keys: PyBackedBytes,
        columns: Option<Vec<String>>,
        job: Option<&str>,
    ) -> PyResult<(RecordBatch, Buffer)> {
        let session = self.session()?;
        let keys = Bytes::copy_from_slice(&keys);
        let (batch, node) = process::wait(py, {
            let wanted = rows::Wanted::Keys(column, keys);
            rows::take(&session, dataset, wanted, columns.as_deref(), job)
        })?;
        let (batch, numbers) = split_numbers(&batch).map_err(Failure::from)?;
        let numbers = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok((RecordBatch::new(batch, node), Buffer::new(numbers, None)))
    }

    /// Makes the index of a column of keys at the node, or finds it; returns JSON (how many ``rows``
    /// have a key, ``of`` how many). ``progress`` is called as that of :meth:`filter`.
    ///
    /// Raises:
    ///     InvalidRequest: The column does not exist, or has neither texts nor bytes nor whole
    ///         numbers.
    ///     Unsupported: The node is of a release that does not index keys.
    #[pyo3(signature = (dataset, column, progress=None))]
    fn index_keys(
        &self,
        py: Python<'_>,
        dataset: &str,
        column: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Buffer> {
        let session = self.session()?;
        let (lines, said) = tokio::sync::watch::channel(Vec::new());
        let indexing = rows::index_keys(&session.node, dataset, column, move |line| {
            lines.send_replace(line.to_vec());
        });
        let indexed = told(py, indexing, said, progress.as_ref())?;
        Ok(Buffer::new(indexed.into(), None))
    }

    /// For each key the first row that has it, 2**64 - 1 for none; or ``all`` rows that have one of
    /// them, as pairs of the key's number and a row (``uint64``, little-endian). Raises ``NotFound``
    /// for a column that is not indexed, ``TooLarge`` for too many rows, and as :meth:`index_keys`.
    #[pyo3(signature = (dataset, column, keys, all=false))]
    fn find_keys(
        &self,
        py: Python<'_>,
        dataset: &str,
        column: &str,
        keys: PyBackedBytes,
        all: bool,
    ) -> PyResult<Buffer> {
        let session = self.session()?;
        let keys = Bytes::copy_from_slice(&keys);
        let finding = rows::find_keys(&session.node, dataset, column, keys, all);
        Ok(Buffer::new(process::wait(py, finding)?, None))
    }

    /// What the node knows of a job, as JSON.
    fn job(&self, py: Python<'_>, name: &str) -> PyResult<Vec<u8>> {
        let session = self.session()?;
        process::wait(py, rows::job(&session.node, name))
    }

    /// One request with a short JSON body, if any; the bytes of its answer.
    #[pyo3(signature = (method, path, body=None))]
    fn _call(
        &self,
        py: Python<'_>,
        method: &str,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> PyResult<Buffer> {
        raw::call(py, &self.session()?, method, path, body)
    }

    /// Begins a request whose body is written piece by piece.
    #[pyo3(signature = (method, path, length=None))]
    fn _upload(&self, method: &str, path: &str, length: Option<u64>) -> PyResult<raw::Upload> {
        Ok(raw::upload(self.session()?, method, path, length)?)
    }

    /// Fills a writable bytes-like object with what a path names, from a byte on.
    fn _read_into(
        &self,
        py: Python<'_>,
        path: &str,
        start: u64,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        raw::read_into(py, &self.session()?, path, start, target)
    }

    /// What a path names as a file that the node lends, if it is on this machine and does.
    fn _borrow(&self, py: Python<'_>, path: &str) -> PyResult<Option<raw::Borrowed>> {
        raw::borrow(py, &self.session()?, path)
    }

    /// Bytes of batches in flight that nobody has asked for yet.
    #[getter]
    fn inflight_bytes(&self) -> PyResult<u64> {
        Ok(self.session()?.inflight.used_bytes())
    }

    /// The URL that the client was made with, or several with commas between them; None for an
    /// engine inside this process.
    #[getter]
    fn url(&self) -> Option<String> {
        let urls = &self.sessions.config.urls;
        (!urls.is_empty()).then(|| urls.join(","))
    }

    /// Seconds without any progress after which a call fails.
    #[getter]
    fn timeout(&self) -> f64 {
        self.sessions.config.timeout.as_secs_f64()
    }

    /// How the node is reached: `unix:/path`, `http://host:port` or `https://host:port`. Of several
    /// nodes, the one that the next call goes to. Connects if nothing has yet.
    #[getter]
    fn route(&self, py: Python<'_>) -> PyResult<String> {
        let session = self.session()?;
        process::wait(py, async { Ok(session.node.find_socket().await?) })?;
        Ok(session.node.route())
    }

    /// How many nodes calls may go to, as far as names were resolved.
    #[getter]
    fn nodes(&self) -> PyResult<usize> {
        Ok(self.session()?.node.count())
    }

    /// How often calls moved to another node or back, or a node did not answer: while this is what
    /// it was, calls go to the same node.
    #[getter]
    fn moves(&self) -> PyResult<u64> {
        Ok(self.session()?.node.moves())
    }

    /// Whether another client asks the same nodes, or the same engine of this process, with the same
    /// token: what one reads, the other may read.
    fn _is_like(&self, other: &Bound<'_, Client>) -> bool {
        let (own, others) = (&self.sessions.config, &other.get().sessions.config);
        own.urls == others.urls
            && own.origins == others.origins
            && own.cache == others.cache
            && own.token == others.token
    }

    fn __reduce__<'py>(
        slf: Bound<'py, Self>,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let c = &slf.get().sessions.config;
        let given = PyDict::new(py);
        given.set_item("url", Some(&c.urls).filter(|urls| !urls.is_empty()))?;
        given.set_item("ca", &c.ca)?;
        given.set_item("timeout", c.timeout.as_secs_f64())?;
        given.set_item("max_inflight_bytes", c.max_inflight_bytes)?;
        given.set_item("direct", c.direct)?;
        given.set_item("origin", Some(&c.origins).filter(|all| !all.is_empty()))?;
        given.set_item("cache", &c.cache)?;
        let arguments = (c.token.is_some(), given).into_pyobject(py)?;
        Ok((slf.get_type().getattr("_reopen")?, arguments))
    }

    /// Rebuilds a pickled client. The token does not travel in pickles.
    #[classmethod]
    fn _reopen<'py>(
        cls: &Bound<'py, PyType>,
        had_token: bool,
        given: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if had_token && environment("FOREBAY_TOKEN").is_none() {
            return Err(Failure::new(
                Class::Unauthenticated,
                "this client was made with a token, and a pickle does not carry tokens",
            )
            .hint("set FOREBAY_TOKEN in the environment instead of passing token=")
            .into());
        }
        cls.call((), Some(given))
    }

    fn __repr__(&self) -> String {
        let c = &self.sessions.config;
        match &c.urls[..] {
            [url] => format!("forebay.Client({url:?})"),
            [_, ..] => format!("forebay.Client({:?})", c.urls),
            [] => format!(
                "forebay.Client(origin={:?}, cache={:?})",
                c.origins.join(", "),
                c.cache.as_deref().unwrap_or("")
            ),
        }
    }
}

/// Waits for work whose progress comes line by line; `progress` is called with the lines in this
/// thread.
fn told<T: Send>(
    py: Python<'_>,
    work: impl Future<Output = crate::failure::Result<T>> + Send,
    mut said: tokio::sync::watch::Receiver<Vec<u8>>,
    progress: Option<&Py<PyAny>>,
) -> PyResult<T> {
    let mut work = std::pin::pin!(work);
    loop {
        let next = process::wait(py, async {
            tokio::select! {
                Ok(()) = said.changed() => Ok(Either::Left(said.borrow_and_update().clone())),
                done = work.as_mut() => done.map(Either::Right),
            }
        })?;
        match (next, progress) {
            (Either::Left(line), Some(progress)) => {
                progress.call1(py, (pyo3::types::PyBytes::new(py, &line),))?;
            }
            (Either::Left(_), None) => {}
            (Either::Right(done), _) => return Ok(done),
        }
    }
}
