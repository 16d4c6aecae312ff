"""How much energy a machine used: CPU packages and DRAM (RAPL), GPUs (NVML), boards (hwmon, IPMI).

::

    with forebay.energy.Monitor() as monitor:
        for epoch in range(3):
            with monitor.span(f"epoch {epoch}"):
                train()
    print(monitor.report())

Joules are measured, or absent: where there is no sensor, or it may not be read,
:attr:`Monitor.notes` says why. An estimate is made only by ``model=``, and is marked as one
wherever it appears. Sensors are of the whole machine: what else runs there is in the figures.

A loader measures by itself where there is something to measure. Its report has the joules of each
epoch, and which of them were taken while the loop waited for a batch and while it computed.
``FOREBAY_ENERGY=off`` turns that off; ``FOREBAY_ENERGY=cpu-watts=15`` asks for an estimate too.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from ._needs import needs

with needs("forebay.energy"):
    import numpy  # noqa: F401

from . import _forebay, _ledger
from ._readings import Domain
from .errors import InvalidRequest

__all__ = ["Figure", "Monitor", "Report", "Span"]


def __dir__() -> list[str]:
    return sorted(__all__)


#: Spans that one monitor remembers.
SPANS_MAX = 10_000
#: The metric that a node has too (METRICS.md).
METRIC = "forebay_energy_joules_total"


@dataclass(frozen=True)
class Figure:
    """What one sensor measured.

    Attributes:
        source: Where the figure comes from: ``rapl``, ``nvml``, ``hwmon``, ``ipmi``, or the model's
            name.
        domain: What it is of: ``package-0``, ``dram-0``, ``gpu-0``; ``psys`` and ``board`` contain
            these, ``core-0`` and ``uncore-0`` are parts of packages.
        joules: The energy.
        estimate: Whether a model made it.
    """

    source: str
    domain: str
    joules: float
    estimate: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether another domain contains it, or is part of it: it is then not in sums."""
        return not self.domain.startswith(("package", "dram", "gpu", "cpu"))

    def __str__(self) -> str:
        mark = " (ESTIMATE)" if self.estimate else ""
        return f"{self.joules:,.1f} J {self.domain} by {self.source}{mark}"


def total(figures: list[Figure]) -> float | None:
    """The sum of what does not overlap; None if nothing was measured."""
    # What a model says of the processor is for where no package is measured.
    measured = any(f.domain.startswith("package") for f in figures)
    counted = [f for f in figures if not (measured and f.domain.startswith("cpu"))]
    apart = [f.joules for f in counted if not f.overlaps]
    return sum(apart) if apart else None


@dataclass(frozen=True)
class Span:
    """A stretch of time with a name.

    Attributes:
        name: What :meth:`Monitor.span` was given.
        seconds: How long it was.
        cpu_seconds: CPU time of this process in it.
        figures: What each sensor measured.
    """

    name: str
    seconds: float
    cpu_seconds: float
    figures: list[Figure]

    @property
    def joules(self) -> float | None:
        """The sum of packages, DRAM and GPUs; None if none was measured."""
        return total(self.figures)


