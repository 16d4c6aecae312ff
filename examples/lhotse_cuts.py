"""Lhotse: a lazy CutSet over audio in tars. nemo_lhotse.py gives such cuts to NeMo.

python examples/lhotse_cuts.py
"""

import sys

import forebay
from lhotse import CutSet, Recording, SupervisionSegment
from lhotse.dataset import DynamicBucketingSampler
from lhotse.dataset.collation import collate_audio

DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/audio/*.tar"


class Cuts:
    """The samples of a loader as cuts that have their audio with them: reading one asks nobody.

    The loader deals rows out to the ranks, so samplers are told that there is one rank.
    """

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            for row in batch:
                recording = Recording.from_bytes(bytes(row["wav"]), row["__key__"])
                cut = recording.to_cut()
                text = bytes(row["txt"]).decode()
                segment = SupervisionSegment(cut.id, recording.id, 0.0, cut.duration, text=text)
                cut.supervisions = [segment]
                yield cut


def main():
    dataset = forebay.open(DATA)
    loader = dataset.loader(batch_size=8, shuffle=forebay.Block(4), seed=1)
    cuts = CutSet(Cuts(loader))
    sampler = DynamicBucketingSampler(
        cuts, max_duration=2.0, num_buckets=2, buffer_size=16, rank=0, world_size=1
    )
    number, seconds = 0, 0.0
    for batch in sampler:
        audio, lengths = collate_audio(batch)
        assert audio.shape == (len(lengths), int(lengths.max()))
        assert all(cut.supervisions[0].text for cut in batch)
        number += len(batch)
        seconds += sum(cut.duration for cut in batch)
    print(f"{number} cuts, {seconds:.1f} s of audio")


if __name__ == "__main__":
    main()
