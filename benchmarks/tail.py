"""Latency of batches whose objects come from an origin with a long-tailed service time, after a
paper's table on GetBatch (Table 2).

Each request to the origin waits for a time from a log-normal distribution with a fixed seed. Rows
differ in who is asked (the origin itself, or a node whose cache has none of the objects and, at the
end, all of them) and how: one GET after the other, 32 GETs in flight, or one GetBatch. No object is
requested twice from a cold node. *Batch* is the time for all objects of a batch; *object* is the
time of one GET, and for GetBatch its time divided by its entries, the effective time of one object.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nodes import Distance, Node, as_entry, read_all, use_own_environment, write_objects
from readers import FLIGHT, check, obstore_of
from report import Report

SHARES = (50, 95, 99)
COLUMNS = (
    [("name", "", 36)]
    + [
        (f"{what}_p{share}_ms", f"{what} P{share}", 12)
        for what in ("batch", "object")
        for share in SHARES
    ]
    + [("batches", "batches", 9)]
)

# A batch's names to the milliseconds of each object.
Fetch = Callable[[list[str]], list[float]]


def percentiles(values: list[float]) -> dict[int, float]:
    """The smallest value that this percentage of the values does not exceed."""
    values = sorted(values)
    return {share: values[max(0, -(-len(values) * share // 100) - 1)] for share in SHARES}


def gets(runner: asyncio.Runner, url: str, flight: int, size: int) -> Fetch:
    import obstore

    store = obstore_of(url)

    async def one(name: str, slots: asyncio.Semaphore) -> float:
        async with slots:
            began = time.monotonic()
            data = await (await obstore.get_async(store, name)).bytes_async()
            check([len(data)], size)
            return (time.monotonic() - began) * 1000

    async def batch(names: list[str]) -> list[float]:
        slots = asyncio.Semaphore(flight)
        return await asyncio.gather(*(one(n, slots) for n in names))

    return lambda names: runner.run(batch(names))


def get_batch(url: str, size: int) -> Fetch:
    import forebay

    client = forebay.Client(url)

    def fetch(names: list[str]) -> list[float]:
        began = time.monotonic()
        check((len(item) for item in client.batch([as_entry(n) for n in names])), size)
        return [(time.monotonic() - began) * 1000 / len(names)] * len(names)

    return fetch


def measured(name: str, fetch: Fetch, batches: list[list[str]]) -> dict:
    times, objects = [], []
    for names in batches:
        began = time.monotonic()
        objects += fetch(names)
        times.append((time.monotonic() - began) * 1000)
    row = {"name": name, "batches": len(times)}
    for what, values in (("batch", times), ("object", objects)):
        row |= {f"{what}_p{share}_ms": value for share, value in percentiles(values).items()}
        row[f"{what}_mean_ms"] = sum(values) / len(values)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--median-ms", type=float, default=10.0, help="of the origin's service time"
    )
    parser.add_argument(
        "--sigma",
        type=float,
        default=1.0,
        help="of its logarithm: with 1 the 99th percentile is ten times the median",
    )
    parser.add_argument("--size", type=int, default=100 << 10, metavar="BYTES")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=40, help="of each row")
    parser.add_argument(
        "--sequential",
        type=int,
        default=6,
        help="batches of the rows with one GET at a time, which take long",
    )
    parser.add_argument(
        "--hedge-percent",
        type=int,
        default=5,
        help="second GETs for 100, in the row of the node that sends them",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    use_own_environment()
    settings = {
        "batch": f"{args.batch} × {args.size} bytes",
        "service time": f"median {args.median_ms} ms, sigma {args.sigma}",
        "seed": args.seed,
    }
    report = Report("A service time with a long tail", COLUMNS, settings)
    with tempfile.TemporaryDirectory(prefix="fb-bench-") as directory:
        directory = Path(directory)
        cold = args.sequential + 2 * args.batches
        names = write_objects(directory / "files", "objects", cold * args.batch, args.size)
        batches = [names[i : i + args.batch] for i in range(0, len(names), args.batch)]
        one_by_one, in_flight, get_batches = (
            batches[: args.sequential],
            batches[args.sequential :][: args.batches],
            batches[-args.batches :],
        )
        with (
            Node(directory, "origin", files=directory / "files") as origin,
            asyncio.Runner() as runner,
        ):
            read_all(origin.unix_url, names)

            def far(name: str) -> Distance:
                # A proxy for each row: all see the same sequence of waits.
                return Distance(
                    directory,
                    name,
                    origin.address,
                    first_byte_ms=args.median_ms,
                    sigma=args.sigma,
                    seed=args.seed,
                )

            report.heading(f"P50, P95 and P99 in ms: of {args.batch} objects, and of one")
            for flight, some, how in (
                (1, one_by_one, "one GET at a time"),
                (FLIGHT, in_flight, f"{FLIGHT} GETs in flight"),
            ):
                with far(f"far-{flight}") as distance:
                    report.add(
                        measured(
                            f"origin, {how}", gets(runner, distance.url, flight, args.size), some
                        )
                    )
            hedged = f"GetBatch, hedged ({args.hedge_percent} %)"
            with (
                far("far-hedged") as distance,
                Node(
                    directory,
                    "node-hedged",
                    endpoint=distance.url,
                    hedge_percent=args.hedge_percent,
                ) as node,
            ):
                # What counts as slow is learnt from the first two batches, which are not counted.
                fetch = get_batch(node.url, args.size)
                for some in in_flight[:2]:
                    fetch(some)
                report.add(measured(f"forebay cold, {hedged}", fetch, get_batches))
            for flight, some, how in (
                (1, one_by_one, "one GET at a time"),
                (FLIGHT, in_flight, f"{FLIGHT} GETs in flight"),
                (0, get_batches, "GetBatch"),
            ):
                with (
                    far(f"far-cold-{flight}") as distance,
                    Node(directory, f"node-{flight}", endpoint=distance.url) as node,
                ):
                    fetch = (
                        gets(runner, node.url, flight, args.size)
                        if flight
                        else get_batch(node.url, args.size)
                    )
                    report.add(measured(f"forebay cold, {how}", fetch, some))
                    if flight:
                        continue
                    report.add(
                        measured(
                            "forebay warm, one GET at a time",
                            gets(runner, node.url, 1, args.size),
                            some,
                        )
                    )
                    report.add(
                        measured(
                            f"forebay warm, {FLIGHT} GETs in flight",
                            gets(runner, node.url, FLIGHT, args.size),
                            some,
                        )
                    )
                    report.add(measured("forebay warm, GetBatch", fetch, some))
    report.save(args.save)


if __name__ == "__main__":
    main()
