"""Weights of a mix that change along training: where the schedule says, the same for any number of
ranks, and exactly resumed.
"""

from __future__ import annotations

import itertools
import json
import os
import random

import forebay
import numpy as np
import pytest
from forebay.errors import InvalidRequest

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.fixture
def pair(tables):
    return [forebay.open(f"tables/{name}/*.parquet", url=tables.url) for name in "ab"]


def ids(batches) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"]]


def test_shares_change_at_the_rows_of_the_table(pair):
    schedule = forebay.Schedule([(0, [9, 1]), (100, [1, 1]), (205, [0, 1]), (260, [3, 1])])
    of = forebay.mix(pair, schedule, epoch_rows=170)
    assert of.weights == [0.9, 0.1] and "at first" in repr(of)
    assert of.schedule.weights_at(204) == [0.5, 0.5] and of.schedule.weights_at(205) == [0, 1]
    loader = of.loader(batch_size=10, output="numpy", columns=["id"], epochs=2)
    found = ids(loader)
    # Rows of b have ids from 1000 on. The stages go on over the end of an epoch (170).
    of_b = [int(i >= 1000) for i in found]
    assert len(found) == 340
    assert sum(of_b[:100]) == 10 and all(sum(of_b[at : at + 10]) == 1 for at in range(0, 100, 10))
    assert all(sum(of_b[at : at + 2]) == 1 for at in range(100, 204, 2))
    assert of_b[205:260] == [1] * 55
    assert all(sum(of_b[at : at + 4]) == 1 for at in range(260, 340, 4))
    # Each dataset in its own order, going on where it was.
    b = [i - 1000 for i in found if i >= 1000]
    assert b == [i % 41 for i in range(len(b))]
    a = [i for i in found if i < 1000]
    assert a == [i % 103 for i in range(len(a))]


def test_any_number_of_ranks_resumes_anywhere(pair):
    order = random.Random(SEED)
    print(f"FOREBAY_TEST_SEED={SEED}")
    for _ in range(4):
        rows = sorted({0, *(order.randrange(1, 300) for _ in range(order.randrange(5)))})
        table = [(row, [order.randrange(3), order.randrange(1, 4)]) for row in rows]
        of = forebay.mix(pair, forebay.Schedule(table), epoch_rows=order.randrange(120, 200))
        common = {
            "shuffle": order.choice([None, "full", "block:2", "window:30"]),
            "seed": order.randrange(99),
            "output": "numpy",
            "columns": ["id"],
            "epochs": 2,
            "uneven": "drop",
        }
        one = of.loader(batch_size=1, **common)
        whole, states = [], [one.state_dict()]
        for batch in one:
            whole += ids([batch])
            states.append(one.state_dict())
        for done in range(0, len(states) - 40, 17):
            world, batch = order.randrange(1, 5), order.randrange(1, 6)
            ranks = [
                of.loader(batch_size=batch, rank=r, world_size=world, **common)
                for r in range(world)
            ]
            for rank in ranks:
                rank.load_state_dict(json.loads(json.dumps(states[done])))
            steps = itertools.islice(zip(*ranks, strict=True), 2)
            found = [i for step in steps for i in ids(step)]
            left = of.epoch_rows - done % of.epoch_rows
            if 2 * world * batch <= left:
                assert found == whole[done : done + 2 * world * batch]
        streamed = of.loader(batch_size=5, stream=True, **common)
        assert ids(streamed) == ids(of.loader(batch_size=5, **common))


def test_shares_go_along_a_line(pair):
    schedule = forebay.Schedule([(0, [1, 0]), (1000, [1, 3])], between="linear", pieces=50)
    assert len(schedule.stages) == 51 and schedule.stages[-1] == (1000, [0.25, 0.75])
    assert schedule.weights_at(510) == [13 / 20, 7 / 20]
    of = forebay.mix(pair, schedule, epoch_rows=2000)
    found = ids(of.loader(batch_size=100, output="numpy", columns=["id"]))
    of_b = np.array(found) >= 1000
    # The area under the line, as far as it goes.
    for stop in range(20, 1001, 20):
        assert of_b[:stop].sum() == pytest.approx(0.75 * stop * stop / 2000, abs=1)
    assert of_b[1000:].mean() == pytest.approx(0.75, abs=0.01)
    few = forebay.Schedule([(0, [1, 0]), (3, [0, 1])], between="linear", pieces=50)
    assert [row for row, _ in few.stages] == [0, 1, 2, 3]


def test_nothing_is_taken_of_a_dataset_whose_weight_is_0(pair):
    # In the first piece it is owed a part of a row, and in the second it has none to get.
    table = [(0, [0.3, 1, 0.3]), (5, [0.5, 0, 0.5]), (105, [1, 0, 0.3])]
    schedule = forebay.Schedule(table, between="linear", pieces=2)
    assert all(shares[1] == 0 for row, shares in schedule.stages if row >= 5)
    rng = random.Random(SEED)
    for _ in range(200):
        rows = sorted(rng.sample(range(1, 4000), 3))
        table = [(row, [rng.choice([0, 0, 1, 0.3]) for _ in range(3)] + [1]) for row in [0, *rows]]
        schedule = forebay.Schedule(table, between="linear", pieces=rng.randrange(1, 9))
        for (begin, first), (end, second) in itertools.pairwise(schedule.table):
            for row, shares in schedule.stages:
                if begin <= row < end:
                    never = [i for i in range(4) if first[i] == second[i] == 0]
                    assert not any(shares[i] for i in never), (SEED, table)


