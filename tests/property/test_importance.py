"""Equation 1 against a loop, resampling, and Spearman's rank correlation against a count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.importance import block_importance, rank_correlation, resample


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(1, 40), st.integers(1, 20), st.integers(0, 1000))
def test_importance_is_the_mean_frequency_of_the_entries_of_a_block(
    prompt_len: int, blocks: int, steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, steps + 1, (2, 3, prompt_len), generator=generator).int()
    importance = block_importance(counts, steps, layers=5, blocks=blocks, sparse_layers=[2, 4])
    bounds = block_bounds(prompt_len, blocks)
    assert importance.shape == (5, len(bounds) - 1)
    assert not importance[[0, 1, 3]].any()
    for row, layer in enumerate((2, 4)):
        for m in range(len(bounds) - 1):
            entries = counts[row, :, bounds[m] : bounds[m + 1]].flatten().tolist()
            wanted = sum(entries) / len(entries) / steps
            assert math.isclose(importance[layer, m].item(), wanted, rel_tol=1e-5)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000))
def test_resampling_keeps_the_mean_and_the_place(old: int, new: int, seed: int) -> None:
    importance = torch.rand((2, old), generator=torch.Generator().manual_seed(seed))
    other = resample(importance, new)
    assert other.shape == (2, new)
    assert other.mean(1).allclose(importance.mean(1), rtol=1e-5)
    assert other.min() >= importance.min() - 1e-6 and other.max() <= importance.max() + 1e-6
    whole = resample(importance, new * old)
    assert whole.allclose(importance.repeat_interleave(new, 1), rtol=1e-4, atol=1e-6)
    assert resample(whole, old).allclose(importance, rtol=1e-4, atol=1e-6)


def test_a_peak_stays_where_it_was() -> None:
    importance = torch.zeros(1, 10)
    importance[0, 9] = 1.0
    assert resample(importance, 4)[0].tolist() == pytest.approx([0, 0, 0, 0.4])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=40))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    a, b = (list(side) for side in zip(*pairs, strict=True))
    found = rank_correlation(torch.tensor(a), torch.tensor(b))
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found == 0.0
    else:
        ranks = torch.tensor([_ranks(a), _ranks(b)], dtype=torch.float64)
        assert found == pytest.approx(ranks.corrcoef()[0, 1].item(), abs=1e-9)


def _ranks(values: list[int]) -> list[float]:
    """Twice the mean position of each value in the sorted list, counted by hand."""
    return [sum(o < v for o in values) * 2 + sum(o == v for o in values) + 1.0 for v in values]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"counts is \[2, 1, 8\]; it must be \[3, kv_heads"):
        block_importance(torch.zeros(2, 1, 8), 1, layers=5, blocks=4)
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        block_importance(torch.zeros(3, 1, 8), 0, layers=5, blocks=4)
    with pytest.raises(ValueError, match="blocks is 0, of a map of 4"):
        resample(torch.zeros(2, 4), 0)
    with pytest.raises(ValueError, match="they must have one shape"):
        rank_correlation(torch.zeros(2), torch.zeros(3))
