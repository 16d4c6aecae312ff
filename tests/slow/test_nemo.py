"""NeMo's own dataset and dataloader over tars of audio at a node, unmodified: with and without the
batches that it asks of an AIStore (`USE_AIS_GET_BATCH`); and examples/nemo_lhotse.py, where a
loader is a type of its configurations, for more than an epoch.

Its requirements exclude the Lightning of the other tests, so it is installed beside them.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import wave
from collections import Counter
from pathlib import Path

import beside
import numpy as np
import pytest
import two_processes
from servers import Node
from test_documents import tar, wav

RATE, SHARDS, CLIPS = 16_000, 3, 20
EXAMPLES = Path(__file__).parents[2] / "examples"

#: Prints each batch as JSON: for each clip its text, its length in samples, and a sum of these.
LOADER = """
import json, sys

sys.path.insert(0, sys.argv[1])
import lightning.pytorch, torch
from nemo.collections.asr.data.audio_to_text_lhotse import LhotseSpeechToTextBpeDataset
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from nemo.collections.common.tokenizers import TokenizerSpec
from omegaconf import OmegaConf


class Letters(TokenizerSpec):
    def text_to_tokens(self, text): return list(text)
    def tokens_to_text(self, tokens): return "".join(tokens)
    def tokens_to_ids(self, tokens): return [ord(t) for t in tokens]
    def ids_to_tokens(self, ids): return [chr(i) for i in ids]
    def text_to_ids(self, text): return [ord(t) for t in text]
    def ids_to_text(self, ids): return "".join(map(chr, ids))


config = OmegaConf.create(json.loads(sys.argv[2]))
data = LhotseSpeechToTextBpeDataset(tokenizer=Letters())
loader = get_lhotse_dataloader_from_config(config, global_rank=0, world_size=1, dataset=data)
for audio, lengths, tokens, token_lengths in loader:
    clips = []
    for sound, length, text, letters in zip(audio, lengths, tokens, token_lengths):
        text = "".join(map(chr, text[:letters].tolist()))
        samples = (sound[:length] * 32768).round().to(torch.int64)
        clips.append([text, int(length), int((samples * torch.arange(1, length + 1)).sum())])
    print(json.dumps(clips), flush=True)
"""


@pytest.fixture(scope="module")
def library():
    return beside.installed("nemo", beside.NEMO)


def write(folder) -> dict[str, tuple[int, int]]:
    """Tars of clips with their manifests, as NeMo's scripts make them; of each text, the length of
    its clip and a sum of its samples.
    """
    rng, clips = np.random.default_rng(1), {}
    (folder / "bucket").mkdir()
    for shard in range(SHARDS):
        lines = []
        with tarfile.open(folder / "bucket" / f"audio_{shard}.tar", "w") as tar:
            for clip in range(CLIPS):
                samples = rng.integers(-9000, 9000, rng.integers(RATE // 4, RATE), np.int16)
                sound = io.BytesIO()
                with wave.open(sound, "wb") as out:
                    out.setparams((1, 2, RATE, 0, "NONE", ""))
                    out.writeframes(samples.tobytes())
                member = tarfile.TarInfo(f"clip-{shard}-{clip:03}.wav")
                member.size = sound.tell()
                sound.seek(0)
                tar.addfile(member, sound)
                text = f"shard {shard} clip {clip}"
                lines.append(
                    {
                        "audio_filepath": member.name,
                        "duration": len(samples) / RATE,
                        "sampling_rate": RATE,
                        "text": text,
                        "shard_id": shard,
                    }
                )
                weights = np.arange(1, len(samples) + 1)
                clips[text] = (len(samples), int((samples.astype(np.int64) * weights).sum()))
        (folder / f"manifest_{shard}.json").write_text("\n".join(map(json.dumps, lines)))
    return clips


@pytest.mark.parametrize("batches", ["true", "false"])
@pytest.mark.parametrize("workers", [0, 2])
def test_nemo_trains_from_tars_at_a_node(tmp_path, library, batches, workers):
    clips = write(tmp_path)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bucket'}"])
    last = SHARDS - 1
    config = {
        "manifest_filepath": f"{tmp_path}/manifest__OP_0..{last}_CL_.json",
        "tarred_audio_filepaths": f"ais://bucket/audio__OP_0..{last}_CL_.tar",
        "sample_rate": RATE,
        "batch_size": 8,
        "shuffle": True,
        "num_workers": workers,
        "shard_seed": 1,
        "seed": 1,
        "force_finite": True,
        "pin_memory": False,
        "drop_last": False,
    }
    environment = os.environ | {"AIS_ENDPOINT": node.url, "USE_AIS_GET_BATCH": batches}
    try:
        before = node.metrics()
        command = [sys.executable, "-c", LOADER, str(library), json.dumps(config)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-4000:]
        metrics = node.metrics()
    finally:
        node.stop()
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    found = {text: (length, total) for batch in read for text, length, total in batch}
    assert found == clips, done.stderr[-2000:]
    # Each of NeMo's workers goes through all shards.
    assert sum(map(len, read)) == len(clips) * max(workers, 1)
    entries = "forebay_getbatch_file_n_total"
    asked = sum(n - before.get(k, 0) for k, n in metrics.items() if k.startswith(entries))
    assert (asked >= len(clips)) is (batches == "true"), asked


#: The example's dataloader, where it has no end.
ENDLESS = """
import itertools, json, os, sys

sys.path.insert(0, sys.argv.pop(1))
import nemo_lhotse as example

example.dist.init_process_group("gloo")
texts = []
for _, _, of_batch in example.build(finite=False):
    texts += of_batch
    if len(texts) >= 40:
        break
with open(f"seen-{os.environ['RANK']}.json", "w") as out:
    json.dump(texts, out)
example.dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    """A node over the audio of the quick starts: 32 clips, of 0.2 to 0.5 s."""
    root = tmp_path_factory.mktemp("audio")
    for shard in range(2):
        members = []
        for i in range(shard, 32, 2):
            members += [(f"{i:06}.wav", wav(i)), (f"{i:06}.txt", b"clip %d" % i)]
        tar(root / "my-bucket" / "audio" / f"{shard:03}.tar", members)
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'my-bucket'}"])
    yield node
    node.stop()


def test_the_example_goes_on_with_another_epoch(tmp_path, library, audio):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    two_processes.run([script, EXAMPLES], audio, library, tmp_path)
    ranks = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    # Two epochs and a half on each rank, of whose batches some have clips of two epochs.
    seen = Counter(text for texts in ranks for text in texts)
    assert seen.keys() == {f"clip {i}" for i in range(32)}
    assert 2 <= min(seen.values()) and max(seen.values()) <= 4, seen
