"""Shards of each format that :meth:`forebay.Dataset.write` writes: rows become pieces of bytes.

An encoder is a pure function of the rows, their positions and its options: the same rows give the
same bytes, with the same versions of the libraries that compress. It keeps no more of a shard than
a few batches (MDS, whose header comes first, keeps a whole shard, and TFRecord its index).
"""

from __future__ import annotations

import bz2
import functools
import importlib
import io
import json
import re
import struct
import tarfile
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._arrow import FEATURES, JSON, TENSORS, Column, Tensor, extension_of, tensor_of
from ._forebay import crc32c
from ._options import HANDLED, MDS_BYTES_MAX, hash_of
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
#: Kinds whose values are bytes or texts.
_TEXTS = ("bytes", "text", "json")
_WHOLE = set(_INTEGERS.values())
_OTHERS = {
    "ti": "interval",
    "+u": "union",
    "n": "null",
}


#: Types of which there are several: of another unit, zone or precision.
_OF_UNITS = {"ts": "timestamp", "td": "date", "tt": "time of day", "tD": "duration"}
_UNITS = {"s": "s", "m": "ms", "u": "us", "n": "ns", "D": "days"}
#: What users call fields and zones, in a kind.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def kind_of(schema: Any, as_stored: bool = False) -> str:
    """What a column holds: ``bytes``, ``text``, ``json`` (texts that are JSON), ``bool``,
    ``int64``, ``float32``, ``list<…>``, ``struct<"field": …>``, ``map<text, int64>``,
    ``timestamp<us, "Europe/Berlin">``, ``tensor<float32, 2, 3>``, … ``as_stored``: tensors are the
    lists, and JSON the texts, that they are stored as.
    """
    of = functools.partial(kind_of, as_stored=as_stored)
    if schema.dictionary:
        return of(schema.dictionary.contents)
    form = (schema.format or b"").decode("ascii", "replace")
    children = [schema.children[i].contents for i in range(schema.n_children)]
    if form in ("z", "Z", "vz") or form.startswith("w:"):
        return "bytes"
    if form in ("u", "U", "vu"):
        return "json" if not as_stored and extension_of(schema) == JSON else "text"
    if form == "b":
        return "bool"
    if form in _INTEGERS:
        return _INTEGERS[form]
    if form in _FLOATS:
        return _FLOATS[form]
    if form.startswith("+w:") or form in ("+l", "+L", "+vl", "+vL"):
        size = f", {form[3:]}" if form.startswith("+w:") else ""
        tensor = None if as_stored else _kind_of_tensor(schema, children[0])
        return tensor or f"list<{of(children[0])}{size}>"
    if form == "+r":
        return of(children[1])
    if name := _OF_UNITS.get(form[:2]):
        unit, _, zone = form[2:].partition(":")
        named = _UNITS.get(unit, unit)
        return f"{name}<{named}, {json.dumps(zone)}>" if zone else f"{name}<{named}>"
    if form.startswith("d:"):
        return f"decimal<{form[2:].replace(',', ', ')}>"
    if form == "+m":
        # What entries, keys and values are called is up to who wrote them.
        entries = children[0]
        pair = ", ".join(of(entries.children[i].contents) for i in range(entries.n_children))
        return f"map<{pair}>"
    inner = ", ".join(f"{json.dumps((c.name or b'').decode())}: {of(c)}" for c in children)
    if form == "+s":
        return f"struct<{inner}>"
    name = next((name for start, name in _OTHERS.items() if form.startswith(start)), form)
    return f"{name}<{inner}>" if inner else name


def _kind_of_tensor(schema: Any, item: Any) -> str | None:
    """The kind of lists that are arrays of several axes; None for others."""
    if extension_of(schema) not in TENSORS:
        return None
    tensor = tensor_of(schema)
    if tensor is None:
        return f"tensor of {UNKNOWN}<{kind_of(item)}>"
    if len(tensor.stored) < 2:
        return None  # A list says all of it.
    axes = ", ".join(map(str, tensor.stored))
    is_permuted = tensor.order != tuple(range(len(tensor.order)))
    more = f", permuted {' '.join(map(str, tensor.order))}" if is_permuted else ""
    return f"tensor<{kind_of(item)}, {axes}{more}>"


#: In the kind of a tensor, where its type does not say its shape in a way that is known here.
UNKNOWN = "unknown shape"
_TENSOR = re.compile(r"tensor<(.+?)((?:, \d+)+)(?:, permuted (\d+(?: \d+)*))?>")


def _tensor_in(kind: str) -> tuple[str, Tensor] | None:
    """What a tensor of this kind holds, and its shape; None for other kinds."""
    found = _TENSOR.fullmatch(kind)
    if not found:
        return None
    stored = tuple(map(int, found[2].removeprefix(", ").split(", ")))
    order = range(len(stored)) if found[3] is None else map(int, found[3].split())
    return found[1], Tensor(stored, tuple(order))


_UNIT = re.compile(r"\b(timestamp|date|time of day|duration|decimal)<[^<>]*>")


def of_any_unit(kind: str) -> str:
    """A kind without units, zones and precisions: what formats do not care for that write texts."""
    return _UNIT.sub(r"\1", kind)


def told_apart(kinds: dict[str, str], format: str) -> dict[str, str]:
    """Kinds of columns, as far as a format tells them apart."""
    if format == Parquet.name:
        return kinds
    kinds = {name: of_any_unit(kind) for name, kind in kinds.items()}
    # These have texts, and nothing says which of them are JSON. Lists in tars become JSON.
    texts = {Tar.name: "^()json$", TfRecord.name: r"^(list<)?json\b"}.get(format)
    if texts is None:
        return kinds
    return {name: re.sub(texts, r"\1text", kind) for name, kind in kinds.items()}


def _has(kind: str, *types: str) -> bool:
    """Whether one of the types is in a kind, at any depth."""
    plain = _QUOTED.sub("", kind)
    return any(name in plain for name in types)


def _needs_plain(kind: str) -> bool:
    """Whether values of a kind become JSON by way of :meth:`Rows.plain`: those with JSON in them,
    and lists with lists of a fixed size, of which an array does not say that one is missing as a
    whole.
    """
    types = _QUOTED.sub("", kind)
    return "json" in types or ("list<list<" in types and re.search(r", \d+>", types) is not None)


def kinds_of(columns: dict[str, Column], as_stored: bool = False) -> dict[str, str]:
    """:func:`kind_of` for each column of a received batch."""
    return {name: kind_of(column._schema, as_stored) for name, column in columns.items()}


@dataclass(frozen=True)
class Options:
    """What an encoder is made for."""

    kinds: dict[str, str]
    #: ``"zstd:7"``; of Parquet also one for each of some columns.
    compression: str | Mapping[str, str] | None = None
    key: str | None = "__key__"
    row_group_rows: int | None = None
    index: bool = True
    #: The one column is written as it is: lines of JSONL, records of TFRecord.
    raw: bool = False
    #: No rows, with their columns, of each dataset that is written, by its name: Parquet has one
    #: schema for all.
    looked_at: Sequence[tuple[str, Rows]] = ()
    #: What Hugging Face's ``datasets`` said of columns in the files: Parquet says so too.
    features: bytes | None = None
    #: The others, by their names in :mod:`forebay._options`.
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def packs(self) -> str | None:
        """The compression of whole shards."""
        assert self.compression is None or isinstance(self.compression, str)
        return self.compression


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
    beside: list[tuple[str, bytes | bytearray]] = field(default_factory=list)
    #: What the last step needs to know about it.
    notes: dict[str, Any] = field(default_factory=dict)


