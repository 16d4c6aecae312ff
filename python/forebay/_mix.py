"""Several datasets as one, by weight."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._loadable import Loadable, S_co
from .dataset import Dataset, S
from .errors import InvalidRequest
from .schedule import Schedule
from .shuffle import Shuffle

if TYPE_CHECKING:
    import datasets

__all__ = ["Mix", "mix"]


class Mix(Loadable[S_co]):
    """Datasets from which a loader takes rows by weight. Made by :func:`forebay.mix`.

    Attributes:
        datasets: The datasets, and
        weights: the share of each, adding up to 1; of a schedule, those at its beginning.
        schedule: The :class:`Schedule` of the weights, or None.
        epoch_rows: Rows of an epoch.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[S_co]],
        weights: Sequence[float] | Schedule,
        epoch_rows: int | None,
    ) -> None:
        self.datasets, self._epoch_rows = list(datasets), epoch_rows
        self.schedule = weights if isinstance(weights, Schedule) else None
        if isinstance(weights, Schedule):
            self.weights = weights.weights_at(0)
        else:
            total = math.fsum(weights)
            self.weights = [w / total for w in weights]
        self.epoch_rows = epoch_rows or sum(len(d) for d in datasets)

    def _sources(self) -> tuple[Sequence[Dataset[S_co]], Sequence[float] | Schedule, int | None]:
        return self.datasets, self.schedule or self.weights, self._epoch_rows

    def to_hf_iterable(
        self, *, num_shards: int | None = None, shuffle: Shuffle = None, seed: int = 0
    ) -> datasets.IterableDataset:
        """The rows of an epoch as an ``IterableDataset`` of Hugging Face's ``datasets``, which
        reads them as it is iterated over, in the order of :meth:`loader` with this ``shuffle`` and
        ``seed``. Nothing is copied.

        ``set_epoch()`` goes to that epoch of the mix: each dataset goes on where the epoch before
        stopped, and a schedule of weights too. Shards, states, nodes and workers are as for
        :meth:`forebay.Dataset.to_hf_iterable`, and shards always come in the order of the mix. So
        its shares are those of every stretch of rows, at every node and worker.

        ``datasets`` tells epochs by nothing but a seed: its ``.shuffle(seed=5)`` begins with the
        rows of epoch 5. Give ``shuffle`` here instead.

        The datasets must have the same columns, of the same types (``rename``, ``cast`` and
        ``select_columns`` make them so). With ``decode`` or ``map``, an example is the sample, a
        dict, and need not be alike.

        Args:
            num_shards: As for :meth:`forebay.Dataset.to_hf_iterable`.
            shuffle, seed: The order, as for :meth:`loader`.

        Raises:
            ImportError: ``datasets`` is not installed.
            InvalidRequest: More shards than rows; columns that differ; or one has a type that
                ``datasets`` does not have.
        """
        from ._hf import Source, iterable

        source = Source(*self._sources(), shuffle=shuffle, seed=seed)
        return iterable(source, num_shards)

    def to_hf(
        self,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        epoch: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> datasets.Dataset:
        """The rows of one epoch as a ``Dataset`` of Hugging Face's ``datasets``: **a copy** on the
        local disk, in the order of :meth:`loader`. A row that is several times in the epoch is
        there as many times. See :meth:`forebay.Dataset.to_hf`.

        Args:
            shuffle, seed: The order, as for :meth:`loader`.
            epoch: Which one. Another epoch is another copy.
            cache_dir, progress: As for :meth:`forebay.Dataset.to_hf`.

        Raises:
            ImportError: ``datasets`` is not installed.
            InvalidRequest: There is not room enough; columns differ, or one has a type that
                ``datasets`` does not have; or a dataset has a ``decode`` or ``map``.
            OSError: The disk became full meanwhile.
        """
        from ._hf import Source, copied

        source = Source(*self._sources(), shuffle=shuffle, seed=seed, epoch=epoch)
        return copied(source, cache_dir, progress)

    def __len__(self) -> int:
        return self.epoch_rows

    def __repr__(self) -> str:
        parts = " + ".join(
            f"{w:.1%} {d.name}" for d, w in zip(self.datasets, self.weights, strict=True)
        )
        changing = " at first" if self.schedule else ""
        return f"<forebay.Mix of {parts}{changing}; {self.epoch_rows:,} rows in an epoch>"


def mix(
    datasets: Sequence[Dataset[S]],
    weights: Sequence[float] | Schedule | None = None,
    *,
    epoch_rows: int | None = None,
) -> Mix[S]:
    """Several datasets as one: :meth:`Mix.loader` takes rows from each by its weight, each dataset
    in its own order.

    Every stretch of some hundred rows has exactly these shares (weights are rounded to
    thousandths). A dataset that ends while others continue starts again, in another order. An epoch
    is a number of rows, not the end of all datasets: the next epoch continues where this one
    stopped.

    Args:
        datasets: If batches are made from columns, all datasets must have the columns that are
            read; with a ``decode`` for each they need not.
        weights: A number above 0 for each; only their ratios count. Default: by rows. A
            :class:`Schedule` has weights that change along training.
        epoch_rows: Rows of an epoch, all ranks together. Default: the rows of all datasets.

    Raises:
        InvalidRequest: No datasets, a weight that is not positive, or not one weight for
            each.
    """
    datasets = list(datasets)
    if not datasets or not all(isinstance(d, Dataset) for d in datasets):
        raise InvalidRequest("a mix needs datasets", hint="forebay.mix([a, b], [0.7, 0.3])")
    if epoch_rows is not None and (
        isinstance(epoch_rows, bool) or not isinstance(epoch_rows, int) or epoch_rows < 1
    ):
        raise InvalidRequest(f"epoch_rows is {epoch_rows!r}", hint="give a whole number above 0")
    if isinstance(weights, Schedule):
        if len(weights.table[0][1]) != len(datasets):
            raise InvalidRequest(
                f"there are {len(datasets)} datasets, and the schedule has"
                f" {len(weights.table[0][1])} weights",
                hint="give one weight for each dataset",
            )
        return Mix(datasets, weights, epoch_rows)
    given = [float(len(d)) for d in datasets] if weights is None else [float(w) for w in weights]
    if len(given) != len(datasets):
        raise InvalidRequest(
            f"there are {len(datasets)} datasets and {len(given)} weights",
            hint="give one weight for each dataset",
        )
    for dataset, weight in zip(datasets, given, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidRequest(
                f"the weight of {dataset.name} is {weight}",
                hint="give a number above 0; to take no rows of a dataset, leave it out",
            )
    return Mix(datasets, given, epoch_rows)
