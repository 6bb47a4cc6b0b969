"""Progress of work that goes layer by layer, with the time left, on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_S = 10.0  # between two lines where there is no terminal
Advance = Callable[[int], None]
"""Called with the number of layers that are done."""


class TimeLeft:
    """Estimates from the pieces done in this run, of `total`, `done` of them by an earlier one."""

    def __init__(self, total: int, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._first, self._clock = total, done, clock
        self._start = clock()

    def text(self, done: int) -> str:
        """Return the time left in words, after `done` pieces of all."""
        here = done - self._first
        if here < 1:
            return "time left unknown"
        seconds = (self._clock() - self._start) / here * (self._total - done)
        return f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"


@contextlib.contextmanager
def layer_progress(what: str, total: int, done: int = 0, quiet: bool = False) -> Iterator[Advance]:
    """Show a bar on a terminal and a line now and then elsewhere; nothing when `quiet`.

    `done` layers are from an earlier run.
    """
    left = TimeLeft(total, done)
    if quiet:
        yield lambda layers: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        shown = time.monotonic()

        def line(layers: int) -> None:
            nonlocal shown
            if layers < total and time.monotonic() - shown < LINE_S:
                return
            shown = time.monotonic()
            text = f"{what}: layer {layers} of {total}, {left.text(layers)}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers, {task.fields[left]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total, completed=done, left=left.text(done))

        def advance(layers: int) -> None:
            bar.update(task, completed=layers, left=left.text(layers))

        yield advance
