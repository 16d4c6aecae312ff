"""Packs of tokens, against a plain model: all strategies, ranks, resume at every step, tokenizers,
DataLoader workers, streams.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import signal
import sys
import threading
import time

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from forebay import _collate, _fetch
from forebay._stop import Bell
from forebay.errors import InvalidRequest, SampleFailed
from forebay.torch import Resumable, state_of
from servers import Node
from test_plan import GOLDEN, MASK, mix, permutation
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = float(os.environ.get("FOREBAY_TEST_CASES", "1"))
ROWS = {"a": 211, "b": 61}
STRATEGIES = ("concatenate", "best_fit", "one_per_row")
#: The end of a document.
EOS = 7


def tokens_of(name: str, row: int) -> list[int]:
    """Tokens that say which they are; some rows have none."""
    order = random.Random(f"{name}{row}")
    length = order.choice([0, 1, order.randrange(12), order.randrange(50)])
    base = {"a": 100_000, "b": 200_000_000}[name]
    return [base + 100 * row + at for at in range(length)]


def table(name: str) -> pa.Table:
    rows = [tokens_of(name, row) for row in range(ROWS[name])]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3 * len(rows), dtype="i2")), 3)
    # A missing list is as good as an empty one.
    return pa.table(
        {
            "tokens": pa.array([r or None for r in rows], pa.list_(pa.int32())),
            "n": pa.array([len(r) for r in rows], pa.int16()),
            "text": [" ".join(map(str, r)) for r in rows],
            "large": pa.array(rows, pa.large_list(pa.uint32())),
            "three": fixed,
            "some": pa.array(
                [[row, 1] if row % 2 else None for row in range(len(rows))], pa.list_(pa.int16(), 2)
            ),
            "twice": pa.array([[[1, 2], [3, 4]] for _ in rows], pa.list_(pa.list_(pa.int32(), 2))),
            "utf8": [" ".join(map(str, r)).encode() for r in rows],
            "bad": pa.array([[1, None] for _ in rows], pa.list_(pa.int32())),
            "x": pa.array([[0.5] for _ in rows], pa.list_(pa.float32())),
        }
    )


@pytest.fixture(scope="module")
def packs_node(tmp_path_factory):
    root = tmp_path_factory.mktemp("packs")
    for name in ROWS:
        (root / "packs" / name).mkdir(parents=True)
        pq.write_table(table(name), root / "packs" / name / "0.parquet", row_group_size=20)
    server = Node("", [], root / "node", options=["--origin", f"file://{root / 'packs'}"])
    yield server
    server.stop()


@pytest.fixture
def ds(packs_node):
    return forebay.open("packs/a/*.parquet", url=packs_node.url)


@pytest.fixture
def pair(packs_node):
    return [forebay.open(f"packs/{name}/*.parquet", url=packs_node.url) for name in "ab"]


def words(text: str) -> list[int]:
    return [int(word) for word in text.split()]


# The model: lists, and no arithmetic but lengths.


def order_of(loader, epoch: int) -> list[tuple[str, int]]:
    rows, sources = loader.order._plan.rows(epoch, 0, loader.rows_per_epoch)
    pairs = zip(np.asarray(sources).tolist(), np.asarray(rows).tolist(), strict=True)
    return [("ab"[source], row) for source, row in pairs]


def key_of(seed: int, epoch: int, start: int) -> int:
    key = mix(seed ^ GOLDEN)
    for part in (8, 0, epoch, start):
        key = mix((key + GOLDEN & MASK) ^ mix(part * GOLDEN & MASK))
    return key


def model(loader, pack: forebay.Pack, epoch: int = 0) -> list[list[list[int]]]:
    """The packs of an epoch: each is a list of pieces of documents, which are lists of tokens."""
    length, rows = pack.length, order_of(loader, epoch)

    def parts(name: str, row: int) -> list[list[int]]:
        document = tokens_of(name, row)
        if document and pack.eos_id is not None:
            document.append(pack.eos_id)
        if len(document) > length and pack.too_long == "skip":
            return []
        if len(document) > length and pack.too_long == "cut":
            document = document[:length]
        return [document[at : at + length] for at in range(0, len(document), length)]

    if pack.strategy == "one_per_row":
        return [[part] for name, row in rows for part in parts(name, row)]
    if pack.strategy == "concatenate":
        packs: list[list[list[int]]] = [[]]
        for name, row in rows:
            for at, token in enumerate(itertools.chain(*parts(name, row))):
                if sum(map(len, packs[-1])) == length:
                    packs.append([])
                if at == 0 or not packs[-1]:
                    packs[-1].append([])
                packs[-1][-1].append(token)
        return [p for p in packs if p]
    packs = []
    for start in range(0, len(rows), pack.window):
        window = [
            (number, part)
            for number, (name, row) in enumerate(rows[start : start + pack.window])
            for part in parts(name, row)
        ]
        bins: list[list[tuple[int, list[int]]]] = []
        for number, part in sorted(window, key=lambda w: -len(w[1])):
            sizes = [sum(len(p) for _, p in b) for b in bins]
            fits = [i for i, size in enumerate(sizes) if size + len(part) <= length]
            if not fits:
                bins.append([])
                fits, sizes = [len(bins) - 1], [*sizes, 0]
            bins[max(fits, key=lambda i: (sizes[i], -i))].append((number, part))
        for number in permutation(len(bins), key_of(loader.options.seed, epoch, start)):
            made = sorted(bins[number], key=lambda b: (b[0], -len(b[1])))
            packs.append([part for _, part in made])
    return packs


def read_back(batch: dict, pack: forebay.Pack) -> list[list[list[int]]]:
    """The packs of a batch, after a look at all that it says about them."""
    arrays = {name: np.asarray(value) for name, value in batch.items()}
    size, length = arrays["tokens"].shape
    assert length == pack.length
    cu = arrays["cu_seqlens"].tolist()
    assert arrays["cu_seqlens"].dtype == np.int32 and arrays["position_ids"].dtype == np.int32
    assert cu[0] == 0 and cu[-1] == size * length and cu == sorted(set(cu))
    assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(cu))
    packs, bounds = [], {0, size * length}
    for number in range(size):
        row = {n: arrays[n][number].tolist() for n in ("tokens", "position_ids", "document_ids")}
        mask, filled = arrays["mask"][number], int(arrays["lengths"][number])
        assert mask.tolist() == [i < filled for i in range(length)]
        assert row["tokens"][filled:] == [pack.pad_id] * (length - filled)
        assert set(row["document_ids"][filled:]) <= {-1}
        assert set(row["position_ids"][filled:]) <= {0}
        pieces: list[list[int]] = []
        for at in range(filled):
            if row["position_ids"][at] == 0:
                bounds.add(number * length + at)
                pieces.append([])
            assert row["position_ids"][at] == len(pieces[-1])
            assert row["document_ids"][at] == len(pieces) - 1
            pieces[-1].append(row["tokens"][at])
        if filled < length:
            bounds.add(number * length + filled)
        packs.append(pieces)
    assert cu == sorted(bounds)
    return packs


def random_pack(order: random.Random, **fixed) -> forebay.Pack:
    kind = order.choice(["read", "known", "array", "tokenized"])
    given: dict = {
        "strategy": order.choice(STRATEGIES),
        "too_long": order.choice(["split", "cut", "skip"]),
        "window": order.choice([1, 7, 64, 1000]),
        "eos_id": order.choice([None, EOS]),
        "pad_id": order.choice([0, 3]),
    }
    if kind == "tokenized":
        given |= {"column": "text", "tokenize": words}
    if kind == "known" or (kind == "tokenized" and order.random() < 0.3):
        given["lengths"] = "n"
    if kind == "array":
        given["lengths"] = np.array([len(tokens_of("a", row)) for row in range(ROWS["a"])])
    return forebay.Pack(**{"length": order.choice([3, 16, 33, 200]), **given, **fixed})


SHUFFLES = [None, forebay.Full(), forebay.Block(2), forebay.Window(50)]


def taken(loaders, pack, steps: int | None = None) -> list[list[list[int]]]:
    """The packs of all ranks, step after step."""
    found = []
    for step in itertools.islice(zip(*loaders, strict=True), steps):
        for batch in step:
            found += read_back(batch, pack)
    return found


@pytest.mark.parametrize("number", range(int(24 * CASES) or 1))
def test_every_rank_gets_its_packs_of_those_of_the_model(ds, number):
    order = random.Random(SEED + number)
    pack = random_pack(order)
    world, batch = order.randrange(1, 5), order.randrange(1, 4)
    options = {
        "pack": pack,
        "batch_size": batch,
        "shuffle": order.choice(SHUFFLES),
        "seed": order.randrange(1000),
        "threads": order.choice([0, 1, 3]),
        "uneven": order.choice(["drop", "pad"]),
        "world_size": world,
    }
    print(f"FOREBAY_TEST_SEED={SEED}", number, options)
    loaders = [ds.loader(rank=rank, output="numpy", **options) for rank in range(world)]
    for epoch in range(2):
        expected = model(loaders[0], pack, epoch)
        stride = world * batch
        if options["uneven"] == "drop":
            expected = expected[: len(expected) // stride * stride]
        else:
            expected += [[]] * (-len(expected) % stride)
        if not expected:
            with pytest.raises(InvalidRequest, match="an epoch makes"):
                list(loaders[0])
            return
        assert taken(loaders, pack) == expected
        assert all(loader.epoch == epoch + 1 for loader in loaders)
    # What was handed out and what was wasted, of all ranks together.
    stats = [loader.stats() for loader in loaders]
    places = sum(s.tokens + s.padding for s in stats)
    assert places == sum(s.batches for s in stats) * batch * pack.length
    assert json.dumps(stats[0].to_dict())


@pytest.mark.parametrize("number", range(int(12 * CASES) or 1))
def test_a_job_goes_on_after_any_step_with_other_ranks(ds, number):
    order = random.Random(SEED + 1000 + number)
    strategy = STRATEGIES[number % 3]
    pack = random_pack(order, strategy=strategy, length=order.choice([16, 33]))
    common = {"pack": pack, "shuffle": order.choice(SHUFFLES), "seed": order.randrange(1000)}
    print(f"FOREBAY_TEST_SEED={SEED}", number, common)

    def loaders(world: int, batch: int, **more):
        return [
            ds.loader(**common, batch_size=batch, rank=r, world_size=world, **more)
            for r in range(world)
        ]

    first, batch = order.randrange(1, 5), order.randrange(1, 4)
    expected = [p for e in range(2) for p in model(loaders(1, 1)[0], pack, e)]
    of_first = len(model(loaders(1, 1)[0], pack))
    ranks = loaders(first, batch, uneven="pad")
    states = [ranks[0].state_dict()]
    for step in zip(*ranks, strict=True):
        states.append(ranks[0].state_dict())
        assert len(step) == first and all(r.state_dict() == states[-1] for r in ranks)
    assert ranks[0].state_dict()["epoch"] == 1
    assert max(len(json.dumps(state)) for state in states) < 400
    for done, state in enumerate(states):
        world, size = order.randrange(1, 5), order.randrange(1, 4)
        again = loaders(world, size, uneven="pad", epochs=2)
        for loader in again:
            loader.load_state_dict(json.loads(json.dumps(state)))
        steps = order.choice([1, 2, 5, None]) if done % 7 else None
        found = taken(again, pack, steps)
        passed = min(done * first * batch, of_first)
        # Each epoch ends with packs of padding that fill up its last step.
        rest = expected[passed:of_first]
        rest = rest + [[]] * (-len(rest) % (world * size))
        rest += expected[of_first:]
        rest += [[]] * (-(len(expected) - of_first) % (world * size))
        assert found == rest[: len(found)] and (steps or len(found) == len(rest))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [None, "n"])
@pytest.mark.parametrize("window", [1024, 42])
def test_a_state_after_the_last_step_is_in_the_next_epoch(
    ds, strategy, lengths, window, monkeypatch
):
    """What is left makes no step, and a loop that goes on there has the next epoch. It may be a
    window of its own.
    """
    for name in ("READ_ROWS", "READ_ROWS_MOST"):
        monkeypatch.setattr(forebay.pack, name, window)
    pack = forebay.Pack(30, strategy=strategy, lengths=lengths, window=window)
    own = ds.loader(pack=pack, batch_size=7)
    states = [own.state_dict() for _ in own]
    assert states[-1]["epoch"] == 1 and all(state["epoch"] == 0 for state in states[:-1])
    resumed = ds.loader(pack=pack, batch_size=7)
    resumed.load_state_dict(states[-1])
    assert taken([resumed], pack) == taken([own], pack) and len(states) > 1


class Late(Exception):
    """What a signal handler raises, such as a limit of the time that a batch may take."""


@pytest.mark.parametrize("how", ["loop", "torch"])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("packs", [False, True])
def test_what_a_signal_handler_raises_in_a_wait_loses_nothing(ds, how, threads, packs, monkeypatch):
    for name in ("READ_ROWS", "READ_ROWS_MOST"):
        monkeypatch.setattr(forebay.pack, name, 42)
    options: dict = {"pack": forebay.Pack(30, window=42)} if packs else {"columns": ["n"]}

    def begun():
        loader = ds.loader(batch_size=3, output="numpy", threads=threads, **options)
        return iter(loader) if how == "loop" else iter(loader.torch())

    def plain(batch: dict) -> dict:
        return {name: np.asarray(value).tolist() for name, value in batch.items()}

    expected = [plain(batch) for batch in begun()]
    read, goes_on, main = _fetch.read, threading.Event(), threading.get_ident()

    def slow(datasets, columns, rows, sources):
        assert rows[0] < 84 or goes_on.wait(60)
        return read(datasets, columns, rows, sources)

    def interrupt() -> None:
        """Once the main thread waits."""
        seen = 0
        while seen < 3 and not goes_on.wait(0.02):
            waits = sys._current_frames()[main].f_code is Bell.wait_until.__code__
            seen = seen + 1 if waits else 0
        os.kill(os.getpid(), signal.SIGUSR1)

    def late(*_) -> None:
        raise Late

    monkeypatch.setattr(_fetch, "read", slow)
    before = signal.signal(signal.SIGUSR1, late)
    sender = threading.Thread(target=interrupt)
    try:
        batches, found, interrupts = begun(), [], 0
        sender.start()
        while len(found) < len(expected):
            try:
                found.append(plain(next(batches)))
            except Late:
                interrupts += 1
                # It is not raised again.
                assert interrupts == 1
                goes_on.set()
    finally:
        goes_on.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert found == expected and interrupts == 1
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_left_out_is_counted_with_its_step(ds, strategy):
    pack = forebay.Pack(20, strategy=strategy, too_long="skip", window=40)

    def loader(state=None):
        made = ds.loader(pack=pack, batch_size=2, shuffle="full", seed=3)
        if state is not None:
            made.load_state_dict(state)
        return made

    def counted(stats):
        return stats.rows_left_out, stats.tokens_cut

    own, seen = loader(), []
    order = [len(tokens_of("a", row)) for _, row in order_of(own, 0)]
    for _ in own:
        seen.append((own.state_dict(), counted(own.stats())))
    for state, count in seen[:-1]:
        at = state["position"]
        if strategy == "best_fit":
            # Of whole windows, also of one that is not at its end.
            at += 40 if "packs" in state["pack"] and state["pack"]["packs"] else 0
        long = [n for n in order[:at] if n > 20]
        assert count == (len(long), sum(long))
        late = loader(state)
        list(late)
        assert np.add(count, counted(late.stats())).tolist() == list(seen[-1][1])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("window", [1024, 25])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_left_out_after_the_last_step_is_counted_too(
    ds, strategy, window, world, monkeypatch
):
    """It may be windows of their own, of which nothing is left."""
    for name in ("READ_ROWS", "READ_ROWS_MOST"):
        monkeypatch.setattr(forebay.pack, name, window)
    sizes = [len(tokens_of("a", row)) for row in range(ROWS["a"])]
    short, long = (
        [row for row, size in enumerate(sizes) if size and (size > 20) == is_long]
        for is_long in (False, True)
    )
    # So many that they fill whole packs.
    whole = next(n for n in range(50, 100) if sum(sizes[row] for row in short[:n]) % 20 == 0)
    some = ds.select(short[:whole] + long)
    pack = forebay.Pack(20, strategy=strategy, too_long="skip", window=window)
    loaders = [
        some.loader(pack=pack, batch_size=1, uneven="pad", rank=rank, world_size=world)
        for rank in range(world)
    ]
    states = [loaders[0].state_dict() for _ in zip(*loaders, strict=True)]
    assert [state["epoch"] for state in states] == [0] * (len(states) - 1) + [1]
    stats = [loader.stats() for loader in loaders]
    assert sum(s.rows_left_out for s in stats) == len(long)
    assert sum(s.tokens_cut for s in stats) == sum(sizes[row] for row in long)


def test_a_state_goes_to_other_packs_only_between_windows(ds):
    def loader(**pack):
        rules = {"window": 50, "strategy": "best_fit", **pack}
        return ds.loader(pack=forebay.Pack(16, **rules), batch_size=2)

    one = loader()
    next(iter(one))
    state = one.state_dict()
    assert state["pack"]["packs"] == 2 and state["position"] == 0
    for other, what in [
        (loader(window=51), "window=50"),
        (loader(too_long="cut"), "too_long='split'"),
        (loader(eos_id=1), "with eos_id=None"),
        (loader(strategy="concatenate"), "strategy='best_fit', window=50"),
        (loader(column="large"), "column='tokens'"),
        (ds.loader(batch_size=2), "between packs of tokens"),
    ]:
        with pytest.raises(InvalidRequest, match=what):
            other.load_state_dict(state)
    loader(pad_id=9, lengths="n").load_state_dict(state)
    for change in (
        {"packs": -1},
        {"packs": 1 << 40},
        {"packs": "2"},
        {"tokens": 3},
        {"rules": None},
        {"more": 1},
    ):
        with pytest.raises(InvalidRequest, match="changed after it was saved"):
            one.load_state_dict({**state, "pack": {**state["pack"], **change}})
    late = loader()
    late.load_state_dict({**state, "pack": {**state["pack"], "packs": 5000}})
    with pytest.raises(InvalidRequest, match="after 5000 packs of a window"):
        next(iter(late))
    # A rule for documents that are too long changes nothing of what came before, if none was.
    strict = loader(too_long="error")
    with pytest.raises(InvalidRequest, match=r"row \d+ of packs/a/0.parquet has \d+ tokens"):
        list(strict)
    roomy = ds.loader(pack=forebay.Pack(64, too_long="error"), batch_size=2)
    next(iter(roomy))
    ds.loader(pack=forebay.Pack(64), batch_size=2).load_state_dict(roomy.state_dict())
    with pytest.raises(InvalidRequest, match="length=64"):
        ds.loader(pack=forebay.Pack(65), batch_size=2).load_state_dict(roomy.state_dict())
    ended = ds.loader(pack=forebay.Pack(16, eos_id=1), batch_size=2)
    next(iter(ended))
    with pytest.raises(InvalidRequest, match=r"with an eos_id, strategy='concatenate' \("):
        loader().load_state_dict(ended.state_dict())
    # At the beginning of a window any packs will do, and a plain loader.
    begin = one.order.at(1, 0)
    loader(window=51).load_state_dict(begin)
    ds.loader(batch_size=2).load_state_dict(begin)
    bounded = ds.loader(max_total=100, length="n", lookahead=50)
    next(iter(bounded))
    with pytest.raises(InvalidRequest, match="batches of bounded length"):
        one.load_state_dict(bounded.state_dict())


def test_a_loop_that_was_left_goes_on_and_a_loader_travels(ds):
    pack = forebay.Pack(20, column="text", tokenize=words, eos_id=EOS)
    loader = ds.loader(pack=pack, batch_size=3, shuffle="full", threads=2, uneven="pad")
    found = []
    for batch in loader:
        found += read_back(batch, pack)
        if len(found) == 9:
            break
    for batch in itertools.islice(loader, 2):
        found += read_back(batch, pack)
    moved = pickle.loads(pickle.dumps(loader))
    for batch in moved:
        found += read_back(batch, pack)
    expected = model(loader, pack)
    assert found == expected + [[]] * (-len(expected) % 3)
    assert moved.last.real == (len(expected) % 3 or 3) and moved.epoch == 1
    with pytest.raises(TypeError, match="not known before"):
        len(loader)
    # Whoever asks whether there is a loader does not ask for its length.
    assert loader and moved
    assert "packs of 20 tokens (concatenate)" in repr(loader)


@pytest.mark.parametrize("lengths", [None, "n"])
def test_a_mix_is_packed_in_its_order(pair, lengths):
    of = forebay.mix(pair, [0.7, 0.3], epoch_rows=300)
    for strategy in STRATEGIES:
        pack = forebay.Pack(24, strategy=strategy, window=64, eos_id=EOS, lengths=lengths)
        loader = of.loader(pack=pack, batch_size=2, shuffle="block:2", uneven="pad", epochs=2)
        expected = model(loader, pack)
        expected += [[]] * (-len(expected) % 2)
        more = model(loader, pack, 1)
        expected += more + [[]] * (-len(more) % 2)
        assert taken([loader], pack) == expected
        assert loader.last.sources is not None


def test_tokens_of_several_types_become_those_that_hold_both(pair):
    a, b = pair
    b = b.rename({"large": "tokens", "tokens": "others"})
    both = [a.select_columns(["tokens"]), b.select_columns(["tokens"])]
    of = forebay.mix(both, [0.5, 0.5], epoch_rows=100)
    pack = forebay.Pack(24, pad_id=7)

    def loader():
        return of.loader(pack=pack, batch_size=2, shuffle="block:2", uneven="pad")

    assert next(iter(loader()))["tokens"].dtype == np.int64
    expected = model(loader(), pack)
    assert taken([loader()], pack) == expected + [[]] * (-len(expected) % 2)


def test_large_tokens_of_signed_and_unsigned_types_keep_their_digits(tmp_path):
    large = 2**53 + 1
    for n, kind in enumerate([pa.int64(), pa.uint64()]):
        tokens = pa.array([[large + 2 * (2 * i + n)] for i in range(8)], pa.list_(kind))
        (tmp_path / "data" / str(n)).mkdir(parents=True)
        pq.write_table(pa.table({"tokens": tokens}), tmp_path / "data" / str(n) / "a.parquet")
    where = {"origin": f"file://{tmp_path}/data", "cache": f"{tmp_path}/cache:64MiB"}
    both = [forebay.open(f"data/{n}/", **where) for n in range(2)]
    of = forebay.mix(both, [0.5, 0.5], epoch_rows=16)
    loader = of.loader(pack=forebay.Pack(4, pad_id=0), batch_size=1, uneven="pad")
    found = [int(t) for batch in loader for t in batch["tokens"].ravel() if t]
    assert sorted(found) == [large + 2 * i for i in range(16)]


def test_tokens_that_no_signed_type_holds_are_refused(tmp_path):
    tokens = [[5 * i, 5 * i + 1] for i in range(8)]
    tokens[6][1] = 2**63 + 3
    for name, kind in (("signed", pa.int64()), ("unsigned", pa.uint64())):
        (tmp_path / "data" / name).mkdir(parents=True)
        lists = tokens if name == "unsigned" else [[1]] * 8
        table = pa.table({"tokens": pa.array(lists, pa.list_(kind))})
        pq.write_table(table, tmp_path / "data" / name / "a.parquet")
    where = {"origin": f"file://{tmp_path}/data", "cache": f"{tmp_path}/cache:64MiB"}
    signed, unsigned = (forebay.open(f"data/{n}/", **where) for n in ("signed", "unsigned"))
    both = forebay.mix([signed, unsigned], [0.5, 0.5], epoch_rows=16)
    rules = {"pack": forebay.Pack(4), "batch_size": 1, "uneven": "pad"}

    kept = unsigned.loader(**rules, output="numpy")
    assert 2**63 + 3 in [int(t) for batch in kept for t in batch["tokens"].ravel()]
    below = unsigned.select(range(6)).loader(**rules, output="torch")
    assert [t for batch in below for t in batch["tokens"].ravel().tolist()] == sum(tokens[:6], [])
    for loader in (unsigned.loader(**rules, output="torch"), both.loader(**rules)):
        with pytest.raises(InvalidRequest) as refused:
            list(loader)
        assert "row 6 of data/unsigned/a.parquet" in str(refused.value)
        assert "'tokens'" in str(refused.value)


def test_a_missing_token_is_missing_whatever_stands_in_its_place():
    from forebay._packed import tokens_of

    numbers = np.array([1, 2**63 + 5, 3], np.uint64)
    bits = pa.py_buffer(bytes([0b101]))
    items = pa.Array.from_buffers(pa.uint64(), 3, [bits, pa.py_buffer(numbers)])
    lists = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), items)
    rows = forebay.Rows([pa.record_batch({"tokens": lists})], np.arange(1, dtype=np.uint64))
    for signed in (True, False):
        with pytest.raises(InvalidRequest, match="tokens are missing"):
            tokens_of(rows, "tokens", lambda source, row: ("a", row), signed=signed)


def test_rules_with_arrays_of_lengths_are_compared():
    array = np.arange(5)
    same = forebay.Pack(8, lengths=array)
    for lengths in (array.copy(), array.astype(np.uint8), array.tolist(), torch.arange(5)):
        assert same == forebay.Pack(8, lengths=lengths)
        assert hash(same) == hash(forebay.Pack(8, lengths=lengths))
    for other in (
        forebay.Pack(9, lengths=array),
        *(forebay.Pack(8, lengths=n) for n in (array + 1, array[:4], [array], None, "n", [])),
    ):
        assert same != other and other != same and other == other
    mixed = forebay.Pack(8, lengths=[array, array[:2]])
    assert mixed == forebay.Pack(8, lengths=[array.copy(), [0, 1]])
    assert mixed != forebay.Pack(8, lengths=[array, array[:3]])
    assert forebay.Pack(8, lengths="n") == forebay.Pack(8, lengths="n") != forebay.Pack(8)
    assert same != 8


def test_what_is_too_large_for_one_answer_is_read_in_parts(tmp_path):
    # In its file a row has next to nothing.
    rows = [[i] * 512 for i in range(2100)]
    (tmp_path / "long").mkdir()
    pq.write_table(
        pa.table({"tokens": pa.array(rows, pa.list_(pa.int64()))}),
        tmp_path / "long" / "0.parquet",
        row_group_size=300,
    )
    options = ["--origin", f"file://{tmp_path}", "--set", "memory.budget=32MiB"]
    server = Node("", [], tmp_path / "node", options=options)
    try:
        ds = forebay.open(f"{tmp_path.name}/long/*.parquet", url=server.url)
        with pytest.raises(forebay.TooLarge):
            next(iter(ds.loader(batch_size=2000, columns=["tokens"])))
        pack = forebay.Pack(512)
        assert pack.rows_at_a_time(ds.info["bytes"] / len(ds)) == 2048
        found = [t for b in ds.loader(pack=pack, batch_size=4) for t in b["tokens"][:, 0].tolist()]
        assert found == list(range(2100))
    finally:
        server.stop()


def test_pieces_that_do_not_fit_are_refused():
    from forebay._packed import Table, assembled

    table = Table(np.arange(6, dtype=np.int32), np.array([0, 4]), np.array([4, 2]))

    def make(pieces, packs, **rules):
        part = (table, np.array(pieces, np.int64).reshape(-1, 3), np.array(packs, np.int64))
        return assembled(forebay.Pack(5, **rules), 2, np.dtype(np.int32), [part])

    made = make([(1, 0, 2), (0, 1, 3), (0, 0, 1)], [0, 0, 1])
    assert made["tokens"].tolist() == [[4, 5, 1, 2, 3], [0, 0, 0, 0, 0]]
    assert made["mask"].sum(1).tolist() == made["lengths"].tolist() == [5, 1]
    assert made["document_ids"].tolist() == [[0, 0, 1, 1, 1], [0, -1, -1, -1, -1]]
    assert made["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0] * 5]
    assert made["cu_seqlens"].tolist() == [0, 2, 5, 6, 10] and made["max_seqlen"] == 4
    for pieces, packs, why in (
        ([(2, 0, 1)], [0], "a row is not in its window"),
        ([(0, 0, 5)], [0], "a piece goes beyond its row"),
        ([(1, 7, 1)], [0], "a row has fewer tokens"),
        ([(1, 0, 2**62)], [0], "a pack is too full"),
        ([(0, 2**62, 1)], [0], "a row has fewer tokens"),
        ([(0, -1, 1)], [0], "a number is negative"),
        ([(0, 0, 4), (0, 0, 2)], [0, 0], "a pack is too full"),
        ([(0, 0, 1), (0, 0, 1)], [1, 0], "packs are not in their order"),
        ([(0, 0, 1)], [2], "a pack is not in it"),
        ([(0, 0, 1)], [0, 0], "pieces and packs are of different numbers"),
    ):
        with pytest.raises(forebay.InvalidRequest, match=why):
            make(pieces, packs)
    # Of a row of two tokens, the third is the one that ends the document.
    ended = make([(1, 0, 3)], [0], eos_id=9, pad_id=8)
    assert ended["tokens"].tolist() == [[4, 5, 9, 8, 8], [8] * 5]
    with pytest.raises(forebay.InvalidRequest, match="beyond its row"):
        make([(1, 0, 4)], [0], eos_id=9)


def test_a_rank_reads_its_own_rows_where_lengths_are_known(ds):
    def read(strategy, lengths):
        pack = forebay.Pack(32, strategy=strategy, window=100, lengths=lengths)
        ranks = [
            ds.loader(pack=pack, batch_size=1, shuffle="full", rank=r, world_size=4)
            for r in range(4)
        ]
        found = taken(ranks, pack)
        return found, sum(rank.stats().bytes for rank in ranks)

    for strategy in STRATEGIES:
        (whole, all_bytes), (own, own_bytes) = read(strategy, None), read(strategy, "n")
        assert own == whole and 0 < own_bytes < all_bytes / 2


def test_a_stream_brings_the_same_packs(ds):
    for pack in (
        forebay.Pack(24, strategy="best_fit", window=100),
        forebay.Pack(40, column="text", tokenize=words, lengths="n"),
    ):
        common = {"pack": pack, "batch_size": 2, "shuffle": "block:3", "uneven": "pad"}
        plain = ds.loader(**common)
        expected = taken([plain], pack)
        streams = [ds.loader(**common, stream=True, rank=r, world_size=2) for r in range(2)]
        found = taken(streams, pack)
        assert found[: len(expected)] == expected and not any(found[len(expected) :])
        late = ds.loader(**common, stream=True)
        first = taken([late], pack, 3)
        assert first + taken([late], pack) == expected


def test_torch_and_its_workers(ds):
    pack = forebay.Pack(24, strategy="best_fit", window=64, eos_id=EOS)
    common = {"pack": pack, "batch_size": 2, "output": "torch", "uneven": "pad"}
    loader = ds.loader(**common)
    batch = next(iter(loader))
    assert isinstance(batch["tokens"], torch.Tensor) and batch["tokens"].dtype == torch.int32
    assert batch["mask"].dtype == torch.bool and batch["cu_seqlens"].dtype == torch.int32
    large = ds.loader(pack=forebay.Pack(8, column="large"), batch_size=2, output="torch")
    assert next(iter(large))["tokens"].dtype == torch.int64
    expected = taken([ds.loader(**common)], pack)

    for workers in (1, 2, 3):
        data = ds.loader(**common).torch()
        batches = Resumable(DataLoader(data, batch_size=None, num_workers=workers))
        some = list(itertools.islice(batches, 4))
        data = ds.loader(**common).torch()
        rest = Resumable(DataLoader(data, batch_size=None, num_workers=4 - workers))
        rest.load_state_dict(batches.state_dict())
        found = [p for b in [*some, *rest] for p in read_back(b, pack)]
        assert found == expected

    stateful = StatefulDataLoader(ds.loader(**common).torch(), batch_size=None, num_workers=2)
    some = list(itertools.islice(stateful, 5))
    data = ds.loader(**common).torch()
    data.load_state_dict(state_of(stateful.state_dict(), data))
    rest = StatefulDataLoader(data, batch_size=None, num_workers=0)
    assert [p for b in [*some, *rest] for p in read_back(b, pack)] == expected
    with pytest.raises(InvalidRequest, match="batches of packs"):
        ds.loader(**common).torch(samples=True)


def test_tokenizers_of_libraries_and_functions(ds):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {
        str(token): token for row in range(ROWS["a"]) for token in tokens_of("a", row)
    } | {"[UNK]": 1, "[BOS]": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 2)]
    )

    def with_bos(text):
        return made.encode(text)

    def as_dict(text):
        return {"input_ids": np.array(words(text), np.uint32)}

    plain = forebay.Pack(16, column="text", tokenize=words, eos_id=EOS)
    expected = taken([ds.loader(pack=plain, batch_size=2)], plain)
    given = [made, as_dict]
    transformers = pytest.importorskip("transformers")
    given.append(transformers.PreTrainedTokenizerFast(tokenizer_object=made))
    for tokenize in given:
        pack = forebay.Pack(16, column="text", tokenize=tokenize, eos_id=EOS)
        loader = ds.loader(pack=pack, batch_size=2, threads=2)
        assert taken([loader], pack) == expected
        assert next(iter(loader))["tokens"].dtype == np.int64
    # What a function returns is taken as it is.
    rules = {"strategy": "one_per_row", "too_long": "cut"}
    pack = forebay.Pack(16, column="text", tokenize=with_bos, **rules)
    batch = next(iter(ds.loader(pack=pack, batch_size=4)))
    assert (batch["tokens"][:, 0] == 2).all()


def test_a_tokenizer_that_pads_or_truncates_is_refused(ds):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, "[UNK]"))
    made.enable_padding(pad_id=0)
    with pytest.raises(InvalidRequest, match="padding") as e:
        forebay.Pack(16, column="text", tokenize=made)
    assert "no_padding()" in e.value.hint
    made.no_padding()
    pack = forebay.Pack(16, column="text", tokenize=made)
    loader = ds.loader(pack=pack, batch_size=2)
    # Whoever has it, too, may turn it on later.
    made.enable_truncation(2)
    with pytest.raises(InvalidRequest, match="truncation"):
        next(iter(loader))


def test_a_text_that_cannot_be_tokenized_is_named(ds):
    odd = next(row for row in range(40, ROWS["a"]) if len(tokens_of("a", row)) > 1)

    def fails(text):
        if text == " ".join(map(str, tokens_of("a", odd))):
            raise ValueError("an odd text")
        return words(text)

    for threads in (0, 3):
        pack = forebay.Pack(16, column="text", tokenize=fails)
        with pytest.raises(SampleFailed, match=rf"row {odd} of packs/a/.*an odd text") as e:
            list(ds.loader(pack=pack, batch_size=2, threads=threads))
        assert (e.value.row, e.value.file) == (odd, "packs/a/0.parquet")
    for wrong in (
        lambda text: [0.5],
        lambda text: [1 << 63],
        lambda text: [[1]],
        lambda text: "abc",
        lambda text: None,
        lambda text: {},
    ):
        pack = forebay.Pack(16, column="text", tokenize=wrong)
        with pytest.raises(SampleFailed, match="whole numbers"):
            list(ds.loader(pack=pack, batch_size=2))


def test_a_loop_that_was_left_calls_its_tokenizer_no_more(ds):
    calls = []

    def slow(text):
        calls.append(text)
        time.sleep(0.002)
        return words(text)

    pack = forebay.Pack(16, column="text", tokenize=slow)
    loader = ds.repeat(40).loader(pack=pack, batch_size=2, threads=2)
    next(iter(loader))
    loader.close()
    before = len(calls)
    time.sleep(0.5)
    # What each thread was at. It had some 500 rows of a window, for a second.
    assert len(calls) <= before + 2


def test_texts_that_are_bytes_are_told_as_that(ds):
    expected = taken(
        [ds.loader(pack=forebay.Pack(16, column="text", tokenize=words), batch_size=2)],
        forebay.Pack(16),
    )
    of_bytes = forebay.Pack(16, column="utf8", tokenize=lambda data: words(str(data, "utf-8")))
    assert taken([ds.loader(pack=of_bytes, batch_size=2)], forebay.Pack(16)) == expected
    with pytest.raises(SampleFailed, match=r"row \d+ of packs/a/0.parquet") as e:
        next(iter(ds.loader(pack=forebay.Pack(16, column="utf8", tokenize=words), batch_size=2)))
    assert "holds bytes" in e.value.hint


def test_columns_of_all_kinds_of_lists(ds):
    pack = forebay.Pack(6, column="three")
    batch = next(iter(ds.loader(pack=pack, batch_size=2)))
    assert batch["tokens"].dtype == np.int16
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 6, 9, 12]
    one, two = forebay.Pack(16, column="large"), forebay.Pack(16)
    large = taken([ds.loader(pack=one, batch_size=2)], one)
    assert large == taken([ds.loader(pack=two, batch_size=2)], two)
    some = next(iter(ds.loader(pack=forebay.Pack(4, column="some"), batch_size=2)))
    assert some["tokens"].tolist() == [[1, 1, 3, 1], [5, 1, 7, 1]]
    with pytest.raises(InvalidRequest, match="row 0 of packs/a/0.parquet .* tokens are missing"):
        next(iter(ds.loader(pack=forebay.Pack(16, column="bad"), batch_size=2)))
    bad = forebay.mix([ds.skip(5), ds.skip(9)])
    with pytest.raises(InvalidRequest, match=r"row ([5-9]|\d\d+) of packs/a/0.parquet has a list"):
        next(iter(bad.loader(pack=forebay.Pack(16, column="bad"), batch_size=2, shuffle="full")))
    with pytest.raises(InvalidRequest, match="'twice' does not hold lists of whole numbers"):
        next(iter(ds.loader(pack=forebay.Pack(16, column="twice"), batch_size=2)))
    for wrong in ({"pad_id": 1 << 15}, {"eos_id": -32769}):
        with pytest.raises(InvalidRequest, match="does not fit into int16"):
            ds.loader(pack=forebay.Pack(7, column="three", **wrong), batch_size=1)
    # A rank without packs in the last step has tokens of the same type.
    last = ds.loader(pack=pack, batch_size=200, world_size=2, rank=1, uneven="pad")
    (batch,) = last
    assert batch["tokens"].dtype == np.int16 and not batch["mask"].any()


def test_json_lines_whose_lists_are_all_empty_are_documents_without_tokens(tmp_path):
    lines = {
        "empty": [[], None, []],
        "some": [[1 << 40], [], [2, 3]],
        "missing": [[], [None]],
    }
    (tmp_path / "lists").mkdir()
    for name, rows in lines.items():
        text = "".join(json.dumps({"tokens": row, "n": at}) + "\n" for at, row in enumerate(rows))
        (tmp_path / "lists" / f"{name}.jsonl").write_text(text)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'lists'}"])
    try:
        empty, some, missing = (forebay.open(f"lists/{name}.jsonl", url=node.url) for name in lines)
        assert empty.schema["tokens"] == "List(Null)"
        for strategy in STRATEGIES:
            pack = forebay.Pack(4, strategy=strategy)
            with pytest.raises(InvalidRequest, match="makes no packs: all rows are empty"):
                list(empty.loader(pack=pack, batch_size=1, uneven="pad"))
            both = forebay.mix([empty, some])
            (batch,) = both.loader(pack=pack, batch_size=2, uneven="pad")
            assert batch["tokens"].dtype == np.int64
            assert sorted(batch["tokens"][batch["mask"]].tolist()) == [2, 3, 1 << 40]
        with pytest.raises(InvalidRequest, match="tokens are missing"):
            list(missing.loader(pack=forebay.Pack(4), batch_size=1))
    finally:
        node.stop()


def test_collate_and_jax(ds):
    def shape(batch):
        return batch["tokens"].shape, batch["lengths"].sum()

    loader = ds.loader(pack=forebay.Pack(16), batch_size=2, collate=shape)
    assert list(itertools.islice(loader, 2)) == [((2, 16), 32)] * 2

    def stops(batch):
        raise StopIteration

    # It would end the loop as if the epoch were over.
    for threads in (0, 2):
        loader = ds.loader(pack=forebay.Pack(16), batch_size=2, collate=stops, threads=threads)
        with pytest.raises(RuntimeError, match="collate= raised StopIteration"):
            next(iter(loader))
    jax = pytest.importorskip("jax")
    batch = next(iter(ds.loader(pack=forebay.Pack(16), batch_size=2, output="jax")))
    assert isinstance(batch["tokens"], jax.Array) and batch["max_seqlen"] > 0


def test_the_interpreter_waits_for_the_threads_that_make_arrays_of_jax(ds, monkeypatch):
    """One that goes on while it ends is thrown out of JAX's C++ code, which aborts the process."""
    pytest.importorskip("jax")
    to_jax, names = _collate.to_jax, set()

    def made(*of):
        names.add(threading.current_thread().name)
        return to_jax(*of)

    monkeypatch.setattr(_collate, "to_jax", made)
    loader = ds.loader(pack=forebay.Pack(16), batch_size=2, output="jax", threads=2)
    assert len(list(itertools.islice(loader, 3))) == 3
    # Those of a pool.
    assert names and all(name.startswith("forebay-decode") for name in names)


