"""Indexed datasets of Megatron-LM, as its own library writes and reads them.

The library is installed beside the other packages, without its requirements, of which the module
that is needed takes only PyTorch and NumPy.
"""

from __future__ import annotations

import beside
import forebay
from servers import Node

PACKAGES = ["megatron-core==0.16.1"]

#: Writes data sets, two of them merged into a third, and prints what the library reads of each.
LIBRARY = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import (
    DType, IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path,
)

folder = Path(sys.argv[2])
rng = np.random.default_rng(1)


def write(name, dtype, multimodal, several):
    path = str(folder / name)
    builder = IndexedDatasetBuilder(get_bin_path(path), dtype=dtype, multimodal=multimodal)
    for _ in range(300):
        if several:
            lengths = rng.integers(0, 50, int(rng.integers(1, 5))).tolist()
            tokens = torch.tensor(rng.integers(0, 100, sum(lengths)))
            modes = rng.integers(0, 3, len(lengths)).tolist() if multimodal else None
            builder.add_document(tokens, lengths, modes)
        else:
            tokens = torch.tensor(rng.integers(0, 100, int(rng.integers(0, 200))))
            builder.add_item(tokens, int(rng.integers(0, 3)) if multimodal else 0)
            builder.end_document()
    builder.finalize(get_idx_path(path))


for dtype in DType:
    write(dtype.name, getattr(np, dtype.name), False, dtype.value % 2 == 0)
write("modes", np.uint16, True, True)
write("also", np.int32, False, True)
merged = IndexedDatasetBuilder(get_bin_path(str(folder / "merged")), dtype=np.int32)
merged.add_index(str(folder / "int32"))
merged.add_index(str(folder / "also"))
merged.finalize(get_idx_path(str(folder / "merged")))

for bin in sorted(folder.glob("*.bin")):
    multimodal = bin.stem == "modes"
    read = IndexedDataset(str(bin.with_suffix("")), multimodal=multimodal)
    starts = read.document_indices
    documents = np.searchsorted(starts, np.arange(len(read)), side="right") - 1
    rows = []
    for i in range(len(read)):
        tokens, mode = read[i] if multimodal else (read[i], None)
        row = {"tokens": tokens.tolist(), "document": int(documents[i])}
        rows.append(row | ({"mode": int(mode)} if multimodal else {}))
    print(json.dumps({"name": bin.stem, "dtype": str(read.index.dtype().dtype), "rows": rows}))
"""


def test_megatron_is_what_its_library_reads(tmp_path):
    library, bucket = beside.installed("megatron", PACKAGES), tmp_path / "bucket"
    (bucket / "in").mkdir(parents=True)
    found = beside.run(LIBRARY, library, bucket / "in")
    assert len(found) == 11
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{bucket}"])
    try:
        for theirs in found:
            name = f"bucket/in/{theirs['name']}"
            ds = forebay.open(name, format="megatron", url=node.url)
            batch = ds.take(range(len(ds))).arrow()
            assert batch.to_pylist() == theirs["rows"], name
            item = str(batch.schema.field("tokens").type.value_type)
            names = {"float": "float32", "double": "float64"}
            assert names.get(item, item) == theirs["dtype"]
    finally:
        node.stop()
