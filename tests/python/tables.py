"""Tables for the tests of loaders: rows that say which they are, in Parquet files of several row
groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: Rows of the tables `a` (two files) and `b` (one). Those of `b` have ids from 1000 on.
A_ROWS, A_FIRST_FILE_ROWS, B_ROWS = 103, 51, 41
GROUP_ROWS = 10


def table(rows: int, base: int = 0) -> pa.Table:
    """Numbers, texts, bytes of any length from 0, and vectors."""
    ids = np.arange(base, base + rows)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3).astype(np.float32)), 3)
    data = [b"%d" % i * (i % 7) for i in ids]
    return pa.table(
        {
            "id": ids,
            "data": data,
            "text": [f"row {i}" for i in ids],
            "x": vectors,
            "size": ids % 17 + 1,
        }
    )


def write(bucket: Path) -> None:
    """Writes `a/0.parquet`, `a/1.parquet` and `b/0.parquet` into a directory."""
    a = table(A_ROWS)
    files = {"a/0": a[:A_FIRST_FILE_ROWS], "a/1": a[A_FIRST_FILE_ROWS:], "b/0": table(B_ROWS, 1000)}
    for name, part in files.items():
        path = bucket / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(part, path, row_group_size=GROUP_ROWS)
