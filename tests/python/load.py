"""Mixed load on a node, and the model that checks every answer: readers of objects, ranges, batches
and members, and writers through the node.

What an object holds is a function of its name and a version, so a wrong byte is noticed wherever it
comes from. Each name has one writer. Its versions are listed in the order of their attempts; a read
may return the last version that was acknowledged before it began, or any that was attempted later.
A write with an unknown outcome (the node was killed) leaves both possible, until the next one is
acknowledged. Half of the names have the same size in all their versions; the origin is one that
never mixes versions itself (`honest.py`).
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import io
import json
import os
import random
import re
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

BUCKET = "scratch"
MEMBERS = 8
#: Refusals that a node may give while objects change under it or memory is short. Anything else is
#: a defect.
REFUSALS = {429, 502, 503, 504}
#: Longer than any answer takes: whatever takes longer hangs.
TIMEOUT = 30


def seed() -> int:
    return int(os.environ.get("FOREBAY_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


def noise(label: str, size: int) -> bytes:
    return hashlib.shake_128(label.encode()).digest(size)


def number(key: str) -> int:
    return int(re.search(r"\d+", key)[0])


def is_of_one_size(key: str) -> bool:
    """Whether all versions of `key` have the same size: where they are mixed, nothing but the bytes
    tells.
    """
    return number(key) % 2 == 1


def members(key: str, version: int) -> dict[str, bytes]:
    which = 5 if is_of_one_size(key) else version
    return {
        f"m{i}": noise(f"{key} {version} {i}", (which * 7919 + i * 104_729) % 60_000)
        for i in range(MEMBERS)
    }


@functools.lru_cache(400)
def content(key: str, version: int) -> bytes:
    """What `key` holds in this version."""
    if key.endswith(".tar"):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in members(key, version).items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return out.getvalue()
    if is_multipart(key, version):
        return noise(f"{key} {version}", (5 << 20) + 1000)
    sizes = (1, 100, 10_000, 10_000, 100_000, 100_000, 300_000, 1 << 20, (1 << 20) + 1, 3_000_000)
    which = number(key) // 2 if is_of_one_size(key) else number(key) + version // 100 * 7
    return noise(f"{key} {version}", sizes[which % len(sizes)])


def is_multipart(key: str, version: int) -> bool:
    return version % 23 == 0 and not key.endswith(".tar") and not is_of_one_size(key)


class Key:
    """The versions of one name. `None` in the list: it was removed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attempts: list[int | None] = [None]
        self.acknowledged = 0

    def attempt(self, version: int | None) -> int:
        self.attempts.append(version)
        return len(self.attempts) - 1

    def since(self, begin: int) -> set[int | None]:
        return set(self.attempts[begin:])


class Wrong(AssertionError):
    pass


