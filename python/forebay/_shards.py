"""Shards that are read as they arrive: the first rows need the beginnings of the first few shards,
and no index of them all.

:func:`forebay.open` finds out how many rows each shard has before it returns the first, which for a
tar without an index means reading it. Here the order is made from names and sizes: ``Block(k)``
permutes the shards, reads ``k`` of them side by side from front to back, and permutes the rows of
each *group* together, which are those that begin in the same part of these shards: the same share
of each one's length, so that all of them end together. It is the order of a shuffle buffer over
``k`` streams, as a function of the seed and the epoch. From the second epoch on, when the node
knows their members, the parts of the shards are permuted too. How many rows a group has is known
when its part of the shards has arrived, and the next is requested before it is needed.

A group is a dataset of its own at the node (``"part"`` in its description). What the node reads to
find the rows stays in its cache, from where they are requested (:class:`Pull`) or pushed
(:class:`Push`). Whole steps of a group arrive that way; a step in which a group ends is requested
in pieces.

Invariant: the order is a function of the names, sizes and versions of the shards, the seed, the
shuffle and the epoch; what is fetched when, and by which rank, changes nothing about it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _node, _place
from ._arguments import (
    U64_MAX,
    check_client,
    check_function,
    column_names,
    flag,
    flag_or_none,
    job_name,
    source_names,
    whole_number,
)
from ._elsewhere import explained
from ._fetch import Fetched, Fetcher, Pull, account, fetch_pool, patiently
from ._forebay import Client
from ._lightning import Ahead
from ._loadable import Loadable
from ._plan import State, Step, epoch_number, plain_state
from ._pools import Pool, is_exiting, submit
from ._progress import Bar
from ._stop import Stop
from ._words import counted
from .dataset import ELSEWHERE, LOADERS_HAVE, Dataset, File
from .errors import Changed, InvalidRequest, NotFound, PreconditionFailed
from .loader import Loader, Options
from .rows import Rows
from .shuffle import Full, Shuffle, to_wire
from .stats import Meter

__all__ = ["ShardLoader", "Shards", "open_shards"]

#: Groups that are opened, or being opened, beyond the one that is read; none of the next epoch
#: before the last of this one is read.
GROUPS_AHEAD = 3
#: The part of each shard that is read before the next, in bytes, where the user does not say.
PART_BYTES = 16 << 20
#: What a node fetches at once: a smaller part of a shard is not there any earlier.
CHUNK_BYTES = 1 << 20
#: The pieces of a part. All shards are cut into the same number of pieces, and the parts that an
#: epoch begins and ends with have fewer of them.
PIECES = 8
#: What the loader calls a row: its shard, the piece that its part begins with, and the row in that
#: part, as bits of one number.
SHARD_BITS, PIECE_BITS, ROW_BITS = 20, 20, 24
#: The version of states.
VERSION = 3
#: Names that tell a tar.
TARS = (".tar", ".tgz", ".tar.gz", ".tar.lz4")

#: A group: the epoch, and its number in it.
Key = tuple[int, int]
#: A group, and how many of its rows are used up.
Cursor = tuple[int, int, int]


@explained({})
def open_shards(
    source: str | Sequence[str],
    *,
    client: Client | None = None,
    url: str | Sequence[str] | None = None,
    origin: str | Sequence[str] | None = None,
    cache: str | None = None,
    columns: Sequence[str] | None = None,
    schema: Any = None,
    part_bytes: int = PART_BYTES,
    decode: Callable[[dict[str, Any]], Any] | None = None,
    progress: bool | None = None,
    job: str | None = None,
) -> Shards:
    """Opens tar shards whose rows are found as they are read: the first batch waits for the
    beginnings of a few shards, not for all of them.

    ::

        shards = forebay.open_shards("s3://bucket/train-{00000..00127}.tar")
        for batch in shards.loader(batch_size=64, shuffle=forebay.Block(8), seed=1):
            ...

    The order is that of a reader with a shuffle buffer: ``Block(8)`` takes the shards in a random
    order, eight side by side, each from front to back, and permutes the rows of the next
    ``part_bytes`` of all eight together (after the first epoch, of parts in a random order);
    ``None`` leaves everything as it is stored. Each epoch has another order, which is the same in
    every process. Rows are not numbered from 0, and how many there are is known only at the end of
    the first epoch. For rows by number, a full shuffle, or batches by length use
    :func:`forebay.open`: if tars have no index, it first reads everything.

    Args:
        source: Tars, as for :func:`forebay.open`; names that do not end in ``.tar``, ``.tgz``,
            ``.tar.gz`` or ``.tar.lz4`` are left out. Up to 15 that are written out, with braces or
            in a list, need no listing: where the bucket is cached, the request that brings their
            first bytes tells size and version.
        client, url, origin, cache, decode, progress, job: As for :func:`forebay.open`.
        columns: Read only these. Default: all that the shards at hand have.
        schema: The columns, as for :func:`forebay.open`. Where shards differ in their fields, this
            makes the columns of all batches the same.
        part_bytes: How much of each shard is permuted together with as much of the others: more
            mixes better, and takes longer until the first batch. Of a shard that is longer than the
            average, more.

    Raises:
        NotFound: No shard matches.
        InvalidRequest: A description that makes no sense.
    """
    if client is not None and (url is not None or origin is not None or cache is not None):
        raise InvalidRequest(
            "client= and url=, origin=, cache= exclude each other",
            hint="a client has its node already",
        )
    if client is None:
        client = Client(url, origin=origin, cache=cache)
    check_client(client)
    sources = source_names(source)
    check_function("decode", decode)
    progress = flag_or_none("progress", progress)
    job = job_name(job)
    size = whole_number(part_bytes)
    if size is None or size < 1:
        raise ValueError(f"part_bytes is a whole number above 0, not {part_bytes!r}")
    spec: dict[str, Any] = {"sources": sources, "format": "objects", "begin": True}
    with (
        Bar(f"listing {sources[0]}", unit="files", show=progress) as bar,
        _node.works_for(job),
    ):
        spec, info = _node.open_sources(client, spec, lambda now: bar.to(now["listed"], None))
    options: dict[str, Any] = {"format": "tar"}
    if schema is not None:
        from .dataset import _named

        options["schema"] = _named(schema)
    return Shards(Dataset(client, spec, info), options, size, columns, decode)


class Shards(Loadable[Any]):
    """Tar shards whose names and versions are known; rows become known as they are read. Made by
    :func:`open_shards`.

    It can be pickled.

    Attributes:
        client: The node that they are read through.
        files: The shards. Their ``rows`` are unknown, and therefore 0.
    """

    def __init__(
        self,
        listing: Dataset[Any],
        options: dict[str, Any],
        part_bytes: int,
        columns: Sequence[str] | None,
        decode: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        columns = None if columns is None else column_names(columns)
        self.client, self.decoder = listing.client, decode
        self._listing, self._options, self._columns = listing, options, columns
        self.part_bytes = part_bytes
        tars = [(i, f) for i, f in enumerate(listing.files) if f.name.endswith(TARS)]
        self.files = [File(f.name, f.size, 0, f.etag) for _, f in tars]
        self._numbers = [i for i, _ in tars]
        if not self.files:
            raise NotFound(f"{self.name}: none of the {len(listing)} names there is a tar's")
        size = sum(f.size for f in self.files) // len(self.files)
        #: Each shard is cut into so many pieces.
        self.pieces = max(1, -(-size * PIECES // part_bytes))
        #: The fewest pieces of a part, except for the first and the last.
        self.least = min(PIECES, -(-CHUNK_BYTES * self.pieces // max(size, 1)))
        if len(self.files) > 1 << SHARD_BITS or self.pieces > 1 << PIECE_BITS:
            raise InvalidRequest(
                f"{counted(len(self.files), 'shard')} of"
                f" {counted(self.pieces // PIECES, 'part')} each;"
                f" at most {1 << SHARD_BITS:,} of {(1 << PIECE_BITS) // PIECES:,}",
                hint="open fewer, or make part_bytes larger",
            )

    @property
    def name(self) -> str:
        """The description that they were opened with."""
        return self._listing.name

    @property
    def id(self) -> str:
        """The version: equal for equal shards and options, everywhere."""
        versions = [[f.name, f.size, f.etag] for f in self.files]
        return _digest("shards", versions, self._options)

    def dataset(self, span: Span, columns: Sequence[str] | None, said: Any) -> Dataset[Any]:
        """The rows of a part of some of the shards, as a dataset: waits until the node has found
        them.

        Raises:
            Changed: A shard has another version than when this was opened.
        """
        part: dict[str, Any] = {
            "of": self._listing.id,
            "files": [self._numbers[i] for i in span.numbers],
            "from": span.begin,
            "until": span.end,
            "pieces": self.pieces,
        }
        spec = {**self._options, "part": part}
        columns = self._columns if columns is None else columns
        info = _open_part(self.client, self._listing, spec, said)
        if not info["rows"]:
            # Without rows no field is known, and nothing is read.
            columns = None
        return PartDataset(self.client, spec, info, columns, self._listing)

    def sampler(
        self, decode: Callable[[dict[str, Any]], Any] | None = None
    ) -> Callable[[dict[str, Any]], Any] | None:
        """What makes a sample of a row: ``decode``, or else that of the shards."""
        return decode or self.decoder

    def _sources(self) -> Any:
        raise InvalidRequest(
            "shards are no dataset with numbered rows", hint="forebay.open gives one"
        )

    def _loader(self, options: Options) -> Loader[Any]:
        return ShardLoader(self, options)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property has failed with an AttributeError: again, for that error.
                return object.__getattribute__(self, name)
            hint = ""
            if not name.startswith("_") and hasattr(Dataset, name):
                hint = ": their rows are known as they are read; forebay.open gives a dataset"
            elif name in LOADERS_HAVE:
                hint = f": {ELSEWHERE[name]}"
            elif name in ELSEWHERE:
                hint = f": forebay.open gives a dataset ({ELSEWHERE[name]})"
            raise AttributeError(f"shards have no {name!r}{hint}", name=name, obj=self)

    def __reduce__(self) -> Any:
        return Shards, (
            self._listing,
            self._options,
            self.part_bytes,
            self._columns,
            self.decoder,
        )

    def __repr__(self) -> str:
        return f"<forebay.Shards {self.name}: {counted(len(self.files), 'tar')}>"


class PartDataset(Dataset[Any]):
    """A part of some shards. A node that does not know it may not know the shards either."""

    def __init__(
        self,
        client: Client,
        spec: dict[str, Any],
        info: dict[str, Any],
        columns: Sequence[str] | None,
        listing: Dataset[Any],
    ) -> None:
        # First, because errors about columns name it.
        self._listing = listing
        super().__init__(client, spec, info, columns=columns)

    @property
    def name(self) -> str:
        return self._listing.name

    def _known(self, columns: Sequence[str]) -> list[str]:
        try:
            return super()._known(columns)
        except InvalidRequest as e:
            hint = (
                f"{e.hint}, in this part of the shards; where shards differ in their fields, name"
                " the columns and their types in schema="
            )
            raise InvalidRequest(e.message, hint=hint) from None

    def open_at(self, client: Client) -> dict[str, Any]:
        return _open_part(client, self._listing, self.spec, None)

    def told(self) -> dict[str, Any]:
        return _node.told(self.name, self.id, self.spec, self._listing.told())


def _open_part(
    client: Client, listing: Dataset[Any], spec: dict[str, Any], said: Any
) -> dict[str, Any]:
    changed = (
        "open the shards again to go on with the new version;"
        " a state of the old one cannot be loaded into it"
    )
    try:
        for _ in range(client.nodes):
            try:
                return _node.open_dataset(client, spec, said)
            except NotFound:
                pass
            # A shard is gone, or this node does not know the shards: it was restarted, or is
            # another one.
            again = listing.open_at(client)
            if again["id"] != listing.id:
                raise Changed(
                    f"{listing.name} is not what it was: a shard was added, has changed or is gone",
                    hint=changed,
                )
        return _node.open_dataset(client, spec, said)
    except PreconditionFailed as e:
        raise Changed(e.message, hint=changed, status=e.status, request_id=e.request_id) from e


def _digest(*of: Any) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Span:
    """What a group is made of.

    Attributes:
        numbers: The shards, by their numbers.
        begin, end: The part of them, in pieces: its rows are those whose first member's bytes begin
            there.
    """

    numbers: tuple[int, ...]
    begin: int
    end: int


def parts_of(pieces: int, least: int, first: bool, last: bool) -> list[int]:
    """Where the parts of a shard of so many ``pieces`` begin, and where the last one ends.

    The ``first`` part of an epoch is half as long as the others, because the first batch waits for
    it. The ``last`` ones have a third of what is left each: when the last byte has come, only the
    rows of the last part are still to be trained on, by a loop that trains at least half again as
    fast as the bytes come. Parts have ``least`` pieces or more, except for the first and the
    last.
    """
    at, places = 0, [0]
    while at < pieces:
        left = pieces - at
        take = PIECES // 2 if first and not at else PIECES
        if last and left > 2:
            take = min(take, max(least, left // 3))
        at += min(take, left)
        places.append(at)
    return places


class ShardOrder:
    """The order of the shards in each epoch, and states. The order of rows within a group is a plan
    of its own, by a seed that is derived here.
    """

    def __init__(self, shards: Shards, seed: int, shuffle: Shuffle) -> None:
        wire = to_wire(shuffle)
        if wire["kind"] not in ("block", "none"):
            raise InvalidRequest(
                f"the shuffle {shuffle!r} needs to know all rows before the first",
                hint="shuffle=forebay.Block(shards), or forebay.open for any order",
            )
        self.shuffle = Full() if wire["kind"] == "block" else None
        self._shards = len(shards.files)
        self._at_once = min(self._shards, int(wire.get("blocks", 1)))
        self._pieces, self._least, self._seed = shards.pieces, shards.least, seed
        self._epochs: dict[int, list[Span]] = {}
        self.identity = _digest("order", VERSION, shards.id, shards.part_bytes, seed, wire)

    def spans(self, epoch: int) -> list[Span]:
        """The groups of an epoch, in their order."""
        found = self._epochs.get(epoch)
        if found is None:
            order = self._permuted("shards", epoch, range(self._shards))
            found = []
            for first in range(0, self._shards, self._at_once):
                numbers = tuple(sorted(order[first : first + self._at_once]))
                # In the first epoch from front to back, as they come; then their members are known.
                new, last = epoch == 0, first + self._at_once >= self._shards
                places = parts_of(self._pieces, self._least, new and first == 0, new and last)
                parts = range(len(places) - 1)
                for part in parts if new else self._permuted(f"parts:{first}", epoch, parts):
                    found.append(Span(numbers, places[part], places[part + 1]))
            # Those of the epoch that is read, and of the next.
            for gone in [e for e in list(self._epochs) if abs(e - epoch) > 1]:
                self._epochs.pop(gone, None)
            self._epochs[epoch] = found
        return found

    def _permuted(self, what: str, epoch: int, numbers: range) -> list[int]:
        if self.shuffle is None:
            return list(numbers)
        # Sorting by a digest of each number is a permutation that every process computes alike.
        key = f"{self._seed}:{epoch}:{what}:".encode()

        def digest(number: int) -> bytes:
            return hashlib.blake2b(key + b"%d" % number, digest_size=16).digest()

        return sorted(numbers, key=digest)

    def after(self, at: Key) -> Key:
        """The group after a group."""
        epoch, group = at
        return (epoch, group + 1) if group + 1 < len(self.spans(epoch)) else (epoch + 1, 0)

    def seed_of(self, epoch: int, group: int) -> int:
        """The seed of the order of a group's rows."""
        return int(_digest("group", self._seed, epoch, group), 16)

    def at(self, epoch: int, position: int = 0, group: int = 0) -> State:
        """The state before a row of a group of an epoch."""
        return {
            "version": VERSION,
            "shards": self.identity,
            "epoch": epoch_number(epoch),
            "group": group,
            "position": position,
        }

    def start(self) -> State:
        """The state before the first row of all."""
        return self.at(0)

    def checked(self, state: Any, strict: bool = True) -> State:
        """The state, if it belongs to this order; raises InvalidRequest for any other.

        Args:
            strict: Changes nothing: shards have neither renames nor casts nor maps.
        """
        flag("strict", strict)
        state, own = plain_state(state), self.start()
        numbers = ("epoch", "group", "position")
        if (
            set(state) != set(own)
            or any(type(state[n]) is not int or not 0 <= state[n] <= U64_MAX for n in numbers)
            or state["group"] >= len(self.spans(state["epoch"]))
        ):
            raise InvalidRequest(
                "the state to resume from is none of a loader over shards",
                hint="load the state as it was saved",
            )
        for what in ("version", "shards"):
            if state[what] != own[what]:
                raise InvalidRequest(
                    "the state to resume from is of other shards (or other versions of them),"
                    " another seed or another shuffle",
                    hint="begin anew, or make the loader as it was when the state was saved",
                )
        return dict(state)


