"""The rows of each step, in order: requested ahead of the loop (:class:`Pull`), or sent by the node
unasked (:class:`Push`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from . import _node
from ._plan import State, Step, Steps
from ._pools import Pool, is_exiting, submit
from ._stop import Stop
from .errors import (
    Busy,
    ConnectionFailed,
    Damaged,
    Error,
    ServerError,
    Timeout,
    TooLarge,
    Truncated,
)
from .rows import Rows
from .stats import Meter

if TYPE_CHECKING:
    from ._lease import Lease
    from .dataset import Dataset


#: How often a node is told where a pulling job is.
TELL_SECONDS = 100.0
#: What the node reports with each answer, and :class:`forebay.Stats` shows.
NODE_TIMES = ("origin", "disk", "prepare")
#: Pauses between the attempts at the rows of a step: the first, and the longest.
RETRY_FIRST_SECONDS = 0.1
RETRY_MAX_SECONDS = 2.0
#: Failures that another attempt may overcome: the node is down, broke off, or is too busy.
PASSING = (ConnectionFailed, Truncated, Busy)
#: Failures of the node or the bucket, which may pass. After one of a write, what was written may be
#: there or not: it is looked for, or sent again.
UNSURE = (*PASSING, ServerError, Timeout)


@dataclass(frozen=True)
class Fetched:
    """A step and its rows."""

    step: Step
    rows: Rows


class Fetcher(Protocol):
    """Gives the rows of steps, in order."""

    def at(self, index: int) -> Fetched | None:
        """Waits for the rows of the ``index``-th step here, from 0; None after the last, and once
        this is closed.

        Another call with the same index returns the same, so that a wait that Ctrl-C ends loses
        nothing; earlier steps are gone.
        """

    def close(self) -> None:
        """Stops, without waiting for work in progress."""


def fetch_pool(prefetch: int) -> Pool:
    """Threads for the requests of ``prefetch + 1`` steps, and one more."""
    return Pool(prefetch + 2, thread_name_prefix="forebay-fetch")


class Pull:
    """Requests the rows of each step, up to ``prefetch`` steps ahead of the one waited for.

    A step's request is made when an earlier one is taken, so no more than ``prefetch + 2`` batches
    are in memory here. With ``pool``, a :func:`fetch_pool` that others may use too, it starts no
    threads, and leaves those running when it is closed. A request that fails because the node is
    down or busy is repeated for ``retry_for`` seconds, while those after it wait for their turn:
    nothing is lost, and nothing comes twice.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        steps: Steps,
        first: int,
        stride: int,
        prefetch: int,
        meter: Meter,
        retry_for: float,
        lease: Lease | None,
        state: State,
        pool: Pool | None = None,
    ) -> None:
        self._datasets, self._steps, self._meter = datasets, steps, meter
        self._first, self._stride = first, stride
        self._ahead, self._retry_for = prefetch, retry_for
        self._pool = pool or fetch_pool(prefetch)
        self._is_shared = pool is not None
        self._lease, self._told = lease, time.monotonic()
        self._waiting: dict[int, Future[Fetched]] = {}
        self._asked = 0
        #: What the job is called, for the node's account.
        self.job: str | None = None
        # Whether another node answers now, which is to be told.
        self._moved = False
        self._end: int | None = None
        # Set when this is closed: whoever waits for a batch waits for either.
        self._stop = Stop()
        if lease is not None:
            before = steps.step(first - 1) if first else None
            self._tell(lease, before.next if before else state)

    def _tell(self, lease: Lease, state: State) -> None:
        submit(self._pool, self._stop.is_set, lease.tell, state)

    def _top_up(self, index: int) -> None:
        while self._end is None and self._asked <= index + self._ahead and not self._stop.is_set():
            future: Future[Fetched] | None
            try:
                step = self._steps.step(self._first + self._asked * self._stride)
            except Error as e:
                # Of a step that there cannot be: it is told when the step is due.
                future = Future()
                future.set_exception(e)
                self._end = self._asked + 1
            else:
                if step is None:
                    self._end = self._asked
                    return
                future = submit(self._pool, self._stop.is_set, self._fetch, step)
            if future is None:
                return
            self._waiting[self._asked] = future
            self._asked += 1

    def begin(self, before: int) -> None:
        """Requests those of the first steps that are within ``prefetch`` of the step that is waited
        for. Another fetcher gives that one, ``before`` steps before the first one here.
        """
        self._top_up(-before)

    def _fetch(self, step: Step) -> Fetched:
        began = time.perf_counter()
        with _node.works_for(self.job):
            rows = self._read(step)
        self._moved |= self._lease is not None and self._lease.is_forgotten()
        account(self._meter, step.epoch, rows, began)
        return Fetched(step, rows)

    def _read(self, step: Step) -> Rows:
        def rows() -> Rows:
            return read(self._datasets, None, step.rows, step.sources)

        return patiently(rows, self._retry_for, self._stop, self._meter)

    def at(self, index: int) -> Fetched | None:
        for gone in [i for i in self._waiting if i < index]:
            del self._waiting[gone]
        self._top_up(index)
        future = self._waiting.get(index)
        if future is None or self._stop.is_set():
            return None
        self._stop.wait_or(future)
        try:
            if not future.done():
                return None
            fetched = future.result()
        except CancelledError:
            return None
        is_due = self._moved or time.monotonic() - self._told > TELL_SECONDS
        if self._lease is not None and is_due:
            # The node may not know it: it is another one, was restarted, or got no request for a
            # long time.
            self._told, self._moved = time.monotonic(), False
            self._tell(self._lease, fetched.step.next)
        self._top_up(index + 1)
        return fetched

    def close(self) -> None:
        self._stop.set()
        if self._is_shared:
            for future in list(self._waiting.values()):
                future.cancel()
        else:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._lease is not None:
            self._lease.release()


