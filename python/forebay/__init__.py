"""Forebay: an NVMe cache between far buckets and a training loop.

::

    import forebay

    # A node: forebay serve --origin s3://bucket --cache /nvme/forebay:100GiB
    client = forebay.Client("http://127.0.0.1:8080")
    # Or the same engine inside this process.
    client = forebay.Client(origin="s3://bucket", cache="/nvme/forebay:100GiB")

    data = client.get("bucket/images/1.jpg")  # bytes-like
    for item in client.batch(["images/1.jpg", "images/2.jpg"], bucket="bucket"):
        pixels = decode(item.data)  # a memoryview into the one received buffer

    # Every sample has a row number.
    ds = forebay.open("s3://bucket/corpus/**.parquet", client=client)
    loader = ds.loader(batch_size=32, shuffle=forebay.Block(16), seed=1)
    for batch in loader:  # loader.state_dict() says what was yielded
        ...

:mod:`forebay.checkpoint` saves and loads checkpoints. :mod:`forebay.torch` has PyTorch datasets,
:mod:`forebay.jax` and :mod:`forebay.dali` batches for those frameworks, :mod:`forebay.ray` a source
and a sink for Ray Data, and :mod:`forebay.fsspec` the filesystem ``forebay://``.
:mod:`forebay.energy` measures joules.
"""

from __future__ import annotations

import sys as _sys

# While Python looks for what -m names, "-m" is the first of the arguments. Other programs, such as
# pytest, may have such arguments too.
if _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv) :][:1] in (
    ["forebay"],
    ["-mforebay"],
):
    # Before the rest is imported: Ctrl-C meanwhile ends the command as it does later.
    from . import _interrupted as _interrupted

import importlib as _importlib
import typing as _typing

from . import _sent as _sent
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
    AlreadyExists,
    Busy,
    Changed,
    Conflict,
    ConnectionFailed,
    Damaged,
    EntryFailed,
    Error,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    RangeNotSatisfiable,
    SampleFailed,
    ServerError,
    Timeout,
    TooLarge,
    Truncated,
    Unauthenticated,
    Unsupported,
)

if _typing.TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import dali as dali
    from . import energy as energy
    from . import fsspec as fsspec
    from . import jax as jax
    from . import ray as ray
    from . import torch as torch
    from ._compose import concatenate
    from ._expr import col
    from ._mix import Mix, mix
    from ._shards import Shards, open_shards
    from ._write import Written
    from .dataset import Dataset, open
    from .loader import Loader
    from .pack import Pack
    from .report import Report
    from .rows import Row, Rows
    from .schedule import Schedule
    from .shuffle import Block, Full, Window
    from .stats import Stats

#: Names of datasets and their modules. They are loaded at their first use: they need NumPy, which
#: the client alone does not.
_DATASETS = {
    "Block": ".shuffle",
    "Dataset": ".dataset",
    "Full": ".shuffle",
    "Loader": ".loader",
    "Mix": "._mix",
    "Pack": ".pack",
    "Report": ".report",
    "Row": ".rows",
    "Rows": ".rows",
    "Schedule": ".schedule",
    "Shards": "._shards",
    "Stats": ".stats",
    "Window": ".shuffle",
    "Written": "._write",
    "col": "._expr",
    "concatenate": "._compose",
    "mix": "._mix",
    "open": ".dataset",
    "open_shards": "._shards",
}


#: Modules for frameworks. Loaded at their first use too: each needs its framework.
_MODULES = ("checkpoint", "dali", "energy", "fsspec", "jax", "ray", "torch")


def __getattr__(name: str) -> _typing.Any:
    if name in _MODULES:
        return _importlib.import_module(f".{name}", __name__)
    if name not in _DATASETS:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    try:
        found = getattr(_importlib.import_module(_DATASETS[name], __name__), name)
    except ModuleNotFoundError as e:
        if e.name == "numpy":
            raise ImportError(f"forebay.{name} needs NumPy: pip install numpy") from e
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "errors", *(n for n in globals() if n.startswith("__"))})


__all__ = [
    "AlreadyExists",
    "Batch",
    "Batches",
    "Block",
    "Buffer",
    "Busy",
    "Changed",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Damaged",
    "Dataset",
    "Entry",
    "EntryFailed",
    "Error",
    "Full",
    "InvalidRequest",
    "Item",
    "Listing",
    "Loader",
    "Mix",
    "NotFound",
    "ObjectInfo",
    "Pack",
    "PermissionDenied",
    "PreconditionFailed",
    "RangeNotSatisfiable",
    "Report",
    "Row",
    "Rows",
    "SampleFailed",
    "Schedule",
    "ServerError",
    "Shards",
    "Stats",
    "Timeout",
    "TooLarge",
    "Truncated",
    "Unauthenticated",
    "Unsupported",
    "Window",
    "Written",
    "__version__",
    "col",
    "concatenate",
    "mix",
    "open",
    "open_local",
    "open_shards",
]


def open_local(origin: str | list[str], cache: str, **options: _typing.Any) -> Client:
    """A client whose engine runs on this machine, in the first process that opens the cache
    directory.

    Args:
        origin: Where the bucket is: ``s3://bucket``, ``gs://bucket``, ``az://container``,
            ``file:///directory``; or a list of them.
        cache: A directory and how much it may hold: ``/nvme/forebay:100GiB``.
        **options: As for :class:`Client` (``timeout``, ``max_inflight_bytes``).

    A second process that opens the same directory (a DataLoader worker, another rank) uses the
    first one's engine.
    """
    return Client(origin=origin, cache=cache, **options)
