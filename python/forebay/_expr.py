"""Expressions over columns: what ``ds.filter`` takes.

::

    forebay.col("lang") == "en"
    (forebay.col("tokens") >= 512) & forebay.col("lang").isin(["en", "de"])
    ~forebay.col("url").startswith("http://") | forebay.col("url").is_null()

A comparison with a missing value is neither true nor false, as in SQL, and neither is its negation:
such a row is left out. ``is_null()`` is always one of the two.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, localcontext
from typing import Any, ClassVar, NoReturn

from .errors import InvalidRequest

__all__ = ["Column", "Expression", "col"]

#: Members of `isin`, and parts of an expression.
MEMBERS_MAX = 100_000
DEPTH_MAX = 100
#: Digits of a decimal in a document.
DECIMAL_DIGITS_MAX = 76
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: What cannot be evaluated is neither true nor false for any row; what may be either.
NEVER, ALWAYS, MAYBE = "never", "always", "maybe"
#: The comparison that is the negation, where neither side is missing.
COMPARISONS = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal"}
COMPARISONS |= {">": "greater", ">=": "greater_equal"}


class Expression(ABC):
    """Something that is true, false or neither for each row. Combined by ``&``, ``|`` and ``~``."""

    #: How many are within each other. (What looks into them is recursive.)
    _depth: ClassVar[int] = -1

    def __and__(self, other: Expression) -> Expression:
        return Both("&", self, _expression(other))

    def __or__(self, other: Expression) -> Expression:
        return Both("|", self, _expression(other))

    def __invert__(self) -> Expression:
        return Not(self)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "an expression over columns is not true or false by itself: combine expressions by"
            " & | ~ (each in parentheses), not by and, or, not, in or a < b < c"
        )

    def columns(self) -> list[str]:
        """The columns that it needs, each once."""
        return list(dict.fromkeys(self._columns()))

    # What a filter does with it.

    @abstractmethod
    def _columns(self) -> Iterable[str]:
        """The columns that it needs, perhaps several times."""

    @abstractmethod
    def _check(self, types: dict[str, Any]) -> None:
        """Refuses what does not fit the types of the columns (PyArrow's)."""

    @abstractmethod
    def _evaluate(self, batch: Any) -> Any:
        """A boolean PyArrow array, with nulls, for a record batch of the columns."""

    def _bounds(self, of: dict[str, Bounds]) -> str:
        """Whether it is true for all rows, for none, or for some, by what is known of columns."""
        return MAYBE

    @abstractmethod
    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        """What a node reads (``forebay_protocol::filter``); ``names`` are its names of columns.
        Raises :class:`NotSaid` for a value that the document has no form for.
        """


class NotSaid(Exception):
    """An expression that no document says."""


@dataclass(frozen=True)
class Bounds:
    """What statistics say of a column in some rows.

    Attributes:
        low, high: No value that is not missing is below or above; None if not known.
        nulls: How many are missing; None if not known.
        rows: How many rows there are.
    """

    low: Any
    high: Any
    nulls: int | None
    rows: int


def _expression(value: Any) -> Expression:
    if isinstance(value, Column):
        raise TypeError(f'{value!r} is a column: compare it, as in {value!r} == "en"')
    if not isinstance(value, Expression):
        raise TypeError(
            f"& and | combine expressions, not {type(value).__name__}: put comparisons in"
            ' parentheses, as in (col("a") == 1) & (col("b") == 2)'
        )
    return value


class Column:
    """A column, to be compared. Made by :func:`forebay.col`."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"col takes the name of a column, not {name!r}")
        self.name = name

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return Compare(self.name, "==", _literal(other))

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return Compare(self.name, "!=", _literal(other))

    def __lt__(self, other: Any) -> Expression:
        return Compare(self.name, "<", _literal(other))

    def __le__(self, other: Any) -> Expression:
        return Compare(self.name, "<=", _literal(other))

    def __gt__(self, other: Any) -> Expression:
        return Compare(self.name, ">", _literal(other))

    def __ge__(self, other: Any) -> Expression:
        return Compare(self.name, ">=", _literal(other))

    def isin(self, values: Iterable[Any]) -> Expression:
        """Whether the value is one of these."""
        if isinstance(values, (str, bytes)):
            raise TypeError("isin takes a list of values, not a text")
        if not isinstance(values, Iterable):
            raise TypeError(f"isin takes a list of values, not {values!r}")
        members = tuple(_literal(v) for v in values)
        if len(members) > MEMBERS_MAX:
            raise InvalidRequest(
                f"isin with {len(members):,} values; at most {MEMBERS_MAX:,}",
                hint="filter by a function, or join before",
            )
        return IsIn(self.name, members)

    def is_null(self) -> Expression:
        """Whether the value is missing."""
        return IsNull(self.name)

    def startswith(self, prefix: str | bytes) -> Expression:
        """Whether a text, or bytes, begins with this."""
        if not isinstance(prefix, (str, bytes)):
            raise TypeError(f"startswith takes a str or bytes, not {type(prefix).__name__}")
        return StartsWith(self.name, prefix)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self!r} is a column, and not true or false by itself")

    def __and__(self, other: Any) -> NoReturn:
        raise TypeError(f"{self!r} is a column: compare it, as in {self!r} == True")

    __or__ = __rand__ = __ror__ = __and__

    def __invert__(self) -> NoReturn:
        raise TypeError(f"{self!r} is a column: compare it, as in {self!r} == False")

    def __repr__(self) -> str:
        return f"col({json.dumps(self.name, ensure_ascii=False)})"


def col(name: str) -> Column:
    """A column of a dataset in an expression for :meth:`forebay.Dataset.filter`:
    ``forebay.col("lang") == "en"``.

    Compared by ``==  !=  <  <=  >  >=`` with numbers, texts, bytes, ``bool``, dates and decimals;
    and ``.isin([…])``, ``.is_null()``, ``.startswith("…")``. Combined by ``&``, ``|`` and ``~``.
    """
    return Column(name)


_TOO_FINE = "columns are compared with times of whole microseconds, and not with {}"
_AS_MICROSECONDS = (
    "give a datetime; of a NumPy time, value.astype('M8[us]').item(). A function sees nanoseconds"
)


def _is_missing(value: Any) -> bool:
    """None, and what NumPy and pandas have for it."""
    if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):
        return not getattr(value, "ndim", 0) and str(value) == "NaT"
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _literal(value: Any) -> Any:
    if isinstance(value, (Column, Expression)):
        raise TypeError("columns are compared with values, not with other columns")
    if hasattr(value, "as_py"):
        value = value.as_py()
    if _is_missing(value):
        raise InvalidRequest(f"nothing is equal to {value}", hint='give col("…").is_null()')
    if getattr(value, "nanosecond", 0):
        raise InvalidRequest(_TOO_FINE.format(value), hint=_AS_MICROSECONDS)
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime()
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        kind, value = getattr(getattr(value, "dtype", None), "kind", ""), value.item()
        # NumPy's times that Python's types cannot hold are numbers then.
        if kind in ("m", "M") and isinstance(value, int):
            raise InvalidRequest(_TOO_FINE.format("a time of NumPy"), hint=_AS_MICROSECONDS)
    if not isinstance(value, (bool, int, float, str, bytes, datetime, date, Decimal)):
        raise TypeError(
            f"columns are compared with numbers, texts, bytes, bool, dates and decimals, not with"
            f" {type(value).__name__}"
        )
    if isinstance(value, float) and math.isnan(value):
        raise InvalidRequest("nothing is equal to NaN", hint="filter by a function")
    if isinstance(value, datetime) and value.utcoffset() is not None:
        # What a filter is kept under is its text, and zones may have texts like "tzlocal()". Near
        # the years 1 and 9999 there may be no such time in UTC.
        with contextlib.suppress(OverflowError):
            value = value.astimezone(UTC)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise InvalidRequest(f"{value} fits no column", hint="columns have at most 64 bits")
    return value


@dataclass(frozen=True, eq=False)
class OfColumn(Expression):
    """An expression over one column."""

    column: str

    def _columns(self) -> Iterable[str]:
        return [self.column]

    def _check(self, types: dict[str, Any]) -> None:
        if self.column not in types:
            raise InvalidRequest(
                f"the filter needs a column {self.column!r}, which is not there",
                hint=f"the columns: {', '.join(types)}",
            )
        for value in self._literals():
            _check_type(self, types[self.column], value)

    def _literals(self) -> Sequence[Any]:
        return ()

    def _named(self) -> str:
        return repr(Column(self.column))


@dataclass(frozen=True, eq=False)
class Compare(OfColumn):
    how: str
    value: Any

    def _literals(self) -> Sequence[Any]:
        return (self.value,)

    def _evaluate(self, batch: Any) -> Any:
        import pyarrow.compute as pc

        array = exact(plain(batch.column(self.column)))
        against = _against(array.type, self.how, self.value)
        if isinstance(against, bool):
            return pc.if_else(pc.is_valid(array), against, None)
        how, value = against
        return getattr(pc, COMPARISONS[how])(array, value)

    def _bounds(self, of: dict[str, Bounds]) -> str:
        known = of.get(self.column)
        if known is None:
            return MAYBE
        if known.nulls is not None and known.nulls == known.rows:
            return NEVER
        low, high, value = known.low, known.high, self.value
        try:
            none, every = {
                "==": (value < low or value > high, False),
                "!=": (False, value < low or value > high),
                "<": (low >= value, high < value),
                "<=": (low > value, high <= value),
                ">": (high <= value, low > value),
                ">=": (high < value, low >= value),
            }[self.how]
        except TypeError:
            return MAYBE
        is_float = any(isinstance(v, float) for v in (low, high, value))
        if none:
            return NEVER
        # NaN is in no bounds.
        return ALWAYS if every and known.nulls == 0 and not is_float else MAYBE

    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        kind, value = _said(self.value)
        column = names[self.column]
        return {"op": "compare", "column": column, "how": self.how, "value": {kind: value}}

    def __repr__(self) -> str:
        return f"{self._named()} {self.how} {self.value!r}"


@dataclass(frozen=True, eq=False)
class IsIn(OfColumn):
    values: tuple[Any, ...]

    def _literals(self) -> Sequence[Any]:
        return self.values

    def _evaluate(self, batch: Any) -> Any:
        import pyarrow.compute as pc

        array = exact(plain(batch.column(self.column)))
        found = pc.is_in(array, value_set=_members(array.type, self.values))
        return pc.if_else(pc.is_valid(array), found, None)

    def _bounds(self, of: dict[str, Bounds]) -> str:
        each = [Compare(self.column, "==", v)._bounds(of) for v in self.values]
        return NEVER if all(e == NEVER for e in each) else MAYBE

    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        values: dict[str, list[Any]] = {}
        for kind, value in map(_said, self.values):
            values.setdefault(kind, []).append(value)
        return {"op": "isin", "column": names[self.column], "values": values}

    def __repr__(self) -> str:
        return f"{self._named()}.isin([{', '.join(map(repr, self.values))}])"


@dataclass(frozen=True, eq=False)
class IsNull(OfColumn):
    def _evaluate(self, batch: Any) -> Any:
        return batch.column(self.column).is_null()

    def _bounds(self, of: dict[str, Bounds]) -> str:
        known = of.get(self.column)
        if known is None or known.nulls is None:
            return MAYBE
        return NEVER if known.nulls == 0 else ALWAYS if known.nulls == known.rows else MAYBE

    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        return {"op": "is_null", "column": names[self.column]}

    def __repr__(self) -> str:
        return f"{self._named()}.is_null()"


@dataclass(frozen=True, eq=False)
class StartsWith(OfColumn):
    prefix: str | bytes

    def _literals(self) -> Sequence[Any]:
        return (self.prefix,)

    def _evaluate(self, batch: Any) -> Any:
        import pyarrow.compute as pc

        return pc.starts_with(plain(batch.column(self.column)), self.prefix)

    def _bounds(self, of: dict[str, Bounds]) -> str:
        known = of.get(self.column)
        if known is None:
            return MAYBE
        if known.nulls is not None and known.nulls == known.rows:
            return NEVER
        try:
            # Bounds may be cut off: a bound above is then above all with the same beginning.
            if known.high < self.prefix or known.low[: len(self.prefix)] > self.prefix:
                return NEVER
        except TypeError:
            pass
        return MAYBE

    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        kind, value = _said(self.prefix)
        return {"op": "startswith", "column": names[self.column], "prefix": {kind: value}}

    def __repr__(self) -> str:
        return f"{self._named()}.startswith({self.prefix!r})"


@dataclass(frozen=True, eq=False)
class Both(Expression):
    how: str
    left: Expression
    right: Expression

    def __post_init__(self) -> None:
        depth = 1 + max(self.left._depth, self.right._depth)
        if depth > DEPTH_MAX:
            raise InvalidRequest(
                f"an expression of more than {DEPTH_MAX} parts within each other",
                hint="use isin for many values of one column",
            )
        object.__setattr__(self, "_depth", depth)

    def _columns(self) -> Iterable[str]:
        return [*self.left._columns(), *self.right._columns()]

    def _check(self, types: dict[str, Any]) -> None:
        self.left._check(types)
        self.right._check(types)

    def _evaluate(self, batch: Any) -> Any:
        import pyarrow.compute as pc

        combine = pc.and_kleene if self.how == "&" else pc.or_kleene
        return combine(self.left._evaluate(batch), self.right._evaluate(batch))

    def _bounds(self, of: dict[str, Bounds]) -> str:
        sides = {self.left._bounds(of), self.right._bounds(of)}
        decides, other = (NEVER, ALWAYS) if self.how == "&" else (ALWAYS, NEVER)
        return decides if decides in sides else other if sides == {other} else MAYBE

    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        left, right = self.left._document(names), self.right._document(names)
        return {"op": "and" if self.how == "&" else "or", "left": left, "right": right}

    def __repr__(self) -> str:
        return f"({self.left!r}) {self.how} ({self.right!r})"


@dataclass(frozen=True, eq=False)
class Not(Expression):
    of: Expression

    def __post_init__(self) -> None:
        depth = 1 + self.of._depth
        if depth > DEPTH_MAX:
            raise InvalidRequest("an expression is negated too many times", hint="leave them out")
        object.__setattr__(self, "_depth", depth)

    def _columns(self) -> Iterable[str]:
        return self.of._columns()

    def _check(self, types: dict[str, Any]) -> None:
        self.of._check(types)

    def _evaluate(self, batch: Any) -> Any:
        import pyarrow.compute as pc

        return pc.invert(self.of._evaluate(batch))

    def _bounds(self, of: dict[str, Bounds]) -> str:
        # True nowhere does not mean false everywhere: it may be neither.
        return NEVER if self.of._bounds(of) == ALWAYS else MAYBE

    def _document(self, names: dict[str, str]) -> dict[str, Any]:
        return {"op": "not", "of": self.of._document(names)}

    def __repr__(self) -> str:
        return f"~({self.of!r})"


def _said(value: Any) -> tuple[str, Any]:
    """A literal in a document: its type, and its value there."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        return "int", int(value)
    if isinstance(value, float):
        # As text: readers of JSON round.
        return "float", repr(float(value))
    if isinstance(value, str):
        return "string", value
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode()
    if isinstance(value, datetime):
        zone = value.tzinfo is not None
        since = value - (EPOCH if zone else EPOCH.replace(tzinfo=None))
        return "timestamp_utc" if zone else "timestamp", since // timedelta(microseconds=1)
    if isinstance(value, date):
        return "date", value.toordinal() - EPOCH.toordinal()
    if isinstance(value, Decimal) and value.is_finite():
        if len(value.as_tuple().digits) <= DECIMAL_DIGITS_MAX:
            return "decimal", str(value)
    raise NotSaid(f"{value!r}")


def _against(kind: Any, how: str, value: Any) -> tuple[str, Any] | bool:
    """A comparison with a literal, as it is made with a column of this type: how, and with what
    value of the type. Or what it is for every value, if the column can hold none like it.

    Numbers are compared as such, whatever their types: 2**53 + 1 is above 2.0**53.
    """
    import pyarrow as pa

    differ = how == "!="
    if pa.types.is_integer(kind):
        low, high = _limits(kind)
        if isinstance(value, float) and math.isfinite(value):
            whole = math.floor(value)
            if whole != value:
                if how in ("==", "!="):
                    return differ
                how = "<=" if how in ("<", "<=") else ">"
            value = whole
        if not low <= value <= high:
            return differ or (how != "==" and (how in ("<", "<=")) == (value > high))
        return how, pa.scalar(value, kind)
    if pa.types.is_floating(kind) and isinstance(value, int):
        near = float(value)
        if near != value:
            if how in ("==", "!="):
                return differ
            # No number of the column is between the two.
            if how in ("<", "<="):
                how = "<" if near > value else "<="
            else:
                how = ">=" if near > value else ">"
        return how, pa.scalar(near)
    if pa.types.is_timestamp(kind) and isinstance(value, datetime):
        return how, pa.scalar(value, pa.timestamp("us", kind.tz))
    if pa.types.is_decimal(kind) and isinstance(value, (int, Decimal)):
        return _against_decimals(kind, how, Decimal(value))
    return how, value


def _against_decimals(kind: Any, how: str, value: Decimal) -> tuple[str, Any] | bool:
    """The same for a column of decimals. Next to others, PyArrow takes only a value with which both
    have no more digits than its widest type.
    """
    import pyarrow as pa

    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"{value} is no decimal number")
    number = int("".join(map(str, digits))) * (-1 if sign else 1)
    # How many of its digits are before the last one of the column, that one included.
    length = len(str(abs(number)))
    before = length + exponent + kind.scale
    if not number:
        units = 0
    elif before > kind.precision:
        units = 10**kind.precision * (-1 if sign else 1)
    elif exponent + kind.scale >= 0:
        units = number * 10 ** (exponent + kind.scale)
    else:
        # Of a value that is far less than one unit, only the sign counts.
        units, rest = divmod(number, 10 ** min(-exponent - kind.scale, length + 1))
        if rest:
            if how in ("==", "!="):
                return how == "!="
            how = "<=" if how in ("<", "<=") else ">"
    limit = 10**kind.precision - 1
    if not -limit <= units <= limit:
        return how == "!=" or (how != "==" and (how in ("<", "<=")) == (units > limit))
    with localcontext(Context(prec=DECIMAL_DIGITS_MAX)):
        return how, pa.scalar(Decimal(units).scaleb(-kind.scale), kind)


