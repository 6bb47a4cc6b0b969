"""Fences: one at a time to a peer, none waits for another peer's, and each covers who waited."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from sglang_smartgen.transfer.fences import Fencer, Key

PATIENCE_S = 30.0  # bound of every wait that is expected to end at once


class Bench:
    """A fencer whose fences take their turns from the test."""

    def __init__(self) -> None:
        self.begun: queue.Queue[str] = queue.Queue()
        self.verdicts: dict[str, queue.Queue[bool | Exception]] = {
            name: queue.Queue() for name in "de"
        }
        self.answers: queue.Queue[tuple[Key, bool]] = queue.Queue()
        self.fencer = Fencer(self._fence, lambda key, sure: self.answers.put((key, sure)))

    def _fence(self, session: str) -> bool:
        self.begun.put(session)
        verdict = self.verdicts[session].get(timeout=PATIENCE_S)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def under_way(self) -> str:
        return self.begun.get(timeout=PATIENCE_S)

    def answered(self) -> tuple[Key, bool]:
        return self.answers.get(timeout=PATIENCE_S)

    def threads(self) -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("smartgen-fence-")]


def test_a_fence_covers_the_rooms_that_waited_when_it_began() -> None:
    bench = Bench()
    bench.fencer.submit("d", (1, 1))
    assert bench.under_way() == "d"
    for key in ((2, 1), (3, 1), (2, 1)):
        bench.fencer.submit("d", key)
    assert bench.begun.empty()  # one at a time
    bench.verdicts["d"].put(True)
    assert bench.answered() == ((1, 1), True)
    assert bench.under_way() == "d"
    bench.verdicts["d"].put(False)
    assert [bench.answered() for _ in range(2)] == [((2, 1), False), ((3, 1), False)]


def test_a_stuck_peer_delays_no_other_and_idle_threads_end() -> None:
    bench = Bench()
    bench.fencer.submit("d", (1, 1))
    assert bench.under_way() == "d"
    bench.fencer.submit("e", (2, 1))
    bench.verdicts["e"].put(True)
    assert bench.answered() == ((2, 1), True)
    bench.verdicts["d"].put(True)
    assert bench.answered() == ((1, 1), True)
    deadline = time.monotonic() + PATIENCE_S
    while bench.threads():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    bench.fencer.submit("d", (1, 2))
    bench.verdicts["d"].put(True)
    assert bench.answered() == ((1, 2), True)


def test_a_fence_that_raises_is_not_sure(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.verdicts["d"].put(RuntimeError("no such peer"))
    bench.fencer.submit("d", (1, 1))
    assert bench.answered() == ((1, 1), False) and "no such peer" in caplog.text