@dataclass(frozen=True)
class Report:
    """What a monitor measured: in all, and in each span. ``print(report)`` shows it.

    Attributes:
        whole: Since the monitor began.
        spans: Those that have ended, in that order.
        notes: What was not measured, and why.
    """

    whole: Span
    spans: list[Span]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; ``joules`` is None where nothing was measured."""

        def of(span: Span) -> dict[str, Any]:
            figures = [vars(f) for f in span.figures]
            return {**vars(span), "figures": figures, "joules": span.joules}

        return {
            "whole": of(self.whole),
            "spans": [of(s) for s in self.spans],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = []
        for span in [self.whole, *self.spans]:
            joules = "joules not measured" if span.joules is None else f"{span.joules:,.1f} J"
            mark = " (ESTIMATE)" if any(f.estimate for f in span.figures) else ""
            lines.append(
                f"{span.name}: {span.seconds:.2f} s, CPU {span.cpu_seconds:.2f} s, {joules}{mark}"
            )
            lines += [f"  {figure}" for figure in span.figures]
        lines += [f"absent: {note}" for note in self.notes]
        return "\n".join(lines)


class Monitor:
    """Samples the energy of this machine every 100 ms, from when it is made until it is closed. A
    context manager.

    Args:
        model: Also estimate the energy of this process' CPU time: ``"cpu-watts=15"`` are the watts
            of one busy core. Without it nothing is estimated.
        interval: Seconds between two samples; they are taken at multiples of it, so that machines
            whose clocks agree sample at the same time.
        sysfs: Where sysfs is: in a container, where the host's is mounted.
        nvml: NVIDIA's library; empty for none.

    Raises:
        InvalidRequest: The model or the interval is none.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        interval: float = 0.1,
        sysfs: str | PathLike[str] = "/sys",
        nvml: str | PathLike[str] = "libnvidia-ml.so.1",
    ) -> None:
        self._monitor = _forebay.EnergyMonitor(sysfs, nvml, interval, model)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self._spans: list[Span] = []
        self._whole: Span | None = None
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What is not measured, or not any more, and why: one line each."""
        return self._notes if self._whole is not None else self._monitor.notes()

    def figures(self) -> list[Figure]:
        """What each sensor measured since the monitor began."""
        return self._so_far().figures

    def joules(self) -> float | None:
        """The sum of packages, DRAM and GPUs since the monitor began; None if none was measured."""
        return self._so_far().joules

    def between(self, began: float, ended: float) -> list[Figure]:
        """What each sensor measured between two moments of ``time.monotonic()``, interpolated
        between samples. The samples of the last ten minutes are remembered; without those, a
        sensor is left out.
        """
        return [Figure(*f) for f in self._monitor.between(began, ended)]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A context: what is measured within it is in the report under this name. Spans may contain
        each other: epochs, and stages within them.
        """
        began, cpu = time.monotonic(), time.process_time()
        before = self._totals()
        try:
            yield
        finally:
            figures = _since(before, self._totals())
            now = time.monotonic()
            done = Span(name, now - began, time.process_time() - cpu, figures)
            with self._lock:
                if len(self._spans) < SPANS_MAX:
                    self._spans.append(done)

    def _totals(self) -> list[Figure]:
        return [Figure(*f) for f in self._monitor.totals()]

    def _so_far(self) -> Span:
        if self._whole is not None:
            return self._whole
        seconds, cpu = time.monotonic() - self._began, time.process_time() - self._cpu
        return Span("in all", seconds, cpu, self._totals())

    def report(self) -> Report:
        """What was measured so far, in all and by span."""
        with self._lock:
            spans = list(self._spans)
        return Report(self._so_far(), spans, self.notes)

    def line_protocol(
        self,
        path: str | PathLike[str] | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        since: float = 0.0,
    ) -> str:
        """The remembered samples in InfluxDB's line protocol: measurement ``forebay_energy``, tags
        ``host``, ``source``, ``domain`` (and ``estimate=true``), fields ``joules`` (since the
        monitor began) and ``watts``, times in nanoseconds UTC.

        Args:
            path: Also append it to this file.
            tags: Further tags, such as ``{"run": "…"}``.
            since: Only samples after this moment of ``time.monotonic()``.
        """
        given = {"host": socket.gethostname(), **(tags or {})}
        for name in given:
            if name in ("source", "domain", "estimate"):
                raise InvalidRequest(f"the tag {name!r} is the monitor's own", hint="rename it")
            if name in ("time", "_field", "_measurement"):
                raise InvalidRequest(f"the tag {name!r} is InfluxDB's own", hint="rename it")
        pairs = [(str(name), str(value)) for name, value in given.items()]
        text, _ = self._monitor.line_protocol(pairs, since)
        if path is not None:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text)
        return text

    def prometheus(
        self,
        path: str | PathLike[str] | None = None,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """The joules since the monitor began in Prometheus' text format, as the metric that a node
        has: ``forebay_energy_joules_total``, with the labels ``source``, ``domain`` and
        ``estimate`` (``true``, or empty). There is no sample of what is not measured.

        Args:
            path: Also write it to this file, in place of what was there: for the textfile collector
                of Prometheus' node_exporter, which never sees a part of it.
            labels: Further labels, such as ``{"run": "…"}``. Prometheus has ``job`` and
                ``instance`` of its own.
        """
        given = dict(labels or {})
        for name in given:
            if name in ("source", "domain", "estimate"):
                raise InvalidRequest(f"the label {name!r} is the monitor's own", hint="rename it")
            pattern = r"(?!__)[A-Za-z_][A-Za-z0-9_]*"
            if not isinstance(name, str) or re.fullmatch(pattern, name, re.ASCII) is None:
                raise InvalidRequest(
                    f"{name!r} is not the name of a label",
                    hint="give letters, digits and _, and no digit first",
                )
        lines = [
            f"# HELP {METRIC} Joules since the monitor began, by where the figure comes from.",
            f"# TYPE {METRIC} counter",
        ]
        for f in self.figures():
            own = {"source": f.source, "domain": f.domain, "estimate": "true" * f.estimate}
            shown = ",".join(f'{name}="{_escaped(v)}"' for name, v in (own | given).items())
            lines.append(f"{METRIC}{{{shown}}} {f.joules}")
        text = "\n".join(lines) + "\n"
        if path is not None:
            part = Path(f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.part")
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        return text

    def close(self) -> None:
        """Stops. What was measured can still be asked for, except for samples."""
        if self._whole is None:
            self._whole, self._notes = self._so_far(), self._monitor.notes()
            self._monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _escaped(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _since(before: list[Figure], after: list[Figure]) -> list[Figure]:
    """What was added between two totals, of sensors that are in both."""
    was = {(f.source, f.domain): f.joules for f in before}
    return [
        Figure(f.source, f.domain, f.joules - was[f.source, f.domain], f.estimate)
        for f in after
        if (f.source, f.domain) in was
    ]


# The monitor that loaders of this process share. A forked child has its own, since threads do not
# survive a fork.
_shared: _forebay.EnergyMonitor | None = None
_pid = 0
_lock = threading.Lock()


def watch() -> None:
    """Starts the monitor that loaders of this process share, if there is anything to measure."""
    global _shared, _pid
    if _pid == os.getpid():
        return
    with _lock:
        if _pid == os.getpid():
            return
        _shared, _ledger.METER = None, None
        asked = os.environ.get("FOREBAY_ENERGY") or "on"
        if asked.lower() not in ("off", "0", "false", "no"):
            model = None if asked.lower() in ("on", "1", "true", "yes") else asked
            sysfs = os.environ.get("FOREBAY_SYSFS") or "/sys"
            try:
                _shared = _forebay.EnergyMonitor(sysfs, model=model)
            except InvalidRequest as e:
                raise InvalidRequest(f"FOREBAY_ENERGY: {e.message}", hint=e.hint) from None
            if _shared.sensors():
                _ledger.METER = _read
        _pid = os.getpid()


def _read() -> dict[Domain, float]:
    monitor = _shared
    if monitor is None or _pid != os.getpid():
        return {}
    return {(source, domain, e): joules for source, domain, joules, e in monitor.last()}


#: What each machine has and sums are to have, by how its domains begin; what contains all of it.
PARTS = {"package": "CPU packages", "dram": "DRAM"}
CONTAIN_PARTS = ("psys", "board")


def unread(read: Collection[Domain]) -> tuple[list[str], list[str]]:
    """What loaders of this process did not measure, next to what they ``read``: one line each, with
    why; and by name, what joules of the whole machine lack for it.
    """
    if _shared is None:
        return ["FOREBAY_ENERGY=off"], []
    notes = _shared.notes()
    gone = [sensor for sensor in _shared.sensors() if sensor not in read]
    # One that went away, or may have wrapped, has a note that says so; these came later.
    known = {(source, domain, estimate) for source, domain, _, estimate in _shared.last()}
    late = [
        f"{s}: {d} was not there during the whole loop" for s, d, e in gone if (s, d, e) in known
    ]
    if not read and not late and not notes:
        return ["no sensor was there during the whole loop"], []
    return [*notes, *late], _lacks(read, gone, _shared.passes_over())


def _lacks(read: Iterable[Domain], gone: Iterable[Domain], others: bool) -> list[str]:
    """What the sum of joules that were ``read`` lacks: what each machine has, sensors that are
    ``gone``, and ``others`` that could never be read.
    """
    there = [domain for _, domain, estimate in read if not estimate]
    has = {begins: any(domain.startswith(begins) for domain in there) for begins in PARTS}
    if not any(has.values()) and any(domain.startswith(CONTAIN_PARTS) for domain in there):
        return []
    lacks = [name for begins, name in PARTS.items() if not has[begins]]
    named = ("gpu", *(begins for begins in PARTS if has[begins]))
    lacks += [domain for _, domain, _ in gone if domain.startswith(named)]
    return [*lacks, "what cannot be read"] if others else lacks
