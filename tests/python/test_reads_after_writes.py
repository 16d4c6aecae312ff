"""Reads after writes at all nodes of a cluster whose map is in etcd."""

from __future__ import annotations

import random
import signal
import socket
import time
import urllib.error

import pytest
from clusters import Cluster, eventually, fetch, metric, order, status, throughout
from conftest import s3_client
from register import OPTIONS, Checker, number, put, trusted, value
from servers import REGION, Etcd

LEASE_SECONDS = 10


@pytest.fixture(scope="module")
def bucket(origin):
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket="written", CreateBucketConfiguration={"LocationConstraint": REGION})
    return s3


@pytest.fixture
def etcd(tmp_path):
    server = Etcd(tmp_path / "etcd")
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.stop(signal.SIGKILL)


@pytest.fixture
def cluster(origin, bucket, etcd, tmp_path):
    source = f"etcd://127.0.0.1:{etcd.port}/training"
    made = Cluster(origin, tmp_path, source, *OPTIONS, bucket="written")
    made.options[1] = "10m"
    yield made
    for node in made.nodes.values():
        node.process.send_signal(signal.SIGCONT)
    made.close()


def three(cluster: Cluster, *options: str) -> None:
    for name in "abc":
        cluster.start(name, *options)
    cluster.agree(3)
    trusted(cluster)


def url(cluster: Cluster, name: str, key: str) -> str:
    return f"{cluster.nodes[name].url}/{cluster.bucket}/{key}"


def read(cluster: Cluster, name: str, key: str) -> int:
    return number(fetch(url(cluster, name, key)))


def test_reads_at_any_node_get_what_was_acknowledged(cluster, bucket):
    three(cluster)
    done = order(cluster.nodes["a"], "status")
    assert "after writes  every node has the write" in done.stdout
    with Checker(cluster, random.SystemRandom().randrange(1 << 32)).running() as checker:
        time.sleep(4)
    assert checker.failed == 0 and checker.slowest < 2 * LEASE_SECONDS, vars(checker)
    # What nobody writes is answered from what is known: nothing is asked.
    for name in "abc":
        read(cluster, name, checker.registers[0].name()[0])
    time.sleep(1.1)
    for name in "abc":
        read(cluster, name, checker.registers[0].name()[0])
    asked = lambda: [  # noqa: E731
        metric(n, "forebay_revalidations_total") + metric(n, "forebay_fills_total")
        for n in cluster.nodes.values()
    ]
    # On a busy machine, a node may answer nothing from what it knows for a moment.
    for _ in range(10):
        first = asked()
        for name in "abc":
            read(cluster, name, checker.registers[0].name()[0])
        if asked() == first:
            break
        time.sleep(1.1)
    assert asked() == first


def test_a_stopped_node_delays_a_write_once_and_then_answers_nothing_old(cluster, bucket):
    three(cluster)
    for first in range(1, 20, 3):
        trusted(cluster)
        put(url(cluster, "a", "stopped"), value(first))
        for _ in range(2):
            assert [read(cluster, name, "stopped") for name in "abc"] == [first] * 3
            time.sleep(1.1)
        b = cluster.nodes["b"]
        b.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        put(url(cluster, "a", "stopped"), value(first + 1))
        took = time.monotonic() - began
        assert took < 2 * LEASE_SECONDS
        began = time.monotonic()
        put(url(cluster, "a", "stopped"), value(first + 2))
        assert time.monotonic() - began < LEASE_SECONDS, "only the first write waits"
        b.process.send_signal(signal.SIGCONT)
        assert [read(cluster, name, "stopped") for name in "bac"] == [first + 2] * 3
        waited = metric(cluster.nodes["a"], "forebay_cluster_writes_waited_total")
        assert waited <= 1
        # On a busy machine, a node may answer nothing from what it knows for a moment, and then
        # nobody has to wait for it.
        if waited == 1:
            break
    assert waited == 1
    trusted(cluster)
    assert [read(cluster, name, "stopped") for name in "bac"] == [first + 2] * 3


