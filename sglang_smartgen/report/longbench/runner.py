"""Asks what is missing in a run's folder, pair by pair, item by item, arm by arm.

With `parallel` > 1 so many items are under way at once, each in a thread of the pool that asks for
all its arms; the caller's thread alone writes, in the order of the items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sglang_smartgen.report.longbench.arms import Arm, groups
from sglang_smartgen.report.longbench.ask import Job
from sglang_smartgen.report.longbench.folder import RunFolder

Work = tuple[Job, list[Arm]]


class Asks(Protocol):
    """What the servers of one group of arms are asked through (see `ask.Asker`)."""

    def warm_up(self, job: Job, arms: list[Arm]) -> None:
        """Called once an item, before its arms."""

    def predict(self, job: Job, arm: Arm) -> dict[str, Any]:
        """One prediction."""


Servers = Callable[[list[Arm]], AbstractContextManager[Asks]]
"""Starts (or finds) the servers that run a group of arms."""


def run(
    folder: RunFolder,
    jobs: Sequence[Job],
    arms: Sequence[Arm],
    servers: Servers,
    *,
    parallel: int = 1,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> None:
    """Fill `folder` with the predictions that it lacks.

    progress: predictions that are there, of how many, and the last one. A group of which nothing is
    missing starts no servers.
    """
    total, missing = len(jobs) * len(arms), 0
    plan: list[tuple[list[Arm], list[Work]]] = []
    for group in groups(arms):
        work = [(job, lacking) for job in jobs if (lacking := _lacking(folder, job, group))]
        missing += sum(len(lacking) for _, lacking in work)
        if work:
            plan.append((group, work))
    done = total - missing
    for group, work in plan:
        with servers(group) as asks:
            for prediction in _predictions(asks, work, parallel):
                folder.append(prediction)
                done += 1
                what = f"{prediction['task']} line {prediction['line']}, {prediction['arm']}"
                progress(done, total, what)


def _lacking(folder: RunFolder, job: Job, group: list[Arm]) -> list[Arm]:
    item = job.item
    return [arm for arm in group if (item.task, item.line, arm.name) not in folder.predictions]


def _predictions(asks: Asks, work: list[Work], parallel: int) -> Iterator[dict[str, Any]]:
    if parallel == 1:
        for one in work:
            yield from _of_item(asks, one)
        return
    pool = ThreadPoolExecutor(parallel)
    try:
        for predictions in pool.map(lambda one: list(_of_item(asks, one)), work):
            yield from predictions
    finally:
        # After Ctrl-C nothing is waited for: the requests break when the servers are stopped.
        pool.shutdown(wait=False, cancel_futures=True)


def _of_item(asks: Asks, work: Work) -> Iterator[dict[str, Any]]:
    job, arms = work
    asks.warm_up(job, arms)
    for arm in arms:
        yield asks.predict(job, arm)
