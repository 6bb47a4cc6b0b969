"""Proactive push: during prefill, a background thread sends what the plan names, data before mask.

Owner: one `PushWorker` a prefill rank, with one thread a decode session, so that a D that hangs
holds up no other. The scheduler thread fills the store entry and then calls `layer_ready`; `finish`
follows the last layer of the last chunk. Both only note what waits, which wakes that session's push
thread. It alone encodes the room's metadata, writes to D and calls `finish`'s callback, and it ends
when its D has wanted nothing for a while. What has piled up of a room becomes one write.

Per write the order is: KV and metadata, wait until they are complete, then the mask. A transport
orders nothing between two writes, so the wait is what makes "mask says local" true (design 2.2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from sglang_smartgen.core.counts import counts
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.messages import Endpoint, Registration
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.spans import spans_for_slots
from sglang_smartgen.transfer.store import StoreEntry
from sglang_smartgen.transfer.transport import Region, Span, Transport, WriteState

logger = logging.getLogger(__name__)

WRITE_BYTES = 4 << 20
"""Aim of one write: large enough for the network, small enough that a fetch need not wait long."""
LINGER_S = 60.0
"""A push thread without work ends after it."""
GONE = "the request or its decode node is gone"


class Peer(msgspec.Struct, frozen=True):
    """A decode rank as P writes to it. Addresses are the decode rank's, one a layer."""

    registration: Registration
    keys: list[int]
    values: list[int]

    def mask_address(self, layer: int, row: int, position: int) -> int:
        """Address of one mask byte."""
        r = self.registration
        return r.mask + (layer * r.mask_rows + row) * r.mask_width + position


class Gate(Protocol):
    """Whether P may still write for a room; asked and told around every write."""

    def live(self) -> bool:
        """False once the room has ended: nothing more need be prepared."""

    def began(self) -> bool:
        """Leave for one write; if given, `ended` must follow."""

    def ended(self, done: bool) -> None:
        """The write is complete, or its bytes may still land."""


class PushRoom:
    """What the push thread knows of one room.

    `failure` is the cause of a failed write, whose bytes may still land; `ended_early` the cause of
    an end without one. Each is set once and ends the pushes. writes: one (monotonic start, end,
    bytes, spans) a write, data and mask alike.
    """

    def __init__(
        self,
        *,
        entry: StoreEntry,
        plan: RoomPlan,
        peer: Peer,
        reply: Endpoint,
        slots: npt.NDArray[np.int64],
        row: int,
        with_metadata: bool,
        keep: bool,
        gate: Gate,
        verify: bool = False,
    ) -> None:
        self.entry = entry
        self.plan = plan
        self.peer = peer
        self.reply = reply
        self.slots = slots
        self.row = row
        self.with_metadata = with_metadata
        self.keep = keep
        self.gate = gate
        self.verify = verify  # D wants checksums
        self.pushed = [0] * len(entry.captured)
        # The prompt's last queries [w, q_heads, head_dim] by layer, for a plan that looks at them.
        self.queries: dict[int, Tensor] = {}
        self.prefill_s = 0.0
        self.proactive_bytes = 0
        self.metadata_bytes = 0
        self.writes: list[tuple[float, float, int, int]] = []
        self.failure: str | None = None
        self.ended_early: str | None = None


