"""Rows by number, side by side in one run: Parquet by page index and by row group, decoded blocks,
and objects beside GetBatch.

    python benchmarks/data_rows.py [--seconds 3] [--rows 20000]

All data is on the node's disk before anything is timed. `pages` has a page index, `groups` has
none. `all rows` are from more blocks than the node keeps decoded (with --rows 40000 and more); `two
blocks` are soon kept. CPU is that of node and client together.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import nodes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TAKE = 128
GROUP_ROWS = 1000
ROW_BYTES = 6 << 10
OBJECT_BYTES = 10 << 10


def text_table(rows: int, first: int) -> pa.Table:
    rng = np.random.default_rng(first)
    # Words: they compress as text does, about 2.5 to 1.
    words = np.array(
        ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 9, 5000)]
    )
    texts = [
        " ".join(words[rng.integers(0, len(words), ROW_BYTES // 6)])[:ROW_BYTES]
        for _ in range(rows)
    ]
    return pa.table({"id": pa.array(range(first, first + rows)), "text": texts})


def write(files: Path, rows: int) -> None:
    per_file = 10 * GROUP_ROWS
    for name in ("pages", "groups"):
        (files / name).mkdir()
    for at in range(0, rows, per_file):
        table = text_table(min(per_file, rows - at), at)
        for name, pages in (("pages", True), ("groups", False)):
            pq.write_table(
                table,
                files / name / f"{at:09}.parquet",
                row_group_size=GROUP_ROWS,
                write_page_index=pages,
                data_page_size=64 << 10,
                write_batch_size=8,
                use_dictionary=False,
                compression="zstd",
            )
    (files / "objects").mkdir()
    data = np.random.default_rng(1).bytes(OBJECT_BYTES + 4096)
    for i in range(4000):
        (files / "objects" / f"{i:05}").write_bytes(data[i % 4096 :][:OBJECT_BYTES])


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and this one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + time.process_time()


def rate(seconds: float, one, pid: int) -> tuple[float, float]:
    """Rows per second of calls to `one`, which returns how many there were (the median of five
    stretches), and microseconds of CPU per row.
    """
    one()
    found, total, cpu = [], 0, cpu_seconds(pid)
    for _ in range(5):
        began, rows = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds / 5:
            rows += one()
        found.append(rows / took)
        total += rows
    return float(np.median(found)), (cpu_seconds(pid) - cpu) / total * 1e6


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--seconds", type=float, default=3.0, help="how long each line is measured"
    )
    options.add_argument("--rows", type=int, default=40_000, help="rows of Parquet")
    options = options.parse_args()
    nodes.use_own_environment()
    import forebay

    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as place:
        directory = Path(place)
        files = directory / "files"
        files.mkdir()
        write(files, options.rows)
        with nodes.Node(directory, "node", files=files) as node:
            client = forebay.Client(node.unix_url)
            rng = np.random.default_rng(3)

            def opened(source: str, **spec):
                return json.loads(
                    bytes(
                        client.open_dataset(
                            json.dumps({"sources": [f"{nodes.BUCKET}/{source}"], **spec})
                        )
                    )
                )

            def take(dataset: str, below: int, columns=None):
                def one() -> int:
                    pa.record_batch(client.take(dataset, rng.integers(0, below, TAKE), columns))
                    return TAKE

                return one

            print(
                f"take({TAKE}) of Parquet rows of {ROW_BYTES} bytes, {GROUP_ROWS} in a row"
                " group, on the disk"
            )
            for name in ("pages", "groups"):
                dataset = opened(f"{name}/**.parquet")
                for at in range(0, dataset["rows"], 4000):
                    client.take(dataset["id"], np.arange(at, min(at + 4000, dataset["rows"])))
                for what, below in (("all rows", dataset["rows"]), ("two blocks", 2 * GROUP_ROWS)):
                    rows_per_s, cpu_us = rate(options.seconds, take(dataset["id"], below), node.pid)
                    print(
                        f"  {name:8} {what:10} {rows_per_s:12,.0f} rows/s {cpu_us:8.1f} us"
                        " of CPU per row"
                    )
            print(f"{TAKE} objects of {OBJECT_BYTES} bytes at random, on the disk")
            dataset = opened("objects/**", format="objects")
            keys = [f"objects/{i:05}" for i in range(dataset["rows"])]
            client.take(dataset["id"], np.arange(dataset["rows"]))

            def batch() -> int:
                items = client.batch(
                    [keys[i] for i in rng.integers(0, len(keys), TAKE)], bucket=nodes.BUCKET
                )
                return sum(1 for item in items if len(item) == OBJECT_BYTES)

            def rows() -> int:
                values = client.take(
                    dataset["id"], rng.integers(0, len(keys), TAKE), ["data"]
                ).to_dicts()
                return sum(1 for row in values if len(row["data"]) == OBJECT_BYTES)

            batch(), rows()
            # In turns, so that other load on the machine affects both.
            rates = {"GetBatch": [], "take": []}
            for _ in range(3):
                rates["GetBatch"].append(rate(options.seconds / 3, batch, node.pid))
                rates["take"].append(rate(options.seconds / 3, rows, node.pid))
            medians = {name: np.median(found, axis=0) for name, found in rates.items()}
            for name, (per_s, cpu_us) in medians.items():
                print(f"  {name:19} {per_s:12,.0f} objects/s {cpu_us:5.1f} us of CPU per object")
            print(f"  take / GetBatch = {medians['take'][0] / medians['GetBatch'][0]:.2f}")


if __name__ == "__main__":
    main()
