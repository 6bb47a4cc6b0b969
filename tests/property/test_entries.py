"""Loops over single entries against plain indexing, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from asked_entries import asked
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.transfer.entries import Entries, gather_entries, place_entries, words

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def random(shape: tuple[int, ...], dtype: torch.dtype, made: torch.Generator) -> torch.Tensor:
    size = dtype.itemsize
    whole = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=made)
    return whole.to(torch.uint8).view(dtype)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(DTYPES), st.integers(1, 4), st.sampled_from([1, 3, 8, 64]), st.integers(1, 40),
    st.integers(0, 10**6), st.booleans(),
)  # fmt: skip
def test_what_is_gathered_on_one_side_is_placed_on_the_other(
    dtype: torch.dtype, heads: int, dim: int, tokens: int, seed: int, also_out: bool
) -> None:
    made = torch.Generator().manual_seed(seed)
    kv = random((2, tokens, heads, dim), dtype, made)
    k = 1 + seed % tokens
    position = torch.stack([torch.randperm(tokens, generator=made)[:k] for _ in range(heads)])
    column = torch.stack([torch.randperm(k, generator=made) for _ in range(heads)])
    found = torch.randint(0, k + 1, (heads,), generator=made)
    wanted = asked(heads, {h: position[h, : found[h]].tolist() for h in range(heads)})
    around = random((wanted.count + 2, 2, dim), dtype, made)
    run, canaries = around[1:-1], around[[0, -1]].view(torch.uint8).clone()
    gather_entries(words(kv), wanted.positions, wanted.bounds, words(run))
    assert torch.equal(around[[0, -1]].view(torch.uint8), canaries)

    slots = torch.randperm(2 * tokens, generator=made)[:tokens]
    pool = [random((2 * tokens, heads, dim), dtype, made) for _ in range(2)]
    out = [random((heads, k if also_out else 0, dim), dtype, made) for _ in range(2)]
    held = torch.full((heads, tokens), 2, dtype=torch.int8)
    pool_wanted, out_wanted = ([t.clone() for t in pair] for pair in (pool, out))
    held_wanted = held.clone()
    for h in range(heads):
        for j in range(int(found[h])):
            token = int(position[h, j])
            for side in (0, 1):
                pool_wanted[side][slots[token], h] = kv[side, token, h]
                if also_out:
                    out_wanted[side][h, column[h, j]] = kv[side, token, h]
            held_wanted[h, token] = 1
    place_entries(
        words(run),
        *(t.numpy() for t in (found, position, column, slots)),
        *map(words, pool),
        held.numpy(),
        *map(words, out),
    )
    there, expected = [*pool, *out, held], [*pool_wanted, *out_wanted, held_wanted]
    for mine, plain in zip(there, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), plain.view(torch.uint8))


def test_entries_of_the_wire() -> None:
    wanted = Entries.of([np.array(part, np.int32).tobytes() for part in ([3, 1], [], [9])])
    assert wanted.positions.tolist() == [3, 1, 9] and wanted.bounds.tolist() == [0, 2, 2, 3]
    assert wanted.inside(10) and not wanted.inside(9)
    assert not asked(1, {0: [-1]}).inside(10) and asked(2, {}).inside(0)
    assert Entries.of([]).bounds.tolist() == [0]
    with pytest.raises(ValueError, match="KV head 1 are 3 bytes, no int32 array"):
        Entries.of([b"", b"abc"])
