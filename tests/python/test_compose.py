"""Datasets that are made of others, against plain Python: every operation, loaders over them, and
states.
"""

from __future__ import annotations

import html
import inspect
import itertools
import multiprocessing
import os
import pickle
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import forebay
import numpy as np
import pandas
import pyarrow as pa
import pytest
import tables
import torch
from forebay import _filter, _kept
from forebay._arguments import columns_there, differences
from forebay._compose import Piece
from forebay._dress import types_of
from forebay._words import counted, listed
from forebay.torch import Resumable, state_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = float(os.environ.get("FOREBAY_TEST_CASES", "1"))
A = list(range(tables.A_ROWS))
B = list(range(1000, 1000 + tables.B_ROWS))


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


@pytest.fixture
def other(tables):
    return forebay.open("tables/b/*.parquet", url=tables.url)


def ids(ds) -> list[int]:
    """The column `id` of all rows, in one request."""
    return [int(i) for i in ds.take(range(len(ds))).numpy()["id"]] if len(ds) else []


def given(batches) -> list[int]:
    return [int(i) for batch in batches for i in batch.numpy()["id"]]


def test_selections_are_those_of_a_list(ds):
    assert ids(ds.select(range(10, 50, 3))) == A[10:50:3]
    assert ids(ds.select(range(50, 10, -7))) == A[50:10:-7]
    assert ids(ds.select(slice(-5, None))) == A[-5:]
    assert ids(ds.select([5, 3, 3, -1])) == [5, 3, 3, A[-1]]
    assert ids(ds.select(np.array([7, 9, 20]))) == [7, 9, 20]
    assert ids(ds.select(np.arange(len(ds)) % 2 == 1)) == A[1::2]
    assert ids(ds.select([row % 2 == 1 for row in A])) == A[1::2]
    mine = np.array([5, 3, 3], np.uint64)
    chosen = ds.select(mine)
    mine[:] = 0
    assert ids(chosen) == [5, 3, 3], "the array may be written to afterwards"
    assert ids(ds.skip(100)) == A[100:] and ids(ds.take(7)) == A[:7]
    assert len(ds.skip(1000)) == 0 and ids(ds.take(10_000)) == A and len(ds.select(range(0))) == 0
    assert ids(ds.repeat(3)) == A * 3
    often = ds.take(8).repeat(10**10)
    assert given([next(iter(often.loader(batch_size=9)))]) == [*A[:8], 0]
    assert isinstance(ds[10:20], forebay.Dataset) and ids(ds[10:20]) == A[10:20]
    assert ids(ds[-5:][::2]) == A[-5:][::2] and ids(ds[50:10:-7]) == A[50:10:-7]
    assert isinstance(ds.take([1, 2]), forebay.Rows)
    chosen = ds.skip(20).select([3, 1])
    assert chosen[0]["text"] == "row 23" and chosen[-1]["id"] == 21
    assert [row["id"] for row in chosen] == [23, 21]
    assert chosen.take([1, 0, 1]).ids.tolist() == [1, 0, 1], "its own row numbers"
    assert chosen.__getitems__([1])[0]["id"] == 21


def test_shards_are_those_of_datasets(ds):
    for count, contiguous in itertools.product((1, 2, 7, 103, 110), (True, False)):
        parts = [ids(ds.shard(count, i, contiguous=contiguous)) for i in range(count)]
        for index, part in enumerate(parts):
            # As datasets.Dataset.shard does it.
            each, more = divmod(len(A), count)
            start = each * index + min(index, more)
            block = A[start : start + each + (1 if index < more else 0)]
            assert part == (block if contiguous else A[index::count])
        assert sorted(itertools.chain(*parts)) == A


def test_a_split_has_all_rows_once_in_stored_order(ds):
    train, test = ds.train_test_split(0.25, seed=3)
    assert (len(train), len(test)) == (77, 26)
    assert sorted(ids(train) + ids(test)) == A
    assert ids(train) == sorted(ids(train)) and ids(test) == sorted(ids(test))
    again, other = ds.train_test_split(0.25, seed=3).test, ds.train_test_split(26, seed=4).test
    assert ids(again) == ids(test) != ids(other) and again.id == test.id != other.id
    assert len(ds.train_test_split(1).test) == 1


@pytest.mark.parametrize("of", [np.int64, np.array, torch.tensor])
def test_numbers_of_other_libraries_are_numbers(ds, other, of):
    """Scalars of NumPy and arrays and tensors without dimensions, wherever a number is taken."""
    two, mixed = of(2), forebay.mix([ds, other])
    array = torch.tensor if of is torch.tensor else np.array
    for whole in (ds, mixed):
        assert whole.skip(two).id == whole.skip(2).id and whole.take(two).id == whole.take(2).id
        assert [whole[of(i)]["id"] for i in (2, -2)] == [whole[i]["id"] for i in (2, -2)]
        assert ids(whole.select([two, of(0)])) == ids(whole.select([2, 0]))
        assert ids(whole[two : of(9) : two]) == ids(whole[2:9:2])
        assert len(whole.repeat(two)) == 2 * len(whole)
        assert len(whole.shard(of(3), two)) == len(whole.shard(3, 2))
        parts = whole.train_test_split(array(0.25), seed=two)
        assert len(parts.test) == len(whole.train_test_split(0.25, seed=2).test)
        loader = whole.loader(two, shuffle=forebay.Block(two), seed=two, epochs=two, prefetch=two)
        plain = whole.loader(2, shuffle=forebay.Block(2), seed=2, epochs=2, prefetch=2)
        assert loader.state_dict() == plain.state_dict() and len(loader) == len(plain)
        loader.set_epoch(of(1))
        assert type(loader.epoch) is int and loader.epoch == 1
        assert whole.to_hf_iterable(num_shards=two, seed=two).num_shards == 2
        assert whole.describe(two).seen == 2
    split = ds.train_test_split(two, seed=two)
    assert split.test.id == ds.train_test_split(2, seed=2).test.id and len(split.test) == 2
    # A part is computed in numbers of 64 bits.
    many, part = ds.repeat(10**7), np.float32(0.3)
    exact = len(many.train_test_split(float(part)).test)
    assert len(many.train_test_split(array(part)).test) == exact
    for wrong in (array(True), array([2]), array(2.5)):
        for does in (ds.skip, ds.repeat, ds.loader, lambda n: ds.shard(n, 0)):
            with pytest.raises((forebay.InvalidRequest, ValueError)):
                does(wrong)
        with pytest.raises(forebay.InvalidRequest, match="test_size="):
            ds.train_test_split(wrong)
    with pytest.raises(forebay.InvalidRequest, match="shard 3 of 3 does not exist"):
        ds.shard(of(3), of(3))
    with pytest.raises(forebay.InvalidRequest, match="test_size=.* of a mix"):
        mixed.train_test_split(two)


def test_a_part_of_a_split_is_taken_by_its_name(ds, other):
    for whole in (ds, forebay.mix([ds, other])):
        parts = whole.train_test_split(0.25)
        assert parts["train"] is parts.train is parts[0] and parts["test"] is parts.test
        assert parts[-1:] == (parts.test,) and isinstance(parts, tuple)
        assert len(whole.train_test_split(np.float32(0.25)).test) == len(parts.test)
        with pytest.raises(KeyError):
            parts["validation"]
        with pytest.raises(IndexError):
            parts[2]


def test_concatenation(ds, other):
    both = forebay.concatenate([ds, other.skip(3), ds.select([5])])
    assert ids(both) == A + B[3:] + [5]
    assert both[len(ds)]["id"] == B[3] and len(both.bases) == 2, "one request for both parts of a"
    mixed = both.take([len(both) - 1, 0, len(ds), 1])
    assert mixed.numpy()["id"].tolist() == [5, 0, B[3], 1]
    assert pa.record_batch(mixed).column("text").to_pylist() == [
        "row 5",
        "row 0",
        "row 1003",
        "row 1",
    ]
    assert both.locate(len(ds)).file == "tables/b/0.parquet"
    assert both.locate(len(ds)).row_in_file == 3
    assert {f.name for f in both.files} == {
        "tables/a/0.parquet",
        "tables/a/1.parquet",
        "tables/b/0.parquet",
    }
    assert forebay.concatenate([ds]) is ds
    long = forebay.concatenate([ds.shard(20, i) for i in range(20)])
    assert ids(long) == A and len(long.steps[0]) < 300, "what it is called is cut"


def test_columns(ds, other):
    some = ds.rename({"text": "caption", "size": "text"}).select_columns(["text", "caption"])
    assert some.columns == ["text", "caption"]
    assert some[3] == {"text": 4, "caption": "row 3"}
    assert some.take([1, 0]).numpy()["caption"].tolist() == ["row 1", "row 0"]
    both = forebay.mix([ds.rename({"text": "t"}), ds.rename({"data": "text", "text": "t"})])
    batch = next(iter(both.loader(batch_size=8, columns=["t"], output="numpy")))
    assert all(text.startswith("row ") for text in batch["t"]), "each by its own names"
    assert pa.record_batch(some.take([2])).to_pylist() == [{"text": 3, "caption": "row 2"}]
    assert ds.select(["id"]).columns == ["id"] == ds.select("id").columns
    assert ds.id == some.id, "the rows are the same"
    cast = ds.cast({"id": "int32", "size": pa.float64()}).rename({"size": "length"})
    assert cast.schema["id"] == "Int32" and cast.schema["length"] == "Float64"
    batch = cast.take([5, 6], columns=["id", "length"])
    assert pa.record_batch(batch).schema.types == [pa.int32(), pa.float64()]
    assert batch.numpy()["length"].tolist() == [6.0, 7.0]
    both = forebay.concatenate([ds.select_columns("id"), other.select_columns(["id"])])
    assert ids(both.rename({"id": "n"}).rename({"n": "id"}).cast({"id": "float"})) == A + B
    assert both.rename({"id": "n"}).skip(1)[0] == {"n": 1}
    lengths = ds.rename({"size": "s"}).select(range(5, 0, -1)).lengths("s")
    assert lengths.tolist() == [6, 5, 4, 3, 2]


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us", "UTC"), pa.timestamp("s", "+01:00"), pa.decimal128(21, 2)]
)
def test_a_type_is_cast_to_by_the_name_that_pyarrow_prints(ds, kind):
    rows = ds.cast({"id": str(kind)}).take([7])
    assert rows.arrow().column("id").equals(pa.array([7]).cast(kind))


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.timestamp("ns", "Europe/Berlin")),
        pa.large_list(pa.field("x", pa.list_(pa.int8(), 3), nullable=False)),
        pa.list_(pa.decimal256(50, -2), 2),
        pa.binary(4),
        pa.date32(),
    ],
)
def test_names_of_types_are_read_as_pyarrow_prints_them(kind):
    assert types_of({"a": str(kind)}) == {"a": kind}


def plus(row):
    return row["id"] + 1


def twice(n):
    return 2 * n


def test_types_may_be_the_features_of_datasets(ds):
    import datasets

    features = datasets.Features(
        {
            "id": datasets.ClassLabel(num_classes=200),
            "size": datasets.Value("float32"),
            "x": datasets.List(datasets.Value("float64")),
        }
    )
    cast = ds.cast(features)
    assert [cast.schema[name] for name in ("id", "size")] == ["Int64", "Float32"]
    assert cast[3]["size"] == 4.0 and cast[3]["x"].dtype == np.float64
    del features["x"]
    opened = forebay.open("tables/a/", client=ds.client, schema=features)
    assert opened.columns == ["id", "size"] and opened.schema["size"] == "Float32"
    assert opened[3]["size"] == 4.0
    with pytest.raises(TypeError, match="Features of datasets"):
        ds.cast(["id"])


def test_map_comes_after_decode(tables, ds):
    mapped = ds.map(plus).skip(3).map(twice)
    assert mapped[0] == 8 and list(mapped.take(3)) == [8, 10, 12]
    decoded = forebay.open("tables/a/*.parquet", url=tables.url, decode=plus).map(twice)
    assert decoded[5] == 12 and decoded[:2][1] == 4 and decoded.take([1])[0]["id"] == 1
    assert next(iter(decoded.loader(batch_size=3))) == [2, 4, 6]
    assert next(iter(decoded.loader(batch_size=3, transform=str))) == ["2", "4", "6"]
    assert next(iter(decoded.loader(batch_size=2, decode=lambda row: row["size"]))) == [2, 4]
    assert decoded.id == ds.id, "which rows come does not depend on a function"


