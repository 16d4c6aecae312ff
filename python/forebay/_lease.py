"""A node follows the order of a job, for as long as the job holds a lease on it."""

from __future__ import annotations

import logging
import math
import os
import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _node
from .errors import Error, InvalidRequest, NotFound

if TYPE_CHECKING:
    from ._plan import State
    from .dataset import Dataset

#: How long a node follows a job's order without a request for its rows.
LEASE_SECONDS = 300
#: How long the end of a loop waits for the node to learn of it. The request continues without it.
RELEASE_SECONDS = 1.0
#: What nodes of earlier releases do not know of, and refuse.
LATER_FIELDS = ("partition", "columns")
log = logging.getLogger("forebay")


class Lease:
    """One lease: taken by the first :meth:`tell`, renewed by the next ones, and ended by
    :meth:`release`, whichever thread comes first.

    It belongs to the process that made it: in a forked child nothing here does anything.
    Failures do not stop the training, and are only logged. A node that does not know the
    ``datasets``, as one that was started anew, or that answers in another's place, is told to open
    them. A node of an earlier release is not told which ranks and columns are read here, but
    ``to_earlier`` in their place. What the node fetches ahead is on the ``account`` of a job.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        registration: dict[str, Any],
        to_earlier: dict[str, Any],
        account: str | None = None,
    ) -> None:
        self._datasets, self._client = datasets, datasets[0].client
        self._to_earlier, self._account = to_earlier, account
        self._registration = {
            **registration,
            "job": uuid.uuid4().hex,
            "lease_seconds": LEASE_SECONDS,
        }
        self._pid = os.getpid()
        # Reentrant: a garbage collection may release it in a thread that is in here.
        self._lock = threading.RLock()
        self._number: str | None = None
        # Which node it was told to: another value means another node, or that it was started anew.
        self._moves: int | None = None
        self._released = False

    def tell(self, state: State) -> None:
        """Says where the job is. From then on its requests for rows tell the node."""
        if self._is_over() or self._pid != os.getpid():
            return
        if state["epoch"] >= self._registration.get("until_epoch", math.inf):
            # It has ended, and a node takes only jobs that go on.
            return
        place = {"epoch": state["epoch"], "position": state["position"]}
        with self._lock:
            self._moves = self._client.moves
        try:
            answer = self._told({**self._registration, **place})
        except Error as e:
            log.warning("the node does not follow the order of this job: %s", e)
            return
        with self._lock:
            self._number = answer["lease"]
        if self._is_over():
            self._end()

    def _told(self, registration: dict[str, Any]) -> dict[str, Any]:
        # Each of the nodes may answer meanwhile, and none of them may know the datasets.
        for _ in range(self._client.nodes):
            try:
                return self._follow(registration)
            except NotFound:
                for dataset in self._datasets:
                    dataset.open_again()
        return self._follow(registration)

    def _follow(self, registration: dict[str, Any]) -> dict[str, Any]:
        try:
            return _node.follow(self._client, registration, self._account)
        except InvalidRequest as e:
            if not any(f"unknown field `{field}`" in e.message for field in LATER_FIELDS):
                raise
            known = {k: v for k, v in registration.items() if k not in LATER_FIELDS}
            return _node.follow(self._client, {**known, **self._to_earlier}, self._account)

    def is_forgotten(self) -> bool:
        """Whether the node that answers now may not know it, because it is not the one that was
        told, or was started anew. It is then to be told.
        """
        if self._is_over() or self._pid != os.getpid():
            return False
        with self._lock:
            return self._moves is not None and self._moves != self._client.moves

    def _is_over(self) -> bool:
        with self._lock:
            return self._released

    def release(self) -> None:
        """Ends it. Waits for the node for :data:`RELEASE_SECONDS` at most; if the node
        does not learn of it, the lease expires by itself.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            ended, self._released = self._released, True
        if not ended:
            self._end()

    def _end(self) -> None:
        with self._lock:
            number, self._number = self._number, None
        if number is None:
            return
        try:
            _node.unfollow(self._client, number, RELEASE_SECONDS)
        except Error as e:
            log.debug("the lease on the order of this job was not released: %s", e)
