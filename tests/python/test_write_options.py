"""Options of each format that is written, as its own library reads them back."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import pickle
import tarfile
import zlib

import forebay
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from forebay import _encode, _options
from test_write import (
    ROWS,
    fetch,
    in_order,
    parquet,
    plain,
    put,
    read_mds,
    read_parquet,
    records_of,
    reshard,
    shards_of,
    source,
)

__all__ = ["fetch", "put", "source"]  # Fixtures.


def first_of(files: dict[str, bytes], end: str) -> bytes:
    return next(iter(shards_of(files, end).values()))


# Parquet


def columns_of(data: bytes, group: int = 0) -> dict[str, dict]:
    """What the file says of each column, by the first part of its path."""
    rows = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(group)
    chunks = [rows.column(i) for i in range(rows.num_columns)]
    return {chunk.path_in_schema.partition(".")[0]: chunk.to_dict() for chunk in chunks}


def test_parquet_has_its_writers_options(source, scratch, fetch, client):
    """Columns of lists are named as in the dataset, though Parquet calls them otherwise."""
    done = source.write(
        f"scratch/{scratch}/out/",
        compression={"data": "none", "text": "zstd", "tokens": "GZIP", "x": "zstd:3"},
        compression_level={"text": 9, "tokens": 2},
        use_dictionary=["text", "tokens"],
        column_encoding={"id": "delta_binary_packed", "x": "BYTE_STREAM_SPLIT"},
        write_statistics=["id"],
        data_page_size=1024,
        write_batch_size=16,
        write_page_index=True,
        write_page_checksum=True,
        data_page_version="2.0",
        bloom_filter_options={"id": {"ndv": 500, "fpp": 0.01}},
        version="1.0",
        store_schema=False,
    )
    files = fetch("out/")
    rows = in_order(source, None)
    assert read_parquet(shards_of(files, ".parquet")) == rows
    data = first_of(files, ".parquet")
    assert pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read().num_rows == ROWS
    metadata = pq.read_metadata(io.BytesIO(data))
    assert metadata.format_version == "1.0" and b"ARROW:schema" not in (metadata.metadata or {})
    chunks = columns_of(data)
    assert {name: chunk["compression"] for name, chunk in chunks.items()} == {
        "id": "UNCOMPRESSED",
        "data": "UNCOMPRESSED",
        "text": "ZSTD",
        "tokens": "GZIP",
        "x": "ZSTD",
        "good": "UNCOMPRESSED",
        "score": "UNCOMPRESSED",
    }
    dictionaries = {name for name, chunk in chunks.items() if chunk["has_dictionary_page"]}
    assert dictionaries == {"text", "tokens"}
    assert "DELTA_BINARY_PACKED" in chunks["id"]["encodings"]
    assert "BYTE_STREAM_SPLIT" in chunks["x"]["encodings"]
    assert {n for n, chunk in chunks.items() if chunk["statistics"] is not None} == {"id"}
    group = metadata.row_group(0)
    assert all(group.column(i).has_offset_index for i in range(group.num_columns))
    assert plain(forebay.open(done.source, client=client)) == rows


def test_levels_pages_and_chunks_of_parquet_change_its_bytes(source, scratch, fetch):
    """What a file does not say of itself is seen in its size, beside what PyArrow itself writes."""
    table = pa.table(source.take(range(ROWS)))
    for number, options in enumerate(
        [
            {"compression": "zstd", "compression_level": 1},
            {"compression": "zstd", "compression_level": 19},
            {"compression": "gzip", "compression_level": {"text": 9}},
            {"use_dictionary": False, "data_page_size": 512, "write_batch_size": 8},
            {"max_rows_per_page": 10},
            {"dictionary_pagesize_limit": 64, "data_page_version": "2.0"},
            {"use_content_defined_chunking": True},
            {"use_dictionary": False, "column_encoding": "PLAIN", "write_statistics": False},
            {"use_dictionary": False, "use_byte_stream_split": ["score"]},
        ]
    ):
        source.write(f"scratch/{scratch}/{number}/", **options)
        data = first_of(fetch(f"{number}/"), ".parquet")
        out = io.BytesIO()
        given = {"compression": "none", **options}
        with pq.ParquetWriter(out, table.schema, **given) as writer:
            writer.write_table(table, row_group_size=ROWS)
        assert data == out.getvalue(), options


def test_levels_are_one_way_or_the_other(source, scratch, fetch):
    out = f"scratch/{scratch}/out/"
    for format, compression in [
        ("parquet", "zstd"),
        ("jsonl", "gz"),
        ("tar", "gz"),
        ("mds", "zstd"),
    ]:
        columns = ["id", "text"]
        target = f"{out}{format}/"
        first = source.write(target, format, columns=columns, compression=f"{compression}:5")
        assert not first.found
        # The same write, said otherwise: all of it is there.
        again = source.write(
            target, format, columns=columns, compression=compression, compression_level=5
        )
        assert again.found == first.shards
    small = source.write(f"{out}small/", "jsonl", columns=["id", "x"], compression="gzip:9")
    large = source.write(f"{out}large/", "jsonl", columns=["id", "x"], compression="gz:1")
    assert small.bytes < large.bytes


def test_a_row_that_parquets_options_refuse_is_named(put, client, scratch, fetch):
    # One of the rows that are looked at before anything is written, and one of the others.
    for odd in (3, 1234):
        # Whole milliseconds, but for one row.
        times = pa.array([i * 1000 + (i == odd) for i in range(3000)], pa.timestamp("us"))
        data = parquet(pa.table({"at": times, "n": list(range(3000))}))
        ds = forebay.open(put(f"times/{odd}.parquet", data), client=client)
        options = {"shard_rows": 1000, "row_group_rows": 300, "coerce_timestamps": "ms"}
        for order in (None, "full"):
            target = f"out/{odd}-{order}/"
            with pytest.raises(forebay.SampleFailed, match="with coerce_timestamps: ") as failed:
                ds.write(f"scratch/{scratch}/{target}", "parquet", order=order, seed=1, **options)
            assert (failed.value.row, failed.value.row_in_file) == (odd, odd)
            if (odd, order) == (3, None):
                assert not fetch(target), "the target is still free"
            if (odd, order) == (1234, None):
                assert "the row at position 1,234 of the order" in str(failed.value)


# Tar


def members_of(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmembers()


def test_members_of_tars_have_a_mode_a_time_and_owners(put, client, scratch, fetch):
    long = "a-long-name-" * 12
    rows = pa.table({"__key__": [long, "b", "é"], "txt": ["1", "2", "3"]})
    ds = forebay.open(put("in/a.parquet", parquet(rows)), client=client)
    owner = {"mode": 0o440, "mtime": 1_700_000_000.9, "user": "bigdata", "group": "users"}
    ds.write(f"scratch/{scratch}/out/", "tar", **owner)
    members = members_of(first_of(fetch("out/"), ".tar"))
    assert [m.name for m in members] == [f"{long}.txt", "b.txt", "é.txt"]
    for m in members:
        assert (m.mode, m.mtime, m.uname, m.gname) == (0o440, 1_700_000_000, "bigdata", "users")
    ds.write(f"scratch/{scratch}/plain/", "tar")
    assert {(m.mode, m.mtime, m.uname) for m in members_of(first_of(fetch("plain/"), ".tar"))} == {
        (0o644, 0, "")
    }
    done = ds.write(f"scratch/{scratch}/few/", "tar", maxcount=2, shard_size="1GiB", compress=True)
    assert done.shards == 2 and len(members_of(first_of(fetch("few/"), ".tar.gz"))) == 2


@pytest.fixture
def samples(put, client):
    """Rows with lists and structs, whose columns are called as WebDataset's readers decode them."""
    rows = pa.table(
        {
            "__key__": [f"{i:03}" for i in range(20)],
            "meta.json": [{"n": i, "words": ["a", None]} for i in range(20)],
            "x.npy": pa.array([[i, i / 2] for i in range(20)], pa.list_(pa.float32())),
            "grid.npy": [[[i, 1], [2, 3]] for i in range(20)],
            "t.pth": pa.array([[i] * 3 for i in range(20)], pa.list_(pa.int64())),
            "m.mp": [{"i": i} for i in range(20)],
            "txt": [f"text {i}" for i in range(20)],
            "cls": list(range(20)),
            "bin": [bytes([i]) for i in range(20)],
        }
    )
    return forebay.open(put("in/a.parquet", parquet(rows)), client=client), rows.to_pylist()


