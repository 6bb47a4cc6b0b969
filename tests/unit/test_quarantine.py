"""A room leaves quarantine exactly once: acknowledged, its peer dead, or after the limit."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_smartgen.transfer import quarantine as module
from sglang_smartgen.transfer.quarantine import RESEND_S, Quarantine

LIMIT_S = 60.0


class Bench:
    """A quarantine on a clock that the test moves, and what it did to its rooms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.rooms = Quarantine(LIMIT_S)
        self.freed: list[int] = []
        self.sent: list[int] = []
        self.dead: set[int] = set()

    def hold(self, room: int, generation: int = 1) -> None:
        self.rooms.hold(
            room,
            generation,
            free=lambda: self.freed.append(room),
            resend=lambda: self.sent.append(room),
            cannot_write=lambda: room in self.dead,
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_room_is_kept_and_its_release_sent_at_once(bench: Bench) -> None:
    bench.hold(7)
    assert bench.sent == [7] and len(bench.rooms) == 1
    assert bench.rooms.drain() == [] and bench.freed == []


def test_acknowledged_is_freed_once(bench: Bench) -> None:
    bench.hold(7, 3)
    bench.hold(8, 4)
    bench.rooms.acknowledge(7, 3)
    assert bench.freed == []  # only drain frees: it is the scheduler's thread
    assert bench.rooms.drain() == [(7, 3)]
    bench.rooms.acknowledge(7, 3)
    assert bench.rooms.drain() == []
    assert bench.freed == [7] and len(bench.rooms) == 1


def test_other_generations_and_rooms_are_not_acknowledged(bench: Bench) -> None:
    bench.hold(7, 3)
    for room, generation in ((7, 2), (7, 4), (8, 3)):
        bench.rooms.acknowledge(room, generation)
    assert bench.rooms.drain() == [] and bench.freed == []


def test_two_generations_of_a_room_are_held_apart(bench: Bench) -> None:
    bench.hold(7, 1)
    bench.hold(7, 2)
    bench.rooms.acknowledge(7, 2)
    assert bench.rooms.drain() == [(7, 2)] and len(bench.rooms) == 1


def test_an_answer_within_resend_counts(bench: Bench) -> None:
    bench.rooms.hold(
        7,
        1,
        free=lambda: bench.freed.append(7),
        resend=lambda: bench.rooms.acknowledge(7, 1),
        cannot_write=lambda: False,
    )
    assert bench.rooms.drain() == [(7, 1)] and bench.freed == [7]


def test_a_dead_peer_frees_its_rooms_and_no_others(bench: Bench) -> None:
    bench.hold(7)
    bench.hold(8)
    bench.dead.add(8)
    assert bench.rooms.drain() == [(8, 1)]
    assert bench.rooms.drain() == [] and bench.freed == [8]


def test_the_release_is_sent_again_at_its_interval(bench: Bench) -> None:
    bench.hold(7)
    bench.now += RESEND_S
    bench.rooms.drain()
    assert bench.sent == [7]
    for turn in range(2, 5):
        bench.now += RESEND_S + 0.01
        bench.rooms.drain()
        bench.rooms.drain()
        assert bench.sent == [7] * turn
    bench.rooms.acknowledge(7, 1)
    bench.now += RESEND_S + 0.01
    bench.rooms.drain()
    assert len(bench.sent) == 4 and bench.freed == [7]


def test_the_limit_frees_and_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.hold(7, 3)
    bench.now += LIMIT_S
    with caplog.at_level(logging.WARNING):
        assert bench.rooms.drain() == [] and not caplog.records
        bench.now += 0.01
        assert bench.rooms.drain() == [(7, 3)]
    assert bench.freed == [7] and len(bench.rooms) == 0
    assert "room 7 generation 3" in caplog.text and "within 60 s" in caplog.text


def test_an_acknowledged_room_past_the_limit_is_not_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.hold(7)
    bench.rooms.acknowledge(7, 1)
    bench.now += LIMIT_S + 1
    with caplog.at_level(logging.WARNING):
        assert bench.rooms.drain() == [(7, 1)]
    assert not caplog.records


def test_a_free_that_raises_is_not_repeated_and_keeps_nobody_else(bench: Bench) -> None:
    def broken() -> None:
        bench.freed.append(7)
        raise RuntimeError("pool is broken")

    bench.rooms.hold(7, 1, free=broken, resend=lambda: None, cannot_write=lambda: True)
    bench.hold(8)
    bench.dead.add(8)
    with pytest.raises(RuntimeError, match="pool is broken"):
        bench.rooms.drain()
    assert bench.rooms.drain() == [(8, 1)]
    assert bench.freed == [7, 8]
