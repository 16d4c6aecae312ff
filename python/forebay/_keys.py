"""Which row has a key.

The node indexes the column, once for all who ask, and answers with the rows (:class:`_AtNode`).
Where it cannot (a column that is cast here, an index that is too large for the node, a node of a
release that has none), an index of hashes is made here, once for a version, and kept
(:class:`_Here`). For each row that has its number and 64 bits of a hash of its key: 16 bytes. Rows
that are found are compared with the key that was asked for, so a chance agreement of hashes costs a
request, never a wrong row.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _node
from ._arguments import column_names, flag_or_none, whole_number
from ._kept import kept
from ._pools import Pool
from ._progress import Bar
from ._words import listed
from .errors import InvalidRequest, NotFound, RangeNotSatisfiable, TooLarge, Unsupported
from .rows import Rows

if TYPE_CHECKING:
    from .dataset import Dataset

#: The columns that are keys where none is named, by the format.
KEYS = {"tar": "__key__", "zip": "key", "objects": "key"}
REQUEST_ROWS, AHEAD_REQUESTS = 1 << 13, 4
#: Keys of one call.
KEYS_MAX = 1 << 20
#: Keys whose rows come with the answer that finds them. Beyond it, rows are asked for in pieces.
ONE_REQUEST_KEYS = 4096
#: Keys that are looked up in one request.
LOOK_UP_KEYS = 1 << 16
#: What a node says of a key that no row has.
NO_ROW = np.uint64(2**64 - 1)
MAGIC = b"FBK1"
log = logging.getLogger("forebay")


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
    found = [name for name in dict.fromkeys(KEYS.values()) if name in there]
    if of.format in KEYS and KEYS[of.format] in there:
        return KEYS[of.format]
    if len(found) == 1:
        return found[0]
    raise InvalidRequest(
        f"{of.name} has no column that is known to have the keys",
        hint=f'name it: by_key([…], column="id"); its columns: {listed(there)}',
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
        Pool(AHEAD_REQUESTS, thread_name_prefix="forebay-keys") as pool,
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
    known: dict[str, Finder],
) -> Rows:
    if isinstance(keys, (str, bytes)):
        raise TypeError("by_key takes a list of keys, not one key: by_key([key])")
    if isinstance(keys, Mapping) or not isinstance(keys, Iterable):
        raise TypeError(f"by_key takes a list of keys, not {keys!r:.100}")
    progress = flag_or_none("progress", progress)
    # Arrays of Arrow give values of their own, and tensors small tensors.
    wanted = keys.to_pylist() if hasattr(keys, "to_pylist") else list(keys)
    wanted = [key if isinstance(key, (str, bytes)) else _plain(key) for key in wanted]
    if len(wanted) > KEYS_MAX:
        raise InvalidRequest(
            f"by_key with {len(wanted):,} keys; at most {KEYS_MAX:,}", hint="ask in several calls"
        )
    name = column_of(of, column)
    if any(key is None for key in wanted):
        raise InvalidRequest("None is not a key", hint="leave out keys that are missing")
    for key in wanted:
        _bytes(key, name)
    shown = of.columns if columns is None else column_names(columns)
    read = shown if name in shown else [*shown, name]
    of._known(read)
    finder = known.get(name)
    if finder is None:
        finder = known[name] = _AtNode.of(of, name, progress) or _Here(index_of(of, name, progress))
    try:
        return finder.rows(of, name, wanted, read)
    except _NotAtNode as e:
        log.info("the keys in column %s are indexed here: %s", name, e)
        here = known[name] = _Here(index_of(of, name, progress))
        return here.rows(of, name, wanted, read)


def _plain(key: Any) -> Any:
    number = whole_number(key)
    return key if number is None else number


class _NotAtNode(Exception):
    """The node cannot look up keys."""


def _missing(of: Dataset[Any], name: str, missing: Sequence[Any]) -> NotFound:
    more = f" (and {len(missing) - 5:,} more)" if len(missing) > 5 else ""
    return NotFound(
        f"{of.name} has no row with {name} {', '.join(map(repr, missing[:5]))}{more}",
        hint="keys are compared exactly, with their type: '17' is neither 17 nor '017'",
    )


class _AtNode:
    """Asks the node."""

    @classmethod
    def of(cls, of: Dataset[Any], name: str, progress: bool | None) -> _AtNode | None:
        """None if the node cannot index the column."""
        bases = of._tree()[0]
        if any(_at_node(base, name) is None for base in bases):
            return None
        total = sum(len(base) for base in bases)
        with Bar(f"reading the keys in column {name}", total, show=progress) as bar:
            before = 0
            for base in bases:
                try:
                    _index(base, name, partial(_told, bar, before, total))
                except _NotAtNode as e:
                    log.info("the keys in column %s are indexed here: %s", name, e)
                    return None
                before += len(base)
                bar.to(before, total)
        return cls()

    def rows(self, of: Dataset[Any], name: str, wanted: Sequence[Any], read: Sequence[str]) -> Rows:
        never = [key for key in wanted if not _may_be(key)]
        if never:
            raise _missing(of, name, never)
        if not of.is_composed and 0 < len(wanted) <= ONE_REQUEST_KEYS:
            column, names = _known(of, name), of._at_node(read)
            ask = partial(_node.take_by_key, of.client, of.id, column, _document(wanted), names)
            # Which key is missing, or whether the node has to open the dataset or to index the
            # column again, shows below; a node of an earlier release takes keys for row numbers.
            with contextlib.suppress(NotFound, InvalidRequest, RangeNotSatisfiable):
                batch, rows = of._same(ask)
                return Rows([of.dressed(batch)], rows)
        return of._take(self._found(of, name, wanted), read)

    def _found(self, of: Dataset[Any], name: str, wanted: Sequence[Any]) -> np.ndarray:
        """The first row of each key."""
        # Each key once: a key may have many rows.
        place: dict[Any, int] = {}
        places = np.array([place.setdefault(_bytes(k, name), len(place)) for k in wanted], np.intp)
        keys = [wanted[i] for i in np.unique(places, return_index=True)[1]]
        first = np.full(len(keys), NO_ROW, np.uint64)
        # One base after the other: a node may hold the index of only one at a time.
        for source, base in enumerate(of._tree()[0]):
            for begin in range(0, len(keys), LOOK_UP_KEYS):
                some = keys[begin : begin + LOOK_UP_KEYS]
                numbers, rows = _look_up(base, name, some, of.is_composed)
                try:
                    rows = of._first_of(source, rows)
                except TooLarge as e:
                    raise _NotAtNode(e.message) from e
                np.minimum.at(first, begin + numbers, rows)
        missing = [keys[i] for i in np.flatnonzero(first == NO_ROW)]
        if missing:
            raise _missing(of, name, missing)
        return first[places]


def _index(base: Dataset[Any], name: str, told: Callable[[dict[str, Any]], None] | None) -> None:
    """Makes the node index a column."""
    column = _known(base, name)
    try:
        base._of_node(partial(_node.index_keys, base.client, base.id, column, told))
    except (Unsupported, TooLarge) as e:
        raise _NotAtNode(e.message) from e


def _look_up(
    base: Dataset[Any], name: str, keys: Sequence[Any], every: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of keys, and rows: the first row of each key, or every row."""
    column = _known(base, name)
    ask = partial(_node.find_keys, base.client, base.id, column, _document(keys), every)
    try:
        for _ in range(base.client.nodes + 1):
            try:
                found = base._same(ask)
                break
            except NotFound:
                # The node was started again, or is another one.
                _index(base, name, None)
        else:
            raise _NotAtNode("the node does not keep the index")
    except Unsupported as e:
        raise _NotAtNode(e.message) from e
    except TooLarge as e:
        if len(keys) < 2:
            raise _NotAtNode(e.message) from e
        half = len(keys) // 2
        parts = [_look_up(base, name, part, every) for part in (keys[:half], keys[half:])]
        numbers = np.concatenate([parts[0][0], parts[1][0] + half])
        return numbers, np.concatenate([parts[0][1], parts[1][1]])
    if every:
        return found[0::2].astype(np.intp), found[1::2]
    return np.arange(len(found), dtype=np.intp), found


