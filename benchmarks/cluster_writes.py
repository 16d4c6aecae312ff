"""Reads after acknowledged writes, at any node, while something happens: the register checker of
the tests (tests/python/register.py), for as long as is said.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from cluster_site import Site
from report import Report, goal

ROOT = Path(__file__).parents[1]
#: What happens, and how that is called here.
DISTURBANCES = {
    "stop": "SIGSTOP of a node",
    "kill": "kill -9 of a node",
    "join": "map changes (a node joins and leaves)",
    "past": "overwrites past the nodes",
    "without_etcd": "etcd is stopped",
    "partition": "partitions",
    "both": "partitions, and map changes",
}


def tests() -> None:
    """The modules of the tests can be imported."""
    for folder in ("tests/python", "tools"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))


def writes(report: Report, site: Site) -> None:
    args = site.args
    wanted = args.disturb or list(DISTURBANCES)
    report.heading(
        f"Reads after acknowledged writes at any of three nodes, {args.seconds:g} s of each"
    )
    tests()
    import namespaces

    for number, what in enumerate(wanted):
        apart = what in ("partition", "both")
        if apart and (why := namespaces.why_not()):
            report.note(f"{DISTURBANCES[what]}: left out: {why}")
            continue
        directory = site.directory / f"writes{number}"
        directory.mkdir()
        checker = (cut_off if apart else together)(directory, what, args.seed, args.seconds)
        report.add(
            {
                "name": f"{DISTURBANCES[what]}: stale reads",
                "value": len(checker.wrong),
                "unit": f"of {checker.reads:,}",
                "writes": checker.writes,
                "failed": checker.failed,
                "goals": [goal("value", at_most=0)],
            }
        )
        for wrong in checker.wrong[:3]:
            report.note(f"{what}, seed {args.seed}: {wrong}")
        report.add(
            {
                "name": f"{DISTURBANCES[what]}: slowest acknowledged write",
                "value": checker.slowest,
                "unit": "s",
            }
        )


def together(directory: Path, what: str, seed: int, seconds: float):
    """On this machine's loopback."""
    from register import SCENARIOS, Checker, three_nodes

    scenario = {one.__name__: one for one in SCENARIOS}[what]
    with three_nodes(directory) as (cluster, etcd, s3):
        rng = random.Random(seed)
        with Checker(cluster, seed).going() as checker:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                scenario(checker, etcd, s3, rng)
        return checker


def cut_off(directory: Path, what: str, seed: int, seconds: float):
    """Each node is a machine of its own, and the network between them is cut."""
    from partitions import CUTS, Site, change, nothing, round_of
    from register import Checker, trusted

    with Site(directory) as site:
        site.rng = rng = random.Random(seed)
        for name in "abc":
            site.cluster.start(name)
        site.cluster.agree(3)
        trusted(site.cluster)
        with Checker(site.cluster, seed).going() as checker:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                besides = change if what == "both" else nothing
                cut = rng.choice(CUTS)
                # Shorter than a lease, and longer, where there is time for that.
                round_of(site, checker, cut, besides, rng.uniform(0.2, min(14, seconds)), 2)
        return checker