def test_a_node_that_stops_in_order_delays_no_write(cluster, bucket):
    three(cluster)
    cluster.stop("c")
    began = time.monotonic()
    put(url(cluster, "a", "orderly"), value(1))
    assert time.monotonic() - began < LEASE_SECONDS
    assert metric(cluster.nodes["a"], "forebay_cluster_writes_waited_total") == 0


def test_a_node_that_stops_while_it_answers_does_not_join_again(cluster, bucket, etcd):
    three(cluster)
    bucket.put_object(Bucket="written", Key="large", Body=bytes(64 << 20))
    there = lambda: sum("/nodes/" in key for key in etcd.keys())  # noqa: E731
    assert there() == 3
    c = cluster.nodes.pop("c")
    with socket.create_connection(("127.0.0.1", cluster.ports["c"][0])) as slow:
        slow.sendall(b"GET /written/large HTTP/1.1\r\nHost: c\r\n\r\n")
        assert slow.recv(12) == b"HTTP/1.1 200"
        c.process.send_signal(signal.SIGTERM)
        eventually(lambda: there() == 2, "c has left")
        throughout(2, lambda: there() == 2, "a node that stops has joined again")
        assert c.process.poll() is None, "it still answers"
        began = time.monotonic()
        put(url(cluster, "a", "orderly"), value(2))
        assert time.monotonic() - began < LEASE_SECONDS
        assert metric(cluster.nodes["a"], "forebay_cluster_writes_waited_total") == 0
    c.stop()


def test_a_write_that_is_under_way_when_its_node_stops_is_acknowledged(cluster, bucket, etcd):
    three(cluster)
    there = lambda: sum("/nodes/" in key for key in etcd.keys())  # noqa: E731
    # Longer than what a node collects before it begins a write.
    body = value(7).ljust(9 << 20, b".")
    c = cluster.nodes.pop("c")
    with socket.create_connection(("127.0.0.1", cluster.ports["c"][0]), 60) as slow:
        head = f"PUT /written/last HTTP/1.1\r\nHost: c\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body[:-1])
        # The write has begun when the node holds its place.
        time.sleep(1)
        c.process.send_signal(signal.SIGTERM)
        throughout(2, lambda: there() == 3, "the node has left before its write was done")
        # Others tell it of their writes meanwhile, and do not wait for it.
        began = time.monotonic()
        put(url(cluster, "a", "orderly"), value(2))
        assert time.monotonic() - began < LEASE_SECONDS
        assert metric(cluster.nodes["a"], "forebay_cluster_writes_waited_total") == 0
        slow.sendall(body[-1:])
        assert slow.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: there() == 2, "c has left")
    c.stop()
    assert [read(cluster, name, "last") for name in "ab"] == [7, 7]


def test_without_etcd_reads_go_on_and_writes_are_as_configured(cluster, bucket, etcd):
    three(cluster)
    cluster.stop("c")
    cluster.start("c", "--set", "cluster.writes=bounded")
    put(url(cluster, "a", "away"), value(1))
    assert [read(cluster, name, "away") for name in "abc"] == [1, 1, 1]
    etcd.process.send_signal(signal.SIGSTOP)
    for node in cluster.nodes.values():
        eventually(lambda node=node: not status(node)["trusted"], "the leases end")
    assert [read(cluster, name, "away") for name in "abc"] == [1, 1, 1]
    done = order(cluster.nodes["b"], "status")
    assert "this node asks the bucket: this node has no lease in etcd" in done.stdout
    with pytest.raises(urllib.error.HTTPError) as refused:
        put(url(cluster, "a", "away"), value(2))
    assert refused.value.code == 503 and b"no lease in etcd" in refused.value.read()
    put(url(cluster, "c", "away"), value(3))
    assert metric(cluster.nodes["c"], "forebay_cluster_writes_degraded_total") == 1
    # Nobody trusts what it knows: the bucket is asked.
    assert [read(cluster, name, "away") for name in "abc"] == [3, 3, 3]
    etcd.process.send_signal(signal.SIGCONT)
    trusted(cluster)
    put(url(cluster, "a", "away"), value(4))
    assert [read(cluster, name, "away") for name in "abc"] == [4, 4, 4]
