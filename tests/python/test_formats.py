"""Formats of datasets beside the libraries that read them, value by value."""

from __future__ import annotations

import gzip
import json
import random

import forebay
import pyarrow as pa
import pyarrow.json
import pytest
from forebay import ServerError


@pytest.fixture
def put(origin_s3, scratch):
    """Writes an object to the origin directly, below this test's prefix; returns its name."""

    def put(key: str, data: bytes) -> str:
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{key}", Body=data)
        return f"scratch/{scratch}/{key}"

    return put


def table_of(ds: forebay.Dataset) -> pa.Table:
    """All rows, in order."""
    return pa.table(pa.record_batch(ds.take(range(len(ds))).arrow()))


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def lz4(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "lz4") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def test_compressed_jsonl_is_the_plain_file(node, put, scratch):
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefgh ü\n\"", k=rng.randrange(2000))) for _ in range(4000)]
    rows = [{"i": i, "text": text, "x": [i / 4] * (i % 3)} for i, text in enumerate(texts)]
    plain = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows))
    data = plain.encode()
    expected = pyarrow.json.read_json(pa.BufferReader(data))
    # Several streams in one file, as of gzip's and zstd's parallel programs.
    middle = data.index(b"\n", len(data) // 2) + 7
    halves = data[:middle], data[middle:]
    order = rng.sample(range(len(rows)), 500)
    for name, packed in [
        ("a.jsonl.gz", gzip.compress(data)),
        ("b.json.gz", b"".join(map(gzip.compress, halves))),
        ("c.jsonl.zst", zstd(data)),
        ("d.ndjson.zstd", b"".join(map(zstd, halves))),
        ("e.jsonl.lz4", lz4(data)),
    ]:
        ds = forebay.open(put(f"{name}/{name}", packed), url=node.url)
        assert ds.format == "jsonl" and len(ds) == len(rows), name
        assert table_of(ds).cast(expected.schema).equals(expected), name
        taken = pa.table(pa.record_batch(ds.take(order, ["text", "i"]).arrow()))
        assert taken.equals(expected.select(["text", "i"]).take(order)), name
        assert json.loads(ds.select(["json"])[17]["json"]) == rows[17]
    # Plain and compressed files are one dataset.
    both = [put("both/0.jsonl", data), put("both/1.jsonl.zst", zstd(data))]
    ds = forebay.open(both, url=node.url)
    assert len(ds) == 8000 and ds[4001]["text"] == texts[1]
    put("cut/a.jsonl.gz", gzip.compress(data)[:-9])
    with pytest.raises(ServerError, match=r"cut/a\.jsonl\.gz: .*cut off"):
        forebay.open(f"scratch/{scratch}/cut/", url=node.url)
