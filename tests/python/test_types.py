"""What type checkers know about the package: mypy over typed.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forebay
import pytest

HERE = Path(__file__).parent


def test_type_checkers_know_what_a_batch_is(tmp_path):
    config = tmp_path / "mypy.ini"
    # PyTorch, JAX and PyArrow are not analysed: that would take minutes.
    config.write_text(
        "[mypy]\nstrict = true\n[mypy-torch.*,jax.*,pyarrow.*,nvidia.*,datasets.*]\n"
        "follow_imports = skip\nignore_missing_imports = true\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", tmp_path]
    done = subprocess.run(
        [*mypy, HERE / "typed.py"], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_shows_what_it_offers_and_nothing_else():
    shown = {name for name in dir(forebay) if not name.startswith("__")}
    assert shown == {
        *forebay.__all__,
        "checkpoint",
        "dali",
        "energy",
        "errors",
        "fsspec",
        "jax",
        "ray",
        "torch",
    } - {"__version__"}


@pytest.mark.parametrize("name", ["checkpoint", "dali", "energy", "fsspec", "jax", "ray", "torch"])
def test_its_modules_show_what_they_offer_and_nothing_else(name):
    if name not in ("checkpoint", "dali", "energy"):
        pytest.importorskip(name)
    module = getattr(forebay, name)
    assert dir(module) == sorted(module.__all__)
    for shown in dir(module):
        getattr(module, shown)
