"""A decode side with one room on a scripted network, for tests of both kinds of lanes."""

from __future__ import annotations

import numpy as np
import torch
from small_rank import DIM, HEADS, ROWS, SLOTS, SmallRank, hata

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_side import DecodeSide
from sglang_smartgen.engine.device_path import DevicePath
from sglang_smartgen.engine.lanes import Lanes, Wanted
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.messages import Endpoint, Fetch, FetchDone, Hello, Message

P_END, D_END = Endpoint("p", 1), Endpoint("d", 2)
TOKENS, ROOM = 60, 7
SPARSE = (2, 3)
K = 12  # entries that a step may use: ratio 0.2
POSITIONS = torch.tensor([[3, 10, 40, 59], [0, 10, 11, 12]])


class Bench:
    """One room of which even positions are local; the rest is NaN in the pool and whole on P."""

    def __init__(self, config: SmartGenConfig, path: DevicePath | None = None) -> None:
        self.rank = SmallRank(1, path)
        self.asked: list[Fetch] = []
        self.answers_at_once = False
        self.side = DecodeSide(
            config=config,
            facts=self.rank.facts,
            selector=hata(),
            transport=FakeTransport(FakeNetwork(), "d"),
            session="d",
            reply=D_END,
            send=self.receive,
            rank=0,
            path=path,
        )
        self.side.on_message(Hello(P_END.host, P_END.port))
        self.lanes = Lanes(self.side)
        self.slots = self.rank.slots(TOKENS)
        self.kept = self.rank.pool[:, :, self.slots].clone()  # [2, layers, tokens, heads, dim]
        self.room = self.open(ROOM, 1)
        for layer in SPARSE:
            self.rank.pool[:, layer, self.slots[1::2]] = torch.nan
            self.room.mask[layer] = REMOTE
            self.room.mask[layer, 0::2] = LOCAL
        self.side.commit(ROOM)

    def open(self, room: int, row: int) -> DecodeRoom:
        opened = self.side.open(
            room=room,
            rid=str(room),
            row=row,
            slots=self.slots,
            peer=P_END,
            bootstrap_addr="p:0",
            overrides=None,
        )
        state = self.side.room(room)
        assert opened is not None and state is not None and row < ROWS
        return state

    def open_short(self, tokens: int) -> DecodeRoom:
        """Another room, all of it here: the same tokens, but fewer, in slots of their own."""
        slots = torch.arange(SLOTS)[~torch.isin(torch.arange(SLOTS), self.slots)][:tokens]
        self.rank.pool[:, :, slots] = self.kept[:, :, :tokens]
        self.side.metadata[:, slots] = self.side.metadata[:, self.slots[:tokens]]
        opened = self.side.open(
            room=ROOM + 1,
            rid="short",
            row=2,
            slots=slots,
            peer=P_END,
            bootstrap_addr="p:0",
            overrides=None,
        )
        state = self.side.room(ROOM + 1)
        assert opened is not None and state is not None
        state.mask.fill_(LOCAL)
        self.side.commit(ROOM + 1)
        return state

    def receive(self, peer: Endpoint, message: Message) -> None:
        assert peer == P_END and isinstance(message, Fetch)
        self.asked.append(message)
        if self.answers_at_once:
            self.answer(message)

    def answer(
        self,
        fetch: Fetch,
        failures: list[tuple[int, str]] | None = None,
        *,
        late: bool = False,
    ) -> None:
        """P's entries land in the arena, then it says so."""
        for item in fetch.items:
            at = item.arena_offset
            for head, raw in enumerate(item.positions):
                where = torch.from_numpy(np.frombuffer(raw, np.int32).astype(np.int64))
                rows = self.side.arena.memory.tensor(at, (len(where), 2, DIM), torch.bfloat16)
                rows.copy_(self.kept[:, fetch.layer, where, head].movedim(0, 1))
                at += rows.numel() * 2
        self.side.on_message(FetchDone(fetch.sequence, failures or [], late))

    def encode(self) -> None:
        """The metadata that P's push has brought before decode starts."""
        for sparse, layer in enumerate(SPARSE):
            keys = self.kept[0, layer]
            anchor = keys[: hata().anchor_tokens]
            encoded = self.side.selector.encode(layer, keys, anchor)
            self.side.metadata[sparse, self.slots] = encoded

    def pick(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """What is selected for a query [q_heads, head_dim] where it is: int64 [heads, k].

        Scores are floats, so another device may break near-ties otherwise.
        """
        metadata = self.side.metadata[SPARSE.index(layer)].index_select(0, self.slots)
        metadata = metadata.to(query.device)
        grouped = query.view(HEADS, -1, DIM)
        selector = self.side.selector
        return selector.pick(selector.score(layer, grouped, metadata), self.room.k)

    def wanted(self, positions: torch.Tensor = POSITIONS) -> list[Wanted]:
        absent = positions < 0
        return [Wanted(0, self.room, positions, absent=absent if bool(absent.any()) else None)]

    def expected(self, layer: int, side: int) -> torch.Tensor:
        head = torch.arange(HEADS)[:, None]
        return self.kept[side, layer, POSITIONS, head]


def smartgen(path: DevicePath | None = None, **settings: object) -> Bench:
    config = {"blocks_per_layer": 50, "min_prompt_len": 32, **settings}
    return Bench(SmartGenConfig(**config), path)  # type: ignore[arg-type]


def asked_positions(fetch: Fetch) -> list[list[int]]:
    return [np.frombuffer(raw, np.int32).tolist() for raw in fetch.items[0].positions]
