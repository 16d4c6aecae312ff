"""What the node's machine used while a loop waited, and while it computed.

The node samples its sensors ten times a second, and remembers ten minutes of that. A thread asks
for the samples now and then, and the report asks for the last ones. A stage of the loop has what
came between its beginning and its end, interpolated between samples. All times are those of
``time.perf_counter()`` here: each answer says what time it is at the node, so the clocks of the
machines need not agree.

Bounded: stages that are shorter than the time between two samples are kept together until the
samples are there, and of the samples only those are kept that a stage still needs.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _node
from ._readings import SAMPLED, STAGES, Domain, Readings, add_up
from .errors import Error, InvalidRequest, NotFound, Unsupported

if TYPE_CHECKING:
    from ._forebay import Client
    from ._ledger import Ledger

log = logging.getLogger("forebay")
#: How often the node is asked, and how many seconds it remembers.
ASKED_EVERY = 20.0
REMEMBERED = 600
#: Without a stage that ends for so long, the thread ends; the next one begins another thread.
IDLE_SECONDS = 900.0
#: Stages that wait for their samples: at least 1,000 s of them.
SPANS_MAX = 20_000
#: Epochs that have stages of which it will never be known. Of more, the earliest are one.
LOST_MAX = 1000
#: Samples that are farther from each other say nothing of a moment between them.
GAP_SECONDS = 1.0
#: If a question took longer than twice this, its answer does not say what time it is at the node.
#: And how much two clocks move apart in a second, at the most.
UNSURE_SECONDS = 0.5
DRIFT = 1e-4
#: A clock that is farther from where it was to be has jumped.
JUMP_SECONDS = 0.05
#: Answers that belong together: of many sensors, one answer holds few samples.
ANSWERS_MAX = 64
#: How long the end of the interpreter waits for answers.
LEAVE_SECONDS = 1.0


@dataclass
class Span:
    """Stages that followed each other, and the seconds of each by epoch."""

    began: float
    ended: float
    stages: dict[tuple[int, str], float]


#: The moment of a sample at the node, the same here, and what its sensors have measured.
Sample = tuple[int, float, list[float | None]]
#: What was used, by epoch and stage.
Used = dict[int, dict[str, Readings]]


@dataclass
class Ready:
    """Stages that ended before the last of these samples."""

    spans: list[Span]
    samples: list[Sample]
    sensors: list[dict[str, Any]]
    #: Samples say nothing of what was before.
    since: float

    def shared(self) -> tuple[Used, list[Span]]:
        """What was used in these stages, and the stages of which it is not known."""
        if not self.spans:
            return {}, []
        times = np.array([at for _, at, _ in self.samples])
        totals = np.full((len(self.sensors), len(times)), np.nan)
        for i, (_, _, sample) in enumerate(self.samples):
            for n, total in enumerate(sample[: len(self.sensors)]):
                if total is not None:
                    totals[n, i] = total
        edges = np.array([(span.began, span.ended) for span in self.spans])
        after = np.searchsorted(times, edges)
        between = times[np.minimum(after, len(times) - 1)] - times[np.maximum(after - 1, 0)]
        # Before the first sample, and where there were none for a while, nothing is known.
        first = max(self.since, times[0])
        known = ((edges >= first) & (between <= GAP_SECONDS)).all(axis=1)
        amounts = {}
        for sensor, of_sensor in zip(self.sensors, totals, strict=True):
            at = np.interp(edges, times, of_sensor)
            domain = (str(sensor["source"]), str(sensor["domain"]), bool(sensor["estimate"]))
            amounts[domain] = np.maximum(at[:, 1] - at[:, 0], 0.0)
        used: Used = {}
        for i in np.flatnonzero(known).tolist():
            # A sensor that was not there at both ends has no figure.
            joules = {d: float(of[i]) for d, of in amounts.items() if math.isfinite(of[i])}
            _share(joules, self.spans[i], used)
        return used, [span for span, ok in zip(self.spans, known, strict=True) if not ok]


def _share(joules: dict[Domain, float], span: Span, used: Used) -> None:
    """Adds joules to the stages of a span, by the time that each of them took."""
    whole = sum(span.stages.values())
    for epoch in dict.fromkeys(epoch for epoch, _ in span.stages):
        stages = {}
        for stage in STAGES:
            part = span.stages.get((epoch, stage), 0.0) / whole if whole > 0 else 0.0
            stages[stage] = Readings(0.0, {d: part * j for d, j in joules.items()})
        add_up(used.setdefault(epoch, {}), stages)


class Clock:
    """The node's clock, as far as answers tell it."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._unsure, self._heard = math.inf, 0.0

    @property
    def is_known(self) -> bool:
        return self._ahead is not None

    def hear(self, now_ns: int, before: float, after: float) -> bool:
        """A question was asked ``before`` and answered ``after`` it was this moment at the node.
        False: that cannot be, by what was known of the clock.
        """
        # What was known is less and less sure.
        was = self._unsure + DRIFT * (after - self._heard)
        if self._ahead is not None:
            at = self.here(now_ns)
            if not before - was - JUMP_SECONDS <= at <= after + was + JUMP_SECONDS:
                return False
        unsure = (after - before) / 2
        if unsure <= min(was, UNSURE_SECONDS):
            self._ahead = now_ns / 1e9 - (before + after) / 2
            self._unsure, self._heard = unsure, after
        return True

    def here(self, at_ns: int) -> float:
        """A moment of the node, by the clock here."""
        assert self._ahead is not None
        return at_ns / 1e9 - self._ahead


