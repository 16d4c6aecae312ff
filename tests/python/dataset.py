"""What lies in the buckets of the tests: objects of all sizes, odd names, and shards of every
archive format.
"""

from __future__ import annotations

import io
import random
import tarfile
import zipfile

SEED = 20260101


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(SEED + seed).randbytes(n)


#: Names that break when somebody forgets to escape, to decode, or to leave alone.
ODD_NAMES = [
    "odd/with space.txt",
    "odd/plus+plus.txt",
    "odd/percent%41.txt",
    "odd/percent%2Fslash.txt",
    "odd/question?mark=1&b=2.txt",
    "odd/hash#tag.txt",
    "odd/ünïcödé/日本語.txt",
    "odd/quote\"and'apostrophe.txt",
    "odd/back\\slash.txt",
    "odd/[brackets]{braces}.txt",
    "odd/semi;colon,comma@at=equals.txt",
    "odd/tilde~star*paren().txt",
    "odd/" + "long-segment-" * 15 + ".txt",
    "odd/" + "/".join(f"deep{i:02}" for i in range(60)) + "/end.txt",
]

MEMBERS = {
    f"sample{i:03}.{ext}": noise(50 + 97 * i, i) for i in range(20) for ext in ("jpg", "cls")
} | {
    "dir/sub/nested.txt": b"nested",
    "empty": b"",
    "ünï.txt": "ü".encode(),
    "x" * 140 + ".bin": b"a long name",
}


def tar_bytes(members: dict[str, bytes] = MEMBERS) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zip_bytes(members: dict[str, bytes] = MEMBERS) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for i, (name, data) in enumerate(members.items()):
            kind = zipfile.ZIP_DEFLATED if i % 2 else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=kind)
    return out.getvalue()


def shards() -> dict[str, bytes]:
    import gzip

    import pyarrow

    tar = tar_bytes()
    return {
        "shards/a.tar": tar,
        "shards/b.tgz": gzip.compress(tar),
        "shards/c.tar.gz": gzip.compress(tar),
        "shards/d.tar.lz4": pyarrow.Codec("lz4").compress(tar, asbytes=True),
        "shards/e.zip": zip_bytes(),
    }


def objects() -> dict[str, bytes]:
    """Everything in the bucket `train`."""
    out = {f"img/{i:04}.bin": noise(1 + i * 37, i) for i in range(200)}
    out |= {
        "empty": b"",
        "one": b"1",
        "big/8MiB": noise(8 << 20, 7),
        "big/chunk": noise(1 << 20, 8),
        "big/chunk+1": noise((1 << 20) + 1, 9),
    }
    out |= {name: name.encode() for name in ODD_NAMES}
    return out | shards()


def other() -> dict[str, bytes]:
    """Everything in the bucket `other`."""
    return {f"o/{i}": noise(100 + i, 1000 + i) for i in range(20)}
