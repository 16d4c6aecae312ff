"""One line on the terminal for work that takes long.

Nothing is drawn in the first second, nor where standard error is not a terminal (unless it was
asked for): a program that runs in a batch system has no use for a line that is drawn over itself.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from ._arguments import flag_or_none

#: Seconds between two drawings, and before the first.
REDRAW_SECONDS = 0.2
FIRST_SECONDS = 1.0
WIDTH_COLUMNS = 24


class _Nowhere(io.StringIO):
    """In place of standard error where there is none, as in a process that was started without."""

    def write(self, text: str) -> int:
        return len(text)


def _is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except (AttributeError, ValueError):
        # What programs put in place of standard error may only have `write`, or be closed.
        return False


class Bar:
    """``what  ████░░░░  42 %  1,234/2,900 rows  310 rows/s  0:05 left``.

    Args:
        what: What is being done.
        total: How many units it is, if known.
        unit: What is counted.
        show: True or False; None draws on terminals only.
        note: Called at each drawing for a text to put behind.

    A context manager; the line ends with it. Methods may be called from one thread at a time.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "rows",
        *,
        show: bool | None = None,
        note: Callable[[], str] | None = None,
        file: TextIO | None = None,
    ) -> None:
        show = flag_or_none("progress", show)
        self.what, self.total, self.unit, self.note = what, total, unit, note
        self.file = file or sys.stderr or _Nowhere()
        self.done = 0
        self._began = time.monotonic()
        self._next = self._began + (0 if show else FIRST_SECONDS)
        self._drawn = 0
        self._show = _is_terminal(self.file) if show is None else show

    def advance(self, by: int = 1) -> None:
        """Counts ``by`` further units."""
        self.done += by
        if self._show and time.monotonic() >= self._next:
            self._draw()

    def to(self, done: int, total: int | None) -> None:
        """Sets both counts."""
        self.total = total
        self.advance(done - self.done)

    def line(self) -> str:
        """What is drawn now."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = self.done / seconds
        parts = [self.what]
        if self.total:
            share = min(self.done / self.total, 1.0)
            full = int(share * WIDTH_COLUMNS)
            parts += [
                "█" * full + "░" * (WIDTH_COLUMNS - full),
                f"{share:4.0%}",
                f"{self.done:,}/{self.total:,} {self.unit}",
            ]
        else:
            parts.append(f"{self.done:,} {self.unit}")
        parts.append(f"{rate:,.0f} {self.unit}/s")
        if self.total and self.done:
            parts.append(f"{clock((self.total - self.done) / rate)} left")
        if self.note:
            parts.append(self.note())
        return "  ".join(parts)

    def _draw(self, end: str = "") -> None:
        text = self.line()
        # Overwrites the part by which the last drawing was longer.
        self.file.write("\r" + text + " " * max(0, self._drawn - len(text)) + end)
        self.file.flush()
        self._drawn = len(text)
        self._next = time.monotonic() + REDRAW_SECONDS

    def close(self) -> None:
        """Draws the last state, if anything was drawn, and ends the line."""
        if self._drawn:
            self._draw("\n")
            self._drawn = 0
        self._show = False

    def leave(self, pid: int) -> None:
        """Ends the line as it was drawn last, in the process where that was. Calls nothing that may
        wait: a garbage collection does this, in any thread.
        """
        if self._drawn and pid == os.getpid():
            self._drawn = 0
            self.file.write("\n")
            self.file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = max(0, int(seconds + 0.5))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
