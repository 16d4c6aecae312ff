"""The scripts of benchmarks/, each with as little to do as possible: it ends well, prints its
table, and writes rows that make sense.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import forebay_program

FOLDER = Path(__file__).parents[2] / "benchmarks"
ARGUMENTS = {
    "client": "--sizes 10240 --batch 16 --total-mib 1 --seconds 0.1 --readers NumPy boto3 aistore",
    "train": (
        "--workers 2 --batch 4 --batches 1 --epochs 2 --origin-ms 20 --step-ms 1 --shards 1"
        " --entitled 24 --entitled-batch 8 --seconds 0.1 --direct boto3"
    ),
    "data_decoding": "--rows 100 --seconds 0.01",
    "data_writing": "--rows 60 --size 20000 --shard-mib 1 --writers 2 --rounds 1",
    "tail": "--batch 8 --batches 4 --sequential 1 --size 1000 --median-ms 2",
    "cluster": (
        "--objects 64 --batches 24 --object 16777216 --clients 6 --etcd-away 0.5 --largest 3"
    ),
}


def run(name: str, arguments: str, path: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "FOREBAY_BIN": forebay_program()}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments.split(), "--save", str(path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of each script, after a look at what it printed."""
    found = {}
    for name, arguments in ARGUMENTS.items():
        path = tmp_path_factory.mktemp("bench") / f"{name}.json"
        done = run(name, arguments, path)
        assert done.returncode == 0, done.stderr
        report = json.loads(path.read_text())
        assert report["rows"] and all(row["name"] in done.stdout for row in report["rows"])
        assert ("goals met" in done.stdout) == any("goals" in row for row in report["rows"])
        found[name] = {(row["name"], row.get("workers")): row for row in report["rows"]}
    return found


def test_decoding(rows):
    found = rows["data_decoding"]
    assert len(found) == 8
    for (name, _), row in found.items():
        assert row["decode_ms"] > 0 and row["send_stored_ms"] > 0
        assert row["nodes"] == pytest.approx(row["decoded_mib"] / row["stored_mib"])
        assert name.startswith("images") or row["nodes"] > 1


def test_writing(rows):
    found = {name: row for (name, _), row in rows["data_writing"].items()}
    assert len(found) == 6
    copy = found["copy of ready bytes"]
    for name, row in found.items():
        assert row["rows_per_s"] == pytest.approx(60 / row["seconds"])
        assert row["mb_per_s"] == pytest.approx(row["rows_per_s"] * 0.02)
        assert row["of_copy"] == pytest.approx(copy["seconds"] / row["seconds"] * 100)
        # Only ShardWriter keeps shards in files.
        assert (row["disk_mib"] > 0.9) == name.startswith("ShardWriter")
        assert row["memory_mib"] >= 0


def test_client(rows):
    names = {name for name, _ in rows["client"]}
    assert (
        len(names) == 4
        and "forebay, NumPy views, TCP" in names
        and "aistore client, batch" in names
    )
    for row in rows["client"].values():
        assert row["entries"] >= 16 and row["entries_per_s"] == pytest.approx(
            row["entries"] / row["seconds"]
        )
        # Python and NumPy alone take more than 10 MiB, and no client needs a gibibyte for 16 × 10
        # KiB.
        assert 10 < row["client_peak_mib"] < 4096 and row["client_cpu_us"] >= 0
    assert rows["client"]["forebay, NumPy views, TCP", None]["goals"] == [
        {"figure": "entries_per_s", "at_least": 50_000.0}
    ]


def test_train(rows):
    direct, cold, warm = (
        rows["train"][name, 2]
        for name in ("direct, boto3", "forebay, first epoch, cold", "forebay, warm epoch")
    )
    # 16 samples, eight GETs of 20 ms one after the other in each of two workers; at best 16 ms of
    # step.
    assert direct["samples"] == cold["samples"] == warm["samples"] == 16
    assert direct["epoch_s"] > 0.16 and warm["epoch_s"] > 0.016 and cold["epoch_s"] > 0.036
    assert (
        warm["times_direct"] == pytest.approx(direct["epoch_s"] / warm["epoch_s"])
        and warm["times_direct"] > 1
    )
    assert [g["figure"] for g in warm["goals"]] == ["times_direct", "busy"]
    loaders = ("one process", "DataLoader, 2 workers", "PyTorch's DataLoader, 2 workers")
    entitled = [name for name, workers in rows["train"] if workers is None]
    assert entitled == [f"{what}, {how}" for what in ("objects", "1 MB shards") for how in loaders]


def test_tail(rows):
    row = {name: row for (name, _), row in rows["tail"].items()}
    assert len(row) == 9 and "forebay cold, GetBatch, hedged (5 %)" in row
    for one in row.values():
        assert (
            0 < one["object_p50_ms"] <= one["object_p95_ms"] <= one["object_p99_ms"]
            and one["batch_p50_ms"] <= one["batch_p99_ms"]
        )
    # Eight waits of 2 ms, more or less, one after the other; none of them from a warm cache, for
    # which nothing is as slow as an origin.
    assert row["origin, one GET at a time"]["batch_p50_ms"] > 4
    assert row["forebay cold, GetBatch"]["object_p50_ms"] == pytest.approx(
        row["forebay cold, GetBatch"]["batch_p50_ms"] / 8, rel=1
    )


def test_a_figure_below_its_goal_is_told():
    done = subprocess.run(
        [sys.executable, "-c", MISSED], cwd=FOLDER, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert (
        "goal 100.0: missed by 25.0 %" in done.stdout
        and "goal 50.0: met, 50.0 % above" in done.stdout
        and "1 of 2 goals met" in done.stdout
    )


MISSED = """
from report import Report, goal
report = Report("t", [("name", "", 10), ("speed", "speed", 10)], {})
report.add({"name": "a", "speed": 75.0, "goals": [goal("speed", 100.0), goal("speed", 50.0)]})
report.save(None)
"""


def test_cluster(rows):
    """Whatever happens to the nodes, no batch is wrong and none fails; each byte leaves the bucket
    once.
    """
    found = [row for (name, _), row in rows["cluster"].items() if name.endswith(" batches")]
    assert len(found) == 13 and all(row["value"] == 0 for row in found)
    by_name = {name: row for (name, _), row in rows["cluster"].items()}
    assert by_name["mirror 2: read again from the bucket"]["value"] <= 0.1
    assert by_name["clients that got all of it"]["value"] == 6
    assert 1.0 <= by_name["the bucket sent, of the object"]["value"] < 1.01
    assert by_name["placement changed"]["value"] == 0
