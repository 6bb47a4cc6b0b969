"""Peak memory of servers: the kernel's own high-water mark of every process of a session."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sglang_smartgen.report.processes import session_members

PROC = Path("/proc")
RESET_PEAK = "5"  # written to clear_refs: the peak is the present size from now on


def reset_peak(session: int) -> None:
    """Let the peaks of a session's processes begin anew (as root or their owner)."""
    for pid in session_members(session):
        with contextlib.suppress(OSError):
            (PROC / str(pid) / "clear_refs").write_text(RESET_PEAK)


def peak_bytes(session: int) -> int:
    """Sum of the peak resident sizes of a session's processes since `reset_peak`.

    Pages that several processes share count once for each, and peaks of different moments are
    added: an upper bound.
    """
    return sum(_peak_of(PROC / str(pid)) for pid in session_members(session))


def _peak_of(process: Path) -> int:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
