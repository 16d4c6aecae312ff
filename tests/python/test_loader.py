"""Loaders, alone and inside PyTorch's DataLoaders: order, ranks, decoding, errors, and exact
resume.
"""

from __future__ import annotations

import collections
import copy
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import forebay
import numpy as np
import pyarrow as pa
import pytest
import tables
import torch
from forebay.checkpoint import StorageReader, StorageWriter
from forebay.torch import IterableDataset, LoaderDataset, Resumable, state_of
from servers import Node
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = float(os.environ.get("FOREBAY_TEST_CASES", "1"))
ROWS = tables.A_ROWS


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


@pytest.fixture
def pair(tables):
    return [forebay.open(f"tables/{name}/*.parquet", url=tables.url) for name in "ab"]


def ids(batches) -> list[int]:
    return [
        int(i) for batch in batches for i in (batch["id"] if isinstance(batch, dict) else batch.ids)
    ]


def test_batches_are_the_rows_in_the_order_of_the_plan(ds):
    loader = ds.loader(batch_size=10, uneven="pad", output="numpy")
    batches = list(loader)
    assert len(batches) == len(loader) == 11 and ids(batches)[:ROWS] == list(range(ROWS))
    assert (
        sum(int(b["__real__"].sum()) for b in batches) == ROWS
        and batches[-1]["__real__"].tolist() == [True] * 3 + [False] * 7
    )
    assert batches[0]["text"].tolist() == [f"row {i}" for i in range(10)]
    assert [bytes(d) for d in batches[0]["data"]] == [b"%d" % i * (i % 7) for i in range(10)]
    assert loader.last.real == 3 and loader.epoch == 1
    shuffled = ids(ds.loader(batch_size=10, shuffle=forebay.Full(), seed=5))
    assert shuffled != sorted(shuffled) and len(set(shuffled)) == 100
    assert (
        shuffled
        == ids(ds.loader(batch_size=10, shuffle="full", seed=5))
        != ids(ds.loader(batch_size=10, shuffle="full", seed=6))
    )


def test_each_loop_is_an_epoch_and_epochs_differ(ds):
    loader = ds.loader(batch_size=10, shuffle=forebay.Full())
    first, second = ids(loader), ids(loader)
    assert first != second and len(first) == len(second) == 100 and loader.epoch == 2
    assert ids(ds.loader(batch_size=10, shuffle=forebay.Full(), epochs=2)) == first + second
    endless = iter(ds.loader(batch_size=10, shuffle=forebay.Full(), epochs=math.inf))
    assert ids(next(endless) for _ in range(20)) == first + second
    loader.set_epoch(0)
    assert ids(loader) == first


def test_a_loop_that_was_left_is_gone_on_with(ds):
    loader = ds.loader(batch_size=10, shuffle=forebay.Full())
    whole, seen = ids(ds.loader(batch_size=10, shuffle=forebay.Full())), []
    for batch in loader:
        seen += ids([batch])
        if len(seen) == 40:
            break
    assert seen + ids(loader) == whole
    old = iter(loader)
    next(old)
    assert len(ids(iter(loader))) == 90
    with pytest.raises(forebay.InvalidRequest, match="another loop"):
        next(old)


@pytest.mark.parametrize("output", ["rows", "numpy", "torch", "arrow"])
def test_what_a_batch_is(ds, output):
    batch = next(iter(ds.loader(batch_size=4, output=output, columns=["id", "data"])))
    if output == "rows":
        assert (
            isinstance(batch, forebay.Rows)
            and batch[2] == {"id": 2, "data": b"22"}
            and batch.columns == ["id", "data"]
        )
        assert pickle.loads(pickle.dumps(batch))[3] == {"id": 3, "data": b"333"}
        assert pa.record_batch(batch).column("id").to_pylist() == [0, 1, 2, 3]
    elif output == "arrow":
        assert isinstance(batch, pa.RecordBatch) and batch.to_pydict() == {
            "id": [0, 1, 2, 3],
            "data": [b"", b"1", b"22", b"333"],
        }
    else:
        kind = {"numpy": np.ndarray, "torch": torch.Tensor}[output]
        assert isinstance(batch["id"], kind) and batch["id"].tolist() == [0, 1, 2, 3]
        assert bytes(batch["data"][3]) == b"333"


@pytest.mark.parametrize(
    ("first", "other", "told"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "samples have different keys (a; a, b)"),
        ({"a": 1}, {}, "samples have different keys (a; none)"),
        ((1,), (1, 2), "samples have different lengths (1; 2)"),
        ({"a": [1, 2]}, {"a": [1]}, "'a' of samples have different lengths (1; 2)"),
        (np.zeros(2), np.zeros(3), "samples have different shapes ((2,); (3,))"),
        (
            {"b": 1, "a": (1, np.zeros(2))},
            {"b": 2, "a": (1, np.zeros(3))},
            "item 1 of 'a' of samples have different shapes ((2,); (3,))",
        ),
        (np.zeros(2), None, "samples have different kinds (NoneType; ndarray)"),
        (None, np.zeros(2), "samples have different kinds (NoneType; ndarray)"),
        (1, {"a": 1}, "samples have different kinds (dict; int)"),
    ],
)
def test_samples_that_make_no_arrays_say_what_differs(ds, first, other, told):
    loader = ds.loader(5, decode=lambda row: other if row["id"] == 3 else first, output="numpy")
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("large", "other"),
    [
        (2**60 + 1, 0.5),
        (np.int64(-(2**53) - 1), np.float32(0.5)),
        (np.uint64(2**63 + 1), np.int64(1)),
        (2**63 + 1, -1),
        (np.array([2, 2**63 - 1]), np.array([0.5, 0.5])),
        (np.ma.array([2**53 + 1, 1], mask=[0, 1]), np.array([0.5, 0.5])),
        (np.array(2**64 - 1, np.uint64), np.array(1)),
    ],
)
def test_whole_numbers_of_samples_are_not_rounded(ds, large, other):
    def batch(*of):
        loader = ds.loader(2, decode=lambda row: {"n": of[row["id"]]}, output="numpy")
        return next(iter(loader))["n"]

    with pytest.raises(ValueError, match=r"^'n' of samples have -?\d+, which float64 does not"):
        batch(large, other)
    assert batch(2**60, 0.5).tolist() == [2**60, 0.5]
    assert batch(np.ma.array([2**60 + 1, 1], mask=[1, 0]), np.array([0.5, 2])).tolist() == [
        [None, 1],
        [0.5, 2],
    ]


@pytest.mark.parametrize("other", [None, "three", np.str_("three")])
def test_numbers_beside_something_else_stay_what_they_are(ds, other):
    loader = ds.loader(
        5, decode=lambda row: other if row["id"] == 3 else int(row["id"]), output="numpy"
    )
    assert next(iter(loader)) == [0, 1, 2, other, 4]


def decode(row):
    return {"id": row["id"], "size": len(row["data"])}


def plus(sample):
    return {**sample, "id": sample["id"] + 1}


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_samples_are_decoded_in_order(ds, threads):
    def slow(row):
        time.sleep(random.random() * 0.003)
        return decode(row)

    loader = ds.loader(batch_size=10, decode=slow, transform=plus, threads=threads, output="torch")
    batches = list(loader)
    assert torch.cat([b["id"] for b in batches]).tolist() == list(range(1, 101))
    assert torch.cat([b["size"] for b in batches]).tolist() == [
        len(b"%d" % i) * (i % 7) for i in range(100)
    ]
    stats = loader.stats(reset=True)
    assert (
        (stats.samples, stats.batches) == (100, 10)
        and stats.decode_s > 0.05
        and stats.samples_per_s > 0
        and stats.bytes > 0
    )
    assert (
        0 <= stats.waited_share <= 1 and "100 samples" in str(stats) and loader.stats().samples == 0
    )
    lists = next(iter(ds.loader(batch_size=3, decode=decode, threads=threads)))
    assert lists == [{"id": 0, "size": 0}, {"id": 1, "size": 1}, {"id": 2, "size": 4 - 2}]
    assert next(iter(ds.loader(batch_size=3, decode=decode, collate=len, threads=threads))) == 3


def test_a_sample_that_fails_says_what_its_row_has(tables):
    whole = forebay.open("tables/a/*.parquet", url=tables.url, format="objects")

    def hint(decode):
        with pytest.raises(forebay.SampleFailed) as failed:
            list(whole.loader(1, decode=decode))
        return failed.value.hint

    plain = "on_error= can replace or skip it"
    names = ", ".join(whole.columns)
    assert hint(lambda row: row["png"]) == f"the row has {names}; {plain}"
    bytes_of = "data is a memoryview: bytes(row['data']) where bytes are wanted"
    assert hint(lambda row: json.loads(row["data"])) == f"{bytes_of}; {plain}"
    assert hint(lambda row: row["data"].decode()) == f"{bytes_of}; {plain}"
    for other in (
        lambda row: {}[3],
        lambda row: {}["data"],
        lambda row: "x".nothing,
        lambda row: 1 / 0,
    ):
        assert hint(other) == plain


@pytest.mark.parametrize("threads", [0, 3])
def test_a_sample_that_fails_names_its_file_and_row(ds, threads):
    def fussy(row):
        if row["id"] in (57, 58):
            raise KeyError("no such class")
        return row["id"]

    loader = ds.loader(batch_size=10, decode=fussy, threads=threads)
    seen = []
    with pytest.raises(forebay.SampleFailed) as failed:
        for batch in loader:
            seen += batch
    assert seen == list(range(50)), "what comes before it is handed out"
    assert "row 6 of tables/a/1.parquet (row 57 of the dataset): KeyError: 'no such class'" in str(
        failed.value
    )
    assert (failed.value.row, failed.value.file, failed.value.row_in_file) == (
        57,
        "tables/a/1.parquet",
        6,
    )
    assert (
        isinstance(failed.value.__cause__, KeyError)
        and pickle.loads(pickle.dumps(failed.value)).file == "tables/a/1.parquet"
    )
    assert loader.state_dict()["position"] == 50, "the batch was not yielded"
    instead = ds.loader(batch_size=10, decode=fussy, threads=threads, on_error=lambda e: -e.row)
    assert [s for b in instead for s in b] == [-i if i in (57, 58) else i for i in range(100)]


