"""Which rank a loader is of: what launchers and frameworks say, when it is asked for, and that two
processes together see each row once.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import forebay
import pytest
import tables
import torch
from forebay import _place
from forebay.torch import IterableDataset, rank_and_world
from two_processes import TORCHRUN

ROWS = tables.A_ROWS
#: Variables of launchers: this machine's settings must not reach these tests.
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": 1, "WORLD_SIZE": 4}, (1, 4)),
        ({"WORLD_SIZE": 1}, (0, 1)),
        ({"SLURM_PROCID": 3, "SLURM_NTASKS": 4}, (3, 4)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_ID": 0}, (0, 4)),
        ({"SLURM_NTASKS": 1}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2}, (1, 2)),
        ({"PMI_RANK": 1, "PMI_SIZE": 2}, (1, 2)),
        # torchrun, one on each node of a Slurm job.
        ({"RANK": 5, "WORLD_SIZE": 8, "SLURM_PROCID": 1, "SLURM_NTASKS": 2}, (5, 8)),
        ({"LOCAL_RANK": 0}, (0, 1)),
    ],
)
def test_what_launchers_say(monkeypatch, env, found):
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))
    assert rank_and_world() == found
    assert rank_and_world(2, 3) == (2, 3), "what is given comes first"


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "2"}, "no RANK"),
        ({"RANK": "1"}, "no WORLD_SIZE"),
        ({"SLURM_NTASKS": "4"}, "no SLURM_PROCID"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "not started by srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "no OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "0"}, "no PMI_SIZE"),
        ({"LOCAL_RANK": "1"}, "neither RANK nor WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one'"),
    ],
)
def test_half_an_answer_is_an_error_that_names_what_is_missing(ds, monkeypatch, env, missing):
    loader = ds.loader(batch_size=10)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for ask in (lambda: next(iter(loader)), lambda: len(loader), rank_and_world):
        with pytest.raises(forebay.InvalidRequest, match=missing) as e:
            ask()
        assert "rank= and world_size=" in str(e.value) or "world_size=1" in str(e.value)
    assert loader.state_dict()["position"] == 0 and "not known yet" in repr(loader)
    assert len(ds.loader(batch_size=10, rank=1, world_size=2)) == ROWS // 20


class Jax:
    """What JAX says of its processes. A real one can only say it with other processes beside it."""

    def __init__(self, initialized: bool) -> None:
        self.distributed = types.SimpleNamespace(is_initialized=lambda: initialized)
        self.initialized = initialized

    def process_index(self) -> int:
        assert self.initialized, "JAX would now decide on its devices"
        return 2

    def process_count(self) -> int:
        assert self.initialized, "JAX would now decide on its devices"
        return 3


def test_jax_distributed_is_asked_only_once_it_is_initialized(ds, monkeypatch):
    jax = pytest.importorskip("jax")
    for real in (jax.distributed.is_initialized, jax.process_index, jax.process_count):
        assert callable(real), "what the stand-in has"
    monkeypatch.setitem(sys.modules, "jax", Jax(initialized=False))
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world() == (1, 4), "the environment decides until then"
    loader = ds.loader(batch_size=10)
    monkeypatch.setitem(sys.modules, "jax", Jax(initialized=True))
    assert rank_and_world() == (2, 3), "before the environment"
    assert rank_and_world(0, 2) == (0, 2), "what is given comes first"
    assert "rank 2 of 3 (by jax.distributed)" in str(_place.find())
    assert next(iter(loader)).ids.tolist() == list(range(20, 30))
    # Where older versions say it.
    older = Jax(initialized=True)
    del older.distributed.is_initialized
    monkeypatch.setitem(sys.modules, "jax", older)
    state = types.SimpleNamespace(client=None)
    place = types.SimpleNamespace(global_state=state)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", place)
    assert rank_and_world() == (1, 4)
    state.client = object()
    assert rank_and_world() == (2, 3)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace())
    monkeypatch.delitem(sys.modules, "jax._src.distributed")
    assert rank_and_world() == (1, 4), "not imported to its end"


def test_the_rank_is_asked_for_at_the_first_batch_and_stays(ds, monkeypatch):
    loader, counted = ds.loader(batch_size=10), ds.loader(batch_size=10)
    assert len(counted) == 10
    saved = loader.state_dict()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next(iter(loader)).ids.tolist() == list(range(10, 20)) and len(loader) == 5
    # What was said about its length would no longer be true.
    with pytest.raises(forebay.InvalidRequest, match="rank 0 of 1, and now this process is rank 1"):
        next(iter(counted))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(forebay.InvalidRequest, match="rank 1 of 2"):
        next(iter(loader))
    loader.load_state_dict(saved)
    assert next(iter(loader)).ids.tolist() == list(range(10))


def test_a_pickle_takes_the_rank_along_only_where_it_is_known(ds, monkeypatch):
    unknown = pickle.dumps(ds.loader(batch_size=10))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    known = pickle.dumps(ds.loader(batch_size=10))
    assert len(pickle.loads(unknown)) == 5, "spawned before anybody knew the rank"
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert len(pickle.loads(known)) == 5 and len(pickle.loads(unknown)) == 10


def test_seeds_of_64_bits(client):
    data = IterableDataset(
        client, ["a", "b", "c"], bucket="train", shuffle=True, seed=torch.initial_seed()
    )
    assert sorted(data._own_rows().tolist()) == [0, 1, 2]
    big = IterableDataset(client, ["a"] * 50, bucket="train", shuffle=True, seed=(1 << 64) - 1)
    first = big._own_rows().tolist()
    big.set_epoch(1)
    assert first != big._own_rows().tolist()


BEGINNING = """
import json, os, sys, torch, forebay, forebay.torch
from torch.utils.data import DataLoader
ds = forebay.open("tables/a/*.parquet")
def loader(**more):
    return ds.loader(batch_size=10, shuffle="full", output="torch", columns=["id", "x"], **more)
