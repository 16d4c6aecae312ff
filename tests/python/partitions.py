"""Partitions: a cluster whose nodes, etcd and bucket are machines of their own, and what is cut
between them while the register checker (register.py) and batches go on.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import signal
import tarfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from clusters import Cluster
from namespaces import Network
from register import OPTIONS, Checker, Register, value
from servers import REGION, Etcd, Versitygw, s3_client

BUCKET = "written"
S3_PORT, PEER_PORT = 8080, 8300
#: The bucket and all clients are at the machine `world`: nothing is cut between it and anybody.
NODES, MACHINES = "abc", ("a", "b", "c", "d", "etcd", "world")
#: Entries of a batch: new ones each time, of which every node has some.
BATCH, ENTRY_BYTES = 12, 20_000
#: The longest that a write or a batch may take. A lease, and two seconds, is what a write waits for
#: a node that cannot be told (SEMANTICS); the rest is for a busy machine, and a second such wait.
BOUND_SECONDS = 30


class Apart(Cluster):
    """Nodes at machines of their names."""

    def __init__(self, network: Network, *arguments, **more) -> None:
        super().__init__(*arguments, **more)
        self.network = network
        self.options += ["--set", "auth.anonymous=true"]

    def start(self, name: str, *options: str, **more):
        self.ports[name] = S3_PORT, PEER_PORT
        with self.network.inside(name):
            return super().start(name, *options, host=self.network.address(name), **more)


class Site:
    """Everything of a test: the network, the bucket, etcd, and the cluster (not yet started)."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.rng = random.Random()
        with ExitStack() as made:
            self.network = made.enter_context(Network(*MACHINES))
            at = self.network.address
            with self.network.inside("world"):
                self.origin = Versitygw(directory / "s3", host=at("world"))
            made.callback(self.origin.stop, signal.SIGKILL)
            with self.network.inside("etcd"):
                self.etcd = Etcd(directory / "etcd", host=at("etcd"))
            made.callback(self.etcd.stop, signal.SIGKILL)
            # Clients are there from here on, until all is closed.
            made.enter_context(self.network.inside("world"))
            self.s3 = s3_client(self.origin.url)
            where = {"LocationConstraint": REGION}
            self.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
            source = f"etcd://{at('etcd')}:{self.etcd.port}/training"
            self.cluster = Apart(
                self.network, self.origin, directory, source, *OPTIONS, *options, bucket=BUCKET
            )
            self.cluster.options[1] = "10m"
            made.callback(self.cluster.close)
            self._made = made.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._made.close()

    def nodes_or(self, name: str) -> list[str]:
        return [other for other in NODES if other != name]


# What is cut: each is a context in which it is so, and says in words what that is.


@contextmanager
def pair(site: Site):
    """Two nodes do not reach each other; the third, etcd and clients reach both."""
    a, b = site.rng.sample(NODES, 2)
    with site.network.cut(a, b):
        yield f"{a} and {b}"


@contextmanager
def one_way(site: Site):
    """What one node sends to another is lost; that one's packets arrive."""
    a, b = site.rng.sample(NODES, 2)
    with site.network.cut(a, b, both=False):
        yield f"{a} to {b}"


@contextmanager
def one_from_etcd(site: Site):
    a = site.rng.choice(NODES)
    with site.network.cut(a, "etcd"):
        yield f"{a} and etcd"


@contextmanager
def one_way_of_etcd(site: Site):
    """What a node says arrives at etcd, and no answer comes; or the other way round."""
    a = site.rng.choice(NODES)
    ways = [(a, "etcd"), ("etcd", a)]
    source, target = site.rng.choice(ways)
    with site.network.cut(source, target, both=False):
        yield f"{source} to {target}"


@contextmanager
def data_links(site: Site):
    """A node's peer port and its connections to others' are cut; it still reaches etcd."""
    a = site.rng.choice(NODES)
    with ExitStack() as cuts:
        for other in site.nodes_or(a):
            cuts.enter_context(site.network.cut(a, other, ports=[PEER_PORT]))
        yield f"{a} and all others, at the peer port"


