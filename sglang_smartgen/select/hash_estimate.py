"""Hash codes for score `estimate`: only the key is one bit a column, the query stays a number.

`q . k` is estimated as `size_n * sum_j v_j(q) sign(w_j . (k_n - centre))` (QJL, arXiv 2406.03482;
RaBitQ, SIGMOD 2024, with a plain mean of `|w_j . k|` as the size). The noise of a random `w`
grows with `|q| |k|`, however little the large channels of the keys are looked at: on models with
normed queries and keys it drowns the logits. So keys are first brought to coordinates in which
queries and keys have the same diagonal second moment (the balanced realisation of control theory),
where `E|q| E|k|` is least, and only the strongest of them are hashed. The listwise loss then
trains both sides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_smartgen.select.codes import MATRIX_LEVELS
from sglang_smartgen.select.hash_training import (
    HIDDEN,
    Draw,
    Drawer,
    hard_signs,
    random_matrices,
    text_draws,
)
from sglang_smartgen.select.shape import KVShape, LayerSample

_RIDGE = 1e-3  # of the mean second moment: channels that are never used must not blow up
_QUERY_TOKENS = 4096  # of all texts together, for the queries' second moment


class Side(NamedTuple):
    """One side's map to projections, `(x * scale) @ matrix`.

    matrix: int8 [Hkv, D, bits], one unit a head. scale: float32 [Hkv, D], with that unit in it.
    """

    matrix: Tensor
    scale: Tensor


class _Balance(NamedTuple):
    """Maps to balanced coordinates and the scales of the key's channels, all float32."""

    to_key: Tensor  # [Hkv, D, D], rows in descending order of strength
    to_query: Tensor  # [Hkv, D, D]; (to_query q) . (to_key k) = q . k
    spread: Tensor  # [Hkv, D]: deviation of the keys
    size: Tensor  # [Hkv, D]: root of the deviation over that of the queries


class Estimator(NamedTuple):
    """A layer's result; the query's scale has the logits' scaling in it."""

    key: Side
    query: Side
    centre: Tensor  # float32 [Hkv, D]


