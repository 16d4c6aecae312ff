"""Programs on two processes of one job, with packages that lie beside those of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from servers import Node

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(program: Sequence[str | Path], node: Node, library: Path, cwd: Path) -> str:
    """What a program and its arguments print on two ranks without a GPU, which must not fail."""
    found = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(library), *([found] if found else [])]),
        "FOREBAY_NODE": node.url,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *TORCHRUN, *map(str, program)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
