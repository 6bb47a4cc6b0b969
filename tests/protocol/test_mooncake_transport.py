"""What the Mooncake transport alone does: chunks, long writes, the engine's own timeouts."""

from __future__ import annotations

import time

import pytest
from transport_worlds import done, failed, make

from sglang_smartgen.transfer import mooncake
from sglang_smartgen.transfer.mooncake import MooncakeTransport, engine_progress_timeout_s
from sglang_smartgen.transfer.transport import Span


@pytest.mark.parametrize(
    ("progress", "status", "seconds"),
    [(None, None, 30), ("2", "3", 3), ("4", None, 30), ("0", "2", 30), ("x", "2", 30)],
)
def test_the_fence_reads_the_engines_own_timeouts(monkeypatch, progress, status, seconds):
    names = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
    for name, value in zip(names, (progress, status), strict=True):
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert engine_progress_timeout_s() == seconds


class StubEngine:
    """Answers each submitted batch with the next code; single requests are done at once."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.batches: list[int] = []

    def batch_transfer_async_write(self, peer, sources, destinations, lengths) -> int:
        self.batches.append(len(sources))
        return len(self.batches)

    def get_batch_transfer_status(self, batches) -> int:
        code = self.codes[batches[0] - 1]
        if code == 99:
            raise RuntimeError("engine broken")
        return code

    def transfer_submit_write(self, peer, source, destination, length) -> int:
        self.batches[-1] += 1
        return 1000

    def transfer_check_status(self, request) -> int:
        return 1


@pytest.mark.parametrize(
    ("codes", "batches", "error"),
    [
        ((0, 0, 0), [480, 480, 40], None),
        ((0, -1, 0), [480, 480], "Mooncake returned -1"),
        ((99,), [480], "engine broken"),
    ],
)
def test_mooncake_chunks_go_out_in_turn_and_the_first_failure_ends_the_write(codes, batches, error):
    engine = StubEngine(*codes)
    transport = MooncakeTransport(engine, "here:1")
    handle = transport.write("there:2", [Span(i, i, 1) for i in range(1000)])
    if error is None:
        done(handle)
    else:
        assert error in failed(handle)
    assert engine.batches == batches
    transport.close()


class SlowEngine:
    """Has single requests only, and finishes each 0.2 s after it was submitted."""

    def __init__(self) -> None:
        self.submitted: list[float] = []
        self.asked = 0

    def transfer_submit_write(self, peer, source, destination, length) -> int:
        self.submitted.append(time.monotonic())
        return len(self.submitted)

    def transfer_check_status(self, request) -> int:
        self.asked += 1
        return int(time.monotonic() - self.submitted[request - 1] > 0.2)


@pytest.mark.parametrize("spans", [1, 16])
def test_mooncake_is_asked_about_a_small_write_now_and_then(spans):
    engine = SlowEngine()
    transport = MooncakeTransport(engine, "here:1")
    done(transport.write("there:2", [Span(i, i, 1) for i in range(spans)]))
    assert len(engine.submitted) == spans
    assert engine.asked < 1000 * spans  # a loop without a pause asks 100 times as often
    transport.close()


def test_a_large_chunk_to_a_peer_that_dies_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake, "_SINGLY", 0)
    monkeypatch.setattr(mooncake, "_WATCHED", 1)
    world = make("mooncake", tmp_path)
    try:
        done(world.write(*[(i * 64, i * 64, 64) for i in range(20)]))
        world.kill()
        assert world.peer in failed(world.write((0, 0, 1 << 20), (1 << 20, 1 << 20, 64)), 40.0)
    finally:
        world.close()
