"""One Arrow schema for columns of several datasets that hold the same values in different ways:
texts with long or short offsets, as views or in a dictionary, lists with long or short offsets,
and what may be missing in one and not in the other, or always is.

Invariant: a value is the same in the type that is found as in the one that it came in. What would
change values or lose what a type says of them (a unit, a zone, a precision, a shape) has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

#: The metadata of a field by which types are told that Arrow itself does not have.
EXTENSION = (b"ARROW:extension:name", b"ARROW:extension:metadata")


class Differ(Exception):
    """A column has types that no one type holds."""

    def __init__(self, column: str, first: int, other: int, one: str, another: str) -> None:
        super().__init__(f"{column!r} is {one} there and {another} here")
        #: Which of the schemas have these types.
        self.first, self.other = first, other


def schema_of(schemas: Sequence[Any]) -> Any:
    """One schema for all, which have columns of the same names in one order; the first one, where
    the others do not differ from it.

    Raises:
        Differ: There is none.
    """
    first = schemas[0]
    fields = list(first)
    for number, schema in enumerate(schemas[1:], 1):
        if schema.equals(first, check_metadata=True):
            continue
        for at, (mine, theirs) in enumerate(zip(fields, schema, strict=True)):
            made = _field(mine, theirs)
            if made is None:
                before = [schema.field(at) for schema in schemas[:number]]
                one = next((i for i, of in enumerate(before) if _field(of, theirs) is None), 0)
                raise Differ(mine.name, one, number, _shown(before[one]), _shown(theirs))
            fields[at] = made
    return pa.schema(fields, metadata=first.metadata)


def unlike(one: Any, other: Any) -> list[str]:
    """The columns of two schemas, in one order, that have no type in common."""
    return [a.name for a, b in zip(one, other, strict=True) if _field(a, b) is None]


def cast(batch: Any, schema: Any) -> Any:
    """A batch with this schema, which was made of its own one and of others."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    arrays = [
        array if array.type == field.type else _cast(array, field.type)
        for array, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: Any, to: Any) -> Any:
    if types.is_dictionary(array.type) and not types.is_dictionary(to):
        # Not every type is looked up in a dictionary.
        values = array.dictionary.cast(to)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    return array.cast(to)


def known(kind: Any) -> Any:
    """A type for the same values that PyArrow casts, compares and writes: it does none of that with
    dictionaries of views, which Polars makes of its categories.
    """
    return _with(kind, _in_known_dictionary)


def _in_known_struct(kind: Any) -> Any:
    return _with_offsets(_in_known_dictionary(kind))


def _in_known_dictionary(kind: Any) -> Any:
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _with_offsets(kind.value_type), kind.ordered)
    return kind


def is_text_view(kind: Any) -> bool:
    """By the name: PyArrow before 16 has neither the type nor a function that asks for it."""
    return str(kind) == "string_view"


def is_bytes_view(kind: Any) -> bool:
    return str(kind) == "binary_view"


def _with_offsets(kind: Any) -> Any:
    """Texts or bytes with offsets for views; other types as they are."""
    if is_text_view(kind):
        return pa.large_string()
    return pa.large_binary() if is_bytes_view(kind) else kind


