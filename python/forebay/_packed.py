"""From windows of rows to batches of packs.

A *window* is some rows that follow each other in the order. What the compiled plan makes of their
lengths, packs of pieces of rows, is dealt here as the order itself is: a step takes the next
``world_size * batch_size`` packs, rank ``r`` the ``r``-th ``batch_size`` of them. So every rank
goes through the lengths of all rows, and puts together its own packs only.

Where a column or an array tells the lengths, the packs of a window are dealt before it is read, and
a rank reads of it the rows of its own packs. Otherwise it reads and tokenizes each window whole.

A place in the order of packs is the state of a loader, and ``"pack"`` in it where it is not between
two windows: how many packs of the window were taken, or how many tokens of the row.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from . import _arrow, _collate
from ._decode import Recipe, called
from ._fetch import Fetched, Fetcher, Pull, in_pieces, joined
from ._forebay import _assemble_packs
from ._pipeline import Pipeline
from ._plan import Order, State, Step, Steps, plain_state
from ._words import counted
from .errors import InvalidRequest, SampleFailed
from .pack import READ_ROWS, READ_ROWS_MAX, READ_ROWS_STREAM, Pack, refuse_padding
from .rows import Rows
from .stats import Meter

if TYPE_CHECKING:
    from .loader import Loader


# Tokens


class Table(NamedTuple):
    """The tokens of some rows: those of row ``i`` begin at ``values[starts[i]]``, and there are
    ``counts[i]`` of them.
    """

    values: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    def first(self, rows: int) -> Table:
        """Those of the first rows."""
        return Table(self.values, self.starts[:rows], self.counts[:rows])


def _joined(tables: Sequence[Table]) -> Table:
    if len(tables) == 1:
        return tables[0]
    bases = np.cumsum([0] + [len(t.values) for t in tables])
    values = [t.values for t in tables]
    dtype = np.result_type(*values)
    if dtype.kind not in "iu":
        # uint64 beside a signed type, which NumPy makes floats: as `Pack.dtype_of` has them.
        dtype = np.dtype(np.int64)
    return Table(
        np.concatenate(values, dtype=dtype, casting="unsafe"),
        np.concatenate([t.starts + base for t, base in zip(tables, bases, strict=False)]),
        np.concatenate([t.counts for t in tables]),
    )


def tokens_of(
    rows: Rows,
    column: str,
    name: Callable[[int, int], tuple[str, int] | None],
    *,
    signed: bool,
) -> Table:
    """A column of lists of whole numbers. A missing list has no tokens.

    Args:
        name: Says where a row is, for an error.
        signed: Whether tokens become ``int64``, or a shorter signed type.

    Raises:
        InvalidRequest: It is another column, or tokens are missing or too large.
    """
    tables, lacking, exceeding = [], [], []
    for part in rows._parts:
        found = _arrow.columns(part)[column].lists()
        if found is not None and found[0].dtype == object and all(v is None for v in found[0]):
            # Lists that are all empty, or whose items are all missing, have no type: they get one
            # that changes that of no other lists.
            found = (np.ma.masked_all(len(found[0]), np.uint8), *found[1:])
        if found is None or found[0].ndim > 1 or found[0].dtype.kind not in "iu":
            raise InvalidRequest(
                f"column {column!r} does not hold lists of whole numbers",
                hint="name a column of tokens, or give Pack(tokenize=...)",
            )
        values, starts, counts = found
        lacks = exceeds = np.zeros(len(counts), np.bool_)
        missing = None
        if isinstance(values, np.ma.MaskedArray):
            # What a missing list of a fixed size stands over is missing too, and in no list.
            missing = np.ma.getmaskarray(values)
            lacks = _with_any(missing, starts, counts)
            values = np.ma.getdata(values)
        if signed and values.dtype == np.uint64 and len(values) and int(values.max()) >= 1 << 63:
            large = values >= np.uint64(1 << 63)
            # What stands where a token is missing is anything.
            exceeds = _with_any(large if missing is None else large & ~missing, starts, counts)
        tables.append(Table(values, starts, counts))
        lacking.append(lacks)
        exceeding.append(exceeds)
    if not tables:
        return Table(np.empty(0, np.int64), *(np.empty(0, np.int64),) * 2)
    lacks, exceeds = np.concatenate(lacking), np.concatenate(exceeding)
    table = _joined(tables)
    if rows._pick is not None:
        begins = np.cumsum([0] + [len(t.counts) for t in tables])
        at = begins[rows._pick[:, 0]] + rows._pick[:, 1]
        table = Table(table.values, table.starts[at], table.counts[at])
        lacks, exceeds = lacks[at], exceeds[at]
    if exceeds.any():
        raise InvalidRequest(
            f"{_row_at(rows.ids, rows.sources, int(exceeds.argmax()), name)} has a token of 2**63"
            f" or more in column {column!r}, and tokens become int64: PyTorch, or another dataset"
            " of the mix, has signed ones",
            hint='write smaller numbers; output="numpy" over unsigned columns alone keeps these',
        )
    if lacks.any():
        raise InvalidRequest(
            f"{_row_at(rows.ids, rows.sources, int(lacks.argmax()), name)} has a list in column"
            f" {column!r} in which tokens are missing",
            hint="write the data without them",
        )
    return table


def _with_any(flags: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which lists have a value that is flagged."""
    before = np.concatenate([[0], np.cumsum(flags)])
    found = np.zeros(len(counts), np.bool_)
    begins = starts[counts > 0]
    found[counts > 0] = before[begins] < before[begins + counts[counts > 0]]
    return found


