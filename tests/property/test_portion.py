"""A portion of the residual, gathered on P and placed on D: the same bits at the right slots."""

from __future__ import annotations

import pytest
import torch
from asked_entries import asked
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core import decode_room as core
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.transfer.residual import Portion, Residual
from sglang_smartgen.transfer.store import StoreEntry


def make_entry(g: KVGeometry, tokens: int, seed: int) -> StoreEntry:
    """Any bits, NaN among them."""
    made = torch.Generator().manual_seed(seed)
    shape = (g.layers, 2, tokens, g.kv_heads, g.head_dim * g.dtype.itemsize)
    kv = torch.randint(0, 256, shape, generator=made, dtype=torch.uint8).view(g.dtype)
    residual = Residual(g, tokens)
    for layer in g.dense_layers:
        residual.mark_tokens(layer, torch.arange(tokens))
    metadata = torch.empty((len(g.sparse_layers), tokens, g.kv_heads, 0))
    return StoreEntry(
        1, 1, tokens, kv, metadata, torch.empty((0, tokens)), g.sparse_layers, residual
    )


def make_room(g: KVGeometry, slots: torch.Tensor) -> DecodeRoom:
    mask = torch.full((g.layers, len(slots)), REMOTE, dtype=torch.int8)
    mask[list(g.dense_layers)] = LOCAL
    return DecodeRoom(
        machine=core.DecodeRoom(1, 1, 0.0, core.DecodeLimits(9.0, 9.0, 9.0, 9.0)),
        rid="r",
        row=0,
        slots=slots,
        mask=mask,
        peer=None,
        bootstrap_addr="",
        config=SmartGenConfig(),
        geometry=g,
    )


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    layers = draw(st.integers(3, 6))
    sliding = draw(st.sets(st.integers(2, layers - 1), max_size=layers - 3))
    return KVGeometry(
        layers,
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 4, 16])),
        draw(st.sampled_from([torch.bfloat16, torch.float32])),
        frozenset(sliding),
    )


@settings(deadline=None, max_examples=80)
@given(geometries(), st.integers(1, 20), st.integers(0, 99), st.data())
def test_bits_survive_the_way_from_store_to_pool(
    g: KVGeometry, tokens: int, seed: int, data: st.DataObject
) -> None:
    entry = make_entry(g, tokens, seed)
    made = torch.Generator().manual_seed(seed)
    slots = torch.randperm(3 * tokens, generator=made)[:tokens]
    room = make_room(g, slots)
    pool = torch.zeros((2, g.layers, 3 * tokens, g.kv_heads, g.head_dim), dtype=g.dtype)
    wanted = pool.clone()
    # Some entries come by fetch: they are never in a portion, so the pool keeps its zeros there.
    for layer in g.sparse_layers:
        for head in range(g.kv_heads):
            gone = torch.rand(tokens, generator=made) < 0.3
            fetched = gone.nonzero().flatten().tolist()
            entry.residual.mark_entries(layer, asked(g.kv_heads, {head: fetched}))
            for side in range(2):
                wanted[side, layer, slots[~gone], head] = entry.kv[layer, side, ~gone, head]
    entry.residual.set_order(torch.randperm(g.layers * tokens, generator=made))
    most, sent = data.draw(st.integers(1, 60)), 0
    while (portion := entry.residual.take(most)) is not None:
        size = portion.count(g.kv_heads) * g.entry_bytes
        memory = torch.full((size + 64,), 0xAB, dtype=torch.uint8)
        entry.gather_portion(portion, memory[:size])
        assert bool((memory[size:] == 0xAB).all())
        # What follows in the same range is not the portion's.
        room.place(portion, memory, entry.residual.left, list(pool[0]), list(pool[1]))
        sent += size
    assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
    assert room.stats.bytes_speculative == sent and room.left == 0


@settings(deadline=None, max_examples=30)
@given(geometries(), st.integers(1, 12), st.integers(0, 99), st.integers(1, 40))
def test_what_is_placed_is_local_and_nothing_else(
    g: KVGeometry, tokens: int, seed: int, most: int
) -> None:
    entry, room = make_entry(g, tokens, seed), make_room(g, torch.arange(tokens))
    entry.residual.mark_entries(g.sparse_layers[0], asked(g.kv_heads, {0: [0]}))
    entry.residual.set_order(torch.arange(g.layers * tokens).flip(0))
    pool = torch.zeros((2, g.layers, tokens, g.kv_heads, g.head_dim), dtype=g.dtype)
    portion = entry.residual.take(most)
    if portion is None:
        return
    memory = torch.empty(portion.count(g.kv_heads) * g.entry_bytes, dtype=torch.uint8)
    entry.gather_portion(portion, memory)
    room.stats.steps = 4
    room.place(portion, memory, 5, list(pool[0]), list(pool[1]))
    assert (room.left, room.stats.steps_until_local) == (5, None)
    held = torch.full((g.layers * tokens, g.kv_heads), REMOTE, dtype=torch.int8)
    held[portion.tokens] = LOCAL
    held.view(-1)[portion.entries] = LOCAL
    by_layer = held.view(g.layers, tokens, g.kv_heads).transpose(1, 2)
    assert torch.equal(room.held, by_layer[list(g.sparse_layers)])
    whole = [bool((by_layer[layer] == LOCAL).all()) for layer in g.sparse_layers]
    assert [room.status(layer) is None for layer in g.sparse_layers] == whole
    assert room.all_local is all(whole)
    room.place(Portion(portion.tokens[:0], portion.entries[:0]), memory[:0], 0, list(pool[0]), [])
    assert (room.left, room.stats.steps_until_local) == (0, 4)


def test_a_portion_longer_than_its_bytes_is_refused() -> None:
    g = KVGeometry(3, 2, 4, torch.float32)
    room = make_room(g, torch.arange(5))
    portion = Portion(torch.tensor([10, 11]), torch.empty(0, dtype=torch.int64))
    pool = [torch.zeros(5, 2, 4)] * 3
    with pytest.raises(ValueError, match="64 bytes do not hold the 128 bytes"):
        room.place(portion, torch.zeros(64, dtype=torch.uint8), 0, pool, pool)
    assert not bool((room.held == LOCAL).any())
