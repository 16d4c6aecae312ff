"""Batches for JAX.

``ds.loader(batch_size, output="jax")`` gives dicts of arrays on the default device. If several
processes train together, or arrays should be laid out over devices, :func:`loader` takes rank and
world size from JAX and makes global arrays::

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batches = forebay.jax.loader(ds, batch_size=256, sharding=sharding, columns=["image", "label"])
    for batch in batches:
        state = train_step(state, batch)

Columns of texts and of bytes stay as they are (NumPy arrays of objects); use ``decode=`` to make
arrays of them. With a sharding, ``cu_seqlens`` and ``max_seqlen`` of packs are those of the
process's own rows, as NumPy has them: their length is another one in each process and step. Whole
numbers that JAX would cut to 32 bits are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Unpack, overload

from ._needs import needs

with needs("forebay.jax"):
    # Before JAX, which says something else where it is missing.
    import numpy  # noqa: F401
with needs("forebay.jax"):
    import jax

from ._collate import to_jax
from ._loadable import B, Common, Loadable
from ._plan import State
from .loader import B_co, Loader
from .rows import Row
from .stats import Stats

__all__ = ["JaxLoader", "loader"]


def __dir__() -> list[str]:
    return sorted(__all__)


#: What a batch of packs has beside arrays of one item for each pack.
OF_PROCESS = ("cu_seqlens", "max_seqlen")


class JaxLoader(Generic[B_co]):
    """A :class:`forebay.Loader` whose batches are ``jax.Array``. Made by :func:`loader`.

    Attributes:
        loader: The loader underneath: its place, its order.
        sharding: How arrays lie on the devices, or None.
    """

    def __init__(self, inner: Loader[Any], sharding: Any | None) -> None:
        self.loader, self.sharding = inner, sharding

    def _global(self, value: Any) -> Any:
        return jax.make_array_from_process_local_data(self.sharding, value)

    def _placed(self, batch: Any) -> Any:
        if self.sharding is None:
            return to_jax(batch)
        if self.loader.options.pack is None or not isinstance(batch, dict):
            return to_jax(batch, self._global)
        own = {name: batch[name] for name in OF_PROCESS if name in batch}
        return {**to_jax({k: v for k, v in batch.items() if k not in own}, self._global), **own}

    def __iter__(self) -> Iterator[B_co]:
        for batch in self.loader:
            placed: B_co = self._placed(batch)
            yield placed

    def __repr__(self) -> str:
        return f"<forebay.jax.JaxLoader of {self.loader!r}>"

    def __bool__(self) -> bool:
        """True: ``len()`` may be unknown."""
        return True

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.loader.epoch

    def state_dict(self) -> State:
        """See :meth:`forebay.Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: State, strict: bool = True) -> None:
        """See :meth:`forebay.Loader.load_state_dict`."""
        self.loader.load_state_dict(state, strict)

    def stats(self, reset: bool = False) -> Stats:
        """See :meth:`forebay.Loader.stats`."""
        return self.loader.stats(reset)


@overload
def loader(
    data: Loadable[Any],
    batch_size: int,
    *,
    sharding: Any | None = None,
    collate: Callable[[Any], B],
    decode: Callable[[dict[str, Any]], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    **options: Unpack[Common],
) -> JaxLoader[B]: ...
@overload
def loader(
    data: Loadable[Row],
    batch_size: int,
    *,
    sharding: Any | None = None,
    collate: None = None,
    decode: None = None,
    transform: None = None,
    **options: Unpack[Common],
) -> JaxLoader[dict[str, jax.Array | Any]]: ...
@overload
def loader(
    data: Loadable[Any],
    batch_size: int,
    *,
    sharding: Any | None = None,
    collate: None = None,
    decode: Callable[[dict[str, Any]], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    **options: Unpack[Common],
) -> JaxLoader[Any]: ...
def loader(
    data: Loadable[Any], batch_size: int, *, sharding: Any | None = None, **options: Any
) -> JaxLoader[Any]:
    """A loader of ``jax.Array``.

    Args:
        data: A dataset or a mix.
        batch_size: Rows of one process. A global array has ``batch_size * jax.process_count()`` of
            them.
        sharding: A ``jax.sharding.Sharding`` of the global arrays. None: this process's rows on its
            default device.
        **options: As for :meth:`forebay.Dataset.loader`, except ``output``. ``rank`` and
            ``world_size`` are those of JAX unless given.
    """
    if "output" in options:
        raise ValueError('output is "jax" here: leave it out')
    options.setdefault("rank", jax.process_index())
    options.setdefault("world_size", jax.process_count())
    return JaxLoader(data.loader(batch_size, output="numpy", **options), sharding)
