"""Shards of MDS, read and written by MosaicML's own library.

Its requirements exclude the NumPy of the other tests and bring the clients of five clouds, so it is
installed beside them. To import it takes seconds: each test runs it once, for all compressions.
"""

from __future__ import annotations

import json
from pathlib import Path

import beside
import forebay
import pyarrow as pa
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

#: Reads folders as the library does, and prints the samples of each as a line of JSON. Its modules
#: for pictures and texts need more packages.
READER = """
import json, sys, types
from pathlib import Path

sys.path.insert(0, sys.argv[1])
for name in ("vision", "text", "multimodal"):
    sys.modules[f"streaming.{name}"] = types.ModuleType(name)
from streaming.base.compression import decompress
from streaming.base.format import reader_from_json

def plain(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.hex() if isinstance(value, bytes) else value


for folder in map(Path, sys.argv[2:]):
    samples = []
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        if shard["zip_data"]:
            packed = (folder / shard["zip_data"]["basename"]).read_bytes()
            raw = decompress(shard["compression"], packed)
            assert len(raw) == shard["raw_data"]["bytes"]
            (folder / shard["raw_data"]["basename"]).write_bytes(raw)
        reader = reader_from_json(str(folder), None, shard)
        for i in range(len(reader)):
            samples.append({name: plain(value) for name, value in reader[i].items()})
    print(json.dumps(samples, default=str))
"""


@pytest.fixture(scope="module")
def library():
    return beside.installed("mosaicml", PACKAGES)


def written(ds: forebay.Dataset, bucket: Path, compressions: list[str | None], **options) -> list:
    """Writes the rows by each compression; the folders."""
    folders = []
    for compression in compressions:
        folder = bucket / f"out-{compression}".replace(":", "-")
        ds.write(f"bucket/{folder.name}/", "mds", compression=compression, **options)
        folders.append(folder)
    return folders


def test_mosaicml_reads_what_was_written(tmp_path, library):
    compressions = [None, "zstd", "zstd:7", "gz"]
    bucket = tmp_path / "bucket"
    (bucket / "in").mkdir(parents=True)
    (bucket / "in" / "0.parquet").write_bytes(parquet(table(500)))
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{bucket}"])
    try:
        ds = forebay.open("bucket/in/*.parquet", url=node.url)
        folders = written(ds, bucket, compressions, shard_rows=120, order="full", seed=4)
        expected = in_order(ds, "full", 4)
    finally:
        node.stop()
    expected = [{**row, "data": row["data"].hex()} for row in expected]
    found = beside.run(READER, library, *folders)
    for compression, samples in zip(compressions, found, strict=True):
        assert samples == expected, compression


#: Checks hashes as the library does, and prints what it decodes: shapes, types and values.
CHECKER = READER.replace(
    "        reader = reader_from_json",
    """        from streaming.base.hashing import get_hash
        for info in (shard["raw_data"], shard["zip_data"]):
            if info is not None:
                assert sorted(info["hashes"]) == ["sha1", "xxh64"], info
                for algo, digest in info["hashes"].items():
                    assert get_hash(algo, (folder / info["basename"]).read_bytes()) == digest
        reader = reader_from_json""",
)


