"""`kill -9` in a loop: a node before an S3 server, under the load of `load.py`, with a cache so
small that it evicts all the time.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from honest import HonestVersitygw
from load import BUCKET, Load, disk_bytes
from servers import Node

CACHE_BYTES = 24 << 20
READY_WITHIN = 20.0


def kill_in_a_loop(directory: Path, kills: int, seed: int) -> Load:
    print(f"kill -9, {kills} times: replay with FOREBAY_TEST_SEED={seed}", flush=True)
    rng = random.Random(seed)
    origin = HonestVersitygw(directory / "versitygw")
    (origin.directory / BUCKET).mkdir()

    def start() -> Node:
        return Node(
            origin.url,
            [BUCKET],
            directory / "node",
            cache_size=str(CACHE_BYTES),
            options=["--memory", "128MiB", "--log", "warn"],
        )

    node = start()
    slowest = 0.0
    try:
        with Load(node, seed) as load:
            for kill in range(1, kills + 1):
                if load.stopping.wait(rng.choice((0.05, 0.5, 1.0, 2.0)) * rng.random() + 0.05):
                    break
                node.stop(signal.SIGKILL)
                used = disk_bytes(directory / "node" / "cache")
                assert used <= CACHE_BYTES, (
                    f"after kill {kill}: {used} bytes on a disk of {CACHE_BYTES}"
                )
                began = time.monotonic()
                node = start()
                took = time.monotonic() - began
                assert took < READY_WITHIN, f"after kill {kill}: ready only after {took:.1f} s"
                slowest = max(slowest, took)
                load.node = node
                if kill % 20 == 0 or kill == kills:
                    print(
                        f"  {kill} kills, {dict(load.done)}, refused {dict(load.refused)},"
                        f" ready within {slowest:.2f} s",
                        flush=True,
                    )
            # Some light load on what was left.
            load.stopping.wait(0.5)
        load.check()
        load.check_origin(origin.directory)
        assert disk_bytes(directory / "node" / "cache") <= CACHE_BYTES
        assert node.stop(patience=60) == 0
    finally:
        node.stop(signal.SIGKILL)
        origin.stop()
        print(f"  of the origin's answers, {len(origin.held_back())} were held back", flush=True)
    return load
