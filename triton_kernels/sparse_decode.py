"""Attention of one decode step over gathered rows and the local tail.

Flash decoding: the rows of every KV head are split among programs, each keeps a running softmax;
a second kernel merges the parts by their log-sum-exp. Source: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    FLOATS,
    check,
    describe,
    dot_type,
    power_of_two,
    use_triton,
)

_BLOCK = 64  # rows a step of a program
_PROGRAMS_A_PROCESSOR = 4  # enough to keep a device busy while some wait for memory


def sparse_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_slots: Tensor,
    scaling: float,
) -> Tensor:
    """Return `[B, Hq, D]`: each query head's attention over its KV head's rows, in query's dtype.

    `query` is float `[B, Hq, D]`, Hq a multiple of H. `keys` and `values` `[B, H, k, D]` are the
    gathered rows; where `index` int64 `[B, H, k]` is negative a row is padding. The tail, the
    tokens made since, is read from the pools `tail_keys` and `tail_values` `[S, H, D]` by
    `tail_slots` int64 `[B, T]`, -1 padded. All of one dtype. A request with no row at all gives
    zeros. Does not synchronise with the device. Raises ValueError for wrong shapes, dtypes or
    devices.
    """
    check("query", query, ("B", "Hq", "D"), FLOATS)
    batch, query_heads, dim = query.shape
    check("index", index, (batch, "H", "k"), (torch.int64,), query)
    heads, k = index.shape[1:]
    if heads == 0 or query_heads % heads:
        raise ValueError(f"query is {describe(query)}; Hq must be a multiple of {heads}, index's H")
    for field, given in (("keys", keys), ("values", values)):
        check(field, given, (batch, heads, k, dim), (query.dtype,), query)
    check("tail_slots", tail_slots, (batch, "T"), (torch.int64,), query)
    check("tail_keys", tail_keys, ("S", heads, dim), (query.dtype,), query)
    check("tail_values", tail_values, tail_keys.shape, (query.dtype,), query)
    out = _dispatch.allocate(query.shape, query.dtype, query.device)
    tail, group = tail_slots.shape[1], query_heads // heads
    if out.numel() == 0 or k + tail == 0:
        return out.zero_()
    tensors = (query, keys, values, index, tail_keys, tail_values, tail_slots)
    if not use_triton(query):
        return _cpu_path(*tensors, scaling, out)
    rows = _split_rows(batch * heads, k + tail, query.device)
    splits = triton.cdiv(k, rows) + triton.cdiv(tail, rows)
    part = _dispatch.allocate((batch * heads, splits, group, dim), torch.float32, query.device)
    weight = _dispatch.allocate((batch * heads, splits, group), torch.float32, query.device)
    block_dim = power_of_two(dim, 16)
    _parts_kernel[(batch * heads, splits)](
        *(tensor.contiguous() for tensor in tensors),
        part,
        weight,
        heads,
        k,
        tail,
        tail_keys.shape[0],
        triton.cdiv(k, rows),
        scaling,
        GROUP=group,
        DIM=dim,
        BLOCK_GROUP=power_of_two(group, 16),
        BLOCK_DIM=block_dim,
        BLOCK=_BLOCK,
        ROWS=rows,
        DOT=dot_type(query.dtype),
    )
    _merge_kernel[(batch * heads * group,)](
        part, weight, out, splits, GROUP=group, DIM=dim, BLOCK_DIM=block_dim, STEP=16
    )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _split_rows(heads: int, rows: int, device: torch.device) -> int:
    """Return how many rows a program handles: a power of two, from the shapes alone."""
    processors = _processors(device) if device.type == "cuda" else 1
    programs = max(1, _PROGRAMS_A_PROCESSOR * processors // heads)
    return power_of_two(triton.cdiv(rows, programs), _BLOCK, 2048)


def _cpu_path(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_slots: Tensor,
    scaling: float,
    out: Tensor,
) -> Tensor:
    """SDPA a request, with a mask only where there is padding."""
    batch, query_heads = query.shape[:2]
    heads = index.shape[1]
    for b in range(batch):
        inside = (tail_slots[b] >= 0) & (tail_slots[b] < tail_keys.shape[0])
        slots = tail_slots[b][inside]
        padding = index[b] < 0
        all_keys = torch.cat((keys[b], tail_keys[slots].movedim(0, 1)), dim=1)
        all_values = torch.cat((values[b], tail_values[slots].movedim(0, 1)), dim=1)
        mask = None
        if padding.any():
            seen = torch.ones(heads, len(slots), dtype=torch.bool)
            mask = torch.cat((~padding, seen), dim=1)[None, :, None]
            mask = mask.repeat_interleave(query_heads // heads, dim=1)
            # What lies in padding may be anything, and 0 * NaN is NaN.
            all_keys[:, : keys.shape[2]].masked_fill_(padding[..., None], 0)
            all_values[:, : keys.shape[2]].masked_fill_(padding[..., None], 0)
        found = scaled_dot_product_attention(
            query[b, None, :, None],
            all_keys[None],
            all_values[None],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query_heads != heads,
        )[0, :, 0]
        if mask is not None:
            found = torch.where(mask[0].any(-1), found, 0)
        out[b] = found
    return out


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    row,
    present,
    scaling,
    top,
    total,
    sums,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add a block of rows to the running softmax (largest logit, sum of weights, sum of values)."""
    d = tl.arange(0, BLOCK_DIM)
    inside = present[:, None] & (d < DIM)[None, :]
    place = row[:, None] * DIM + d[None, :]
    k = tl.load(keys + place, mask=inside, other=0.0)
    v = tl.load(values + place, mask=inside, other=0.0)
    k, v = k.to(DOT), v.to(DOT)
    logit = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=tl.float32) * scaling
    logit = tl.where(present[None, :], logit, -1.0e30)
    higher = tl.maximum(top, tl.max(logit, 1))
    weight = tl.where(present[None, :], tl.exp(logit - higher[:, None]), 0.0)
    fade = tl.exp(top - higher)
    total = total * fade + tl.sum(weight, 1)
    product = tl.dot(weight.to(DOT), v, input_precision="ieee", out_dtype=tl.float32)
    return higher, total, sums * fade[:, None] + product


