"""Proactive push: during prefill, a background thread sends what the plan names, data before mask.

Owner: one `PushWorker` a prefill rank, with one thread a decode session, so that a D that hangs
holds up no other. The scheduler thread fills the store entry and then calls `layer_ready`; `finish`
follows the last layer of the last chunk. Both only note what waits, which wakes that session's push
thread. It alone encodes the room's metadata, writes to D and calls `finish`'s callback, and it ends
when its D has wanted nothing for a while.

What waits goes out in writes of about a twentieth of a second, one at a time. While one is under
way the thread prepares the next, which then carries new KV and metadata and the masks of what has
arrived before. A transport orders nothing between two writes, so a mask is written only when the
write of its data is complete (design 2.2).

An elastic plan (core/room_plan.py) keeps the network busy exactly as long as prefill takes: with
nothing planned at hand the thread sends more blocks, and what is planned but still here when
prefill ends is left to the remote lane and the fill.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from sglang_smartgen.core.counts import counts
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.push_load import Load, Piece, kv_pieces, pieces_of
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.transport import Priority, Transport, WriteHandle, WriteState

logger = logging.getLogger(__name__)

WRITE_S, WRITE_BYTES = 0.05, (128 << 10, 4 << 20)
"""Aim of one write: large enough for the network, small enough that nothing waits long for it."""
FIRST_WRITE_BYTES = 512 << 10  # before the network has been measured
LINGER_S = 60.0
"""A push thread without work ends after it."""
GONE = "the request or its decode node is gone"


class PushWorker:
    """Sends the planned blocks of every room in the background, one thread a decode session."""

    def __init__(
        self,
        transport: Transport,
        selector: Selector,
        timeout_s: float,
        on_busy: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_busy` is told on a push thread when the first begins and the last ends to work."""
        self._transport = transport
        self._on_busy = on_busy
        self._selector = selector
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._closing = False

    def layer_ready(self, room: PushRoom, layer: int) -> None:
        """The entry holds new tokens of `layer`; they go out in the background."""
        with self._lock:
            self._pending(room).layers.add(layer)

    def finish(self, room: PushRoom, done: Callable[[PushRoom], None]) -> None:
        """Call `done(room)` on its push thread when everything before it is out or failed."""
        with self._lock:
            self._pending(room).done.append(done)

    def busy(self) -> bool:
        """Whether something is being pushed: speculative bytes wait for it."""
        with self._lock:
            return any(lane.working or lane.pending for lane in self._lanes.values())

    def close(self) -> None:
        """Stop after what is queued; at most the deadline of one write."""
        with self._lock:
            self._closing = True
            lanes = list(self._lanes.values())
            for lane in lanes:
                lane.changed.notify()
        for lane in lanes:
            lane.thread.join(self._timeout_s)

    def _pending(self, room: PushRoom) -> _Pending:
        """What waits for a room; the caller holds the lock, and its thread looks when it is let go.

        Bounded by the layers of the open rooms: a layer that waits already is not queued again.
        """
        session = room.peer.registration.session
        lane = self._lanes.get(session)
        if lane is None:
            lane = self._lanes[session] = _Lane(self._lock)
            name = f"smartgen-push-{session}"
            lane.thread = threading.Thread(
                target=self._run, args=(session, lane), name=name, daemon=True
            )
            lane.thread.start()
        lane.changed.notify()
        return lane.pending.setdefault(room, _Pending())

    def _run(self, session: str, lane: _Lane) -> None:
        wait = True
        while (work := self._next(session, lane, wait)) is not None:
            for room, pending in work.items():
                self._guarded(lane, room, self._process, sorted(pending.layers))
                lane.open.add(room)
                if pending.done:
                    lane.open.discard(room)
                    self._guarded(lane, room, self._flush)
                for done in pending.done:
                    _report(room, done)
            wait = True
            for room in list(lane.open):
                if not lane.pending and self._guarded(lane, room, self._send_more):
                    wait = False

    def _next(self, session: str, lane: _Lane, wait: bool) -> dict[PushRoom, _Pending] | None:
        """What is pending, waited for if asked to; None when the thread is to end."""
        if wait and not lane.pending and lane.under_way is not None:
            self._guarded(lane, lane.under_way.room, self._flush)
        with self._lock:
            if not lane.pending and (wait or self._closing):
                self._work(lane, False)
                if not self._closing:
                    lane.changed.wait(LINGER_S)
                if not lane.pending:
                    del self._lanes[session]
                    return None
            work, lane.pending = lane.pending, {}
            self._work(lane, True)
            return work

    def _guarded(
        self, lane: _Lane, room: PushRoom, action: Callable[..., bool], *layers: list[int]
    ) -> bool:
        try:
            return action(lane, room, *layers)
        except Exception as error:
            # A bug in one room must not end the thread for all rooms.
            logger.exception("push of room %s failed", room.entry.room)
            room.failure = room.failure or f"push failed: {error}"
            return False

    def _work(self, lane: _Lane, working: bool) -> None:
        """The lane begins or ends to work; the caller holds the lock, so the order is told."""
        before = any(other.working for other in self._lanes.values())
        lane.working = working
        if any(other.working for other in self._lanes.values()) != before:
            self._on_busy(working)

    def _process(self, lane: _Lane, room: PushRoom, layers: list[int]) -> bool:
        """Send what these layers have new; False when the room is over."""
        load, size = Load(), self._write_bytes(room)
        for layer in layers:
            if not self._alive(room):
                return False
            for piece in pieces_of(room, layer, self._selector, size):
                if self._late(room, piece):
                    room.plan.give_up(layer, torch.from_numpy(piece.tokens))
                    continue
                load.add(room, piece)
                if load.bytes >= size:
                    self._send(lane, room, load)
                    load, size = Load(), self._write_bytes(room)
        if load.data:
            self._send(lane, room, load)
        return not room.over

    def _send_more(self, lane: _Lane, room: PushRoom) -> bool:
        """One write of blocks that were not planned, while prefill goes on; False: none is left."""
        if not room.plan.elastic or room.grace_s is not None or not self._alive(room):
            return False
        size = self._write_bytes(room)
        tokens = max(1, size // (2 * room.peer.registration.kv_row_bytes))
        load = Load()
        for layer, ranges in room.plan.more(room.pushed, room.plan.blocks_of(tokens)).items():
            for piece in kv_pieces(room, layer, ranges, size):
                load.add(room, piece)
        if load.data:
            self._send(lane, room, load)
        return bool(load.data) and not room.over

    def _flush(self, lane: _Lane, room: PushRoom) -> bool:
        """Nothing of the room is under way any more, and D knows of all that has arrived."""
        self._settle(lane)
        if room.masks:
            self._send(lane, room, Load())
            self._settle(lane)
        return not room.over

    def _alive(self, room: PushRoom) -> bool:
        if not room.over and not room.gate.live():
            # Said here, or the room would pass for pushed.
            room.ended_early = room.ended_early or GONE
        return not room.over

    def _late(self, room: PushRoom, piece: Piece) -> bool:
        """Whether decode, which could begin soon, would wait too long for this piece.

        Counted in bytes at the measured rate: a thread that was not let run for a while must not
        make a fast network pass for a slow one.
        """
        if not room.plan.elastic or room.grace_s is None or not piece.optional:
            return False
        rate = self._transport.bandwidth(room.peer.registration.session)
        if rate is not None and room.after_bytes + piece.bytes > rate * room.grace_s:
            return True
        room.after_bytes += piece.bytes
        return False

    def _write_bytes(self, room: PushRoom) -> int:
        rate = self._transport.bandwidth(room.peer.registration.session)
        if rate is None:
            return FIRST_WRITE_BYTES
        return int(min(max(rate * WRITE_S, WRITE_BYTES[0]), WRITE_BYTES[1]))

    def _send(self, lane: _Lane, room: PushRoom, load: Load) -> None:
        """Start a write, once the one before it is complete."""
        self._settle(lane)
        if room.over:
            return
        spans, room.masks = load.data + room.masks, []
        if not room.gate.began():
            room.ended_early = room.ended_early or GONE
            return
        began = time.monotonic()
        try:
            session = room.peer.registration.session
            handle = self._transport.write(session, spans, Priority.PROACTIVE, self._timeout_s)
        except BaseException:
            room.gate.ended(False)
            raise
        size = sum(span.length for span in spans)
        lane.under_way = _Write(room, load, handle, began, size, len(spans))

    def _settle(self, lane: _Lane) -> None:
        """Wait for the write that is under way, and take note of what it has brought."""
        write, lane.under_way = lane.under_way, None
        if write is None:
            return
        room, load, done = write.room, write.load, False
        try:
            left = write.began + self._timeout_s - time.monotonic()
            done = write.handle.wait(left) is WriteState.DONE
            if done and write.handle.late:
                room.late = True
                room.gate.late()
            now = time.monotonic()
            room.writes.append((write.began, now, write.bytes, write.spans))
            if not done:
                cause = write.handle.error or f"not complete after {now - write.began:.1f} s"
                session = room.peer.registration.session
                room.failure = room.failure or f"push to {session} failed: {cause}"
        finally:
            room.gate.ended(done)
        if done:
            room.masks += load.arrived(room)
            room.proactive_bytes += load.proactive_bytes
            room.metadata_bytes += load.metadata_bytes
            counts.pushed(load.proactive_bytes > 0, load.metadata_bytes > 0)


class _Write(msgspec.Struct):
    """A write that has been started: when (monotonic), of how many bytes in how many spans."""

    room: PushRoom
    load: Load
    handle: WriteHandle
    began: float
    bytes: int
    spans: int


class _Pending:
    """What waits of one room, to be sent together: a slow network sees large writes."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self.done: list[Callable[[PushRoom], None]] = []


class _Lane:
    """The queue and the thread of one decode session; guarded by the worker's lock."""

    thread: threading.Thread

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.pending: dict[PushRoom, _Pending] = {}  # in the order of their first job
        self.working = False
        # The thread's own: rooms that have begun and not finished, and the write under way.
        self.open: set[PushRoom] = set()
        self.under_way: _Write | None = None


def _report(room: PushRoom, done: Callable[[PushRoom], None]) -> None:
    try:
        done(room)
    except Exception:
        logger.exception("end of the push of room %s failed", room.entry.room)
