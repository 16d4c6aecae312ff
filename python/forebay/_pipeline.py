"""From steps to batches: fetched, decoded, and handed out in order.

Without threads, the loop itself decodes what was fetched. With threads, one more takes what arrives
and gives it to the pool, or makes the batch itself where that takes less time, at most ``ahead``
batches before the loop; so memory is bounded by the batches in flight (``prefetch``), those being
made (``ahead``) and the one in the loop's hands.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from ._decode import Job, Recipe
from ._fetch import Fetched, Fetcher
from ._plan import Step
from ._pools import Pool, check_process, cut_off, is_exiting
from ._stop import Bell, interrupts
from .stats import Meter


@dataclass(frozen=True)
class Made:
    """A step's batch, and how many of its rows have no sample in it (``on_error="skip"``)."""

    step: Step
    batch: Any
    skipped: int


class Pipeline:
    """Batches of steps, in order. Closed when one of them fails, when it is dropped, and when the
    process ends; a forked child does not touch it.
    """

    def __init__(
        self, fetcher: Fetcher, recipe: Recipe, threads: int, ahead: int, meter: Meter
    ) -> None:
        self._fetcher, self._recipe, self._meter = fetcher, recipe, meter
        self._pid = os.getpid()
        self._belt: _Belt | None = None
        if threads and recipe.works:
            self._belt = _Belt(fetcher, recipe, threads, ahead, meter)
        self._failure: BaseException | None = None
        self._close = weakref.finalize(self, _close, self._pid, self._belt, fetcher)

    def at(self, index: int) -> Made | None:
        """The ``index``-th step here, from 0, and the batch that was made from its rows; None after
        the last, and once this is closed.

        Another call with the same index returns the same, so that Ctrl-C in the middle loses no
        step, nor does what another signal's handler raises while this waits; after a step that
        failed, that failure. Any thread may close it meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._at(index)
        except BaseException as e:
            if self._is_of_step(e):
                # Its traceback leads to whoever asks, and from there to this. What is not closed is
                # known until the process ends, and if it has the failure, so is all of that.
                self._failure = e
                self._close()
            raise

    def _is_of_step(self, error: BaseException) -> bool:
        """Whether this is why a step failed, as far as that is known."""
        if self._belt is not None:
            return self._belt.has_failed(error)
        return isinstance(error, Exception) and not interrupts(error)

    def has_failed(self, error: BaseException) -> bool:
        """Whether this very error ended it."""
        return self._failure is error

    def _at(self, index: int) -> Made | None:
        if self._belt is not None:
            return self._belt.at(index)
        began = time.perf_counter()
        fetched = self._fetcher.at(index)
        if fetched is None:
            if is_exiting() and not self._close.alive:
                # Closed at the exit, which does not wait for a loop in a daemon thread.
                raise cut_off()
            return None
        job = Job(self._recipe, fetched.rows, fetched.step.real, self._meter)
        batch = job.now()
        self._meter.ledger.waited(
            fetched.step.epoch, began, job.there, job.collating, time.perf_counter()
        )
        return Made(fetched.step, batch, job.skipped)

    def check_process(self) -> None:
        """Raises InvalidRequest in a forked child, where the threads of this are not."""
        check_process(self._pid)

    def close(self) -> None:
        """Stops, without waiting for work in progress."""
        self._close()


def _close(pid: int, belt: _Belt | None, fetcher: Fetcher) -> None:
    if pid != os.getpid():
        return
    if belt is not None:
        belt.close()
    fetcher.close()


class _Belt:
    """The thread that takes from the fetcher and gives to the pool. It does not know the pipeline,
    which may be dropped at any time.
    """

    def __init__(
        self, fetcher: Fetcher, recipe: Recipe, threads: int, ahead: int, meter: Meter
    ) -> None:
        self._fetcher, self._recipe, self._threads, self._meter = fetcher, recipe, threads, meter
        self._ahead = max(1, ahead)
        # What was made, by index, and which of it is wanted. Guarded by the lock, which is
        # reentrant: a garbage collection may close this in a thread that is in here.
        self._lock, self._changed = threading.RLock(), Bell()
        self._made: dict[int, tuple[Fetched, Job] | BaseException | None] = {}
        self._wanted = 0
        self._closed = False
        # Closed because the interpreter is ending, which a loop in another thread may not know.
        self._is_cut_off = False
        self._pid = os.getpid()
        self._pool = Pool(threads, thread_name_prefix="forebay-decode")
        _open.add(self)
        threading.Thread(target=self._run, name="forebay-belt", daemon=True).start()

    def _run(self) -> None:
        index = 0
        while not self._closed:
            entry: tuple[Fetched, Job] | BaseException | None
            try:
                fetched = self._fetcher.at(index)
                entry = None
                if fetched is not None:
                    job = Job(
                        self._recipe,
                        fetched.rows,
                        fetched.step.real,
                        self._meter,
                        lambda: self._closed,
                    )
                    if self._recipe.is_short:
                        entry = fetched, job.make()
                    else:
                        entry = fetched, job.start(self._pool, self._threads)
                        job.when_done(self._changed.ring)
            except BaseException as e:
                entry = e
            self._changed.wait_until(partial(self._has_room, index))
            with self._lock:
                self._made[index] = entry
            self._changed.ring()
            if not isinstance(entry, tuple):
                break
            index += 1
        # What was given to it is still made, unless this is closed.
        self._pool.shutdown(wait=False)

    def _has_room(self, index: int) -> bool:
        """Whether it is time for this one to be there; or nobody wants it any more."""
        return self._closed or index - self._wanted < self._ahead

    def at(self, index: int) -> Made | None:
        began = time.perf_counter()
        with self._lock:
            for gone in [i for i in self._made if i < index]:
                # The end, and the error that caused it, stay.
                if isinstance(self._made[gone], tuple):
                    del self._made[gone]
                else:
                    index = gone
            self._wanted = index
        self._changed.ring()

        def is_made() -> bool:
            return self._closed or self._is_made(index)

        waits = not is_made()
        if waits:
            self._changed.wait_until(is_made)
        with self._lock:
            entry = None if self._closed else self._made[index]
            if self._is_cut_off:
                # What the loop would have met without that stays: its end, or an error.
                if index not in self._made or isinstance(self._made[index], tuple):
                    raise cut_off()
                entry = self._made[index]
        if not isinstance(entry, tuple):
            if entry is None:
                return None
            raise entry
        fetched, job = entry
        ended = time.perf_counter()
        there = job.there if waits else ended
        self._meter.ledger.waited(fetched.step.epoch, began, there, job.collating, ended)
        batch = job.result()
        return Made(fetched.step, batch, job.skipped)

    def has_failed(self, failure: BaseException) -> bool:
        """Whether this is why a batch could not be made, and not what a signal handler raised while
        it was waited for, as Ctrl-C.
        """
        with self._lock:
            return any(
                entry[1].has_failed(failure) if isinstance(entry, tuple) else entry is failure
                for entry in self._made.values()
            )

    def _is_made(self, index: int) -> bool:
        entry = self._made.get(index, ...)
        return entry is not ... and (not isinstance(entry, tuple) or entry[1].done())

    def close(self, is_exit: bool = False) -> None:
        with self._lock:
            self._is_cut_off |= is_exit and not self._closed
            self._closed = True
        self._changed.ring()
        self._pool.shutdown(wait=False, cancel_futures=True)


#: Those that are there: the interpreter waits for their threads when it ends.
_open: weakref.WeakSet[_Belt] = weakref.WeakSet()


def _close_all() -> None:
    for belt in list(_open):
        # A forked child does not touch those of its parent, whose locks may be held for ever here.
        if belt._pid == os.getpid():
            belt.close(is_exit=True)


# Before the threads of pools are waited for: after an interrupt, nobody waits for what was decoded
# ahead. (concurrent.futures waits for them by the same function.)
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_close_all)
