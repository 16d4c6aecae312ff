"""Loops that are closed between any two steps of what a thread does, as by a garbage collection in
that thread."""

from __future__ import annotations

import sys
import threading
import time

import forebay
import numpy as np
import pytest
from forebay._fetch import Fetched, Pull, patiently
from forebay._pipeline import _Belt
from forebay._plan import Step
from forebay._stop import Stop
from forebay.stats import Meter

#: Files of which each call and return is such a moment.
WITHIN = ("_fetch.py", "_pipeline.py", "_stop.py", "threading.py", "_pools.py")


class Closes:
    """Closes what it is given at the ``at``-th call or return in a thread that waits there."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.thread = at, 0, None
        self.close = None

    def begin(self) -> None:
        """From here on, in this thread."""
        self.thread = threading.current_thread()
        sys.setprofile(self._step)

    def _step(self, frame, event, argument) -> None:
        if not frame.f_code.co_filename.endswith(WITHIN):
            return
        self.seen += 1
        if self.seen == self.at:
            sys.setprofile(None)
            self.close()


class Rows:
    nbytes, node_seconds, node_bytes = 0, {}, {}

    def __len__(self) -> int:
        return 1


def step(number: int) -> Step:
    return Step(number, 0, np.zeros(1, np.uint64), None, 1, {"epoch": 0, "position": number})


def reaches(closes: Closes, seconds: float) -> bool:
    """Whether the thread comes to the step at which it is closed, and not first to a wait. The
    first ten are before any wait: they come, however busy the machine is.
    """
    until = time.monotonic() + (30 if closes.at <= 10 else seconds)
    while closes.seen < closes.at and time.monotonic() < until:
        time.sleep(0.001)
    return closes.seen >= closes.at


def ends(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


class Steps:
    def step(self, number: int) -> Step:
        return step(number)


class Down:
    """A dataset whose node cannot be reached: the first question begins to be counted."""

    def __init__(self, closes: Closes) -> None:
        self.closes = closes

    def fetch(self, rows, columns):
        if self.closes.thread is None:
            self.closes.begin()
        raise forebay.ConnectionFailed("it is down")


def test_a_thread_that_asks_again_ends_when_its_loop_is_collected_there():
    at = 0
    while True:
        at += 1
        closes = Closes(at)
        pull = Pull([Down(closes)], Steps(), 0, 1, 0, Meter(), 2.0, None, {})
        closes.close = pull.close
        loop = threading.Thread(target=lambda pull=pull: pull._top_up(0), daemon=True)
        loop.start()
        loop.join()
        if not reaches(closes, 0.3):
            # It waits for longer than that.
            pull.close()
            assert ends(closes.thread)
            break
        assert ends(closes.thread), f"closed at step {at}"
        # It does not wait for the end of its pause.
    assert at > 10


class Fetches:
    """Steps without end, each there at once."""

    def __init__(self, closes: Closes) -> None:
        self.closes = closes

    def at(self, index: int):
        if index == 3:
            # The next one has to wait for the loop.
            self.closes.begin()
        return Fetched(step(index), Rows())

    def close(self) -> None:
        pass


class Makes:
    decodes_rows, is_of_many = False, False

    def __init__(self, is_short):
        self.is_short = is_short

    def finish(self, rows, samples, real):
        return "made"


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("takes", [False, True])
def test_the_thread_that_makes_batches_ends_when_its_loop_is_collected_there(takes, is_short):
    at = 0
    while True:
        at += 1
        closes = Closes(at)
        belt = _Belt.__new__(_Belt)
        closes.close = lambda belt=belt: belt.close()
        belt.__init__(Fetches(closes), Makes(is_short), 1, 3, Meter())
        if takes:
            # None where it was closed by then.
            assert (made := belt.at(0)) is None or made.batch == "made"
        if not reaches(closes, 0.2):
            belt.close()
            assert ends(closes.thread)
            break
        assert ends(closes.thread), f"closed at step {at}"
    assert at > 10


@pytest.mark.parametrize("stops", [True, False])
def test_what_was_stopped_does_not_say_for_how_long_it_was_asked(stops):
    stop = Stop()

    def ask():
        if stops:
            stop.set()
        raise forebay.Busy("over its limits")

    with pytest.raises(forebay.Busy) as caught:
        patiently(ask, 60.0 if stops else 0.2, stop, Meter())
    assert ("retry_for=" in caught.value.message) == (not stops)
