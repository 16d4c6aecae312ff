"""Push streams end to end: a node over a real S3 server, the compiled receiver, and bad days in
between.
"""

from __future__ import annotations

import functools
import io
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forebay._forebay import Stream
from servers import Node

ROWS, GROUP = 6000, 100
BATCH = 32


def table(first: int, rows: int) -> pa.Table:
    ids = np.arange(first, first + rows)
    return pa.table({"id": ids, "text": [f"{i} " + "x" * (i * 37 % 3000) for i in ids]})


@pytest.fixture(scope="module")
def parquet(origin_s3):
    """Three Parquet files, 6,000 rows."""
    for i in range(3):
        out = io.BytesIO()
        pq.write_table(table(i * ROWS // 3, ROWS // 3), out, row_group_size=GROUP)
        origin_s3.put_object(Bucket="scratch", Key=f"stream/rows-{i}.parquet", Body=out.getvalue())
    return "scratch/stream/*.parquet"


def opened(client: forebay.Client, source: str) -> str:
    return json.loads(bytes(client.open_dataset(json.dumps({"sources": [source]}))))["id"]


def request(dataset: str, epochs: int = 1, shuffle: dict | None = None, **more) -> str:
    plan = {
        "sources": [{"dataset": dataset}],
        "seed": 7,
        "shuffle": shuffle or {"kind": "block", "blocks": 8},
    }
    return json.dumps(
        {
            "plan": plan,
            "partition": {"batch": {"rows": BATCH}, "uneven": "pad"},
            "until_epoch": epochs,
            **more,
        }
    )


def ids(step) -> list[int]:
    return pa.record_batch(step.batch).column("id").to_pylist()[: len(step.batch) - step.padding]


@pytest.fixture(scope="module")
def dataset(client, parquet):
    return opened(client, parquet)


@pytest.fixture(scope="module")
def order(client, dataset):
    """What two epochs deliver over one connection."""
    return [
        (s.step, s.epoch, s.next, ids(s))
        for s in Stream(client, request(dataset, 2), connections=1)
    ]


def quiet(node, patience: float = 60) -> None:
    """Waits until the node holds nothing for streams."""
    deadline = time.monotonic() + patience
    while True:
        metrics = node.metrics()
        left = {
            name: metrics[name] for name in ("forebay_streams_open", "forebay_streams_window_bytes")
        }
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_every_row_comes_once_in_an_epoch_and_the_rows_are_right(client, dataset, order):
    steps = -(-ROWS // BATCH)
    assert [s[0] for s in order] == list(range(2 * steps)) and {s[1] for s in order} == {0, 1}
    for epoch in (0, 1):
        rows = [i for s in order if s[1] == epoch for i in s[3]]
        assert sorted(rows) == list(range(ROWS)) and rows != sorted(rows)
    assert order[0][2] == (0, BATCH) and order[steps - 1][2] == (1, 0), (
        "where a job is that has yielded the step"
    )
    with Stream(client, request(dataset, columns=["text"]), connections=2) as stream:
        first = stream.next().batch
        assert first.column_names == ["text"]
        assert pa.record_batch(first).column("text").to_pylist() == [
            f"{i} " + "x" * (i * 37 % 3000) for i in order[0][3]
        ]


@pytest.mark.parametrize("connections", [None, 2, 5, 16])
def test_the_order_is_the_same_over_any_number_of_connections(client, dataset, order, connections):
    stream = Stream(client, request(dataset, 2), connections=connections, ahead_bytes=300_000)
    assert [(s.step, s.epoch, s.next, ids(s)) for s in stream] == order
    assert stream.next() is None, "the end stays"


def test_a_stream_goes_on_from_a_state_and_from_a_step(client, dataset, order):
    tail = [
        (s.epoch, ids(s)) for s in Stream(client, request(dataset, 2), connections=3, from_step=100)
    ]
    assert tail == [(s[1], s[3]) for s in order[100:]]
    # A place of the plan, as the compiled plan gives it.
    shape = bytes(client.dataset_shape(dataset))
    plan = forebay._forebay.Plan(json.dumps(json.loads(request(dataset))["plan"]), [shape])
    state = json.loads(plan.state(*order[99][2]))
    resumed = [
        (s.epoch, ids(s)) for s in Stream(client, request(dataset, 2, state=state), connections=3)
    ]
    assert resumed == tail


def test_ranks_share_an_epoch(client, dataset, order):
    body = json.loads(request(dataset))
    seen = []
    for rank in range(3):
        body["partition"] |= {"world": 3, "rank": rank, "uneven": "drop"}
        seen.append([ids(s) for s in Stream(client, json.dumps(body), connections=2)])
    assert len({len(s) for s in seen}) == 1
    together = [row for step in zip(*seen, strict=True) for part in step for row in part]
    whole = [row for s in order if s[1] == 0 for row in s[3]]
    assert together == whole[: len(together)] and len(whole) - len(together) < 3 * BATCH


def test_stats_say_where_the_time_went(client, dataset, node):
    stream = Stream(client, request(dataset), connections=2)
    list(stream)
    # The end is known from the first connection; what the other reports may follow.
    until = time.monotonic() + 60
    while (stats := stream.stats())["node"]["steps"] < stats["steps"]:
        assert time.monotonic() < until, stats
        time.sleep(0.01)
    assert (
        stats["rows"] >= ROWS
        and stats["steps"] == -(-ROWS // BATCH)
        and stats["bytes"] > 5_000_000
        and stats["reopened"] == 0
    )
    assert stats["node"]["steps"] == stats["steps"] and stats["node"]["rows"] == stats["rows"]
    for name in (
        "read_seconds",
        "origin_seconds",
        "disk_seconds",
        "decode_seconds",
        "frame_seconds",
        "wait_seconds",
        "socket_seconds",
    ):
        assert stats["node"][name] >= 0, name
    assert stats["node"]["read_seconds"] > 0 and stats["rtt_seconds"] is not None
    metrics = node.metrics()
    assert (
        metrics["forebay_streams_rows_total"] >= ROWS
        and metrics['forebay_streams_seconds_total{what="read"}'] > 0
    )


def test_what_cannot_be_is_said_at_once(client, dataset):
    def refused(error, body: str, match: str, **options):
        began = time.monotonic()
        with pytest.raises(error, match=match):
            Stream(client, body, **options).next()
        assert time.monotonic() - began < 20

    good = json.loads(request(dataset))
    refused(forebay.NotFound, request("0" * 32), "open the dataset")
    refused(forebay.InvalidRequest, "{}", "plan")
    refused(
        forebay.InvalidRequest,
        json.dumps(good | {"partition": {"world": 2, "rank": 2, "batch": {"rows": 1}}}),
        "rank 2",
    )
    refused(
        forebay.InvalidRequest, json.dumps(good | {"partition": {"batch": {"rows": 0}}}), "0 rows"
    )
    refused(forebay.InvalidRequest, json.dumps(good | {"columns": ["nope"]}), "nope")
    refused(forebay.InvalidRequest, json.dumps(good | {"window_bytes": 1 << 40}), "window")
    refused(forebay.InvalidRequest, json.dumps(good), "connections", connections=0)
    refused(forebay.InvalidRequest, json.dumps(good), "connections", connections=10_000)
    other = json.loads(request(dataset, shuffle={"kind": "full"}))
    state = {
        "version": 1,
        "algorithm": 1,
        "plan": "0" * 16,
        "data": "0" * 16,
        "seed": 7,
        "epoch": 0,
        "position": 0,
    }
    refused(forebay.InvalidRequest, json.dumps(other | {"state": state}), "state")
    with pytest.raises(forebay.InvalidRequest):
        Stream([], request(dataset))


def test_a_file_that_changes_is_an_error_that_names_it(client, origin_s3, node):
    for i in range(40):
        origin_s3.put_object(Bucket="scratch", Key=f"changing/{i:03}.bin", Body=b"%d" % i * 1000)
    dataset = opened(client, "scratch/changing/*.bin")
    origin_s3.put_object(Bucket="scratch", Key="changing/035.bin", Body=b"other")
    body = json.loads(request(dataset, shuffle={"kind": "none"})) | {
        "partition": {"batch": {"rows": 4}}
    }
    stream = Stream(client, json.dumps(body), connections=2, retry_for=60)
    steps = [stream.next() for _ in range(8)]
    assert [len(s.batch) for s in steps] == [4] * 8, "what comes before it is right"
    began = time.monotonic()
    with pytest.raises(forebay.PreconditionFailed, match=r"035\.bin"):
        stream.next()
    assert time.monotonic() - began < 30, "to ask again would not help"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_that_goes_after_the_opening_is_told_alike_by_all_loaders(
    client, origin_s3, how, stream, scratch
):
    for i in range(40):
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{i:03}.bin", Body=b"%d" % i * 1000)
    ds = forebay.open(f"scratch/{scratch}/*.bin", client=client)
    loader = ds.loader(batch_size=4, follow=False, prefetch=0, stream=stream)
    if how == "replaced":
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/035.bin", Body=b"other")
    else:
        origin_s3.delete_object(Bucket="scratch", Key=f"{scratch}/035.bin")
    batches = iter(loader)
    for _ in range(8):
        assert len(next(batches)) == 4
    with pytest.raises(forebay.Changed, match=r"035\.bin") as told:
        next(batches)
    assert "open the dataset again" in told.value.hint or "open it again" in told.value.hint


def test_a_reader_that_stops_costs_the_window_and_one_that_leaves_nothing(client, dataset, node):
    quiet(node)
    before = node.metrics()["forebay_memory_used_bytes"]
    window = 1 << 20
    stream = Stream(
        client, request(dataset, 1000, window_bytes=window), connections=4, ahead_bytes=1 << 20
    )
    stream.next()
    sent, steady = -1.0, 0
    while steady < 3:
        time.sleep(0.2)
        now = node.metrics()["forebay_streams_bytes_total"]
        sent, steady = now, steady + 1 if now == sent else 0
    metrics = node.metrics()
    assert (
        metrics["forebay_streams_open"] == 4
        and metrics["forebay_streams_window_bytes"] == 4 * window
    )
    assert stream.stats()["ahead_bytes"] <= (1 << 20) + 200_000
    del stream
    quiet(node)
    # What remains are decoded blocks that may be needed again.
    assert node.metrics()["forebay_memory_used_bytes"] <= before + (96 << 20)


def test_a_child_leaves_the_parents_stream_alone(client, dataset, order):
    stream = Stream(client, request(dataset, 2), connections=3)
    got = [ids(stream.next()) for _ in range(5)]
    child = os.fork()
    if child == 0:
        try:
            stream.next()
            os._exit(1)
        except forebay.Error as error:
            assert "fork" in str(error)
            own = ids(Stream(client, request(dataset)).next())
            del stream
            os._exit(0 if own == order[0][3] else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert got + [ids(s) for s in stream] == [s[3] for s in order]


def test_ctrl_c_ends_a_wait_and_loses_nothing(client):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far = forebay.Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=30)
        stream = Stream(far, request("0" * 32), connections=1)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            stream.next()
        assert time.monotonic() - began < 20
        stream.close()
        with pytest.raises(forebay.Error, match="closed"):
            stream.next()


class Cutter:
    """A proxy before a node's Unix socket that cuts connections after a random number of bytes."""

    def __init__(self, to: Path, path: Path, within: int, seed: int) -> None:
        self.to, self.within, self.random, self.cuts = to, within, random.Random(seed), 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.url = f"unix:{path}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self.to))
            threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
            threading.Thread(
                target=self._pump, args=(far, near, self.random.randrange(self.within)), daemon=True
            ).start()

    def _pump(self, source: socket.socket, to: socket.socket, left: int | None) -> None:
        try:
            while data := source.recv(65536):
                if left is not None and len(data) >= left:
                    to.sendall(data[:left])
                    self.cuts += 1
                    break
                to.sendall(data)
                left = None if left is None else left - len(data)
        except OSError:
            pass
        for s in (source, to):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def test_connections_that_are_cut_anywhere_lose_nothing(node, dataset, order, tmp_path):
    seed = int(os.environ.get("FOREBAY_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"FOREBAY_TEST_SEED={seed}")
    cutter = Cutter(node.socket, tmp_path / "cut.sock", 2_000_000, seed)
    stream = Stream(
        forebay.Client(cutter.url), request(dataset, 2), connections=4, ahead_bytes=1 << 20
    )
    assert [(s.step, s.epoch, s.next, ids(s)) for s in stream] == order
    assert cutter.cuts > 3 and stream.stats()["reopened"] > 3
    cutter.listener.close()
    quiet(node)


@pytest.fixture
def start(origin, tmp_path):
    nodes = []

    def start(directory: Path | None = None, **options) -> Node:
        nodes.append(
            Node(origin.url, ["scratch"], directory or tmp_path / f"node-{len(nodes)}", **options)
        )
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop(signal.SIGKILL)


def test_a_node_that_is_killed_in_mid_epoch_and_comes_back(start, parquet, order, tmp_path):
    path = Path(f"/tmp/fb-{os.getpid()}-stream.sock")
    node = start(tmp_path / "node", socket=path)
    client = forebay.Client(f"unix:{path}")
    dataset = opened(client, parquet)
    stream = Stream(client, request(dataset, 2), connections=3, ahead_bytes=200_000, retry_for=60)
    got = []
    for step in stream:
        got.append((step.step, step.epoch, step.next, ids(step)))
        if len(got) in (50, 150):
            node.stop(signal.SIGKILL)
            node = start(tmp_path / "node", socket=path)
    assert got == order and stream.stats()["reopened"] >= 6


def test_a_node_that_stops_or_dies_is_replaced_by_the_others(start, parquet, order):
    nodes = [start(), start(), start()]
    clients = [forebay.Client(n.unix_url) for n in nodes]
    dataset = {opened(c, parquet) for c in clients}
    assert len(dataset) == 1, "all nodes call it the same"
    stream = Stream(clients, request(dataset.pop(), 2), connections=6, ahead_bytes=200_000)
    got, codes = [], []
    for step in stream:
        got.append((step.step, step.epoch, step.next, ids(step)))
        if len(got) == 50:
            # In passing: a receiver that does not read is waited for as long as any other.
            # It has 30 s for answers in flight.
            stop = functools.partial(nodes[0].stop, patience=25)
            stopping = threading.Thread(target=lambda: codes.append(stop()))
            stopping.start()
        if len(got) == 150:
            nodes[1].stop(signal.SIGKILL)
    assert got == order
    stopping.join()
    assert codes == [0], "a stream does not keep a node from stopping"
    assert nodes[2].metrics()["forebay_streams_steps_total"] > 100


def test_a_node_that_stays_away_is_an_error(start, parquet):
    node = start()
    client = forebay.Client(node.unix_url)
    stream = Stream(
        client,
        request(opened(client, parquet), 100),
        connections=2,
        ahead_bytes=100_000,
        retry_for=1,
    )
    stream.next()
    node.stop(signal.SIGKILL)
    with pytest.raises(forebay.ConnectionFailed, match="did not arrive"):
        list(stream)
