"""The report of a run: its figures add up, name their causes, and a page of them opens alone."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import forebay
import pytest
from forebay import _accounts, _ledger, energy
from forebay._ledger import BINS, EPOCHS_KEPT, Ledger
from forebay._readings import SAMPLED, STAGES, Readings
from patience import in_time
from servers import Node, forebay_program


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


def close(a: float, b: float, within: float = 0.02) -> bool:
    return abs(a - b) <= within + 0.1 * abs(b)


def test_utilization_is_the_time_between_batches_that_was_not_waited(ds):
    in_time(utilization_is_what_was_not_waited, ds)


def utilization_is_what_was_not_waited(ds) -> None:
    loader = ds.loader(batch_size=10, shuffle=forebay.Block(2), output="numpy")
    slept = 0.0
    for _ in range(2):
        for _ in loader:
            began = time.perf_counter()
            time.sleep(0.02)
            slept += time.perf_counter() - began
    report = loader.report().json()
    run = report["run"]
    assert (run["samples"], run["batches"]) == (200, 20)
    assert 0.4 <= slept - 1e-3 <= run["compute_s"] < slept + 0.4
    assert close(run["seconds"], run["compute_s"] + run["waited_s"], 1e-6)
    # The wait for the first batch of each loop does not count, as in MLPerf Storage.
    assert run["au"] == pytest.approx(run["compute_s"] / (run["seconds"] - run["first_wait_s"]))
    assert 0 < run["first_wait_s"] <= run["waited_s"]
    first, second = report["epochs"]
    assert (first["epoch"], second["epoch"]) == (0, 1)
    for name in ("samples", "batches", "compute_s", "waited_s", "bytes"):
        assert first[name] + second[name] == pytest.approx(run[name]), name
    bins = report["timeline"]["bins"]
    assert sum(b["samples"] for b in bins) == 200
    assert sum(b["compute_s"] for b in bins) == pytest.approx(run["compute_s"])
    assert sum(b["waited_s"] for b in bins) == pytest.approx(run["waited_s"])
    # The process used some CPU time, and the two figures of epochs are parts of it.
    assert 0 < first["cpu_seconds"] <= run["cpu_seconds"]
    measures = {name: (own, uniform) for name, own, uniform in report["shuffle"]["measures"]}
    assert report["shuffle"]["order"] == "block:2"
    assert measures["displacement"][1] == pytest.approx(1 / 3, abs=0.01)
    assert report["shuffle"]["points"]


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_columns_that_are_renamed_or_cast_come_from_somewhere(ds, stream):
    for changed in (ds.rename({"id": "number"}), ds.cast({"id": "int32"})):
        loader = changed.loader(batch_size=10, stream=stream)
        list(loader)
        report = loader.report(order=False).json()
        assert sum(report["run"]["sources"].values()) > 0
        assert not [text for text in report["absent"] if "bytes by source" in text]


def test_a_report_of_packs_has_the_epochs_of_its_batches(ds):
    loader = ds.loader(
        2, pack=forebay.Pack(8, column="text", tokenize=lambda text: [*text.encode()])
    )
    list(loader)
    # What is read ahead of an epoch that has handed out nothing.
    loader._meter.ledger.note(1, network_s=0.1)
    report = loader.report().json()
    assert [epoch["epoch"] for epoch in report["epochs"]] == [0]
    assert report["title"].endswith("batches of 2 packs of 8 tokens, shuffle none")
    # Each end counts what it deals with, in text as in the page.
    assert report["unit"] == "packs"
    assert {end["name"]: end["unit"] for end in report["ends"]} == {
        "process": "packs",
        "node": "rows",
    }
    text, page = str(loader.report()), loader.report().html()
    assert "packs/s" in text and "per 1,000 packs" in text and "per 1,000 rows" in text
    assert "per 1,000 samples" not in text + page and "per 1,000 rows" in page
    plain = ds.loader(batch_size=10)
    list(plain)
    ends = plain.report(order=False).json()["ends"]
    assert [end["unit"] for end in ends] == ["samples", "rows"]


def slow_decode(row):
    time.sleep(0.02)
    return {"id": row["id"]}


def slow_collate(samples):
    time.sleep(0.2)
    return [s["id"] for s in samples]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("cause", ["decode_s", "collate_s"])
def test_a_wait_is_charged_to_its_cause(ds, cause, threads):
    in_time(a_wait_is_charged, ds, cause, threads)


def a_wait_is_charged(ds, cause: str, threads: int) -> None:
    how = {"decode": slow_decode} if cause == "decode_s" else {"collate": slow_collate}
    loader = ds.loader(batch_size=10, threads=threads, prefetch=1, **how)
    for _ in loader:
        pass
    report = loader.report(order=False)
    run = report.json()["run"]
    waits = run["waits"]
    parts = [waits[name] for name in ("node_s", "decode_s", "collate_s")]
    assert sum(parts) == pytest.approx(run["waited_s"], abs=0.1)
    # The first batch waits for the node too.
    assert waits[cause] > 0.6 * (run["waited_s"] - run["first_wait_s"]), waits
    assert report.json()["shuffle"] is None
    word = {"decode_s": "for decoding here", "collate_s": "for collating"}[cause]
    (warning,) = report.warnings
    assert word in warning and "the loop waited" in warning


def test_a_wait_for_rows_is_charged_to_the_node(ds):
    loader = ds.loader(batch_size=5, prefetch=0)
    for _ in loader:
        pass
    run = loader.report(order=False).json()["run"]
    assert max(run["waits"], key=run["waits"].get) == "node_s", run["waits"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_report_has_three_forms(ds, stream, tmp_path):
    loader = ds.loader(batch_size=10, stream=stream)
    batches = [time.sleep(0.005) for _ in loader]
    report = loader.report()
    text = str(report)
    assert f"100 in {len(batches)} batches" in text and "AU " in text and "order" in text
    figures = json.loads(json.dumps(report.json()))
    assert figures["run"]["samples"] == 100 and figures["title"] in text
    path = tmp_path / "report.html"
    page = report.html(path)
    assert path.read_text(encoding="utf-8") == page
    assert_alone(page)
    shown = report._repr_html_()
    assert shown.startswith("<div") and "<html" not in shown
    assert "100 samples" in repr(report)


class Checker(html.parser.HTMLParser):
    """Balanced, and without anything that would be loaded or run."""

    VOID = ("meta", "br", "rect", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe", "object", "image", "use"), tag
        for name, value in attrs:
            assert name not in ("src", "href", "xlink:href") and not name.startswith("on"), name
            assert "url(" not in (value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def assert_alone(page: str) -> str:
    """Checks that a page is well-formed and refers to nothing; returns its texts."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not re.search(r"https?:|@import|NaN|\binf\b", page)
    return " ".join(checker.texts)


