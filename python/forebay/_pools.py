"""Work that is given to pools of threads, and what becomes of it when the interpreter ends, or the
process is forked.

Python ends the threads of pools when its main thread has ended, and other threads may go on: a loop
in one of them must not take that for the end of its rows. A forked child has no threads of its
parent: what was given to them is never done there.
"""

from __future__ import annotations

import concurrent.futures.thread
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from .errors import Error, InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Threads, which begin nothing any more once the interpreter is ending."""

    # Here a generator finds it that is closed when the interpreter ends, and the names of modules
    # are gone.
    _empty = queue.Empty

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Gives work to it.

        Raises:
            Error: The interpreter is ending.
        """
        try:
            future = super().submit(call, *args, **kwargs)
        except RuntimeError as e:
            if is_exiting():
                raise cut_off() from e
            raise
        if self._shutdown:
            # Meanwhile, and perhaps no thread is left that would do it.
            future.cancel()
        return future

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            # The system gives no more threads, or the interpreter is ending. What was given waits
            # for those that are there.
            if not self._threads or is_exiting():
                raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:
            super().shutdown(cancel_futures=cancel_futures)
            return
        # Without a lock: a garbage collection may call this in a thread that gives work, and has
        # the locks of that, or in one that has a lock for which such a thread waits.
        self._shutdown = True
        given: queue.SimpleQueue[Any] = self._work_queue
        while cancel_futures:
            try:
                work = given.get_nowait()
            except self._empty:
                break
            if work is not None:
                work.future.cancel()
        given.put(None)


def submit(
    pool: Pool,
    is_closed: Callable[[], bool],
    call: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Future[T] | None:
    """Gives work to a pool; None if it was closed meanwhile.

    Raises:
        Error: The interpreter is ending.
    """
    try:
        return pool.submit(call, *args, **kwargs)
    except (RuntimeError, Error):
        if is_closed():
            return None
        raise


def is_exiting() -> bool:
    """Whether the interpreter is only waiting for its threads."""
    return bool(getattr(concurrent.futures.thread, "_shutdown", False))


def cut_off() -> Error:
    """The error of what cannot go on because the interpreter is ending."""
    return Error(
        "the interpreter is ending, and no thread reads or decodes any more: this breaks off before"
        " its end",
        hint="let the main thread wait for it: thread.join(); in atexit it is too late",
    )


def check_process(pid: int) -> None:
    """Raises InvalidRequest in a child that was forked from the process ``pid``, where the loop
    began.
    """
    if pid != os.getpid():
        raise InvalidRequest(
            "this loop began in the process that this one was forked from, and goes on there",
            hint="begin another one in this process, with iter()",
        )
