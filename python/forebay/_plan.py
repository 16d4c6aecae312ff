"""The order of rows: the compiled plan, as the loader uses it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

#: A state: a few numbers and texts, as JSON has them.
State = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One batch of one rank.

    Attributes:
        step: Its number, counted from where the loader began or resumed.
        epoch: The epoch that it is of.
        rows: The row numbers, ``numpy.uint64`` of shape ``(rows,)``, and
        sources: which dataset of a mix each is of, ``numpy.uint32`` of the same shape; None for one dataset.
        real: How many of them are rows of the epoch; those after are padding.
        next: The state when all ranks have yielded this step.
    """

    step: int
    epoch: int
    rows: np.ndarray
    sources: np.ndarray | None
    real: int
    next: State


class Steps(Protocol):
    """The steps of one rank, from a state on."""

    def step(self, number: int) -> Step | None:
        """The step of this number; None past the end."""

    def count(self) -> int | None:
        """Steps until the end; None if nobody knows without going there."""