def test_what_was_not_measured_is_said_to_be(ds):
    loader = ds.loader(batch_size=10)
    report = loader.report(order=False)
    assert report.json()["run"] is None and report.json()["ends"] == []
    assert "no batch in this process" in str(report)
    assert_alone(report.html())
    next(iter(loader))
    run = loader.report(order=False).json()["run"]
    # One batch has no time between batches.
    assert run["au"] is None and run["batches"] == 1
    assert "it takes two batches" in str(loader.report(order=False))


def test_stats_reset_begins_a_report_anew(ds):
    loader = ds.loader(batch_size=10)
    list(loader)
    loader.stats(reset=True)
    list(loader)
    report = loader.report(order=False).json()
    assert report["run"]["samples"] == 100 and [e["epoch"] for e in report["epochs"]] == [1]


def test_epochs_add_up_after_counting_anew_in_a_last_step(ds):
    loader = ds.loader(batch_size=50, epochs=2)
    for n, _ in enumerate(loader):
        if n == 1:
            loader.stats(reset=True)
            time.sleep(0.05)
    report = loader.report(order=False).json()
    assert [(e["epoch"], e["batches"]) for e in report["epochs"]] == [(0, 0), (1, 2)]
    assert report["epochs"][0]["compute_s"] >= 0.05
    for name in ("compute_s", "waited_s", "seconds", "cpu_seconds"):
        in_all = sum(e[name] for e in report["epochs"])
        assert in_all == pytest.approx(report["run"][name]), name


def test_counting_anew_in_mid_loop_divides_the_stage_for_time_cpu_and_joules(monkeypatch):
    at = 0.0
    # 2 CPUs are busy, and use 10 W; each sample is there at once.
    monkeypatch.setattr(_ledger, "readings", lambda: Readings(2 * at, {PACKAGE: 10 * at}))
    ledger = Ledger()
    ledger.loop_began(at)
    at = 3.0
    ledger.handed(0, 0.0, 3.0, 1, first=True)
    at = 7.0
    ledger.reset(7.0)
    at = 8.0
    ledger.computed(0, 3.0, 8.0)
    at = 10.0
    ledger.reset(10.0)
    at = 10.5
    ledger.waited(0, 8.0, 10.25, None, 10.5)
    ledger.handed(0, 8.0, 10.5, 1, first=False)
    at = 11.5
    ledger.computed(0, 10.5, 11.5)
    of = ledger.whole()
    assert (of.sums["waited_s"], of.sums["compute_s"]) == (0.5, 1.0)
    assert (of.sums["node_s"], of.sums["wait_decode_s"]) == (0.25, 0.25)
    assert of.stages == {
        "waiting": Readings(1.0, {PACKAGE: pytest.approx(5.0)}),
        "computing": Readings(2.0, {PACKAGE: pytest.approx(10.0)}),
    }
    line = ledger.timeline()
    assert sum(b["waited_s"] for b in line["bins"]) == pytest.approx(0.5)
    # A wait that ended just before has nothing in it.
    ledger.reset(12.0)
    ledger.handed(0, 11.5, 11.9, 1, first=False)
    assert ledger.whole().sums["waited_s"] == 0.0


@pytest.mark.parametrize("when", ["step", "wait"])
def test_counting_anew_in_mid_loop_is_the_same_in_report_and_stats(ds, when):
    """Nothing of what was before counts, and all that comes after."""
    in_time(counts_anew, ds, when)


