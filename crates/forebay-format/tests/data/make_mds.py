"""Writes data/rows/mosaicml.mds: a shard of 1000 samples by MosaicML's own writer. Sample i has
n = i. Run with a Python that has mosaicml-streaming (0.13 was used).
"""

import pathlib
import shutil
import tempfile

import numpy as np
from streaming import MDSWriter

here = pathlib.Path(__file__).parent / "rows"
columns = {"n": "int", "text": "str", "half": "float16", "array": "ndarray:int32", "data": "bytes"}
with tempfile.TemporaryDirectory() as out:
    with MDSWriter(out=out, columns=columns, size_limit=1 << 26) as writer:
        for i in range(1000):
            writer.write(
                {
                    "n": i,
                    "text": f"text of {i}",
                    "half": np.float16(i / 8),
                    "array": np.full((i % 3 + 1,), i, np.int32),
                    "data": bytes([i % 256]) * (i % 5),
                }
            )
    shutil.copyfile(f"{out}/shard.00000.mds", here / "mosaicml.mds")