def collate(rows):
    x, ids = [r["x"].tolist() for r in rows], [r["id"] for r in rows]
    return {"x": torch.tensor(x), "id": torch.tensor(ids)}
seen = {}
def write(rank=None):
    rank = torch.distributed.get_rank() if rank is None else rank
    with open(f"seen-{rank}.json", "w") as f:
        json.dump(seen, f)
"""


def on_two_processes(
    tables, directory: Path, program: str, launcher=()
) -> dict[str, list[list[int]]]:
    """What each of two processes of a program has seen, by the name that it prints."""
    script = directory / "train.py"
    script.write_text(BEGINNING + program)
    env = {
        **os.environ,
        "FOREBAY_NODE": tables.url,
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks = [json.loads((directory / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0].keys() == ranks[1].keys()
    return {name: [ranks[0][name], ranks[1][name]] for name in ranks[0]}


def check(seen: dict[str, list[list[int]]]) -> None:
    for name, (one, other) in seen.items():
        assert len(one) == len(other), name
        if name == "the dataset":  # a sampler of theirs, which fills the last batch up
            assert set(one + other) == set(range(ROWS)), name
        else:
            assert len(set(one + other)) == len(one + other) == 100, name


def test_torch_distributed_is_asked_although_it_is_initialized_later(tables, tmp_path):
    seen = on_two_processes(
        tables,
        tmp_path,
        """
import multiprocessing
def ids(batches):
    return [int(i) for b in batches for i in b["id"]]
def run(rank, made):
    store = "file://" + os.path.abspath("store")
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    seen["loader"] = ids(made)
    made.set_epoch(0)
    for how in ("spawn", "fork"):
        workers = {"num_workers": 1, "multiprocessing_context": how}
        seen[how] = ids(DataLoader(made.torch(), batch_size=None, **workers))
        assert seen[how] == seen["loader"]
    write()
if __name__ == "__main__":
    made = loader()                                           # nobody knows a rank yet
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run, args=(r, made)) for r in range(2)]
    [p.start() for p in ranks], [p.join() for p in ranks]
    sys.exit(max(p.exitcode for p in ranks))
""",
    )
    check(seen)


def test_jax_and_grain_see_each_row_once(tables, tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("grain")
    seen = on_two_processes(
        tables,
        tmp_path,
        """
import multiprocessing, socket
def run(rank, port):
    import grain, jax, forebay.jax
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    seen["a loader"] = [int(i) for b in loader() for i in b["id"]]
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    mine = seen["global arrays"] = []
    for batch in forebay.jax.loader(ds, 10, sharding=sharding, shuffle="full", columns=["id"]):
        assert batch["id"].shape == (20,), "the batches of both processes are one array"
        mine += [int(i) for shard in batch["id"].addressable_shards for i in shard.data]
    rows = grain.MapDataset.range(len(ds)).shuffle(seed=1)[rank::2].batch(10, drop_remainder=True)
    read = rows.map(lambda numbers: [int(row["id"]) for row in ds.__getitems__(list(numbers))])
    seen["grain"] = [i for batch in read.to_iter_dataset() for i in batch]
    write(rank)
if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run, args=(r, port)) for r in range(2)]
    [p.start() for p in ranks], [p.join() for p in ranks]
    sys.exit(max(p.exitcode for p in ranks))
