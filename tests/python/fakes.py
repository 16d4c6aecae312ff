"""A stand-in for a node with datasets, in plain Python: for what a real one cannot be made to do at
will. Its answers have the form of those that a node was recorded to give (`recorded.py`).
"""

from __future__ import annotations

import json

import forebay
import pyarrow as pa
import recorded
from forebay import _forebay

ANSWERS = recorded.answers()
#: What a node calls the types of the recorded columns.
TYPES = {
    kind: next(f["type"] for f in ANSWERS["opening"]["last"]["schema"] if f["name"] == name)
    for name, kind in (("id", pa.int64()), ("data", pa.binary()), ("text", pa.string()))
}


def like(answer: dict, **known: object) -> dict:
    """A recorded document with these values."""
    assert known.keys() <= answer.keys(), f"no node says {known.keys() - answer.keys()}"
    return {**answer, **known}


class Client:
    """A node that knows one dataset for each name in `tables`."""

    def __init__(self, tables: dict[str, pa.Table], block_rows: int = 10) -> None:
        self.tables, self.block_rows = tables, block_rows
        self.requests = 0

    timeout = 60.0
    nodes = 1
    moves = 0

    def open_dataset(self, spec, progress=None, job=None):
        name = json.loads(spec)["sources"][0]
        table = self.tables[name]
        said = ANSWERS["opening"]["last"]
        field = said["schema"][0]
        fields = [
            like(field, name=f.name, type=TYPES.get(f.type, str(f.type))) for f in table.schema
        ]
        return json.dumps(
            like(
                said,
                id=f"{name}-v1",
                rows=len(table),
                blocks=-(-len(table) // self.block_rows),
                files=2,
                bytes=table.nbytes,
                schema=fields,
            )
        ).encode()

    def _table(self, dataset):
        if dataset.removesuffix("-v1") not in self.tables:
            raise forebay.NotFound(f"no dataset {dataset}")
        return self.tables[dataset.removesuffix("-v1")]

    def dataset_shape(self, dataset):
        full, rest = divmod(len(self._table(dataset)), self.block_rows)
        runs = [(full, self.block_rows), (1, rest)]
        return _forebay.encode_shape([(blocks, rows) for blocks, rows in runs if blocks * rows])

    def dataset_manifest(self, dataset):
        n = len(self._table(dataset))
        head, file = ANSWERS["manifest"]["lines"]
        lines = [
            like(head, dataset=dataset, files=2),
            like(file, name=f"b/{dataset}-0", size=1, rows=n // 2),
            like(file, name=f"b/{dataset}-1", size=1, rows=n - n // 2),
        ]
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def take(self, dataset, rows, columns, job=None):
        self.requests += 1
        table = self._table(dataset) if columns is None else self._table(dataset).select(columns)
        return (
            table.take(pa.array(rows)).combine_chunks().to_batches()[0]
            if len(rows)
            else pa.RecordBatch.from_pylist([], table.schema)
        )