def counts_anew(ds, when: str) -> None:
    def busy(seconds: float) -> None:
        ends = time.process_time() + seconds
        while time.process_time() < ends:
            pass

    def decode(row):
        if when == "wait" and row["id"] == 45:
            anew()
        return row

    def anew() -> None:
        nonlocal began, cpu
        busy(0.4)
        # Before the reset: it takes time itself, of which some counts.
        began, cpu = time.perf_counter(), time.process_time()
        loader.stats(reset=True)
        busy(0.1)

    began = cpu = 0.0
    loader = ds.loader(batch_size=10, decode=decode, threads=0, prefetch=0)
    for n, _ in enumerate(loader):
        if when == "step" and n == 3:
            anew()
    took, used = time.perf_counter() - began, time.process_time() - cpu
    run, stats = loader.report(order=False).json()["run"], loader.stats()
    # A loader counts until the loop has its last batch, or knows that there is none.
    assert 0.09 < run["seconds"] <= took and run["seconds"] == pytest.approx(took, abs=0.05)
    assert stats.seconds == pytest.approx(run["seconds"], abs=0.02)
    assert stats.waited_s == pytest.approx(run["waited_s"], abs=0.02)
    assert stats.step_s == pytest.approx(run["compute_s"], abs=0.02)
    assert used >= run["cpu_seconds"] == pytest.approx(used, abs=0.05)
    stage = {"step": "computing", "wait": "waiting"}[when]
    [divided] = [s for s in run["stages"] if s["stage"] == stage]
    assert 0.09 < divided["cpu_seconds"] and 0.09 < divided["seconds"] < 0.4
    # Between two loops no stage goes on.
    iteration = iter(loader)
    next(iteration)
    iteration.close()
    loader.stats(reset=True)
    time.sleep(0.2)
    next(iter(loader))
    assert loader.stats().seconds < 0.2


def test_times_of_streams_are_those_of_all_epochs_and_begin_anew(ds):
    loader = ds.loader(batch_size=10, stream=True)
    for _ in range(6):
        list(loader)
    told = loader.report(order=False).json()["run"]["waits"]
    assert loader.stats().prepare_s == pytest.approx(told["prepare_s"])
    going = iter(loader)
    next(going)
    before = loader.stats(reset=True).prepare_s
    next(going)
    # Of one batch, and not of all that came before.
    assert loader.stats().prepare_s < before
    going.close()


def test_what_happens_between_loops_is_in_no_epoch(monkeypatch):
    now = Readings(0.0, {})

    def use(seconds: float) -> None:
        nonlocal now
        cpu = now.cpu_seconds + seconds
        now = Readings(cpu, {("rapl", "package-0", False): 10 * cpu})

    monkeypatch.setattr(_ledger, "readings", lambda: now)
    ledger = Ledger()

    def loop(epoch: int, batches: int = 3) -> None:
        ledger.loop_began(0.0)
        for n in range(batches):
            use(1.0)
            ledger.handed(epoch, n, n + 0.5, 1, first=n == 0)
            use(2.0)
            ledger.computed(epoch, n + 0.5, n + 1)
        use(1.0)
        ledger.loop_ended(epoch, batches, batches + 0.5)

    # A validation before the next epoch, then an earlier epoch again, and one that is broken off.
    use(5.0)
    loop(5)
    use(100.0)
    loop(2)
    use(100.0)
    ledger.loop_began(0.0)
    use(1.0)
    ledger.handed(5, 0.0, 1.0, 1, first=True)
    use(2.0)
    ledger.computed(5, 1.0, 2.0)
    epochs, whole = ledger.epochs(), ledger.whole()
    assert {n: of.used.cpu_seconds for n, of in epochs.items()} == {2: 10.0, 5: 13.0}
    # The wait that ends a loop has its time, too.
    assert {n: of.sums["waited_s"] for n, of in epochs.items()} == {2: 2.0, 5: 3.0}
    cpu = {stage: used.cpu_seconds for stage, used in whole.stages.items()}
    assert cpu == {"waiting": 9.0, "computing": 14.0}
    assert whole.used == Readings(23.0, {("rapl", "package-0", False): pytest.approx(230)})
    # A sensor that goes away in a loop has no figure, and not a part of one.
    now = Readings(now.cpu_seconds + 1.0, {})
    ledger.handed(5, 2.0, 3.0, 1, first=False)
    assert ledger.epochs()[5].used == Readings(14.0, {}) and not ledger.whole().used.joules


PACKAGE = ("rapl", "package-0", False)
#: Watts of a simulated machine while its loop waits, and while it works.
WATTS = {"waiting": 100.0, "computing": 300.0}


