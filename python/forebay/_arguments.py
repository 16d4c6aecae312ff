"""What callers may give: whole numbers of any library, lists of names, and functions."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from .errors import InvalidRequest


def whole(value: Any) -> int | None:
    """A whole number as an ``int``, also one of NumPy or a tensor without dimensions; None for
    ``bool`` and whatever else is none.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if is_bool or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def column_names(given: Iterable[str] | str) -> list[str]:
    """What ``columns=`` names: several, or a single one."""
    if isinstance(given, str):
        return [given]
    try:
        found = list(given)
    except TypeError:
        found = [given]
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"columns must be a list of names, not {given!r}")
    return found


def check_function(what: str, given: Any) -> None:
    """Raises TypeError for what is neither a function nor None."""
    if given is not None and not callable(given):
        raise TypeError(f"{what} takes a function, not {given!r}")


def check_rows(datasets: Iterable[Any]) -> None:
    """Raises InvalidRequest for a dataset that no order can be made of."""
    for dataset in datasets:
        if not len(dataset):
            raise InvalidRequest(
                f"{dataset.name} has no rows",
                hint="check what was selected or filtered, and that the files have rows",
            )
