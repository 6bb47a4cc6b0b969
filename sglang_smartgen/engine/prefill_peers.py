"""What D knows of each prefill rank: whether it speaks SmartGen, which process, who serves it.

SGLang's decode thread tells what a P has said, the scheduler thread asks; every entry is replaced
as a whole, so there is no lock. A P is known by the endpoint of its bootstrap thread.
"""

from __future__ import annotations

from sglang_smartgen.transfer.messages import Endpoint, Hello

HELLO_LIMIT_S = 5.0
"""After it a P that has not said Hello does not speak SmartGen."""


class PrefillPeers:
    """The prefill ranks that this decode rank has met."""

    def __init__(self) -> None:
        self._smart: set[Endpoint] = set()
        self._serve: dict[Endpoint, Endpoint] = {}
        self._epoch: dict[Endpoint, int] = {}
        self._first_seen: dict[Endpoint, float] = {}

    def meet(self, peer: Endpoint, now: float) -> None:
        """A room is opened there."""
        self._first_seen.setdefault(peer, now)

    def speaks(self, peer: Endpoint) -> None:
        """It has sent a SmartGen message."""
        self._smart.add(peer)

    def greeted(self, hello: Hello) -> Endpoint | None:
        """P's Hello; where its store was served before, when that has changed."""
        peer = Endpoint(hello.host, hello.port)
        serve = hello.serve or peer
        before = self._serve.get(peer, serve)
        self._serve[peer] = serve
        self._epoch[peer] = hello.epoch
        self._smart.add(peer)
        return before if before != serve else None

    def server(self, peer: Endpoint) -> Endpoint:
        """Who serves that P's store; before its Hello, P itself."""
        return self._serve.get(peer, peer)

    def epoch(self, peer: Endpoint) -> int | None:
        """The process that said Hello last; None before any."""
        return self._epoch.get(peer)

    def is_smart(self, peer: Endpoint) -> bool:
        """Has it spoken SmartGen?"""
        return peer in self._smart

    def is_stock(self, peer: Endpoint, now: float) -> bool:
        """True when a P has had time to say Hello and has not: it never writes for SmartGen.

        It must not be sent our messages either: SGLang's bootstrap thread dies of an unknown one.
        """
        return peer not in self._smart and now - self._first_seen[peer] > HELLO_LIMIT_S
