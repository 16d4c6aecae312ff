"""Lightning's ``CheckpointIO`` over a node."""

from __future__ import annotations

import contextlib
import logging
import os
import typing
import warnings

from .._arguments import client_of
from .._fetch import UNSURE
from .._forebay import Client
from ..errors import Conflict, InvalidRequest, NotFound
from . import _wire

try:
    from lightning.pytorch.plugins.io import CheckpointIO as _CheckpointIO
except ModuleNotFoundError:
    try:
        from pytorch_lightning.plugins.io import CheckpointIO as _CheckpointIO
    except ModuleNotFoundError as e:
        raise ImportError(
            "forebay.checkpoint.CheckpointIO needs Lightning: pip install lightning"
        ) from e

log = logging.getLogger("forebay")

#: How often the log says why training does not end yet.
_TOLD_SECONDS = 60.0


def _tell(why: str) -> None:
    log.warning("training ends when its last checkpoint is durable: %s", why)


class CheckpointIO(_CheckpointIO):
    """``Trainer(plugins=[forebay.checkpoint.CheckpointIO(client)])``: each checkpoint is staged on
    the node's disk, and training goes on while it goes to the bucket.

    ``ModelCheckpoint(dirpath="forebay://bucket/run")`` says where (Lightning itself looks there,
    too, at the node of ``FOREBAY_NODE``); ``teardown`` waits until the last one is durable, and the
    log says each minute why it is not. A checkpoint that is to go stays until the one that was
    saved last is durable, so that the bucket always has one, and training does not wait for that.
    If that one is lost before (with the node's disk, say), what was to go stays. If the node or the
    bucket fails at a removal, it is tried again at the next one, and at the end; what stays then,
    the log says.

    To resume, give the full path: ``trainer.fit(model, data, ckpt_path="forebay://…")``. Lightning
    looks for ``ckpt_path="last"`` in the local file system, does not find it, and begins anew. Its
    ``load_from_checkpoint`` does not ask this plugin: ``forebay.checkpoint.load(path,
    weights_only=False)["state_dict"]`` is what a model saved.

    Args:
        client: The node; by default the one of ``FOREBAY_NODE``.
        deadline: Seconds within which each checkpoint is to be durable. None: as the node's
            ``checkpoints.deadline`` says. 0: whenever.
        retry_for: Seconds for which a checkpoint is saved or loaded anew while the node cannot be
            reached, or does not answer, as when it is started again, before that ends the training.
            A warning says so at once.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        deadline: float | None = None,
        retry_for: float = 60.0,
    ) -> None:
        super().__init__()
        self.client = client_of(client)
        self.deadline = _wire.checked_deadline(deadline)
        self.retry_for = _wire.checked_patience(retry_for)
        #: What was saved last.
        self.handle: _wire.Checkpoint | None = None
        #: That one was removed by this plugin.
        self._removed_last = False
        #: Those that are to go, and are still there.
        self._going: dict[str, _wire.Checkpoint] = {}
        self._warned_of_last = False

    def save_checkpoint(
        self,
        checkpoint: dict[str, typing.Any],
        path: str | os.PathLike[str],
        storage_options: typing.Any = None,
    ) -> None:
        from . import save

        if storage_options is not None:
            # As Lightning's own plugin says it.
            raise TypeError(
                "save_checkpoint(..., storage_options=...) is not supported: this plugin has no"
                f" options for a checkpoint, and was given {storage_options!r}"
            )
        name = os.fspath(path)
        try:
            _wire.split(name)
        except InvalidRequest as e:
            # Where Lightning is not told otherwise, it names a file in the current directory.
            raise InvalidRequest(
                f"this plugin saves in buckets alone: {e.message}",
                hint='give ModelCheckpoint(dirpath="forebay://bucket/run")',
            ) from e
        self.handle = save(
            checkpoint,
            name,
            client=self.client,
            deadline=self.deadline,
            retry_for=self.retry_for,
        )
        self._removed_last = False
        # It takes the place of one of its name.
        self._going.pop(name, None)
        self._warn_of_last(name)

    def _warn_of_last(self, name: str) -> None:
        """Says, once, how one that ``ckpt_path="last"`` is to mean is found again."""
        if self._warned_of_last or not name.rsplit("/", 1)[-1].startswith("last"):
            return
        self._warned_of_last = True
        warnings.warn(
            f'ckpt_path="last" does not find {name}, and training begins anew: Lightning looks for'
            f" it in the local file system. To resume, give the full path: ckpt_path={name!r}",
            stacklevel=3,
        )

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
            weights_only=weights_only is not None and weights_only,
            retry_for=self.retry_for,
        )
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        about = _wire.Checkpoint(self.client, name)
        try:
            about.id = about.status()["id"]
        except NotFound:
            return
        except UNSURE as e:
            # Then whatever has the name when it is removed: what this plugin saves takes its place.
            log.warning("%s is not removed yet: %s", name, e)
        self._going[name] = about
        self._remove()

    def _may_remove(self) -> bool:
        """Whether the one that was saved last is durable, or was removed after it was."""
        if self.handle is None or self._removed_last:
            return True
        try:
            return self.handle.durable
        except (NotFound, *UNSURE):
            # It may be lost, and then an older one is all that the bucket has.
            return False

    def _remove(self) -> None:
        """Removes those that are to go, if the one that was saved last is durable. What cannot be
        removed now is tried again the next time.
        """
        if not self._may_remove():
            return
        for name, checkpoint in list(self._going.items()):
            try:
                _wire.remove(self.client, name, checkpoint.id)
            except Conflict:
                # It is on its way to the bucket itself.
                continue
            except UNSURE as e:
                # Training is not to wait for each of them.
                log.warning("%s is not removed yet: %s", name, e)
                return
            except NotFound:
                pass
            del self._going[name]
            last = self.handle
            # Of one that could not be asked for its id, the name is all that is known.
            if last and (checkpoint.id == last.id or (checkpoint.id, name) == (None, last.name)):
                self._removed_last = True

    def teardown(self) -> None:
        if self.handle is not None and not self._removed_last:
            try:
                self.handle._wait(tell=_tell, every=_TOLD_SECONDS)
            except NotFound as e:
                log.warning("the checkpoint that was saved last is lost: %s", e)
        for checkpoint in self._going.values():
            with contextlib.suppress(NotFound, *UNSURE):
                checkpoint.wait()
        self._remove()
        for name in self._going:
            log.warning("%s was to go, and stays", name)
