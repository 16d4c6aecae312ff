"""Shards of each format that :meth:`forebay.Dataset.write` writes: rows become pieces of bytes.

An encoder is a pure function of the rows, their positions and its options: the same rows give the
same bytes, with the same versions of the libraries that compress. It keeps no more of a shard than
a few batches (MDS, whose header comes first, keeps a whole shard).
"""

from __future__ import annotations

import importlib
import json
import re
import struct
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._arrow import Column
from ._forebay import crc32c
from .errors import InvalidRequest, SampleFailed
from .rows import Rows

#: Pieces are joined until they have this many bytes.
PIECE_BYTES = 1 << 20
#: Parquet: bytes of a row group, where nobody said how many rows it has.
ROW_GROUP_BYTES = 8 << 20
ROW_GROUP_MAX_ROWS = 1 << 20

NEEDS_ZSTD = 'compression="zstd" needs zstandard (pip install zstandard) or PyArrow'

_INTEGERS = {
    "c": "int8",
    "C": "uint8",
    "s": "int16",
    "S": "uint16",
    "i": "int32",
    "I": "uint32",
    "l": "int64",
    "L": "uint64",
}
_FLOATS = {"e": "float16", "f": "float32", "g": "float64"}
_NUMBERS = {*_INTEGERS.values(), *_FLOATS.values()}
_WHOLE = set(_INTEGERS.values())
_OTHERS = {
    "ti": "interval",
    "+u": "union",
    "+m": "map",
    "n": "null",
}


#: Types of which there are several: of another unit, zone or precision.
_OF_UNITS = {"ts": "timestamp", "td": "date", "tt": "time of day", "tD": "duration"}
_UNITS = {"s": "s", "m": "ms", "u": "us", "n": "ns", "D": "days"}
#: What users call fields and zones, in a kind.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def kind_of(schema: Any) -> str:
    """What a column holds: ``bytes``, ``text``, ``bool``, ``int64``, ``float32``, ``list<…>``,
    ``struct<"field": …>``, ``timestamp<us, "Europe/Berlin">``, …
    """
    if schema.dictionary:
        return kind_of(schema.dictionary.contents)
    form = (schema.format or b"").decode("ascii", "replace")
    children = [schema.children[i].contents for i in range(schema.n_children)]
    if form in ("z", "Z", "vz") or form.startswith("w:"):
        return "bytes"
    if form in ("u", "U", "vu"):
        return "text"
    if form == "b":
        return "bool"
    if form in _INTEGERS:
        return _INTEGERS[form]
    if form in _FLOATS:
        return _FLOATS[form]
    if form.startswith("+w:"):
        return f"list<{kind_of(children[0])}, {form[3:]}>"
    if form in ("+l", "+L", "+vl", "+vL"):
        return f"list<{kind_of(children[0])}>"
    if form == "+r":
        return kind_of(children[1])
    if name := _OF_UNITS.get(form[:2]):
        unit, _, zone = form[2:].partition(":")
        named = _UNITS.get(unit, unit)
        return f"{name}<{named}, {json.dumps(zone)}>" if zone else f"{name}<{named}>"
    if form.startswith("d:"):
        return f"decimal<{form[2:].replace(',', ', ')}>"
    inner = ", ".join(f"{json.dumps((c.name or b'').decode())}: {kind_of(c)}" for c in children)
    if form == "+s":
        return f"struct<{inner}>"
    name = next((name for start, name in _OTHERS.items() if form.startswith(start)), form)
    return f"{name}<{inner}>" if inner else name


_UNIT = re.compile(r"\b(timestamp|date|time of day|duration|decimal)<[^<>]*>")


def of_any_unit(kind: str) -> str:
    """A kind without units, zones and precisions: what formats do not care for that write texts."""
    return _UNIT.sub(r"\1", kind)


def _has(kind: str, *types: str) -> bool:
    """Whether one of the types is in a kind, at any depth."""
    plain = _QUOTED.sub("", kind)
    return any(name in plain for name in types)


def kinds_of(columns: dict[str, Column]) -> dict[str, str]:
    """:func:`kind_of` for each column of a received batch."""
    return {name: kind_of(column._schema) for name, column in columns.items()}