@pytest.mark.parametrize(
    ("waits", "works", "batches"), [(2.0, 1.0, 40), (0.05, 0.3, 400), (0.004, 0.006, 4000)]
)
def test_joules_are_those_of_the_stage_in_which_they_were_taken(monkeypatch, waits, works, batches):
    at, taken, sample = 0.0, {"waiting": 0.0, "computing": 0.0}, (0.0, 0.0)

    def goes_on(stage: str, seconds: float) -> None:
        nonlocal at, sample
        begun, in_all, until = at, sum(taken.values()), at + seconds
        every = SAMPLED
        last = math.floor(until / every) * every
        if last > begun:
            sample = last, in_all + (last - begun) * WATTS[stage]
        at = until
        taken[stage] += seconds * WATTS[stage]

    monkeypatch.setattr(
        _ledger, "readings", lambda: Readings(2 * at, {PACKAGE: sample[1]}, at - sample[0])
    )
    ledger = Ledger()
    ledger.loop_began(at)
    for n in range(batches):
        epoch, began = n * 4 // batches, at
        goes_on("waiting", waits)
        ledger.handed(epoch, began, at, 1, first=n == 0)
        began = at
        goes_on("computing", works)
        ledger.computed(epoch, began, at)
        assert len(ledger._shares._open) <= _ledger.OPEN_MAX
    ledger.loop_ended(3, at, at)
    epochs, whole = ledger.epochs(), ledger.whole()
    # All that the sensor measured is in the stages of epochs, and they add up to the whole.
    assert whole.used.joules[PACKAGE] == pytest.approx(sample[1])
    parts = [used for of in epochs.values() for used in of.stages.values()]
    assert sum(used.joules[PACKAGE] for used in parts) == pytest.approx(sample[1])
    assert {tuple(of.stages) for of in epochs.values()} == {STAGES}
    cpu = {stage: used.cpu_seconds for stage, used in whole.stages.items()}
    assert cpu == pytest.approx({"waiting": 2 * waits * batches, "computing": 2 * works * batches})
    found = whole.stages["waiting"].joules[PACKAGE] / whole.used.joules[PACKAGE]
    really = taken["waiting"] / sum(taken.values())
    by_time = waits / (waits + works)
    if waits > 1:
        assert found == pytest.approx(really, abs=0.02)
    elif works > 0.1:
        assert really < found < by_time
    else:
        assert found == pytest.approx(by_time, abs=0.02)


@pytest.mark.parametrize("short", [False, True])
def test_stages_of_an_epoch_are_bounded_and_no_joule_is_lost(monkeypatch, short):
    """Epochs that are shorter than the time between samples, or sensors that stand still."""
    joules, at = 0.0, 0.0
    monkeypatch.setattr(_ledger, "readings", lambda: Readings(at, {PACKAGE: joules}, 0.09))
    ledger = Ledger()
    ledger.loop_began(at)
    for epoch in range(3 * EPOCHS_KEPT):
        joules += 1.0 if short and epoch % 5 == 4 else 0.0
        at += 0.01
        ledger.handed(epoch, at - 0.01, at, 1, first=epoch == 0)
        at += 0.01
        ledger.computed(epoch, at - 0.01, at)
        assert len(ledger._shares._open) <= _ledger.OPEN_MAX
    whole = ledger.whole()
    assert whole.used.joules == {PACKAGE: pytest.approx(joules)}
    assert whole.used.cpu_seconds == pytest.approx(at)


def test_an_epoch_of_a_few_rows_has_a_report(ds):
    for loader in (ds.take(10).loader(batch_size=8), ds.take(1).loader(batch_size=1)):
        list(loader)
        report = loader.report()
        assert report.json()["shuffle"] is None
        assert any("the quality of the order" in why for why in report.json()["absent"])
        assert "the quality of the order" in str(report)


def test_measures_of_shares_are_absent_where_the_weights_of_a_mix_change(ds):
    def measured(*table):
        mix = forebay.mix([ds, ds.take(50)], forebay.Schedule(table))
        loader = mix.loader(batch_size=8, shuffle=forebay.Full())
        next(iter(loader))
        report = loader.report().json()
        why = [line for line in report["absent"] if "the weights of the mix change" in line]
        return {name: value for name, value, _ in report["shuffle"]["measures"]}, why

    steady, why = measured((0, [0.9, 0.1]), (10_000, [0.1, 0.9]))
    assert steady["label dispersion"] > 0 and "co-location" in steady and not why
    changing, why = measured((0, [1, 0]), (20, [0, 1]))
    assert steady.keys() - changing.keys() == {"co-location", "label dispersion"}
    (line,) = why
    assert "the co-location and the label dispersion of the order" in line


def test_a_model_is_not_added_to_what_is_measured():
    figures = [
        energy.Figure(source, domain, joules, estimate)
        for source, domain, joules, estimate in [
            ("rapl", "package-0", 10.0, False),
            ("model", "cpu", 7.5, True),
            ("nvml", "gpu-0", 3.0, False),
        ]
    ]
    assert energy.total(figures) == 13.0 and energy.total(figures[1:]) == 10.5


