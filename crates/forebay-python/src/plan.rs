//! `Plan` and `Steps`: the orders of `forebay-plan`, as the package's loader asks for them. Nothing here waits or does I/O.
//!
//! Documents, partitions and states are JSON in both directions: they are a few numbers, and Python keeps states as what `json` makes of them.

use crate::{
    batch::fill_view,
    failure::{Failure, Result},
};
use forebay_plan::{Partition, PlanDocument, Shape, State};
use pyo3::{ffi, prelude::*, pybacked::PyBackedBytes};
use serde::de::DeserializeOwned;
use std::{
    collections::HashMap,
    os::raw::c_int,
    sync::{Arc, Mutex, PoisonError},
};

fn parse<T: DeserializeOwned>(what: &str, json: &str) -> Result<T> {
    serde_json::from_str(json).map_err(|e| Failure::invalid(format!("this is no {what}: {e}")))
}

fn text(state: &State) -> String {
    serde_json::to_string(state).expect("a state is numbers and texts")
}

/// The order of all epochs of some datasets.
#[pyclass(frozen, module = "forebay")]
pub struct Plan(Arc<forebay_plan::Plan>);

#[pymethods]
impl Plan {
    /// `document`: the plan as requests name it. `shapes`: of its datasets, in the order of its sources, as the node sends them.
    #[new]
    fn new(document: &str, shapes: Vec<PyBackedBytes>) -> PyResult<Self> {
        let document: PlanDocument = parse("plan", document)?;
        if shapes.len() != document.sources.len() {
            return Err(Failure::invalid(format!("{} sources and {} shapes", document.sources.len(), shapes.len())).into());
        }
        let mut known = HashMap::new();
        for (source, bytes) in document.sources.iter().zip(&shapes) {
            known.insert(source.dataset.clone(), Arc::new(Shape::decode(bytes).map_err(Failure::from)?));
        }
        let spec = document.resolve(|id| Ok(known[id].clone())).map_err(Failure::from)?;
        Ok(Plan(Arc::new(forebay_plan::Plan::new(spec).map_err(Failure::from)?)))
    }

    #[getter]
    fn identity(&self) -> &str {
        self.0.identity()
    }

    #[getter]
    fn rows_per_epoch(&self) -> u64 {
        self.0.rows_per_epoch()
    }

    /// The state before a position of an epoch.
    fn state(&self, epoch: u64, position: u64) -> PyResult<String> {
        let state = State::at(&self.0, epoch, position);
        state.check(&self.0).map_err(Failure::from)?;
        Ok(text(&state))
    }

    /// The state, if it is one of this plan.
    fn checked(&self, state: &str) -> PyResult<String> {
        let state: State = parse("state", state)?;
        state.check(&self.0).map_err(Failure::from)?;
        Ok(text(&state))
    }

    /// The steps of one rank from a state on, to the beginning of the epoch `until`.
    #[pyo3(signature = (partition, state, until=None))]
    fn steps(&self, partition: &str, state: &str, until: Option<u64>) -> PyResult<Steps> {
        let (partition, state): (Partition, State) = (parse("partition", partition)?, parse("state", state)?);
        let mut steps = forebay_plan::Steps::new(self.0.clone(), partition, &state).map_err(Failure::from)?;
        if let Some(epoch) = until {
            steps = steps.until_epoch(epoch);
        }
        Ok(Steps(Mutex::new(steps)))
    }
}

/// The steps of one rank.
#[pyclass(frozen, module = "forebay")]
pub struct Steps(Mutex<forebay_plan::Steps>);

#[pymethods]
impl Steps {
    /// The step of this number; None past the end.
    fn step(&self, number: u64) -> PyResult<Option<Step>> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner).step(number).map_err(Failure::from)?;
        Ok(found.map(Step))
    }

    /// Steps until the end; None if nobody knows without going there.
    fn count(&self) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count()
    }
}

/// One rank's batch in one step.
#[pyclass(frozen, module = "forebay")]
pub struct Step(forebay_plan::Step);

#[pymethods]
impl Step {
    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// The row numbers, as a buffer of `u64`.
    #[getter]
    fn rows(&self) -> Numbers {
        Numbers(self.0.rows.iter().flat_map(|r| r.row.to_ne_bytes()).collect())
    }

    /// Which source each row is of, as a buffer of `u32`.
    #[getter]
    fn sources(&self) -> Numbers {
        Numbers(self.0.rows.iter().flat_map(|r| r.source.to_ne_bytes()).collect())
    }

    #[getter]
    fn real(&self) -> usize {
        self.0.real
    }

    /// The state when all ranks have yielded this step.
    #[getter]
    fn next(&self) -> String {
        text(&self.0.next)
    }
}

/// Numbers of a fixed width, bytes-like.
#[pyclass(frozen, module = "forebay")]
pub struct Numbers(Vec<u8>);

#[pymethods]
impl Numbers {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = &slf.get().0;
        // SAFETY: the bytes do not change and live as long as this object, which the view holds; nothing here reads them again.
        unsafe { fill_view(slf.as_any(), view, flags, bytes.as_ptr().cast_mut(), bytes.len()) }
    }
}
