"""What a benchmark runs against: files of pseudo-random bytes, `forebay serve` over them, and
`forebay distance`, all on loopback.

A process ends with its `with` block, or is ended by the kernel if this program is killed.
Everything is in one temporary directory.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

BUCKET = "bench"
REGION = "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "only-on-loopback"}
START_SECONDS = 60
# `forebay distance` writes its counters five times a second.
COUNTERS_SECONDS = 0.5
# Rivals' clients must not look for credentials elsewhere, nor for an instance's metadata.
ENVIRONMENT = CREDENTIALS | {
    "AWS_REGION": REGION,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}


def program() -> str:
    """The `forebay` command: $FOREBAY_BIN, or the one of the installed package."""
    beside = Path(sys.executable).parent / "forebay"
    found = os.environ.get("FOREBAY_BIN") or (
        str(beside) if beside.exists() else shutil.which("forebay")
    )
    if not found:
        sys.exit(
            "the forebay command is not installed: run `make bench-python`, or set"
            " FOREBAY_BIN to a built binary"
        )
    return found


def use_own_environment() -> None:
    """What this machine is set up for (a profile, a proxy's certificate, another endpoint) must not
    reach the clients that are measured.
    """
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class Server:
    """A child process that says in one line on its standard output where it listens."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.arguments, self.log = [program(), *arguments], log
        # No settings of this machine's own node.
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("FOREBAY_", "AWS_"))
        } | ENVIRONMENT
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                self.arguments,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=_end_with_parent,
            )
        self.pid = self.process.pid
        if not select.select([self.process.stdout], [], [], START_SECONDS)[0]:
            self._fail(f"was not ready after {START_SECONDS} s")
        self.line = self.process.stdout.readline().decode()
        if not self.line:
            self._fail("ended before it was ready")

    def _fail(self, what: str) -> None:
        self.stop()
        sys.exit(
            f"{' '.join(self.arguments)}\n  {what}; the end of its"
            f" log:\n{self.log.read_text(errors='replace')[-2000:]}"
        )

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Node(Server):
    """`forebay serve` with the bucket `bench`: a directory, or an S3 endpoint. Without `unix` its
    clients cannot find the short way to it. `cache` is its size; with `disks`, one for each.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        files: Path | None = None,
        endpoint: str | None = None,
        cache: str = "8GiB",
        disks: tuple[str, ...] = (),
        hedge_percent: int = 0,
        unix: bool = True,
        listen: str = "127.0.0.1:0",
        admin: bool = False,
        settings: tuple[str, ...] = (),
    ) -> None:
        origin = (
            f"file://{files}"
            if files
            else f"s3://{BUCKET}?endpoint={endpoint}&region={REGION}&hedge_percent={hedge_percent}"
        )
        socket, self.cache = directory / f"{name}.sock", directory / f"{name}-cache"
        arguments = [
            "serve",
            "--json",
            "--log",
            "warn",
            "--freshness",
            "immutable",
            "--listen",
            listen,
            "--admin",
            f"{listen.rsplit(':', 1)[0]}:0" if admin else "off",
        ]
        arguments += ["--unix", str(socket) if unix else "off"]
        sizes = {self.cache: cache} if not disks else {}
        sizes |= {directory / f"{name}-cache-{i}": size for i, size in enumerate(disks)}
        for where, size in sizes.items():
            arguments += ["--cache", f"{where}:{size}"]
        arguments += ["--origin", f"{BUCKET}={origin}", *settings]
        super().__init__(arguments, directory / f"{name}.log")
        ready = json.loads(self.line)
        self.address = ready["s3"]
        self.url, self.unix_url = f"http://{self.address}", f"unix:{socket}"
        self.metrics_url = f"http://{ready['admin']}/metrics" if admin else None

    def metrics(self) -> dict[str, float]:
        """The sum of each metric over its labels. The node has `admin`."""
        found: dict[str, float] = {}
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, value = line.rsplit(" ", 1)
                    name = name.split("{", 1)[0]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def metric(self, name: str) -> float:
        """One that has no labels. Next to nothing is done with the others, of which a node with
        many peers has thousands: threads that measure reads beside it would wait for that.
        """
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            found = re.search(rf"^{name} (\S+)$".encode(), answer.read(), re.MULTILINE)
        if found is None:
            sys.exit(f"{self.metrics_url} has no {name}")
        return float(found[1])


class Distance(Server):
    """`forebay distance` before a server: `rtt` there and back, and `first_byte` before each
    request reaches it, from a log-normal distribution if there is a `sigma`.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        to: str,
        *,
        first_byte_ms: float = 0.0,
        rtt_ms: float = 0.0,
        sigma: float = 0.0,
        seed: int = 1,
        rate: str | None = None,
        listen: str = "127.0.0.1:0",
    ) -> None:
        arguments = [
            "distance",
            "--listen",
            listen,
            "--to",
            to,
            "--rtt",
            f"{round(rtt_ms * 1000)}us",
            "--first-byte",
            f"{round(first_byte_ms * 1000)}us",
        ]
        self.counters = directory / f"{name}.json"
        arguments += ["--stats-file", str(self.counters)]
        if rate:
            arguments += ["--rate", rate]
        if sigma:
            arguments += ["--first-byte-sigma", str(sigma), "--seed", str(seed)]
        super().__init__(arguments, directory / f"{name}.log")
        self.address = self.line.split()[1]
        self.url = f"http://{self.address}"

    def moved(self) -> dict:
        """The counters of what went over it: `requests`, `bytes_to_client`, …; complete a moment
        after the traffic ended.
        """
        time.sleep(COUNTERS_SECONDS)
        return json.loads(self.counters.read_text())


def content(name: str, size: int) -> bytes:
    """The bytes of an object, by its name: what was received can be compared without keeping what
    was written.
    """
    return random.Random(name).randbytes(size)


def write_objects(files: Path, prefix: str, count: int, size: int) -> list[str]:
    (files / prefix).mkdir(parents=True)
    names = [f"{prefix}/{i:06}.bin" for i in range(count)]
    for name in names:
        (files / name).write_bytes(content(name, size))
    return names


def write_shards(
    files: Path, prefix: str, count: int, size: int, shard_bytes: int
) -> list[tuple[str, str]]:
    """As many samples in tar shards of about `shard_bytes`: pairs of shard and member."""
    (files / prefix).mkdir(parents=True)
    per_shard = max(1, shard_bytes // (size + 1024))
    members = []
    for first in range(0, count, per_shard):
        shard = f"{prefix}/{first // per_shard:04}.tar"
        with tarfile.open(files / shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(first, min(first + per_shard, count)):
                info = tarfile.TarInfo(f"{i:06}.bin")
                info.size = size
                tar.addfile(info, io.BytesIO(content(f"{prefix}/{info.name}", size)))
                members.append((shard, info.name))
    return members


def read_all(url: str, entries: list, batch: int = 64) -> None:
    """Reads everything once through a node, so that nothing is cold."""
    import forebay

    client = forebay.Client(url)
    for first in range(0, len(entries), batch):
        client.batch([as_entry(e) for e in entries[first : first + batch]]).wait()
    # The cache stores data in the background, after the reader got it.
    time.sleep(0.2)


def as_entry(name: str | tuple[str, str]):
    """An entry of a GetBatch for an object's name, or a shard's and a member's. Not a tuple: those
    are samples with labels to the datasets.
    """
    import forebay

    return (
        f"{BUCKET}/{name}"
        if isinstance(name, str)
        else forebay.Entry(name[0], bucket=BUCKET, archpath=name[1])
    )
