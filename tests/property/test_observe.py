"""What the last queries select, against a plain loop; block means against a loop.

The sums of weights may differ in their last bit: they are made in another order.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.observe import block_means, observed_importance


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(0, 30), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40),
    st.integers(0, 10**6),
)  # fmt: skip
def test_counts_are_those_of_a_loop(
    w: int, before: int, kv_heads: int, group: int, k: int, seed: int
) -> None:
    torch.manual_seed(seed)
    n, dim = w + before, 4
    queries, keys = torch.randn(w, kv_heads * group, dim), torch.randn(n, kv_heads, dim)
    first = seed % (before + 1)
    wanted = torch.zeros(n)
    for i in range(w):
        seen = first + i + 1
        for head in range(kv_heads):
            mass = torch.zeros(seen)
            for g in range(group):
                logits = keys[:seen, head] @ queries[i, head * group + g] * 0.5
                mass += logits.softmax(0)
            wanted[mass.topk(min(k, seen)).indices] += 1 / (w - i)
    assert observed_importance(queries, keys, k, 0.5, first).allclose(wanted)


def test_default_window_is_the_end_of_the_prompt() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(3, 2, 8), torch.randn(20, 1, 8)
    late = observed_importance(queries, keys, 20, 1.0)
    # With every token selected, a query selects what it can see.
    assert late.allclose(torch.tensor([1 + 1 / 2 + 1 / 3] * 18 + [1 + 1 / 2, 1.0]))
    assert observed_importance(queries, keys, 20, 1.0, first=17).equal(late)
    assert observed_importance(queries, keys, 20, 1.0, first=4)[7:].eq(0).all()


def test_pieces_do_not_change_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(32, 6, 8), torch.randn(90, 2, 8)
    whole = observed_importance(queries, keys, 9, 0.5)
    monkeypatch.setattr("sglang_smartgen.core.observe.PIECE", 5 * 3 * 90)
    assert observed_importance(queries, keys, 9, 0.5).allclose(whole)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 4, 8).bfloat16(), torch.randn(50, 2, 8).bfloat16()
    half = observed_importance(queries, keys, 5, 0.3)
    assert half.dtype == torch.float32
    assert half.tolist() == observed_importance(queries.float(), keys.float(), 5, 0.3).tolist()


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 1000))
def test_block_means(prompt_len: int, blocks: int, seed: int) -> None:
    scores = torch.randint(
        0, 50, (2, prompt_len), generator=torch.Generator().manual_seed(seed)
    ).float()
    bounds = block_bounds(prompt_len, blocks)
    means = block_means(scores, bounds)
    for row in range(2):
        for m in range(len(bounds) - 1):
            part = scores[row, bounds[m] : bounds[m + 1]].tolist()
            assert math.isclose(means[row, m].item(), sum(part) / len(part), rel_tol=1e-6)


def test_bad_input_is_named() -> None:
    queries, keys = torch.zeros(4, 4, 8), torch.zeros(10, 2, 8)
    with pytest.raises(ValueError, match="k is 0; it must be at least 1"):
        observed_importance(queries, keys, 0, 1.0)
    with pytest.raises(ValueError, match="first is 7; allowed are 0 to 6"):
        observed_importance(queries, keys, 3, 1.0, first=7)
    with pytest.raises(ValueError, match="heads must be a multiple"):
        observed_importance(torch.zeros(4, 3, 8), keys, 3, 1.0)
    with pytest.raises(ValueError, match="bounds end at 9; token_scores has 10"):
        block_means(torch.zeros(10), [0, 9])
