"""Forebay: an NVMe cache between far buckets and a training loop.

::

    import forebay

    client = forebay.Client("http://127.0.0.1:8080")          # a node: forebay serve --origin s3://bucket --cache /nvme/forebay:100GiB
    client = forebay.Client(origin="s3://bucket", cache="/nvme/forebay:100GiB")   # or the same engine inside this process

    data = client.get("bucket/images/1.jpg")                   # bytes-like
    for item in client.batch(["images/1.jpg", "images/2.jpg"], bucket="bucket"):
        pixels = decode(item.data)                             # a memoryview into the one received buffer

:mod:`forebay.torch` has PyTorch datasets; :mod:`forebay.fsspec` the filesystem ``forebay://``.
"""

from __future__ import annotations

from typing import Any

from ._forebay import (
    Batch,
    Batches,
    Buffer,
    Client,
    Entry,
    Item,
    Listing,
    ObjectInfo,
    __version__,
)
from .errors import (
    Busy,
    Conflict,
    ConnectionFailed,
    EntryFailed,
    Error,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    RangeNotSatisfiable,
    ServerError,
    Timeout,
    TooLarge,
    Truncated,
    Unauthenticated,
    Unsupported,
)

__all__ = [
    "Batch",
    "Batches",
    "Buffer",
    "Busy",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Entry",
    "EntryFailed",
    "Error",
    "InvalidRequest",
    "Item",
    "Listing",
    "NotFound",
    "ObjectInfo",
    "PermissionDenied",
    "PreconditionFailed",
    "RangeNotSatisfiable",
    "ServerError",
    "Timeout",
    "TooLarge",
    "Truncated",
    "Unauthenticated",
    "Unsupported",
    "__version__",
    "open_local",
]


def open_local(origin: str | list[str], cache: str, **options: Any) -> Client:
    """A client whose engine runs on this machine, in the first process that opens the cache directory.

    Args:
        origin: Where the bucket is: ``s3://bucket``, ``gs://bucket``, ``az://container``, ``file:///directory``; or a list of them.
        cache: A directory and how much it may hold: ``/nvme/forebay:100GiB``.
        **options: As for :class:`Client` (``timeout``, ``max_inflight_bytes``).

    A second process that opens the same directory (a DataLoader worker, another rank) uses the first one's engine.
    """
    return Client(origin=origin, cache=cache, **options)
