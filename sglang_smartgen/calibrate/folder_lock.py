"""A folder that one process works in at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class InUseError(RuntimeError):
    """Another process holds the lock."""


def lock_folder(folder: Path, name: str) -> int:
    """Make `folder` and take the lock file `name` in it, which dies with this process.

    Returns the descriptor that holds it; close it to let go. Raises OSError when the folder cannot
    be made or written, InUseError when another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InUseError(f"{folder} is in use") from None
    return lock
