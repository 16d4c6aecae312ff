"""Datasets as Python sees them: rows by number in every form, and what cannot be."""

from __future__ import annotations

import ctypes
import datetime
import gc
import io
import pathlib
import pickle
import subprocess
import sys

import fakes
import forebay
import forebay._arrow
import forebay._progress
import numpy as np
import pyarrow as pa
import pytest
import torch
from arrow_types import string_view
from forebay._arguments import source_names

ROWS = 30


@pytest.fixture
def node():
    ids = np.arange(ROWS)
    return fakes.Client(
        {
            "a": pa.table(
                {"id": ids, "data": [b"x" * i for i in ids], "text": [f"row {i}" for i in ids]}
            )
        }
    )


@pytest.fixture
def ds(node):
    return forebay.open("a", client=node)


def test_rows_by_number(ds):
    assert (
        len(ds) == ROWS
        and ds[7] == {"id": 7, "data": b"x" * 7, "text": "row 7"}
        and ds[-1]["id"] == ROWS - 1
        and ds[np.int64(3)]["id"] == 3
    )
    assert [r["id"] for r in ds[3:9:2]] == [3, 5, 7] and [r["id"] for r in ds[[5, 3, 3, -1]]] == [
        5,
        3,
        3,
        29,
    ]
    assert (
        [r["id"] for r in ds] == list(range(ROWS)) and len(ds[40:]) == 0 and len(ds.take([])) == 0
    )
    rows = ds.take(np.array([9, 1], np.uint32), columns=["text"])
    assert (
        list(rows) == [{"text": "row 9"}, {"text": "row 1"}]
        and rows.ids.tolist() == [9, 1]
        and rows.ids.dtype == np.uint64
    )
    assert ds.take(range(4)).numpy()["id"].tolist() == [0, 1, 2, 3]
    # Of several types of NumPy, which has none for both.
    assert [r["id"] for r in ds.take([np.uint64(4), -1, np.int8(2)])] == [4, ROWS - 1, 2]
    for wrong in ([ROWS], [-ROWS - 1], [0, 1 << 40], [1 << 64], [1, -(1 << 70)]):
        with pytest.raises(IndexError, match="does not exist"):
            ds.take(wrong)
    for wrong in ([1.5], ["a"], [[1]], [True], [np.uint64(4), 1.5], [None], [1 << 64, None]):
        with pytest.raises(TypeError):
            ds.take(wrong)
    with pytest.raises(IndexError):
        ds[ROWS]
    with pytest.raises(IndexError):
        ds[1 << 64]
    with pytest.raises(TypeError, match=r"not bool of shape .*: select\(mask\)"):
        ds[np.arange(ROWS) % 2 == 0]
    for wrong in ([0, 1], 1.0, None, np.array([0, 1])):
        with pytest.raises(TypeError, match="is not a row number"):
            rows[wrong]


def test_what_a_dataset_says_of_itself(ds):
    assert (
        ds.columns == ["id", "data", "text"]
        and ds.schema["id"] == "Int64"
        and ds.version == ds.id == "a-v1"
        and ds.format == "parquet"
    )
    for part in ("30 rows in 3 blocks", "parquet", "a-v1", "text: Utf8", " kB, "):
        assert part in repr(ds)
    assert (
        [f.rows for f in ds.files] == [15, 15]
        and ds.locate(15) == forebay.dataset.Place("b/a-v1-1", 0)
        and ds.locate(14).row_in_file == 14
    )
    with pytest.raises(IndexError):
        ds.locate(ROWS)
    assert "columns id, data, text" in repr(ds.take([0, 1])) and "2 rows" in repr(ds.take([0, 1]))


