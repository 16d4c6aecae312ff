"""``forebay show``: what a dataset is, what its columns have in them, and its first rows.

The command line of :meth:`forebay.Dataset.describe`. ``forebay show`` and ``python -m forebay
show`` run it; most other commands of ``forebay`` are of the compiled program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _command
from ._look import PREVIEW_ROWS, as_json, describe, one_line, plain, told
from ._paced import Pace, paced
from ._words import counted
from .errors import InvalidRequest

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["main"]

#: Rows that are shown, at most, and of these in one request, at most.
ROWS_MAX = 10_000
REQUEST_ROWS = 64
#: Left-out files that are named.
NAMED = 10

EXAMPLES = """\
Examples:
  forebay show s3://bucket/corpus/
  forebay show 'bucket/c4/**.parquet' --column text --rows 20
  forebay show 'bucket/images/{000..127}.tar' --sample 0
  forebay show manifest:bucket/c4.manifest --json

The columns are described by up to 1,000 rows, spread evenly (--sample); figures with * are of all
rows, by the statistics in Parquet files. A histogram has a bar for each range of lengths, the
shortest first.
JSON: {"source", "version", "format", "files", "bytes", "rows", "left_out": [{"name", "message"}],
"seen": rows that were looked at, "columns": {NAME: {"type", "rows", "nulls", "nans", "low", "high",
"mean", "lengths": {"least", "mean", "most", "histogram": [[from, to, rows]]}, "of_all": names of
the figures that are of all rows}}, "first": [ROW]}.
In a row, bytes are {"kind", "bytes"}, and of long texts and lists only the beginning is there. What
WebDataset takes for a text or a number in a tar (.txt, .json, .cls, …) is shown as that."""


def _parser() -> _command.Parser:
    parser = _command.parser(
        "show",
        "Show a dataset: its files, what its columns have in them, and its first rows",
        EXAMPLES,
    )
    add = parser.add_argument
    add("source", nargs="+", metavar="SOURCE", help="names, prefixes, patterns or a manifest")
    add(
        "--rows",
        type=int,
        default=PREVIEW_ROWS,
        metavar="N",
        help=f"how many of the first rows to show (default: {PREVIEW_ROWS}; at most {ROWS_MAX:,})",
    )
    add(
        "--column",
        action="append",
        metavar="NAME",
        help="only this column; may be given several times",
    )
    add(
        "--sample",
        type=int,
        metavar="N",
        help="describe the columns by so many rows (default: 1,000); 0 reads none",
    )
    add("--format", metavar="FORMAT", help="of the files (default: as their names say)")
    _command.add_features(parser)
    add("--skip-damaged", action="store_true", help="leave damaged files out instead of failing")
    _command.add_common(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 done, 1 failed, 2 usage, 130 interrupted."""
    return _command.run(_parser(), arguments, _run)


def _run(args: argparse.Namespace) -> int:
    if not 0 <= args.rows <= ROWS_MAX:
        raise InvalidRequest(f"--rows {args.rows}", hint=f"give a number from 0 to {ROWS_MAX:,}")
    if args.sample is not None and args.sample < 0:
        raise InvalidRequest(f"--sample {args.sample}", hint="give a number of rows, or 0 for none")
    ds = _opened(args)
    seen, columns = 0, {name: {"type": kind} for name, kind in ds.schema.items()}
    summary = None
    if args.sample != 0 and len(ds):
        summary = describe(ds, args.sample)
        said = summary.json()
        seen, columns = said["seen"], said["columns"]
    if args.json:
        document = {
            "source": ds.name,
            "version": ds.version,
            "format": ds.format,
            "files": ds.info["files"],
            "bytes": ds.info["bytes"],
            "rows": len(ds),
            "left_out": [{"name": name, "message": said} for name, said in _left_out(ds)],
            "seen": seen,
            "columns": columns,
            "first": [
                {name: as_json(value) for name, value in row.items()}
                for row in _first(ds, args.rows)
            ],
        }
        print(json.dumps(document, indent=2))
        return 0
    # Terminals without these characters show others.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    for line in _about(ds):
        print(line)
    print()
    if summary is None:
        print("columns")
        width = max((len(one_line(name)) for name in columns), default=0)
        for name, kind in ds.schema.items():
            print(f"  {one_line(name).ljust(width)}  {one_line(kind)}")
    else:
        print(f"columns, by {summary._seen()}")
        for line in summary._lines():
            print(f"  {line}")
    for number, row in enumerate(_first(ds, args.rows)):
        print(f"\nrow {number:,}")
        width = max((len(one_line(name)) for name in row), default=0)
        for name, value in row.items():
            print(f"  {one_line(name).ljust(width)}  {told(value)}")
    return 0


def _opened(args: argparse.Namespace) -> Dataset[Any]:
    from . import open

    return open(
        args.source,
        client=_command.client(args),
        format=args.format,
        example=_command.features(args),
        columns=args.column,
        on_damaged="skip" if args.skip_damaged else "error",
    )


def _first(ds: Dataset[Any], rows: int) -> Any:
    """The first rows."""
    ids = np.arange(min(rows, len(ds)), dtype=np.uint64)
    for some in paced(ids, Pace(REQUEST_ROWS), lambda piece: ds._take(piece, ds._columns)):
        for row in some:
            yield plain(ds, row)


def _about(ds: Dataset[Any]) -> list[str]:
    info = ds.info
    rows = [
        ("dataset", one_line(ds.name)),
        ("version", ds.version),
        ("format", ds.format),
        ("files", f"{info['files']:,} ({_size(info['bytes'])})"),
        ("rows", f"{len(ds):,}"),
    ]
    lines = [f"{name:<9} {value}" for name, value in rows]
    left_out = _left_out(ds)
    lines += [f"left out  {one_line(name)}: {one_line(said)}" for name, said in left_out[:NAMED]]
    if len(left_out) > NAMED:
        lines.append(f"left out  {len(left_out) - NAMED:,} more")
    return lines


def _left_out(ds: Dataset[Any]) -> list[tuple[str, str]]:
    """What is not in the dataset though it was named, and why: damaged files, and names with
    characters that no request to the node may have, of which it tells one.
    """
    left_out = [(s["name"], s["message"]) for s in ds.info.get("skipped", [])]
    if unreadable := ds.info.get("unreadable_names", 0):
        why = f"{counted(unreadable, 'name')} like this cannot be read through this node"
        left_out.insert(0, (ds.info["unreadable_name"], why))
    return left_out


def _size(size: int) -> str:
    """Bytes as the other commands write them."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    at, value = 0, float(size)
    while value >= 1024 and at + 1 < len(units):
        at, value = at + 1, value / 1024
    return f"{size} B" if at == 0 else f"{value:.1f} {units[at]}"
