"""From steps to batches: fetched, decoded, and handed out in order.

Without threads, the loop itself decodes what was fetched. With threads, one more takes what arrives and gives it to the pool, at most ``ahead`` batches
before the loop; so memory is bounded by the batches on their way (``prefetch``), those being made (``ahead``) and the one in the loop's hands.
"""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ._decode import Job, Recipe
from ._fetch import Fetched, Fetcher
from ._plan import Step
from .rows import Rows
from .stats import Meter

#: How often a thread that waits for room looks whether it is still wanted.
LOOK_SECONDS = 0.1


class Pipeline:
    """Batches of steps, in order. Closed when it is dropped."""

    def __init__(
        self, fetcher: Fetcher, recipe: Recipe, threads: int, ahead: int, meter: Meter
    ) -> None:
        self._fetcher, self._recipe, self._meter = fetcher, recipe, meter
        self._belt: _Belt | None = None
        self._held: Fetched | None = None
        if threads and (recipe.decodes_rows or recipe.pin or recipe.collate is not None):
            self._belt = _Belt(fetcher, recipe, threads, ahead, meter)
        self._close = weakref.finalize(self, _close, self._belt, fetcher)

    def next(self) -> tuple[Step, Rows, Any] | None:
        """The next step, its rows, and the batch that was made of them; None after the last."""
        if self._belt is not None:
            return self._belt.next()
        # Held until its batch is made: Ctrl-C in the middle of a decode loses no step.
        self._held = fetched = self._held or self._fetcher.next()
        if fetched is None:
            return None
        batch = Job(self._recipe, fetched.rows, fetched.step.real, self._meter).now()
        self._held = None
        return fetched.step, fetched.rows, batch

    def close(self) -> None:
        """Stops, without waiting for what is under way."""
        self._close()


def _close(belt: _Belt | None, fetcher: Fetcher) -> None:
    if belt is not None:
        belt.closed.set()
    fetcher.close()


class _Belt:
    """The thread that takes from the fetcher and gives to the pool. It does not know the pipeline, which may be dropped at any time."""

    def __init__(
        self, fetcher: Fetcher, recipe: Recipe, threads: int, ahead: int, meter: Meter
    ) -> None:
        self.closed = threading.Event()
        self._fetcher, self._recipe, self._threads, self._meter = fetcher, recipe, threads, meter
        self._queue: queue.Queue[tuple[Fetched, Job] | BaseException | None] = queue.Queue(
            max(1, ahead)
        )
        self._held: tuple[Fetched, Job] | BaseException | None = None
        self._ended = False
        threading.Thread(target=self._run, name="forebay-belt", daemon=True).start()

    def _run(self) -> None:
        with ThreadPoolExecutor(self._threads, thread_name_prefix="forebay-decode") as pool:
            while not self.closed.is_set():
                entry: tuple[Fetched, Job] | BaseException | None
                try:
                    fetched = self._fetcher.next()
                    entry = None
                    if fetched is not None:
                        entry = (
                            fetched,
                            Job(self._recipe, fetched.rows, fetched.step.real, self._meter).start(
                                pool, self._threads
                            ),
                        )
                except BaseException as e:
                    entry = e
                if not self._put(entry) or not isinstance(entry, tuple):
                    break
            pool.shutdown(wait=False, cancel_futures=self.closed.is_set())

    def _put(self, entry: tuple[Fetched, Job] | BaseException | None) -> bool:
        while not self.closed.is_set():
            try:
                self._queue.put(entry, timeout=LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> tuple[Step, Rows, Any] | None:
        if self._ended or self.closed.is_set():
            return None
        if self._held is None:
            self._held = self._queue.get()
        if not isinstance(self._held, tuple):
            self._ended = True
            if self._held is None:
                return None
            raise self._held
        fetched, job = self._held
        batch = job.result()
        self._held = None
        return fetched.step, fetched.rows, batch