def test_what_fails_in_decode_is_told_with_its_row(node):
    def decode(row):
        if row["id"] == 16:
            raise KeyError("label")
        return row["id"]

    ds = forebay.open("a", client=node, decode=decode)
    for read, row in (
        (lambda: ds[16], 16),
        (lambda: list(ds), 16),
        (lambda: ds.__getitems__([3, 16]), 16),
        (lambda: list(ds.skip(10)), 6),
        (lambda: ds.map(lambda x: 1 // (x - 9))[9], 9),
    ):
        with pytest.raises((KeyError, ZeroDivisionError)) as caught:
            read()
        place = ds.locate(9 if row == 9 else 16)
        assert caught.value.__notes__ == [f"{place} (row {row} of the dataset)"]
    assert str(ds.locate(16)) == "row 1 of b/a-v1-1"


def test_columns_are_chosen(ds, node):
    narrow = forebay.open("a", client=node, columns=["text"])
    assert (
        narrow.columns == ["text"]
        and narrow[1] == {"text": "row 1"}
        and ds.select(["id"])[2] == {"id": 2}
    )
    for wrong in (["nope"], []):
        with pytest.raises(forebay.InvalidRequest, match="column"):
            ds.select(wrong)
    with pytest.raises(forebay.InvalidRequest, match="id, data, text"):
        ds.take([1], columns=["Text"])
    for wrong in (5, [5], [["id"]]):
        with pytest.raises(TypeError, match="columns must be a list of names"):
            ds.take([1], columns=wrong)


def test_columns_are_given_by_name_list_or_generator(ds, node):
    for given in (lambda: "text", lambda: ("text",), lambda: (n for n in ["text"])):
        assert forebay.open("a", client=node, columns=given())[1] == {"text": "row 1"}
        assert ds.take([1], columns=given())[0] == {"text": "row 1"}
        assert ds.select_columns(given()).columns == ["text"]
        mixed = forebay.mix([ds, ds])
        assert [d.columns for d in mixed.select_columns(given()).datasets] == [["text"]] * 2
        assert [d.columns for d in mixed.loader(2, columns=given()).datasets] == [["text"]] * 2


def test_many_rows_are_several_requests(node, monkeypatch):
    monkeypatch.setattr(forebay.dataset, "REQUEST_ROWS", 7)
    ds = forebay.open("a", client=node)
    wanted = list(np.random.default_rng(1).integers(0, ROWS, 50))
    rows = ds.take(wanted)
    assert (
        node.requests == 8
        and [r["id"] for r in rows] == wanted
        and rows.numpy()["text"].tolist() == [f"row {i}" for i in wanted]
    )
    assert (
        pa.record_batch(rows).column("id").to_pylist() == wanted
        and [r["id"] for r in rows[10:20:3]] == wanted[10:20:3]
    )
    assert ds.lengths("id").tolist() == list(range(ROWS)) and ds.lengths("id").dtype == np.uint64
    for column in ("text", "data"):
        with pytest.raises(TypeError, match=column):
            ds.lengths(column)


def test_a_dataset_travels_without_being_opened_again(ds, node):
    ds.block_shape
    again = pickle.loads(pickle.dumps(ds))
    again.client.open_dataset = again.client.dataset_shape = None
    assert again[3] == ds[3] and again.block_shape == ds.block_shape and len(again) == ROWS


class Forgetful(fakes.Client):
    """A restarted node, which may find other files."""

    known = True
    version = "v1"

    def open_dataset(self, spec, progress=None, job=None):
        self.known = True
        return super().open_dataset(spec).replace(b"a-v1", b"a-" + self.version.encode())

    def take(self, dataset, rows, columns, job=None):
        if not self.known:
            raise forebay.NotFound("no dataset a-v1")
        return super().take(dataset, rows, columns, job)


def test_a_node_that_forgot_is_told_again_and_another_version_is_an_error(node):
    client = Forgetful(node.tables)
    ds = forebay.open("a", client=client)
    client.known = False
    assert ds[3]["id"] == 3
    client.known, client.version = False, "v2"
    with pytest.raises(forebay.Changed, match="a-v2"):
        ds[3]

    def changed(*_):
        raise forebay.PreconditionFailed("b/f.parquet is not what it was", status=412)

    client.take = changed
    with pytest.raises(forebay.Changed, match="b/f.parquet"):
        ds[3]


def test_what_open_asks_for(node):
    asked = []

    class Asked(fakes.Client):
        def open_dataset(self, spec, progress=None, job=None):
            import json

            asked.append(json.loads(spec))
            return super().open_dataset(json.dumps({"sources": ["a"]}))

    client = Asked(node.tables)
    forebay.open(
        ["s3://b/x/**", "b/y"],
        client=client,
        format="objects",
        labels="path:2",
        block_rows=np.int64(5),
        on_damaged="skip",
    )
    forebay.open("b/x/", client=client, labels="s3://b/labels.csv")
    forebay.open("b/x.tfrecord", client=client, example=True, labels={"from": "path"})
    named = {"z": "string", "a": pa.list_(pa.float32())}
    forebay.open("b/x", client=client, schema=named)
    forebay.open("b/x", client=client, schema=pa.schema(list(named.items())[1:]))
    forebay.open({"b/y": 1, "b/x": 2}.keys(), client=client)
    for option, given, says in (
        ("schema", ["a"], "schema must be a dict"),
        ("schema", {"id": int}, "schema={'id': int}.*\"int64\""),
        ("labels", 5, "labels must be"),
        ("decode", "image", "decode must be a function"),
    ):
        with pytest.raises(TypeError, match=says):
            forebay.open("b/x", client=client, **{option: given})
    for option, given in (
        ("block_rows", -1),
        ("block_rows", True),
        ("block_rows", "5"),
        ("block_size", 0),
        ("block_size", 1 << 40),
        ("on_damaged", None),
        ("labels", {}),
    ):
        with pytest.raises(forebay.InvalidRequest, match=f"{option} is {given!r}"):
            forebay.open("b/x", client=client, **{option: given})
    assert asked == [
        {
            "sources": ["s3://b/x/**", "b/y"],
            "format": "objects",
            "labels": {"from": "path", "level": 2},
            "block_rows": 5,
            "on_damaged": "skip",
        },
        {"sources": ["b/x/"], "labels": {"from": "file", "name": "b/labels.csv"}},
        {"sources": ["b/x.tfrecord"], "example": True, "labels": {"from": "path"}},
        {"sources": ["b/x"], "schema": {"z": "string", "a": "list<item: float>"}},
        {"sources": ["b/x"], "schema": {"a": "list<item: float>"}},
        {"sources": ["b/y", "b/x"]},
    ]
    with pytest.raises(forebay.InvalidRequest):
        forebay.open("a", client=client, url="http://127.0.0.1:1")
    for wrong in ([], [1], None, 5, pathlib.Path("a"), {"a"}, frozenset("a")):
        for opens in (forebay.open, forebay.open_shards):
            with pytest.raises(TypeError, match="source must be a str or a list of str"):
                opens(wrong, client=client)
    for opens in (forebay.open, forebay.open_shards):
        # As os.fsdecode has the name of a file that is not UTF-8.
        with pytest.raises(forebay.InvalidRequest, match=r"'b/caf\\udce9/' is not Unicode"):
            opens(["b/y", "b/caf\udce9/"], client=client)
    for wrong, say in (
        (
            "hf://datasets/lab/x/*.parquet",
            "NAME=hf://datasets/lab/x/, and then open NAME/*.parquet",
        ),
        (
            "manifest:https://host/list.txt",
            "NAME=https://host/, and then open manifest:NAME/list.txt",
        ),
        ("/data/x/*.parquet", "NAME=/data/x/, and then open NAME/*.parquet"),
        ("../x.jsonl", "NAME=../, and then open NAME/x.jsonl"),
        ("/data/*/{a,b}/x.tar", "NAME=/data/, and then open NAME/*/{a,b}/x.tar"),
        ("file:///data/x-{0..3}/a.tar", "NAME=file:///data/, and then open NAME/x-{0..3}/a.tar"),
        ("manifest:/data/list", "NAME=/data/, and then open manifest:NAME/list"),
    ):
        for opens in (forebay.open, forebay.open_shards):
            with pytest.raises(forebay.InvalidRequest, match="at a node") as refused:
                opens(wrong, client=client)
            assert f"forebay serve --origin {say}" == refused.value.hint
    for wrong in ("b/x/*/", "s3://b/[ab]?/", "b/\\\\*/"):
        for opens in (forebay.open, forebay.open_shards):
            with pytest.raises(forebay.InvalidRequest, match="ends in / matches no object") as e:
                opens(["b/y", wrong], client=client)
            assert f"{wrong}**" in e.value.hint
    assert source_names(["b/{x,y}/", "b/\\[x]/"]) == ["b/{x,y}/", "b/\\[x]/"]
    for wrong in ("http://127.0.0.1:1", 5):
        with pytest.raises(TypeError, match=r"client must be a forebay\.Client"):
            forebay.open("a", client=wrong)


def every_type() -> pa.RecordBatch:
    when = datetime.datetime(2020, 1, 2, 3, 4, 5)
    return pa.RecordBatch.from_pydict(
        {
            "i": pa.array([1, 2, 3, 4], pa.int32()),
            "n": pa.array([1, None, 3, 4], pa.uint64()),
            "f": pa.array([1.5, 2, 3, 4], pa.float32()),
            "h": pa.array(np.array([1, 2, 3, 4], np.float16)),
            "b": pa.array([True, False, None, True]),
            "s": pa.array(["a", None, "ü", ""]),
            "S": pa.array(["a", None, "ü", ""], pa.large_string()),
            "z": pa.array([b"xx", b"", None, b"q"]),
            "Z": pa.array([b"xx", b"", None, b"q"], pa.large_binary()),
            "l": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int16())),
            "L": pa.array([["a"], ["b", "c"], None, []], pa.large_list(pa.string())),
            "w": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
            "d": pa.array(["p", "q", "p", None]).dictionary_encode(),
            "st": pa.array([{"a": i, "b": "x"} for i in range(4)]),
            "fb": pa.array([b"ab", b"cd", b"ef", None], pa.binary(2)),
            "t": pa.array([when] * 4, pa.timestamp("us")),
            "day": pa.array([when.date()] * 4),
            "none": pa.nulls(4),
        }
    )


def plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.mark.parametrize("cut", [(0, 4), (1, 2), (3, 0), (3, 1), (2, 2)])
def test_every_type_reads_as_pyarrow_reads_it(cut):
    batch = every_type().slice(*cut)
    rows = forebay.Rows([batch], np.arange(len(batch), dtype=np.uint64))
    assert [{k: plain(v) for k, v in row.items()} for row in rows] == batch.to_pylist()
    assert pa.record_batch(rows).equals(batch)
    assert [plain(v) for v in rows.numpy()["w"]] == batch.column("w").to_pylist() and rows.numpy()[
        "w"
    ].shape == (cut[1], 2)


def test_numbers_are_views_and_outlive_the_batch():
    batch = pa.RecordBatch.from_pydict(
        {"x": np.arange(100_000), "z": [b"%d" % i for i in range(100_000)]}
    )
    address = batch.column("x").buffers()[1].address
    rows = forebay.Rows([batch], np.arange(100_000, dtype=np.uint64))
    x, z = rows.numpy()["x"], rows.numpy()["z"][777]
    assert x.ctypes.data == address and rows.torch()["x"].data_ptr() == address
    del batch, rows
    gc.collect()
    np.zeros(100_000)
    assert (x == np.arange(100_000)).all() and z == b"777"