@dataclass(frozen=True)
class Group:
    """Shards that are read together: a dataset, and a loader over it in the order of the group's
    rows.
    """

    rows: int
    #: None if it has no rows.
    loader: Loader[Any] | None
    #: The piece that the part of its shards begins with, their numbers, and where the rows of each
    #: begin in the dataset.
    piece: int
    numbers: np.ndarray
    starts: np.ndarray
    #: Seconds in which the node found the rows.
    found_s: float

    def local(self, begin: int, end: int) -> np.ndarray:
        """The rows at these positions of the group's order."""
        assert self.loader is not None
        order = self.loader.order
        alone = {"world": 1, "rank": 0, "batch": {"rows": end - begin}, "uneven": "drop"}
        step = order.steps(order.at(0, begin), 1, alone).step(0)
        assert step is not None, f"positions {begin} to {end} of {self.rows} rows"
        return step.rows

    def read(self, rows: np.ndarray) -> Any:
        assert self.loader is not None
        with _node.works_for(self.loader.job):
            return self.loader.datasets[0].read(rows)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """What the loader calls these rows."""
        at = np.searchsorted(self.starts, rows, side="right") - 1
        shard = self.numbers[at] << np.uint64(PIECE_BITS + ROW_BITS)
        return shard + np.uint64(self.piece << ROW_BITS) + (rows - self.starts[at])


