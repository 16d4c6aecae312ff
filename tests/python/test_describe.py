"""`ds.describe()`: what statistics of Parquet say of all rows, against all rows, and when they are
not believed.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forebay import _footers, _look
from servers import Node

ROWS, FILES, GROUP = 1200, 3, 50
#: Rows that are looked at: so few that they have neither the least nor the greatest value.
LOOKED = 12
#: Columns of which statistics say both ends, and those of which they say how many are missing.
BOUNDED = ["n", "small", "above", "short", "x", "flag", "price", "day", "when", "code"]
COUNTED = [*BOUNDED, "odd", "nowhere", "nan", "text", "blob", "dictionary", "none", "id"]
COUNTED += ["half", "span"]


def table() -> pa.Table:
    rng = np.random.default_rng(11)

    def some(values, kind=None, each=7):
        """With missing values among them, at rows that are not looked at."""
        holes = [None if i % each == 3 and i % 100 else v for i, v in enumerate(values)]
        return pa.array(holes, kind)

    numbers = rng.permutation(ROWS).tolist()
    floats = [float(v) for v in rng.normal(size=ROWS)]
    floats = [float("nan") if i % 11 == 5 else v for i, v in enumerate(floats)]
    begin = datetime(2024, 1, 1, tzinfo=UTC)
    return pa.table(
        {
            "id": pa.array(range(ROWS), pa.int64()),
            "n": some([v - 600 for v in numbers], pa.int32()),
            "small": some(rng.integers(3, 250, ROWS).tolist(), pa.uint8()),
            "above": some([(1 << 63) + v for v in numbers], pa.uint64()),
            "short": some(rng.normal(size=ROWS).astype(np.float32), pa.float32()),
            "x": some(floats),
            # The least is a zero, of either sign.
            "zero": pa.array([-0.0 if i % 2 else 0.0 for i in range(ROWS)]),
            "flag": some([i % 97 != 1 for i in range(ROWS)]),
            "price": some([Decimal(v - 600) / 4 for v in numbers], pa.decimal128(12, 2)),
            "day": some([date(2020, 1, 1) + timedelta(v) for v in numbers]),
            "when": some([begin + timedelta(hours=v) for v in numbers], pa.timestamp("us", "UTC")),
            "code": some([f"k{v:05}" for v in numbers]),
            # Nanoseconds that are not whole microseconds.
            "odd": some([10**18 + v for v in numbers], pa.timestamp("ns")),
            "nowhere": pa.array([None] * ROWS, pa.int16()),
            "nan": pa.array([float("nan")] * ROWS),
            "text": some([f"{v:05} and more than a writer has to keep" for v in numbers]),
            "blob": some([b"%d" % v for v in numbers]),
            "dictionary": some([f"d{v % 9}" for v in numbers]).dictionary_encode(),
            "half": some(rng.normal(size=ROWS).astype(np.float16), pa.float16()),
            "span": some(numbers, pa.duration("s")),
            "none": pa.array(["x"] * ROWS),
            "list": some([[v] * (v % 4) for v in numbers], pa.list_(pa.int32())),
            "struct": some([{"n": v} for v in numbers]),
        },
    )


@pytest.fixture(scope="module")
def whole():
    return table()


@pytest.fixture(scope="module")
def node(tmp_path_factory, whole):
    """A node over `bk`: `all` has statistics in each file, `some` not in the one in the middle."""
    root = tmp_path_factory.mktemp("describe")
    each = ROWS // FILES
    for folder in ("all", "some", "few"):
        (root / "bk" / folder).mkdir(parents=True)
        for i in range(FILES):
            kept = {"all": True, "some": i != 1, "few": ["n"] if i == 1 else True}[folder]
            path = root / "bk" / folder / f"{i}.parquet"
            part = whole[i * each :][:each]
            pq.write_table(part, path, row_group_size=GROUP, write_statistics=kept)
    # The same column in several types, or not there.
    (root / "bk" / "types").mkdir()
    for i, kind in enumerate((pa.int32(), pa.int64(), pa.float32())):
        values = pa.array([i * 10.0 - 3, None, *range(100)]).cast(pa.float64()).cast(kind)
        columns = {"n": values} if i else {"n": values, "also": values}
        pq.write_table(pa.table(columns), root / "bk" / "types" / f"{i}.parquet")
    (root / "bk" / "required").mkdir()
    required = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    pq.write_table(
        pa.table({"n": range(100)}, schema=required),
        root / "bk" / "required" / "0.parquet",
        write_statistics=False,
    )
    server = Node("", [], root / "node", options=["--origin", f"file://{root / 'bk'}"])
    yield server
    server.stop()


@pytest.fixture
def ds(node):
    return forebay.open("bk/all/", url=node.url)


def ends(values):
    """The least and the greatest value, as a description has them."""
    there = [v for v in values if v is not None and v == v]
    if not there:
        return None, None
    low, high = min(there), max(there)
    return (int(low), int(high)) if isinstance(low, bool) else (low, high)


def check_all(column, values, name, figures=("nulls", "low", "high")):
    values = list(values)
    assert column.of_all == figures, name
    if "nulls" in figures:
        assert column.nulls == sum(v is None for v in values), name
    if "low" in figures:
        assert (column.low, column.high) == ends(values), name
        assert type(column.low) is type(ends(values)[0]) or name == "when"


def test_figures_of_all_rows_are_exact(ds, whole):
    summary = ds.describe(rows=LOOKED)
    assert (summary.rows, summary.seen) == (ROWS, LOOKED)
    rows = {name: whole[name].to_pylist() for name in whole.column_names if name != "odd"}
    rows["odd"] = whole["odd"].cast(pa.int64()).to_pylist()
    for name, column in summary.columns.items():
        if name in BOUNDED or name in ("id", "none"):
            check_all(column, rows[name], name)
        elif name in COUNTED:
            check_all(column, rows[name], name, ("nulls",))
        elif name == "zero":
            assert column.of_all == ("nulls", "low", "high")
            assert math.copysign(1, column.low) == 1 and (column.low, column.high) == (0, 0)
        else:
            assert name in ("list", "struct") and column.of_all == (), name
    # The others are of the rows that were looked at, and these have not the same figures.
    looked = whole.take([i * ROWS // LOOKED for i in range(LOOKED)])
    n = summary.columns["n"]
    assert n.rows == LOOKED and n.mean == pytest.approx(np.mean(looked["n"].to_pylist()))
    assert ends(looked["n"].to_pylist()) != (n.low, n.high) and n.nulls > LOOKED
    text, span = summary.columns["text"], summary.columns["span"]
    assert text.low == min(looked["text"].to_pylist()) and text.lengths[0] == 40
    assert (span.low, span.high) == (None, None)
    assert summary.columns["nan"].nans == LOOKED and summary.columns["nan"].low is None


def test_the_ends_of_whole_numbers_are_shown_digit_by_digit():
    assert _look._end(1_234_567) == "1234567" and _look._end(2**64 - 1) == "18446744073709551615"
    assert _look._end(True) == "1" and _look._end(1234567.0) == "1.23457e+06"


def test_it_says_which_figures_are_of_all_rows(ds, whole):
    summary = ds.select_columns(["n", "list", "code"]).describe(rows=LOOKED)
    text = repr(summary)
    head, _, n, lists, code = text.splitlines()
    assert head.endswith("12 of 1,200 rows, spread evenly; * of all rows, by statistics")
    low, high = ends(whole["n"].to_pylist())
    share = whole["n"].null_count / ROWS
    assert f"{share:.1%}*  {low} to {high}*, mean " in n, n
    assert "*" not in lists and f"{ends(whole['code'].to_pylist())[0]!r} to 'k" in code
    assert "*, mean" in summary._repr_html_() and "; * of all rows" in summary._repr_html_()
    told = json.loads(json.dumps(summary.json()))["columns"]
    assert told["n"]["of_all"] == ["nulls", "low", "high"] and told["n"]["rows"] == LOOKED
    assert told["list"]["of_all"] == [] and told["code"]["low"].startswith("k0")
    # Of all rows, everything is of all rows, and nothing has to be marked.
    complete = ds.select_columns(["n", "list", "when", "odd", "text"]).describe(rows=ROWS)
    assert all(c.of_all == _look.FIGURES for c in complete.columns.values())
    assert "*" not in repr(complete) and complete.columns["n"].low == low
    assert (complete.columns["when"].low, complete.columns["when"].high) == ends(
        whole["when"].to_pylist()
    )
    assert complete.columns["odd"].low is None
    assert complete.columns["text"].high == max(filter(None, whole["text"].to_pylist()))


def test_few_that_are_missing_are_not_none():
    column = _look.Column("Int64", rows=10, nulls=1, of_all=("nulls",))
    assert " 1*" in repr(_look.Summary("x", 1_000_000, 10, {"n": column}))
    column = _look.Column("Int64", rows=10, nulls=500_000, of_all=("nulls",))
    assert " 50.0%*" in repr(_look.Summary("x", 1_000_000, 10, {"n": column}))


def test_a_file_without_statistics_makes_figures_those_of_the_sample(node, whole):
    some = forebay.open("bk/some/", url=node.url).describe(rows=LOOKED)
    assert not any(column.of_all for column in some.columns.values())
    assert "*" not in repr(some) and some.columns["n"].rows == LOOKED
    looked = whole.take([i * ROWS // LOOKED for i in range(LOOKED)])["n"].to_pylist()
    assert (some.columns["n"].low, some.columns["n"].high) == ends(looked)
    few = forebay.open("bk/few/", url=node.url).describe(rows=LOOKED)
    assert [name for name, c in few.columns.items() if c.of_all] == ["n"]
    check_all(few.columns["n"], whole["n"].to_pylist(), "n")
    # That no value may be missing, the schema says.
    required = forebay.open("bk/required/", url=node.url).describe(rows=2)
    assert required.columns["n"].of_all == ("nulls",) and required.columns["n"].nulls == 0


def test_renamed_and_cast_columns(ds, whole):
    made = ds.rename({"n": "small", "small": "n"}).cast({"price": "float64", "x": "float"})
    summary = made.describe(rows=LOOKED)
    check_all(summary.columns["small"], whole["n"].to_pylist(), "n")
    check_all(summary.columns["n"], whole["small"].to_pylist(), "small")
    looked = whole.take([i * ROWS // LOOKED for i in range(LOOKED)])
    price = summary.columns["price"]
    assert price.of_all == () == summary.columns["x"].of_all
    assert (price.low, price.high) == ends(map(float, looked["price"].to_pylist()))


def test_files_with_other_types_and_without_a_column(node):
    ds = forebay.open("bk/types/*.parquet", url=node.url, schema={"n": "double", "also": "int64"})
    summary = ds.describe(rows=3)
    n, also = summary.columns["n"], summary.columns["also"]
    assert (n.type, n.low, n.high, n.nulls) == ("Float64", -3.0, 99.0, 3)
    assert n.of_all == ("nulls", "low", "high") == also.of_all
    assert (also.low, also.high, also.nulls) == (-3, 99, 1 + 2 * 102)
    # Without a schema, of the type that holds the numbers of all files.
    wide = forebay.open([f"bk/types/{i}.parquet" for i in (1, 2)], url=node.url).describe(rows=3)
    assert (wide.columns["n"].type, wide.columns["n"].low) == ("Float64", 0.0)
    assert wide.columns["n"].of_all == ("nulls", "low", "high")


def test_compositions_that_have_all_rows(ds, whole):
    n = whole["n"].to_pylist()
    nulls = n.count(None)
    for made, times in (
        (forebay.concatenate([ds, ds]), 2),
        (ds.repeat(3), 3),
        (ds.select(range(ROWS - 1, -1, -1)), 1),
        (forebay.concatenate([ds.repeat(2), ds.rename({"n": "m"}).rename({"m": "n"})]), 3),
        (ds.filter(forebay.col("id") >= 0), 1),
        (ds.map(lambda row: 1), 1),
    ):
        column = made.describe(rows=LOOKED).columns["n"]
        assert column.of_all == ("nulls", "low", "high"), made.name
        assert (column.low, column.high, column.nulls) == (*ends(n), times * nulls), made.name
    for made in (
        ds.skip(1),
        ds.shard(2, 0),
        ds.filter(forebay.col("id") > 0),
        ds.select([0, 0, *range(2, ROWS)]),
        ds.train_test_split(0.5).train,
        forebay.concatenate([ds, ds.take(5)]),
        ds.select(range(0, ROWS, 2)).repeat(2),
    ):
        summary = made.describe(rows=LOOKED)
        assert not any(column.of_all for column in summary.columns.values()), made.name


def test_reading_footers_is_bounded(ds, monkeypatch):
    read = []
    remote = _footers._Remote

    class Counted(remote):
        def __init__(self, client, file):
            read.append(file.name)
            super().__init__(client, file)

    monkeypatch.setattr(_footers, "_Remote", Counted)

    def told(made):
        del read[:]
        summary = made.describe(rows=LOOKED)
        return any(column.of_all for column in summary.columns.values())

    assert told(ds) and len(read) == FILES
    assert told(forebay.concatenate([ds, ds])) and len(read) == FILES
    assert not told(ds.skip(1)) and read == []
    ds.describe(rows=ROWS)
    assert read == [], "all rows were looked at"
    with monkeypatch.context() as patched:
        patched.setattr(_look, "DESCRIBED_FOOTERS", FILES - 1)
        assert not told(ds) and read == []
    with monkeypatch.context() as patched:
        patched.setattr(_look, "FOOTERS_BYTES", 1)
        patched.setattr(_footers, "REQUESTS", 1)
        assert not told(ds) and len(read) == 1
    # Footers that are longer than what is read at once are read further.
    with monkeypatch.context() as patched:
        patched.setattr(remote, "TAIL_BYTES", 100)
        assert told(ds)


def test_statistics_that_rows_contradict_are_not_believed(ds, monkeypatch, whole):
    bounds = _footers._bounds

    def wrong(**changes):
        def changed(chunk, column, rows):
            found = bounds(chunk, column, rows)
            is_it = column.name == "n" and found.low is not None
            return _footers.Bounds(**{**vars(found), **changes}) if is_it else found

        monkeypatch.setattr(_footers, "_bounds", changed)
        return ds.describe(rows=LOOKED).columns

    looked = whole.take([i * ROWS // LOOKED for i in range(LOOKED)])["n"].to_pylist()
    for changes in ({"low": 0, "high": 1}, {"high": 0}, {"low": 700}, {"low": None}, {"high": "a"}):
        columns = wrong(**changes)
        n = columns["n"]
        assert (n.low, n.high, n.of_all) == (*ends(looked), ("nulls",)), changes
        check_all(columns["small"], whole["small"].to_pylist(), "small")
    n = wrong(nulls=GROUP)["n"]
    assert n.nulls == 0 and n.of_all == (), "values were seen"
    n = wrong(nulls=None)["n"]
    assert n.nulls == 0 and n.of_all == ("low", "high")


def test_footers_of_another_version_say_nothing(ds):
    def nulls(groups):
        return [known["n"].nulls for _, known in groups]

    files = ds.files
    assert all(file.etag for file in files)
    told = _footers.look(ds, ["n"], nulls, files_max=FILES)
    assert [len(of_groups) for of_groups in told] == [ROWS // FILES // GROUP] * FILES
    ds._files = [files[0], replace(files[1], etag='"another"'), replace(files[2], rows=1)]
    assert _footers.look(ds, ["n"], nulls, files_max=FILES) == [told[0], None, None]
    assert ds.describe(rows=LOOKED).columns["n"].of_all == ()


def test_times_that_python_cannot_hold_are_texts_in_json():
    for value, text in (
        (np.datetime64(936689954259173818, "ns"), "1999-09-07T07:39:14.259173818"),
        (np.timedelta64(5, "ns"), "5 nanoseconds"),
        (np.int32(7), 7),
    ):
        assert _look.as_json(value) == text


@pytest.mark.filterwarnings("error::FutureWarning")
def test_missing_items_of_lists_are_shown_as_missing():
    for items in ([1, 2], [1.5, 2.5]):
        masked = np.ma.MaskedArray(items, [False, True])
        assert _look.told(masked) == f"{masked.dtype}, shape (2,): [{items[0]} --]"
