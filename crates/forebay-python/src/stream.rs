//! `Stream`: push streams for Python. [`forebay_client::stream`] receives; this module waits, and
//! defines what Python sees.
//!
//! A stream belongs to the process that opened it. A forked child cannot use it, and does not touch
//! it: its tasks are the parent's.

use crate::{
    client::Client,
    failure::{Class, Failure},
    frame::RecordBatch,
    process,
    rows::Node,
    sync::Mutex,
};
use bytes::Bytes;
use forebay_client::stream::{self, Opening, Openings, Options, Received};
use forebay_core::{Error, ErrorKind, limits};
use forebay_protocol::{dataset::DatasetSpec, frame::decode_checked};
use pyo3::{prelude::*, pybacked::PyBackedBytes, types::PyDict};
use std::{mem::ManuallyDrop, time::Duration};

fn failure(error: Error) -> Failure {
    let unreachable = error.kind() == ErrorKind::OriginUnavailable;
    let message = error.describe();
    let mut failure = Failure::from(error);
    if unreachable {
        failure.class = Class::ConnectionFailed;
    }
    // The hint is kept separately.
    if failure.hint.is_none() {
        failure.message = message;
    }
    failure
}

/// A dataset of a stream, as Python describes it.
#[derive(serde::Deserialize)]
struct Described {
    name: String,
    id: String,
    spec: String,
    #[serde(default)]
    of: Option<Box<Described>>,
}

impl Described {
    fn opening(&self) -> Result<Opening, Failure> {
        Ok(Opening {
            name: self.name.clone(),
            id: self.id.clone(),
            spec: DatasetSpec::read(self.spec.as_bytes())?,
            of: match &self.of {
                Some(of) => Some(Box::new(of.opening()?)),
                None => None,
            },
        })
    }
}

/// What a node is told of the sources of a stream, as Python gives it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Told {
    datasets: String,
    compositions: Vec<PyBackedBytes>,
    bases: String,
    lengths: Vec<(String, PyBackedBytes)>,
}

impl Told {
    fn openings(self) -> Result<Openings, Failure> {
        let compositions = self.compositions.into_iter().map(Bytes::from_owner);
        let lengths = self.lengths.into_iter();
        let lengths = lengths.map(|(of, body)| (of, Bytes::from_owner(body)));
        Ok(Openings {
            datasets: openings(&self.datasets)?,
            compositions: compositions.collect(),
            bases: openings(&self.bases)?,
            lengths: lengths.collect(),
        })
    }
}

fn openings(json: &str) -> Result<Vec<Opening>, Failure> {
    let all: Vec<Described> = serde_json::from_str(json)
        .map_err(|e| Failure::invalid(format!("told= of a stream: {e}")))?;
    all.iter().map(Described::opening).collect()
}

/// So many members of a cluster send parts of one stream, unless more are named.
const MEMBERS_MAX: usize = 4;

/// The steps of one job, in order, which nodes send before they are requested.
///
/// Args:
///     clients: One client, or one for each of several nodes that serve the same files. Steps are
///         distributed over the clients; if a node dies, the others send its steps. If there is
///         one client, of a cluster, several members send (unless one is on this machine, or with
///         ``direct=False``); otherwise one of its nodes sends, and if that dies, the next.
///     request: JSON with ``plan`` (``sources``, ``seed``, ``shuffle``, ``epoch_rows``),
///         ``partition`` (``world``, ``rank``, ``batch``, ``uneven``), ``state`` (where to begin),
///         ``until_epoch`` (the first epoch that is not sent), ``columns``, ``window_bytes`` (how
///         much a node prepares ahead for one connection).
///     connections: How many; None: chosen by round trip and rate, from 2 to 16.
///     ahead_bytes: The limit, in bytes, on what is received but not yet yielded.
///     retry_for: Seconds to retry a step without any progress; default: the first client's
///         ``timeout``.
///     from_step: The first wanted step, counted from ``state``.
///     job: What the job is called, for the nodes' accounts.
///     told: What a node is told that does not know the plan's sources (:class:`dict`); without it,
///         nodes must know them. ``datasets``, as JSON: those that were opened, each with ``name``,
///         ``id``, ``spec`` (its description, as JSON), and, for a part of a dataset, ``of`` (the
///         same of that one). ``compositions``: of each source that is made of datasets, the body
///         that ``composition_body`` makes; ``bases``: the datasets that those are made of,
///         described as in ``datasets``. ``lengths``: if batches are bounded by length, pairs of the
///         id of a source and the body that ``lengths_body`` makes.
///
/// It begins to receive at once. Iterating yields :class:`StreamStep`, each step once, in order. An
/// error is raised in place of its step, and is permanent.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct Stream {
    pid: u32,
    /// The number of the step that was handed out last, and the step.
    last: Mutex<Option<(u64, Py<StreamStep>)>>,
    inner: ManuallyDrop<stream::Stream>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.pid == process::pid() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

