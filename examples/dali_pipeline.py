"""NVIDIA DALI: a loader's batches go into a pipeline that decodes them, on the GPU if there is one.

python examples/dali_pipeline.py
"""

import sys

import forebay
import forebay.dali
import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"
BATCH = 16
GPU = torch.cuda.is_available()


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=0 if GPU else None)
def images(source):
    jpegs, labels = fn.external_source(source=source, num_outputs=2)
    decoded = fn.decoders.image(jpegs, device="mixed" if GPU else "cpu")
    return fn.resize(decoded, size=(64, 64), dtype=types.FLOAT) / 255.0, labels


def array(output):
    return np.array((output.as_cpu() if GPU else output).as_tensor())


def main():
    dataset = forebay.open(DATA)
    loader = dataset.loader(batch_size=BATCH, shuffle=forebay.Block(4), seed=1)
    source = forebay.dali.Source(loader, ["jpg", "cls"])
    pipeline = images(source)
    pipeline.build()
    given, counts = 0, np.zeros(10, int)
    while True:
        try:
            pictures, labels = pipeline.run()
        except StopIteration:
            break
        assert array(pictures).shape == (BATCH, 64, 64, 3)
        # The labels are texts of one digit.
        counts += np.bincount(array(labels)[:, 0] - ord("0"), minlength=10)
        given += 1
    # DALI reads ahead: this is the place of what the pipeline has given.
    state = source.state_dict(given)
    print(f"{given} batches, {counts.sum()} labels, then epoch {state['epoch']}")


if __name__ == "__main__":
    main()
