"""Batches that a client puts together itself, of what the nodes of a cluster own: real nodes, a
real etcd, a real S3 server.
"""

from __future__ import annotations

import io
import pickle
import random
import re
import signal
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forebay
import pytest
from clusters import Cluster, eventually, metric, status
from conftest import s3_client
from servers import REGION, Etcd, Node

BUCKET = "direct"
SHARD = "shard.tar"


@pytest.fixture(scope="module")
def bucket(origin) -> dict[str, bytes]:
    """Many small objects, an empty one, one of several units, and a shard."""
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    made = random.Random(5)
    sizes = [made.randrange(1, 40_000) for _ in range(120)] + [0, 20 << 20]
    objects = {f"o{i:03}": made.randbytes(size) for i, size in enumerate(sizes)}
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for i in range(20):
            info = tarfile.TarInfo(f"{i:04}.bin")
            info.size = 1000 + i
            tar.addfile(info, io.BytesIO(bytes([i]) * info.size))
    objects[SHARD] = shard.getvalue()
    for key, value in objects.items():
        s3.put_object(Bucket=BUCKET, Key=key, Body=value)
    return objects


@pytest.fixture
def cluster(origin, bucket, tmp_path):
    etcd = Etcd(tmp_path / "etcd")
    made = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/direct", bucket=BUCKET)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(made.start, "abc"))
    made.agree(3)
    yield made
    made.close()
    etcd.stop(signal.SIGKILL)


def small(bucket: dict[str, bytes]) -> list[str]:
    return [key for key in bucket if key != SHARD]


def answered(nodes) -> list[float]:
    """The batches that each node answered."""
    return [metric(node, "forebay_batch_duration_seconds_count") for node in nodes]


def asked(nodes) -> int:
    """What nodes asked each other for."""
    told = (m.get("link") for node in nodes for m in status(node)["members"])
    return sum(link["questions"] for link in told if link)


def all_asked(client: forebay.Client, nodes, bucket: dict[str, bytes]) -> forebay.Client:
    """The client, once it asks all of these nodes for what they own."""
    nodes = list(nodes)

    def ready() -> bool:
        before = answered(nodes)
        client.batch(small(bucket), bucket=BUCKET).wait()
        return [a - b for a, b in zip(answered(nodes), before, strict=True)] == [1] * len(nodes)

    eventually(ready, "the client asks each node for what it owns")
    return client


def read(client: forebay.Client, bucket: dict[str, bytes], keys: list[str]) -> None:
    batch = client.batch(keys, bucket=BUCKET)
    for key, item in zip(keys, batch, strict=True):
        assert bytes(item) == bucket[key], key


def test_each_owner_sends_its_own_and_the_answer_is_as_of_one_node(cluster, bucket):
    nodes = list(cluster.nodes.values())
    ordinary = forebay.Client(nodes[0].url, direct=False)
    client = all_asked(forebay.Client(nodes[0].url, direct=True), nodes, bucket)
    assert cluster.from_bucket() == sum(len(bucket[key]) for key in small(bucket))
    entries = [(BUCKET, key) for key in small(bucket)]
    entries += [(BUCKET, f"missing{i}") for i in range(10)]
    members = [(BUCKET, SHARD, f"{i:04}.bin") for i in range(20)]
    ranges = [
        {"bucket": BUCKET, "objname": "o121", "start": start, "length": 1000}
        for start in range(0, 20 << 20, 1 << 20)
    ]
    for seed in range(5):
        wanted = entries + entries[:30] + members + ranges
        random.Random(seed).shuffle(wanted)
        before, questions = answered(nodes), asked(nodes)
        got = client.batch(wanted, continue_on_error=True)
        got.wait()
        assert [a - b for a, b in zip(answered(nodes), before, strict=True)] == [1, 1, 1]
        # Parts of an archive may be another's; nothing else is.
        assert asked(nodes) - questions <= len(members)
        told = ordinary.batch(wanted, continue_on_error=True)
        assert bytes(got) == bytes(told), seed
        assert (got.names, got.sizes, got.errors) == (told.names, told.sizes, told.errors)
        assert len(got.errors) == 10


def test_few_entries_are_asked_of_their_owners_too_if_that_is_wanted(cluster, bucket):
    nodes = list(cluster.nodes.values())
    client = all_asked(forebay.Client(nodes[0].url, direct=True), nodes, bucket)
    keys, questions, before = small(bucket)[:60], asked(nodes), answered(nodes)
    for count in (1, 2, 3):
        for first in range(0, len(keys), count):
            read(client, bucket, keys[first : first + count])
    assert asked(nodes) - questions <= 5, "a node asked another one for what the client might have"
    assert all(a > b for a, b in zip(answered(nodes), before, strict=True))


def failure(ask) -> forebay.Error:
    with pytest.raises((forebay.NotFound, forebay.Truncated)) as failed:
        ask()
    return failed.value


