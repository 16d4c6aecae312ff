"""Waiting that any code may end, even a garbage collection in the very thread that waits.

The loops of this package are closed when they are dropped, by whichever thread Python's garbage
collection happens to run in, between any two steps of that thread. With events and conditions of
:mod:`threading` this goes wrong: the thread may hold their lock at that moment, and would wait for
itself for ever; or it is just about to wait, and misses that it was told to end. A ``SimpleQueue``
can be put to at any moment, and keeps what was put until it is taken.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

#: Marks what a signal handler raised.
_INTERRUPTS = "_forebay_interrupts"


def interrupting(error: BaseException) -> None:
    """Notes that a signal handler raised this while something was waited for: that has not failed,
    and may be waited for again.
    """
    setattr(error, _INTERRUPTS, True)


def interrupts(error: BaseException) -> bool:
    """Whether a signal handler raised this while something was waited for."""
    return bool(getattr(error, _INTERRUPTS, False))


class Bell:
    """Wakes threads that wait until something holds."""

    def __init__(self) -> None:
        self._waiting: set[queue.SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Lets all who wait look again. Whoever changes what they look at rings afterwards."""
        for woken in list(self._waiting):
            woken.put(None)

    def wait_until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until this holds, or for ``timeout`` seconds; returns whether it holds."""
        ends = None if timeout is None else time.monotonic() + timeout
        woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Before the first look: whatever changes after it rings this one too.
        self._waiting.add(woken)
        try:
            while not holds():
                left = None if ends is None else ends - time.monotonic()
                if left is not None and left <= 0:
                    return False
                try:
                    woken.get(timeout=left)
                except queue.Empty:
                    return holds()
                except BaseException as e:
                    interrupting(e)
                    raise
            return True
        finally:
            self._waiting.discard(woken)


class Stop(Bell):
    """Whether something is to end. It is set once."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self.ring()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or for ``timeout`` seconds; returns whether it is."""
        return self.wait_until(self.is_set, timeout)

    def wait_or(self, future: Future[Any]) -> None:
        """Waits until it is set, or the future is done."""
        if future.done():
            return
        future.add_done_callback(lambda _: self.ring())
        self.wait_until(lambda: self._is_set or future.done())
