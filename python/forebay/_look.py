"""A dataset as people look at it: a summary of its columns, a preview for notebooks, and its rows
as lines of text.

A summary is of some rows, spread evenly, and where footers of Parquet say more, of all of them.
Invariant: what is said to be of all rows is exact. Where a file says nothing, or says what the rows
that were looked at contradict, the figure is of those rows.
"""

from __future__ import annotations

import base64
import bisect
import html
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _footers
from ._arguments import whole_number
from ._expr import Bounds
from ._paced import Pace, paced, spread
from ._words import counted
from .errors import Error, InvalidRequest

if TYPE_CHECKING:
    from .dataset import Dataset
    from .rows import Rows

#: Rows that a description looks at, where not told, and bytes of them at most.
DESCRIBED_ROWS = 1000
DESCRIBED_BYTES = 64 << 20
#: Rows of one request of a description, at most.
DESCRIBED_TOGETHER = 64
#: Footers that a description reads, and bytes of them at most. Of more files, it is by rows alone.
DESCRIBED_FOOTERS, FOOTERS_BYTES = 1000, 64 << 20
#: The longest text that is told as the least or the greatest one, in characters; and how long those
#: of footers may be, in bytes: writers cut longer ones, and PyArrow does not tell whether they did.
RANGE_TEXT, RANGE_UNCUT_BYTES = 64, 15
#: Characters of such a text that fit into a table.
RANGE_SHOWN = 20
#: A preview: rows, characters of a text, bytes of one picture or sound, and of all of them.
PREVIEW_ROWS = 5
PREVIEW_TEXT = 200
PREVIEW_BYTES = 256 << 10
PREVIEW_ALL_BYTES = 1 << 20
#: A histogram: bins at most, and how they are drawn in one line.
BINS = 8
BARS = "▁▂▃▄▅▆▇█"
#: Members of tars that WebDataset takes for texts, and for whole numbers, by how their names end.
TEXTS = ("txt", "text", "transcript", "json", "jsn")
NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
#: The longest such number, in bytes.
NUMBER_BYTES = 32
#: How pictures and sounds begin. (RIFF is looked at further.)
KINDS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
)


#: Figures of a column.
FIGURES = ("nulls", "nans", "low", "high", "mean", "lengths")


@dataclass
class Column:
    """What is known of a column: by ``rows`` rows that were looked at, or of all rows of the
    dataset.

    Attributes:
        type: As Arrow names it.
        rows: How many rows were looked at.
        nulls: How many values are missing.
        nans: Of the others, how many are NaN. They count for nothing below.
        low, high: The least and the greatest value, or None: of numbers (of ``bool``, 0 and 1),
            decimals, dates and timestamps; and of texts, if both are short.
        mean: The mean of numbers, or None.
        lengths: Of texts (characters), bytes and lists: the shortest, mean and longest; or None.
        histogram: How these lengths are distributed: ``(from, to, rows)`` for each range of
            lengths, both ends included, the shortest first; 8 at most. Empty without lengths.
        of_all: Which of these figures are of all rows of the dataset, by their names: by the
            statistics of Parquet some of ``nulls``, ``low`` and ``high``; every one, if all rows
            were looked at.
    """

    type: str
    rows: int = 0
    nulls: int = 0
    nans: int = 0
    low: Any = None
    high: Any = None
    mean: float | None = None
    lengths: tuple[int, float, int] | None = None
    histogram: list[tuple[int, int, int]] = field(default_factory=list)
    of_all: tuple[str, ...] = ()


