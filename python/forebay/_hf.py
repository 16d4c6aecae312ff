"""A dataset or a mix as one of Hugging Face's ``datasets``: an ``IterableDataset`` that reads as it
goes, and a ``Dataset`` that is a copy on the local disk, which is what that class is.

The iterable one is a source of examples like those of ``datasets`` itself, in Arrow tables: its
*shards* are stretches of an order, which nodes (``split_dataset_by_node``) and DataLoader workers
deal out among themselves, and its state is a shard and a place in it. Unlike their generators it
begins at that place without reading what is before. Their base class is not public; what is used of
it is in :class:`Examples` alone.

Invariant: which rows are in which shard, and where tables begin in a shard, is a function of the
version of the dataset (of a mix, of all of them), the order and the number of shards. So a state
means the same rows wherever it is loaded, and one that was made of other shards, or of another
order, is refused.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

try:
    import datasets as hf
    import pyarrow as pa
    from datasets.iterable_dataset import _BaseExamplesIterable
    from datasets.table import table_cast
except ImportError as e:
    raise ImportError(
        'ds.to_hf() and ds.to_hf_iterable() need Hugging Face datasets: pip install "datasets>=4.7"'
    ) from e

#: Before 4.6, ``set_epoch()`` changes no order unless ``shuffle()`` was called. 4.7 has JSON.
if tuple(map(int, re.findall(r"\d+", hf.__version__)[:2])) < (4, 7):
    raise ImportError(
        "ds.to_hf() and ds.to_hf_iterable() need Hugging Face datasets 4.7 or newer, and"
        f' {hf.__version__} is installed: pip install "datasets>=4.7"'
    )

from ._alike import as_known, taken
from ._arguments import EPOCHS_MAX, flag_or_none, whole_number
from ._arrow import FEATURES, said_by
from ._fetch import asked_in_pieces, patiently, read, read_in_parts
from ._footers import features as features_in_files
from ._paced import Pace, paced, spread
from ._plan import Order, epoch_number
from ._pools import Pool, check_process
from ._progress import Bar
from ._stop import Stop
from ._words import counted
from .dataset import AHEAD_REQUESTS, Dataset, _bytes
from .errors import InvalidRequest, SampleFailed
from .rows import Rows
from .schedule import Schedule
from .shuffle import Shuffle, to_wire
from .stats import Meter

#: Numbers of shards to choose from: many numbers of nodes and workers divide them.
SHARD_COUNTS = (960, 240, 48, 12, 4, 2)
#: What seeds are below.
SEEDS_MAX = 1 << 64
#: The fewest rows of a shard, of those that are chosen here.
SHARD_ROWS = 16
#: What one request asks for: so many bytes, about, and rows.
READ_BYTES, READ_MAX_ROWS = 4 << 20, 1024
#: Rows that say how large a row is, and bytes of them at most.
SAMPLE_ROWS, SAMPLE_BYTES = 64, 64 << 20
#: Bytes of each file of a copy.
PART_BYTES = 512 << 20
#: What a file of a copy is called: its rows.
PART = re.compile(r"rows-(\d+)-(\d+)\.arrow")
log = logging.getLogger("forebay")


@dataclass(frozen=True)
class Source:
    """The rows that examples are made of, in their order: those of a dataset, or of an epoch of a
    mix.

    Attributes:
        datasets: What the rows are read from.
        weights: Of a mix. None: it is one dataset.
        epoch_rows: Rows of an epoch of a mix; None for those of all datasets.
        epoch: Of a mix. (Of one dataset, another epoch is another seed.)
    """

    datasets: Sequence[Dataset[Any]]
    weights: Sequence[float] | Schedule | None = None
    epoch_rows: int | None = None
    shuffle: Shuffle = None
    seed: int = 0
    epoch: int = 0
    #: Made where it is needed.
    _orders: list[Order] = field(default_factory=list, compare=False, repr=False)

    def checked(self) -> Source:
        """It, with what workers would ask for; raises InvalidRequest for what is no order."""
        to_wire(self.shuffle)
        seed = whole_number(self.seed)
        if seed is None or not 0 <= seed < SEEDS_MAX:
            raise InvalidRequest(
                f"seed={self.seed!r}", hint="give a whole number from 0 to 2**64 - 1"
            )
        # Of no rows there is no order.
        shuffle = self.shuffle if len(self) else None
        epoch = epoch_number(self.epoch)
        source = replace(self, seed=seed, shuffle=shuffle, epoch=epoch, _orders=[])
        if source.is_ordered:
            for dataset in source.datasets:
                dataset.block_shape  # noqa: B018 - asked for once: workers get it
            source.order.at(self.epoch, 0)
        return source

    def __reduce__(self) -> Any:
        given = (self.datasets, self.weights, self.epoch_rows, self.shuffle, self.seed, self.epoch)
        return Source, given

    @property
    def is_mix(self) -> bool:
        return self.weights is not None

    @property
    def is_ordered(self) -> bool:
        """Whether a plan says which row is where."""
        return self.is_mix or self.shuffle is not None

    @property
    def order(self) -> Order:
        if not self._orders:
            self._orders.append(
                Order(self.datasets, self.weights, self.epoch_rows, self.seed, self.shuffle)
            )
        return self._orders[0]

    @property
    def name(self) -> str:
        names = [dataset.name for dataset in self.datasets]
        return f"a mix of {' + '.join(names)}" if self.is_mix else names[0]

    @property
    def id(self) -> str:
        """The version of what is read."""
        if not self.is_mix:
            return self.datasets[0].id
        return _digest([dataset.id for dataset in self.datasets])

    @property
    def order_id(self) -> list[Any] | None:
        """What determines the order, besides the version; None if rows are as they are stored."""
        if self.is_mix:
            return [self.order.identity, self.epoch]
        return None if self.shuffle is None else [to_wire(self.shuffle), self.seed]

    def __len__(self) -> int:
        return self.epoch_rows or sum(map(len, self.datasets))

    def rows(self, positions: range) -> tuple[np.ndarray, np.ndarray | None]:
        """The rows at these places of the order, and the dataset of a mix that each is of."""
        if not self.is_ordered:
            return np.arange(positions.start, positions.stop, dtype=np.uint64), None
        return self.order.rows(self.epoch, positions.start, positions.stop)

    def of_epoch(self, generator: np.random.Generator) -> Source:
        """The order of an epoch, for which ``datasets`` has made a generator."""
        if self.is_mix:
            epoch = _epoch()
            if epoch is None:
                # The buffer's order is all that changes: the epochs stay those of the mix.
                return self
            if epoch >= EPOCHS_MAX:
                raise InvalidRequest(
                    f"epoch {epoch:,} of {self.name}",
                    hint=f"a mix has {EPOCHS_MAX:,} epochs: give set_epoch() a smaller number",
                )
            return replace(self, epoch=epoch)
        both = f"{self.seed} {generator.integers(1 << 62)}".encode()
        digest = hashlib.blake2b(both, digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, "little"), _orders=[])

    def sizes(self) -> tuple[float, int]:
        """How large a row is, about (of a mix with a schedule, at the beginning of the epoch), and
        how many of them one request asks for: as many as if all were of the dataset with the
        largest ones.
        """
        of = [row_bytes(dataset) for dataset in self.datasets]
        weights = self.weights if self.weights is not None else [1.0]
        if isinstance(weights, Schedule):
            weights = weights.weights_at(self.epoch * len(self))
        mean = sum(size * w for size, w in zip(of, weights, strict=True)) / sum(weights)
        return mean, read_rows(max(of))

    def features(self) -> Any:
        """The ``datasets.Features`` of its columns; None where samples are made from rows: nobody
        knows their types.

        Raises:
            InvalidRequest: A column has a type that ``datasets`` does not have, or datasets of a
                mix have different columns.
        """
        if any(dataset.sampler() is not None for dataset in self.datasets):
            return None
        first, *others = self.datasets
        features = _features_of(first)
        for other in others:
            theirs = _features_of(other)
            names = [n for n in {**features, **theirs} if features.get(n) != theirs.get(n)]
            if names:
                shown = ", ".join(
                    f"{n!r} is {features.get(n, 'missing')} there and {theirs.get(n, 'missing')}"
                    " here"
                    for n in names
                )
                raise InvalidRequest(
                    f"{first.name} and {other.name} have different columns: {shown}",
                    hint="make them alike by rename, cast or select_columns; to_hf_iterable() also"
                    " takes samples that decode= or map() made",
                )
        return features

    def named(self, features: Any) -> Any:
        """These features of its columns, with what ``datasets`` wrote into the files about them:
        classes, pictures, sounds.
        """
        said = features_in_files(self.datasets, features)
        if said is None:
            return features
        schema = features.arrow_schema.with_metadata({FEATURES: said})
        try:
            # Only of columns that still have the type.
            return hf.Features.from_arrow_schema(schema)
        except Exception as e:  # written by another version of datasets, say
            log.debug("the features in the files of %s are not used: %s", self.name, e)
            return features


def _epoch() -> int | None:
    """The epoch for which ``datasets`` orders its sources here, as the dataset that it iterates
    over says; None if it is for ``shuffle()``. Its generators do not tell one from the other.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        of = frame.f_locals.get("self")
        if isinstance(of, hf.IterableDataset):
            is_shuffle = frame.f_code is hf.IterableDataset.shuffle.__code__
            return None if is_shuffle else int(of.epoch)
        frame = frame.f_back
    return None


