"""Orders of a dataset's rows: what ``shuffle=`` of a loader takes.

==================  ==============================================================================
``None``            the order in which the rows are stored
:class:`Window`     a row moves by at most this many rows: cheap, and as weak as a shuffle buffer
:class:`Block`      blocks (row groups, record batches, ranges of a shard, runs of objects) are
                    permuted, and the rows of this many consecutive blocks are permuted together:
                    reads whole blocks, close to a full shuffle in its effect on training
:class:`Full`       single rows are permuted: reads single rows
==================  ==============================================================================

None of them needs an array in memory: an order is computed, position by position, from the seed,
the epoch and the shape of the dataset. The same seed gives the same order everywhere, whatever the
number of ranks, loader workers and rows per batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ._arguments import GROUP_BLOCKS_MAX, U64_MAX, whole_number

__all__ = ["Block", "Full", "Shuffle", "Window"]


def _positive(what: str, value: Any, most: int) -> int:
    number = whole_number(value)
    if number is None or number < 1:
        raise ValueError(f"{what} must be a whole number above 0, not {value!r}")
    if number > most:
        raise ValueError(f"{what} must be at most {most:,}, not {value!r}")
    return number


@dataclass(frozen=True)
class Window:
    """Rows stay near their place.

    Args:
        rows: The limit on how far a row moves, in rows.
    """

    rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _positive("Window(rows)", self.rows, U64_MAX))


@dataclass(frozen=True)
class Block:
    """Blocks are permuted; the rows of ``blocks`` consecutive blocks are permuted together.

    Args:
        blocks: Blocks in the buffer. The node holds their decoded rows in memory at the same time.
    """

    blocks: int

    def __post_init__(self) -> None:
        blocks = _positive("Block(blocks)", self.blocks, GROUP_BLOCKS_MAX)
        object.__setattr__(self, "blocks", blocks)


@dataclass(frozen=True)
class Full:
    """Every order of the rows is equally likely."""


#: What ``shuffle=`` takes. Texts are those of the command line: ``"none"``, ``"window:10000"``,
#: ``"block:16"``, ``"full"``.
Shuffle: TypeAlias = Window | Block | Full | str | None


def to_wire(shuffle: object, what: str = "shuffle") -> dict[str, Any]:
    """A shuffle as the node and the compiled plan know it; ``what`` is the name of the argument.

    Raises:
        ValueError, TypeError: It is not a shuffle.
    """
    match shuffle:
        case None:
            return {"kind": "none"}
        case Window(rows=rows):
            return {"kind": "window", "rows": rows}
        case Block(blocks=blocks):
            return {"kind": "block", "blocks": blocks}
        case Full():
            return {"kind": "full"}
        case str():
            return to_wire(_of_text(shuffle))
    raise TypeError(
        f"{what} must be forebay.Block(16), forebay.Full(), forebay.Window(10000) or None, not"
        f" {shuffle!r:.100}"
    )


def _of_text(text: str) -> Shuffle:
    kind, colon, number = text.partition(":")
    if kind in ("none", "full") and not colon:
        return None if kind == "none" else Full()
    if kind in ("window", "block") and number.isascii() and number.isdigit():
        return Window(int(number)) if kind == "window" else Block(int(number))
    raise ValueError(
        f'{text!r} is not a shuffle: give "none", "window:10000", "block:16" or "full"'
    )
