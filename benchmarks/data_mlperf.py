"""How many accelerators a machine keeps fed, after MLPerf Storage; and what a sample costs at a
distance, after a paper's scenarios (EMLIO, section 5).

**Accelerators.** Samples have the sizes, and steps the times, of MLPerf Storage's workloads on
NVIDIA's H100: unet3d (146.6 MB, batches of 7, 0.323 s), resnet50 (114,660 bytes, 400, 0.224 s) and
cosmoflow (2.83 MB, 1, 3.5 ms). An accelerator is a process that reads its rank's batches and sleeps
for the step. They are added, one, two, four …, until their utilization (AU: computing, as a share
of the time after the first batch) falls under 90 %. *Forebay* reads through the node beside it,
warm; *s3torchconnector* and *plain DataLoader* (one GET per sample, two workers, tensors in shared
memory) read from the same node by its S3 interface, so that all have the same storage. The bytes of
each sample come to the process that trains. Large samples are scaled down
(`--scale`), and their steps with them: the headings say so.

**Distance.** A node beside the storage, the loop `--rtts` ms away, samples of 0.1 and 2 MB: the CPU
time of a sample at both ends. Joules stand beside it where this machine measures them, and are left
out where it does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import cells
import usage
from nodes import (
    BUCKET,
    Distance,
    Node,
    read_all,
    use_own_environment,
    write_objects,
    write_shards,
)
from report import Report, goal

#: Bytes of a sample, samples of a batch, seconds of a step.
WORKLOADS = {
    "unet3d": (146_600_628, 7, 0.323),
    "resnet50": (114_660, 400, 0.224),
    "cosmoflow": (2_828_486, 1, 0.0035),
}
FED_PERCENT = 90.0
WORKERS = 2
COLUMNS = [
    ("name", "", 30),
    ("accelerators", "accelerators", 14),
    ("au", "AU %", 9),
    ("samples_per_s", "samples/s", 12),
    ("mib_per_s", "MiB/s", 10),
    ("rtt_ms", "round trip ms", 15),
    ("client_cpu_ms", "client CPU ms", 15),
    ("node_cpu_ms", "node CPU ms", 13),
    ("client_joules", "J a sample", 12),
]


def forebay_batches(cell: dict) -> Iterator[int]:
    import forebay

    data = forebay.open(f"{BUCKET}/{cell['folder']}/", format="objects", url=cell["url"])
    loader = data.loader(
        batch_size=cell["batch"],
        shuffle="full",
        seed=1,
        epochs=10**6,
        rank=cell["rank"],
        world_size=cell["world"],
        follow=False,
    )
    for rows in loader:
        yield len(rows)


def own_share(cell: dict) -> list[str]:
    return cell["names"][cell["rank"] :: cell["world"]] or cell["names"]


def s3torch_batches(cell: dict) -> Iterator[int]:
    from readers import s3torch_dataset, whole

    return torch_batches(s3torch_dataset(cell["url"], own_share(cell), whole), cell)


class Gets:
    """One GET per sample, as a tensor: workers pass it on in shared memory."""

    def __init__(self, cell: dict) -> None:
        self.url, self.names, self._store = cell["url"], own_share(cell), None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int):
        import obstore
        import torch
        from readers import obstore_of

        self._store = self._store or obstore_of(self.url)
        data = obstore.get(self._store, self.names[index]).bytes()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(data, dtype=torch.uint8)


def plain_batches(cell: dict) -> Iterator[int]:
    return torch_batches(Gets(cell), cell)


def torch_batches(dataset, cell: dict) -> Iterator[int]:
    import torch.utils.data

    torch.set_num_threads(1)

    class Again(torch.utils.data.Sampler):
        """The samples again and again: the time limit ends the loop."""

        def __iter__(self):
            while True:
                yield from torch.randperm(len(dataset)).tolist()

    for batch in torch.utils.data.DataLoader(
        dataset,
        batch_size=cell["batch"],
        sampler=Again(),
        num_workers=WORKERS,
        multiprocessing_context="fork",
        collate_fn=list,
    ):
        yield len(batch)


WAYS = {
    "forebay": (forebay_batches, "forebay"),
    "s3torch": (s3torch_batches, "s3torchconnector"),
    "plain": (plain_batches, "plain DataLoader"),
}


def accelerator(cell: dict) -> dict:
    """One simulated accelerator, for some seconds after its first batch."""
    batches = WAYS[cell["way"]][0](cell)
    count = next(batches)
    samples, computed = 0, 0.0
    began = time.monotonic()
    while time.monotonic() - began < cell["seconds"]:
        step = time.monotonic()
        time.sleep(cell["step_s"])
        computed += time.monotonic() - step
        samples += count
        count = next(batches)
    seconds = time.monotonic() - began
    return {"samples": samples, "seconds": seconds, "au": computed / seconds * 100}


def far(cell: dict) -> dict:
    """An epoch at a distance, by a push stream."""
    import forebay

    me, node = os.getpid(), cell["node_pid"]
    data = forebay.open(f"{BUCKET}/{cell['folder']}/*.tar", url=cell["url"], progress=False)
    with forebay.energy.Monitor() as monitor:
        cpu, of_node = usage.cpu_seconds(me), usage.cpu_seconds(node)
        began, samples = time.monotonic(), 0
        loader = data.loader(batch_size=cell["batch"], shuffle="block:4", seed=1, stream=True)
        for rows in loader:
            samples += len(rows)
        seconds = time.monotonic() - began
        joules = monitor.joules()
    return {
        "samples": samples,
        "samples_per_s": samples / seconds,
        "client_cpu_ms": (usage.cpu_seconds(me) - cpu) * 1e3 / samples,
        "node_cpu_ms": (usage.cpu_seconds(node) - of_node) * 1e3 / samples,
        "client_joules": None if joules is None else joules / samples,
    }


def work(cell: dict) -> dict:
    use_own_environment()
    return far(cell) if cell["way"] == "far" else accelerator(cell)


def fed(name: str, count: int, cell: dict, size: int) -> dict:
    """So many accelerators at once."""
    running = [cells.Cell(__file__, {**cell, "rank": r, "world": count}) for r in range(count)]
    figures = [one.figures() for one in running]
    if None in figures:
        sys.exit(f"{name} failed; see above")
    rate = sum(f["samples"] / f["seconds"] for f in figures)
    return {
        "name": name,
        "accelerators": count,
        "au": min(f["au"] for f in figures),
        "samples_per_s": rate,
        "mib_per_s": rate * size / (1 << 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each line")
    parser.add_argument("--most", type=int, default=8, help="accelerators at most")
    parser.add_argument(
        "--scale", type=float, default=0.1, help="of samples of more than 1 MB, and of their steps"
    )
    parser.add_argument("--data-mib", type=int, default=512, help="of each workload's samples")
    parser.add_argument("--rtts", type=float, nargs="*", default=[0.1, 10.0, 30.0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 2_000_000])
    parser.add_argument("--samples", type=int, default=512, help="of an epoch at a distance")
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, work)

    use_own_environment()
    report = Report(
        "Accelerators that are fed, and the cost of a sample",
        COLUMNS,
        {"seconds": args.seconds, "scale": args.scale, "accelerators at most": args.most},
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        files = directory / "files"
        files.mkdir()
        with Node(directory, "node", files=files, unix=True) as node:
            for workload in args.workloads:
                accelerators(args, report, workload, files, node)
        with Node(directory, "far", files=files, unix=False) as node:
            for size in args.sizes:
                distances(args, report, size, directory, files, node)
    report.save(args.save)


def accelerators(args, report: Report, workload: str, files: Path, node: Node) -> None:
    size, batch, step_s = WORKLOADS[workload]
    if size > 1_000_000:
        size, step_s = int(size * args.scale), step_s * args.scale
    count = max(2 * batch, min(4096, (args.data_mib << 20) // size))
    names = write_objects(files, workload, count, size)
    read_all(node.url, names, batch=max(1, min(64, (64 << 20) // size)))
    report.heading(
        f"{workload}: {size / 1e6:.3g} MB, batches of {batch}, a step of {step_s * 1e3:.3g} ms"
    )
    cell = {
        "url": node.url,
        "folder": workload,
        "names": names,
        "batch": batch,
        "step_s": step_s,
        "seconds": args.seconds,
    }
    for way in args.ways:
        name, number = f"{workload}, {WAYS[way][1]}", 1
        while number <= args.most:
            row = fed(name, number, {**cell, "way": way}, size)
            if way == "forebay" and number == 1:
                row["goals"] = [goal("au", FED_PERCENT)]
            report.add(row)
            if row["au"] < FED_PERCENT:
                break
            number *= 2


def distances(args, report: Report, size: int, directory: Path, files: Path, node: Node) -> None:
    folder = f"shards-{size}"
    write_shards(files, folder, args.samples, size, 32_000_000)
    report.heading(f"at a distance: samples of {size / 1e6:g} MB")
    for rtt in args.rtts:
        with Distance(directory, f"distance-{size}-{rtt}", node.address, rtt_ms=rtt) as away:
            cell = {
                "way": "far",
                "url": away.url,
                "folder": folder,
                "batch": 32,
                "node_pid": node.pid,
            }
            name = f"{size / 1e6:g} MB, forebay, stream"
            report.add({"name": name, "rtt_ms": rtt, **cells.measured(__file__, cell, name)})


if __name__ == "__main__":
    main()