def _numbers(found: Any) -> np.ndarray:
    """What a tokenizer returned for one value."""
    ids = found.get("input_ids") if hasattr(found, "get") else getattr(found, "ids", found)
    if ids is None:
        raise TypeError(f"the tokenizer must return whole numbers, and returned {found!r:.100}")
    array = np.asarray(ids)
    if array.size and array.dtype.kind == "u" and int(array.max()) >= 1 << 63:
        raise TypeError(
            f"the tokenizer must return whole numbers below 2**63, and returned {array.max()}"
        )
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            "the tokenizer must return whole numbers in one dimension, and returned"
            f" {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def tokenizer(
    given: Any, stopped: Callable[[], bool]
) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """What makes arrays of tokens from values, many at a time where the tokenizer can; otherwise
    of no further ones once nobody wants them any more.
    """
    if hasattr(given, "encode_ordinary_batch"):  # tiktoken
        return lambda values: [_numbers(v) for v in given.encode_ordinary_batch(list(values))]
    if hasattr(given, "encode_batch"):  # tokenizers
        refuse_padding(given)
        return lambda values: [
            _numbers(v) for v in given.encode_batch(list(values), add_special_tokens=False)
        ]
    if hasattr(given, "convert_tokens_to_ids"):  # transformers
        return lambda values: [
            _numbers(ids)
            for ids in given(list(values), add_special_tokens=False, verbose=False)["input_ids"]
        ]
    return lambda values: [
        _numbers(given(value)) for value in itertools.takewhile(lambda _: not stopped(), values)
    ]


@dataclass
class Tokenizing(Recipe):
    """Makes a :class:`Table` of tokens of one type from rows."""

    rules: Pack = field(default_factory=lambda: Pack(1))
    dtype: np.dtype = field(default_factory=lambda: np.dtype("i8"))
    #: Whether tokens have a signed type in a batch.
    signed: bool = True

    @property
    def decodes_rows(self) -> bool:
        return self.rules.tokenize is not None

    @property
    def works(self) -> bool:
        return True

    @property
    def is_short(self) -> bool:
        return not self.decodes_rows

    def samples(
        self, rows: Any, begin: int, end: int, real: int, stopped: Callable[[], bool]
    ) -> tuple[list[Any], int]:
        tokenize = tokenizer(self.rules.tokenize, stopped)
        values = [row[self.rules.column] for row in rows._between(begin, min(end, real))]
        there = [i for i, value in enumerate(values) if value is not None]
        nothing = np.empty(0, np.int64)
        out = [nothing] * (end - begin)
        try:
            found = tokenize([values[i] for i in there]) if there else []
            if len(found) != len(there) and not stopped():
                raise TypeError(f"the tokenizer returned {len(found)} of {len(there)} texts")
        except Exception as e:
            raise self._which(rows, begin, values, tokenize, e) from e
        for i, tokens in zip(there, found, strict=False):
            out[i] = tokens
        return out, 0

    def _which(
        self, rows: Rows, begin: int, values: list[Any], tokenize: Any, cause: Exception
    ) -> SampleFailed:
        """The failure, with the row that it is of: the first that fails alone, too."""
        at = 0
        for i, value in enumerate(values):
            try:
                if value is not None:
                    tokenize([value])
            except Exception as e:
                at, cause = i, e
                break
        source = 0 if rows.sources is None else int(rows.sources[begin + at])
        failure = self.failure(source, int(rows.ids[begin + at]), cause)
        failure.hint = (
            "the column holds bytes, which this tokenizer does not take: decode them in a function,"
            " as in tokenize=lambda data: tokenizer.encode(str(data, 'utf-8')).ids"
            if isinstance(values[at], memoryview)
            else "give a tokenizer that takes every row"
        )
        return failure

    def finish(self, rows: Any, samples: list[Any] | None, real: int) -> Any:
        if samples is None:
            values, starts, counts = tokens_of(
                rows, self.rules.column, self.name, signed=self.signed
            ).first(real)
        else:
            counts = np.array([len(s) for s in samples[:real]], np.int64)
            values = np.concatenate(samples) if samples else np.empty(0, np.int64)
            starts = np.cumsum(counts) - counts
        return Table(np.ascontiguousarray(values, self.dtype), starts, counts)


# Dealing


@dataclass(frozen=True, eq=False)
class Window:
    """Rows that follow each other in the order, from ``start`` on, and their tokens. ``table``:
    None where only their ``counts`` are known yet.
    """

    epoch: int
    start: int
    rows: np.ndarray
    sources: np.ndarray | None
    counts: np.ndarray
    table: Table | None


class Run(NamedTuple):
    """Pieces of one window's rows (row, first token, number of tokens: shape ``(pieces, 3)``), and
    the pack of the batch that each is in. ``used`` are the rows that they are of, each once, and
    ``tokens`` says how many tokens they have.
    """

    window: Window
    pieces: np.ndarray
    packs: np.ndarray
    used: np.ndarray
    tokens: int


@dataclass(frozen=True)
class PackStep(Step):
    """One batch of one rank: ``rows`` and ``sources`` are those whose tokens are in it, each once
    for each window; ``real`` counts packs.
    """

    runs: tuple[Run, ...] = ()


