"""Joules of the node's machine by what a loop did: how samples are shared, and through a node."""

from __future__ import annotations

import gc
import json
import random
import shutil
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path

import forebay
import pytest
import tables as made
from forebay import _meanwhile, _node
from forebay._ledger import EPOCHS_KEPT, Ledger
from forebay._meanwhile import Meanwhile, Watch
from patience import in_time
from servers import Node

RECORDED = Path(__file__).parents[1] / "recorded" / "sysfs"
PACKAGE = ("rapl", "package-0", False)
GPU = ("nvml", "gpu-0", False)


class Machine:
    """A node's machine: its clock is another one, and its power changes with each sample."""

    def __init__(self, rng: random.Random, seconds: float, name: str = "n") -> None:
        self.name, self.ahead = name, rng.uniform(-1000, 1000) + 5000
        self.watts = [rng.uniform(0, 500) for _ in range(int(seconds * 10) + 2)]
        self.totals = [0.0, *accumulate(w * 0.1 for w in self.watts)]
        self.times = [round((n * 0.1 + self.ahead) * 1e9) for n in range(len(self.totals))]
        self.began = 0.0

    def joules(self, began: float, ended: float) -> float:
        """What it used between two moments here."""
        return self._until(ended) - self._until(began)

    def _until(self, at: float) -> float:
        n = min(int(at * 10), len(self.watts) - 1)
        return self.totals[n] + (at - n * 0.1) * self.watts[n]

    def answer(self, wanted: dict[str, int], now: float, most: int = 1000) -> dict:
        """What it says at ``now``, of the time here."""
        back = now - wanted.get("seconds", 10)
        after = wanted.get("after_ns", round((back + self.ahead) * 1e9))
        oldest = round((max(self.began, now - 600) + self.ahead) * 1e9)
        first = max(bisect_right(self.times, after), bisect_left(self.times, oldest))
        chosen = range(first, int(now * 10) + 1)
        sensors = [dict(zip(("source", "domain", "estimate"), PACKAGE, strict=True))]
        return {
            "node": self.name,
            "nodes": 1,
            "now_ns": round((now + self.ahead) * 1e9),
            "sensors": sensors,
            "samples": [[self.times[n], [self.totals[n]]] for n in chosen[:most]],
            "more": len(chosen) > most,
            "absent": [],
        }


def watched() -> Ledger:
    """A ledger that is told samples of a node."""
    ledger = Ledger()
    ledger.expect_samples(True)
    return ledger


def ask(
    ledger: Ledger,
    machine: Machine,
    now: float,
    most: int = 1000,
    *,
    there: float = 0.0,
    back: float = 0.0,
) -> None:
    """Asks at a moment; so long take the question and the answer."""
    for _ in range(1000):
        answer = machine.answer(ledger.wanted_samples(now), now + there, most)
        heard = ledger.node_said(answer, now, now + there + back)
        if (heard and not answer["more"]) or there + back > 1:
            return
    raise AssertionError("it is asked for ever")


def unknown(ledger: Ledger) -> dict[int, float]:
    return ledger.at_node()[2]


def joules(of, domain=PACKAGE) -> dict[str, float]:
    return {stage: used.joules[domain] for stage, used in of.node.items()}


