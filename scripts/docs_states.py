"""Which event takes a room from which phase to which, found by driving the real state machines.

Every event is tried in every state that can be reached, so a table made of this cannot name a
transition that the code does not have, nor lack one that it has.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from sglang_smartgen.core import decode_room, prefill_room

NOW, LATE, MUCH_LATER = 1.0, 40.0, 5000.0
"""Times of events: lease and fetch deadlines end before LATE, every limit before MUCH_LATER."""

Edges = dict[tuple[str, str], list[str]]
Event = tuple[str, Callable[[Any], Any]]

PREFILL_EVENTS: list[Event] = [
    ("the request begins to prefill", lambda r: r.begin(NOW)),
    ("the push is complete", lambda r: r.pushed(True, NOW)),
    ("the request is aborted on P", lambda r: r.abort("aborted", NOW)),
    ("D cannot be told Started", lambda r: r.start_failed("lost", NOW)),
    ("a push write begins", lambda r: r.write_began(prefill_room.Target.SLOTS, NOW)),
    ("a write to the arena begins", lambda r: r.write_began(prefill_room.Target.ARENA, NOW)),
    ("a write is complete", lambda r: _write_ended(r, True)),
    ("a write fails", lambda r: _write_ended(r, False)),
    ("the fence passes", lambda r: r.fenced(True, NOW)),
    ("the fence gives no answer", lambda r: r.fenced(False, NOW)),
    ("Release comes", lambda r: r.release(NOW)),
    ("another D process registers", lambda r: r.peer_replaced(NOW)),
    ("D is silent until the lease ends", lambda r: r.tick(LATE)),
    ("the doubt limit passes", lambda r: _doubt_ends(r)),
]
DECODE_EVENTS: list[Event] = [
    ("Started comes, entries are left", lambda r: r.started(5, NOW)),
    ("Started comes, nothing is left", lambda r: r.started(0, NOW)),
    ("a stock transfer is complete", lambda r: r.whole(NOW)),
    ("the last Filled comes", lambda r: r.filled(0, None, NOW)),
    ("every entry was fetched", lambda r: r.all_here(NOW)),
    ("the request is over", lambda r: r.release(NOW)),
    ("Released comes", lambda r: r.released(NOW)),
    ("P does not speak SmartGen", lambda r: r.stock(NOW)),
    ("P's process has ended", lambda r: r.peer_gone(NOW)),
    ("the quarantine limit passes", lambda r: r.tick(MUCH_LATER)),
]


def _write_ended(room: prefill_room.PrefillRoom, done: bool) -> None:
    if not room._writes:
        raise ValueError("no write is under way")
    room.write_ended(done, NOW)


def _doubt_ends(room: prefill_room.PrefillRoom) -> None:
    if room.phase is not prefill_room.PrefillPhase.ENDING:
        raise ValueError("the limit is that of an ending room")
    room.tick(MUCH_LATER)


def prefill_edges() -> Edges:
    """(phase, next phase) -> events, of a room on P."""
    limits = prefill_room.PrefillLimits(lease_s=30, idle_s=1800, fence_retry_s=1, doubt_s=300)
    return _edges(prefill_room.PrefillRoom(1, 1, 1, 0.0, limits), PREFILL_EVENTS)


def decode_edges() -> Edges:
    """(phase, next phase) -> events, of a room on D."""
    limits = decode_room.DecodeLimits(open_s=300, ask_s=5, resend_s=1, limit_s=120)
    return _edges(decode_room.DecodeRoom(1, 1, 0.0, limits), DECODE_EVENTS)


def _edges(first: Any, events: list[Event], writes: int = 2) -> Edges:
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    seen, waiting = {_key(first)}, [first]
    while waiting:
        room = waiting.pop()
        for name, event in events:
            after = copy.copy(room)
            if hasattr(after, "_asks"):
                after._asks = dict(after._asks)
            try:
                event(after)
            except ValueError:  # not allowed here
                continue
            if after.phase is not room.phase:
                found[room.phase.value, after.phase.value].add(name)
            if _key(after) not in seen and getattr(after, "_writes", 0) <= writes:
                seen.add(_key(after))
                waiting.append(after)
    order = [name for name, _ in events]
    return {edge: sorted(names, key=order.index) for edge, names in found.items()}


def _key(room: Any) -> str:
    return repr(sorted((name, str(value)) for name, value in vars(room).items()))