class Windows(Protocol):
    def at(self, index: int) -> Window | None:
        """The ``index``-th window from the state on; None after the last, or once closed."""


class Known:
    """Windows of rows whose lengths are known."""

    def __init__(self, steps: WindowSteps, lengths: Sequence[np.ndarray]) -> None:
        self._steps, self._lengths = steps, lengths

    def at(self, index: int) -> Window | None:
        step = self._steps.step(index)
        if step is None:
            return None
        rows, start = step.rows[: step.real], _start(step)
        if step.sources is None:
            counts = self._lengths[0][rows].astype(np.int64)
            return Window(step.epoch, start, rows, None, counts, None)
        sources = step.sources[: step.real]
        counts = np.empty(len(rows), np.int64)
        for source in np.unique(sources):
            of = sources == source
            counts[of] = self._lengths[source][rows[of]]
        return Window(step.epoch, start, rows, sources, counts, None)


class Read:
    """Windows that are read: whole, or where ``own`` knows their lengths, the rows that it says."""

    def __init__(self, pipeline: Pipeline, own: OwnRows | None, name: Any) -> None:
        self._pipeline, self._own, self._name = pipeline, own, name

    def at(self, index: int) -> Window | None:
        made = self._pipeline.at(index)
        if made is None:
            return None
        step, table = made.step, made.batch
        if self._own is not None:
            window, used = self._own.window(index)
            self._verify(window, used, table.counts)
            starts = np.zeros(len(window.rows), np.int64)
            starts[used] = table.starts
            return replace(window, table=Table(table.values, starts, window.counts))
        rows = step.rows[: step.real]
        sources = None if step.sources is None else step.sources[: step.real]
        return Window(step.epoch, _start(step), rows, sources, table.counts, table)

    def _verify(self, window: Window, used: np.ndarray, counts: np.ndarray) -> None:
        wrong = np.flatnonzero(counts != window.counts[used])
        if len(wrong):
            at = int(used[wrong[0]])
            raise InvalidRequest(
                f"{_where(window, at, self._name)} has {int(counts[wrong[0]])} tokens, and"
                f" lengths= says {int(window.counts[at])}",
                hint="lengths= are those of the tokens, without eos_id",
            )

    def close(self) -> None:
        self._pipeline.close()


def _where(window: Window, at: int, name: Callable[[int, int], tuple[str, int] | None]) -> str:
    """Where a row of a window lies."""
    return _row_at(window.rows, window.sources, at, name)


def _row_at(
    rows: np.ndarray,
    sources: np.ndarray | None,
    at: int,
    name: Callable[[int, int], tuple[str, int] | None],
) -> str:
    source = 0 if sources is None else int(sources[at])
    row = int(rows[at])
    place = name(source, row)
    return f"row {place[1]} of {place[0]}" if place else f"row {row}"


class OwnRows:
    """Steps of windows whose lengths are known, with only the rows of this rank's packs. The thread
    that asks for them is not the one that takes what was read.
    """

    def __init__(self, deal: Deal, steps: WindowSteps) -> None:
        self._deal, self._steps = deal, steps
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Window, np.ndarray]] = {}

    def step(self, number: int) -> Step | None:
        step = self._steps.step(number)
        if step is None:
            return None
        window, used = self._found(number)
        sources = None if window.sources is None else window.sources[used]
        return WindowStep(
            step.step,
            step.epoch,
            window.rows[used],
            sources,
            len(used),
            step.next,
            start=window.start,
        )

    def _found(self, number: int) -> tuple[Window, np.ndarray]:
        with self._lock:
            found = self._kept.get(number)
            if found is None:
                found = self._kept[number] = self._deal.own(number)
            return found

    def window(self, number: int) -> tuple[Window, np.ndarray]:
        """A window, and which of its rows were read. Those before it are forgotten."""
        with self._lock:
            for gone in [n for n in self._kept if n < number]:
                del self._kept[gone]
            return self._kept[number]


@dataclass(frozen=True)
class WindowStep(Step):
    start: int = 0


def _start(step: Step) -> int:
    return step.start if isinstance(step, WindowStep) else 0


