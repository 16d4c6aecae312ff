"""JAX with Grain: the dataset is a data source; Grain makes the order, and a batch is one request.

python examples/grain_jax.py
"""

import io
import sys

import forebay
import grain
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((64, 64))
    return np.array(image, np.float32) / 255.0, np.int32(bytes(row["cls"]))


def batches(dataset, epochs):
    """Grain reads a data source one element at a time. So its elements are row numbers up to the
    batch, and rows are requested a batch at a time, in Grain's threads.
    """

    def read(rows):
        images, labels = zip(*dataset.__getitems__(rows), strict=True)
        return {"image": np.stack(images), "label": np.stack(labels)}

    rows = grain.MapDataset.range(len(dataset)).shuffle(seed=1)
    mine = rows[jax.process_index() :: jax.process_count()]
    made = mine.repeat(epochs).batch(16, drop_remainder=True).map(read)
    return made.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))


def loss_of(weights, batch):
    logits = batch["image"].reshape(len(batch["image"]), -1) @ weights
    chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["label"], logits.shape[1])
    return -chosen.sum(axis=1).mean()


@jax.jit
def step(weights, batch):
    loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
    return weights - 1e-3 * gradient, loss


def main():
    dataset = forebay.open(DATA, decode=decode)
    # Whatever takes a data source takes the dataset as it is: grain.DataLoader, MapDataset.source.
    print("a data source:", isinstance(dataset, grain.sources.RandomAccessDataSource))

    iterator = iter(batches(dataset, epochs=2))
    weights = jnp.zeros((64 * 64 * 3, 10))
    for number, batch in enumerate(iterator, 1):
        weights, loss = step(weights, batch)
        if number == 7:
            state = iterator.get_state()  # for a checkpoint
        if number == 8:
            following = batch["image"]
    print(f"{number} steps, loss {float(loss):.3f}")

    again = iter(batches(dataset, epochs=2))
    again.set_state(state)
    same = np.array_equal(next(again)["image"], following)
    print("resumed with the same batch" if same else "resumed with another batch")


if __name__ == "__main__":
    main()
