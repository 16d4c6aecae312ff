"""Ten times more than the node takes: what it accepts it finishes, the rest it refuses at once, and
afterwards nothing is left over.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import forebay
import pytest
import requests
from servers import Node

CAPACITY = 8
#: How long a refusal, and an answer of the admin port, may take on a machine that is kept busy by
#: the test itself.
QUICKLY = 2.0
#: Gauges that count what is in progress.
GAUGES = (
    "forebay_requests_in_flight",
    "forebay_connections_open",
    "forebay_fills_in_flight",
    "forebay_getbatch_in_flight",
    "forebay_memory_used_bytes",
    "forebay_origin_requests_in_flight",
    "forebay_origin_requests_waiting",
    "forebay_uploads_open",
)


def is_quick(took: list[float]) -> bool:
    """Nine of ten: now and then, the machine is busy with something else."""
    return sorted(took)[len(took) * 9 // 10] < QUICKLY


def content(path: str) -> bytes:
    """What the slow origin holds at a path: 64 KiB to 3 MiB."""
    seed = random.Random(path)
    return seed.randbytes(seed.choice([64 << 10, 300 << 10, 3 << 20]))


class SlowOrigin:
    """A web server that waits for a while before each answer."""

    def __init__(self, seconds: float) -> None:
        cache: dict[str, bytes] = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                time.sleep(seconds)
                data = cache.setdefault(self.path, content(self.path))
                status, first, last = 200, 0, len(data) - 1
                if wanted := self.headers.get("Range"):
                    first, _, end = wanted.removeprefix("bytes=").partition("-")
                    status, first, last = 206, int(first), min(int(end or last), last)
                self.send_response(status)
                self.send_header("Content-Length", str(last + 1 - first))
                self.send_header("ETag", f'"{len(data)}"')
                if status == 206:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data[first : last + 1])

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def small(origin, tmp_path_factory):
    """A node that takes few requests at a time, and little memory, before a slow origin."""
    slow = SlowOrigin(0.15)
    settings = {
        "limits.requests_in_flight": CAPACITY,
        "memory.budget": "32MiB",
        "batch.frame": "1MiB",
        "limits.body_timeout": "5s",
    }
    options = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    node = Node(
        origin.url,
        ["scratch"],
        tmp_path_factory.mktemp("small"),
        options=[*options, "--origin", f"slow={slow.url}"],
    )
    yield node
    node.stop()
    slow.server.shutdown()


class Probe:
    """Queries the admin port all the time, and notes how long it takes."""

    def __init__(self, node: Node) -> None:
        self.node, self.took, self.failures, self._stop = node, [], [], threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            for path in ("healthz", "readyz", "metrics"):
                began = time.monotonic()
                try:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{self.node.admin_port}/{path}", timeout=60
                    ) as answer:
                        answer.read()
                except OSError as e:
                    self.failures.append(f"{path}: {e}")
                self.took.append((time.monotonic() - began, path))
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.failures and len(self.took) >= 3, self.failures
        assert is_quick([seconds for seconds, _ in self.took]), sorted(self.took)[-5:]


def left_over(node: Node) -> dict[str, float]:
    return {
        name: value
        for name, value in node.metrics().items()
        if name.split("{")[0] in GAUGES and value
    }


def comes_to_rest(node: Node) -> None:
    deadline = time.monotonic() + 60
    while left := left_over(node):
        assert time.monotonic() < deadline, f"left over: {left}"
        time.sleep(0.05)


class Tally:
    """What became of requests: answers by status, how long refusals took, and whatever is not as it
    should be.
    """

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.refused_after: list[float] = []
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def answer(self, status: int, headers, took: float) -> None:
        with self.lock:
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status in (429, 503):
                self.refused_after.append(took)
                if int(headers.get("Retry-After", 0)) < 1:
                    self.wrong.append(f"{status} without Retry-After")
            elif status not in (200, 206):
                self.wrong.append(f"status {status}")

    def check(self, accepted: int) -> None:
        assert not self.wrong, self.wrong[:5]
        assert self.statuses.get(200, 0) >= accepted, self.statuses
        assert self.refused_after, f"nothing was refused: {self.statuses}"
        assert is_quick(self.refused_after), sorted(self.refused_after)[-5:]


def at_once(clients: int, work) -> None:
    """Runs `work(i)` in that many threads, started at the same moment."""
    gate = threading.Barrier(clients)

    def run(i: int) -> None:
        gate.wait()
        work(i)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run, range(clients)))


def test_reads_at_ten_times_capacity(small):
    tally = Tally()

    def read(i: int) -> None:
        for round in range(3):
            path = f"/read-{i}-{round}"
            began = time.monotonic()
            try:
                answer = requests.get(f"{small.url}/slow{path}", timeout=120)
            except requests.RequestException as e:
                tally.wrong.append(repr(e))
                continue
            tally.answer(answer.status_code, answer.headers, time.monotonic() - began)
            if answer.status_code == 200 and answer.content != content(path):
                tally.wrong.append(f"{path}: {len(answer.content)} bytes, and not those")

    with Probe(small):
        at_once(10 * CAPACITY, read)
    tally.check(accepted=CAPACITY)
    refused = small.metrics()['forebay_requests_refused_total{reason="overload"}']
    assert refused == tally.statuses[503]
    comes_to_rest(small)


def test_uploads_at_ten_times_capacity(small, origin_s3):
    """Those who are refused read their refusal, although the node did not take what they were
    sending.
    """
    tally, stored = Tally(), []

    def upload(i: int) -> None:
        body = random.Random(i).randbytes(2 << 20)
        connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=120)
        began = time.monotonic()
        try:
            connection.request("PUT", f"/scratch/overload/{i}", body)
            answer = connection.getresponse()
            answer.read()
            tally.answer(answer.status, answer.headers, time.monotonic() - began)
            if answer.status == 200:
                stored.append((i, body))
        except OSError as e:
            tally.wrong.append(repr(e))
        finally:
            connection.close()

    with Probe(small):
        at_once(10 * CAPACITY, upload)
    tally.check(accepted=1)
    for i, body in stored:
        assert origin_s3.get_object(Bucket="scratch", Key=f"overload/{i}")["Body"].read() == body
    kept = {
        o["Key"]
        for o in origin_s3.list_objects_v2(Bucket="scratch", Prefix="overload/").get("Contents", [])
    }
    assert kept == {f"overload/{i}" for i, _ in stored}, "what was refused was not written"
    comes_to_rest(small)


def test_batches_at_ten_times_the_memory(small):
    """Memory is the limit here: a batch that does not fit gets 429 before any work."""
    tally = Tally()
    names = [f"batch-{i}" for i in range(12)]
    size = sum(512 + len(content(f"/{n}")) + (-len(content(f"/{n}")) % 512) for n in names)

    def batch(i: int) -> None:
        body = {"mime": ".tar", "in": [{"objname": n} for n in names], "strm": True}
        for _ in range(2):
            began = time.monotonic()
            try:
                with requests.post(
                    f"{small.url}/v1/ml/moss/slow", json=body, timeout=120, stream=True
                ) as answer:
                    tally.answer(answer.status_code, answer.headers, time.monotonic() - began)
                    if answer.status_code != 200:
                        continue
                    received = 0
                    for piece in answer.iter_content(256 << 10):
                        received += len(piece)
                        time.sleep(0.002)
                    if received < size:
                        tally.wrong.append(f"a batch of {received} bytes instead of {size}")
            except requests.RequestException as e:
                tally.wrong.append(repr(e))

    with Probe(small):
        at_once(10 * CAPACITY, batch)
    tally.check(accepted=1)
    assert tally.statuses.get(429), f"none was refused for memory: {tally.statuses}"
    comes_to_rest(small)


def test_clients_that_leave_in_the_middle_leave_nothing(small):
    def leave(i: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=120)
        connection.request("GET", f"/slow/left-{i}")
        time.sleep(0.02 * (i % 12))
        connection.close()

    with Probe(small):
        at_once(10 * CAPACITY, leave)
    comes_to_rest(small)


def test_clients_that_ask_again_all_get_through(small):
    """The package's client waits as long as Retry-After says; with patience, ten times capacity is
    only slower.
    """
    client = forebay.Client(small.url, timeout=60)
    failures = []

    def read(i: int) -> None:
        try:
            if bytes(client.get(f"slow/again-{i}")) != content(f"/again-{i}"):
                failures.append(i)
        except forebay.Error as e:
            failures.append(repr(e))

    with Probe(small):
        at_once(5 * CAPACITY, read)
    assert not failures
