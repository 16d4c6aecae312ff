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
  epoch, and keeps requests in flight ahead of the training loop.

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
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from .errors import Error, NotFound, SampleFailed

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

    def entries(self, indices: Sequence[int]) -> list[Any]:
        """The entries of a GetBatch for these rows."""
        samples = self.samples
        return [samples[i] for i in indices]

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
        self._epoch.fill_(epoch)

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

    def _own_rows(self) -> torch.Tensor:
        """The row numbers of this rank, in order."""
        rank, world = self._rank_and_world()
        total = len(self._rows.samples)
        if self.shuffle:
            generator = torch.Generator()
            # Any whole number is a seed, including torch.initial_seed(); a generator takes 64 bits
            # of it.
            generator.manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 64))
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
        rows = self._own_rows()
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            rows = rows[worker.id :: worker.num_workers]
        requests = [
            rows[at : at + self.request_size].tolist()
            for at in range(0, len(rows), self.request_size)
        ]
        lists = (self._rows.entries(indices) for indices in requests)
        batches = self._rows.client.batches(lists, prefetch=self.prefetch, **self._rows.options())
        for batch, indices in zip(batches, requests, strict=True):
            yield from self._rows.of_batch(batch, indices)
