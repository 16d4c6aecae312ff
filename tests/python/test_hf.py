"""Datasets as those of Hugging Face's `datasets`: the same rows, dealt out and resumed by it."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import shutil
import subprocess
import sys
import threading

import datasets
import forebay
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.distributed import split_dataset_by_node
from forebay import _footers
from servers import Node
from tables import A_ROWS
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


@pytest.fixture(scope="module")
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


def plain(row) -> dict:
    """A row of Forebay's in Python's own types."""
    made = {}
    for name, value in row.items():
        value = bytes(value) if isinstance(value, memoryview) else value
        made[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return made


def ids(examples) -> list[int]:
    return [int(example["id"]) for example in examples]


class Fetched(list[int]):
    """The numbers of rows that are asked for."""

    ignored: frozenset[threading.Thread] = frozenset()

    def begin(self):
        """From here on, and not by loops that were given up: their threads read ahead."""
        self.ignored = frozenset(threading.enumerate()) - {threading.main_thread()}
        self.clear()


@pytest.fixture
def fetched(monkeypatch):
    numbers = Fetched()
    fetch = forebay.dataset.Dataset.fetch

    def counted(self, rows, columns=None):
        if threading.current_thread() not in numbers.ignored:
            numbers.extend(rows.tolist())
        return fetch(self, rows, columns)

    monkeypatch.setattr(forebay.dataset.Dataset, "fetch", counted)
    return numbers


def test_datasets_that_are_too_old_are_refused():
    script = "import datasets; datasets.__version__ = '4.6.1'; import forebay._hf"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "need Hugging Face datasets 4.7 or newer, and 4.6.1 is installed" in done.stderr


# The iterable one.


def test_its_examples_are_the_rows(ds):
    rows = ds.to_hf_iterable()
    assert isinstance(rows, datasets.IterableDataset) and rows.num_shards == 4
    assert list(rows) == [plain(row) for row in ds]
    assert rows.column_names == ds.columns
    assert rows.features["x"] == datasets.List(datasets.Value("float32"), length=3)
    assert rows.features["text"].dtype in ("string", "large_string")
    some = ds.select_columns(["id", "text"]).rename({"text": "caption"}).to_hf_iterable()
    assert next(iter(some)) == {"id": 0, "caption": "row 0"}
    batch = next(iter(rows.with_format("numpy").iter(batch_size=7)))
    assert batch["id"].tolist() == list(range(7)) and batch["x"].shape == (7, 3)
    assert ids(rows.filter(lambda row: row["id"] % 2).map(lambda row: {"id": -row["id"]})) == [
        -i for i in range(1, A_ROWS, 2)
    ]


def test_columns_of_json_are_what_they_say(tmp_path):
    rows = [
        {"a": 1, "list": [1, "x"], "of": {"k": [1]}},
        {"a": "x", "list": [], "of": {"k": {"é": None}}},
        {"a": None, "list": None, "of": None},
    ]
    big = [*rows, {"a": 123456789012345678901, "list": [None], "of": {"k": None}}]
    (tmp_path / "json").mkdir()
    for name, lines in (("rows", rows), ("big", big)):
        text = "".join(f"{json.dumps(row)}\n" for row in lines)
        (tmp_path / "json" / f"{name}.jsonl").write_text(text)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'json'}"])
    try:
        ds = forebay.open("json/rows.jsonl", url=node.url)
        assert ds.schema["a"] == "Json"
        made = ds.to_hf_iterable()
        assert list(made) == rows == list(ds.to_hf())
        assert list(made.map(dict)) == rows
        assert list(forebay.open("json/big.jsonl", url=node.url).to_hf_iterable()) == big
        said = pa.field("item", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
        deep = "[" * 100_000 + "]" * 100_000
        for name, text in (("broken", "{"), ("deep", deep)):
            table = pa.table({"l": pa.array([["1", text]], pa.list_(pa.string()))})
            table = table.cast(pa.schema([("l", pa.list_(said))]))
            pq.write_table(table, tmp_path / "json" / f"{name}.parquet")
            broken = forebay.open(f"json/{name}.parquet", url=node.url)
            with pytest.raises(forebay.InvalidRequest, match="column 'l' is of JSON, and has"):
                list(broken.to_hf_iterable())
            with pytest.raises(forebay.SampleFailed, match="is of JSON, and has .* it is row 0 of"):
                broken.write(f"json/new-{name}/", "jsonl", progress=False)
    finally:
        node.stop()


@pytest.mark.parametrize("shards", [12, 5])
def test_nodes_and_workers_deal_out_each_row_once(ds, shards):
    """With five shards, two nodes read all of them, and keep every second row."""
    seen = []
    for rank in range(2):
        mine = split_dataset_by_node(ds.to_hf_iterable(num_shards=shards), rank, 2)
        loader = DataLoader(mine, batch_size=None, num_workers=2)
        seen.append(ids(loader))
    assert sorted(seen[0] + seen[1]) == list(range(A_ROWS))
    assert min(map(len, seen)) == A_ROWS // 2


@pytest.mark.parametrize("way", ["examples", "tables", "cast", "nodes"])
def test_a_state_resumes_exactly(ds, way, fetched):
    """By itself, in Arrow tables (a format), with a column that is decoded, and one of two nodes
    that share shards; each in another object, as in another process.
    """

    def make():
        rows = ds.to_hf_iterable(num_shards=2 if way != "nodes" else 3)
        if way == "tables":
            return rows.with_format("numpy")
        if way == "cast":
            return rows.cast_column("size", datasets.Value("int32"))
        return split_dataset_by_node(rows, 1, 2) if way == "nodes" else rows

    everything = ids(make())
    assert len(everything) == (A_ROWS if way != "nodes" else A_ROWS // 2)
    for count in (0, 1, 37, 50, 51, len(everything) - 1, len(everything)):
        first = make()
        begun = iter(first)
        got = ids(next(begun) for _ in range(count))
        state = json.loads(json.dumps(first.state_dict()))
        again = make()
        again.load_state_dict(state)
        fetched.begin()
        assert got + ids(again) == everything, count
        if way == "examples":
            # Nothing was read twice, and nothing of what was given out.
            assert sorted(fetched) == everything[count:]


def test_a_loader_of_workers_resumes_in_the_middle_on_each_node(ds):
    def make(rank):
        mine = split_dataset_by_node(ds.to_hf_iterable(num_shards=12), rank, 2)
        return StatefulDataLoader(mine.select_columns(["id"]), batch_size=5, num_workers=2)

    rows = []
    for rank in range(2):
        whole = [batch["id"].tolist() for batch in make(rank)]
        begun = make(rank)
        first = []
        for batch in begun:
            first.append(batch["id"].tolist())
            if len(first) == 4:
                break
        state = begun.state_dict()
        again = make(rank)
        again.load_state_dict(state)
        rest = [batch["id"].tolist() for batch in again]
        assert first + rest == whole
        rows += [i for batch in whole for i in batch]
    assert sorted(rows) == list(range(A_ROWS))


def test_a_state_with_workers_that_gave_out_nothing_is_refused(ds):
    """It says the same whether they had not begun, or were resumed in the middle."""

    def make(state=None, workers=2):
        rows = ds.to_hf_iterable(num_shards=5).select_columns(["id"])
        loader = StatefulDataLoader(rows, batch_size=10, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    whole = [batch["id"].tolist() for batch in make()]
    begun = make()
    batches = iter(begun)
    next(batches)
    early = begun.state_dict()
    next(batches)
    both = begun.state_dict()
    assert [batch["id"].tolist() for batch in make(both)] == whole[2:]
    resumed = make(both)
    batches = iter(resumed)
    next(batches)
    for state in (make().state_dict(), early, resumed.state_dict()):
        with pytest.raises(forebay.InvalidRequest, match="has given out nothing since"):
            list(make(state))
    next(batches)
    assert [batch["id"].tolist() for batch in make(resumed.state_dict())] == whole[4:]
    # A single worker has all shards: it is a state of these.
    single = make(make(workers=1).state_dict(), workers=1)
    assert [i for batch in single for i in batch["id"].tolist()] == list(range(A_ROWS))


def test_epochs_take_shards_in_another_order_and_resume(ds):
    rows = ds.to_hf_iterable(num_shards=12)
    orders = []
    for epoch in range(3):
        rows.set_epoch(epoch)
        orders.append(ids(rows))
        assert sorted(orders[-1]) == list(range(A_ROWS))
    assert orders[0] == sorted(orders[0]) and orders[0] != orders[1] != orders[2]
    begun = iter(rows)
    first = ids(next(begun) for _ in range(40))
    again = ds.to_hf_iterable(num_shards=12)
    again.set_epoch(2)
    again.load_state_dict(rows.state_dict())
    assert first + ids(again) == orders[2]
    shuffled = ds.to_hf_iterable(num_shards=12).shuffle(seed=1, buffer_size=20)
    assert sorted(ids(shuffled)) == list(range(A_ROWS)) and ids(shuffled) != orders[0]
    more = ds.to_hf_iterable(num_shards=2).reshard()
    assert more.num_shards == 4 and ids(more) == list(range(A_ROWS))


@pytest.mark.parametrize("shuffle", [forebay.Full(), forebay.Block(2)])
def test_a_shuffle_is_that_of_the_plan_and_resumes_exactly(ds, shuffle):
    """Unlike that of datasets, which loses the rows in its buffer."""

    def make(epoch, **other):
        options = {"num_shards": 12, "shuffle": shuffle, "seed": 3, **other}
        rows = ds.to_hf_iterable(**options)
        rows.set_epoch(epoch)
        return rows

    loader = ds.loader(1, shuffle=shuffle, seed=3, columns=["id"], output="numpy")
    assert ids(make(0)) == [int(batch["id"][0]) for batch in loader]
    orders = [ids(make(epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(A_ROWS)) for order in orders)
    # Not only of shards: rows that were together are not.
    assert {i // 9 for i in orders[1][:9]} != {i // 9 for i in orders[0][:9]}
    begun = make(1)
    rows = iter(begun)
    first = ids(next(rows) for _ in range(60))
    again = make(1)
    again.load_state_dict(begun.state_dict())
    assert first + ids(again) == orders[1]
    for other in (make(1, seed=4), make(1, shuffle=None)):
        other.load_state_dict(begun.state_dict())
        with pytest.raises(forebay.InvalidRequest, match="another order"):
            next(iter(other))
    seen = []
    for rank in range(2):
        loader = DataLoader(split_dataset_by_node(make(1), rank, 2), batch_size=None, num_workers=2)
        seen += ids(loader)
    assert sorted(seen) == list(range(A_ROWS))
    with pytest.raises(forebay.InvalidRequest, match="seed="):
        make(0, seed=-1)
    with pytest.raises(TypeError, match="shuffle must be"):
        make(0, shuffle=16)


def test_composed_datasets_and_their_states(ds):
    parts = [ds.select(range(90, 10, -3)), ds.filter(forebay.col("id") >= 60)]
    of_both = forebay.concatenate(parts)
    expected = [plain(row) for row in of_both]
    rows = of_both.to_hf_iterable(num_shards=4)
    assert list(rows) == expected
    begun = iter(rows)
    first = [next(begun) for _ in range(29)]
    state = rows.state_dict()
    again = of_both.to_hf_iterable(num_shards=4)
    again.load_state_dict(state)
    assert first + list(again) == expected
    for other, problem in [
        (ds.to_hf_iterable(num_shards=4), "not one of tables/a"),
        (of_both.to_hf_iterable(num_shards=3), "other shards"),
        (split_dataset_by_node(of_both.to_hf_iterable(num_shards=4), 0, 2), "other shards"),
    ]:
        other.load_state_dict(state)
        with pytest.raises(forebay.InvalidRequest, match=problem):
            next(iter(other))


def test_samples_are_examples_if_they_are_dicts(ds):
    halves = ds.map(lambda row: {"half": row["id"] / 2})
    rows = halves.to_hf_iterable(num_shards=3)
    assert rows.features is None
    assert [e["half"] for e in rows] == [i / 2 for i in range(A_ROWS)]
    begun = iter(rows)
    first = [next(begun) for _ in range(40)]
    again = halves.to_hf_iterable(num_shards=3)
    again.load_state_dict(rows.state_dict())
    assert first + list(again) == list(rows)
    with pytest.raises(forebay.InvalidRequest, match="row 0 of .* is of type int"):
        next(iter(ds.map(lambda row: row["id"]).to_hf_iterable()))
    with pytest.raises(forebay.SampleFailed, match=r"row 1 of tables/a/1.parquet \(row 52 of"):
        list(ds.map(lambda row: {"id": 1 // (52 - row["id"])}).to_hf_iterable())


def test_shards_that_make_no_sense_are_refused(ds):
    for count in (0, -1, A_ROWS + 1, True, 1.5):
        with pytest.raises(forebay.InvalidRequest, match="num_shards="):
            ds.to_hf_iterable(num_shards=count)
    none = ds.filter(forebay.col("id") < 0)
    assert list(none.to_hf_iterable()) == [] and len(none.to_hf()) == 0
    assert none.to_hf().column_names == ds.columns


UNFINISHED = """
import forebay
from datasets.distributed import split_dataset_by_node

