"""What an order of the rows does to training: a small language model from a text in its own order,
after a paper's table (Table 1 of REIMU).

The text is written as Parquet, its row groups are the blocks, and each model is trained on the
batches of `ds.loader(shuffle=…)`: the same rows, budget, initial weights and hyperparameters for
each order; only the order differs. *Perplexity*, per byte, is that of passages from all over the
text that no training saw, after one pass; lower is better. *Closed* is the share of the gap between
`none` and `full` that an order closes, of the means over the seeds, in per cent. `window` and
`block` have buffers of as many rows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cells
from nodes import BUCKET, Node, use_own_environment
from report import Report, goal
from text import passages

COLUMNS = [
    ("name", "", 18),
    ("perplexity", "perplexity", 12),
    ("spread", "± over seeds", 14),
    ("over_full", "over full", 11),
    ("closed", "closed %", 10),
    ("seconds", "s each", 8),
]
CLOSED = 85.0
WIDTH = 128
HELD_OUT = 21


def train(cell: dict) -> dict:
    """One model, in a process of its own with one thread, so that two can run beside each other."""
    import forebay
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(cell["seed"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, WIDTH)
            self.recur = nn.GRU(WIDTH, 2 * WIDTH, batch_first=True)
            self.read_out = nn.Linear(2 * WIDTH, 256)

        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.recur(self.embed(rows[:, :-1]))
            return functional.cross_entropy(
                self.read_out(hidden).flatten(0, 1), rows[:, 1:].flatten()
            )

    def tensor(texts) -> torch.Tensor:
        return torch.from_numpy(
            np.frombuffer(b"".join(bytes(t) for t in texts), np.uint8)
            .reshape(len(texts), cell["size"])
            .astype(np.int64)
        )

    began = time.monotonic()
    dataset = forebay.open(f"{BUCKET}/text.parquet", url=cell["url"])
    loader = dataset.loader(batch_size=cell["batch"], shuffle=cell["shuffle"], seed=cell["seed"])
    model, steps = Model(), len(dataset) // cell["batch"]
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["rate"])
    for step, rows in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = cell["rate"] * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        loss = model.loss(tensor([row["text"] for row in rows]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    held_out = Path(cell["held_out"]).read_bytes()
    rows = tensor([held_out[i : i + cell["size"]] for i in range(0, len(held_out), cell["size"])])
    with torch.no_grad():
        loss = sum(model.loss(part).item() * len(part) for part in rows.split(64)) / len(rows)
    return {"perplexity": math.exp(loss), "seconds": time.monotonic() - began}


def run_all(trainings: list[dict], beside: int) -> list[dict]:
    """Each training in a process of its own, `beside` at a time."""

    def trained(training: dict) -> dict:
        what = f"{training['shuffle']:<12} seed {training['seed']}"
        done = cells.measured(__file__, training, what)
        print(f"  {what}: {done['perplexity']:.4f}", flush=True)
        return done

    with ThreadPoolExecutor(beside) as pool:
        return list(pool.map(trained, trainings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384, help="passages to train on")
    parser.add_argument("--size", type=int, default=128, help="bytes of a passage")
    parser.add_argument("--block", type=int, default=16, help="rows of a row group")
    parser.add_argument(
        "--buffer", type=int, default=512, help="rows of the buffers of `window` and `block`"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4e-3, help="of learning, at its highest")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beside", type=int, default=2, help="trainings at a time")
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    cells.add_argument(parser)
    args = parser.parse_args()
    cells.work_if_asked(args, train)
    if args.buffer % args.block or args.seeds < 2:
        parser.error("--buffer is a number of blocks, and --seeds at least 2: a spread needs two")

    import pyarrow
    import pyarrow.parquet

    use_own_environment()
    orders = {
        "none": "none",
        "window": f"window:{args.buffer}",
        "block": f"block:{args.buffer // args.block}",
        "full": "full",
    }
    settings = {
        "rows": f"{args.rows:,} of {args.size} bytes",
        "block": args.block,
        "buffer": f"{args.buffer} rows",
        "seeds": args.seeds,
        "steps": args.rows // args.batch,
    }
    report = Report(
        "Perplexity by the order of training, one pass over a dictionary", COLUMNS, settings
    )
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        files = directory / "files"
        files.mkdir()
        texts = passages(args.rows * HELD_OUT // (HELD_OUT - 1), args.size)
        held_out = directory / "held-out"
        held_out.write_bytes(b"".join(texts[HELD_OUT // 2 :: HELD_OUT]))
        rows = [t for i, t in enumerate(texts) if i % HELD_OUT != HELD_OUT // 2]
        pyarrow.parquet.write_table(
            pyarrow.table({"text": pyarrow.array(rows, pyarrow.binary())}),
            files / "text.parquet",
            row_group_size=args.block,
        )
        common = {
            "size": args.size,
            "batch": args.batch,
            "rate": args.rate,
            "held_out": str(held_out),
        }
        with Node(directory, "node", files=files) as node:
            trainings = [
                common | {"url": node.unix_url, "shuffle": s, "seed": seed}
                for seed in range(1, args.seeds + 1)
                for s in orders.values()
            ]
            outcomes = run_all(trainings, args.beside)
    by_order = {
        name: [o for o, c in zip(outcomes, trainings, strict=True) if c["shuffle"] == s]
        for name, s in orders.items()
    }
    values = {name: [o["perplexity"] for o in of] for name, of in by_order.items()}
    report.heading(f"after {args.rows // args.batch} steps of {args.batch} rows")
    for name, of in by_order.items():
        row = {
            "name": orders[name],
            "perplexity": statistics.mean(values[name]),
            "spread": statistics.stdev(values[name]),
            "seconds": statistics.mean(o["seconds"] for o in of),
        }
        row |= {
            "of_each_seed": values[name],
            "over_full": row["perplexity"] - statistics.mean(values["full"]),
        }
        row["closed"] = (
            100
            * (statistics.mean(values["none"]) - row["perplexity"])
            / (statistics.mean(values["none"]) - statistics.mean(values["full"]))
        )
        if name == "block":
            row["goals"] = [goal("closed", CLOSED)]
        report.add(row)
    print(
        "\n  the paper, a 160 M model on wikitext-103: none +1.59, window +0.63, block"
        " +0.15 over full"
    )
    report.save(args.save)


if __name__ == "__main__":
    main()
