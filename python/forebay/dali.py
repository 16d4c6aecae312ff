"""Batches for pipelines of NVIDIA DALI, through ``fn.external_source``.

In the pipeline's process, with everything that a loader can do (streams, decoding threads,
resume)::

    loader = ds.loader(batch_size=64, shuffle=forebay.Block(16))
    source = forebay.dali.Source(loader, ["jpg", "label"])

    @pipeline_def(batch_size=64, num_threads=4, device_id=0)
    def train():
        jpegs, labels = fn.external_source(source=source, num_outputs=2)
        return fn.decoders.image(jpegs, device="mixed"), labels

Or in DALI's own worker processes (``fn.external_source(source=forebay.dali.ByNumber(…),
parallel=True, batch=True, batch_info=True, num_outputs=2)``): any worker can make any batch by its
number, because a plan is a function.

A column of bytes becomes a list of one-dimensional ``uint8`` arrays, without a copy; a column of
numbers becomes one array for the batch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from ._needs import needs

with needs("forebay.dali"):
    import numpy as np

from ._lease import Lease
from ._plan import State
from .errors import InvalidRequest
from .loader import Loader
from .rows import Rows
from .stats import Meter

__all__ = ["ByNumber", "Source"]


def __dir__() -> list[str]:
    return sorted(__all__)


#: How many states are kept: more than a pipeline reads ahead.
STATES_KEPT = 256


def batch_of(batch: Any, columns: Sequence[str]) -> tuple[Any, ...]:
    """The columns of a batch (rows, or a dict of arrays) as DALI takes them.

    Raises:
        TypeError: DALI has no tensor for a column's type, or the column has missing values.
    """
    arrays = batch.numpy() if isinstance(batch, Rows) else batch
    return tuple(_column(name, arrays[name]) for name in columns)


def _column(name: str, values: Any) -> Any:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"column {name!r} has missing values, which a tensor cannot hold: leave it out,"
            " or give the loader a decode="
        )
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    out = []
    for value in values:
        if isinstance(value, str):
            value = value.encode()
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = np.frombuffer(value, np.uint8)
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"column {name!r} has lists with missing items, which a tensor cannot hold:"
                " leave it out, or give the loader a decode="
            )
        if not isinstance(value, np.ndarray) or value.dtype == object:
            raise TypeError(
                f"column {name!r} has a value of {type(value).__name__}, and DALI takes"
                " arrays: leave it out, or give the loader a decode="
            )
        out.append(value)
    return out


def _check(loader: Loader[Any], columns: Sequence[str]) -> None:
    if isinstance(columns, str) or not columns:
        raise InvalidRequest(
            "columns must be a list of names, one for each output of the external source",
            hint='["jpg", "cls"]',
        )
    if loader.options.output not in ("rows", "numpy"):
        raise InvalidRequest(
            f'output="{loader.options.output}" does not work with DALI',
            hint='leave it out, or output="numpy" with a decode=',
        )


class Source:
    """An iterable for ``fn.external_source(source=…, num_outputs=len(columns))``: one epoch, or as
    the loader's ``epochs=`` says.

    Args:
        loader: With ``output="numpy"`` where it has a ``decode`` (of which the samples are dicts).
        columns: What the outputs are, in order.

    A pipeline reads ahead of what it has given out, so the loader's own state is ahead of the
    training. :meth:`state_dict` takes the number of batches that the *pipeline* has given.
    """

    def __init__(self, loader: Loader[Any], columns: Sequence[str]) -> None:
        _check(loader, columns)
        self.loader, self.columns = loader, list(columns)
        self._states: deque[State] = deque([loader.state_dict()], STATES_KEPT)
        self._given = 0

    def __iter__(self) -> Source:
        self._iteration = iter(self.loader)
        return self

    def __next__(self) -> tuple[Any, ...]:
        batch = batch_of(next(self._iteration), self.columns)
        self._given += 1
        self._states.append(self.loader.state_dict())
        return batch

    def state_dict(self, batches: int) -> State:
        """The state after this many batches were given out by the pipeline, counted from when the
        source was made.

        Raises:
            InvalidRequest: It has not made that many yet, or it was too long ago.
        """
        back = self._given - batches
        if not 0 <= back < len(self._states):
            raise InvalidRequest(
                f"the state after {batches} batches is not kept: {self._given} were made",
                hint=f"states are kept for the last {STATES_KEPT}",
            )
        return self._states[-1 - back]


class ByNumber:
    """A callable for ``fn.external_source(source=…, parallel=True, batch=True, batch_info=True,
    num_outputs=len(columns))``, which DALI calls in its own processes.

    It makes the batch with any number in any epoch, with ``decode`` and ``transform``, in that
    process. DALI's epoch ``e`` is the loader's current epoch plus ``e``.

    Where a pack begins depends on all rows before it. For each batch of packs it therefore goes
    through the epoch from the beginning, and reads it, too, unless ``Pack(lengths=)`` is given.
    :class:`Source` goes through an epoch once.
    """

    def __init__(self, loader: Loader[Any], columns: Sequence[str]) -> None:
        _check(loader, columns)
        if loader.options.stream:
            raise InvalidRequest(
                "batches of a stream cannot be made by number",
                hint="use Source, or give stream=False",
            )
        self.loader, self.columns = loader, list(columns)
        self._begin = loader.checked(loader.state_dict())
        self._lease: Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lease": None}

    def __call__(self, info: Any) -> tuple[Any, ...]:
        order, loader = self.loader.order, self.loader
        epoch = self._begin["epoch"] + info.epoch_idx
        start = self._begin if info.epoch_idx == 0 else order.at(epoch, 0)
        pipeline = loader.pipeline(
            start, epoch + 1, Meter(), first=info.iteration, stride=1 << 40, threads=0, follow=False
        )
        if info.iteration == 0:
            # Whichever process makes the first batch of an epoch tells the node, until it ends.
            if self._lease is None:
                self._lease = loader.lease(start)
                if self._lease is not None:
                    weakref.finalize(self, self._lease.release)
            if self._lease is not None:
                self._lease.tell(start)
        try:
            made = pipeline.at(0)
        finally:
            pipeline.close()
        if made is None:
            raise StopIteration
        return batch_of(made.batch, self.columns)