@pytest.mark.parametrize("way", [0.0, 0.004, 0.1])
@pytest.mark.parametrize("seed", range(12))
def test_samples_of_a_node_are_shared_among_stages_by_the_time_here(seed, way):
    rng = random.Random(seed)
    longest = [0.002, 0.05, 0.4, 30.0][seed % 4]
    ledger, at = watched(), rng.uniform(0.2, 3.0)
    machine = Machine(rng, 9000)
    really: dict[tuple[int, str], float] = {}
    most, asks, took = rng.choice([7, 1000]), rng.uniform(0.3, 25.0), 0.0

    def question(at: float) -> None:
        # Each question and answer is under way for another time.
        ask(ledger, machine, at, most, there=rng.uniform(0, way), back=rng.uniform(0, way))
        # Of the samples, only those are kept that a stage still needs.
        assert len(ledger._meanwhile._kept) <= 3

    next_ask = at
    for loop in range(3):
        began = at
        ledger.loop_began(at)
        for n in range(rng.randrange(2, 300 if longest < 1 else 40)):
            epoch = loop * 2 + n % 2
            for stage in ("waiting", "computing"):
                start, at = at, at + rng.uniform(0, longest)
                while next_ask < at - 3 * way:
                    question(next_ask)
                    next_ask += asks
                used = really.get((epoch, stage), 0.0) + machine.joules(start, at)
                really[epoch, stage] = used
                if stage == "waiting":
                    ledger.handed(epoch, start, at, 1, first=n == 0)
                else:
                    ledger.computed(epoch, start, at)
        took += machine.joules(began, at)
        at += rng.uniform(0, 100)
    at = max(at, next_ask) + 0.11 + 3 * way
    question(at)
    epochs, whole = ledger.epochs(), ledger.whole()
    assert unknown(ledger) == {}
    # Not a joule is lost or counted twice, but for where the clocks are not known well.
    unsure = 3 * 2 * way * 500
    assert sum(joules(whole).values()) == pytest.approx(took, abs=unsure + 1e-6)
    assert sum(sum(joules(of).values()) for of in epochs.values()) == pytest.approx(
        sum(joules(whole).values())
    )
    if longest > 1:
        for epoch, of in epochs.items():
            for stage, found in joules(of).items():
                # Short stages are kept together, as long as a sample at the most.
                wanted = pytest.approx(really[epoch, stage], rel=0.05, abs=40 * way * 500)
                assert found == wanted, (epoch, stage)


def test_what_a_node_measured_before_it_was_started_again_is_not_known():
    rng = random.Random(1)
    ledger, old, new = watched(), Machine(rng, 100), Machine(rng, 100, "again")
    ledger.loop_began(1.0)
    ask(ledger, old, 1.0)
    ledger.handed(0, 1.0, 3.0, 1, first=True)
    ask(ledger, old, 4.0)
    ledger.computed(0, 3.0, 6.0)
    ledger.handed(1, 6.0, 8.0, 1, first=False)
    # Of the new one there are samples since 7 s.
    new.began = 7.0
    ask(ledger, new, 8.5)
    ledger.computed(1, 8.0, 9.0)
    ask(ledger, new, 9.6)
    assert unknown(ledger) == {0: pytest.approx(3.0), 1: pytest.approx(2.0)}
    epochs = ledger.epochs()
    assert joules(epochs[0])["waiting"] == pytest.approx(old.joules(1.0, 3.0))
    assert joules(epochs[1])["computing"] == pytest.approx(new.joules(8.0, 9.0))


def test_counting_anew_in_mid_loop_begins_in_the_stage_that_goes_on():
    ledger, machine = watched(), Machine(random.Random(3), 200)
    ledger.loop_began(1.0)
    ask(ledger, machine, 1.0)
    ledger.handed(0, 1.0, 2.0, 1, first=True)
    ledger.computed(0, 2.0, 12.0)
    ledger.handed(0, 12.0, 13.0, 1, first=False)
    ledger.reset(20.0)
    # The node is asked seldom.
    ledger.computed(0, 13.0, 40.0)
    ask(ledger, machine, 41.0)
    assert unknown(ledger) == {}
    assert ledger.epochs()[0].sums["compute_s"] == pytest.approx(20.0)
    assert joules(ledger.whole()) == {
        "waiting": 0.0,
        "computing": pytest.approx(machine.joules(20.0, 40.0)),
    }
    # What ended just before has nothing in it.
    ledger.reset(45.0)
    ledger.handed(0, 40.0, 44.9, 1, first=False)
    ledger.computed(0, 44.9, 50.0)
    ask(ledger, machine, 51.0)
    assert unknown(ledger) == {}
    assert joules(ledger.whole()) == {
        "waiting": 0.0,
        "computing": pytest.approx(machine.joules(45.0, 50.0)),
    }
    # The same if nobody has answered before.
    ledger = watched()
    ledger.loop_began(1.0)
    ledger.computed(0, 1.0, 31.0)
    ask(ledger, machine, 31.5)
    assert joules(ledger.whole())["computing"] == pytest.approx(machine.joules(1.0, 31.0))


