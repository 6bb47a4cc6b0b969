"""The picture of `smartgen bench rails`: bytes a second of each rail through a failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_smartgen.report.rails_runs import Sample

STEP_S = 0.1


def draw(samples: Sequence[Sample], events: Sequence[tuple[float, str]], path: Path) -> None:
    """Write a PNG: Mbit/s by rail over seconds; events: (seconds, word) as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    zero = samples[0].at
    times, rates = series(samples)
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.stackplot(times, rates, labels=[f"rail {i + 1}" for i in range(len(rates))], alpha=0.8)
    for at, word in events:
        axes.axvline(at, color="black", linestyle="--", linewidth=1)
        axes.annotate(word, (at, axes.get_ylim()[1]), xytext=(4, -12), textcoords="offset points")
    first = next((s.at - zero for s in samples if any(s.paused)), None)
    if first is not None:
        axes.axvline(first, color="red", linestyle=":", linewidth=1, label="given up")
    axes.set_xlabel("seconds")
    axes.set_ylabel("Mbit/s that landed")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def series(samples: Sequence[Sample]) -> tuple[list[float], list[list[float]]]:
    """Times in seconds, and Mbit/s of each rail in the step before each."""
    zero = samples[0].at
    times: list[float] = []
    rates: list[list[float]] = [[] for _ in samples[0].bytes]
    last = samples[0]
    for sample in samples[1:]:
        if sample.at - last.at < STEP_S:
            continue
        times.append(sample.at - zero)
        for rail, (now, before) in enumerate(zip(sample.bytes, last.bytes, strict=True)):
            rates[rail].append((now - before) * 8e-6 / (sample.at - last.at))
        last = sample
    return times, rates