class WindowSteps:
    """Steps of windows, each of which knows where it begins. ``trim``: without the rows that fill
    up the last one of an epoch.
    """

    def __init__(
        self, steps: Steps, state: State, rows: int, epoch_rows: int, *, trim: bool
    ) -> None:
        self._steps, self._trim, self._rows = steps, trim, rows
        self._position = int(state["position"])
        # Windows of the first epoch, and of later ones.
        self._first = -(-(epoch_rows - self._position) // rows)
        self._each = -(-epoch_rows // rows)

    def step(self, number: int) -> Step | None:
        step = self._steps.step(number)
        if step is None:
            return None
        if number < self._first:
            start = self._position + number * self._rows
        else:
            start = (number - self._first) % self._each * self._rows
        rows, sources = step.rows, step.sources
        if self._trim:
            rows = rows[: step.real]
            sources = None if sources is None else sources[: step.real]
        return WindowStep(step.step, step.epoch, rows, sources, step.real, step.next, start=start)


@dataclass(frozen=True)
class Hand:
    """What is dealt at a place between two windows.

    Attributes:
        number: Of the step that is being dealt, and
        taken: how many packs it has,
        runs: and those of this rank.
        open: Pieces of the pack that is not full yet, and
        filled: how many tokens they have.
        packs, tokens: Of the next window, or of its first row, what was yielded before.
        whole: Whether the epoch began here, and
        dealt: how many of its steps there were.
        left_out, lost: Rows that were left out, and their tokens, since the last step.
    """

    number: int
    packs: int
    tokens: int
    whole: bool
    taken: int = 0
    runs: tuple[Run, ...] = ()
    open: tuple[tuple[Window, np.ndarray], ...] = ()
    filled: int = 0
    dealt: int = 0
    left_out: int = 0
    lost: int = 0


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Each of them once, of some that ascend."""
    is_new = np.empty(len(rows), np.bool_)
    is_new[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=is_new[1:])
    return rows[is_new]


def _in_one(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _whole_run(window: Window, pieces: np.ndarray, pack: int) -> Run:
    """Pieces that are all in one pack of the batch."""
    rows = np.unique(pieces[:, 0])
    return Run(window, pieces, np.full(len(pieces), pack), rows, int(pieces[:, 2].sum()))


class Layout:
    """The packs of a window. ``ends``: where the pieces of each end."""

    def __init__(
        self, window: Window, pieces: np.ndarray, ends: np.ndarray, *, is_ordered: bool
    ) -> None:
        self._window, self._pieces, self._is_ordered = window, pieces, is_ordered
        self._ends = [0, *ends.tolist()]
        self._rows = pieces[:, 0].copy()
        self._tokens = np.concatenate(([0], np.cumsum(pieces[:, 2])))
        #: The pack that each piece is in.
        self._packs = np.repeat(np.arange(len(ends)), np.diff(self._ends))

    @property
    def packs(self) -> int:
        return len(self._ends) - 1

    def last_piece(self, pack: int) -> list[int]:
        """The row, the first token and the number of tokens of the last piece of a pack."""
        piece: list[int] = self._pieces[self._ends[pack + 1] - 1].tolist()
        return piece

    def run(self, first: int, end: int, pack: int) -> Run:
        """The pieces of the packs ``first`` to ``end - 1``, which are those from ``pack`` on in the
        batch.
        """
        a, b = self._ends[first], self._ends[end]
        rows = self._rows[a:b]
        return Run(
            self._window,
            self._pieces[a:b],
            self._packs[a:b] + (pack - first),
            _distinct(rows if self._is_ordered else np.sort(rows)),
            int(self._tokens[b] - self._tokens[a]),
        )


class LeftOut:
    """Rows of a window that are left out, in order, which no step has counted yet, and their
    tokens.
    """

    def __init__(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        self._rows, self._tokens = rows, tokens

    def counted(self, hand: Hand, until: int) -> Hand:
        """What counts those before a row, too, which are then counted."""
        if not len(self._rows):
            return hand
        n = int(np.searchsorted(self._rows, until))
        left_out, lost = hand.left_out + n, hand.lost + int(self._tokens[:n].sum())
        self._rows, self._tokens = self._rows[n:], self._tokens[n:]
        return replace(hand, left_out=left_out, lost=lost)


class Dealt(NamedTuple):
    """The steps that a window completes. Where it ends an epoch and makes none, what was
    ``left_out`` and ``lost`` since the last one, which is of an earlier window.
    """

    steps: tuple[PackStep, ...]
    left_out: int = 0
    lost: int = 0


def _with_left_out(step: PackStep, left_out: int, lost: int) -> PackStep:
    """A step that counts more rows that were left out, and their tokens."""
    counts = dict(step.counts)
    counts["rows_left_out"] += left_out
    counts["tokens_cut"] += lost
    return replace(step, counts=counts)


class Deal:
    """The steps of one rank, from a state on, forwards only.

    ``mine`` says which steps somebody wants the pieces of. What it knows is replaced all at once,
    so that Ctrl-C in the middle loses no step.
    """

    def __init__(
        self,
        loader: Loader[Any],
        pack: Pack,
        windows: Windows,
        state: State,
        mine: Callable[[int], bool],
    ) -> None:
        self._order, self._pack, self._windows, self._mine = loader.order, pack, windows, mine
        self._document, self._rules = pack.document(), pack.rules()
        self._name = loader._name
        place = loader.place
        self._world, self._rank = place.world_size, place.rank
        self._batch, self._uneven = loader.options.batch_size or 1, loader.options.uneven
        inside = state.get("pack", {})
        whole = int(state["position"]) == 0 and not inside
        hand = Hand(0, int(inside.get("packs", 0)), int(inside.get("tokens", 0)), whole)
        self._now: tuple[Hand, Dealt, int] = (hand, Dealt(()), 0)
        self._owned: tuple[Window, np.ndarray]

    def window(self, number: int) -> Dealt | None:
        """What is dealt of a window; None past the end. Windows are asked for one after the
        other, and the last one any number of times.
        """
        hand, dealt, at = self._now
        if at == number + 1:
            return dealt
        found = self._windows.at(number)
        if found is None:
            return None
        assert at == number, f"{number} was asked for, and {at} is next"
        later, dealt = self._deal(hand, found)
        self._now = (later, dealt, number + 1)
        return dealt

    def own(self, number: int) -> tuple[Window, np.ndarray]:
        """A window, and the rows of it whose tokens this rank may need. Windows are asked for one
        after the other.
        """
        hand, _, at = self._now
        if at == number + 1:
            # Ctrl-C came before whoever asked had the answer.
            return self._owned
        window = self._windows.at(number)
        assert window is not None and at == number, f"{number} was asked for, and {at} is next"
        later, dealt = self._deal(hand, window)
        runs = [run for step in dealt.steps for run in step.runs] + list(later.runs)
        pieces = [run.pieces for run in runs if run.window is window]
        # Of the pack that is not full yet nobody knows whose it is.
        pieces += [begun for of, begun in later.open if of is window]
        used = np.concatenate([p[:, 0] for p in pieces]) if pieces else np.empty(0, np.int64)
        self._owned = (window, np.unique(used))
        self._now = (later, Dealt(()), number + 1)
        return self._owned

    def _documents(self, window: Window) -> np.ndarray:
        """Tokens of each document, before anything becomes of those that are too long."""
        counts = window.counts.astype(np.int64)
        return counts + (counts > 0) if self._pack.eos_id is not None else counts

    def _deal(self, hand: Hand, window: Window) -> tuple[Hand, Dealt]:
        pack, length, count = self._pack, self._pack.length, len(window.rows)
        documents = self._documents(window)
        long = documents > length
        is_left_out = np.zeros(count, np.bool_)
        if long.any():
            if pack.too_long == "error":
                self._refuse(window, int(long.argmax()), documents)
            if pack.too_long == "skip" and not hand.packs:
                # Each rank counts a part of them, so that all together count each once.
                is_left_out = long & ((window.start + np.arange(count)) % self._world == self._rank)
        left_out = LeftOut(np.flatnonzero(is_left_out), documents[is_left_out])
        if long.any():
            kept = np.where(long, 0 if pack.too_long == "skip" else length, documents)
            documents = documents if pack.too_long == "split" else kept
        raw, ended, filled = self._order.pack(
            window.epoch, window.start, self._document, window.counts, hand.tokens, hand.filled
        )
        pieces = raw.astype(np.int64).reshape(-1, 3)
        ends = ended.astype(np.int64)
        last = window.start + count >= self._order.rows_per_epoch
        if last and filled:
            ends = np.append(ends, len(pieces))
        if hand.packs and hand.packs >= len(ends):
            raise InvalidRequest(
                f"the state cannot be resumed: it is after {hand.packs} packs of a window that has"
                f" {len(ends)}",
                hint="give the tokens, or the tokenizer, that it was saved with",
            )
        layout = Layout(window, pieces, ends, is_ordered=pack.strategy != "best_fit")
        if pack.strategy == "best_fit":
            # Whose packs have no place among the rows.
            hand = left_out.counted(hand, count)
        at, steps = hand.packs, []
        stride = self._world * self._batch
        mine = range(self._rank * self._batch, (self._rank + 1) * self._batch)
        while at < len(ends):
            run = min(stride - hand.taken, len(ends) - at)
            low, high = max(hand.taken, mine.start), min(hand.taken + run, mine.stop)
            runs = hand.runs
            if low < high and self._mine(hand.number):
                a, b = at + low - hand.taken, at + high - hand.taken
                if a == 0:
                    for before, begun in hand.open:
                        runs += (_whole_run(before, begun, low - mine.start),)
                runs += (layout.run(a, b, low - mine.start),)
            at += run
            if hand.taken + run < stride:
                hand = replace(hand, taken=hand.taken + run, runs=runs)
                break
            rows, state = self._place(window, at, layout, documents, last)
            hand = left_out.counted(hand, rows)
            steps.append(self._step(hand, runs, window.epoch, state, self._batch))
            hand = Hand(hand.number + 1, hand.packs, hand.tokens, hand.whole, dealt=hand.dealt + 1)
        if self._uneven == "pad" or not last:
            hand = left_out.counted(hand, count)
        if last:
            if steps and self._uneven == "drop":
                # What is left makes no step.
                steps[-1] = replace(steps[-1], next=self._order.at(window.epoch + 1, 0))
            whole, dealt, after = hand.whole, hand.dealt, hand.number
            if hand.taken and self._uneven == "pad":
                state = self._order.at(window.epoch + 1, 0)
                real = min(max(hand.taken - mine.start, 0), self._batch)
                steps.append(self._step(hand, hand.runs, window.epoch, state, real))
                dealt, after = dealt + 1, after + 1
            if whole and not dealt and not hand.taken:
                raise InvalidRequest(
                    "an epoch makes no packs: all rows are empty, or longer than the"
                    f" {length} tokens of a pack",
                    hint='give longer packs, or too_long="split"',
                )
            if whole and not dealt:
                raise InvalidRequest(
                    f"an epoch makes {counted(hand.taken, 'pack')} of {length} tokens, and one"
                    f" step of {counted(self._world, 'rank')} takes {stride}",
                    hint='give a smaller batch_size, shorter packs, or uneven="pad"',
                )
            rest = (0, 0)
            if self._uneven == "pad" and not hand.taken:
                # No step is left to count these.
                rest = hand.left_out, hand.lost
                if steps:
                    steps[-1], rest = _with_left_out(steps[-1], *rest), (0, 0)
            return Hand(after, 0, 0, True), Dealt(tuple(steps), *rest)
        open_pieces = hand.open if not len(ends) else ()
        begun = pieces[ends[-1] :] if len(ends) else pieces
        if filled and len(begun):
            open_pieces += ((window, begun),)
        later = replace(hand, packs=0, tokens=0, open=open_pieces, filled=filled)
        return later, Dealt(tuple(steps))

    def _place(
        self,
        window: Window,
        packs: int,
        layout: Layout,
        documents: np.ndarray,
        last: bool,
    ) -> tuple[int, State]:
        """How many rows of a window so many of its packs have passed, and the state after them."""
        rows, inside = len(window.rows), {}
        if self._pack.strategy == "best_fit":
            if packs < layout.packs:
                rows, inside = 0, {"packs": packs}
        elif not (last and packs == layout.packs):
            row, begin, count = layout.last_piece(packs - 1)
            rows = row + 1
            if begin + count < documents[row]:
                rows, inside = row, {"tokens": begin + count}
        position = window.start + rows
        if position >= self._order.rows_per_epoch:
            return rows, self._order.at(window.epoch + 1, 0)
        state = self._order.at(window.epoch, position)
        if inside:
            state["pack"] = {**inside, "rules": {**self._rules}}
        return rows, state

    def _step(
        self, hand: Hand, runs: tuple[Run, ...], epoch: int, state: State, real: int
    ) -> PackStep:
        rows, sources, tokens, cut = [], [], 0, 0
        for window, pieces, _, used, count in runs:
            rows.append(window.rows[used])
            if window.sources is not None:
                sources.append(window.sources[used])
            tokens += count
            if self._pack.too_long == "cut":
                over = self._documents(window)[pieces[pieces[:, 1] == 0, 0]] - self._pack.length
                cut += int(over[over > 0].sum())
        counts = {
            "tokens": tokens,
            "padding": self._batch * self._pack.length - tokens,
            "tokens_cut": cut + hand.lost,
            "rows_left_out": hand.left_out,
        }
        return PackStep(
            hand.number,
            epoch,
            _in_one(rows, np.uint64),
            _in_one(sources, np.uint32) if self._order.mixed else None,
            real,
            state,
            counts,
            runs=runs,
        )

    def _refuse(self, window: Window, row: int, documents: np.ndarray) -> None:
        raise InvalidRequest(
            f"{_where(window, row, self._name)} has {int(documents[row]):,} tokens, and a pack has"
            f" {self._pack.length:,}",
            hint='raise the length of packs, or say too_long="split", "cut" or "skip"',
        )


# Batches


class Packed:
    """The pieces that a batch of packs is made from, in the place of rows."""

    def __init__(self, step: PackStep) -> None:
        self.step = step

    def __len__(self) -> int:
        return self.step.real


#: Batches of so many tokens are filled by the loop itself.
SMALL_TOKENS = 1 << 18


@dataclass
class Packing(Recipe):
    """Makes a batch of packs from :class:`Packed`."""

    rules: Pack = field(default_factory=lambda: Pack(1))
    batch: int = 1
    dtype: np.dtype = field(default_factory=lambda: np.dtype("i8"))

    @property
    def works(self) -> bool:
        # To fill a small batch takes less time than to have it filled by another thread. JAX's
        # arrays are made in C++, and never in a thread that nobody waits for at the exit.
        is_small = self.batch * self.rules.length <= SMALL_TOKENS
        return not is_small or self.collate is not None or self.pin or self.output == "jax"

    def finish(self, rows: Any, samples: list[Any] | None, real: int) -> Any:
        parts = []
        for window, pieces, packs, *_ in cast(Packed, rows).step.runs:
            assert window.table is not None
            parts.append((window.table, pieces, packs))
        made: Any = self._as_output(assembled(self.rules, self.batch, self.dtype, parts))
        if self.collate is not None:
            made = called("collate", self.collate, made)
        return _collate.pin(made) if self.pin else made

    def _as_output(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if self.output == "jax":
            return cast(dict[str, Any], _collate.to_jax(arrays))
        if self.output != "torch":
            return arrays
        import torch

        tokens = arrays["tokens"]
        if tokens.dtype.kind == "u" and tokens.dtype.itemsize > 1:
            # PyTorch has next to nothing for these.
            arrays["tokens"] = tokens.astype(np.int64)
        return {
            name: torch.from_numpy(a) if isinstance(a, np.ndarray) else a
            for name, a in arrays.items()
        }


@functools.lru_cache
def _as_stored(token: int, dtype: np.dtype) -> bytes:
    """A token as it is in an array."""
    return np.array(token).astype(dtype).tobytes()


def assembled(
    pack: Pack,
    batch: int,
    dtype: np.dtype,
    parts: Sequence[tuple[Table, np.ndarray, np.ndarray]],
) -> dict[str, Any]:
    """The arrays of a batch, from pieces and the pack of each; ``dtype`` is that of all tokens."""
    shape = (batch, pack.length)
    tokens, mask = np.empty(shape, dtype), np.empty(shape, np.bool_)
    positions, documents = np.empty(shape, np.int32), np.empty(shape, np.int32)
    filled = np.empty(batch, np.int32)
    # Each piece begins in one place, and so may the padding of each pack; the last one ends.
    bounds = np.empty(sum(len(packs) for *_, packs in parts) + batch + 1, np.int32)
    count, longest = _assemble_packs(
        pack.length,
        _as_stored(pack.pad_id, dtype),
        None if pack.eos_id is None else _as_stored(pack.eos_id, dtype),
        [(*table, pieces, packs) for table, pieces, packs in parts],
        (tokens, positions, documents, mask, filled, bounds),
    )
    return {
        "tokens": tokens,
        "position_ids": positions,
        "document_ids": documents,
        "mask": mask,
        "lengths": filled,
        "cu_seqlens": bounds[:count],
        "max_seqlen": longest,
    }


# Putting it together


def _row_bytes(dataset: Any) -> float:
    """About the bytes of a row, as they are in files. (A part of a dataset counts as all of it.)"""
    return int(dataset.info.get("bytes", 0)) / max(1, len(dataset))


def _dtype(loader: Loader[Any], pack: Pack) -> np.dtype:
    """The type of the tokens of all datasets."""
    return pack.dtype_of([d.schema[pack.column] for d in loader.datasets])


#: Of steps that are passed on together, nobody asks for one.
NO_STEP = Step(0, 0, np.empty(0, np.uint64), None, 0, {})


class Dealing:
    """The steps of one window after the other."""

    def __init__(self, deal: Deal, windows: Read) -> None:
        self._deal, self._windows = deal, windows

    def at(self, index: int) -> Fetched | None:
        dealt = self._deal.window(index)
        return None if dealt is None else Fetched(NO_STEP, cast(Rows, dealt))

    def close(self) -> None:
        self._windows.close()


class AsDealt(Recipe):
    """Passes the steps of a window on."""

    @property
    def works(self) -> bool:
        return True

    @property
    def is_short(self) -> bool:
        return True

    def finish(self, rows: Any, samples: list[Any] | None, real: int) -> Any:
        return rows


class OfWindows:
    """Steps of packs, one by one. A thread deals the next window meanwhile: whoever takes a step
    waits for another thread once for each window.
    """

    def __init__(
        self,
        dealt: Pipeline,
        first: int,
        stride: int,
        after: Callable[[int], State],
    ) -> None:
        """``after``: the state after an epoch, where what is left of it makes no step."""
        self._dealt, self._first, self._stride, self._after = dealt, first, stride, after
        # What is left of the windows that were taken, and how many these are.
        self._now: tuple[tuple[PackStep, ...], int] = ((), 0)

    def at(self, index: int) -> Fetched | None:
        number = self._first + index * self._stride
        while True:
            steps, window = self._now
            gone = 0
            while gone < len(steps) and steps[gone].step < number:
                gone += 1
            steps = steps[gone:]
            if steps:
                self._now = (steps, window)
                if len(steps) == 1:
                    self._look_ahead()
                step = self._now[0][0]
                return Fetched(step, cast(Rows, Packed(step)))
            made = self._dealt.at(window)
            if made is None:
                return None
            self._now = (made.batch.steps, window + 1)

    def _look_ahead(self) -> None:
        """Takes windows until the last step of those before knows whether it is the last one of its
        epoch. Each is noted at once: a wait for the next one may be interrupted, and no window is
        asked for again after a later one.
        """
        (last, *later), window = self._now
        while not later and last.next["epoch"] == last.epoch:
            try:
                made = self._dealt.at(window)
            except Exception as e:
                if self._dealt.has_failed(e):
                    # It is told to who asks for the step after this one.
                    return
                raise
            if made is not None:
                steps, left_out, lost = made.batch
                later, window = list(steps), window + 1
                last = _with_left_out(last, left_out, lost)
            if made is None or (later and later[0].epoch != last.epoch):
                last = replace(last, next=self._after(last.epoch))
            self._now = ((last, *later), window)

    def close(self) -> None:
        self._dealt.close()


class OfOwnRows(Pull):
    """Asks for nothing where a rank needs no row of a window, and in parts for what is too large
    for one answer."""

    def _read(self, step: Step) -> Rows:
        if not len(step.rows):
            return Rows([], step.rows, sources=step.sources)
        pull = super()._read

        def ask(rows: np.ndarray, sources: np.ndarray | None) -> Rows:
            return pull(replace(step, rows=rows, sources=sources))

        pieces = in_pieces(ask, step.rows, step.sources, READ_ROWS)
        return joined(pieces, step.rows, step.sources)


class Inner(Meter):
    """The meter of work whose waits are not the loop's: only its sums count."""

    def __init__(self, outer: Meter) -> None:
        super().__init__()
        self._outer = outer

    def add(self, **amounts: float) -> None:
        self._outer.add(**amounts)


def plain(state: State) -> State:
    """The place in the order of rows: before the window, or the row, that a state is inside of."""
    return {name: value for name, value in state.items() if name != "pack"}


def fetcher(
    loader: Loader[Any],
    pack: Pack,
    state: State,
    until: int | None,
    meter: Meter,
    first: int,
    stride: int,
    threads: int,
    follow: bool,
) -> OfWindows:
    """What brings the packs of the steps ``first``, ``first + stride``, …"""
    o, start, order = loader.options, plain(state), loader.order
    lengths = None if o.stream else loader.lengths_of_documents()
    rows = pack.rows_at_a_time(max(map(_row_bytes, loader.datasets)))
    if o.stream and pack.strategy != "best_fit":
        # A stream cannot ask for less where an answer would be too large.
        rows = min(rows, READ_ROWS_STREAM)
    if lengths is not None and pack.strategy != "best_fit":
        # Of which each reader has a part.
        rows = min(rows * loader.place.world_size * stride, READ_ROWS_MAX)
    dealt = {"world": 1, "rank": 0, "batch": {"rows": int(rows)}, "uneven": "pad"}
    compiled = order.steps(start, until, dealt)
    windows = WindowSteps(compiled, start, rows, order.rows_per_epoch, trim=not o.stream)

    def mine(number: int) -> bool:
        return number >= first and (number - first) % stride == 0

    retry = loader.datasets[0].client.timeout if o.retry_for is None else o.retry_for
    own: OwnRows | None = None
    source: Fetcher
    if o.stream:
        from ._push import Push

        source = Push(loader, cast(Steps, windows), start, until, meter, 0, 1, dealt)
    else:
        if lengths is not None:
            known = Known(windows, lengths)
            own = OwnRows(Deal(loader, pack, known, state, mine), windows)
        follows = follow and first % stride == 0
        source = pull = OfOwnRows(
            loader.datasets,
            cast(Steps, own or windows),
            0,
            1,
            o.prefetch,
            meter,
            retry,
            loader.lease(start, dealt) if follows else None,
            start,
        )
        pull.job = loader.job
    nothing: list[None] = [None] * len(loader.datasets)
    dtype = _dtype(loader, pack)
    signed = dtype.kind == "i" or o.output == "torch"
    recipe = Tokenizing(nothing, "raise", loader._name, rules=pack, dtype=dtype, signed=signed)
    # One more window is dealt already.
    inner = Pipeline(source, recipe, threads, max(1, o.prefetch // 2 - 1), Inner(meter))
    read = Read(inner, own, loader._name)
    dealing = Dealing(Deal(loader, pack, read, state, mine), read)
    as_dealt = AsDealt([], "raise", loader._name)
    windows_dealt = Pipeline(dealing, as_dealt, threads, 1, Inner(meter))
    return OfWindows(windows_dealt, first, stride, lambda epoch: order.at(epoch + 1, 0))


def pipeline(
    loader: Loader[Any],
    pack: Pack,
    state: State,
    until: int | None,
    meter: Meter,
    first: int,
    stride: int,
    threads: int,
    follow: bool,
) -> Pipeline:
    """The batches of packs of the steps ``first``, ``first + stride``, …, counted from a state."""
    o = loader.options
    source = fetcher(loader, pack, state, until, meter, first, stride, threads, follow)
    recipe = Packing(
        [None] * len(loader.datasets),
        "raise",
        loader._name,
        o.output,
        o.collate,
        pin=o.pin_memory and _collate.can_pin(),
        rules=pack,
        batch=o.batch_size or 1,
        dtype=_dtype(loader, pack),
    )
    return Pipeline(source, recipe, threads, o.prefetch, meter)


def step(
    loader: Loader[Any], pack: Pack, state: State, until: int | None, number: int
) -> Step | None:
    """The step of this number, from a state on; None past the end. Goes through all before it."""
    source = fetcher(loader, pack, state, until, Meter(), number, 1, 0, False)
    try:
        found = source.at(0)
    finally:
        source.close()
    return None if found is None else found.step


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 32


def _rule(name: str, value: Any) -> str:
    """A rule of a state, by the names that :class:`Pack` has."""
    if name == "ends":
        return "an eos_id" if value else "eos_id=None"
    return f"{name}={value!r}"


def checked(order: Order, pack: Pack | None, state: Any, strict: bool = True) -> State:
    """The state, if it is a place in this order, and for these packs where it is inside a window or
    a row; raises InvalidRequest for any other.
    """
    state = plain_state(state)
    found = order.checked(state, strict)
    inside = state.get("pack")
    if inside is None:
        if pack is not None and "within" in found:
            raise InvalidRequest(
                "the state cannot be resumed: it lies between batches of bounded length",
                hint="resume with max_total=, or begin an epoch anew",
            )
        return found
    if pack is None:
        raise InvalidRequest(
            "the state cannot be resumed: it lies between packs of tokens",
            hint="resume with the pack= that it was saved with; a state of the beginning of an"
            " epoch takes any",
        )
    wrong = "the state cannot be resumed: it was changed after it was saved"
    if not (
        isinstance(inside, dict)
        and isinstance(rules := inside.get("rules"), dict)
        and set(inside) in ({"rules", "packs"}, {"rules", "tokens"})
        and ("packs" in inside) == (rules.get("strategy") == "best_fit")
        and all(_is_count(inside[n]) for n in ("packs", "tokens") if n in inside)
        and int(found["position"]) < order.rows_per_epoch
    ):
        raise InvalidRequest(wrong, hint="load the state as it was saved")
    own = pack.rules()
    # Where nothing was too long so far, another rule makes the same packs of what came before.
    if rules.get("too_long") == "error":
        own = {**own, "too_long": "error"}
    if rules != own:
        names = sorted(n for n in {*rules, *own} if rules.get(n) != own.get(n))
        said = ", ".join(_rule(n, rules[n]) for n in names if n in rules) or "fewer rules"
        raise InvalidRequest(
            f"the state cannot be resumed: it lies between packs with {said}",
            hint="resume with the same pack=; a state of the beginning of an epoch takes any",
        )
    return {**found, "pack": inside}
