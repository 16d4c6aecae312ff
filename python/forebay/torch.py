"""PyTorch datasets over Forebay.

Over a dataset that :func:`forebay.open` opened:

* the dataset itself is map-style: ``DataLoader(ds, batch_size=64, shuffle=True, num_workers=4)``
  asks for a batch in one request;
* :class:`LoaderDataset` (``ds.loader(…).torch()``) is iterable: shuffled by a plan, dealt to ranks
  and workers, resumed exactly by :class:`Resumable` or ``torchdata.StatefulDataLoader``
  (:func:`state_of`).

Over names that are already known:

* :class:`MapDataset`: map-style. DataLoader hands it the indices of a whole batch
  (``__getitems__``), and it fetches them in one GetBatch.
* :class:`IterableDataset`: iterable. It shards over ranks and DataLoader workers, shuffles per
  epoch, and keeps requests in flight ahead of the training loop. ``torchdata``'s
  ``StatefulDataLoader`` resumes it exactly.

Over any dataset:

* :class:`DataLoader`: PyTorch's, with shared memory that is reused for each batch
  (:class:`BatchRing`), which is faster with workers.

The datasets work with DataLoader workers by ``fork``, ``forkserver`` and ``spawn``: the client in
them connects anew in each process.

A sample is what ``decode`` makes of an :class:`forebay.Item`, then what ``transform`` makes of
that; with labels, the pair ``(data, label)``. Without ``decode`` it is a one-dimensional
``torch.uint8`` tensor, a view of the received buffer (no copy; its memory is this process's own and
may be written to). Views that ``decode`` leaves in a sample, such as ``item.data``, become
``bytes``, which go to other processes.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._needs import needs

with needs("forebay.torch"):
    import numpy  # noqa: F401
    import torch
    import torch.utils.data

from . import _place
from ._arguments import check_client, flag, whole_number
from ._collate import owned
from ._forebay import Batch, Client, Item
from ._place import rank_and_world
from ._ring import BatchRing, DataLoader
from ._torch_loader import LoaderDataset, Resumable, state_of
from ._words import counted
from .errors import Error, InvalidRequest, NotFound, SampleFailed

__all__ = [
    "BatchRing",
    "DataLoader",
    "IterableDataset",
    "LoaderDataset",
    "MapDataset",
    "Resumable",
    "as_tensor",
    "rank_and_world",
    "state_of",
]


#: Entries that a digest looks at, at most: each worker makes one, and Python's texts that a forked
#: process looks at take memory there. And how many of them are joined at a time.
DIGESTED_MOST, DIGESTED_TOGETHER = 1 << 20, 4096
#: What a state of a worker has.
STATE = frozenset(("epoch", "yielded", "worker", "workers", "world_size", "order"))


def __dir__() -> list[str]:
    return sorted(__all__)


def as_tensor(item: Item) -> torch.Tensor:
    """The bytes of an entry as a ``torch.uint8`` tensor of shape ``(item.size,)``; no copy."""
    if item.error is None and item.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(item, dtype=torch.uint8)


def _by_position(what: str, given: Any) -> Any:
    """What counts its items from 0, with the items of what was given."""
    if hasattr(given, "iloc") and hasattr(given, "to_numpy"):
        # A pandas.Series finds by its own labels, and one that was filtered or sorted has others.
        given = given.to_numpy()
    # A dict finds by its keys, and the letters of a text are no items.
    is_other = isinstance(given, (str, bytes, Mapping))
    if is_other or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        raise TypeError(
            f"{what} must be a sequence with one item for each row, such as a list or an array, not"
            f" {type(given).__name__}"
        )
    return given


class _Samples:
    """Entries and labels, and how an entry becomes a sample. What both datasets share."""

    def __init__(
        self,
        client: Client,
        samples: Sequence[Any],
        *,
        bucket: str | None,
        labels: Sequence[Any] | None,
        decode: Callable[[Item], Any] | None,
        transform: Callable[[Any], Any] | None,
        on_error: str | Callable[[Item], Any],
    ) -> None:
        check_client(client)
        if isinstance(samples, (str, bytes, Mapping)):
            raise TypeError(
                "samples must be a sequence of names; for all objects under a prefix use"
                " from_prefix()"
            )
        samples = _by_position("samples", samples)
        if labels is not None:
            labels = _by_position("labels", labels)
        if labels is None and len(samples) and isinstance(samples[0], tuple):
            samples, labels = [s[0] for s in samples], [s[1] for s in samples]
        if labels is not None and len(labels) != len(samples):
            raise ValueError(
                f"there are {counted(len(samples), 'sample')} and {counted(len(labels), 'label')}"
            )
        if on_error != "raise" and not callable(on_error):
            raise ValueError('on_error must be "raise" or a function of an Item')
        self.client = client
        self.samples = samples
        self.labels = labels
        self.bucket = bucket
        self.decode = decode or as_tensor
        self.transform = transform
        self.on_error = on_error
        #: A sample consists of the bytes of its entry, as they are.
        self.plain = decode is None and transform is None and on_error == "raise"
        self._digest: str | None = None

    def entries(self, indices: Sequence[int]) -> list[Any]:
        """The entries of a GetBatch for these rows."""
        samples = self.samples
        return [samples[i] for i in indices]

    def digest(self) -> str:
        """Tells the entries and their order from others of the same number: by each of them, or
        of very many by :data:`DIGESTED_MOST`, spread evenly.
        """
        if self._digest is None:
            found = hashlib.blake2b(repr(self.bucket).encode(), digest_size=16)
            rows = range(0, len(self.samples), -(-len(self.samples) // DIGESTED_MOST) or 1)
            for at in range(0, len(rows), DIGESTED_TOGETHER):
                some = self.entries(rows[at : at + DIGESTED_TOGETHER])
                # Texts of NumPy show themselves otherwise.
                texts = [str(e) if isinstance(e, str) else repr(e) for e in some]
                found.update("\0".join([*texts, ""]).encode("utf-8", "surrogatepass"))
            self._digest = found.hexdigest()
        return self._digest

    def options(self) -> dict[str, Any]:
        return {"bucket": self.bucket, "continue_on_error": self.on_error != "raise"}

    def sample(self, item: Item, index: int) -> Any:
        if item.error is not None and callable(self.on_error):
            data = self.on_error(item)
        else:
            data = self.decode(item)
            if self.transform is not None:
                data = self.transform(data)
        # DataLoader makes a tensor of each byte of a view, and its workers cannot send views.
        data = owned(data)
        return data if self.labels is None else (data, self.labels[index])

    def of_batch(self, batch: Batch, indices: Sequence[int]) -> Iterator[Any]:
        for item, index in zip(batch, indices, strict=True):
            try:
                sample = self.sample(item, index)
            except Error:
                raise
            except Exception as e:
                raise self.failed(item, index, e) from e
            yield sample

    @staticmethod
    def failed(item: Item, index: int, cause: Exception) -> SampleFailed:
        """A failure of ``decode`` or ``transform``, with the name of the entry."""
        file = f"{item.bucket}/{item.objname}" if item.bucket else item.objname
        member = f", member {item.archpath}" if item.archpath else ""
        error = SampleFailed(f"{file}{member} (row {index}): {type(cause).__name__}: {cause}")
        error.row, error.file = index, file
        return error

    def __str__(self) -> str:
        with_labels = "" if self.labels is None else " with labels"
        return f"{len(self.samples):,} entries{with_labels} of {self.client!r}"


def _names_under(client: Client, prefix: str) -> tuple[str, list[str]]:
    check_client(client)
    names = [info.key for info in client.list(prefix)]
    if not names:
        raise NotFound(
            f"there is nothing under {prefix}",
            hint="client.list shows what there is; write a prefix as bucket/prefix or"
            " s3://bucket/prefix",
        )
    bucket = prefix.split("://", 1)[-1].split("/", 1)[0]
    return bucket, names


class MapDataset(torch.utils.data.Dataset):
    """A map-style dataset whose ``__getitems__`` is one GetBatch.

    Args:
        client: Where the objects come from.
        samples: One entry per row: a name (``"bucket/key"``, or ``"key"`` with ``bucket=``), a
            :class:`forebay.Entry`, a dict; or pairs ``(entry, label)``. NumPy arrays of strings
            work and cost forked workers the least memory. Of a ``pandas.Series`` the values are
            taken in their order, whatever its index.
        bucket: The bucket of names that have none.
        labels: One label per row, if ``samples`` are not pairs.
        decode: Makes data of an :class:`forebay.Item` (for instance an image decoder that takes
            ``item.data``). Default: :func:`as_tensor`.
        transform: Applied to what ``decode`` returned.
        on_error: ``"raise"`` (the default): an entry that cannot be had fails the batch with a
            :class:`forebay.Error`. A function: called with the item (see ``item.error``); what it
            returns is the data of that row.
        ring: Workers receive batches straight into this :class:`BatchRing` where a sample is plain
            bytes (no ``decode``, ``transform``, ``on_error``), and DataLoader's ``collate_fn`` is
            one of the ring's. :class:`DataLoader` does all this by itself.

    Raises:
        forebay.Error: From ``__getitem__`` and ``__getitems__``; a :class:`forebay.SampleFailed`
            that names the object where ``decode`` or ``transform`` failed.
    """

    def __init__(
        self,
        client: Client,
        samples: Sequence[Any],
        *,
        bucket: str | None = None,
        labels: Sequence[Any] | None = None,
        decode: Callable[[Item], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: str | Callable[[Item], Any] = "raise",
        ring: BatchRing | None = None,
    ) -> None:
        self._rows = _Samples(
            client,
            samples,
            bucket=bucket,
            labels=labels,
            decode=decode,
            transform=transform,
            on_error=on_error,
        )
        self.ring = ring

    def with_ring(self, ring: BatchRing | None) -> MapDataset:
        """The same dataset, with this ring."""
        other = copy.copy(self)
        other.ring = ring
        return other

    @classmethod
    def from_prefix(cls, client: Client, prefix: str, **options: Any) -> MapDataset:
        """All objects whose names begin with ``prefix`` (``"bucket"`` or ``"bucket/prefix"``), in
        the order of their names. Raises ``NotFound`` for none.
        """
        bucket, names = _names_under(client, prefix)
        return cls(client, names, bucket=bucket, **options)

    def __len__(self) -> int:
        return len(self._rows.samples)

    def __repr__(self) -> str:
        return f"<forebay.torch.MapDataset: {self._rows}>"

    def __getitem__(self, index: int) -> Any:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} does not exist: there are {len(self)}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these rows, in this order, in one request."""
        indices = list(indices)
        if not indices:
            return []
        rows = self._rows
        if self.ring is not None and rows.plain:
            labels = None if rows.labels is None else [rows.labels[i] for i in indices]
            filled = self.ring.fill(rows.client, rows.entries(indices), rows.bucket, labels)
            if filled is not None:
                return filled
        batch = self._rows.client.batch(self._rows.entries(indices), **self._rows.options())
        return list(self._rows.of_batch(batch, indices))


