"""The command line: ``forebay …`` and ``python -m forebay …``."""

from __future__ import annotations

import sys

from ._forebay import cli_main


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    return cli_main(["forebay", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
