"""A dataset as one of Hugging Face's ``datasets``: an ``IterableDataset`` that reads as it goes,
and a ``Dataset`` that is a copy on the local disk, which is what that class is.

The iterable one is a source of examples like those of ``datasets`` itself, in Arrow tables: its
*shards* are stretches of an order, which nodes (``split_dataset_by_node``) and DataLoader workers
deal out among themselves, and its state is a shard and a place in it. Unlike their generators it
begins at that place without reading what is before. Their base class is not public; what is used of
it is in :class:`Examples` alone.

Invariant: which rows are in which shard, and where tables begin in a shard, is a function of the
dataset's version, the order and the number of shards. So a state means the same rows wherever it is
loaded, and one that was made of other shards, or of another order, is refused.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

try:
    import datasets as hf
    import pyarrow as pa
    from datasets.iterable_dataset import _BaseExamplesIterable
    from datasets.table import table_cast
except ImportError as e:
    raise ImportError(
        "ds.to_hf() and ds.to_hf_iterable() need Hugging Face datasets: pip install datasets"
    ) from e

from ._fetch import patiently
from ._plan import Order
from ._progress import Bar
from .dataset import AHEAD_REQUESTS, Dataset, _bytes
from .errors import InvalidRequest, SampleFailed
from .rows import Rows
from .shuffle import Shuffle, to_wire
from .stats import Meter

#: Numbers of shards to choose from: many numbers of nodes and workers divide them.
SHARD_COUNTS = (960, 240, 48, 12, 4, 2)
#: The fewest rows of a shard, of those that are chosen here.
SHARD_ROWS = 16
#: What one request asks for: so many bytes, about, and rows.
READ_BYTES, READ_MAX_ROWS = 4 << 20, 1024
#: Rows that say how large a row is.
SAMPLE_ROWS = 64
#: Bytes of each file of a copy.
PART_BYTES = 512 << 20
#: What a file of a copy is called: its rows.
PART = re.compile(r"rows-(\d+)-(\d+)\.arrow")


def features_of(dataset: Dataset[Any]) -> Any:
    """The ``datasets.Features`` of its columns.

    Raises:
        InvalidRequest: A column has a type that ``datasets`` does not have.
    """
    found = {}
    for field in dataset.fetch(np.empty(0, np.uint64)).arrow().schema:
        try:
            found[field.name] = hf.Features.from_arrow_schema(pa.schema([field]))[field.name]
            hf.Features({field.name: found[field.name]}).arrow_schema  # noqa: B018 - it may fail
        except (ValueError, TypeError, NotImplementedError) as e:
            raise InvalidRequest(
                f"column {field.name!r} of {dataset.name} has the type {field.type}, which"
                f" datasets does not have: {e}",
                hint="leave it out with select_columns(), or cast() it; to_hf_iterable() also takes"
                " samples that decode= or map() made",
            ) from None
    return hf.Features(found)


def row_bytes(dataset: Dataset[Any]) -> float:
    """How large a row is in Arrow, by some of them that are spread evenly; at least 1."""
    count = min(SAMPLE_ROWS, len(dataset))
    if not count:
        return 1.0
    rows = np.linspace(0, len(dataset) - 1, count).astype(np.uint64)
    return max(1.0, pa.Table.from_batches([dataset.fetch(rows).arrow()]).nbytes / count)


def read_rows(size: float) -> int:
    """How many rows of ``size`` bytes one request asks for."""
    return int(max(1, min(READ_MAX_ROWS, READ_BYTES // size)))


def shards_of(dataset: Dataset[Any], count: int | None) -> list[range]:
    """Stretches of the order. The first ones have a row more, if any have, so that nodes which take
    every n-th of them have as many rows, but for one.
    """
    rows = len(dataset)
    if count is None:
        count = next((n for n in SHARD_COUNTS if rows >= n * SHARD_ROWS), 1)
    elif isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise InvalidRequest(f"num_shards={count!r}", hint="give a whole number of at least 1")
    elif count > max(rows, 1):
        raise InvalidRequest(
            f"num_shards={count:,} for {rows:,} rows", hint="each shard needs a row of its own"
        )
    each, more = divmod(rows, int(count))
    edges = [each * i + min(i, more) for i in range(int(count) + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


class Examples(_BaseExamplesIterable):
    """Rows of a dataset as ``datasets`` takes examples: tables, or single ones."""

    #: Their pools of threads wait where this is set; those here do not.
    _sleep_on_threads_shutdown = False

    def __init__(
        self,
        dataset: Dataset[Any],
        features: Any,
        shards: Sequence[range],
        request_rows: int,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dataset, self._features = dataset, features
        self.shards, self.request_rows = list(shards), request_rows
        self.shuffle, self.seed = shuffle, seed
        self._order: Order | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An order is made again where it is needed.
        return {**self.__dict__, "_order": None}

    # What it is

    @property
    def features(self) -> Any:
        """None where samples are made from rows: nobody knows their types."""
        return self._features

    @property
    def iter_arrow(self) -> Callable[[], Iterator[tuple[int, Any]]] | None:
        return None if self._features is None else self._iter_arrow

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def _with(self, shards: Sequence[range], seed: int | None = None) -> Examples:
        return Examples(
            self.dataset,
            self._features,
            shards,
            self.request_rows,
            shuffle=self.shuffle,
            seed=self.seed if seed is None else seed,
        )

    def shuffle_data_sources(self, generator: np.random.Generator) -> Examples:
        """The shards in another order, and if there is a shuffle, other rows in them. (What is
        called for each epoch after the first, and by ``shuffle()``.)
        """
        drawn = copy.deepcopy(generator)
        shards = [self.shards[i] for i in drawn.permutation(len(self.shards))]
        both = f"{self.seed} {drawn.integers(1 << 62)}".encode()
        digest = hashlib.blake2b(both, digest_size=8).digest()
        return self._with(shards, int.from_bytes(digest, "little"))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Examples:
        mine = self.split_shard_indices_by_worker(num_shards, index, contiguous=contiguous)
        return self._with([self.shards[i] for i in mine])

    def reshard_data_sources(self) -> Examples:
        """Twice as many shards, as far as they have two rows."""
        parts: list[range] = []
        for shard in self.shards:
            middle = len(shard) // 2
            parts += [shard[:middle], shard[middle:]] if middle else [shard]
        return self._with(parts)

    # Where it is

    def _identity(self) -> dict[str, str]:
        """What a state must have in common with this to mean the same rows."""
        what: list[Any] = [[shard.start, shard.stop] for shard in self.shards]
        if self.shuffle is not None:
            what.append([to_wire(self.shuffle), self.seed])
        digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()
        return {"type": "forebay.Examples", "dataset": self.dataset.id, "shards": digest}

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {"shard_idx": 0, "shard_example_idx": 0, **self._identity()}
        return self._state_dict

    def _place(self) -> tuple[int, int]:
        """The shard that is due, and how many of its rows were given out."""
        state: dict[str, Any] | None = self._state_dict
        if state is None:
            return 0, 0
        mine = self._identity()
        if state["type"] != mine["type"] or state["dataset"] != mine["dataset"]:
            raise InvalidRequest(
                f"the state is not one of {self.dataset.name} version {self.dataset.id[:12]}, but"
                f" of version {str(state['dataset'])[:12]} ({state['type']})",
                hint="load it into the version, and the selection of rows, that it was saved from",
            )
        if state["shards"] != mine["shards"]:
            raise InvalidRequest(
                f"the state is of other shards, or of another order, of {self.dataset.name}",
                hint="a state of datasets loads into the num_shards, the number of nodes and"
                " workers, the shuffle, the seed and the epoch that it was saved with; one of"
                " ds.loader() loads into any number of nodes and workers",
            )
        return state["shard_idx"], state["shard_example_idx"]

    def _at(self, shard: int, row: int) -> None:
        if self._state_dict is not None:
            self._state_dict["shard_idx"], self._state_dict["shard_example_idx"] = shard, row

    # Its rows

    def _numbers(self, positions: range) -> np.ndarray:
        """The rows at these places of the order."""
        if self.shuffle is None:
            return np.arange(positions.start, positions.stop, dtype=np.uint64)
        if self._order is None:
            self._order = Order([self.dataset], None, None, self.seed, self.shuffle)
        return self._order.rows(0, positions.start, positions.stop)[0]

    def _requests(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """From the place on: a shard, where rows begin in it, and their numbers. Rows of a shard
        are cut at the same places, wherever it begins.
        """
        first, skip = self._place()
        for number in range(first, len(self.shards)):
            shard = self.shards[number]
            at = skip if number == first else 0
            while at < len(shard):
                end = min(len(shard), (at // self.request_rows + 1) * self.request_rows)
                yield number, at, self._numbers(shard[at:end])
                at = end

    def _read(self) -> Iterator[tuple[int, int, np.ndarray, Rows]]:
        """The rows of requests, some of which are under way ahead of what is taken."""
        stop, meter = threading.Event(), Meter()
        patience = self.dataset.client.timeout

        def read(numbers: np.ndarray) -> Rows:
            return patiently(lambda: self.dataset.fetch(numbers), patience, stop, meter)

        pool = ThreadPoolExecutor(AHEAD_REQUESTS, thread_name_prefix="forebay-hf")
        try:
            todo = ((what, pool.submit(read, what[2])) for what in self._requests())
            waiting = list(itertools.islice(todo, AHEAD_REQUESTS))
            while waiting:
                (shard, at, numbers), got = waiting.pop(0)
                rows = got.result()
                waiting.extend(itertools.islice(todo, 1))
                yield shard, at, numbers, rows
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _iter_arrow(self) -> Generator[tuple[int, Any]]:
        for shard, at, numbers, rows in self._read():
            table = table_cast(pa.Table.from_batches([rows.arrow()]), self._features.arrow_schema)
            self._at(shard, at + len(numbers))
            yield int(numbers[0]), table

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        make = self.dataset.sampler()
        for shard, at, found, rows in self._read():
            numbers = found.tolist()
            if make is None:
                examples = pa.Table.from_batches([rows.arrow()]).to_pylist()
            else:
                pairs = zip(numbers, rows, strict=True)
                examples = (self._sample(make, number, row) for number, row in pairs)
            for i, example in enumerate(examples):
                self._at(shard, at + i + 1)
                yield numbers[i], example

    def _sample(self, make: Callable[[Any], Any], number: int, row: Any) -> dict[str, Any]:
        try:
            sample = make(row)
        except Exception as e:
            place = self.dataset.locate(number)
            failure = SampleFailed(
                f"row {place.row_in_file} of {place.file} (row {number} of the dataset):"
                f" {type(e).__name__}: {e}"
            )
            failure.row, failure.file, failure.row_in_file = number, place.file, place.row_in_file
            raise failure from e
        if not isinstance(sample, dict):
            raise InvalidRequest(
                f"an example of datasets is a dict, and what decode= and map() made of row {number}"
                f" of {self.dataset.name} is of type {type(sample).__name__}",
                hint="return a dict of names and values",
            )
        return sample


def iterable(dataset: Dataset[Any], num_shards: int | None, shuffle: Shuffle, seed: int) -> Any:
    """What :meth:`forebay.Dataset.to_hf_iterable` returns."""
    shards = shards_of(dataset, num_shards)
    to_wire(shuffle)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise InvalidRequest(f"seed={seed!r}", hint="give a whole number from 0 to 2**64 - 1")
    features = features_of(dataset) if dataset.sampler() is None else None
    rows = read_rows(row_bytes(dataset))
    # Of no rows there is no order.
    shuffle = shuffle if len(dataset) else None
    if shuffle is not None:
        dataset.shape  # noqa: B018 - asked for once: workers get it
    examples = Examples(dataset, features, shards, rows, shuffle=shuffle, seed=seed)
    return hf.IterableDataset(examples, info=hf.DatasetInfo(features=features))


# The copy.


def copied(
    dataset: Dataset[Any], cache_dir: str | os.PathLike[str] | None, progress: bool | None
) -> Any:
    """What :meth:`forebay.Dataset.to_hf` returns."""
    if dataset.sampler() is not None:
        raise InvalidRequest(
            f"{dataset.name} makes samples by a function, and nobody can see whether a copy of them"
            " is of the same function",
            hint="open it without decode=, leave map() out, and give the function to the map() of"
            " what to_hf() returns; or use to_hf_iterable(), which applies it",
        )
    features = features_of(dataset)
    folder = _folder(dataset, features, cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        # Who waits for it finds it done. Without locks on this file system, two copy the same.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        parts = _copy(dataset, features, folder, progress)
    made = [hf.Dataset.from_file(str(part)) for part in parts]
    return made[0] if len(made) == 1 else hf.concatenate_datasets(made)


def _folder(dataset: Dataset[Any], features: Any, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where its copy is: named by the version and by what is read of it."""
    types = [[field.name, str(field.type)] for field in features.arrow_schema]
    what = ["forebay copy 1", dataset.id, dataset._columns_key(), types]
    name = hashlib.blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()
    base = hf.config.HF_DATASETS_CACHE if cache_dir is None else cache_dir
    return Path(base).expanduser() / f"forebay-{name}"


