"""Batches of DataLoader's workers through shared memory that is used again: what is delivered, what
is bounded, and what is left when processes die.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections import namedtuple
from pathlib import Path

import forebay
import numpy as np
import pytest
import torch
from forebay._forebay import Ring
from forebay.torch import BatchRing, DataLoader, IterableDataset, MapDataset
from scripted_node import ScriptedNode, chunked, tar_of
from torch.utils.data import Subset

SIZE, COUNT, BATCH = 3000, 96, 8
NAMES = [f"ring/{i:03}" for i in range(COUNT)]
VARIED = [f"img/{i:04}.bin" for i in range(64)]
Pair = namedtuple("Pair", "data label")


@pytest.fixture(scope="module", autouse=True)
def equal_objects(client) -> list[bytes]:
    """Objects of one size."""
    content = [np.random.default_rng(i).bytes(SIZE) for i in range(COUNT)]
    for name, data in zip(NAMES, content, strict=True):
        client.put(f"scratch/{name}", data)
    return content


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def start_method(request) -> str:
    return request.param


def rows(tensor: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in tensor]


def settled(ring: BatchRing) -> dict[str, int]:
    """The ring's numbers once nothing holds a slot any more."""
    deadline = time.monotonic() + 60
    while (stats := ring.stats())["free"] < ring.core.slots and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return stats