def decoded(data: bytes, tmp_path) -> list[dict]:
    import webdataset as wds

    (tmp_path / "a.tar").write_bytes(data)
    return list(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode())


def test_lists_and_structs_are_what_webdataset_decodes(samples, scratch, fetch, tmp_path):
    ds, rows = samples
    ds.write(f"scratch/{scratch}/out/", "tar")
    found = decoded(first_of(fetch("out/"), ".tar"), tmp_path)
    assert len(found) == len(rows)
    for sample, row in zip(found, rows, strict=True):
        assert sample["__key__"] == row["__key__"] and sample["meta.json"] == row["meta.json"]
        assert sample["x.npy"].dtype == np.float32 and sample["x.npy"].tolist() == row["x.npy"]
        assert sample["grid.npy"].tolist() == row["grid.npy"]
        assert sample["t.pth"].tolist() == row["t.pth"] and sample["m.mp"] == row["m.mp"]
        assert sample["txt"] == row["txt"] and sample["cls"] == row["cls"]
        assert sample["bin"] == row["bin"]


def rounded(sample: dict) -> dict:
    """An encoder of samples: it adds, leaves out, renames, and gives the sample another key."""
    n = sample["cls"]
    return {
        "__key__": f"renamed/{n:04}",
        "cls": str(n // 2),
        "both.json": json.dumps([sample["txt"], sample["x.npy"].tolist()]),
        "bin": memoryview(sample["bin"] * 2),
        "even": b"" if n % 2 == 0 else None,
    }


def tagged(sample: dict, tag: bytes) -> dict:
    return {"a": tag}


class Tagging:
    def __init__(self, tag: bytes) -> None:
        self.tag = tag

    def __call__(self, sample: dict) -> dict:
        return {"a": self.tag}

    made = __call__


def test_an_encoder_makes_the_samples(samples, scratch, fetch, tmp_path):
    ds, rows = samples
    done = ds.write(f"scratch/{scratch}/out/", "tar", encoder=rounded, shard_rows=20)
    found = decoded(first_of(fetch("out/"), ".tar"), tmp_path)
    for n, (sample, row) in enumerate(zip(found, rows, strict=True)):
        assert sample["__key__"] == f"renamed/{n:04}" and sample["cls"] == n // 2
        assert sample["both.json"] == [row["txt"], row["x.npy"]]
        assert sample["bin"] == row["bin"] * 2 and ("even" in sample) == (n % 2 == 0)
    # The same function again is the same write; another one is not.
    assert ds.write(f"scratch/{scratch}/out/", "tar", encoder=rounded, shard_rows=20).found == 1
    assert done.found == 0
    for other in (functools.partial(rounded), lambda sample: sample, None):
        with pytest.raises(forebay.Conflict, match="encoder"):
            ds.write(f"scratch/{scratch}/out/", "tar", encoder=other, shard_rows=20)
    # Of functions of one kind, what they are given tells them apart.
    kinds = [
        (functools.partial(tagged, tag=b"a"), functools.partial(tagged, tag=b"b")),
        (Tagging(b"a"), Tagging(b"b")),
        (Tagging(b"a").made, Tagging(b"b").made),
        (lambda sample, tag=b"a": {"a": tag}, lambda sample, tag=b"b": {"a": tag}),
    ]
    for number, (one, another) in enumerate(kinds):
        out = f"scratch/{scratch}/kinds/{number}/"
        ds.write(out, "tar", encoder=one)
        assert ds.write(out, "tar", encoder=pickle.loads(pickle.dumps(one)) if number < 3 else one)
        with pytest.raises(forebay.Conflict, match="encoder"):
            ds.write(out, "tar", encoder=another)
    of_builtins = [_options.as_told(f) for f in ({"a": 1}.get, {"b": 2}.get, {"a": 1}.get)]
    assert of_builtins[0] == of_builtins[2] != of_builtins[1]
    with pytest.raises(forebay.InvalidRequest, match="cannot be told from another"):
        ds.write(f"{out}none/", "tar", encoder=functools.partial(tagged, tag=lambda: None))
    # What is so without being said is the same write.
    ds.write(f"scratch/{scratch}/plain/", "tar")
    assert ds.write(f"scratch/{scratch}/plain/", "tar", encoder=True, maxcount=None).found == 1
    # By extension: those that are not bytes or texts.
    by_end = {
        "json": lambda value: json.dumps({"is": value["n"]}),
        "cls": lambda value: b"%d" % (value + 1),
        "txt": lambda value: b"never",
        "npy": "json",
    }
    ds.write(f"scratch/{scratch}/ends/", "tar", encoder=by_end)
    with tarfile.open(fileobj=io.BytesIO(first_of(fetch("ends/"), ".tar"))) as tar:
        read = {m.name: tar.extractfile(m).read() for m in tar}
    assert read["003.meta.json"] == b'{"is": 3}' and read["003.cls"] == b"4"
    assert read["003.txt"] == b"text 3" and json.loads(read["003.x.npy"]) == [3, 1.5]
    assert msgpack.unpackb(read["003.m.mp"]) == {"i": 3}
    ds.write(f"scratch/{scratch}/none/", "tar", encoder=False, columns=["__key__", "txt", "bin"])
    assert len(members_of(first_of(fetch("none/"), ".tar"))) == 40
    with pytest.raises(forebay.InvalidRequest, match="'cls', which is int64"):
        ds.write(f"scratch/{scratch}/numbers/", "tar", encoder=False, columns=["txt", "cls"])


def test_what_an_encoder_gives_that_is_no_sample_names_the_row(samples, scratch, put, client):
    ds, _ = samples
    out = f"scratch/{scratch}/bad/"

    def fails(sample: dict) -> dict:
        if sample["__key__"] == "007":
            raise KeyError("nothing")
        return {"txt": "x"}

    for encoder in (
        fails,
        lambda sample: [sample] if sample["cls"] == 7 else {"a": b""},
        lambda sample: {"a": 1 if sample["cls"] == 7 else b""},
        lambda sample: {"a/b" if sample["cls"] == 7 else "ab": b""},
        lambda sample: {"a": b"", "A" if sample["cls"] == 7 else "b": b""},
        lambda sample: {"__key__": "a.b" if sample["cls"] == 7 else f"{sample['cls']}", "a": b""},
        lambda sample: {} if sample["cls"] == 7 else {"a": b""},
        {"cls": lambda value: 1 // (value - 7) and "x"},
    ):
        target = f"{out}{id(encoder)}/"
        with pytest.raises(forebay.SampleFailed) as failed:
            ds.write(target, "tar", encoder=encoder)
        assert (failed.value.row, failed.value.row_in_file) == (7, 7)
        assert "row 7 of" in str(failed.value)
        # The target is still free.
        ds.write(target, "tar", encoder=lambda sample: {"a": b""})
    ragged = pa.table({"x.npy": pa.array([[[1], [2, 3]], [[1], [2]]])})
    ragged = forebay.open(put("ragged/a.parquet", parquet(ragged)), client=client)
    with pytest.raises(forebay.SampleFailed) as failed:
        ragged.write(f"{out}ragged/", "tar")
    assert failed.value.row == 0


# TFRecord


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_tfrecord_has_its_compressions(source, scratch, fetch, kind):
    from tfrecord import example_pb2

    source.write(f"scratch/{scratch}/out/", "tfrecord", compression_type=kind, compression_level=9)
    packed = first_of(fetch("out/"), ".tfrecord.gz" if kind == "GZIP" else ".tfrecord.zlib")
    data = gzip.decompress(packed) if kind == "GZIP" else zlib.decompress(packed)
    ids = [
        example_pb2.Example.FromString(record).features.feature["id"].int64_list.value[0]
        for record in records_of(data)
    ]
    assert ids == list(range(ROWS))
    # As TensorFlow calls none.
    source.write(f"scratch/{scratch}/plain/", "tfrecord", compression_type="")
    assert records_of(first_of(fetch("plain/"), ".tfrecord")) == records_of(data)


def test_records_are_raw_or_examples_as_told(source, put, client, scratch, fetch):
    from tfrecord import example_pb2

    rows = in_order(source, None)
    source.write(f"scratch/{scratch}/raw/", "tfrecord", columns=["data"], raw=True)
    found = records_of(first_of(fetch("raw/"), ".tfrecord"))
    assert found == [row["data"] for row in rows]
    again = forebay.open(f"scratch/{scratch}/raw/*.tfrecord", client=client)
    again.write(f"scratch/{scratch}/examples/", "tfrecord", raw=False)
    examples = records_of(first_of(fetch("examples/"), ".tfrecord"))
    for record, row in zip(examples, rows, strict=True):
        feature = example_pb2.Example.FromString(record).features.feature
        assert list(feature["data"].bytes_list.value) == [row["data"]]
    for columns in (["text"], ["data", "id"]):
        with pytest.raises(forebay.InvalidRequest):
            source.write(f"scratch/{scratch}/x/", "tfrecord", columns=columns, raw=True)
    missing = pa.table({"data": pa.array([b"a", None], pa.binary())})
    missing = forebay.open(put("missing/a.parquet", parquet(missing)), client=client)
    with pytest.raises(forebay.SampleFailed) as failed:
        missing.write(f"scratch/{scratch}/x/", "tfrecord", raw=True)
    assert failed.value.row == 1


# MDS


@pytest.mark.parametrize("compression", [None, "zstd:7"])
def test_mds_has_hashes_of_its_shards(source, scratch, fetch, compression):
    hashes = {"sha1": hashlib.sha1, "xxh3_64": xxhash.xxh3_64, "xxh64": xxhash.xxh64}
    out = f"scratch/{scratch}/out/"
    arguments = {"compression": compression, "hashes": list(hashes), "shard_rows": 120}
    source.write(out, "mds", **arguments)
    files = fetch("out/")
    assert read_mds(files) == in_order(source, None)
    shards = json.loads(files["index.json"])["shards"]
    assert len(shards) == 5
    for shard in shards:
        assert shard["hashes"] == list(hashes)
        stored = shard["zip_data"] or shard["raw_data"]
        data = files[stored["basename"]]
        assert stored["hashes"] == {name: of(data).hexdigest() for name, of in hashes.items()}
        raw = (
            pa.decompress(data, shard["raw_data"]["bytes"], "zstd", asbytes=True)
            if compression
            else data
        )
        assert shard["raw_data"]["hashes"]["sha1"] == hashlib.sha1(raw).hexdigest()
    assert sorted(files) == ["_manifest", "index.json", *sorted(f for f in files if "shard-" in f)]


def test_hashes_outlive_a_writer_that_stopped(source, scratch, fetch, monkeypatch):
    """What a shard's hashes are is known to the call that goes on, which does not make them."""
    from forebay import _write

    arguments = {"hashes": ["sha1"], "shard_rows": 100}
    source.write(f"scratch/{scratch}/once/", "mds", **arguments)

    def stops(self, shards):
        raise RuntimeError("stopped before the commit")

    with monkeypatch.context() as patched:
        patched.setattr(_write._Writing, "_commit", stops)
        with pytest.raises(RuntimeError):
            source.write(f"scratch/{scratch}/out/", "mds", **arguments)
    done = source.write(f"scratch/{scratch}/out/", "mds", **arguments)
    assert done.found == done.shards == 5
    once, twice = fetch("once/"), fetch("out/")
    del once["_manifest"], twice["_manifest"]
    assert once == twice


def test_size_limit_is_that_of_an_unpacked_shard(put, client, scratch, fetch):
    rows = pa.table({"text": ["x" * 1000] * 1000})
    ds = forebay.open(put("in/a.parquet", parquet(rows, 500)), client=client)
    done = ds.write(f"scratch/{scratch}/out/", "mds", compression="zstd", size_limit="64kb")
    shards = json.loads(fetch("out/")["index.json"])["shards"]
    sizes = [shard["raw_data"]["bytes"] for shard in shards[:-1]]
    assert done.shards > 10 and all(55_000 < size < 75_000 for size in sizes), sizes
    assert all(shard["size_limit"] == 64 << 10 for shard in shards)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("value", "dtype", "holds"),
    [
        (5, "float16", True),
        (2049, "float16", False),
        (1 << 40, "float16", False),
        (np.int64(1 << 62), "float64", True),
        (np.int64((1 << 63) - 1), "float64", False),
        (np.uint64((1 << 64) - 1), "float32", False),
        (np.int64(-(1 << 63)), "float32", True),
        (-1, "uint8", False),
        (np.uint64((1 << 64) - 1), "int64", False),
        (0.1, "float16", True),
        (1e300, "float32", False),
    ],
)
def test_whole_numbers_are_cast_without_a_loss_or_not_at_all(value, dtype, holds):
    if holds:
        assert _encode._cast(value, dtype) == np.dtype(dtype).type(value)
        return
    with pytest.raises(ValueError, match="does not hold"):
        _encode._cast(value, dtype)


def test_mds_has_the_encodings_that_its_columns_are_given(put, client, scratch, fetch):
    rows = pa.table(
        {
            "n": pa.array([1, -5, 300], pa.int16()),
            "big": pa.array([1, 2, 1 << 60], pa.int64()),
            "half": pa.array([0.5, 1.25, -2.0], pa.float64()),
            "yes": pa.array([True, False, True]),
            "img": pa.array([b"\xff\xd8a", b"\xff\xd8b", b""], pa.binary()),
            "obj": pa.array([pickle.dumps(i) for i in range(3)], pa.binary()),
            "utf": pa.array(["é".encode(), b"b", b""], pa.binary()),
            "free": pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32())),
            "wide": pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32())),
            "grid": pa.array([[1, 2, 3, 4, 5, 6]] * 3, pa.list_(pa.float32())),
            "deep": [[[1, 2], [3, 4]]] * 3,
            "two": pa.array([[b"a", b"bb"], [b"c"], []], pa.list_(pa.binary())),
            "price": pa.array(["1.50", "2.00", "3.25"]).cast(pa.decimal128(9, 2)),
            "text": ["a", "b", "c"],
            "said": ["a", "b", "c"],
        }
    )
    ds = forebay.open(put("in/a.parquet", parquet(rows)), client=client)
    columns = {
        "n": "int", "big": "str_int", "half": "float16", "yes": "int8", "img": "jpeg",
        "obj": "pkl", "utf": "str", "free": "ndarray", "wide": "ndarray:int64",
        "grid": "ndarray:float64:2,3", "deep": "ndarray", "two": "list[png]",
        "price": "str_decimal", "text": "str", "said": "json",
    }  # fmt: skip
    ds.write(f"scratch/{scratch}/out/", "mds", columns=columns)
    shard = json.loads(fetch("out/")["index.json"])["shards"][0]
    assert dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) == columns
    sizes = dict(zip(shard["column_names"], shard["column_sizes"], strict=True))
    assert {name: size for name, size in sizes.items() if size is not None} == {
        "n": 8, "half": 2, "yes": 1, "grid": 48,
    }  # fmt: skip
    again = forebay.open(f"scratch/{scratch}/out/", client=client)
    read = plain(again)
    assert [row["n"] for row in read] == [1, -5, 300]
    assert [row["big"] for row in read] == ["1", "2", str(1 << 60)]
    assert [row["half"] for row in read] == [0.5, 1.25, -2.0]
    assert [row["yes"] for row in read] == [1, 0, 1]
    assert [row["img"] for row in read] == [b"\xff\xd8a", b"\xff\xd8b", b""]
    assert [row["utf"] for row in read] == ["é", "b", ""]
    assert [row["price"] for row in read] == ["1.50", "2.00", "3.25"]
    assert [row["said"] for row in read] == ['"a"', '"b"', '"c"']
    # As the library has them: the type (33: int32), one axis of lengths in a byte, and the values.
    assert read[1]["free"] == bytes([33, 1 << 2, 1]) + np.int32(3).tobytes()
    assert read[1]["wide"] == bytes([1 << 2, 1]) + np.int64(3).tobytes()
    assert np.frombuffer(read[0]["grid"]).reshape(2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read[0]["deep"][:4] == bytes([65, 2 << 2, 2, 2])
    assert np.frombuffer(read[0]["two"][:16], np.uint32).tolist() == [0, 2, 1, 2]
    assert read[0]["two"][16:] == b"abb"
    # All that is chosen is what is in the dict.
    ds.write(f"scratch/{scratch}/one/", "mds", columns={"n": "int32"})
    assert read_mds(fetch("one/")) == [{"n": 1}, {"n": -5}, {"n": 300}]
    for refused in [
        {"n": "jpeg"},
        {"n": "nothing"},
        {"n": "ndarray"},
        {"half": "int"},
        {"text": "int"},
        {"free": "jpeg_array"},
        {"grid": "ndarray:int8"},
        {"grid": "ndarray:float32:0"},
        {"other": "int"},
    ]:
        with pytest.raises(forebay.InvalidRequest):
            ds.write(f"scratch/{scratch}/no/", "mds", columns=refused)
    for column, encoding, row in [
        ("n", "int8", 2),
        ("n", "uint16", 1),
        ("big", "float32", None),
        ("img", "int", 0),
        ("img", "str", 0),
        ("utf", "json", 0),
        ("grid", "ndarray:float32:2,2", 0),
    ]:
        target = f"scratch/{scratch}/bad-{column}-{encoding}/"
        if row is None:  # A power of two, which has few digits.
            assert ds.write(target, "mds", columns={column: encoding}).rows == 3
            continue
        with pytest.raises(forebay.SampleFailed) as failed:
            ds.write(target, "mds", columns={column: encoding})
        assert failed.value.row == row
    assert not fetch("no/")


# JSON lines


def test_jsonl_has_options_of_json(source, put, client, scratch, fetch):
    columns = ["text", "id"]
    source.write(f"scratch/{scratch}/plain/", "jsonl", columns=columns)
    assert first_of(fetch("plain/"), ".jsonl").startswith('{"text":"row 0 é","id":0}\n'.encode())
    source.write(
        f"scratch/{scratch}/out/", "jsonl", columns=columns, ensure_ascii=True, sort_keys=True,
        compression="gzip", compression_level=9,
    )  # fmt: skip
    lines = gzip.decompress(first_of(fetch("out/"), ".jsonl.gz"))
    assert lines.startswith(b'{"id":0,"text":"row 0 \\u00e9"}\n')
    lines = forebay.open(put("in/a.jsonl", b'{"a": 1}\n'), client=client, columns=["json"])
    with pytest.raises(forebay.InvalidRequest):
        lines.write(f"scratch/{scratch}/lines/", "jsonl", ensure_ascii=True)


# What makes no sense


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("parquet", {"use_dictionary": "text"}),
        ("parquet", {"use_dictionary": []}),
        ("parquet", {"use_dictionary": ["nothing"]}),
        ("parquet", {"write_statistics": 1}),
        ("parquet", {"write_page_index": "yes"}),
        ("parquet", {"data_page_size": 0}),
        ("parquet", {"data_page_size": True}),
        ("parquet", {"data_page_size": "1MiB"}),
        ("parquet", {"max_rows_per_page": 0.5}),
        ("parquet", {"data_page_version": "3.0"}),
        ("parquet", {"version": "2.5"}),
        ("parquet", {"column_encoding": "DELTA"}),
        ("parquet", {"column_encoding": {"nothing": "PLAIN"}, "use_dictionary": False}),
        # These two only PyArrow knows: with dictionaries, and of another type.
        ("parquet", {"column_encoding": {"id": "PLAIN"}}),
        ("parquet", {"column_encoding": {"text": "DELTA_BINARY_PACKED"}, "use_dictionary": False}),
        ("parquet", {"use_byte_stream_split": ["nothing"]}),
        ("parquet", {"bloom_filter_options": ["id"]}),
        ("parquet", {"bloom_filter_options": {"id": {"fpp": 2}}}),
        ("parquet", {"bloom_filter_options": {"nothing": True}}),
        ("parquet", {"compression": {"text.nothing": "zstd"}}),
        ("parquet", {"use_dictionary": ["text.nothing"]}),
        ("parquet", {"use_content_defined_chunking": {"size": 5}}),
        ("parquet", {"coerce_timestamps": "ns"}),
        ("parquet", {"compression_level": 5}),
        ("parquet", {"compression": "snappy", "compression_level": 5}),
        ("parquet", {"compression": "zstd", "compression_level": 23}),
        ("parquet", {"compression": "gzip", "compression_level": 10}),
        ("parquet", {"compression": "zstd:5", "compression_level": 5}),
        ("parquet", {"compression": "zstd", "compression_level": "high"}),
        ("parquet", {"compression": {"nothing": "zstd"}}),
        ("parquet", {"compression": {"text": "rar"}}),
        ("parquet", {"compression": {"text": "zstd"}, "compression_level": {"id": 5}}),
        ("parquet", {"compression": ["zstd"]}),
        ("parquet", {"compression": {}}),
        ("jsonl", {"compression": {"text": "gz"}}),
        ("jsonl", {"compression": "gz", "compression_level": {"text": 5}}),
        ("jsonl", {"ensure_ascii": 1}),
        ("tar", {"mode": 0o20000}),
        ("tar", {"mode": "rw"}),
        ("tar", {"mtime": -1}),
        ("tar", {"mtime": "now"}),
        ("tar", {"user": "a b"}),
        ("tar", {"group": "x" * 32}),
        ("tar", {"maxcount": 0}),
        ("tar", {"maxcount": 5, "shard_rows": 5}),
        ("tar", {"encoder": {"id": "npy"}}),
        ("tar", {"compress": "xz"}),
        ("tar", {"compress": True, "compression": "gz"}),
        ("tar", {"encoder": "json"}),
        ("tar", {"encoder": {}}),
        ("tar", {"encoder": {".json": str}}),
        ("tar", {"encoder": {"json": "yaml"}}),
        ("tar", {"encoder": {"other": str}}),
        ("tfrecord", {"compression_type": "LZ4"}),
        ("tfrecord", {"raw": 1}),
        ("mds", {"hashes": "sha1"}),
        ("mds", {"hashes": ["sha1", "md5"]}),
        ("mds", {"hashes": ["sha1", "sha1"]}),
        ("mds", {"hashes": ["sha0"]}),
        ("mds", {"hashes": ["xxh65"]}),
        ("mds", {"size_limit": 0}),
        ("mds", {"size_limit": 1 << 32}),
        ("mds", {"size_limit": "64 bits"}),
        ("mds", {"size_limit": 5, "shard_rows": 5}),
        ("mds", {"size_limit": 5, "shard_size": 5}),
        ("mds", {"columns": {"id": 5}}),
        ("mds", {"columns": {}}),
        ("parquet", {"columns": {"id": "int"}}),
        ("mds", {"size_limit": "9" * 400}),
        ("jsonl", {"shard_size": "9" * 400}),
    ],
)
def test_values_that_make_no_sense_are_refused(source, scratch, fetch, format, options):
    columns = ["id", "text"] if format in ("tar", "jsonl") else None
    with pytest.raises(forebay.InvalidRequest) as refused:
        source.write(f"scratch/{scratch}/out/", format, **{"columns": columns, **options})
    assert any(name in refused.value.message for name in options)
    assert not fetch("out/")


