"""Mixed load for minutes: throughput, memory and descriptors stay flat, and every answer is right.

FOREBAY_TEST_LOAD_SECONDS says for how long (600). The first third is the warm-up; then the last
third is compared with the second.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import mean

from honest import HonestVersitygw
from load import BUCKET, Load, seed
from servers import Node

#: Memory and descriptors may grow by this share after the warm-up.
GROWTH = 0.10
#: Throughput is measured on a machine that others use as well.
SLOWDOWN = 0.25
SAMPLES = 60


def rss_bytes(pid: int) -> int:
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) << 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_mixed_load_leaves_no_trace(tmp_path):
    seconds = float(os.environ.get("FOREBAY_TEST_LOAD_SECONDS", "600"))
    number = seed()
    print(f"mixed load for {seconds:.0f} s: replay with FOREBAY_TEST_SEED={number}", flush=True)
    origin = HonestVersitygw(tmp_path / "versitygw")
    (origin.directory / BUCKET).mkdir()
    node = Node(
        origin.url,
        [BUCKET],
        tmp_path / "node",
        cache_size="32MiB",
        options=["--memory", "128MiB", "--log", "warn"],
    )
    rss, open_files, work = [], [], []
    try:
        with Load(node, number) as load:
            before = 0
            for sample in range(SAMPLES):
                if load.stopping.wait(seconds / SAMPLES):
                    break
                done = sum(load.done[what] for what in ("reads", "batches", "writes"))
                work.append(done - before)
                rss.append(rss_bytes(node.process.pid))
                open_files.append(descriptors(node.process.pid))
                before = done
                if sample % 6 == 5:
                    print(
                        f"  {dict(load.done)}, {rss[-1] >> 20} MiB, {open_files[-1]} descriptors",
                        flush=True,
                    )
        load.check()
        load.check_origin(origin.directory)
        third = SAMPLES // 3
        for what, values, worst in (
            ("memory", rss, 1 + GROWTH),
            ("descriptors", open_files, 1 + GROWTH),
        ):
            middle, last = mean(values[third : 2 * third]), mean(values[2 * third :])
            assert last <= middle * worst, f"{what} grew from {middle:.0f} to {last:.0f}: {values}"
        middle, last = sum(work[third : 2 * third]), sum(work[2 * third :])
        assert last >= middle * (1 - SLOWDOWN), (
            f"throughput fell from {middle} to {last} operations: {work}"
        )
        # Everything that was taken for the load is given back.
        deadline = time.monotonic() + 60
        while (
            node.metrics().get("forebay_memory_used_bytes", 0) > 0 and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        assert node.metrics().get("forebay_memory_used_bytes", 0) == 0
        assert node.stop(patience=60) == 0
    finally:
        node.stop(signal.SIGKILL)
        origin.stop()
