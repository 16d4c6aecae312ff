"""docs/QUICKSTART-DATASETS.md and README.md: every Python example of datasets in them runs as it is printed, in order, against a node over a directory."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from servers import Node

GUIDE = Path(__file__).parents[2] / "docs" / "QUICKSTART-DATASETS.md"
#: Sections: before the first heading of an example, and each example. The blocks of one section are one program.
SECTIONS = re.split(r"^## ", GUIDE.read_text(), flags=re.M)
EXAMPLES = {
    s.splitlines()[0]: re.findall(r"^```python\n(.*?)^```", s, re.S | re.M) for s in SECTIONS
}
EXAMPLES = {title: blocks for title, blocks in EXAMPLES.items() if blocks}
README = [
    b
    for b in re.findall(
        r"^```python\n(.*?)^```", (Path(__file__).parents[2] / "README.md").read_text(), re.S | re.M
    )
    if "forebay.open(" in b
]
IMAGES, TEXTS = 96, 1000


def jpeg(i: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 255, (40 + i % 30, 50, 3), np.uint8)
    Image.fromarray(pixels).save(out, "jpeg")
    return out.getvalue()


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    root = tmp_path_factory.mktemp("quickstart")
    bucket = root / "my-bucket"
    (bucket / "images").mkdir(parents=True)
    (bucket / "corpus" / "en").mkdir(parents=True)
    for shard in range(4):
        with tarfile.open(bucket / "images" / f"{shard:03}.tar", "w") as tar:
            for i in range(shard, IMAGES, 4):
                for name, data in ((f"{i:06}.jpg", jpeg(i)), (f"{i:06}.cls", b"%d" % (i % 10))):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    for part in range(2):
        rows = range(part, TEXTS, 2)
        table = pa.table(
            {"id": list(rows), "text": [f"text number {i} " + "word " * (i % 50) for i in rows]}
        )
        pq.write_table(table, bucket / "corpus" / "en" / f"{part}.parquet", row_group_size=50)
    node = Node("", [], root / "node", options=["--origin", f"file://{bucket}"])
    yield node
    node.stop()


def test_there_are_three_examples():
    assert len(EXAMPLES) == 4 and sum(map(len, EXAMPLES.values())) == 5


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs_as_printed(far, tmp_path, title):
    program = "\n".join(EXAMPLES[title])
    if "forebay.torch" in program:
        program = "import forebay.torch\n" + program
    env = {**os.environ, "FOREBAY_NODE": far.url}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{title}\n{done.stdout}\n{done.stderr}"
    out = done.stdout
    if title.startswith("1."):
        assert (
            re.search(r"epoch 1: loss \d", out)
            and "192 samples in 12 batches" in out
            and (tmp_path / "checkpoint.pt").exists()
        )
    elif title.startswith("2."):
        assert f"{TEXTS - TEXTS % 32} rows of {TEXTS}" in out and "'position': 320" in out
    elif title.startswith("3."):
        assert f"{TEXTS - TEXTS % 32:,} samples in {TEXTS // 32} batches" in out
    else:
        assert f"{TEXTS:,} rows" in out and "text number" in out


@pytest.mark.parametrize(
    ("program", "said"),
    list(
        zip(
            README,
            [
                r"torch.Size\(\[16, 64, 64, 3\]\) torch.Size\(\[16\]\)",
                rf"{TEXTS} text number",
                rf"{TEXTS - TEXTS % 32:,} samples",
            ],
            strict=True,
        )
    ),
    ids=["images", "text", "stream"],
)
def test_the_readme_runs_as_printed(far, tmp_path, program, said):
    env = {**os.environ, "FOREBAY_NODE": far.url}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(said, done.stdout), done.stdout
