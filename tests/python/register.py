"""Whether reads that follow acknowledged writes get them, at any node of a cluster: a checker, and
what is done to the nodes meanwhile.

Writers write growing numbers to a few keys through any node, readers read at any node. A read that
begins after a write was acknowledged must get it or a later one.
"""

from __future__ import annotations

import http.client
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from clusters import Cluster, eventually, metric, status
from servers import REGION, Etcd, Versitygw, s3_client

#: With map in etcd, and a freshness rule that would hide a missed write for long.
OPTIONS = ["--set", "cluster.writes=coherent", "--set", "cluster.forget_after=10s"]
KEYS = 6
SIZE = 64
FAILURES = (OSError, http.client.HTTPException)


def put(url: str, body: bytes, seconds: float = 60) -> None:
    request = urllib.request.Request(url, body, method="PUT")
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        answer.read()


def number(body: bytes) -> int:
    return int(body.split(b" ", 1)[0])


def value(n: int) -> bytes:
    return f"{n} ".encode().ljust(SIZE, b".")


@contextmanager
def three_nodes(directory: Path):
    """Three nodes of a cluster that trust each other, with an etcd and an S3 server of their own:
    the cluster, the etcd, and a client of the server.
    """
    origin, etcd = Versitygw(directory / "s3"), Etcd(directory / "etcd")
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket="written", CreateBucketConfiguration={"LocationConstraint": REGION})
    source = f"etcd://127.0.0.1:{etcd.port}/training"
    cluster = Cluster(origin, directory, source, *OPTIONS, bucket="written")
    # Not immutable, and a rule that would hide a write that was missed.
    cluster.options[1] = "10m"
    try:
        for name in "abc":
            cluster.start(name)
        cluster.agree(3)
        trusted(cluster)
        yield cluster, etcd, s3
    finally:
        for node in cluster.nodes.values():
            node.process.send_signal(signal.SIGCONT)
        cluster.close()
        etcd.process.send_signal(signal.SIGCONT)
        etcd.stop(signal.SIGKILL)
        origin.stop(signal.SIGKILL)


class Register:
    """One name in the bucket. After a write of which nobody knows whether it will happen, another
    name: it may happen after later ones."""

    def __init__(self, key: str) -> None:
        self.key, self.at, self.written, self.acknowledged = key, 0, 0, 0
        self.writing = threading.Lock()

    def name(self) -> tuple[str, int]:
        return f"{self.key}-{self.at}", self.acknowledged


class Checker:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.seed = cluster, seed
        self.registers = [Register(f"register-{i}") for i in range(KEYS)]
        self.stopping = threading.Event()
        self.wrong: list[str] = []
        self.reads = self.writes = self.failed = 0
        #: Seconds of the slowest write: of those that were acknowledged, and of the others.
        self.slowest = self.slowest_failed = 0.0

    def node(self, rng: random.Random):
        nodes = list(self.cluster.nodes.items())
        return rng.choice(nodes) if nodes else None

    def write(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stopping.is_set():
            register, chosen = rng.choice(self.registers), self.node(rng)
            if not chosen or not register.writing.acquire(blocking=False):
                continue
            try:
                n = register.written = register.written + 1
                name = f"{chosen[1].url}/{self.cluster.bucket}/{register.name()[0]}"
                began = time.monotonic()
                try:
                    put(name, value(n))
                except FAILURES as e:
                    self.failed += 1
                    took = time.monotonic() - began
                    self.slowest_failed = max(self.slowest_failed, took)
                    if not (isinstance(e, urllib.error.HTTPError) and e.code == 404):
                        register.acknowledged = 0
                        register.at += 1
                    time.sleep(0.05)
                else:
                    register.acknowledged = n
                    self.writes += 1
                    self.slowest = max(self.slowest, time.monotonic() - began)
            finally:
                register.writing.release()
            time.sleep(rng.random() * 0.05)

    def read(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stopping.is_set():
            register, chosen = rng.choice(self.registers), self.node(rng)
            if not chosen:
                continue
            at = register.at
            name, least = register.name()
            if at != register.at or not least:
                continue
            url = f"{chosen[1].url}/{self.cluster.bucket}/{name}"
            try:
                with urllib.request.urlopen(url, timeout=60) as answer:
                    got = number(answer.read())
                    how = answer.headers["X-Cache"]
            except FAILURES as e:
                self.failed += 1
                if isinstance(e, urllib.error.HTTPError) and e.code == 404:
                    self.wrong.append(f"{name} at {chosen[0]}: not found after write {least}")
                time.sleep(0.05)
                continue
            self.reads += 1
            if got < least:
                self.wrong.append(f"{name} at {chosen[0]}: {got} after write {least} ({how})")

    @contextmanager
    def running(self):
        with self.going():
            yield self
        assert not self.wrong, f"seed {self.seed}: {len(self.wrong)} stale: {self.wrong[:5]}"
        assert self.reads > 20 and self.writes > 5, vars(self)

    @contextmanager
    def going(self):
        """Whoever asks looks at `wrong`."""
        rng = random.Random(self.seed)
        threads = [threading.Thread(target=self.write, args=[rng.random()]) for _ in range(3)]
        threads += [threading.Thread(target=self.read, args=[rng.random()]) for _ in range(5)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.stopping.set()
            for thread in threads:
                thread.join()


def trusted(cluster: Cluster) -> None:
    """All nodes answer from what they know."""
    for node in cluster.nodes.values():
        told = lambda node=node: (  # noqa: E731
            status(node)["trusted"] and metric(node, "forebay_cluster_trusted") == 1
        )
        eventually(told, "all writers know of each node")


# What is done to the nodes a, b and c, again and again; each returns after a few seconds.


def nothing(checker, etcd, origin, rng) -> None:
    time.sleep(1)


def stop(checker, etcd, origin, rng) -> None:
    name = rng.choice("abc")
    process = checker.cluster.nodes[name].process
    process.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 16))
    process.send_signal(signal.SIGCONT)
    time.sleep(rng.uniform(0, 5))


def kill(checker, etcd, origin, rng) -> None:
    name = rng.choice("abc")
    checker.cluster.stop(name, signal.SIGKILL)
    time.sleep(rng.uniform(0, 5))
    checker.cluster.start(name)
    time.sleep(rng.uniform(0, 5))


def join(checker, etcd, origin, rng) -> None:
    checker.cluster.start("d")
    time.sleep(rng.uniform(1, 4))
    checker.cluster.stop("d")
    time.sleep(rng.uniform(0, 2))


def without_etcd(checker, etcd, origin, rng) -> None:
    etcd.process.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(1, 14))
    etcd.process.send_signal(signal.SIGCONT)
    time.sleep(rng.uniform(2, 6))


def past(checker, etcd, origin, rng) -> None:
    """Overwrites past the nodes, with a number that is newer than what was acknowledged."""
    register = rng.choice(checker.registers)
    with register.writing:
        n = register.written = register.written + 1
        origin.put_object(Bucket=checker.cluster.bucket, Key=register.name()[0], Body=value(n))
    time.sleep(0.2)


SCENARIOS = [nothing, stop, kill, join, without_etcd, past]
