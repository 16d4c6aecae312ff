"""Lightning: the loader is the `train_dataloaders`, on one process or on several (all GPUs, or as
many devices as the second argument says).

python examples/lightning_fit.py 's3://my-bucket/images/{000..003}.tar' 2
"""

import io
import sys

import forebay
import lightning
import numpy as np
import torch
from PIL import Image

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"
DEVICES = int(sys.argv[2]) if len(sys.argv) > 2 else "auto"


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((64, 64))
    return torch.from_numpy(np.array(image)), int(bytes(row["cls"]))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64 * 3, 10))

    def training_step(self, batch, step):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images / 255.0), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main():
    dataset = forebay.open(DATA, decode=decode)
    # Made before fit() starts its processes: the rank is looked up at the first batch.
    loader = dataset.loader(
        batch_size=16, shuffle=forebay.Block(4), seed=1, threads=2, output="torch"
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=DEVICES,
        use_distributed_sampler=False,  # the loader deals out the rows
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    print(f"{trainer.global_step} steps in {trainer.current_epoch} epochs")
    print(loader.stats())


if __name__ == "__main__":
    main()
