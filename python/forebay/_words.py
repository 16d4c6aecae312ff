"""Numbers of things, as people read them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

#: How many names are shown.
NAMES_SHOWN = 20


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 row``, ``1,200 rows``. ``many``: of what is more than one, where that has no ``s``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def listed(names: Collection[str]) -> str:
    """``a, b, c``; of many, the first, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    # "and 1 more" is no shorter than a name.
    if more < 2:
        return ", ".join(names)
    return f"{', '.join(islice(names, NAMES_SHOWN))} and {more:,} more"