def test_what_is_kept_is_bounded():
    ledger, at = Ledger(), 1000.0
    for epoch in range(3 * EPOCHS_KEPT):
        ledger.handed(epoch, at, at + 1, 7, first=True)
        ledger.computed(epoch, at + 1, at + 3)
        at += 3
    # What comes late for an epoch that is no longer kept apart is in the sum.
    ledger.note(0, bytes=5)
    whole, epochs, line = ledger.whole(), ledger.epochs(), ledger.timeline()
    assert len(epochs) == EPOCHS_KEPT and min(epochs) == 2 * EPOCHS_KEPT
    assert ledger.left_out == 2 * EPOCHS_KEPT
    assert whole.sums["samples"] == 7 * 3 * EPOCHS_KEPT and whole.sums["bytes"] == 5
    assert line is not None and len(line["bins"]) <= BINS
    assert sum(b["samples"] for b in line["bins"]) == whole.sums["samples"]
    assert sum(b["waited_s"] for b in line["bins"]) == pytest.approx(3 * EPOCHS_KEPT)
    assert sum(b["compute_s"] for b in line["bins"]) == pytest.approx(6 * EPOCHS_KEPT)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="Debian package chromium is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_a_network(ds, tmp_path, scheme):
    loader = ds.loader(batch_size=10, shuffle=forebay.Full())
    for _ in range(2):
        for _ in loader:
            time.sleep(0.005)
    path = tmp_path / "report.html"
    loader.report().html(path)
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    shot = tmp_path / "report.png"
    run = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark]
    run += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    run += ["--window-size=820,1600", f"--screenshot={shot}", "--dump-dom", path.as_uri()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "accelerator utilization" in done.stdout and "<svg" in done.stdout
    if shot.exists():
        assert shot.stat().st_size > 20_000


@pytest.fixture
def own(tmp_path):
    """A node of one's own over the tables, cold."""
    import tables as of_tables

    of_tables.write(tmp_path / "tables")
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'tables'}"])
    yield node
    node.stop()


def command(node: Node, *args: str, code: int = 0, **env: str) -> str:
    run = [forebay_program(), "report", "--node", node.url, *args]
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def jobs_of(node: Node) -> dict:
    with urllib.request.urlopen(f"{node.url}/v1/forebay/jobs", timeout=60) as answer:
        return json.load(answer)


def test_of_several_jobs_of_one_name_the_own_is_told(tmp_path):
    import tables as of_tables

    of_tables.write(tmp_path / "tables")
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\naccess_key = "a"\nsecret_key = "everything-and-more"\ntoken = "t"\n')
    options = ["--origin", f"file://{tmp_path / 'tables'}", "--set", f"auth.keys_file={keys}"]
    node = Node("", [], tmp_path / "node", options=options)
    try:
        ds = forebay.open("tables/a/*.parquet", url=node.unix_url)
        next(iter(ds.loader(batch_size=10, job="same")))
        # With a key, and later.
        headers = {"Authorization": "Bearer t", "forebay-job": "same"}
        asked = urllib.request.Request(
            f"{node.url}/v1/datasets/{ds.id}/rows",
            data=(1).to_bytes(8, "little"),
            headers={**headers, "Content-Type": "application/octet-stream"},
        )
        time.sleep(1.1)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.status == 200
        jobs = json.loads(bytes(ds.client._call("GET", "/v1/forebay/jobs")))["jobs"]
        assert [job["caller"] for job in jobs] == ["a", "anonymous"]
        assert json.loads(ds.client.job("same"))["caller"] == "anonymous"
    finally:
        node.stop()


def test_a_key_without_admin_gets_the_report_of_its_own_jobs(tmp_path):
    import tables as of_tables

    of_tables.write(tmp_path / "tables")
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\naccess_key = "all"\nsecret_key = "everything-and-more"\ntoken = "s"\n'
        '[[keys]]\naccess_key = "reader"\nsecret_key = "much-and-much-more"\ntoken = "t"\n'
        '[[keys.allow]]\nbucket = "tables"\nactions = ["read", "list"]\n'
    )
    keys.chmod(0o600)
    options = ["--origin", f"file://{tmp_path / 'tables'}", "--set", f"auth.keys_file={keys}"]
    options += ["--set", "auth.unix_trusted=false"]
    node = Node("", [], tmp_path / "node", options=options)
    try:
        for token, job, of in (("s", "another", "b"), ("t", "own", "a")):
            ds = forebay.open(f"tables/{of}/*", client=forebay.Client(node.url, token=token))
            list(ds.loader(batch_size=10, job=job))
        told = command(node, "--place", "aws/us-east-1", FOREBAY_TOKEN="t")
        assert "job own: spent" in told and "job          own of reader" in told
        assert "keys with admin on every bucket" in told and "another" not in told
        as_json = json.loads(command(node, "--json", FOREBAY_TOKEN="t"))
        [job] = as_json["jobs"]
        assert as_json["origin"]["reads"] == job["origin_requests"] > 0
    finally:
        node.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_come_from_the_origin_once_and_then_from_here(own, stream):
    ds = forebay.open("tables/a/*.parquet", url=own.url)
    # With follow=True, the node may have fetched it before the loop asks.
    loader = ds.loader(batch_size=10, job=f"cold-{stream}", stream=stream, follow=False)
    list(loader)
    # What was just fetched for the job is nothing that the cache saved it.
    cold = loader.report(order=False).json()["origin"]
    assert cold["bytes_saved"] < cold["read_bytes"]
    list(loader)
    report = loader.report(order=False).json()
    first, second = (e["sources"] for e in report["epochs"])
    assert first["origin"] > 0 and first["peer"] == 0
    assert second["origin"] == 0 and second["disk"] + second["memory"] > 0
    assert report["epochs"][1]["hit_ratio"] == 1 and report["epochs"][0]["hit_ratio"] < 1
    # The node's account of the job says the same, and counts the requests.
    said = json.loads(ds.client.job(f"cold-{stream}"))
    assert said["rows"] >= 200 and said["origin_bytes"] == first["origin"]
    assert said["origin_requests"] > 0
    (here, node) = report["ends"]
    assert node["name"] == "node" and node["cpu_seconds"] > 0
    assert report["origin"]["read_bytes"] == first["origin"]
    # No sensor's joules unless this machine has one: then with its source.
    for end in (here, node):
        assert all(e["source"] and e["joules"] >= 0 for e in end["energy"])
    if not node["energy"]:
        assert any(line.startswith("joules of the node: ") for line in report["absent"])


