"""Rows of tokens as sequences of one length: what ``pack=`` of a loader takes.

==================  ==============================================================================
``"concatenate"``   one document after the other, cut wherever a pack is full: nothing is wasted
``"best_fit"``      the documents of a window of rows, longest first, each into the fullest pack
                    that has room for it: documents stay whole, and little is wasted
``"one_per_row"``   each document is a pack of its own, and the rest of it is padding
==================  ==============================================================================

A *document* is the tokens of a row, and ``eos_id`` after them. Packs are made from the order of the
plan alone, so they are the same for any number of ranks, workers and rows per batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np

from ._arguments import whole_number
from .errors import InvalidRequest

__all__ = ["Pack"]

Strategy: TypeAlias = Literal["concatenate", "best_fit", "one_per_row"]
LongDocument: TypeAlias = Literal["split", "cut", "error", "skip"]
STRATEGIES = ("concatenate", "best_fit", "one_per_row")
RULES = ("split", "cut", "error", "skip")
#: Types of columns that are lists of whole numbers.
LISTS = r"list.*\b(u?int(?:8|16|32|64))\b"
#: And of lists that are all empty, of which no type is known.
EMPTY_LISTS = r"(?:large_?)?list[(<](?:\w+: )?null[,)>]"
#: The longest pack, and the most rows of a window.
LENGTH_MAX = (1 << 31) - 1
WINDOW_MAX = 1 << 20
#: Rows that are read at a time where packs need no window, at the least; up to the next number of
#: them where they have no more than so many bytes together, of a stream up to fewer; and the most,
#: of which each rank reads its part.
READ_ROWS = 256
READ_ROWS_MOST = 2048
READ_ROWS_STREAM = 1024
READ_BYTES = 4 << 20
READ_ROWS_MAX = 1 << 14


def _whole(what: str, value: Any, least: int, most: int) -> int:
    number = whole_number(value)
    if number is None or not least <= number <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, not {value!r}")
    return number


def _same_lengths(one: Any, other: Any) -> bool:
    """Whether both name the same column, or are the same numbers, of one dataset or several."""
    if one is other:
        return True
    if any(lengths is None or isinstance(lengths, str) for lengths in (one, other)):
        return type(one) is type(other) and bool(one == other)
    if len(one) == len(other) and any(np.ndim(next(iter(each), 0)) for each in (one, other)):
        # Of several datasets.
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(one, other)


@dataclass(frozen=True)
class Pack:
    """How a loader packs rows.

    ::

        loader = ds.loader(pack=forebay.Pack(2048, column="tokens", eos_id=2), batch_size=8)

    Args:
        length: Tokens of a pack.
        column: The column of the tokens (lists of whole numbers), or what ``tokenize`` takes.
        strategy: How documents are put together. ``"concatenate"``: one after the other, cut
            wherever a pack is full, so that nothing is wasted. ``"best_fit"``: those of a window of
            rows, longest first, each into the fullest pack that has room for it, so that they stay
            whole and little is wasted. ``"one_per_row"``: each is a pack of its own, and the rest
            of it is padding.
        too_long: What becomes of a document of more than ``length`` tokens. ``"split"``: it is
            taken apart into parts as long as a pack, and a shorter last one. ``"cut"``: it loses
            what is past ``length``. ``"skip"``: it is left out. ``"error"``: the loop ends and says
            which row it is. (``"concatenate"`` cuts documents of any length at the end of a pack;
            nothing of them is lost.)
        window: Rows of a window of ``"best_fit"``. It is read whole before its first pack is made;
            the packs of a window come in a random order. The others need none.
        pad_id: Fills what documents leave of a pack.
        eos_id: Appended to each row that has tokens. Default: nothing is.
        tokenize: Makes tokens from the column: a ``tokenizers.Tokenizer``, a tokenizer of
            ``transformers`` or of ``tiktoken``, each asked for no special tokens; or any function
            of one value that returns its numbers. It runs in the loader's threads.
        lengths: How many tokens each row has (without ``eos_id``): the name of a column of whole
            numbers, or an array with the length of each row (for a mix: a list of arrays). 8 bytes
            for each row are kept. With it, a rank reads only the rows of its own packs; without it,
            each rank reads (and tokenizes) all rows, as only that tells where packs end.

    Raises:
        ValueError, TypeError: Arguments that make no sense.
    """

    length: int
    column: str = "tokens"
    _: KW_ONLY
    strategy: Strategy = "concatenate"
    too_long: LongDocument = "split"
    window: int = 1024
    pad_id: int = 0
    eos_id: int | None = None
    tokenize: Callable[[Any], Any] | None = None
    lengths: str | Sequence[Any] | np.ndarray | None = field(default=None, hash=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pack):
            return NotImplemented
        names = [f.name for f in fields(self) if f.name != "lengths"]
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and _same_lengths(self.lengths, other.lengths)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        told = ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "lengths")
        # Not the numbers of all rows.
        is_told = self.lengths is None or isinstance(self.lengths, str)
        return f"Pack({told}, lengths={repr(self.lengths) if is_told else '…'})"

    def __post_init__(self) -> None:
        numbers = {
            "length": _whole("Pack(length)", self.length, 1, LENGTH_MAX),
            "window": _whole("Pack(window=)", self.window, 1, WINDOW_MAX),
        }
        for name in ("pad_id", "eos_id"):
            if getattr(self, name) is not None or name == "pad_id":
                given = getattr(self, name)
                numbers[name] = _whole(f"Pack({name}=)", given, -(1 << 63), (1 << 63) - 1)
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        if not isinstance(self.column, str) or not self.column:
            raise TypeError(f"Pack(column=) must be the name of a column, not {self.column!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"Pack(strategy=) must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}"
            )
        if self.too_long not in RULES:
            raise ValueError(
                f"Pack(too_long=) must be one of {', '.join(RULES)}, not {self.too_long!r}"
            )
        if isinstance(self.lengths, (int, float, bytes)):
            raise TypeError(
                "Pack(lengths=) must be the name of a column, or an array with the length of each"
                f" row, not {self.lengths!r}"
            )
        tokenize: Any = self.tokenize
        if tokenize is not None and not (callable(tokenize) or hasattr(tokenize, "encode_batch")):
            raise TypeError(
                "Pack(tokenize=) must be a tokenizer or a function,"
                f" not {type(self.tokenize).__name__}"
            )
        refuse_padding(tokenize)

    def dtype_of(self, kinds: Sequence[str]) -> np.dtype:
        """The type of tokens, for columns of these types (as :attr:`forebay.Dataset.schema` has
        them).

        Raises:
            TypeError: A column is not one of lists of whole numbers, and nothing tokenizes it.
            ValueError: ``pad_id`` or ``eos_id`` does not fit.
        """
        dtype: np.dtype = np.dtype(np.int64)
        if self.tokenize is None:
            found = [re.search(LISTS, kind, re.IGNORECASE) for kind in kinds]
            for kind, match in zip(kinds, found, strict=True):
                if match is None and not re.match(EMPTY_LISTS, kind, re.IGNORECASE):
                    raise TypeError(f"{kind}, not lists of whole numbers")
            if any(found):
                dtype = np.result_type(*(np.dtype(m[1].lower()) for m in found if m))
        if dtype.kind not in "iu":
            # uint64 beside a signed type.
            dtype = np.dtype(np.int64)
        limits = np.iinfo(dtype)
        for name, value in (("pad_id", self.pad_id), ("eos_id", self.eos_id)):
            if value is not None and not limits.min <= value <= limits.max:
                raise ValueError(f"{name}={value} does not fit into {dtype}")
        return dtype

    def rows_at_a_time(self, row_bytes: float) -> int:
        """Rows that are read and packed together, where one has about so many bytes (0: who
        knows)."""
        if self.strategy == "best_fit":
            return self.window
        if self.tokenize is not None or row_bytes <= 0:
            return READ_ROWS
        return max(READ_ROWS, min(READ_ROWS_MOST, int(READ_BYTES / row_bytes)))

    def document(self) -> str:
        """The rules as the compiled plan knows them."""
        return json.dumps(
            {
                "length": self.length,
                "strategy": self.strategy,
                "too_long": self.too_long,
                "ends": self.eos_id is not None,
            }
        )

    def rules(self) -> dict[str, Any]:
        """What makes a place between two packs of one window, or inside a row, one: a state has
        them.
        """
        rules: dict[str, Any] = {
            "length": self.length,
            "column": self.column,
            "strategy": self.strategy,
            "too_long": self.too_long,
            "ends": self.eos_id is not None,
        }
        if self.strategy == "best_fit":
            rules["window"] = self.window
        return rules

    def begun(self) -> dict[str, Any]:
        """What a state says of a place where a window or a row begins."""
        return {"packs" if self.strategy == "best_fit" else "tokens": 0, "rules": self.rules()}


def refuse_padding(tokenizer: Any) -> None:
    """Refuses one of ``tokenizers`` that would make texts longer, or cut them.

    Raises:
        InvalidRequest: It pads or truncates.
    """
    for what, off in (("padding", "no_padding"), ("truncation", "no_truncation")):
        if isinstance(getattr(tokenizer, what, None), dict) and hasattr(tokenizer, off):
            raise InvalidRequest(
                f"the tokenizer of Pack(tokenize=) has {what} on, which would change the texts",
                hint=f"turn it off: tokenizer.{off}()",
            )
