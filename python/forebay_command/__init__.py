"""The entry point of the command ``forebay``. It lies outside the package, so that Ctrl-C while
Python imports the package ends the command as it does later.
"""

from __future__ import annotations

import os
import sys


def open_streams() -> None:
    """Puts /dev/null in place of standard streams that are closed. Otherwise the next connections
    or files of the cache would get their numbers, and whatever is printed would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        # What is printed to None goes to the standard output, among the results.
        sys.stderr = open(os.devnull, "w")


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    open_streams()
    try:
        from forebay.__main__ import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
