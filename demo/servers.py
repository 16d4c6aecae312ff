"""The demo's processes: the S3 server, the distance before it, and Forebay. They end with the demo,
however it ends.
"""

import contextlib
import ctypes
import http.client
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

KEYS = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "only-on-loopback",
    "AWS_REGION": "us-east-1",
}
START_SECONDS = 20


class Failed(Exception):
    """A server did not start or has stopped; the message contains the end of its log."""


def _end_with_parent() -> None:
    """In the child: it is killed when the demo is gone, even after `kill -9`, and at once, because
    the next run uses the same folders.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Server:
    """A child process with its log in a file."""

    def __init__(self, name: str, command: list, logs: Path, env: dict | None = None):
        self.name, self.log = name, logs / f"{name}.log"
        logs.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C goes only to the demo, which then stops its servers in
            # order.
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | (env or {}),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def failed(self, what: str) -> Failed:
        tail = self.log.read_text(errors="replace").splitlines()[-15:] or ["(nothing)"]
        return Failed(
            f"{self.name} {what}\n  command: {' '.join(self.process.args)}\n  end of its"
            f" log, {self.log}:\n    " + "\n    ".join(tail)
        )

    def check(self) -> None:
        if self.process.poll() is not None:
            raise self.failed(f"stopped with status {self.process.returncode}")

    def line(self) -> str:
        """The next line of its standard output, with which our servers say that they are ready."""
        deadline, said = time.monotonic() + START_SECONDS, b""
        while not said.endswith(b"\n"):
            if not select.select(
                [self.process.stdout], [], [], max(0, deadline - time.monotonic())
            )[0]:
                raise self.failed(f"was not ready after {START_SECONDS} s")
            part = os.read(self.process.stdout.fileno(), 4096)
            if not part:
                self.process.wait(5)
                self.check()
            said += part
        return said.decode()

    def wait_for_port(self, port: int, host: str = "127.0.0.1") -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.check()
            try:
                socket.create_connection((host, port), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise self.failed(f"was not listening after {START_SECONDS} s") from None
                time.sleep(0.02)

    def stop(self) -> None:
        for end in (self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                end()
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    continue
        self.process.stdout.close()


def get(address: str, path: str, seconds: float = 5) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=seconds)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise Failed(f"http://{address}{path} answered {answer.status}: {body[:200]!r}")
        return body
    finally:
        connection.close()


class Bucket(Server):
    """versitygw, an S3 server that Forebay's authors did not write, over a directory."""

    def __init__(self, program: Path, folder: Path, logs: Path, host: str = "127.0.0.1"):
        # It cannot choose a port by itself, and one that is free now may be taken in a moment: try
        # again then.
        for attempt in range(3):
            self.port = free_port(host)
            self.address = f"{host}:{self.port}"
            data, attributes = folder / "data", folder / "attributes"
            for part in (data, attributes):
                part.mkdir(parents=True, exist_ok=True)
            command = [
                program,
                "--port",
                self.address,
                "--keep-alive",
                "--quiet",
                "posix",
                "--sidecar",
                attributes,
                data,
            ]
            env = {
                "ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"],
                "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"],
            }
            super().__init__("versitygw", command, logs, env)
            try:
                self.wait_for_port(self.port, host)
                return
            except BaseException as error:
                self.stop()
                if attempt == 2 or not isinstance(error, Failed):
                    raise


class Distance(Server):
    """`forebay distance` in front of the bucket, and its counters."""

    def __init__(
        self,
        program: Path,
        to: Bucket,
        rtt_ms: float,
        first_byte_ms: float,
        rate_mib: float,
        logs: Path,
    ):
        host = to.address.rsplit(":", 1)[0]
        command = [
            program,
            "distance",
            "--listen",
            f"{host}:0",
            "--to",
            to.address,
            "--stats-listen",
            f"{host}:0",
        ]
        command += [
            "--rtt",
            f"{rtt_ms}ms",
            "--first-byte",
            f"{first_byte_ms}ms",
            "--rate",
            f"{rate_mib}MiB",
        ]
        super().__init__("distance", command, logs)
        try:
            said = self.line()
            found = re.search(r"distance: (\S+) to .* counters at http://([^/]+)/", said)
            if not found:
                raise self.failed(f"said {said!r}")
            self.address, self.counters_address = found.groups()
        except BaseException:
            self.stop()
            raise

    def counters(self) -> dict:
        self.check()
        return json.loads(get(self.counters_address, "/"))


