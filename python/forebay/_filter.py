"""Which rows a filter leaves: by an expression over columns, or by a function.

The node computes expressions, once for all who ask (:func:`_by_node`). Those that it cannot
compute (over columns that are cast here, or at a node of a release that computes none) are
evaluated here, with PyArrow: only the columns that they need are read, and of Parquet no row groups
whose statistics say that no row, or every row, is left. The result is a compressed set of rows
(``forebay-plan``'s ``RowSet``), kept under the version of the dataset and the expression, or the
name of the function.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _footers, _node
from ._arguments import called_by, columns_there, whole_number
from ._dress import pyarrow
from ._expr import ALWAYS, MAYBE, NEVER, Column, Expression, NotSaid
from ._forebay import RowSet
from ._kept import kept
from ._paced import Pace, paced
from ._pools import Pool
from ._progress import Bar
from .errors import Error, InvalidRequest, SampleFailed, TooLarge, Unsupported

if TYPE_CHECKING:
    from .dataset import Dataset
    from .rows import Rows

#: Rows of one request: of columns of numbers, and of any. For a function, all columns.
NUMBER_ROWS, COLUMN_ROWS, FUNCTION_ROWS = 1 << 16, 1 << 13, 1 << 8
#: Requests in flight.
AHEAD_REQUESTS = 4
#: Files whose footers are looked at, at most: beyond it, the columns are read.
FOOTERS_MAX = 20_000
#: What a node reads of an expression.
DOCUMENT_MAX_BYTES = 1 << 20
#: Threads that a function may run in.
THREADS_MAX = 256
log = logging.getLogger("forebay")

#: Some rows, and what is known of them: :data:`NEVER` left, :data:`ALWAYS`, or to be looked at.
Span = tuple[int, int, str]


#: Finds out which rows a filter leaves, or where that is kept.
Find = Callable[[], RowSet]
#: Says which of some rows are left; of the second it asks whether nobody wants that any more.
Look = Callable[[np.ndarray, Callable[[], bool]], np.ndarray]


def by_expression(of: Dataset[Any], expression: Any, progress: bool | None) -> tuple[Find, str]:
    """What finds the rows for which it is true, and what the filter is called. What can be wrong
    with the expression is found here.
    """
    if isinstance(expression, Column) or not isinstance(expression, Expression):
        raise TypeError(
            'filter takes an expression, as in forebay.col("lang") == "en", or a function with'
            f" name=; not {expression!r}"
        )
    pa = pyarrow("ds.filter(…)")
    names = expression.columns()
    there = of._all_types()
    missing = [name for name in names if name not in there]
    if missing:
        raise InvalidRequest(
            f"the filter {expression!r} needs a column {missing[0]!r}, which {of.name} has not",
            hint=columns_there(missing[0], there),
        )
    empty = pa.record_batch(of._empty(names))
    types = dict(zip(empty.schema.names, empty.schema.types, strict=True))
    expression._check(types)
    # An expression that PyArrow cannot evaluate fails here, before any row is read.
    _true(pa, expression, empty)
    fixed = all(pa.types.is_primitive(kind) for kind in types.values())
    size = NUMBER_ROWS if fixed else COLUMN_ROWS
    text = f"filter {expression!r}"

    def look(ids: np.ndarray, _: Callable[[], bool]) -> np.ndarray:
        return _true(pa, expression, pa.record_batch(of._take(ids, names)))

    def compute() -> RowSet:
        found = _by_node(of, expression, text, progress)
        if found is not None:
            return found
        every, some = _by_statistics(of, expression)
        return _run(of, look, every, some, size, text, progress)

    def find() -> RowSet:
        return _kept(of, ["filter 3", of.id, repr(expression), of._columns_key()], compute)

    return find, text


def _by_node(
    of: Dataset[Any], expression: Expression, text: str, progress: bool | None
) -> RowSet | None:
    """The rows that the nodes of the datasets that it is made of leave; None if one of them has to
    be evaluated here.
    """
    bases = of._tree()[0]
    documents = []
    for base in bases:
        document = _document(base, expression)
        if document is None:
            return None
        documents.append(document)
    sets: list[RowSet] = []
    total = sum(len(base) for base in bases)
    with Bar(text, total, show=progress) as bar:
        for base, document in zip(bases, documents, strict=True):
            before = sum(s.universe for s in sets)
            told = partial(_told, bar, before, total)
            try:
                answer, data = base._of_node(
                    partial(_node.filter, base.client, base.id, document, told)
                )
            except (Unsupported, TooLarge) as e:
                log.info("%s is evaluated here: %s", text, e.message)
                return None
            found = RowSet.decode(data)
            if found.universe != len(base):
                raise InvalidRequest(
                    f"{text}: the node chose from {found.universe:,} rows, and {base.name} has"
                    f" {len(base):,}",
                    hint="the node and this package are of releases that do not go together",
                )
            log.info("%s: the node looked at %d of %d rows", text, answer["looked_at"], len(base))
            sets.append(found)
            bar.to(before + len(base), total)
    return of._filtered(sets)


def _told(bar: Bar, before: int, total: int, so_far: dict[str, Any]) -> None:
    bar.to(before + int(so_far["done"]), total)


def _document(base: Dataset[Any], expression: Expression) -> str | None:
    """The expression for a base, by the names that its node knows; None if the node cannot compute
    it.
    """
    names = expression.columns()
    at_node = base._at_node(names) or names
    cast = {name for name, _ in base.dressing.casts}
    if cast.intersection(at_node):
        return None
    try:
        made = expression._document(dict(zip(names, at_node, strict=True)))
    except NotSaid:
        return None
    document = json.dumps(made, separators=(",", ":"))
    return document if len(document.encode()) <= DOCUMENT_MAX_BYTES else None


def by_function(
    of: Dataset[Any],
    function: Callable[[Any], Any],
    name: str | None,
    columns: Sequence[str] | None,
    threads: int | None,
    progress: bool | None,
) -> tuple[RowSet, str]:
    """The rows for whose sample it returns something true, and what the filter is called."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            "a filter by a function needs a name=, under which its result is kept",
            hint='ds.filter(is_long, name="is_long-v1"); another function needs another name',
        )
    if threads is not None:
        number = whole_number(threads)
        if number is None or not 1 <= number <= THREADS_MAX:
            raise InvalidRequest(
                f"threads={threads!r}", hint=f"give a whole number from 1 to {THREADS_MAX}"
            )
        threads = number
    wanted = None if columns is None else of._known(columns)
    text = f'filter by the function "{name}"'
    pace, make = Pace(FUNCTION_ROWS), of.sampler()

    def take(ids: np.ndarray) -> Rows:
        return of._take(ids, of._columns if wanted is None else wanted)

    def look(ids: np.ndarray, stopped: Callable[[], bool]) -> np.ndarray:
        out = np.zeros(len(ids), bool)
        for i, row in enumerate(itertools.chain.from_iterable(paced(ids, pace, take))):
            if stopped():
                break
            try:
                out[i] = bool(function(row if make is None else make(row)))
            except Exception as e:
                number = int(ids[i])
                place = of.locate(number)
                error = SampleFailed(
                    f"{text}: {place} (row {number} of the dataset): {type(e).__name__}: {e}",
                    hint="nothing is kept of this filter; make the function take such a row",
                )
                error.row, error.file = number, place.file
                error.row_in_file = place.row_in_file
                raise error from e
        return out

    def compute() -> RowSet:
        return _run(of, look, None, None, FUNCTION_ROWS, text, progress, threads)

    # What the function is given: which columns, of what, and what is made of them before.
    called = map(called_by, (f for f in (of.decoder, *of.maps) if f is not None))
    made = [f"{module}.{name}" for module, name in called]
    given = [of.columns if wanted is None else wanted, of._columns_key(), made]

    return _kept(of, ["function 2", of.id, name, *given], compute), text