class _Here:
    """Looks into an index that was made here."""

    def __init__(self, index: Keys) -> None:
        self.index = index

    def rows(self, of: Dataset[Any], name: str, wanted: Sequence[Any], read: Sequence[str]) -> Rows:
        index = self.index
        hashes = np.array([_hash(key, name) for key in wanted], np.uint64)
        at = np.searchsorted(index.hashes, hashes, "left")
        last = np.searchsorted(index.hashes, hashes, "right")
        while True:
            gone = np.flatnonzero(at >= last)
            if len(gone):
                raise _missing(of, name, [wanted[int(i)] for i in gone])
            rows = of._take(index.rows[at].astype(np.uint64), read)
            same = [
                _bytes(row[name], name) == _bytes(k, name)
                for row, k in zip(rows, wanted, strict=True)
            ]
            wrong = np.flatnonzero(~np.array(same, bool))
            if not len(wrong):
                return rows
            # Another key with the same hash: the next row that has it.
            at[wrong] += 1


Finder = _AtNode | _Here


def _at_node(base: Dataset[Any], name: str) -> str | None:
    """What the node calls a column; None if its values are made here."""
    (column,) = base._at_node([name]) or [name]
    return None if column in {cast for cast, _ in base.dressing.casts} else column


def _known(base: Dataset[Any], name: str) -> str:
    """The same of one that the node has an index for."""
    column = _at_node(base, name)
    assert column is not None
    return column


def _may_be(key: Any) -> bool:
    """Whether a column can have such a key."""
    if isinstance(key, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in key)
    if isinstance(key, (int, np.integer)):
        return -(1 << 63) <= int(key) < 1 << 64
    return True


def _document(keys: Sequence[Any]) -> bytes:
    def of(key: Any) -> Any:
        if isinstance(key, str):
            return key
        if isinstance(key, (int, np.integer)):
            return int(key)
        return {"bytes": base64.b64encode(bytes(key)).decode()}

    return json.dumps([of(key) for key in keys], ensure_ascii=False, separators=(",", ":")).encode()


def _told(bar: Bar, before: int, total: int, so_far: dict[str, Any]) -> None:
    bar.to(before + int(so_far["done"]), total)
