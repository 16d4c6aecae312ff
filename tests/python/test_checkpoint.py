"""Checkpoints: real torch processes, a real S3 server, nodes that are killed, disks that are
full."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import io
import json
import logging
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import dcp_ranks
import forebay
import forebay.checkpoint as ckpt
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from clusters import eventually
from conftest import s3_client
from forebay.checkpoint import _wire
from servers import Node, Versitygw, forebay_program, free_port
from torch.distributed.checkpoint.filesystem import _StorageInfo


def state(scale: int = 1, mib: int = 24) -> dict:
    generator = torch.Generator().manual_seed(scale)
    return {
        "model": {
            "w": torch.rand(mib * 256, 1024, generator=generator),
            "b": torch.arange(5, dtype=torch.int16) + scale,
            "h": torch.full((3, 0, 2), 1.5),
            "half": torch.rand(33, 17, generator=generator).to(torch.bfloat16),
        },
        "step": scale,
        "optimizer": [{"lr": 0.1 * scale}],
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Site:
    """An S3 server of its own, and a node that can be killed and started again."""

    def __init__(self, directory: Path, **node) -> None:
        self.directory, self.options = directory, node
        self.origin = Versitygw(directory / "origin")
        (self.origin.directory / "runs").mkdir()
        self.s3 = s3_client(self.origin.url)
        self.starts = 0
        self.start()

    def start(self, fresh: bool = False) -> None:
        self.starts += fresh
        self.node = Node(
            self.origin.url, ["runs"], self.directory / f"node-{self.starts}", **self.options
        )
        self.client = forebay.Client(self.node.url)

    def kill(self) -> None:
        self.node.stop(signal.SIGKILL)

    def pause(self) -> None:
        self.origin.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.origin.process.send_signal(signal.SIGCONT)

    def keys(self, prefix: str = "") -> list[str]:
        found = self.s3.list_objects_v2(Bucket="runs", Prefix=prefix)
        return [o["Key"] for o in found.get("Contents", [])]

    def uploads(self) -> list[dict]:
        """Those that are under way at the origin."""
        return self.s3.list_multipart_uploads(Bucket="runs").get("Uploads", [])

    def parts(self) -> int:
        """How many parts these have."""
        of = [{"Key": u["Key"], "UploadId": u["UploadId"]} for u in self.uploads()]
        return sum(len(self.s3.list_parts(Bucket="runs", **u).get("Parts", [])) for u in of)

    def get(self, key: str) -> bytes:
        return self.s3.get_object(Bucket="runs", Key=key)["Body"].read()

    def close(self) -> None:
        self.go_on()
        self.node.stop(signal.SIGKILL)
        self.origin.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("checkpoints"))
    yield site
    site.close()


@pytest.fixture
def own(tmp_path):
    site = Site(tmp_path)
    yield site
    site.close()


def ranks(world: int, what: str, node: str, name: str, scale: int) -> None:
    dcp_ranks.ranks(world, what, node, name, scale, free_port())


def test_a_state_dict_comes_back_and_torch_itself_reads_the_object(site):
    wanted = state(1)
    saved = ckpt.save(wanted, "s3://runs/plain/step-1", client=site.client, meta={"step": 1})
    assert saved.staged
    assert same(ckpt.load("s3://runs/plain/step-1", client=site.client), wanted)
    assert saved.wait(60).durable
    status = saved.status()
    assert status["state"] == "durable" and status["meta"] == {"format": "torch", "step": 1}
    keys = site.keys("plain/step-1/")
    assert keys == [f"plain/step-1/{saved.id}/state.pt", "plain/step-1/manifest.json"]
    assert same(torch.load(io.BytesIO(site.get(keys[0]))), wanted)
    # By another node, which has nothing of it.
    other = Node(site.origin.url, ["runs"], site.directory / "other")
    try:
        client = forebay.Client(other.url)
        assert same(ckpt.load("s3://runs/plain/step-1", client=client), wanted)
        assert [c.name for c in ckpt.list_durable("s3://runs/plain", client=client)] == [
            "s3://runs/plain/step-1"
        ]
    finally:
        other.stop()


def test_meta_comes_back_as_it_was(site):
    numbers = [9.385958677423489e-21, 1.7976931348623157e308, 5e-324, -0.0, 2**64 - 1, -(2**63)]
    meta = {"numbers": numbers, "text": "é\n", "nothing": None, "yes": True}
    saved = ckpt.save({}, "s3://runs/meta/a", client=site.client, meta=meta, wait="durable")
    wanted = {"format": "torch", **meta}
    status = saved.status()
    assert status["meta"] == wanted and status["error"] is None
    assert json.loads(site.get("meta/a/manifest.json"))["meta"] == wanted
    with _wire.Reading(site.client, "s3://runs/meta/a", durable=True) as reading:
        assert reading.meta == wanted


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"meta": {"loss": float("nan")}}, "meta cannot be JSON"),
        ({"meta": {"loss": float("inf")}}, "meta cannot be JSON"),
        ({"meta": {"n": 2**64 + 1}}, "18446744073709551617 does not fit in 64 bits"),
        ({"meta": {"n": [-(2**63) - 1]}}, "does not fit in 64 bits"),
        ({"meta": {"what": {1, 2}}}, "set is not JSON serializable"),
        ({"meta": {"text": "\ud800"}}, "meta cannot be JSON"),
        ({"meta": {"text": "é" * (32 << 10)}}, "at most 65536 are kept"),
        ({"meta": [1]}, "meta is a dict, and not a list"),
        ({"meta": {1: 2, "1": 3}}, "meta has the key 1, of type int"),
        ({"meta": {"steps": [{"a": ({None: 1},)}]}}, "meta has the key None, of type NoneType"),
        ({"deadline": -1}, "deadline=-1"),
        ({"deadline": float("nan")}, "deadline=nan"),
        ({"deadline": float("inf")}, "deadline=inf"),
        ({"deadline": 1e10}, "at most 1e\\+09"),
        ({"deadline": "soon"}, "deadline='soon'"),
        ({"deadline": True}, "deadline=True"),
    ],
)
def test_what_a_commit_would_refuse_is_refused_before_anything_is_sent(monkeypatch, wrong, says):
    monkeypatch.setattr(_wire, "ask", lambda *_: pytest.fail("it asked the node"))
    client = forebay.Client("http://127.0.0.1:9")
    with pytest.raises(forebay.InvalidRequest, match=says):
        ckpt.save({}, "s3://runs/refused/a", client=client, **wrong)
    with pytest.raises(forebay.InvalidRequest, match=says):
        ckpt.StorageWriter("s3://runs/refused/a", client=client, **wrong)
    writer = ckpt.StorageWriter("s3://runs/refused/a", client=client)
    vars(writer).update(wrong)
    with pytest.raises(forebay.InvalidRequest, match=says):
        writer.set_up_storage_writer(True)
    if "deadline" in wrong:
        with pytest.raises(forebay.InvalidRequest, match=says):
            ckpt.CheckpointIO(client, **wrong)


@pytest.mark.parametrize("format", ["", "pickle", None, [], {}, ["torch"]])
def test_a_format_that_is_none_is_refused(format):
    client = forebay.Client("http://127.0.0.1:9")
    with pytest.raises(forebay.InvalidRequest):
        ckpt.save({}, "s3://runs/refused/a", client=client, format=format)


def test_a_name_that_is_not_unicode_and_threads_that_are_no_number_are_refused():
    client = forebay.Client("http://127.0.0.1:9")
    with pytest.raises(forebay.InvalidRequest, match=r"'runs/\\ud800' is not Unicode"):
        ckpt.save({}, "runs/\ud800", client=client)
    for threads in ("2", 2.5, 0, True, None):
        with pytest.raises(forebay.InvalidRequest, match=r"threads=.*give a whole number"):
            ckpt.StorageWriter("s3://runs/a", client=client, threads=threads)


def test_safetensors_are_those_of_the_library(site):
    from safetensors.torch import load, save

    tensors = state(2)["model"]
    tensors["complex"] = torch.rand(150, 150, dtype=torch.complex64)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        tensors[str(dtype)] = torch.rand(7).to(dtype)
    saved = ckpt.save(tensors, "s3://runs/st/a", client=site.client, format="safetensors")
    found = ckpt.load("s3://runs/st/a", client=site.client)
    assert same(found, tensors)
    saved.wait(60)
    assert same(load(site.get(f"st/a/{saved.id}/model.safetensors")), tensors)
    assert same(load(save(tensors)), found)
    with pytest.raises(forebay.InvalidRequest, match="'model' is a dict"):
        ckpt.save(state(2), "s3://runs/st/b", client=site.client, format="safetensors")
    with pytest.raises(forebay.InvalidRequest, match="a tensor named '__metadata__'"):
        named = {"a": torch.zeros(3), "__metadata__": torch.zeros(3)}
        ckpt.save(named, "s3://runs/st/b", client=site.client, format="safetensors")
    with pytest.raises(forebay.InvalidRequest, match="format='pickle'"):
        ckpt.save(tensors, "s3://runs/st/b", client=site.client, format="pickle")
    with pytest.raises(forebay.NotFound):
        ckpt.load("s3://runs/st/b", client=site.client)


def test_a_type_that_pytorch_does_not_have_is_told(site, monkeypatch):
    tensors = {"scale": torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)}
    ckpt.save(tensors, "s3://runs/st/newer", client=site.client, format="safetensors")
    monkeypatch.delitem(ckpt._formats._NAMES, "F8_E8M0")
    with pytest.raises(forebay.Unsupported, match="type F8_E8M0, which PyTorch .* does not have"):
        ckpt.load("s3://runs/st/newer", client=site.client)


def test_safetensors_have_the_small_types_of_pytorch(site, tmp_path):
    from safetensors.torch import load_file, save_file

    bits = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    tensors = {
        "scale": bits.view(torch.float8_e8m0fnu),
        "weight": bits.view(torch.float4_e2m1fn_x2),
        "turned": bits.transpose(0, 2).view(torch.float4_e2m1fn_x2),
        "none": bits[:0].view(torch.float4_e2m1fn_x2),
    }

    def plain(found):
        return {n: (t.dtype, t.shape, t.view(torch.uint8).tolist()) for n, t in found.items()}

    saved = ckpt.save(tensors, "s3://runs/st/few", client=site.client, format="safetensors")
    saved.wait(60)
    assert plain(ckpt.load(saved.name, client=site.client)) == plain(tensors)
    ours = tmp_path / "ours.safetensors"
    ours.write_bytes(site.get(f"st/few/{saved.id}/model.safetensors"))
    assert plain(load_file(ours)) == plain(tensors)
    # The library refuses views.
    alone = {n: t.view(torch.uint8).clone().contiguous().view(t.dtype) for n, t in tensors.items()}
    save_file(alone, tmp_path / "theirs.safetensors")
    writing = _wire.Writing(site.client, "s3://runs/st/theirs")
    writing.put("model.safetensors", [(tmp_path / "theirs.safetensors").read_bytes()])
    writing.commit()
    assert plain(ckpt.load("s3://runs/st/theirs", client=site.client)) == plain(tensors)
    alone = {"alone": torch.tensor(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    with pytest.raises(forebay.InvalidRequest, match="'alone': .* without dimensions"):
        ckpt.save(alone, "s3://runs/st/alone", client=site.client, format="safetensors")


def test_safetensors_are_copied_one_at_a_time(site, monkeypatch):
    import weakref

    from forebay.checkpoint import _formats

    memory_of = _formats.memory_of
    copies: list[weakref.ref] = []

    def counts(tensor):
        assert all(copy() is None for copy in copies)
        copies.append(weakref.ref(tensor))
        return memory_of(tensor)

    monkeypatch.setattr(_formats, "memory_of", counts)
    wanted = {f"t{n}": torch.rand(100, 50 + n).t() for n in range(6)}
    wanted |= {"none": torch.zeros(0, 3), "expanded": torch.arange(3.0).expand(4, 3)}
    saved = ckpt.save(wanted, "s3://runs/st/copied", client=site.client, format="safetensors")
    assert len(copies) == len(wanted)
    monkeypatch.undo()
    assert same(ckpt.load(saved.name, client=site.client), wanted)


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', forebay.Unsupported),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', forebay.InvalidRequest),
        (
            b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}',
            forebay.InvalidRequest,
        ),
        (b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}', forebay.InvalidRequest),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}', forebay.InvalidRequest),
        (b'{"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}}', forebay.InvalidRequest),
        (b'{"a":{"dtype":"F4","shape":[],"data_offsets":[0,1]}}', forebay.Unsupported),
        (b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', forebay.Unsupported),
        (b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,4]}}', forebay.InvalidRequest),
        (b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', forebay.InvalidRequest),
        (b'{"a":{"dtype":"F32"}}', forebay.InvalidRequest),
        (b'{"a":[]}', forebay.InvalidRequest),
        (b"[]", forebay.InvalidRequest),
        (b'{"a":{"dtype":"F32"', forebay.InvalidRequest),
        (b"\xff\xfe", forebay.InvalidRequest),
    ],
)
def test_safetensors_that_cannot_be_read_say_so(site, header, kind):
    writing = _wire.Writing(site.client, "s3://runs/st/bad")
    writing.put("model.safetensors", [len(header).to_bytes(8, "little") + header + bytes(4)])
    writing.commit()
    with pytest.raises(kind):
        ckpt.load("s3://runs/st/bad", client=site.client)


def test_small_tensors_of_safetensors_are_read_together(site, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 300, (2000,), generator=generator).tolist()
    sizes[700:701] = [0, 40_000]
    tensors = {str(n): torch.rand(size, generator=generator) for n, size in enumerate(sizes)}
    tensors |= {"bits": torch.ones(3, dtype=torch.bool), "bytes": torch.ones(1, dtype=torch.int8)}
    ckpt.save(tensors, "s3://runs/st/small", client=site.client, format="safetensors")
    asked = []
    submit = _wire.Reading.submit

    def counts(self, *piece):
        asked.append(piece)
        return submit(self, *piece)

    monkeypatch.setattr(_wire.Reading, "submit", counts)
    found = ckpt.load("s3://runs/st/small", client=site.client)
    assert list(found) == list(tensors) and same(found, tensors)
    assert len(asked) == 4, "the header, the large one, and what is before and behind it"
    # Those that lie apart, between large ones, do not wait for each other.
    names = ("weight", "bias")
    apart = {
        f"{n}.{of}": torch.ones(40_000 if of == "weight" else 3) for n in range(8) for of in names
    }
    ckpt.save(apart, "s3://runs/st/apart", client=site.client, format="safetensors")
    fills, fill = [], _wire.Reading.fill

    def fills_with(self, jobs):
        fills.append(jobs)
        fill(self, jobs)

    monkeypatch.setattr(_wire.Reading, "fill", fills_with)
    assert same(ckpt.load("s3://runs/st/apart", client=site.client), apart)
    assert [len(jobs) for jobs in fills[-2:]] == [8, 8]


def test_safetensors_refuse_what_has_no_data_of_its_own_before_anything_is_sent(monkeypatch):
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    monkeypatch.setattr(_wire, "ask", lambda *_: pytest.fail("it asked the node"))
    client = forebay.Client("http://127.0.0.1:9")

    def refused(tensor: torch.Tensor, says: str) -> None:
        with pytest.raises(forebay.InvalidRequest, match=f"'w'.*{says}"):
            state = {"a": torch.ones(2), "w": tensor}
            ckpt.save(state, "s3://runs/st/no", client=client, format="safetensors")

    refused(torch.ones(3, device="meta"), "has no data")
    refused(torch.nn.UninitializedParameter(), "not initialized")
    with pytest.raises(forebay.InvalidRequest, match=r"'\\ud800', which is not Unicode"):
        named = {"\ud800": torch.ones(2)}
        ckpt.save(named, "s3://runs/st/no", client=client, format="safetensors")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        refused(distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0])), "a DTensor")
    finally:
        dist.destroy_process_group()


def test_tensors_that_are_views_or_sparse_are_saved(site):
    base = torch.arange(16.0)
    wanted = {
        "neg": torch._neg_view(base),
        "one": base[3::16],
        "scalar": base[5],
        "wide": torch.arange(3.0).expand(4, 3),
        "turned": base.reshape(4, 4).T,
        "empty": base[:0],
    }
    assert wanted["neg"].is_neg() and wanted["one"].stride() == (16,)
    ckpt.save(wanted, "s3://runs/views/st", client=site.client, format="safetensors")
    assert same(ckpt.load("s3://runs/views/st", client=site.client), wanted)
    wanted["coo"] = torch.eye(5).to_sparse()
    wanted["csr"] = torch.eye(5).to_sparse_csr()
    ckpt.save(wanted, "s3://runs/views/pt", client=site.client)
    found = ckpt.load("s3://runs/views/pt", client=site.client)
    for name in ("coo", "csr"):
        assert torch.equal(found.pop(name).to_dense(), torch.eye(5)), name
        del wanted[name]
    assert same(found, wanted)


def test_tensors_without_data_take_no_room(site):
    wanted = {
        "meta": torch.empty(1 << 20, 1 << 20, device="meta"),
        **torch.nn.LazyLinear(3).state_dict(),
        "w": torch.ones(3),
    }
    ckpt.save(wanted, "s3://runs/dataless/a", client=site.client)
    found = ckpt.load("s3://runs/dataless/a", client=site.client, weights_only=False)
    assert found["meta"].is_meta and found["meta"].shape == wanted["meta"].shape
    assert isinstance(found["weight"], torch.nn.UninitializedParameter)
    assert torch.equal(found["w"], wanted["w"])


@pytest.mark.parametrize("of", [np.float32, np.array, torch.tensor])
def test_seconds_are_numbers_of_any_library(site, of):
    client, retry_for = site.client, of(2.0)
    writer = ckpt.StorageWriter(client=client, retry_for=retry_for, deadline=of(60.0))
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="s3://runs/of/dcp")
    saved = ckpt.save({"w": torch.ones(3)}, "s3://runs/of/a", client=client, retry_for=retry_for)
    saved.wait(of(60.0))
    ckpt.keep("s3://runs/of", last=of(1) if of is not np.float32 else 1, client=client)
    for wrong in (of(-1.0), of(math.nan), of(math.inf), np.True_, torch.tensor([1.0]), 10**400):
        with pytest.raises(forebay.InvalidRequest, match="retry_for=.*number of seconds"):
            ckpt.StorageWriter(client=client, retry_for=wrong)


@pytest.mark.parametrize("timeout", [float("nan"), "10", True, 1j])
def test_a_wait_of_no_number_of_seconds_is_refused_at_once(monkeypatch, timeout):
    monkeypatch.setattr(_wire, "ask", lambda *_: pytest.fail("it asked the node"))
    waited = ckpt.Checkpoint(forebay.Client("http://127.0.0.1:9"), "s3://runs/wait/a")
    with pytest.raises(forebay.InvalidRequest, match="timeout=.*give a number of seconds"):
        waited.wait(timeout)


def test_a_wait_ends_though_the_node_does_not_answer(monkeypatch):
    monkeypatch.setattr(_wire, "_GRACE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = forebay.Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=100)
        saved = ckpt.Checkpoint(client, "s3://runs/silent", "0123456789abcdef")
        for timeout in (0, 1.0):
            began = time.monotonic()
            with pytest.raises(forebay.Timeout, match="does not answer"):
                saved.wait(timeout)
            assert time.monotonic() - began < 50


def test_a_wait_needs_no_thread(monkeypatch):
    start = threading.Thread.start

    def scarce(thread):
        """As in atexit, since Python 3.12."""
        if thread.name == "forebay-wait":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = forebay.Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=1)
        saved = ckpt.Checkpoint(client, "s3://runs/silent", "0123456789abcdef")
        with pytest.raises(forebay.Timeout, match="did not answer"):
            saved.wait(0)


def test_the_room_that_is_asked_for_is_that_of_each_storage_once():
    from forebay.checkpoint import _formats

    weight = torch.zeros(1 << 20)
    tied = {"a": weight, "b": [weight, weight.view(1024, 1024).T], "c": weight[:1].expand(10**9)}
    assert 4 << 20 < _formats.bytes_of(tied) < 6 << 20
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1 << 17, dtype=torch.long), weight[: 1 << 17])
    assert 2 << 20 < _formats.bytes_of({"s": sparse}) < 8 << 20
    dense = torch.rand(256, 512)
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        blocks = (4, 4) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        compressed = dense.to_sparse(layout=layout, blocksize=blocks)
        written = io.BytesIO()
        torch.save([compressed, compressed], written)
        room = _formats.bytes_of([compressed, compressed]) - len(written.getvalue())
        assert 0 <= room < 2 << 20, layout
    # Safetensors have each by itself.
    assert _formats.bytes_of_safetensors({"a": weight, "b": weight}) > 8 << 20


def test_safetensors_go_to_one_device(site):
    name = "s3://runs/st/device"
    ckpt.save({"a": torch.ones(3)}, name, client=site.client, format="safetensors")
    for where in (None, "cpu", torch.device("cpu")):
        assert torch.equal(
            ckpt.load(name, client=site.client, map_location=where)["a"], torch.ones(3)
        )
    for where in ({"cpu": "cuda:0"}, lambda storage, location: storage):
        with pytest.raises(forebay.InvalidRequest, match="one device"):
            ckpt.load(name, client=site.client, map_location=where)


class StartsNodeAgain:
    """A value that kills the node when it is pickled first, and has it started a little later."""

    def __init__(self, site: Site) -> None:
        self.site, self.starts = site, 0

    def __reduce__(self):
        if not self.starts:
            self.starts += 1
            self.site.kill()
            threading.Timer(1.0, self.site.start).start()
        return str, ("pickled",)


def test_saves_and_loads_go_on_while_the_node_is_started_again(tmp_path, caplog, monkeypatch):
    site = Site(tmp_path, listen=f"127.0.0.1:{free_port()}")
    try:
        client, wanted = site.client, state(1, 1)
        site.kill()
        for once in (
            lambda: ckpt.save(wanted, "s3://runs/through/a", client=client),
            lambda: ckpt.load("s3://runs/through/a", client=client),
        ):
            began = time.monotonic()
            with pytest.raises(forebay.ConnectionFailed):
                once()
            assert time.monotonic() - began < 30
        threading.Timer(1.0, site.start).start()
        ckpt.save(wanted, "s3://runs/through/a", client=client, retry_for=60).wait()
        assert "saving s3://runs/through/a: tried again for 60 s" in caplog.text
        # In the middle, and none of a name is in the way of itself.
        dies = {**wanted, "dies": StartsNodeAgain(site)}
        saved = ckpt.save(dies, "s3://runs/through/b", client=client, retry_for=60, overwrite=False)
        assert dies["dies"].starts == 1 and saved.wait().durable
        site.kill()
        threading.Timer(1.0, site.start).start()
        loaded = ckpt.load("s3://runs/through/b", client=client, retry_for=60, weights_only=False)
        assert loaded.pop("dies") == "pickled" and same(loaded, wanted)
        # Also the answer to a removal may be lost.
        site.kill()
        threading.Timer(1.0, site.start).start()
        options = {"last": 1, "client": client, "retry_for": 60}
        assert ckpt.keep("s3://runs/through", **options) == ["s3://runs/through/a"]
        ckpt.save(wanted, "s3://runs/through/c", client=client).wait()
        remove = _wire.remove

        def loses(*args) -> None:
            monkeypatch.setattr(_wire, "remove", remove)
            remove(*args)
            raise forebay.ConnectionFailed("the answer is lost")

        monkeypatch.setattr(_wire, "remove", loses)
        assert ckpt.keep("s3://runs/through", **options) == ["s3://runs/through/b"]
        # What is found and removed by name is waited for too.
        site.kill()
        threading.Timer(1.0, site.start).start()
        found = ckpt.list_durable("s3://runs/through", client=client, retry_for=60)
        assert [c.name for c in found] == ["s3://runs/through/c"]
        site.kill()
        threading.Timer(1.0, site.start).start()
        monkeypatch.setattr(_wire, "remove", loses)
        ckpt.remove("s3://runs/through/c", client=client, retry_for=60)
        assert _wire.remove is remove
        assert ckpt.list_durable("s3://runs/through", client=client) == []
        with pytest.raises(forebay.NotFound):
            ckpt.remove("s3://runs/through/c", client=client, retry_for=60)
        # It ends, and what it began is given up.
        site.kill()
        for once in (
            lambda: ckpt.list_durable("s3://runs/through", client=client, retry_for=0.5),
            lambda: ckpt.remove("s3://runs/through/c", client=client, retry_for=0.5),
        ):
            with pytest.raises(forebay.ConnectionFailed, match="retry_for="):
                once()
        with pytest.raises(forebay.ConnectionFailed, match="retry_for="):
            ckpt.save(wanted, "s3://runs/through/c", client=client, retry_for=0.5)
    finally:
        site.close()


class StartsHungNodeAgain(logging.Handler):
    """Starts a node again that is stopped, when a log says that something is tried again."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.why = site, []

    def hang(self) -> None:
        self.site.node.process.send_signal(signal.SIGSTOP)

    def emit(self, record: logging.LogRecord) -> None:
        self.why += [type(arg) for arg in record.args if isinstance(arg, forebay.Error)]
        self.site.kill()
        self.site.start()


