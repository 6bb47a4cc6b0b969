"""Blocks cover a prompt once and evenly; K_r stays between the dense layers and everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_smartgen.core import block_bounds, clip_proactive_blocks

prompts = st.integers(0, 5000)
counts = st.integers(1, 1500)


@given(prompts, counts)
def test_bounds_cover_the_prompt_evenly(prompt_len: int, blocks: int) -> None:
    bounds = block_bounds(prompt_len, blocks)
    assert bounds[0] == 0 and bounds[-1] == prompt_len
    assert len(bounds) == min(blocks, prompt_len) + 1
    sizes = [b - a for a, b in pairwise(bounds)]
    assert all(size >= 1 for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.integers(-10, 10**6), st.integers(1, 100), counts)
def test_clip_keeps_k_r_between_two_layers_and_all(k_r: int, layers: int, blocks: int) -> None:
    clipped = clip_proactive_blocks(k_r, layers, blocks)
    low, high = min(2, layers) * blocks, layers * blocks
    assert low <= clipped <= high
    assert clipped == k_r or (clipped == low and k_r < low) or (clipped == high and k_r > high)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="blocks is 0; it must be at least 1"):
        block_bounds(5, 0)
    with pytest.raises(ValueError, match="prompt_len is -1"):
        block_bounds(-1, 4)
    with pytest.raises(ValueError, match="layers is 0; it must be at least 1"):
        clip_proactive_blocks(5, 0, 4)
    # Two of six layers attend to a window: four are dense.
    assert clip_proactive_blocks(0, 6, 10, dense_layers=4) == 40
