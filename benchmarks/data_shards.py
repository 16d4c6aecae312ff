"""The first epoch over tar shards that nobody has indexed, beside a reader that streams them
directly through a shuffle buffer.

The bucket is far away: `forebay distance` delays a node over a directory. *direct* reads as
WebDataset does: as many threads as shards are read side by side, each with one GET of a whole
shard, and a buffer of 512 samples from which batches are drawn. *pulled* and *pushed* are
`forebay.open_shards` with `Block` over as many shards, through a node with an empty cache, by
requests and by a push stream; opening the shards counts, importing NumPy and the modules for
datasets does not. All are given the shards' names. The step computes for a fixed time. The ways
take turns in a random order, because a machine's speed drifts; figures are medians of the rounds,
and *over direct* is the median of what each round's epoch took longer than the direct one of the
same round.
"""

from __future__ import annotations

import argparse
import http.client
import queue
import random
import statistics
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import cells
from nodes import BUCKET, Distance, Node, use_own_environment, write_shards
from report import Report, goal

COLUMNS = [
    ("name", "", 24),
    ("epoch_s", "epoch s", 10),
    ("fastest_s", "fastest s", 11),
    ("slowest_s", "slowest s", 11),
    ("samples_per_s", "samples/s", 11),
    ("over_direct", "over direct %", 15),
    ("first_s", "first s", 9),
    ("waiting", "waiting %", 11),
]
BUFFER = 512
NAMES = {"direct": "streamed directly", "pull": "open_shards, pulled", "push": "…, pushed"}


def direct(cell: dict) -> Iterator[int]:
    """Shards side by side, each in a thread of its own, and a shuffle buffer."""
    address, batch = urlsplit(cell["url"]).netloc, cell["batch"]
    shards: queue.SimpleQueue[str] = queue.SimpleQueue()
    for shard in cell["shards"]:
        shards.put(shard)
    ready: queue.Queue = queue.Queue(16 * batch)

    def read() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            while True:
                connection.request("GET", f"/{BUCKET}/{shards.get_nowait()}")
                answer = connection.getresponse()
                if answer.status != 200:
                    raise RuntimeError(f"a shard was answered with {answer.status}")
                with tarfile.open(fileobj=answer, mode="r|", bufsize=1 << 16) as tar:
                    for member in tar:
                        ready.put(tar.extractfile(member).read())
                answer.read()
        except queue.Empty:
            ready.put(None)
        except Exception as error:
            ready.put(error)

    for _ in range(cell["side_by_side"]):
        threading.Thread(target=read, daemon=True).start()
    choose, running, buffer = random.Random(1), cell["side_by_side"], []
    made = []
    while running or buffer:
        while running and len(buffer) < BUFFER:
            item = ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                buffer.append(item)
        if buffer:
            at = choose.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            made.append(buffer.pop())
        if len(made) == batch or (made and not buffer):
            yield len(made)
            made = []


def block(cell: dict) -> Iterator[int]:
    import forebay

    shards = forebay.open_shards(
        [f"{BUCKET}/{shard}" for shard in cell["shards"]],
        url=cell["url"],
        part_bytes=cell["part_bytes"],
        progress=False,
    )
    loader = shards.loader(
        cell["batch"],
        shuffle=forebay.Block(cell["side_by_side"]),
        seed=1,
        epochs=1,
        uneven="pad",
        stream=cell["way"] == "push",
        threads=1,
        collate=lambda rows: [row["bin"] for row in rows],
    )
    for _ in loader:
        yield loader.last.real


