"""Turns rows into samples, in a pool of threads, in order.

A batch is cut into as many runs of rows as there are threads. The thread that ends the last run
puts the batch together, so that the training step finds it finished. What fails names its row and
file, and fails only that batch: batches before it are handed out first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from . import _collate
from ._pools import Pool, submit
from ._words import counted, listed
from .errors import SampleFailed
from .rows import Rows
from .stats import Meter

Decode = Callable[[Any], Any]
#: What to do with a sample that fails.
#: In place of a batch of which no sample could be made.
NOTHING = object()

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[SampleFailed], Any]
log = logging.getLogger("forebay")


def _advice(row: dict[str, Any], cause: Exception) -> str:
    """What may help where a function failed over a row, for the beginning of a hint."""
    if isinstance(cause, KeyError) and cause.args:
        key = cause.args[0]
        if isinstance(key, str) and key not in row:
            return f"the row has {listed(row)}; "
    views = [name for name, value in row.items() if isinstance(value, memoryview)]
    of_view = isinstance(cause, AttributeError) and isinstance(cause.obj, memoryview)
    if views and (of_view or isinstance(cause, TypeError)):
        are = "is a memoryview" if len(views) == 1 else "are memoryviews"
        return f"{listed(views)} {are}: bytes(row[{views[-1]!r}]) where bytes are wanted; "
    return ""


@dataclass
class Recipe:
    """What is made from the rows of a step.

    Attributes:
        decodes: For each source, what makes a sample of a row; None leaves the rows of all sources
            as they are.
        name: Says where a row is: ``(source, row) -> (file, row in the file)``.
        output, collate, pin: What a batch is made into.
        pads: Whether rows may be padding, which is then marked.
        max_skipped: Samples that may be skipped before a failure is still raised.
    """

    decodes: Sequence[Decode | None]
    on_error: OnError
    name: Callable[[int, int], tuple[str, int] | None]
    output: _collate.Output = "rows"
    collate: Callable[[Any], Any] | None = None
    pads: bool = False
    pin: bool = False
    #: Batches stay lists of samples: somebody else combines them.
    apart: bool = False
    max_skipped: int = 0
    #: Other ranks or workers take a step with each batch: it cannot be left out as a whole.
    is_of_many: bool = False
    #: Rows have a number in their dataset, and not only a place in a file.
    are_numbered: bool = True
    _skipped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _collator: Callable[[list[Any]], Any] | None = field(default=None, repr=False)

    @property
    def decodes_rows(self) -> bool:
        return any(d is not None for d in self.decodes)

    @property
    def works(self) -> bool:
        """Whether there is work for threads."""
        return self.decodes_rows or self.pin or self.collate is not None

    @property
    def is_short(self) -> bool:
        """Whether the work takes less time than to give it to another thread."""
        return False

    def samples(
        self, rows: Rows, begin: int, end: int, real: int, stopped: Callable[[], bool]
    ) -> tuple[list[Any], int]:
        """What is made of a run of rows, and how many of them, without padding, were left out. Less
        of it once nobody wants it any more.
        """
        out: list[Any] = []
        skipped = 0
        for i, row in enumerate(rows._between(begin, end), begin):
            if stopped():
                break
            source = 0 if rows.sources is None else int(rows.sources[i])
            try:
                decode = self.decodes[source]
                sample = row if decode is None else decode(row)
            except Exception as e:
                failure = self.failure(source, int(rows.ids[i]), e)
                failure.hint = f"{_advice(row, e)}{failure.hint}"
                if self.on_error == "skip":
                    self._skip(failure, e)
                    skipped += i < real
                    continue
                if not callable(self.on_error):
                    raise failure from e
                failure.__cause__ = e
                sample = called("on_error", self.on_error, failure)
            if self.pads and isinstance(sample, dict):
                sample = {**sample, _collate.REAL: i < real}
            out.append(sample)
        return out, skipped

    def _skip(self, failure: SampleFailed, cause: Exception) -> None:
        with self._lock:
            self._skipped += 1
            number = self._skipped
        if number > self.max_skipped:
            before = counted(self.max_skipped, "sample")
            failure.message += f" ({before} skipped before it: max_skipped=)"
            raise failure from cause
        log.warning("skipped: %s", failure.message)

    def failure(self, source: int, row: int, cause: Exception) -> SampleFailed:
        try:
            place = self.name(source, row)
        except (
            Exception
        ):  # the name is a help; the failure is told without it rather than hidden behind another
            place = None
        where = f"row {place[1]} of {place[0]}" if place else f"row {row} of the dataset"
        if place and self.are_numbered:
            where += f" (row {row} of the dataset)"
        error = SampleFailed(
            f"{where}: {type(cause).__name__}: {cause}",
            hint="on_error= can replace or skip it",
        )
        error.row = row
        error.file, error.row_in_file = place or (None, None)
        return error

    def finish(self, rows: Rows, samples: list[Any] | None, real: int) -> Any:
        if self.apart:
            return (
                _collate.apart(rows, self.output, real if self.pads else None)
                if samples is None
                else samples
            )
        if samples is None:
            batch = _collate.convert(rows, self.output, real if self.pads else None)
            if self.collate is not None:
                batch = called("collate", self.collate, batch)
        else:
            if self._collator is None:
                self._collator = _collate.collator(self.output, self.collate)
            batch = called("collate", self._collator, samples)
        return _collate.pin(batch) if self.pin else batch


def called(name: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Calls a user's function. StopIteration would end the loop: it becomes a RuntimeError."""
    try:
        return function(argument)
    except StopIteration as e:
        raise RuntimeError(f"{name}= raised StopIteration") from e