def test_an_answer_that_took_long_does_not_say_what_time_it_is():
    ledger, machine = watched(), Machine(random.Random(4), 200)
    ledger.loop_began(1.0)
    # It was asked again and again, and answered at last.
    ask(ledger, machine, 1.0, there=15.0)
    assert ledger.whole().node == {}
    ledger.handed(0, 1.0, 20.0, 1, first=True)
    ask(ledger, machine, 21.0)
    ledger.computed(0, 20.0, 30.0)
    ask(ledger, machine, 31.0, there=15.0)
    ledger.handed(0, 30.0, 60.0, 1, first=False)
    ask(ledger, machine, 60.2, back=0.4)
    assert unknown(ledger) == {}
    assert joules(ledger.whole()) == {
        "waiting": pytest.approx(machine.joules(1.0, 20.0) + machine.joules(30.0, 60.0)),
        "computing": pytest.approx(machine.joules(20.0, 30.0)),
    }


def test_a_machine_that_slept_is_not_believed():
    """`perf_counter` stands still while a machine sleeps, and so its stages say nothing of what
    others measured meanwhile."""
    ledger, machine = watched(), Machine(random.Random(7), 4000)
    ledger.loop_began(1.0)
    ask(ledger, machine, 1.0)
    ledger.handed(0, 1.0, 3.0, 1, first=True)
    ask(ledger, machine, 3.5)
    ledger.computed(0, 3.0, 6.0)
    # 300 s in which the clock here stood still.
    machine.ahead += 300
    before = machine.joules(1.0, 3.0)
    machine.times = [at + 300 * 10**9 for at in machine.times]
    ledger.handed(1, 6.0, 8.0, 1, first=False)
    ask(ledger, machine, 8.5)
    ledger.computed(1, 8.0, 9.0)
    ledger.handed(2, 9.0, 12.0, 1, first=False)
    ask(ledger, machine, 12.5)
    assert unknown(ledger) == {0: pytest.approx(3.0), 1: pytest.approx(3.0)}
    epochs = ledger.epochs()
    assert joules(epochs[0])["waiting"] == pytest.approx(before)
    assert not epochs[1].node
    assert joules(epochs[2])["waiting"] == pytest.approx(machine.joules(9.0, 12.0))


@pytest.mark.parametrize("wrong", ["sensors", "joules"])
def test_what_an_odd_answer_was_to_tell_is_not_known(wrong):
    ledger, machine = watched(), Machine(random.Random(8), 100)
    ledger.loop_began(1.0)
    ask(ledger, machine, 1.0)
    ledger.computed(0, 1.0, 5.0)
    answer = machine.answer(ledger.wanted_samples(6.0), 6.0)
    answer |= {"sensors": [{}]} if wrong == "sensors" else {}
    if wrong == "joules":
        answer["samples"][3][1] = ["many"]
    with pytest.raises((KeyError, ValueError)):
        ledger.node_said(answer, 6.0, 6.0)
    assert unknown(ledger) == {0: pytest.approx(4.0)}


def test_what_was_in_a_gap_between_samples_is_known_as_a_whole_only():
    ledger, machine = watched(), Machine(random.Random(5), 4000)
    ledger.loop_began(1.0)
    ask(ledger, machine, 1.0)
    # A step that takes longer than the node remembers.
    ledger.handed(0, 1.0, 2.0, 1, first=True)
    ask(ledger, machine, 3.0)
    ledger.computed(0, 2.0, 1500.0)
    ask(ledger, machine, 1501.0)
    assert unknown(ledger) == {}
    assert joules(ledger.whole())["computing"] == pytest.approx(machine.joules(2.0, 1500.0))
    # Steps of which the node does not remember where one ended.
    ledger.handed(1, 1500.0, 1800.0, 1, first=False)
    ledger.computed(1, 1800.0, 2200.0)
    ledger.handed(2, 2200.0, 2600.0, 1, first=False)
    ask(ledger, machine, 2601.0)
    assert unknown(ledger) == {1: pytest.approx(700.0)}
    assert joules(ledger.epochs()[2])["waiting"] == pytest.approx(machine.joules(2200.0, 2600.0))


