"""What was computed about a version of a dataset, kept for the next process: filters and indexes of
keys.

Files in ``$XDG_CACHE_HOME/forebay`` (``~/.cache/forebay``), named by the version and by what was
computed. They can be deleted at any time. Processes that want the same wait for the one that
computes it. The oldest go when there are more than :data:`MOST_BYTES`,
or more than :data:`MOST_FILES` files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

#: What all kept files may take.
MOST_BYTES = 4 << 30
#: And how many may be there: each new one looks at all of them.
MOST_FILES = 4096
#: How names of files begin that are not whole yet, and when nobody writes them any more.
NEW, ABANDONED_SECONDS = ".new-", 24 * 3600
log = logging.getLogger("forebay")
T = TypeVar("T")


def folder() -> Path:
    """Where files are kept.

    Raises:
        OSError: This user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")
        if home == "~":
            # Otherwise it would be a directory of this name, wherever the process is.
            raise FileNotFoundError("this user has no home, and XDG_CACHE_HOME is not set")
        base = os.path.join(home, ".cache")
    return Path(base) / "forebay"


def kept(
    kind: str,
    what: object,
    compute: Callable[[], T],
    encode: Callable[[T], bytes],
    decode: Callable[[bytes], T | None],
) -> T:
    """What ``compute`` returns: read, if it was computed before.

    ``what`` says what it is about, as JSON. ``decode`` returns None for what ``encode`` did not
    write. If the folder cannot be written, it is computed again next time, which the log says.
    """
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    try:
        path = folder() / f"{kind}-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(f"{path}.lock")
    except OSError as e:
        log.warning("a %s is not kept: %s", kind, e)
        return compute()
    with lock:
        try:
            # Who waited for it finds it done.
            found = _read(path, decode)
            if found is None:
                found = compute()
                _write(path, encode(found))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(lock.name)
            # Closing is not enough: a process that was forked meanwhile has it open too.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
    return found


def _locked(name: str) -> TextIO:
    """A file of this name, locked. The one who had it before has deleted it: then it is another
    one, which nobody else would wait for.
    """
    while True:
        lock = open(name, "w")
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(name)):
                return lock
        lock.close()


def _read(path: Path, decode: Callable[[bytes], T | None]) -> T | None:
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    found = decode(data)
    if found is None:
        log.warning("%s is damaged, and is made again", path)
    return found


def _write(path: Path, data: bytes) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=NEW, delete=False) as new:
            try:
                new.write(data)
                new.flush()
                os.replace(new.name, path)
            except BaseException:
                os.unlink(new.name)
                raise
        _make_room(path)
    except OSError as e:
        log.warning("%s is not kept: %s", path, e)


def _make_room(newest: Path) -> None:
    """Deletes the files that were used least recently, and what killed processes left half."""
    found = []
    for path in newest.parent.iterdir():
        if path.name.startswith(NEW):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
        if path.name.startswith(("filter-", "keys-")) and path.suffix != ".lock":
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
    total, count = sum(size for _, size, _ in found), len(found)
    for _, size, path in sorted(found):
        if (total <= MOST_BYTES and count <= MOST_FILES) or path == newest:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        total, count = total - size, count - 1