def _kept(of: Dataset[Any], what: object, compute: Callable[[], RowSet]) -> RowSet:
    def decode(data: bytes) -> RowSet | None:
        try:
            found = RowSet.decode(data)
        except Error:
            return None
        return found if found.universe == len(of) else None

    return kept("filter", what, compute, RowSet.encode, decode)


def _true(pa: Any, expression: Expression, batch: Any) -> np.ndarray:
    """Which rows it is true for."""
    from ._alike import as_known

    try:
        found = expression._evaluate(as_known(batch))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise InvalidRequest(
            f"the filter {expression!r} cannot be evaluated: {e}",
            hint="cast the column, or filter by a function",
        ) from None
    return np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False), bool)


def _run(
    of: Dataset[Any],
    look: Look,
    every: RowSet | None,
    some: RowSet | None,
    size: int,
    text: str,
    progress: bool | None,
    threads: int | None = None,
) -> RowSet:
    """The rows that are left: ``every`` one of a set (None: of none), and those of ``some`` (None:
    of all) for which ``look`` says so, asked for several requests at a time.
    """
    rows = len(of)
    bits = np.zeros(-(-rows // 8), np.uint8)
    if every is not None:
        for begin in range(0, len(every), NUMBER_ROWS):
            _set(bits, _members(every, begin, min(begin + NUMBER_ROWS, len(every))))
    total = rows if some is None else len(some)
    stop = threading.Event()
    workers = threads or min(AHEAD_REQUESTS, len(os.sched_getaffinity(0)) + 2)

    def ask(begin: int) -> np.ndarray:
        end = min(begin + size, total)
        if some is None:
            ids = np.arange(begin, end, dtype=np.uint64)
        else:
            ids = _members(some, begin, end)
        return ids[look(ids, stop.is_set)]

    with (
        Bar(text, total, show=progress) as bar,
        Pool(workers, thread_name_prefix="forebay-filter") as pool,
    ):
        waiting: list[Future[np.ndarray]] = []
        try:
            # No more pieces at a time than are asked for soon.
            for begin in range(0, total, size):
                waiting.append(pool.submit(ask, begin))
                if len(waiting) > 2 * workers:
                    _set(bits, waiting.pop(0).result())
                    bar.advance(size)
            while waiting:
                _set(bits, waiting.pop(0).result())
                bar.advance(min(size, total - bar.done))
        finally:
            # After an error or Ctrl-C, the threads are waited for.
            stop.set()
            for future in waiting:
                future.cancel()
    return RowSet.of_bits(rows, bits.tobytes())


def _members(rows: RowSet, begin: int, end: int) -> np.ndarray:
    return np.asarray(rows.select(np.arange(begin, end, dtype=np.uint64)))


def _set(bits: np.ndarray, rows: np.ndarray) -> None:
    """Sets the bits of these rows."""
    np.bitwise_or.at(bits, rows >> np.uint64(3), (1 << (rows & np.uint64(7))).astype(np.uint8))


# Statistics of Parquet.


def _by_statistics(of: Dataset[Any], expression: Expression) -> tuple[RowSet | None, RowSet | None]:
    """By the statistics of row groups: the rows that are all left (None: none), and those that have
    to be looked at (None: all). Of a composition, by those of the datasets that it is made of.
    """
    bases = of._tree()[0]
    spans = [_spans(base, expression) for base in bases]
    if all(s is None for s in spans):
        return None, None
    whole = [
        s if s is not None else [(0, len(base), MAYBE)]
        for base, s in zip(bases, spans, strict=True)
    ]
    sets = []
    for wanted in (ALWAYS, MAYBE):
        of_bases = [_rows(len(b), s, wanted) for b, s in zip(bases, whole, strict=True)]
        sets.append(of._filtered(of_bases))
    log.info("%r: statistics leave %d of %d rows to be read", expression, len(sets[1]), len(of))
    return sets[0], sets[1]


def _rows(rows: int, spans: Sequence[Span], wanted: str) -> RowSet:
    """The rows of the spans of which this is known."""
    chosen = np.zeros(rows, bool)
    for begin, end, verdict in spans:
        chosen[begin:end] = verdict == wanted
    return RowSet.of_bits(rows, np.packbits(chosen, bitorder="little").tobytes())


def _spans(of: Dataset[Any], expression: Expression) -> list[Span] | None:
    """What the statistics of row groups say, for all rows; None if there are none to ask."""

    def verdicts(groups: list[_footers.Group]) -> list[tuple[int, str]]:
        return [(rows, expression._bounds(known)) for rows, known in groups]

    answers = _footers.look(of, expression.columns(), verdicts, files_max=FOOTERS_MAX)
    if answers is None:
        return None
    spans: list[Span] = []
    row = 0
    for file, groups in zip(of.files, answers, strict=True):
        for rows, verdict in [(file.rows, MAYBE)] if groups is None else groups:
            spans.append((row, row + rows, verdict))
            row += rows
    return spans


__all__ = ["ALWAYS", "NEVER", "by_expression", "by_function"]
