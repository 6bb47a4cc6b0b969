"""Obstacle 2: modules import names from `sgl_kernel`, whose CUDA build cannot load without a GPU.

A stand-in is put before site-packages, for this process and (PYTHONPATH) for those it spawns.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import MutableMapping
from pathlib import Path

from .module_path import put_first

NAME = "sgl_kernel stand-in"
FOLDER = Path(__file__).parent / "stand_in"


def prepare(environ: MutableMapping[str, str]) -> str:
    """Put the stand-in on the module path unless a CPU build is installed; returns the status."""
    if (loaded := sys.modules.get("sgl_kernel")) is not None:
        if Path(loaded.__file__ or "").is_relative_to(FOLDER):
            return "applied"
        return "skipped: sgl_kernel was imported before"
    if str(FOLDER) not in sys.path and installed_for_cpu():
        return "not needed"
    put_first(FOLDER, environ)
    return "applied"


def installed_for_cpu() -> bool:
    """Whether a CPU build of `sgl_kernel` is installed: one without CUDA architecture folders."""
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or spec.submodule_search_locations is None:
        return False
    return not any(any(Path(place).glob("sm[0-9]*")) for place in spec.submodule_search_locations)
