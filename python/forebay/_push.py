"""The rows of each step as the node sends them, of its own accord: a push stream."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _forebay, _node
from ._fetch import Fetched
from ._plan import State, Steps
from ._stop import interrupting
from .errors import Changed, Error, InvalidRequest, NotFound, PreconditionFailed, ServerError
from .rows import Rows
from .stats import Meter

if TYPE_CHECKING:
    from .dataset import Dataset
    from .loader import Loader

#: What the stream's account of the nodes' times is called, and what :class:`forebay.Stats` calls
#: it.
NODE_TIMES = {
    "origin_seconds": "origin_s",
    "disk_seconds": "disk_s",
    "decode_seconds": "prepare_s",
    "frame_seconds": "prepare_s",
}

#: Where the nodes took the bytes from, by the same account.
NODE_BYTES = ("memory_bytes", "disk_bytes", "peer_bytes", "origin_bytes")


class Push:
    """Steps over one stream. The plan is computed here too: it says which rows a step is to have,
    and what arrives must be these. ``partition``: how the order is dealt out, if not as the loader
    deals it.

    A node that was started anew, or that takes over from another one, is told of the datasets and
    sends from the next step on.

    The memory for what has arrived and was not taken is bounded by the stream (``window_bytes``); a
    loop that stops makes the nodes stop.
    """

    def __init__(
        self,
        loader: Loader[Any],
        steps: Steps,
        state: State,
        until: int | None,
        meter: Meter,
        first: int,
        stride: int,
        partition: dict[str, Any] | None = None,
    ) -> None:
        if stride != 1:
            raise InvalidRequest(
                "only one process can receive a stream",
                hint="leave out the workers and give threads=, or give stream=False",
            )
        options, datasets = loader.options, loader.datasets
        clients = loader.clients()
        request: dict[str, Any] = {
            "plan": loader.order.document,
            "partition": loader.partition() if partition is None else partition,
            "state": state,
        }
        if until is not None:
            request["until_epoch"] = until
        bases = [base for dataset in datasets for base in dataset.made_of]
        columns = columns_of(bases)
        # All of them name and cast their columns alike.
        self._first_dataset = bases[0]
        if columns is not None:
            request["columns"] = columns
        lengths = []
        for dataset, array in zip(datasets, loader.lengths_of_rows() or (), strict=False):
            body, name = _forebay.lengths_body(array)
            request.setdefault("lengths", []).append(name)
            lengths.append((dataset.id, body))
        self._steps, self._first, self._meter = steps, first, meter
        self._several = loader.order.mixed
        self._stream = _node.stream(
            clients,
            json.dumps(request),
            connections=options.connections,
            window_bytes=options.window_bytes,
            from_step=first,
            retry_for=options.retry_for,
            datasets=[d.told() for d in datasets if not d.is_composed],
            compositions=[d.described() for d in datasets if d.is_composed],
            lengths=lengths,
            bases=[b.told() for d in datasets if d.is_composed for b in d.made_of],
            job=loader.job,
        )
        # Steps that are in the figures.
        self._accounted = 0
        self._reconnects = 0
        self._times: dict[str, float] = {}
        self._came: dict[str, float] = {}

    def at(self, index: int) -> Fetched | None:
        step = self._steps.step(self._first + index)
        if step is None:
            return None
        began = time.perf_counter()
        # By its number: a step that arrived but was lost to Ctrl-C is returned again.
        try:
            received = self._stream.next(step.step)
        except (PreconditionFailed, NotFound) as e:
            # Nodes that do not know a dataset were told of it: what is not found is a file.
            raise Changed(
                e.message,
                hint=e.hint or "open the dataset again to use the new version",
                status=e.status,
                request_id=e.request_id,
            ) from e
        except Error:
            raise
        except BaseException as e:
            interrupting(e)
            raise
        waited = time.perf_counter() - began
        if received is None:
            raise ServerError(
                f"the stream ended before step {step.step} of epoch {step.epoch}",
                hint="run the same release here and on the node",
            )
        if (received.step, received.epoch, len(received.batch)) != (
            step.step,
            step.epoch,
            len(step.rows),
        ):
            raise ServerError(
                f"step {received.step} of epoch {received.epoch} with {len(received.batch)}"
                f" rows came, and step {step.step} of epoch {step.epoch} with"
                f" {len(step.rows)} was to come",
                hint="run the same release here and on the node",
            )
        rows = Rows([self._first_dataset.dressed(received.batch)], step.rows, sources=step.sources)
        if self._accounted <= index:
            self._accounted = index + 1
            self._account(step.epoch, waited, rows.nbytes)
        return Fetched(step, rows)

    def _account(self, epoch: int, waited: float, nbytes: int) -> None:
        stats = self._stream.stats()
        node = stats.get("node", {})
        times: dict[str, float] = {}
        for theirs, ours in NODE_TIMES.items():
            if theirs in node:
                times[ours] = times.get(ours, 0.0) + node[theirs]
        # What was added since the last step.
        new = {name: max(0.0, s - self._times.get(name, 0.0)) for name, s in times.items()}
        self._times = times
        came = {n: node[n] for n in NODE_BYTES if n in node}
        more = {n: max(0.0, c - self._came.get(n, 0.0)) for n, c in came.items()}
        self._came = came
        self._meter.came(epoch, more, network_s=waited, bytes=nbytes, **new)
        again = int(stats.get("reopened", 0))
        self._meter.add(reconnects=again - self._reconnects)
        self._reconnects = again

    def close(self) -> None:
        self._stream.close()


def columns_of(datasets: Sequence[Dataset[Any]]) -> list[str] | None:
    """The columns that a stream of rows of these should deliver, by the names that the node knows:
    the same for all of them.
    """
    first = datasets[0]
    wanted = _read_of(first)
    for other in datasets:
        if (theirs := _read_of(other)) != wanted:
            differ = set(theirs) ^ set(wanted)
            named = ", ".join(sorted({repr(here) for _, here, *_ in differ})) or "their order"
            raise InvalidRequest(
                f"{first.name} and {other.name}, which the stream is to have rows of, have"
                f" different columns: {named}",
                hint="give the loader columns= that have the same names and types in both, without"
                " a rename or cast in one alone; or stream=False",
            )
    if all(dataset.chosen is None for dataset in datasets):
        return None
    return [name for name, *_ in wanted]


#: What texts of types tell of what is within values, and what need not be the same in a stream:
#: whether it may be missing, what lists call their items, and what writers noted.
_WITHIN = re.compile(r"\bnon-null |, field: '[^']*'|, metadata: \{[^{}]*\}")


def _read_of(dataset: Dataset[Any]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """The columns that are read: their names at the node and here, their types there, as far as the
    node compares them, and what they are cast to here.
    """
    names, types = dataset.columns, dataset._types_at_node()
    casts = dataset.dressing.casts
    return [
        (
            at_node,
            here,
            _WITHIN.sub("", types[at_node]),
            tuple(str(to) for name, to in casts if name == at_node),
        )
        for at_node, here in zip(dataset._at_node(names) or [], names, strict=True)
    ]
