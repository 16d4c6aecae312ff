"""A process that saves checkpoints through a node again and again, some of them given up and some
removed, until SIGTERM: what `checkpoint_kill.py` runs while it kills that node.

Each line of its output is what it was told about one checkpoint, as JSON: `event`, `id`. What a
file holds is a function of the checkpoint and the file's name.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

import forebay
import forebay.checkpoint as ckpt
from forebay.checkpoint import _wire

BUCKET, UNDER = "scratch", "loop"
WRITERS = 3
SIZES = (0, 10, 100_000, 1_000_000, 3_000_000, 11_000_000)
#: Longer than a node needs to come back. What takes longer hangs.
PATIENCE = 90.0


def content(name: str, number: int, file: str, size: int) -> bytes:
    """What a file of the `number`-th checkpoint called `name` holds."""
    return hashlib.shake_128(f"{name} {number} {file}".encode()).digest(size)


class Saver:
    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.ending = threading.Event()
        self.lock = threading.Lock()

    def tell(self, event: str, id: str, **more: object) -> None:
        with self.lock:
            print(json.dumps({"event": event, "id": id, **more}), flush=True)

    def run(self, writer: int) -> None:
        client = forebay.Client(self.url, timeout=10)
        rng = random.Random(f"{self.seed} {writer}")
        number = 0
        while not self.ending.is_set():
            number += 1
            # Half of them replace each other.
            name = f"last-{writer}" if rng.random() < 0.5 else f"step-{writer}-{number}"
            files = {
                f"f{i}": size
                for i, size in enumerate(
                    rng.choices(SIZES, (2, 3, 4, 3, 2, 1), k=rng.randrange(1, 4))
                )
            }
            if rng.random() < 0.3:
                files[".metadata"] = 1000
            self.save(client, rng, name, number, files)

    def save(
        self, client: forebay.Client, rng: random.Random, name: str, number: int, files: dict
    ) -> None:
        full = f"s3://{BUCKET}/{UNDER}/{name}"
        end = time.monotonic() + PATIENCE
        try:
            writing = _wire.Writing(client, full, size=sum(files.values()))
        except forebay.Error:
            time.sleep(0.05)
            return
        self.tell("begun", writing.id, name=name, number=number, files=files)
        try:
            for file, size in files.items():
                writing.put(file, [content(name, number, file, size)])
        except forebay.Error:
            writing.abandon()
            return
        last = [file for file in files if file == ".metadata"]

        def commit() -> ckpt.Checkpoint:
            return writing.commit(last=last, meta={"number": number})

        try:
            saved = self.until(end, commit)
        except forebay.NotFound:
            # It was begun at a node that was killed since.
            return
        self.tell("staged", writing.id)
        what = rng.random()
        if what < 0.4:
            return
        if what < 0.5:
            self.tell("giving up", writing.id)
            try:
                self.until(end, saved.abandon)
            except forebay.NotFound:
                pass  # It was given up; the answer was lost.
            return
        try:
            self.until(end, lambda: saved.wait(5))
        except forebay.NotFound:
            self.tell("lost", writing.id)
            return
        self.tell("durable", writing.id)
        if what < 0.6:
            self.tell("removing", writing.id)
            try:
                self.until(end, lambda: _wire.remove(client, full, writing.id))
            except forebay.NotFound:
                pass

    def until(self, end: float, does: Callable[[], object]) -> object:
        """Does it again and again while the node is away."""
        while True:
            try:
                return does()
            except forebay.NotFound:
                raise
            except forebay.Error:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


def main() -> int:
    saver = Saver(sys.argv[1], int(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: saver.ending.set())
    threads = [threading.Thread(target=saver.run, args=(i,)) for i in range(WRITERS)]
    failed: list[BaseException] = []
    threading.excepthook = lambda args: failed.append(args.exc_value or RuntimeError("?"))
    for thread in threads:
        thread.start()
    for thread in threads:
        # In pieces: a signal is handled in between.
        while thread.is_alive():
            thread.join(0.2)
    for e in failed:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