ds = forebay.open("tables/a/*.parquet")
begun = iter(split_dataset_by_node(ds.to_hf_iterable(), rank=0, world_size=2))
next(begun)
"""


def test_a_program_may_end_in_the_middle_of_a_loop(tables):
    run = [sys.executable, "-c", UNFINISHED]
    env = {**os.environ, "FOREBAY_NODE": tables.url}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr


def test_a_loop_survives_a_restart_of_the_node(tmp_path):
    import tables as of_tables

    of_tables.write(tmp_path / "tables")
    options = ["--origin", f"file://{tmp_path / 'tables'}"]
    node = Node("", [], tmp_path / "node", options=options)
    ds = forebay.open("tables/a/*.parquet", url=node.url)
    rows = iter(ds.to_hf_iterable(num_shards=48))
    first = ids(next(rows) for _ in range(3))
    node.stop()
    node = Node("", [], tmp_path / "node", options=options, listen=f"127.0.0.1:{node.port}")
    assert first + ids(rows) == list(range(A_ROWS))
    node.stop()


# Mixes.

#: Rows of an epoch: fewer than there are, so that each epoch has others.
MIXED_ROWS = 90


@pytest.fixture(scope="module")
def other(tables):
    return forebay.open("tables/b/*.parquet", url=tables.url)


@pytest.fixture
def mixed(ds, other):
    return forebay.mix([ds, other], [3, 2], epoch_rows=MIXED_ROWS)


def loaded(source, epochs=1, **order) -> list[list[int]]:
    """What a loader gives, epoch by epoch."""
    loader = source.loader(1, columns=["id"], output="numpy", **order)
    return [[int(batch["id"][0]) for batch in loader] for _ in range(epochs)]


@pytest.mark.parametrize("shuffle", [None, forebay.Full(), forebay.Block(2)])
@pytest.mark.parametrize("how", ["weights", "rows", "schedule"])
def test_a_mix_has_the_order_of_its_loader_in_each_epoch(ds, other, how, shuffle):
    if how == "rows":
        source = forebay.mix([ds, other])
    else:
        schedule = forebay.Schedule([(0, [0.9, 0.1]), (120, [0.5, 0.5])])
        weights = [3, 2] if how == "weights" else schedule
        source = forebay.mix([ds, other], weights, epoch_rows=MIXED_ROWS)
    expected = loaded(source, 3, shuffle=shuffle, seed=5)
    assert len({tuple(epoch) for epoch in expected}) == 3
    for shards in (None, 7, 1):
        rows = source.to_hf_iterable(num_shards=shards, shuffle=shuffle, seed=5)
        for epoch in (0, 2, 1):
            rows.set_epoch(epoch)
            assert ids(rows) == expected[epoch], (shards, epoch)
    # Epochs reach it through what datasets puts on top.
    rows = rows.map(lambda row: {"id": -row["id"]}).select_columns(["id"]).with_format("numpy")
    rows.set_epoch(2)
    assert [-i for i in ids(rows)] == expected[2]


def test_examples_of_a_mix_are_the_rows(ds, other, mixed):
    expected = [plain(row) for batch in mixed.loader(10, shuffle=forebay.Full()) for row in batch]
    rows = mixed.to_hf_iterable(shuffle=forebay.Full())
    assert rows.features == ds.to_hf_iterable().features and rows.column_names == ds.columns
    assert list(rows) == expected
    # Tables and single examples, and columns in another order.
    turned = forebay.mix([ds, other.select_columns(ds.columns[::-1])], [3, 2], epoch_rows=90)
    assert list(turned.to_hf_iterable(shuffle=forebay.Full())) == expected
    halves = [split_dataset_by_node(turned.to_hf_iterable(num_shards=3), r, 2) for r in range(2)]
    both = [list(half) for half in halves]
    in_order = [plain(row) for batch in mixed.loader(10) for row in batch]
    assert (both[0], both[1]) == (in_order[::2], in_order[1::2])
    # Of composed datasets, and of one.
    parts = [forebay.concatenate([ds.skip(90), other.take(9)]), other.filter(LATE)]
    made = forebay.mix(parts, [1, 1], epoch_rows=50)
    (expected_ids,) = loaded(made, shuffle=forebay.Block(2))
    assert ids(made.to_hf_iterable(shuffle=forebay.Block(2))) == expected_ids
    one = forebay.mix([other], epoch_rows=100)
    assert ids(one.to_hf_iterable()) == loaded(one)[0] and len(one) > len(other)


LATE = forebay.col("id") >= 1020


def test_nodes_and_workers_deal_out_a_mix(mixed):
    (expected,) = loaded(mixed, shuffle=forebay.Full(), seed=1)
    for shards in (12, 5):
        seen = []
        for rank in range(2):
            rows = mixed.to_hf_iterable(num_shards=shards, shuffle=forebay.Full(), seed=1)
            mine = split_dataset_by_node(rows, rank, 2)
            seen.append(ids(DataLoader(mine.select_columns(["id"]), batch_size=None)))
            workers = DataLoader(mine.select_columns(["id"]), batch_size=None, num_workers=2)
            assert sorted(ids(workers)) == sorted(seen[-1])
            # Each goes through the mix from its beginning to its end, and has its shares.
            if shards == 5:
                assert seen[-1] == expected[rank::2]
            of_b = sum(i >= 1000 for i in seen[-1])
            assert abs(of_b - 18) <= 2 and len(seen[-1]) in (44, 45, 46)
        assert sorted(seen[0] + seen[1]) == sorted(expected)


@pytest.mark.parametrize("way", ["examples", "tables", "nodes"])
def test_a_state_of_a_mix_resumes_exactly(mixed, way, fetched):
    def make(source=mixed, epoch=1, **other):
        options = {"num_shards": 6, "shuffle": forebay.Block(2), "seed": 3, **other}
        rows = source.to_hf_iterable(**options)
        if way == "tables":
            rows = rows.with_format("numpy")
        elif way == "nodes":
            rows = split_dataset_by_node(rows, 1, 2)
        rows.set_epoch(epoch)
        return rows

    everything = ids(make())
    whole = loaded(mixed, 2, shuffle=forebay.Block(2), seed=3)[1]
    # Of six shards, a node has every second one.
    of_node = whole[15:30] + whole[45:60] + whole[75:]
    assert everything == (of_node if way == "nodes" else whole)
    for count in (0, 1, 31, 44, len(everything) - 1, len(everything)):
        first = make()
        begun = iter(first)
        got = ids(next(begun) for _ in range(count))
        state = json.loads(json.dumps(first.state_dict()))
        again = make()
        again.load_state_dict(state)
        fetched.begin()
        assert got + ids(again) == everything, count
        if way == "examples":
            assert len(fetched) == len(everything) - count, "nothing of what was given out"
    a, b = mixed.datasets
    for others, problem in [
        ({"seed": 4}, "another order, of a mix of tables/a"),
        ({"shuffle": None}, "another order"),
        ({"num_shards": 4}, "other shards"),
        ({"source": forebay.mix([a, b], [1, 1], epoch_rows=MIXED_ROWS)}, "another order"),
        ({"source": forebay.mix([a, b], [3, 2], epoch_rows=MIXED_ROWS + 3)}, "another order"),
        ({"source": forebay.mix([b, a], [2, 3], epoch_rows=MIXED_ROWS)}, "not one of a mix of"),
        ({"source": forebay.mix([a, b.skip(1)], [3, 2], epoch_rows=90)}, "not one of a mix of"),
    ]:
        refused = make(**others)
        refused.load_state_dict(state)
        with pytest.raises(forebay.InvalidRequest, match=problem) as e:
            next(iter(refused))
        assert "the weights" in e.value.hint or "the selection" in e.value.hint


def test_a_loader_of_workers_resumes_a_mix_on_each_node(mixed):
    def make(rank, epoch):
        rows = mixed.to_hf_iterable(num_shards=12, shuffle=forebay.Full(), seed=1)
        mine = split_dataset_by_node(rows.select_columns(["id"]), rank, 2)
        mine.set_epoch(epoch)
        return StatefulDataLoader(mine, batch_size=5, num_workers=2)

    expected = loaded(mixed, 2, shuffle=forebay.Full(), seed=1)
    for epoch in range(2):
        rows = []
        for rank in range(2):
            whole = [batch["id"].tolist() for batch in make(rank, epoch)]
            begun = make(rank, epoch)
            first = []
            for batch in begun:
                first.append(batch["id"].tolist())
                if len(first) == 4:
                    break
            state = begun.state_dict()
            again = make(rank, epoch)
            again.load_state_dict(state)
            rest = [batch["id"].tolist() for batch in again]
            assert first + rest == whole
            rows += [i for batch in whole for i in batch]
        assert sorted(rows) == sorted(expected[epoch])


def test_what_datasets_shuffles_of_a_mix_is_an_epoch_of_it(mixed):
    expected = loaded(mixed, 3)
    rows = mixed.to_hf_iterable(num_shards=6)
    shuffled = rows.shuffle(buffer_size=20)
    assert sorted(ids(shuffled)) == sorted(expected[0]) and ids(shuffled) != expected[0]
    for seed in (2, 1 << 20):
        shuffled = rows.map(lambda row: row).shuffle(seed=seed, buffer_size=20)
        for epoch in range(3):
            shuffled.set_epoch(epoch)
            assert sorted(ids(shuffled)) == sorted(expected[epoch]) and ids(shuffled) != expected[0]
    rows.set_epoch(1 << 20)
    with pytest.raises(forebay.InvalidRequest, match="epoch 1,048,576 of a mix") as e:
        next(iter(rows))
    assert "set_epoch()" in e.value.hint
    rows = mixed.to_hf_iterable(num_shards=6)
    both = datasets.interleave_datasets([rows, rows.select_columns(rows.column_names)])
    both.set_epoch(1)
    # It ends as soon as one of them has ended.
    got = ids(both)[: 2 * MIXED_ROWS - 1]
    assert (got[::2], got[1::2]) == (expected[1], expected[1][:-1])


def test_samples_of_a_mix(ds, other):
    a = ds.map(lambda row: {"id": row["id"], "of": "a"})
    b = other.map(lambda row: {"id": row["id"], "of": "b", "more": 1})
    made = forebay.mix([a, b], [3, 2], epoch_rows=MIXED_ROWS)
    rows = made.to_hf_iterable(num_shards=4)
    assert rows.features is None
    expected = [sample for batch in made.loader(9) for sample in batch]
    assert list(rows) == expected and {len(sample) for sample in expected} == {2, 3}
    begun = iter(rows)
    first = [next(begun) for _ in range(40)]
    again = made.to_hf_iterable(num_shards=4)
    again.load_state_dict(rows.state_dict())
    assert first + list(again) == expected
    # Rows as they are, where a dataset makes no samples.
    some = forebay.mix([ds, b], [1, 1], epoch_rows=20)
    for row, sample in zip(
        some.to_hf_iterable(), (s for batch in some.loader(1) for s in batch), strict=True
    ):
        assert row == plain(sample)
    fails = forebay.mix([ds, other.map(lambda row: 1 // 0)], [1, 1], epoch_rows=20)
    with pytest.raises(forebay.SampleFailed, match=r"row 0 of tables/b/0.parquet \(row 0 of tab"):
        list(fails.to_hf_iterable())
    with pytest.raises(forebay.InvalidRequest, match="a mix of .* makes samples by a function"):
        made.to_hf()


def test_mixes_that_make_no_sense_are_refused(ds, other, mixed, tmp_path):
    for wrong, says in [
        (other.cast({"id": "int32"}), "'id' is Value.*int64.* there and Value.*int32.* here"),
        (other.rename({"text": "t"}), "'text' is .* there and missing here, 't' is missing there"),
    ]:
        differ = forebay.mix([ds, wrong])
        for make in (differ.to_hf_iterable, differ.to_hf):
            with pytest.raises(forebay.InvalidRequest, match=f"different columns: {says}"):
                make()
    for count in (0, MIXED_ROWS + 1, True):
        with pytest.raises(forebay.InvalidRequest, match="num_shards="):
            mixed.to_hf_iterable(num_shards=count)
    with pytest.raises(forebay.InvalidRequest, match="seed="):
        mixed.to_hf_iterable(seed=-1)
    for epoch in (-1, True, 1.5, 1 << 20):
        with pytest.raises(forebay.InvalidRequest, match="epoch"):
            mixed.to_hf(epoch=epoch, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_copy_of_a_mix_is_one_of_its_epochs(mixed, tmp_path, fetched):
    order = {"shuffle": forebay.Full(), "seed": 2}
    expected = loaded(mixed, 2, **order)
    for epoch in range(2):
        copied = mixed.to_hf(epoch=epoch, cache_dir=tmp_path, **order)
        assert len(copied) == MIXED_ROWS and copied["id"][:] == expected[epoch]
        assert copied["text"][:] == [f"row {i}" for i in expected[epoch]]
    del fetched[:]
    assert mixed.to_hf(epoch=1, cache_dir=tmp_path, **order)[:] == copied[:] and fetched == []
    assert len(list(tmp_path.iterdir())) == 2
    assert mixed.to_hf(cache_dir=tmp_path)["id"][:] == loaded(mixed)[0]
    a, b = mixed.datasets
    other_weights = forebay.mix([a, b], [1, 1], epoch_rows=MIXED_ROWS)
    assert other_weights.to_hf(cache_dir=tmp_path)["id"][:] == loaded(other_weights)[0]
    assert len(list(tmp_path.iterdir())) == 4


# The copy.


def test_a_copy_has_the_rows_and_is_made_once(ds, tmp_path, fetched):
    copied = ds.to_hf(cache_dir=tmp_path)
    assert isinstance(copied, datasets.Dataset) and len(copied) == A_ROWS
    assert sorted(set(fetched)) == list(range(A_ROWS))
    assert copied[:] == {name: [plain(row)[name] for row in ds] for name in ds.columns}
    assert copied[[5, 3, 3]]["id"] == [5, 3, 3] and copied.cache_files
    del fetched[:]
    again = ds.to_hf(cache_dir=tmp_path)
    assert again[:] == copied[:] and fetched == []
    # What is done to columns, and which rows there are, makes another copy.
    few = ds.select(range(50, 20, -2)).select_columns(["id"]).to_hf(cache_dir=tmp_path)
    assert few["id"][:] == list(range(50, 20, -2)) and few.column_names == ["id"]
    text = ds.cast({"size": "int32"}).rename({"text": "caption"}).to_hf(cache_dir=tmp_path)
    assert text.features["size"].dtype == "int32" and text[7]["caption"] == "row 7"
    assert len(list(tmp_path.iterdir())) == 3
    nodes = [split_dataset_by_node(copied, rank, 2) for rank in range(2)]
    seen = [ids(DataLoader(mine.select_columns("id"), num_workers=2)) for mine in nodes]
    assert seen[0] + seen[1] == list(range(A_ROWS))


def test_a_copy_goes_on_where_it_was_stopped(ds, tmp_path, monkeypatch, fetched):
    from forebay import _hf

    monkeypatch.setattr(_hf, "PART_BYTES", 1000)
    monkeypatch.setattr(_hf, "READ_MAX_ROWS", 10)
    fetch = forebay.dataset.Dataset.fetch

    def breaks(self, rows, columns=None):
        if len(rows) and rows[0] == 70 and len(rows) == 10:
            raise RuntimeError("killed")
        return fetch(self, rows, columns)

    with monkeypatch.context() as broken:
        broken.setattr(forebay.dataset.Dataset, "fetch", breaks)
        with pytest.raises(RuntimeError, match="killed"):
            ds.to_hf(cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    kept = [path.name for path in folder.glob("rows-*")]
    assert len(kept) >= 2
    (folder / ".new-1").write_bytes(b"of a process that was killed")
    end = max(int(name.split("-")[2].split(".")[0]) for name in kept)
    del fetched[:]
    copied = ds.to_hf(cache_dir=tmp_path)
    assert copied["id"][:] == list(range(A_ROWS))
    # Besides those that say how large rows are.
    assert len(fetched) == A_ROWS - end + _hf.SAMPLE_ROWS
    assert set(range(end, A_ROWS)) <= set(fetched)
    assert not list(folder.glob(".new-*"))


def test_a_copy_that_cannot_be_is_refused(ds, tmp_path, monkeypatch):
    with pytest.raises(forebay.InvalidRequest, match="by a function"):
        ds.map(lambda row: row).to_hf(cache_dir=tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(forebay.InvalidRequest, match="has 100 B free"):
        ds.to_hf(cache_dir=tmp_path)
    assert not list(tmp_path.rglob("rows-*"))


def test_a_whole_copy_is_read_where_nothing_may_be_written(ds, tmp_path, fetched):
    copied = ds.to_hf(cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "lock").unlink()
    # It cannot be opened, as on a disk that is only read.
    (folder / "lock").mkdir()
    del fetched[:]
    assert ds.to_hf(cache_dir=tmp_path)[:] == copied[:] and fetched == []
    (part,) = folder.glob("rows-*")
    part.unlink()
    with pytest.raises(OSError, match="lock"):
        ds.to_hf(cache_dir=tmp_path)


def test_what_is_called_a_part_of_a_copy_is_on_the_disk(ds, tmp_path, monkeypatch):
    synced, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))

    def replaced(new, path):
        assert os.stat(new).st_ino in synced, "a loss of power would leave a part without rows"
        replace(new, path)

    monkeypatch.setattr(os, "replace", replaced)
    assert len(ds.to_hf(cache_dir=tmp_path)) == A_ROWS and synced


def test_it_is_kept_in_the_cache_of_datasets(ds):
    copied = ds.take(5).to_hf()
    (file,) = copied.cache_files
    assert file["filename"].startswith(str(datasets.config.HF_DATASETS_CACHE))
    if "HF_HOME" not in os.environ and "HF_DATASETS_CACHE" not in os.environ:
        # Which is not the user's here.
        assert file["filename"].startswith(os.environ["XDG_CACHE_HOME"])


# Types.


def test_types_are_those_of_arrow(tmp_path):
    table = pa.table(
        {
            "id": pa.array([0, 1, 2], pa.int64()),
            "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
            "large": pa.array(["x", None, "z"], pa.large_string()),
            "lists": pa.array([[1], [], None], pa.list_(pa.int16())),
            "nested": pa.array([{"a": [{"b": 1}]}, {"a": []}, None]),
            "when": pa.array([datetime.datetime(2026, 1, 2)] * 3, pa.timestamp("us", "UTC")),
            "price": pa.array([decimal.Decimal("1.50")] * 3, pa.decimal128(10, 2)),
            "flag": pa.array([True, None, False]),
        }
    )
    maps = table.append_column(
        "pairs", pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    )
    bucket = tmp_path / "types"
    bucket.mkdir()
    pq.write_table(table, bucket / "0.parquet")
    pq.write_table(maps, bucket / "maps.parquet")
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{bucket}"])
    ds = forebay.open("types/0.parquet", url=node.url)
    rows, copied = list(ds.to_hf_iterable()), list(ds.to_hf(cache_dir=tmp_path / "copies"))
    assert rows == copied
    for name in table.column_names:
        assert [row[name] for row in rows] == table[name].to_pylist(), name
    of_maps = forebay.open("types/maps.parquet", url=node.url)
    with pytest.raises(forebay.InvalidRequest, match="column 'pairs' .* has the type map"):
        of_maps.to_hf_iterable()
    assert of_maps.select_columns(["id"]).to_hf(cache_dir=tmp_path / "copies")["id"][:] == [0, 1, 2]
    node.stop()


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """The same pictures with classes as datasets writes them: Parquet, its own folder (of streams
    of Arrow), and a file of Arrow.
    """
    root = tmp_path_factory.mktemp("labelled")
    pictures = [PIL.Image.new("RGB", (2, 3), (i, 0, 0)) for i in range(9)]
    given = datasets.Dataset.from_dict(
        {
            "image": pictures,
            "label": [i % 3 for i in range(9)],
            "tags": [[i % 2] for i in range(9)],
            "n": list(range(9)),
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=["a", "b", "c"]),
                "tags": datasets.List(datasets.ClassLabel(names=["no", "yes"])),
                "n": datasets.Value("int64"),
            }
        ),
    )
    for name in ("parquet", "other", "folder", "file", "plain"):
        (root / name).mkdir()
    given.to_parquet(root / "parquet/0.parquet")
    table = given.data.table
    with pa.ipc.new_file(root / "file/0.arrow", table.schema) as file:
        file.write_table(table)
    of_others = given.cast_column("label", datasets.ClassLabel(names=["x", "y", "z"]))
    of_others.to_parquet(root / "other/0.parquet")
    given.save_to_disk(root / "folder")
    pq.write_table(given.data.table.replace_schema_metadata(None), root / "plain/0.parquet")
    (root / "out").mkdir()
    node = Node("", [], root / "node", options=["--origin", f"labelled={root}"])
    yield given, lambda name, **more: forebay.open(f"labelled/{name}/", url=node.url, **more)
    node.stop()


@pytest.mark.parametrize("form", ["parquet", "folder", "file"])
def test_what_datasets_wrote_of_classes_and_pictures_comes_along(labelled, form, tmp_path):
    given, opened = labelled
    ds = opened(form)
    for made in (ds.to_hf(cache_dir=tmp_path), ds.to_hf_iterable()):
        assert made.features == given.features
        rows = list(made)
        assert [row["label"] for row in rows] == given["label"][:]
        assert rows[7]["image"].getpixel((1, 2)) == (7, 0, 0)
    named = ds.skip(2).rename({"label": "class"}).to_hf_iterable()
    assert named.features["class"].names == ["a", "b", "c"]
    assert next(iter(named))["class"] == 2
    # Of another type it is another column.
    cast = ds.cast({"label": "int32"}).select_columns(["label", "n"]).to_hf_iterable()
    assert cast.features["label"] == datasets.Value("int32")


def test_what_only_some_files_say_of_columns_is_left_out(labelled, tmp_path):
    given, opened = labelled
    plain = opened("plain").to_hf_iterable().features
    assert plain["label"] == datasets.Value("int64")
    for others in ("other", "plain"):
        parts = [opened("parquet"), opened(others)]
        for made in (
            forebay.concatenate(parts).to_hf_iterable(),
            forebay.mix(parts, [1, 1]).to_hf_iterable(),
        ):
            assert made.features["label"] == datasets.Value("int64")
            is_said = others == "other"
            assert (made.features["image"] == given.features["image"]) is is_said
            assert (made.features["tags"] == given.features["tags"]) is is_said
            assert len(list(made)) == 18
    # A copy with classes is another one than a copy without.
    folders = {
        opened(name).select_columns(["label", "n"]).to_hf(cache_dir=tmp_path).features["label"]
        == datasets.Value("int64")
        for name in ("parquet", "plain")
    }
    assert folders == {True, False}


def test_new_parquet_says_what_the_old_files_said(labelled, tmp_path):
    given, opened = labelled

    def written(name, ds):
        done = ds.write(f"labelled/out/{name}/", "parquet", shard_rows=4, progress=False)
        assert done.shards > 1
        files = []
        for info in ds.client.list(f"labelled/out/{name}/"):
            if info.key.endswith(".parquet"):
                files.append(tmp_path / f"{name}-{info.key.rsplit('/')[-1]}")
                files[-1].write_bytes(bytes(ds.client.get(f"labelled/{info.key}")))
        return datasets.Dataset.from_parquet(list(map(str, files)), cache_dir=str(tmp_path))

    whole = written("whole", opened("parquet"))
    assert whole.features == given.features and whole[7]["image"].getpixel((1, 2)) == (7, 0, 0)
    some = written("some", opened("folder").select_columns(["n", "label"]).rename({"label": "of"}))
    assert some.features["of"] == given.features["label"] and some["of"][:] == given["label"][:]
    both = written("both", forebay.concatenate([opened("parquet"), opened("other")]))
    assert both.features["label"] == datasets.Value("int64")
    assert both.features["tags"] == given.features["tags"] and len(both) == 18
    cast = written("cast", opened("parquet").cast({"label": "int32"}))
    assert cast.features["label"] == datasets.Value("int32")
    plain = written("plain", opened("plain"))
    assert plain.features["label"] == datasets.Value("int64")
    # Not what the files say of another column, which is not read.
    other = opened("parquet", schema={"n": "int64"}).rename({"n": "label"})
    assert written("renamed", other).features["label"] == datasets.Value("int64")
    assert other.to_hf_iterable().features["label"] == datasets.Value("int64")


def test_files_are_asked_once_for_what_datasets_said(labelled, monkeypatch):
    given, opened = labelled
    asked, get = [], _footers.metadata

    def counted(of):
        asked.append(of.name)
        return get(of)

    monkeypatch.setattr(_footers, "metadata", counted)
    ds = opened("parquet")
    parts = forebay.mix([ds.take(4), ds.skip(4), opened("other")], [1, 1, 1])
    assert parts.to_hf_iterable().features["image"] == given.features["image"]
    assert asked == ["labelled/parquet/", "labelled/other/"]