def test_an_option_of_another_format_is_refused_by_its_name(source, scratch, fetch):
    values = {
        "row_group_rows": 5,
        "key": "id",
        "index": False,
        **dict.fromkeys(_options.OPTIONS, ...),
        "columns": {"id": "int"},
    }
    formats = {"row_group_rows": "parquet", "key": "tar", "index": "tfrecord"}
    formats |= {n: o.formats[0] for n, o in _options.OPTIONS.items() if len(o.formats) == 1}
    assert set(values) - set(formats) == {"compression_level"}
    for name, format in formats.items():
        for other in {"parquet", "tar", "tfrecord", "mds", "jsonl"} - {format}:
            with pytest.raises(forebay.InvalidRequest) as refused:
                source.write(f"scratch/{scratch}/out/", other, **{name: values[name]})
            said = refused.value.message
            assert name in said and format in said and f"the format is {other}" in said
    # None is as if it was not given.
    assert _options.checked("parquet", dict.fromkeys(_options.OPTIONS), []) == {}
    # Neither of this one nor of another.
    for name in ("page_size", "maxsize", "shard_row", "row_group_size"):
        with pytest.raises(forebay.InvalidRequest) as refused:
            source.write(f"scratch/{scratch}/out/", **{name: 5})
        assert repr(name) in refused.value.message
        assert all(option in refused.value.hint for option in _options.names_of("parquet"))
    assert not fetch("out/")