def test_composed_datasets_are_packed(ds, pair):
    def expected(*parts, length):
        stream = [t for name, rows in parts for row in rows for t in tokens_of(name, row)]
        return [stream[at : at + length] for at in range(0, len(stream), length)]

    def read(of, pack):
        batches = list(of.loader(pack=pack, batch_size=1, uneven="pad"))
        return [b["tokens"][0, : b["lengths"][0]].tolist() for b in batches]

    a, b = pair
    some = a.select(range(150, 40, -1))
    for lengths in (None, "n"):
        pack = forebay.Pack(30, lengths=lengths)
        assert read(some, pack) == expected(("a", range(150, 40, -1)), length=30)
        both = forebay.concatenate([some, b])
        parts = ("a", range(150, 40, -1)), ("b", range(ROWS["b"]))
        assert read(both, pack) == expected(*parts, length=30)
    renamed = a.rename({"tokens": "ids"})
    pack = forebay.Pack(30, column="ids")
    assert read(renamed, pack) == expected(("a", range(ROWS["a"])), length=30)
    with pytest.raises(InvalidRequest, match="has a map"):
        a.map(dict).loader(pack=forebay.Pack(30), batch_size=1)
    loader = some.loader(pack=forebay.Pack(30), batch_size=1)
    list(loader)
    assert "tokens/s" in str(loader.stats()) and str(loader.report())


