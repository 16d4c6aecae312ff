//! `Plan`, `Steps` and `Permutation`: the orders of `forebay-plan`, as the package's loader uses
//! them. Nothing here waits or does I/O.
//!
//! Rows come as [`Numbers`], typed buffers that NumPy takes as they are. Long work runs without the
//! GIL.
//!
//! Documents, partitions and states are JSON in both directions: they are a few numbers, and Python
//! keeps states in the form that `json` gives them.

use crate::{
    batch::fill_view,
    failure::{Failure, Result},
    sync::Mutex,
};
use forebay_core::limits;
use forebay_plan::{
    Begin, Lengths, Packing, Partition, PlanDocument, RowRef, Shape, State,
    quality::{Given, Labels, Stretches, Uniform, expected, measure},
};
use pyo3::{
    buffer::{Element, PyBuffer},
    ffi,
    prelude::*,
    pybacked::PyBackedBytes,
};
use serde::de::DeserializeOwned;
use std::{collections::HashMap, os::raw::c_int, sync::Arc};

/// Points of an order that a report draws.
const POINTS_MAX: usize = 1500;

fn parse<T: DeserializeOwned>(what: &str, json: &str) -> Result<T> {
    serde_json::from_str(json).map_err(|e| Failure::invalid(format!("this is not a {what}: {e}")))
}

fn text(state: &State) -> String {
    serde_json::to_string(state).expect("load the state as it was saved")
}

/// The shape of runs ``(blocks, rows per block)``, in the form that a node sends: for orders over
/// data that no node has opened.
#[pyfunction]
pub fn encode_shape(runs: Vec<(u64, u64)>) -> PyResult<Vec<u8>> {
    Ok(Shape::from_runs(runs).map_err(Failure::from)?.encode())
}

/// The order of all epochs of some datasets.
#[pyclass(frozen, module = "forebay")]
pub struct Plan(Arc<forebay_plan::Plan>);

#[pymethods]
impl Plan {
    /// `document`: the plan in the form that requests use. `shapes`: those of its datasets, in the
    /// order of its sources, as the node sends them.
    #[new]
    fn new(document: &str, shapes: Vec<PyBackedBytes>) -> PyResult<Self> {
        let document: PlanDocument = parse("plan", document)?;
        if shapes.len() != document.sources.len() {
            return Err(Failure::invalid(format!(
                "the plan has {} sources, and {} shapes were given",
                document.sources.len(),
                shapes.len()
            ))
            .into());
        }
        let mut known = HashMap::new();
        for (source, bytes) in document.sources.iter().zip(&shapes) {
            known.insert(
                source.dataset.clone(),
                Arc::new(Shape::decode(bytes).map_err(Failure::from)?),
            );
        }
        let spec = document
            .resolve(|id| Ok(known[id].clone()))
            .map_err(Failure::from)?;
        Ok(Plan(Arc::new(
            forebay_plan::Plan::new(spec).map_err(Failure::from)?,
        )))
    }

    #[getter]
    fn identity(&self) -> &str {
        self.0.identity()
    }

    #[getter]
    fn rows_per_epoch(&self) -> u64 {
        self.0.rows_per_epoch()
    }

    /// How many rows each source contributes to a cycle, and the cycle's length.
    #[getter]
    fn quotas(&self) -> (Vec<u64>, u64) {
        self.0.quotas()
    }

    /// The rows at the positions from `start` to `stop` of an epoch, and the source of each.
    fn rows(
        &self,
        py: Python<'_>,
        epoch: u64,
        start: u64,
        stop: u64,
    ) -> PyResult<(Numbers, Numbers)> {
        self.within(epoch, start, stop)?;
        let rows = py.detach(|| {
            let mut rows = Vec::new();
            self.0.fill(epoch, start..stop, &mut rows);
            rows
        });
        Ok((numbers_of_rows(&rows), numbers_of_sources(&rows)))
    }

    /// The first position of a row in an epoch; None if the epoch does not contain it.
    #[pyo3(signature = (epoch, row, source=0))]
    fn position_of(&self, epoch: u64, row: u64, source: u32) -> Option<u64> {
        self.0.position_of(epoch, RowRef { source, row })
    }