@contextmanager
def alone(site: Site):
    """A node reaches the bucket and clients only."""
    a = site.rng.choice(NODES)
    with ExitStack() as cuts:
        for other in (*site.nodes_or(a), "etcd"):
            cuts.enter_context(site.network.cut(a, other))
        yield f"{a} and all others, and etcd"


@contextmanager
def etcd_from_all(site: Site):
    with ExitStack() as cuts:
        for name in ("a", "b", "c", "d"):
            cuts.enter_context(site.network.cut(name, "etcd"))
        yield "etcd and all"


CUTS = [pair, one_way, one_from_etcd, one_way_of_etcd, data_links, alone, etcd_from_all]


# What happens while something is cut, for so many seconds.


def nothing(site: Site, checker: Checker, seconds: float) -> None:
    time.sleep(seconds)


def past(site: Site, checker: Checker, seconds: float) -> None:
    """Overwrites past the nodes, with numbers that are newer than what was acknowledged."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        register: Register = site.rng.choice(checker.registers)
        with register.writing:
            n = register.written = register.written + 1
            site.s3.put_object(Bucket=BUCKET, Key=register.name()[0], Body=value(n))
        time.sleep(0.3)


def kill(site: Site, checker: Checker, seconds: float) -> None:
    """A node dies, and comes back when nothing is cut any more."""
    name = site.rng.choice(NODES)
    site.cluster.stop(name, signal.SIGKILL)
    time.sleep(seconds)


def change(site: Site, checker: Checker, seconds: float) -> None:
    """The map changes: a node joins, if it reaches etcd."""
    end = time.monotonic() + seconds
    try:
        site.cluster.start("d")
    except AssertionError:
        # Without etcd, a node does not start.
        site.cluster.nodes.pop("d", None)
    time.sleep(max(0, end - time.monotonic()))


def another_cut(site: Site, checker: Checker, seconds: float) -> None:
    """Something else is cut in the middle, and mended at the end."""
    time.sleep(seconds / 2)
    with site.rng.choice(CUTS)(site):
        time.sleep(seconds / 2)


BESIDES = [past, kill, change, another_cut]


def round_of(site: Site, checker: Checker, cut, besides, seconds: float, rest: float) -> None:
    """Something is cut for a time, something happens besides, and all is mended."""
    with cut(site):
        besides(site, checker, seconds)
    if "d" in site.cluster.nodes:
        site.cluster.stop("d")
    for name in NODES:
        if name not in site.cluster.nodes:
            site.cluster.start(name)
    time.sleep(rest)


class Batches:
    """Batches of new objects at any node, each of which must come whole and in order."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site, self.rng = site, random.Random(seed)
        self.stopping = threading.Event()
        self.wrong: list[str] = []
        self.done = self.failed = 0
        self.slowest = 0.0

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self.stopping.set()
            thread.join()
        assert not self.wrong, self.wrong[:5]

    def _run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            made = {f"batch-{number}-{i}": self.rng.randbytes(ENTRY_BYTES) for i in range(BATCH)}
            for key, body in made.items():
                self.site.s3.put_object(Bucket=BUCKET, Key=key, Body=body)
            name, node = self.rng.choice(list(self.site.cluster.nodes.items()))
            wanted = self.rng.choices(list(made), k=BATCH)
            began = time.monotonic()
            try:
                got = entries(node.url, wanted)
            except (OSError, http.client.HTTPException, tarfile.TarError) as e:
                # A node that was killed answers nothing; one that runs must.
                if node.process.poll() is None and self.site.cluster.nodes.get(name) is node:
                    self.wrong.append(f"batch {number} at {name}: {e}")
                self.failed += 1
                continue
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.done += 1
            if got != [(f"{BUCKET}/{key}", made[key]) for key in wanted]:
                self.wrong.append(f"batch {number} at {name}: {[key for key, _ in got]}")


def entries(url: str, keys: list[str]) -> list[tuple[str, bytes]]:
    body = {"in": [{"objname": key} for key in keys], "strm": True, "mime": ".tar"}
    request = urllib.request.Request(
        f"{url}/v1/ml/moss/{BUCKET}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method="GET",
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        tar = tarfile.open(fileobj=io.BytesIO(answer.read()), mode="r:")
        return [(info.name, tar.extractfile(info).read()) for info in tar]
