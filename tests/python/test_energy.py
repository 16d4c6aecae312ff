"""Joules: over recorded trees of sysfs, in the client and as a node's metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import forebay
import pytest
import tables as made
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
        assert ",rank=3," in monitor.line_protocol(tags={"rank": 3})
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


#: Prometheus' text format: labels' values escape backslash, quote and line break.
SAMPLE = re.compile(
    r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (?P<value>\S+)\Z'
)


def test_a_monitor_writes_the_metric_that_a_node_has(machine, tmp_path):
    root, add = machine("intel-two-sockets")
    path = tmp_path / "energy.prom"
    path.write_text("what was there before\n")
    with energy.Monitor(sysfs=root, nvml="", interval=3600) as monitor:
        add("intel-rapl:0", 7)
        text = monitor.prometheus(path, labels={"job": 'a "b"\\\n'})
        assert path.read_text() == text and list(tmp_path.glob("*.part")) == []
        help_, kind, *samples = text.splitlines()
        assert help_.startswith("# HELP forebay_energy_joules_total ")
        assert kind == "# TYPE forebay_energy_joules_total counter"
        found = {}
        for line in samples:
            match = SAMPLE.match(line)
            assert match is not None and match["name"] == "forebay_energy_joules_total", line
            assert match["labels"].endswith(r',job="a \"b\"\\\n"'), line
            found[match["labels"].partition(",job=")[0]] = float(match["value"])
        assert found['source="rapl",domain="package-0",estimate=""'] == pytest.approx(7)
        assert len(found) == 5
        for wrong in ("source", "estimate", "a-b", "1a", "", "__a", "ä"):
            with pytest.raises(forebay.InvalidRequest, match="label"):
                monitor.prometheus(labels={wrong: "x"})
    # What was measured can be told afterwards too.
    assert 'domain="package-0",estimate=""} 7.0' in monitor.prometheus()
    with energy.Monitor(sysfs=RECORDED / "virtual-machine", nvml="") as none:
        assert none.prometheus().count("\n") == 2
    with energy.Monitor(
        sysfs=RECORDED / "virtual-machine", nvml="", model="cpu-watts=20"
    ) as monitor:
        assert 'domain="cpu",estimate="true"} ' in monitor.prometheus()


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


def test_a_loader_estimates_where_it_is_asked_to(tables, machine):
    import json

    root, _ = machine("intel-psys")
    env = {"FOREBAY_SYSFS": str(RECORDED / "virtual-machine"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LOOP, tables.url, str(root)]
    env["FOREBAY_ENERGY"] = "cpu-watts=15"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [told] = json.loads(done.stdout)["run"]["energy"]
    assert told["source"] == "cpu-watts=15" and told["estimate"] and 0 < told["joules"] < 150
    assert "(an ESTIMATE)" in done.stderr and "whole machine" not in done.stderr
    assert "joules are an estimate from its CPU time" in done.stderr
    env["FOREBAY_ENERGY"] = "lots"
    failed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert failed.returncode != 0
    assert 'FOREBAY_ENERGY: "lots" is not a model of energy' in failed.stderr


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
    # 20 batches of 2 J; readings are 0.1 s old (three batches), and older on a busy machine.
    assert 10 <= package <= 40 + 1e-6
    of_epochs = [
        {e["domain"]: e["joules"] for e in x["energy"]}["package-0"] for x in (first, second)
    ]
    assert all(joules > 0 for joules in of_epochs) and sum(of_epochs) == pytest.approx(package)
    assert "package-0 (rapl)" in done.stderr


def test_a_loader_tells_what_was_not_measured_next_to_what_was(tables, machine, monkeypatch):
    root, _ = machine("intel-two-sockets")
    zones = root / "class/powercap"
    monkeypatch.setenv("FOREBAY_SYSFS", str(root))
    ds = forebay.open("tables/a/*.parquet", url=tables.url)

    def told(wrap: str | None = None) -> tuple[str, list[str]]:
        """What the joules of a loop are of, and what is absent."""
        # As in another process.
        monkeypatch.setattr(energy, "_pid", 0)
        loader = ds.loader(batch_size=20)
        for n, _ in enumerate(loader):
            if n == 1 and wrap is not None:
                (zones / wrap / "energy_uj").write_text("gone\n")
            time.sleep(0.12)
        report = loader.report(order=False)
        end = report.json()["ends"][0]
        assert end["name"] == "process" and end["of"] in str(report)
        begins = "joules here: "
        absent = [why for why in report.json()["absent"] if why.startswith(begins)]
        of_cpu = [why.removeprefix(begins) for why in absent if "NVIDIA GPUs, if" not in why]
        # The other line, if there is one, says that NVIDIA's library is missing.
        assert len(absent) - len(of_cpu) <= 1
        return end["of"].partition("; ")[2], of_cpu

    assert told() == ("joules are of the whole machine", [])
    of, absent = told(wrap="intel-rapl:1")
    assert of == "joules are of all that ran on this machine, without package-1"
    [why] = absent
    assert why.startswith("rapl: package-1 went away (") and "not told any more" in why
    # One that cannot be read from the beginning, of which nobody knows what it is of.
    of, absent = told()
    assert of == "joules are of all that ran on this machine, without what cannot be read"
    [why] = absent
    assert why.startswith("rapl: cannot be used: ") and "intel-rapl:1/energy_uj" in why
    for zone in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1:0"):
        shutil.rmtree(zones / zone)
    # The board has all in it.
    of, [why] = told()
    assert of == "joules are of the whole machine" and why.startswith("rapl: ")
    shutil.rmtree(root / "class/hwmon")
    shutil.rmtree(zones / "intel-rapl:1")
    shutil.copytree(
        RECORDED / "intel-two-sockets/class/powercap/intel-rapl:0", zones / "intel-rapl:0"
    )
    assert told() == ("joules are of all that ran on this machine, without DRAM", [])
    # Where nothing is measured, nothing is said of what joules are of.
    of, absent = told(wrap="intel-rapl:0")
    assert of == "" and any(why.startswith("rapl: package-0 went away") for why in absent)
    monkeypatch.setattr(energy, "_pid", 0)


def test_what_came_later_than_a_loop_is_told_as_not_measured(monkeypatch):
    package, gpu = ("rapl", "package-0", False), ("nvml", "gpu-0", False)
    dram, model = ("rapl", "dram-0", False), ("cpu-watts=9", "cpu", True)

    class Shared:
        known, told = [package, dram, gpu], []

        def sensors(self):
            return [package, dram, gpu]

        def notes(self):
            return self.told

        def passes_over(self):
            return False

        def last(self):
            return [(source, domain, 1.0, e) for source, domain, e in self.known]

    shared = Shared()
    monkeypatch.setattr(energy, "_shared", shared)
    late = "nvml: gpu-0 was not there during the whole loop"
    assert energy.unread([package, dram]) == ([late], ["gpu-0"])
    assert energy.unread([package, dram, gpu]) == ([], [])
    # An estimate is nothing that was measured.
    assert len(energy.unread([model])[0]) == 3
    # One that went away has a note.
    shared.known, shared.told = [package, dram], ["gpu-0 went away"]
    assert energy.unread([package, dram]) == (["gpu-0 went away"], ["gpu-0"])
    shared.known, shared.told = [], []
    assert energy.unread([])[0] == ["no sensor was there during the whole loop"]
    monkeypatch.setattr(energy, "_shared", None)
    assert energy.unread([]) == (["FOREBAY_ENERGY=off"], [])


def test_a_report_tells_what_the_node_did_not_measure_next_to_what_it_did(tmp_path, machine):
    root, _ = machine("intel-two-sockets")
    (root / "class/powercap/intel-rapl:1/energy_uj").write_text("broken\n")
    made.write(tmp_path / "tables")
    node = Node(
        "",
        [],
        tmp_path / "node",
        options=["--origin", f"file://{tmp_path / 'tables'}"],
        env={"FOREBAY__ENERGY__SYSFS": str(root), "FOREBAY__ENERGY__NVML": "none.so"},
    )
    try:
        loader = forebay.open("tables/a/*.parquet", url=node.url).loader(batch_size=20)
        list(loader)
        report = loader.report(order=False).json()
    finally:
        node.stop()
    (_, end) = report["ends"]
    assert "package-0" in {e["domain"] for e in end["energy"]}
    told = [why for why in report["absent"] if why.startswith("joules of the node: ")]
    [why] = [why for why in told if "none.so" not in why]
    assert len(told) == 2
    assert "intel-rapl:1/energy_uj" in why


STAGES = """
import json, sys, threading, time, forebay
from pathlib import Path
url, root, how = sys.argv[1:]
counter = Path(root) / "class/powercap/intel-rapl:0/energy_uj"
stop = threading.Event()

