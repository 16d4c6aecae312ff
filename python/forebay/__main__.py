"""The command line: ``forebay …`` and ``python -m forebay …``."""

from __future__ import annotations

import importlib
import sys

from ._forebay import cli_main

#: Commands of this package: modules with a `main`. The program names them in its help, and says
#: where they are.
_OF_PACKAGE = ("reshard", "show")

#: Options before the command that take a value.
_WITH_VALUE = ("--node", "--ca")


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    arguments = _without_help(sys.argv[1:])
    at = _place(arguments)
    if at is not None and arguments[at] in _OF_PACKAGE:
        try:
            command = importlib.import_module(f".{arguments[at]}", __package__)
            status: int = command.main([*arguments[:at], *arguments[at + 1 :]])
        except ModuleNotFoundError as e:
            if e.name != "numpy":
                raise
            from . import _command

            _command.lacks(f"forebay {arguments[at]}", "NumPy", "pip install numpy", arguments)
            return 1
        except KeyboardInterrupt:
            # While modules were loaded: a command that runs has a word of its own for it.
            print("interrupted", file=sys.stderr)
            return 130
        return status
    return cli_main(["forebay", *arguments])


def _without_help(arguments: list[str]) -> list[str]:
    """``help COMMAND`` as ``COMMAND --help``."""
    at = _place(arguments)
    while at is not None and arguments[at] == "help":
        arguments = [*arguments[:at], *arguments[at + 1 :], "--help"]
        at = _place(arguments)
    return arguments


def _place(arguments: list[str]) -> int | None:
    """Where the command is."""
    at = 0
    while at < len(arguments):
        if not arguments[at].startswith("-"):
            return at
        at += 2 if arguments[at] in _WITH_VALUE else 1
    return None


if __name__ == "__main__":
    from forebay_command import open_streams

    open_streams()
    sys.exit(main())
