"""D's rooms by number, row and generation, and the one place where their actions are done.

The life of a room is `core.decode_room.DecodeRoom`; this table hands it its events and does what it
answers. The scheduler thread owns both. Other threads only `post` what they have seen, and the
scheduler thread takes that in (`pump`) before it does anything with a room: so slots are freed on
its thread alone, and no lock is held anywhere.

A room that is over stays under its generation until P can no longer write for it; its number and
its row are free at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from sglang_smartgen.core.counts import counts
from sglang_smartgen.core.decode_room import DecodeAction, DecodePhase
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.prefill_peers import PrefillPeers
from sglang_smartgen.transfer.messages import (
    Endpoint,
    Failed,
    Filled,
    Hello,
    Released,
    Started,
)

logger = logging.getLogger(__name__)


class Placed(msgspec.Struct, frozen=True):
    """The fill thread has put speculative bytes in their place."""

    room: int
    generation: int


class PeerEnded(msgspec.Struct, frozen=True):
    """Nothing listened at a P any more; rooms up to this generation were opened there before."""

    peer: Endpoint
    newest: int


Event: TypeAlias = Started | Released | Failed | Filled | Placed | Hello | PeerEnded


class DecodeRooms:
    """The table."""

    def __init__(
        self,
        peers: PrefillPeers,
        *,
        send_release: Callable[[DecodeRoom], None],
        fail_request: Callable[[DecodeRoom], None],
        free_ranges: Callable[[int, int], None],
    ) -> None:
        """fail_request: end a request that SGLang still waits for; one that decodes is ended by
        the scheduler hook, which looks at `failure`. free_ranges: of a room and generation.
        """
        self._peers = peers
        self._send_release = send_release
        self._fail_request = fail_request
        self._free_ranges = free_ranges
        self._open: dict[int, DecodeRoom] = {}
        self._by_row: dict[int, DecodeRoom] = {}
        self._ending: dict[tuple[int, int], DecodeRoom] = {}
        self._events: deque[Event] = deque()

    def __len__(self) -> int:
        """Rooms of requests that are not over."""
        return len(self._open)

    @property
    def open(self) -> list[DecodeRoom]:
        """Rooms of requests that are not over; any thread."""
        return list(self._open.values())

    @property
    def held_slots(self) -> int:
        """Slots of rooms that are over but that P may still write to; any thread."""
        ending = list(self._ending.values())
        return sum(room.prompt_len for room in ending if room.machine.slots_reachable)

    @property
    def ending(self) -> int:
        """Rooms that are over but that P may still write for."""
        return len(self._ending)

    def add(self, room: DecodeRoom) -> None:
        """A room is opened."""
        self._open[room.room] = room
        self._by_row[room.row] = room

    def of_row(self, row: int) -> DecodeRoom | None:
        """The room that owns a row."""
        return self._by_row.get(row)

    def of_number(self, room: int) -> DecodeRoom | None:
        """The room of a request that is not over."""
        return self._open.get(room)

    def of_generation(self, room: int, generation: int) -> DecodeRoom | None:
        """The room of exactly this generation, also when its request is over."""
        state = self._open.get(room)
        if state is not None and not state.machine.is_stale(generation):
            return state
        return self._ending.get((room, generation))

    def post(self, event: Event) -> None:
        """Any thread: something has happened to a room."""
        self._events.append(event)

    def by_peer(self) -> dict[Endpoint, tuple[list[tuple[int, int]], int]]:
        """Any thread: per P the rooms that it may write for, and the newest generation there."""
        found: dict[Endpoint, tuple[list[tuple[int, int]], int]] = {}
        # A copy is made at one go; the dictionaries are the scheduler thread's.
        for room in [*list(self._open.values()), *list(self._ending.values())]:
            if room.peer is not None:
                keys, newest = found.get(room.peer, ([], 0))
                if room.machine.open:
                    keys.append((room.room, room.generation))
                found[room.peer] = keys, max(newest, room.generation)
        return found

    # Scheduler thread -----------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Take in what other threads have posted."""
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Hello):
                self._greeted(event, now)
                continue
            if isinstance(event, PeerEnded):
                for state in list(self._all()):
                    if state.peer == event.peer and state.generation <= event.newest:
                        self.act(state, state.machine.peer_gone(now))
                continue
            room = self.of_generation(event.room, event.generation)
            if room is not None:
                self._happened(room, event, now)

    def tick(self, now: float) -> None:
        """Time has passed: what is late, is said again or given up."""
        for room in list(self._all()):
            peer, machine = room.peer, room.machine
            if peer is None:
                continue
            deadline = machine.deadline
            if deadline is not None and deadline <= now:
                self.act(room, machine.tick(now))
                if machine.overdue:
                    counts.unacknowledged += 1
                    logger.warning(
                        "room %s generation %s: prefill did not acknowledge the release in time; "
                        "freeing its slots",
                        room.room,
                        room.generation,
                    )
            if not machine.settled and self._peers.is_stock(peer, now):
                self.act(room, machine.stock(now))

    def end(self, room: DecodeRoom, free: Callable[[], None], now: float) -> None:
        """The request is over; `free` gives slots and row back once P cannot write to them."""
        del self._open[room.room]
        del self._by_row[room.row]
        self._ending[room.room, room.generation] = room
        room.free = free
        self.act(room, room.machine.release(now))

    def act(self, room: DecodeRoom, actions: list[DecodeAction]) -> None:
        """Do what a room's machine has answered to an event."""
        frees_slots = DecodeAction.FREE_SLOTS in actions
        for action in actions:
            if action is DecodeAction.SEND_RELEASE:
                self._send_release(room)
            elif action is DecodeAction.FREE_RANGES:
                self._free_ranges(room.room, room.generation)
            elif action is DecodeAction.FAIL and room.machine.phase is DecodePhase.OPENED:
                self._fail_request(room)
        if room.machine.phase is DecodePhase.GONE:
            self._free_ranges(room.room, room.generation)  # late marks of it
            self._ending.pop((room.room, room.generation), None)
        if frees_slots and room.free is not None:
            room.free()  # last: SGLang's code, which may raise

    def _all(self) -> Iterator[DecodeRoom]:
        yield from self._open.values()
        yield from self._ending.values()

    def _greeted(self, hello: Hello, now: float) -> None:
        """Another process listens where a P was: rooms of the one before can get nothing more."""
        peer = Endpoint(hello.host, hello.port)
        for room in list(self._all()):
            started = room.started
            if room.peer == peer and started is not None and started.epoch != hello.epoch:
                self.act(room, room.machine.peer_gone(now))

    def _happened(self, room: DecodeRoom, event: Event, now: float) -> None:
        machine = room.machine
        match event:
            case Started():
                room.started = event
                self.act(room, machine.started(room.missing(event.left), now))
            case Released():
                self.act(room, machine.released(now))
            case Failed(cause=cause):
                room.told = True
                self.act(room, machine.failed(cause))
            case Filled(left=left, failure=failure):
                self.act(room, machine.filled(left, failure, now))
            case Placed():
                self.act(room, machine.filled(room.missing(room.left), None, now))
