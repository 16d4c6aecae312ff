"""Columns under other names or of other types than those that the node sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _arrow
from .errors import InvalidRequest

#: The names that a node gives types, where PyArrow has other ones.
NODE_NAMES = {
    "null": "Null",
    "bool": "Boolean",
    "int8": "Int8",
    "int16": "Int16",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "UInt8",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "halffloat": "Float16",
    "float": "Float32",
    "double": "Float64",
    "string": "Utf8",
    "large_string": "LargeUtf8",
    "binary": "Binary",
    "large_binary": "LargeBinary",
    "string_view": "Utf8View",
    "binary_view": "BinaryView",
    "date32[day]": "Date32",
    "date64[ms]": "Date64",
}


@dataclass(frozen=True)
class Dressing:
    """What is done to the columns of each answer, by the names that the node knows.

    Attributes:
        names: ``(the node's name, the name here)`` of columns that were renamed.
        casts: ``(the node's name, the type)``, in the order in which they are applied.
    """

    names: tuple[tuple[str, str], ...] = ()
    casts: tuple[tuple[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.casts)

    def shown(self, name: str) -> str:
        """The name here of a column of the node."""
        return dict(self.names).get(name, name)

    def type_of(self, name: str, given: str) -> str:
        """The type of a column of the node, as the node names types."""
        last = [to for column, to in self.casts if column == name]
        return NODE_NAMES.get(str(last[-1]), str(last[-1])) if last else given

    def __reduce__(self) -> Any:
        return Dressing, (self.names, self.casts)


class Dressed:
    """A received record batch, renamed and cast."""

    __slots__ = ("_dressing", "_made", "_of", "_part")

    def __init__(self, part: Any, dressing: Dressing, of: str) -> None:
        self._part, self._dressing, self._of = part, dressing, of
        self._made: Any = None
        if dressing.casts:
            # Now, where the rows are read: a value that does not fit fails the reading.
            self._arrow()

    @property
    def nbytes(self) -> int:
        return int(getattr(self._part, "nbytes", 0))

    @property
    def node_seconds(self) -> dict[str, float]:
        return dict(getattr(self._part, "node_seconds", {}))

    @property
    def node_bytes(self) -> dict[str, int]:
        return dict(getattr(self._part, "node_bytes", {}))

    def columns_by_name(self) -> dict[str, _arrow.Column]:
        """The columns by their names here."""
        if self._dressing.casts:
            return _arrow.columns(self._arrow())
        found = {}
        for name, column in _arrow.columns(self._part).items():
            column.name = self._dressing.shown(name)
            found[column.name] = column
        return found

    def _arrow(self) -> Any:
        if self._made is None:
            pa = pyarrow("columns with other names or types")
            batch = pa.record_batch(self._part)
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            for name, to in self._dressing.casts:
                if name in arrays:
                    arrays[name] = cast(arrays[name], to, self._dressing.shown(name), self._of)
            casts = {name for name, _ in self._dressing.casts}
            fields = [
                # What a field says besides its type is of that type: that it is a tensor.
                pa.field(
                    self._dressing.shown(name),
                    array.type,
                    metadata=None if name in casts else batch.schema.field(name).metadata,
                )
                for name, array in arrays.items()
            ]
            self._made = pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields))
        return self._made

    def __arrow_c_schema__(self) -> Any:
        return self._arrow().schema.__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._arrow().__arrow_c_array__(requested_schema)


def cast(array: Any, to: Any, column: str, of: str) -> Any:
    """An array of another type; refuses values that it cannot hold."""
    pa = pyarrow("ds.cast(…)")
    from ._alike import known

    of_values = known(array.type)
    try:
        return (array if of_values == array.type else array.cast(of_values)).cast(to)
    except pa.ArrowException as e:
        raise InvalidRequest(
            f"column {column!r} of {of} cannot be cast from {array.type} to {to}: {e}",
            hint="cast it to a type that holds all of its values, or convert it in a map or decode",
        ) from None


def types_of(schema: Any) -> dict[str, Any]:
    """Columns and PyArrow types, of a ``pyarrow.Schema`` or a dict of names and types."""
    pa = pyarrow("ds.cast(…)")
    schema = of_features(schema)
    given = (
        schema
        if isinstance(schema, dict)
        else {field.name: field.type for field in _fields(schema)}
    )
    aliases = {theirs: ours for ours, theirs in NODE_NAMES.items()}
    found = {}
    for name, kind in given.items():
        if isinstance(kind, pa.DataType):
            found[name] = kind
            continue
        try:
            found[name] = _of_name(pa, aliases.get(str(kind), str(kind)))
        except (ValueError, OverflowError):
            raise InvalidRequest(
                f"{kind!r}, for column {name!r}, is not the name of a type",
                hint='give a name such as "int32" or "string", or a pyarrow.DataType',
            ) from None
    return found


def of_features(schema: Any) -> Any:
    """The ``pyarrow.Schema`` of the ``Features`` of Hugging Face's ``datasets``, which are a dict
    of types of their own; anything else as it is.
    """
    return getattr(schema, "arrow_schema", schema)


#: Types that PyArrow prints so, and does not read again.
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns), ?tz=([^\]]+)\]")
_DECIMAL = re.compile(r"decimal(32|64|128|256)\((\d+), ?(-?\d+)\)")
_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")
_LIST = re.compile(r"(list|large_list|fixed_size_list)<(?:([^:<>\[\]]*): )?(.*)>(?:\[(\d+)\])?")
#: Lists in lists in the name of a type, at most.
_DEPTH_MAX = 64


def _of_name(pa: Any, text: str, depth: int = 0) -> Any:
    """The type of a name, as PyArrow prints it or knows it; raises ValueError for any other."""
    if depth <= _DEPTH_MAX and (found := _LIST.fullmatch(text)):
        kind, name, inner, size = found.groups()
        of = inner.removesuffix(" not null")
        item = _of_name(pa, of, depth + 1)
        field = pa.field("item" if name is None else name, item, nullable=of == inner)
        if (size is None) == (kind != "fixed_size_list"):
            of_size = (int(size),) if size else ()
            return (pa.large_list if kind == "large_list" else pa.list_)(field, *of_size)
    elif found := _ZONED.fullmatch(text):
        return pa.timestamp(*found.groups())
    elif found := _DECIMAL.fullmatch(text):
        make = getattr(pa, f"decimal{found[1]}", None)
        if make is not None:
            return make(int(found[2]), int(found[3]))
    elif found := _BINARY.fullmatch(text):
        return pa.binary(int(found[1]))
    return pa.type_for_alias(text.partition("[day]")[0])


def _fields(schema: Any) -> Sequence[Any]:
    try:
        fields = list(schema)
        if all(hasattr(field, "type") for field in fields):
            return fields
    except TypeError:
        pass
    raise TypeError(
        "cast takes a dict of names and types, a pyarrow.Schema, or Features of datasets"
    )


def pyarrow(what: str) -> Any:
    try:
        import pyarrow as found
    except ImportError as e:
        raise ImportError(f"{what} needs PyArrow: pip install pyarrow") from e
    return found