def test_mosaicml_reads_encodings_and_hashes(tmp_path, library):
    compressions = [None, "bz2", "br:5", "snappy", "zstd:7", "gz:3"]
    bucket = tmp_path / "bucket"
    (bucket / "in").mkdir(parents=True)
    rows = pa.table(
        {
            "n": pa.array(range(-50, 50), pa.int16()),
            "half": pa.array([i / 4 for i in range(100)], pa.float64()),
            "whole": pa.array([10**15 + i for i in range(100)], pa.int64()),
            "broken": pa.array([i / 16 for i in range(100)], pa.float64()),
            "price": pa.array([f"{i}.50" for i in range(100)]).cast(pa.decimal128(9, 2)),
            "free": pa.array([[i] * (1 + i % 300) for i in range(100)], pa.list_(pa.int32())),
            "grid": pa.array([[i / 2] * 6 for i in range(100)], pa.list_(pa.float32())),
            "deep": [[[i, 1], [2, 3]] for i in range(100)],
            "said": [f"word {i}" for i in range(100)],
        }
    )
    (bucket / "in" / "0.parquet").write_bytes(parquet(rows))
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{bucket}"])
    columns = {
        "n": "int", "half": "float16", "whole": "str_int", "broken": "str_float",
        "price": "str_decimal", "free": "ndarray", "grid": "ndarray:float64:2,3",
        "deep": "ndarray:int32", "said": "json",
    }  # fmt: skip
    try:
        ds = forebay.open("bucket/in/*.parquet", url=node.url)
        hashes = ["sha1", "xxh64"]
        folders = written(
            ds, bucket, compressions, columns=columns, hashes=hashes, size_limit="8kb"
        )
    finally:
        node.stop()
    expected = rows.to_pylist()
    for row in expected:
        row["price"] = str(row["price"])
        row["grid"] = [row["grid"][:3], row["grid"][3:]]
    found = beside.run(CHECKER, library, *folders)
    for compression, samples in zip(compressions, found, strict=True):
        assert samples == expected, compression


#: Writes folders as the library does, each without compression or with one, and prints the rows
#: that it wrote to all of them as a line of JSON.
WRITER = """
import json, sys, types

sys.path.insert(0, sys.argv[1])
for name in ("vision", "text", "multimodal"):
    sys.modules[f"streaming.{name}"] = types.ModuleType(name)
import numpy as np
from streaming.base.format.mds.encodings import mds_encode
from streaming.base.format.mds.writer import MDSWriter

columns = {
    "n": "int", "text": "str", "blob": "bytes", "said": "json", "small": "uint8", "low": "int16",
    "half": "float16", "single": "float32", "double": "float64",
    "whole": "str_int", "broken": "str_float", "fixed": "ndarray:float32:2,3", "free": "ndarray",
}
rng = np.random.default_rng(5)
rows = [
    {
        "n": n - 100, "text": "wörter " * int(rng.integers(0, 9)), "blob": rng.bytes(n % 50),
        "said": {"n": n, "list": [1, None, "x"]}, "small": np.uint8(n % 256),
        "low": np.int16(-n), "half": np.float16(n / 8), "single": np.float32(n / 3),
        "double": np.float64(n / 7), "whole": 10**15 + n, "broken": n / 16,
        "fixed": rng.standard_normal((2, 3), dtype=np.float32),
        "free": rng.integers(-9, 9, int(rng.integers(1, 7)), dtype=np.int32),
    }
    for n in range(300)
]
for folder, compression in json.loads(sys.argv[2]):
    with MDSWriter(
        out=folder, columns=columns, compression=compression, size_limit=8192,
        hashes=["sha1", "xxh64"],
    ) as out:
        for row in rows:
            out.write(row)
for row in rows:
    for name in ("blob", "fixed", "free"):
        row[name] = mds_encode(columns[name], row[name]).hex()
plain = [{k: v.item() if hasattr(v, "item") else v for k, v in row.items()} for row in rows]
print(json.dumps(plain))
"""


def test_what_mosaicml_wrote_is_read(tmp_path, library):
    compressions = [None, "zstd", "gz"]
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    folders = [[str(bucket / f"in-{each}"), each] for each in compressions]
    [rows] = beside.run(WRITER, library, json.dumps(folders))
    options = ["--origin", f"file://{bucket}"]
    node = Node("", [], tmp_path / "node", options=options)
    try:
        for compression in compressions:
            ds = forebay.open(f"bucket/in-{compression}/", url=node.url)
            assert ds.format == "mds" and len(ds.files) > 3, compression
            assert [plain(row) for row in ds] == rows, compression
            some = [rows[i] for i in (299, 0, 150)]
            assert [plain(row) for row in ds.take([299, 0, 150])] == some, compression
    finally:
        node.stop()


def plain(row) -> dict:
    """A row as the writer printed it: arrays are their bytes."""
    found = {k: bytes(v).hex() if isinstance(v, (bytes, memoryview)) else v for k, v in row.items()}
    said = json.loads(found["said"]) if isinstance(found["said"], str) else found["said"]
    numbers = {"whole": int(found["whole"]), "broken": float(found["broken"])}
    return {**found, "said": said, **numbers}
