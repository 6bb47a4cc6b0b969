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
from torch import Tensor

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core import decode_room as core
from sglang_smartgen.core import recordings
from sglang_smartgen.core.agreement import Agreement
from sglang_smartgen.core.counts import counts
from sglang_smartgen.core.mask import LOCAL, PADDING, REMOTE
from sglang_smartgen.engine.decode_memory import DecodeMemory
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_rooms import DecodeRooms, Placed
from sglang_smartgen.engine.device_path import DevicePath
from sglang_smartgen.engine.heartbeat import Heartbeat
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.prefill_peers import PrefillPeers
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.fill_lane import FILL_BYTES, Credit, FillLane
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Failed,
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
from sglang_smartgen.transfer.remote_lane import RemoteLane, Send
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.transport import Transport

logger = logging.getLogger(__name__)

OPEN_LIMIT_S = 360.0  # more than SGLang's own patience, which ends a request with its own words
RESEND_S = 1.0
QUARANTINE_LIMIT_S = 180.0  # more than P's lease, one write of P and its late bytes together
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
        fail_request: Callable[[int, str], None] = lambda room, cause: None,
        open_limit_s: float = OPEN_LIMIT_S,
        path: DevicePath | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """fail_request: end a request that SGLang still waits for. open_limit_s: from opening a
        room to its start; SGLang's own patience must be shorter. path: of this host; None: a CPU
        host's. agreement: of the server's ranks, of which this is number `rank`; None: there is
        one.
        """
        self.config = config
        self.facts = facts
        self.selector = selector
        self._session = session
        self._reply = reply
        self._send = send
        self._fail_request = fail_request
        self._limits = core.DecodeLimits(
            open_s=open_limit_s,
            ask_s=config.fetch_timeout_s,
            resend_s=RESEND_S,
            limit_s=QUARANTINE_LIMIT_S,
        )
        self.fill = FillLane(session, reply, self._send_to_store, self._place)
        self._memory = DecodeMemory(facts, selector, transport, self.fill, path or DevicePath())
        self.masks, self.metadata = self._memory.masks, self._memory.metadata
        self.device_metadata = self._memory.device_metadata
        self.arena = self._memory.arena
        self.lane = RemoteLane(session, reply, self._send_to_store, config.fetch_timeout_s)
        self._epoch = time.time_ns()
        self._generation = self._epoch >> 20
        self._peers = PrefillPeers()
        self._rooms = DecodeRooms(
            self._peers,
            send_release=self._send_release,
            fail_request=self._fail_waiting,
            free_ranges=self._free_ranges,
        )
        self.heartbeat = Heartbeat(
            self._rooms,
            self._peers,
            session=session,
            epoch=self._epoch,
            send=send,
            lost=self.lane.lost,
        )
        self.finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_KEPT)
        self.rank = rank
        self._agreement = agreement or Agreement()
        self.counters = {"rooms": 0, "failures": 0, "stretches_checked": 0, "stretches_wrong": 0}
        self.fallbacks: dict[str, int] = {}

    def registration(self) -> Registration:
        """What every P must know once to write here."""
        return self._memory.registration(self._session, self._epoch)

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
        a full transfer. Raises ConfigError when the request's overrides are not allowed, which all
        ranks find alike; RecordingError for a folder that this one lacks, with the room opened, as
        it is on other ranks.
        """
        config = self._own_recordings(self.config.for_request(overrides))
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
        now = time.monotonic()
        self._rooms.pump(now)
        state = DecodeRoom(
            machine=core.DecodeRoom(room, self._generation, now, self._limits),
            rid=rid,
            row=row,
            slots=slots,
            mask=mask,
            peer=peer,
            bootstrap_addr=bootstrap_addr,
            config=config,
            geometry=g,
        )
        self._rooms.add(state)
        self.counters["rooms"] += 1
        if peer is None:
            self._rooms.act(state, state.machine.stock(now))
            return None
        self._peers.meet(peer, now)
        if config.record:
            try:
                recordings.check_folder()
            except recordings.RecordingError:
                self._rooms.act(state, state.machine.stock(now))  # P is not told the slots
                raise
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

    def _own_recordings(self, config: SmartGenConfig) -> SmartGenConfig:
        """Each rank records and replays its own KV heads."""
        names = [
            recordings.of_rank(name, self.rank, self._agreement.size)
            for name in (config.record, config.recording)
        ]
        return msgspec.structs.replace(config, record=names[0], recording=names[1])

    def room_of_row(self, row: int) -> DecodeRoom | None:
        """The SmartGen room that owns a row, or None (short prompt, health check)."""
        return self._rooms.of_row(row)

    def room(self, room: int) -> DecodeRoom | None:
        """The state of a room number."""
        return self._rooms.of_number(room)

    def commit(self, room: int) -> None:
        """SGLang took the request over for decode: fix what is local and complete the metadata."""
        now = time.monotonic()
        self._rooms.pump(now)
        state = self._rooms.of_number(room)
        if state is None:
            return
        # A SmartGen push marks layers 0 and 1 first of all, so a mask without a mark is a stock
        # transfer, and a lost Started cannot be taken for one.
        whole = state.started is None and not bool((state.mask == LOCAL).any())
        state.commit(whole)
        self._verify(state)
        if not whole:
            # P's success says the same as the Started before it, which may have been lost.
            self._rooms.act(state, state.machine.started(state.missing(state.left), now))
        else:
            state.machine.whole(now)
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
                state = self._rooms.of_generation(room, generation)
                if state is not None and state.peer is not None:
                    self._peers.speaks(state.peer)
                self._rooms.post(message)
            case Released() | Failed():
                self._rooms.post(message)
            case Filled():
                self.fill.filled(message)
                if message.failure is not None:
                    self._rooms.post(message)
            case Hello(host=host, port=port):
                before = self._peers.greeted(message)
                if before is not None:
                    cause = f"the store server at {before.host}:{before.port} has ended"
                    self.lane.lost(Endpoint(host, port), cause)
                self._rooms.post(message)
            case _:
                logger.warning("SmartGen: unexpected %s on a decode node", type(message).__name__)

    def _send_to_store(self, peer: Endpoint, message: Message) -> None:
        """Fetch, Grant or Release to whoever serves that P's store; before its Hello, to P."""
        self._send(self._peers.server(peer), message)

    def begin_step(self, rows: list[int]) -> None:
        """A decode step of these rows begins: grant its credits, let P go where all is here."""
        now = time.monotonic()
        self._rooms.pump(now)
        credits: list[Credit] = []
        for row in rows:
            state = self._rooms.of_row(row)
            if state is None or state.started is None or state.peer is None:
                continue
            if state.left:
                most = state.credit_bytes(FILL_BYTES // (2 * len(self._rooms)))
                if most:
                    paced = state.config.credit == "adaptive"
                    credits.append(Credit(state.room, state.generation, state.peer, paced, most))
            elif state.machine.may_ask and state.all_local:
                self._rooms.act(state, state.machine.all_here(now))
        if credits:
            self.fill.grant(credits)

    def _place(
        self, room: int, generation: int, portion: Portion, piece: Tensor, left: int
    ) -> None:
        """Speculative bytes of a room that is still open (fill thread, under the lane's lock)."""
        state = self._rooms.of_generation(room, generation)
        if state is not None and state.machine.may_ask:
            state.place(portion, piece, left, self.facts.keys, self.facts.values)
            self._rooms.post(Placed(room, generation))

    def release(self, room: int, finish: str, free: Callable[[], None]) -> None:
        """The request is over; run `free` (slots and row) once P can no longer write to them.

        That is at once for a room that has started: P has completed every write to slots and mask,
        and writes to the arenas only, whose ranges stay with the room until P has let go of it. For
        one that has not been committed it is when all ranks are as far (`drain`).
        finish: SGLang's finish reason (`stop`, `length`, `abort`) or `retracted`, for the record.
        """
        now = time.monotonic()
        self._rooms.pump(now)
        state = self._rooms.of_number(room)
        if state is None:
            free()
            return
        self.fill.stop(room, state.generation)
        self._verify(state)
        self._record(state, finish)
        if state.peer is not None and self._peers.is_stock(state.peer, now):
            self._rooms.act(state, state.machine.stock(now))
        # A committed room frees its slots here and now, and so it does on every rank.
        self._rooms.end(state, free if state.committed else self._agreement.release(free), now)

    # What the rooms' machines want ----------------------------------------------------------

    def _send_release(self, state: DecodeRoom) -> None:
        """Tell P that this generation is over; a repeat has no effect."""
        if state.peer is None or not self._peers.is_smart(state.peer):
            return  # it may still say Hello; asked again then
        try:
            self._send_to_store(
                state.peer, Release(state.room, state.generation, self._session, self._reply)
            )
        except Exception as error:
            logger.debug("release of room %s: %s", state.room, error)

    def _fail_waiting(self, state: DecodeRoom) -> None:
        """End a request that waits for its prefill, unless P has told SGLang itself."""
        if not state.told and state.failure is not None:
            self._fail_request(state.room, state.failure)

    def _free_ranges(self, room: int, generation: int) -> None:
        self.arena.settled(room, generation)
        self.fill.settled(room, generation)

    def _record(self, state: DecodeRoom, finish: str) -> None:
        if state.failure is not None:
            self.counters["failures"] += 1
            counts.failed(state.failure)
        record = msgspec.to_builtins(state.stats)
        record |= {"finish": finish, "failure": state.failure}
        self.finished.append(record)
        if finish != "abort":
            state.write_recording()

    def drain(self) -> None:
        """Free what P has let go of; the scheduler calls it on every turn of its loop."""
        now = time.monotonic()
        self._rooms.pump(now)
        self._rooms.tick(now)
        self._agreement.settle()

    def failures(self, rooms: list[int | None]) -> list[str | None]:
        """Why each request of a batch must end, on all ranks alike; None: it goes on.

        rooms: the batch's, in its order; all ranks ask in the same step. A room that failed
        elsewhere fails here too.
        """
        states = [None if room is None else self._rooms.of_number(room) for room in rooms]
        agreed = self._agreement.failures([self._ended_by(state) for state in states])
        for state, cause in zip(states, agreed, strict=True):
            if state is not None and cause is not None:
                state.fail(cause)
        return agreed

    def _ended_by(self, state: DecodeRoom | None) -> str | None:
        if state is None or state.failure is None:
            return None
        return (
            f"SmartGen fetch failed for room {state.room} (decode rank {self.rank}, prefill "
            f"{state.bootstrap_addr}): {state.failure}"
        )

    @property
    def holds_slots(self) -> bool:
        """Whether slots of requests that are over are not free yet; the same on every rank."""
        return self._agreement.held > 0

    @property
    def quarantined_rooms(self) -> int:
        """Rooms that are over but of which P may still write to slots or ranges."""
        return self._rooms.ending

    def snapshot(self) -> dict[str, Any]:
        """State for `/server_info`."""
        return {
            "role": "decode",
            "config": msgspec.to_builtins(self.config),
            "counters": dict(self.counters),
            "fallbacks": dict(self.fallbacks),
            "open_rooms": len(self._rooms),
            "quarantined_rooms": self.quarantined_rooms,
            "quarantined_slots": self._rooms.held_slots,
            "quarantined_slabs": self.arena.quarantined,
            "residual_blocks": sum(room.residual_blocks for room in self._rooms.open),
            "granted_bytes": self.fill.granted_bytes,
            "fetch_wait_s": self.lane.seconds_waited,
            "finished": list(self.finished),
        }
