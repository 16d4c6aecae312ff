"""On a GPU, where one is there: pinned batches, arrays of JAX, joules by NVML, checkpoints, DALI.

Everything here runs against a node over a directory, so that a machine with a GPU needs the wheel,
PyTorch, pyarrow and pytest, and no S3 server.
"""

from __future__ import annotations

import io
import tarfile
import time

import forebay
import forebay.checkpoint
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forebay import energy
from servers import Node

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A node over a bucket with a shard of JPEGs, numbers beside them, and room for checkpoints."""
    from PIL import Image

    root = tmp_path_factory.mktemp("pictures")
    (root / "train").mkdir()
    with tarfile.open(root / "train" / "0.tar", "w") as shard:
        for i in range(64):
            # Smooth ones, so that every decoder finds nearly the same.
            x, y = np.meshgrid(np.arange(96), np.arange(64))
            picture = np.stack([x + i, y * 2, (x + y) % 256], axis=2).astype(np.uint8)
            out = io.BytesIO()
            Image.fromarray(picture).save(out, "JPEG", quality=95)
            for suffix, data in (("jpg", out.getvalue()), ("cls", b"%d" % (i % 10))):
                info = tarfile.TarInfo(f"{i:04}.{suffix}")
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))
    server = Node("", [], root / "node", options=["--origin", f"file://{root / 'train'}"])
    yield server
    server.stop()


def work(seconds: float) -> None:
    """Keeps the GPU busy."""
    a = torch.rand(4096, 4096, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            a = torch.tanh(a @ a)
        torch.cuda.synchronize()


def test_pinned_batches_are_those_that_come_without(tables):
    ds = forebay.open("tables/a/*.parquet", url=tables.url).select_columns(["id", "x"])
    options = {"shuffle": "block:2", "seed": 3, "output": "torch"}
    plain = list(ds.loader(10, **options))
    pinned = list(ds.loader(10, pin_memory=True, **options))
    assert len(plain) == len(pinned) == 10
    for one, other in zip(plain, pinned, strict=True):
        for name in ("id", "x"):
            assert other[name].is_pinned() and not one[name].is_pinned()
            there = other[name].to("cuda", non_blocking=True)
            assert torch.equal(there.cpu(), one[name])


def test_packs_can_be_pinned(tables):
    ds = forebay.open("tables/a/*.parquet", url=tables.url)
    pack = forebay.Pack(16, column="x", tokenize=lambda values: np.asarray(values, np.int64))
    plain = list(ds.loader(4, pack=pack, output="torch"))
    pinned = list(ds.loader(4, pack=pack, output="torch", pin_memory=True))
    assert len(plain) == len(pinned) > 2
    for one, other in zip(plain, pinned, strict=True):
        assert other["tokens"].is_pinned()
        assert torch.equal(other["tokens"].to("cuda").cpu(), one["tokens"])


def test_batches_of_jax_are_on_the_gpu(tables, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        # The package `jax` is for CPUs; for GPUs there is another (`jax[cuda13]`), which is large.
        pytest.skip("this JAX has no GPU")
    ds = forebay.open("tables/a/*.parquet", url=tables.url).select_columns(["id", "x"])
    seen = []
    for batch in ds.loader(10, output="jax"):
        assert all(d.platform == "gpu" for d in batch["x"].devices())
        seen += np.asarray(batch["id"]).tolist()
    assert seen == list(range(100))


def test_joules_are_those_that_the_driver_counts():
    nvml = pytest.importorskip("pynvml")
    nvml.nvmlInit()
    # The monitor measures all GPUs of the machine.
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

    def driver() -> float:
        return sum(nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in handles) / 1e3

    with energy.Monitor() as monitor:
        time.sleep(0.3)
        before, mine = driver(), monitor.joules()
        with monitor.span("busy"):
            work(3)
        counted, found = driver() - before, monitor.joules() - mine
        with monitor.span("idle"):
            time.sleep(3)
        report = monitor.report()
    gpus = [f for f in report.whole.figures if f.source == "nvml"]
    assert [f.domain for f in gpus] == [f"gpu-{i}" for i in range(len(handles))]
    assert not any(f.estimate for f in gpus)
    others = sum(f.joules for f in report.whole.figures if f.source != "nvml" and not f.overlaps)
    if not others:
        # Both read a counter that moves ten times a second.
        assert found == pytest.approx(counted, rel=0.2), f"{found} J, the driver says {counted}"
    busy, idle = (s.joules for s in report.spans)
    assert busy > 1.3 * idle > 0, f"{busy} J busy, {idle} J idle"


def test_reports_and_nodes_tell_joules_of_the_gpu(tables):
    ds = forebay.open("tables/a/*.parquet", url=tables.url)
    loader = ds.loader(10, epochs=2)
    for _ in loader:
        work(0.1)
    report = loader.report(order=False)
    found = {e["domain"]: e for e in report.json()["run"]["energy"]}
    assert found["gpu-0"]["source"] == "nvml" and found["gpu-0"]["joules"] > 20
    assert "gpu-0 (nvml)" in str(report)
    key = 'forebay_energy_joules_total{source="nvml",domain="gpu-0",estimate=""}'
    assert tables.metrics()[key] > 20


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_checkpoint_of_tensors_on_the_gpu(pictures, how):
    generator = torch.Generator(device="cuda").manual_seed(1)

    def state(fill: bool) -> dict:
        made = {
            "w": torch.zeros(96, 1 << 18, device="cuda"),
            "half": torch.zeros(33, 17, device="cuda", dtype=torch.bfloat16),
            "at the host": torch.zeros(1 << 18),
        }
        if fill:
            for name in ("w", "half"):
                made[name].uniform_(generator=generator)
            made["at the host"].uniform_()
        # A part of a tensor that does not lie in one run.
        return {**made, "view": made["w"][:, :1000]}

    client = forebay.Client(pictures.url)
    name = f"s3://train/gpu/{how}"
    saved = state(True)
    writer = forebay.checkpoint.StorageWriter(name, client=client)
    done = getattr(dcp, how)(saved, storage_writer=writer, no_dist=True)
    if how == "async_save":
        done.result()
    found = state(False)
    reader = forebay.checkpoint.StorageReader(name, client=client)
    dcp.load(found, storage_reader=reader, no_dist=True)
    for key, value in saved.items():
        assert found[key].device == value.device and torch.equal(found[key], value), key


def test_a_state_dict_on_the_gpu(pictures):
    client = forebay.Client(pictures.url)
    model = torch.nn.Linear(512, 512, device="cuda")
    forebay.checkpoint.save(model.state_dict(), "s3://train/gpu/plain", client=client)
    found = forebay.checkpoint.load("s3://train/gpu/plain", client=client)
    for key, value in model.state_dict().items():
        assert torch.equal(found[key].to("cuda"), value)


def test_dali_decodes_on_the_gpu(pictures):
    pytest.importorskip("nvidia.dali")
    import forebay.dali
    from nvidia.dali import fn, pipeline_def
    from PIL import Image

    ds = forebay.open("train/*.tar", url=pictures.url)
    source = forebay.dali.Source(ds.loader(16, shuffle="full", seed=1), ["jpg", "cls"])

    @pipeline_def(batch_size=16, num_threads=2, device_id=0)
    def decoded():
        jpegs, labels = fn.external_source(source=source, num_outputs=2)
        return jpegs, fn.decoders.image(jpegs, device="mixed"), labels

    pipeline = decoded()
    pipeline.build()
    for _ in range(4):
        jpegs, images, labels = pipeline.run()
        for i in range(16):
            mine = np.array(images.as_cpu().at(i)).astype(int)
            theirs = np.asarray(Image.open(io.BytesIO(np.array(jpegs.at(i)).tobytes())), int)
            # Decoders round differently.
            assert np.abs(mine - theirs).mean() < 2
            assert np.array(labels.at(i))[0] in range(ord("0"), ord("9") + 1)
    with pytest.raises(StopIteration):
        pipeline.run()


def test_a_whole_loop_on_the_gpu(pictures):
    """The loader, pinned and copied beside the step, gives what the same loop gets without."""
    ds = forebay.open("train/*.tar", url=pictures.url)

    def decode(sample) -> dict:
        from PIL import Image

        picture = np.asarray(Image.open(io.BytesIO(sample["jpg"]))).astype(np.float32) / 255
        return {"x": picture, "y": int(sample["cls"])}

    def trained(pinned: bool) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(96 * 64 * 3, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        losses = []
        options = {"shuffle": "full", "seed": 2, "epochs": 3, "decode": decode}
        for batch in ds.loader(16, output="torch", pin_memory=pinned, **options):
            x, y = (batch[k].to("cuda", non_blocking=pinned) for k in ("x", "y"))
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    assert trained(True) == pytest.approx(trained(False), rel=1e-4)
