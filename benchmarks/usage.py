"""CPU time and memory of processes, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path


def family(pid: int) -> list[int]:
    """The process and its descendants that are alive."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    except OSError:
        pass
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and its living descendants (DataLoader's workers)."""
    total = 0.0
    for one in family(pid):
        try:
            # The clock of a process's CPU time (clock_getcpuclockid(3)) counts nanoseconds, where
            # /proc/PID/stat counts steps of 10 ms.
            total += time.clock_gettime((~one << 3) | 2)
        except OSError:
            continue
    return total


def forget_peak(pid: int) -> None:
    """Resets the greatest resident size."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        pass


def resident_bytes(pid: int) -> int:
    """The resident size of the process alone."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int) -> int:
    """The greatest resident sizes of the process and its descendants, added up; pages that workers
    share with it count once per process.
    """
    total = 0
    for one in family(pid):
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
        )
    return total