def power():
    # As much in each moment: 20 W.
    began, base = time.monotonic(), int(counter.read_text())
    while not stop.wait(0.005):
        with counter.open("r+") as file:
            file.write(f"{base + int((time.monotonic() - began) * 20e6)}\\n")

thread = threading.Thread(target=power)
thread.start()

def slow(row):
    time.sleep(0.008)
    return row

ds = forebay.open("tables/a/*.parquet", url=url)
how_it_reads = {"decode": slow, "threads": 0, "prefetch": 0} if how == "waits" else {}
loader = ds.loader(batch_size=10, **how_it_reads)
for epoch in range(2):
    for batch in loader:
        time.sleep(0.09 if how == "computes" else 0.005)
stop.set()
thread.join()
report = loader.report(order=False)
assert "computing" in str(report) and "package-0" in report.html()
print(json.dumps(report.json()))
"""


@pytest.mark.parametrize("how", ["waits", "computes"])
def test_joules_of_an_epoch_are_told_by_what_the_loop_did(tables, machine, how):
    import json

    root, _ = machine("intel-psys")
    env = {"FOREBAY_SYSFS": str(root), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", STAGES, tables.url, str(root), how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for figures in (report["run"], *report["epochs"]):
        stages = {stage["stage"]: stage for stage in figures["stages"]}
        assert list(stages) == ["waiting", "computing"]
        assert stages["waiting"]["seconds"] == pytest.approx(figures["waited_s"])
        assert stages["computing"]["seconds"] == pytest.approx(figures["compute_s"])
        # The stages add up, sensor by sensor, each with its source.
        for e in figures["energy"]:
            parts = [
                part["joules"]
                for stage in stages.values()
                for part in stage["energy"]
                if (part["source"], part["domain"]) == (e["source"], e["domain"])
            ]
            assert len(parts) == 2 and sum(parts) == pytest.approx(e["joules"])
        cpu = sum(stage["cpu_seconds"] for stage in stages.values())
        assert cpu == pytest.approx(figures["cpu_seconds"])
        # The power is always the same, so the joules are as the times are.
        joules = {
            name: next(e["joules"] for e in stage["energy"] if e["domain"] == "package-0")
            for name, stage in stages.items()
        }
        share = joules["waiting"] / sum(joules.values())
        by_time = figures["waited_s"] / (figures["waited_s"] + figures["compute_s"])
        assert share == pytest.approx(by_time, abs=0.25)
        assert share > 0.6 if how == "waits" else share < 0.4


def influx(node: Node, query: str = "") -> str:
    url = node.metrics_url.removesuffix("/metrics") + "/energy.influx" + query
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def test_a_node_tells_its_samples_in_the_line_protocol(tmp_path, machine):
    root, add = machine("intel-two-sockets")
    bucket = tmp_path / "data"
    bucket.mkdir()

    def node(name: str, sysfs: Path, **env: str) -> Node:
        return Node(
            "",
            [],
            tmp_path / f"node-{name}",
            options=["--origin", f"file://{bucket}"],
            env={"FOREBAY__ENERGY__SYSFS": str(sysfs), "FOREBAY__ENERGY__NVML": "off", **env},
        )

    measures = node("measures", root)
    try:
        add("intel-rapl:0", 7)
        deadline = time.monotonic() + 20
        while "domain=package-0 joules=7" not in (told := influx(measures)):
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
        lines = told.splitlines()
        now = time.time_ns()
        for line in lines:
            assert LINE.match(line), line
            assert LINE.match(line)["measurement"] == "forebay_energy"
            assert ",host=" in line and ",node=" in line and ",source=" in line
            assert abs(int(line.rsplit(" ", 1)[1]) - now) < 120e9
        assert {re.search("domain=([^ ,]+)", line)[1] for line in lines} == {
            "package-0",
            "dram-0",
            "package-1",
            "dram-1",
            "board",
        }
        # The counter is the one of the metric.
        key = 'forebay_energy_joules_total{source="rapl",domain="package-0",estimate=""}'
        assert measures.metrics()[key] == pytest.approx(7)
        time.sleep(1.2)
        assert len(influx(measures, "?seconds=1").splitlines()) < len(
            influx(measures, "?seconds=600").splitlines()
        )
        for wrong in ("?seconds=0", "?seconds=601", "?since=1"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                influx(measures, wrong)
            assert refused.value.code == 400
    finally:
        measures.stop()
    # Where nothing is measured, comments say why, and no line has a number.
    for name, sysfs, env in (
        ("none", RECORDED / "virtual-machine", {}),
        ("off", root, {"FOREBAY__ENERGY__SAMPLE": "false"}),
    ):
        other = node(name, sysfs, **env)
        try:
            told = influx(other)
        finally:
            other.stop()
        assert told and all(line.startswith("# ") for line in told.splitlines()), told


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


# A BMC behind the kernel's interface, by the kernel's own header: `/dev/ipmi0` for the program that
# preloads it. $FAKE_BMC holds the bytes of its answer, or `silent`. An event, and an answer to a
# question that nobody asked, come before the first one.
FAKE_BMC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <linux/ipmi.h>
static int fd = -1, stale;
static long id;
static int opened(void) { stale = 2; return fd = eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK); }
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    unsigned mode = va_arg(more, unsigned);
    va_end(more);
    if (!strcmp(path, "/dev/ipmi0")) return opened();
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}
static int bytes(unsigned char *to, int most) {
    FILE *f = fopen(getenv("FAKE_BMC"), "r");
    unsigned byte;
    int n = 0;
    while (f && n < most && fscanf(f, "%x", &byte) == 1) to[n++] = byte;
    if (f) fclose(f);
    return n;
}
static int put(void) { unsigned long long one = 1; return write(fd, &one, 8) == 8; }
int ioctl(int of, unsigned long request, ...) {
    va_list more;
    va_start(more, request);
    void *argument = va_arg(more, void *);
    va_end(more);
    if (of != fd || fd < 0)
        return ((int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl"))(of, request, argument);
    if (request == IPMICTL_SEND_COMMAND) {
        struct ipmi_req *q = argument;
        struct ipmi_system_interface_addr *to = (void *)q->addr;
        unsigned char said[64];
        int right = q->addr_len == sizeof *to && to->addr_type == IPMI_SYSTEM_INTERFACE_ADDR_TYPE
            && to->channel == IPMI_BMC_CHANNEL && !to->lun && q->msg.netfn == 0x2c
            && q->msg.cmd == 2 && q->msg.data_len == 4 && !memcmp(q->msg.data, "\xdc\1\0\0", 4);
        if (!right) return errno = EINVAL, -1;
        id = q->msgid;
        for (int i = 0; i < stale; i++) put();
        if (bytes(said, sizeof said)) put();
        return 0;
    }
    if (request == IPMICTL_RECEIVE_MSG_TRUNC) {
        struct ipmi_recv *r = argument;
        unsigned long long one;
        if (read(fd, &one, 8) != 8) return -1;
        if (r->addr_len < sizeof(struct ipmi_addr)) return errno = EINVAL, -1;
        memset(r->addr, 0, sizeof(struct ipmi_addr));
        r->recv_type = stale == 2 ? IPMI_ASYNC_EVENT_RECV_TYPE : IPMI_RESPONSE_RECV_TYPE;
        r->msgid = stale == 1 ? id - 1 : id;
        r->msg.netfn = 0x2d;
        r->msg.cmd = 2;
        r->msg.data_len = bytes(r->msg.data, r->msg.data_len);
        if (stale) r->msg.data[2] = 0x01, stale--;
        return 0;
    }
    return errno = ENOTTY, -1;
}
"""

