"""What datasets and mixes have in common: they make loaders."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

import numpy as np

from . import _collate
from ._decode import OnError
from ._elsewhere import METHODS, explained
from .loader import Loader, Options, TooLong, Uneven
from .pack import Pack
from .rows import Row, Rows
from .schedule import Schedule
from .shuffle import Shuffle

if TYPE_CHECKING:
    import jax
    import pyarrow
    import torch

    from ._forebay import Client
    from ._options import WriteOptions
    from ._write import Written
    from .dataset import Dataset

#: What a sample is: :data:`Row`, or what the dataset's ``decode`` makes from one.
S_co = TypeVar("S_co", covariant=True)
#: What ``decode`` or ``transform`` makes of a sample, and what ``collate`` makes of samples.
T = TypeVar("T")
B = TypeVar("B")


class Common(TypedDict, total=False):
    """The arguments of :meth:`Loadable.loader` that do not change what a batch is."""

    shuffle: Shuffle
    seed: int
    epochs: float | None
    rank: int | None
    world_size: int | None
    uneven: Uneven
    columns: Sequence[str] | None
    on_error: OnError
    max_skipped: int | None
    pin_memory: bool
    threads: int | None
    prefetch: int
    max_total: int | None
    length: str | Sequence[Any] | np.ndarray | None
    lookahead: int | None
    padded: bool
    too_long: TooLong
    stream: bool
    connections: int | None
    window_bytes: int | None
    nodes: Sequence[Any] | None
    follow: bool
    retry_for: float | None
    progress: bool | None
    job: str | None


class Loadable(ABC, Generic[S_co]):
    """Something that batches can be made from."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, elsewhere in METHODS.items():
            if name in cls.__dict__:
                setattr(cls, name, explained(elsewhere)(cls.__dict__[name]))

    @abstractmethod
    def _sources(
        self,
    ) -> tuple[Sequence[Dataset[S_co]], Sequence[float] | Schedule | None, int | None]:
        """The datasets, their weights (None: one dataset), and rows per epoch (None: as many as
        there are).
        """

    # What a batch is, for type checkers. `| Any` where the types of columns decide: those of texts
    # and of bytes are no tensors.
    @overload
    def loader(
        self,
        batch_size: int | None = None,
        *,
        collate: Callable[[Any], B],
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        output: _collate.Output = "rows",
        **options: Unpack[Common],
    ) -> Loader[B]: ...
    @overload
    def loader(
        self,
        batch_size: int | None = None,
        *,
        transform: Callable[[Any], T],
        decode: Callable[[dict[str, Any]], Any] | None = None,
        collate: None = None,
        output: Literal["rows", "arrow"] = "rows",
        **options: Unpack[Common],
    ) -> Loader[list[T]]: ...
    @overload
    def loader(
        self,
        batch_size: int | None = None,
        *,
        decode: Callable[[dict[str, Any]], T],
        transform: None = None,
        collate: None = None,
        output: Literal["rows", "arrow"] = "rows",
        **options: Unpack[Common],
    ) -> Loader[list[T]]: ...
    @overload
    def loader(  # type: ignore[overload-overlap]
        self: Loadable[Row],
        batch_size: int | None = None,
        *,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["rows"] = "rows",
        **options: Unpack[Common],
    ) -> Loader[Rows]: ...
    @overload
    def loader(
        self: Loadable[Row],
        batch_size: int | None = None,
        *,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["numpy"],
        **options: Unpack[Common],
    ) -> Loader[dict[str, np.ndarray]]: ...
    @overload
    def loader(
        self: Loadable[Row],
        batch_size: int | None = None,
        *,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["torch"],
        **options: Unpack[Common],
    ) -> Loader[dict[str, torch.Tensor | Any]]: ...
    @overload
    def loader(
        self: Loadable[Row],
        batch_size: int | None = None,
        *,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["jax"],
        **options: Unpack[Common],
    ) -> Loader[dict[str, jax.Array | Any]]: ...
    @overload
    def loader(
        self: Loadable[Row],
        batch_size: int | None = None,
        *,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["arrow"],
        **options: Unpack[Common],
    ) -> Loader[pyarrow.RecordBatch]: ...
    @overload
    def loader(
        self,
        batch_size: int | None = None,
        *,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["rows", "arrow"] = "rows",
        **options: Unpack[Common],
    ) -> Loader[list[S_co]]: ...
    @overload
    def loader(
        self,
        batch_size: int | None = None,
        *,
        pack: Pack,
        decode: None = None,
        transform: None = None,
        collate: None = None,
        output: Literal["rows", "numpy", "torch", "jax"] = "rows",
        **options: Unpack[Common],
    ) -> Loader[dict[str, Any]]: ...
    # Samples that are stacked: what that gives depends on the samples.
    @overload
    def loader(
        self,
        batch_size: int | None = None,
        *,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        collate: None = None,
        output: Literal["numpy", "torch", "jax"],
        **options: Unpack[Common],
    ) -> Loader[Any]: ...
    def loader(
        self,
        batch_size: int | None = None,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        epochs: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "drop",
        columns: Sequence[str] | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        max_skipped: int | None = None,
        output: _collate.Output = "rows",
        pin_memory: bool = False,
        threads: int | None = None,
        prefetch: int = 4,
        max_total: int | None = None,
        length: str | Sequence[Any] | np.ndarray | None = None,
        lookahead: int | None = None,
        padded: bool = False,
        too_long: TooLong = "error",
        pack: Pack | None = None,
        stream: bool = False,
        connections: int | None = None,
        window_bytes: int | None = None,
        nodes: Sequence[Any] | None = None,
        follow: bool = True,
        retry_for: float | None = None,
        progress: bool | None = False,
        job: str | None = None,
        **unknown: Any,
    ) -> Loader[Any]:
        """Batches in the order of a plan.

        Args:
            batch_size: Rows of a batch of one rank. With ``max_total``: the most that it may have.
            shuffle: ``forebay.Block(16)``, ``forebay.Full()``, ``forebay.Window(10_000)``, or None
                for the stored order. Each epoch has another order.
            seed: The seed of the order. Together with the shuffle and the dataset's version it
                determines every epoch.
            epochs: None: a ``for`` loop goes to the end of the epoch that the loader is in. A
                number: to the end of that many epochs, counted from the first one of the job, even
                after a resume. ``math.inf``: it never ends.
            rank, world_size: This process among the training processes. Default: found out at the
                first batch. ``torch.distributed`` or ``jax.distributed`` decide, if the process
                has initialized one of them; else the environment of torchrun, Slurm or MPI
                (:func:`forebay.torch.rank_and_world` lists the variables); else the process is
                alone. Half an answer, such as ``WORLD_SIZE`` without ``RANK``, is an error. Values
                given here take precedence over all of these. Step ``s`` of all ranks takes the next
                ``world_size * batch_size`` rows of the order, rank ``r`` the ``r``-th
                ``batch_size`` of them: the order does not depend on the number of ranks, and all
                ranks have equally many steps.
            uneven: What to do with the last rows of an epoch that do not fill a step of all ranks.
                ``"drop"``: leave them out. ``"pad"``: fill up the step with rows from the
                beginning, marked as padding (``loader.last.real``; in dicts the column
                ``__real__``). ``"repeat"``: fill it up, and the rows count.
            columns: Read only these columns. Default: the dataset's.
            decode: Makes a sample from a row, which is a dict. Default: the dataset's ``decode``;
                without one, batches are made from columns.
            transform: Applied to what ``decode`` returned.
            collate: Makes a batch from the list of samples; without ``decode`` and ``transform`` it
                is applied to what ``output`` gives. Default: see ``output``.
            on_error: ``"raise"``: a sample that fails ends the loop with a :class:`SampleFailed`
                that names its file and row. A function: called with that error; what it returns
                is the sample. ``"skip"``: the sample is left out, its batch is shorter, and the log
                names it; ``stats().skipped`` counts them. A batch of which nothing is left is left
                out too, but an error where there are several ranks or workers of a DataLoader: the
                others take a step with it.
            max_skipped: How many samples one loop skips (in each DataLoader worker) before a
                failure is still raised. Default: 100.
            output: What a batch is. Without ``decode``: ``"rows"`` (:class:`Rows`), ``"numpy"``,
                ``"torch"`` or ``"jax"`` (a dict of columns of shape ``(batch_size, …)``),
                ``"arrow"`` (a ``pyarrow.RecordBatch``). With it: a list of samples, or for
                ``"numpy"``, ``"torch"`` and ``"jax"`` the result of stacking them, in which texts
                and bytes are lists.
            pin_memory: Put tensors into page-locked memory (``output="torch"``).
            threads: Threads that run ``decode``, ``transform`` and ``collate``, ahead of the loop.
                0: the loop does it itself. Default: the number of cores, at most 4.
            prefetch: Batches that are requested ahead of the one waited for, and as many that are
                decoded ahead.
            max_total, length: Batches bounded by total length, for speech and text: in a batch, the
                sum of the column ``length`` is at most ``max_total`` (whole numbers; that column is
                read once, from end to end, and 8 bytes for each row are kept). Instead of a
                column's name: an array with the length of each row (for a mix: a list of arrays).
            lookahead: How many rows are considered to put rows of similar length together. Default:
                those of 100 full batches.
            padded: Each row counts as long as the longest of its batch, as when batches become
                rectangles.
            too_long: What to do with a row whose length alone exceeds ``max_total``. ``"error"``:
                end the loop before its first batch, and say which row it is. ``"alone"``: make it a
                batch of its own, which exceeds ``max_total``. ``"skip"``: leave it out. The log
                says how many there are.
            pack: Rows of tokens (or of text and a tokenizer) as sequences of one length, for
                language models: :class:`forebay.Pack`. ``batch_size`` counts packs, and a batch is
                a dict of ``tokens`` of shape ``(batch_size, length)``; ``position_ids`` (from 0 in
                each document), ``document_ids`` (the number of the document in its pack, -1 for
                padding) and ``mask`` (False for padding) of the same shape; ``lengths``, the tokens
                of each pack that are not padding; and for attention over documents
                ``cu_seqlens``, where each document or run of padding begins in the flattened
                batch, and its end, and ``max_seqlen``, the longest of them. ``tokens`` have the
                type of the column, or ``int64``; the others are ``int32``, the mask bits.
                ``output="rows"`` gives NumPy arrays. ``uneven="pad"`` fills up the last step with
                packs of padding only.
            stream: The node takes the lead: it computes the same plan and sends finished batches
                over ``connections``, before they are requested. For nodes that are far away. Not
                within DataLoader workers.
            connections: Default: chosen by distance and rate.
            window_bytes: How much may be in flight or waiting here, in bytes.
            follow: Tell the node the order, so that its cache fetches, keeps and evicts by it,
                until the loop ends, is closed or dropped. (For a stream it knows the order.)
            retry_for: Seconds for which requests for the rows of a batch are repeated while the
                node cannot be reached, breaks off, or is too busy (429, 503). The loop continues
                where it was. Default: the client's ``timeout``, which is 60. If the client has
                several nodes, another one is asked at once, and this is for when none answers.
            nodes: Further nodes (URLs, which are asked as the dataset's client asks, or clients)
                that serve the same dataset, for streams: each sends its part of the steps, and
                those of one that is down. Default: if the client's node belongs to a cluster, and
                is not on this machine, up to four of its members.
            progress: Draw a line on the terminal. None: on terminals, after a second.
            job: What this job is called in the node's account (``forebay report JOB``). All ranks
                may give the same name. Default: ``FOREBAY_JOB``, or a name of the loader's own.

        Raises:
            ValueError, TypeError: Arguments that make no sense.
            InvalidRequest (by the loop): The environment says half of what the rank is; or an epoch
                has fewer rows than one step of all ranks takes, with ``uneven="drop"``.
        """
        if unknown:
            raise TypeError(_unknown(unknown))
        options = Options(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
            uneven=uneven,
            columns=columns,
            decode=decode,
            transform=transform,
            collate=collate,
            on_error=on_error,
            max_skipped=max_skipped,
            output=output,
            pin_memory=pin_memory,
            threads=threads,
            prefetch=prefetch,
            max_total=max_total,
            length=length,
            lookahead=lookahead,
            padded=padded,
            too_long=too_long,
            pack=pack,
            stream=stream,
            connections=connections,
            window_bytes=window_bytes,
            nodes=nodes,
            follow=follow,
            retry_for=retry_for,
            progress=progress,
            job=job,
        )
        return self._loader(options)

    def write(
        self,
        target: str,
        format: str = "parquet",
        *,
        order: Shuffle | Loader[Any] = None,
        seed: int = 0,
        epoch: int = 0,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        shard_size: int | str | None = None,
        shard_rows: int | None = None,
        compression: str | Mapping[str, str] | None = None,
        row_group_rows: int | None = None,
        key: str | None = "__key__",
        index: bool = True,
        name: str = "shard",
        writers: int | None = None,
        client: Client | None = None,
        retry_for: float | None = None,
        progress: bool | None = None,
        **options: Unpack[WriteOptions],
    ) -> Written:
        """Writes the rows, in any order, as new shards below a prefix of a bucket.

        The shards go out as they are made, in parts: nothing is kept on this machine's disk, and
        memory does not grow with what is written. Rows are written as they are stored: ``decode``
        is not applied, and a dataset with a ``map`` is refused. The manifest ``_manifest`` is
        written last, and is the commit: ``forebay.open(written.source)`` opens the new dataset.
        Until then ``forebay.open`` refuses the prefix, and patterns that match files below it.

        A write that was killed goes on when it is called again with the same arguments: shards that
        are there stay. (If the first call was still running, the second one takes over, and the
        first one ends with :class:`Conflict`.)

        Args:
            target: ``"bucket/new/"``, with or without ``s3://``. Nothing may be there, unless this
                write began it.
            format: ``"parquet"`` (needs PyArrow), ``"tar"`` (WebDataset: a member ``key.column``
                for each column of a row; texts as UTF-8, numbers as digits), ``"tfrecord"``
                (``tf.train.Example``), ``"mds"`` (MosaicML Streaming), ``"jsonl"``. The lines of
                JSONL (``columns=["json"]``) and the records of TFRecord are written as they are.
            order, seed, epoch: The order of a loader with this ``shuffle=`` and ``seed=``, in this
                epoch. Default: the stored order. A loader of these datasets is taken for its plan:
                its shuffle and its seed; where it is, how it batches and which rank it is do not
                matter.
            columns: Write only these. Default: the dataset's. MDS: also a dict that gives each its
                encoding, as MosaicML's ``MDSWriter`` has it: ``{"id": "int", "img": "jpeg"}``.
                Columns of bytes take any encoding, and are written as they are.
            shard_size: Bytes of a shard, as written: a number or ``"256MiB"``. How many rows that
                is, a sample of the rows tells, so shards have about this size. Default: 256 MiB;
                64 MiB for MDS, of which each writer keeps a shard in memory.
            shard_rows: Rows of each shard but the last, exactly, instead.
            compression: Parquet: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"brotli"``, ``"lz4"``, or
                a dict with one for each of some columns; tar: ``"gz"``; TFRecord: ``"gz"``,
                ``"zlib"``; JSONL: ``"gz"``, ``"zstd"``; MDS: ``"zstd"``, ``"gz"``, ``"bz2"``,
                ``"br"``, ``"snappy"``; with a level as in ``"zstd:7"``. Default: none.
            row_group_rows: Parquet: rows of a row group. Default: as many as have 8 MiB.
            key: Tar: the column that names the samples. None, or no such column: they have the
                numbers of their positions.
            index: TFRecord: write a file of offsets (``.idx``) beside each shard.
            name: What names of shards begin with: ``shard-00000-of-00012.parquet``.
            writers: Shards that are made at the same time. Default: 4.
            client: The node to write through. Default: the dataset's.
            retry_for: Seconds for which each request is made again while a node or the bucket
                fails. Default: the client's ``timeout``.
            progress: Draw a line on the terminal. None: on terminals, after a second.
            **options: Those of single formats, as their own libraries call them. None: as if it was
                not given.

                All: ``compression_level``, a number, instead of ``"zstd:7"``; for Parquet also a
                dict by column.

                Parquet, as for ``pyarrow.parquet.ParquetWriter``, but with the names of columns
                where that wants paths: ``use_dictionary``, ``write_statistics`` and
                ``use_byte_stream_split`` (True, False or a list of columns), ``column_encoding`` (a
                text, or a dict by column), ``bloom_filter_options`` (a dict by column),
                ``dictionary_pagesize_limit`` and ``data_page_size`` (bytes), ``max_rows_per_page``,
                ``write_batch_size`` (values), ``data_page_version``, ``version``,
                ``write_page_index``, ``write_page_checksum``, ``use_content_defined_chunking``,
                ``store_schema``, ``store_decimal_as_integer``, ``use_compliant_nested_type``,
                ``coerce_timestamps``, ``allow_truncated_timestamps``.

                Tar, as for WebDataset's ``ShardWriter``: ``encoder``: a function that makes of a
                sample (a dict with ``__key__``) the one to write, whose values are bytes or texts;
                or a dict from extensions to functions of a value (bytes and texts go as they are);
                or False: only bytes and texts are written. Without it, lists and structs of columns
                whose extension is ``json``, ``npy``, ``pth`` or ``mp`` are written as such.
                Functions are called by several threads. ``mode`` (such as ``0o444``; default:
                ``0o644``), ``mtime`` (seconds since 1970; default: 0), ``user`` and ``group``
                (texts; default: empty) of the members; ``maxcount``: samples of a shard, at most;
                ``compress=True`` is ``compression="gz"``.

                TFRecord: ``raw``: True writes the one column of bytes as records, False makes
                ``tf.train.Example`` of everything; default: records of TFRecord stay what they are.
                ``compression_type="GZIP"`` or ``"ZLIB"`` is ``compression=``.

                MDS: ``hashes`` (such as ``["sha1", "xxh64"]``) of each shard, in ``index.json``;
                ``size_limit``: bytes of an unpacked shard, about (in texts, ``"64mb"`` is 64 MiB),
                instead of ``shard_size``.

                JSONL: ``ensure_ascii``, ``sort_keys``, as for ``json.dumps``.

        Raises:
            InvalidRequest: Arguments that make no sense, an option that the format does not have, a
                column that the format cannot hold, or a target among the sources; known before
                anything is written.
            PermissionDenied: The target may not be written to; known before work begins.
            Conflict: Something else is at the target, or another process writes there.
            SampleFailed: A row that the format cannot hold, such as one without a key, or of which
                ``encoder`` raised an exception.
            Changed: A file of the dataset has changed meanwhile.
        """
        from ._write import Request, write

        datasets, weights, epoch_rows = self._sources()
        request = Request(
            target=target,
            format=format,
            order=order,
            seed=seed,
            epoch=epoch,
            columns=columns,
            shard_size=shard_size,
            shard_rows=shard_rows,
            compression=compression,
            row_group_rows=row_group_rows,
            key=key,
            index=index,
            name=name,
            writers=writers,
            client=client,
            retry_for=retry_for,
            progress=progress,
            options=options,
        )
        return write(datasets, weights, epoch_rows, request)

    def _loader(self, options: Options) -> Loader[Any]:
        datasets, weights, epoch_rows = self._sources()
        return Loader(datasets, weights, epoch_rows, options)


