"""Two lanes in two phases: what is asked for early is placed late, whatever came in between."""

from __future__ import annotations

import pytest
import torch
from lane_bench import ROOM, SPARSE, asked_positions, smartgen
from small_rank import DIM, HEADS

from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine.lanes import Wanted
from sglang_smartgen.transfer.arena import SLABS
from sglang_smartgen.transfer.remote_lane import Ticket


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


def test_a_fetch_of_which_a_copy_may_land_again_is_used_and_its_slab_rests() -> None:
    bench = smartgen()
    begun = bench.lanes.prepare(3, bench.wanted())
    bench.answer(bench.asked[0], late=True)
    ((_, keys, _),) = bench.lanes.finish(begun)
    assert torch.equal(keys, bench.expected(3, 0))
    assert bench.room.failure is None and bench.side.arena.quarantined == 1
    bench.side.arena.settled(bench.room.room, bench.room.generation)
    assert bench.side.arena.quarantined == 0


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
