"""Batches through shared memory that is reused again and again. Public names are in
:mod:`forebay.torch`.

What DataLoader itself does: a worker collates each batch into a shared memory segment made for it
and sends a descriptor, the training process maps the segment, and its pages, made and zeroed for
one batch, are given back. For plain bytes that costs more than fetching them.

Here the segments are made once, before the workers start. A worker receives a batch straight into a
free slot (or collates into it), and what travels to the training process is the slot's number;
there the batch becomes ordinary tensors over the same memory. When the last of them is gone, the
slot is free. The compiled half (``Ring``) holds the memory and each slot's owner.

Invariant: a tensor's memory belongs to one process at a time. A worker gives a slot away when the
batch is pickled, and only what ``receive`` handed out can be read afterwards.
"""

from __future__ import annotations

import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import context
from multiprocessing.reduction import DupFd
from typing import Any

import torch
import torch.utils.data
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map, default_convert

from ._forebay import Ring, Slot

#: Where tensors begin in a slot: at a line of the processor's cache.
ALIGN_BYTES = 64
SLOTS_MAX = 256
MAX_BYTES_DEFAULT = 1 << 30

_rings: weakref.WeakValueDictionary[str, BatchRing] = weakref.WeakValueDictionary()


class BatchRing:
    """Shared memory for the batches of DataLoader's workers.

    Args:
        slots: Batches that can be in it at once: in flight or in use. DataLoader keeps
            ``prefetch_factor`` in flight per worker, and a training loop holds one or two.
        max_bytes: The limit on its memory, for all slots together. A batch can be as large as
            ``max_bytes / slots``. Memory is allocated at its first use.

    With the stock DataLoader, for a dataset that receives straight into the ring::

        ring = forebay.torch.BatchRing(slots=8)
        data = forebay.torch.MapDataset(client, names, ring=ring)
        loader = torch.utils.data.DataLoader(
            data, batch_size=64, num_workers=2, collate_fn=ring.collate
        )

    ``ring.collate_with(function)`` takes the place of another ``collate_fn``, and works with any
    dataset: the tensors of what it returns (in lists, tuples and dicts) go through the ring. A
    batch that finds no free slot, or is too large, goes the same way as without a ring;
    :meth:`stats` counts these.

    The tensors that the loop gets may be written to and kept; each keeps its slot. The memory has
    no name in the file system, and is freed when the last process that has it ends, however it
    ends.
    """

    def __init__(self, slots: int, max_bytes: int = MAX_BYTES_DEFAULT) -> None:
        if slots < 1 or max_bytes < slots:
            raise ValueError("a ring has at least one slot of at least one byte")
        self._set(Ring(slots, max_bytes // slots), secrets.token_hex(8))

    def _set(self, core: Ring, key: str) -> None:
        self.core = core
        self.key = key
        self.direct = True
        self._warned = False
        _rings[key] = self

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _reopen, (self.key, DupFd(self.core.fileno()))

    @property
    def slot_bytes(self) -> int:
        """The largest batch that goes through the ring."""
        return self.core.slot_bytes

    def stats(self) -> dict[str, int]:
        """What happened in all processes: batches ``sent`` through the ring; those that went the
        ordinary way because there was ``none_free`` or they were ``too_large``; slots ``reclaimed``
        from workers that died; and slots that are ``free`` (those of processes that ended among
        them), ``filling``, ``on_the_way`` and ``held`` now.
        """
        return self.core.stats()

    @property
    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """The replacement for DataLoader's default ``collate_fn``."""
        return Collate(self, None)

    def collate_with(
        self, function: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """The replacement for this ``collate_fn``."""
        return Collate(self, function)

    def note_too_large(self) -> None:
        self.core.note_too_large()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch is larger than a slot of the ring ({self.slot_bytes} bytes) and"
                " goes through memory of its own: "
                "give the ring a larger max_bytes, or fewer slots",
                stacklevel=2,
            )

    def fill(
        self, client: Any, entries: list[Any], bucket: str | None, labels: list[Any] | None
    ) -> Filled | None:
        """Receives a batch into a slot. None if it must go the ordinary way: not in a worker, no
        slot is free, or the batch is too large for one.
        """
        if not self.direct or torch.utils.data.get_worker_info() is None:
            return None
        slot = self.core.take()
        if slot is None:
            return None
        sizes = client.batch_into(entries, slot, bucket=bucket)
        if sizes is None:
            # Others will be as large: receiving each of them twice would be worse than copying.
            self.direct = False
            return None
        return Filled(slot, sizes, labels)


def _reopen(key: str, descriptor: Any) -> BatchRing:
    fd = descriptor.detach()
    ring = _rings.get(key)
    if ring is not None:
        os.close(fd)
        return ring
    ring = BatchRing.__new__(BatchRing)
    ring._set(Ring.open(fd), key)
    return ring


class Filled(list[Any]):
    """The samples of a batch that is already in a slot: tensors that are views of it, or pairs of
    them and labels.
    """

    def __init__(self, slot: Slot, sizes: list[int], labels: list[Any] | None) -> None:
        self.slot, self.sizes, self.labels = slot, sizes, labels
        self.used = sum(sizes)
        flat = (
            torch.frombuffer(slot, dtype=torch.uint8, count=self.used)
            if self.used
            else torch.empty(0, dtype=torch.uint8)
        )
        equal = len(set(sizes)) == 1
        #: The batch as one tensor, if its samples have the same size.
        self.matrix = flat.view(len(sizes), sizes[0]) if equal else None
        rows = flat.split(sizes) if self.matrix is None else self.matrix.unbind(0)
        super().__init__(rows if labels is None else zip(rows, labels, strict=True))


class Collate:
    """A ``collate_fn`` that leaves its tensors in a slot."""

    def __init__(self, ring: BatchRing, function: Callable[[Sequence[Any]], Any] | None) -> None:
        self.ring, self.function = ring, function

    def __call__(self, samples: Sequence[Any]) -> Any:
        ordinary = self.function or torch.utils.data.default_collate
        filled = samples if isinstance(samples, Filled) else None
        if torch.utils.data.get_worker_info() is None:
            return ordinary(samples)
        slot = self.ring.core.take() if filled is None else filled.slot
        if slot is None:
            self.ring.core.note_none_free()
            return ordinary(samples)
        place = _Place(self.ring, slot, 0 if filled is None else filled.used)
        if self.function is not None:
            return place.all(self.function(samples))
        if filled is not None and filled.matrix is not None:
            if filled.labels is None:
                return place.all(filled.matrix)
            return place.all([filled.matrix, place.collate(filled.labels)])
        return place.all(place.collate(samples))


class _Place:
    """Puts the tensors of one batch into a slot, one after the other."""

    def __init__(self, ring: BatchRing, slot: Slot, used: int) -> None:
        self.ring, self.slot, self.used = ring, slot, used
        self.begin, self.room = slot.address, len(slot)
        self.outgoing = _Outgoing(ring.key, slot)
        self.full = False

    def _new(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor | None:
        """An empty tensor in the slot, if there is room for it."""
        count = 1
        for n in shape:
            count *= n
        at = -(-self.used // ALIGN_BYTES) * ALIGN_BYTES
        if at + count * dtype.itemsize > self.room:
            if not self.full:
                self.full = True
                self.ring.note_too_large()
            return None
        self.used = at + count * dtype.itemsize
        return _tensor(self.slot, at, dtype, tuple(shape))

    def collate(self, samples: Sequence[Any]) -> Any:
        """Like DataLoader's default, but tensors are stacked in their final place."""
        return collate_by_type(
            samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stack}
        )

    def _stack(
        self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None
    ) -> torch.Tensor:
        first = tensors[0]
        out = None
        if _plain(first) and all(
            _plain(t) and t.dtype == first.dtype and t.shape == first.shape for t in tensors
        ):
            out = self._new(first.dtype, (len(tensors), *first.shape))
        if out is None:
            return default_collate_fn_map[torch.Tensor](tensors, collate_fn_map=collate_fn_map)
        return torch.stack(tuple(tensors), 0, out=out)

    def all(self, value: Any) -> Any:
        """What is sent instead of ``value``: the same, but its tensors stay in the slot."""
        if isinstance(value, torch.Tensor):
            return self._one(value)
        kind = type(value)
        if kind in (list, tuple, Filled):
            return (tuple if kind is tuple else list)(self.all(v) for v in value)
        if kind is dict:
            return {k: self.all(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*(self.all(v) for v in value))
        return value

    def _one(self, tensor: torch.Tensor) -> Any:
        if not _plain(tensor):
            return tensor
        at = tensor.data_ptr() - self.begin
        if not (tensor.numel() and 0 <= at < self.room and tensor.is_contiguous()):
            there = self._new(tensor.dtype, tensor.shape)
            if there is None:
                return tensor
            there.copy_(tensor)
            at = there.data_ptr() - self.begin if tensor.numel() else 0
        return _InSlot(self.outgoing, at, tensor.dtype, tuple(tensor.shape))


def _plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (
            tensor.requires_grad
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
        )
    )


def _tensor(slot: Slot, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for n in shape:
        count *= n
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if at % dtype.itemsize:
        # A view into the middle of received bytes: the type needs another alignment.
        return (
            torch.frombuffer(slot, dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
            .clone()
            .view(dtype)
            .view(shape)
        )
    return (
        torch.frombuffer(slot, dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
        .view(dtype)
        .view(shape)
    )


class _Outgoing:
    """A slot of a batch, in a worker: pickling it gives it away."""

    def __init__(self, key: str, slot: Slot) -> None:
        self.key, self.slot = key, slot

    def __reduce__(self) -> Any:
        return _receive, (self.key, *self.slot.send())


class _InSlot:
    """A tensor of a batch, in a worker: in the training process it is a ``torch.Tensor``."""

    def __init__(
        self, outgoing: _Outgoing, at: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        self.parts = (outgoing, at, dtype, shape)

    def __reduce__(self) -> Any:
        return _tensor, self.parts


def _receive(key: str, index: int, number: int) -> Slot:
    ring = _rings.get(key)
    if ring is None:
        raise RuntimeError(
            "a batch came through a ring that is gone: keep the BatchRing as long as its DataLoader"
        )
    return ring.core.receive(index, number)


class DataLoader(torch.utils.data.DataLoader):
    """PyTorch's DataLoader with a :class:`BatchRing` of the right size behind it; takes the same
    arguments.

    Args:
        dataset: Any. A :class:`MapDataset` without ``decode`` and ``transform`` receives straight
            into the ring; of others the collated tensors go through it.
        ring_bytes: The ring's ``max_bytes``; 0 for no ring. Each worker gets ``prefetch_factor`` +
            2 slots.
        **options: As for ``torch.utils.data.DataLoader``.

    Attributes:
        ring: The :class:`BatchRing`, or None without workers.
    """

    ring: BatchRing | None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        ring_bytes: int = MAX_BYTES_DEFAULT,
        **options: Any,
    ) -> None:
        workers = options.get("num_workers", 0)
        ring = None
        if workers > 0 and ring_bytes > 0:
            prefetch = options.get("prefetch_factor") or 2
            ring = BatchRing(min(workers * (prefetch + 2), SLOTS_MAX), ring_bytes)
            # A dataset that makes its own batches has nothing to collate.
            batches = batch_size is not None or options.get("batch_sampler") is not None
            options["collate_fn"] = Collate(
                ring, options.get("collate_fn") or (None if batches else default_convert)
            )
            if hasattr(dataset, "with_ring"):
                dataset = dataset.with_ring(ring)
        super().__init__(dataset, batch_size, shuffle, **options)
        self.ring = ring
