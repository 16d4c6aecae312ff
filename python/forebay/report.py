"""The report of a run: how well a training loop was fed, and what that took."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from . import _forebay
from ._words import counted

__all__ = ["Report"]


class Report:
    """What :meth:`forebay.Loader.report` returns. ``print(report)`` shows it as text; a notebook
    shows it with its pictures.

    Figures that were not measured are absent: joules where there is no sensor, bytes by source
    where the node is of an earlier release. Estimates are marked as such.
    """

    def __init__(self, figures: dict[str, Any]) -> None:
        self._json = _forebay.report_json(json.dumps(figures))

    def json(self) -> dict[str, Any]:
        """All figures, as a dict that ``json.dumps`` takes. Times are in seconds, sizes in bytes,
        energy in joules, shares from 0 to 1; ``None`` and empty lists are what was not measured.
        """
        found: dict[str, Any] = json.loads(self._json)
        return found

    @property
    def warnings(self) -> list[str]:
        """What is wrong, and what to do about it: one text each."""
        return [f"{w['what']}: {w['advice']}" for w in self.json()["warnings"]]

    def html(self, path: str | PathLike[str] | None = None) -> str:
        """One HTML page that refers to nothing else: it opens without a network.

        Args:
            path: Also write it to this file.
        """
        page = _forebay.report_html(self._json)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        return _forebay.report_html(self._json, True)

    def __str__(self) -> str:
        return _forebay.report_text(self._json)

    def __repr__(self) -> str:
        figures = self.json()
        run, unit = figures["run"] or {}, (figures["unit"] or "samples").removesuffix("s")
        samples = counted(run.get("samples", 0), unit)
        return f"<forebay.Report of {samples}: print it, or .html(path)>"
