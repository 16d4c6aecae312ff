"""``forebay reshard``: the rows of a dataset, in any order, as new shards.

The command line of :meth:`forebay.Dataset.write`. ``forebay reshard`` and ``python -m forebay
reshard`` run it; the other commands of ``forebay`` are of the compiled program.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from . import _command, _options
from ._words import counted
from .errors import Error, InvalidRequest

__all__ = ["main"]

EXAMPLES = """\
Examples:
  forebay reshard 'bucket/raw/**.parquet' bucket/shuffled/ --shuffle full --compression zstd
  forebay reshard bucket/images/ bucket/tars/ --format tar --shard-size 1GiB
  forebay reshard 'a/**.jsonl' 'b/**.jsonl' c/all/ --format mds --columns text
  forebay reshard a/ b/ --compression zstd --option data_page_size=65536 \\
    --option 'use_dictionary=["label"]' --option write_page_index=true

What was stopped goes on when it is called again with the same arguments. Read the result as
manifest:TARGET/_manifest, which is written last.
JSON: {"target", "format", "manifest", "shards", "rows", "bytes", "found", "seconds"}"""


#: What the arguments of :func:`forebay.open` are called here.
_OF_OPEN = {"format": "--source-format"}
#: The same of :meth:`forebay.Dataset.write`.
_OF_WRITE = {
    "order": "--shuffle",
    "index": "--no-index",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            "format",
            "seed",
            "epoch",
            "columns",
            "shard_size",
            "shard_rows",
            "compression",
            "row_group_rows",
            "key",
            "name",
            "writers",
        )
    },
}
#: Before the name of an argument: not a part of a path, of a text in quotes or of another name.
_BEFORE = r"(?<![\w/.='\"{-])"
_ARGUMENT = re.compile(rf"""{_BEFORE}([a-z]\w*)=("[^"]*"|'[^']*'|\w+|(?={{))?""")


