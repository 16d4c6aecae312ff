"""Columns of Arrow record batches as NumPy arrays, without a copy and without PyArrow.

A batch arrives through the Arrow PyCapsule interface (``__arrow_c_array__``): two C structures,
whose layout is fixed for all time. Its buffers appear here as NumPy arrays that hold the capsules,
and with them the memory.

Invariant: only addresses that the producer gave are read, within the lengths that the structures
state; the producer has checked these.
"""

from __future__ import annotations

import ctypes
import json
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Context, Decimal
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .errors import InvalidRequest

__all__ = ["Column", "Interval", "Tensor", "columns"]

#: Where Hugging Face's ``datasets`` has its features in the metadata of a schema.
FEATURES = b"huggingface"
#: Extension types whose lists are arrays of one shape: Arrow's own, and those of Ray Data.
TENSORS = ("arrow.fixed_shape_tensor", "ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")


class Interval(NamedTuple):
    """A value of one of Arrow's interval types. The length of its parts in nanoseconds depends on
    the calendar.
    """

    months: int
    days: int
    nanoseconds: int


class Tensor(NamedTuple):
    """How the items of each list of a column are an array."""

    #: The lengths of its axes, in the order in which the items lie.
    stored: tuple[int, ...]
    #: Which of these each axis of the array is.
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored[axis] for axis in self.order)

    def shaped(self, items: np.ndarray) -> np.ndarray:
        """The array; raises ValueError for another number of items."""
        return items.reshape(self.stored).transpose(self.order)

    def nested(self, items: list[Any]) -> list[Any]:
        """The array as lists of lists."""
        flat = np.empty(len(items), object)
        flat[:] = items
        lists: list[Any] = self.shaped(flat).tolist()
        return lists


class _Schema(ctypes.Structure):
    pass


_Schema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_void_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]


class _Array(ctypes.Structure):
    pass


_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    ("dictionary", ctypes.POINTER(_Array)),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]

#: Types with one value per slot, by their Arrow format.
_FIXED = {
    "c": "i1",
    "C": "u1",
    "s": "i2",
    "S": "u2",
    "i": "i4",
    "I": "u4",
    "l": "i8",
    "L": "u8",
    "e": "f2",
    "f": "f4",
    "g": "f8",
    "tdD": "M8[D]",
    "tdm": "M8[ms]",
}
#: Interval types: what a value holds.
_INTERVALS = {
    "tiM": [("months", "i4")],
    "tiD": [("days", "i4"), ("milliseconds", "i4")],
    "tin": [("months", "i4"), ("days", "i4"), ("nanoseconds", "i8")],
}
_UNITS = {"s": "s", "m": "ms", "u": "us", "n": "ns"}


def _fixed(form: str) -> np.dtype | None:
    if form in _FIXED:
        # Days are 32 bits in Arrow and 64 in NumPy.
        return None if form == "tdD" else np.dtype(_FIXED[form])
    if form[:2] in ("ts", "tD") and form[2:3] in _UNITS:
        return np.dtype(f"{'M8' if form[1] == 's' else 'm8'}[{_UNITS[form[2]]}]")
    if form in ("ttu", "ttn"):
        return np.dtype(f"m8[{_UNITS[form[2]]}]")
    return None


def _tz(name: str) -> tzinfo | None:
    """The zone of a timestamp's type: a name or an offset like ``+01:00``; UTC if this machine does
    not know it, which is the same instant.
    """
    if not name:
        return None
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        pass
    try:
        return datetime.strptime(name, "%z").tzinfo or UTC
    except ValueError:
        return UTC


def _metadata(schema: _Schema) -> dict[bytes, bytes]:
    """What a type says besides its format: a count, and for each of as many names and values its
    length and its bytes.
    """
    at = schema.metadata

    def number() -> int:
        nonlocal at
        at += 4
        return ctypes.c_int32.from_address(at - 4).value

    def text() -> bytes:
        nonlocal at
        length = number()
        at += length
        return ctypes.string_at(at - length, length)

    return {text(): text() for _ in range(number())} if at else {}


#: The type of texts that are JSON.
JSON = "arrow.json"