def test_a_sensor_of_a_node_that_was_not_there_all_the_time_has_no_figure():
    found = Meanwhile()
    found.expect(True)
    sensors = [{"source": s, "domain": d, "estimate": e} for s, d, e in (PACKAGE, GPU)]
    answer = {"node": "n", "now_ns": 5_000_000_000, "sensors": sensors}
    gpu = [None, 1.0, 3.0, None]
    samples = [[round((1 + n) * 1e9), [n * 10.0, gpu[n]][: 1 + (n > 0)]] for n in range(4)]
    found.begin(1.5)
    for n, at in enumerate((2.0, 3.0, 4.0)):
        found.end(n, "computing", at)
    used, lost = found.said({**answer, "samples": samples}, 5.0, 5.0).shared()
    assert lost == []
    assert {n: stages["computing"].joules for n, stages in used.items()} == {
        0: {PACKAGE: pytest.approx(5.0)},
        1: {PACKAGE: pytest.approx(10.0), GPU: pytest.approx(2.0)},
        2: {PACKAGE: pytest.approx(10.0)},
    }


def test_what_waits_for_samples_is_bounded(monkeypatch):
    monkeypatch.setattr(_meanwhile, "SPANS_MAX", 50)
    ledger, machine = watched(), Machine(random.Random(2), 500)
    ledger.loop_began(1.0)
    ask(ledger, machine, 1.0)
    at = 1.0
    for epoch in range(2 * EPOCHS_KEPT):
        ledger.handed(epoch, at, at + 0.3, 1, first=epoch == 0)
        at += 0.3
    assert len(ledger._meanwhile._spans) == 50
    ask(ledger, machine, at + 0.1)
    # What there was no room for is not known, and is said to be.
    assert sum(unknown(ledger).values()) == pytest.approx(0.3 * (2 * EPOCHS_KEPT - 50))
    assert ledger.epochs()[2 * EPOCHS_KEPT - 1].node
    # Nor is it known what the node does not tell any more.
    ledger.handed(1000, at, at + 1.0, 1, first=False)
    ledger.expect_samples(False)
    ledger.handed(1001, at + 1.0, at + 3.0, 1, first=False)
    assert unknown(ledger)[1000] == pytest.approx(1.0)
    assert unknown(ledger)[1001] == pytest.approx(2.0)
    ledger.reset(0.0)
    assert unknown(ledger) == {}
    monkeypatch.setattr(_meanwhile, "LOST_MAX", 10)
    ledger.loop_began(1.0)
    for epoch in range(100):
        ledger.computed(epoch, 0.0, 2.0 + epoch)
    assert len(unknown(ledger)) == 10 and sum(unknown(ledger).values()) == pytest.approx(100)


@pytest.fixture
def measuring(tmp_path):
    """What starts nodes on a machine of two sockets, and the counter of its first package."""
    root = tmp_path / "sysfs"
    shutil.copytree(RECORDED / "intel-two-sockets", root)
    made.write(tmp_path / "tables")
    nodes = []

    def start(port: int = 0) -> Node:
        options = ["--origin", f"file://{tmp_path / 'tables'}"]
        settings = {"FOREBAY__ENERGY__SYSFS": str(root), "FOREBAY__ENERGY__NVML": "off"}
        node = Node(
            "",
            [],
            tmp_path / f"node-{len(nodes)}",
            listen=f"127.0.0.1:{port}",
            options=options,
            env=settings,
        )
        nodes.append(node)
        return node

    yield start, root / "class/powercap/intel-rapl:0/energy_uj"
    for node in nodes:
        node.stop()


LOOP = """
import json, sys, threading, time, forebay
from pathlib import Path
url, counter, kind = sys.argv[1:]
counter, power, stop = Path(counter), 100.0, threading.Event()

def goes_on():
    # 100 W while the loop waits, and 20 W while it computes.
    joules, at = int(counter.read_text()) / 1e6, time.monotonic()
    while not stop.wait(0.004):
        now = time.monotonic()
        joules, at = joules + (now - at) * power, now
        with counter.open("r+") as file:
            file.write(f"{int(joules * 1e6)}\\n")

def slow(row):
    global power
    power = 100.0
    time.sleep(0.08)
    return row

threading.Thread(target=goes_on, daemon=True).start()
ds = forebay.open("tables/a/*.parquet", url=url)
loader = ds.take(40).loader(
    batch_size=10, decode=slow, threads=0, prefetch=0, stream=kind == "streams"
)
for epoch in range(2):
    for batch in loader:
        power = 20.0
        time.sleep(0.8)
report = loader.report(order=False)
stop.set()
assert "node" in report.html()
print(json.dumps({"report": report.json(), "text": str(report)}))
"""