def _parser() -> _command.Parser:
    parser = _command.parser(
        "reshard", "Write the rows of a dataset, in any order, into new shards", EXAMPLES
    )
    add = parser.add_argument
    add("source", nargs="+", metavar="SOURCE", help="names, prefixes, patterns or a manifest")
    add(
        "target",
        metavar="TARGET",
        help="where the shards go: bucket/prefix/, below which nothing is",
    )
    add(
        "--format",
        default="parquet",
        metavar="FORMAT",
        help="of the shards: parquet (default), tar, tfrecord, mds, jsonl",
    )
    add("--source-format", metavar="FORMAT", help="of the sources (default: as their names say)")
    _command.add_features(parser)
    add("--columns", metavar="A,B", help="write only these columns")
    add(
        "--shuffle", default="none", metavar="ORDER", help="none, window:ROWS, block:BLOCKS or full"
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order (default: 0)")
    add("--epoch", type=int, default=0, metavar="N", help="of the order (default: 0)")
    add("--shard-size", metavar="SIZE", help="of a shard, about (default: 256MiB; MDS: 64MiB)")
    add("--shard-rows", type=int, metavar="N", help="rows of a shard, exactly, instead")
    add(
        "--compression",
        metavar="CODEC",
        help='such as zstd, zstd:9, snappy, gz, or {"column": "zstd"} (default: none)',
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the format, as its library calls it; values as in JSON, or texts; may be repeated",
    )
    add("--row-group-rows", type=int, metavar="N", help="Parquet: rows of a row group")
    add(
        "--key",
        default="__key__",
        metavar="COLUMN",
        help='tar: the column that names the samples; "" numbers them (default: __key__)',
    )
    add("--no-index", action="store_true", help="TFRecord: without files of offsets")
    add("--name", default="shard", help="what names of shards begin with (default: shard)")
    add("--writers", type=int, metavar="N", help="shards made at the same time (default: 4)")
    _command.add_common(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 done, 1 failed, 2 usage, 130 interrupted."""
    again = "interrupted: the same command goes on"
    return _command.run(_parser(), arguments, _run, again)


@contextlib.contextmanager
def _typed(options: Mapping[str, str]) -> Iterator[None]:
    """Errors of the library name the options that were typed in place of Python's arguments."""
    try:
        yield
    except Error as e:
        e.message = _in_options(e.message, options)
        e.hint = _in_options(e.hint, options) if e.hint else e.hint
        raise


def _in_options(text: str, options: Mapping[str, str]) -> str:
    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name in _options.OPTIONS and (name not in options or value == ""):
            return f"--option {found[0]}"
        if name not in options:
            return found[0]
        if value is None:
            return options[name]
        if re.fullmatch(r"""(["'])[\w:.-]+\1""", value):
            value = value[1:-1]
        return options[name] + (' ""' if value == "None" else f" {value}")

    text = _ARGUMENT.sub(option, text)
    first = re.match(r"[a-z]\w*(?= is )", text)
    if first and first[0] in options:
        text = options[first[0]] + text[first.end() :]
    elif first and first[0] in _options.OPTIONS:
        text = f"--option {text}"
    for name in filter(lambda name: "_" in name, options):
        text = re.sub(rf"{_BEFORE}{name}(?![\w/.=])", options[name], text)
    return text


def _run(args: argparse.Namespace) -> int:
    from . import open
    from .dataset import Dataset

    options = _options.from_texts(args.option)
    columns = [c.strip() for c in args.columns.split(",")] if args.columns is not None else None
    if "columns" in options:
        if columns is not None:
            raise InvalidRequest("give --columns or --option columns=, not both")
        columns = options.pop("columns")
        if not isinstance(columns, dict):
            raise InvalidRequest(
                f"--option columns is {columns!r}",
                hint='encodings of MDS: --option \'columns={"id": "int"}\'; or --columns a,b',
            )
    for name in options.keys() - _options.OPTIONS.keys():
        if name in inspect.signature(Dataset.write).parameters:
            flag = {"order": "shuffle"}.get(name, name.replace("_", "-"))
            is_flag = f"--{flag}" in _parser()._option_string_actions
            raise InvalidRequest(
                f"--option {name}: {name} is not an option of a format",
                hint=f"--{flag}" if is_flag else "`forebay reshard --help` has all arguments",
            )
    compression = args.compression
    if compression is not None and compression.startswith("{"):
        try:
            compression = json.loads(compression)
        except ValueError as e:
            raise InvalidRequest(
                f"--compression {compression} is not JSON: {e}",
                hint='by column: --compression \'{"text": "zstd"}\'',
            ) from None
    client = _command.client(args)
    example = _command.features(args)
    with _typed(_OF_OPEN):
        ds = open(args.source, client=client, format=args.source_format, example=example)
    with _typed(_OF_WRITE):
        done = ds.write(
            args.target,
            args.format,
            order=args.shuffle,
            seed=args.seed,
            epoch=args.epoch,
            columns=columns,
            shard_size=args.shard_size,
            shard_rows=args.shard_rows,
            compression=compression,
            row_group_rows=args.row_group_rows,
            key=args.key or None,
            index=not args.no_index,
            name=args.name,
            writers=args.writers,
            **options,
        )
    if args.json:
        print(
            json.dumps(
                {
                    "target": done.target,
                    "format": done.format,
                    "manifest": done.manifest,
                    "shards": done.shards,
                    "rows": done.rows,
                    "bytes": done.bytes,
                    "found": done.found,
                    "seconds": done.seconds,
                }
            )
        )
        return 0
    there = f" ({done.found:,} were there)" if done.found else ""
    rate = (done.rows / done.seconds) if done.seconds else 0
    print(
        f"{done.manifest}  {counted(done.shards, 'shard')}{there}  {counted(done.rows, 'row')}"
        f"  {counted(done.bytes, 'byte')}  {done.seconds:.2f} s  {rate:,.0f} rows/s"
    )
    return 0