@pytest.mark.parametrize("uneven", ["drop", "pad", "repeat"])
def test_ranks_have_equal_steps_and_share_the_order(ds, uneven):
    for world in (1, 2, 3, 7):
        loaders = [
            ds.loader(
                batch_size=5,
                shuffle="full",
                rank=r,
                world_size=world,
                uneven=uneven,
                output="numpy",
            )
            for r in range(world)
        ]
        rounds = list(zip(*loaders, strict=True))
        assert (
            len(rounds)
            == len(loaders[0])
            == (ROWS // (5 * world) if uneven == "drop" else -(-ROWS // (5 * world)))
        )
        order = ids(b for r in rounds for b in r)
        whole = ids(ds.loader(batch_size=1, shuffle="full"))
        assert order[:ROWS] == whole[: len(order)]
        assert len({repr(loader.state_dict()) for loader in loaders}) == 1


def test_the_rank_is_that_of_the_environment(ds, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = ds.loader(batch_size=10)
    assert ids([next(iter(loader))]) == list(range(20, 30)) and "rank 2 of 3" in repr(loader)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match="RANK=3"):
        next(iter(ds.loader(batch_size=10)))


def test_a_loop_over_rows_gives_what_indexing_gives(pair):
    mixed = next(iter(forebay.mix(pair, [3, 1], epoch_rows=400).loader(batch_size=20)))
    whole = pair[0].take(range(5, 25))
    for rows in (whole, whole[3:11], whole[::-2], whole[5:5], mixed, mixed[4:9]):
        assert list(rows) == [rows[i] for i in range(len(rows))]
    assert len(list(mixed)) == 20 and len(list(whole[::-2])) == 10


def test_mixes(pair):
    a, b = pair
    mixed = forebay.mix([a, b], [3, 1], epoch_rows=400)
    assert len(mixed) == 400 and "75.0% tables/a" in repr(mixed)
    got = list(mixed.loader(batch_size=20, output="numpy"))
    values = np.array(ids(got))
    assert len(values) == 400 and (values < 1000).sum() == 300, "exact parts"
    assert all(
        t == f"row {i}" for batch in got for t, i in zip(batch["text"], batch["id"], strict=True)
    )
    rows = next(iter(mixed.loader(batch_size=20)))
    assert (
        rows.sources.dtype == np.uint32
        and [r["id"] >= 1000 for r in rows] == rows.sources.astype(bool).tolist()
    )
    assert pa.record_batch(rows).column("id").to_pylist() == [r["id"] for r in rows] and [
        r["id"] for r in rows[3:6]
    ] == [rows[i]["id"] for i in (3, 4, 5)]
    # Each with its own columns, made alike by a decode for each.
    a.decoder, b.decoder = (lambda row: ("a", row["id"])), (lambda row: ("b", row["id"]))
    assert all(
        (kind == "b") == (i >= 1000) for batch in mixed.loader(batch_size=10) for kind, i in batch
    )
    for wrong in (
        ([], [a]),
        ([a, b], [1]),
        ([a, b], [1, 0]),
        ([a, b], [1, math.nan]),
        ([], None),
        (a,),
        (5,),
    ):
        with pytest.raises(forebay.InvalidRequest):
            forebay.mix(*wrong)
    for wrong in ({0: 1, 1: 1}, 5, "11", ["a", "b"]):
        with pytest.raises(TypeError, match="weights must be a list"):
            forebay.mix([a, b], wrong)
    for wrong in (0, 1.5, True, 10**30):
        with pytest.raises(forebay.InvalidRequest, match="epoch_rows is"):
            forebay.mix([a], epoch_rows=wrong)
    with pytest.raises(forebay.InvalidRequest, match="tables/a.* has no rows"):
        forebay.mix([a.take(0), b])
    with pytest.raises(forebay.InvalidRequest, match="^tables/b.* would make up"):
        forebay.mix([a, b], [1, 1e-30]).loader(10)


@pytest.mark.parametrize("how", ["pull", "decode", "threads"])
def test_a_loader_is_left_without_a_trace(ds, how):
    import gc

    before = threading.active_count()
    options = {
        "pull": {},
        "decode": {"decode": decode, "threads": 0},
        "threads": {"decode": decode, "threads": 2},
    }[how]
    for _ in range(5):
        for _ in ds.loader(batch_size=10, **options):
            break
    gc.collect()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("how", ["loader", "torch", "DataLoader", "collate", "packs"])
def test_a_loop_that_fails_leaves_no_thread(ds, how, error):
    import gc

    def fails(row):
        if "id" not in row or row["id"] == 50:
            raise error
        return int(row["id"])

    def tokenize(text):
        raise error

    options = {
        "collate": {"collate": lambda rows: fails(rows[0])},
        "packs": {"pack": forebay.Pack(8, column="text", tokenize=tokenize)},
    }.get(how, {"decode": fails})
    before = threading.active_count()
    for _ in range(2):
        loader = ds.loader(10, threads=2, **options)
        loop = loader if how == "loader" else loader.torch()
        if how == "DataLoader":
            loop = DataLoader(loop, batch_size=None)
        batches = iter(loop)
        with pytest.raises((forebay.SampleFailed, error)) as failed:
            for _ in batches:
                pass
        if how != "loader":
            # It is still the same for whoever asks again.
            with pytest.raises(failed.type):
                next(batches)
    del loader, loop, batches, failed
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_what_a_signal_handler_raises_ends_no_iteration(ds):
    """A limit of the time that a batch may take, for example."""

    class Late(Exception):
        pass

    def late(*_):
        raise Late

    waits = threading.Event()

    def decode(row):
        assert waits.wait(60)
        return int(row["id"])

    batches = iter(ds.loader(10, threads=2, decode=decode).torch())
    before = signal.signal(signal.SIGUSR1, late)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Late):
            next(batches)
    finally:
        signal.signal(signal.SIGUSR1, before)
        waits.set()
    assert len(next(batches)) == 10


@pytest.mark.parametrize("progress", [None, True])
def test_a_loop_with_a_progress_line_is_dropped_when_it_is_left(ds, capsys, progress):
    import gc

    before = threading.active_count()
    gc.disable()
    try:
        for _ in ds.loader(batch_size=10, progress=progress):
            break
        deadline = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        gc.enable()
    assert threading.active_count() <= before
    drawn = capsys.readouterr().err
    assert drawn.count("\n") == bool(progress) and drawn.endswith("\n" if progress else "")


@pytest.mark.parametrize("uneven", ["drop", "pad", "repeat"])
def test_a_progress_line_of_several_epochs_says_so_and_ends_with_all_rows(ds, capsys, uneven):
    list(ds.loader(7, epochs=2, rank=2, world_size=3, uneven=uneven, progress=True))
    drawn = capsys.readouterr().err.split("\r")
    total = 2 * ROWS
    assert all(line.startswith("epochs 0-1  ") for line in drawn[1:])
    assert f" 21/{total:,} rows" in drawn[1] and f"100%  {total:,}/{total:,} rows" in drawn[-1]


def test_a_progress_line_of_a_loop_without_end_names_its_epoch(ds, capsys, monkeypatch):
    monkeypatch.setattr(forebay._progress, "REDRAW_SECONDS", 0)
    loader = ds.loader(ROWS, epochs=math.inf, progress=True)
    list(itertools.islice(loader, 3))
    drawn = capsys.readouterr().err.rstrip().split("\r")
    assert [line.split("  ")[:2] for line in drawn[1:]] == [
        [f"epoch {n}", f"{(n + 1) * ROWS:,} rows"] for n in range(3)
    ]


def test_wrong_arguments(ds, monkeypatch):
    for wrong in (
        {},
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": 10, "shuffle": True},
        {"batch_size": 10, "shuffle": "random"},
        {"batch_size": 10, "seed": -1},
        {"batch_size": 10, "epochs": 0},
        {"batch_size": 10, "uneven": "ignore"},
        {"batch_size": 10, "rank": 1},
        {"batch_size": 10, "rank": 2, "world_size": 2},
        {"batch_size": 10, "output": "tensor"},
        {"batch_size": 10, "threads": -1},
        {"batch_size": 10, "prefetch": -1},
        {"batch_size": 10, "on_error": "ignore"},
        {"batch_size": 10, "max_skipped": 5},
        {"batch_size": 10, "retry_for": -1},
        {"batch_size": 10, "retry_for": "30"},
        {"batch_size": 10, "retry_for": math.nan},
        {"batch_size": 10, "retry_for": np.array([1.0])},
        {"batch_size": 10, "max_total": 5},
        {"batch_size": 10, "too_long": "skip"},
        {"max_total": 5, "length": "size", "too_long": "cut"},
        {"batch_size": 10, "connections": 3},
        {"batch_size": 10, "pin_memory": True},
        {"batch_size": 10, "lookahead": 5},
        {"batch_size": 10, "padded": True},
        {"batch_size": 10, "length": 5},
        {"batch_size": 10, "decode": 5},
        {"batch_size": 10, "transform": "image"},
        {"batch_size": 10, "collate": 5},
        {"batch_size": 10, "job": 5},
        {"batch_size": 10, "columns": 5},
        {"batch_size": 10, "epochs": True},
        {"batch_size": 10, "epochs": 2.0},
        {"batch_size": 10, "epochs": 10**30},
        {"batch_size": 1 << 40},
        {"batch_size": np.array([10])},
        {"length": "size", "max_total": 10**30},
        {"max_total": 5, "length": "size", "lookahead": 1 << 30},
        {"batch_size": 10, "stream": True, "connections": 1000},
        {"batch_size": 10, "rank": 0, "world_size": 1 << 30},
        {"batch_size": 10, "world_size": 2, "rank": True},
        {"batch_size": 10, "world_size": 2.0, "rank": 0},
    ):
        with pytest.raises((ValueError, TypeError), match=next(reversed(wrong), "size")):
            ds.loader(**wrong)
    with pytest.raises(forebay.InvalidRequest):
        list(ds.loader(batch_size=ROWS + 1))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match="needs PyTorch: pip install torch"):
            ds.loader(batch_size=10, output="torch")
    for make in (
        lambda: forebay.Block(0),
        lambda: forebay.Window(-1),
        lambda: forebay.Block(True),
        lambda: forebay.Block(10**30),
        lambda: forebay.Window(10**30),
    ):
        with pytest.raises(ValueError, match="Block|Window"):
            make()


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, torch.tensor])
def test_numbers_of_libraries_are_whole_numbers(ds, number):
    def batches(n, **options):
        loader = ds.loader(
            n(5),
            shuffle=forebay.Block(n(2)),
            seed=n(3),
            epochs=n(2),
            rank=n(1),
            world_size=n(2),
            threads=n(1),
            prefetch=n(2),
            retry_for=n(30),
            **options,
        )
        assert type(loader.options.retry_for) is float
        loader.load_state_dict({**loader.state_dict(), "position": n(20)})
        return ids(loader), loader.state_dict()

    assert batches(number) == batches(int)
    bounded = {"max_total": number(40), "length": "size", "lookahead": number(30)}
    assert batches(number, **bounded) == batches(int, max_total=40, length="size", lookahead=30)
    streamed = {"connections": number(2), "window_bytes": number(100)}
    assert batches(number, stream=True, **streamed)[0] == batches(int)[0]
    rows = forebay.mix([ds], epoch_rows=number(60)).repeat(number(2)).loader(10)
    assert rows.rows_per_epoch == 120 and pickle.loads(pickle.dumps(rows)).rows_per_epoch == 120
    assert len(ds.repeat(number(2))) == 2 * ROWS and ds.describe(number(7)).seen == 7
    parts = ds.train_test_split(0.1, seed=number(3))
    assert parts.test.steps == ds.train_test_split(0.1, seed=3).test.steps
    assert forebay.Window(number(9)) == forebay.Window(9)
    assert forebay.Pack(number(9), pad_id=number(1)).document() == forebay.Pack(9).document()


