"""Threads that stand in for the ranks of a server, as `core.agreement` sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sglang_smartgen.core.agreement import Ranks

PATIENCE_S = 20.0

Result = TypeVar("Result")


class ThreadRanks:
    """One rank of `size`; a rank that the others do not follow raises BrokenBarrierError."""

    def __init__(self, rank: int, said: list[object], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._said = said
        self._barrier = barrier
        self.size = len(said)
        self.calls = 0

    def least(self, numbers: list[int]) -> list[int]:
        """See Ranks; all must give as many."""
        return [min(column) for column in zip(*self._exchange(list(numbers)), strict=True)]

    def texts(self, text: str) -> list[str]:
        """See Ranks."""
        return self._exchange(text)

    def _exchange(self, mine: Result) -> list[Result]:
        self.calls += 1
        self._said[self._rank] = mine
        self._barrier.wait(PATIENCE_S)
        told: list[Result] = list(self._said)  # type: ignore[arg-type]
        self._barrier.wait(PATIENCE_S)  # nobody says the next thing before all have read this one
        return told


def ranks_of(size: int) -> list[ThreadRanks]:
    """The ranks of one server."""
    said: list[object] = [None] * size
    barrier = threading.Barrier(size)
    return [ThreadRanks(rank, said, barrier) for rank in range(size)]


def together(calls: list[Callable[[], Result]]) -> list[Result]:
    """What each rank returns when all run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


_: type[Ranks] = ThreadRanks
