"""Rows of Parquet in batches, in different orders, from an origin at a distance, after a paper's
table (Table 2 of REIMU).

Rows of text of 6 KB, 1,000 in a row group, lie 30 ms away. Each line is a process of its own that
reads batches of 32 rows for a window of time, counted from its first batch; how long that took to
come is told as well (*first s*: opening, listing, indexing). Forebay's lines are push streams from
a node whose cache is empty (*cold*: one epoch) or holds all (*warm*); they are measured in turn,
with new nodes in each round, and the median of each figure is told; of ratios, the median of those
of each round. A cold epoch of the default size is about a second long: `--files 24` makes it three
times as long, and more than the node keeps decoded. *Half* is a second epoch where the cache is
half as large as the files. *Row-wise* is what a random row costs without Forebay: its row group is
read for it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cells
import usage
from nodes import BUCKET, CREDENTIALS, REGION, Distance, Node, use_own_environment
from report import Report, goal
from text import dictionary

COLUMNS = [
    ("name", "", 44),
    ("rows_per_s", "rows/s", 11),
    ("mib_per_s", "MiB/s", 9),
    ("first_s", "first s", 9),
    ("of_none", "% of none", 11),
    ("of_full", "% of full", 11),
    ("times_row_wise", "× row-wise", 12),
]
COLUMNS += [
    ("client_cpu_us", "client µs/row", 15),
    ("server_cpu_us", "node µs/row", 13),
    ("client_mib", "client MiB", 12),
    ("origin_mib", "moved MiB", 11),
]
OF_NONE, TIMES_ROW_WISE = 95.0, 40.0
# Of random rows, when the cache holds everything, and when it holds half.
FULL_ROWS, HALF_ROWS = 100_000.0, 10_000.0
COLUMN = "text"
# An epoch that takes longer, in seconds, is broken off.
EPOCH_MAX = 120.0


def write(files: Path, count: int, groups: int, rows: int, row_bytes: int) -> None:
    import pyarrow
    import pyarrow.parquet

    text, folder, order = dictionary().decode("latin-1"), files / "rows", random.Random(1)
    folder.mkdir(parents=True)
    schema = pyarrow.schema([("id", pyarrow.int64()), (COLUMN, pyarrow.string())])
    ids = itertools.count()
    for i in range(count):
        with pyarrow.parquet.ParquetWriter(
            folder / f"part-{i:03}.parquet", schema, write_page_index=True
        ) as writer:
            for _ in range(groups):
                starts = [order.randrange(len(text) - row_bytes) for _ in range(rows)]
                columns = [
                    [next(ids) for _ in range(rows)],
                    [text[at : at + row_bytes] for at in starts],
                ]
                writer.write_table(
                    pyarrow.table(
                        [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)],
                        schema,
                    )
                )


# Ways to read: each yields how many rows came, and their bytes.


def lengths(column) -> tuple[int, int]:
    """The number of texts in an Arrow array, and their total length."""
    import pyarrow.compute

    return len(column), pyarrow.compute.sum(pyarrow.compute.binary_length(column)).as_py() or 0


def forebay_stream(cell: dict) -> Iterator[tuple[int, int]]:
    import math

    import forebay
    import pyarrow

    dataset = forebay.open(
        f"{BUCKET}/rows/*.parquet", url=cell["url"], columns=[COLUMN], progress=False
    )
    loader = dataset.loader(
        batch_size=cell["batch"],
        shuffle=cell["shuffle"],
        seed=cell["seed"],
        stream=cell["stream"],
        epochs=math.inf,
    )
    for rows in loader:
        yield lengths(pyarrow.record_batch(rows.arrow()).column(COLUMN))


def s3_files(cell: dict):
    import pyarrow.fs

    keys = {
        "access_key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    s3 = pyarrow.fs.S3FileSystem(
        endpoint_override=cell["endpoint"].removeprefix("http://"),
        scheme="http",
        region=REGION,
        **keys,
    )
    return s3, [f"{BUCKET}/rows/part-{i:03}.parquet" for i in range(cell["files"])]


def pyarrow_scan(cell: dict) -> Iterator[tuple[int, int]]:
    import pyarrow.dataset

    s3, paths = s3_files(cell)
    dataset = pyarrow.dataset.dataset(paths, filesystem=s3, format="parquet")
    while True:
        yield from (
            lengths(b.column(COLUMN))
            for b in dataset.to_batches(columns=[COLUMN], batch_size=cell["batch"])
            if len(b)
        )


def pyarrow_row_wise(cell: dict) -> Iterator[tuple[int, int]]:
    """Random rows as `ParquetFile` returns them: reads the row group of each."""
    import pyarrow
    import pyarrow.parquet

    s3, paths = s3_files(cell)
    files, order = (
        [pyarrow.parquet.ParquetFile(s3.open_input_file(p)) for p in paths],
        random.Random(cell["seed"]),
    )
    while True:
        of, group = order.choice(files), order.randrange(cell["groups"])
        yield lengths(
            of.read_row_group(group, columns=[COLUMN])
            .column(COLUMN)
            .slice(order.randrange(cell["group_rows"]), 1)
            .combine_chunks()
        )


def hugging_face(cell: dict, streaming: bool):
    import datasets

    datasets.disable_progress_bars()
    options = {
        "key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        "client_kwargs": {"endpoint_url": cell["endpoint"]},
    }
    names = [f"s3://{BUCKET}/rows/part-{i:03}.parquet" for i in range(cell["files"])]
    found = datasets.load_dataset(
        "parquet",
        data_files=names,
        split="train",
        streaming=streaming,
        storage_options=options,
        cache_dir=cell["scratch"],
    )
    return found.select_columns([COLUMN])


def texts(batch: list[str]) -> tuple[int, int]:
    return len(batch), sum(map(len, batch))


def datasets_streaming(cell: dict) -> Iterator[tuple[int, int]]:
    shuffled = hugging_face(cell, True).shuffle(seed=cell["seed"], buffer_size=cell["buffer"])
    while True:
        yield from (texts(batch[COLUMN]) for batch in shuffled.iter(batch_size=cell["batch"]))


def datasets_map(cell: dict) -> Iterator[tuple[int, int]]:
    found, order = hugging_face(cell, False), random.Random(cell["seed"])
    while True:
        yield texts(found[[order.randrange(len(found)) for _ in range(cell["batch"])]][COLUMN])


def litdata_streaming(cell: dict) -> Iterator[tuple[int, int]]:
    """From a copy in its own format, which was written beforehand."""
    import litdata
    import litdata.streaming.downloader

    # It builds its obstore client from these options only, and has none for an endpoint with plain
    # HTTP.
    litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    data = litdata.StreamingDataset(
        f"s3://{BUCKET}/litdata",
        shuffle=True,
        seed=cell["seed"],
        cache_dir=cell["scratch"],
        max_cache_size="10GB",
        storage_options={"endpoint_url": cell["endpoint"]},
    )
    while True:
        batch = []
        for row in data:
            batch.append(row)
            if len(batch) == cell["batch"]:
                yield texts(batch)
                batch = []


WAYS = {
    f.__name__: f
    for f in (
        forebay_stream,
        pyarrow_scan,
        pyarrow_row_wise,
        datasets_streaming,
        datasets_map,
        litdata_streaming,
    )
}


def run(cell: dict) -> dict:
    """One line of the table, in this process: a window of time that begins with the first batch."""
    use_own_environment()
    me, began = os.getpid(), time.monotonic()
    read = WAYS[cell["way"]](cell)
    next(read)
    first = time.monotonic()
    cpu, node = usage.cpu_seconds(me), usage.cpu_seconds(cell["node_pid"])
    rows = size = 0
    for count, length in read:
        rows, size = rows + count, size + length
        if time.monotonic() - first > cell["seconds"] or rows >= cell["rows_max"] - cell["batch"]:
            break
    seconds = time.monotonic() - first
    return {
        "rows_per_s": rows / seconds,
        "mib_per_s": size / seconds / (1 << 20),
        "first_s": first - began,
        "client_cpu_us": (usage.cpu_seconds(me) - cpu) / rows * 1e6,
        "server_cpu_us": (usage.cpu_seconds(cell["node_pid"]) - node) / rows * 1e6,
        "client_mib": usage.peak_bytes(me) / (1 << 20),
    }


def write_litdata(files: Path, row_bytes: int) -> None:
    """The same rows in litData's own format."""
    script = f"""
import glob, pyarrow.parquet, litdata
def rows(path):
    for text in pyarrow.parquet.read_table(path)["{COLUMN}"].to_pylist():
        yield text
if __name__ == "__main__":
    litdata.optimize(
        fn=rows,
        inputs=sorted(glob.glob({str(files / "rows" / "*.parquet")!r})),
        output_dir={str(files / "litdata")!r},
        chunk_bytes={1000 * row_bytes},
        num_workers=1,
    )
"""
    (files.parent / "write_litdata.py").write_text(script)
    done = subprocess.run(
        [sys.executable, files.parent / "write_litdata.py"], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"litdata could not write its copy:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--groups", type=int, default=10, help="row groups of a file")
    parser.add_argument("--group-rows", type=int, default=1000)
    parser.add_argument("--row-bytes", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--blocks",
        type=int,
        default=16,
        help="row groups in the buffer of `block`; `window` has as many rows",
    )
    parser.add_argument("--rtt", type=float, default=30.0, help="to the origin, milliseconds")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="the window of each line, but for whole epochs"
    )
    parser.add_argument(
        "--rivals",
        nargs="*",
        default=[
            "pyarrow_row_wise",
            "pyarrow_scan",
            "datasets_streaming",
            "datasets_map",
            "litdata_streaming",
        ],
        choices=[w for w in WAYS if w != "forebay_stream"],
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the push streams, in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, run)
    if args.rounds < 1:
        parser.error("--rounds is at least 1")

    use_own_environment()
    rows = args.files * args.groups * args.group_rows
    report = Report(
        "Reading rows of Parquet",
        COLUMNS,
        {
            "rows": f"{rows:,} of {args.row_bytes} bytes",
            "row group": args.group_rows,
            "batch": args.batch,
            "round trip": f"{args.rtt} ms",
        },
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        files = directory / "files"
        print("  writing", flush=True)
        write(files, args.files, args.groups, args.group_rows, args.row_bytes)
        if "litdata_streaming" in args.rivals:
            write_litdata(files, args.row_bytes)
        common = {
            "batch": args.batch,
            "seconds": args.seconds,
            "seed": args.seed,
            "files": args.files,
            "groups": args.groups,
            "group_rows": args.group_rows,
        }
        common |= {"buffer": args.blocks * args.group_rows}
        lines: dict[str, dict] = {}
        block = (goal("of_none", OF_NONE), goal("times_row_wise", TIMES_ROW_WISE))
        goals = {
            "forebay, block, cold": block,
            "forebay, block, warm": block,
            "forebay, full, warm": (goal("rows_per_s", FULL_ROWS),),
            "forebay, full, half": (goal("rows_per_s", HALF_ROWS),),
        }
        size = sum(file.stat().st_size for file in (files / "rows").iterdir())
        with (
            Node(directory, "origin", files=files) as origin,
            Distance(directory, "distance", origin.address, rtt_ms=args.rtt) as far,
        ):

            def measure(
                name: str, way: str, node_pid: int, rows_max: int = 1 << 62, **more
            ) -> dict | None:
                cell = common | {
                    "way": way,
                    "endpoint": far.url,
                    "node_pid": node_pid,
                    "rows_max": rows_max,
                    **more,
                }
                cell["scratch"] = tempfile.mkdtemp(dir=directory)
                before = far.moved()
                figures = cells.Cell(__file__, cell).figures()
                if figures is None:
                    print(f"  {name}: failed; see above", flush=True)
                    return None
                moved = far.moved()["bytes_to_client"] - before["bytes_to_client"]
                return figures | {"origin_mib": moved / (1 << 20)}

            def line(
                name: str,
                measured: list[dict | None],
                beside: dict[str, list[dict | None]] | None = None,
                goals: tuple[dict, ...] = (),
            ) -> None:
                """The median of each figure, and of its ratios to that of other lines in the same
                round.
                """
                found = [figures for figures in measured if figures is not None]
                if not found:
                    return
                row = {figure: statistics.median(f[figure] for f in found) for figure in found[0]}
                lines[name] = row
                for figure, others in (beside or {}).items():
                    ratios = [
                        100 * one["rows_per_s"] / other["rows_per_s"]
                        for one, other in zip(measured, others, strict=True)
                        if one is not None and other is not None
                    ]
                    if ratios:
                        row[figure] = statistics.median(ratios)
                if "pyarrow, row-wise" in lines:
                    of = lines["pyarrow, row-wise"]["rows_per_s"]
                    row["times_row_wise"] = row["rows_per_s"] / of
                report.add({"name": name, **row, "goals": [g for g in goals if g["figure"] in row]})

            report.heading("without Forebay")
            titles = {
                "pyarrow_row_wise": "pyarrow, row-wise",
                "pyarrow_scan": "pyarrow, scanned in order",
                "datasets_streaming": f"datasets, streaming, buffer of {common['buffer']}",
            }
            titles |= {
                "datasets_map": "datasets, map-style, random rows",
                "litdata_streaming": "litdata, streaming, shuffled, own format",
            }
            for way in args.rivals:
                line(titles[way], [measure(titles[way], way, origin.pid)])
            # In turn, because the speed of a machine changes: each round with nodes of its own.
            kinds = ("none", f"block:{args.blocks}", f"window:{common['buffer']}", "full")
            measured: dict[str, list] = {}
            for number in range(args.rounds):
                print(f"  round {number + 1} of {args.rounds}", flush=True)
                for shuffle in kinds:
                    kind = shuffle.split(":")[0]
                    caches = {"": ("cold", "warm")}
                    if kind == "full":
                        caches[str(size // 2)] = ("", "half")
                    for cache, heats in caches.items():
                        with Node(
                            directory, f"node-{kind}", endpoint=far.url, cache=cache or "8GiB"
                        ) as node:
                            for heat in heats:
                                name = f"forebay, {kind}, {heat}"
                                figures = measure(
                                    name,
                                    "forebay_stream",
                                    node.pid,
                                    1 << 62 if heat == "warm" else rows,
                                    seconds=args.seconds if heat == "warm" else EPOCH_MAX,
                                    url=node.unix_url,
                                    shuffle=shuffle,
                                    stream=True,
                                )
                                if heat:
                                    measured.setdefault(name, []).append(figures)
                        shutil.rmtree(node.cache)
            report.heading(f"forebay, push streams: medians of {args.rounds} rounds")
            for name, figures in measured.items():
                _, kind, heat = name.split(", ")
                beside = {
                    "of_none": measured[f"forebay, none, {'warm' if heat == 'half' else heat}"]
                }
                if heat == "half":
                    beside["of_full"] = measured["forebay, full, warm"]
                line(name, figures, beside, goals.get(name, ()))
    print("\n  the paper, rows/s: none 2,075.3, window 2,069.9, block 1,893.7, row-wise 44.4")
    report.save(args.save)


if __name__ == "__main__":
    main()