def _with(
    kind: Any, change: Callable[[Any], Any], in_structs: Callable[[Any], Any] | None = None
) -> Any:
    """A type with another one for each that it is made of, which is itself if nothing is in it.
    ``in_structs`` changes those in structs, if that is given.
    """

    def of(field: Any) -> Any:
        return field.with_type(_with(field.type, change, in_structs))

    if types.is_struct(kind):
        change = in_structs or change
        return pa.struct([of(field) for field in kind])
    if types.is_map(kind):
        fields = of(kind.key_field), of(kind.item_field)
        # Not the same again: what it calls its entries would go.
        is_same = fields == (kind.key_field, kind.item_field)
        return kind if is_same else pa.map_(*fields, keys_sorted=kind.keys_sorted)
    if types.is_list(kind):
        return pa.list_(of(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(of(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(of(kind.value_field), kind.list_size)
    return change(kind)


def as_known(batch: Any) -> Any:
    """A batch with columns of the types that :func:`known` finds."""
    return _as(batch, known)


def as_written(batch: Any) -> Any:
    """The same for Parquet: of views in structs, PyArrow writes no slices of an array."""
    return _as(batch, lambda kind: _with(kind, _in_known_dictionary, _in_known_struct))


def _as(batch: Any, type_for: Callable[[Any], Any]) -> Any:
    fields = [field.with_type(type_for(field.type)) for field in batch.schema]
    return cast(batch, pa.schema(fields, metadata=batch.schema.metadata))


def taken(table: Any, rows: np.ndarray) -> Any:
    """Rows of a table by their numbers, at least one, as a table of one batch."""
    try:
        found = table.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        # PyArrow takes no rows of views and runs.
        first, end = int(rows.min()), int(rows.max()) + 1
        within = table.slice(first, end - first)
        arrays = [_taken(column, rows - first) for column in within.columns]
        found = pa.Table.from_arrays(arrays, schema=table.schema)
    return found.combine_chunks()


def _taken(column: Any, rows: np.ndarray) -> Any:
    kind = _with(column.type, _with_offsets)
    try:
        if kind == column.type:
            return column.take(pa.array(rows))
        # Not slices of views: each would bring all that the column has.
        return column.cast(kind).take(pa.array(rows)).cast(column.type)
    except pa.ArrowNotImplementedError:
        ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        slices = (column.slice(int(rows[a]), b - a) for a, b in pairwise([0, *ends]))
        return pa.chunked_array([chunk for of in slices for chunk in of.chunks], column.type)


def _extension(field: Any) -> list[Any]:
    metadata = field.metadata or {}
    return [metadata.get(name) for name in EXTENSION]


def is_extension(field: Any) -> bool:
    """Whether the metadata of a field tell a type that Arrow itself does not have."""
    return any(_extension(field))


def _shown(field: Any) -> str:
    said = [part.decode(errors="replace") for part in _extension(field) if part]
    return f"{field.type} ({', '.join(said):.100})" if said else str(field.type)


def _field(one: Any, other: Any) -> Any | None:
    """A field for the values of both; None if there is none."""
    kind = type_of(one.type, other.type)
    if kind is None or _extension(one) != _extension(other):
        return None
    return one.with_type(kind).with_nullable(one.nullable or other.nullable)


def type_of(one: Any, other: Any) -> Any | None:
    """A type for the values of both; None if there is none."""
    if one.equals(other, check_metadata=True) or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_dictionary(one) or types.is_dictionary(other):
        return type_of(_in_dictionary(one), _in_dictionary(other))
    both = (one, other)
    if all(map(_is_text, both)):
        return pa.large_string() if any(map(types.is_large_string, both)) else pa.string()
    if all(map(_is_bytes, both)):
        return pa.large_binary() if any(map(types.is_large_binary, both)) else pa.binary()
    if all(types.is_list(kind) or types.is_large_list(kind) for kind in both):
        items = _field(one.value_field, other.value_field)
        is_large = any(map(types.is_large_list, both))
        made = pa.large_list if is_large else pa.list_
        return None if items is None else made(items)
    if all(map(types.is_fixed_size_list, both)) and one.list_size == other.list_size:
        items = _field(one.value_field, other.value_field)
        return None if items is None else pa.list_(items, one.list_size)
    if all(map(types.is_struct, both)):
        return _struct(list(one), list(other))
    if all(map(types.is_map, both)):
        key, item = _field(one.key_field, other.key_field), _field(one.item_field, other.item_field)
        if key is None or item is None:
            return None
        return pa.map_(key, item, keys_sorted=one.keys_sorted and other.keys_sorted)
    return one if one == other else None


def _in_dictionary(kind: Any) -> Any:
    return kind.value_type if types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or is_text_view(kind))


def _is_bytes(kind: Any) -> bool:
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or is_bytes_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _struct(one: list[Any], other: list[Any]) -> Any | None:
    if [field.name for field in one] != [field.name for field in other]:
        return None
    fields = [_field(a, b) for a, b in zip(one, other, strict=True)]
    return None if any(field is None for field in fields) else pa.struct(fields)
