"""Copies on several nodes of a cluster: real nodes, a real etcd, a real S3 server. What a node or a
disk had is not read from the bucket again, and the copies are made whole by themselves.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from clusters import Cluster, eventually, fetch, filled, metric
from conftest import s3_client
from servers import Node, forebay_program

BUCKET = "mirrored"
FORGET_SECONDS = 10


@pytest.fixture(scope="module")
def bucket(origin) -> dict[str, bytes]:
    """Small objects, an empty one, and one of several units."""
    return filled(origin, BUCKET, [200_000] * 100 + [0, 1_500_000, 30 << 20], seed=4)


@pytest.fixture
def cluster(origin, etcd, tmp_path):
    """Nodes of which two keep everything."""
    made = Cluster(
        origin,
        tmp_path,
        f"etcd://127.0.0.1:{etcd.port}/mirrors",
        *("--set", f"cluster.forget_after={FORGET_SECONDS}s"),
        *("--set", f"buckets.{BUCKET}.mirror=2"),
        bucket=BUCKET,
    )
    yield made
    made.close()


def copied(node: Node) -> float:
    return metric(node, "forebay_mirror_copied_bytes_total")


def settle(cluster: Cluster) -> None:
    """Waits until each node has looked through all that others have, and nothing comes any more."""
    nodes = list(cluster.nodes.values())
    behind = lambda: sum(metric(n, "forebay_mirror_behind_members") for n in nodes)  # noqa: E731
    eventually(lambda: behind() == 0, "all nodes have looked through what others have")

    def quiet() -> bool:
        before = [copied(node) for node in nodes]
        time.sleep(3)
        return before == [copied(node) for node in nodes] and behind() == 0

    eventually(quiet, "nothing is copied any more")


def everything(bucket: dict[str, bytes]) -> int:
    return sum(map(len, bucket.values()))


def test_what_a_node_had_is_not_read_again_one_node_after_the_other(cluster, bucket):
    cluster.start_all("abcd")
    cluster.read(bucket, "a")
    assert cluster.from_bucket() == everything(bucket)
    settle(cluster)
    for gone in "abc":
        cluster.stop(gone, signal.SIGKILL)
        # Others stand in for it at once.
        cluster.read(bucket, "d")
        assert cluster.from_bucket() <= 1.2 * everything(bucket)
        cluster.forget(gone)
        settle(cluster)
    cluster.read(bucket)
    assert cluster.from_bucket() <= 1.2 * everything(bucket)


def test_what_nobody_read_since_is_copied_again_when_a_node_has_gone(cluster, bucket):
    cluster.start_all("abc")
    cluster.read(bucket, "a")
    settle(cluster)
    for gone in "ab":
        cluster.stop(gone, signal.SIGKILL)
        cluster.forget(gone)
        settle(cluster)
    cluster.read(bucket, "c")
    assert cluster.from_bucket() <= 1.2 * everything(bucket)


def test_a_lost_disk_comes_from_other_nodes_whether_it_is_read_or_not(cluster, bucket):
    cluster.start_all("abc")
    cluster.read(bucket, "a")
    settle(cluster)
    for reads in (True, False):
        cluster.stop("c")
        shutil.rmtree(cluster.directory / "c" / "cache")
        cluster.start("c")
        cluster.agree(3)
        if reads:
            cluster.read(bucket, "c")
            assert cluster.from_bucket() <= 1.2 * everything(bucket)
        settle(cluster)
        assert reads or copied(cluster.nodes["c"]) >= 0.4 * everything(bucket)
    # What it has now is enough for two others that go.
    cluster.stop("a", signal.SIGKILL)
    cluster.read(bucket, "b", "c")
    assert cluster.from_bucket() <= 1.2 * everything(bucket)


def test_a_restart_copies_nothing(cluster, bucket):
    cluster.start_all("abc")
    cluster.read(bucket, "a")
    settle(cluster)
    cluster.stop("c")
    cluster.start("c")
    cluster.agree(3)
    settle(cluster)
    assert copied(cluster.nodes["c"]) == 0
    told = json.loads(fetch(f"{cluster.nodes['a'].url}/v1/forebay/cluster?figures=true"))
    said = {m["name"]: m["figures"] for m in told["members"]}
    assert said["c"]["copies_behind"] == 0 and said["b"]["copied_bytes"] > 0


def test_with_three_copies_two_nodes_may_go_at_once(cluster, bucket):
    at = cluster.options.index(f"buckets.{BUCKET}.mirror=2")
    cluster.options[at] = f"buckets.{BUCKET}.mirror=3"
    cluster.start_all("abc")
    cluster.read(bucket, "a")
    settle(cluster)
    for gone in "ab":
        cluster.stop(gone, signal.SIGKILL)
    cluster.read(bucket, "c")
    assert cluster.from_bucket() <= 1.2 * everything(bucket)


def test_a_copy_is_of_what_was_written_last(origin, cluster, bucket):
    """Objects change: what is written through one node is what copies are of, whoever is asked."""
    cluster.options[cluster.options.index("immutable")] = "1h"
    cluster.start_all("abc")
    s3 = {name: s3_client(node.url) for name, node in cluster.nodes.items()}
    made = random.Random(5)
    keys = [f"changing{i}" for i in range(40)]
    objects = {}
    for turn in range(3):
        for number, key in enumerate(keys):
            objects[key] = made.randbytes(20_000 + turn)
            at = "abc"[(number + turn) % 3]
            s3[at].put_object(Bucket=BUCKET, Key=key, Body=objects[key])
        cluster.read(objects, "abc"[turn])
        # Some are written again while they are copied.
        time.sleep(turn)
    settle(cluster)
    before = cluster.from_bucket()
    cluster.stop("a", signal.SIGKILL)
    cluster.read(objects, "b", "c")
    assert cluster.from_bucket() - before <= 0.1 * sum(map(len, objects.values()))


def test_without_a_second_node_there_is_one_copy(cluster, bucket):
    cluster.start_all("a")
    cluster.read(bucket)
    assert metric(cluster.nodes["a"], "forebay_mirror_behind_members") == 0
    assert fetch(f"{cluster.nodes['a'].url}/{BUCKET}/o000") == bucket["o000"]


@pytest.fixture
def pins(origin, etcd, tmp_path):
    """Nodes of which one keeps everything, and two what is pinned so."""
    made = Cluster(
        origin,
        tmp_path,
        f"etcd://127.0.0.1:{etcd.port}/pins",
        *("--set", f"cluster.forget_after={FORGET_SECONDS}s"),
        bucket=BUCKET,
    )
    yield made
    made.close()


def cache_command(node: Node, *words: str) -> tuple[int, dict]:
    """`forebay WORDS`, asked of this node: its exit code, and its report."""
    command = [forebay_program(), *words, "--node", node.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def pinned_bytes(node: Node, key: str) -> int:
    told = json.loads(fetch(f"{node.url}/v1/forebay/stat/{BUCKET}/{key}"))
    return told["cached_bytes"] if told["pinned"] else 0


def lacks(cluster: Cluster, bucket: dict[str, bytes], copies: int) -> list[str]:
    """What is pinned on fewer disks than that."""

    def there(key: str) -> int:
        return sum(pinned_bytes(node, key) for node in cluster.nodes.values())

    with ThreadPoolExecutor(4) as pool:
        found = zip(bucket, pool.map(there, bucket), strict=True)
        return [key for key, n in found if n < copies * len(bucket[key])]


def test_what_is_pinned_on_two_nodes_stays_there_as_nodes_go(pins, bucket):
    pins.start_all("abcd")
    # Other objects of the bucket are those of other tests.
    everything_here = f"{BUCKET}/o"
    code, dry = cache_command(pins.nodes["a"], "pin", everything_here, "--mirror", "2", "--dry-run")
    assert (code, dry["changed"], pins.from_bucket()) == (0, len(bucket), 0)
    code, report = cache_command(pins.nodes["a"], "pin", everything_here, "--mirror", "2")
    assert (code, report["changed"], report["failed"]) == (0, len(bucket), 0), report
    assert report["mirror"] == 2
    assert lacks(pins, bucket, 2) == []
    # Each byte left the bucket once.
    assert pins.from_bucket() == everything(bucket)
    code, report = cache_command(pins.nodes["c"], "pin", everything_here, "--mirror", "2")
    assert (code, report["changed"], report["unchanged"]) == (0, 0, len(bucket))
    for gone in "ab":
        pins.stop(gone, signal.SIGKILL)
        pins.read(bucket, "d")
        assert pins.from_bucket() <= 1.2 * everything(bucket)
        pins.forget(gone)
        eventually(lambda: not lacks(pins, bucket, 2), "there are two copies again")
    # A lost disk, too.
    pins.stop("c")
    shutil.rmtree(pins.directory / "c" / "cache")
    pins.start("c")
    eventually(lambda: not lacks(pins, bucket, 2), "there are two copies again")
    assert pins.from_bucket() <= 1.2 * everything(bucket)
    # Unpinned is unpinned everywhere.
    code, report = cache_command(pins.nodes["c"], "unpin", everything_here)
    assert (code, report["changed"]) == (0, len(bucket))
    assert [metric(node, "forebay_store_pins") for node in pins.nodes.values()] == [0, 0]


def test_a_pin_on_several_nodes_says_what_it_cannot_do(pins, bucket):
    pins.start_all("a")
    node = pins.nodes["a"]

    def refused(path: str) -> str:
        with pytest.raises(urllib.error.HTTPError) as refused:
            said = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{node.url}/v1/forebay/{path}", headers=said)
            urllib.request.urlopen(asked, data=b"{}", timeout=60)
        assert refused.value.code == 400
        return refused.value.read().decode()

    of = f"bucket={BUCKET}&prefix=o00"
    assert "one node alone" in refused(f"pin?{of}&mirror=2")
    assert "mirror is 4" in refused(f"pin?{of}&mirror=4")
    assert "only pins" in refused(f"evict?{of}&mirror=2")
    pins.start("b")
    pins.agree(2)
    # Three nodes are wanted, and there are two; when a third comes, it gets its share.
    code, report = cache_command(node, "pin", f"{BUCKET}/o00", "--mirror", "3")
    assert (code, report["mirror"], report["failed"]) == (0, 2, 0)
    some = {key: value for key, value in bucket.items() if key.startswith("o00")}
    assert lacks(pins, some, 2) == []
    command = [forebay_program(), "pin", "--list", "--node", node.url]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert f"{BUCKET}/o000 on 3 nodes\n" in listed
    pins.start("c")
    pins.agree(3)
    eventually(lambda: not lacks(pins, some, 3), "the third node has them")
    assert pins.from_bucket() == sum(map(len, some.values()))


def asked_and_left(node: Node, path: str, seconds: float) -> None:
    """Asks, and is gone after so many seconds, whatever was done."""
    host, port = node.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = f"POST /v1/forebay/{path} HTTP/1.1\r\nHost: node\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        connection.sendall(head.encode())
        time.sleep(seconds)


def test_what_is_to_be_pinned_is_pinned_though_the_client_has_left(pins, bucket):
    """A node that starts again does all that was noted: it finds nothing left to do."""
    pins.start_all("ab")
    keys = [key for key, value in bucket.items() if 0 < len(value) < 300_000]
    for i, key in enumerate(keys):
        path = f"pin?bucket={BUCKET}&prefix={key}"
        asked_and_left(pins.nodes["a"], path, i % 20 / 100)

    def pinned() -> list[str]:
        command = [forebay_program(), "pin", "--list", "--node", pins.nodes["a"].url]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return listed.stdout.splitlines()

    def still() -> list[str]:
        before = pinned()
        time.sleep(16)
        return before if before == pinned() else []

    # A node does within two looks of 3 s what it noted, and asks others every 10 s what they did.
    before = eventually(still, "some are pinned, and no more are")
    for name in "ab":
        pins.stop(name)
        pins.start(name)
        pins.agree(2)
    time.sleep(8)
    assert pinned() == before
