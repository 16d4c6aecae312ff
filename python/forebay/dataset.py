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
import contextlib
import itertools
import operator
import os
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from . import _node
from ._arguments import (
    called_by,
    check_client,
    check_function,
    column_names,
    columns_there,
    flag,
    flag_or_none,
    job_name,
    members,
    source_names,
    whole_number,
)
from ._collate import owned
from ._dress import Dressed, Dressing, cast, of_features, pyarrow, types_of
from ._elsewhere import OPEN, explained
from ._fetch import read_in_parts
from ._forebay import Client, RowSet
from ._loadable import Loadable, S_co
from ._paced import Pace
from ._pools import Pool, check_process
from ._progress import Bar
from ._words import counted, listed
from .errors import Changed, InvalidRequest, NotFound, PreconditionFailed
from .rows import Row, Rows
from .shuffle import Shuffle

if TYPE_CHECKING:
    import datasets

    from ._compose import TrainTest
    from ._expr import Expression
    from ._keys import Finder
    from ._look import Summary

__all__ = ["Dataset", "Place", "open"]

#: Rows in one request, if a slice, an iteration or a column takes several.
REQUEST_ROWS = 4096
ITERATION_ROWS = 256
#: Requests in flight while a dataset is read from end to end.
AHEAD_REQUESTS = 3

