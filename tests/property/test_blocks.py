"""Blocks cover a prompt once; the push plan holds whole dense layers and K_r blocks in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_smartgen.core import PushPlan, block_bounds, clip_proactive_blocks

prompts = st.integers(0, 5000)
counts = st.integers(1, 1500)
plans = st.fixed_dictionaries(
    {
        "prompt_len": st.integers(0, 300),
        "layers": st.integers(1, 6),
        "blocks": st.integers(1, 64),
        "proactive_blocks": st.integers(0, 500),
        "dense_layers": st.integers(0, 3),
    }
)


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


def _pushed(plan: PushPlan, layer: int) -> list[int]:
    return [t for start, stop in plan.ranges(layer) for t in range(start, stop)]


@given(plans)
def test_sequential_plan_is_the_dense_layers_and_the_first_blocks(case: dict[str, int]) -> None:
    plan = PushPlan.sequential(**case)
    bounds = block_bounds(case["prompt_len"], case["blocks"])
    order = [(layer, m) for layer in range(case["layers"]) for m in range(len(bounds) - 1)]
    chosen = set(order[: case["proactive_blocks"]])
    chosen |= {(layer, m) for layer, m in order if layer < case["dense_layers"]}
    for layer in range(case["layers"]):
        wanted = [
            t
            for m in range(len(bounds) - 1)
            if (layer, m) in chosen
            for t in range(bounds[m], bounds[m + 1])
        ]
        assert _pushed(plan, layer) == wanted
    assert plan.tokens() == sum(len(_pushed(plan, layer)) for layer in range(case["layers"]))


@given(plans, st.data())
def test_any_choice_of_blocks_is_planned_and_merged(
    case: dict[str, int], data: st.DataObject
) -> None:
    layers, blocks, prompt_len = case["layers"], case["blocks"], case["prompt_len"]
    bounds = block_bounds(prompt_len, blocks)
    every = [(layer, m) for layer in range(layers) for m in range(len(bounds) - 1)]
    chosen = data.draw(st.lists(st.sampled_from(every))) if every else []
    plan = PushPlan.from_blocks(
        prompt_len=prompt_len, layers=layers, blocks=blocks, chosen=reversed(chosen)
    )
    for layer in range(layers):
        members = sorted({m for at, m in chosen if at == layer})
        assert _pushed(plan, layer) == [t for m in members for t in range(bounds[m], bounds[m + 1])]
        ranges = plan.ranges(layer)
        assert all(a[1] < b[0] for a, b in pairwise(ranges))


@given(plans, st.lists(st.integers(1, 80), max_size=8))
def test_chunks_push_the_plan_once(case: dict[str, int], chunks: list[int]) -> None:
    plan = PushPlan.sequential(**case)
    edges = [0]
    for size in chunks:
        edges.append(min(case["prompt_len"], edges[-1] + size))
    edges.append(case["prompt_len"])
    for layer in range(case["layers"]):
        pieces = [
            t
            for start, stop in pairwise(edges)
            for a, b in plan.ranges_within(layer, start, stop)
            for t in range(a, b)
        ]
        assert pieces == _pushed(plan, layer)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="blocks is 0; it must be at least 1"):
        block_bounds(5, 0)
    with pytest.raises(ValueError, match="prompt_len is -1"):
        block_bounds(-1, 4)
    with pytest.raises(ValueError, match=r"block \(0, 4\); allowed are layers 0 to 1"):
        PushPlan.from_blocks(prompt_len=8, layers=2, blocks=4, chosen=[(0, 4)])
    plan = PushPlan.sequential(prompt_len=8, layers=2, blocks=4, proactive_blocks=0)
    with pytest.raises(ValueError, match="layer is 2; allowed are 0 to 1"):
        plan.ranges(2)