@dataclass
class Summary:
    """What :meth:`forebay.Dataset.describe` found out.

    Attributes:
        name: The dataset.
        rows: Its rows, and
        seen: how many of them were looked at.
        columns: What is known of each column, by name.
    """

    name: str
    rows: int
    seen: int
    columns: dict[str, Column] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """All of it, as a dict that ``json.dumps`` takes."""
        columns = {}
        for name, c in self.columns.items():
            lengths = None
            if c.lengths is not None:
                least, mean, most = c.lengths
                lengths = {
                    "least": least,
                    "mean": mean,
                    "most": most,
                    "histogram": [list(part) for part in c.histogram],
                }
            columns[name] = {
                "type": c.type,
                "rows": c.rows,
                "nulls": c.nulls,
                "nans": c.nans,
                "low": as_json(c.low),
                "high": as_json(c.high),
                "mean": as_json(c.mean),
                "lengths": lengths,
                "of_all": list(c.of_all),
            }
        return {"name": self.name, "rows": self.rows, "seen": self.seen, "columns": columns}

    def _table(self) -> list[list[str]]:
        table = [["column", "type", "nulls", "values", "lengths"]]
        for name, column in self.columns.items():
            parts = []
            if column.low is not None:
                between = f"{_end(column.low)} to {_end(column.high)}"
                parts.append(between + self._mark(column, "low"))
            if column.mean is not None:
                parts.append(f"mean {column.mean:.6g}")
            if column.nans:
                parts.append(f"{column.nans:,} NaN")
            lengths = ""
            if column.lengths is not None:
                least, mean, most = column.lengths
                lengths = f"{least:,} to {most:,}, mean {mean:,.1f}  {_bars(column.histogram)}"
            rows = self.rows if "nulls" in column.of_all else column.rows
            nulls = _share(column.nulls, rows) + self._mark(column, "nulls")
            table.append([name, column.type, nulls, ", ".join(parts), lengths])
        return table

    def _mark(self, column: Column, figure: str) -> str:
        """What is written behind a figure of all rows, where others are not."""
        return "*" if self.seen < self.rows and figure in column.of_all else ""

    def _seen(self) -> str:
        if self.seen == self.rows:
            return f"all {counted(self.rows, 'row')}"
        some = f"{self.seen:,} of {counted(self.rows, 'row')}, spread evenly"
        is_marked = any(column.of_all for column in self.columns.values())
        return f"{some}; * of all rows, by statistics" if is_marked else some

    def _lines(self) -> list[str]:
        table = [[one_line(cell) for cell in row] for row in self._table()]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]

    def __repr__(self) -> str:
        return "\n".join([f"{self.name}: {self._seen()}", *self._lines()])

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        return _table_html(
            f"{self.name}: {self._seen()}", head, [map(html.escape, r) for r in rows]
        )


def describe(of: Dataset[Any], rows: int | None) -> Summary:
    total = len(of)
    most = DESCRIBED_ROWS if rows is None else whole_number(rows)
    if most is None or most < 1:
        raise InvalidRequest(f"describe(rows={rows!r})", hint="give a number of rows above 0")
    wanted = min(total, most)
    ids = (np.arange(wanted, dtype=np.uint64) * np.uint64(total)) // np.uint64(max(wanted, 1))
    summary = Summary(of.name, total, 0, {n: Column(t) for n, t in of.schema.items()})
    values = {name: _Values() for name in summary.columns}
    received = 0
    for taken in paced(spread(ids), Pace(DESCRIBED_TOGETHER), lambda r: of._take(r, of._columns)):
        received += taken.nbytes
        summary.seen += len(taken)
        for row in taken:
            for name, column in summary.columns.items():
                values[name].add(column, row.get(name))
        if received > DESCRIBED_BYTES:
            break
    known = {} if summary.seen == total else _by_statistics(of)
    for name, column in summary.columns.items():
        seen = values[name]
        seen.tell(column)
        if summary.seen == total:
            column.of_all = FIGURES
        elif name in known:
            known[name].tell(column, seen, total)
    return summary


