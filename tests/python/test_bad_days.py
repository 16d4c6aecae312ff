"""Datasets and jobs on bad days: files without rows, fewer rows than ranks, states from elsewhere,
and jobs that are killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import forebay
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tables

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
ROWS = tables.A_ROWS


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


@pytest.fixture
def folder(tables, request):
    """A directory of this test in the bucket, and its pattern."""
    name = request.node.name.split("[")[0]
    path = tables.directory.parent / "tables" / name
    path.mkdir()
    return path, f"tables/{name}"


def ids(loader) -> list[int]:
    return [int(i) for batch in loader for i in batch["id"]]


@pytest.mark.parametrize("shuffle", ["none", "window:8", "block:3", "full"])
def test_files_and_row_groups_without_rows_take_no_part(tables, folder, shuffle):
    path, name = folder
    schema = pa.schema([("id", pa.int64())])
    groups = {"a": [3, 0, 4], "b": [], "c": [0], "d": [0, 0, 5, 0], "e": [1]}
    at = 0
    for file, sizes in groups.items():
        with pq.ParquetWriter(path / f"{file}.parquet", schema) as writer:
            for rows in sizes:
                writer.write_table(
                    pa.table({"id": pa.array(range(at, at + rows), pa.int64())}, schema),
                    row_group_size=max(rows, 1),
                )
                at += rows
    ds = forebay.open(f"{name}/*.parquet", url=tables.url)
    try:
        assert len(ds) == at == 13
        for stream in (False, True):
            got = ids(
                ds.loader(
                    batch_size=4,
                    shuffle=shuffle,
                    seed=3,
                    output="numpy",
                    uneven="pad",
                    stream=stream,
                )
            )
            assert set(got) == set(range(at)) and len(got) == 16
        assert [r["id"] for r in ds.take([12, 3, 2, 7])] == [12, 3, 2, 7]
    finally:
        for file in groups:
            (path / f"{file}.parquet").unlink()
        path.rmdir()


def test_a_dataset_without_any_row_is_told_when_it_is_to_be_read(tables, folder):
    path, name = folder
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), path / "none.parquet")
    try:
        ds = forebay.open(f"{name}/*.parquet", url=tables.url)
        assert len(ds) == 0 and len(ds.take([])) == 0
        with pytest.raises(IndexError):
            ds.take([0])
        with pytest.raises(IndexError):
            ds[0]
        for uneven in ("drop", "pad", "repeat"):
            with pytest.raises(forebay.InvalidRequest, match=r"rows"):
                next(iter(ds.loader(batch_size=2, uneven=uneven)))
    finally:
        (path / "none.parquet").unlink()
        path.rmdir()


@pytest.mark.parametrize("stream", [False, True])
def test_fewer_rows_than_ranks(tables, folder, stream):
    path, name = folder
    pq.write_table(pa.table({"id": range(3)}), path / "few.parquet")
    try:
        ds = forebay.open(f"{name}/*.parquet", url=tables.url)
        options = {
            "batch_size": 1,
            "shuffle": "full",
            "seed": 1,
            "output": "numpy",
            "world_size": 8,
            "stream": stream,
        }
        with pytest.raises(forebay.InvalidRequest, match="uneven="):
            list(ds.loader(rank=0, **options))
        for uneven in ("pad", "repeat"):
            ranks = [list(ds.loader(rank=rank, uneven=uneven, **options)) for rank in range(8)]
            assert [len(batches) for batches in ranks] == [1] * 8, "all ranks have as many steps"
            assert {int(batches[0]["id"][0]) for batches in ranks} == {0, 1, 2}
    finally:
        (path / "few.parquet").unlink()
        path.rmdir()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("seed", 2, "seed"),
        ("data", "0123456789abcdef", "dataset"),
        ("algorithm", 99, "release"),
        ("version", 99, "release"),
        ("plan", "0123456789abcdef", "plan"),
        ("position", ROWS + 1, "an epoch has 103 rows"),
        ("epoch", 1 << 60, "epoch"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_state_says_what_is_foreign_in_it(ds, field, value, words, stream):
    options = {"batch_size": 10, "shuffle": "full", "seed": 1, "stream": stream}
    state = ds.loader(**options).state_dict()
    text = json.dumps(state)
    assert f'"{field}"' in text
    foreign = json.loads(
        text, object_hook=lambda found: {**found, field: value} if field in found else found
    )
    with pytest.raises(forebay.InvalidRequest, match=f"(?i){words}"):
        ds.loader(**options).load_state_dict(foreign)


JOB = """
import json, math, os, sys, time
import forebay
url, kept, stream, batches = sys.argv[1], sys.argv[2], sys.argv[3] == "stream", int(sys.argv[4])
loader = forebay.open("tables/a/*.parquet", url=url).loader(
    batch_size=4, shuffle="full", seed=8, output="numpy", epochs=math.inf, stream=stream, threads=2)
done = json.load(open(kept)) if os.path.exists(kept) else {"state": None, "ids": []}
if done["state"]:
    loader.load_state_dict(done["state"])
for batch in loader:
    done["ids"] += batch["id"].tolist()
    done["state"] = loader.state_dict()
    with open(kept + ".new", "w") as out:
        json.dump(done, out)
    os.replace(kept + ".new", kept)
    if len(done["ids"]) >= 4 * batches:
        break
    time.sleep(0.002)
"""


@pytest.mark.parametrize("way", ["stream", "pull"])
def test_a_job_that_is_killed_anywhere_goes_on_from_its_last_state(tables, ds, tmp_path, way):
    """SIGKILL, again and again, in the middle of epochs. Each state was saved together with what
    had been trained on.
    """
    print(f"FOREBAY_TEST_SEED={SEED}")
    luck, kept, batches, kills = random.Random(SEED), tmp_path / "kept.json", 150, 0
    while True:
        job = subprocess.Popen(
            [sys.executable, "-c", JOB, tables.url, str(kept), way, str(batches)]
        )
        try:
            # Not before it has got further than the previous job.
            before = kept.stat().st_mtime_ns if kept.exists() else 0
            until = time.monotonic() + 60
            while job.poll() is None and not (kept.exists() and kept.stat().st_mtime_ns > before):
                assert time.monotonic() < until, "the job trains"
                time.sleep(0.002)
            job.wait(luck.uniform(0, 0.12) if kills < 5 else 60)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGKILL)
            kills += 1
        job.wait()
        assert job.returncode in (0, -signal.SIGKILL)
        if job.returncode == 0:
            break
    assert kills > 0
    got = json.loads(kept.read_text())["ids"]
    truth = ds.loader(batch_size=4, shuffle="full", seed=8, output="numpy", epochs=1 << 20)
    assert got == [
        int(i) for _, batch in zip(range(batches), truth, strict=False) for i in batch["id"]
    ]
    del truth
    until = time.monotonic() + 20
    while tables.metrics()["forebay_streams_open"]:
        assert time.monotonic() < until, "connections of killed jobs are gone"
        time.sleep(0.05)
