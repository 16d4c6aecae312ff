"""What a loader and its node tell each other: the order, which the node's cache follows, and where the time went."""

from __future__ import annotations

import json
import math
import random
import time
import urllib.request

import forebay
import pytest
import tables
from torch.utils.data import DataLoader

ROWS = tables.A_ROWS


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


def test_stats_say_where_the_time_of_pulling_went(ds):
    rows = ds.take([1, 50])
    assert set(rows.node_seconds) == {"origin", "disk", "prepare"} and all(
        s >= 0 for s in rows.node_seconds.values()
    )
    loader = ds.loader(batch_size=10, shuffle="full")
    batches = list(loader)
    stats = loader.stats()
    assert (stats.samples, stats.batches) == (10 * len(batches), len(batches))
    assert stats.prepare_s > 0 and stats.origin_s is not None and stats.disk_s is not None
    assert stats.network_s > 0 and "at the node" in str(stats)


def leases(node) -> list[dict]:
    """Those on plans that the node's cache follows."""
    with urllib.request.urlopen(f"{node.url}/v1/datasets/plans", timeout=10) as answer:
        return json.load(answer)["leases"]


def test_the_cache_follows_the_order_of_a_job(ds, tables):
    plans = {lease["plan"] for lease in leases(tables)}
    options = {"batch_size": 4, "shuffle": "full", "seed": random.randrange(1 << 40), "epochs": 2}
    told = ds.loader(**options)
    assert told.plan not in plans
    list(ds.loader(follow=False, **options))
    assert told.plan not in {lease["plan"] for lease in leases(tables)}
    iteration = iter(told)
    for _ in range(5):
        next(iteration)
    [lease] = [lease for lease in leases(tables) if lease["plan"] == told.plan]
    assert (lease["leases"], lease["epoch"], lease["expires_in_seconds"] > 200) == (1, 0, True)
    assert 20 <= lease["position"] <= 4 * 12, "by the rows that were asked for"
    # Workers, and the epochs of the same job, have no leases of their own.
    for _ in range(2):
        list(DataLoader(told.torch(), batch_size=None, num_workers=2))
    assert [lease["leases"] for lease in leases(tables) if lease["plan"] == told.plan] == [1]


def test_the_cache_follows_a_stream_while_it_is_open(ds, tables):
    streamed = ds.loader(
        batch_size=4,
        shuffle="full",
        seed=random.randrange(1 << 40),
        stream=True,
        connections=2,
        epochs=math.inf,
        window_bytes=65536,
    )
    iteration = iter(streamed)
    for _ in range(30):
        next(iteration)
    mine = [lease for lease in leases(tables) if lease["plan"] == streamed.plan]
    assert len(mine) == 2 and all(
        lease["epoch"] * ROWS + lease["position"] >= 100 for lease in mine
    )
    assert all("expires_in_seconds" not in lease for lease in mine), (
        "for as long as the connections are open"
    )
    streamed.close()
    until = time.monotonic() + 20
    while any(lease["plan"] == streamed.plan for lease in leases(tables)):
        assert time.monotonic() < until
        time.sleep(0.02)