def test_waste_is_counted(ds):
    rows = [tokens_of("a", row) for row in range(ROWS["a"])]
    long = [r for r in rows if len(r) > 20]
    # Three ranks: each counts its own, and together they count each once.
    for too_long in ("cut", "skip", "split"):
        pack = forebay.Pack(20, strategy="one_per_row", too_long=too_long)
        loaders = [
            ds.loader(pack=pack, batch_size=2, uneven="pad", rank=r, world_size=3) for r in range(3)
        ]
        found = taken(loaders, pack)
        stats = [loader.stats() for loader in loaders]
        tokens = sum(len(piece) for p in found for piece in p)
        assert sum(s.tokens for s in stats) == tokens
        assert sum(s.padding for s in stats) == len(found) * 20 - tokens
        cut = {
            "cut": sum(len(r) - 20 for r in long),
            "skip": sum(map(len, long)),
            "split": 0,
        }[too_long]
        assert sum(s.tokens_cut for s in stats) == cut
        assert sum(s.rows_left_out for s in stats) == (len(long) if too_long == "skip" else 0)
        assert tokens + cut == sum(map(len, rows))
        text = str(stats[0])
        assert f"{stats[0].tokens:,} tokens" in text
        assert f"{stats[0].padding_share:.2%} of the packs are padding" in text
    whole = forebay.Pack(32, strategy="concatenate")
    loader = ds.loader(pack=whole, batch_size=1)
    list(loader)
    # All but the end of the last pack.
    assert loader.stats().padding < 32
    best = ds.loader(pack=forebay.Pack(64, strategy="best_fit", window=ROWS["a"]), batch_size=1)
    list(best)
    assert best.stats().padding_share < 0.02