def open_group(
    shards: Shards, order: ShardOrder, options: Options, epoch: int, group: int, said: Any = None
) -> Group:
    """A group of shards, when the node knows their members. ``options`` say which rank this is."""
    span = order.spans(epoch)[group]
    with _node.works_for(options.job):
        dataset = shards.dataset(span, options.columns, said)
    loader: Loader[Any] | None = None
    if len(dataset):
        own = replace(
            options,
            seed=order.seed_of(epoch, group),
            shuffle=order.shuffle,
            uneven="drop",
            epochs=None,
            columns=None,
            follow=False,
            progress=False,
        )
        loader = Loader([dataset], None, None, own)
    rows = [f.rows for f in dataset.files]
    if max(rows) > 1 << ROW_BITS:
        raise InvalidRequest(
            f"{max(rows):,} rows begin in one part of a shard; at most {1 << ROW_BITS:,}",
            hint="make part_bytes smaller",
        )
    starts = np.cumsum([0, *rows], dtype=np.uint64)[:-1]
    numbers = np.array(span.numbers, np.uint64)
    found_s = dataset.info["opened_ms"] / 1e3
    return Group(len(dataset), loader, span.begin, numbers, starts, found_s)


class Groups:
    """Groups that are opened ahead of need, the nearest first.

    Other shards are begun when the group before them is open, or has a shard whose part has
    arrived: until then, what is needed first has the link to itself. It does not know the loader,
    which may be dropped at any time.
    """

    def __init__(self, shards: Shards, order: ShardOrder, options: Options, meter: Meter) -> None:
        self._of, self._meter, self._pid = (shards, order, options), meter, os.getpid()
        self._end = options.epochs if isinstance(options.epochs, int) else None
        self.retry_for: float = (
            shards.client.timeout if options.retry_for is None else options.retry_for
        )
        self._pool = Pool(GROUPS_AHEAD + 1, thread_name_prefix="forebay-shards")
        # What was requested, and which of that has begun to arrive.
        self._asked: dict[Key, Future[Group]] = {}
        self._arriving: set[Key] = set()
        self._wanted = (0, 0)
        self._lock = threading.Lock()
        self._stop = Stop()

    @property
    def name(self) -> str:
        """The description that the shards were opened with."""
        return self._of[0].name

    @property
    def usable(self) -> bool:
        """Whether this can open anything: it was not closed, and is not of the process that this
        one was forked from.
        """
        return not self._stop.is_set() and self._pid == os.getpid()

    def is_of(self, options: Options) -> bool:
        """Whether this has the same rank."""
        own = self._of[2]
        return (own.rank, own.world_size) == (options.rank, options.world_size)

    def get(self, epoch: int, group: int, closed: Stop) -> Group | None:
        """Waits for a group; None once this or its reader is closed."""
        wanted = (epoch, group)
        with self._lock:
            if wanted == (epoch, 0) and wanted in self._asked and self._wanted[0] == epoch:
                # The end of the epoch is filled up with its beginning: nothing must be restarted.
                first = self._asked[wanted]
                if first.done() and not first.cancelled() and first.exception() is None:
                    return first.result()
            self._wanted = wanted
            # The first of an epoch stays: an uneven epoch may end with its rows.
            kept = {(epoch, 0), *self._window()}
            for gone in [key for key in self._asked if key not in kept]:
                self._asked.pop(gone).cancel()
            self._arriving &= kept
            before = self._asked.get(wanted)
            if before is not None and before.done() and before.exception() is not None:
                # It failed while nobody waited for it.
                del self._asked[wanted]
        self._top_up()
        future = self._asked.get(wanted)
        if future is None:
            return None
        closed.wait_or(future)
        if not future.done() or future.cancelled():
            return None
        return future.result()

    def known(self, epoch: int, group: int) -> Group | None:
        """A group, if it is open already."""
        with self._lock:
            future = self._asked.get((epoch, group))
        if future is None or not future.done() or future.cancelled() or future.exception():
            return None
        return future.result()

    def _window(self) -> list[Key]:
        keys = [self._wanted]
        for _ in range(GROUPS_AHEAD):
            keys.append(self._of[1].after(keys[-1]))
        return keys

    def _top_up(self) -> None:
        order = self._of[1]
        with self._lock:
            before: Key | None = None
            for key in self._window():
                epoch, group = key
                if before is not None:
                    # Another part of the same shards is already being fetched; other shards must
                    # not take bandwidth from those that are needed first.
                    same = (
                        order.spans(before[0])[before[1]].numbers
                        == order.spans(epoch)[group].numbers
                    )
                    waits = not self._asked[before].done() and before not in self._arriving
                    beyond = self._end is not None and epoch >= self._end
                    # The next epoch begins when the last group of this one is being read: until
                    # then, opening it would only take time from this one's end.
                    later = epoch > self._wanted[0] == order.after(self._wanted)[0]
                    if beyond or later or (waits and not same):
                        return
                if key not in self._asked:
                    future = submit(self._pool, self._stop.is_set, self._open, key)
                    if future is None:
                        return
                    self._asked[key] = future
                before = key

    def _open(self, key: Key) -> Group:
        def said(now: dict[str, Any]) -> None:
            with self._lock:
                # Nobody wants it any more: its place is for those that are wanted.
                is_gone = key not in self._asked
            if is_gone or self._stop.is_set() or is_exiting():
                raise InvalidRequest("the loader was closed while it opened shards")
            if now.get("indexed", 0) and key not in self._arriving:
                self._arriving.add(key)
                self._top_up()

        def opened() -> Group:
            began = time.perf_counter()
            group = open_group(*self._of, *key, said)
            took = time.perf_counter() - began
            # The node reads the shards for it, or knows them: then this is next to nothing.
            found = min(group.found_s, took)
            self._meter.came(key[0], {}, origin_s=found, network_s=took - found)
            return group

        try:
            return patiently(opened, self.retry_for, self._stop, self._meter)
        finally:
            self._arriving.add(key)
            self._top_up()

    def close(self) -> None:
        """Stops, without waiting for work in progress."""
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


