"""What datasets and mixes have in common: they make loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import _collate
from .errors import SampleFailed
from .loader import Loader, Options, Uneven
from .shuffle import Shuffle

if TYPE_CHECKING:
    from .dataset import Dataset


class Loadable(ABC):
    """Something of which batches can be made."""

    @abstractmethod
    def _sources(self) -> tuple[Sequence[Dataset], Sequence[float] | None, int | None]:
        """The datasets, their weights (None: one dataset), and rows per epoch (None: as many as there are)."""

    def loader(
        self,
        batch_size: int | None = None,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        epochs: int | float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "drop",
        columns: Sequence[str] | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[Any], Any] | None = None,
        on_error: str | Callable[[SampleFailed], Any] = "raise",
        output: _collate.Output = "rows",
        pin_memory: bool = False,
        threads: int | None = None,
        prefetch: int = 4,
        max_total: int | None = None,
        length: str | Sequence[Any] | None = None,
        lookahead: int | None = None,
        padded: bool = False,
        stream: bool = False,
        connections: int | None = None,
        window_bytes: int | None = None,
        nodes: Sequence[Any] | None = None,
        follow: bool = True,
        progress: bool | None = False,
    ) -> Loader:
        """Batches in the order of a plan.

        Args:
            batch_size: Rows of a batch of one rank. With ``max_total``: the most that it may have.
            shuffle: ``forebay.Block(16)``, ``forebay.Full()``, ``forebay.Window(10_000)``, or None for the stored order. Another order in each epoch.
            seed: Of the order. Together with the shuffle and the dataset's version it determines every epoch.
            epochs: None: a ``for`` loop goes to the end of the epoch that the loader is in. A number: to the end of that many epochs, counted from
                the first one of the job, also after a resume. ``math.inf``: it does not end.
            rank, world_size: This process among the training processes. Default: ``torch.distributed``, else ``RANK`` and ``WORLD_SIZE``, else alone. Step
                ``s`` of all ranks takes the next ``world_size * batch_size`` rows of the order, rank ``r`` the ``r``-th ``batch_size`` of them: the order does
                not depend on the number of ranks, and all ranks have equally many steps.
            uneven: What becomes of the last rows of an epoch that fill no step of all ranks. ``"drop"``: they are left out. ``"pad"``: what lacks is filled
                up with rows from the beginning, marked as padding (``loader.last.real``; in dicts the column ``__real__``). ``"repeat"``: filled up, and they count.
            columns: Read only these columns. Default: the dataset's.
            decode: Makes a sample of a row, which is a dict. Default: the dataset's ``decode``; without one, batches are made of columns.
            transform: Applied to what ``decode`` returned.
            collate: Makes a batch of the list of samples; without ``decode`` and ``transform`` it is applied to what ``output`` says. Default: see ``output``.
            on_error: ``"raise"``: a sample that fails ends the loop with a :class:`SampleFailed` that names its file and row. A function: called with that
                error, and what it returns is the sample.
            output: What a batch is. Without ``decode``: ``"rows"`` (:class:`Rows`), ``"numpy"``, ``"torch"`` or ``"jax"`` (a dict of columns of shape ``(batch_size, …)``), ``"arrow"`` (a
                ``pyarrow.RecordBatch``). With it: a list of samples, or for ``"numpy"``, ``"torch"`` and ``"jax"`` what stacking them gives.
            pin_memory: Tensors in page-locked memory (``output="torch"``).
            threads: Threads that run ``decode``, ``transform`` and ``collate``, ahead of the loop. 0: the loop does it itself. Default: the cores, at most 4.
            prefetch: Batches that are asked for ahead of the one that is waited for, and as many that are decoded ahead.
            max_total, length: Batches bounded by total length, for speech and text: the rows of a batch have at most ``max_total`` of the column
                ``length`` (whole numbers; that column is read once, from end to end, 8 bytes for each row are kept) together.
                Instead of a column's name: an array with the length of each row (of a mix: a list of arrays).
            lookahead: Rows that are looked at to put rows of similar length together. Default: those of 100 full batches.
            padded: Each row counts as long as the longest of its batch, as when batches become rectangles.
            stream: The node goes first: it computes the same plan and sends finished batches over ``connections``, before they are asked for. For
                nodes that are far away. Not within DataLoader workers.
            connections: Default: chosen by distance and rate.
            window_bytes: What may be on its way or waiting here, in bytes.
            follow: Tell the node the order, so that its cache fetches, keeps and lets go by it. (Of a stream it knows it.)
            nodes: Further nodes (URLs or clients) that serve the same dataset, for streams: each sends its part of the steps.
            progress: Draw a line on the terminal. None: on terminals, after a second.

        Raises:
            ValueError, TypeError: Arguments that make no sense.
            InvalidRequest: An epoch has fewer rows than one step of all ranks takes, with ``uneven="drop"``.
        """
        options = Options(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
            uneven=uneven,
            columns=columns,
            decode=decode,
            transform=transform,
            collate=collate,
            on_error=on_error,
            output=output,
            pin_memory=pin_memory,
            threads=threads,
            prefetch=prefetch,
            max_total=max_total,
            length=length,
            lookahead=lookahead,
            padded=padded,
            stream=stream,
            connections=connections,
            window_bytes=window_bytes,
            nodes=nodes,
            follow=follow,
            progress=progress,
        )
        datasets, weights, epoch_rows = self._sources()
        return Loader(datasets, weights, epoch_rows, options)
