"""What `smartgen plot` draws from: the lines of benchmarks, and one slice of them for a figure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.network_cells import FULL, MODES, cell_of
from sglang_smartgen.report.network_report import KEYS, Arm, arms

COLOURS = {
    "stock": "#7f7f7f",
    FULL: "#1f77b4",
    "partial": "#ff7f0e",
    "proactive_only": "#9467bd",
    "smartgen": "#d62728",
    "no_profile": "#8c564b",
    "no_parallel": "#e377c2",
    "no_speculation": "#bcbd22",
}
LABELS = {
    "no_profile": "without profile",
    "no_parallel": "without parallel lanes",
    "no_speculation": "without speculation",
    "proactive_only": "proactive only",
}
DPI = 120
IDEAL = {"color": "black", "linestyle": "--", "linewidth": 1.2, "zorder": 3}


class NothingToPlotError(ValueError):
    """The data of a figure is missing; one line that says which."""


class Data(msgspec.Struct):
    """rows: requests of `bench network`; arms: their medians; orders: reports of `bench orders`."""

    rows: list[dict[str, Any]]
    arms: list[Arm]
    orders: list[dict[str, Any]]


def read(paths: Sequence[Path]) -> Data:
    """Read files of `bench network` and `bench orders`. ConfigError names file and line."""
    rows: list[dict[str, Any]] = []
    orders: list[dict[str, Any]] = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if "needed_by_share" in value:
                    orders.append(value)
                elif isinstance(value.get("arms"), list):
                    continue  # the report behind the requests
                else:
                    cell_of(value)
                    rows.append(value)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{path}, line {number}: neither a request of bench network nor a report of "
                    "bench orders"
                ) from None
    return Data(rows, [arm for arm in arms(rows) if arm["ttft_s"] is not None], orders)


def slice_of(found: Sequence[Arm], vary: Sequence[str], **fixed: Any) -> list[Arm]:
    """Arms that differ in `vary` only: each other key has its most frequent value.

    A key that a mode does not have (None: the ratio of stock) does not count against it. Keys of
    `fixed` have the value given there.
    """
    left = list(found)
    for key in KEYS:
        if key in vary:
            continue
        known = Counter(arm[key] for arm in left if arm[key] is not None or key == "mbit")
        if not known:
            continue
        value = fixed[key] if key in fixed else known.most_common(1)[0][0]
        absent = (value,) if key == "mbit" else (value, None)
        left = [arm for arm in left if arm[key] in absent]
    return left


def modes_in(found: Sequence[Arm]) -> list[str]:
    """The modes of some arms, in the usual order."""
    there = {arm["mode"] for arm in found}
    return [mode for mode in MODES if mode in there]


def rates_in(found: Sequence[Arm]) -> list[int | None]:
    """The rates of some arms, the fastest first."""
    there = {arm["mbit"] for arm in found}
    return sorted(there, key=lambda mbit: float("-inf") if mbit is None else -mbit)


def ideal_of(found: Sequence[Arm], key: str) -> float | None:
    """`key` of `full` on the network that is not shaped: everything was there at once."""
    for arm in found:
        if arm["mode"] == FULL and arm["mbit"] is None and arm[key] is not None:
            return float(arm[key])
    return None


def label(mode: str) -> str:
    """A mode in the words of a figure."""
    return LABELS.get(mode, mode)


def caption(arm: Arm) -> str:
    """What all arms of a figure have in common."""
    ratio = "" if arm.get("ratio") is None else f", ratio {arm['ratio']:g}"
    return f"{arm['prompt_tokens']:,} prompt tokens, batch {arm['batch']}{ratio}"


def require(found: Sequence[Any], what: str) -> None:
    """Raise NothingToPlotError unless there is something."""
    if not found:
        raise NothingToPlotError(what)


def from_zero(axis: Any) -> None:
    """Let the y axis begin at 0 and leave some air above the highest mark."""
    axis.set_ylim(0, 1.06 * axis.get_ylim()[1])


def save(figure: Any, path: Path) -> Path:
    """Write a PNG and forget the figure."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    return path


def panels(rows: int, columns: int, width: float = 4.2, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns], with a light grid."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
