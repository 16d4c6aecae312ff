"""Numbers of things, as people read them."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 row``, ``1,200 rows``. ``many``: of what is more than one, where that has no ``s``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
