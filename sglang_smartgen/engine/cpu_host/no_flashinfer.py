"""Not an obstacle but a delay: every process of SGLang imports FlashInfer, which serves GPUs only.

Its import takes a fifth of the time that a process needs to start. SGLang does without it where it
cannot be imported, so on a host without a GPU it cannot.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import MutableMapping
from pathlib import Path

from .module_path import put_first

NAME = "no FlashInfer"
FOLDER = Path(__file__).parent / "absent"


def prepare(environ: MutableMapping[str, str]) -> str:
    """Let `import flashinfer` fail at once here and in spawned processes; returns the status."""
    if "flashinfer" in sys.modules:
        return "skipped: flashinfer was imported before"
    if importlib.util.find_spec("flashinfer") is None:
        return "not needed"
    put_first(FOLDER, environ)
    return "applied"
