//! `RowSet` and `Composition`: datasets that are made of others, as the package uses
//! them. Nothing here waits or does I/O; long work runs without the GIL.

use crate::{
    failure::{Failure, Result},
    plan::{Numbers, lengths_of},
};
use bytes::Bytes;
use forebay_plan::{Chosen, RowRef, RowsOf, Shape};
use forebay_protocol::composition::{self, Header, Parts, PieceHeader, PieceKind};
use pyo3::{buffer::PyBuffer, prelude::*, pybacked::PyBackedBytes, types::PyBytes};
use std::sync::Arc;

fn of_rows(rows: impl Iterator<Item = u64>) -> Numbers {
    Numbers::new(rows.flat_map(u64::to_ne_bytes).collect(), 8)
}

fn parse(document: &str) -> Result<RowsOf> {
    serde_json::from_str(document)
        .map_err(|e| Failure::invalid(format!("this is not a composition: {e}")))
}

fn kind(is_set: bool) -> PieceKind {
    match is_set {
        true => PieceKind::Set,
        false => PieceKind::Rows,
    }
}

/// What tells a piece from any other: an encoded set of rows, or row numbers as little-endian
/// ``uint64``.
#[pyfunction]
pub fn piece_digest(py: Python<'_>, is_set: bool, data: PyBackedBytes) -> String {
    py.detach(|| composition::digest(kind(is_set), &data))
}

/// What tells a composition from any other: by the ids of its datasets, its document (JSON) and the
/// digests of its pieces.
#[pyfunction]
pub fn composition_identity(
    bases: Vec<String>,
    document: &str,
    digests: Vec<String>,
) -> PyResult<String> {
    Ok(composition::identity(&bases, &parse(document)?, &digests))
}

/// What a node is told of a composition: the body of ``POST /v1/datasets/compositions``. Pieces are
/// pairs of whether it is a set, and its bytes. Raises ``TooLarge`` if no node takes it.
#[pyfunction]
pub fn composition_body<'py>(
    py: Python<'py>,
    bases: Vec<String>,
    document: &str,
    pieces: Vec<(bool, PyBackedBytes)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let header = Header {
        bases,
        rows_of: parse(document)?,
        pieces: pieces
            .iter()
            .map(|(is_set, data)| PieceHeader {
                kind: kind(*is_set),
                bytes: data.len() as u64,
            })
            .collect(),
    };
    let pieces = pieces.into_iter().map(|(_, data)| Bytes::from_owner(data));
    let parts = Parts {
        header,
        pieces: pieces.collect(),
    };
    let body = py.detach(|| parts.body()).map_err(Failure::from)?;
    Ok(PyBytes::new(py, &body))
}

/// What a node is told of the lengths of all rows of a source of a plan (an array of whole numbers
/// below 2**32): the body of ``POST /v1/datasets/<id>/lengths``, and the id by which streams name them.
/// Raises ``TooLarge`` if no node takes so many.
#[pyfunction]
pub fn lengths_body<'py>(
    py: Python<'py>,
    lengths: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyBytes>, String)> {
    let lengths = lengths_of(lengths)?;
    let made = py.detach(|| composition::lengths_body(&lengths));
    let (body, id) = made.map_err(Failure::from)?;
    Ok((PyBytes::new(py, &body), id))
}

/// An array of `uint64`, of any length.
fn row_numbers(rows: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    PyBuffer::<u64>::get(rows)?.to_vec(rows.py())
}

/// Some of the rows `0..universe`, in ascending order.
#[pyclass(frozen, module = "forebay")]
pub struct RowSet(Arc<forebay_plan::RowSet>);

#[pymethods]
impl RowSet {
    /// The set of these rows, in ascending order.
    #[new]
    fn new(py: Python<'_>, universe: u64, rows: &Bound<'_, PyAny>) -> PyResult<Self> {
        let rows = row_numbers(rows)?;
        let set = py
            .detach(|| forebay_plan::RowSet::of(universe, rows.iter().copied()))
            .map_err(Failure::from)?;
        Ok(RowSet(Arc::new(set)))
    }

    /// The set of the rows whose bit is set, as ``numpy.packbits(…, bitorder="little")`` packs them.
    #[staticmethod]
    fn of_bits(py: Python<'_>, universe: u64, bits: PyBackedBytes) -> PyResult<Self> {
        let set = py
            .detach(|| forebay_plan::RowSet::of_bits(universe, &bits))
            .map_err(Failure::from)?;
        Ok(RowSet(Arc::new(set)))
    }