class _Values:
    """The values of a column that were looked at."""

    def __init__(self) -> None:
        self.total = 0.0
        self.low: Any = None
        self.high: Any = None
        self._is_ordered = True
        # Different lengths are few: d of them are at least d²/2 bytes, of which few were received.
        self._sizes: Counter[int] = Counter()

    def add(self, column: Column, value: Any) -> None:
        column.rows += 1
        if value is None:
            column.nulls += 1
            return
        if isinstance(value, (str, bytes, memoryview, np.ndarray, list)):
            self._sizes[value.nbytes if isinstance(value, memoryview) else len(value)] += 1
        is_number = isinstance(value, (int, float, np.integer, np.floating))
        if is_number and not isinstance(value, np.timedelta64):
            value = float(value) if isinstance(value, (float, np.floating)) else int(value)
            if value != value:
                column.nans += 1
                return
            self.total += value
        elif not isinstance(value, (Decimal, date, str)):
            # Times of NumPy, too: with one that Python's types cannot hold, no other is the least.
            self._is_ordered = False
        if not self._is_ordered:
            return
        try:
            self.low = value if self.low is None else min(self.low, value)
            self.high = value if self.high is None else max(self.high, value)
        except TypeError:
            # Values of a union.
            self._is_ordered = False

    def tell(self, column: Column) -> None:
        """Enters what they say."""
        if not self._is_ordered:
            self.low = self.high = None
        if isinstance(self.low, (int, float)):
            column.mean = self.total / (column.rows - column.nulls - column.nans)
        if not (isinstance(self.low, str) and max(len(self.low), len(self.high)) > RANGE_TEXT):
            column.low, column.high = _unsigned(self.low), _unsigned(self.high)
        if counts := self._sizes:
            total_size = sum(size * n for size, n in counts.items())
            column.lengths = (min(counts), total_size / counts.total(), max(counts))
            column.histogram = _histogram(counts)


def _unsigned(value: Any) -> Any:
    """A value, -0.0 as 0.0: which of the two is less is a matter of who looks."""
    return value + 0.0 if isinstance(value, float) else value


# What footers say of all rows.


