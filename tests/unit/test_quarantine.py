"""A room leaves quarantine exactly once: acknowledged, its peer dead, or after the limit."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace

import pytest

from sglang_smartgen.transfer import quarantine as module
from sglang_smartgen.transfer.messages import Endpoint
from sglang_smartgen.transfer.quarantine import RESEND_S, Quarantine, refuses_connections

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
        self.asked: list[int] = []

    def hold(self, room: int, generation: int = 1) -> None:
        self.rooms.hold(
            room,
            generation,
            free=lambda: self.freed.append(room),
            resend=lambda: self.sent.append(room),
            cannot_write=lambda: self._cannot_write(room),
        )

    def _cannot_write(self, room: int) -> bool:
        self.asked.append(room)
        return room in self.dead


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
    bench.now += RESEND_S + 0.01
    assert bench.rooms.drain() == [(8, 1)]
    assert bench.rooms.drain() == [] and bench.freed == [8]
    assert bench.sent == [7, 8, 7]  # a dead peer is not sent to again


def test_a_peer_is_asked_for_only_when_a_resend_is_due(bench: Bench) -> None:
    """The question may cost a connection attempt, on the scheduler's thread."""
    bench.hold(7)
    bench.dead.add(7)
    bench.now += RESEND_S
    assert bench.rooms.drain() == [] and bench.asked == []
    bench.dead.clear()
    for turn in range(1, 4):
        bench.now += RESEND_S + 0.01
        for _ in range(3):
            assert bench.rooms.drain() == []
        assert bench.asked == [7] * turn
    bench.rooms.acknowledge(7, 1)
    bench.now += RESEND_S + 0.01
    assert bench.rooms.drain() == [(7, 1)] and bench.asked == [7] * 3


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
    bench.now += RESEND_S + 0.01
    with pytest.raises(RuntimeError, match="pool is broken"):
        bench.rooms.drain()
    assert bench.rooms.drain() == [(8, 1)]
    assert bench.freed == [7, 8]


def test_only_a_closed_port_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
        assert not refuses_connections(endpoint, 5.0)
        server.accept()[0].close()
        assert not refuses_connections(endpoint, 5.0)  # also behind one that nobody has accepted
    assert refuses_connections(endpoint, 5.0)


def test_a_port_that_does_not_answer_proves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
        waiting = socket.create_connection(("127.0.0.1", endpoint.port), 5.0)
        try:
            # The queue of a listener that never accepts is full: the next one gets no answer.
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", endpoint.port), 0.05)
            assert not refuses_connections(endpoint)
        finally:
            waiting.close()


def test_an_unreachable_network_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(module.socket, "create_connection", unreachable)
    assert not refuses_connections(Endpoint("192.0.2.1", 9))
