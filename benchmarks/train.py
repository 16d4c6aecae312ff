"""Training from a bucket at a distance, after the tables of a report on a caching gateway (Parts 1,
3 and 4).

*Step*: a loop whose step sleeps as long as its GPU would work, over samples that DataLoader's
workers fetch, each sample an object of its own, from an origin that takes 80 ms for each GET.
*Direct* reads the origin, one GET after the other in each worker; Forebay's first epoch finds an
empty cache, the others a warm one. Before the clock runs, workers are started and have read one
sample each that is in no epoch; an epoch's time begins when its first batch is requested. *Waiting*
is the loop's time without a batch to work on; *busy* is the rest.

*Entitlement*: no step and a warm node: how many samples per second are possible.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from pathlib import Path

from nodes import (
    Distance,
    Node,
    as_entry,
    read_all,
    use_own_environment,
    write_objects,
    write_shards,
)
from readers import Wrong, boto3_get, run_cell, s3torch_dataset, whole
from report import Report, goal

COLUMNS = [
    ("name", "", 34),
    ("samples_per_s", "samples/s", 11),
    ("busy", "busy %", 9),
    ("waiting", "waiting %", 11),
    ("epoch_s", "epoch s", 10),
    ("times_direct", "× direct", 10),
]
COLUMNS += [
    ("samples", "samples", 9),
    ("client_cpu_us", "client µs", 11),
    ("server_cpu_us", "node µs", 10),
]
WARM_TIMES_DIRECT = 5.5
# Per cent of the time: what the report's tables show of a GPU that is saturated.
SATURATED = 98.0
ENTITLED = 26_820.0


class Boto3Dataset:
    """One GET per sample. The client is made in the worker: botocore's cannot be shared by
    processes.
    """

    def __init__(self, url: str, names: list[str]) -> None:
        self.url, self.names, self._get = url, names, None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int):
        self._get = self._get or boto3_get(self.url)
        return tensor(self._get(self.names[index]))


def tensor(data: bytes):
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_of(reader):
    return tensor(whole(reader))


def direct_dataset(kind: str, url: str, names: list[str]):
    return Boto3Dataset(url, names) if kind == "boto3" else s3torch_dataset(url, names, tensor_of)


class Plan:
    """The batches of the next epoch, for DataLoader's `batch_sampler`: persistent workers can be
    given other rows.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loop:
    """DataLoader over the first `samples` rows, with workers that have started."""

    def __init__(self, args, dataset, samples: int, workers: int) -> None:
        import torch.utils.data

        self.args, self.samples, self.plan, self.order = (
            args,
            samples,
            Plan(),
            random.Random(args.seed),
        )
        options = {
            "num_workers": workers,
            "multiprocessing_context": "fork",
            "persistent_workers": True,
        }
        self.loader = torch.utils.data.DataLoader(dataset, batch_sampler=self.plan, **options)
        self.plan.batches = [[samples + i] for i in range(workers)]
        for _ in self.loader:
            pass

    def epoch(self) -> dict:
        rows = list(range(self.samples))
        self.order.shuffle(rows)
        self.plan.batches = [
            rows[i : i + self.args.batch] for i in range(0, len(rows), self.args.batch)
        ]
        return epoch(self.loader, self.args)


def epoch(loader, args) -> dict:
    """One pass: how long it took, and how much of that the loop waited for data."""
    step_s = args.step_ms / 1000
    began, waited, samples = time.monotonic(), 0.0, 0
    batches = iter(loader)
    while True:
        asked = time.monotonic()
        batch = next(batches, None)
        waited += time.monotonic() - asked
        if batch is None:
            break
        if batch.shape[1] != args.sample_bytes:
            raise Wrong(f"a batch of shape {tuple(batch.shape)}")
        time.sleep(step_s * len(batch))
        samples += len(batch)
    seconds = time.monotonic() - began
    return {
        "samples": samples,
        "epoch_s": seconds,
        "samples_per_s": samples / seconds,
        "waiting": waited / seconds * 100,
        "busy": 100 - waited / seconds * 100,
    }


