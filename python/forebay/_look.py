"""A dataset as people look at it: a summary of its columns, a preview for notebooks, and its rows
as lines of text.
"""

from __future__ import annotations

import base64
import bisect
import html
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Error, InvalidRequest

if TYPE_CHECKING:
    from .dataset import Dataset

#: Rows that a description looks at, where not told, and bytes of them at most.
DESCRIBED_ROWS = 1000
DESCRIBED_BYTES = 64 << 20
#: A preview: rows, characters of a text, bytes of one picture or sound, and of all of them.
PREVIEW_ROWS = 5
PREVIEW_TEXT = 200
PREVIEW_BYTES = 256 << 10
PREVIEW_ALL_BYTES = 1 << 20
#: A histogram: bins at most, and how they are drawn in one line.
BINS = 8
BARS = "▁▂▃▄▅▆▇█"
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


@dataclass
class Column:
    """What was seen of a column.

    Attributes:
        type: As Arrow names it.
        rows: How many rows were looked at, and
        nulls: how many of them are missing.
        nans: Of the others, how many are NaN. They count for nothing below.
        low, high: The least and greatest number, or None.
        mean: The mean of numbers, or None.
        lengths: Of texts (characters), bytes and lists: the shortest, mean and longest; or None.
        histogram: How these lengths are distributed: ``(from, to, rows)`` for each range of
            lengths, both ends included, the shortest first; 8 at most. Empty without lengths.
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


@dataclass
class Summary:
    """What :meth:`forebay.Dataset.describe` saw.

    Attributes:
        name: The dataset.
        rows: Its rows, and
        seen: how many of them were looked at.
        columns: What was seen of each column, by name.
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
            }
        return {"name": self.name, "rows": self.rows, "seen": self.seen, "columns": columns}

    def _table(self) -> list[list[str]]:
        table = [["column", "type", "nulls", "values", "lengths"]]
        for name, column in self.columns.items():
            values = lengths = ""
            if column.mean is not None:
                values = f"{column.low:.6g} to {column.high:.6g}, mean {column.mean:.6g}"
            if column.nans:
                values = f"{values}, {column.nans:,} NaN".removeprefix(", ")
            if column.lengths is not None:
                least, mean, most = column.lengths
                lengths = f"{least:,} to {most:,}, mean {mean:,.1f}  {_bars(column.histogram)}"
            share = f"{column.nulls / column.rows:.1%}" if column.rows and column.nulls else "0"
            table.append([name, column.type, share, values, lengths])
        return table

    def _seen(self) -> str:
        if self.seen == self.rows:
            return f"all {self.rows:,} rows"
        return f"{self.seen:,} of {self.rows:,} rows, spread evenly"

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
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise InvalidRequest(f"describe(rows={rows!r})", hint="give a number of rows above 0")
    wanted = min(total, DESCRIBED_ROWS if rows is None else rows)
    ids = (np.arange(wanted, dtype=np.uint64) * np.uint64(total)) // np.uint64(max(wanted, 1))
    # Row 0, the last one, … in an order in which any beginning is spread over all.
    summary = Summary(of.name, total, 0, {n: Column(t) for n, t in of.schema.items()})
    sums: dict[str, float] = dict.fromkeys(summary.columns, 0.0)
    # Different lengths are few: d of them are at least d²/2 bytes, of which few were received.
    sizes: dict[str, Counter[int]] = {name: Counter() for name in summary.columns}
    step = max(1, wanted // 64) if wanted > 64 else 1
    received = 0
    for at in range(step):
        if received > DESCRIBED_BYTES:
            break
        taken = of._take(np.ascontiguousarray(ids[at::step]), of._columns)
        received += taken.nbytes
        summary.seen += len(taken)
        for row in taken:
            for name, column in summary.columns.items():
                _add(column, row.get(name), sums, sizes, name)
    for name, column in summary.columns.items():
        values = column.rows - column.nulls - column.nans
        if values and column.low is not None:
            column.mean = sums[name] / values
        if counts := sizes[name]:
            total_size = sum(size * n for size, n in counts.items())
            column.lengths = (min(counts), total_size / counts.total(), max(counts))
            column.histogram = _histogram(counts)
    return summary


def _add(
    column: Column, value: Any, sums: dict[str, float], sizes: dict[str, Counter[int]], name: str
) -> None:
    column.rows += 1
    if value is None:
        column.nulls += 1
    elif isinstance(value, (int, float, np.integer, np.floating)):
        number = float(value) if isinstance(value, (float, np.floating)) else int(value)
        if number != number:
            column.nans += 1
            return
        column.low = number if column.low is None else min(column.low, number)
        column.high = number if column.high is None else max(column.high, number)
        sums[name] += number
    elif isinstance(value, (str, bytes, memoryview, np.ndarray, list)):
        sizes[name][value.nbytes if isinstance(value, memoryview) else len(value)] += 1


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


def _bars(histogram: list[tuple[int, int, int]]) -> str:
    """A histogram in one line: a space where there are none, a bar of some height for any."""
    most = max((n for _, _, n in histogram), default=0)
    return "".join(BARS[-(-n * len(BARS) // most) - 1] if n else " " for _, _, n in histogram)


def preview(of: Dataset[Any]) -> str:
    """A small table of the first rows, as HTML. What comes from the data is escaped."""
    title = f"{of.name}: {len(of):,} rows"
    head = [f"{name}: {kind}" for name, kind in of.schema.items()]
    try:
        rows = list(of._take(np.arange(min(PREVIEW_ROWS, len(of)), dtype=np.uint64), of._columns))
    except Error as e:
        return f"{_table_html(title, head, [])}<p>{html.escape(str(e))}</p>"
    left = [PREVIEW_ALL_BYTES]
    return _table_html(
        title, head, [[_cell(value, left) for value in row.values()] for row in rows]
    )


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
            return f"{data.nbytes:,} bytes"
        if data.nbytes > min(PREVIEW_BYTES, left[0]):
            return f"{kind}, {data.nbytes:,} bytes"
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
            text = f"{value.dtype}, shape {value.shape}: {np.array2string(value)}"
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
        size = f"{data.nbytes:,} bytes"
        return size if kind is None else f"{kind}, {size}"
    return one_line(_text(value))


def as_json(value: Any) -> Any:
    """A value as ``json.dumps`` takes it. Of bytes, kind and size; of long texts, lists and other
    values, their beginning.
    """
    if isinstance(value, np.generic):
        value = value.item()
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
