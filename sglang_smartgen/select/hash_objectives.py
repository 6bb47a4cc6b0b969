"""What hash matrices for score `hamming` minimise: a listwise loss on the score, or HATA's own.

HATA's loss (`paper_objective`) pulls the soft codes of good pairs together and keeps the columns
near a rotation. On a small model it gave about what random rotations give. The default
(`listwise_objective`) trains what is used: the hard codes, the norm and the sum over the group,
against the attention of the group, and the key centre with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sglang_smartgen.select.hash_training import (
    HIDDEN,
    Draw,
    Objective,
    hard_signs,
    random_matrices,
)
from sglang_smartgen.select.shape import KVShape


def listwise_objective(
    shape: KVShape, layer: int, mean: Tensor, draw: Callable[[int], Draw], bits: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy between the group's attention and the softmax of the hash score.

    The score is HATA's, `norm * sum_g (1 - 2 hamming / bits)`, times a learned temperature a head.
    A sign passes the gradient of tanh (straight through). Starts from random rotations and the
    mean key. Returns the matrix [Hkv, D, bits] and the centre [Hkv, D].
    """
    first = random_matrices(shape.head_dim, bits, layer, range(shape.kv_heads))
    # Entries of mean square 1, and a centre in units of the keys: one learning rate for all sizes.
    matrix = (first / first.square().mean((1, 2), keepdim=True).sqrt()).requires_grad_()
    probe = draw(0)
    spread = (probe.keys - mean).square().mean((0, 2)).sqrt()[:, None].clamp(min=1e-6)
    offset = torch.zeros_like(mean, requires_grad=True)
    length = probe.queries.norm(dim=-1).mean((0, 2)).clamp(min=1e-6)
    guess = length * shape.scaling * (math.pi / 2) / shape.group  # makes the score a logit
    heat = guess.log().requires_grad_()
    optimiser = torch.optim.Adam(
        [
            {"params": [matrix], "lr": 0.08},
            {"params": [offset], "lr": 0.01},
            {"params": [heat], "lr": 0.05},
        ]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - 0.9 * step / steps)
    for step in range(steps):
        queries, keys, seen = draw(step)
        hidden = ~seen[:, None]
        with torch.no_grad():
            logits = torch.einsum("nhgd,mhd->nhgm", queries, keys) * shape.scaling
            target = torch.softmax(logits.masked_fill(hidden[:, None], HIDDEN), -1).mean(2)
        centred = keys - (mean + spread * offset)
        key_code = hard_signs(torch.einsum("mhd,hdr->hmr", centred, matrix))
        query_code = hard_signs(torch.einsum("nhgd,hdr->nhgr", queries, matrix)).sum(2)
        score = torch.einsum("nhr,hmr->nhm", query_code, key_code) / bits
        score = score * (centred.norm(dim=-1).T * heat.exp()[:, None])
        likely = torch.log_softmax(score.masked_fill(hidden, HIDDEN), -1)
        loss = -(target * likely.masked_fill(hidden, 0)).sum((0, 2)).sum() / queries.shape[0]
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return matrix.detach(), (mean + spread * offset).detach()


def paper_objective(
    shape: KVShape, layer: int, mean: Tensor, draw: Callable[[int], Draw], bits: int, steps: int
) -> tuple[Tensor, Tensor]:
    """HATA's loss: similarity of soft codes, balanced bits, columns near orthogonal.

    `h(x) = tanh(0.05 x W)`; the best tenth of a query's keys weigh 20 down to 1 by rank, the rest
    -1. SGD with momentum from a Gaussian start, as published; ours is only that keys are centred
    on their mean. Returns the matrix [Hkv, D, bits] and the centre [Hkv, D].
    """
    generator = torch.Generator().manual_seed(layer)
    heads, dim = shape.kv_heads, shape.head_dim
    matrix = torch.randn(heads, dim, bits, generator=generator).requires_grad_()
    optimiser = torch.optim.SGD([matrix], lr=0.1, momentum=0.9, weight_decay=1e-6)
    for step in range(steps):
        queries, keys, seen = draw(step)
        keys = keys - mean
        with torch.no_grad():
            weight = _pair_weights(torch.einsum("nhgd,mhd->nhgm", queries, keys), seen)
        pairs = seen.sum() * shape.group
        q = torch.tanh(0.05 * torch.einsum("nhgd,hdr->nhgr", queries, matrix))
        k = torch.tanh(0.05 * torch.einsum("mhd,hdr->mhr", keys, matrix))
        apart = q.square().sum(-1)[..., None] + k.square().sum(-1).T[None, :, None]
        apart = apart - 2 * torch.einsum("nhgr,mhr->nhgm", q, k)
        # Every pair counts in the means, so a key counts as often as it is seen.
        share = seen.sum(0) / seen.sum()
        mean_code = torch.einsum("m,mhr->hr", share, k) + torch.einsum(
            "n,nhgr->hr", seen.sum(1) / seen.sum() / shape.group, q
        )
        gram = matrix.transpose(1, 2) @ matrix - torch.eye(bits)
        loss = (
            0.01 * (weight * apart).sum() / pairs
            + (mean_code / bits).square().sum()
            + 2 * gram.square().sum().sqrt()
        )
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return matrix.detach(), mean


def _pair_weights(logits: Tensor, seen: Tensor) -> Tensor:
    """Weigh the pairs of each query, [n, Hkv, G, m]: 20 to 1 over its best tenth, else -1."""
    visible = seen[:, None, None]
    logits = logits.masked_fill(~visible, -math.inf)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    rank = order.argsort(-1)
    best = (visible.sum(-1, keepdim=True) * 0.1).clamp(min=1)
    weight = torch.where(rank < best, 20 - 19 * rank / best, -1.0)
    return weight * visible


OBJECTIVES: dict[str, Objective] = {"listwise": listwise_objective, "paper": paper_objective}
