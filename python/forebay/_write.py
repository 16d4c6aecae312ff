"""Rows of a dataset or of a mix, in any order, as new shards in a bucket.

What shard ``i`` of ``n`` holds is decided before work begins: the rows at positions ``i * k`` to
``(i + 1) * k`` of the order, where ``k`` comes from the arguments or, for a size in bytes, from a
sample of the rows. So shards are written side by side, and a write that was killed goes on with
those that are not there.

Objects below the target:

- ``_forebay/unfinished.json``, the *claim*: made first, only where nothing is; removed at the end.
  It has the arguments, ``k``, and who writes. While it is there, a node does not open what is below
  the target by prefix or pattern.
- the shards, each whole as soon as it is there (an upload in parts shows nothing before its end),
  and each written only if it is not there;
- ``_manifest``, written last and only if it is not there: the commit.

Invariants: a shard under the claim holds the rows that its name says, whoever wrote it; there is a
manifest only when all shards are there; whoever takes the claim over (by its ETag) is the only one
that writes the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrow, _footers, _options
from ._arguments import (
    EPOCHS_MAX,
    U64_MAX,
    check_client,
    column_names,
    differences,
    flag,
    flag_or_none,
    is_unicode,
    seconds,
    whole_number,
)
from ._encode import (
    ENCODERS,
    PIECE_BYTES,
    ROW_GROUP_BYTES,
    ROW_GROUP_MAX_ROWS,
    BadRow,
    Encoder,
    Options,
    Shard,
    check_compression,
    differ,
    joined,
    kinds_of,
    told_apart,
)
from ._fetch import PASSING, UNSURE, asked_in_pieces, patiently, read, read_in_parts
from ._forebay import Client
from ._plan import Order
from ._pools import Pool
from ._progress import Bar
from ._stop import Stop
from ._words import counted
from .errors import (
    Changed,
    Conflict,
    Error,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    SampleFailed,
)
from .loader import Loader
from .rows import Rows
from .schedule import Schedule
from .shuffle import Shuffle, to_wire
from .stats import Meter

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["Written"]

MANIFEST = "_manifest"
CLAIM = "_forebay/unfinished.json"
#: What a claim has as arguments that Ray's sink makes.
BY_RAY = {"by": "ray"}
#: Bytes of a shard, by default. MDS's readers and its writer hold a whole shard.
SHARD_BYTES = {"mds": 64 << 20}
SHARD_DEFAULT_BYTES = 256 << 20
SHARDS_MAX = 1_000_000
WRITERS = 4
WRITERS_MAX = 256
#: Bytes and rows of one request for rows; each writer has two under way.
READ_BYTES = 8 << 20
READ_MAX_ROWS = 4096
AHEAD_REQUESTS = 2
#: Rows that say how large a row is, in how many places they are, and about their bytes at most.
SAMPLE_ROWS, SAMPLE_PLACES, SAMPLE_BYTES = 256, 8, 64 << 20
#: A node gives up an upload that is silent for long, and calls it invalid. Where a piece took so
#: long to make, that is taken for the reason, and the shard is sent again.
SILENT_SECONDS = 10.0
#: Pauses between the attempts at a shard.
RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS = 0.2, 5.0

log = logging.getLogger("forebay")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclass(frozen=True)
class Written:
    """What :meth:`forebay.Dataset.write` wrote.

    Attributes:
        target: ``"bucket/prefix/"``.
        format: The format of the shards.
        manifest: The object that names them, ``"bucket/prefix/_manifest"``, and
        source: what :func:`forebay.open` takes, where Forebay reads the format.
        shards, rows, bytes: How many there are, in all.
        found: How many of the shards an earlier run had written.
        seconds: How long this run took.
    """

    target: str
    format: str
    manifest: str
    shards: int
    rows: int
    bytes: int
    found: int
    seconds: float

    @property
    def source(self) -> str:
        # In the name of a source, a backslash takes the meaning of what follows.
        return "manifest:" + self.manifest.replace("\\", "\\\\")


def size_of(value: int | str) -> int:
    """Bytes: a number, or a text like ``"256MiB"`` or ``"1GB"``."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if not found or found[2].lower() not in _UNITS or len(found[1]) > 20:
            shown = value if len(value) < 40 else f"{value[:40]}…"
            raise InvalidRequest(
                f"shard_size={shown!r} is not a size", hint='as in "256MiB" or "1GB"'
            )
        value = int(float(found[1]) * _UNITS[found[2].lower()])
    size = whole_number(value)
    if size is None or size < 1:
        raise InvalidRequest(f"shard_size is {value!r}", hint='a size above 0, as in "256MiB"')
    return size


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int | None:
    number = whole_number(value)
    if value is not None and (
        number is None or number < least or (most is not None and number > most)
    ):
        to = "" if most is None else f" to {most:,}"
        raise InvalidRequest(f"{name} is {value!r}", hint=f"a whole number from {least}{to}")
    return number


