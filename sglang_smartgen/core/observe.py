"""What the last queries of a prompt select: importance of this very request, known before decode.

Prefill computes the last queries anyway. Their top-k entries predict what the first decode steps
select better than any profile (order `observed`), and the nearer a query is to the end, the better:
the i-th from the end counts 1/i. With a budget of 22 % of the tokens (SmolLM2, 2,048 tokens, three
texts) that leaves 17.6 % of what the first step selects to be fetched; with equal counts, 22.7 %.
The cost must stay under 2 % of prefill, so there is one small matrix product a layer and a
partition instead of a sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

WINDOW = 32
"""Queries at the end of a prompt that are looked at."""

PIECE = 1 << 18
"""Logits that are worked on at once: one megabyte."""


def observed_importance(
    queries: Tensor, keys: Tensor, k: int, scaling: float, first: int | None = None
) -> Tensor:
    """Return how much the queries select each token: float32 [n], 0 to Hkv * (1 + ... + 1/w).

    queries: [w, Hq, D] post-RoPE, the i-th at position `first + i` (default: the last w tokens).
    keys: [n, Hkv, D] post-RoPE. A query selects, per KV head, the `k` entries with the largest sum
    of the group's softmax probabilities among the tokens up to its own position; ties at the edge
    count all. The last query counts 1, the i-th from the end 1/i. scaling: of the logits. Any
    floating dtype; computed in float32. Raises ValueError for shapes that do not fit or `k < 1`.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    n = keys.shape[0]
    w = queries.shape[0]
    weights = 1 / torch.arange(w, 0, -1, dtype=torch.float32, device=keys.device)
    counts = torch.zeros(n, dtype=torch.float32, device=keys.device)
    for begin, rows in _masses(queries, keys, scaling, first):
        weight = weights[begin : begin + rows.shape[0]]
        if k >= n:
            counts += weight @ (rows > 0).to(torch.float32)
            continue
        if rows.is_cuda:
            edge = rows.topk(k, dim=-1, sorted=False).values.amin(-1)
        else:
            # numpy's partition of so few columns is six times as fast as torch's topk.
            at_edge = np.partition(rows.numpy(), n - k, axis=-1)[:, n - k]
            edge = torch.from_numpy(np.ascontiguousarray(at_edge))
        # A query at the start sees fewer than k tokens; none with no weight may pass its edge of 0.
        edge.clamp_(min=torch.finfo(torch.float32).tiny)
        counts += weight @ (rows >= edge[:, None]).to(torch.float32)
    return counts


def _masses(
    queries: Tensor, keys: Tensor, scaling: float, first: int | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the group's summed softmax probabilities, float32 [queries, n], in pieces.

    With each goes the number of its first query. A piece is one KV head and as many queries as stay
    in the processor's cache; the sizes that are cut into pieces once cost twice the time in one.
    """
    w, q_heads, dim = queries.shape
    n, kv_heads, _ = keys.shape
    if keys.shape[2] != dim or q_heads % kv_heads:
        raise ValueError(
            f"queries is {list(queries.shape)}, keys is {list(keys.shape)}; heads must be a "
            "multiple and head_dim the same"
        )
    first = n - w if first is None else first
    if not 0 <= first <= n - w:
        raise ValueError(f"first is {first}; allowed are 0 to {n - w}")
    group = q_heads // kv_heads
    by_head = (queries.to(torch.float32) * scaling).view(w, kv_heads, group, dim)
    columns = torch.arange(n, device=keys.device)
    step = w if keys.is_cuda else max(1, PIECE // (group * n))
    for head in range(kv_heads):
        transposed = keys[:, head].to(torch.float32).T
        for begin in range(0, w, step):
            left = by_head[begin : begin + step, head]
            logits = (left.reshape(-1, dim) @ transposed).view(-1, group, n)
            # Only tokens after the piece's first query can be hidden from one of its queries.
            at = first + begin
            own = torch.arange(at, at + logits.shape[0], device=keys.device)
            hidden = columns[None, at + 1 :] > own[:, None]
            logits[..., at + 1 :].masked_fill_(hidden[:, None], -torch.inf)
            yield begin, logits.softmax(-1).sum(1)


def block_means(token_scores: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return the mean score of the tokens of each block: float32 [..., blocks].

    token_scores: [..., n]; bounds: `core.blocks.block_bounds` of the same n. Blocks differ by a
    token in size, so a mean compares them, as Equation 1 does. Raises ValueError when the bounds do
    not end at n.
    """
    if not bounds or bounds[-1] != token_scores.shape[-1]:
        raise ValueError(
            f"bounds end at {bounds[-1] if bounds else None}; token_scores has "
            f"{token_scores.shape[-1]} tokens"
        )
    edges = torch.tensor(list(bounds), dtype=torch.int64, device=token_scores.device)
    if len(edges) == edges[-1] + 1:
        return token_scores.to(torch.float32)  # one token a block
    total = torch.nn.functional.pad(token_scores.to(torch.float64).cumsum(-1), (1, 0))
    at = total[..., edges]
    return ((at[..., 1:] - at[..., :-1]) / (edges[1:] - edges[:-1])).to(torch.float32)
