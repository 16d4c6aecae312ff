"""Checkpoints that do not stop the step.

::

    import forebay.checkpoint

    saved = forebay.checkpoint.save(state_dict, "s3://bucket/run/step-100", client=client)
    # It is on the node's disk, synced; the step goes on, and the node sends it to the bucket.
    saved.on_durable(lambda checkpoint: print(checkpoint.name, "is durable"))

    state_dict = forebay.checkpoint.load("s3://bucket/run/step-100", client=client)

A checkpoint is *staged* when all of it is on the disk of the node, synced, and *durable* when all
of it is at the origin. It becomes visible there all at once, or not at all: its ``manifest.json``
is written last. :func:`save` and :func:`load` take plain state dicts; :class:`StorageWriter` and
:class:`StorageReader` are those of ``torch.distributed.checkpoint``, and :class:`CheckpointIO` is
Lightning's. :func:`keep` removes old ones.

With an engine inside this process (``Client(origin=…, cache=…)``) all of this works too: but what
is staged when the last process that uses the cache ends goes on to the bucket when one opens it
again; ``wait()`` before the end makes sure.
"""

from __future__ import annotations

import datetime
import typing

from .._needs import needs

with needs("forebay.checkpoint"):
    import numpy  # noqa: F401

from .._arguments import client_of, flag
from .._forebay import Client
from ..errors import ConnectionFailed, InvalidRequest, Unsupported
from . import _wire
from ._wire import Checkpoint

if typing.TYPE_CHECKING:
    from ._dcp import StorageReader, StorageWriter
    from ._lightning import CheckpointIO

__all__ = [
    "Checkpoint",
    "CheckpointIO",
    "StorageReader",
    "StorageWriter",
    "keep",
    "list_durable",
    "load",
    "remove",
    "save",
]

#: How often a load begins, if others replace the checkpoint meanwhile.
_LOADS = 3
_LATER = {"StorageReader": "._dcp", "StorageWriter": "._dcp", "CheckpointIO": "._lightning"}


def __getattr__(name: str) -> typing.Any:
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module 'forebay.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def save(
    state_dict: typing.Any,
    name: str,
    *,
    client: Client | None = None,
    format: str = "torch",
    wait: str = "staged",
    deadline: float | None = None,
    overwrite: bool = True,
    meta: dict[str, typing.Any] | None = None,
    retry_for: float = 0.0,
) -> Checkpoint:
    """Saves a state dict as a checkpoint, and returns when it is on the node's disk.

    Args:
        state_dict: Anything that ``torch.save`` takes; for safetensors, tensors by name.
        name: As in ``"s3://bucket/run/step-100"``.
        client: The node; by default the one of the environment variable ``FOREBAY_NODE``.
        format: ``"torch"``: one file that ``torch.load`` reads; ``"safetensors"``: one file in that
            format.
        wait: ``"staged"``: until it is on the node's disk, synced. ``"durable"``: until it is at
            the origin.
        deadline: Seconds within which it is to be durable. If it is not, the node logs and counts
            that, and :meth:`Checkpoint.status` says ``late``; the flush goes on. None: as the
            node's ``checkpoints.deadline`` says. 0: whenever.
        overwrite: Whether it may replace a checkpoint of this name. Readers see the former one
            until all of the new one is at the origin.
        meta: JSON that readers of the manifest are told, such as ``{"step": 100}``; at most 64 KiB.
            Numbers come back as they were; whole ones have at most 64 bits. Keys are texts.
        retry_for: Seconds for which it is saved anew while the node cannot be reached, does not
            answer for the client's ``timeout``, or is over its limits, as when it is started again.
            They are counted from the first failure. (An address where no node ever was looks the
            same: a warning says so at once.)

    Raises:
        Conflict: Another writer is at a checkpoint of this name.
        AlreadyExists: There is one, and ``overwrite=False``.
        Busy: There is no room on the node's disk until others are durable, for the whole
            ``timeout`` of the client.
        ServerError: There is no room at all (507), or the disk failed.
        InvalidRequest: What cannot be saved in this format, or no sense in an argument. Nothing
            was sent.
        Unsupported: The node has no cache directory.
    """
    from . import _formats

    if format not in list(_formats.FILES):
        raise InvalidRequest(
            f"format={format!r} is not known", hint=f"one of {', '.join(_formats.FILES)}"
        )
    if wait not in ("staged", "durable"):
        raise InvalidRequest(f"wait={wait!r}: give 'staged' or 'durable'")
    told, deadline = _wire.checked_meta(format, meta), _wire.checked_deadline(deadline)
    retry_for, overwrite = _wire.checked_patience(retry_for), flag("overwrite", overwrite)
    if format == "safetensors":
        _formats.check_safetensors(state_dict)
        size = _formats.bytes_of_safetensors(state_dict)
    else:
        size = _formats.bytes_of(state_dict)

    def write(writing: _wire.Writing) -> None:
        if format == "safetensors":
            _formats.save_safetensors(writing, state_dict)
        else:
            _formats.save_torch(writing, state_dict)

    saving = _wire.Saving(
        client_of(client), name, write, overwrite=overwrite, size=size, retry_for=retry_for
    )
    saved = saving.commit(meta=told, deadline=deadline)
    return saved.wait() if wait == "durable" else saved