def test_a_state_belongs_to_its_schedule(pair):
    def loader(*table):
        return forebay.mix(pair, forebay.Schedule(table)).loader(batch_size=8)

    one = loader((0, [1, 1]), (50, [1, 3]))
    next(iter(one))
    state = one.state_dict()
    loader((0, [2, 2]), (50, [2, 6])).load_state_dict(state)
    for other in (
        loader((0, [1, 1]), (51, [1, 3])),
        loader((0, [1, 1]), (50, [1, 2])),
        loader((0, [1, 1])),
        forebay.mix(pair, [1, 1]).loader(batch_size=8),
    ):
        with pytest.raises(InvalidRequest, match="it is of plan"):
            other.load_state_dict(state)
    # A table of one entry is plain weights.
    assert loader((np.int64(0), [3, 1])).plan == loader((0, [3, 1])).plan
    plain = forebay.mix(pair, [3, 1]).loader(batch_size=8)
    assert loader((0, [3, 1])).plan == plain.plan


@pytest.mark.parametrize(
    "table, what",
    [
        ([], "empty"),
        ([(1, [1, 1])], "row 1 of the schedule comes first"),
        ([(0, [1, 1]), (5, [1, 2]), (5, [2, 1])], "row 5 of the schedule comes after row 5"),
        ([(0, [1, 1]), (5, [1, 2]), (3, [2, 1])], "row 3 of the schedule comes after row 5"),
        ([(0, [1, 1]), (5, [1])], "1 weight from row 5 on, and 2"),
        ([(0, [1, -1])], "weights from row 0 on"),
        ([(0, [0, 0])], "weights from row 0 on"),
        ([(0, [1, float("nan")])], "weights from row 0 on"),
        ([(0, [1, 1]), (2.5, [1, 1])], "2.5 is a row"),
        ([(-1, [1, 1])], "-1 is a row"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table, what):
    with pytest.raises(InvalidRequest, match=what):
        forebay.Schedule(table)


def test_a_schedule_for_other_datasets_is_refused(pair):
    with pytest.raises(InvalidRequest, match="2 datasets, and the schedule has 3 weights"):
        forebay.mix(pair, forebay.Schedule([(0, [1, 1, 1])]))
    with pytest.raises(ValueError, match="between"):
        forebay.Schedule([(0, [1, 1])], between="cubic")
    for pieces in (5000, 10**9):
        with pytest.raises(InvalidRequest, match="the limit is 4096"):
            forebay.Schedule([(0, [1, 1]), (10**9, [1, 2])], between="linear", pieces=pieces)
    for table in ({0: [1, 1]}, 5, [0, 1], [(0, 1)], [(0, ["a"])]):
        with pytest.raises(TypeError, match="pairs of a row and the weights"):
            forebay.Schedule(table)
    with pytest.raises(TypeError, match=r"and its entry 2 is \(9, \[1, None\]\)"):
        forebay.Schedule([(0, [1, 1]), (5, [1, 2]), (9, [1, None])])
    # A share that no cycle can hold: refused when the order is made, before anything is read.
    tiny = forebay.Schedule([(0, [1, 1]), (9, [1, 1e-9])])
    with pytest.raises(InvalidRequest, match="weights from row 9 on: .* the least is 1/4096"):
        forebay.mix(pair, tiny).loader(batch_size=8)


def test_a_dataset_may_come_in_from_nothing(pair):
    """A share of a piece that no cycle can hold comes with a later piece."""
    end, last = 10**7, 0.005
    schedule = forebay.Schedule([(0, [1, 0]), (end, [1 - last, last])], between="linear")
    shares = [(begin, forebay.Schedule([(0, w)]).weights_at(0)[1]) for begin, w in schedule.stages]
    assert 0 in [share for _, share in shares[:-1]]
    assert all(share == 0 or share * 4096 >= 0.5 for _, share in shares)
    ends = [begin for begin, _ in shares[1:]] + [end]
    rows = sum(share * (b - a) for (a, share), b in zip(shares, ends, strict=True))
    assert rows == pytest.approx(end * last / 2, rel=1e-3)
    loader = forebay.mix(pair, schedule).loader(batch_size=1)
    assert not loader.order.rows(0, 0, 144)[1].any()
    # Also where what was put off makes a share that is just at the limit.
    for last, count in ((100 / 16384, 100), (0.001, 64), (0.3, 1000)):
        table = [(0, [1, 0]), (1638400, [1 - last, last])]
        ramp = forebay.Schedule(table, between="linear", pieces=count)
        forebay.mix(pair, ramp).loader(batch_size=1)
    # Where nothing is put off, pieces are what they were.
    plain = forebay.Schedule([(0, [1, 1]), (end, [3, 1])], between="linear", pieces=4)
    assert plain.stages[1][1] == pytest.approx([0.5 + 0.25 * 1.5 / 4, 0.5 - 0.25 * 1.5 / 4])
