"""Columns of random types, nested in one another, in Parquet and Arrow: read in every way, put
together with others that hold the same values differently, and written, against PyArrow.
"""

from __future__ import annotations

import os
import pickle
import random
from decimal import Decimal

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import Node

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = float(os.environ.get("FOREBAY_TEST_CASES", "1"))
WORDS = ["", "a", "ab", "ä", "日本", "\x00", "longer than twelve bytes"]
# No dictionaries: PyArrow cannot join all of them where values are missing, or within lists.
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view()]
NUMBERS = [pa.int8(), pa.uint32(), pa.int64(), pa.float32(), pa.float64(), pa.date32()]
NUMBERS += [pa.timestamp("us"), pa.timestamp("ms", "Europe/Berlin"), pa.time64("us")]
NUMBERS += [pa.duration("ms"), pa.float16()]
#: What PyArrow does not make, write or take.
UNABLE = (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowIndexError, pa.ArrowTypeError)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("any")
    (root / "bk").mkdir()
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'bk'}"])
    yield root / "bk", node.url
    node.stop()


def random_type(rng: random.Random, depth: int, in_list: bool = False) -> pa.DataType:
    if depth == 0 or rng.random() < 0.25:
        leaves = [rng.choice(TEXTS), rng.choice(BYTES), rng.choice(NUMBERS), rng.choice(NUMBERS)]
        return rng.choice([*leaves, pa.bool_(), pa.decimal128(7, 2), pa.binary(2)])
    kind = rng.choice(["list", "large", "struct", "map"] + ["fixed"] * (not in_list))
    if kind == "struct":
        parts = [random_type(rng, depth - 1, in_list) for _ in range(2)]
        return pa.struct([("a", parts[0]), ("b", parts[1])])
    of = random_type(rng, depth - 1, True)
    if kind == "fixed":
        # An array does not tell a missing list of a fixed size in a list from missing items.
        return pa.list_(of, rng.randrange(1, 4))
    return {
        "list": lambda: pa.list_(of),
        "large": lambda: pa.large_list(of),
        "map": lambda: pa.map_(pa.string(), of),
    }[kind]()


