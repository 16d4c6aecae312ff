"""Rows on the terminal and in a JSON file, with each goal beside the figure that it is about."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

VERSION = 1


def goal(figure: str, at_least: float) -> dict:
    return {"figure": figure, "at_least": at_least}


def judged(row: dict) -> str:
    """What a row's goal says of it; empty if it has none."""
    if "goal" not in row:
        return ""
    wanted, got = row["goal"]["at_least"], row[row["goal"]["figure"]]
    by = f"{abs(got - wanted) / wanted * 100:.0f} %"
    return f"goal {text(wanted)}: " + (f"met, {by} above" if got >= wanted else f"missed by {by}")


def text(value) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


class Report:
    """Rows of one script. Each is printed when it is there, so that a long run shows where it is."""

    def __init__(self, title: str, columns: list[tuple[str, str, int]], settings: dict) -> None:
        self.title, self.columns, self.settings, self.rows = title, columns, settings, []
        self.began = time.time()
        print(f"\n{title}\n  {', '.join(f'{k} {v}' for k, v in settings.items())}; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)

    def heading(self, words: str) -> None:
        head = "".join(name.ljust(width) if i == 0 else name.rjust(width) for i, (_, name, width) in enumerate(self.columns))
        print(f"\n{words}\n  {head}", flush=True)

    def add(self, row: dict) -> dict:
        self.rows.append(row)
        cells = [text(row.get(key)) or "-" for key, _, _ in self.columns]
        line = "".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, (_, _, w)) in enumerate(zip(cells, self.columns, strict=True)))
        print(f"  {line}   {judged(row)}".rstrip(), flush=True)
        return row

    def save(self, path: Path | None) -> None:
        """Prints which goals were missed, and writes the file."""
        with_goals = [r for r in self.rows if "goal" in r]
        missed = [r for r in with_goals if judged(r).find("missed") >= 0]
        if with_goals:
            print(f"\n  {len(with_goals) - len(missed)} of {len(with_goals)} goals met" + "".join(f"\n    {r['name']}: {judged(r)}" for r in missed))
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "kernel": platform.release(), "python": platform.python_version()}
        whole = {"version": VERSION, "title": self.title, "began": self.began, "machine": machine, "settings": self.settings, "rows": self.rows}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n")
        part.replace(path)
        print(f"  kept: {path}", flush=True)
