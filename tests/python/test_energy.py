"""Joules: over recorded trees of sysfs, in the client and as a node's metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import forebay
import pytest
from forebay import energy
from servers import Node

RECORDED = Path(__file__).parents[1] / "recorded" / "sysfs"


@pytest.fixture
def machine(tmp_path):
    """A copy of a recorded machine, and how its counters are moved."""

    def of(name: str):
        root = tmp_path / name
        shutil.copytree(RECORDED / name, root)

        def add(zone: str, joules: float) -> None:
            path = root / "class/powercap" / zone / "energy_uj"
            # In place: whoever reads meanwhile sees the old number or the new one.
            after = int(path.read_text()) + int(joules * 1e6)
            with path.open("r+") as file:
                file.write(f"{after}\n")

        return root, add

    return of


def of(figures, domain):
    (found,) = [f for f in figures if f.domain == domain]
    return found


def test_spans_have_what_was_used_in_them(machine):
    root, add = machine("intel-two-sockets")
    with energy.Monitor(sysfs=root, nvml="") as monitor:
        assert monitor.notes == []
        with monitor.span("epoch 0"):
            add("intel-rapl:0", 10)
            with monitor.span("read"):
                add("intel-rapl:0:0", 2)
                add("intel-rapl:1", 3)
        with monitor.span("epoch 1"):
            add("intel-rapl:0", 1.5)
        report = monitor.report()
    spans = {s.name: s for s in report.spans}
    assert list(spans) == ["read", "epoch 0", "epoch 1"]
    assert spans["read"].joules == pytest.approx(5)
    assert spans["epoch 0"].joules == pytest.approx(15)
    assert spans["epoch 1"].joules == pytest.approx(1.5)
    assert report.whole.joules == pytest.approx(16.5) == monitor.joules()
    # The board contains the others, so it is not in the sum.
    board = of(report.whole.figures, "board")
    assert board.source == "hwmon" and board.overlaps and board.joules > 0
    text = str(report)
    assert "epoch 0: " in text and "15.0 J" in text and "rapl" in text and "ESTIMATE" not in text
    assert report.to_dict()["spans"][1]["joules"] == pytest.approx(15)
    assert {f.domain for f in monitor.figures()} == {
        "package-0",
        "dram-0",
        "package-1",
        "dram-1",
        "board",
    }


def test_where_there_is_no_sensor_joules_are_absent_and_not_zero():
    with energy.Monitor(sysfs=RECORDED / "virtual-machine", nvml="") as monitor:
        with monitor.span("all"):
            sum(range(100_000))
        assert monitor.joules() is None and monitor.figures() == []
        report = monitor.report()
    assert report.spans[0].joules is None and report.spans[0].cpu_seconds > 0
    assert report.to_dict()["whole"]["joules"] is None
    assert "joules not measured" in str(report) and "has no zones" in str(report)


def test_an_estimate_is_marked_everywhere(tmp_path):
    with energy.Monitor(
        sysfs=RECORDED / "virtual-machine", nvml="", model="cpu-watts=20"
    ) as monitor:
        with monitor.span("all"):
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
        assert monitor.joules() >= 4
        (figure,) = monitor.figures()
        assert figure.estimate and figure.source == "cpu-watts=20"
        assert "ESTIMATE" in str(figure) and str(monitor.report()).count("ESTIMATE") == 4
        lines = monitor.line_protocol().splitlines()
        assert lines and all("estimate=true" in line for line in lines)
    with pytest.raises(forebay.InvalidRequest, match="cpu-watts=15"):
        energy.Monitor(model="watts")
    with pytest.raises(forebay.InvalidRequest, match="interval"):
        energy.Monitor(interval=0)


#: The grammar of InfluxDB's line protocol (https://docs.influxdata.com/influxdb/v2/reference/
#: syntax/line-protocol/): keys and values of tags escape comma, equals sign and space.
NAME = r"(?:[^,= \\\n]|\\[,= ]|\\(?![,= ]))+"
FLOAT = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
LINE = re.compile(
    rf"(?P<measurement>(?:[^, \\\n]|\\[, ])+)(?:,{NAME}={NAME})*"
    rf" {NAME}={FLOAT}(?:,{NAME}={FLOAT})* -?\d{{1,19}}\Z"
)


def test_the_line_protocol_is_that_of_influxdb(machine, tmp_path):
    root, add = machine("amd")
    path = tmp_path / "energy.lp"
    with energy.Monitor(sysfs=root, nvml="", interval=0.02) as monitor:
        time.sleep(0.4)
        add("intel-rapl:0", 4)
        time.sleep(0.4)
        text = monitor.line_protocol(path, tags={"job": "a b,c=d"})
        with pytest.raises(forebay.InvalidRequest, match="own"):
            monitor.line_protocol(tags={"source": "x"})
        now = time.time_ns()
    assert path.read_text() == text
    lines = text.splitlines()
    assert len(lines) >= 4 * 5
    for line in lines:
        assert LINE.match(line), line
        assert LINE.match(line)["measurement"] == "forebay_energy"
        assert r"job=a\ b\,c\=d" in line
        assert abs(int(line.rsplit(" ", 1)[1]) - now) < 60e9
    packages = [line for line in lines if "domain=package-0" in line]
    assert "joules=4" in packages[-1] and "joules=0 " in packages[0]


LOOP = """
import sys, time, forebay
from pathlib import Path
url, root = sys.argv[1:]
counter = Path(root) / "class/powercap/intel-rapl:0/energy_uj"
ds = forebay.open("tables/a/*.parquet", url=url)
loader = ds.loader(batch_size=10)
for epoch in range(2):
    for batch in loader:
        after = int(counter.read_text()) + 2_000_000
        with counter.open("r+") as file:
            file.write(f"{after}\\n")
        time.sleep(0.03)
