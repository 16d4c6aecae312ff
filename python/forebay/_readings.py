"""Totals of CPU time and joules, and what they are told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: What joules are of: source, domain, and whether they are an estimate.
Domain = tuple[str, str, bool]

#: What a loop does: it waits for a batch, or computes between two batches.
STAGES = ("waiting", "computing")
#: Seconds between two samples of the sensors, which are taken at multiples of it.
SAMPLED = 0.1


@dataclass(slots=True)
class Readings:
    """Totals at one moment, or what came between two. Nobody changes one: that it is not frozen
    makes it cheap, for two are made for each batch.
    """

    cpu_seconds: float
    joules: dict[Domain, float]
    #: Seconds since the sample that the joules are of.
    age: float = field(default=0.0, compare=False)

    def since(self, before: Readings) -> Readings:
        """What came since then, by what was read both times."""
        both = ((domain, now) for domain, now in self.joules.items() if domain in before.joules)
        joules = {domain: now - before.joules[domain] for domain, now in both}
        return Readings(self.cpu_seconds - before.cpu_seconds, joules)

    def plus(self, other: Readings) -> Readings:
        """The sum, of what was read both times."""
        both = (domain for domain in self.joules if domain in other.joules)
        joules = {domain: self.joules[domain] + other.joules[domain] for domain in both}
        return Readings(self.cpu_seconds + other.cpu_seconds, joules)


def add_up(to: dict[str, Readings], stages: Mapping[str, Readings]) -> None:
    """Adds what was used in stages. A sensor that was not read each time has no figure."""
    for name, used in stages.items():
        before = to.get(name)
        to[name] = used if before is None else before.plus(used)
