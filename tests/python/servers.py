"""The real processes that the tests run against: an S3 server that we did not write (versitygw) as
the origin, and a Forebay node before it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

CACHE = Path(
    os.environ.get("FOREBAY_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"
)
# Not us-east-1: for that, botocore signs URLs as before 2014.
ACCESS_KEY, SECRET_KEY, REGION = "testaccess", "testsecret", "eu-central-1"
READY_SECONDS = 90
SOCKETS = itertools.count()


def free_port() -> int:
    """A port for a server that cannot choose one itself: below those that connections take, one of
    which could be it by then.
    """
    first_of_connections = int(
        Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    )
    for _ in range(100):
        port = (
            random.randrange(10_000, first_of_connections) if first_of_connections > 12_000 else 0
        )
        with socket.socket() as s, contextlib.suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
            return s.getsockname()[1]
    raise AssertionError("of 100 ports of 127.0.0.1 none is free")


def forebay_program() -> str:
    """The console script of the installed wheel."""
    beside = Path(sys.executable).parent / "forebay"
    found = os.environ.get("FOREBAY_BIN") or (
        str(beside) if beside.exists() else shutil.which("forebay")
    )
    assert found, "the forebay command is not installed: make wheel, or pip install the wheel"
    return found


def s3_client(url: str, **config):
    """boto3 against an S3 server of these tests, or a node before it."""
    import boto3
    from botocore.config import Config

    options = {"s3": {"addressing_style": "path"}, "retries": {"max_attempts": 1}} | config
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(**options),
    )


class Process:
    """A child process whose output is kept, and which is gone when the test run is."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], directory: Path) -> None:
        self.name = name
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"{name}.log"
        self.lines: list[str] = []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    def failed(self, why: str) -> AssertionError:
        tail = self.log.read_text(errors="replace")[-4000:]
        return AssertionError(f"{self.name}: {why}\n{''.join(self.lines[-20:])}\n{tail}")

    def wait_until(self, ready, what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed(f"ended with status {self.process.returncode} before {what}")
            if ready():
                return
            time.sleep(0.02)
        self.process.kill()
        raise self.failed(f"not {what} after {READY_SECONDS} s")

    def stop(self, how: int = signal.SIGTERM, patience: float = 15) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        return self.process.returncode


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
        return True
    except OSError:
        return False


class Versitygw(Process):
    """An S3 server over a directory; buckets are its subdirectories."""

    def __init__(
        self, directory: Path, *, options: list[str] = (), host: str = "127.0.0.1"
    ) -> None:
        program = CACHE / "bin" / "versitygw"
        assert program.exists(), f"{program} is missing: make test installs it"
        self.directory = directory / "origin"
        self.directory.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        command = [
            str(program),
            "--access",
            ACCESS_KEY,
            "--secret",
            SECRET_KEY,
            "--port",
            f"{host}:{self.port}",
            "--region",
            REGION,
        ]
        super().__init__(
            "versitygw", [*command, "posix", *options, str(self.directory)], {}, directory
        )
        self.wait_until(lambda: accepts(self.port, host), "accepting connections")


class Etcd(Process):
    """An etcd of one member, spoken to over its HTTP gateway."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        options: list[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        found = CACHE / "bin" / "etcd"
        program = found if found.exists() else shutil.which("etcd")
        assert program, "etcd is missing: tests/servers/install.sh etcd"
        self.directory = directory
        self.port = port or free_port()
        self.url = f"http://{host}:{self.port}"
        peers = f"http://127.0.0.1:{free_port()}"
        command = [str(program), "--name", "one", "--data-dir", str(directory / "data")]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"one={peers}", "--logger", "zap"]
        command += ["--log-outputs", "stderr", "--log-level", "warn"]
        super().__init__("etcd", [*command, *options], {}, directory)
        self.wait_until(self.is_well, "answering")

    def is_well(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return json.load(answer)["health"] == "true"
        return False

    def call(self, path: str, body: dict, token: str | None = None) -> dict:
        headers = {"Authorization": token} if token else {}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v3/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def put(self, key: str, value: bytes) -> None:
        key, value = (base64.b64encode(part).decode() for part in (key.encode(), value))
        self.call("kv/put", {"key": key, "value": value})

    def delete(self, key: str) -> None:
        self.call("kv/deleterange", {"key": base64.b64encode(key.encode()).decode()})

    def keys(self) -> dict[str, bytes]:
        """Everything below /forebay/."""
        first, last = (base64.b64encode(key).decode() for key in (b"/forebay/", b"/forebay0"))
        found = self.call("kv/range", {"key": first, "range_end": last}).get("kvs", [])
        decoded = ((base64.b64decode(kv["key"]), base64.b64decode(kv["value"])) for kv in found)
        return {key.decode(): value for key, value in decoded}


class Node(Process):
    """`forebay serve` in front of some buckets of an S3 server."""

    def __init__(
        self,
        origin_url: str,
        buckets: list[str],
        directory: Path,
        *,
        cache_size: str = "2GiB",
        options: list[str] = (),
        env: dict[str, str] | None = None,
        socket: Path | None = None,
        listen: str = "127.0.0.1:0",
        within: list[str] = (),
    ) -> None:
        """`within` is a command that runs the node, given as its last arguments. The admin listener
        is at the same host as the other one."""
        self.directory = directory
        # The path of a Unix socket is short: 107 bytes.
        self.socket = socket or Path(f"/tmp/fb-{os.getpid()}-{next(SOCKETS)}.sock")
        command = [
            *within,
            forebay_program(),
            "serve",
            "--json",
            "--listen",
            listen,
            "--unix",
            str(self.socket),
        ]
        host = listen.rsplit(":", 1)[0]
        command += ["--admin", f"{host}:0", "--cache", f"{directory / 'cache'}:{cache_size}"]
        for bucket in buckets:
            command += ["--origin", f"s3://{bucket}?endpoint={origin_url}&region={REGION}"]
        credentials = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        super().__init__("forebay", [*command, *options], {**credentials, **(env or {})}, directory)
        self.wait_until(lambda: any('"s3"' in line for line in self.lines), "ready")
        ready = next(json.loads(line) for line in self.lines if '"s3"' in line)
        address = ready["s3"]
        self.url = address if address.startswith("http") else f"http://{address}"
        self.port = int(self.url.rsplit(":", 1)[1])
        self.admin_port = int(ready["admin"].rsplit(":", 1)[1])
        self.metrics_url = f"http://{host}:{self.admin_port}/metrics"
        self.unix_url = f"unix:{self.socket}"

    def metrics(self) -> dict[str, float]:
        """Each sample of /metrics by its name and labels."""
        text = urllib.request.urlopen(self.metrics_url, timeout=60).read().decode()
        samples = (
            line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
        )
        return {name: float(value) for name, value in samples}

    def stop(self, how: int = signal.SIGTERM, patience: float = 15) -> int:
        code = super().stop(how, patience)
        self.socket.unlink(missing_ok=True)
        return code
