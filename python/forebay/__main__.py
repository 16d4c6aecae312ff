"""The command line: ``forebay …`` and ``python -m forebay …``."""

from __future__ import annotations

import sys

from ._forebay import cli_main

#: Options before the command that take a value.
_WITH_VALUE = ("--node", "--ca")


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    arguments = sys.argv[1:]
    at = _command(arguments)
    # This command is Python's; the program names it in its help, and says where it is.
    if at is not None and arguments[at] == "reshard":
        from .reshard import main as reshard

        return reshard([*arguments[:at], *arguments[at + 1 :]])
    return cli_main(["forebay", *arguments])


def _command(arguments: list[str]) -> int | None:
    """Where the command is."""
    at = 0
    while at < len(arguments):
        if not arguments[at].startswith("-"):
            return at
        at += 2 if arguments[at] in _WITH_VALUE else 1
    return None


if __name__ == "__main__":
    sys.exit(main())
