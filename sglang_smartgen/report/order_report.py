"""Numbers of `smartgen bench orders`: bytes by order, ratios between orders, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

COMPARED = (
    ("profile", "random"),
    ("profile", "sequential"),
    ("profile", "streaming"),
    ("profile", "oracle"),
    ("observed", "profile"),
    ("observed", "oracle"),
)


class Arm(NamedTuple):
    """An order of blocks, and K_r as a share of all blocks."""

    order: str
    share: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    fetched_bytes: what really came on demand; an entry comes once, D keeps it. needed_bytes: what
    its steps needed and the push had not brought, counted in every step that needed it, as if
    nothing were kept; None when the recording does not say what was pushed.
    """

    arm: Arm
    text: int
    answer: list[int]
    fetched_bytes: int
    needed_bytes: int | None
    local_share: float


def needed_bytes(path: Path, entry_bytes: int) -> int | None:
    """Bytes of the selections in a recording that were not pushed; None without `pushed`.

    A recording's `counts` are [sparse_layers, kv_heads, prompt_len], its `pushed` are 1 where a
    token was on D when decode began, [sparse_layers, prompt_len].
    """
    with np.load(path, allow_pickle=False) as content:
        if "pushed" not in content:
            return None
        missing = content["pushed"] == 0
        return int((content["counts"] * missing[:, None]).sum()) * entry_bytes


def report(
    about: dict[str, Any], measured: Sequence[Measured], steps: dict[str, list[float]]
) -> dict[str, Any]:
    """The object of `--format json`.

    `on_demand_bytes` are those of the first share: needed where every recording says so, since with
    every entry kept all orders come near each other in a long answer, whatever they brought first.
    """
    shares = list(dict.fromkeys(m.arm.share for m in measured))
    fetched = {str(share): _by_order(measured, share, "fetched_bytes") for share in shares}
    needed: dict[str, dict[str, Any]] = {}
    if all(m.needed_bytes is not None for m in measured):
        needed = {str(share): _by_order(measured, share, "needed_bytes") for share in shares}
    return {
        **about,
        "answers_equal": answers_equal(measured),
        "local_share": {
            str(share): _by_order(measured, share, "local_share", mean=True) for share in shares
        },
        "fetched_by_share": fetched,
        "fetched_ratios": {share: ratios(found) for share, found in fetched.items()},
        "needed_by_share": needed,
        "needed_ratios": {share: ratios(found) for share, found in needed.items()},
        "on_demand_counts": "needed" if needed else "fetched",
        "on_demand_bytes": (needed or fetched)[str(shares[0])],
        "tbt_s": steps,
    }


def answers_equal(measured: Sequence[Measured]) -> bool:
    """True when every text got one answer, whatever was pushed."""
    answers: dict[int, set[tuple[int, ...]]] = {}
    for m in measured:
        answers.setdefault(m.text, set()).add(tuple(m.answer))
    return all(len(different) == 1 for different in answers.values())


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """How much more (or, below 0, less) one order needs than another, as a share."""
    return {
        f"{one} to {other}": found[one] / found[other] - 1
        for one, other in COMPARED
        if found.get(one) is not None and found.get(other)
    }


def show(found: dict[str, Any]) -> None:
    """Print the report on stdout."""
    console = Console()
    console.print(table(found))
    for what, key in (("fetched", "fetched_ratios"), ("needed", "needed_ratios")):
        for share, compared in found[key].items():
            parts = ", ".join(f"{pair} {value:+.0%}" for pair, value in compared.items())
            console.print(f"K_r {float(share):.0%}, {what}: {parts}", highlight=False)
    console.print(steps_table(found["tbt_s"]))
    if not found["answers_equal"]:
        console.print("WARNING: answers of one text differ between orders", highlight=False)


def table(found: dict[str, Any]) -> Table:
    """Orders as rows; for each share what was fetched and what the steps needed."""
    title = f"{found['model']}, {len(found['texts'])} texts of {found['prompt_tokens']:,} tokens"
    result = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("order")
    for share in found["fetched_by_share"]:
        for name in ("fetched", "needed"):
            result.add_column(f"{name} MB\nat {float(share):.0%}", justify="right")
    for order in found["on_demand_bytes"]:
        cells: list[str] = []
        for share, row in found["fetched_by_share"].items():
            needed = found["needed_by_share"].get(share, {}).get(order)
            cells += [_mb(row[order]), _mb(needed)]
        result.add_row(order, *cells)
    return result


def steps_table(steps: dict[str, list[float]]) -> Table:
    """Time of steps with fill at several credits."""
    result = Table(title="seconds a step, by credit of fill", box=SIMPLE_HEAD)
    result.add_column("credit")
    for name in ("1st", "mean of 2-10", "mean after"):
        result.add_column(name, justify="right")
    for name, times in steps.items():
        parts = (times[:1], times[1:10], times[10:])
        result.add_row(name, *(f"{sum(p) / len(p):.3f}" if p else "-" for p in parts))
    return result


def _by_order(
    measured: Sequence[Measured], share: float, field: str, mean: bool = False
) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for m in measured:
        if m.arm.share == share:
            values.setdefault(m.arm.order, []).append(getattr(m, field))
    return {order: sum(v) / len(v) if mean else sum(v) for order, v in values.items()}


def _mb(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f}"
