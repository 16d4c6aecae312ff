"""Two builds of the program in turn: `python3 benchmarks/builds.py OLD NEW`, each a path to a
`forebay` program.

A machine's speed drifts by more between two runs of a benchmark than most changes make. Here a node
of each build runs over the same objects the whole time, everything cached, and `forebay bench` of
the new build loads one after the other, a second each, in a random order. The figures are medians
of the rounds; the range shows what is noise. It needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

SIZE, COUNT, SHARDS = 10 << 10, 10_000, 4
BATCH, GET = ["batch", "--prefix", "o/"], ["get", "--prefix", "o/"]
MEMBERS = ["batch", "--members", "--prefix", "s/"]
# What is asked, and whether over the Unix socket.
LOADS = {
    "batch, objects, TCP": (BATCH, False),
    "batch, objects, Unix socket": (BATCH, True),
    "batch, members, TCP": (MEMBERS, False),
    "batch, members, Unix socket": (MEMBERS, True),
    "GET, TCP": (GET, False),
}


def write_data(bucket: Path) -> None:
    """Objects of 10 KiB, and as many members of tar shards."""
    (bucket / "o").mkdir(parents=True)
    (bucket / "s").mkdir()
    for number in range(COUNT):
        (bucket / f"o/{number:05d}.bin").write_bytes(os.urandom(SIZE))
    for shard in range(SHARDS):
        with tarfile.open(bucket / f"s/{shard}.tar", "w") as tar:
            for number in range(COUNT // SHARDS):
                info = tarfile.TarInfo(f"{number:05d}.bin")
                info.size = SIZE
                tar.addfile(info, BytesIO(os.urandom(SIZE)))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Build:
    """A build with its node."""

    def __init__(self, program: Path, home: Path, bucket: Path):
        self.address = f"127.0.0.1:{free_port()}"
        home.mkdir()
        command = [program, "serve", "--origin", f"data={bucket}", "--cache", f"{home}:2GiB"]
        command += ["--listen", self.address, "--admin", "off"]
        with (home / "log").open("wb") as log:
            self.node = subprocess.Popen(
                [*command, "--freshness", "immutable"], stdout=log, stderr=log
            )
        until = time.monotonic() + 20
        while not (sockets := list(home.glob("*.sock"))):
            if self.node.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{program} did not start: {(home / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        self.socket = sockets[0]

    def load(self, client: Path, what: list[str], unix: bool) -> tuple[float, float]:
        """A second of load: objects per second, and microseconds of the node's CPU for each."""
        url = f"unix:{self.socket}" if unix else f"http://{self.address}"
        to = ["--url", url, "--bucket", "data", "--pid", str(self.node.pid)]
        ran = subprocess.run(
            [client, "bench", *what, *to, "--seconds", "1", "--json"],
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            raise SystemExit(f"forebay bench {what[0]}: {ran.stderr[-2000:]}")
        figures = json.loads(ran.stdout)["rows"][0]["figures"]
        names = ("objects_per_s", "server_cpu_us_per_object")
        return tuple(figures[name]["median"] for name in names)

    def stop(self) -> None:
        self.node.terminate()
        self.node.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-builds-") as folder:
        home, builds = Path(folder), {}
        write_data(home / "data")
        try:
            for name, program in (("old", args.old), ("new", args.new)):
                builds[name] = Build(program, home / name, home / "data")
            print(f"{'':30} {'objects/s: old':>16} {'new':>9} {'CPU: old':>20} {'new':>20}")
            for title, (what, unix) in LOADS.items():
                found = {name: [] for name in builds}
                for warm_up in (True, *[False] * args.rounds):
                    for name in random.sample(sorted(builds), len(builds)):
                        figures = builds[name].load(args.new, what, unix)
                        if not warm_up:
                            found[name].append(figures)
                speed, cpu = (
                    {name: [one[i] for one in of] for name, of in found.items()} for i in (0, 1)
                )
                shown = [
                    f"{statistics.median(of):.2f} ({min(of):.2f}-{max(of):.2f}) µs"
                    for of in cpu.values()
                ]
                middle = [f"{statistics.median(of):,.0f}" for of in speed.values()]
                print(
                    f"{title:30} {middle[0]:>16} {middle[1]:>9} {shown[0]:>20} {shown[1]:>20}",
                    flush=True,
                )
        finally:
            for build in builds.values():
                build.stop()


if __name__ == "__main__":
    main()
