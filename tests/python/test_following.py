"""What a loader and its node tell each other: the order, which the node's cache follows, and where
the time went.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import forebay
import pytest
import tables
from servers import Node
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
    with urllib.request.urlopen(f"{node.url}/v1/datasets/plans", timeout=60) as answer:
        return json.load(answer)["leases"]


def test_a_node_is_not_asked_to_follow_what_has_ended(ds, tables, caplog):
    loader = ds.loader(10, epochs=2, seed=random.randrange(1 << 40))
    told = loader.lease(loader.order.start())
    for epoch in (2, 1):
        told.tell(loader.order.at(epoch, 0))
        assert (epoch == 1) == (loader.plan in {lease["plan"] for lease in leases(tables)})
    told.release()
    # Of a state in which it has ended, too.
    ended = loader.order.at(2, 0)
    told = loader.lease(ended)
    told.tell(ended)
    assert loader.plan not in {lease["plan"] for lease in leases(tables)}
    told.release()
    assert not caplog.records


def test_the_cache_follows_the_order_of_a_job(ds, tables):
    plans = {lease["plan"] for lease in leases(tables)}
    options = {"batch_size": 4, "shuffle": "full", "seed": random.randrange(1 << 40), "epochs": 2}
    told = ds.loader(**options)
    assert told.plan not in plans
    list(ds.loader(follow=False, **options))
    assert told.plan not in {lease["plan"] for lease in leases(tables)}
    iteration = iter(told)
    next(iteration)
    # The node is told beside the first requests: those after that say where the job is.
    until = time.monotonic() + 30
    while told.plan not in {lease["plan"] for lease in leases(tables)}:
        assert time.monotonic() < until
        time.sleep(0.01)
    for _ in range(4):
        next(iteration)
    [lease] = [lease for lease in leases(tables) if lease["plan"] == told.plan]
    assert (lease["leases"], lease["epoch"], lease["expires_in_seconds"] > 200) == (1, 0, True)
    assert 20 <= lease["position"] <= 4 * 12, "by the rows that were asked for"
    # Workers, and the epochs of the same job, have no leases of their own.
    for _ in range(2):
        list(DataLoader(told.torch(), batch_size=None, num_workers=2))
    assert [lease["leases"] for lease in leases(tables) if lease["plan"] == told.plan] == [1]


def test_the_cache_follows_the_order_of_rows_that_were_chosen(ds, tables):
    train, test = ds.train_test_split(0.3, seed=4)
    seed = random.randrange(1 << 40)
    # Where a row is requested that comes several times, the job may be at the first of them.
    for of, least in (
        (train, 20),
        (test.repeat(3), 4),
        (forebay.mix([train, test], weights=[2, 1]), 20),
    ):
        loader = of.loader(batch_size=4, shuffle="full", seed=seed, epochs=2, prefetch=1)
        plan = loader.plan
        iteration = iter(loader)
        next(iteration)
        wait_until(lambda plan=plan: held(tables, plan))
        for _ in range(5):
            next(iteration)
        place = partial(position, tables, plan)
        wait_until(lambda place=place, least=least: place() >= least)
        assert place() <= 4 * 14, "by the rows that were asked for"
        loader.close()
        wait_until(lambda plan=plan: not held(tables, plan))


def position(node, plan: str) -> int:
    [place] = [lease["position"] for lease in leases(node) if lease["plan"] == plan]
    return place


def held(node, plan: str) -> int:
    return sum(lease["leases"] for lease in leases(node) if lease["plan"] == plan)


def wait_until(true):
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped", "left", "fork", "workers"])
def test_a_lease_ends_with_its_loop(ds, tables, end):
    loader = ds.loader(4, shuffle="full", seed=random.randrange(1 << 40))
    plan = loader.plan
    iteration = iter(loader)
    next(iteration)
    wait_until(lambda: held(tables, plan) == 1)
    if end == "exhausted":
        list(iteration)
    elif end == "closed":
        loader.close()
    elif end == "dropped":
        del iteration, loader
        gc.collect()
    elif end == "left":
        del iteration
        for _ in loader:
            break
        gc.collect()
    elif end == "fork":
        # A child that inherits the loop has no influence on it.
        child = os.fork()
        if child == 0:
            del iteration
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert held(tables, plan) == 1
        loader.close()
    else:
        loader.close()
        wait_until(lambda: held(tables, plan) == 0)
        for take in (1000, 2):
            batches = iter(DataLoader(loader.torch(), batch_size=None, num_workers=2))
            for _, _ in zip(range(take), batches, strict=False):
                pass
            del batches
            gc.collect()
    wait_until(lambda: held(tables, plan) == 0)


def test_a_lease_ends_with_its_process(tables):
    program = f"""
import forebay
ds = forebay.open("tables/a/*.parquet", url={tables.url!r})
loader = ds.loader(4, shuffle="full", seed={random.randrange(1 << 40)})
batches = iter(loader)
for _ in range(3):
    next(batches)
print(loader.plan)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert held(tables, done.stdout.strip()) == 0


