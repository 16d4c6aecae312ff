"""Formats of datasets beside the libraries that read them, value by value."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import struct

import forebay
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import pytest
from forebay import InvalidRequest, NotFound, ServerError, Unsupported
from test_write import mds_value, read_mds


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
    texts = ["".join(rng.choices('abcdefgh ü\n"', k=rng.randrange(2000))) for _ in range(4000)]
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


def arrows_own(data: bytes, delimiter: str = ",") -> pa.Table:
    """What Arrow's reader makes of a file, with types inferred from all of it."""
    return pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(block_size=len(data) + 1, use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    )


def csv_rows(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Rows of texts, with columns of each type that is inferred."""

    def maybe(text: str) -> str:
        return rng.choice(["", "NA", "NaN", "null", "#N/A"]) if rng.random() < 0.1 else text

    def words() -> str:
        pieces = ["ü", ",", "\t", "\n", "\r\n", '"', '""', " ", "1", "word", "NA"]
        return "".join(rng.choices(pieces, k=rng.randrange(12)))

    def clock() -> str:
        return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"

    def day() -> str:
        return f"{rng.randrange(1700, 2200)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"

    return [
        {
            "id": str(i),
            "whole": maybe(str(rng.randrange(-(2**63), 2**63))),
            "padded": rng.choice(["007", " 7", "7 ", "-0", "12\t"]),
            "real": maybe(
                rng.choice(
                    ["1.5", "-2e-7", ".5", "7.", "inf", "-inf", "+2.5", "1e400", repr(rng.random())]
                )
            ),
            "hexadecimal": maybe(rng.choice(["0x1F", "7", " 0XffFFffff", "0xFFFFFFFFFFFFFFFF"])),
            "signed": maybe(rng.choice(["+1", "-1", "0"])),
            "mixed": rng.choice(["1", "2.25", "99999999999999999999"]),
            "truth": maybe(rng.choice(["true", "False", "TRUE", "0", "1"])),
            "date": maybe(day()),
            "clock": maybe(rng.choice([clock(), clock()[:5]])),
            "time": maybe(f"{day()}{rng.choice(' T')}{clock()}"),
            "short": rng.choice([day(), f"{day()} {clock()[:5]}", f"{day()} {clock()[:2]}"]),
            "fine": maybe(f"{day()} {clock()}.{'123456789'[: rng.randrange(1, 10)]}"),
            "zoned": f"{day()} {clock()}{rng.choice(['Z', '+01:00', '-0530', '+14'])}",
            "nothing": rng.choice(["", "NULL", "n/a"]),
            "text": words(),
            "empty or not": rng.choice(["", "x", "NA"]),
        }
        for i in range(count)
    ]


def csv_of(rows: list[dict[str, str]], **options) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_csv_is_what_arrow_reads(node, put, scratch, kind):
    delimiter = {"csv": ",", "tsv": "\t"}[kind]
    rng = random.Random(len(kind))
    rows = csv_rows(rng, 3000)
    for name, options, pack in [
        (f"a.{kind}", {}, bytes),
        (f"b.{kind}", {"lineterminator": "\n", "quoting": csv.QUOTE_ALL}, bytes),
        (f"c.{kind}.gz", {"lineterminator": "\n"}, gzip.compress),
        (f"d.{kind}.zst", {"quoting": csv.QUOTE_NONNUMERIC}, zstd),
    ]:
        data = csv_of(rows, delimiter=delimiter, **options)
        expected = arrows_own(data, delimiter)
        ds = forebay.open(put(f"{name}/{name}", pack(data)), url=node.url)
        assert ds.format == kind and len(ds) == len(rows), name
        ours = table_of(ds)
        for field in expected.schema:
            assert ours.schema.field(field.name).type == field.type, f"{name}: {field}"
            assert ours[field.name].equals(expected[field.name]), f"{name}: {field}"
        assert ours.schema.names == expected.schema.names
        order = rng.sample(range(len(rows)), 200)
        picked = pa.table(pa.record_batch(ds.take(order, ["text", "whole"]).arrow()))
        assert picked.equals(expected.select(["text", "whole"]).take(order)), name


def test_csv_is_what_pandas_reads_and_writes(node, put, scratch):
    rows = csv_rows(random.Random(5), 1000)
    data = csv_of(rows, lineterminator="\n")
    texts = pandas.read_csv(io.BytesIO(data), dtype=str, keep_default_na=False)
    ds = forebay.open(put("a.csv", data), url=node.url, schema=dict.fromkeys(rows[0], "string"))
    # pandas reads \r\n within quotation marks as it is, too.
    assert table_of(ds).to_pylist() == texts.to_dict("records") == rows
    frame = pandas.DataFrame(
        {
            "n": range(50),
            "x": [i / 8 if i % 5 else None for i in range(50)],
            "t": [f'say "{i}",\nor not' for i in range(50)],
            "when": pandas.date_range("2026-01-01", periods=50, freq="h"),
        }
    )
    # The index is a column without a name.
    ds = forebay.open(put("b.csv", frame.to_csv().encode()), url=node.url)
    assert list(ds.schema) == ["", "n", "x", "t", "when"]
    assert ds.schema["when"].startswith("Timestamp")
    again = table_of(ds).to_pandas()
    assert again[""].tolist() == list(range(50))
    pandas.testing.assert_frame_equal(
        again[["n", "x", "t"]], frame[["n", "x", "t"]], check_dtype=False
    )
    assert again["when"].tolist() == frame["when"].tolist()


def test_csv_beside_pictures_is_no_table_and_what_is_odd_is_told(node, put, scratch):
    here = f"scratch/{scratch}"
    for name in ("1.jpg", "2.jpg", "labels.csv"):
        put(f"pictures/{name}", b"name,label\n1.jpg,0\n")
    assert forebay.open(f"{here}/pictures/", url=node.url).format == "objects"
    put("short/a.csv", b'a,b\n1,2\n"x\ny",2\n3\n')
    put("open/a.csv", b'a,b\n1,"2\n')
    put("latin/a.csv", "a\ncafé\n".encode("latin-1"))
    put("typed/a.csv", b"a\n1\nmany\n")
    for name, told in [
        ("short", r"short/a\.csv.*row 2 \(line 5\) of the csv file: it has 1 value"),
        ("open", r"open/a\.csv.*line 2.*quoted value that does not end"),
        ("latin", r"latin/a\.csv.*row 0 \(line 2\) of the csv file: it is not UTF-8"),
    ]:
        with pytest.raises(ServerError, match=told):
            forebay.open(f"{here}/{name}/", url=node.url)
    ds = forebay.open(f"{here}/latin/", url=node.url, schema={"a": "binary"})
    assert bytes(ds[0]["a"]) == "café".encode("latin-1")
    ds = forebay.open(f"{here}/typed/", url=node.url, schema={"a": "int64"})
    with pytest.raises(ServerError, match=r"row 1 of the file: column \"a\": \"many\" is not an"):
        ds[1]
    assert ds[0] == {"a": 1}


def test_folders_of_datasets_are_what_it_loads(node, put, scratch, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "id": list(range(100)),
        "text": [f"row {i}" if i % 7 else None for i in range(100)],
        "tokens": [list(range(i % 5)) for i in range(100)],
        "label": [i % 3 for i in range(100)],
        "blob": [{"bytes": bytes([i]), "path": None} for i in range(100)],
    }
    features = datasets.Features(
        {
            "id": datasets.Value("int32"),
            "text": datasets.Value("string"),
            "tokens": datasets.Sequence(datasets.Value("int64")),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "blob": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
        }
    )
    whole = datasets.Dataset.from_dict(rows, features=features)
    whole.select(range(99, -1, -3)).save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select([5, 4])}).save_to_disk(
        tmp_path / "splits"
    )
    for path in tmp_path.rglob("*"):
        if path.is_file():
            put(str(path.relative_to(tmp_path)), path.read_bytes())
    for name in ("one", "splits/train", "splits/test"):
        theirs = datasets.load_from_disk(tmp_path / name).data.table
        ds = forebay.open(f"scratch/{scratch}/{name}/", url=node.url)
        assert ds.format == "arrow-stream" and len(ds) == len(theirs), name
        ours = table_of(ds)
        assert ours.cast(theirs.schema).equals(theirs.combine_chunks()), name
    with pytest.raises(InvalidRequest, match="several splits.*train/"):
        forebay.open(f"scratch/{scratch}/splits/", url=node.url)


@pytest.mark.parametrize("compression", [None, "zstd:3", "gz"])
def test_mds_is_what_its_format_says(node, put, scratch, origin_s3, compression):
    count = 700
    rng = random.Random(3)
    table = pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "small": pa.array([i % 200 for i in range(count)], pa.uint8()),
            "half": pa.array([i / 8 for i in range(count)], pa.float32()),
            "text": pa.array(["ü" * rng.randrange(50) for _ in range(count)]),
            "data": pa.array(
                [rng.randbytes(rng.randrange(900)) for _ in range(count)], pa.binary()
            ),
            "tokens": pa.array([[i] * (i % 9 + 1) for i in range(count)], pa.list_(pa.int32())),
            "what": pa.array([{"i": i, "t": str(i)} for i in range(count)]),
        }
    )
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out)
    source = forebay.open(put("in/a.parquet", out.getvalue()), url=node.url)
    done = source.write(
        f"scratch/{scratch}/mds/", "mds", shard_rows=150, compression=compression, progress=False
    )
    listed = origin_s3.list_objects_v2(Bucket="scratch", Prefix=f"{scratch}/mds/")["Contents"]
    files = {
        item["Key"].rpartition("/")[2]: origin_s3.get_object(Bucket="scratch", Key=item["Key"])[
            "Body"
        ].read()
        for item in listed
    }
    theirs = read_mds(files)
    # By its directory, and by its manifest.
    for name in (f"scratch/{scratch}/mds/", done.source):
        ds = forebay.open(name, url=node.url)
        assert ds.format == "mds" and len(ds) == count and len(ds.files) == 5
        order = rng.sample(range(count), count)
        for at, row in zip(order, ds.take(order), strict=True):
            expected = dict(theirs[at])
            # Arrays are the bytes that they are in the shard: their shape, and their numbers.
            tokens = bytes(row.pop("tokens"))
            assert (
                mds_value("ndarray:int32", tokens) == expected.pop("tokens") == [at] * (at % 9 + 1)
            )
            row["data"] = bytes(row["data"])
            row["what"] = json.loads(row["what"]) if isinstance(row["what"], str) else row["what"]
            assert row == expected


#: The types of tokens by their codes in an ``.idx``.
MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def megatron(sequences, documents: list[int], code: int = 8, modes=None) -> tuple[bytes, bytes]:
    """A ``.bin`` and its ``.idx``, by the layout of Megatron-LM. ``documents``: with which sequence
    each begins."""
    arrays = [np.asarray(sequence, MEGATRON[code]) for sequence in sequences]
    lengths = np.array([len(a) for a in arrays], "<i4")
    sizes = [a.nbytes for a in arrays]
    pointers = np.cumsum([0, *sizes])[:-1].astype("<i8")
    places = np.array([*documents, len(arrays)], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(arrays), len(places))
    idx = head + lengths.tobytes() + pointers.tobytes() + places.tobytes()
    if modes is not None:
        idx += np.asarray(modes, "i1").tobytes()
    return b"".join(a.tobytes() for a in arrays), idx


@pytest.mark.parametrize("code", MEGATRON)
def test_megatron_is_what_its_layout_says(node, put, scratch, code):
    rng = np.random.default_rng(code)
    dtype = np.dtype(MEGATRON[code])
    expected = []
    for shard in range(2):
        lengths = rng.integers(0, 400, 900)
        sequences = [rng.integers(0, 127, n).astype(dtype) for n in lengths]
        # One sequence each in the first file, several or none in the second.
        begins = range(900) if shard == 0 else sorted([0, *rng.integers(1, 900, 300).tolist()])
        modes = rng.integers(-5, 5, 900) if code == 8 else None
        bin, idx = megatron(sequences, list(begins), code, modes)
        put(f"{shard}_text_document.bin", bin)
        put(f"{shard}_text_document.idx", idx)
        numbers = np.searchsorted(list(begins), range(900), side="right") - 1
        for i, sequence in enumerate(sequences):
            row = {"tokens": sequence.tolist(), "document": int(numbers[i])}
            expected.append(row | ({} if modes is None else {"mode": int(modes[i])}))
    ds = forebay.open(f"scratch/{scratch}/", url=node.url)
    assert (ds.format, len(ds), len(ds.files)) == ("megatron", 1800, 2)
    assert list(ds.columns) == list(expected[0])
    assert pa.array(ds.take([0]).arrow()["tokens"]).type.value_type == pa.from_numpy_dtype(dtype)
    order = rng.permutation(1800).tolist()
    assert ds.take(order).arrow().to_pylist() == [expected[i] for i in order]
    for name in ("1_text_document", "1_text_document.bin", "1_text_document.idx"):
        one = forebay.open(f"scratch/{scratch}/{name}", format="megatron", url=node.url)
        assert one.take(range(900)).arrow().to_pylist() == expected[900:], name


def test_packs_of_megatrons_tokens(node, put, scratch):
    rng = np.random.default_rng(5)
    sequences = [rng.integers(1, 60_000, n) for n in rng.integers(0, 90, 500)]
    bin, idx = megatron(sequences, list(range(500)))
    put("p.bin", bin)
    put("p.idx", idx)
    ds = forebay.open(f"scratch/{scratch}/p.*", url=node.url)
    pack = forebay.Pack(64, column="tokens")
    tokens = []
    for batch in ds.loader(batch_size=4, shuffle="none", pack=pack, uneven="pad"):
        assert batch["tokens"].shape == (4, 64) and batch["tokens"].dtype == np.uint16
        for row, length in zip(batch["tokens"], batch["lengths"], strict=True):
            tokens.extend(np.asarray(row)[: int(length)].tolist())
    assert tokens == np.concatenate(sequences).tolist()


def test_damaged_and_odd_megatron_is_told(node, put, scratch):
    bin, idx = megatron([[1, 2], [3]], [0, 1])
    put("cut/a.bin", bin[:-1])
    put("cut/a.idx", idx)
    with pytest.raises(ServerError, match=r"cut/a.idx: sequence 1 is at bytes 4\.\.6.*has 5 bytes"):
        forebay.open(f"scratch/{scratch}/cut/", url=node.url)
    put("short/a.bin", bin)
    put("short/a.idx", idx[:-8])
    with pytest.raises(ServerError, match="2 sequences and 3 places of documents"):
        forebay.open(f"scratch/{scratch}/short/", url=node.url)
    put("alone/a.bin", bin)
    with pytest.raises(NotFound, match="alone/a.idx"):
        forebay.open(f"scratch/{scratch}/alone/a", format="megatron", url=node.url)
    put("other/a.bin", bin)
    put("other/a.idx", b"TNTIDX\0\0" + idx[8:])
    with pytest.raises(ServerError, match="does not begin with MMIDIDX"):
        forebay.open(f"scratch/{scratch}/other/", url=node.url)
    assert len(forebay.open(f"scratch/{scratch}/other/", format="objects", url=node.url)) == 2


#: litData's numbers of some types of PyTorch.
LITDATA = {"u1": 11, "<i2": 13, "<i4": 15, "<i8": 17, "<f4": 0, "<f8": 2, "<u2": 20}


def litdata_chunk(items: list[bytes]) -> bytes:
    """A chunk by litData's layout."""
    first = 4 + 4 * (len(items) + 1)
    places = np.cumsum([first, *map(len, items)]).astype("<u4")
    return struct.pack("<I", len(items)) + places.tobytes() + b"".join(items)


def litdata_item(values: list[bytes]) -> bytes:
    return struct.pack(f"<{len(values)}I", *map(len, values)) + b"".join(values)


def litdata_index(chunks: dict[str, tuple[int, int | None]], formats: list[str], spec, **config):
    """``index.json``. ``chunks``: items and tokens of each, by its name."""
    listed = [
        {"chunk_bytes": 1, "chunk_size": items, "dim": tokens, "filename": name}
        for name, (items, tokens) in chunks.items()
    ]
    config = {"compression": None, "data_format": formats, "encryption": None} | config
    tree = None if spec is None else json.dumps([1, spec])
    return json.dumps({"chunks": listed, "config": {**config, "data_spec": tree}}).encode()


LEAF = {"type": None, "context": None, "children_spec": []}


def tree_of(**children) -> dict:
    context = json.dumps(list(children))
    return {"type": "builtins.dict", "context": context, "children_spec": [*children.values()]}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_litdata_is_what_its_layout_says(node, put, scratch, compression):
    rng = random.Random(8)
    label = {"type": "builtins.tuple", "context": "null", "children_spec": [LEAF, LEAF]}
    spec = tree_of(id=LEAF, text=LEAF, x=LEAF, ok=LEAF, image=LEAF, ids=LEAF, label=label)
    formats = ["int", "str", "float", "bool", "jpeg", "no_header_tensor:17", "no_header_numpy:9"]
    formats.append("bytes")
    chunks, expected = {}, []
    for shard in range(11):
        items = []
        for i in range(rng.randrange(1, 60)):
            row = {
                "id": shard * 1000 + i,
                "text": "ü" * rng.randrange(40),
                "x": i / 8,
                "ok": i % 3 == 0,
                "image": rng.randbytes(rng.randrange(2000)),
                "ids": [rng.randrange(-(2**60), 2**60) for _ in range(rng.randrange(5))],
                "label.0": [i / 4] * (i % 3),
                "label.1": rng.randbytes(i),
            }
            values = [
                struct.pack("<q", row["id"]),
                row["text"].encode(),
                struct.pack("<d", row["x"]),
                bytes([row["ok"]]),
                row["image"],
                np.array(row["ids"], "<i8").tobytes(),
                np.array(row["label.0"], "<f4").tobytes(),
                row["label.1"],
            ]
            items.append(litdata_item(values))
            expected.append(row)
        # The order of index.json is not that of the names as text.
        name = f"chunk-0-{shard}.bin" if compression is None else f"chunk-0-{shard}.zstd.bin"
        chunks[name] = (len(items), None)
        data = litdata_chunk(items)
        put(f"d/{name}", data if compression is None else zstd(data))
    put("d/index.json", litdata_index(chunks, formats, spec, compression=compression))
    ds = forebay.open(f"scratch/{scratch}/d/", url=node.url)
    assert (ds.format, len(ds), len(ds.files)) == ("litdata", len(expected), 11)
    assert ds.take(range(len(ds))).arrow().to_pylist() == expected
    order = rng.sample(range(len(ds)), len(ds))
    got = ds.take(order, columns=["text", "id"]).arrow().to_pylist()
    assert got == [{"text": expected[i]["text"], "id": expected[i]["id"]} for i in order]
    if compression is None:
        one = forebay.open(f"scratch/{scratch}/d/chunk-0-10.bin", format="litdata", url=node.url)
        assert one.take(range(len(one))).arrow().to_pylist() == expected[-len(one) :]


@pytest.mark.parametrize("dtype", LITDATA)
def test_tokens_of_litdata_are_items_or_blocks(node, put, scratch, dtype):
    rng = np.random.default_rng(3)
    chunks, sequences, blocks = {}, [], []
    for shard in range(3):
        items = [rng.integers(0, 100, n).astype(dtype) for n in rng.integers(0, 90, 40)]
        name = f"chunk-{shard}-0.bin"
        chunks[name] = (len(items), sum(map(len, items)))
        put(name, litdata_chunk([item.tobytes() for item in items]))
        sequences += [item.tolist() for item in items]
        whole = np.concatenate(items)
        blocks += whole[: len(whole) // 33 * 33].reshape(-1, 33).tolist()
    formats = [f"no_header_tensor:{LITDATA[dtype]}"]
    put("index.json", litdata_index(chunks, formats, LEAF, item_loader="TokensLoader"))
    ds = forebay.open(f"scratch/{scratch}/", url=node.url)
    assert ds.format == "litdata" and list(ds.columns) == ["tokens"]
    assert ds.take(range(len(ds))).arrow()["tokens"].to_pylist() == sequences
    cut = forebay.open(f"scratch/{scratch}/", block_size=33, url=node.url)
    assert cut.version != ds.version and len(cut) == len(blocks)
    order = rng.permutation(len(blocks)).tolist()
    assert cut.take(order).arrow()["tokens"].to_pylist() == [blocks[i] for i in order]
    if np.dtype(dtype).kind in "iu":
        tokens = []
        pack = forebay.Pack(50, column="tokens")
        for batch in ds.loader(batch_size=2, shuffle="none", pack=pack, uneven="pad"):
            for row, length in zip(batch["tokens"], batch["lengths"], strict=True):
                tokens.extend(np.asarray(row)[: int(length)].tolist())
        assert tokens == [token for sequence in sequences for token in sequence]


def test_damaged_and_odd_litdata_is_told(node, put, scratch):
    chunk = litdata_chunk([litdata_item([struct.pack("<q", i)]) for i in range(3)])
    tokens = litdata_chunk([b"\1\2\3\4"])

    def opened(name: str, data: bytes = chunk, chunks=None, formats=("int",), **config):
        put(f"{name}/chunk-0-0.bin", data)
        chunks = chunks or {"chunk-0-0.bin": (3, None)}
        put(f"{name}/index.json", litdata_index(chunks, list(formats), tree_of(a=LEAF), **config))
        return forebay.open(f"scratch/{scratch}/{name}/", url=node.url)

    assert opened("whole")[2] == {"a": 2}
    with pytest.raises(ServerError, match=r"whole2/chunk-0-0.bin.*end at offset .* long"):
        opened("whole2", chunk[:-1])
    with pytest.raises(ServerError, match="the number 3, but by index.json it has 4"):
        opened("count", chunks={"chunk-0-0.bin": (4, None)})
    with pytest.raises(NotFound, match=r'lists the chunk "chunk-0-1.bin"'):
        opened("listed", chunks={"chunk-0-1.bin": (3, None)})
    put("more/chunk-0-1.bin", chunk)
    with pytest.raises(ServerError, match=r'does not list "chunk-0-1.bin"'):
        opened("more")
    with pytest.raises(ServerError, match="data_spec has 1 values, and its data_format 2"):
        opened("spec", formats=("int", "int"))
    for name, config, told in (
        ("secret", {"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ("lz4", {"compression": "lz4"}, 'compressed with "lz4"'),
        ("batch", {"compression": "zstd", "compression_level": "batch"}, "compression_level"),
        ("parquet", {"item_loader": "ParquetLoader"}, 'litData\'s "ParquetLoader"'),
    ):
        with pytest.raises(Unsupported, match=told):
            opened(name, **config)
    with pytest.raises(Unsupported, match="tokens of the chunks are"):
        opened("type", tokens, {"chunk-0-0.bin": (1, 2)}, ["no_header_tensor:4"])
    with pytest.raises(ServerError, match="have 8 each"):
        opened("width", tokens, {"chunk-0-0.bin": (1, 2)}, ["no_header_tensor:17"])
    with pytest.raises(InvalidRequest, match="block_size.*other items"):
        forebay.open(f"scratch/{scratch}/whole/", block_size=4, url=node.url)
    put("alone/chunk-0-0.bin", chunk)
    with pytest.raises(NotFound, match="index.json"):
        forebay.open(f"scratch/{scratch}/alone/chunk-0-0.bin", format="litdata", url=node.url)
    put("lie/chunk-0-0.bin", chunk[:20] + b"\7\0\0\0" + chunk[24:])
    put("lie/index.json", litdata_index({"chunk-0-0.bin": (3, None)}, ["int"], tree_of(a=LEAF)))
    with pytest.raises(ServerError, match="do not add up"):
        forebay.open(f"scratch/{scratch}/lie/", url=node.url).take([0])


def test_columns_of_one_name_are_refused(node, put, scratch):
    of = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "b", "a"])
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pa.parquet.write_table(of, parquet)
    with pa.ipc.new_file(arrow, of.schema) as file:
        file.write_table(of)
    put("twice.parquet", parquet.getvalue())
    put("twice.arrow", arrow.getvalue())
    for name in ("twice.parquet", "twice.arrow"):
        source = f"scratch/{scratch}/{name}"
        for columns in (None, ["a"], ["b"]):
            with pytest.raises(forebay.InvalidRequest, match=r"more than one column 'a'.*schema="):
                forebay.open(source, url=node.url, columns=columns)
        for names, row in ((["b"], {"b": 2}), (["b", "a"], {"b": 2, "a": 1})):
            schema = dict.fromkeys(names, "int64")
            assert forebay.open(source, url=node.url, schema=schema)[0] == row
