"""What the values of columns are in Python, of every type that files have: as PyArrow says, or an
error.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from arrow_types import binary_view, list_view, string_view
from servers import Node

HOUR = dt.timezone(dt.timedelta(hours=1))
NS = 1_700_000_000_123_456_000
TYPES = {
    "ts_s": pa.array([1, None, 3], pa.timestamp("s")),
    "ts_us": pa.array([NS // 1000, None, 0], pa.timestamp("us")),
    "ts_ns": pa.array([NS, None, 0], pa.timestamp("ns")),
    "ts_tz": pa.array([NS // 1000, None, 0], pa.timestamp("us", "Europe/Berlin")),
    "ts_ns_offset": pa.array([NS, None, 0], pa.timestamp("ns", "+01:00")),
    "duration_ns": pa.array([1_500_000, None, 0], pa.duration("ns")),
    "duration_ms": pa.array([1500, None, 0], pa.duration("ms")),
    "time32_s": pa.array([3661, None, 0], pa.time32("s")),
    "time32_ms": pa.array([3_661_500, None, 0], pa.time32("ms")),
    "time64_us": pa.array([3_661_000_001, None, 0], pa.time64("us")),
    "time64_ns": pa.array([3_661_000_001_000, None, 0], pa.time64("ns")),
    "date32": pa.array([dt.date(2024, 2, 29), None, dt.date(1970, 1, 1)]),
    "date64": pa.array([dt.date(2024, 2, 29), None, dt.date(1969, 12, 31)], pa.date64()),
    "decimal": pa.array([Decimal("-12.345"), None, Decimal("0.001")], pa.decimal128(10, 3)),
    "decimal256": pa.array([Decimal(10) ** 60, None, Decimal(-1)], pa.decimal256(70, 2)),
    "map": pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
    "view": pa.array(["short", None, "longer than twelve bytes"], string_view()),
    "bytes_view": pa.array([b"", None, b"longer than twelve bytes"], binary_view()),
    "fixed_list": pa.array([[1, 2, 3], None, [4, 5, 6]], pa.list_(pa.int32(), 3)),
    "fixed_lists": pa.array(
        [[[1, 2], [3, 4], [5, 6]], None, [[7, 8], [9, None], [11, 12]]],
        pa.list_(pa.list_(pa.int16(), 2), 3),
    ),
    "struct_of_fixed_lists": pa.array(
        [{"box": [[1, 2]]}, None, {"box": None}],
        pa.struct([("box", pa.list_(pa.list_(pa.int16(), 2), 1))]),
    ),
    "list_of_views": pa.array(
        [["a", None], None, ["longer than twelve bytes"]], pa.list_(string_view())
    ),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2, 3], ["a", None, "b"]),
    "categories": pa.DictionaryArray.from_arrays(
        pa.array([1, None, 0], pa.uint32()), pa.array(["a", "longer than twelve"], string_view())
    ),
    "list_of_times": pa.array([[NS], None, []], pa.list_(pa.timestamp("ns"))),
    "struct": pa.array(
        [{"t": NS, "m": 1}, None, {"t": None, "m": 2}],
        pa.struct([("t", pa.timestamp("ns")), ("m", pa.int8())]),
    ),
}


def plain(value):
    """A value of either side, in a form that can be compared."""
    if isinstance(value, np.ma.MaskedArray | np.ndarray):
        return (
            [plain(v) for v in value.tolist()]
            if value.dtype.kind not in "mM"
            else [plain(v) for v in value.astype(f"{value.dtype.kind}8[us]").tolist()]
        )
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if type(value).__module__.startswith("pandas"):
        return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value.to_pytimedelta()
    return value


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("values")
    (root / "values").mkdir()
    table = pa.table(TYPES)
    for name in ("all", "again"):
        with pa.ipc.new_file(root / "values" / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
    lists = pa.table(
        {
            "id": [0, 1],
            "x": pa.array([[1, None, 3], [4, 5, 6]], pa.list_(pa.int64())),
            "y": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(lists, root / "values" / "lists.parquet")
    odd = pa.table(
        {
            "t": pa.array([NS + 1, NS], pa.timestamp("ns")),
            "far": pa.array([10**13, 0], pa.timestamp("s")),
        }
    )
    with pa.ipc.new_file(root / "values" / "odd.arrow", odd.schema) as file:
        file.write_table(odd)
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'values'}"])
    yield node
    node.stop()


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_pyarrow(files, name):
    ds = forebay.open("values/all.arrow", url=files.url, columns=[name])
    truth = [plain(v) for v in TYPES[name].to_pylist()]
    assert [plain(ds[i][name]) for i in range(3)] == truth
    rows = ds.take([2, 0, 2, 1])
    assert [plain(r[name]) for r in rows] == [truth[i] for i in (2, 0, 2, 1)]
    assert len(rows.numpy()[name]) == 4
    # A part of a batch, and rows of two datasets.
    part = rows[1:4].arrow()
    assert part.schema.field(name).type == TYPES[name].type
    assert [plain(value) for value in part.column(name).to_pylist()] == [
        truth[i] for i in (0, 2, 1)
    ]
    other = forebay.open("values/again.arrow", url=files.url, columns=[name])
    both = forebay.concatenate([ds, other]).take([4, 3, 0, 1]).arrow()
    assert [plain(value) for value in both.column(name).to_pylist()] == [
        truth[i] for i in (1, 0, 0, 1)
    ]
    if name == "ts_tz":
        assert str(ds[0][name].tzinfo) == "Europe/Berlin"
    if name == "ts_ns_offset":
        assert ds[0][name].utcoffset() == dt.timedelta(hours=1)


def test_the_schema_of_a_file_opens_it(files):
    whole = forebay.open("values/all.arrow", url=files.url)
    names = [name for name in TYPES if name != "runs"]
    schema = pa.schema([(name, TYPES[name].type) for name in names])
    assert forebay.open("values/all.arrow", url=files.url, schema=whole.schema).schema
    types = {
        "decimal": "decimal128(10, 3)",
        "categories": str(TYPES["categories"].type),
        "map": "map<string, int64>",
    }
    for given in (schema, types):
        ds = forebay.open("values/all.arrow", url=files.url, schema=given)
        assert ds.schema == {name: whole.schema[name] for name in ds.columns}
        batch = ds.take(range(3)).arrow()
        for name in ds.columns:
            assert plain(batch[name].to_pylist()) == plain(TYPES[name].to_pylist())
    with pytest.raises(forebay.InvalidRequest, match=r"cannot be read as Decimal128\(9, 2\)"):
        forebay.open("values/all.arrow", url=files.url, schema={"decimal": pa.decimal128(9, 2)})


def test_frames_have_the_types_of_columns(tmp_path):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    table = pa.table(
        {
            "small": pa.array([1, 2], pa.int16()),
            "half": pa.array([0.5, 1.5], pa.float32()),
            "bytes": [b"a", b""],
            "time": pa.array([NS + 1, 0], pa.timestamp("ns")),
        }
    )
    (tmp_path / "frames").mkdir()
    pq.write_table(table, tmp_path / "frames" / "0.parquet")
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'frames'}"])
    try:
        ds = forebay.open("frames/*.parquet", url=node.url)
        rows = ds.take([1, 0])
        back = table.take([1, 0])
        assert polars.DataFrame(rows.arrow()).equals(polars.DataFrame(back))
        assert polars.DataFrame(rows.arrow()).schema == polars.DataFrame(back).schema
        none = polars.DataFrame(ds.take([]).arrow())
        assert none.schema == polars.DataFrame(back).schema and not len(none)
        if hasattr(pandas.DataFrame, "from_arrow"):
            assert pandas.DataFrame.from_arrow(rows).equals(back.to_pandas())
    finally:
        node.stop()


def test_dictionaries_of_views_are_texts_for_pyarrow(files):
    """As Polars writes categories."""
    ds = forebay.open("values/all.arrow", url=files.url, columns=["categories", "date32"])
    truth = TYPES["categories"].to_pylist()
    assert [row["categories"] for row in ds.filter(forebay.col("categories") == "a")] == ["a"]
    assert ds.filter(forebay.col("categories").is_null())[0]["categories"] is None
    assert [row["categories"] for row in ds.cast({"categories": "string"})] == truth
    first = next(iter(ds.to_hf_iterable().select_columns("categories")))
    assert first == {"categories": truth[0]}
    assert ds.to_hf()["categories"][:] == truth
    written = ds.write("values/written/", format="parquet", order=forebay.Full(), seed=1)
    again = forebay.open(written.source, client=ds.client)
    assert sorted(map(str, again[:].take([0, 1, 2]).arrow()["categories"].to_pylist())) == sorted(
        map(str, truth)
    )


def test_views_of_several_datasets_become_rows_of_datasets(files):
    names = ["view", "list_of_views"]
    both = [
        forebay.open(f"values/{name}.arrow", url=files.url, columns=names)
        for name in ("all", "again")
    ]
    mixed = forebay.mix(both, [1, 1]).to_hf_iterable()
    truth = [
        dict(zip(names, row, strict=True))
        for row in zip(*(TYPES[n].to_pylist() for n in names), strict=True)
    ]
    assert sorted(map(str, mixed)) == sorted(map(str, truth * 2))


def test_rows_of_views_bring_their_own_texts_alone(tmp_path):
    """Slices would bring the buffers of the whole column, for each row."""
    texts = [f"{i:04}" * 250 for i in range(500)]
    table = pa.table(
        {
            "view": pa.array(texts, string_view()),
            "of": pa.array([{"views": [text.encode()]} for text in texts]).cast(
                pa.struct([("views", pa.list_(binary_view()))])
            ),
        }
    )
    (tmp_path / "views").mkdir()
    with pa.ipc.new_file(tmp_path / "views" / "a.arrow", table.schema) as file:
        file.write_table(table)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'views'}"])
    try:
        rows = forebay.open("views/a.arrow", url=node.url).take(range(500))[::-2]
        made = rows.arrow()
        assert made["view"].to_pylist() == texts[::-2] and made.schema.types == table.schema.types
        assert made["of"].to_pylist() == [{"views": [text.encode()]} for text in texts[::-2]]
        assert len(made.serialize()) < 2 * made.nbytes < 2 * table.nbytes
    finally:
        node.stop()


def test_lists_of_a_fixed_size_in_such_lists_are_axes(files):
    ds = forebay.open("values/all.arrow", url=files.url, columns=["fixed_lists"])
    whole = ds.take([2, 2])
    assert whole.numpy()["fixed_lists"].shape == (2, 3, 2)
    assert whole.numpy()["fixed_lists"][0, 1].tolist() == [9, None]
    missing = ds.take([1, 0]).numpy()["fixed_lists"]
    assert missing.mask.any(axis=(1, 2)).tolist() == [True, False] and missing[0].mask.all()


def test_what_cannot_be_cast_is_told_by_its_column(files):
    ds = forebay.open("values/all.arrow", url=files.url, columns=["map"])
    with pytest.raises(forebay.InvalidRequest, match="column 'map' of .* cannot be cast from map"):
        ds.cast({"map": pa.list_(pa.string())})[0]


def test_what_python_cannot_hold_is_numpys(files):
    rows = forebay.open("values/odd.arrow", url=files.url)[:]
    assert rows[0]["t"] == np.datetime64(NS + 1, "ns") and rows[0]["far"] == np.datetime64(
        10**13, "s"
    )
    assert isinstance(rows[1]["t"], dt.datetime) and rows[1]["far"] == dt.datetime(1970, 1, 1)


def test_missing_items_of_lists_are_no_data(files):
    ds = forebay.open("values/lists.parquet", url=files.url)
    assert ds[0]["x"].tolist() == [1, None, 3]
    with pytest.raises(TypeError, match="'x'.*missing items"):
        ds.take(range(len(ds))).torch()
    with pytest.raises(TypeError, match="'x'.*missing items"):
        next(iter(ds.loader(2, output="torch")))
    for threads in (0, 2):
        with pytest.raises(TypeError, match="'x' of a sample has missing items"):
            next(iter(ds.loader(2, output="torch", decode=dict, threads=threads)))
    batch = next(iter(ds.loader(2, output="numpy", decode=dict)))
    assert batch["x"].tolist() == [[1, None, 3], [4, 5, 6]]
    fine = next(iter(ds.loader(2, output="torch", decode=dict, columns=["id", "y"])))
    assert torch.equal(fine["y"], torch.tensor([[1, 2], [3, 4]]))
    dali = pytest.importorskip("forebay.dali")
    with pytest.raises(TypeError, match="'x'.*missing items"):
        dali.batch_of(ds.take(range(len(ds))), ["x"])


def test_lists_without_missing_items_are_plain_arrays_beside_others():
    """What a list is does not depend on which rows came with it."""
    batch = pa.RecordBatch.from_pydict(
        {
            "lists": pa.array([[1, 2], [3, None], None, []], pa.list_(pa.int64())),
            "large": pa.array([[1, 2], [3, None], None, []], pa.large_list(pa.int64())),
            "views": pa.array([[1, 2], [3, None], None, []], list_view(pa.int64())),
            "fixed": pa.array([[1, 2], [3, None], None, [4, 5]], pa.list_(pa.int64(), 2)),
            "within": pa.array(
                [[[1], [2]], [[3], [None]], None, []], pa.list_(pa.list_(pa.int8()))
            ),
        }
    )
    rows = forebay.Rows([batch], np.arange(4, dtype=np.uint64))
    for name in batch.schema.names:
        assert plain([row[name] for row in rows]) == batch[name].to_pylist()
        assert [type(row[name]) for row in rows][:1] == [np.ndarray]
        assert type(rows[3][name]) is np.ndarray
        assert np.ma.is_masked(rows[1][name]) or name == "within"
    assert [type(part) for part in rows[1]["within"]] == [np.ndarray, np.ma.MaskedArray]


def test_codes_below_missing_structs_are_none():
    """Below a struct that is missing, a code may be anything."""
    for values, codes in ((["a"], [0, 7]), ([], [0, 0])):
        texts = pa.DictionaryArray.from_arrays(
            pa.array(codes, pa.int8()), pa.array(values, pa.string()), safe=False
        )
        missing = pa.array([not values, True])
        of = pa.StructArray.from_arrays([texts], names=["text"], mask=missing)
        rows = forebay.Rows([pa.RecordBatch.from_pydict({"of": of})], np.arange(2, dtype=np.uint64))
        assert [row["of"] for row in rows] == ([{"text": "a"}, None] if values else [None, None])


def mixed(one: pa.Array, other: pa.Array) -> forebay.Rows:
    """A row of each, and then the rest."""
    parts = {0: pa.RecordBatch.from_pydict({"x": one}), 1: pa.RecordBatch.from_pydict({"x": other})}
    sources = np.array([0] * len(one) + [1] * len(other), np.uint32)
    return forebay.Rows.gathered(parts, np.arange(len(sources), dtype=np.uint64), sources)


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        (pa.array([1, -(1 << 53)]), pa.array([2.5]), None),
        (pa.array([1, None]), pa.array([1 << 40], pa.uint64()), None),
        (pa.array([True]), pa.array([1 << 60]), None),
        (pa.array([1 << 60, -(1 << 63)]), pa.array([2.5]), None),
        (pa.array([1 << 63], pa.uint64()), pa.array([-1]), None),
        (pa.array([1 << 30, 1], pa.timestamp("s")), pa.array([2], pa.timestamp("ms")), None),
        (
            pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
            pa.array([[0.5, 1]], pa.list_(pa.float64(), 2)),
            None,
        ),
        (pa.array([1, (1 << 53) + 1]), pa.array([2.5]), "9007199254740993, which float64"),
        (pa.array([(1 << 63) - 1]), pa.array([(1 << 64) - 1], pa.uint64()), "9223372036854775807"),
        (pa.array([-1, None]), pa.array([None, (1 << 63) + 1], pa.uint64()), "9223372036854775809"),
        (pa.array([1 << 40], pa.timestamp("s")), pa.array([2], pa.timestamp("ns")), "36812-02-20"),
        (pa.array([1], pa.timestamp("s")), pa.array([2]), "datetime64.s. in one .* and int64 in"),
        (pa.array([1]), pa.array([2], pa.duration("s")), "int64 in one .* and timedelta64.s. in"),
        (
            pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
            pa.array([[1, 2, 3]], pa.list_(pa.int64(), 3)),
            r"int64 of shape \(2,\) in one .* and int64 of shape \(3,\) in",
        ),
        (
            pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
            pa.array([[1]], pa.list_(pa.int64())),
            r"int64 of shape \(2,\) in one .* and object of shape \(\) in",
        ),
    ],
)
def test_one_array_for_several_datasets_has_their_values_or_is_none(one, other, wrong):
    rows = mixed(one, other)
    if wrong is not None:
        with pytest.raises(TypeError, match=f"'x'.*{wrong}.*cast"):
            rows.numpy()
        with pytest.raises(TypeError, match=f"'x'.*{wrong}.*cast"):
            rows.torch()
        return
    truth = one.to_pylist() + other.to_pylist()
    assert [plain(row["x"]) for row in rows] == [plain(v) for v in truth]
    assert plain(rows.numpy()["x"]) == [plain(v) for v in truth]


def test_missing_structs_need_no_values_in_a_dictionary(tmp_path):
    coded = pa.dictionary(pa.int8(), pa.string())
    kinds = {"struct": pa.struct([("d", coded), ("n", pa.int8())]), "top": coded}
    kinds["list"] = pa.list_(kinds["struct"], 2)
    values = {"struct": {"d": "a", "n": 1}, "top": "a"}
    values["list"] = [values["struct"], None]
    (tmp_path / "bk").mkdir()
    for name, kind in kinds.items():
        none = pa.RecordBatch.from_pydict({"x": pa.array([None, None], kind)})
        some = pa.RecordBatch.from_pydict({"x": pa.array([None, values[name]], kind)})
        with pa.ipc.new_file(tmp_path / f"bk/{name}.arrow", none.schema) as file:
            file.write_batch(none)
        with pa.ipc.new_stream(tmp_path / f"bk/{name}.arrows", none.schema) as stream:
            stream.write_batch(none)
            stream.write_batch(some)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bk'}"])
    try:
        for name in kinds:
            for end, rows in (("arrow", [None] * 2), ("arrows", [None] * 3 + [values[name]])):
                ds = forebay.open(f"bk/{name}.{end}", url=node.url)
                got = ds.take(range(len(ds)))
                assert got.arrow().column("x").to_pylist() == rows
                assert len(ds.filter(forebay.col("x").is_null())) == rows.count(None)
                assert [plain(row["x"]) for row in got][: len(rows) - 1] == [None] * (len(rows) - 1)
    finally:
        node.stop()


def test_dictionaries_that_parquet_gives_as_values(tmp_path):
    """Pandas' categories of such values are written so."""
    values = {
        "bool": pa.array([True, False]),
        "half": pa.array(np.array([1.5, -2], np.float16)),
        "decimal": pa.array([Decimal("-12.345"), Decimal("0.001")], pa.decimal128(10, 3)),
        "long": pa.array([Decimal("1.5"), Decimal("2.5")], pa.decimal256(60, 1)),
    }
    (tmp_path / "bk").mkdir()
    tables = {}
    for name, of in values.items():
        coded = pa.DictionaryArray.from_arrays(pa.array([1, None, 0, 1], pa.int8()), of)
        tables[name] = pa.table(
            {
                "x": coded,
                "list": pa.ListArray.from_arrays(pa.array([0, 1, 1, 3, 4], pa.int32()), coded),
                "struct": pa.StructArray.from_arrays([coded], ["of"]),
                "text": pa.array(["a", "b", "a", None]).dictionary_encode(),
            }
        )
        pq.write_table(tables[name], tmp_path / f"bk/{name}.parquet", row_group_size=3)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bk'}"])
    try:
        for name, table in tables.items():
            ds = forebay.open(f"bk/{name}.parquet", url=node.url)
            got = ds.take([3, 0, 1, 2]).arrow()
            assert got.to_pylist() == table.take([3, 0, 1, 2]).to_pylist()
            assert got.schema.field("x").type == values[name].type
            assert pa.types.is_dictionary(got.schema.field("text").type)
            if name != "half":
                first = values[name][0].as_py()
                assert [row["text"] for row in ds.filter(forebay.col("x") == first)] == ["a"]
    finally:
        node.stop()
