"""Batches for JAX, DALI, Lightning and the Trainer, and rows for Grain."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import forebay
import numpy as np
import pytest


@pytest.fixture
def ds(tables):
    return forebay.open("tables/a/*.parquet", url=tables.url)


def content(i: int) -> bytes:
    return b"%d" % i * (i % 7)


def test_jax_arrays(ds):
    import forebay.jax
    import jax

    batch = next(iter(ds.loader(batch_size=4, output="jax", columns=["id", "x"])))
    assert (
        isinstance(batch["x"], jax.Array)
        and batch["x"].shape == (4, 3)
        and batch["id"].tolist() == [0, 1, 2, 3]
    )
    decoded = ds.loader(
        batch_size=4, output="jax", decode=lambda row: (row["x"] * 2, row["id"]), threads=2
    )
    x, label = next(iter(decoded))
    assert (
        isinstance(x, jax.Array) and x[3].tolist() == [6, 6, 6] and label.tolist() == [0, 1, 2, 3]
    )

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    loader = forebay.jax.loader(ds, 10, sharding=sharding, shuffle="full", columns=["id", "x"])
    batches = list(loader)
    assert len(batches) == len(loader) == 10 and batches[0]["x"].sharding == sharding
    assert len({i for b in batches for i in b["id"].tolist()}) == 100 and loader.epoch == 1
    plain = forebay.jax.loader(ds, 10, shuffle="full")
    assert f"JaxLoader of <forebay.Loader of {ds.name}" in repr(plain)
    next(iter(plain))
    again = forebay.jax.loader(ds, 10, shuffle="full")
    again.load_state_dict(plain.state_dict())
    assert [b["id"].tolist() for b in again] == [
        b["id"].tolist() for b in batches[1:]
    ] and again.stats().samples == 90
    with pytest.raises(ValueError):
        forebay.jax.loader(ds, 10, output="numpy")


SHARDED_PACKS = """
import sys
import warnings
import forebay, forebay.jax, jax, numpy as np

