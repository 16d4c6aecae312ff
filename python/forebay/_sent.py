"""What workers of PyTorch's DataLoader send to the training loop.

A worker pickles samples in a thread of its own, which loses a sample that cannot be pickled: the
loop waits for it for ever, or ends without it. So a worker sends views of received memory as
``bytes``, and in place of what it cannot send, an error, which the loop raises.
"""

from __future__ import annotations

import copyreg
import io
import os
import sys
from typing import Any, NoReturn

from ._forebay import Batch, Batches, Item, Listing
from .errors import Error, InvalidRequest


def _is_worker() -> bool:
    """Whether this process is a worker of a DataLoader."""
    data = sys.modules.get("torch.utils.data")
    worker_info = getattr(data, "get_worker_info", None)
    return worker_info is not None and worker_info() is not None


def _view(view: memoryview) -> Any:
    # Another library may say how all views are pickled, and may have been loaded after this module.
    if reduce := copyreg.dispatch_table.get(memoryview):
        return reduce(view)
    if _is_worker():
        return bytes, (bytes(view),)
    return view.__reduce_ex__(2)


def _item(item: Item) -> Any:
    try:
        return item.__reduce__()
    except Error as e:
        # The entry failed.
        if _is_worker():
            return _raise, (e,)
        raise


def _whole(answer: Batch | Batches | Listing) -> Any:
    if _is_worker():
        refused = InvalidRequest(
            f"a forebay.{type(answer).__name__} cannot be sent by a worker of a DataLoader",
            hint="yield what is in it, or lists of that: items and ObjectInfo can be sent",
        )
        return _raise, (refused,)
    return answer.__reduce_ex__(2)


def _raise(error: Error) -> NoReturn:
    raise error


def _register() -> None:
    """Has :mod:`multiprocessing` ask these functions, if this process has loaded it. Workers have:
    that module starts them, or they are forked from a process that has loaded it. What another
    library has registered stays.
    """
    reduction = sys.modules.get("multiprocessing.reduction")
    if reduction is None:
        return
    known = reduction.ForkingPickler(io.BytesIO()).dispatch_table
    sent: dict[type, Any] = {memoryview: _view, Item: _item}
    sent |= dict.fromkeys((Batch, Batches, Listing), _whole)
    for of, reduce in sent.items():
        if of not in known:
            reduction.register(of, reduce)


_register()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_register)
