"""Rows that were read: a list of dicts, and the same memory as Arrow, NumPy and PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NewType, cast, overload

import numpy as np

from ._arrow import Column, columns
from ._needs import needs
from ._words import counted, listed

if TYPE_CHECKING:
    import pyarrow
    import torch

__all__ = ["Row", "Rows"]

#: For type checkers: a sample that nobody decoded, a dict from the names of columns to values.
Row = NewType("Row", dict[str, Any])

#: What tables of other libraries have, and what is in its place here.
ELSEWHERE = {
    "to_pandas": "arrow().to_pandas()",
    "to_polars": "arrow(), which polars.DataFrame() takes",
    "to_list": "plain()",
    "to_pylist": "plain()",
    "to_dict": "numpy()",
    "to_pydict": "numpy()",
    "to_numpy": "numpy()",
    "to_arrow": "arrow()",
    "schema": "arrow().schema",
    "column_names": "columns",
    "num_rows": "len(rows) is their number",
}


class Rows(Sequence[dict[str, Any]]):
    """Rows in the order in which they were requested.

    ``rows[i]`` is a dict: column name to value. Values are numbers, ``str``, ``memoryview``
    (columns of bytes: a view of the received memory, no copy), ``datetime`` (with its zone, where
    the column has one), ``date``, ``timedelta``, ``time``, ``Decimal``, NumPy arrays (lists; masked
    where items are missing), dicts (structs), lists of pairs (maps), None where missing.
    ``rows[2:5]`` are :class:`Rows` again, of the same memory. :meth:`with_bytes` has ``bytes`` in
    place of views.

    It is an Arrow record batch through the PyCapsule interface (``pyarrow.record_batch(rows)``,
    ``DataFrame.from_arrow(rows)`` of pandas 3), without a copy. Polars takes rows for a list of
    values, and guesses their types: use ``polars.DataFrame(rows.arrow())``. Rows of several
    datasets are copied into one; where these hold the same values in columns of different types
    (``string`` and ``large_string``, dictionaries, lists with long offsets), it has the type that
    holds those of all.

    Attributes:
        ids: The row numbers, ``numpy.uint64`` of shape ``(len(rows),)``.
        sources: Which dataset of a mix each row is from, ``numpy.uint32`` of the same shape; None
            for rows of one dataset.
    """

    __slots__ = ("_has_bytes", "_parts", "_pick", "_values", "ids", "sources")

    def __init__(
        self,
        parts: Sequence[Any],
        ids: np.ndarray,
        *,
        sources: np.ndarray | None = None,
        pick: np.ndarray | None = None,
        has_bytes: bool = False,
    ) -> None:
        # `pick` says which (part, row in the part) each row is: shape (rows, 2). None: the one part
        # as it is.
        self._parts = list(parts)
        self._pick = pick
        self._has_bytes = has_bytes
        self._values: list[dict[str, list[Any]]] | None = None
        self.ids = ids
        self.sources = sources

    @classmethod
    def gathered(cls, parts: dict[int, Any], ids: np.ndarray, sources: np.ndarray) -> Rows:
        """Rows of several datasets: ``parts[s]`` holds those of source ``s``, in their order, as a
        record batch or as rows.
        """
        of = {
            source: part if isinstance(part, Rows) else cls([part], ids[sources == source])
            for source, part in parts.items()
        }
        if len(of) == 1:
            (only,) = of.values()
            return cls(only._parts, ids, sources=sources, pick=only._pick)
        pick = np.empty((len(ids), 2), np.int64)
        received: list[Any] = []
        for source, rows in of.items():
            pick[sources == source] = rows._picked() + [len(received), 0]
            received.extend(rows._parts)
        return cls(received, ids, sources=sources, pick=pick)

    @classmethod
    def joined(cls, pieces: Sequence[Rows], ids: np.ndarray) -> Rows:
        """One after the other."""
        received: list[Any] = []
        pick = []
        for rows in pieces:
            pick.append(rows._picked() + [len(received), 0])
            received.extend(rows._parts)
        return cls(received, ids, pick=np.concatenate(pick))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> list[str]:
        """The names of the columns; for a mix, all that any of its datasets has."""
        names: dict[str, None] = {}
        for part in self._parts:
            names.update(dict.fromkeys(columns(part)))
        return list(names)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: Any) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            pick = self._picked()[index]
            sources = None if self.sources is None else self.sources[index]
            return self._with(self._parts, self.ids[index], sources, pick)
        if isinstance(index, str):
            raise TypeError(f"{index!r} is not a row number: rows.numpy()[{index!r}] is a column")
        try:
            n, number = len(self), operator.index(index)
        except TypeError:
            raise TypeError(
                f"{index!r:.100} is not a row number: rows[i] is one row, and rows[a:b] are several"
            ) from None
        at = number + n if number < 0 else number
        if not 0 <= at < n:
            raise IndexError(f"row {number} does not exist: there are {n}")
        part, row = (0, at) if self._pick is None else map(int, self._pick[at])
        found = {name: values[row] for name, values in self._of_parts()[part].items()}
        return _owned(found) if self._has_bytes else found

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Several of them, with ``bytes`` in place of views: what PyTorch's DataLoader asks for."""
        of = self.with_bytes()
        return [of[row] for row in rows]

    def with_bytes(self) -> Rows:
        """The same rows, of which each has ``bytes`` where it had views of received memory."""
        rows = Rows(self._parts, self.ids, sources=self.sources, pick=self._pick, has_bytes=True)
        rows._values = self._values
        return rows

    def _with(
        self,
        parts: Sequence[Any],
        ids: np.ndarray,
        sources: np.ndarray | None,
        pick: np.ndarray | None,
    ) -> Rows:
        return Rows(parts, ids, sources=sources, pick=pick, has_bytes=self._has_bytes)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._between(0, len(self))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property has failed with an AttributeError: again, for that error.
                return object.__getattribute__(self, name)
            hint = f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            raise AttributeError(f"rows have no {name!r}{hint}", name=name, obj=self)

    def _between(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """What ``self[i]`` is for each row of a range, looking its columns up only once."""
        rows = self._views(begin, end)
        return map(_owned, rows) if self._has_bytes else rows

    def _views(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        if begin == end:
            return
        parts = self._of_parts()
        if self._pick is None:
            of_all = parts[0]
            for row in range(begin, end):
                yield {name: values[row] for name, values in of_all.items()}
            return
        for at in range(begin, end, 1024):
            for part, row in self._pick[at : min(at + 1024, end)].tolist():
                yield {name: values[row] for name, values in parts[part].items()}

    def plain(self) -> Iterator[dict[str, Any]]:
        """Each row with its values as JSON has them: lists, times as texts, and of columns of JSON
        what the texts say.
        """
        parts = [
            {name: column.plain() for name, column in columns(part).items()} for part in self._parts
        ]
        for part, row in self._picked().tolist():
            yield {name: values[row] for name, values in parts[part].items()}

    def _picked(self) -> np.ndarray:
        if self._pick is not None:
            return self._pick
        return np.stack([np.zeros(len(self), np.int64), np.arange(len(self))], axis=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the received memory that these rows are views of."""
        return sum(int(getattr(part, "nbytes", 0)) for part in self._parts)

    @property
    def node_seconds(self) -> dict[str, float]:
        """Seconds that the node says it spent on these rows (``origin``, ``disk``, ``prepare``),
        summed over the whole answers that contain them; empty if it does not say.
        """
        sums: dict[str, float] = {}
        for part in self._parts:
            for name, seconds in getattr(part, "node_seconds", {}).items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums

    @property
    def node_bytes(self) -> dict[str, int]:
        """Where the node took the bytes of these rows from (``memory``, ``disk``, ``peer``,
        ``origin``), summed over the whole answers that contain them; empty if it does not say.
        """
        sums: dict[str, int] = {}
        for part in self._parts:
            for name, count in getattr(part, "node_bytes", {}).items():
                sums[name] = sums.get(name, 0) + count
        return sums

    def prepare(self) -> None:
        """Takes the columns apart, once, before several threads read rows. Otherwise the first
        access to a row does it.
        """
        self._of_parts()

    def _of_parts(self) -> list[dict[str, list[Any]]]:
        if self._values is None:
            self._values = [
                {name: column.values() for name, column in columns(part).items()}
                for part in self._parts
            ]
        return self._values

    def __arrow_c_schema__(self) -> Any:
        return self._whole().__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._whole().__arrow_c_array__(requested_schema)

    def _whole(self) -> Any:
        """One Arrow record batch of all rows in their order: the received one if that is the
        same.
        """
        if self._pick is None and len(self._parts) == 1:
            return self._parts[0]
        pa = _pyarrow("rows of several parts, or of a part of a batch, as one record batch")
        batches = [pa.record_batch(part) for part in self._parts]
        batches = _with_one_schema(batches)
        starts = np.cumsum([0] + [len(b) for b in batches])
        pick = self._picked()
        rows = starts[pick[:, 0]] + pick[:, 1]
        if not len(rows):
            return batches[0].slice(0, 0)
        from ._alike import taken

        return taken(pa.Table.from_batches(batches), rows).to_batches()[0]

    def arrow(self) -> pyarrow.RecordBatch:
        """A ``pyarrow.RecordBatch`` of the received memory.

        Raises:
            TypeError: The rows are from datasets with columns that no one type holds; the message
                names the column and its types.
            ImportError: PyArrow is not installed. Whatever else takes the Arrow PyCapsule interface
                can take the rows themselves.
        """
        return _pyarrow("rows.arrow()").record_batch(self)

    def numpy(self) -> dict[str, np.ndarray]:
        """Each column as an array of shape ``(len(rows), …)``.

        Numbers, times and bits: by value, views of the received memory where they are numbers;
        ``numpy.ma.MaskedArray`` if some are missing. Lists of a fixed size: ``(len(rows), size)``.
        Texts (``str``), bytes (``memoryview``), lists of any size: arrays of objects, None where
        missing.

        Raises:
            TypeError: A column's type has no array, or the rows are from datasets in whose columns
                are values that no one array holds; the message names the column.
        """
        if self._pick is None and len(self._parts) == 1:
            return {name: column.numpy() for name, column in columns(self._parts[0]).items()}
        pick, parts = self._picked(), [columns(part) for part in self._parts]
        return {
            name: self._gather(name, [p[name] for p in parts if name in p], pick)
            for name in self.columns
        }

    def _gather(self, name: str, found: list[Column], pick: np.ndarray) -> np.ndarray:
        if len(found) < len(self._parts):
            raise TypeError(
                f"column {name!r} is not in all of the datasets that these rows are from:"
                " leave it out with columns="
            )
        arrays = [column.numpy() for column in found]
        if len(arrays) == 1:
            return arrays[0][pick[:, 1]]
        _refuse_rounding(name, arrays)
        starts = np.cumsum([0] + [len(a) for a in arrays])
        join = (
            np.ma.concatenate
            if any(isinstance(a, np.ma.MaskedArray) for a in arrays)
            else np.concatenate
        )
        return join(arrays)[starts[pick[:, 0]] + pick[:, 1]]

    # `| Any`: columns of bytes, texts and lists are lists, which only their types show.
    def torch(self) -> dict[str, torch.Tensor | Any]:
        """Each column as a tensor of shape ``(len(rows), …)``: numbers and bits; views of the
        received memory where they are numbers.

        Columns of bytes are lists of ``torch.uint8`` tensors (views), those of texts lists of
        ``str``, lists of numbers lists of tensors; None where missing.

        Raises:
            TypeError: A column of numbers has missing values, which tensors cannot hold; or its
                type has no tensor.
        """
        return {name: tensor_of(name, array) for name, array in self.numpy().items()}

    def __reduce__(self) -> Any:
        # A copy goes through a pipe: the received memory belongs to this process alone.
        pa = _pyarrow("sending rows to another process")
        parts = [pa.record_batch(part) for part in self._parts]
        pick = self._pick
        if pick is None:
            return Rows._of, (parts, self.ids, self.sources, None, self._has_bytes)
        # Of the received memory, only what these rows are.
        pick = pick.copy()
        for number, part in enumerate(parts):
            mine = pick[:, 0] == number
            used, pick[mine, 1] = np.unique(pick[mine, 1], return_inverse=True)
            if len(used) < len(part):
                # Arrow pickles a slice with all of its memory: no rows are a slice of one row.
                some = used if len(used) else np.zeros(1, np.int64)
                parts[number] = _taken(pa, part, some).slice(0, len(used))
        return Rows._of, (parts, self.ids, self.sources, pick, self._has_bytes)

    @staticmethod
    def _of(
        parts: Sequence[Any],
        ids: np.ndarray,
        sources: np.ndarray | None,
        pick: np.ndarray | None,
        has_bytes: bool,
    ) -> Rows:
        return Rows(parts, ids, sources=sources, pick=pick, has_bytes=has_bytes)

    def _first(self, count: int) -> Rows:
        """The first rows, of no more of the received memory than they lie in."""
        pick = self._picked()[:count]
        used = np.unique(pick[:, 0])
        pick = np.stack([np.searchsorted(used, pick[:, 0]), pick[:, 1]], axis=1)
        sources = None if self.sources is None else self.sources[:count]
        return self._with([self._parts[p] for p in used], self.ids[:count], sources, pick)

    def _repr_html_(self) -> str:
        from ._look import preview_of_rows

        return preview_of_rows(self)

    def __repr__(self) -> str:
        of = "" if self.sources is None else f" of {counted(len(self._parts), 'dataset')}"
        return f"<forebay.Rows: {counted(len(self), 'row')}{of}, columns {listed(self.columns)}>"


def _owned(row: dict[str, Any]) -> dict[str, Any]:
    from ._collate import owned

    return cast("dict[str, Any]", owned(row))


def _refuse_rounding(name: str, arrays: Sequence[np.ndarray]) -> None:
    """Raises if there is no array for all, or some values would be others in it."""
    advice = "cast the column in one of the datasets, or leave it out with columns="
    shapes = {a.shape[1:]: f"{a.dtype} of shape {a.shape[1:]}" for a in arrays}
    if len(shapes) > 1:
        raise TypeError(
            f"column {name!r} is {' in one dataset and '.join(shapes.values())} in another, which"
            f" one array cannot hold: {advice}"
        )
    types = dict.fromkeys(array.dtype for array in arrays)
    if len(types) == 1:
        return
    try:
        common = np.result_type(*types)
        if common.kind == "m" and any(of.kind != "m" for of in types):
            # To NumPy, numbers are durations, too.
            raise TypeError
    except TypeError:
        raise TypeError(
            f"column {name!r} is {' in one dataset and '.join(map(str, types))} in another, which"
            f" one array cannot hold: {advice}"
        ) from None
    for array in arrays:
        changed = _changed_in(common, np.ma.getdata(array))
        if isinstance(array, np.ma.MaskedArray):
            changed &= ~np.ma.getmaskarray(array)
        if changed.any():
            raise TypeError(
                f"column {name!r} has {np.ma.getdata(array)[changed][0]}, which {common} does not"
                f" hold, the type for the values of all these datasets: {advice}"
            )


def _changed_in(common: np.dtype, values: np.ndarray) -> np.ndarray:
    """Which values are others in an array of this type."""
    if values.dtype.kind in "iu" and common.kind == "f" and values.itemsize == 8:
        made, end = values.astype(common), 2.0 ** (63 if values.dtype.kind == "i" else 64)
        back = np.where(made < end, made, 0).astype(values.dtype)
        return (made >= end) | (back != values)
    if values.dtype.kind in "mM" and common.kind in "mM":
        back = values.astype(common).astype(values.dtype)
        return back.view(np.int64) != values.view(np.int64)
    return np.zeros(values.shape, bool)


def _with_one_schema(batches: list[Any]) -> list[Any]:
    """The batches with one schema, where their columns hold the same values in different ways."""
    first = batches[0].schema
    if all(batch.schema.equals(first, check_metadata=True) for batch in batches[1:]):
        return batches
    import pyarrow as pa

    from . import _alike

    why = "their columns are not the same, or in another order"
    try:
        if all(batch.schema.names == first.names for batch in batches):
            schema = _alike.schema_of([batch.schema for batch in batches])
            return [_alike.cast(batch, schema) for batch in batches]
    except (_alike.Differ, pa.ArrowException) as e:
        why = str(e)
    raise TypeError(
        "these rows are from datasets with different columns and cannot be one record batch:"
        f" {why}; read only common columns, with columns=, or make them alike by cast"
    )


def tensor_of(name: str, array: np.ndarray) -> torch.Tensor | list[Any]:
    """An array of :meth:`Rows.numpy` for PyTorch."""
    with needs("rows.torch()"):
        import torch

    def one(value: Any) -> Any:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"column {name!r} has lists with missing items, which a tensor cannot hold:"
                " use .numpy(), which gives masked arrays, or a decode="
            )
        if isinstance(value, memoryview):
            return (
                torch.frombuffer(value, dtype=torch.uint8)
                if len(value)
                else torch.empty(0, dtype=torch.uint8)
            )
        return (
            torch.from_numpy(value)
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
            else value
        )

    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"column {name!r} has missing values, which a tensor cannot hold: use .numpy(),"
            " which gives a masked array, or a decode="
        )
    if array.dtype == object:
        return [one(value) for value in array]
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"column {name!r} is of {array.dtype}, which PyTorch does not have: use"
            " .numpy(), or leave the column out with columns="
        )
    return torch.from_numpy(array)


def _taken(pa: Any, part: Any, rows: np.ndarray) -> Any:
    from ._alike import taken

    return taken(pa.Table.from_batches([part]), rows).to_batches()[0]


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError as e:
        raise ImportError(f"{what} needs PyArrow (pip install pyarrow); .numpy() does not") from e
    return pyarrow