@dataclass(frozen=True)
class Options:
    """What an encoder is made for."""

    kinds: dict[str, str]
    compression: str | None = None
    key: str | None = "__key__"
    row_group_rows: int | None = None
    index: bool = True
    #: The one column is written as it is: lines of JSONL, records of TFRecord.
    raw: bool = False


@dataclass
class Shard:
    """One shard while it is made, and what its encoder found out about it."""

    #: Position of its first row in the order.
    first: int
    rows: int
    #: Position of the row that is being encoded.
    at: int = 0
    #: Rows that were counted as written.
    counted: int = 0
    #: Further objects to write before the shard is whole: the end of the name, and the bytes.
    beside: list[tuple[str, bytes]] = field(default_factory=list)
    #: What the last step needs to know about it.
    notes: dict[str, Any] = field(default_factory=dict)


class Encoder(ABC):
    """Makes shards of one format."""

    name: str
    #: What ``compression=`` may be, besides None.
    compressions: Sequence[str] = ()
    #: Which kinds of columns it holds, for an error.
    holds: str

    def __init__(self, options: Options) -> None:
        self.options = options
        self.check()

    @property
    @abstractmethod
    def extension(self) -> str:
        """What names of shards end with."""

    def check(self) -> None:
        """Raises InvalidRequest if it cannot hold the columns."""
        for name, kind in self.options.kinds.items():
            if not self.can_hold(kind):
                raise InvalidRequest(
                    f"{self.name} cannot hold column {name!r}, which is {kind}",
                    hint=f"it holds {self.holds}: leave the column out with columns=, or write"
                    ' format="parquet"',
                )

    @abstractmethod
    def can_hold(self, kind: str) -> bool:
        """Whether it can hold columns of this kind."""

    @abstractmethod
    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        """The bytes of a shard. ``shard`` tells which, and takes what is found out about it."""

    def finish(self, shards: Sequence[dict[str, Any]]) -> list[tuple[str, bytes]]:
        """Objects to write when all shards are there: names, and bytes. ``shards``: ``name``,
        ``rows``, ``size`` and ``notes`` of each.
        """
        return []


