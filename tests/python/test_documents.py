"""Every code block of every document runs as printed, by itself, against a node over a directory;
those of the page about clusters against a node of a cluster.

A block is Python (```` ```python ````) or shell (```` ```sh ````). A comment in the line before it
may say more of it:

    <!-- block: says REGEX -->          what it prints matches that
    <!-- block: shown, WHY -->          it is not run, and why not, or where else it is
    <!-- block: file NAME, says … -->   it is a file, which later blocks of the document find too

Only the address is another one: each block runs with ``FOREBAY_NODE``, and
``http://127.0.0.1:8080`` in it is the node's.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import wave
from dataclasses import dataclass
from pathlib import Path

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import Cluster
from PIL import Image
from servers import Etcd, Node, forebay_program

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "examples" / "README.md",
        ROOT / "python" / "README.md",
    ]
    if "```" in path.read_text()
]
IMAGES, TEXTS, CLIPS = 96, 1000, 32


@dataclass
class Block:
    document: str
    line: int
    language: str
    about: str
    code: str

    @property
    def says(self) -> str | None:
        match = re.fullmatch(r"(?:file \S+, )?says (.+)", self.about)
        return match[1] if match else None

    @property
    def file(self) -> str | None:
        match = re.fullmatch(r"file ([\w.]+)(?:, .+)?", self.about)
        return match[1] if match else None

    @property
    def id(self) -> str:
        return f"{self.document}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        pattern = r"(?:^<!-- block: (?P<about>.+?) -->\n)?^```(?P<language>\S*)\n(?P<code>.*?)^```$"
        for m in re.finditer(pattern, text, re.S | re.M):
            line = text.count("\n", 0, m.start("code")) + 1
            name = str(path.relative_to(ROOT))
            found.append(Block(name, line, m["language"], m["about"] or "", m["code"]))
    return found


BLOCKS = blocks()
RUN = [b for b in BLOCKS if b.language in ("python", "sh") and not b.about.startswith("shown")]


def jpeg(i: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 255, (40 + i % 30, 50, 3), np.uint8)
    Image.fromarray(pixels).save(out, "jpeg")
    return out.getvalue()


def wav(i: int) -> bytes:
    """Between 0.2 and 0.5 s of noise."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        frames = np.random.default_rng(i).integers(-999, 999, 1600 + 75 * i, np.int16)
        file.writeframes(frames.tobytes())
    return out.getvalue()


def tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """A node over `my-bucket`, which has whatever the documents speak of."""
    root = tmp_path_factory.mktemp("documents")
    bucket = root / "my-bucket"
    for shard in range(4):
        members = []
        for i in range(shard, IMAGES, 4):
            members += [(f"{i:06}.jpg", jpeg(i)), (f"{i:06}.cls", b"%d" % (i % 10))]
        tar(bucket / "images" / f"{shard:03}.tar", members)
    tar(bucket / "shards" / "000000.tar", [(f"{i:06}.jpg", jpeg(i)) for i in range(100, 130)])
    (bucket / "train").mkdir()
    (bucket / "val").mkdir()
    for i in range(1, 129):
        (bucket / "train" / f"{i:04}.jpg").write_bytes(jpeg(i))
    (bucket / "val" / "0001.jpg").write_bytes(jpeg(1))
    for part in range(2):
        rows = range(part, TEXTS, 2)
        table = pa.table(
            {"id": list(rows), "text": [f"text number {i} " + "word " * (i % 50) for i in rows]}
        )
        path = bucket / "corpus" / "en" / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=50)
    for shard in range(2):
        members = []
        for i in range(shard, CLIPS, 2):
            members += [(f"{i:06}.wav", wav(i)), (f"{i:06}.txt", b"clip %d" % i)]
        tar(bucket / "audio" / f"{shard:03}.tar", members)
    node = Node("", [], root / "node", options=["--origin", f"file://{bucket}"])
    yield node
    node.stop()


@pytest.fixture(scope="module")
def node_of_three(origin, tmp_path_factory):
    """A node of the cluster of which the page about clusters speaks."""
    directory = tmp_path_factory.mktemp("cluster")
    etcd = Etcd(directory / "etcd")
    source = f"etcd://127.0.0.1:{etcd.port}/training"
    cluster = Cluster(origin, directory, source, bucket="train")
    for name in ("node-1", "node-2", "node-3"):
        cluster.start(name)
    cluster.agree(3)
    yield cluster.nodes["node-1"]
    cluster.close()
    etcd.stop()


