"""Datasets: every sample has a row number.

::

    ds = forebay.open("s3://bucket/corpus/**.parquet", columns=["text"])
    len(ds), ds[123_456_789]["text"], ds.take([5, 3, 3]).numpy()
    for batch in ds.loader(batch_size=32, shuffle=forebay.Block(16), seed=1):
        ...

The node reads the footers, headers and directories of the files, once, and then knows where each
row is; this process holds only a few numbers for each block of rows. A dataset is a version: if
files change, it is another one.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from . import _node
from ._fetch import read
from ._forebay import Client, RecordBatch
from ._loadable import Loadable, S_co
from ._progress import Bar
from .errors import Changed, InvalidRequest, NotFound, PreconditionFailed
from .rows import Row, Rows

__all__ = ["Dataset", "Place", "open"]

#: Rows in one request, if a slice, an iteration or a column takes several.
REQUEST_ROWS = 4096
ITERATION_ROWS = 256
#: Requests in flight while a dataset is read from end to end.
AHEAD_REQUESTS = 3

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a row is.

    Attributes:
        file: ``"bucket/key"``.
        row_in_file: Its number there, from 0.
    """

    file: str
    row_in_file: int


@dataclass(frozen=True)
class File:
    """One file of a dataset: its ``name`` (``"bucket/key"``), its ``size`` in bytes, its ``rows``,
    and the ``etag`` of the version.
    """

    name: str
    size: int
    rows: int
    etag: str | None


@overload
def open(
    source: str | Sequence[str],
    *,
    client: Client | None = None,
    url: str | Sequence[str] | None = None,
    origin: str | Sequence[str] | None = None,
    cache: str | None = None,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    schema: Any = None,
    labels: str | dict[str, Any] | None = None,
    decode: None = None,
    example: bool = False,
    block_rows: int | None = None,
    on_damaged: str = "error",
    progress: bool | None = None,
) -> Dataset[Row]: ...
@overload
def open(
    source: str | Sequence[str],
    *,
    client: Client | None = None,
    url: str | Sequence[str] | None = None,
    origin: str | Sequence[str] | None = None,
    cache: str | None = None,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    schema: Any = None,
    labels: str | dict[str, Any] | None = None,
    decode: Callable[[dict[str, Any]], S],
    example: bool = False,
    block_rows: int | None = None,
    on_damaged: str = "error",
    progress: bool | None = None,
) -> Dataset[S]: ...
def open(
    source: str | Sequence[str],
    *,
    client: Client | None = None,
    url: str | Sequence[str] | None = None,
    origin: str | Sequence[str] | None = None,
    cache: str | None = None,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    schema: Any = None,
    labels: str | dict[str, Any] | None = None,
    decode: Callable[[dict[str, Any]], Any] | None = None,
    example: bool = False,
    block_rows: int | None = None,
    on_damaged: str = "error",
    progress: bool | None = None,
) -> Dataset[Any]:
    """Opens a dataset at a node.

    Args:
        source: Files: ``"bucket/key"`` (with or without ``s3://``), everything under a prefix
            (``"bucket/prefix/"``), a pattern (``"bucket/{000..127}.tar"``, ``"bucket/**.parquet"``,
            with ``*``, ``?``, ``[a-z]``, ``{a,b}``), ``"manifest:bucket/key"``; or a list of these.
            Rows are numbered in the order of the list, and within a pattern by name.
        client: The node. Default: ``Client(url, origin=origin, cache=cache)``, which is the one in
            ``FOREBAY_NODE`` if none of these is given.
        url, origin, cache: As for :class:`forebay.Client`.
        format: ``objects``, ``tar``, ``zip``, ``tfrecord``, ``parquet``, ``arrow-file``,
            ``arrow-stream`` or ``jsonl``. Default: as the names say.
        columns: Read only these. Default: all.
        schema: The columns and no others, each with its type: a ``pyarrow.Schema``, or a dict of
            names and types (``"int64"``, ``"list<item: float>"``, or types of pyarrow; ``"json"``
            takes any JSON value as text). A column that a file lacks is null; a value that does
            not fit its type is an error. ``{"json": "string"}`` takes the lines of JSONL as they
            are. Default: as the files say, with the wider type where numbers differ.
        labels: Whole objects only: a column ``label``. ``"path"``: the directory that the object is
            in (``"path:2"``: the one above); ``"bucket/labels.csv"``: a CSV or JSONL object with
            columns ``file`` and ``label``; a dict: as the node's API has it.
        decode: Makes a sample from a row (a dict), which ``ds[i]``, iteration and loaders then
            return. ``ds.take`` returns rows.
        example: TFRecord only: columns are the features of the ``tf.train.Example`` in each record.
        block_rows: Rows of a block, for formats without blocks of their own.
        on_damaged: ``"error"``: a file whose footer, headers or directory cannot be read fails the
            opening; ``"skip"``: it is left out (``ds.info["skipped"]`` names it).
        progress: Draw a line on the terminal while it takes long: files listed, then files whose
            footers, headers or directories were read. None: on terminals. The client's ``timeout``
            does not limit how long this takes, only how long the node may be silent.

    Raises:
        NotFound: No file matches, or one went away meanwhile.
        InvalidRequest: Files with different columns, of an unknown format, or a description that
            makes no sense.
        ServerError: A file is damaged (status 502, whatever its format); the message names it.
        Unsupported: A file is intact but uses something unsupported: encryption, a codec, a size
            over a limit.
    """
    given = [url is not None, origin is not None or cache is not None]
    if client is not None and any(given):
        raise InvalidRequest(
            "client= cannot be given together with url=, origin= or cache=",
            hint="the client already has its node",
        )
    if client is None:
        client = Client(url, origin=origin, cache=cache)
    sources = [source] if isinstance(source, str) else list(source)
    if not sources or not all(isinstance(s, str) for s in sources):
        raise TypeError(
            "source must be a str or a list of str: names, prefixes ending in /, patterns,"
            " or manifest:bucket/key"
        )
    spec: dict[str, Any] = {"sources": sources}
    if format is not None:
        spec["format"] = format
    if schema is not None:
        spec["schema"] = _named(schema)
    if labels is not None:
        spec["labels"] = _labels(labels)
    if example:
        spec["example"] = True
    if block_rows is not None:
        spec["block_rows"] = block_rows
    if on_damaged != "error":
        spec["on_damaged"] = on_damaged
    with Bar(f"opening {_shown(sources)}", unit="files", show=progress) as bar:

        def said(now: dict[str, Any]) -> None:
            to_index = now.get("to_index", 0)
            bar.to(now["indexed"] if to_index else now["listed"], to_index or None)

        info = _node.open_dataset(client, spec, said)
    return Dataset(client, spec, info, columns=columns, decode=decode)


