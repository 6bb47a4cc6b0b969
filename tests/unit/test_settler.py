"""The settler answers what it could settle, once, and outlives whatever goes wrong."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from sglang_smartgen.transfer.messages import Endpoint, Release
from sglang_smartgen.transfer.settler import Settler

PATIENCE_S = 30.0  # bound of every wait that is expected to end at once


def release(room: int, generation: int = 1) -> Release:
    return Release(room, generation, "d", Endpoint("d", 2))


class Bench:
    """A settler whose `settle` takes its turns from the test."""

    def __init__(self) -> None:
        self.begun: queue.Queue[Release] = queue.Queue()
        self.verdicts: queue.Queue[bool | Exception] = queue.Queue()
        self.answered: queue.Queue[Release] = queue.Queue()
        self.settler = Settler(self._settle, self.answered.put)

    def _settle(self, message: Release) -> bool:
        self.begun.put(message)
        verdict = self.verdicts.get(timeout=PATIENCE_S)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def under_way(self) -> Release:
        return self.begun.get(timeout=PATIENCE_S)

    def answer(self) -> Release:
        return self.answered.get(timeout=PATIENCE_S)

    def submitted_again(self, message: Release) -> None:
        """D repeats a Release until it is answered, so one repeat comes after the turn's end."""
        deadline = time.monotonic() + PATIENCE_S
        while self.begun.empty():
            assert time.monotonic() < deadline
            self.settler.submit(message)
            time.sleep(0.002)
        assert self.under_way() == message


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for _ in range(10):  # let a turn that a failed test left open end
        made.verdicts.put(False)


def test_repeats_of_a_waiting_release_are_dropped(bench: Bench) -> None:
    bench.settler.submit(release(1))
    assert bench.under_way() == release(1)
    bench.settler.submit(release(1))  # under way
    bench.settler.submit(release(2))
    bench.settler.submit(release(2))  # behind it
    bench.settler.submit(release(1, generation=2))  # another one
    for _ in range(3):
        bench.verdicts.put(True)
    assert [bench.answer() for _ in range(3)] == [release(1), release(2), release(1, 2)]
    assert [bench.under_way() for _ in range(2)] == [release(2), release(1, 2)]
    bench.submitted_again(release(3))  # everything before it has ended
    assert bench.begun.empty() and bench.answered.empty()


def test_what_is_not_settled_is_not_answered_and_may_be_submitted_again(bench: Bench) -> None:
    bench.settler.submit(release(1))
    bench.under_way()
    bench.verdicts.put(False)
    bench.submitted_again(release(1))
    assert bench.answered.empty()
    bench.verdicts.put(True)
    assert bench.answer() == release(1)
    # Answered, but the answer may have been lost.
    bench.submitted_again(release(1))
    bench.verdicts.put(True)
    assert bench.answer() == release(1) and bench.answered.empty()


def test_an_exception_does_not_end_the_thread(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.settler.submit(release(1))
    bench.under_way()
    bench.verdicts.put(RuntimeError("fence is broken"))
    bench.submitted_again(release(1))
    assert bench.answered.empty()
    assert "release of room 1 failed" in caplog.text and "fence is broken" in caplog.text
    bench.verdicts.put(True)
    assert bench.answer() == release(1)


def test_an_answer_that_cannot_be_sent_does_not_end_the_thread() -> None:
    tried, twice = [], threading.Event()

    def answer(message: Release) -> None:
        tried.append(message)
        if len(tried) == 1:
            raise OSError("no route")
        twice.set()

    settler = Settler(lambda _: True, answer)
    settler.submit(release(1))
    settler.submit(release(2))
    assert twice.wait(PATIENCE_S)
    assert tried == [release(1), release(2)]