def median(epochs: list[dict]) -> dict:
    return sorted(epochs, key=lambda e: e["epoch_s"])[len(epochs) // 2]


def steps(args, directory: Path, files: Path, report: Report) -> None:
    import forebay
    import forebay.torch

    # The epoch of few workers is short because the direct one is slow, and not too short, because
    # the warm one is fast.
    samples = {
        workers: args.batch * max(args.batches * workers, 2 * args.batches * min(workers, 2))
        for workers in args.workers
    }
    names = write_objects(
        files, "samples", max(samples[w] + w for w in args.workers), args.sample_bytes
    )
    with Node(directory, "origin", files=files) as origin:
        read_all(origin.unix_url, names)
        with Distance(directory, "distance", origin.address, first_byte_ms=args.origin_ms) as far:
            for workers in args.workers:
                report.heading(
                    f"{workers} worker{'s' * (workers > 1)}, batches of {args.batch}, a"
                    f" step of {args.step_ms} ms a sample"
                )
                direct = Loop(
                    args, direct_dataset(args.direct, far.url, names), samples[workers], workers
                ).epoch()
                report.add({"name": f"direct, {args.direct}", "workers": workers, **direct})
                with Node(directory, f"node-{workers}", endpoint=far.url) as node:
                    dataset = forebay.torch.MapDataset(
                        forebay.Client(node.unix_url), [as_entry(n) for n in names]
                    )
                    loop = Loop(args, dataset, samples[workers], workers)
                    epochs = [loop.epoch() for _ in range(args.epochs)]
                    del loop
                cold, warm = epochs[0], median(epochs[1:])
                for name, one in (
                    ("forebay, first epoch, cold", cold),
                    ("forebay, warm epoch", warm),
                ):
                    row = {
                        "name": name,
                        "workers": workers,
                        **one,
                        "times_direct": one["samples_per_s"] / direct["samples_per_s"],
                    }
                    if workers == 2 and one is warm:
                        row["goals"] = [
                            goal("times_direct", WARM_TIMES_DIRECT),
                            goal("busy", SATURATED),
                        ]
                    report.add(row)


def entitlement(args, directory: Path, files: Path, report: Report) -> None:
    sources = {"objects": write_objects(files, "loose", args.entitled, args.sample_bytes)}
    for megabytes in args.shards:
        sources[f"{megabytes} MB shards"] = write_shards(
            files, f"shards-{megabytes}", args.entitled, args.sample_bytes, megabytes * 1_000_000
        )
    with Node(directory, "entitled", files=files) as node:
        report.heading("Entitlement: no step, warm")
        common = {
            "batch": args.entitled_batch,
            "size": args.sample_bytes,
            "seconds": args.seconds,
            "ramp_s": args.seconds / 4,
            "seed": args.seed,
        }
        common |= {"server_pid": node.pid, "in_order": True, "url": node.unix_url}
        for source, entries in sources.items():
            read_all(node.unix_url, entries)
            for how, cell in (
                ("one process", {"reader": "forebay_batches", "prefetch": 2}),
                ("DataLoader, 2 workers", {"reader": "forebay_ring", "workers": 2}),
                ("PyTorch's DataLoader, 2 workers", {"reader": "forebay_loader", "workers": 2}),
            ):
                got = run_cell(common | cell | {"names": entries})
                row = {
                    "name": f"{source}, {how}",
                    **got,
                    "samples_per_s": got["entries_per_s"],
                    "samples": got["entries"],
                }
                # What PyTorch does by default is for comparison.
                goals = (
                    [] if cell["reader"] == "forebay_loader" else [goal("samples_per_s", ENTITLED)]
                )
                report.add(row | {"goals": goals})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers",
        type=int,
        nargs="*",
        default=[1, 2, 4, 8, 16],
        help="DataLoader's; none: no table with a step",
    )
    parser.add_argument(
        "--direct", choices=["s3torchconnector", "boto3"], default="s3torchconnector"
    )
    parser.add_argument("--sample-bytes", type=int, default=115_000)
    parser.add_argument("--step-ms", type=float, default=7.35, help="of one sample")
    parser.add_argument("--origin-ms", type=float, default=80.0, help="of one GET")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument(
        "--batches",
        type=int,
        default=4,
        help="steps of an epoch per worker; of one or two workers twice as many",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="through Forebay: the first is cold; the median of the others is told",
    )
    parser.add_argument(
        "--shards",
        type=int,
        nargs="*",
        default=[4, 16, 64],
        metavar="MB",
        help="of the entitlement",
    )
    parser.add_argument("--entitled", type=int, default=1112, help="samples of the entitlement")
    parser.add_argument("--entitled-batch", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="the window of each row of the entitlement"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be 2 or more: the first is cold")

    import torch

    use_own_environment()
    torch.set_num_threads(1)
    # More workers than cores is what the table is about.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    settings = {
        "sample": f"{args.sample_bytes} bytes",
        "origin": f"{args.origin_ms} ms per GET",
        "epochs": args.epochs,
        "seed": args.seed,
    }
    report = Report("Training, after the gateway's tables", COLUMNS, settings)
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        if args.workers:
            steps(args, directory, directory / "files-step", report)
        entitlement(args, directory, directory / "files-entitled", report)
    report.save(args.save)


if __name__ == "__main__":
    main()
