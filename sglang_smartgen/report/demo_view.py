"""What the demo shows: progress on stderr, answers and the table (or one JSON object) on stdout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from sglang_smartgen.report.cluster import Progress

OnText = Callable[[str], None]


class View(Protocol):
    """The demo's events."""

    def question(self, question: str, tokens: int) -> None:
        """What every mode is asked, at the end of a prompt of `tokens` tokens."""

    def working(self, what: str) -> AbstractContextManager[None]:
        """Something without a measure of progress runs."""

    def starting(self, name: str) -> AbstractContextManager[Progress]:
        """A pair starts; the value is its progress callback."""

    def answering(self, mode: str) -> AbstractContextManager[OnText]:
        """A timed request runs; the value takes the pieces of its answer."""

    def report(self, report: dict[str, Any]) -> None:
        """Everything has been measured."""


class _Progress:
    """Progress on stderr: a live line on a terminal, a line at every change elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        with self._status(what):
            yield

    @contextlib.contextmanager
    def starting(self, name: str) -> Iterator[Progress]:
        shown: set[str] = set()
        with self._status(f"{name} starts") as status:

            def progress(seconds: float, ready: dict[str, bool]) -> None:
                marks = ", ".join(f"{role} {'ready' if ready[role] else '...'}" for role in ready)
                status.update(f"{name} starts: {seconds:3.0f} s ({marks})")
                if not self.console.is_terminal and marks not in shown:
                    self._line(f"{name} starts: {seconds:.0f} s ({marks})")
                    shown.add(marks)

            yield progress

    def _status(self, text: str) -> Status:
        if not self.console.is_terminal:
            self._line(text)
        return self.console.status(text)

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class JsonView(_Progress):
    """One JSON object as the only line of `out`."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def question(self, question: str, tokens: int) -> None:
        pass

    @contextlib.contextmanager
    def answering(self, mode: str) -> Iterator[OnText]:
        with self._status(f"{mode}: timed request"):
            yield lambda text: None

    def report(self, report: dict[str, Any]) -> None:
        print(json.dumps(report), file=self._out, flush=True)


class TerminalView(_Progress):
    """Answers as they come and a table at the end, on stdout."""

    def __init__(self) -> None:
        super().__init__()
        self._out = Console()

    def question(self, question: str, tokens: int) -> None:
        self._out.print(f"A story and a question, {tokens:,} tokens in all: {question}")

    @contextlib.contextmanager
    def answering(self, mode: str) -> Iterator[OnText]:
        self._out.print(f"\n[bold]{mode}[/bold]: ", end="")

        def on_text(text: str) -> None:
            self._out.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            self._out.file.flush()

        yield on_text
        self._out.print()

    def report(self, report: dict[str, Any]) -> None:
        self._out.print()
        self._out.print(table(report))
        smartgen = report["modes"].get("smartgen")
        if smartgen is not None and smartgen["local_share_at_start"] == 1:
            self._out.print(
                "Everything fitted behind the prefill on this network, so smartgen sent it all "
                "before decode; --mbit 50 shows a slow network.",
                highlight=False,
            )
        if "stock" in report["modes"]:
            self._out.print(
                "* computed: stock SGLang counts no bytes; it sends all KV before decode starts",
                highlight=False,
            )


def table(report: dict[str, Any]) -> Table:
    """The modes of a report side by side, in 80 columns."""
    title = f"{report['model']}, {report['prompt_tokens']:,} prompt tokens"
    result = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("mode", no_wrap=True)
    for name in ("TTFT\ns", "TTST\ns", "TBT\ns", "pushed\nMB", "meta-\ndata MB", "fetched\nMB"):
        result.add_column(name, justify="right")
    result.add_column("specu-\nlative MB", justify="right")
    result.add_column("local at\nstart", justify="right")
    for mode, row in report["modes"].items():
        star = "*" if mode == "stock" else ""
        result.add_row(
            mode,
            *(seconds(row[key]) for key in ("ttft_s", "ttst_s")),
            seconds(row["tbt_s"], 3),
            megabytes(row["bytes_proactive"]) + star,
            *(
                megabytes(row[key])
                for key in ("bytes_metadata", "bytes_on_demand", "bytes_speculative")
            ),
            f"{row['local_share_at_start']:.0%}{star}",
        )
    return result


def seconds(value: float | None, digits: int = 2) -> str:
    """Seconds for people; a dash where there is no value (an answer of two tokens has no TBT)."""
    return "-" if value is None else f"{value:.{digits}f}"


def megabytes(value: int) -> str:
    """Bytes in millions."""
    return f"{value / 1e6:.1f}"
