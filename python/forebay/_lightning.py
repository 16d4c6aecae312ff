"""What Lightning has taken from a loader and not trained on yet."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: Where Lightning takes batches for its loops, under both of its names.
FETCHERS = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")
#: And where it gets ready to train.
FITS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")


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
    found = (frame for frame in _callers() if frame.f_globals.get("__name__") in FETCHERS)
    frame = next(found, None)
    return None if frame is None else frame.f_locals.get("self")


def trains_from_workers_with_states() -> bool:
    """Whether Lightning gets ready to train from a ``StatefulDataLoader`` with workers, and asks it
    here, in this thread, how many batches there are. The states of workers come with the batches,
    and count those that are taken ahead.
    """
    stateful = sys.modules.get("torchdata.stateful_dataloader")
    if stateful is None or not any(module in sys.modules for module in FITS):
        return False
    frames = list(_callers())
    loaders = (frame.f_locals.get("self") for frame in frames)
    return any(
        isinstance(loader, stateful.StatefulDataLoader) and loader.num_workers > 0
        for loader in loaders
    ) and any(frame.f_globals.get("__name__") in FITS for frame in frames)


def _callers() -> Iterator[FrameType]:
    """The frames of this thread, where Lightning may be among them."""
    if not any(module in sys.modules for module in FETCHERS):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