def _there(folder: Path) -> tuple[list[Path], int]:
    """The files that follow each other from row 0, and where the last of them ends."""
    found = {}
    for path in folder.iterdir():
        if match := PART.fullmatch(path.name):
            found[int(match[1])] = (path, int(match[2]))
        elif path.name.startswith(".new-"):
            path.unlink(missing_ok=True)
    parts, end = [], 0
    while end in found:
        path, stop = found.pop(end)
        parts.append(path)
        if stop <= end:
            break
        end = stop
    return parts, end


def _copy(dataset: Dataset[Any], features: Any, folder: Path, progress: bool | None) -> list[Path]:
    """Copies the rows that are not there yet; returns the files of all."""
    parts, start = _there(folder)
    if start >= len(dataset) and parts:
        return parts
    size = row_bytes(dataset)
    need, free = int(size * (len(dataset) - start)), shutil.disk_usage(folder).free
    if need > free:
        raise InvalidRequest(
            f"a copy of {dataset.name} takes about {_bytes(need)} more, and {folder} has"
            f" {_bytes(free)} free",
            hint="give cache_dir= on another disk, or copy fewer rows or columns; to_hf_iterable()"
            " copies nothing",
        )
    schema = features.arrow_schema
    examples = Examples(dataset, features, [range(start, len(dataset))], read_rows(size))
    with (
        Bar(f"copying {dataset.name}", len(dataset) - start, show=progress) as bar,
        contextlib.closing(examples._iter_arrow()) as tables,
    ):
        while start < len(dataset) or not parts:
            new, end = folder / f".new-{os.getpid()}", start
            try:
                with pa.OSFile(str(new), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                    for _, table in tables:
                        writer.write_table(table)
                        end += len(table)
                        bar.advance(len(table))
                        if sink.tell() >= PART_BYTES:
                            break
                path = folder / f"rows-{start:012}-{end:012}.arrow"
                os.replace(new, path)
            except OSError as e:
                new.unlink(missing_ok=True)
                if e.errno != errno.ENOSPC:
                    raise
                raise OSError(
                    e.errno,
                    f"the disk is full after {end:,} of {len(dataset):,} rows of a copy of"
                    f" {dataset.name}; what is there stays, and another call goes on from it",
                    str(folder),
                ) from e
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            parts.append(path)
            start = end
    return parts
