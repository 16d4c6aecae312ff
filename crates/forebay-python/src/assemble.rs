//! The arrays of a batch of packs, from pieces of rows of tokens: one copy of each token.

use crate::{
    failure::{Failure, Result},
    raw::bytes_of,
};
use pyo3::{
    buffer::{Element, PyBuffer},
    prelude::*,
};

/// Some pieces of one window's rows.
///
/// `values`: tokens; those of row *i* begin at `starts[i]`, and there are `counts[i]` of them.
/// `pieces`: row, first token and number of tokens, of each; `packs`: the pack of each, ascending. A
/// piece that ends one token after its row's ends with the token that ends a document.
type Part<'py> = (
    Bound<'py, PyAny>,
    PyBuffer<i64>,
    PyBuffer<i64>,
    PyBuffer<i64>,
    PyBuffer<i64>,
);

/// Where a batch goes: `batch` packs of `length` tokens, each array contiguous; how many tokens each
/// has; and where pieces begin.
type Arrays<'py> = (
    Bound<'py, PyAny>,
    PyBuffer<i32>,
    PyBuffer<i32>,
    Bound<'py, PyAny>,
    PyBuffer<i32>,
    PyBuffer<i32>,
);

/// Fills the arrays of a batch: tokens, positions within each piece, its number in the pack (-1 where
/// nothing is), whether something is there, how many tokens each pack has, and where each piece begins
/// in the batch and the last one ends; what is padding is a piece of its own. ``pad`` and ``eos`` are
/// tokens as they are in the array. Returns how many of these places there are, and how long the
/// longest piece is.
///
/// Raises:
///     InvalidRequest: Pieces that do not fit.
#[pyfunction]
#[pyo3(name = "_assemble_packs")]
pub fn assemble_packs<'py>(
    py: Python<'py>,
    length: usize,
    pad: &[u8],
    eos: Option<&[u8]>,
    parts: Vec<Part<'py>>,
    arrays: Arrays<'py>,
) -> PyResult<(usize, i32)> {
    let (tokens, mut positions, mut documents, mask, mut filled, mut bounds) = arrays;
    let (mut tokens, mut mask) = (bytes_of(&tokens, true)?, bytes_of(&mask, true)?);
    let mut batch = Batch {
        length,
        pad,
        eos,
        tokens: writable(&mut tokens)?,
        positions: writable(&mut positions)?,
        documents: writable(&mut documents)?,
        mask: writable(&mut mask)?,
        filled: writable(&mut filled)?,
        bounds: writable(&mut bounds)?,
        count: 0,
        pack: 0,
        at: 0,
        number: 0,
    };
    batch.check()?;
    let values = parts
        .iter()
        .map(|(values, ..)| bytes_of(values, false))
        .collect::<PyResult<Vec<_>>>()?;
    let mut of_parts = Vec::with_capacity(parts.len());
    for ((_, starts, counts, pieces, packs), values) in parts.iter().zip(&values) {
        let tokens = Tokens {
            values: readable(values)?,
            starts: readable(starts)?,
            counts: readable(counts)?,
        };
        of_parts.push((tokens, readable(pieces)?, readable(packs)?));
    }
    let made = match batch.positions.len() {
        // To let other threads run takes as long as to fill a small batch.
        0..DETACHED_FROM => batch.fill(&of_parts),
        _ => py.detach(|| batch.fill(&of_parts)),
    };
    made?;
    let places = &batch.bounds[..batch.count];
    let longest = places.windows(2).map(|w| w[1] - w[0]).max();
    Ok((batch.count, longest.unwrap_or(0)))
}

/// Batches of so many tokens are filled while other threads have the interpreter.
const DETACHED_FROM: usize = 8192;

fn unfit(what: &str) -> Failure {
    Failure::invalid(format!("a batch of packs cannot be made: {what}"))
}

fn readable<T: Element>(buffer: &PyBuffer<T>) -> Result<&[T]> {
    if !buffer.is_c_contiguous() {
        return Err(unfit("an array is not in one piece"));
    }
    if buffer.item_count() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the buffer has so many of its own type in one piece and keeps them in place, and nothing
    // writes to what was read.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<T>(), buffer.item_count()) })
}

fn writable<T: Element>(buffer: &mut PyBuffer<T>) -> Result<&mut [T]> {
    if !buffer.is_c_contiguous() || buffer.readonly() {
        return Err(unfit(
            "an array is not in one piece, or may not be written to",
        ));
    }
    if buffer.item_count() == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as above; each array was made for this batch, and nobody else knows it before it is
    // full.
    Ok(
        unsafe {
            std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<T>(), buffer.item_count())
        },
    )
}

/// Tokens of a window's rows.
struct Tokens<'a> {
    values: &'a [u8],
    starts: &'a [i64],
    counts: &'a [i64],
}

