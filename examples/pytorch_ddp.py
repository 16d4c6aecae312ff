"""PyTorch on several GPUs (or CPUs): every rank gets its share of one order, and resumes exactly.

torchrun --nproc-per-node 2 examples/pytorch_ddp.py
"""

import io
import os
import sys

import forebay
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"
CHECKPOINT = "checkpoint.pt"
EPOCHS = 2


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((64, 64))
    return torch.from_numpy(np.array(image)), int(bytes(row["cls"]))


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")

    dataset = forebay.open(DATA, decode=decode)
    # Rank and world size are those of torch.distributed. All ranks have equally many steps.
    loader = dataset.loader(
        batch_size=16, shuffle=forebay.Block(4), seed=1, threads=2, output="torch"
    )

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64 * 3, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT, map_location=device)
        network.load_state_dict(saved["model"])
        # A few numbers, the same on all ranks: they load into any number of ranks.
        loader.load_state_dict(saved["loader"])
        if dist.get_rank() == 0:
            print(f"goes on with epoch {loader.epoch} of {EPOCHS}, from {CHECKPOINT}")

    for epoch in range(loader.epoch, EPOCHS):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = torch.nn.functional.cross_entropy(model(images / 255.0), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": network.state_dict(), "loader": loader.state_dict()}, CHECKPOINT)
            print(
                f"epoch {epoch}: {len(loader)} steps on {dist.get_world_size()} ranks,"
                f" loss {loss.item():.3f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
