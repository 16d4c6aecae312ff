"""What the nodes that a loader reads from say of its job."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _node
from ._forebay import Client
from .errors import Error, NotFound, Timeout

#: Seconds after which one of several nodes counts as one that does not answer.
SILENT_SECONDS = 10.0


@dataclass(frozen=True)
class Account:
    """What one node says of a job.

    Attributes:
        where: The node's address.
        said: What it says.
    """

    where: str
    said: dict[str, Any]


@dataclass
class Accounts:
    """What all nodes say of a job: each of them once, in the order of the loader's clients.

    Attributes:
        found: What they say.
        failed: The addresses of those that do not say it, and why.
        several: Whether there is more than one node to tell apart.
    """

    found: list[Account]
    failed: list[tuple[str, Error]]
    several: bool

    @property
    def rows(self) -> int:
        """What all of them sent."""
        return sum(account.said["rows"] for account in self.found)


def distinct(clients: Sequence[Client]) -> list[Client]:
    """These clients, each once."""
    return list({id(client): client for client in clients}.values())


def of_job(clients: Sequence[Client], job: str) -> Accounts:
    """Asks the nodes of these clients."""
    clients = distinct(clients)
    if len(clients) > 1:
        return _of_several(clients, job)
    (client,) = clients
    try:
        return Accounts([Account(_where(client), _node.job(client, job))], [], False)
    except Error as e:
        return Accounts([], [(_where(client), e)], False)


def _where(client: Client) -> str:
    return client.url or "the node in this process"


def _of_several(clients: list[Client], job: str) -> Accounts:
    answers: list[tuple[str, dict[str, Any]] | Error | None] = [None] * len(clients)

    def ask(at: int) -> None:
        try:
            said = _node.job(clients[at], job)
            answers[at] = _node.identity(clients[at]), said
        except Error as e:
            answers[at] = e

    # A client waits for a silent node for longer than a report does.
    threads = [
        threading.Thread(target=ask, args=(at,), name="forebay-account", daemon=True)
        for at in range(len(clients))
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SILENT_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    found: dict[tuple[str, str], Account] = {}
    failed: list[tuple[str, Error]] = []
    for client, answer in zip(clients, list(answers), strict=True):
        if isinstance(answer, tuple):
            node, said = answer
            # One node may have several addresses. A key is told of its own jobs only.
            found.setdefault((node, said["caller"]), Account(_where(client), said))
        elif answer is None:
            late = Timeout(f"it has not answered within {SILENT_SECONDS:g} s")
            failed.append((_where(client), late))
        elif not isinstance(answer, NotFound):
            failed.append((_where(client), answer))
        # Or else it has served nothing of the job.
    return Accounts(list(found.values()), failed, len(found) + len(failed) > 1)
