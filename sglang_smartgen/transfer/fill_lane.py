"""D's end of speculative fill: credits, the arena they are ranges of, and who may be placed.

Owner: one `FillLane` a decode rank, with one thread. The scheduler thread grants at the start of a
step and settles rooms; SGLang's decode thread hands over Filled messages, which wakes the fill
thread; that thread places the bytes in the KV pool and frees the range. Speculative bytes never
land in slots: a range belongs to one room and generation until it was placed or that generation is
settled, so a late write can only reach bytes that nobody reads (design.md 2.3). One lock guards the
ranges and is held while a chunk is placed, so a room cannot end under it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.core.counts import counts
from sglang_smartgen.core.ranges import RangeAllocator
from sglang_smartgen.transfer.messages import Endpoint, Filled, Grant, GrantItem, Message
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.transport import Region

logger = logging.getLogger(__name__)

FILL_BYTES = 64 << 20
SMALL_GRANT = 64 << 10
"""A top-up below it waits for the next step: a message costs more than it brings."""

Key = tuple[int, int]
"""Room and generation."""

Place = Callable[[int, int, Portion, Tensor, int], None]
"""Put a portion's bytes (uint8) in the pool: room, generation, portion, bytes, entries left."""


class Credit(msgspec.Struct):
    """What one room may have in flight at the start of this step, in bytes."""

    room: int
    generation: int
    peer: Endpoint
    paced: bool
    bytes: int


class FillLane:
    """Grants ranges of the arena and places what lands in them."""

    def __init__(
        self,
        session: str,
        reply: Endpoint,
        send: Callable[[Endpoint, Message], None],
        place: Place,
        capacity: int = FILL_BYTES,
    ) -> None:
        self._session = session
        self._reply = reply
        self._send = send
        self._place = place
        self.memory = HostRegion(capacity)
        # No alignment: a range is freed piece by piece.
        self._ranges = RangeAllocator(capacity, alignment=1)
        # Ranges [offset, length] that P may write to or that wait to be placed, in P's order.
        self._granted: dict[Key, list[list[int]]] = {}
        self._resting: dict[Key, list[tuple[int, int]]] = {}  # placed, but may be written again
        self._stopped: set[Key] = set()
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Filled] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="smartgen-fill", daemon=True).start()

    @property
    def region(self) -> Region:
        """Address and length of the arena, as P must know them."""
        return self.memory.region

    @property
    def granted_bytes(self) -> int:
        """Bytes of the arena that are not free."""
        with self._lock:
            return self._ranges.used

    def grant(self, credits: list[Credit]) -> None:
        """Top every room up to its credit, one message a peer; the start of a decode step."""
        by_peer: dict[tuple[Endpoint, bool], list[GrantItem]] = {}
        with self._lock:
            for credit in credits:
                item = self._top_up(credit)
                if item is not None:
                    by_peer.setdefault((credit.peer, credit.paced), []).append(item)
        for (peer, paced), items in by_peer.items():
            try:
                self._send(peer, Grant(self._session, self._reply, paced, items))
            except Exception as error:
                # What was granted stays with the room until it is settled; it decodes on demand.
                logger.warning("grant to %s:%s: %s", peer.host, peer.port, error)

    def _top_up(self, credit: Credit) -> GrantItem | None:
        key = (credit.room, credit.generation)
        held = self._granted.get(key, [])
        wanted = credit.bytes - sum(length for _, length in held)
        if key in self._stopped or wanted < min(SMALL_GRANT, credit.bytes):
            return None
        offset = self._ranges.allocate(wanted)
        if offset is None:
            return None  # the arena is full: the next step asks again
        self._granted.setdefault(key, []).append([offset, wanted])
        counts.credits += 1
        counts.credit_bytes += wanted
        return GrantItem(*key, offset, wanted)

    def filled(self, message: Filled) -> None:
        """P has written into a grant; the fill thread takes it from here."""
        self._inbox.put(message)

    def settled(self, room: int, generation: int) -> None:
        """No write for this generation can land any more: its ranges are free."""
        key = (room, generation)
        with self._lock:
            for offset, length in [*self._granted.pop(key, []), *self._resting.pop(key, [])]:
                self._ranges.free(offset, length)
            self._stopped.discard(key)

    def stop(self, room: int, generation: int) -> None:
        """The room ends: nothing of it is placed any more, its ranges rest until it is settled."""
        with self._lock:
            self._stopped.add((room, generation))

    def _run(self) -> None:
        while True:
            message = self._inbox.get()
            try:
                self._take(message)
            except Exception:
                # Or a later message could pass for the end of the residual.
                logger.exception("room %s: speculative fill could not be placed", message.room)
                self.stop(message.room, message.generation)

    def _take(self, message: Filled) -> None:
        key = (message.room, message.generation)
        with self._lock:
            held = self._granted.get(key)
            if held is None or key in self._stopped:
                return
            if message.failure is not None:
                logger.warning("room %s: %s", message.room, message.failure)
                self._stopped.add(key)
                return
            granted = _range_of(held, message)
            portion = Portion(_codes(message.tokens), _codes(message.entries))
            piece = self.memory.bytes[message.arena_offset : message.arena_offset + message.length]
            self._place(*key, portion, piece, message.left)
            if message.length and message.late:
                rest = self._resting.setdefault(key, [])
                rest.append((message.arena_offset, message.length))
            elif message.length:
                self._ranges.free(message.arena_offset, message.length)
            granted[0] += message.length
            granted[1] -= message.length
            if not granted[1]:
                held.remove(granted)
            if message.left == 0:
                for offset, length in self._granted.pop(key):
                    self._ranges.free(offset, length)


def _range_of(held: list[list[int]], message: Filled) -> list[int]:
    """The range whose front the message's bytes are; a piece is freed from the front."""
    for granted in held:
        if granted[0] == message.arena_offset and 0 <= message.length <= granted[1]:
            return granted
    raise ValueError(f"{message.length} bytes at {message.arena_offset} were not granted")


def _codes(packed: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(packed, dtype=np.int32).astype(np.int64))