@pytest.mark.parametrize("kind", ["pulls", "streams"])
def test_a_report_tells_joules_of_the_node_by_what_the_loop_did(measuring, kind):
    start, counter = measuring
    in_time(joules_are_told_by_what_the_loop_did, start(), counter, kind)


def joules_are_told_by_what_the_loop_did(node: Node, counter: Path, kind: str) -> None:
    # This end has no sensors.
    env = {"FOREBAY_SYSFS": str(RECORDED / "virtual-machine"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LOOP, node.url, str(counter), kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    report, text = told["report"], told["text"]
    assert len(report["epochs"]) == 2 and report["run"]["energy"] == []
    for figures in (report["run"], *report["epochs"]):
        found = {stage["stage"]: stage for stage in figures["node_stages"]}
        assert list(found) == ["waiting", "computing"]
        watts = {}
        for name, stage in found.items():
            assert stage["cpu_seconds"] is None
            assert {(e["source"], e["domain"]) for e in stage["energy"]} == {
                ("rapl", "package-0"),
                ("rapl", "dram-0"),
                ("rapl", "package-1"),
                ("rapl", "dram-1"),
                ("hwmon", "board"),
            }
            [of_package] = [e for e in stage["energy"] if e["domain"] == "package-0"]
            watts[name] = of_package["joules"] / stage["seconds"]
        # A stage begins and ends within a sample, whose power is a mean.
        assert watts["waiting"] > 70 and 15 < watts["computing"] < 50, watts
    assert text.count("the node's machine: ") == 4
    assert not any("joules of the node" in why for why in report["absent"])


def test_a_node_without_sensors_is_asked_once_in_a_while(tables, monkeypatch):
    asked = []
    none = {"node": "n", "nodes": 1, "now_ns": 0, "sensors": [], "samples": [], "more": False}
    monkeypatch.setattr(_node, "energy", lambda *_: asked.append(1) or none)
    loader = forebay.open("tables/a/*.parquet", url=tables.url).loader(batch_size=10)
    for _ in range(3):
        list(loader)
        ends = time.monotonic() + 20
        while not asked or loader._meter.watch._is_asking:
            assert time.monotonic() < ends
            time.sleep(0.01)
    assert len(asked) == 1
    report = loader.report(order=False).json()
    # The report says once that the node has no sensors, with the node's other figures.
    assert report["run"]["node_stages"] == []
    assert not any("by what the loop did" in why for why in report["absent"])


def test_a_report_does_not_tell_joules_of_a_node_that_was_started_again(measuring):
    start, _ = measuring
    node = start()
    loader = forebay.open("tables/a/*.parquet", url=node.url).loader(batch_size=10)

    def told() -> tuple[list[int], list[str]]:
        report = loader.report(order=False).json()
        parts = [len(f["node_stages"]) for f in (report["run"], *report["epochs"])]
        return parts, [why for why in report["absent"] if "by what the loop did" in why]

    for _ in loader:
        time.sleep(0.1)
    assert told() == ([2, 2], [])
    for n, _ in enumerate(loader):
        time.sleep(0.1)
        if n == 6:
            node.stop()
            node = start(node.port)
    for _ in loader:
        time.sleep(0.1)
    parts, [why] = told()
    # Of the second epoch it is not known what the first node measured, so it is not of the run.
    assert parts == [0, 2, 0, 2]
    assert "what the node measured in " in why and why.endswith(" s of it is not known")
    node.stop()
    parts, [does_not_say, again] = told()
    assert parts == [0, 2, 0, 2] and "it does not say" in does_not_say and again == why


def test_a_report_right_after_a_long_step_has_the_joules_of_it(measuring):
    start, counter = measuring
    node = start()
    loader = forebay.open("tables/a/*.parquet", url=node.url).take(20).loader(batch_size=10)
    for _ in loader:
        time.sleep(1.2)
        with counter.open("r+") as file:
            after = int(file.read()) + 5_000_000
            file.seek(0)
            # In place: whoever reads meanwhile sees the old number or the new one.
            file.write(f"{after}\n")
    report = loader.report(order=False).json()
    assert not any("joules of the node" in why for why in report["absent"])
    computing = report["run"]["node_stages"][1]
    assert computing["stage"] == "computing" and computing["seconds"] > 2
    package = {e["domain"]: e["joules"] for e in computing["energy"]}["package-0"]
    # What was added at the end of a step is told by the sample after it.
    assert 2 <= package <= 10 + 1e-6


def test_sensors_that_come_later_and_go_are_told_as_far_as_they_were_there(monkeypatch):
    machine, zero = Machine(random.Random(6), 100), time.perf_counter() - 10
    none = {"node": "n", "nodes": 1, "now_ns": 0, "sensors": [], "samples": [], "more": False}
    there = False

    def energy(_client, wanted):
        return machine.answer(wanted, time.perf_counter() - zero) if there else none

    class One:
        nodes = 1

    monkeypatch.setattr(_node, "energy", energy)
    ledger = Ledger()
    watch = Watch(ledger, One())
    at = time.perf_counter()
    ledger.loop_began(at)
    for epoch, there in enumerate([False, True, True, False]):
        time.sleep(0.25)
        began, at = at, time.perf_counter()
        ledger.handed(epoch, began, at, 1, first=epoch == 0)
        time.sleep(0.12)
        watch.ask()
        was_told, waits, lost = ledger.at_node()
        assert not waits and was_told == (epoch > 0)
    # Of the second epoch, the node told nothing while it went on.
    assert sorted(lost) == [0, 1, 3] and watch.why_not is None
    assert [bool(of.node) for of in ledger.epochs().values()] == [False, False, True, False]


@pytest.mark.parametrize("what", ["refused", "list", "empty", "text", "cluster"])
def test_a_node_that_does_not_tell_its_samples_is_told_with_why(tables, monkeypatch, what):
    ds = forebay.open("tables/a/*.parquet", url=tables.url)

    def answer(*_: object):
        if what == "refused":
            raise forebay.errors.Unsupported("GET /v1/forebay/energy is not offered by this node")
        if what == "text":
            return json.loads("<html>")
        return {"list": [], "empty": {}, "cluster": {"nodes": 2}}[what]

    monkeypatch.setattr(_node, "energy", answer)
    loader = ds.loader(batch_size=10)
    assert len(list(loader)) == 10
    [why] = [w for w in loader.report(order=False).json()["absent"] if "the loop did" in w]
    words = {"refused": "of an earlier release", "cluster": "several nodes"}
    assert words.get(what, "nothing can be made of") in why


def test_several_nodes_are_not_asked(tables, monkeypatch):
    ds = forebay.open("tables/a/*.parquet", url=tables.url)
    loader = ds.loader(batch_size=10, stream=True, nodes=[tables.url])
    list(loader)
    watch = loader._meter.watch
    assert watch.why_not is not None and watch._thread is None

    class Several:
        nodes = 1

    client = Several()
    watch = Watch(Ledger(), client)
    assert watch.why_not is None
    # It turns out when the name is resolved.
    client.nodes = 2
    monkeypatch.setattr(_node, "energy", lambda *_: {"nodes": 1})
    watch.ask()
    assert "several nodes" in watch.why_not
    Several.nodes = 2
    watch = Watch(Ledger(), Several())
    watch.loop_goes_on()
    watch.ask()
    assert watch._thread is None and "several nodes" in watch.why_not


@pytest.mark.parametrize("failed", [False, True])
def test_the_thread_that_asks_ends_with_its_loader(measuring, monkeypatch, failed):
    start, _ = measuring
    node = start()
    monkeypatch.setattr(_meanwhile, "ASKED_EVERY", 0.05)
    loader = forebay.open("tables/a/*.parquet", url=node.url).loader(batch_size=10)
    list(loader)
    thread = loader._meter.watch._thread
    list(loader)
    assert loader._meter.watch._thread is thread and thread.is_alive()
    # One that was idle for long ends, and is followed by another one.
    monkeypatch.setattr(_meanwhile, "IDLE_SECONDS", 0.0)
    thread.join(60)
    assert not thread.is_alive()
    monkeypatch.setattr(_meanwhile, "IDLE_SECONDS", 900.0)
    list(loader)
    thread = loader._meter.watch._thread
    if failed:
        node.stop()
        ends = time.monotonic() + 30
        while loader._meter.watch._failed is None:
            assert time.monotonic() < ends
            time.sleep(0.01)
    time.sleep(0.2)
    assert thread.is_alive()
    gc.collect()
    gc.disable()
    try:
        del loader
        thread.join(60)
    finally:
        gc.enable()
    assert not thread.is_alive()
