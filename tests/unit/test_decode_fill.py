"""Speculative fill as D sees it: credits of a step, and the end of a room that is all here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decode_bench import CONFIG, D_END, P_END, ROOM, TOKENS, Bench
from msgspec.structs import replace
from small_rank import HEADS, LAYERS

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine import decode_side as module
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.transfer.fill_lane import FILL_BYTES
from sglang_smartgen.transfer.messages import (
    Filled,
    Grant,
    GrantItem,
    OpenRoom,
    Release,
    Released,
    Started,
)
from sglang_smartgen.transfer.residual import Portion

ENTRY = 2 * 16 * 2  # bytes of one entry
TOKEN = HEADS * ENTRY  # and of a token's entries in one layer
LEFT = (LAYERS - DENSE_LAYERS) * TOKENS * HEADS  # when the dense layers were pushed
FIXED = replace(CONFIG, credit="fixed")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def decoding(bench: Bench, left: int = LEFT, *, overrides: object = None) -> DecodeRoom:
    """A room whose dense layers are here, in its first step."""
    message = bench.opened(overrides=overrides)
    bench.mark(*range(DENSE_LAYERS))
    bench.started(message.generation, left)
    bench.side.commit(ROOM)
    room = bench.side.room(ROOM)
    assert room is not None and room.left == left
    return room


def step(bench: Bench) -> list[object]:
    """What P is told at the start of a step."""
    bench.sent.clear()
    bench.side.begin_step([1, 2, 3])
    assert all(peer == P_END for peer, _ in bench.sent)
    return [message for _, message in bench.sent]


def granted(bench: Bench) -> tuple[bool, list[GrantItem]]:
    """The one Grant of this step."""
    (grant,) = step(bench)
    assert isinstance(grant, Grant)
    assert (grant.session, grant.reply) == ("d", D_END)
    return grant.paced, grant.items


def fill(bench: Bench, item: GrantItem, codes: torch.Tensor, left: int) -> Filled:
    """P writes whole tokens to the front of a grant and says so; the bytes are their codes."""
    size = codes.numel() * TOKEN
    wanted = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    at = item.arena_offset
    bench.side.fill.memory.bytes[at : at + size] = wanted
    packed = codes.numpy().astype(np.int32).tobytes()
    filled = Filled(item.room, item.generation, at, size, packed, b"", left)
    bench.side.on_message(filled)
    return filled


def everything() -> torch.Tensor:
    """Codes of all tokens of the sparse layers."""
    return torch.arange(DENSE_LAYERS * TOKENS, LAYERS * TOKENS)


# Credits.


def test_the_fixed_credit_is_a_share_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, FIXED)
    room = decoding(bench)
    share = TOKENS * LAYERS * TOKEN // 10
    assert share % TOKEN == 0
    assert granted(bench) == (False, [GrantItem(ROOM, room.generation, 0, share)])
    assert step(bench) == []  # it is all in flight still
    assert bench.side.snapshot()["granted_bytes"] == share
    assert bench.side.fill.region.length == FILL_BYTES


def test_credit_is_in_whole_tokens_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, replace(FIXED, speculative_ratio=0.0333))
    decoding(bench)
    _, (item,) = granted(bench)
    assert item.length % TOKEN == 0
    assert 0 <= 0.0333 * TOKENS * LAYERS * TOKEN - item.length < TOKEN
    bench = Bench(monkeypatch, replace(FIXED, speculative_ratio=1e-9))
    decoding(bench)
    _, (item,) = granted(bench)
    assert item.length == TOKEN


def test_credit_is_no_more_than_what_is_left(bench: Bench) -> None:
    decoding(bench, left=3)
    assert granted(bench)[1][0].length == 3 * ENTRY


def test_the_adaptive_credit_leaves_the_amount_to_p(bench: Bench) -> None:
    room = decoding(bench)
    assert granted(bench) == (True, [GrantItem(ROOM, room.generation, 0, LEFT * ENTRY)])


def test_rooms_share_the_arena_and_their_ranges_keep_the_alignment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILL_BYTES", 6 * 5 * TOKEN + 7)  # no multiple of a token
    rooms = []
    for row, number in ((1, 8), (2, 9), (3, 10)):
        message = bench.open(room=number, row=row)
        assert isinstance(message, OpenRoom)
        bench.side.on_message(Started(number, message.generation, 1, 1, 1.0, LEFT))
        bench.side.commit(number)
        rooms.append(bench.side.room(number))
    _, items = granted(bench)
    assert [(item.room, item.length) for item in items] == [(n, 5 * TOKEN) for n in (8, 9, 10)]
    for item, room in zip(items, rooms, strict=True):
        fill(bench, item, everything()[:5], LEFT - 5 * HEADS)
        bench.wait_for(lambda room=room: room.left == LEFT - 5 * HEADS)  # type: ignore[misc]
    assert bench.side.fill.granted_bytes == 0


@pytest.mark.parametrize(
    "overrides",
    [
        {"mode": "partial"},
        {"mode": "proactive_only"},
        {"mode": "full"},
        {"speculative_ratio": 0},
        {"speculative_ratio": 0, "credit": "fixed"},
    ],
)
def test_nothing_is_granted_where_nothing_is_filled(bench: Bench, overrides: object) -> None:
    decoding(bench, overrides=overrides)
    assert step(bench) == []


def test_nothing_is_granted_to_a_room_that_failed_or_has_not_started(bench: Bench) -> None:
    bench.opened()
    assert step(bench) == []
    bench = decoding_failed(bench)
    assert step(bench) == []


def decoding_failed(bench: Bench) -> Bench:
    room = bench.side.room(ROOM)
    assert room is not None
    bench.started(room.generation, LEFT)
    bench.side.commit(ROOM)
    room.fail("a fetch was late")
    return bench


# All here.


def test_a_room_that_is_all_here_lets_p_go_and_ends_without_waiting(bench: Bench) -> None:
    room = decoding(bench)
    _, (item,) = granted(bench)
    room.stats.steps = 6
    fill(bench, item, everything(), 0)
    bench.wait_for(lambda: room.left == 0 and bench.side.fill.granted_bytes == 0)
    # What P wrote, at its slots: K of all tokens, then V.
    rows = torch.arange(item.length, dtype=torch.int64).to(torch.uint8).view(torch.bfloat16)
    wanted = rows.view(2, LAYERS - DENSE_LAYERS, TOKENS, HEADS, 16)
    there = bench.rank.pool[:, DENSE_LAYERS:, bench.slots]
    assert torch.equal(there.view(torch.uint8), wanted.view(torch.uint8))
    assert (room.stats.bytes_speculative, room.stats.steps_until_local) == (item.length, 6)
    release = Release(ROOM, room.generation, "d", D_END)
    assert step(bench) == [release]
    assert step(bench) == []
    bench.side.on_message(Released(ROOM, room.generation))
    bench.sent.clear()
    bench.release()
    assert bench.freed == [ROOM] and bench.sent == [] and bench.side.quarantined_rooms == 0


def test_a_room_whose_release_is_not_answered_yet_asks_again(bench: Bench) -> None:
    room = decoding(bench)
    bench.side.masks[:, 2, :TOKENS] = LOCAL
    room.left = 0
    release = Release(ROOM, room.generation, "d", D_END)
    assert step(bench) == [release]
    bench.side.on_message(Released(ROOM, room.generation - 1))
    bench.release()
    assert bench.freed == [ROOM] and bench.sent == [(P_END, release)] * 2
    assert bench.side.quarantined_rooms == 1
    bench.side.on_message(Released(ROOM, room.generation))
    bench.tick()
    assert bench.freed == [ROOM] and bench.side.quarantined_rooms == 0


def test_what_the_push_sent_whole_needs_no_fill(bench: Bench) -> None:
    room = decoding(bench, left=0, overrides={"mode": "full"})
    bench.side.masks[:, 2, :TOKENS] = LOCAL
    assert room.stats.steps_until_local == 0
    assert step(bench) == [Release(ROOM, room.generation, "d", D_END)]


def test_p_is_not_let_go_while_something_is_missing(bench: Bench) -> None:
    """A Filled was lost: the last one says that nothing is left, but an entry is not here."""
    room = decoding(bench)
    _, (item,) = granted(bench)
    fill(bench, item, everything()[:-1], 0)
    bench.wait_for(lambda: room.left == 0)
    assert step(bench) == [] == step(bench)
    room.held[-1, :, -1] = LOCAL  # a fetch brought it
    assert step(bench) == [Release(ROOM, room.generation, "d", D_END)]


# The end of a room that is being filled.


def test_what_arrives_after_the_end_is_not_placed_and_rests_until_p_answers(bench: Bench) -> None:
    bench.hello()
    room = decoding(bench)
    _, (item,) = granted(bench)
    before = bench.rank.pool.clone()
    bench.release()
    fill(bench, item, everything()[:20], LEFT - 20 * HEADS)
    other = bench.open(room=8, row=1)
    assert other is not None
    bench.side.on_message(Started(8, other.generation, 1, 1, 1.0, LEFT))
    bench.side.commit(8)
    _, (second,) = granted(bench)
    assert second.arena_offset == item.length  # never the old room's bytes
    fill(bench, second, everything()[:1], LEFT - HEADS)
    state = bench.side.room(8)
    assert state is not None
    bench.wait_for(lambda: state.left == LEFT - HEADS)
    changed = (bench.rank.pool != before).flatten(3).any(-1).nonzero()[:, 1:].unique(dim=0)
    assert changed.tolist() == [[DENSE_LAYERS, int(bench.slots[0])]]
    assert bench.side.fill.granted_bytes == item.length + second.length - TOKEN
    bench.side.on_message(Released(ROOM, room.generation))
    bench.tick()
    assert bench.freed == [ROOM]
    assert bench.side.fill.granted_bytes == second.length - TOKEN


def test_a_reported_failure_ends_the_fill_and_not_the_room(bench: Bench) -> None:
    room = decoding(bench)
    _, (item,) = granted(bench)
    cause = "speculative write failed: link down"
    failed = Filled(ROOM, room.generation, item.arena_offset, 0, b"", b"", LEFT, cause)
    bench.side.on_message(failed)
    fill(bench, item, everything(), 0)  # late and not to be trusted
    other = bench.open(room=8, row=1)
    assert other is not None
    bench.side.on_message(Started(8, other.generation, 1, 1, 1.0, LEFT))
    bench.side.commit(8)
    _, (second,) = granted(bench)
    fill(bench, second, everything(), 0)
    state = bench.side.room(8)
    assert state is not None
    bench.wait_for(lambda: state.left == 0)
    assert (room.left, room.failure) == (LEFT, None)
    assert bench.side.fill.granted_bytes == item.length


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        ([DENSE_LAYERS * TOKENS - 1], "layers [1] are never filled in"),
        ([LAYERS * TOKENS], f"layers [{LAYERS}] are never filled in"),
        ([-1], "negative or out of order"),
        ([-(2**31)], "negative or out of order"),
        ([(DENSE_LAYERS + 1) * TOKENS, DENSE_LAYERS * TOKENS], "negative or out of order"),
        (list(range(DENSE_LAYERS * TOKENS, DENSE_LAYERS * TOKENS + 40)), "do not hold the"),
    ],
)
def test_codes_that_are_not_of_this_prompt_place_nothing(
    bench: Bench, tokens: list[int], part: str
) -> None:
    room = decoding(bench)
    before, held = bench.rank.pool.clone(), room.held.clone()
    packed = np.array(tokens, dtype=np.int64)
    portion = Portion(torch.from_numpy(packed), torch.empty(0, dtype=torch.int64))
    heads = Portion(portion.entries, portion.tokens * HEADS)
    facts = bench.rank.facts
    piece = torch.zeros(10 * TOKEN, dtype=torch.uint8)
    for codes in (portion, heads):
        if codes is heads and len(tokens) > 2:
            continue  # 40 single entries fit where 40 tokens do not
        with pytest.raises(ValueError) as caught:
            room.place(codes, piece, LEFT - 1, facts.keys, facts.values)
        assert part in str(caught.value)
    assert bool((bench.rank.pool == before).all()) and bool((room.held == held).all())
    assert room.left == LEFT
