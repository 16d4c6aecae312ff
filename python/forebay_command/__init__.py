"""The entry point of the command ``forebay``. It lies outside the package, so that Ctrl-C while
Python imports the package ends the command as it does later.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    try:
        from forebay.__main__ import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