class IterableDataset(torch.utils.data.IterableDataset):
    """An iterable dataset: each rank and each DataLoader worker gets its own rows, each row exactly
    once per epoch.

    Args:
        client, samples, bucket, labels, decode, transform, on_error: As for :class:`MapDataset`.
        request_size: Entries per GetBatch. It need not be DataLoader's ``batch_size``.
        prefetch: Requests in flight beyond the one being consumed. Bounded in bytes by the
            client's ``max_inflight_bytes``.
        shuffle: Whether to permute all rows anew in each epoch (same permutation on all ranks).
        seed: Seed of the permutation.
        rank, world_size: This process among the training processes. Default: what
            :func:`rank_and_world` says when the iteration begins.
        drop_uneven: Leave out the last rows so that all ranks yield equally many.

    Call :meth:`set_epoch` before each epoch, as with ``DistributedSampler``.

    ``torchdata.StatefulDataLoader`` resumes it exactly, and reads nothing again: each worker goes
    on after the last sample that it yielded, in the epoch of its state, whatever the batch size is
    now. Such a state loads over the same entries, seed and options, into as many workers of as many
    ranks as it was saved with; any other is refused. (``ds.loader(…).torch()`` over
    :func:`forebay.open` resumes with any number.) Where the workers tell what they yielded less
    often than at each step (``snapshot_every_n_steps=``), the steps since then are read again, and
    the batch size has to stay as it was. Without workers, keep no state that is taken after a batch
    has failed: the samples of that batch before the one that failed count as yielded.
    """

    def __init__(
        self,
        client: Client,
        samples: Sequence[Any],
        *,
        bucket: str | None = None,
        labels: Sequence[Any] | None = None,
        decode: Callable[[Item], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: str | Callable[[Item], Any] = "raise",
        request_size: int = 128,
        prefetch: int = 2,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_uneven: bool = False,
    ) -> None:
        if rank is not None or world_size is not None:
            _place.find(rank, world_size)
        size, ahead, number = map(whole_number, (request_size, prefetch, seed))
        if size is None or size < 1 or ahead is None or ahead < 0:
            raise ValueError(
                "request_size must be a whole number of at least 1, and prefetch of at least 0, not"
                f" {request_size!r} and {prefetch!r}"
            )
        if number is None:
            raise ValueError(f"seed must be a whole number, not {seed!r}")
        self._rows = _Samples(
            client,
            samples,
            bucket=bucket,
            labels=labels,
            decode=decode,
            transform=transform,
            on_error=on_error,
        )
        self.request_size, self.prefetch = size, ahead
        self.shuffle = flag("shuffle", shuffle)
        self.seed = number
        # In shared memory, so that workers that persist from epoch to epoch see the change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.drop_uneven = flag("drop_uneven", drop_uneven)
        self._given = rank, world_size
        self._inherited: _place.Place | None = None

    @classmethod
    def from_prefix(cls, client: Client, prefix: str, **options: Any) -> IterableDataset:
        """All objects whose names begin with ``prefix`` (``"bucket"`` or ``"bucket/prefix"``), in
        the order of their names. Raises ``NotFound`` for none.
        """
        bucket, names = _names_under(client, prefix)
        return cls(client, names, bucket=bucket, **options)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration, in persistent DataLoader workers too."""
        number = whole_number(epoch)
        if number is None or not 0 <= number < 1 << 63:
            raise InvalidRequest(f"epoch {epoch!r}", hint="epochs are counted from 0")
        self._epoch.fill_(number)

    @property
    def epoch(self) -> int:
        """What :meth:`set_epoch` was last called with; 0 at first."""
        return int(self._epoch)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker knows nothing about torch.distributed: it takes the place of the process
        # that spawned it.
        return {**self.__dict__, "_inherited": _place.to_inherit(self._inherited)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a worker that was spawned it is shared already, in a copy not yet.
        self._epoch.share_memory_()

    def _rank_and_world(self) -> tuple[int, int]:
        place = _place.find(*self._given, self._inherited)
        return place.rank, place.world_size

    def __repr__(self) -> str:
        return f"<forebay.torch.IterableDataset: {self._rows}, epoch {self.epoch}>"

    def _own_rows(self, epoch: int | None = None) -> torch.Tensor:
        """The row numbers of this rank, in order: in this epoch, or the one that is set."""
        rank, world = self._rank_and_world()
        epoch = self.epoch if epoch is None else epoch
        total = len(self._rows.samples)
        if self.shuffle:
            generator = torch.Generator()
            # Any whole number is a seed, including torch.initial_seed(); a generator takes 64 bits
            # of it.
            generator.manual_seed((self.seed * 1_000_003 + epoch) % (1 << 64))
            order = torch.randperm(total, generator=generator)
        else:
            order = torch.arange(total)
        if self.drop_uneven:
            order = order[: total - total % world]
        return order[rank::world]

    def __len__(self) -> int:
        """Rows of this rank, all its workers together."""
        rank, world = self._rank_and_world()
        total = len(self._rows.samples)
        if self.drop_uneven:
            total -= total % world
        return (total - rank + world - 1) // world

    def __iter__(self) -> Iterator[Any]:
        return _Iteration(self)

    def _samples(self, rows: torch.Tensor) -> Iterator[Any]:
        requests = [
            rows[at : at + self.request_size].tolist()
            for at in range(0, len(rows), self.request_size)
        ]
        lists = (self._rows.entries(indices) for indices in requests)
        batches = self._rows.client.batches(lists, prefetch=self.prefetch, **self._rows.options())
        for batch, indices in zip(batches, requests, strict=True):
            yield from self._rows.of_batch(batch, indices)

    def _order(self) -> dict[str, Any]:
        """What an order is the order of, as states say it."""
        return {
            "entries": len(self._rows.samples),
            "digest": self._rows.digest(),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_uneven": self.drop_uneven,
        }


class _Iteration(Iterator[Any]):
    """What a rank yields in an epoch, or one DataLoader worker of it. Its state is what
    ``StatefulDataLoader`` keeps for that worker.
    """

    def __init__(self, data: IterableDataset) -> None:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self._data, self._worker, self._workers = data, worker, workers
        _, self._world = data._rank_and_world()
        #: None before it begins: in the epoch that is set then.
        self._epoch: int | None = None
        self._yielded = 0
        self._left: Iterator[Any] | None = None

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._left is None:
            self._epoch = self._epoch_now()
            own = self._data._own_rows(self._epoch)[self._worker :: self._workers]
            self._left = self._data._samples(own[self._yielded :])
        sample = next(self._left)
        self._yielded += 1
        return sample

    def _epoch_now(self) -> int:
        return self._data.epoch if self._epoch is None else self._epoch

    def state_dict(self) -> dict[str, Any]:
        """What this worker has yielded."""
        return {
            "epoch": self._epoch_now(),
            "yielded": self._yielded,
            "worker": self._worker,
            "workers": self._workers,
            "world_size": self._world,
            "order": self._data._order(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the same worker stopped.

        Raises:
            InvalidRequest: There were other workers or ranks then, or the state is of other
                entries, of another order, or of something else.
        """
        if not isinstance(state, dict) or not STATE.issubset(state):
            raise InvalidRequest(
                "this is not a state of a forebay.torch.IterableDataset",
                hint="give StatefulDataLoader what its state_dict() returned over this dataset",
            )
        if difference := self._difference(state):
            raise InvalidRequest(
                f"the state cannot be resumed: {difference}",
                hint="make the dataset and its StatefulDataLoader as they were when it was saved;"
                " loaders of forebay.open(…) resume on any number of workers and ranks",
            )
        self._epoch, self._yielded = int(state["epoch"]), int(state["yielded"])
        self._left = None

    def _difference(self, state: dict[str, Any]) -> str | None:
        """What was otherwise when a state was saved, in words."""
        then, here = state["order"], self._data._order()
        if then.get("entries") != here["entries"]:
            return f"it is over {then.get('entries')} entries, and here are {here['entries']}"
        if then.get("digest") != here["digest"]:
            return "it is over other entries than are here, or over these in another order"
        for name in ("seed", "shuffle", "drop_uneven"):
            if then.get(name) != here[name]:
                return f"it was saved with {name}={then.get(name)}, and here is {here[name]}"
        if state["world_size"] != self._world:
            return f"it is of {counted(state['world_size'], 'rank')}, and here are {self._world}"
        if (state["worker"], state["workers"]) != (self._worker, self._workers):
            return (
                f"it is of worker {state['worker']} of {state['workers']}, and this is worker"
                f" {self._worker} of {self._workers}"
            )
        return None