#: Arguments of other libraries' loaders, and their equivalents here.
ELSEWHERE = {
    "drop_last": (
        'the last rows of an epoch are dropped by default: uneven="drop", "pad" or "repeat"'
    ),
    "num_workers": (
        "threads= decode here; for processes use DataLoader(ds.loader(...).torch(),"
        " batch_size=None, num_workers=4)"
    ),
    "sampler": (
        "a plan makes the order: shuffle=forebay.Block(16) or forebay.Full(), and rank=,"
        " world_size="
    ),
    "batch_sampler": "batch_size=, or max_total= with length=, and shuffle=",
    "collate_fn": "collate=",
    "packing": "pack=forebay.Pack(2048, column=...)",
    "prefetch_factor": "prefetch=, in batches",
    "generator": "seed=",
    "timeout": "retry_for=, or Client(timeout=...)",
    "worker_init_fn": "there are no workers: threads=",
    "persistent_workers": "there are no workers: threads=",
    "world": "world_size=",
    "num_replicas": "world_size=",
    "max_rows": "batch_size=",
    "map": "decode= makes a sample of a row, transform= goes on with it",
    "device": "batches are in the memory of the CPU: pin_memory=True, and batch.to(device)",
    "pin_memory_device": "pin_memory=True",
    "shuffle_seed": "seed=",
    "shuffle_algo": "shuffle=forebay.Block(16), forebay.Full() or forebay.Window(10_000)",
    "shuffle_block_size": "shuffle=forebay.Block(16), in blocks of the files",
    "buffer_size": "shuffle=forebay.Window(10_000), or better forebay.Block(16)",
    "predownload": "prefetch=, in batches",
    "batch_format": "output=",
    "dtype": "ds.cast({...}), or decode=",
}


def _unknown(names: Any) -> str:
    """What to say about arguments that a loader does not have."""
    first = next(iter(names))
    text = f"a loader has no argument {first!r}"
    if first in ELSEWHERE:
        return f"{text}: {ELSEWHERE[first]}"
    near = difflib.get_close_matches(first, Options.__dataclass_fields__, 1)
    return f"{text}; did you mean {near[0]!r}?" if near else text