def halves(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: SIZE // 2].float()


def as_pair(samples):
    return Pair(
        torch.stack([s[0] for s in samples]),
        {"label": torch.tensor([s[1] for s in samples]), "names": ["x"] * len(samples)},
    )


def list_of(samples):
    return list(samples)


def numbers(samples):
    return (
        [int(s.sum()) for s in samples],
        torch.ones(3, 2, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.eye(3, dtype=torch.bool).T,
    )


def test_batches_arrive_as_one_tensor(client, equal_objects, start_method):
    data = MapDataset(client, NAMES, bucket="scratch", labels=range(COUNT))
    loader = DataLoader(
        data, BATCH, num_workers=2, multiprocessing_context=start_method, persistent_workers=True
    )
    for epoch in (1, 2):
        seen = []
        for tensor, labels in loader:
            assert (
                type(tensor) is torch.Tensor
                and tensor.shape == (BATCH, SIZE)
                and tensor.is_contiguous()
                and labels.dtype == torch.int64
            )
            assert rows(tensor) == [equal_objects[i] for i in labels.tolist()]
            tensor.zero_()  # the memory is the loop's own
            seen += labels.tolist()
        assert seen == list(range(COUNT))
        assert loader.ring.stats()["sent"] == epoch * COUNT // BATCH
    assert data.ring is None, "the caller's dataset is as it was"
    del tensor, labels
    stats = settled(loader.ring)
    assert (stats["none_free"], stats["too_large"], stats["reclaimed"], stats["free"]) == (
        0,
        0,
        0,
        8,
    )


def test_batches_are_received_into_the_slot(client, equal_objects, monkeypatch):
    """The copy that collating would make is not made: the tensor begins where the slot begins."""
    ring = BatchRing(4)
    data = MapDataset(client, NAMES, bucket="scratch", ring=ring)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: True)
    filled = data.__getitems__([3, 1, 2])
    assert isinstance(filled, list) and rows(filled.matrix) == [equal_objects[i] for i in (3, 1, 2)]
    tensor = pickle.loads(pickle.dumps(ring.collate(filled)))
    assert tensor.data_ptr() == filled.matrix.data_ptr() and ring.stats()["held"] == 1
    del filled
    gc.collect()
    assert ring.stats()["held"] == 1
    del tensor
    assert settled(ring)["free"] == 4


def test_the_stock_dataloader_with_the_rings_collate(client, equal_objects):
    ring = BatchRing(8)
    data = MapDataset(client, NAMES, bucket="scratch", ring=ring)
    loader = torch.utils.data.DataLoader(
        data, BATCH, num_workers=2, multiprocessing_context="fork", collate_fn=ring.collate
    )
    assert [r for t in loader for r in rows(t)] == equal_objects
    assert ring.stats()["sent"] == COUNT // BATCH
    # Without the ring's collate_fn the batches are right as well, and the slots come back.
    loader = torch.utils.data.DataLoader(data, BATCH, num_workers=2, multiprocessing_context="fork")
    assert [r for t in loader for r in rows(t)] == equal_objects
    assert ring.stats()["sent"] == COUNT // BATCH and settled(ring)["free"] == 8


def test_other_samples_and_collate_functions(client, objects, equal_objects):
    how = {"num_workers": 2, "multiprocessing_context": "fork"}
    data = MapDataset(client, NAMES, bucket="scratch", transform=halves)
    loader = DataLoader(data, BATCH, **how)
    got = [r.clone() for t in loader for r in t]
    assert all(
        r.dtype == torch.float32 and r.byte().numpy().tobytes() == c[: SIZE // 2]
        for r, c in zip(got, equal_objects, strict=True)
    )
    assert loader.ring.stats()["sent"] == COUNT // BATCH

    loader = DataLoader(
        MapDataset(client, NAMES, bucket="scratch", labels=range(COUNT)),
        BATCH,
        collate_fn=as_pair,
        **how,
    )
    for batch in loader:
        assert type(batch) is Pair and batch.label["names"] == ["x"] * BATCH
        assert rows(batch.data) == [equal_objects[i] for i in batch.label["label"].tolist()]
    assert loader.ring.stats()["sent"] == COUNT // BATCH

    loader = DataLoader(
        Subset(MapDataset(client, VARIED, bucket="train"), range(40)),
        BATCH,
        collate_fn=list_of,
        **how,
    )
    assert [s.numpy().tobytes() for batch in loader for s in batch] == [
        objects[n] for n in VARIED[:40]
    ]
    assert loader.ring.stats()["sent"] == 5

    loader = DataLoader(
        MapDataset(client, VARIED, bucket="train"), BATCH, collate_fn=numbers, **how
    )
    sums = []
    for some, ones, none, eye in loader:
        sums += some
        assert (
            ones.dtype == torch.float64
            and ones.tolist() == [[1, 1]] * 3
            and none.shape == (0, 4)
            and eye.tolist() == torch.eye(3).bool().tolist()
        )
    assert sums == [sum(objects[n]) for n in VARIED]


def test_iterable_datasets_collate_into_the_ring(client, equal_objects):
    data = IterableDataset(client, NAMES, bucket="scratch", labels=range(COUNT), request_size=16)
    loader = DataLoader(data, BATCH, num_workers=2, multiprocessing_context="fork", pin_memory=True)
    seen = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")  # no accelerator here
        for tensor, labels in loader:
            seen |= dict(zip(labels.tolist(), rows(tensor), strict=True))
    assert [seen[i] for i in range(COUNT)] == equal_objects and loader.ring.stats()[
        "sent"
    ] == COUNT // BATCH


def own_batches(batch):
    return {"data": torch.stack(batch)}


class Batches(torch.utils.data.IterableDataset):
    """Makes its batches itself."""

    def __init__(self, data: MapDataset) -> None:
        self.data = data

    def __iter__(self):
        for at in range(0, COUNT, BATCH):
            yield own_batches(self.data.__getitems__(range(at, at + BATCH)))


def test_datasets_that_make_their_batches(client, equal_objects):
    loader = DataLoader(
        Batches(MapDataset(client, NAMES, bucket="scratch")),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert [r for batch in loader for r in rows(batch["data"])] == equal_objects
    assert loader.ring.stats()["sent"] == COUNT // BATCH


def test_without_workers_there_is_no_ring(client, equal_objects):
    data = MapDataset(client, NAMES, bucket="scratch")
    loader = DataLoader(data, BATCH)
    assert loader.ring is None and [r for t in loader for r in rows(t)] == equal_objects
    assert DataLoader(data, BATCH, num_workers=1, ring_bytes=0).ring is None


def test_batches_that_are_kept_go_beyond_the_ring(client, equal_objects):
    loader = DataLoader(
        MapDataset(client, NAMES, bucket="scratch"),
        BATCH,
        num_workers=2,
        multiprocessing_context="fork",
        prefetch_factor=2,
    )
    kept = list(loader)
    assert [r for t in kept for r in rows(t)] == equal_objects
    stats = loader.ring.stats()
    assert stats["held"] == loader.ring.core.slots == 8 and stats["none_free"] > 0
    del kept
    assert settled(loader.ring)["free"] == 8


def test_batches_that_are_too_large_go_beyond_the_ring(client, equal_objects, objects):
    ring_bytes = 8 * 2 * SIZE  # less than a page for each slot: a slot takes one page
    loader = DataLoader(
        MapDataset(client, NAMES, bucket="scratch"),
        BATCH,
        num_workers=2,
        multiprocessing_context="fork",
        ring_bytes=ring_bytes,
    )
    assert loader.ring.slot_bytes < BATCH * SIZE
    assert [r for t in loader for r in rows(t)] == equal_objects
    stats = loader.ring.stats()
    assert stats["sent"] == 0 and stats["too_large"] >= 2 and stats["free"] == 8


def test_errors_reach_the_loop_and_free_their_slots(client):
    loader = DataLoader(
        MapDataset(client, [NAMES[0], "nope"], bucket="scratch"),
        2,
        num_workers=1,
        multiprocessing_context="fork",
    )
    with pytest.raises(forebay.Error):
        list(loader)
    assert settled(loader.ring)["free"] == loader.ring.core.slots
    varied = DataLoader(
        MapDataset(client, VARIED, bucket="train"), 8, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError):  # default_collate wants samples of one size
        list(varied)
    assert settled(varied.ring)["free"] == varied.ring.core.slots


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_is_left_early(client, equal_objects, persistent):
    data = MapDataset(client, NAMES, bucket="scratch")
    loader = DataLoader(
        data, BATCH, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent
    )
    for _ in range(12):
        for tensor in loader:
            assert rows(tensor) == equal_objects[:BATCH]
            break
    del tensor
    assert [r for t in loader for r in rows(t)] == equal_objects
    stats = loader.ring.stats()
    assert stats["none_free"] == 0
    if not persistent:
        assert stats["reclaimed"] > 0, (
            "batches that nobody received are taken back from workers that ended"
        )


def test_two_loops_over_one_loader(client, equal_objects):
    loader = DataLoader(
        MapDataset(client, NAMES, bucket="scratch"),
        BATCH,
        num_workers=1,
        multiprocessing_context="fork",
    )
    for a, b in zip(loader, loader, strict=True):
        assert rows(a) == rows(b)
    assert loader.ring.stats()["sent"] + loader.ring.stats()["none_free"] >= 2 * COUNT // BATCH


class DiesAt:
    """A transform that kills its worker once."""

    def __init__(self, flag: Path, value: bytes) -> None:
        self.flag, self.value = flag, value

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor[:8].numpy().tobytes() == self.value and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return tensor


def test_a_worker_that_is_killed(client, equal_objects, tmp_path):
    dies = DiesAt(tmp_path / "died", equal_objects[40][:8])
    loader = DataLoader(
        MapDataset(client, NAMES, bucket="scratch", transform=dies),
        BATCH,
        num_workers=2,
        multiprocessing_context="fork",
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        for _ in range(2):
            for _ in loader:
                pass
    for _ in range(3):
        assert [r for t in loader for r in rows(t)] == equal_objects
    assert loader.ring.stats()["none_free"] == 0


def test_a_message_about_an_earlier_use_is_refused():
    ring = Ring(1, 4096)
    index, number = ring.take().send()
    assert ring.stats()["on_the_way"] == 1 and ring.take() is None
    slot = ring.receive(index, number)
    for wrong in ((index, number), (index, number + 1), (7, 1)):
        with pytest.raises(forebay.Truncated, match="lost"):
            ring.receive(*wrong)
    with pytest.raises(forebay.InvalidRequest):
        slot.send()
    del slot
    assert ring.take().send() == (index, number + 1)
    with pytest.raises(forebay.Truncated):
        ring.receive(index, number)


def test_a_forked_child_frees_nothing_of_its_parents():
    ring = Ring(2, 4096)
    slot = ring.take()
    memoryview(slot)[:3] = b"abc"
    pid = os.fork()
    if pid == 0:
        del slot
        os._exit(0 if ring.stats()["filling"] == 1 else 1)
    assert (
        os.waitpid(pid, 0)[1] == 0
        and ring.stats()["filling"] == 1
        and bytes(memoryview(slot)[:3]) == b"abc"
    )
    # What a child took before it died is taken back when no other slot is free.
    pid = os.fork()
    if pid == 0:
        taken = ring.take()
        os._exit(0 if taken is not None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ring.take() is not None and ring.stats()["reclaimed"] == 1


def test_wrong_rings():
    for slots, size in ((0, 1), (257, 4096), (1, 0), (256, 1 << 40)):
        with pytest.raises(forebay.InvalidRequest):
            Ring(slots, size)
    with pytest.raises(ValueError):
        BatchRing(0)
    with pytest.raises(RuntimeError):
        pickle.dumps(BatchRing(1))
    with open(__file__, "rb") as file, pytest.raises(forebay.Error):
        Ring.open(os.dup(file.fileno()))
    fd = os.memfd_create("x")
    os.truncate(fd, 8192)
    with pytest.raises(forebay.InvalidRequest):
        Ring.open(fd)


TRAINING = """
    import sys, forebay, torch
    from forebay.torch import DataLoader, MapDataset
    names = sys.argv[2].split(",")
    data = MapDataset(forebay.Client(sys.argv[1]), names * 1000, bucket="scratch")
    for n, batch in enumerate(DataLoader(data, 8, num_workers=2, multiprocessing_context="fork")):
        if n == 20:
            print("going", flush=True)
"""


def processes_of(group: int) -> set[int]:
    """Those of a process group, as far as they live."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                found.add(int(stat.parent.name))
    return found


def shared_by(processes: set[int]) -> list[str]:
    """What they have in the shared memory that all programs of this machine have."""
    names = [f"torch_{process}_" for process in processes]
    return [n for n in os.listdir("/dev/shm") if n.startswith((*names, "forebay"))]


def test_nothing_is_left_of_a_training_that_is_killed(node):
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), node.url, ",".join(NAMES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as training:
        assert training.stdout.readline() == b"going\n"
        group = os.getpgid(training.pid)
        processes = processes_of(group)
        assert len(processes) >= 3 and shared_by(processes) == []
        os.kill(training.pid, signal.SIGKILL)
        training.wait()
        # DataLoader's workers notice that their parent is gone.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("the workers live on")
    assert shared_by(processes) == []


def test_memory_does_not_grow(client):
    """A ring's memory is at most that of its slots, however many batches pass."""
    data = MapDataset(client, NAMES * 8, bucket="scratch")
    loader = DataLoader(
        data, BATCH, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    sizes = []
    for _ in range(3):
        for tensor in loader:
            pass
        sizes.append(os.fstat(loader.ring.core.fileno()).st_blocks * 512)
    del tensor
    # Which slots are used depends on how far each process is.
    assert 0 < max(sizes) <= 4096 + 8 * -(-BATCH * SIZE // 4096) * 4096, sizes


OBJECTS = {f"bucket/k{i:03}": bytes([i]) * (i * 11) for i in range(100)}
WHOLE = tar_of(list(OBJECTS.items()))


@pytest.fixture
def scripted():
    with ScriptedNode(OBJECTS) as node:
        yield node


def received(
    node: ScriptedNode,
    answer: bytes | None = None,
    names=tuple(OBJECTS),
    cut_at: int | None = None,
    room: int = 1 << 20,
):
    """What a slot holds after a batch whose answer is `answer`."""
    if answer is not None:
        node.script.append(lambda http, request: chunked(http, answer, cut_at=cut_at))
    slot = Ring(1, room).take()
    sizes = forebay.Client(node.url).batch_into(list(names), slot)
    return sizes if sizes is None else (sizes, bytes(memoryview(slot)[: sum(sizes)]))


def test_a_slot_holds_the_entries_and_nothing_else(scripted):
    assert received(scripted) == ([len(d) for d in OBJECTS.values()], b"".join(OBJECTS.values()))
    long = "bucket/" + "long/" * 60 + "name"
    scripted.objects[long] = b"of a member with a PAX header"
    assert received(scripted, names=["bucket/k007", long, "bucket/k007"]) == (
        [77, 29, 77],
        b"\7" * 77 + scripted.objects[long] + b"\7" * 77,
    )


def test_a_batch_that_does_not_fit_is_told_from_one_that_fails(scripted):
    assert received(scripted, room=4096) is None
    exactly = {"bucket/page": bytes(4096), "bucket/empty": b"", "bucket/one": b"1"}
    scripted.objects |= exactly
    assert received(scripted, names=["bucket/page", "bucket/empty"], room=4096) == (
        [4096, 0],
        bytes(4096),
    )
    assert received(scripted, names=["bucket/page", "bucket/one"], room=4096) is None


@pytest.mark.parametrize("at", [0, 1, 511, 512, 5000, len(WHOLE) // 2, len(WHOLE) - 1025])
def test_a_cut_batch_is_never_a_tensor(scripted, at):
    with pytest.raises(forebay.Truncated, match="of 100 entries had arrived"):
        received(scripted, WHOLE, cut_at=at)


def test_a_wrong_answer_is_never_a_tensor(scripted):
    members = list(OBJECTS.items())
    damaged = bytearray(WHOLE)
    damaged[515] ^= 0x40
    unended = WHOLE.rstrip(b"\0")
    unended += bytes(-len(unended) % 512)
    absent = tar_of(
        [members[0], ("__404__/bucket/k001", b"")], {"__404__/bucket/k001": "403 from the origin"}
    )
    for answer, kind, words in (
        (tar_of(members[:40]), forebay.Truncated, "40 of 100 entries"),
        (tar_of([*members, members[0]]), forebay.Truncated, "more entries"),
        (tar_of(members[::-1]), forebay.Truncated, "not what was requested"),
        (bytes(damaged), forebay.Truncated, "checksum"),
        (unended, forebay.Truncated, "ended early"),
        (absent, forebay.EntryFailed, "403 from the origin"),
    ):
        with pytest.raises(kind, match=words):
            received(scripted, answer)
    with pytest.raises(forebay.InvalidRequest):
        received(scripted, names=[])