def _members(kind: Any, values: Sequence[Any]) -> Any:
    """Those of the values that a column of this type may hold, as an array of the type."""
    import pyarrow as pa

    t = pa.types
    if t.is_integer(kind):
        low, high = _limits(kind)
        whole = [int(v) for v in values if not isinstance(v, float) or v.is_integer()]
        return pa.array([v for v in whole if low <= v <= high], kind)
    if t.is_floating(kind):
        # 0.0 is equal to -0.0, but is another member of a set.
        return pa.array([float(v) + 0.0 for v in values if float(v) == v], kind)
    if not (t.is_timestamp(kind) or t.is_decimal(kind) or t.is_fixed_size_binary(kind)):
        return pa.array(values, kind)
    given = pa.timestamp("us", kind.tz) if t.is_timestamp(kind) else kind
    found = [pa.array([], kind)]
    for value in values:
        try:
            found.append(pa.array([value], given).cast(kind))
        except pa.ArrowInvalid:
            # It has more digits, say, than any value of the column.
            continue
    return pa.concat_arrays(found)


def _limits(kind: Any) -> tuple[int, int]:
    """The least and the greatest number of an integer type."""
    import pyarrow as pa

    bits = kind.bit_width
    if pa.types.is_signed_integer(kind):
        return -(1 << bits - 1), (1 << bits - 1) - 1
    return 0, (1 << bits) - 1


