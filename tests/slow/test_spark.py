"""Spark reads Parquet through a node's S3 endpoint: the recipe of docs/RECIPES.md. It needs a JVM,
and fetches Hadoop's client of S3 (700 MB) into the cache of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import beside
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import CACHE, Node

PACKAGES = ["pyspark==4.3.0", "py4j==0.10.9.9"]
RECIPES = Path(__file__).parents[2] / "docs" / "RECIPES.md"

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="no JVM is there")


@pytest.mark.timeout(3000)
def test_the_recipe_of_spark(tmp_path):
    library = beside.installed("spark", PACKAGES)
    folder = tmp_path / "my-bucket" / "corpus"
    folder.mkdir(parents=True)
    for part in range(4):
        ids = range(part * 250, part * 250 + 250)
        table = pa.table({"id": pa.array(ids), "text": [f"text {i}" for i in ids]})
        pq.write_table(table, folder / f"{part}.parquet")
    command, job = re.findall(
        r"## Spark\n.*?```text\n(.*?)```.*?```text\n(.*?)```", RECIPES.read_text(), re.DOTALL
    )[0]
    (tmp_path / "job.py").write_text(job)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'my-bucket'}"])
    try:
        assert "http://127.0.0.1:8080" in command
        words = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8080", node.url))
        assert words[0] == "spark-submit"
        submit = library / "pyspark" / "bin" / "spark-submit"
        more = ["--conf", f"spark.jars.ivy={CACHE / 'ivy'}", "--conf", "spark.ui.enabled=false"]
        environment = os.environ | {
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": str(library),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        done = subprocess.run(
            ["bash", submit, *more, *words[1:]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=2400,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        assert "1000 rows" in done.stdout and "text 4" in done.stdout, done.stdout
        served = node.metrics()
    finally:
        node.stop()
    assert sum(n for name, n in served.items() if name.startswith("forebay_requests_total")) > 10