def joined(pieces: Iterable[bytes], least: int = PIECE_BYTES) -> Iterator[bytes]:
    """The same bytes in pieces of at least ``least`` bytes, but for the last."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= least:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _each_row(
    batches: Iterable[Rows],
    shard: Shard,
    rows_of: Callable[[Rows], Iterable[dict[str, Any]]] = iter,
) -> Iterator[dict[str, Any]]:
    shard.at = shard.first
    for rows in batches:
        for row in rows_of(rows):
            yield row
            shard.at += 1


def _bad_row(shard: Shard, why: str, hint: str | None = None) -> SampleFailed:
    error = SampleFailed(f"the row at position {shard.at:,} of the order cannot be written: {why}")
    error.hint = hint
    return error


def level_of(compression: str) -> tuple[str, int | None]:
    """``zstd:7`` is zstd at level 7."""
    name, colon, level = compression.partition(":")
    try:
        return name, int(level) if colon else None
    except ValueError:
        raise InvalidRequest(
            f"compression={compression!r}: {level!r} is not a level", hint='as in "zstd:3"'
        ) from None


#: The highest level of each compression that has levels.
_LEVELS = {"gz": 9, "gzip": 9, "zstd": 22, "brotli": 11, "lz4": 12}


def check_compression(encoder: type[Encoder], compression: str | None) -> str | None:
    """Raises InvalidRequest for what a format does not have; "none" is None."""
    if compression is None or compression == "none":
        return None
    if not isinstance(compression, str):
        raise InvalidRequest(f"compression must be a str or None, not {compression!r}")
    name, level = level_of(compression)
    if name not in encoder.compressions:
        has = ", ".join(encoder.compressions)
        raise InvalidRequest(
            f"{encoder.name} has no compression {name!r}",
            hint=f"it has {has}, or None" if has else "leave it out",
        )
    highest = _LEVELS.get(name, 0)
    if level is not None and not highest:
        raise InvalidRequest(
            f"compression={compression!r}: {name} has no levels", hint=f"write {name!r}"
        )
    if level is not None and not 1 <= level <= highest:
        raise InvalidRequest(
            f"compression={compression!r}: a level of {name} is a number from 1 to {highest}",
            hint=f'as in "{name}:3"',
        )
    return compression


def packer(compression: str) -> tuple[Callable[[bytes], bytes], Callable[[], bytes]]:
    """Functions that compress a piece, and end the stream."""
    name, level = level_of(compression)
    if name == "gz":
        # 31: with gzip's header, which has no name and no time here.
        packing = zlib.compressobj(level or 6, zlib.DEFLATED, 31)
        return packing.compress, packing.flush
    try:
        zstandard = importlib.import_module("zstandard")
        made = zstandard.ZstdCompressor(level=level or 3).compressobj()
        return made.compress, made.flush
    except ImportError:
        pass
    try:
        pa = importlib.import_module("pyarrow")
    except ImportError:
        raise ImportError(NEEDS_ZSTD) from None
    if level is not None:
        # PyArrow's streams have no level.
        raise ImportError(f'compression="{compression}" needs zstandard: pip install zstandard')
    sink = _Sink()
    stream = pa.CompressedOutputStream(pa.PythonFile(sink, "w"), "zstd")

    def compress(piece: bytes) -> bytes:
        stream.write(piece)
        return sink.take()

    def flush() -> bytes:
        stream.close()
        return sink.take()

    return compress, flush


def packed(pieces: Iterable[bytes], compression: str | None) -> Iterator[bytes]:
    """The pieces as one compressed stream."""
    if compression is None:
        yield from pieces
        return
    compress, flush = packer(compression)
    for piece in joined(pieces, 1 << 16):
        if done := compress(piece):
            yield done
    yield flush()


def _whole(data: bytes, compression: str) -> bytes:
    name, level = level_of(compression)
    if name == "gz":
        return b"".join(packed([data], compression))
    try:
        made: bytes = importlib.import_module("zstandard").compress(data, level or 3)
        return made
    except ImportError:
        pass
    try:
        pa = importlib.import_module("pyarrow")
    except ImportError:
        raise ImportError(NEEDS_ZSTD) from None
    return bytes(pa.Codec("zstd", compression_level=level or 3).compress(data))


def _suffix(compression: str | None) -> str:
    return {None: "", "gz": ".gz", "zstd": ".zst"}[
        None if compression is None else level_of(compression)[0]
    ]


class _Sink:
    """A file that keeps what was written until it is taken."""

    closed = False

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._at = 0

    def write(self, data: Any) -> int:
        held = bytes(data)
        self._held.append(held)
        self._at += len(held)
        return len(held)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        data, self._held = b"".join(self._held), []
        return data


# JSON lines


def _jsonable(value: Any) -> Any:
    """What JSON has no type for and a row may hold."""
    if isinstance(value, np.ndarray):  # masked ones too: their tolist gives None
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


class Jsonl(Encoder):
    """One object per line, in the order of the columns."""

    name = "jsonl"
    compressions = ("gz", "zstd")
    holds = "texts, numbers, bits, times, lists and structs, but no bytes"

    @property
    def extension(self) -> str:
        return f".jsonl{_suffix(self.options.compression)}"

    def can_hold(self, kind: str) -> bool:
        return not _has(kind, "bytes", "duration", "interval", "union")

    def _lines(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        if self.options.raw:
            (column,) = self.options.kinds
            for row in _each_row(batches, shard):
                yield row[column].encode() + b"\n"
            return
        encode = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_jsonable
        ).encode
        for row in _each_row(batches, shard, Rows.plain):
            try:
                yield encode(row).encode() + b"\n"
            except ValueError as e:
                hint = "JSON has no NaN and no infinity, and its texts are Unicode"
                raise _bad_row(shard, str(e), hint) from e

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        return packed(self._lines(batches, shard), self.options.compression)


# Tar


_HEADER = struct.pack(
    "100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x",
    b"",
    b"0000644\0",
    b"0000000\0",
    b"0000000\0",
    b"",
    b"00000000000\0",
    b"        ",
    b"0",
    b"",
    b"ustar\x0000",
    b"",
    b"",
    b"0000000\0",
    b"0000000\0",
    b"",
)
_HEADER_SUM = sum(_HEADER)
_MODE_TO_SIZE, _MTIME, _REST = _HEADER[100:124], _HEADER[136:148], _HEADER[156:]
_ZEROS = bytes(512)


def tar_header(name: bytes, size: int) -> bytes:
    """The header of a plain file, from the epoch, of nobody."""
    if len(name) > 100 or size >= 1 << 33 or not name.isascii():
        info = tarfile.TarInfo(name.decode())
        info.size = size
        return info.tobuf(tarfile.PAX_FORMAT)
    length = b"%011o\0" % size
    checksum = _HEADER_SUM + sum(name) + sum(length)
    return b"".join(
        (name.ljust(100, b"\0"), _MODE_TO_SIZE, length, _MTIME, b"%06o\0 " % checksum, _REST)
    )


def _is_meta(member: bytes) -> bool:
    """Whether a name, or its first directory, is ``__like this__``."""
    if b"__" not in member:
        return False
    parts = (member.partition(b"/")[0], member.rpartition(b"/")[2])
    return any(len(p) >= 4 and p.startswith(b"__") and p.endswith(b"__") for p in parts)


class Tar(Encoder):
    """Samples as WebDataset has them: a member ``key.column`` for each column of a row. A value
    that is missing has no member.
    """

    name = "tar"
    compressions = ("gz",)
    holds = "bytes, texts, numbers and bits, each as a member"

    @property
    def extension(self) -> str:
        return f".tar{_suffix(self.options.compression)}"

    def can_hold(self, kind: str) -> bool:
        return kind in ("bytes", "text", "bool") or kind in _NUMBERS

    def check(self) -> None:
        key = self.options.key
        # Samples that are numbered have no other name.
        names = {key, "__key__"} if key is None else {key}
        self._columns = [name for name in self.options.kinds if name not in names]
        if key in self.options.kinds and self.options.kinds[key] not in ("text", "bytes"):
            raise InvalidRequest(
                f"column {key!r} is {self.options.kinds[key]}, and keys are texts",
                hint="key=None numbers the samples",
            )
        super().check()
        if not self._columns:
            raise InvalidRequest("a sample needs a column besides its key")
        for name in self._columns:
            if not name or "/" in name or "\0" in name or name.startswith("."):
                raise InvalidRequest(
                    f"column {name!r} cannot be the end of a member's name: key.column",
                    hint="leave it out with columns=",
                )
            if name.lower() == "__key__":
                raise InvalidRequest(
                    f"column {name!r} would be a member of the sample, and readers call the name of"
                    " the sample that",
                    hint="key=, or leave it out with columns=",
                )
        folded = {name.lower() for name in self._columns}
        if len(folded) < len(self._columns):
            raise InvalidRequest(
                "two columns differ in the case of letters only, and readers of WebDataset's tars"
                " fold that",
                hint="leave one out with columns=",
            )
        self._ends = {name: f".{name}".encode() for name in self._columns}

    def _key(self, row: dict[str, Any], shard: Shard) -> bytes:
        name = self.options.key
        if name is None or name not in row:
            return b"%09d" % shard.at
        given = row[name]
        if given is None:
            raise _bad_row(shard, "its key is missing", "key=None numbers the samples")
        key = given.encode() if isinstance(given, str) else bytes(given)
        try:
            key.decode()
        except UnicodeDecodeError as e:
            raise _bad_row(
                shard, f"its key {key!r} is not UTF-8", "key=None numbers the samples"
            ) from e
        base = key.rpartition(b"/")[2]
        if not base or b"." in base or b"\0" in key:
            raise _bad_row(
                shard,
                f"its key {given!r} cannot begin a member's name: key.column",
                "key=None numbers the samples",
            )
        return key

    def _members(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        before = None
        for row in _each_row(batches, shard):
            key = self._key(row, shard)
            if key == before:
                raise _bad_row(
                    shard,
                    f"its key {key.decode(errors='replace')!r} is that of the row before, and"
                    " readers would take both for one sample",
                    "key=None numbers the samples",
                )
            before, empty = key, True
            for name, end in self._ends.items():
                value = row[name]
                if value is None:
                    continue
                if isinstance(value, str):
                    value = value.encode()
                elif not isinstance(value, memoryview):
                    value = (
                        str(value).lower() if isinstance(value, bool) else repr(value)
                    ).encode()
                size, member = len(value), key + end
                if _is_meta(member):
                    raise _bad_row(
                        shard,
                        f"readers of WebDataset's tars skip what is called {member.decode()!r}",
                        "key=None numbers the samples, and columns= leaves a column out",
                    )
                yield tar_header(member, size)
                yield value
                if size % 512:
                    yield _ZEROS[size % 512 :]
                empty = False
            if empty:
                raise _bad_row(shard, "none of its columns has a value, so it would be no sample")
        # The end: two blocks of zeros, and tar's own record of 20 blocks is not needed.
        yield _ZEROS * 2

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        return packed(self._members(batches, shard), self.options.compression)


# Parquet


class Parquet(Encoder):
    """Parquet, by PyArrow."""

    name = "parquet"
    compressions = ("zstd", "snappy", "gzip", "brotli", "lz4")
    holds = "what Arrow holds, but unions"

    @property
    def extension(self) -> str:
        return ".parquet"

    def can_hold(self, kind: str) -> bool:
        return not _has(kind, "union", "interval")

    def check(self) -> None:
        super().check()
        try:
            self._pa = importlib.import_module("pyarrow")
            self._pq = importlib.import_module("pyarrow.parquet")
        except ImportError as e:
            raise ImportError('format="parquet" needs PyArrow: pip install pyarrow') from e

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        pa, group = self._pa, self.options.row_group_rows or ROW_GROUP_MAX_ROWS
        compression, level = "none", None
        if self.options.compression is not None:
            compression, level = level_of(self.options.compression)
        sink, writer = _Sink(), None
        held: list[Any] = []
        rows = 0
        shard.at = shard.first
        for received in batches:
            batch = received.arrow()
            if writer is None:
                # Nothing of what the files said besides the types: it would be wrong now.
                schema = batch.schema.remove_metadata()
                writer = self._pq.ParquetWriter(
                    pa.PythonFile(sink, "w"),
                    schema,
                    compression=compression,
                    compression_level=level,
                )
            if batch.schema.names != schema.names:
                raise InvalidRequest(
                    f"rows of one shard have different columns: {', '.join(schema.names)} and"
                    f" {', '.join(batch.schema.names)}",
                    hint="bring them into one order by select_columns",
                )
            # Parts of a mix may differ in what they say besides names and types.
            held.append(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            rows += len(batch)
            while rows >= group:
                table = pa.Table.from_batches(held)
                writer.write_table(table.slice(0, group), row_group_size=group)
                held, rows = table.slice(group).to_batches(), rows - group
                yield sink.take()
            shard.at += len(batch)
        if writer is not None:
            if rows:
                writer.write_table(pa.Table.from_batches(held), row_group_size=group)
            writer.close()
            yield sink.take()


# TFRecord


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varints(values: np.ndarray) -> bytes:
    """Unsigned numbers of 64 bits, one after the other."""
    if len(values) < 8:
        return b"".join(map(_varint, values.tolist()))
    # Seven bits a byte, the lowest first; all bytes but a number's last have the eighth bit.
    width = max(1, -(-int(values.max()).bit_length() // 7))
    parts = values[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    needed = parts != 0
    needed[:, 0] = True
    out = (parts & np.uint64(0x7F)).astype(np.uint8)
    out[:, :-1] |= needed[:, 1:].astype(np.uint8) << 7
    return out[needed].tobytes()


def _field(number: int, data: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


def tf_frame(record: bytes) -> bytes:
    """A record with its length and checksums."""
    length = struct.pack("<Q", len(record))
    return b"".join((length, _masked(length), record, _masked(record)))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class TfRecord(Encoder):
    """Records that are ``tf.train.Example``, with a file of offsets beside each."""

    name = "tfrecord"
    compressions = ("gz",)
    holds = "bytes, texts, whole numbers and 32-bit numbers, and lists of these"

    @property
    def extension(self) -> str:
        return f".tfrecord{_suffix(self.options.compression)}"

    def can_hold(self, kind: str) -> bool:
        inner = kind.removeprefix("list<").removesuffix(">").split(",")[0]
        return inner in ("bytes", "text", "bool", "float16", "float32") or inner in _WHOLE

    def check(self) -> None:
        for name, kind in self.options.kinds.items():
            if "float64" in kind and self.can_hold(kind.replace("float64", "float32")):
                raise InvalidRequest(
                    f"tf.train.Example has numbers of 32 bits: column {name!r}, which is {kind},"
                    " would lose digits",
                    hint="leave it out with columns=, or open the dataset with a schema= that has"
                    " 32 bits",
                )
        super().check()
        self._kinds = {
            name: kind.removeprefix("list<").removesuffix(">").split(",")[0]
            for name, kind in self.options.kinds.items()
        }

    def _values(self, kind: str, values: Any) -> bytes:
        """A Feature of these values."""
        if kind in ("bytes", "text"):
            parts = (v.encode() if isinstance(v, str) else bytes(v) for v in values)
            return _field(1, b"".join(_field(1, v) for v in parts))
        if kind.startswith("float"):
            return _field(2, _field(1, np.asarray(values, "<f4").tobytes()))
        numbers = np.asarray(values)
        if kind == "uint64" and len(numbers) and int(numbers.max()) >= 1 << 63:
            raise ValueError("a number of 2**63 or more, and features have signed 64 bits")
        return _field(3, _field(1, _varints(numbers.astype(np.int64).view(np.uint64))))

    def _example(self, row: dict[str, Any], shard: Shard) -> bytes:
        features = []
        for name, kind in self._kinds.items():
            value = row[name]
            if value is None:
                continue
            several = isinstance(value, np.ndarray)
            if several and (isinstance(value, np.ma.MaskedArray) or any(v is None for v in value)):
                raise _bad_row(
                    shard, f"the list in column {name!r} has missing items, which features cannot"
                )
            try:
                feature = self._values(kind, value if several else (value,))
            except ValueError as e:
                raise _bad_row(shard, f"column {name!r}: {e}") from e
            features.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
        return _field(1, b"".join(features))

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        return packed(self._records(batches, shard), self.options.compression)

    def _records(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        index, at = [], 0
        raw = next(iter(self.options.kinds)) if self.options.raw else None
        for row in _each_row(batches, shard):
            framed = tf_frame(bytes(row[raw]) if raw else self._example(row, shard))
            index.append(f"{at} {len(framed)}\n")
            at += len(framed)
            yield framed
        if self.options.index and self.options.compression is None:
            shard.beside.append((".idx", "".join(index).encode()))


# MDS


class Mds(Encoder):
    """Shards of MosaicML's Streaming, and their ``index.json``."""

    name = "mds"
    compressions = ("zstd", "gz")
    holds = "bytes, texts, numbers and bits, lists of numbers, and what JSON holds"

    @property
    def extension(self) -> str:
        packs = self.options.compression
        return ".mds" if packs is None else f".mds.{level_of(packs)[0]}"

    def can_hold(self, kind: str) -> bool:
        if kind in ("bytes", "text", "bool") or kind in _NUMBERS:
            return True
        return kind.startswith(("list<", "struct<", "map")) and not _has(
            kind, "bytes", "duration", "interval", "union", "timestamp", "date", "time"
        )

    def _encoding(self, kind: str) -> tuple[str, int | None]:
        """MDS's name of an encoding, and the bytes of a value if all have as many."""
        if kind in ("bytes", "text"):
            return ("bytes" if kind == "bytes" else "str"), None
        if kind == "bool":
            return "uint8", 1
        if kind in _NUMBERS:
            return kind, np.dtype(kind).itemsize
        inner, _, size = kind.removeprefix("list<").removesuffix(">").partition(", ")
        if inner in _NUMBERS and kind.startswith("list<"):
            if size and int(size) > 0:
                return f"ndarray:{inner}:{size}", int(size) * np.dtype(inner).itemsize
            if not size:
                return f"ndarray:{inner}", None
        return "json", None

    def check(self) -> None:
        super().check()
        names = sorted(self.options.kinds)
        encodings = [self._encoding(self.options.kinds[name]) for name in names]
        self._columns = [(name, *e) for name, e in zip(names, encodings, strict=True)]
        packs = self.options.compression
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": packs if packs is None or packs.startswith("zstd") else "gz",
            "hashes": [],
            "size_limit": None,
            "column_names": names,
            "column_encodings": [e for _, e, _ in self._columns],
            "column_sizes": [size for _, _, size in self._columns],
        }
        self._header = json.dumps(self._config, sort_keys=True).encode()

    def _datum(self, encoding: str, value: Any) -> bytes:
        if encoding == "bytes":
            return bytes(value)
        if encoding == "str":
            return str(value).encode()
        if encoding == "json":
            return json.dumps(value, default=_jsonable, allow_nan=False).encode()
        if not encoding.startswith("ndarray"):
            return np.dtype(encoding).type(value).tobytes()
        _, dtype, *size = encoding.split(":")
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError("its list has missing items")
        data = np.asarray(value, dtype).tobytes()
        if size:
            return data
        # One axis, whose length takes 1, 2, 4 or 8 bytes.
        length = len(value)
        if not length:
            raise ValueError("its list is empty, which MDS's arrays cannot be")
        wide = next(i for i in range(4) if length < 1 << (8 << i))
        return bytes((1 << 2 | wide,)) + length.to_bytes(1 << wide, "little") + data

    def _sample(self, row: dict[str, Any], shard: Shard) -> bytes:
        sizes, data = [], []
        for name, encoding, size in self._columns:
            if row[name] is None:
                raise _bad_row(
                    shard,
                    f"column {name!r} has no value there, and MDS has no missing values",
                    "leave the column out with columns=",
                )
            try:
                datum = self._datum(encoding, row[name])
            except ValueError as e:
                raise _bad_row(shard, f"column {name!r}: {e}") from e
            data.append(datum)
            if size is None:
                sizes.append(len(datum))
        return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data)

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        samples = [self._sample(row, shard) for row in _each_row(batches, shard)]
        offsets = np.zeros(len(samples) + 1, np.uint64)
        np.cumsum([len(s) for s in samples], out=offsets[1:])
        offsets += 4 + 4 * len(offsets) + len(self._header)
        if offsets[-1] >= 1 << 32:
            raise InvalidRequest(
                f"a shard of MDS has at most 4 GiB, and one has {int(offsets[-1]):,} bytes",
                hint="give a smaller shard_size= or shard_rows=",
            )
        raw = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + self._header
        shard.notes["raw"] = int(offsets[-1])
        if self.options.compression is not None:
            shard.beside.append((".json", json.dumps(shard.notes).encode()))
        if self.options.compression is None:
            return _drained([raw], samples)
        # At once, so that a frame of zstd says how long its contents are: the library needs that.
        return iter([_whole(b"".join([raw, *samples]), self.options.compression)])

    def finish(self, shards: Sequence[dict[str, Any]]) -> list[tuple[str, bytes]]:
        entries = []
        for shard in shards:
            file = {"basename": shard["name"], "bytes": shard["size"], "hashes": {}}
            entry = {**self._config, "samples": shard["rows"], "raw_data": file, "zip_data": None}
            if self.options.compression is not None:
                stem = shard["name"].rpartition(".")[0]
                raw = {"basename": stem, "bytes": shard["notes"]["raw"], "hashes": {}}
                entry |= {"raw_data": raw, "zip_data": file}
            entries.append(entry)
        index = {"version": 2, "shards": entries}
        return [("index.json", json.dumps(index, sort_keys=True).encode())]


def _drained(first: list[bytes], rest: list[bytes]) -> Iterator[bytes]:
    """Pieces of two lists, which are dropped as they go."""
    yield from first
    rest.reverse()
    while rest:
        yield rest.pop()


ENCODERS: dict[str, type[Encoder]] = {
    encoder.name: encoder for encoder in (Tar, Parquet, TfRecord, Mds, Jsonl)
}
