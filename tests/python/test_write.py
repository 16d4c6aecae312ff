"""New shards: each format read back by its own library, orders, refusals, and writers that are
killed or meet each other.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import random
import re
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Self

import forebay
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_types import binary_view, string_view
from forebay import _arrow, _encode
from forebay._write import Request, size_of
from servers import Node
from test_policies import keys_toml, locked_node

ROWS = 500
FORMATS = ("parquet", "tar", "tfrecord", "mds", "jsonl")


def table(rows: int, base: int = 0, size: int = 300) -> pa.Table:
    ids = list(range(base, base + rows))
    noise = random.Random(base)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "data": pa.array([noise.randbytes(i % size) for i in ids], pa.binary()),
            "text": pa.array([f"row {i} é" for i in ids], pa.string()),
            "tokens": pa.array([list(range(i, i + 1 + i % 5)) for i in ids], pa.list_(pa.int32())),
            "x": pa.array([[i, i / 2] for i in ids], pa.list_(pa.float32(), 2)),
            "good": pa.array([i % 3 == 0 for i in ids], pa.bool_()),
            "score": pa.array([i / 4 for i in ids], pa.float32()),
        }
    )


def parquet(table: pa.Table, group: int = 50) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=group)
    return out.getvalue()


@pytest.fixture
def put(origin_s3, scratch):
    """Writes an object to the origin directly, below this test's prefix; returns its name."""

    def put(key: str, data: bytes) -> str:
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{key}", Body=data)
        return f"scratch/{scratch}/{key}"

    return put


