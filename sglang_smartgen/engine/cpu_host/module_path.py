"""A folder before site-packages: for this process, and through PYTHONPATH for those it spawns."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path


def put_first(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Put `folder` first on the module path; a repeat has no effect."""
    text, inherited = str(folder), environ.get("PYTHONPATH", "")
    if text not in inherited.split(os.pathsep):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [text, inherited]))
    if text not in sys.path:
        sys.path.insert(0, text)
        importlib.invalidate_caches()
