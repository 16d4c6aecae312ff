"""What the nodes that a loader reads from say of its job."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import _node
from ._forebay import Client
from .errors import Error, NotFound

#: Seconds after which one of several nodes counts as one that does not answer.
SILENT_SECONDS = 10.0
#: So many nodes are asked at a time.
ASKED_AT_ONCE = 16


@dataclass(frozen=True)
class Place:
    """Where a node is asked."""

    where: str
    client: Client


@dataclass(frozen=True)
class Account:
    """What one node says of a job."""

    place: Place
    #: New at each start of the node; None if it was not asked.
    node: str | None
    said: dict[str, Any]


@dataclass
class Accounts:
    """What all nodes say of a job: each of them once, in the order of the loader's clients."""

    found: list[Account]
    #: Those that do not say it, and why.
    failed: list[tuple[Place, Error]]
    #: Whether all rows have come from these, as they are now.
    is_sure: bool

    @property
    def several(self) -> bool:
        """Whether there is more than one node to tell apart."""
        return len(self.found) + len(self.failed) > 1

    @property
    def rows(self) -> int:
        """What all nodes sent."""
        return sum(account.said["rows"] for account in self.found)


def are_one(clients: Sequence[Client]) -> bool:
    """Whether these are clients of the same addresses."""
    return len({repr(client) for client in clients}) == 1


def of_job(clients: Sequence[Client], job: str, is_sure: bool) -> Accounts:
    """Asks the nodes of these clients; ``is_sure``: rows come from where clients' calls go."""
    moved = [client for client in clients if len(_addresses(client)) > 1 and client.moves]
    if are_one(clients) and not moved:
        place = Place(_where(clients[0]), clients[0])
        try:
            account = Account(place, None, _node.job(place.client, job))
        except Error as e:
            return Accounts([], [(place, e)], is_sure)
        return Accounts([account], [], is_sure and not place.client.moves)
    return _of_places(_places(clients), job)


def _addresses(client: Client) -> list[str]:
    return [] if client.url is None else client.url.split(",")


def _where(client: Client) -> str:
    return client.url or "the node in this process"


def _places(clients: Sequence[Client]) -> list[Place | tuple[Place, Error]]:
    """Where each node is asked: each address of a client that has moved, by a client of its own; or
    why it cannot be.
    """
    places: dict[str, Place | tuple[Place, Error]] = {}
    for client in clients:
        addresses = _addresses(client)
        if len(addresses) <= 1 or not client.moves:
            # All its calls went to the same node.
            places.setdefault(repr(client), Place(_where(client), client))
            continue
        for address in addresses:
            place = Place(address, client)
            try:
                places.setdefault(address, Place(address, _only(client, address)))
            except Error as e:
                # As if its token was given by hand: another client does not have it.
                places.setdefault(address, (place, e))
    return list(places.values())


def _only(client: Client, address: str) -> Client:
    """A client like this one, of one of its addresses alone."""
    pickled: Any = client.__reduce__()
    make, (had_token, given) = pickled
    timeout = min(client.timeout, SILENT_SECONDS)
    made: Client = make(had_token, {**given, "url": [address], "timeout": timeout, "direct": False})
    return made


def _of_places(places: list[Place | tuple[Place, Error]], job: str) -> Accounts:
    def ask(place: Place | tuple[Place, Error]) -> Account | tuple[Place, Error] | None:
        if isinstance(place, tuple):
            return place
        try:
            said = _node.job(place.client, job)
            return Account(place, _node.identity(place.client), said)
        except NotFound:
            # It served nothing of the job: the client has not come to it.
            return None
        except Error as e:
            return place, e

    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(places))) as pool:
        answers = list(pool.map(ask, places))
    found: dict[str | None, Account] = {}
    for answer in answers:
        if isinstance(answer, Account):
            # One node may have several addresses.
            found.setdefault(answer.node, answer)
    failed = [answer for answer in answers if isinstance(answer, tuple)]
    return Accounts(list(found.values()), failed, False)