def run(cell: dict) -> dict:
    use_own_environment()
    # As at the start of any training script: it costs as much as the first requests.
    import numpy  # noqa: F401
    from forebay import Block, open_shards  # noqa: F401

    batches = direct(cell) if cell["way"] == "direct" else block(cell)
    began, waited, samples, first = time.monotonic(), 0.0, 0, None
    while True:
        asked = time.monotonic()
        count = next(batches, None)
        came = time.monotonic()
        waited += came - asked
        if count is None:
            break
        first = came - began if first is None else first
        samples += count
        while time.monotonic() < came + cell["step_ms"] / 1000:
            pass
    seconds = time.monotonic() - began
    return {
        "samples": samples,
        "epoch_s": seconds,
        "first_s": first,
        "waiting": waited / seconds * 100,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2400)
    parser.add_argument("--size", type=int, default=43_000, help="bytes of a sample")
    parser.add_argument("--shards", type=int, default=8, help="all of them side by side")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", default="100MiB", help="of the line to the bucket, per second")
    parser.add_argument("--rtt", type=float, default=20.0, help="milliseconds")
    parser.add_argument(
        "--first-byte", type=float, default=20.0, help="milliseconds before each answer"
    )
    parser.add_argument("--step-ms", type=float, default=8.0, help="what a step computes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, run)

    use_own_environment()
    report = Report(
        "First epochs over new shards",
        COLUMNS,
        {
            "samples": args.samples,
            "batch": args.batch,
            "line": f"{args.rate}/s, {args.rtt + args.first_byte:g} ms to the first byte",
            "step": f"{args.step_ms:g} ms",
            "rounds": args.rounds,
        },
    )
    found: dict[str, list[dict]] = {way: [] for way in NAMES}
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as folder:
        directory = Path(folder)
        files = directory / "files"
        bytes_each = -(-args.samples // args.shards) * (args.size + 1024)
        members = write_shards(files, "new", args.samples, args.size, bytes_each)
        shards = sorted({shard for shard, _ in members})
        with (
            Node(directory, "bucket", files=files, unix=False) as bucket,
            Distance(
                directory,
                "distance",
                bucket.address,
                rtt_ms=args.rtt,
                first_byte_ms=args.first_byte,
                rate=args.rate,
            ) as far,
        ):
            cell = {
                "shards": shards,
                "side_by_side": len(shards),
                "batch": args.batch,
                "step_ms": args.step_ms,
                # Eight parts hold as many samples as the buffer.
                "part_bytes": BUFFER * (args.size + 1024) // len(shards),
            }
            # The bucket's own cache is filled by the first, which does not count.
            cells.measured(__file__, {**cell, "way": "direct", "url": far.url}, "warming up")
            for number in range(args.rounds):
                for way in random.sample(sorted(NAMES), len(NAMES)):
                    if way == "direct":
                        one = cells.measured(
                            __file__, {**cell, "way": way, "url": far.url}, NAMES[way]
                        )
                    else:
                        name = f"{way}-{number}"
                        with Node(directory, name, endpoint=far.url) as node:
                            one = cells.measured(
                                __file__, {**cell, "way": way, "url": node.unix_url}, NAMES[way]
                            )
                    if one["samples"] != args.samples:
                        sys.exit(f"{NAMES[way]}: {one['samples']} of {args.samples} samples")
                    found[way].append(one)
    report.heading("epochs")
    for way, name in NAMES.items():
        times = [one["epoch_s"] for one in found[way]]
        beside = [one["epoch_s"] for one in found["direct"]]
        over = [100 * (mine / its - 1) for mine, its in zip(times, beside, strict=True)]
        row = {
            "name": name,
            "epoch_s": statistics.median(times),
            "fastest_s": min(times),
            "slowest_s": max(times),
            "samples_per_s": args.samples / statistics.median(times),
            "over_direct": statistics.median(over) if way != "direct" else None,
            "first_s": statistics.median(one["first_s"] for one in found[way]),
            "waiting": statistics.median(one["waiting"] for one in found[way]),
        }
        if way != "direct":
            row["goals"] = [goal("samples_per_s", args.samples / statistics.median(beside))]
        report.add(row)
    report.save(args.save)


if __name__ == "__main__":
    main()
