"""The measured loop: epochs of training from one reader, with what they took from the origin."""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
from data import LANGUAGES, Sample
from model import Model, features


@dataclass
class Epoch:
    """What one epoch took. Times in seconds, bytes as the far bucket sent them (HTTP headers
    included).
    """

    data: str
    path: str
    number: int
    samples_total: int
    samples: int = 0
    wait_s: float = 0
    step_s: float = 0
    origin_requests: int = 0
    origin_bytes: int = 0
    hit_ratio: float | None = None
    loss: float = float("nan")
    accuracy: float = float("nan")
    done: bool = False
    # (seconds since this way of reading began, loss of the step)
    losses: list = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.wait_s + self.step_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0

    @property
    def waited(self) -> float:
        """The share of the time that the training step waited for data."""
        return self.wait_s / self.seconds if self.seconds else 0

    def as_dict(self) -> dict:
        return asdict(self) | {
            "seconds": self.seconds,
            "samples_per_s": self.samples_per_s,
            "waited": self.waited,
        }


def run(
    what: str,
    reader,
    epochs: int,
    training: list[Sample],
    held_out: tuple[np.ndarray, np.ndarray],
    origin: Callable[[], dict],
    cache: Callable[[], tuple[float, float]] | None,
    show: Callable[[Epoch], None],
    step_s: float = 0,
    look: Callable[[int, list], None] | None = None,
) -> list[Epoch]:
    """Trains a new model from `reader` for `epochs`; each way of reading starts from the same
    numbers, and those that choose samples see them in the same order. A step takes `step_s`
    seconds at least; `look` is given the number of the epoch and the recordings of each batch.
    """
    model, results, before = Model(len(LANGUAGES), seed=1), [], 0.0
    for number in range(1, epochs + 1):
        order = list(training)
        random.Random(number).shuffle(order)
        epoch = Epoch(what, reader.name, number, len(order))
        results.append(epoch)
        origin_before, cache_before = origin(), cache() if cache else None
        batches = iter(reader.epoch(order, seed=number))
        mark = time.perf_counter()
        while True:
            batch = next(batches, None)
            arrived = time.perf_counter()
            epoch.wait_s += arrived - mark
            if batch is None:
                break
            recordings, labels = batch
            loss = model.step(np.stack([features(recording) for recording in recordings]), labels)
            time.sleep(max(0, arrived + step_s - time.perf_counter()))
            mark = time.perf_counter()
            epoch.step_s += mark - arrived
            epoch.samples += len(labels)
            epoch.losses.append((before + epoch.seconds, loss))
            if look:
                look(number, recordings)
            show(epoch)
            # Drawing on the screen counts neither as waiting nor as training.
            mark = time.perf_counter()
        if epoch.samples != len(order):
            raise RuntimeError(f"{reader.name} gave {epoch.samples} samples of {len(order)}")
        before += epoch.seconds
        origin_after = origin()
        epoch.origin_requests = origin_after["requests"] - origin_before["requests"]
        epoch.origin_bytes = origin_after["bytes_to_client"] - origin_before["bytes_to_client"]
        if cache:
            hits, misses = (
                after - earlier for after, earlier in zip(cache(), cache_before, strict=True)
            )
            epoch.hit_ratio = hits / (hits + misses) if hits + misses else None
        epoch.loss = float(np.mean([loss for _, loss in epoch.losses]))
        epoch.accuracy = model.accuracy(*held_out)
        epoch.done = True
        show(epoch)
    return results