def _digest(what: Any) -> str:
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()


def _features_of(dataset: Dataset[Any]) -> Any:
    """The ``datasets.Features`` of its columns.

    Raises:
        InvalidRequest: A column has a type that ``datasets`` does not have.
    """
    found = {}
    for column in as_known(dataset.fetch(np.empty(0, np.uint64)).arrow()).schema:
        try:
            found[column.name] = hf.Features.from_arrow_schema(pa.schema([column]))[column.name]
            hf.Features({column.name: found[column.name]}).arrow_schema  # noqa: B018 - it may fail
        except (ValueError, TypeError, NotImplementedError) as e:
            raise InvalidRequest(
                f"column {column.name!r} of {dataset.name} has the type {column.type}, which"
                f" datasets does not have: {e}",
                hint="leave it out with select_columns(), or cast() it; to_hf_iterable() also takes"
                " samples that decode= or map() made",
            ) from None
    return hf.Features(found)


def _json_in(feature: Any, of: str = "") -> Callable[[Any], Any] | None:
    """What decodes the JSON in values of a feature; None where there is none. That of ``datasets``
    itself gives other numbers for whole ones beyond 64 bits.

    Args:
        of: The column, for an error. None given: the feature is a dict of those of columns.
    """
    decode: Callable[[Any], Any]
    if isinstance(feature, getattr(hf, "Json", ())):
        decode = partial(said_by, of=of)
    elif isinstance(feature, dict):
        found = {
            name: each
            for name, inner in feature.items()
            if (each := _json_in(inner, of or f"column {name!r}"))
        }
        if not found:
            return None
        decode = partial(_decoded, found)
    else:
        item = _json_in(feature.feature, of) if hasattr(feature, "feature") else None
        if item is None:
            return None
        decode = partial(_each, item)
    return lambda value: None if value is None else decode(value)