impl Stream {
    fn here(&self) -> PyResult<&stream::Stream> {
        if self.pid == process::pid() {
            return Ok(&self.inner);
        }
        Err(Failure::new(
            Class::Error,
            "this stream was opened before the process forked",
        )
        .hint("open it in the process that reads it")
        .into())
    }
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (clients, request, *, connections=None, ahead_bytes=limits::STREAM_RECEIVE_DEFAULT_BYTES, retry_for=None, from_step=0, told=None, job=None))]
    fn new(
        clients: &Bound<'_, PyAny>,
        request: String,
        connections: Option<u32>,
        ahead_bytes: u64,
        retry_for: Option<f64>,
        from_step: u64,
        told: Option<Told>,
        job: Option<&str>,
    ) -> PyResult<Self> {
        let py = clients.py();
        let clients: Vec<Bound<'_, Client>> = match clients.cast::<Client>() {
            Ok(one) => vec![one.clone()],
            Err(_) => clients
                .try_iter()?
                .map(|c| Ok(c?.cast_into::<Client>()?))
                .collect::<PyResult<_>>()?,
        };
        let nodes = clients
            .iter()
            .map(|c| Ok(c.get().session()?.node.clone()))
            .collect::<PyResult<Vec<_>>>()?;
        let nodes = match nodes.as_slice() {
            [one] => {
                let members = async { Ok(one.members(MEMBERS_MAX).await) };
                match process::wait(py, members)? {
                    members if members.len() > 1 => members,
                    _ => nodes,
                }
            }
            _ => nodes,
        };
        let Some(first) = nodes.first() else {
            return Err(Failure::invalid("a stream needs a client").into());
        };
        let silence = first.timeouts().silence;
        let retry_for = match retry_for {
            None => silence,
            Some(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| {
                Failure::invalid(format!(
                    "retry_for={seconds} is not a number of seconds of at least 0"
                ))
            })?,
        };
        let options = Options {
            connections,
            ahead_bytes,
            silence,
            retry_for,
            from_step,
            job: job.map(str::to_owned),
            openings: told.map(Told::openings).transpose()?.unwrap_or_default(),
        };
        let inner = stream::Stream::open(
            process::runtime()?.handle(),
            nodes,
            request.into_bytes(),
            options,
        )
        .map_err(failure)?;
        Ok(Stream {
            pid: process::pid(),
            last: Mutex::default(),
            inner: ManuallyDrop::new(inner),
        })
    }

    /// The next step; None after the last one.
    ///
    /// Args:
    ///     step: The number of the wanted step. If that is the one that was handed out last, it is
    ///         handed out again: a caller that lost it to a signal loses nothing.
    #[pyo3(signature = (step=None))]
    fn next(&self, py: Python<'_>, step: Option<u64>) -> PyResult<Option<Py<StreamStep>>> {
        let stream = self.here()?;
        if let (Some(wanted), Some((number, last))) = (step, &*self.last.lock())
            && wanted == *number
        {
            return Ok(Some(last.clone_ref(py)));
        }
        // Its memory is not kept while waiting for the next one.
        let before = self.last.lock().take();
        drop(before);
        let received = match stream.try_next() {
            Some(next) => next.map_err(failure)?,
            None => process::wait(py, async { stream.next().await.map_err(failure) })?,
        };
        let Some(Received { header, payload }) = received else {
            return Ok(None);
        };
        let batch = py
            .detach(|| decode_checked(&header, &payload))
            .map_err(failure)?;
        let batch = Py::new(py, RecordBatch::new(batch, Node::default()))?;
        let next = if header.tag.next == 0 {
            (header.tag.epoch + 1, 0)
        } else {
            (header.tag.epoch, header.tag.next)
        };
        let found = StreamStep {
            step: header.tag.step,
            epoch: header.tag.epoch,
            next,
            padding: header.tag.padding,
            batch,
        };
        let found = Py::new(py, found)?;
        if step.is_some() {
            *self.last.lock() = Some((header.tag.step, found.clone_ref(py)));
        }
        Ok(Some(found))
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<StreamStep>>> {
        self.next(py, None)
    }

    /// Where the time went so far: seconds, bytes, connections, how long the reader waited, and
    /// (``node``) what the nodes report, summed over connections.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let json = serde_json::to_string(&self.here()?.stats())
            .map_err(|e| Failure::new(Class::Error, e.to_string()))?;
        Ok(py
            .import("json")?
            .call_method1("loads", (json,))?
            .cast_into::<PyDict>()?)
    }

    /// Closes the connections. Reading after this is an error.
    fn close(&self) {
        if let Ok(stream) = self.here() {
            stream.close();
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close();
    }
}

/// One step of a :class:`Stream`.
#[pyclass(frozen, module = "forebay", weakref)]
pub struct StreamStep {
    /// Counted from where the stream began.
    #[pyo3(get)]
    step: u64,
    #[pyo3(get)]
    epoch: u64,
    /// ``(epoch, position)`` after this step, of all ranks together: where a job is that has
    /// yielded it. Not of batches bounded by length: between two of a look-ahead window, a position
    /// is not all of a place.
    #[pyo3(get)]
    next: (u64, u64),
    /// Rows at the end that only fill up the step and do not count.
    #[pyo3(get)]
    padding: u32,
    /// The rows, a :class:`RecordBatch`.
    #[pyo3(get)]
    batch: Py<RecordBatch>,
}

#[pymethods]
impl StreamStep {
    fn __repr__(&self) -> String {
        format!("<forebay.StreamStep {} of epoch {}>", self.step, self.epoch)
    }
}
