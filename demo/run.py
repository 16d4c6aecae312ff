#!/usr/bin/env python3
"""Trains a small model from a bucket that is far away: directly, and through Forebay. `make demo`
runs it.

Everything is on this machine: the bucket is an S3 server on loopback, put at a distance by `forebay
distance`, which also counts what reached it.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

# The training step has one thread, before NumPy starts more: the servers need the other cores.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import data  # noqa: E402
import model  # noqa: E402
import numpy as np  # noqa: E402
import readers  # noqa: E402
import show  # noqa: E402
import train  # noqa: E402
from servers import KEYS, Bucket, Distance, Failed, Forebay  # noqa: E402

CACHE_SIZE = "2GiB"
ORDERS = {
    "Forebay": "",
    "Forebay full": ", full random order",
    "Forebay block": ", in blocks",
}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="make demo ARGS=…",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--rtt",
        type=float,
        default=20,
        help="round trip to the bucket, in ms (default: %(default)s)",
    )
    p.add_argument(
        "--first-byte",
        type=float,
        default=20,
        help="what the bucket thinks before each answer, in ms (default: %(default)s)",
    )
    p.add_argument(
        "--rate",
        type=float,
        default=100,
        help="bandwidth to and from the bucket, in MiB/s (default: %(default)s)",
    )
    p.add_argument(
        "--step",
        type=float,
        default=0,
        help="let each training step take this long at least, in ms, as on a GPU with more to do"
        " (default: what it takes)",
    )
    p.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="epochs for each way of reading (default: %(default)s)",
    )
    p.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="where picture and numbers go (default: %(default)s)",
    )
    p.add_argument(
        "--stream",
        action="store_true",
        help="let the node push the shards in blocks (a push stream), instead of pulling them",
    )
    p.add_argument(
        "--orders",
        type=Path,
        help="also write the order in which each way gave the samples there, for `forebay"
        " shuffle-report --order`",
    )
    p.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/forebay", help=argparse.SUPPRESS
    )
    p.add_argument(
        "--forebay",
        type=Path,
        default=Path(sys.executable).parent / "forebay",
        help=argparse.SUPPRESS,
    )
    args = p.parse_args()
    if args.epochs < 2:
        p.error("--epochs: the first epoch is the cold one, so 2 at least")
    return args


def client(address: str):
    """boto3, to upload the data and to sign URLs."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=f"http://{address}",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=KEYS["AWS_REGION"],
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )


