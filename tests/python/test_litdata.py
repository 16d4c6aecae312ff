"""Chunks of litData, as its own library writes and reads them.

The library is installed beside the other packages, with what writing and reading need.
"""

from __future__ import annotations

import beside
import forebay
from servers import Node

PACKAGES = ["litdata==0.2.76", "tifffile==2026.3.3", "zstd==1.5.7.2"]

#: Writes data sets, and prints what the library reads of each.
LIBRARY = """
import json, shutil, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.reader import BinaryReader
from litdata.streaming.sampler import ChunkedIndex
from litdata.streaming.writer import BinaryWriter

root = Path(sys.argv[2])
rng = np.random.default_rng(1)


def sample(i):
    return {
        "id": i,
        "text": f"text of {i} " * (i % 5),
        "x": i / 8,
        "ok": i % 3 == 0,
        "data": bytes([i % 256]) * (i % 7),
        "tokens": torch.arange(i % 11, dtype=torch.int32) + i,
        "half": np.arange(i % 4, dtype=np.float16) + i,
        "pair": (i, str(i)),
    }


def write(name, samples, **options):
    folder = root / name
    folder.mkdir()
    writer = BinaryWriter(str(folder), **options)
    for i, value in enumerate(samples):
        writer[i] = value
    writer.done()
    writer.merge()


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def say(name, item_loader=None, block_size=None):
    # It unpacks chunks in their place.
    copy = shutil.copytree(root / name, Path(sys.argv[3]) / name)
    reader = BinaryReader(str(copy), item_loader=item_loader)
    rows = []
    for chunk, interval in enumerate(reader.get_chunk_intervals()):
        for index in range(interval.roi_start_idx, interval.roi_end_idx):
            rows.append(plain(reader.read(ChunkedIndex(index=index, chunk_index=chunk))))
    print(json.dumps({"name": name, "block_size": block_size, "rows": rows}), flush=True)


write("dicts", map(sample, range(500)), chunk_size=41)
say("dicts")
write("numbers", ((i, i / 4) for i in range(100)), chunk_size=7)
say("numbers")
packed = {"compression": "zstd", "compression_level": "chunk"}
write("whole", map(sample, range(300)), chunk_size=100, **packed)
say("whole")
lengths = rng.integers(1, 200, 90)
documents = [torch.tensor(rng.integers(0, 60000, n), dtype=torch.int64) for n in lengths]
write("tokens", documents, chunk_bytes=20000, item_loader=TokensLoader())
say("tokens", TokensLoader(block_size=64), 64)
arrays = [rng.integers(0, 60000, n).astype(np.uint16) for n in lengths]
write("arrays", arrays, chunk_bytes=9000, item_loader=TokensLoader())
say("arrays", TokensLoader(block_size=100), 100)
"""


def row_of(name: str, value):
    """A sample of the library as a row."""
    if name == "numbers":
        return {"0": value[0], "1": value[1]}
    if name in ("tokens", "arrays"):
        return {"tokens": value}
    pair = value.pop("pair")
    return value | {"pair.0": pair[0], "pair.1": pair[1]}


def test_litdata_is_what_its_library_reads(tmp_path):
    library, bucket = beside.installed("litdata", PACKAGES), tmp_path / "bucket"
    (bucket / "in").mkdir(parents=True)
    (tmp_path / "read").mkdir()
    found = beside.run(LIBRARY, library, bucket / "in", tmp_path / "read")
    assert len(found) == 5
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{bucket}"])
    try:
        for theirs in found:
            name, size = theirs["name"], theirs["block_size"]
            ds = forebay.open(f"bucket/in/{name}/", url=node.url, block_size=size)
            assert ds.format == "litdata" and len(ds.files) > 2
            rows = ds.take(range(len(ds))).arrow().to_pylist()
            for row in rows:
                row.update({k: v.hex() for k, v in row.items() if isinstance(v, bytes)})
            assert rows == [row_of(name, value) for value in theirs["rows"]], name
    finally:
        node.stop()
