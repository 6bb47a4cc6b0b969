"""Scores from (partial) logits, per KV head, with the same bits on every split of the heads.

The CPU path works head by head on contiguous copies: what one head gets does not depend on how
many heads the rank has, so tensor-parallel ranks pick what one rank picks. On CUDA all heads go in
one batched product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_softmax(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Return float32 [Hkv, N]: softmax of the scaled logits, summed over the group.

    `query` is [Hkv, G, w], `keys` [N, Hkv, w]. The group softmax-sum keeps more attention mass at
    the same k than the maximum or the sum of raw logits, since each query head counts by how much
    it really attends.
    """
    if keys.is_cuda:
        return torch.softmax(_all_logits(query, keys, scaling), dim=-1).sum(1)
    return torch.stack(
        [
            sum_in_order(torch.softmax(logits, dim=-1))
            for logits in _head_logits(query, keys, scaling)
        ]
    )


def best_relative_logit(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Return float32 [Hkv, N], at most 0: the largest `logit - max_n logit` over the group.

    Shapes as in `group_softmax`.
    """
    if keys.is_cuda:
        logits = _all_logits(query, keys, scaling)
        return (logits - logits.amax(-1, keepdim=True)).amax(1)
    return torch.stack(
        [
            (logits - logits.amax(-1, keepdim=True)).amax(0)
            for logits in _head_logits(query, keys, scaling)
        ]
    )


def _all_logits(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    return torch.matmul(query.float() * scaling, keys.float().permute(1, 2, 0))


def _head_logits(query: Tensor, keys: Tensor, scaling: float) -> list[Tensor]:
    """Return one [G, N] a KV head."""
    scaled = query.float() * scaling
    return [
        torch.matmul(scaled[head].contiguous(), keys[:, head].contiguous().float().T)
        for head in range(keys.shape[1])
    ]


def group_softmax_of(logits: Tensor) -> Tensor:
    """Return float32 [Hkv, N]: softmax of scaled `logits` [Hkv, G, N], summed over the group."""
    if logits.is_cuda:
        return sum_in_order(torch.softmax(logits, dim=-1).transpose(0, 1))
    return torch.stack([sum_in_order(torch.softmax(head, dim=-1)) for head in logits])


def sum_in_order(weights: Tensor) -> Tensor:
    """Sum over the group in order: a reduction may choose its order by the shape."""
    total = weights[0]
    for row in weights[1:]:
        total = total + row
    return total
