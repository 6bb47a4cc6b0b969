"""`smartgen plot FILE.jsonl --out FOLDER`: the figures of the benchmarks' lines, as PNG.

Each figure is one function that takes the data and a folder and returns what it wrote; a figure
whose data is missing is skipped with one line that says what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.plot_arms import ablation, by_network, sensitivity
from sglang_smartgen.report.plot_data import Data, NothingToPlotError, read
from sglang_smartgen.report.plot_latency import cumulative, steps
from sglang_smartgen.report.plot_orders import orders
from sglang_smartgen.report.plot_timeline import timeline

FIGURES: dict[str, Callable[[Data, Path], Path]] = {
    "cumulative": cumulative,
    "network": by_network,
    "ablation": ablation,
    "steps": steps,
    "orders": orders,
    "sensitivity": sensitivity,
    "timeline": timeline,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen plot`."""
    parser.add_argument(
        "files", nargs="+", type=Path, help="of bench network --out or bench orders --out"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG files")
    parser.add_argument(
        "--only", default=",".join(FIGURES), help="figures, of " + ", ".join(FIGURES)
    )
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Draw what the files have data for; 0 when there was something. Raises ConfigError."""
    names = [name.strip() for name in args.only.split(",") if name.strip()]
    if not names or not set(names) <= set(FIGURES):
        raise ConfigError(f"--only is {args.only!r}; allowed is a list of {', '.join(FIGURES)}")
    data = read(args.files)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out is {args.out}: {error.strerror}") from None
    written, skipped = draw(data, args.out, names)
    if args.format == "json":
        print(json.dumps({"written": [str(path) for path in written], "skipped": skipped}))
    else:
        for path in written:
            print(path)
        for name, why in skipped.items():
            print(f"skipped {name}: {why}", file=sys.stderr)
    return 0 if written else 1


def draw(data: Data, folder: Path, names: list[str]) -> tuple[list[Path], dict[str, str]]:
    """The files that were written, and why the other figures were not, by name."""
    written: list[Path] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            written.append(FIGURES[name](data, folder))
        except NothingToPlotError as missing:
            skipped[name] = str(missing)
    return written, skipped
