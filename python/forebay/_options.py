"""Options of the formats that are written, under the names that their own libraries use.

What they mean is the encoders' matter (:mod:`forebay._encode`). Here is which format has which, and
which values make sense, so that everything else is refused before work begins.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import json
import numbers
import pickle
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ._arguments import whole_number
from .errors import InvalidRequest

#: Bytes of a shard of MDS, which has offsets of 32 bits.
MDS_BYTES_MAX = (1 << 32) - 1


class WriteOptions(TypedDict, total=False):
    """What :meth:`forebay.Dataset.write` takes for single formats; it explains them."""

    compression_level: int | Mapping[str, int] | None
    # Parquet
    use_dictionary: bool | list[str] | None
    dictionary_pagesize_limit: int | None
    data_page_size: int | None
    data_page_version: str | None
    max_rows_per_page: int | None
    write_batch_size: int | None
    version: str | None
    write_statistics: bool | list[str] | None
    write_page_index: bool | None
    write_page_checksum: bool | None
    column_encoding: str | Mapping[str, str] | None
    use_byte_stream_split: bool | list[str] | None
    bloom_filter_options: Mapping[str, Any] | None
    use_content_defined_chunking: bool | Mapping[str, int] | None
    store_schema: bool | None
    store_decimal_as_integer: bool | None
    use_compliant_nested_type: bool | None
    coerce_timestamps: str | None
    allow_truncated_timestamps: bool | None
    # Tar
    encoder: bool | Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] | None
    compress: bool | str | None
    maxcount: int | None
    mode: int | str | None
    mtime: float | None
    user: str | None
    group: str | None
    # TFRecord
    compression_type: str | None
    raw: bool | None
    # MDS
    hashes: list[str] | None
    size_limit: int | str | None
    # JSONL
    ensure_ascii: bool | None
    sort_keys: bool | None


#: Names that libraries have for what is called otherwise here.
ELSEWHERE = {
    "row_group_size": "row_group_rows=",
    "maxsize": "shard_size=, the bytes of a shard as written",
    "pattern": "name=",
    "start_shard": "shards are numbered from 0",
    "post": "a shard is in the bucket as soon as it is whole",
    "keep_local": "nothing is kept on the local disk",
    "out": "the target",
    "force_ascii": "ensure_ascii=",
    "sorting_columns": "order= is the order of the rows",
}


def _refuse(name: str, value: Any, hint: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r}", hint=hint)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _number(least: int, most: int, unit: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        number = whole_number(value)
        if number is None or not least <= number <= most:
            raise _refuse(name, value, f"{unit}: a whole number from {least:,} to {most:,}")
        return number

    return check


def _one_of(*texts: str) -> Callable[[str, Any], str]:
    """One of some texts; ``2.0`` is ``"2.0"``."""

    def check(name: str, value: Any) -> str:
        given = str(value) if isinstance(value, float) else value
        found = [t for t in texts if isinstance(given, str) and t.lower() == given.lower()]
        if not found:
            raise _refuse(name, value, ", ".join(json.dumps(t) for t in texts))
        return found[0]

    return check


def _flag_or_columns(name: str, value: Any) -> bool | list[str]:
    if isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(c, str) for c in value):
        return list(value)
    raise _refuse(name, value, "True, False, or a list of the columns for which it holds")


def _of_columns(name: str, value: Any, one: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What a dict from the names of columns has for each."""
    if not value or not all(isinstance(column, str) for column in value):
        raise _refuse(name, value, "names of columns, and a value for each")
    return {column: one(f"{name} of column {column!r}", of) for column, of in value.items()}


