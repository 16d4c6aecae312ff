"""torchtitan's own code over a node, on two processes: its Trainer with the loader of
examples/torchtitan_loading.py and its own checkpoints, its ParallelAwareDataloader with a state of
each rank, and the example with torchtitan's class below.

Its requirements exclude the `datasets` of the other tests, so it is installed beside them.
"""

from __future__ import annotations

import json
from pathlib import Path

import beside
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import two_processes
from servers import Node

PACKAGES = [
    "torchtitan==0.3.0",
    "tyro==1.0.17",
    "typeguard==4.6.1",
    "docstring-parser==0.18.0",
    "spmd-types==0.2.3",
    "torch-checkpointing==0.1.1",
    "einops==0.8.2",
    "tensorboard==2.21.0",
]
EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = "s3://my-bucket/corpus/*.parquet"
#: Each text is 32 tokens, with its first and its last, and a pack of the Trainer's has two of them.
TEXTS, TOKENS = 96, 32
#: Steps of an epoch with 4 packs on each of 2 ranks.
STEPS = TEXTS // (2 * 4 * 2)

TRAINER = """
import json, os, sys, types
from dataclasses import dataclass

import torch._utils

# torchtitan wants an accelerator. It is told that the CPU is one, and does not ask it for the
# memory that it has, or for what only NCCL can do.
torch._utils._get_available_device_type = lambda: "cpu"
from torchtitan.components import metrics
from torchtitan.distributed import utils

nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
    device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
)
utils.set_pg_timeouts = lambda **_: None

sys.path.insert(0, sys.argv.pop(1))
import torchtitan_loading as example
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

assert example.BaseDataLoader is BaseDataLoader


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    encode = example.Bytes.encode
    def decode(self, tokens): return bytes(tokens).decode()
    def get_vocab_size(self): return 256


config = llama3_debugmodel()
config.tokenizer = Bytes.Config()
config.dataloader = example.ForebayDataLoader.Config(dataset_path=example.DATA)
config.training.local_batch_size, config.training.seq_len = 4, 63
config.training.steps = 8
config.training.mixed_precision_param = "float32"
config.training.disable_cuda_graphs = True
config.loss = config.loss.loss_fn
config.activation_checkpoint = None
del config.model_spec.model.layers[1:]
# The other kinds of attention have no gradient on a CPU.
config.model_spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
config.checkpoint.enable, config.checkpoint.interval = True, 3
config.checkpoint.load_step = int(sys.argv[2])
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if isinstance(module, torch.distributed.fsdp.FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no other

seen, losses = [], []
batches_of, log = trainer.batch_generator, trainer.metrics_processor.log


def batches(loader):
    for batch in batches_of(loader):
        seen.append(batch[0]["input"].tolist())
        yield batch


def logged(step, loss, *rest, **more):
    losses.append(loss)
    log(step, loss, *rest, **more)


trainer.batch_generator, trainer.metrics_processor.log = batches, logged
trainer.train()
with open(f"from-{sys.argv[2]}-{os.environ['RANK']}.json", "w") as out:
    json.dump({"seen": seen, "losses": losses}, out)
trainer.close()
torch.distributed.destroy_process_group()
"""

OWN_LOADER = """
import json, os, sys

import forebay, forebay.checkpoint
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import ParallelAwareDataloader

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
AT = "s3://my-bucket/runs/own/last"


def build():
    loader = forebay.open(sys.argv[1]).loader(
        batch_size=4, shuffle=forebay.Block(4), seed=3, output="torch", columns=["id"]
    )
    return ParallelAwareDataloader(
        loader.torch(), dp_rank=rank, dp_world_size=ranks, batch_size=None, num_workers=2
    )


loader = build()
batches = iter(loader)
first = [next(batches)["id"].tolist() for _ in range(5)]
writer = forebay.checkpoint.StorageWriter(AT)
dcp.save({"dataloader": loader}, storage_writer=writer)
rest = [batch["id"].tolist() for batch in batches]
if rank == 0:
    writer.handle.wait(timeout=600)
dist.barrier()

again = build()
dcp.load({"dataloader": again}, storage_reader=forebay.checkpoint.StorageReader(AT))
assert [batch["id"].tolist() for batch in again] == rest
with open(f"own-{rank}.json", "w") as out:
    json.dump(first + rest, out)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def library():
    return beside.installed("torchtitan", PACKAGES)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    root = tmp_path_factory.mktemp("node")
    corpus = root / "my-bucket" / "corpus"
    corpus.mkdir(parents=True)
    for part in range(2):
        ids = list(range(part, TEXTS, 2))
        texts = [f"text {i:03} ".ljust(TOKENS - 2, ".") for i in ids]
        table = pa.table({"id": ids, "text": texts})
        pq.write_table(table, corpus / f"{part}.parquet", row_group_size=8)
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'my-bucket'}"])
    yield node
    node.stop()


def test_the_trainer_goes_on_with_the_same_batches(node, library, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINER)

    def train(load_step):
        program = [script, EXAMPLES, DATA, str(load_step)]
        two_processes.run(program, node, library, tmp_path)
        names = [f"from-{load_step}-{rank}.json" for rank in range(2)]
        return [json.loads((tmp_path / name).read_text()) for name in names]

    whole = train(-1)
    assert [len(rank["seen"]) for rank in whole] == [8, 8]
    texts = [
        bytes(pack[begin + 1 : begin + 9]).decode()
        for rank in whole
        for batch in rank["seen"][:STEPS]
        for pack in batch
        for begin in (0, TOKENS)
    ]
    assert sorted(texts) == [f"text {i:03}" for i in range(TEXTS)], "once in the first epoch"
    # Step 3 is in the middle of the first epoch, and the steps behind it end in the second.
    for before, after in zip(whole, train(3), strict=True):
        assert after["seen"] == before["seen"][3:]
        assert after["losses"] == pytest.approx(before["losses"][3:])


def test_its_own_loader_keeps_a_state_of_each_rank(node, library, tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN_LOADER)
    two_processes.run([script, DATA], node, library, tmp_path)
    ranks = [json.loads((tmp_path / f"own-{rank}.json").read_text()) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [TEXTS // 8] * 2
    ids = [i for batches in ranks for batch in batches for i in batch]
    assert sorted(ids) == list(range(TEXTS))


def test_the_example_on_top_of_torchtitan(node, library, tmp_path):
    program = [EXAMPLES / "torchtitan_loading.py", DATA]
    printed = two_processes.run(program, node, library, tmp_path)
    assert "labels on each of 2 ranks\nthe next batch is the same" in printed, printed