@pytest.fixture
def source(put, client, scratch):
    """A dataset of two Parquet files."""
    put("in/0.parquet", parquet(table(ROWS // 2)))
    put("in/1.parquet", parquet(table(ROWS // 2, ROWS // 2)))
    return forebay.open(f"scratch/{scratch}/in/*.parquet", client=client)


@pytest.fixture
def fetch(origin_s3, scratch):
    """What is below a prefix of this test: the ends of the names, and the bytes."""

    def fetch(prefix: str) -> dict[str, bytes]:
        found = {}
        for page in origin_s3.get_paginator("list_objects_v2").paginate(
            Bucket="scratch", Prefix=f"{scratch}/{prefix}"
        ):
            for item in page.get("Contents", []):
                body = origin_s3.get_object(Bucket="scratch", Key=item["Key"])["Body"].read()
                found[item["Key"].removeprefix(f"{scratch}/{prefix}")] = body
        return found

    return fetch


def plain(rows) -> list[dict]:
    """Rows as values that compare."""

    def value(v):
        if isinstance(v, memoryview):
            return bytes(v)
        return v.tolist() if isinstance(v, np.ndarray) else v

    return [{k: value(v) for k, v in row.items()} for row in rows]


def in_order(ds, shuffle, seed=0, **options) -> list[dict]:
    """The rows of an epoch as a loader yields them."""
    loader = ds.loader(64, shuffle=shuffle, seed=seed, uneven="pad", **options)
    return [row for batch in loader for row in plain(batch)[: loader.last.real]]


# Each format


def read_parquet(files: dict[str, bytes]) -> list[dict]:
    return pa.concat_tables(pq.read_table(io.BytesIO(data)) for data in files.values()).to_pylist()


def shards_of(files: dict[str, bytes], end: str) -> dict[str, bytes]:
    names = sorted(name for name in files if name.endswith(end))
    for number, name in enumerate(names):
        assert name == f"shard-{number:05}-of-{len(names):05}{end}"
    return {name: files[name] for name in names}


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:9", "snappy"])
def test_parquet_is_read_by_pyarrow(source, scratch, fetch, compression, client):
    done = source.write(
        f"s3://scratch/{scratch}/out/",
        "parquet",
        order=forebay.Block(2),
        seed=3,
        shard_rows=120,
        compression=compression,
        row_group_rows=50,
    )
    files = fetch("out/")
    assert sorted(files) == [
        "_manifest",
        *(f"shard-{i:05}-of-00005.parquet" for i in range(5)),
    ]
    shards = shards_of(files, ".parquet")
    expected = in_order(source, forebay.Block(2), 3)
    assert read_parquet(shards) == expected
    first = pq.ParquetFile(io.BytesIO(shards["shard-00000-of-00005.parquet"]))
    groups = [first.metadata.row_group(i).num_rows for i in range(first.num_row_groups)]
    assert groups == [50, 50, 20]
    codec = first.metadata.row_group(0).column(0).compression
    assert (
        codec
        == {None: "UNCOMPRESSED", "zstd": "ZSTD", "zstd:9": "ZSTD", "snappy": "SNAPPY"}[compression]
    )
    assert (done.rows, done.shards, done.found, done.format) == (ROWS, 5, 0, "parquet")
    assert done.bytes == sum(map(len, shards.values())) and done.seconds > 0
    again = forebay.open(done.source, client=client)
    assert plain(again) == expected and again.format == "parquet"
    assert plain(forebay.open(done.target, client=client)) == expected


@pytest.mark.parametrize("compression", [None, "gz"])
def test_tar_is_read_by_webdataset(source, scratch, fetch, tmp_path, client, compression):
    import webdataset as wds

    columns = ["data", "text", "id", "score", "good"]
    done = source.write(
        f"scratch/{scratch}/out/",
        "tar",
        order="full",
        seed=1,
        columns=columns,
        shard_rows=130,
        compression=compression,
    )
    end = ".tar.gz" if compression else ".tar"
    shards = shards_of(fetch("out/"), end)
    for name, data in shards.items():
        (tmp_path / name).write_bytes(data)
    read = wds.WebDataset(
        [str(tmp_path / name) for name in shards], shardshuffle=False, empty_check=False
    )
    found = list(read)
    expected = in_order(source, "full", 1, columns=columns)
    assert len(found) == len(expected) == ROWS
    for number, (sample, row) in enumerate(zip(found, expected, strict=True)):
        assert sample["__key__"] == f"{number:09}"
        assert sample["data"] == row["data"] and sample["text"] == row["text"].encode()
        assert int(sample["id"]) == row["id"] and float(sample["score"]) == row["score"]
        assert sample["good"] == str(row["good"]).lower().encode()
    again = forebay.open(done.source, client=client)
    assert [bytes(row["data"]) for row in again] == [row["data"] for row in expected]


def test_tars_of_samples_keep_their_keys_and_members(put, client, scratch, fetch):
    """Also long names, names that are not ASCII, and members that only some samples have."""
    out = io.BytesIO()
    members = []
    with tarfile.open(fileobj=out, mode="w") as tar:
        for i in range(40):
            key = f"{'long/' * 30}{i:04}" if i % 7 == 0 else f"é{i:04}" if i % 5 == 0 else f"{i:04}"
            for column, data in (("jpg", bytes([i]) * (i * 37)), ("cls", b"%d" % i)):
                if column == "cls" and i % 4 == 0:
                    continue
                info = tarfile.TarInfo(f"{key}.{column}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                members.append((info.name, data))
    ds = forebay.open(put("in/a.tar", out.getvalue()), client=client)
    ds.write(f"scratch/{scratch}/out/", "tar", shard_rows=15)
    found = []
    for data in shards_of(fetch("out/"), ".tar").values():
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            found += [(m.name, tar.extractfile(m).read()) for m in tar]
    assert sorted(found) == sorted(members)
    keys = [name.rpartition(".")[0] for name, _ in found]
    assert list(dict.fromkeys(keys)) == list(
        dict.fromkeys(n.rpartition(".")[0] for n, _ in members)
    )
    wrong = ds.write(f"scratch/{scratch}/numbered/", "tar", columns=["jpg"], key=None)
    assert plain(forebay.open(wrong.source, client=client))[7]["__key__"] == "000000007"


@pytest.mark.parametrize("compression", [None, "gz", "zstd"])
def test_jsonl_is_read_by_json(source, scratch, fetch, client, compression):
    columns = ["id", "text", "tokens", "x", "good", "score"]
    done = source.write(
        f"scratch/{scratch}/out/",
        "jsonl",
        order=forebay.Window(20),
        columns=columns,
        shard_size=10_000,
        compression=compression,
    )
    end = {None: ".jsonl", "gz": ".jsonl.gz", "zstd": ".jsonl.zst"}[compression]
    shards = shards_of(fetch("out/"), end)
    assert len(shards) == done.shards
    if compression is None:
        assert done.shards > 3
        # A size in bytes is kept, more or less.
        sizes = [len(data) for data in list(shards.values())[:-1]]
        assert all(7_000 < size < 13_000 for size in sizes), sizes
    lines = []
    for data in shards.values():
        if compression == "gz":
            data = gzip.decompress(data)
        if compression == "zstd":
            data = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        lines += [json.loads(line) for line in data.splitlines()]
    expected = in_order(source, forebay.Window(20), columns=columns)
    assert lines == expected
    assert plain(forebay.open(done.source, client=client).take(range(ROWS), ["id"])) == [
        {"id": row["id"]} for row in expected
    ]


def test_lines_and_records_are_written_as_they_are(put, client, scratch, fetch):
    lines = [b'{"a": %d,   "b":"\\u00e9"}' % i for i in range(60)]
    ds = forebay.open(put("in/a.jsonl", b"\n".join(lines)), client=client, columns=["json"])
    ds.write(f"scratch/{scratch}/lines/", "jsonl", shard_rows=25)
    found = b"".join(shards_of(fetch("lines/"), ".jsonl").values())
    assert found.splitlines() == lines
    records = [random.Random(i).randbytes(i * 3) for i in range(60)]
    framed = b"".join(map(_encode.tf_frame, records))
    ds = forebay.open(put("in/a.tfrecord", framed), client=client)
    ds.write(f"scratch/{scratch}/records/", "tfrecord", shard_rows=25)
    assert b"".join(shards_of(fetch("records/"), ".tfrecord").values()) == framed


def records_of(data: bytes) -> list[bytes]:
    """The records of a TFRecord file, with every checksum checked by a table of this test's own."""
    out, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at : at + 8])
        record = data[at + 12 : at + 12 + length]
        assert len(record) == length
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(record)
        out.append(record)
        at += 16 + length
    return out


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


def masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("compression", [None, "gz"])
def test_tfrecord_is_read_by_its_library_and_every_checksum_holds(
    source, scratch, fetch, client, compression, tmp_path
):
    from tfrecord import example_pb2, tfrecord_loader

    done = source.write(
        f"scratch/{scratch}/out/", "tfrecord", order="full", shard_rows=170, compression=compression
    )
    files = fetch("out/")
    shards = shards_of(files, ".tfrecord.gz" if compression else ".tfrecord")
    if compression:
        shards = {name: gzip.decompress(data) for name, data in shards.items()}
    records = [record for data in shards.values() for record in records_of(data)]
    expected, example = in_order(source, "full"), example_pb2.Example
    for record, row in zip(records, expected, strict=True):
        feature = example.FromString(record).features.feature
        assert list(feature["id"].int64_list.value) == [row["id"]]
        assert list(feature["data"].bytes_list.value) == [row["data"]]
        assert list(feature["text"].bytes_list.value) == [row["text"].encode()]
        assert list(feature["tokens"].int64_list.value) == row["tokens"]
        assert list(feature["x"].float_list.value) == row["x"]
        assert list(feature["good"].int64_list.value) == [row["good"]]
    if compression:
        return
    for name, data in shards.items():
        offsets = [tuple(map(int, line.split())) for line in files[f"{name}.idx"].splitlines()]
        at = 0
        for (offset, size), record in zip(offsets, records_of(data), strict=True):
            assert (offset, size) == (at, len(record) + 16)
            at += size
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.idx").write_bytes(files[f"{name}.idx"])
    found = []
    for name in shards:
        kinds = {"id": "int", "data": "byte", "score": "float"}
        # The whole file as its only shard: otherwise it begins at a random record.
        file = str(tmp_path / name)
        found += tfrecord_loader(file, f"{file}.idx", kinds, shard=(0, 1))
    assert [(int(r["id"][0]), bytes(r["data"]), float(r["score"][0])) for r in found] == [
        (row["id"], row["data"], row["score"]) for row in expected
    ]
    for opened in (done.source, done.target):
        again = forebay.open(opened, client=client, example=True)
        assert [row["id"] for row in again.take(range(ROWS), ["id"])] == [
            row["id"] for row in expected
        ]


def test_features_that_only_later_records_have_are_read_by_their_names(put, client, node, scratch):
    rows, first = 3_000, 2_000
    values = {
        "id": list(range(rows)),
        "late": [None] * first + ["x"] * (rows - first),
        "tags": [[]] * first + [["a", "é"]] * (rows - first),
    }
    put("in.parquet", parquet(pa.table(values)))
    source = forebay.open(f"scratch/{scratch}/in.parquet", client=client)
    done = source.write(f"scratch/{scratch}/out/", "tfrecord")
    example = {"late": "string", "id": "int64", "tags": "list<string>"}
    read = forebay.open(done.source, client=client, example=example)
    assert read.schema.keys() == example.keys() == set(values)
    assert plain(read.take([0, first])) == [
        {"id": 0, "late": None, "tags": []},
        {"id": first, "late": "x", "tags": ["a", "é"]},
    ]
    for wrong, said in (
        ({}, "example is {}"),
        ({1: "int64"}, "example is {1"),
        ({"id": "int32"}, "feature 'id' is 'int32'.*list<float>"),
        ({"id": ["int64"]}, "feature 'id' is"),
    ):
        with pytest.raises(forebay.InvalidRequest, match=said):
            forebay.open(done.source, client=client, example=wrong)
    command = ["reshard", done.source, f"scratch/{scratch}/again/", "--format", "jsonl"]
    named = [f"--feature={name}={kind}" for name, kind in example.items()]
    both = [*named, "--example"]
    for options, status in ((named[:1] * 2, 2), (["--feature=id"], 2), (both, 2), (named, 0)):
        told = reshard(node, *command, *options)
        assert told.returncode == status, told.stderr
        assert ("not allowed with" in told.stderr) == (options == both)
    again = forebay.open(f"manifest:scratch/{scratch}/again/_manifest", client=client)
    assert plain(again.take([first])) == plain(read.take([first]))


def read_mds(files: dict[str, bytes]) -> list[dict]:
    """A reader of MDS by its documented format, which takes nothing on trust."""
    index = json.loads(files["index.json"])
    assert index["version"] == 2
    rows = []
    for shard in index["shards"]:
        assert (shard["version"], shard["format"]) == (2, "mds")
        raw = shard["raw_data"]
        if shard["zip_data"] is None:
            data = files[raw["basename"]]
        else:
            packed = files[shard["zip_data"]["basename"]]
            assert len(packed) == shard["zip_data"]["bytes"]
            assert shard["zip_data"]["basename"].startswith(f"{raw['basename']}.")
            if shard["compression"] == "gz":
                data = gzip.decompress(packed)
            else:
                # As `zstd.decompress` does, from the size that the frame states.
                data = pa.decompress(packed, raw["bytes"], "zstd", asbytes=True)
        assert len(data) == raw["bytes"]
        (count,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        config = json.loads(data[4 + 4 * len(offsets) : offsets[0]])
        names = ("column_names", "column_encodings", "column_sizes", "compression", "hashes")
        assert {n: config[n] for n in names} == {n: shard[n] for n in names}
        assert (count, offsets[-1]) == (shard["samples"], len(data))
        assert config["column_names"] == sorted(config["column_names"])
        for begin, end in itertools.pairwise(offsets):
            rows.append(mds_sample(data[begin:end], config))
    return rows


def mds_sample(data: bytes, config: dict) -> dict:
    sizes = list(config["column_sizes"])
    variable = sum(size is None for size in sizes)
    given = list(struct.unpack_from(f"<{variable}I", data))
    at, row = 4 * variable, {}
    for name, encoding, size in zip(
        config["column_names"], config["column_encodings"], sizes, strict=True
    ):
        size = given.pop(0) if size is None else size
        row[name] = mds_value(encoding, data[at : at + size])
        at += size
    assert at == len(data)
    return row


def mds_value(encoding: str, data: bytes):
    if encoding in ("bytes", "str", "json"):
        return {"bytes": bytes, "str": bytes.decode, "json": json.loads}[encoding](data)
    if not encoding.startswith("ndarray"):
        (value,) = np.frombuffer(data, encoding)
        return value.item()
    _, dtype, *shape = encoding.split(":")
    if shape:
        return np.frombuffer(data, dtype).reshape([int(n) for n in shape[0].split(",")]).tolist()
    axes, wide = data[0] >> 2, 1 << (data[0] & 3)
    dims = np.frombuffer(data[1 : 1 + axes * wide], f"u{wide}")
    return np.frombuffer(data[1 + axes * wide :], dtype).reshape(dims).tolist()


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz"])
def test_mds_is_what_its_format_says(source, scratch, fetch, compression):
    done = source.write(
        f"scratch/{scratch}/out/",
        "mds",
        order="full",
        seed=9,
        shard_rows=150,
        compression=compression,
    )
    files = fetch("out/")
    assert done.shards == 4 and len(files) == 6
    assert read_mds(files) == in_order(source, "full", 9)
    encodings = json.loads(files["index.json"])["shards"][0]["column_encodings"]
    assert encodings == [
        "bytes",
        "uint8",
        "int64",
        "float32",
        "str",
        "ndarray:int32",
        "ndarray:float32:2",
    ]


def test_datasets_reads_what_was_written(source, scratch, fetch, tmp_path):
    import datasets

    for format in ("parquet", "jsonl"):
        source.write(
            f"scratch/{scratch}/{format}/", format, columns=["id", "text", "tokens"], shard_rows=200
        )
        files = shards_of(fetch(f"{format}/"), f".{format}")
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        loaded = datasets.load_dataset(
            {"parquet": "parquet", "jsonl": "json"}[format],
            data_files=[str(tmp_path / name) for name in files],
            split="train",
            cache_dir=str(tmp_path / "cache"),
        )
        assert loaded["id"][:] == list(range(ROWS)) and loaded[7]["text"] == "row 7 é"


def test_features_hold_every_whole_number(client, put, scratch, fetch):
    from tfrecord import example_pb2

    edges = [0, 1, 127, 128, 16383, 16384, 1 << 31, (1 << 63) - 1, -1, -128, -(1 << 63)]
    rows = pa.table(
        {
            "many": pa.array([edges, edges[::-1] * 3, [5] * 9, []], pa.list_(pa.int64())),
            "small": pa.array([[255, 0], [1] * 300, [], None], pa.list_(pa.uint8())),
            "one": pa.array([-1, 1 << 40, 0, 300], pa.int64()),
            "none": pa.array([None, 7, None, 8], pa.int64()),
        }
    )
    ds = forebay.open(put("in/a.parquet", parquet(rows)), client=client)
    ds.write(f"scratch/{scratch}/out/", "tfrecord")
    (data,) = shards_of(fetch("out/"), ".tfrecord").values()
    for record, row in zip(records_of(data), rows.to_pylist(), strict=True):
        feature = example_pb2.Example.FromString(record).features.feature
        for name, value in row.items():
            expected = value if isinstance(value, list) else [] if value is None else [value]
            assert list(feature[name].int64_list.value) == expected
    large = pa.table({"n": pa.array([1 << 63], pa.uint64())})
    ds = forebay.open(put("large/a.parquet", parquet(large)), client=client)
    with pytest.raises(forebay.SampleFailed, match=r"2\*\*63"):
        ds.write(f"scratch/{scratch}/large-out/", "tfrecord")


# Orders


@pytest.mark.parametrize("order", [None, "window:30", "block:2", "full"])
def test_the_order_is_the_loaders_in_any_epoch(source, scratch, fetch, order):
    source.write(
        f"scratch/{scratch}/out/", order=order, seed=5, epoch=2, shard_rows=90, columns=["id"]
    )
    loader = source.loader(64, shuffle=order, seed=5, columns=["id"], uneven="pad", epochs=3)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "position": 0})
    expected = [i for b in loader for i in b.numpy()["id"][: loader.last.real].tolist()]
    files = shards_of(fetch("out/"), ".parquet")
    assert [row["id"] for row in read_parquet(files)] == expected
    assert sorted(expected) == list(range(ROWS))


def test_a_mix_is_written_by_weight(source, put, client, scratch, fetch):
    other = forebay.open(put("b/0.parquet", parquet(table(200, 10_000))), client=client)
    mix = forebay.mix([source, other], [0.75, 0.25], epoch_rows=400)
    done = mix.write(f"scratch/{scratch}/out/", order="full", seed=2, shard_rows=100)
    loader = mix.loader(50, shuffle="full", seed=2)
    expected = [row for batch in loader for row in plain(batch)]
    assert read_parquet(shards_of(fetch("out/"), ".parquet")) == expected
    assert (done.rows, sum(row["id"] >= 10_000 for row in expected)) == (400, 100)
    odd = forebay.open(put("c/0.parquet", parquet(table(9).drop(["x"]))), client=client)
    with pytest.raises(
        forebay.InvalidRequest,
        match=r"different columns: 'x' is list<float32, 2> there and missing here",
    ):
        forebay.mix([source, odd]).write(f"scratch/{scratch}/odd/")
    assert not fetch("odd/")
    # Types of another unit or zone are others in Parquet, and texts in JSON.
    times = [
        forebay.open(
            put(f"times/{n}.parquet", parquet(pa.table({"t": pa.array([n], kind)}))), client=client
        )
        for n, kind in enumerate(
            [pa.timestamp("us"), pa.timestamp("ms"), pa.timestamp("us", "UTC")]
        )
    ]
    for other in times[1:]:
        mix = forebay.mix([times[0], other], [0.5, 0.5], epoch_rows=2)
        with pytest.raises(
            forebay.InvalidRequest,
            match="different columns: 't' is timestamp<us> there and timestamp",
        ):
            mix.write(f"scratch/{scratch}/odd/")
        assert mix.write(f"scratch/{scratch}/texts-{other.id}/", format="jsonl").rows == 2
    assert not fetch("odd/")


TEXTS = ["a", None, "", "é"] * 10
WAYS = {
    "text": pa.string(),
    "long": pa.large_string(),
    "view": string_view(),
    "coded": pa.dictionary(pa.int32(), pa.string()),
    "coded-long": pa.dictionary(pa.int8(), pa.large_string()),
    "bytes": pa.binary(),
    "long-bytes": pa.large_binary(),
    "list": pa.list_(pa.string()),
    "list-of-coded": pa.list_(pa.dictionary(pa.int32(), pa.string())),
    "long-list": pa.large_list(pa.large_string()),
    "full-list": pa.list_(pa.field("x", pa.string(), nullable=False)),
    "struct": pa.struct([pa.field("a", pa.string()), pa.field("b", pa.list_(pa.int8()))]),
    "full-struct": pa.struct(
        [pa.field("a", pa.large_string(), nullable=False), pa.field("b", pa.large_list(pa.int8()))]
    ),
}


def in_a_way(name: str) -> pa.Table:
    """The same values in one of the ways in which Arrow holds them."""
    kind = WAYS[name]
    values = TEXTS
    if "list" in name:
        values = [None if text is None else [text, "b"] for text in TEXTS]
    if "struct" in name:
        values = [None if text is None else {"a": text, "b": [1]} for text in TEXTS]
    return pa.table({"t": pa.array(values, kind)})


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("text", "long", pa.large_string()),
        ("view", "text", pa.string()),
        ("view", "long", pa.large_string()),
        ("coded", "text", pa.string()),
        ("coded", "coded-long", pa.large_string()),
        ("bytes", "long-bytes", pa.large_binary()),
        ("list", "long-list", pa.large_list(pa.large_string())),
        ("full-list", "list-of-coded", pa.list_(pa.string())),
        ("full-struct", "struct", pa.struct({"a": "large_string", "b": pa.large_list(pa.int8())})),
    ],
)
def test_columns_that_hold_the_same_values_are_one_in_all_shards(
    put, client, scratch, fetch, one, other, kind
):
    parts = [
        forebay.open(put(f"{way}/a.parquet", parquet(in_a_way(way))), client=client)
        for way in (one, other)
    ]
    expected = in_a_way(one).to_pylist()
    for n, datasets in enumerate([parts, parts[::-1]]):
        mix = forebay.mix(datasets, [0.5, 0.5], epoch_rows=80)
        (batch,) = mix.loader(80, output="arrow", epochs=1)
        assert batch.schema.types == [kind]
        assert batch.to_pylist() == [row for row in expected for _ in range(2)]
        done = mix.write(f"scratch/{scratch}/out-{n}/", shard_rows=30, row_group_rows=25)
        shards = shards_of(fetch(f"out-{n}/"), ".parquet")
        tables = [pq.read_table(io.BytesIO(data)) for data in shards.values()]
        assert [table.schema.types for table in tables] == [[kind]] * 3
        assert pa.concat_tables(tables).to_pylist() == batch.to_pylist()
        assert len(forebay.open(done.source, client=client)) == 80


def test_what_may_be_missing_in_one_part_may_be_in_all_shards(put, client, scratch, fetch):
    full = pa.schema([pa.field("i", pa.int64(), nullable=False)])
    one = pa.table({"i": list(range(40))}, schema=full)
    other = pa.table({"i": [None, *range(39)]})
    parts = [
        forebay.open(put(f"{n}/a.parquet", parquet(part)), client=client)
        for n, part in enumerate([one, other])
    ]
    forebay.concatenate(parts).write(f"scratch/{scratch}/out/", shard_rows=30)
    shards = shards_of(fetch("out/"), ".parquet").values()
    assert [pq.read_schema(io.BytesIO(data)) for data in shards] == [other.schema] * 3
    assert pa.concat_tables(pq.read_table(io.BytesIO(data)) for data in shards).equals(
        pa.concat_tables([one.cast(other.schema), other]).combine_chunks()
    )
    # Of one alone, it is what it was.
    parts[0].write(f"scratch/{scratch}/full/")
    (data,) = shards_of(fetch("full/"), ".parquet").values()
    assert pq.read_schema(io.BytesIO(data)) == full


def test_maps_are_one_whatever_their_entries_are_called(put, client, scratch, fetch):
    kind = pa.map_(pa.string(), pa.list_(pa.int8()))
    table = pa.table({"id": range(9), "m": pa.array([[("a", [1, None])], None, []] * 3, kind)})
    data = io.BytesIO()
    with pa.ipc.new_file(data, table.schema) as file:
        file.write_table(table)
    # Parquet calls the entries "key_value".
    parts = [
        forebay.open(put("a.arrow", data.getvalue()), client=client),
        forebay.open(put("a.parquet", parquet(table)), client=client),
    ]
    assert parts[0].schema["m"] != parts[1].schema["m"]
    for n, datasets in enumerate([parts, parts[::-1]]):
        mix = forebay.mix(datasets, [1, 1], epoch_rows=18)
        rows = sorted(table.to_pylist() * 2, key=lambda row: row["id"])
        for format in ("parquet", "jsonl"):
            done = mix.write(f"scratch/{scratch}/{format}-{n}/", format, shard_rows=5)
            assert done.rows == 18
        shards = shards_of(fetch(f"parquet-{n}/"), ".parquet").values()
        written = pa.concat_tables(pq.read_table(io.BytesIO(data)) for data in shards)
        assert sorted(written.to_pylist(), key=lambda row: row["id"]) == rows
    # Of other values they are others.
    other = pa.table({"id": [1], "m": pa.array([None], pa.map_(pa.string(), pa.int8()))})
    odd = forebay.open(put("odd.parquet", parquet(other)), client=client)
    says = "'m' is map<text, list<int8>> there and map<text, int8> here"
    with pytest.raises(forebay.InvalidRequest, match=says):
        forebay.mix([parts[0], odd], [1, 1], epoch_rows=2).write(f"scratch/{scratch}/odd/")


def test_types_are_one_only_where_what_they_say_is_the_same():
    from forebay import _alike

    def point(crs: str) -> pa.Field:
        said = {"ARROW:extension:name": "geoarrow.point", "ARROW:extension:metadata": crs}
        return pa.field("p", pa.list_(pa.float64(), 2), metadata=said)

    def schema(kind) -> pa.Schema:
        return pa.schema([pa.field("x", kind)])

    for made in (lambda of: pa.struct([of]), pa.list_, lambda of: pa.map_(pa.string(), of)):
        one, other = (schema(made(point(crs))) for crs in ("4326", "3857"))
        assert _alike.schema_of([one, one]) == one
        with pytest.raises(_alike.Differ):
            _alike.schema_of([one, other])
    # Other metadata of inner fields does not make types differ.
    named = pa.field("i", pa.int8(), metadata={"PARQUET:field_id": "7"})
    two = [schema(pa.struct([named])), schema(pa.struct([named.remove_metadata()]))]
    assert _alike.schema_of(two) == two[1]
    views = pa.array(["a", None, "b"], string_view())
    dictionary = pa.DictionaryArray.from_arrays(pa.array([2, None, 0, 1], pa.int8()), views)
    batch = pa.RecordBatch.from_pydict({"x": dictionary})
    whole = _alike.schema_of([batch.schema, schema(pa.string())])
    assert _alike.cast(batch, whole)["x"].to_pylist() == ["b", None, "a", None]


def test_columns_that_no_one_type_holds_are_refused_before_anything_is_written(
    put, client, scratch, fetch
):
    ids = [bytes([i]) * 16 for i in range(9)]
    parts = [
        forebay.open(put(f"{n}/a.parquet", parquet(pa.table({"id": array}))), client=client)
        for n, array in enumerate([pa.array(ids, pa.binary()), pa.array(ids, pa.uuid())])
    ]
    mix = forebay.mix(parts)
    says = r"different columns: 'id' is binary there and extension<arrow\.uuid> here"
    with pytest.raises(forebay.InvalidRequest, match=rf"0/a\.parquet and .*1/a\.parquet.*{says}"):
        mix.write(f"scratch/{scratch}/out/")
    assert not fetch("out/")
    (batch,) = mix.loader(18, epochs=1)
    with pytest.raises(TypeError, match="'id' is binary there and extension"):
        batch.arrow()


@pytest.mark.parametrize(
    "values",
    [
        pa.array([{}, None], pa.struct([])),
        pa.RunEndEncodedArray.from_arrays([1, 2], ["a", None]),
        pa.array([Decimal("12300"), None], pa.decimal128(5, -2)),
        pa.array([b"", None], pa.binary(0)),
        pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
        pa.array([[], None], pa.list_(pa.int8(), 0)),
        pa.array([{"a": []}, None], pa.struct([("a", pa.list_(pa.int8(), 0))])),
    ],
    ids=lambda values: str(values.type),
)
def test_columns_that_parquet_does_not_have_are_refused_by_name(
    put, client, scratch, fetch, values
):
    of = pa.table({"id": [1, 2], "odd": values})
    data = io.BytesIO()
    with pa.ipc.new_file(data, of.schema) as file:
        file.write_table(of)
    ds = forebay.open(put("a.arrow", data.getvalue()), client=client)
    with pytest.raises(forebay.InvalidRequest, match="parquet cannot hold column 'odd'") as told:
        ds.write(f"scratch/{scratch}/out/")
    assert "columns=" in told.value.hint and 'format="parquet"' not in told.value.hint
    assert not fetch("out/")
    assert ds.write(f"scratch/{scratch}/out/", columns=["id"]).rows == 2


@pytest.mark.parametrize("way", ["struct", "list", "large_list", "fixed", "map", "deep"])
@pytest.mark.parametrize("view", [string_view(), binary_view()], ids=str)
def test_views_in_structs_are_written_as_texts_and_bytes(put, client, scratch, fetch, way, view):
    long = pa.large_string() if view == string_view() else pa.large_binary()
    value = "a" * 20 if view == string_view() else b"a" * 20

    def kind(of):
        struct = pa.struct([pa.field("a", of), pa.field("n", pa.int8())])
        return {
            "struct": struct,
            "list": pa.list_(struct),
            "large_list": pa.large_list(struct),
            "fixed": pa.list_(struct, 1),
            "map": pa.map_(pa.string(), struct),
            "deep": pa.struct([("x", pa.list_(pa.struct([("y", pa.list_(of))])))]),
        }[way]

    one = {"a": value, "n": 1}
    values = {
        "struct": [one, None, {"a": None, "n": 2}],
        "list": [[one], None, [], [{"a": None, "n": 2}, None, one]],
        "large_list": [[one, one], None, []],
        "fixed": [[one], None, [None]],
        "map": [[("k", one)], None, [], [("k", None), ("l", one)]],
        "deep": [{"x": [{"y": [value, None]}]}, None, {"x": None}, {"x": [{"y": None}]}],
    }[way]
    table = pa.table({"id": range(40), "v": pa.array((values * 20)[:40], kind(view))})
    data = io.BytesIO()
    with pa.ipc.new_file(data, table.schema) as file:
        file.write_table(table, max_chunksize=17)
    ds = forebay.open(put("a.arrow", data.getvalue()), client=client)
    done = ds.write(f"scratch/{scratch}/out/", shard_rows=23, row_group_rows=7)
    shards = shards_of(fetch("out/"), ".parquet").values()
    tables = [pq.read_table(io.BytesIO(data)) for data in shards]
    assert pa.concat_tables(tables).to_pylist() == table.to_pylist()
    (batch,) = forebay.open(done.source, client=client).loader(40, output="arrow", epochs=1)
    assert batch.to_pylist() == table.to_pylist()
    assert all(str(long) in str(of) for of in (tables[0].schema, batch.schema))


def test_only_what_has_a_fixed_size_of_none_is_refused_for_it():
    for kind in ("list<decimal<5, 0>, 10>", 'struct<"a, 0>": list<int8, 3>>', "list<int8>"):
        assert _encode.Parquet.can_hold(None, kind)
    for kind in ("list<list<int8, 0>, 2>", "tensor<int8, 0, 3>", "tensor<int8, 3, 0>"):
        assert not _encode.Parquet.can_hold(None, kind)


def test_what_was_chosen_renamed_and_put_together_is_written(source, put, client, scratch, fetch):
    other = forebay.open(put("b/0.parquet", parquet(table(200, 10_000))), client=client)
    made = forebay.concatenate([source.filter(forebay.col("id") >= 300), other.select(range(50))])
    made = made.rename({"text": "caption"}).cast({"score": "float64"})
    columns = ["id", "caption", "score"]
    done = made.write(
        f"scratch/{scratch}/out/", order="block:2", seed=3, columns=columns, shard_rows=60
    )
    expected = in_order(made, "block:2", 3, columns=columns)
    found = read_parquet(shards_of(fetch("out/"), ".parquet"))
    assert found == expected and len(found) == done.rows == 250
    assert list(found[0]) == columns and {r["id"] for r in found} == {
        *range(300, 500),
        *range(10_000, 10_050),
    }
    with pytest.raises(forebay.Conflict, match=r"another dataset \(or another version"):
        made.select(range(100)).write(
            f"scratch/{scratch}/out/", order="block:2", seed=3, columns=columns, shard_rows=60
        )
    twice = (
        source.select(range(10))
        .repeat(3)
        .write(f"scratch/{scratch}/thrice/", "jsonl", columns=["id"])
    )
    assert twice.rows == 30
    (lines,) = shards_of(fetch("thrice/"), ".jsonl").values()
    assert [json.loads(line)["id"] for line in lines.splitlines()] == [*range(10)] * 3
    # A column that is only called like the lines of JSONL is none.
    named = forebay.open(put("c/a.jsonl", b'{"x": "a"}\n{"x": "b"}\n'), client=client)
    named = named.rename({"json": "line", "x": "json"})
    named.write(f"scratch/{scratch}/named/", "jsonl", columns=["json"])
    (lines,) = shards_of(fetch("named/"), ".jsonl").values()
    assert lines == b'{"json":"a"}\n{"json":"b"}\n'


# Refused before work begins


def test_what_makes_no_sense_is_refused_before_anything_is_written(source, scratch, fetch, client):
    out = f"scratch/{scratch}/out/"
    for arguments, message in [
        ({"format": "csv"}, "csv.*parquet"),
        ({"format": ["csv"]}, "csv.*parquet"),
        ({"shard_size": 0}, "shard_size"),
        ({"shard_size": "0MiB"}, "shard_size"),
        ({"shard_size": "big"}, "not a size"),
        ({"shard_rows": 0}, "shard_rows"),
        ({"shard_rows": True}, "shard_rows"),
        ({"shard_rows": 5, "shard_size": 5}, "not both"),
        ({"compression": "rar"}, "no compression 'rar'.*zstd"),
        ({"compression": "zstd:x"}, "level"),
        ({"compression": "zstd:99"}, "1 to 22"),
        ({"compression": "gzip:15"}, "level of gzip is a number from 1 to 9"),
        ({"compression": "snappy:3"}, "snappy has no levels"),
        ({"format": "tar", "compression": "zstd"}, "no compression"),
        ({"format": "tar", "row_group_rows": 5}, "row_group_rows"),
        ({"columns": ["nothing"]}, "no column 'nothing'"),
        ({"columns": []}, "empty"),
        ({"columns": ["id", "id"]}, "named 2 times"),
        ({"format": "tar"}, "tar cannot hold column 'tokens', which is list<int32>"),
        ({"format": "jsonl"}, "jsonl cannot hold column 'data', which is bytes"),
        ({"name": "a/b"}, "name"),
        ({"writers": 0}, "writers"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 10**30}, "epoch"),
        ({"writers": 1.5}, "writers"),
        ({"seed": -1}, "seed"),
        ({"retry_for": -1}, "retry_for"),
        ({"retry_for": "1"}, "retry_for"),
    ]:
        with pytest.raises(forebay.InvalidRequest, match=message):
            source.write(out, **arguments)
    numbers = Request(out, shard_rows=np.int64(5), writers=np.int64(2), epoch=np.int64(1)).checked()
    assert numbers == Request(out, shard_rows=5, writers=2, epoch=1).checked()
    assert type(numbers.shard_rows) is int and size_of(np.int64(5)) == 5
    assert Request(out, retry_for=np.float32(1.5)).checked().retry_for == 1.5
    mapped = source.map(len)
    for of in (mapped, mapped.skip(1), forebay.mix([source, mapped])):
        with pytest.raises(forebay.InvalidRequest, match="has a map.*as they are stored"):
            of.write(out)
    with pytest.raises(ValueError, match="not a shuffle"):
        source.write(out, order="sideways")
    # It is an argument of that name that is wrong.
    with pytest.raises(TypeError, match="^order "):
        source.write(out, order=[1, 2, 3])
    with pytest.raises(TypeError, match="client must be"):
        source.write(out, client="http://127.0.0.1:1")
    for target in ("", "s3://", "/x", "scratch/*/", "scratch/\ud800/"):
        with pytest.raises(forebay.InvalidRequest, match="not a target"):
            source.write(target)
    with pytest.raises(forebay.NotFound, match="no-such-bucket"):
        source.write("no-such-bucket/x/")
    assert not fetch("out/")


def test_a_target_among_the_sources_is_refused(source, scratch, client, fetch):
    here = f"scratch/{scratch}"
    before = fetch("")
    whole = forebay.open(f"{here}/in/", client=client)
    deep = forebay.open(f"s3://{here}/**.parquet", client=client)
    for ds, target in [
        (source, f"{here}/in/"),
        (whole, f"{here}/in/new/"),
        (deep, f"{here}/new/"),
        (deep, f"{here}/"),
        (forebay.mix([source, whole]), f"{here}/in/new/"),
    ]:
        with pytest.raises(forebay.InvalidRequest, match="under the source|which the dataset"):
            ds.write(target)
    assert fetch("") == before
    # What the pattern does not match may be beside it.
    source.write(f"{here}/in/new/", shard_rows=400)
    assert len(forebay.open(f"{here}/in/*.parquet", client=client)) == ROWS


def test_a_target_that_the_bucket_refuses_is_not_written_by_another_process(source, put, fetch):
    # This S3 server keeps objects as files, which cannot be directories too.
    with pytest.raises(forebay.Conflict) as refused:
        source.write(put("file", b"one object"))
    assert "another process" not in str(refused.value)
    assert "/file/" in refused.value.message and "another prefix" in refused.value.hint
    assert fetch("file/") == {}


def test_rows_that_a_format_cannot_hold_are_named(put, client, scratch, fetch):
    rows = pa.table({"__key__": ["a", "b.c", "d"], "n": [1.0, float("nan"), None], "i": [1, 2, 3]})
    ds = forebay.open(put("in/a.parquet", parquet(rows)), client=client)
    for arguments, message in [
        (
            {"format": "jsonl"},
            r"position 1 .*column 'n'.*; it is row 1 of scratch/.*in/a\.parquet .*NaN",
        ),
        ({"format": "tar"}, r"position 1 .*'b\.c'"),
        ({"format": "mds"}, r"position 2 .*column 'n' has no value"),
        ({"format": "tar", "key": None, "columns": ["n"]}, r"position 2 .*no sample"),
    ]:
        with pytest.raises(forebay.SampleFailed, match=message) as failed:
            ds.write(f"scratch/{scratch}/{arguments['format']}-{len(arguments)}/", **arguments)
        assert failed.value.row == failed.value.row_in_file and failed.value.file.endswith(
            ".parquet"
        )
    with pytest.raises(forebay.InvalidRequest, match="32 bits"):
        ds.write(f"scratch/{scratch}/tf/", "tfrecord")
    same = pa.table({"__key__": ["a", "a"], "i": [1, 2]})
    ds = forebay.open(put("same/a.parquet", parquet(same)), client=client)
    with pytest.raises(forebay.SampleFailed, match="that of the row before"):
        ds.write(f"scratch/{scratch}/twice/", "tar")
    empty = pa.table({"l": pa.array([[1], []], pa.list_(pa.int32()))})
    ds = forebay.open(put("empty/a.parquet", parquet(empty)), client=client)
    with pytest.raises(
        forebay.SampleFailed, match="position 1 .*column 'l': its list is"
    ) as failed:
        ds.write(f"scratch/{scratch}/empty-list/", "mds")
    assert """columns={'l': "json"}""" in failed.value.hint
    # Not where it does not help.
    nan = pa.table({"l": pa.array([[float("nan")]], pa.list_(pa.float32()))})
    ds = forebay.open(put("nan/a.parquet", parquet(nan)), client=client)
    with pytest.raises(forebay.SampleFailed, match="column 'l'") as failed:
        ds.write(f"scratch/{scratch}/not-a-number/", "mds", columns={"l": "json"})
    assert failed.value.hint is None
    assert not any(name.endswith("_manifest") for name in fetch(""))


def test_a_value_that_parquet_does_not_hold_is_named(put, client, scratch, fetch):
    """Without any option: seconds become milliseconds there."""
    seconds = pa.table({"t": pa.array([0, 1, 2**62, 3], pa.timestamp("s"))})
    out = io.BytesIO()
    with pa.ipc.new_file(out, seconds.schema) as file:
        file.write_table(seconds)
    put("in/0.arrow", out.getvalue())
    ds = forebay.open(f"scratch/{scratch}/in/*.arrow", client=client)
    for options in ({}, {"compression": "zstd"}, {"shard_rows": 2}):
        with pytest.raises(forebay.SampleFailed, match="written: PyArrow .* row 2 of") as e:
            ds.write(f"scratch/{scratch}/out/", **options)
        assert e.value.row == 2
        assert all(name.startswith(("shard-", "_forebay/")) for name in fetch("out/"))
    done = ds.take(2).write(f"scratch/{scratch}/other/")
    assert done.rows == 2


def test_a_write_that_its_rows_refuse_leaves_the_target_to_another(put, client, scratch, fetch):
    rows = pa.table({"id": range(9), "n": [None if i == 5 else i for i in range(9)]})
    ds = forebay.open(put("in/a.parquet", parquet(rows)), client=client)
    # No shard was there yet.
    with pytest.raises(forebay.SampleFailed):
        ds.write(f"scratch/{scratch}/whole/", "mds")
    assert not fetch("whole/")
    assert ds.write(f"scratch/{scratch}/whole/", "mds", columns=["id"]).rows == 9
    # One was: the target still belongs to the write that made it.
    with pytest.raises(forebay.SampleFailed) as failed:
        ds.write(f"scratch/{scratch}/some/", "mds", shard_rows=3, writers=1)
    # What can be done: other arguments alone are refused, and the same ones fail again.
    assert f"scratch/{scratch}/some/" in failed.value.hint
    assert {name.rpartition("/")[2] for name in fetch("some/")} == {
        "unfinished.json",
        "shard-00000-of-00003.mds",
    }
    with pytest.raises(forebay.Conflict, match="column 'n' has no value") as refused:
        ds.write(f"scratch/{scratch}/some/", "mds", columns=["id"])
    assert "same arguments" not in refused.value.hint
    with pytest.raises(forebay.SampleFailed):
        ds.write(f"scratch/{scratch}/some/", "mds", shard_rows=3, writers=1)
    for name in fetch("some/"):
        client.delete(f"scratch/{scratch}/some/{name}")
    assert ds.write(f"scratch/{scratch}/some/", "mds", columns=["id"]).rows == 9


def test_a_write_whose_files_change_leaves_the_target_to_another(
    put, client, scratch, fetch, monkeypatch
):
    # Not all of them are looked at before the claim.
    monkeypatch.setattr(forebay._write, "SAMPLE_ROWS", 8)
    for i in range(40):
        put(f"in/{i:03}.bin", b"%d" % i)
    ds = forebay.open(f"scratch/{scratch}/in/*.bin", client=client)
    put("in/012.bin", b"another")
    # No shard was there yet.
    with pytest.raises(forebay.Changed, match=r"012\.bin"):
        ds.write(f"scratch/{scratch}/whole/", shard_rows=20, writers=1)
    assert not fetch("whole/")
    # One was: the error says so, and that another version is another write.
    with pytest.raises(forebay.Changed, match=r"012\.bin") as changed:
        ds.write(f"scratch/{scratch}/some/", shard_rows=10, writers=1)
    assert f"scratch/{scratch}/some/" in changed.value.hint
    assert "open it again" in changed.value.hint
    again = forebay.open(f"scratch/{scratch}/in/*.bin", client=client)
    with pytest.raises(forebay.Conflict, match="which failed .*another version of it"):
        again.write(f"scratch/{scratch}/some/", shard_rows=10, writers=1)
    assert again.write(f"scratch/{scratch}/whole/", shard_rows=20, writers=1).rows == 40


def test_samples_that_readers_would_not_see_are_refused(put, client, scratch, fetch):
    def of(columns: dict) -> forebay.Dataset:
        return forebay.open(put("in/a.parquet", parquet(pa.table(columns))), client=client)

    # Readers of WebDataset's tars skip members that are called like this.
    for n, columns in enumerate(
        [
            {"__key__": ["__x__/1", "y"], "txt": ["x", "y"]},
            {"__key__": ["a/__b", "y"], "x__": ["x", "y"]},
        ]
    ):
        with pytest.raises(forebay.SampleFailed, match=r"position 0 .*skip what is called '"):
            of(columns).write(f"scratch/{scratch}/skipped-{n}/", "tar")
    with pytest.raises(forebay.SampleFailed, match=r"position 0 .*not UTF-8"):
        of({"__key__": [b"a\xff"], "i": [1]}).write(f"scratch/{scratch}/bytes/", "tar")
    # Nor are those read that are called as what readers know of a sample.
    for name in ("__url__", "__Bad__", "__LOCAL_PATH__"):
        odd = of({"__key__": ["a", "b"], name: ["x", "y"], "txt": ["x", "y"]})
        target = f"scratch/{scratch}/of-readers{name}/"
        with pytest.raises(forebay.InvalidRequest, match=f"'{name}' would be a member"):
            odd.write(target, "tar")
        with pytest.raises(forebay.SampleFailed, match=f"encoder= gave, column '{name}' would be"):
            odd.write(target, "tar", encoder=lambda sample: sample)
    named = of({"k": ["a", "b"], "__key__": ["c", "d"], "i": [1, 2]})
    with pytest.raises(forebay.InvalidRequest, match="'__key__' would be a member"):
        named.write(f"scratch/{scratch}/member/", "tar", key="k")
    with pytest.raises(forebay.InvalidRequest, match="no column that is written") as caught:
        named.write(f"scratch/{scratch}/typo/", "tar", key="K", columns=["i"])
    assert "columns are i;" in caught.value.hint
    # Numbered, samples have another name.
    done = named.write(f"scratch/{scratch}/numbered/", "tar", key=None)
    rows = [dict(row) for row in forebay.open(done.source, client=client).take(range(2))]
    assert [row["__key__"] for row in rows] == ["000000000", "000000001"]
    assert {bytes(row["k"]) for row in rows} == {b"a", b"b"}
    assert not any(name.endswith("_manifest") for name in fetch("") if "numbered" not in name)


def test_times_are_texts_in_json_at_any_depth(put, client, scratch, fetch):
    zone = pa.timestamp("us", "Europe/Berlin")
    table = pa.table(
        {
            "ns": pa.array([1000, 1001, None], pa.timestamp("ns")),
            "zoned": pa.array([0, 253402300800 * 10**6, None], zone),
            "clock": pa.array([1000, 3_661_000_000_001, None], pa.time64("ns")),
            "list": pa.array([[0, None], [1], None], pa.list_(zone)),
            "fixed": pa.array([[0, 1], [2, 3], None], pa.list_(pa.timestamp("ns"), 2)),
            "clocks": pa.array([[1000], [], None], pa.list_(pa.time64("us"))),
            "deep": pa.array([{"a": [{"b": 0}]}, {"a": None}, None])
            .cast(pa.struct([("a", pa.list_(pa.struct([("b", pa.int64())])))]))
            .cast(pa.struct([("a", pa.list_(pa.struct([("b", zone)])))])),
            "numbers": pa.array([[1.5, None], [], None], pa.list_(pa.float64())),
        }
    )
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    done = ds.write(f"scratch/{scratch}/out/", "jsonl")
    [text] = [data for name, data in fetch("out/").items() if name.startswith("shard")]
    first, second, third = map(json.loads, text.splitlines())
    assert first == {
        "ns": "1970-01-01T00:00:00.000001",
        "zoned": "1970-01-01T01:00:00+01:00",
        "clock": "00:00:00.000001",
        "list": ["1970-01-01T01:00:00+01:00", None],
        "fixed": ["1970-01-01T00:00:00", "1970-01-01T00:00:00.000000001"],
        "clocks": ["00:00:00.001000"],
        "deep": {"a": [{"b": "1970-01-01T01:00:00+01:00"}]},
        "numbers": [1.5, None],
    }
    assert second["ns"] == "1970-01-01T00:00:00.000001001"
    # What Python's types do not hold is told in UTC.
    assert second["zoned"].startswith("10000-01-01T00:00:00") and second["zoned"].endswith("+00:00")
    assert second["clock"] == "01:01:01.000000001"
    assert second["clocks"] == [] and second["deep"] == {"a": None}
    assert set(third.values()) == {None}
    assert done.rows == 3


def test_a_missing_list_of_a_fixed_size_in_a_list_is_null_in_json(put, client, scratch, fetch):
    pair = pa.list_(pa.int32(), 2)
    rows = [[[1, 2], None], [None], [[None, None]], []]
    table = pa.table(
        {
            "l.json": pa.array(rows, pa.list_(pair)),
            "s.json": pa.array([{"a": row} for row in rows], pa.struct([("a", pa.list_(pair))])),
            "p.mp": pa.array(rows, pa.list_(pair)),
        }
    )
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    ds.write(f"scratch/{scratch}/tar/", "tar", key=None)
    [data] = [data for name, data in fetch("tar/").items() if name.endswith(".tar")]
    found: dict[str, list] = {"l.json": [], "s.json": [], "p.mp": []}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            name = member.name.partition(".")[2]
            read = msgpack.unpackb if name == "p.mp" else json.loads
            found[name].append(read(tar.extractfile(member).read()))
    assert found == {"l.json": rows, "s.json": [{"a": row} for row in rows], "p.mp": rows}
    ds.write(f"scratch/{scratch}/mds/", "mds")
    assert [row["l.json"] for row in read_mds(fetch("mds/"))] == rows


def test_columns_of_json_stay_what_they_are(put, client, scratch, fetch):
    rows = [
        {"a": 1, "list": [1, "x"], "of": {"k": 1}, "text": "[1]"},
        {"a": "x", "list": [{"é": None}], "of": {"k": "v"}, "text": "{}"},
        {"a": [1, {"b": 2.5}], "list": [], "of": {"k": None}, "text": "null"},
        {"a": 123456789012345678901, "list": [[0], None], "of": {"k": [1]}, "text": ""},
    ]
    lines = "\n".join(map(json.dumps, rows))
    ds = forebay.open(put("in/a.jsonl", lines.encode()), client=client)
    assert ds.schema["a"] == "Json" and ds.schema["text"] == "Utf8"
    ds.write(f"scratch/{scratch}/lines/", "jsonl")
    [text] = [data for name, data in fetch("lines/").items() if name.startswith("shard")]
    assert list(map(json.loads, text.splitlines())) == rows
    # As texts, where they are made to be.
    ds.select_columns(["a"]).cast({"a": "string"}).write(f"scratch/{scratch}/texts/", "jsonl")
    [text] = [data for name, data in fetch("texts/").items() if name.startswith("shard")]
    assert [json.loads(json.loads(line)["a"]) for line in text.splitlines()] == [
        row["a"] for row in rows
    ]
    ds.write(f"scratch/{scratch}/mds/", "mds")
    [shard] = json.loads(fetch("mds/")["index.json"])["shards"]
    assert shard["column_encodings"] == ["json", "json", "json", "str"]
    again = forebay.open(f"scratch/{scratch}/mds/", client=client)[:]
    assert [
        {**row, **{n: json.loads(row[n]) for n in ("a", "list", "of")}} for row in again
    ] == rows
    named = ds.rename({"list": "list.json", "of": "of.mp"})
    done = named.write(f"scratch/{scratch}/tar/", "tar")
    found = [dict(row) for row in forebay.open(done.source, client=client).take(range(4))]
    assert [json.loads(bytes(row["list.json"])) for row in found] == [row["list"] for row in rows]
    assert [msgpack.unpackb(row["of.mp"]) for row in found] == [row["of"] for row in rows]
    assert bytes(found[1]["a"]) == b'"x"'
    # Beside texts, in a format that has nothing else.
    texts = forebay.open(put("in/b.jsonl", b'{"a": "t"}\n'), client=client)
    mixed = forebay.mix([ds.select_columns(["a"]), texts], [4, 1])
    assert mixed.write(f"scratch/{scratch}/mixed/", "tar").rows == 5
    with pytest.raises(forebay.InvalidRequest, match="'a' is json there and text here"):
        mixed.write(f"scratch/{scratch}/mixed-lines/", "jsonl")
    with pytest.raises(forebay.InvalidRequest, match=r"'a' is .*arrow\.json.* there and string"):
        mixed.write(f"scratch/{scratch}/mixed-parquet/", "parquet")
    # They are texts in what such a write is told apart by, so that of an earlier release goes on.
    ds.write(f"scratch/{scratch}/parquet/", "parquet")
    arguments = json.loads(fetch("parquet/")["_manifest"].splitlines()[0])["arguments"]
    assert arguments["columns"][:2] == [["a", "text"], ["list", "list<text>"]]
    ds.take(3).write(f"scratch/{scratch}/records/", "tfrecord", columns=["a", "list"])
    arguments = json.loads(fetch("records/")["_manifest"].splitlines()[0])["arguments"]
    assert arguments["columns"] == [["a", "text"], ["list", "list<text>"]]


def test_a_text_that_should_be_json_and_is_not_is_told(put, client, scratch):
    said = pa.field("said", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    table = pa.table([pa.array(["1", "{", "2"])], pa.schema([said]))
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    assert ds.schema["said"] == "Json"
    with pytest.raises(forebay.SampleFailed, match="'said' is of JSON, and has '{'") as failed:
        ds.write(f"scratch/{scratch}/out/", "jsonl")
    assert "position 1 of the order" in str(failed.value) and failed.value.row == 1
    assert "cast it to text" in failed.value.hint
    with pytest.raises(forebay.SampleFailed, match="position 1 .* column 'said'"):
        ds.write(f"scratch/{scratch}/mds/", "mds")
    # Within a list, and of several parts, too.
    lists = pa.array([["1"], ["2", "["], None])
    lists = lists.cast(pa.list_(said.with_name("item")))
    nested = forebay.open(
        put("in/nested.parquet", parquet(pa.table({"list": lists}))), client=client
    )
    for format in ("jsonl", "mds"):
        with pytest.raises(forebay.SampleFailed, match="position 2 of the order") as failed:
            nested.select([0, 2, 1]).write(f"scratch/{scratch}/{format}-nested/", format)
        assert failed.value.row == 2


def test_json_that_is_nested_too_deeply_is_told(put, client, scratch):
    said = pa.field("said", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    deep = "[" * 100_000 + "]" * 100_000
    table = pa.table([pa.array(["1", deep])], pa.schema([said]))
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    for format in ("mds", "jsonl"):
        with pytest.raises(forebay.SampleFailed, match="position 1 .*recursion") as failed:
            ds.write(f"scratch/{scratch}/{format}/", format)
        assert failed.value.row == 1
    bytes_of = forebay.open(
        put("in/b.parquet", parquet(pa.table({"said": [b"1", deep.encode()]}))), client=client
    )
    with pytest.raises(forebay.SampleFailed, match="position 1 .*recursion"):
        bytes_of.write(f"scratch/{scratch}/bytes/", "mds", columns={"said": "json"})


def tensors() -> tuple[pa.Table, dict[str, np.ndarray]]:
    """Columns of tensors, and their arrays: Arrow's type, also with axes in another order, and that
    of Ray Data.
    """
    numbers = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    permuted = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0])
    flat = pa.array(numbers.reshape(10, 6).astype(np.int16).tolist(), pa.list_(pa.int16(), 6))
    of_ray = {
        "ARROW:extension:name": "ray.data.arrow_tensor_v2",
        "ARROW:extension:metadata": "[3, 1, 2]",
    }
    large = pa.array(numbers.reshape(10, 6).tolist(), pa.large_list(pa.float64()))
    columns = {
        "t": (pa.FixedShapeTensorArray.from_numpy_ndarray(numbers), None),
        "p": (pa.ExtensionArray.from_storage(permuted, flat), None),
        "r": (large, of_ray),
    }
    fields = [pa.field(name, of.type, metadata=more) for name, (of, more) in columns.items()]
    expected = {
        "t": numbers,
        "p": numbers.astype(np.int16).transpose(0, 2, 1),
        "r": numbers.astype(np.float64).reshape(10, 3, 1, 2),
    }
    return pa.table([of for of, _ in columns.values()], schema=pa.schema(fields)), expected


@pytest.mark.parametrize("is_cast", [False, True])
def test_tensors_keep_their_shape_or_are_refused(put, client, scratch, fetch, is_cast):
    import torch

    table, expected = tensors()
    table = table.append_column("id", pa.array(range(10)))
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    if is_cast:
        ds = ds.cast({"id": "int32"})
    names = list(expected)
    ds.write(f"scratch/{scratch}/mds/", "mds", columns=names, shard_rows=4)
    files = fetch("mds/")
    assert json.loads(files["index.json"])["shards"][0]["column_encodings"] == [
        "ndarray:int16:3,2",
        "ndarray:float64:3,1,2",
        "ndarray:float32:2,3",
    ]
    lists = [{name: expected[name][row].tolist() for name in names} for row in range(10)]
    assert read_mds(files) == [{name: row[name] for name in sorted(row)} for row in lists]
    done = ds.write(f"scratch/{scratch}/mds-json/", "mds", columns=dict.fromkeys(names, "json"))
    again = forebay.open(done.source, client=client)
    assert [{name: json.loads(row[name]) for name in names} for row in again] == lists
    ds.write(f"scratch/{scratch}/jsonl/", "jsonl", columns=names)
    (lines,) = shards_of(fetch("jsonl/"), ".jsonl").values()
    assert [json.loads(line) for line in lines.splitlines()] == lists
    ends = {"t": "t.npy", "p": "p.pth", "r": "r.json"}
    ds.rename(ends).write(f"scratch/{scratch}/tar/", "tar", columns=list(ends.values()))
    (data,) = shards_of(fetch("tar/"), ".tar").values()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}
    for row in range(10):
        made = np.load(io.BytesIO(members[f"{row:09}.t.npy"]))
        assert made.dtype == np.float32 and np.array_equal(made, expected["t"][row])
        made = torch.load(io.BytesIO(members[f"{row:09}.p.pth"])).numpy()
        assert made.dtype == np.int16 and np.array_equal(made, expected["p"][row])
        assert json.loads(members[f"{row:09}.r.json"]) == lists[row]["r"]
    # What a function is given has its shape too.
    shapes: set[str] = set()
    ds.write(
        f"scratch/{scratch}/function/",
        "tar",
        columns=names,
        encoder=lambda sample: {"txt": shapes.add(str(sample["r"].shape)) or "x"},
    )
    assert shapes == {"(3, 1, 2)"}
    done = ds.write(f"scratch/{scratch}/parquet/", columns=names)
    (data,) = shards_of(fetch("parquet/"), ".parquet").values()
    assert pq.read_table(io.BytesIO(data), columns=["t", "p"]).equals(table.select(["t", "p"]))
    again = forebay.open(done.source, client=client).take([0])
    assert _encode.kinds_of(_arrow.columns(again))["r"] == "tensor<float64, 3, 1, 2>"
    for name, kind in (("t", "float32, 2, 3"), ("p", "int16, 2, 3, permuted 1 0")):
        for format in ("tfrecord", "tar"):
            with pytest.raises(
                forebay.InvalidRequest,
                match=f"{format} cannot hold column '{name}'.*tensor<{kind}>",
            ):
                ds.write(f"scratch/{scratch}/none/", format, columns=[name])


