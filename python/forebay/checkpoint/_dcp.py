"""``torch.distributed.checkpoint`` over a node."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
import queue
import threading
import typing
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as Begun
from concurrent.futures import wait

from .._needs import needs

with needs("forebay.checkpoint"):
    import torch

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _node
from .._arguments import client_of, flag, whole_number
from .._forebay import Client
from .._stop import Stop
from ..errors import Conflict, ConnectionFailed, Error, InvalidRequest, NotFound
from . import _wire
from ._formats import ALIGNED_BYTES, DIRECT_BYTES, memory_of

_METADATA = ".metadata"
#: Items below :data:`DIRECT_BYTES` next to each other are read together, at most so much.
_TOGETHER_BYTES = 8 << 20
#: A rank's items go into files. The first ones are small: a file is on its way to the origin when
#: all of it is on the disk, and until then the link has nothing to do. The next are twice as large,
#: and so on up to a size that an origin can put together while the next one is on its way.
_FIRST_FILE_BYTES = 32 << 20
_FILE_BYTES = 512 << 20
#: What is not read straight into a tensor's memory is held in memory of its own, at most about so
#: much at a time. (An item of another writer of DCP comes as a whole.)
_HELD_BYTES = 256 << 20
_SLAB_BYTES = 64 << 20
#: Tensors of a GPU go through page-locked memory, which PyTorch keeps to use it again: larger ones
#: through ordinary memory.
_PINNED_BYTES = 256 << 20


@dataclasses.dataclass
class _Where:
    """What a rank needs to know: which checkpoint, and what its files are called."""

    id: str
    rank: int
    coordinator: str
    #: Whether the rank was at another node than the coordinator when all said where they are.
    elsewhere: bool
    #: Whether there are no other ranks.
    alone: bool


def _bytes_of(plan: SavePlan) -> int:
    """About what a plan's items take in its files."""
    return sum(_item_bytes(item) + 4096 for item in plan.items) + (4 << 20)


def _item_bytes(item: WriteItem) -> int:
    """The bytes of a tensor, or of the part of one that this rank has; 0 for other objects."""
    if item.tensor_data is None:
        return 0
    elements = math.prod(item.tensor_data.chunk.sizes)
    return int(elements * item.tensor_data.properties.dtype.itemsize)


