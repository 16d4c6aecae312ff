"""New shards of a dataset, beside a plain copy of the bytes and WebDataset's ShardWriter.

The rows are samples in tars, warm in a node's cache, in the order of a block shuffle; the node and
its bucket (a directory) are on this machine. *copy* puts bytes that are ready, as many objects at a
time as there are writers: what writing costs if making shards cost nothing. *ShardWriter* takes the
same rows from a loader, writes tars to a local directory, and puts each when it is whole, as one
does with WebDataset. *ds.write* is Forebay's. *Memory* is what the process had at most beyond what
it had when it began; *disk* what its files came to at most, those in its temporary directory and
those that it had open, looked at two hundred times a second. Each line is a process of its own, and
the lines take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import stat
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import cells
from nodes import BUCKET, Node, use_own_environment, write_shards
from report import Report

COLUMNS = [
    ("name", "", 28),
    ("seconds", "seconds", 9),
    ("rows_per_s", "rows/s", 10),
    ("mb_per_s", "MB/s", 9),
    ("of_copy", "of the copy %", 15),
    ("memory_mib", "memory MiB", 12),
    ("disk_mib", "disk MiB", 10),
]
NAMES = {
    "copy": "copy of ready bytes",
    "shardwriter": "ShardWriter, then put",
    "tar": "ds.write, tar",
    "parquet": "ds.write, Parquet",
    "mds": "ds.write, MDS",
    "tfrecord": "ds.write, TFRecord",
}


def memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Files:
    """What this process has in files that it writes, at most, while the block runs: in bytes."""

    def __enter__(self) -> Self:
        self.most, self.lock = 0, threading.Lock()
        self.folder = tempfile.mkdtemp(prefix="fb-files-")
        tempfile.tempdir = os.environ["TMPDIR"] = self.folder
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()
        shutil.rmtree(self.folder)

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            self.look()

    def look(self) -> None:
        found = {}
        fds = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
        for path in [*Path(self.folder).rglob("*"), *fds]:
            try:
                of = path.stat()
                # What is read is there already: libraries, while they are loaded.
                if path in fds and not is_written(path.name):
                    continue
            except OSError:  # Gone meanwhile.
                continue
            # A memfd has a descriptor too, but takes memory and not disk.
            if stat.S_ISREG(of.st_mode) and not str(path.resolve()).startswith("/memfd:"):
                found[of.st_dev, of.st_ino] = of.st_size
        with self.lock:
            self.most = max(self.most, sum(found.values()))


def is_written(fd: str) -> bool:
    """Whether a descriptor of this process is open for writing."""
    lines = Path("/proc/self/fdinfo", fd).read_text().splitlines()
    flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def copy(cell: dict, client) -> int:
    """Puts objects of the size of a shard until as many bytes are written as there are."""
    left = [cell["rows"] * cell["size"]]
    piece, lock = bytes(1 << 20), threading.Lock()

    class Ready:
        def __init__(self, size: int) -> None:
            self.left = size

        def read(self, _: int = -1, /) -> bytes:
            taken = piece[: min(len(piece), self.left)]
            self.left -= len(taken)
            return taken

    def work(number: int) -> None:
        while True:
            with lock:
                size = min(left[0], cell["shard_bytes"])
                left[0] -= size
                number += cell["writers"]
            if not size:
                return
            client.put(f"{BUCKET}/{cell['target']}/{number:05}.bin", Ready(size))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(cell["writers"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cell["rows"]


def shardwriter(cell: dict, client, ds, order, files: Files) -> int:
    import webdataset

    folder = tempfile.mkdtemp(prefix="fb-shards-")

    def put(path: str) -> None:
        client.put(f"{BUCKET}/{cell['target']}/{Path(path).name}", Path(path))
        files.look()
        Path(path).unlink()

    rows = 0
    try:
        pattern = f"{folder}/%05d.tar"
        with webdataset.ShardWriter(
            pattern, maxcount=1 << 60, maxsize=cell["shard_bytes"], post=put, verbose=0
        ) as out:
            for batch in ds.loader(64, shuffle=order, seed=1, uneven="pad"):
                for row in batch:
                    if rows < cell["rows"]:
                        out.write({"__key__": row["__key__"], "bin": bytes(row["bin"])})
                        rows += 1
    finally:
        shutil.rmtree(folder)
    return rows


def run(cell: dict) -> dict:
    use_own_environment()
    import forebay
    import numpy  # noqa: F401

    client = forebay.Client(cell["url"])
    ds = forebay.open(f"{BUCKET}/samples/*.tar", client=client, progress=False)
    order = forebay.Block(4)
    if cell["way"] == "warm":
        rows = sum(len(batch) for batch in ds.loader(64, uneven="pad"))
        return {"rows": rows}
    if cell["way"] == "parquet":
        import pyarrow.parquet  # noqa: F401
    if cell["way"] == "shardwriter":
        import webdataset  # noqa: F401
    with Files() as files:
        before, began = memory_bytes(), time.monotonic()
        if cell["way"] == "copy":
            rows = copy(cell, client)
        elif cell["way"] == "shardwriter":
            rows = shardwriter(cell, client, ds, order, files)
        else:
            done = ds.write(
                f"{BUCKET}/{cell['target']}/",
                cell["way"],
                order=order,
                seed=1,
                shard_size=cell["shard_bytes"],
                writers=cell["writers"],
                progress=False,
            )
            rows = done.rows
        seconds = time.monotonic() - began
        memory = (memory_bytes() - before) / (1 << 20)
    return {
        "rows": rows,
        "seconds": seconds,
        "memory_mib": memory,
        "disk_mib": files.most / (1 << 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--size", type=int, default=43_000, help="bytes of a sample")
    parser.add_argument("--shard-mib", type=int, default=64, help="size of the new shards")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, run)

    use_own_environment()
    report = Report(
        "Writing new shards",
        COLUMNS,
        {
            "rows": f"{args.rows:,} of {args.size:,} bytes",
            "shards": f"{args.shard_mib} MiB",
            "writers": args.writers,
            "rounds": args.rounds,
        },
    )
    found: dict[str, list[dict]] = {way: [] for way in args.only}
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as folder:
        files = Path(folder) / "files"
        write_shards(files, "samples", args.rows, args.size, 64 << 20)
        with Node(Path(folder), "node", files=files) as node:
            cell = {
                "url": node.unix_url,
                "rows": args.rows,
                "size": args.size,
                "shard_bytes": args.shard_mib << 20,
                "writers": args.writers,
            }
            cells.measured(__file__, {**cell, "way": "warm"}, "warming up")
            for number in range(args.rounds):
                for way in args.only:
                    target = f"out-{way}-{number}"
                    one = cells.measured(
                        __file__, {**cell, "way": way, "target": target}, NAMES[way]
                    )
                    if one["rows"] != args.rows:
                        sys.exit(f"{NAMES[way]}: {one['rows']} of {args.rows} rows")
                    found[way].append(one)
                    shutil.rmtree(files / target)
    report.heading("all rows, once")
    beside = statistics.median(one["seconds"] for one in found["copy"]) if "copy" in found else None
    for way, ones in found.items():
        seconds = statistics.median(one["seconds"] for one in ones)
        report.add(
            {
                "name": NAMES[way],
                "seconds": seconds,
                "rows_per_s": args.rows / seconds,
                "mb_per_s": args.rows * args.size / seconds / 1e6,
                "of_copy": beside and beside / seconds * 100,
                "memory_mib": max(one["memory_mib"] for one in ones),
                "disk_mib": max(one["disk_mib"] for one in ones),
            }
        )
    report.save(args.save)


if __name__ == "__main__":
    main()
