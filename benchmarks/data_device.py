"""A step of training with the loader beside the same step on data that is already on the device.

Pictures of 224 x 224 x 3 bytes lie in Arrow files behind a node beside the loop, warm. A step
computes a network, forward and backward: a ResNet-50 in bfloat16, or a *small* one of two layers,
which takes about a millisecond on a GPU and shows how fast batches can come. *On the device* it
gets the same batch each time, which was copied there before; *loader* copies each batch as it
comes; *loader, pinned* has batches in page-locked memory (``pin_memory=True``) and copies without
blocking, so that the copy runs beside the step before. Where there is no GPU the device is the CPU
and the network the small one, nothing is copied or pinned, and the line of the loader says what
receiving batches costs a step that has the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nodes import BUCKET, Node, use_own_environment
from report import Report, goal

SIDE, CHANNELS = 224, 3
PICTURE = SIDE * SIDE * CHANNELS
BLOCK_ROWS = 128
COLUMNS = [
    ("name", "", 30),
    ("step_ms", "ms a step", 11),
    ("samples_per_s", "samples/s", 12),
    ("of_device", "% of on the device", 19),
]
#: A loader that costs the step nothing.
OF_DEVICE = 100.0


def write(files: Path, rows: int) -> None:
    import numpy as np
    import pyarrow as pa

    (files / "pictures").mkdir(parents=True)
    rng = np.random.default_rng(1)
    for part in range(4):
        count = rows // 4
        values = pa.array(rng.integers(0, 256, count * PICTURE, np.uint8))
        table = pa.table(
            {
                "picture": pa.FixedSizeListArray.from_arrays(values, PICTURE),
                "label": pa.array(rng.integers(0, 10, count)),
            }
        )
        path = str(files / "pictures" / f"part-{part}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=BLOCK_ROWS)


def small():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(CHANNELS, 16, 7, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def resnet50():
    """The network of "Deep Residual Learning for Image Recognition" (He et al., 2015), table 1."""
    import torch
    from torch import nn

    def normed(inward: int, outward: int, size: int, stride: int = 1) -> list:
        convolution = nn.Conv2d(inward, outward, size, stride, size // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outward)]

    class Bottleneck(nn.Module):
        def __init__(self, inward: int, width: int, stride: int) -> None:
            super().__init__()
            layers = [*normed(inward, width, 1), nn.ReLU(), *normed(width, width, 3, stride)]
            self.layers = nn.Sequential(*layers, nn.ReLU(), *normed(width, 4 * width, 1))
            is_same = inward == 4 * width
            beside = [] if is_same else normed(inward, 4 * width, 1, stride)
            self.beside = nn.Sequential(*beside)

        def forward(self, x):
            return torch.relu(self.layers(x) + self.beside(x))

    layers, inward = [*normed(CHANNELS, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(count):
            stride = 2 if i == 0 and width > 64 else 1
            layers.append(Bottleneck(inward, width, stride))
            inward = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inward, 10))


MODELS = {"resnet50": resnet50, "small": small}


def step_of(model: str, device: str) -> Callable:
    import torch
    from torch import nn

    torch.manual_seed(1)
    network = MODELS[model]().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)

    def step(pictures, labels) -> None:
        inputs = pictures.view(-1, SIDE, SIDE, CHANNELS).permute(0, 3, 1, 2).float() / 255
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = network(inputs)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(found.float(), labels).backward()
        optimizer.step()

    return step


def measure(batches: Iterator, model: str, device: str, warm: int, steps: int) -> float:
    """Milliseconds of a step, each of them waited for only at the end."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step = step_of(model, device)
    for pictures, labels in itertools.islice(batches, warm):
        step(pictures, labels)
    wait()
    began = time.monotonic()
    for pictures, labels in itertools.islice(batches, steps):
        step(pictures, labels)
    wait()
    return (time.monotonic() - began) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch", type=int, help="256; on the CPU 64")
    parser.add_argument("--steps", type=int, default=60, help="that are measured, in each line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="on a GPU both, else small")
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    if min(args.rows // 512, args.batch or 1, args.steps, args.rounds) < 1:
        parser.error("--rows is at least 512, the others at least 1")

    use_own_environment()
    import forebay
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A GPU that has little to do waits for the program: the step would be that of the program.
    args.batch = args.batch or (256 if device == "cuda" else 64)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU: no GPU is there"
    models = args.models or (list(MODELS) if device == "cuda" else ["small"])
    report = Report("Steps on a device", COLUMNS, {"device": name, "batch": args.batch})
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        write(directory / "files", args.rows)
        with Node(directory, "node", files=directory / "files") as node:
            data = forebay.open(f"{BUCKET}/pictures/*.arrow", url=node.unix_url, progress=False)

            def loaded(pinned: bool) -> Iterator:
                options = {"shuffle": "block:4", "seed": 1, "epochs": 10**6, "follow": False}
                loader = data.loader(args.batch, output="torch", pin_memory=pinned, **options)
                for batch in loader:
                    yield tuple(
                        batch[column].to(device, non_blocking=pinned)
                        for column in ("picture", "label")
                    )

            first = next(loaded(False))
            ways = {"on the device": lambda: itertools.repeat(first)}
            ways["loader"] = lambda: loaded(False)
            if device == "cuda":
                ways["loader, pinned"] = lambda: loaded(True)
            for model in models:
                measured: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(args.rounds):
                    for way, batches in ways.items():
                        ms = measure(batches(), model, device, 10, args.steps)
                        measured[way].append(ms)
                show(report, model, measured, args)
    report.save(args.save)


def show(report: Report, model: str, measured: dict[str, list[float]], args) -> None:
    report.heading(f"{model}, medians of {args.rounds} rounds")
    for way, times in measured.items():
        ratios = [a / b * 100 for a, b in zip(times, measured["on the device"], strict=True)]
        ms = statistics.median(times)
        row = {"name": way, "step_ms": ms, "samples_per_s": args.batch / ms * 1e3}
        row["of_device"] = statistics.median(ratios)
        if way == "loader, pinned" and model == "resnet50":
            row["goals"] = [goal("of_device", at_most=OF_DEVICE * 1.05)]
        report.add(row)


if __name__ == "__main__":
    main()
