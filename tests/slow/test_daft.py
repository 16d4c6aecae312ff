"""Daft reads and writes Parquet through a node: the recipe of docs/RECIPES.md, as it stands there.

It needs an older PyArrow than the other tests have, so both are installed beside them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import beside
import pyarrow as pa
import pyarrow.parquet as pq
from servers import Node

PACKAGES = ["daft==0.7.26", "pyarrow==25.0.1"]
RECIPES = Path(__file__).parents[2] / "docs" / "RECIPES.md"


def test_the_recipe_of_daft(tmp_path):
    library = beside.installed("daft", PACKAGES)
    folder = tmp_path / "my-bucket" / "corpus" / "en"
    folder.mkdir(parents=True)
    for part in range(4):
        ids = range(part * 250, part * 250 + 250)
        table = pa.table({"id": pa.array(ids), "text": [f"text {i}" for i in ids]})
        pq.write_table(table, folder / f"{part}.parquet")
    (recipe,) = re.findall(r"## Daft\n.*?```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'my-bucket'}"])
    try:
        assert recipe.count("http://127.0.0.1:8080") == 1
        recipe = recipe.replace("http://127.0.0.1:8080", node.url)
        code = f"import sys; sys.path.insert(0, {str(library)!r})\n{recipe}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]
        served = node.metrics()
    finally:
        node.stop()
    assert done.stdout.splitlines()[0] == "1000" and "text 4" in done.stdout
    written = pq.read_table(tmp_path / "my-bucket" / "first-5")
    assert sorted(written["id"].to_pylist()) == [0, 1, 2, 3, 4]
    assert sum(n for name, n in served.items() if name.startswith("forebay_requests_total")) > 4