@triton.jit
def _parts_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    index,
    tail_keys,
    tail_values,
    tail_slots,
    part,
    weight,
    heads,
    k,
    tail,
    size,
    gathered_splits,
    scaling,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)  # request * heads + head
    split = tl.program_id(1)
    g = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + (pair * GROUP + g)[:, None] * DIM + d[None, :], mask=real, other=0.0)
    q = q.to(DOT)
    top = tl.full([BLOCK_GROUP], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    sums = tl.zeros([BLOCK_GROUP, BLOCK_DIM], dtype=tl.float32)
    if split < gathered_splits:
        first = split * ROWS
        for start in range(first, min(first + ROWS, k), BLOCK):
            column = start + tl.arange(0, BLOCK)
            entry = tl.load(index + pair * k + column, mask=column < k, other=-1)
            top, total, sums = _attend(
                q, keys, values, pair * k + column, entry >= 0, scaling, top, total, sums,
                DIM, BLOCK_DIM, DOT,
            )  # fmt: skip
    else:
        first = (split - gathered_splits) * ROWS
        for start in range(first, min(first + ROWS, tail), BLOCK):
            column = start + tl.arange(0, BLOCK)
            slot = tl.load(
                tail_slots + (pair // heads) * tail + column, mask=column < tail, other=-1
            )
            present = (slot >= 0) & (slot < size)
            top, total, sums = _attend(
                q, tail_keys, tail_values, slot * heads + pair % heads, present, scaling,
                top, total, sums, DIM, BLOCK_DIM, DOT,
            )  # fmt: skip
    place = (pair * tl.num_programs(1) + split) * GROUP + g
    some = total > 0
    share = tl.where(some, total, 1.0)
    # The log-sum-exp of the part; a part without rows weighs nothing.
    tl.store(weight + place, tl.where(some, top + tl.log(share), -1.0e30), mask=g < GROUP)
    tl.store(part + place[:, None] * DIM + d[None, :], sums / share[:, None], mask=real)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    part,
    weight,
    out,
    splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)  # request * query heads + query head
    pair, g = head // GROUP, head % GROUP
    d = tl.arange(0, BLOCK_DIM)
    top = tl.full([], -1.0e30, tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    sums = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    for start in range(0, splits, STEP):
        split = start + tl.arange(0, STEP)
        place = (pair * splits + split) * GROUP + g
        known = split < splits
        lse = tl.load(weight + place, mask=known, other=-1.0e30)
        rows = tl.load(
            part + place[:, None] * DIM + d[None, :],
            mask=known[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(lse, 0))
        share = tl.where(lse > -1.0e29, tl.exp(lse - higher), 0.0)
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(share, 0)
        sums = sums * fade + tl.sum(share[:, None] * rows, 0)
        top = higher
    result = sums / tl.where(total > 0, total, 1.0)
    tl.store(out + head * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)