# What OpenBMC answers: 213 W, behind the completion code.
WATTS_213 = "00 dc d5 00 d5 00 d5 00 d5 00 00 00 00 00 00 00 00 00 00"

MEASURED = """
import json, os, pathlib, sys, time
from forebay import energy
root, state, then = sys.argv[1:]
with energy.Monitor(sysfs=root, nvml="") as monitor:
    ends = time.monotonic() + 30
    last = ("went away", "not asked any more", "cannot be opened")
    told = lambda: any(words in note for note in monitor.notes for words in last)
    while not (monitor.figures() or told()) and time.monotonic() < ends:
        time.sleep(0.05)
    with monitor.span("a while"):
        time.sleep(1.5)
    pathlib.Path(state).write_text(then)
    while then and not told() and time.monotonic() < ends:
        time.sleep(0.05)
    print(json.dumps(monitor.report().to_dict()))
"""


@pytest.fixture
def bmc(tmp_path, machine):
    """A machine with a BMC: its sysfs, the environment of its programs, and what the BMC says."""
    root, _ = machine("virtual-machine")
    (root / "class/ipmi/ipmi0").mkdir(parents=True)
    source, library, state = (tmp_path / n for n in ("bmc.c", "libbmc.so", "state"))
    source.write_text(FAKE_BMC)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    state.write_text(WATTS_213)
    return root, {"LD_PRELOAD": str(library), "FAKE_BMC": str(state)}, state


