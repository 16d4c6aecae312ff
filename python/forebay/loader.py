"""Batches of a dataset, in the order of a plan: shuffled, dealt to ranks, decoded, and resumed
exactly where a job stopped.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

import numpy as np

from . import _collate, _packed, _place, energy
from ._arguments import (
    BATCH_ROWS_MAX,
    CONNECTIONS_MAX,
    EPOCHS_MAX,
    LOOKAHEAD_ROWS_MAX,
    U64_MAX,
    check_function,
    column_names,
    flag,
    flag_or_none,
    job_name,
    seconds,
    whole_number,
)
from ._decode import NOTHING, Decode, OnError, Recipe
from ._fetch import Fetcher, Pull
from ._forebay import Client
from ._lease import Lease
from ._lightning import Ahead
from ._pipeline import Pipeline
from ._plan import Order, State, Step, Steps
from ._pools import Pool
from ._progress import Bar
from ._stop import interrupts
from ._words import counted
from .errors import Error, InvalidRequest
from .pack import Pack
from .schedule import Schedule
from .shuffle import Shuffle, to_wire
from .stats import Meter, Stats

if TYPE_CHECKING:
    from ._torch_loader import LoaderDataset
    from .dataset import Dataset
    from .report import Report

__all__ = ["Loader"]

#: Batches bounded by length: the most rows in one, by default.
BOUNDED_ROWS = 1024
#: Batches that the look-ahead is for, and the rows that they are taken to have where nobody knows.
LOOKAHEAD_BATCHES = 100
LOOKAHEAD_BATCH_ROWS = 64
#: How many samples one loop may skip, by default.
MAX_SKIPPED = 100
#: Whole numbers among the arguments, and the least and the most that each may be.
NUMBERS = {
    "batch_size": (1, U64_MAX),
    "max_total": (1, U64_MAX),
    "lookahead": (1, LOOKAHEAD_ROWS_MAX),
    "threads": (0, U64_MAX),
    "prefetch": (0, U64_MAX),
    "connections": (1, CONNECTIONS_MAX),
    "window_bytes": (1, U64_MAX),
    "max_skipped": (0, U64_MAX),
}

#: True or False among the arguments.
FLAGS = ("padded", "pin_memory", "stream", "follow")

#: What batches are made with: the module, and what it is called.
FRAMEWORKS = {
    "torch": ("torch", "PyTorch"),
    "jax": ("jax", "JAX"),
    "arrow": ("pyarrow", "PyArrow"),
}

#: For accelerate, which would make another DataLoader of a loader's dataset to skip batches.
NO_DATASET = (
    "a loader has no dataset, of which batches could be skipped: load_state_dict() goes on where a"
    " training stopped. For transformers.Trainer give ignore_data_skip=True, and save and load the"
    " state of a forebay.torch.Resumable"
)

Uneven = Literal["drop", "pad", "repeat"]
#: What to do with a row that is longer than a whole batch may be.
TooLong = Literal["error", "alone", "skip"]
log = logging.getLogger("forebay")

#: What a batch is.
B_co = TypeVar("B_co", covariant=True)


@dataclass(frozen=True)
class Options:
    """The arguments of a loader. They have the same names as those of
    :meth:`forebay.Dataset.loader`, and are explained there.
    """

    batch_size: int | None = None
    max_total: int | None = None
    length: str | Sequence[Any] | np.ndarray | None = None
    lookahead: int | None = None
    padded: bool = False
    too_long: TooLong = "error"
    pack: Pack | None = None
    shuffle: Shuffle = None
    seed: int = 0
    epochs: int | float | None = None
    rank: int | None = None
    world_size: int | None = None
    uneven: Uneven = "drop"
    columns: Sequence[str] | None = None
    decode: Decode | None = None
    transform: Callable[[Any], Any] | None = None
    collate: Callable[[Any], Any] | None = None
    on_error: OnError = "raise"
    max_skipped: int | None = None
    output: _collate.Output = "rows"
    pin_memory: bool = False
    threads: int | None = None
    prefetch: int = 4
    stream: bool = False
    connections: int | None = None
    window_bytes: int | None = None
    nodes: Sequence[Any] | None = None
    follow: bool = True
    retry_for: float | None = None
    progress: bool | None = False
    job: str | None = None

    def checked(self) -> Options:
        """The same, with plain numbers and lists; raises ValueError or TypeError for invalid
        arguments.
        """
        plain: dict[str, Any] = {
            name: self._whole(name, *bounds) for name, bounds in NUMBERS.items()
        }
        plain |= {name: flag(name, getattr(self, name)) for name in FLAGS}
        made = replace(
            self,
            **plain,
            progress=flag_or_none("progress", self.progress),
            seed=self._seed(),
            epochs=self._epochs(),
            retry_for=self._retry_for(),
            columns=None if self.columns is None else column_names(self.columns),
        )
        made._check()
        return made

    def _whole(self, name: str, least: int, most: int) -> int | None:
        value = getattr(self, name)
        number = whole_number(value)
        if value is not None and (number is None or number < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if number is not None and number > most:
            raise ValueError(f"{name} must be at most {most:,}, not {value!r}")
        return number

    def _seed(self) -> int:
        seed = whole_number(self.seed)
        if seed is None or not 0 <= seed <= U64_MAX:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, not {self.seed!r}")
        return seed

    def _epochs(self) -> int | float | None:
        if self.epochs is None or (isinstance(self.epochs, float) and self.epochs == math.inf):
            return self.epochs
        number = whole_number(self.epochs)
        if number is None or number < 1:
            raise ValueError(
                "epochs must be a number of epochs, math.inf, or None for one at a time,"
                f" not {self.epochs!r}"
            )
        if number > EPOCHS_MAX:
            raise ValueError(
                f"epochs must be at most {EPOCHS_MAX:,}, or math.inf, not {self.epochs!r}"
            )
        return number

    def _retry_for(self) -> float | None:
        found = seconds(self.retry_for)
        if found is None and self.retry_for is not None:
            raise ValueError(
                f"retry_for must be a number of seconds of at least 0, not {self.retry_for!r}"
            )
        return found

    def _check(self) -> None:
        for name in ("decode", "transform", "collate"):
            check_function(name, getattr(self, name))
        if self.pack is not None:
            self._check_pack(self.pack)
        elif self.batch_size is not None and self.batch_size > BATCH_ROWS_MAX:
            raise ValueError(f"batch_size must be at most {BATCH_ROWS_MAX:,} rows")
        if self.batch_size is None and self.max_total is None:
            raise ValueError(
                "give the size of a batch: batch_size= in rows, or max_total= with length="
                " (a column of numbers)"
            )
        if isinstance(self.length, (int, float, bytes)):
            raise TypeError(
                "length must be the name of a column, or an array with the length of each row, not"
                f" {self.length!r}"
            )
        if (self.max_total is None) != (self.length is None):
            raise ValueError(
                "max_total= bounds the sum of length=, a column or an array: give both, or neither"
            )
        if self.too_long not in ("error", "alone", "skip"):
            raise ValueError(f'too_long must be "error", "alone" or "skip", not {self.too_long!r}')
        if self.too_long != "error" and self.max_total is None:
            raise ValueError("too_long= applies to rows that exceed max_total=: give both")
        for name in ("lookahead", "padded"):
            if getattr(self, name) and self.max_total is None:
                raise ValueError(f"{name}= applies to batches bounded by max_total=: give both")
        if self.uneven not in ("drop", "pad", "repeat"):
            raise ValueError(f'uneven must be "drop", "pad" or "repeat", not {self.uneven!r}')
        if self.output not in _collate.OUTPUTS:
            raise ValueError(
                f"output must be one of {', '.join(_collate.OUTPUTS)}, not {self.output!r}"
            )
        if self.on_error not in ("raise", "skip") and not callable(self.on_error):
            raise ValueError('on_error must be "raise", "skip" or a function of a SampleFailed')
        if self.max_skipped is not None and self.on_error != "skip":
            raise ValueError('max_skipped= applies to on_error="skip": give both')
        if self.pin_memory and self.output != "torch" and self.collate is None:
            raise ValueError('pin_memory= applies to tensors: give output="torch"')
        if not self.stream and (self.connections or self.window_bytes or self.nodes):
            raise ValueError(
                "connections=, window_bytes= and nodes= apply to streams: give stream=True"
            )
        job_name(self.job)
        to_wire(self.shuffle)

    def _check_pack(self, pack: Any) -> None:
        if not isinstance(pack, Pack):
            raise TypeError(f"pack must be a forebay.Pack, not {type(pack).__name__}")
        if self.max_total is not None or self.length is not None:
            raise ValueError("pack= and max_total= both decide what a batch is: leave one out")
        if self.batch_size is None:
            raise ValueError("give batch_size=, the number of packs in a batch")
        if self.batch_size * pack.length >= 1 << 31:
            raise ValueError(
                f"a batch of {self.batch_size} packs of {pack.length} tokens has more than"
                " 2**31 - 1"
            )
        if self.uneven == "repeat":
            raise ValueError(
                'uneven="repeat" does not apply to packs: "drop" leaves out those that fill no'
                ' step, and "pad" adds empty ones'
            )
        for name, default in (
            ("columns", None),
            ("decode", None),
            ("transform", None),
            ("on_error", "raise"),
            ("lookahead", None),
            ("padded", False),
            ("too_long", "error"),
        ):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}= does not apply to packs: Pack has column=, tokenize= and too_long="
                )
        if self.output == "arrow":
            raise ValueError('packs are arrays: give output="numpy", "torch" or "jax"')

    def import_framework(self) -> None:
        """Imports what batches are made with, so that it is not missed in the middle of a loop."""
        what = f'output="{self.output}"'
        found = FRAMEWORKS.get(self.output)
        if found is None and self.pin_memory:
            what, found = "pin_memory=True", FRAMEWORKS["torch"]
        if found is None:
            return
        module, name = found
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name != module:
                raise
            said = f"{what} needs {name}: pip install {module}"
            raise ModuleNotFoundError(said, name=module) from e


class Loader(Generic[B_co]):
    """Batches of a dataset, or of a mix, in order. Made by :meth:`forebay.Dataset.loader`; its
    arguments are explained there.

    A loader is a *place in an order*. A ``for`` loop over it begins there, moves it, and ends with
    the epoch (or with the last of ``epochs=``); the next loop continues with what was not yielded,
    whether the previous one ran to its end or was left by ``break``. :meth:`state_dict` says where
    the loader is.

    ::

        loader = ds.loader(batch_size=64, shuffle=forebay.Block(16), seed=1)
        for epoch in range(loader.epoch, 10):
            for batch in loader:
                ...

    Attributes:
        last: The step that was yielded last (its ``epoch``, ``rows``, ``sources``, and how many of
            them are ``real``), or None.

    Its rank and the number of ranks are found out when it is first asked for a batch or for its
    length (:attr:`place`), and do not change later.

    It can be pickled, with its place. There is one iteration at a time; a new one ends the previous
    one. Several threads may take batches from one iteration: each batch goes to one of them.
    """

    #: Whether rows have numbers in their dataset.
    _are_numbered = True

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        weights: Sequence[float] | Schedule | None,
        epoch_rows: int | None,
        options: Options,
    ) -> None:
        self.options = options = options.checked()
        options.import_framework()
        if options.rank is not None or options.world_size is not None:
            _place.find(options.rank, options.world_size)
        # The place of the process that this was pickled in, and the one that this has used.
        self._inherited: _place.Place | None = None
        self._settled: _place.Place | None = None
        for dataset in datasets:
            dataset.block_shape  # noqa: B018 - asked for once, before it travels to workers
        columns = options.columns if options.pack is None else [options.pack.column]
        self.datasets = [d if columns is None else d.select_columns(columns) for d in datasets]
        if options.pack is not None:
            self._check_tokens(options.pack, datasets)
        self._order = Order(self.datasets, weights, epoch_rows, options.seed, options.shuffle)
        self._made_of = (list(datasets), weights, epoch_rows)
        self._lengths: list[np.ndarray] | None = None
        self._go_to(self._order.start())
        self._ahead = Ahead()
        self._meter = Meter()
        # Weakly: an iteration that its loop has left is dropped, and with it the threads and what
        # they fetched ahead.
        self._current: weakref.ref[Iteration[B_co]] | None = None
        self._own_name = uuid.uuid4().hex
        self.last: Step | None = None

    def _check_tokens(self, pack: Pack, datasets: Sequence[Dataset[Any]]) -> None:
        """Refuses columns that packs cannot be made of, before any of them is read."""
        for dataset, narrow in zip(datasets, self.datasets, strict=True):
            if dataset.sampler() is not None:
                raise InvalidRequest(
                    f"{dataset.name} was opened with decode=, or has a map, and packs are made from"
                    " a column",
                    hint="open it without decode=, and give Pack(column=, tokenize=)",
                )
            try:
                pack.dtype_of([narrow.schema[pack.column]])
            except TypeError as e:
                raise InvalidRequest(
                    f"column {pack.column!r} of {dataset.name} is of type {e}",
                    hint="name the column of the tokens, or give Pack(tokenize=...)",
                ) from None
            except ValueError as e:
                raise InvalidRequest(
                    f"{e}, the type of column {pack.column!r} of {dataset.name}",
                    hint="give a number that fits",
                ) from None
            if isinstance(pack.lengths, str):
                dataset.select_columns([pack.lengths])

    # Iterating

    def __iter__(self) -> Iterator[B_co]:
        before = None if self._current is None else self._current()
        if before is not None:
            before.give_way()
        self._state = self._trained
        self._ahead.look()
        iteration: Iteration[B_co] = Iteration(self, self._state, self._meter)
        # From here on, one that began in the same moment in another thread is not the current one.
        self._current = weakref.ref(iteration)
        return iteration

    def _is_overtaken(self, iteration: Iteration[B_co]) -> bool:
        """Whether another loop has begun since this iteration did."""
        current = self._current
        return current is not None and current() is not iteration

    def total(self, state: State) -> int | None:
        """The number of batches of one iteration from a state on; None if endless or unknown."""
        until = self.until(state)
        if until is None or self.options.pack is not None:
            return None
        return self.steps(state, until).count()

    def _go_to(self, state: State) -> None:
        # Where it is, and where it was before the batch that was yielded last.
        self._state = self._before = state
        self._is_loaded = False

    @property
    def _trained(self) -> State:
        # Where it is but for a batch that was taken ahead.
        return self._before if self._ahead.holds_one else self._state

    def _yielded(self, step: Step) -> None:
        self._ahead.takes()
        self._before, self._state, self.last = self._state, step.next, step

    def _finished(self, until: int | None) -> None:
        self._go_to(self.ended(self._state, until))

    def ended(self, state: State, until: int | None) -> State:
        """The state after the last step: the loader has also passed rows that are dropped at the
        end of an epoch.
        """
        return self._order.at(until, 0) if until is not None and state["epoch"] < until else state

    def until(self, state: State) -> int | None:
        """The epoch before which an iteration from this state ends; None: it does not end."""
        epochs = self.options.epochs
        if epochs is None:
            return int(state["epoch"]) + 1
        return None if epochs == math.inf else int(epochs)

    def __bool__(self) -> bool:
        """True: whether there are batches, a loop tells; ``len()`` may be unknown."""
        return True

    def __len__(self) -> int:
        """Batches of one loop from the beginning, of this rank: of an epoch, or of all ``epochs=``.

        Raises:
            TypeError: The loop does not end, or batches are bounded by length, or of packs, so
                their number is unknown until they are made.
        """
        if self.options.pack is not None:
            raise TypeError("the number of batches of packs is not known before the epoch ends")
        start = self._order.start()
        until = self.until(start)
        if until is None:
            raise TypeError("a loop with epochs=math.inf has no number of batches")
        count = self.steps(start, until).count()
        if count is None:
            raise TypeError(
                "the number of batches of bounded length is not known before the epoch ends"
            )
        return count

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a loader has no batches by number: iterate over it, or give"
            " DataLoader(loader.torch(), batch_size=None)"
        )

    @property
    def dataset(self) -> NoReturn:
        """There is none: whoever takes the loader for PyTorch's is told what to do."""
        raise AttributeError(NO_DATASET)

    @property
    def place(self) -> _place.Place:
        """This process among the training processes (``rank``, ``world_size``), as
        :meth:`forebay.Dataset.loader` says under ``rank``.

        Raises:
            InvalidRequest: The environment gives only half of it, or it differs from the one that
                this loader has used before.
        """
        found = _place.find(self.options.rank, self.options.world_size, self._inherited)
        known = self._settled
        if known and (known.rank, known.world_size) != (found.rank, found.world_size):
            raise InvalidRequest(
                f"this loader was iterated over, or asked for its length, as {known}, and"
                f" now this process is {found}",
                hint="initialize torch.distributed earlier, or give the loader rank= and"
                " world_size=",
            )
        self._settled = found
        return found

    def partition(self) -> dict[str, Any]:
        """How the order is dealt out, as the compiled plan and the node know it."""
        place = self.place
        return self._dealt(place.rank, place.world_size)

    def _dealt(self, rank: int, world_size: int) -> dict[str, Any]:
        o = self.options
        batch: dict[str, Any] = {"rows": o.batch_size}
        if o.max_total is not None:
            lookahead = o.lookahead or LOOKAHEAD_BATCHES * (o.batch_size or LOOKAHEAD_BATCH_ROWS)
            most = o.batch_size or BOUNDED_ROWS
            batch = {
                "bounded": {
                    "max_total": o.max_total,
                    "max_rows": most,
                    "lookahead_rows": lookahead,
                    "padded": o.padded,
                    "too_long": o.too_long,
                }
            }
        return {"world": world_size, "rank": rank, "batch": batch, "uneven": o.uneven}

    def steps(self, state: State, until: int | None) -> Steps:
        """The steps of this rank, from a state to the beginning of the epoch ``until``."""
        return self._order.steps(state, until, self.partition(), self.lengths_of_rows())

    def lengths_of_documents(self) -> list[np.ndarray] | None:
        """The tokens of each row of each dataset, where ``Pack(lengths=)`` tells them."""
        pack = self.options.pack
        return None if pack is None else self._lengths_from(pack.lengths)

    def lengths_of_rows(self) -> list[np.ndarray] | None:
        """The lengths of all rows of each dataset, if batches are bounded by them."""
        return self._lengths_from(self.options.length)

    def _lengths_from(self, given: Any) -> list[np.ndarray] | None:
        if given is None:
            return None
        if self._lengths is None:
            if isinstance(given, str):
                found = [d.lengths(given, self.options.progress) for d in self._made_of[0]]
            else:
                found = _arrays_of_lengths(given, len(self.datasets))
            for array, dataset in zip(found, self.datasets, strict=True):
                if (
                    array.shape != (len(dataset),)
                    or array.dtype.kind not in "iu"
                    or array.min(initial=0) < 0
                ):
                    raise InvalidRequest(
                        f"the lengths of {dataset.name} are an array of {array.dtype} of"
                        f" shape {array.shape}",
                        hint=f"give {len(dataset)} whole numbers of at least 0",
                    )
            lengths = [np.ascontiguousarray(a, np.uint64) for a in found]
            if self.options.max_total is not None:
                for source, of_source in enumerate(lengths):
                    self._look_for_too_long(source, of_source)
            self._lengths = lengths
        return self._lengths

    def _look_for_too_long(self, source: int, lengths: np.ndarray) -> None:
        """Refuses rows that no batch can hold, or logs how many there are."""
        o, dataset = self.options, self.datasets[source]
        assert o.max_total is not None
        count = int(np.count_nonzero(lengths > o.max_total))
        if not count:
            return
        row = int(lengths.argmax())
        what = (
            f"{count:,} of {len(lengths):,} rows of {dataset.name} are longer than"
            f" max_total={o.max_total}:"
            f" row {row} is the longest, with {lengths[row]}"
        )
        if o.too_long == "error":
            place = self._name(source, row)
            where = f" ({place[0]}, row {place[1]})" if place else ""
            raise InvalidRequest(
                f"{what}{where}",
                hint='raise max_total; or say too_long="alone" to make each a batch of its own,'
                ' or too_long="skip" to leave them out',
            )
        done = "each is a batch of its own" if o.too_long == "alone" else "they are left out"
        log.warning("%s; %s", what, done)

    def pipeline(
        self,
        state: State,
        until: int | None,
        meter: Meter,
        *,
        first: int = 0,
        stride: int = 1,
        samples: bool = False,
        threads: int | None = None,
        follow: bool = True,
    ) -> Pipeline:
        """The batches of the steps ``first``, ``first + stride``, …, counted from a state; as lists
        of samples if wanted.
        """
        o = self.options
        given = o.threads if o.threads is not None else threads
        threads = default_threads() if given is None else given
        if o.pack is not None:
            return _packed.pipeline(
                self, o.pack, state, until, meter, first, stride, threads, follow
            )
        decodes = [_chain(d.sampler(o.decode), o.transform) for d in self.datasets]
        pin = o.pin_memory and not samples and _collate.can_pin()
        recipe = Recipe(
            decodes,
            o.on_error,
            self._name,
            o.output,
            None if samples else o.collate,
            o.uneven == "pad",
            pin,
            samples,
            MAX_SKIPPED if o.max_skipped is None else o.max_skipped,
            is_of_many=self.place.world_size > 1 or stride > 1,
            are_numbered=self._are_numbered,
        )
        fetcher = self.fetcher(state, until, meter, first, stride, follow)
        return Pipeline(fetcher, recipe, threads, o.prefetch, meter)

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
        """What brings the rows of the steps ``first``, ``first + stride``, …, from a state on.
        ``pool``: the threads to request them in; a stream needs none.
        """
        o = self.options
        steps = self.steps(state, until)
        if o.stream:
            from ._push import Push

            return Push(self, steps, state, until, meter, first, stride)
        retry = self.datasets[0].client.timeout if o.retry_for is None else o.retry_for
        # One of the workers tells the node.
        lease = self.lease(state) if follow and first % stride == 0 else None
        pull = Pull(
            self.datasets, steps, first, stride, o.prefetch, meter, retry, lease, state, pool
        )
        pull.job = self.job
        return pull

    @property
    def job(self) -> str:
        """What this job is called in the node's account (``forebay report``): ``job=``,
        ``FOREBAY_JOB``, or a name of its own.
        """
        return self.options.job or os.environ.get("FOREBAY_JOB") or self._own_name

    def lease(self, state: State, partition: dict[str, Any] | None = None) -> Lease | None:
        """Tells the node the order, so that its cache follows it from a state on; None if the cache
        should not. ``partition``: how the order is dealt out, if not as the loader deals it.
        """
        o, client = self.options, self.datasets[0].client
        if not o.follow:
            return None
        bases = [base for dataset in self.datasets for base in dataset.made_of]
        if any(repr(base.client) != repr(client) for base in bases):
            log.info("the datasets of this job are on several nodes, so no cache follows its order")
            return None
        told: dict[str, Any] = {"plan": self._order.document}
        if isinstance(o.epochs, int):
            told["until_epoch"] = o.epochs
        dealt = self.partition() if partition is None else partition
        told["partition"] = {**dealt, "ranks": [dealt["rank"]]}
        del told["partition"]["rank"]
        columns = self._columns_read()
        if columns is not None:
            told["columns"] = columns
        # Nodes of earlier releases fetch all columns of all ranks' rows ahead, which must not
        # include what nobody reads here.
        here = (1, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
        whole = self.place.world_size in here and columns is None
        return Lease(self.datasets, told, {} if whole else {"ahead_bytes": 0}, self.job)

    def _columns_read(self) -> list[str] | None:
        """The columns that are read of any of the datasets; None: all of one of them."""
        read: dict[str, None] = {}
        for dataset in self.datasets:
            for base in dataset.made_of:
                if base.chosen is None:
                    return None
                read.update(dict.fromkeys(base.chosen))
        return list(read)

    def rows_left(self, state: State, until: int | None) -> int | None:
        """Rows of all ranks from a state to the beginning of the epoch ``until``; None: without
        end, or not counted in rows.
        """
        if until is None or self.options.pack is not None:
            return None
        epochs = max(0, until - int(state["epoch"]))
        return epochs * self.rows_per_epoch - int(state["position"])

    def _name(self, source: int, row: int) -> tuple[str, int] | None:
        place = self.datasets[source].locate(row)
        return place.file, place.row_in_file

    # Where it is

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return int(self._state["epoch"])

    def state_dict(self) -> State:
        """What was yielded, as a few numbers. The same on every rank after the same number of
        batches.

        What was fetched or decoded ahead does not count, nor the batch that Lightning takes before
        it trains on the one before it. It can be saved by ``torch.save`` or as JSON.
        """
        return self.whole(self._trained)

    def whole(self, state: State) -> State:
        """A state with all entries that one of this loader may have: 0 of them where it is not
        within anything. ``torch.distributed.checkpoint`` takes loaders, and reads of a saved state
        only the entries that the present one has.
        """
        if self.options.pack is not None:
            return {**state, "pack": state.get("pack") or self.options.pack.begun()}
        if self.options.max_total is not None:
            batch = self._dealt(0, 1)["batch"]
            # As the plan writes it.
            if batch["bounded"]["too_long"] == "error":
                del batch["bounded"]["too_long"]
            return {**state, "within": state.get("within") or {"batches": 0, "batching": batch}}
        return dict(state)

    def load_state_dict(self, state: State, strict: bool = True) -> None:
        """Goes to where :meth:`state_dict` was taken: the next batch begins with the row after the
        last one that was yielded then.

        World size, rank, batch size, number of workers, ``stream=``, ``columns=`` and ``decode=``
        may differ from those at that time.

        Args:
            strict: False: so may the names and types that ``rename`` and ``cast`` gave columns, and
                the functions of ``map``, which a state knows by their names. They decide how rows
                look, and not which they are.

        Raises:
            InvalidRequest: The state belongs to another dataset (or another version of it),
                composition, seed, shuffle, mix or release; or, between batches of bounded length,
                to other bounds; or, between packs, to other packs.
        """
        checked = self.checked(state, strict)
        if "within" in checked:
            # Between batches of bounded length: this loader must have the same bounds.
            self._order.steps(checked, None, self._dealt(0, 1))
        self._go_to(checked)
        self._is_loaded = True
        self.last, self._settled = None, None
        self.close()

    def checked(self, state: Any, strict: bool = True) -> State:
        """The state, if it is a place in this order; raises InvalidRequest for any other."""
        return _packed.checked(self._order, self.options.pack, state, strict)

    def after(self, state: State, steps: int) -> State:
        """The state after so many steps from a state on, of which there is at least one."""
        until, pack = self.until(state), self.options.pack
        if pack is None:
            last = self.steps(state, until).step(steps - 1)
        else:
            last = _packed.step(self, pack, state, until, steps - 1)
        return self.ended(state, until) if last is None else last.next

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; does nothing if the loader is already in that epoch
        (because it was resumed there).

        Raises:
            InvalidRequest: A Trainer of transformers goes back behind a state that was loaded: it
                counts epochs from 0 again where it does not know their length.
        """
        if epoch != self.epoch:
            if self._is_loaded and epoch < self.epoch and _is_of_transformers(sys._getframe(1)):
                raise InvalidRequest(
                    f"the Trainer counts epochs from 0 again and asks for epoch {epoch}, and a"
                    f" state of epoch {self.epoch} was loaded",
                    hint="return forebay.torch.Resumable(DataLoader(loader.torch(),"
                    " batch_size=None)) from get_train_dataloader, and load the state into that",
                )
            self._go_to(self._order.at(epoch, 0))
            self.close()

    def close(self) -> None:
        """Ends the current iteration, if there is one. The loader keeps its place."""
        current = None if self._current is None else self._current()
        if current is not None:
            current.close()
        self._current = None

    @property
    def plan(self) -> str:
        """The identity of the order: equal if all epochs are in the same order."""
        return self._order.identity

    @property
    def rows_per_epoch(self) -> int:
        """Rows of all ranks together."""
        return self._order.rows_per_epoch

    @property
    def order(self) -> Order:
        """The order itself."""
        return self._order

    def clients(self) -> list[Client]:
        """Through which rows come: those of the datasets; of a stream, that of the first one and
        those of ``nodes=``.
        """
        if not self.options.stream:
            return [base.client for dataset in self.datasets for base in dataset.made_of]
        # A single one may be given without a list.
        nodes = self.options.nodes or ()
        further = [nodes] if isinstance(nodes, (str, Client)) else nodes
        client = self.datasets[0].client
        return [client, *(n if isinstance(n, Client) else client._at(n) for n in further)]

    # What it costs

    def stored(self) -> list[tuple[str, int]]:
        """Names and bytes of what lies at the origin: of each dataset that was opened, once, with
        all of its files.
        """
        bases = {base.id: base for dataset in self.datasets for base in dataset.made_of}
        return [(base.name, int(base.info.get("bytes", 0))) for base in bases.values()]

    def stats(self, reset: bool = False) -> Stats:
        """Where the time went since the first batch (of this process, not of DataLoader workers).

        Args:
            reset: Start counting anew after this. In a loop, the step or the wait that goes on
                counts from here.
        """
        reset, stats = flag("reset", reset), self._meter.stats()
        if reset:
            current = None if self._current is None else self._current()
            self._meter.reset(current is not None and current.is_counting)
        return stats

    def report(
        self,
        *,
        order: bool = True,
        place: str | None = None,
        egress: Literal["internet", "region", "none"] = "internet",
        prices: str | os.PathLike[str] | None = None,
        prices_file: str | os.PathLike[str] | None = None,
    ) -> Report:
        """How well the loop was fed, and what that took: utilization, waits by cause, bytes by
        source, CPU time and energy at both ends, and warnings with advice. For what happened since
        the first batch, or since ``loader.stats(reset=True)``.

        Args:
            order: Measure the order too, beside a uniform one: some seconds for a large dataset.
            place: Whose prices the origin's use is told in: ``"aws/us-east-1"``. They are list
                prices; the report says of which day. Default: ``FOREBAY_PLACE``, or no money.
            egress: Where the node is, seen from the bucket: ``"internet"``, ``"region"`` (another
                one of the provider) or ``"none"`` (the same one).
            prices: A file with a table of your own (``forebay report --print-prices`` prints the
                one that ships). Default: ``FOREBAY_PRICES``.
            prices_file: The older name of ``prices=``, which was then the place:
                ``prices="aws/us-east-1"`` still is.

        ``place=``, ``egress=`` and ``prices=`` are those of the command ``forebay report``.

        Raises:
            InvalidRequest: The table has a mistake, or no such provider and region.

        Like :meth:`stats`, it is of this process, not of DataLoader workers.
        """
        from ._report import is_place, of_loader

        order = flag("order", order)

        # With a place, prices= is a file, and one that is missing an error.
        is_by_prices = prices_file is None and not place and is_place(prices)
        if prices_file is not None or is_by_prices:
            place = place or (None if prices is None else str(prices))
            prices = prices_file
        return of_loader(self, self._meter, order, place, egress, prices, is_by_prices)

    # Other consumers

    @overload
    def torch(self, samples: Literal[False] = False) -> LoaderDataset[B_co]: ...
    @overload
    def torch(self, samples: bool) -> LoaderDataset[Any]: ...
    def torch(self, samples: bool = False) -> LoaderDataset[Any]:
        """The same batches as a ``torch.utils.data.IterableDataset``, for a ``DataLoader`` with
        workers.

        Args:
            samples: Yield samples instead of batches, for a DataLoader that makes batches itself:
                its ``batch_size`` must be the loader's.

        See :class:`forebay.torch.LoaderDataset`.
        """
        from .torch import LoaderDataset

        return LoaderDataset(self, samples=samples)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "made_of": self._made_of,
            "options": self.options,
            "state": self._trained,
            "lengths": self._lengths,
            "inherited": _place.to_inherit(self._inherited),
            "own_name": self._own_name,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["made_of"], state["options"])  # type: ignore[misc]
        self._go_to(state["state"])
        self._lengths = state["lengths"]
        self._inherited = state["inherited"]
        self._own_name = state["own_name"]

    def __repr__(self) -> str:
        o, s = self.options, self._state
        # Not the numbers of all rows, if they were given.
        unit = o.length if isinstance(o.length, str) else "by the lengths given"
        size = (
            f"batches of {counted(o.batch_size or 0, 'pack')} of {o.pack.length} tokens"
            f" ({o.pack.strategy})"
            if o.pack is not None
            else f"batches of {o.batch_size}"
            if o.max_total is None
            else f"batches of at most {o.max_total} {unit}"
        )
        of = " + ".join(d.name for d in self.datasets)
        return (
            f"<forebay.Loader of {of}: {size}, shuffle {o.shuffle or 'none'}, seed"
            f" {o.seed}, {self._shown_place()},"
            f" at row {s['position']:,} of {self.rows_per_epoch:,} of epoch {s['epoch']}>"
        )

    def _shown_place(self) -> str:
        try:
            o = self.options
            return str(self._settled or _place.find(o.rank, o.world_size, self._inherited))
        except Error:
            return "rank not known yet"


class Iteration(Generic[B_co]):
    """One ``for`` loop over a loader. Threads take batches in turn; any of them may close it."""

    def __init__(self, loader: Loader[B_co], state: State, meter: Meter) -> None:
        self._loader, self._meter = loader, meter
        self._until = loader.until(state)
        self._pipeline: Pipeline | None = loader.pipeline(state, self._until, meter)
        self._ranks = loader.place.world_size
        self._lock = threading.Lock()
        energy.watch()
        self._number = 0
        # How many steps each has in its figures: after Ctrl-C, that may be one more.
        self._in_stats = self._in_ledger = 0
        # Another loop over the loader has begun.
        self._is_replaced = False
        # The epoch of the last batch, and when it was handed out.
        self._epoch = int(state["epoch"])
        self._handed: float | None = None
        self._any = False
        self._bar_total = total = loader.rows_left(state, self._until)
        what, show = _named(int(state["epoch"]), self._until), loader.options.progress
        unit = "rows" if loader.options.pack is None else "packs"
        self._bar = None
        if show is not False:
            # It does not know the iteration, which is dropped with a loop that is left.
            self._bar = Bar(what, total, unit, show=show, note=partial(_waited, meter))
            weakref.finalize(self, self._bar.leave, os.getpid()).atexit = False

    @property
    def goes_on(self) -> bool:
        """Whether there are batches to come, as far as is known."""
        return self._pipeline is not None

    @property
    def is_counting(self) -> bool:
        """Whether time counts now: the loop works on a batch, or waits for one."""
        return self.goes_on and (self._handed is not None or self._lock.locked())

    def __iter__(self) -> Iteration[B_co]:
        return self

    def __next__(self) -> B_co:
        pipeline = self._pipeline
        if pipeline is not None:
            # Before the lock, which another thread may have held at the fork.
            pipeline.check_process()
        with self._lock:
            if not self._is_current():
                raise self._over()
            began = self._meter.began()
            if self._handed is None:
                clients = self._loader.clients()
                self._meter.loop_began(clients, bool(self._loader.options.nodes), began)
            else:
                self._meter.computed(self._epoch, self._handed, began)
                self._handed = None
            asked = began
            while True:
                batch = self._next_batch(asked, began)
                if batch is not NOTHING:
                    return batch
                began = self._meter.began()

    def _next_batch(self, asked: float, began: float) -> Any:
        """The batch of the next step; NOTHING if no sample of it could be made. The loop has waited
        since ``asked``, and for this step since ``began``.
        """
        pipeline, ledger = self._pipeline, self._meter.ledger
        if pipeline is None:
            raise self._over()
        try:
            # The same again if a signal ended the last call before it counted.
            made = pipeline.at(self._number)
        except Exception as e:
            if interrupts(e):
                # The loop may go on with this batch.
                raise
            if self._pipeline is None:  # closed meanwhile: why it broke off no longer matters
                raise self._over() from None
            # The state is still the one before this step: a new loop over the loader begins with
            # it.
            self.close()
            raise
        finally:
            ended = self._meter.ended(began)
        is_current = self._is_current()
        if made is None:
            ledger.loop_ended(self._epoch, asked, ended)
            if is_current:
                if self._bar is not None and self._bar_total is not None:
                    # With what fills no batch.
                    self._bar.to(self._bar_total, self._bar_total)
                self.close()
                self._loader._finished(self._until)
            raise self._over()
        step = made.step
        if not is_current:
            raise self._over()
        assert step.step == self._number, f"step {step.step} came where {self._number} was to come"
        if self._bar is not None:
            self._draw(self._bar, step)
        samples, number = step.real - made.skipped, self._number + 1
        is_batch = made.batch is not NOTHING
        if self._in_stats < number:
            self._in_stats = number
            counts = {"samples": samples, "batches": 1, **step.counts} if is_batch else {}
            self._meter.add(skipped=made.skipped, **counts)
        if is_batch:
            # The loop waits for it once more, and that counts.
            is_new = self._in_ledger < number
            ledger.handed(
                step.epoch, asked, ended, samples, first=not self._any, is_again=not is_new
            )
            self._in_ledger = number
            self._epoch, self._handed, self._any = step.epoch, ended, True
        # Last of all: after Ctrl-C before this, the batch is still to come.
        self._loader._yielded(step)
        self._number += 1
        return made.batch

    def _draw(self, bar: Bar, step: Step) -> None:
        """Counts a step in the progress line."""
        if self._until is None:
            bar.what = _named(step.epoch, None)
        total, is_bounded = self._bar_total, self._loader.options.max_total is not None
        left = None if is_bounded else self._loader.rows_left(step.next, self._until)
        if total is None or left is None:
            # Of batches of bounded length, as if those of all ranks were like this one.
            bar.advance(step.real * self._ranks)
        else:
            # By the place in the order, which has also passed what other ranks got, and only once.
            bar.to(total - left, total)

    def _is_current(self) -> bool:
        """Whether this is the loop that the loader has now, and there may be batches to come."""
        if self._pipeline is not None and self._loader._is_overtaken(self):
            self.give_way()
        return self._pipeline is not None

    def _over(self) -> Exception:
        """The exception that ends the loop: it tells whoever asks if another loop has begun."""
        return overtaken() if self._is_replaced else StopIteration()

    def give_way(self) -> None:
        """Another loop over the loader begins: this one ends, and says so if it went on."""
        if self._pipeline is not None:
            self._is_replaced = True
            self.close()

    def close(self) -> None:
        """Ends the loop and discards what was fetched ahead. A thread that waits for a batch sees
        the end.
        """
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
        if self._bar is not None:
            self._bar.close()


def overtaken() -> InvalidRequest:
    """The error of a loop that another one over the same loader has ended."""
    return InvalidRequest(
        "another loop over this loader has begun, and a loader has one at a time",
        hint="make a loader for each, or keep the batches: batches ="
        " list(itertools.islice(loader, n))",
    )


def _named(epoch: int, until: int | None) -> str:
    """What a progress line is of: an epoch, or all before the epoch ``until``."""
    if until is None or until <= epoch + 1:
        return f"epoch {epoch}"
    return f"epochs {epoch}-{until - 1}"


def _waited(meter: Meter) -> str:
    return f"waited {meter.stats().waited_share:.0%}"


def _is_of_transformers(frame: FrameType) -> bool:
    """Whether this is a function of the library transformers."""
    return str(frame.f_globals.get("__name__")).startswith("transformers.")


def _arrays_of_lengths(given: Any, datasets: int) -> list[np.ndarray]:
    """One array for each dataset: of a mix a list of them, of one dataset the array itself too."""
    is_array = hasattr(given, "__len__") and not isinstance(given, (Mapping, set, frozenset))
    if not is_array or getattr(given, "ndim", 1) == 0:
        raise InvalidRequest(
            f"the lengths are given as {given!r:.100}",
            hint="give the name of a column, or an array with the length of each row",
        )
    if datasets == 1 and not (len(given) == 1 and np.ndim(given[0]) == 1):
        return [np.asarray(given)]
    if len(given) != datasets:
        raise InvalidRequest(
            f"the lengths of {counted(len(given), 'dataset')} are given, and the mix has"
            f" {datasets}",
            hint="give a list with an array for each dataset",
        )
    return [np.asarray(of_one) for of_one in given]


def _chain(decode: Decode | None, transform: Callable[[Any], Any] | None) -> Decode | None:
    if decode is None or transform is None:
        return decode or transform
    return lambda row: transform(decode(row))


def default_threads() -> int:
    """The default number of decoding threads: as many as the process may run at once, at most
    4.
    """
    return min(4, len(os.sched_getaffinity(0)))