def test_what_is_read_for_an_opening_is_on_the_account_of_its_job(own, monkeypatch):
    for given, env, name in (("opens", "", "opens"), (None, "opens-too", "opens-too")):
        monkeypatch.setenv("FOREBAY_JOB", env)
        ds = forebay.open("tables/a/*.parquet", url=own.url, job=given)
        said = json.loads(ds.client.job(name))
        assert said["rows"] == 0 and said["origin_requests"] > 0
    monkeypatch.setenv("FOREBAY_JOB", "two words")
    for opens in (forebay.open, forebay.open_shards):
        with pytest.raises(forebay.InvalidRequest, match="FOREBAY_JOB"):
            opens("tables/a/*.parquet", url=own.url)
        with pytest.raises(ValueError, match="job must be"):
            opens("tables/a/*.parquet", url=own.url, job="two words")


def test_jobs_do_not_pay_for_each_other(own, monkeypatch):
    ds = forebay.open("tables/a/*.parquet", url=own.url)
    list(ds.loader(batch_size=10, job="pays"))
    list(ds.loader(batch_size=10, job="rides"))
    pays, rides = (json.loads(ds.client.job(name)) for name in ("pays", "rides"))
    assert pays["origin_bytes"] > 0 and pays["origin_requests"] > 0
    assert rides["origin_bytes"] == 0 and rides["origin_requests"] == 0
    assert rides["rows"] == pays["rows"] >= 100
    with pytest.raises(forebay.NotFound, match="no-such"):
        ds.client.job("no-such")
    with pytest.raises(ValueError, match="job must be"):
        ds.loader(batch_size=10, job="two words")
    monkeypatch.setenv("FOREBAY_JOB", "two words")
    with pytest.raises(forebay.InvalidRequest, match="FOREBAY_JOB is 'two words'"):
        ds.loader(batch_size=10)
    assert ds.loader(batch_size=10, job="one").job == "one"
    monkeypatch.setenv("FOREBAY_JOB", "of-the-environment")
    assert ds.loader(batch_size=10).job == "of-the-environment"


def test_the_command_shows_jobs_and_the_node(own, tmp_path):
    ds = forebay.open("tables/a/*.parquet", url=own.url)
    for name in ("alpha-1", "alpha-2", "beta"):
        list(ds.loader(batch_size=10, job=name))
    listed = command(own)
    assert all(name in listed for name in ("alpha-1", "alpha-2", "beta")) and "origin" in listed
    page = tmp_path / "job.html"
    shown = command(own, "be", "--html", str(page), "--place", "aws/us-east-1")
    assert "job beta" in shown and "bytes from" in shown and "list prices of aws" in shown
    assert "beta" in assert_alone(page.read_text())
    as_json = json.loads(command(own, "alpha-1", "--json"))
    assert as_json["job"] == "alpha-1" and as_json["run"]["samples"] >= 100
    assert as_json["money"] is None and any("money" in a for a in as_json["absent"])
    assert "2 jobs begin" in command(own, "alpha", code=2)
    assert "no job" in command(own, "gamma", code=1)
    # The environment does what options do.
    node = command(own, FOREBAY_PLACE="gcp/us-east1")
    assert "list prices of gcp" in node
    assert all(f"job {name}: spent" in node for name in ("alpha-1", "alpha-2", "beta"))
    assert "key " in node and "bucket tables: spent" in node
    of_dataset = f"tables/a/* version {ds.id[:12]}"
    assert f"dataset {of_dataset}: spent" in node and of_dataset in listed
    [told] = [d for d in jobs_of(own)["datasets"] if d["id"] == ds.id]
    as_json = json.loads(command(own, "--json"))
    assert {job["name"] for job in as_json["jobs"]} == {"alpha-1", "alpha-2", "beta"}
    assert told in as_json["datasets"] and as_json["origin"]["reads"] > 0
    assert told["name"] == "tables/a/*" and told["rows"] >= 3 * 100
    # What it costs to keep it is by the month, and in no sum; without prices it is not told.
    assert told["stored_bytes"] == sum(file.size for file in ds.files) > 0
    keeping = f"keeping dataset {of_dataset} at the origin: "
    assert keeping in node and "per month, whatever is read" in node
    assert "keeping" not in listed
    # All of it was read for the jobs, and each byte came from the origin once.
    of_jobs = [json.loads(ds.client.job(name)) for name in ("alpha-1", "alpha-2", "beta")]
    for figure in ("rows", "row_bytes", "origin_bytes", "origin_requests"):
        assert told[figure] == sum(job[figure] for job in of_jobs), figure