def split_target(target: Any) -> tuple[str, str]:
    """``s3://bucket/prefix/`` as bucket and prefix, which ends in a slash or is empty."""
    if not isinstance(target, str):
        raise TypeError(f'the target must be a str like "bucket/new/", not {target!r}')
    bucket, _, prefix = re.sub(r"^\w+://", "", target).partition("/")
    if (
        not is_unicode(target)
        or not bucket
        or re.search(r"[*?\[\]{}]", bucket + prefix)
        or prefix.startswith("/")
    ):
        raise InvalidRequest(
            f"{target!r} is not a target", hint='a prefix of a bucket, as in "bucket/new/"'
        )
    return bucket, f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""


def _as_pattern(source: str) -> re.Pattern[str]:
    """What a source matches, and no less: braces match anything here."""
    out = []
    for part in re.findall(r"\*\*/?|\*|\?|\[[^\]]*\]|\{[^}]*\}|\\.|[^*?\[{\\]+|.", source):
        if part.startswith("**"):
            out.append(".*")
        elif part.startswith(("*", "{")):
            out.append("[^/]*")
        elif part == "?" or (part.startswith("[") and part.endswith("]")):
            out.append("[^/]")
        else:
            out.append(re.escape(part.removeprefix("\\")))
    below = ".*" if source.endswith("/") or "/" not in source else ""
    return re.compile("".join(out) + below, re.S)


def _refuse_sources(datasets: Sequence[Dataset[Any]], target: str, shard: str) -> None:
    """Raises InvalidRequest where the new objects would be files of a dataset that is read."""
    for dataset in datasets:
        for source in dataset.spec.get("sources", []):
            plain = re.sub(r"^\w+://", "", source)
            if plain.startswith("manifest:"):
                continue
            if _as_pattern(plain).fullmatch(f"{target}{shard}"):
                raise InvalidRequest(
                    f"the target {target} is under the source {source}: what is written would be"
                    " part of what is read",
                    hint="write to another prefix",
                )
        for file in dataset.files:
            if file.name.startswith(target):
                raise InvalidRequest(
                    f"the target {target} holds {file.name}, which the dataset is read from",
                    hint="write to another prefix",
                )


def refuse_maps(datasets: Sequence[Dataset[Any]], what: str) -> None:
    """Raises InvalidRequest where a map makes other samples than the rows, which are what is read
    or written.
    """
    for dataset in datasets:
        if dataset.maps:
            raise InvalidRequest(
                f"{dataset.name} has a map, and {what} takes the rows as they are stored",
                hint="leave map() out; to write what a function makes of rows, apply it between"
                " forebay.ray.read and forebay.ray.write, or write it from a loop over the dataset",
            )


@dataclass(frozen=True)
class Request:
    """The arguments of :meth:`forebay.Dataset.write`, which explains them."""

    target: str
    format: str = "parquet"
    order: Shuffle | Order | Loader[Any] = None
    seed: int = 0
    epoch: int = 0
    columns: Sequence[str] | Mapping[str, str] | None = None
    shard_size: int | str | None = None
    shard_rows: int | None = None
    compression: str | Mapping[str, str] | None = None
    row_group_rows: int | None = None
    key: str | None = "__key__"
    index: bool = True
    name: str = "shard"
    writers: int | None = None
    client: Client | None = None
    retry_for: float | None = None
    progress: bool | None = None
    #: Of single formats, by their names in :mod:`forebay._options`.
    options: Mapping[str, Any] = field(default_factory=dict)

    def checked(self) -> Request:
        """Raises InvalidRequest or TypeError for arguments that make no sense."""
        if self.format not in list(ENCODERS):
            raise InvalidRequest(
                f"{self.format!r} is not a format that is written", hint=", ".join(ENCODERS)
            )
        if self.client is not None:
            check_client(self.client)
        if self.shard_size is not None and self.shard_rows is not None:
            raise InvalidRequest("give shard_size= or shard_rows=, not both")
        if self.shard_size is not None:
            size_of(self.shard_size)
        numbers: dict[str, Any] = {
            name: _whole(name, getattr(self, name), least, most)
            for name, least, most in (
                ("shard_rows", 1, None),
                ("row_group_rows", 1, ROW_GROUP_MAX_ROWS),
                ("writers", 1, WRITERS_MAX),
                ("epoch", 0, EPOCHS_MAX - 1),
                ("seed", 0, U64_MAX),
            )
        }
        index = flag("index", self.index)
        progress = flag_or_none("progress", self.progress)
        for name, is_given, of in (
            ("row_group_rows", self.row_group_rows is not None, "parquet"),
            ("key", self.key not in ("__key__", None), "tar"),
            ("index", not index, "tfrecord"),
        ):
            if is_given and self.format != of:
                raise _options.not_of(name, (of,), self.format)
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name):
            raise InvalidRequest(
                f"name is {self.name!r}",
                hint="letters, digits, '-', '_' and '.': names of shards begin with it",
            )
        retry_for = seconds(self.retry_for)
        if retry_for is None and self.retry_for is not None:
            raise InvalidRequest(f"retry_for is {self.retry_for!r}", hint="seconds, at least 0")
        order = self.order.order if isinstance(self.order, Loader) else self.order
        if not isinstance(order, Order):
            to_wire(order, "order")
        elif numbers["seed"]:
            raise InvalidRequest(
                f"seed is {self.seed}, and the loader that is the order has a seed",
                hint="leave seed= out",
            )
        given, columns = dict(self.options), self.columns
        if isinstance(columns, Mapping):
            given, columns = {**given, "columns": columns}, list(columns)
        arguments = [name for name in Request.__dataclass_fields__ if name != "options"]
        options = _options.checked(self.format, given, arguments)
        compression, level = self.compression, options.pop("compression_level", None)
        for name in _options.COMPRESSIONS:
            if (other := options.pop(name, None)) is not None:
                if compression is not None:
                    raise InvalidRequest(f"give compression= or {name}=, not both")
                compression = other
        compression = check_compression(ENCODERS[self.format], compression, level)
        if isinstance(level, Mapping) and not isinstance(compression, Mapping):
            options["compression_level"] = level
        for name, others in (
            ("maxcount", ("shard_rows",)),
            ("size_limit", ("shard_rows", "shard_size")),
        ):
            for other in others:
                if name in options and getattr(self, other) is not None:
                    raise InvalidRequest(f"give {other}= or {name}=, not both")
        return replace(
            self,
            order=order,
            compression=compression,
            columns=columns,
            options=options,
            index=index,
            retry_for=retry_for,
            progress=progress,
            **numbers,
        )


