"""Shards that are read as they come: order, ranks, resume, streams, and what arrives before a shard
is whole.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import itertools
import json
import os
import pickle
import random
import re
import sys
import tarfile
import threading
import time
import urllib.request

import forebay
import numpy as np
import pytest
from conftest import s3_client
from forebay import _shards
from forebay._push import Push
from forebay._shards import GROUPS_AHEAD, PIECES, PartDataset, Span, parts_of
from forebay._stop import Stop
from forebay.torch import Resumable, state_of
from servers import REGION, Node, Process, Versitygw, forebay_program
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
#: Samples of each shard: shards of different lengths, one of them empty.
SHARDS = (40, 7, 65, 0, 33, 52)
PART = 16 << 10


def sample(shard: int, number: int) -> dict[str, bytes]:
    """A sample of one to three members; its bytes show what it is."""
    fields = {"bin": b"%d %d " % (shard, number) * (1 + (shard * 31 + number * 17) % 250)}
    if number % 3 == 0:
        fields["cls"] = b"%d" % (number % 5)
    if number % 7 == 0:
        fields["json"] = b"{}"
    return fields


def tar(samples, repeats=()) -> bytes:
    """``samples``: key and fields; ``repeats``: members at the end, by name."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        members = [(f"{key}.{f}", data) for key, fields in samples for f, data in fields.items()]
        for name, data in [*members, *repeats]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def key(shard: int, number: int) -> str:
    return f"s{shard}/{number:03}"


@pytest.fixture(scope="module")
def shards_node(tmp_path_factory):
    """A node over a directory with the shards, and with something that is not one."""
    root = tmp_path_factory.mktemp("shards")
    (root / "sets").mkdir()
    for shard, samples in enumerate(SHARDS):
        data = tar((key(shard, n), sample(shard, n)) for n in range(samples))
        (root / "sets" / f"train-{shard}.tar").write_bytes(data)
    (root / "sets" / "train-readme.txt").write_bytes(b"no shard")
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'sets'}"])
    yield node
    node.stop()


@pytest.fixture
def shards(shards_node):
    return forebay.open_shards("sets/train-*", url=shards_node.url, part_bytes=PART)


ALL = sorted(key(shard, n) for shard, samples in enumerate(SHARDS) for n in range(samples))


def keys(batches) -> list[str]:
    return [row["__key__"] for batch in batches for row in batch]


def test_a_resumable_says_which_group_of_parts_it_is_in(shards):
    resumable = Resumable(DataLoader(shards.loader(8).torch(), batch_size=None))
    batches = iter(resumable)
    while resumable.state_dict()["group"] < 1:
        next(batches)
    position = resumable.state_dict()["position"]
    assert f": 0 workers, at epoch 0, group 1, position {position}>" in repr(resumable)


def test_parts_are_accounted_to_their_dataset(shards_node):
    shards = forebay.open_shards("sets/train-{0,1}.tar", url=shards_node.url, part_bytes=PART)
    assert keys(shards.loader(11, epochs=1, uneven="pad"))
    size = sum(file.size for file in shards.files)
    with urllib.request.urlopen(f"{shards_node.url}/v1/forebay/jobs", timeout=60) as answer:
        told = [d for d in json.load(answer)["datasets"] if d["stored_bytes"] == size]
    assert len(told) == 1 and told[0]["rows"] >= SHARDS[0] + SHARDS[1]


