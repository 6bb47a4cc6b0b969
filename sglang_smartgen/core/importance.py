"""Importance I(l, m) of the blocks of a prompt: the paper's Equation 1, resampled and compared.

`I(l, m) = 1 / |E(B)| * sum over e in E(B) of S(e)`, where E(B) are the entries of block B = (l, m)
and S(e) says how often entry e was selected in decode. We divide S(e) by the number of decode
steps too, so that I is a frequency from 0 to 1 and requests of different length of answer compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.observe import block_means
from sglang_smartgen.core.orders import sparse_of


def block_importance(
    counts: Tensor,
    steps: int,
    *,
    layers: int,
    blocks: int,
    sparse_layers: Sequence[int] | None = None,
) -> Tensor:
    """Return I(l, m) of one recorded request: float32 [layers, min(blocks, prompt_len)], 0 to 1.

    counts: int32 [sparse_layers, kv_heads, prompt_len], how often each entry was selected in
    `steps` decode steps. Rows of dense layers are 0: nothing is selected there. Raises ValueError
    for counts of another number of layers, or `steps < 1`.
    """
    sparse = list(sparse_of(layers, sparse_layers))
    if counts.dim() != 3 or counts.shape[0] != len(sparse):
        raise ValueError(
            f"counts is {list(counts.shape)}; it must be [{len(sparse)}, kv_heads, prompt_len]"
        )
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    bounds = block_bounds(counts.shape[2], blocks)
    importance = torch.zeros((layers, len(bounds) - 1))
    if sparse:
        importance[sparse] = block_means(counts.to(torch.float32).mean(1) / steps, bounds)
    return importance


def resample(importance: Tensor, blocks: int) -> Tensor:
    """Return the map at another number of blocks: float32 [layers, blocks].

    importance: [layers, m]. Positions are shares of the prompt, as in the paper's Figure 5; a new
    block is the mean of what it covers, so the mean of a layer stays. Raises ValueError for
    `blocks < 1` or a map without blocks.
    """
    old = importance.shape[1]
    if blocks < 1 or old < 1:
        raise ValueError(f"blocks is {blocks}, of a map of {old}; both must be at least 1")
    if blocks == old:
        return importance.to(torch.float32)
    total = torch.nn.functional.pad(importance.to(torch.float64).cumsum(1), (1, 0))
    # The running sum at the edges of the new blocks, linear inside an old one.
    edges = torch.arange(blocks + 1, dtype=torch.float64) * old / blocks
    left = edges.floor().long().clamp(max=old - 1)
    inside = edges - left
    at = total[:, left] * (1 - inside) + total[:, left + 1] * inside
    return ((at[:, 1:] - at[:, :-1]) * (blocks / old)).to(torch.float32)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation of two scores of one shape, -1 to 1; ties share a rank.

    0 when one of them is constant. Raises ValueError for different shapes.
    """
    if first.shape != second.shape:
        raise ValueError(
            f"second is {list(second.shape)}; first is {list(first.shape)}, "
            "they must have one shape"
        )
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale > 0 else 0.0


def _ranks(score: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """float64 [n]: the rank of each element, equal ones the mean of theirs."""
    flat = score.reshape(-1).to(torch.float64).numpy()
    _, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    middle = (last - (counts + 1) / 2).astype(np.float64)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = middle[inverse.reshape(-1)]
    return ranks
