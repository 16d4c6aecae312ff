"""Lightning's ``CheckpointIO`` over a node."""

from __future__ import annotations

import os
import typing

from .._forebay import Client
from ..errors import NotFound

try:
    from lightning.pytorch.plugins.io import CheckpointIO as _CheckpointIO
except ModuleNotFoundError:
    try:
        from pytorch_lightning.plugins.io import CheckpointIO as _CheckpointIO
    except ModuleNotFoundError as e:
        raise ImportError(
            "forebay.checkpoint.CheckpointIO needs Lightning: pip install lightning"
        ) from e


class CheckpointIO(_CheckpointIO):
    """``Trainer(plugins=[forebay.checkpoint.CheckpointIO(client)])``: each checkpoint is staged on
    the node's disk, and training goes on while it goes to the bucket.

    ``ModelCheckpoint(dirpath="forebay://bucket/run")`` says where; ``teardown`` waits until the
    last one is durable.

    Args:
        client: The node; by default the one of ``FOREBAY_NODE``.
        deadline: Seconds within which each checkpoint is to be durable.
    """

    def __init__(self, client: Client | None = None, *, deadline: float | None = None) -> None:
        super().__init__()
        self.client = client or Client()
        self.deadline = deadline
        #: What was saved last.
        self.handle: typing.Any = None

    def save_checkpoint(
        self,
        checkpoint: dict[str, typing.Any],
        path: str | os.PathLike[str],
        storage_options: typing.Any = None,
    ) -> None:
        from . import save

        self.handle = save(checkpoint, os.fspath(path), client=self.client, deadline=self.deadline)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: typing.Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, typing.Any]:
        from . import load

        found: dict[str, typing.Any] = load(
            os.fspath(path),
            client=self.client,
            map_location=map_location or "cpu",
            weights_only=bool(weights_only),
        )
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        from . import remove

        try:
            # It may still be on its way.
            if self.handle is not None and self.handle.name == os.fspath(path):
                self.handle.wait()
            remove(os.fspath(path), client=self.client)
        except NotFound:
            pass

    def teardown(self) -> None:
        if self.handle is not None:
            try:
                self.handle.wait()
            except NotFound:
                pass
