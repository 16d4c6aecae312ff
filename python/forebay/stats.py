"""Where the time of a loader went."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ._ledger import Ledger
from ._meanwhile import Watch
from ._words import counted

if TYPE_CHECKING:
    from ._forebay import Client

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """What a loader did since it began to be iterated over, or since ``loader.stats(reset=True)``.

    All times are in seconds. Those of work that goes on in several threads or connections at once
    (``network_s``, ``decode_s``, and the node's) are sums over them, so they may exceed
    ``seconds``. Times that the node does not report are None.

    Attributes:
        samples: Samples handed out, and
        batches: in how many batches.
        bytes: Bytes of rows received for them, decoded.
        seconds: Between the first request for a batch and the end of the last. After
            ``loader.stats(reset=True)`` in a loop, from then on.
        waited_s: Of these, seconds in which the training step waited for a batch.
        step_s: The rest: the time that the loop itself took, and that between loops over the loader
            (for validation, say), of which a report (:meth:`forebay.Loader.report`) tells nothing.
        network_s: Waiting for the node's answers and receiving them, less the node's own times
            where answers report them.
        decode_s: Time in ``decode``, ``transform`` and ``collate``.
        origin_s, disk_s, prepare_s: The node's times: waiting for the origin, reading its disk,
            decoding and framing.
        reconnects: Connections that were lost and continued.
        skipped: Samples that could not be made and were left out (``on_error="skip"``). They are
            not among ``samples``.
        tokens: Of packs, which are then the samples: tokens handed out,
        padding: places in packs that were left empty,
        tokens_cut: tokens that were cut off or left out because a document was too long, and
        rows_left_out: how many were left out. The sums over all ranks count each once.
    """

    samples: int = 0
    batches: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    step_s: float = 0.0
    network_s: float = 0.0
    decode_s: float = 0.0
    origin_s: float | None = None
    disk_s: float | None = None
    prepare_s: float | None = None
    reconnects: int = 0
    skipped: int = 0
    tokens: int = 0
    padding: int = 0
    tokens_cut: int = 0
    rows_left_out: int = 0

    @property
    def padding_share(self) -> float:
        """The share of packs that is padding, 0 to 1."""
        return self.padding / (self.tokens + self.padding) if self.padding else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples handed out per second of wall-clock time."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def waited_share(self) -> float:
        """The share of the time in which the training step waited, 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures, for a log."""
        return {
            **asdict(self),
            "samples_per_s": self.samples_per_s,
            "waited_share": self.waited_share,
        }

    def __str__(self) -> str:
        times = [
            ("step waited", self.waited_s),
            ("step itself", self.step_s),
            ("network", self.network_s),
            ("decode", self.decode_s),
        ]
        node = [("origin", self.origin_s), ("disk", self.disk_s), ("prepare", self.prepare_s)]
        lines = [
            (
                f"{counted(self.samples, 'sample')} in {counted(self.batches, 'batch', 'batches')},"
                f" {self.bytes / 1e6:,.1f} MB, {self.seconds:.2f} s:"
                f" {self.samples_per_s:,.0f} samples/s, {self.waited_share:.1%} of the time waited"
            ),
            "  " + ", ".join(f"{name} {s:.2f} s" for name, s in times),
        ]
        if any(s is not None for _, s in node):
            lines.append(
                "  at the node: "
                + ", ".join(f"{name} {s:.2f} s" for name, s in node if s is not None)
            )
        if self.tokens or self.padding:
            per_s = self.tokens / self.seconds if self.seconds else 0.0
            lines.append(
                f"  {counted(self.tokens, 'token')}, {per_s:,.0f} tokens/s;"
                f" {self.padding_share:.2%} of the packs are padding,"
                f" {self.tokens_cut:,} tokens were cut off"
                + (f", {counted(self.rows_left_out, 'row')} left out" if self.rows_left_out else "")
            )
        if self.skipped:
            be = "was" if self.skipped == 1 else "were"
            lines.append(f"  {counted(self.skipped, 'sample')} could not be made and {be} skipped")
        return "\n".join(lines)


#: Figures that are whole numbers.
WHOLE = (
    *("samples", "batches", "bytes", "reconnects", "skipped"),
    *("tokens", "padding", "tokens_cut", "rows_left_out"),
)


class Meter:
    """Adds up what :class:`Stats` shows. Any thread may add. ``ledger`` has what
    :meth:`forebay.Loader.report` shows beyond that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ledger = Ledger()
        #: Asks the node what its machine uses meanwhile.
        self.watch: Watch | None = None
        self._sums: dict[str, float] = {}
        self._began: float | None = None
        self._ended = 0.0
        #: Nothing before this moment counts.
        self._since = -math.inf

    def reset(self, goes_on: bool) -> None:
        """Counts anew from now on; ``goes_on``: in the middle of a loop, whose step or wait counts
        from here.
        """
        with self._lock:
            self._since = now = time.perf_counter()
            self._sums = {}
            self._began, self._ended = now if goes_on else None, 0.0
            self.ledger.reset(now)

    @property
    def was_reset(self) -> bool:
        """Whether counting began anew."""
        return self._since > -math.inf

    def loop_began(self, clients: Sequence[Client], several: bool, at: float) -> None:
        """A loop that reads by these clients, from one node or ``several``, requests its first
        batch.
        """
        self.ledger.loop_began(at)
        if self.watch is None:
            several = several or len({client.url for client in clients}) > 1
            self.watch = Watch(self.ledger, clients[0], several)
        self.watch.loop_goes_on()

    def computed(self, epoch: int, began: float, ended: float) -> None:
        """A loop worked on a batch, and requests the next one."""
        self.ledger.computed(epoch, began, ended)
        if self.watch is not None:
            self.watch.loop_goes_on()

    def add(self, **amounts: float) -> None:
        """Adds to the sums that have these names in :class:`Stats`."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def came(self, epoch: int, sources: Mapping[str, float], **amounts: float) -> None:
        """Rows of an epoch came: adds to the sums, and to those of the epoch, where the ``sources``
        of their bytes are told too.
        """
        self.add(**amounts)
        self.ledger.note(epoch, **amounts, **sources)

    def began(self) -> float:
        """A batch is requested: now."""
        now = time.perf_counter()
        with self._lock:
            if self._began is None:
                self._began = now
        return now

    def ended(self, began: float) -> float:
        """The batch that was requested at ``began`` is there: now."""
        now = time.perf_counter()
        with self._lock:
            self._ended = now
            waited = now - min(max(began, self._since), now)
            self._sums["waited_s"] = self._sums.get("waited_s", 0) + waited
        return now

    def stats(self) -> Stats:
        with self._lock:
            sums: dict[str, Any] = dict(self._sums)
            seconds = self._ended - self._began if self._began is not None and self._ended else 0.0
        for whole in WHOLE:
            sums[whole] = int(sums.get(whole, 0))
        return Stats(**sums, seconds=seconds, step_s=max(0.0, seconds - sums.get("waited_s", 0.0)))
