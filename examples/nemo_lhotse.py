"""NeMo with Lhotse: audio in tars as a type of NeMo's `input_cfg`, read by NeMo's own dataloader.

torchrun --nproc-per-node 2 examples/nemo_lhotse.py
"""

import sys

import forebay
import torch.distributed as dist
from lhotse import CutSet, Recording, SupervisionSegment
from lhotse.dataset.collation import collate_audio
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from nemo.collections.common.data.lhotse.cutset import data_type_parser

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/audio/*.tar"


class Cuts:
    """The samples of a loader as cuts that have their audio with them: reading one asks nobody.

    Each worker of a DataLoader has its share of them.
    """

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for row in self.loader.torch(samples=True):
            recording = Recording.from_bytes(bytes(row["wav"]), row["__key__"])
            cut = recording.to_cut()
            text = bytes(row["txt"]).decode()
            segment = SupervisionSegment(cut.id, recording.id, 0.0, cut.duration, text=text)
            cut.supervisions = [segment]
            yield cut


@data_type_parser("forebay")
def cuts_of(config):
    """What NeMo calls for `type: forebay`. The loader deals rows out to the ranks: it asks
    torch.distributed, or the launcher's variables. That the data is "tarred" tells NeMo's sampler
    not to do so again.
    """
    loader = forebay.open(config.path).loader(
        batch_size=4,
        shuffle=forebay.Block(4),
        seed=1,
        # NeMo trains for a number of steps, over epochs without an end.
        epochs=1 if config.get("force_finite") else float("inf"),
    )
    return CutSet(Cuts(loader)), True


class Batches:
    """For an example. A model gives its own, as LhotseSpeechToTextBpeDataset(tokenizer)."""

    def __getitem__(self, cuts):
        audio, lengths = collate_audio(cuts)
        return audio, lengths, [cut.supervisions[0].text for cut in cuts]


def build(finite):
    config = {
        "input_cfg": [{"type": "forebay", "path": DATA}],
        "sample_rate": 8000,
        "batch_duration": 2.0,  # seconds
        "num_workers": 2,
        "shuffle": False,  # the loader did
        "force_finite": finite,
    }
    return get_lhotse_dataloader_from_config(
        config, dist.get_rank(), dist.get_world_size(), Batches()
    )


def main():
    dist.init_process_group("gloo")
    seconds, texts = 0.0, []
    for audio, lengths, of_batch in build(finite=True):
        assert audio.shape == (len(lengths), int(lengths.max()))
        seconds += float(lengths.sum()) / 8000
        texts += of_batch
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, texts)
    if dist.get_rank() == 0:
        everything = [text for texts in ranks for text in texts]
        print(
            f"{len(everything)} clips on {len(ranks)} ranks, {len(set(everything))} different ones,"
            f" {seconds:.1f} s of audio on rank 0"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
