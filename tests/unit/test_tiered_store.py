"""A store entry that borrows its first tokens' KV reads as one that copied them, in fewer bytes."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
import torch
from asked_entries import asked
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rank import DIM, HEADS, LAYERS, hata

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.tiered_store import Pages, TieredStore

GEOMETRY = KVGeometry(LAYERS, HEADS, DIM, torch.bfloat16)
PAGES, LONGEST, BUDGET = 250, 170, 1 << 20
LAYOUTS = ("layer_first", "page_first")


@functools.cache
def prompt() -> torch.Tensor:
    """KV of the longest prompt, [2, layers, tokens, heads, dim]."""
    made = torch.Generator().manual_seed(5)
    return torch.randn((2, LAYERS, LONGEST, HEADS, DIM), generator=made).to(torch.bfloat16)


def pages_of(count: int, layout: str, seed: int) -> Pages:
    """Pages in random order that hold the first tokens of the prompt, among rubbish."""
    if layout == "layer_first":
        memory = torch.full((2, LAYERS, PAGES, HEADS, DIM), 7.0).to(torch.bfloat16)
    else:
        memory = torch.full((2, PAGES, LAYERS, HEADS, DIM), 7.0).to(torch.bfloat16).transpose(1, 2)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))[:count]
    slots = order.sort().values if seed % 2 else order  # with and without neighbours
    memory[:, :, slots] = prompt()[:, :, :count]
    return Pages(memory, slots, lambda: None)


def filled(store: PrefillStore, tokens: int, pages: Pages | None = None) -> StoreEntry:
    entry = store.open(1, 1, tokens)
    assert entry is not None
    if pages is not None:
        assert isinstance(store, TieredStore)
        store.borrow(entry, pages)
    for stop in (tokens // 2, tokens):
        for layer in range(LAYERS):
            entry.capture(layer, torch.arange(tokens), *prompt()[:, layer], stop)
            entry.encode(layer, hata())
    return entry


def landed(entry: StoreEntry, layer: int, tokens: np.ndarray, slots: np.ndarray) -> torch.Tensor:
    """K and V [2, slots, heads, dim] of D after the entry's spans were written there."""
    there = torch.zeros((2, LONGEST, HEADS, DIM), dtype=torch.bfloat16)
    for side in (0, 1):
        at = there[side].data_ptr()
        for span in entry.spans(layer, side, GEOMETRY.row_bytes, at, tokens, slots):
            ctypes.memmove(span.destination, span.source, span.length)
    return there


@given(
    tokens=st.integers(2, LONGEST),
    share=st.floats(0, 1),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_it_reads_as_a_copy_does(tokens: int, share: float, layout: str, seed: int) -> None:
    count = min(tokens - 1, max(1, int(share * tokens)))
    plain = filled(PrefillStore(GEOMETRY, hata(), BUDGET), tokens)
    lent = filled(TieredStore(GEOMETRY, hata(), BUDGET), tokens, pages_of(count, layout, seed))
    made = torch.Generator().manual_seed(seed)
    assert plain.checksums() == lent.checksums()
    assert torch.equal(plain.metadata, lent.metadata)
    some = torch.randperm(tokens, generator=made)[: 1 + seed % tokens]
    ascending = some.sort().values.numpy()
    slots = torch.randperm(LONGEST, generator=made)[: len(ascending)].numpy()
    if seed % 3 == 0:
        slots = np.sort(slots)
    for layer in range(LAYERS):
        for side in (0, 1):
            for start, stop in ((0, tokens), (0, count), (count, tokens), (count // 2, tokens)):
                rows = [e.rows(layer, side, start, stop) for e in (plain, lent)]
                assert torch.equal(*rows)
        assert torch.equal(*(landed(e, layer, ascending, slots) for e in (plain, lent)))
        wanted = asked(HEADS, {0: some.tolist(), 1: some[: len(some) // 2].tolist()})
        outs = [torch.zeros((wanted.count, 2, DIM), dtype=torch.bfloat16) for _ in range(2)]
        plain.gather(layer, wanted, outs[0])
        lent.gather(layer, wanted, outs[1])
        assert torch.equal(*outs)
    codes = torch.randperm(LAYERS * tokens, generator=made)
    whole, half = codes[: len(codes) // 3].sort().values, codes[len(codes) // 3 :].sort().values
    portion = Portion(whole, half * HEADS + torch.randint(HEADS, half.shape, generator=made))
    size = portion.count(HEADS) * GEOMETRY.entry_bytes
    bytes_ = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    plain.gather_portion(portion, bytes_[0])
    lent.gather_portion(portion, bytes_[1])
    assert torch.equal(*bytes_)


def test_only_its_own_bytes_count() -> None:
    plain = PrefillStore(GEOMETRY, hata(), BUDGET)
    size = plain.entry_bytes(100)
    store = TieredStore(GEOMETRY, hata(), size + 64)
    entry = store.open(1, 1, 100)
    assert entry is not None
    assert store.open(2, 1, 60) is None
    store.borrow(entry, pages_of(80, "layer_first", 1))
    own = size - 80 * GEOMETRY.token_bytes
    assert own <= store.used_bytes < own + 64  # ranges are whole lines
    assert store.borrowed_tokens == 80
    other = store.open(2, 1, 60)  # in what was given back
    assert other is not None
    other.kv.fill_(9.0)
    other.mask.fill_(9)
    assert int((entry.mask == 9).sum()) == 0


@pytest.mark.parametrize("dropped_first", [True, False])
def test_pages_are_given_back_once_when_the_last_reader_lets_go(dropped_first: bool) -> None:
    store = TieredStore(GEOMETRY, hata(), BUDGET)
    entry = store.open(1, 1, 100, users=1)
    assert entry is not None
    given: list[int] = []
    pages = pages_of(40, "layer_first", 1)
    pages.give_back = lambda: given.append(1)
    store.borrow(entry, pages)
    if dropped_first:
        store.drop(1, 1)
        assert not given
        store.release(entry)
    else:
        store.release(entry)
        assert not given
        store.drop(1, 1)
    assert (given, store.used_bytes, store.borrowed_tokens) == ([1], 0, 0)


def test_an_entry_that_borrows_nothing_is_a_plain_one() -> None:
    store = TieredStore(GEOMETRY, hata(), BUDGET)
    plain = PrefillStore(GEOMETRY, hata(), BUDGET)
    assert filled(store, 90).checksums() == filled(plain, 90).checksums()
    assert store.used_bytes == plain.used_bytes
    store.drop(1, 1)
    assert store.used_bytes == 0
