"""Work that is given to pools of threads, and what becomes of it when the interpreter ends, or the
process is forked.

Python ends the threads of pools when its main thread has ended, and other threads may go on: a loop
in one of them must not take that for the end of its rows. A forked child has no threads of its
parent: what was given to them is never done there.
"""

from __future__ import annotations

import concurrent.futures.thread
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from .errors import Error, InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")


def submit(
    pool: ThreadPoolExecutor,
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
    except RuntimeError as e:
        if is_closed():
            return None
        if is_exiting():
            raise cut_off() from e
        raise


def is_exiting() -> bool:
    """Whether the interpreter is only waiting for its threads."""
    return bool(getattr(concurrent.futures.thread, "_shutdown", False))


def cut_off() -> Error:
    """The error of a loop that cannot go on because the interpreter is ending."""
    return Error(
        "the interpreter is ending, and no thread reads or decodes ahead any more: this loop breaks"
        " off before its end",
        hint="let the main thread wait for the loop: thread.join()",
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