#: The most rows or tokens of a block.
BLOCK_MAX = (1 << 32) - 1
#: What a feature of ``tf.train.Example`` may become.
_ONE_FEATURE = ("int64", "float", "bytes", "string")
FEATURE_TYPES = (*_ONE_FEATURE, *(f"list<{kind}>" for kind in _ONE_FEATURE))
#: What :class:`Rows` have, and datasets have not.
ROWS_HAVE = frozenset(["arrow", "numpy", "plain", "torch"])
#: What the datasets of other libraries have, and what is in its place here.
ELSEWHERE = {
    "shuffle": "loader(batch_size, shuffle=forebay.Block(16), seed=1) has another order each epoch",
    "batch": "loader(batch_size) makes batches",
    "decode": "loader(batch_size, decode=function) makes samples of rows",
    "with_format": "loader(batch_size, output=) says what batches are",
    "set_format": "loader(batch_size, output=) says what batches are",
    "rename_column": 'rename({"old": "new"})',
    "rename_columns": 'rename({"old": "new"})',
    "remove_columns": "select_columns([...]) names the columns that stay",
    "drop_columns": "select_columns([...]) names the columns that stay",
    "cast_column": 'cast({"column": "int32"})',
    "with_transform": "map(function)",
    "set_transform": "map(function)",
    "add_column": "map(function)",
    "with_columns": "map(function)",
    "drop": "select_columns([...]) names the columns that stay",
    "iter": "loader(batch_size) makes batches",
    "iter_batches": "loader(batch_size) makes batches",
    "set_epoch": "a loader has it, and goes from epoch to epoch by itself",
    "limit": "take(n)",
    "tail": "a slice: ds[-5:]",
    "random_split": "train_test_split(test_size, seed)",
    "sort": "to_hf() makes a copy that has it",
    "unique": "to_hf() makes a copy that has it",
    "push_to_hub": "to_hf() makes a copy that has it",
    "to_csv": "to_hf() makes a copy that has it",
    "to_iterable_dataset": "to_hf_iterable()",
    "head": "take(5), which is a dataset, or take(range(5)), which are rows",
    "num_rows": "len(ds) is the number of its rows",
    "num_columns": "len(ds.columns) is their number",
    "shape": "len(ds) rows of len(ds.columns) columns",
    "column_names": "columns",
    "features": "schema",
    "to_pandas": "take(rows).arrow().to_pandas()",
    "to_polars": "take(rows).arrow(), which polars.DataFrame() takes",
    "to_list": "take(rows).plain()",
    "to_dict": "take(rows).numpy()",
    "save_to_disk": 'write("s3://bucket/prefix/")',
    "to_parquet": 'write("s3://bucket/prefix/")',
    "to_json": 'write("s3://bucket/prefix/", "jsonl")',
    "state_dict": "a loader has one: loader(batch_size).state_dict()",
    "load_state_dict": "a loader has it: loader(batch_size).load_state_dict(state)",
}
#: Those of them that loaders have: of shards, too.
LOADERS_HAVE = frozenset(
    [
        "batch",
        "decode",
        "iter",
        "iter_batches",
        "load_state_dict",
        "set_epoch",
        "set_format",
        "shuffle",
        "state_dict",
        "with_format",
    ]
)
#: What the types that hold values of these are called.
PYTHON_TYPES: dict[type, str] = {
    bool: "bool",
    bytes: "binary",
    float: "double",
    int: "int64",
    str: "string",
}

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

    def __str__(self) -> str:
        return f"row {self.row_in_file} of {self.file}"


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
    example: bool | Mapping[str, str] = False,
    block_rows: int | None = None,
    block_size: int | None = None,
    on_damaged: str = "error",
    progress: bool | None = None,
    job: str | None = None,
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
    example: bool | Mapping[str, str] = False,
    block_rows: int | None = None,
    block_size: int | None = None,
    on_damaged: str = "error",
    progress: bool | None = None,
    job: str | None = None,
) -> Dataset[S]: ...
@explained(OPEN)
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
    example: bool | Mapping[str, str] = False,
    block_rows: int | None = None,
    block_size: int | None = None,
    on_damaged: str = "error",
    progress: bool | None = None,
    job: str | None = None,
) -> Dataset[Any]:
    """Opens a dataset at a node.

    Args:
        source: Files: ``"bucket/key"`` (with or without ``s3://``), everything under a prefix
            (``"bucket/prefix/"``; alone, and where no object has that name, also without the
            slash), a pattern (``"bucket/{000..127}.tar"``, ``"bucket/**.parquet"``,
            with ``*``, ``?``, ``[a-z]``, ``{a,b}``), ``"manifest:bucket/key"``; or a list of these.
            Rows are numbered in the order of the list, and within a pattern by name. A file that is
            named several times is there once, at its first place (for its rows to come again:
            :meth:`Dataset.repeat`, :func:`concatenate`, or a weight in :func:`mix`).
        client: The node. Default: ``Client(url, origin=origin, cache=cache)``, which is the one in
            ``FOREBAY_NODE`` if none of these is given.
        url, origin, cache: As for :class:`forebay.Client`.
        format: ``objects``, ``tar``, ``zip``, ``tfrecord``, ``parquet``, ``arrow-file``,
            ``arrow-stream``, ``jsonl``, ``csv``, ``tsv``, ``mds``, ``megatron`` or ``litdata``.
            Default: as the names say.
        columns: Read only these. Default: all.
        schema: The columns and no others, each with its type: a ``pyarrow.Schema``, the
            ``Features`` of Hugging Face's ``datasets``, or a dict of names and types (``"int64"``,
            ``"list<item: float>"``, or types of pyarrow; ``"json"`` takes any JSON value as text).
            A column that a file lacks is null; a value that does not fit its type is an error.
            ``{"json": "string"}`` takes the lines of JSONL as they are. Default: as the files say,
            with the wider type where numbers differ.
        labels: Whole objects only: a column ``label``. ``"path"``: the directory that the object is
            in (``"path:2"``: the one above); ``"bucket/labels.csv"``: a CSV or JSONL object with
            columns ``file`` and ``label``; a dict: as the node's API has it.
        decode: Makes a sample from a row (a dict), which ``ds[i]``, iteration and loaders then
            return. ``ds.take`` returns rows.
        example: TFRecord only: columns are the features of the ``tf.train.Example`` in each record.
            True: as lists, and only those that the first records of the first file have. A dict:
            these and no others, each with what it becomes (``{"label": "int64", "image": "bytes",
            "tags": "list<string>"}``: ``int64``, ``float``, ``bytes``, ``string``, or a list of
            one); a feature that a record lacks is null.
        block_rows: Rows of a block, for formats without blocks of their own: not Parquet and Arrow.
        block_size: litData's tokens only: each row is so many tokens of a chunk, as litData's
            ``TokensLoader(block_size)`` gives them; what remains at the end of a chunk is in no
            row. Default: each item is a row.
        on_damaged: ``"error"``: a file whose footer, headers or directory cannot be read fails the
            opening; ``"skip"``: it is left out (``ds.info["skipped"]`` names it).
        progress: Draw a line on the terminal while it takes long: files listed, then files whose
            footers, headers or directories were read. None: on terminals. The client's ``timeout``
            does not limit how long this takes, only how long the node may be silent.
        job: On whose account is what the node reads for it, as for :meth:`Dataset.loader`
            (``forebay report`` shows it). Default: ``FOREBAY_JOB``; without one, it is on no job's.

    Raises:
        NotFound: No file matches, or one went away meanwhile.
        InvalidRequest: Files with different columns, with several columns of one name, of an
            unknown format, or a description that makes no sense.
        Damaged: A file is damaged (status 502, whatever its format); the message names it.
        Unsupported: A file is intact but uses something unsupported: encryption, a codec, a size
            over a limit.
    """
    if client is not None and any(o is not None for o in (url, origin, cache)):
        raise InvalidRequest(
            "client= cannot be given together with url=, origin= or cache=",
            hint="the client already has its node",
        )
    if client is None:
        client = Client(url, origin=origin, cache=cache)
    check_client(client)
    sources = source_names(source)
    check_function("decode", decode)
    progress = flag_or_none("progress", progress)
    job = job_name(job)
    spec: dict[str, Any] = {"sources": sources}
    if format is not None:
        spec["format"] = format
    if schema is not None:
        spec["schema"] = _named(schema)
    if labels is not None:
        spec["labels"] = _labels(labels)
    if isinstance(example, Mapping):
        spec["example"] = _features(example)
    elif flag("example", example):
        spec["example"] = True
    for name, given in (("block_rows", block_rows), ("block_size", block_size)):
        if given is not None:
            spec[name] = _of_block(name, given)
    if on_damaged not in ("error", "skip"):
        raise InvalidRequest(f"on_damaged is {on_damaged!r}", hint='give "error" or "skip"')
    if on_damaged != "error":
        spec["on_damaged"] = on_damaged
    with Bar(f"opening {_shown(sources)}", unit="files", show=progress) as bar:

        def said(now: dict[str, Any]) -> None:
            to_index = now.get("to_index", 0)
            bar.to(now["indexed"] if to_index else now["listed"], to_index or None)

        with _node.works_for(job):
            spec, info = _node.open_sources(client, spec, said)
    names = Counter(field["name"] for field in _fields(info["schema"]))
    if twice := [name for name, count in names.items() if count > 1]:
        raise InvalidRequest(
            f"the files of {_shown(sources)} have more than one column {twice[0]!r}",
            hint="name the columns to read and their types in schema=, which takes the first of a"
            " name",
        )
    return Dataset(client, spec, info, columns=columns, decode=decode)


def _of_block(name: str, given: Any) -> int:
    """Rows or tokens of a block."""
    number = whole_number(given)
    if number is None or not 1 <= number <= BLOCK_MAX:
        raise InvalidRequest(
            f"{name} is {given!r}", hint=f"give a whole number from 1 to {BLOCK_MAX:,}"
        )
    return number


def _named(schema: Any) -> dict[str, str]:
    """Names and types as the node reads them: pyarrow writes a type as its text."""
    schema = of_features(schema)
    if isinstance(schema, dict):
        for name, kind in schema.items():
            if isinstance(kind, type):
                instead = PYTHON_TYPES.get(kind, "int64")
                raise TypeError(
                    f'schema={{{name!r}: {kind.__name__}}}: give types by name, as in "{instead}",'
                    " or those of pyarrow"
                )
        return {name: str(kind) for name, kind in schema.items()}
    try:
        return {field.name: str(field.type) for field in schema}
    except AttributeError:
        raise TypeError(
            "schema must be a dict of names and types, a pyarrow.Schema, or Features of datasets"
        ) from None