def test_tensors():
    rows = forebay.Rows(
        [every_type().select(["i", "w", "z", "l", "s"])], np.arange(4, dtype=np.uint64)
    )
    tensors = rows.torch()
    assert torch.equal(tensors["i"], torch.tensor([1, 2, 3, 4], dtype=torch.int32)) and tensors[
        "w"
    ].shape == (4, 2)
    assert (
        tensors["z"][0].tolist() == [120, 120]
        and tensors["z"][1].shape == (0,)
        and tensors["z"][2] is None
    )
    assert tensors["l"][0].dtype == torch.int16 and tensors["s"] == ["a", None, "ü", ""]
    for name in ("n", "t"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            forebay.Rows([every_type().select([name])], np.arange(4, dtype=np.uint64)).torch()
    with pytest.raises(TypeError):
        forebay._arrow.columns(pa.array([1]))


def unusual_types() -> pa.Table:
    """Forty rows of types that few other formats have."""
    n = 40
    types = pa.array([i % 2 for i in range(n)], pa.int8())
    halves = pa.array([i // 2 for i in range(n)], pa.int32())
    numbers = pa.array([None if i % 7 == 0 else i for i in range(n)])
    texts = pa.array([f"text {i}" for i in range(n)])
    lengths = [None if i % 5 == 0 else (i, -2 * i, 3 * i) for i in range(n)]
    intervals = pa.array(lengths, pa.month_day_nano_interval())
    days = pa.array([datetime.datetime(2024, 1, i + 1, tzinfo=datetime.UTC) for i in range(3)])
    return pa.table(
        {
            "x": range(n),
            "interval": intervals,
            "dense": pa.UnionArray.from_dense(types, halves, [numbers, texts], ["n", "t"]),
            "sparse": pa.UnionArray.from_sparse(types, [numbers, texts], ["n", "t"]),
            "runs": pa.RunEndEncodedArray.from_arrays(
                pa.array([10, 25, n], pa.int32()), pa.array(["a", None, "c"])
            ),
            "days": pa.RunEndEncodedArray.from_arrays(pa.array([5, 30, n], pa.int16()), days),
            "inside": pa.StructArray.from_arrays([intervals, texts], ["interval", "text"]),
        }
    )


def test_unions_runs_and_intervals_are_read(tmp_path):
    table = unusual_types()
    (tmp_path / "odd").mkdir()
    with (
        pa.OSFile(str(tmp_path / "odd" / "x.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        for begin in (0, 20):
            columns = [column.chunk(0).slice(begin, 20) for column in table.columns]
            writer.write_batch(pa.record_batch(columns, schema=table.schema))
    client = forebay.Client(origin=f"file://{tmp_path}/*", cache=f"{tmp_path / 'cache'}:1GiB")
    ds = forebay.open("odd/x.arrow", client=client)
    expected = table.to_pylist()
    for ids in (range(40), [30, 3, 3, 12], [21], range(5, 9)):
        rows = ds.take(ids)
        assert pa.record_batch(rows).to_pylist() == [expected[i] for i in ids]
        assert list(rows) == [expected[i] for i in ids]
    assert list(ds.take(range(40))[7:33]) == expected[7:33]
    assert ds[3]["interval"].months == 3 and ds[3]["interval"].nanoseconds == 9
    batches = list(ds.loader(16, output="numpy", uneven="pad"))
    got = [value for batch in batches for value in batch["sparse"].tolist()][:40]
    assert got == [row["sparse"] for row in expected]


def test_intervals_of_every_unit():
    """PyArrow makes one of the three kinds; the others are written as Arrow lays them out."""

    for form, values, expected in (
        ("tiM", np.array([3, -1], "i4"), [(3, 0, 0), (-1, 0, 0)]),
        ("tiD", np.array([1, 2, -3, 4], "i4"), [(0, 1, 2_000_000), (0, -3, 4_000_000)]),
    ):
        schema, array = forebay._arrow._Schema(), forebay._arrow._Array()
        schema.name, schema.format = b"v", form.encode()
        buffers = (ctypes.c_void_p * 2)(None, values.ctypes.data)
        array.length, array.n_buffers = 2, 2
        array.buffers = ctypes.cast(buffers, ctypes.POINTER(ctypes.c_void_p))
        assert forebay._arrow.Column(schema, array, values).values() == expected


def test_rows_of_different_datasets():
    a, b = (
        pa.RecordBatch.from_pydict({"x": [1, 2], "only": ["p", "q"]}),
        pa.RecordBatch.from_pydict({"x": [10]}),
    )
    rows = forebay.Rows.gathered(
        {0: a, 1: b}, np.array([1, 0, 0], np.uint64), np.array([0, 1, 0], np.uint32)
    )
    assert list(rows) == [
        {"x": 1, "only": "p"},
        {"x": 10},
        {"x": 2, "only": "q"},
    ] and rows.columns == ["x", "only"]
    with pytest.raises(TypeError, match="only"):
        rows.numpy()
    with pytest.raises(TypeError, match="columns="):
        pa.record_batch(rows)
    again = pickle.loads(pickle.dumps(rows))
    assert list(again) == list(rows) and again.sources.tolist() == [0, 1, 0]


def test_a_part_of_rows_is_sent_alone():
    large = pa.RecordBatch.from_pydict(
        {"x": range(1000), "data": [b"%d" % i * 1000 for i in range(1000)]}
    )
    views = pa.RecordBatch.from_pydict(
        {"x": [1, 2], "view": pa.array(["a", "b" * 20], string_view())}
    )
    rows = forebay.Rows([large], np.arange(1000, dtype=np.uint64))
    few = rows[1:900:300]
    sent = pickle.dumps(few)
    assert len(sent) < 20_000 < large.nbytes
    again = pickle.loads(sent)
    assert [row["x"] for row in again] == [1, 301, 601] and again.ids.tolist() == [1, 301, 601]
    assert list(pickle.loads(pickle.dumps(rows[::-1]))) == list(rows[::-1])
    both = forebay.Rows.gathered(
        {0: large, 1: views}, np.arange(1002, dtype=np.uint64), np.array([0] * 1000 + [1] * 2)
    )
    for part in (both[5:3:-1], both[999:], both[1001:1002], both[:0], both[::-1][:7][2:5]):
        again = pickle.loads(pickle.dumps(part))
        assert list(again) == list(part) and again.columns == part.columns
        assert again.sources.tolist() == part.sources.tolist()
    # Nor of a dataset that has no row in the part.
    for part in (both[1001:1002], both[:0], both[999:]):
        assert len(pickle.dumps(part)) < 20_000


def test_the_client_alone_needs_no_numpy():
    program = (
        "import sys; sys.modules['numpy'] = None; import forebay;"
        " forebay.Client('http://127.0.0.1:1'); assert 'open' in dir(forebay)\ntry:"
        " forebay.open\nexcept ImportError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install numpy" in done.stdout
    with pytest.raises(AttributeError):
        forebay.nothing


@pytest.mark.parametrize(
    ("module", "missing", "install"),
    [
        ("torch", "torch", "forebay.torch needs PyTorch: pip install torch"),
        ("torch", "numpy", "forebay.torch needs NumPy: pip install numpy"),
        ("jax", "jax", "forebay.jax needs JAX: pip install jax"),
        ("fsspec", "fsspec", "forebay.fsspec needs fsspec: pip install fsspec"),
        ("ray", "numpy", "forebay.ray needs NumPy: pip install numpy"),
        ("dali", "numpy", "forebay.dali needs NumPy: pip install numpy"),
        ("energy", "numpy", "forebay.energy needs NumPy: pip install numpy"),
        ("checkpoint", "numpy", "forebay.checkpoint needs NumPy: pip install numpy"),
        ("checkpoint._formats", "torch", "forebay.checkpoint needs PyTorch: pip install torch"),
        ("checkpoint._dcp", "torch", "forebay.checkpoint needs PyTorch: pip install torch"),
    ],
)
def test_a_module_says_which_package_it_needs(module, missing, install):
    script = f"""
import sys

class Missing:
    def find_spec(name, *args):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
import forebay.{module}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"ModuleNotFoundError: {install}\n" in done.stderr


@pytest.mark.parametrize("show", [None, True])
def test_a_bar_needs_no_terminal(monkeypatch, show):
    """A daemon has no standard error, and programs put objects in its place that only write."""
    written = []

    class Writer:
        def write(self, text):
            written.append(text)

        def flush(self):
            pass

    closed = io.StringIO()
    closed.close()
    for there in (None, Writer()) if show else (None, Writer(), closed):
        monkeypatch.setattr(sys, "stderr", there)
        with forebay._progress.Bar("reading", 2000, show=show) as bar:
            bar.advance(2000)
    assert bool(written) is bool(show)


def test_the_bar_says_how_far_it_is():
    out = io.StringIO()
    with forebay._progress.Bar("reading", 2000, show=True, file=out) as bar:
        bar.advance(500)
        assert "25%" in bar.line() and "500/2,000 rows" in bar.line() and "left" in bar.line()
        bar.advance(1500)
    assert out.getvalue().endswith("\n") and "reading" in out.getvalue()
    silent = io.StringIO()
    with forebay._progress.Bar("reading", 2000, file=silent) as bar:
        bar.advance(2000)
    assert silent.getvalue() == ""
    assert forebay._progress.clock(3725) == "1:02:05" and forebay._progress.clock(59.4) == "0:59"
