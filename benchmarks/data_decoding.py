"""Where a block of a dataset should be decoded in a cluster: at the node that has its bytes, or at
the one that is asked for its rows.

A block (a Parquet row group) is written, decoded, and sent through a TCP connection of this machine
(both ends count), as it is stored and as it is decoded. *Nodes* is how many nodes must want rows of
the same block, each a share of them, before sending each its decoded rows moves fewer bytes than
sending each the stored block. Without encryption, which costs both ways the same for each byte.
"""

from __future__ import annotations

import argparse
import io
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from report import Report

COLUMNS = [
    ("name", "", 30),
    ("stored_mib", "stored MiB", 12),
    ("decoded_mib", "decoded MiB", 13),
    ("decode_ms", "decode CPU ms", 15),
    ("send_stored_ms", "send CPU ms", 13),
    ("send_decoded_ms", "decoded CPU ms", 16),
    ("nodes", "nodes", 8),
]
PIECE = 256 << 10
WORDS = "the of to and in for is on that by this with you it not or be are from at as your".split()


def numbers(rows: int, made: np.random.Generator) -> pa.Table:
    ids = np.arange(rows * 100)
    prices = np.round(made.gamma(2.0, 20.0, rows * 100), 2)
    return pa.table({"id": ids, "kind": made.integers(0, 50, rows * 100), "price": prices})


def text(rows: int, made: np.random.Generator) -> pa.Table:
    lines = [" ".join(made.choice(WORDS, 200)) for _ in range(rows)]
    return pa.table({"text": lines})


def tokens(rows: int, made: np.random.Generator) -> pa.Table:
    # Zipf's law, as words have it.
    ids = np.minimum(made.zipf(1.2, rows * 512), 50_000).astype(np.int32)
    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(ids), 512)})


def images(rows: int, made: np.random.Generator) -> pa.Table:
    return pa.table({"image": [made.bytes(20_000) for _ in range(rows // 4)]})


KINDS = {"numbers": numbers, "text": text, "tokens": tokens, "images (compressed)": images}


def cpu_of(work, least_seconds: float) -> float:
    """CPU milliseconds of this process for one time."""
    work()
    times, began, cpu = 0, time.monotonic(), time.process_time()
    while time.monotonic() - began < least_seconds:
        work()
        times += 1
    return (time.process_time() - cpu) / times * 1000


class Link:
    """Two ends of a TCP connection, of which one throws away what comes."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.near = socket.create_connection(listener.getsockname())
        self.far, _ = listener.accept()
        listener.close()

    def send(self, data: memoryview) -> None:
        room = bytearray(PIECE)

        def receive() -> None:
            left = len(data)
            while left:
                left -= self.far.recv_into(room, min(left, PIECE))

        receiving = threading.Thread(target=receive)
        receiving.start()
        for at in range(0, len(data), PIECE):
            self.near.sendall(data[at : at + PIECE])
        receiving.join()


def measure(kind: str, compression: str, rows: int, least_seconds: float) -> dict:
    table = KINDS[kind](rows, np.random.default_rng(1))
    out = io.BytesIO()
    pq.write_table(table, out, compression=compression, row_group_size=1 << 30)
    stored = out.getvalue()
    group = pq.ParquetFile(io.BytesIO(stored)).metadata.row_group(0)
    columns = range(group.num_columns)
    stored_bytes = sum(group.column(i).total_compressed_size for i in columns)

    def decode() -> pa.Table:
        return pq.ParquetFile(io.BytesIO(stored)).read_row_group(0, use_threads=False)

    decoded = io.BytesIO()
    with pa.ipc.new_stream(decoded, table.schema) as writer:
        writer.write_table(decode())
    link = Link()
    sent = {
        name: cpu_of(lambda data=data: link.send(memoryview(data)), least_seconds)
        for name, data in {"stored": stored[:stored_bytes], "decoded": decoded.getvalue()}.items()
    }
    return {
        "name": f"{kind}, {compression}",
        "stored_mib": stored_bytes / (1 << 20),
        "decoded_mib": len(decoded.getvalue()) / (1 << 20),
        "decode_ms": cpu_of(decode, least_seconds),
        "send_stored_ms": sent["stored"],
        "send_decoded_ms": sent["decoded"],
        "nodes": len(decoded.getvalue()) / stored_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8000, help="of a block")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, at least")
    parser.add_argument("--save", type=Path, help="write the report to this file, as JSON")
    args = parser.parse_args()
    settings = {"rows": args.rows, "seconds": args.seconds}
    report = Report("Blocks, stored and decoded", COLUMNS, settings)
    report.heading("one block; CPU of both ends of a connection")
    for kind in KINDS:
        for compression in ("snappy", "zstd"):
            report.add(measure(kind, compression, args.rows, args.seconds))
    report.save(args.save)


if __name__ == "__main__":
    main()