def write(
    datasets: Sequence[Dataset[Any]],
    weights: Sequence[float] | Schedule | None,
    epoch_rows: int | None,
    request: Request,
) -> Written:
    """Writes; see :meth:`forebay.Dataset.write`."""
    return _Writing(datasets, weights, epoch_rows, request.checked()).run()


def _same_rows(order: Order, stored: Order) -> Order:
    """The order of a loader, if it is one of the rows that are written."""
    of, rows = (
        {k: v for k, v in o.document.items() if k not in ("seed", "shuffle")}
        for o in (order, stored)
    )
    if of != rows or order.mixed != stored.mixed:
        raise InvalidRequest(
            "order= is a loader of other datasets, or of other weights, than what is written",
            hint="make the loader of the same dataset or mix",
        )
    return order


class _Stopped(Exception):
    """Another writer has failed, or the caller was interrupted."""


class Source:
    """What a client's ``put`` reads: pieces, as they are made."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = joined(pieces, PIECE_BYTES)
        self._first: list[bytes] = []
        #: How long a request has waited for a piece, at the most.
        self.waited_seconds = 0.0
        self.sent = 0
        self.failed: BaseException | None = None

    def begin(self) -> Source:
        """Makes the first pieces, before a request waits for them: a node gives up an upload that
        is silent for long, and the first piece of MDS takes as long as the whole shard.
        """
        # The client sends a piece when it has the next one.
        while len(self._first) < 2 and (piece := self._next()):
            self._first.append(piece)
        return self

    def _next(self) -> bytes:
        try:
            # A compressor may give nothing for a piece; only the end is empty.
            return next((p for p in self._pieces if p), b"")
        except BaseException as e:
            self.failed = e
            raise

    def read(self, _: int = -1, /) -> bytes:
        began = time.monotonic()
        piece = self._first.pop(0) if self._first else self._next()
        self.waited_seconds = max(self.waited_seconds, time.monotonic() - began)
        self.sent += len(piece)
        return piece


class _Writing:
    """One call."""

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        weights: Sequence[float] | Schedule | None,
        epoch_rows: int | None,
        request: Request,
    ) -> None:
        self.began = time.monotonic()
        self.request = r = request
        refuse_maps(datasets, "write")
        self.datasets = chosen(datasets, r.columns)
        self.bucket, self.prefix = split_target(r.target)
        self.target = f"{self.bucket}/{self.prefix}"
        self.client = r.client or datasets[0].client
        self.retry_for = self.client.timeout if r.retry_for is None else r.retry_for
        self.stop = Stop()
        self.lock = threading.Lock()
        self.meter = Meter()
        self.stored = Order(datasets, weights, epoch_rows, 0, None)
        if isinstance(r.order, Order):
            self.order = _same_rows(r.order, self.stored)
        else:
            assert not isinstance(r.order, Loader)
            self.order = Order(datasets, weights, epoch_rows, r.seed, r.order)
        self.rows = self.order.rows_per_epoch
        if not self.rows:
            raise InvalidRequest("there are no rows to write")
        looked_at = self._look()
        kinds = self._kinds(looked_at)
        self.options = Options(
            kinds=kinds,
            compression=r.compression,
            key=r.key,
            row_group_rows=r.row_group_rows,
            index=r.index,
            raw=self._is_raw(kinds),
            looked_at=looked_at,
            features=self._features(kinds),
            more=r.options,
        )
        self.encoder: Encoder = ENCODERS[r.format](self.options)
        _refuse_sources(datasets, self.target, self._shard_name(0, 1))
        self.arguments = self._arguments()
        self.digest = hashlib.sha256(
            json.dumps(self.arguments, sort_keys=True).encode()
        ).hexdigest()[:32]
        self.shard_rows = 0
        self.claim_etag: str | None = None

    # What is to be written

    def _features(self, kinds: dict[str, str]) -> bytes | None:
        if self.request.format != "parquet":
            return None
        return self._patiently(lambda: _footers.features(self.datasets, kinds))

    def _look(self) -> list[tuple[str, Rows]]:
        """No rows, with their columns, of each dataset that rows are of, by its name."""
        none, found = np.empty(0, np.uint64), []
        for dataset in self.datasets:
            for opened in dataset.made_of if len(dataset) else ():
                if len(opened):
                    found.append((opened.name, self._patiently(partial(opened.fetch, none))))
        return found

    def _kinds(self, looked_at: Sequence[tuple[str, Rows]]) -> dict[str, str]:
        """The columns and what each holds."""
        # Parquet stores tensors and JSON as they come, and its schema says what they are.
        as_stored = self.request.format == "parquet"
        found = [
            (name, told_apart(kinds_of(_arrow.columns(rows), as_stored), self.request.format))
            for name, rows in looked_at
        ]
        name, kinds = found[0]
        for other, theirs in found[1:]:
            if list(theirs.items()) != list(kinds.items()):
                raise differ(name, other, differences(kinds, theirs))
        return kinds

    def _is_raw(self, kinds: dict[str, str]) -> bool:
        """Whether the one column is lines of JSONL or records of TFRecord, which are written as
        they are.
        """
        if (given := self.request.options.get("raw")) is not None:
            return bool(given)
        if not all(map(_is_as_stored, self.datasets)):
            return False
        of = {d.format for d in self.datasets}
        if self.request.format == "jsonl" and of == {"jsonl"} and kinds == {"json": "text"}:
            return all(
                list(d.spec.get("schema") or {}) == ["json"]
                or "json" in [f["name"] for f in d.info.get("besides") or []]
                for d in self.datasets
            )
        return (
            self.request.format == "tfrecord"
            and of == {"tfrecord"}
            and kinds == {"data": "bytes"}
            and not any(d.spec.get("example") for d in self.datasets)
        )

    def _arguments(self) -> dict[str, Any]:
        """What another call must agree with to go on with this write."""
        r = self.request
        found = {
            "format": r.format,
            "order": self.order.document,
            "epoch": r.epoch,
            "columns": [list(column) for column in self.options.kinds.items()],
            "made": [dataset._columns_key() for dataset in self.datasets],
            "shard_size": None if r.shard_size is None else size_of(r.shard_size),
            "shard_rows": r.shard_rows,
            "compression": r.compression,
            "row_group_rows": r.row_group_rows,
            "key": r.key if r.format == "tar" else None,
            "index": r.index if r.format == "tfrecord" else None,
            "name": r.name,
        }
        # None at all: as versions had it that knew of none, whose writes go on.
        return {**found, "options": _options.as_told(r.options)} if r.options else found

    def _shard_name(self, number: int, shards: int) -> str:
        return f"{self.request.name}-{number:05}-of-{shards:05}{self.encoder.extension}"

    def _object(self, name: str) -> tuple[str, str]:
        return self.bucket, f"{self.prefix}{name}"

    # Reading

    def _patiently(self, ask: Any) -> Any:
        return patiently(ask, self.retry_for, self.stop, self.meter, passing=UNSURE)

    def _ask(self, rows: np.ndarray, sources: np.ndarray | None) -> Rows:
        if self.stop.is_set():
            raise _Stopped
        return self._patiently(lambda: read(self.datasets, None, rows, sources))

    def _batches(self, shard: Shard) -> Iterator[Rows]:
        """The rows of a shard, a few requests ahead."""
        end = shard.first + shard.rows
        todo = iter(range(shard.first, end, self.read_rows))
        waiting: deque[tuple[Future[Rows], np.ndarray, np.ndarray | None]] = deque()
        try:
            while True:
                while len(waiting) < AHEAD_REQUESTS and (start := next(todo, None)) is not None:
                    stop = min(start + self.read_rows, end)
                    of = self.order.rows(self.request.epoch, start, stop)
                    waiting.append((self.readers.submit(self._ask, *of), *of))
                if not waiting:
                    return
                asked, numbers, sources = waiting.popleft()
                for rows in asked_in_pieces(asked, self._ask, numbers, sources):
                    yield rows
                    shard.counted += len(rows)
                    self._count(len(rows))
        finally:
            for future, *_ in waiting:
                future.cancel()

    def _count(self, rows: int) -> None:
        with self.lock:
            self.bar.advance(rows)

    def _read_all(self, ranges: list[tuple[int, int]]) -> list[Rows]:
        with Pool(len(ranges), thread_name_prefix="forebay-sample") as pool:
            return list(pool.map(self._read_sample, ranges))

    def _read_sample(self, places: tuple[int, int]) -> Rows:
        rows, sources = self.stored.rows(self.request.epoch, *places)
        return self._patiently(lambda: read_in_parts(self.datasets, None, rows, sources))

    def _sample(self) -> tuple[float, float]:
        """Bytes of a row as it is received, and as it is written."""
        # How many of them are not too much, by a few.
        batches = self._read_all(_places(self.rows, SAMPLE_PLACES))
        largest = max(b.nbytes / len(b) for b in batches)
        ranges = _places(self.rows, between(SAMPLE_BYTES / max(largest, 1), 1, SAMPLE_ROWS))
        batches = self._read_all(ranges)
        rows = sum(map(len, batches))
        received = sum(b.nbytes for b in batches) / rows

        shard = Shard(0, 0)

        def size(some: list[Rows]) -> int:
            nonlocal shard
            shard = Shard(0, sum(map(len, some)))
            size = sum(map(len, self.encoder.pieces(iter(some), shard)))
            # MosaicML's limit is that of an unpacked shard.
            return int(shard.notes["raw"]) if "size_limit" in self.request.options else size

        try:
            whole = size(batches)
            # What comes with each shard, however few its rows are, is not counted.
            half = batches[: len(batches) // 2]
            rest = rows - sum(map(len, half))
            written = (whole - size(half)) / rest if half else whole / rows
        except SampleFailed as e:
            if self._is_made_by_options and isinstance(e, BadRow):
                # Before the target is this write's: with other options, it is another one.
                looked_at = itertools.chain.from_iterable(itertools.starmap(range, ranges))
                position = next(itertools.islice(looked_at, shard.at, None))
                error = SampleFailed(f"a row cannot be written: {e.why}")
                error.hint = e.hint
                self._say_which(error, position, self.stored)
                raise error from e.__cause__
            # The write says which row it is.
            written = received
        return received, max(written, 1.0)

    @property
    def _is_made_by_options(self) -> bool:
        """Whether a row that is refused may be written with other options."""
        encoder = self.request.options.get("encoder")
        by_user = map(callable, encoder.values() if isinstance(encoder, dict) else [encoder])
        return self.encoder.name == "parquet" or any(by_user)

    # The claim

    def _get(self, name: str) -> tuple[Any, str | None] | None:
        """A small object of the target and its ETag; None if there is none."""
        try:
            found = self._patiently(lambda: self.client.get(self._object(name)))
        except NotFound:
            return None
        return bytes(found), found.etag

    def _finished(self) -> Written | None:
        """What the manifest says, if it is of these arguments."""
        found = self._get(MANIFEST)
        if found is None:
            return None
        lines = [_object_of(line) for line in found[0].splitlines() if line.strip()]
        head = lines[0] if lines else {}
        if head.get("write") != self.digest:
            raise Conflict(
                f"{self.target} holds another dataset already: its manifest is"
                f" {self.target}{MANIFEST}{self._differences(head.get('arguments'))}",
                hint="write to another prefix, or remove what is there",
            )
        files = lines[1:]
        size = sum(f.get("size", 0) for f in files)
        return self._written(len(files), size, len(files))

    def _written(self, shards: int, size: int, found: int) -> Written:
        return Written(
            target=self.target,
            format=self.request.format,
            manifest=f"{self.target}{MANIFEST}",
            shards=shards,
            rows=self.rows,
            bytes=size,
            found=found,
            seconds=time.monotonic() - self.began,
        )

    def _differences(self, theirs: Any) -> str:
        if not isinstance(theirs, dict):
            return ""
        if theirs == BY_RAY:
            return "; forebay.ray.write began it"
        mine = json.loads(json.dumps(self.arguments))
        differ = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
        told = []
        for name in differ:
            if name == "order":
                then, now = (
                    json.dumps((d or {}).get("sources")) for d in (theirs.get(name), mine[name])
                )
                told.append("dataset (or another version of it)" if then != now else "order")
            elif name == "columns":
                # In another format, the same columns hold something else.
                those, these = ([c for c, _ in a.get(name) or []] for a in (theirs, mine))
                if "format" not in differ or those != these:
                    told.append("columns")
            elif name == "options":
                told += _options_that_differ(theirs.get(name) or {}, mine.get(name) or {})
            elif name == "made":
                told.append("renaming or casting of columns")
            else:
                told.append(f"{name} ({theirs.get(name)!r}, not {mine.get(name)!r})")
        return f"; it was given another {', '.join(told)}" if told else ""

    def _claim(self) -> bool:
        """Makes the claim, or takes over that of an earlier run; returns whether there was one."""
        found = self._get(CLAIM)
        if found is not None:
            claim = _object_of(found[0])
            failed = claim.pop("failed", None)
            if claim.get("write") != self.digest:
                # The same arguments would fail on the same row, and Ray's writes do not go on.
                is_final = failed or claim.get("arguments") == BY_RAY
                go_on = "" if is_final else "give the same arguments to go on with it, or "
                raise Conflict(
                    f"{self.target} belongs to another write, which"
                    f" {f'failed ({failed})' if failed else 'is not finished'}"
                    f"{self._differences(claim.get('arguments'))}{_who(claim)}",
                    hint=f"{go_on}remove what is below the prefix, or write to another one",
                )
            self.shard_rows, self.row_group_rows = claim["shard_rows"], claim["row_group_rows"]
            self.read_rows = claim["read_rows"]
            self.claimed = claim
            self._put_claim(if_match=found[1])
            return True
        self._patiently(lambda: check_empty(self.client, self.bucket, self.prefix))
        received, written = self._sample()
        if (rows := self.request.shard_rows) is None:
            default = SHARD_BYTES.get(self.request.format, SHARD_DEFAULT_BYTES)
            given = self.request.shard_size or self.request.options.get("size_limit")
            rows = round((default if given is None else size_of(given)) / written)
            rows = min(rows, self.request.options.get("maxcount", rows))
        self.shard_rows = max(1, min(rows, self.rows))
        self.read_rows = between(READ_BYTES / max(received, 1), 1, READ_MAX_ROWS)
        self.row_group_rows = self.request.row_group_rows or between(
            ROW_GROUP_BYTES / max(received, 1), 1, ROW_GROUP_MAX_ROWS
        )
        if (shards := -(-self.rows // self.shard_rows)) > SHARDS_MAX:
            raise InvalidRequest(
                f"{self.rows:,} rows would be {shards:,} shards of"
                f" {counted(self.shard_rows, 'row')}; the limit is {SHARDS_MAX:,}",
                hint="give a larger shard_size= or shard_rows=",
            )
        self.claimed = {
            "forebay_write": 1,
            "write": self.digest,
            "arguments": self.arguments,
            "rows": self.rows,
            "shard_rows": self.shard_rows,
            "row_group_rows": self.row_group_rows,
            "read_rows": self.read_rows,
        }
        self._put_claim(if_match=None)
        if self._get(MANIFEST) is not None:
            # Another write ended between our two looks.
            self._delete(CLAIM)
            raise Conflict(f"{self.target} was written by another process meanwhile")
        return False

    def _put_claim(self, if_match: str | None) -> None:
        claim = {**self.claimed, "writer": this_writer()}
        make = partial(make_claim, self.client, self._object(CLAIM), claim, if_match)
        try:
            self.claim_etag = self._patiently(make)
        except (PreconditionFailed, NotFound) as e:
            # The answer to an attempt may be lost, and the claim there.
            found = self._get(CLAIM)
            if found is None and if_match is None and self._get(MANIFEST) is None:
                # Nobody writes there: the bucket has another reason, such as a file of that name.
                if isinstance(e, NotFound):
                    raise
                raise not_writable(self.target, e) from e
            if found is None or _object_of(found[0]).get("writer") != claim["writer"]:
                raise self._lost() from e
            self.claim_etag = found[1]

    def _lost(self) -> Conflict:
        found = self._get(CLAIM)
        return Conflict(
            f"another process writes {self.target}{_who(_object_of(found[0])) if found else ''}",
            hint="one process writes to a target, with as many writers= as it needs",
        )

    def _still_mine(self) -> None:
        """Raises Conflict if another process has taken the claim over."""
        try:
            now = self.client.head(self._object(CLAIM)).etag
        except NotFound:
            now = None
        except UNSURE:
            # The conditions of the writes themselves hold in any case.
            return
        if now != self.claim_etag:
            raise self._lost()

    # Shards

    def run(self) -> Written:
        if (finished := self._finished()) is not None:
            self._clear()
            return finished
        resumed = self._claim()
        self.options = replace(self.options, row_group_rows=self.row_group_rows)
        self.encoder = ENCODERS[self.request.format](self.options)
        self.shards = -(-self.rows // self.shard_rows)
        there: set[str] = set()
        if resumed:
            below = self.target.rstrip("/") + "/"
            there = self._patiently(lambda: {info.key for info in self.client.list(below)})
        writers = min(self.request.writers or WRITERS, self.shards)
        results: list[dict[str, Any] | None] = [None] * self.shards
        numbers = iter(range(self.shards))
        found = 0

        failed: list[BaseException] = []

        def work() -> None:
            nonlocal found
            while not self.stop.is_set():
                with self.lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    shard, was_there = self._shard(number, there)
                except BaseException as e:
                    # The first says why; the others, that it stopped them.
                    failed.append(e)
                    self.stop.set()
                    raise
                with self.lock:
                    results[number] = shard
                    found += was_there

        what = f"writing {self.target}"
        with (
            Bar(what, self.rows, show=self.request.progress) as self.bar,
            Pool(writers * AHEAD_REQUESTS, thread_name_prefix="forebay-read") as self.readers,
            Pool(writers, thread_name_prefix="forebay-write") as pool,
        ):
            running = [pool.submit(work) for _ in range(writers)]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self.stop.set()
        if failed:
            if isinstance(failed[0], (SampleFailed, InvalidRequest, Changed)):
                self._withdraw(failed[0])
            raise failed[0]
        self.stop = Stop()
        done = [shard for shard in results if shard is not None]
        assert len(done) == self.shards and sum(s["rows"] for s in done) == self.rows
        self._commit(done)
        return self._written(self.shards, sum(s["size"] for s in done), found)

    def _shard(self, number: int, there: set[str]) -> tuple[dict[str, Any], bool]:
        """Writes a shard, or finds it; returns what the manifest says of it."""
        name = self._shard_name(number, self.shards)
        first = number * self.shard_rows
        rows = min(self.shard_rows, self.rows - first)
        if f"{self.prefix}{name}" in there and (known := self._known_shard(name, rows)):
            self._count(rows)
            return known, True
        self._still_mine()
        pause, until = RETRY_FIRST_SECONDS, None
        while True:
            shard = Shard(first, rows)
            source = Source(self._pieces(name, shard))
            try:
                etag = self.client.put(self._object(name), source.begin(), if_absent=True)
                if etag is None:
                    etag = self.client.head(self._object(name)).etag
                entry = {"name": name, "rows": rows, "size": source.sent, "etag": etag}
                return {**entry, "notes": shard.notes}, False
            except SampleFailed as e:
                self._say_which(e, shard.at)
                raise
            except (PreconditionFailed, InvalidRequest, *UNSURE) as e:
                if source.failed is not None and not isinstance(source.failed, PASSING):
                    raise
                if isinstance(e, InvalidRequest) and source.waited_seconds < SILENT_SECONDS:
                    raise
                if source.failed is None and (known := self._known_shard(name, rows)):
                    # An attempt whose answer was lost, or another process.
                    return known, isinstance(e, PreconditionFailed)
                now = time.monotonic()
                until = now + self.retry_for if until is None else until
                if now + pause > until or self.stop.wait(pause):
                    raise
                pause = min(2 * pause, RETRY_MAX_SECONDS)
                self._count(-shard.counted)

    def _say_which(self, error: SampleFailed, position: int, order: Order | None = None) -> None:
        """Adds to an error about the row at a position where that row is."""
        order = self.order if order is None else order
        rows, sources = order.rows(self.request.epoch, position, position + 1)
        dataset = self.datasets[0 if sources is None else int(sources[0])]
        place = dataset.locate(int(rows[0]))
        error.row, error.file, error.row_in_file = int(rows[0]), place.file, place.row_in_file
        error.message += f"; it is row {place.row_in_file:,} of {place.file}"

    def _known_shard(self, name: str, rows: int) -> dict[str, Any] | None:
        """A shard that is there."""
        notes: dict[str, Any] = {}
        try:
            info = self._patiently(lambda: self.client.head(self._object(name)))
            if self.encoder.keeps_notes:
                said = self._get(f"_forebay/{name}.json")
                if said is None:
                    return None
                notes = json.loads(said[0])
        except NotFound:
            return None
        entry = {"name": name, "rows": rows, "size": info.size, "etag": info.etag}
        return {**entry, "notes": notes}

    def _pieces(self, name: str, shard: Shard) -> Iterator[bytes]:
        yield from self.encoder.pieces(self._batches(shard), shard)
        # Before the shard is whole, so that it never is there without them.
        for end, data in shard.beside:
            beside = f"_forebay/{name}{end}" if end == ".json" else f"{name}{end}"
            self._patiently(partial(self.client.put, self._object(beside), data))

    # The commit

    def _commit(self, shards: list[dict[str, Any]]) -> None:
        self.claimed["state"] = "all shards are written"
        self._put_claim(if_match=self.claim_etag)
        for name, data in self.encoder.finish(shards):
            self._patiently(partial(self.client.put, self._object(name), data))
        more = {"write": self.digest, "arguments": self.arguments}
        text = manifest_of(self.target, shards, self.request, more)
        put = partial(self.client.put, self._object(MANIFEST), text, if_absent=True)
        try:
            self._patiently(put)
        except (PreconditionFailed, *UNSURE) as e:
            # The answer to an attempt may be lost, and the manifest there.
            found = self._get(MANIFEST)
            if found is None or found[0] != text:
                if isinstance(e, PreconditionFailed):
                    raise Conflict(f"another process has written {self.target} meanwhile") from e
                raise
        self._clear()

    def _clear(self) -> None:
        """Removes what was needed only until the manifest was there, the claim last."""
        below = f"{self.target}_forebay/"
        try:
            found = self._patiently(lambda: [info.key for info in self.client.list(below)])
            notes = [key.removeprefix(self.prefix) for key in found]
            for name in [*(name for name in notes if name != CLAIM), CLAIM]:
                self._delete(name)
        except UNSURE as e:
            log.warning(
                "%s is written, but its claim %s is still there, and the next call with the same"
                " arguments removes it: %s",
                self.target,
                f"{self.target}{CLAIM}",
                e,
            )

    def _withdraw(self, failed: SampleFailed | InvalidRequest | Changed) -> None:
        """Removes the claim of a write that its rows or arguments do not allow, or whose rows are
        gone, if there is nothing else yet: whoever corrects the arguments, or opens the dataset
        again, then has the target to write to. Where there is, the error and the claim say so.
        """
        # The write's own error is told, whatever happens here.
        with contextlib.suppress(Error):
            below = self.client.list(f"{self.target.rstrip('/')}/", page_size=10)
            # As in check_empty: an empty object may stand for a directory.
            there = (info.key for info in below if not info.key.endswith("/"))
            if set(itertools.islice(there, 2)) == {f"{self.prefix}{CLAIM}"}:
                self._still_mine()
                self._delete(CLAIM)
                return
            self.claimed["failed"] = str(failed)
            self._put_claim(if_match=self.claim_etag)
            kept = (
                f"{self.target} has the shards that were written before: with other arguments,"
                " remove them first, or write to another prefix"
            )
            failed.hint = f"{failed.hint}; {kept}" if failed.hint else kept

    def _delete(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self._patiently(partial(self.client.delete, self._object(name)))


def _options_that_differ(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name} ({then.get(name)!r}, not {now.get(name)!r})"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]


def chosen(datasets: Sequence[Dataset[Any]], columns: Iterable[str] | None) -> list[Dataset[Any]]:
    """The datasets with these columns; None: with those that they have."""
    if columns is None:
        return list(datasets)
    columns = column_names(columns)
    return [dataset.select_columns(columns) for dataset in datasets]


def _is_as_stored(dataset: Dataset[Any]) -> bool:
    """Whether its columns have the names and types that the node gives them."""
    return not dataset.dressing and all(map(_is_as_stored, getattr(dataset, "bases", ())))


def check_empty(client: Client, bucket: str, prefix: str) -> None:
    """Raises Conflict if something is below a target."""
    # An empty object with a slash at its end only stands for a directory.
    listed = client.list(f"{bucket}/{prefix}", page_size=10)
    other = next((info for info in listed if not info.key.endswith("/")), None)
    if other is not None:
        raise Conflict(
            f"{bucket}/{prefix} is not empty: it holds {other.name}",
            hint="write to a prefix below which nothing is",
        )


def not_writable(target: str, e: Error) -> Conflict:
    """The error where a claim is refused at a target where nobody writes."""
    return Conflict(
        f"nothing can be written to {target}: {e.message}",
        hint="write to another prefix",
        status=e.status,
        request_id=e.request_id,
    )


def make_claim(
    client: Client, name: tuple[str, str], claim: dict[str, Any], if_match: str | None = None
) -> str | None:
    """Makes a claim where there is none, or replaces that of this ETag; returns the new ETag. The
    ``claim`` says who writes: ``writer``, from :func:`this_writer`.

    Raises:
        PreconditionFailed: There is one, or another one.
    """
    text = json.dumps(claim, indent=1).encode() + b"\n"
    condition: dict[str, Any] = {"if_match": if_match} if if_match else {"if_absent": True}
    return client.put(name, text, **condition) or client.head(name).etag


def manifest_of(
    target: str, shards: Sequence[dict[str, Any]], request: Request, more: dict[str, Any]
) -> bytes:
    """A manifest of these shards (``name``, ``size``, ``etag``, ``rows``), as the node reads it."""
    head: dict[str, Any] = {"forebay_manifest": 1}
    # What the node reads; of the others it says so by their names.
    packs = request.compression
    is_read = request.format in ("tar", "parquet", "jsonl")
    if request.format == "mds":
        is_read = not isinstance(packs, str) or packs.startswith(("zstd", "gz"))
    if is_read or (request.format == "tfrecord" and packs is None):
        head["format"] = request.format
    lines = [head | {"files": len(shards)} | more]
    for shard in shards:
        line = {"name": f"{target}{shard['name']}", "rows": shard["rows"]}
        # Without a version, the node looks.
        if shard["etag"] is not None:
            line |= {"size": shard["size"], "etag": shard["etag"]}
        lines.append(line)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _places(rows: int, count: int) -> list[tuple[int, int]]:
    """Where ``count`` of the rows are that say how large one is; all, if there are not more."""
    if rows <= count:
        return [(0, rows)]
    each = max(1, count // SAMPLE_PLACES)
    starts = np.linspace(0, rows - each, min(count, SAMPLE_PLACES)).astype(int).tolist()
    return [(start, start + each) for start in starts]


def between(value: float, least: int, most: int) -> int:
    return int(min(max(value, least), most))


def this_writer() -> dict[str, Any]:
    """Who writes a claim, told apart from all others."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "at": now, "id": uuid.uuid4().hex}


def _who(claim: dict[str, Any]) -> str:
    by = claim.get("writer")
    if not isinstance(by, dict):
        return ""
    return f" (since {by.get('at')}, process {by.get('pid')} of {by.get('host')})"


def _object_of(text: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