def test_states_of_something_else_are_refused(ds, pair):
    loader = ds.loader(batch_size=10, shuffle="full", seed=1)
    state = loader.state_dict()
    for other in (
        ds.loader(batch_size=10, shuffle="full", seed=2),
        pair[1].loader(batch_size=10, shuffle="full", seed=1),
    ):
        with pytest.raises(forebay.InvalidRequest):
            other.load_state_dict(state)
    for bad in (None, [], "state"):
        with pytest.raises(forebay.InvalidRequest, match=r"the dict that state_dict\(\) returned"):
            loader.load_state_dict(bad)
    for bad in (
        {},
        {**state, "position": 5.0},
        {**state, "position": -1},
        {**state, "epoch": 10**30},
        {**state, "epoch": True},
        {**state, "plan": None},
        {**state, "position": ds},
    ):
        with pytest.raises(forebay.InvalidRequest, match="not a state of a loader"):
            loader.load_state_dict(bad)


def test_batches_bounded_by_length(ds, pair):
    bounds = {
        "max_total": 40,
        "length": "size",
        "shuffle": "full",
        "seed": 3,
        "lookahead": 30,
        "uneven": "pad",
    }
    batches = [b["size"] for b in ds.loader(output="numpy", **bounds)]
    assert all(b.sum() <= 40 for b in batches) and sum(map(len, batches)) == ROWS
    assert np.mean([b.sum() for b in batches]) > 25, "batches are filled"
    padded = [b["size"] for b in ds.loader(output="numpy", padded=True, **bounds)]
    assert all(b.max() * len(b) <= 40 for b in padded)
    array = ds.lengths("size")
    assert ids(ds.loader(**{**bounds, "length": array})) == ids(ds.loader(**bounds))
    few = [len(b) for b in ds.loader(batch_size=3, **bounds)]
    assert max(few) == 3
    with pytest.raises(TypeError):
        len(ds.loader(**bounds))
    for wrong in (array[:-1], array.astype(float), np.zeros((ROWS, 2), int), -np.ones(ROWS, int)):
        with pytest.raises(forebay.InvalidRequest):
            list(ds.loader(**{**bounds, "length": wrong}))
    mixed = forebay.mix(pair, epoch_rows=200)
    assert sum(len(b) for b in mixed.loader(**bounds)) == 200


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_state_after_the_last_bounded_batch_is_in_the_next_epoch(ds, world, workers):
    """What is left of an epoch makes no step, and a loop that goes on there has the next one."""

    def make(rank):
        options = {"max_total": 40, "length": "size", "shuffle": "full", "seed": 3}
        place = {"rank": rank, "world_size": world}
        loader = ds.loader(**options, **place, columns=["id"], output="torch")
        if workers is None:
            return loader
        return Resumable(DataLoader(loader.torch(), batch_size=None, num_workers=workers))

    rank = world - 1
    own = make(rank)
    states = [own.state_dict() for _ in own]
    assert [state["epoch"] for state in states] == [0] * (len(states) - 1) + [1]
    assert len(states) > 1 and own.state_dict() == states[-1]
    resumed = make(rank)
    resumed.load_state_dict(states[-1])
    assert ids(resumed) == ids(own) != []


def test_an_epoch_without_a_step_is_told_and_not_passed(tmp_path):
    import pyarrow.parquet as pq

    (tmp_path / "few").mkdir()
    table = pa.table({"id": range(4), "size": [6, 5, 4, 3]})
    pq.write_table(table, tmp_path / "few" / "a.parquet")
    client = forebay.Client(origin=f"file://{tmp_path / 'few'}", cache=f"{tmp_path / 'cache'}:1GiB")
    options = {"max_total": 10, "length": "size", "shuffle": "full", "lookahead": 2, "seed": 3}
    ds = forebay.open("few/a.parquet", client=client)
    loader = ds.loader(**options, epochs=math.inf, rank=0, world_size=3)
    epochs = []
    # Of these orders, those of epochs 0, 1 and 3 make three batches, and that of epoch 2 makes two.
    with pytest.raises(forebay.InvalidRequest, match="makes 2 batches, less than one for each"):
        for _ in loader:
            epochs.append(loader.last.epoch)
    assert epochs == [0, 1]


def test_batches_bounded_by_length_are_pushed(ds, pair):
    bounds = {"max_total": 40, "length": "size", "shuffle": "full", "seed": 3, "lookahead": 30}
    rest = ds.train_test_split(0.4, seed=1).train
    for of in (ds, forebay.mix(pair, epoch_rows=200), rest):
        for more in ({"padded": True}, {"batch_size": 3}, {"uneven": "pad", "world_size": 3}):
            rank = {"rank": 1} if "world_size" in more else {}
            kinds = {**bounds, **more, **rank, "epochs": 2}
            pulled, pushed = of.loader(**kinds), of.loader(**kinds, stream=True, connections=3)
            for a, b in zip(pulled, pushed, strict=True):
                assert a.ids.tolist() == b.ids.tolist()
                assert pa.record_batch(a) == pa.record_batch(b)
                assert pulled.state_dict() == pushed.state_dict()
    with pytest.raises(forebay.InvalidRequest, match="looks at most 262144 rows ahead"):
        next(iter(ds.loader(**{**bounds, "lookahead": 1 << 20}, stream=True)))
    lengths = ds.lengths("size")
    lengths[17] = 1000
    with pytest.raises(forebay.InvalidRequest, match="1 of 103 rows of .* are longer"):
        next(iter(ds.loader(**{**bounds, "length": lengths}, stream=True)))


def test_bounded_batches_are_resumed_exactly(ds):
    rng = random.Random(SEED)
    print(f"FOREBAY_TEST_SEED={SEED}")
    bounds = {
        "max_total": 40,
        "length": ds.lengths("size"),
        "shuffle": "full",
        "seed": 3,
        "lookahead": 30,
        "uneven": "pad",
        "epochs": 2,
    }
    truth = sorted(ids(ds.loader(**bounds)))
    for _ in range(max(1, int(4 * CASES))):
        state, seen = None, []
        while state is None or state["epoch"] < 2:
            world = rng.choice([1, 2, 3])
            loaders = [
                ds.loader(rank=r, world_size=world, stream=rng.random() < 0.5, **bounds)
                for r in range(world)
            ]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            left = rng.randrange(1, 6)
            for batches in zip(*loaders, strict=True):
                for loader, batch in zip(loaders, batches, strict=True):
                    seen += [int(i) for i in batch.ids[: loader.last.real]]
                left -= 1
                if left == 0:
                    break
            state = loaders[0].state_dict()
            assert all(loader.state_dict() == state for loader in loaders)
        assert sorted(seen) == truth, f"FOREBAY_TEST_SEED={SEED}"
    resumed = ds.loader(**{**bounds, "max_total": 50})
    middle = ds.loader(**bounds)
    next(iter(middle))
    with pytest.raises(forebay.InvalidRequest):
        resumed.load_state_dict(middle.state_dict())
    with pytest.raises(forebay.InvalidRequest, match="bounds"):
        ds.loader(10, shuffle="full", seed=3).load_state_dict(middle.state_dict())


def test_rows_that_are_too_long_for_a_batch(ds, caplog):
    """One row that no batch can hold: named before the first batch, a batch of its own, or left
    out.
    """
    lengths = ds.lengths("size")
    lengths[17] = 1000
    bounds = {"max_total": 40, "length": lengths, "shuffle": "full", "seed": 3, "lookahead": 30}
    loader = ds.loader(**bounds)
    with pytest.raises(forebay.InvalidRequest) as caught:
        next(iter(loader))
    place = ds.locate(17)
    for part in ("1 of", ds.name, "row 17", "1000", place.file, f"row {place.row_in_file}"):
        assert part in caught.value.message
    assert '"alone"' in caught.value.hint and '"skip"' in caught.value.hint

    caplog.set_level("WARNING", logger="forebay")
    alone = [batch.ids.tolist() for batch in ds.loader(too_long="alone", **bounds)]
    assert [17] in alone and sorted(itertools.chain(*alone)) == list(range(ROWS))
    assert "1 of" in caplog.text and "batch of its own" in caplog.text
    caplog.clear()
    skip = [batch.ids.tolist() for batch in ds.loader(too_long="skip", **bounds)]
    assert sorted(itertools.chain(*skip)) == [row for row in range(ROWS) if row != 17]
    assert "left out" in caplog.text

    # If resumed in the middle of a look-ahead window, the rule is a part of the bounds.
    for rule, truth in (("alone", alone), ("skip", skip)):
        for stop in range(1, len(truth)):
            first, rest = (ds.loader(too_long=rule, **bounds) for _ in range(2))
            seen = [batch.ids.tolist() for batch in itertools.islice(first, stop)]
            rest.load_state_dict(first.state_dict())
            assert seen + [batch.ids.tolist() for batch in rest] == truth, (rule, stop)
    within = ds.loader(too_long="skip", **bounds)
    next(iter(within))
    assert within.state_dict()["within"]["batching"]["bounded"]["too_long"] == "skip"
    with pytest.raises(forebay.InvalidRequest, match="bounds"):
        ds.loader(too_long="alone", **bounds).load_state_dict(within.state_dict())
    with pytest.raises(forebay.InvalidRequest, match="0 batches"):
        next(iter(ds.loader(**{**bounds, "length": lengths + 1000}, too_long="skip")))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_stream_yields_what_pulling_yields(pair, tables, mixed):
    source = forebay.mix(pair, [2, 1], epoch_rows=90) if mixed else pair[0]
    options = {
        "batch_size": 8,
        "shuffle": forebay.Block(3),
        "seed": 4,
        "uneven": "pad",
        "epochs": 2,
        "output": "numpy",
    }
    pulled = [
        (b["id"].tolist(), [bytes(d) for d in b["data"]], b["__real__"].tolist())
        for b in source.loader(**options)
    ]
    for connections in (None, 1, 3):
        loader = source.loader(
            stream=True, connections=connections, window_bytes=1 << 20, **options
        )
        assert [
            (b["id"].tolist(), [bytes(d) for d in b["data"]], b["__real__"].tolist())
            for b in loader
        ] == pulled
        assert loader.epoch == 2 and loader.stats().samples == sum(
            sum(real) for _, _, real in pulled
        )
    # A state of one can be loaded into the other.
    streamed = source.loader(stream=True, **options)
    first = [b["id"].tolist() for _, b in zip(range(5), streamed, strict=False)]
    rest = source.loader(**options)
    rest.load_state_dict(streamed.state_dict())
    assert first + [b["id"].tolist() for b in rest] == [i for i, _, _ in pulled]