def _named(schema: Any) -> dict[str, str]:
    """Names and types as the node reads them: pyarrow writes a type as its text."""
    if isinstance(schema, dict):
        return {name: str(kind) for name, kind in schema.items()}
    try:
        return {field.name: str(field.type) for field in schema}
    except AttributeError:
        raise TypeError("schema must be a dict of names and types, or a pyarrow.Schema") from None


def _labels(labels: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(labels, dict):
        return labels
    kind, colon, level = labels.partition(":")
    if kind == "path" and (not colon or level.isdigit()):
        return {"from": "path", "level": int(level or 1)}
    return {"from": "file", "name": labels.removeprefix("s3://")}


def _shown(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"


class Dataset(Loadable[S_co]):
    """Rows ``0`` to ``len(ds) - 1`` of a version of some files. Made by :func:`forebay.open`.

    ``ds[i]`` is one row, ``ds[10:20]`` and ``ds[[5, 3, 3]]`` are :class:`forebay.Rows` in one
    request; ``for row in ds`` goes from the first to the last. As a map-style dataset of PyTorch it
    answers a whole batch in one request (``__getitems__``).

    It can be pickled: DataLoader workers and other processes do not open it again.

    Attributes:
        client: The node that it is read through, or several.
        info: What the node said when it was opened.
    """

    def __init__(
        self,
        client: Client,
        spec: dict[str, Any],
        info: dict[str, Any],
        *,
        columns: Sequence[str] | None = None,
        decode: Callable[[dict[str, Any]], S_co] | None = None,
        shape: bytes | None = None,
    ) -> None:
        self.client, self.spec, self.info = client, spec, info
        self.decode = decode
        self._rows = int(info["rows"])
        self._shape = shape
        self._files: list[File] | None = None
        self._starts: list[int] = []
        self._columns = None if columns is None else self._known(columns)

    # What it is

    @property
    def id(self) -> str:
        """The version: equal for equal files and options, everywhere. If files change, it is
        another one.
        """
        return self.info["id"]

    version = id

    @property
    def name(self) -> str:
        """The description that it was opened with."""
        return _shown(self.spec["sources"])

    @property
    def format(self) -> str:
        """``parquet``, ``tar``, ``objects``, …"""
        return self.info["format"]

    @property
    def schema(self) -> dict[str, str]:
        """The type of each column that is read, as Arrow names it."""
        if self._columns is None:
            return _types(self.info["schema"])
        types = self._all_types()
        return {name: types[name] for name in self._columns}

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are read."""
        return list(self.schema)

    @property
    def chosen(self) -> list[str] | None:
        """The columns that were chosen; None for all."""
        return self._columns

    @property
    def shape(self) -> bytes:
        """Rows of each block, as the compiled plan reads it."""
        if self._shape is None:
            self._shape = self._of_node(lambda: _node.shape(self.client, self.id))
        return self._shape

    @property
    def files(self) -> list[File]:
        """The files, in the order of their rows."""
        if self._files is None:
            entries = self._of_node(lambda: _node.manifest(self.client, self.id))
            self._files = [
                File(e["name"], int(e["size"]), int(e["rows"]), e.get("etag")) for e in entries
            ]
            self._starts = [0, *itertools.accumulate(f.rows for f in self._files)]
        return self._files

    def locate(self, row: int) -> Place:
        """The file of a row, and its number there.

        Raises:
            IndexError: The row does not exist.
        """
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} does not exist: the dataset has {self._rows:,} rows")
        files = self.files
        at = bisect.bisect_right(self._starts, row) - 1
        return Place(files[at].name, row - self._starts[at])

    def _all_types(self) -> dict[str, str]:
        """The columns, and those that are read only where they are named: the lines of JSONL."""
        return _types(self.info["schema"]) | _types(self.info.get("besides", []))

    def _known(self, columns: Sequence[str]) -> list[str]:
        if isinstance(columns, str):
            columns = [columns]
        there = self._all_types()
        for name in columns:
            if name not in there:
                raise InvalidRequest(
                    f"{self.name} has no column {name!r}", hint=f"its columns: {', '.join(there)}"
                )
        if not columns:
            raise InvalidRequest(
                "columns is an empty list", hint="leave it out to read all columns"
            )
        return list(columns)

    def select(self, columns: Sequence[str]) -> Dataset[S_co]:
        """The same rows with fewer columns."""
        return Dataset(
            self.client,
            self.spec,
            self.info,
            columns=columns,
            decode=self.decode,
            shape=self._shape,
        )

    # Rows

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> RecordBatch:
        """These rows (``uint64``, each below ``len(ds)``) as one received Arrow record batch: one
        request.
        """
        columns = self._columns if columns is None else columns
        try:
            return self._of_node(lambda: _node.take(self.client, self.id, rows, columns))
        except PreconditionFailed as e:
            hint = (
                "open it again to use the new version; a state of the old one does not load into it"
            )
            raise Changed(e.message, hint=hint, status=e.status, request_id=e.request_id) from e

    def _of_node(self, ask: Callable[[], T]) -> T:
        """What the node says about this dataset. A node that does not know it (because it was
        restarted, or is not the one that it was opened at) is told to open it, and must find the
        same version.
        """
        for _ in range(self.client.nodes):
            try:
                return ask()
            except NotFound:
                pass
            # Either a file is gone, or the node does not know the dataset. Opening it again shows
            # which.
            again = self.open_at(self.client)
            if again["id"] != self.id:
                raise Changed(
                    f"{self.name} has changed: version {self.id} was opened, and the node"
                    f" now finds version {again['id']}",
                    hint="open it again to use the new version; a state of the old one does not"
                    " load into it",
                )
        return ask()

    def told(self) -> dict[str, Any]:
        """What a stream tells a node that does not know this dataset."""
        return _node.told(self.name, self.id, self.spec)

    def open_at(self, client: Client) -> dict[str, Any]:
        """Opens it at a node, whatever version it has there; returns what the node says."""
        return _node.open_dataset(client, self.spec)

    def take(self, rows: Any, columns: Sequence[str] | None = None) -> Rows:
        """Rows by their numbers, in this order; duplicates are allowed.

        Args:
            rows: A list, a range, or an array of whole numbers, from ``-len(ds)`` to ``len(ds) -
                1``.
            columns: Read only these.

        Raises:
            IndexError: A row does not exist.
            TypeError: These are not whole numbers.
        """
        ids = self._ids(rows)
        wanted = self._columns if columns is None else self._known(columns)
        if len(ids) <= REQUEST_ROWS:
            return read([self], wanted, ids, None)
        return self._take_many(ids, wanted)

    def _take_many(self, ids: np.ndarray, columns: Sequence[str] | None) -> Rows:
        pieces = [ids[i : i + REQUEST_ROWS] for i in range(0, len(ids), REQUEST_ROWS)]
        with ThreadPoolExecutor(AHEAD_REQUESTS, thread_name_prefix="forebay-take") as pool:
            parts = list(pool.map(lambda piece: self.read(piece, columns), pieces))
        at = np.arange(len(ids))
        return Rows(parts, ids, pick=np.stack([at // REQUEST_ROWS, at % REQUEST_ROWS], axis=1))

    def _ids(self, rows: Any) -> np.ndarray:
        given = np.asarray(rows)
        if given.size == 0:
            return np.empty(0, np.uint64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise TypeError(
                f"rows must be whole numbers in one dimension, not {given.dtype} of shape"
                f" {given.shape}"
            )
        low, high = int(given.min()), int(given.max())
        if low < -self._rows or high >= self._rows:
            raise IndexError(
                f"row {low if low < -self._rows else high} does not exist: the dataset has"
                f" {self._rows:,} rows"
            )
        if low < 0:
            given = given.astype(np.int64)
            given = np.where(given < 0, given + self._rows, given)
        return np.ascontiguousarray(given, np.uint64)

    def _sample(self, row: dict[str, Any]) -> S_co:
        # Without a decode, a sample is the row: a Row, for type checkers.
        return row if self.decode is None else self.decode(row)  # type: ignore[return-value]

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> S_co: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> Rows: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(range(*index.indices(self._rows)))
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._sample(self.take([index.__index__()])[0])
        return self.take(index)

    def __getitems__(self, rows: Sequence[int]) -> list[S_co]:
        """Samples by their numbers, in one request: what PyTorch's DataLoader asks for."""
        return [self._sample(row) for row in self.take(rows)]

    def __iter__(self) -> Iterator[S_co]:
        starts = range(0, self._rows, ITERATION_ROWS)
        with ThreadPoolExecutor(AHEAD_REQUESTS, thread_name_prefix="forebay-iterate") as pool:
            todo = (
                pool.submit(self.take, range(s, min(s + ITERATION_ROWS, self._rows)))
                for s in starts
            )
            waiting = list(itertools.islice(todo, AHEAD_REQUESTS))
            while waiting:
                rows = waiting.pop(0).result()
                waiting.extend(itertools.islice(todo, 1))
                for row in rows:
                    yield self._sample(row)

    def lengths(self, column: str, progress: bool | None = None) -> np.ndarray:
        """A column of whole numbers, for all rows: ``numpy.uint64`` of shape ``(len(ds),)``. Reads
        that column from end to end.

        Raises:
            TypeError: It does not consist of whole numbers, or some are missing or below 0.
        """
        (name,) = self._known([column])
        out = np.empty(self._rows, np.uint64)
        pieces = [
            (s, min(s + REQUEST_ROWS, self._rows)) for s in range(0, self._rows, REQUEST_ROWS)
        ]
        with (
            Bar(f"reading column {name}", self._rows, show=progress) as bar,
            ThreadPoolExecutor(AHEAD_REQUESTS) as pool,
        ):
            for (begin, end), rows in zip(
                pieces, pool.map(lambda p: self.take(range(*p), [name]), pieces), strict=True
            ):
                values = rows.numpy()[name]
                if (
                    values.dtype.kind not in "iu"
                    or isinstance(values, np.ma.MaskedArray)
                    or values.ndim != 1
                    or values.min(initial=0) < 0
                ):
                    raise TypeError(
                        f"column {name!r} of {self.name} does not hold lengths: whole"
                        " numbers of at least 0, none missing"
                    )
                out[begin:end] = values
                bar.advance(end - begin)
        return out

    def _sources(self) -> tuple[Sequence[Dataset[S_co]], None, None]:
        return [self], None, None

    def __reduce__(self) -> Any:
        return _rebuild, (
            self.client,
            self.spec,
            self.info,
            self._columns,
            self.decode,
            self._shape,
        )

    def __repr__(self) -> str:
        info = self.info
        size = _bytes(int(info.get("bytes", 0)))
        types = ", ".join(f"{name}: {kind}" for name, kind in self.schema.items())
        return (
            f"<forebay.Dataset {self.name}: {self._rows:,} rows in {int(info['blocks']):,}"
            f" blocks of {int(info['files']):,} {self.format} files,"
            f" {size}, version {self.id[:12]}; {types}>"
        )


def _rebuild(
    client: Client,
    spec: dict[str, Any],
    info: dict[str, Any],
    columns: Any,
    decode: Any,
    shape: bytes | None,
) -> Dataset[Any]:
    return Dataset(client, spec, info, columns=columns, decode=decode, shape=shape)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _types(schema: Any) -> dict[str, str]:
    fields = schema["fields"] if isinstance(schema, dict) else schema
    return {field["name"]: field["type"] for field in fields}
