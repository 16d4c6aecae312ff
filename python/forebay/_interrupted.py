"""What ``python -m forebay`` says of Ctrl-C while it is being imported, in place of a traceback."""

from __future__ import annotations

import sys
from types import TracebackType


def _say(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, where)


sys.excepthook = _say
