"""Datasets for Ray Data: read from a node as Arrow blocks, and written as new shards with a
manifest.

::

    import forebay, ray

    ds = forebay.open("s3://bucket/corpus/**.parquet")
    rows = forebay.ray.read(ds, order=forebay.Block(16), seed=1)   # a ray.data.Dataset
    short = rows.filter(lambda row: len(row["text"]) < 1000)
    done = forebay.ray.write(short, "s3://bucket/short/", "parquet", compression="zstd")
    forebay.open(done.source)

Every machine of the cluster must reach the node: give the client its address, not a Unix socket, or
several nodes. Tokens do not travel: set ``FOREBAY_TOKEN`` in the workers' environment.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from ._needs import needs

with needs("forebay.ray"):
    import numpy as np

try:
    import ray.data
    from ray.data.block import BlockAccessor, BlockMetadata
    from ray.data.datasource import Datasink, Datasource, ReadTask
except ImportError as e:
    raise ImportError('forebay.ray needs Ray Data: pip install "ray[data]"') from e

from . import _alike, _arrow
from ._arguments import client_of, differences
from ._encode import (
    ENCODERS,
    ROW_GROUP_BYTES,
    ROW_GROUP_MAX_ROWS,
    Encoder,
    Options,
    Shard,
    kinds_of,
    told_apart,
)
from ._fetch import UNSURE, in_pieces, joined, patiently
from ._fetch import read as read_rows
from ._forebay import Client
from ._loadable import Loadable
from ._options import OPTIONS
from ._paced import Pace, paced
from ._plan import Order
from ._stop import Stop
from ._write import (
    BY_RAY,
    CLAIM,
    MANIFEST,
    READ_BYTES,
    READ_MAX_ROWS,
    Request,
    Source,
    Written,
    between,
    check_empty,
    chosen,
    make_claim,
    manifest_of,
    not_writable,
    refuse_maps,
    split_target,
    this_writer,
)
from .errors import Conflict, Error, InvalidRequest, NotFound, PreconditionFailed
from .rows import Rows
from .shuffle import Shuffle, to_wire
from .stats import Meter

__all__ = ["ForebayDatasink", "ForebayDatasource", "read", "write"]


def __dir__() -> list[str]:
    return sorted(__all__)


#: Positions of the rows of one write task, which number samples without keys.
_TASK_POSITIONS = 10**9
#: What the claim says when no task is to write any more.
ALL_WRITTEN = "all shards are written"
#: Rows that say how large a row is, and bytes of them at most.
SAMPLE_ROWS, SAMPLE_BYTES = 32, 64 << 20
log = logging.getLogger("forebay")
T = TypeVar("T")


def _patiently(client: Client, ask: Callable[[], T]) -> T:
    """What ``ask`` returns; repeated for as long as the client's timeout while the node or the
    bucket fails.
    """
    option = "the client's timeout"
    return patiently(ask, client.timeout, Stop(), Meter(), option, UNSURE)


def _pieces(
    datasets: Sequence[Any], numbers: np.ndarray, sources: np.ndarray | None
) -> Iterator[Rows]:
    """These rows, in as many answers as it takes."""

    def ask(some: np.ndarray, of: np.ndarray | None) -> Rows:
        return _patiently(datasets[0].client, partial(read_rows, datasets, None, some, of))

    return in_pieces(ask, numbers, sources)


@dataclass(frozen=True)
class _Range:
    """Rows at some positions of an order; called in a task of Ray."""

    sources: tuple[Any, Any, Any]
    order: Shuffle
    seed: int
    epoch: int
    #: The columns that are wanted, and what they are called. None: all.
    columns: dict[str, str] | None
    start: int
    stop: int
    rows: int
    #: What all blocks have, if the datasets have types of their own.
    schema: Any = None

    def __call__(self) -> Iterator[Any]:
        import pyarrow as pa

        datasets, weights, epoch_rows = self.sources
        order = Order(datasets, weights, epoch_rows, self.seed, self.order)
        # A task that wants no column counts rows.
        wanted = datasets[0].columns[:1] if self.columns == {} else self.columns
        datasets = chosen(datasets, None if wanted is None else list(wanted))
        for start in range(self.start, self.stop, self.rows):
            numbers, of = order.rows(self.epoch, start, min(start + self.rows, self.stop))
            for rows in _pieces(datasets, numbers, of):
                table = pa.Table.from_batches([_with(rows.arrow(), self.schema)])
                yield table if self.columns is None else _called(table, self.columns)


def _with(batch: Any, schema: Any) -> Any:
    """A batch with a schema for its columns, or with its own."""
    return batch if schema is None else _alike.cast(batch, schema)


def _of_all(datasets: Sequence[Any]) -> Any:
    """The schema for the rows of all datasets; None where theirs is the same, or where there is
    none.
    """
    first, *others = (dataset.schema for dataset in datasets)
    if all(list(s.items()) == list(first.items()) for s in others):
        return None
    if any(list(s) != list(first) for s in others):
        return None
    import pyarrow as pa

    try:
        schemas = [pa.record_batch(d._empty(d.columns)).schema for d in datasets]
        return _alike.schema_of(schemas)
    except _alike.Differ:
        # Rows of both in one block are refused, with their names.
        return None


def _called(table: Any, columns: dict[str, str]) -> Any:
    import pyarrow as pa

    if not columns:
        # As Ray itself reads Parquet: blocks without a column lose their number of rows in Ray
        # before 2.54.
        return table.select([]).append_column("__bsp_stub", pa.nulls(len(table)))
    return table.select(list(columns)).rename_columns(list(columns.values()))


class ForebayDatasource(Datasource):
    """The rows of a dataset or of a mix, each once, in the order of a plan: a task reads a range of
    its positions. Ray's choice of columns and its limits reach the node. All blocks have one
    schema: where datasets of a mix hold the same values in columns of different types, or one has
    nothing in a column, it is the type that holds those of all.

    Args:
        dataset: What :func:`forebay.open` or :func:`forebay.mix` returned.
        order, seed, epoch: As for :meth:`forebay.Dataset.write`.
        columns: Read only these.
    """

    def __init__(
        self,
        dataset: Loadable[Any],
        *,
        order: Shuffle = None,
        seed: int = 0,
        epoch: int = 0,
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        to_wire(order, "order")
        datasets, weights, epoch_rows = dataset._sources()
        refuse_maps(datasets, "forebay.ray")
        # What travels to the tasks.
        for part in datasets:
            part.block_shape  # noqa: B018 - asked for once
        datasets = chosen(datasets, columns)
        self._projection_map: dict[str, str] | None = None
        self._sources = (datasets, weights, epoch_rows)
        self._order, self._seed, self._epoch = order, seed, epoch
        plan = Order(datasets, weights, epoch_rows, seed, order)
        self._rows = plan.rows_per_epoch
        self._first = plan.rows(epoch, 0, min(SAMPLE_ROWS, self._rows))

    def _sample(self) -> tuple[float, Any, Any]:
        """About the bytes of a row, at least 1, by some rows; the schema of blocks; and that which
        rows are given before columns get the names that Ray wants, if they are from datasets with
        types of their own.
        """
        datasets, wanted = self._sources[0], list(self._projection_map or ()) or None
        for name in wanted or ():
            if name not in datasets[0].columns:
                raise InvalidRequest(
                    f"the rows that Ray reads of {datasets[0].name} have no column {name!r}",
                    hint=f"their columns: {', '.join(datasets[0].columns)}",
                )
        datasets = chosen(datasets, wanted)
        ids, sources = self._first
        of_all = None if self._projection_map == {} else _of_all(datasets)

        def take(places: np.ndarray) -> Rows:
            of = None if sources is None else sources[places]
            return joined(_pieces(datasets, ids[places], of), ids[places], of)

        seen, size, schema = 0, 0, None
        for rows in paced(np.arange(len(ids)), Pace(len(ids)), take):
            seen, size = seen + len(rows), size + rows.nbytes
            schema = schema or of_all or rows.arrow().schema
            if size > SAMPLE_BYTES:
                break
        if schema is not None and self._projection_map:
            schema = _called(schema.empty_table(), self._projection_map).schema
        return max(1.0, size / seen), schema, of_all

    def supports_projection_pushdown(self) -> bool:
        return True

    def apply_projection(
        self, columns: Any, renamed: dict[str, str] | None = None
    ) -> ForebayDatasource:
        """Ray before 2.52 gives names, and 2.51 new ones for some; later ones give what columns are
        called, by name.
        """
        if isinstance(columns, dict):
            return super().apply_projection(columns)
        if columns is None and not renamed:
            return self
        now = self._projection_map
        if now is None:
            now = {name: name for name in self._sources[0][0].columns}
        found, called = {name: column for column, name in now.items()}, renamed or {}
        wanted = found if columns is None else columns
        projected = copy.copy(self)
        projected._projection_map = {found.get(n, n): called.get(n, n) for n in wanted}
        return projected

    def get_current_projection(self) -> list[str] | None:
        """Ray before 2.52 asks for it."""
        return None if self._projection_map is None else list(self._projection_map)

    def estimate_inmemory_data_size(self) -> int | None:
        if not self._rows:
            return 0
        row_bytes, *_ = self._sample()
        return int(row_bytes * self._rows)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        """As many tasks as Ray wants, each with exactly the rows that its metadata says."""
        if not self._rows:
            return []
        row_bytes, schema, of_all = self._sample()
        tasks = max(1, min(parallelism, self._rows))
        bounds = [self._rows * i // tasks for i in range(tasks + 1)]
        out = []
        for start, stop in pairwise(bounds):
            rows = between(READ_BYTES / row_bytes, 1, READ_MAX_ROWS)
            if per_task_row_limit is not None:
                rows = min(rows, max(1, per_task_row_limit))
            task = _Range(
                self._sources,
                self._order,
                self._seed,
                self._epoch,
                self._projection_map,
                start,
                stop,
                rows,
                of_all,
            )
            metadata = BlockMetadata(
                num_rows=stop - start,
                size_bytes=int((stop - start) * row_bytes),
                exec_stats=None,
                input_files=None,
            )
            out.append(
                ReadTask(task, metadata, schema=schema, per_task_row_limit=per_task_row_limit)
            )
        return out


def read(
    dataset: Loadable[Any],
    *,
    order: Shuffle = None,
    seed: int = 0,
    epoch: int = 0,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """A ``ray.data.Dataset`` of the rows; ``options`` are those of ``ray.data.read_datasource``
    (``override_num_blocks``, ``concurrency``, ``ray_remote_args``). Its blocks are Arrow tables,
    and it knows its number of rows. See :class:`ForebayDatasource`.
    """
    source = ForebayDatasource(dataset, order=order, seed=seed, epoch=epoch, columns=columns)
    return ray.data.read_datasource(source, **options)


class ForebayDatasink(Datasink[list[dict[str, Any]]]):
    """New shards, one of each write task, and a manifest, which is the commit.

    What an attempt of a task left that Ray repeated is removed before the manifest is written, or
    by itself if it ends after that; a write that fails removes what it wrote, also of tasks that
    end after it. All rows must have the
    same columns of the same types (JSON lines may differ): cast them before. A column that has only
    missing values in some blocks has the type of the others; in formats other than Parquet, where
    these are of one task.

    Args:
        target, format, compression, row_group_rows, key, index, name: As for
            :meth:`forebay.Dataset.write`.
        format_options: Its other options of single formats, and for MDS ``columns``: a dict with
            the encodings of some columns.
        min_rows_per_shard: Ray gives each task at least so many rows, where there are as many.
        client: The node to write through. Default: the one in ``FOREBAY_NODE``.

    Attributes:
        written: What was written, when it is.
    """

    def __init__(
        self,
        target: str,
        format: str = "parquet",
        *,
        compression: str | Mapping[str, str] | None = None,
        row_group_rows: int | None = None,
        key: str | None = "__key__",
        index: bool = True,
        name: str = "shard",
        format_options: Mapping[str, Any] | None = None,
        min_rows_per_shard: int | None = None,
        client: Client | None = None,
    ) -> None:
        if format_options is not None and not isinstance(format_options, Mapping):
            raise InvalidRequest(
                f"format_options is {format_options!r}", hint='a dict, as in {"mode": 0o444}'
            )
        self.request = Request(
            target=target,
            format=format,
            shard_rows=min_rows_per_shard,
            compression=compression,
            row_group_rows=row_group_rows,
            key=key,
            index=index,
            name=name,
            options=format_options or {},
        ).checked()
        for option in ("maxcount", "size_limit"):
            if option in self.request.options:
                raise InvalidRequest(
                    f"{option}= does not apply to Ray, where each task writes one shard",
                    hint="min_rows_per_shard=",
                )
        self.bucket, self.prefix = split_target(target)
        self.client = client_of(client)
        self.write_id = uuid.uuid4().hex
        self.claimed = False
        self.claim_etag: str | None = None
        #: What is written besides shards and claim, once it was tried.
        self.ends: list[str] = []
        self.written: Written | None = None

    @property
    def min_rows_per_write(self) -> int | None:
        return self.request.shard_rows

    def _object(self, name: str) -> tuple[str, str]:
        return self.bucket, f"{self.prefix}{name}"

    def _kinds(self, batch: Any) -> dict[str, str]:
        return told_apart(kinds_of(_arrow.columns(batch)), self.request.format)

    def _encoder(self, kinds: dict[str, str], row_group_rows: int | None = None) -> Encoder:
        r = self.request
        options = Options(
            kinds=kinds,
            compression=r.compression,
            key=r.key,
            row_group_rows=r.row_group_rows or row_group_rows,
            index=r.index,
            raw=r.options.get("raw", False),
            more=r.options,
        )
        return ENCODERS[r.format](options)

    def check_columns(self, schema: Any) -> None:
        """Raises InvalidRequest for columns that the format cannot hold, as far as a schema of
        Ray's says what will be written.
        """
        import pyarrow as pa

        if isinstance(schema, pa.Schema) and len(schema):
            empty = pa.RecordBatch.from_pylist([], schema=schema)
            # Ray may know of the first block only.
            self._encoder(self._without_null(self._kinds(empty)))

    def on_write_start(self, schema: Any = None) -> None:
        """Refuses a target where something is, and claims it. It ignores the schema: where the
        tasks that write also do earlier steps, Ray gives the schema of what the first step gets.
        """
        _patiently(self.client, lambda: check_empty(self.client, self.bucket, self.prefix))
        self._claim("begun", None)
        self.claimed = True

    def _claim(self, state: str, if_match: str | None) -> None:
        """Makes the claim, or says in it how far this write is."""
        by = None if state == "given up" else self.write_id
        claim = {"forebay_write": 1, "write": by, "arguments": BY_RAY, "state": state}
        claim |= {"of": self.write_id, "writer": this_writer()}
        name = self._object(CLAIM)
        try:
            make = partial(make_claim, self.client, name, claim, if_match)
            self.claim_etag = _patiently(self.client, make)
        except (PreconditionFailed, NotFound) as e:
            # The answer to an attempt may be lost, and the claim there.
            with contextlib.suppress(NotFound):
                found = _patiently(self.client, lambda: self.client.get(name))
                there = json.loads(bytes(found))
                if (there.get("of"), there.get("state")) == (self.write_id, state):
                    self.claim_etag = found.etag
                    return
                raise self._another() from e
            if if_match is None and not self._is_written():
                # Nobody writes there: the bucket has another reason, such as a file of that name.
                if isinstance(e, NotFound):
                    raise
                raise not_writable(f"{self.bucket}/{self.prefix}", e) from e
            raise self._another() from e

    def _another(self) -> Conflict:
        return Conflict(
            f"another process writes {self.bucket}/{self.prefix}",
            hint="one job writes to a target; remove what one left that was given up",
        )

    def _is_written(self) -> bool:
        return _patiently(self.client, partial(self.client.exists, self._object(MANIFEST)))

    def _is_over(self) -> bool:
        """Whether the claim is not that of this write any more, or says that it has all shards."""
        name = self._object(CLAIM)
        try:
            claim = json.loads(bytes(_patiently(self.client, lambda: self.client.get(name))))
        except NotFound:
            return True
        return bool(claim.get("write") != self.write_id or claim.get("state") == ALL_WRITTEN)

    def write(self, blocks: Iterable[Any], ctx: Any) -> list[dict[str, Any]]:
        """Writes a shard of all blocks of this task; returns what the manifest says of it."""
        # Ray holds them, too, until the task has ended: what broke off is written again.
        held = list(blocks)
        return _patiently(self.client, lambda: self._write(held, ctx))

    def _write(self, blocks: Sequence[Any], ctx: Any) -> list[dict[str, Any]]:
        batches = (
            Rows([batch], np.arange(len(batch), dtype=np.uint64))
            for table in _tables(blocks)
            for batch in _batches(table)
        )
        first = next(batches, None)
        if first is None:
            return []
        kinds = self._kinds(first)
        row_bytes = max(1.0, first.arrow().nbytes / len(first))
        group = between(ROW_GROUP_BYTES / row_bytes, 1, ROW_GROUP_MAX_ROWS)
        encoder = self._encoder(self._without_null(kinds), group)
        # Each attempt writes another object: an earlier one, of Ray's, may still be at work.
        unique = uuid.uuid4().hex[:8]
        name = f"{self.request.name}-{ctx.task_idx:06}-{unique}{encoder.extension}"
        shard = Shard(ctx.task_idx * _TASK_POSITIONS, 0)
        counted = _Counted(first, self._alike(kinds, batches))
        source = Source(self._pieces(encoder, counted, shard, name))
        etag = self.client.put(self._object(name), source.begin(), if_absent=True)
        if self._is_over():
            # Whoever ended it has not seen this shard.
            for key in (name, f"{name}.idx"):
                self._delete(f"{self.prefix}{key}")
            raise Conflict(
                f"the write to {self.bucket}/{self.prefix} was given up or ended meanwhile",
                hint="Ray repeats tasks that it takes for lost: another attempt may have written"
                " these rows",
            )
        entry = {"name": name, "rows": counted.rows, "size": source.sent, "etag": etag}
        return [{**entry, "notes": shard.notes, "kinds": kinds}]

    def _alike(self, kinds: dict[str, str], batches: Iterable[Rows]) -> Iterator[Rows]:
        for batch in batches:
            self._check_alike(kinds, self._kinds(batch))
            yield batch

    def _check_alike(self, kinds: dict[str, str], others: dict[str, str]) -> None:
        """Refuses rows of other types, which the format would change. A line of JSON says itself
        what it holds.
        """
        if self.request.format == "jsonl" or list(kinds.items()) == list(others.items()):
            return
        how = differences(kinds, others, "in some", "in others")
        raise InvalidRequest(
            f"the rows differ: {how}",
            hint="cast the columns before: all rows of a write have the same ones",
        )

    def _without_null(self, kinds: dict[str, str]) -> dict[str, str]:
        """What the rows of a task are to its encoder, where a missing value leaves nothing in the
        shard: a column without values is then one of any type.
        """
        if self.request.format not in ("tar", "tfrecord"):
            return kinds
        return {name: "text" if of == "null" else of for name, of in kinds.items()}

    def _kinds_of_all(self, shards: Sequence[dict[str, Any]]) -> dict[str, str]:
        """What the rows of all shards are. A task may have nothing but missing values of a column:
        readers of Parquet, tar and TFRecord take it for one of the type that other shards have.
        """
        first = shards[0]["kinds"]
        for shard in shards[1:]:
            other = shard["kinds"]
            if self.request.format in ("parquet", "tar", "tfrecord") and list(first) == list(other):
                first = {n: other[n] if of == "null" else of for n, of in first.items()}
                other = {n: first[n] if of == "null" else of for n, of in other.items()}
            self._check_alike(first, other)
        return dict(first)

    def _pieces(
        self, encoder: Encoder, batches: Iterable[Rows], shard: Shard, name: str
    ) -> Iterator[bytes]:
        yield from encoder.pieces(batches, shard)
        for end, data in shard.beside:
            # Notes travel with the result.
            if end != ".json":
                self.client.put(self._object(f"{name}{end}"), data)

    def on_write_complete(self, write_result: Any) -> None:
        """Writes the manifest."""
        shards = [entry for entries in write_result.write_returns for entry in entries]
        shards.sort(key=lambda entry: entry["name"])
        if not shards:
            raise InvalidRequest("there are no rows to write")
        kinds = self._kinds_of_all(shards)
        self._claim(ALL_WRITTEN, self.claim_etag)
        self._remove(keep=[entry["name"] for entry in shards])
        ends = self._encoder(kinds).finish(shards)
        self.ends = [name for name, _ in ends]
        for name, data in ends:
            _patiently(self.client, partial(self.client.put, self._object(name), data))
        target = f"{self.bucket}/{self.prefix}"
        text = manifest_of(target, shards, self.request, {"write": self.write_id})
        self.ends.append(MANIFEST)
        try:
            put = partial(self.client.put, self._object(MANIFEST), text, if_absent=True)
            _patiently(self.client, put)
        except PreconditionFailed as e:
            # Of an attempt whose answer is lost, it may be the own one.
            if not self._is_there(text):
                raise Conflict(f"another process has written {target} meanwhile") from e
        except Error:
            # The answer may be lost, and the manifest there.
            if not self._is_there(text):
                raise
        try:
            self._delete(f"{self.prefix}{CLAIM}")
        except Error as e:
            log.warning("%s is written, but its claim %s is still there: %s", target, CLAIM, e)
        self.written = Written(
            target=target,
            format=self.request.format,
            manifest=f"{target}{MANIFEST}",
            shards=len(shards),
            rows=sum(entry["rows"] for entry in shards),
            bytes=sum(entry["size"] for entry in shards),
            found=0,
            seconds=0.0,
        )

    def on_write_failed(self, error: BaseException) -> None:
        """Removes what was written, unless the manifest is there, or this write is not the one that
        has the claim.
        """
        if not self.claimed:
            return
        try:
            if MANIFEST in self.ends and self._is_written():
                return
            # Tasks that are still at work see it, and remove their shards themselves.
            self._claim("given up", self.claim_etag)
            self._remove(keep=[])
            for name in self.ends:
                self._delete(f"{self.prefix}{name}")
            self._delete(f"{self.prefix}{CLAIM}")
        except Error as e:
            where = f"{self.bucket}/{self.prefix}"
            log.warning("what a write that failed left below %s is not removed: %s", where, e)

    def _is_there(self, text: bytes) -> bool:
        with contextlib.suppress(Error):
            get = partial(self.client.get, self._object(MANIFEST))
            return bytes(_patiently(self.client, get)) == text
        return False

    def _remove(self, keep: list[str]) -> None:
        kept = {f"{self.prefix}{name}" for name in keep}
        where = f"{self.bucket}/{self.prefix}{self.request.name}-"
        for info in _patiently(self.client, lambda: list(self.client.list(where))):
            if info.key not in kept and info.key.removesuffix(".idx") not in kept:
                self._delete(info.key)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            _patiently(self.client, partial(self.client.delete, (self.bucket, key)))


class _Counted:
    """Batches, and how many rows they had."""

    def __init__(self, first: Rows, rest: Iterator[Rows]) -> None:
        self._first, self._rest, self.rows = first, rest, 0

    def __iter__(self) -> Iterator[Rows]:
        for batches in ([self._first], self._rest):
            for batch in batches:
                self.rows += len(batch)
                yield batch


def _tables(blocks: Sequence[Any]) -> Iterator[Any]:
    """Blocks as tables. A column of nothing but missing values, of which Ray knows no type, has
    that of another block.
    """
    import pyarrow as pa

    accessors = [BlockAccessor.for_block(block) for block in blocks]
    known: dict[str, Any] = {}
    for accessor in accessors if len(accessors) > 1 else ():
        for field in accessor.to_arrow().schema:
            if not pa.types.is_null(field.type):
                known.setdefault(field.name, field)
    for accessor in accessors:
        table = accessor.to_arrow()
        for at, field in enumerate(table.schema):
            if pa.types.is_null(field.type) and (of := known.get(field.name)) is not None:
                # Of some types PyArrow makes no missing values: these are refused as before.
                with contextlib.suppress(pa.ArrowNotImplementedError):
                    values = pa.nulls(len(table), of.type)
                    table = table.set_column(at, of.with_nullable(True), values)
        yield table


def _batches(table: Any) -> Iterator[Any]:
    """The batches of a table, whose rows each have a chance to be cut into row groups."""
    yield from (batch for batch in table.to_batches() if len(batch))


def write(
    dataset: ray.data.Dataset,
    target: str,
    format: str = "parquet",
    *,
    compression: str | Mapping[str, str] | None = None,
    row_group_rows: int | None = None,
    key: str | None = "__key__",
    index: bool = True,
    name: str = "shard",
    format_options: Mapping[str, Any] | None = None,
    min_rows_per_shard: int | None = None,
    client: Client | None = None,
    **options: Any,
) -> Written:
    """Writes a ``ray.data.Dataset`` as new shards; ``options`` are those of its ``write_datasink``
    (``concurrency``, ``ray_remote_args``). See :class:`ForebayDatasink`.

    Raises:
        InvalidRequest: The format cannot hold a column. Where Ray knows the columns before it reads
            anything, this is raised before it begins.
        Conflict: Something is at the target, or another process writes there.
    """
    if wrong := options.keys() & OPTIONS.keys():
        raise InvalidRequest(
            f"{min(wrong)}= is an option of a format, and these are those of write_datasink",
            hint=f'format_options={{"{min(wrong)}": …}}',
        )
    began = time.monotonic()
    # As far as it is known without reading anything.
    known = dataset.schema(fetch_if_missing=False)
    sink = ForebayDatasink(
        target,
        format,
        compression=compression,
        row_group_rows=row_group_rows,
        key=key,
        index=index,
        name=name,
        format_options=format_options,
        min_rows_per_shard=min_rows_per_shard,
        client=client,
    )
    sink.check_columns(None if known is None else known.base_schema)
    try:
        dataset.write_datasink(sink, **options)
    except Exception:
        raise
    except BaseException as e:
        # Ray tells a sink of an Exception only: Ctrl-C, too, leaves nothing.
        sink.on_write_failed(e)
        raise
    assert sink.written is not None
    return replace(sink.written, seconds=time.monotonic() - began)
