"""The demo's data set: telephone prompts, spoken in five languages, and what is to be learnt from
them.

Each sample is one WAV file (8 kHz, 16 bit, one channel, 44 KB on average). The label is the
language. The same phrases were recorded in each language, so samples are held out by phrase: no
phrase is in both the training set and the held-out set.
"""

import io
import random
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

LANGUAGES = ("en", "es", "fr", "it", "ru")
NAME = (
    "Asterisk core sounds: 2,781 telephone prompts recorded in English, Spanish, French,"
    " Italian and Russian"
)
LICENCE = (
    "CC BY-SA 3.0 (Russian: CC BY 3.0); voices: Allison Smith, June Wallack, Carlo Flora,"
    " IVRvoice.ru; from Debian's packages asterisk-core-sounds-*-wav"
)

OBJECTS, SHARDS = "clips", "clip-shards"
SHARD_COUNT = 8


@dataclass(frozen=True)
class Sample:
    """One recording. Those to train from are objects in the bucket OBJECTS, and again members of
    tar shards in the bucket SHARDS.
    """

    path: Path
    key: str
    shard: str
    member: str
    label: int
    size: int


def load(clips: Path) -> tuple[list[Sample], list[Sample]]:
    """The training samples and the held-out ones. The same on every machine."""
    training, held_out = [], []
    paths = sorted(clips.glob("*/**/*.wav"))
    if not paths:
        raise SystemExit(f"there are no recordings in {clips}: run tools/demo-data.sh")
    # Shards are filled in shuffled order, as usual: a shard with only one language would be bad for
    # training.
    random.Random(0).shuffle(paths)
    for path in paths:
        key = path.relative_to(clips).as_posix()
        language, phrase = key.split("/", 1)
        # In a WebDataset shard, the part before the first dot names a sample.
        member = key.removesuffix(".wav").replace(".", "_") + ".wav"
        sample = Sample(path, key, "", member, LANGUAGES.index(language), path.stat().st_size)
        (held_out if zlib.crc32(phrase.encode()) % 7 == 0 else training).append(sample)
    # One shard after the other is filled up to the same size.
    room, before, filled = sum(s.size for s in training) / SHARD_COUNT, 0, []
    for sample in training:
        filled.append(replace(sample, shard=f"train-{int(before / room):05d}.tar"))
        before += sample.size
    return filled, held_out


def rows(samples: list[Sample]) -> dict[int, int]:
    """The CRC-32 of each recording, and its number in the order in which the shards hold them."""
    return {zlib.crc32(sample.path.read_bytes()): row for row, sample in enumerate(samples)}


def shard_bytes(samples: list[Sample]) -> bytes:
    """A tar in WebDataset's layout: for each sample its .wav and its label as .cls."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for name, content in (
                (sample.member, sample.path.read_bytes()),
                (sample.member[:-4] + ".cls", b"%d" % sample.label),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def upload(s3, samples: list[Sample], progress) -> None:
    """Puts every sample into both buckets, unless they hold it. `progress(done, total)` is called
    as it goes.
    """
    shards = {
        shard: [s for s in samples if s.shard == shard]
        for shard in sorted({s.shard for s in samples})
    }
    names = {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}
    have = set()
    for bucket in (OBJECTS, SHARDS):
        if bucket not in names:
            s3.create_bucket(Bucket=bucket)
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            have |= {(bucket, o["Key"], o["Size"]) for o in page.get("Contents", ())}

    def put(job) -> None:
        bucket, key, content = job
        body = content()
        if (bucket, key, len(body)) not in have:
            s3.put_object(Bucket=bucket, Key=key, Body=body)

    jobs = [(OBJECTS, s.key, s.path.read_bytes) for s in samples]
    jobs += [
        (SHARDS, shard, lambda members=members: shard_bytes(members))
        for shard, members in shards.items()
    ]
    with ThreadPoolExecutor(4) as pool:
        for done, _ in enumerate(pool.map(put, jobs), 1):
            progress(done, len(jobs))
