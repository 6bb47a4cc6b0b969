"""P's serve thread: what D asks goes first, speculative fill uses the time between.

Owner: one `FetchServer` a decode session (see fetch_servers.py), in the scheduler process or in a
process of its own (see store_server.py). The thread that receives Fetch, Grant and Release puts
them in the queue, which wakes the one serve thread; only that thread reads the store for fetches
and fill and writes to that D's arenas. Because the queue is served in order and a slice is complete
before the next message is taken, a Release is settled after everything that came before it has
landed, or not at all until it has been fenced.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from sglang_smartgen.transfer.bounce import BounceBuffer
from sglang_smartgen.transfer.entries import Entries
from sglang_smartgen.transfer.filler import Filler
from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Grant,
    Message,
    Release,
    Released,
)
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.store import EntryTable, StoreEntry
from sglang_smartgen.transfer.transport import Priority, Span, Transport, WriteState

logger = logging.getLogger(__name__)

Reply = Callable[[Endpoint, Message], None]
Served = Fetch | Grant | Release
_Asked = tuple[FetchItem, StoreEntry, Entries]
BOUNCE_BYTES = 1 << 20
MAX_FETCH_BYTES = 4 << 30
"""No batch misses more in a layer; whoever asks for more wants our memory."""


class FetchServer:
    """Answers Fetch and Release messages, one at a time, in the order they came, and fills."""

    def __init__(
        self,
        transport: Transport,
        store: EntryTable,
        peer_of: Callable[[str], Peer | None],
        reply: Reply,
        settle: Callable[[Release], bool],
        doubt: Callable[[int, int], None],
        timeout_s: float,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport = transport
        self._store = store
        self._peer_of = peer_of
        self._reply = reply
        self._settle = settle
        self._doubt = doubt
        self._timeout_s = timeout_s
        self._bounce = BounceBuffer(transport, BOUNCE_BYTES)
        self.filler = Filler(transport, store, peer_of, reply, doubt, timeout_s, busy)
        self.bytes_on_demand = 0
        self.fetches = 0
        self._inbox: queue.SimpleQueue[Served | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="smartgen-fetch", daemon=True)
        self._thread.start()

    def submit(self, message: Served) -> None:
        """Queue a message; called by the thread that received it."""
        if isinstance(message, Fetch):
            self.filler.pacer.asked(message.session, time.monotonic())
        self._inbox.put(message)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Fetches, their bytes, those of the fill, and its writes."""
        fill = self.filler
        return self.fetches, self.bytes_on_demand, fill.bytes_speculative, fill.slices

    def idle(self, session: str) -> bool:
        """True when nothing waits, and no failed write may still read a buffer."""
        return self._inbox.empty() and self.filler.wait_s() is None and not self.retired(session)

    def end(self) -> None:
        """Stop after what is queued, without waiting for it, and give the buffers back."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop after what is queued; at most the deadline of one write."""
        self.end()
        self._thread.join(self._timeout_s)

    def retired(self, session: str) -> list[HostRegion]:
        """Buffers that failed writes to this session may still read; ask before a fence."""
        return self._bounce.retired(session) + self.filler.bounce.retired(session)

    def fenced(self, session: str, retired: list[HostRegion]) -> None:
        """No write reads these buffers any more; one that failed after the fence is not in here."""
        self._bounce.fenced(session, retired)
        self.filler.bounce.fenced(session, retired)

    def fence(self, session: str, scratch: int, timeout_s: float) -> bool:
        """Fence a session and free the buffers that only its failed writes kept; see Transport."""
        retired = self.retired(session)
        if not self._transport.fence(session, scratch, timeout_s):
            return False
        self.fenced(session, retired)
        return True

    def _run(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=self.filler.wait_s())
            except queue.Empty:
                if self.filler.wait_s() == 0.0:  # a push may have begun meanwhile
                    self._guarded(self.filler.send_slice)
                continue
            if message is None:
                self._bounce.close()
                self.filler.bounce.close()
                return
            self._guarded(self._handle, message)

    def _guarded(self, action: Callable[..., None], *arguments: Served) -> None:
        try:
            action(*arguments)
        except Exception:
            # The asker has a deadline; this thread must outlive any one message.
            logger.exception("SmartGen: serving failed")

    def _handle(self, message: Served) -> None:
        if isinstance(message, Fetch):
            self._reply(message.reply, self._answer(message))
            self.filler.pacer.answered(message.session, message.layer, time.monotonic())
        elif isinstance(message, Grant):
            self.filler.grant(message)
        else:
            self._release(message)

    def _release(self, message: Release) -> None:
        self.filler.forget(message.room, message.generation)
        self._store.drop(message.room, message.generation)
        # Without the promise there is no answer here: D keeps its slots.
        if self._settle(message):
            self._reply(message.reply, Released(message.room, message.generation))

    def _answer(self, fetch: Fetch) -> FetchDone:
        """Serve a Fetch; whatever goes wrong, every room in it gets an answer."""
        try:
            return self._serve(fetch)
        except Exception as error:
            logger.exception("fetch %s failed", fetch.sequence)
            cause = f"fetch failed: {error}"
            return FetchDone(fetch.sequence, [(item.room, cause) for item in fetch.items])

    def _serve(self, fetch: Fetch) -> FetchDone:
        peer = self._peer_of(fetch.session)
        if peer is None:
            cause = f"decode session {fetch.session} is not registered here"
            return FetchDone(fetch.sequence, [(item.room, cause) for item in fetch.items])
        failures: list[tuple[int, str]] = []
        acquired: list[tuple[FetchItem, StoreEntry]] = []
        try:
            for item in fetch.items:
                entry = self._store.acquire(item.room, item.generation)
                if entry is None:
                    failures.append((item.room, "its prefill store entry is gone"))
                else:
                    acquired.append((item, entry))
            failed, late = self._write(fetch.layer, peer, acquired)
            failures += failed
        finally:
            for _, entry in acquired:
                self._store.release(entry)
        self.fetches += 1
        return FetchDone(fetch.sequence, failures, late)

    def _write(
        self, layer: int, peer: Peer, acquired: list[tuple[FetchItem, StoreEntry]]
    ) -> tuple[list[tuple[int, str]], bool]:
        """Write every item to its arena range.

        The rooms that failed, with the cause, and whether a copy of the others may land again.
        """
        decode = peer.registration
        entry_bytes = self._store.geometry.entry_bytes
        failures: list[tuple[int, str]] = []
        spans: list[Span] = []
        served: list[_Asked] = []
        fitting: list[_Asked] = []
        total = 0
        for item, entry in acquired:
            try:
                wanted = Entries.of(item.positions)
            except ValueError as error:
                failures.append((item.room, str(error)))
                continue
            size = wanted.count * entry_bytes
            if item.arena_offset < 0 or item.arena_offset + size > decode.arena_bytes:
                failures.append((item.room, f"arena offset {item.arena_offset} is out of range"))
            elif total + size > min(decode.arena_bytes, MAX_FETCH_BYTES):
                failures.append((item.room, f"malformed: {size} bytes more in one fetch"))
            else:
                fitting.append((item, entry, wanted))
                total += size
        self._bounce.ensure(total)
        at = 0
        for item, entry, wanted in fitting:
            problem = self._gather(entry, layer, wanted, at)
            if problem is not None:
                failures.append((item.room, problem))
                continue
            source, size = self._bounce.address + at, wanted.count * entry_bytes
            spans.append(Span(source, decode.arena + item.arena_offset, size))
            served.append((item, entry, wanted))
            at += size
        late = False
        if spans:
            urgent, limit_s = Priority.ON_DEMAND, self._timeout_s
            handle = self._transport.write(decode.session, spans, urgent, limit_s)
            if handle.wait(self._timeout_s) is WriteState.DONE:
                self.bytes_on_demand += sum(span.length for span in spans)
                late = handle.late
                for item, entry, wanted in served:
                    # What D has fetched, it keeps: it leaves the residual.
                    entry.residual.mark_entries(layer, wanted)
                    if late:
                        self._doubt(item.room, item.generation)
            else:
                cause = handle.error or f"not complete after {self._timeout_s} s"
                failures += [(item.room, f"fetch write failed: {cause}") for item, *_ in served]
                for item, *_ in served:
                    self._doubt(item.room, item.generation)
                self._bounce.retire(decode.session)
        return failures, late

    def _gather(self, entry: StoreEntry, layer: int, wanted: Entries, at: int) -> str | None:
        """Gather entries to byte `at` of the bounce buffer; a sentence when they are nonsense."""
        g = self._store.geometry
        if not 0 <= layer < g.layers or len(wanted.bounds) != g.kv_heads + 1:
            heads = len(wanted.bounds) - 1
            return f"layer {layer} with {heads} KV heads does not fit this model"
        if not wanted.inside(entry.captured[layer]):
            return f"a position is outside the {entry.captured[layer]} tokens of the prompt"
        out = self._bounce.tensor(at, (wanted.count, 2, g.head_dim), g.dtype)
        entry.gather(layer, wanted, out)
        return None
