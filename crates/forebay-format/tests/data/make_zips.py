"""Writes zips of all kinds into the directory argv[1], seeded by argv[2], and beside each what
zipfile reads from it.
"""

import calendar
import io
import os
import random
import sys
import zipfile

where, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)


class Pipe(io.RawIOBase):
    """Cannot seek, so zipfile writes data descriptors."""

    def __init__(self, f):
        self.f = f

    def writable(self):
        return True

    def write(self, b):
        return self.f.write(b)


def content():
    n = rng.choice([0, 1, 100, 5000, 70000])
    return rng.choice([rng.randbytes(n), b"forebay " * (n // 8), bytes(n)])


for i in range(12):
    path = os.path.join(where, f"{i}.zip")
    with open(path, "wb") as f:
        if i % 4 == 3:
            f.write(b"#!/bin/sh\nexit\n" * 10)
        target = Pipe(f) if i % 4 == 1 else f
        with zipfile.ZipFile(target, "w") as z:
            for n in range(rng.randrange(0, 30)):
                name = (
                    rng.choice(["", "./", "/", "../"])
                    + rng.choice(["a", "dir/b", "ü/日本", "x" * 300])
                    + f"/{n}"
                )
                if rng.random() < 0.1:
                    name += "/"
                info = zipfile.ZipInfo(
                    name,
                    (
                        rng.randrange(1980, 2107),
                        rng.randrange(1, 13),
                        rng.randrange(1, 29),
                        23,
                        59,
                        58,
                    ),
                )
                info.compress_type = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
                if name.endswith("/"):
                    z.writestr(info, b"")
                    continue
                if rng.random() < 0.1:
                    info.compress_type = zipfile.ZIP_BZIP2
                with z.open(info, "w", force_zip64=rng.random() < 0.3) as out:
                    out.write(content())
            z.comment = rng.choice([b"", b"a comment", rng.randbytes(65535)])
    with zipfile.ZipFile(path) as z, open(path + ".told", "w") as out:
        for m in z.infolist():
            readable = not m.is_dir() and m.compress_type != zipfile.ZIP_BZIP2
            data = z.read(m).hex() if readable else "-"
            out.write(
                f"{m.filename.encode().hex()} {calendar.timegm(m.date_time + (0, 0, 0))} {data}\n"
            )