OPERATIONS = ("select", "ids", "skip", "take", "shard", "split", "repeat", "concatenate", "rename")


def composed(rng: random.Random, pair, depth: int):
    """A random composition, and the list that it should be."""
    if depth == 0:
        which = rng.randrange(2)
        return pair[which], (A, B)[which]
    ds, rows = composed(rng, pair, depth - 1)
    n = len(rows)
    match rng.choice(OPERATIONS):
        case "select" if n:
            step = rng.choice([1, 1, 3, -1, -2])
            chosen = range(n)[rng.randrange(n) :: step]
            return ds.select(chosen), [rows[i] for i in chosen]
        case "ids" if n:
            chosen = [rng.randrange(-n, n) for _ in range(rng.randrange(1, 40))]
            return ds.select(chosen), [rows[i] for i in chosen]
        case "skip":
            count = rng.randrange(n + 2)
            return ds.skip(count), rows[count:]
        case "take":
            count = rng.randrange(n + 2)
            return ds.take(count), rows[:count]
        case "shard":
            count = rng.randrange(1, 5)
            return ds.shard(count, 0, contiguous=False), rows[::count]
        case "split" if n > 1:
            parts = ds.train_test_split(rng.randrange(1, n), seed=rng.randrange(9))
            part = rng.choice(parts)
            # Which rows is the business of test_a_split…: the model asks.
            return part, ids(part)
        case "repeat":
            return ds.repeat(2), rows * 2
        case "concatenate":
            more, others = composed(rng, pair, rng.randrange(depth))
            return forebay.concatenate([ds, more]), rows + others
        case "rename":
            return ds.rename({"text": "t"}).rename({"t": "text"}), rows
    return ds, rows


def test_any_composition_is_what_a_list_says(ds, other):
    print("FOREBAY_TEST_SEED =", SEED)
    rng = random.Random(SEED)
    for _ in range(int(40 * CASES)):
        made, rows = composed(rng, [ds, other], rng.randrange(1, 7))
        assert len(made) == len(rows) and ids(made) == rows, made
        copy = pickle.loads(pickle.dumps(made))
        assert (copy.id, copy.name, copy.schema) == (made.id, made.name, made.schema)
        if not rows:
            continue
        assert ids(copy.take(5)) == rows[:5]
        row = rng.randrange(len(rows))
        place = made.locate(row)
        first = 1000 if place.file.startswith("tables/b") else 51 * place.file.endswith("1.parquet")
        assert rows[row] == first + place.row_in_file
        shuffle = rng.choice([None, forebay.Full(), forebay.Block(2), forebay.Window(5)])
        loader = made.loader(batch_size=7, shuffle=shuffle, uneven="pad", seed=rng.randrange(99))
        whole = []
        states = []
        for batch in loader:
            whole += given([batch])[: loader.last.real]
            states.append(loader.state_dict())
        assert Counter(whole) == Counter(rows), (made, shuffle)
        if shuffle is None:
            assert whole == rows
        if rng.randrange(4) == 0:
            options = loader.options
            pushed = made.loader(
                batch_size=7, shuffle=shuffle, uneven="pad", seed=options.seed, stream=True
            )
            rest = []
            for batch in pushed:
                rest += given([batch])[: pushed.last.real]
            assert rest == whole, (made, shuffle)
        # Resumed in the middle, by another process with other batches.
        at = rng.randrange(len(states))
        resumed = copy.loader(batch_size=3, shuffle=shuffle, uneven="pad", seed=loader.options.seed)
        resumed.load_state_dict(states[at])
        if resumed.epoch == 0:
            rest = []
            for batch in resumed:
                rest += given([batch])[: resumed.last.real]
            assert rest == whole[7 * (at + 1) :]


