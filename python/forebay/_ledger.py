"""What a report needs to know of a loop: per epoch, why it waited, what it used while it waited and
while it worked, and how it went over time.

Bounded: the last epochs are kept apart, and the line over time has a fixed number of bins, whose
width doubles when they are full. Of what was used, sums are kept, and nothing of single batches.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._meanwhile import Meanwhile, Used
from ._readings import SAMPLED, STAGES, Domain, Readings, add_up

#: Epochs that are kept apart; what was in earlier ones stays in the sums.
EPOCHS_KEPT = 100
#: Bins of the line over time, and how long one is at first.
BINS = 240
BIN_SECONDS = 0.1

#: Stages whose joules the next sample tells: those of this epoch, and of some before it if they are
#: shorter than the time between samples.
OPEN_MAX = 32


@dataclass
class OfEpoch:
    """Sums of one epoch."""

    sums: dict[str, float] = field(default_factory=dict)
    #: CPU time and energy in the loops over it, by stage, all with the same sensors; empty: not
    #: read twice.
    stages: dict[str, Readings] = field(default_factory=dict)
    #: Energy of the node's machine by stage, as far as the node has told it.
    node: dict[str, Readings] = field(default_factory=dict)

    @property
    def used(self) -> Readings | None:
        """CPU time and energy of all stages together; None: not read twice."""
        parts = list(self.stages.values())
        return None if not parts else functools.reduce(Readings.plus, parts)

    def add(self, amounts: dict[str, float]) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount

    def use(self, stages: Mapping[str, Readings]) -> None:
        """Adds what was used here."""
        add_up(self.stages, stages)

    def use_at_node(self, stages: Mapping[str, Readings]) -> None:
        """Adds what the node's machine used."""
        add_up(self.node, stages)


def readings() -> Readings:
    """CPU time of this process so far, and joules of this machine by the last sample."""
    if METER is None:
        return Readings(time.process_time(), {})
    return Readings(time.process_time(), METER(), time.time() % SAMPLED)


#: Reads the energy of this machine; set by :mod:`forebay.energy` where there is any to read.
METER: Callable[[], dict[Domain, float]] | None = None


class Shares:
    """Shares what was used among the stages of a loop, as far as sensors tell it.

    Counters are read where a stage ends. CPU time is that of this moment, so each stage has its
    own. Joules are those of the last sample: what a new one adds is shared among the stages between
    it and the one before by the time that they took of it. So a stage of seconds has its own
    joules, but for a part of the two samples at its ends; what is shorter than the time between two
    samples has a part of theirs. No joule is lost or counted twice.
    """

    def __init__(self, add: Callable[[int, dict[str, Readings]], None]) -> None:
        self._add = add
        #: When the last stage ended, what was read there, and what is shared already.
        self._at: float | None = None
        self._last = self._shared = Readings(0.0, {})
        #: Seconds and CPU seconds of stages by epoch, of which the joules are not there yet.
        self._open: dict[tuple[int, str], tuple[float, float]] = {}

    def begin(self, at: float, now: Readings) -> None:
        """A loop begins: what was used before is of no stage."""
        self._share(self._last)
        self._at, self._last, self._shared = at, now, now

    def end(self, epoch: int, stage: str, at: float, now: Readings) -> None:
        """A stage ends, which began where the one before ended."""
        if self._at is None:
            self.begin(at, now)
            return
        took = max(0.0, at - self._at)
        is_new = now.joules != self._shared.joules
        # The newest sample came within this stage, or it would have been seen before.
        after = min(took, now.age) if is_new else 0.0
        seconds, cpu = self._open.get((epoch, stage), (0.0, 0.0))
        cpu += now.cpu_seconds - self._last.cpu_seconds
        self._open[epoch, stage] = seconds + took - after, cpu
        self._at, self._last = at, now
        if is_new or len(self._open) >= OPEN_MAX:
            self._share(now)
            self._open = {(epoch, stage): (after, 0.0)} if after else {}

    def settle(self) -> None:
        """Adds the CPU time by now; the joules of the last stages come with the next sample."""
        left = {key: (seconds, 0.0) for key, (seconds, _) in self._open.items()}
        self._share(self._last)
        self._open = left

    def _share(self, now: Readings) -> None:
        joules = now.since(self._shared).joules
        in_all = sum(seconds for seconds, _ in self._open.values())
        for epoch in dict.fromkeys(epoch for epoch, _ in self._open):
            used = {}
            for stage in STAGES:
                seconds, cpu = self._open.get((epoch, stage), (0.0, 0.0))
                part = ((epoch, stage) in self._open) / len(self._open)
                if in_all > 0:
                    part = seconds / in_all
                used[stage] = Readings(cpu, {of: part * j for of, j in joules.items()})
            self._add(epoch, used)
        self._open, self._shared = {}, now


