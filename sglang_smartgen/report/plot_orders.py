"""The figure of `smartgen bench orders`: bytes that steps needed from P, by order of blocks."""

from __future__ import annotations

from pathlib import Path

from sglang_smartgen.report.plot_data import IDEAL, Data, panels, require, save


def orders(data: Data, folder: Path) -> Path:
    """The paper's Fig. 15: a panel a share of pushed blocks; `oracle` is the ideal."""
    require(data.orders, "no report of bench orders (its JSON line)")
    report = data.orders[-1]
    by_share = report["needed_by_share"] or report["fetched_by_share"]
    kind = "needed" if report["needed_by_share"] else "fetched"
    figure, axes = panels(1, len(by_share), width=5.0, height=3.0)
    for axis, (share, found) in zip(axes[0], by_share.items(), strict=True):
        names = [name for name in found if name != "oracle"]
        names.sort(key=lambda name: -found[name])
        bars = axis.barh(names, [found[name] / 1e6 for name in names], color="#d62728")
        axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        if "oracle" in found:
            axis.axvline(found["oracle"] / 1e6, label="ideal: oracle", **IDEAL)
            axis.legend(fontsize=8)
        axis.set(xlabel=f"{kind} on demand, MB", title=f"{float(share):.0%} of the blocks pushed")
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.12)
    texts, tokens = len(report["texts"]), report["prompt_tokens"]
    figure.suptitle(f"Orders of blocks: {texts} texts of {tokens:,} tokens, {report['model']}")
    return save(figure, folder / "orders.png")
