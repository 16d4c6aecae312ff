"""Stand-ins for the compiled plan and the node's datasets, in plain Python: what the loader is tested against where no node is wanted."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import forebay
import numpy as np
import pyarrow as pa


class Steps:
    def __init__(self, plan, partition, state, until):
        self.plan, self.state, self.until = plan, state, until
        self.world, self.rank, self.uneven = partition["world"], partition["rank"], partition["uneven"]
        self.rows = partition["batch"]["rows"]
        self.stride = self.world * self.rows
        if not self.in_epoch(0):
            raise forebay.InvalidRequest("an epoch is less than one step")

    def in_epoch(self, position):
        left = self.plan.rows_per_epoch - position
        return left // self.stride if self.uneven == "drop" else -(-left // self.stride)

    def count(self):
        first = self.in_epoch(self.state["position"])
        return first + (self.until - self.state["epoch"] - 1) * self.in_epoch(0)

    def step(self, number):
        first, each = self.in_epoch(self.state["position"]), self.in_epoch(0)
        if number < first:
            epoch, position, last = self.state["epoch"], self.state["position"] + number * self.stride, number + 1 == first
        else:
            later = number - first
            epoch, position, last = self.state["epoch"] + 1 + later // each, later % each * self.stride, later % each + 1 == each
        if self.until is not None and epoch >= self.until:
            return None
        order = self.plan.epoch(epoch)
        start = position + self.rank * self.rows
        refs = [order[i % len(order)] for i in range(start, start + self.rows)]
        real = max(0, min(self.rows, len(order) - start)) if self.uneven == "pad" else self.rows
        following = self.plan.state(epoch + 1, 0) if last else self.plan.state(epoch, position + self.stride)
        return SimpleNamespace(
            step=number,
            epoch=epoch,
            rows=np.array([r for _, r in refs], np.uint64),
            sources=np.array([s for s, _ in refs], np.uint32),
            real=real,
            next=following,
        )


class Plan:
    def __init__(self, document, shapes):
        self.document = json.loads(document)
        self.shapes = [json.loads(s) for s in shapes]
        self.rows = [sum(s) for s in self.shapes]
        self.rows_per_epoch = self.document.get("epoch_rows") or sum(self.rows)
        self.identity = f"{hash(document) & (1 << 64) - 1:016x}"

    def epoch(self, epoch):
        """(source, row) of each position: each row once if there is one source, else by weight at random."""
        rng = random.Random(f"{self.document['seed']} {epoch} {self.document['shuffle']}")
        if len(self.rows) == 1:
            rows = list(range(self.rows[0]))
            if self.document["shuffle"]["kind"] != "none":
                rng.shuffle(rows)
            return [(0, r) for r in rows]
        weights = [s["weight"] for s in self.document["sources"]]
        sources = rng.choices(range(len(weights)), weights, k=self.rows_per_epoch)
        return [(s, rng.randrange(self.rows[s])) for s in sources]

    def state(self, epoch, position):
        return json.dumps({"plan": self.identity, "epoch": epoch, "position": position})

    def checked(self, state):
        if json.loads(state).get("plan") != self.identity:
            raise forebay.InvalidRequest("the state to resume from is of another plan")
        return state

    def steps(self, partition, state, until, lengths=None):
        return Steps(self, json.loads(partition), json.loads(state), until)


class Client:
    """A node that knows one dataset for each name in `tables`."""

    def __init__(self, tables: dict[str, pa.Table], block_rows: int = 10) -> None:
        self.tables, self.block_rows = tables, block_rows
        self.requests = 0

    def open_dataset(self, spec):
        name = json.loads(spec)["sources"][0]
        table = self.tables[name]
        fields = [{"name": f.name, "type": str(f.type)} for f in table.schema]
        blocks = -(-len(table) // self.block_rows)
        return json.dumps(
            {"id": f"{name}-v1", "format": "parquet", "rows": len(table), "blocks": blocks, "files": 1, "bytes": table.nbytes, "schema": fields}
        ).encode()

    def _table(self, dataset):
        if dataset.removesuffix("-v1") not in self.tables:
            raise forebay.NotFound(f"no dataset {dataset}")
        return self.tables[dataset.removesuffix("-v1")]

    def dataset_shape(self, dataset):
        n = len(self._table(dataset))
        return json.dumps([min(self.block_rows, n - i) for i in range(0, n, self.block_rows)]).encode()

    def dataset_manifest(self, dataset):
        n = len(self._table(dataset))
        files = [{"name": f"b/{dataset}-0", "size": 1, "rows": n // 2}, {"name": f"b/{dataset}-1", "size": 1, "rows": n - n // 2}]
        files.insert(0, {"forebay_manifest": 1})
        return b"".join(json.dumps(f).encode() + b"\n" for f in files)

    def take(self, dataset, rows, columns):
        self.requests += 1
        table = self._table(dataset) if columns is None else self._table(dataset).select(columns)
        return table.take(pa.array(rows)).combine_chunks().to_batches()[0] if len(rows) else pa.RecordBatch.from_pylist([], table.schema)
