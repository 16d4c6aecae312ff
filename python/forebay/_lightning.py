"""What Lightning has taken from a loader and not trained on yet."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

#: Where Lightning takes batches for its loops, under both of its names.
FETCHERS = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")


class Ahead:
    """The loop of Lightning that takes batches from a loader, if one does.

    Where Lightning is not told how many batches there are, it takes the next one before it trains
    on the one before, to know whether that is the last. A state must not count it: training that
    goes on from there would never see it.
    """

    def __init__(self) -> None:
        self._fetcher: weakref.ref[Any] | None = None
        # Where it puts the batches that it takes ahead. It has another list for each of its loops,
        # and leaves in the old one what it took and never trains on.
        self._batches: list[Any] | None = None

    def look(self) -> None:
        """Looks for it among the callers of this thread: a loop begins."""
        fetcher = _fetcher()
        self._fetcher = None if fetcher is None else weakref.ref(fetcher)
        self._batches = None

    def takes(self) -> None:
        """A batch is about to be yielded to it."""
        if self._fetcher is not None:
            self._batches = getattr(self._fetcher(), "batches", None)

    def __reduce__(self) -> Any:
        # A copy is not in that loop.
        return Ahead, ()

    @property
    def holds_one(self) -> bool:
        """Whether the batch that was yielded last is not trained on yet."""
        return bool(self._batches)


def _fetcher() -> Any:
    if not any(module in sys.modules for module in FETCHERS):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in FETCHERS:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