def test_tensors_that_are_missing_or_in_something_else(put, client, scratch, fetch):
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    flat = pa.array([[1, 2, 3, 4], None, [5, None, 7, 8]], pa.list_(pa.float32(), 4))
    said = {
        "ARROW:extension:name": "ray.data.arrow_tensor",
        "ARROW:extension:metadata": "\\x80\\x05",
    }
    fields = [
        pa.field("t.npy", kind),
        pa.field("in", pa.list_(kind)),
        pa.field("odd", pa.list_(pa.float32()), metadata=said),
    ]
    tensor = pa.ExtensionArray.from_storage(kind, flat)
    inside = pa.ListArray.from_arrays([0, 2, 2, 3], tensor)
    odd = pa.array([[1, 2, 3, 4]] * 3, pa.list_(pa.float32()))
    table = pa.table([tensor, inside, odd], schema=pa.schema(fields))
    table = table.append_column("flat", flat).append_column("txt", pa.array(["x"] * 3))
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    ds.write(f"scratch/{scratch}/jsonl/", "jsonl", columns=["t.npy", "in"])
    (lines,) = shards_of(fetch("jsonl/"), ".jsonl").values()
    first, last = [[1, 2], [3, 4]], [[5, None], [7, 8]]
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"t.npy": first, "in": [first, None]},
        {"t.npy": None, "in": []},
        {"t.npy": last, "in": [last]},
    ]
    with pytest.raises(forebay.SampleFailed, match=r"'t\.npy'.*missing items.* row 2 of"):
        ds.select([0, 2]).write(f"scratch/{scratch}/tar/", "tar", columns=["t.npy"])
    # One that is missing makes no other one miss anything.
    some = ds.select([0, 1])
    some.write(f"scratch/{scratch}/some/", "tar", columns=["t.npy", "txt"])
    (data,) = shards_of(fetch("some/"), ".tar").values()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["000000000.t.npy", "000000000.txt", "000000001.txt"]
        assert np.load(io.BytesIO(tar.extractfile("000000000.t.npy").read())).tolist() == first
    assert some.write(f"scratch/{scratch}/features/", "tfrecord", columns=["flat"]).rows == 2
    for format, column in [
        ("mds", "in"),
        ("tfrecord", "in"),
        ("mds", "odd"),
        ("jsonl", "odd"),
        ("tfrecord", "odd"),
    ]:
        says = r"list<tensor<float32, 2, 2>>" if column == "in" else "tensor of unknown shape"
        with pytest.raises(forebay.InvalidRequest, match=f"cannot hold column '{column}'.*{says}"):
            ds.write(f"scratch/{scratch}/none/", format, columns=[column])
    assert not fetch("none/")


