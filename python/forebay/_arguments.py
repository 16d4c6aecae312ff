"""What callers may give: whole numbers of any library, lists of names, and functions; how large
numbers may be; and how columns differ that have to be the same.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from ._forebay import Client
from ._words import listed
from .errors import InvalidRequest

#: Limits of a plan: rows of an epoch, epochs, ranks, rows of a batch and of its look-ahead, and
#: blocks that are shuffled together.
ROWS_MAX, EPOCHS_MAX, WORLD_MAX = 1 << 42, 1 << 20, 1 << 20
BATCH_ROWS_MAX, LOOKAHEAD_ROWS_MAX = 1 << 20, 1 << 22
GROUP_BLOCKS_MAX = 1 << 20
#: Connections of one stream.
CONNECTIONS_MAX = 256
#: What makes a source a pattern, where no backslash is before it.
WILDCARD = re.compile(r"(?<!\\)(?:\\\\)*[*?[]")
#: What no directory that an origin is has in its name: of a pattern, or before such a character.
OF_PATTERNS = re.compile(r"[*?[{\\]")
#: How paths of files begin, and names of buckets do not.
PATHS = ("/", "./", "../", "~/")
#: What a job may be called, as the node has it.
JOB_NAME = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")
JOB_NAME_TEXT = "1 to 128 letters, digits and -_.:/+="
#: What numbers of 64 bits end with, such as seeds.
U64_MAX = (1 << 64) - 1


def whole_number(value: Any) -> int | None:
    """A whole number as an ``int``, also one of NumPy or a tensor without dimensions; None for
    ``bool`` and whatever else is none.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if is_bool or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real_number(value: Any) -> int | float | None:
    """A whole number as an ``int`` and any other as a ``float``, also one of NumPy or a tensor
    without dimensions; None for ``bool`` and whatever else is none.
    """
    number = whole_number(value)
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if number is not None or is_bool or isinstance(value, (str, bytes, bytearray)):
        return number
    if getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def seconds(value: Any) -> float | None:
    """A finite number of at least 0 as a ``float``, also one of NumPy or a tensor without
    dimensions; None for whatever else is none.
    """
    if isinstance(value, (str, bytes, bytearray)) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < math.inf else None


def flag(name: str, value: Any) -> bool:
    """True or False, also as NumPy has them. Raises TypeError for anything else, such as a text
    from a configuration: ``"no"`` would be true.
    """
    # The client alone does not need NumPy.
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if isinstance(value, bool) or of_numpy:
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


def flag_or_none(name: str, value: Any) -> bool | None:
    """The same, or None: what depends on where it runs, such as ``progress``."""
    return None if value is None else flag(name, value)


