"""Disks of a cluster's nodes that are full or fail: real nodes, real file systems, a real etcd, a
real S3 server. Every byte that any node delivers is compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import tarfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clusters import PATIENCE, Cluster, order
from conftest import s3_client
from servers import REGION, forebay_program

BUCKET = "disks"
# EXT4_IOC_SHUTDOWN, without writing the journal: from then on reads and writes fail with EIO.
SHUTDOWN, NO_FLUSH = 0x8004587D, 2


@pytest.fixture(scope="module")
def bucket(origin) -> dict[str, bytes]:
    """60 MB: small objects, larger ones, one of several units."""
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    made = random.Random(8)
    sizes = [made.randrange(1, 60_000) for _ in range(100)] + [2 << 20] * 16 + [0, 20 << 20]
    objects = {f"o{i:03}": made.randbytes(size) for i, size in enumerate(sizes)}
    for key, value in objects.items():
        s3.put_object(Bucket=BUCKET, Key=key, Body=value)
    return objects


@pytest.fixture
def cluster(origin, etcd, tmp_path):
    made = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/disks", bucket=BUCKET)
    yield made
    made.close()


@contextlib.contextmanager
def mounted(at: Path, *words: str):
    at.mkdir(parents=True)
    done = subprocess.run(["mount", *words, str(at)], capture_output=True, text=True)
    if done.returncode != 0:
        # Only root may mount, and not in every container; where it may, the test runs.
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True, capture_output=True)


def batch(url: str, bucket: dict[str, bytes], keys: list[str]) -> None:
    body = json.dumps({"in": [{"objname": key} for key in keys], "strm": True})
    request = urllib.request.Request(f"{url}/v1/ml/moss/{BUCKET}", body.encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        archive = io.BytesIO(answer.read())
    with tarfile.open(fileobj=archive) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]
    assert members == [(f"{BUCKET}/{key}", bucket[key]) for key in keys]


def read_everything(cluster: Cluster, bucket: dict[str, bytes], rounds: int = 1) -> None:
    """By requests and batches, at all nodes at once."""

    def at(name: str) -> None:
        for seed in range(rounds):
            cluster.read(bucket, name)
            keys = list(bucket)
            random.Random(seed).shuffle(keys)
            batch(cluster.nodes[name].url, bucket, keys)

    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        list(pool.map(at, list(cluster.nodes)))


def test_a_full_disk_in_one_node_costs_no_read_at_any(cluster, bucket, tmp_path):
    with mounted(tmp_path / "c" / "cache", "-t", "tmpfs", "-o", "size=24m", "none") as cache:
        try:
            for name in "abc":
                cluster.start(name)
            cluster.agree(3)
            for _ in range(2):
                read_everything(cluster, bucket)
                # Somebody else takes the rest of it, and what the node frees meanwhile.
                ends = time.monotonic() + 60
                while (room := os.statvfs(cache)).f_bavail * room.f_bsize >= 1 << 20:
                    assert time.monotonic() < ends, f"{room.f_bavail * room.f_bsize} are free"
                    with contextlib.suppress(OSError), (cache / "others").open("ab") as file:
                        file.write(bytes(room.f_bavail * room.f_bsize))
            read_everything(cluster, bucket)
            done = order(cluster.nodes["a"], "drain", "c", "--wait")
            assert done.returncode == 0, done.stderr
            cluster.stop("c")
            read_everything(cluster, bucket)
        finally:
            cluster.close()


def test_a_disk_that_fails_in_one_node_costs_no_read_at_any(cluster, bucket, tmp_path):
    if shutil.which("mkfs.ext4") is None:
        # Of e2fsprogs, which is part of Debian; other systems may do without it.
        pytest.skip("there is no mkfs.ext4")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    with mounted(tmp_path / "c" / "cache", "-o", "loop", str(image)) as cache:
        try:
            for name in "abc":
                cluster.start(name, **({"cache_size": "160MiB"} if name == "c" else {}))
            cluster.agree(3)
            read_everything(cluster, bucket)
            failed = threading.Timer(0.5, shut_down, [cache])
            failed.start()
            read_everything(cluster, bucket, rounds=3)
            failed.join()
            with pytest.raises(OSError):
                (cache / "anything").write_bytes(b"1")
            read_everything(cluster, bucket)
            # It is still a member, and what it owned can be handed over or read anew.
            cluster.agree(3)
            assert order(cluster.nodes["a"], "drain", "c").returncode == 0
            read_everything(cluster, bucket)
            cluster.stop("c", signal.SIGKILL)
            read_everything(cluster, bucket)
        finally:
            cluster.close()


def shut_down(cache: Path) -> None:
    directory = os.open(cache, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, SHUTDOWN, struct.pack("I", NO_FLUSH))
    finally:
        os.close(directory)


def test_full_caches_are_handed_over_by_tls_while_everything_is_read(
    origin, bucket, etcd, tmp_path
):
    certificates = tmp_path / "certificates"
    command = [forebay_program(), "cluster", "init", "disks", "--out", str(certificates)]
    subprocess.run([*command, *(f"--node={n}" for n in "abcd")], check=True, capture_output=True)
    cluster = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/disks", bucket=BUCKET)
    cluster.options.remove("cluster.plain=true")
    cluster.options.remove("--set")

    def start(name: str) -> None:
        files = [("ca", "ca.pem"), ("cert", "node.pem"), ("key", "node.key")]
        sets = [f"cluster.{k}={certificates / name / file}" for k, file in files]
        cluster.start(name, *(word for s in sets for word in ("--set", s)), cache_size="32MiB")

    try:
        for name in "abc":
            start(name)
        cluster.agree(3)
        read_everything(cluster, bucket)
        over, failed = threading.Event(), []

        def loop() -> None:
            while not over.is_set() and not failed:
                try:
                    cluster.read(bucket, "a")
                    batch(cluster.nodes["b"].url, bucket, list(bucket))
                except Exception as e:
                    failed.append(e)

        reading = threading.Thread(target=loop)
        reading.start()
        try:
            start("d")
            cluster.agree(4)
            done = order(cluster.nodes["a"], "drain", "c", "--wait")
            assert done.returncode == 0, done.stderr
            cluster.stop("c")
        finally:
            over.set()
            reading.join()
        assert not failed, failed
        read_everything(cluster, bucket)
    finally:
        cluster.close()