class _Known:
    """What is known of a column in some files: how many values are missing, and the ends of the
    others.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.nulls: int | None = 0
        self.low: Any = None
        self.high: Any = None
        self._is_bounded = True

    def add(self, group: Bounds | None, rows: int) -> None:
        """Adds a row group."""
        if not rows:
            return
        nulls = None if group is None else group.nulls
        self.nulls = None if nulls is None or self.nulls is None else self.nulls + nulls
        if nulls != rows:
            low, high = (None, None) if group is None else (group.low, group.high)
            self._widen(_exact(low, self._kind), _exact(high, self._kind))

    def merge(self, other: _Known, times: int) -> None:
        """Adds what is known of other files, which are there so many times."""
        if self.nulls is None or other.nulls is None:
            self.nulls = None
        else:
            self.nulls += other.nulls * times
        if not other._is_bounded:
            self._is_bounded = False
        elif other.low is not None:
            self._widen(other.low, other.high)

    def _widen(self, low: Any, high: Any) -> None:
        if low is None or high is None or low > high:
            self._is_bounded = False
        if self._is_bounded:
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)

    def tell(self, column: Column, seen: _Values, rows: int) -> None:
        """Enters it, unless the rows that were looked at contradict it."""
        nulls = self.nulls
        if nulls is not None and column.nulls <= nulls <= rows - (column.rows - column.nulls):
            column.nulls = nulls
            column.of_all = ("nulls",)
        if not self._is_bounded or self.low is None:
            return
        try:
            if seen.low is None or self.low <= seen.low <= seen.high <= self.high:
                column.low, column.high = self.low, self.high
                column.of_all = (*column.of_all, "low", "high")
        except TypeError:
            # Times with and without a zone.
            pass


def _exact(value: Any, kind: str) -> Any:
    """An end of statistics as a value of a column of this type; None if it need not be one."""
    if hasattr(value, "to_pydatetime"):
        # PyArrow has nanoseconds as those of pandas, where that is there.
        value = None if value.nanosecond else value.to_pydatetime()
    if kind in ("Float32", "Float64") and type(value) in (int, float):
        return None if math.isnan(value) else _unsigned(float(value))
    if re.fullmatch(r"U?Int\d+", kind) and type(value) is int:
        return value
    if kind == "Boolean" and isinstance(value, bool):
        return int(value)
    if kind.startswith("Decimal") and isinstance(value, Decimal):
        return value
    if kind == "Date32" and type(value) is date:
        return value
    if kind.startswith("Timestamp") and isinstance(value, datetime):
        return value
    if kind in ("Utf8", "LargeUtf8", "Utf8View") and isinstance(value, str):
        return value if len(value.encode()) <= RANGE_UNCUT_BYTES else None
    return None


def _by_statistics(of: Dataset[Any]) -> dict[str, _Known]:
    """What the footers of all files say of each column. Nothing if rows are left out, if some file
    says nothing, or if there are more files than :data:`DESCRIBED_FOOTERS`.
    """
    from ._compose import whole

    bases, times = of._tree()[0], whole(of)
    left = DESCRIBED_FOOTERS
    if times is None:
        return {}
    schema = of.schema
    found = {name: _Known(kind) for name, kind in schema.items()}

    def known(groups: list[_footers.Group]) -> dict[str, _Known]:
        of_file = {name: _Known(kind) for name, kind in schema.items()}
        for rows, columns in groups:
            for name, column in of_file.items():
                column.add(columns.get(name), rows)
        return of_file

    for base, count in zip(bases, times, strict=True):
        if not count:
            continue
        answers = _footers.look(
            base, list(schema), known, files_max=left, bytes_max=FOOTERS_BYTES // len(bases)
        )
        if answers is None or None in answers:
            return {}
        left -= len(answers)
        for answer in answers:
            for name, column in (answer or {}).items():
                found[name].merge(column, count)
    return found


def _histogram(counts: Counter[int]) -> list[tuple[int, int, int]]:
    """``(from, to, rows)`` for ranges of lengths: equally wide where the longest is not many
    times the shortest; else each reaches so many times as far as the one before.
    """
    least, most = min(counts), max(counts)
    if most <= 16 * max(least, 1):
        width = -(-(most - least + 1) // BINS)
        bounds = list(range(least, most + 1, width))
    else:
        octaves = -(-(most.bit_length() - least.bit_length() + 1) // BINS)
        first = least.bit_length()
        later = range(first + octaves, most.bit_length() + 1, octaves)
        bounds = [least, *(1 << (bits - 1) for bits in later)]
    edges = [*bounds, most + 1]
    rows = [0] * len(bounds)
    for size, n in counts.items():
        rows[bisect.bisect_right(bounds, size) - 1] += n
    return [(edges[i], edges[i + 1] - 1, n) for i, n in enumerate(rows)]


def _end(value: Any) -> str:
    """The least or the greatest value, in a table."""
    if isinstance(value, int):
        return f"{value:d}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return repr(value if len(value) <= RANGE_SHOWN else f"{value[: RANGE_SHOWN - 1]}…")
    return str(value)


def _share(part: int, rows: int) -> str:
    """How many of rows: a percentage, or their number where that is next to none."""
    if not part:
        return "0"
    return f"{part / rows:.1%}" if part / rows >= 0.0005 else f"{part:,}"


def _bars(histogram: list[tuple[int, int, int]]) -> str:
    """A histogram in one line: a space where there are none, a bar of some height for any."""
    most = max((n for _, _, n in histogram), default=0)
    return "".join(BARS[-(-n * len(BARS) // most) - 1] if n else " " for _, _, n in histogram)


def preview(of: Dataset[Any]) -> str:
    """A small table of the first rows, as HTML. What comes from the data is escaped."""
    title = of.name
    head = [f"{name}: {kind}" for name, kind in of.schema.items()]
    try:
        title = of._title()
        rows = list(of._take(np.arange(min(PREVIEW_ROWS, len(of)), dtype=np.uint64), of._columns))
    except Error as e:
        return f"{_table_html(title, head, [])}<p>{html.escape(str(e))}</p>"
    left = [PREVIEW_ALL_BYTES]
    cells = [[_cell(value, left) for value in plain(of, row).values()] for row in rows]
    return _table_html(title, head, cells)


def preview_of_rows(rows: Rows) -> str:
    """A small table of the first of some rows, as HTML. What comes from the data is escaped.

    Rows do not say what files they are of: bytes are shown as what WebDataset takes them for, by
    the names of their columns.
    """
    left, names = [PREVIEW_ALL_BYTES], rows.columns
    shown = rows._first(PREVIEW_ROWS)
    cells = [
        ["" if n not in row else _cell(_member(n, row[n]), left) for n in names] for row in shown
    ]
    title = counted(len(rows), "row")
    if len(shown) < len(rows):
        title += f", of which the first {len(shown)}"
    return _table_html(title, names, cells)


def plain(of: Dataset[Any], row: Any) -> dict[str, Any]:
    """A row as it is shown: members of tars that WebDataset takes for texts or numbers as these."""
    if "tar" not in of.format.split(" + "):
        return dict(row)
    return {name: _member(name, value) for name, value in row.items()}


def _member(name: str, value: Any) -> Any:
    """A member of a tar as WebDataset takes it; as it is, if it is something else."""
    ending = name.rpartition(".")[2].lower()
    if not isinstance(value, (bytes, memoryview)):
        return value
    try:
        if ending in TEXTS:
            return str(value, "utf-8")
        if ending in NUMBERS and len(value) <= NUMBER_BYTES:
            return int(bytes(value))
    except ValueError:
        pass
    return value


def _table_html(title: str, head: Any, rows: Any) -> str:
    cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<p>{html.escape(title)}</p><table><thead><tr>{cells}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _cell(value: Any, left: list[int]) -> str:
    """A value as HTML; ``left`` holds the bytes that may still be embedded."""
    if value is None:
        return "<i>missing</i>"
    if isinstance(value, (bytes, memoryview)):
        data = memoryview(value)
        kind = _kind(bytes(data[:12]))
        if kind is None:
            return counted(data.nbytes, "byte")
        if data.nbytes > min(PREVIEW_BYTES, left[0]):
            return f"{kind}, {counted(data.nbytes, 'byte')}"
        left[0] -= data.nbytes
        uri = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if kind.startswith("image/"):
            return f'<img src="{uri}" style="max-width:160px;max-height:120px">'
        return f'<audio controls src="{uri}"></audio>'
    return html.escape(_text(value))


def _text(value: Any) -> str:
    """A value that is neither missing nor bytes, cut where it is long."""
    if isinstance(value, np.ndarray):
        with np.printoptions(threshold=8, edgeitems=3):
            text = f"{value.dtype}, shape {value.shape}: {value!s}"
    else:
        text = str(value)
    if len(text) > PREVIEW_TEXT:
        text = f"{text[:PREVIEW_TEXT]}… ({len(text):,} characters)"
    return text


def told(value: Any) -> str:
    """A value in one line of text: pictures and sounds by kind and size."""
    if value is None:
        return "missing"
    if isinstance(value, (bytes, memoryview)):
        data = memoryview(value)
        kind = _kind(bytes(data[:12]))
        size = counted(data.nbytes, "byte")
        return size if kind is None else f"{kind}, {size}"
    return one_line(_text(value))


def as_json(value: Any) -> Any:
    """A value as ``json.dumps`` takes it. Of bytes, kind and size; of long texts, lists and other
    values, their beginning.
    """
    if isinstance(value, np.generic):
        # Times that Python's types cannot hold would be numbers without a unit.
        value = str(value) if value.dtype.kind in "mM" else value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        # JSON has neither NaN nor infinities.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (bytes, memoryview)):
        data = memoryview(value)
        return {"kind": _kind(bytes(data[:12])), "bytes": data.nbytes}
    if isinstance(value, str):
        if len(value) <= PREVIEW_TEXT:
            return value
        return {"text": value[:PREVIEW_TEXT], "characters": len(value)}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "text": _text(value)}
    return _text(value)


def one_line(text: str) -> str:
    """What comes from data as one line, which cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _kind(head: bytes) -> str | None:
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(head[8:12])
    return next((kind for magic, kind in KINDS if head.startswith(magic)), None)
