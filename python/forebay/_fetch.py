"""The rows of each step, in order: asked for ahead of the loop (:class:`Pull`), or sent by the node of its own accord (:class:`Push`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ._plan import State, Step, Steps
from .rows import Rows
from .stats import Meter

if TYPE_CHECKING:
    from .dataset import Dataset


#: How often a node is told where a job is that pulls.
TELL_SECONDS = 100.0
#: What the node tells of each answer, and :class:`forebay.Stats` shows.
NODE_TIMES = ("origin", "disk", "prepare")


@dataclass(frozen=True)
class Fetched:
    """A step and its rows."""

    step: Step
    rows: Rows


class Fetcher(Protocol):
    """Gives the rows of steps, in order."""

    def next(self) -> Fetched | None:
        """The next step's rows, waited for; None after the last."""

    def close(self) -> None:
        """Stops, without waiting for what is under way."""


class Pull:
    """Asks for the rows of each step, up to ``prefetch`` steps ahead of the one that is waited for.

    A step's request is made when an earlier one is taken, so no more than ``prefetch + 1`` batches are in memory here.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        steps: Steps,
        first: int,
        stride: int,
        prefetch: int,
        meter: Meter,
        tell: Callable[[State], None] | None = None,
        state: State | None = None,
    ) -> None:
        self._datasets, self._steps, self._meter = datasets, steps, meter
        self._number, self._stride = first, stride
        self._ahead = prefetch
        # One thread more, for telling the node where this is, which no batch waits for.
        self._pool = ThreadPoolExecutor(prefetch + 2, thread_name_prefix="forebay-fetch")
        self._tell, self._told = tell, time.monotonic()
        if tell is not None and state is not None:
            before = steps.step(first - 1) if first else None
            self._pool.submit(tell, before.next if before else state)
        self._waiting: deque[Future[Fetched]] = deque()
        self._ended = False

    def _top_up(self) -> None:
        while not self._ended and len(self._waiting) <= self._ahead:
            step = self._steps.step(self._number)
            if step is None:
                self._ended = True
                return
            self._number += self._stride
            self._waiting.append(self._pool.submit(self._fetch, step))

    def _fetch(self, step: Step) -> Fetched:
        began = time.perf_counter()
        rows = read(self._datasets, None, step.rows, step.sources)
        node = rows.node_seconds
        waited = max(0.0, time.perf_counter() - began - sum(node.values()))
        told = {f"{name}_s": seconds for name, seconds in node.items() if name in NODE_TIMES}
        self._meter.add(network_s=waited, bytes=rows.nbytes, **told)
        return Fetched(step, rows)

    def next(self) -> Fetched | None:
        self._top_up()
        if not self._waiting:
            return None
        # It stays in its place until it is there: a wait that Ctrl-C ends loses nothing.
        fetched = self._waiting[0].result()
        self._waiting.popleft()
        if self._tell is not None and time.monotonic() - self._told > TELL_SECONDS:
            # The node may have forgotten it: it was started anew, or was not asked for anything for
            # long.
            self._told = time.monotonic()
            self._pool.submit(self._tell, fetched.step.next)
        self._top_up()
        return fetched

    def close(self) -> None:
        self._ended = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def read(
    datasets: Sequence[Dataset],
    columns: Sequence[str] | None,
    rows: np.ndarray,
    sources: np.ndarray | None,
) -> Rows:
    """Rows of one dataset, or of several: ``sources`` says which each is of."""
    if sources is None:
        return Rows([datasets[0].read(rows, columns)], rows)
    parts = {int(s): datasets[s].read(rows[sources == s], columns) for s in np.unique(sources)}
    return Rows.gathered(parts, rows, sources)
