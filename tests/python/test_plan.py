"""Orders from Python: the same that a second implementation makes, dealt out and resumed without a
row lost or given twice.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading

import numpy as np
import pytest
from forebay import _forebay
from forebay.errors import InvalidRequest

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

EVEN = _forebay.encode_shape([(10, 100)])
UNEVEN = _forebay.encode_shape([(2, 50), (1, 30), (1, 7)])


def plan(
    shuffle: dict,
    *shapes: bytes,
    seed: int = 1,
    weights: list[float] | None = None,
    epoch_rows: int | None = None,
):
    shapes = shapes or (EVEN,)
    sources = [
        {"dataset": f"d{i}", "weight": w} for i, w in enumerate(weights or [1.0] * len(shapes))
    ]
    document = {"sources": sources, "seed": seed, "shuffle": shuffle, "epoch_rows": epoch_rows}
    return _forebay.Plan(json.dumps(document), list(shapes))


def order(of, epoch: int = 0) -> list[tuple[int, int]]:
    rows, sources = of.rows(epoch, 0, of.rows_per_epoch)
    return list(zip(np.asarray(sources).tolist(), np.asarray(rows).tolist(), strict=True))


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def permutation(n: int, key: int) -> list[int]:
    """The permutations of version 1, a second time: from their description, with Python's integers
    and no tricks.
    """
    state = mix(mix(key ^ 0x5851F42D4C957F2D) ^ n)
    keys = []
    for _ in range(max(n, 12)):
        state = (state + GOLDEN) & MASK
        keys.append(mix(state))
    if n <= 32:
        table = list(range(n))
        for turn, i in enumerate(range(n - 1, 0, -1)):
            j = keys[turn] * (i + 1) >> 64
            table[i], table[j] = table[j], table[i]
        return table
    b = (math.isqrt(n) + 1) // 2 * 2
    a = -(-n // b)

    def hashed(half: int, key: int, bound: int) -> int:
        h = (half ^ key) * 0xD6E8FEB86659FD93 & MASK
        return ((h ^ h >> 32) * 0xA0761D6478BD642F & MASK) * bound >> 64

    def through(x: int) -> int:
        left, right = divmod(x, b)
        for turn in range(0, 12 if n <= 4096 else 8, 2):
            right = (right + hashed(left, keys[turn], b)) % b
            left = (left + hashed(right, keys[turn + 1], a)) % a
        return left * b + right

    numbers = []
    for i in range(n):
        x = through(i)
        while x >= n:
            x = through(x)
        numbers.append(x)
    return numbers


def test_permutations_are_those_of_a_second_implementation():
    for n, key in [
        (1, 0),
        (2, 1),
        (7, 2),
        (32, 3),
        (33, 4),
        (100, MASK),
        (4096, 5),
        (4097, 6),
        (10_007, 7),
    ]:
        found = _forebay.Permutation(n, key)
        expected = permutation(n, key)
        assert np.asarray(found.numbers(0, n)).tolist() == expected
        assert [found.at(i) for i in (0, n // 2, n - 1)] == [
            expected[i] for i in (0, n // 2, n - 1)
        ]
        assert all(found.position_of(expected[i]) == i for i in (0, n // 2, n - 1))
    with pytest.raises(InvalidRequest, match="not below 10"):
        _forebay.Permutation(10, 0).at(10)
    with pytest.raises(InvalidRequest, match="at most 2"):
        _forebay.Permutation(1 << 63, 0)


def test_numbers_are_arrays_of_their_type_without_a_copy():
    rows, sources = plan({"kind": "full"}).rows(0, 10, 30)
    array = np.asarray(rows)
    assert (array.dtype, array.shape, np.asarray(sources).dtype, len(rows)) == (
        np.uint64,
        (20,),
        np.uint32,
        20,
    )
    assert not array.flags.owndata
    assert memoryview(rows).tolist() == array.tolist() == np.frombuffer(rows, np.uint64).tolist()
    assert bytes(rows) == array.tobytes()
    view = memoryview(sources)
    del rows, sources
    assert view.format == "I" and view.nbytes == 80


@pytest.mark.parametrize(
    "shuffle",
    [
        {"kind": "none"},
        {"kind": "window", "rows": 60},
        {"kind": "block", "blocks": 3},
        {"kind": "full"},
    ],
    ids=lambda s: s["kind"],
)
def test_every_row_once_in_each_epoch_and_back_to_its_position(shuffle):
    for shape, rows in [(EVEN, 1000), (UNEVEN, 137)]:
        of = plan(shuffle, shape)
        first, second = order(of), order(of, 1)
        assert sorted(first) == sorted(second) == [(0, row) for row in range(rows)]
        assert (first == second) == (shuffle["kind"] == "none")
        assert all(of.position_of(1, row) == at for at, (_, row) in enumerate(second))
        assert sorted(of.blocks(0, 0, rows)) == [
            (0, block) for block in range(10 if rows == 1000 else 4)
        ]
        epoch, position = of.next_use(0, 5, 2)
        assert (
            (order(of, epoch)[position][1] // 100 == 2)
            if rows == 1000
            else (100 <= order(of, epoch)[position][1] < 130)
        )


def test_any_interruption_continues_exactly():
    seed = int(os.environ.get("FOREBAY_TEST_SEED", random.randrange(1 << 32)))
    print(f"replay with FOREBAY_TEST_SEED={seed}")
    rng = random.Random(seed)
    for _ in range(20):
        shuffle = rng.choice(
            [
                {"kind": "none"},
                {"kind": "window", "rows": 40},
                {"kind": "block", "blocks": 2},
                {"kind": "full"},
            ]
        )
        of = plan(
            shuffle,
            EVEN,
            UNEVEN,
            seed=rng.randrange(1 << 40),
            weights=[3.0, 1.0],
            epoch_rows=rng.randrange(50, 400),
        )
        reference = [(epoch, *row) for epoch in range(20) for row in order(of, epoch)]
        state, got = of.state(0, 0), []
        for _ in range(5):
            world, workers, rows = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 20)
            partition = {"world": world, "batch": {"rows": rows}, "uneven": "pad"}
            ranks = [
                [
                    of.steps(json.dumps({**partition, "rank": r}), state, None, None, w, workers)
                    for w in range(workers)
                ]
                for r in range(world)
            ]
            for number in range(rng.randrange(12)):
                steps = [next(of_rank[number % workers]) for of_rank in ranks]
                for step in steps:
                    assert (
                        step.step == number
                        and step.next == steps[0].next
                        and len(step.rows) == rows
                    )
                    pairs = zip(
                        np.asarray(step.sources).tolist(),
                        np.asarray(step.rows).tolist(),
                        strict=True,
                    )
                    got += [(step.epoch, *pair) for pair in pairs][: step.real]
                state = json.dumps(json.loads(steps[0].next))
        assert got == reference[: len(got)]


def test_steps_are_counted_and_end():
    of = plan({"kind": "full"})
    partition = json.dumps({"world": 3, "rank": 2, "batch": {"rows": 32}, "uneven": "drop"})
    steps = of.steps(partition, of.state(0, 0), 2)
    assert steps.count() == 2 * (1000 // 96)
    assert sum(1 for _ in steps) == 20
    assert steps.step(19).epoch == 1 and steps.step(20) is None
    assert json.loads(steps.step(19).next)["epoch"] == 2


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int32])
def test_batches_bounded_by_length(kind):
    of = plan({"kind": "block", "blocks": 4}, EVEN, UNEVEN, weights=[1.0, 1.0], epoch_rows=500)
    lengths = [np.random.default_rng(1).integers(1, 200, n).astype(kind) for n in (1000, 137)]
    bounds = {"max_total": 1000, "max_rows": 64, "lookahead_rows": 200}
    partition = json.dumps({"batch": {"bounded": bounds}, "uneven": "pad"})
    batches = list(of.steps(partition, of.state(0, 0), 1, lengths))
    got = []
    for step in batches:
        pairs = list(
            zip(np.asarray(step.sources).tolist(), np.asarray(step.rows).tolist(), strict=True)
        )
        assert sum(int(lengths[s][r]) for s, r in pairs) <= 1000 and 1 <= len(pairs) <= 64
        got += pairs
    assert (
        sorted(got) == sorted(order(of))
        and of.steps(partition, of.state(0, 0), 1, lengths).count() is None
    )
    # From the middle of a window on.
    again = list(of.steps(partition, batches[4].next, 1, lengths))
    assert [bytes(s.rows) for s in again] == [bytes(s.rows) for s in batches[5:]]
    with pytest.raises(InvalidRequest, match="one array of lengths for each"):
        of.steps(partition, of.state(0, 0), 1, lengths[:1])
    with pytest.raises(InvalidRequest, match="are not known"):
        next(of.steps(partition, of.state(0, 0)))


def test_what_cannot_be_is_refused_in_words():
    of = plan({"kind": "full"})
    state = of.state(3, 500)
    assert json.loads(of.checked(state)) == json.loads(state)
    with pytest.raises(InvalidRequest, match="seed 1"):
        plan({"kind": "full"}, seed=2).checked(state)
    with pytest.raises(InvalidRequest, match="another dataset"):
        plan({"kind": "full"}, UNEVEN).checked(state)
    with pytest.raises(InvalidRequest, match="shuffle"):
        plan({"kind": "none"}).checked(state)
    with pytest.raises(InvalidRequest, match="not a state"):
        of.checked("{}")
    with pytest.raises(InvalidRequest, match="rank 4 in a world of 4"):
        of.steps(json.dumps({"world": 4, "rank": 4, "batch": {"rows": 1}}), state)
    with pytest.raises(InvalidRequest, match="batches of 0 rows"):
        of.steps(json.dumps({"batch": {"rows": 0}}), state)
    with pytest.raises(InvalidRequest, match="worker 2 of 2"):
        of.steps(json.dumps({"batch": {"rows": 1}}), state, None, None, 2, 2)
    with pytest.raises(InvalidRequest, match="1000 rows"):
        of.rows(0, 990, 1001)
    with pytest.raises(InvalidRequest, match="epoch"):
        of.rows(1 << 40, 0, 1)
    with pytest.raises(InvalidRequest, match="has no rows"):
        plan({"kind": "full"}, _forebay.encode_shape([]))
    with pytest.raises(InvalidRequest, match="weight"):
        plan({"kind": "full"}, EVEN, EVEN, weights=[1.0, -1.0])


def test_the_report_tells_a_good_order_from_a_bad_one():
    shape = _forebay.encode_shape([(100, 100)])
    bad, good = (
        json.loads(plan(s, shape).report(batch=50)) for s in ({"kind": "none"}, {"kind": "full"})
    )
    assert (
        bad["order"]["rank_correlation"] > 0.999 and abs(good["order"]["rank_correlation"]) < 0.05
    )
    assert bad["order"]["label_dispersion"] > 40 and 0.8 < good["order"]["label_dispersion"] < 1.2
    assert abs(good["uniform"]["displacement"] - good["expected"]["displacement"]) < 0.02
    labels = ["cat", "dog"] * 5000
    assert (
        json.loads(plan({"kind": "none"}, shape).report(50, labels))["order"]["label_dispersion"]
        < 1e-9
    )
    with pytest.raises(InvalidRequest, match="labels are for"):
        plan({"kind": "none"}, shape).report(50, ["cat"])


def test_threads_may_ask_one_plan_together():
    of = plan({"kind": "block", "blocks": 2}, UNEVEN)
    expected = [order(of, epoch) for epoch in range(8)]
    wrong = []

    def ask(turn: int) -> None:
        for epoch in range(8):
            if order(of, (epoch + turn) % 8) != expected[(epoch + turn) % 8]:
                wrong.append((turn, epoch))

    threads = [threading.Thread(target=ask, args=(turn,)) for turn in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
