"""How each client reads: one function per client, which yields how many entries it has received,
again and again.

Run as a program it is one cell of a table, in a process of its own, so that its peak of memory and
its imports are its own: it reads the cell as JSON from standard input and prints one JSON line.
Each reader checks the size of every entry; the bytes of the first batch are compared before the
clock runs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import usage
from nodes import BUCKET, CREDENTIALS, REGION, as_entry, content

FLIGHT = 32


class Wrong(Exception):
    """What was received does not match the request."""


def check(sizes, size: int) -> int:
    """Counts the entries, all of which must have this size."""
    sizes = list(sizes)
    if any(s != size for s in sizes):
        raise Wrong(
            f"an entry of {next(s for s in sizes if s != size)} bytes where {size} were asked for"
        )
    return len(sizes)


def lists(cell: dict, entries: bool = False) -> Iterator[list]:
    """Batches of names, or of entries, endlessly, in an order that the seed fixes."""
    order = random.Random(cell["seed"])
    names = [tuple(n) if isinstance(n, list) else n for n in cell["names"]]
    if entries:
        names = [as_entry(n) for n in names]
    while True:
        if not cell.get("in_order"):
            order.shuffle(names)
        for first in range(0, len(names) - cell["batch"] + 1, cell["batch"]):
            yield names[first : first + cell["batch"]]


def forebay_batches(cell: dict) -> Iterator[int]:
    """One process, several batches in flight, each entry a NumPy view of the received buffer."""
    import forebay
    import numpy as np

    client, size = forebay.Client(cell["url"]), cell["size"]
    for batch in client.batches(lists(cell, entries=True), prefetch=cell["prefetch"]):
        arrays = [np.frombuffer(item, dtype=np.uint8) for item in batch]
        yield check((a.size for a in arrays), size)


def forebay_loader(cell: dict) -> Iterator[int]:
    """The map-style dataset under PyTorch's DataLoader with forked workers, default collation:
    tensors of a batch are copied into new shared memory.
    """
    import torch.utils.data

    return loaded(cell, torch.utils.data.DataLoader)


def forebay_ring(cell: dict) -> Iterator[int]:
    """The same under the package's DataLoader: workers receive batches into shared memory that is
    used again.
    """
    import forebay.torch

    return loaded(cell, forebay.torch.DataLoader)


def loaded(cell: dict, data_loader) -> Iterator[int]:
    import forebay
    import forebay.torch
    import torch

    torch.set_num_threads(1)
    names = [as_entry(tuple(n) if isinstance(n, list) else n) for n in cell["names"]]
    dataset = forebay.torch.MapDataset(forebay.Client(cell["url"]), names)
    options = {
        "num_workers": cell["workers"],
        "multiprocessing_context": "fork",
        "persistent_workers": True,
        "drop_last": True,
    }
    loader = data_loader(
        dataset, batch_size=cell["batch"], shuffle=not cell.get("in_order"), **options
    )
    while True:
        for tensor in loader:
            if tensor.shape[1] != cell["size"]:
                raise Wrong(f"a tensor of shape {tuple(tensor.shape)}")
            yield tensor.shape[0]


def boto3_gets(cell: dict) -> Iterator[int]:
    get = boto3_get(cell["url"])
    for names in lists(cell):
        yield check((len(get(n)) for n in names), cell["size"])


def boto3_get(url: str):
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", endpoint_url=url, config=Config(s3={"addressing_style": "path"}))
    return lambda name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read()


def s3torch_dataset(url: str, names: list[str], transform):
    from s3torchconnector import S3ClientConfig, S3MapDataset

    uris = [f"s3://{BUCKET}/{n}" for n in names]
    return S3MapDataset.from_objects(
        uris,
        region=REGION,
        endpoint=url,
        transform=transform,
        s3client_config=S3ClientConfig(force_path_style=True),
    )


def whole(reader) -> bytes:
    return reader.read()


def s3torch_map(cell: dict) -> Iterator[int]:
    dataset = s3torch_dataset(cell["url"], cell["names"], whole)
    index = {name: i for i, name in enumerate(cell["names"])}
    for names in lists(cell):
        yield check((len(dataset[index[n]]) for n in names), cell["size"])


def obstore_of(url: str):
    from obstore.store import S3Store

    keys = {
        "access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    return S3Store(
        BUCKET,
        endpoint=url,
        region=REGION,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
        **keys,
    )


def obstore_gather(cell: dict) -> Iterator[int]:
    """Asynchronous GETs, 32 in flight."""
    import obstore

    store, flight = obstore_of(cell["url"]), asyncio.Semaphore(FLIGHT)

    async def one(name: str) -> int:
        async with flight:
            return len(await (await obstore.get_async(store, name)).bytes_async())

    async def batch(names: list[str]) -> list[int]:
        return await asyncio.gather(*map(one, names))

    with asyncio.Runner() as runner:
        for names in lists(cell):
            yield check(runner.run(batch(names)), cell["size"])


def s3fs_cat(cell: dict) -> Iterator[int]:
    """`cat` of a list of names, which s3fs reads concurrently."""
    import s3fs

    keys = {"key": CREDENTIALS["AWS_ACCESS_KEY_ID"], "secret": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
    fs = s3fs.S3FileSystem(endpoint_url=cell["url"], **keys)
    for names in lists(cell):
        yield check(map(len, fs.cat([f"{BUCKET}/{n}" for n in names]).values()), cell["size"])


def aistore_batch(cell: dict) -> Iterator[int]:
    """The published AIStore client's GetBatch."""
    from aistore.sdk import Client

    client = Client(cell["url"])
    bucket = client.bucket(BUCKET, provider="s3")
    for names in lists(cell):
        yield check(
            (len(data) for _, data in client.batch(names, bucket=bucket).get()), cell["size"]
        )