def test_each_option_is_named_where_types_are_checked():
    assert set(_options.WriteOptions.__annotations__) == set(_options.OPTIONS) - {"columns"}


def test_another_set_of_options_on_the_same_target_is_told_apart(source, scratch, fetch):
    out = f"scratch/{scratch}/out/"
    options = {"use_dictionary": ["text"], "data_page_size": 4096, "compression": "zstd"}
    done = source.write(out, shard_rows=100, **options)
    before = fetch("out/")
    assert source.write(out, shard_rows=100, **options, version=None).found == done.shards
    for others, said in [
        ({**options, "data_page_size": 8192}, r"data_page_size \(4096, not 8192\)"),
        ({**options, "write_page_index": True}, r"write_page_index \(None, not True\)"),
        ({"compression": "zstd"}, r"use_dictionary \(\['text'\], not None\)"),
        ({**options, "compression_level": 7}, r"compression \('zstd', not 'zstd:7'\)"),
        ({**options, "compression": {"text": "zstd"}}, "compression"),
    ]:
        with pytest.raises(forebay.Conflict, match=said):
            source.write(out, shard_rows=100, **others)
    assert fetch("out/") == before


# Orders


def test_the_plan_of_a_loader_is_an_order(source, put, client, scratch, fetch):
    loader = source.loader(64, shuffle=forebay.Block(2), seed=5, rank=1, world_size=2)
    next(iter(loader))
    for n, order in enumerate([loader, loader.order]):
        done = source.write(f"scratch/{scratch}/{n}/", order=order, columns=["id"], epoch=1)
        # The same as with its shuffle and its seed: the write that is there already.
        again = source.write(
            f"scratch/{scratch}/{n}/", order="block:2", seed=5, columns=["id"], epoch=1
        )
        assert again.found == done.shards
    other = source.loader(
        64, shuffle=forebay.Block(2), seed=5, columns=["id"], epochs=2, uneven="pad"
    )
    other.load_state_dict({**other.state_dict(), "epoch": 1, "position": 0})
    expected = [i for b in other for i in b.numpy()["id"][: other.last.real].tolist()]
    assert [row["id"] for row in read_parquet(shards_of(fetch("0/"), ".parquet"))] == expected
    mix = forebay.mix([source, source], [0.5, 0.5], epoch_rows=100)
    assert mix.write(f"scratch/{scratch}/mix/", order=mix.loader(9, shuffle="full")).rows == 100
    with pytest.raises(forebay.InvalidRequest, match="seed"):
        source.write(f"scratch/{scratch}/no/", order=loader, seed=6)
    for of in (source.select(range(100)), mix):
        with pytest.raises(forebay.InvalidRequest, match="other datasets"):
            of.write(f"scratch/{scratch}/no/", order=loader)
    assert not fetch("no/")


