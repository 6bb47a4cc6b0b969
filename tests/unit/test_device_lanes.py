"""The device's lanes beside the host's, on CPU tensors: same rows, same order, same fetches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_bench import DeviceBench
from lane_bench import ROOM, SPARSE, Bench, asked_positions, smartgen
from msgspec import to_builtins
from small_rank import DIM, HEADS

from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine.lanes import Wanted
from sglang_smartgen.transfer.arena import SLABS


def queries(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(2 * HEADS, DIM).bfloat16() for _ in range(count)]


def host_step(bench: Bench, layer: int, query: torch.Tensor) -> tuple[Wanted, Any, Any]:
    """The same step on the CPU path, its fetches answered."""
    positions = bench.pick(layer, query)
    before = len(bench.asked)
    begun = bench.lanes.prepare(layer, bench.wanted(positions))
    for fetch in bench.asked[before:]:
        bench.answer(fetch)
    (found,) = bench.lanes.finish(begun)
    return found


@pytest.mark.parametrize("mode", ["smartgen", "proactive_only"])
def test_steps_equal_those_of_a_cpu_host(mode: str) -> None:
    """Rows, order, fetches, what is kept and what is counted; three steps, some entries again."""
    here, there = smartgen(mode=mode), DeviceBench(mode=mode)
    here.encode()
    for query in queries(3):
        for layer in SPARSE:
            want, keys, values = host_step(here, layer, query)
            before = len(there.bench.asked)
            begun = there.start(layer, query)
            for fetch in there.bench.asked[before:]:
                there.bench.answer(fetch)
            index, found_keys, found_values = there.lanes.finish(begun)
            absent = torch.zeros_like(want.positions).bool() if want.absent is None else want.absent
            assert torch.equal(index[0], want.positions.masked_fill(absent, -1))
            assert torch.equal(found_keys[0], keys) and torch.equal(found_values[0], values)
    assert [asked_positions(f) for f in there.bench.asked] == [
        asked_positions(f) for f in here.asked
    ]
    assert bool(here.asked) is (mode == "smartgen")
    assert torch.equal(there.bench.room.held, here.room.held)
    assert torch.equal(there.bench.rank.pool.isnan(), here.rank.pool.isnan())
    ours, theirs = (to_builtins(bench.room.stats) for bench in (there.bench, here))
    for name in ("entries_selected", "entries_fetched", "bytes_on_demand", "fetches"):
        assert ours[name] == theirs[name], name
    assert len({there.bench.side.arena.take() for _ in range(SLABS)} - {None}) == SLABS


def test_two_layers_under_way_at_once() -> None:
    there = DeviceBench()
    query = queries(1)[0]
    begun = [there.start(layer, query) for layer in SPARSE]
    for fetch in reversed(there.bench.asked):
        there.bench.answer(fetch)
    for layer, state in zip(SPARSE, begun, strict=True):
        index, keys, values = there.lanes.finish(state)
        head = torch.arange(HEADS)[:, None]
        assert torch.equal(keys[0], there.bench.kept[0, layer, index[0], head])
        assert torch.equal(values[0], there.bench.kept[1, layer, index[0], head])


def test_what_becomes_local_in_between_changes_nothing() -> None:
    there = DeviceBench()
    bench, query = there.bench, queries(1)[0]
    begun = there.start(2, query)
    bench.rank.pool[:, 2, bench.slots] = bench.kept[:, 2]
    bench.room.mask[2] = LOCAL
    bench.answer(bench.asked[0])
    index, keys, _ = there.lanes.finish(begun)
    assert torch.equal(keys[0], bench.kept[0, 2, index[0], torch.arange(HEADS)[:, None]])


def test_a_failed_fetch_leaves_nothing_to_attend_to() -> None:
    there = DeviceBench()
    bench, query = there.bench, queries(1)[0]
    begun = there.start(2, query)
    bench.answer(bench.asked[0], [(ROOM, "gone")])
    index, _, _ = there.lanes.finish(begun)
    assert bool((index == -1).all()) and bench.room.failure is not None
    assert bench.side.arena.quarantined == 1
    assert there.start(3, query).asked is None  # nothing more is asked for it


def test_the_host_reads_the_split_only_behind_its_mark() -> None:
    """Where all is local it waits for nothing, and it joins the gather before the rows are used."""
    there = DeviceBench()
    bench, query = there.bench, queries(1)[0]
    begun = there.start(2, query)
    listed, gathered = there.late.marks
    assert (begun.listed, begun.gathered) == (listed, gathered)
    assert (listed.waits, gathered.waits) == (1, 0)
    bench.answer(bench.asked[0])
    assert there.late.joined == []
    there.lanes.finish(begun)
    assert there.late.joined == [gathered]
    bench.rank.pool[:, 2, bench.slots] = bench.kept[:, 2]
    bench.room.mask[2] = LOCAL
    begun = there.start(2, query)
    assert begun.split is None and [mark.waits for mark in there.late.marks[2:]] == [0, 0]
    index, keys, _ = there.lanes.finish(begun)
    assert torch.equal(keys[0], bench.kept[0, 2, index[0], torch.arange(HEADS)[:, None]])
    assert len(bench.asked) == 1


def test_rooms_of_other_lengths_get_in_a_batch_what_they_get_alone() -> None:
    """A second room of the same bench, shorter, all local: one batch of both."""
    there = DeviceBench()
    bench = there.bench
    short = bench.open_short(40)
    both = [bench.room, short]
    first, second = queries(2)
    pool = bench.rank.pool
    pools = pool[0, 2], pool[1, 2]
    begun = there.lanes.start(2, both, torch.stack((first, second)), pools)
    there.lanes.ask(begun)
    bench.answer(bench.asked[0])
    index, keys, _ = there.lanes.finish(begun)
    alone = there.lanes.start(2, [short], second[None], pools)
    there.lanes.ask(alone)
    index_alone, keys_alone, _ = there.lanes.finish(alone)
    k = index_alone.shape[2]
    assert k < index.shape[2] == bench.room.k
    assert torch.equal(index[1, :, :k], index_alone[0]) and bool((index[1, :, k:] == -1).all())
    assert torch.equal(keys[1, :, :k], keys_alone[0])
    assert torch.equal(index[0], bench.pick(2, first))
    assert torch.equal(keys[0], bench.kept[0, 2, index[0], torch.arange(HEADS)[:, None]])


def test_a_request_without_parallel_lanes_fails_with_a_sentence() -> None:
    there = DeviceBench(parallel_lanes=False)
    begun = there.start(2, queries(1)[0])
    assert begun.asked is None
    assert "has no serial lanes" in (there.bench.room.failure or "")


def test_what_a_request_selects_is_recorded(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SMARTGEN_RECORD_DIR", str(tmp_path))
    there = DeviceBench(record="one")
    query = queries(1)[0]
    there.start(2, query)
    counts = there.bench.room.counts
    assert counts is not None and there.late.marks[0].waits == 1
    wanted = torch.zeros_like(counts[0]).scatter_(
        1, there.bench.pick(2, query), torch.ones_like(counts[0])
    )
    assert torch.equal(counts[0], wanted)