    /// The blocks `(source, block)` that the positions from `start` to `stop` need, in the order of
    /// their first use.
    fn blocks(
        &self,
        py: Python<'_>,
        epoch: u64,
        start: u64,
        stop: u64,
    ) -> PyResult<Vec<(u32, u64)>> {
        self.within(epoch, start, stop)?;
        Ok(py.detach(|| self.0.blocks_of(epoch, start..stop)))
    }

    /// When a row of a block is needed next, at or after a position: `(epoch, position)`.
    #[pyo3(signature = (epoch, position, block, source=0))]
    fn next_use(
        &self,
        py: Python<'_>,
        epoch: u64,
        position: u64,
        block: u64,
        source: u32,
    ) -> Option<(u64, u64)> {
        py.detach(|| self.0.next_use(epoch, position, source, block))
    }

    /// The measures of quality, in batches of `batch` rows, as JSON: for this order, for a uniform
    /// one if that can be made, and the expected values for a uniform one; and, to draw it,
    /// `(position, row)` of some rows of this order, as shares.
    #[pyo3(signature = (batch=32, labels=None, stretches=10))]
    fn report(
        &self,
        py: Python<'_>,
        batch: u32,
        labels: Option<Vec<String>>,
        stretches: u32,
    ) -> PyResult<String> {
        let plan = &self.0;
        let rows = plan.spec().sources[0].shape.rows();
        if labels
            .as_ref()
            .is_some_and(|labels| plan.spec().sources.len() > 1 || labels.len() as u64 != rows)
        {
            return Err(Failure::invalid(format!(
                "labels are for a single dataset: give one for each of its {rows} rows"
            ))
            .into());
        }
        if !(1..=limits::PLAN_STRETCHES_MAX).contains(&stretches) {
            return Err(Failure::invalid(format!(
                "stretches is {stretches}; give 1 to {}",
                limits::PLAN_STRETCHES_MAX
            ))
            .into());
        }
        let report = py.detach(|| {
            let given = labels.map(Given::from_text);
            let by_place = Stretches { plan, stretches };
            let labels: &dyn Labels = given.as_ref().map_or(&by_place, |given| given);
            let (own, picture) = measure(plan, &**plan, batch, labels)?;
            let every = picture.points.len().div_ceil(POINTS_MAX).max(1);
            let points: Vec<_> = picture.points.iter().step_by(every).collect();
            let uniform = Uniform::new(plan, plan.spec().seed)
                .map(|uniform| measure(plan, &uniform, batch, labels))
                .transpose()?
                .map(|(report, _)| report);
            Ok(serde_json::json!({ "order": own, "uniform": uniform, "expected": expected(plan, batch), "points": points }))
        });
        Ok(report
            .map_err(|e: forebay_core::Error| Failure::from(e))?
            .to_string())
    }

    /// The state before a position of an epoch.
    fn state(&self, epoch: u64, position: u64) -> PyResult<String> {
        let state = State::at(&self.0, epoch, position);
        state.check(&self.0).map_err(Failure::from)?;
        Ok(text(&state))
    }

    /// The state, after checking that it belongs to this plan.
    fn checked(&self, state: &str) -> PyResult<String> {
        let state: State = parse("state", state)?;
        state.check(&self.0).map_err(Failure::from)?;
        Ok(text(&state))
    }

    /// The packs of the rows from a position of an epoch on, which have `tokens` tokens each (an
    /// array of integers): the pieces (row among these, first token, number of tokens), pack after
    /// pack; where the pieces of each complete pack end; and the tokens of the pack that is left
    /// open. `taken` and `filled`: where the first pack begins.
    #[pyo3(signature = (epoch, position, packing, tokens, taken=0, filled=0))]
    fn pack(
        &self,
        py: Python<'_>,
        epoch: u64,
        position: u64,
        packing: &str,
        tokens: &Bound<'_, PyAny>,
        taken: u32,
        filled: u32,
    ) -> PyResult<(Numbers, Numbers, u32)> {
        let packing: Packing = parse("packing", packing)?;
        let tokens = lengths_of(tokens)?;
        let begin = Begin { taken, filled };
        let packs = py
            .detach(|| self.0.pack(epoch, position, &packing, &tokens, begin))
            .map_err(Failure::from)?;
        let pieces = packs
            .pieces
            .iter()
            .flat_map(|p| [p.row, p.begin, p.length])
            .flat_map(u32::to_ne_bytes)
            .collect();
        let ends = packs.ends.iter().flat_map(|n| n.to_ne_bytes()).collect();
        Ok((Numbers::new(pieces, 4), Numbers::new(ends, 4), packs.filled))
    }