# The command line


def test_the_command_passes_options_on(source, node, scratch, fetch):
    out = f"scratch/{scratch}/out/"
    command = ["reshard", f"scratch/{scratch}/in/*.parquet", out, "--columns", "id,text"]
    command += ["--compression", '{"text": "zstd"}', "--option", "compression_level=9"]
    command += ["--option", 'use_dictionary=["text"]', "--option", "version=2.4"]
    command += ["--option", "data-page-version=2.0", "--option", "write_page_index=true"]
    done = reshard(node, *command)
    assert done.returncode == 0, done.stderr
    chunks = columns_of(first_of(fetch("out/"), ".parquet"))
    assert chunks["text"]["compression"] == "ZSTD" and not chunks["id"]["has_dictionary_page"]
    same = {"compression": {"text": "zstd:9"}, "use_dictionary": ["text"], "version": "2.4"}
    same |= {"data_page_version": "2.0", "write_page_index": True}
    assert source.write(out, columns=["id", "text"], **same).found == 1
    tar = ["reshard", f"scratch/{scratch}/in/*.parquet", f"scratch/{scratch}/tar/"]
    tar += ["--format", "tar", "--columns", "text", "--option", "mode=0444", "--option", "user=7"]
    assert reshard(node, *tar).returncode == 0
    [member, *_] = members_of(first_of(fetch("tar/"), ".tar"))
    assert (member.mode, member.uname) == (0o444, "7")
    # What has a flag of its own, or is an argument of Python's alone.
    for option, said in [
        ("shard_rows=5", "hint: --shard-rows"),
        ("order=full", "hint: --shuffle"),
        ("compression=zstd", "hint: --compression"),
        ("client=x", "forebay reshard --help"),
        ("columns=5", "give --columns or --option columns=, not both"),
        ("mode", "has no value"),
    ]:
        failed = reshard(node, *tar, "--option", option)
        assert failed.returncode != 0 and "Traceback" not in failed.stderr, failed.stderr
        assert said in failed.stderr, failed.stderr
    failed = reshard(node, *tar[:5], "--option", "columns=5")
    assert "or --columns a,b" in failed.stderr and "Traceback" not in failed.stderr, failed.stderr
    failed = reshard(node, *tar, "--compression", "{bad")
    assert "--compression {bad is not JSON" in failed.stderr and "Traceback" not in failed.stderr
    mds = ["reshard", f"scratch/{scratch}/in/*.parquet", f"scratch/{scratch}/mds/"]
    mds += ["--format", "mds", "--option", 'columns={"id": "str_int"}']
    assert reshard(node, *mds).returncode == 0
    shard = json.loads(fetch("mds/")["index.json"])["shards"][0]
    assert (shard["column_names"], shard["column_encodings"]) == (["id"], ["str_int"])
    for wrong in (
        ["--option", "use_dictionary"],
        ["--option", "nothing=5"],
        ["--option", "mode=0444"],
        ["--option", "data_page_size=big"],
        ["--option", "version=2.4"],
        ["--option", 'columns={"id": "int"}'],
    ):
        failed = reshard(node, *command, *wrong)
        assert failed.returncode == 2 and failed.stderr.startswith("error: "), failed.stderr


