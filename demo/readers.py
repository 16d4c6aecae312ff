"""How a training loop gets its batches: five ways.

A reader's `epoch(samples, seed)` takes the samples in the order of the epoch and yields
`(recordings, labels)` per batch, reading ahead while the training step runs. The two direct readers
do what an ordinary DataLoader with WORKERS workers does: each worker has one request on its way at
a time, over a connection that stays open, and at most PREFETCH batches per worker are ready or on
their way.
"""

import http.client
import queue
import random
import tarfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import data
import numpy as np
from data import Sample
from forebay import Block, Client, open_shards

BATCH = 64
WORKERS = 8
PREFETCH = 2
SHUFFLE_BUFFER = 512
# Per shard: eight of them hold about as many samples as the shuffle buffer.
PART_BYTES = 11 << 18


def in_batches(items: list, size: int = BATCH) -> list[list]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def recordings_and_labels(rows) -> tuple[list, np.ndarray]:
    pairs = [(row["wav"], int(bytes(row["cls"]))) for row in rows]
    return [wav for wav, _ in pairs], np.array([label for _, label in pairs])


def labels_of(samples: list[Sample]) -> np.ndarray:
    return np.array([sample.label for sample in samples])


class Direct:
    """GETs with URLs that were signed beforehand: no time of the measured loop goes into a client
    library.
    """

    def __init__(self, s3, address: str, bucket: str, keys: list[str]):
        def sign(key: str) -> str:
            return s3.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})

        self.address, self.paths = address, {key: sign(key).split(address, 1)[1] for key in keys}
        self.thread = threading.local()

    def get(self, key: str) -> http.client.HTTPResponse:
        if not hasattr(self.thread, "connection"):
            self.thread.connection = http.client.HTTPConnection(self.address, timeout=60)
        self.thread.connection.request("GET", self.paths[key])
        answer = self.thread.connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"GET {key} answered {answer.status}: {answer.read(300)!r}")
        return answer


class DirectObjects(Direct):
    """Each sample is one GET."""

    name = "direct S3"

    def epoch(self, samples: list[Sample], seed: int) -> Iterator:
        with ThreadPoolExecutor(WORKERS) as pool:
            ahead, batches = deque(), iter(in_batches(samples))
            try:
                while True:
                    while len(ahead) < WORKERS * PREFETCH and (batch := next(batches, None)):
                        ahead.append(
                            (
                                batch,
                                [
                                    pool.submit(lambda s=sample: self.get(s.key).read())
                                    for sample in batch
                                ],
                            )
                        )
                    if not ahead:
                        return
                    batch, coming = ahead.popleft()
                    yield [one.result() for one in coming], labels_of(batch)
            finally:
                pool.shutdown(cancel_futures=True)


class DirectShards(Direct):
    """Whole shards as streams, WORKERS at a time, and a shuffle buffer, as WebDataset reads them:
    near to random order, not random.
    """

    name = "direct S3, streamed"

    def epoch(self, samples: list[Sample], seed: int) -> Iterator:
        wanted = {(sample.shard, sample.member): sample for sample in samples}
        shards = queue.SimpleQueue()
        for shard in dict.fromkeys(sample.shard for sample in samples):
            shards.put(shard)
        ready = queue.Queue(WORKERS * PREFETCH * BATCH)
        stopped = threading.Event()

        def worker() -> None:
            try:
                while not stopped.is_set():
                    shard = shards.get_nowait()
                    answer = self.get(shard)
                    with tarfile.open(fileobj=answer, mode="r|", bufsize=1 << 16) as tar:
                        for member in tar:
                            if sample := wanted.get((shard, member.name)):
                                ready.put((tar.extractfile(member).read(), sample.label))
                            if stopped.is_set():
                                return
                    # What is after the last member ends the answer; only then can the connection be
                    # used again.
                    answer.read()
            except queue.Empty:
                ready.put(None)
            except Exception as error:
                ready.put(error)

        threads = [threading.Thread(target=worker, daemon=True) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        try:
            choose, buffer, running = random.Random(seed), [], WORKERS
            batch = []
            while running or buffer:
                while running and len(buffer) < SHUFFLE_BUFFER:
                    item = ready.get()
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        running -= 1
                    else:
                        buffer.append(item)
                if buffer:
                    at = choose.randrange(len(buffer))
                    buffer[at], buffer[-1] = buffer[-1], buffer[at]
                    batch.append(buffer.pop())
                if len(batch) == BATCH or (batch and not buffer):
                    yield [sound for sound, _ in batch], np.array([label for _, label in batch])
                    batch = []
        finally:
            stopped.set()
            while any(thread.is_alive() for thread in threads):
                try:
                    ready.get(timeout=0.05)
                except queue.Empty:
                    pass


class Forebay:
    """One GetBatch request per batch, the next two on their way: the same for objects and for
    members of shards.
    """

    def __init__(self, url: str, from_shards: bool):
        self.name = "Forebay full" if from_shards else "Forebay"
        self.client, self.from_shards = Client(url), from_shards

    def entry(self, sample: Sample) -> tuple:
        return (
            (data.SHARDS, sample.shard, sample.member)
            if self.from_shards
            else (data.OBJECTS, sample.key)
        )

    def epoch(self, samples: list[Sample], seed: int) -> Iterator:
        batches = in_batches(samples)
        requests = ([self.entry(sample) for sample in batch] for batch in batches)
        for batch, answer in zip(
            batches, self.client.batches(requests, prefetch=PREFETCH), strict=True
        ):
            yield [item.data for item in answer], labels_of(batch)


class ForebayShards:
    """Shards side by side, each from front to back, and the rows of the next part of all of them in
    random order: `forebay.open_shards`.
    """

    name = "Forebay block"

    def __init__(self, url: str, stream: bool):
        self.url, self.stream, self.loader = url, stream, None

    def epoch(self, samples: list[Sample], seed: int) -> Iterator:
        # Opening them is a part of the first epoch.
        if self.loader is None:
            # Named one by one, as the direct reader knows them.
            shards = open_shards(
                f"s3://{data.SHARDS}/train-{{00000..{data.SHARD_COUNT - 1:05d}}}.tar",
                url=self.url,
                part_bytes=PART_BYTES,
            )
            # A separate thread makes the batches, ahead of the training step.
            self.loader = shards.loader(
                BATCH,
                shuffle=Block(WORKERS),
                seed=1,
                uneven="pad",
                stream=self.stream,
                threads=1,
                collate=recordings_and_labels,
            )
        self.loader.set_epoch(seed - 1)
        for recordings, labels in self.loader:
            real = self.loader.last.real
            yield recordings[:real], labels[:real]
