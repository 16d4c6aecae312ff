"""A stand-in for a node with datasets, in plain Python: for what a real one cannot be made to do at
will.
"""

from __future__ import annotations

import json

import forebay
import pyarrow as pa


class Client:
    """A node that knows one dataset for each name in `tables`."""

    def __init__(self, tables: dict[str, pa.Table], block_rows: int = 10) -> None:
        self.tables, self.block_rows = tables, block_rows
        self.requests = 0

    timeout = 60.0

    def open_dataset(self, spec, progress=None):
        name = json.loads(spec)["sources"][0]
        table = self.tables[name]
        fields = [{"name": f.name, "type": str(f.type)} for f in table.schema]
        blocks = -(-len(table) // self.block_rows)
        return json.dumps(
            {
                "id": f"{name}-v1",
                "format": "parquet",
                "rows": len(table),
                "blocks": blocks,
                "files": 1,
                "bytes": table.nbytes,
                "schema": fields,
            }
        ).encode()

    def _table(self, dataset):
        if dataset.removesuffix("-v1") not in self.tables:
            raise forebay.NotFound(f"no dataset {dataset}")
        return self.tables[dataset.removesuffix("-v1")]

    def dataset_shape(self, dataset):
        n = len(self._table(dataset))
        return json.dumps(
            [min(self.block_rows, n - i) for i in range(0, n, self.block_rows)]
        ).encode()

    def dataset_manifest(self, dataset):
        n = len(self._table(dataset))
        files = [
            {"name": f"b/{dataset}-0", "size": 1, "rows": n // 2},
            {"name": f"b/{dataset}-1", "size": 1, "rows": n - n // 2},
        ]
        files.insert(0, {"forebay_manifest": 1})
        return b"".join(json.dumps(f).encode() + b"\n" for f in files)

    def take(self, dataset, rows, columns):
        self.requests += 1
        table = self._table(dataset) if columns is None else self._table(dataset).select(columns)
        return (
            table.take(pa.array(rows)).combine_chunks().to_batches()[0]
            if len(rows)
            else pa.RecordBatch.from_pylist([], table.schema)
        )
