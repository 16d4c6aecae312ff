"""Reads after writes while nodes of a cluster join, leave, stop, die, lose etcd, and are cut off
from each other.

FOREBAY_TEST_REGISTER_SECONDS says for how long each of these happens (60): with the time that the
nodes take to start and to trust each other again, about 21 minutes for all 17 of them. Those with
partitions take root, and are skipped where no network namespaces can be made.
"""

from __future__ import annotations

import os
import random
import time

import namespaces
import pytest
from load import seed
from partitions import BESIDES, BOUND_SECONDS, CUTS, Batches, Site, nothing, round_of
from register import SCENARIOS, Checker, three_nodes, trusted

SECONDS = float(os.environ.get("FOREBAY_TEST_REGISTER_SECONDS", "60"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_read_gets_less_than_was_acknowledged_before(scenario, tmp_path):
    with three_nodes(tmp_path) as (cluster, etcd, s3):
        made = seed()
        rng = random.Random(made)
        with Checker(cluster, made).running() as checker:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                scenario(checker, etcd, s3, rng)
        print(scenario.__name__, made, checker.reads, checker.writes, checker.failed)
        trusted(cluster)


@pytest.mark.skipif(namespaces.why_not() is not None, reason=namespaces.why_not() or "can be made")
@pytest.mark.parametrize(
    ("cuts", "besides"),
    [([cut], nothing) for cut in CUTS] + [(CUTS, besides) for besides in BESIDES],
    ids=[cut.__name__ for cut in CUTS] + [f"any-{besides.__name__}" for besides in BESIDES],
)
def test_no_partition_makes_a_read_old(cuts, besides, tmp_path):
    """One kind of partition again and again; or any, while something else happens."""
    made = seed()
    with Site(tmp_path) as site:
        site.rng = rng = random.Random(made)
        for name in "abc":
            site.cluster.start(name)
        site.cluster.agree(3)
        trusted(site.cluster)
        with (
            Batches(site, made).running() as batches,
            Checker(site.cluster, made).running() as checker,
        ):
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                # Shorter than a lease, and longer: then nodes lose theirs.
                round_of(site, checker, rng.choice(cuts), besides, rng.uniform(0.2, 14), 2)
        print(
            *("seed", made, "reads", checker.reads, "writes", checker.writes),
            *("failed", checker.failed, "slowest", checker.slowest, checker.slowest_failed),
            *("batches", batches.done, "failed", batches.failed, "slowest", batches.slowest),
        )
        assert max(checker.slowest, checker.slowest_failed, batches.slowest) < BOUND_SECONDS
        trusted(site.cluster)
