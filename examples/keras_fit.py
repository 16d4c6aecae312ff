"""Keras 3: a PyDataset whose batches are one request each; with PyTorch, JAX or TensorFlow below.

KERAS_BACKEND=jax python examples/keras_fit.py

With JAX also on several processes: start each with its own KERAS_DISTRIBUTION_PROCESS_ID (0, 1, …),
and all with KERAS_DISTRIBUTION_NUM_PROCESSES and KERAS_DISTRIBUTION_JOB_ADDRESSES (host:port,…).
"""

import io
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import forebay
import keras
import numpy as np
from PIL import Image

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"
RANK = int(os.environ.get("KERAS_DISTRIBUTION_PROCESS_ID", 0))
RANKS = int(os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES", 1))


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((32, 32))
    return np.array(image, np.float32) / 255.0, int(bytes(row["cls"]))


class Batches(keras.utils.PyDataset):
    """Batches by number, in another order in each epoch, which all ranks share. Keras asks for
    several at a time, from `workers` threads.
    """

    def __init__(self, dataset, batch_size, seed=0, **options):
        super().__init__(**options)
        self.dataset, self.batch_size, self.seed, self.epoch = dataset, batch_size, seed, 0
        self.shuffle()

    def shuffle(self):
        generator = np.random.default_rng((self.seed, self.epoch))
        self.order = generator.permutation(len(self.dataset))[RANK::RANKS]

    def on_epoch_end(self):
        self.epoch += 1
        self.shuffle()

    def __len__(self):
        return len(self.dataset) // (self.batch_size * RANKS)

    def __getitem__(self, number):
        rows = self.order[number * self.batch_size :][: self.batch_size]
        images, labels = zip(*self.dataset.__getitems__(rows), strict=True)
        return np.stack(images), np.array(labels)


def main():
    if RANKS > 1:
        keras.distribution.initialize()
        parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(parallel)
        keras.utils.set_random_seed(1)  # the same weights on all ranks
    dataset = forebay.open(DATA, decode=decode)
    train, test = dataset.train_test_split(32, seed=1)
    model = keras.Sequential(
        [keras.layers.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.compile(
        optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    batches = Batches(train, 16, workers=2, max_queue_size=4)
    history = model.fit(batches, validation_data=Batches(test, 16), epochs=2, verbose=0).history
    print(
        f"{len(batches)} steps in each of {len(history['loss'])} epochs with"
        f" {keras.backend.backend()}, loss {history['loss'][-1]:.3f}, of the test rows"
        f" {history['val_loss'][-1]:.3f}"
    )


if __name__ == "__main__":
    main()
