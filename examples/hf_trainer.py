"""The Trainer of Hugging Face transformers: a small language model from Parquet.

torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

import sys

import forebay
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/corpus/**.parquet"
LENGTH = 64


def tokens(batch):
    """For an example, bytes will do as tokens. Your tokenizer goes here."""
    ids = torch.zeros(len(batch), LENGTH, dtype=torch.long)
    for i, text in enumerate(batch.numpy()["text"]):
        data = torch.frombuffer(bytearray(text.encode()[:LENGTH]), dtype=torch.uint8)
        ids[i, : len(data)] = data.long()
    return {"input_ids": ids, "labels": ids.clone()}


class PlannedTrainer(Trainer):
    """The order is the loader's. A Trainer would make a DataLoader and deal the rows out again."""

    def get_train_dataloader(self):
        return self.train_dataset


def main():
    dataset = forebay.open(DATA, columns=["text"])
    loader = dataset.loader(batch_size=8, shuffle=forebay.Block(16), seed=7, collate=tokens)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = PlannedTrainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir="trained",
            max_steps=20,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            # Without a GPU, several processes are one job only if it is told.
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=loader,
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps, loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