class Load:
    """Threads that work on a node until they are stopped. `node` may be replaced by another one at
    any time.
    """

    def __init__(
        self,
        node,
        seed: int,
        *,
        readers: int = 4,
        writers: int = 2,
        objects: int = 40,
        shards: int = 4,
    ) -> None:
        self.node, self.seed = node, seed
        self.keys = [Key(f"load/o{i}") for i in range(objects)] + [
            Key(f"load/s{i}.tar") for i in range(shards)
        ]
        self.failures: list[BaseException] = []
        self.done: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.stopping = threading.Event()
        # After an unknown outcome, the next write of that name waits, so that a late one cannot
        # come after it.
        owned = [self.keys[i::writers] for i in range(writers)]
        work = [(self.write, (i, keys)) for i, keys in enumerate(owned)] + [
            (self.read, (i,)) for i in range(readers)
        ]
        self.threads = [
            threading.Thread(target=self._guard, args=(f, args), daemon=True) for f, args in work
        ]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(2 * TIMEOUT)
            if thread.is_alive():
                self.failures.append(Wrong("a worker hangs"))

    def _guard(self, work, args) -> None:
        try:
            work(*args)
        except BaseException as error:
            self.failures.append(error)
            self.stopping.set()

    def check(self) -> None:
        if self.failures:
            raise self.failures[0]
        odd = {s: n for s, n in self.refused.items() if s not in REFUSALS}
        assert not odd, f"answers with unexpected statuses: {odd}"

    # One request. `None`: no complete answer arrived, because the node was killed or cut the
    # stream.

    def request(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict | None = None,
    ):
        node = self.node
        try:
            return connection.request(node, method, path, body, headers or {})
        except TimeoutError as error:
            raise Wrong(f"{method} {path} hangs") from error
        except (OSError, http.client.HTTPException):
            connection.close()
            return None

    # Writers.

    def write(self, number: int, keys: list[Key]) -> None:
        rng = random.Random(self.seed * 100 + number)
        connection = Connection()
        version = number + 1
        while not self.stopping.is_set():
            key = rng.choice(keys)
            version += 100
            removal = rng.random() < 0.15
            at = key.attempt(None if removal else version)
            if self.store(connection, key.name, None if removal else version):
                key.acknowledged = at
                self.done["writes"] += 1
            else:
                time.sleep(0.3)
            time.sleep(rng.random() * 0.02)
        connection.close()

    def store(self, connection: Connection, key: str, version: int | None) -> bool:
        path = f"/{BUCKET}/{key}"
        if version is None:
            answer = self.request(connection, "DELETE", path)
            return self.succeeded(answer, 204)
        data = content(key, version)
        if not is_multipart(key, version):
            return self.succeeded(self.request(connection, "PUT", path, data), 200)
        answer = self.request(connection, "POST", f"{path}?uploads", b"")
        if not self.succeeded(answer, 200):
            return False
        upload = re.search(rb"<UploadId>(.+?)</UploadId>", answer[1]).group(1).decode()
        parts = []
        for i, piece in enumerate((data[: 5 << 20], data[5 << 20 :]), 1):
            answer = self.request(
                connection, "PUT", f"{path}?partNumber={i}&uploadId={upload}", piece
            )
            if not self.succeeded(answer, 200):
                return False
            parts.append(
                f"<Part><PartNumber>{i}</PartNumber><ETag>{answer[2]['etag']}</ETag></Part>"
            )
        done = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>".encode()
        answer = self.request(connection, "POST", f"{path}?uploadId={upload}", done)
        return self.succeeded(answer, 200) and b"<Error>" not in answer[1]

    def succeeded(self, answer, status: int) -> bool:
        if answer is not None and answer[0] != status:
            self.refused[answer[0]] += 1
        return answer is not None and answer[0] == status

    # Readers.

    def read(self, number: int) -> None:
        rng = random.Random(self.seed * 100 + 50 + number)
        connection = Connection()
        while not self.stopping.is_set():
            if rng.random() < 0.15:
                self.read_batch(connection, rng)
            else:
                self.read_one(connection, rng)
            if not self.node_alive():
                time.sleep(0.01)
        connection.close()

    def node_alive(self) -> bool:
        return self.node.process.poll() is None

    def read_one(self, connection: Connection, rng: random.Random) -> None:
        key = rng.choice(self.keys)
        headers, cut = {}, slice(None)
        if rng.random() < 0.4:
            start = rng.choice((0, 50, 5000, 900_000, 1 << 20))
            length = rng.choice((1, 100, 70_000, 2_000_000))
            headers, cut = (
                {"Range": f"bytes={start}-{start + length - 1}"},
                slice(start, start + length),
            )
        begin = key.acknowledged
        answer = self.request(connection, "GET", f"/{BUCKET}/{key.name}", headers=headers)
        if answer is None:
            return
        allowed = key.since(begin)
        status, body, _ = answer
        if status in (200, 206):
            wanted = [content(key.name, v)[cut] for v in allowed if v is not None]
            right = body in wanted and (body or not headers)
        elif status == 404:
            right = None in allowed
        elif status == 416:
            right = any(v is not None and not content(key.name, v)[cut] for v in allowed)
        else:
            self.refused[status] += 1
            return
        if not right:
            raise Wrong(
                f"GET {key.name} {headers}: status {status}, {len(body)} bytes,"
                f" {what_is(key, body, cut)}; versions {allowed} may be read"
            )
        self.done["reads"] += 1
        self.done["bytes"] += len(body)

    def read_batch(self, connection: Connection, rng: random.Random) -> None:
        wanted = []
        for _ in range(rng.choice((1, 4, 16, 32))):
            key = rng.choice(self.keys)
            wanted.append(
                (
                    key,
                    f"m{rng.randrange(MEMBERS + 1)}"
                    if key.name.endswith(".tar") and rng.random() < 0.8
                    else None,
                    key.acknowledged,
                )
            )
        entries = [
            {"objname": key.name} | ({"archpath": member} if member else {})
            for key, member, _ in wanted
        ]
        body = json.dumps({"in": entries, "strm": True, "coer": True, "mime": ".tar"}).encode()
        answer = self.request(
            connection, "GET", f"/v1/ml/moss/{BUCKET}", body, {"Content-Type": "application/json"}
        )
        if answer is None:
            return
        if answer[0] != 200:
            # More entries may be missing than a batch tolerates.
            if answer[0] != 400 or b"soft_errors_max" not in answer[1]:
                self.refused[answer[0]] += 1
            return
        with tarfile.open(fileobj=io.BytesIO(answer[1]), mode="r:") as tar:
            got = [(info.name, tar.extractfile(info).read()) for info in tar]
        if len(got) != len(wanted):
            raise Wrong(f"a batch of {len(wanted)} has {len(got)} entries")
        for i, ((key, member, begin), (name, data)) in enumerate(zip(wanted, got, strict=True)):
            allowed = key.since(begin)
            full = f"{BUCKET}/{key.name}" + (f"/{member}" if member else "")
            if member:
                values = [
                    members(key.name, v).get(member) if v is not None else None for v in allowed
                ]
            else:
                values = [content(key.name, v) if v is not None else None for v in allowed]
            right = (
                None in values and not data
                if name == f"__404__/{full}"
                else name == full and data in values
            )
            if not right:
                what = "a member" if member else what_is(key, data, slice(None))
                raise Wrong(
                    f"entry {i} of a batch, {full}: got {name} with {len(data)} bytes,"
                    f" {what}; versions {allowed} may be read"
                )
        self.done["batches"] += 1
        self.done["bytes"] += len(answer[1])

    # Afterwards.

    def check_origin(self, root: Path) -> None:
        """No acknowledged write is lost: what lies at the origin is the last acknowledged version
        of each name, or a later attempt.
        """
        for key in self.keys:
            file = root / BUCKET / key.name
            data = file.read_bytes() if file.exists() else None
            allowed = key.since(key.acknowledged)
            assert any(data == (None if v is None else content(key.name, v)) for v in allowed), (
                f"{key.name} at the origin is none of {allowed}"
            )