def prepare(bucket: Bucket, training: list) -> None:
    """Puts the data into the bucket, without the distance, which begins when training does."""
    began, shown = time.monotonic(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if sys.stdout.isatty() and (time.monotonic() - shown > 0.1 or done == total):
            shown = time.monotonic()
            print(f"\r  bucket: {done:,} of {total:,} objects in place", end="", flush=True)

    data.upload(client(bucket.address), training, progress)
    size = sum(sample.size for sample in training)
    print(
        f"\r  bucket: {len(training):,} objects ({size / 1e6:.0f} MB), and the same in"
        f" {data.SHARD_COUNT} tar shards ({time.monotonic() - began:.1f} s)"
    )


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = args.cache / "demo"
    training, held_out = data.load(home / "clips")
    print(f"  data:   {data.NAME}\n          {data.LICENCE}")
    print(
        f"  task:   which language is spoken; {len(training):,} recordings to train from,"
        f" {len(held_out)} with other phrases held out; {model.BACKEND}"
    )
    print(
        "          (each language has one or two speakers, so in part it is the speaker"
        " that is recognized: the data is real, the task is easy)"
    )
    answers = (
        np.stack([model.features(s.path.read_bytes()) for s in held_out]),
        readers.labels_of(held_out),
    )
    where = (
        f"first byte after {args.rtt + args.first_byte:g} ms ({args.rtt:g} ms round trip),"
        f" {args.rate:g} MiB/s"
    )

    groups: dict[str, list] = {}
    with contextlib.ExitStack() as running:

        def start(server):
            running.callback(server.stop)
            return server

        bucket = start(Bucket(args.cache / "bin/versitygw", home / "bucket", home / "logs"))
        prepare(bucket, training)
        distance = start(
            Distance(args.forebay, bucket, args.rtt, args.first_byte, args.rate, home / "logs")
        )

        def empty(name: str) -> Forebay:
            """A node whose cache is empty."""
            return start(
                Forebay(
                    args.forebay,
                    distance.address,
                    (data.OBJECTS, data.SHARDS),
                    home / f"cache-{name}",
                    CACHE_SIZE,
                    home / "logs" / name,
                )
            )

        forebay, another = empty("full"), empty("block")
        print(
            f"  origin: versitygw at a distance: {where}; the caches of both Forebay nodes are"
            " empty\n"
        )
        s3 = client(distance.address)
        shards = sorted({sample.shard for sample in training})
        ways = [
            (
                "objects",
                readers.DirectObjects(
                    s3, distance.address, data.OBJECTS, [s.key for s in training]
                ),
                None,
            ),
            ("objects", readers.Forebay(forebay.url, from_shards=False), forebay.hits_and_misses),
            ("shards", readers.DirectShards(s3, distance.address, data.SHARDS, shards), None),
            ("shards", readers.Forebay(forebay.url, from_shards=True), forebay.hits_and_misses),
            ("shards", readers.ForebayShards(another.url, args.stream), None),
        ]
        rows = data.rows(training) if args.orders else {}
        with show.Screen() as screen:
            for what, reader, cache in ways:
                orders: list[list[int]] = []

                def look(epoch: int, recordings: list, into=orders) -> None:
                    into.extend([] for _ in range(epoch - len(into)))
                    into[epoch - 1] += [rows[zlib.crc32(r)] for r in recordings]

                groups.setdefault(what, []).append(
                    train.run(
                        what,
                        reader,
                        args.epochs,
                        training,
                        answers,
                        distance.counters,
                        cache,
                        screen.show,
                        args.step / 1000,
                        look if args.orders else None,
                    )
                )
                if args.orders:
                    args.orders.mkdir(parents=True, exist_ok=True)
                    name = f"{what} {reader.name}".replace(",", "").replace(" ", "-").lower()
                    lines = [f"{row}\n" for order in orders[:2] for row in order]
                    (args.orders / f"{name}.txt").write_text("".join(lines))

    finish(args, groups, where, len(training))


def finish(args: argparse.Namespace, groups: dict, where: str, samples: int) -> None:
    megabytes = lambda way: sum(e.origin_bytes for e in way) / 1e6  # noqa: E731
    print()
    for what, (direct, *ways) in groups.items():
        for through in ways:
            cold, warm = through[0], through[-1]
            print(
                f"  {show.TITLES[what]}{ORDERS[cold.path]}:"
                f" {direct[-1].samples_per_s:,.0f} samples/s direct,"
                f" {cold.samples_per_s:,.0f} through Forebay cold,"
                f" {warm.samples_per_s:,.0f} warm;"
                f" the step waited {direct[-1].waited:.0%}, {cold.waited:.0%},"
                f" {warm.waited:.0%} of the time;"
                f" the bucket sent {megabytes(direct):,.0f} MB direct,"
                f" {megabytes(through):,.0f} MB with Forebay"
            )
    _, full, block = groups["shards"]
    print(
        "  Which order for shards? In blocks, the first epoch trains while they come"
        f" ({block[0].waited:.0%} waiting).\n  A fully random batch is from all over them, so the"
        f" first waits for nearly all ({full[0].waited:.0%}).\n  Take blocks"
        " (forebay.open_shards) where shards are new to the node, any order once they are there."
    )
    conditions = (
        f"One machine, {os.cpu_count()} cores, for all of it: S3 server (versitygw) behind"
        f" a proxy: {where}. {samples:,} WAV files, 42 KB on average; batches of"
        f" {readers.BATCH}; "
        f"decoding and training in one thread ({model.BACKEND}).\n"
        f"Direct: {readers.WORKERS} requests at a time, as a DataLoader with"
        f" {readers.WORKERS} workers makes them; shards streamed whole, through a shuffle"
        f" buffer of {readers.SHUFFLE_BUFFER}.\n"
        f"Forebay: one GetBatch per batch in fully random order, {readers.PREFETCH} ahead;"
        f" blocks: forebay.open_shards, {readers.WORKERS} shards side by side,"
        f" the next {readers.PART_BYTES / 2**20:g} MiB of each permuted together;\nwarm: local"
        " disk, in the page cache."
    )
    out = args.out / "forebay-demo.png"
    show.picture(groups, conditions, f"Recordings: {data.NAME.split(':')[0]}, {data.LICENCE}.", out)
    numbers = {
        "conditions": conditions,
        "epochs": [e.as_dict() for ways in groups.values() for way in ways for e in way],
    }
    out.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"\n  picture: {out} (and .svg; the numbers: .json)")
    print(
        "  With your own bucket: `forebay serve --origin s3://YOUR-BUCKET --cache"
        " /nvme/forebay:500GB`, and in the training script:"
    )
    print(
        '      forebay.Client("http://127.0.0.1:8080").batch(keys, bucket="YOUR-BUCKET"),'
        ' or any S3 client with endpoint_url="http://127.0.0.1:8080"'
    )


def to_its_end(demo, command: str) -> None:
    """Runs a demo, and says in a few words why it ended early, if it did."""
    try:
        demo()
    except KeyboardInterrupt:
        print("\nstopped; the servers are down", file=sys.stderr)
        sys.exit(130)
    except Failed as failure:
        sys.exit(
            f"\nThe demo failed: {failure}\n  What to do: run `{command}` again; `make"
            " clean-cache` first starts from nothing"
        )


if __name__ == "__main__":
    to_its_end(main, "make demo")