assert jax.device_count() == 4
ds = forebay.open(sys.argv[1], url=sys.argv[2])
mesh = jax.make_mesh((4,), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
pack = forebay.Pack(16, column="text", tokenize=lambda text: list(text.encode()))
sizes = set()
for batch in forebay.jax.loader(ds, 4, sharding=sharding, pack=pack):
    assert batch["tokens"].sharding == sharding and batch["tokens"].shape == (4, 16)
    assert isinstance(batch["cu_seqlens"], np.ndarray)
    sizes.add(len(batch["cu_seqlens"]))
print("sizes", len(sizes))
"""


def test_packs_lie_on_several_devices(tables):
    """What has another length in each step stays with the process."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    env |= {"JAX_PLATFORMS": "cpu"}
    source = "tables/a/*.parquet"
    command = [sys.executable, "-c", SHARDED_PACKS, source, tables.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 1


def test_whole_numbers_that_jax_would_cut_are_refused():
    from forebay._collate import to_jax

    fits = to_jax({"n": np.array([2**31 - 1, -(2**31)])})
    assert fits["n"].tolist() == [2**31 - 1, -(2**31)]
    for wrong in (np.array([2**31]), np.array([0, 2**32], np.uint64)):
        with pytest.raises(forebay.InvalidRequest, match=f"'n' of a sample has {wrong.max()}"):
            to_jax({"n": wrong})
    # Types that NumPy has from elsewhere are placed, too, and arrays of JAX.
    import jax.numpy as jnp

    half = np.ones(3, jnp.bfloat16)
    placed: list = []
    to_jax((half, jnp.ones(2), np.ma.masked_array([1], [True]), "text"), placed.append)
    assert [part.dtype for part in placed] == [jnp.bfloat16, jnp.float32]


def test_jax_leaves_durations_as_they_are():
    from forebay._collate import to_jax

    took = np.array([1, 2], "m8[ns]")
    assert to_jax({"took": took})["took"] is took


def test_grain_takes_a_dataset_as_a_data_source(ds):
    """Two processes share its rows, and a state goes on in the middle."""
    import grain

    class Ids(grain.transforms.Map):
        def map(self, row):
            return np.int64(row["id"])

    rows = ds.take(100)
    assert isinstance(rows, grain.sources.RandomAccessDataSource)

    def loader(process):
        sampler = grain.samplers.IndexSampler(
            len(rows),
            shard_options=grain.sharding.ShardOptions(process, 2, drop_remainder=False),
            shuffle=True,
            num_epochs=1,
            seed=1,
        )
        operations = [Ids(), grain.transforms.Batch(5)]
        return grain.DataLoader(
            data_source=rows, sampler=sampler, operations=operations, worker_count=0
        )

    seen = []
    for process in range(2):
        whole = [batch.tolist() for batch in loader(process)]
        begun = iter(loader(process))
        first = [next(begun).tolist() for _ in range(3)]
        again = iter(loader(process))
        again.set_state(begun.get_state())
        assert first + [batch.tolist() for batch in again] == whole
        seen += [i for batch in whole for i in batch]
    assert sorted(seen) == list(range(len(rows))) and seen != sorted(seen)


def dali_pipeline(source, outputs, batch_size, **options):
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(
        batch_size=batch_size,
        num_threads=1,
        device_id=None,
        prefetch_queue_depth=2,
        py_num_workers=2,
        py_start_method="fork",
    )
    def pipeline():
        return tuple(fn.external_source(source=source, num_outputs=outputs, **options))

    built = pipeline()
    if options.get("parallel"):
        built.start_py_workers()
    built.build()
    return built


def outputs(pipeline):
    while True:
        try:
            ids, jpgs = pipeline.run()
        except StopIteration:
            return
        yield (
            np.array(ids.as_tensor()).tolist(),
            [bytes(np.array(jpgs.at(i))) for i in range(len(jpgs))],
        )


def test_dali_by_iterator(ds):
    import forebay.dali

    source = forebay.dali.Source(ds.loader(batch_size=8, shuffle="full", seed=3), ["id", "data"])
    pipeline = dali_pipeline(source, 2, 8)
    truth = [
        b["id"].tolist() for b in ds.loader(batch_size=8, shuffle="full", seed=3, output="numpy")
    ]
    got = []
    for ids, jpgs in outputs(pipeline):
        assert jpgs == [content(i) for i in ids]
        got.append(ids)
        # The pipeline reads ahead; the state is that of what it has given out.
        again = ds.loader(batch_size=8, shuffle="full", seed=3, output="numpy")
        again.load_state_dict(source.state_dict(len(got)))
        assert again.epoch == (1 if len(got) == len(truth) else 0)
        if again.epoch == 0:
            assert next(iter(again))["id"].tolist() == truth[len(got)]
    assert got == truth
    with pytest.raises(forebay.InvalidRequest):
        source.state_dict(100)


def test_dali_by_number_in_its_own_processes(ds):
    import forebay.dali

    loader = ds.loader(batch_size=8, shuffle="full", seed=3)
    pipeline = dali_pipeline(
        forebay.dali.ByNumber(loader, ["id", "data"]),
        2,
        8,
        parallel=True,
        batch=True,
        batch_info=True,
    )
    truth = [
        b["id"].tolist()
        for b in ds.loader(batch_size=8, shuffle="full", seed=3, output="numpy", epochs=2)
    ]
    got = [ids for ids, _ in outputs(pipeline)]
    pipeline.reset()
    got += [ids for ids, _ in outputs(pipeline)]
    assert got == truth


def test_what_dali_cannot_take_is_refused(ds):
    import forebay.dali

    for wrong in ([], "id"):
        with pytest.raises(forebay.InvalidRequest):
            forebay.dali.Source(ds.loader(batch_size=8), wrong)
    with pytest.raises(forebay.InvalidRequest):
        forebay.dali.Source(ds.loader(batch_size=8, output="torch"), ["id"])
    source = iter(
        forebay.dali.Source(
            ds.loader(batch_size=8, decode=lambda row: {"id": object()}, output="numpy"), ["id"]
        )
    )
    with pytest.raises(TypeError, match="'id'"):
        next(source)


def lightning_trainer(*callbacks):
    import lightning

    return lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
    )


def lightning_model(step):
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, number):
            step(batch, number)
            return self.layer(torch.ones(1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


@pytest.mark.parametrize(
    "kind", ["bounded", "packs", "packs in a DataLoader", "packs in a StatefulDataLoader"]
)
def test_lightning_goes_on_with_the_next_batch(ds, tmp_path, kind):
    """Lightning takes one batch ahead where it is not told how many there are."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        options = {"shuffle": "full", "seed": 1, "output": "torch"}
        if kind == "bounded":
            return ds.loader(max_total=80, length="size", **options)
        pack = forebay.Pack(64, column="text", tokenize=lambda text: list(text.encode()))
        loader = ds.loader(batch_size=1, pack=pack, **options)
        if kind == "packs":
            return loader
        if kind == "packs in a StatefulDataLoader":
            return StatefulDataLoader(loader.torch(), batch_size=None)
        return forebay.torch.Resumable(DataLoader(loader.torch(), batch_size=None))

    def content(batch):
        return batch["id" if "id" in batch else "tokens"].tolist()

    own = make()
    # Whose epochs nobody sets.
    is_stateful = isinstance(own, StatefulDataLoader)
    whole = [content(batch) for _ in range(2) for batch in own]
    seen = []

    class Killed(Exception):
        pass

    def until_killed(batch, number):
        if len(seen) == 8:
            raise Killed
        assert is_stateful or copy.deepcopy(loader).state_dict() == loader.state_dict()
        seen.append(content(batch))

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    loader = make()
    with pytest.raises(Killed):
        lightning_trainer(saves).fit(lightning_model(until_killed), loader)
    assert seen == whole[:8]
    rest = []
    again = make()
    lightning_trainer().fit(
        lightning_model(lambda batch, _: rest.append(content(batch))),
        again,
        ckpt_path=str(tmp_path / "step=6.ckpt"),
    )
    assert rest == whole[6:]
    assert is_stateful or again.state_dict()["epoch"] == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_lightning_is_told_of_states_that_count_a_batch_too_many(ds, workers):
    pytest.importorskip("lightning")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def warnings_of(**options):
        loader = ds.loader(columns=["id"], output="torch", **options)
        data = StatefulDataLoader(loader.torch(), batch_size=None, num_workers=workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lightning_trainer().fit(lightning_model(lambda batch, number: None), data)
        return [str(w.message) for w in caught if "never see that batch" in str(w.message)]

    assert warnings_of(batch_size=50) == []
    told = warnings_of(max_total=2000, length="size")
    assert bool(told) == bool(workers) and all("Resumable" in text for text in told)


@pytest.mark.parametrize("resumable", [False, True])
def test_what_lightning_took_and_gives_up_is_still_to_come(ds, tmp_path, resumable):
    """It stops while it holds a batch, which a checkpoint that is saved then does not count."""
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader

    def make():
        loader = ds.loader(
            max_total=80, length="size", shuffle="full", seed=1, output="torch", columns=["id"]
        )
        if not resumable:
            return loader
        return forebay.torch.Resumable(DataLoader(loader.torch(), batch_size=None))

    def fit(loader, steps, **options):
        seen = []
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        step = lambda batch, _: seen.append(batch["id"].tolist())  # noqa: E731
        trainer.fit(lightning_model(step), loader, **options)
        return trainer, seen

    own = make()
    whole, states = [], []
    for batch in own:
        whole.append(batch["id"].tolist())
        states.append(own.state_dict())
    loader = make()
    trainer, seen = fit(loader, 3)
    assert seen == whole[:3] and loader.state_dict() == states[2]
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert fit(loader, 2)[1] == whole[3:5]
    assert loader.state_dict() == states[4]
    assert fit(make(), 5, ckpt_path=str(tmp_path / "after.ckpt"))[1] == whole[3:5]
    assert next(iter(loader))["id"].tolist() == whole[5]
    assert loader.state_dict() == states[5]


@pytest.mark.parametrize("kind", ["rows", "packs"])
def test_the_trainer_goes_on_from_a_state(ds, tmp_path, kind):
    """As the quick start says: the callback saves the place of the loader with each checkpoint."""
    transformers = pytest.importorskip("transformers")
    import torch
    from torch.utils.data import DataLoader

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def forward(self, **batch):
            self.seen.append(batch["id" if kind == "rows" else "tokens"].tolist())
            return {"loss": self.layer(torch.ones(1)).sum()}

    class Planned(transformers.Trainer):
        def get_train_dataloader(self):
            return self.train_dataset

    class SavesPlace(transformers.TrainerCallback):
        def __init__(self, batches):
            self.batches = batches

        def on_save(self, args, state, control, **_):
            file = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
            file.write_text(json.dumps(self.batches.state_dict()))

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 9

    def make():
        options = {"shuffle": "full", "seed": 1, "output": "torch"}
        if kind == "rows":
            return ds.loader(batch_size=20, columns=["id", "x"], **options)
        pack = forebay.Pack(150, column="text", tokenize=lambda text: list(text.encode()))
        return ds.loader(batch_size=1, pack=pack, **options)

    def trainer(batches, *callbacks):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=14,
            save_steps=7,
            save_strategy="steps",
            ignore_data_skip=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            logging_strategy="no",
        )
        return Planned(Model(), arguments, train_dataset=batches, callbacks=list(callbacks))

    def resumable():
        return forebay.torch.Resumable(DataLoader(make().torch(), batch_size=None))

    own = make()
    whole = [b["id" if kind == "rows" else "tokens"].tolist() for _ in range(3) for b in own]
    first = resumable()
    begun = trainer(first, SavesPlace(first), Stops())
    begun.train()
    assert begun.model.seen == whole[:9]
    checkpoint = tmp_path / "checkpoint-7"
    saved = json.loads((checkpoint / "loader.json").read_text())
    assert saved["epoch"] == 1
    again = resumable()
    again.load_state_dict(saved)
    resumed = trainer(again)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.model.seen == whole[7:14]
    # What does not go on there says what does.
    with pytest.raises((AttributeError, forebay.InvalidRequest), match="Resumable"):
        late = make()
        late.load_state_dict(saved)
        other = trainer(late)
        other.args.ignore_data_skip = kind == "packs"
        other.train(resume_from_checkpoint=str(checkpoint))
