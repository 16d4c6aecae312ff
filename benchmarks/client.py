"""Batches of 128 objects into one Python process from a warm node: Forebay's package, and others'
clients on the same node.

Columns: entries and MiB per second; microseconds of CPU per entry of this client (its workers
included) and of the node; their greatest resident sizes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from nodes import Node, read_all, use_own_environment, write_objects
from readers import run_cell
from report import Report, goal

COLUMNS = [("name", "", 48), ("entries_per_s", "entries/s", 11), ("mib_per_s", "MiB/s", 9)]
COLUMNS += [
    ("client_cpu_us", "client µs", 11),
    ("server_cpu_us", "node µs", 10),
    ("client_peak_mib", "client MiB", 12),
    ("server_peak_mib", "node MiB", 10),
]
GOAL_BYTES = 10 << 10
GOALS = {"TCP": 50_000.0, "Unix": 100_000.0}
RIVALS = [
    ("boto3, one GET at a time", "boto3_gets"),
    ("s3torchconnector, map-style", "s3torch_map"),
    ("obstore, 32 GETs in flight", "obstore_gather"),
]
RIVALS += [("s3fs, cat of a list", "s3fs_cat"), ("aistore client, batch", "aistore_batch")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10 << 10, 100 << 10, 1 << 20], metavar="BYTES"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--total-mib",
        type=int,
        default=256,
        help="bytes of all objects of a size, at most (and at most 8192 objects)",
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="the window of each row")
    parser.add_argument(
        "--prefetch",
        type=int,
        default=2,
        help="batches on their way beyond the one that is consumed",
    )
    parser.add_argument("--workers", type=int, default=2, help="of DataLoader")
    parser.add_argument(
        "--readers", nargs="+", help="only rows with one of these words in their names"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    use_own_environment()
    report = Report(
        "From Python, warm",
        COLUMNS,
        {
            "batch": args.batch,
            "window": f"{args.seconds} s",
            "prefetch": args.prefetch,
            "seed": args.seed,
        },
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        files = Path(directory) / "files"
        names = {}
        for size in args.sizes:
            count = max(2 * args.batch, min(8192, (args.total_mib << 20) // size))
            names[size] = write_objects(files, f"s{size}", count // args.batch * args.batch, size)
        with Node(Path(directory), "node", files=files) as node:
            for size in args.sizes:
                read_all(node.unix_url, names[size])
                report.heading(f"{args.batch} × {size / 1024:g} KiB")
                one_size(args, node, size, names[size], report)
    report.save(args.save)


def one_size(args, node: Node, size: int, names: list[str], report: Report) -> None:
    common = {
        "batch": args.batch,
        "size": size,
        "names": names,
        "seconds": args.seconds,
        "ramp_s": args.seconds / 4,
        "seed": args.seed,
        "server_pid": node.pid,
    }
    rows = []
    for transport, url in (("TCP", node.url), ("Unix", node.unix_url)):
        cell = {"reader": "forebay_batches", "url": url}
        wanted = goal("entries_per_s", GOALS[transport]) if size == GOAL_BYTES else None
        rows.append(
            (f"forebay, NumPy views, {transport}", cell | {"prefetch": args.prefetch}, wanted)
        )
        rows.append((f"forebay, one batch at a time, {transport}", cell | {"prefetch": 0}, None))
        for which, reader in (
            ("PyTorch's DataLoader", "forebay_loader"),
            ("DataLoader with a ring", "forebay_ring"),
        ):
            rows.append(
                (
                    f"forebay, {which}, {args.workers} workers, {transport}",
                    {"reader": reader, "url": url, "workers": args.workers},
                    None,
                )
            )
    rows += [(name, {"reader": reader, "url": node.url}, None) for name, reader in RIVALS]
    for name, cell, wanted in rows:
        if args.readers and not any(word in name for word in args.readers):
            continue
        row = {"name": f"{name}", "bytes": size, **run_cell(common | cell)}
        report.add(row | ({"goals": [wanted]} if wanted else {}))


if __name__ == "__main__":
    main()
