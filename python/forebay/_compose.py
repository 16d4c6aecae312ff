"""Datasets that are made of others: selections, filters, splits, repetitions, concatenations and
mixes.

Each is a function on row numbers (``forebay-plan``'s ``Composition``), evaluated just before rows
are requested: row ``k`` here is a row of one of the datasets that were opened, its *bases*. What
concerns columns (names, types, which are read) is a matter of the bases, and what makes samples of
rows comes after both.

Invariant: the identity is a function of the versions of the bases and of the operations that decide
which row is where. Equal identities mean the same rows at the same numbers.

No row is read to make one, except where a filter has to be computed. One by an expression is
computed when somebody first needs to know its rows (:class:`Filtered`), as operations on rows do.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    SupportsIndex,
    TypeVar,
    overload,
)

import numpy as np

from . import _forebay, _node
from ._arguments import (
    U64_MAX,
    check_rows,
    column_names,
    differences,
    flag,
    real_number,
    whole_number,
)
from ._elsewhere import CONCATENATE, explained
from ._forebay import Client, RowSet
from ._words import counted, listed
from .dataset import Dataset, File, Place, S, datasets_of
from .errors import InvalidRequest, NotFound, TooLarge
from .rows import Rows

__all__ = ["Composed", "TrainTest", "concatenate"]

#: Operations on top of each other, not counting those that are one (a slice of a slice).
DEPTH_MAX = 32
#: The most rows that a dataset may be repeated to.
ROWS_MAX = 1 << 48
#: Row numbers that a node is told of, at most: what it takes in one request.
DESCRIBED_BYTES = 64 << 20
#: How an operation is shown in states and messages, at most.
TEXT_MAX = 120
#: A node of the tree of operations, as ``forebay-plan`` reads it.
Document = dict[str, Any]
#: The hint about a number of times that is none, such as None: others repeat for ever then.
TIMES = (
    "give a whole number of at least 1; a loader with epochs=math.inf goes on for ever, as repeat()"
    " of other libraries does"
)


@dataclass(frozen=True)
class Piece:
    """What a document names by number: a set of rows, or an array of row numbers; and a digest."""

    value: RowSet | np.ndarray
    digest: str

    @classmethod
    def of(cls, value: RowSet | np.ndarray) -> Piece:
        return cls(value, _forebay.piece_digest(isinstance(value, RowSet), _encoded(value)))

    @property
    def is_set(self) -> bool:
        return isinstance(self.value, RowSet)

    def encoded(self) -> bytes:
        return _encoded(self.value)

    def __reduce__(self) -> Any:
        value = self.value.encode() if isinstance(self.value, RowSet) else self.value
        return _piece, (value, self.digest)


def _aligned(rows: np.ndarray) -> np.ndarray:
    """Row numbers as the compiled composition takes them: an empty array that is a view may lie
    anywhere.
    """
    return np.ascontiguousarray(rows, np.uint64) if len(rows) else np.empty(0, np.uint64)


def _encoded(value: RowSet | np.ndarray) -> bytes:
    return value.encode() if isinstance(value, RowSet) else value.astype("<u8").tobytes()


def _piece(value: bytes | np.ndarray, digest: str) -> Piece:
    return Piece(RowSet.decode(value) if isinstance(value, bytes) else value, digest)


#: A dataset, or a mix of some.
P = TypeVar("P")


class TrainTest(NamedTuple, Generic[P]):
    """The two parts of :meth:`forebay.Dataset.train_test_split`: a tuple, of which ``parts.train``
    is also ``parts["train"]``, as in Hugging Face's ``datasets``.
    """

    train: P
    test: P

    @overload
    def __getitem__(self, index: SupportsIndex | Literal["train", "test"], /) -> P: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[P, ...]: ...
    def __getitem__(self, index: Any, /) -> Any:
        if not isinstance(index, str):
            return tuple.__getitem__(self, index)
        if index not in self._fields:
            raise KeyError(f"{index!r} is no part of a split, which has 'train' and 'test'")
        return getattr(self, index)


class Composed(Dataset[S]):
    """Rows of other datasets, in an order of its own. Made by the methods of a dataset.

    Attributes:
        bases: The datasets that its rows are rows of.
    """

    is_composed = True

    def __init__(
        self,
        bases: Sequence[Dataset[Any]],
        document: Document,
        pieces: Sequence[Piece],
        rows: int,
        steps: Sequence[str],
        *,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        maps: Sequence[Callable[[Any], Any]] = (),
        shape: bytes | None = None,
    ) -> None:
        self.bases, self._document, self._pieces = list(bases), document, list(pieces)
        self._steps = list(steps)
        self._made: _forebay.Composition | None = None
        first = self.bases[0]
        info = {
            "id": _identity(self.bases, document, self._pieces),
            "rows": rows,
            "format": " + ".join(dict.fromkeys(base.format for base in self.bases)),
            "schema": [{"name": n, "type": t} for n, t in first.schema.items()],
            "besides": first.info.get("besides", []),
            "files": sum(int(base.info.get("files", 0)) for base in self.bases),
            "bytes": sum(int(base.info.get("bytes", 0)) for base in self.bases),
        }
        # For who asks what it is read from: it is not opened by this description.
        sources = [s for base in self.bases for s in base.spec.get("sources", [])]
        spec = {**first.spec, "sources": list(dict.fromkeys(sources))}
        super().__init__(first.client, spec, info, decode=decode, maps=maps, shape=shape)

    # What it is

    @property
    def name(self) -> str:
        """What it is made of, and how."""
        return " | ".join(self._steps)

    @property
    def steps(self) -> list[str]:
        """What was opened, and what was done to it, one after the other."""
        return list(self._steps)

    def _title(self) -> str:
        # The name of a mix says how many rows it has.
        return self.name if "mix" in self._document else super()._title()

    @property
    def schema(self) -> dict[str, str]:
        return self.bases[0].schema

    def _all_types(self) -> dict[str, str]:
        return self.bases[0]._all_types()

    def _known(self, columns: Sequence[str]) -> list[str]:
        columns = column_names(columns)
        for base in self.bases:
            base._known(columns)
        return columns

    def _columns_key(self) -> Any:
        return [base._columns_key() for base in self.bases]

    def _looks(self) -> list[str]:
        looks = [base._looks() for base in self.bases]
        of_bases = looks[0]
        if any(other != of_bases for other in looks):
            of_bases = [f"{text} in part {n}" for n, texts in enumerate(looks) for text in texts]
        return [*of_bases, *super()._looks()]

    def _empty(self, columns: Sequence[str]) -> Any:
        return self.bases[0]._empty(columns)

    @property
    def block_shape(self) -> bytes:
        """Rows of each block: of those that follow each other, those in one block of a base."""
        if self._shape is None:
            self._shape = self._composition.shape()
        return self._shape

    @property
    def files(self) -> list[File]:
        """The files of the datasets that it is made of."""
        return list(dict.fromkeys(itertools.chain(*(base.files for base in self.bases))))

    def locate(self, row: int) -> Place:
        sources, rows = self._located(np.array([self._row_there(row)], np.uint64))
        return self.bases[int(sources[0])].locate(int(rows[0]))

    @property
    def _composition(self) -> _forebay.Composition:
        if self._made is None:
            shapes = [base.block_shape for base in self.bases]
            values = [piece.value for piece in self._pieces]
            self._made = _forebay.Composition(json.dumps(self._document), shapes, values)
            if self._made.rows != len(self):
                raise InvalidRequest(
                    f"{self.name} has {counted(self._made.rows, 'row')}, not {len(self):,}"
                )
        return self._made

    def _located(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, numbers = self._composition.locate(_aligned(rows))
        return np.asarray(sources), np.asarray(numbers)

    def _filtered(self, sets: Sequence[RowSet]) -> RowSet:
        return self._composition.filtered(sets)

    def _first_of(self, source: int, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._composition.first_of(source, _aligned(rows)))

    # Rows

    def fetch(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> Rows:
        sources, numbers = self._located(rows)
        found = [int(s) for s in np.unique(sources)]
        parts = {}
        for source in found:
            base = self.bases[source]
            parts[source] = base.fetch(numbers[sources == source], columns)
        if not parts:
            return self.bases[0].fetch(np.empty(0, np.uint64), columns)
        together = Rows.gathered(parts, rows, sources)
        together.sources = None
        return together

    def read(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> Any:
        """These rows as one Arrow record batch."""
        return self.fetch(rows, columns)

    # What a node is told of it

    @property
    def made_of(self) -> Sequence[Dataset[Any]]:
        return self.bases

    def described(self) -> bytes:
        """The body of ``POST /v1/datasets/compositions``.

        Raises:
            TooLarge: Too many rows were chosen one by one.
        """
        numbers = sum(p.value.nbytes for p in self._pieces if not p.is_set)
        if numbers > DESCRIBED_BYTES:
            # Before they are copied.
            raise TooLarge(
                f"{self.name}: {numbers // 8:,} rows were chosen one by one, and a node is told of"
                f" at most {DESCRIBED_BYTES // 8:,}",
                hint="choose rows by a filter, a range or a split, or read them without a stream",
            )
        ids, pieces = (
            [base.id for base in self.bases],
            [(p.is_set, p.encoded()) for p in self._pieces],
        )
        return bytes(_forebay.composition_body(ids, json.dumps(self._document), pieces))

    def open_at(self, client: Client) -> dict[str, Any]:
        body = self.described()
        try:
            return _node.compose(client, body)
        except NotFound:
            for base in self.bases:
                base.is_at(client)
        return _node.compose(client, body)

    # What it becomes

    def _tree(self) -> tuple[list[Dataset[Any]], Document, list[Piece], list[str]]:
        return self.bases, self._document, self._pieces, self._steps

    def _changed(self, **changes: Any) -> Composed[Any]:
        bases = changes.get("bases", self.bases)
        return Composed(
            bases,
            self._document,
            self._pieces,
            len(self),
            self._steps,
            decode=changes.get("decode", self.decoder),
            maps=changes.get("maps", self.maps),
            shape=self._shape,
        )

    def select_columns(self, columns: Sequence[str] | str) -> Composed[Any]:
        return self._changed(bases=[base.select_columns(columns) for base in self.bases])

    def rename(self, names: dict[str, str]) -> Composed[Any]:
        return self._changed(bases=[base.rename(names) for base in self.bases])

    def cast(self, schema: Any) -> Composed[Any]:
        return self._changed(bases=[base.cast(schema) for base in self.bases])

    def __reduce__(self) -> Any:
        return _rebuild, (
            self.bases,
            self._document,
            self._pieces,
            len(self),
            self._steps,
            self.decoder,
            self.maps,
            self._shape,
        )

    def __repr__(self) -> str:
        types = listed([f"{name}: {kind}" for name, kind in self.schema.items()])
        return f"<forebay.Dataset {self._title()}; {types}>"


#: The set of rows that a filter leaves, and their shape if that is known.
Found = tuple[Piece, bytes | None]
#: What a filter does not know before it is computed.
_COMPUTED = frozenset(
    "bases info spec dressing _columns _document _files _keys _made _pieces _rows _shape"
    " _starts _steps".split()
)


class Filtered(Composed[S]):
    """The rows of a dataset that an expression leaves. Which ones is found out when they are first
    needed: for their number, a row, a loader, or another operation on rows.
    """

    def __init__(self, of: Dataset[S], find: Callable[[], Found], step: str) -> None:
        # The rest is there once the filter was computed.
        self._of, self._find, self._step = of, find, step
        self.client, self.decoder, self.maps = of.client, of.decoder, of.maps
        # By process: nobody unlocks that of a parent which was computing when it forked.
        self._locks: dict[int, threading.Lock] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _COMPUTED or "_of" not in self.__dict__:
                return super().__getattr__(name)
            self._compute()
            return self.__dict__[name]

    def _compute(self) -> None:
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if not self.is_pending:
                return
            piece, shape = self._find()
            made = kept(self._of, piece, self._step, shape)
            # All at once: others look without the lock.
            self.__dict__.update({n: made.__dict__[n] for n in _COMPUTED})

    @property
    def is_pending(self) -> bool:
        return "_rows" not in self.__dict__

    def _like(self, of: Dataset[Any]) -> Filtered[Any]:
        """The same rows of a dataset that differs in columns or samples alone."""
        made: Filtered[Any] = Filtered(of, self._found, self._step)
        if not self.is_pending:
            made._compute()
        return made

    def _found(self) -> Found:
        return self._pieces[-1], self._shape

    # What is known before.

    @property
    def name(self) -> str:
        return " | ".join(self.steps)

    @property
    def steps(self) -> list[str]:
        return [*self._of.steps, _short(self._step)]

    @property
    def schema(self) -> dict[str, str]:
        return self._of.schema

    def _all_types(self) -> dict[str, str]:
        return self._of._all_types()

    def _known(self, columns: Sequence[str]) -> list[str]:
        return self._of._known(columns)

    def _columns_key(self) -> Any:
        return self._of._columns_key()

    def _looks(self) -> list[str]:
        return self._of._looks()

    def _empty(self, columns: Sequence[str]) -> Any:
        return self._of._empty(columns)

    def select_columns(self, columns: Sequence[str] | str) -> Composed[Any]:
        return self._like(self._of.select_columns(columns))

    def rename(self, names: dict[str, str]) -> Composed[Any]:
        return self._like(self._of.rename(names))

    def cast(self, schema: Any) -> Composed[Any]:
        return self._like(self._of.cast(schema))

    def map(self, function: Callable[[Any], Any]) -> Composed[Any]:
        return self._like(self._of.map(function))

    def __repr__(self) -> str:
        if not self.is_pending:
            return super().__repr__()
        types = listed([f"{name}: {kind}" for name, kind in self.schema.items()])
        return f"<forebay.Dataset {self.name}: not computed yet; {types}>"


def _rebuild(
    bases: Any,
    document: Any,
    pieces: Any,
    rows: Any,
    steps: Any,
    decode: Any,
    maps: Any,
    shape: Any,
) -> Composed[Any]:
    return Composed(bases, document, pieces, rows, steps, decode=decode, maps=maps, shape=shape)


def _identity(bases: Sequence[Dataset[Any]], document: Document, pieces: Sequence[Piece]) -> str:
    ids, digests = [base.id for base in bases], [piece.digest for piece in pieces]
    return _forebay.composition_identity(ids, json.dumps(document), digests)


# Operations. Each takes a dataset and returns one with other rows.


def _made(
    of: Dataset[S],
    document: Document,
    pieces: Sequence[Piece],
    rows: int,
    step: str,
    shape: bytes | None = None,
) -> Composed[S]:
    bases, _, _, steps = of._tree()
    if _depth(document) > DEPTH_MAX:
        raise InvalidRequest(
            f"more than {DEPTH_MAX} operations on top of each other: {of.name}",
            hint="choose the rows in one step, for example by ds.select(array)",
        )
    steps = [*steps, _short(step)]
    return Composed(
        bases, document, pieces, rows, steps, decode=of.decoder, maps=of.maps, shape=shape
    )


def _short(step: str) -> str:
    return step if len(step) <= TEXT_MAX else f"{step[: TEXT_MAX - 1]}…"


def _depth(document: Document) -> int:
    ((kind, inner),) = document.items()
    if kind == "base":
        return 0
    return 1 + max(map(_depth, _parts(kind, inner)), default=0)


def _parts(kind: str, inner: Any) -> list[Document]:
    """What an operation is done to."""
    if kind == "concat":
        return list(inner)
    return list(inner["parts"]) if kind == "mix" else [inner["of"]]


def whole(of: Dataset[Any]) -> list[int] | None:
    """How many times all rows of each dataset that this is made of are there; None if some rows are
    left out, or are there more often than others.
    """
    bases, document, pieces, _ = of._tree()
    found = _whole(document, bases, pieces)
    return None if found is None else [found[number] for number in range(len(bases))]


def _whole(
    document: Document, bases: Sequence[Dataset[Any]], pieces: Sequence[Piece]
) -> Counter[int] | None:
    ((kind, inner),) = document.items()
    if kind == "base":
        return Counter({inner: 1})
    if kind == "concat":
        together: Counter[int] = Counter()
        for part in inner:
            of_part = _whole(part, bases, pieces)
            if of_part is None:
                return None
            together += of_part
        return together
    if kind == "mix":
        # By weight, of which nobody expects whole datasets.
        return None
    found = _whole(inner["of"], bases, pieces)
    if found is None:
        return None
    if kind == "repeat":
        return Counter({number: times * inner["times"] for number, times in found.items()})
    # A range and a set have no row twice: with as many rows, they have all of them.
    count = None
    if kind == "range":
        count = inner["count"]
    elif kind == "set":
        count = len(pieces[inner["piece"]].value)
    rows = sum(times * len(bases[number]) for number, times in found.items())
    return found if count == rows else None


def ranged(of: Dataset[S], rows: range, step: str | None = None) -> Dataset[S]:
    """The rows of a range, which are there."""
    if len(of) == len(rows) and rows == range(len(of)):
        return of
    bases, document, pieces, steps = of._tree()
    text = step or f"rows {_shown(rows)}"
    if "range" not in document:
        return _made(of, {"range": {**_range(rows), "of": document}}, pieces, len(rows), text)
    # A range of a range is one.
    inner = document["range"]
    before = range(inner["start"], inner["start"] + inner["step"] * inner["count"], inner["step"])
    whole = _within(before, rows)
    made = {"range": {**_range(whole), "of": inner["of"]}}
    if step is None and steps[-1].startswith("rows "):
        steps, text = steps[:-1], f"rows {_shown(whole)}"
    shown = [*steps, text]
    return Composed(bases, made, pieces, len(rows), shown, decode=of.decoder, maps=of.maps)


def _within(of: range, rows: range) -> range:
    """The range that ``rows`` are of another one."""
    if not len(rows):
        return range(0)
    step = of.step * rows.step
    start = of.start + of.step * rows.start
    return range(start, start + step * len(rows), step)


def _range(rows: range) -> dict[str, int]:
    if not len(rows):
        return {"start": 0, "step": 1, "count": 0}
    # A single row has no direction.
    return {"start": rows.start, "step": rows.step if len(rows) > 1 else 1, "count": len(rows)}


def _shown(rows: range) -> str:
    text = f"{rows.start}:{rows.stop}"
    return text if rows.step == 1 else f"{text}:{rows.step}"


def picked(of: Dataset[S], ids: np.ndarray) -> Dataset[S]:
    """Rows by their numbers, ``uint64``, which are there."""
    _, document, pieces, _ = of._tree()
    is_set = len(ids) > 0 and bool(np.all(ids[1:] > ids[:-1]))
    # A copy: the array may be the caller's, who goes on writing to it.
    piece = Piece.of(RowSet(len(of), ids) if is_set else ids.copy())
    kind = "set" if is_set else "picks"
    text = f"{counted(len(ids), 'row')} by number ({piece.digest[:12]})"
    made = {kind: {"of": document, "piece": len(pieces)}}
    return _made(of, made, [*pieces, piece], len(ids), text)


def kept(of: Dataset[S], rows: Piece, step: str, shape: bytes | None = None) -> Dataset[S]:
    """The rows of a set."""
    _, document, pieces, _ = of._tree()
    made = {"set": {"of": document, "piece": len(pieces)}}
    return _made(of, made, [*pieces, rows], len(rows.value), step, shape)


def repeated(of: Dataset[S], times: int) -> Dataset[S]:
    number = whole_number(times)
    if number is None or number < 1:
        raise InvalidRequest(f"repeat({times!r})", hint=TIMES)
    times = number
    if times == 1:
        return of
    if len(of) * times > ROWS_MAX:
        raise InvalidRequest(
            f"repeat({times}) of {len(of):,} rows makes more than {ROWS_MAX:,}",
            hint="a loader with epochs=math.inf goes on for ever",
        )
    _, document, pieces, _ = of._tree()
    made = {"repeat": {"of": document, "times": times}}
    return _made(of, made, pieces, len(of) * times, f"repeat {times}")


def sharded(of: Dataset[S], shards: int, index: int, contiguous: bool) -> Dataset[S]:
    numbers = []
    for name, value, least in (("num_shards", shards, 1), ("index", index, 0)):
        number = whole_number(value)
        if number is None or number < least:
            raise InvalidRequest(
                f"{name} is {value!r}", hint=f"give a whole number of at least {least}"
            )
        numbers.append(number)
    shards, index = numbers
    if index >= shards:
        raise InvalidRequest(
            f"shard {index} of {shards} does not exist", hint="shards are counted from 0"
        )
    contiguous, rows = flag("contiguous", contiguous), len(of)
    text = f"shard {index} of {shards}{'' if contiguous else ', interleaved'}"
    if not contiguous:
        return ranged(of, range(index, rows, shards), text)
    each, more = divmod(rows, shards)
    start = each * index + min(index, more)
    return ranged(of, range(start, start + each + (index < more)), text)


def split(of: Dataset[Any], test_size: float, seed: int) -> TrainTest[Dataset[Any]]:
    rows, plain_seed = len(of), whole_number(seed)
    if plain_seed is None or not 0 <= plain_seed <= U64_MAX:
        raise InvalidRequest(f"seed={seed!r}", hint="give a whole number from 0 to 2**64 - 1")
    size = real_number(test_size)
    if size is None:
        raise InvalidRequest(
            f"test_size={test_size!r}", hint="give a number of rows, or a part between 0.0 and 1.0"
        )
    if isinstance(size, float) and not 0 < size < 1:
        raise InvalidRequest(
            f"test_size={test_size!r} is not between 0 and 1",
            hint="give a part of the rows as in 0.1, or a whole number of rows",
        )
    test = math.ceil(rows * size) if isinstance(size, float) else size
    if not 0 < test < rows:
        raise InvalidRequest(
            f"a test part of {test:,} of {counted(rows, 'row')} leaves a part without rows",
            hint="give a test_size with which both parts have rows",
        )
    _, document, pieces, _ = of._tree()

    def part(rest: bool, count: int) -> Dataset[Any]:
        inner = {"of": document, "chosen": test, "seed": plain_seed, "rest": rest}
        which = "train" if rest else "test"
        text = f"{which} of a split of {counted(test, 'row')} with seed {plain_seed}"
        return _made(of, {"split": inner}, pieces, count, text)

    return TrainTest(part(True, rows - test), part(False, test))


@explained(CONCATENATE)
def concatenate(datasets: Sequence[Dataset[S]]) -> Dataset[S]:
    """One dataset after the other, as one.

    ::

        ds = forebay.concatenate([a, b.rename({"content": "text"})])

    Row ``len(a)`` is row 0 of ``b``. Nothing is read or copied. In contrast to :func:`forebay.mix`,
    an epoch is each row once, and a full shuffle mixes the rows of all.

    Args:
        datasets: With the same columns, of the same types (``rename``, ``cast`` and
            ``select_columns`` make them so), and with the same ``decode`` and ``map``. Columns that
            hold the same values in different ways (``string`` and ``large_string``, dictionaries,
            lists with long offsets) are cast to a type that holds those of all, as they arrive: a
            loader with ``stream=True`` takes them of one type only.

    Raises:
        InvalidRequest: No datasets, or their columns or what makes their samples differ.
    """
    datasets = datasets_of(
        datasets, "concatenate takes a list of datasets", "forebay.concatenate([a, b])"
    )
    like = "make them alike by rename, cast or select_columns, or mix them: forebay.mix"
    datasets = _of_one_type(datasets, like)
    _check_alike(
        datasets,
        like,
        "open them with the same decode= and map after concatenating, or mix them: forebay.mix"
        " takes any",
    )
    if len(datasets) == 1:
        return datasets[0]
    bases, parts, pieces = _together(datasets)
    texts = [" | ".join(d.steps) for d in datasets]
    text = f"concatenate {len(datasets)}: {' + '.join(texts)}"
    rows = sum(map(len, datasets))
    return _joined(datasets[0], bases, {"concat": parts}, pieces, rows, text)


def interleaved(
    datasets: Sequence[Dataset[S]],
    stages: Sequence[tuple[int, Sequence[float]]],
    rows: int,
    first: Sequence[float],
) -> Dataset[S]:
    """Rows of several datasets by weight, which are those of an epoch of a mix without a shuffle.

    Args:
        first: The weights at the beginning, as they are shown.

    Raises:
        InvalidRequest: Their columns or what makes their samples differ, one has no rows, or one
            has too small a share.
    """
    like = (
        "make them alike by rename, cast or select_columns; a loader over the mix needs only the"
        " columns that it reads"
    )
    datasets = _of_one_type(datasets, like)
    _check_alike(
        datasets,
        like,
        "a loader over the mix takes any; for numbers of rows, all have the same decode= and map",
    )
    check_rows(datasets)
    bases, parts, pieces = _together(datasets)
    of_stages = [{"from": row, "weights": list(weights)} for row, weights in stages]
    total = math.fsum(first)
    shares = zip(first, datasets, strict=True)
    texts = [f"{weight / total:.1%} {' | '.join(d.steps)}" for weight, d in shares]
    changing = ""
    if len(stages) > 1:
        # Which tells apart those that begin alike.
        digest = hashlib.blake2b(json.dumps(of_stages).encode(), digest_size=6).hexdigest()
        changing = f" at first (schedule {digest})"
    text = f"mix of {len(datasets)}: {' + '.join(texts)}{changing}, {counted(rows, 'row')}"
    made = {"mix": {"parts": parts, "stages": of_stages, "rows": rows}}
    mixed = _joined(datasets[0], bases, made, pieces, rows, text)
    try:
        # Now, while it is known which dataset has a weight that cannot be.
        _ = mixed._composition
    except InvalidRequest as e:
        message = e.message
        for number, dataset in enumerate(datasets):
            message = message.replace(f'dataset "part {number}"', dataset.name)
        raise InvalidRequest(message, hint=e.hint) from None
    return mixed


def _together(
    datasets: Sequence[Dataset[Any]],
) -> tuple[list[Dataset[Any]], list[Document], list[Piece]]:
    """What datasets are made of, each base once; how each of them is; and the pieces of all."""
    bases: list[Dataset[Any]] = []
    numbers: dict[Any, int] = {}
    clients: list[Client] = []
    pieces: list[Piece] = []
    parts: list[Document] = []

    def through(client: Client) -> int:
        """The number of the client, which is that of one that is like it."""
        for number, known in enumerate(clients):
            if known is client or known._is_like(client):
                return number
        clients.append(client)
        return len(clients) - 1

    for dataset in datasets:
        own, document, of_own, _ = dataset._tree()
        at = []
        for base in own:
            key = (base.id, through(base.client), tuple(base._columns or ()), base.dressing)
            if key not in numbers:
                numbers[key] = len(bases)
                bases.append(base)
            at.append(numbers[key])
        parts.append(_moved(document, at, len(pieces)))
        pieces.extend(of_own)
    return bases, parts, pieces


def _joined(
    first: Dataset[S],
    bases: Sequence[Dataset[Any]],
    document: Document,
    pieces: Sequence[Piece],
    rows: int,
    text: str,
) -> Composed[S]:
    """Several datasets as one, with samples as the first makes them."""
    if _depth(document) > DEPTH_MAX:
        raise InvalidRequest(
            f"more than {DEPTH_MAX} operations on top of each other",
            hint="concatenate, or mix, all datasets in one call",
        )
    if len(text) > 2 * TEXT_MAX:
        # What differs may be in the part that is not shown.
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        text = f"{text[: 2 * TEXT_MAX]}… ({digest})"
    return Composed(bases, document, pieces, rows, [text], decode=first.decoder, maps=first.maps)


def _of_one_type(datasets: Sequence[Dataset[S]], hint: str) -> Sequence[Dataset[S]]:
    """The datasets with columns that hold the same values in different ways cast to one type; as
    they are where their columns have other names, or a type that Arrow itself does not have.

    Raises:
        InvalidRequest: Columns of two of them have no type in common.
    """
    first, *others = (dataset.schema for dataset in datasets)
    columns = [name for name in first if any(s.get(name) != first[name] for s in others)]
    if not columns or any(list(s) != list(first) for s in others):
        return datasets
    try:
        import pyarrow as pa

        from . import _alike

    except ImportError:
        return datasets
    found = [pa.record_batch(dataset._empty(columns)).schema for dataset in datasets]
    try:
        schema = _alike.schema_of(found)
    except _alike.Differ as e:
        # Of the two, what differs and can be alike would be cast.
        a, b = datasets[e.first], datasets[e.other]
        unlike = _alike.unlike(found[e.first], found[e.other])
        if told := [name for name in unlike if a.schema[name] != b.schema[name]]:
            raise _differ(a, b, hint, told) from None
        return datasets
    if any(_alike.is_extension(field) for field in schema):
        return datasets
    return [dataset.cast(schema) for dataset in datasets]


def _check_alike(datasets: Sequence[Dataset[Any]], columns: str, samples: str) -> None:
    """Raises InvalidRequest, with one of these hints, if columns or samples differ."""
    for other in datasets[1:]:
        _check_pair(datasets[0], other, columns, samples)


def _check_pair(a: Dataset[Any], b: Dataset[Any], columns: str, samples: str) -> None:
    if list(a.schema.items()) != list(b.schema.items()):
        raise _differ(a, b, columns, {**a.schema, **b.schema})
    if (a.decoder, a.maps) != (b.decoder, b.maps):
        raise InvalidRequest(
            f"{a.name} and {b.name} make their samples in different ways",
            hint=samples,
        )


def _differ(a: Dataset[Any], b: Dataset[Any], hint: str, of: Iterable[str]) -> InvalidRequest:
    """The error for two datasets that differ in some of these columns."""
    one, other = ({name: d.schema[name] for name in of if name in d.schema} for d in (a, b))
    return InvalidRequest(
        f"{a.name} and {b.name} have different columns: {differences(one, other)}", hint=hint
    )


def _moved(document: Document, bases: Sequence[int], pieces: int) -> Document:
    """A document whose bases and pieces have other numbers."""
    ((kind, inner),) = document.items()
    if kind == "base":
        return {"base": bases[inner]}
    if kind == "concat":
        return {"concat": [_moved(part, bases, pieces) for part in inner]}
    if kind == "mix":
        return {"mix": {**inner, "parts": [_moved(p, bases, pieces) for p in inner["parts"]]}}
    moved = {**inner, "of": _moved(inner["of"], bases, pieces)}
    if "piece" in inner:
        moved["piece"] = inner["piece"] + pieces
    return {kind: moved}
