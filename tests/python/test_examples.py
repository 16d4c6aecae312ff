"""examples/: each program runs as it stands, against a node with the data of the quick starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import beside
import forebay
import pytest
import two_processes
from test_documents import far  # noqa: F401 - a fixture
from two_processes import TORCHRUN

EXAMPLES = Path(__file__).parents[2] / "examples"
#: How to start each one, and what it prints.
PROGRAMS = {
    "pytorch_ddp.py": (TORCHRUN, r"epoch 1: 3 steps on 2 ranks, loss \d"),
    "lightning_fit.py": ([], r"12 steps in 2 epochs"),
    "jax_train.py": ([], r"epoch 1: loss \d"),
    "webdataset_dropin.py": ([], r"96 samples .* 96 .*\nthe same samples"),
    "aistore_client.py": ([], r"images/001.tar 000001.jpg \d+"),
    "boto3_client.py": ([], r"images/003.tar: \d+ bytes, HIT"),
    "fsdp2.py": (TORCHRUN, r"steps 1 to 20 on 2 ranks, loss \d"),
    "torchtitan_loading.py": (
        TORCHRUN,
        r"\(4, 128\) labels on each of 2 ranks\nthe next batch is the same",
    ),
    "accelerate_train.py": (TORCHRUN, r"epoch 1: 3 steps on 2 ranks, loss \d"),
    "dali_pipeline.py": ([], r"6 batches, 96 labels, then epoch 1"),
    "ray_train.py": ([], r"epoch 1: 3 steps on 2 workers, loss \d"),
    "grain_jax.py": (
        [],
        r"a data source: True\n12 steps, loss \d.*\nresumed with the same batch",
    ),
    "keras_fit.py": ([], r"4 steps in each of 2 epochs with jax, loss \d"),
    "lhotse_cuts.py": ([], r"32 cuts, \d+\.\d s of audio"),
}
#: What runs on two processes alone, in a test of its own below.
ON_TWO = {"hf_trainer.py", "nemo_lhotse.py"}


def run(arguments, far, tmp_path):  # noqa: F811
    env = {**os.environ, "FOREBAY_NODE": far.url, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs(far, tmp_path, name):  # noqa: F811
    launcher, expected = PROGRAMS[name]
    done = run([*launcher, str(EXAMPLES / name)], far, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(expected, done.stdout), done.stdout


#: Imports an example, and writes which rows its model is given on this rank: a line for each call,
#: pictures by their checksums, texts by their numbers.
SEEN = """
import importlib, json, os, sys, zlib
def see(rows, epoch=None):
    with open(f"seen-{os.environ[RANK]}", "a") as out:
        print(json.dumps([epoch, rows]), file=out)
def picture(array):
    return zlib.crc32((array * (1 if array.dtype == "uint8" else 255)).round().tobytes())
sys.path.insert(0, EXAMPLES)
example = importlib.import_module(NAME)
"""
LIGHTNING = """
step = example.Classifier.training_step
def training_step(self, batch, number):
    see([picture(image.cpu().numpy()) for image in batch[0]])
    return step(self, batch, number)
example.Classifier.training_step = training_step
"""
TRAINER = """
step = example.PlannedTrainer.training_step
def training_step(self, model, inputs, *rest, **more):
    see([int(bytes(ids.tolist()).split(b" ")[2]) for ids in inputs["input_ids"]])
    return step(self, model, inputs, *rest, **more)
example.PlannedTrainer.training_step = training_step
"""
KERAS = """
get = example.Batches.__getitem__
def getitem(self, number):
    images, labels = get(self, number)
    if len(self.dataset) == 64:
        see([picture(image) for image in images], self.epoch)
    return images, labels
