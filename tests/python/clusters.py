"""Nodes of one cluster, for tests: started, stopped, read from, and asked how they see it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servers import REGION, Node, forebay_program, free_port, s3_client

# What takes a moment takes longer on a busy machine.
PATIENCE = 60


def eventually(ready, what: str, seconds: float = PATIENCE):
    """What `ready` returns, once that is something."""
    deadline = time.monotonic() + seconds
    while True:
        found = ready()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def throughout(seconds: float, holds, what: str) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert holds(), what
        time.sleep(0.25)


class Cluster:
    """Nodes that begin with the same settings, each with its ports and its directory."""

    def __init__(
        self, origin, directory: Path, source: str, *options: str, bucket: str = "cluster"
    ) -> None:
        self.origin, self.directory, self.source = origin, directory, source
        self.bucket = bucket
        self.options = ["--freshness", "immutable", "--set", "cluster.plain=true", *options]
        self.nodes: dict[str, Node] = {}
        self.ports: dict[str, tuple[int, int]] = {}
        self.before = 0.0

    def start(self, name: str, *options: str, host: str = "127.0.0.1", **more) -> Node:
        s3, peer = self.ports.setdefault(name, (free_port(), free_port()))
        of_cluster = ["--cluster", self.source, "--peer", f"{host}:{peer}"]
        of_cluster += ["--set", f"cluster.node={name}"] if "own-name" not in options else []
        others = [o for o in options if o != "own-name"]
        node = Node(
            self.origin.url,
            [self.bucket],
            self.directory / name,
            listen=f"{host}:{s3}",
            options=[*self.options, *of_cluster, *others],
            **{"cache_size": "256MiB", **more},
        )
        self.nodes[name] = node
        return node

    def start_all(self, names: str) -> None:
        """Starts a node for each letter, and waits until they agree."""
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(self.start, names))
        self.agree(len(self.nodes))

    def forget(self, name: str) -> None:
        """Takes a node that was killed out of the map, as soon as its lease has ended."""
        asked = next(iter(self.nodes.values()))
        eventually(lambda: order(asked, "forget", name).returncode == 0, f"{name} is forgotten")
        self.agree(len(self.nodes))

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        node = self.nodes.pop(name)
        with contextlib.suppress(OSError):
            self.before += received(node)
        node.stop(how)

    def from_bucket(self) -> float:
        return self.before + sum(received(node) for node in self.nodes.values())

    def read(self, objects: dict[str, bytes], *names: str) -> None:
        for name in names or tuple(self.nodes):
            url = self.nodes[name].url
            with ThreadPoolExecutor(4) as pool:
                keys = list(objects)
                read = pool.map(lambda key, url=url: fetch(f"{url}/{self.bucket}/{key}"), keys)
                for key, value in zip(keys, read, strict=True):
                    assert value == objects[key], f"{key} at {name} has other bytes"

    def agree(self, members: int) -> dict:
        """The status that all nodes tell alike: so many members that answer, the same epoch."""

        def alike():
            told = [status(node) for node in self.nodes.values()]
            right = all(
                len(t["members"]) == members and all(m["answers"] for m in t["members"])
                for t in told
            )
            return right and len({t["epoch"] for t in told}) == 1 and told[0]

        return eventually(alike, f"{members} members, of which all nodes tell the same")

    def close(self) -> None:
        for name in list(self.nodes):
            self.nodes.pop(name).stop(signal.SIGKILL)


def filled(origin, bucket: str, sizes: list[int], seed: int) -> dict[str, bytes]:
    """A new bucket of the S3 server, with objects `o000`, `o001`, … of these sizes."""
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    made = random.Random(seed)
    objects = {f"o{i:03}": made.randbytes(size) for i, size in enumerate(sizes)}
    for key, value in objects.items():
        s3.put_object(Bucket=bucket, Key=key, Body=value)
    return objects


def received(node: Node) -> float:
    samples = node.metrics().items()
    return sum(v for k, v in samples if k.startswith("forebay_origin_received_bytes_total"))


def metric(node: Node, name: str) -> float:
    return node.metrics()[name]


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read()


def status(node: Node) -> dict:
    return json.loads(fetch(f"{node.url}/v1/forebay/cluster"))


def shares(node: Node) -> dict[str, float]:
    return {m["name"]: m["share"] for m in status(node)["members"]}


def names(node: Node) -> set[str]:
    return set(shares(node))


def trouble(node: Node) -> str:
    return status(node).get("error") or ""


def order(node: Node, *words: str, **env: str) -> subprocess.CompletedProcess:
    """`forebay cluster WORDS`, asked of this node."""
    command = [forebay_program(), "cluster", *words, "--node", node.url]
    env = {**os.environ, **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
