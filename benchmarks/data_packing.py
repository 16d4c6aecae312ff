"""Tokens for a language model, packed: tokens per second, the first batch, resuming in mid-epoch,
and memory, beside other libraries on the same tokens.

Documents of tokens (32 bits each; their lengths are log-normal, some hundred on average) make packs
of 2,048 tokens, 8 in a batch. Each library packs, or reads, in its own way: Forebay packs rows of
Parquet as it reads them; `datasets` streams the same Parquet and concatenates with `map`, as its
examples do; Grain packs documents of ArrayRecord; MosaicML Streaming and litData read blocks of
2,048 tokens that were concatenated when their files were written. *30 ms away*: the bucket is
behind a proxy that delays, and nothing is on this machine yet. *Warm*: it was read before; for
`datasets`, which keeps nothing, it lies in local files. Grain reads local files only.

Each line is a process of its own. *First s* counts from the import of the library to its first
batch; the rate is that of the batches after it, until half of an epoch is over or the time is.
Warm, that would be a tenth of a second, so epochs follow each other for two. Then the state is
saved, and *resume s* is what another process needs from the import to the next batch, with caches
as they were at the beginning of the line. Memory is that of the process, which is the worker here;
Forebay's node is told beside it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cells
import numpy as np
import usage
from nodes import BUCKET, CREDENTIALS, Distance, Node, use_own_environment
from report import Report

COLUMNS = [
    ("name", "", 40),
    ("tokens_per_s", "tokens/s", 13),
    ("first_s", "first s", 9),
    ("resume_s", "resume s", 10),
    ("padding", "padding %", 11),
    ("cpu_ns", "client ns/token", 17),
    ("client_mib", "client MiB", 12),
    ("node_mib", "node MiB", 10),
    ("origin_mib", "moved MiB", 11),
]
#: Documents in one row group, and in one file of the rivals' formats.
GROUP_ROWS = 1000
BLOCKS_PER_FILE = 512
#: A process that takes longer than this is ended.
LIMIT_SECONDS = 180.0


def documents(count: int, mean: int) -> Iterator[np.ndarray]:
    """The tokens of each document, the same in each process."""
    order = np.random.default_rng(1)
    lengths = np.exp(order.normal(np.log(mean) - 0.5, 1.0, count)).astype(np.int64)
    for length in np.clip(lengths, 1, 50 * mean):
        yield order.integers(1, 50_000, length, np.int32)


def blocks(cell: dict) -> Iterator[np.ndarray]:
    """All tokens one after the other, in blocks as long as a pack."""
    left: list[np.ndarray] = []
    have = 0
    for document in documents(cell["documents"], cell["mean"]):
        left.append(document)
        have += len(document)
        while have >= cell["length"]:
            joined = np.concatenate(left)
            yield joined[: cell["length"]]
            left, have = [joined[cell["length"] :]], have - cell["length"]


# Ways to read: each yields, for each batch, the tokens, how many of them are padding, and what
# gives the state after it.

Batch = tuple[np.ndarray, int, Callable[[], object]]


def forebay_pack(cell: dict, state: object) -> Iterator[Batch]:
    import forebay

    dataset = forebay.open(f"{BUCKET}/documents/*.parquet", url=cell["url"], progress=False)
    pack = forebay.Pack(cell["length"], strategy=cell["strategy"], lengths=cell.get("lengths"))
    loader = dataset.loader(
        pack=pack,
        batch_size=cell["batch"],
        shuffle="block:8",
        seed=1,
        stream=cell["stream"],
        epochs=1 << 20,
    )
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        tokens = batch["tokens"]
        yield tokens, tokens.size - int(batch["lengths"].sum()), loader.state_dict


def storage(cell: dict) -> dict:
    return {
        "key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        "client_kwargs": {"endpoint_url": cell["endpoint"]},
    }


def hf_datasets(cell: dict, state: object) -> Iterator[Batch]:
    import datasets

    datasets.disable_progress_bars()
    length = cell["length"]
    if cell["warm"]:
        names, options = sorted(map(str, (Path(cell["files"]) / "documents").iterdir())), None
    else:
        names = [f"s3://{BUCKET}/documents/{name}" for name in cell["names"]]
        options = storage(cell)
    found = datasets.load_dataset(
        "parquet", data_files=names, split="train", streaming=True, storage_options=options
    )

    def concatenated(table):
        tokens = table["tokens"]
        flat = tokens.combine_chunks().values.to_numpy(zero_copy_only=False)
        whole = len(flat) // length * length
        import pyarrow

        packed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat[:whole]), length)
        return pyarrow.table({"tokens": packed})

    packed = (
        found.select_columns(["tokens"])
        .with_format("arrow")
        .map(concatenated, batched=True, batch_size=GROUP_ROWS)
        .shuffle(seed=1, buffer_size=256)
        .with_format("numpy")
    )
    if state is not None:
        packed.load_state_dict(state)
    while True:
        for batch in packed.iter(batch_size=cell["batch"], drop_last_batch=True):
            yield np.stack(batch["tokens"]), 0, packed.state_dict


def litdata_tokens(cell: dict, state: object) -> Iterator[Batch]:
    import litdata
    import litdata.streaming.downloader
    import torch
    from litdata import TokensLoader

    litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    torch.set_num_threads(1)
    data = litdata.StreamingDataset(
        f"s3://{BUCKET}/litdata",
        item_loader=TokensLoader(block_size=cell["length"]),
        shuffle=True,
        seed=1,
        cache_dir=cell["scratch"],
        max_cache_size="10GB",
        storage_options={"endpoint_url": cell["endpoint"]},
    )
    loader = litdata.StreamingDataLoader(data, batch_size=cell["batch"], drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    while True:
        for batch in loader:
            yield batch.numpy(), 0, loader.state_dict


def grain_pack(cell: dict, state: object) -> Iterator[Batch]:
    import grain

    paths = sorted(map(str, (Path(cell["files"]) / "arrayrecord").iterdir()))
    source = grain.sources.ArrayRecordDataSource(paths)
    # First fit takes no document that is longer than a pack.
    most = cell["length"] if cell["strategy"] == "first_fit" else None
    ds = (
        grain.MapDataset.source(source)
        .shuffle(seed=1)
        .repeat()
        .map(lambda record: {"tokens": np.frombuffer(record, np.int32)[:most]})
        .to_iter_dataset()
    )
    if cell["strategy"] == "concatenate":
        packed = grain.experimental.ConcatThenSplitIterDataset(
            ds, length_struct={"tokens": cell["length"]}
        )
    else:
        packed = grain.experimental.FirstFitPackIterDataset(
            ds, length_struct={"tokens": cell["length"]}, num_packing_bins=64
        )
    batches = iter(packed.batch(cell["batch"], drop_remainder=True))
    if state is not None:
        batches.set_state(state)
    for batch in batches:
        tokens = batch["tokens"]
        padding = int((batch["tokens_segment_ids"] == 0).sum())
        yield tokens, padding, batches.get_state


def mosaicml(cell: dict, state: object) -> Iterator[Batch]:
    os.environ["S3_ENDPOINT_URL"] = cell["endpoint"]
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    data = StreamingDataset(
        remote=f"s3://{BUCKET}/mds",
        local=str(Path(cell["scratch"]) / "mds"),
        shuffle=True,
        shuffle_seed=1,
        batch_size=cell["batch"],
    )
    loader = StreamingDataLoader(data, batch_size=cell["batch"], drop_last=True, num_workers=0)
    if state is not None:
        loader.load_state_dict(state)
    while True:
        for batch in loader:
            yield batch["tokens"].numpy(), 0, loader.state_dict


WAYS = {f.__name__: f for f in (forebay_pack, hf_datasets, litdata_tokens, grain_pack, mosaicml)}


def run(cell: dict) -> dict:
    """One line, in this process: from the beginning, or from a state."""
    use_own_environment()
    me, began = os.getpid(), time.monotonic()
    kept = Path(cell["state"])
    state = pickle.loads(kept.read_bytes()) if cell["resume"] else None
    batches = WAYS[cell["way"]](cell, state)
    tokens, _, state_of = next(batches)
    first = time.monotonic()
    shape = (cell["batch"], cell["length"])
    if tokens.shape != shape:
        sys.exit(f"a batch of shape {tokens.shape}, and not {shape}")
    if cell["resume"]:
        return {"resume_s": first - began}
    cpu, count, padding = usage.cpu_seconds(me), 0, 0
    for tokens, empty, state_now in batches:
        state_of = state_now
        count, padding = count + tokens.size - empty, padding + empty
        now = time.monotonic()
        took = now - first
        if took > cell["seconds"] or (count >= cell["half"] and took >= cell.get("least", 0.0)):
            break
    seconds = time.monotonic() - first
    figures = {
        "tokens_per_s": count / seconds,
        "tokens": count,
        "first_s": first - began,
        "padding": 100 * padding / (count + padding),
        "cpu_ns": (usage.cpu_seconds(me) - cpu) / count * 1e9,
        "client_mib": usage.peak_bytes(me) / (1 << 20),
    }
    kept.write_bytes(pickle.dumps(state_of()))
    return figures


# The same tokens in the formats of others.


def write_parquet(cell: dict) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(cell["files"]) / "documents"
    folder.mkdir(parents=True)
    schema = pa.schema([("tokens", pa.list_(pa.int32())), ("n", pa.int32())])
    per_file = max(GROUP_ROWS, cell["documents"] // 8 // GROUP_ROWS * GROUP_ROWS)
    writer, rows, number = None, [], 0
    for i, document in enumerate(documents(cell["documents"], cell["mean"])):
        rows.append(document)
        if len(rows) == GROUP_ROWS or i + 1 == cell["documents"]:
            if writer is None:
                path = folder / f"{number:03}.parquet"
                writer = pq.ParquetWriter(path, schema, write_page_index=True)
            offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
            lists = pa.ListArray.from_arrays(offsets, np.concatenate(rows))
            lengths = pa.array(np.diff(offsets), pa.int32())
            writer.write_table(pa.table([lists, lengths], schema), row_group_size=GROUP_ROWS)
            rows = []
        if (i + 1) % per_file == 0 or i + 1 == cell["documents"]:
            writer.close()
            writer, number = None, number + 1


def write_grain(cell: dict) -> None:
    from array_record.python import array_record_module

    folder = Path(cell["files"]) / "arrayrecord"
    folder.mkdir(parents=True)
    writer = array_record_module.ArrayRecordWriter(str(folder / "0.arrayrecord"), "group_size:1")
    for document in documents(cell["documents"], cell["mean"]):
        writer.write(document.tobytes())
    writer.close()


def write_litdata(cell: dict) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import litdata, torch
from litdata import TokensLoader
from data_packing import documents
def tokens(_):
    for document in documents({cell["documents"]}, {cell["mean"]}):
        yield torch.from_numpy(document)
if __name__ == "__main__":
    litdata.optimize(
        fn=tokens, inputs=[0], output_dir={str(Path(cell["files"]) / "litdata")!r}, num_workers=1,
        chunk_size={BLOCKS_PER_FILE * cell["length"]},
        item_loader=TokensLoader(block_size={cell["length"]}),
    )
"""
    path = Path(cell["files"]).parent / "write_litdata.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def write_mosaicml(cell: dict) -> None:
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:int32:{cell['length']}"}
    size = BLOCKS_PER_FILE * cell["length"] * 4
    folder = str(Path(cell["files"]) / "mds")
    with MDSWriter(out=folder, columns=columns, size_limit=size) as out:
        for block in blocks(cell):
            out.write({"tokens": np.ascontiguousarray(block)})