def held_otherwise(rng: random.Random, kind: pa.DataType) -> pa.DataType:
    """A type for the same values."""
    for family in (TEXTS, BYTES):
        if kind in family:
            return rng.choice(family)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, held_otherwise(rng, field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, held_otherwise(rng, kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(held_otherwise(rng, kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return rng.choice([pa.list_, pa.large_list])(held_otherwise(rng, kind.value_type))
    return kind


def random_value(rng: random.Random, kind: pa.DataType, missing: float):
    def of(inner: pa.DataType):
        return random_value(rng, inner, missing)

    if rng.random() < missing:
        return None
    if pa.types.is_struct(kind):
        return {field.name: of(field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(key, of(kind.item_type)) for key in "xyz"[: rng.randrange(4)]]
    if pa.types.is_fixed_size_list(kind):
        return [of(kind.value_type) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [of(kind.value_type) for _ in range(rng.choice([0, 0, 1, 3]))]
    if kind in TEXTS:
        return rng.choice(WORDS)
    if kind in BYTES:
        return rng.choice(WORDS).encode()
    if kind == pa.binary(2):
        return rng.randbytes(2)
    if pa.types.is_decimal(kind):
        return Decimal(rng.randint(-9999, 9999)) / 100
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if kind == pa.float16():
        return np.float16(rng.randint(-9, 9) / 2)
    return rng.randint(0, 100) / 4 if pa.types.is_floating(kind) else rng.randint(0, 100)


def write(rng: random.Random, path, table: pa.Table) -> pa.Table:
    """Writes it in a random format; what PyArrow reads."""
    path.mkdir()
    form = rng.choice(["parquet", "arrow", "arrows"])
    if form == "parquet":
        pq.write_table(
            table,
            path / "0.parquet",
            row_group_size=rng.choice([1, 7, 50]),
            data_page_size=rng.choice([16, 1 << 20]),
            data_page_version=rng.choice(["1.0", "2.0"]),
            write_batch_size=rng.choice([1, 1024]),
            use_dictionary=rng.random() < 0.6,
            write_page_index=rng.random() < 0.5,
        )
        return pq.read_table(path / "0.parquet")
    of = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(
        compression=rng.choice([None, "zstd", "lz4"]), unify_dictionaries=form == "arrow"
    )
    with of(path / f"0.{form}", table.schema, options=options) as file:
        file.write_table(table, max_chunksize=rng.choice([3, 50]))
    return table


def some_dataset(rng: random.Random, site, name: str, kinds, first: int):
    """Rows with the columns, and what they are; None for what PyArrow does not write."""
    missing, rows = rng.choice([0, 0.2, 1]), rng.choice([1, 5, 60])
    held = {column: held_otherwise(rng, kind) for column, kind in kinds.items()}
    columns = {
        column: [random_value(rng, kind, missing) for _ in range(rows)]
        for column, kind in kinds.items()
    }
    try:
        arrays = {column: pa.array(columns[column], kind) for column, kind in held.items()}
        table = pa.table({"id": range(first, first + rows), **arrays})
        table = write(rng, site[0] / name, table)
    except UNABLE:
        return None
    return forebay.open(f"bk/{name}/", url=site[1]), table.to_pylist()


def batches(loader) -> list[dict]:
    """The rows of an epoch, without padding."""
    found = []
    for batch in loader:
        rows = pa.record_batch(batch).select(["id", *sorted(set(batch.schema.names) - {"id"})])
        rows.validate(full=True)
        found += rows.to_pylist()[: loader.last.real]
    return [{n: v for n, v in row.items() if n != "__real__"} for row in found]


@pytest.mark.parametrize("number", range(int(40 * CASES) or 1))
def test_columns_of_any_type_are_read_and_written(site, number):
    print("FOREBAY_TEST_SEED =", SEED)
    rng = random.Random(SEED + number)
    parts = []
    # PyArrow does not write all types in each format: other columns are drawn if it wrote none.
    while not parts:
        kinds = {f"c{i}": random_type(rng, rng.randrange(4)) for i in range(rng.randrange(1, 4))}
        print(kinds)
        parts = [some_dataset(rng, site, f"{SEED}-{number}-{i}", kinds, 1000 * i) for i in range(2)]
        parts = [part for part in parts if part is not None]
    ds = forebay.concatenate([of for of, _ in parts])
    expected = [row for _, rows in parts for row in rows]
    by_id = {row["id"]: row for row in expected}

    def same(rows) -> None:
        assert list(rows) == [by_id[row["id"]] for row in rows]

    # By number: all, some, a slice of them, and through a pipe.
    assert [row["id"] for row in ds] == list(by_id)
    ids = [rng.randrange(len(ds)) for _ in range(30)]
    some, wanted = ds.take(ids), [expected[i] for i in ids]
    for rows, those in (
        (some, wanted),
        (some[7:20], wanted[7:20]),
        (pickle.loads(pickle.dumps(some[3:])), wanted[3:]),
    ):
        batch = rows.arrow()
        batch.validate(full=True)
        assert batch.to_pylist() == those
    assert len(list(some.plain())) == len(some.numpy()["id"]) == 30
    for name in kinds:
        left = ds.filter(forebay.col(name).is_null())
        assert [row["id"] for row in left] == [r["id"] for r in expected if r[name] is None]
    ds.describe()
    # In every order, pulled and pushed.
    for stream in (False, True):
        shuffle = rng.choice([None, forebay.Full(), forebay.Block(2)])
        of = parts[0][0] if stream else ds
        size = rng.choice([1, 7, 64])
        loader = of.loader(size, shuffle=shuffle, uneven="pad", output="arrow", stream=stream)
        found = batches(loader)
        assert sorted(row["id"] for row in found) == [row["id"] for row in of]
        same(found)
    # And written, by other rows of a group, and of a shard.
    written = ds.write(
        f"bk/{SEED}-{number}-out/",
        order=rng.choice([None, forebay.Full()]),
        shard_rows=rng.choice([9, 1000]),
    )
    again = forebay.open(written.source, url=site[1])
    assert sorted(row["id"] for row in again) == sorted(by_id)
    same(again.take(range(len(again))).arrow().to_pylist())
    files = sorted((site[0] / f"{SEED}-{number}-out").glob("*.parquet"))
    same([row for file in files for row in pq.read_table(file).to_pylist()])