def test_prices_are_edited_and_mistakes_are_told(own, tmp_path):
    ds = forebay.open("tables/a/*.parquet", url=own.url)
    loader = ds.loader(batch_size=10)
    list(loader)
    table = command(own, "--print-prices")
    path = tmp_path / "prices.toml"
    # A GB costs a million here, a request nothing.
    path.write_text(
        table.replace("egress_internet_gb = 0.09", "egress_internet_gb = 1e6").replace(
            "read_per_1000 = 0.0004\n", "read_per_1000 = 0\n"
        )
    )
    report = loader.report(order=False, place="aws/us-east-1", prices=path)
    money = report.json()["money"]
    # As the arguments were called before.
    before = loader.report(order=False, prices="aws/us-east-1", prices_file=path)
    assert before.json()["money"] == money
    shipped = loader.report(order=False, prices="aws/us-east-1").json()["money"]
    assert shipped == loader.report(order=False, place="aws/us-east-1").json()["money"] != money
    assert money["spent_total"] == pytest.approx(report.json()["origin"]["read_bytes"] / 1e9 * 1e6)
    assert money["prices"]["file"] == str(path) and money["prices"]["dated"] in str(report)
    assert "check them against your own bill" in str(report)
    assert "check them against your own bill" in report.html()
    # What it costs to keep the dataset is by the month, and not spent by the job.
    stored = sum(file.size for file in ds.files)
    assert report.json()["stored"] == [{"by": "dataset", "name": ds.name, "bytes": stored}]
    [kept] = money["storage"]
    assert (kept["by"], kept["name"], kept["bytes"]) == ("dataset", ds.name, stored)
    assert kept["per_month"] == pytest.approx(stored / 1e9 * 0.023) and kept["price"] == 0.023
    for form in (str(report), report.html()):
        assert "per month, whatever is read: not in what was spent" in form
    # Parts of a dataset are files of it, which lie there once.
    both = forebay.concatenate([ds.take(10), ds.skip(50)]).loader(batch_size=10)
    list(both)
    assert both.report(order=False).json()["stored"] == report.json()["stored"]
    free = loader.report(order=False, place="aws/us-east-1", egress="none", prices=str(path))
    assert free.json()["money"]["spent_total"] == 0
    path.write_text(table.replace("storage_gb_month =", "storage_gb_mnth =", 1))
    line = next(i for i, t in enumerate(path.read_text().splitlines(), 1) if "_mnth" in t)
    for say in (
        lambda: loader.report(prices=path),
        lambda: loader.report(place="aws/us-esat-1"),
        lambda: loader.report(prices="aws/us-esat-1"),
        lambda: loader.report(place="aws/us-east-1", egress="moon"),
    ):
        with pytest.raises(forebay.InvalidRequest):
            say()
    # As a shell of Windows writes what is redirected.
    path.write_text(table, encoding="utf-16")
    with pytest.raises(forebay.InvalidRequest, match=r"prices\.toml: .* not UTF-8"):
        loader.report(prices=path)
    path.write_text(table.replace("storage_gb_month =", "storage_gb_mnth =", 1))
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        loader.report(prices=tmp_path / "none.toml")
    # What has the form of a place may be a file that is missing.
    with pytest.raises(forebay.InvalidRequest, match="there is no file 'conf/prices', and .*conf"):
        loader.report(prices="conf/prices")
    with pytest.raises(FileNotFoundError, match="conf/prices"):
        loader.report(place="aws/us-east-1", prices="conf/prices")
    said = command(own, "--prices", str(path), code=2)
    assert f"{path}, line {line}" in said and '"storage_gb_month"' in said
    assert "did you mean" in command(own, "--place", "aws/us-esat-1", code=2)
    # A variable that is empty is none, as for the loader.
    command(own, FOREBAY_PLACE="", FOREBAY_PRICES="")
    assert loader.report(order=False).json()["money"] is None


@pytest.fixture
def two(tmp_path):
    """What starts nodes over the tables, cold, which share nothing else."""
    import tables as of_tables

    of_tables.write(tmp_path / "tables")
    origin, nodes = ["--origin", f"file://{tmp_path / 'tables'}"], []

    def start(socket: Path | None = None) -> Node:
        at = tmp_path / f"node-{len(nodes)}"
        nodes.append(Node("", [], at, options=origin, socket=socket))
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop()


def absent_of_nodes(report: forebay.report.Report) -> list[str]:
    told = report.json()["absent"]
    return [why for why in told if why.startswith(("what ", "money"))]


