"""Warnings that point at the user's line, however deep in this package they arise."""

from __future__ import annotations

import os
import sys
import warnings

_HERE = os.path.dirname(__file__) + os.sep


def warn(message: str) -> None:
    """Warns of what the innermost frame outside of this package did; if there is none, as in a
    thread of its own, of the outermost one.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
