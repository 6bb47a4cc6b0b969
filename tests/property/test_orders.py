"""Every order ranks each block of the sparse layers once; the plan is its first K_r blocks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.orders import (
    ORDERS,
    mixed_importance,
    rank_blocks,
    token_codes,
)


class Case(NamedTuple):
    layers: int
    prompt_len: int
    blocks: int
    importance: Tensor
    observed: Tensor

    @property
    def per_layer(self) -> int:
        return min(self.blocks, self.prompt_len)

    def rank(self, order: str, seed: int = 0) -> Tensor:
        return rank_blocks(
            order,
            layers=self.layers,
            prompt_len=self.prompt_len,
            blocks=self.blocks,
            importance=self.importance,
            observed=self.observed,
            seed=seed,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, prompt_len = draw(st.integers(1, 6)), draw(st.integers(1, 60))
    blocks = draw(st.integers(1, 40))
    shape = (layers, min(blocks, prompt_len))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    # Few values, so that there are ties.
    scores = torch.randint(0, 4, (2, *shape), generator=generator).float()
    return Case(layers, prompt_len, blocks, scores[0], scores[1])


@settings(deadline=None)
@given(cases(), st.sampled_from(ORDERS), st.integers(0, 5))
def test_a_ranking_holds_every_sparse_block_once(case: Case, order: str, seed: int) -> None:
    dense = min(2, case.layers)
    wanted = list(range(dense * case.per_layer, case.layers * case.per_layer))
    assert sorted(case.rank(order, seed).tolist()) == wanted


@settings(deadline=None)
@given(cases())
def test_scores_never_rise_and_ties_go_by_layer_and_position(case: Case) -> None:
    dense = min(2, case.layers)
    prior, seen = case.importance[dense:], case.observed[dense:]
    for order, score in (
        ("profile", prior),
        ("oracle", prior),
        ("observed", mixed_importance(prior, seen)),
    ):
        ids = [i - dense * case.per_layer for i in case.rank(order).tolist()]
        flat = score.reshape(-1).tolist()
        keys = [(-flat[i], i) for i in ids]
        assert keys == sorted(keys)


@settings(deadline=None)
@given(cases(), st.sampled_from(ORDERS))
def test_token_codes_are_the_tokens_of_the_blocks(case: Case, order: str) -> None:
    ranking = case.rank(order)
    bounds = block_bounds(case.prompt_len, case.blocks)
    wanted = [
        i // case.per_layer * case.prompt_len + token
        for i in ranking.tolist()
        for token in range(bounds[i % case.per_layer], bounds[i % case.per_layer + 1])
    ]
    assert token_codes(ranking, case.prompt_len, case.blocks).tolist() == wanted


def test_sliding_layers_are_dense_layers() -> None:
    """A model whose layers 3 and 5 attend to a window only: they are pushed whole, never ranked."""
    size = {"layers": 7, "blocks": 4, "prompt_len": 8}
    for order in ORDERS:
        ranking = rank_blocks(order, importance=torch.rand(7, 4), sparse_layers=[2, 4, 6], **size)
        assert (
            sorted(set((ranking // 4).tolist())) == [2, 4, 6] and len(set(ranking.tolist())) == 12
        )


def test_random_depends_on_the_seed_alone() -> None:
    size = {"layers": 4, "prompt_len": 50, "blocks": 10}
    first, again, other = (rank_blocks("random", seed=seed, **size) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_streaming_takes_sinks_then_the_newest_of_all_layers() -> None:
    # 100 tokens in blocks of 25: blocks 0 to 2 hold sinks (the first 64 tokens).
    ranking = rank_blocks("streaming", layers=4, prompt_len=100, blocks=4)
    pairs = [(i // 4, i % 4) for i in ranking.tolist()]
    assert pairs == [(2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3)]
    long = rank_blocks("streaming", layers=3, prompt_len=640, blocks=10).tolist()
    assert [i - 20 for i in long] == [0, 9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_observed_weighs_twice_and_may_stand_alone() -> None:
    prior, seen = torch.tensor([[1.0, 3.0]]), torch.tensor([[30.0, 10.0]])
    assert mixed_importance(prior, seen).tolist() == [[0.5 + 3.0, 1.5 + 1.0]]
    assert mixed_importance(None, seen).tolist() == [[1.5, 0.5]]
    assert mixed_importance(prior, torch.zeros(1, 2)).tolist() == [[0.5, 1.5]]


def test_bad_input_is_named() -> None:
    size = {"layers": 3, "prompt_len": 8, "blocks": 4}
    with pytest.raises(ValueError, match="order is 'best'; allowed are profile, observed"):
        rank_blocks("best", **size)
    with pytest.raises(ValueError, match="order is oracle; it needs importance"):
        rank_blocks("oracle", **size)
    with pytest.raises(ValueError, match=r"importance is \[3, 5\]; it must be \[3, 4\]"):
        rank_blocks("profile", importance=torch.zeros(3, 5), **size)
    with pytest.raises(ValueError, match="it needs importance, observed or both"):
        rank_blocks("observed", **size)
    with pytest.raises(ValueError, match=r"observed is \[3, 5\]; it must be \[3, 4\]"):
        rank_blocks("observed", observed=torch.zeros(3, 5), **size)
    with pytest.raises(ValueError, match="they must have one shape"):
        mixed_importance(torch.zeros(3, 4), torch.zeros(3, 5))