class Forebay(Server):
    """`forebay serve` with an empty cache."""

    def __init__(
        self, program: Path, origin: str, buckets: tuple, cache: Path, cache_size: str, logs: Path
    ):
        shutil.rmtree(cache, ignore_errors=True)
        command = [
            program,
            "serve",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--cache",
            f"{cache}:{cache_size}",
        ]
        # A training set does not change during the job; without this, the node would ask about each
        # object again after 60 s.
        command += ["--freshness", "immutable"]
        for bucket in buckets:
            command += ["--origin", f"s3://{bucket}?endpoint=http://{origin}"]
        self.cache = cache
        super().__init__("forebay", command, logs, KEYS)
        try:
            ready = json.loads(self.line())
            self.url, self.admin = f"http://{ready['s3']}", ready["admin"]
        except BaseException:
            self.stop()
            raise

    def hits_and_misses(self) -> tuple[float, float]:
        """From /metrics: reads (one for each entry of a batch) that the local disk answered alone,
        and reads that needed the origin.
        """
        self.check()
        counted = {"HIT": 0.0, "REVALIDATED": 0.0, "MISS": 0.0}
        for line in get(self.admin, "/metrics").decode().splitlines():
            found = re.match(r'forebay_reads_total\{[^}]*status="(\w+)"[^}]*\} (\S+)', line)
            if found and found[1] in counted:
                counted[found[1]] += float(found[2])
        return counted["HIT"] + counted["REVALIDATED"], counted["MISS"]

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.cache, ignore_errors=True)


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class Etcd(Server):
    """etcd, which holds the map of a cluster."""

    def __init__(self, program: Path, folder: Path, logs: Path, host: str = "127.0.0.1"):
        if not program.exists():
            # Its package was installed already.
            program = Path(shutil.which("etcd") or program)
        shutil.rmtree(folder, ignore_errors=True)
        port = free_port(host)
        self.address = f"{host}:{port}"
        clients = f"http://{self.address}"
        peers = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        command = [program, "--name", "demo", "--data-dir", folder]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"demo={peers}"]
        super().__init__("etcd", command, logs)
        try:
            self.wait_for_port(port, host)
        except BaseException:
            self.stop()
            raise


class Member(Server):
    """A node of a cluster, at a machine of its own, or at an address of its own on this one."""

    def __init__(self, name: str, command: list, network, address: str, folder: Path, logs: Path):
        self.network, self.lost = network, contextlib.ExitStack()
        self.name, self.address, self.folder, self.logs = name, address, folder, logs
        shutil.rmtree(folder, ignore_errors=True)
        self.port, self.admin_port = free_port(address), free_port(address)
        peer = free_port(address)
        self.url, self.admin = f"http://{address}:{self.port}", f"{address}:{self.admin_port}"
        self.command = [
            *command,
            *("--listen", f"{address}:{self.port}", "--admin", self.admin),
            *("--peer", f"{address}:{peer}", "--unix", "off"),
        ]
        self.process = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts it, with what its cache has."""
        self.lost.close()
        with self.network.inside(self.name):
            super().__init__(self.name, self.command, self.logs, KEYS)
        try:
            self.line()
        except BaseException:
            super().stop()
            raise

    def kill(self, silent: bool) -> None:
        """Nothing is finished, nobody is told. The kernel still closes its connections and refuses
        new ones, unless it is `silent`: then packets vanish, as when the machine has failed.
        """
        if silent:
            self.lost.enter_context(self.network.lost(self.name))
        self.process.kill()
        self.process.wait()

    def counted(self) -> dict[str, float]:
        """Each sample of /metrics, by its name without labels, summed."""
        sums: dict[str, float] = {}
        for line in get(self.admin, "/metrics", 1).decode().splitlines():
            if line and not line.startswith("#"):
                sample, number = line.rsplit(" ", 1)
                name = sample.split("{", 1)[0]
                sums[name] = sums.get(name, 0.0) + float(number)
        return sums

    def stop(self) -> None:
        self.lost.close()
        if self.process is not None:
            super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)
