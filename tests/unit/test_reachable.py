"""A port refuses connections when its process has ended; silence proves nothing."""

from __future__ import annotations

import socket

import pytest

from sglang_smartgen.transfer import reachable as module
from sglang_smartgen.transfer.messages import Endpoint
from sglang_smartgen.transfer.reachable import refuses_connections


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
