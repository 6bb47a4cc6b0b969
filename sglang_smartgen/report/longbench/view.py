"""What `smartgen eval` shows: progress with the time left on stderr, the table on stdout."""

from __future__ import annotations

import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_smartgen.report.cluster import Progress

LINE_EVERY_S = 15.0


class ProgressLine:
    """Lines on stderr: at once for a new phase, every LINE_EVERY_S seconds within one."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._begun: tuple[float, int] | None = None
        self._shown = 0.0

    def say(self, what: str) -> None:
        """Show one line."""
        self._console.print(what, soft_wrap=True)

    def starting(self, name: str) -> Progress:
        """The progress callback of a pair that starts; the clock of the predictions stops."""
        self._begun = None
        shown: set[str] = set()

        def progress(seconds: float, ready: dict[str, bool]) -> None:
            marks = ", ".join(f"{role} {'ready' if ready[role] else '...'}" for role in ready)
            if marks not in shown:
                shown.add(marks)
                self.say(f"{name} starts: {seconds:.0f} s ({marks})")

        return progress

    def predicted(self, done: int, total: int, what: str) -> None:
        """`done` of `total` predictions are there; `what` was the last."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = now, done
        begun, first = self._begun
        if now - self._shown < LINE_EVERY_S and done < total:
            return
        self._shown = now
        left = ""
        if done > first and done < total:
            minutes = (now - begun) / (done - first) * (total - done) / 60
            left = f", about {minutes:.0f} min left"
        self.say(f"{done} of {total} predictions ({what}){left}")


def table(report: dict[str, Any]) -> Table:
    """Arms by tasks: score and, where stock was run, percent of stock's."""
    shown = Table(box=SIMPLE_HEAD, caption="score 0 to 100 (share of stock's)")
    shown.add_column("arm")
    for task, items in report["items"].items():
        shown.add_column(f"{task}\n{items} items", justify="right")
    for title in (
        "mean",
        "same answer\nas stock",
        "same up to",
        "likelihood\nof reference",
        "same next\ntoken",
    ):
        shown.add_column(title, justify="right")
    for arm, row in report["arms"].items():
        mean = row["mean"]
        shown.add_row(
            arm,
            *(_score(row["tasks"][task]) for task in report["items"]),
            _score(mean),
            _share(mean["same_answer"]),
            _share(mean["common_prefix"]),
            "-" if mean["loglik"] is None else f"{mean['loglik']:.3f}",
            _share(mean["next_token"]),
        )
    return shown


def _score(row: dict[str, Any]) -> str:
    relative = row["relative"]
    return f"{row['score']:.2f}" + ("" if relative is None else f" ({100 * relative:.1f} %)")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
