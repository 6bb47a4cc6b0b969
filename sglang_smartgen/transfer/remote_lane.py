"""D's end of the remote lane: ask each P for what a layer misses, and wait with a deadline.

Owner: one `RemoteLane` a decode rank. The forward thread calls `ask` and later `wait`; SGLang's
decode thread, which receives control messages, calls `answered`, and that wakes the forward thread.
A ticket is one layer of one step; it is closed by its last FetchDone or by its deadline, and late
answers to a closed ticket are dropped.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
from torch import Tensor

from sglang_smartgen.core.counts import counts
from sglang_smartgen.transfer.messages import Endpoint, Fetch, FetchDone, FetchItem, Message

Send = Callable[[Endpoint, Message], None]


class Ask(msgspec.Struct):
    """What one request misses in one layer: int64 positions per KV head, into one arena range."""

    room: int
    generation: int
    peer: Endpoint
    arena_offset: int
    positions: list[Tensor]


class Ticket:
    """One layer's outstanding fetches: sequence number -> the rooms that wait for it."""

    def __init__(self, asks: list[Ask]) -> None:
        self.asks = asks
        self.pending: dict[int, list[int]] = {}
        self.number_of: dict[int, int] = {}  # room -> the sequence number it is in
        self.failures: dict[int, str] = {}
        self.late: set[int] = set()  # rooms of which a copy may land again
        self.began = time.monotonic()


class RemoteLane:
    """Sends Fetch messages and collects their answers."""

    def __init__(self, session: str, reply: Endpoint, send: Send, timeout_s: float) -> None:
        self._session = session
        self._reply = reply
        self._send = send
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._open: dict[int, Ticket] = {}
        self._changed = threading.Condition()
        self.seconds_waited = 0.0

    def ask(self, layer: int, asks: list[Ask]) -> Ticket:
        """Send one message to each peer that holds something of `asks`; does not wait."""
        ticket = Ticket(asks)
        by_peer: dict[Endpoint, list[Ask]] = {}
        for ask in asks:
            by_peer.setdefault(ask.peer, []).append(ask)
        messages: list[tuple[Endpoint, Fetch]] = []
        with self._changed:
            for peer, group in by_peer.items():
                number = next(self._numbers)
                ticket.pending[number] = [ask.room for ask in group]
                ticket.number_of.update(dict.fromkeys(ticket.pending[number], number))
                self._open[number] = ticket
                items = [
                    FetchItem(
                        ask.room,
                        ask.generation,
                        ask.arena_offset,
                        [p.numpy().astype(np.int32).tobytes() for p in ask.positions],
                    )
                    for ask in group
                ]
                messages.append((peer, Fetch(number, self._session, self._reply, layer, items)))
        counts.requests["on_demand"] += len(messages)
        for peer, message in messages:
            try:
                self._send(peer, message)
            except Exception as error:
                cause = f"cannot reach {peer.host}:{peer.port}: {error}"
                rooms = ticket.pending[message.sequence]
                self.answered(FetchDone(message.sequence, [(room, cause) for room in rooms]))
        return ticket

    def answered(self, done: FetchDone) -> None:
        """A FetchDone arrived."""
        with self._changed:
            ticket = self._open.pop(done.sequence, None)
            if ticket is not None:
                ticket.failures.update(done.failures)
                if done.late:
                    ticket.late.update(ticket.pending[done.sequence])
                del ticket.pending[done.sequence]
                if not ticket.pending:
                    counts.fetch_latency.add(time.monotonic() - ticket.began)
                self._changed.notify_all()

    def lost(self, peer: Endpoint, cause: str) -> None:
        """A P will not answer what it was asked so far: those fetches fail now."""
        with self._changed:
            for number, ticket in list(self._open.items()):
                rooms = ticket.pending[number]
                if any(ask.peer == peer and ask.room in rooms for ask in ticket.asks):
                    del self._open[number], ticket.pending[number]
                    ticket.failures.update(dict.fromkeys(rooms, cause))
            self._changed.notify_all()

    def wait(self, ticket: Ticket) -> dict[int, str]:
        """Wait until every fetch of the ticket is answered or late; failed rooms with their cause.

        The deadline runs from `ask`. After it nothing of the ticket is waited for again.
        """
        began = time.monotonic()
        deadline = ticket.began + self._timeout_s
        with self._changed:
            while ticket.pending and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for number, rooms in ticket.pending.items():
                self._open.pop(number, None)
                for room in rooms:
                    ticket.failures[room] = f"no answer from prefill within {self._timeout_s} s"
        self.seconds_waited += time.monotonic() - began
        return ticket.failures