def test_saves_and_loads_go_on_at_a_node_that_hung_and_is_started_again(tmp_path):
    site = Site(tmp_path, listen=f"127.0.0.1:{free_port()}")
    node, name = StartsHungNodeAgain(site), "s3://runs/hung/a"
    # Long enough for a node that does not hang.
    client = forebay.Client(site.client.url, timeout=5)
    options = {"client": client, "retry_for": 60}
    wanted = state(1, 1)
    _wire.log.addHandler(node)
    try:
        for once in (
            lambda: ckpt.save(wanted, name, **options).wait(),
            lambda: same(ckpt.load(name, **options), wanted) or pytest.fail("another state"),
            lambda: ckpt.remove(name, **options),
        ):
            node.hang()
            once()
        assert node.why == [forebay.Timeout] * 3 and site.keys("hung/") == []
        # Without `retry_for`, it fails at once.
        node.hang()
        with pytest.raises(forebay.Timeout):
            ckpt.load(name, client=client)
    finally:
        _wire.log.removeHandler(node)
        site.close()


def test_saves_and_loads_of_dcp_go_on_while_the_node_is_started_again(
    tmp_path, caplog, monkeypatch
):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    site = Site(tmp_path, listen=f"127.0.0.1:{free_port()}")

    def starts_again() -> None:
        site.kill()
        threading.Timer(1.0, site.start).start()

    class Dies(DefaultSavePlanner):
        """The node is killed while its files are written."""

        has_died = False

        def resolve_data(self, item):
            found = super().resolve_data(item)
            if not self.has_died:
                self.has_died = True
                starts_again()
            return found

    wanted = {"w": torch.rand(400, 400), "b": torch.arange(5.0), "note": "kept"}
    options = {"client": site.client, "retry_for": 60}

    def saves(name: str, planner=None, **more) -> None:
        writer = ckpt.StorageWriter(f"s3://runs/dcp-again/{name}", **options, **more)
        dcp.save(wanted, storage_writer=writer, planner=planner, no_dist=True)
        assert writer.handle.wait().durable
        loads(name)

    def loads(name: str) -> None:
        found = {"w": torch.zeros(400, 400), "b": torch.zeros(5), "note": ""}
        reader = ckpt.StorageReader(f"s3://runs/dcp-again/{name}", **options)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert torch.equal(found["w"], wanted["w"]) and torch.equal(found["b"], wanted["b"])
        assert found["note"] == "kept"

    try:
        for meant in (ckpt.StorageWriter, ckpt.StorageReader):
            with pytest.raises(forebay.InvalidRequest):
                meant("s3://runs/a", client=site.client, retry_for=-1)
        site.kill()
        # Without `retry_for`, it fails at once.
        writer = ckpt.StorageWriter("s3://runs/dcp-again/none", client=site.client)
        with pytest.raises(dcp.CheckpointException):
            dcp.save(wanted, storage_writer=writer, no_dist=True)
        threading.Timer(1.0, site.start).start()
        saves("before")
        assert "tried again for 60 s" in caplog.text
        planner = Dies()
        saves("meanwhile", planner, overwrite=False)
        assert planner.has_died
        # After the files, and before the commit, for which they are still there.
        finish = ckpt.StorageWriter.finish

        def later(self, **about):
            monkeypatch.undo()
            starts_again()
            finish(self, **about)

        monkeypatch.setattr(ckpt.StorageWriter, "finish", later)
        saves("between", overwrite=False)
        # After the commit, whose answer is lost.
        commit, ids = _wire.Writing.commit, []

        def loses(self, **said):
            ids.append(self.id)
            made = commit(self, **said)
            if len(ids) == 1:
                starts_again()
                raise forebay.ConnectionFailed("the answer is lost")
            return made

        monkeypatch.setattr(_wire.Writing, "commit", loses)
        saves("after", overwrite=False)
        monkeypatch.undo()
        assert len(ids) >= 2 and len(set(ids)) == 1
        # While it is read: the manifest, and then the files.
        starts_again()
        loads("after")
        read = _wire.Reading.file_of

        def dies(self, path):
            monkeypatch.undo()
            starts_again()
            return read(self, path)

        monkeypatch.setattr(_wire.Reading, "file_of", dies)
        loads("meanwhile")
        assert {c["state"] for c in staged(site, "dcp-again/")} <= {"durable"}
    finally:
        site.close()