def what_is(key: Key, body: bytes, cut: slice) -> str:
    for at, version in enumerate(key.attempts):
        if version is not None and content(key.name, version)[cut] == body:
            return (
                f"which is version {version}, attempt {at} of {len(key.attempts)}"
                f" ({key.acknowledged} was the last one acknowledged)"
            )
    # In chunks of the node's cache: that is where mixed versions would have their seams.
    pieces = []
    for at in range(0, len(body), 1 << 20):
        piece = body[at : at + (1 << 20)]
        of = [
            v
            for v in key.attempts
            if v is not None and content(key.name, v)[cut][at : at + len(piece)] == piece
        ]
        pieces.append(f"from byte {at} on {of or 'none'}")
    return (
        f"which is no version of it, but {', '.join(pieces)}; the last attempts were"
        f" {key.attempts[-6:]}"
    )


class Connection:
    """A connection that is kept alive as long as the node is the same."""

    def __init__(self) -> None:
        self.node, self.http = None, None

    def close(self) -> None:
        if self.http is not None:
            self.http.close()
        self.node = self.http = None

    def request(self, node, method: str, path: str, body: bytes | None, headers: dict):
        if self.node is not node:
            self.close()
            self.node, self.http = (
                node,
                http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=TIMEOUT),
            )
        self.http.request(method, path, body, headers)
        response = self.http.getresponse()
        return response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}


def disk_bytes(directory: Path) -> int:
    """The sum of the sizes of all files in it; some may go while they are counted."""
    total = 0
    for entry in directory.iterdir():
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total