def extension_of(schema: _Schema) -> str | None:
    """The name of a type that Arrow itself does not have; None for those that it has."""
    name = _metadata(schema).get(b"ARROW:extension:name")
    return None if name is None else name.decode(errors="replace")


def said_by(text: str, of: str) -> Any:
    """What a text of JSON says.

    Args:
        of: The column, for an error.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(
            f"{of} is of JSON, and has {text!r:.100}: {e}",
            hint="mend the column, or cast it to text",
        ) from e


def tensor_of(schema: _Schema) -> Tensor | None:
    """How lists of a column are arrays; None if they are not, or nobody knows."""
    if extension_of(schema) not in TENSORS:
        return None
    try:
        said = json.loads(_metadata(schema).get(b"ARROW:extension:metadata", b""))
        stored = said if isinstance(said, list) else said["shape"]
        order = (None if said is stored else said.get("permutation")) or list(range(len(stored)))
        axes = (*stored, *order)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    is_whole = all(type(n) is int and n >= 0 for n in axes)
    if not is_whole or sorted(order) != list(range(len(stored))):
        return None
    return Tensor(tuple(stored), tuple(order))


class Column:
    """One column, or the values inside one.

    Attributes:
        name: Its name.
        format: Its type, as the Arrow C data interface writes it.
    """

    def __init__(
        self, schema: _Schema, array: _Array, owner: Any, at: int = 0, length: int | None = None
    ) -> None:
        self._schema, self._array, self._owner = schema, array, owner
        self.name = (schema.name or b"").decode("utf-8", "replace")
        self.format = (schema.format or b"").decode("ascii", "replace")
        self._at = array.offset + at
        self._length = array.length - at if length is None else length

    def __len__(self) -> int:
        return self._length

    def _buffer(self, index: int, dtype: Any, count: int, first: int) -> np.ndarray:
        dtype = np.dtype(dtype)
        address = self._array.buffers[index] if index < self._array.n_buffers else None
        if not count or not address:
            return np.empty(0 if not address else count, dtype)
        raw = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(
            address + first * dtype.itemsize
        )
        raw.owner = self._owner  # the array holds the raw view, which holds the memory
        return np.frombuffer(raw, dtype)

    def nulls(self) -> np.ndarray | None:
        """True where a value is missing; None if none is."""
        if self.format.startswith(("+u", "+r")):
            # These types have no validity of their own: a value inside them is missing.
            return None
        if self._array.null_count == 0 or not self._array.n_buffers or not self._array.buffers[0]:
            return None
        first = self._at // 8
        bits = self._buffer(0, np.uint8, (self._at + self._length + 7) // 8 - first, first)
        present = np.unpackbits(bits, bitorder="little")[self._at - first * 8 :][: self._length]
        return None if present.all() else present == 0

    def _child(self, index: int, at: int, length: int) -> Column:
        return Column(
            self._schema.children[index].contents,
            self._array.children[index].contents,
            self._owner,
            at,
            length,
        )

    def _offsets(self) -> np.ndarray:
        wide = self.format in ("Z", "U", "+L")
        offsets = self._buffer(1, np.int64 if wide else np.int32, self._length + 1, self._at)
        return offsets if len(offsets) else np.zeros(self._length + 1, np.int32)

    def _bytes(self) -> Iterator[memoryview]:
        offsets = self._offsets().tolist()
        data = self._buffer(2, np.uint8, offsets[-1] - offsets[0], offsets[0]).data
        base = offsets[0]
        for begin, end in pairwise(offsets):
            yield data[begin - base : end - base]

    def numpy(self) -> np.ndarray:
        """The values as an array of ``len(self)`` rows.

        Numbers and times are views of the batch's memory; with missing values among them a
        ``numpy.ma.MaskedArray``. Timestamps of a time zone are in UTC, times of day are
        ``timedelta64`` since midnight. Lists of a fixed size have shape ``(rows, size)``, and such
        lists of such lists an axis more. Texts,
        bytes (``memoryview``), decimals, maps (lists of pairs), structs (dicts), lists of any size
        (arrays), intervals (:class:`Interval`) and unions are arrays of objects, None where
        missing. Runs are expanded.

        Raises:
            TypeError: This type has no such array.
        """
        form, n = self.format, self._length
        nulls = self.nulls()
        if self._schema.dictionary:
            return self._of_dictionary(nulls)
        if (dtype := _fixed(form)) is not None:
            return _masked(self._buffer(1, dtype, n, self._at), nulls)
        if form in ("tts", "ttm"):
            # These have 32 bits, and timedelta64 has 64.
            of_day = self._buffer(1, np.int32, n, self._at).astype(f"m8[{_UNITS[form[2]]}]")
            return _masked(of_day, nulls)
        if form == "tdD":
            return _masked(self._buffer(1, np.int32, n, self._at).astype("M8[D]"), nulls)
        if form == "b":
            first = self._at // 8
            bits = self._buffer(1, np.uint8, (self._at + n + 7) // 8 - first if n else 0, first)
            return _masked(
                np.unpackbits(bits, bitorder="little")[self._at - first * 8 :][:n].astype(bool),
                nulls,
            )
        if form == "n":
            return np.full(n, None, object)
        if form.startswith("+w:"):
            size = int(form[3:])
            inner = self._child(0, self._at * size, n * size).numpy()
            if inner.dtype != object:
                # Of lists of a fixed size in lists of a fixed size, each is an axis.
                shaped = inner.reshape(n, size, *inner.shape[1:])
                if nulls is None:
                    return shaped
                missing = nulls.reshape(n, *(1,) * (shaped.ndim - 1))
                return np.ma.MaskedArray(shaped, np.broadcast_to(missing, shaped.shape))
            parts = (_unmasked(inner[i * size : (i + 1) * size]) for i in range(n))
            return _objects(parts, n, nulls)
        if form.startswith("w:"):
            size = int(form[2:])
            raw = self._buffer(1, np.uint8, n * size, self._at * size).reshape(n, size)
            return _objects((row.data for row in raw), n, nulls)
        if form in ("z", "Z"):
            return _objects(self._bytes(), n, nulls)
        if form in ("u", "U"):
            return _objects((str(b, "utf-8") for b in self._bytes()), n, nulls)
        if form in ("vz", "vu"):
            made = self._views()
            return _objects(made if form == "vz" else (str(b, "utf-8") for b in made), n, nulls)
        if form in ("+vl", "+vL"):
            wide = np.int64 if form == "+vL" else np.int32
            begins = self._buffer(1, wide, n, self._at).tolist()
            sizes = self._buffer(2, wide, n, self._at).tolist()
            inner = self._child(0, 0, self._array.children[0].contents.length).numpy()
            views = (_unmasked(inner[b : b + s]) for b, s in zip(begins, sizes, strict=True))
            return _objects(views, n, nulls)
        if form.startswith("d:"):
            return _objects(self._decimals(), n, nulls)
        if form == "+m":
            offsets = self._offsets()
            entries = self._child(0, int(offsets[0]), int(offsets[-1] - offsets[0]))
            keys, values = (entries._child(i, entries._at, len(entries)).values() for i in range(2))
            pairs = list(zip(keys, values, strict=True))
            starts = (offsets - offsets[0]).tolist()
            return _objects((pairs[a:b] for a, b in pairwise(starts)), n, nulls)
        if form in ("+l", "+L"):
            offsets = self._offsets()
            inner = self._child(0, int(offsets[0]), int(offsets[-1] - offsets[0])).numpy()
            starts = (offsets - offsets[0]).tolist()
            return _objects((_unmasked(inner[a:b]) for a, b in pairwise(starts)), n, nulls)
        if form == "+s":
            fields = [self._child(i, self._at, n) for i in range(self._schema.n_children)]
            names, values = [f.name for f in fields], [f.values() for f in fields]
            rows = zip(*values, strict=True) if values else iter([()] * n)
            return _objects((dict(zip(names, row, strict=True)) for row in rows), n, nulls)
        if form in _INTERVALS:
            return _objects(self._intervals(), n, nulls)
        if form == "+r":
            return self._child_of(1).numpy()[self._runs()]
        if form.startswith("+u"):
            return _objects(self._of_union(), n, None)
        raise TypeError(
            f"column {self.name!r} has the Arrow format {form!r}, which this release does not read"
            " as Python values: use .arrow(), or leave the column out with columns="
        )

    def lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """A column of lists, flat: the items of all lists, where those of each begin (``int64``),
        and how many they are (``int64``). A missing list has none. None for other columns.
        """
        spans = self._spans()
        if spans is None:
            return None
        items, begins, counts = spans
        nulls = self.nulls()
        return items.numpy(), begins, counts if nulls is None else np.where(nulls, 0, counts)

    def _spans(self) -> tuple[Column, np.ndarray, np.ndarray] | None:
        form, n = self.format, self._length
        if self._schema.dictionary:
            return None
        if form in ("+l", "+L"):
            offsets = self._offsets().astype(np.int64)
            items = self._child(0, int(offsets[0]), int(offsets[-1] - offsets[0]))
            return items, offsets[:-1] - offsets[0], np.diff(offsets)
        if form.startswith("+w:"):
            size = int(form[3:])
            items = self._child(0, self._at * size, n * size)
            return items, np.arange(n, dtype=np.int64) * size, np.full(n, size, np.int64)
        if form in ("+vl", "+vL"):
            wide = np.int64 if form == "+vL" else np.int32
            begins = self._buffer(1, wide, n, self._at).astype(np.int64)
            return self._child_of(0), begins, self._buffer(2, wide, n, self._at).astype(np.int64)
        return None

    def values(self) -> list[Any]:
        """The values as Python objects: numbers, ``str``, ``memoryview``, arrays for lists, None
        where missing. Timestamps, dates, durations and times of day are ``datetime`` (with its
        zone, where the type has one), ``date``, ``timedelta`` and ``time``; NumPy's scalars where
        these cannot hold a value: nanoseconds that are not whole microseconds, years before 1 and
        after 9999.

        Raises:
            TypeError: As for :meth:`numpy`.
        """
        if self.format == "+r":
            of_runs = self._child_of(1).values()
            return [of_runs[run] for run in self._runs()]
        array = self.numpy()
        if array.dtype.kind in "mM" and array.ndim == 1:
            return self._times(array)
        if array.ndim == 1:
            return array.tolist()
        nulls = self.nulls()
        rows: list[Any] = list(map(_unmasked, array))
        return (
            rows if nulls is None else [None if n else r for n, r in zip(nulls, rows, strict=True)]
        )

    def _times(self, array: np.ndarray) -> list[Any]:
        form = (
            self._schema.dictionary.contents.format.decode()
            if self._schema.dictionary
            else self.format
        )
        data = np.ma.getdata(array)
        # Microseconds are what Python's types hold.
        exact: list[Any] = data.tolist()
        if np.datetime_data(data.dtype)[0] == "ns":
            exact = data.astype(data.dtype.str.replace("ns", "us")).tolist()
            nanoseconds = (data.view(np.int64) % 1000 != 0).tolist()
            exact = [None if odd else value for odd, value in zip(nanoseconds, exact, strict=True)]
        convert: Callable[[Any], Any] | None = None
        if (zone := self._zone()) is not None:
            convert = partial(_in_zone, zone)
        elif form.startswith("tt"):
            convert = _time_of_day
        elif form == "tdm":
            convert = datetime.date
        missing = np.ma.getmaskarray(array) if isinstance(array, np.ma.MaskedArray) else None
        out: list[Any] = []
        for i, value in enumerate(exact):
            if missing is not None and missing[i]:
                out.append(None)
            elif value is None or isinstance(value, int):
                out.append(data[i])
            else:
                try:
                    out.append(value if convert is None else convert(value))
                except (OverflowError, ValueError):
                    out.append(data[i])
        return out

    def plain(self) -> list[Any]:
        """The values as JSON has them, at any depth: lists for lists, lists of lists for tensors,
        for times their text (ISO 8601, with all digits that the type has where these are more
        than microseconds), and of columns of JSON what the texts say. What JSON has no type for is
        as in :meth:`values`.

        Raises:
            InvalidRequest: A tensor has another shape than its type says, or a text is not JSON.
        """
        nulls = self.nulls()
        found: list[Any]
        if (spans := self._spans()) is not None:
            of, begins, counts = spans
            items = of.plain()
            ends = (begins + counts).tolist()
            found = [items[a:b] for a, b in zip(begins.tolist(), ends, strict=True)]
            # One of fewer axes is a list.
            if (tensor := tensor_of(self._schema)) is not None and len(tensor.stored) > 1:
                is_there = [True] * len(found) if nulls is None else (~nulls).tolist()
                both = zip(found, is_there, strict=True)
                try:
                    found = [tensor.nested(value) if there else None for value, there in both]
                except ValueError as e:
                    raise InvalidRequest(
                        f"column {self.name!r} has a tensor of another shape than its type: {e}",
                        hint="mend the column, or cast it to its lists",
                    ) from e
        elif self.format == "+s" and not self._schema.dictionary:
            fields = [
                self._child(i, self._at, self._length) for i in range(self._schema.n_children)
            ]
            rows = zip(*(f.plain() for f in fields), strict=True) if fields else [()] * self._length
            names = [f.name for f in fields]
            found = [dict(zip(names, row, strict=True)) for row in rows]
        elif self.format == "+m" and not self._schema.dictionary:
            offsets = self._offsets()
            first, last = int(offsets[0]), int(offsets[-1])
            entries = self._child(0, first, last - first)
            parts = (entries._child(i, entries._at, len(entries)).plain() for i in range(2))
            pairs = [list(pair) for pair in zip(*parts, strict=True)]
            found = [pairs[a:b] for a, b in pairwise((offsets - first).tolist())]
        elif self.format == "+r":
            of_runs = self._child_of(1).plain()
            return [of_runs[run] for run in self._runs()]
        elif extension_of(self._schema) == JSON:
            told = f"column {self.name!r}"
            return [None if text is None else said_by(text, told) for text in self.values()]
        else:
            zone = "+00:00" if self._zone() is not None else ""
            return [_text_of_time(value, zone) for value in self.values()]
        if nulls is None:
            return found
        return [None if null else value for null, value in zip(nulls, found, strict=True)]

    def _zone(self) -> tzinfo | None:
        """The zone of a column of timestamps."""
        of = self._schema.dictionary.contents if self._schema.dictionary else self._schema
        form = of.format.decode()
        return _tz(form.partition(":")[2]) if form.startswith("ts") else None

    def _child_of(self, index: int) -> Column:
        """A child from end to end."""
        return self._child(index, 0, self._array.children[index].contents.length)

    def _runs(self) -> list[int]:
        """The run that each row belongs to, for runs that say which row each ends before."""
        rows = np.arange(self._at, self._at + self._length)
        runs: list[int] = np.searchsorted(self._child_of(0).numpy(), rows, "right").tolist()
        return runs

    def _of_union(self) -> Iterator[Any]:
        """Each value, which is one of the child that its type id names: in a sparse union in the
        row's own place, in a dense one where its offset says.
        """
        kind, _, ids = self.format.partition(":")
        child_of = {int(id): child for child, id in enumerate(ids.split(","))}
        children = [self._child_of(i).values() for i in range(self._schema.n_children)]
        types = self._buffer(0, np.int8, self._length, self._at).tolist()
        if kind == "+ud":
            places = self._buffer(1, np.int32, self._length, self._at).tolist()
        else:
            places = range(self._at, self._at + self._length)
        for of_type, place in zip(types, places, strict=True):
            yield children[child_of[of_type]][place]

    def _intervals(self) -> Iterator[Interval]:
        for value in self._buffer(1, _INTERVALS[self.format], self._length, self._at):
            of = dict(zip(value.dtype.names, value.tolist(), strict=True))
            nanoseconds = of.get("nanoseconds", 1_000_000 * of.get("milliseconds", 0))
            yield Interval(of.get("months", 0), of.get("days", 0), nanoseconds)

    def _views(self) -> Iterator[memoryview]:
        """The values of a column of views: 16 bytes each, of which the first four are the length;
        the value itself where it fits, else where it is.
        """
        views = self._buffer(1, np.uint8, 16 * self._length, 16 * self._at).reshape(-1, 16)
        words = views.view(np.int32)
        # The last buffer has the sizes of those between.
        data = self._array.n_buffers - 3
        sizes = (
            self._buffer(self._array.n_buffers - 1, np.int64, data, 0).tolist() if data > 0 else []
        )
        pieces = [self._buffer(2 + i, np.uint8, size, 0).data for i, size in enumerate(sizes)]
        for view, (length, _, piece, begin) in zip(views, words.tolist(), strict=True):
            if length <= 12:
                yield view[4 : 4 + max(0, length)].data
            else:
                yield pieces[piece][begin : begin + length]

    def _decimals(self) -> Iterator[Decimal]:
        """``d:precision,scale`` or ``d:precision,scale,bits``."""
        precision, scale, *bits = (int(n) for n in self.format[2:].split(","))
        width = (bits[0] if bits else 128) // 8
        raw = self._buffer(1, np.uint8, width * self._length, width * self._at).tobytes()
        context = Context(prec=max(precision, 1))
        for at in range(0, len(raw), width):
            unscaled = int.from_bytes(raw[at : at + width], "little", signed=True)
            yield Decimal(unscaled).scaleb(-scale, context)

    def _of_dictionary(self, nulls: np.ndarray | None) -> np.ndarray:
        codes = self._buffer(1, _FIXED[self.format], self._length, self._at)
        values = Column(
            self._schema.dictionary.contents, self._array.dictionary.contents, self._owner
        ).numpy()
        # In a struct that is missing, a code need not be one.
        if (beyond := (codes < 0) | (codes >= len(values))).any():
            nulls = beyond if nulls is None else nulls | beyond
        if nulls is None:
            return values[codes]
        out = (
            values[np.where(nulls, 0, codes)]
            if len(values)
            else np.full(self._length, None, object)
        )
        if out.dtype != object:
            return _masked(out, nulls)
        out[nulls] = None
        return out


def _in_zone(zone: tzinfo, utc: datetime) -> datetime:
    return utc.replace(tzinfo=UTC).astimezone(zone)


def _time_of_day(since_midnight: timedelta) -> time:
    return (datetime.min + since_midnight).time()


def _text_of_time(value: Any, zone: str) -> Any:
    """A time as text; anything else as it is. ``zone``: of what Python cannot hold, in UTC."""
    if isinstance(value, np.datetime64):
        return f"{np.datetime_as_string(value)}{zone}"
    if isinstance(value, np.timedelta64):
        seconds, rest = divmod(int(value.astype("m8[ns]").view(np.int64)), 1_000_000_000)
        minutes, second = divmod(seconds, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}.{rest:09}"
    return value.isoformat() if isinstance(value, date | time) else value


def _unmasked(part: np.ndarray) -> np.ndarray:
    """The items of one list: a plain array, where they are all there, whatever others lack."""
    if isinstance(part, np.ma.MaskedArray) and not np.ma.getmaskarray(part).any():
        return np.ma.getdata(part)
    return part


def _masked(values: np.ndarray, nulls: np.ndarray | None) -> np.ndarray:
    return values if nulls is None else np.ma.MaskedArray(values, nulls)


def _objects(values: Iterator[Any], count: int, nulls: np.ndarray | None) -> np.ndarray:
    out = np.empty(count, object)
    for i, value in enumerate(values):
        out[i] = value
    if nulls is not None:
        out[nulls] = None
    return out


def columns(batch: Any) -> dict[str, Column]:
    """The columns of anything with ``__arrow_c_array__`` that is a record batch, by name.

    Raises:
        TypeError: It is an array, not a batch.
    """
    known = getattr(batch, "columns_by_name", None)
    if known is not None:
        return dict(known())
    schema_capsule, array_capsule = batch.__arrow_c_array__()
    owner = (schema_capsule, array_capsule)
    schema = _Schema.from_address(_pointer_of(schema_capsule, b"arrow_schema"))
    array = _Array.from_address(_pointer_of(array_capsule, b"arrow_array"))
    if schema.format != b"+s":
        raise TypeError("this is an Arrow array, not a record batch")
    whole = Column(schema, array, owner)
    found = (whole._child(i, whole._at, array.length) for i in range(schema.n_children))
    return {column.name: column for column in found}
