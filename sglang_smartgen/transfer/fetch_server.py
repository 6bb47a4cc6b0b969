"""P's end of the remote lane: gather the asked entries from the store and write them to D's arena.

Owner: one `FetchServer` a prefill rank. SGLang's bootstrap thread receives Fetch and Release
messages and puts them in the queue, which wakes the one server thread; only that thread reads the
store for fetches and writes to arenas. Because the queue is served in order, a Release is answered
after every fetch that came before it has landed, or not at all until it has been fenced.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import numpy as np
import torch

from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Message,
    Release,
    Released,
)
from sglang_smartgen.transfer.push import Peer
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.transport import Span, Transport, WriteState

logger = logging.getLogger(__name__)

Reply = Callable[[Endpoint, Message], None]
BOUNCE_BYTES = 1 << 20


class FetchServer:
    """Answers Fetch and Release messages, one at a time, in the order they came."""

    def __init__(
        self,
        transport: Transport,
        store: PrefillStore,
        peer_of: Callable[[str], Peer | None],
        reply: Reply,
        settle: Callable[[Release], bool],
        doubt: Callable[[int, int], None],
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._store = store
        self._peer_of = peer_of
        self._reply = reply
        self._settle = settle
        self._doubt = doubt
        self._timeout_s = timeout_s
        self._bounce = self._new_bounce(BOUNCE_BYTES)
        # Bounce buffers of failed writes, by session: late bytes may still be read from them.
        self._retired: dict[str, list[HostRegion]] = {}
        self.bytes_on_demand = 0
        self.fetches = 0
        self._inbox: queue.SimpleQueue[Fetch | Release | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="smartgen-fetch", daemon=True)
        self._thread.start()

    def submit(self, message: Fetch | Release) -> None:
        """Queue a message; called by the thread that received it."""
        self._inbox.put(message)

    def close(self) -> None:
        """Stop after what is queued; at most the deadline of one write."""
        self._inbox.put(None)
        self._thread.join(self._timeout_s)

    def retired(self, session: str) -> list[HostRegion]:
        """Buffers that failed writes to this session may still read; ask before a fence."""
        return list(self._retired.get(session, []))

    def fenced(self, session: str, retired: list[HostRegion]) -> None:
        """No write reads these buffers any more; one that failed after the fence is not in here."""
        for bounce in retired:
            self._retired[session].remove(bounce)
            self._transport.unregister(bounce.region)

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                if isinstance(message, Fetch):
                    self._reply(message.reply, self._answer(message))
                else:
                    self._release(message)
            except Exception:
                # The asker has a deadline; this thread must outlive any one message.
                logger.exception("SmartGen %s failed", type(message).__name__)

    def _release(self, message: Release) -> None:
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
            failures += self._write(fetch.layer, peer, acquired)
        finally:
            for _, entry in acquired:
                self._store.release(entry)
        self.fetches += 1
        return FetchDone(fetch.sequence, failures)

    def _write(
        self, layer: int, peer: Peer, acquired: list[tuple[FetchItem, StoreEntry]]
    ) -> list[tuple[int, str]]:
        """Write every item to its arena range; the rooms that failed, with the cause."""
        decode = peer.registration
        entry_bytes = self._store.geometry.entry_bytes
        failures: list[tuple[int, str]] = []
        spans: list[Span] = []
        served: list[FetchItem] = []
        sizes = [sum(len(p) for p in item.positions) // 4 * entry_bytes for item, _ in acquired]
        if sum(sizes) > self._bounce.bytes.numel():
            small, self._bounce = self._bounce, self._new_bounce(sum(sizes))
            self._transport.unregister(small.region)
        at = 0
        for (item, entry), size in zip(acquired, sizes, strict=True):
            if item.arena_offset < 0 or item.arena_offset + size > decode.arena_bytes:
                failures.append((item.room, f"arena offset {item.arena_offset} is out of range"))
                continue
            problem = self._gather(entry, layer, item, at)
            if problem is not None:
                failures.append((item.room, problem))
                continue
            source = self._bounce.region.address + at
            spans.append(Span(source, decode.arena + item.arena_offset, size))
            served.append(item)
            at += size
        if spans:
            handle = self._transport.write(decode.session, spans)
            if handle.wait(self._timeout_s) is WriteState.DONE:
                self.bytes_on_demand += sum(span.length for span in spans)
            else:
                cause = handle.error or f"not complete after {self._timeout_s} s"
                failures += [(item.room, f"fetch write failed: {cause}") for item in served]
                for item in served:
                    self._doubt(item.room, item.generation)
                self._retired.setdefault(decode.session, []).append(self._bounce)
                self._bounce = self._new_bounce(self._bounce.bytes.numel())
        return failures

    def _gather(self, entry: StoreEntry, layer: int, item: FetchItem, at: int) -> str | None:
        """Gather an item to byte `at` of the bounce buffer; a sentence when it is nonsense."""
        g = self._store.geometry
        if not 0 <= layer < g.layers or len(item.positions) != g.kv_heads:
            return f"layer {layer} with {len(item.positions)} KV heads does not fit this model"
        for head, packed in enumerate(item.positions):
            if not packed:
                continue
            if len(packed) % 4:
                return f"positions of KV head {head} are {len(packed)} bytes, no int32 array"
            positions = torch.from_numpy(np.frombuffer(packed, dtype=np.int32).astype(np.int64))
            if int(positions.min()) < 0 or int(positions.max()) >= entry.captured[layer]:
                return f"a position is outside the {entry.captured[layer]} tokens of the prompt"
            count = positions.numel()
            out = self._bounce.tensor(at, (count, 2, g.head_dim), g.dtype)
            entry.gather(layer, head, positions, out)
            at += count * g.entry_bytes
        return None

    def _new_bounce(self, length: int) -> HostRegion:
        bounce = HostRegion(length)
        self._transport.register(bounce.region)
        return bounce
