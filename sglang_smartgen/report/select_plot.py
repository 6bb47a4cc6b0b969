"""The picture of `smartgen bench select`: captured mass by share, one panel a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def plot(
    mass: Mapping[str, Mapping[str, Mapping[str, float]]],
    agreement: Mapping[str, float],
    path: Path,
) -> None:
    """Write a PNG. `mass` is by model, selector and ratio; `agreement` by selector, or empty."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = len(mass) + bool(agreement)
    figure, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4.6), squeeze=False)
    colours = {
        arm: f"C{number}"
        for number, arm in enumerate(dict.fromkeys(a for m in mass.values() for a in m))
    }
    for axis, (model, arms) in zip(axes[0], mass.items(), strict=False):
        for arm, row in arms.items():
            shares = [float(ratio) * 100 for ratio in row]
            style = "--" if arm.startswith("exact") else "-"
            axis.plot(shares, list(row.values()), style, marker="o", label=arm, color=colours[arm])
        axis.set(
            title=model,
            xlabel="share of the prompt's entries, %",
            ylabel="attention mass captured",
            xticks=shares,
        )
        axis.set_ylim(top=1.0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower right")
    if agreement:
        axis = axes[0][-1]
        names = list(agreement)[::-1]
        values = [100 * agreement[name] for name in names]
        axis.barh(names, values, color=[colours[name] for name in names])
        axis.set(
            title="next token as with full attention",
            xlabel=f"% of steps, 20 % of the entries, {next(iter(mass))}",
        )
        axis.set_xlim(min(90.0, *values) - 2, 100)
        axis.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
