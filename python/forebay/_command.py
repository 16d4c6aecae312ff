"""What the commands of this package share (``forebay reshard``, ``forebay show``). The other
commands are of the compiled program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import errors
from ._forebay import Client
from .errors import Error, InvalidRequest, Unsupported

DEFAULT_NODE = "http://127.0.0.1:8080"
#: What kind an error is of, by the codes of the node and of the compiled commands; the first class
#: that fits.
CODES: tuple[tuple[type[BaseException], str], ...] = (
    (errors.Unauthenticated, "unauthenticated"),
    (errors.PermissionDenied, "permission_denied"),
    (errors.NotFound, "not_found"),
    (errors.AlreadyExists, "already_exists"),
    (errors.Conflict, "conflict"),
    (errors.PreconditionFailed, "precondition_failed"),
    (errors.TooLarge, "too_large"),
    (errors.RangeNotSatisfiable, "range_not_satisfiable"),
    (errors.Busy, "busy"),
    (errors.Damaged, "corrupt"),
    (errors.ConnectionFailed, "origin_unavailable"),
    (errors.Truncated, "origin_unavailable"),
    (errors.Timeout, "timeout"),
    (errors.Unsupported, "unsupported"),
    (ImportError, "unsupported"),
    (errors.SampleFailed, "invalid"),
    (ValueError, "invalid"),
)
#: Of a node that failed, by its status.
FAILED = {502: "origin_unavailable", 507: "no_room"}
#: For the end of a command's help.
ENVIRONMENT = """\
Environment: FOREBAY_NODE is --node; FOREBAY_TOKEN is the token of a node that wants one;
FOREBAY_CA_FILE is --ca."""


class Parser(argparse.ArgumentParser):
    """One that tells mistakes as JSON where the command line asks for that."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the command line, and ends."""
        if not self.as_json:
            super().error(message)
        _failed(ValueError(message), argparse.Namespace(json=True))
        self.exit(2)


def parser(name: str, description: str, epilog: str) -> Parser:
    """A parser of a command line of this command."""
    return Parser(
        prog=f"forebay {name}",
        description=description,
        epilog=f"{epilog}\n{ENVIRONMENT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_common(to: argparse.ArgumentParser) -> None:
    """The options of every command."""
    add = to.add_argument
    add("--node", metavar="ADDR", help="the node to talk to")
    add("--ca", metavar="FILE", help="authorities to trust for the certificate of an https:// node")
    add("--json", action="store_true", help="answer with JSON, for programs")
    add("-v", "--verbose", action="store_true", help="show the causes below an error")


def add_features(to: argparse.ArgumentParser) -> None:
    """The options that say how TFRecord is read: one of them."""
    add = to.add_mutually_exclusive_group().add_argument
    add(
        "--example",
        action="store_true",
        help="TFRecord sources: columns are the features that the first records have",
    )
    add(
        "--feature",
        action="append",
        metavar="NAME=TYPE",
        help="TFRecord sources: this feature is a column of int64, float, bytes, string, or a list"
        " such as list<int64>; may be repeated: those named and no others are read",
    )


def features(args: argparse.Namespace) -> bool | dict[str, str]:
    """``example=``, as these options say it."""
    if not args.feature:
        return bool(args.example)
    found: dict[str, str] = {}
    for text in args.feature:
        name, equals, kind = text.rpartition("=")
        if not equals or name in found:
            raise errors.InvalidRequest(
                f"--feature {text!r} is given twice or has no type",
                hint="each feature once, as in --feature image=bytes",
            )
        found[name] = kind
    return found


def client(args: argparse.Namespace) -> Client:
    """The node that is meant: as for the other commands, one of this machine where nobody names
    one.
    """
    node = args.node or os.environ.get("FOREBAY_NODE") or DEFAULT_NODE
    return Client(node, ca=args.ca)


def run(
    of: Parser,
    arguments: Sequence[str] | None,
    does: Callable[[argparse.Namespace], int],
    interrupted: str = "interrupted",
) -> int:
    """Runs a command and returns its exit status: 0 done, 1 failed, 2 usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    of.as_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        args = of.parse_intermixed_args(words)
    except SystemExit as e:
        return int(e.code or 0)
    if sys.stdout is None:
        _failed(OSError("cannot write to stdout: it is closed"), args)
        return 1
    try:
        status = does(args)
        sys.stdout.flush()
        return status
    except (Error, ImportError, ValueError) as e:
        _failed(e, args)
        usage = isinstance(e, (InvalidRequest, ValueError)) and getattr(e, "status", None) is None
        return 2 if usage else 1
    except BrokenPipeError:
        # Whoever read it left, as `head` does.
        _drop_output()
        return 0
    except OSError as e:
        # The library raises errors of its own: this is the output, on a full disk, say.
        _drop_output()
        what = e.strerror or str(e)
        _failed(OSError(f"cannot write to {e.filename or 'stdout'}: {what}"), args)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def lacks(command: str, library: str, remedy: str, words: Sequence[str]) -> None:
    """Says that a command cannot run without a library that is not installed."""
    error = Unsupported(f"{command} needs {library}, which is not installed", hint=remedy)
    _failed(error, argparse.Namespace(json="--json" in words, verbose=False))


def _drop_output() -> None:
    """What is in the buffer goes nowhere, or Python would try to write it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code(error: BaseException) -> str:
    # A node says it. It knows more kinds than there are classes here.
    if isinstance(error, Error) and error.code is not None:
        return error.code
    found = next((code for kind, code in CODES if isinstance(error, kind)), None)
    return found or FAILED.get(getattr(error, "status", None) or 0, "internal")


def _failed(error: BaseException, args: argparse.Namespace) -> None:
    """Says so in the words and the form of the compiled commands."""
    message = getattr(error, "message", None) or str(error)
    hint = getattr(error, "hint", None)
    causes, cause = [], error.__cause__
    while cause is not None:
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    if args.json:
        said = {"code": _code(error), "message": message}
        if hint:
            said["hint"] = hint
        said["causes"] = causes
        print(json.dumps({"error": said}), file=sys.stderr)
        return
    print(f"error: {message}", file=sys.stderr)
    for line in causes if args.verbose else ():
        print(f"caused by: {line}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