class Meanwhile:
    """Shares what the node's sensors measured among the stages of a loop. Not synchronized."""

    def __init__(self) -> None:
        #: Whether a node will tell samples.
        self._is_told = False
        #: When the stage began that goes on.
        self._at: float | None = None
        #: Which node the samples are of, and those that are still needed.
        self._node: str | None = None
        self._clock = Clock()
        self._kept: list[Sample] = []
        self._since = -math.inf
        #: How often it began anew.
        self.resets = 0
        self._forget()

    def reset(self, at: float) -> None:
        """Forgets what was before this moment, but not where in time the node is. The stage that
        goes on begins here.
        """
        self.resets += 1
        self._forget()
        self._at = at

    def _forget(self) -> None:
        self._spans: deque[Span] = deque()
        #: Seconds of stages of which it will never be known, by epoch.
        self._lost: dict[int, float] = {}

    def expect(self, are_told: bool) -> None:
        """Whether samples will be told. What waits for some that do not come is lost."""
        self._is_told = are_told
        if not are_told:
            self._lose_all()

    def begin(self, at: float) -> None:
        """A loop begins: what was used before is of no stage."""
        self._at = at

    def end(self, epoch: int, stage: str, ended: float) -> None:
        """A stage ends, which began where the one before ended."""
        began = self._at
        if began is None:
            self._at = ended
            return
        # It may have ended just before counting began anew.
        ended = self._at = max(began, ended)
        took = ended - began
        if not self._is_told:
            self._lose(epoch, took)
            return
        spans = self._spans
        if spans:
            last = spans[-1]
            if last.ended == began and ended - last.began <= SAMPLED:
                last.ended = ended
                last.stages[epoch, stage] = last.stages.get((epoch, stage), 0.0) + took
                return
        if len(spans) >= SPANS_MAX:
            self._lose_span(spans.popleft())
        spans.append(Span(began, ended, {(epoch, stage): took}))

    def _lose_all(self) -> None:
        while self._spans:
            self._lose_span(self._spans.popleft())

    def _lose_span(self, span: Span) -> None:
        for (epoch, _), seconds in span.stages.items():
            self._lose(epoch, seconds)

    def _lose(self, epoch: int, seconds: float) -> None:
        self._lost[epoch] = self._lost.get(epoch, 0.0) + seconds
        while len(self._lost) > LOST_MAX:
            first, second, *_ = sorted(self._lost)
            self._lost[second] += self._lost.pop(first)

    @property
    def was_told(self) -> bool:
        """Whether a node ever told samples."""
        return self._node is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a stage waits for samples."""
        return bool(self._spans)

    def unknown(self) -> dict[int, float]:
        """Seconds of stages whose joules are not known, or not yet, by epoch."""
        found = dict(self._lost)
        for span in self._spans:
            for (epoch, _), seconds in span.stages.items():
                found[epoch] = found.get(epoch, 0.0) + seconds
        return found

    def wanted(self, now: float) -> dict[str, int]:
        """Which samples to ask for, as the node's parameters say it."""
        if self._kept:
            return {"after_ns": self._kept[-1][0]}
        began = self._earliest()
        back = 0.0 if began is None else now - began
        return {"seconds": min(REMEMBERED, math.ceil(back) + 5)}

    def _earliest(self) -> float | None:
        """When the first stage began that has no joules yet."""
        return self._spans[0].began if self._spans else self._at

    def said(self, answer: dict[str, Any], before: float, after: float) -> Ready | None:
        """The node's answer to a question that was asked ``before`` and answered ``after``. None:
        it is to be asked again, since nothing can be made of this.
        """
        if answer["node"] != self._node:
            # Another one, or one that was started again: it counts anew, by a clock of its own.
            was_asked = bool(self._kept)
            self._node, self._clock, self._kept = answer["node"], Clock(), []
            if was_asked:
                return None
        if not self._clock.hear(int(answer["now_ns"]), before, after):
            # One of the machines slept. Nobody knows any more which sample was when.
            self._clock, self._kept, self._since = Clock(), [], after
            self._lose_all()
            return None
        if not self._clock.is_known:
            return None
        rows = list(self._kept)
        for at_ns, joules in answer["samples"]:
            if rows and at_ns <= rows[-1][0]:
                continue
            at = self._clock.here(at_ns)
            # The clock may have been put right since the last one.
            rows.append((at_ns, max(at, rows[-1][1] + 1e-6) if rows else at, joules))
        spans = []
        while rows and self._spans and self._spans[0].ended <= rows[-1][1]:
            spans.append(self._spans.popleft())
        self._keep(rows)
        return Ready(spans, rows, answer["sensors"], self._since)

    def lose(self, spans: list[Span]) -> None:
        """It will never be known what was used in these."""
        for span in spans:
            self._lose_span(span)

    def _keep(self, rows: list[Sample]) -> None:
        """Keeps the samples around the beginning of the first stage without joules, and the last
        one.
        """
        kept = {len(rows) - 1} if rows else set()
        began = self._earliest()
        if rows and began is not None:
            after = bisect_left(rows, began, key=lambda row: row[1])
            kept |= {max(0, after - 1), min(after, len(rows) - 1)}
        self._kept = [rows[i] for i in sorted(kept)]