def test_what_fails_says_the_same_as_one_node_would(cluster, bucket):
    nodes = list(cluster.nodes.values())
    ordinary = forebay.Client(nodes[0].url, direct=False)
    client = all_asked(forebay.Client(nodes[0].url, direct=True), nodes, bucket)
    for where in (0, 17, 119):
        keys = small(bucket)[:120]
        keys[where] = "missing"
        for asking in (ordinary, client):
            slot = forebay._forebay.Ring(1, 8 << 20).take()
            said = rf"in\[{where}\] {BUCKET}/missing: it does not exist"
            for ask in (
                lambda a=asking, k=keys: a.batch(k, bucket=BUCKET).wait(),
                lambda a=asking, k=keys, s=slot: a.batch_into(k, s, bucket=BUCKET),
            ):
                # Refused at once, or broken off where it is missing. The reason is the last that a
                # node sends: it may be lost with the connection, but not each time.
                told = [str(failure(ask)) for _ in range(5)]
                assert all(re.search(f"{said}|the answer broke off", words) for words in told)
                assert any(re.search(said, words) for words in told), (told, asking is client)
    with pytest.raises(forebay.NotFound):
        client.batch(small(bucket), bucket="no-such-bucket").wait()


def test_slots_of_a_ring_are_filled_by_owners_and_a_pickled_client_asks_them_too(cluster, bucket):
    nodes = list(cluster.nodes.values())
    client = all_asked(forebay.Client(nodes[0].url, direct=True), nodes, bucket)
    copied = all_asked(pickle.loads(pickle.dumps(client)), nodes, bucket)
    keys = [key for key in small(bucket) if len(bucket[key]) < 1 << 20]
    for asking in (client, copied):
        slot = forebay._forebay.Ring(1, 8 << 20).take()
        before = answered(nodes)
        sizes = asking.batch_into(keys, slot, bucket=BUCKET)
        assert [a - b for a, b in zip(answered(nodes), before, strict=True)] == [1, 1, 1]
        at, view = 0, memoryview(slot)
        for key, size in zip(keys, sizes, strict=True):
            assert bytes(view[at : at + size]) == bucket[key], key
            at += size


def test_without_a_cluster_one_node_answers(origin, bucket, tmp_path):
    node = Node(origin.url, [BUCKET], tmp_path / "alone", cache_size="256MiB")
    try:
        client = forebay.Client(node.url, direct=True)
        for _ in range(3):
            read(client, bucket, small(bucket))
        assert answered([node]) == [3]
    finally:
        node.stop(signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_owners_that_die_or_fall_silent_cost_no_entry(cluster, bucket, how):
    urls = [node.url for node in cluster.nodes.values()]
    client = all_asked(forebay.Client(urls, direct=True), cluster.nodes.values(), bucket)
    gone = cluster.nodes["c"]
    over = threading.Event()
    slowest, read_batches, failed = 0.0, 0, []

    def loop() -> None:
        nonlocal slowest, read_batches
        order = random.Random(1)
        while not over.is_set():
            keys = small(bucket)
            order.shuffle(keys)
            began = time.monotonic()
            try:
                read(client, bucket, keys)
            except (AssertionError, forebay.Error) as e:
                failed.append(e)
                return
            slowest = max(slowest, time.monotonic() - began)
            read_batches += 1

    loops = [threading.Thread(target=loop) for _ in range(2)]
    for thread in loops:
        thread.start()
    try:
        time.sleep(1)
        gone.process.send_signal(how)
        before, until = read_batches, time.monotonic() + 60
        time.sleep(8)
        eventually(lambda: read_batches > before + 3 or failed, "reading goes on")
        assert time.monotonic() < until
    finally:
        over.set()
        for thread in loops:
            thread.join()
        if how == signal.SIGSTOP:
            gone.process.send_signal(signal.SIGCONT)
    assert not failed
    # One silence, and one reroute.
    assert slowest < 40, slowest
    if how == signal.SIGSTOP:
        # It is asked again.
        all_asked(client, cluster.nodes.values(), bucket)
    else:
        cluster.nodes.pop("c").stop(signal.SIGKILL)


def test_a_node_that_joins_is_asked_for_what_it_owns(cluster, bucket):
    client = forebay.Client(cluster.nodes["a"].url, direct=True)
    all_asked(client, cluster.nodes.values(), bucket)
    cluster.start("d")
    cluster.agree(4)
    all_asked(client, cluster.nodes.values(), bucket)
    read(client, bucket, small(bucket))


def test_by_default_a_node_on_this_machine_is_asked_for_everything(cluster, bucket):
    nodes = list(cluster.nodes.values())
    client = forebay.Client(nodes[0].url)
    before = answered(nodes)
    for _ in range(3):
        read(client, bucket, small(bucket))
        time.sleep(0.3)
    assert [a - b for a, b in zip(answered(nodes), before, strict=True)] == [3, 0, 0]