class PushWorker:
    """Sends the planned blocks of every room in the background, one thread a decode session."""

    def __init__(
        self,
        transport: Transport,
        selector: Selector,
        max_len: int,
        timeout_s: float,
        on_busy: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_busy` is told on a push thread when the first begins and the last ends to work."""
        self._transport = transport
        self._on_busy = on_busy
        self._selector = selector
        self._timeout_s = timeout_s
        # The source of every mask write: a run of LOCAL, registered once.
        self._ones = HostRegion(max_len)
        self._ones.bytes.fill_(1)
        transport.register(self.ones)
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._closing = False

    @property
    def ones(self) -> Region:
        """Region of the mask source."""
        return self._ones.region

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
        while True:
            with self._lock:
                if not lane.pending:
                    self._work(lane, False)
                    if not self._closing:
                        lane.changed.wait(LINGER_S)
                    if not lane.pending:
                        del self._lanes[session]
                        return
                work, lane.pending = lane.pending, {}
                self._work(lane, True)
            for room, pending in work.items():
                try:
                    self._process(room, sorted(pending.layers))
                except Exception as error:
                    # A bug in one room must not end the thread for all rooms.
                    logger.exception("push of room %s failed", room.entry.room)
                    room.failure = room.failure or f"push failed: {error}"
                for done in pending.done:
                    _report(room, done)

    def _work(self, lane: _Lane, working: bool) -> None:
        """The lane begins or ends to work; the caller holds the lock, so the order is told."""
        before = any(other.working for other in self._lanes.values())
        lane.working = working
        if any(other.working for other in self._lanes.values()) != before:
            self._on_busy(working)

    def _process(self, room: PushRoom, layers: list[int]) -> None:
        load = _Load()
        for layer in layers:
            if room.failure or room.ended_early:
                return
            if not room.gate.live():
                # Said here, or the room would pass for pushed.
                room.ended_early = room.ended_early or GONE
                return
            self._collect(room, layer, load)
            if load.proactive_bytes + load.metadata_bytes >= WRITE_BYTES:
                self._send(room, load)
                load = _Load()
        self._send(room, load)

    def _collect(self, room: PushRoom, layer: int, load: _Load) -> None:
        """Add what `layer` has new: planned blocks, metadata, and the mask of the blocks."""
        entry, peer = room.entry, room.peer
        start, stop = room.pushed[layer], entry.captured[layer]
        room.pushed[layer] = stop
        row_bytes = peer.registration.kv_row_bytes
        queries = room.queries.pop(layer, None)
        keys = entry.kv[layer, 0, :stop]
        for first, last in room.plan.ranges(layer, start, stop, queries, keys):
            entry.residual.mark_tokens(layer, first, last)
            for side, bases in enumerate((peer.keys, peer.values)):
                source = entry.kv[layer, side, first:last].data_ptr()
                wanted = room.slots[first:last]
                load.data += spans_for_slots(source, row_bytes, bases[layer], wanted)
            load.masks.append(
                Span(
                    self._ones.region.address,
                    peer.mask_address(layer, room.row, first),
                    last - first,
                )
            )
            load.proactive_bytes += 2 * row_bytes * (last - first)
        if room.with_metadata and layer in entry.sparse_layers:
            first, last = entry.encode(layer, self._selector)
            if first < last:
                sparse = entry.sparse_layers.index(layer)
                length = peer.registration.metadata_row_bytes
                source = entry.metadata[sparse, first:last].data_ptr()
                base = peer.registration.metadata[sparse]
                load.data += spans_for_slots(source, length, base, room.slots[first:last])
                load.metadata_bytes += length * (last - first)

    def _send(self, room: PushRoom, load: _Load) -> None:
        for spans in (load.data, load.masks):
            if spans and not (room.failure or room.ended_early):
                self._write(room, spans)
        if not (room.failure or room.ended_early):
            room.proactive_bytes += load.proactive_bytes
            room.metadata_bytes += load.metadata_bytes
            counts.pushed(load.proactive_bytes > 0, load.metadata_bytes > 0)

    def _write(self, room: PushRoom, spans: list[Span]) -> None:
        session = room.peer.registration.session
        if not room.gate.began():
            room.ended_early = room.ended_early or GONE
            return
        done, began = False, time.monotonic()
        try:
            handle = self._transport.write(session, spans)
            done = handle.wait(self._timeout_s) is WriteState.DONE
            size = sum(span.length for span in spans)
            room.writes.append((began, time.monotonic(), size, len(spans)))
            if not done:
                cause = handle.error or f"not complete after {time.monotonic() - began:.1f} s"
                room.failure = f"push to {session} failed: {cause}"
        finally:
            room.gate.ended(done)


class _Load(msgspec.Struct):
    """What one write carries, and the masks that follow it."""

    data: list[Span] = []
    masks: list[Span] = []
    proactive_bytes: int = 0
    metadata_bytes: int = 0


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


def _report(room: PushRoom, done: Callable[[PushRoom], None]) -> None:
    try:
        done(room)
    except Exception:
        logger.exception("end of the push of room %s failed", room.entry.room)
