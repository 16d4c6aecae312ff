"""Tests that measure time."""

from __future__ import annotations

import time


def in_time(check, *of) -> None:
    """A busy machine takes time between any two lines, which counts as something else; but not
    each time.
    """
    for _ in range(4):
        try:
            return check(*of)
        except AssertionError:
            time.sleep(1)
    return check(*of)