def test_blocks_of_a_selection_are_in_blocks_of_its_files(ds):
    # Groups of 10 rows: 1 to 9, 10 to 19, … in every order of blocks come together.
    loader = ds.skip(1).loader(batch_size=1, shuffle=forebay.Block(1), seed=4)
    order = given(loader)
    groups = [(0 if i < 51 else 1, (i if i < 51 else i - 51) // 10) for i in order]
    assert sorted(order) == A[1:]
    assert len(list(itertools.groupby(groups))) == len(set(groups)) == 12
    # The same for rows that a filter or a split leaves.
    train = ds.train_test_split(0.5).train
    order = given(train.loader(batch_size=1, shuffle=forebay.Block(1), seed=4))
    groups = [(0 if i < 51 else 1, (i if i < 51 else i - 51) // 10) for i in order]
    assert len(list(itertools.groupby(groups))) == len(set(groups))


def test_ranks_share_a_composition(ds, other):
    made = forebay.concatenate([ds.skip(4), other]).shard(2, 1)
    alone = given(made.loader(batch_size=4, shuffle=forebay.Block(3), seed=1))
    ranks = [
        list(made.loader(batch_size=2, shuffle="block:3", seed=1, rank=r, world_size=2))
        for r in range(2)
    ]
    turns = [given([batch]) for pair in zip(*ranks, strict=True) for batch in pair]
    assert list(itertools.chain(*turns)) == alone


def test_workers_of_a_dataloader(ds):
    made = ds.train_test_split(0.2, seed=5).train.map(plus)

    def batches():
        data = made.loader(batch_size=8, shuffle=forebay.Full(), seed=2).torch()
        return Resumable(DataLoader(data, batch_size=None, num_workers=2))

    whole = [list(map(int, batch)) for batch in batches()]
    assert len(whole) == 10 and {i - 1 for b in whole for i in b} < set(ids(made))
    first = batches()
    taken = list(itertools.islice(iter(first), 4))
    again = batches()
    again.load_state_dict(first.state_dict())
    rest = [list(map(int, batch)) for batch in again]
    assert [list(map(int, b)) for b in taken] + rest == whole
    assert len(list(DataLoader(made, batch_size=10, num_workers=1))) == 9, "map-style"


def test_what_is_done_to_a_mix_is_done_to_each_of_its_datasets(ds, other):
    def of(mix, **options):
        loader = mix.loader(batch_size=5, uneven="pad", **{"shuffle": "full", **options})
        return [i for batch in loader for i in given([batch])[: loader.last.real]]

    by_rows = forebay.mix([ds, other])
    by_weight = forebay.mix([ds, other], [0.5, 0.5], epoch_rows=60)
    big = by_rows.filter(forebay.col("size") > 8)
    expected = [i for i in A + B if i % 17 + 1 > 8]
    # Weights are rounded: of an epoch of all rows, some may come twice in place of others.
    assert len(of(big)) == len(big) == len(expected)
    assert len(set(of(big)) & set(expected)) >= len(expected) - 2 and set(of(big)) <= set(expected)
    few = by_weight.filter(forebay.col("size") > 8)
    assert few.weights == [0.5, 0.5] and len(few) == 60, "as they were given"
    assert sum(i >= 1000 for i in of(few)) == 30
    named = by_rows.filter(lambda row: row["id"] % 2 == 0, name="even")
    evens = {i for i in A + B if i % 2 == 0}
    assert set(of(named)) <= evens and len(named) == len(evens)
    halves = [set(of(by_rows.shard(2, i))) for i in range(2)]
    assert not halves[0] & halves[1] and len(halves[0] | halves[1]) >= len(A + B) - 4
    train, test = by_rows.train_test_split(0.2, seed=3)
    assert not set(of(train)) & set(of(test)) and len(test) == len(of(test)) == 21 + 9
    mapped = by_rows.map(plus).map(twice).loader(batch_size=144, shuffle=None)
    assert set(next(iter(mapped))) <= {2 * (i + 1) for i in A + B}
    changed = by_rows.rename({"text": "t"}).cast({"id": "int32"}).select(["t", "id"])
    batch = pa.record_batch(next(iter(changed.loader(batch_size=3))))
    assert batch.schema.names == ["t", "id"] and batch.schema.types[1] == pa.int32()
    assert len(by_weight.repeat(3)) == 180 == len(of(by_weight.repeat(3)))
    large = forebay.col("size") > 8
    one, two = by_rows.repeat(2).filter(large), by_rows.filter(large).repeat(2)
    assert (len(one), one.weights) == (len(two), two.weights) == (2 * len(expected), big.weights)
    assert of(one, seed=4) == of(two, seed=4)
    assert of(big, stream=True) == of(big)
    scheduled = forebay.mix([ds, other], forebay.Schedule([(0, [1, 0]), (30, [0, 1])]))
    later = scheduled.select_columns("id")
    assert later.schedule is scheduled.schedule
    for wrong in (
        lambda: by_rows.train_test_split(3),
        lambda: by_rows.repeat(0),
        lambda: by_rows.shard(60, 0).shard(2, 1),
    ):
        with pytest.raises(forebay.InvalidRequest) as e:
            wrong()
        assert e.value.hint
    none = by_rows.filter(forebay.col("id") < 1000)
    for use in (lambda: none.loader(batch_size=3), lambda: none.weights, lambda: none[0]):
        with pytest.raises(forebay.InvalidRequest, match="tables/b.* has no rows"):
            use()
    with pytest.raises(forebay.InvalidRequest, match="the split leaves no rows|leaves a part"):
        by_rows.filter(forebay.col("id") < 1000).train_test_split(0.5)


@pytest.mark.parametrize("kind", ["rows", "weights", "repeated", "schedule", "composed"])
def test_rows_of_a_mix_have_the_numbers_of_its_first_epoch(ds, other, kind):
    mixed = {
        "rows": lambda: forebay.mix([ds, other]),
        "weights": lambda: forebay.mix([ds, other], [0.3, 0.7], epoch_rows=200),
        "repeated": lambda: forebay.mix([ds, other], [2, 1]).repeat(2),
        "schedule": lambda: forebay.mix(
            [ds, other], forebay.Schedule([(0, [1, 0]), (30, [1, 3])]), epoch_rows=150
        ),
        "composed": lambda: forebay.mix([ds.skip(50), forebay.concatenate([other, ds.take(3)])]),
    }[kind]()
    expected = given(mixed.loader(batch_size=1, shuffle=None, epochs=1))
    rows = mixed.interleaved()
    assert len(rows) == len(mixed) == len(expected) and ids(rows) == expected
    other_seed = given(mixed.loader(batch_size=1, seed=7, epochs=1))
    assert other_seed != expected, "another turn of the datasets"
    assert [mixed[i]["id"] for i in (0, 7, -1)] == [expected[i] for i in (0, 7, -1)]
    assert ids(mixed[5:50:3]) == expected[5:50:3] and ids(mixed[20:]) == expected[20:]
    assert ids(mixed.take(9)) == expected[:9] and ids(mixed.skip(9)) == expected[9:]
    assert ids(mixed.select([8, 3, 3])) == [expected[i] for i in (8, 3, 3)]
    assert ids(mixed.select(range(4, 0, -1))) == expected[4:0:-1]
    assert mixed.take([3, 1]).numpy()["id"].tolist() == [expected[3], expected[1]]
    assert [row["id"] for row in mixed] == expected
    batches = DataLoader(mixed, batch_size=7, collate_fn=list)
    assert [row["id"] for batch in batches for row in batch] == expected
    assert ids(pickle.loads(pickle.dumps(mixed))[3:6]) == expected[3:6]
    assert mixed.by_key([expected[11]], column="id").numpy()["id"].tolist() == [expected[11]]
    assert mixed.describe().rows == len(mixed)
    assert all(f"<td>{row}</td>" in mixed._repr_html_() for row in expected[:5])
    for text in (mixed._repr_html_(), repr(rows), repr(rows.skip(10))):
        assert text.count(counted(len(mixed), "row")) == 1, "a number is said once"
    assert f": {counted(len(mixed) - 10, 'row')};" in repr(rows.skip(10))
    assert rows.locate(4) == (ds if expected[4] < 1000 else other).locate(expected[4] % 1000)
    part = mixed.skip(10)
    shuffled = given(part.loader(batch_size=5, shuffle="full", seed=2, uneven="pad", epochs=1))
    assert Counter(shuffled[: len(part)]) == Counter(expected[10:])
    assert given(part.loader(batch_size=5, shuffle="full", seed=2, uneven="pad", stream=True)) == (
        shuffled
    ), "a node reads them, too"


def test_a_mix_without_common_columns_has_no_numbers(ds, other):
    mixed = forebay.mix([ds, other.rename({"text": "t"})])
    with pytest.raises(forebay.InvalidRequest, match="different columns: 'text' is .* missing"):
        mixed.take(3)
    with pytest.raises(forebay.InvalidRequest, match="there was mix of 2: 70.0%.*and here is mix"):
        state = forebay.mix([ds, other], [7, 3])[:50].loader(batch_size=5).state_dict()
        forebay.mix([ds, other], [6, 4])[:50].loader(batch_size=5).load_state_dict(state)
    later = [
        forebay.mix([ds, other], forebay.Schedule([(0, [1, 1]), (row, [1, 3])])) for row in (50, 60)
    ]
    state = later[0][:50].loader(batch_size=5).state_dict()
    with pytest.raises(
        forebay.InvalidRequest, match=r"there was mix.*\(schedule .*and here is mix"
    ):
        later[1][:50].loader(batch_size=5).load_state_dict(state)


def test_filters_are_computed_when_they_are_needed(ds, other, monkeypatch):
    calls = []
    by_node = _filter._by_node

    def counted(of, expression, *more):
        calls.append(repr(expression))
        return by_node(of, expression, *more)

    monkeypatch.setattr(_filter, "_by_node", counted)
    # Others on each run: what was kept is not computed.
    large, larger = (forebay.col("id") > n + random.random() for n in (49, 50))
    rows = ds.filter(large).rename({"text": "t"}).map(lambda row: row["id"] * 2)
    both = forebay.mix([rows, other.filter(forebay.col("id") > 1003).map(lambda row: 0)])
    assert rows.is_pending and "t" in rows.columns
    weighed = forebay.mix([rows, other], [3, 1])
    assert "not computed yet" in repr(rows) and "not computed yet" in repr(both)
    assert "75.0% tables/a" in repr(weighed) and "not computed yet" in repr(weighed)
    assert not calls, "nobody needed them"
    alike = rows.rename({"t": "text"})
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(len, [rows, alike, rows, alike])) == {len(A[50:])}
    assert calls == [repr(large)], "once for all who asked"
    assert not rows.is_pending and list(rows)[:3] == [100, 102, 104]
    assert len(both) == len(A[50:]) + len([i for i in B if i > 1003])
    sent = pickle.loads(pickle.dumps(ds.filter(larger)))
    assert calls.count(repr(larger)) == 1 and len(sent) == len(A[51:]), (
        "whoever gets it, gets the rows"
    )
    for wrong in (
        lambda: ds.filter(forebay.col("missing") > 3),
        lambda: ds.filter(forebay.col("text") > 3),
        lambda: ds.filter(plus),
        lambda: ds.filter(plus, name="x", columns=["missing"]),
    ):
        with pytest.raises(forebay.InvalidRequest):
            wrong()


def test_what_a_function_refers_to_may_change_after_the_filter(ds):
    name = random.random()
    parts = [ds.filter(lambda row: row["id"] % 3 == k, name=f"{k} of {name}") for k in range(3)]
    assert [ids(part) for part in parts] == [A[k::3] for k in range(3)]
    assert not any(part.is_pending for part in parts)


def test_other_columns_and_samples_of_a_filter_share_its_rows(ds, monkeypatch):
    encoded = []
    of = Piece.of
    monkeypatch.setattr(Piece, "of", lambda value: encoded.append(value) or of(value))
    rows = ds.filter(forebay.col("id") > 5)
    before = rows.map(plus)
    assert len(rows.block_shape) > 0
    for alike in (before, rows.rename({"text": "t"}), rows.cast({"id": "int32"}), rows.map(plus)):
        assert len(alike) == len(A[6:]) and alike.id == rows.id
        assert alike._shape is rows._shape and alike._pieces[-1] is rows._pieces[-1]
    assert len(encoded) == 1


def test_a_process_that_is_forked_while_a_filter_is_computed_gets_it_too(ds, monkeypatch):
    computing, go_on = threading.Event(), threading.Event()
    by_node = _filter._by_node

    def waits(*given):
        computing.set()
        assert go_on.wait(60)
        return by_node(*given)

    monkeypatch.setattr(_filter, "_by_node", waits)
    rows = ds.filter(forebay.col("id") > 5 + random.random())
    thread = threading.Thread(target=len, args=[rows])
    thread.start()
    assert computing.wait(60)
    fork = multiprocessing.get_context("fork")
    answer = fork.Queue()
    child = fork.Process(target=lambda: answer.put(len(rows)))
    child.start()
    go_on.set()
    try:
        assert answer.get(timeout=60) == len(A[6:])
    finally:
        child.kill()
        child.join()
        thread.join()


def test_an_error_inside_a_property_is_told_as_it_is(ds, monkeypatch):
    def fails(*given):
        raise AttributeError("the reason")

    rows = ds.filter(forebay.col("id") > 5 + random.random())
    monkeypatch.setattr(_filter, "_by_node", fails)
    for name in ("id", "files", "block_shape"):
        with pytest.raises(AttributeError, match="the reason"):
            getattr(rows, name)
    with pytest.raises(AttributeError, match="a dataset has no 'nothing'"):
        _ = rows.nothing


def test_attributes_of_other_libraries_are_explained(ds, other):
    mixed = forebay.mix([ds, other])
    for of in (ds, ds[3:], ds.filter(forebay.col("id") < 5), mixed):
        for name, said in {
            "shuffle": r"loader\(.*shuffle=",
            "decode": r"loader\(.*decode=",
            "rename_column": r"rename\(",
            "column_names": "columns",
            "torch": r"take\(rows\)\.torch\(\)",
            "to_pandas": r"arrow\(\)\.to_pandas\(\)",
            "iter": r"loader\(",
            "sort": r"to_hf\(\)",
            "tail": r"\[-5:\]",
            "set_epoch": "a loader has it",
            "shape": r"len\(ds\) rows of len\(ds\.columns\) columns",
        }.items():
            with pytest.raises(AttributeError, match=f"has no {name!r}: .*{said}"):
                getattr(of, name)
            assert not hasattr(of, name)
    for name in ("schema", "features"):
        with pytest.raises(AttributeError, match=rf"no {name!r}: interleaved\(\)\.schema"):
            getattr(mixed, name)
    with pytest.raises(AttributeError, match=r"interleaved\(\)\.columns"):
        _ = mixed.column_names
    with pytest.raises(AttributeError, match=r"arrow\(\)\.to_pandas\(\)"):
        _ = ds.take([1]).to_pandas
    again = pickle.loads(pickle.dumps(mixed))
    assert [d.id for d in again.datasets] == [d.id for d in mixed.datasets]


def test_arguments_of_other_libraries_are_explained(ds, other):
    def same(row):
        return row

    late = forebay.col("id") >= 5
    mixed = forebay.mix([ds, other])
    for of in (ds, ds[3:], forebay.concatenate([ds, other]), ds.filter(late), mixed):
        for call, given, said in (
            (of.map, {"function": same, "batched": True}, r"loader\(batch_size, collate=\)"),
            (of.map, {"function": same, "num_proc": 4}, "threads= of a loader"),
            (of.map, {"function": same, "fn_kwargs": {"n": 1}}, r"functools\.partial"),
            (of.filter, {"function": same}, "where="),
            (of.filter, {"where": same, "name": "all", "input_columns": "id"}, "columns="),
            (of.select, {"indices": [1]}, "rows_or_columns="),
            (of.select_columns, {"column_names": ["id"]}, "columns="),
            (of.rename, {"column_mapping": {"id": "n"}}, "names="),
            (of.cast, {"features": {"id": "int32"}}, "schema="),
            (of.repeat, {"num_times": 2}, "times="),
            (of.train_test_split, {"train_size": 0.5}, "test_size="),
            (of.train_test_split, {"test_size": 0.5, "shuffle": False}, r"skip\(n\)"),
        ):
            argument = [*given][-1]
            with pytest.raises(TypeError, match=rf"\(\) has no argument {argument!r}: .*{said}"):
                call(**given)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            of.map(same, nonsense=1)
        assert of.map(function=same).select(range(2))[1]["id"] == of.select(range(2))[1]["id"]
    with pytest.raises(TypeError, match="probabilities': weights="):
        forebay.mix([ds, other], probabilities=[0.5, 0.5])
    with pytest.raises(TypeError, match="stopping_strategy': epoch_rows="):
        forebay.mix([ds, other], stopping_strategy="all_exhausted")
    for name, said in {
        "split": r"train_test_split\(\)",
        "streaming": "nothing is downloaded",
        "data_files": "source=",
        "colums": "did you mean columns=",
        "nothing_like_it": "unexpected keyword",
    }.items():
        with pytest.raises(TypeError, match=f"'{name}'.*{said}|{said}.*'{name}'"):
            forebay.open("tables/a/*.parquet", **{name: "x"})
    with pytest.raises(TypeError, match="'colums': did you mean columns="):
        forebay.open_shards("tables/*.tar", colums=["x"])
    with pytest.raises(TypeError, match="'sed': did you mean seed="):
        ds.train_test_split(0.5, sed=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sel'"):
        ds.repeat(2, sel=3)
    with pytest.raises(TypeError, match="axis': .*rows come"):
        forebay.concatenate([ds, other], axis=1)
    assert list(inspect.signature(ds.map).parameters) == ["function"]


def test_one_row_is_shown_as_one(ds, other):
    one = ds.take(1)
    mixed = forebay.mix([one, other.take(2)])
    for text in (
        repr(one),
        one._repr_html_(),
        repr(one.take([0])),
        repr(mixed[:1]),
        repr(forebay.mix([one])),
        repr(ds.select([5])),
        repr(ds.train_test_split(1).test),
    ):
        assert re.search(r"\b1 row\b", text) and "1 rows" not in text
    assert "2 rows" in repr(mixed.datasets[1]) and "3 rows" in repr(mixed)
    loader = one.loader(1)
    list(loader)
    assert "1 sample in 1 batch," in str(loader.stats())
    assert counted(1200, "batch", "batches") == "1,200 batches" and counted(0, "row") == "0 rows"


def test_a_mix_is_shown_whatever_its_datasets_are(ds, other):
    unlike = forebay.mix([ds, other.rename({"text": "t"})])
    assert unlike._repr_html_() == html.escape(repr(unlike))
    for weights in (None, [1, 1]):
        mixed = forebay.mix([ds, other.filter(forebay.col("id") < 5)], weights)
        assert "not computed yet" in repr(mixed)
        with pytest.raises(forebay.InvalidRequest, match="tables/b.* has no rows"):
            mixed[0]
        assert "rows in an epoch" in repr(mixed)
        assert "rows in an epoch" in mixed._repr_html_()
        with pytest.raises(forebay.InvalidRequest, match="tables/b.* has no rows"):
            mixed.map(plus)
    schedule = forebay.Schedule([(0, [1, 1]), (40, [1, 3])], between="linear")
    mixed = forebay.mix([ds, other], schedule)
    for text in (repr(mixed), mixed.interleaved().name):
        assert "50.0% tables/a" in text and "50.0% tables/b" in text


@pytest.mark.parametrize("weights", [None, [1, 1], "schedule"])
def test_a_mix_of_a_dataset_without_rows_is_refused_by_its_name(ds, other, weights):
    if weights == "schedule":
        weights = forebay.Schedule([(0, [1, 1]), (40, [1, 3])])
    for rows in (None, 50):
        with pytest.raises(forebay.InvalidRequest) as e:
            forebay.mix([ds, other.take(0)], weights, epoch_rows=rows)
        assert "tables/b" in str(e.value) and "tables/a" not in str(e.value)


def test_what_cannot_be_done_to_a_mix_is_told_at_once(ds, other, monkeypatch):
    mixed = forebay.mix([ds, other])
    monkeypatch.setattr(type(ds), "take", lambda *given: pytest.fail("rows were read"))
    for does in (
        lambda: forebay.mix(mixed),
        lambda: forebay.mix([ds, mixed]),
        lambda: forebay.concatenate(mixed),
        lambda: forebay.concatenate([mixed, ds]),
    ):
        with pytest.raises(forebay.InvalidRequest, match="datasets, not Mix") as e:
            does()
        assert "mix.interleaved()" in e.value.hint
    for unlike in (other.rename({"text": "t"}), other.map(plus)):
        with pytest.raises(forebay.InvalidRequest) as e:
            forebay.mix([ds, unlike])[0]
        assert "a loader over the mix" in e.value.hint and "forebay.mix" not in e.value.hint
    with pytest.raises(forebay.InvalidRequest, match="makes more than"):
        mixed.repeat(1 << 60)
    with pytest.raises(forebay.InvalidRequest, match="repeat"):
        forebay.mix([ds, other.filter(forebay.col("id") > 5)]).repeat(1 << 60)
    with pytest.raises(forebay.InvalidRequest, match="tables/b.* has no rows"):
        forebay.mix([ds, other.filter(forebay.col("id") < 5)], [1, 1]).interleaved()
    few = forebay.mix([ds, other], [1e-6, 1])
    for does in (lambda: few.loader(batch_size=4), lambda: few[:50]):
        with pytest.raises(forebay.InvalidRequest, match=r"tables/a/\*.parquet would make up"):
            does()
    columns = dict.fromkeys(["text", "id"])
    for names in (list(columns), columns.keys(), (name for name in columns)):
        assert [d.columns for d in mixed.select(names).datasets] == [["text", "id"]] * 2


def test_a_state_knows_how_rows_look(ds, other):
    def resumed(saved, here, **strict):
        first = saved.loader(batch_size=10, seed=1)
        next(iter(first))
        loader = here.loader(batch_size=10, seed=1)
        loader.load_state_dict(first.state_dict(), **strict)
        return next(iter(loader))

    def ps_of(d):
        return d.rename({"id": "p", "size": "q"})

    def swapped(d):
        return d.rename({"id": "q", "size": "p"}).select_columns(ps.columns)

    ps = ps_of(ds)
    named, cast = ds.rename({"text": "t"}), ds.cast({"id": "int32"})
    parts = [forebay.concatenate([ds, other]), ds.filter(forebay.col("id") > 5)]
    cases = [
        (named, ds.rename({"text": "u"}), "rename text to t, and here is rename text to u"),
        (named, ds, "rename text to t, and here is nothing"),
        (ds, cast, "nothing, and here is cast id to int32"),
        (cast, ds.cast({"id": "int16"}), "cast id to int32, and here is cast id to int16"),
        (ds.map(plus), ds.map(unchanged), "map plus, and here is map unchanged"),
        (
            ds.map(unchanged).map(shortened),
            ds.map(shortened).map(unchanged),
            "map unchanged . map shortened, and here is map shortened",
        ),
        *((p.map(plus), p, "map plus, and here is nothing") for p in parts),
        *((p, p.rename({"size": "s"}), "nothing, and here is rename size to s") for p in parts),
        (
            forebay.mix([ds, other.map(plus)], [1, 1]),
            forebay.mix([ds.map(plus), other], [1, 1]),
            "dataset 0 of the mix: there was nothing, and here is map plus",
        ),
        (ds.map(plus).map(np.log), ds.map(plus).map(np.sqrt), "map log, and here is map sqrt"),
        (
            forebay.concatenate([ps, swapped(ds), ps_of(other)]),
            forebay.concatenate([ps, swapped(ds), swapped(other)]),
            "there was rename id to p in part 2",
        ),
    ]
    for saved, here, says in cases:
        resumed(saved, saved)
        with pytest.raises(forebay.InvalidRequest, match=says) as e:
            resumed(saved, here)
        assert "strict=False" in e.value.hint
        resumed(saved, here, strict=False)
    # Not what is read, or how: these are not operations on a dataset.
    resumed(ds, ds.select_columns(["id"]))
    # The order of casts of one column counts, and no other.
    resumed(ds.cast({"id": "int32", "size": "int16"}), ds.cast({"size": "int16", "id": "int32"}))
    with pytest.raises(forebay.InvalidRequest, match="cast id to int16"):
        resumed(ds.cast({"id": "int16"}).cast({"id": "int32"}), cast)
    # States of earlier versions do not say it.
    old = named.loader(batch_size=10, seed=1).state_dict()
    del old["looks"]
    named.loader(batch_size=10, seed=1).load_state_dict(old)
    many = ds
    for i in range(60):
        many = many.map(unchanged if i % 7 else shortened)
    resumed(many, many)
    with pytest.raises(forebay.InvalidRequest, match=r"60 renames, casts and maps \("):
        resumed(many, many.map(unchanged))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_continues_over_other_columns(ds, workers):
    def data(name):
        return ds.rename({"text": name}).loader(batch_size=5, seed=1).torch()

    def batches(data):
        return StatefulDataLoader(data, batch_size=None, num_workers=workers, collate_fn=numbers)

    first, here = batches(data("t")), data("u")
    ahead = iter(first)
    next(ahead), next(ahead)
    saved = first.state_dict()
    rest = list(ahead)
    again = batches(here)
    again.load_state_dict(saved)
    with pytest.raises(forebay.InvalidRequest, match=r"state_of\(saved, data, strict=False\)"):
        list(again)
    with pytest.raises(forebay.InvalidRequest, match="rename text to t") as e:
        state_of(saved, here)
    assert "forebay.torch.state_of(saved, data, strict=False)" in e.value.hint
    here.load_state_dict(state_of(saved, here, strict=False))
    assert list(batches(here)) == rest


def numbers(batch):
    return [int(row["id"]) for row in batch]


def test_composed_datasets_in_a_mix(ds, other):
    parts = [ds.skip(50), forebay.concatenate([other.take(5), ds.take(5)])]
    mix = forebay.mix(parts, [0.5, 0.5], epoch_rows=40)

    def loader():
        return mix.loader(batch_size=8, shuffle=forebay.Full(), seed=3)

    whole = [given([batch]) for batch in loader()]
    rows = list(itertools.chain(*whole))
    of_second = set(B[:5] + A[:5])
    assert len(rows) == 40 and sum(i in of_second for i in rows) == 20
    assert set(rows) <= of_second | set(A[50:])
    first = loader()
    next(iter(first))
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert [given([batch]) for batch in resumed] == whole[1:]
    batch = next(iter(loader()))
    sources = batch.sources.tolist()
    assert [int(i) in of_second for i in batch.numpy()["id"]] == [s == 1 for s in sources]


def test_a_state_of_another_composition_is_refused_by_name(ds, other):
    def loader(of):
        return of.loader(batch_size=10, seed=1)

    first = loader(ds.shard(2, 0))
    next(iter(first))
    state = first.state_dict()
    loader(ds.shard(2, 0)).load_state_dict(state)
    for wrong, says in (
        (ds.shard(2, 1), "there was shard 0 of 2, and here is shard 1 of 2"),
        (ds.skip(1).shard(2, 0), "shard 0 of 2, and here is rows 1:103"),
        (ds, "shard 0 of 2, and here is nothing more"),
        (other.shard(2, 0), r"a/\*\.parquet version .* and here is tables/b"),
        (forebay.mix([ds.shard(2, 0), other]), "1 dataset, and here are 2"),
    ):
        with pytest.raises(forebay.InvalidRequest, match=says) as e:
            loader(wrong).load_state_dict(state)
        assert e.value.hint
    plain = loader(ds).state_dict()
    with pytest.raises(forebay.InvalidRequest, match=r"as they were opened.*shard 0 of 2"):
        loader(ds.shard(2, 0)).load_state_dict(plain)
    with pytest.raises(forebay.InvalidRequest, match="seed 1, and this plan has seed 2"):
        ds.shard(2, 0).loader(batch_size=10, seed=2).load_state_dict(state)
    # Which operations led to the same rows does not matter where they are the same operation.
    loader(ds.skip(0).shard(2, 0)).load_state_dict(state)
    assert ds.skip(3).skip(4).id == ds.skip(7).id != ds.skip(8).id
    high = forebay.col("id") > 5
    for saved, here, says in (
        (ds.filter(high), ds.filter(forebay.col("id") > 6), r'filter col\("id"\) > 5, and .* > 6'),
        (ds.repeat(2), ds.repeat(3), "repeat 2, and here is repeat 3"),
        (
            ds.train_test_split(0.2, seed=1)[0],
            ds.train_test_split(0.2, seed=2)[0],
            "train of a split of 21 rows with seed 1, and here is .* with seed 2",
        ),
        (
            forebay.concatenate([ds, ds]),
            forebay.concatenate([ds, ds.skip(1)]),
            r"concatenate 2: .*, and here is concatenate 2: .* \| rows 1:103",
        ),
        (
            ds.filter(lambda row: row["id"] % 2 == 0, name="even"),
            ds.filter(lambda row: row["id"] % 2 == 1, name="odd"),
            'filter by the function "even", and here is filter by the function "odd"',
        ),
    ):
        state = loader(saved).state_dict()
        loader(saved).load_state_dict(state)
        with pytest.raises(forebay.InvalidRequest, match=says):
            loader(here).load_state_dict(state)
    long = ds
    for i in range(30):
        long = (
            long.shard(2, i % 2).repeat(2) if i < 10 else long.select([0, *range(len(long))][:-1])
        )
        if i > 12:
            break
    assert len(str(loader(long).state_dict())) < 4000, "it travels through memory of a fixed size"


def test_what_makes_no_sense_is_refused(ds, other):
    wrong = (
        (lambda: ds.select([]), "neither rows nor columns"),
        (lambda: ds.select(["id", "nothing"]), "no column 'nothing'"),
        (lambda: ds.select(np.array([True, False])), "a mask of shape"),
        (lambda: ds.select([True, False]), "a mask of shape"),
        (lambda: ds.select(["id", "text", "id"]), "column 'id' is named 2 times"),
        (lambda: ds.skip(3).select_columns(["id", "id"]), "column 'id' is named 2 times"),
        (lambda: ds.take([3], ["id", "id"]), "column 'id' is named 2 times"),
        (lambda: ds.loader(3, columns=["id", "id"]), "column 'id' is named 2 times"),
        (lambda: ds.skip("5"), r"skip\('5'\)"),
        (lambda: forebay.concatenate(ds), "takes a list of datasets"),
        (lambda: ds.skip(-1), r"skip\(-1\)"),
        (lambda: ds.take(True), r"take\(True\)"),
        (lambda: ds.shard(3, 3), "shard 3 of 3 does not exist"),
        (lambda: ds.shard(0, 0), "num_shards is 0"),
        (lambda: ds.shard(2, -1), "index is -1"),
        (lambda: ds.repeat(0), r"repeat\(0\)"),
        (lambda: ds.repeat(None), r"repeat\(None\).*epochs=math\.inf goes on for ever"),
        (lambda: forebay.mix([ds]).repeat(None), r"repeat\(None\).*epochs=math\.inf goes on"),
        (lambda: ds.repeat(2**70), r"repeat\(\d+\) of .* rows makes more than"),
        (lambda: ds.train_test_split(0), "leaves a part without rows"),
        (lambda: ds.train_test_split(1.5), "not between 0 and 1"),
        (lambda: ds.train_test_split(103), "leaves a part without rows"),
        (lambda: ds.train_test_split(0.1, seed=-1), "seed=-1"),
        (lambda: ds.rename({"nothing": "x"}), "no column 'nothing'"),
        (lambda: ds.rename({"id": "text"}), "more than one column 'text'"),
        (lambda: ds.rename({"id": ""}), "not empty"),
        (lambda: ds.rename({"id": ["x"]}), "must be texts"),
        (lambda: ds.cast({"nothing": "int8"}), "no column 'nothing'"),
        (lambda: ds.cast({"id": "int99"}), "not the name of a type"),
        (lambda: ds.cast({"id": "timestamp[us, tz=]"}), "not the name of a type"),
        (lambda: ds.cast({"id": "decimal128(99, 1)"}), "not the name of a type"),
        (lambda: ds.cast({"id": "list<" * 200 + "int8" + ">" * 200}), "not the name of a type"),
        (lambda: ds.cast({"id": f"fixed_size_list<int8>[{10**20}]"}), "not the name of a type"),
        (lambda: ds.cast({"x": "int8"}), "column 'x' of .* cannot be cast from"),
        (lambda: ds.cast({"text": "int32"})[3], "column 'text' of .* cannot be cast from string"),
        (lambda: forebay.concatenate([]), "takes a list of datasets"),
        (lambda: forebay.concatenate([ds, other.select_columns(["id"])]), "'text' is Utf8 there"),
        (lambda: forebay.concatenate([ds, other.cast({"id": "int8"})]), "'id' is Int64 there and"),
        (
            lambda: forebay.concatenate([ds, other.select_columns(other.columns[::-1])]),
            "their columns are in another order",
        ),
        (lambda: forebay.concatenate([ds, other.map(plus)]), "samples in different ways"),
    )
    for does, says in wrong:
        with pytest.raises(forebay.InvalidRequest, match=says) as e:
            does()
        assert e.value.hint, says
    for does in (
        lambda: ds.select([103]),
        lambda: ds.select(range(100, 104)),
        lambda: ds.select(range(-104, -100)),
        lambda: ds.skip(3)[100],
        lambda: ds.skip(3).locate(100),
    ):
        with pytest.raises(IndexError):
            does()
    for does in (
        lambda: ds.select([1, "id"]),
        lambda: ds.select([1.5]),
        lambda: ds.select([1, True]),
        lambda: ds.select(b"text"),
        lambda: ds.select({1: 2}),
        lambda: ds.select(5),
        lambda: ds.skip(3).select_columns(5),
        lambda: ds.locate(5.5),
        lambda: ds.skip(3).locate("5"),
        lambda: ds.skip(3).locate(None),
        lambda: ds.take([1])["text"],
        lambda: ds.map("text"),
        lambda: ds.rename(["id"]),
        lambda: ds.cast(["id"]),
    ):
        with pytest.raises(TypeError):
            does()
    deep = ds
    with pytest.raises(forebay.InvalidRequest, match="operations on top of each other"):
        for _ in range(100):
            deep = deep.repeat(2).shard(2, 0)
    for _ in range(100):
        ds = ds.skip(1)
    assert ids(ds) == A[100:], "slices of slices are one operation"
    with pytest.raises(TypeError, match=r"ds\.select_columns\('text'\)"):
        ds["text"]
    with pytest.raises(forebay.InvalidRequest, match="tables/a.*has no rows.*selected or filtered"):
        ds.take(0).loader(batch_size=1)


def test_rows_are_taken_by_what_an_iterator_gives(ds):
    numbers = [5, 3, 3, 99]
    for given in (iter(numbers), (n for n in numbers), map(int, "5 3 3 99".split())):
        assert ds.take(given).numpy()["id"].tolist() == numbers
    assert ds[3:].take({2: "two", 0: "none"}.keys()).numpy()["id"].tolist() == [5, 3]
    assert len(ds.take(iter([]))) == 0
    with pytest.raises(IndexError, match="row 103 "):
        ds.take(iter([103]))
    with pytest.raises(TypeError, match="whole numbers"):
        ds.take(n / 2 for n in numbers)


def test_places_are_plain_numbers(ds):
    for of, row in ((ds, 60), (ds.skip(10), 50)):
        place = of.locate(np.uint8(row))
        assert place == of.locate(row) and type(place.row_in_file) is int
        assert str(place) == "row 9 of tables/a/1.parquet"


def test_a_column_that_may_be_meant_is_named(ds):
    for does in (
        lambda: ds.select_columns("txt"),
        lambda: ds.skip(3).select_columns("txt"),
        lambda: ds.cast({"txt": "string"}),
        lambda: ds.filter(forebay.col("txt") == "a"),
    ):
        with pytest.raises(forebay.InvalidRequest) as e:
            does()
        assert e.value.hint == "did you mean 'text'? its columns: id, data, text, x, size"


def test_of_many_columns_the_first_are_shown():
    wide = pa.RecordBatch.from_pydict({f"f{i}": [i] for i in range(2000)})
    rows = forebay.Rows([wide], np.arange(1, dtype=np.uint64))
    assert repr(rows).endswith(", f19 and 1,980 more>") and len(repr(rows)) < 200
    assert listed(["a"] * 21).count("a") == 21 and listed(["a"] * 22).endswith("a and 2 more")
    one, other = {f"f{i}": "Int8" for i in range(2000)}, {f"f{i}": "Int16" for i in range(2000)}
    assert len(differences(one, other)) < 1000
    hint = columns_there("f1999x", one)
    assert hint.startswith("did you mean 'f1999'? its columns: f0, f1, ") and len(hint) < 200


@pytest.mark.parametrize("shuffle", [None, forebay.Full(), forebay.Block(3), forebay.Window(9)])
def test_a_node_pushes_rows_of_compositions(ds, other, shuffle):
    part = forebay.concatenate(
        [ds.train_test_split(0.3, seed=1).train, other.select([7, 3, 3, 40])]
    )
    part = part.rename({"text": "t"}).cast({"id": "int32"}).select_columns(["t", "id"])
    whole = other.rename({"text": "t"}).cast({"id": "int32"}).select_columns(["t", "id"])
    mix = forebay.mix([part, whole], [0.75, 0.25], epoch_rows=90)
    for of in (part.repeat(2), mix):
        for rank in range(2):
            kinds = {"batch_size": 6, "shuffle": shuffle, "seed": 5, "rank": rank, "world_size": 2}
            pulled = of.loader(**kinds, epochs=2)
            pushed = of.loader(**kinds, epochs=2, stream=True, connections=3)
            steps = []
            for a, b in zip(pulled, pushed, strict=True):
                assert pa.record_batch(a) == pa.record_batch(b)
                assert a.ids.tolist() == b.ids.tolist()
                assert (a.sources is None) == (b.sources is None)
                steps.append((pa.record_batch(a), pushed.state_dict()))
            assert steps[0][0].schema.types == [pa.string(), pa.int32()]
            # The pulled order goes on where the stream was.
            resumed = of.loader(**kinds, epochs=2)
            resumed.load_state_dict(steps[3][1])
            assert pa.record_batch(next(iter(resumed))) == steps[4][0]
    mapped = part.map(plus).loader(batch_size=6, shuffle=shuffle, seed=5, stream=True)
    plain = part.loader(batch_size=6, shuffle=shuffle, seed=5)
    assert next(iter(mapped)) == [int(i) + 1 for i in next(iter(plain)).numpy()["id"]]


def test_objects_and_members_that_were_chosen_are_pushed(people):
    for source in ("bk/objects/**", "bk/pictures.tar"):
        ds = forebay.open(source, url=people.url).select(range(10, 0, -2)).repeat(3)
        for shuffle in (None, forebay.Full(), forebay.Block(2)):
            kinds = {"batch_size": 4, "shuffle": shuffle, "seed": 2}
            pulled, pushed = (list(ds.loader(**kinds, stream=s)) for s in (False, True))
            assert [pa.record_batch(b) for b in pulled] == [pa.record_batch(b) for b in pushed]


def test_a_filter_is_pushed_by_a_node_that_was_started_anew(tables, tmp_path):
    from servers import Node

    options = ["--origin", f"file://{tables.directory.parent / 'tables'}"]
    node = Node("", [], tmp_path / "node", options=options)
    ds = forebay.open("tables/a/*.parquet", url=node.url).filter(forebay.col("size") > 5)
    kinds = {"batch_size": 2, "shuffle": forebay.Block(2), "seed": 1, "epochs": 3}
    expected = [pa.record_batch(b) for b in ds.loader(**kinds)]
    pushed = ds.loader(**kinds, stream=True, window_bytes=65536, connections=2)
    got = []
    try:
        for batch in pushed:
            got.append(pa.record_batch(batch))
            if len(got) in (4, len(expected) // 2):
                node.stop()
                root = tmp_path / f"anew-{len(got)}"
                node = Node("", [], root, options=options, listen=f"127.0.0.1:{node.port}")
    finally:
        node.stop()
    assert got == expected


def test_what_cannot_be_pushed_is_said(ds, other):
    both = forebay.concatenate([ds.rename({"text": "t"}), other.rename({"text": "t"})])
    assert given(both.loader(batch_size=200, uneven="pad", stream=True))[: len(both)] == A + B
    sizes = other.rename({"id": "n", "size": "id"}).select_columns(["id"])
    several = forebay.concatenate([ds.select_columns(["id"]), sizes])
    with pytest.raises(
        forebay.InvalidRequest, match=r"a/.* and .*b/.* have different columns"
    ) as e:
        next(iter(several.loader(batch_size=4, stream=True)))
    assert "stream=False" in e.value.hint
    many = np.zeros((64 << 20) // 8 + 1, np.uint64)
    chosen = ds.select(many)
    with pytest.raises(forebay.TooLarge, match="8,388,609 rows were chosen one by one") as e:
        next(iter(chosen.loader(batch_size=4, stream=True)))
    assert "without a stream" in e.value.hint
    assert given([next(iter(chosen.loader(batch_size=4)))]) == [0] * 4
    with pytest.raises(forebay.InvalidRequest, match="is not made of other datasets"):
        ds.described()


def test_a_composition_is_written_as_new_shards(ds, other, tmp_path):
    from servers import Node

    (tmp_path / "new").mkdir()
    root = tmp_path / "node"
    target = Node("", [], root, options=["--origin", f"file://{tmp_path / 'new'}"])
    try:
        made = forebay.concatenate([ds.skip(90), other.take(4)]).rename({"text": "caption"})
        written = made.write("new/parts/", shard_rows=8, client=forebay.Client(target.url))
        again = forebay.open(written.source, url=target.url)
        assert ids(again) == A[90:] + B[:4] and again[0]["caption"] == "row 90"
    finally:
        target.stop()
    with pytest.raises(forebay.InvalidRequest, match="is under the source tables/a"):
        made.write("tables/a/")


def test_columns_are_renamed_in_streams(ds):
    made = ds.rename({"text": "t"}).cast({"id": "int32"}).select_columns(["id", "t"])
    kinds = {"batch_size": 10, "shuffle": forebay.Full(), "seed": 3}
    pulled, pushed = (list(made.loader(**kinds, stream=stream)) for stream in (False, True))
    assert [pa.record_batch(b) for b in pulled] == [pa.record_batch(b) for b in pushed]
    assert pulled[0].columns == ["id", "t"]
    assert pa.record_batch(pulled[0]).schema.types[0] == pa.int32()
    loader = made.map(plus).loader(**kinds, stream=True)
    assert next(iter(loader)) == [int(i) + 1 for i in pulled[0].numpy()["id"]]


def test_select_takes_masks_and_names_of_other_libraries(ds):
    import pandas

    mask = torch.zeros(len(ds), dtype=torch.bool)
    mask[[3, 7]] = True
    assert ids(ds.select(mask)) == [3, 7]
    for names in (pandas.Index(["id", "text"]), pandas.Series(["id", "text"])):
        assert ds.select(names).columns == ["id", "text"]


def test_columns_that_hold_the_same_in_different_ways_are_one(tmp_path):
    import pyarrow.parquet as pq

    (tmp_path / "bk").mkdir()
    json = {"ARROW:extension:name": "arrow.json"}
    for name, text, data, lists in (
        ("a", pa.string(), pa.binary(), pa.list_(pa.string())),
        ("b", pa.large_string(), pa.large_binary(), pa.large_list(pa.large_string())),
    ):
        columns = {
            "id": pa.array([0, 1, 2]),
            "text": pa.array([f"{name}0", None, ""], text),
            "data": pa.array([b"x", None, b""], data),
            "lists": pa.array([["x"], None, []], lists),
            "json": pa.array(["1", None, "{}"], text),
            "other": pa.array([1, 2, 3], pa.int32() if name == "a" else pa.int64()),
        }
        fields = [
            pa.field(column, values.type, metadata=json if column == "json" else None)
            for column, values in columns.items()
        ]
        table = pa.table(list(columns.values()), pa.schema(fields))
        pq.write_table(table, tmp_path / "bk" / f"{name}.parquet")
    client = forebay.Client(origin=f"file://{tmp_path / 'bk'}", cache=f"{tmp_path / 'cache'}:1GiB")
    a, b = (forebay.open(f"bk/{name}.parquet", client=client) for name in "ab")
    columns = ["id", "text", "data", "lists"]
    narrow = [ds.select_columns(columns) for ds in (a, b)]
    expected = [row for ds in narrow for row in ds.take(range(3)).arrow().to_pylist()]
    both = forebay.concatenate(narrow)
    kinds = [pa.int64(), pa.large_string(), pa.large_binary(), pa.large_list(pa.large_string())]
    # Of rows of either alone, too.
    for rows in ([0, 1, 2, 3, 4, 5], [0, 2], [5, 4], [4, 0]):
        batch = both.take(rows).arrow()
        assert [pa.types.is_large_list(k) or k for k in batch.schema.types] == [*kinds[:3], True]
        assert batch.to_pylist() == [expected[row] for row in rows]
    assert both.schema["text"] == "LargeUtf8"
    says = "bk/a.parquet and bk/b.parquet.* different columns: 'data', 'lists', 'text'"
    with pytest.raises(forebay.InvalidRequest, match=says) as e:
        next(iter(both.loader(2, stream=True)))
    assert "stream=False" in e.value.hint
    assert both.filter(forebay.col("text") == "b0").take([0]).arrow()["id"].to_pylist() == [0]
    assert forebay.mix(narrow, epoch_rows=6).interleaved().schema == both.schema
    with pytest.raises(forebay.InvalidRequest, match="different columns: .*'other' is Int32 there"):
        forebay.concatenate([a, b])
    # The two that cannot be alike are named, and of their columns only those.
    other = b.select_columns([*columns, "other"]).cast({"other": "int32"})
    for make in (forebay.concatenate, lambda of: forebay.mix(of).interleaved()):
        with pytest.raises(forebay.InvalidRequest) as e:
            make([a.select_columns(other.columns), other, other.cast({"other": "string"})])
        named = ("bk/a.parquet and bk/b.parquet have", "'other' is Int32 there and Utf8 here")
        assert e.value.message == " different columns: ".join(named)
    made = forebay.concatenate([ds.select_columns(["json"]) for ds in (a, b)])
    assert made.schema == {"json": "Json"} and len(list(made.take(range(6)).plain())) == 6


def test_streams_compare_the_columns_that_are_read(ds, other):
    swapped = other.rename({"size": "id", "id": "size"}).select_columns(["id", "text"])
    both = forebay.concatenate([ds.select_columns(["id", "text"]), swapped])
    kinds = {"batch_size": 10, "shuffle": forebay.Full(), "seed": 3, "columns": ["text"]}
    pulled, pushed = (list(both.loader(**kinds, stream=stream)) for stream in (False, True))
    assert [pa.record_batch(b) for b in pulled] == [pa.record_batch(b) for b in pushed]
    with pytest.raises(forebay.InvalidRequest, match="different columns: 'id'"):
        next(iter(both.loader(batch_size=10, stream=True)))
    # All columns, and all of them by their names.
    named = forebay.concatenate([ds, other.select_columns(ds.columns)])
    assert len(list(named.loader(batch_size=10, stream=True))) == (len(ds) + len(other)) // 10


def test_streams_take_columns_that_differ_in_what_may_be_missing(tmp_path):
    import pyarrow.parquet as pq
    from servers import Node

    (tmp_path / "several").mkdir()
    says = {"none": (True, None), "required": (False, None), "more": (True, {"unit": "m"})}
    for at, (name, (nullable, metadata)) in enumerate(says.items()):
        fields = [
            pa.field("id", pa.int64(), nullable, metadata),
            pa.field("text", pa.string(), nullable),
        ]
        rows = {"id": range(10 * at, 10 * at + 10), "text": ["x"] * 10}
        if nullable:
            rows["text"][3] = None
        path = tmp_path / "several" / f"{name}.parquet"
        pq.write_table(pa.table(rows, schema=pa.schema(fields)), path)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'several'}"])
    try:
        parts = [forebay.open(f"several/{name}.parquet", url=node.url) for name in says]
        for a, b in itertools.permutations(parts, 2):
            for both in (forebay.concatenate([a, b]), forebay.mix([a, b])):
                # Batches of a single dataset, too.
                for size in (1, 4):
                    options = {"batch_size": size, "shuffle": "full"}
                    pulled, pushed = (
                        [row for batch in both.loader(**options, stream=stream) for row in batch]
                        for stream in (False, True)
                    )
                    assert pulled == pushed and len(pulled) == 20
    finally:
        node.stop()


def test_streams_take_columns_that_differ_in_what_may_be_missing_within_values(tmp_path):
    import pyarrow.parquet as pq
    from servers import Node

    def plain(row):
        return {name: value.tolist() if name == "list" else value for name, value in row.items()}

    (tmp_path / "several").mkdir()
    for at, (name, item) in enumerate({"some": "item", "all": "element"}.items()):
        nullable = name == "some"
        number = pa.field("n", pa.int64(), nullable)
        fields = [
            pa.field("list", pa.list_(number.with_name(item))),
            pa.field("of", pa.struct([number])),
        ]
        numbers = [None if nullable and n == 3 else 10 * at + n for n in range(10)]
        rows = {"list": [[n, n] for n in numbers], "of": [{"n": n} for n in numbers]}
        path = tmp_path / "several" / f"{name}.parquet"
        pq.write_table(pa.table(rows, schema=pa.schema(fields)), path)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'several'}"])
    try:
        parts = [forebay.open(f"several/{name}.parquet", url=node.url) for name in ("some", "all")]
        assert parts[0].schema != parts[1].schema
        for both in (forebay.mix(parts), forebay.mix(parts[::-1])):
            for size in (1, 4):
                options = {"batch_size": size, "shuffle": "full"}
                pulled, pushed = (
                    [plain(row) for batch in both.loader(**options, stream=stream) for row in batch]
                    for stream in (False, True)
                )
                assert pulled == pushed and len(pulled) == 20
                assert {"list": [None, None], "of": {"n": None}} in pushed
    finally:
        node.stop()


def test_a_failure_names_the_file_and_the_row(ds):
    def fails(row):
        raise ValueError("never")

    with pytest.raises(forebay.SampleFailed) as e:
        list(ds.select([60, 7]).loader(batch_size=2, threads=0, decode=fails))
    assert (e.value.file, e.value.row_in_file, e.value.row) == ("tables/a/1.parquet", 9, 0)


# Filters, keys, and what people look at.

PEOPLE = 1000


@pytest.fixture(scope="module")
def people_table():
    rng = np.random.default_rng(5)
    langs = ["en", "de", "fr", None]
    return pa.table(
        {
            "n": pa.array(range(PEOPLE), pa.int32()),
            "lang": [langs[i % 4] for i in rng.integers(0, 4, PEOPLE)],
            "score": pa.array(
                [
                    None if i % 13 == 5 else float("nan") if i % 17 == 3 else float(v)
                    for i, v in enumerate(rng.normal(size=PEOPLE))
                ]
            ),
            "flag": [None if i % 7 == 1 else i % 2 == 0 for i in range(PEOPLE)],
            "key": [f"{i:06}" for i in rng.permutation(PEOPLE)],
            "small": pa.array(rng.integers(0, 200, PEOPLE), pa.uint8()),
            "blob": [bytes([i % 256]) * (i % 5) for i in range(PEOPLE)],
            "when": pa.array(
                [1_700_000_000_000_000 + i * 10**9 for i in range(PEOPLE)],
                pa.timestamp("us", "UTC"),
            ),
            "list": [list(range(i % 3)) for i in range(PEOPLE)],
        }
    )


BIG = 1 << 53


@pytest.fixture(scope="module")
def numbers_table():
    """Numbers at the ends of what types hold, and times of several units."""
    whole = [0, 1, 2, BIG - 1, BIG, BIG + 1, BIG + 2, 1 << 62, -(1 << 62), -BIG - 1, None, 5]
    times = [datetime(2024, 1, 1 + i, 12, 0, i) for i in range(12)]
    return pa.table(
        {
            "n": pa.array(range(12), pa.int32()),
            "whole": pa.array(whole, pa.int64()),
            "above": pa.array([None if w is None else abs(w) * 2 for w in whole], pa.uint64()),
            # Some groups have but one value, and some are wide.
            "short": pa.array([0.1, 0.1, 0.05, 0.1, -0.0, 0.0, None, 1, 5, 0.1, 2, 0.3], "float"),
            "long": pa.array([*map(float, whole[:10]), float("nan"), float("inf")]),
            "s": pa.array(times, pa.timestamp("s")),
            "ms": pa.array(times, pa.timestamp("ms")),
            "ns": pa.array(times, pa.timestamp("ns")),
        }
    )


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def people(tmp_path_factory, people_table, numbers_table):
    """A node over a directory: two Parquet files, objects, and a tar."""
    import io
    import tarfile

    import pyarrow.parquet as pq
    from servers import Node

    root = tmp_path_factory.mktemp("people")
    (root / "bk" / "objects").mkdir(parents=True)
    (root / "bk" / "table").mkdir()
    pq.write_table(people_table[:600], root / "bk/table/0.parquet", row_group_size=50)
    pq.write_table(people_table[600:], root / "bk/table/1.parquet", row_group_size=50)
    pq.write_table(numbers_table, root / "bk/numbers.parquet", row_group_size=2)
    for i in range(20):
        (root / "bk" / "objects" / f"{i:03}.bin").write_bytes(b"x" * i)
    with tarfile.open(root / "bk" / "pictures.tar", "w") as tar:
        for i in range(12):
            for name, data in ((f"{i:04}.png", PNG), (f"{i:04}.txt", b"<script>" if i else b"a")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'bk'}"])
    yield node
    node.stop()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "forebay"


@pytest.fixture
def table(people):
    return forebay.open("bk/table/*.parquet", url=people.url)


def random_expression(rng: random.Random, depth: int):
    """An expression, and what it is for a row: True, False or None."""
    col = forebay.col
    if depth:
        left, a = random_expression(rng, depth - 1)
        if rng.random() < 0.3:
            return ~left, lambda row: None if a(row) is None else not a(row)
        right, b = random_expression(rng, depth - 1)
        if rng.random() < 0.5:

            def both(row):
                sides = (a(row), b(row))
                return False if False in sides else None if None in sides else True

            return left & right, both

        def either(row):
            sides = (a(row), b(row))
            return True if True in sides else None if None in sides else False

        return left | right, either
    name, value = rng.choice(
        [
            ("n", rng.randrange(-10, PEOPLE + 10)),
            ("n", rng.randrange(PEOPLE) + 0.5),
            ("n", 1 << 40),
            ("n", -(1 << 40)),
            ("lang", rng.choice(["en", "de", "", "zz"])),
            ("score", rng.choice([0, 0.5, -1.25])),
            ("small", rng.choice([0, 100, 199, 255, 256, -1])),
            ("flag", rng.choice([True, False])),
            ("key", f"{rng.randrange(PEOPLE):06}"),
            ("blob", bytes([7]) * 2),
        ]
    )
    kind = rng.choice(["==", "!=", "<", "<=", ">", ">=", "isin", "null", "starts"])
    if kind == "null":
        return col(name).is_null(), lambda row: row[name] is None
    if kind == "isin":
        values = [
            value,
            value,
            *([0] if isinstance(value, int) and not isinstance(value, bool) else []),
        ]
        return col(name).isin(
            values
        ), lambda row: None if row[name] is None else row[name] in values
    if kind == "starts" and isinstance(value, (str, bytes)):
        start = value[:2]
        return col(name).startswith(
            start
        ), lambda row: None if row[name] is None else row[name].startswith(start)
    if kind == "starts" or isinstance(value, bool):
        kind = "=="
    made = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }[kind]
    return made(col(name), value), lambda row: None if row[name] is None else made(row[name], value)


@pytest.fixture(params=["at the node", "here"])
def computed(request, monkeypatch):
    """Filters by expressions are computed by the node, or evaluated by PyArrow."""
    if request.param == "here":
        monkeypatch.setattr("forebay._filter._by_node", lambda *a: None)
    else:
        monkeypatch.setattr("forebay._filter._run", lambda *a: pytest.fail("the node computes it"))


@pytest.fixture
def computed_here(monkeypatch):
    monkeypatch.setattr("forebay._filter._by_node", lambda *a: None)


def test_a_filter_leaves_what_python_says(table, people_table, computed):
    print("FOREBAY_TEST_SEED =", SEED)
    rng = random.Random(SEED)
    rows = people_table.to_pylist()
    for _ in range(int(60 * CASES)):
        expression, model = random_expression(rng, rng.randrange(4))
        expected = [row["n"] for row in rows if model(row) is True]
        got = table.filter(expression)
        found = got.take(range(len(got))).numpy()["n"].tolist() if len(got) else []
        assert found == expected, expression
        assert f"filter {expression!r}"[:50] in got.name


def test_numbers_and_times_are_compared_exactly(people, numbers_table, computed):
    """Whatever the types of the column and of the value, and in whatever row group it is."""
    ds = forebay.open("bk/numbers.parquet", url=people.url)
    rows = ds.take(range(12), ["n", "whole", "above", "short", "long"])
    rows = [dict(row) for row in rows]
    hows = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    values = [0, 1, 2.0, 2.5, -0.5, 0.1, float(np.float32(0.1)), BIG + 1, float(BIG), 1 << 63]
    values += [-BIG - 1, (1 << 64) - 1, 1e300, -1e300, float("inf"), -float("inf")]

    def left(where):
        found = ds.filter(where)
        return found.take(range(len(found))).numpy()["n"].tolist() if len(found) else []

    for name in ("whole", "above", "short", "long"):
        there = [(row["n"], row[name]) for row in rows if row[name] is not None]
        for value in values:
            for how, compare in hows.items():
                expected = [n for n, v in there if compare(v, value)]
                assert left(compare(forebay.col(name), value)) == expected, (name, how, value)
        for members in ([1, 2.5], [0.1], [0.1, 5], [BIG + 1, 0], [1e300, -1, 2.0], []):
            expected = [n for n, v in there if v in members]
            assert left(forebay.col(name).isin(members)) == expected, (name, members)
    times = [datetime(2024, 1, 3, 12, 0, 2), datetime(2024, 1, 4, 12, 0, 3, 1)]
    for name in ("s", "ms", "ns"):
        assert left(forebay.col(name).isin(times)) == [2], name
        assert left(forebay.col(name) < times[1]) == [0, 1, 2, 3], name


def test_filters_compose(table, people_table):
    en = table.filter(forebay.col("lang") == "en")
    n = [r["n"] for r in people_table.to_pylist() if r["lang"] == "en"]
    late = en.filter(forebay.col("n") >= 500).skip(2)
    assert late.take(range(len(late))).numpy()["n"].tolist() == [i for i in n if i >= 500][2:]
    both = forebay.concatenate([en, table.take(10)]).rename({"n": "m"}).filter(forebay.col("m") < 6)
    assert both.take(range(len(both))).numpy()["m"].tolist() == [i for i in n if i < 6] + list(
        range(6)
    )
    loader = en.loader(batch_size=5, shuffle=forebay.Block(4), seed=1, uneven="pad")
    first = next(iter(loader)).numpy()["n"].tolist()
    state = loader.state_dict()
    again = table.filter(forebay.col("lang") == "en").loader(
        batch_size=5, shuffle="block:4", seed=1
    )
    again.load_state_dict(state)
    rest = [int(i) for batch in again for i in batch.numpy()["n"]]
    assert set(first + rest) <= set(n) and len(first + rest) == len(n) // 5 * 5
    fr = table.filter(forebay.col("lang") == "fr").loader(batch_size=5, shuffle="block:4", seed=1)
    with pytest.raises(forebay.InvalidRequest, match=r"lang.* == 'en'.*and here is.*== 'fr'"):
        fr.load_state_dict(state)
    nobody = table.filter(forebay.col("n") > 10_000)
    assert len(nobody) == 0
    with pytest.raises(forebay.InvalidRequest):
        next(iter(nobody.loader(batch_size=1)))


def test_statistics_save_reading(table, monkeypatch, computed_here):
    read = []
    take = forebay.Dataset._take
    monkeypatch.setattr(
        forebay.Dataset,
        "_take",
        lambda self, ids, wanted: read.append((len(ids), wanted)) or take(self, ids, wanted),
    )
    assert len(table.filter((forebay.col("n") >= 70) & (forebay.col("n") < 130))) == 60
    assert sum(count for count, _ in read) == 100, "two groups of 50, and one that is left whole"
    assert all(wanted == ["n"] for _, wanted in read), "only the column that it needs"
    read.clear()
    assert len(table.filter(forebay.col("n") < 0)) == 0 == len(read)
    assert len(table.filter(~forebay.col("n").is_null())) == PEOPLE
    # Of selections and concatenations too, by the statistics of what they are made of.
    read.clear()
    made = forebay.concatenate([table.skip(60), table.select(range(99, -1, -1))])
    kept = made.filter((forebay.col("n") >= 70) & (forebay.col("n") < 130))
    assert not read and len(kept)
    assert sum(count for count, _ in read) == 90 + 50
    n = [*range(60, PEOPLE), *range(99, -1, -1)]
    assert kept.take(range(len(kept))).numpy()["n"].tolist() == [i for i in n if 70 <= i < 130]


def test_a_filter_is_computed_once(table, people, own_cache, monkeypatch):
    where = forebay.col("lang").isin(["de", "fr"])
    first = table.filter(where)
    assert len(first)
    (kept,) = own_cache.iterdir()
    again = forebay.open("bk/table/*.parquet", url=people.url)
    with monkeypatch.context() as patched:
        patched.setattr("forebay._filter._by_node", lambda *a: pytest.fail("it is kept"))
        assert again.filter(where).id == first.id
    # What is damaged is made again.
    kept.write_bytes(kept.read_bytes()[:-3])
    assert again.filter(where).id == first.id and len(kept.read_bytes()) > 100
    # Nothing can be kept: it still works.
    kept.unlink()
    own_cache.rmdir()
    own_cache.write_bytes(b"a file where the folder should be")
    assert table.filter(where).id == first.id


def test_a_filter_by_a_function(table, people_table, own_cache):
    calls = []

    def is_even(row):
        calls.append(1)
        return row["n"] % 2 == 0

    even = table.filter(is_even, name="even", columns=["n"])
    assert (
        even.take(range(len(even))).numpy()["n"].tolist() == list(range(0, PEOPLE, 2))
        and len(calls) == PEOPLE
    )
    assert "lang" in even.columns
    again = table.filter(is_even, name="even", columns=["n"])
    assert again.id == even.id and len(calls) == PEOPLE, "kept"
    mapped = table.map(lambda row: row["n"]).filter(lambda n: n > 990, name="late")
    assert list(mapped) == list(range(991, 1000))

    def fails(row):
        raise KeyError("size")

    with pytest.raises(forebay.SampleFailed, match=r"row 0 of bk/table/0.parquet.*KeyError") as e:
        table.filter(fails, name="fails")
    assert (e.value.file, e.value.row) == ("bk/table/0.parquet", 0)
    with pytest.raises(forebay.SampleFailed):
        table.filter(fails, name="fails"), "a failure is not kept"
    assert not list(own_cache.rglob("*.lock"))
    for wrong in (0, True, "4", 1.5, 10**6):
        with pytest.raises(forebay.InvalidRequest, match="threads="):
            table.filter(is_even, name="odd", threads=wrong)


def test_a_filter_by_a_function_is_computed_in_parallel_and_shows_how_far_it_is(table, capsys):
    threads, together = set(), threading.Event()

    def is_even(row):
        threads.add(threading.get_ident())
        if len(threads) > 1:
            together.set()
        assert together.wait(30), "one thread waits for another"
        return row["n"] % 2 == 0

    # More rows than one thread takes at a time.
    many = table.repeat(20)
    even = many.filter(is_even, name="even, in parallel", columns=["n"], threads=2, progress=True)
    assert len(even) == 10 * PEOPLE and len(threads) == 2
    drawn = capsys.readouterr().err
    assert "100%" in drawn and f"{20 * PEOPLE:,}/{20 * PEOPLE:,} rows" in drawn


def test_a_filter_by_a_function_that_fails_calls_it_no_more(table):
    calls, together = [], threading.Event()

    def fails(row):
        calls.append(row["n"])
        if row["n"] == 0:
            assert together.wait(30)
            raise KeyError("size")
        together.set()
        time.sleep(0.01)
        return True

    with pytest.raises(forebay.SampleFailed):
        table.repeat(4).filter(fails, name="fails, with others", threads=4)
    # Each thread had 256 rows to look at.
    assert len(calls) < 256


def negated(row):
    return {**row, "n": -row["n"]}


def unchanged(row):
    return row


def shortened(row):
    return {"id": row["id"]}


def test_few_small_results_are_kept_too(tmp_path, monkeypatch):
    """Each new one looks at all of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_kept, "MOST_FILES", 5)
    computed = []

    def of(number: int) -> bytes:
        def compute() -> bytes:
            computed.append(number)
            return b"%d" % number

        return _kept.kept("filter", number, compute, bytes, bytes)

    before: set = set()
    for number in range(9):
        assert of(number) == b"%d" % number
        (new,) = set(_kept.folder().iterdir()) - before
        os.utime(new, (number, number))
        before = set(_kept.folder().iterdir())
        # One that is used goes last.
        assert of(0) == b"0"
    assert len(list(_kept.folder().iterdir())) == 5
    assert computed == list(range(9))
    assert of(8) == b"8" and of(1) == b"1" and computed == [*range(9), 1]


def test_a_kept_filter_is_that_of_what_the_function_is_given(table, people_table):
    def is_large(row):
        return row["k"] > 100

    n, small = (table.rename({c: "k"}).filter(is_large, name="large") for c in ("n", "small"))
    assert len(n) == PEOPLE - 101
    assert len(small) == sum(v > 100 for v in people_table["small"].to_pylist())
    lengths = [d.filter(lambda r: len(r) == 1, name="one") for d in (table.select(["n"]), table)]
    assert list(map(len, lengths)) == [PEOPLE, 0]
    made = [table.map(f).filter(lambda r: r["n"] > 0, name="+") for f in (unchanged, negated)]
    assert list(map(len, made)) == [PEOPLE - 1, 0]


def test_what_killed_processes_left_in_the_cache_goes(table, own_cache):
    own_cache.mkdir(parents=True)
    old, new = own_cache / ".new-old", own_cache / ".new-now"
    for path, age in ((old, 2 * 86400), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert len(table.filter(forebay.col("n") == 1)) == 1
    assert new.exists() and not old.exists()


def test_filters_that_make_no_sense_are_refused(table, monkeypatch):
    col = forebay.col
    for work in ("_run", "_by_node"):
        refused = lambda *a: pytest.fail("refused before any work")  # noqa: E731
        monkeypatch.setattr(f"forebay._filter.{work}", refused)
    for where, says in (
        (col("nothing") == 1, "column 'nothing', which .* has not"),
        (col("n") == "en", "'n' is of int32, which does not compare with 'en'"),
        (col("lang") == 3, "'lang' is of .*string"),
        (col("flag") == 1, "'flag' is of bool"),
        (col("n") == True, "'n' is of int32"),  # noqa: E712
        (col("list") == 1, "'list' is of list"),
        (col("n").startswith("1"), "'n' is of int32"),
        (col("lang").isin(["en", 1]), "does not compare with 1"),
        (col("blob") == "text", "'blob' is of"),
    ):
        with pytest.raises(forebay.InvalidRequest, match=says) as e:
            table.filter(where)
        assert e.value.hint
    for does in (
        lambda: table.filter(col("n")),
        lambda: table.filter("n > 3"),
        lambda: (col("n") > 1) and (col("n") < 3),
        lambda: 1 < col("n") < 3,
        lambda: (col("n") > 1) & col("flag"),
        lambda: ~col("flag"),
        lambda: col("flag") & (col("n") == 1),
        lambda: col("n") == [1],
        lambda: col("n") == col("small"),
        lambda: col("lang").isin("en"),
        lambda: col("lang").isin(5),
        lambda: col(3),
    ):
        with pytest.raises(TypeError):
            does()
    for does, says in (
        (lambda: col("n") == None, "is_null"),  # noqa: E711
        (lambda: col("n") == np.datetime64("NaT"), "NaT.*is_null"),
        (lambda: col("n") != np.timedelta64("NaT"), "NaT.*is_null"),
        (lambda: col("n") < pandas.NaT, "NaT.*is_null"),
        (lambda: col("n").isin([1, pandas.NA]), "NA.*is_null"),
        (lambda: col("n") == pa.scalar(None, pa.int64()), "None.*is_null"),
        (lambda: col("n") == float("nan"), "NaN"),
        (lambda: col("n") == 1 << 70, "fits no column"),
        (lambda: table.filter(lambda row: True), "needs a name="),
        (lambda: table.filter(col("n") == 1, name="x"), "for a filter by a function"),
    ):
        with pytest.raises(forebay.InvalidRequest, match=says):
            does()


def test_values_of_filters_may_be_those_of_arrow(table):
    col = forebay.col
    few = table.filter(col("n").isin(pa.array([3, 5, 3], pa.int16())))
    assert [row["n"] for row in few] == [3, 5]
    assert few.id == table.filter(col("n").isin([3, 5, 3])).id
    assert [row["n"] for row in table.filter(col("n") < pa.scalar(2))] == [0, 1]
    time_of = pa.scalar(1700000000, pa.timestamp("s", "UTC"))
    for value in (time_of, pa.scalar("en"), pa.scalar(b"a")):
        assert repr(col("n") == value) == repr(col("n") == value.as_py())


def test_rows_by_key(table, people, people_table, own_cache):
    keys = people_table["key"].to_pylist()
    wanted = [keys[700], keys[3], keys[700], keys[999]]
    rows = table.by_key(wanted, column="key")
    assert [row["n"] for row in rows] == [700, 3, 700, 999]
    assert rows.ids.tolist() == [700, 3, 700, 999]
    for columns in (["lang"], "lang", (name for name in ["lang"])):
        by_number = table.by_key([5, 4], column="n", columns=columns)
        assert by_number.columns == ["lang", "n"] and by_number.numpy()["n"].tolist() == [5, 4]
    with pytest.raises(forebay.NotFound, match="no row with key 'nobody', 'none'"):
        table.by_key([keys[0], "nobody", "none"], column="key")
    with pytest.raises(forebay.NotFound, match="no row with n '5'"):
        table.by_key(["5"], column="n")
    with pytest.raises(forebay.InvalidRequest, match='column "score" is of Float64'):
        table.by_key([1], column="score")
    with pytest.raises(forebay.InvalidRequest, match="a key in column 'key' is of float"):
        table.by_key([1.5], column="key")
    for never in ("\udc80", 1 << 64, -(1 << 63) - 1):
        with pytest.raises(forebay.NotFound, match="no row with key"):
            table.by_key([keys[0], never], column="key")
    with pytest.raises(forebay.InvalidRequest, match="no column 'nothing'"):
        table.by_key([1], column="nothing")
    with pytest.raises(TypeError, match="a list of keys"):
        table.by_key("000017", column="key")
    assert len(table.by_key([], column="key")) == 0
    # Several rows with a key: the first. In a selection, its rows.
    en = [i for i, lang in enumerate(people_table["lang"].to_pylist()) if lang == "en"]
    assert table.by_key(["en"], column="lang").ids.tolist() == en[:1]
    later = table.skip(en[0] + 1)
    assert later.by_key(["en"], column="lang")[0]["n"] == en[1]
    objects = forebay.open("bk/objects/", url=people.url)
    assert [len(r["data"]) for r in objects.by_key(["objects/007.bin", "objects/000.bin"])] == [
        7,
        0,
    ]
    tar = forebay.open("bk/pictures.tar", url=people.url)
    assert tar.by_key(["0003"])[0]["__key__"] == "0003"
    # Of other files too, if it is clear which column has the keys.
    assert table.by_key([keys[3]])[0]["n"] == 3
    assert table.rename({"key": "__key__"}).by_key([keys[3]])[0]["n"] == 3
    with pytest.raises(forebay.InvalidRequest, match="no column that is known to have the keys"):
        table.rename({"lang": "__key__"}).by_key([keys[3]])
    # The same name for another column, of the same rows.
    first, second = (table.rename({c: "k"}).skip(1).select_columns("k") for c in ("key", "lang"))
    assert first.id == second.id and first.schema == second.schema
    assert first.by_key([keys[5]], column="k").ids.tolist() == [4]
    assert second.by_key(["en"], column="k").ids.tolist() == [next(i for i in en if i) - 1]
    few = [d.filter(forebay.col("k") == "en") for d in (first, second)]
    assert [len(f) for f in few] == [0, sum(i > 0 for i in en)]
    # The node has the indexes, for all; nothing is kept here.
    assert not sorted(own_cache.glob("keys-*"))
    copy = pickle.loads(pickle.dumps(table))
    assert copy.by_key([keys[1]], column="key").ids.tolist() == [1]
    # More than one request brings.
    many = table.repeat(6)
    assert many.by_key(keys * 6, column="key").ids.tolist() == list(range(PEOPLE)) * 6
    assert table.by_key(keys * 6, column="key").ids.tolist() == list(range(PEOPLE)) * 6
    with pytest.raises(forebay.NotFound, match="key 'nobody' "):
        table.by_key([*keys * 6, "nobody"], column="key")
    with pytest.raises(forebay.NotFound, match="key 'nobody' "):
        many.by_key(["nobody"], column="key")


def requests_of(node) -> int:
    of = node.metrics().items()
    return int(sum(n for name, n in of if name.startswith("forebay_requests_total{")))


def test_one_request_finds_and_reads_rows(table, people_table, people):
    keys = people_table["key"].to_pylist()
    table.by_key(keys[:1], column="key")
    before = requests_of(people)
    rows = table.by_key(keys[::-1], column="key", columns=["n"])
    assert requests_of(people) - before == 1
    assert rows.numpy()["n"].tolist() == list(range(PEOPLE))[::-1]


def test_a_node_that_was_restarted_indexes_keys_again(table, people_table, people, monkeypatch):
    keys = people_table["key"].to_pylist()
    table.by_key(keys[:1], column="key")
    # A node that does not know the dataset answers as one that knows no such key.
    called = []

    def gone(*args: object) -> None:
        called.append(args)
        raise forebay.NotFound("no dataset")

    monkeypatch.setattr("forebay._node.take_by_key", gone)
    assert table.by_key(keys[5:7], column="key").ids.tolist() == [5, 6]
    assert len(called) == 1


def of_old_nodes(*args: object) -> None:
    raise forebay.Unsupported("POST /v1/datasets/…/keys is not offered here")


def test_keys_of_a_node_that_has_none_are_indexed_here(table, people_table, own_cache, monkeypatch):
    monkeypatch.setattr("forebay._node.index_keys", of_old_nodes)
    keys = people_table["key"].to_pylist()
    wanted = [keys[700], keys[3]]
    assert table.by_key(wanted, column="key").ids.tolist() == [700, 3]
    with pytest.raises(forebay.NotFound, match="no row with key 'nobody'"):
        table.by_key(["nobody"], column="key")
    # Another process has the index.
    index = sorted(own_cache.glob("keys-*"))
    assert index
    copy = pickle.loads(pickle.dumps(table))
    assert copy.by_key([keys[1]], column="key").ids.tolist() == [1]
    assert sorted(own_cache.glob("keys-*")) == index


def test_keys_of_a_column_that_is_cast_are_indexed_here(table, own_cache):
    texts = table.cast({"n": "string"})
    assert texts.by_key(["17", "4"], column="n").ids.tolist() == [17, 4]
    assert sorted(own_cache.glob("keys-*"))


def test_a_key_whose_hash_another_key_has(table, people_table, own_cache, monkeypatch):
    import forebay._keys

    monkeypatch.setattr("forebay._node.index_keys", of_old_nodes)
    monkeypatch.setattr(forebay._keys, "_hash", lambda key, column: hash(str(key)[-1]) & 3)
    keys = people_table["key"].to_pylist()
    small = table.take(40)
    assert small.by_key(keys[:40][::-1], column="key").ids.tolist() == list(range(39, -1, -1))
    with pytest.raises(forebay.NotFound, match=f"'{keys[40]}'"):
        small.by_key([keys[0], keys[40]], column="key")


def test_a_million_keys_take_16_bytes_each():
    from forebay._keys import Keys

    keys = Keys(np.arange(1_000_000, dtype=np.uint64), np.arange(1_000_000, dtype=np.uint64))
    assert keys.nbytes <= 16_000_000
    copy = Keys.decode(keys.encode())
    assert (
        copy is not None and np.array_equal(copy.hashes, keys.hashes) and copy.nbytes <= 16_000_000
    )
    assert Keys.decode(keys.encode()[:-1]) is None


def test_describe(table, people):
    summary = table.describe(rows=PEOPLE)
    assert (summary.seen, summary.rows) == (PEOPLE, PEOPLE)
    n = summary.columns["n"]
    assert (n.type, n.nulls, n.low, n.high, n.mean) == ("Int32", 0, 0, 999, 499.5)
    assert summary.columns["score"].nulls == sum(i % 13 == 5 for i in range(PEOPLE))
    assert summary.columns["blob"].lengths == (0, 2.0, 4)
    assert "all 1,000 rows" in repr(summary) and "lang" in repr(summary)
    some = table.filter(forebay.col("n") > 100).describe(rows=64)
    assert some.seen == 64 and some.columns["n"].low == 101, "rows of the selection"
    assert "<table>" in some._repr_html_() and "64 of 899 rows" in some._repr_html_()
    with pytest.raises(forebay.InvalidRequest, match="rows=0"):
        table.describe(rows=0)


def test_rows_are_shown_as_a_table(table, people):
    rows = table.take([7, 5, 7, *range(900)])
    page = rows._repr_html_()
    assert page.count("<tr>") == 6 and "903 rows" in page and "<i>missing</i>" in page
    assert [f"<td>{n}</td>" in page for n in (7, 5, 0, 1, 2)] == [True, True, True, True, False]
    assert "of which" not in rows[:3]._repr_html_() and "0 rows" in rows[:0]._repr_html_()
    pictures = forebay.open("bk/pictures.tar", url=people.url).take(range(3))
    assert pictures._repr_html_().count('<img src="data:image/png;base64,iVBOR') == 3
    # Of several datasets, and more rows than one request brings.
    mixed = next(iter(forebay.mix([table, table.rename({"n": "m"})]).loader(8)))
    page = mixed._repr_html_()
    assert "<th>n</th>" in page and "<th>m</th>" in page and page.count("<tr>") == 6
    many = table.repeat(6).take(range(5 * len(table)))
    assert many._repr_html_().count("<tr>") == 6


def test_a_preview_shows_pictures_and_escapes_texts(table, people, tmp_path):
    tar = forebay.open("bk/pictures.tar", url=people.url)
    shown = tar._repr_html_()
    assert shown.count('<img src="data:image/png;base64,iVBOR') == 5
    text = tar.map(lambda row: row).rename({"txt": "<b>"})._repr_html_()
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert "<table>" in table._repr_html_() and "<i>missing</i>" in table._repr_html_()
    from forebay._look import PREVIEW_BYTES, _cell

    left = [PREVIEW_BYTES]
    assert _cell("<script>", left) == "&lt;script&gt;"
    assert _cell(b"RIFF\0\0\0\0WAVE" + b"\0" * 100, left).startswith("<audio controls src=")
    assert _cell(PNG + b"\0" * PREVIEW_BYTES, left).startswith("image/png, ")
    assert _cell(memoryview(b"\0\1\2"), left) == "3 bytes"
    assert len(_cell("x" * 10_000, left)) < 300


def test_rows_are_read_in_the_name_of_the_client_that_a_dataset_was_opened_with(people):
    def opened(token: str | None):
        client = forebay.Client(people.url, token=token)
        return forebay.open("bk/pictures.tar", client=client)

    one, same, other = opened("a"), opened("a"), opened("b")
    assert len(forebay.concatenate([one, same]).made_of) == 1
    both = forebay.concatenate([one, same, other])
    assert [base.client for base in both.made_of] == [one.client, other.client]
    assert both.id == forebay.concatenate([one, one, other]).id
    assert len(list(both)) == 3 * len(one)
