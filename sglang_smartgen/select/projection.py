"""How InfiniGen's partial keys are chosen and made, per KV head.

`channels` picks numbers of the post-RoPE key itself; `skew` rotates by the right singular vectors
of the queries and keeps the first ones. Both are static and equal bit for bit in every chunking: a
choice of channels copies, and the rotation is summed over integers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_smartgen.select.shape import KVShape, LayerSample

INDEX, MATRIX = "channels", "matrix"
MODES: dict[str, Callable[[KVShape, int], tuple[int, ...]]] = {
    "channels": lambda shape, width: (shape.kv_heads, width),
    "skew": lambda shape, width: (shape.kv_heads, shape.head_dim, width),
}
# 2**23 * 2**20 * 512 = 2**52: every partial sum is an integer that float64 holds.
_KEY_LEVELS = 2.0**23
_MATRIX_LEVELS = 2.0**20


def check_width(mode: str, width: float, head_dim: int) -> int:
    """Return the numbers a token and head. Raises ValueError for a mode or share not allowed."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed are {', '.join(MODES)}")
    if not 0 < width <= 1:
        raise ValueError(f"width is {width}; it must be above 0 and at most 1")
    return max(1, round(width * head_dim))


def choose_channels(shape: KVShape, samples: list[LayerSample], width: int) -> Tensor:
    """Return int64 [Hkv, width], ascending: the channels with the largest mean |q| + mean |k|.

    |q| is averaged over the query heads of the group. A tie prefers the lower channel.
    """
    queries = torch.cat([s.queries for s in samples]).double().abs().mean(0)
    keys = torch.cat([s.keys for s in samples]).double().abs().mean(0)
    weight = queries.view(shape.kv_heads, shape.group, -1).mean(1) + keys
    order = torch.sort(weight, dim=-1, descending=True, stable=True).indices
    return order[:, :width].sort(-1).values


def skew_matrix(shape: KVShape, samples: list[LayerSample], width: int) -> Tensor:
    """Return float32 [Hkv, D, width], integers over 2**20: InfiniGen's rotation, first columns.

    The right singular vectors of the queries averaged over the group, as HATA's port of InfiniGen
    does for grouped-query attention; the largest singular values come first. (The eigenvectors of
    Q^T Q are the same vectors, in bounded memory.)
    """
    gram = torch.zeros(shape.kv_heads, shape.head_dim, shape.head_dim, dtype=torch.float64)
    for sample in samples:
        mean = sample.queries.double().view(-1, shape.kv_heads, shape.group, shape.head_dim).mean(2)
        gram += torch.einsum("thi,thj->hij", mean, mean)
    vectors: Tensor = torch.linalg.eigh(gram)[1].flip(-1)[..., :width]
    return ((vectors * _MATRIX_LEVELS).round() / _MATRIX_LEVELS).float()


def project_keys(mode: str, choice: Tensor, keys: Tensor) -> Tensor:
    """Return the partial keys [T, Hkv, width] of `keys` [T, Hkv, D]; float32 for `skew`."""
    if mode == "channels":
        return keys.gather(-1, choice.expand(keys.shape[0], -1, -1))
    exact = keys.double().transpose(0, 1)
    # A power of two, so that the division is exact and the rounding the only loss (2**-24).
    unit = torch.exp2(torch.frexp(exact.abs().amax(-1, keepdim=True)).exponent.double())
    whole = (exact / unit * _KEY_LEVELS).round()
    product = torch.matmul(whole, choice.double() * _MATRIX_LEVELS)
    return (product * (unit / (_KEY_LEVELS * _MATRIX_LEVELS))).float().transpose(0, 1)


def project_query(mode: str, choice: Tensor, query: Tensor) -> Tensor:
    """Return the partial queries float32 [Hkv, G, width] of `query` [Hkv, G, D]."""
    if mode == "channels":
        return query.float().gather(-1, choice[:, None].expand(-1, query.shape[1], -1))
    return torch.stack([q @ p for q, p in zip(query.float(), choice.float(), strict=True)])