def _features(given: Mapping[str, str]) -> dict[str, str]:
    """What features of ``tf.train.Example`` become, by their names."""
    if not given or not all(isinstance(name, str) for name in given):
        raise InvalidRequest(
            f"example is {dict(given)!r}",
            hint='names of features, each with what it becomes, as in {"image": "bytes"}',
        )
    for name, kind in given.items():
        if kind not in FEATURE_TYPES:
            raise InvalidRequest(
                f"example: feature {name!r} is {kind!r}", hint=f"one of {', '.join(FEATURE_TYPES)}"
            )
    return dict(given)


def _labels(labels: str | dict[str, Any]) -> dict[str, Any]:
    forms = '"path", "path:2", "bucket/labels.csv", or a dict with "from" as in the node\'s API'
    if isinstance(labels, dict):
        if "from" not in labels:
            raise InvalidRequest(f"labels is {labels!r}", hint=f"give {forms}")
        return labels
    if not isinstance(labels, str):
        raise TypeError(f"labels must be {forms}, not {labels!r}")
    kind, colon, level = labels.partition(":")
    if kind == "path" and (not colon or level.isdigit()):
        return {"from": "path", "level": int(level or 1)}
    return {"from": "file", "name": labels.removeprefix("s3://")}


def _shown(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"


class Dataset(Loadable[S_co]):
    """Rows ``0`` to ``len(ds) - 1`` of a version of some files. Made by :func:`forebay.open`.

    ``ds[i]`` is one row, ``ds[[5, 3, 3]]`` are :class:`forebay.Rows` in one request, and
    ``ds[10:20]`` is a dataset of these rows, of which nothing is read yet (``ds.take(range(10,
    20))`` reads them); ``for row in ds`` goes from the first to the last. As a map-style dataset of
    PyTorch it answers a whole batch in one request (``__getitems__``). What brackets give has
    ``bytes`` in columns of bytes, of which DataLoader makes no lists of numbers and which its
    workers can send; :meth:`take` and loops give views of the received memory. A dataset does not
    derive from PyTorch's class, so type checkers want
    ``DataLoader(typing.cast("torch.utils.data.Dataset[Any]", ds))``.

    It can be pickled: DataLoader workers and other processes do not open it again.

    Attributes:
        client: The node that it is read through, or several.
        info: What the node said when it was opened.
        decoder: What makes a sample of a row (``decode=``), or None.
        maps: What is applied to each sample after that (:meth:`map`).
    """

    #: Whether its rows are others than those of one opened dataset.
    is_composed = False

    @property
    def is_pending(self) -> bool:
        """Whether its rows are not known yet: those that a :meth:`filter` by an expression
        leaves.
        """
        return False

    def __init__(
        self,
        client: Client,
        spec: dict[str, Any],
        info: dict[str, Any],
        *,
        columns: Sequence[str] | None = None,
        decode: Callable[[dict[str, Any]], S_co] | None = None,
        shape: bytes | None = None,
        dressing: Dressing | None = None,
        maps: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self.client, self.spec, self.info = client, spec, info
        self.decoder, self.maps = decode, tuple(maps)
        #: What is done to columns after they were received.
        self.dressing = dressing or Dressing()
        self._rows = int(info["rows"])
        self._shape = shape
        self._files: list[File] | None = None
        self._starts: list[int] = []
        #: Indexes of keys that were used, by column.
        self._keys: dict[str, Finder] = {}
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
            return self._dressed_types(_types(self.info["schema"]))
        types = self._all_types()
        return {name: types[name] for name in self._columns}

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are read."""
        return list(self.schema)

    @property
    def chosen(self) -> list[str] | None:
        """The columns that were chosen, by the names that the node knows; None for all."""
        return self._at_node(self._columns)

    @property
    def made_of(self) -> Sequence[Dataset[Any]]:
        """The datasets, as they were opened, that its rows are rows of."""
        return [self]

    @property
    def steps(self) -> list[str]:
        """What was opened, and what was done to it: :meth:`select`, :meth:`shard`, …"""
        return [f"{self.name} version {self.id[:12]}"]

    @property
    def block_shape(self) -> bytes:
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
        row = self._row_there(row)
        files = self.files
        at = bisect.bisect_right(self._starts, row) - 1
        return Place(files[at].name, row - self._starts[at])

    def _row_there(self, row: Any) -> int:
        """The number of a row, which is there."""
        number = whole_number(row)
        if number is None:
            raise TypeError(f"locate takes the number of a row, not {row!r}")
        if not 0 <= number < len(self):
            raise IndexError(
                f"row {number} does not exist: the dataset has {counted(len(self), 'row')}"
            )
        return number

    def _all_types(self) -> dict[str, str]:
        """The columns, and those that are read only where they are named: the lines of JSONL."""
        return self._dressed_types(self._types_at_node())

    def _types_at_node(self) -> dict[str, str]:
        return _types(self.info["schema"]) | _types(self.info.get("besides", []))

    def _dressed_types(self, types: dict[str, str]) -> dict[str, str]:
        dressing = self.dressing
        return {dressing.shown(n): dressing.type_of(n, kind) for n, kind in types.items()}

    def _known(self, columns: Sequence[str]) -> list[str]:
        """These columns, which are there."""
        columns = column_names(columns)
        there = self._all_types()
        for name in columns:
            if name not in there:
                raise InvalidRequest(
                    f"{self.name} has no column {name!r}", hint=columns_there(name, there)
                )
        if not columns:
            raise InvalidRequest(
                "columns is an empty list", hint="leave it out to read all columns"
            )
        return columns

    def _at_node(self, columns: Sequence[str] | None) -> list[str] | None:
        """The names that the node knows columns by; None for all."""
        if columns is None:
            return None
        names = {here: name for name, here in self.dressing.names}
        return [names.get(name, name) for name in columns]

    def _looks(self) -> list[str]:
        """What was done to its columns and samples, as text: :meth:`rename`, :meth:`cast`,
        :meth:`map`.
        """
        names = [f"rename {old} to {new}" for old, new in self.dressing.names]
        casts = [f"cast {name} to {to}" for name, to in self.dressing.casts]
        return [*names, *casts, *(f"map {called_by(function)[1]}" for function in self.maps)]

    def _empty(self, columns: Sequence[str]) -> Any:
        """No rows, with these columns."""
        return self.read(np.empty(0, np.uint64), columns)

    def _columns_key(self) -> Any:
        """Which columns of which types its names stand for, as JSON."""
        return [list(self.dressing.names), [[n, str(to)] for n, to in self.dressing.casts]]

    def _changed(self, **changes: Any) -> Dataset[Any]:
        """The same rows, read or made into samples in another way."""
        given: dict[str, Any] = {
            "decode": self.decoder,
            "shape": self._shape,
            "dressing": self.dressing,
            "maps": self.maps,
        }
        columns = changes.pop("columns", self._columns)
        made: Dataset[Any] = Dataset(self.client, self.spec, self.info, **{**given, **changes})
        made._columns = columns
        return made

    def _filtered(self, sets: Sequence[RowSet]) -> RowSet:
        """The rows whose row of a dataset that this is made of is in that dataset's set."""
        return sets[0]

    def _first_of(self, source: int, rows: np.ndarray) -> np.ndarray:
        """For each row of a dataset that this is made of (by its number among these) the first row
        that is this one; ``2**64 - 1`` for none.
        """
        return rows

    def _tree(self) -> tuple[list[Dataset[Any]], dict[str, Any], list[Any], list[str]]:
        """The datasets that it is made of, how, of which pieces, and that as text."""
        plain = self._changed(decode=None, maps=()) if self.decoder or self.maps else self
        return [plain], {"base": 0}, [], self.steps

    # Other datasets of it. Nothing is read for them, except to compute filters.

    def select(self, rows_or_columns: Any) -> Dataset[S_co]:
        """Some of the rows, or the same rows with fewer columns.

        Args:
            rows_or_columns: Rows: a ``range``, a ``slice``, a list or an array of row numbers (in
                any order, also several times; from ``-len(ds)`` to ``len(ds) - 1``), or a list
                or an array of ``bool`` with one for each row. Columns: a list of names.

        Raises:
            IndexError: A row does not exist.
            InvalidRequest: A column does not exist; or an empty list, which could be either.
            TypeError: It is none of these.
        """
        from ._compose import picked, ranged

        given = rows_or_columns
        if isinstance(given, str):
            return self.select_columns(given)
        if isinstance(given, slice):
            return ranged(self, range(*given.indices(len(self))))
        if isinstance(given, range):
            return ranged(self, self._range(given))
        if isinstance(given, (bytes, dict)) or not isinstance(given, Iterable):
            raise TypeError(f"select takes row numbers, a mask or names of columns, not {given!r}")
        if not isinstance(given, np.ndarray) and hasattr(given, "__array__"):
            array = np.asarray(given)
            # Names of columns are taken below.
            given = array if array.dtype.kind in "biu" else given
        if not isinstance(given, np.ndarray):
            given = list(given)
            if all(isinstance(name, str) for name in given):
                if not given:
                    raise InvalidRequest(
                        "an empty list selects neither rows nor columns",
                        hint="select(range(0)) has no rows, and columns cannot be none",
                    )
                return self.select_columns(given)
            if all(isinstance(row, (bool, np.bool_)) for row in given):
                given = np.array(given)
            elif any(isinstance(row, (str, bool)) for row in given):
                raise TypeError("select takes row numbers, a mask or names of columns: one of them")
        if isinstance(given, np.ndarray) and given.dtype == bool:
            if given.shape != (len(self),):
                raise InvalidRequest(
                    f"a mask of shape {given.shape} for {counted(len(self), 'row')}",
                    hint="give one bool for each row",
                )
            given = np.flatnonzero(given)
        return picked(self, self._ids(given))

    def select_columns(self, columns: Sequence[str] | str) -> Dataset[S_co]:
        """The same rows with fewer columns.

        Raises:
            InvalidRequest: A column does not exist.
        """
        return self._changed(columns=self._known(columns))

    def skip(self, n: int) -> Dataset[S_co]:
        """The rows after the first ``n``; none if there are not more."""
        from ._compose import ranged

        return ranged(self, range(min(_count("skip", n), len(self)), len(self)))

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Dataset[S_co]:
        """One of ``num_shards`` parts of nearly equal size that together are all rows, as
        ``datasets`` divides them.

        For the ranks of a training job this is not needed: :meth:`loader` deals its order out to
        them, and a job resumes with another number of them.

        Args:
            num_shards: How many parts there are.
            index: Which of them, from 0.
            contiguous: Rows that follow each other; False: every ``num_shards``-th row.
        """
        from ._compose import sharded

        return sharded(self, num_shards, index, contiguous)

    def train_test_split(self, test_size: float, seed: int = 0) -> TrainTest[Dataset[Any]]:
        """Two parts: ``train, test = ds.train_test_split(0.1, seed=1)``. Each alone:
        ``ds.train_test_split(0.1, seed=1)["train"]``, or ``.train``.

        The test part is drawn at random, evenly over the stored order: 256 rows that follow each
        other give their share of it, as nearly as whole rows can. Both parts keep the stored order,
        so that shuffles of blocks read whole blocks. Nothing is kept for each row.

        Args:
            test_size: A part (0.1; rounded up to whole rows) or a number of rows.
            seed: The same seed, rows and size give the same parts, everywhere.

        Raises:
            InvalidRequest: A part would have no rows.
        """
        from ._compose import split

        return split(self, test_size, seed)

    def repeat(self, times: int) -> Dataset[S_co]:
        """The same rows ``times`` times, one time after the other."""
        from ._compose import repeated

        return repeated(self, times)

    def rename(self, names: dict[str, str]) -> Dataset[S_co]:
        """The same rows with other names of columns: ``ds.rename({"old": "new"})``.

        Raises:
            InvalidRequest: A column does not exist, or two would have the same name.
        """
        if not isinstance(names, dict):
            raise TypeError('rename takes a dict: {"old": "new"}')
        there = self._all_types()
        if names:
            self._known(list(names))
        if not all(isinstance(name, str) and name for name in names.values()):
            raise InvalidRequest(
                "the new names must be texts that are not empty",
                hint=f"its columns: {listed(there)}",
            )
        after = Counter(names.get(name, name) for name in there)
        if twice := [name for name, count in after.items() if count > 1]:
            raise InvalidRequest(
                f"after renaming, {self.name} would have more than one column {twice[0]!r}",
                hint=f"its columns: {listed(there)}",
            )
        inner = {here: name for name, here in self.dressing.names}
        renamed = {inner.get(old, old): new for old, new in names.items()}
        merged = {**dict(self.dressing.names), **renamed}
        kept = tuple(sorted((a, b) for a, b in merged.items() if a != b))
        columns = self._columns and [names.get(name, name) for name in self._columns]
        return self._changed(columns=columns, dressing=Dressing(kept, self.dressing.casts))

    def cast(self, schema: Any) -> Dataset[S_co]:
        """The same rows with some columns of other types, converted as they arrive. Needs PyArrow.

        Args:
            schema: A dict of names and types (``"int32"``, ``"timestamp[us, tz=UTC]"``, or types of
                PyArrow), a ``pyarrow.Schema``, or the ``Features`` of Hugging Face's ``datasets``.
                Other columns stay as they are.

        Raises:
            InvalidRequest: A column does not exist, or there is no conversion between its type and
                the other. When rows are read: a value does not fit the type.
        """
        types = types_of(schema)
        if not types:
            return self
        names = self._known(list(types))
        pa = pyarrow("ds.cast(…)")
        empty = pa.record_batch(self.read(np.empty(0, np.uint64), names))
        for column, (name, to) in zip(empty.columns, types.items(), strict=True):
            cast(column, to, name, self.name)
        casts = zip(self._at_node(names) or [], types.values(), strict=True)
        # By column: the order counts among those of one column only.
        ordered = sorted((*self.dressing.casts, *casts), key=lambda column_to: column_to[0])
        return self._changed(dressing=Dressing(self.dressing.names, tuple(ordered)))

    def map(self, function: Callable[[S_co], T]) -> Dataset[T]:
        """The same rows as other samples: ``function`` is applied to each, after ``decode`` and
        earlier maps, where the sample is made (in the threads or workers of a loader).

        It does not change which row comes when. A state of a loader knows functions by their
        names, and loads into one with others only with ``strict=False``. ``take`` still returns
        rows.
        """
        if not callable(function):
            raise TypeError("map takes a function of one sample")
        return self._changed(maps=(*self.maps, function))

    def filter(
        self,
        where: Expression | Callable[[S_co], Any],
        *,
        name: str | None = None,
        columns: Sequence[str] | None = None,
        threads: int | None = None,
        progress: bool | None = None,
    ) -> Dataset[S_co]:
        """The rows for which something is true, in their order.

        ::

            english = ds.filter((forebay.col("lang") == "en") & (forebay.col("tokens") >= 512))
            long = ds.filter(lambda row: len(row["text"].split()) > 100, name="long-100")

        Which rows these are is found out once: for a function at once, and for an expression when
        it is first needed (``len``, a row, a loader, another operation on rows). It is kept in
        ``~/.cache/forebay`` (or ``$XDG_CACHE_HOME/forebay``) under this version of the dataset and
        the expression or name:
        the next process reads it from there, and DataLoader workers get it by pickle. It takes two
        bytes for each row that is left, or less. The node finds it out for an expression, and keeps
        it too: for other machines, and for whoever asks while it is being found out. A column that
        was cast has its values only here, so such an expression is evaluated here.

        Args:
            where: An expression over columns (:func:`forebay.col`), which reads only these columns,
                and of Parquet no row groups, pages or values that statistics, indexes of pages and
                bloom filters decide; needs PyArrow. A row for which
                it is neither true nor false, because a value is missing, is left out. Or a function
                of a sample (what ``ds[i]`` is), which is called once for each row.
            name: Of a function: what its result is kept under, together with the columns that the
                function is given and the names of ``decode`` and maps before it. **Another function
                needs another name**, and so does one that is given the results of another
                ``decode`` or map of the same name; nobody can see that a function has changed.
            columns: Of a function: read only these for it. The result has all columns.
            threads: Of a function: in how many threads it runs. Default: up to 4.
            progress: Draw a line on the terminal. None: on terminals.

        Raises:
            InvalidRequest: A column does not exist or does not compare with the value: at once,
                before anything is read. Or a function without a name.
            SampleFailed: The function raised an exception; names the row. Nothing is kept then.
        """
        from . import _filter
        from ._compose import Filtered, Piece, kept
        from ._expr import Column, Expression

        progress = flag_or_none("progress", progress)
        if callable(where) and not isinstance(where, (Column, Expression)):
            # Now: what the function refers to may change.
            rows, text = _filter.by_function(self, where, name, columns, threads, progress)
            return kept(self, Piece.of(rows), text)
        if name is not None or columns is not None or threads is not None:
            raise InvalidRequest(
                "name=, columns= and threads= are for a filter by a function",
                hint="an expression is kept under its own text",
            )
        find, text = _filter.by_expression(self, where, progress)
        return Filtered(self, lambda: (Piece.of(find()), None), text)

    def by_key(
        self,
        keys: Sequence[Any],
        *,
        column: str | None = None,
        columns: Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> Rows:
        """Rows by their keys, in this order, in one request: ``ds.by_key(["000017", "000004"])``.

        The first call makes the node read the column of the keys from end to end. It keeps an index
        of 24 bytes for each row, for all who ask. One request brings up to 4,096 rows of a dataset
        as it was opened; otherwise (more keys, a selection, a filter) the node first tells which
        rows they are. A column that was cast has its values only here: its index is made here, and
        kept in ``~/.cache/forebay`` (or ``$XDG_CACHE_HOME/forebay``); so is one that is too large
        for the node.

        Args:
            keys: Texts, bytes or whole numbers, as they are in the column. A key may be given
                several times.
            column: Which column has the keys. Default: ``__key__`` of samples in tars, and the name
                (``key``) of whole objects and of members of zips; of other files, the one of these
                two that is there.
            columns: Read only these, and the keys.
            progress: Draw a line on the terminal while the index is made. None: on terminals, after
                a second.

        Returns:
            A row for each key. If several rows have a key, the first of them.

        Raises:
            NotFound: A key that no row has; the message names it.
            InvalidRequest: It is not known which column has the keys.
        """
        from ._keys import by_key

        return by_key(self, keys, column, columns, progress, self._keys)

    def to_hf_iterable(
        self, *, num_shards: int | None = None, shuffle: Shuffle = None, seed: int = 0
    ) -> datasets.IterableDataset:
        """The rows as an ``IterableDataset`` of Hugging Face's ``datasets``, which reads them as it
        is iterated over. Nothing is copied.

        ::

            rows = ds.to_hf_iterable()
            mine = datasets.distributed.split_dataset_by_node(rows, rank, world_size)
            loader = StatefulDataLoader(mine.with_format("torch"), batch_size=32, num_workers=4)

        Its shards are stretches of the order, which nodes and DataLoader workers divide among
        themselves. ``state_dict()`` is exact, and ``load_state_dict()`` goes on there without
        reading what was before; it refuses a state of another version, of other shards or of
        another order. With a ``shuffle``, ``set_epoch()`` makes another order of all rows. That of
        ``datasets`` itself (``.shuffle(buffer_size=…)``) works too, but rows in its buffer are lost
        when a state is loaded. States of :meth:`loader` load into any number of ranks and workers;
        those of ``datasets`` into the same one, and they do not know renames, casts and maps.

        An example is a row, with the ``Features`` of its columns' types, and with what the texts of
        columns of JSON say. Columns of which ``datasets`` itself wrote more into Parquet or Arrow
        files (classes, pictures, sounds) are that again; of others,
        ``cast_column("jpg", datasets.Image())`` makes pictures of bytes. With ``decode`` or
        :meth:`map`, an example is the sample, which must be a dict.

        Args:
            num_shards: How many shards there are. Default: up to 960, a number that many numbers
                of nodes and workers divide. If the nodes do not divide it, ``datasets`` lets each
                of them read everything, and use every ``world_size``-th row.
            shuffle, seed: The order, as for :meth:`loader`.

        Raises:
            ImportError: ``datasets`` is not installed.
            InvalidRequest: More shards than rows; or a column has a type that ``datasets`` does not
                have.
        """
        from ._hf import Source, iterable

        return iterable(Source([self], shuffle=shuffle, seed=seed), num_shards)

    def to_hf(
        self,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> datasets.Dataset:
        """The rows as a ``Dataset`` of Hugging Face's ``datasets``: **a copy** on the local disk,
        in Arrow files that are mapped into memory.

        A ``Dataset`` is a table of Arrow, and cannot read rows when they are asked for. If that is
        what you want, you need no copy: this dataset is map-style itself and goes into a DataLoader
        or a Trainer as it is, and :meth:`to_hf_iterable` streams. A copy is for what only a
        ``Dataset`` has (``map`` with a cache, ``sort``, ``push_to_hub``), and pays for rows that
        are few: ``ds.take(10_000).to_hf()``.

        The copy is made once for a version and its columns; another call, or process, finds it, and
        goes on where one was killed. Old ones are not removed: each is a folder
        ``forebay-…`` that can be deleted when nobody uses it.

        Args:
            cache_dir: Where copies are. Default: the cache of ``datasets`` (``HF_DATASETS_CACHE``).
            progress: Draw a line on the terminal. None: on terminals, after a second.

        Raises:
            ImportError: ``datasets`` is not installed.
            InvalidRequest: There is not room enough; a column has a type that ``datasets`` does not
                have; or this has a ``decode`` or :meth:`map`.
            OSError: The disk became full meanwhile.
        """
        from ._hf import Source, copied

        return copied(Source([self]), cache_dir, progress)

    def describe(self, rows: int | None = None) -> Summary:
        """What the columns have in them: types, missing values, the range of numbers, times and
        short texts, and the lengths of texts, bytes and lists. Print it, or show it in a notebook.

        It looks at some rows. Of Parquet, missing values and ranges are those of all rows where the
        statistics of all files say what they are: they are marked with ``*``, and
        ``columns[name].of_all`` names them. That takes PyArrow, the footers of at most 1,000 files,
        and all rows of what was opened: none were selected or filtered out. Of columns that are
        cast, and of lists and structs, the figures are of the rows that were looked at.

        Args:
            rows: How many rows to look at, spread evenly. Default: 1,000. Of large rows, fewer: it
                stops after 64 MiB.
        """
        from ._look import describe

        return describe(self, rows)

    def _title(self) -> str:
        """Its name, and how many rows it has."""
        return f"{self.name}: {counted(len(self), 'row')}"

    def _repr_html_(self) -> str:
        from ._look import preview

        return preview(self)

    # Rows

    def __len__(self) -> int:
        return self._rows

    def fetch(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> Rows:
        """These rows (``uint64``, each below ``len(ds)``): one request to each dataset that it is
        made of.
        """
        return Rows([self.read(rows, columns)], rows)

    def dressed(self, batch: Any) -> Any:
        """A received record batch with the names and types of columns that this has."""
        return Dressed(batch, self.dressing, self.name) if self.dressing else batch

    def read(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> Any:
        """These rows (``uint64``, each below ``len(ds)``) as one received Arrow record batch: one
        request.
        """
        names = self._at_node(self._columns if columns is None else columns)
        return self.dressed(self._of_node(lambda: _node.take(self.client, self.id, rows, names)))

    def _of_node(self, ask: Callable[[], T]) -> T:
        """What the node says about this dataset. A node that does not know it (because it was
        restarted, or is not the one that it was opened at) is told to open it, and must find the
        same version.
        """
        for _ in range(self.client.nodes):
            try:
                return self._same(ask)
            except NotFound as e:
                gone = e
            # Either a file is gone, or the node does not know the dataset. Opening it again shows
            # which.
            try:
                self.open_again()
            except (Changed, NotFound, InvalidRequest) as e:
                raise Changed(
                    f"{e.message} ({gone.message})",
                    hint="open it again to use the new version; a state of the old one does not"
                    " load into it",
                    status=gone.status,
                    request_id=gone.request_id,
                ) from e
        return self._same(ask)

    def _same(self, ask: Callable[[], T]) -> T:
        """What the node says about this version."""
        try:
            return ask()
        except PreconditionFailed as e:
            hint = (
                "open it again to use the new version; a state of the old one does not load into it"
            )
            raise Changed(e.message, hint=hint, status=e.status, request_id=e.request_id) from e

    def open_again(self) -> None:
        """Tells the node to open it, which must find the same version."""
        self.is_at(self.client)

    def is_at(self, client: Client) -> None:
        """Opens it at a node, which must find the same version."""
        again = self.open_at(client)
        if again["id"] != self.id:
            raise Changed(
                f"{self.name} has changed: version {self.id} was opened, and the node"
                f" now finds version {again['id']}",
                hint="open it again to use the new version; a state of the old one does not"
                " load into it",
            )

    def described(self) -> bytes:
        """What a node is told of how its rows are made of those of others."""
        raise InvalidRequest(f"{self.name} is not made of other datasets")

    def told(self) -> dict[str, Any]:
        """What a stream tells a node that does not know this dataset."""
        return _node.told(self.name, self.id, self.spec)

    def open_at(self, client: Client) -> dict[str, Any]:
        """Opens it at a node, whatever version it has there; returns what the node says."""
        return _node.open_dataset(client, self.spec)

    @overload
    def take(self, rows: int) -> Dataset[S_co]: ...
    @overload
    def take(self, rows: Any, columns: Sequence[str] | None = None) -> Rows: ...
    def take(self, rows: Any, columns: Sequence[str] | None = None) -> Any:
        """Rows by their numbers, in this order; duplicates are allowed. With a single number ``n``
        instead, the first ``n`` rows as a dataset (all, if there are not more): the counterpart of
        :meth:`skip`.

        Args:
            rows: A list, a range, an array or an iterator of whole numbers, from ``-len(ds)`` to
                ``len(ds) - 1``; or a number of rows.
            columns: Read only these.

        Raises:
            IndexError: A row does not exist.
            TypeError: These are not whole numbers.
        """
        if hasattr(rows, "__index__") and not getattr(rows, "ndim", 0):
            from ._compose import ranged

            first = ranged(self, range(min(_count("take", rows), len(self))))
            return first if columns is None else first.select_columns(columns)
        ids = self._ids(rows)
        wanted = self._columns if columns is None else self._known(columns)
        return self._take(ids, wanted)

    def _take(self, ids: np.ndarray, wanted: Sequence[str] | None) -> Rows:
        if len(ids) <= REQUEST_ROWS:
            return read_in_parts([self], wanted, ids, None)
        pieces = [ids[i : i + REQUEST_ROWS] for i in range(0, len(ids), REQUEST_ROWS)]

        def ask(piece: np.ndarray) -> Rows:
            return read_in_parts([self], wanted, piece, None)

        with Pool(AHEAD_REQUESTS, thread_name_prefix="forebay-take") as pool:
            return Rows.joined(list(pool.map(ask, pieces)), ids)

    def _range(self, rows: range) -> range:
        """A range of rows, which are there."""
        if len(rows) == 0:
            return range(0)
        self._are_there((rows[0], rows[-1]))
        if (rows[0] < 0) != (rows[-1] < 0):
            raise IndexError(f"{rows} is partly below 0")
        shift = self._rows if rows[0] < 0 else 0
        return range(rows.start + shift, rows[-1] + shift + (1 if rows.step > 0 else -1), rows.step)

    def _are_there(self, rows: Iterable[int]) -> None:
        for row in rows:
            if not -self._rows <= row < self._rows:
                raise IndexError(
                    f"row {row} does not exist: the dataset has {counted(self._rows, 'row')}"
                )

    def _ids(self, rows: Any) -> np.ndarray:
        if isinstance(rows, Iterator | KeysView | ValuesView):
            # NumPy makes a single object of it.
            rows = list(rows)
        given = np.asarray(rows)
        if given.size == 0:
            return np.empty(0, np.uint64)
        if given.ndim == 1 and given.dtype.kind in "fO" and not isinstance(rows, np.ndarray):
            # What NumPy has no type for together: numbers of several of its types, or huge ones.
            numbers = [n for row in rows if (n := whole_number(row)) is not None]
            if len(numbers) == len(given):
                self._are_there(numbers)
                given = np.array(numbers, np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            hint = ": select(mask) takes a bool for each row" if given.dtype == bool else ""
            raise TypeError(
                f"rows must be whole numbers in one dimension, not {given.dtype} of shape"
                f" {given.shape}{hint}"
            )
        low = int(given.min())
        self._are_there((low, int(given.max())))
        if low < 0:
            given = given.astype(np.int64)
            given = np.where(given < 0, given + self._rows, given)
        return np.ascontiguousarray(given, np.uint64)

    def _samples(self, rows: Rows) -> Iterator[S_co]:
        make = self.sampler()
        for number, row in zip(rows.ids.tolist(), rows, strict=True):
            try:
                # Without a decode, a sample is the row: a Row, for type checkers.
                sample = row if make is None else make(row)
            except Exception as e:
                with contextlib.suppress(Exception):  # a help that must not hide the error
                    e.add_note(f"{self.locate(number)} (row {number} of the dataset)")
                raise
            yield sample  # type: ignore[misc]

    def sampler(
        self, decode: Callable[[dict[str, Any]], Any] | None = None
    ) -> Callable[[dict[str, Any]], Any] | None:
        """What makes a sample of a row: ``decode``, or else the dataset's, and then its maps; None
        if a sample is the row.
        """
        made = [f for f in (decode or self.decoder, *self.maps) if f is not None]
        if len(made) < 2:
            return made[0] if made else None
        return _Chain(made)

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> S_co: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset[S_co]: ...
    @overload
    def __getitem__(self, index: Sequence[int] | np.ndarray) -> Rows: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            raise TypeError(
                f"{index!r} is not a row number: ds.select_columns({index!r}) reads a column, and"
                f" ds.take(rows).numpy()[{index!r}] has its values"
            )
        if isinstance(index, slice):
            return self.select(index)
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return owned(next(self._samples(self.take([operator.index(index)]))))
        return self.take(index).with_bytes()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property has failed with an AttributeError: again, for that error.
                return object.__getattribute__(self, name)
            raise no_attribute(self, "a dataset", name)

    def __getitems__(self, rows: Sequence[int]) -> list[S_co]:
        """Samples by their numbers, in one request: what PyTorch's DataLoader asks for. Views of
        received memory are ``bytes`` in them: DataLoader would make a tensor of each byte, and its
        workers cannot send views.
        """
        return [owned(sample) for sample in self._samples(self.take(rows))]

    def __iter__(self) -> Iterator[S_co]:
        pid, pace = os.getpid(), Pace(ITERATION_ROWS)
        with Pool(AHEAD_REQUESTS, thread_name_prefix="forebay-iterate") as pool:

            def requests() -> Iterator[Future[Rows]]:
                start = 0
                while start < self._rows:
                    stop = min(start + pace.rows, self._rows)
                    yield pool.submit(self.take, range(start, stop))
                    start = stop

            todo = requests()
            waiting = list(itertools.islice(todo, AHEAD_REQUESTS))
            while waiting:
                check_process(pid)
                rows = waiting.pop(0).result()
                pace.came(rows)
                waiting.extend(itertools.islice(todo, 1))
                yield from self._samples(rows)

    def lengths(self, column: str, progress: bool | None = None) -> np.ndarray:
        """A column of whole numbers, for all rows: ``numpy.uint64`` of shape ``(len(ds),)``. Reads
        that column from end to end.

        Raises:
            TypeError: It does not consist of whole numbers, or some are missing or below 0.
        """
        self._known([column])
        progress = flag_or_none("progress", progress)
        out = np.empty(self._rows, np.uint64)
        pieces = [
            (s, min(s + REQUEST_ROWS, self._rows)) for s in range(0, self._rows, REQUEST_ROWS)
        ]
        with (
            Bar(f"reading column {column}", self._rows, show=progress) as bar,
            Pool(AHEAD_REQUESTS) as pool,
        ):
            for (begin, end), rows in zip(
                pieces, pool.map(lambda p: self.take(range(*p), [column]), pieces), strict=True
            ):
                values = rows.numpy()[column]
                if (
                    values.dtype.kind not in "iu"
                    or isinstance(values, np.ma.MaskedArray)
                    or values.ndim != 1
                    or values.min(initial=0) < 0
                ):
                    raise TypeError(
                        f"column {column!r} of {self.name} does not hold lengths: whole"
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
            self.decoder,
            self._shape,
            self.dressing,
            self.maps,
        )

    def __repr__(self) -> str:
        info = self.info
        size = _bytes(int(info.get("bytes", 0)))
        types = listed([f"{name}: {kind}" for name, kind in self.schema.items()])
        return (
            f"<forebay.Dataset {self.name}: {counted(self._rows, 'row')} in"
            f" {counted(int(info['blocks']), 'block')}"
            f" of {counted(int(info['files']), f'{self.format} file')},"
            f" {size}, version {self.id[:12]}; {types}>"
        )


def no_attribute(of: Any, what: str, name: str) -> AttributeError:
    """The error for an attribute that a dataset or a mix does not have."""
    said = f"take(rows).{name}() is that of some rows" if name in ROWS_HAVE else ELSEWHERE.get(name)
    hint = f": {said}" if said else ""
    return AttributeError(f"{what} has no {name!r}{hint}", name=name, obj=of)


def datasets_of(given: Any, text: str, hint: str) -> list[Dataset[Any]]:
    """The datasets of a list; raises InvalidRequest with this text for anything else."""
    found = members(given, Loadable)
    wrong = [d for d in found if not isinstance(d, Dataset)]
    if found and not wrong:
        return found
    other = wrong[0] if wrong else given
    if hasattr(other, "interleaved"):
        hint = "mix.interleaved() has the rows of a mix as a dataset"
        wrong = [other]
    instead = f", not {type(other).__name__}" if wrong else ""
    raise InvalidRequest(f"{text}{instead}", hint=hint)


def _rebuild(
    client: Client,
    spec: dict[str, Any],
    info: dict[str, Any],
    columns: Any,
    decode: Any,
    shape: bytes | None,
    dressing: Dressing | None = None,
    maps: Any = (),
) -> Dataset[Any]:
    made: Dataset[Any] = Dataset(
        client, spec, info, decode=decode, shape=shape, dressing=dressing, maps=maps
    )
    made._columns = columns
    return made


class _Chain:
    """Functions, one after the other; can be pickled if they can."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.functions = list(functions)

    def __call__(self, value: Any) -> Any:
        for function in self.functions:
            value = function(value)
        return value


def _count(what: str, n: Any) -> int:
    number = whole_number(n)
    if number is None or number < 0:
        raise InvalidRequest(f"{what}({n!r})", hint="give a number of rows of at least 0")
    return number


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _fields(schema: Any) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = schema["fields"] if isinstance(schema, dict) else schema
    return fields


def _types(schema: Any) -> dict[str, str]:
    return {field["name"]: field["type"] for field in _fields(schema)}
