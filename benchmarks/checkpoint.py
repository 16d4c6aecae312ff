"""Checkpoints of PyTorch jobs beside other ways to write and read them, with the bucket far away.

A job of 1, 2 or 4 ranks (processes over gloo) saves a model whose tensors are sharded over the
ranks, and restores it. *Stands still* is the time in which the step waits; *durable* is the time
from its beginning until everything is in the bucket; *cold* restores with nothing on this machine,
*warm* again afterwards, when the kernel has the files in memory, and *disk* after it was told to
forget them. Rivals have the checkpoint in the bucket when they return, so their step stands still
until then; they keep nothing here, so *warm* is the link again.

The bucket is a node over files in memory, because one that is far away would have other disks.
*DCP to this disk* is what PyTorch itself makes of the same state in a directory: it never reaches
the bucket. *DCP alone* restores from there with a reader that reads no tensor: what is left is
PyTorch's own work, and its share *of a read* is what a restore reaches that reads as fast as the
ceiling after that.

What is restored is a model that was made: its tensors were written to before. Ceilings are
measured in the same minute: writing a file of the same size to the same disk and syncing it, one
thread that reads it into memory that was written to before, from the kernel's memory and from the
disk (which begins as long after the kernel has forgotten the file as a job takes to begin), and the
link's own rate. *Warm* and *disk* are the best of three, as those reads are: memory
that a machine has just taken back is slow at first.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from nodes import BUCKET, REGION, Distance, Node, use_own_environment
from report import Report, goal

GB = 1000**3
MIB = 1 << 20
TENSORS = 16
ROW_BYTES = 4096 * 4
ALIGNED_BYTES = 64
#: About as long as a job takes to begin. What is free by then, a virtual machine may have given
#: back to its host, and is slow to get again: for a restore, and so for the read beside it.
BEGIN_SECONDS = 4.0
COLUMNS = [
    ("name", "", 38),
    ("ranks", "ranks", 6),
    ("gb", "GB", 6),
    ("still_s", "stands still", 13),
    ("durable_s", "durable", 9),
    ("cold_s", "cold", 8),
    ("warm_s", "warm", 8),
    ("disk_s", "disk", 8),
    ("still_share", "of the disk", 12),
    ("durable_share", "of the link", 12),
    ("warm_share", "of a read", 10),
    ("disk_share", "of a disk's", 12),
]
WAYS = {
    "forebay": "forebay, DCP",
    "local": "DCP to this disk, not the bucket",
    "connector": "s3torchconnector, DCP",
    "fsspec": "fsspec (s3fs), DCP",
    "boto3": "torch.save and boto3",
}


def writer_and_reader(way: str, url: str, name: str, threads: int):
    """Those of torch.distributed.checkpoint, each writer with what waits until it is durable."""
    path = f"s3://{BUCKET}/{name}"
    if way == "forebay":
        import forebay
        import forebay.checkpoint

        client = forebay.Client(url, timeout=600)
        writer = forebay.checkpoint.StorageWriter(path, client=client, threads=threads)
        return writer, forebay.checkpoint.StorageReader(path, client=client)
    if way == "local":
        from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

        # Their URL is a directory.
        return FileSystemWriter(url, thread_count=threads), FileSystemReader(url)
    if way == "alone":
        from torch.distributed.checkpoint import FileSystemReader
        from torch.futures import Future

        class ReadsNothing(FileSystemReader):
            def read_data(self, plan, planner):
                done = Future()
                done.set_result(None)
                return done

        return None, ReadsNothing(url)
    if way == "connector":
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        config = S3ClientConfig(force_path_style=True)
        client = S3Client(REGION, endpoint=url, s3client_config=config)
        writer, reader = S3StorageWriter(REGION, path), S3StorageReader(REGION, path)
        writer.fs._client = reader.fs._client = client
        return writer, reader
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter

    options = {"client_kwargs": {"endpoint_url": url}, "use_listings_cache": False}
    writer = FsspecWriter(path, thread_count=threads, sync_files=False, **options)
    return writer, FsspecReader(path, **options)


def boto3_of(url: str):
    import boto3
    from botocore.config import Config

    return boto3.client("s3", endpoint_url=url, config=Config(s3={"addressing_style": "path"}))


def rank_main(spec: dict) -> None:
    """What one rank does; rank 0 prints the times."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, world, way = spec["rank"], spec["ranks"], spec["way"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    device = spec["device"]
    mesh = init_device_mesh(device, (world,))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = max(world, round(spec["bytes"] / TENSORS / ROW_BYTES / world) * world)

    def state(fill: bool) -> dict:
        found = {}
        for i in range(TENSORS):
            # Of a model that was made, as those are that a job restores.
            local = torch.zeros(rows // world, ROW_BYTES // 4, device=device)
            local.fill_(1.0)
            if fill:
                generator = torch.Generator(device).manual_seed(1000 * i + rank)
                # Bytes that no layer could make fewer.
                local.view(torch.int32).random_(generator=generator)
            found[f"layer{i}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return found

    def timed(work) -> float:
        wait()
        dist.barrier()
        began = time.monotonic()
        work()
        wait()
        dist.barrier()
        return time.monotonic() - began

    times: dict[str, float] = {}
    if spec["what"] == "save":
        wanted = state(True)
        if way == "boto3":
            s3 = boto3_of(spec["url"])

            def save() -> None:
                out = io.BytesIO()
                torch.save({k: v.to_local() for k, v in wanted.items()}, out)
                out.seek(0)
                s3.upload_fileobj(out, BUCKET, f"{spec['name']}/rank{rank}.pt")

            times["still_s"] = times["durable_s"] = timed(save)
        else:
            writer, _ = writer_and_reader(way, spec["url"], spec["name"], spec["threads"])
            began = time.monotonic()
            times["still_s"] = timed(lambda: dcp.save(wanted, storage_writer=writer))
            if way == "forebay" and rank == 0:
                writer.handle.wait(3600)
            times["durable_s"] = time.monotonic() - began
    else:
        found = state(False)
        if way == "boto3":
            s3 = boto3_of(spec["url"])

            def load() -> None:
                taken = io.BytesIO()
                s3.download_fileobj(BUCKET, f"{spec['name']}/rank{rank}.pt", taken)
                taken.seek(0)
                read = torch.load(taken, weights_only=True)
                for key, value in read.items():
                    found[key].to_local().copy_(value)
        else:
            _, reader = writer_and_reader(way, spec["url"], spec["name"], spec["threads"])

            def load() -> None:
                dcp.load(found, storage_reader=reader)

        times["load_s"] = timed(load)
        wanted = state(True) if way != "alone" else {}
        for key, value in wanted.items():
            assert torch.equal(
                found[key].to_local().view(torch.int32), value.to_local().view(torch.int32)
            ), f"{key} was not restored"
    dist.barrier()
    if rank == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def job(**spec) -> dict:
    """Runs the ranks of a job; rank 0's times."""
    spec["port"] = free_port()
    processes = []
    for rank in range(spec["ranks"]):
        command = [sys.executable, __file__, "--rank-of", json.dumps(spec | {"rank": rank})]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    outputs = [p.communicate()[0] for p in processes]
    if any(p.returncode for p in processes):
        sys.exit(f"a rank of {spec['way']} failed: see its message above")
    return json.loads(outputs[0].splitlines()[-1])


def forget(place: Path) -> None:
    """Has the kernel forget what it has of the files there in memory."""
    for path in [place] if place.is_file() else place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ceilings(directory: Path, size: int) -> tuple[float, float, float]:
    """Seconds to write so much to the disk and sync it, and to read it again, from memory and from
    the disk.
    """
    path, piece = directory / "ceiling", os.urandom(8 * MIB)
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, len(piece)):
            file.write(piece[: size - at])
        os.fsync(file.fileno())
    wrote = time.monotonic() - began
    # Into memory that was written to before and is aligned, as the tensors are that are restored.
    # The best of three.
    reads: dict[bool, list[float]] = {False: [], True: []}
    memory = np.ones(size + ALIGNED_BYTES, np.uint8)
    target = memoryview(memory[-memory.ctypes.data % ALIGNED_BYTES :])[:size]
    for from_disk in (False, True) * 3:
        if from_disk:
            forget(path)
            time.sleep(BEGIN_SECONDS)
        began, at = time.monotonic(), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(target[at : at + 8 * MIB]):
                at += count
        reads[from_disk].append(time.monotonic() - began)
    path.unlink()
    return wrote, min(reads[False]), min(reads[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 4.0], metavar="GB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rtt", type=float, default=30.0, help="ms to the bucket and back")
    parser.add_argument("--rate", default="100MiB", help="of the link, in a second")
    parser.add_argument("--threads", type=int, default=2, help="files of a rank at a time")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the tensors")
    parser.add_argument("--directory", type=Path, help="where the disk is that is measured")
    parser.add_argument(
        "--bucket",
        type=Path,
        default=Path("/dev/shm"),
        metavar="DIRECTORY",
        help="where the bucket's files are: in memory, with room for twice a checkpoint",
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    use_own_environment()
    if args.rank_of:
        rank_main(json.loads(args.rank_of))
        return
    if not args.rate.endswith("MiB"):
        parser.error("--rate is a number and MiB, as in 100MiB")
    link = float(args.rate.removesuffix("MiB")) * MIB
    settings = {"distance": f"{args.rtt} ms, {args.rate}/s", "threads": args.threads}
    settings["device"] = args.device
    report = Report("Checkpoints", COLUMNS, settings)
    for gb in args.sizes:
        size = round(gb * GB)
        cache = f"{max(1, round(4 * gb))}GiB"
        for ranks in args.ranks:
            report.heading(f"{gb} GB, {ranks} ranks; seconds")
            with tempfile.TemporaryDirectory(prefix="fb-bench-", dir=args.directory) as at:
                directory = Path(at)
                wrote, read, from_disk = ceilings(directory, size)
                row = {"name": "ceiling: a file, and the link", "ranks": ranks, "gb": gb}
                row |= {"still_s": wrote, "durable_s": size / link}
                report.add(row | {"warm_s": read, "disk_s": from_disk})
                for way in args.ways:
                    row = measured(directory, way, ranks, size, cache, args)
                    alone = row.pop("alone_s", None)
                    row |= {
                        "gb": gb,
                        "still_share": wrote / row["still_s"],
                        "warm_share": read / row["warm_s"],
                    }
                    if "disk_s" in row:
                        row["disk_share"] = from_disk / row["disk_s"]
                    if "durable_s" in row:
                        row["durable_share"] = size / link / row["durable_s"]
                    if way == "forebay":
                        row["goals"] = [
                            goal("still_share", 0.5),
                            goal("durable_share", 0.9),
                            goal("warm_share", 0.8),
                            goal("disk_share", 0.8),
                        ]
                    report.add(row)
                    if alone is not None:
                        row = {"name": "DCP alone, no tensor is read", "ranks": ranks, "gb": gb}
                        report.add(row | {"warm_s": alone, "warm_share": read / (read + alone)})
    report.save(args.save)


def best(without: Path | None = None, **spec) -> float:
    """Seconds of the fastest restore of three; the kernel forgets the files of ``without`` before
    each.
    """
    times = []
    for _ in range(3):
        if without is not None:
            forget(without)
        times.append(job(what="load", **spec)["load_s"])
    return min(times)


def measured(directory: Path, way: str, ranks: int, size: int, cache: str, args) -> dict:
    """One way: saved, restored with nothing here, and again."""
    spec = {"way": way, "ranks": ranks, "bytes": size, "name": way, "threads": args.threads}
    spec["device"] = args.device
    if way == "local":
        place = str(directory / "local")
        saved = job(what="save", url=place, **spec)
        del saved["durable_s"]
        warm = best(url=place, **spec)
        saved["alone_s"] = best(url=place, **spec | {"way": "alone"})
        # What it writes is not synced.
        os.sync()
        disk = best(Path(place), url=place, **spec)
        shutil.rmtree(place)
        return {"name": WAYS[way], "ranks": ranks, "warm_s": warm, "disk_s": disk, **saved}
    with (
        # A bucket far away has other disks than this machine.
        tempfile.TemporaryDirectory(prefix="fb-bench-", dir=args.bucket) as bucket,
        Node(directory, f"origin-{way}", files=Path(bucket), cache="1GiB") as origin,
        Distance(directory, f"far-{way}", origin.address, rtt_ms=args.rtt, rate=args.rate) as far,
    ):
        if way != "forebay":
            saved = job(what="save", url=far.url, **spec)
            loads = [job(what="load", url=far.url, **spec)["load_s"] for _ in range(2)]
        else:
            with Node(directory, "saves", endpoint=far.url, cache=cache) as node:
                saved = job(what="save", url=node.url, **spec)
                warm = best(url=node.url, **spec)
                saved["disk_s"] = best(node.cache, url=node.url, **spec)
            with Node(directory, "cold", endpoint=far.url, cache=cache) as node:
                cold = job(what="load", url=node.url, **spec)["load_s"]
            loads = [cold, warm]
    return {"name": WAYS[way], "ranks": ranks, "cold_s": loads[0], "warm_s": loads[1], **saved}


if __name__ == "__main__":
    main()