report = loader.report(order=False)
import json
print(json.dumps(report.json()))
print(report, file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["measured", "off", "none"])
def test_a_loader_measures_where_there_is_something_to_measure(tables, machine, how):
    import json

    root, _ = machine("intel-psys")
    env = {"FOREBAY_SYSFS": str(root), "PATH": "/usr/bin:/bin"}
    if how == "off":
        env["FOREBAY_ENERGY"] = "off"
    if how == "none":
        env["FOREBAY_SYSFS"] = str(RECORDED / "virtual-machine")
    command = [sys.executable, "-c", LOOP, tables.url, str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    run, (first, second) = report["run"], report["epochs"]
    if how != "measured":
        assert run["energy"] == [] and first["energy"] == []
        why = {"off": "FOREBAY_ENERGY=off", "none": "has no zones"}[how]
        assert any(why in line for line in report["absent"])
        assert "joules not measured" in done.stderr
        return
    package = {e["domain"]: e["joules"] for e in run["energy"]}["package-0"]
    # 20 batches of 2 J; readings are up to 0.1 s old, which is three batches.
    assert 20 <= package <= 40
    of_epochs = [
        {e["domain"]: e["joules"] for e in x["energy"]}["package-0"] for x in (first, second)
    ]
    assert all(4 <= joules <= 26 for joules in of_epochs)
    assert "package-0 (rapl)" in done.stderr


def test_a_node_tells_joules_where_they_are_measured_only(tmp_path, machine):
    root, add = machine("intel-two-sockets")
    bucket = tmp_path / "data"
    bucket.mkdir()
    (bucket / "x").write_bytes(b"x")

    def joules(sysfs: Path, **env):
        node = Node(
            "",
            [],
            tmp_path / sysfs.name,
            options=["--origin", f"file://{bucket}"],
            env={"FOREBAY__ENERGY__SYSFS": str(sysfs), "FOREBAY__ENERGY__NVML": "off", **env},
        )
        try:
            add("intel-rapl:0", 7)
            found = {k: v for k, v in node.metrics().items() if "energy_joules" in k}
        finally:
            node.stop()
        return found

    found = joules(root)
    key = 'forebay_energy_joules_total{source="rapl",domain="package-0",estimate=""}'
    assert found[key] == pytest.approx(7) and len(found) == 5
    assert joules(RECORDED / "virtual-machine") == {}
    (only,) = joules(RECORDED / "amd", FOREBAY__ENERGY__MODEL="cpu-watts=10").keys() - {
        f'forebay_energy_joules_total{{source="{s}",domain="{d}",estimate=""}}'
        for s, d in (
            ("rapl", "package-0"),
            ("rapl", "core-0"),
            ("hwmon", "gpu-amd-0"),
            ("hwmon", "amd_energy:Esocket0"),
        )
    }
    assert only.endswith('domain="cpu",estimate="true"}')


FORKED = """
import multiprocessing, os, sys, time, forebay
from forebay import energy
url, root = sys.argv[1:]
energy.watch()
monitor = energy.Monitor(sysfs=root, nvml="", interval=0.01)
assert energy._shared.sensors() and monitor.joules() is not None
ds = forebay.open("tables/a/*.parquet", url=url)

def child():
    try:
        monitor.joules()
    except forebay.InvalidRequest as e:
        assert "forked" in str(e)
    else:
        raise SystemExit("a monitor of the parent answered")
    monitor._monitor.close()
    loader = ds.loader(batch_size=10)
    assert len(list(loader)) == 10
    assert loader.report(order=False).json()["run"]["energy"]

for _ in range(10):
    one = multiprocessing.get_context("fork").Process(target=child)
    one.start()
    one.join(30)
    assert one.exitcode == 0, one.exitcode
assert monitor.joules() is not None
"""


def test_a_forked_child_does_not_touch_its_parents_monitor(tables, machine):
    root, _ = machine("amd")
    env = {"FOREBAY_SYSFS": str(root), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", FORKED, tables.url, str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