def test_each_block_is_run_or_says_why_not():
    assert len(DOCUMENTS) >= 5 and sum(b.language == "python" for b in RUN) >= 18
    for block in BLOCKS:
        assert block.language, f"{block.id}: say the language, or text"
        if block.about:
            about = r"(file [\w.]+, )?says .+|file [\w.]+|shown, .{10,}"
            assert re.fullmatch(about, block.about), f"{block.id}: {block.about!r}"
            if not block.about.startswith("shown") or block.language == "sh":
                continue
            slow = re.match(r"shown, (tests/slow/\w+\.py) runs it", block.about)
            assert slow and (ROOT / slow[1]).exists(), (
                f"{block.id}: only shell may be shown without being run, or what a slow suite runs"
            )


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "API.md").read_text()
    shown = set(re.findall(r"^::: (\S+)$", page, re.M))
    modules = {f"forebay.{name}" for name in ("dali", "errors", "fsspec", "jax", "ray", "torch")}
    assert modules <= shown
    for name in set(forebay.__all__) - {"__version__"}:
        # By itself, or with all of its module.
        places = {f"forebay.{name}", getattr(forebay, name).__module__}
        assert places & shown, f"docs/API.md: add `::: forebay.{name}`"


@dataclass
class Outcome:
    done: subprocess.CompletedProcess[str]
    directory: Path


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """Runs a block, once, in a directory of its own with the files of earlier blocks."""
    outcomes: dict[str, Outcome] = {}

    def run(block: Block) -> Outcome:
        if block.id not in outcomes:
            directory = tmp_path_factory.mktemp("block")
            of_cluster = block.document == "docs/CLUSTER.md"
            far = request.getfixturevalue("node_of_three" if of_cluster else "far")
            for other in BLOCKS:
                if other.document == block.document and other.line <= block.line and other.file:
                    code = other.code.replace("http://127.0.0.1:8080", far.url)
                    (directory / other.file).write_text(code)
            outcomes[block.id] = Outcome(start(block, far.url, directory), directory)
        return outcomes[block.id]

    return run


def start(block: Block, url: str, directory: Path) -> subprocess.CompletedProcess[str]:
    code = block.code.replace("http://127.0.0.1:8080", url)
    env = {**os.environ, "FOREBAY_NODE": url, "AWS_EC2_METADATA_DISABLED": "true"}
    if block.language == "sh":
        programs = f"{Path(forebay_program()).parent}:{Path(sys.executable).parent}"
        env["PATH"] = f"{programs}:{env['PATH']}"
        command = ["sh", "-euc", code]
    else:
        name = block.file or "block.py"
        (directory / name).write_text(code)
        command = [sys.executable, name]
    return subprocess.run(
        command, env=env, cwd=directory, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("block", RUN, ids=lambda b: b.id)
def test_a_block_runs_as_printed(ran, block):
    done = ran(block).done
    assert done.returncode == 0, f"{block.id}\n{block.code}\n{done.stdout}\n{done.stderr}"
    if block.says:
        assert re.search(block.says, done.stdout), f"{block.id}\n{done.stdout}"


LLM = [block for block in RUN if block.document == "docs/QUICKSTART-LLM.md"]


def test_a_killed_run_goes_on_with_exactly_the_next_batch(ran):
    """Of the quick start of language models: a loss is another one where any token is."""
    whole, killed = (ran(block).done.stdout for block in LLM)
    losses = dict(re.findall(r"^step (\d+): loss (\S+)$", whole, re.M))
    assert list(losses) == [str(step) for step in range(1, 61)] and len(set(losses.values())) > 50
    parts = killed.split("the job was killed")
    first, rest = (re.findall(r"^step (\d+): loss (\S+)$", part, re.M) for part in parts)
    assert [int(step) for step, _ in first] == list(range(1, 34))
    assert [int(step) for step, _ in rest] == list(range(21, 61))
    assert dict(first) | dict(rest) == losses


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="Debian package chromium is not installed")
def test_the_report_of_that_run_opens_in_a_browser(ran, tmp_path):
    page = ran(LLM[0]).directory / "report.html"
    run = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    run += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "accelerator utilization" in done.stdout and "<svg" in done.stdout