def test_an_epoch_is_each_row_once_pulled_and_streamed_alike(shards):
    orders = []
    for stream, k, threads in itertools.product((False, True), (1, 2, 4, 9), (0, 2)):
        decode = (lambda row: row) if threads else None
        loader = shards.loader(
            11,
            shuffle=forebay.Block(k),
            seed=5,
            epochs=2,
            uneven="pad",
            stream=stream,
            threads=threads,
            decode=decode,
        )
        seen, reals = [], []
        for batch in loader:
            seen.append(keys([batch]))
            reals.append(loader.last.real)
            for row in batch:
                shard, number = int(row["__key__"][1]), int(row["__key__"][3:])
                there = {f: bytes(v) for f, v in row.items() if f != "__key__" and v is not None}
                there.pop("__real__", None)
                assert there == sample(shard, number)
        per_epoch = -(-len(ALL) // 11)
        assert len(seen) == len(loader) == 2 * per_epoch
        assert loader.rows_per_epoch == len(ALL)
        epochs = [
            [k for batch, real in zip(part, counts, strict=True) for k in batch[:real]]
            for part, counts in (
                (seen[:per_epoch], reals[:per_epoch]),
                (seen[per_epoch:], reals[per_epoch:]),
            )
        ]
        assert sorted(epochs[0]) == sorted(epochs[1]) == ALL and epochs[0] != epochs[1]
        assert epochs[0] != ALL
        orders.append((k, epochs, seen))
    for k in (1, 2, 4, 9):
        assert all(
            order == next(o for o in orders if o[0] == k) for order in orders if order[0] == k
        )
    # Without a shuffle, as they are stored: nothing is read side by side.
    assert keys(shards.loader(10, uneven="pad"))[: len(ALL)] == ALL


@pytest.mark.parametrize("shuffle", [None, forebay.Block(3)])
def test_columns_and_schema_hold_where_a_part_has_no_such_field(shards_node, shuffle):
    """A shard is empty, and there are parts without a row; only every seventh row has ``json``."""

    def rows(**options):
        shards = forebay.open_shards(
            "sets/train-*", url=shards_node.url, part_bytes=2 << 10, **options
        )
        loader = shards.loader(11, shuffle=shuffle, seed=5, epochs=1, uneven="pad")
        return [row for batch in loader for row in list(batch)[: loader.last.real]]

    assert [set(row) for row in rows(columns=["bin"])] == [{"bin"}] * len(ALL)
    found = rows(schema={"bin": "binary", "json": "binary"})
    assert len(found) == len(ALL)
    for row in found:
        _, number = bytes(row["bin"]).split()[:2]
        assert (row["json"] is not None) == (int(number) % 7 == 0)
    with pytest.raises(forebay.errors.InvalidRequest, match="schema="):
        rows(columns=["json"])


def test_parts_follow_each_other_and_the_last_are_small():
    for pieces, least, first, last in itertools.product(
        (1, 2, 3, 7, 8, 9, 33, 1000), (1, 3, PIECES), (False, True), (False, True)
    ):
        places = parts_of(pieces, least, first, last)
        lengths = [b - a for a, b in itertools.pairwise(places)]
        assert places[0] == 0 and places[-1] == pieces and all(lengths)
        assert max(lengths) <= PIECES
        if first:
            assert lengths[0] <= PIECES // 2
        if last:
            assert lengths[-1] <= max(2, least)
            # The loop has trained on one part while the next one came, if it trains at least half
            # again as fast as the bytes come.
            for at, length in zip(places, lengths, strict=False):
                assert length <= max(2, least, (pieces - at) // 3 + 1)
            # None but those at the ends is smaller than what a node fetches at once.
            assert all(length >= least for length in lengths[1:-1])
        else:
            assert all(n == PIECES for n in lengths[1:-1])


def test_no_part_is_much_smaller_than_what_the_node_fetches_at_once(far):
    far = far({f"t{i}.tar": large(i, 200) for i in range(2)})
    shards = forebay.open_shards("far/t{0,1}.tar", url=far.node.url, part_bytes=2 << 20)
    piece = shards.files[0].size / shards.pieces
    assert (shards.least - 1) * piece < 1 << 20 <= shards.least * piece
    few = forebay.open_shards("far/t{0,1}.tar", url=far.node.url, part_bytes=64 << 20)
    assert few.least == 1


def test_shards_of_different_lengths_end_together(tmp_path):
    (tmp_path / "sets").mkdir()
    for shard, samples in enumerate((200, 100, 50)):
        data = tar((f"s{shard}/{n:03}", {"bin": b"x" * 900}) for n in range(samples))
        (tmp_path / "sets" / f"t{shard}.tar").write_bytes(data)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'sets'}"])
    try:
        shards = forebay.open_shards("sets/*.tar", url=node.url, part_bytes=32 << 10)
        order = keys(shards.loader(10, shuffle=forebay.Block(3), seed=SEED, uneven="pad"))[:350]
    finally:
        node.stop()
    # Each quarter of the epoch has its share of each shard.
    for quarter in range(4):
        part = order[quarter * 350 // 4 : (quarter + 1) * 350 // 4]
        for shard, share in ((0, 4 / 7), (1, 2 / 7), (2, 1 / 7)):
            there = sum(k.startswith(f"s{shard}/") for k in part) / len(part)
            assert abs(there - share) < 0.12, f"seed {SEED}: quarter {quarter}, shard {shard}"


@pytest.mark.parametrize("batch", [1, 3, 7, 30])
def test_no_step_is_read_twice(shards, batch):
    loader = shards.loader(batch, shuffle=forebay.Block(2), seed=SEED, epochs=1, uneven="drop")
    given = [rows.nbytes for rows in loader]
    assert len(given) == len(ALL) // batch
    assert loader.stats().bytes == sum(given), f"seed {SEED}"


def within(seconds: float, what) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(what())


@pytest.mark.parametrize("batch", [2, 5])
def test_the_first_steps_of_a_group_are_requested_before_it_is_reached(shards, monkeypatch, batch):
    asked, read = [], PartDataset.read

    def counted(dataset, rows, columns=None):
        asked.append(dataset.id)
        return read(dataset, rows, columns)

    monkeypatch.setattr(PartDataset, "read", counted)
    loader = shards.loader(batch, shuffle=forebay.Block(2), seed=SEED, epochs=1, prefetch=3)
    batches, crossings = iter(loader), 0
    for _ in batches:
        now = loader.state_dict()
        groups, (group, position) = loader._groups, (now["group"], now["position"])
        if now["epoch"] or group + 1 == len(loader.shard_order.spans(0)):
            break
        if group + 1 > groups._wanted[1] + GROUPS_AHEAD:
            # The last step ended several small groups, and was read before it was asked for.
            continue
        assert within(30, lambda: groups.known(0, group + 1)), "it is not opened ahead"
        here, following = groups.known(0, group), groups.known(0, group + 1)
        left = (here.rows - position) // batch
        rest = (here.rows - position) % batch
        if left == 1 and rest and following.rows - (batch - rest) >= batch:
            # The next is the last whole step of this group. What it asks for is two steps on.
            next(batches)
            asks = following.loader.datasets[0].id
            # Once for the step between them, and once for its own first.
            assert within(10, lambda: asked.count(asks) >= 2), f"seed {SEED}: group {group + 1}"
            crossings += 1
    assert crossings, f"seed {SEED}"
    loader.close()


def test_a_loader_has_one_stream_at_a_time(shards, monkeypatch):
    live, alive, begin, end = set(), [], Push.__init__, Push.close

    def begins(push, *args):
        begin(push, *args)
        live.add(push)
        alive.append(len(live))

    def ends(push):
        live.discard(push)
        end(push)

    monkeypatch.setattr(Push, "__init__", begins)
    monkeypatch.setattr(Push, "close", ends)
    loader = shards.loader(3, shuffle=forebay.Block(2), seed=SEED, epochs=2, stream=True)
    assert len(list(loader)) == 2 * (len(ALL) // 3)
    assert len(alive) > 4 and set(alive) == {1}, f"seed {SEED}: {alive}"
    assert not live


@pytest.mark.parametrize("decode", [None, lambda row: row])
def test_all_groups_of_an_epoch_are_requested_by_the_same_threads(shards, monkeypatch, decode):
    started, start = [], threading.Thread.start

    def counted(thread):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    loader = shards.loader(
        5, shuffle=forebay.Block(2), seed=SEED, epochs=2, prefetch=2, threads=1, decode=decode
    )
    groups = sum(len(loader.shard_order.spans(epoch)) for epoch in range(2))
    assert len(list(loader)) == 2 * (len(ALL) // 5) and groups > 8
    fetching = [name for name in started if name.startswith("forebay-fetch")]
    assert 0 < len(fetching) <= 2 + 2, f"seed {SEED}: {groups} groups, {fetching}"


def test_rows_of_a_group_are_of_all_its_shards(shards):
    # Of six shards side by side the first rows are not those of one shard.
    first = keys(itertools.islice(shards.loader(16, shuffle=forebay.Block(6), seed=SEED), 1))
    assert len({k.split("/")[0] for k in first}) >= 3, f"seed {SEED}: {first}"


@pytest.mark.parametrize("uneven", ["drop", "pad", "repeat"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_have_the_order_together_and_equally_many_steps(shards, uneven, world):
    options = {"shuffle": forebay.Block(2), "seed": 9, "uneven": uneven, "epochs": 2}
    alone = keys(shards.loader(1, **options))
    ranks = [
        list(
            map(
                keys,
                (
                    [b]
                    for b in shards.loader(
                        4, rank=r, world_size=world, stream=r % 2 == 1, **options
                    )
                ),
            )
        )
        for r in range(world)
    ]
    assert len({len(steps) for steps in ranks}) == 1
    together = [k for step in zip(*ranks, strict=True) for batch in step for k in batch]
    stride, n = 4 * world, len(ALL)
    whole = n // stride * stride if uneven == "drop" else -(-n // stride) * stride
    for epoch in range(2):
        order, given = (
            alone[epoch * n : (epoch + 1) * n],
            together[epoch * whole : (epoch + 1) * whole],
        )
        assert given[:n] == order[:whole]
        assert given[n:] == order[: max(0, whole - n)]


def test_any_interruption_continues_exactly(shards):
    rng = random.Random(SEED)
    options = {
        "shuffle": forebay.Block(3),
        "seed": rng.randrange(1000),
        "epochs": 2,
        "uneven": "pad",
    }
    order = keys(shards.loader(1, **options))
    for _ in range(6):
        seen: list[str] = []
        state = None
        while len(seen) < len(order):
            loader = shards.loader(
                rng.choice([1, 4, 13, 64]),
                stream=rng.random() < 0.5,
                prefetch=rng.randrange(5),
                **options,
            )
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            if rng.random() < 0.3:
                loader = pickle.loads(pickle.dumps(loader))
            for batch in itertools.islice(loader, rng.randrange(1, 12)):
                seen += keys([batch])[: loader.last.real]
            state = loader.state_dict()
        assert seen == order, f"seed {SEED}"


def test_what_cannot_be_is_refused_in_words(shards, shards_node):
    for shuffle in (forebay.Full(), forebay.Window(10)):
        with pytest.raises(forebay.InvalidRequest, match="all rows before the first"):
            shards.loader(8, shuffle=shuffle)
    with pytest.raises(forebay.InvalidRequest, match="bounded by length"):
        shards.loader(8, max_total=10, length="bin")
    state = shards.loader(8, shuffle=forebay.Block(2), seed=1).state_dict()
    with pytest.raises(forebay.InvalidRequest, match="another seed"):
        shards.loader(8, shuffle=forebay.Block(2), seed=2).load_state_dict(state)
    for wrong in (
        {},
        {**state, "group": 999},
        {**state, "position": -1},
        {**state, "position": 1 << 64},
        None,
    ):
        with pytest.raises(forebay.InvalidRequest):
            shards.loader(8, shuffle=forebay.Block(2), seed=1).load_state_dict(wrong)
    with pytest.raises(TypeError, match="strict"):
        shards.loader(8, shuffle=forebay.Block(2), seed=1).load_state_dict(state, strict="no")
    with pytest.raises(forebay.InvalidRequest, match="column 'bin' is named 2 times"):
        forebay.open_shards("sets/train-*.tar", url=shards_node.url, columns=["bin", "bin"])
    with pytest.raises(forebay.InvalidRequest, match="less than one step") as few:
        list(shards.loader(len(ALL) + 1, shuffle=forebay.Block(2)))
    assert 'uneven="pad"' in few.value.hint
    # Which helps where there are rows.
    empty = forebay.open_shards("sets/train-3.tar", url=shards_node.url)
    for uneven in ("drop", "pad", "repeat"):
        with pytest.raises(forebay.InvalidRequest) as none:
            list(empty.loader(8, uneven=uneven))
        assert "uneven" not in none.value.hint
    with pytest.raises(forebay.NotFound, match=r"none of the 1 names"):
        forebay.open_shards("sets/train-readme.txt", url=shards_node.url)
    with pytest.raises(forebay.InvalidRequest, match="one process"):
        list(DataLoader(shards.loader(8).torch(), batch_size=None, num_workers=2))
    loader = shards.loader(8, shuffle=forebay.Block(2), decode=lambda row: 1 / 0)
    with pytest.raises(forebay.SampleFailed, match=r"sets/train-\d\.tar.*ZeroDivisionError"):
        list(loader)


def test_what_only_datasets_have_is_told(shards):
    for name in ("filter", "take", "schema", "describe"):
        assert not hasattr(shards, name)
        with pytest.raises(AttributeError, match=rf"{name}.*forebay\.open"):
            getattr(shards, name)
    for name in ("head", "num_rows", "rename_column", "column_names"):
        with pytest.raises(AttributeError, match=rf"{name}.*forebay\.open"):
            getattr(shards, name)
    for name, said in {
        "shuffle": r"loader\(.*shuffle=",
        "batch": r"loader\(batch_size\)",
        "state_dict": r"loader\(batch_size\)\.state_dict",
    }.items():
        with pytest.raises(AttributeError, match=rf"no {name!r}: .*{said}") as told:
            getattr(shards, name)
        assert "forebay.open" not in str(told.value)
    with pytest.raises(AttributeError) as missing:
        _ = shards.nothing
    assert "open" not in str(missing.value)
    assert pickle.loads(pickle.dumps(shards)).id == shards.id


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("torch", {"output": "torch"}),
        ("torch", {"pin_memory": True, "collate": list}),
        ("jax", {"output": "jax"}),
        ("pyarrow", {"output": "arrow"}),
    ],
)
def test_a_missing_framework_is_told_before_the_loop(shards, monkeypatch, module, options):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs .*: pip install {module}"):
        shards.loader(8, **options)


def test_in_a_dataloader_without_workers(shards):
    loader = shards.loader(8, shuffle=forebay.Block(2), seed=4)
    expected = keys(shards.loader(8, shuffle=forebay.Block(2), seed=4))
    assert keys(DataLoader(loader.torch(), batch_size=None)) == expected


def test_a_part_is_described_as_the_api_says(shards_node):
    def ask(spec):
        request = urllib.request.Request(
            f"{shards_node.url}/v1/datasets",
            json.dumps(spec).encode(),
            {"Accept": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read().splitlines()[-1])

    whole = ask({"sources": ["sets/train-*.tar"], "format": "objects"})
    rows = 0
    for begin in range(0, 1 << 20, PART):
        part = ask(
            {"part": {"of": whole["id"], "files": [0, 2], "from": begin, "until": begin + PART}}
        )
        assert part["format"] == "tar"
        rows += part["rows"]
    assert rows == SHARDS[0] + SHARDS[2]
    thirds = [
        {"of": whole["id"], "files": [0, 2], "from": n, "until": n + 1, "pieces": 3}
        for n in range(3)
    ]
    rows = [ask({"part": part})["rows"] for part in thirds]
    assert sum(rows) == SHARDS[0] + SHARDS[2] and all(rows)
    for wrong, said in (
        ({"of": whole["id"], "files": [6], "from": 0}, "file 6, but the dataset has 6 files"),
        ({"of": "nothing", "files": [0], "from": 0}, "does not know the dataset"),
        ({"of": whole["id"], "files": [0], "from": 3, "pieces": 3}, "places that no file has"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask({"part": wrong})
        assert said in refused.value.read().decode()


# Far away: the order in which things happen.


class Far:
    """Shards at an S3 server behind a thin line, and a node with an empty cache before it."""

    def __init__(self, tmp_path, shards: dict[str, bytes], rate: str, options=()) -> None:
        self.stack = []
        self.origin = self._kept(Versitygw(tmp_path))
        s3 = s3_client(self.origin.url)
        s3.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": REGION})
        for name, data in shards.items():
            s3.put_object(Bucket="far", Key=name, Body=data)
        self.s3 = s3
        command = [
            forebay_program(),
            "distance",
            "--listen",
            "127.0.0.1:0",
            "--stats-listen",
            "127.0.0.1:0",
        ]
        command += ["--to", f"127.0.0.1:{self.origin.port}", "--rtt", "10ms", "--rate", rate]
        line = self._kept(Process("distance", command, {}, tmp_path))
        line.wait_until(lambda: line.lines, "ready")
        address, self.counters = re.search(
            r"distance: (\S+) to .* counters at (http://[^/]+/)", line.lines[0]
        ).groups()
        self.node = self._kept(
            Node(f"http://{address}", ["far"], tmp_path / "node", options=options)
        )

    def _kept(self, process):
        self.stack.append(process)
        return process

    def received(self) -> int:
        with urllib.request.urlopen(self.counters, timeout=60) as answer:
            return json.load(answer)["bytes_to_client"]

    def close(self) -> None:
        for process in reversed(self.stack):
            process.stop()


@pytest.fixture
def far(tmp_path):
    made = []

    def start(shards, rate="6MiB", options=()):
        made.append(Far(tmp_path, shards, rate, options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def noise(n: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(n)


def large(shard: int, samples: int = 120, repeats=()) -> bytes:
    members = (
        (f"s{shard}/{n:03}", {"bin": noise(32 << 10, shard * 1000 + n)}) for n in range(samples)
    )
    return tar(members, repeats)


def check(rows) -> None:
    for row in rows:
        shard, number = int(row["__key__"][1]), int(row["__key__"][3:])
        assert bytes(row["bin"]) == noise(32 << 10, shard * 1000 + number), row["__key__"]


@pytest.mark.parametrize("stream", [False, True])
def test_rows_come_before_their_shards_are_whole_and_once(far, stream):
    far = far({f"t{i}.tar": large(i) for i in range(3)})
    shards = forebay.open_shards("far/*.tar", url=far.node.url, part_bytes=512 << 10)
    loader = shards.loader(16, shuffle=forebay.Block(3), seed=3, stream=stream, uneven="pad")
    came, seen = [], []
    for batch in loader:
        came.append(far.received())
        check(batch)
        seen += keys([batch])[: loader.last.real]
    assert len(seen) == len(set(seen)) == 360
    whole = 3 * 120 * (33 << 10)
    # The first batch needs 1.5 MiB of the 11.6; half of it is room for what was in flight.
    assert came[0] < whole * 0.45, f"{came[0]} of {whole} bytes before the first batch"
    assert came[len(came) // 2] < whole, "the second half waited for the last byte"
    assert far.received() < whole * 1.05, "something was fetched twice"
    # Again, in the next epoch: everything is here.
    again = list(loader)
    assert keys(again) != seen and far.received() < whole * 1.05


def test_a_name_that_is_repeated_later_changes_nothing_for_rows(far):
    # By name the first one counts; rows are found by their place.
    far = far({"r.tar": large(1, 60, [("s1/000.bin", b"again"), ("s1/030.bin", b"and again")])})
    shards = forebay.open_shards("far/r.tar", url=far.node.url, part_bytes=256 << 10)
    rows = [row for batch in shards.loader(8, uneven="pad") for row in batch][:62]
    check(rows[:60])
    assert [(r["__key__"], bytes(r["bin"])) for r in rows[60:]] == [
        ("s1/000", b"again"),
        ("s1/030", b"and again"),
    ]
    client = forebay.Client(far.node.url)
    items = list(client.batch([("far", "r.tar", f"s1/00{n}.bin") for n in range(2)]))
    assert [bytes(item.data) for item in items] == [noise(32 << 10, 1000 + n) for n in range(2)]


def test_a_shard_that_is_damaged_in_the_middle_gives_what_is_before(far):
    data = bytearray(large(1, 100))
    at = 60 * (33 << 10)
    data[at - at % 512 : at - at % 512 + (40 << 10)] = b"\xff" * (40 << 10)
    far = far({"d.tar": bytes(data)}, rate="50MiB")
    shards = forebay.open_shards("far/d.tar", url=far.node.url, part_bytes=256 << 10)
    seen = []
    with pytest.raises(forebay.Damaged, match=r"far/d\.tar") as damage:
        for batch in shards.loader(4):
            check(batch)
            seen += keys([batch])
    assert "leave the shard out" in damage.value.hint, "there is no on_damaged= for shards"
    assert 40 <= len(seen) < 60 and seen == [f"s1/{n:03}" for n in range(len(seen))]


def test_a_shard_that_cannot_be_read_is_not_left_out(far):
    """As a damaged one: what a dataset could be told to leave out, shards cannot."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("s/0.txt")
        member.pax_headers = {"comment": "x" * (2 << 20)}
        tar.addfile(member, io.BytesIO())
    far = far({"u.tar": out.getvalue()})
    shards = forebay.open_shards("far/u.tar", url=far.node.url)
    with pytest.raises(forebay.Unsupported, match=r"far/u\.tar.*extended tar header") as e:
        list(shards.loader(4))
    assert e.value.hint.startswith("leave the shard out")


def test_a_shard_that_is_replaced_in_the_middle_is_reported(far):
    far = far({"c.tar": large(1), "d.tar": large(2)})
    shards = forebay.open_shards("far/*.tar", url=far.node.url, part_bytes=256 << 10)
    loader = shards.loader(8)
    batches = iter(loader)
    check(next(batches))
    far.s3.put_object(Bucket="far", Key="d.tar", Body=large(3))
    with pytest.raises(forebay.Changed, match=r"d\.tar"):
        for batch in batches:
            check(batch)


def settled(node) -> float:
    """Memory in use, but for decoded blocks that are kept; their reservation is a little more than
    their bytes.
    """
    metrics = node.metrics()
    used = metrics["forebay_memory_used_bytes"] - metrics["forebay_rows_cached_bytes"]
    return 0 if used < 4096 else used


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_that_is_left_in_the_middle_leaves_nothing(far, stream):
    far = far({f"t{i}.tar": large(i) for i in range(4)}, rate="12MiB")
    before, threads_before = settled(far.node), set(threading.enumerate())
    shards = forebay.open_shards("far/*.tar", url=far.node.url, part_bytes=512 << 10)
    loader = shards.loader(8, shuffle=forebay.Block(2), stream=stream)
    for batch in loader:
        check(batch)
        break
    del batch
    waiting = threading.Thread(target=list, args=(iter(loader),))
    waiting.start()
    loader.close()
    waiting.join(60)
    assert not waiting.is_alive(), "a loop that was closed waits on"
    del loader, waiting
    gc.collect()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        new = set(threading.enumerate()) - threads_before
        threads = [t.name for t in new if t.name.startswith("forebay-")]
        if not threads and settled(far.node) <= before:
            break
        time.sleep(0.1)
    assert not threads and settled(far.node) <= before
    # What it has fetched is reused.
    assert len(list(shards.loader(8, shuffle=forebay.Block(2)))) == 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_that_is_started_anew_goes_on(far, stream):
    """In the middle of a part, which the new process does not know."""
    far = far({f"t{i}.tar": large(i) for i in range(3)}, rate="100MiB")
    client = forebay.Client(far.node.unix_url, timeout=30)
    shards = forebay.open_shards("far/*.tar", client=client, part_bytes=4 << 20)
    options = {"shuffle": forebay.Block(2), "seed": 1, "stream": stream, "prefetch": 1}
    if stream:
        # So that it is not all received before the node stops.
        options["window_bytes"] = 300_000
    expected = keys(shards.loader(8, **options))
    seen = []
    for number, batch in enumerate(shards.loader(8, **options)):
        seen += keys([batch])
        if number in (3, 20):
            start_anew(far)
    assert seen == expected


def start_anew(far) -> None:
    """Another process in place of the node, which knows no part of any shard."""
    directory, socket = far.node.directory, far.node.socket
    url = next(a for a in far.node.process.args if str(a).startswith("s3://far"))
    far.node.stop()
    far.node = far._kept(Node("", [], directory, options=["--origin", url], socket=socket))


def test_a_node_that_is_started_anew_is_told_what_a_part_is(far):
    far = far({f"t{i}.tar": large(i, 40) for i in range(3)}, rate="100MiB")
    client = forebay.Client(far.node.unix_url, timeout=30)
    shards = forebay.open_shards("far/*.tar", client=client, part_bytes=128 << 10)
    span = Span((0, 1), 0, 8)
    expected = shards.dataset(span, None, None)
    part = shards.dataset(span, None, None)
    rows = [f.rows for f in expected.files]
    start_anew(far)
    assert [f.rows for f in part.files] == rows
    start_anew(far)
    assert part.block_shape == shards.dataset(span, None, None).block_shape


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_a_stateful_dataloader_resumes_at_every_step(shards, uneven):
    options = {"shuffle": forebay.Block(2), "seed": 3, "epochs": 2, "uneven": uneven}

    def data():
        return StatefulDataLoader(shards.loader(11, **options).torch(), batch_size=None)

    # Lists of rows, as the default collate makes them.
    whole = [[row["__key__"] for row in batch] for batch in data()]
    for steps in (1, 5, len(whole) // 2, len(whole) // 2 + 1, len(whole) - 1):
        first = data()
        batches = iter(first)
        for _ in range(steps):
            next(batches)
        saved = first.state_dict()
        again = data()
        again.load_state_dict(saved)
        assert [[row["__key__"] for row in batch] for batch in again] == whole[steps:], steps
        again = shards.loader(11, **options).torch()
        again.load_state_dict(state_of(saved, again, strict=False), strict=False)
        assert [keys([batch]) for batch in again] == whole[steps:], steps
        loader = shards.loader(11, **options)
        loader.load_state_dict(state_of(saved, loader.torch()))
        assert [keys([batch]) for batch in loader] == whole[steps:], steps


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_the_state_after_so_many_steps_is_that_of_the_loop(shards, uneven):
    """Also where the last group of an epoch ends with rows that make no step."""
    for size in (2, 3, 4, 5, 7, 11):
        loader = shards.loader(size, shuffle=forebay.Block(2), seed=3, epochs=2, uneven=uneven)
        start = loader.state_dict()
        states = [loader.state_dict() for _ in loader]
        for steps in (1, 5, len(states) // 2, len(states) // 2 + 1, len(states)):
            assert loader.after(start, steps) == states[steps - 1], (size, steps)


def test_a_sample_that_fails_is_named_by_its_place_in_a_shard(shards):
    def fails(row):
        raise ValueError(row["__key__"])

    loader = shards.loader(11, decode=fails, on_error="skip", max_skipped=60)
    with pytest.raises(forebay.SampleFailed) as failed:
        list(loader)
    # Not by a number in the dataset, which nobody knows yet.
    assert re.match(r"row \d+ of sets/train-2\.tar( from byte \d+ on)?: Val", failed.value.message)


@pytest.mark.parametrize("cause", ["origin_s", "network_s"])
def test_a_wait_for_the_rows_of_shards_is_charged_to_its_cause(shards, monkeypatch, cause):
    def slowly(*of):
        time.sleep(0.1)
        group = open_group(*of)
        at_node = 0.1 if cause == "origin_s" else 0.0
        return dataclasses.replace(group, found_s=group.found_s + at_node)

    open_group = _shards.open_group
    monkeypatch.setattr(_shards, "open_group", slowly)
    loader = shards.loader(11)
    list(loader)
    waits = loader.report(order=False).json()["run"]["waits"]
    others = sum(waits[c] for c in ("origin_s", "disk_s", "prepare_s", "network_s") if c != cause)
    assert waits["node_s"] > 0.1 and waits[cause] > 0.1
    # The rows themselves are there at once.
    assert waits[cause] > others


@pytest.mark.parametrize(("stream", "job"), [(False, None), (True, None), (False, "finds")])
def test_what_finding_rows_takes_is_for_the_job(tmp_path, stream, job):
    (tmp_path / "sets").mkdir()
    row = {"bin": bytes(64 << 10)}
    for shard in range(2):
        data = tar((key(shard, n), row) for n in range(100))
        (tmp_path / "sets" / f"new-{shard}.tar").write_bytes(data)
    options = ["--origin", f"file://{tmp_path / 'sets'}"]
    node = Node("", [], tmp_path / "node", options=options)
    try:
        options = {"url": node.url, "part_bytes": 2 << 20}
        shards = forebay.open_shards("sets/new-*.tar", **options, job=job)
        size = sum(file.size for file in shards.files)
        loader = shards.loader(10, shuffle=forebay.Block(2), stream=stream, job="finds")
        assert sum(len(batch) for batch in loader) == 200
        origin = loader.report(order=False).json()["origin"]
        # The first bytes of each shard came when they were listed, for nobody or for the job.
        first = 0 if job else 2 * (2 << 20)
        assert size - first <= origin["read_bytes"] <= size and origin["reads"] > 0
        assert json.loads(shards.client.job("finds"))["origin_bytes"] == origin["read_bytes"]
    finally:
        node.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_all_rows_of_shards_are_on_the_account_of_their_job(shards, stream):
    """Those of steps in which groups end, too, whichever thread reads them."""
    loader = shards.loader(11, uneven="repeat", stream=stream)
    for begin in (0, 4):
        loader.load_state_dict(loader.order.at(0, begin))
        assert list(loader)
        assert loader.report(order=False).json()["origin"]["of"] == ""
    # So is what they are counted for; and nothing that this thread asks for later.
    loader = shards.loader(11)
    assert len(loader) and json.loads(shards.client.job(loader.job))["name"] == loader.job
    rows = [json.loads(shards.client.job(loader.job))["rows"]]
    group = loader.groups().get(0, 0, Stop())
    group.loader.datasets[0].read(np.arange(2, dtype=np.uint64))
    rows.append(json.loads(shards.client.job(loader.job))["rows"])
    assert rows == [0, 0]


def test_shards_have_a_report_and_one_job(shards):
    loader = shards.loader(11, shuffle=forebay.Block(2), epochs=2)
    received = {0: 0, 1: 0}
    batches = 0
    for rows in loader:
        received[loader.last.epoch] += rows.nbytes
        batches += 1
    report = loader.report(place="aws/us-east-1").json()
    assert report["money"] is not None and report["origin"]["of"] == "", report["absent"]
    assert report["run"]["batches"] == batches and report["job"] == loader.job
    # Also of the steps in which groups end, and each epoch has its own.
    assert report["run"]["bytes"] == loader.stats().bytes == sum(received.values())
    assert {epoch["epoch"]: epoch["bytes"] for epoch in report["epochs"]} == received
    assert any("nobody has indexed" in why for why in report["absent"])
    assert "shuffle block:2" in report["title"]
    assert loader.stored() == [(shards.name, sum(file.size for file in shards.files))]
    assert pickle.loads(pickle.dumps(loader)).job == loader.job
