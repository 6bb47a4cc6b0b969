"""What `smartgen profile` shows at its end: T_p and K_r by range, and how far to trust it."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any]) -> None:
    """Print the report of a profile on stdout, warnings on stderr."""
    console = Console()
    console.print(table(report))
    for line in (similarity_line(report["similarity"]), f"{report['profile']}, {report['png']}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for warning in report["warnings"]:
        Console(stderr=True).print(f"warning: {warning}", markup=False, highlight=False)


def table(report: dict[str, Any]) -> Table:
    """Ranges as rows; T_p, T_t and K_r as a share of all blocks at each bandwidth."""
    title = f"{report['model']}, selector {report['selector']} at {report['ratio']:.0%}"
    result = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("prompt\ntokens", no_wrap=True)
    for name in ("texts", "T_p\ns", "T_t\ns", *map(bandwidth_name, report["bandwidth_mbit"])):
        result.add_column(name, justify="right")
    for found, blocks, row in zip(
        report["ranges"], report["all_blocks"], report["k_r"], strict=True
    ):
        transfer = found["transfer_s"]
        result.add_row(
            f"{found['start']}-{found['stop'] - 1}",
            str(found["recordings"]),
            f"{found['prefill_s']:.2f}",
            "-" if transfer is None else f"{transfer:.2f}",
            *(f"{k_r}\n{k_r / blocks:.0%}" for k_r in row),
        )
    return result


def bandwidth_name(mbit: float) -> str:
    """The head of a column of K_r."""
    return f"K_r at\n{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"K_r at\n{mbit:g} Mbit/s"


def similarity_line(similarity: dict[str, float | None]) -> str:
    """Rank correlations in one line."""
    names = {
        "between_texts": "texts",
        "between_sets": "data sets",
        "between_lengths": "lengths",
    }
    parts = [
        f"{names[key]} {'-' if value is None else f'{value:.2f}'}"
        for key, value in similarity.items()
    ]
    return f"Rank correlation of block importance between {', '.join(parts)}"
