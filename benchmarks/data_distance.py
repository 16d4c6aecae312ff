"""Training at a distance from the storage: an epoch by push streams and by requests, for round
trips from 0 to 100 ms, after a paper's figures (EMLIO, section 5.1).

A node is beside the storage (its origin is a directory of tar shards) and the training loop far
away: `forebay distance`, a proxy in its own process, delays each byte by half a round trip in each
direction, and takes a round trip for each new connection. The step sleeps as long as its GPU would
work. *Stream* is Forebay's; *one* is PyTorch's DataLoader with one worker that GETs one sample
after the other; *32* is the same with 32 GETs in flight; *webdataset* reads the shards as a stream,
with two workers. *Over near* is the epoch's time compared with the same way without distance, in
per cent. Rivals read fewer samples where they are slow; the table gives the time of a whole epoch
for all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cells
import usage
from nodes import BUCKET, Distance, Node, use_own_environment, write_objects, write_shards
from report import Report, goal

COLUMNS = [
    ("name", "", 30),
    ("rtt_ms", "round trip ms", 15),
    ("epoch_s", "epoch s", 10),
    ("over_near", "over near %", 13),
    ("waiting", "waiting %", 11),
    ("samples", "samples", 9),
]
COLUMNS += [
    ("client_cpu_s", "client CPU s", 14),
    ("server_cpu_s", "node CPU s", 12),
    ("moved_mib", "moved MiB", 11),
]
VARIES_NEAR, VARIES_FAR = 5.0, 10.0
FLIGHT = 32


def stream(cell: dict) -> Iterator[int]:
    import forebay

    dataset = forebay.open(f"{BUCKET}/{cell['shards']}/*.tar", url=cell["url"], progress=False)
    for rows in dataset.loader(batch_size=cell["batch"], shuffle="block:4", seed=1, stream=True):
        yield len(rows)


class Samples:
    """One GET per sample; with `__getitems__` as many as there are in a batch, 32 at a time."""

    def __init__(self, cell: dict) -> None:
        self.cell, self._store = cell, None

    def __len__(self) -> int:
        return len(self.cell["names"])

    @property
    def store(self):
        from readers import obstore_of

        self._store = self._store or obstore_of(self.cell["url"])
        return self._store

    def __getitem__(self, index: int):
        import obstore

        return len(bytes(obstore.get(self.store, self.cell["names"][index]).bytes()))


class ManySamples(Samples):
    def __getitems__(self, indices):
        import obstore

        async def all_of_them():
            slots = asyncio.Semaphore(FLIGHT)

            async def one(index: int) -> int:
                async with slots:
                    return len(
                        bytes(
                            await (
                                await obstore.get_async(self.store, self.cell["names"][index])
                            ).bytes_async()
                        )
                    )

            return await asyncio.gather(*(one(i) for i in indices))

        return asyncio.run(all_of_them())


def loader(dataset, cell: dict) -> Iterator[int]:
    import torch.utils.data

    for batch in torch.utils.data.DataLoader(
        dataset,
        batch_size=cell["batch"],
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=list,
    ):
        yield len(batch)


def one(cell: dict) -> Iterator[int]:
    return loader(Samples(cell), cell)


def many(cell: dict) -> Iterator[int]:
    return loader(ManySamples(cell), cell)


def web(cell: dict) -> Iterator[int]:
    import torch.utils.data
    import webdataset

    urls = [f"pipe:curl -s -f {cell['url']}/{BUCKET}/{shard}" for shard in cell["shard_names"]]
    data = (
        webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
        .to_tuple("bin")
        .batched(cell["batch"], collation_fn=list)
    )
    for batch in torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context="fork"
    ):
        yield len(batch)


WAYS = {"stream": stream, "one": one, "many": many, "web": web}
NAMES = {
    "stream": "forebay, stream",
    "one": "DataLoader, one GET at a time",
    "many": f"DataLoader, {FLIGHT} GETs in flight",
    "web": "webdataset, 2 workers",
}


def run(cell: dict) -> dict:
    use_own_environment()
    import torch

    torch.set_num_threads(1)
    me = os.getpid()
    cpu, node = usage.cpu_seconds(me), usage.cpu_seconds(cell["node_pid"])
    began, waited, samples = time.monotonic(), 0.0, 0
    batches = WAYS[cell["way"]](cell)
    while True:
        asked = time.monotonic()
        count = next(batches, None)
        waited += time.monotonic() - asked
        if count is None:
            break
        samples += count
        time.sleep(cell["step_ms"] / 1000 * count)
    seconds = time.monotonic() - began
    return {
        "samples": samples,
        "epoch_s": seconds,
        "waiting": waited / seconds * 100,
        "client_cpu_s": usage.cpu_seconds(me) - cpu,
        "server_cpu_s": usage.cpu_seconds(cell["node_pid"]) - node,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rtts",
        type=float,
        nargs="*",
        default=[0.0, 1.0, 10.0, 30.0, 100.0],
        help="milliseconds; the first is what the others are compared with",
    )
    parser.add_argument(
        "--samples",
        type=int,
        nargs=2,
        default=[1536, 256],
        help="of the small and of the large size",
    )
    parser.add_argument(
        "--rival-samples",
        type=int,
        nargs=2,
        default=[128, 32],
        help="that rivals read; their epoch is told for all",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs=2,
        default=[7.35, 40.0],
        help="of one sample, small and large",
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, run)

    use_own_environment()
    report = Report(
        "Epochs at a distance",
        COLUMNS,
        {"batch": args.batch, "distance": "a proxy that holds bytes back in both directions"},
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        files = directory / "files"
        sizes = list(
            zip((100_000, 2_000_000), args.samples, args.rival_samples, args.step_ms, strict=True)
        )
        sources = {}
        for size, samples, rival, _ in sizes:
            members = write_shards(files, f"shards-{size}", samples, size, 32_000_000)
            sources[size] = (
                sorted({shard for shard, _ in members}),
                write_objects(files, f"loose-{size}", rival, size),
            )
        with Node(directory, "node", files=files, unix=False) as node:
            for size, samples, rival, step_ms in sizes:
                report.heading(f"samples of {size / 1e6:g} MB, a step of {step_ms} ms a sample")
                near: dict[str, float] = {}
                for rtt in args.rtts:
                    with Distance(
                        directory, f"distance-{size}-{rtt}", node.address, rtt_ms=rtt
                    ) as far:
                        for way in args.ways:
                            shards, names = sources[size]
                            per_shard = -(-samples // len(shards))
                            used = (
                                shards
                                if way == "stream"
                                else shards[: max(2, -(-rival // per_shard))]
                            )
                            cell = {
                                "way": way,
                                "url": far.url,
                                "batch": args.batch,
                                "step_ms": step_ms,
                                "node_pid": node.pid,
                                "shards": f"shards-{size}",
                                "shard_names": used,
                                "names": names,
                            }
                            before = far.moved()
                            row = {
                                "name": NAMES[way],
                                "rtt_ms": rtt,
                                **cells.measured(__file__, cell, NAMES[way]),
                            }
                            if way == "stream" and row["samples"] < samples - samples % args.batch:
                                sys.exit(
                                    f"the stream brought {row['samples']} of {samples} samples"
                                )
                            row["moved_mib"] = (
                                far.moved()["bytes_to_client"] - before["bytes_to_client"]
                            ) / (1 << 20)
                            row["epoch_s"] *= samples / row["samples"]
                            row["over_near"] = 100 * (
                                row["epoch_s"] / near.setdefault(way, row["epoch_s"]) - 1
                            )
                            if way == "stream" and rtt:
                                row["goals"] = [
                                    goal(
                                        "over_near",
                                        at_most=VARIES_NEAR if rtt <= 30 else VARIES_FAR,
                                    )
                                ]
                            report.add(row)
    print(
        "\n  the paper, ResNet-50 on 10 GB of ImageNet, s: PyTorch 172 near, 4,232 at 30"
        " ms; its own 157 and 156"
    )
    report.save(args.save)


if __name__ == "__main__":
    main()
