"""Rows on the terminal and in a JSON file, with each goal next to its figure."""

from __future__ import annotations

import json
import os
import platform
import textwrap
import time
from pathlib import Path

VERSION = 1


def goal(figure: str, at_least: float | None = None, *, at_most: float | None = None) -> dict:
    return (
        {"figure": figure, "at_least": at_least}
        if at_most is None
        else {"figure": figure, "at_most": at_most}
    )


def judged(row: dict) -> list[tuple[bool, str]]:
    """For each of a row's goals, whether it was met, and by how much."""
    verdicts = []
    for one in row.get("goals", []):
        least, got = "at_least" in one, row[one["figure"]]
        wanted = one["at_least"] if least else one["at_most"]
        met = got >= wanted if least else got <= wanted
        if wanted == 0:
            verdicts.append((met, f"goal 0: {'met' if met else 'missed'}"))
            continue
        by = f"{abs(got - wanted) / wanted * 100:.1f} %"
        verdicts.append(
            (
                met,
                f"goal {text(wanted)}: "
                + (
                    f"met, {by} {'above' if got >= wanted else 'below'}"
                    if met
                    else f"missed by {by}"
                ),
            )
        )
    return verdicts


def text(value) -> str:
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.1f}"
            if abs(value) >= 10
            else f"{value:.2f}"
        )
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


class Report:
    """Rows of one script. Each is printed as it arrives, so that a long run shows its progress."""

    def __init__(self, title: str, columns: list[tuple[str, str, int]], settings: dict) -> None:
        self.title, self.columns, self.settings = title, columns, settings
        self.rows, self.notes, self.times = [], [], {}
        self.began = time.time()
        print(
            f"\n{title}\n  {', '.join(f'{k} {v}' for k, v in settings.items())}; load of"
            f" the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            flush=True,
        )

    def heading(self, words: str) -> None:
        head = "".join(
            name.ljust(width) if i == 0 else name.rjust(width)
            for i, (_, name, width) in enumerate(self.columns)
        )
        print(f"\n{words}\n  {head}", flush=True)

    def add(self, row: dict) -> dict:
        self.rows.append(row)
        cells = [text(row.get(key)) or "-" for key, _, _ in self.columns]
        line = "".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, (_, _, w)) in enumerate(zip(cells, self.columns, strict=True))
        )
        print(f"  {line}   {'; '.join(verdict for _, verdict in judged(row))}".rstrip(), flush=True)
        return row

    def note(self, words: str) -> None:
        """A line beside the rows: what figures mean, or what is not there."""
        self.notes.append(words)
        print(textwrap.fill(words, 98, initial_indent="  ", subsequent_indent="    "), flush=True)

    def save(self, path: Path | None) -> None:
        """Prints which goals were missed, and writes the file."""
        verdicts = [
            (met, f"{row['name']}: {verdict}") for row in self.rows for met, verdict in judged(row)
        ]
        if verdicts:
            print(
                f"\n  {sum(met for met, _ in verdicts)} of {len(verdicts)} goals met"
                + "".join(f"\n    {v}" for met, v in verdicts if not met)
            )
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
        whole = {
            "version": VERSION,
            "title": self.title,
            "began": self.began,
            "machine": machine,
            "settings": self.settings,
            "rows": self.rows,
            "notes": self.notes,
            "times": self.times,
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n")
        part.replace(path)
        print(f"  kept: {path}", flush=True)