    /// The steps of one rank, or of one of its workers, from a state to the beginning of the epoch
    /// `until`. `lengths` are those of all rows, one array for each source.
    #[pyo3(signature = (partition, state, until=None, lengths=None, worker=0, workers=1))]
    fn steps(
        &self,
        partition: &str,
        state: &str,
        until: Option<u64>,
        lengths: Option<Vec<Bound<'_, PyAny>>>,
        worker: u32,
        workers: u32,
    ) -> PyResult<Steps> {
        let (partition, state): (Partition, State) =
            (parse("partition", partition)?, parse("state", state)?);
        let mut steps =
            forebay_plan::Steps::new(self.0.clone(), partition, &state).map_err(Failure::from)?;
        steps = steps.of_worker(worker, workers).map_err(Failure::from)?;
        if let Some(epoch) = until {
            steps = steps.until_epoch(epoch);
        }
        if let Some(lengths) = lengths {
            let of_sources = lengths
                .iter()
                .map(lengths_of)
                .collect::<PyResult<Vec<_>>>()?;
            let rows: Vec<usize> = self
                .0
                .spec()
                .sources
                .iter()
                .map(|source| source.shape.rows() as usize)
                .collect();
            if of_sources.iter().map(Vec::len).ne(rows.iter().copied()) {
                return Err(Failure::invalid(format!(
                    "give one array of lengths for each dataset, with {rows:?} lengths"
                ))
                .into());
            }
            steps = steps.with_lengths(Arc::new(Arrays(of_sources)));
        }
        Ok(Steps(Mutex::new(steps)))
    }
}

impl Plan {
    fn within(&self, epoch: u64, start: u64, stop: u64) -> Result<()> {
        let rows = self.0.rows_per_epoch();
        if start > stop || stop > rows || epoch >= limits::PLAN_EPOCHS_MAX {
            return Err(Failure::invalid(format!(
                "positions {start} to {stop} are not within epoch {epoch}, which has {rows} rows"
            )));
        }
        Ok(())
    }
}

/// The lengths of all rows of each source.
struct Arrays(Vec<Vec<u32>>);

impl Lengths for Arrays {
    fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> forebay_core::Result<()> {
        out.extend(
            rows.iter()
                .map(|row| u64::from(self.0[row.source as usize][row.row as usize])),
        );
        Ok(())
    }
}

