"""JAX: batches become arrays that lie on the devices as a sharding says.

python examples/jax_train.py
"""

import io
import sys

import forebay
import forebay.jax
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"


def decode(row):
    image = Image.open(io.BytesIO(row["jpg"])).convert("RGB").resize((64, 64))
    return {"image": np.array(image, np.float32) / 255.0, "label": np.int32(bytes(row["cls"]))}


def loss_of(weights, batch):
    logits = batch["image"].reshape(len(batch["image"]), -1) @ weights
    chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["label"], logits.shape[1])
    return -chosen.sum(axis=1).mean()


@jax.jit
def step(weights, batch):
    loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
    return weights - 1e-3 * gradient, loss


def main():
    if not hasattr(jax.sharding, "AxisType"):
        sys.exit(f"jax {jax.__version__} has no AxisType: pip install 'jax>=0.5.3'")
    # Auto: the compiler decides the layout of everything that follows from a batch.
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    dataset = forebay.open(DATA, decode=decode)
    loader = forebay.jax.loader(
        dataset, batch_size=16, sharding=sharding, shuffle=forebay.Block(4), seed=1, threads=2
    )
    weights = jnp.zeros((64 * 64 * 3, 10))
    for epoch in range(2):
        for batch in loader:
            weights, loss = step(weights, batch)
        print(f"epoch {epoch}: loss {float(loss):.3f}")
    print(loader.stats())


if __name__ == "__main__":
    main()
