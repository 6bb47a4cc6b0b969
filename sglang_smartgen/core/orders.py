"""Orders of the blocks of one prompt: which go out first, and which follow.

A block is named by its flat id `layer * per_layer + m`, with layers counted from 0 as in the model
and `per_layer = min(blocks, prompt_len)`. Only the sparse layers are ranked (the model's, see
`KVGeometry.sparse_layers`; all but 0 and 1 by default): the others are always sent whole, so their
ids never occur. A ranking holds each id of the sparse layers once, best first. The paper ranks by
the profile (section 4.1); the other orders are for its ablation, except `observed`, which mixes in
what the prompt's own last queries select.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.geometry import DENSE_LAYERS

OrderName = Literal["profile", "observed", "sequential", "random", "streaming", "oracle"]
ORDERS: tuple[str, ...] = get_args(OrderName)

SINK_TOKENS = 64
"""Tokens at the start that `streaming` calls sinks, as in the static baseline of our selectors."""

OBSERVED_WEIGHT = 2.0
"""Weight of what was observed against the profile; both have mean 1 before they are added."""


def rank_blocks(
    order: str,
    *,
    layers: int,
    prompt_len: int,
    blocks: int,
    importance: Tensor | None = None,
    observed: Tensor | None = None,
    seed: int = 0,
    sparse_layers: Sequence[int] | None = None,
) -> Tensor:
    """Return the ranking of all blocks of the sparse layers: int64 [n] flat ids, best first.

    `importance` is the profile (orders `profile` and `observed`) or the counts of this very request
    (`oracle`), `observed` what its last queries select; both float32 `[layers, per_layer]`, of
    which the rows of dense layers are not read. Equal scores go by (layer, m) ascending.
    `observed` works with either of the two alone. `seed` is for `random`. Raises ValueError for an
    unknown order, a missing score or one of another shape.
    """
    per_layer = len(block_bounds(prompt_len, blocks)) - 1
    sparse = torch.tensor(list(sparse_of(layers, sparse_layers)), dtype=torch.int64)
    count = len(sparse) * per_layer
    if order == "sequential":
        ranking = torch.arange(count)
    elif order == "random":
        ranking = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    elif order == "streaming":
        positions = _sinks_then_newest(prompt_len, blocks)
        every = torch.arange(len(sparse))
        ranking = (every[None, :] * per_layer + positions[:, None]).reshape(-1)
    elif order in ("profile", "oracle", "observed"):
        if importance is None and order != "observed":
            raise ValueError(f"order is {order}; it needs importance")
        score = _rows(importance, sparse, layers, per_layer, "importance")
        if order == "observed":
            score = mixed_importance(score, _rows(observed, sparse, layers, per_layer, "observed"))
        assert score is not None
        ranking = torch.sort(score.reshape(-1), descending=True, stable=True).indices
    else:
        raise ValueError(f"order is {order!r}; allowed are {', '.join(ORDERS)}")
    if not per_layer:
        return ranking
    return sparse[ranking // per_layer] * per_layer + ranking % per_layer


def sparse_of(layers: int, sparse_layers: Sequence[int] | None) -> Sequence[int]:
    """Return the sparse layers: those given, or all but layers 0 and 1."""
    return range(min(DENSE_LAYERS, layers), layers) if sparse_layers is None else sparse_layers


def mixed_importance(importance: Tensor | None, observed: Tensor | None) -> Tensor:
    """Return `importance + 2 * observed`, each over its mean: float32, the shape of the inputs.

    With one of them None it is the other over its mean; a score without any weight adds nothing.
    All sparse layers `[n, per_layer]` or the row of one: a selector takes equally many entries in
    every layer, so the mean of a row is that of the map. Raises ValueError without both or when
    shapes differ.
    """
    if importance is None and observed is None:
        raise ValueError("order is observed; it needs importance, observed or both")
    if importance is None or observed is None:
        given = importance if observed is None else observed
        assert given is not None
        return _over_mean(given)
    if importance.shape != observed.shape:
        raise ValueError(
            f"observed is {list(observed.shape)}; importance is {list(importance.shape)}, "
            "they must have one shape"
        )
    return _over_mean(importance) + OBSERVED_WEIGHT * _over_mean(observed)


def token_codes(ranking: Tensor, prompt_len: int, blocks: int) -> Tensor:
    """Return the tokens of the blocks, in the order of `ranking`: int64 [tokens].

    A token's code is `layer * prompt_len + token`; those of one block are ascending. Layers are
    those of the ids.
    """
    bounds = torch.tensor(block_bounds(prompt_len, blocks))
    per_layer = len(bounds) - 1
    if not per_layer:
        return ranking[:0]
    layer, m = ranking // per_layer, ranking % per_layer
    sizes = (bounds[1:] - bounds[:-1])[m]
    nth = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return (layer * prompt_len + bounds[m]).repeat_interleave(sizes) + nth


def _sinks_then_newest(prompt_len: int, blocks: int) -> Tensor:
    """Block numbers of one layer: those of the first SINK_TOKENS tokens, then newest to oldest."""
    bounds = block_bounds(prompt_len, blocks)
    per_layer = len(bounds) - 1
    sinks = sum(start < SINK_TOKENS for start in bounds[:per_layer])
    newest = torch.arange(per_layer - 1, sinks - 1, -1) if sinks < per_layer else torch.arange(0)
    return torch.cat([torch.arange(sinks), newest])


def _rows(
    score: Tensor | None, sparse: Tensor, layers: int, per_layer: int, field: str
) -> Tensor | None:
    if score is None:
        return None
    if score.shape != (layers, per_layer):
        raise ValueError(f"{field} is {list(score.shape)}; it must be {[layers, per_layer]}")
    return score.to(torch.float32)[sparse]


def _over_mean(score: Tensor) -> Tensor:
    score = score.to(torch.float32)
    total = score.sum()
    return score * (score.numel() / total) if float(total) > 0 else torch.zeros_like(score)
