"""FSDP2: model and checkpoint are sharded over the ranks, and resume on any number of them.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import itertools
import json
import math
import os
import sys

import forebay
import forebay.checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    sys.exit(f"torch {torch.__version__} has no fully_shard: pip install 'torch>=2.6'")

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/corpus/**.parquet"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
LAST = "s3://my-bucket/runs/fsdp2/last"


def tokenize(text):
    return list(text.encode())


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))

    client = forebay.Client()
    # Rank and world size are those of torch.distributed; packs are the same for any of them.
    pack = forebay.Pack(128, column="text", tokenize=tokenize, eos_id=0)
    loader = forebay.open(DATA, client=client).loader(
        pack=pack, batch_size=4, shuffle=forebay.Block(4), seed=1, epochs=10, output="torch"
    )

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), *layers, torch.nn.Linear(64, 256))
    model.to(kind)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def state(step):
        of_model, of_optimizer = get_state_dict(model, optimizer)
        # The loader's state is a few numbers, and the same on all ranks.
        of_loader = json.dumps(loader.state_dict())
        return {"model": of_model, "optimizer": of_optimizer, "loader": of_loader, "step": step}

    done = 0
    if client.exists(f"{LAST}/manifest.json"):
        found = state(0)
        dcp.load(found, storage_reader=forebay.checkpoint.StorageReader(LAST, client=client))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        loader.load_state_dict(json.loads(found["loader"]))
        done = found["step"]
    if done >= STEPS:
        if dist.get_rank() == 0:
            print(f"{LAST} has {done} steps already: give more, or remove it")
        dist.destroy_process_group()
        return

    loss = torch.tensor(math.nan)
    for batch in itertools.islice(loader, STEPS - done):
        tokens = batch["tokens"].long().to(kind)
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # Returns when it is on the node's disk; the node brings it to the bucket.
    writer = forebay.checkpoint.StorageWriter(LAST, client=client)
    dcp.save(state(STEPS), storage_writer=writer)
    if dist.get_rank() == 0:
        writer.handle.wait(timeout=600)
        ranks = dist.get_world_size()
        print(f"steps {done + 1} to {STEPS} on {ranks} ranks, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