def test_packs_are_called_packs(ds, capsys):
    loader = ds.loader(pack=forebay.Pack(30), batch_size=2, progress=True)
    number = 2 * len(list(loader))
    assert "rows" not in (drawn := capsys.readouterr().err)
    assert f"{number:,} packs" in drawn and "packs/s" in drawn
    assert f"of {number:,} packs" in repr(loader.report(order=False))


def test_what_makes_no_packs_is_refused_before_work_begins(ds, pair):
    for wrong in (
        {"length": 0},
        {"length": -1},
        {"length": True},
        {"length": 1.5},
        {"window": 0, "strategy": "best_fit"},
        {"strategy": "worst_fit"},
        {"too_long": "alone"},
        {"pad_id": None},
        {"eos_id": 1.5},
    ):
        with pytest.raises(ValueError, match="Pack"):
            forebay.Pack(**{"length": 8, **wrong})
    for wrong in ({"column": ""}, {"tokenize": 3}, {"lengths": 3}):
        with pytest.raises(TypeError, match="Pack"):
            forebay.Pack(8, **wrong)
    pack = forebay.Pack(8)
    for options, what in [
        ({"batch_size": None}, "number of packs"),
        ({"max_total": 100, "length": "n"}, "both decide"),
        ({"uneven": "repeat"}, "does not apply to packs"),
        ({"columns": ["tokens"]}, "columns= does not apply"),
        ({"decode": len}, "decode= does not apply"),
        ({"transform": len}, "transform= does not apply"),
        ({"on_error": "skip"}, "on_error= does not apply"),
        ({"too_long": "skip"}, "too_long="),
        ({"output": "arrow"}, "packs are arrays"),
        ({"batch_size": 1 << 30}, "more than"),
    ]:
        with pytest.raises(ValueError, match=what):
            ds.loader(**{"pack": pack, "batch_size": 2, **options})
    with pytest.raises(TypeError, match=r"forebay\.Pack"):
        ds.loader(pack=2048, batch_size=2)
    for column, what in [("no", "no column 'no'"), ("text", "text"), ("n", "'n'"), ("x", "'x'")]:
        with pytest.raises(InvalidRequest, match=what):
            ds.loader(pack=forebay.Pack(8, column=column), batch_size=2)
    with pytest.raises(InvalidRequest, match="no column 'no'"):
        ds.loader(pack=forebay.Pack(8, lengths="no"), batch_size=2)
    decoding = forebay.open("packs/a/*.parquet", client=ds.client, decode=dict)
    with pytest.raises(InvalidRequest, match="opened with decode="):
        decoding.loader(pack=pack, batch_size=2)
    for lengths, what in [
        ([1, 2], "the lengths of"),
        (np.full(ROWS["a"], 0.5), "the lengths of"),
        (
            np.full(ROWS["a"], 3),
            r"row \d+ of packs/a/0.parquet has \d+ tokens, and lengths= says 3",
        ),
    ]:
        with pytest.raises(InvalidRequest, match=what):
            list(ds.loader(pack=forebay.Pack(8, lengths=lengths), batch_size=2))
    known = np.array([len(tokens_of("a", row)) for row in range(ROWS["a"])])
    of_one = [
        forebay.mix([ds]).loader(pack=forebay.Pack(8, lengths=n), batch_size=2)
        for n in (known, [known])
    ]
    first, second = (next(iter(loader)) for loader in of_one)
    assert first["tokens"].tolist() == second["tokens"].tolist()
    two = forebay.mix([ds, ds]).loader(pack=forebay.Pack(8, lengths=[known]), batch_size=2)
    for wrong in ({"a": 1}, {1}, np.array(5)):
        with pytest.raises(InvalidRequest, match="lengths are given as"):
            loader = ds.loader(pack=forebay.Pack(8, lengths=wrong), batch_size=1)
            next(iter(loader))
    with pytest.raises(InvalidRequest, match="lengths of 1 dataset are given, and the mix has 2"):
        list(two)
    for uneven in ("drop", "pad"):
        none = ds.loader(
            pack=forebay.Pack(1, column="three", too_long="skip"), batch_size=2, uneven=uneven
        )
        with pytest.raises(InvalidRequest, match="an epoch makes no packs: all rows are empty"):
            list(none)
    with pytest.raises(InvalidRequest, match=r"an epoch makes \d+ packs? of 10000 tokens"):
        list(ds.loader(pack=forebay.Pack(10_000), batch_size=2, epochs=math.inf))
