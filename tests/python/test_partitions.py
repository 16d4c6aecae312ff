"""Partitions, some seconds of each. tests/slow/test_register.py has them for longer."""

from __future__ import annotations

import random
import time
import urllib.error

import namespaces
import pytest
from clusters import eventually, fetch, metric, status
from load import seed
from partitions import BOUND_SECONDS, BUCKET, CUTS, PEER_PORT, Batches, Site, nothing, round_of
from register import Checker, put, trusted, value

pytestmark = pytest.mark.skipif(
    namespaces.why_not() is not None, reason=namespaces.why_not() or "networks can be made here"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with Site(tmp_path_factory.mktemp("partitions")) as made:
        for name in "abc":
            made.cluster.start(name)
        made.cluster.agree(3)
        trusted(made.cluster)
        yield made


def test_links_are_cut_as_it_is_said(site):
    at = site.network.address

    def reached() -> list[str]:
        found = []
        for a in "abc":
            with site.network.inside(a):
                found += [a + b for b in "abc" if namespaces.reaches(at(b), PEER_PORT, 0.3)]
                found += [a + "e"] if namespaces.reaches(at("etcd"), site.etcd.port, 0.3) else []
        return found

    everything = reached()
    assert len(everything) == 12
    for ports in (None, [PEER_PORT]):
        with site.network.cut("a", "b", ports=ports):
            assert set(everything) - set(reached()) == {"ab", "ba"}
    with site.network.cut("c", "etcd"):
        assert set(everything) - set(reached()) == {"ce"}
    with site.network.lost("b"):
        left = reached()
        assert set(left) == {pair for pair in everything if "b" not in pair.replace("bb", "b")} | {
            "bb"
        }
    assert reached() == everything


def test_no_partition_makes_a_read_old_or_a_batch_wrong(site):
    made = seed()
    site.rng = random.Random(made)
    with Batches(site, made).running() as batches, Checker(site.cluster, made).running() as checker:
        for cut in CUTS:
            round_of(site, checker, cut, nothing, 2, 0.5)
        # The last answers come when nothing is cut.
        done = batches.done
        eventually(lambda: batches.done > done + 2, "batches go on")
    print(made, vars(checker), vars(batches))
    assert max(checker.slowest, checker.slowest_failed, batches.slowest) < BOUND_SECONDS
    trusted(site.cluster)


def acknowledged(url: str, body: bytes) -> None:
    """Writes as clients of S3 do, which ask again after 503: a node without a lease refuses."""
    deadline = time.monotonic() + BOUND_SECONDS
    while True:
        try:
            return put(url, body)
        except urllib.error.HTTPError as e:
            if e.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_a_node_that_others_cannot_reach_delays_a_write_once(site):
    """`b` reaches etcd and the bucket, and no node: writes elsewhere do not wait for it again."""
    nodes, at = site.cluster.nodes, lambda name: f"{site.cluster.nodes[name].url}/{BUCKET}/cut"
    waited = metric(nodes["a"], "forebay_cluster_writes_waited_total")
    with site.network.cut("a", "b"), site.network.cut("b", "c"):
        for n in range(1, 4):
            began = time.monotonic()
            acknowledged(at("a"), value(n))
            took = time.monotonic() - began
            assert took < (BOUND_SECONDS if n == 1 else 5), f"write {n} took {took} s"
            for name in "bca":
                assert fetch(at(name)) == value(n)
        eventually(lambda: not status(nodes["b"])["trusted"], "nobody tells it of writes")
        assert metric(nodes["a"], "forebay_cluster_writes_waited_total") == waited + 1
    trusted(site.cluster)
    put(at("b"), value(9))
    assert [fetch(at(name)) for name in "acb"] == [value(9)] * 3
