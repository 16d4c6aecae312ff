"""What a report needs to know of a loop: per epoch, why it waited, and how it went over time.

Bounded: the last epochs are kept apart, and the line over time has a fixed number of bins, whose
width doubles when they are full.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: What joules are of: source, domain, and whether they are an estimate.
Domain = tuple[str, str, bool]

#: Epochs that are kept apart; what was in earlier ones stays in the sums.
EPOCHS_KEPT = 100
#: Bins of the line over time, and how long one is at first.
BINS = 240
BIN_SECONDS = 0.1


@dataclass
class OfEpoch:
    """Sums of one epoch."""

    sums: dict[str, float] = field(default_factory=dict)
    #: CPU time and energy in the loops over it, each from its first batch on; None: not read twice.
    used: Readings | None = None

    def add(self, amounts: dict[str, float]) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount

    def use(self, used: Readings | None) -> None:
        """Adds what was used. A sensor that was not read each time has no figure."""
        before = self.used
        if used is None or before is None:
            self.used = used or before
            return
        both = before.joules.keys() & used.joules.keys()
        joules = {domain: before.joules[domain] + used.joules[domain] for domain in both}
        self.used = Readings(before.cpu_seconds + used.cpu_seconds, joules)


@dataclass(frozen=True)
class Readings:
    """Totals at one moment, or what came between two."""

    cpu_seconds: float
    joules: dict[Domain, float]

    def since(self, before: Readings) -> Readings:
        """What came since then, by what was read both times."""
        both = ((domain, now) for domain, now in self.joules.items() if domain in before.joules)
        joules = {domain: now - before.joules[domain] for domain, now in both}
        return Readings(self.cpu_seconds - before.cpu_seconds, joules)


def readings() -> Readings:
    """CPU time of this process so far, and joules of this machine by the last sample."""
    return Readings(time.process_time(), METER() if METER is not None else {})


#: Reads the energy of this machine; set by :mod:`forebay.energy` where there is any to read.
METER: Callable[[], dict[Domain, float]] | None = None


class Ledger:
    """Adds up what a report shows. Any thread may add; times are ``time.perf_counter()``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._epochs: dict[int, OfEpoch] = {}
            self._earlier = OfEpoch()
            #: Totals when the last batch was taken.
            self._last: Readings | None = None
            self.left_out = 0
            self._zero: float | None = None
            self._bin_seconds = BIN_SECONDS
            self._bins: list[list[float]] = []

    def _of(self, epoch: int) -> OfEpoch:
        found = self._epochs.get(epoch)
        if found is not None:
            return found
        if len(self._epochs) >= EPOCHS_KEPT:
            oldest = min(self._epochs)
            if epoch < oldest:
                return self._earlier
            gone = self._epochs.pop(oldest)
            self._earlier.add(gone.sums)
            self._earlier.use(gone.used)
            self.left_out += 1
        found = self._epochs[epoch] = OfEpoch()
        return found

    def note(self, epoch: int, **amounts: float) -> None:
        """Adds to sums of an epoch."""
        with self._lock:
            self._of(epoch).add(amounts)

    def waited(
        self, epoch: int, began: float, there: float, collating: float | None, ended: float
    ) -> None:
        """A batch was waited for from ``began`` to ``ended``; its rows were ``there`` meanwhile, or
        before, and it began to be put together at ``collating``.
        """
        there = min(max(there, began), ended)
        cut = ended if collating is None else min(max(collating, there), ended)
        self.note(epoch, node_s=there - began, wait_decode_s=cut - there, collate_s=ended - cut)

    def handed(self, epoch: int, began: float, ended: float, samples: int, *, first: bool) -> None:
        """The loop got a batch that it had requested at ``began``."""
        now = readings()
        with self._lock:
            of = self._of(epoch)
            waited = ended - began
            of.add({"samples": samples, "batches": 1, "waited_s": waited})
            if first:
                of.add({"first_wait_s": waited})
            # A loop begins a little late, by one batch; it is the same moment for all figures.
            self._use(of, now, goes_on=not first)
            self._bin(began, ended, 1)
            self._bins[self._index(ended)][0] += samples

    def computed(self, epoch: int, began: float, ended: float) -> None:
        """The loop worked on a batch."""
        with self._lock:
            self._of(epoch).add({"compute_s": ended - began})
            self._bin(began, ended, 2)

    def _use(self, of: OfEpoch, now: Readings, goes_on: bool) -> None:
        if goes_on and self._last is not None:
            of.use(now.since(self._last))
        self._last = now

    def loop_ended(self, epoch: int) -> None:
        """A loop has taken its last batch, which was of this epoch."""
        now = readings()
        with self._lock:
            if epoch in self._epochs:
                self._use(self._epochs[epoch], now, goes_on=True)

    def _bin(self, began: float, ended: float, what: int) -> None:
        """Adds a stretch of time to the bins that it is in."""
        self._zero = began if self._zero is None else self._zero
        last = self._index(ended)
        i, at = self._index(began), began
        zero = self._zero or 0.0
        for n in range(i, last + 1):
            until = ended if n == last else zero + (n + 1) * self._bin_seconds
            self._bins[n][what] += max(0.0, until - at)
            at = max(at, until)

    def _index(self, at: float) -> int:
        if self._zero is None:
            self._zero = at
        i = max(0, int((at - self._zero) / self._bin_seconds))
        while i >= BINS:
            if len(self._bins) % 2:
                self._bins.append([0.0, 0.0, 0.0])
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [[x + y for x, y in zip(a, b, strict=True)] for a, b in pairs]
            self._bin_seconds *= 2
            i = max(0, int((at - self._zero) / self._bin_seconds))
        while len(self._bins) <= i:
            self._bins.append([0.0, 0.0, 0.0])
        return i

    def timeline(self) -> dict[str, Any] | None:
        """The line over time, as the report has it."""
        with self._lock:
            if not self._bins:
                return None
            return {
                "bin_seconds": self._bin_seconds,
                "bins": [
                    {"samples": int(n), "waited_s": waited, "compute_s": compute}
                    for n, waited, compute in self._bins
                ],
            }

    def epochs(self) -> dict[int, OfEpoch]:
        """Copies of the epochs that are kept apart, in order."""
        with self._lock:
            return {n: OfEpoch(dict(of.sums), of.used) for n, of in sorted(self._epochs.items())}

    def whole(self) -> OfEpoch:
        """All epochs together."""
        with self._lock:
            parts = [self._earlier, *(self._epochs[n] for n in sorted(self._epochs))]
            all_of = OfEpoch()
            for part in parts:
                all_of.add(part.sums)
                all_of.use(part.used)
            return all_of