def is_unicode(text: str) -> bool:
    """Whether a text can be sent: half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def members(given: Any, kind: type) -> list[Any]:
    """What a list has in it: nothing, if it is none or a single one of its members, whose own are
    not to be read.
    """
    return list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else []


def column_names(given: Iterable[str] | str) -> list[str]:
    """What ``columns=`` names: several, each once, or a single one."""
    if isinstance(given, str):
        return [given]
    try:
        found: list[Any] = list(given)
    except TypeError:
        found = [given]
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"columns must be a list of names, not {given!r}")
    if twice := [name for name, count in Counter(found).items() if count > 1]:
        raise InvalidRequest(
            f"column {twice[0]!r} is named {found.count(twice[0])} times",
            hint="name each column once: rows have it once",
        )
    return found


def source_names(given: Any) -> list[str]:
    """What names the files of a dataset: several sources, or a single one."""
    try:
        found = [given] if isinstance(given, str) else list(given)
    except TypeError:
        found = []
    # The order of a set is another one in each process.
    is_ordered = not isinstance(given, set | frozenset)
    if not found or not is_ordered or not all(isinstance(name, str) for name in found):
        raise TypeError(
            "source must be a str or a list of str: names, prefixes ending in /, patterns,"
            f" or manifest:bucket/key; not {given!r}"
        )
    for name in found:
        if not is_unicode(name):
            raise InvalidRequest(
                f"source {name!r} is not Unicode",
                hint="names of objects are UTF-8: rename the file",
            )
        is_pattern = name.endswith("/") and not name.startswith("manifest:")
        if is_pattern and WILDCARD.search(name):
            raise InvalidRequest(
                f"{name}: a pattern that ends in / matches no object",
                hint=f"{name}** for everything below; or a backslash before each *, ? and [ of a"
                " name",
            )
        place = name.removeprefix("manifest:")
        scheme, mark, _ = place.partition("://")
        is_url = bool(mark) and scheme.lower() in ("hf", "http", "https", "file")
        if is_url or place.startswith(PATHS):
            raise InvalidRequest(
                f"{name}: datasets are named by the bucket that they have at a node, not by a"
                f" {'URL' if is_url else 'path'}",
                hint=_as_origin(name, place),
            )
    return found


def _as_origin(name: str, place: str) -> str:
    """How a node serves the directory of some files, and what these are called then."""
    special = OF_PATTERNS.search(place)
    end = place.rfind("/", 0, special.start() if special else None) + 1
    below = name[: len(name) - len(place)] + f"NAME/{place[end:]}"
    return f"forebay serve --origin NAME={place[:end]}, and then open {below}"


def check_client(given: Any) -> None:
    """Raises TypeError unless it is a client."""
    if not hasattr(given, "open_dataset"):
        raise TypeError(
            f'client must be a forebay.Client, as in forebay.Client("{given}"), not a str'
            if isinstance(given, str)
            else f"client must be a forebay.Client, not {given!r}"
        )


def client_of(given: Client | None) -> Client:
    """The client that was given, or one of the node in ``FOREBAY_NODE``."""
    if given is None:
        return Client()
    check_client(given)
    return given


def job_name(given: Any) -> str | None:
    """What a job is called: ``job=``, or ``FOREBAY_JOB``.

    Raises:
        TypeError, ValueError, InvalidRequest: It cannot be called that.
    """
    if given is None:
        named = os.environ.get("FOREBAY_JOB") or None
        if named is not None and not JOB_NAME.fullmatch(named):
            raise InvalidRequest(
                f"FOREBAY_JOB is {named!r}, which is not the name of a job",
                hint=f"give {JOB_NAME_TEXT}, or unset it",
            )
        return named
    if not isinstance(given, str):
        raise TypeError(f"job must be {JOB_NAME_TEXT}, not {given!r}")
    if not JOB_NAME.fullmatch(given):
        raise ValueError(f"job must be {JOB_NAME_TEXT}, not {given!r}")
    return given


def check_function(what: str, given: Any) -> None:
    """Raises TypeError for what is neither a function nor None."""
    if given is not None and not callable(given):
        raise TypeError(f"{what} must be a function, not {given!r}")


def called_by(function: Any) -> tuple[str, str]:
    """The module and the name that a function has in every process; or those of its class."""
    while isinstance(function, partial):
        function = function.func
    # Functions of NumPy have a name and nothing else.
    for name in ("__qualname__", "__name__"):
        if isinstance(found := getattr(function, name, None), str):
            return getattr(function, "__module__", None) or type(function).__module__, found
    return type(function).__module__, type(function).__qualname__


def check_rows(datasets: Iterable[Any]) -> None:
    """Raises InvalidRequest for a dataset that no order can be made of."""
    for dataset in datasets:
        if not len(dataset):
            raise InvalidRequest(
                f"{dataset.name} has no rows",
                hint="check what was selected or filtered, and that the files have rows",
            )


def differences(
    one: Mapping[str, object], other: Mapping[str, object], there: str = "there", here: str = "here"
) -> str:
    """How the columns of two datasets that are not the same differ, in words: what each is in the
    one (``there``) and in the other (``here``).
    """
    told = [
        f"{c!r} is {one.get(c, 'missing')} {there} and {other.get(c, 'missing')} {here}"
        for c in {**one, **other}
        if one.get(c) != other.get(c)
    ]
    return listed(told) or "their columns are in another order"


def columns_there(wanted: str, there: Collection[str]) -> str:
    """A hint for a column that is not there: which one may be meant, and which there are."""
    near = difflib.get_close_matches(wanted, there, 1)
    return f"{f'did you mean {near[0]!r}? ' if near else ''}its columns: {listed(there)}"
