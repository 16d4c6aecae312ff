"""Clients that know several nodes: one that dies costs a reroute, not an error. Three real nodes
before one real bucket, killed with SIGKILL in the middle of things, and started anew.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recorded
from dataset import noise
from forebay._forebay import Ring, Stream
from forebay.fsspec import ForebayFileSystem
from scripted_node import ScriptedNode, chunked, reply, tar_of
from servers import Node, forebay_program
from test_shards import keys, large
from torch.utils.data import DataLoader

ROWS = 2000
#: A node that failed is looked at again after 5 s.
AGAIN_SECONDS = 30


@pytest.fixture(scope="module")
def rows(origin_s3):
    """Parquet files with 2,000 rows, in the bucket that all nodes serve."""
    for i in range(4):
        out = io.BytesIO()
        ids = np.arange(i * ROWS // 4, (i + 1) * ROWS // 4)
        text = [f"{n} " + "x" * (n * 37 % 9000) for n in ids]
        pq.write_table(pa.table({"id": ids, "text": text}), out, row_group_size=50)
        origin_s3.put_object(Bucket="scratch", Key=f"nodes/{i}.parquet", Body=out.getvalue())
    return "scratch/nodes/*.parquet"


class Nodes:
    """Three nodes. Each has a place, a Unix socket, where another process can take over."""

    def __init__(self, origin, directory: Path, buckets=("scratch", "train")) -> None:
        self._origin, self._directory, self._buckets = origin, directory, list(buckets)
        self.places = [Path(f"/tmp/fb-{os.getpid()}-nodes-{i}.sock") for i in range(3)]
        self.running: dict[str, Node] = {}
        for place in self.places:
            self.start(f"unix:{place}")

    @property
    def urls(self) -> list[str]:
        return [f"unix:{place}" for place in self.places]

    def start(self, url: str) -> None:
        place = Path(url.removeprefix("unix:"))
        place.unlink(missing_ok=True)
        self.running[url] = Node(
            self._origin.url, self._buckets, self._directory / place.stem, socket=place
        )

    def kill(self, url: str) -> None:
        self.running.pop(url).stop(signal.SIGKILL)

    def close(self) -> None:
        for url in list(self.running):
            self.kill(url)


@pytest.fixture
def nodes(origin, tmp_path):
    nodes = Nodes(origin, tmp_path)
    yield nodes
    nodes.close()


def used_again(client: forebay.Client, url: str) -> None:
    """Waits until calls go to a node that came back."""
    until = time.monotonic() + AGAIN_SECONDS
    while client.route != url:
        assert time.monotonic() < until, f"{url} is not used again"
        client.buckets()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode": lambda row: row, "threads": 2},
        # Not so much ahead that a node is dead before anybody needs it again.
        {"stream": True, "window_bytes": 200_000},
        {"stream": True, "window_bytes": 200_000, "connections": 3},
    ],
    ids=["pull", "threads", "stream", "connections"],
)
def test_a_loader_goes_on_exactly_while_nodes_die_and_return(nodes, rows, options):
    client = forebay.Client(nodes.urls)
    ds = forebay.open(rows, client=client)
    loader = ds.loader(batch_size=16, shuffle=forebay.Block(4), seed=3, epochs=2, **options)
    state = loader.state_dict()
    truth = [list(loader.steps(state, 2).step(i).rows) for i in range(2 * (ROWS // 16))]
    seen, ids = [], []
    for batch in loader:
        seen.append(list(loader.last.rows))
        ids.append([row["id"] for row in batch])
        if len(seen) == 60:
            first = client.route
            nodes.kill(first)
        elif len(seen) == 120:
            assert client.route != first
            nodes.start(first)
            used_again(client, first)
        elif len(seen) == 180:
            # The one that returned is all that is left.
            for url in nodes.urls:
                if url != first:
                    nodes.kill(url)
    assert seen == truth == ids
    assert client.route == first and client.moves >= 2


@pytest.mark.parametrize("connections", [1, 3])
def test_a_stream_goes_on_soon_when_a_node_falls_silent(nodes, rows, connections):
    client = forebay.Client(nodes.urls)
    ds = forebay.open(rows, client=client)
    first = client.route
    others = [url for url in nodes.urls if url != first] if connections > 1 else None
    # The node whose part comes from nobody else, as one of several; or the only one.
    silent = nodes.running[others[0] if others else first]
    loader = ds.loader(
        batch_size=16, stream=True, connections=connections, nodes=others, window_bytes=100_000
    )
    seen, waited, since = [], 0.0, time.monotonic()
    for batch in loader:
        waited = max(waited, time.monotonic() - since)
        seen.append([row["id"] for row in batch])
        if len(seen) == 20:
            silent.process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
    assert [i for ids in seen for i in ids] == list(range(ROWS // 16 * 16))
    # It is silent for 7 s, and asked for something else for 2.
    assert 7 <= waited < 30


def test_nodes_that_are_named_by_address_get_the_token_of_the_client(origin, rows, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\naccess_key = "a"\nsecret_key = "everything-and-more"\ntoken = "t"\n')
    options = ["--set", f"auth.keys_file={keys}", "--set", "auth.unix_trusted=false"]
    both = [Node(origin.url, ["scratch"], tmp_path / n, options=options) for n in "ab"]
    try:
        client = forebay.Client(both[0].url, token="t")
        ds = forebay.open(rows, client=client)
        loader = ds.loader(batch_size=16, stream=True, nodes=[both[1].url], connections=2)
        assert sum(1 for _ in loader) == ROWS // 16
        sent = [node.metrics()["forebay_streams_steps_total"] for node in both]
        assert min(sent) > 0, sent
    finally:
        for node in both:
            node.stop()


def test_another_node_learns_the_order_of_a_job(nodes, rows):
    def plans(url):
        with urllib.request.urlopen(f"{nodes.running[url].url}/v1/datasets/plans") as answer:
            return {lease["plan"] for lease in json.load(answer)["leases"]}

    def told(url):
        until = time.monotonic() + 30
        while loader.plan not in plans(url):
            assert time.monotonic() < until
            next(iteration)
            time.sleep(0.05)

    client = forebay.Client(nodes.urls)
    ds = forebay.open(rows, client=client)
    loader = ds.loader(batch_size=4, shuffle="full", seed=8, epochs=20)
    iteration = iter(loader)
    next(iteration)
    told(client.route)
    nodes.kill(client.route)
    for _ in range(20):
        next(iteration)
    told(client.route)


def test_a_stream_begins_although_nodes_are_down(nodes, rows):
    """Nodes that never heard of the dataset take over one after the other."""
    first = forebay.Client(nodes.urls[0])
    ds = forebay.open(rows, client=first)
    options = {"batch_size": 16, "shuffle": "full", "seed": 1, "stream": True}
    truth = [r["id"] for batch in ds.loader(**options) for r in batch]
    nodes.kill(nodes.urls[0])
    ds.client = forebay.Client(nodes.urls)
    assert [r["id"] for batch in ds.loader(**options) for r in batch] == truth
    # Several clients share the steps; each may lose its node.
    ds.client = forebay.Client(nodes.urls[:2])
    loader = ds.loader(connections=2, nodes=[nodes.urls[2]], **options)
    assert [r["id"] for batch in loader for r in batch] == truth
    # None is there: it is an error in time, which names each.
    for url in nodes.urls[1:]:
        nodes.kill(url)
    with pytest.raises(forebay.ConnectionFailed, match="did not arrive"):
        next(iter(ds.loader(retry_for=0.5, **options)))
    with pytest.raises(forebay.ConnectionFailed, match="none of 2 nodes answered") as caught:
        ds.take([1])
    assert all(url in str(caught.value) for url in nodes.urls[:2])


def test_ctrl_c_while_a_stream_begins_again_loses_nothing(nodes, rows):
    client = forebay.Client(nodes.urls)
    ds = forebay.open(rows, client=client)
    options = {"batch_size": 16, "shuffle": "full", "seed": 4}
    truth = [[row["id"] for row in batch] for batch in ds.loader(**options)]
    loader = ds.loader(stream=True, window_bytes=200_000, **options)
    seen, interrupted, waits = [], 0, False
    iteration = iter(loader)

    def interrupts(_, frame) -> None:
        # Not where a batch that was given would be lost: in here, or in what is done with it.
        if waits and frame.f_code.co_filename != __file__:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupts)
    try:
        while len(seen) < len(truth):
            if len(seen) == 20 and not interrupted:
                for url in list(nodes.running):
                    nodes.kill(url)
            alarm = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
            try:
                if not nodes.running:
                    alarm.start()
                waits = True
                batch = next(iteration)
                waits = False
                alarm.cancel()
                seen.append([row["id"] for row in batch])
            except KeyboardInterrupt:
                waits = False
                interrupted += 1
                if interrupted == 3:
                    nodes.start(nodes.urls[1])
    finally:
        signal.signal(signal.SIGINT, previous)
    assert interrupted == 3 and seen == truth


def test_workers_go_on_at_another_node(nodes, rows):
    ds = forebay.open(rows, client=forebay.Client(nodes.urls))
    loader = ds.loader(batch_size=16, shuffle="full", seed=6, output="numpy")
    truth = [batch["id"].tolist() for batch in loader]
    loader = ds.loader(batch_size=16, shuffle="full", seed=6, output="numpy")
    seen = []
    for batch in DataLoader(loader.torch(), batch_size=None, num_workers=2):
        seen.append(batch["id"].tolist())
        if len(seen) in (20, 60):
            # Each worker has chosen one of them.
            nodes.kill(next(iter(nodes.running)))
    assert seen == truth and len(nodes.running) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_another_version_at_another_node_is_an_error(nodes, origin_s3, scratch, stream):
    def write(name: str) -> None:
        out = io.BytesIO()
        pq.write_table(pa.table({"id": range(100)}), out)
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{name}", Body=out.getvalue())

    write("a.parquet")
    ds = forebay.open(f"scratch/{scratch}/*.parquet", url=nodes.urls[0])
    # All that a loader asks for before the rows.
    assert ds.block_shape
    write("b.parquet")
    ds.client = forebay.Client(nodes.urls[1:])
    with pytest.raises(forebay.Changed, match=f"version {ds.id}.* finds version") as caught:
        next(iter(ds.loader(batch_size=2, stream=stream)))
    assert caught.value.hint


@pytest.mark.parametrize("stream", [False, True])
def test_new_shards_go_on_at_another_node(nodes, origin_s3, scratch, stream):
    for i in range(3):
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/t{i}.tar", Body=large(i, 40))
    client = forebay.Client(nodes.urls)
    shards = forebay.open_shards(f"scratch/{scratch}/*.tar", client=client, part_bytes=512 << 10)
    options = {"shuffle": forebay.Block(2), "seed": 1, "stream": stream, "window_bytes": None}
    if stream:
        options["window_bytes"] = 300_000
    expected = keys(shards.loader(8, **options))
    seen = []
    for number, batch in enumerate(shards.loader(8, prefetch=1, **options)):
        seen += keys([batch])
        if number in (2, 7):
            nodes.kill(client.route)
    assert seen == expected and len(nodes.running) == 1


def test_batches_and_objects_go_on_at_another_node(nodes, origin_s3, scratch):
    wanted = {f"scratch/{scratch}/{i}": noise(1 << 20, i) for i in range(24)}
    for name, data in wanted.items():
        origin_s3.put_object(Bucket="scratch", Key=name.partition("/")[2], Body=data)
    client = forebay.Client(nodes.urls)
    got = []
    for n, batch in enumerate(client.batches([list(wanted)] * 6, prefetch=1)):
        for i, item in enumerate(batch):
            if (n, i) in ((1, 2), (3, 2)):
                nodes.kill(client.route)
            got.append(bytes(item))
    assert got == list(wanted.values()) * 6
    assert len(nodes.running) == 1
    name, data = next(iter(wanted.items()))
    assert bytes(client.get(name)) == data and client.head(name).size == len(data)
    assert len(list(client.list(f"scratch/{scratch}/", page_size=5))) == 24
    client.put(f"scratch/{scratch}/written", b"x")
    assert client.exists(f"scratch/{scratch}/written")


def test_a_file_that_is_read_through_fsspec_goes_on(nodes, origin_s3, scratch):
    data = noise(8 << 20, 5)
    origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/file", Body=data)
    fs = ForebayFileSystem(nodes.urls, skip_instance_cache=True)
    got = b""
    with fs.open(f"scratch/{scratch}/file", block_size=256 << 10) as file:
        while piece := file.read(100_000):
            got += piece
            if len(got) in (1_000_000, 4_000_000):
                nodes.kill(fs.client.route)
    assert got == data and len(nodes.running) == 1
    assert fs.ls(f"scratch/{scratch}", detail=False) == [f"scratch/{scratch}/file"]


def test_a_command_goes_on_at_another_node(nodes, origin_s3, scratch, tmp_path):
    data = noise(24 << 20, 6)
    origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/large", Body=data)
    name = f"scratch/{scratch}/large"
    command = [forebay_program(), "--node", ",".join(nodes.urls)]
    got = subprocess.Popen([*command, "get", name, "-"], stdout=subprocess.PIPE)
    begun = got.stdout.read(1 << 20)
    # Nobody reads on, so the node that sends is the one with a request in flight.
    [sending] = [
        url for url, node in nodes.running.items() if node.metrics()["forebay_requests_in_flight"]
    ]
    nodes.kill(sending)
    rest = got.stdout.read()
    assert begun + rest == data and got.wait() == 0
    # What is about one node is about the first that answers.
    environment = {**os.environ, "FOREBAY_NODE": ",".join(nodes.urls)}
    for args in (["ls", f"scratch/{scratch}/"], ["status"], ["metrics"]):
        done = subprocess.run(
            [forebay_program(), *args], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for url in list(nodes.running):
        nodes.kill(url)
    done = subprocess.run([*command, "ls"], capture_output=True, text=True)
    assert done.returncode == 1 and "none of 3 nodes answered" in done.stderr
    assert all(url in done.stderr for url in nodes.urls)


def test_a_node_that_is_told_to_stop_costs_nothing(nodes, rows):
    client = forebay.Client(nodes.urls)
    ds = forebay.open(rows, client=client)
    got, stopping = [], None
    for batch in ds.loader(batch_size=16, epochs=2):
        got += [row["id"] for row in batch]
        if stopping is None and len(got) > 400:
            node = nodes.running.pop(client.route)
            stopping = threading.Thread(target=node.stop)
            stopping.start()
    stopping.join()
    assert got == list(range(ROWS)) * 2


# What a list of nodes means.


def test_a_list_is_given_in_three_ways(node, objects, monkeypatch):
    far = "http://127.0.0.1:1"
    for url in ([far, node.url], f"{far},{node.url}", f"{node.url}, {node.url}"):
        client = forebay.Client(url)
        assert bytes(client.get("train/one")) == objects["one"]
        again = pickle.loads(pickle.dumps(client))
        assert repr(again) == repr(client) and again.url == client.url
        assert bytes(again.get("train/one")) == objects["one"]
    assert forebay.Client([far, node.url]).nodes == 2
    assert forebay.Client(f"{node.url},{node.url}").nodes == 1
    monkeypatch.setenv("FOREBAY_NODE", f"{far},{node.url}")
    client = forebay.Client()
    assert bytes(client.get("train/one")) == objects["one"]
    assert client.url == f"{far},{node.url}" and client.route == node.unix_url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://a,,http://b", "address 2 in the list of nodes is empty"),
        ("http://a,", "address 2 in the list of nodes is empty"),
        (["http://a", ""], "address 2 in the list of nodes is empty"),
        (["http://a", "ftp://b"], "address 2 in the list of nodes: .*ftp"),
        ([], "the list of nodes is empty"),
        ([f"http://n{i}" for i in range(257)], "more than 256 addresses"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(url, said):
    with pytest.raises(forebay.InvalidRequest, match=said) as caught:
        forebay.Client(url)
    assert caught.value.hint
    if isinstance(url, str):
        done = subprocess.run(
            [forebay_program(), "ls", "--node", url], capture_output=True, text=True
        )
        assert done.returncode == 2 and "address 2" in done.stderr and "hint" in done.stderr


# Where exactly an answer breaks off, with scripted nodes.

OBJECTS = {f"bucket/k{i:03}": bytes([i]) * (i * 11) for i in range(60)}
WHOLE = tar_of(list(OBJECTS.items()))


@pytest.mark.parametrize(
    "at", [0, 1, 511, 512, 600, 5000, WHOLE.__len__() // 2, len(WHOLE) - 1025, len(WHOLE) - 1]
)
def test_a_batch_that_breaks_off_is_completed(at):
    with ScriptedNode(OBJECTS) as a, ScriptedNode(OBJECTS) as b:
        cut = []

        def once(http, request):
            tar = tar_of((a if http.server is a.server else b).members(http.path, request))
            cut.append(http.server)
            chunked(http, tar, cut_at=at if len(cut) == 1 else None)

        a.script += [once] * 2
        b.script += [once] * 2
        client = forebay.Client([a.url, b.url])
        batch = client.batch(list(OBJECTS))
        assert [bytes(item) for item in batch] == list(OBJECTS.values())
        assert bytes(memoryview(batch)) == WHOLE
        asked = [json.loads(body)["in"] for node in (a, b) for *_, body in node.requests if body]
        assert len(set(cut)) == len(cut)
        assert sum(map(len, asked)) <= 2 * len(OBJECTS)
        # The same into shared memory.
        cut.clear()
        slot = Ring(1, 1 << 20).take()
        sizes = forebay.Client([a.url, b.url]).batch_into(list(OBJECTS), slot)
        assert sizes == [len(data) for data in OBJECTS.values()]
        assert bytes(memoryview(slot))[: sum(sizes)] == b"".join(OBJECTS.values())


def test_what_a_node_says_is_wrong_is_not_asked_elsewhere():
    """It names a reason in the archive, and breaks off."""
    members = [("bucket/k000", b""), ("__404__/bucket/k001", b"")]
    said = tar_of(members, {"__404__/bucket/k001": "the origin closed the connection"})
    with ScriptedNode(OBJECTS) as a, ScriptedNode(OBJECTS) as b:
        for node in (a, b):
            node.script.append(lambda http, _: chunked(http, said, cut_at=len(said) - 1024))
        with pytest.raises(forebay.Truncated, match="the origin closed the connection"):
            forebay.Client([a.url, b.url]).batch(list(OBJECTS)).wait()
        assert len(a.script) + len(b.script) == 1
        # Nor what is refused.
        for node in (a, b):
            node.script[:] = [lambda http, _: reply(http, *recorded.refusal("not_allowed"))]
        with pytest.raises(forebay.PermissionDenied):
            forebay.Client([a.url, b.url]).batch(list(OBJECTS))
        assert len(a.script) + len(b.script) == 1


def test_what_is_told_of_a_dataset_makes_sense(client):
    with pytest.raises(forebay.InvalidRequest, match="told="):
        told = {"datasets": "[{}]", "compositions": [], "bases": "[]", "lengths": []}
        Stream(client, "{}", told=told)