def test_a_node_that_says_nothing_holds_the_end_of_a_loop_up_for_a_moment(tables, tmp_path):
    node = Node(
        "", [], tmp_path, options=["--origin", f"file://{tables.directory.parent / 'tables'}"]
    )
    try:
        loader = forebay.open("tables/a/*.parquet", url=node.url).loader(4)
        next(iter(iteration := iter(loader)))
        wait_until(lambda: held(node, loader.plan) == 1)
        node.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        iteration.close()
        assert time.monotonic() - began < 30
    finally:
        node.process.send_signal(signal.SIGCONT)
        node.stop(signal.SIGKILL)


@pytest.mark.parametrize("kind", ["one", "mixed", "composed"])
def test_a_node_that_knows_nothing_of_the_datasets_opens_them_to_follow(
    tables, tmp_path, caplog, kind
):
    options = ["--origin", f"file://{tables.directory.parent / 'tables'}"]
    node = Node("", [], tmp_path / "first", options=options)
    client = forebay.Client(node.url)
    ds = forebay.open("tables/a/*.parquet", client=client)
    if kind == "composed":
        ds = forebay.mix([ds.shard(2, 1), ds.select([3, 99, 4])], weights=[1, 1])
    if kind == "mixed":
        ds = forebay.mix([ds, forebay.open("tables/b/*.parquet", client=client)], weights=[1, 1])
    node.stop()
    again = Node("", [], tmp_path / "again", options=options, listen=f"127.0.0.1:{node.port}")
    try:
        loader = ds.loader(4)
        lease = loader.lease(loader.state_dict())
        lease.tell({"epoch": 0, "position": 0})
        assert held(again, loader.plan) == 1 and not caplog.records
        lease.release()
    finally:
        again.stop()


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
    until = time.monotonic() + 60
    while any(lease["plan"] == streamed.plan for lease in leases(tables)):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A node over tars that are compressed as a whole, and a plain one."""
    root = tmp_path_factory.mktemp("packed")
    (root / "bkt").mkdir()
    for name, mode in (("a.tar.gz", "w:gz"), ("b.tar.gz", "w:gz"), ("plain.tar", "w")):
        with tarfile.open(root / "bkt" / name, mode) as archive:
            for n in range(55):
                member = tarfile.TarInfo(f"{name[0]}{n:03}.bin")
                member.size = 200
                archive.addfile(member, io.BytesIO(b"%d" % (n % 10) * 200))
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'bkt'}"])
    yield node
    node.stop()


def cpu_seconds(node) -> float:
    fields = Path(f"/proc/{node.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("source", "columns"),
    [("bkt/*.tar.gz", ["__key__", "bin"]), ("bkt/plain.tar", ["__key__"])],
)
def test_columns_whose_bytes_are_there_already_keep_no_thread_of_the_node_busy(
    packed, source, columns
):
    ds = forebay.open(source, url=packed.url, columns=columns)
    for rank in range(4):
        loader = ds.loader(3, rank=rank, world_size=4, prefetch=0, retry_for=10)
        assert sum(len(batch) for batch in loader) == len(ds) // 12 * 3
    loader = ds.loader(3, rank=0, world_size=4, prefetch=0)
    steps = iter(loader)
    next(steps)
    # It rests in mid-epoch, and the node has nothing to do.
    until = time.monotonic() + 60
    while True:
        time.sleep(1.0)
        before = cpu_seconds(packed)
        time.sleep(2.0)
        if cpu_seconds(packed) - before < 0.5:
            break
        assert time.monotonic() < until
    loader.close()


def test_a_plan_of_a_hostile_client_costs_the_node_no_answer(packed):
    client = forebay.Client(packed.url, timeout=60)
    ds = forebay.open("bkt/plain.tar", client=client)

    def post(path: str, document: bytes) -> tuple[int, bytes]:
        request = urllib.request.Request(packed.url + path, document, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read(1000)
        except urllib.error.HTTPError as e:
            return e.code, e.read()

    # A type that is nested without end.
    deep = "List(" * 8000 + "Int64" + ")" * 8000
    spec = {"sources": ["bkt/none.jsonl"], "schema": {"x": deep}}
    assert post("/v1/datasets", json.dumps(spec).encode())[0] == 400
    # A row that is not there, of a dataset whose order is followed.
    loader = ds.loader(5, shuffle="full", prefetch=0)
    next(iter(loader))
    status, text = post(f"/v1/datasets/{ds.id}/rows", (2**64 - 1).to_bytes(8, "little"))
    assert status == 416, text
    # A schedule of many datasets and stages, none of which makes a short cycle.
    sources = [{"dataset": ds.id, "weight": 1.0}] * 200
    stages = [
        {"from": n * 1000, "weights": [1 + ((n * 31 + i * 17) % 101) / 7 for i in range(200)]}
        for n in range(100)
    ]
    plan = ds.loader(5).order.document | {
        "sources": sources,
        "schedule": stages,
        "epoch_rows": 1000,
    }
    began = time.monotonic()
    status, text = post("/v1/datasets/plans", json.dumps({"plan": plan}).encode())
    assert status == 201, text
    assert time.monotonic() - began < 60
    assert forebay.open("bkt/plain.tar", client=client).id == ds.id
