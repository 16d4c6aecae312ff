"""torchtitan: a loader of its kind, for `dataloader=` of a trainer's config, which saves its state.

torchrun --nproc-per-node 2 examples/torchtitan_loading.py
"""

import json
import sys
from dataclasses import dataclass

import forebay
import forebay.checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:  # what torchtitan asks of a loader, so that this file runs without it

    class BaseDataLoader(Stateful):
        @dataclass(kw_only=True, slots=True)
        class Config:
            dataset: str = ""
            dataset_path: str | None = None


DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/corpus/**.parquet"
LAST = "s3://my-bucket/runs/titan/last"
IGNORED = -100


class ForebayDataLoader(BaseDataLoader):
    """Packs of `seq_len` tokens and their labels, as torchtitan's own loader of text gives them.

    Its state is a few numbers that are the same on all ranks, so it loads into any number of them,
    which a ParallelAwareDataloader refuses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        column: str = "text"
        seed: int = 1

    def __init__(
        self, config, *, dp_world_size, dp_rank, tokenizer, seq_len, local_batch_size, **_
    ):
        def tokenize(text):
            return tokenizer.encode(text, add_bos=True, add_eos=True)

        # One more token: labels are those that follow.
        pack = forebay.Pack(seq_len + 1, column=config.column, tokenize=tokenize)
        self.loader = forebay.open(config.dataset_path).loader(
            pack=pack,
            batch_size=local_batch_size,
            shuffle=forebay.Block(16),
            seed=config.seed,
            epochs=float("inf"),
            rank=dp_rank,
            world_size=dp_world_size,
            output="torch",
        )

    def __iter__(self):
        for batch in self.loader:
            tokens, positions = batch["tokens"].long(), batch["position_ids"].long()
            # The last token of a document does not predict the first one of the next.
            unknown = ~batch["mask"][:, 1:] | (positions[:, 1:] == 0)
            labels = tokens[:, 1:].masked_fill(unknown, IGNORED)
            yield {"input": tokens[:, :-1], "positions": positions[:, :-1]}, labels

    def state_dict(self):
        return {"forebay": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict):
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["forebay"]))


class Bytes:
    """For an example, bytes will do as tokens."""

    def encode(self, text, add_bos, add_eos):
        return [1] * add_bos + list(text.encode()) + [2] * add_eos


def main():
    dist.init_process_group("gloo")
    # The rank and the size of the mesh's dimensions of data parallelism, which a trainer gives.
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def build():
        return ForebayDataLoader(
            ForebayDataLoader.Config(dataset_path=DATA),
            dp_world_size=ranks,
            dp_rank=rank,
            tokenizer=Bytes(),
            seq_len=128,
            local_batch_size=4,
        )

    loader = build()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    writer = forebay.checkpoint.StorageWriter(LAST)
    dcp.save({"dataloader": loader}, storage_writer=writer)
    expected, labels = next(batches)

    again = build()
    dcp.load({"dataloader": again}, storage_reader=forebay.checkpoint.StorageReader(LAST))
    found, _ = next(iter(again))
    same = torch.tensor(torch.equal(found["input"], expected["input"]))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if rank == 0:
        writer.handle.wait(timeout=600)
        print(f"{tuple(labels.shape)} labels on each of {ranks} ranks")
        print("the next batch is the same" if same else "the next batch is another")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
