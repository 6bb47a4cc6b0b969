"""D sends what is for P's store to where P's Hello says, and learns of a move."""

from __future__ import annotations

import time

import pytest
import torch
from decode_bench import P_END, PATIENCE_S, ROOM, ROW, Bench

from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    Grant,
    Hello,
    Message,
    Release,
)
from sglang_smartgen.transfer.remote_lane import Ask

SERVE = Endpoint("p", 77)
OTHER = Endpoint("q", 1)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def ask(room: int, peer: Endpoint = P_END) -> Ask:
    return Ask(room, 1, peer, 0, [torch.tensor([1]), torch.tensor([2])])


def addressees(bench: Bench) -> list[tuple[Endpoint, type[Message]]]:
    return [(peer, type(message)) for peer, message in bench.sent]


@pytest.mark.parametrize("serve", [None, P_END, SERVE])
def test_messages_for_the_store_go_where_hello_says(bench: Bench, serve: Endpoint | None) -> None:
    bench.side.on_message(Hello(P_END.host, P_END.port, serve))
    message = bench.opened()
    bench.started(message.generation, left=100)
    bench.mark(0, 1)
    bench.side.commit(ROOM)
    bench.side.begin_step([ROW])
    bench.side.lane.ask(2, [ask(ROOM)])
    bench.release()
    wanted = serve or P_END
    assert addressees(bench) == [(wanted, Grant), (wanted, Fetch), (wanted, Release)]


def test_before_a_hello_and_to_another_p_they_go_to_the_bootstrap_socket(bench: Bench) -> None:
    bench.side.lane.ask(2, [ask(ROOM)])
    bench.side.on_message(Hello(P_END.host, P_END.port, SERVE))
    bench.side.lane.ask(2, [ask(1), ask(2, OTHER)])
    assert addressees(bench) == [(P_END, Fetch), (SERVE, Fetch), (OTHER, Fetch)]


def test_what_a_server_was_asked_is_lost_when_another_takes_its_place(bench: Bench) -> None:
    lane = bench.side.lane
    before = lane.ask(2, [ask(1)])  # P has passed it on: it is served
    bench.side.on_message(Hello(P_END.host, P_END.port, SERVE))
    assert before.pending and before.failures == {}
    ticket = lane.ask(2, [ask(1), ask(2), ask(3, OTHER)])
    bench.side.on_message(Hello(P_END.host, P_END.port, SERVE))  # said again: nothing has moved
    assert len(ticket.pending) == 2
    bench.side.on_message(Hello(P_END.host, P_END.port, P_END))
    cause = "the store server at p:77 has ended"
    assert ticket.failures == {1: cause, 2: cause} and len(ticket.pending) == 1
    began = time.monotonic()
    assert lane.wait(before) == {1: cause}
    assert time.monotonic() - began < PATIENCE_S / 2
    bench.sent.clear()
    lane.ask(2, [ask(1)])
    assert addressees(bench) == [(P_END, Fetch)]
