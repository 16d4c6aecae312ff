//! Listings as Python sees them: an iterator that fetches a page when it needs one, and what it
//! yields.

use crate::{
    objects::{self, Info, Page},
    process,
    session::Session,
    sync::Mutex,
};
use forebay_core::units::count;
use pyo3::{
    prelude::*,
    types::{PyTuple, PyType},
};
use std::{collections::VecDeque, sync::Arc};

/// What is known about one object: ``bucket``, ``key``, ``name`` (both), ``size`` in bytes, and if
/// known ``etag``, ``last_modified`` (in HTTP's time format) and ``cache`` (``HIT``, ``MISS``…).
#[pyclass(frozen, module = "forebay")]
pub struct ObjectInfo(pub Info);

#[pymethods]
impl ObjectInfo {
    #[getter]
    fn bucket(&self) -> &str {
        &self.0.bucket
    }

    #[getter]
    fn key(&self) -> &str {
        &self.0.key
    }

    /// `bucket/key`, which every call of the client takes as a name.
    #[getter]
    fn name(&self) -> String {
        format!("{}/{}", self.0.bucket, self.0.key)
    }

    #[getter]
    fn size(&self) -> u64 {
        self.0.size
    }

    #[getter]
    fn etag(&self) -> Option<&str> {
        self.0.etag.as_deref()
    }

    #[getter]
    fn last_modified(&self) -> Option<&str> {
        self.0.last_modified.as_deref()
    }

    #[getter]
    fn cache(&self) -> Option<&str> {
        self.0.cache.as_deref()
    }

    fn __reduce__<'py>(
        slf: Bound<'py, Self>,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let Info {
            bucket,
            key,
            size,
            etag,
            last_modified,
            cache,
        } = &slf.get().0;
        let known = (bucket, key, *size, etag, last_modified, cache).into_pyobject(py)?;
        Ok((slf.get_type().getattr("_again")?, known))
    }

    /// Rebuilds what was pickled.
    #[classmethod]
    fn _again(
        _cls: &Bound<'_, PyType>,
        bucket: String,
        key: String,
        size: u64,
        etag: Option<String>,
        last_modified: Option<String>,
        cache: Option<String>,
    ) -> Self {
        ObjectInfo(Info {
            bucket,
            key,
            size,
            etag,
            last_modified,
            cache,
        })
    }

    fn __repr__(&self) -> String {
        format!(
            "<forebay.ObjectInfo {:?}, {}>",
            self.name(),
            count(self.0.size, "byte")
        )
    }
}

/// The objects under a prefix: an iterator of :class:`ObjectInfo` that fetches a page when it needs
/// one. Made by :meth:`Client.list`.
#[pyclass(frozen, module = "forebay")]
pub struct Listing {
    session: Arc<Session>,
    bucket: String,
    prefix: String,
    page_size: usize,
    recursive: bool,
    state: Mutex<State>,
}

struct State {
    ready: VecDeque<Info>,
    /// Where the next page begins; `None` after the last.
    token: Option<String>,
}

impl Listing {
    pub fn new(
        session: Arc<Session>,
        bucket: &str,
        prefix: &str,
        page_size: usize,
        recursive: bool,
    ) -> Self {
        let state = State {
            ready: VecDeque::new(),
            token: Some(String::new()),
        };
        Listing {
            session,
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            page_size,
            recursive,
            state: Mutex::new(state),
        }
    }
}

#[pymethods]
impl Listing {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let state = self.state.lock();
        let more = match state.token {
            Some(_) => "more to be asked for",
            None => "nothing more to be asked for",
        };
        format!(
            "<forebay.Listing of {}/{}: {} at hand, {more}>",
            self.bucket,
            self.prefix,
            count(state.ready.len() as u64, "object")
        )
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<ObjectInfo>> {
        loop {
            // Do not hold the lock while waiting: another thread may need the GIL that we would be
            // waiting for.
            let token = {
                let mut state = self.state.lock();
                if let Some(info) = state.ready.pop_front() {
                    return Ok(Some(ObjectInfo(info)));
                }
                match state.token.take() {
                    Some(token) => token,
                    None => return Ok(None),
                }
            };
            let fetched = process::wait(
                py,
                objects::list(
                    &self.session.node,
                    &self.bucket,
                    &self.prefix,
                    &token,
                    self.page_size,
                    self.recursive,
                ),
            );
            let mut state = self.state.lock();
            match fetched {
                Ok(Page { objects, token }) => {
                    state.ready.extend(objects);
                    state.token = (!token.is_empty()).then_some(token);
                }
                Err(error) => {
                    state.token = Some(token);
                    return Err(error);
                }
            }
        }
    }
}