WRITERS = {
    "grain_pack": write_grain,
    "litdata_tokens": write_litdata,
    "mosaicml": write_mosaicml,
}
TITLES = {
    "hf_datasets": "datasets, streaming, concatenated",
    "litdata_tokens": "litdata, blocks of tokens",
    "grain_pack": "grain, concatenated",
    "mosaicml": "mosaicml streaming, blocks of tokens",
}
FOREBAY = {
    "concatenate": {"strategy": "concatenate", "stream": False},
    "concatenate, stream": {"strategy": "concatenate", "stream": True},
    "best fit": {"strategy": "best_fit", "stream": False},
    "best fit, lengths known": {"strategy": "best_fit", "stream": False, "lengths": "n"},
    "best fit, stream": {"strategy": "best_fit", "stream": True},
}


def work(cell: dict) -> dict:
    if cell.get("write"):
        WRITERS[cell["write"]](cell)
        return {}
    return run(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--mean", type=int, default=500, help="tokens of a document, on average")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a pack")
    parser.add_argument("--batch", type=int, default=8, help="packs of a batch")
    parser.add_argument("--rtt", type=float, default=30.0, help="to the origin, milliseconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="the longest window of a line")
    parser.add_argument(
        "--warm-seconds", type=float, default=2.0, help="the shortest window of a warm line"
    )
    parser.add_argument("--rivals", nargs="*", default=list(TITLES), choices=list(TITLES))
    parser.add_argument(
        "--mosaicml-python",
        default=os.environ.get("FOREBAY_MOSAICML_PYTHON"),
        help="a Python with MosaicML Streaming, which needs an older NumPy than the others:"
        " benchmarks/requirements-mosaicml.txt. Without one its lines are missing",
    )
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, work)
    if min(args.documents, args.mean, args.length, args.batch) < 1:
        parser.error("--documents, --mean, --length and --batch are at least 1")

    use_own_environment()
    total = sum(map(len, documents(args.documents, args.mean)))
    if total < 4 * args.batch * args.length:
        parser.error(f"{total:,} tokens make fewer than four batches: give more --documents")
    report = Report(
        "Packing tokens",
        COLUMNS,
        {
            "tokens": f"{total:,} in {args.documents:,} documents",
            "batch": f"{args.batch} x {args.length}",
            "round trip": f"{args.rtt} ms",
        },
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as folder:
        directory = Path(folder)
        files = directory / "files"
        common = {
            "documents": args.documents,
            "mean": args.mean,
            "length": args.length,
            "batch": args.batch,
            "seconds": args.seconds,
            "half": total // 2,
            "files": str(files),
            "state": str(directory / "state"),
        }
        print("  writing", flush=True)
        write_parquet(common)
        common["names"] = sorted(p.name for p in (files / "documents").iterdir())

        def python_of(way: str) -> str | None:
            return args.mosaicml_python if way == "mosaicml" else sys.executable

        rivals = []
        for way in args.rivals:
            python = python_of(way)
            if python is None:
                print(f"  {TITLES[way]}: left out: give --mosaicml-python", flush=True)
                continue
            if way in WRITERS:
                made = cells.Cell(__file__, {**common, "write": way}, python).figures(600)
                if made is None:
                    print(f"  {TITLES[way]}: its copy could not be written; see above", flush=True)
                    continue
            rivals.append(way)

        with (
            Node(directory, "origin", files=files) as origin,
            Distance(directory, "distance", origin.address, rtt_ms=args.rtt) as far,
        ):

            def line(name: str, way: str, fresh: Callable[[], dict]) -> None:
                """Reads, then resumes, each with caches as `fresh` makes or leaves them."""
                before = far.moved()
                cell = {**common, "way": way, "endpoint": far.url, "resume": False, **fresh()}
                cell["least"] = args.warm_seconds if cell["warm"] else 0.0
                row = cells.Cell(__file__, cell, python_of(way)).figures(LIMIT_SECONDS)
                moved = far.moved()["bytes_to_client"] - before["bytes_to_client"]
                if row is None:
                    print(f"  {name}: failed; see above", flush=True)
                    return
                if "node_pid" in cell:
                    row["node_mib"] = usage.peak_bytes(cell["node_pid"]) / (1 << 20)
                again = {**cell, "resume": True, **fresh()}
                resumed = cells.Cell(__file__, again, python_of(way)).figures(LIMIT_SECONDS)
                report.add(
                    {"name": name, **row, "origin_mib": moved / (1 << 20), **(resumed or {})}
                )

            for warm in (False, True):
                report.heading("warm" if warm else f"{args.rtt:g} ms away, nothing here yet")
                for kind, options in FOREBAY.items():
                    current: list[Node] = []

                    def fresh(warm=warm, options=options, current=current) -> dict:
                        if not warm or not current:
                            for old in current:
                                old.stop()
                                shutil.rmtree(old.cache)
                            current[:] = [Node(directory, "node", endpoint=far.url)]
                        node = current[0]
                        here = {"url": node.unix_url, "node_pid": node.pid, "warm": warm}
                        return {**options, **here}

                    if warm:
                        # All of it, once.
                        fill = {**common, "way": "forebay_pack", "resume": False, **fresh()}
                        fill |= {"half": total, "seconds": 60.0, "stream": True}
                        cells.Cell(__file__, fill).figures(LIMIT_SECONDS)
                    line(f"forebay, {kind}", "forebay_pack", fresh)
                    for old in current:
                        old.stop()
                        shutil.rmtree(old.cache)
                for way in rivals:
                    if way == "grain_pack" and not warm:
                        continue
                    scratch = directory / f"scratch-{way}"
                    if warm and way in ("litdata_tokens", "mosaicml"):
                        scratch.mkdir(exist_ok=True)
                        fill = {**common, "way": way, "endpoint": far.url, "resume": False}
                        fill |= {"half": total, "seconds": 60.0, "scratch": str(scratch)}
                        fill |= {"warm": True, "strategy": "concatenate"}
                        cells.Cell(__file__, fill, python_of(way)).figures(LIMIT_SECONDS)

                    def of_rival(warm=warm, scratch=scratch) -> dict:
                        if not warm:
                            shutil.rmtree(scratch, ignore_errors=True)
                        scratch.mkdir(exist_ok=True)
                        return {"scratch": str(scratch), "warm": warm, "strategy": "concatenate"}

                    line(TITLES[way], way, of_rival)
                    if way == "grain_pack":

                        def first_fit(of_rival=of_rival) -> dict:
                            return {**of_rival(), "strategy": "first_fit"}

                        line("grain, first fit", way, first_fit)
    report.save(args.save)


if __name__ == "__main__":
    main()