class Encoder(ABC):
    """Makes shards of one format."""

    name: str
    #: What ``compression=`` may be, besides None.
    compressions: Sequence[str] = ()
    #: Whether columns are compressed, rather than shards.
    is_by_column = False
    #: Which kinds of columns it holds, for an error.
    holds: str
    #: Columns of which :meth:`_rows` has the values of :meth:`Rows.plain` (:func:`_needs_plain`).
    _plain: Sequence[str] = ()

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
            if not self.can_hold_column(name, kind):
                raise self._cannot_hold(name, kind)

    def _cannot_hold(self, name: str, kind: str) -> InvalidRequest:
        other = "" if self.name == Parquet.name else ', or write format="parquet"'
        return InvalidRequest(
            f"{self.name} cannot hold column {name!r}, which is {kind}",
            hint=f"it holds {self.holds}: leave the column out with columns={other}",
        )

    @abstractmethod
    def can_hold(self, kind: str) -> bool:
        """Whether it can hold columns of this kind."""

    def can_hold_column(self, name: str, kind: str) -> bool:
        """Whether it can hold this column."""
        return self.can_hold(kind)

    def _rows(self, batches: Iterable[Rows], shard: Shard) -> Iterator[dict[str, Any]]:
        """The rows, with their tensors in shape, and with what becomes JSON as that."""
        kinds = self.options.kinds
        tensors = {name: of[1] for name in kinds if (of := _tensor_in(kinds[name]))}
        for row in _each_row(batches, shard, self._with_plain if self._plain else iter):
            for name, tensor in tensors.items():
                if row[name] is not None:
                    try:
                        row[name] = tensor.shaped(row[name])
                    except ValueError as e:
                        raise _bad_row(shard, f"the tensor in column {name!r}: {e}") from e
            yield row

    def _with_plain(self, rows: Rows) -> Iterator[dict[str, Any]]:
        for row, plain in zip(rows, rows.plain(), strict=True):
            yield {**row, **{name: plain[name] for name in self._plain}}

    @property
    def keeps_notes(self) -> bool:
        """Whether what is found out about a shard is needed at the end."""
        return False

    def _check_columns(self, option: str, names: Iterable[str]) -> None:
        """Raises InvalidRequest if an option names a column that is not written."""
        for name in names:
            if not any(name == c or name.startswith(f"{c}.") for c in self.options.kinds):
                raise InvalidRequest(
                    f"{option}= names {name!r}, which is not among the columns to write",
                    hint=f"the columns are {', '.join(self.options.kinds)}",
                )

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
        first = shard.at
        try:
            for row in rows_of(rows):
                yield row
                shard.at += 1
        except InvalidRequest:
            # Columns are taken apart as a whole: which row has it, only each row alone says.
            for number in range(len(rows)):
                alone = rows[number : number + 1]
                try:
                    next(iter(rows_of(Rows([alone.arrow()], alone.ids))))
                except InvalidRequest as e:
                    shard.at = first + number
                    raise _bad_row(shard, e.message, e.hint) from e
            raise


def _bad_row(shard: Shard, why: str, hint: str | None = None) -> SampleFailed:
    error = BadRow(f"the row at position {shard.at:,} of the order cannot be written: {why}")
    error.why, error.hint = why, hint
    return error


class BadRow(SampleFailed):
    """A row that a format, or what was asked of it, does not hold."""

    #: Without which row it is.
    why: str


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
_LEVELS = {
    "gz": 9, "gzip": 9, "zlib": 9, "zstd": 22, "brotli": 11, "br": 11, "lz4": 12, "bz2": 9,
}  # fmt: skip
#: Other names of the same.
_ALIASES = {"gzip": "gz", "gz": "gzip", "lz4_raw": "lz4"}


def check_compression(
    encoder: type[Encoder], compression: Any, level: Any = None
) -> str | dict[str, str] | None:
    """What ``compression=`` and ``compression_level=`` say together: ``"zstd:7"``, or for Parquet
    one for each of some columns. "none" is None.

    Raises:
        InvalidRequest, TypeError: The format has no such compression, or it has no such level.
    """
    if isinstance(compression, Mapping):
        if not compression:
            raise InvalidRequest("compression is an empty dict", hint="leave it out for none")
        if not encoder.is_by_column:
            raise InvalidRequest(
                f"{encoder.name} has one compression for all columns, not {dict(compression)!r}",
                hint='a dict by column is for format="parquet"',
            )
        levels = level if isinstance(level, Mapping) else dict.fromkeys(compression, level)
        for column in levels:
            if column not in compression:
                raise InvalidRequest(
                    f"compression_level= names {column!r}, and compression= does not",
                    hint="give both for the same columns",
                )
        found = {}
        for column, of in compression.items():
            plain = _one_compression(encoder, of, f"compression of column {column!r}")
            given = None if plain is None and level is levels.get(column) else levels.get(column)
            found[column] = _at_level(plain, given) or "none"
        return found
    plain = _one_compression(encoder, compression, "compression")
    if not isinstance(level, Mapping):
        return _at_level(plain, level)
    if not encoder.is_by_column:
        raise InvalidRequest(
            f"{encoder.name} has one compression_level for all columns, not {dict(level)!r}",
            hint='a dict by column is for format="parquet"',
        )
    for of in level.values():
        _at_level(plain, of)
    return plain


def _one_compression(encoder: type[Encoder], compression: Any, what: str) -> str | None:
    if compression is None:
        return None
    if not isinstance(compression, str):
        raise InvalidRequest(f"{what} must be a str or None, not {compression!r}")
    compression = compression.lower()
    if compression == "none":
        return None
    name, level = level_of(compression)
    if name not in encoder.compressions and _ALIASES.get(name) in encoder.compressions:
        name = _ALIASES[name]
        compression = name if level is None else f"{name}:{level}"
    if name not in encoder.compressions:
        has = ", ".join(encoder.compressions)
        raise InvalidRequest(
            f"{encoder.name} has no compression {name!r}",
            hint=f"it has {has}, or None" if has else "leave it out",
        )
    highest = _LEVELS.get(name, 0)
    if level is not None and not highest:
        raise InvalidRequest(f"{what} is {compression!r}: {name} has no levels", hint=f"{name!r}")
    if level is not None and not 1 <= level <= highest:
        raise InvalidRequest(
            f"{what} is {compression!r}: a level of {name} is a number from 1 to {highest}",
            hint=f'as in "{name}:3"',
        )
    return compression


