"""demo/cluster.py runs to its end, and again after it was killed. The recordings are noise."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import wave
from pathlib import Path

import namespaces
import pytest
from clusters import eventually
from servers import CACHE, forebay_program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """As that of `make demo-cluster`, with recordings of half a second."""
    directory = tmp_path_factory.mktemp("demo")
    (directory / "bin").symlink_to(CACHE / "bin")
    rng = random.Random(1)
    for language in ("en", "es", "fr", "it", "ru"):
        (directory / "demo" / "clips" / language).mkdir(parents=True)
        for phrase in range(150):
            path = directory / "demo" / "clips" / language / f"phrase-{phrase}.wav"
            with wave.open(str(path), "wb") as sound:
                sound.setparams((1, 2, 8000, 0, "NONE", ""))
                sound.writeframes(rng.randbytes(8000))
    return directory


def begun(cache: Path, *options: str) -> subprocess.Popen:
    command = [
        sys.executable,
        ROOT / "demo" / "cluster.py",
        "--cache",
        cache,
        "--out",
        cache / "out",
    ]
    command += ["--forebay", forebay_program(), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(list(map(str, command)), cwd=cache, text=True, **pipes)


def of_demo(cache: Path) -> list[str]:
    """Processes of the demo, by their command lines."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_text(errors="replace")
        except OSError:
            continue
        if str(cache / "demo") in words:
            found.append(words.replace("\0", " "))
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--loopback",), id="loopback"),
        pytest.param(
            (),
            id="machines",
            marks=pytest.mark.skipif(
                namespaces.why_not() is not None, reason=namespaces.why_not() or "can be made"
            ),
        ),
    ],
)
def test_the_demo_of_a_cluster_runs_also_after_it_was_killed(cache, options):
    killed = begun(cache, *options)
    try:
        said = []
        for line in killed.stdout:
            said.append(line)
            if "b is killed" in line:
                break
        else:
            raise AssertionError("it ended before a node was killed:\n" + "".join(said))
        # It waits: on a busy machine it could end before the second one has begun.
        killed.send_signal(signal.SIGSTOP)
        second = begun(cache, *options)
        assert "Another `make demo-cluster` runs" in second.communicate(timeout=60)[0]
        assert second.returncode == 1
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    eventually(lambda: not of_demo(cache), "its servers end with it", 10)

    again = begun(cache, *options)
    said = again.communicate(timeout=240)[0]
    assert again.returncode == 0, said
    assert not of_demo(cache)
    told = json.loads((cache / "out" / "forebay-demo-cluster.json").read_text())
    assert [what for _, what in told["events"]] == ["b is killed", "b is back", "d joins"]
    first, *others = told["epochs"]
    size = told["dataset_bytes"]
    # With headers and the listing, of which small objects have more than large ones.
    assert size <= first["bucket_bytes"] < size * 1.5
    # Each byte leaves the bucket once; a node that a busy machine holds up may be stood in for.
    assert others[0]["bucket_bytes"] < size * 0.1
    # What the dead node had, once more.
    assert sum(epoch["bucket_bytes"] for epoch in others) < size * 1.2
    assert told["seconds"][-1]["running"] == ["a", "b", "c", "d"]
