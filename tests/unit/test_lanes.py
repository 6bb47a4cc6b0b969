"""Two lanes in two phases: what is asked for early is placed late, whatever came in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_rank import DIM, HEADS, ROWS, SmallRank, hata

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_side import DecodeSide
from sglang_smartgen.engine.lanes import Lanes, Wanted
from sglang_smartgen.transfer.arena import SLABS
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.messages import Endpoint, Fetch, FetchDone, Hello, Message
from sglang_smartgen.transfer.remote_lane import Ticket

P_END, D_END = Endpoint("p", 1), Endpoint("d", 2)
TOKENS, ROOM = 60, 7
SPARSE = (2, 3)
POSITIONS = torch.tensor([[3, 10, 40, 59], [0, 10, 11, 12]])


class Bench:
    """One room of which even positions are local; the rest is NaN in the pool and whole on P."""

    def __init__(self, config: SmartGenConfig) -> None:
        self.rank = SmallRank(1)
        self.asked: list[Fetch] = []
        self.side = DecodeSide(
            config=config,
            facts=self.rank.facts,
            selector=hata(),
            transport=FakeTransport(FakeNetwork(), "d"),
            session="d",
            reply=D_END,
            send=self.receive,
            rank=0,
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

    def receive(self, peer: Endpoint, message: Message) -> None:
        assert peer == P_END and isinstance(message, Fetch)
        self.asked.append(message)

    def answer(self, fetch: Fetch, failures: list[tuple[int, str]] | None = None) -> None:
        """P's entries land in the arena, then it says so."""
        for item in fetch.items:
            at = item.arena_offset
            for head, raw in enumerate(item.positions):
                where = torch.from_numpy(np.frombuffer(raw, np.int32).astype(np.int64))
                rows = self.side.arena.memory.tensor(at, (len(where), 2, DIM), torch.bfloat16)
                rows.copy_(self.kept[:, fetch.layer, where, head].movedim(0, 1))
                at += rows.numel() * 2
        self.side.on_message(FetchDone(fetch.sequence, failures or []))

    def wanted(self, positions: torch.Tensor = POSITIONS) -> list[Wanted]:
        absent = positions < 0
        return [Wanted(0, self.room, positions, absent=absent if bool(absent.any()) else None)]

    def expected(self, layer: int, side: int) -> torch.Tensor:
        head = torch.arange(HEADS)[:, None]
        return self.kept[side, layer, POSITIONS, head]


def smartgen(**settings: object) -> Bench:
    config = {"blocks_per_layer": 50, "min_prompt_len": 32, **settings}
    return Bench(SmartGenConfig(**config))  # type: ignore[arg-type]


def asked_positions(fetch: Fetch) -> list[list[int]]:
    return [np.frombuffer(raw, np.int32).tolist() for raw in fetch.items[0].positions]


def test_two_layers_under_way_at_once() -> None:
    bench = smartgen()
    prepared = [bench.lanes.prepare(layer, bench.wanted()) for layer in SPARSE]
    assert [asked_positions(fetch) for fetch in bench.asked] == [[[3, 59], [11]]] * 2
    for fetch in reversed(bench.asked):
        bench.answer(fetch)
    for layer, begun in zip(SPARSE, prepared, strict=True):
        ((want, keys, values),) = bench.lanes.finish(begun)
        assert want.room is bench.room
        assert torch.equal(keys, bench.expected(layer, 0))
        assert torch.equal(values, bench.expected(layer, 1))
    assert len({bench.side.arena.take() for _ in range(SLABS)} - {None}) == SLABS


def test_what_was_fetched_is_kept() -> None:
    bench = smartgen()
    for _ in range(2):
        begun = bench.lanes.prepare(2, bench.wanted())
        for fetch in bench.asked[:1]:
            bench.answer(fetch)
        ((_, keys, _),) = bench.lanes.finish(begun)
        assert torch.equal(keys, bench.expected(2, 0))
    assert len(bench.asked) == 1


def test_what_becomes_local_in_between_changes_nothing() -> None:
    """A push or a fill brings the bytes that a fetch was sent for, between the two phases."""
    bench = smartgen()
    begun = bench.lanes.prepare(2, bench.wanted())
    bench.rank.pool[:, 2, bench.slots] = bench.kept[:, 2]
    bench.room.mask[2] = LOCAL
    bench.answer(bench.asked[0])
    ((_, keys, values),) = bench.lanes.finish(begun)
    assert torch.equal(keys, bench.expected(2, 0))
    assert torch.equal(values, bench.expected(2, 1))


def test_a_room_that_fails_in_between_still_returns_its_slab() -> None:
    bench = smartgen()
    begun = bench.lanes.prepare(3, bench.wanted())
    bench.room.fail("layer 2 was late")
    bench.answer(bench.asked[0], [(ROOM, "gone")])
    ((_, keys, _),) = bench.lanes.finish(begun)
    assert bool((keys == 0).all())
    assert bench.room.failure == "layer 2 was late"
    assert bench.side.arena.quarantined == 1
    assert bench.lanes.prepare(3, bench.wanted()).asked is None  # nothing more is asked for it


@pytest.mark.parametrize("mode", ["smartgen", "proactive_only"])
def test_a_short_row_ends_in_absent_entries(mode: str) -> None:
    """-1 is not asked for, not counted, not attended to, and its bytes are no NaN."""
    bench = smartgen(mode=mode)
    positions = torch.tensor([[3, 10, 40, 59], [0, 11, -1, -1]])
    begun = bench.lanes.prepare(2, bench.wanted(positions))
    for fetch in bench.asked:
        bench.answer(fetch)
    ((want, keys, _),) = bench.lanes.finish(begun)
    padding = positions < 0
    remote = (positions % 2 == 1) & ~padding
    fetched = [] if mode == "proactive_only" else [[[3, 59], [11]]]
    assert [asked_positions(fetch) for fetch in bench.asked] == fetched
    assert bench.room.stats.entries_selected == 6
    assert want.absent is not None
    assert torch.equal(want.absent, padding | remote if mode == "proactive_only" else padding)
    there = bench.kept[0, 2, positions.clamp(min=0), torch.arange(HEADS)[:, None]]
    assert torch.equal(keys, there.masked_fill(want.absent[..., None], 0))


def test_a_request_without_parallel_lanes_fetches_before_it_gathers() -> None:
    """Its waits, bytes and steps are in its record, step by step since it asked for a trace."""
    bench = smartgen(parallel_lanes=False, trace=True)
    order: list[str] = []
    wait, local = bench.side.lane.wait, bench.lanes._local

    def waited(ticket: Ticket) -> dict[int, str]:
        order.append("wait")
        return wait(ticket)

    def gathered(layer: int, want: Wanted) -> tuple[torch.Tensor, torch.Tensor]:
        order.append("gather")
        return local(layer, want)

    bench.side.lane.wait, bench.lanes._local = waited, gathered  # type: ignore[method-assign]
    bench.room.begin_step()
    begun = bench.lanes.prepare(2, bench.wanted())
    bench.answer(bench.asked[0])
    ((_, keys, _),) = bench.lanes.finish(begun)
    assert order == ["wait", "gather", "wait"] and torch.equal(keys, bench.expected(2, 0))
    stats = bench.room.stats
    ((_, seconds, fetched, filled),) = stats.trace
    assert seconds == stats.fetch_wait_s > 0 and stats.fetches == 1 == stats.steps
    assert (fetched, filled) == (stats.bytes_on_demand, 0) == (3 * 2 * DIM * 2, 0)
