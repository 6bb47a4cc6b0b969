"""What the NIXL rail makes of an agent that hangs, loses a peer or refuses; without NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from sglang_smartgen.transfer.rails import nixl, nixl_agent
from sglang_smartgen.transfer.rails.make import make_rails
from sglang_smartgen.transfer.rails.nixl_agent import Lost
from sglang_smartgen.transfer.rails.reach import Card, RailAddress, same_process
from sglang_smartgen.transfer.transport import Region, Span, TransportError, WriteState

PEER = "d/first"
SPANS = [Span(4096, 8192, 100)]
SCRATCH = 9000


class Agent:
    """Stands for a NixlAgent: transfers end when the test says so."""

    name = "p"

    def __init__(self, host: str = "") -> None:
        self.posted: list[list[Span]] = []
        self.known: list[str] = []
        self.registered: list[Region] = []
        self.ends: dict[int, str] = {}  # number of a transfer -> "" or why it is lost
        self.at_once = False
        self.refuses: Lost | None = None
        self.left: list[object] = []

    def metadata(self) -> str:
        return "m"

    def register(self, region: Region) -> None:
        self.registered.append(region)

    def unregister(self, region: Region) -> None:
        self.registered.remove(region)

    def know(self, metadata: str) -> str:
        self.known.append(metadata)
        return "d"

    def post(self, name: str, spans: Sequence[Span]) -> tuple[int, bool]:
        if self.refuses is not None:
            raise self.refuses
        self.posted.append(list(spans))
        return len(self.posted) - 1, not self.at_once

    def goes_on(self, transfer: int) -> bool:
        if self.ends.get(transfer):
            raise Lost(self.ends[transfer], sent=True)
        return transfer not in self.ends

    def leave(self, transfer: object) -> None:
        self.left.append(transfer)


@pytest.fixture
def rail(monkeypatch: pytest.MonkeyPatch) -> Iterator[nixl.NixlTransport]:
    monkeypatch.setattr(nixl, "NixlAgent", Agent)
    monkeypatch.setattr(nixl, "QUIET_S", 0.05)
    made = nixl.NixlTransport()
    yield made
    made.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_write_to_a_peer_that_hangs_fails_and_is_fenced_when_nixl_has_ended_it(
    rail: nixl.NixlTransport,
) -> None:
    agent: Agent = rail._agent  # type: ignore[assignment]
    region = Region(4096, 100)
    rail.register(region)
    handle = rail.write(PEER, SPANS, deadline_s=0.05)
    assert handle.wait(10.0) is WriteState.FAILED
    assert "to peer d failed: not complete after" in str(handle.error)
    assert rail.fence(PEER, SCRATCH, 0.02) is False
    behind = rail.write(PEER, SPANS, deadline_s=0.05)  # nothing is posted behind a late one
    assert behind.wait(10.0) is WriteState.FAILED and len(agent.posted) == 1
    rail.unregister(region)
    assert region in agent.registered  # it may still be read
    agent.ends[0] = ""
    assert rail.fence(PEER, SCRATCH, 10.0) is True
    assert len(agent.posted) == 1  # what NIXL completed needs no probe
    agent.at_once = True
    assert rail.write(PEER, SPANS).wait(10.0) is WriteState.DONE
    rail.register(Region(0, 10))
    assert region not in agent.registered


def test_without_a_deadline_a_write_still_ends(
    rail: nixl.NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "WRITE_TIMEOUT_S", 0.05)
    handles = [rail.write(PEER, SPANS) for _ in range(6)]  # some of them wait in the queue
    for handle in handles:
        assert handle.wait(10.0) is WriteState.FAILED
        assert "nothing has come through" in str(handle.error)


def test_a_lost_connection_is_made_again_and_fenced_by_a_probe(rail: nixl.NixlTransport) -> None:
    agent: Agent = rail._agent  # type: ignore[assignment]
    handles = [rail.write(PEER, SPANS) for _ in range(2)]
    until(lambda: len(agent.posted) == 2)
    agent.ends |= {0: "the peer is dead", 1: "the peer is dead"}
    for handle in handles:
        assert handle.wait(10.0) is WriteState.FAILED
        assert "to peer d failed: the peer is dead" in str(handle.error)
    assert rail.fence(PEER, SCRATCH, 0.01) is False
    agent.refuses = Lost("UCX cannot reach the peer", sent=False)
    assert rail.fence(PEER, SCRATCH, 0.3) is False
    agent.refuses, agent.at_once = None, True
    assert rail.fence(PEER, SCRATCH, 10.0) is True
    assert agent.posted[-1][0].destination == SCRATCH and agent.known == ["first", "first"]


def test_a_refused_address_leaves_nothing_to_fence(rail: nixl.NixlTransport) -> None:
    agent: Agent = rail._agent  # type: ignore[assignment]
    agent.refuses = Lost("an address is not registered, here or by the peer", sent=False)
    handle = rail.write(PEER, SPANS)
    assert handle.wait(10.0) is WriteState.FAILED and "not registered" in str(handle.error)
    assert rail.fence(PEER, SCRATCH, 0.0) is True and agent.posted == []


def test_what_a_peer_registers_later_is_learned(rail: nixl.NixlTransport) -> None:
    agent: Agent = rail._agent  # type: ignore[assignment]
    agent.at_once = True
    for session in (PEER, PEER, "d/second"):
        assert rail.write(session, SPANS).wait(10.0) is WriteState.DONE
    assert agent.known == ["first", "second"]
    cards = [Card([RailAddress("nixl", "", session)], []) for session in (PEER, "d/second", "e/x")]
    assert same_process(cards[0], cards[1]) and not same_process(cards[0], cards[2])


def test_close_fails_what_is_pending_and_leaves_what_goes_on(rail: nixl.NixlTransport) -> None:
    agent: Agent = rail._agent  # type: ignore[assignment]
    handle = rail.write(PEER, SPANS)
    until(lambda: agent.posted)
    rail.close()
    assert handle.poll() is WriteState.FAILED and "closed" in str(handle.error)
    until(lambda: agent.left == [0])
    with pytest.raises(TransportError, match="closed"):
        rail.write(PEER, SPANS)


def test_a_foreign_session_and_a_missing_wheel_are_one_sentence(
    rail: nixl.NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="peer must be 'agent/metadata', got 'nonsense'"):
        rail.write("nonsense", SPANS)
    monkeypatch.setattr(nixl, "NixlAgent", nixl_agent.NixlAgent)
    monkeypatch.setattr(nixl_agent, "MODULES", ("no_such_module._api",))
    with pytest.raises(TransportError, match="rails has 'nixl': NIXL is not installed"):
        make_rails(["nixl"], "127.0.0.1")
