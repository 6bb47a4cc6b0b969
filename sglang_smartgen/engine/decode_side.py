"""D's side: rooms, masks, metadata pool, arena, and the way in and out of every room.

Owner: the KV manager of a decode rank creates one. The scheduler thread opens, commits, serves and
releases rooms; SGLang's decode thread calls `on_message` for P's control messages. P writes mask
bytes, KV, metadata and arena from outside, one-sided.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core import recordings
from sglang_smartgen.core.mask import LOCAL, PADDING, REMOTE
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.arena import Arena
from sglang_smartgen.transfer.fill_lane import FILL_BYTES, Credit, FillLane
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    FetchDone,
    Filled,
    Hello,
    Message,
    OpenRoom,
    Registration,
    Release,
    Released,
    Started,
)
from sglang_smartgen.transfer.quarantine import Quarantine, refuses_connections
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.remote_lane import RemoteLane, Send
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.transport import Transport

logger = logging.getLogger(__name__)

QUARANTINE_LIMIT_S = 120.0  # more than P may spend on one write and its fence
HELLO_LIMIT_S = 5.0
FINISHED_KEPT = 256


class DecodeSide:
    """Everything a decode rank keeps for SmartGen."""

    def __init__(
        self,
        *,
        config: SmartGenConfig,
        facts: ModelFacts,
        selector: Selector,
        transport: Transport,
        session: str,
        reply: Endpoint,
        send: Send,
        rank: int,
    ) -> None:
        self.config = config
        self.facts = facts
        self.selector = selector
        self._session = session
        self._reply = reply
        self._send = send
        g = facts.geometry
        rows, max_len = facts.req_to_token.shape
        slots = facts.keys[0].shape[0]
        self._mask_memory = HostRegion(g.layers * rows * max_len)
        self.masks = self._mask_memory.tensor(0, (g.layers, rows, max_len), torch.int8)
        self.metadata = self._metadata_pool(slots)
        self.arena = Arena(slots * g.kv_heads * g.entry_bytes)
        self.fill = FillLane(session, reply, self._send_to_store, self._place)
        self._scratch = HostRegion(4096)
        for memory in (
            self._mask_memory,
            self._metadata_memory,
            self.arena.memory,
            self.fill.memory,
            self._scratch,
        ):
            transport.register(memory.region)
        self.lane = RemoteLane(session, reply, self._send_to_store, config.fetch_timeout_s)
        self.quarantine = Quarantine(QUARANTINE_LIMIT_S)
        self._epoch = time.time_ns()
        self._generation = self._epoch >> 20
        self._rooms: dict[int, DecodeRoom] = {}
        self._by_row: dict[int, DecodeRoom] = {}
        self._smart_peers: set[Endpoint] = set()
        self._serve: dict[Endpoint, Endpoint] = {}  # P's bootstrap endpoint -> its store's server
        self._first_seen: dict[Endpoint, float] = {}
        self.finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_KEPT)
        self.rank = rank
        self.counters = {"rooms": 0, "failures": 0, "stretches_checked": 0, "stretches_wrong": 0}
        self.fallbacks: dict[str, int] = {}

    def _metadata_pool(self, slots: int) -> Tensor:
        """[sparse_layers, slots, kv_heads, width], addressed by the KV pool's own slots."""
        g, s = self.facts.geometry, self.selector
        shape = (max(1, len(g.sparse_layers)), slots, g.kv_heads, s.metadata_width)
        length = torch.Size(shape).numel() * s.metadata_dtype.itemsize
        self._metadata_memory = HostRegion(max(1, length))
        return self._metadata_memory.tensor(0, shape, s.metadata_dtype)

    def registration(self) -> Registration:
        """What every P must know once to write here."""
        g = self.facts.geometry
        _, rows, max_len = self.masks.shape
        return Registration(
            version=VERSION,
            session=self._session,
            epoch=self._epoch,
            fingerprint=self.selector.fingerprint(),
            layers=g.layers,
            kv_row_bytes=g.row_bytes,
            mask=self.masks.data_ptr(),
            mask_rows=rows,
            mask_width=max_len,
            metadata=[self.metadata[i].data_ptr() for i in range(len(g.sparse_layers))],
            metadata_row_bytes=self.metadata[0, 0].numel() * self.metadata.itemsize,
            arena=self.arena.region.address,
            arena_bytes=self.arena.region.length,
            fill=self.fill.region.address,
            fill_bytes=self.fill.region.length,
            scratch=self._scratch.region.address,
            tp_size=self.facts.tp_size,
        )

    def open(
        self,
        *,
        room: int,
        rid: str,
        row: int,
        slots: Tensor,
        peer: Endpoint | None,
        bootstrap_addr: str,
        overrides: object,
    ) -> OpenRoom | None:
        """Make a room before P is told its slots; the message for P, or None for a short prompt.

        slots: int64 [prompt_len]. With `peer` None (a P of another TP size) the room is opened for
        a full transfer. Raises ConfigError when the request's overrides are not allowed.
        """
        config = self.config.for_request(overrides)
        if config.record:
            recordings.check_folder()
        prompt_len = int(slots.numel())
        blocks = min(config.blocks_per_layer, prompt_len)
        if prompt_len < config.min_prompt_len:
            self._count_fallback("short prompt")
            logger.debug("room %s: stock, prompt tokens: %d", room, prompt_len)
            return None
        g = self.facts.geometry
        self._generation += 1
        self.masks[:, row].fill_(PADDING)
        mask = self.masks[:, row, :prompt_len]
        mask.fill_(REMOTE)
        state = DecodeRoom(
            room=room,
            generation=self._generation,
            rid=rid,
            row=row,
            slots=slots,
            mask=mask,
            peer=peer,
            bootstrap_addr=bootstrap_addr,
            config=config,
            geometry=g,
        )
        self._rooms[room] = state
        self._by_row[row] = state
        self.counters["rooms"] += 1
        if peer is None:
            return None
        self._first_seen.setdefault(peer, time.monotonic())
        k_r = config.proactive_blocks_of(g.layers)
        return OpenRoom(
            version=VERSION,
            room=room,
            generation=state.generation,
            row=row,
            prompt_len=prompt_len,
            blocks_per_layer=blocks,
            # A prompt shorter than M tokens has fewer blocks; the same share of them goes first.
            proactive_blocks=None if k_r is None else k_r * blocks // config.blocks_per_layer,
            order=config.order,
            k=state.k,
            recording=config.recording,
            metadata=not state.selects_all,
            keep=config.mode in ("smartgen", "partial"),
            verify=config.verify,
        )

    def room_of_row(self, row: int) -> DecodeRoom | None:
        """The SmartGen room that owns a row, or None (short prompt, health check)."""
        return self._by_row.get(row)

    def room(self, room: int) -> DecodeRoom | None:
        """The state of a room number."""
        return self._rooms.get(room)

    def commit(self, room: int) -> None:
        """SGLang took the request over for decode: fix what is local and complete the metadata."""
        state = self._rooms.get(room)
        if state is None:
            return
        # A SmartGen push marks layers 0 and 1 first of all, so a mask without a mark is a stock
        # transfer, and a lost Started cannot be taken for one.
        whole = state.started is None and not bool((state.mask == LOCAL).any())
        state.commit(whole)
        self._verify(state)
        if whole:
            self._count_fallback("full transfer")
            state.stats.fallback = "full transfer"
            logger.info("room %s: full transfer, prompt tokens: %d", room, state.prompt_len)
            if not state.selects_all:
                self._encode_here(state)

    def _verify(self, state: DecodeRoom) -> None:
        """Where the request asked for it, compare what is here with P's checksums."""
        checked, wrong = state.compare(self.facts.keys, self.facts.values)
        self.counters["stretches_checked"] += checked
        self.counters["stretches_wrong"] += len(wrong)
        if wrong:
            where = ", ".join(f"layer {layer} from token {token}" for layer, token in wrong[:3])
            cause = f"room {state.room}, decode rank {self.rank}: KV differs from P's in {where}"
            logger.error("%s (%d places)", cause, len(wrong))
            state.fail(cause)

    def _count_fallback(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def _encode_here(self, state: DecodeRoom) -> None:
        """Metadata of a prompt that came whole: the bytes that a SmartGen P would have sent."""
        anchor_len = min(self.selector.anchor_tokens, state.prompt_len)
        for sparse, layer in enumerate(self.facts.geometry.sparse_layers):
            keys = self.facts.keys[layer].index_select(0, state.slots)
            anchor = keys[:anchor_len] if anchor_len else None
            encoded = self.selector.encode(layer, keys, anchor)
            self.metadata[sparse].index_copy_(0, state.slots, encoded)

    def on_message(self, message: Message) -> None:
        """A control message of a P arrived (SGLang's decode thread)."""
        match message:
            case FetchDone():
                self.lane.answered(message)
            case Started(room=room, generation=generation):
                state = self._rooms.get(room)
                if state is not None and state.generation == generation:
                    state.started = message
                    if state.peer is not None:
                        self._smart_peers.add(state.peer)
            case Filled():
                self.fill.filled(message)
            case Released(room=room, generation=generation):
                state = self._rooms.get(room)
                if state is not None and state.generation == generation:
                    state.settled = True
                self.quarantine.acknowledge(room, generation)
            case Hello(host=host, port=port, serve=serve):
                self._greeted(Endpoint(host, port), serve or Endpoint(host, port))
            case _:
                logger.warning("SmartGen: unexpected %s on a decode node", type(message).__name__)

    def _greeted(self, peer: Endpoint, serve: Endpoint) -> None:
        self._smart_peers.add(peer)
        before = self._serve.get(peer, serve)
        self._serve[peer] = serve
        if before != serve:
            self.lane.lost(peer, f"the store server at {before.host}:{before.port} has ended")

    def _send_to_store(self, peer: Endpoint, message: Message) -> None:
        """Fetch, Grant or Release to whoever serves that P's store; before its Hello, to P."""
        self._send(self._serve.get(peer, peer), message)

    def begin_step(self, rows: list[int]) -> None:
        """A decode step of these rows begins: grant its credits, let P go where all is here."""
        credits: list[Credit] = []
        for row in rows:
            state = self._by_row.get(row)
            if state is None or state.started is None or state.peer is None:
                continue
            if state.left:
                most = state.credit_bytes(FILL_BYTES // (2 * len(self._rooms)))
                if most:
                    paced = state.config.credit == "adaptive"
                    credits.append(Credit(state.room, state.generation, state.peer, paced, most))
            elif not state.released and state.all_local:
                state.released = True
                self._send_release(state)
        if credits:
            self.fill.grant(credits)

    def _place(
        self, room: int, generation: int, portion: Portion, piece: Tensor, left: int
    ) -> None:
        """Speculative bytes of a room that is still open (fill thread, under the lane's lock)."""
        state = self._rooms.get(room)
        if state is not None and state.generation == generation:
            state.place(portion, piece, left, self.facts.keys, self.facts.values)

    def _send_release(self, state: DecodeRoom) -> None:
        """Tell P that this generation is over, once; a repeat has no effect."""
        assert state.peer is not None
        try:
            self._send_to_store(
                state.peer, Release(state.room, state.generation, self._session, self._reply)
            )
        except Exception as error:
            logger.debug("release of room %s: %s", state.room, error)

    def release(self, room: int, finish: str, free: Callable[[], None]) -> None:
        """The request is over; run `free` (slots and row) once P can no longer write to them.

        That is at once for a room that runs: P has completed every write to slots and mask, and
        writes to the arenas only, whose ranges stay with the room until P has let go of it.
        finish: SGLang's finish reason (`stop`, `length`, `abort`) or `retracted`, for the record.
        """
        state = self._rooms.get(room)
        if state is None:
            free()
            return
        self.fill.stop(room, state.generation)
        del self._rooms[room]
        self._verify(state)
        self._record(state, finish)
        del self._by_row[state.row]
        slots = 0 if state.running else state.prompt_len
        if state.running:
            free()
            free = _nothing
        peer = state.peer
        if peer is None or state.settled or self._is_stock(peer):
            self._free(state, free)
            return

        def resend() -> None:
            if peer in self._smart_peers:
                self._send_release(state)

        self.quarantine.hold(
            room,
            state.generation,
            free=lambda: self._free(state, free),
            resend=resend,
            cannot_write=lambda: self._is_stock(peer) or refuses_connections(peer),
            slots=slots,
        )

    def _is_stock(self, peer: Endpoint) -> bool:
        """True when a P has had time to say Hello and has not: it never writes for SmartGen.

        It must not be sent our messages either: SGLang's bootstrap thread dies of an unknown one.
        """
        late = time.monotonic() - self._first_seen[peer] > HELLO_LIMIT_S
        return late and peer not in self._smart_peers

    def _free(self, state: DecodeRoom, free: Callable[[], None]) -> None:
        self.arena.settled(state.room, state.generation)
        self.fill.settled(state.room, state.generation)
        free()

    def _record(self, state: DecodeRoom, finish: str) -> None:
        if state.failure is not None:
            self.counters["failures"] += 1
        record = msgspec.to_builtins(state.stats)
        record |= {"finish": finish, "failure": state.failure}
        self.finished.append(record)
        if finish != "abort":
            state.write_recording()

    def drain(self) -> None:
        """Free what has left quarantine; the scheduler calls it on every turn of its loop."""
        if len(self.quarantine):
            self.quarantine.drain()

    def snapshot(self) -> dict[str, Any]:
        """State for `/server_info`."""
        return {
            "role": "decode",
            "config": msgspec.to_builtins(self.config),
            "counters": dict(self.counters),
            "fallbacks": dict(self.fallbacks),
            "open_rooms": len(self._rooms),
            "quarantined_rooms": len(self.quarantine),
            "quarantined_slots": self.quarantine.slots,
            "quarantined_slabs": self.arena.quarantined,
            "residual_blocks": sum(room.residual_blocks for room in list(self._rooms.values())),
            "granted_bytes": self.fill.granted_bytes,
            "fetch_wait_s": self.lane.seconds_waited,
            "finished": list(self.finished),
        }


def _nothing() -> None:
    """The slots are free already."""
