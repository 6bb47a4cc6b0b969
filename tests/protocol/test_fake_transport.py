"""Each scripted fault does what it says; everything else of the house is tested against it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport, Fault, FaultKind
from sglang_smartgen.transfer.transport import Region, Span, TransportError, WriteState


class Bench:
    """Nodes p and d, 4 spans of 8 bytes from p's ones to d's zeros."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.p, self.d = FakeTransport(self.network, "p"), FakeTransport(self.network, "d")
        self.source = np.ones(32, np.uint8)
        self.target = np.zeros(64, np.uint8)
        self.at = self.target.ctypes.data
        self.d.register(Region(self.at, 64))
        self.spans = [Span(self.source.ctypes.data + i, self.at + i, 8) for i in range(0, 32, 8)]

    def write(self, fault: Fault | None = None):
        if fault is not None:
            self.p.script("d", self.p.writes.get("d", 0) + 1, fault)
        return self.p.write("d", self.spans)

    def landed(self) -> list[int]:
        """First byte of each span at d."""
        return self.target[0:32:8].tolist()

    def fence(self, timeout_s: float = 0.0) -> bool:
        return self.p.fence("d", self.at + 32, timeout_s)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_write_without_fault_is_done_at_once(bench):
    assert bench.write().poll() is WriteState.DONE
    assert bench.landed() == [1, 1, 1, 1]
    assert bench.target[32:].sum() == 0


def test_delay_lands_and_completes_at_its_time_and_not_before(bench):
    handle = bench.write(Fault(FaultKind.DELAY, delay_s=2.0))
    bench.network.advance(1.9)
    assert handle.poll() is WriteState.PENDING and bench.landed() == [0, 0, 0, 0]
    assert bench.fence() is False
    bench.network.advance(0.1)
    assert handle.poll() is WriteState.DONE and bench.landed() == [1, 1, 1, 1]
    assert bench.fence() is True


def test_delays_happen_in_order_of_time(bench):
    slow = bench.write(Fault(FaultKind.DELAY, delay_s=2.0))
    quick = bench.write(Fault(FaultKind.DELAY, delay_s=1.0))
    assert bench.network.step()
    assert (slow.poll(), quick.poll()) == (WriteState.PENDING, WriteState.DONE)
    assert bench.network.now == 1.0
    assert bench.network.step() and slow.poll() is WriteState.DONE
    assert not bench.network.step()


def test_never_stays_pending_and_no_fence_passes_it_until_the_peer_restarts(bench):
    handle = bench.write(Fault(FaultKind.NEVER))
    bench.network.advance(1e9)
    assert handle.wait(0.0) is WriteState.PENDING and bench.landed() == [0, 0, 0, 0]
    assert bench.fence() is False
    bench.network.kill("d")
    assert bench.fence() is False  # nobody answers
    FakeTransport(bench.network, "d")
    assert bench.fence() is True


def test_only_the_nth_write_fails_and_nothing_of_it_lands(bench):
    bench.p.script("d", 2, Fault(FaultKind.FAIL))
    assert bench.write().poll() is WriteState.DONE
    bench.target[:] = 0
    second = bench.write()
    assert second.poll() is WriteState.FAILED and bench.landed() == [0, 0, 0, 0]
    assert "peer d" in second.error and "4 spans, 32 bytes" in second.error
    assert bench.write().poll() is WriteState.DONE


def test_script_all_fails_every_write_until_it_is_ended(bench):
    bench.p.script_all("d", Fault(FaultKind.FAIL))
    assert [bench.write().poll() for _ in range(3)] == [WriteState.FAILED] * 3
    bench.p.script_all("d", None)
    assert bench.write().poll() is WriteState.DONE


def test_partial_lands_the_first_spans_and_then_fails(bench):
    handle = bench.write(Fault(FaultKind.PARTIAL, delay_s=1.0, spans=3))
    assert handle.poll() is WriteState.PENDING and bench.landed() == [1, 1, 1, 0]
    bench.network.advance(1.0)
    assert handle.poll() is WriteState.FAILED
    assert bench.fence() is True
    bench.network.advance(1e9)
    assert bench.landed() == [1, 1, 1, 0]


def test_late_fails_at_once_and_lands_later_with_the_source_as_it_is_then(bench):
    handle = bench.write(Fault(FaultKind.LATE, delay_s=5.0, spans=1))
    assert handle.poll() is WriteState.FAILED and bench.landed() == [1, 0, 0, 0]
    assert bench.fence() is False and bench.p.pending("d") == 1
    bench.source[:] = 9
    bench.network.advance(5.0)
    assert bench.landed() == [1, 9, 9, 9]
    assert bench.fence() is True and bench.p.pending("d") == 0


def test_duplicate_lands_again_after_done(bench):
    handle = bench.write(Fault(FaultKind.DUPLICATE, delay_s=1.0))
    assert handle.poll() is WriteState.DONE and bench.landed() == [1, 1, 1, 1]
    bench.target[:] = 7
    assert bench.fence() is False
    bench.network.advance(1.0)
    assert bench.landed() == [1, 1, 1, 1] and bench.fence() is True


def test_hold_keeps_all_writes_until_release_in_order(bench):
    bench.p.hold()
    first = bench.write()
    second = bench.write(Fault(FaultKind.FAIL))
    bench.network.advance(1e9)
    assert first.poll() is second.poll() is WriteState.PENDING and bench.landed() == [0, 0, 0, 0]
    assert bench.fence() is False
    bench.p.release()
    assert (first.poll(), second.poll()) == (WriteState.DONE, WriteState.FAILED)
    assert bench.write().poll() is WriteState.DONE


def test_a_late_landing_never_reaches_a_restarted_peer(bench):
    bench.write(Fault(FaultKind.LATE, delay_s=5.0))
    restarted = FakeTransport(bench.network, "d")
    restarted.register(Region(bench.at, 64))
    assert bench.fence() is True
    bench.network.advance(5.0)
    assert bench.landed() == [0, 0, 0, 0]
    assert bench.write().poll() is WriteState.DONE


def test_a_fence_in_another_thread_is_woken_by_the_landing(bench):
    bench.write(Fault(FaultKind.LATE, delay_s=1.0))
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(bench.fence(20.0)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    bench.network.advance(1.0)
    thread.join(5.0)
    assert answers == [True]


def test_unregistered_while_under_way_is_refused_at_landing(bench):
    handle = bench.write(Fault(FaultKind.DELAY, delay_s=1.0))
    bench.d.unregister(Region(bench.at, 64))
    bench.network.advance(1.0)
    assert handle.poll() is WriteState.FAILED and bench.landed() == [0, 0, 0, 0]


def test_close_fails_what_is_pending_and_lands_nothing_more(bench):
    handle = bench.write(Fault(FaultKind.DELAY, delay_s=1.0))
    bench.p.close()
    bench.network.advance(1.0)
    assert handle.poll() is WriteState.FAILED and bench.landed() == [0, 0, 0, 0]
    with pytest.raises(TransportError, match="closed"):
        bench.write()


def test_script_refuses_the_zeroth_write(bench):
    with pytest.raises(ValueError, match="nth must be >= 1"):
        bench.p.script("d", 0, Fault(FaultKind.FAIL))
