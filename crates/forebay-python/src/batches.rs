//! `Client.batches`: a sequence of batches, received in order, ahead of the loop that consumes
//! them.

use crate::{
    batch::Batch,
    client::{BatchOptions, Client},
    sync::Mutex,
};
use pyo3::{prelude::*, types::PyIterator};
use std::collections::VecDeque;

/// An iterator that keeps `prefetch` batches in flight beyond the one that it hands out.
#[pyclass(frozen, module = "forebay")]
pub struct Batches {
    client: Py<Client>,
    lists: Py<PyIterator>,
    prefetch: usize,
    options: BatchOptions,
    ahead: Mutex<Ahead>,
}

#[derive(Default)]
struct Ahead {
    batches: VecDeque<Batch>,
    /// Set when the lists are used up, or getting the next one failed.
    end: Option<Option<PyErr>>,
}

impl Batches {
    pub fn new(
        client: Py<Client>,
        lists: Py<PyIterator>,
        prefetch: usize,
        options: BatchOptions,
    ) -> Self {
        Batches {
            client,
            lists,
            prefetch,
            options,
            ahead: Mutex::default(),
        }
    }
}

#[pymethods]
impl Batches {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let ahead = self.ahead.lock();
        let more = match ahead.end {
            Some(_) => "nothing more to be requested",
            None => "more to be requested",
        };
        format!(
            "<forebay.Batches: {} requested ahead, {more}>",
            ahead.batches.len()
        )
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        // Batches are requested when the consumer takes one, so each is as many steps ahead as
        // `prefetch` says.
        loop {
            let full = { self.ahead.lock().batches.len() > self.prefetch };
            if full || self.ahead.lock().end.is_some() {
                break;
            }
            // User code runs here: the lock must not be held.
            match self.lists.bind(py).clone().next() {
                Some(Ok(list)) => match self.client.get().start_batch(&list, &self.options) {
                    Ok(batch) => self.ahead.lock().batches.push_back(batch),
                    Err(error) => self.ahead.lock().end = Some(Some(error)),
                },
                Some(Err(error)) => self.ahead.lock().end = Some(Some(error)),
                None => self.ahead.lock().end = Some(None),
            }
        }
        let mut ahead = self.ahead.lock();
        if let Some(batch) = ahead.batches.pop_front() {
            batch.ask();
            return Ok(Some(batch));
        }
        // A list's error is raised once, after the batches before it.
        match ahead.end.as_mut().and_then(Option::take) {
            Some(error) => Err(error),
            None => Ok(None),
        }
    }
}