Named = collections.namedtuple("Named", "id more")


@pytest.mark.parametrize("threads", [0, 2])
def test_bytes_of_samples_are_a_list_beside_tensors(ds, threads):
    def pair(row):
        return {"id": row["id"], "first": row["data"][:1], "both": (row["data"], row["text"])}

    expected = ds.take(range(10))
    batch = next(iter(ds.map(pair).loader(10, output="torch", threads=threads)))
    assert batch["id"].tolist() == [r["id"] for r in expected]
    assert batch["first"] == [bytes(r["data"][:1]) for r in expected]
    assert list(batch["both"][0]) == [bytes(r["data"]) for r in expected]

    def named(row):
        return Named(row["id"], collections.OrderedDict(data=row["data"]))

    batch = next(iter(ds.map(named).loader(10, output="torch", threads=threads)))
    assert isinstance(batch, Named) and batch.id.tolist() == [r["id"] for r in expected]
    assert type(batch.more) is collections.OrderedDict
    assert batch.more["data"] == [bytes(r["data"]) for r in expected]


@pytest.mark.parametrize("threads", [0, 2])
def test_which_part_of_samples_makes_no_tensor_is_told(ds, threads):
    def ragged(row):
        return {"id": row["id"], "in": [row["id"], np.arange(row["id"])]}

    def some(row):
        return {"id": row["id"], "label": row["id"] or None}

    for decode, error, part in (
        (ragged, RuntimeError, "item 1 of 'in' of"),
        (some, TypeError, "'label' of"),
        (lambda row: {str(row["id"]): 1}, KeyError, "of these samples"),
    ):
        with pytest.raises(error) as failed:
            next(iter(ds.loader(10, decode=decode, output="torch", threads=threads)))
        assert any(part in note for note in failed.value.__notes__)


def test_a_stream_brings_chosen_columns_and_is_decoded_in_threads(ds):
    loader = ds.loader(
        batch_size=10, stream=True, columns=["id", "data"], decode=decode, threads=3, output="torch"
    )
    assert torch.cat([b["id"] for b in loader]).tolist() == list(range(100))
    assert next(iter(ds.loader(batch_size=10, stream=True, columns=["text"]))).columns == ["text"]

    def fussy(row):
        raise KeyError("no such class")

    with pytest.raises(forebay.SampleFailed, match="row 0 of tables/a/0.parquet"):
        list(ds.loader(batch_size=10, stream=True, decode=fussy))


def test_a_stream_is_for_one_process(ds):
    data = ds.loader(batch_size=8, stream=True, decode=tagged, output="torch").torch()
    assert sum(len(b["id"]) for b in DataLoader(data, batch_size=None)) == 96
    with pytest.raises(forebay.InvalidRequest, match="one process"):
        list(batches_of(data, 1, False))