def test_errors_of_the_command_name_its_options(source, node, scratch, fetch):
    command = ["reshard", f"scratch/{scratch}/in/*.parquet", f"scratch/{scratch}/out/"]
    for wrong, said in [
        (["--shard-size", "x"], "error: --shard-size x is not a size\n"),
        (["--shard-size", "1MiB", "--shard-rows", "5"], "give --shard-size or --shard-rows, not"),
        (["--shard-rows", "0"], "error: --shard-rows is 0\n"),
        (["--name", "a b"], "error: --name is 'a b'\n"),
        (["--no-index"], "error: --no-index is an option of tfrecord, and the format is parquet\n"),
        (["--no-index"], "hint: leave it out, or write --format tfrecord; parquet has "),
        (["--format", "tar", "--key", "nope"], "error: --key names column 'nope'"),
        (["--format", "tar", "--key", "nope"], '; --key "" numbers the samples\n'),
        (["--option", "data_page_size=0"], "error: --option data_page_size is 0\n"),
        (["--option", "page_size=5"], "hint: did you mean --option data_page_size=?"),
        (["--option", "compression_level=3"], "hint: give --compression zstd too\n"),
    ]:
        failed = reshard(node, *command, *wrong)
        assert failed.returncode == 2 and said in failed.stderr, failed.stderr
    assert not fetch("out/")


def test_only_arguments_of_python_become_options():
    from forebay.reshard import _OF_OPEN, _OF_WRITE, _in_options

    kept = "no files match 'key=5/x' nor b/shard_rows=3/"
    assert _in_options(kept, _OF_WRITE) == kept
    assert _in_options('format="jsonl" says so', _OF_OPEN) == "--source-format jsonl says so"
    assert _in_options('columns={"id": "json"}', _OF_WRITE) == '--option columns={"id": "json"}'
    assert "--shard-rows (None, not 300)" in _in_options("shard_rows (None, not 300)", _OF_WRITE)
