"""A loader inside PyTorch's DataLoaders, plain and stateful."""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.utils.data

from ._arguments import flag
from ._collate import owned
from ._decode import NOTHING
from ._lightning import Ahead, trains_from_workers_with_states
from ._pipeline import Pipeline
from ._plan import RELAXED, State
from ._warn import warn
from ._words import counted
from .errors import InvalidRequest
from .loader import NO_DATASET, Loader, overtaken
from .rows import Rows
from .stats import Meter

#: Room for a state in the memory that is shared with DataLoader workers.
STATE_BYTES = 4096
#: What the state of a worker has.
WORKER_STATE = frozenset(("start", "step", "sample", "worker", "workers"))


#: Classes of Hugging Face's libraries through which a dataset is iterated over by one process for
#: all, or dealt out among them.
DEALERS = frozenset(("DataLoaderDispatcher", "IterableDatasetShard"))
SHARD = "DataLoaderShard"


def _dealer() -> str | None:
    """Which of these (or of accelerate's plain loaders) is at work in this thread's frames, if
    any.
    """
    if "accelerate" not in sys.modules and "transformers" not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(("accelerate.", "transformers.")):
            owner = frame.f_code.co_qualname.partition(".")[0]
            if owner in DEALERS:
                return owner
            found = owner if owner == SHARD else found
        frame = frame.f_back
    return found


#: Of a training in Lightning.
AHEAD_IN_WORKERS = (
    "Lightning takes a batch ahead where the number of batches is not known, and a state of"
    " StatefulDataLoader with workers counts it: a training that goes on from a checkpoint would"
    " never see that batch. Give Lightning forebay.torch.Resumable(DataLoader(loader.torch(),"
    " batch_size=None, num_workers=…)), the loader itself, or num_workers=0"
)

BATCHES_OF_BATCHES = (
    "DataLoader puts batches of the loader together once more, which adds a dimension to them: give"
    " DataLoader(loader.torch(), batch_size=None), or DataLoader(loader.torch(samples=True),"
    " batch_size=…) with the loader's batch_size"
)

#: What it yields: batches, or samples.
T_co = TypeVar("T_co", covariant=True)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """These bytes, in memory that workers share."""
    try:
        return tensor.share_memory_()
    except RuntimeError:
        # There is no /dev/shm, or no room in it. Workers that are forked share this, too; others
        # cannot be started without.
        own = torch.frombuffer(mmap.mmap(-1, len(tensor)), dtype=torch.uint8)
        return own.copy_(tensor)


