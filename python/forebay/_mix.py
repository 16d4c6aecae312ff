"""Several datasets as one, by weight."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from ._arguments import ROWS_MAX, check_rows, column_names, real_number, whole_number
from ._elsewhere import MIX, explained
from ._loadable import Loadable, S_co
from ._words import counted
from .dataset import ELSEWHERE, Dataset, S, datasets_of, no_attribute
from .errors import Error, InvalidRequest
from .rows import Rows
from .schedule import Schedule
from .shuffle import Shuffle

if TYPE_CHECKING:
    import datasets

    from ._compose import TrainTest
    from ._expr import Expression
    from ._look import Summary

__all__ = ["Mix", "mix"]

T = TypeVar("T")


class Mix(Loadable[S_co]):
    """Datasets from which a loader takes rows by weight. Made by :func:`forebay.mix`.

    What chooses rows by what is in them, and what concerns columns and samples, is done to each of
    its datasets, and makes another mix: :meth:`filter`, :meth:`shard`, :meth:`train_test_split`,
    :meth:`rename`, :meth:`cast`, :meth:`map`. Their weights stay; without weights, each has its
    share of the rows that are left.

    What goes by row numbers is done to the rows of the first epoch, in the order that
    ``mix.loader(batch_size)`` without a shuffle or a ``seed`` has, which are a dataset of their own
    (:meth:`interleaved`): ``mix[5]``, ``mix[100:]``, :meth:`select`, :meth:`take`, :meth:`skip`,
    :meth:`by_key`, :meth:`describe`.

    Attributes:
        datasets: The datasets.
        schedule: The :class:`Schedule` of the weights, or None.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[S_co]],
        weights: Sequence[float] | Schedule | None,
        epoch_rows: int | None,
        times: int = 1,
    ) -> None:
        self.datasets, self._times = list(datasets), times
        # As it was given.
        self._once = epoch_rows
        self.schedule = weights if isinstance(weights, Schedule) else None
        self._given = weights
        self._numbered: Dataset[S_co] | None = None

    @property
    def weights(self) -> list[float]:
        """The share of each dataset, adding up to 1; of a schedule, those at its beginning."""
        if isinstance(self._given, Schedule):
            return self._given.weights_at(0)
        if self._given is None:
            check_rows(self.datasets)
        given = [float(len(d)) for d in self.datasets] if self._given is None else self._given
        total = math.fsum(given)
        return [weight / total for weight in given]

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch."""
        return (self._once or sum(len(d) for d in self.datasets)) * self._times

    def _bounded_rows(self) -> int:
        """Rows of an epoch, which are not too many for a plan."""
        rows = self.epoch_rows
        if rows > ROWS_MAX:
            raise InvalidRequest(
                f"repeat({self._times}) of {rows // self._times:,} rows makes more than"
                f" {ROWS_MAX:,}",
                hint="a loader with epochs=math.inf goes on for ever",
            )
        return rows

    def _sources(self) -> tuple[Sequence[Dataset[S_co]], Sequence[float] | Schedule, int | None]:
        rows = None if self._once is None and self._times == 1 else self._bounded_rows()
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

        ``.shuffle()`` of ``datasets`` shuffles rows that are near each other, and changes nothing
        about epochs. A better order is that of ``shuffle`` here.

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
            if not (after.is_pending or len(after)):
                check_rows([before])
                raise InvalidRequest(
                    f"{what} leaves no rows of {before.name}",
                    hint="leave it out of the mix",
                )
        return Mix(changed, self._given, self._once, self._times)

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

    def train_test_split(self, test_size: float, seed: int = 0) -> TrainTest[Mix[Any]]:
        """Two mixes: of each dataset, this part is in the test part, and the rest in the other:
        :meth:`forebay.Dataset.train_test_split`.

        Args:
            test_size: A part between 0.0 and 1.0.
        """
        from ._compose import TrainTest

        if not isinstance(real_number(test_size), float):
            raise InvalidRequest(
                f"test_size={test_size!r} of a mix", hint="give a part, which is taken of each"
            )

        def part(which: str) -> Mix[Any]:
            def done(of: Dataset[S_co]) -> Dataset[Any]:
                return getattr(of.train_test_split(test_size, seed), which)

            return self._each(done, "the split")

        return TrainTest(part("train"), part("test"))

    def repeat(self, times: int) -> Mix[S_co]:
        """The same mix in epochs that are ``times`` as long."""
        from ._compose import TIMES

        number = whole_number(times)
        if number is None or number < 1:
            raise InvalidRequest(f"repeat({times!r})", hint=TIMES)
        made = Mix(self.datasets, self._given, self._once, self._times * number)
        if self._once is not None or not self._is_pending():
            made._bounded_rows()
        elif made._times > ROWS_MAX:
            raise InvalidRequest(f"repeat({times!r})", hint=f"give at most {ROWS_MAX:,}")
        return made

    def _is_pending(self) -> bool:
        return any(d.is_pending for d in self.datasets)

    # By row numbers

    def interleaved(self) -> Dataset[S_co]:
        """The rows of the first epoch as a dataset: row ``k`` is what ``mix.loader(…)`` without a
        shuffle takes as its ``k``-th, where its ``seed`` is 0. (Another seed takes the datasets in
        another turn.) It reads nothing, and takes no memory for row numbers.

        A loader over it has each of these rows once an epoch: a dataset that ends is repeated, or
        its rest is left out, in every epoch in the same way. A loader over the mix goes on in the
        next epoch where this one stopped.

        Raises:
            InvalidRequest: The datasets have other columns, or make their samples in another way
                (``rename``, ``cast`` and ``select_columns`` make them alike).
        """
        if self._numbered is None:
            from ._compose import interleaved

            stages = self.schedule.stages if self.schedule else [(0, self.weights)]
            first = self.schedule.table[0][1] if self.schedule else self.weights
            self._numbered = interleaved(self.datasets, stages, self._bounded_rows(), first)
        return self._numbered

    @overload
    def select(self, rows_or_columns: str | list[str] | tuple[str, ...]) -> Mix[S_co]: ...
    @overload
    def select(self, rows_or_columns: Any) -> Dataset[S_co]: ...
    def select(self, rows_or_columns: Any) -> Any:
        """Some rows of :meth:`interleaved`; or, for a name or a list of names, a mix with fewer
        columns of each dataset: :meth:`forebay.Dataset.select`.
        """
        given = rows_or_columns
        are_rows = isinstance(given, (bytes, dict, np.ndarray, range))
        if isinstance(given, Iterable) and not isinstance(given, str) and not are_rows:
            given = list(given)
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list) and names and all(isinstance(n, str) for n in names):
            return self.select_columns(names)
        return self.interleaved().select(given)

    @overload
    def take(self, rows: int) -> Dataset[S_co]: ...
    @overload
    def take(self, rows: Any, columns: Sequence[str] | None = None) -> Rows: ...
    def take(self, rows: Any, columns: Sequence[str] | None = None) -> Any:
        """Rows of :meth:`interleaved`, or the first ``n``: :meth:`forebay.Dataset.take`."""
        return self.interleaved().take(rows, columns)

    def skip(self, n: int) -> Dataset[S_co]:
        """The rows of :meth:`interleaved` after the first ``n``: :meth:`forebay.Dataset.skip`."""
        return self.interleaved().skip(n)

    def by_key(
        self,
        keys: Sequence[Any],
        *,
        column: str | None = None,
        columns: Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> Rows:
        """Rows of :meth:`interleaved` by their keys; of a row that is there several times, the
        first: :meth:`forebay.Dataset.by_key`.
        """
        return self.interleaved().by_key(keys, column=column, columns=columns, progress=progress)

    def describe(self, rows: int | None = None) -> Summary:
        """What is in the columns of :meth:`interleaved`: :meth:`forebay.Dataset.describe`."""
        return self.interleaved().describe(rows)

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> S_co: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset[S_co]: ...
    @overload
    def __getitem__(self, index: Sequence[int] | np.ndarray) -> Rows: ...
    def __getitem__(self, index: Any) -> Any:
        return self.interleaved()[index]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property has failed with an AttributeError: again, for that error.
                return object.__getattribute__(self, name)
            # What other libraries call `column_names` is `columns` of a dataset, which a mix lacks.
            here = ELSEWHERE.get(name, name)
            if not name.startswith("_") and hasattr(Dataset, here):
                said = f"interleaved().{here} is that of its rows as a dataset"
                raise AttributeError(f"a mix has no {name!r}: {said}", name=name, obj=self)
            raise no_attribute(self, "a mix", name)

    def __getitems__(self, rows: Sequence[int]) -> list[S_co]:
        """Samples of :meth:`interleaved`, in one request: what PyTorch's DataLoader asks for."""
        return self.interleaved().__getitems__(rows)

    def __iter__(self) -> Iterator[S_co]:
        return iter(self.interleaved())

    def _repr_html_(self) -> str:
        from ._look import preview

        try:
            return preview(self.interleaved())
        except Error:
            # Without numbers of rows, as over unlike columns.
            return html.escape(repr(self))

    def __repr__(self) -> str:
        # Computes no filter, and raises nothing.
        unknown = self._is_pending()
        weights: Sequence[float] = []
        if isinstance(self._given, Schedule):
            weights = self._given.table[0][1]
        elif self._given is not None:
            weights = self._given
        elif not unknown:
            weights = [len(d) for d in self.datasets]
        names = [d.name for d in self.datasets]
        if total := math.fsum(weights):
            names = [f"{w / total:.1%} {name}" for w, name in zip(weights, names, strict=True)]
        changing = " at first" if self.schedule else ""
        rows = "rows of an epoch are not computed yet"
        if self._once is not None or not unknown:
            rows = f"{counted(self.epoch_rows, 'row')} in an epoch"
        return f"<forebay.Mix of {' + '.join(names)}{changing}; {rows}>"


