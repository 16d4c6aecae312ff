"""The cluster's demo on the screen, and its picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table
from show import LiveTable

TRAINING, WAITING = "#3b6ea5", "#e08a3c"
OWN, PEERS, BUCKET = "#2a9d6f", "#8a5fa8", "#c0504d"
NODES = ("#35618f", "#c98a2b", "#7d9fbf", "#6f8f4e")
COLUMNS = (
    ("epoch", 5),
    ("seconds", 7),
    ("step waited", 11),
    ("longest", 8),
    ("own disk", 9),
    ("other nodes", 11),
    ("bucket MB", 9),
    ("hit ratio", 9),
    ("samples", 7),
    ("loss", 6),
)


def from_where(epoch: dict) -> tuple[float, float, float]:
    """Bytes that came from the disk of the node that was asked, from other nodes' disks, and from
    the bucket. What the bucket sent includes headers; what it sent to one node, and that one to
    another, counts as the bucket's.
    """
    bucket = min(epoch["bucket_bytes"], epoch["delivered_bytes"])
    rest = epoch["delivered_bytes"] - bucket
    peers = min(max(epoch["peer_bytes"] - bucket * (1 - 1 / 3), 0), rest)
    return rest - peers, peers, epoch["bucket_bytes"]


def cells(epoch: dict) -> list[str]:
    own, peers, bucket = from_where(epoch)
    delivered = epoch["delivered_bytes"]
    return [
        str(epoch["epoch"]),
        f"{epoch['seconds']:.1f}",
        f"{epoch['waited_s'] / epoch['seconds']:.0%}",
        f"{epoch['longest_wait_s'] * 1e3:,.0f} ms",
        f"{own / 1e6:,.1f}",
        f"{peers / 1e6:,.1f}",
        f"{bucket / 1e6:,.1f}",
        f"{max(0, 1 - bucket / delivered):.1%}",
        f"{epoch['samples']:,}",
        f"{epoch['loss']:.3f}",
    ]


class Screen(LiveTable):
    """Shows the running epoch, and those before it."""

    def __init__(self):
        super().__init__([name for name, _ in COLUMNS])
        self.epochs: list[dict] = []
        self.now = ""
        self.told = 0

    def show(self, story, epoch: int, members: list) -> None:
        """After a step."""
        events = story.events[self.told :]
        self.told = len(story.events)
        for at, what in events:
            line = f"  {at:6.1f} s  {what}"
            if self.live:
                self.live.console.print(line)
            else:
                print(line, flush=True)
        nodes = " ".join(m.name if m.runs else "·" for m in members)
        look = story.looks[-1] if story.looks else None
        sent = look.bucket_bytes / 1e6 if look else 0
        second = story.second(max(0.0, story.now() - 1))
        self.now = (
            f"  {story.now():6.1f} s  epoch {epoch}, nodes {nodes}; in the last second:"
            f" {second['delivered_bytes'] / 1e6:,.1f} MB, hit ratio {percent(second['hit_ratio'])},"
            f" steps waited {second['waited_s'] * 1e3:,.0f} ms;"
            f" the bucket has sent {sent:,.1f} MB in all"
        )

    def epoch(self, epoch: dict) -> None:
        """After an epoch."""
        self.epochs.append(epoch)
        if not self.live:
            print(self._line(cells(epoch)) + f"  {epoch['what']}", flush=True)

    @staticmethod
    def _line(parts) -> str:
        return "  ".join(part.rjust(width) for part, (_, width) in zip(parts, COLUMNS, strict=True))

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", caption=self.now)
        table.caption_justify = "left"
        for name, _ in COLUMNS:
            table.add_column(name.replace(" ", "\n"), justify="right", vertical="bottom")
        table.add_column("")
        for epoch in self.epochs:
            table.add_row(*cells(epoch), epoch["what"])
        return table


def percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.0%}"


def table(seconds: list[dict], events: list[tuple[float, str]]) -> None:
    """Every second of it, with what happened in it."""
    names = list(seconds[0]["sent_bytes"])
    widths = (6, 5, 8, 9, 9, *(6 for _ in names))
    heads = ("second", "MB", "from the", "hit ratio", "waited", *(f"{n} sent" for n in names))
    print()
    print("  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)))
    print(
        "  ".join(
            part.rjust(width) for part, width in zip(("", "", "bucket"), widths[:3], strict=True)
        )
    )
    for second in seconds:
        parts = [
            f"{second['at']}",
            f"{second['delivered_bytes'] / 1e6:.1f}",
            f"{second['bucket_bytes'] / 1e6:.1f}",
            percent(second["hit_ratio"]),
            f"{second['waited_s'] * 1e3:,.0f} ms",
        ]
        for name in names:
            runs = name in second["running"] or second["sent_bytes"][name]
            parts.append(f"{second['sent_bytes'][name] / 1e6:.1f}" if runs else "·")
        what = [what for at, what in events if 0 <= at - second["at"] < 1]
        line = "  ".join(part.rjust(width) for part, width in zip(parts, widths, strict=True))
        print(f"{line}  {', '.join(what)}".rstrip())


def picture(story, conditions: str, credit: str, to: Path) -> None:
    """Over time: where the bytes came from, how long each step waited, what the bucket had sent."""
    plt.rcParams.update(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
        | {"axes.titlesize": 11, "axes.titleweight": "bold"}
    )
    figure, axes = plt.subplots(
        5, 1, figsize=(13, 14), sharex=True, height_ratios=(1.25, 1.1, 1.1, 0.7, 0.9)
    )
    where, nodes, steps, hits, total = axes
    _where(where, story)
    _nodes(nodes, story)
    _steps(steps, story)
    _hits(hits, story)
    _total(total, story)
    for axis in axes:
        _epochs(axis, story, named=axis is where)
    end = story.steps[-1].began + story.steps[-1].waited + story.steps[-1].trained
    total.set(xlim=(0, end), xlabel="seconds of training")
    figure.suptitle(
        "One cache of several nodes: one is killed, comes back, and a fourth joins",
        x=0.012,
        ha="left",
        fontsize=15,
        fontweight="bold",
    )
    figure.text(
        0.012, 0.008, f"{conditions}\n{credit}", fontsize=8, color="#444444", va="bottom", wrap=True
    )
    figure.tight_layout(rect=(0, 0.045, 1, 0.975), h_pad=1.5)
    to.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
        figure.savefig(to.with_suffix(suffix), dpi=130)
    plt.close(figure)


def _where(axis, story) -> None:
    """Rates over half a second; between the times of counting, counts lie on a line."""
    end = story.steps[-1].began + story.steps[-1].waited
    grid = np.arange(0, end + 0.5, 0.5)
    arrived = [step.began + step.waited for step in story.steps]
    sizes = np.cumsum([step.bytes for step in story.steps])
    looked = [look.at for look in story.looks]
    rate = lambda at, counts: np.diff(np.interp(grid, at, counts)) / 0.5 / 1e6  # noqa: E731
    delivered = rate([0, *arrived], [0, *sizes])
    bucket = np.minimum(rate(looked, [look.bucket_bytes for look in story.looks]), delivered)
    # What the bucket sent to one node reached the loop through another two times out of three.
    peers = rate(looked, [look.peer_bytes for look in story.looks]) - bucket * (2 / 3)
    peers = np.clip(peers, 0, delivered - bucket)
    axis.stackplot(
        (grid[1:] + grid[:-1]) / 2,
        bucket,
        peers,
        delivered - bucket - peers,
        colors=(BUCKET, PEERS, OWN),
        labels=("from the bucket", "from other nodes", "from the own disk"),
        linewidth=0,
    )
    axis.set_ylabel("MB/s to the loop")
    axis.set_title("Where the samples came from", loc="left", pad=34)
    axis.legend(loc="lower right", ncols=3, frameon=False, bbox_to_anchor=(1, 1.17))


def _nodes(axis, story) -> None:
    """Rates over half a second, as above."""
    looked = [look.at for look in story.looks]
    grid = np.arange(0, looked[-1] + 0.5, 0.5)
    names = list(story.looks[0].sent_bytes)
    counts = [np.interp(grid, looked, [k.sent_bytes[name] for k in story.looks]) for name in names]
    rates = [np.diff(count) / 0.5 / 1e6 for count in counts]
    middle = (grid[1:] + grid[:-1]) / 2
    axis.stackplot(middle, rates, colors=NODES, labels=names, linewidth=0)
    axis.set_ylabel("MB/s to the loop")
    axis.set_title("Which node sent them", loc="left")
    axis.legend(loc="lower right", ncols=4, frameon=False, bbox_to_anchor=(1, 0.98))


def _hits(axis, story) -> None:
    seconds = [second for second in story.by_second() if second["hit_ratio"] is not None]
    at = [second["at"] + second["seconds"] / 2 for second in seconds]
    axis.plot(at, [100 * second["hit_ratio"] for second in seconds], color=OWN, lw=2, marker=".")
    axis.set_ylim(0, 108)
    axis.set_ylabel("%")
    title = "Hit ratio, second by second: bytes to the loop that the bucket did not send then"
    axis.set_title(title, loc="left")


def _steps(axis, story) -> None:
    at = [step.began for step in story.steps]
    wide = [max(step.waited + step.trained, 1e-3) for step in story.steps]
    trained = np.array([step.trained for step in story.steps]) * 1e3
    waited = np.array([step.waited for step in story.steps]) * 1e3
    axis.bar(at, trained, wide, align="edge", color=TRAINING, label="training step runs")
    axis.bar(at, waited, wide, trained, align="edge", color=WAITING, label="it waits for data")
    axis.set_ylabel("ms per step")
    axis.set_title("Each step of the training loop", loc="left")
    axis.legend(loc="lower right", ncols=2, frameon=False, bbox_to_anchor=(1, 0.98))


def _total(axis, story) -> None:
    size = story.dataset_bytes / 1e6
    at = [look.at for look in story.looks]
    sent = [look.bucket_bytes / 1e6 for look in story.looks]
    axis.plot(at, sent, color=BUCKET, lw=2)
    axis.axhline(size, color="#888888", lw=1, ls=":")
    axis.text(0, size, f" the data: {size:,.1f} MB", va="bottom", fontsize=9, color="#444444")
    axis.set_ylabel("MB sent in all")
    axis.set_ylim(0, 1.1 * max(1.2 * size, *sent))
    axis.set_title("What the bucket has sent, to all nodes together", loc="left")


def _epochs(axis, story, named: bool) -> None:
    top = axis.get_ylim()[1]
    for epoch in story.epochs:
        first = next(s.began for s in story.steps if s.epoch == epoch["epoch"])
        if epoch["epoch"] > 1:
            axis.axvline(first, color="#bbbbbb", lw=0.8)
        if named:
            axis.text(first, top * 1.015, f" epoch {epoch['epoch']}", fontsize=9, color="#666666")
    for at, what in story.events:
        axis.axvline(at, color="black", lw=1.2, ls="--")
        if named:
            axis.text(at, top * 1.09, what, fontsize=9, ha="center", fontweight="bold")
