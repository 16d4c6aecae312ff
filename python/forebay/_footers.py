"""What the footers of Parquet files say of columns, row group by row group, and what schemas say
besides types.

They are read through the node, several at a time, and no more of them than the caller's limit. They
only save reading: a footer that cannot be read or parsed, that is of another version than the
dataset, or that has other rows than the dataset has of the file, says nothing.
"""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ._arrow import FEATURES
from ._expr import Bounds
from ._fetch import UNSURE
from ._forebay import Client
from ._pools import Pool
from .errors import InvalidRequest

if TYPE_CHECKING:
    from .dataset import Dataset, File

#: Footers in flight.
REQUESTS = 16
#: What a file of Arrow begins with: a stream after its magic, and the stream with the schema.
ARROW_FILE_BYTES, ARROW_SCHEMA_BYTES = 8, 1 << 20
#: Types to which ``schema=`` may round what a file has.
FLOATS: dict[str, type] = {"Float16": np.float16, "Float32": np.float32}
log = logging.getLogger("forebay")
T = TypeVar("T")

#: A row group: its rows, and what is known of columns in it, by their names in the dataset.
Group = tuple[int, dict[str, Bounds]]


def look(
    of: Dataset[Any],
    columns: Sequence[str],
    each: Callable[[list[Group]], T],
    *,
    files_max: int,
    bytes_max: int | None = None,
) -> list[T | None] | None:
    """What ``each`` makes of the row groups of a file, for each file of a dataset as it was opened;
    None for a file whose footer says nothing. None at all where there are no footers, or more than
    ``files_max``.

    Columns that are cast have other values than the files, and lists, structs and maps have no
    statistics of their own: nothing is known of them. Where ``schema=`` makes smaller floats of a
    column, its ends are rounded as its values are.

    Args:
        bytes_max: Footers are read up to so many bytes, and those in flight then; the others say
            nothing.
    """
    if of.format != "parquet" or int(of.info["files"]) > files_max:
        return None
    try:
        import pyarrow.parquet as pq
    except ImportError:
        return None
    cast = {of.dressing.shown(name) for name, _ in of.dressing.casts}
    types = of._all_types()
    names, floats = {}, {}
    for name in columns:
        if name not in cast:
            names[name] = (of._at_node([name]) or [name])[0]
            if types[name] in FLOATS:
                floats[name] = FLOATS[types[name]]
    lock, received = threading.Lock(), 0

    def ask(file: File) -> T | None:
        nonlocal received
        if bytes_max is not None and received >= bytes_max:
            return None
        try:
            remote = _Remote(of.client, file)
            groups = _groups(pq.read_metadata(remote), names, floats)
            with lock:
                received += remote.received
            if sum(rows for rows, _ in groups) == file.rows:
                return each(groups)
            log.debug("the statistics of %s are of other rows", file.name)
        except Exception as e:
            log.debug("the statistics of %s are not used: %s", file.name, e)
        return None

    with Pool(REQUESTS, thread_name_prefix="forebay-footers") as pool:
        return list(pool.map(ask, of.files))


def metadata(of: Dataset[Any]) -> dict[bytes, bytes]:
    """What the schema of the first file of a dataset, as it was opened, says besides types; nothing
    where that is not known.

    Raises:
        forebay.Error: The node cannot be asked.
    """
    if of.format not in ("parquet", "arrow-file", "arrow-stream") or not of.files:
        return {}
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = of.files[0]
        if of.format == "parquet":
            found = pq.read_metadata(_Remote(of.client, file)).schema.to_arrow_schema().metadata
        else:
            head = _fetched(of.client, file, 0, min(file.size, ARROW_SCHEMA_BYTES))
            stream = head[ARROW_FILE_BYTES:] if head.startswith(b"ARROW1") else head
            found = pa.ipc.open_stream(stream).schema.metadata
    except UNSURE:
        raise
    except Exception as e:
        log.debug("what the schema of %s says is not used: %s", of.name, e)
        return {}
    return dict(found or {})


