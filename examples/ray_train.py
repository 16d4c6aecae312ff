"""Ray Train: each worker is a rank of one order, and a checkpoint of the trainer has its place.

python examples/ray_train.py
"""

import io
import os
import sys
import tempfile

import forebay
import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from PIL import Image

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"
EPOCHS = 2


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((64, 64))
    return torch.from_numpy(np.array(image)), int(bytes(row["cls"]))


def train(config):
    dataset = forebay.open(config["data"], url=config["node"], decode=decode)
    # Ray has initialized torch.distributed: that is where rank and world size are from.
    loader = dataset.loader(
        batch_size=16, shuffle=forebay.Block(4), seed=1, threads=2, output="torch"
    )
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64 * 3, 10))
    if checkpoint := ray.train.get_checkpoint():
        # After a failure Ray starts the workers again, maybe fewer of them.
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "last.pt"))
        network.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(loader.epoch, EPOCHS):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images / 255.0), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        context = ray.train.get_context()
        metrics = {"epoch": epoch, "steps": len(loader), "workers": context.get_world_size()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if context.get_world_rank() == 0:
                saved = {"model": network.state_dict(), "loader": loader.state_dict()}
                torch.save(saved, os.path.join(folder, "last.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({**metrics, "loss": loss.item()}, checkpoint=checkpoint)


def main():
    # One for each worker, and one that Ray before 2.51 takes for the trainer: with fewer, it waits.
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"data": DATA, "node": os.environ["FOREBAY_NODE"]},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(storage_path=os.path.abspath("ray-runs")),
    )
    found = trainer.fit().metrics
    print(
        f"epoch {found['epoch']}: {found['steps']} steps on {found['workers']} workers,"
        f" loss {found['loss']:.3f}"
    )


if __name__ == "__main__":
    main()
