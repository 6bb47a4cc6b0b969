"""The prefill store: ranges never overlap, and a prompt in pieces equals the prompt in one."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from asked_entries import asked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_smartgen.core.geometry import DENSE_LAYERS, KVGeometry
from sglang_smartgen.core.ranges import RangeAllocator
from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.registry import make_selector
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry

CAPACITY, ALIGNMENT = 1000, 16  # the last 8 bytes can never be handed out
USABLE = CAPACITY // ALIGNMENT * ALIGNMENT


class RangeMachine(RuleBasedStateMachine):
    """RangeAllocator against a plain list of what is out."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = RangeAllocator(CAPACITY, ALIGNMENT)
        self.out: list[tuple[int, int]] = []

    def padded(self) -> list[tuple[int, int]]:
        return sorted((s, s + -(-n // ALIGNMENT) * ALIGNMENT) for s, n in self.out)

    def largest_gap(self) -> int:
        edges = [0, *(edge for pair in self.padded() for edge in pair), CAPACITY]
        return max(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True))

    @rule(length=st.integers(1, 300) | st.integers(1, CAPACITY + 1))
    def allocate(self, length: int) -> None:
        fits = self.largest_gap() >= -(-length // ALIGNMENT) * ALIGNMENT
        start = self.ranges.allocate(length)
        # Freed neighbours have merged, or a gap of the model would be refused.
        assert (start is not None) == fits
        if start is not None:
            self.out.append((start, length))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start, length = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.ranges.free(start, length)

    @rule(start=st.integers(0, USABLE // ALIGNMENT - 1), length=st.integers(1, 200))
    def free_what_is_not_out(self, start: int, length: int) -> None:
        first, stop = start * ALIGNMENT, start * ALIGNMENT + -(-length // ALIGNMENT) * ALIGNMENT
        covered = sum(max(0, min(b, stop) - max(a, first)) for a, b in self.padded())
        if stop <= CAPACITY and covered < stop - first:
            with pytest.raises(ValueError, match="already free"):
                self.ranges.free(first, length)

    @invariant()
    def nothing_overlaps_and_used_is_what_is_out(self) -> None:
        pairs = self.padded()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(pairs))
        assert all(s % ALIGNMENT == 0 and s >= 0 and stop <= CAPACITY for s, stop in pairs)
        assert self.ranges.used == sum(stop - start for start, stop in pairs)

    def teardown(self) -> None:
        for start, length in self.out:
            self.ranges.free(start, length)
        assert self.ranges.used == 0
        assert self.ranges.allocate(USABLE) == 0


RangeMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
TestRangeAllocator = RangeMachine.TestCase


@pytest.mark.parametrize("length", [0, -1])
def test_an_empty_range_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length is {length}"):
        RangeAllocator(64).allocate(length)


LAYERS, HEADS, DIM, SLOTS, LONGEST = 4, 2, 16, 300, 170


@functools.cache
def selector(name: str) -> Selector:
    shape = KVShape(LAYERS, 2 * HEADS, HEADS, DIM, DIM**-0.5)
    return make_selector(name, shape, torch.bfloat16)


@functools.cache
def pools() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pools, bfloat16 [layers, slots, heads, dim]."""
    made = torch.Generator().manual_seed(3)
    both = torch.randn((2, LAYERS, SLOTS, HEADS, DIM), generator=made).to(torch.bfloat16)
    return both[0], both[1]


GEOMETRY = KVGeometry(LAYERS, HEADS, DIM, torch.bfloat16)


def new_store(name: str = "exact", budget: int = 1 << 20) -> PrefillStore:
    return PrefillStore(GEOMETRY, selector(name), budget)


def opened(store: PrefillStore, room: int = 1, tokens: int = 10) -> StoreEntry:
    entry = store.open(room, 1, tokens)
    assert entry is not None
    return entry


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ["hata", "exact"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_pieces_equal_the_whole(name: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, LONGEST), label="tokens")
    # The first stop is what a radix hit and the first chunk bring together.
    inner = data.draw(st.sets(st.integers(1, tokens), max_size=4), label="stops")
    stops = sorted(inner | {tokens})
    encode_at = data.draw(st.sets(st.sampled_from(stops)), label="encode at") | {tokens}
    order = torch.randperm(
        SLOTS, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    slots = order[:tokens]
    keys, values = pools()
    chosen, entry = selector(name), opened(new_store(name), tokens=tokens)
    ranges: list[tuple[int, int]] = []
    for stop in stops:
        for layer in range(LAYERS):
            piece = slots[:stop]
            assert entry.capture(layer, piece, keys[layer], values[layer], stop)
            assert not entry.capture(layer, piece, keys[layer], values[layer], stop)
            if stop in encode_at:
                first, last = entry.encode(layer, chosen)
                if layer == LAYERS - 1 and first < last:
                    ranges.append((first, last))
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == tokens
    for layer in range(LAYERS):
        whole = keys[layer][slots]
        assert same_bits(entry.kv[layer, 0], whole)
        assert same_bits(entry.kv[layer, 1], values[layer][slots])
        if layer >= DENSE_LAYERS:
            anchor = whole[: min(chosen.anchor_tokens, tokens)] if chosen.anchor_tokens else None
            assert same_bits(
                entry.metadata[layer - DENSE_LAYERS], chosen.encode(layer, whole, anchor)
            )


def test_the_metadata_waits_until_its_anchor_is_there() -> None:
    keys, values = pools()
    entry = opened(new_store("hata"), tokens=LONGEST)
    slots = torch.arange(LONGEST)
    entry.capture(2, slots, keys[2], values[2], 100)
    first, last = entry.encode(2, selector("hata"))
    assert first == last
    entry.capture(2, slots, keys[2], values[2], 150)
    assert entry.encode(2, selector("hata")) == (0, 150)
    assert entry.encode(1, selector("hata")) == (0, 0)  # a dense layer has no metadata


def test_a_full_budget_gives_none_until_an_entry_is_dropped() -> None:
    store = new_store()
    store = new_store(budget=2 * store.entry_bytes(16))
    assert opened(store, 1, 16) is not None and opened(store, 2, 16) is not None
    assert store.open(3, 1, 1) is None
    assert store.open(3, 1, 10**6) is None
    assert store.rooms == 2
    store.drop(1, 1)
    assert store.open(3, 1, 16) is not None
    assert store.open(3, 1, 16) is None  # the same room and generation again


def test_entries_do_not_share_bytes() -> None:
    store = new_store("hata")
    first, second = opened(store, 1, 7), opened(store, 2, 9)
    first.kv.fill_(1), first.metadata.fill_(1)
    second.kv.fill_(2), second.metadata.fill_(2)
    assert bool((first.kv == 1).all()) and bool((first.metadata == 1).all())
    region = store.region
    for entry in (first, second):
        for part in (entry.kv, entry.metadata):
            assert region.address <= part.data_ptr()
            assert part.data_ptr() + part.nbytes <= region.address + region.length


def test_dropped_while_read_is_freed_by_the_last_reader() -> None:
    store = new_store()
    entry = opened(store)
    used = store.used_bytes
    assert used >= store.entry_bytes(10)
    assert store.acquire(1, 1) is entry and store.acquire(1, 1) is entry
    store.drop(1, 1)
    assert store.acquire(1, 1) is None
    store.release(entry)
    assert (store.used_bytes, store.rooms) == (used, 1)
    store.release(entry)
    assert (store.used_bytes, store.rooms) == (0, 0)


def test_an_unknown_drop_changes_nothing() -> None:
    store = new_store()
    entry = opened(store)
    used = store.used_bytes
    store.drop(1, 2)
    store.drop(9, 1)
    assert (store.used_bytes, store.acquire(1, 1)) == (used, entry)
    assert store.acquire(1, 2) is None and store.acquire(9, 1) is None
    store.release(entry)
    store.drop(1, 1)
    store.drop(1, 1)
    assert store.used_bytes == 0


def test_an_entry_may_be_opened_for_its_users() -> None:
    """A drop right behind `open`, from another thread, must not free what the users will let go."""
    store = new_store()
    entry = store.open(1, 1, 10, users=2)
    assert entry is not None
    used = store.used_bytes
    store.drop(1, 1)
    store.release(entry)
    assert (store.used_bytes, store.rooms) == (used, 1)
    store.release(entry)
    assert (store.used_bytes, store.rooms) == (0, 0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 49), max_size=12), st.integers(0, LAYERS - 1), st.booleans())
def test_gather_returns_the_asked_rows_in_order(tokens: list[int], layer: int, upper: bool) -> None:
    keys, values = pools()
    entry = opened(new_store(), tokens=50)
    slots = torch.arange(100, 150).flip(0)
    entry.capture(layer, slots, keys[layer], values[layer], 50)
    out = torch.full((len(tokens), 2, DIM), -7, dtype=torch.bfloat16)
    positions = torch.tensor(tokens, dtype=torch.int64)
    entry.gather(layer, asked(HEADS, {int(upper): tokens}), out)
    assert same_bits(out[:, 0], keys[layer][slots[positions], int(upper)])
    assert same_bits(out[:, 1], values[layer][slots[positions], int(upper)])