def test_a_stream_from_two_nodes(ds, tables, tmp_path):
    directory = tables.directory.parent / "tables"
    other = Node("", [], tmp_path, options=["--origin", f"file://{directory}"])
    try:
        whole = ids(ds.loader(batch_size=8, shuffle="full", output="numpy"))
        assert (
            ids(
                ds.loader(
                    batch_size=8, shuffle="full", stream=True, nodes=[other.url], connections=2
                )
            )
            == whole
        )
    finally:
        other.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_that_is_killed_costs_no_sample(ds, tables, tmp_path, stream):
    """It dies in mid-epoch: the loop ends with an error, the state is that of what was yielded, and
    another node goes on with it.
    """
    options = {"batch_size": 4, "shuffle": "full", "seed": 2, "output": "numpy", "epochs": math.inf}
    dying = Node(
        "", [], tmp_path, options=["--origin", f"file://{tables.directory.parent / 'tables'}"]
    )
    seen = []
    try:
        far = forebay.open("tables/a/*.parquet", client=forebay.Client(dying.url, timeout=9))
        loader = far.loader(stream=stream, **options)
        with pytest.raises(forebay.Error):
            for batch in loader:
                seen += batch["id"].tolist()
                if len(seen) == 220:
                    dying.stop(signal.SIGKILL)
    finally:
        dying.stop(signal.SIGKILL)
    rest = ds.loader(stream=stream, **options)
    rest.load_state_dict(loader.state_dict())
    seen += ids(b for _, b in zip(range(30), rest, strict=False))
    truth = ids(b for _, b in zip(range(len(seen) // 4), ds.loader(**options), strict=False))
    assert len(seen) >= 340 and seen == truth


@pytest.mark.parametrize("options", [{}, {"decode": lambda row: row, "threads": 2}])
def test_a_restart_of_the_node_costs_a_pull_loader_only_time(tables, tmp_path, options):
    def node():
        origin = f"file://{tables.directory.parent / 'tables'}"
        return Node("", [], tmp_path, options=["--origin", origin], socket=tmp_path / "s")

    first = node()
    try:
        ds = forebay.open("tables/a/*.parquet", url=f"unix:{tmp_path / 's'}")
        loader = ds.loader(batch_size=4, shuffle="full", epochs=4, **options)
        truth = [list(loader.steps(loader.state_dict(), 4).step(i).rows) for i in range(100)]
        seen, starting = [], []
        for _ in loader:
            seen.append(list(loader.last.rows))
            if len(seen) == 30:
                first.stop(signal.SIGKILL)
                starting.append(threading.Timer(0.7, lambda: starting.append(node())))
                starting[0].start()
        assert seen == truth and loader.stats().reconnects >= 1
    finally:
        first.stop(signal.SIGKILL)
        for other in starting[1:]:
            other.stop()
    # Nobody is there any more: it retries for as long as was set, and no longer.
    began = time.monotonic()
    with pytest.raises(forebay.ConnectionFailed, match="retry_for"):
        list(ds.loader(batch_size=4, retry_for=0.5, **options))
    assert 0.3 < time.monotonic() - began < 20
    with pytest.raises(forebay.ConnectionFailed):
        list(ds.loader(batch_size=4, retry_for=0, **options))


@pytest.mark.parametrize("options", [{}, {"decode": dict, "threads": 2}, {"stream": True}])
def test_threads_share_an_iteration(ds, options):
    loader = ds.loader(batch_size=3, shuffle="full", **options)
    batches, seen = iter(loader), []

    def take():
        for batch in batches:
            rows = batch.ids if isinstance(batch, forebay.Rows) else [r["id"] for r in batch]
            seen.extend(int(i) for i in rows)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(seen) == len(set(seen)) == 102 and loader.epoch == 1


@pytest.mark.parametrize("options", [{}, {"decode": dict, "threads": 2}, {"stream": True}])
def test_a_thread_that_waits_finds_the_end_when_another_closes(tables, tmp_path, options):
    origin = f"file://{tables.directory.parent / 'tables'}"
    node = Node("", [], tmp_path, options=["--origin", origin])
    try:
        ds = forebay.open("tables/a/*.parquet", url=node.url)
        loader = ds.loader(batch_size=3, epochs=math.inf, **options)
        batches, ended = iter(loader), threading.Event()
        first = next(batches)

        def wait():
            for _ in batches:
                pass
            ended.set()

        node.process.send_signal(signal.SIGSTOP)
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        time.sleep(0.5)
        assert first and not ended.is_set()
        loader.close()
        assert ended.wait(60), "it waits for a node that says nothing"
    finally:
        node.process.send_signal(signal.SIGCONT)
        node.stop(signal.SIGKILL)


def picky(row):
    if row["id"] % 10 == 3:
        raise ValueError(f"no {row['id']}")
    return {"id": row["id"]}


def test_a_step_that_cannot_be_ends_the_loop_where_it_is_due(ds, monkeypatch):
    from forebay import _plan

    step = _plan.Steps.step

    def fails(self, number: int) -> object:
        if number == 3:
            raise forebay.InvalidRequest("there is no step 3")
        return step(self, number)

    monkeypatch.setattr(_plan.Steps, "step", fails)
    loader = ds.loader(5, prefetch=8)
    loop = iter(loader)
    assert [len(next(loop)) for _ in range(3)] == [5, 5, 5]
    with pytest.raises(forebay.InvalidRequest, match="no step 3"):
        next(loop)
    monkeypatch.undo()
    assert ids([next(iter(loader))]) == list(range(15, 20))


@pytest.mark.parametrize("threads", [0, 2])
def test_samples_that_fail_are_skipped_if_so_wanted(ds, threads, caplog):
    options = {"batch_size": 20, "decode": picky, "threads": threads, "output": "numpy"}
    loader = ds.loader(on_error="skip", **options)
    batches = list(loader)
    assert [len(b["id"]) for b in batches] == [18] * 5
    assert ids(batches) == [i for i in range(100) if i % 10 != 3]
    stats = loader.stats()
    assert (stats.samples, stats.skipped) == (90, 10) and "10 samples could not" in str(stats)
    report = loader.report().json()
    assert [part["samples"] for part in (report["run"], *report["epochs"])] == [90, 90]
    assert sum(part["samples"] for part in report["timeline"]["bins"]) == 90
    # What is made ahead of a loop that ends early does not count.
    early = ds.loader(on_error="skip", **options)
    next(iter(early))
    assert (early.stats().samples, early.stats().skipped) == (18, 2)
    # Padding is no sample.
    padded = ds.loader(on_error="skip", uneven="pad", **{**options, "batch_size": 64})
    assert sum(b["__real__"].sum() for b in padded) == 93
    assert (padded.stats().samples, padded.stats().skipped) == (93, 10)
    assert "tables/a/0.parquet" in caplog.text and "no 13" in caplog.text
    limited = ds.loader(on_error="skip", max_skipped=4, **options)
    with pytest.raises(forebay.SampleFailed, match="max_skipped"):
        list(limited)
    assert limited.state_dict()["position"] == 40
    # A batch of which nothing is left is left out, where no other rank takes a step with it.
    single = ds.loader(1, decode=picky, on_error="skip", threads=threads)
    assert [b[0]["id"] for b in single] == [i for i in range(103) if i % 10 != 3]
    assert (single.stats().batches, single.stats().skipped) == (93, 10)
    assert single.state_dict()["epoch"] == 1
    of_two = ds.loader(1, decode=picky, on_error="skip", threads=threads, rank=1, world_size=2)
    with pytest.raises(forebay.SampleFailed, match="no sample of a batch of 1 .*other ranks"):
        list(of_two)
    data = DataLoader(
        ds.loader(1, decode=picky, on_error="skip").torch(), batch_size=None, num_workers=1
    )
    assert [b[0]["id"] for b in data] == [i for i in range(103) if i % 10 != 3]
    with pytest.raises(forebay.InvalidRequest, match="on_error"):
        ds.loader(10, decode=picky, on_error="skip").torch(samples=True)


def test_arguments_of_other_loaders_are_explained(ds):
    for name, said in {
        "drop_last": "uneven=",
        "num_workers": "threads=",
        "collate_fn": "collate=",
        "shuffle_seed": "seed=",
        "predownload": "prefetch=",
        "device": "pin_memory=",
        "shufle": "did you mean 'shuffle'",
        "nonsense": "no argument 'nonsense'",
    }.items():
        with pytest.raises(TypeError, match=said):
            ds.loader(10, **{name: 1})
    with pytest.raises(TypeError, match=r"DataLoader\(.*\.torch\(\), batch_size=None\)"):
        next(iter(DataLoader(ds.loader(10))))


@pytest.mark.parametrize("kind", [list, np.asarray])
def test_what_is_shown_of_a_loader_does_not_grow_with_its_rows(ds, kind):
    lengths = kind(range(len(ds)))
    bounded = ds.loader(max_total=1000, length=lengths)
    packed = forebay.Pack(64, column="tokens", lengths=lengths)
    for shown in (repr(bounded), repr(bounded.torch()), repr(packed)):
        assert "1000" in shown or "64" in shown
        assert len(shown) < 400 and "\n" not in shown and "98" not in shown
    assert "'n'" in repr(forebay.Pack(64, lengths="n"))
    assert "1000 id" in repr(ds.loader(max_total=1000, length="id").torch())
    resumable = Resumable(DataLoader(ds.loader(10, output="torch").torch(), batch_size=None))
    next(iter(resumable))
    assert f"of {ds.name}: 0 workers, at epoch 0, position 10>" in repr(resumable)


@pytest.mark.parametrize("name", ["padded", "pin_memory", "stream", "follow", "progress"])
def test_a_text_is_neither_true_nor_false(ds, name):
    options = {"length": "id", "max_total": 1000} if name == "padded" else {}
    for given in ("no", "false", 2):
        with pytest.raises(TypeError, match=name):
            ds.loader(10, output="torch", **options, **{name: given})
    ds.loader(10, output="torch", **options, **{name: np.bool_(False)})


def test_nor_is_it_elsewhere(ds):
    loader, load = ds.loader(10), forebay.checkpoint.load
    for name, call in (
        ("contiguous", lambda given: ds.shard(2, 0, contiguous=given)),
        (
            "example",
            lambda given: forebay.open("tables/a/*.parquet", client=ds.client, example=given),
        ),
        ("index", lambda given: ds.write("tables/new/", "tfrecord", index=given)),
        ("samples", lambda given: ds.loader(10).torch(samples=given)),
        ("overwrite", lambda given: forebay.checkpoint.save({}, "tables/c", overwrite=given)),
        ("overwrite", lambda given: StorageWriter("tables/c", client=ds.client, overwrite=given)),
        ("durable", lambda given: StorageReader("tables/c", client=ds.client, durable=given)),
        ("durable", lambda given: load("tables/c", client=ds.client, durable=given)),
        ("weights_only", lambda given: load("tables/c", client=ds.client, weights_only=given)),
        ("strict", lambda given: loader.load_state_dict(loader.state_dict(), strict=given)),
        ("reset", lambda given: loader.stats(reset=given)),
        ("order", lambda given: loader.report(order=given)),
        ("shuffle", lambda given: IterableDataset(ds.client, ["x"], shuffle=given)),
        ("drop_uneven", lambda given: IterableDataset(ds.client, ["x"], drop_uneven=given)),
    ):
        for given in ("no", 0, None):
            with pytest.raises(TypeError, match=name):
                call(given)
    apart = ds.shard(2, 1, contiguous=np.bool_(False))
    assert apart.take([0, 1]).numpy()["id"].tolist() == [1, 3]


def test_nor_is_a_progress(ds):
    source, client = "tables/a/*.parquet", ds.client
    mixed = forebay.mix([ds, ds])
    for call in (
        lambda given: forebay.open(source, client=client, progress=given),
        lambda given: forebay.open_shards(source, client=client, progress=given),
        lambda given: ds.filter(forebay.col("id") > 1, progress=given),
        lambda given: ds.filter(bool, name="all", progress=given),
        lambda given: mixed.filter(forebay.col("id") > 1, progress=given),
        lambda given: ds.by_key([1], column="id", progress=given),
        lambda given: mixed.by_key([1], column="id", progress=given),
        lambda given: ds.lengths("id", progress=given),
        lambda given: ds.write("tables/new/", progress=given),
    ):
        for given in ("no", 0):
            with pytest.raises(TypeError, match="progress must be True or False"):
                call(given)
    assert len(ds.filter(forebay.col("id") >= 0, progress=np.bool_(False))) == len(ds)


# Exact resume: in one process, in DataLoader, in StatefulDataLoader; interrupted anywhere, gone on
# with in another shape.


def make(ds, world, batch_size, **options):
    return [
        ds.loader(
            batch_size=batch_size, shuffle="full", seed=9, rank=r, world_size=world, **options
        )
        for r in range(world)
    ]


class Job:
    """A job that is stopped and started in another shape. What it yielded, epoch by epoch, is
    checked at the end.
    """

    def __init__(self, source, rng):
        self.source, self.rng = source, rng
        self.state = None
        self.seen: dict[int, list[tuple[int, int]]] = {}

    def yielded(self, step):
        """One step of all ranks: their `last`."""
        for last in step:
            sources = last.sources if last.sources is not None else np.zeros(len(last.rows), int)
            self.seen.setdefault(last.epoch, []).extend(
                list(zip(sources.tolist(), last.rows.tolist(), strict=True))[: last.real]
            )

    def check(self, epochs):
        single = self.source.loader(batch_size=1, shuffle="full", seed=9, epochs=epochs)
        truth: dict[int, list[tuple[int, int]]] = {}
        for _ in single:
            last = single.last
            source = 0 if last.sources is None else int(last.sources[0])
            truth.setdefault(last.epoch, []).append((source, int(last.rows[0])))
        assert self.seen == truth, f"FOREBAY_TEST_SEED={SEED}"


@pytest.mark.parametrize("mixed", [False, True])
def test_exact_resume_alone(pair, mixed):
    rng = random.Random(SEED)
    print(f"FOREBAY_TEST_SEED={SEED}")
    source = forebay.mix(pair, [2, 1], epoch_rows=90) if mixed else pair[0]
    for _ in range(max(1, int(8 * CASES))):
        job = Job(source, rng)
        while job.state is None or job.state["epoch"] < 3:
            shape = {
                "prefetch": rng.choice([0, 1, 4]),
                "threads": rng.choice([0, 2]),
                "stream": rng.random() < 0.3,
            }
            loaders = make(
                source,
                rng.choice([1, 2, 3, 5]),
                rng.choice([1, 2, 4, 7]),
                uneven="pad",
                epochs=3,
                **shape,
            )
            if job.state is not None:
                for loader in loaders:
                    loader.load_state_dict(job.state)
            left = rng.randrange(12)
            for _ in zip(*loaders, strict=True):
                job.yielded([loader.last for loader in loaders])
                left -= 1
                if left <= 0:
                    break
            states = [loader.state_dict() for loader in loaders]
            assert states.count(states[0]) == len(states)
            job.state = states[0]
            for loader in loaders:
                loader.close()
        job.check(3)


def tagged(row):
    return {"id": row["id"]}


def batches_of(data, workers, samples, stateful=False, **options):
    size = data.loader.options.batch_size if samples else None
    kind = StatefulDataLoader if stateful else DataLoader
    how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return kind(data, batch_size=size, **how, **options)


def real_ids(batch) -> list[int]:
    real = batch["__real__"]
    return batch["id"][torch.as_tensor(real)].tolist()


class Doubled(torch.utils.data.IterableDataset):
    """One of the user's own, over the batches of a loader."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:
            yield 2 * batch["id"]


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_workers_divide_the_batches_that_a_dataset_of_ones_own_goes_over(ds, workers):
    loader = ds.loader(40, output="torch", columns=["id"], shuffle=forebay.Full(), seed=3)
    own = DataLoader(Doubled(loader.torch()), batch_size=None, num_workers=workers)
    wanted = [2 * batch["id"] for batch in loader]
    assert [batch.tolist() for batch in own] == [batch.tolist() for batch in wanted]


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_dataloader_yields_the_loaders_order(ds, workers, samples):
    loader = ds.loader(batch_size=8, shuffle="full", decode=tagged, output="torch")
    whole = [b["id"].tolist() for b in ds.loader(batch_size=8, shuffle="full", output="numpy")]
    data = loader.torch(samples=samples)
    assert isinstance(data, LoaderDataset) and len(data) == (96 if samples else 12)
    assert [b["id"].tolist() for b in batches_of(data, workers, samples)] == whole
    data.set_epoch(1)
    second = [b["id"].tolist() for b in batches_of(data, workers, samples)]
    assert sorted(sum(second, [])) != sum(second, []) and second != whole
    loader.set_epoch(1)
    assert second == [b["id"].tolist() for b in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("output", ["numpy", "rows"])
def test_bytes_that_nobody_decodes_come_through_a_dataloader(ds, workers, output):
    """Views of received memory go to no other process: a loop would wait for them for ever."""
    wanted = [bytes(row["data"]) for row in ds.take(8)]
    loader = ds.loader(batch_size=4, columns=["id", "data"], output=output)
    options = {"num_workers": workers, "timeout": 60 * workers}
    found = []
    if output == "numpy":
        for batch in itertools.islice(DataLoader(loader.torch(), None, **options), 2):
            assert isinstance(batch["data"], np.ndarray)
            found += batch["data"].tolist()
        assert found == wanted and set(map(type, found)) == {bytes}
    samples = DataLoader(loader.torch(samples=True), 4, **options)
    assert [b["data"] for b in itertools.islice(samples, 2)] == [wanted[:4], wanted[4:]]
    loader = ds.loader(batch_size=4, output=output, decode=lambda row: (row["data"], row["id"]))
    pairs = DataLoader(loader.torch(samples=True), 4, **options)
    assert list(next(iter(pairs))[0]) == wanted[:4]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_for_pytorch_needs_no_dev_shm(ds, monkeypatch, workers):
    def no_room(tensor):
        raise RuntimeError("unable to open shared memory object: No such file or directory")

    with monkeypatch.context() as without:
        without.setattr(torch.Tensor, "share_memory_", no_room)
        data = ds.loader(batch_size=10, shuffle="full", seed=2, output="numpy").torch()
        state = copy.deepcopy(data).begin
    assert state == data.begin
    fork = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    batches = DataLoader(data, batch_size=None, num_workers=workers, **fork)
    for epoch in range(2):
        # Workers that persist see it.
        data.set_epoch(epoch)
        wanted = ds.loader(batch_size=10, shuffle="full", seed=2, output="numpy")
        wanted.set_epoch(epoch)
        assert ids(batches) == ids(wanted)


@pytest.mark.parametrize("samples", [False, True])
def test_persistent_workers_go_on_from_epoch_to_epoch(ds, samples):
    loader = ds.loader(batch_size=8, shuffle="full", decode=tagged, output="torch")
    resumable = Resumable(
        batches_of(loader.torch(samples=samples), 2, samples, persistent_workers=True)
    )
    truth = ids(ds.loader(batch_size=8, shuffle="full", epochs=3))
    assert [i for _ in range(2) for b in resumable for i in b["id"].tolist()] == truth[
        :192
    ] and resumable.epoch == 2
    seen = []
    for batch in resumable:
        seen += batch["id"].tolist()
        if len(seen) == 40:
            break
    seen += [i for b in resumable for i in b["id"].tolist()]
    assert seen == truth[192:] and len(resumable) == 12


def test_a_loop_that_another_has_ended_takes_none_of_its_batches(ds):
    data = ds.loader(10, columns=["id"], output="torch").torch()
    batches = Resumable(DataLoader(data, None, num_workers=1, persistent_workers=True))
    before = iter(batches)
    seen = ids([next(before)])
    now = iter(batches)
    seen += ids([next(now)])
    with pytest.raises(forebay.InvalidRequest, match="another loop over this loader"):
        next(before)
    assert seen + ids(now) == list(range(100))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_workers_that_persist_see_the_epochs_of_a_copy(ds, copied):
    loader = ds.loader(10, shuffle="full", columns=["id"], output="torch")
    data = copied(loader.torch())
    batches = DataLoader(data, None, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        data.set_epoch(epoch)
        assert ids(batches) == ids(loader)


def test_workers_by_spawn_get_the_dataset_by_pickle(ds):
    loader = ds.loader(
        batch_size=8, shuffle="full", seed=9, decode=tagged, output="torch", rank=1, world_size=2
    )
    spawned = DataLoader(
        loader.torch(), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    resumable = Resumable(spawned)
    assert ids(resumable) == ids(loader) and resumable.state_dict() == loader.state_dict()


@pytest.mark.parametrize("kind", ["rows", "bounded", "packs", "best_fit"])
def test_torch_distributed_checkpoint_takes_loaders(ds, tmp_path, kind):
    """It reads of a saved state only the entries that the state of the new loader has."""
    import torch.distributed.checkpoint as dcp

    def make(resumable):
        options = {"shuffle": "full", "seed": 1, "output": "torch"}
        if kind == "rows":
            options["batch_size"] = 10
        elif kind == "bounded":
            options |= {"max_total": 30, "length": "size"}
        else:
            strategy = kind if kind == "best_fit" else "concatenate"
            pack = forebay.Pack(32, column="text", tokenize=list_of_bytes, strategy=strategy)
            options |= {"pack": pack, "batch_size": 3}
        loader = ds.loader(**options)
        return Resumable(DataLoader(loader.torch(), batch_size=None)) if resumable else loader

    def content(batch):
        return batch["tokens" if "tokens" in batch else "id"].tolist()

    at = 0
    for resumable in (False, True):
        begun, read = make(resumable), 0
        batches = iter(begun)
        # Before all, and within a window or a row, whichever way the new one has come.
        for steps, ahead in ((0, 2), (3, 0), (2, 1)):
            for _ in range(steps):
                next(batches)
                read += 1
            at += 1
            dcp.save({"loader": begun}, checkpoint_id=tmp_path / f"{at}", no_dist=True)
            wanted = begun.state_dict()
            again = make(resumable)
            for _ in itertools.islice(again, ahead):
                pass
            dcp.load({"loader": again}, checkpoint_id=tmp_path / f"{at}", no_dist=True)
            assert again.state_dict() == wanted
            rest = [content(batch) for batch in again]
            assert rest == [content(batch) for batch in make(resumable)][read:]


def list_of_bytes(text):
    return list(text.encode())


@pytest.mark.parametrize("mixed", [False, True])
def test_exact_resume_through_dataloaders(pair, mixed):
    """Alone, in DataLoaders of any number of workers, in StatefulDataLoaders: the state of each
    goes into the next.
    """
    rng = random.Random(SEED)
    print(f"FOREBAY_TEST_SEED={SEED}")
    source = forebay.mix(pair, [2, 1], epoch_rows=90) if mixed else pair[0]
    truth = [
        int(i)
        for batch in source.loader(batch_size=1, shuffle="full", seed=9, epochs=2, output="numpy")
        for i in batch["id"]
    ]
    for _ in range(max(1, int(2 * CASES))):
        state, seen = None, []
        while state is None or state["epoch"] < 2:
            world, size, samples = rng.choice([1, 2]), rng.choice([4, 8]), rng.random() < 0.5
            how = rng.choice(["alone", "dataloader", "stateful"])
            workers = [rng.choice([0, 1, 2, 3]) for _ in range(world)]
            loaders = make(
                source, world, size, uneven="pad", decode=tagged, output="torch", epochs=2
            )
            if state is not None:
                for loader in loaders:
                    loader.load_state_dict(state)
            datas = [loader.torch(samples=samples) for loader in loaders]
            if how == "alone":
                ranks = loaders
            elif how == "dataloader":
                ranks = [
                    Resumable(batches_of(d, w, samples))
                    for d, w in zip(datas, workers, strict=True)
                ]
            else:
                every = rng.choice([1, 3])
                ranks = [
                    batches_of(d, w, samples, stateful=True, snapshot_every_n_steps=every)
                    for d, w in zip(datas, workers, strict=True)
                ]
            left = rng.randrange(1, 9)
            for step in zip(*ranks, strict=True):
                for batch in step:
                    seen += real_ids(batch)
                left -= 1
                if left == 0:
                    break
            if how == "stateful":
                states = [state_of(r.state_dict(), d) for r, d in zip(ranks, datas, strict=True)]
            else:
                states = [r.state_dict() for r in ranks]
            assert states.count(states[0]) == world, (how, states)
            state = states[0]
            del ranks, datas
        assert seen == truth, f"FOREBAY_TEST_SEED={SEED}"


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_resumes_by_itself(ds, workers, samples):
    def loader():
        data = ds.loader(batch_size=8, shuffle="full", decode=tagged, output="torch").torch(
            samples=samples
        )
        return batches_of(data, workers, samples, stateful=True)

    truth = [b["id"].tolist() for b in loader()]
    for stop in (1, 4, 7):
        first = loader()
        seen = [b["id"].tolist() for _, b in zip(range(stop), first, strict=False)]
        again = loader()
        again.load_state_dict(first.state_dict())
        assert seen + [b["id"].tolist() for b in again] == truth
    # Its state belongs to the same number of workers; ours to no number.
    other = ds.loader(batch_size=8, shuffle="full", decode=tagged, output="torch").torch(
        samples=samples
    )
    other.load_state_dict(state_of(first.state_dict(), other))
    assert [b["id"].tolist() for b in batches_of(other, 3, samples)] == truth[7:]


def test_what_cannot_be_resumed_is_refused(ds):
    loader = ds.loader(batch_size=8, decode=tagged, output="torch")
    with pytest.raises(forebay.InvalidRequest):
        Resumable(DataLoader(loader.torch(samples=True), batch_size=7))
    with pytest.raises(forebay.InvalidRequest):
        Resumable(DataLoader(loader.torch(), batch_size=8))
    with pytest.raises(TypeError):
        Resumable(DataLoader(ds, batch_size=8))
    for given in (loader, loader.torch(), ds, None, 5):
        with pytest.raises(TypeError):
            Resumable(given)
    given = DataLoader(loader.torch(), batch_size=None)
    Resumable(given)
    with pytest.raises(forebay.InvalidRequest, match="another Resumable"):
        Resumable(given)
    for bad in ({}, {"_snapshot": {}}, {"fetcher_state": {"dataset_iter_state": None}}):
        with pytest.raises(forebay.InvalidRequest):
            state_of(bad, loader.torch())
    two = StatefulDataLoader(
        loader.torch(), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    next(iter(two))
    saved = two.state_dict()
    saved["_snapshot"]["_worker_snapshots"]["worker_1"]["fetcher_state"]["dataset_iter_state"][
        "workers"
    ] = 3
    again = StatefulDataLoader(
        loader.torch(), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    again.load_state_dict(saved)
    with pytest.raises(forebay.InvalidRequest):
        list(again)


@pytest.mark.parametrize(
    ("before", "after", "refused_with"),
    # From and to 0 workers, torchdata refuses a state before it asks the dataset.
    [(2, 0, AssertionError), (0, 2, AssertionError), (2, 3, forebay.InvalidRequest)],
)
def test_a_state_of_other_workers_is_loaded_by_state_of(ds, before, after, refused_with):
    loader = ds.loader(batch_size=8, shuffle="full", seed=2, columns=["id"], output="torch")
    truth = ids(loader)
    loader.set_epoch(0)

    def stateful(data, workers):
        context = {"multiprocessing_context": "fork"} if workers else {}
        return StatefulDataLoader(data, batch_size=None, num_workers=workers, **context)

    batches = stateful(loader.torch(), before)
    first = list(itertools.islice(batches, 3))
    saved = batches.state_dict()
    refused = stateful(loader.torch(), after)
    with pytest.raises(refused_with):
        refused.load_state_dict(saved)
        list(refused)

    data = loader.torch()
    data.load_state_dict(state_of(saved, data))
    assert ids(first) + ids(stateful(data, after)) == truth


def test_a_failure_in_a_worker_names_the_sample(ds):
    def fussy(row):
        raise ValueError("damaged")

    data = ds.loader(batch_size=8, decode=fussy).torch()
    with pytest.raises(forebay.SampleFailed, match="row 0 of tables/a/0.parquet"):
        list(batches_of(data, 1, False))


def test_a_dataset_is_a_map_style_dataset(ds, monkeypatch):
    ds.decoder = decode
    requests, take = [], forebay.dataset._node.take
    monkeypatch.setattr(forebay.dataset._node, "take", lambda *a: requests.append(a) or take(*a))
    got = [b["id"].tolist() for b in DataLoader(ds, batch_size=20)]
    assert (
        got == [list(range(i, min(i + 20, ROWS))) for i in range(0, ROWS, 20)]
        and len(requests) == 6
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_of_a_map_style_dataset_are_bytes(ds, workers):
    truth = [bytes(row["data"]) for row in ds.take(range(20))]
    plain = DataLoader(ds, batch_size=10, num_workers=workers, timeout=30 * workers)
    assert [v for batch in itertools.islice(plain, 2) for v in batch["data"]] == truth
    # What a function of one's own makes of samples goes to the other process too.
    ds.decoder = lambda row: (row["id"], [row["data"]])
    own = DataLoader(ds, batch_size=10, num_workers=workers, timeout=30 * workers, collate_fn=list)
    assert [part for batch in itertools.islice(own, 2) for _, (part,) in batch] == truth
    # A row is what it was.
    assert isinstance(ds.take([1])[0]["data"], memoryview)


def test_rows_of_a_dataset_come_from_a_worker(ds):
    """Views in ``ds[i]``, and in rows that a dataset of one's own takes, can be sent."""
    truth = [bytes(row["data"]) for row in ds.take(range(5))]

    class Own(torch.utils.data.Dataset):
        def __getitem__(self, i: int) -> list:
            return [row["data"] for row in ds.take([i])]

        def __len__(self) -> int:
            return len(ds)

    single = {"batch_size": None, "sampler": range(5), "num_workers": 1, "timeout": 30}
    rows = DataLoader(ds, collate_fn=dict, **single)
    assert [row["data"] for row in rows] == truth
    assert [part for (part,) in DataLoader(Own(), collate_fn=list, **single)] == truth
    # This process sends what it did.
    with pytest.raises(TypeError):
        ForkingPickler.dumps(memoryview(b"1"))


def test_a_warning_points_at_the_line_that_iterates(ds, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"output": "torch", "columns": ["id"], "pin_memory": True}
    pack = forebay.Pack(8, column="id", tokenize=lambda number: [number])
    packs = ds.loader(2, output="torch", pack=pack, pin_memory=True)
    for loader in (ds.loader(10, **options), packs):
        with pytest.warns(UserWarning, match="pin_memory") as told:
            next(iter(loader))
            next(iter(loader.torch()))
        assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize("of", [DataLoader, StatefulDataLoader])
def test_batches_that_a_dataloader_puts_together_again_are_warned_of(ds, of):
    loader = ds.loader(batch_size=4, columns=["id"], output="torch")
    with pytest.warns(UserWarning, match="batch_size=None"):
        assert next(iter(of(loader.torch())))["id"].shape == (1, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*batch_size=None")
        assert next(iter(of(loader.torch(), batch_size=None)))["id"].shape == (4,)
        assert next(iter(of(loader.torch(samples=True), batch_size=4)))["id"].shape == (4,)
        # Whoever gives a function knows what it is given.
        first = next(iter(of(loader.torch(), collate_fn=lambda batches: batches[0])))
        assert first["id"].shape == (4,)
        assert len(list(loader.torch())) == len(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_stay_whole_where_a_dataloader_converts_them(ds, workers):
    """PyTorch's ``default_convert`` makes a list of numbers of a view."""
    truth = [bytes(row["data"]) for row in ds.take(range(20))]
    single = {"batch_size": None, "num_workers": workers}
    some = {**single, "sampler": range(5)}
    mixed = forebay.mix([ds])
    subset = torch.utils.data.Subset(ds, range(5))
    for of, loader in (
        (truth[:5], DataLoader(ds, **some)),
        (truth[:5], DataLoader(ds[:5], **single)),
        (truth[:5], DataLoader(subset, **single)),
        (truth[:5], forebay.torch.DataLoader(ds, **some)),
        ([bytes(mixed[i]["data"]) for i in range(5)], DataLoader(mixed, **some)),
    ):
        assert [row["data"] for row in loader] == of
    for pairs in DataLoader(ds, sampler=[[0, 1], [2, 3]], **single):
        assert [row["data"] for row in pairs] == [truth[int(row["id"])] for row in pairs]
    taken = ds.take(range(20)).with_bytes()
    for rows in (taken, taken[:], taken[::-1][::-1], pickle.loads(pickle.dumps(taken[:]))):
        assert [row["data"] for row in rows] == truth and rows[3]["data"] == truth[3]
        assert {type(row["data"]) for row in rows} == {bytes} and type(rows[3]["data"]) is bytes
    # A dataset of the user's, which takes rows from this one.
    loader = DataLoader(OfAnother(ds), batch_size=5, num_workers=workers)
    assert [data for batch in loader for data in batch["data"]] == truth[:5]
    loader = ds.loader(batch_size=10)
    for batches in (
        DataLoader(loader.torch(), **single),
        Resumable(DataLoader(loader.torch(), **single)),
        StatefulDataLoader(loader.torch(), **single),
        forebay.torch.DataLoader(loader.torch(), **single),
        Resumable(forebay.torch.DataLoader(loader.torch(), **single)),
    ):
        rows = [row for _, batch in zip(range(2), batches, strict=False) for row in batch]
        assert [row["data"] for row in rows] == truth
        assert [row["id"] for row in rows] == list(range(20))
    (kind, *_) = DataLoader(loader.torch(), collate_fn=type, **single)
    assert kind is forebay.Rows
    of_two = torch.utils.data.ConcatDataset([ds[:5], ds[5:20]])
    for together in (
        DataLoader(ds.take(range(20)), batch_size=4, num_workers=workers),
        DataLoader(of_two, batch_size=4, num_workers=workers),
        forebay.torch.DataLoader(of_two, batch_size=4, num_workers=workers),
    ):
        assert [data for batch in together for data in batch["data"]] == truth


class OfAnother(torch.utils.data.Dataset):
    def __init__(self, ds):
        self.ds = ds

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.ds[index]


def test_views_that_a_collate_function_leaves_come_from_a_worker(ds):
    truth = [bytes(row["data"]) for row in ds.take(range(20))]
    data = ds.loader(batch_size=10).torch()
    batches = DataLoader(data, batch_size=None, num_workers=1, timeout=30, collate_fn=list)
    assert [row["data"] for rows in itertools.islice(batches, 2) for row in rows] == truth


def test_a_pickled_loader_goes_on(ds):
    loader = ds.loader(batch_size=10, shuffle="full")
    first = ids([next(iter(loader))])
    again = pickle.loads(pickle.dumps(loader))
    assert first + ids(again) == ids(ds.loader(batch_size=10, shuffle="full"))


def test_of_two_loops_that_begin_in_one_moment_one_says_so(ds, monkeypatch):
    loader, both, found = ds.loader(10), threading.Barrier(2, timeout=60), []
    make = loader.pipeline

    def together(*given, **options):
        both.wait()
        return make(*given, **options)

    monkeypatch.setattr(loader, "pipeline", together)

    def loop():
        batches = iter(loader)
        both.wait()
        try:
            found.append(ids(batches))
        except forebay.InvalidRequest as e:
            found.append(e.message)

    for _ in range(5):
        found.clear()
        threads = [threading.Thread(target=loop) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, found)) == [
            str(list(range(100))),
            "another loop over this loader has begun, and a loader has one at a time",
        ]
        assert loader.state_dict()["position"] == 0


def test_a_loop_that_waits_while_another_begins_says_so(ds, monkeypatch):
    loader = ds.loader(10)
    first = iter(loader)
    next(first)
    make = first._pipeline.at

    def at(number):
        made = make(number)
        next(iter(loader))
        return made

    monkeypatch.setattr(first._pipeline, "at", at)
    with pytest.raises(forebay.InvalidRequest, match="another loop over this loader"):
        next(first)


def test_a_loop_says_that_another_one_has_begun(ds):
    loader = ds.loader(10)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(forebay.InvalidRequest, match="another loop over this loader"):
        next(first)
    assert len(list(second)) == 9
    # One that has ended has ended.
    third = iter(loader)
    with pytest.raises(StopIteration):
        next(second)
    loader.close()
    with pytest.raises(StopIteration):
        next(third)


def test_of_two_loops_over_a_resumable_that_begin_in_one_moment_one_goes_on(ds, monkeypatch):
    resumable = Resumable(DataLoader(ds.loader(10).torch(), batch_size=None))
    both, look = threading.Barrier(2, timeout=60), resumable._ahead.look

    class Counts(int):
        """What counts loops: both threads read it before one of them has written."""

        def __add__(self, other):
            both.wait()
            return int(self) + other

    def together():
        # Both know where they begin before one of them has taken a batch.
        both.wait()
        look()

    monkeypatch.setattr(resumable._ahead, "look", together)
    for name, value in list(vars(resumable).items()):
        if type(value) is int:
            setattr(resumable, name, Counts(value))

    def batches_of(loop) -> str | int:
        try:
            return len(list(loop))
        except forebay.InvalidRequest as e:
            return e.message

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(batches_of, [iter(resumable) for _ in range(2)]))
    told = "another loop over this loader has begun, and a loader has one at a time"
    assert sorted(map(str, found)) == ["10", told]


def test_the_length_is_that_of_one_loop(ds):
    loader = ds.loader(10, epochs=3)
    assert len(loader) == len(list(loader)) == 30
    with pytest.raises(TypeError, match="math.inf"):
        len(ds.loader(10, epochs=math.inf))


WAITS_FOR_NOBODY = """
import sys, time, forebay

taken = 0

def slow(row):
    # The first batch is there soon, and the next one takes a minute.
    global taken
    taken += 1
    time.sleep(1.2 if taken > 50 else 0)
    return row["id"]

ds = forebay.open(sys.argv[1], url=sys.argv[2])
loader = ds.loader(50, decode=slow, threads=1)
batch = next(iter(loader))
print("there", flush=True)
if sys.argv[3] == "close":
    loader.close()
"""


@pytest.mark.parametrize("how", ["close", "leave"])
def test_the_end_of_a_script_does_not_wait_for_what_was_fetched_ahead(ds, how):
    program = [sys.executable, "-c", WAITS_FOR_NOBODY, ds.name, ds.client.url, how]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout.readline() == "there\n"
        began = time.monotonic()
        assert script.wait(60) == 0
    # The rows that were given to the thread take a minute.
    assert time.monotonic() - began < 30


COLLECTED = """
import concurrent.futures, gc, sys, threading
import forebay

def collecting():
    # What Python may do there, too: a garbage collection, which closes the loop. (The requests of
    # 51 steps come first, and then steps are decoded.)
    if threading.current_thread().name == "forebay-belt" and (given := next(numbers)) >= 60:
        if given == 60:
            reached.set()
            dropped.wait()
        gc.collect()
    return Future()

gc.disable()
ds = forebay.open(sys.argv[1], url=sys.argv[2])
Future, numbers = concurrent.futures.Future, iter(range(1000))
reached, dropped = threading.Event(), threading.Event()
concurrent.futures._base.Future = collecting
loop = [iter(ds.loader(1, decode=dict, threads=1, prefetch=50, follow=False))]
next(loop[0])
loop.append(loop)
reached.wait()
del loop
dropped.set()
while any(thread.name == "forebay-belt" for thread in threading.enumerate()):
    pass
print(concurrent.futures.ThreadPoolExecutor(1).submit(len, "abc").result())
"""


def test_a_loop_that_is_collected_as_it_gives_work_to_its_threads_ends(ds):
    program = [sys.executable, "-c", COLLECTED, ds.name, ds.client.url]
    said = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert said.stdout == "3\n", "and threads of others go on"


CLOSED = """
import concurrent.futures
from forebay._pools import Pool

def closing():
    pool.shutdown(wait=False, cancel_futures=True)
    return Future()

Future, pool = concurrent.futures.Future, Pool(1)
print(pool.submit(len, "abc").result())
concurrent.futures._base.Future = closing
given = pool.submit(len, "abc")
try:
    given.result()
except concurrent.futures.CancelledError:
    pass
print("over")
"""


def test_a_pool_that_is_closed_as_it_is_given_work_keeps_nobody_waiting():
    program = [sys.executable, "-c", CLOSED]
    said = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert said.stdout == "3\nover\n"


BREAKS_OFF = """
import atexit, sys, threading, time
# The last that is done at the exit: until then, a thread that is not waited for goes on.
atexit.register(time.sleep, 2)
import forebay

ds = forebay.open(sys.argv[1], url=sys.argv[2])
first = threading.Event()

def loop():
    loader = eval(sys.argv[3])
    try:
        for batch in loader:
            first.set()
            threading.main_thread().join()
            time.sleep(0.2)
    except forebay.Error as e:
        print(loader.epoch, e, flush=True)
    finally:
        first.set()

threading.Thread(target=loop, daemon=sys.argv[4] == "daemon").start()
first.wait()
"""


@pytest.mark.parametrize(
    "loader",
    [
        "ds.loader(10)",
        "ds.loader(10, decode=dict, threads=2)",
        # Of small windows: what is dealt already is handed out all the same.
        "ds.loader(1, pack=forebay.Pack(99, 'data', strategy='best_fit', window=4, tokenize=list))",
    ],
)
@pytest.mark.parametrize("kind", ["thread", "daemon"])
def test_a_loop_of_another_thread_says_that_the_main_thread_has_ended(ds, loader, kind):
    program = [sys.executable, "-c", BREAKS_OFF, ds.name, ds.client.url, loader, kind]
    said = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    # The epoch that it was in: its place is not the end.
    assert said.stdout.startswith("0 the interpreter is ending") and "join()" in said.stdout


TOO_LATE = """
import atexit, sys
import forebay

ds = forebay.open(sys.argv[1], url=sys.argv[2])

def last():
    try:
        eval(sys.argv[3])
    except forebay.Error as e:
        print(e, flush=True)

atexit.register(last)
"""


@pytest.mark.parametrize(
    "call",
    [
        "list(ds)",
        "list(ds.loader(10))",
        "ds.filter(bool, name='at the exit')",
        "ds.lengths('id')",
        "ds.cast({'id': 'int32'}).by_key([5], column='id')",
        "ds.write('tables/at-the-exit/')",
    ],
)
def test_what_begins_when_the_interpreter_ends_says_that_it_is_too_late(ds, call):
    program = [sys.executable, "-c", TOO_LATE, ds.name, ds.client.url, call]
    said = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert said.stdout.startswith("the interpreter is ending") and "atexit" in said.stdout


@pytest.mark.parametrize("threads", [0, 2])
def test_stop_iteration_of_a_users_function_is_an_error(ds, threads):
    def stop(_):
        raise StopIteration

    with pytest.raises(RuntimeError, match="collate= raised StopIteration"):
        list(ds.loader(10, collate=stop, threads=threads))
    replaced = ds.loader(10, decode=picky, on_error=stop, threads=threads)
    with pytest.raises(RuntimeError, match="on_error= raised StopIteration"):
        list(replaced)


def test_ctrl_c_while_a_batch_is_counted_loses_no_batch(ds, monkeypatch):
    loader = ds.loader(10)
    taken = iter(loader)
    handed = taken._meter.ledger.handed

    def interrupted(*_, **__):
        monkeypatch.setattr(taken._meter.ledger, "handed", handed)
        raise KeyboardInterrupt

    monkeypatch.setattr(taken._meter.ledger, "handed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(taken)
    assert loader.state_dict()["position"] == 0
    assert ids([next(taken)]) == list(range(10)) and loader.state_dict()["position"] == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["handed", "_yielded"])
def test_a_batch_that_comes_again_after_ctrl_c_counts_once(ds, monkeypatch, where, stream):
    whole = ds.loader(10, stream=stream)
    list(whole)
    loader = ds.loader(10, stream=stream)
    taken = iter(loader)
    of = taken._meter.ledger if where == "handed" else loader

    def interrupted(*_, **__):
        monkeypatch.undo()
        raise KeyboardInterrupt

    next(taken)
    monkeypatch.setattr(of, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(taken)
    assert ids(taken) == list(range(10, ROWS // 10 * 10))
    figures = ("samples", "batches", "bytes")
    stats, run = loader.stats(), loader.report(order=False).json()["run"]
    expected = [getattr(whole.stats(), name) for name in figures]
    assert [getattr(stats, name) for name in figures] == expected
    assert [run[name] for name in figures] == expected


def test_a_new_loop_over_a_resumable_ends_the_one_before(ds):
    data = Resumable(DataLoader(ds.loader(10).torch(), batch_size=None))
    first = iter(data)
    next(first)
    second = iter(data)
    assert [row["id"] for row in next(second)] == list(range(10, 20))
    with pytest.raises(forebay.InvalidRequest, match="another loop over this loader"):
        next(first)
    assert list(first) == [] and data.state_dict()["position"] == 20
    data.load_state_dict({**data.state_dict(), "position": 50})
    assert list(second) == [] and data.state_dict()["position"] == 50
    assert next(iter(data))[0]["id"] == 50


def test_a_loop_that_gets_no_more_threads_is_an_error(ds, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    loader = ds.loader(10)
    # With one that is there already, it would go on.
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(loader)
    monkeypatch.undo()
    assert loader.epoch == 0


@pytest.mark.parametrize("way", ["plain", "threads", "stream", "torch", "rows", "hf"])
def test_a_loop_does_not_go_on_in_a_forked_child(ds, way):
    options = {"threads": {"decode": dict, "threads": 2}, "stream": {"stream": True}}.get(way, {})
    loader = ds.loader(10, **options)
    made = {"torch": loader.torch, "rows": lambda: ds, "hf": ds.to_hf_iterable}
    loop = iter(made.get(way, lambda: loader)())
    next(loop)

    def go_on():
        with pytest.raises(forebay.InvalidRequest, match="forked from"):
            list(loop)
        assert len(list(loader)) == 9 + (way in made)

    child = multiprocessing.get_context("fork").Process(target=go_on)
    child.start()
    child.join(60)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0
    assert len(list(loop)) == (ROWS - 1 if way in ("rows", "hf") else 9)


def test_a_forked_child_ends_though_a_loop_of_its_parent_holds_its_lock(ds):
    loop = iter(ds.loader(10, decode=lambda row: row, threads=2))
    next(loop)
    belt = loop._pipeline._belt
    held, leave = threading.Event(), threading.Event()

    def hold():
        with belt._lock:
            held.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(60)
    leave.set()
    holder.join()
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
    assert len(list(loop)) == 9
