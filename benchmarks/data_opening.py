"""Opening a large dataset for the first time and again, after a paper's table (Table 2 of REIMU:
about 5 minutes by scanning, 7 s by footers).

10,000 Parquet files of 40 row groups of 1,000 rows are at an origin 30 ms away. Their footers are
real (from one file with text of 6 KB a row, written for this); what is before them is a hole, which
nobody reads. *First* begins with a node that knows nothing; *again* is another process on the same
node; *restarted* is the first after the node restarted over its disk. For comparison, pyarrow
counts the rows of some of the files by their footers, and `datasets` opens some of them, both over
S3 at the same distance.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import cells
import usage
from nodes import BUCKET, CREDENTIALS, REGION, Distance, Node, use_own_environment
from report import Report, goal

COLUMNS = [
    ("name", "", 40),
    ("files", "files", 9),
    ("rows", "rows", 13),
    ("seconds", "seconds", 9),
    ("files_per_s", "files/s", 10),
    ("client_mib", "client MiB", 12),
]
COLUMNS += [
    ("client_cpu_s", "client CPU s", 14),
    ("server_mib", "node MiB", 10),
    ("server_cpu_s", "node CPU s", 12),
    ("origin_requests", "requests", 10),
    ("origin_mib", "moved MiB", 11),
]
FIRST_S, AGAIN_S = 7.0, 0.5


def template(directory: Path, groups: int, rows: int, row_bytes: int) -> tuple[int, bytes]:
    """How long a file is before its footer, and the footer, of a Parquet file that was written for
    it.
    """
    import pyarrow
    import pyarrow.parquet
    from text import dictionary

    text, path = dictionary().decode("latin-1"), directory / "template.parquet"
    schema = pyarrow.schema(
        [("id", pyarrow.int64()), ("url", pyarrow.string()), ("text", pyarrow.string())]
    )
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for group in range(groups):
            first = group * rows
            starts = [(first + i) * 97 % (len(text) - row_bytes) for i in range(rows)]
            texts = [text[at : at + row_bytes] for at in starts]
            columns = [
                range(first, first + rows),
                [f"https://example.org/{first + i}" for i in range(rows)],
                texts,
            ]
            writer.write_table(
                pyarrow.table(
                    [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema
                )
            )
    data = path.read_bytes()
    path.unlink()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    return len(data) - footer, data[-footer:]


def write_files(files: Path, count: int, before: int, footer: bytes) -> None:
    folder = files / "corpus"
    folder.mkdir(parents=True)
    for i in range(count):
        with (folder / f"part-{i:05}.parquet").open("wb") as file:
            file.write(b"PAR1")
            file.seek(before)
            file.write(footer)


def measured(work: str, cell: dict) -> dict:
    """Runs one way to open in its own process, for its imports and its memory."""
    return cells.measured(__file__, cell | {"work": work}, work)


def forebay_open(cell: dict) -> int:
    import forebay

    dataset = forebay.open(f"{BUCKET}/corpus/*.parquet", url=cell["url"], progress=False)
    # The last row is found as well.
    dataset.locate(len(dataset) - 1)
    return len(dataset)


def pyarrow_count(cell: dict) -> int:
    import pyarrow
    import pyarrow.dataset
    import pyarrow.fs

    pyarrow.set_io_thread_count(32)
    host = cell["endpoint"].removeprefix("http://")
    keys = {
        "access_key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    s3 = pyarrow.fs.S3FileSystem(endpoint_override=host, scheme="http", region=REGION, **keys)
    paths = [f"{BUCKET}/corpus/part-{i:05}.parquet" for i in range(cell["files"])]
    return pyarrow.dataset.dataset(paths, filesystem=s3, format="parquet").count_rows()


def work(cell: dict) -> dict:
    ways = {"forebay": forebay_open, "pyarrow": pyarrow_count}
    use_own_environment()
    # Imports are not measured.
    __import__(cell["work"])
    cpu, began = usage.cpu_seconds(os.getpid()), time.monotonic()
    rows = ways[cell["work"]](cell)
    seconds = time.monotonic() - began
    return {
        "rows": rows,
        "seconds": seconds,
        "client_cpu_s": usage.cpu_seconds(os.getpid()) - cpu,
        "client_mib": usage.peak_bytes(os.getpid()) / (1 << 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=40, help="row groups of a file")
    parser.add_argument("--group-rows", type=int, default=1000)
    parser.add_argument("--row-bytes", type=int, default=6000)
    parser.add_argument("--rtt", type=float, default=30.0, help="to the origin, milliseconds")
    parser.add_argument(
        "--rival-files",
        type=int,
        default=500,
        help="of which pyarrow counts the rows; 0: not at all",
    )
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, work)

    use_own_environment()
    total = args.files * args.groups * args.group_rows
    report = Report(
        "Opening",
        COLUMNS,
        {
            "files": f"{args.files:,} of {args.groups} × {args.group_rows:,} rows",
            "round trip": f"{args.rtt} ms",
        },
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        files = directory / "files"
        print("  writing one file for its footer, and the others after it", flush=True)
        write_files(
            files, args.files, *template(directory, args.groups, args.group_rows, args.row_bytes)
        )
        # An origin that keeps copies of what it serves would be measured with its disk.
        plain = ("--set", f"buckets.{BUCKET}.cache=false")
        with (
            Node(directory, "origin", files=files, settings=plain) as origin,
            Distance(directory, "distance", origin.address, rtt_ms=args.rtt) as far,
        ):

            def opened(name: str, node: Node, goals: list[dict]) -> None:
                usage.forget_peak(node.pid)
                cpu, before = usage.cpu_seconds(node.pid), far.moved()
                row = {
                    "name": name,
                    "files": args.files,
                    **measured("forebay", {"url": node.unix_url}),
                }
                after = far.moved()
                row |= {
                    "origin_requests": after["requests"] - before["requests"],
                    "origin_mib": (after["bytes_to_client"] - before["bytes_to_client"])
                    / (1 << 20),
                }
                if row["rows"] != total:
                    sys.exit(f"{name}: {row['rows']:,} rows where {total:,} were written")
                row |= {
                    "files_per_s": args.files / row["seconds"],
                    "server_cpu_s": usage.cpu_seconds(node.pid) - cpu,
                    "server_mib": usage.peak_bytes(node.pid) / (1 << 20),
                }
                report.add(row | {"goals": goals})

            report.heading(f"{total:,} rows")
            with Node(directory, "node", endpoint=far.url) as node:
                opened("forebay, first", node, [goal("seconds", at_most=FIRST_S)])
                opened("forebay, again", node, [goal("seconds", at_most=AGAIN_S)])
            with Node(directory, "node", endpoint=far.url) as node:
                opened("forebay, node restarted", node, [goal("seconds", at_most=AGAIN_S)])
            if args.rival_files:
                count = min(args.rival_files, args.files)
                row = {
                    "name": "pyarrow.dataset, 32 threads, some files",
                    "files": count,
                    **measured("pyarrow", {"endpoint": far.url, "files": count}),
                }
                report.add(row | {"files_per_s": count / row["seconds"]})
    print("\n  the paper, 386 M rows: about 5 minutes by scanning, about 7 s by footers")
    report.save(args.save)


if __name__ == "__main__":
    main()