def test_what_a_field_is_called_does_not_matter(put, client, scratch):
    fields = ["duration_s", "bytes_read", "interval", "union_id", "time", "date", 'a"bytes']
    table = pa.table({"s": pa.array([dict.fromkeys(fields, 1)])})
    ds = forebay.open(put("in/a.parquet", parquet(table)), client=client)
    for format in ("jsonl", "mds", "parquet"):
        assert ds.write(f"scratch/{scratch}/{format}/", format).rows == 1
    # What it holds does.
    table = pa.table({"s": pa.array([{"plain": b"1"}])})
    ds = forebay.open(put("in/b.parquet", parquet(table)), client=client)
    with pytest.raises(forebay.InvalidRequest, match='which is struct<"plain": bytes>'):
        ds.write(f"scratch/{scratch}/bytes/", "jsonl")


def test_whoever_may_not_write_is_told_before_work_begins(origin, source, scratch, tmp_path, fetch):
    grant = {"bucket": "scratch", "actions": ["read", "list"]}
    node = locked_node(origin, tmp_path, keys_toml({"reader": [grant]}))
    try:
        reader = forebay.Client(node.url, token="token-of-reader")
        ds = forebay.open(f"scratch/{scratch}/in/*.parquet", client=reader)
        with pytest.raises(forebay.PermissionDenied):
            ds.write(f"scratch/{scratch}/out/")
    finally:
        node.stop()
    assert not fetch("out/")


