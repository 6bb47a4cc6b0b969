"""Fetch server at node p; fill lane, rooms and pool at node d; messages cross as frames.

The transport keeps a ledger of what D has granted, and checks every write of the fill against it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core import decode_room as core
from sglang_smartgen.core.geometry import DENSE_LAYERS, KVGeometry
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.select.base import KVShape
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.fetch_server import FetchServer
from sglang_smartgen.transfer.fill_lane import Credit, FillLane
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Filled,
    Grant,
    Message,
    Registration,
    Release,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.store import PrefillStore
from sglang_smartgen.transfer.transport import Priority, Span, WriteHandle

LAYERS, HEADS, DIM, TOKENS = 4, 2, 4, 40
ENTRY = 2 * DIM * 4  # bytes of one entry
TOKEN = HEADS * ENTRY  # and of a token's entries in one layer
MISSING = (LAYERS - DENSE_LAYERS) * TOKENS * HEADS  # entries of a room that the push left
CAPACITY, CANARY = 16 << 10, 0xAB
SLICE, CHUNK = 4 * TOKEN, 16 * TOKEN
P_END, D_END = Endpoint("p", 1), Endpoint("d", 2)
PATIENCE_S = 30.0  # bound of every wait that is expected to end at once


class LedgerTransport(FakeTransport):
    """Checks every write to the fill arena against what D has granted and not got back."""

    def __init__(self, network: FakeNetwork, session: str) -> None:
        super().__init__(network, session)
        self.fill = range(0)
        self.granted: dict[int, list[range]] = {}  # by room, as offsets; what P may write to
        self.outside: list[range] = []
        self.filled: list[range] = []  # in the order of their writes

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        for span in spans:
            if span.destination in self.fill:
                at = span.destination - self.fill.start
                wanted = range(at, at + span.length)
                self.filled.append(wanted)
                every = [g for ranges in self.granted.values() for g in ranges]
                if not any(g.start <= at and wanted.stop <= g.stop for g in every):
                    self.outside.append(wanted)
        return super().write(peer, spans, priority, deadline_s)


class Bench:
    """Both ends, and rooms whose dense layers are on D."""

    def __init__(
        self,
        *,
        rooms: Sequence[int] = (11,),
        order: torch.Tensor | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self.network = FakeNetwork()
        self.p, self.d = LedgerTransport(self.network, "p"), FakeTransport(self.network, "d")
        self.geometry = KVGeometry(LAYERS, HEADS, DIM, torch.float32)
        selector = ExactSelector(KVShape(LAYERS, HEADS, HEADS, DIM, 1.0))
        self.store = PrefillStore(self.geometry, selector, 1 << 20)
        made = torch.Generator().manual_seed(1)
        self.pool = torch.zeros((2, LAYERS, len(rooms) * TOKENS, HEADS, DIM))
        slots = torch.randperm(len(rooms) * TOKENS, generator=made)
        self.rooms: dict[int, DecodeRoom] = {}
        self.kv: dict[int, torch.Tensor] = {}
        for i, room in enumerate(rooms):
            entry = self.store.open(room, 1, TOKENS)
            assert entry is not None
            self.kv[room] = torch.randn(entry.kv.shape, generator=made)
            entry.kv.copy_(self.kv[room])
            entry.captured[:] = [TOKENS] * LAYERS
            for layer in range(DENSE_LAYERS):
                entry.residual.mark_tokens(layer, torch.arange(TOKENS))
            codes = torch.arange(LAYERS * TOKENS) if order is None else order
            entry.residual.set_order(codes)
            self.rooms[room] = self._decode_room(room, slots[i * TOKENS : (i + 1) * TOKENS])
        self.busy = False
        self.doubted: set[tuple[int, int]] = set()
        self.arena = HostRegion(4096)
        self.lane = FillLane("d", D_END, self.to_prefill, self._place, CAPACITY)
        self.lane.memory.bytes.fill_(CANARY)
        at = self.lane.region.address
        self.p.fill = range(at, at + CAPACITY)
        for memory in (self.arena, self.lane.memory):
            self.d.register(memory.region)
        self.peer: Peer | None = self.peer_of_epoch(1)
        self.server = FetchServer(
            self.p,
            self.store,
            peer_of=lambda session: self.peer if session == "d" else None,
            reply=self._to_decode,
            settle=lambda _: True,
            doubt=lambda room, generation: self.doubted.add((room, generation)),
            timeout_s=timeout_s,
            busy=lambda: self.busy,
        )
        self.replies: queue.Queue[Message] = queue.Queue()
        self.grants: list[Grant] = []
        self.doubled: list[range] = []  # ranges that were granted twice at a time
        self.messages: list[Filled] = []
        self.delivering = True  # False: Filled is only noted
        self.placed = threading.Semaphore(0)

    def _decode_room(self, room: int, slots: torch.Tensor) -> DecodeRoom:
        mask = torch.full((LAYERS, TOKENS), REMOTE, dtype=torch.int8)
        mask[:DENSE_LAYERS] = LOCAL
        limits = core.DecodeLimits(open_s=99.0, ask_s=99.0, resend_s=99.0, limit_s=99.0)
        made = DecodeRoom(
            machine=core.DecodeRoom(room, 1, 0.0, limits),
            rid="",
            row=0,
            slots=slots,
            mask=mask,
            peer=P_END,
            bootstrap_addr="",
            config=SmartGenConfig(),
            geometry=self.geometry,
        )
        made.left = MISSING
        return made

    def peer_of_epoch(self, epoch: int) -> Peer:
        registration = Registration(
            version=VERSION,
            session="d",
            epoch=epoch,
            fingerprint="",
            layers=LAYERS,
            kv_row_bytes=HEADS * DIM * 4,
            mask=0,
            mask_rows=0,
            mask_width=0,
            metadata=[],
            metadata_row_bytes=0,
            arena=self.arena.region.address,
            arena_bytes=self.arena.region.length,
            fill=self.lane.region.address,
            fill_bytes=CAPACITY,
            scratch=0,
            tp_size=1,
        )
        return Peer(registration, [], [])

    def to_prefill(self, endpoint: Endpoint, message: Message) -> None:
        assert endpoint == P_END
        received = from_frames(to_frames(message))
        assert isinstance(received, Fetch | Grant | Release)
        if isinstance(received, Grant):
            self.grants.append(received)
            for item in received.items:
                at, stop = item.arena_offset, item.arena_offset + item.length
                every = [g for ranges in self.p.granted.values() for g in ranges]
                self.doubled += [g for g in every if g.start < stop and at < g.stop]
                self.p.granted.setdefault(item.room, []).append(range(at, stop))
        self.server.submit(received)

    def _to_decode(self, endpoint: Endpoint, message: Message) -> None:
        assert endpoint == D_END
        received = from_frames(to_frames(message))
        if isinstance(received, Filled):
            self.messages.append(received)
            if self.delivering:
                self.deliver(received)
        self.replies.put(received)

    def deliver(self, message: Filled) -> None:
        """Hand a Filled to D; a range that is given back is no longer granted."""
        at, stop = message.arena_offset, message.arena_offset + message.length
        held = self.p.granted.get(message.room, [])
        rest = [g for g in held if g.start != at]
        rest += [range(stop, g.stop) for g in held if g.start == at and g.stop > stop]
        self.p.granted[message.room] = rest if message.left else []
        self.lane.filled(message)

    def _place(
        self, room: int, generation: int, portion: Portion, piece: torch.Tensor, left: int
    ) -> None:
        assert generation == 1
        keys, values = list(self.pool[0]), list(self.pool[1])
        self.rooms[room].place(portion, piece, left, keys, values)
        self.placed.release()

    def credit(self, amount: int, *rooms: int, paced: bool = False) -> None:
        """The start of a decode step."""
        wanted = [Credit(room, 1, P_END, paced, amount) for room in rooms or (11,)]
        self.lane.grant(wanted)

    def fetch(self, layer: int, *heads: list[int], room: int = 11, sequence: int = 1) -> None:
        packed = [torch.tensor(head, dtype=torch.int32).numpy().tobytes() for head in heads]
        item = FetchItem(room, 1, 0, packed)
        self.to_prefill(P_END, Fetch(sequence, "d", D_END, layer, [item]))

    def release(self, room: int = 11) -> None:
        self.to_prefill(P_END, Release(room, 1, "d", D_END))

    def reply(self, kind: type[Message] = Filled) -> Message:
        """The next reply of a kind; others are dropped."""
        while not isinstance(message := self.replies.get(timeout=PATIENCE_S), kind):
            pass
        return message

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def settled_down(self) -> None:
        """P has handled every message so far (a fetch is answered behind them)."""
        self.fetch(2, [], [], room=99, sequence=77)
        self.reply(FetchDone)

    def fill_all(self, amount: int, room: int = 11) -> None:
        state = self.rooms[room]

        def step() -> bool:
            if state.left:
                self.credit(amount, room)
            return not state.left

        self.wait_for(step)

    def wrong(self) -> list[range]:
        """What was granted twice or written where nothing was granted."""
        return self.doubled + self.p.outside

    def has_its_bytes(self, room: int) -> bool:
        """Whether D's pool holds all entries of the room's sparse layers."""
        ours = self.pool[:, DENSE_LAYERS:, self.rooms[room].slots]
        return torch.equal(ours, self.kv[room].transpose(0, 1)[:, DENSE_LAYERS:])

    def close(self) -> None:
        self.p.release()
        self.server.close()


def codes_of(message: Filled) -> list[int]:
    """The entries that a Filled names."""
    tokens = torch.frombuffer(bytearray(message.tokens + b"\0\0\0\0"), dtype=torch.int32)[:-1]
    entries = torch.frombuffer(bytearray(message.entries + b"\0\0\0\0"), dtype=torch.int32)[:-1]
    whole = tokens[:, None].to(torch.int64) * HEADS + torch.arange(HEADS)
    return whole.flatten().tolist() + entries.tolist()
