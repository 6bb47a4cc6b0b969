"""Figures over the tokens of an answer: when each arrives, and how long each step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_smartgen.report.network_cells import FULL
from sglang_smartgen.report.network_report import Arm, rate_name
from sglang_smartgen.report.plot_data import (
    COLOURS,
    IDEAL,
    Data,
    caption,
    from_zero,
    label,
    modes_in,
    panels,
    rates_in,
    require,
    save,
    slice_of,
)

TOKEN_MODES = ("stock", FULL, "partial", "smartgen")
STEP_MODES = ("partial", "no_speculation", "smartgen")


def cumulative(data: Data, folder: Path) -> Path:
    """The paper's Fig. 9: arrival of every token, a panel a rate; the stall of `full` is shaded."""
    modes = [arm for arm in data.arms if arm["mode"] in TOKEN_MODES]
    found = slice_of(modes, ("mode", "mbit"))
    require(found, "no answered requests of bench network")
    rates = rates_in(found)
    ideal = _mode(found, FULL, None)
    figure, axes = panels(1, len(rates), height=3.8)
    for axis, mbit in zip(axes[0], rates, strict=True):
        here = [arm for arm in found if arm["mbit"] == mbit]
        for mode in modes_in(here):
            at = _mode(here, mode, mbit)["token_s"]
            axis.plot(range(1, len(at) + 1), at, color=COLOURS[mode], label=label(mode))
        if ideal and mbit is not None:
            best = ideal["token_s"]
            axis.plot(range(1, len(best) + 1), best, label="ideal: full, unshaped", **IDEAL)
            _shade(axis, _mode(here, FULL, mbit), best)
        axis.set(title=rate_name(mbit), xlabel="token of the answer")
        from_zero(axis)
    axes[0][0].set_ylabel("arrival since the request, s")
    axes[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.suptitle(f"Cumulative token latency: {caption(_example(found))}")
    return save(figure, folder / "cumulative.png")


def _shade(axis: Any, full: Arm, best: list[float]) -> None:
    if full:
        both = min(len(full["token_s"]), len(best))
        axis.fill_between(
            range(1, both + 1),
            best[:both],
            full["token_s"][:both],
            color=COLOURS[FULL],
            alpha=0.08,
            linewidth=0,
        )


def steps(data: Data, folder: Path) -> Path:
    """The paper's Fig. 14: time of each step, before and after the residual is done."""
    shaped = [arm for arm in data.arms if arm["mbit"] is not None]
    found = slice_of([a for a in shaped if a["mode"] in (*STEP_MODES, FULL)], ("mode", "mbit"))
    require([a for a in found if a["mode"] == "smartgen"], "no smartgen requests on a shaped rate")
    rates = rates_in(found)
    figure, axes = panels(1, len(rates), height=3.8)
    for axis, mbit in zip(axes[0], rates, strict=True):
        for mode in STEP_MODES:
            arm = _mode(found, mode, mbit)
            if arm:
                gaps = [1000 * gap for gap in arm["tbt_by_step_s"]]
                number = range(1, len(gaps) + 1)
                axis.plot(number, gaps, color=COLOURS[mode], label=label(mode))
        full = _mode(found, FULL, mbit)
        if full:
            axis.axhline(1000 * full["tbt_s"], label="ideal: full", **IDEAL)
        until = _mode(found, "smartgen", mbit).get("steps_until_local")
        if until:
            axis.axvline(until, color=COLOURS["smartgen"], linestyle=":", linewidth=1)
            axis.annotate(
                "all local",
                (until, 0.97),
                xycoords=("data", "axes fraction"),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=8,
                va="top",
                color=COLOURS["smartgen"],
            )
        axis.set(title=rate_name(mbit), xlabel="decode step")
        from_zero(axis)
    axes[0][0].set_ylabel("time of the step, ms")
    axes[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.suptitle(f"Time between tokens, step by step: {caption(_example(found))}")
    return save(figure, folder / "steps.png")


def _mode(found: list[Arm], mode: str, mbit: int | None) -> Arm:
    return next((a for a in found if a["mode"] == mode and a["mbit"] == mbit), {})


def _example(found: list[Arm]) -> Arm:
    return next((arm for arm in found if arm["ratio"] is not None), found[0])