example.Batches.__getitem__ = getitem
"""


def seen_by_two(program, far, cwd, name, by, launcher=(), arguments=(), each=({},)):  # noqa: F811
    """What each of two ranks saw, as (epoch, rows), and what was printed. `by` is the variable that
    says the rank; `each` has the variables of the processes that are started here.
    """
    script = cwd / "see.py"
    given = f"EXAMPLES, NAME, RANK = {str(EXAMPLES)!r}, {name!r}, {by!r}"
    script.write_text("\n".join([given, SEEN, program, "example.main()"]))
    environment = {**os.environ, "FOREBAY_NODE": far.url, "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *launcher, str(script), *arguments],
            env={**environment, **more},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for more in each
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(printed)[-6000:]
    files = [(cwd / f"seen-{rank}").read_text().splitlines() for rank in range(2)]
    return [[json.loads(line) for line in file] for file in files], "\n".join(printed)


def test_lightning_on_two_processes(far, tmp_path):  # noqa: F811
    images = "s3://my-bucket/images/{000..003}.tar"
    given = [images, "2"]
    ranks, printed = seen_by_two(LIGHTNING, far, tmp_path, "lightning_fit", "RANK", TORCHRUN, given)
    assert printed.count("6 steps in 2 epochs") == 2, printed
    for epoch in (slice(0, 3), slice(3, 6)):
        rows = [row for calls in ranks for _, batch in calls[epoch] for row in batch]
        assert len(rows) == len(set(rows)) == 96


def test_the_trainer_on_two_processes(far, tmp_path):  # noqa: F811
    ranks, printed = seen_by_two(TRAINER, far, tmp_path, "hf_trainer", "RANK", TORCHRUN)
    assert printed.count("20 steps, loss") == 1, printed
    rows = [row for calls in ranks for _, batch in calls for row in batch]
    assert len(rows) == len(set(rows)) == 20 * 8 * 2, "less than an epoch, and none twice"


def test_keras_on_two_processes(far, tmp_path):  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jobs = {
        "KERAS_BACKEND": "jax",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{address},{address}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    }
    by = "KERAS_DISTRIBUTION_PROCESS_ID"
    ranks, printed = seen_by_two(
        KERAS, far, tmp_path, "keras_fit", by, each=[{**jobs, by: str(rank)} for rank in range(2)]
    )
    losses = re.findall(r"2 steps in each of 2 epochs with jax, loss (\S+), .* rows (\S+)", printed)
    assert len(losses) == 2 and losses[0] == losses[1], "one model: " + printed
    for epoch in range(2):
        rows = [row for calls in ranks for e, batch in calls if e == epoch for row in batch]
        assert len(rows) == len(set(rows)) == 64


def test_nemo_on_two_processes(far, tmp_path):  # noqa: F811
    library = beside.installed("nemo", beside.NEMO)
    printed = two_processes.run([EXAMPLES / "nemo_lhotse.py"], far, library, tmp_path)
    assert re.search(r"32 clips on 2 ranks, 32 different ones, \d+\.\d s of audio", printed), (
        printed
    )


def test_a_sharded_checkpoint_goes_on(far, tmp_path):  # noqa: F811
    """On one rank, after two (or a run of 20 steps by another test) had saved it."""
    program = str(EXAMPLES / "fsdp2.py")
    data = "s3://my-bucket/corpus/**.parquet"
    client = forebay.Client(far.url)
    if not client.exists("my-bucket/runs/fsdp2/last/manifest.json"):
        assert run([*TORCHRUN, program, data, "20"], far, tmp_path).returncode == 0
    alone = [*TORCHRUN[:-1], "1"]
    done = run([*alone, program, data, "24"], far, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"steps 21 to 24 on 1 ranks, loss \d", done.stdout), done.stdout
    done = run([*alone, program, data, "24"], far, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "has 24 steps already" in done.stdout, done.stdout


def test_an_example_that_is_run_again_says_where_it_goes_on(far, tmp_path):  # noqa: F811
    alone = [*TORCHRUN[:-1], "1", str(EXAMPLES / "pytorch_ddp.py")]
    for expected in ("epoch 1: ", "goes on with epoch 2 of 2"):
        done = run(alone, far, tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert expected in done.stdout, done.stdout


def test_webdatasets_example_takes_the_name_of_a_dataset(far, tmp_path):  # noqa: F811
    data = "s3://my-bucket/images/{000..001}.tar"
    done = run([str(EXAMPLES / "webdataset_dropin.py"), data], far, tmp_path)
    assert "the same samples" in done.stdout, f"{done.stdout}\n{done.stderr}"


def test_the_notebook_runs_from_top_to_bottom(far, tmp_path):  # noqa: F811
    cells = json.loads((EXAMPLES / "look_around.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    done = run(["-c", "\n".join(code)], far, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("samples") >= 2, done.stdout


def test_every_example_is_tested_and_in_the_table():
    programs = {f.name for f in EXAMPLES.glob("*.py")}
    assert programs == {*PROGRAMS, *ON_TWO}
    table = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in table for name in [*programs, "look_around.ipynb"])