struct Batch<'a> {
    length: usize,
    pad: &'a [u8],
    eos: Option<&'a [u8]>,
    tokens: &'a mut [u8],
    positions: &'a mut [i32],
    documents: &'a mut [i32],
    mask: &'a mut [u8],
    filled: &'a mut [i32],
    bounds: &'a mut [i32],
    count: usize,
    /// The pack that is being filled, how many tokens it has, and how many pieces.
    pack: usize,
    at: usize,
    number: i32,
}

impl Batch<'_> {
    fn check(&self) -> Result<()> {
        let size = self.filled.len().checked_mul(self.length);
        let fits = size == Some(self.positions.len())
            && self.documents.len() == self.positions.len()
            && self.mask.len() == self.positions.len()
            && !self.pad.is_empty()
            && Some(self.tokens.len()) == self.positions.len().checked_mul(self.pad.len())
            && self.eos.is_none_or(|eos| eos.len() == self.pad.len());
        match fits && i32::try_from(self.positions.len()).is_ok() {
            true => Ok(()),
            false => Err(unfit("the arrays are not of its size")),
        }
    }

    fn fill(&mut self, parts: &[(Tokens<'_>, &[i64], &[i64])]) -> Result<()> {
        for (tokens, pieces, packs) in parts {
            if pieces.len() != packs.len() * 3 {
                return Err(unfit("pieces and packs are of different numbers"));
            }
            for (piece, pack) in pieces.chunks_exact(3).zip(*packs) {
                self.piece(tokens, [piece[0], piece[1], piece[2]], *pack)?;
            }
        }
        self.go_to(self.filled.len())?;
        self.begins(self.positions.len())
    }

    /// Something begins here.
    fn begins(&mut self, at: usize) -> Result<()> {
        let place = self.bounds.get_mut(self.count);
        let place = place.ok_or_else(|| unfit("it has more pieces than places"))?;
        *place = i32::try_from(at).map_err(|_| unfit("too many tokens"))?;
        self.count += 1;
        Ok(())
    }

    /// Ends packs until `pack` is the next to be filled.
    fn go_to(&mut self, pack: usize) -> Result<()> {
        if pack < self.pack || pack > self.filled.len() {
            return Err(unfit("packs are not in their order"));
        }
        while self.pack < pack {
            let (begin, end) = (
                self.pack * self.length + self.at,
                (self.pack + 1) * self.length,
            );
            if begin < end {
                self.begins(begin)?;
                for token in self.tokens[begin * self.pad.len()..end * self.pad.len()]
                    .chunks_exact_mut(self.pad.len())
                {
                    token.copy_from_slice(self.pad);
                }
                self.positions[begin..end].fill(0);
                self.documents[begin..end].fill(-1);
                self.mask[begin..end].fill(0);
            }
            self.filled[self.pack] = self.at as i32;
            (self.pack, self.at, self.number) = (self.pack + 1, 0, 0);
        }
        Ok(())
    }

    fn piece(&mut self, from: &Tokens<'_>, [row, first, count]: [i64; 3], pack: i64) -> Result<()> {
        let whole = |n: i64| usize::try_from(n).map_err(|_| unfit("a number is negative"));
        let (row, first, count, pack) = (whole(row)?, whole(first)?, whole(count)?, whole(pack)?);
        if pack >= self.filled.len() {
            return Err(unfit("a pack is not in it"));
        }
        self.go_to(pack)?;
        if count > self.length - self.at {
            return Err(unfit("a pack is too full"));
        }
        let (Some(start), Some(has)) = (from.starts.get(row), from.counts.get(row)) else {
            return Err(unfit("a row is not in its window"));
        };
        let (start, has) = (whole(*start)?, whole(*has)?);
        let item = self.pad.len();
        // Without the token that ends a document.
        let own = count.min(has.saturating_sub(first));
        let source = start
            .checked_add(first)
            .and_then(|at| Some(at.checked_mul(item)?..at.checked_add(own)?.checked_mul(item)?))
            .and_then(|range| from.values.get(range));
        let source = source.ok_or_else(|| unfit("a row has fewer tokens"))?;
        let begin = self.pack * self.length + self.at;
        let end = begin + count;
        let target = &mut self.tokens[begin * item..end * item];
        let (copied, rest) = target.split_at_mut(own * item);
        copied.copy_from_slice(source);
        match (rest.len() / item, self.eos) {
            (0, _) => {}
            (1, Some(eos)) => rest.copy_from_slice(eos),
            _ => return Err(unfit("a piece goes beyond its row")),
        }
        for (position, n) in self.positions[begin..end].iter_mut().zip(0..) {
            *position = n;
        }
        self.documents[begin..end].fill(self.number);
        self.mask[begin..end].fill(1);
        self.begins(begin)?;
        self.at += count;
        self.number += 1;
        Ok(())
    }
}
