"""accelerate: model and optimizer are prepared, the loader is not; its place is in the checkpoint.

torchrun --nproc-per-node 2 examples/accelerate_train.py
"""

import io
import os
import sys

import forebay
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from PIL import Image

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"
CHECKPOINT = "accelerated"
EPOCHS = 2


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((64, 64))
    return torch.from_numpy(np.array(image)), int(bytes(row["cls"]))


def main():
    # Without a GPU, accelerate makes one job of several processes only if it is told.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    dataset = forebay.open(DATA, decode=decode)
    # It deals out the rows itself: prepare() would deal them out again.
    loader = dataset.loader(
        batch_size=16, shuffle=forebay.Block(4), seed=1, threads=2, output="torch"
    )
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64 * 3, 10))
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(loader)
    if os.path.exists(CHECKPOINT):
        accelerator.load_state(CHECKPOINT)
        accelerator.print(f"goes on with epoch {loader.epoch} of {EPOCHS}, from {CHECKPOINT}")
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            images, labels = send_to_device(batch, accelerator.device)
            loss = torch.nn.functional.cross_entropy(model(images / 255.0), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(CHECKPOINT)
        accelerator.print(
            f"epoch {epoch}: {len(loader)} steps on {accelerator.num_processes} ranks,"
            f" loss {loss.item():.3f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