class Ledger:
    """Adds up what a report shows. Any thread may add; times are ``time.perf_counter()``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meanwhile = Meanwhile()
        self._forget()
        self._stage_at = time.perf_counter()
        #: Nothing before this moment counts.
        self._since = -math.inf

    def reset(self, at: float) -> None:
        """Counts anew from this moment, which is now. The stage that goes on, if there is one,
        begins here: for its seconds as for what it uses.
        """
        now = readings()
        with self._lock:
            self._forget()
            self._since = self._stage_at = at
            self._shares.begin(at, now)
            self._meanwhile.reset(at)

    def _forget(self) -> None:
        self._epochs: dict[int, OfEpoch] = {}
        self._earlier = OfEpoch()
        self._shares = Shares(lambda epoch, used: self._of(epoch).use(used))
        self.left_out = 0
        self._zero: float | None = None
        self._bin_seconds = BIN_SECONDS
        self._bins: list[list[float]] = []

    def _counted(self, began: float, ended: float) -> float:
        """Where the part of a stretch of time begins that counts."""
        return min(max(began, self._since), ended)

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
            self._earlier.use(gone.stages)
            self._earlier.use_at_node(gone.node)
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
        began = self._counted(began, ended)
        there = min(max(there, began), ended)
        cut = ended if collating is None else min(max(collating, there), ended)
        self.note(epoch, node_s=there - began, wait_decode_s=cut - there, collate_s=ended - cut)

    def loop_began(self, at: float) -> None:
        """A loop requests its first batch."""
        now = readings()
        with self._lock:
            self._shares.begin(at, now)
            self._meanwhile.begin(at)
            self._stage_at = at

    def handed(
        self,
        epoch: int,
        began: float,
        ended: float,
        samples: int,
        *,
        first: bool,
        is_again: bool = False,
    ) -> None:
        """The loop got a batch that it had requested at ``began``. ``is_again``: it is counted, and
        only the wait is new.
        """
        samples, batches = (0, 0) if is_again else (samples, 1)
        now = readings()
        with self._lock:
            of = self._of(epoch)
            began = self._counted(began, ended)
            waited = ended - began
            of.add({"samples": samples, "batches": batches, "waited_s": waited})
            if first:
                of.add({"first_wait_s": waited})
            self._end_stage(epoch, "waiting", ended, now)
            self._bin(began, ended, 1)
            self._bins[self._index(ended)][0] += samples

    def computed(self, epoch: int, began: float, ended: float) -> None:
        """The loop worked on a batch."""
        now = readings()
        with self._lock:
            began = self._counted(began, ended)
            self._of(epoch).add({"compute_s": ended - began})
            self._end_stage(epoch, "computing", ended, now)
            self._bin(began, ended, 2)

    def loop_ended(self, epoch: int, began: float, at: float) -> None:
        """A loop has taken its last batch, which was of this epoch; since ``began`` it has waited
        for another one.
        """
        now = readings()
        with self._lock:
            if epoch in self._epochs:
                began = self._counted(began, at)
                self._of(epoch).add({"waited_s": at - began})
                self._end_stage(epoch, "waiting", at, now)
                self._bin(began, at, 1)
            self._shares.settle()

    def _end_stage(self, epoch: int, stage: str, at: float, now: Readings) -> None:
        self._shares.end(epoch, stage, at, now)
        self._meanwhile.end(epoch, stage, at)
        self._stage_at = at

    def last_stage(self) -> float:
        """When the last stage ended, or the last loop began."""
        with self._lock:
            return self._stage_at

    def expect_samples(self, are_told: bool) -> None:
        """Whether a node will tell samples of its sensors."""
        with self._lock:
            self._meanwhile.expect(are_told)

    def wanted_samples(self, now: float) -> dict[str, int]:
        """Which of the node's samples are to be asked for."""
        with self._lock:
            return self._meanwhile.wanted(now)

    def node_said(self, answer: dict[str, Any], before: float, after: float) -> bool:
        """The node has told samples of its sensors, as :meth:`Meanwhile.said` takes them. Returns
        whether it need not be asked again.
        """
        with self._lock:
            ready, resets = self._meanwhile.said(answer, before, after), self._meanwhile.resets
        if ready is None:
            return False
        used: Used = {}
        lost = ready.spans
        try:
            # Of many stages this takes a while.
            used, lost = ready.shared()
        finally:
            with self._lock:
                if resets == self._meanwhile.resets:
                    for epoch, stages in used.items():
                        self._of(epoch).use_at_node(stages)
                    self._meanwhile.lose(lost)
        return True

    def at_node(self) -> tuple[bool, bool, dict[int, float]]:
        """Whether the node ever told samples, whether a stage waits for some, and the seconds by
        epoch of which it is not known what the node's machine used.
        """
        with self._lock:
            of = self._meanwhile
            return of.was_told, of.is_waiting, of.unknown()

    def _bin(self, began: float, ended: float, what: int) -> None:
        """Adds a stretch of time to the bins that it is in."""
        self._zero = began if self._zero is None else self._zero
        last = self._index(ended)
        i, at = self._index(began), began
        if i == last:
            self._bins[i][what] += ended - began
            return
        zero = self._zero or 0.0
        for n in range(i, last + 1):
            until = ended if n == last else zero + (n + 1) * self._bin_seconds
            self._bins[n][what] += max(0.0, until - at)
            at = max(at, until)

    def _index(self, at: float) -> int:
        if self._zero is None:
            self._zero = at
        i = int((at - self._zero) / self._bin_seconds)
        if 0 <= i < len(self._bins):
            return i
        i = max(0, i)
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
            self._shares.settle()
            return {
                n: OfEpoch(dict(of.sums), dict(of.stages), dict(of.node))
                for n, of in sorted(self._epochs.items())
            }

    def whole(self) -> OfEpoch:
        """All epochs together."""
        with self._lock:
            self._shares.settle()
            parts = [self._earlier, *(self._epochs[n] for n in sorted(self._epochs))]
            all_of = OfEpoch()
            for part in parts:
                all_of.add(part.sums)
                all_of.use(part.stages)
                all_of.use_at_node(part.node)
            return all_of
