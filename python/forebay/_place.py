"""Which of the training processes this is."""

from __future__ import annotations

import os
import sys


def rank_and_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """The rank of this process and the number of ranks.

    What is given counts; else ``torch.distributed``, if this process has initialized it; else ``RANK`` and ``WORLD_SIZE`` of the environment;
    else ``(0, 1)``.

    Raises:
        ValueError: One is given without the other, or the rank is not one of the world.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        rank, world_size = _found()
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not one of a world of {world_size}: ranks are 0 to world_size - 1"
        )
    return rank, world_size


def _found() -> tuple[int, int]:
    # A process that has not imported torch has no process group, and need not wait for the import.
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
