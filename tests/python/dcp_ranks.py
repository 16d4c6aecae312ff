"""Ranks of a job that save or load by torch.distributed.checkpoint: :func:`ranks` runs all of them.

The state is known from its scale alone: sharded tensors (rows 0 to ROWS, of which each rank has its
share), replicated ones, and what is no tensor. A rank that loads ends well if each value is as it
was saved.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os

import forebay
import forebay.checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS, COLUMNS = 1536, 1031


def full(scale: int, seed: int) -> torch.Tensor:
    values = torch.arange(ROWS * COLUMNS, dtype=torch.int64).reshape(ROWS, COLUMNS)
    return ((values * (seed + 1)) % 8191 + scale).to(torch.float32)


def state(scale: int, mesh, empty: bool) -> dict:
    def shard(tensor, dim):
        tensor = torch.zeros_like(tensor) if empty else tensor
        return distribute_tensor(tensor, mesh, [Shard(dim)])

    small = torch.full((7,), float(scale))
    return {
        "model": {
            "rows": shard(full(scale, 1), 0),
            "columns": shard(full(scale, 2), 1),
            "half": shard(full(scale, 3).to(torch.bfloat16), 0),
            "small": torch.zeros(7) if empty else small,
        },
        "step": torch.tensor(-1 if empty else scale),
        "note": "" if empty else f"scale {scale}",
    }


def one(what: str, node: str, name: str, scale: int, rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    nodes = node.split("|")
    client = forebay.Client(nodes[rank % len(nodes)])
    if what == "load":
        found = state(scale, mesh, empty=True)
        reader = forebay.checkpoint.StorageReader(client=client)
        dcp.load(found, checkpoint_id=name, storage_reader=reader)
        wanted = state(scale, mesh, empty=False)
        for key, value in wanted["model"].items():
            mine, its = found["model"][key], value
            if hasattr(its, "to_local"):
                mine, its = mine.to_local(), its.to_local()
            assert torch.equal(mine, its), f"rank {rank}: {key}"
        assert int(found["step"]) == scale and found["note"] == wanted["note"], found["note"]
    else:
        writer = forebay.checkpoint.StorageWriter(client=client)
        wanted = state(scale, mesh, empty=False)
        if what == "async":
            dcp.async_save(wanted, checkpoint_id=name, storage_writer=writer).result()
        else:
            dcp.save(wanted, checkpoint_id=name, storage_writer=writer)
        if rank == 0:
            writer.handle.wait(60)
    dist.barrier()
    dist.destroy_process_group()


def ranks(world: int, what: str, node: str, name: str, scale: int, port: int) -> None:
    """Runs a job: "save", "async" or "load". Its processes are forked from one that has imported
    PyTorch already, which takes long. Several nodes, as in ``"http://a|http://b"``, have a rank
    each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dcp_ranks"])
    # The server looks for what it imports beforehand in PYTHONPATH alone, and says nothing if it is
    # not there.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), path]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    processes = [
        context.Process(target=one, args=(what, node, name, scale, rank, world, port))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, codes