class ShardLoader(Loader[Any]):
    """Batches of shards, in the order of :class:`ShardOrder`. Made by :meth:`Shards.loader`.

    Differences from other loaders: rows are named by their shard and their place in it
    (``loader.last.rows``, see :meth:`Group.ids`); the length of an epoch is known only when each of
    its shards has been opened, which ``len()`` and ``rows_per_epoch`` wait for; the cache follows
    no plan beyond what is opened ahead.
    """

    _are_numbered = False

    def __init__(self, shards: Shards, options: Options) -> None:
        self.options = options = options.checked()
        if options.batch_size is None or options.max_total is not None:
            raise InvalidRequest(
                "batches bounded by length need the lengths of all rows",
                hint="batch_size=, or forebay.open",
            )
        if options.pack is not None:
            raise InvalidRequest(
                "shards without an index have no row numbers, and packs need them",
                hint="forebay.open",
            )
        options.import_framework()
        if options.rank is not None or options.world_size is not None:
            _place.find(options.rank, options.world_size)
        self._inherited = self._settled = None
        self.shards = shards
        self.shard_order = ShardOrder(shards, options.seed, options.shuffle)
        # What a loader asks of the datasets of its rows: how they are decoded, and their names.
        self.datasets = [shards]  # type: ignore[list-item]
        self._order = self.shard_order  # type: ignore[assignment]
        self._lengths = None
        self._go_to(self._order.start())
        self._ahead = Ahead()
        self._meter = Meter()
        self._current = None
        self.last = None
        self._own_name = uuid.uuid4().hex
        self._groups: Groups | None = None

    def _placed(self) -> Options:
        place = self.place
        rank, world_size = place.rank, place.world_size
        return replace(self.options, rank=rank, world_size=world_size, job=self.job)

    def groups(self) -> Groups:
        """What opens groups for this loader; it lives as long as the loader, from one loop to the
        next.
        """
        groups, placed = self._groups, self._placed()
        if groups is None or not groups.usable or not groups.is_of(placed):
            if groups is not None:
                groups.close()
            groups = self._groups = Groups(self.shards, self.shard_order, placed, self._meter)
            weakref.finalize(self, groups.close)
        return groups

    def stored(self) -> list[tuple[str, int]]:
        return [(self.shards.name, sum(file.size for file in self.shards.files))]

    def rows_of_groups(self, epoch: int) -> list[int]:
        """The rows of each group of an epoch; waits until each shard has been opened."""
        order, options = self.shard_order, self._placed()
        groups = range(len(order.spans(epoch)))
        return [open_group(self.shards, order, options, epoch, g).rows for g in groups]

    def steps(self, state: State, until: int | None) -> Any:
        return Counted(self, state, until)

    def fetcher(
        self,
        state: State,
        until: int | None,
        meter: Meter,
        first: int = 0,
        stride: int = 1,
        follow: bool = True,
        pool: Pool | None = None,
    ) -> Fetcher:
        if stride != 1:
            raise InvalidRequest(
                "shards are read in one process",
                hint="DataLoader(num_workers=0) and threads=; loaders of forebay.open take workers",
            )
        if first:
            state = self.after(state, first)
        return InTurn(self.groups(), self._placed(), self.shard_order, state, until, meter)

    def after(self, state: State, steps: int) -> State:
        """The state after so many steps from a state on; waits until the shards before it have been
        opened.
        """
        order, options, until = self.shard_order, self._placed(), self.until(state)
        stride = (options.batch_size or 1) * self.place.world_size
        epoch, group = int(state["epoch"]), int(state["group"])
        # From the beginning of the group.
        position = int(state["position"])
        while until is None or epoch < until:
            begun, rows, goal = position, 0, position + steps * stride
            for at in range(group, len(order.spans(epoch))):
                here = open_group(self.shards, order, options, epoch, at).rows
                if goal < rows + here:
                    is_last = at + 1 == len(order.spans(epoch))
                    if is_last and options.uneven == "drop" and rows + here - goal < stride:
                        # What is left makes no step.
                        return order.at(epoch + 1)
                    return order.at(epoch, goal - rows, at)
                rows += here
            left = rows - begun
            steps -= left // stride if options.uneven == "drop" else -(-left // stride)
            epoch, group, position = epoch + 1, 0, 0
            if steps <= 0:
                return order.at(epoch)
        return order.at(until)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of all ranks together; waits until each shard has been opened."""
        return sum(self.rows_of_groups(0))

    def rows_left(self, state: State, until: int | None) -> int | None:
        return None

    def clients(self) -> list[Client]:
        return [self.shards.client]

    def _name(self, source: int, row: int) -> tuple[str, int] | None:
        shard, piece = row >> (PIECE_BITS + ROW_BITS), row >> ROW_BITS & (1 << PIECE_BITS) - 1
        file = self.shards.files[shard]
        name = file.name
        if piece:
            name += f" from byte {file.size * piece // self.shards.pieces} on"
        return name, row & (1 << ROW_BITS) - 1

    def __getstate__(self) -> dict[str, Any]:
        return {
            "made_of": (self.shards, self.options),
            "state": self._trained,
            "inherited": _place.to_inherit(self._inherited),
            "own_name": self._own_name,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["made_of"])  # type: ignore[misc]
        self._go_to(state["state"])
        self._inherited = state["inherited"]
        self._own_name = state["own_name"]

    def __repr__(self) -> str:
        o, s = self.options, self._state
        return (
            f"<forebay.ShardLoader of {self.shards.name}: batches of {o.batch_size},"
            f" shuffle {o.shuffle or 'none'}, seed {o.seed}, {self._shown_place()},"
            f" at row {s['position']:,} of group {s['group']} of epoch {s['epoch']}>"
        )


class Counted:
    """How many steps there are from a state to the end."""

    def __init__(self, loader: ShardLoader, state: State, until: int | None) -> None:
        self._loader, self._state, self._until = loader, state, until

    def count(self) -> int | None:
        """Opens the shards of one epoch, or those that are left of it."""
        if self._until is None:
            return None
        loader, state = self._loader, self._state
        stride = (loader.options.batch_size or 1) * loader.place.world_size
        drop = loader.options.uneven == "drop"
        epochs = self._until - int(state["epoch"])
        if epochs <= 0:
            return 0
        rows = loader.rows_of_groups(int(state["epoch"]))
        left = sum(rows[state["group"] :]) - int(state["position"])
        now, later = (n // stride if drop else -(-n // stride) for n in (left, sum(rows)))
        return now + (epochs - 1) * later


@dataclass(frozen=True)
class Inner:
    """The whole steps of a group, from a position on."""

    key: Key
    begin: int
    count: int
    fetcher: Fetcher | None

    def close(self) -> None:
        if self.fetcher is not None:
            self.fetcher.close()


class OfEpoch(Meter):
    """The meter of rows of a group, whose own order has one epoch only, for the epoch that they are
    read in.
    """

    def __init__(self, outer: Meter, epoch: int) -> None:
        super().__init__()
        self._outer, self._epoch = outer, epoch

    def add(self, **amounts: float) -> None:
        self._outer.add(**amounts)

    def came(self, epoch: int, sources: Mapping[str, float], **amounts: float) -> None:
        self._outer.came(self._epoch, sources, **amounts)


class InTurn:
    """The rows of steps, group after group. The step in which a group ends is read while its whole
    steps are, one batch more than the loader prefetches. Of the group after it, in the same epoch,
    the steps within ``prefetch`` are requested before it is reached, if it is open by then. The
    stream of a group begins only when it is reached: a loader has one at a time, and one window.
    """

    def __init__(
        self,
        groups: Groups,
        options: Options,
        order: ShardOrder,
        state: State,
        until: int | None,
        meter: Meter,
    ) -> None:
        self._groups, self._order, self._until, self._meter = groups, order, until, meter
        rows, world, rank = options.batch_size, options.world_size, options.rank
        assert rows is not None and world is not None and rank is not None
        self._rows, self._stride, self._offset = rows, rows * world, rows * rank
        self._uneven, self._prefetch = options.uneven, options.prefetch
        self._streams = options.stream
        # Given last: its index, and the place after it. One value, so that Ctrl-C finds both or
        # none.
        begin: Cursor = (state["epoch"], state["group"], state["position"])
        self._given: tuple[int, Fetched | None, Cursor] = (-1, None, begin)
        self._inner: Inner | None = None
        # The next group, once it is begun.
        self._inner_next: Inner | None = None
        # The step in which the group that is read ends, read beside its whole steps.
        self._next: tuple[int, Cursor, Future[tuple[Fetched | None, Cursor] | None]] | None = None
        # For the requests of all groups.
        self._pool = fetch_pool(options.prefetch)
        # Reentrant: a garbage collection may close this in a thread that is in here.
        self._lock = threading.RLock()
        # Set when this is closed: whoever waits for a group waits for either.
        self._stop = Stop()

    def at(self, index: int) -> Fetched | None:
        given, fetched, cursor = self._given
        if index == given:
            return fetched
        made = self._make(index, cursor)
        if made is None:
            return None
        self._given = (index, *made)
        return made[0]

    def _make(self, number: int, cursor: Cursor) -> tuple[Fetched, Cursor] | None:
        while not self._stop.is_set():
            epoch, at, position = cursor
            if self._until is not None and epoch >= self._until:
                return None
            group = self._groups.get(epoch, at, self._stop)
            if group is None:
                return None
            inner = self._inner
            if inner is None or inner.key != (epoch, at) or position < inner.begin:
                inner = self._enter(epoch, at, position, group)
                if inner is None:
                    return None
            done = (position - inner.begin) // self._stride
            self._look_beyond(inner, group, number, done)
            if done >= inner.count:
                made = self._read_before(number, cursor)
                if made is None and not self._stop.is_set():
                    made = self._across(number, cursor)
                if made is None:
                    return None
                if isinstance(made[0], Fetched):
                    return made  # type: ignore[return-value]
                cursor = made[1]
                continue
            assert inner.fetcher is not None
            fetched = inner.fetcher.at(done)
            if fetched is None:
                return None
            after = self._normal(epoch, at, position + self._stride, group.rows)
            return self._named(number, epoch, group, fetched, after), after
        return None

    def _enter(self, epoch: int, at: int, position: int, group: Group) -> Inner | None:
        """Begins with the whole steps of a group; None once this is closed."""
        with self._lock:
            before, self._inner = self._inner, None
        if before is not None:
            before.close()
        begun = self._inner_next
        if begun is not None and (begun.key, begun.begin) == ((epoch, at), position):
            inner = begun
        else:
            inner = self._inner_of((epoch, at), position, group)
        with self._lock:
            self._inner = inner
            self._inner_next = self._next = None
        if begun is not None and begun is not inner:
            begun.close()
        if self._stop.is_set():
            inner.close()
            return None
        return inner

    def _inner_of(self, key: Key, position: int, group: Group) -> Inner:
        count = (group.rows - position) // self._stride
        fetcher = None
        if count:
            loader = group.loader
            assert loader is not None
            begin = loader.order.at(0, position)
            meter = OfEpoch(self._meter, key[0])
            fetcher = loader.fetcher(begin, 1, meter, follow=False, pool=self._pool)
        return Inner(key, position, count, fetcher)

    def _look_beyond(self, inner: Inner, group: Group, number: int, done: int) -> None:
        """Requests what follows the whole steps of a group, of which step ``number`` is the
        ``done``-th: the step in which it ends, and those of the next group's first that are within
        ``prefetch``.
        """
        (epoch, at), left = inner.key, inner.count - done
        rest = (group.rows - inner.begin) % self._stride
        is_last = at + 1 == len(self._order.spans(epoch))
        following = None if is_last else self._groups.known(epoch, at + 1)
        if rest and left > 0 and self._next is None and (is_last or following is not None):
            end = inner.begin + inner.count * self._stride
            self._read_ahead(number + left, (epoch, at, end))
        # None are before it if this group has no rows: where the next begins is not known then.
        before, begin = left + bool(rest), self._stride - rest if rest else 0
        if self._streams or following is None or not 0 < before <= self._prefetch:
            return
        if following.rows - begin < self._stride:
            return
        begun = self._inner_next
        if begun is None:
            begun = self._inner_of((epoch, at + 1), begin, following)
            with self._lock:
                self._inner_next = begun
            if self._stop.is_set():
                begun.close()
        if isinstance(begun.fetcher, Pull):
            begun.fetcher.begin(before)

    def _read_ahead(self, number: int, cursor: Cursor) -> None:
        """Reads the step in which a group ends, if the groups that it needs are open."""
        known = self._groups.known
        future = submit(self._pool, self._stop.is_set, self._across, number, cursor, known)
        if future is not None:
            self._next = (number, cursor, future)

    def _read_before(self, number: int, cursor: Cursor) -> tuple[Fetched | None, Cursor] | None:
        """That step; None if it was not read ahead, or that failed while nobody waited."""
        if self._next is None or self._next[:2] != (number, cursor):
            return None
        future = self._next[2]
        if future.cancel() or (future.done() and future.exception() is not None):
            made = None
        else:
            self._stop.wait_or(future)
            made = future.result() if future.done() else None
        self._next = None
        return made

    def _normal(self, epoch: int, at: int, position: int, rows: int) -> Cursor:
        """A place; for the last group of an epoch without a step left, the beginning of the next
        epoch.
        """
        last = at + 1 == len(self._order.spans(epoch))
        left = rows - position
        if last and (left == 0 or (self._uneven == "drop" and left < self._stride)):
            return epoch + 1, 0, 0
        return (epoch, at + 1, 0) if left == 0 else (epoch, at, position)

    def _named(
        self, number: int, epoch: int, group: Group, fetched: Fetched, after: Cursor
    ) -> Fetched:
        ids = group.ids(fetched.step.rows)
        step = Step(number, epoch, ids, None, len(ids), self._state(after))
        rows = fetched.rows
        return Fetched(step, Rows(rows._parts, ids, pick=rows._pick))

    def _state(self, at: Cursor) -> State:
        epoch, group, position = at
        return self._order.at(epoch, position, group)

    def _too_few(self, rows: int) -> InvalidRequest:
        """The error of an epoch that makes no step."""
        if rows == 0:
            return InvalidRequest(
                f"{self._groups.name} has no rows",
                hint="check that these are the tars that were meant",
            )
        return InvalidRequest(
            f"an epoch of {counted(rows, 'row')} is less than one step of all ranks, which takes"
            f" {self._stride}",
            hint='take a smaller batch_size=, or uneven="pad" or uneven="repeat"',
        )

    def _across(
        self,
        number: int,
        cursor: Cursor,
        find: Callable[[int, int], Group | None] | None = None,
    ) -> tuple[Fetched | None, Cursor] | None:
        """The step in which a group ends. If the epoch has none left, no step and the place to
        continue from; None if ``find`` does not find a group, or once this is closed. (Without
        ``find``, groups are waited for.)
        """
        if find is None:
            find = self._wait_for
        epoch = cursor[0]
        pieces: list[tuple[Group, int, int]] = []
        need, at, position = self._stride, cursor[1], cursor[2]
        real, end = 0, False
        groups = len(self._order.spans(epoch))
        while need:
            if at == groups:
                real, end = self._stride - need, True
                if real == 0 or self._uneven == "drop":
                    if cursor[1:] == (0, 0):
                        raise self._too_few(real)
                    return None, (epoch + 1, 0, 0)
                break
            group = find(epoch, at)
            if group is None:
                return None
            take = min(need, group.rows - position)
            if take:
                pieces.append((group, position, position + take))
            need, position = need - take, position + take
            if position == group.rows:
                at, position = at + 1, 0
        after: Cursor = (epoch + 1, 0, 0)
        if not end:
            real = self._stride
            if at < groups:
                group = find(epoch, at)
                if group is None:
                    return None
                after = (
                    self._normal(epoch, at, position, group.rows) if group.rows else (epoch, at, 0)
                )
        # What is missing, from the beginning of the epoch, which may be these very pieces.
        at = 0
        while need:
            group = find(epoch, at)
            if group is None:
                return None
            take = min(need, group.rows)
            if take:
                pieces.append((group, 0, take))
            need, at = need - take, (at + 1) % groups
        own = list(_cut(pieces, self._offset, self._offset + self._rows))
        counts = self._rows
        if self._uneven == "pad":
            counts = max(0, min(self._rows, real - self._offset))
        began = time.perf_counter()
        ids, rows = patiently(
            lambda: self._read(own), self._groups.retry_for, self._stop, self._meter
        )
        account(self._meter, epoch, rows, began)
        return Fetched(Step(number, epoch, ids, None, counts, self._state(after)), rows), after

    def _wait_for(self, epoch: int, group: int) -> Group | None:
        return self._groups.get(epoch, group, self._stop)

    def _read(self, pieces: Sequence[tuple[Group, int, int]]) -> tuple[np.ndarray, Rows]:
        parts, ids, pick = [], [], []
        for number, (group, begin, end) in enumerate(pieces):
            local = group.local(begin, end)
            parts.append(group.read(local))
            ids.append(group.ids(local))
            pick.append(np.stack([np.full(len(local), number), np.arange(len(local))], axis=1))
        named = np.concatenate(ids)
        return named, Rows(parts, named, pick=np.concatenate(pick))

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            inners = self._inner, self._inner_next
            self._inner = self._inner_next = None
        # Before their pool, so that they know why it takes no more.
        for inner in inners:
            if inner is not None:
                inner.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _cut(
    pieces: Sequence[tuple[Group, int, int]], begin: int, end: int
) -> Iterator[tuple[Group, int, int]]:
    """The rows from ``begin`` to ``end`` of pieces that follow each other."""
    at = 0
    for group, first, last in pieces:
        size = last - first
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            yield group, first + low - at, first + high - at
        at += size