def features(datasets: Sequence[Dataset[Any]], columns: Collection[str]) -> bytes | None:
    """What Hugging Face's ``datasets`` wrote of these columns (classes, pictures, sounds) into the
    files of all datasets, in the form in which it reads it from a schema; None for nothing.

    Raises:
        forebay.Error: The node cannot be asked.
    """
    names = list(columns)
    said: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] | None = None
    for base in (base for dataset in datasets for base in dataset.made_of):
        if base.id not in said:
            said[base.id] = _said(base)
        in_file = zip(names, base._at_node(names) or [], strict=True)
        of = {name: said[base.id][old] for name, old in in_file if old in said[base.id]}
        found = of if found is None else {n: f for n, f in found.items() if of.get(n) == f}
        if not found:
            return None
    return json.dumps({"info": {"features": found}}).encode()


def _said(of: Dataset[Any]) -> dict[str, Any]:
    """What Hugging Face's ``datasets`` wrote of columns into the first file of a dataset."""
    try:
        info = json.loads(metadata(of).get(FEATURES, b"{}")).get("info") or {}
        return dict(info.get("features") or {})
    except (ValueError, TypeError, AttributeError) as e:
        log.debug("what datasets wrote into the files of %s is not used: %s", of.name, e)
        return {}


def _groups(footer: Any, names: dict[str, str], floats: dict[str, type]) -> list[Group]:
    """The row groups of a footer. ``names`` has the node's name of each column, and ``floats`` what
    those are rounded to that the file may have with more digits.
    """
    schema = [footer.schema.column(i) for i in range(footer.num_columns)]
    # Those that are values of rows, not of lists or structs in them.
    places = {
        column.path: i
        for i, column in enumerate(schema)
        if column.path == column.name and not column.max_repetition_level
    }
    nested = {
        name
        for name in names.values()
        if name not in places
        and any(c.path == name or c.path.startswith(f"{name}.") for c in schema)
    }
    found: list[Group] = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        known = {}
        for here, name in names.items():
            if name in places:
                at = places[name]
                bounds = _bounds(group.column(at), schema[at], group.num_rows)
                known[here] = _rounded(bounds, floats[here]) if here in floats else bounds
            elif name not in nested:
                # A file that lacks a column has only missing values of it.
                known[here] = Bounds(None, None, group.num_rows, group.num_rows)
        found.append((group.num_rows, known))
    return found


def _bounds(chunk: Any, column: Any, rows: int) -> Bounds:
    statistics = chunk.statistics
    # Whether a value may be missing at all, the schema says.
    nulls = None if column.max_definition_level else 0
    if statistics is None:
        return Bounds(None, None, nulls, rows)
    if nulls is None and statistics.has_null_count:
        nulls = statistics.null_count
    low = high = None
    # The order of INT96 is not defined.
    if statistics.has_min_max and chunk.physical_type != "INT96":
        try:
            low, high = statistics.min, statistics.max
        except (ArithmeticError, NotImplementedError, ValueError):
            # Python has no such value: a time after the year 9999.
            low = high = None
    return Bounds(low, high, nulls, rows)


def _rounded(bounds: Bounds, to: type) -> Bounds:
    """Ends of smaller floats: rounding keeps the order of values, so they are ends of those."""
    with np.errstate(over="ignore"):
        low, high = (
            float(to(end)) if isinstance(end, float) else end for end in (bounds.low, bounds.high)
        )
    return Bounds(low, high, bounds.nulls, bounds.rows)


def _fetched(client: Client, file: File, start: int, length: int) -> bytes:
    """A range of a file of the version that was opened."""
    got = client.get(file.name, start=start, length=length)
    versions = [tag.strip('"') for tag in (file.etag, got.etag) if tag is not None]
    if len(versions) == 2 and versions[0] != versions[1]:
        raise InvalidRequest(f"{file.name} has changed since the dataset was opened")
    return bytes(got)


class _Remote(io.RawIOBase):
    """An object as a file of which only the end is read."""

    #: Read at once: most footers fit.
    TAIL_BYTES = 64 << 10

    def __init__(self, client: Client, file: File) -> None:
        self._client, self._file, self._at = client, file, 0
        #: Bytes that were received.
        self.received = 0
        self._from = max(0, file.size - self.TAIL_BYTES)
        self._tail = self._get(self._from, file.size - self._from)

    def _get(self, start: int, length: int) -> bytes:
        got = _fetched(self._client, self._file, start, length)
        self.received += len(got)
        return got

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._file.size)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._file.size - self._at)
        if count <= 0:
            return 0
        if self._at >= self._from:
            data = self._tail[self._at - self._from :][:count]
        else:
            data = self._get(self._at, count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
