"""Packages that lie beside those of the tests, because their requirements exclude these, or bring
much that no test needs: each is installed without its requirements, but for those that are named.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import CACHE

#: What NeMo's dataloader needs.
NEMO = [
    "nemo-toolkit==3.0.0",
    "lightning==2.4.0",
    "pytorch-lightning==2.4.0",
    "hydra-core==1.3.8",
    "omegaconf==2.4.0",
    "antlr4-python3-runtime==4.9.3",
    "nv-one-logger-core==2.3.1",
    "nv-one-logger-training-telemetry==2.3.1",
    "nv-one-logger-pytorch-lightning-integration==2.3.1",
    "strenum==0.5.0",
    "toml==0.10.2",
    "joblib==1.6.0",
    "scikit-learn==1.9.1",
    "threadpoolctl==3.8.0",
    "narwhals==2.29.0",
    "smart-open==9.0.2",
    "text-unidecode==1.3",
    "onnx==1.23.2",
    "tensorboard==2.21.0",
    "einops==0.8.2",
    "sentencepiece==0.2.3",
    "kaldialign==0.12.0",
    "librosa==0.11.0",
    "lazy-loader==0.6",
]


def installed(name: str, packages: Sequence[str]) -> Path:
    """A directory with these packages, which is kept for the next run of the tests."""
    key = hashlib.sha256(repr((sys.version, list(packages))).encode()).hexdigest()[:12]
    parent = CACHE / "beside" / name
    folder, unfinished = parent / key, parent / "unfinished"
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            # Of other versions, or of a run that was ended.
            for old in parent.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
            subprocess.run([*pip, str(unfinished), *packages], check=True, timeout=900)
            unfinished.rename(folder)
    return folder


def run(code: str, library: Path, *arguments: object) -> list[Any]:
    """What a program that is given the library's directory prints: a line of JSON each."""
    command = [sys.executable, "-c", code, *map(str, [library, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # Libraries print lines of their own.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