T = TypeVar("T")


def patiently(
    ask: Callable[[], T],
    retry_for: float,
    stop: Stop,
    meter: Meter,
    option: str = "retry_for=",
    passing: tuple[type[Error], ...] = PASSING,
) -> T:
    """What ``ask`` returns; repeated for ``retry_for`` seconds, which are those of this ``option``,
    while it fails with one of ``passing`` (the node is down or busy), unless ``stop`` is set.
    """
    until: float | None = None
    pause = RETRY_FIRST_SECONDS
    while True:
        try:
            given = ask()
        except passing as e:
            if isinstance(e, Damaged):
                # A ServerError, but what is damaged stays so.
                raise
            now = time.monotonic()
            until = now + retry_for if until is None else until
            is_over = now + pause > until
            if is_over or stop.wait(pause) or is_exiting():
                if is_over and retry_for:
                    e.message += f" (asked again for {retry_for:g} s: {option})"
                raise
            pause = min(2 * pause, RETRY_MAX_SECONDS)
        else:
            if until is not None:
                meter.add(reconnects=1)
            return given


def account(meter: Meter, epoch: int, rows: Rows, began: float) -> None:
    """Adds what it took to read these rows, which were requested at ``began`` and are there now."""
    node = rows.node_seconds
    waited = max(0.0, time.perf_counter() - began - sum(node.values()))
    told = {f"{name}_s": seconds for name, seconds in node.items() if name in NODE_TIMES}
    sources = {f"{name}_bytes": count for name, count in rows.node_bytes.items()}
    meter.came(epoch, sources, network_s=waited, bytes=rows.nbytes, **told)


def read(
    datasets: Sequence[Dataset[Any]],
    columns: Sequence[str] | None,
    rows: np.ndarray,
    sources: np.ndarray | None,
) -> Rows:
    """Rows of one dataset, or of several: ``sources`` says which one each is from."""
    if sources is None:
        return datasets[0].fetch(rows, columns)
    parts = {int(s): datasets[s].fetch(rows[sources == s], columns) for s in np.unique(sources)}
    return Rows.gathered(parts, rows, sources)


def read_in_parts(
    datasets: Sequence[Dataset[Any]],
    columns: Sequence[str] | None,
    rows: np.ndarray,
    sources: np.ndarray | None,
) -> Rows:
    """As :func:`read`, but what is too large for one answer is asked for in parts."""
    return joined(in_pieces(partial(read, datasets, columns), rows, sources), rows, sources)


def in_pieces(
    ask: Callable[[np.ndarray, np.ndarray | None], Rows],
    rows: np.ndarray,
    sources: np.ndarray | None,
    least: int = 1,
) -> Iterator[Rows]:
    """What ``ask`` returns for these rows: at once, or, where that is too large for one answer, one
    after the other in pieces that are not; of at most ``least`` rows, that is an error.
    """
    at, size = 0, len(rows)
    while True:
        piece = slice(at, at + size)
        try:
            found = ask(rows[piece], None if sources is None else sources[piece])
        except TooLarge:
            size = min(size, len(rows) - at)
            if size <= least:
                raise
            size //= 2
            continue
        yield found
        at += size
        if at >= len(rows):
            return


def asked_in_pieces(
    asked: Future[Rows],
    ask: Callable[[np.ndarray, np.ndarray | None], Rows],
    rows: np.ndarray,
    sources: np.ndarray | None,
) -> Iterator[Rows]:
    """What a request for these rows gives that was ``asked`` ahead; where they are larger than
    expected, in pieces, which are asked for one after the other: one of them is held at a time.
    """
    try:
        found = asked.result()
    except TooLarge:
        if len(rows) <= 1:
            raise
    else:
        # Not in the `try`: where the interpreter ends here, the name of the error is gone.
        yield found
        return
    yield from in_pieces(ask, rows, sources)


def joined(pieces: Iterable[Rows], rows: np.ndarray, sources: np.ndarray | None) -> Rows:
    """The pieces of these rows, one after the other."""
    found = list(pieces)
    if len(found) == 1:
        return found[0]
    together = Rows.joined(found, rows)
    together.sources = sources
    return together
