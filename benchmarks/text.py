"""A real text in its own order, from a package of the system: the dictionary GCIDE, from A to Z.

An alphabetical dictionary is what a shuffle has to repair: neighbours are alike, and the end is
unlike the beginning.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = "dict-gcide"
INSTALLED = "usr/share/dictd/gcide.dict.dz"


def cache_directory() -> Path:
    return Path(
        os.environ.get("FOREBAY_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"
    )


def dictionary() -> bytes:
    """The text, white space made single blanks. The package is unpacked beside the other caches,
    not installed.
    """
    unpacked = cache_directory() / "text"
    for found in (Path("/") / INSTALLED, unpacked / INSTALLED):
        if found.exists():
            return re.sub(rb"\s+", b" ", gzip.decompress(found.read_bytes()))
    unpacked.mkdir(parents=True, exist_ok=True)
    print(f"  fetching the package {PACKAGE}", flush=True)
    for command in (["apt-get", "download", "-q", PACKAGE], ["dpkg-deb", "-x", None, "."]):
        if None in command:
            command[command.index(None)] = next(p.name for p in unpacked.glob(f"{PACKAGE}_*.deb"))
        done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True)
        if done.returncode:
            sys.exit(
                f"{' '.join(command)} failed: {done.stderr.strip()}\n  install the package"
                f" {PACKAGE}, then run this again"
            )
    return dictionary()


def passages(count: int, size: int) -> list[bytes]:
    """`count` passages of `size` bytes from all over the text, in its order."""
    text = dictionary()
    whole = len(text) // size
    if count > whole:
        raise ValueError(f"the text has {whole} passages of {size} bytes, fewer than {count}")
    starts = [i * whole // count * size for i in range(count)]
    return [text[at : at + size] for at in starts]
