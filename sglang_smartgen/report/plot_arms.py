"""Figures over arms: TTST and TBT by rate and batch, the ablation, and the sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_smartgen.report.network_cells import ADAPTIVE, FULL
from sglang_smartgen.report.network_report import Arm, rate_name
from sglang_smartgen.report.plot_data import (
    COLOURS,
    IDEAL,
    Data,
    NothingToPlotError,
    caption,
    from_zero,
    ideal_of,
    label,
    modes_in,
    panels,
    rates_in,
    require,
    save,
    slice_of,
)

COMPARED = ("stock", FULL, "partial", "proactive_only", "smartgen")
ABLATION = ("partial", "no_profile", "no_parallel", "no_speculation", "smartgen")
ABLATION_RATES = 2  # the slowest ones; where everything fits behind a prefill, all are alike
TTST, TBT = "ttst_s", "tbt_first10_s"
MEASURES = ((TTST, "time to the second token, s"), (TBT, "mean of the first 10 steps, s"))
SWEPT = (
    ("ratio", "selection ratio"),
    ("speculative_ratio", "speculative ratio"),
    ("prompt_tokens", "prompt tokens"),
    ("blocks_per_layer", "blocks per layer M"),
)


def by_network(data: Data, folder: Path) -> Path:
    """The paper's Fig. 12: TTST and TBT by rate, and by batch at the slowest rate that has some."""
    modes = [arm for arm in data.arms if arm["mode"] in COMPARED]
    by_rate = slice_of(modes, ("mode", "mbit"))
    require(by_rate, "no answered requests of bench network")
    batches = {arm["batch"] for arm in modes}
    slow = [a["mbit"] for a in modes if a["batch"] != 1] if len(batches) > 1 else []
    figure, axes = panels(2 if slow else 1, 2, width=5.0)
    ideal = {key: ideal_of(by_rate, key) for key, _ in MEASURES}
    _lines(axes[0], by_rate, "mbit", rates_in(by_rate), _rate_tick, "rate of the network", ideal)
    if slow:
        rate = rates_in([{"mbit": mbit} for mbit in slow])[-1]
        by_batch = slice_of(modes, ("mode", "batch"), mbit=rate)
        values = sorted({arm["batch"] for arm in by_batch})
        what = f"requests at once, {rate_name(rate)}"
        unshaped = slice_of(modes, ("mode", "batch"), mbit=None)
        per_batch = [[a for a in unshaped if a["batch"] == value] for value in values]
        best = {key: [ideal_of(arms, key) for arms in per_batch] for key, _ in MEASURES}
        _lines(axes[1], by_batch, "batch", values, str, what, best)
    axes[0][1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.suptitle(f"TTST and TBT: {caption(_example(by_rate))}")
    return save(figure, folder / "network.png")


def ablation(data: Data, folder: Path) -> Path:
    """The paper's Fig. 13: SmartGen minus one design at a time; the ideal is `full`, unshaped."""
    kept = [arm for arm in data.arms if arm["mode"] in (*ABLATION, FULL)]
    found = slice_of(kept, ("mode", "mbit"))
    rates = [mbit for mbit in rates_in(found) if mbit is not None][-ABLATION_RATES:]
    there = [mode for mode in modes_in(found) if mode in ABLATION]
    if not rates or not any(mode.startswith("no_") for mode in there):
        raise NothingToPlotError("no requests of no_profile, no_parallel or no_speculation")
    order = [mode for mode in ABLATION if mode in there]
    figure, axes = panels(len(rates), 2, width=5.0, height=2.6)
    for row, mbit in zip(axes, rates, strict=True):
        here = {arm["mode"]: arm for arm in found if arm["mbit"] == mbit}
        for axis, (key, words) in zip(row, MEASURES, strict=True):
            shown = [mode for mode in order if mode in here]
            bars = axis.barh(
                [label(mode) for mode in shown],
                [here[mode][key] for mode in shown],
                color=[COLOURS[mode] for mode in shown],
            )
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            best = ideal_of(found, key)
            if best is not None:
                axis.axvline(best, label="ideal: full, unshaped", **IDEAL)
            axis.set(xlabel=words, title=rate_name(mbit))
            axis.margins(x=0.12)
            axis.grid(axis="y", visible=False)
    if axes[0][1].get_legend_handles_labels()[0]:
        axes[0][1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.suptitle(f"One design at a time: {caption(_example(found))}")
    return save(figure, folder / "ablation.png")


def sensitivity(data: Data, folder: Path) -> Path:
    """The paper's Fig. 16: TTST and TBT by ratio, speculative ratio, prompt length and M."""
    rows: list[tuple[str, str, list[Arm], list[Any]]] = []
    for key, words in SWEPT:
        modes = [arm for arm in data.arms if arm["mode"] in COMPARED]
        if key == "speculative_ratio":
            modes = [arm for arm in modes if arm["mode"] in ("smartgen", FULL)]
        swept = [arm for arm in modes if arm["mode"] == "smartgen"]
        rate = _widest_rate(swept, key)
        if rate is not None:
            found = slice_of(modes, ("mode", key), mbit=rate)
            values = {a[key] for a in found if a["mode"] == "smartgen"}
            order = sorted(values, key=lambda value: (value == ADAPTIVE, str(type(value)), value))
            rows.append((key, f"{words}, {rate_name(rate)}", found, order))
    require(rows, "no parameter was swept on a shaped rate (--ratio, --speculative-ratio, ...)")
    figure, axes = panels(len(rows), 2, width=5.0, height=3.0)
    for row, (key, words, found, values) in zip(axes, rows, strict=True):
        ideal = {measure: _ideal_by(data.arms, key, values, measure) for measure, _ in MEASURES}
        _lines(row, found, key, values, str, words, ideal)
    axes[0][1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.suptitle("Sensitivity")
    return save(figure, folder / "sensitivity.png")


def _widest_rate(found: Sequence[Arm], key: str) -> int | None:
    """The shaped rate with the most values of `key`, the slowest of equals; None below two."""
    values: dict[int, set[Any]] = {}
    for arm in found:
        if arm["mbit"] is not None:
            values.setdefault(arm["mbit"], set()).add(arm[key])
    best = max(values, key=lambda mbit: (len(values[mbit]), -mbit), default=None)
    return best if best is not None and len(values[best]) > 1 else None


def _ideal_by(
    found: Sequence[Arm], key: str, values: Sequence[Any], measure: str
) -> list[float | None]:
    unshaped = slice_of([a for a in found if a["mode"] == FULL], ("mode", key), mbit=None)
    return [
        next((arm[measure] for arm in unshaped if arm[key] in (value, None)), None)
        for value in values
    ]


def _lines(
    row: Any,
    found: Sequence[Arm],
    key: str,
    values: Sequence[Any],
    tick: Callable[[Any], str],
    words: str,
    ideal: dict[str, Any],
) -> None:
    """Both measures over `values` of `key`, a line a mode; the ideal is a number or one a value."""
    where = range(len(values))
    for axis, (measure, unit) in zip(row, MEASURES, strict=True):
        for mode in modes_in(found):
            at = {arm[key]: arm[measure] for arm in found if arm["mode"] == mode}
            if set(at) == {None}:  # the mode does not have this parameter: one level for all
                at = dict.fromkeys(values, at[None])
            if len(set(at) & set(values)) < min(2, len(values)):
                continue
            points = [(x, at[value]) for x, value in enumerate(values) if value in at]
            axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[mode], label=label(mode))
        best = ideal[measure]
        if isinstance(best, list):
            known = [(x, value) for x, value in zip(where, best, strict=True) if value is not None]
            if known:
                axis.plot(*zip(*known, strict=True), label="ideal: full, unshaped", **IDEAL)
        elif best is not None:
            axis.axhline(best, label="ideal: full, unshaped", **IDEAL)
        axis.set(ylabel=unit, xlabel=words)
        axis.set_xticks(list(where), [tick(value) for value in values])
        from_zero(axis)


def _rate_tick(mbit: int | None) -> str:
    return rate_name(mbit).replace(" Mbit/s", "\nMbit/s")


def _example(found: Sequence[Arm]) -> Arm:
    return next((arm for arm in found if arm["ratio"] is not None), found[0])