class LoaderDataset(torch.utils.data.IterableDataset[T_co]):
    """The batches of a loader as an ``IterableDataset``. Made by :meth:`forebay.Loader.torch`.

    ::

        data = ds.loader(batch_size=64, shuffle=forebay.Block(16), output="torch").torch()
        loader = forebay.torch.Resumable(DataLoader(data, batch_size=None, num_workers=4))

    It yields whole batches, for ``DataLoader(data, batch_size=None)``; without that, DataLoader
    puts batches together once more, and a warning says so. Worker ``w`` of ``n`` makes the steps
    ``w``, ``w + n``, …, and DataLoader takes from its workers in turn: the batches come in the
    loader's order, whatever the number of workers. With ``samples=True`` it yields single samples,
    for a DataLoader that puts them together: with the loader's ``batch_size``, and without
    ``drop_last``. An ``IterableDataset`` of your own goes over this too, and not over the loader
    itself, which knows nothing of workers: each of them would yield all of its batches.

    What workers yield must survive pickling: tensors, arrays, ``bytes``. Views of received memory
    (``memoryview``, in columns of bytes that nobody decodes) become ``bytes``. A batch of
    ``output="rows"`` is :class:`forebay.Rows`, whose rows have ``bytes`` too; a DataLoader without
    a ``collate_fn`` makes a list of dicts of it.

    It yields only this rank's share. Hugging Face accelerate (``accelerator.prepare``, and so
    ``transformers.Trainer``) would deal out the share of rank 0 once more and lose the others'
    rows: that is refused here, with what to do. Lightning takes it as it is.

    To resume exactly, use :class:`Resumable` around a plain DataLoader, or
    ``torchdata.StatefulDataLoader``. A state of the latter loads into as many workers and ranks as
    it was saved with; :func:`state_of` turns it into one that loads into any number. (From or to
    ``num_workers=0`` torchdata refuses a state with a bare ``AssertionError``.) Without
    :class:`Resumable`, call :meth:`set_epoch` before each epoch, as with ``DistributedSampler``:
    otherwise each epoch is the same one again.
    """

    def __init__(self, loader: Loader[Any], *, samples: bool = False) -> None:
        samples = flag("samples", samples)
        if samples and loader.options.batch_size is None:
            raise InvalidRequest(
                "the loader makes batches bounded by length, so DataLoader cannot make them"
                " from samples",
                hint="give samples=False, and DataLoader(batch_size=None)",
            )
        if samples and loader.options.pack is not None:
            raise InvalidRequest(
                "the loader makes batches of packs, which DataLoader cannot put together",
                hint="give samples=False, and DataLoader(batch_size=None)",
            )
        if samples and loader.options.on_error == "skip":
            raise InvalidRequest(
                'with on_error="skip" a step may have fewer samples, and DataLoader would'
                " fill its batches up with those of the next",
                hint="give samples=False, and DataLoader(batch_size=None); or a function as"
                " on_error=",
            )
        self.loader = loader
        self.samples = samples
        self.tagged = False
        self._loaded = False
        # In shared memory, so that workers that persist from epoch to epoch see the change.
        self._begin = _shared(torch.zeros(STATE_BYTES, dtype=torch.uint8))
        self._go_to(loader.state_dict())

    def __repr__(self) -> str:
        what = "samples" if self.samples else "batches"
        return f"<forebay.torch.LoaderDataset: {what} of {self.loader!r}>"

    def load_state_dict(self, state: State, strict: bool = True) -> None:
        """Where the next iteration begins: a state of :meth:`Loader.state_dict`, of
        :class:`Resumable` or of :func:`state_of`. See :meth:`forebay.Loader.load_state_dict`.

        Raises:
            InvalidRequest: It belongs to another dataset, seed, shuffle, mix or release.
        """
        self._go_to(state, strict)
        self._loaded = True

    def _go_to(self, state: State, strict: bool = True) -> None:
        text = json.dumps(self.loader.checked(state, strict)).encode()
        if len(text) >= STATE_BYTES:
            raise InvalidRequest(
                f"the state has {len(text)} bytes, which is too long",
                hint="load the state as it was saved",
            )
        self._begin[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._begin[len(text) :] = 0

    @property
    def begin(self) -> State:
        """Where the next iteration begins."""
        return json.loads(bytes(self._begin.numpy()).rstrip(b"\0"))

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration begin with this epoch. If it is already set to begin within that
        epoch (a state was loaded), it still does.
        """
        dealer = self._refuse_to_be_shared()
        begins = self.begin["epoch"]
        if dealer and self._loaded and epoch < begins:
            raise InvalidRequest(
                f"accelerate counts epochs from 0 again and asks for epoch {epoch}, and a"
                f" state of epoch {begins} was loaded",
                hint="iterate over forebay.torch.Resumable(DataLoader(data, batch_size=None)) in"
                " place of what prepare() returned",
            )
        if epoch != begins:
            self._go_to(self.loader.order.at(epoch, 0))

    def _refuse_to_be_shared(self) -> bool:
        """Whether a DataLoader of accelerate is at work here; raises if it is about to deal out
        a single rank's share.
        """
        dealer = _dealer()
        if dealer is None:
            return False
        place = self.loader.place
        if dealer in DEALERS and place.world_size > 1:
            raise InvalidRequest(
                f"accelerate would divide what is already the share of {place}, and rows"
                " would be lost",
                hint="leave the loader out of accelerator.prepare() and iterate over it; for"
                " transformers.Trainer override get_train_dataloader; or"
                " make it with rank=0, world_size=1, and accelerate deals out all rows",
            )
        return True

    def _warn_of_batches_of_batches(self, caller: FrameType) -> None:
        """Warns if it is a DataLoader that iterates here, and that puts items together in PyTorch's
        way. A dataset is not told: the DataLoader's part that fetches is looked at.
        """
        fetcher = caller.f_locals.get("self")
        if (
            getattr(fetcher, "dataset", None) is self
            and getattr(fetcher, "auto_collation", False)
            and getattr(fetcher, "collate_fn", None) is torch.utils.data.default_collate
        ):
            warn(BATCHES_OF_BATCHES)

    def __bool__(self) -> bool:
        """True: ``len()`` may be unknown."""
        return True

    def __len__(self) -> int:
        """Batches (or samples) of the next iteration, of all workers together."""
        total = self.loader.total(self.begin)
        if total is None:
            if trains_from_workers_with_states():
                warn(AHEAD_IN_WORKERS)
            raise TypeError("the end of this iteration is not known")
        return total * (self.loader.options.batch_size or 1) if self.samples else total

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_to_be_shared()  # by workers that are about to be spawned
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a worker that was spawned it is shared already, in a copy not yet.
        self._begin = _shared(self._begin)

    def __iter__(self) -> Iterator[T_co]:
        self._refuse_to_be_shared()
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None and self.loader.options.stream:
            raise InvalidRequest(
                "only one process can receive a stream",
                hint="DataLoader(num_workers=0) and threads=, or stream=False",
            )
        if not self.samples and worker == 0:
            self._warn_of_batches_of_batches(sys._getframe(1))
        return WorkerIteration(self, self.begin, worker, workers)


class WorkerIteration(Iterator[T_co]):
    """What one worker yields. Its state is what ``StatefulDataLoader`` keeps for that worker."""

    def __init__(self, data: LoaderDataset[T_co], start: State, worker: int, workers: int) -> None:
        self._data, self._start, self._worker, self._workers = data, start, worker, workers
        self._number, self._sample = worker, 0
        self._pipeline: Pipeline | None = None
        self._samples: list[Any] | None = None
        self._after: State = start
        # Where the pipeline begins: steps are counted from there.
        self._first = worker
        # Where it was before the batch that was yielded last, which may have been taken ahead.
        self._before = worker
        self._ahead = Ahead()

    def __iter__(self) -> WorkerIteration[T_co]:
        return self

    def _next_step(self) -> Any:
        self._before = self._number
        if self._pipeline is None:
            self._first = self._number
            if torch.utils.data.get_worker_info() is None:
                self._ahead.look()
            loader = self._data.loader
            self._pipeline = loader.pipeline(
                self._start,
                loader.until(self._start),
                Meter(),
                first=self._number,
                stride=self._workers,
                samples=self._data.samples,
                # Each worker is a process of its own already.
                threads=0 if torch.utils.data.get_worker_info() is not None else None,
            )
        self._pipeline.check_process()
        while True:
            made = self._pipeline.at((self._number - self._first) // self._workers)
            if made is None:
                self._pipeline.close()
                raise StopIteration
            self._after = made.step.next
            self._ahead.takes()
            if made.batch is not NOTHING:
                batch = made.batch
                return batch.with_bytes() if isinstance(batch, Rows) else owned(batch)
            # None of its samples could be made.
            self._number += self._workers

    def __next__(self) -> Any:
        if not self._data.samples:
            batch = self._next_step()
            self._number += self._workers
            return (batch, self._after) if self._data.tagged else batch
        if self._samples is None:
            self._samples = self._next_step()
        sample = self._samples[self._sample]
        self._sample += 1
        tag = None
        if self._sample == len(self._samples):
            self._samples, self._sample = None, 0
            self._number += self._workers
            tag = self._after
        return (sample, tag) if self._data.tagged else sample

    def state_dict(self) -> dict[str, Any]:
        """What this worker has yielded, but for a batch that was taken ahead."""
        step, sample = self._number, self._sample
        if self._ahead.holds_one:
            step, sample = self._before, 0
        return {
            "start": self._start,
            "step": step,
            "sample": sample,
            "worker": self._worker,
            "workers": self._workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the same worker stopped, with the same number of workers.

        Raises:
            InvalidRequest: There were other workers then, or the state belongs to another order.
        """
        if (state["worker"], state["workers"]) != (self._worker, self._workers):
            raise InvalidRequest(
                f"the state of worker {state['worker']} of {state['workers']} in worker"
                f" {self._worker} of {self._workers}",
                hint="data.load_state_dict(forebay.torch.state_of(saved, data)) resumes with any"
                " number of workers",
            )
        instead = "data.load_state_dict(forebay.torch.state_of(saved, data, strict=False))"
        self._start = _checked(self._data.loader, state["start"], True, instead)
        self._number, self._sample = int(state["step"]), int(state["sample"])
        self._after, self._samples, self._pipeline = self._start, None, None
        if self._sample:
            self._samples = self._next_step()


def _checked(loader: Loader[Any], state: Any, strict: bool, instead: str) -> State:
    """The state, if it is a place in the loader's order. Over other columns and samples it is
    refused, with the advice to call this instead.
    """
    try:
        return loader.checked(state, strict)
    except InvalidRequest as e:
        hint = e.hint and e.hint.replace(RELAXED, instead)
        raise InvalidRequest(e.message, hint=hint) from None


class _Tagged:
    """A collate function that leaves out the tags of samples and passes on the last one."""

    def __init__(self, collate: Callable[[Any], Any], samples: bool) -> None:
        self._collate, self._samples = collate, samples

    def __call__(self, tagged: Any) -> tuple[Any, State | None]:
        if not self._samples:
            return self._collate(tagged[0]), tagged[1]
        tags = [tag for _, tag in tagged if tag is not None]
        return self._collate([sample for sample, _ in tagged]), tags[-1] if tags else None


class Resumable:
    """A plain DataLoader over a :class:`LoaderDataset` that can be resumed exactly.

    Workers tag what they yield with the state after it; here, in the main process, the tag of what
    was *yielded to the loop* is kept, and whatever the workers have made ahead is not counted.
    Iterating, :meth:`state_dict` and :meth:`load_state_dict` work as with :class:`forebay.Loader`:
    a loop continues where the last one stopped, and a state can be loaded into any number of
    workers and ranks, and into a loader without DataLoader.

    Args:
        dataloader: ``DataLoader(data, batch_size=None, …)``, or for ``samples=True`` one with the
            loader's ``batch_size``. It has not been iterated over yet, and from now on belongs to
            this one alone, as its dataset does.
    """

    def __init__(self, dataloader: torch.utils.data.DataLoader) -> None:
        if isinstance(dataloader, (Loader, LoaderDataset)):
            raise TypeError(
                "Resumable is for DataLoader(loader.torch(), batch_size=None, …); without a"
                " DataLoader, a loader has state_dict() and load_state_dict() itself"
            )
        data = getattr(dataloader, "dataset", None)
        if not isinstance(data, LoaderDataset):
            given = f"for {dataloader!r:.100}" if data is None else f"over {type(data).__name__}"
            raise TypeError(f"Resumable is for DataLoaders over loader.torch(), not {given}")
        wanted = data.loader.options.batch_size if data.samples else None
        if dataloader.batch_size != wanted:
            raise InvalidRequest(
                f"DataLoader has batch_size={dataloader.batch_size}, and batches end where"
                f" steps do with batch_size={wanted} only",
                hint=f"DataLoader(data, batch_size={wanted}, …)",
            )
        if not getattr(dataloader, "in_order", True):
            raise InvalidRequest(
                "DataLoader(in_order=False) does not keep the order",
                hint="leave in_order= out: a state is a place in an order",
            )
        if isinstance(dataloader.collate_fn, _Tagged):
            raise InvalidRequest(
                "another Resumable has this DataLoader", hint="make a DataLoader for each"
            )
        self.dataloader, self.data = dataloader, data
        data.tagged = True
        dataloader.collate_fn = _Tagged(dataloader.collate_fn, data.samples)
        self._state = self._before = data.begin
        self._ahead = Ahead()
        #: The loop that began last; None once a state was loaded, which ends the loop before.
        self._current: object | None = None

    def __iter__(self) -> Iterator[Any]:
        # At once: of two threads that begin in the same moment, one has its loop.
        begun = self._current = object()
        state = self._state = self._trained
        self._ahead.look()
        self.data._go_to(state)
        until = self.data.loader.until(state)
        taken = iter(self.dataloader)
        # Looked at before a batch is taken, too: workers that persist would give one of the loop
        # that has begun since.
        while self._is_current(begun) and (made := next(taken, None)) is not None:
            batch, after = made
            if not self._is_current(begun):
                return
            if after is None:
                raise InvalidRequest(
                    "a batch ended inside a step",
                    hint="DataLoader's batch_size is the loader's, and nothing changes it",
                )
            self._ahead.takes()
            self._before, self._state = self._state, after
            yield batch
        if not self._is_current(begun):
            return
        self._before = self._state = self.data.loader.ended(self._state, until)

    def _is_current(self, begun: object) -> bool:
        """Whether this is the loop that it has now. Raises InvalidRequest if another has begun."""
        if self._current not in (None, begun):
            raise overtaken()
        return self._current is begun

    def __repr__(self) -> str:
        state = self._trained
        workers = counted(self.dataloader.num_workers, "worker")
        names = ("epoch", "group", "position")
        where = [f"{name} {state[name]:,}" for name in names if name in state]
        of = " + ".join(d.name for d in self.data.loader.datasets)
        return f"<forebay.torch.Resumable of {of}: {workers}, at {', '.join(where)}>"

    def __bool__(self) -> bool:
        """True: ``len()`` may be unknown."""
        return True

    def __len__(self) -> int:
        return len(self.data.loader)

    @property
    def dataset(self) -> NoReturn:
        """There is none: whoever takes it for a DataLoader is told what to do."""
        raise AttributeError(NO_DATASET)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return int(self._state["epoch"])

    @property
    def _trained(self) -> State:
        # Where it is but for a batch that was taken ahead.
        return self._before if self._ahead.holds_one else self._state

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not in Lightning's loop: what that took ahead is still to come there.
        return {**self.__dict__, "_before": self._trained, "_state": self._trained}

    def state_dict(self) -> State:
        """What was yielded to the loop, as a few numbers: see :meth:`forebay.Loader.state_dict`."""
        return self.data.loader.whole(self._trained)

    def load_state_dict(self, state: State, strict: bool = True) -> None:
        """Goes to where a state was taken: see :meth:`forebay.Loader.load_state_dict`."""
        self._before = self._state = self.data.loader.checked(state, strict)
        self._current = None


def _of_workers(saved: Any) -> Iterator[dict[str, Any]]:
    """The states of :class:`WorkerIteration` inside a state of a StatefulDataLoader, wherever it
    keeps them.
    """
    if isinstance(saved, dict):
        if WORKER_STATE.issubset(saved):
            yield saved
        else:
            for value in saved.values():
                yield from _of_workers(value)


def state_of(saved: dict[str, Any], data: LoaderDataset[Any], strict: bool = True) -> State:
    """The place in the order that a state of ``torchdata.StatefulDataLoader`` stands for.

    Its own states hold one for each worker, and can be loaded only into as many workers of as many
    ranks. What this returns can be loaded into anything: :meth:`LoaderDataset.load_state_dict`,
    :meth:`forebay.Loader.load_state_dict`, :meth:`Resumable.load_state_dict`.

    Args:
        saved: What ``StatefulDataLoader.state_dict()`` returned.
        data: A dataset of the same order, with the number of ranks and the batch size that the
            state was taken with.
        strict: False: also a state over columns of other names and types, and other maps, as for
            :meth:`forebay.Loader.load_state_dict`. What this returns is then one of ``data``.

    Raises:
        InvalidRequest: It is not such a state, or one of another order.
    """
    found = list(_of_workers(saved))
    if not found:
        raise InvalidRequest(
            "this is not a state of a StatefulDataLoader over loader.torch()",
            hint="give what its state_dict() returned",
        )
    if any(w["sample"] for w in found):
        raise InvalidRequest(
            "the state is inside a batch", hint="give the DataLoader the loader's batch_size"
        )
    # Batches are taken from the workers in turn, so all batches before the lowest next step were
    # yielded, and none after it.
    number = min(int(w["step"]) for w in found) + int(saved.get("_steps_since_snapshot", 0))
    loader = data.loader
    instead = "forebay.torch.state_of(saved, data, strict=False)"
    start = _checked(loader, found[0]["start"], strict, instead)
    return start if number == 0 else loader.after(start, number)
