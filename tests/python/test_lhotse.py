"""Lhotse's `AISBatchLoader` and its AIStore backend, unmodified: a batch that cannot be completed
makes it get the objects one by one, and is never taken for a whole one."""

from __future__ import annotations

import os

import pytest
import tenacity
from aistore.sdk.batch.types import MossOut
from lhotse import CutSet, MonoCut, Recording, serialization
from lhotse.ais.batch_loader import AISBatchLoader, AISBatchLoaderError
from lhotse.audio.source import AudioSource
from lhotse.serialization import AIStoreIOBackend
from servers import Node

RATE = 8000


@pytest.fixture
def data(tmp_path):
    """The directory that is the bucket `audio`."""
    (tmp_path / "audio").mkdir()
    return tmp_path / "audio"


@pytest.fixture
def node(data, tmp_path, monkeypatch):
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{data}"])
    monkeypatch.setenv("AIS_ENDPOINT", node.url)
    # Lhotse keeps its client of AIStore, and with it the address of the previous node.
    serialization.get_aistore_client.cache_clear()
    yield node
    node.stop()


def cuts_of(names: list[str]) -> CutSet:
    """Cuts whose audio is objects with these names; their contents do not matter to the loader."""
    return CutSet.from_cuts(
        MonoCut(
            id=f"{i}-{name}",
            start=0,
            duration=1.0,
            channel=0,
            recording=Recording(
                id=name,
                sources=[AudioSource(type="url", channels=[0], source=f"ais://audio/{name}")],
                sampling_rate=RATE,
                num_samples=RATE,
                duration=1.0,
            ),
        )
        for i, name in enumerate(names)
    ).to_eager()


def contents(cuts: CutSet) -> list[bytes]:
    return [cut.recording.sources[0].source for cut in cuts]


def write(data, name: str, content: bytes) -> bytes:
    beside = data / f".{name}.new"
    beside.write_bytes(content)
    beside.rename(data / name)
    return content


def noise(size: int) -> bytes:
    return os.urandom(size)


def test_a_batch(node, data):
    expect = [write(data, f"{i}.wav", noise(1000 * i)) for i in range(1, 40)]
    names = [f"{i}.wav" for i in range(1, 40)]
    assert contents(AISBatchLoader()(cuts_of(names))) == expect


def test_too_many_missing_before_the_first_byte(node, data, monkeypatch):
    write(data, "0.wav", noise(100))
    names = ["0.wav", *(f"missing-{i}.wav" for i in range(20))]
    # On a busy machine the first bytes may already have been sent: see the next test.
    monkeypatch.setattr(MossOut, "bck", property(lambda out: out.bucket), raising=False)
    # The client requests what is missing again and again, with growing pauses.
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda _: None)
    with pytest.raises(AISBatchLoaderError, match=r"missing-0\.wav"):
        AISBatchLoader()(cuts_of(names))


def test_too_many_missing_after_bytes_were_sent(node, data, monkeypatch):
    """Each is a placeholder, which the loader tries to get by itself: here, where they are written
    meanwhile, it has all of them in the end.

    Its code for that reads a field `bck`, which the client calls `bucket`: it is given that.
    """
    monkeypatch.setattr(MossOut, "bck", property(lambda out: out.bucket), raising=False)
    expect = [write(data, f"{i}.wav", noise(200_000)) for i in range(40)]
    names = [f"{i}.wav" for i in range(40)]
    late = [f"late-{i}.wav" for i in range(20)]
    get = AISBatchLoader._get_object_from_moss_in
    asked = []

    def write_first(self, entry):
        asked.append(entry.obj_name)
        expect.append(write(data, entry.obj_name, noise(100)))
        return get(self, entry)

    monkeypatch.setattr(AISBatchLoader, "_get_object_from_moss_in", write_first)
    assert contents(AISBatchLoader()(cuts_of(names + late))) == expect
    assert asked == late
    metrics = node.metrics()
    assert metrics["forebay_err_soft_getbatch_n_total"] == 20


def test_a_batch_that_must_be_cut(node, data, monkeypatch):
    """An object that changes in the middle of its bytes ends the batch. The loader hears nothing
    any more, turns away, and gets this object and all behind it by themselves."""
    monkeypatch.setenv("AIS_READ_TIMEOUT", "2")
    first = write(data, "first.wav", noise(1000))
    write(data, "long.wav", noise(96 << 20))
    last = write(data, "last.wav", noise(1000))
    new = noise(96 << 20)
    inject = AISBatchLoader._inject_data_into_manifest
    injected = []

    def change_first(self, manifest, content):
        if not injected:
            write(data, "long.wav", new)
        injected.append(len(content))
        return inject(self, manifest, content)

    monkeypatch.setattr(AISBatchLoader, "_inject_data_into_manifest", change_first)
    got = contents(AISBatchLoader()(cuts_of(["first.wav", "long.wav", "last.wav"])))
    assert [len(c) for c in got] == [len(first), len(new), len(last)]
    assert got == [first, new, last]


def test_writing_to_ais(node):
    backend = AIStoreIOBackend()
    with backend.open("ais://audio/manifest.txt", "w") as file:
        file.write(b"one\n")
        file.write(b"two\n")
    with backend.open("ais://audio/manifest.txt", "r") as file:
        assert file.read() == b"one\ntwo\n"