def _decoded(of: dict[str, Callable[[Any], Any]], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{name: decode(row[name]) for name, decode in of.items()}}


def _each(decode: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    return list(map(decode, values))


def row_bytes(dataset: Dataset[Any]) -> float:
    """How large a row is in Arrow, by some of them that are spread evenly; at least 1."""
    count = min(SAMPLE_ROWS, len(dataset))
    if not count:
        return 1.0
    ids = spread(np.linspace(0, len(dataset) - 1, count).astype(np.uint64))
    seen, size = 0, 0
    for rows in paced(ids, Pace(count), lambda some: read_in_parts([dataset], None, some, None)):
        seen += len(rows)
        size += pa.Table.from_batches([rows.arrow()]).nbytes
        if size > SAMPLE_BYTES:
            break
    return max(1.0, size / seen)


def read_rows(size: float) -> int:
    """How many rows of ``size`` bytes one request asks for."""
    return int(max(1, min(READ_MAX_ROWS, READ_BYTES // size)))


def shards_of(rows: int, count: int | None) -> list[range]:
    """Stretches of the order. The first ones have a row more, if any have, so that nodes which take
    every n-th of them have as many rows, but for one.
    """
    number = whole_number(count)
    if count is None:
        number = next((n for n in SHARD_COUNTS if rows >= n * SHARD_ROWS), 1)
    if number is None or number < 1:
        raise InvalidRequest(f"num_shards={count!r}", hint="give a whole number of at least 1")
    if number > max(rows, 1):
        raise InvalidRequest(
            f"num_shards={number:,} for {counted(rows, 'row')}",
            hint="each shard needs a row of its own",
        )
    each, more = divmod(rows, number)
    edges = [each * i + min(i, more) for i in range(number + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


class Examples(_BaseExamplesIterable):
    """Rows as ``datasets`` takes examples: tables, or single ones."""

    #: Their pools of threads wait where this is set; those here do not.
    _sleep_on_threads_shutdown = False

    def __init__(
        self, source: Source, features: Any, shards: Sequence[range], request_rows: int
    ) -> None:
        super().__init__()
        self.source, self._features = source, features
        self.shards, self.request_rows = list(shards), request_rows
        #: Of what this was made a part, or another order: what its states have in "shards".
        self._made_of: frozenset[str] = frozenset()

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

    def _with(self, shards: Sequence[range], source: Source | None = None) -> Examples:
        of = self.source if source is None else source
        made = Examples(of, self._features, shards, self.request_rows)
        made._made_of = self._made_of | {self._identity()["shards"]}
        return made

    def shuffle_data_sources(self, generator: np.random.Generator) -> Examples:
        """The shards in another order, and if there is a shuffle, other rows in them; of a mix, the
        rows of another epoch, in its order. (What is called for each epoch after the first, and by
        ``shuffle()``.)
        """
        drawn = copy.deepcopy(generator)
        if self.source.is_mix:
            return self._with(self.shards, self.source.of_epoch(drawn))
        shards = [self.shards[i] for i in drawn.permutation(len(self.shards))]
        return self._with(shards, self.source.of_epoch(drawn))

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
        if (order := self.source.order_id) is not None:
            what.append(order)
        digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()
        return {"type": "forebay.Examples", "dataset": self.source.id, "shards": digest}

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {"shard_idx": 0, "shard_example_idx": 0, **self._identity()}
        return self._state_dict

    def _place(self) -> tuple[int, int]:
        """The shard that is due, and how many of its rows were given out."""
        state: dict[str, Any] | None = self._state_dict
        if state is None:
            return 0, 0
        mine = self._identity()
        source = self.source
        if state["type"] != mine["type"] or state["dataset"] != mine["dataset"]:
            raise InvalidRequest(
                f"the state is not one of {source.name} version {source.id[:12]}, but of version"
                f" {str(state['dataset'])[:12]} ({state['type']})",
                hint="load it into the version, and the selection of rows, that it was saved from",
            )
        is_other = state["shards"] != mine["shards"]
        is_begin = not (state["shard_idx"] or state["shard_example_idx"])
        if is_other and is_begin and state["shards"] in self._made_of:
            # Of a worker that was resumed in the middle and has given out nothing since, datasets
            # has it too. So it says nothing of where the worker was.
            raise InvalidRequest(
                f"the state is of {source.name} before its shards were dealt out, as datasets"
                " has it for a worker that has given out nothing since it began, or since it was"
                " resumed",
                hint="load one that was saved after each worker had given out a batch; or begin"
                " anew, if it was saved in the first steps",
            )
        if is_other:
            mixed = "the weights, " if source.is_mix else ""
            raise InvalidRequest(
                f"the state is of other shards, or of another order, of {source.name}",
                hint="a state of datasets loads into the num_shards, the number of nodes and"
                f" workers, {mixed}the shuffle, the seed and the epoch that it was saved with; one"
                " of a loader loads into any number of nodes and workers",
            )
        return state["shard_idx"], state["shard_example_idx"]

    def _at(self, shard: int, row: int) -> None:
        if self._state_dict is not None:
            self._state_dict["shard_idx"], self._state_dict["shard_example_idx"] = shard, row

    # Its rows

    def _requests(self) -> Iterator[tuple[int, int, np.ndarray, np.ndarray | None]]:
        """From the place on: a shard, where rows begin in it, their numbers, and the dataset of a
        mix that each is of. Rows of a shard are cut at the same places, wherever it begins.
        """
        first, skip = self._place()
        for number in range(first, len(self.shards)):
            shard = self.shards[number]
            at = skip if number == first else 0
            while at < len(shard):
                end = min(len(shard), (at // self.request_rows + 1) * self.request_rows)
                yield number, at, *self.source.rows(shard[at:end])
                at = end

    def _read(self) -> Iterator[tuple[int, int, Rows]]:
        """The rows of requests, some of which are under way ahead of what is taken."""
        stop, meter = Stop(), Meter()
        datasets = self.source.datasets
        patience = datasets[0].client.timeout

        def ask(numbers: np.ndarray, sources: np.ndarray | None) -> Rows:
            return patiently(lambda: read(datasets, None, numbers, sources), patience, stop, meter)

        pid = os.getpid()
        pool = Pool(AHEAD_REQUESTS, thread_name_prefix="forebay-hf")
        try:
            todo = (
                (shard, at, pool.submit(ask, numbers, sources), numbers, sources)
                for shard, at, numbers, sources in self._requests()
            )
            waiting = list(itertools.islice(todo, AHEAD_REQUESTS))
            while waiting:
                check_process(pid)
                shard, at, asked, numbers, sources = waiting.pop(0)
                for n, rows in enumerate(asked_in_pieces(asked, ask, numbers, sources)):
                    if n == 0:
                        waiting.extend(itertools.islice(todo, 1))
                    yield shard, at, rows
                    at += len(rows)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _table(self, rows: Rows) -> Any:
        """Rows as a table, whatever order their datasets have the columns in."""
        schema = self._features.arrow_schema
        parts = [
            table_cast(pa.Table.from_batches([as_known(pa.record_batch(part))]), schema)
            for part in rows._parts
        ]
        if rows._pick is None:
            return parts[0]
        starts = np.cumsum([0, *map(len, parts)])
        places = starts[rows._pick[:, 0]] + rows._pick[:, 1]
        return taken(pa.concat_tables(parts), places)

    def _iter_arrow(self) -> Generator[tuple[int, Any]]:
        for shard, at, rows in self._read():
            self._at(shard, at + len(rows))
            yield int(rows.ids[0]), self._table(rows)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for shard, at, rows in self._read():
            if self._features is None:
                examples = self._samples(rows)
            else:
                examples = self._examples(rows)
            numbers = rows.ids.tolist()
            for i, example in enumerate(examples):
                self._at(shard, at + i + 1)
                yield numbers[i], example

    def _examples(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """Rows, with what their texts of JSON say, as ``datasets`` itself has them."""
        decode = _json_in(dict(self._features))
        examples = iter(self._table(rows).to_pylist())
        return examples if decode is None else map(decode, examples)

    def _samples(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """What functions make of rows. Of datasets of a mix that have none, the rows."""
        datasets, picked = self.source.datasets, rows._picked()
        makes = [dataset.sampler() for dataset in datasets]
        for i, row in enumerate(rows):
            source = 0 if rows.sources is None else int(rows.sources[i])
            make = makes[source]
            if make is not None:
                yield self._sample(make, datasets[source], int(rows.ids[i]), row)
            else:
                part, at = map(int, picked[i])
                yield pa.record_batch(rows._parts[part]).slice(at, 1).to_pylist()[0]

    def _sample(
        self, make: Callable[[Any], Any], dataset: Dataset[Any], number: int, row: Any
    ) -> dict[str, Any]:
        of = dataset.name if self.source.is_mix else "the dataset"
        try:
            sample = make(row)
        except Exception as e:
            place = dataset.locate(number)
            failure = SampleFailed(f"{place} (row {number} of {of}): {type(e).__name__}: {e}")
            failure.row, failure.file, failure.row_in_file = number, place.file, place.row_in_file
            raise failure from e
        if not isinstance(sample, dict):
            raise InvalidRequest(
                f"an example of datasets is a dict, and what decode= and map() made of row {number}"
                f" of {dataset.name} is of type {type(sample).__name__}",
                hint="return a dict of names and values",
            )
        return sample


def iterable(source: Source, num_shards: int | None) -> Any:
    """What :meth:`forebay.Dataset.to_hf_iterable` and that of mixes return."""
    shards = shards_of(len(source), num_shards)
    source = source.checked()
    features = source.features()
    examples = Examples(source, features, shards, source.sizes()[1])
    # Others than those of the examples: datasets makes pictures of them.
    named = None if features is None else source.named(features)
    return hf.IterableDataset(examples, info=hf.DatasetInfo(features=named))


# The copy.


def copied(source: Source, cache_dir: str | os.PathLike[str] | None, progress: bool | None) -> Any:
    """What :meth:`forebay.Dataset.to_hf` and that of mixes return."""
    progress = flag_or_none("progress", progress)
    source = source.checked()
    features = source.features()
    if features is None:
        raise InvalidRequest(
            f"{source.name} makes samples by a function, and nobody can see whether a copy of them"
            " is of the same function",
            hint="open it without decode=, leave map() out, and give the function to the map() of"
            " what to_hf() returns; or use to_hf_iterable(), which applies it",
        )
    named = source.named(features)
    folder = _folder(source, features, named, cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = open(folder / "lock", "w")
    except OSError:
        # Another user's, or on a disk that is only read: a whole copy does all the same.
        parts, end = _there(folder)
        if end < len(source) or not parts:
            raise
    else:
        with lock:
            # Who waits for it finds it done. Without locks on this file system, two copy the same.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            parts = _copy(source, named, folder, progress)
    made = [hf.Dataset.from_file(str(part)) for part in parts]
    return made[0] if len(made) == 1 else hf.concatenate_datasets(made)


def _folder(
    source: Source, features: Any, named: Any, cache_dir: str | os.PathLike[str] | None
) -> Path:
    """Where its copy is: named by the version, by what is read of it, and by the order."""
    types = [[column.name, str(column.type)] for column in features.arrow_schema]
    keys = [dataset._columns_key() for dataset in source.datasets]
    what: list[Any] = ["forebay copy 2", source.id, source.order_id, keys, types]
    if named != features:
        what.append(named.to_dict())
    base = hf.config.HF_DATASETS_CACHE if cache_dir is None else cache_dir
    return Path(base).expanduser() / f"forebay-{_digest(what)}"


def _there(folder: Path) -> tuple[list[Path], int]:
    """The files that follow each other from row 0, and where the last of them ends."""
    found = {}
    for path in folder.iterdir():
        if match := PART.fullmatch(path.name):
            found[int(match[1])] = (path, int(match[2]))
    parts, end = [], 0
    while end in found:
        path, stop = found.pop(end)
        parts.append(path)
        if stop <= end:
            break
        end = stop
    return parts, end


def _copy(source: Source, features: Any, folder: Path, progress: bool | None) -> list[Path]:
    """Copies the rows that are not there yet; returns the files of all."""
    for left in folder.glob(".new-*"):
        left.unlink(missing_ok=True)
    parts, start = _there(folder)
    if start >= len(source) and parts:
        return parts
    size, request_rows = source.sizes()
    need, free = int(size * (len(source) - start)), shutil.disk_usage(folder).free
    if need > free:
        raise InvalidRequest(
            f"a copy of {source.name} takes about {_bytes(need)} more, and {folder} has"
            f" {_bytes(free)} free",
            hint="give cache_dir= on another disk, or copy fewer rows or columns; to_hf_iterable()"
            " copies nothing",
        )
    schema = features.arrow_schema
    examples = Examples(source, features, [range(start, len(source))], request_rows)
    with (
        Bar(f"copying {source.name}", len(source) - start, show=progress) as bar,
        contextlib.closing(examples._iter_arrow()) as tables,
    ):
        while start < len(source) or not parts:
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
                # After a loss of power, what has this name is to be whole.
                with open(new, "rb") as written:
                    os.fsync(written.fileno())
                os.replace(new, path)
            except OSError as e:
                new.unlink(missing_ok=True)
                if e.errno != errno.ENOSPC:
                    raise
                raise OSError(
                    e.errno,
                    f"the disk is full after {end:,} of {counted(len(source), 'row')} of a copy of"
                    f" {source.name}; what is there stays, and another call goes on from it",
                    str(folder),
                ) from e
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            parts.append(path)
            start = end
    return parts
