"""Jobs of several ranks: each node fetches ahead what its own ranks will read, and no more."""

from __future__ import annotations

import random
import signal
import time

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import Cluster, eventually, received
from conftest import s3_client
from forebay import _lease, _node
from servers import REGION, Etcd, Node

OBJECTS, OBJECT_BYTES = 240, 40_000
WHOLE = OBJECTS * OBJECT_BYTES
BATCH = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A bucket `ranks`: objects, and a Parquet file with a column that is nearly all of it."""
    bucket = tmp_path_factory.mktemp("origin") / "ranks"
    (bucket / "o").mkdir(parents=True)
    made = random.Random(5)
    for i in range(OBJECTS):
        (bucket / f"o/{i:04}").write_bytes(made.randbytes(OBJECT_BYTES))
    rows = 4000
    table = pa.table({"id": np.arange(rows), "big": [made.randbytes(8000) for _ in range(rows)]})
    (bucket / "t").mkdir()
    pq.write_table(table, bucket / "t/0.parquet", row_group_size=1000, compression="none")
    return bucket


@pytest.fixture
def nodes(directory, tmp_path):
    made = [
        Node("", [], tmp_path / name, options=["--origin", f"file://{directory}"])
        for name in ("one", "two")
    ]
    yield made
    for node in made:
        node.stop(signal.SIGKILL)


def begun(node: Node, pattern: str, rank: int, world: int, shuffle="full", **more):
    """A loop of this rank that has taken one batch."""
    ds = forebay.open(pattern, url=node.url)
    options = {"batch_size": BATCH, "shuffle": shuffle, "seed": 3, "epochs": 1, "prefetch": 0}
    loader = ds.loader(**options, rank=rank, world_size=world, **more)
    iteration = iter(loader)
    next(iteration)
    return iteration


def settled(node: Node) -> float:
    """What left the bucket for this node, once it fetches no more."""
    told = [-2.0, -1.0, 0.0]

    def same():
        told.append(received(node))
        return told[-1] == told[-2] == told[-3] > 0

    eventually(lambda: node.metrics()["forebay_plan_ahead_bytes_total"] > 0, "it fetches ahead")
    while not same():
        time.sleep(1.5)
    return told[-1]


def test_each_of_two_nodes_fetches_the_half_ahead_that_its_rank_reads(nodes):
    running = [begun(node, "ranks/o/**", rank, 2) for rank, node in enumerate(nodes)]
    halves = [settled(node) for node in nodes]
    assert all(half == pytest.approx(WHOLE / 2, rel=0.05) for half in halves), halves
    # All that is left is there, and each rank has read its own half.
    seen = []
    for iteration, node in zip(running, nodes, strict=True):
        before = received(node)
        batches = list(iteration)
        assert len(batches) == OBJECTS // BATCH // 2 - 1
        seen += [key for batch in batches for key in batch.arrow()["key"].to_pylist()]
        assert received(node) == before, "everything had been fetched ahead"
    assert len(set(seen)) == len(seen) == OBJECTS - 2 * BATCH


def test_a_node_of_both_ranks_fetches_all_ahead_and_of_one_that_left_no_more(nodes):
    node = nodes[0]
    first = begun(node, "ranks/o/**", 0, 4)
    assert settled(node) == pytest.approx(WHOLE / 4, rel=0.05)
    second = begun(node, "ranks/o/**", 3, 4)
    eventually(lambda: received(node) > WHOLE * 0.47, "what the other rank reads comes too")
    assert settled(node) == pytest.approx(WHOLE / 2, rel=0.05)
    first.close()
    second.close()


def test_only_the_columns_that_are_read_are_fetched_ahead(nodes):
    whole = 4000 * 8000
    narrow = begun(nodes[0], "ranks/t/*.parquet", 0, 1, forebay.Block(2), columns=["id"])
    # A column's bytes come with those beside them, in chunks of 1 MiB; and the footer.
    assert settled(nodes[0]) < 8 << 20
    before = received(nodes[0])
    rows = [row["id"] for batch in narrow for row in batch]
    assert len(rows) == 4000 - BATCH and received(nodes[0]) == before
    wide = begun(nodes[1], "ranks/t/*.parquet", 0, 1, forebay.Block(2))
    assert settled(nodes[1]) >= whole
    wide.close()


def test_only_rows_that_were_chosen_are_fetched_ahead(nodes):
    ds = forebay.open("ranks/o/**", url=nodes[0].url)
    chosen = ds.select(range(0, OBJECTS, 4))
    iteration = iter(chosen.loader(batch_size=BATCH, shuffle=forebay.Full(), seed=1))
    seen = [next(iteration)]
    assert settled(nodes[0]) == pytest.approx(WHOLE / 4, rel=0.05)
    before = received(nodes[0])
    seen += list(iteration)
    keys = {key for batch in seen for key in batch.arrow()["key"].to_pylist()}
    assert len(keys) == OBJECTS // 4 and received(nodes[0]) == before


def test_a_job_that_goes_on_with_other_ranks_has_another_part_fetched_ahead(nodes):
    node = nodes[0]
    ds = forebay.open("ranks/o/**", url=node.url)
    options = {"batch_size": BATCH, "shuffle": "full", "seed": 4, "epochs": 1, "prefetch": 0}
    before = ds.loader(**options, rank=0, world_size=4)
    iteration = iter(before)
    for _ in range(5):
        next(iteration)
    assert settled(node) == pytest.approx(WHOLE / 4, rel=0.05)
    state = before.state_dict()
    assert state["position"] == 5 * 4 * BATCH
    before.close()
    resumed = ds.loader(**options, rank=1, world_size=3)
    resumed.load_state_dict(state)
    iteration = iter(resumed)
    next(iteration)
    left = (OBJECTS - state["position"]) // 3 * OBJECT_BYTES
    # A quarter of its third was there.
    eventually(
        lambda: received(node) >= WHOLE / 4 + left * 0.6, "what it reads now is fetched ahead"
    )
    settled(node)
    got = received(node)
    keys = list(iteration)
    assert len(keys) == (OBJECTS - state["position"]) // BATCH // 3 - 1
    assert received(node) == got


def test_ranks_at_nodes_of_a_cluster_take_each_byte_from_the_bucket_once(origin, tmp_path):
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket="dealt", CreateBucketConfiguration={"LocationConstraint": REGION})
    made = random.Random(6)
    for i in range(OBJECTS // 2):
        s3.put_object(Bucket="dealt", Key=f"o/{i:04}", Body=made.randbytes(OBJECT_BYTES))
    etcd = Etcd(tmp_path / "etcd")
    source = f"etcd://127.0.0.1:{etcd.port}/dealt"
    cluster = Cluster(origin, tmp_path, source, bucket="dealt")
    try:
        for name in "ab":
            cluster.start(name)
        cluster.agree(2)
        two = list(cluster.nodes.values())
        running = [begun(node, "dealt/o/**", rank, 2) for rank, node in enumerate(two)]
        ahead = [lambda n=n: n.metrics()["forebay_plan_ahead_bytes_total"] for n in two]
        for told in ahead:
            eventually(lambda told=told: told() > 0.9 * WHOLE / 4, "each fetches its half ahead")
        taken = sum(len(list(iteration)) for iteration in running)
        assert taken == OBJECTS // 2 // BATCH - 2
        assert cluster.from_bucket() == pytest.approx(WHOLE / 2, rel=0.01)
        assert all(told() <= 1.1 * WHOLE / 4 for told in ahead), [told() for told in ahead]
    finally:
        cluster.close()
        etcd.stop(signal.SIGKILL)


def test_a_node_of_an_earlier_release_is_told_what_it_knows(nodes, monkeypatch):
    told = []

    def earlier(client, registration, account=None):
        told.append(registration)
        for field in _lease.LATER_FIELDS:
            if field in registration:
                raise forebay.InvalidRequest(f"the body of the request: unknown field `{field}`")
        return {"lease": "0" * 16}

    monkeypatch.setattr(_node, "follow", earlier)
    monkeypatch.setattr(_node, "unfollow", lambda *_: None)
    for world, columns, ahead in [(2, None, 0), (1, ["key", "data"], 0), (1, None, None)]:
        told.clear()
        loop = begun(nodes[0], "ranks/o/**", 0, world, columns=columns)
        eventually(lambda: len(told) == 2, "it is told twice")
        loop.close()
        whole, less = told
        assert whole["partition"] == {
            "world": world,
            "ranks": [0],
            "batch": {"rows": BATCH},
            "uneven": "drop",
        }
        assert whole.get("columns") == columns and "ahead_bytes" not in whole
        assert less.get("ahead_bytes") == ahead
        assert not {"partition", "columns"} & less.keys() and less["plan"] == whole["plan"]
