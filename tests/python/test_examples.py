"""examples/: each program runs as it stands, against a node with the data of the quick starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forebay
import pytest
from test_documents import far  # noqa: F401 - a fixture

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
#: How to start each one, and what it prints.
PROGRAMS = {
    "pytorch_ddp.py": (TORCHRUN, r"epoch 1: 3 steps on 2 ranks, loss \d"),
    "lightning_fit.py": ([], r"12 steps in 2 epochs"),
    "hf_trainer.py": ([], r"20 steps, loss \d"),
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
#: What a slow suite runs, because its libraries exclude those of the other tests.
SLOW = {"nemo_lhotse.py": "test_nemo.py"}


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


def test_the_notebook_runs_from_top_to_bottom(far, tmp_path):  # noqa: F811
    cells = json.loads((EXAMPLES / "look_around.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    done = run(["-c", "\n".join(code)], far, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("samples") >= 2, done.stdout


def test_every_example_is_tested_and_in_the_table():
    programs = {f.name for f in EXAMPLES.glob("*.py")}
    assert programs == {*PROGRAMS, *SLOW}
    for name, suite in SLOW.items():
        assert name in (EXAMPLES.parent / "tests" / "slow" / suite).read_text()
    table = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in table for name in [*programs, "look_around.ipynb"])