class Watch:
    """Asks a node for the samples of its sensors while a loop goes on, by a thread that ends with
    it. With ``several`` nodes it asks nobody.
    """

    def __init__(self, ledger: Ledger, client: Client, several: bool = False) -> None:
        self._ledger, self._client = ledger, client
        self._renew()
        #: Why nothing is asked any more.
        self.why_not: str | None = None
        #: When it turned out that the node has no sensors, now.
        self._without: float | None = None
        ledger.expect_samples(True)
        if several or client.nodes > 1:
            self._end(SEVERAL)

    def _renew(self) -> None:
        """A forked child has no threads of its parent, but perhaps locks that they held."""
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        #: When nobody answered last, and what that was. (The exception itself would hold on to
        #: all that was going on.)
        self._failed: tuple[float, type[Error], str] | None = None
        #: Whether there is a thread, as far as is known without a lock.
        self._is_asking = False
        self._pid = os.getpid()

    def _end(self, why_not: str) -> None:
        self.why_not = why_not
        self._ledger.expect_samples(False)

    def loop_goes_on(self) -> None:
        """A loop begins, or asks for a batch."""
        if self._pid != os.getpid():
            self._renew()
        without = self._without
        if (
            self._is_asking
            or self.why_not is not None
            or (without is not None and time.perf_counter() - without < ASKED_EVERY)
        ):
            return
        if self._is_first():
            self._thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._stop),
                name="forebay-joules",
                daemon=True,
            )
            try:
                self._thread.start()
            except RuntimeError as e:
                # The report asks all the same.
                log.debug("the node is not asked for its joules: %s", e)
            _watching.add(self)

    def _is_first(self) -> bool:
        """Whether there was no thread; the caller begins one."""
        with self._lock:
            was_asking, self._is_asking = self._is_asking, True
        return not was_asking

    def ask(self) -> None:
        """Asks for all samples since the last time.

        Raises:
            Error: The node does not answer. What it measures meanwhile comes with its next answer.
        """
        if self._pid != os.getpid():
            self._renew()
        wanted = time.perf_counter()
        with self._asking:
            if self._failed is not None and self._failed[0] >= wanted:
                # Somebody has just waited for it in vain.
                _, kind, message = self._failed
                raise kind(message)
            try:
                self._ask()
            except (NotFound, Unsupported, InvalidRequest) as e:
                self._end(f"the node, of an earlier release, does not tell it ({e.message})")
            except Error as e:
                self._failed = time.perf_counter(), type(e), e.message
                raise
            except (ArithmeticError, LookupError, TypeError, ValueError) as e:
                self._end(f"nothing can be made of what the node says ({e!r})")

    def _ask(self) -> None:
        for _ in range(ANSWERS_MAX):
            if self.why_not is not None:
                return
            before = time.perf_counter()
            answer = _node.energy(self._client, self._ledger.wanted_samples(before))
            after = time.perf_counter()
            # Names may be resolved by now.
            if answer["nodes"] > 1 or self._client.nodes > 1:
                self._end(SEVERAL)
                return
            if not answer["sensors"]:
                self._without = after
                self._ledger.expect_samples(False)
                return
            if self._without is not None:
                self._without = None
                self._ledger.expect_samples(True)
            is_heard = self._ledger.node_said(answer, before, after)
            if (is_heard and not answer["more"]) or after - before > 2 * UNSURE_SECONDS:
                return

    def is_idle(self) -> bool:
        return time.perf_counter() - self._ledger.last_stage() > IDLE_SECONDS

    def sleeps(self, stop: threading.Event) -> bool:
        """Whether the thread has nothing more to do, which it then does not."""
        is_over = self._without is not None or self.why_not is not None or self.is_idle()
        if is_over and stop is self._stop:
            self._is_asking = False
        return is_over

    def leave(self) -> threading.Thread | None:
        """Ends the thread, which may take until the node has answered."""
        if self._pid != os.getpid():
            return None
        self._stop.set()
        return self._thread


#: Why a loader that reads from several nodes does not know.
SEVERAL = "several nodes serve this loader, and they are not asked for it"


def _run(to: weakref.ref[Watch], stop: threading.Event) -> None:
    while True:
        watch = to()
        if watch is None:
            return
        try:
            watch.ask()
        except Error as e:
            log.debug("the node does not tell its joules now: %s", e)
        if watch.sleeps(stop):
            return
        del watch
        # Its loader may be gone long before the next question.
        ends = time.monotonic() + ASKED_EVERY
        while time.monotonic() < ends and to() is not None:
            if stop.wait(min(1.0, ASKED_EVERY)):
                return


#: Those with a thread, which must not be in the compiled part when the interpreter ends.
_watching: weakref.WeakSet[Watch] = weakref.WeakSet()


def _leave_all() -> None:
    threads = [watch.leave() for watch in list(_watching)]
    ends = time.monotonic() + LEAVE_SECONDS
    for thread in threads:
        if thread is not None and thread.is_alive():
            thread.join(max(0.0, ends - time.monotonic()))


if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_leave_all)
