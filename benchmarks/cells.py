"""Lines of a table that are measured in processes of their own: the same script, run with
``--cell`` and what to do as JSON, prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cell", help=argparse.SUPPRESS)


def work_if_asked(args: argparse.Namespace, work: Callable[[dict], dict]) -> None:
    """In the process of a line: does its work and ends. In the process that makes the table:
    nothing.
    """
    if not args.cell:
        return
    print(json.dumps(work(json.loads(args.cell))))
    sys.stdout.flush()
    # Some clients' threads do not end by themselves.
    os._exit(0)


class Cell:
    """A line that is being measured; errors appear on its standard error. ``python``: another one
    than this, with other packages.
    """

    def __init__(self, script: str, cell: dict, python: str | None = None) -> None:
        self._process = subprocess.Popen(
            [python or sys.executable, script, "--cell", json.dumps(cell)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def figures(self, limit_s: float | None = None) -> dict | None:
        """What it measured; None if it failed, or took longer than ``limit_s`` and was ended."""
        try:
            out, _ = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            print(f"  ended after {limit_s:g} s", file=sys.stderr, flush=True)
            return None
        return json.loads(out.splitlines()[-1]) if self._process.returncode == 0 and out else None


def measured(script: str, cell: dict, what: str) -> dict:
    """Waits for one line. Ends the program if it fails."""
    figures = Cell(script, cell).figures()
    if figures is None:
        sys.exit(f"{what} failed; see above")
    return figures