class Job:
    """The batch of one step while it is made. :meth:`result` waits for it."""

    def __init__(
        self,
        recipe: Recipe,
        rows: Rows,
        real: int,
        meter: Meter,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recipe, self._rows, self._real, self._meter = recipe, rows, real, meter
        self._stopped = stopped
        self._done: Future[Any] | None = None
        #: The batch, or the error, where this thread has made it.
        self._made: tuple[Any, BaseException | None] = (None, None)
        self._lock = threading.Lock()
        # Of several failures, report that of the first row, whichever thread came first.
        self._failed: tuple[int, BaseException] | None = None
        #: When the rows were there, which is now.
        self.there = time.perf_counter()
        #: When the samples were there, and the batch began to be put together.
        self.collating: float | None = None
        #: Rows that are not padding and have no sample in the batch.
        self.skipped = 0

    def now(self) -> Any:
        """Makes the batch in this thread."""
        began = time.perf_counter()
        try:
            if not self._recipe.decodes_rows:
                return self._finished(None)
            samples, self.skipped = self._recipe.samples(
                self._rows, 0, len(self._rows), self._real, self._stopped
            )
            return self._finished(samples)
        finally:
            self._meter.add(decode_s=time.perf_counter() - began)

    def make(self) -> Job:
        """Makes the batch in this thread. :meth:`result` raises what it raises."""
        try:
            self._made = (self.now(), None)
        except BaseException as e:
            self._made = (None, e)
        return self

    def _finished(self, samples: list[Any] | None) -> Any:
        if samples is not None and len(self._rows) and not samples:
            if not self._recipe.is_of_many:
                return NOTHING
            raise SampleFailed(
                f"no sample of a batch of {len(self._rows)} could be made, and other ranks"
                " or workers take a step with it",
                hint="the log names them; make batches larger, or replace samples that fail by"
                " on_error= with a function",
            )
        self.collating = time.perf_counter()
        return self._recipe.finish(self._rows, samples, self._real)

    def start(self, pool: Pool, threads: int) -> Job:
        """Lets the pool make the batch."""
        count = len(self._rows)
        if self._recipe.decodes_rows:
            self._rows.prepare()
        runs = max(1, min(threads, count)) if self._recipe.decodes_rows else 1
        self._parts: list[list[Any] | None] = [None] * runs
        self._left, self._done = runs, Future()
        for n in range(runs):
            begin, end = count * n // runs, count * (n + 1) // runs
            submit(pool, self._stopped, self._run, n, begin, end)
        return self

    def _run(self, n: int, begin: int, end: int) -> None:
        began = time.perf_counter()
        failure: BaseException | None = None
        skipped = 0
        try:
            if self._recipe.decodes_rows:
                self._parts[n], skipped = self._recipe.samples(
                    self._rows, begin, end, self._real, self._stopped
                )
        except BaseException as e:
            failure = e
        with self._lock:
            self._left -= 1
            self.skipped += skipped
            last = self._left == 0
            if failure is not None and (self._failed is None or n < self._failed[0]):
                self._failed = (n, failure)
        if last:
            self._end()
        self._meter.add(decode_s=time.perf_counter() - began)

    def _end(self) -> None:
        done = cast("Future[Any]", self._done)
        if self._stopped():
            # Nobody waits for it, and it may be a part of a batch only.
            done.set_result(None)
            return
        if self._failed is not None:
            done.set_exception(self._failed[1])
            return
        try:
            samples = (
                [s for part in self._parts for s in part or ()]
                if self._recipe.decodes_rows
                else None
            )
            done.set_result(self._finished(samples))
        except BaseException as e:
            done.set_exception(e)

    def done(self) -> bool:
        """Whether :meth:`result` would not have to wait."""
        return self._done is None or self._done.done()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls a function when the result is ready, in whichever thread that happens, if it is not
        ready yet.
        """
        if self._done is not None:
            self._done.add_done_callback(lambda _: call())

    def has_failed(self, failure: BaseException) -> bool:
        """Whether making the batch raised this very error."""
        if self._done is None:
            return self._made[1] is failure
        return self._done.done() and self._done.exception() is failure

    def result(self) -> Any:
        if self._done is not None:
            return self._done.result()
        made, failed = self._made
        try:
            if failed is not None:
                raise failed
            return made
        finally:
            # The error does not hold on to itself by its traceback.
            del failed
