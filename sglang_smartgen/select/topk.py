"""The k best positions of every KV head, in a total order that every machine agrees on.

Hash scores tie often, and the order of ties in `torch.topk` differs between devices and batch
shapes. Here each position gets a unique int64 key, the float's bits made monotone above the
position, so equal scores prefer the recent token and there is exactly one answer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_SIGN_FLIP = 0x7FFFFFFF  # turns the bits of a negative float32 to an ascending int32
_POSITION = 0xFFFFFFFF

Ranking = Callable[[Tensor, int], Tensor]
"""The k best columns of float32 [Hkv, N], ties to the later column, as int64 [Hkv, k] unordered."""

_device_ranking: list[Ranking] = []


def rank_with(ranking: Ranking | None) -> None:
    """Let `ranking` find the k best on a GPU; None: torch does."""
    _device_ranking[:] = [] if ranking is None else [ranking]


def top_k(score: Tensor, k: int) -> Tensor:
    """Return int64 [Hkv, min(k, N)]: the ascending positions of the k best of `score`.

    `score` is float32 [Hkv, N], without NaN; a larger score wins, then the later position.
    Raises ValueError for another shape or dtype, or `k < 1`.
    """
    if score.dtype != torch.float32 or score.dim() != 2:
        raise ValueError(f"score is {score.dtype} {list(score.shape)}; it must be float32 [Hkv, N]")
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    heads, length = score.shape
    if k >= length:
        return torch.arange(length, device=score.device).repeat(heads, 1)
    if score.is_cuda:
        return _device_path(score, k)
    # The same in numpy, whose partition of so few keys is faster than torch's topk.
    bits = (score.numpy() + np.float32(0)).view(np.int32)  # + 0 makes -0 equal to 0
    monotone = (bits ^ ((bits >> 31) & _SIGN_FLIP)).astype(np.int64)
    key = (monotone << 32) | np.arange(length)
    best = np.partition(key, length - k, axis=-1)[:, length - k :] & _POSITION
    best.sort(-1)
    return torch.from_numpy(best)


def _device_path(score: Tensor, k: int) -> Tensor:
    for ranking in _device_ranking:
        return ranking(score + 0.0, k).sort(dim=-1).values
    bits = (score + 0.0).contiguous().view(torch.int32)
    monotone = (bits ^ ((bits >> 31) & _SIGN_FLIP)).long()
    key = (monotone << 32) | torch.arange(score.shape[-1], device=score.device)
    best = key.topk(k, dim=-1, sorted=False).values & _POSITION
    return best.sort(dim=-1).values