def _each(one: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """A value for all columns, or a dict with one for each of some."""

    def check(name: str, value: Any) -> Any:
        return _of_columns(name, value, one) if isinstance(value, Mapping) else one(name, value)

    return check


def _bloom_filter(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping) and set(value) <= {"ndv", "fpp"}:
        ndv, fpp = value.get("ndv", 1), value.get("fpp", 0.05)
        number = whole_number(ndv)
        is_part = isinstance(fpp, (int, float)) and not isinstance(fpp, bool) and 0 < fpp < 1
        if number is not None and number > 0 and is_part:
            return {**value, "ndv": number} if "ndv" in value else dict(value)
    raise _refuse(name, value, 'True, or {"ndv": distinct values, "fpp": from 0 to 1}')


def _bloom_filters(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(name, value, 'a dict by column, as in {"id": {"ndv": 1000, "fpp": 0.05}}')
    return _of_columns(name, value, _bloom_filter)


def _chunking(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    names = {"min_chunk_size", "max_chunk_size", "norm_level"}
    if isinstance(value, Mapping) and set(value) <= names:
        numbers = {k: whole_number(v) for k, v in value.items()}
        if None not in numbers.values():
            return numbers
    raise _refuse(name, value, f"True, False, or a dict of whole numbers: {', '.join(names)}")


def _encoder(name: str, value: Any) -> Any:
    if isinstance(value, bool) or (callable(value) and not isinstance(value, type)):
        return value
    if isinstance(value, Mapping) and value:
        for end, of in value.items():
            if not isinstance(end, str) or end != end.lower() or "." in end or not end:
                raise _refuse(f"{name}: an extension", end, 'small letters, as in "npy"')
            if not callable(of) and of not in HANDLED:
                raise _refuse(
                    f"{name} of {end!r}",
                    of,
                    f"a function of a value, or one of: {', '.join(HANDLED)}",
                )
        return dict(value)
    raise _refuse(
        name,
        value,
        'True, False, a function of a sample, or a dict by extension: {"npy": function}',
    )


#: Extensions whose lists and structs tars have an encoder for.
HANDLED = ("json", "jsn", "npy", "pth", "mp", "msgpack", "msg")


def _mode(name: str, value: Any) -> int:
    number = whole_number(value)
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{1,5}", value):
        number = int(value, 8)
    if number is None or not 0 <= number <= 0o7777:
        raise _refuse(name, value, 'permissions of the members: 0o444, or "0444"')
    return number


def _mtime(name: str, value: Any) -> int:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1 << 33:
        raise _refuse(name, value, "seconds since 1970, one time for all members")
    return int(value)


def _owner(name: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,31}", value):
        raise _refuse(name, value, "at most 31 ASCII characters")
    return value


def _hashes(name: str, value: Any) -> list[str]:
    hint = 'names in small letters, in their order, each once, as in ["sha1", "xxh64"]'
    if not isinstance(value, (list, tuple)) or not all(isinstance(h, str) for h in value):
        raise _refuse(name, value, hint)
    if list(value) != sorted(set(value)) or any(h != h.lower() for h in value):
        raise _refuse(name, value, hint)
    for algorithm in value:
        hash_of(algorithm)
    return list(value)


def hash_of(name: str) -> Callable[[], Any]:
    """What makes a hash of this name, as MosaicML's Streaming names them."""
    if name in hashlib.algorithms_guaranteed and not name.startswith("shake_"):
        return lambda: hashlib.new(name, usedforsecurity=False)
    if not name.startswith("xxh"):
        known = sorted(h for h in hashlib.algorithms_guaranteed if not h.startswith("shake_"))
        raise InvalidRequest(
            f"hashes= names {name!r}, which is not known here",
            hint=f"{', '.join(known)}, xxh32, xxh64, xxh3_64, xxh128",
        )
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError:
        raise ImportError(f"hashes={[name]!r} needs xxhash: pip install xxhash") from None
    if name not in xxhash.algorithms_available:
        known = sorted(xxhash.algorithms_available)
        raise InvalidRequest(
            f"hashes= names {name!r}, which is not known here", hint=", ".join(known)
        )
    made: Callable[[], Any] = getattr(xxhash, name)
    return made


_SIZES = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_SIZES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _size_limit(name: str, value: Any) -> int:
    size = whole_number(value)
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if found and found[2].lower() in _SIZES and len(found[1]) < 20:
            size = int(float(found[1]) * _SIZES[found[2].lower()])
    if size is None or not 1 <= size <= MDS_BYTES_MAX:
        raise _refuse(
            name, value, f'bytes, from 1 to {MDS_BYTES_MAX:,}, or as in "64mb" (64 * 1024 * 1024)'
        )
    return size


def _compress(name: str, value: Any) -> str:
    if value is True or value == "gz":
        return "gz"
    if value is False:
        return "none"
    raise _refuse(name, value, 'True, "gz" or False')


def _compression_type(name: str, value: Any) -> str:
    # TensorFlow calls none "".
    return "NONE" if value == "" else _one_of("GZIP", "ZLIB", "NONE")(name, value)


def _encodings(name: str, value: Any) -> dict[str, str]:
    hint = 'names of columns with their encodings, as in {"id": "int", "img": "jpeg"}'
    if not isinstance(value, Mapping) or not value:
        raise _refuse(name, value, hint)
    for column, encoding in value.items():
        if not isinstance(column, str) or not isinstance(encoding, str):
            raise _refuse(name, value, hint)
    return dict(value)


@dataclass(frozen=True)
class _Option:
    formats: tuple[str, ...]
    #: Takes the name, for an error, and the value; returns what is kept.
    check: Callable[[str, Any], Any]
    #: On a command line: taken as a text, whatever it looks like.
    is_text: bool = False


_PARQUET, _TAR, _TFRECORD, _MDS, _JSONL = (
    ("parquet",),
    ("tar",),
    ("tfrecord",),
    ("mds",),
    ("jsonl",),
)
_BYTES = _number(1, 1 << 31, "bytes")
_LEVEL = _number(1, 22, "a level")
_ENCODINGS = _one_of(
    "PLAIN",
    "BYTE_STREAM_SPLIT",
    "DELTA_BINARY_PACKED",
    "DELTA_LENGTH_BYTE_ARRAY",
    "DELTA_BYTE_ARRAY",
    "RLE",
)
OPTIONS: dict[str, _Option] = {
    "compression_level": _Option((*_PARQUET, *_TAR, *_TFRECORD, *_MDS, *_JSONL), _each(_LEVEL)),
    "use_dictionary": _Option(_PARQUET, _flag_or_columns),
    "dictionary_pagesize_limit": _Option(_PARQUET, _BYTES),
    "data_page_size": _Option(_PARQUET, _BYTES),
    "data_page_version": _Option(_PARQUET, _one_of("1.0", "2.0"), is_text=True),
    "max_rows_per_page": _Option(_PARQUET, _number(1, 1 << 31, "rows")),
    "write_batch_size": _Option(_PARQUET, _number(1, 1 << 31, "values")),
    "version": _Option(_PARQUET, _one_of("1.0", "2.4", "2.6"), is_text=True),
    "write_statistics": _Option(_PARQUET, _flag_or_columns),
    "write_page_index": _Option(_PARQUET, _flag),
    "write_page_checksum": _Option(_PARQUET, _flag),
    "column_encoding": _Option(_PARQUET, _each(_ENCODINGS)),
    "use_byte_stream_split": _Option(_PARQUET, _flag_or_columns),
    "bloom_filter_options": _Option(_PARQUET, _bloom_filters),
    "use_content_defined_chunking": _Option(_PARQUET, _chunking),
    "store_schema": _Option(_PARQUET, _flag),
    "store_decimal_as_integer": _Option(_PARQUET, _flag),
    "use_compliant_nested_type": _Option(_PARQUET, _flag),
    "coerce_timestamps": _Option(_PARQUET, _one_of("ms", "us")),
    "allow_truncated_timestamps": _Option(_PARQUET, _flag),
    "encoder": _Option(_TAR, _encoder),
    "compress": _Option(_TAR, _compress),
    "maxcount": _Option(_TAR, _number(1, 1 << 42, "samples of a shard")),
    "mode": _Option(_TAR, _mode, is_text=True),
    "mtime": _Option(_TAR, _mtime),
    "user": _Option(_TAR, _owner, is_text=True),
    "group": _Option(_TAR, _owner, is_text=True),
    "compression_type": _Option(_TFRECORD, _compression_type, is_text=True),
    "raw": _Option(_TFRECORD, _flag),
    "columns": _Option(_MDS, _encodings),
    "hashes": _Option(_MDS, _hashes),
    "size_limit": _Option(_MDS, _size_limit),
    "ensure_ascii": _Option(_JSONL, _flag),
    "sort_keys": _Option(_JSONL, _flag),
}
#: What is so without these options.
DEFAULTS = {"encoder": True, "sort_keys": False}
#: Arguments of ``write`` that are another name of ``compression``.
COMPRESSIONS = ("compress", "compression_type")


def names_of(format: str) -> list[str]:
    """The options that a format has."""
    more = {"parquet": ["row_group_rows"], "tar": ["key"], "tfrecord": ["index"]}
    own = [name for name, option in OPTIONS.items() if format in option.formats]
    return ["compression", *more.get(format, []), *own]


def not_of(name: str, formats: tuple[str, ...], format: str) -> InvalidRequest:
    """The error for an option of other formats."""
    has = " and ".join(formats)
    what, instead = f"{name}=", "leave it out"
    if name == "columns":
        what, instead = "columns= as a dict of encodings", "give a list of columns"
    return InvalidRequest(
        f"{what} is an option of {has}, and the format is {format}",
        hint=f"{instead}, or write format={json.dumps(formats[0])}; {format} has"
        f" {', '.join(names_of(format))}",
    )


def checked(format: str, given: Mapping[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The options that were given, None left out, with their values as one way of many to say them.

    Args:
        given: Names and values.
        arguments: The other names that ``write`` has, for one that is misspelt.

    Raises:
        InvalidRequest: The format has no option of this name, or none with such a value.
        ImportError: A value needs a package that is not there.
    """
    found = {}
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            has = f"{format} has the options {', '.join(names_of(format))}"
            near = difflib.get_close_matches(name, [*arguments, *OPTIONS], 1)
            said = ELSEWHERE.get(name) or (f"did you mean {near[0]}=?" if near else None)
            raise InvalidRequest(
                f"a write has no argument {name!r}", hint=f"{said}; {has}" if said else has
            )
        if value is None:
            continue
        if format not in option.formats:
            raise not_of(name, option.formats, format)
        made = option.check(name, value)
        # What is so without being said is the same write.
        if name not in DEFAULTS or made is not DEFAULTS[name]:
            found[name] = made
    return found


def as_told(value: Any) -> Any:
    """An option's value as JSON has it: of a function, its name, and a digest of its code and of
    what it is given besides a sample.

    Raises:
        InvalidRequest: A function cannot be told from another of its kind.
    """
    if isinstance(value, Mapping):
        return {key: as_told(of) for key, of in value.items()}
    if not callable(value):
        return value
    digest, kind = hashlib.sha256(), value
    if isinstance(value, functools.partial):
        digest.update(json.dumps(as_told(value.func)).encode())
        digest.update(_given((value.args, value.keywords), value))
        kind = type(value)
    elif (code := getattr(value, "__code__", None)) is not None:
        digest.update(_code(code))
        digest.update(_given((value.__defaults__, value.__kwdefaults__), value))
        if isinstance(value, types.MethodType):
            digest.update(_given(value.__self__, value))
    else:
        # Methods of built-in types too: they are pickled with what they are bound to.
        kind = type(value)
        called = getattr(kind.__call__, "__code__", None)
        digest.update(b"" if called is None else _code(called))
        digest.update(_given(value, value))
    return {
        "function": f"{kind.__module__}.{kind.__qualname__}",
        "code": digest.hexdigest()[:16],
    }


def _given(values: Any, function: Any) -> bytes:
    """What a function is given besides a sample, as bytes that are the same in another process."""
    try:
        return pickle.dumps(values, protocol=4)
    except Exception as e:
        raise InvalidRequest(
            f"{function!r} cannot be told from another of its kind: {type(e).__name__}: {e}",
            hint="give a function of a module, whose arguments can be pickled: a write that goes on"
            " has to know whether it is the same",
        ) from None


def _code(code: Any) -> bytes:
    constants = []
    for of in code.co_consts:
        if isinstance(of, frozenset):
            of = sorted(map(repr, of))  # In one order in all processes.
        constants.append(_code(of) if hasattr(of, "co_code") else repr(of).encode())
    return b"\0".join([code.co_code, repr(code.co_names).encode(), *constants])


def from_texts(texts: list[str]) -> dict[str, Any]:
    """Options of a command line: ``name=value``, with values as JSON has them, or texts."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise InvalidRequest(
                f"--option {text!r} has no value",
                hint="--option name=value, as in write_page_index=true",
            )
        if name in found:
            raise InvalidRequest(f"--option {name} is given twice")
        option = OPTIONS.get(name)
        if option is not None and option.is_text:
            found[name] = value
            continue
        try:
            found[name] = json.loads(_PYTHONS.get(value, value))
        except ValueError:
            found[name] = value
    return found


#: What Python has for what JSON has.
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
