"""The demo on the screen: a table that fills as epochs run, or plain lines where there is no
terminal; and the picture at the end.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from train import Epoch

TRAINING, WAITING, DIRECT = "#3b6ea5", "#e08a3c", "#8a8f98"
# In one order, and in another.
FOREBAY = ("#2a9d6f", "#8a5fa8")
COLUMNS = (
    "data",
    "read through",
    "epoch",
    "samples/s",
    "step waited",
    "origin requests",
    "origin MB",
    "hit ratio",
    "loss",
    "held-out accuracy",
)
TITLES = {"objects": "Individual objects", "shards": "Tar shards"}


def kind(epoch: Epoch) -> str:
    if not epoch.path.startswith("Forebay"):
        return epoch.path
    return f"{epoch.path}, {'cold' if epoch.number == 1 else 'warm'}"


def color(way: int) -> str:
    """The colour of a way of reading one kind of data: the first way is the direct one."""
    return DIRECT if way == 0 else FOREBAY[way - 1]


def cells(epoch: Epoch) -> list[str]:
    done = epoch.done
    return [
        epoch.data,
        kind(epoch),
        str(epoch.number),
        f"{epoch.samples_per_s:,.0f}" if epoch.samples else "",
        f"{epoch.waited:.0%}" if epoch.samples else "",
        f"{epoch.origin_requests:,}" if done else "",
        f"{epoch.origin_bytes / 1e6:,.1f}" if done else "",
        ("–" if epoch.hit_ratio is None else f"{epoch.hit_ratio:.1%}") if done else "",
        f"{epoch.loss:.3f}" if done else "",
        f"{epoch.accuracy:.1%}" if done else "",
    ]


class LiveTable:
    """A table that changes on a terminal, or a heading where there is none. A context manager: the
    terminal is as it was when it is left.
    """

    def __init__(self, heading):
        self.console = Console(highlight=False)
        self.heading = heading
        self.live = (
            Live(console=self.console, refresh_per_second=8, get_renderable=self._table)
            if self.console.is_terminal
            else None
        )

    def __enter__(self):
        if self.live:
            self.live.start()
        else:
            print(self._line(self.heading), flush=True)
        return self

    def __exit__(self, *_):
        if self.live:
            self.live.stop()


class Screen(LiveTable):
    """Shows epochs as they go."""

    def __init__(self):
        super().__init__(COLUMNS)
        self.epochs: list[Epoch] = []

    def show(self, epoch: Epoch) -> None:
        if not self.epochs or self.epochs[-1] is not epoch:
            self.epochs.append(epoch)
        if not self.live and epoch.done:
            print(self._line(cells(epoch)), flush=True)

    @staticmethod
    def _line(parts) -> str:
        widths = (8, 20, 5, 9, 11, 15, 9, 9, 6, 17)
        return "  ".join(
            part.ljust(w) if i < 2 else part.rjust(w)
            for i, (part, w) in enumerate(zip(parts, widths, strict=True))
        )

    def _table(self) -> Table:
        # A narrow terminal gets fewer columns instead of cut ones.
        with_loss, with_bar = self.console.width >= 90, self.console.width >= 112
        shown = [i for i, column in enumerate(COLUMNS) if with_loss or column != "loss"]
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for i in shown:
            column = COLUMNS[i].replace(" ", "\n") if i > 1 else COLUMNS[i]
            table.add_column(
                column, justify="left" if i < 2 else "right", vertical="bottom", no_wrap=True
            )
        if with_bar:
            table.add_column("", width=20, no_wrap=True)
        for i, epoch in enumerate(self.epochs):
            if i > 0 and (self.epochs[i - 1].data, self.epochs[i - 1].path) != (
                epoch.data,
                epoch.path,
            ):
                table.add_section()
            row = cells(epoch)
            style = "green" if epoch.path.startswith("Forebay") else ""
            table.add_row(
                *(row[at] for at in shown), *([self._bar(epoch)] if with_bar else ()), style=style
            )
        return table

    @staticmethod
    def _bar(epoch: Epoch) -> Text:
        """The progress of an epoch; once it is done, its time split into training and waiting."""
        if epoch.done:
            waited = round(20 * epoch.waited)
            return Text("█" * (20 - waited), style=TRAINING) + Text("█" * waited, style=WAITING)
        through = round(20 * epoch.samples / epoch.samples_total)
        return Text("━" * through, style="white") + Text("━" * (20 - through), style="bright_black")


def picture(groups: dict[str, list[list[Epoch]]], conditions: str, credit: str, to: Path) -> None:
    """One row for each kind of data: the time of each epoch, what it took from the far bucket, and
    how the loss fell over the same time.
    """
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
        }
    )
    figure, axes = plt.subplots(
        len(groups),
        3,
        figsize=(14.5, 1.6 + 1.75 * sum(len(ways) for ways in groups.values())),
        width_ratios=(1.35, 1.1, 1.05),
        height_ratios=[len(ways) for ways in groups.values()],
        squeeze=False,
    )
    for panels, (what, ways) in zip(axes, groups.items(), strict=True):
        rows, at = [], 0.0
        for way in ways:
            rows += [at - i for i in range(len(way))]
            at -= len(way) + 0.45
        epochs = [epoch for way in ways for epoch in way]
        colors = [color(i) for i, way in enumerate(ways) for _ in way]
        _times(panels[0], rows, epochs)
        panels[0].set_title(f"{TITLES[what]}: time of each epoch", loc="left")
        _origin(panels[1], rows, epochs, colors)
        _learning(panels[2], ways)
    figure.suptitle(
        "Training from a bucket far away: direct, and through Forebay",
        x=0.012,
        ha="left",
        fontsize=15,
        fontweight="bold",
    )
    handles = [
        Patch(color=TRAINING, label="training step runs"),
        Patch(color=WAITING, label="training step waits for data"),
    ]
    handles += [
        Patch(color=DIRECT, label="direct S3"),
        Patch(color=FOREBAY[0], label="Forebay, full random order"),
        Patch(color=FOREBAY[1], label="Forebay, shards in blocks"),
    ]
    figure.legend(
        handles=handles, loc="upper left", ncols=5, frameon=False, bbox_to_anchor=(0.005, 0.967)
    )
    figure.text(
        0.012,
        0.012,
        conditions + "\n" + credit,
        fontsize=8.5,
        color="#444444",
        va="bottom",
        linespacing=1.5,
    )
    figure.tight_layout(rect=(0, 0.105, 1, 0.94), h_pad=2)
    to.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
        figure.savefig(to.with_suffix(suffix), dpi=130)
    plt.close(figure)


def _times(axis, rows: list[float], epochs: list[Epoch]) -> None:
    longest = max(e.seconds for e in epochs)
    axis.barh(rows, [e.step_s for e in epochs], color=TRAINING)
    axis.barh(rows, [e.wait_s for e in epochs], left=[e.step_s for e in epochs], color=WAITING)
    for row, e in zip(rows, epochs, strict=True):
        axis.text(
            e.seconds + longest * 0.015,
            row,
            f"{e.samples_per_s:,.0f} samples/s, waited {e.waited:.0%}",
            va="center",
            fontsize=9,
        )
    axis.set(
        yticks=rows,
        yticklabels=[f"{kind(e)}, epoch {e.number}" for e in epochs],
        xlim=(0, longest * 1.6),
        xlabel="seconds per epoch",
    )
    axis.tick_params(axis="y", length=0)


def _origin(axis, rows: list[float], epochs: list[Epoch], colors: list[str]) -> None:
    most = max(e.origin_bytes for e in epochs) / 1e6
    axis.barh(
        rows,
        [e.origin_bytes / 1e6 for e in epochs],
        color=colors,
    )
    for row, e in zip(rows, epochs, strict=True):
        label = (
            f"{e.origin_bytes / 1e6:,.0f} MB, {e.origin_requests:,}"
            f" request{'s' * (e.origin_requests != 1)}"
            if e.origin_requests
            else "nothing"
        )
        if e.hit_ratio is not None:
            label += f", hit ratio {e.hit_ratio:.0%}"
        axis.text(e.origin_bytes / 1e6 + most * 0.02, row, label, va="center", fontsize=9)
    axis.set(yticks=[], xlim=(0, most * 2.1), xlabel="MB that the far bucket sent in the epoch")
    axis.set_title("From the far bucket", loc="left")


def _learning(axis, ways: list[list[Epoch]]) -> None:
    for i, way in enumerate(ways):
        points = [point for e in way for point in e.losses]
        smooth = [
            sum(loss for _, loss in points[max(0, at - 9) : at + 1]) / min(at + 1, 10)
            for at in range(len(points))
        ]
        axis.plot([second for second, _ in points], smooth, color=color(i), lw=1.8)
        axis.plot(points[-1][0], smooth[-1], "o", color=color(i), ms=5)
        note = (
            f"{way[0].path.split(',')[0]}: {points[-1][0]:.1f} s, held-out accuracy"
            f" {way[-1].accuracy:.0%}"
        )
        axis.text(
            0.99,
            0.98 - 0.08 * i,
            note,
            transform=axis.transAxes,
            color=color(i),
            fontsize=9,
            ha="right",
            va="top",
        )
    axis.set(
        yscale="log",
        xlabel=f"seconds, {len(ways[0])} epochs",
        ylabel="training loss (mean of 10 steps)",
    )
    axis.set_xlim(0)
    # Room for a line of text above the curves for each way.
    axis.set_ylim(top=axis.get_ylim()[1] * 1.8 ** (len(ways) - 1))
    axis.yaxis.set_major_locator(FixedLocator([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_title("Training loss over that time", loc="left")
