"""Proactive push: during prefill, a background thread sends what the plan names, data before mask.

Owner: one `PushWorker` a prefill rank. The scheduler thread fills the store entry and then calls
`layer_ready`; `finish` follows the last layer of the last chunk. Both only put a job in the queue,
which wakes the push thread. That thread alone encodes metadata, writes to D and calls `finish`'s
callback. Jobs of one room that have piled up become one write, so a slow network sees large writes.

Per write the order is: KV and metadata, wait until they are complete, then the mask. A transport
orders nothing between two writes, so the wait is what makes "mask says local" true (design 2.2).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_smartgen.core.blocks import PushPlan
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.messages import Endpoint, Registration
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.spans import spans_for_slots
from sglang_smartgen.transfer.store import StoreEntry
from sglang_smartgen.transfer.transport import Region, Span, Transport, WriteState

logger = logging.getLogger(__name__)

WRITE_BYTES = 4 << 20
"""Aim of one write: large enough for the network, small enough that a fetch need not wait long."""


class Peer(msgspec.Struct, frozen=True):
    """A decode rank as P writes to it. Addresses are the decode rank's, one a layer."""

    registration: Registration
    keys: list[int]
    values: list[int]

    def mask_address(self, layer: int, row: int, position: int) -> int:
        """Address of one mask byte."""
        r = self.registration
        return r.mask + (layer * r.mask_rows + row) * r.mask_width + position


class PushRoom:
    """What the push thread knows of one room.

    `failure` is the cause of a failed write, whose bytes may still land; `ended_early` the cause of
    an end without one. Each is set once and ends the pushes.
    """

    def __init__(
        self,
        *,
        entry: StoreEntry,
        plan: PushPlan,
        peer: Peer,
        reply: Endpoint,
        slots: npt.NDArray[np.int64],
        row: int,
        with_metadata: bool,
        keep: bool,
        is_live: Callable[[], bool],
    ) -> None:
        self.entry = entry
        self.plan = plan
        self.peer = peer
        self.reply = reply
        self.slots = slots
        self.row = row
        self.with_metadata = with_metadata
        self.keep = keep
        self.is_live = is_live
        self.pushed = [0] * len(entry.captured)
        self.proactive_bytes = 0
        self.metadata_bytes = 0
        self.failure: str | None = None
        self.ended_early: str | None = None


class PushWorker:
    """Sends the planned blocks of every room in the background."""

    def __init__(
        self, transport: Transport, selector: Selector, max_len: int, timeout_s: float
    ) -> None:
        self._transport = transport
        self._selector = selector
        self._timeout_s = timeout_s
        # The source of every mask write: a run of LOCAL, registered once.
        self._ones = HostRegion(max_len)
        self._ones.bytes.fill_(1)
        transport.register(self.ones)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="smartgen-push", daemon=True)
        self._thread.start()

    @property
    def ones(self) -> Region:
        """Region of the mask source."""
        return self._ones.region

    def layer_ready(self, room: PushRoom, layer: int) -> None:
        """The entry holds new tokens of `layer`; they go out in the background."""
        self._jobs.put(_Job(room, layer, None))

    def finish(self, room: PushRoom, done: Callable[[PushRoom], None]) -> None:
        """Call `done(room)` on the push thread when everything before it is out or failed."""
        self._jobs.put(_Job(room, None, done))

    def close(self) -> None:
        """Stop after the jobs that are queued; at most the deadline of one write."""
        self._jobs.put(None)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            for room, group in _by_room(job for job in jobs if job is not None):
                try:
                    self._process(room, group)
                except Exception as error:
                    # A bug in one room must not end the thread for all rooms.
                    logger.exception("push of room %s failed", room.entry.room)
                    room.failure = room.failure or f"push failed: {error}"
                for job in group:
                    _report(job)
            if None in jobs:
                return

    def _process(self, room: PushRoom, group: list[_Job]) -> None:
        load = _Load()
        for layer in sorted({job.layer for job in group if job.layer is not None}):
            if room.failure or room.ended_early:
                return
            if not room.is_live():
                # Said here, or the room would pass for pushed.
                room.ended_early = "the request or its decode node is gone"
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
        for first, last in room.plan.ranges_within(layer, start, stop):
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
        if room.with_metadata and layer >= DENSE_LAYERS:
            first, last = entry.encode(layer, self._selector)
            if first < last:
                sparse = layer - DENSE_LAYERS
                length = peer.registration.metadata_row_bytes
                source = entry.metadata[sparse, first:last].data_ptr()
                base = peer.registration.metadata[sparse]
                load.data += spans_for_slots(source, length, base, room.slots[first:last])
                load.metadata_bytes += length * (last - first)

    def _send(self, room: PushRoom, load: _Load) -> None:
        for spans in (load.data, load.masks):
            if spans and room.failure is None:
                self._write(room, spans)
        if room.failure is None:
            room.proactive_bytes += load.proactive_bytes
            room.metadata_bytes += load.metadata_bytes

    def _write(self, room: PushRoom, spans: list[Span]) -> None:
        session = room.peer.registration.session
        began = time.monotonic()
        handle = self._transport.write(session, spans)
        state = handle.wait(self._timeout_s)
        if state is not WriteState.DONE:
            cause = handle.error or f"not complete after {time.monotonic() - began:.1f} s"
            room.failure = f"push to {session} failed: {cause}"


class _Load(msgspec.Struct):
    """What one write carries, and the masks that follow it."""

    data: list[Span] = []
    masks: list[Span] = []
    proactive_bytes: int = 0
    metadata_bytes: int = 0


class _Job(msgspec.Struct):
    room: PushRoom
    layer: int | None
    done: Callable[[PushRoom], None] | None


def _report(job: _Job) -> None:
    if job.done is None:
        return
    try:
        job.done(job.room)
    except Exception:
        logger.exception("end of the push of room %s failed", job.room.entry.room)


def _by_room(jobs: Iterable[_Job]) -> Iterable[tuple[PushRoom, list[_Job]]]:
    """Jobs grouped by room, rooms in the order of their first job."""
    groups: dict[int, tuple[PushRoom, list[_Job]]] = {}
    for job in jobs:
        groups.setdefault(id(job.room), (job.room, []))[1].append(job)
    return list(groups.values())
