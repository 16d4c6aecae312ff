"""Which row has a key: an index of hashes, made once for a version and kept.

For each row there are its number and 64 bits of a hash of its key: 16 bytes. Rows that are found
are compared with the key that was asked for, so a chance agreement of hashes costs a request, never
a wrong row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ._kept import kept
from ._progress import Bar
from .errors import InvalidRequest, NotFound
from .rows import Rows

if TYPE_CHECKING:
    from .dataset import Dataset

#: The columns that are keys where none is named, by the format.
KEYS = {"tar": "__key__", "zip": "__key__", "objects": "key"}
REQUEST_ROWS, AHEAD_REQUESTS = 1 << 13, 4
#: Keys of one call.
KEYS_MAX = 1 << 20
MAGIC = b"FBK1"


class Keys:
    """Sorted hashes, and the row of each; of equal hashes, lower rows come first."""

    def __init__(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        self.hashes, self.rows = hashes, rows

    @property
    def nbytes(self) -> int:
        return int(self.hashes.nbytes + self.rows.nbytes)

    def encode(self) -> bytes:
        body = self.hashes.astype("<u8").tobytes() + self.rows.astype("<u8").tobytes()
        head = MAGIC + struct.pack("<Q", len(self.hashes))
        return head + hashlib.blake2b(head + body, digest_size=16).digest() + body

    @classmethod
    def decode(cls, data: bytes) -> Keys | None:
        """What :meth:`encode` wrote; None for anything else."""
        if len(data) < 28 or data[:4] != MAGIC:
            return None
        (count,) = struct.unpack("<Q", data[4:12])
        body = memoryview(data)[28:]
        digest = hashlib.blake2b(data[:12], digest_size=16)
        digest.update(body)
        if len(body) != 16 * count or digest.digest() != data[12:28]:
            return None
        return cls(np.frombuffer(body[: 8 * count], "<u8"), np.frombuffer(body[8 * count :], "<u8"))


def column_of(of: Dataset[Any], column: str | None) -> str:
    """The column that has the keys."""
    there = of._all_types()
    if column is not None:
        if column not in there:
            of._known([column])
        return column
    found = [name for name in KEYS.values() if name in there]
    if of.format in KEYS and KEYS[of.format] in there:
        return KEYS[of.format]
    if len(found) == 1:
        return found[0]
    raise InvalidRequest(
        f"{of.name} has no column that is known to have the keys",
        hint=f'name it: by_key([…], column="id"); its columns: {", ".join(there)}',
    )


def index_of(of: Dataset[Any], column: str, progress: bool | None) -> Keys:
    """The index, read or made."""

    what = ["keys 1", of.id, column, of._columns_key()]
    return kept("keys", what, lambda: _make(of, column, progress), Keys.encode, Keys.decode)


def _make(of: Dataset[Any], column: str, progress: bool | None) -> Keys:
    rows = len(of)
    hashes = np.empty(rows, np.uint64)
    wanted = [column]
    pieces = [(at, min(at + REQUEST_ROWS, rows)) for at in range(0, rows, REQUEST_ROWS)]

    def look(piece: tuple[int, int]) -> np.ndarray:
        found = of._take(np.arange(*piece, dtype=np.uint64), wanted)
        return np.array([_hash(row[column], column) for row in found], np.uint64)

    with (
        Bar(f"reading the keys in column {column}", rows, show=progress) as bar,
        ThreadPoolExecutor(AHEAD_REQUESTS, thread_name_prefix="forebay-keys") as pool,
    ):
        waiting = []
        todo = iter(pieces)
        for piece in todo:
            waiting.append((piece, pool.submit(look, piece)))
            while len(waiting) > 2 * AHEAD_REQUESTS:
                _put(waiting.pop(0), hashes, bar)
        while waiting:
            _put(waiting.pop(0), hashes, bar)
    order = np.argsort(hashes, kind="stable")
    return Keys(hashes[order], order.astype(np.uint64))


def _put(done: Any, hashes: np.ndarray, bar: Bar) -> None:
    (begin, end), future = done
    hashes[begin:end] = future.result()
    bar.advance(end - begin)


def _hash(key: Any, column: str) -> int:
    return int.from_bytes(hashlib.blake2b(_bytes(key, column), digest_size=8).digest(), "little")


def _bytes(key: Any, column: str) -> bytes:
    if key is None:
        return b"\0none"
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, (bytes, bytearray, memoryview)):
        return b"b" + bytes(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return b"i%d" % int(key)
    raise InvalidRequest(
        f"a key in column {column!r} is of {type(key).__name__}",
        hint="keys are texts, bytes or whole numbers",
    )


def by_key(
    of: Dataset[Any],
    keys: Sequence[Any],
    column: str | None,
    columns: Sequence[str] | None,
    progress: bool | None,
    known: dict[str, Keys],
) -> Rows:
    if isinstance(keys, (str, bytes)):
        raise TypeError("by_key takes a list of keys, not one key: by_key([key])")
    wanted = list(keys)
    if len(wanted) > KEYS_MAX:
        raise InvalidRequest(
            f"by_key with {len(wanted):,} keys; at most {KEYS_MAX:,}", hint="ask in several calls"
        )
    name = column_of(of, column)
    if any(key is None for key in wanted):
        raise InvalidRequest("None is not a key", hint="leave out keys that are missing")
    hashes = np.array([_hash(key, name) for key in wanted], np.uint64)
    index = known.get(name)
    if index is None:
        index = known[name] = index_of(of, name, progress)
    shown = of.columns if columns is None else list(columns)
    read = shown if name in shown else [*shown, name]
    of._known(read)
    first = np.searchsorted(index.hashes, hashes, "left")
    last = np.searchsorted(index.hashes, hashes, "right")
    at = first.copy()
    while True:
        gone = np.flatnonzero(at >= last)
        if len(gone):
            missing = [wanted[i] for i in gone[:5]]
            more = f" (and {len(gone) - 5:,} more)" if len(gone) > 5 else ""
            raise NotFound(
                f"{of.name} has no row with {name} {', '.join(map(repr, missing))}{more}",
                hint="keys are compared exactly, with their type: '17' is neither 17 nor '017'",
            )
        rows = of._take(index.rows[at].astype(np.uint64), read)
        same = [
            _bytes(row[name], name) == _bytes(k, name) for row, k in zip(rows, wanted, strict=True)
        ]
        wrong = np.flatnonzero(~np.array(same, bool))
        if not len(wrong):
            break
        # Another key with the same hash: the next row that has it.
        at[wrong] += 1
    return rows
