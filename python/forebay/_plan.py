"""The order of rows: the compiled plan, as the loader uses it."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from . import _forebay
from ._arguments import EPOCHS_MAX, U64_MAX, check_rows, flag, whole_number
from ._words import counted
from .errors import InvalidRequest
from .schedule import Schedule
from .shuffle import Shuffle, to_wire

if TYPE_CHECKING:
    from .dataset import Dataset

#: How a state is loaded over other columns and samples.
RELAXED = "load_state_dict(state, strict=False)"
#: A state: a few numbers and strings, as in JSON.
State = dict[str, Any]
#: What a state may be within, and what it counts there: 0 says that it is not.
COUNTS = {"within": ("batches",), "pack": ("packs", "tokens")}
#: What a state says of its datasets, at most: states travel through memory of a fixed size.
MADE_BYTES = 2000
#: And of their columns and samples.
LOOKS_BYTES = 800


@dataclass(frozen=True)
class Step:
    """One batch of one rank.

    Attributes:
        step: Its number, counted from where the loader began or resumed.
        epoch: Its epoch.
        rows: The row numbers, ``numpy.uint64`` of shape ``(rows,)``, and
        sources: which dataset of a mix each is of, ``numpy.uint32`` of the same shape; None for one
            dataset.
        real: How many of them are rows of the epoch; the rest are padding.
        next: The state when all ranks have yielded this step.
        counts: What it adds to the figures of :class:`forebay.Stats` that have these names, besides
            its samples.
    """

    step: int
    epoch: int
    rows: np.ndarray
    sources: np.ndarray | None
    real: int
    next: State
    counts: dict[str, int] = field(default_factory=dict)


class Steps:
    """The steps of one rank, from a state on. ``looks_ahead``: whether a step is the last one of
    its epoch, only the one after it says.
    """

    def __init__(self, compiled: Any, order: Order, looks_ahead: bool) -> None:
        self._compiled, self._several, self._order = compiled, order.mixed, order
        self._looks_ahead = looks_ahead
        # The two steps that were looked at last: to go back is to go there from the beginning.
        self._seen: dict[int, Any] = {}

    def step(self, number: int) -> Step | None:
        """The step of this number; None past the end."""
        found = self._found(number)
        if found is None:
            return None
        rows = np.frombuffer(found.rows, np.uint64)
        sources = np.frombuffer(found.sources, np.uint32) if self._several else None
        after = self._order.named(json.loads(found.next))
        if self._looks_ahead and self._is_last(found):
            after = self._order.at(found.epoch + 1, 0)
        return Step(found.step, found.epoch, rows, sources, found.real, after)

    def _is_last(self, found: Any) -> bool:
        """Whether a step is the last one of its epoch."""
        later: Any
        try:
            later = self._found(found.step + 1)
        except InvalidRequest as e:
            # Whoever asks for that step is told. Not the plan again, which would go on behind it.
            later = e
        self._seen = {found.step: found, found.step + 1: later}
        if isinstance(later, InvalidRequest):
            return False
        return later is None or bool(later.epoch != found.epoch)

    def _found(self, number: int) -> Any:
        found = self._seen[number] if number in self._seen else self._compiled.step(number)
        if isinstance(found, InvalidRequest):
            raise found
        return found

    def count(self) -> int | None:
        """Steps until the end; None if finding out would mean going there."""
        return self._compiled.count()


class Order:
    """The order of all epochs of some datasets."""

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        weights: Sequence[float] | Schedule | None,
        epoch_rows: int | None,
        seed: int,
        shuffle: Shuffle,
    ) -> None:
        plain = weights is None or isinstance(weights, Schedule)
        given = [1.0] * len(datasets) if plain else cast(Sequence[float], weights)
        self.document: dict[str, Any] = {
            "sources": [
                {"dataset": d.id, "weight": w} for d, w in zip(datasets, given, strict=True)
            ],
            "seed": seed,
            "shuffle": to_wire(shuffle),
        }
        if isinstance(weights, Schedule):
            self.document["schedule"] = [
                {"from": row, "weights": of_row} for row, of_row in weights.stages
            ]
        if epoch_rows is not None:
            self.document["epoch_rows"] = epoch_rows
        # A mix of one dataset is still a mix: its epoch is a number of rows, not each row once.
        self.mixed = weights is not None
        # Of which operations, for the message if a state is refused.
        is_composed = any(d.is_composed for d in datasets)
        self._made = _bounded([d.steps for d in datasets]) if is_composed else None
        self._looks = _bounded_looks([d._looks() for d in datasets])
        self._datasets = list(datasets)
        check_rows(datasets)
        try:
            self._plan = _forebay.Plan(json.dumps(self.document), [d.block_shape for d in datasets])
        except InvalidRequest as e:
            raise InvalidRequest(_by_name(e.message, datasets), hint=e.hint) from None
        self._first: State = json.loads(self._plan.state(0, 0))

    @property
    def identity(self) -> str:
        return self._plan.identity

    @property
    def rows_per_epoch(self) -> int:
        return self._plan.rows_per_epoch

    def rows(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The row numbers at positions ``start`` to ``stop - 1`` of an epoch, and which dataset of
        a mix each is of (None: one dataset).
        """
        rows, sources = self._plan.rows(epoch, start, stop)
        of = np.asarray(sources, np.uint32) if self.mixed else None
        return np.asarray(rows, np.uint64), of

    def measured(self, batch: int) -> str:
        """The measures of quality in batches of so many rows, as JSON."""
        return self._plan.report(batch)

    def at(self, epoch: int, position: int) -> State:
        """The state before a row of an epoch."""
        if _is_plain(epoch, EPOCHS_MAX) and _is_plain(position, self.rows_per_epoch):
            # States of one order differ in nothing else.
            return self.named({**self._first, "epoch": epoch, "position": position})
        return self.named(json.loads(self._plan.state(epoch_number(epoch), position)))

    def named(self, state: State) -> State:
        """The state, which also says what the datasets are made of, if they are not as opened, and
        what was done to their columns and samples.
        """
        made = {} if self._made is None else {"made": self._made}
        return {**state, **made, "looks": self._looks}

    def start(self) -> State:
        """The state before the first row of all."""
        return self.at(0, 0)

    def checked(self, state: Any, strict: bool = True) -> State:
        """The state, if it belongs to this order; raises InvalidRequest for any other.

        Args:
            strict: False: accept other names and types of columns, and other maps.
        """
        strict = flag("strict", strict)
        state, start = plain_state(state), self.start()
        known = ("made", "looks")
        if not all(_is_like(value, state.get(n)) for n, value in start.items() if n not in known):
            raise InvalidRequest(
                "this is not a state of a loader",
                hint="give what state_dict() of a loader returned",
            )
        is_other = state["data"] != start["data"]
        if is_other and (self._made is not None or state.get("made") is not None):
            raise InvalidRequest(
                f"the state cannot be resumed: {self._difference(state.get('made'))}",
                hint="do the same to the same datasets as when it was saved",
            )
        resumed = json.loads(self._plan.checked(json.dumps(state)))
        # Earlier versions did not say it.
        looks = state.get("looks", self._looks)
        if strict and looks != self._looks:
            raise InvalidRequest(
                "the state cannot be resumed: it would continue at the same rows, but they look"
                f" different: {self._other_look(looks)}",
                hint="do the same to columns and samples as when it was saved, or continue all the"
                f" same: {RELAXED}",
            )
        return self.named(resumed)

    def _other_look(self, looks: Any) -> str:
        """What was done to columns and samples when a state was saved, and is not here; or the
        other way round.
        """
        nothing: list[list[str]] = [[] for _ in self._datasets]
        here = self._looks or nothing
        try:
            then = [[str(text) for text in texts] for texts in looks] or nothing
        except TypeError:
            return f"{looks!r:.300} was done to them"
        # Of which a digest is known at most, or each dataset of a mix.
        alike = len(then) == len(here)
        if not alike:
            then, here = [list(chain(*then))], [list(chain(*here))]
        for number, (before, now) in enumerate(zip(then, here, strict=True)):
            if before == now:
                continue
            gone, new = ([t for t in a if t not in b] for a, b in ((before, now), (now, before)))
            if not gone and not new:
                gone, new = before, now
            where = f"dataset {number} of the mix: " if len(here) > 1 else ""
            gone, new = gone or ["nothing"], new or ["nothing"]
            return f"{where}there was {' | '.join(gone)}, and here is {' | '.join(new)}"
        return f"{looks!r:.300} was done to them"

    def _difference(self, made: Any) -> str:
        """What a state's datasets are made of, where that is something else here."""
        here = self._made or [d.steps for d in self._datasets]
        if made is None:
            return (
                "it is of datasets as they were opened, or of another version of them, and here is"
                f" {' | '.join(here[0])}"
            )
        try:
            if len(made) != len(here):
                return f"it is of {counted(len(made), 'dataset')}, and here are {len(here)}"
            for number, (then, now) in enumerate(zip(made, here, strict=True)):
                for a, b in zip_longest(then, now, fillvalue="nothing more"):
                    if a != b:
                        where = f"dataset {number} of the mix: " if len(here) > 1 else ""
                        return f"{where}there was {a}, and here is {b}"
        except TypeError:
            pass
        return f"it is of {made!r:.300}, which is another composition or version"

    def pack(
        self,
        epoch: int,
        position: int,
        document: str,
        tokens: np.ndarray,
        taken: int,
        filled: int,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The packs of the rows from a position on, which have these numbers of tokens: pieces
        (row, first token, number of tokens) one after the other, where those of each complete pack
        end, and the tokens of the last pack if it is not full. ``taken`` tokens of the first row
        are in earlier packs, and ``filled`` tokens already in the first pack.
        """
        pieces, ends, left = self._plan.pack(
            epoch, position, document, np.ascontiguousarray(tokens), taken, filled
        )
        made: tuple[Any, Any] = (pieces, ends)
        return np.frombuffer(made[0], np.uint32), np.frombuffer(made[1], np.uint32), left

    def steps(
        self,
        state: State,
        until: int | None,
        partition: dict[str, Any],
        lengths: Sequence[np.ndarray] | None = None,
    ) -> Steps:
        """The steps from a state to the beginning of the epoch ``until`` (None: without end)."""
        compiled = self._plan.steps(json.dumps(partition), json.dumps(state), until, lengths)
        # What is left of an epoch may make no step, and is dropped with the last one.
        drops = "bounded" in partition["batch"] and partition["uneven"] == "drop"
        return Steps(compiled, self, drops)


def _by_name(message: str, datasets: Sequence[Dataset[Any]]) -> str:
    """A message with the names of datasets in place of their versions."""
    for dataset in datasets:
        message = message.replace(f'dataset "{dataset.id}"', dataset.name)
    return message


def _is_plain(number: Any, end: int) -> bool:
    """Whether it is a number from 0 to one before the end, and of no other type than ``int``."""
    return type(number) is int and 0 <= number < end


def epoch_number(epoch: Any) -> int:
    """An epoch as a plain number; raises InvalidRequest for what is none."""
    number = whole_number(epoch)
    if number is None or number < 0:
        raise InvalidRequest(f"epoch {epoch!r}", hint="epochs are counted from 0")
    if number > EPOCHS_MAX:
        raise InvalidRequest(f"epoch {number:,}", hint=f"an order has {EPOCHS_MAX:,} epochs")
    return number


def plain_state(state: Any) -> State:
    """A state as JSON has it, with plain numbers in place of those of NumPy and of tensors, and
    without what it is not within; raises InvalidRequest for what is none.
    """
    if not isinstance(state, dict):
        raise InvalidRequest(
            f"a state must be the dict that state_dict() returned, not {type(state).__name__}"
        )
    try:
        made: State = json.loads(json.dumps(state, default=operator.index))
    except (TypeError, ValueError) as e:
        raise InvalidRequest(
            f"this is not a state of a loader: {e}",
            hint="give what state_dict() of a loader returned",
        ) from None
    for name, counts in COUNTS.items():
        inside = made.get(name)
        if isinstance(inside, dict) and [inside[c] for c in counts if c in inside] == [0]:
            del made[name]
    return made


def _is_like(own: Any, given: Any) -> bool:
    """Whether an entry of a state can be that in place of this one."""
    return type(given) is type(own) and (not isinstance(own, int) or 0 <= given <= U64_MAX)


def _bounded_looks(looks: list[list[str]]) -> list[list[str]]:
    """What was done to columns and samples of each dataset, in at most :data:`LOOKS_BYTES` of JSON;
    empty if nothing was.
    """
    text = json.dumps(looks)
    if not any(looks) or len(text) <= LOOKS_BYTES:
        return looks if any(looks) else []
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return [[f"{sum(map(len, looks))} renames, casts and maps ({digest})"]]


def _bounded(made: list[list[str]]) -> list[list[str]]:
    """What datasets are made of, in at most :data:`MADE_BYTES` of JSON."""
    for most in (240, 100, 40, 12):
        short = [[t if len(t) <= most else f"{t[:most]}…" for t in steps] for steps in made]
        if len(json.dumps(short)) <= MADE_BYTES:
            return short
    return [["too many operations to be named"]]