READERS = {
    f.__name__: f
    for f in (
        forebay_batches,
        forebay_loader,
        forebay_ring,
        boto3_gets,
        s3torch_map,
        obstore_gather,
        s3fs_cat,
        aistore_batch,
    )
}


def verify(cell: dict) -> None:
    """Compares the first batch's bytes, fetched through the package, with what was written."""
    import forebay

    names = next(lists(cell))
    for item, name in zip(
        forebay.Client(cell["url"]).batch([as_entry(n) for n in names]), names, strict=True
    ):
        written = name if isinstance(name, str) else f"{name[0].rsplit('/', 1)[0]}/{name[1]}"
        if bytes(item) != content(written, cell["size"]):
            raise Wrong(f"the bytes of {name} are not those that were written")


def measure(cell: dict) -> dict:
    """Entries per second in a window that begins after a ramp, and what they cost."""
    own, server = os.getpid(), cell.get("server_pid")
    verify(cell)
    counts = READERS[cell["reader"]](cell)
    ramp_ends = time.monotonic() + cell["ramp_s"]
    # At least two batches: imports, connections and workers are not measured.
    for n in itertools.count(1):
        next(counts)
        if n >= 2 and time.monotonic() >= ramp_ends:
            break
    for pid in filter(None, (own, server)):
        usage.forget_peak(pid)
    cpu = {pid: usage.cpu_seconds(pid) for pid in (own, server) if pid}
    began, entries = time.monotonic(), 0
    while (seconds := time.monotonic() - began) < cell["seconds"]:
        entries += next(counts)
    seconds = time.monotonic() - began
    per_entry = {
        pid: (usage.cpu_seconds(pid) - before) / entries * 1e6 for pid, before in cpu.items()
    }
    return {
        "entries": entries,
        "seconds": seconds,
        "entries_per_s": entries / seconds,
        "mib_per_s": entries * cell["size"] / seconds / (1 << 20),
        "client_cpu_us": per_entry[own],
        "server_cpu_us": per_entry.get(server),
        "client_peak_mib": usage.peak_bytes(own) / (1 << 20),
        "server_peak_mib": usage.peak_bytes(server) / (1 << 20) if server else None,
    }


def run_cell(cell: dict) -> dict:
    """`measure` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cell),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        sys.exit(f"{cell['reader']} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))), flush=True)
    # Without the interpreter's orderly end, which would wait for workers and for requests in
    # flight.
    os._exit(0)