def _at_level(compression: str | None, level: int | None) -> str | None:
    """A compression with the level that ``compression_level=`` gives it."""
    if level is None:
        return compression
    if compression is None:
        raise InvalidRequest(
            f"compression_level is {level} without a compression",
            hint='give compression="zstd" too',
        )
    name, given = level_of(compression)
    highest = _LEVELS.get(name, 0)
    if given is not None:
        raise InvalidRequest(
            f"compression={compression!r} and compression_level={level} both say it"
        )
    if not 1 <= level <= highest:
        levels = f"has levels from 1 to {highest}" if highest else "has no levels"
        raise InvalidRequest(f"compression_level is {level}: {name} {levels}")
    return f"{name}:{level}"


def packer(
    compression: str,
) -> tuple[Callable[[bytes | bytearray], bytes], Callable[[], bytes]]:
    """Functions that compress a piece, and end the stream."""
    name, level = level_of(compression)
    if name in ("gz", "zlib"):
        # 31: with gzip's header, which has no name and no time here. 15: with zlib's.
        packing = zlib.compressobj(level or 6, zlib.DEFLATED, 31 if name == "gz" else 15)
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

    def compress(piece: bytes | bytearray) -> bytes:
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


def _whole(data: bytes | bytearray, compression: str) -> bytes:
    name, level = level_of(compression)
    if name == "gz":
        compress, flush = packer(compression)
        return compress(data) + flush()
    if name == "bz2":
        return bz2.compress(data, level or 9)
    if name in ("br", "snappy"):
        try:
            pa = importlib.import_module("pyarrow")
        except ImportError:
            raise ImportError(f'compression="{name}" needs PyArrow: pip install pyarrow') from None
        codec = pa.Codec("snappy") if name == "snappy" else pa.Codec("brotli", level or 11)
        return bytes(codec.compress(data))
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
    return {None: "", "gz": ".gz", "zstd": ".zst", "zlib": ".zlib"}[
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
        return f".jsonl{_suffix(self.options.packs)}"

    def can_hold(self, kind: str) -> bool:
        return not _has(kind, "bytes", "duration", "interval", "union", UNKNOWN)

    def check(self) -> None:
        super().check()
        more = self.options.more
        if self.options.raw and more.keys() & {"ensure_ascii", "sort_keys"}:
            raise InvalidRequest(
                "ensure_ascii= and sort_keys= do not apply to lines, which are written as they are",
                hint="leave them out, or choose other columns than the line",
            )

    def _lines(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        if self.options.raw:
            (column,) = self.options.kinds
            for row in _each_row(batches, shard):
                yield row[column].encode() + b"\n"
            return
        encode = json.JSONEncoder(
            ensure_ascii=self.options.more.get("ensure_ascii", False),
            sort_keys=self.options.more.get("sort_keys", False),
            allow_nan=False,
            separators=(",", ":"),
            default=_jsonable,
        ).encode
        for row in _each_row(batches, shard, Rows.plain):
            try:
                line = encode(row).encode()
            except (ValueError, RecursionError) as e:
                raise self._refused(encode, row, shard, e) from e
            yield line + b"\n"

    def _refused(
        self, encode: Callable[[Any], str], row: dict[str, Any], shard: Shard, why: Exception
    ) -> SampleFailed:
        """The error of a row, with the first column whose value JSON does not hold."""
        hint = "JSON has no NaN and no infinity, and its texts are Unicode"
        for name, value in row.items():
            try:
                encode(value).encode()
            except (ValueError, RecursionError) as e:
                return _bad_row(shard, f"column {name!r}: {e}", hint)
        return _bad_row(shard, str(why), hint)

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        return packed(self._lines(batches, shard), self.options.packs)


# Tar


_ZEROS = bytes(512)


class TarHeaders:
    """Makes the headers of plain files, which are all of one mode, time and owner.

    Args:
        mode: Permissions.
        mtime: Seconds since 1970.
        user, group: Names, as ASCII, of at most 31 characters.
    """

    def __init__(self, mode: int = 0o644, mtime: int = 0, user: str = "", group: str = "") -> None:
        self._given = {"mode": mode, "mtime": mtime, "uname": user, "gname": group}
        header = struct.pack(
            "100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x",
            b"",
            b"%07o\0" % mode,
            b"0000000\0",
            b"0000000\0",
            b"",
            b"%011o\0" % mtime,
            b"        ",
            b"0",
            b"",
            b"ustar\x0000",
            user.encode(),
            group.encode(),
            b"0000000\0",
            b"0000000\0",
            b"",
        )
        self._sum = sum(header)
        self._mode_to_size, self._mtime, self._rest = header[100:124], header[136:148], header[156:]

    def __call__(self, name: bytes, size: int) -> bytes:
        if len(name) > 100 or size >= 1 << 33 or not name.isascii():
            info = tarfile.TarInfo(name.decode())
            info.size = size
            for field_name, value in self._given.items():
                setattr(info, field_name, value)
            return info.tobuf(tarfile.PAX_FORMAT)
        length = b"%011o\0" % size
        checksum = self._sum + sum(name) + sum(length)
        return b"".join(
            (
                name.ljust(100, b"\0"),
                self._mode_to_size,
                length,
                self._mtime,
                b"%06o\0 " % checksum,
                self._rest,
            )
        )


def _is_meta(member: bytes) -> bool:
    """Whether a name, or its first directory, is ``__like this__``."""
    if b"__" not in member:
        return False
    parts = (member.partition(b"/")[0], member.rpartition(b"/")[2])
    return any(len(p) >= 4 and p.startswith(b"__") and p.endswith(b"__") for p in parts)


#: Names that say something else of a sample to readers of WebDataset's tars.
_OF_READERS = {
    "__key__": "the name of the sample",
    "__url__": "the tar that it is from",
    "__local_path__": "the file that its tar is kept in",
    "__bad__": "the mark of one to leave out",
}


def _bad_names(names: Sequence[str]) -> str | None:
    """Why one of some columns cannot be a member of a sample; None if all can."""
    for name in names:
        if not name or "/" in name or "\0" in name or name.startswith("."):
            return f"column {name!r} cannot be the end of a member's name: key.column"
        if known := _OF_READERS.get(name.lower()):
            return (
                f"column {name!r} would be a member of the sample, and readers of WebDataset's"
                f" tars take what is called that for {known}"
            )
    if len({name.lower() for name in names}) < len(names):
        return (
            "two columns differ in the case of letters only, and readers of WebDataset's tars"
            " fold that"
        )
    return None


def _end_of(name: str) -> str:
    """The extension that says how readers decode a column."""
    return name.rpartition(".")[2].lower()


def _numbers_of(kind: str) -> str | None:
    """What a list, lists of lists, or a tensor of numbers is made of; None for any other kind."""
    if tensor := _tensor_in(kind):
        return tensor[0] if tensor[0] in _NUMBERS else None
    found = re.fullmatch(r"(?:list<)+(\w+)(?:, \d+|>)*", kind)
    return found[1] if found and found[1] in _NUMBERS else None


def _is_plain(kind: str) -> bool:
    """Whether JSON holds it, as :func:`_jsonable` has it: of tensors, those of known shape, which
    are in nothing else.
    """
    if tensor := _tensor_in(kind):
        kind = tensor[0]
    return not _has(
        kind, "bytes", "duration", "interval", "union", "timestamp", "date", "time", "decimal",
        "tensor",
    )  # fmt: skip


def _can_handle(end: str, kind: str) -> bool:
    """Whether :func:`_handled` can."""
    return _numbers_of(kind) is not None if end in ("npy", "pth") else _is_plain(kind)


def _misses(value: np.ndarray) -> bool:
    """Whether a list has missing items."""
    if np.ma.is_masked(value):
        return True
    return value.dtype == object and any(item is None for item in value)


def _unmasked(value: Any) -> Any:
    """A list without the mask that it has where another one of its batch misses something.

    Raises:
        ValueError: It misses something itself.
    """
    if not isinstance(value, np.ma.MaskedArray):
        return value
    if np.ma.getmaskarray(value).any():
        raise ValueError("its list has missing items")
    return np.ma.getdata(value)


def regular(value: Any, dtype: str | None = None) -> np.ndarray:
    """A list, or lists of lists of one length, of numbers."""
    value = _unmasked(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        parts = [regular(part, dtype) for part in value]
        if len({part.shape for part in parts}) > 1:
            raise ValueError("its lists are of different lengths")
        return np.stack(parts) if parts else np.empty(0, dtype)
    if value is None:
        raise ValueError("its list has missing items")
    return np.asarray(value, dtype)


_MSGPACK = ("mp", "msgpack", "msg")


def _check_handler(end: str) -> None:
    """Raises ImportError if :func:`_handled` needs a package that is not there."""
    needs = "msgpack" if end in _MSGPACK else "torch" if end == "pth" else None
    try:
        if needs is not None:
            importlib.import_module(needs)
    except ImportError:
        raise ImportError(f"columns that end in .{end} need {needs}: pip install {needs}") from None


def _handled(end: str, value: Any, dtype: str | None = None) -> bytes:
    """A list, of numbers of this type, or a struct, as readers of this extension have it."""
    if end in ("json", "jsn"):
        return json.dumps(value, default=_jsonable, allow_nan=False).encode()
    if end in _MSGPACK:
        packed_value: bytes = importlib.import_module("msgpack").packb(value, default=_jsonable)
        return packed_value
    out = io.BytesIO()
    if end == "npy":
        np.lib.format.write_array(out, regular(value, dtype), allow_pickle=False)
    else:
        torch = importlib.import_module("torch")
        torch.save(torch.from_numpy(regular(value, dtype).copy()), out)
    return out.getvalue()


def _as_bytes(name: str, made: Any, shard: Shard) -> Any:
    if isinstance(made, str):
        return made.encode()
    if isinstance(made, memoryview):
        return made.cast("B") if made.contiguous else made.tobytes()
    if not isinstance(made, (bytes, bytearray)):
        raise _bad_row(
            shard,
            f"encoder= gave {type(made).__name__} for {name!r}, and members are bytes or texts",
        )
    return made


class Tar(Encoder):
    """Samples as WebDataset has them: a member ``key.column`` for each column of a row. A value
    that is missing has no member.
    """

    name = "tar"
    compressions = ("gz",)
    holds = (
        "bytes, texts, numbers and bits, each as a member, and others in columns that end in .json,"
        " .npy, .pth or .mp, or by an encoder="
    )

    @property
    def extension(self) -> str:
        return f".tar{_suffix(self.options.packs)}"

    def can_hold(self, kind: str) -> bool:
        return kind in (*_TEXTS, "bool") or kind in _NUMBERS

    def can_hold_column(self, name: str, kind: str) -> bool:
        encoder, end = self.options.more.get("encoder"), _end_of(name)
        if name == self.options.key or (callable(encoder) and not isinstance(encoder, Mapping)):
            return True
        if encoder is False:
            return kind in _TEXTS
        of = encoder.get(end, end) if isinstance(encoder, Mapping) else end
        if self._is_told_how(end, kind) and not callable(of):
            return _can_handle(of, kind)
        return self.can_hold(kind) or callable(of) or (of in HANDLED and _can_handle(of, kind))

    def _is_told_how(self, end: str, kind: str) -> bool:
        """Whether ``encoder=`` says how a column is written. Bytes and texts are written as they
        are.
        """
        encoder = self.options.more.get("encoder")
        return isinstance(encoder, Mapping) and end in encoder and kind not in _TEXTS

    def check(self) -> None:
        key, more = self.options.key, self.options.more
        # Samples that are numbered have no other name.
        names = {key, "__key__"} if key is None else {key}
        self._columns = [name for name in self.options.kinds if name not in names]
        if key not in (None, "__key__", *self.options.kinds):
            raise InvalidRequest(
                f"key= names column {key!r}, and no column that is written has that name",
                hint=f"the columns are {', '.join(self._columns)}; key=None numbers the samples",
            )
        if key in self.options.kinds and self.options.kinds[key] not in ("text", "bytes"):
            raise InvalidRequest(
                f"column {key!r} is {self.options.kinds[key]}, and keys are texts",
                hint="key=None numbers the samples",
            )
        encoder = more.get("encoder")
        if isinstance(encoder, Mapping):
            unused = encoder.keys() - {_end_of(name) for name in self._columns}
            if unused:
                raise InvalidRequest(
                    f"encoder= has {', '.join(sorted(unused))}, and no column has that extension",
                    hint=f"the columns are {', '.join(self._columns)}",
                )
            for name in self._columns:
                end, kind = _end_of(name), self.options.kinds[name]
                of = encoder.get(end, end)
                if self._is_told_how(end, kind) and not callable(of) and not _can_handle(of, kind):
                    raise InvalidRequest(
                        f"encoder= has {of!r} for {end!r}, and column {name!r} is {kind}",
                        hint="npy and pth are for lists of numbers; or give a function of a value",
                    )
        super().check()
        if not self._columns:
            raise InvalidRequest("a sample needs a column besides its key")
        self._function = None
        if callable(encoder) and not isinstance(encoder, Mapping):
            self._function = encoder
        else:
            if why := _bad_names(self._columns):
                raise InvalidRequest(why, hint="leave it out with columns=")
        self._ends = {name: f".{name}".encode() for name in self._columns}
        self._handlers = {}
        for name in self._columns:
            end, kind = _end_of(name), self.options.kinds[name]
            of = encoder.get(end, end) if isinstance(encoder, Mapping) else end
            is_told = self._is_told_how(end, kind)
            if callable(of):
                self._handlers[name] = of
            elif is_told or (encoder is not False and not self.can_hold(kind)):
                _check_handler(of)
                self._handlers[name] = functools.partial(_handled, of, dtype=_numbers_of(kind))
                is_json = of in ("json", "jsn", *_MSGPACK)
                if _has(kind, "json") or (is_json and _needs_plain(kind)):
                    self._plain = (*self._plain, name)
        owner = {n: more[n] for n in ("mode", "mtime", "user", "group") if n in more}
        self._header = TarHeaders(**owner)

    def _key(self, row: dict[str, Any], shard: Shard) -> bytes:
        name = self.options.key
        if name is None or name not in row:
            return b"%09d" % shard.at
        given = row[name]
        if given is None:
            raise _bad_row(shard, "its key is missing", "key=None numbers the samples")
        return self._as_key(given, shard)

    def _as_key(self, given: Any, shard: Shard) -> bytes:
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

    def _sample(self, row: dict[str, Any], shard: Shard) -> tuple[bytes, list[tuple[bytes, Any]]]:
        """The key of a sample, and its members: the ends of their names, and the bytes."""
        key = self._key(row, shard)
        if self._function is not None:
            return self._of_function(self._function, key, row, shard)
        members = []
        for name, end in self._ends.items():
            value = row[name]
            if value is None:
                continue
            if isinstance(value, str):
                value = value.encode()
            elif not isinstance(value, memoryview):
                if name in self._handlers:
                    value = self._handled(name, value, shard)
                else:
                    value = (
                        str(value).lower() if isinstance(value, bool) else repr(value)
                    ).encode()
            members.append((end, value))
        return key, members

    def _handled(self, name: str, value: Any, shard: Shard) -> Any:
        try:
            made = self._handlers[name](value)
        except Exception as e:
            raise _bad_row(shard, f"column {name!r}: {type(e).__name__}: {e}") from e
        return _as_bytes(name, made, shard)

    def _of_function(
        self,
        function: Callable[[dict[str, Any]], Any],
        key: bytes,
        row: dict[str, Any],
        shard: Shard,
    ) -> tuple[bytes, list[tuple[bytes, Any]]]:
        sample: dict[str, Any] = {"__key__": key.decode()}
        for name in self._columns:
            value = row[name]
            sample[name] = bytes(value) if isinstance(value, memoryview) else value
        try:
            made = function(sample)
        except Exception as e:
            raise _bad_row(shard, f"encoder= failed: {type(e).__name__}: {e}") from e
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise _bad_row(shard, f"encoder= gave {type(made).__name__}, and a sample is a dict")
        members = {name: value for name, value in made.items() if name != "__key__"}
        if why := _bad_names(list(members)):
            raise _bad_row(shard, f"of what encoder= gave, {why}")
        if (given := made.get("__key__")) is not None:
            if not isinstance(given, (str, bytes)):
                raise _bad_row(shard, f"encoder= gave the key {given!r}, and keys are texts")
            key = self._as_key(given, shard)
        return key, [
            (f".{name}".encode(), _as_bytes(name, value, shard))
            for name, value in members.items()
            if value is not None
        ]

    def _members(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        before = None
        for row in self._rows(batches, shard):
            key, members = self._sample(row, shard)
            if key == before:
                raise _bad_row(
                    shard,
                    f"its key {key.decode(errors='replace')!r} is that of the row before, and"
                    " readers would take both for one sample",
                    "key=None numbers the samples",
                )
            before = key
            for end, value in members:
                size, member = len(value), key + end
                if _is_meta(member):
                    raise _bad_row(
                        shard,
                        f"readers of WebDataset's tars skip what is called {member.decode()!r}",
                        "key=None numbers the samples, and columns= leaves a column out",
                    )
                yield self._header(member, size)
                yield value
                if size % 512:
                    yield _ZEROS[size % 512 :]
            if not members:
                raise _bad_row(shard, "none of its columns has a value, so it would be no sample")
        # The end: two blocks of zeros, and tar's own record of 20 blocks is not needed.
        yield _ZEROS * 2

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        return packed(self._members(batches, shard), self.options.packs)


# Parquet


#: In the kind of lists, or of tensors, that have a fixed size of 0.
_OF_NONE = re.compile(r", 0[,>]")
#: Options that may name columns.
_BY_COLUMN = (
    "compression",
    "compression_level",
    "use_dictionary",
    "write_statistics",
    "column_encoding",
    "use_byte_stream_split",
    "bloom_filter_options",
)


def _alike() -> Any:
    """What needs PyArrow."""
    return importlib.import_module("._alike", __package__)


def differ(one: str, other: str, how: str) -> InvalidRequest:
    """The error for two datasets whose columns are not the same."""
    return InvalidRequest(
        f"{one} and {other} have different columns: {how}",
        hint="choose common ones with columns=, make them alike by cast, or open both with one"
        " schema=",
    )


def _below(column: str, paths: Sequence[str]) -> list[str]:
    """The names in Parquet of a column, or of what is in it."""
    return [p for p in paths if p == column] or [p for p in paths if p.startswith(f"{column}.")]


class Parquet(Encoder):
    """Parquet, by PyArrow."""

    name = "parquet"
    compressions = ("zstd", "snappy", "gzip", "brotli", "lz4")
    is_by_column = True
    holds = (
        "what Arrow holds and PyArrow writes, but neither unions nor intervals, nor lists of a"
        " fixed size of 0, which nobody reads"
    )

    @property
    def extension(self) -> str:
        return ".parquet"

    def can_hold(self, kind: str) -> bool:
        is_of_none = _OF_NONE.search(of_any_unit(_QUOTED.sub("", kind)))
        return not is_of_none and not _has(kind, "union", "interval")

    def check(self) -> None:
        super().check()
        try:
            self._pa = importlib.import_module("pyarrow")
            self._pq = importlib.import_module("pyarrow.parquet")
        except ImportError as e:
            raise ImportError('format="parquet" needs PyArrow: pip install pyarrow') from e
        self._schema = self._of_all(self.options.looked_at) if self.options.looked_at else None
        if self._schema is not None and self.options.features is not None:
            self._schema = self._schema.with_metadata({FEATURES: self.options.features})
        for of in self._schema or ():
            # Structs without fields, runs, decimals of negative scale, bytes of no size, ….
            try:
                with self._pq.ParquetWriter(io.BytesIO(), self._pa.schema([of])):
                    pass
            except (self._pa.ArrowException, OSError) as e:
                raise self._cannot_hold(of.name, str(of.type)) from e
        packs, level = self.options.compression, self.options.more.get("compression_level")
        named = {"compression": packs, "compression_level": level, **self.options.more}
        for option in _BY_COLUMN:
            if isinstance(of := named.get(option), (Mapping, list)):
                self._check_columns(option, of)

    @staticmethod
    def _of_all(looked_at: Sequence[tuple[str, Rows]]) -> Any:
        """The schema of all shards, whichever of the datasets their rows are from."""
        try:
            # Nothing of what the files said besides the types: it would be wrong now.
            schemas = [
                _alike().as_written(rows.arrow()).schema.remove_metadata() for _, rows in looked_at
            ]
            return _alike().schema_of(schemas)
        except _alike().Differ as e:
            one, other = looked_at[e.first][0], looked_at[e.other][0]
            raise differ(one, other, str(e)) from None

    def _cast(self, batch: Any, schema: Any) -> Any:
        """A batch with the schema of its shard.

        Raises:
            InvalidRequest: It has other columns, of types that do not hold the same values.
        """
        if batch.schema.names != schema.names:
            raise InvalidRequest(
                f"rows of one shard have different columns: {', '.join(schema.names)} and"
                f" {', '.join(batch.schema.names)}",
                hint="bring them into one order by select_columns",
            )
        try:
            if not batch.schema.equals(schema, check_metadata=True):
                _alike().schema_of([schema, batch.schema])
            made = _alike().cast(batch, schema)
        except (_alike().Differ, self._pa.ArrowException) as e:
            raise InvalidRequest(
                f"rows of one shard have different columns: {e}",
                hint="cast the columns before: all rows of a write have the same ones",
            ) from None
        for of, column in zip(schema, made.columns, strict=True):
            if column.null_count and not of.nullable:
                raise InvalidRequest(
                    f"rows of one shard have different columns: {of.name!r} has missing values"
                    f" here, and its type, {of.type} not null, has none",
                    hint="cast the columns before: all rows of a write have the same ones",
                )
        return made

    def _writing(self, schema: Any) -> dict[str, Any]:
        """What PyArrow's writer is given."""
        packs = self.options.compression
        options: dict[str, Any] = {"compression": "none", **self.options.more}
        if isinstance(packs, str):
            options["compression"], level = level_of(packs)
            if level is not None:
                options["compression_level"] = level
        elif packs is not None:
            each = {column: level_of(of) for column, of in packs.items()}
            options["compression"] = {column: name for column, (name, _) in each.items()}
            levels = {column: level for column, (_, level) in each.items() if level is not None}
            if levels:
                options["compression_level"] = levels
        if any(isinstance(options.get(option), (Mapping, list)) for option in _BY_COLUMN):
            paths = self._paths(schema)
            for option in _BY_COLUMN:
                of = options.get(option)
                if isinstance(of, (Mapping, list)):
                    below = {c: _below(c, paths) for c in of}
                    for column, found in below.items():
                        if not found:
                            raise InvalidRequest(
                                f"{option}= names {column!r}, which Parquet does not have here",
                                hint=f"it has {', '.join(paths)}",
                            )
                if isinstance(of, Mapping):
                    options[option] = {p: v for c, v in of.items() for p in below[c]}
                elif isinstance(of, list):
                    options[option] = [p for c in of for p in below[c]]
        return options

    def _paths(self, schema: Any) -> list[str]:
        """The names that Parquet has for columns; of lists and structs, for what is in them."""
        out, more = io.BytesIO(), self.options.more
        kept = ("use_compliant_nested_type", "version", "store_schema")
        with self._pq.ParquetWriter(out, schema, **{n: more[n] for n in kept if n in more}):
            pass
        found = self._pq.read_metadata(io.BytesIO(out.getvalue())).schema
        return [found.column(i).path for i in range(len(found))]

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        return (self._pa.ArrowException, ValueError, TypeError, OSError, KeyError)

    def _try(self, does: Callable[[], Any]) -> Any:
        """Says of what PyArrow refuses, with which options it does."""
        try:
            return does()
        except self._refusals as e:
            given = ", ".join(self.options.more) or (self.options.compression and "compression")
            options, hint = f" with {given}", "another value, or columns for which it holds"
            if not given:
                options = ""
                hint = "cast the column to a type that holds it, or leave it out with columns="
            raise InvalidRequest(
                f"PyArrow {self._pa.__version__} does not write that{options}: {e}", hint=hint
            ) from e

    def _write(self, writer: Any, table: Any, group: int, shard: Shard, first: int) -> None:
        """Writes rows of which the first one is at this position."""
        try:
            self._try(functools.partial(writer.write_table, table, row_group_size=group))
        except InvalidRequest as e:
            row = self._refused_row(table)
            if row is None:
                raise
            shard.at = first + row
            raise _bad_row(shard, e.message, e.hint) from e.__cause__

    def _refused_row(self, table: Any) -> int | None:
        """The first row that PyArrow does not write; None if it refuses something else."""

        def is_written(part: Any) -> bool:
            options = self._writing(part.schema)
            try:
                with self._pq.ParquetWriter(io.BytesIO(), part.schema, **options) as writer:
                    writer.write_table(part)
            except self._refusals:
                return False
            return True

        if not is_written(table.slice(0, 0)):
            return None
        # Of these rows, one is refused.
        first, after = 0, len(table)
        while after - first > 1:
            middle = (first + after) // 2
            if is_written(table.slice(first, middle - first)):
                first = middle
            else:
                after = middle
        return None if is_written(table.slice(first, 1)) else first

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        pa, group = self._pa, self.options.row_group_rows or ROW_GROUP_MAX_ROWS
        sink, writer, schema = _Sink(), None, self._schema
        held: list[Any] = []
        rows, first = 0, shard.first
        shard.at = shard.first
        for received in batches:
            batch = _alike().as_written(received.arrow())
            if writer is None:
                schema = batch.schema.remove_metadata() if schema is None else schema
                file = pa.PythonFile(sink, "w")
                writer = self._try(
                    lambda: self._pq.ParquetWriter(file, schema, **self._writing(schema))  # noqa: B023
                )
            held.append(self._cast(batch, schema))
            rows += len(batch)
            while rows >= group:
                table = pa.Table.from_batches(held)
                self._write(writer, table.slice(0, group), group, shard, first)
                held, rows = table.slice(group).to_batches(), rows - group
                first += group
                yield sink.take()
            shard.at += len(batch)
        if writer is not None:
            if rows:
                table = pa.Table.from_batches(held)
                self._write(writer, table, group, shard, first)
            self._try(writer.close)
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
    compressions = ("gz", "zlib")
    holds = "bytes, texts, whole numbers and 32-bit numbers, and lists of these"

    @property
    def extension(self) -> str:
        return f".tfrecord{_suffix(self.options.packs)}"

    def can_hold(self, kind: str) -> bool:
        inner = kind.removeprefix("list<").removesuffix(">").split(",")[0]
        return inner in (*_TEXTS, "bool", "float16", "float32") or inner in _WHOLE

    def check(self) -> None:
        if self.options.raw:
            if list(self.options.kinds.values()) != ["bytes"]:
                has = ", ".join(f"{name} ({kind})" for name, kind in self.options.kinds.items())
                raise InvalidRequest(
                    f"raw=True takes one column of bytes, its records, and there are {has}",
                    hint="choose it with columns=, or leave raw= out for tf.train.Example",
                )
            return
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
        if kind in _TEXTS:
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
            if several and _misses(value):
                raise _bad_row(
                    shard, f"the list in column {name!r} has missing items, which features cannot"
                )
            try:
                feature = self._values(kind, np.ma.getdata(value) if several else (value,))
            except ValueError as e:
                raise _bad_row(shard, f"column {name!r}: {e}") from e
            features.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
        return _field(1, b"".join(features))

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        return packed(self._records(batches, shard), self.options.packs)

    def _records(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        index, at = self._index(), 0
        raw = next(iter(self.options.kinds)) if self.options.raw else None
        for row in _each_row(batches, shard):
            if raw is None:
                framed = tf_frame(self._example(row, shard))
            elif row[raw] is None:
                raise _bad_row(shard, f"column {raw!r} has no value there, which is its record")
            else:
                framed = tf_frame(bytes(row[raw]))
            if index is not None:
                index += b"%d %d\n" % (at, len(framed))
            at += len(framed)
            yield framed
        if index is not None:
            shard.beside.append((".idx", index))

    def _index(self) -> bytearray | None:
        """What says where each record begins and how long it is; None if nobody wants it."""
        return bytearray() if self.options.index and self.options.compression is None else None


# MDS


#: Encodings of MDS whose values are bytes to us: whatever a library decodes.
_MDS_OPAQUE = ("jpeg", "png", "pil", "pkl", "list[pil]")
#: Those that are lists of files.
_MDS_FILES = ("jpeg_array", "jpegarray", "list[jpeg]", "list[png]")
_MDS_TEXTS = ("bytes", "str", "json", "str_int", "str_float", "str_decimal")
_MDS_ARRAY = re.compile(r"ndarray(?::(\w+)(?::([1-9]\d*(?:,[1-9]\d*)*))?)?")
#: What begins an array whose type is not in the name of the encoding.
_MDS_DTYPES = {
    "uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32,
    "int32": 33, "float32": 34, "uint64": 64, "int64": 65, "float64": 66,
}  # fmt: skip


def _mds_type(encoding: str) -> str:
    return "int64" if encoding == "int" else encoding


def _mds_size(encoding: str) -> int | None:
    """The bytes of a value, if all have as many.

    Raises:
        InvalidRequest: MDS has no such encoding.
    """
    if _mds_type(encoding) in _NUMBERS:
        return np.dtype(_mds_type(encoding)).itemsize
    found = _MDS_ARRAY.fullmatch(encoding)
    if found and (found[1] is None or found[1] in _NUMBERS):
        if found[2] is None:
            return None
        return int(np.prod(_shape(found[2]))) * np.dtype(found[1]).itemsize
    if encoding not in (*_MDS_TEXTS, *_MDS_OPAQUE, *_MDS_FILES):
        raise InvalidRequest(
            f"MDS has no encoding {encoding!r}",
            hint=", ".join(
                (*_MDS_TEXTS, "int", *sorted(_NUMBERS), "ndarray", "ndarray:float32",
                 "ndarray:float32:2,3", *_MDS_OPAQUE, *_MDS_FILES)
            ),
        )  # fmt: skip
    return None


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _mds_can_encode(encoding: str, kind: str) -> bool:
    """Whether values of a kind have this encoding. Bytes have any: they are taken for encoded."""
    if kind == "bytes" or (encoding == "json" and _is_plain(kind)):
        return True
    if encoding == "str":
        return kind in ("text", "json")
    if encoding == "str_decimal":
        return kind.startswith("decimal")
    is_whole, is_float = kind in _WHOLE or kind == "bool", kind in _FLOATS.values()
    if encoding == "str_int":
        return kind in _WHOLE
    if encoding == "str_float":
        return is_float
    to = _mds_type(encoding)
    if to in _NUMBERS:
        return is_whole or (is_float and to in _FLOATS.values())
    if found := _MDS_ARRAY.fullmatch(encoding):
        inner = _numbers_of(kind)
        is_narrowed = inner in _FLOATS.values() and found[1] in _WHOLE
        return inner is not None and not is_narrowed
    return encoding in _MDS_FILES and re.fullmatch(r"list<bytes(, \d+)?>", kind) is not None


def _cast(value: Any, dtype: str) -> np.ndarray:
    """Numbers as another type, without a loss but of a float's digits."""
    given = np.asarray(value)
    if given.dtype == dtype:
        return given
    with np.errstate(all="ignore"):
        made = given.astype(dtype)
        back = made.astype(given.dtype) if given.dtype.kind in "iu" else made
    if given.dtype.kind == "f":
        is_lost = np.isinf(made) & ~np.isinf(given)
    elif given.dtype.kind == "O":  # Whole numbers above 64 bits.
        is_lost = np.array(True)
    else:
        # Back again, and no sign has changed: two's complement would hide that. What a float that
        # is too large becomes as a whole number depends on the processor.
        is_lost = (back != given) | ((made < 0) != (given < 0))
        if made.dtype.kind == "f":
            most = 2.0 ** (given.dtype.itemsize * 8 - (given.dtype.kind == "i"))
            is_lost |= made.astype(np.float64) >= most  # More than float16 holds.
    if is_lost.any():
        raise ValueError(f"a number that {dtype} does not hold")
    return made


def _encoded_by(encoding: str, kind: str) -> Callable[[Any], bytes]:
    """What makes the bytes of a value of a kind."""
    size = _mds_size(encoding)
    if kind == "bytes":
        return functools.partial(_encoded_already, encoding, size)
    if encoding == "str":
        return lambda value: str(value).encode()
    if encoding == "json" and kind == "json":
        return _checked_json
    if encoding == "json":
        return lambda value: json.dumps(value, default=_jsonable, allow_nan=False).encode()
    if encoding == "str_float":
        return lambda value: repr(float(value)).encode()
    if encoding in ("str_int", "str_decimal"):
        return lambda value: str(value).encode()
    if encoding in _MDS_FILES:
        return functools.partial(_files, encoding)
    to = _mds_type(encoding)
    if to in _NUMBERS:
        of = np.dtype(to).type
        if to == kind or (kind == "bool" and to == "uint8"):
            return lambda value: bytes(of(value).tobytes())
        return lambda value: bytes(_cast(value, to).tobytes())
    found = _MDS_ARRAY.fullmatch(encoding)
    assert found is not None
    shape, inner = None if found[2] is None else _shape(found[2]), _numbers_of(kind)
    assert inner is not None
    return functools.partial(_array, found[1], shape, inner)


def _encoded_already(encoding: str, size: int | None, value: Any) -> bytes:
    data = bytes(value)
    if size is not None and len(data) != size:
        raise ValueError(f"it has {len(data):,} bytes, and {encoding} has {size:,}")
    if encoding == "json":
        json.loads(data)
    elif encoding in _MDS_TEXTS and encoding != "bytes":
        data.decode()
    return data


def _checked_json(value: str) -> bytes:
    json.loads(value)
    return value.encode()


def _files(encoding: str, value: Any) -> bytes:
    if _misses(value):
        raise ValueError("its list has missing items")
    files = [bytes(file) for file in value]
    if not files and not encoding.startswith("list"):
        raise ValueError(f"its list is empty, which {encoding} cannot be")
    start = [0] if encoding.startswith("list") else []
    head = struct.pack(f"<{len(start) + 1 + len(files)}I", *start, len(files), *map(len, files))
    return b"".join([head, *files])


def _array(dtype: str | None, shape: tuple[int, ...] | None, inner: str, value: Any) -> bytes:
    made = regular(value, inner)
    if dtype is not None:
        made = _cast(made, dtype)
    if shape is not None:
        return made.reshape(shape).tobytes()
    if not made.size:
        raise ValueError("its list is empty, which MDS's arrays cannot be")
    # The axes, whose lengths take 1, 2, 4 or 8 bytes each.
    wide = next(i for i in range(4) if max(made.shape) < 1 << (8 << i))
    head = bytes((made.ndim << 2 | wide,))
    head += b"".join(length.to_bytes(1 << wide, "little") for length in made.shape)
    if dtype is None:
        head = bytes((_MDS_DTYPES[inner],)) + head
    return head + made.tobytes()


class Mds(Encoder):
    """Shards of MosaicML's Streaming, and their ``index.json``."""

    name = "mds"
    compressions = ("zstd", "gz", "bz2", "br", "snappy")
    holds = "bytes, texts, numbers and bits, lists of numbers, and what JSON holds"

    @property
    def extension(self) -> str:
        packs = self.options.packs
        return ".mds" if packs is None else f".mds.{level_of(packs)[0]}"

    @property
    def keeps_notes(self) -> bool:
        return self.options.compression is not None or bool(self.options.more.get("hashes"))

    def can_hold(self, kind: str) -> bool:
        if kind in (*_TEXTS, "bool") or kind in _NUMBERS:
            return True
        if tensor := _tensor_in(kind):
            return _is_plain(tensor[0])
        return kind.startswith(("list<", "struct<", "map")) and not _has(
            kind, "bytes", "duration", "interval", "union", "timestamp", "date", "time", "tensor"
        )

    def can_hold_column(self, name: str, kind: str) -> bool:
        encoding = self.options.more.get("columns", {}).get(name)
        if encoding is None:
            return self.can_hold(kind)
        _mds_size(encoding)
        if not _mds_can_encode(encoding, kind):
            raise InvalidRequest(
                f"column {name!r} is {kind}, which MDS's encoding {encoding!r} does not take",
                hint="another encoding, or none for that of the column's type",
            )
        return True

    def _encoding(self, name: str) -> str:
        """MDS's name of the encoding of a column."""
        kind = self.options.kinds[name]
        if given := self.options.more.get("columns", {}).get(name):
            return str(given)
        if kind in _TEXTS:
            return "str" if kind == "text" else kind
        if kind == "bool":
            return "uint8"
        if kind in _NUMBERS:
            return kind
        if (tensor := _tensor_in(kind)) and tensor[0] in _NUMBERS:
            shape = tensor[1].shape
            return f"ndarray:{tensor[0]}{'' if 0 in shape else ':' + ','.join(map(str, shape))}"
        inner, _, size = kind.removeprefix("list<").removesuffix(">").partition(", ")
        if inner in _NUMBERS and kind.startswith("list<"):
            if size and int(size) > 0:
                return f"ndarray:{inner}:{size}"
            if not size:
                return f"ndarray:{inner}"
        return "json"

    def check(self) -> None:
        self._check_columns("columns", self.options.more.get("columns", ()))
        super().check()
        names = sorted(self.options.kinds)
        encodings = [self._encoding(name) for name in names]
        self._columns = [
            (name, _encoded_by(e, self.options.kinds[name]), _mds_size(e))
            for name, e in zip(names, encodings, strict=True)
        ]
        kinds = self.options.kinds.items()
        self._plain = [
            name
            for name, kind in kinds
            if kind != "json" and self._encoding(name) == "json" and _needs_plain(kind)
        ]
        packs = self.options.packs
        self._hashes = {name: hash_of(name) for name in self.options.more.get("hashes", ())}
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": packs if packs is None or not packs.startswith("gz") else "gz",
            "hashes": list(self._hashes),
            "size_limit": self.options.more.get("size_limit"),
            "column_names": names,
            "column_encodings": encodings,
            "column_sizes": [size for _, _, size in self._columns],
        }
        self._header = json.dumps(self._config, sort_keys=True).encode()

    def _sample(self, row: dict[str, Any], shard: Shard) -> bytes:
        sizes, data = [], []
        for name, encode, size in self._columns:
            if row[name] is None:
                raise _bad_row(
                    shard,
                    f"column {name!r} has no value there, and MDS has no missing values",
                    "leave the column out with columns=",
                )
            try:
                datum = encode(row[name])
            except (ValueError, OverflowError, RecursionError) as e:
                kind, encoding = self.options.kinds[name], self._encoding(name)
                is_other = kind.startswith("list<") and encoding != "json" and _is_plain(kind)
                hint = f'columns={{{name!r}: "json"}} takes any list' if is_other else None
                raise _bad_row(shard, f"column {name!r}: {e}", hint) from e
            data.append(datum)
            if size is None:
                sizes.append(len(datum))
        return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data)

    def pieces(self, batches: Iterable[Rows], shard: Shard) -> Iterator[bytes]:
        # Of all samples one buffer, and where each of them ends: an object for each would be
        # several times what it holds.
        raw, ends = bytearray(), array("Q", [0])
        for row in self._rows(batches, shard):
            raw += self._sample(row, shard)
            ends.append(len(raw))
        offsets = np.frombuffer(ends, np.uint64)
        offsets += 4 + 4 * len(offsets) + len(self._header)
        if offsets[-1] > MDS_BYTES_MAX:
            raise InvalidRequest(
                f"a shard of MDS has at most 4 GiB, and one has {int(offsets[-1]):,} bytes",
                hint="give a smaller shard_size= or shard_rows=",
            )
        head = struct.pack("<I", len(ends) - 1) + offsets.astype("<u4").tobytes() + self._header
        raw[:0] = head
        shard.notes["raw"] = len(raw)
        if self._hashes:
            shard.notes["raw_hashes"] = self._digests(raw)
        whole: bytes | bytearray = raw
        if (packs := self.options.packs) is not None:
            # At once, so that a frame of zstd says how long its contents are: the library needs
            # that.
            whole = _whole(raw, packs)
            if self._hashes:
                shard.notes["hashes"] = self._digests(whole)
        if self.keeps_notes:
            shard.beside.append((".json", json.dumps(shard.notes).encode()))
        return _cut(whole)

    def _digests(self, data: bytes | bytearray) -> dict[str, str]:
        made = {name: of() for name, of in self._hashes.items()}
        for digest in made.values():
            digest.update(data)
        return {name: digest.hexdigest() for name, digest in made.items()}

    def finish(self, shards: Sequence[dict[str, Any]]) -> list[tuple[str, bytes]]:
        entries = []
        for shard in shards:
            notes = shard["notes"]
            file = {"basename": shard["name"], "bytes": shard["size"]}
            entry = {**self._config, "samples": shard["rows"], "zip_data": None}
            if self.options.compression is None:
                entry["raw_data"] = {**file, "hashes": notes.get("raw_hashes", {})}
            else:
                raw = {"basename": shard["name"].rpartition(".")[0], "bytes": notes["raw"]}
                entry["raw_data"] = {**raw, "hashes": notes.get("raw_hashes", {})}
                entry["zip_data"] = {**file, "hashes": notes.get("hashes", {})}
            entries.append(entry)
        index = {"version": 2, "shards": entries}
        return [("index.json", json.dumps(index, sort_keys=True).encode())]


def _cut(data: bytes | bytearray) -> Iterator[bytes]:
    """Data in pieces."""
    with memoryview(data) as view:
        for at in range(0, len(view), PIECE_BYTES):
            yield bytes(view[at : at + PIECE_BYTES])


ENCODERS: dict[str, type[Encoder]] = {
    encoder.name: encoder for encoder in (Tar, Parquet, TfRecord, Mds, Jsonl)
}
