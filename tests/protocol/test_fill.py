"""Speculative fill end to end on fake transports: what is granted lands, and only there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from fill_bench import (
    CANARY,
    CAPACITY,
    CHUNK,
    D_END,
    DIM,
    ENTRY,
    HEADS,
    LAYERS,
    MISSING,
    P_END,
    PATIENCE_S,
    SLICE,
    TOKEN,
    TOKENS,
    Bench,
    codes_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.transfer import filler as filler_module
from sglang_smartgen.transfer.fake import Fault, FaultKind
from sglang_smartgen.transfer.fill_lane import Credit, FillLane
from sglang_smartgen.transfer.messages import (
    Endpoint,
    FetchDone,
    Filled,
    Grant,
    GrantItem,
    Message,
    Released,
)


@pytest.fixture(scope="module", autouse=True)
def small_slices() -> Iterator[None]:
    """Slices of 4 tokens and chunks of up to 16, so that small rooms take several of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filler_module, "SLICE_BYTES", (SLICE, SLICE))
        patch.setattr(filler_module, "CHUNK_BYTES", (SLICE, CHUNK))
        yield


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Bench]:
    made = Bench(rooms=(11, 12))
    yield made
    made.close()


# The good end.


@settings(deadline=None, max_examples=25)
@given(
    order=st.permutations(range(LAYERS * TOKENS)),
    amount=st.integers(1, 60).map(lambda tokens: tokens * TOKEN),
    paced=st.booleans(),
)
def test_everything_lands_once_and_only_where_it_was_granted(
    order: list[int], amount: int, paced: bool
) -> None:
    bench = Bench(order=torch.tensor(order))
    steps = 0
    while bench.rooms[11].left:
        bench.credit(amount, paced=paced)
        steps += 1
        bench.wait_for(lambda: bench.lane.granted_bytes == 0)
        assert len(bench.grants) == steps
    assert bench.wrong() == []
    assert bench.has_its_bytes(11) and bench.rooms[11].all_local
    assert bench.server.filler.bytes_speculative == MISSING * ENTRY
    assert sum(len(wanted) for wanted in bench.p.filled) == MISSING * ENTRY
    assert steps == -(-MISSING * ENTRY // amount)
    assert bool((bench.lane.memory.bytes[amount:] == CANARY).all())
    assert max(len(wanted) for wanted in bench.p.filled) <= SLICE
    bench.close()


@settings(deadline=None, max_examples=15)
@given(
    fetches=st.lists(
        st.tuples(
            st.integers(DENSE_LAYERS, LAYERS - 1),
            st.lists(st.integers(0, TOKENS - 1), max_size=12, unique=True),
            st.lists(st.integers(0, TOKENS - 1), max_size=12, unique=True),
        ),
        max_size=5,
    ),
    amount=st.integers(1, 40).map(lambda tokens: tokens * TOKEN),
)
def test_what_was_fetched_is_not_sent_again(
    fetches: list[tuple[int, list[int], list[int]]], amount: int
) -> None:
    bench = Bench()
    fetched: set[int] = set()
    for layer, *heads in fetches:
        before = {code for message in bench.messages for code in codes_of(message)}
        bench.fetch(layer, *heads)
        bench.reply(FetchDone)
        for head, positions in enumerate(heads):
            fetched |= {(layer * TOKENS + token) * HEADS + head for token in positions} - before
        bench.credit(amount)
        bench.wait_for(lambda: bench.lane.granted_bytes == 0)
    bench.fill_all(amount)
    sent = [code for message in bench.messages for code in codes_of(message)]
    assert len(sent) == len(set(sent)) and not fetched & set(sent)
    assert len(sent) + len(fetched) == MISSING
    assert bench.server.filler.bytes_speculative == len(sent) * ENTRY
    assert bench.wrong() == []
    bench.close()


def test_rooms_take_turns_and_one_message_carries_their_credits(two: Bench) -> None:
    two.credit(2 * CHUNK, 11, 12)
    (grant,) = two.grants
    assert [item.room for item in grant.items] == [11, 12]
    two.wait_for(lambda: two.lane.granted_bytes == 0)
    assert [message.room for message in two.messages] == [11, 12, 11, 12]
    two.fill_all(CAPACITY // 2, 11)
    two.fill_all(CAPACITY // 2, 12)
    assert two.has_its_bytes(11) and two.has_its_bytes(12) and two.wrong() == []


def test_fetches_that_took_the_rest_end_the_room_too(bench: Bench) -> None:
    everyone = list(range(TOKENS))
    for layer in range(DENSE_LAYERS, LAYERS):
        for head in range(HEADS):
            bench.fetch(layer, *[everyone if h == head else [] for h in range(HEADS)])
            assert bench.reply(FetchDone) == FetchDone(1, [])
    bench.credit(CHUNK)
    filled = bench.reply()
    assert filled == Filled(11, 1, 0, 0, b"", b"", 0)
    bench.wait_for(lambda: bench.rooms[11].left == 0)
    bench.wait_for(lambda: bench.lane.granted_bytes == 0)
    assert bench.p.filled == []


# Credits.


def test_a_room_is_topped_up_only_when_it_is_worth_a_message(bench: Bench) -> None:
    bench.p.hold()
    for _ in range(3):
        bench.credit(CHUNK)
    assert len(bench.grants) == 1 and bench.lane.granted_bytes == CHUNK
    bench.p.release()
    bench.wait_for(lambda: bench.lane.granted_bytes == 0)
    bench.credit(CHUNK)
    assert len(bench.grants) == 2


def test_a_full_arena_grants_nothing_more_and_other_rooms_wait(two: Bench) -> None:
    two.p.hold()
    two.credit(CAPACITY - TOKEN, 11)
    two.credit(2 * TOKEN, 12)
    assert len(two.grants) == 1
    two.p.release()
    two.fill_all(2 * TOKEN, 12)
    assert two.has_its_bytes(12)


def test_a_grant_that_cannot_be_sent_rests_with_its_room() -> None:
    def no_route(endpoint: Endpoint, message: Message) -> None:
        raise OSError("no route")

    lane = FillLane("d", D_END, no_route, lambda *_: None, CAPACITY)
    lane.grant([Credit(11, 1, P_END, True, CHUNK)])
    assert lane.granted_bytes == CHUNK
    lane.settled(11, 1)
    assert lane.granted_bytes == 0


@pytest.mark.parametrize("item", [(-TOKEN, TOKEN), (CAPACITY - TOKEN, 2 * TOKEN), (0, 0), (0, -1)])
def test_a_grant_outside_the_arena_is_ignored(bench: Bench, item: tuple[int, int]) -> None:
    bench.server.submit(Grant("d", D_END, False, [GrantItem(11, 1, *item)]))
    bench.server.submit(Grant("stranger", D_END, False, [GrantItem(11, 1, 0, TOKEN)]))
    bench.server.submit(Grant("d", D_END, False, [GrantItem(99, 1, 0, TOKEN)]))
    bench.server.submit(Grant("d", D_END, False, [GrantItem(11, 2, 0, TOKEN)]))
    bench.settled_down()
    bench.fill_all(CHUNK)
    assert len(bench.p.filled) == MISSING * ENTRY // SLICE and bench.wrong() == []


def test_a_grant_that_holds_no_token_loses_nothing(bench: Bench) -> None:
    bench.server.submit(Grant("d", D_END, False, [GrantItem(11, 1, 0, ENTRY)]))
    bench.settled_down()
    assert bench.p.filled == []
    bench.fill_all(CHUNK)
    assert bench.has_its_bytes(11)


# On-demand goes first.


def test_a_fetch_waits_for_one_slice_at_most(bench: Bench) -> None:
    bench.p.hold()
    bench.credit(CHUNK)
    bench.wait_for(lambda: len(bench.p.log) == 1)
    bench.fetch(2, [39], [38])
    bench.p.release()
    bench.wait_for(lambda: bench.lane.granted_bytes == 0)
    wanted = [span.destination in bench.p.fill for _, (span,) in bench.p.log]
    assert wanted == [True, False, True, True, True]
    rows = bench.arena.tensor(0, (2, 2, DIM), torch.float32)
    both = [bench.kv[11][2, :, token, head] for head, token in enumerate((39, 38))]
    assert torch.equal(rows, torch.stack(both))


def test_a_push_goes_first(bench: Bench) -> None:
    bench.busy = True
    bench.credit(CHUNK)
    time.sleep(10 * filler_module.SLICE_S)
    bench.settled_down()  # a fetch does not wait for it
    assert bench.p.filled == []
    bench.busy = False
    bench.fill_all(CHUNK)
    assert bench.has_its_bytes(11)


# The end of a room.


def test_a_release_in_mid_fill_stops_it_and_is_answered_after_the_slice(bench: Bench) -> None:
    bench.p.hold()
    bench.credit(CHUNK)
    bench.wait_for(lambda: len(bench.p.log) == 1)
    bench.release()
    bench.credit(CHUNK)  # not sent: nothing is due
    bench.to_prefill(P_END, Grant("d", D_END, False, [GrantItem(11, 1, CHUNK, CHUNK)]))
    time.sleep(0.02)
    assert bench.replies.empty()
    bench.p.release()
    assert bench.reply(Released) == Released(11, 1)
    bench.settled_down()
    assert len(bench.p.filled) == 1 and bench.messages == []
    assert bench.p.pending("d") == 0 and bench.store.used_bytes == 0
    assert bench.lane.granted_bytes == CHUNK
    bench.lane.settled(11, 1)
    assert bench.lane.granted_bytes == 0


def test_what_is_queued_when_a_room_ends_is_not_placed(two: Bench) -> None:
    two.delivering = False
    two.credit(CHUNK, 11, 12)
    two.wait_for(lambda: len(two.messages) == 2)
    two.lane.stop(11, 1)
    for message in two.messages:
        two.deliver(message)
    assert two.placed.acquire(timeout=PATIENCE_S)
    two.wait_for(lambda: two.lane.granted_bytes == CHUNK)
    assert not bool((two.rooms[11].held == LOCAL).any()) and two.rooms[11].left == MISSING
    assert int((two.rooms[12].held == LOCAL).sum()) == CHUNK // ENTRY
    assert not bool(two.pool[:, :, two.rooms[11].slots].any())
    two.lane.settled(11, 1)
    assert two.lane.granted_bytes == 0
    two.delivering = True
    two.deliver(two.messages[0])  # later still: the range may have a new owner
    two.fill_all(CHUNK, 12)
    assert not bool(two.pool[:, :, two.rooms[11].slots].any())


@pytest.mark.parametrize("shift", [(TOKEN, 0), (0, TOKEN), (0, -2 * CHUNK), (CAPACITY, 0)])
def test_filled_for_bytes_that_were_not_granted_is_refused_and_ends_the_fill(
    two: Bench, shift: tuple[int, int]
) -> None:
    two.delivering = False
    two.credit(CHUNK, 11, 12)
    two.wait_for(lambda: len(two.messages) == 2)
    first, other = two.messages
    offset, length = first.arena_offset + shift[0], first.length + shift[1]
    two.deliver(Filled(11, 1, offset, length, first.tokens, first.entries, 0))
    two.deliver(first)  # it might be the end of a residual of which a part is lost
    two.deliver(other)
    assert two.placed.acquire(timeout=PATIENCE_S)
    two.wait_for(lambda: two.lane.granted_bytes == CHUNK)
    assert not bool((two.rooms[11].held == LOCAL).any()) and two.rooms[11].left == MISSING
    two.lane.grant([Credit(11, 1, P_END, False, CAPACITY // 2)])
    assert two.lane.granted_bytes == CHUNK
    two.lane.settled(11, 1)
    assert two.lane.granted_bytes == 0


def test_filled_that_cannot_be_placed_keeps_its_range(two: Bench) -> None:
    two.delivering = False
    two.credit(CHUNK, 11, 12)
    two.wait_for(lambda: len(two.messages) == 2)
    first, other = two.messages
    broken = (LAYERS * TOKENS).to_bytes(4, "little")
    two.deliver(Filled(11, 1, first.arena_offset, first.length, broken, b"", 0))
    two.deliver(other)
    assert two.placed.acquire(timeout=PATIENCE_S)
    two.wait_for(lambda: two.lane.granted_bytes == CHUNK)
    assert two.rooms[11].left == MISSING
    two.lane.settled(11, 1)
    assert two.lane.granted_bytes == 0


# Failures.

FAULTS = [
    Fault(FaultKind.FAIL),
    Fault(FaultKind.PARTIAL, spans=1),
    Fault(FaultKind.LATE, delay_s=5.0, spans=0),
    Fault(FaultKind.NEVER),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.value)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_slice_ends_the_rooms_fill_and_nothing_else(fault: Fault, nth: int) -> None:
    never = fault.kind is FaultKind.NEVER
    bench = Bench(rooms=(11, 12), timeout_s=0.05 if never else PATIENCE_S)
    bench.p.script("d", nth, fault)
    bench.credit(CHUNK)
    failed = bench.reply()
    assert isinstance(failed, Filled)
    assert failed.failure is not None and failed.failure.startswith("speculative write failed: ")
    assert ("0.05 s" if never else "scripted failure") in failed.failure
    assert (failed.length, failed.tokens, failed.entries) == (0, b"", b"")
    assert bench.doubted == {(11, 1)}
    (retired,) = bench.server.retired("d")
    # The other room goes on, in other bytes; the failed one gets no more, whatever is granted.
    bench.fill_all(CHUNK, 12)
    bench.credit(CAPACITY // 2)
    bench.to_prefill(P_END, Grant("d", D_END, False, [GrantItem(11, 1, CAPACITY - CHUNK, CHUNK)]))
    bench.settled_down()
    assert all(wanted.stop <= CAPACITY - CHUNK for wanted in bench.p.filled)
    assert bench.has_its_bytes(12) and bench.wrong() == []
    bench.wait_for(lambda: bench.lane.granted_bytes == CHUNK)
    assert bench.rooms[11].left == MISSING
    assert not bool((bench.rooms[11].held == LOCAL).any())
    bench.network.advance(10.0)  # late bytes reach the failed room's range only
    if fault.kind is FaultKind.LATE:
        at = (nth - 1) * SLICE
        late = retired.bytes[at : at + SLICE]
        assert torch.equal(bench.lane.memory.bytes[at : at + SLICE], late)
    assert bench.has_its_bytes(12)
    bench.server.fenced("d", [retired])
    assert bench.server.retired("d") == []
    bench.lane.settled(11, 1)
    assert bench.lane.granted_bytes == 0
    # On demand the room still gets everything.
    bench.fetch(2, [0], [1])
    assert bench.reply(FetchDone) == FetchDone(1, [])
    bench.close()


def test_a_transport_that_raises_fails_the_room_once(bench: Bench) -> None:
    bench.p.alive = False  # write raises TransportError
    bench.credit(CHUNK)
    failed = bench.reply()
    assert isinstance(failed, Filled) and failed.failure is not None
    assert "closed" in failed.failure
    bench.release()
    assert bench.reply(Released) == Released(11, 1)
    assert len(bench.messages) == 1


def test_a_restarted_decode_node_gets_nothing_of_old_grants(bench: Bench) -> None:
    bench.p.hold()
    bench.credit(CHUNK)
    bench.wait_for(lambda: len(bench.p.log) == 1)
    bench.peer = bench.peer_of_epoch(2)
    bench.p.release()
    bench.settled_down()
    bench.settled_down()
    assert len(bench.p.filled) == 1 and bench.messages == []


def test_an_entry_that_is_gone_ends_the_fill(bench: Bench) -> None:
    bench.busy = True
    bench.credit(CHUNK)
    bench.settled_down()
    bench.store.drop(11, 1)
    bench.busy = False
    bench.wait_for(lambda: bench.server.filler.wait_s() is None)
    assert bench.p.filled == [] and bench.store.used_bytes == 0