    /// The set that `encode` wrote.
    #[staticmethod]
    fn decode(py: Python<'_>, encoded: PyBackedBytes) -> PyResult<Self> {
        let set = py
            .detach(|| forebay_plan::RowSet::decode(&encoded))
            .map_err(Failure::from)?;
        Ok(RowSet(Arc::new(set)))
    }

    fn encode(&self, py: Python<'_>) -> Vec<u8> {
        py.detach(|| self.0.encode())
    }

    #[getter]
    fn universe(&self) -> u64 {
        self.0.universe()
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// Memory that it takes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// The rows at these places of the set.
    fn select(&self, py: Python<'_>, places: &Bound<'_, PyAny>) -> PyResult<Numbers> {
        let places = row_numbers(places)?;
        if let Some(place) = places.iter().find(|&&place| place >= self.0.len()) {
            let message = format!("place {place} is not in a set of {} rows", self.0.len());
            return Err(Failure::invalid(message).into());
        }
        Ok(py.detach(|| of_rows(places.iter().map(|&place| self.0.select(place)))))
    }

    /// How many rows of the set are below each of these.
    fn rank(&self, py: Python<'_>, rows: &Bound<'_, PyAny>) -> PyResult<Numbers> {
        let rows = row_numbers(rows)?;
        Ok(py.detach(|| of_rows(rows.iter().map(|&row| self.0.rank(row)))))
    }

    fn __contains__(&self, row: u64) -> bool {
        self.0.contains(row)
    }
}

/// Rows that are rows of other datasets.
#[pyclass(frozen, module = "forebay")]
pub struct Composition(forebay_plan::Composition);

#[pymethods]
impl Composition {
    /// `document`: JSON. `shapes`: of the datasets that it is made of, as a node sends them.
    /// `pieces`: what the document names by number, as sets of rows or arrays of row numbers.
    #[new]
    fn new(
        py: Python<'_>,
        document: &str,
        shapes: Vec<PyBackedBytes>,
        pieces: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let document = parse(document)?;
        let shapes = shapes
            .iter()
            .map(|bytes| Shape::decode(bytes).map(Arc::new).map_err(Failure::from))
            .collect::<Result<Vec<_>>>()?;
        let pieces = pieces
            .iter()
            .map(|piece| match piece.cast::<RowSet>() {
                Ok(set) => Ok(Chosen::Set(set.get().0.clone())),
                Err(_) => Ok(Chosen::picks(row_numbers(piece)?)),
            })
            .collect::<PyResult<Vec<_>>>()?;
        let made = py.detach(|| forebay_plan::Composition::new(&document, shapes, &pieces));
        Ok(Composition(made.map_err(Failure::from)?))
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    /// Rows of each block, as a node sends them.
    fn shape(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        let shape = py.detach(|| self.0.shape()).map_err(Failure::from)?;
        Ok(shape.encode())
    }

    /// For each row, which dataset it is of, and its number there.
    fn locate(&self, py: Python<'_>, rows: &Bound<'_, PyAny>) -> PyResult<(Numbers, Numbers)> {
        let rows = row_numbers(rows)?;
        let mut found: Vec<RowRef> = Vec::with_capacity(rows.len());
        py.detach(|| self.0.fill(&rows, &mut found))
            .map_err(Failure::from)?;
        let sources = found.iter().flat_map(|row| row.source.to_ne_bytes());
        Ok((
            Numbers::new(sources.collect(), 4),
            of_rows(found.iter().map(|row| row.row)),
        ))
    }

    /// For each row of a dataset (by its number among those that it is made of) the first row that is
    /// this one; ``2**64 - 1`` for none. Raises ``TooLarge`` if one is there very often.
    fn first_of(&self, py: Python<'_>, source: u32, rows: &Bound<'_, PyAny>) -> PyResult<Numbers> {
        let rows = row_numbers(rows)?;
        let first = py
            .detach(|| self.0.first_of(source, &rows))
            .map_err(Failure::from)?;
        Ok(of_rows(
            first.into_iter().map(|row| row.unwrap_or(u64::MAX)),
        ))
    }

    /// The rows whose row of a dataset is in that dataset's set.
    fn filtered(&self, py: Python<'_>, sets: Vec<PyRef<'_, RowSet>>) -> PyResult<RowSet> {
        let sets: Vec<_> = sets.iter().map(|set| set.0.clone()).collect();
        let kept = py
            .detach(|| self.0.filtered(&sets))
            .map_err(Failure::from)?;
        Ok(RowSet(Arc::new(kept)))
    }
}
