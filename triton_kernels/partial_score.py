"""InfiniGen's score of every key: the attention that the query heads give it, on some columns only.

Two launches: one for the logits and each block's largest and sum, one that turns them into weights
and adds the query heads of a KV head up. Both scan all blocks in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    FLOATS,
    check,
    check_slots,
    dot_type,
    power_of_two,
    use_triton,
)


def partial_score(
    query: Tensor, keys: Tensor, scaling: float, slots: Tensor | None = None
) -> Tensor:
    """Return `sum_g softmax_n(scaling * query_g . key_n)`, float32 `[B, H, N]`.

    `query` is float `[B, H, G, P]`: the G query heads of each KV head, P columns of each; `keys`
    `[S, H, P]` of the same dtype holds the same columns. `slots` int64 `[B, N]` says which rows of
    it belong to a request; a slot outside `[0, S)` takes no part and scores -inf. Without it the
    keys are those of the one request, N = S. Raises ValueError for wrong shapes, dtypes or devices.
    """
    check("query", query, ("B", "H", "G", "P"), FLOATS)
    batch, heads, group, dim = query.shape
    check("keys", keys, ("S", heads, dim), (query.dtype,), query)
    length = check_slots(slots, batch, keys)
    out = _dispatch.allocate((batch, heads, length), torch.float32, query.device)
    if out.numel() == 0:
        return out
    if not use_triton(query):
        for b in range(batch):
            out[b] = _cpu_path(query[b], keys, scaling, None if slots is None else slots[b])
        return out
    slots = None if slots is None else slots.contiguous()
    block = power_of_two(length, 16, 128)
    blocks = triton.cdiv(length, block)
    device = query.device
    logits = _dispatch.allocate((batch, heads, group, length), torch.float32, device)
    largest = _dispatch.allocate((batch, heads, group, blocks), torch.float32, device)
    sums = _dispatch.allocate((batch, heads, group, blocks), torch.float32, device)
    sizes = {"GROUP": group, "BLOCK_GROUP": power_of_two(group, 16), "BLOCK": block}
    _logits_kernel[(batch * heads, blocks)](
        query.contiguous(),
        keys.contiguous(),
        slots,
        logits,
        largest,
        sums,
        heads,
        length,
        keys.shape[0],
        scaling,
        DIM=dim,
        BLOCK_DIM=power_of_two(dim, 16),
        DOT=dot_type(query.dtype),
        **sizes,
    )
    _weights_kernel[(batch * heads, blocks)](
        logits, largest, sums, out, length, blocks, STEP=power_of_two(blocks, 16, 64), **sizes
    )
    return out


def _cpu_path(query: Tensor, keys: Tensor, scaling: float, slots: Tensor | None) -> Tensor:
    outside = None
    if slots is not None:
        if keys.shape[0] == 0:
            return torch.full((query.shape[0], slots.shape[0]), -torch.inf)
        outside = (slots < 0) | (slots >= keys.shape[0])
        keys = keys.index_select(0, slots.clamp(0, keys.shape[0] - 1))
    logits = torch.matmul(query.float() * scaling, keys.float().permute(1, 2, 0))
    if outside is None:
        return logits.softmax(-1).sum(1)
    score = logits.masked_fill_(outside, -torch.inf).softmax(-1).sum(1)
    return score.masked_fill_(outside, -torch.inf)


@triton.jit
def _logits_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    slots,
    logits,
    largest,
    sums,
    heads,
    length,
    size,
    scaling,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    g = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    column = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    if slots is not None:
        slot = tl.load(slots + (row // heads) * length + column, mask=inside, other=-1)
    else:
        slot = column
    present = inside & (slot >= 0) & (slot < size)
    q = tl.load(
        query + (row * GROUP + g)[:, None] * DIM + d[None, :],
        mask=(g < GROUP)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    k = tl.load(
        keys + (slot * heads + row % heads)[None, :] * DIM + d[:, None],
        mask=present[None, :] & (d < DIM)[:, None],
        other=0.0,
    )
    logit = tl.dot(q.to(DOT), k.to(DOT), input_precision="ieee", out_dtype=tl.float32) * scaling
    logit = tl.where(present[None, :], logit, float("-inf"))
    real = (g < GROUP)[:, None]
    tl.store(
        logits + (row * GROUP + g)[:, None] * length + column[None, :],
        logit,
        mask=real & inside[None, :],
    )
    # A block without any key has no largest logit; any finite number does in its place.
    top = tl.maximum(tl.max(logit, 1), -1.0e30)
    place = (row * GROUP + g) * tl.num_programs(1) + block
    tl.store(largest + place, top, mask=g < GROUP)
    tl.store(sums + place, tl.sum(tl.exp(logit - top[:, None]), 1), mask=g < GROUP)


@triton.jit
def _weights_kernel(  # type: ignore[no-untyped-def]
    logits,
    largest,
    sums,
    out,
    length,
    blocks,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_GROUP)
    real = (g < GROUP)[:, None]
    top = tl.full([BLOCK_GROUP], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    for start in range(0, blocks, STEP):
        block = start + tl.arange(0, STEP)
        place = (row * GROUP + g)[:, None] * blocks + block[None, :]
        known = real & (block < blocks)[None, :]
        tops = tl.load(largest + place, mask=known, other=-1.0e30)
        parts = tl.load(sums + place, mask=known, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 1))
        total = total * tl.exp(top - higher) + tl.sum(parts * tl.exp(tops - higher[:, None]), 1)
        top = higher
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    logit = tl.load(
        logits + (row * GROUP + g)[:, None] * length + column[None, :],
        mask=real & inside[None, :],
        other=float("-inf"),
    )
    weight = tl.exp(logit - top[:, None]) / tl.where(total > 0, total, 1.0)[:, None]
    score = tl.sum(weight, 0)
    score = tl.where(tl.max(logit, 0) == float("-inf"), float("-inf"), score)
    tl.store(out + row * length + column, score, mask=inside)