def exact(array: Any) -> Any:
    """A column, floating-point numbers of any width as those of 64 bits, in which all of them and
    all literals are what they are; without -0.0.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.add(array.cast(pa.float64()), 0.0) if pa.types.is_floating(array.type) else array


def plain(array: Any) -> Any:
    """A column in a form that all comparisons know."""
    import pyarrow as pa

    from ._alike import is_bytes_view, is_text_view

    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text_view(array.type):
        return array.cast(pa.large_string())
    if is_bytes_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _check_type(expression: OfColumn, kind: Any, value: Any) -> None:
    import pyarrow as pa

    from ._alike import is_bytes_view, is_text_view

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        # JSON, say, which is compared as the text that it is stored as.
        kind = kind.storage_type
    if t.is_dictionary(kind):
        kind = kind.value_type
    texts = t.is_string(kind) or t.is_large_string(kind) or is_text_view(kind)
    some_bytes = t.is_binary(kind) or t.is_large_binary(kind) or is_bytes_view(kind)
    some_bytes = some_bytes or t.is_fixed_size_binary(kind)
    if isinstance(expression, StartsWith):
        fits = isinstance(value, str) if texts else isinstance(value, bytes) and some_bytes
        fits = fits and not t.is_fixed_size_binary(kind)
    elif t.is_boolean(kind):
        fits = isinstance(value, bool)
    elif t.is_integer(kind) or t.is_floating(kind):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif t.is_decimal(kind):
        fits = isinstance(value, (int, Decimal)) and not isinstance(value, bool)
    elif texts:
        fits = isinstance(value, str)
    elif some_bytes:
        fits = isinstance(value, bytes)
    elif t.is_timestamp(kind):
        fits = isinstance(value, datetime) and (value.tzinfo is None) == (kind.tz is None)
    elif t.is_date(kind):
        fits = isinstance(value, date) and not isinstance(value, datetime)
    else:
        fits = False
    if not fits:
        zone = " (with a zone if the column has one)" if t.is_timestamp(kind) else ""
        raise InvalidRequest(
            f"{expression!r}: column {expression.column!r} is of {kind}, which does not compare"
            f" with {value!r}{zone}",
            hint="give a value of the column's type, cast the column, or filter by a function",
        )