""",
    )
    assert len(seen) == 3
    check(seen)


def test_lightning_sees_each_row_once(tables, tmp_path):
    pytest.importorskip("lightning")
    seen = on_two_processes(
        tables,
        tmp_path,
        """
import lightning
class Model(lightning.LightningModule):
    def __init__(self, name):
        super().__init__()
        self.layer, self.ids = torch.nn.Linear(3, 1), seen.setdefault(name, [])
    def training_step(self, batch, _):
        self.ids += batch["id"].tolist()
        return self.layer(batch["x"]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)
for name, batches in {
    "a loader": loader(),
    "torch()": DataLoader(loader().torch(), batch_size=None),
    "Resumable": forebay.torch.Resumable(DataLoader(loader().torch(), batch_size=None)),
    "the dataset": DataLoader(ds, batch_size=10, collate_fn=collate),
}.items():
    trainer = lightning.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(name), batches)
write()
""",
    )
    assert len(seen) == 4
    check(seen)


def test_accelerate_sees_each_row_once(tables, tmp_path):
    pytest.importorskip("accelerate")
    seen = on_two_processes(
        tables,
        tmp_path,
        """
from accelerate import Accelerator
def refused(workers, samples, context=None):
    data = loader().torch(samples=samples)
    try:
        batches = DataLoader(
            data, batch_size=10 if samples else None, num_workers=workers,
            multiprocessing_context=context)
        for _ in accelerator.prepare(batches):
            raise SystemExit("not refused")
    except forebay.InvalidRequest as e:
        assert "accelerate" in str(e) and "rank=0, world_size=1" in str(e), e
if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    for name, batches in {
        "a loader": loader(),
        "Resumable": forebay.torch.Resumable(
            DataLoader(loader().torch(), batch_size=None, num_workers=1)),
        "rows of all ranks": DataLoader(loader(rank=0, world_size=1).torch(), batch_size=None),
        "the dataset": DataLoader(ds, batch_size=10, collate_fn=collate),
    }.items():
        seen[name] = [int(i) for b in accelerator.prepare(batches) for i in b["id"]]
    unprepared = DataLoader(loader().torch(), batch_size=None)
    seen["torch(), not prepared"] = [int(i) for b in unprepared for i in b["id"]]
    refused(0, False), refused(1, True), refused(1, False, "spawn")
    accelerator.dataloader_config.dispatch_batches = False
    refused(0, True), refused(1, True)
    write()
""",
        TORCHRUN,
    )
    assert len(seen) == 5
    check(seen)


def test_the_trainer_of_transformers_sees_each_row_once(tables, tmp_path):
    pytest.importorskip("transformers")
    seen = on_two_processes(
        tables,
        tmp_path,
        """
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer, self.ids = torch.nn.Linear(3, 1), seen.setdefault(name, [])
    def forward(self, x, id):
        self.ids += id.tolist()
        return {"loss": self.layer(x).sum()}
arguments = TrainingArguments(
    "out", per_device_train_batch_size=10, num_train_epochs=1, report_to=[], use_cpu=True,
    save_strategy="no", remove_unused_columns=False, disable_tqdm=True, logging_strategy="no")
class Planned(Trainer):
    def get_train_dataloader(self):
        return loader()
Planned(Model("a loader"), arguments, train_dataset=ds).train()
Trainer(Model("the dataset"), arguments, train_dataset=ds, data_collator=collate).train()
try:
    Trainer(Model("refused"), arguments, train_dataset=loader().torch(samples=True)).train()
    raise SystemExit("not refused")
except forebay.InvalidRequest as e:
    assert "get_train_dataloader" in str(e)
assert seen.pop("refused") == []
write()
""",
        TORCHRUN,
    )
    assert len(seen) == 2
    check(seen)


def test_accelerate_alone_does_not_go_back_behind_a_loaded_state(ds):
    accelerate = pytest.importorskip("accelerate")
    from torch.utils.data import DataLoader

    prepared = accelerate.data_loader.prepare_data_loader
    data = ds.loader(batch_size=10, shuffle="full", output="torch").torch()
    batches = prepared(DataLoader(data, batch_size=None), num_processes=1, process_index=0)
    epochs = [[int(i) for b in batches for i in b["id"]] for _ in range(2)]
    assert epochs[0] != epochs[1] and len(set(epochs[1])) == 100
    data.load_state_dict(data.loader.order.at(1, 50))
    with pytest.raises(forebay.InvalidRequest, match="Resumable"):
        next(iter(prepared(DataLoader(data, batch_size=None), num_processes=1, process_index=0)))
