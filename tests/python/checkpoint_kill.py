"""`kill -9` in a loop under checkpoints: a node before an S3 server, and a process that saves
through it (`checkpoint_saver.py`). Meanwhile and afterwards the origin itself is read, without the
node: what was called durable is whole, what was called staged has become durable, and none is ever
visible in part.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError
from checkpoint_saver import BUCKET, PATIENCE, UNDER, content
from honest import HonestVersitygw
from servers import Node, Process, free_port, s3_client

CACHE_BYTES = 256 << 20
READY_WITHIN = 20.0


@dataclass
class Known:
    """A checkpoint, and what its writer was told about it."""

    id: str
    name: str
    number: int
    files: dict[str, int]
    told: list[str] = field(default_factory=list)

    @property
    def last(self) -> list[str]:
        return [file for file in self.files if file == ".metadata"]

    def keys(self) -> set[str]:
        return {f"{UNDER}/{self.name}/{self.id}/{file}" for file in self.files}

    def content(self, file: str) -> bytes:
        return content(self.name, self.number, file, self.files[file])


class Site:
    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.origin = HonestVersitygw(directory / "versitygw")
        (self.origin.directory / BUCKET).mkdir()
        self.s3 = s3_client(self.origin.url)
        self.port = free_port()
        self.node = self.start()
        script = Path(__file__).with_name("checkpoint_saver.py")
        command = [sys.executable, str(script), self.node.url, str(seed)]
        self.saver = Process("saver", command, {}, directory)
        self.known: dict[str, Known] = {}
        self.hearing, self.heard = threading.Lock(), 0
        self.done = Counter[str]()
        self.failures: list[str] = []
        self.ending = threading.Event()
        self.watcher = threading.Thread(target=self.watch, args=(random.Random(seed + 1),))

    def start(self) -> Node:
        return Node(
            self.origin.url,
            [BUCKET],
            self.directory / "node",
            cache_size=str(CACHE_BYTES),
            listen=f"127.0.0.1:{self.port}",
            options=["--log", "warn", "--set", "checkpoints.part=5MiB"],
        )

    def close(self) -> None:
        self.ending.set()
        self.origin.process.send_signal(signal.SIGCONT)
        if self.watcher.is_alive():
            self.watcher.join(30)
        self.saver.stop(signal.SIGKILL)
        self.node.stop(signal.SIGKILL)
        self.origin.stop()

    def hear(self) -> None:
        """Reads what the saver has told so far."""
        with self.hearing:
            for line in self.saver.lines[self.heard :]:
                self.heard += 1
                said = json.loads(line)
                event, id = said.pop("event"), said.pop("id")
                self.done[event] += 1
                if event == "begun":
                    self.known[id] = Known(id, **said)
                else:
                    self.known[id].told.append(event)

    # What the origin has

    def get(self, key: str) -> bytes | None:
        try:
            return self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        except ClientError as e:
            if e.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise

    def visible(self, name: str) -> dict | None:
        text = self.get(f"{UNDER}/{name}/manifest.json")
        return None if text is None else json.loads(text)

    def seen(self, manifest: dict, name: str) -> str | None:
        """What is wrong with the checkpoint that the origin shows, or None."""
        known = self.known.get(manifest["id"])
        if known is None or known.name != name:
            return f"the manifest of {name} names {manifest['id']}, which nobody saved there"
        named = {f["name"]: f["size"] for f in manifest["files"]}
        if named != known.files or manifest["meta"] != {"number": known.number}:
            return f"the manifest of {name} has {manifest}, not {known}"
        for file in known.files:
            data = self.get(f"{UNDER}/{name}/{known.id}/{file}")
            if data == known.content(file):
                continue
            # It may have been replaced or removed since; then another is visible, or none.
            now = self.visible(name)
            if now is not None and now["id"] == known.id:
                found = "missing" if data is None else f"{len(data)} bytes, or other bytes"
                return f"{known.id} is visible as {name}, and {file} is {found}"
            return None
        return None

    def watch(self, rng: random.Random) -> None:
        """Looks at checkpoints as anybody does who has only the bucket."""
        names: set[str] = set()
        try:
            while not self.ending.wait(0.02):
                names |= {known.name for known in list(self.known.values())}
                if not names:
                    continue
                name = rng.choice(sorted(names))
                # An answer that the proxy holds back, or a server that stands still, is no finding.
                with contextlib.suppress(BotoCoreError, ClientError):
                    manifest = self.visible(name)
                    if manifest is None:
                        continue
                    # The saver has told of it before it committed it.
                    end = time.monotonic() + 5
                    while manifest["id"] not in self.known and time.monotonic() < end:
                        self.hear()
                        time.sleep(0.02)
                    wrong = self.seen(manifest, name)
                    self.done["looks"] += 1
                    if wrong:
                        self.failures.append(wrong)
                        return
        except BaseException as e:
            self.failures.append(f"the watcher: {type(e).__name__}: {e}")

    def on_disk(self) -> int:
        folder = self.directory / "node" / "cache" / "staged"
        return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())

    # The loop

    def kill(self, rng: random.Random) -> float:
        """Kills the node at a random moment, and starts it again; returns how long that took."""
        self.pause(rng.choice((0.05, 0.3, 1.0)) * rng.random() + 0.03)
        if rng.random() < 0.3:
            # What is staged piles up, and requests are on their way when it is killed.
            self.origin.process.send_signal(signal.SIGSTOP)
            self.pause(rng.random() * 0.5)
        self.node.stop(signal.SIGKILL)
        self.origin.process.send_signal(signal.SIGCONT)
        used = self.on_disk()
        assert used <= CACHE_BYTES // 2, f"{used} bytes are staged"
        began = time.monotonic()
        self.node = self.start()
        return time.monotonic() - began

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.hear()
            assert self.saver.process.poll() is None, self.saver.failed("ended")
            assert not self.failures, self.failures
            time.sleep(min(left, 0.05))

    def settle(self) -> None:
        """Until the node has done all that it promised."""
        self.ending.set()
        self.watcher.join(60)
        code = self.saver.stop(signal.SIGTERM, patience=PATIENCE + 30)
        assert code == 0, self.saver.failed(f"ended with {code}")
        self.hear()
        assert not self.failures, self.failures
        for left in self.staged():
            # What the saver could not give up while the node was away would go an hour later.
            if left["state"] == "staging":
                path = f"/v1/checkpoints/{left['bucket']}/{left['prefix']}?id={left['id']}"
                given_up = urllib.request.Request(f"{self.node.url}{path}", method="DELETE")
                urllib.request.urlopen(given_up, timeout=10).close()
        end = time.monotonic() + PATIENCE
        while left := [c for c in self.staged() if c["state"] != "durable"]:
            assert time.monotonic() < end, f"not finished: {left}"
            time.sleep(0.1)

    def staged(self) -> list[dict]:
        with urllib.request.urlopen(f"{self.node.url}/v1/checkpoints", timeout=10) as answer:
            return json.load(answer)["checkpoints"]

    def check(self) -> None:
        """Compares all that the origin has with what was told."""
        paths = self.origin.directory / BUCKET / UNDER
        found = {
            str(path.relative_to(self.origin.directory / BUCKET))
            for path in paths.rglob("*")
            if path.is_file()
        }
        expected: set[str] = set()
        by_name: dict[str, list[Known]] = {}
        for known in self.known.values():
            by_name.setdefault(known.name, []).append(known)
        for name, all_of in by_name.items():
            manifest = self.visible(name)
            shown = None
            if manifest is not None:
                wrong = self.seen(manifest, name)
                assert wrong is None, wrong
                shown = self.known[manifest["id"]]
                expected |= shown.keys() | {f"{UNDER}/{name}/manifest.json"}
                for file in shown.last:
                    key = f"{UNDER}/{name}/{file}"
                    expected.add(key)
                    assert self.get(key) == shown.content(file), key
            # Of one name, each replaces those before it.
            for known in sorted(all_of, key=lambda k: k.number):
                assert "lost" not in known.told, f"{known} was staged, and is not known any more"
                gone = {"giving up", "removing"} & set(known.told) or any(
                    "removing" in k.told for k in all_of if k.number > known.number
                )
                if "staged" in known.told and not gone:
                    is_there = shown is not None and shown.number >= known.number
                    assert is_there, f"{known} was staged, and the origin shows {shown}"
        # Nothing else is left, of none of them.
        assert found == expected, (found - expected, expected - found)


def kill_under_checkpoints(directory: Path, kills: int, seed: int) -> Counter[str]:
    print(f"kill -9, {kills} times: replay with FOREBAY_TEST_SEED={seed}", flush=True)
    rng = random.Random(seed)
    site = Site(directory, seed)
    slowest = 0.0
    try:
        # Python and what it imports take their time on a busy machine.
        site.saver.wait_until(lambda: site.saver.lines, "saving")
        site.watcher.start()
        for kill in range(1, kills + 1):
            took = site.kill(rng)
            assert took < READY_WITHIN, f"after kill {kill}: ready only after {took:.1f} s"
            slowest = max(slowest, took)
            if kill % 20 == 0 or kill == kills:
                print(
                    f"  {kill} kills, {dict(site.done)}, ready within {slowest:.2f} s", flush=True
                )
        site.pause(0.5)
        site.settle()
        site.check()
        assert site.node.stop(patience=60) == 0
    finally:
        site.close()
        print(
            f"  of the origin's answers, {len(site.origin.held_back())} were held back", flush=True
        )
    return site.done
