"""The texts of `smartgen bench select`: those that calibrate, and others that measure.

Prose of the package, and reference pages and source code of the Python that runs this; no text
or module is in both sets.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.resources import files
from pydoc_data.topics import topics

from sglang_smartgen.report.prompts import demo_text


def calibration_texts() -> dict[str, str]:
    """Texts by name, to make artifacts from."""
    return {
        "novel Persuasion": _data("calibrate_persuasion.txt"),
        "Python pages": topics["specialnames"],
        "Python source": _source("tarfile"),
        "story Saltmere": demo_text(),
    }


def held_out_texts() -> dict[str, str]:
    """Texts by name, to measure on; each has more than 6,300 tokens of a small vocabulary."""
    return {
        "novel Northanger Abbey": _data("held_out_northanger.txt"),
        "novel Emma": _data("held_out_emma.txt"),
        "Python pages": topics["compound"] + "\n" + topics["types"],
        "Python source": _source("argparse"),
    }


def _data(name: str) -> str:
    return (files("sglang_smartgen.report") / "data" / name).read_text("utf-8")


def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))