# The commit, and who writes


def test_what_is_half_written_is_not_taken_for_the_whole(source, scratch, client, put, fetch):
    out = f"scratch/{scratch}/out/"
    done = source.write(out, shard_rows=100)
    put("out/_forebay/unfinished.json", b"{}")
    for name in (out, f"scratch/{scratch}/out/*.parquet", f"scratch/{scratch}/**.parquet"):
        with pytest.raises(forebay.Conflict, match="not written to its end.*unfinished.json"):
            forebay.open(name, client=client)
    # Others are not concerned, and the manifest is the commit.
    assert len(forebay.open(f"scratch/{scratch}/in/*.parquet", client=client)) == ROWS
    assert len(forebay.open(done.source, client=client)) == ROWS
    # The same call again finds all of it, and ends what was left over.
    again = source.write(out, shard_rows=100)
    assert (again.found, again.bytes, again.rows) == (5, done.bytes, ROWS)
    assert len(forebay.open(out, client=client)) == ROWS


def test_another_write_onto_the_same_target_is_refused_by_name(source, scratch, put, fetch, client):
    out = f"scratch/{scratch}/out/"
    source.write(out, shard_rows=100)
    before = fetch("out/")
    with pytest.raises(
        forebay.Conflict, match=r"another dataset already.*shard_rows \(100, not 50"
    ):
        source.write(out, shard_rows=50)
    with pytest.raises(forebay.Conflict, match=r"given another order"):
        source.write(out, shard_rows=100, order="full")
    with pytest.raises(forebay.Conflict, match=r"another dataset \(or another version"):
        put("in/1.parquet", parquet(table(ROWS // 2, 7)))
        forebay.open(f"scratch/{scratch}/in/*.parquet", client=client).write(out, shard_rows=100)
    with pytest.raises(forebay.Conflict, match=r"given another columns"):
        source.select_columns(source.columns[::-1]).write(out, shard_rows=100)
    with pytest.raises(forebay.Conflict, match=r"given another format") as refused:
        source.write(out, "jsonl", shard_rows=100, columns=["id"])
    assert "columns" in str(refused.value)
    # The same columns are no other ones in another format, though they are written otherwise.
    source.write(f"scratch/{scratch}/ids/", columns=["id"])
    with pytest.raises(forebay.Conflict, match=r"given another format") as refused:
        source.write(f"scratch/{scratch}/ids/", "jsonl", columns=["id"])
    assert "columns" not in str(refused.value)
    # Columns of the same names and types, which are others.
    two = forebay.open(put("two/a.parquet", parquet(pa.table({"a": [1], "b": [2]}))), client=client)
    two.write(f"scratch/{scratch}/swapped/")
    swapped = two.rename({"a": "b", "b": "a"}).select_columns(["a", "b"])
    with pytest.raises(forebay.Conflict, match=r"given another renaming or casting"):
        swapped.write(f"scratch/{scratch}/swapped/")
    put("other/read.me", b"")
    with pytest.raises(forebay.Conflict, match=r"not empty: it holds .*other/read\.me"):
        source.write(f"scratch/{scratch}/other/")
    assert fetch("out/") == before


@pytest.mark.parametrize("name", ["a\\b", "a b é", "a:b@c", "'\"#%20"])
def test_what_was_written_is_opened_whatever_its_name(source, scratch, client, name):
    done = source.write(f"scratch/{scratch}/{name}", shard_rows=300, columns=["id"])
    opened = forebay.open(done.source, client=client)
    assert [row["id"] for row in opened] == list(range(ROWS))


class AnswersNot:
    """A client whose PUT of the manifest fails; ``is_done``: after it was done."""

    def __init__(self, client, is_done: bool) -> None:
        self.client, self.is_done = client, is_done

    def __getattr__(self, name):
        return getattr(self.client, name)

    def put(self, name, data, **conditions):
        if not name[1].endswith("/_manifest"):
            return self.client.put(name, data, **conditions)
        if self.is_done:
            self.client.put(name, data, **conditions)
        raise forebay.ServerError("the answer is lost")


def test_a_commit_whose_answer_is_lost(source, scratch, client, fetch):
    out = f"scratch/{scratch}/out/"
    with pytest.raises(forebay.ServerError, match="the answer is lost"):
        source.write(out, shard_rows=100, client=AnswersNot(client, is_done=False), retry_for=0.2)
    assert "_manifest" not in fetch("out/") and "_forebay/unfinished.json" in fetch("out/")
    done = source.write(out, shard_rows=100, client=client)
    assert done.found == done.shards == 5
    lost = source.write(f"{out}lost/", shard_rows=100, client=AnswersNot(client, is_done=True))
    assert len(forebay.open(lost.source, client=client)) == ROWS


class FailsTwice:
    """A client whose bucket fails at each request twice: before it was done, and after."""

    def __init__(self, client) -> None:
        self.client, self.asked = client, Counter()

    def __getattr__(self, what):
        found = getattr(self.client, what)
        if what not in ("put", "get", "head", "delete", "list"):
            return found

        def ask(name, *args, **options):
            self.asked[what, name] += 1
            if self.asked[what, name] == 1:
                raise forebay.ServerError("it was not done")
            answer = found(name, *args, **options)
            if self.asked[what, name] == 2:
                raise forebay.ServerError("the answer is lost")
            return answer

        return ask


@pytest.mark.parametrize(
    "arguments", [{"format": "mds", "compression": "zstd"}, {"format": "tfrecord"}]
)
def test_a_bucket_that_fails_at_times_costs_only_time(
    source, scratch, client, fetch, monkeypatch, arguments
):
    from forebay import _fetch, _write

    monkeypatch.setattr(_fetch, "RETRY_FIRST_SECONDS", 0.001)
    monkeypatch.setattr(_write, "RETRY_FIRST_SECONDS", 0.001)
    read, failures = _write.read, iter([forebay.Timeout("too late"), forebay.ServerError("502")])

    def fails(*asked):
        if failure := next(failures, None):
            raise failure
        return read(*asked)

    monkeypatch.setattr(_write, "read", fails)
    arguments |= {"shard_rows": 300, "columns": ["id"]}
    wanted = source.write(f"scratch/{scratch}/wanted/", **arguments)
    failing = FailsTwice(client)
    done = source.write(f"scratch/{scratch}/out/", client=failing, **arguments)
    assert (done.shards, done.rows, done.bytes) == (wanted.shards, ROWS, wanted.bytes)
    out, same = fetch("out/"), fetch("wanted/")
    assert out.keys() == same.keys()
    assert all(out[name] == same[name] for name in out.keys() - {"_manifest"})
    assert len(failing.asked) > 10 and min(failing.asked.values()) > 1


def test_what_is_left_beside_a_manifest_is_told(source, scratch, client, fetch, caplog):
    class DeletesNothing(AnswersNot):
        def put(self, *asked, **conditions):
            return self.client.put(*asked, **conditions)

        def delete(self, name):
            raise forebay.ServerError("nothing is deleted")

    out = f"scratch/{scratch}/out/"
    there = DeletesNothing(client, is_done=True)
    done = source.write(out, shard_rows=300, client=there, retry_for=0)
    assert "its claim" in caplog.text and "_forebay/unfinished.json" in fetch("out/")
    assert len(forebay.open(done.source, client=client)) == ROWS
    assert source.write(out, shard_rows=300).found == done.shards
    assert "_forebay/unfinished.json" not in fetch("out/")


def test_what_a_writer_left_that_was_killed_after_its_manifest_goes(source, scratch, put, fetch):
    out = f"scratch/{scratch}/out/"
    arguments = {"format": "mds", "compression": "zstd", "shard_rows": 300}
    done = source.write(out, **arguments)
    before = fetch("out/")
    put("out/_forebay/shard-00000-of-00002.mds.zstd.json", b'{"raw": 1}')
    put("out/_forebay/unfinished.json", b"{}")
    assert source.write(out, **arguments).found == done.shards == 2
    assert fetch("out/") == before


def test_a_shard_of_parquet_has_its_columns_in_one_order():
    batches = [
        pa.RecordBatch.from_pydict({"a": [1], "b": [2]}),
        pa.RecordBatch.from_pydict({"b": [3], "a": [4]}),
    ]
    rows = [forebay.Rows([batch], np.arange(1, dtype=np.uint64)) for batch in batches]
    encoder = _encode.Parquet(_encode.Options(kinds={"a": "int64", "b": "int64"}))
    with pytest.raises(forebay.InvalidRequest, match="different columns: a, b and b, a"):
        list(encoder.pieces(rows, _encode.Shard(0, 2)))
    full = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    for others, message in [
        ({"a": ["x"]}, "'a' is int64 there and string here"),
        ({"a": pa.array([None], pa.int64())}, "'a' has missing values here.*int64 not null"),
    ]:
        batches = [
            pa.RecordBatch.from_pydict({"a": [1]}, schema=full),
            pa.RecordBatch.from_pydict(others),
        ]
        rows = [forebay.Rows([batch], np.arange(1, dtype=np.uint64)) for batch in batches]
        encoder = _encode.Parquet(_encode.Options(kinds={"a": "int64"}))
        with pytest.raises(forebay.InvalidRequest, match=message):
            list(encoder.pieces(rows, _encode.Shard(0, 2)))


def test_conditions_of_put_hold(client, scratch):
    name = f"scratch/{scratch}/x"
    etag = client.put(name, b"one", if_absent=True)
    with pytest.raises(forebay.PreconditionFailed):
        client.put(name, b"two", if_absent=True)
    with pytest.raises(forebay.PreconditionFailed):
        client.put(name, io.BytesIO(b"3" * (20 << 20)), if_absent=True)
    assert client.get(name) == b"one"
    second = client.put(name, b"four", if_match=etag)
    with pytest.raises(forebay.PreconditionFailed):
        client.put(name, b"five", if_match=etag)
    assert client.get(name) == b"four" and client.head(name).etag == second
    with pytest.raises(forebay.InvalidRequest, match="not both"):
        client.put(name, b"six", if_absent=True, if_match=second)
    large = client.put(f"{name}-large", io.BytesIO(b"7" * (20 << 20)), if_absent=True)
    assert client.head(f"{name}-large").etag == large


WRITER = """
import sys, forebay
ds = forebay.open(sys.argv[2], url=sys.argv[1])
done = ds.write(sys.argv[3], sys.argv[4], order="full", seed=4, shard_rows=40, writers=2,
                columns=["id", "text", "score", "x"] if sys.argv[4] == "jsonl" else
                ["id", "data", "text"], progress=False)
print("done", done.shards, done.found, flush=True)
"""


def shards_there(origin_s3, scratch: str, out: str = "out") -> int:
    listed = origin_s3.list_objects_v2(Bucket="scratch", Prefix=f"{scratch}/{out}/shard-")
    return sum(not item["Key"].endswith(".idx") for item in listed.get("Contents", []))


@pytest.mark.parametrize("format", ["parquet", "tar", "mds"])
def test_a_writer_that_is_killed_goes_on(origin, put, scratch, fetch, origin_s3, tmp_path, format):
    """Killed again and again, each time after some more shards: nothing is written twice, and what
    is there in the end is what one run would have written.
    """
    put("in/0.parquet", parquet(table(ROWS, size=20_000)))
    node = Node(origin.url, ["scratch"], tmp_path / "node")
    try:
        out = f"scratch/{scratch}/out/"
        command = [sys.executable, "-c", WRITER, node.url, f"scratch/{scratch}/in/*", out, format]
        kept: dict[str, bytes] = {}
        for kill in range(2):
            writer = subprocess.Popen(command)
            wanted = 4 * (kill + 1)
            while writer.poll() is None and shards_there(origin_s3, scratch) < wanted:
                time.sleep(0.005)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            there = fetch("out/")
            if kill and "_manifest" in there:
                break  # It was over before it could be killed.
            assert "_forebay/unfinished.json" in there and "_manifest" not in there
            assert all(there[name] == data for name, data in kept.items())
            kept = {n: d for n, d in there.items() if not n.startswith("_")}
            assert len(kept) >= 4 or writer.returncode == 0
            with pytest.raises(forebay.Conflict, match="not written to its end"):
                forebay.open(out, url=node.url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[:2] == ["done", "13"] and int(done.stdout.split()[2]) >= 8
        there = fetch("out/")
        assert all(there[name] == data for name, data in kept.items())
        assert not any(name.startswith("_forebay") for name in there)
        # The same as in one run.
        ds = forebay.open(f"scratch/{scratch}/in/*", url=node.url)
        ds.write(
            f"scratch/{scratch}/once/",
            format,
            order="full",
            seed=4,
            shard_rows=40,
            columns=["id", "data", "text"],
        )
        once = fetch("once/")
        del once["_manifest"], there["_manifest"]
        assert once == there
    finally:
        node.stop()


def test_of_two_writers_one_wins_and_the_other_is_told(source, scratch, fetch, client):
    """Started together and one after the other, of the same arguments and of others."""
    out = f"scratch/{scratch}/out/"
    ended: list = []
    ready = threading.Barrier(2)

    def write(**arguments) -> None:
        ready.wait()
        try:
            ended.append(source.write(out, **arguments))
        except forebay.Error as e:
            ended.append(e)

    for round, others in enumerate([{"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 2}]):
        out = f"scratch/{scratch}/out-{round}/"
        ended.clear()
        threads = [
            threading.Thread(target=write, kwargs={"order": "full", "shard_rows": 25, **arguments})
            for arguments in ({"seed": 1}, others)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wins = [e for e in ended if isinstance(e, forebay.Written)]
        lost = [e for e in ended if isinstance(e, Exception)]
        # Two of the same arguments may both find the same dataset, where one ended first.
        assert wins and len(wins) + len(lost) == 2, ended
        assert all(isinstance(e, forebay.Conflict) for e in lost), lost
        assert all(w.found == w.shards for w in wins[1:])
        whole = forebay.open(wins[0].source, client=client)
        ids = whole.take(range(ROWS), ["id"]).numpy()["id"]
        assert sorted(ids) == list(range(ROWS)) and len(whole.files) == 20
        assert not any("_forebay" in name for name in fetch(f"out-{round}/"))


def test_a_writer_whose_write_was_taken_over_stops(source, scratch, monkeypatch, fetch):
    """The second one begins while the first one is in its middle."""
    from forebay import _write

    out, first = f"scratch/{scratch}/out/", threading.Event()
    go, ended = threading.Event(), []
    pieces = _write._Writing._pieces

    def slowly(self, name, shard):
        if threading.current_thread().name.startswith("forebay-write") and shard.first == 100:
            if not first.is_set():
                first.set()
                assert go.wait(30)
        yield from pieces(self, name, shard)

    monkeypatch.setattr(_write._Writing, "_pieces", slowly)

    def write() -> None:
        try:
            source.write(out, shard_rows=50, writers=1)
        except forebay.Error as e:
            ended.append(e)

    thread = threading.Thread(target=write)
    thread.start()
    assert first.wait(30)
    done = source.write(out, shard_rows=50, writers=1)
    go.set()
    thread.join()
    assert done.found == 2 and done.shards == 10
    assert isinstance(ended[0], forebay.Conflict) and "another process" in ended[0].message
    assert len(read_parquet(shards_of(fetch("out/"), ".parquet"))) == ROWS


def test_a_node_that_goes_away_for_a_while_costs_only_time(origin, put, scratch, fetch, tmp_path):
    put("in/0.parquet", parquet(table(ROWS, size=20_000)))
    node = Node(origin.url, ["scratch"], tmp_path / "node")
    address = node.url.removeprefix("http://")
    client = forebay.Client(node.url, timeout=30)
    ds = forebay.open(f"scratch/{scratch}/in/*", client=client)
    ended = []

    def write() -> None:
        ended.append(ds.write(f"scratch/{scratch}/out/", shard_rows=20, writers=2))

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive() and not any("shard" in name for name in fetch("out/")):
        time.sleep(0.01)
    node.stop(signal.SIGKILL)
    time.sleep(0.3)
    node = Node(origin.url, ["scratch"], tmp_path / "node", listen=address)
    try:
        thread.join(60)
        assert ended and ended[0].rows == ROWS
        rows = read_parquet(shards_of(fetch("out/"), ".parquet"))
        assert [row["id"] for row in rows] == list(range(ROWS))
    finally:
        node.stop()


def test_shards_that_take_long_to_make_are_written(origin, put, scratch, tmp_path, monkeypatch):
    """A node gives up uploads that are silent for a minute, or here for three seconds."""
    from forebay import _write

    put("in/0.parquet", parquet(table(ROWS, 10_000, 20_000)))
    short = ["--set", "limits.body_timeout=3s"]
    node = Node(origin.url, ["scratch"], tmp_path / "node", options=short)
    each_row, is_slow = _encode._each_row, threading.Event()

    def slowly(batches, shard, *how):
        for row in each_row(batches, shard, *how):
            if shard.rows == ROWS and shard.at == 450 and is_slow.is_set():
                time.sleep(5)
                if format == "tar":
                    is_slow.clear()
            yield row

    monkeypatch.setattr(_encode, "_each_row", slowly)
    try:
        ds = forebay.open(f"scratch/{scratch}/in/*", url=node.url)

        def write(format: str, retry_for: float) -> forebay.Written:
            is_slow.set()
            out = f"scratch/{scratch}/{format}/"
            return ds.write(
                out, format, shard_rows=ROWS, key=None if format == "tar" else "__key__",
                columns=["id", "data"], writers=1, retry_for=retry_for,
            )  # fmt: skip

        format = "mds"  # Nothing goes out before all of the shard is there.
        assert write(format, 0).rows == ROWS
        format = "tar"  # In its middle, once, as when the bucket does not answer for a while.
        with pytest.raises(forebay.InvalidRequest, match="silent"):
            write(format, 20)
        monkeypatch.setattr(_write, "SILENT_SECONDS", 4.0)
        done = write(format, 20)
        assert not is_slow.is_set() and done.rows == ROWS
        assert len(forebay.open(done.source, url=node.url)) == ROWS
    finally:
        node.stop()


def test_ctrl_c_ends_a_write_and_the_next_call_goes_on(put, scratch, origin, tmp_path, origin_s3):
    put("in/0.parquet", parquet(table(ROWS, size=20_000)))
    node = Node(origin.url, ["scratch"], tmp_path / "node")
    try:
        for attempt in range(5):
            of = [f"scratch/{scratch}/in/*", f"scratch/{scratch}/out{attempt}/"]
            command = [sys.executable, "-c", WRITER, node.url, *of, "tar"]
            writer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            while writer.poll() is None and shards_there(origin_s3, scratch, f"out{attempt}") < 2:
                time.sleep(0.005)
            writer.send_signal(signal.SIGINT)
            error = writer.communicate(timeout=60)[1]
            if writer.returncode != 0:
                break
            # It was over before it could be interrupted.
        assert writer.returncode != 0 and "KeyboardInterrupt" in error
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and int(done.stdout.split()[2]) >= 2, done.stderr
    finally:
        node.stop()


MEASURED = """
import resource, sys, forebay
ds = forebay.open(sys.argv[2], url=sys.argv[1])
repeated = forebay.mix([ds], epoch_rows=int(sys.argv[4]) * len(ds))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = repeated.write(sys.argv[3], "tar", shard_size="16MiB", writers=2, progress=False, key=None,
                      columns=["data"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(done.bytes, (peak - before) * 1024)
"""


def test_memory_does_not_grow_with_what_is_written(origin, put, scratch, tmp_path, origin_s3):
    data = pa.table({"data": [random.Random(i).randbytes(200_000) for i in range(100)]})
    put("in/0.parquet", parquet(data, 5))
    node = Node(origin.url, ["scratch"], tmp_path / "node")
    used = {}
    try:
        for times in (3, 20):
            out = f"scratch/{scratch}/out-{times}/"
            arguments = [node.url, f"scratch/{scratch}/in/*", out, str(times)]
            done = subprocess.run(
                [sys.executable, "-c", MEASURED, *arguments],
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stderr
            written, used[times] = map(int, done.stdout.split())
            assert written > times * 100 * 200_000
    finally:
        node.stop()
    # 60 MB and 400 MB: two writers hold some requests of 8 MiB and some pieces of 1 MiB each.
    assert used[20] < used[3] + (48 << 20) and used[20] < 160 << 20, used


@pytest.mark.parametrize(
    ("format", "options", "most"),
    [
        # Nothing but what is sent at a time.
        ("tfrecord", {"index": False}, 16),
        ("tfrecord", {"compression": "gz"}, 16),
        # The lines of the index.
        ("tfrecord", {}, 32),
        # The samples (9 bytes), where they begin, and a piece that is sent.
        ("mds", {}, 80),
        ("mds", {"compression": "zstd"}, 80),
    ],
)
def test_a_shard_of_many_small_rows_takes_little_memory(format, options, most):
    """Bytes of memory for each row beyond a fixed amount, as Python counts them."""

    def peak(rows: int) -> int:
        many = ({"i": np.arange(500), "b": np.arange(500) % 2 == 0} for _ in range(rows // 500))
        batches = (forebay.Rows([pa.record_batch(one)], np.arange(500)) for one in many)
        kinds = {"i": "int64", "b": "bool"}
        encoder = _encode.ENCODERS[format](_encode.Options(kinds=kinds, **options))
        shard = _encode.Shard(0, rows)
        tracemalloc.start()
        try:
            for _ in _encode.joined(encoder.pieces(batches, shard), 1 << 12):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(500)
    few, many = peak(2_000), peak(12_000)
    assert many - few < most * 10_000, (few, many)


class FilesOf:
    """What some processes have in files at most, in bytes on the disk: what is below their folders,
    and what they have open there that has no name any more.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.most = folders, dict.fromkeys(folders, 0)
        self.pids: set[int] = set()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            unnamed = []
            for pid in list(self.pids):
                with contextlib.suppress(OSError):
                    unnamed += Path(f"/proc/{pid}/fd").iterdir()
            for folder in self.folders:
                found = {}
                for path in [*folder.rglob("*"), *unnamed]:
                    with contextlib.suppress(OSError):
                        if path.is_relative_to("/proc") and not os.readlink(path).startswith(
                            f"{folder}/"
                        ):
                            continue
                        of = path.stat()
                        if stat.S_ISREG(of.st_mode):
                            found[of.st_dev, of.st_ino] = 512 * of.st_blocks
                self.most[folder] = max(self.most[folder], sum(found.values()))


SPOOLING = """
import sys, tempfile, forebay
client = forebay.Client(sys.argv[1])

class Spools:
    def __getattr__(self, name):
        return getattr(client, name)

    def put(self, name, data, **conditions):
        if not hasattr(data, "read"):
            return client.put(name, data, **conditions)
        with tempfile.TemporaryFile() as file:
            while piece := data.read():
                file.write(piece)
            file.flush()
            file.seek(0)
            return client.put(name, file, **conditions)

ds = forebay.open(sys.argv[2], client=client)
done = ds.write(sys.argv[3], sys.argv[4], order="block:2", columns=["data"], key=None,
                shard_size=16 << 20, writers=2, progress=False,
                client=Spools() if sys.argv[5] == "spools" else None)
print(done.bytes, done.shards)
"""


def test_a_write_needs_no_disk(origin, put, scratch, tmp_path, origin_s3):
    """What is written is some times what the cache of the node may hold, and the bucket is on
    another server. The last one keeps each shard in a file until it is whole, to see that the test
    would tell.
    """
    cache, shard, writers = 32 << 20, 16 << 20, 2
    for n in range(6):
        noise = random.Random(n)
        data = pa.table({"data": [noise.randbytes(200_000) for _ in range(150)]})
        put(f"in/{n}.parquet", parquet(data, 15))
    folders = [tmp_path / "node", tmp_path / "writer"]
    for folder in folders:
        folder.mkdir()
    node = Node(
        origin.url, ["scratch"], folders[0], cache_size=str(cache), env={"TMPDIR": str(folders[0])}
    )
    try:
        for format, way in [("tar", ""), ("parquet", ""), ("mds", ""), ("tar", "spools")]:
            out = f"scratch/{scratch}/{format}{way}/"
            command = [sys.executable, "-c", SPOOLING, node.url, f"scratch/{scratch}/in/*"]
            with FilesOf(folders) as files:
                writer = subprocess.Popen(
                    [*command, out, format, way],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "TMPDIR": str(folders[1])},
                )
                files.pids = {writer.pid, node.process.pid}
                told, error = writer.communicate(timeout=240)
            assert writer.returncode == 0, error
            written, shards = map(int, told.split())
            of_node, of_writer = (files.most[folder] for folder in folders)
            assert shards > 4 * writers
            # The node has its cache, and a little that says what is in it.
            assert of_node < cache + (8 << 20), (format, of_node)
            if way == "spools":
                assert of_writer > shard // 2, of_writer
            else:
                assert of_writer < 1 << 20, (format, of_writer)
                assert written > 4 * (of_node + of_writer)
    finally:
        node.stop()


# The command line


def reshard(node, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "FOREBAY_NODE": node.url}
    command = [sys.executable, "-m", "forebay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_the_command_reshards(source, node, scratch, fetch, client):
    out = f"s3://scratch/{scratch}/out/"
    command = ["reshard", f"scratch/{scratch}/in/*.parquet", out, "--format", "jsonl"]
    command += [
        "--columns",
        "id,text",
        "--shuffle",
        "block:2",
        "--seed",
        "7",
        "--shard-rows",
        "300",
    ]
    done = reshard(node, *command)
    assert done.returncode == 0, done.stderr
    assert f"scratch/{scratch}/out/_manifest  2 shards  500 rows" in done.stdout
    lines = b"".join(shards_of(fetch("out/"), ".jsonl").values()).splitlines()
    columns = ["id", "text"]
    assert [json.loads(line) for line in lines] == in_order(
        source, forebay.Block(2), 7, columns=columns
    )
    one = reshard(node, *command[:2], f"scratch/{scratch}/one/", "--columns", "id")
    assert f"scratch/{scratch}/one/_manifest  1 shard  500 rows" in one.stdout, one.stderr
    again = reshard(node, "--json", *command)
    told = json.loads(again.stdout)
    assert (told["shards"], told["found"], told["rows"]) == (2, 2, ROWS)
    for arguments, status, said in [
        ([*command, "--seed", "8"], 1, r"error: .*another order.*\nhint: "),
        (["reshard", "scratch/x/*.parquet", out], 1, "error: no files match"),
        ([*command, "--shuffle", "sideways"], 2, "error: 'sideways' is not a shuffle"),
        ([*command, "--shard-size", "0"], 2, "error: "),
        (["reshard", out], 2, "required: .*TARGET"),
        ([*command, "--sharding"], 2, "unrecognized arguments"),
    ]:
        failed = reshard(node, *arguments)
        assert failed.returncode == status and re.search(said, failed.stderr), failed.stderr
    failed = reshard(node, "--json", *command, "--seed", "8")
    error = json.loads(failed.stderr)["error"]
    assert error["hint"] and error["code"] == "conflict"
    failed = reshard(node, "--json", *command, "--sharding")
    error = json.loads(failed.stderr)["error"]
    assert failed.returncode == 2 and error["code"] == "invalid"
    assert "--sharding" in error["message"]


def test_the_command_is_in_the_help_and_the_program_alone_says_where_it_is(node):
    shown = reshard(node, "--help").stdout
    assert re.search(r"\n  reshard +write the rows of a dataset", shown)
    assert "--shard-rows" in reshard(node, "reshard", "--help").stdout
    code = "import sys; from forebay._forebay import cli_main; sys.exit(cli_main(sys.argv))"
    alone = [sys.executable, "-c", code, "reshard", "a/", "b/", "--format", "tar"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pip install forebay" in done.stderr