def measured(bmc, then: str = "") -> dict:
    root, env, state = bmc
    command = [sys.executable, "-c", MEASURED, str(root), str(state), then]
    env = {"PATH": "/usr/bin:/bin", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_board_is_measured_by_its_bmc(bmc):
    report = measured(bmc)
    (span,) = report["spans"]
    (board,) = span["figures"]
    assert (board["source"], board["domain"]) == ("ipmi", "board")
    assert board["joules"] == pytest.approx(213 * span["seconds"], rel=0.1)
    assert not any("ipmi: board" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("then", "why"),
    [("silent", "has not said watts for 10 s"), ("00 dc 00 00", "is not asked any more")],
)
def test_a_bmc_that_stops_measuring_is_told(bmc, then, why):
    report = measured(bmc, then)
    assert [f["domain"] for f in report["spans"][0]["figures"]] == ["board"]
    assert report["whole"]["figures"] == []
    assert any(f"ipmi: board went away (the BMC {why})" in note for note in report["notes"])


def test_a_bmc_without_a_meter_is_one_line(bmc):
    _, _, state = bmc
    state.write_text("c1")
    report = measured(bmc)
    assert report["whole"]["figures"] == []
    (note,) = [note for note in report["notes"] if note.startswith("ipmi:")]
    assert "does not know DCMI" in note and "not asked any more" in note


def test_a_bmc_that_cannot_be_opened_is_one_line(bmc):
    root, _, _ = bmc
    (root / "class/ipmi/ipmi0").rename(root / "class/ipmi/ipmi-of-nobody")
    report = measured(bmc)
    (note,) = [note for note in report["notes"] if note.startswith("ipmi:")]
    assert "/dev/ipmi-of-nobody cannot be opened (No such file" in note
    assert "the board is not measured" in note


def test_a_bmc_is_not_asked_where_hwmon_has_the_board(bmc, machine):
    _, env, state = bmc
    root, _ = machine("intel-two-sockets")
    (root / "class/ipmi/ipmi0").mkdir(parents=True)
    report = measured((root, env, state))
    (board,) = [f for f in report["whole"]["figures"] if f["domain"] == "board"]
    assert board["source"] == "hwmon"


BOARD_LOOP = """
import json, sys, time, forebay
loader = forebay.open("tables/a/*.parquet", url=sys.argv[1]).loader(batch_size=10)
for batch in loader:
    time.sleep(0.6)
print(json.dumps(loader.report(order=False).json()["run"]))
"""


def test_a_loader_measures_the_board_from_its_first_batch_on(tables, bmc):
    root, env, _ = bmc
    env = {"FOREBAY_SYSFS": str(root), "PATH": "/usr/bin:/bin", **env}
    command = [sys.executable, "-c", BOARD_LOOP, tables.url]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (board,) = json.loads(done.stdout)["energy"]
    assert (board["source"], board["domain"]) == ("ipmi", "board")
    # Ten batches of 0.6 s; the first and the last sample are 0.1 s from the ends of the loop, and
    # further on a busy machine.
    assert board["joules"] > 3.3 * 213


def test_a_node_measures_its_board(bmc, tmp_path):
    root, env, _ = bmc
    bucket = tmp_path / "data"
    bucket.mkdir()
    node = Node(
        "",
        [],
        tmp_path / "node",
        options=["--origin", f"file://{bucket}"],
        env={"FOREBAY__ENERGY__SYSFS": str(root), "FOREBAY__ENERGY__NVML": "off", **env},
    )
    key = 'forebay_energy_joules_total{source="ipmi",domain="board",estimate=""}'
    try:
        ends = time.monotonic() + 20
        while node.metrics().get(key, 0) < 100:
            assert time.monotonic() < ends, node.metrics()
            time.sleep(0.1)
    finally:
        node.stop()


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
