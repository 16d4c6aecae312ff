"""Weights of a mix that change along training: what ``weights=`` of :func:`forebay.mix` takes.

They are a function of the position in the order, so a job that is resumed, on any number of ranks,
goes on with the weights of its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from ._arguments import whole_number
from ._words import counted
from .errors import InvalidRequest

__all__ = ["Schedule"]

Between: TypeAlias = Literal["constant", "linear"]
#: The most stages of a schedule, and the longest run of rows in which the plan makes shares exact.
STAGES_MAX = 4096
CYCLE_MAX = 4096


class Schedule:
    """A table of rows and weights.

    ::

        weights = forebay.Schedule([(0, [0.9, 0.1]), (1_000_000, [0.5, 0.5])])
        loader = forebay.mix([web, books], weights).loader(batch_size=64)

    Args:
        table: Pairs of a row and the weights from that row on, one for each dataset. Rows are
            counted from the beginning of the job, over all epochs and ranks: step ``s`` of
            ``world_size`` ranks with ``batch_size`` rows each begins at row
            ``s * world_size * batch_size``. They ascend, and the first is 0. Of weights only their
            ratios count; one may be 0, and no rows of that dataset are then taken.
        between: ``"constant"``: weights hold until the next row of the table. ``"linear"``: the
            shares go from each entry to the next in ``pieces`` equal steps.
        pieces: How many steps there are between two entries, with ``between="linear"``. Each of up
            to 4096 rows has whole numbers of rows of each dataset, and what is rounded goes to the
            next.

    Attributes:
        stages: Rows and weights as they are used: each pair holds until the next.

    Raises:
        InvalidRequest: The rows do not ascend from 0; a weight is below 0 or not finite, or all of
            an entry are 0; or the entries have different numbers of weights.
    """

    def __init__(
        self,
        table: Iterable[tuple[int, Sequence[float]]],
        *,
        between: Between = "constant",
        pieces: int = 64,
    ) -> None:
        self.table = _table(table)
        self.between: Between = between
        if between not in ("constant", "linear"):
            raise ValueError(f'between must be "constant" or "linear", not {between!r}')
        number = whole_number(pieces)
        if number is None or number < 1:
            raise ValueError(f"pieces must be a whole number above 0, not {pieces!r}")
        self.pieces = number
        self._check()
        stages = self._count()
        if stages > STAGES_MAX:
            raise InvalidRequest(
                f"the schedule has {stages:,} stages; the limit is {STAGES_MAX}",
                hint="give fewer rows, or fewer pieces=",
            )
        self.stages = self._pieces() if between == "linear" else list(self.table)

    def _check(self) -> None:
        if not self.table:
            raise InvalidRequest(
                "the schedule is empty", hint="forebay.Schedule([(0, [0.9, 0.1]), …])"
            )
        before: Any = None
        for row, weights in self.table:
            if whole_number(row) is None or row < 0:
                raise InvalidRequest(
                    f"{row!r} is a row of the schedule", hint="rows are whole numbers from 0 on"
                )
            if row != 0 if before is None else row <= before:
                raise InvalidRequest(
                    f"row {row} of the schedule comes "
                    + ("first" if before is None else f"after row {before}"),
                    hint="rows ascend, and the first is 0",
                )
            if len(weights) != len(self.table[0][1]):
                raise InvalidRequest(
                    f"the schedule has {counted(len(weights), 'weight')} from row {row} on, and"
                    f" {len(self.table[0][1])} from row 0 on",
                    hint="give one weight for each dataset; 0 takes no rows of it",
                )
            if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
                raise InvalidRequest(
                    f"the weights from row {row} on are {weights}",
                    hint="give numbers of at least 0, not all of them 0",
                )
            before = row

    def _count(self) -> int:
        """How many stages there are."""
        if self.between == "constant":
            return len(self.table)
        rows = (row for row, _ in self.table)
        return 1 + sum(min(self.pieces, end - begin) for begin, end in itertools.pairwise(rows))

    def _pieces(self) -> list[tuple[int, list[float]]]:
        shares = [(row, _shares(weights)) for row, weights in self.table]
        stages: list[tuple[int, list[float]]] = []
        # What was rounded away from each dataset so far.
        owed = [0.0] * len(shares[0][1])
        # Rows of datasets whose share of a piece is less than a cycle of a mix can have: they come
        # with the first piece in which it is enough.
        later = [0.0] * len(owed)
        for (begin, first), (end, second) in itertools.pairwise(shares):
            count = min(self.pieces, end - begin)
            starts = [begin + (end - begin) * i // count for i in range(count + 1)]
            for i, (start, stop) in enumerate(itertools.pairwise(starts)):
                # In the middle of the piece, so that the pieces have the shares of the line.
                along, rows = (i + 0.5) / count, stop - start
                mixed = [a + (b - a) * along for a, b in zip(first, second, strict=True)]
                if rows <= CYCLE_MAX:
                    wanted = [share * rows + o for share, o in zip(mixed, owed, strict=True)]
                    mixed = _whole(wanted, rows, [share > 0 for share in mixed])
                    owed = [w - given for w, given in zip(wanted, mixed, strict=True)]
                    stages.append((start, mixed))
                    continue
                wanted = [s * rows + o if s else 0.0 for s, o in zip(mixed, later, strict=True)]
                few = _too_few(wanted)
                if any(few) or any(later):
                    mixed = [0.0 if f else w / rows for f, w in zip(few, wanted, strict=True)]
                    later = [w if f else 0.0 for f, w in zip(few, wanted, strict=True)]
                stages.append((start, mixed))
        return [*stages, shares[-1]]

    def weights_at(self, row: int) -> list[float]:
        """The shares of the datasets at a row, adding up to 1."""
        found = self.stages[0][1]
        for begin, weights in self.stages:
            if begin > row:
                break
            found = weights
        return _shares(found)

    def __repr__(self) -> str:
        between = "" if self.between == "constant" else f", between={self.between!r}"
        return f"forebay.Schedule({self.table!r}{between})"


def _table(given: Iterable[tuple[int, Sequence[float]]]) -> list[tuple[int, list[float]]]:
    """Rows, those that are whole numbers as plain ones, and weights."""
    takes = (
        "a schedule takes pairs of a row and the weights from it on, as in"
        " forebay.Schedule([(0, [0.9, 0.1]), …])"
    )
    try:
        entries = list(given)
    except TypeError:
        raise TypeError(f"{takes}, not {given!r:.100}") from None
    pairs = []
    for at, entry in enumerate(entries):
        try:
            row, weights = entry
            pairs.append((row, [float(weight) for weight in weights]))
        except (TypeError, ValueError):
            raise TypeError(f"{takes}, and its entry {at} is {entry!r:.100}") from None
    return [(row if (number := whole_number(row)) is None else number, w) for row, w in pairs]


def _too_few(wanted: Sequence[float]) -> list[bool]:
    """Whether each weight is more than nothing and less than a cycle of a mix can have, by the same
    arithmetic as there.
    """
    largest = max(wanted)
    total = sum(w / largest for w in wanted)
    return [0 < w and w / largest / total * CYCLE_MAX < 0.5 for w in wanted]


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def _whole(wanted: Sequence[float], rows: int, may: Sequence[bool]) -> list[float]:
    """As many rows of each as wanted, rounded so that they add up to ``rows``; none of those that
    may not have any, whatever they are owed.
    """
    given = [max(0, math.floor(w)) if m else 0 for w, m in zip(wanted, may, strict=True)]
    some = [i for i, m in enumerate(may) if m]
    while sum(given) < rows:
        given[max(some, key=lambda i: wanted[i] - given[i])] += 1
    while sum(given) > rows:
        given[min((i for i in some if given[i]), key=lambda i: wanted[i] - given[i])] -= 1
    return [float(g) for g in given]
