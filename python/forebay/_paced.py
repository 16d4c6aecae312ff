"""Requests for rows whose size nobody knows yet: few in the first ones, and then as many as what
came lets expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .rows import Rows

#: Rows of the first requests, and how many times as many the next ones may ask for.
FIRST_ROWS, GROWTH = 4, 4
#: About what one request asks for at most.
REQUEST_BYTES = 32 << 20


class Pace:
    """How many rows to ask for in one request. Threads may share one.

    Args:
        most: Rows of a request at the most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows = min(FIRST_ROWS, most)

    def came(self, rows: Rows) -> None:
        """Learns how large rows are."""
        if not len(rows):
            return
        fitting = int(REQUEST_BYTES * len(rows) // max(rows.nbytes, 1))
        self.rows = max(1, min(fitting, GROWTH * len(rows), self._most))


def paced(ids: np.ndarray, pace: Pace, take: Callable[[np.ndarray], Rows]) -> Iterator[Rows]:
    """What ``take`` returns for these rows, a request after the other."""
    at = 0
    while at < len(ids):
        rows = take(ids[at : at + pace.rows])
        at += len(rows)
        pace.came(rows)
        yield rows


def spread(ids: np.ndarray) -> np.ndarray:
    """These in an order of which any beginning is spread over all: by the bits of their places, the
    last one first (van der Corput's sequence).
    """
    places = np.arange(len(ids))
    turned = np.zeros(len(ids), np.int64)
    for _ in range(len(ids).bit_length()):
        turned = 2 * turned + (places & 1)
        places >>= 1
    return ids[np.argsort(turned)]