@explained(MIX)
def mix(
    datasets: Sequence[Dataset[S]],
    weights: Sequence[float] | Schedule | None = None,
    *,
    epoch_rows: int | None = None,
) -> Mix[S]:
    """Several datasets as one: :meth:`Mix.loader` takes rows from each by its weight, each dataset
    in its own order.

    Shares are exact over every cycle of at most 4,096 rows (weights are rounded to a thousandth of
    themselves, where that is possible), within which places are random. A dataset that ends while
    others continue starts again, in another order. An epoch is a number of rows, not the end of all
    datasets: the next epoch continues where this one stopped.

    Args:
        datasets: If batches are made from columns, all datasets must have the columns that are
            read; with a ``decode`` for each they need not.
        weights: A number above 0 for each; only their ratios count. Default: by rows. A
            :class:`Schedule` has weights that change along training.
        epoch_rows: Rows of an epoch, all ranks together. Default: the rows of all datasets.

    Raises:
        InvalidRequest: No datasets, one without rows, a weight that is not positive, or not one
            weight for each.
    """
    datasets = datasets_of(datasets, "a mix needs datasets", "forebay.mix([a, b], [0.7, 0.3])")
    # Those that a filter leaves are not computed for it.
    check_rows(d for d in datasets if not d.is_pending)
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
                f"there are {counted(len(datasets), 'dataset')}, and the schedule has"
                f" {counted(len(weights.table[0][1]), 'weight')}",
                hint="give one weight for each dataset",
            )
        return Mix(datasets, weights, epoch_rows)
    if weights is None:
        return Mix(datasets, None, epoch_rows)
    given = _numbers(weights)
    if len(given) != len(datasets):
        raise InvalidRequest(
            f"there are {counted(len(datasets), 'dataset')} and {counted(len(given), 'weight')}",
            hint="give one weight for each dataset",
        )
    for dataset, weight in zip(datasets, given, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidRequest(
                f"the weight of {dataset.name} is {weight}",
                hint="give a number above 0; to take no rows of a dataset, leave it out",
            )
    return Mix(datasets, given, epoch_rows)


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
