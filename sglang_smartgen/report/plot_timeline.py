"""The stall timeline: what P, the network and D did for one request, second by second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_smartgen.report.network_cells import FULL
from sglang_smartgen.report.network_report import rate_name
from sglang_smartgen.report.plot_data import COLOURS, Data, panels, require, save

LANES = ("P computes", "P pushes", "D decodes", "D waits\nfor a fetch", "fill arrives")
SHOWN_AFTER_S = 2.0  # of an answer behind the end of the residual
Bar = tuple[float, float]


def timeline(data: Data, folder: Path) -> Path:
    """One request of `full` and one of `smartgen` at the slowest rate that has both, or either.

    In a step the waits of its layers are drawn as one, at its beginning.
    """
    found = [
        row
        for row in data.rows
        if row["error"] is None and row["batch"] == 1 and row.get("timeline", {}).get("steps")
    ]
    ours = [row for row in found if row["mode"] == "smartgen"]
    require(ours, "no smartgen request with a timeline")
    chosen = min(ours, key=lambda row: (row["mbit"] or float("inf"), row["round"]))
    same = [
        row
        for row in found
        if row["mode"] == FULL
        and all(row[key] == chosen[key] for key in ("mbit", "prompt_tokens", "ratio"))
    ]
    shown = [*same[:1], chosen]
    figure, axes = panels(len(shown), 1, width=9.0, height=2.6)
    end = max(_end(row) for row in shown)
    for (axis,), row in zip(axes, shown, strict=True):
        bars = lanes_of(row)
        for place, name in enumerate(LANES):
            colour = "#d62728" if "waits" in name else COLOURS[FULL]
            axis.broken_barh(bars[name], (place - 0.35, 0.7), color=colour)
        axis.axvline(row["ttft_s"], color="black", linestyle="--", linewidth=1)
        axis.text(row["ttft_s"], -0.62, "first token ", ha="right", fontsize=8)
        axis.set_yticks(range(len(LANES)), LANES, fontsize=8)
        axis.set_ylim(len(LANES) - 0.4, -1.0)
        axis.set_xlim(0, end)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{row['mode']}, {rate_name(row['mbit'])}", fontsize=10, loc="left")
    axes[-1][0].set_xlabel("seconds since the request was sent")
    tokens, ratio = chosen["prompt_tokens"], chosen["ratio"]
    figure.suptitle(f"Where one request waits: {tokens:,} prompt tokens, ratio {ratio:g}")
    return save(figure, folder / "timeline.png")


def lanes_of(row: dict[str, Any]) -> dict[str, list[Bar]]:
    """Bars (start, length) in seconds by lane, from a request's timeline and token times.

    Step n ends when token n + 1 arrives; the first token is prefill's.
    """
    line = row["timeline"]
    steps: Sequence[Sequence[float]] = line["steps"]
    ends: Sequence[float] = row["token_times_s"][1:]
    decoded: list[Bar] = []
    waited: list[Bar] = []
    filled: list[Bar] = []
    for (start, wait, _, fill), end in zip(steps, ends, strict=False):
        length = max(0.0, end - start)
        decoded.append((start + min(wait, length), max(0.0, length - wait)))
        if wait:
            waited.append((start, min(wait, length)))
        if fill:
            filled.append((start, length))
    start, stop = line.get("prefill", (0.0, 0.0))
    pushed = [(begin, end - begin) for begin, end, *_ in line.get("writes", [])]
    bars = ([(start, stop - start)], pushed, decoded, waited, filled)
    return dict(zip(LANES, bars, strict=True))


def _end(row: dict[str, Any]) -> float:
    """Right edge: a little behind the residual, or the whole answer when it was never done."""
    times = row["token_times_s"]
    until = row.get("steps_until_local")
    local = times[min(until, len(times) - 1)] if until is not None else times[-1]
    return float(min(times[-1], local + SHOWN_AFTER_S))