/// An array of integers of any type, as lengths.
pub(crate) fn lengths_of(array: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    fn read<T: Element + TryInto<u32>>(array: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>> {
        let Ok(buffer) = PyBuffer::<T>::get(array) else {
            return Ok(None);
        };
        let wrong = |_| Failure::invalid("a length is below 0, or above 4294967295");
        let lengths = buffer
            .to_vec(array.py())?
            .into_iter()
            .map(|n| n.try_into().map_err(|_| ()).map_err(wrong));
        Ok(Some(lengths.collect::<Result<_>>()?))
    }
    let read_as: [fn(&Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>>; 6] = [
        read::<i64>,
        read::<u32>,
        read::<i32>,
        read::<u64>,
        read::<u16>,
        read::<i16>,
    ];
    for read in read_as {
        if let Some(lengths) = read(array)? {
            return Ok(lengths);
        }
    }
    Err(Failure::invalid("lengths are an array of integers of 16, 32 or 64 bits").into())
}

/// A keyed bijection on `0..n`: a shuffled order without an array.
#[pyclass(frozen, module = "forebay")]
pub struct Permutation(forebay_plan::Permutation);

#[pymethods]
impl Permutation {
    #[new]
    fn new(n: u64, key: u64) -> PyResult<Self> {
        if n > forebay_plan::Permutation::MAX {
            return Err(
                Failure::invalid(format!("a permutation of {n} numbers: at most 2**62")).into(),
            );
        }
        Ok(Permutation(forebay_plan::Permutation::new(n, key)))
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// The number at place `i`.
    fn at(&self, i: u64) -> PyResult<u64> {
        self.within(i)?;
        Ok(self.0.at(i))
    }

    /// The place of number `v`.
    fn position_of(&self, v: u64) -> PyResult<u64> {
        self.within(v)?;
        Ok(self.0.position_of(v))
    }

    /// The numbers at the places from `start` to `stop`.
    fn numbers(&self, py: Python<'_>, start: u64, stop: u64) -> PyResult<Numbers> {
        if start > stop || stop > self.0.len() {
            return Err(Failure::invalid(format!(
                "places {start} to {stop} are not within {}",
                self.0.len()
            ))
            .into());
        }
        let numbers = py.detach(|| {
            let mut numbers = Vec::with_capacity((stop - start) as usize * 8);
            self.0
                .for_each(start..stop, |n| numbers.extend_from_slice(&n.to_ne_bytes()));
            numbers
        });
        Ok(Numbers::new(numbers, 8))
    }
}

impl Permutation {
    fn within(&self, i: u64) -> Result<()> {
        if i < self.0.len() {
            Ok(())
        } else {
            Err(Failure::invalid(format!(
                "{i} is not below {}",
                self.0.len()
            )))
        }
    }
}

/// The steps of one rank.
#[pyclass(frozen, module = "forebay")]
pub struct Steps(Mutex<forebay_plan::Steps>);

#[pymethods]
impl Steps {
    /// The step of this number; None past the end.
    fn step(&self, py: Python<'_>, number: u64) -> PyResult<Option<Step>> {
        let found = py
            .detach(|| self.0.lock().step(number))
            .map_err(Failure::from)?;
        Ok(found.map(Step))
    }

    /// The number of steps until the end, of all workers; None if finding out would mean going
    /// there.
    fn count(&self) -> Option<u64> {
        self.0.lock().total()
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Step>> {
        let found = py
            .detach(|| self.0.lock().next())
            .transpose()
            .map_err(Failure::from)?;
        Ok(found.map(Step))
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
        numbers_of_rows(&self.0.rows)
    }

    /// The source of each row, as a buffer of `u32`.
    #[getter]
    fn sources(&self) -> Numbers {
        numbers_of_sources(&self.0.rows)
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

fn numbers_of_rows(rows: &[RowRef]) -> Numbers {
    Numbers::new(rows.iter().flat_map(|r| r.row.to_ne_bytes()).collect(), 8)
}

fn numbers_of_sources(rows: &[RowRef]) -> Numbers {
    Numbers::new(
        rows.iter().flat_map(|r| r.source.to_ne_bytes()).collect(),
        4,
    )
}

/// Unsigned numbers of 4 or 8 bytes: a buffer of that type, which ``numpy.asarray`` takes without a
/// copy.
#[pyclass(frozen, module = "forebay")]
pub struct Numbers {
    bytes: Vec<u8>,
    /// What a view points to: the number of values, and the distance between them.
    count: ffi::Py_ssize_t,
    width: ffi::Py_ssize_t,
}

impl Numbers {
    pub(crate) fn new(bytes: Vec<u8>, width: usize) -> Self {
        Numbers {
            count: (bytes.len() / width) as ffi::Py_ssize_t,
            width: width as ffi::Py_ssize_t,
            bytes,
        }
    }
}

#[pymethods]
impl Numbers {
    fn __len__(&self) -> usize {
        self.count as usize
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let numbers = slf.get();
        // SAFETY: the bytes live as long as this object, which the view holds; nothing here reads
        // or moves them. The type, shape and stride that replace those of plain bytes describe the
        // same memory, and point into this object or to constants; a view without a shape is one of
        // bytes, whatever its type.
        unsafe {
            fill_view(
                slf.as_any(),
                view,
                flags,
                numbers.bytes.as_ptr().cast_mut(),
                numbers.bytes.len(),
            )?;
            (*view).itemsize = numbers.width;
            if flags & ffi::PyBUF_FORMAT == ffi::PyBUF_FORMAT {
                (*view).format = if numbers.width == 8 {
                    c"Q".as_ptr().cast_mut()
                } else {
                    c"I".as_ptr().cast_mut()
                };
            }
            if flags & ffi::PyBUF_ND == ffi::PyBUF_ND {
                (*view).shape = (&raw const numbers.count).cast_mut();
            }
            if flags & ffi::PyBUF_STRIDES == ffi::PyBUF_STRIDES {
                (*view).strides = (&raw const numbers.width).cast_mut();
            }
        }
        Ok(())
    }
}
