"""What datasets ask of a node: the compiled client's calls, in one place."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import _forebay
from ._forebay import Client
from .errors import NotFound, PermissionDenied

#: Which job a thread works for.
_thread = threading.local()


def open_dataset(
    client: Client,
    spec: dict[str, Any],
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Opens (or finds) a dataset; returns what the node says about it. ``progress`` is called now
    and then with how far it is: files ``listed``, ``to_index``, ``indexed``. What that takes is for
    the account of this thread's job.
    """
    said = None if progress is None else lambda line: progress(json.loads(line))
    job: str | None = getattr(_thread, "job", None)
    return json.loads(bytes(client.open_dataset(json.dumps(spec), said, job)))


#: What makes a source a pattern.
_PATTERN = frozenset("*?[{")


def open_sources(
    client: Client, spec: dict[str, Any], progress: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Opens a dataset as its user describes it; returns the description, and what the node says.
    Where no object has the name that is its only source, that is a prefix without its slash.
    """
    try:
        return spec, open_dataset(client, spec, progress)
    except NotFound:
        name, *more = spec["sources"]
        is_name = not (more or name.endswith("/") or name.startswith("manifest:"))
        if not is_name or _PATTERN.intersection(name):
            raise
        below = {**spec, "sources": [f"{name}/"]}
        with contextlib.suppress(NotFound, PermissionDenied):
            return below, open_dataset(client, below, progress)
        raise


def filter(
    client: Client,
    dataset: str,
    expression: str,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[dict[str, Any], bytes]:
    """The rows that an expression leaves: what the node says of it, and the encoded set.
    ``progress`` is called now and then with how far it is: ``done`` rows ``of`` all.
    """
    said = None if progress is None else lambda line: progress(json.loads(line))
    answer, rows = client.filter(dataset, expression, said)
    return json.loads(bytes(answer)), bytes(rows)


def shape(client: Client, dataset: str) -> bytes:
    """The dataset's shape, as the compiled plan reads it."""
    return bytes(client.dataset_shape(dataset))


def manifest(client: Client, dataset: str) -> list[dict[str, Any]]:
    """The dataset's files, in the order of their rows."""
    lines = (
        json.loads(line)
        for line in bytes(client.dataset_manifest(dataset)).splitlines()
        if line.strip()
    )
    # The first line describes the others.
    return [line for line in lines if "forebay_manifest" not in line]


def take(
    client: Client,
    dataset: str,
    rows: np.ndarray,
    columns: Sequence[str] | None,
) -> Any:
    """One Arrow record batch of these rows, in this order, for the account of this thread's
    job.
    """
    job: str | None = getattr(_thread, "job", None)
    return client.take(dataset, rows, None if columns is None else list(columns), job)


def take_by_key(
    client: Client, dataset: str, column: str, keys: bytes, columns: Sequence[str] | None
) -> tuple[Any, np.ndarray]:
    """One Arrow record batch of the first row of each key (a JSON list), and the rows' numbers."""
    job: str | None = getattr(_thread, "job", None)
    names = None if columns is None else list(columns)
    batch, numbers = client.take_by_key(dataset, column, keys, names, job)
    return batch, np.frombuffer(memoryview(numbers), "<u8")


def index_keys(
    client: Client,
    dataset: str,
    column: str,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Makes the node index a column of keys, if it has not; what it says of the index.
    ``progress`` is called now and then with how far it is: ``done`` rows ``of`` all.
    """
    said = None if progress is None else lambda line: progress(json.loads(line))
    return json.loads(bytes(client.index_keys(dataset, column, said)))


def find_keys(
    client: Client, dataset: str, column: str, keys: bytes, all_rows: bool = False
) -> np.ndarray:
    """The first row of each key (a JSON list), ``2**64 - 1`` for none; or all rows that have one of
    them, as pairs of the key's number in the list and a row.
    """
    return np.frombuffer(memoryview(client.find_keys(dataset, column, keys, all_rows)), "<u8")


@contextlib.contextmanager
def works_for(job: str | None) -> Iterator[None]:
    """Meanwhile, what this thread takes is for the account of a job."""
    before = getattr(_thread, "job", None)
    _thread.job = job
    try:
        yield
    finally:
        _thread.job = before


def job(client: Client, name: str) -> dict[str, Any]:
    """What the node knows of a job."""
    return json.loads(client.job(name))


def identity(client: Client) -> str:
    """Which node answers, at this start of it."""
    said = json.loads(bytes(client._call("GET", "/v1/forebay/info")))
    return str(said["node_id"])


def energy(client: Client, wanted: dict[str, int]) -> dict[str, Any]:
    """What the sensors of the node's machine measured: the samples ``after_ns``, a moment of its
    clock, or those of the last ``seconds``.
    """
    query = "&".join(f"{name}={value}" for name, value in wanted.items())
    return json.loads(bytes(client._call("GET", f"/v1/forebay/energy?{query}")))


def compose(client: Client, body: bytes) -> dict[str, Any]:
    """Tells the node of rows that are made of those of datasets which it knows."""
    return json.loads(bytes(client.compose(body)))


def follow(
    client: Client, registration: dict[str, Any], account: str | None = None
) -> dict[str, Any]:
    """Registers a job's plan with the node, whose cache follows it; returns the lease. What is
    fetched for it is on the account of a job.
    """
    return json.loads(bytes(client.follow(json.dumps(registration), account)))


def told(
    name: str, dataset: str, spec: dict[str, Any], of: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a stream tells a node of a dataset that it does not know; ``of`` is what it tells of the
    dataset that this one is a part of.
    """
    return {"name": name, "id": dataset, "spec": json.dumps(spec), "of": of}


def unfollow(client: Client, lease: str, wait: float) -> None:
    """Ends a lease; waits at most this many seconds for the answer."""
    client.unfollow(lease, wait)


def stream(
    clients: Sequence[Client],
    request: str,
    *,
    connections: int | None,
    window_bytes: int | None,
    from_step: int,
    retry_for: float | None,
    datasets: Sequence[dict[str, Any]],
    compositions: Sequence[bytes],
    bases: Sequence[dict[str, Any]],
    lengths: Sequence[tuple[str, bytes]] = (),
    job: str | None = None,
) -> Any:
    """A stream of the steps of a plan, from one node or several. Nodes that do not know the
    ``datasets``, the ``compositions``, which are made of the ``bases``, or the ``lengths`` of rows
    are told what they are.
    """
    bounds = {} if window_bytes is None else {"ahead_bytes": window_bytes}
    return _forebay.Stream(
        list(clients),
        request,
        connections=connections,
        from_step=from_step,
        retry_for=retry_for,
        told={
            "datasets": json.dumps(list(datasets)),
            "compositions": list(compositions),
            "bases": json.dumps(list(bases)),
            "lengths": list(lengths),
        },
        job=job,
        **bounds,
    )