def _files_of(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """The items of each file. Threads write the files in this order."""
    files: list[list[WriteItem]] = []
    left = deque((item, _item_bytes(item)) for item in items)
    left_bytes = sum(size for _, size in left)
    most = _FIRST_FILE_BYTES
    while left:
        # At the end, all threads get an equal part of what is left.
        wanted = min(most, math.ceil(left_bytes / threads))
        for _ in range(threads):
            mine: list[WriteItem] = []
            mine_bytes = 0
            while left and (not mine or mine_bytes + left[0][1] <= wanted):
                item, size = left.popleft()
                mine.append(item)
                mine_bytes += size
            if mine:
                files.append(mine)
            left_bytes -= mine_bytes
        most = min(2 * most, _FILE_BYTES)
    return files


#: What saves had begun that are gone: they failed before their end. The next one gives it up.
_left: list[_wire.Saving] = []


class _Save:
    """One save of a writer."""

    def __init__(self, path: str | None) -> None:
        self.path, self.id = path, uuid.uuid4().hex
        self.saving: _wire.Saving | None = None
        # Of a rank that is alone, what it has written.
        self.results: list[WriteResult] | None = None

    @property
    def name(self) -> str:
        assert self.path is not None
        return self.path

    def give_up(self) -> None:
        if self.saving is not None:
            self.saving.give_up()
        self.saving = self.results = None

    def __del__(self) -> None:
        # At the end of the interpreter, this module's names may be gone.
        if self.saving is not None and _left is not None:
            _left.append(self.saving)


def _give_up_left() -> None:
    """Of what failed saves had begun."""
    while True:
        try:
            saving = _left.pop()
        except IndexError:
            # Not asked before: another save may take the last one.
            return
        saving.give_up()


class _OfThread(threading.local):
    """The save that a thread is at: DCP makes each in one thread, and several at the same time."""

    def __init__(self) -> None:
        self.save: _Save | None = None

    def __reduce__(self) -> tuple[typing.Any, ...]:
        # A copy, for a process that saves, is at none.
        return _OfThread, ()


def _refuse_caching(is_cached: bool) -> None:
    if is_cached:
        raise InvalidRequest(
            "a planner that uses its plans again cannot save here: each checkpoint has files of its"
            " own",
            hint="leave enable_plan_caching=True of the planner out",
        )


class StorageWriter(_StorageWriter):
    """Saves by ``torch.distributed.checkpoint.save`` and ``async_save``, as a checkpoint of a node.

    ``save`` returns when all of it is staged on the disks of the nodes, synced. ``handle`` is then
    the :class:`forebay.checkpoint.Checkpoint`, at the coordinator (rank 0). Any reader of DCP reads
    what is at the origin; ``.metadata`` comes after all data.

    ``async_save`` in a process of its own (``AsyncCheckpointerType.PROCESS``) saves with a copy of
    this writer: ``handle`` stays None, and ``forebay.checkpoint.Checkpoint(client, name)`` is the
    checkpoint. A planner that keeps its plans (``enable_plan_caching=True``) is refused.

    A writer may be at several saves at the same time, as an ``async_save`` that begins before the
    future of the last one is done, each under a ``checkpoint_id`` of its own. (Where several ranks
    save, give each of these saves a ``process_group``: they would mix up what they tell each
    other.) ``handle`` is the one that was saved last.

    Args:
        path: The checkpoint's name, as in ``"s3://bucket/run/step-100"``; ``checkpoint_id`` of
            ``save`` replaces it.
        client: The node of this rank; by default the one of ``FOREBAY_NODE``. Ranks on several
            machines may use the node of their machine: each node sends what it has, and the
            checkpoint becomes visible when all of it is there.
        threads: Files of this rank that are written at the same time.
        overwrite: Whether it may replace a checkpoint of its name.
        deadline: Seconds within which it is to be durable. None: as the node's
            ``checkpoints.deadline`` says. 0: whenever.
        meta: JSON that readers of the manifest are told; at most 64 KiB.
        retry_for: Seconds for which a save goes on while a node cannot be reached, does not answer,
            is over its limits, or is started again. A file that the node did not take is written
            again (a rank that saves alone, and ranks at other nodes than that of rank 0, write all
            of theirs).
            What it had taken, it still has when it is started again. If several ranks save and the
            machine of rank 0's node loses power before the commit, what it had taken may be lost:
            the save fails, and nothing of it is visible. Save again then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        client: Client | None = None,
        threads: int = 2,
        overwrite: bool = True,
        deadline: float | None = None,
        meta: dict[str, typing.Any] | None = None,
        retry_for: float = 0.0,
    ) -> None:
        super().__init__()
        most = whole_number(threads)
        if most is None or most < 1:
            raise InvalidRequest(f"threads={threads!r}: give a whole number of at least 1")
        self.path = None if path is None else os.fspath(path)
        if self.path is not None:
            _wire.split(self.path)
        self.client = client_of(client)
        self.threads, self.overwrite = most, flag("overwrite", overwrite)
        self.deadline, self.meta = deadline, meta
        self.retry_for = retry_for
        self._told()
        #: What was saved last, at the coordinator.
        self.handle: _wire.Checkpoint | None = None
        self._of_thread = _OfThread()

    def _told(self) -> tuple[dict[str, typing.Any], float | None]:
        """What the commit says beside the files."""
        self.retry_for = _wire.checked_patience(self.retry_for)
        return _wire.checked_meta("dcp", self.meta), _wire.checked_deadline(self.deadline)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        path = self.path
        if checkpoint_id is not None:
            path = os.fspath(checkpoint_id)
            _wire.split(path)
            # Another save may replace it at once.
            self.path = path
        # One that failed before its end.
        if self._of_thread.save is not None:
            self._of_thread.save.give_up()
        self._of_thread.save = _Save(path)

    @property
    def _save(self) -> _Save:
        """The save that this thread is at."""
        if self._of_thread.save is None:
            self.reset()
        save = self._of_thread.save
        assert save is not None
        return save

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: typing.Any, **kwargs: typing.Any
    ) -> None:
        if self._save.path is None:
            raise InvalidRequest(
                "the checkpoint has no name", hint="StorageWriter(path), or checkpoint_id= of save"
            )
        if kwargs.get("use_collectives") is False:
            raise InvalidRequest("saving without collectives is not offered by this writer")
        # They may have been changed since the last save.
        self._told()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self._node())

    def _node(self) -> str:
        """The node that this rank writes to, since its last start."""

        def ask() -> str:
            return _node.identity(self.client)

        return _wire.again(f"saving {self._save.name}", ask, self.retry_for)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _refuse_caching(not all(getattr(plan, "usable", True) for plan in plans))
        _give_up_left()
        # What several nodes take is not known here.
        size = sum(_bytes_of(plan) for plan in plans)
        here = self._node()
        same = all(plan.storage_data == here for plan in plans)
        save = self._save
        # The last save failed before its end, which only other ranks may have been told.
        save.give_up()
        save.saving = _wire.Saving(
            self.client,
            save.name,
            overwrite=self.overwrite,
            size=size if same else None,
            retry_for=self.retry_for,
        )
        id, alone = save.saving.begin().id, len(plans) == 1
        return [
            dataclasses.replace(
                plan, storage_data=_Where(id, rank, here, plan.storage_data != here, alone)
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        where: _Where = plan.storage_data
        if where.alone and self._save.saving is not None:
            # Whether or not its node was started again meanwhile.
            results = self._write_all(self._save.saving, where, plan, planner)
        elif where.elsewhere and self._node() != where.coordinator:
            results = self._write_part(where, plan, planner)
        else:
            # If the coordinator's node does not know the id any more, a part would go to the origin
            # all the same, and nobody would remove it there.
            writing = _wire.Writing.joined(self.client, self._save.name, where.id)
            try:
                results = self._write(writing, where, plan, planner, False, self.retry_for)
            except BaseException:
                # The coordinator is not told before all ranks have ended, and then not here.
                writing.abandon()
                raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_part(self, where: _Where, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Files at another node than the coordinator's."""
        results: list[WriteResult] = []

        def write(writing: _wire.Writing) -> None:
            results[:] = self._write(writing, where, plan, planner, True)

        saving = _wire.Saving(
            self.client,
            self._save.name,
            write,
            overwrite=True,
            size=None,
            retry_for=self.retry_for,
            of=where.id,
            part=f"r{where.rank}",
        )
        saving.write()
        if saving.writing is not None and saving.writing.files:
            saving.commit()
        else:
            saving.give_up()
        return results

    def _write_all(
        self, saving: _wire.Saving, where: _Where, plan: SavePlan, planner: SavePlanner
    ) -> list[WriteResult]:
        """All files of a rank that is alone, which may have to be written once more at the end."""

        save = self._save

        def write(writing: _wire.Writing) -> None:
            save.results = self._write(writing, where, plan, planner, False)

        saving.write_files = write
        try:
            saving.write()
        except BaseException:
            save.saving = None
            raise
        assert save.results is not None
        return save.results

    def _write(
        self,
        writing: _wire.Writing,
        where: _Where,
        plan: SavePlan,
        planner: SavePlanner,
        elsewhere: bool,
        retry_for: float = 0.0,
    ) -> list[WriteResult]:
        # `retry_for` is for each file. Callers that begin the whole anew leave it at 0.
        _refuse_caching(getattr(planner, "_enable_plan_caching", False))
        what = f"saving {self._save.name}"
        files = _files_of(plan.items, self.threads)
        work: queue.Queue[tuple[str, list[WriteItem]]] = queue.Queue()
        for n, items in enumerate(files):
            work.put((f"__{where.rank}_{n}.distcp", items))
        results: list[WriteResult] = []
        failures: list[BaseException] = []
        # Failures after which a file is written again, and whether that is to end.
        passed: list[Error] = []
        stop = Stop()
        lock = threading.Lock()

        def run() -> None:
            while not failures:
                try:
                    name, items = work.get_nowait()
                except queue.Empty:
                    return
                write = functools.partial(_write_file, writing, name, items, planner, elsewhere)
                try:
                    written = _wire.again(what, write, retry_for, passed, stop)
                except BaseException as e:
                    failures.append(e)
                    stop.set()
                    return
                with lock:
                    results.extend(written)

        def run_beside(ended: Begun[None]) -> None:
            try:
                run()
            finally:
                ended.set_result(None)

        # Not by `join`: once that was interrupted, it takes a thread that goes on for ended.
        others: list[Begun[None]] = []
        try:
            for _ in range(min(self.threads, len(files)) - 1):
                ended: Begun[None] = Begun()
                name = "forebay-save"
                threading.Thread(target=run_beside, args=(ended,), name=name).start()
                others.append(ended)
            run()
            wait(others)
        except BaseException as e:
            # Ctrl-C, most of all: the others end with the request that they are at.
            failures.append(e)
            stop.set()
            wait(others)
            raise
        if failures:
            raise failures[0]
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._save
        saving = save.saving
        assert saving is not None
        elsewhere: dict[str, int] = {}

        def end(writing: _wire.Writing) -> None:
            """Writes ``.metadata``, when all other files are there."""
            storage_data: dict[typing.Any, typing.Any] = {}
            written = results if save.results is None else [save.results]
            for result in (result for of_rank in written for result in of_rank):
                info = result.storage_data
                name, size = info.forebay["file"], info.forebay["file_bytes"]
                if info.forebay["elsewhere"]:
                    elsewhere[name] = size
                else:
                    writing.add(name, size)
                storage_data[result.index] = info
            metadata.version = "1.0.0"
            metadata.storage_data = storage_data
            metadata.storage_meta = self.storage_meta()
            writing.put(_METADATA, [pickle.dumps(metadata)])

        try:
            meta, deadline = self._told()
            self.handle = saving.commit(
                end=end, last=[_METADATA], elsewhere=elsewhere, meta=meta, deadline=deadline
            )
        except BaseException:
            saving.give_up()
            raise
        finally:
            save.saving = save.results = None

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._save.path, save_id=self._save.id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            _wire.split(os.fspath(checkpoint_id))
        except InvalidRequest:
            return False
        return True


def _at_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of this machine: the copy from a GPU is several times as fast into
    page-locked memory.
    """
    if tensor.device.type != "cuda" or tensor.nbytes > _PINNED_BYTES:
        return tensor.to("cpu")
    try:
        # With the same strides: what is put in another order is so at the host.
        found = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:
        # No more memory can be locked.
        return tensor.to("cpu")
    return found.copy_(tensor)


def _landing(shape: Sequence[int], dtype: torch.dtype, target: torch.Tensor) -> torch.Tensor:
    """Memory for what goes to ``target`` from there."""
    if target.device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError:
            pass
    return torch.empty(shape, dtype=dtype)


class _Noting(io.RawIOBase):
    """Passes on what ``torch.save`` writes, and notes where the tensor's own bytes begin."""

    def __init__(self, file: _wire.Outgoing, nbytes: int) -> None:
        self._file, self._nbytes = file, nbytes
        self.data_at: int | None = None

    def write(self, data: typing.Any) -> int:
        if self.data_at is None and memoryview(data).nbytes == self._nbytes:
            self.data_at = self._file.tell()
        return self._file.write(data)


def _write_file(
    writing: _wire.Writing,
    name: str,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    elsewhere: bool,
) -> list[WriteResult]:
    found = []
    with writing.file(name) as file:
        for item in items:
            data = planner.resolve_data(item)
            if gap := -file.tell() % ALIGNED_BYTES:
                file.write(bytes(gap))
            at = file.tell()
            about: dict[str, typing.Any] = {"file": name, "elsewhere": elsewhere}
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                file.write(data.getbuffer())
            else:
                assert isinstance(data, torch.Tensor)
                # A reader takes the bytes, and not what a view does to them.
                tensor = _at_host(data.detach()).resolve_conj().resolve_neg().contiguous()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()
                noting = _Noting(file, tensor.nbytes)
                torch.save(tensor, typing.cast(typing.IO[bytes], noting))
                if tensor.nbytes >= DIRECT_BYTES and noting.data_at is not None:
                    about["data"] = (noting.data_at, tuple(tensor.shape), tensor.dtype)
            length = file.tell() - at
            info = _StorageInfo(f"{writing.id}/{name}", at, length)
            # For readers of this module alone; others do not look at it.
            info.forebay = about
            found.append(WriteResult(item.index, length, info))
    for result in found:
        result.storage_data.forebay["file_bytes"] = writing.files[name]
    return found


class StorageReader(_StorageReader):
    """Loads by ``torch.distributed.checkpoint.load``, at any world size.

    What is on the node's disk is read from there; the rest through its cache, so that all ranks
    together read each byte from the origin once. Ranges go straight into the tensors' memory, many
    at the same time. Checkpoints of other writers of DCP (``.metadata``, or that of each rank, and
    its files under one prefix) are read too.

    Args:
        path: The checkpoint's name; ``checkpoint_id`` of ``load`` replaces it.
        client: The node of this rank; by default the one of ``FOREBAY_NODE``.
        durable: Only what the origin has. By default, what is staged at the node counts too.
        retry_for: Seconds for which each request is made again while the node cannot be reached,
            does not answer, or is over its limits, as when it is started again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        client: Client | None = None,
        durable: bool = False,
        retry_for: float = 0.0,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.client = client_of(client)
        self.durable = flag("durable", durable)
        self.retry_for = _wire.checked_patience(retry_for)
        self._reading: _wire.Reading | None = None
        #: Why the metadata of all ranks could not be read, where not because there are none.
        self._failure: Error | None = None
        self._metadata: Metadata | None = None
        #: Whether the origin may be asked while what is here is read, since ``read_data`` follows.
        self._is_load = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self._reading, self._failure, self._metadata = None, None, None
        self._is_load = True

    def read_metadata(self, *args: typing.Any, **kwargs: typing.Any) -> Metadata:
        """What the checkpoint has, the first step of a load. At first, it is that of the checkpoint
        on the node's disk, if there is one, though another may have taken its place at the origin:
        what ``load`` loads is the origin's. Called again before a load ends, it waits for the
        origin."""
        if self.path is None:
            raise InvalidRequest(
                "the checkpoint has no name", hint="StorageReader(path), or checkpoint_id= of load"
            )
        # DCP asks for the metadata of one rank where it did not get that of all. Only a checkpoint
        # that each rank saved by itself has it. With anything else in its place, DCP would load at
        # this rank alone, and the other ranks would wait for it without end.
        rank = kwargs.get("rank")
        ahead, self._is_load = self._is_load, False
        if rank is not None:
            if self._failure is not None:
                # A node that does not answer was waited for already.
                raise self._failure
            file = f"__{rank}{_METADATA}"
            self._reading = _Foreign(self.client, self.path, self.retry_for, file)
            pickled = self._reading.read(file)
        else:
            self._failure = None
            try:
                self._reading = self._whole(ahead)
                pickled = self._reading.read(_METADATA)
            except NotFound:
                raise
            except Error as e:
                self._failure = e
                raise
        metadata = pickle.loads(pickled)
        # Nobody else reads it, and whether the rest is read is not known yet.
        self._reading.give_back()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return typing.cast(Metadata, metadata)

    def _open(self, **how: typing.Any) -> _wire.Reading:
        assert self.path is not None
        return _wire.Reading(
            self.client,
            self.path,
            durable=self.durable,
            retry_for=self.retry_for,
            first=_METADATA,
            **how,
        )

    def _whole(self, ahead: bool) -> _wire.Reading:
        """A checkpoint that all ranks saved together."""
        assert self.path is not None
        try:
            reading = self._open(ahead=ahead)
            if reading.question is not None and _METADATA not in reading.sizes:
                # One that has it may have taken its place.
                reading.close()
                reading = self._open()
        except NotFound as e:
            try:
                return _Foreign(self.client, self.path, self.retry_for, _METADATA)
            except NotFound:
                raise e from None
        if _METADATA not in reading.sizes:
            raise InvalidRequest(
                f"{self.path} was not saved by torch.distributed.checkpoint",
                hint="forebay.checkpoint.load() reads what forebay.checkpoint.save() saved",
            )
        return reading

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: typing.Any, **kwargs: typing.Any
    ) -> None:
        self._metadata = metadata
        if self._reading is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._reading is not None
        return dataclasses.replace(plan, storage_data=self._reading.question)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        reading = self._reading
        assert reading is not None
        alone = len(plans) == 1
        which = _Which(reading.id, reading.question, alone)
        # The ranks at this node hear the same answer later. Others are told now.
        asked = [plan.storage_data for plan in plans]
        if which.question is not None and any(
            _node_of(q) != _node_of(which.question) for q in asked
        ):
            id = reading.answer(shared=False)
            if id is None:
                raise reading.gone()
            which = _Which(id, None, alone)
        return [dataclasses.replace(plan, storage_data=which) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._reading is not None
        which, items = plan.storage_data, plan.items
        by: str | None = None
        try:
            if not isinstance(which, _Which):
                raise InvalidRequest(
                    f"{self.path}: this rank was not told which checkpoint it is to load: the"
                    " planner left out the storage_data of its plan, or the release of Forebay is"
                    " not that of rank 0",
                    hint="dataclasses.replace(plan, items=...) keeps it",
                )
            if which.id != self._reading.id:
                # What was asked is right: rank 0 has one that the origin does not have.
                if not self._reading.is_ahead:
                    raise self._differs(self._reading.id, which.id)
                items = self._go_over_to(which.id, items)
            # That of rank 0, and not what was asked for this one.
            self._reading.go_by(which.question, shared=not which.alone)
            try:
                self._read(items, planner)
            except _wire.Replaced as e:
                if e.by is None:
                    raise
                # All ranks are told this.
                _wire.log.info("%s: it is loaded anew", e.message)
                by = e.by
            # Out here, where what was read before is let go of with the failure.
            if by is not None:
                items = self._go_over_to(by, items)
                self._read(items, planner)
        finally:
            self._reading.close()
            self._is_load = True
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _go_over_to(self, id: str, items: list[ReadItem]) -> list[ReadItem]:
        """Reads another checkpoint of the name from now on, and gives what is to be read of it."""
        former, mine = self._reading, self._metadata
        assert former is not None and mine is not None
        former.close()
        theirs: Metadata | None = None
        try:
            # What another writer wrote has no id, and took the place of this one.
            if not id:
                raise NotFound(f"{self.path}: the checkpoint {former.id} is not there any more")
            self._reading = self._open(id=id)
            if _METADATA in self._reading.sizes:
                theirs = pickle.loads(self._reading.read(_METADATA))
        except NotFound as e:
            raise self._differs(former.id, id) from e
        if theirs is None or not _is_like(mine, theirs):
            raise Conflict(
                f"{self.path}: the checkpoint {former.id} was replaced by {id}, which has other"
                " tensors, while it was being read",
                hint="load it again; a name of its own for each checkpoint is never replaced",
            )
        self._metadata = theirs
        return [each for item in items for each in _moved(item, theirs)]

    def _differs(self, mine: str, that_of_rank_0: str) -> Conflict:
        other = "that of another writer"
        return Conflict(
            f"{self.path} is the checkpoint {mine or other} at this rank's node, and"
            f" {that_of_rank_0 or other} at that of rank 0: one is not at the origin yet, or was"
            " replaced meanwhile",
            hint="wait until it is durable, or give StorageReader(durable=True) at every rank",
        )

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        reading = self._reading
        assert reading is not None
        batch = _Batch(reading)
        try:
            self._read_into(batch, reading, items, planner)
        except Error as e:
            batch.give_up()
            # The files of one that was replaced may go while they are read. A node that cannot be
            # reached was waited for already.
            if not isinstance(e, ConnectionFailed):
                reading.settle()
            raise
        finally:
            # Only after a failure is anything left.
            batch.give_up()

    def _read_into(
        self,
        batch: _Batch,
        reading: _wire.Reading,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        assert self._metadata is not None
        storage = self._metadata.storage_data
        small: list[tuple[str, int, int, typing.Callable[[memoryview], None]]] = []
        for item in items:
            info = storage.get(item.storage_index)
            if info is None:
                raise self._not_planned(item)
            file = reading.file_of(info.relative_path)
            data = getattr(info, "forebay", {}).get("data")
            # PyTorch before 2.7 does not know of them.
            if extensions := getattr(info, "transform_descriptors", None):
                raise InvalidRequest(
                    f"{self.path}: {item.storage_index} went through extensions of DCP"
                    f" ({', '.join(extensions)}), which this reader does not have"
                )
            if data is None:
                small.append((file, info.offset, info.length, _whole(item, planner)))
                continue
            start, shape, dtype = data
            ends = zip(item.storage_offsets, item.lengths, shape, strict=True)
            if any(offset + length > size for offset, length, size in ends):
                raise self._not_planned(item)
            target = planner.resolve_tensor(item).detach()
            first = _run_of(shape, item.storage_offsets, item.lengths)
            direct = target.device.type == "cpu" and target.is_contiguous()
            direct = direct and not (target.is_conj() or target.is_neg())
            direct = direct and target.dtype == dtype and target.size() == item.lengths
            if direct and first is not None:
                batch.add(file, start + first * dtype.itemsize, memory_of(target))
            else:
                most = _SLAB_BYTES // dtype.itemsize
                for slab in _slabs(shape, item.storage_offsets, item.lengths, most):
                    stored = _landing(slab.shape, dtype, target)
                    at = start + slab.first * dtype.itemsize
                    batch.hold(file, at, memory_of(stored), slab.copier(stored, target))
            batch.then(functools.partial(planner.commit_tensor, item, target))
        # Small ones that lie next to each other, or within another one, are read together.
        small.sort(key=lambda each: each[:2])
        groups: list[tuple[str, int, int, list[tuple[int, int, typing.Any]]]] = []
        for file, at, length, use in small:
            if groups:
                last, begin, end, members = groups[-1]
                is_near = at - end < 1 << 20 and at + length - begin <= _TOGETHER_BYTES
                if last == file and (at + length <= end or is_near):
                    members.append((at, length, use))
                    groups[-1] = (file, begin, max(end, at + length), members)
                    continue
            groups.append((file, at, at + length, [(at, length, use)]))
        for file, begin, end, members in groups:
            held = memoryview(bytearray(end - begin))
            batch.hold(file, begin, held, functools.partial(_use, held, begin, members))
        batch.finish()

    def _not_planned(self, item: ReadItem) -> Conflict:
        """A planner gave this rank what another one had planned for a checkpoint that is cut
        otherwise."""
        return Conflict(
            f"{self.path}: the plan has a part of {item.storage_index.fqn} that this checkpoint"
            " does not have: it was made for another one of the name",
            hint="load it again",
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return StorageWriter.validate_checkpoint_id(checkpoint_id)


class _Batch:
    """Ranges that are read at the same time, and what is done with each when it is there, in order:
    while one is copied to where it belongs, the next are read. So many are begun as memory of their
    own may be held for.
    """

    def __init__(self, reading: _wire.Reading) -> None:
        self._reading = reading
        #: What was begun, the bytes that are held for it, and what is done then.
        self._begun: deque[tuple[list[Begun[None]], int, typing.Callable[[], None] | None]]
        self._begun = deque()
        self._held = 0
        #: What the first one that failed raised.
        self._failure: BaseException | None = None

    def add(self, file: str, start: int, target: memoryview) -> None:
        """A range into memory that is there already."""
        self._begun.append((self._begin(file, start, target), 0, None))

    def hold(self, file: str, start: int, held: memoryview, use: typing.Callable[[], None]) -> None:
        """A range into memory of its own, which ``use`` is done with."""
        while self._held and self._held + held.nbytes > _HELD_BYTES:
            self._finish_one()
        self._held += held.nbytes
        self._begun.append((self._begin(file, start, held), held.nbytes, use))

    def _begin(self, file: str, start: int, target: memoryview) -> list[Begun[None]]:
        begun = self._reading.begin(file, start, target)
        for future in begun:
            future.add_done_callback(self._look)
        return begun

    def _look(self, done: Begun[None]) -> None:
        """After a failure, those before it are not asked for again either."""
        failure = None if done.cancelled() else done.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
            self._reading.stop.set()

    def then(self, use: typing.Callable[[], None]) -> None:
        """What is done when everything before it is there."""
        self._begun.append(([], 0, use))

    def finish(self) -> None:
        self._reading.borrow_ahead()
        while self._begun:
            self._finish_one()
        self._reading.settle()

    def _finish_one(self) -> None:
        begun, held, use = self._begun.popleft()
        try:
            _wire.finish(begun, self._reading.stop)
        except Error as e:
            if self._failure is None or self._failure is e:
                raise
            # It was not asked for again because that one had failed.
            raise self._failure from e
        if use is not None:
            # The planner only gets what is of the right checkpoint.
            self._reading.settle()
            use()
        self._held -= held

    def give_up(self) -> None:
        """Waits until no memory is written to any more."""
        left = [future for futures, _, _ in self._begun for future in futures]
        self._begun.clear()
        if left:
            self._reading.stop.set()
        for future in left:
            future.cancel()
        wait(left)


class _Foreign(_wire.Reading):
    """A checkpoint of another writer: objects under a prefix, the metadata among them."""

    def __init__(self, client: Client, name: str, retry_for: float, metadata: str) -> None:
        bucket, prefix = _wire.split(name)

        def look() -> int:
            return client.head(f"{bucket}/{prefix}/{metadata}").size

        size = _wire.again(f"loading {name}", look, retry_for)
        self.open(client, name, {metadata: size}, retry_for)
        self.id = ""

    def path(self, file: str) -> str:
        bucket, prefix = self.place
        return _wire.object_path(bucket, f"{prefix}/{file}")

    def check_current(self) -> None:
        """Nothing tells it from another one."""

    def file_of(self, relative_path: str) -> str:
        return relative_path

    def lends(self, file: str) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class _Which:
    """What rank 0 tells all ranks: which checkpoint they load, and the question to the origin whose
    answer they go by, if it was not there yet."""

    id: str
    question: str | None
    #: Whether there are no other ranks.
    alone: bool


def _node_of(question: object) -> str | None:
    return question.partition("-")[0] if isinstance(question, str) else None


def _is_like(mine: Metadata, theirs: Metadata) -> bool:
    """Whether a plan for one checkpoint is one for the other too, but for where the bytes are."""

    def kind_of(meta: Metadata) -> dict[str, typing.Any]:
        return {
            name: (tuple(each.size), each.properties.dtype)
            if isinstance(each, TensorStorageMetadata)
            else None
            for name, each in meta.state_dict_metadata.items()
        }

    return kind_of(mine) == kind_of(theirs) and bool(mine.planner_data == theirs.planner_data)


def _moved(item: ReadItem, to: Metadata) -> list[ReadItem]:
    """What is to be read of another checkpoint in place of an item: it may have cut its tensors
    otherwise."""
    index = item.storage_index
    stored = to.state_dict_metadata[index.fqn]
    if not isinstance(stored, TensorStorageMetadata) or index.offset is None:
        return [item]
    at = zip(index.offset, item.storage_offsets, strict=True)
    wanted = ChunkStorageMetadata(
        offsets=torch.Size(a + b for a, b in at), sizes=torch.Size(item.lengths)
    )
    found = create_read_items_for_chunk_list(index.fqn, stored, [wanted])
    if sum(math.prod(each.lengths) for each in found) != math.prod(wanted.sizes):
        raise Conflict(f"{index.fqn}: the checkpoint that took the place of another lacks a part")
    return [
        dataclasses.replace(
            each,
            type=item.type,
            dest_index=item.dest_index,
            dest_offsets=torch.Size(
                a + b for a, b in zip(item.dest_offsets, each.dest_offsets, strict=True)
            ),
        )
        for each in found
    ]


def _run_of(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """The number of the first element of a part of a tensor, if the part is one run of elements."""
    at, stride, whole = 0, 1, True
    for size, offset, length in zip(
        reversed(tuple(shape)), reversed(tuple(offsets)), reversed(tuple(lengths)), strict=True
    ):
        if not whole and length != 1:
            return None
        whole = whole and length == size
        at += offset * stride
        stride *= size
    return at


@dataclasses.dataclass(frozen=True)
class _Slab:
    """Some elements that follow each other in a stored tensor, and where they go to."""

    #: The number of the first element in the stored tensor, and the shape of what follows it.
    first: int
    shape: tuple[int, ...]
    #: Of each dimension of ``shape``, what is wanted.
    wanted: tuple[tuple[int, int], ...]
    #: Of each dimension of the target, which part this is.
    part: tuple[tuple[int, int], ...]

    def copier(self, stored: torch.Tensor, target: torch.Tensor) -> typing.Callable[[], None]:
        def copy() -> None:
            mine = target
            for dim, (begin, count) in enumerate(self.part):
                mine = mine.narrow(dim, begin, count)
            theirs = stored
            for dim, (begin, count) in enumerate(self.wanted):
                theirs = theirs.narrow(dim, begin, count)
            mine.copy_(theirs.reshape(mine.shape))

        return copy


def _slabs(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], most: int
) -> Iterator[_Slab]:
    """A part of a stored tensor as slabs of at most ``most`` elements, as far as one element of the
    last dimensions can be so small.
    """
    if 0 in lengths:
        return
    strides = [1]
    for size in reversed(tuple(shape)[1:]):
        strides.insert(0, strides[0] * size)

    def of(dim: int, first: int, part: tuple[tuple[int, int], ...]) -> Iterator[_Slab]:
        """Those of one index of each dimension before ``dim``."""
        if dim == len(shape):
            yield _Slab(first, (1,), ((0, 1),), part)
            return
        offset, length, stride = offsets[dim], lengths[dim], strides[dim]
        first += offset * stride
        if (length == 1 or stride > most) and stride > 1:
            for i in range(length):
                yield from of(dim + 1, first + i * stride, (*part, (i, 1)))
            return
        rest = [(o, n) for o, n in zip(offsets[dim + 1 :], lengths[dim + 1 :], strict=True)]
        whole = tuple((0, n) for _, n in rest)
        each = max(1, most // stride)
        for begin in range(0, length, each):
            count = min(each, length - begin)
            yield _Slab(
                first + begin * stride,
                (count, *shape[dim + 1 :]),
                ((0, count), *rest),
                (*part, (begin, count), *whole),
            )

    yield from of(0, 0, ())


def _use(held: memoryview, begin: int, members: Sequence[tuple[int, int, typing.Any]]) -> None:
    for at, length, use in members:
        use(held[at - begin : at - begin + length])


def _whole(item: ReadItem, planner: LoadPlanner) -> typing.Callable[[memoryview], None]:
    def run(data: memoryview) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data))
            return
        stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        target = planner.resolve_tensor(item).detach()
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            stored = stored.narrow(dim, offset, length)
        target.copy_(stored)
        planner.commit_tensor(item, target)

    return run