def train_estimator(
    shape: KVShape, layer: int, samples: list[LayerSample], *, bits: int, steps: int, seed: int
) -> Estimator:
    """Return what `samples` (checked already) give for one layer. Runs on the CPU.

    `steps` 0 is the balanced start alone. The same input gives the same result on one machine
    and thread count.
    """
    mean, draw = text_draws(shape, layer, samples, seed)
    balance = _balanced(shape, samples, mean)
    # Strong directions are hashed and weak ones cut. Of 256, 80 were better than 32, 50 and 96 at
    # 128 bits; of 64, all were.
    kept = min(shape.head_dim, bits * 5 // 8)
    start = torch.zeros(shape.kv_heads, shape.head_dim, bits)
    start[:, :kept] = random_matrices(kept, bits, layer, range(shape.kv_heads))
    start /= start[:, :kept].square().mean((1, 2), keepdim=True).sqrt()
    with torch.enable_grad():
        key, query, centre = _listwise(shape, draw, start, balance, mean, steps)
    key = balance.to_key.transpose(1, 2) @ key / kept**0.5
    query = balance.to_query.transpose(1, 2) @ query * (shape.scaling * kept**0.5 / bits)
    # Divided by their size, no channel is lost in the 8-bit rounding of vectors.
    return Estimator(_whole(key, balance.size.reciprocal()), _whole(query, balance.size), centre)


def _balanced(shape: KVShape, samples: list[LayerSample], mean: Tensor) -> _Balance:
    """With second moments `Q = A A'`, `K = B B'` and the SVD `A'B = U S V'` the maps are
    `to_key = S^.5 V' B^-1` and `to_query = S^.5 U' A^-1`.
    """
    tokens = sum(s.queries.shape[0] for s in samples)
    stride = max(1, tokens // _QUERY_TOKENS)
    keys = torch.cat([s.keys.float() - mean for s in samples]).transpose(0, 1).double()
    queries = torch.cat([s.queries[::stride].float() for s in samples])
    queries = queries.view(-1, shape.kv_heads, shape.group, shape.head_dim).transpose(0, 1)
    root_k = _root(keys)
    root_q = _root(queries.reshape(shape.kv_heads, -1, shape.head_dim).double())
    u, s, vh = torch.linalg.svd(root_q.transpose(1, 2) @ root_k)
    strength = s.sqrt()[..., None]
    to_key = strength * torch.linalg.solve_triangular(root_k, vh, upper=False, left=False)
    to_query = strength * torch.linalg.solve_triangular(
        root_q, u.transpose(1, 2), upper=False, left=False
    )
    spread = root_k.square().sum(-1).sqrt()
    size = (spread / root_q.square().sum(-1).sqrt()).sqrt()
    return _Balance(to_key.float(), to_query.float(), spread.float(), size.float())


def _root(x: Tensor) -> Tensor:
    """Return the Cholesky root of the second moment of `x` [Hkv, n, D], with a small ridge."""
    moment = x.transpose(1, 2) @ x / x.shape[1]
    trace = moment.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-12)
    ridge = torch.eye(x.shape[-1], dtype=x.dtype) * (_RIDGE * trace)[:, None, None]
    root: Tensor = torch.linalg.cholesky(moment + ridge)
    return root


def _listwise(
    shape: KVShape,
    draw: Drawer,
    start: Tensor,
    balance: _Balance,
    mean: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy between each query head's attention and the softmax of its estimates.

    A sign passes the gradient of tanh (straight through). Returns the matrices of keys and
    queries [Hkv, D, bits], in balanced coordinates, and the centre [Hkv, D].
    """
    to_key, to_query, spread, _ = balance
    kept = int((start[0].abs().sum(-1) > 0).sum())
    bits = start.shape[-1]
    key, query = start.clone().requires_grad_(), start.clone().requires_grad_()
    offset = torch.zeros_like(mean, requires_grad=True)
    heat = torch.zeros(shape.kv_heads, requires_grad=True)
    groups = [
        {"params": [key, query], "lr": 0.02},
        {"params": [offset], "lr": 0.01},
        {"params": [heat], "lr": 0.02},
    ]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 1 - 0.9 * step / max(steps, 1)
    )
    scale = shape.scaling * kept**0.5 / bits
    for step in range(steps):
        drawn: Draw = draw(step)
        hidden = ~drawn.seen[:, None, None]
        with torch.no_grad():
            logits = torch.einsum("nhgd,mhd->nhgm", drawn.queries, drawn.keys) * shape.scaling
            target = torch.softmax(logits.masked_fill(hidden, HIDDEN), -1)
        centred = torch.einsum("mhd,hed->hme", drawn.keys - (mean + spread * offset), to_key)
        projected = centred @ key / kept**0.5  # [Hkv, m, bits]
        signs = hard_signs(projected) * projected.abs().mean(-1, keepdim=True)
        numbers = torch.einsum("nhgd,hed->nhge", drawn.queries, to_query)
        numbers = torch.einsum("nhge,her->nhgr", numbers, query)
        numbers = numbers * (scale * heat.exp())[:, None, None]
        estimate = torch.einsum("nhgr,hmr->nhgm", numbers, signs)
        likely = torch.log_softmax(estimate.masked_fill(hidden, HIDDEN), -1)
        loss = -(target * likely.masked_fill(hidden, 0)).sum(-1).mean((0, 2)).sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    hot = query * heat.exp()[:, None, None]
    return key.detach(), hot.detach(), (mean + spread * offset).detach()


def _whole(matrix: Tensor, scale: Tensor) -> Side:
    """Round `matrix` [Hkv, D, bits], taken apart as `scale[d] * rest[d]`, to one unit a head."""
    rest = matrix / scale[..., None]
    unit = rest.abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / MATRIX_LEVELS
    return Side((rest / unit).round().to(torch.int8), (scale * unit[..., 0]).contiguous())
