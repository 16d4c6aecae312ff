"""Writes tars of all kinds into the directory argv[1], seeded by argv[2], and beside each what
tarfile reads from it.
"""

import io
import os
import random
import sys
import tarfile

where, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)


def name(i, fmt):
    n = rng.choice([3, 20, 90, 99, 100, 101, 150, 255, 256, 300, 1500])
    if fmt == tarfile.USTAR_FORMAT:
        n = min(n, 200)
    parts = []
    while sum(map(len, parts)) + len(parts) < n:
        parts.append(rng.choice(["a", "bc", "dir", "ein Wort", "x" * 40, "y", "z.z"]))
    if fmt == tarfile.PAX_FORMAT and rng.random() < 0.3:
        parts[-1] = "日本ü" + parts[-1]
    return rng.choice(["", "", "./", "/", "../"]) + "/".join(parts)[:n].strip("/") + f"/{i}.bin"


def add(t, info, data=b""):
    info.size = len(data)
    t.addfile(info, io.BytesIO(data))


def content():
    return rng.randbytes(rng.choice([0, 0, 1, 100, 511, 512, 513, 1024, 5000]))


def build(fmt, mode):
    raw = io.BytesIO()
    global_header = (
        {"comment": "ü" * 300} if fmt == tarfile.PAX_FORMAT and rng.random() < 0.5 else None
    )
    t = tarfile.open(fileobj=raw, mode=mode, format=fmt, pax_headers=global_header)
    names = []
    for i in range(rng.randrange(1, 30)):
        info = tarfile.TarInfo(name(i, fmt))
        if names and rng.random() < 0.1:
            info.name = rng.choice(names)
        names.append(info.name)
        info.mtime = rng.choice([0, 1, 1_700_000_000, 8**11 - 1])
        if fmt == tarfile.PAX_FORMAT and rng.random() < 0.3:
            info.mtime = rng.choice([-5, 1.5, 1e11, 0.25])
        if fmt == tarfile.GNU_FORMAT and rng.random() < 0.3:
            info.mtime = rng.choice([-5, 10**11])
        kind = rng.random()
        if kind < 0.7:
            add(t, info, content())
            continue
        info.type = rng.choice(
            [
                tarfile.DIRTYPE,
                tarfile.SYMTYPE,
                tarfile.LNKTYPE,
                tarfile.FIFOTYPE,
                tarfile.CHRTYPE,
                tarfile.BLKTYPE,
            ]
        )
        if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info.linkname = rng.choice(
                ["a", "l" * 90, "l" * 99 if fmt == tarfile.USTAR_FORMAT else "l" * 500]
            )
        t.addfile(info)
    t.close()
    return raw.getvalue()


def told(path):
    with tarfile.open(path) as t, open(path + ".told", "w") as out:
        for m in t:
            regular = m.isreg() and not m.issparse()
            data = t.extractfile(m).read().hex() if regular else "-"
            mtime = int(m.mtime // 1)
            out.write(f"{m.name.encode('utf-8', 'replace').hex()} {mtime} {data}\n")


for i, fmt in enumerate([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT] * 6):
    ext, mode = [(".tar", "w"), (".tar.gz", "w:gz")][i % 2]
    path = os.path.join(where, f"{i}{ext}")
    with open(path, "wb") as f:
        f.write(build(fmt, mode))
    told(path)