def write_by_ranks(writers, planners, planned=lambda: None):
    """What DCP does for each rank, up to the commit; rank n saves a tensor `wn`, all of it n."""
    plans = []
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        writer.set_up_storage_writer(rank == 0)
        planner.set_up_planner({f"w{rank}": torch.full((100,), float(rank))}, None, rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    planned()
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    return metadata, results


def test_a_rank_of_dcp_at_a_node_of_its_own_writes_anew_when_that_is_started_again(tmp_path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import Metadata

    site = Site(tmp_path)
    second = Site.__new__(Site)
    second.origin, second.directory, second.starts = site.origin, tmp_path / "second", 0
    second.options = {"listen": f"127.0.0.1:{free_port()}"}
    second.start()

    class Dies(DefaultSavePlanner):
        times = 0

        def resolve_data(self, item):
            found = super().resolve_data(item)
            self.times += 1
            if self.times == 1:
                second.kill()
                threading.Timer(1.0, second.start).start()
            return found

    try:
        name = "s3://runs/dcp-nodes/a"
        writers = [
            ckpt.StorageWriter(name, client=of.client, retry_for=60) for of in (site, second)
        ]
        planners = [DefaultSavePlanner(), Dies()]
        metadata, results = write_by_ranks(writers, planners)
        assert planners[1].times == 2 and isinstance(metadata, Metadata)
        writers[0].finish(metadata, results)
        assert writers[0].handle.wait(60).durable
        found = {f"w{rank}": torch.full((100,), -1.0) for rank in range(2)}

        reader = ckpt.StorageReader(name, client=site.client)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert all(bool((found[f"w{rank}"] == rank).all()) for rank in range(2))
    finally:
        second.node.stop(signal.SIGKILL)
        site.close()


@pytest.mark.parametrize("when", ["planned", "written", "lost"])
def test_ranks_of_dcp_at_one_node_that_is_started_again_go_on(tmp_path, when):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    site = Site(tmp_path, listen=f"127.0.0.1:{free_port()}")
    name = f"s3://runs/dcp-ranks/{when}"

    def starts_again() -> None:
        site.kill()
        if when == "lost":
            # As a loss of power takes it, for it is not synced.
            [log] = site.directory.rglob("arrived.log")
            log.unlink()
        threading.Timer(1.0, site.start).start()

    try:
        writers = [ckpt.StorageWriter(name, client=site.client, retry_for=30) for _ in range(2)]
        planned = starts_again if when == "planned" else lambda: None
        planners = [DefaultSavePlanner() for _ in writers]
        metadata, results = write_by_ranks(writers, planners, planned)
        if when != "planned":
            starts_again()
        if when == "lost":
            with pytest.raises(forebay.NotFound, match="the node was started again"):
                writers[0].finish(metadata, results)
            assert staged(site, "dcp-ranks/") == [] and site.keys("dcp-ranks/") == []
            return
        writers[0].finish(metadata, results)
        assert writers[0].handle.wait(60).durable
        found = {f"w{rank}": torch.full((100,), -1.0) for rank in range(2)}
        reader = ckpt.StorageReader(name, client=site.client, durable=True)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert all(bool((found[f"w{rank}"] == rank).all()) for rank in range(2))
    finally:
        site.close()


def test_ranks_of_dcp_at_one_node_write_again_what_it_did_not_take(site, monkeypatch):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    file, finish = _wire.Writing.file, _wire.Outgoing.finish
    lost = []

    def refuses(self, name, size=None):
        if name.startswith("__0_") and name not in lost:
            lost.append(name)
            raise forebay.Busy("the node is over its limits")
        return file(self, name, size)

    def loses(self):
        size = finish(self)
        if self._name.startswith("__1_") and self._name not in lost:
            lost.append(self._name)
            raise forebay.ConnectionFailed("the answer is lost")
        return size

    monkeypatch.setattr(_wire.Writing, "file", refuses)
    monkeypatch.setattr(_wire.Outgoing, "finish", loses)

    def save(name: str, retry_for: float) -> ckpt.Checkpoint:
        options = {"client": site.client, "retry_for": retry_for}
        writers = [ckpt.StorageWriter(f"s3://runs/{name}", **options) for _ in range(2)]
        metadata, results = write_by_ranks(writers, [DefaultSavePlanner() for _ in writers])
        writers[0].finish(metadata, results)
        return writers[0].handle

    # Without `retry_for`, it fails at once.
    with pytest.raises(forebay.Busy):
        save("dcp-busy/a", 0)
    assert staged(site, "dcp-busy/") == []
    lost.clear()
    saved = save("dcp-busy/b", 30)
    assert lost == ["__0_0.distcp", "__1_0.distcp"] and saved.wait(60).durable
    found = {f"w{rank}": torch.full((100,), -1.0) for rank in range(2)}
    dcp.load(found, storage_reader=ckpt.StorageReader(saved.name, client=site.client), no_dist=True)
    assert all(bool((found[f"w{rank}"] == rank).all()) for rank in range(2))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("order", [("refused", "down"), ("down", "refused")])
def test_a_read_that_fails_waits_for_no_other_that_is_made_again(order, together):
    from forebay.checkpoint._dcp import _Batch

    asked = threading.Event()

    class Node:
        """It refuses one file, and another cannot be reached."""

        def _read_into(self, path, start, target):
            if "refused" in path:
                assert asked.wait(30)
                raise forebay.PermissionDenied("no")
            asked.set()
            raise forebay.ConnectionFailed("it is down")

    reading = _wire.Reading.__new__(_wire.Reading)
    reading.open(Node(), "s3://runs/a", {"refused": 1, "down": 1}, 60)
    reading.id = ""
    began = time.monotonic()
    jobs = [(file, 0, memoryview(bytearray(1))) for file in order]
    with reading, pytest.raises(forebay.PermissionDenied):
        if together:
            reading.fill(jobs)
        else:
            batch = _Batch(reading)
            for job in jobs:
                batch.add(*job)
            batch.finish()
    assert time.monotonic() - began < 45


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_load_that_fails_waits_for_nothing_that_is_made_again(pieces):
    from forebay.checkpoint._formats import _CHUNK_BYTES, Incoming

    asked = threading.Event()

    class Node:
        """It refuses the second chunk of a file, and then it cannot be reached."""

        def _borrow(self, path):
            return None

        def _read_into(self, path, start, target):
            if start == _CHUNK_BYTES:
                assert asked.wait(30)
                raise forebay.PermissionDenied("no")
            if start > _CHUNK_BYTES:
                asked.set()
                raise forebay.ConnectionFailed("it is down")

    reading = _wire.Reading.__new__(_wire.Reading)
    reading.open(Node(), "s3://runs/a", {"state.pt": 4 * _CHUNK_BYTES}, 60)
    reading.id = ""
    began = time.monotonic()
    with reading:
        file = Incoming(reading, "state.pt")
        file.seek(_CHUNK_BYTES)
        with pytest.raises(forebay.PermissionDenied):
            # It waits for one piece while the next ones are read ahead, or it waits for two.
            file.read(pieces * _CHUNK_BYTES)
    assert time.monotonic() - began < 45


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("is_durable", [True, False])
def test_ctrl_c_at_a_commit_leaves_a_whole_checkpoint_or_none(own, monkeypatch, sends, is_durable):
    ckpt.save(state(1, 1), "s3://runs/c/a", client=own.client, wait="durable")
    ask = _wire.ask

    def interrupted(client, method, path, body=None):
        if "commit=" not in path:
            return ask(client, method, path, body)
        monkeypatch.undo()
        if sends:
            ask(client, method, path, body)
            if is_durable:
                id = re.search("id=([0-9a-f]+)", path)[1]
                ckpt.Checkpoint(client, "s3://runs/c/a", id).wait()
        raise KeyboardInterrupt

    if not is_durable:
        own.pause()
    monkeypatch.setattr(_wire, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(state(2, 1), "s3://runs/c/a", client=own.client)
    own.go_on()
    # What was durable by then stays; what was not is given up.
    there = 2 if sends and is_durable else 1
    assert same(ckpt.load("s3://runs/c/a", client=own.client), state(there, 1))
    # The name is free at once.
    saved = ckpt.save(state(3, 1), "s3://runs/c/a", client=own.client, wait="durable")
    assert same(ckpt.load("s3://runs/c/a", client=own.client), state(3, 1))
    assert [c.id for c in ckpt.list_durable("s3://runs/c", client=own.client)] == [saved.id]


def test_ctrl_c_while_the_node_notes_the_commit_gives_the_checkpoint_up(own, monkeypatch):
    ckpt.save(state(1, 1), "s3://runs/c/a", client=own.client, wait="durable")
    ask, refused = _wire.ask, []

    def interrupted(client, method, path, body=None):
        if "commit=" in path:
            ask(client, method, path, body)
            raise KeyboardInterrupt
        if method == "DELETE" and len(refused) < 3:
            refused.append(path)
            raise forebay.Conflict("it is being committed")
        return ask(client, method, path, body)

    own.pause()
    monkeypatch.setattr(_wire, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(state(2, 1), "s3://runs/c/a", client=own.client)
    monkeypatch.undo()
    assert len(refused) == 3
    own.go_on()
    assert same(ckpt.load("s3://runs/c/a", client=own.client), state(1, 1))


def test_ctrl_c_while_a_save_waits_until_it_is_durable_does_not_give_it_up(own, monkeypatch):
    own.pause()
    wait = _wire.Checkpoint.wait

    def interrupted(self):
        monkeypatch.undo()
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        return wait(self)

    monkeypatch.setattr(_wire.Checkpoint, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(state(2, 1), "s3://runs/c/b", client=own.client, wait="durable")
    own.go_on()
    assert ckpt.Checkpoint(own.client, "s3://runs/c/b").wait(60).durable
    assert same(ckpt.load("s3://runs/c/b", client=own.client), state(2, 1))


def test_ctrl_c_while_other_threads_of_a_rank_of_dcp_write_ends_them(site, monkeypatch):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    main, refused = threading.get_ident(), []

    def refuses(*_, **__):
        if threading.get_ident() == main:
            # The other thread has the other file, and this one waits for it.
            while not refused:
                time.sleep(0.01)
            return []
        if not refused:
            # Not before: the test would be interrupted where it does not expect it.
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        refused.append(threading.current_thread())
        raise forebay.Busy("the node is over its limits")

    monkeypatch.setattr("forebay.checkpoint._dcp._write_file", refuses)
    options = {"client": site.client, "retry_for": 60}
    writers = [ckpt.StorageWriter("s3://runs/c/d", **options) for _ in range(2)]
    planner, plans = DefaultSavePlanner(), []
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0)
        planner.set_up_planner({f"w{n}": torch.zeros(9) for n in range(2)}, None, rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans = writers[0].prepare_global_plan(plans)
    with pytest.raises(KeyboardInterrupt):
        writers[0].write_data(planner.finish_plan(plans[0]), planner)
    began = time.monotonic()
    # `is_alive` takes one for ended whose `join` was interrupted.
    while refused[0] in threading.enumerate():
        assert time.monotonic() - began < 30
        time.sleep(0.01)
    writers[0].reset()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(own, monkeypatch, overwrite):
    from forebay.checkpoint import _wire

    # What is done at the first commit, and the ids of all.
    at_first, ids, commit = [], [], _wire.Writing.commit

    def loses(self, **options):
        ids.append(self.id)
        if at_first:
            at_first.pop()(self, options)
            raise forebay.ConnectionFailed("the answer is lost")
        return commit(self, **options)

    monkeypatch.setattr(_wire.Writing, "commit", loses)
    options = {"client": own.client, "retry_for": 30, "overwrite": overwrite}

    def saves(name, of, first):
        at_first.append(first)
        ids.clear()
        saved = ckpt.save(state(of, 1), f"s3://runs/lost/{name}", **options)
        assert saved.wait().durable
        assert same(ckpt.load(f"s3://runs/lost/{name}", client=own.client), state(of, 1))
        return saved.id

    assert saves("after", 1, lambda w, o: commit(w, **o)) == ids[0]
    # It may be durable, and its copy gone from the disk.
    assert saves("gone", 2, lambda w, o: commit(w, **o).wait().abandon()) == ids[0]
    # What did not arrive is committed then, or written again if it is not there any more.
    assert saves("before", 3, lambda w, o: None) == ids[0]
    assert saves("lost", 4, lambda w, o: w.abandon()) == ids[-1] != ids[0]
    # Without retry_for=, what may be committed is given up.
    at_first.append(lambda w, o: commit(w, **o))
    own.pause()
    with pytest.raises(forebay.ConnectionFailed):
        ckpt.save(state(3, 1), "s3://runs/lost/c", client=own.client)
    own.go_on()
    with pytest.raises(forebay.NotFound):
        ckpt.load("s3://runs/lost/c", client=own.client)


def test_a_save_is_not_in_the_way_of_itself(own, monkeypatch):
    from forebay.checkpoint import _wire

    ask, commits = _wire.ask, []

    def loses(client, method, path, body=None):
        """The first commit goes on for a while."""
        if "commit=" in path:
            commits.append(path)
            if len(commits) == 1:
                raise forebay.ConnectionFailed("the answer is lost")
            if len(commits) == 2:
                raise forebay.Conflict("it is being committed")
        return ask(client, method, path, body)

    monkeypatch.setattr(_wire, "ask", loses)
    saved = ckpt.save(state(1, 1), "s3://runs/own/a", client=own.client, retry_for=30)
    assert len(commits) == 3 and len(set(commits)) == 1 and saved.wait().durable
    # What began without an answer has the name for a while.
    lost: list[str] = []

    def begins(client, method, path, body=None):
        answer = ask(client, method, path, body)
        if not lost and method == "POST" and "id=" not in path:
            lost.append(answer["id"])
            threading.Timer(1.0, gives_way).start()
            raise forebay.ConnectionFailed("the answer is lost")
        return answer

    def gives_way():
        _wire.Writing.joined(own.client, "s3://runs/own/b", lost[0]).abandon()

    monkeypatch.setattr(_wire, "ask", begins)
    for overwrite in (True, False):
        lost.clear()
        saved = ckpt.save(
            state(2, 1), "s3://runs/own/b", client=own.client, retry_for=30, overwrite=overwrite
        )
        assert saved.id != lost[0] and saved.wait().durable
        ckpt.remove(saved.name, client=own.client)
    # That of another one is a Conflict at once.
    other = _wire.Writing(own.client, "s3://runs/own/c")
    began = time.monotonic()
    with pytest.raises(forebay.Conflict):
        ckpt.save(state(3, 1), "s3://runs/own/c", client=own.client, retry_for=120)
    assert time.monotonic() - began < 60
    other.abandon()


def is_waiting(node: Node) -> bool:
    """Whether somebody waits for an answer of this node."""
    held = node.metrics().items()
    return any(n.startswith("forebay_requests_in_flight") and v > 0 for n, v in held)


def test_a_wait_goes_on_while_the_node_is_started_again(tmp_path):
    site = Site(tmp_path, listen=f"127.0.0.1:{free_port()}")
    try:
        site.pause()
        saved = ckpt.save(state(1, 1), "s3://runs/again/a", client=site.client)
        line = [forebay_program(), "checkpoint", "wait", saved.name, "--node", site.node.url]
        by_command = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        eventually(lambda: is_waiting(site.node), "the command waits")
        time.sleep(1)
        assert by_command.poll() is None
        site.kill()
        began = time.monotonic()
        with pytest.raises(forebay.ConnectionFailed):
            saved.wait(1.5)
        assert 1.4 < time.monotonic() - began < 30
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                saved.wait()
            except BaseException as e:
                failures.append(e)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(1.5)
        site.go_on()
        site.start()
        waiting.join(60)
        assert not waiting.is_alive() and failures == []
        assert saved.durable
        out, err = by_command.communicate(timeout=60)
        assert by_command.returncode == 0 and b"durable" in out, err
        # Its copy may go, and go again.
        for _ in range(2):
            saved.abandon()
            eventually(lambda: staged(site, "again/") == [], "the copy is gone")
        assert saved.durable
        ckpt.remove(saved.name, client=site.client)
        with pytest.raises(forebay.NotFound):
            saved.abandon()
    finally:
        site.close()


def test_a_wait_goes_on_while_another_node_answers_in_place_of_the_one_that_has_it(tmp_path):
    # Its flush fails, and the other node sees what the bucket has.
    place = Path(f"/tmp/fb-{os.getpid()}-has-it.sock")
    site = Site(tmp_path, env={"AWS_SECRET_ACCESS_KEY": "not it"}, socket=place)
    other = Node(site.origin.url, ["runs"], tmp_path / "other")
    here = f"unix:{place}"
    clients = iter(lambda: forebay.Client([here, other.unix_url]), None)
    client = next(c for c in clients if c.route == here)
    try:
        saved = ckpt.save(state(1, 1), "s3://runs/elsewhere/a", client=client)
        nodes = f"{here},{other.unix_url}"
        line = [forebay_program(), "checkpoint", "wait", saved.name, "--node", nodes]
        by_command = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        eventually(lambda: is_waiting(site.node), "the command waits")
        time.sleep(1)
        assert by_command.poll() is None
        site.kill()
        with pytest.raises(forebay.ConnectionFailed, match="the node that has it, unix:.* reached"):
            saved.wait(1.5)
        with pytest.raises(forebay.NotFound):
            saved.status()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(saved.wait)
            time.sleep(1.5)
            site.options["env"] = None
            site.start()
            assert waiting.result(60).durable
        out, err = by_command.communicate(timeout=60)
        assert by_command.returncode == 0 and b"durable" in out, err

        # That it lost one, it says itself.
        eventually(lambda: client.buckets() and client.route == here, "it is asked again")
        site.pause()
        saved = ckpt.save(state(1, 1), "s3://runs/elsewhere/b", client=client)
        site.kill()
        site.go_on()
        site.start(fresh=True)
        with pytest.raises(forebay.NotFound):
            saved.wait(60)
    finally:
        other.stop()
        site.close()


def test_a_writer_that_is_left_at_the_end_of_the_interpreter_is_quiet():
    code = """
import forebay, forebay.checkpoint as ckpt
from forebay.checkpoint import _dcp
writer = ckpt.StorageWriter("s3://runs/left/a", client=forebay.Client("http://127.0.0.1:9"))
writer._writing = object()
_dcp._left = None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_node_that_is_killed_after_staged_finishes_the_flush(own):
    own.pause()
    wanted = state(3)
    saved = ckpt.save(wanted, "s3://runs/killed/step-3", client=own.client)
    assert saved.staged and not saved.durable
    with pytest.raises(forebay.Timeout, match="is not durable after 0.2 s"):
        saved.wait(0.2)
    own.kill()
    own.go_on()
    assert not [k for k in own.keys() if k.endswith("manifest.json")]
    own.start()
    again = ckpt.Checkpoint(own.client, saved.name, saved.id).wait(60)
    assert again.durable and same(ckpt.load(saved.name, client=own.client), wanted)
    data = own.get(f"killed/step-3/{saved.id}/state.pt")
    assert same(torch.load(io.BytesIO(data)), wanted)


def test_a_node_that_is_killed_before_the_commit_goes_on_or_leaves_nothing(own):
    name, data = "s3://runs/half/step-0", os.urandom(40 << 20)
    writing = _wire.Writing(own.client, name)
    # Of more than a part, which goes out at once.
    writing.put("large", [data])
    eventually(lambda: own.parts() == 3, "three parts are there")
    own.kill()
    own.start()
    assert [c["state"] for c in staged(own, "half/")] == ["staging"]
    writing.client = own.client
    writing.put("more", [b"more"])
    saved = writing.commit().wait(60)
    assert own.get(f"half/step-0/{saved.id}/large") == data
    ckpt.remove(name, client=own.client)
    # One that is given up.
    writing = _wire.Writing(own.client, "s3://runs/half/step-1")
    writing.put("data", [bytes(3 << 20)])
    writing.put("large", [data])
    eventually(lambda: own.parts() == 3, "three parts are there")
    assert own.keys() == []
    own.kill()
    own.start()
    writing.client = own.client
    writing.abandon()
    eventually(lambda: own.uploads() == [], "no upload is left")
    assert own.keys() == []
    with pytest.raises(forebay.NotFound, match="begin anew"):
        writing.commit()
    with pytest.raises(forebay.NotFound):
        ckpt.load("s3://runs/half/step-1", client=own.client)
    folder = own.directory / "node-0" / "cache" / "staged"
    eventually(lambda: list(folder.iterdir()) == [], "the disk is empty")


def test_large_files_go_out_before_the_commit(own):
    name, data = "s3://runs/early/step-1", os.urandom(40 << 20)
    writing = _wire.Writing(own.client, name)
    writing.put("data", [data])
    eventually(lambda: own.parts() == 3, "three parts are there")
    assert own.keys() == []
    saved = writing.commit()
    saved.wait(60)
    assert own.get(f"early/step-1/{saved.id}/data") == data
    assert own.uploads() == []
    # What is given up is aborted.
    writing = _wire.Writing(own.client, name)
    writing.put("data", [data])
    eventually(lambda: own.parts() == 3, "three parts are there")
    writing.abandon()
    eventually(lambda: own.uploads() == [], "no upload is left")
    assert own.get(f"early/step-1/{saved.id}/data") == data


def test_a_commit_that_names_what_was_not_uploaded_is_refused(site):
    writing = _wire.Writing(site.client, "s3://runs/short/step-1")
    writing.put("a", [b"aaa"])
    writing.add("b", 3)
    with pytest.raises(forebay.InvalidRequest, match='"b", which was not uploaded'):
        writing.commit()
    writing.abandon()
    assert site.keys("short/") == []


def test_the_removal_of_what_is_on_its_way_is_a_conflict(site):
    writing = _wire.Writing(site.client, "s3://runs/on-its-way/a")
    writing.put("data", [b"1234"])
    # A file of it is still to come from another node.
    pending = writing.commit(elsewhere={"more": 1})
    for retry_for in (0.0, 30.0):
        with pytest.raises(forebay.Conflict):
            ckpt.remove("s3://runs/on-its-way/a", client=site.client, retry_for=retry_for)
    pending.abandon()


def test_what_is_known_by_its_name_alone_can_be_given_up(site):
    writing = _wire.Writing(site.client, "s3://runs/by-name/a")
    writing.put("data", [b"1234"])
    writing.commit(elsewhere={"more": 1})
    known = ckpt.Checkpoint(site.client, "s3://runs/by-name/a")
    known.abandon()
    eventually(lambda: staged(site, "by-name/") == [], "it is given up")
    with pytest.raises(forebay.NotFound):
        known.abandon()
    # One that is durable stays, whether or not a copy is here.
    ckpt.save({"a": 1}, known.name, client=site.client).wait(60)
    for _ in range(2):
        known.abandon()
        eventually(lambda: staged(site, "by-name/") == [], "the copy is gone")
    assert ckpt.load(known.name, client=site.client) == {"a": 1}


def test_two_writers_of_one_name_are_refused_and_the_next_may(site):
    first = _wire.Writing(site.client, "s3://runs/two/step-1")
    with pytest.raises(forebay.Conflict, match="another writer"):
        ckpt.save({"a": 1}, "s3://runs/two/step-1", client=site.client)
    first.abandon()
    ckpt.save({"a": 1}, "s3://runs/two/step-1", client=site.client).wait(60)
    began = time.monotonic()
    with pytest.raises(forebay.AlreadyExists):
        ckpt.save(
            {"a": 2}, "s3://runs/two/step-1", client=site.client, overwrite=False, retry_for=120
        )
    assert time.monotonic() - began < 60
    with pytest.raises(FileExistsError):
        ckpt.save({"a": 2}, "s3://runs/two/step-1", client=site.client, overwrite=False)
    assert ckpt.load("s3://runs/two/step-1", client=site.client) == {"a": 1}


def test_a_reader_sees_the_former_one_or_the_new_one_whole(site):
    name = "s3://runs/replaced/last"
    mib = 6
    ckpt.save(state(0, mib), name, client=site.client, wait="durable")
    seen, stop, failures = [], threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                found = ckpt.load(name, client=site.client, durable=True)
            except forebay.Conflict:
                continue  # It was replaced three times while it was read.
            except Exception as e:
                failures.append(e)
                return
            step = found["step"]
            if not same(found, state(step, mib)):
                failures.append(AssertionError(f"step {step} is mixed"))
            seen.append(step)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 5):
        ckpt.save(state(step, mib), name, client=site.client, wait="durable")
    stop.set()
    reader.join()
    assert not failures and seen == sorted(seen), (failures, seen)
    assert ckpt.load(name, client=site.client)["step"] == 4
    assert len(site.keys("replaced/last/")) == 2, "what was replaced is gone"


def only_at_the_origin(site: Site, name: str, step: int) -> None:
    """Saves a checkpoint whose files nothing but the origin has."""
    tensors = {"step": torch.tensor(step), "w": torch.full((100_000,), float(step))}
    ckpt.save(tensors, name, client=site.client, wait="durable").abandon()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_load_of_what_is_replaced_meanwhile_begins_anew(site, monkeypatch, times):
    from forebay.checkpoint import _formats

    name, steps = f"s3://runs/meanwhile/{times}", [0]
    only_at_the_origin(site, name, 0)
    load_torch = _formats.load_torch

    def replaced(reading, **options):
        if steps[-1] < times:
            steps.append(steps[-1] + 1)
            only_at_the_origin(site, name, steps[-1])
        return load_torch(reading, **options)

    monkeypatch.setattr(_formats, "load_torch", replaced)
    if times < 3:
        found = ckpt.load(name, client=site.client)
        assert found["step"] == times and found["w"].eq(times).all()
        return
    with pytest.raises(forebay.Conflict, match="was replaced by .* while it was being read"):
        ckpt.load(name, client=site.client)
    assert ckpt.load(name, client=site.client)["step"] == 3


def test_what_is_removed_while_it_is_read_is_not_found(site):
    name = "s3://runs/meanwhile/removed"
    only_at_the_origin(site, name, 0)
    with _wire.Reading(site.client, name) as reading:
        ckpt.remove(name, client=site.client)
        with pytest.raises(forebay.NotFound, match="no checkpoint of this name"):
            reading.read("state.pt")


def test_a_reader_of_dcp_says_that_its_checkpoint_was_replaced(site, monkeypatch):

    name = "s3://runs/meanwhile/dcp"

    def save(value: float) -> None:
        writer = ckpt.StorageWriter(name, client=site.client)
        dcp.save({"w": torch.full((50_000,), value)}, storage_writer=writer, no_dist=True)
        writer.handle.wait(60).abandon()

    save(1.0)
    read_data = ckpt.StorageReader.read_data

    def replaced(self, *arguments):
        save(2.0)
        return read_data(self, *arguments)

    state = {"w": torch.zeros(50_000)}
    reader = ckpt.StorageReader(name, client=site.client)
    with monkeypatch.context() as patched:
        patched.setattr(ckpt.StorageReader, "read_data", replaced)
        with pytest.raises(dcp.CheckpointException, match="while it was being read") as e:
            dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(isinstance(failure, forebay.Conflict) for failure, _ in e.value.failures.values())
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["w"].eq(2).all()


@pytest.mark.parametrize("comes", [True, False])
def test_metadata_of_dcp_come_with_the_manifest(own, monkeypatch, comes):

    name, wanted = "s3://runs/first", {"w": torch.rand(100, 100)}
    writer = ckpt.StorageWriter(name, client=own.client)
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    asked: list[str] = []
    ask, submit = _wire.ask, _wire.Reading.submit

    def asks(client, method, path, body=None):
        answer = ask(client, method, path, body)
        if "question=" in path:
            # It is durable by now: the answer is fetched while the rest is read.
            return answer
        asked.append(path)
        content = answer.pop("content")
        assert content["name"] == ".metadata"
        # A node of an earlier release sends none.
        return {**answer, "content": content} if comes else answer

    def submits(self, file, start, target):
        asked.append(file)
        return submit(self, file, start, target)

    monkeypatch.setattr(_wire, "ask", asks)
    monkeypatch.setattr(_wire.Reading, "submit", submits)
    found = {"w": torch.zeros(100, 100)}
    reader = ckpt.StorageReader(name, client=own.client)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["w"], wanted["w"])
    assert ["manifest=true" in path for path in asked].count(True) == 1
    assert (".metadata" in asked) is not comes


def lent(node: Node) -> float:
    return node.metrics()["forebay_checkpoint_lent_total"]


def sent(node: Node) -> float:
    return node.metrics()["forebay_checkpoint_read_bytes_total"]


def test_what_is_staged_here_is_read_without_the_node(own):
    name = "s3://runs/lent/1"
    wanted = state(1)
    ckpt.save(wanted, name, client=own.client, wait="durable")
    before = sent(own.node)
    assert same(ckpt.load(name, client=own.client), wanted)
    assert lent(own.node) == 1
    assert sent(own.node) == before, "its bytes did not go over the socket"
    tensors = {"w": wanted["model"]["w"]}
    ckpt.save(tensors, f"{name}-st", client=own.client, format="safetensors")
    assert same(ckpt.load(f"{name}-st", client=own.client), tensors)
    assert (lent(own.node), sent(own.node)) == (2, before)
    # Not to a client that did not come over the node's socket.
    with _wire.Reading(own.client, name) as reading:
        path = reading.path("state.pt")
    request = urllib.request.Request(
        own.node.url + path,
        headers={"Connection": "upgrade", "Upgrade": "forebay-file", "Range": "bytes=0-0"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert (answer.status, len(answer.read())) == (206, 1)
    assert lent(own.node) == 2


@pytest.mark.parametrize("lends", [True, False])
def test_pieces_that_are_cancelled_end(own, monkeypatch, lends):
    name = "s3://runs/lent/cancelled"
    ckpt.save({"w": torch.zeros(32 << 20)}, name, client=own.client, wait="durable")
    before = sent(own.node)
    if not lends:
        monkeypatch.setattr(_wire.Reading, "borrow", lambda self, file: None)
    with _wire.Reading(own.client, name) as reading:
        found = bytearray(reading.sizes["state.pt"])
        pieces = reading.begin("state.pt", 0, memoryview(found))
        assert len(pieces) > 10
        for piece in reversed(pieces):
            piece.cancel()
        done, left = concurrent.futures.wait(pieces, timeout=30)
        assert not left
        assert any(piece.cancelled() for piece in done)
        assert all(piece.result() is None for piece in done if not piece.cancelled())
        reading.fill([("state.pt", 0, memoryview(found))])
    assert (sent(own.node) == before) == lends


def staged_files(own: Site) -> list[Path]:
    return sorted(own.directory.rglob("staged/*/f*"))


def test_a_lent_file_that_is_damaged_is_read_from_the_origin(own):
    name = "s3://runs/lent/damaged"
    wanted = state(2)
    ckpt.save(wanted, name, client=own.client, wait="durable")
    (file,) = staged_files(own)
    with file.open("r+b") as damaged:
        damaged.seek(5 << 20)
        damaged.write(b"damage")
    assert same(ckpt.load(name, client=own.client), wanted)
    assert lent(own.node) == 1
    # The node has noticed it, too, and dropped what is damaged.
    deadline = time.monotonic() + 30
    while staged_files(own):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert same(ckpt.load(name, client=own.client), wanted)
    assert lent(own.node) == 1


def test_the_room_of_a_lent_file_is_not_given_away_while_it_is_read(own):
    name = "s3://runs/lent/removed"
    ckpt.save(state(3), name, client=own.client, wait="durable")

    def here() -> list[str]:
        return [c["state"] for c in staged(own, "lent/removed")]

    assert here() == ["durable"]
    with _wire.Reading(own.client, name) as reading:
        assert reading.borrow("state.pt") is not None and lent(own.node) == 1
        ckpt.Checkpoint(own.client, name, reading.id).abandon()
        # Its name is gone, and its bytes are still there.
        assert staged_files(own) == []
        assert here() == ["removing"]
        read = reading.read("state.pt")
    eventually(lambda: not here(), "it waits for nobody")
    # It had not waited for as long as it may.
    assert "are still being read" not in own.node.log.read_text()
    assert lent(own.node) == 1
    assert bytes(read) == own.get(f"lent/removed/{reading.id}/state.pt")


def test_few_files_are_borrowed_at_a_time(own, monkeypatch):
    monkeypatch.setattr(_wire, "_BORROWED_FILES", 2)
    name = "s3://runs/lent/many"
    writing = _wire.Writing(own.client, name)
    contents = {f"f{i}": random.Random(i).randbytes(2 << 20) for i in range(6)}
    for file, data in contents.items():
        writing.put(file, [data])
    writing.commit()
    with _wire.Reading(own.client, name) as reading:
        for _ in range(2):
            begun = [reading.submit(file, 5, memoryview(bytearray(2**20))) for file in contents]
            for future in begun:
                future.result()
        for file, data in contents.items():
            assert reading.read(file) == data
        assert len(reading._borrowed) == 2


def test_files_that_wait_are_borrowed_ahead_if_the_node_lends_them(own, monkeypatch):
    name, data = "s3://runs/lent/ahead", os.urandom(2 << 20)
    writing = _wire.Writing(own.client, name)
    for n in range(3):
        writing.put(f"f{n}", [data])
    writing.commit()
    for lends in (True, False):
        before = lent(own.node)
        with _wire.Reading(own.client, name) as reading:
            held = [(f"f{n}", memoryview(bytearray(2 << 20))) for n in range(3)]
            with monkeypatch.context() as patch:
                patch.setattr(reading._pool_here, "submit", lambda work: None)
                pieces = [reading.submit(file, 0, target) for file, target in held]
                if not lends:
                    patch.setattr(reading, "path", lambda file: "/v1/checkpoints/runs/no?file=no")
                reading.borrow_ahead()
            assert lent(own.node) - before == (3 if lends else 0)
            for _ in pieces:
                reading._pool_here.submit(reading._read_next)
            _wire.finish(pieces)
            assert [target for _, target in held] == [data] * 3
            # After the first one that was not lent, no other was asked for ahead.
            assert lent(own.node) - before == (3 if lends else 2)


def test_each_thread_reads_a_file_of_its_own_in_order(monkeypatch):
    read: list[tuple[str, int]] = []
    with _wire.Reading.__new__(_wire.Reading) as reading:
        reading.open(None, "s3://runs/lent/turns", {"a": 2 << 20, "b": 4 << 20, "c": 1 << 20})
        monkeypatch.setattr(
            reading,
            "_borrow_into",
            lambda file, piece: read.extend((file, part.start) for part in piece),
        )
        # Two threads that are told when, in place of a pool.
        monkeypatch.setattr(reading._pool_here, "submit", lambda work: None)
        for file, size in reading.sizes.items():
            for start in range(0, size, 1 << 20):
                reading.submit(file, start, memoryview(bytearray(1 << 20)))
        pool = concurrent.futures.ThreadPoolExecutor
        with pool(1) as one, pool(1) as other:
            for thread in (one, other, one, other, one, other, one):
                thread.submit(reading._read_next).result()
        assert not reading._waiting
    # The first thread has two files one after the other, and then helps with the second one's.
    turns = ["a0", "b0", "a1", "b1", "c0", "b2", "b3"]
    assert [f"{file}{start >> 20}" for file, start in read] == turns


def test_parts_that_share_a_block_are_one_piece(monkeypatch):
    pieces: list[list[int]] = []
    with _wire.Reading.__new__(_wire.Reading) as reading:
        reading.open(None, "s3://runs/lent/parts", {"a": 64 << 20, "b": 64 << 20})
        monkeypatch.setattr(
            reading, "_borrow_into", lambda _, piece: pieces.append([p.start for p in piece])
        )
        work: list[object] = []
        monkeypatch.setattr(reading._pool_here, "submit", work.append)

        def ask(file: str, start: int, end: int) -> None:
            reading.begin(file, start, memoryview(bytearray(end - start)))

        block, piece = _wire._BLOCK_BYTES, _wire._PIECE_BYTES
        # Each begins in the block in which the last one ended: one read, until a piece ends.
        ask("a", 64, block + 64)
        ask("a", block + 128, block + 192)
        ask("a", block + 192, piece + 5)
        ask("a", piece + 64, piece + 2 * block)
        # These are reads of their own: in other blocks, in another file, and before the others.
        ask("a", piece + 2 * block, piece + 2 * block + 9)
        ask("a", piece + 3 * block, piece + 3 * block + 9)
        ask("b", 0, 9)
        ask("a", 0, 64)
        for each in work:
            each()
        assert not reading._waiting
    assert sorted(pieces) == [
        [0],
        [0],
        [64, block + 128, block + 192],
        [piece, piece + 64],
        [piece + 2 * block],
        [piece + 3 * block],
    ]


def test_each_part_of_a_piece_ends_though_not_all_can_be_handed_on(monkeypatch):
    with _wire.Reading.__new__(_wire.Reading) as reading:
        reading.open(None, "s3://runs/lent/ends", {"a": 64 << 20})
        given: list[tuple[object, ...]] = []

        def give(*work: object) -> None:
            if len(given) == 2:
                raise OSError("no more threads")
            given.append(work)
            if len(given) == 1:
                work[1].set_running_or_notify_cancel()

        monkeypatch.setattr(reading, "borrow", lambda file: None)
        monkeypatch.setattr(reading._pool_here, "submit", lambda work: None)
        monkeypatch.setattr(reading._pool, "submit", give)
        parts = [reading.submit("a", at, memoryview(bytearray(9))) for at in range(0, 45, 9)]
        assert parts[1].cancel()
        reading._read_next()
        first, _, second, *rest = parts
        assert [work[1] for work in given] == [first, second]
        # Only those who were given a part end it.
        assert first.running() and not second.done()
        for part in rest:
            with pytest.raises(OSError, match="no more threads"):
                part.result(0)
        assert second.cancel()


@pytest.mark.parametrize("is_given", [True, False])
def test_no_piece_is_left_behind_for_which_no_thread_comes(monkeypatch, is_given):
    with _wire.Reading.__new__(_wire.Reading) as reading:
        reading.open(None, "s3://runs/lent/left", {"a": 64 << 20})
        work: list[object] = []

        def give(each: object) -> None:
            if is_given:
                work.append(each)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(reading._pool_here, "submit", give)
        with pytest.raises(RuntimeError, match="new thread"):
            reading.submit("a", 0, memoryview(bytearray(9)))
        assert not reading._waiting
        # A thread that had other work may come for it.
        for each in work:
            each()
        monkeypatch.setattr(reading._pool_here, "submit", work.append)
        monkeypatch.setattr(
            reading, "_borrow_into", lambda _, piece: piece[0].done.set_result(None)
        )
        done = reading.submit("a", 0, memoryview(bytearray(9)))
        work[-1]()
        assert done.done() and not reading._waiting


def test_parts_of_a_lent_piece_that_cannot_be_read_can_be_cancelled():
    asked, goes_on = threading.Event(), threading.Event()
    starts: list[int] = []

    class Lent:
        """Its blocks are damaged."""

        def read_into(self, parts):
            raise OSError("damaged")

        def close(self):
            pass

    class Node:
        def _borrow(self, path):
            return Lent()

        def _read_into(self, path, start, target):
            starts.append(start)
            if start == 0:
                asked.set()
            assert goes_on.wait(30)

    with _wire.Reading.__new__(_wire.Reading) as reading:
        reading.open(Node(), "s3://runs/lent/cancelled", {"a": 64 << 20})
        reading.id = ""
        # All threads are busy with other parts of the same piece.
        many = 3 * _wire._PARALLEL
        work: list[object] = []
        give, reading._pool_here.submit = reading._pool_here.submit, work.append
        parts = [reading.submit("a", at, memoryview(bytearray(9))) for at in range(0, 9 * many, 9)]
        assert len(work) == 1
        give(work[0])
        assert asked.wait(30)
        assert parts[-1].cancel()
        goes_on.set()
        _wire.finish(parts[:-1])
        assert _wire.wait(parts, 30).not_done == set()
    assert sorted(starts) == list(range(0, 9 * (many - 1), 9))


def test_tensors_that_share_their_memory_are_read_from_a_lent_file(own):

    name = "s3://runs/lent/tied"
    values = [torch.full((500_000,), float(n)) for n in range(4)]
    writer = ckpt.StorageWriter(name, client=own.client, threads=1)
    dcp.save(dict(zip("abcd", values, strict=True)), storage_writer=writer, no_dist=True)
    writer.handle.wait(60)
    before, asked = lent(own.node), sent(own.node)
    first, tied, last = (torch.full((500_000,), 9.0) for _ in range(3))
    found = {"a": first, "b": tied, "c": tied, "d": last}
    dcp.load(found, storage_reader=ckpt.StorageReader(name, client=own.client), no_dist=True)
    assert first.eq(0).all() and last.eq(3).all()
    # Threads may take turns to write into this memory, but what they read was verified.
    assert set(tied.unique().tolist()) <= {1.0, 2.0}
    assert lent(own.node) == before + 1
    # All but the metadata came without the node.
    assert sent(own.node) - asked < 64 << 10


def test_an_origin_that_refuses_is_told_and_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_wire, "_TOLD_SECONDS", 0.5)
    site = Site(tmp_path, env={"AWS_SECRET_ACCESS_KEY": "not it"})
    try:
        saved = ckpt.save(state(1, 1), "s3://runs/refused/a", client=site.client, deadline=1)
        with pytest.raises(forebay.Timeout) as caught:
            saved.wait(9)
        assert caught.value.hint and "403" in caught.value.hint
        # Whoever waits without an end would learn it in no other way.
        told = [r.getMessage() for r in caplog.records if r.name == "forebay"]
        assert any(re.match(r"s3://runs/refused/a is not durable: .*403", m) for m in told), told
        status = saved.status()
        assert status["state"] in ("failed", "flushing") and status["failures"] > 0
        assert status["late"]
        metrics = site.node.metrics()
        assert metrics["forebay_checkpoint_failures_total"] > 0
        assert metrics["forebay_checkpoints_late_total"] == 1
        assert metrics["forebay_checkpoints_overdue"] == 1
        (told,) = json_lines(command(site, "list", "--pending", "--json"))
        assert "failed" in told["why"] and "403" in told["why"] and "to be durable" in told["why"]
        assert metrics["forebay_checkpoint_staged_bytes"] > 1 << 20
        assert metrics["forebay_checkpoint_oldest_seconds"] > 1
        assert same(ckpt.load(saved.name, client=site.client), state(1, 1))
        assert site.keys() == []
        # With the right secret it goes on.
        site.kill()
        site.options = {}
        site.start()
        ckpt.Checkpoint(site.client, saved.name, saved.id).wait(60)
    finally:
        site.close()


def test_a_checkpoint_that_does_not_fit_is_refused_with_what_to_do(tmp_path):
    site = Site(tmp_path, cache_size="64MiB")
    try:
        with pytest.raises(forebay.ServerError, match="no room to stage") as caught:
            ckpt.save(state(1, 40), "s3://runs/big/a", client=site.client)
        assert caught.value.status == 507 and "checkpoints.room" in str(caught.value)
        assert site.keys() == []
        # And all of its room is there again.
        ckpt.save(state(1, 20), "s3://runs/big/b", client=site.client, wait="durable")
        # One that takes nearly all there is comes through to its end.
        ckpt.save(state(1, 28), "s3://runs/big/c", client=site.client, wait="durable")
    finally:
        site.close()


def test_a_bucket_that_is_only_read_is_refused_at_once(origin, tmp_path):
    web = ["--origin", "web=http://127.0.0.1:9/files"]
    node = Node(origin.url, ["scratch"], tmp_path / "node", options=web)
    try:
        with pytest.raises(forebay.Unsupported, match="could never be durable.*read-only"):
            ckpt.save({"a": 1}, "s3://web/run/1", client=forebay.Client(node.url))
    finally:
        node.stop()


def test_what_is_durable_here_is_loaded_though_the_origin_hangs(own):
    ckpt.save(state(1, 2), "s3://runs/hangs/a", client=own.client, wait="durable")
    own.pause()
    began = time.monotonic()
    assert same(ckpt.load("s3://runs/hangs/a", client=own.client), state(1, 2))
    assert time.monotonic() - began < 30


def shard_of(row: int, rows: int):
    """An item of a plan: rows of 8 KiB of a tensor of 8 GiB."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([rows, 4096]))
    data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size([1 << 20, 4096]))
    return WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def test_the_room_that_is_asked_for_is_that_of_a_ranks_shards():
    from forebay.checkpoint import _dcp
    from torch.distributed.checkpoint.planner import SavePlan

    shards, whole = 2 * 1024 * 4096 * 2, 2 * (1 << 20) * 4096
    room = _dcp._bytes_of(SavePlan([shard_of(0, 1024), shard_of(1024, 1024)]))
    assert shards < room < shards + (8 << 20) < whole


def test_the_files_of_a_rank_grow():
    from forebay.checkpoint import _dcp

    def files_of(rows: list[int], threads: int) -> list[list[int]]:
        files = _dcp._files_of([shard_of(0, n) for n in rows], threads)
        return [[item.tensor_data.chunk.sizes[0] for item in file] for file in files]

    mib = 128
    tensors = [len(file) for file in files_of([60 * mib] * 16, 2)]
    assert tensors == [1, 1, 1, 1, 2, 2, 4, 4]
    tensors = [len(file) for file in files_of([mib] * 4096, 2)]
    assert tensors == [32, 32, 64, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 32, 32]
    assert files_of([], 2) == []
    assert files_of([0, 0, 0], 2) == [[0, 0, 0]]
    rng = random.Random(11)
    for _ in range(300):
        threads = rng.randrange(1, 6)
        largest = rng.choice([2, 4 * mib, 700 * mib])
        rows = [rng.randrange(largest) for _ in range(rng.randrange(200))]
        files = files_of(rows, threads)
        assert [n for file in files for n in file] == rows
        for number, file in enumerate(files):
            most = min(32 << number // threads, 512) * mib
            assert sum(file) <= most or len(file) == 1


def test_a_full_disk_under_a_checkpoint(tmp_path):
    from test_cluster_disks import mounted

    with mounted(tmp_path / "node-0" / "cache", "-t", "tmpfs", "-o", "size=48m", "none") as cache:
        site = Site(tmp_path, cache_size="1GiB")
        try:
            with pytest.raises(forebay.ServerError) as caught:
                ckpt.save(state(1, 60), "s3://runs/full/a", client=site.client)
            assert caught.value.status == 507, caught.value
            assert site.keys() == []
            deadline = time.monotonic() + 60
            while list((cache / "staged").iterdir()) and time.monotonic() < deadline:
                time.sleep(0.05)
            ckpt.save(state(1, 8), "s3://runs/full/b", client=site.client, wait="durable")
        finally:
            site.close()


def test_a_durable_checkpoint_makes_room_for_the_next_on_a_full_disk(tmp_path):
    from test_cluster_disks import mounted

    with mounted(tmp_path / "node-0" / "cache", "-t", "tmpfs", "-o", "size=48m", "none") as cache:
        site = Site(tmp_path, cache_size="1GiB")
        try:
            name = "s3://runs/full/last"
            ckpt.save(state(1, 4), name, client=site.client, wait="durable")
            site.pause()
            second = ckpt.save(state(2, 4), name, client=site.client)
            # Others take all that is left.
            with (cache / "other").open("wb", buffering=0) as other, pytest.raises(OSError):
                while True:
                    other.write(bytes(4096))
            site.go_on()
            second.wait(60)
            assert [c["id"] for c in staged(site, "full/")] == [second.id]
            assert same(ckpt.load(name, client=site.client), state(2, 4))
        finally:
            site.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["save", "async"])
def test_dcp_saves_and_loads_at_another_world_size(site, what):
    name = f"s3://runs/dcp/{what}"
    ranks(2, what, site.node.url, name, 5)
    keys = site.keys(f"dcp/{what}/")
    assert f"dcp/{what}/.metadata" in keys and f"dcp/{what}/manifest.json" in keys
    ranks(1, "load", site.node.url, name, 5)
    # A node that has nothing reads each byte from the origin once, for three ranks.
    other = Node(site.origin.url, ["runs"], site.directory / f"cold-{what}")
    try:
        ranks(3, "load", other.url, name, 5)
        size = sum(len(site.get(k)) for k in keys if "distcp" in k)
        read = sum(
            value
            for sample, value in other.metrics().items()
            if sample.startswith("forebay_origin_received_bytes_total")
        )
        assert 0.9 * size < read < 1.1 * size + (4 << 20), (size, read)
    finally:
        other.stop()


def test_saves_of_one_writer_may_overlap(site):
    """Each is one of its own: none gives up what another has staged, or takes it for its own."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    reached, go = threading.Event(), threading.Event()

    class Held(DefaultSavePlanner):
        fails = False

        def resolve_data(self, item):
            reached.set()
            assert go.wait(60)
            if self.fails:
                raise RuntimeError("no")
            return super().resolve_data(item)

    writer = ckpt.StorageWriter(client=site.client)

    def begin(name, value, planner=None):
        how = {"storage_writer": writer, "planner": planner, "no_dist": True}
        return dcp.async_save({"w": torch.full((50_000,), value)}, checkpoint_id=name, **how)

    def found(name):
        held = {"w": torch.zeros(50_000)}
        reader = ckpt.StorageReader(name, client=site.client)
        dcp.load(held, storage_reader=reader, no_dist=True)
        return held["w"].unique().tolist()

    first = begin("s3://runs/over/a", 1.0, Held())
    assert reached.wait(60)
    begin("s3://runs/over/b", 2.0).result()
    assert writer.handle.name == "s3://runs/over/b"
    go.set()
    first.result()
    assert writer.handle.name == "s3://runs/over/a"
    assert found("s3://runs/over/a") == [1.0] and found("s3://runs/over/b") == [2.0]
    # One that fails meanwhile takes none with it, and leaves nothing staged.
    reached.clear()
    go.clear()
    planner = Held()
    planner.fails = True
    first = begin("s3://runs/over/c", 3.0, planner)
    assert reached.wait(60)
    second = begin("s3://runs/over/d", 4.0)
    go.set()
    with pytest.raises(dcp.CheckpointException, match="no"):
        first.result()
    second.result()
    assert found("s3://runs/over/d") == [4.0]
    writer.handle.wait(60)
    assert not staged(site, "over/c") and not site.keys("over/c")


def test_a_save_keeps_its_name_whatever_another_one_sets(site):
    class Writer(ckpt.StorageWriter):
        """Another save begins as soon as one has set its name."""

        def __setattr__(self, name, value):
            is_named = name == "path" and value is not None
            super().__setattr__(name, "s3://runs/over/other" if is_named else value)

    writer = Writer(client=site.client)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="s3://runs/over/mine")
    assert writer.handle.name == "s3://runs/over/mine"
    assert writer.storage_meta().checkpoint_id == "s3://runs/over/mine"


IN_A_PROCESS = """
import sys
import forebay
import forebay.checkpoint as ckpt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    port, url, name = sys.argv[1:]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    client = forebay.Client(url)
    writer = ckpt.StorageWriter(name, client=client)
    process = AsyncCheckpointerType.PROCESS
    state = {"w": torch.arange(100_000.0)}
    dcp.async_save(state, storage_writer=writer, async_checkpointer_type=process).result()
    assert writer.handle is None
    assert ckpt.Checkpoint(client, name).wait(60).durable
    dist.destroy_process_group()
"""


def test_dcp_saves_from_a_process_of_its_own(site, tmp_path):

    program, name = tmp_path / "save.py", "s3://runs/process"
    program.write_text(IN_A_PROCESS)
    run = [sys.executable, program, str(free_port()), site.node.url, name]
    # The environment of a launcher, from which PyTorch's other process takes where it is.
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": run[2]}
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {"w": torch.zeros(100_000)}
    reader = ckpt.StorageReader(name, client=site.client)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["w"], torch.arange(100_000.0))


def test_conjugated_and_negated_tensors_are_what_they_say(site):

    numbers = torch.randn(200, 300, dtype=torch.complex64)
    wanted = {"conj": numbers.conj(), "neg": torch._neg_view(numbers.real.contiguous())}
    assert wanted["conj"].is_conj() and wanted["neg"].is_neg()
    name = "s3://runs/lazy"
    dcp.save(wanted, storage_writer=ckpt.StorageWriter(name, client=site.client), no_dist=True)
    for as_views in (False, True):
        found = {k: torch.zeros_like(v.resolve_conj().resolve_neg()) for k, v in wanted.items()}
        if as_views:
            found = {"conj": found["conj"].conj(), "neg": torch._neg_view(found["neg"])}
        dcp.load(found, storage_reader=ckpt.StorageReader(name, client=site.client), no_dist=True)
        assert all(torch.equal(found[k], v) for k, v in wanted.items()), as_views


def test_other_readers_of_dcp_read_it_and_this_reads_theirs(site):
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter

    wanted = state(6)["model"]
    writer = ckpt.StorageWriter("s3://runs/foreign/ours", client=site.client)
    dcp.save({"model": wanted}, storage_writer=writer, no_dist=True)
    writer.handle.wait(60)
    options = {"client_kwargs": {"endpoint_url": site.origin.url}}
    found = {"model": {k: torch.zeros_like(v) for k, v in wanted.items()}}
    reader = FsspecReader("s3://runs/foreign/ours", **options)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert same(found["model"], wanted)
    theirs = FsspecWriter("s3://runs/foreign/theirs", **options)
    dcp.save({"model": wanted}, storage_writer=theirs, no_dist=True)
    found = {"model": {k: torch.zeros_like(v) for k, v in wanted.items()}}
    reader = ckpt.StorageReader("s3://runs/foreign/theirs", client=site.client)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert same(found["model"], wanted)


def test_metadata_of_one_rank_are_those_of_a_checkpoint_that_each_rank_saved_by_itself(site):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

    wanted = {"w": torch.rand(300, 300), "note": "kept"}
    name = "s3://runs/of-a-rank/ours"
    dcp.save(wanted, storage_writer=ckpt.StorageWriter(name, client=site.client), no_dist=True)
    # DCP asks so at a rank that failed to get the metadata of all, which alone would go on then.
    reader = ckpt.StorageReader(name, client=site.client)
    with pytest.raises(forebay.NotFound):
        reader.read_metadata(rank=0)
    assert reader.read_metadata().state_dict_metadata.keys() == wanted.keys()

    # What `dcp.save(use_collectives=False)` does.
    name = "s3://runs/of-a-rank/theirs"
    theirs = FsspecWriter(name, client_kwargs={"endpoint_url": site.origin.url})
    planner = DefaultSavePlanner()
    planner.set_up_planner(wanted, None, True)
    theirs.set_up_storage_writer(True, rank=0, use_collectives=False)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    plans = theirs.prepare_global_plan(plans)
    results = theirs.write_data(planner.finish_plan(plans[0]), planner).wait()
    theirs.finish(metadata, [results])
    assert "of-a-rank/theirs/__0.metadata" in site.keys("of-a-rank/theirs/")
    found = {"w": torch.zeros(300, 300), "note": ""}
    dcp.load(found, storage_reader=ckpt.StorageReader(name, client=site.client), no_dist=True)
    assert same(found, wanted)


def test_a_node_that_cannot_be_reached_is_waited_for_once_by_a_load(monkeypatch):
    asked, ask = [], _wire.ask

    def counted(client, method, path, *args, **kwargs):
        asked.append(path)
        return ask(client, method, path, *args, **kwargs)

    monkeypatch.setattr(_wire, "ask", counted)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        client = forebay.Client(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        reader = ckpt.StorageReader("s3://runs/x", client=client, retry_for=0.3)
        with pytest.raises(forebay.Error) as first:
            reader.read_metadata()
        count = len(asked)
        assert count > 1
        # As DCP asks then.
        with pytest.raises(forebay.Error) as second:
            reader.read_metadata(rank=0)
        assert second.value is first.value and len(asked) == count


def test_tensors_are_aligned_in_files_as_they_are_in_memory(site):

    wanted = {f"{n}": torch.rand(n) for n in (1, 77, 20_001, 50_003, 99_999)}
    name = "s3://runs/aligned/a"
    writer = ckpt.StorageWriter(name, client=site.client, threads=1)
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    infos = ckpt.StorageReader(name, client=site.client).read_metadata().storage_data.values()
    assert len({info.relative_path for info in infos}) == 1
    assert [info.offset % 64 for info in infos] == [0] * 5
    data_at = [info.forebay["data"][0] for info in infos if "data" in info.forebay]
    assert [at % 64 for at in data_at] == [0] * 3

    saved = ckpt.save(
        wanted, "s3://runs/aligned/st", client=site.client, format="safetensors", wait="durable"
    )
    file = site.get(f"aligned/st/{saved.id}/model.safetensors")
    assert (8 + int.from_bytes(file[:8], "little")) % 64 == 0


def test_ranges_are_cut_where_blocks_end():
    reading, rng = _wire.Reading.__new__(_wire.Reading), random.Random(9)
    asked: list[tuple[int, int]] = []
    reading.submit = lambda file, start, target: asked.append((start, target.nbytes))
    piece, edges = _wire._PIECE_BYTES, [-1, 0, 1]
    target = memoryview(bytearray(3 * piece))
    for _ in range(200):
        start = max(0, rng.randrange(3) * piece + rng.choice([*edges, rng.randrange(piece)]))
        length = max(0, rng.randrange(3) * piece + rng.choice([*edges, rng.randrange(piece)]))
        asked.clear()
        assert len(reading.begin("f", start, target[:length])) == len(asked)
        at = start
        for begin, count in asked:
            assert begin == at and 0 < count and begin // piece == (begin + count - 1) // piece
            at += count
        assert at == start + length


def staged(site, prefix: str) -> list[dict]:
    """What the node has on its disk under names that begin so."""
    found = _wire.ask(site.client, "GET", "/v1/checkpoints")["checkpoints"]
    return [c for c in found if c["prefix"].startswith(prefix)]


def test_a_save_of_dcp_that_fails_leaves_nothing_at_the_node(site):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    class Fails(DefaultSavePlanner):
        def resolve_data(self, item):
            raise ValueError("as asked")

    wanted = {"w": torch.ones(300, 300)}
    for planner, says in (
        (Fails(), "as asked"),
        (DefaultSavePlanner(enable_plan_caching=True), "a planner that uses its plans again"),
    ):
        writer = ckpt.StorageWriter("s3://runs/dcp-failed/a", client=site.client)
        with pytest.raises(dcp.CheckpointException, match=says):
            dcp.save(wanted, storage_writer=writer, planner=planner, no_dist=True)
        assert staged(site, "dcp-failed/") == []
    # Where another rank has failed, the coordinator is not told; its next save gives it up.
    writer = ckpt.StorageWriter("s3://runs/dcp-failed/b", client=site.client)
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([]))])
    assert [c["state"] for c in staged(site, "dcp-failed/b")] == ["staging"]
    del writer
    writer = ckpt.StorageWriter("s3://runs/dcp-failed/c", client=site.client)
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    assert staged(site, "dcp-failed/b") == []
    writer.handle.wait(60)
    # Or the next save of the same writer, whose name may be the same.
    writer = ckpt.StorageWriter("s3://runs/dcp-failed/d", client=site.client)
    for _ in range(2):
        writer.set_up_storage_writer(True)
        writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([]))])
        assert [c["state"] for c in staged(site, "dcp-failed/d")] == ["staging"]
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    assert writer.handle.wait(60).durable


def test_pytorch_before_dcp_had_extensions_will_do(site, monkeypatch):
    name, wanted = "s3://runs/dcp-without-extensions", {"w": torch.rand(10, 10)}
    dcp.save(wanted, storage_writer=ckpt.StorageWriter(name, client=site.client), no_dist=True)
    reader = ckpt.StorageReader(name, client=site.client)
    read = reader.read_metadata

    def read_metadata(*args, **kwargs):
        metadata = read(*args, **kwargs)
        for info in metadata.storage_data.values():
            vars(info).pop("transform_descriptors", None)
        return metadata

    monkeypatch.setattr(reader, "read_metadata", read_metadata)
    monkeypatch.delattr(_StorageInfo, "transform_descriptors", raising=False)
    found = {"w": torch.zeros(10, 10)}
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["w"].equal(wanted["w"])


def test_slabs_are_the_parts_of_a_stored_tensor():
    from forebay.checkpoint._dcp import _slabs

    rng = random.Random(5)
    for _ in range(300):
        shape = [rng.choice([1, 1, 2, 3, 7, 20]) for _ in range(rng.randrange(4))]
        offsets = [rng.randrange(n) for n in shape]
        lengths = [rng.randrange(1, n - o + 1) for n, o in zip(shape, offsets, strict=True)]
        whole = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
        wanted = whole
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            wanted = wanted.narrow(dim, offset, length)
        most, found = rng.choice([1, 5, 21, 10_000]), torch.full(lengths, -1)
        for slab in _slabs(shape, offsets, lengths, most):
            count = int(torch.tensor(slab.shape).prod())
            assert count <= most
            stored = whole.reshape(-1)[slab.first : slab.first + count].reshape(slab.shape)
            slab.copier(stored, found)()
        assert torch.equal(found, wanted), (shape, offsets, lengths, most)


def test_what_is_not_read_in_place_takes_bounded_memory(site, monkeypatch):
    from forebay.checkpoint import _dcp
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

    wanted = {str(i): torch.rand(500, 700 + i) for i in range(6)}
    ours, theirs = "s3://runs/bounded/ours", "s3://runs/bounded/theirs"
    writer = ckpt.StorageWriter(ours, client=site.client)
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    options = {"client_kwargs": {"endpoint_url": site.origin.url}}
    dcp.save(wanted, storage_writer=FsspecWriter(theirs, **options), no_dist=True)
    held, read = [], []
    hold = _dcp._Batch.hold

    def counted(self, file, start, memory, use):
        hold(self, file, start, memory, use)
        held.append(self._held)
        read.append(memory.nbytes)

    monkeypatch.setattr(_dcp._Batch, "hold", counted)
    for name in ("_SLAB_BYTES", "_TOGETHER_BYTES"):
        monkeypatch.setattr(_dcp, name, 1 << 20)
    monkeypatch.setattr(_dcp, "_HELD_BYTES", 3 << 20)
    for name in (ours, theirs):
        held.clear()
        read.clear()
        # Of another type: nothing of it can be read in place.
        found = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in wanted.items()}
        reader = ckpt.StorageReader(name, client=site.client)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert all(torch.equal(found[k], v.double()) for k, v in wanted.items())
        assert max(held) <= 3 << 20 and sum(read) >= 6 * 500 * 700 * 4, (name, held)


def test_ranks_that_have_two_checkpoints_of_one_name_are_told(tmp_path):
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan

    # A node that cannot send what it has, and one that can.
    one = Site(tmp_path, env={"AWS_SECRET_ACCESS_KEY": "not it"})
    other = Node(one.origin.url, ["runs"], tmp_path / "other")
    try:
        clients = [one.client, forebay.Client(other.url)]
        for client, value in zip(reversed(clients), (1.0, 2.0), strict=True):
            writer = ckpt.StorageWriter("s3://runs/last", client=client)
            dcp.save({"w": torch.full((3,), value)}, storage_writer=writer, no_dist=True)
            if client is clients[1]:
                writer.handle.wait(60)
        readers = [ckpt.StorageReader("s3://runs/last", client=client) for client in clients]
        for rank, reader in enumerate(readers):
            reader.set_up_storage_reader(reader.read_metadata(), rank == 0)
        plans = readers[0].prepare_global_plan([LoadPlan([]), LoadPlan([])])
        readers[0].read_data(plans[0], DefaultLoadPlanner())
        with pytest.raises(forebay.Conflict, match="at that of rank 0") as e:
            readers[1].read_data(plans[1], DefaultLoadPlanner())
        assert "durable" in e.value.hint
    finally:
        other.stop()
        one.close()


def test_ranks_at_several_nodes_make_one_checkpoint(site):
    other = Node(site.origin.url, ["runs"], site.directory / "second")
    try:
        there = forebay.Client(other.url)
        first = _wire.Writing(site.client, "s3://runs/wide/a")
        second = _wire.Writing(there, "s3://runs/wide/a", id=first.id, part="r1")
        first.put("r0", [b"0" * 100])
        second.put("r1", [b"1" * 200])
        saved = first.commit(elsewhere={"r1": 200})
        with pytest.raises(forebay.Timeout):
            saved.wait(1.5)
        assert not [k for k in site.keys("wide/") if k.endswith("manifest.json")]
        second.commit()
        saved.wait(60)
        with _wire.Reading(site.client, "s3://runs/wide/a") as reading:
            assert reading.read("r1") == b"1" * 200
    finally:
        other.stop()


def test_keep_removes_old_ones_and_never_the_newest(site, monkeypatch):
    def save(step: int) -> None:
        ckpt.save({"step": step}, f"s3://runs/kept/step-{step}", client=site.client, wait="durable")

    for step in (8, 9, 10, 11):
        save(step)
    ckpt.save({"best": 1}, "s3://runs/kept/best", client=site.client, wait="durable")
    own = {"client": site.client, "pattern": "step-*"}
    gone = ckpt.keep("s3://runs/kept", last=2, **own)
    assert gone == ["s3://runs/kept/step-8", "s3://runs/kept/step-9"]
    assert site.keys("kept/step-8") == []
    assert ckpt.load("s3://runs/kept/best", client=site.client) == {"best": 1}
    time.sleep(0.05)
    assert ckpt.keep("s3://runs/kept", max_age=0, **own) == ["s3://runs/kept/step-10"]
    assert ckpt.load("s3://runs/kept/step-11", client=site.client) == {"step": 11}
    # One that is not durable does not count.
    writing = _wire.Writing(site.client, "s3://runs/kept/step-12")
    assert ckpt.keep("s3://runs/kept", last=1, **own) == []
    writing.abandon()
    # One that somebody replaces is passed over, and the others go.
    for step in (12, 13, 14, 15):
        save(step)
    listed = _wire.listed

    def touched(client, where, pattern):
        found = listed(client, where, pattern)
        for checkpoint in found:
            if checkpoint.name.endswith("step-13"):
                ckpt.remove(checkpoint.name, client=client)
                save(13)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(_wire, "listed", touched)
        gone = ckpt.keep("s3://runs/kept", last=1, **own)
    assert gone == [f"s3://runs/kept/step-{step}" for step in (11, 12, 14)]
    assert ckpt.load("s3://runs/kept/step-13", client=site.client) == {"step": 13}


def test_checkpoints_directly_in_a_bucket_are_listed_and_kept(own):
    for step in (1, 2):
        ckpt.save({"step": step}, f"s3://runs/step-{step}", client=own.client, wait="durable")
    # Deeper ones are not directly there.
    ckpt.save({}, "s3://runs/deeper/step-0", client=own.client, wait="durable")
    for where in ("s3://runs", "s3://runs/", "runs"):
        found = ckpt.list_durable(where, client=own.client)
        assert [c.name for c in found] == ["s3://runs/step-1", "s3://runs/step-2"], where
    assert ckpt.keep("s3://runs", last=1, client=own.client) == ["s3://runs/step-1"]
    for where, says in (("s3://", "names no bucket"), (5, "not a int"), ("x://a", "is not the")):
        with pytest.raises(forebay.InvalidRequest, match=says):
            ckpt.list_durable(where, client=own.client)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "neither how many nor how old"),
        ({"last": 0}, "last=0"),
        ({"last": 1.5}, "last=1.5"),
        ({"last": True}, "last=True"),
        ({"last": "3"}, "last='3'"),
        ({"max_age": -1}, "max_age=-1"),
        ({"max_age": float("nan")}, "max_age=nan"),
        ({"max_age": float("inf")}, "max_age=inf"),
        ({"max_age": "x"}, "max_age='x'"),
        ({"max_age": datetime.timedelta(-1)}, "max_age=-86400"),
        ({"last": 1, "pattern": ""}, "pattern=''"),
        ({"last": 1, "pattern": 5}, "pattern=5"),
    ],
)
def test_keep_refuses_what_makes_no_sense_before_it_looks(monkeypatch, wrong, says):
    monkeypatch.setattr(_wire, "listed", lambda *_: pytest.fail("it looked"))
    client = forebay.Client("http://127.0.0.1:9")
    with pytest.raises(forebay.InvalidRequest, match=re.escape(says)):
        ckpt.keep("s3://runs/kept", client=client, **wrong)


def test_manifests_of_something_else_are_passed_over(site):
    for step in (1, 2):
        name = f"s3://runs/mixed/step-{step}"
        ckpt.save({"step": step}, name, client=site.client, wait="durable")
    foreign = {
        "extension": b'{"name": "x"}',
        "later": b'{"forebay_checkpoint": 99, "id": "a", "saved_ms": 1, "files": [], "bytes": 0}',
        "text": b"no JSON",
    }
    for folder, text in foreign.items():
        site.s3.put_object(Bucket="runs", Key=f"mixed/{folder}/manifest.json", Body=text)
    found = ckpt.list_durable("s3://runs/mixed", client=site.client)
    assert [c.name for c in found] == ["s3://runs/mixed/step-1", "s3://runs/mixed/step-2"]
    assert ckpt.keep("s3://runs/mixed", last=1, client=site.client) == ["s3://runs/mixed/step-1"]
    assert {f"mixed/{folder}/manifest.json" for folder in foreign} <= set(site.keys("mixed/"))


def command(site, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    env = {**os.environ, "FOREBAY_NODE": site.node.url}
    line = [forebay_program(), "checkpoint", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


def json_lines(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_says_how_checkpoints_stand(own):
    ckpt.save({"step": 1}, "s3://runs/cmd/1", client=own.client, wait="durable", meta={"n": 1})
    name = "s3://runs/cmd/2"
    own.pause()
    first = ckpt.save(state(2, 1), name, client=own.client)
    second = ckpt.save({"step": 2}, name, client=own.client)
    shown = command(own, "list").stdout
    assert re.search(r"^durable +\S+ \w+ +\d+ s \* s3://runs/cmd/1$", shown, re.M), shown
    assert re.search(r"^flushing +.*s3://runs/cmd/2$", shown, re.M), shown
    assert f"it waits for another of its name, {first.id}" in shown, shown
    pending = json_lines(command(own, "list", "--pending", "--json"))
    assert [(p["id"], p["state"], p["local"], p["durable"]) for p in pending] == [
        (first.id, "flushing", True, False),
        (second.id, "staged", True, False),
    ]
    assert pending[1]["waits_for"] == first.id and pending[0]["bytes"] > 1 << 20
    late = command(own, "wait", name, "--timeout", "0.3s", code=1)
    assert re.search("error: runs/cmd/2 is not durable after 0 s: it is ", late.stderr), late
    assert json.loads(command(own, "wait", name, "--until", "staged", "--json").stdout)["staged"]
    own.go_on()
    assert "s3://runs/cmd/2  durable  " in command(own, "wait", name, "--timeout", "60s").stdout
    there = {
        (c["name"], c["id"]): c for c in json_lines(command(own, "list", "runs/cmd", "--json"))
    }
    assert len(there) == 3 and there[name, second.id]["visible"]
    # The first one was replaced. Its copy on the disk goes when its room is needed.
    assert "it was replaced" in there[name, first.id]["why"]
    here = {c["id"]: c for c in json_lines(command(own, "list", "--json"))}
    assert here[first.id]["visible"] is False and "it was replaced" in here[first.id]["why"]
    assert "visible" not in here[second.id] and "why" not in here[second.id]
    told = json.loads(command(own, "show", name, "--json").stdout)
    assert told["bucket"]["id"] == second.id
    assert {c["id"] for c in told["here"]} == {first.id, second.id}
    text = command(own, "show", "s3://runs/cmd/1", "--files").stdout
    assert re.search(r"^meta +{.*\"n\":1.*}$", text, re.M) and "state.pt" in text, text
    assert re.search("^kept +until its room is needed$", text, re.M), text
    # Another node knows what is in the bucket.
    other = Node(own.origin.url, ["runs"], own.directory / "other")
    try:
        listed = command(own, "list", "s3://runs/cmd/", "--node", other.url).stdout
        assert len(listed.splitlines()) == 2 and " * " not in listed, listed
        none = command(own, "list", "--node", other.url)
        assert none.stdout == "" and "no checkpoint on this node's disk" in none.stderr
    finally:
        other.stop()
    for wrong, status, said in [
        (["show", "s3://runs/cmd/3"], 1, "error: there is no checkpoint of this name"),
        (["list", "runs/nothing"], 1, "error: no checkpoints there: runs/nothing"),
        (["wait", "runs/cmd/3"], 1, "error: .*no checkpoint of this name.*\nhint: "),
        (["show", "runs"], 2, "error: .*name within its bucket"),
        (["wait", "runs/cmd/1", "--timeout", "soon"], 2, "does not begin with a number"),
        (["show", "runs/cmd/1", "--node", "http://127.0.0.1:9"], 1, "cannot connect"),
    ]:
        failed = command(own, *wrong, code=status)
        assert re.search(said, failed.stderr) and not failed.stdout, (wrong, failed.stderr)


def test_the_command_removes_and_keeps(site):
    def names() -> list[str]:
        found = json_lines(command(site, "list", "s3://runs/rm", "--json"))
        return [c["name"].rsplit("/", 1)[1] for c in found if c["visible"]]

    for name in ("best", "step-1", "step-2", "step-3", "step-4"):
        ckpt.save({"n": name}, f"s3://runs/rm/{name}", client=site.client, wait="durable")
    keep = ("keep", "s3://runs/rm", "--last", "2", "--pattern", "step-*")
    dry = command(site, *keep, "--dry-run").stdout
    assert dry.splitlines()[-1].startswith("2 checkpoints would be removed (") and len(names()) == 5
    kept = json.loads(command(site, *keep, "--json").stdout)
    assert [r["name"] for r in kept["removed"]] == ["s3://runs/rm/step-1", "s3://runs/rm/step-2"]
    assert names() == ["best", "step-3", "step-4"] and site.keys("rm/step-1") == []
    # The newest stays, however old.
    time.sleep(0.05)
    command(site, "keep", "runs/rm", "--max-age", "0s", "--pattern", "step-*")
    assert names() == ["best", "step-4"]
    for wrong in ([], ["--last", "0"], ["--last", "1", "--pattern", "[a-z]"]):
        command(site, "keep", "runs/rm", *wrong, code=2)
    assert command(site, "remove", "s3://runs/rm/best").stdout == "removed  s3://runs/rm/best\n"
    assert site.keys("rm/best") == []
    # Another of a name is on its way: a file of it is still to come from another node.
    ckpt.save({"n": 5}, "s3://runs/rm/step-6", client=site.client, wait="durable")
    writing = _wire.Writing(site.client, "s3://runs/rm/step-4")
    writing.put("data", [b"1234"])
    pending = writing.commit(elsewhere={"more": 1})
    done = command(site, "keep", "runs/rm", "--last", "1", "--json")
    assert json.loads(done.stdout)["removed"] == []
    assert re.search("^passed over: .*on its way.*runs/rm/step-4", done.stderr, re.M), done.stderr
    pending.abandon()
    eventually(lambda: all(c["durable"] for c in staged(site, "rm/")), "it is given up")
    gone = command(site, "remove", "s3://runs/rm/best", code=1)
    assert "no checkpoint of this name" in gone.stderr
    writing = _wire.Writing(site.client, "s3://runs/rm/step-5")
    writing.put("data", [b"1234"])
    pending = json_lines(command(site, "list", "runs/rm", "--pending", "--json"))
    assert [p["state"] for p in pending] == ["staging"]
    assert "given up in" in pending[0]["why"]
    assert "step-5" in command(site, "remove", "runs/rm/step-5", "--give-up").stdout
    with pytest.raises(forebay.NotFound):
        writing.commit()
    nothing = command(site, "remove", "runs/rm/step-5", "--give-up", code=1)
    assert "nothing of this name is on its way at this node" in nothing.stderr


def test_a_callback_is_told_when_it_is_durable(site):
    told = threading.Event()
    saved = ckpt.save({"a": 1}, "s3://runs/told/a", client=site.client)
    saved.on_durable(lambda checkpoint: told.set()).join(30)
    assert told.is_set() and saved.durable
    with pytest.raises(TypeError, match="callback must be a function, not 3"):
        saved.on_durable(3)


def test_a_callback_that_cannot_be_told_says_so_and_ends(site, monkeypatch):
    saved = ckpt.save({"a": 1}, "s3://runs/told/b", client=site.client)
    failures = [forebay.ConnectionFailed("once"), forebay.PermissionDenied("the key is gone")]

    def wait(self):
        raise failures.pop(0)

    monkeypatch.setattr(ckpt.Checkpoint, "wait", wait)
    with pytest.warns(UserWarning, match="is not followed: the key is gone"):
        thread = saved.on_durable(lambda checkpoint: pytest.fail("it is not known"))
        thread.join(30)
    assert not thread.is_alive() and failures == []


def test_keys_need_the_right_to_write_and_to_read(tmp_path, origin):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        """
[[keys]]
token = "writes-tokens-are-long"
allow = [{ bucket = "scratch", prefix = "team-a/", actions = ["read", "write", "list"] }]

[[keys]]
token = "others-tokens-are-long"
allow = [{ bucket = "scratch", prefix = "team-b/", actions = ["read"] }]
"""
    )
    options = ["--set", f"auth.keys_file={keys}", "--set", "auth.unix_trusted=false"]
    node = Node(origin.url, ["scratch"], tmp_path / "node", options=options)
    try:
        client = forebay.Client(node.url, token="writes-tokens-are-long")
        ckpt.save({"a": 1}, "s3://scratch/team-a/run/1", client=client).wait(60)
        with pytest.raises(forebay.PermissionDenied):
            ckpt.save({"a": 1}, "s3://scratch/team-b/run/1", client=client)
        with pytest.raises(forebay.PermissionDenied):
            ckpt.load("s3://scratch/team-b/run/1", client=client)
        with _wire.Reading(client, "s3://scratch/team-a/run/1") as reading:
            path = reading.path("state.pt")
        others = forebay.Client(node.url, token="others-tokens-are-long")
        assert others._borrow(path) is None
        assert forebay.Client(node.url)._borrow(path) is None
        mine = client._borrow(path)
        assert mine is not None
        mine.close()
        with pytest.raises(ValueError, match="given back"):
            mine.read_into([(0, bytearray(1))])
    finally:
        node.stop()


def test_the_engine_inside_this_process(tmp_path):
    code = """
import sys, forebay, forebay.checkpoint as ckpt
client = forebay.open_local(sys.argv[1], cache=sys.argv[2])
saved = ckpt.save({"step": 7}, "s3://bucket/run/step-7", client=client)
saved.wait(30)
assert ckpt.load("s3://bucket/run/step-7", client=client) == {"step": 7}
"""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    arguments = [f"file://{bucket}", f"{tmp_path / 'cache'}:256MiB"]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)
    assert (bucket / "run" / "step-7" / "manifest.json").exists()


def test_lightning_saves_and_resumes(site):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def trainer(steps: int, **keeps) -> pl.Trainer:
        plugin = ckpt.CheckpointIO(site.client)
        keeps = keeps or {"dirpath": "forebay://runs/lightning", "filename": "last"}
        return pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[plugin],
            callbacks=[ModelCheckpoint(**keeps)],
        )

    data = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
    os.environ["FOREBAY_NODE"] = site.node.url
    try:
        first = Module()
        trainer(4).fit(first, data)
        name = "forebay://runs/lightning/last.ckpt"
        assert [k for k in site.keys("lightning/") if k.endswith("last.ckpt/manifest.json")]
        second = Module()
        again = trainer(6)
        again.fit(second, data, ckpt_path=name)
        assert again.global_step == 6
        # One for each step, of which the newest stays.
        top = trainer(4, dirpath="forebay://runs/top", every_n_train_steps=1, save_top_k=1)
        top.fit(Module(), data)
        kept = [k for k in site.keys("top/") if k.endswith("manifest.json")]
        assert kept == ["top/epoch=0-step=4.ckpt/manifest.json"]
    finally:
        del os.environ["FOREBAY_NODE"]


def test_lightnings_last_checkpoint_is_found_by_its_path_and_a_warning_says_so(site):
    plugin = ckpt.CheckpointIO(site.client)
    name = "forebay://runs/warned/last.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.save_checkpoint({"state_dict": {}}, "forebay://runs/warned/epoch-last.ckpt")
    with pytest.warns(UserWarning, match=f"ckpt_path='{name}'"):
        plugin.save_checkpoint({"state_dict": {"w": 1}}, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.save_checkpoint({"state_dict": {"w": 2}}, name)
    plugin.teardown()
    found = ckpt.load(name, client=site.client, weights_only=False)
    assert found["state_dict"] == plugin.load_checkpoint(name)["state_dict"] == {"w": 2}


def test_lightning_is_told_where_its_checkpoints_go_if_nobody_has_said_so(site, tmp_path):
    """A trainer without a ModelCheckpoint of its own saves in the current directory."""
    plugin = ckpt.CheckpointIO(site.client)
    with pytest.raises(forebay.InvalidRequest) as caught:
        plugin.save_checkpoint({"state_dict": {}}, tmp_path / "checkpoints" / "epoch=0.ckpt")
    assert str(tmp_path) in str(caught.value) and "dirpath=" in caught.value.hint


def test_lightning_removes_a_checkpoint_that_is_still_on_its_way(own):
    plugin = ckpt.CheckpointIO(own.client)
    names = [f"forebay://runs/top/{step}.ckpt" for step in range(3)]
    plugin.save_checkpoint({"step": 0}, names[0])
    plugin.handle.wait(60)
    own.pause()
    for step in (1, 2):
        plugin.save_checkpoint({"step": step}, names[step])
        plugin.remove_checkpoint(names[step - 1])
    own.go_on()
    assert plugin.load_checkpoint(names[0]) == {"step": 0}, "until another one is durable"
    plugin.teardown()
    assert [k for k in own.keys("top/") if k.endswith("manifest.json")] == [
        "top/2.ckpt/manifest.json"
    ]
    assert len(own.keys("top/")) == 2
    # One of a name that was saved again stays.
    plugin.save_checkpoint({"step": 3}, names[1])
    plugin.remove_checkpoint(names[2])
    plugin.save_checkpoint({"step": 4}, names[2])
    plugin.teardown()
    assert plugin.load_checkpoint(names[2])["step"] == 4
    plugin.remove_checkpoint("forebay://runs/top/never.ckpt")


def test_lightning_says_why_training_does_not_end_yet(own, monkeypatch, caplog):
    from forebay.checkpoint import _lightning

    monkeypatch.setattr(_lightning, "_TOLD_SECONDS", 0.3)
    plugin = ckpt.CheckpointIO(own.client)
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({"step": 0}, "forebay://runs/late/0.ckpt", storage_options={"a": 1})
    own.pause()
    plugin.save_checkpoint({"step": 1}, "forebay://runs/late/1.ckpt")
    threading.Timer(2.0, own.go_on).start()
    plugin.teardown()
    assert plugin.handle.durable
    said = "training ends when its last checkpoint is durable: forebay://runs/late/1.ckpt is not"
    assert said in caplog.text


def test_lightning_waits_on_while_the_node_is_started_again(tmp_path, monkeypatch):
    from forebay.checkpoint import _lightning

    monkeypatch.setattr(_lightning, "_TOLD_SECONDS", 0.3)
    site = Site(tmp_path, listen=f"127.0.0.1:{free_port()}")
    try:
        plugin = ckpt.CheckpointIO(site.client)
        site.pause()
        plugin.save_checkpoint({"step": 1}, "forebay://runs/again/1.ckpt")
        site.kill()

        def starts_again() -> None:
            site.start()
            site.go_on()

        threading.Timer(1.5, starts_again).start()
        plugin.teardown()
        assert plugin.handle.durable
    finally:
        site.close()


def test_lightning_goes_on_when_a_removal_fails(own, monkeypatch, caplog):
    plugin = ckpt.CheckpointIO(own.client)
    names = [f"forebay://runs/fails/{step}.ckpt" for step in range(3)]
    for step in (0, 1):
        plugin.save_checkpoint({"step": step}, names[step])
        plugin.handle.wait(60)
    fails, ask = {"DELETE"}, _wire.ask

    def asks(client, method, *about):
        if method in fails:
            raise forebay.ServerError(f"no {method}")
        return ask(client, method, *about)

    monkeypatch.setattr(_wire, "ask", asks)
    plugin.remove_checkpoint(names[0])
    assert f"{names[0]} is not removed yet: no DELETE" in caplog.text
    # Not even what it is can be asked.
    fails.add("GET")
    plugin.remove_checkpoint(names[1])
    assert f"{names[1]} is not removed yet: no GET" in caplog.text
    fails.discard("GET")
    plugin.save_checkpoint({"step": 2}, names[2])
    plugin.teardown()
    assert f"{names[1]} was to go, and stays" in caplog.text
    assert len([k for k in own.keys("fails/") if k.endswith("manifest.json")]) == 3
    fails.clear()
    plugin.teardown()
    assert [k for k in own.keys("fails/") if k.endswith("manifest.json")] == [
        "fails/2.ckpt/manifest.json"
    ]
    # That the last one went, and was not lost, is known of one that could not be asked either.
    fails |= {"GET", "DELETE"}
    plugin.remove_checkpoint(names[2])
    fails.clear()
    caplog.clear()
    plugin.teardown()
    plugin.teardown()
    assert not own.keys("fails/") and not caplog.records


def test_lightning_keeps_what_is_to_go_if_the_last_one_is_lost(own, caplog):
    plugin = ckpt.CheckpointIO(own.client)
    names = [f"forebay://runs/lost/{step}.ckpt" for step in range(3)]
    plugin.save_checkpoint({"step": 0}, names[0])
    plugin.handle.wait(60)
    own.pause()
    plugin.save_checkpoint({"step": 1}, names[1])
    plugin.remove_checkpoint(names[0])
    # The node comes back with another disk.
    own.kill()
    own.go_on()
    own.start(fresh=True)
    plugin.client = plugin.handle.client = own.client
    for checkpoint in plugin._going.values():
        checkpoint.client = own.client
    plugin.teardown()
    assert "the checkpoint that was saved last is lost" in caplog.text
    assert plugin.load_checkpoint(names[0]) == {"step": 0}
    # The next one takes its place.
    plugin.save_checkpoint({"step": 2}, names[2])
    plugin.teardown()
    assert [k for k in own.keys("lost/") if k.endswith("manifest.json")] == [
        "lost/2.ckpt/manifest.json"
    ]
    # What the plugin itself removed is not lost.
    plugin.save_checkpoint({"step": 3}, names[1])
    plugin.handle.wait(60)
    plugin.remove_checkpoint(names[1])
    plugin.remove_checkpoint(names[2])
    assert not [k for k in own.keys("lost/") if k.endswith("manifest.json")]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: ckpt.save({}, "s3://runs/c", client=client),
        lambda client: ckpt.load("s3://runs/c", client=client),
        lambda client: ckpt.keep("s3://runs", last=1, client=client),
        lambda client: ckpt.list_durable("s3://runs", client=client),
        lambda client: ckpt.remove("s3://runs/c", client=client),
        lambda client: ckpt.Checkpoint(client, "s3://runs/c"),
        lambda client: ckpt.StorageWriter("s3://runs/c", client=client),
        lambda client: ckpt.StorageReader("s3://runs/c", client=client),
    ],
)
def test_an_address_is_no_client(call):
    with pytest.raises(TypeError, match=r'forebay.Client\("http://node:8080"\), not a str'):
        call("http://node:8080")


class Watched(dcp.DefaultLoadPlanner):
    """It notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = []

    def load_bytes(self, read_item, value):
        self.given.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)

    def commit_tensor(self, read_item, tensor):
        self.given.append(read_item.dest_index.fqn)
        super().commit_tensor(read_item, tensor)


@contextlib.contextmanager
def another_node(site: Site, name: str) -> Iterator[Node]:
    other = Node(site.origin.url, ["runs"], site.directory / name)
    try:
        yield other
    finally:
        other.stop()


def saved_by_dcp(client, name: str, tensors: dict) -> None:
    writer = ckpt.StorageWriter(client=client)
    dcp.save(tensors, checkpoint_id=name, storage_writer=writer, no_dist=True)
    writer.handle.wait(60)


def loaded_by_dcp(client, name: str, planner=None, **wanted: torch.Tensor) -> dict:
    found = {key: torch.zeros_like(value) for key, value in wanted.items()}
    reader = ckpt.StorageReader(name, client=client)
    dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
    return found


#: Ten seconds after it asked the bucket, a node goes by what it has itself.
BUCKET_SECONDS = 9


def test_files_are_read_while_the_bucket_is_asked_whether_they_were_replaced(own):
    name, w = "s3://runs/ahead/a", torch.arange(2_000_000)
    saved_by_dcp(own.client, name, {"w": w, "note": "x"})
    for _ in range(5):
        found, planner = {"w": torch.zeros_like(w), "note": ""}, Watched()
        reader = ckpt.StorageReader(name, client=own.client)
        began = time.monotonic()
        own.pause()
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                loading = pool.submit(
                    dcp.load, found, storage_reader=reader, planner=planner, no_dist=True
                )
                eventually(lambda: torch.equal(found["w"], w), "it is read before the answer")
                time.sleep(0.2)
                waits = not loading.done() and planner.given == []
                in_time = time.monotonic() - began < BUCKET_SECONDS
                own.go_on()
                loading.result(60)
        finally:
            own.go_on()
        assert torch.equal(found["w"], w) and found["note"] == "x"
        assert sorted(planner.given) == ["note", "w"]
        assert waits or not in_time
        if in_time:
            return
    raise AssertionError("this machine is too slow")


@pytest.mark.parametrize("cut", [1, 2], ids=["cut as before", "cut otherwise"])
def test_ranks_load_the_one_that_took_the_place_of_what_they_began_with(own, cut):
    name = "s3://runs/ahead/last"
    ranks(1, "save", own.node.url, name, 1)
    with another_node(own, "other") as other:
        ranks(cut, "save", other.url, name, 2)
        ranks(2, "load", own.node.url, name, 2)
        # It is known now that what is here was replaced.
        ranks(1, "load", own.node.url, name, 2)


@pytest.mark.parametrize("first", [True, False], ids=["rank 0", "rank 1"])
def test_ranks_at_two_nodes_load_what_the_bucket_has(own, first):
    name = "s3://runs/ahead/nodes"
    ranks(2, "save", own.node.url, name, 1)
    with another_node(own, "other") as other:
        nodes = [own.node.url, other.url]
        if not first:
            nodes.reverse()
        # One node has it, and asks; the other one has nothing.
        ranks(2, "load", "|".join(nodes), name, 1)
        # Each has one of its own, of which one is old.
        ranks(1, "save", other.url, name, 2)
        ranks(2, "load", "|".join(nodes), name, 2)


def test_one_with_other_tensors_in_its_place_is_told_and_loaded_next_time(own):
    name, a, b = "s3://runs/ahead/other", torch.ones(300_000), torch.arange(300_000)
    saved_by_dcp(own.client, name, {"a": a})
    with another_node(own, "other") as other:
        saved_by_dcp(forebay.Client(other.url), name, {"a": 2 * a, "b": b})
    with pytest.raises(dcp.api.CheckpointException, match="which has other tensors"):
        loaded_by_dcp(own.client, name, a=a)
    found = loaded_by_dcp(own.client, name, a=a, b=b)
    assert torch.equal(found["a"], 2 * a) and torch.equal(found["b"], b)


def test_one_that_was_removed_elsewhere_is_not_loaded_from_this_disk(own):
    name, a = "s3://runs/ahead/gone", torch.ones(300_000)
    saved_by_dcp(own.client, name, {"a": a})
    ckpt.save({"a": a}, name + "-plain", client=own.client, wait="durable")
    for bucket_key in own.keys("ahead/"):
        own.s3.delete_object(Bucket="runs", Key=bucket_key)
    planner = Watched()
    with pytest.raises(dcp.api.CheckpointException, match="does not have the checkpoint"):
        loaded_by_dcp(own.client, name, planner, a=a)
    assert planner.given == []
    with pytest.raises(forebay.NotFound, match="does not have the checkpoint"):
        ckpt.load(name + "-plain", client=own.client)
    with pytest.raises(forebay.NotFound):
        ckpt.load(name + "-plain", client=own.client)


def test_a_plain_load_goes_over_to_the_one_that_was_saved_elsewhere(own):
    name = "s3://runs/ahead/plain"
    ckpt.save(state(1, 1), name, client=own.client, wait="durable")
    with another_node(own, "other") as other:
        ckpt.save(state(2, 1), name, client=forebay.Client(other.url), wait="durable")
    assert same(ckpt.load(name, client=own.client), state(2, 1))


@pytest.mark.parametrize("replaced", [False, True])
def test_an_answer_that_a_node_lost_is_asked_for_anew(own, monkeypatch, replaced):
    name, a = "s3://runs/ahead/lost", torch.ones(300_000)
    saved_by_dcp(own.client, name, {"a": a})
    if replaced:
        with another_node(own, "other") as other:
            saved_by_dcp(forebay.Client(other.url), name, {"a": 2 * a})
    ask, lost = _wire.ask, []

    def loses(client, method, path, body=None):
        if "question=" in path:
            # As after a restart.
            lost.append(path)
            path = path.replace("question=", "question=x")
        return ask(client, method, path, body)

    monkeypatch.setattr(_wire, "ask", loses)
    assert torch.equal(loaded_by_dcp(own.client, name, a=a)["a"], 2 * a if replaced else a)
    assert lost


def planned(readers, found: list[dict]) -> list:
    """The plan of each rank of a load, and its planner."""
    planners = [dcp.DefaultLoadPlanner() for _ in readers]
    plans = []
    for rank, (reader, state, planner) in enumerate(zip(readers, found, planners, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    return list(zip(readers[0].prepare_global_plan(plans), planners, strict=True))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_rank_that_loses_an_answer_does_not_load_another_one_than_the_rest(
    own, monkeypatch, replaced
):
    a = torch.ones(300_000)
    clients = [forebay.Client(own.node.url) for _ in range(2)]
    ask = _wire.ask

    def loses(client, method, path, body=None):
        if client is clients[1]:
            # As after a restart.
            path = path.replace("question=", "question=x")
        return ask(client, method, path, body)

    monkeypatch.setattr(_wire, "ask", loses)
    for attempt in range(5):
        # Each of a name of which the node does not know that it was replaced.
        name = f"s3://runs/ahead/mixed-{attempt}"
        saved_by_dcp(own.client, name, {"a": a})
        if replaced:
            with another_node(own, f"other-{attempt}") as other:
                saved_by_dcp(forebay.Client(other.url), name, {"a": 2 * a})
        readers = [ckpt.StorageReader(name, client=client) for client in clients]
        found = [{"a": torch.zeros_like(a)} for _ in readers]
        began = time.monotonic()
        own.pause()
        try:
            plans = planned(readers, found)
        finally:
            own.go_on()
        assert plans[0][0].storage_data.question is not None
        readers[0].read_data(*plans[0])
        if time.monotonic() - began < BUCKET_SECONDS:
            break
    else:
        raise AssertionError("this machine is too slow")
    assert torch.equal(found[0]["a"], 2 * a if replaced else a)
    # It cannot know which one that is.
    with pytest.raises(forebay.Conflict, match="before all ranks had been told"):
        readers[1].read_data(*plans[1])


def test_a_plan_that_was_made_for_another_one_is_refused(own):
    name, big, small = "s3://runs/ahead/given", torch.ones(400_000), torch.ones(300_000)
    saved_by_dcp(own.client, name, {"a": big})
    before = ckpt.StorageReader(name, client=own.client)
    theirs, metadata = {"a": torch.zeros_like(big)}, before.read_metadata()
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(theirs, metadata, True)
    items = planner.create_local_plan().items
    saved_by_dcp(own.client, name, {"a": small})

    class Given(dcp.DefaultLoadPlanner):
        """What another rank planned."""

        def create_global_plan(self, plans):
            return [dcp.planner.LoadPlan(items) for _ in plans]

        def lookup_tensor(self, index):
            return theirs["a"]

    with pytest.raises(dcp.api.CheckpointException, match="made for another one"):
        loaded_by_dcp(own.client, name, Given(), a=small)
    # The metadata of one, and the files of another.
    reader = ckpt.StorageReader(name, client=own.client)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    with pytest.raises(forebay.Conflict):
        reader.read_data(reader.prepare_global_plan([plan])[0], planner)
    assert not theirs["a"].any()


def test_a_planner_that_drops_what_a_rank_is_told_is_told(own):
    class Drops(dcp.DefaultLoadPlanner):
        def finish_plan(self, plan):
            return dcp.planner.LoadPlan(plan.items)

    name, a = "s3://runs/ahead/drops", torch.ones(300_000)
    saved_by_dcp(own.client, name, {"a": a})
    with pytest.raises(dcp.api.CheckpointException) as e:
        loaded_by_dcp(own.client, name, Drops(), a=a)
    assert isinstance(e.value.failures[0][0], forebay.InvalidRequest)


def test_what_replaced_one_of_another_kind_is_loaded(own):
    a = torch.ones(300_000)
    with another_node(own, "other") as other:
        there = forebay.Client(other.url)
        # What is here cannot be loaded like this.
        name = "s3://runs/ahead/unsafe"
        ckpt.save({"a": Path("/")}, name, client=own.client, wait="durable")
        ckpt.save({"a": a}, name, client=there, wait="durable")
        assert torch.equal(ckpt.load(name, client=own.client)["a"], a)
        name = "s3://runs/ahead/plain-before"
        ckpt.save({"a": a}, name, client=own.client, wait="durable")
        saved_by_dcp(there, name, {"a": 2 * a})
        assert torch.equal(loaded_by_dcp(own.client, name, a=a)["a"], 2 * a)
        name = "s3://runs/ahead/plain-now"
        saved_by_dcp(own.client, name, {"a": a})
        ckpt.save({"a": a}, name, client=there, wait="durable")
        with pytest.raises(dcp.api.CheckpointException, match="which has other tensors"):
            loaded_by_dcp(own.client, name, a=a)
        assert torch.equal(ckpt.load(name, client=own.client)["a"], a)


def test_a_rank_with_another_one_than_the_foreign_one_of_rank_0_is_told(own):
    name, a = "s3://runs/ahead/foreign", torch.ones(300_000)
    saved_by_dcp(own.client, name, {"a": a})
    with another_node(own, "other") as other:
        for key in own.keys("ahead/foreign"):
            own.s3.delete_object(Bucket="runs", Key=key)
        writer = dcp.FileSystemWriter(own.directory / "foreign")
        dcp.save({"a": 2 * a}, storage_writer=writer, no_dist=True)
        for file in (own.directory / "foreign").iterdir():
            own.s3.upload_file(str(file), "runs", f"ahead/foreign/{file.name}")
        readers = [
            ckpt.StorageReader(name, client=client)
            for client in (forebay.Client(other.url), own.client)
        ]
        found = [{"a": torch.zeros_like(a)} for _ in readers]
        plans = planned(readers, found)
        readers[0].read_data(*plans[0])
        assert torch.equal(found[0]["a"], 2 * a)
        with pytest.raises(forebay.Conflict):
            readers[1].read_data(*plans[1])