def load(
    name: str,
    *,
    client: Client | None = None,
    map_location: typing.Any = "cpu",
    weights_only: bool = True,
    durable: bool = False,
    retry_for: float = 0.0,
) -> typing.Any:
    """The state dict that :func:`save` saved: from the node's disk if it is there, else through its
    cache, so that many processes read each byte from the origin once.

    Args:
        name: As in ``"s3://bucket/run/step-100"``.
        map_location, weights_only: As for ``torch.load``. Safetensors go to one device.
        durable: Only what the origin has. By default, what is staged here counts too.
        retry_for: Seconds for which it is loaded anew while the node cannot be reached, does not
            answer, or is over its limits.

    Raises:
        NotFound: There is no checkpoint of this name, or none that is complete.
        Conflict: Others replaced it again and again while it was read. After the first ones, it
            begins anew with what is there then.
        Unsupported: It was saved by ``torch.distributed.checkpoint``.
    """
    node, retry_for = client_of(client), _wire.checked_patience(retry_for)
    weights_only, durable = flag("weights_only", weights_only), flag("durable", durable)

    def attempt() -> typing.Any:
        for _ in range(_LOADS - 1):
            try:
                return _loaded(node, name, map_location, weights_only, durable)
            except _wire.Replaced as e:
                _wire.log.info("%s: it is loaded anew", e.message)
        return _loaded(node, name, map_location, weights_only, durable)

    return _wire.again(f"loading {name}", attempt, retry_for)


def _loaded(
    client: Client, name: str, map_location: typing.Any, weights_only: bool, durable: bool
) -> typing.Any:
    with _wire.Reading(client, name, durable=durable, ahead=True) as reading:
        reading.go_by(reading.question, shared=False)
        try:
            found = _read(reading, map_location, weights_only)
        except ConnectionFailed:
            raise
        except Exception:
            # The files of one that was replaced may go while they are read; and what is wrong with
            # it does not matter then.
            reading.settle()
            raise
        reading.settle()
        return found


def _read(reading: _wire.Reading, map_location: typing.Any, weights_only: bool) -> typing.Any:
    from . import _formats

    if _formats.FILES["safetensors"] in reading.sizes:
        device = _formats.device_of(map_location)
        found = _formats.load_safetensors(reading)
        return {key: tensor.to(device) for key, tensor in found.items()}
    if _formats.FILES["torch"] in reading.sizes:
        return _formats.load_torch(reading, map_location=map_location, weights_only=weights_only)
    raise Unsupported(
        f"{reading.name} was not saved by forebay.checkpoint.save()",
        hint="torch.distributed.checkpoint.load(state_dict,"
        " storage_reader=forebay.checkpoint.StorageReader(name)) reads those of"
        " torch.distributed.checkpoint",
    )


def keep(
    where: str,
    *,
    last: int | None = None,
    max_age: float | datetime.timedelta | None = None,
    pattern: str = "*",
    client: Client | None = None,
    retry_for: float = 0.0,
) -> list[str]:
    """Removes old checkpoints, and returns their names.

    Only durable ones count, and the newest durable one always stays. One that is being staged or
    flushed is never touched.

    Args:
        where: What is before their last name: of ``"s3://bucket/run/step-100"``,
            ``"s3://bucket/run"``; of ``"s3://bucket/step-100"``, ``"s3://bucket"``.
        last: So many of the newest stay.
        max_age: Seconds, or a ``timedelta``: older ones go.
        pattern: Only those whose last name is like this, as in ``"step-*"``.
        retry_for: Seconds for which it goes on while the node cannot be reached, does not answer,
            or is over its limits.

    Raises:
        InvalidRequest: Neither ``last`` nor ``max_age``, or no sense in an argument. Nothing was
            removed.
    """
    client = client_of(client)
    patience = _wire.checked_patience(retry_for)
    return _wire.keep(
        client, where, last=last, max_age=max_age, pattern=pattern, retry_for=patience
    )


def list_durable(
    where: str, *, client: Client | None = None, retry_for: float = 0.0
) -> list[Checkpoint]:
    """The durable checkpoints directly under a prefix (``"s3://bucket/run"``) or in a bucket
    (``"s3://bucket"``), the oldest first. A ``manifest.json`` that is something else is passed
    over.

    Args:
        retry_for: Seconds for which they are listed anew while the node cannot be reached, does not
            answer, or is over its limits.
    """
    client, patience = client_of(client), _wire.checked_patience(retry_for)
    return _wire.again(f"listing {where}", lambda: _wire.listed(client, where), patience)


def remove(name: str, *, client: Client | None = None, retry_for: float = 0.0) -> None:
    """Removes a durable checkpoint from its origin: its manifest first, so that nobody sees half of
    it. Raises ``NotFound``, and ``Conflict`` while another one of this name is on its way to take
    its place (one with ``overwrite=False`` that waits until the name is free does not count).

    Args:
        retry_for: Seconds for which it is tried again while the node cannot be reached, does not
            answer, or is over its limits. What is gone after an attempt whose answer was lost is
            removed.
    """
    client, patience = client_of(client), _wire.checked_patience(retry_for)
    _wire.remove_patiently(client, name, patience)
