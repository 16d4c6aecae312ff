"""The oldest releases that python/README.md names: tests of tests/python in an environment that has
them. Those of `to_hf()` run with the oldest `datasets`, which needs a newer PyArrow, beside the
packages of the other tests.

The oldest Python, 3.11, is what `make test` has where its workflow runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import beside
import pytest
from servers import CACHE

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "python"
REQUIREMENTS = TESTS / "requirements-oldest.txt"
DATASETS = [
    "datasets==4.7.0",
    "dill==0.4.0",
    "fsspec==2026.2.0",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "huggingface-hub==1.33.0",
    "multiprocess==0.70.18",
]
#: What runs with them; and in each file what does not, for PyArrow 15 cannot make what these tests
#: compare with, or refuses it, as it should.
FILES = {
    "test_batch.py": [],
    "test_client.py": [],
    "test_describe.py": [],
    "test_filters.py": [
        "test_ends_of_statistics_are_rounded_as_values_are[halffloat]",
        "test_decimals_compare_with_values_that_have_more_digits_than_their_type",
    ],
    "test_formats.py": [],
    "test_fsspec.py": [],
    "test_keys.py": [],
    # It asks as later releases of Ray do.
    "test_ray.py": ["test_columns_and_limits_reach_the_node"],
    "test_rows.py": [],
    "test_show.py": [],
    "test_write_options.py": [
        "test_parquet_has_its_writers_options",
        "test_levels_pages_and_chunks_of_parquet_change_its_bytes",
    ],
}


def pytest_of(python: Path | str, file: str, cut: list[str], tmp_path: Path, **env: str) -> None:
    """Runs a file of tests/python by another interpreter, or with other packages."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600"]
    command += [f"--rootdir={ROOT}", f"--basetemp={tmp_path / 'tests'}", TESTS / file]
    command += [f"--deselect=tests/python/{file}::{name}" for name in cut]
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]
    assert not cut or f" {len(cut)} deselected" in done.stdout, "a name is of no test any more"


@pytest.fixture(scope="module")
def python():
    """The interpreter of an environment with the oldest releases, and with the wheel."""
    subprocess.run([ROOT / "tools" / "venv.sh", "oldest", REQUIREMENTS], check=True, timeout=1500)
    program = CACHE / "venv-oldest" / "bin" / "python"
    (wheel,) = (CACHE / "wheels").glob("forebay-*.whl")
    pip = [program, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(pip, check=True, timeout=300)
    return program


def test_the_page_and_the_package_name_the_releases_that_are_tested():
    page = (ROOT / "python" / "README.md").read_text()
    named = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) \|", page, re.MULTILINE))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", REQUIREMENTS.read_text(), re.MULTILINE))
    pinned["datasets"] = DATASETS[0].partition("==")[2]
    extras = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]
    wanted = {
        name.partition("[")[0]: oldest
        for of in extras["optional-dependencies"].values()
        for name, oldest in (one.split(">=") for one in of)
    }
    packages = {
        "NumPy": "numpy",
        "PyArrow": "pyarrow",
        "PyTorch": "torch",
        "JAX": "jax",
        "fsspec": "fsspec",
        "Hugging Face's `datasets`": "datasets",
        "Ray Data": "ray",
    }
    assert {packages[name]: oldest for name, oldest in named.items()} == wanted
    for name, oldest in wanted.items():
        # JAX was tried by hand.
        assert name == "jax" or f"{pinned[name]}.".startswith(f"{oldest}."), name


@pytest.mark.parametrize("file", FILES)
def test_with_the_oldest_releases(python, tmp_path, file):
    pytest_of(python, file, FILES[file], tmp_path)


def test_without_datasets_it_is_said_what_to_install(python):
    code = "import forebay._hf"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    assert 'need Hugging Face datasets: pip install "datasets>=4.7"' in done.stderr, done.stderr


def test_with_the_oldest_datasets(tmp_path):
    library = beside.installed("datasets", DATASETS)
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(library), *([found] if found else [])])
    pytest_of(sys.executable, "test_hf.py", [], tmp_path, PYTHONPATH=path)
