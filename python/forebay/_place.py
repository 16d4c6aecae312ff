"""Which of the training processes this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._arguments import WORLD_MAX, whole_number
from .errors import InvalidRequest

__all__ = ["Place", "rank_and_world"]

#: Variables that launchers set: who set them, the rank, and the number of ranks.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
)
ADVICE = (
    "start the processes with torchrun, srun or mpirun, or initialize torch.distributed"
    " before the first batch; or give rank= and world_size="
)


@dataclass(frozen=True)
class Place:
    """One of the training processes.

    Attributes:
        rank: Which one, from 0.
        world_size: How many there are.
        source: Who said so, for people; None if nobody did, so that the process is considered
            alone.
    """

    rank: int
    world_size: int
    source: str | None

    def __str__(self) -> str:
        by = f" (by {self.source})" if self.source else ""
        return f"rank {self.rank} of {self.world_size}{by}"


def rank_and_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """The rank of this process and the number of ranks.

    Given values count. Otherwise the first of these decides: ``torch.distributed`` or
    ``jax.distributed``, if this process has initialized it; the environment of torchrun (``RANK``,
    ``WORLD_SIZE``), of Slurm (``SLURM_PROCID``, ``SLURM_NTASKS``), of Open MPI
    (``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``), of other MPIs (``PMI_RANK``,
    ``PMI_SIZE``). Without any of them, it is ``(0, 1)``.

    Raises:
        ValueError: One is given without the other, or the rank is not one of the world.
        InvalidRequest: The environment gives only half of it, or something impossible.
    """
    place = find(rank, world_size)
    return place.rank, place.world_size


def find(
    rank: int | None = None, world_size: int | None = None, inherited: Place | None = None
) -> Place:
    """Like :func:`rank_and_world`. ``inherited``: the place of the process from which this one got
    its loader by pickle; it takes precedence over the environment.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is not None and world_size is not None:
        return _given(rank, world_size)
    return of_runtime() or inherited or _of_environment(os.environ) or Place(0, 1, None)


def _given(rank: Any, world_size: Any) -> Place:
    number, ranks = whole_number(rank), whole_number(world_size)
    if number is None or ranks is None:
        raise ValueError(
            f"rank and world_size must be whole numbers, not {rank!r} and {world_size!r}"
        )
    if not 0 <= number < ranks:
        raise ValueError(
            f"rank {number} is not one of a world of {ranks}: ranks are 0 to world_size - 1"
        )
    if ranks > WORLD_MAX:
        raise ValueError(f"world_size must be at most {WORLD_MAX:,}, not {ranks}")
    return Place(number, ranks, "rank= and world_size=")


def of_runtime() -> Place | None:
    """What a runtime that this process has initialized says."""
    # A process that has not imported these has no process group, and need not import them.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    jax = sys.modules.get("jax")
    # If asked before it is initialized, JAX would decide on its devices.
    if jax is not None and _is_initialized(jax):
        return Place(jax.process_index(), jax.process_count(), "jax.distributed")
    return None


def _is_initialized(jax: Any) -> bool:
    """Whether the processes of JAX know each other."""
    asked = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if asked is not None:
        return bool(asked())
    # JAX before 0.5.1 says it in no public place.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None) is not None


def _of_environment(env: Mapping[str, str]) -> Place | None:
    for launcher, rank_name, world_name in LAUNCHERS:
        rank, world = _number(env, rank_name), _number(env, world_name)
        if rank is None and world in (None, 1):
            if world is None:
                continue
            rank = 0
        if rank is None or world is None:
            there, missing = (world_name, rank_name) if rank is None else (rank_name, world_name)
            raise InvalidRequest(
                f"the environment has {there}={env[there]} and no {missing}, so the rank of"
                " this process is not known",
                hint=ADVICE,
            )
        if world < 1 or not 0 <= rank < world:
            raise InvalidRequest(
                f"the environment has {rank_name}={rank} and {world_name}={world}: ranks"
                f" are 0 to {world_name} - 1",
                hint=ADVICE,
            )
        if launcher == "Slurm" and world > 1 and rank == 0 and "SLURM_STEP_ID" not in env:
            # A batch script is process 0 of the job, and runs once.
            raise InvalidRequest(
                f"Slurm gave this job {world} tasks, and this process was not started by"
                " srun (there is no SLURM_STEP_ID): it would train on"
                f" 1/{world} of the rows",
                hint="srun python train.py; or rank=0, world_size=1 for all rows in this process",
            )
        return Place(rank, world, f"{rank_name} and {world_name}")
    if (_number(env, "LOCAL_RANK") or 0) > 0:
        raise InvalidRequest(
            f"the environment has LOCAL_RANK={env['LOCAL_RANK']}, and neither RANK nor"
            " WORLD_SIZE, so the rank of this process is not known",
            hint=ADVICE,
        )
    return None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(
            f"the environment has {name}={text!r}, which is not a number", hint=ADVICE
        ) from None


def to_inherit(inherited: Place | None) -> Place | None:
    """The place for a process that gets this one's loader by pickle, if its own runtime does not
    say: that is, for a worker of a DataLoader.
    """
    try:
        place = find(inherited=inherited)
    except InvalidRequest:
        return None
    return place if place.source else None
