"""What `gpu_check.py` found: as a table, as JSON and as a picture."""

from __future__ import annotations

import datetime
import importlib.util
import platform
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def report(check: Any, seconds: float) -> Row:
    """Everything, with card, date and versions."""
    import triton

    torch = check.torch
    return {
        "card": "none (dry run)" if check.dry else torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "dry_run": check.dry,
        "seed": check.seed,
        "seconds": seconds,
        "floors": check.floors,
        "correct": check.correct,
        "operators": check.rows,
        "attention": check.attention,
    }


def wrong_results(found: Row) -> list[str]:
    """A line for each thing that is wrong, not merely slow."""
    lines = [f"{row['operator']}: {said}" for row in found["correct"] for said in row["wrong"]]
    lines += [
        f"{row['operator']} in a CUDA graph: {row['graph']}"
        for row in found["correct"]
        if row["graph"] not in ("ok", "not run")
    ]
    lines += [
        f"sparse_decode, {row['tokens']} tokens, batch {row['batch']}: error {row['error']:.2g}"
        for row in found["attention"]
        if not row["error"] <= 1e-2
    ]
    lines += [
        f"FlashInfer, {row['tokens']} tokens, batch {row['batch']}: error "
        f"{row['flashinfer_error']:.2g}"
        for row in found["attention"]
        if not row.get("flashinfer_error", 0.0) <= 1e-2
    ]
    return lines


def show(found: Row, wrong: list[str]) -> None:
    """The short table; times only of a real run."""
    dry = found["dry_run"]
    print(f"\n{found['card']}, {found['date']}, {found['versions']}, {found['seconds']:.0f} s")
    for row in found["correct"]:
        state = "ok" if not row["wrong"] else f"{len(row['wrong'])} WRONG"
        print(f"  {row['operator']:34} {row['cases']:4} cases  {state:8}  graph {row['graph']}")
    for row in found["operators"] if not dry else []:
        print(
            f"  {row['what']:34} {row['ours_s'] * 1e6:9.1f} us"
            f"  torch {row['torch_s'] * 1e6:9.1f} us"
            f"  {row['speedup']:5.1f}x  {row['share_of_floor']:4.0%} of the floor{beside(row)}"
        )
    for row in found["attention"] if not dry else []:
        other = row["flashinfer"]
        other = f"{other * 1e6:.1f} us" if isinstance(other, float) else other
        print(
            f"  attention {row['tokens']:6} tokens, batch {row['batch']:2}, {row['share']:4.0%}"
            f"  {row['ours_s'] * 1e6:9.1f} us  dense {row['dense_s'] * 1e6:9.1f} us"
            f"  {row['speedup']:5.1f}x  flashinfer {other}"
        )
    for line in wrong:
        print(f"  WRONG  {line}")
    print("  everything right" if not wrong else f"  {len(wrong)} wrong results")


def beside(row: Row) -> str:
    """FlashInfer's time for the same, or why there is none; nothing where it has no such thing."""
    other = row.get("flashinfer_s")
    if other is None:
        return ""
    return f"  flashinfer {other * 1e6:.1f} us" if isinstance(other, float) else f"  {other}"


def plot(found: Row, path: Path) -> bool:
    """Speed-up of sparse over dense attention, a line a batch size, a panel a share."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = sorted({row["share"] for row in found["attention"]})
    figure, axes = pyplot.subplots(1, max(1, len(shares)), figsize=(12, 4), squeeze=False)
    for panel, share in zip(axes[0], shares, strict=False):
        for batch in sorted({row["batch"] for row in found["attention"]}):
            rows = [r for r in found["attention"] if (r["share"], r["batch"]) == (share, batch)]
            points = [row["tokens"] for row in rows], [row["speedup"] for row in rows]
            panel.plot(*points, marker="o", label=f"batch {batch}")
        panel.set(title=f"k = {share:.0%}", xlabel="tokens", ylabel="dense SDPA / sparse_decode")
        panel.set_xscale("log", base=2)
        panel.legend()
    figure.suptitle(f"{found['card']}, {found['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True
