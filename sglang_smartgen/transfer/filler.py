"""P's end of speculative fill: a room's residual, slice by slice, into what D has granted.

Used by the serve thread alone, which calls `send_slice` whenever no message waits and `wait_s`
allows it. A chunk (up to some 20 ms of the link) is gathered at once, sent in slices of some 3 ms,
so that a fetch that comes meanwhile waits for one slice at most, and announced by one Filled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from sglang_smartgen.transfer.bounce import BounceBuffer
from sglang_smartgen.transfer.messages import Endpoint, Filled, Grant, Message
from sglang_smartgen.transfer.pacer import Pacer
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.store import EntryTable
from sglang_smartgen.transfer.transport import Priority, Span, Transport, TransportError, WriteState

logger = logging.getLogger(__name__)

Key = tuple[int, int]
"""Room and generation."""

CHUNK_S, CHUNK_BYTES = 0.02, (32 << 10, 1 << 20)
SLICE_S, SLICE_BYTES = 0.003, (8 << 10, 1 << 20)
MAX_GRANTS = 4096  # of one room: D tops up what was used, so more are nobody's
FIRST_RATE = 12.5e6  # bytes/s, 100 Mbit/s: before anything was measured, be careful


class _Room(msgspec.Struct):
    session: str
    peer: Peer  # a decode node restarted under this session has another arena
    reply: Endpoint
    paced: bool
    grants: deque[tuple[int, int]] = msgspec.field(default_factory=deque)  # arena offset, bytes


class _Chunk(msgspec.Struct):
    """What is being sent: `size` bytes of the bounce buffer, `sent` of them done."""

    key: Key
    room: _Room
    portion: Portion
    offset: int
    taken: int  # bytes of the grant that it uses up
    size: int
    left: int
    sent: int = 0
    late: bool = False  # a copy of some of it may land again


class Filler:
    """Open grants by room, served in turn."""

    def __init__(
        self,
        transport: Transport,
        store: EntryTable,
        peer_of: Callable[[str], Peer | None],
        reply: Callable[[Endpoint, Message], None],
        doubt: Callable[[int, int], None],
        timeout_s: float,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport = transport
        self._store = store
        self._peer_of = peer_of
        self._reply = reply
        self._doubt = doubt
        self._timeout_s = timeout_s
        self._busy = busy
        self.pacer = Pacer()
        self.bounce = BounceBuffer(transport, CHUNK_BYTES[1])
        self._rooms: dict[Key, _Room] = {}
        # Rooms of which a slice may still land: they get no other, whatever D has heard of it.
        self._failed: set[Key] = set()
        self._chunk: _Chunk | None = None
        self._rates: dict[str, float] = {}
        self.bytes_speculative = 0
        self.slices = 0

    def grant(self, message: Grant) -> None:
        """D's credit of one step; a range that is not in its arena is refused."""
        peer = self._peer_of(message.session)
        if peer is None:
            return
        for item in message.items:
            inside = item.arena_offset >= 0 and item.length > 0
            if not inside or item.arena_offset + item.length > peer.registration.fill_bytes:
                logger.warning("room %s: a grant outside the arena is ignored", item.room)
                continue
            key = (item.room, item.generation)
            if key in self._failed:
                continue
            room = self._rooms.get(key)
            if room is None:
                room = self._rooms[key] = _Room(message.session, peer, message.reply, message.paced)
            if len(room.grants) < MAX_GRANTS:
                room.grants.append((item.arena_offset, item.length))

    def forget(self, room: int, generation: int) -> None:
        """The room is over: no further slice is sent for it."""
        self._rooms.pop((room, generation), None)
        self._failed.discard((room, generation))
        if self._chunk is not None and self._chunk.key == (room, generation):
            self._chunk = None

    def wait_s(self) -> float | None:
        """Seconds until `send_slice` may be called; None: there is nothing to send."""
        room = (
            self._chunk.room if self._chunk is not None else next(iter(self._rooms.values()), None)
        )
        if room is None:
            return None
        if self._busy():
            return SLICE_S
        if not room.paced:
            return 0.0
        rate = self._rate(room.session)
        left = SLICE_BYTES[1] if self._chunk is None else self._chunk.size - self._chunk.sent
        seconds = min(self._slice_bytes(room), left) / rate
        return self.pacer.wait_s(room.session, seconds, time.monotonic())

    def send_slice(self) -> None:
        """Send the next slice, unless a push is under way; blocks `timeout_s` at most."""
        if self._busy():
            return
        if self._chunk is None:
            self._chunk = self._next_chunk()
        chunk = self._chunk
        if chunk is None:
            return
        peer = chunk.room.peer
        if self._peer_of(chunk.room.session) != peer:
            self.forget(*chunk.key)
            return
        length = min(self._slice_bytes(chunk.room), chunk.size - chunk.sent)
        source = self.bounce.address + chunk.sent
        target = peer.registration.fill + chunk.offset + chunk.sent
        began = time.monotonic()
        try:
            handle = self._transport.write(
                chunk.room.session,
                [Span(source, target, length)],
                Priority.SPECULATIVE,
                self._timeout_s,
            )
        except TransportError as error:
            self._fail(chunk, str(error))
            return
        if handle.wait(self._timeout_s) is not WriteState.DONE:
            self._fail(chunk, handle.error or f"not complete after {self._timeout_s} s")
            return
        self._learn(chunk.room.session, length, time.monotonic() - began)
        if handle.late:
            chunk.late = True
            self._doubt(*chunk.key)
        chunk.sent += length
        self.bytes_speculative += length
        self.slices += 1
        if chunk.sent == chunk.size:
            self._chunk = None
            self._announce(chunk)

    def _next_chunk(self) -> _Chunk | None:
        """Gather the next chunk of the room whose turn it is; None when nothing could be had."""
        while self._rooms:
            key, room = next(iter(self._rooms.items()))
            del self._rooms[key]
            entry = self._store.acquire(*key)
            if entry is None:
                continue
            try:
                offset, length = room.grants[0]
                g = self._store.geometry
                least = min(g.kv_heads, entry.residual.left) * g.entry_bytes
                if length < least:
                    logger.warning("room %s: its grant of %d bytes is too small", key[0], length)
                    continue
                wanted = _clip(self._rate(room.session) * CHUNK_S, CHUNK_BYTES)
                portion = entry.residual.take(min(wanted, length) // g.entry_bytes)
                left = entry.residual.left
                if portion is None:  # fetches took the rest, and D does not count them
                    self._reply(room.reply, Filled(*key, offset, 0, b"", b"", left))
                    continue
                count = portion.count(g.kv_heads)
                size = count * g.entry_bytes
                entry.gather_portion(portion, self.bounce.tensor(0, (size,), torch.uint8))
            finally:
                self._store.release(entry)
            rest = length - size
            taken = size if rest >= g.kv_heads * g.entry_bytes else length
            room.grants.popleft()
            if rest and taken == size:
                room.grants.appendleft((offset + size, rest))
            if left and room.grants:
                self._rooms[key] = room  # to the end of the row
            return _Chunk(key, room, portion, offset, taken, size, left)
        return None

    def _announce(self, chunk: _Chunk) -> None:
        tokens = chunk.portion.tokens.to(torch.int32).numpy().tobytes()
        entries = chunk.portion.entries.to(torch.int32).numpy().tobytes()
        self._reply(
            chunk.room.reply,
            Filled(
                *chunk.key,
                chunk.offset,
                chunk.taken,
                tokens,
                entries,
                chunk.left,
                late=chunk.late,
            ),
        )

    def _fail(self, chunk: _Chunk, cause: str) -> None:
        self.forget(*chunk.key)
        self._failed.add(chunk.key)
        self._doubt(*chunk.key)
        self.bounce.retire(chunk.room.session)
        failure = f"speculative write failed: {cause}"
        self._reply(
            chunk.room.reply,
            Filled(*chunk.key, chunk.offset, 0, b"", b"", chunk.left, failure),
        )

    def _rate(self, session: str) -> float:
        return self._rates.get(session) or self._transport.bandwidth(session) or FIRST_RATE

    def _slice_bytes(self, room: _Room) -> int:
        if not room.paced:
            return SLICE_BYTES[1]
        return _clip(self._rate(room.session) * SLICE_S, SLICE_BYTES)

    def _learn(self, session: str, length: int, seconds: float) -> None:
        if length < SLICE_BYTES[0]:
            return
        rate = length / max(seconds, 1e-6)
        old = self._rates.get(session, rate)
        self._rates[session] = 0.8 * old + 0.2 * rate


def _clip(wanted: float, allowed: tuple[int, int]) -> int:
    return int(min(max(wanted, allowed[0]), allowed[1]))