def test_a_report_adds_up_all_nodes_that_rows_came_from(two):
    one, other = two(), two()

    def opened(path: str, url: str):
        return forebay.open(path, client=forebay.Client(url))

    a, b = opened("tables/a/*.parquet", one.url), opened("tables/b/*.parquet", other.url)
    # The first node once more, by another address.
    c = opened("tables/a/0.parquet", one.unix_url)
    loader = forebay.mix([a, b, c]).loader(batch_size=10, job="on-two", follow=False)
    samples = sum(len(batch) for batch in loader)
    report = loader.report(order=False, place="aws/us-east-1")
    said = [json.loads(ds.client.job("on-two")) for ds in (a, b)]
    assert sum(of["rows"] for of in said) >= samples and min(of["rows"] for of in said) > 0
    document = report.json()
    assert absent_of_nodes(report) == []
    ends = {end["name"]: end for end in document["ends"]}
    assert list(ends) == ["process", "node 1", "node 2"]
    for name, node, of in zip(("node 1", "node 2"), (one, other), said, strict=True):
        assert ends[name]["of"].startswith(f"{node.url}: all that the node did")
        assert ends[name]["samples"] >= of["rows"]
        assert (
            any(why.startswith(f"joules of {name}: ") for why in document["absent"])
            or (ends[name]["energy"])
        )
    origin = document["origin"]
    assert origin["reads"] == sum(of["origin_requests"] for of in said)
    assert origin["read_bytes"] == sum(of["origin_bytes"] for of in said)
    assert min(of["origin_bytes"] for of in said) > 0
    money = document["money"]
    [egress] = [line for line in money["spent"] if line["unit"] == "GB"]
    assert egress["quantity"] == pytest.approx(origin["read_bytes"] / 1e9)
    assert [(share["by"], share["spent"]) for share in money["shares"]] == [
        ("job", money["spent_total"])
    ]
    assert "node 1 " in str(report) and "node 2" in report.html()
    # What one of them does not tell is not told as if it were all.
    other.stop()
    report = loader.report(order=False, place="aws/us-east-1")
    [which, no_money] = absent_of_nodes(report)
    assert which.startswith(f"what {other.url} took: it does not say (cannot connect")
    assert no_money == "money: all that was asked of the origin is not known"
    assert report.json()["money"] is None
    assert report.json()["origin"]["of"] == "not all: see absent" and "see absent" in str(report)
    assert [end["name"] for end in report.json()["ends"]] == ["process", "node 1"]


def test_a_report_says_that_a_client_moved(two):
    nodes = {node.unix_url: node for node in (two(), two())}
    client = forebay.Client(list(nodes), timeout=5)
    ds = forebay.open("tables/a/*.parquet", client=client)
    loader = ds.loader(batch_size=10, job="moves", follow=False, prefetch=0)
    iteration = iter(loader)
    next(iteration)
    nodes[client.route].stop()
    list(iteration)
    report = loader.report(order=False, place="aws/us-east-1")
    [which, no_money] = absent_of_nodes(report)
    assert f"before its client moved to {client.route}" in which
    assert no_money == "money: all that was asked of the origin is not known"
    assert report.json()["origin"]["read_bytes"] > 0 and report.json()["money"] is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_report_says_that_the_node_was_started_again(tmp_path, ranks):
    import tables as of_tables

    of_tables.write(tmp_path / "tables")
    options = ["--origin", f"file://{tmp_path / 'tables'}"]
    node = Node("", [], tmp_path / "node", options=options)
    loader = forebay.open("tables/a/*.parquet", url=node.url).loader(
        batch_size=10, job="again", follow=False, prefetch=0, rank=0, world_size=ranks
    )
    iteration = iter(loader)
    next(iteration)
    node.stop()
    # The client notices, as it may by itself; it has no other node to move to.
    with pytest.raises(forebay.ConnectionFailed):
        loader.clients()[0].job("again")
    node = Node("", [], tmp_path / "node", options=options, listen=f"127.0.0.1:{node.port}")
    try:
        samples = 10 + sum(len(batch) for batch in iteration)
        report = loader.report(order=False, place="aws/us-east-1")
    finally:
        node.stop()
    [which, no_money] = absent_of_nodes(report)
    if ranks == 1:
        # The batch that was handed out, and perhaps one that was on its way.
        assert which.startswith("what was taken for ") and f" of {samples} rows: " in which
    else:
        # Which of the rows that the node knows are those of this rank is not known.
        assert "before it failed to answer" in which
    assert "started again" in which
    assert no_money == "money: all that was asked of the origin is not known"
    assert report.json()["money"] is None


def test_a_node_that_does_not_answer_holds_no_report(two, monkeypatch):
    one, other = two(), two()
    a, b = (forebay.open("tables/a/*.parquet", url=node.url) for node in (one, other))
    loader = forebay.concatenate([a, b]).loader(batch_size=10, job="silent", follow=False)
    list(loader)
    # The datasets of a concatenation have nodes of their own.
    ends = [end["name"] for end in loader.report(order=False).json()["ends"]]
    assert ends == ["process", "node 1", "node 2"]
    monkeypatch.setattr(_accounts, "SILENT_SECONDS", 0.5)
    os.kill(other.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        report = loader.report(order=False, place="aws/us-east-1")
        assert time.monotonic() - began < 30
    finally:
        os.kill(other.process.pid, signal.SIGCONT)
    [which, _] = absent_of_nodes(report)
    assert which.startswith(f"what {other.url} took") and "within 0.5 s" in which
    assert report.json()["money"] is None


def test_keys_of_one_node_have_accounts_of_their_own(monkeypatch):
    said = {"a": {"caller": "a", "rows": 3}, "b": {"caller": "b", "rows": 4}}

    class Keyed:
        url = "http://node"

        def __init__(self, key):
            self.key = key

    monkeypatch.setattr(_accounts._node, "job", lambda client, job: said[client.key])
    monkeypatch.setattr(_accounts._node, "identity", lambda client: "the node")
    clients = [Keyed("a"), Keyed("b"), Keyed("a")]
    assert _accounts.of_job([*clients, clients[0]], "job").rows == 7
