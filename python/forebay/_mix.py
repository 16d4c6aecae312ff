"""Several datasets as one, by weight."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ._arguments import ROWS_MAX, check_rows, column_names, members, whole_number
from ._loadable import Loadable, S_co
from .dataset import Dataset, S
from .errors import InvalidRequest
from .schedule import Schedule
from .shuffle import Shuffle

if TYPE_CHECKING:
    import datasets

    from ._expr import Expression

__all__ = ["Mix", "MixTrainTest", "mix"]

T = TypeVar("T")


class MixTrainTest(NamedTuple):
    """The two parts of :meth:`Mix.train_test_split`."""

    train: Mix[Any]
    test: Mix[Any]


class Mix(Loadable[S_co]):
    """Datasets from which a loader takes rows by weight. Made by :func:`forebay.mix`.

    What is done to a mix is done to each of its datasets. Their weights stay; without weights, each
    has its share of the rows that are left. Rows of a mix have no numbers: an order decides which
    comes when.

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
        by_rows: bool = False,
        times: int = 1,
    ) -> None:
        self.datasets, self._by_rows, self._times = list(datasets), by_rows, times
        # As it was given.
        self._once = epoch_rows
        self.schedule = weights if isinstance(weights, Schedule) else None
        if isinstance(weights, Schedule):
            self.weights = weights.weights_at(0)
        else:
            total = math.fsum(weights)
            self.weights = [w / total for w in weights]
        self.epoch_rows = (epoch_rows or sum(len(d) for d in datasets)) * times

    def _sources(self) -> tuple[Sequence[Dataset[S_co]], Sequence[float] | Schedule, int | None]:
        rows = None if self._once is None and self._times == 1 else self.epoch_rows
        return self.datasets, self.schedule or self.weights, rows

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

    def _each(self, done: Callable[[Dataset[S_co]], Dataset[T]], what: str) -> Mix[T]:
        """A mix of what becomes of each dataset."""
        changed = [done(d) for d in self.datasets]
        for before, after in zip(self.datasets, changed, strict=True):
            if not len(after):
                raise InvalidRequest(
                    f"{what} leaves no rows of {before.name}",
                    hint="leave it out of the mix",
                )
        weights = None if self._by_rows else self.schedule or self.weights
        made = mix(changed, weights, epoch_rows=self._once)
        return made if self._times == 1 else made.repeat(self._times)

    def filter(
        self,
        where: Expression | Callable[[S_co], Any],
        *,
        name: str | None = None,
        columns: Sequence[str] | None = None,
        threads: int | None = None,
        progress: bool | None = None,
    ) -> Mix[S_co]:
        """The rows of each dataset for which something is true: :meth:`forebay.Dataset.filter`."""

        wanted = None if columns is None else column_names(columns)

        def done(of: Dataset[S_co]) -> Dataset[S_co]:
            return of.filter(where, name=name, columns=wanted, threads=threads, progress=progress)

        return self._each(done, "the filter")

    def map(self, function: Callable[[S_co], T]) -> Mix[T]:
        """Other samples of the same rows: :meth:`forebay.Dataset.map`."""
        return self._each(lambda of: of.map(function), "map")

    def rename(self, names: dict[str, str]) -> Mix[S_co]:
        """Other names of columns, in each dataset: :meth:`forebay.Dataset.rename`."""
        return self._each(lambda of: of.rename(names), "rename")

    def cast(self, schema: Any) -> Mix[S_co]:
        """Other types of columns, in each dataset: :meth:`forebay.Dataset.cast`."""
        return self._each(lambda of: of.cast(schema), "cast")

    def select_columns(self, columns: Sequence[str] | str) -> Mix[S_co]:
        """Fewer columns, of each dataset: :meth:`forebay.Dataset.select_columns`."""
        wanted = column_names(columns)
        return self._each(lambda of: of.select_columns(wanted), "select_columns")

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Mix[S_co]:
        """One part of each dataset: :meth:`forebay.Dataset.shard`."""
        shard = f"shard {index} of {num_shards}"
        return self._each(lambda of: of.shard(num_shards, index, contiguous), shard)

    def train_test_split(self, test_size: float, seed: int = 0) -> MixTrainTest:
        """Two mixes: of each dataset, this part is in the test part, and the rest in the other:
        :meth:`forebay.Dataset.train_test_split`.

        Args:
            test_size: A part between 0.0 and 1.0.
        """
        if isinstance(test_size, int) or not isinstance(test_size, float):
            raise InvalidRequest(
                f"test_size={test_size!r} of a mix", hint="give a part, which is taken of each"
            )

        def part(which: str) -> Mix[Any]:
            def done(of: Dataset[S_co]) -> Dataset[Any]:
                return getattr(of.train_test_split(test_size, seed), which)

            return self._each(done, "the split")

        return MixTrainTest(part("train"), part("test"))

    def repeat(self, times: int) -> Mix[S_co]:
        """The same mix in epochs that are ``times`` as long."""
        number = whole_number(times)
        if number is None or number < 1:
            raise InvalidRequest(f"repeat({times!r})", hint="give a whole number of at least 1")
        weights = self.schedule or self.weights
        return Mix(self.datasets, weights, self._once, self._by_rows, self._times * number)

    def select(self, rows_or_columns: Any) -> Mix[S_co]:
        """Fewer columns, of each dataset.

        Raises:
            InvalidRequest: For row numbers, which rows of a mix have not.
        """
        given = rows_or_columns
        names = [given] if isinstance(given, str) else given
        if isinstance(names, (list, tuple)) and names and all(isinstance(n, str) for n in names):
            return self.select_columns(list(names))
        self._no_numbers("select")

    def take(self, rows: Any) -> NoReturn:
        """Not of a mix: raises InvalidRequest, which says what to do instead."""
        self._no_numbers("take")

    def skip(self, n: int) -> NoReturn:
        """Not of a mix: raises InvalidRequest, which says what to do instead."""
        self._no_numbers("skip")

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "rows of a mix have no numbers: iterate over mix.loader(batch_size), or give"
            " DataLoader(mix.loader(batch_size).torch(), batch_size=None)"
        )

    def _no_numbers(self, what: str) -> NoReturn:
        raise InvalidRequest(
            f"{what}: rows of a mix have no numbers",
            hint="choose rows of its datasets before they are mixed; forebay.mix(…, epoch_rows=n)"
            " makes epochs of n rows, and a state of a loader is a place in the order",
        )

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
    datasets = members(datasets, Dataset)
    wrong = [d for d in datasets if not isinstance(d, Dataset)]
    if wrong or not datasets:
        instead = f", not {type(wrong[0]).__name__}" if wrong else ""
        raise InvalidRequest(
            f"a mix needs datasets{instead}", hint="forebay.mix([a, b], [0.7, 0.3])"
        )
    if epoch_rows is not None:
        number = whole_number(epoch_rows)
        if number is None or number < 1:
            raise InvalidRequest(
                f"epoch_rows is {epoch_rows!r}", hint="give a whole number above 0"
            )
        if number > ROWS_MAX:
            raise InvalidRequest(f"epoch_rows is {number:,}", hint=f"give at most {ROWS_MAX:,}")
        epoch_rows = number
    if isinstance(weights, Schedule):
        if len(weights.table[0][1]) != len(datasets):
            raise InvalidRequest(
                f"there are {len(datasets)} datasets, and the schedule has"
                f" {len(weights.table[0][1])} weights",
                hint="give one weight for each dataset",
            )
        return Mix(datasets, weights, epoch_rows)
    given = [float(len(d)) for d in datasets] if weights is None else _numbers(weights)
    if len(given) != len(datasets):
        raise InvalidRequest(
            f"there are {len(datasets)} datasets and {len(given)} weights",
            hint="give one weight for each dataset",
        )
    if weights is None:
        check_rows(datasets)
    for dataset, weight in zip(datasets, given, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidRequest(
                f"the weight of {dataset.name} is {weight}",
                hint="give a number above 0; to take no rows of a dataset, leave it out",
            )
    return Mix(datasets, given, epoch_rows, by_rows=weights is None)


def _numbers(weights: Any) -> list[float]:
    """Weights that do not change."""
    try:
        if isinstance(weights, (str, dict)):
            raise TypeError
        return [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise TypeError(
            "weights must be a list with a number for each dataset, or a forebay.Schedule, not"
            f" {weights!r}"
        ) from None
