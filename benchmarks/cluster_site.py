"""What the parts of the cluster's table run against: a directory as the bucket, behind
`forebay distance`, whose counters tell what it gave; etcd; and clusters of nodes with TLS between
them. Each part makes a cluster of its own, and takes no longer than it is told.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nodes import BUCKET, Distance, Node, as_entry, content, program, write_objects
from report import Report

TINY, SMALL, MEDIUM = 4 << 10, 10 << 10, 100 << 10
EXTENT = 8 << 20
# Objects of a batch while something happens. Each is read once, so that nodes need each other.
BATCH = 8
#: What a node may be called: a certificate is made for each.
NAMES = "abcdefgh"


class Etcd:
    """etcd in a directory, which can be stopped and started again."""

    def __init__(self, directory: Path, etcd: str, host: str = "127.0.0.1") -> None:
        self.port, peer, self.host = free_port(), free_port(), host
        self.address, self.data = f"{host}:{self.port}", directory / "etcd"
        clients, peers = f"http://{host}:{self.port}", f"http://{host}:{peer}"
        self.command = [etcd, "--name", "bench", "--data-dir", str(self.data)]
        self.command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        self.command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        self.command += ["--initial-cluster", f"bench={peers}"]
        self.log = directory / "etcd.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((self.host, self.port), 1).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"etcd does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """Nodes by their names; those that were killed can be started again with their caches, at the
    same addresses. `addresses` are those at which peers reach a node, if that is another one.
    """

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        etcd: Etcd,
        cache: str,
        called: str = "bench",
        settings: tuple[str, ...] = (),
    ) -> None:
        self.directory, self.endpoint, self.etcd, self.cache = directory, endpoint, etcd, cache
        self.called, self.settings = called, settings
        self.nodes: dict[str, Node] = {}
        self.ports: dict[str, tuple[int, int]] = {}
        self.addresses: dict[str, str] = {}
        self.disks: dict[str, tuple[str, ...]] = {}
        self.host = dict.fromkeys(NAMES, "127.0.0.1")
        directory.mkdir(exist_ok=True)
        made = [program(), "cluster", "init", called, "--out", str(directory / "certificates")]
        made += [part for name in NAMES for part in ("--node", name)]
        subprocess.run(made, check=True, capture_output=True)

    def port(self, name: str) -> tuple[int, int]:
        """Those for clients and for peers."""
        return self.ports.setdefault(name, (free_port(), free_port()))

    def start(self, name: str) -> Node:
        certificates = self.directory / "certificates" / name
        s3, peer = self.port(name)
        settings = [
            *("--peer", f"{self.host[name]}:{peer}"),
            *("--cluster", f"etcd://{self.etcd.address}/{self.called}"),
            *self.settings,
        ]
        keys = {
            "node": name,
            "ca": certificates / "ca.pem",
            "cert": certificates / "node.pem",
            "key": certificates / "node.key",
        }
        if name in self.addresses:
            keys["address"] = self.addresses[name]
        for key, value in keys.items():
            settings += ["--set", f"cluster.{key}={value}"]
        self.nodes[name] = Node(
            self.directory,
            name,
            endpoint=self.endpoint,
            cache=self.cache,
            disks=self.disks.get(name, ()),
            unix=False,
            listen=f"{self.host[name]}:{s3}",
            admin=True,
            settings=tuple(settings),
        )
        return self.nodes[name]

    def stop(self, name: str) -> None:
        self.nodes.pop(name).stop()

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        node.process.kill()
        node.process.wait()

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes.values()]

    def status(self, at: str) -> dict:
        done = subprocess.run(
            [program(), "cluster", "status", "--json", "--node", self.nodes[at].url],
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout)

    def shares(self, at: str = "a") -> dict[str, float]:
        return {m["name"]: round(m["share"], 6) for m in self.status(at)["members"]}

    def order(self, *words: str) -> bool:
        """Whether it was taken."""
        done = subprocess.run(
            [program(), "cluster", *words, "--node", self.nodes["a"].url],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and words[0] != "forget":
            sys.exit(f"forebay cluster {' '.join(words)}: {done.stderr}")
        return done.returncode == 0

    def metric(self, name: str, *at: str) -> float:
        """Summed over nodes; 0 where nothing was counted yet."""
        return sum(self.nodes[n].metrics().get(name, 0.0) for n in at or tuple(self.nodes))

    def wait(self, what: str, ready: Callable[[], bool], seconds: float = 60) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        while not ready():
            if time.monotonic() - began > seconds:
                sys.exit(f"after {seconds:g} s it is not so: {what}")
            time.sleep(0.05)
        return time.monotonic() - began

    def settle(self, members: int) -> None:
        """Waits until all nodes go by the same map with so many members, and reach each other."""

        def is_settled() -> bool:
            seen = [self.status(name) for name in self.nodes]
            return all(
                len(s["members"]) == members
                and s["epoch"] == seen[0]["epoch"]
                and all(m["answers"] for m in s["members"])
                for s in seen
            )

        self.wait(f"{members} members that answer", is_settled)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for node in self.nodes.values():
            node.stop()


class Site:
    """What the parts share; each thing is there when it is first asked for."""

    def __init__(self, directory: Path, args: argparse.Namespace, on: contextlib.ExitStack) -> None:
        self.directory, self.args, self.on = directory, args, on
        self.files = directory / "files" / BUCKET
        self.files.mkdir(parents=True)

    def objects(self, prefix: str, count: int, size: int) -> list[str]:
        return write_objects(self.files, prefix, count, size)

    def large(self, name: str, size: int) -> None:
        with (self.files / name).open("wb") as large:
            for part in range(-(-size // EXTENT)):
                left = size - part * EXTENT
                large.write(content(f"{name}/{part}", EXTENT)[:left])

    @functools.cached_property
    def far(self) -> Node:
        return self.on.enter_context(
            Node(self.directory, "bucket", files=self.files, cache="1GiB", unix=False)
        )

    @functools.cached_property
    def bucket(self) -> Distance:
        """The way to the bucket."""
        return self.on.enter_context(
            Distance(self.directory, "way", self.far.address, rtt_ms=5, first_byte_ms=5)
        )

    @functools.cached_property
    def etcd(self) -> Etcd:
        return self.on.enter_context(Etcd(self.directory, self.args.etcd))

    @contextlib.contextmanager
    def cluster(
        self,
        called: str,
        names: str = "abc",
        *,
        cache: str = "4GiB",
        near: bool = False,
        settings: tuple[str, ...] = (),
    ) -> Iterator[Cluster]:
        """A cluster whose nodes go by one map; with `near`, the bucket is no distance away."""
        endpoint = self.far.url if near else self.bucket.url
        where = self.directory / called
        with Cluster(where, endpoint, self.etcd, cache, called, settings) as cluster:
            for name in names:
                cluster.start(name)
            cluster.settle(len(names))
            yield cluster


def read_at(url: str, names: list[str], batch: int = 64) -> None:
    import forebay

    read_by(forebay.Client(url, direct=False), names, batch)


def read_by(client, names: list[str], batch: int = 64) -> None:
    for first in range(0, len(names), batch):
        client.batch([as_entry(name) for name in names[first : first + batch]]).wait()


def batches_answered(node: Node) -> int:
    with contextlib.closing(http.client.HTTPConnection(node.address, timeout=30)) as connection:
        connection.request("GET", "/v1/forebay/status")
        return json.loads(connection.getresponse().read())["batches"]["completed"]


def ask_owners(client, cluster: Cluster, names: list[str]) -> None:
    """Returns when the client asks each node for what it owns. Before it has read the map, one node
    puts these objects together.
    """
    nodes = cluster.nodes.values()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = [batches_answered(node) for node in nodes]
        read_by(client, names)
        if all(batches_answered(n) > b for n, b in zip(nodes, before, strict=True)):
            return
        time.sleep(0.2)
    sys.exit("the client does not ask the owners")


class Batches:
    """Batches that go on while something happens, each compared with what was written.

    With `over`, they are spread over so many seconds. With `direct=False`, the node that is asked
    puts them together. After `limit` seconds no other one is begun.
    """

    def __init__(
        self,
        urls: list[str | list[str]],
        names: list[str],
        size: int,
        *,
        over: float = 0.0,
        limit: float | None = None,
        direct: bool | None = None,
    ) -> None:
        self.urls, self.names, self.size, self.over = urls, names, size, over
        self.direct, self.limit = direct, limit
        self.count = len(names) // BATCH
        self.seconds: list[tuple[float, float]] = []
        self.wrong = self.failed = self.retryable = 0
        self.errors: list[str] = []
        self.lock = threading.Lock()

    def run(self, threads: int = 4) -> None:
        jobs, begin = iter(range(self.count)), time.monotonic()

        def work(number: int) -> None:
            import forebay

            client = forebay.Client(self.urls[number % len(self.urls)], direct=self.direct)
            # What may be tried again as it is; all others are for good.
            again = (forebay.Busy, forebay.ConnectionFailed, forebay.Timeout, forebay.Truncated)
            while self.limit is None or time.monotonic() - begin < self.limit:
                with self.lock:
                    job = next(jobs, None)
                if job is None:
                    return
                wait = begin + job / self.count * self.over - time.monotonic()
                time.sleep(max(0.0, wait))
                wanted = self.names[job * BATCH : (job + 1) * BATCH]
                began = time.monotonic()
                try:
                    got = [bytes(item.data) for item in client.batch([as_entry(n) for n in wanted])]
                except forebay.Error as e:
                    with self.lock:
                        self.retryable += isinstance(e, again)
                        self.failed += not isinstance(e, again)
                        self.errors.append(f"{type(e).__name__}: {e}")
                    continue
                took = time.monotonic() - began
                right = got == [content(n, self.size) for n in wanted]
                with self.lock:
                    self.wrong += not right
                    self.seconds.append((began, took))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    @contextlib.contextmanager
    def going(self, threads: int = 4) -> Iterator[threading.Thread]:
        """While the block runs, and until all are done."""
        thread = threading.Thread(target=self.run, args=[threads])
        thread.start()
        try:
            yield thread
        finally:
            thread.join()

    @property
    def done(self) -> int:
        return len(self.seconds)

    def percentile(self, share: float) -> float:
        """Seconds; 0 if no batch came."""
        ordered = sorted(took for _, took in self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def outcome(report: Report, what: str, batches: Batches) -> None:
    """Rows that say that no batch was wrong, and none failed."""
    for name, value in (
        ("wrong batches", batches.wrong),
        ("failed batches", batches.failed + batches.retryable),
    ):
        report.add(
            {
                "name": f"{what}: {name}",
                "value": value,
                "unit": f"of {batches.done + batches.failed + batches.retryable}",
                "goals": [{"figure": "value", "at_most": 0}],
            }
        )
    for error in batches.errors[:3]:
        report.note(f"{what}: {error}")
