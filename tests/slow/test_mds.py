"""Shards of MDS, read by MosaicML's own library.

Its requirements exclude the NumPy of the other tests and bring the clients of five clouds, so it is
installed beside them, without its requirements but for those that reading files needs.
"""

from __future__ import annotations

import json
import subprocess
import sys

import forebay
import pytest
from servers import Node
from test_write import in_order, parquet, table

PACKAGES = [
    "mosaicml-streaming==0.13.0",
    "zstd==1.5.7.2",
    "Brotli==1.2.1",
    "python-snappy==0.7.3",
    "cramjam==2.14.0",
    "catalogue==2.0.10",
    "matplotlib==3.11.2",
]

#: Reads a folder as the library does, and prints its samples as JSON. Its modules for pictures and
#: texts need more packages.
READER = """
import json, sys, types
from pathlib import Path

sys.path.insert(0, sys.argv[1])
for name in ("vision", "text", "multimodal"):
    sys.modules[f"streaming.{name}"] = types.ModuleType(name)
from streaming.base.compression import decompress
from streaming.base.format import reader_from_json

folder = Path(sys.argv[2])
for shard in json.loads((folder / "index.json").read_text())["shards"]:
    if shard["zip_data"]:
        packed = (folder / shard["zip_data"]["basename"]).read_bytes()
        raw = decompress(shard["compression"], packed)
        assert len(raw) == shard["raw_data"]["bytes"]
        (folder / shard["raw_data"]["basename"]).write_bytes(raw)
    reader = reader_from_json(str(folder), None, shard)
    for i in range(len(reader)):
        plain = {}
        for name, value in reader[i].items():
            value = value.tolist() if hasattr(value, "tolist") else value
            plain[name] = value.hex() if isinstance(value, bytes) else value
        print(json.dumps(plain))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mosaicml")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True, timeout=600)
    return folder


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz"])
def test_mosaicml_reads_what_was_written(tmp_path, library, compression):
    bucket = tmp_path / "bucket"
    (bucket / "in").mkdir(parents=True)
    (bucket / "in" / "0.parquet").write_bytes(parquet(table(500)))
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{bucket}"])
    try:
        ds = forebay.open("bucket/in/*.parquet", url=node.url)
        ds.write(
            "bucket/out/", "mds", compression=compression, shard_rows=120, order="full", seed=4
        )
        expected = in_order(ds, "full", 4)
    finally:
        node.stop()
    command = [sys.executable, "-c", READER, str(library), str(bucket / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [{**row, "data": row["data"].hex()} for row in expected]
